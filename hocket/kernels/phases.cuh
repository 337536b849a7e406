// Decoder blocks in kernels that stay: one program a multiprocessor, all resident, many layers in one launch.
//
// A phase is a product or an attention step; between phases the whole grid meets (`meet`). In every program
// one warp brings weights, which depend on nothing, through a ring in shared memory, phase after phase,
// without regard to the meetings; WARPS others compute. So memory streams while the chain of small dependent
// phases runs, and a launch takes the longer of the two.
//
// A product splits its features over programs, eight (the matrix unit's columns) at a time, and k over the
// warps of a program. Activations are the matrix unit's rows: 16 at a time, from L2 straight to registers.
// Any order of k will do if both sides use it, so a lane's 16 bytes of a row are its fragments as they lie.
//
// weights of one message of a phase:  [warp][k block of the warp][tile of 8 features][lane][16 bytes]
// a k block is 64 bytes of a row; lane 4 g + t holds bytes 16 t ... 16 t + 15 of feature g. In half precision
// the 32-bit words a, b, c, d of a lane in one tile and e, f, g, h in the next lie as a e b f and c g d h.

#define COMPUTE (WARPS * 32)
#define VALUES (16 / (int)sizeof(T))  // of a lane's 16 bytes
#define BLOCK_K (4 * VALUES)
#define GROUP (HEADS / KV)
#define QKV_N ((HEADS + 2 * KV) * HEAD)

#define EACH (4 / (int)sizeof(T))  // values of a 32-bit word

// How phases hand rows on. MARKED: a word of values and a mark that says which phase wrote it lie together, a
// store of eight bytes, and whoever reads waits for the mark. Nobody meets, but rows are twice as wide: for
// few of them. Else rows lie as they are, and the grid meets.
#ifndef MARKED
#define MARKED 0
#endif
#if MARKED
struct alignas(8) Cell {
  u32 word, mark;
};
#else
typedef u32 Cell;
#endif
#define CHUNK (MARKED ? 8 : 16)  // rows that a product takes at a time

// Measuring: what a launch costs without its meetings, or without its weights. Results are wrong then.
#ifndef NO_MEETINGS
#define NO_MEETINGS 0
#endif
#ifndef NO_WEIGHTS
#define NO_WEIGHTS 0
#endif
#ifndef STAMPS
#define STAMPS 0
#endif
#if STAMPS  // cycles at which the first warp of each program passes each point of one layer
static __shared__ long long* stamps;
#define STAMP(n) \
  if (stamping && thread_id() == 0) stamps[cta_id() * 32 + (n)] = clock64()
#else
#define STAMP(n)
#endif
#define STAMP_IN(n)                                         \
  {                                                         \
    [[maybe_unused]] const bool stamping = STAMPS && stamp; \
    STAMP(stamp + (n));                                     \
  }

// --- numbers ---

#if HALF
DEVICE float wide(T x) { return bits_to_float((u32)x << 16); }
DEVICE T narrow(float x) { return (T)pack_half(x, 0.f); }
DEVICE T load_value(const T* p) { return load2(p); }
#else
DEVICE float wide(T x) { return x; }
DEVICE T narrow(float x) { return x; }
DEVICE T load_value(const T* p) { return bits_to_float(load4(p)); }
#endif
DEVICE float rounded(float x) { return wide(narrow(x)); }

// One 32-bit word holds two values, or one.
#if HALF
DEVICE float first_of(u32 word) { return bits_to_float(word << 16); }
DEVICE float second_of(u32 word) { return bits_to_float(word & 0xffff0000u); }
DEVICE float square(u32 w) { return first_of(w) * first_of(w) + second_of(w) * second_of(w); }
#else
DEVICE float first_of(u32 word) { return bits_to_float(word); }
DEVICE float second_of(u32 word) { return 0.f; }
DEVICE float square(u32 w) { return bits_to_float(w) * bits_to_float(w); }
#endif

DEVICE float square(const Vec& v) { return square(v.x) + square(v.y) + square(v.z) + square(v.w); }

#if HALF
DEVICE u32 word_of(const float* v) { return pack_half(v[0], v[1]); }
#else
DEVICE u32 word_of(const float* v) { return float_to_bits(v[0]); }
#endif
DEVICE void values_of(u32 word, float* v) {
  v[0] = first_of(word);
  if constexpr (EACH == 2) v[1] = second_of(word);
}

// --- rows between phases ---

#if MARKED
DEVICE void put(Cell* at, u32 word, u32 mark) { store8(at, word, mark); }
DEVICE void put4(Cell* at, const Vec& v, u32 mark) {
  store16(at, v.x, mark, v.y, mark);
  store16(at + 2, v.z, mark, v.w, mark);
}
DEVICE u32 present(const Cell* at) { return load4(at); }  // of a word that is known to be there
template <int N>
DEVICE void take(const Cell* const* at, u32* words, u32 mark) {
  u32 got[N][2];
#pragma unroll
  for (int i = 0; i < N; i++) watch8(at[i], got[i]);
  while (true) {
    bool any = false;
#pragma unroll
    for (int i = 0; i < N; i++) any |= got[i][1] != mark;
    if (!any) break;
    idle();
#pragma unroll
    for (int i = 0; i < N; i++)
      if (got[i][1] != mark) watch8(at[i], got[i]);
  }
#pragma unroll
  for (int i = 0; i < N; i++) words[i] = got[i][0];
  warp_sync();
}
#else
DEVICE void put(Cell* at, u32 word, u32) { *at = word; }
DEVICE void put4(Cell* at, const Vec& v, u32) { *(Vec*)at = v; }
DEVICE u32 present(const Cell* at) { return load4(at); }
template <int N>
DEVICE void take(const Cell* const* at, u32* words, u32) {
#pragma unroll
  for (int i = 0; i < N; i++) words[i] = load4(at[i]);
}
#endif

// One k block. Eight features: activations are the unit's rows (low: g, high: g + 8), weights its columns.
DEVICE void multiply(float* sum, const Vec& low, const Vec& high, const Vec& w) {
#if HALF
  mma(sum, low.x, high.x, low.y, high.y, w.x, w.y);
  mma(sum, low.z, high.z, low.w, high.w, w.z, w.w);
#else
  multiply_exactly(sum, low, high, w);
#endif
}

// Sixteen features: weights are the rows, in fragments as they lie, and eight activations the columns.
DEVICE void multiply(float* sum, const Vec& first, const Vec& second, const Vec& x, int) {
#if HALF
  mma(sum, first.x, first.y, first.z, first.w, x.x, x.y);
  mma(sum, second.x, second.y, second.z, second.w, x.z, x.w);
#else
  multiply_exactly(sum, first, second, x);
#endif
}

// --- shared memory ---

COMPILE_TIME int most(int a, int b) { return a > b ? a : b; }
COMPILE_TIME int least(int a, int b) { return a < b ? a : b; }
COMPILE_TIME int ceil_div(int a, int b) { return (a + b - 1) / b; }
// k blocks a warp takes of one message: the most that fit and divide its share
COMPILE_TIME int fitting(int share, int room) {
  int best = 1;
  for (int r = 1; r <= share && r <= room; r++)
    if (share % r == 0) best = r;
  return best;
}

// A product [rows, K] x [N, K]; with TWO, two of them (gate and up) side by side.
template <int N, int K_, bool TWO>
struct Product {
  static constexpr int K = K_;
  static constexpr int tiles = ceil_div(N / 8, GRID);  // of 8 features, in one program
  static constexpr int columns = TWO ? 2 * tiles : tiles;
  static constexpr int pairs = columns / 2;  // of tiles, multiplied together; an odd one is left over
  static constexpr int share = ceil_div(K / BLOCK_K, WARPS);  // k blocks of a warp
  static constexpr int depth = fitting(share, SLOT / (WARPS * columns * 512));
  static constexpr int messages = share / depth;
  static constexpr int bytes = WARPS * depth * columns * 512;  // of one message
  static constexpr int pitch = 8 * (columns | 1);              // of a row of sums; keeps banks apart
  static constexpr int n = N;
  static_assert(bytes <= SLOT, "a message is larger than its slot");
  static_assert(N % 8 == 0 && K % BLOCK_K == 0, "sizes are whole tiles");
};
typedef Product<QKV_N, D, false> Qkv;
typedef Product<D, HEADS * HEAD, false> Out;
typedef Product<F, D, true> Gate;
typedef Product<D, F, false> Down;
#ifdef VOCAB
typedef Product<VOCAB, D, false> Head;
constexpr int HEAD_PITCH = Head::pitch;
#else
constexpr int HEAD_PITCH = 0;
#endif
constexpr int PITCH = most(most(most(Qkv::pitch, Out::pitch), most(Gate::pitch, Down::pitch)), HEAD_PITCH);
constexpr long long BLOCK_BYTES =
    (long long)GRID * (Qkv::bytes * Qkv::messages + Out::bytes * Out::messages +
                       Gate::bytes * Gate::messages + Down::bytes * Down::messages);

struct Shared {
  char ring[SLOTS][SLOT];
  float sums[WARPS * 16 * PITCH];
  float squares[WARPS * 16];
  float best[WARPS];
  u32 token[WARPS];
  u32 count[2][WARPS];
  u64 full[SLOTS], empty[SLOTS];
  Vec constants[CONSTANTS /
                16];  // what a kernel would else read anew: weights streaming by leave nothing in L2
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host thinks that less shared memory is needed");

// --- weights come in ---

template <class P>
DEVICE void send(Shared& s, int& message, const char*& from) {
  const char* mine = from + (long long)cta_id() * (P::bytes * P::messages);
#pragma unroll 1
  for (int m = 0; m < P::messages; m++, message++) {
    const int slot = message % SLOTS;
    barrier_wait(&s.empty[slot], ((message / SLOTS) & 1) ^ 1);
    fetch(s.ring[slot], mine + m * P::bytes, P::bytes, &s.full[slot]);
  }
  from += (long long)GRID * (P::bytes * P::messages);
}

DEVICE void send_block(Shared& s, int& message, const char*& from) {
  send<Qkv>(s, message, from);
  send<Out>(s, message, from);
  send<Gate>(s, message, from);
  send<Down>(s, message, from);
}

DEVICE void begin(Shared& s) {
  if (thread_id() == 0) {
    for (int i = 0; i < SLOTS; i++) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], WARPS);
    barrier_init_done();
  }
  cta_sync();
}

// --- the grid meets: the top bit of a counter turns when the last program has come ---

// Called, not copied: what a layer executes must stay in the instruction cache.
CALLED void meet(u32* meeting, u32& turn) {
  if (MARKED) return;
  part_sync(COMPUTE);
  if (NO_MEETINGS) return;
  if (thread_id() == 0) {
    add_release(meeting, cta_id() == 0 ? 0x80000000u - (GRID - 1) : 1u);
    while (((load_acquire(meeting) ^ turn) & 0x80000000u) == 0) idle();
    turn ^= 0x80000000u;
  }
  part_sync(COMPUTE);
}

// --- a product ---

// store(row, feature, sums, seconds) for each word of results; `seconds` are of the up half of a gated
// product. Row i of the product is row i * step + first of `in`. NORM: rows are scaled to unit root mean
// square; the norm's weight is in the product's, so the scale can wait until the sums are there.
template <class P, bool NORM, class Store>
DEVICE void product(Shared& s, int& message, const Cell* in, u32 mark, int step, int first, int rows,
                    float eps, Store store, int stamp = 0) {
  const int lane = lane_id(), warp = warp_id(), g = lane >> 2, t = lane & 3;
  constexpr int ahead =
      least(P::messages, most(1, 12 / P::depth));  // messages whose rows are on their way or here
  constexpr int held = ahead * P::depth;
  const auto place = [&](int base, int q) {
    return in + ((base + g) * step + first) * (P::K / EACH) + warp * (BLOCK_K / EACH) + t * 4 +
           q * (WARPS * BLOCK_K / EACH);
  };
  const auto inside = [&](int q) {
    return q * WARPS + WARPS <= P::K / BLOCK_K || q * WARPS + warp < P::K / BLOCK_K;
  };
#if MARKED
  static_assert(ahead == P::messages, "all of a row is asked for at once");
  Vec low[held], high[1];
  const auto bring = [&](int base) {
    Vec even[held], odd[held];
    const bool there = base + g < rows;
#pragma unroll
    for (int q = 0; q < held; q++) {
      even[q] = odd[q] = Vec{0, mark, 0, mark};
      if (there && inside(q)) even[q] = watch16(place(base, q)), odd[q] = watch16(place(base, q) + 2);
    }
    const auto missing = [&](int q) {
      return even[q].y != mark || even[q].w != mark || odd[q].y != mark || odd[q].w != mark;
    };
#pragma unroll
    for (int q = 0; q < held; q++) {
      while (missing(q)) {
        idle();
        even[q] = watch16(place(base, q)), odd[q] = watch16(place(base, q) + 2);
      }
      low[q] = Vec{even[q].x, even[q].z, odd[q].x, odd[q].z};
    }
    warp_sync();
  };
#else
  Vec low[held], high[held];
  const auto ask = [&](int base, int q, Vec& a, Vec& b) {
    a = b = Vec{0, 0, 0, 0};
    if (inside(q)) {
      if (base + g < rows) a = load16(place(base, q));
      if (base + g + 8 < rows) b = load16(place(base, q) + 8 * step * (P::K / EACH));
    }
  };
#pragma unroll
  for (int q = 0; q < held; q++) ask(0, q, low[q], high[q]);
#endif
#pragma unroll 1
  for (int base = 0; base < rows; base += CHUNK) {
    const bool last = base + CHUNK >= rows, many = CHUNK > 8 && rows - base > 8;
#if MARKED
    bring(base);
#endif
    STAMP_IN(0);
    float sum[P::pairs + 1][2][4] = {}, rest[4] = {}, squares = 0, more = 0;
#pragma unroll
    for (int m = 0; m < P::messages; m++) {
      const int slot = (message + m) % SLOTS;
      if (!NO_WEIGHTS) barrier_wait(&s.full[slot], ((message + m) / SLOTS) & 1);
      const char* b = s.ring[slot] + warp * (P::depth * P::columns * 512) + lane * 16;
#pragma unroll
      for (int r = 0; r < P::depth; r++, b += P::columns * 512) {
        const int q = (m % ahead) * P::depth + r;
#pragma unroll
        for (int p = 0; p < P::pairs; p++) {
          const Vec one = load16_shared(b + p * 1024), two = load16_shared(b + p * 1024 + 512);
          multiply(sum[p][0], one, two, low[q], 0);
          if (many) multiply(sum[p][1], one, two, high[MARKED ? 0 : q], 0);
        }
        if (P::columns % 2)
          multiply(rest, low[q], MARKED ? Vec{0, 0, 0, 0} : high[MARKED ? 0 : q],
                   load16_shared(b + P::pairs * 1024));
        if (NORM) squares += square(low[q]);
        if (NORM && many) more += square(high[MARKED ? 0 : q]);
#if !MARKED
        if (m + ahead < P::messages) ask(base, (m + ahead) * P::depth + r, low[q], high[q]);
#endif
      }
      if (last) {  // earlier rows leave the weights for the next ones
        warp_sync();
        if (lane == 0) barrier_arrive(&s.empty[slot]);
      }
    }
#if MARKED
    part_sync(COMPUTE);  // the sums before have been read
#else
    if (!last)  // the next rows come while these are summed up
#pragma unroll
      for (int q = 0; q < held; q++) ask(base + CHUNK, q, low[q], high[q]);
#endif
    STAMP_IN(1);
    float* mine = s.sums + warp * 16 * P::pitch;
#pragma unroll
    for (int p = 0; p < P::pairs; p++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        if (half == 0 || many) {
          float* at = mine + (half * 8 + 2 * t) * P::pitch + p * 16 + g;
          at[0] = sum[p][half][0], at[P::pitch] = sum[p][half][1];
          at[8] = sum[p][half][2], at[P::pitch + 8] = sum[p][half][3];
        }
    if (P::columns % 2) {
      float* at = mine + g * P::pitch + P::pairs * 16 + 2 * t;
      at[0] = rest[0], at[1] = rest[1];
      at[8 * P::pitch] = rest[2], at[8 * P::pitch + 1] = rest[3];
    }
    if (NORM) {
      squares += shuffle_xor(squares, 1), more += shuffle_xor(more, 1);
      squares += shuffle_xor(squares, 2), more += shuffle_xor(more, 2);
      if (t == 0) s.squares[warp * 16 + g] = squares, s.squares[warp * 16 + g + 8] = more;
    }
    part_sync(COMPUTE);
    STAMP_IN(2);
    constexpr int width = P::tiles * 8;
    const int results = least(CHUNK, rows - base) * (width / EACH);
#pragma unroll 1
    for (int o = thread_id(); o < results; o += COMPUTE) {
      const int row = o / (width / EACH), column = o % (width / EACH) * EACH,
                feature = cta_id() * width + column;
      const float* from = s.sums + row * P::pitch + column;
      float total[EACH] = {}, second[EACH] = {}, scale = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
#pragma unroll
        for (int e = 0; e < EACH; e++) {
          total[e] += from[w * 16 * P::pitch + e];
          if (P::columns > P::tiles) second[e] += from[w * 16 * P::pitch + width + e];
        }
        if (NORM) scale += s.squares[w * 16 + row];
      }
      if (NORM) {
        scale = rsqrtf(scale / P::K + eps);
#pragma unroll
        for (int e = 0; e < EACH; e++) total[e] *= scale, second[e] *= scale;
      }
      if (feature < P::n) store(base + row, feature, total, second);
    }
    if (!MARKED && !last) part_sync(COMPUTE);
  }
  message += P::messages;
}

// --- a block but for its attention ---

struct Rows {
  Cell* x;         // [rows, D]: the residual stream; written in place
  Cell* qkv;       // [rows, QKV_N]
  Cell* attended;  // [rows, HEADS * HEAD]
  Cell* gated;     // [rows, F]
};

// attend() turns qkv into attended; expect() runs before all of qkv is there. `mark` is that of x, before and
// after.
template <class Expect, class Attend>
DEVICE void block(Shared& s, int& message, u32* meeting, u32& turn, u32& mark, const Rows& r, int rows,
                  float eps, bool stamping, Expect expect, Attend attend) {
  STAMP(0);
  product<Qkv, true>(
      s, message, r.x, mark, 1, 0, rows, eps,
      [&](int row, int feature, const float* sum, const float*) {
        put(r.qkv + (row * QKV_N + feature) / EACH, word_of(sum), mark + 1);
      },
      stamping ? 24 : 0);
  STAMP(1);
  expect();
  meet(meeting, turn);
  STAMP(2);
  attend(mark + 1);
  STAMP(3);
  meet(meeting, turn);
  STAMP(4);
  const auto add = [&](int row, int feature, const float* sum, u32 now) {
    Cell* at = r.x + (row * D + feature) / EACH;
    float x[EACH];
    values_of(present(at), x);
#pragma unroll
    for (int e = 0; e < EACH; e++) x[e] += rounded(sum[e]);
    put(at, word_of(x), now);
  };
  product<Out, false>(
      s, message, r.attended, mark + 2, 1, 0, rows, 0.f,
      [&](int row, int feature, const float* sum, const float*) { add(row, feature, sum, mark + 3); },
      stamping ? 28 : 0);
  STAMP(5);
  meet(meeting, turn);
  STAMP(6);
  product<Gate, true>(
      s, message, r.x, mark + 3, 1, 0, rows, eps,
      [&](int row, int feature, const float* sum, const float* up) {
        float y[EACH];
#pragma unroll
        for (int e = 0; e < EACH; e++) {
          const float gate = rounded(sum[e]);
          y[e] = rounded(gate / (1.f + expf(-gate))) * rounded(up[e]);
        }
        put(r.gated + (row * F + feature) / EACH, word_of(y), mark + 4);
      },
      stamping ? 16 : 0);
  STAMP(7);
  meet(meeting, turn);
  STAMP(8);
  product<Down, false>(
      s, message, r.gated, mark + 4, 1, 0, rows, 0.f,
      [&](int row, int feature, const float* sum, const float*) { add(row, feature, sum, mark + 5); },
      stamping ? 20 : 0);
  STAMP(9);
  meet(meeting, turn);
  STAMP(10);
  mark += 5;
}
