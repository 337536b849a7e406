// device.cuh on a CPU: every thread of the grid is a fiber, and warps take turns in a random order, so that a
// missing barrier shows as a wrong result and a wrong one as a grid that cannot go on.

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#ifndef CLUSTER
#define CLUSTER 1
#endif
typedef uint32_t u32;
typedef unsigned long long u64;
#define DEVICE static inline
#define CALLED static
#define DEVICE_MEMBER inline
#define COMPILE_TIME constexpr
#define KERNEL(threads) static void
#define CLUSTERED_KERNEL(threads, size) static void
#define SHARED_MEMORY(name) char* name = host::self->cta->shared

#if HALF
typedef unsigned short T;
#else
typedef float T;
#endif

struct alignas(16) Vec {
  u32 x, y, z, w;
};

namespace host {

struct Meeting {
  int came = 0;
  u32 round = 0;
};

struct Warp {
  Meeting meeting;
  u64 given[2][32][12];
};
struct Cta {
  char* shared;
  int id, threads;
  Meeting all, part;
  std::vector<Warp> warps;
};
struct Fiber {
  ucontext_t first;
  jmp_buf here;
  Cta* cta;
  int thread;
  bool started = false, ended = false;
};

static Fiber* self;
static jmp_buf scheduler;
static bool moved;  // since the scheduler last looked, some fiber went on

static void yield() {
  if (!_setjmp(self->here)) _longjmp(scheduler, 1);
}

static void meet(Meeting& m, int count) {
  const u32 round = m.round;
  moved = true;
  if (++m.came == count) m.came = 0, m.round++;
  while (m.round == round) yield();
  moved = true;
}

static Warp& warp() { return self->cta->warps[self->thread >> 5]; }

// All lanes of a warp give words, and each sees all of them.
static u64 (*exchange(std::initializer_list<u64> words))[12] {
  Warp& w = warp();
  auto* given = w.given[w.meeting.round & 1];
  int i = 0;
  for (u64 word : words) given[self->thread & 31][i++] = word;
  meet(w.meeting, 32);
  return given;
}

static float half(u32 x) {
  x <<= 16;
  float f;
  memcpy(&f, &x, 4);
  return f;
}

}  // namespace host

DEVICE float bits_to_float(u32 x) {
  float f;
  memcpy(&f, &x, 4);
  return f;
}
DEVICE u32 float_to_bits(float f) {
  u32 x;
  memcpy(&x, &f, 4);
  return x;
}
DEVICE u32 to_half(float f) {
  const u32 x = float_to_bits(f);
  if (f != f) return 0x7fff;
  return (x + 0x7fff + ((x >> 16) & 1)) >> 16;
}
DEVICE u32 pack_half(float low, float high) { return to_half(low) | to_half(high) << 16; }
DEVICE float rsqrtf(float x) { return 1.f / std::sqrt(x); }

DEVICE int thread_id() { return host::self->thread; }
DEVICE int thread_anew() { return host::self->thread; }
DEVICE int lane_id() { return host::self->thread & 31; }
DEVICE int warp_id() { return host::self->thread >> 5; }
DEVICE int cta_id() { return host::self->cta->id; }

DEVICE float shuffle(float x, int lane) {
  return bits_to_float((u32)host::exchange({float_to_bits(x)})[lane][0]);
}
DEVICE float shuffle_xor(float x, int mask) { return shuffle(x, lane_id() ^ mask); }
DEVICE u32 warp_sum(u32 x) {
  auto* given = host::exchange({x});
  u32 total = 0;
  for (int i = 0; i < 32; i++) total += (u32)given[i][0];
  return total;
}
DEVICE void warp_sync() { host::exchange({}); }
DEVICE void cta_sync() { host::meet(host::self->cta->all, host::self->cta->threads); }
DEVICE void part_sync(int threads) { host::meet(host::self->cta->part, threads); }

DEVICE Vec load16(const void* p) {
  if ((uintptr_t)p & 15) fprintf(stderr, "16 bytes at an odd address\n"), abort();
  return *(const Vec*)p;
}
DEVICE void load8(const void* p, u32* v) {
  if ((uintptr_t)p & 7) fprintf(stderr, "8 bytes at an odd address\n"), abort();
  memcpy(v, p, 8);
}
DEVICE Vec watch16(const void* p) { return load16(p); }
DEVICE u32 load4(const void* p) {
  u32 v;
  memcpy(&v, p, 4);
  return v;
}
DEVICE u32 watch4(const void* p) { return load4(p); }
DEVICE void show4(void* p, u32 v) { memcpy(p, &v, 4); }
DEVICE void fence() {}
DEVICE unsigned short load2(const void* p) {
  unsigned short v;
  memcpy(&v, p, 2);
  return v;
}
DEVICE Vec load16_near(const void* p) { return load16(p); }
DEVICE Vec load16_constant(const void* p) { return load16(p); }
DEVICE Vec load16_shared(const void* p) { return load16(p); }
DEVICE void prefetch(const void* p) {}

DEVICE void mma(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  auto* given = host::exchange({a0, a1, a2, a3, b0, b1});
  const int g = lane_id() >> 2, t = lane_id() & 3;
  auto value = [&](int lane, int word, int which) {
    return host::half((u32)given[lane][word] >> (16 * which) & 0xffff);
  };
  for (int k = 0; k < 16; k++) {
    const int quarter = (k & 7) >> 1, which = k & 1, far = k >> 3;
    for (int j = 0; j < 4; j++) {
      const int row = g, below = j >> 1, column = 2 * t + (j & 1);
      d[j] += value(row * 4 + quarter, 2 * far + below, which) * value(column * 4 + quarter, 4 + far, which);
    }
  }
}

DEVICE void multiply_exactly(float* d, const Vec& low, const Vec& high, const Vec& b) {
  auto* given =
      host::exchange({low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w, b.x, b.y, b.z, b.w});
  const int g = lane_id() >> 2, t = lane_id() & 3;
  auto value = [&](int lane, int word) { return bits_to_float((u32)given[lane][word]); };
  for (int i = 0; i < 4; i++)
    for (int quarter = 0; quarter < 4; quarter++)
      for (int j = 0; j < 4; j++)
        d[j] += value(g * 4 + quarter, (j >> 1) * 4 + i) * value(8 * t + 4 * (j & 1) + quarter, 8 + i);
}

namespace host {
struct Barrier {
  uint16_t phase;
  int16_t wanted, missing;  // arrivals
  int16_t words;  // of four bytes that are to come; below zero if they came before they were expected
};
static Barrier* barrier(u64* b) { return (Barrier*)b; }
static void change(u64* b, int arrivals, int bytes) {
  Barrier* at = barrier(b);
  at->missing -= arrivals, at->words += bytes / 4;
  if (at->missing < 0) fprintf(stderr, "more arrivals than a barrier waits for\n"), abort();
  if (at->missing == 0 && at->words == 0) at->missing = at->wanted, at->phase ^= 1;
  moved = true;
}
}  // namespace host
DEVICE void barrier_init(u64* b, int count) { *host::barrier(b) = {0, (int16_t)count, (int16_t)count, 0}; }
DEVICE void barrier_init_done() {}
DEVICE void barrier_arrive(u64* b) { host::change(b, 1, 0); }
DEVICE void barrier_expect(u64* b, u32 bytes) { host::change(b, 1, bytes); }
DEVICE void barrier_wait(u64* b, u32 parity) {
  while (host::barrier(b)->phase == parity) host::yield();
  host::moved = true;
}
DEVICE void fetch(void* to, const void* from, u32 bytes, u64* barrier) {
  if (((uintptr_t)to | (uintptr_t)from | bytes) & 15) fprintf(stderr, "a copy is not aligned\n"), abort();
  memcpy(to, from, bytes);
  barrier_arrive(barrier);
}

typedef char* Far;
DEVICE Far far_address(const void* p, int rank) {
  host::Cta* mine = host::self->cta;
  return mine[mine->id / CLUSTER * CLUSTER + rank - mine->id].shared + ((const char*)p - mine->shared);
}
DEVICE void send_far(Far to, const float* v, Far barrier) {
  if ((uintptr_t)to & 15) fprintf(stderr, "16 bytes at an odd address\n"), abort();
  memcpy(to, v, 16);
  host::change((u64*)barrier, 0, -16);
}
DEVICE void send_far(Far to, float v, Far barrier) {
  *(float*)to = v;
  host::change((u64*)barrier, 0, -4);
}
DEVICE void barrier_arrive_far(Far barrier) { barrier_arrive((u64*)barrier); }
DEVICE void barrier_wait_far(u64* barrier, u32 parity) { barrier_wait(barrier, parity); }
DEVICE void cluster_sync() {
  static std::vector<host::Meeting> all;
  if (all.empty()) all.resize(GRID / CLUSTER);
  host::meet(all[cta_id() / CLUSTER], CLUSTER * host::self->cta->threads);
}

DEVICE u32 load_acquire(const u32* p) { return *(const volatile u32*)p; }
DEVICE void add_release(u32* p, u32 v) {
  *p += v;
  host::moved = true;
}
DEVICE void idle() { host::yield(); }

#define RUN(kernel, threads, shared_bytes)                           \
  static const void* arguments;                                      \
  static void enter() {                                              \
    kernel(*(const Args*)arguments);                                 \
    host::self->ended = host::moved = true;                          \
    host::yield();                                                   \
  }                                                                  \
  extern "C" int run(const void* a, unsigned seed) {                 \
    arguments = a;                                                   \
    return host::run_grid(enter, GRID, threads, shared_bytes, seed); \
  }

namespace host {
// -> 0, or 1 if nobody can go on
static int run_grid(void (*enter)(), int grid, int threads, size_t shared_bytes, unsigned seed) {
  constexpr size_t stack = 1 << 16;
  std::vector<Cta> ctas(grid);
  std::vector<Fiber> fibers((size_t)grid * threads);
  char* stacks = (char*)malloc(fibers.size() * stack);
  for (int c = 0; c < grid; c++) {
    ctas[c].id = c, ctas[c].threads = threads;
    ctas[c].warps.resize(threads / 32);
    ctas[c].shared = (char*)aligned_alloc(128, (shared_bytes + 127) / 128 * 128);
    memset(ctas[c].shared, 0xff, shared_bytes);  // NaN
  }
  for (size_t i = 0; i < fibers.size(); i++) {
    fibers[i].cta = &ctas[i / threads], fibers[i].thread = (int)(i % threads);
    getcontext(&fibers[i].first);
    fibers[i].first.uc_stack.ss_sp = stacks + i * stack, fibers[i].first.uc_stack.ss_size = stack;
    makecontext(&fibers[i].first, enter, 0);
  }
  const size_t warps = fibers.size() / 32;
  size_t left = fibers.size();
  const unsigned seeded = seed;
  bool stuck = false;
  int quiet = 0;  // turns in which nobody got on: some find out only in the next what another has written
  static size_t w, lane, offset, round;  // survive the jumps
  round = 0;
  static bool any;
  while (left && !stuck) {
    any = false;
    round++;
    seed = seed * 1664525u + 1013904223u;
    offset = seed >> 8;
    for (w = 0; w < warps; w++) {
      const size_t at = (w * ((seed & 1) ? 1 : warps - 1) + offset) % warps;
      // Some programs rest for a while, so that others get as far ahead of them as they may.
      if (((at / (threads / 32) + 1) * 2654435761u ^ (round / 8) * 40503u * (seeded | 1)) % 5 == 0) continue;
      do {
        moved = false;
        for (lane = 0; lane < 32; lane++) {
          Fiber& f = fibers[at * 32 + lane];
          if (f.ended) continue;
          self = &f;
          if (!_setjmp(scheduler)) {
            if (f.started) _longjmp(f.here, 1);
            f.started = true;
            setcontext(&f.first);
          }
          if (self->ended) left--;
        }
        any |= moved;
      } while (moved);
    }
    quiet = any ? 0 : quiet + 1;
    stuck = quiet > 200;
  }
  for (auto& c : ctas) free(c.shared);
  free(stacks);
  return stuck;
}
}  // namespace host
