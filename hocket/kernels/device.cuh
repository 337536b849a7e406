// What kernels that stay need of the machine: sm_90 instructions by their PTX names (PTX ISA 8.6). No header
// is included, so that NVRTC needs no include path. tests/kernels/host.h gives the same functions on a CPU.

typedef unsigned int u32;
typedef unsigned long long u64;
#define DEVICE static __device__ __forceinline__
#define CALLED static __device__ __noinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define COMPILE_TIME __device__ constexpr
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
#define CLUSTERED_KERNEL(threads, size) \
  extern "C" __global__ void __cluster_dims__(size, 1, 1) __launch_bounds__(threads, 1)
#define SHARED_MEMORY(name) extern __shared__ __align__(128) char name[]

#if HALF
typedef unsigned short T;  // the bits of a bfloat16
#else
typedef float T;
#endif

struct __align__(16) Vec {
  u32 x, y, z, w;
};

#define INFINITY __int_as_float(0x7f800000)
DEVICE float bits_to_float(u32 x) { return __uint_as_float(x); }
DEVICE u32 float_to_bits(float x) { return __float_as_uint(x); }

// Two floats to two bfloat16, rounded to nearest even; `low` in the lower half.
DEVICE u32 pack_half(float low, float high) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

DEVICE int thread_id() { return threadIdx.x; }
// The same, not known to be: what is worked out from it is not kept in registers for the next time.
DEVICE int thread_anew() {
  int id;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(id));
  return id;
}
DEVICE int lane_id() { return threadIdx.x & 31; }
DEVICE int warp_id() { return threadIdx.x >> 5; }
DEVICE int cta_id() { return blockIdx.x; }

DEVICE float shuffle(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE u32 warp_sum(u32 x) { return __reduce_add_sync(0xffffffffu, x); }
DEVICE void warp_sync() { __syncwarp(); }
DEVICE void cta_sync() { __syncthreads(); }
DEVICE void part_sync(int threads) { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }

// Past the first-level cache, which other multiprocessors' stores do not reach.
DEVICE Vec load16(const void* p) {
  Vec v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
DEVICE void load8(const void* p, u32* v) {
  asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "l"(p) : "memory");
}
// Words that one multiprocessor may write while another looks at them; each speaks for itself alone.
DEVICE Vec watch16(const void* p) {
  Vec v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
DEVICE u32 watch4(const void* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void show4(void* p, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
DEVICE u32 load4(const void* p) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE unsigned short load2(const void* p) {
  unsigned short v;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return v;
}
// Through the first-level cache: for what several warps of a program read at the same time, after a meeting.
DEVICE Vec load16_near(const void* p) {
  Vec v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
DEVICE Vec load16_constant(const void* p) {
  Vec v;
  asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
DEVICE Vec load16_shared(const void* p) { return *(const Vec*)p; }
DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// d += a b over 16 values of k, bfloat16 in, fp32 accumulated. Fragments as PTX lays them out.
DEVICE void mma(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same over 16 values of k in fp32, lanes holding 16 bytes of rows g and g + 8 and of column g, for
// comparing codes with the twin; nobody waits for it.
DEVICE void multiply_exactly(float* d, const Vec& low, const Vec& high, const Vec& b) {
  const int g = lane_id() >> 2, t = lane_id() & 3;
  const u32 lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w},
            bs[4] = {b.x, b.y, b.z, b.w};
  for (int i = 0; i < 4; i++)
    for (int quarter = 0; quarter < 4; quarter++) {
      const float a0 = shuffle(bits_to_float(lows[i]), g * 4 + quarter),
                  a1 = shuffle(bits_to_float(highs[i]), g * 4 + quarter);
      const float b0 = shuffle(bits_to_float(bs[i]), 8 * t + quarter),
                  b1 = shuffle(bits_to_float(bs[i]), 8 * t + 4 + quarter);
      d[0] += a0 * b0, d[1] += a0 * b1, d[2] += a1 * b0, d[3] += a1 * b1;
    }
}

// --- barriers in shared memory, and copies that complete on them ---

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void barrier_init(u64* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
               : "memory");
}
DEVICE void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Also waits for so many bytes that others will send.
DEVICE void barrier_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
DEVICE void barrier_wait(u64* barrier, u32 parity) {
  u32 done = 0;
  while (!done)
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
}
// Bring `bytes` (a multiple of 16) to shared memory; the barrier's phase ends when they are there.
DEVICE void fetch(void* to, const void* from, u32 bytes, u64* barrier) {
  u32 at = shared_address(barrier);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(at)
      : "memory");
}

// --- programs of a cluster write into each other's shared memory ---

typedef u32 Far;  // an address there
DEVICE Far far_address(const void* p, int rank) {
  Far at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(p)), "r"(rank));
  return at;
}
// The same, and the barrier beside it, which expects so many bytes, knows when they have come.
DEVICE void send_far(Far to, const float* v, Far barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier)
      : "memory");
}
DEVICE void send_far(Far to, float v, Far barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(v),
               "r"(barrier)
               : "memory");
}
DEVICE void barrier_arrive_far(Far barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void barrier_wait_far(u64* barrier, u32 parity) {  // for what others of the cluster wrote
  u32 done = 0;
  while (!done)
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
}
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// --- the whole grid ---

DEVICE u32 load_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void add_release(u32* p, u32 v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE void idle() {}
