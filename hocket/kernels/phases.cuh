// Decoder blocks in kernels that stay: one program a multiprocessor, all resident, many layers in one launch.
//
// A phase is a product or an attention step; between phases rows lie in L2 (see there). In every program
// one warp brings weights, which depend on nothing, through a ring in shared memory, phase after phase,
// without regard to the phases; WARPS others compute. So memory streams while the chain of small dependent
// phases runs, and a launch takes the longer of the two.
//
// A product splits its features over programs, eight (the matrix unit's columns) at a time, and k over the
// warps of a program. Activations are the matrix unit's rows: 16 at a time, from L2 straight to registers.
// Any order of k will do if both sides use it, so a lane's 16 bytes of a row are its fragments as they lie.
//
// weights of one message of a phase:  [warp][k block of the warp][tile of 8 features][lane][16 bytes]
// a k block is 64 bytes of a row; lane 4 g + t holds bytes 16 t ... 16 t + 15 of feature g. In half precision
// the 32-bit words a, b, c, d of a lane in one tile and e, f, g, h in the next lie as a e b f and c g d h.

#define BLOCK_K (4 * VALUES)

#define CHUNK 16  // rows that a product takes at a time

// With CLUSTER programs in a cluster, these share a product's features and split its k: for many rows, of
// which each program then reads a part only. Weights of a message lie there as [k block][tile of 8
// features][lane].
#ifndef CLUSTER
#define CLUSTER 1
#endif
#define ROWS 64             // that a product of a cluster takes at a time
#define HEIGHT (ROWS / 16)  // in tiles

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

// --- rows between phases ---

// A word is two values, or one in fp32. How it gets from those who write it to those who read it:
// - The grid meets between phases.
// - WAITED, by programs in clusters: nobody meets. Whoever reads a word waits until it is not EMPTY. A row
// lies
//   there twice, for layers in turn; who writes a word empties that of the layer before, which all have read
//   by then, since what is written depends on all that was made of it. A fence each layer (`settled`) keeps
//   this in order: a word is looked at again a layer after it was emptied.
#define EMPTY 0xffffffffu  // no result of arithmetic has these bits
struct Words {
  u32* at;
  int other;  // how far away those of the layer before and after are
};
DEVICE void put(const Words& to, int i, u32 word) {
  if (WAITED) {
    show4(to.at + to.other + i, EMPTY);
    show4(to.at + i, word == EMPTY ? EMPTY - 1 : word);
  } else {
    to.at[i] = word;
  }
}
DEVICE void put4(const Words& to, int i, const Vec& v) {
  if (WAITED) {
    put(to, i, v.x), put(to, i + 1, v.y), put(to, i + 2, v.z), put(to, i + 3, v.w);
  } else {
    *(Vec*)(to.at + i) = v;
  }
}
DEVICE bool missing(const Vec& v) {
  return WAITED && (v.x == EMPTY || v.y == EMPTY || v.z == EMPTY || v.w == EMPTY);
}
DEVICE Vec ask16(const u32* at) { return WAITED ? watch16(at) : load16(at); }
DEVICE u32 ask4(const u32* at) { return WAITED ? watch4(at) : load4(at); }
template <int N>
DEVICE void take(const u32* const* at, u32* words) {
#pragma unroll
  for (int i = 0; i < N; i++) words[i] = ask4(at[i]);
  while (WAITED) {
    bool any = false;
#pragma unroll
    for (int i = 0; i < N; i++) any |= words[i] == EMPTY;
    if (!any) break;
    idle();
#pragma unroll
    for (int i = 0; i < N; i++)
      if (words[i] == EMPTY) words[i] = ask4(at[i]);
  }
}
DEVICE void settled() {
  if (WAITED) fence();
}

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

// A product [rows, K] x [N, K]; with TWO, two of them (gate and up) side by side. DEEP: more programs of a
// cluster share its k.
#if CLUSTER > 1
template <int N, int K_, bool TWO, bool DEEP_>
struct Product {
  static constexpr int K = K_;
  static constexpr int deep = DEEP_;
  static constexpr int split = least(CLUSTER, deep ? 8 : 4);  // programs that share k, and so their features
  static constexpr int groups = GRID / split, all = N / 8;    // of such programs; tiles of 8 features
  static constexpr int span = ceil_div(all, groups);          // tiles of a group, or one less
  static constexpr int tiles = ceil_div(span, split);         // that a program finishes, at most
  static constexpr int columns = TWO ? 2 * tiles : tiles;
  static constexpr int wide = TWO ? 2 * span : span;          // tiles of weights
  static constexpr int share = ceil_div(K / BLOCK_K, split);  // k blocks of a program
  static constexpr int depth = fitting(share, SLOT / (wide * 512));
  static constexpr int messages = share / depth;
  static constexpr int bytes = depth * wide * 512;        // of one message
  static constexpr int across = least(split, WARPS / 2);  // warps side by side over features
  static constexpr int own = ceil_div(wide, across);      // tiles of weights in a warp, at most
  static constexpr int down = WARPS / across;             // warps one below the other over rows
  static constexpr int high = HEIGHT / down;              // tiles of rows in a warp
  static constexpr int pitch = share * 128 + 64;          // bytes of two rows; keeps banks apart
  static constexpr int parts = split * columns * HEIGHT * 512;
  static_assert(bytes <= SLOT, "a message is larger than its slot");
  static_assert(N % 8 == 0 && K % BLOCK_K == 0 && GRID % CLUSTER == 0, "sizes are whole tiles");
  static_assert(all >= groups, "who gives nothing is waited for by nobody");
  static_assert(HEIGHT % down == 0 && high <= 2, "a warp has all of its tiles of rows, or one, or none");
};
#else
template <int N, int K_, bool TWO, bool DEEP_>
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
#endif
typedef Product<QKV_N, D, false, false> Qkv;
typedef Product<D, HEADS * HEAD, false, true> Out;
typedef Product<F, D, true, false> Gate;
typedef Product<D, F, false, true> Down;
#ifdef VOCAB
typedef Product<VOCAB, D, false, false> Head;
#else
typedef Qkv Head;
#endif
#if CLUSTER > 1
constexpr int HELD = ROWS / 2 * most(most(Qkv::pitch, Out::pitch), most(Gate::pitch, Down::pitch));
constexpr int WIDE = most(most(Qkv::parts, Gate::parts), Head::parts), DEEP = most(Out::parts, Down::parts);
#else
constexpr int PITCH = most(most(most(Qkv::pitch, Out::pitch), most(Gate::pitch, Down::pitch)), Head::pitch);
#endif
constexpr long long BLOCK_BYTES =
    (long long)GRID * (Qkv::bytes * Qkv::messages + Out::bytes * Out::messages +
                       Gate::bytes * Gate::messages + Down::bytes * Down::messages);

struct Shared {
  char ring[SLOTS][SLOT];
#if CLUSTER > 1
  char held[HELD];          // this program's part of the rows
  char parts[WIDE + DEEP];  // sums of all parts; those of products one after another lie apart
  float squares[CLUSTER][ROWS];
  u64 summed[2], read;
#else
  float sums[WARPS * 16 * PITCH];
  float squares[WARPS * 16];
#endif
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
DEVICE void send(Shared& s, int& message, const char*& from, int times) {
  const char* mine = from + (long long)cta_id() * (P::bytes * P::messages);
#pragma unroll 1
  for (int i = 0; i < times * P::messages; i++, message++) {
    const int slot = message % SLOTS, m = i % P::messages;
    barrier_wait(&s.empty[slot], ((message / SLOTS) & 1) ^ 1);
    fetch(s.ring[slot], mine + m * P::bytes, P::bytes, &s.full[slot]);
  }
  from += (long long)GRID * (P::bytes * P::messages);
}

// How often a product of so many rows takes its weights.
DEVICE int times(int rows) { return CLUSTER > 1 ? (rows + ROWS - 1) / ROWS : 1; }

DEVICE void send_block(Shared& s, int& message, const char*& from, int rows) {
  send<Qkv>(s, message, from, times(rows));
  send<Out>(s, message, from, times(rows));
  send<Gate>(s, message, from, times(rows));
  send<Down>(s, message, from, times(rows));
}

DEVICE void begin(Shared& s) {
  if (thread_id() == 0) {
    for (int i = 0; i < SLOTS; i++) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], WARPS);
#if CLUSTER > 1
    barrier_init(&s.summed[0], 1), barrier_init(&s.summed[1], 1), barrier_init(&s.read, CLUSTER);
#endif
    barrier_init_done();
  }
#if CLUSTER > 1
  cluster_sync();
#else
  cta_sync();
#endif
}

// --- a product ---

// store(row, feature, sums, seconds, before) for each word of results; `seconds` are of the up half of a
// gated product, `before` is what ask(row, feature) gave before the sums were there. Row i of the product is
// row i * step + first of `in`. NORM: rows are scaled to unit root mean square; the norm's weight is in the
// product's, so the scale can wait until the sums are there.
DEVICE u32 nothing(int, int) { return 0; }

#if CLUSTER > 1
// How far a warp has come: messages it has taken, and which turn it waits for of each barrier of a product.
struct Course {
  int message;
  u32 turns;
};

// Whether the last part of k, which may be shorter, has this block; whether a warp has its j-th tile of
// weights.
template <class P>
DEVICE bool inside(int part, int q) {
  return P::share * P::split == P::K / BLOCK_K || part * P::share + q < P::K / BLOCK_K;
}
template <class P>
DEVICE bool has(int j, int side) {
  return (j + 1) * P::across <= P::wide || side + j * P::across < P::wide;
}

// A warp's tiles of weights times TILES tiles of rows.
template <class P, int TILES>
DEVICE void multiply_rows(Shared& s, Course& now, int part, int side, int top, float (*sum)[P::own][4]) {
  const int lane = lane_id(), g = lane >> 2, t = lane & 3;
#pragma unroll 1
  for (int m = 0; m < P::messages; m++, now.message++) {
    const int slot = now.message % SLOTS;
    if (!NO_WEIGHTS) barrier_wait(&s.full[slot], (now.message / SLOTS) & 1);
    const char* w = s.ring[slot] + side * 512 + lane * 16;
    const char* x = s.held + (top * 8 + g) * P::pitch + m * (P::depth * 128) + t * 16;
#pragma unroll
    for (int r = 0; r < P::depth; r++, w += P::wide * 512, x += 128)
      if (TILES && inside<P>(part, m * P::depth + r)) {
        const int odd = (m * P::depth + r) % 2 * 64;
        Vec one[TILES + 1], two[TILES + 1];
#pragma unroll
        for (int i = 0; i < TILES; i++) {
          one[i] = load16_shared(x + i * (P::down * 8 * P::pitch) + odd);
          two[i] = load16_shared(x + i * (P::down * 8 * P::pitch) + (64 - odd));
        }
#pragma unroll
        for (int j = 0; j < P::own; j++)
          if (has<P>(j, side)) {
            const Vec weights = load16_shared(w + j * (P::across * 512));
#pragma unroll
            for (int i = 0; i < TILES; i++) multiply(sum[i][j], one[i], two[i], weights, 0);
          }
      }
    warp_sync();
    if (lane == 0) barrier_arrive(&s.empty[slot]);
  }
}

// Each program takes its part of k of all rows to shared memory and multiplies it by all features of those
// who share them. Warps lie side by side over features and one below the other over rows. Then each program
// gets the sums of its own features from all of them.
//
// rows in shared memory: [tile of 16][g][k block][which][t][16 bytes]: the unit's rows are these, as
// fragments as they lie; `which` of a block's two halves comes first in turn, to keep banks apart sums in
// shared memory: [part of k][tile of 8 features][tile of 16 rows][lane][4], as the matrix unit gives them.
// Whoever sends those of a product has what depends on all sums of the last product but one.
template <class P, bool NORM, class Ask, class Store>
DEVICE void product(Shared& s, Course& now, const u32* in, int step, int first, int rows, float eps, Ask ask,
                    Store store, int stamp = 0) {
  const int thread = thread_anew(), lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
  const int part = cta_id() % P::split, leader = cta_id() % CLUSTER - part, group = cta_id() / P::split;
  constexpr int least_span = P::all / P::groups, longer = P::all % P::groups;
  const int span = least_span + (group < longer);  // tiles of this group, and of them this program's
  const int mine = least(P::tiles, most(0, span - part * P::tiles)), closers = ceil_div(span, P::tiles);
  const int begin = (group * least_span + least(group, longer) + part * P::tiles) * 8;
  const int side = warp % P::across, top = warp / P::across;
  float* const sums = (float*)(s.parts + P::deep * WIDE);
  u64* const summed = &s.summed[P::deep];
#pragma unroll 1
  for (int base = 0; base < rows; base += ROWS) {
    const int count = least(ROWS, rows - base), height = (count + 15) / 16;
    const bool last = base + ROWS >= rows;
    constexpr int pieces = P::share * 4, wide = ceil_div(pieces, 16);  // of 16 bytes
    constexpr int each =
        ROWS / (COMPUTE / 8);  // half a warp takes rows g and g + 8 of these tiles, two apart
    static_assert(COMPUTE == 256, "sixteen halves of warps take two tiles at a time");
    const int column = thread % 16, highest = thread / 128 * 16 + thread / 16 % 8;
    const auto place = [&](int i) { return highest + i * 32; };
    Vec piece[each][2][wide];
    {
      const auto there = [&](int i, int half, int p) {
        return place(i) + half * 8 < count && p * 16 + column < pieces &&
               inside<P>(part, (p * 16 + column) / 4);
      };
      const u32* from =
          in + ((base + highest) * step + first) * (P::K / EACH) + part * (P::share * 16) + column * 4;
      const int apart = step * (P::K / EACH);
      const auto ask = [&](int i, int half, int p) {
        return ask16(from + (i * 32 + half * 8) * apart + p * 64);
      };
#pragma unroll
      for (int i = 0; i < each; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
          for (int p = 0; p < wide; p++) {
            piece[i][half][p] = Vec{0, 0, 0, 0};
            if (there(i, half, p)) piece[i][half][p] = ask(i, half, p);
          }
      part_sync(COMPUTE);  // the rows before have been multiplied, and their sums have come
      if (thread == 0)
        barrier_expect(summed,
                       P::split * height * (P::columns / P::tiles * mine * 512 + (NORM && mine ? 64 : 0)));
      while (true) {  // all that is missing is asked for again at the same time
        bool any = false;
#pragma unroll
        for (int i = 0; i < each; i++)
#pragma unroll
          for (int p = 0; p < wide; p++) any |= missing(piece[i][0][p]) | missing(piece[i][1][p]);
        if (!any) break;
        idle();
#pragma unroll
        for (int i = 0; i < each; i++)
#pragma unroll
          for (int half = 0; half < 2; half++)
#pragma unroll
            for (int p = 0; p < wide; p++)
              if (missing(piece[i][half][p])) piece[i][half][p] = ask(i, half, p);
      }
      warp_sync();
      if (P::columns > P::tiles) settled();
#pragma unroll
      for (int i = 0; i < each; i++)
#pragma unroll
        for (int p = 0; p < wide; p++) {
          const Vec low = piece[i][0][p], high = piece[i][1][p];
          const int q = (p * 16 + column) / 4;
          char* to = s.held + (thread / 16 + i * 16) * P::pitch + q * 128 + column % 4 * 16;
          if (place(i) < count && q < P::share) {
            *(Vec*)(to + q % 2 * 64) = HALF ? Vec{low.x, high.x, low.y, high.y} : low;
            *(Vec*)(to + 64 - q % 2 * 64) = HALF ? Vec{low.z, high.z, low.w, high.w} : high;
          }
        }
      part_sync(COMPUTE);
    }
    STAMP_IN(0);
    if (base) {  // the cluster has read the sums before
      barrier_wait_far(&s.read, now.turns >> 2 & 1);
      now.turns ^= 4;
    }
    if (NORM)
#pragma unroll
      for (int i = 0; i < each; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          float squares = 0;
#pragma unroll
          for (int p = 0; p < wide; p++) squares += square(piece[i][half][p]);
#pragma unroll
          for (int o = 8; o; o >>= 1) squares += shuffle_xor(squares, o);
          if (column < closers && place(i) < height * 16)
            send_far(far_address(&s.squares[part][place(i) + half * 8], leader + column), squares,
                     far_address(summed, leader + column));
        }
    float sum[P::high][P::own][4] = {};
    if (top + P::down * (P::high - 1) < height)
      multiply_rows<P, P::high>(s, now, part, side, top, sum);
    else if (top < height)
      multiply_rows<P, 1>(s, now, part, side, top, sum);
    else
      multiply_rows<P, 0>(s, now, part, side, top, sum);
    STAMP_IN(1);
#pragma unroll
    for (int j = 0; j < P::own; j++) {
      const int feature = (side + j * P::across) % P::span,
                second = (side + j * P::across) / P::span;  // in tiles
      const int to = leader + feature / P::tiles, c = second * P::tiles + feature % P::tiles;
      const Far barrier = far_address(summed, to);
      const Far place = far_address(sums + (part * P::columns + c) * (HEIGHT * 128), to);
#pragma unroll
      for (int i = 0; i < P::high; i++)
        if (has<P>(j, side) && feature < span && top + i * P::down < height)
          send_far(place + (top + i * P::down) * 512 + lane * 16, sum[i][j], barrier);
    }
    const int tile = warp % HEIGHT;
    const auto row = [&](int e) { return tile * 16 + e / 2 * 8 + g; };
    const auto feature = [&](int c, int e) { return begin + c * 8 + 2 * t + e % 2; };
    static_assert(!P::deep || P::tiles <= WARPS / HEIGHT,
                  "only what is asked for first is there before the sums");
    u32 before[4] = {};
#pragma unroll
    for (int e = 0; e < 4; e += EACH)
      if (warp / HEIGHT < mine && row(e) < count) before[e] = ask(base + row(e), feature(warp / HEIGHT, e));
    warp_sync();
    barrier_wait_far(summed, now.turns >> P::deep & 1);
    now.turns ^= 1 << P::deep;
    STAMP_IN(2);
    if (tile < height) {
      float scale[2] = {1, 1};
      if (NORM)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          float total = 0;
#pragma unroll
          for (int p = 0; p < P::split; p++) total += s.squares[p][row(2 * half)];
          scale[half] = rsqrtf(total / P::K + eps);
        }
#pragma unroll 1
      for (int c = warp / HEIGHT; c < mine; c += WARPS / HEIGHT) {
        float total[4] = {}, second[4] = {};
        const auto add = [&](float* to, int column) {
#pragma unroll
          for (int p = 0; p < P::split; p++) {
            const Vec v = load16_shared(sums + ((p * P::columns + column) * HEIGHT + tile) * 128 + lane * 4);
            to[0] += bits_to_float(v.x), to[1] += bits_to_float(v.y);
            to[2] += bits_to_float(v.z), to[3] += bits_to_float(v.w);
          }
#pragma unroll
          for (int e = 0; e < 4; e++) to[e] *= scale[e / 2];
        };
        add(total, c);
        if (P::columns > P::tiles) add(second, P::tiles + c);
#pragma unroll
        for (int e = 0; e < 4; e += EACH)
          if (row(e) < count) store(base + row(e), feature(c, e), total + e, second + e, before[e]);
      }
    }
    if (!last) {
      part_sync(COMPUTE);
      if (thread_id() < CLUSTER) barrier_arrive_far(far_address(&s.read, thread_id()));
    }
  }
}
#else
typedef int Course;

template <class P, bool NORM, class Ask, class Store>
DEVICE void product(Shared& s, Course& message, const u32* in, int step, int first, int rows, float eps,
                    Ask ask, Store store, int stamp = 0) {
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
  Vec low[held], high[held];
  const auto bring = [&](int base, int q, Vec& a, Vec& b) {
    a = b = Vec{0, 0, 0, 0};
    if (inside(q)) {
      if (base + g < rows) a = load16(place(base, q));
      if (base + g + 8 < rows) b = load16(place(base, q) + 8 * step * (P::K / EACH));
    }
  };
#pragma unroll
  for (int q = 0; q < held; q++) bring(0, q, low[q], high[q]);
#pragma unroll 1
  for (int base = 0; base < rows; base += CHUNK) {
    const bool last = base + CHUNK >= rows, many = rows - base > 8;
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
          if (many) multiply(sum[p][1], one, two, high[q], 0);
        }
        if (P::columns % 2) multiply(rest, low[q], high[q], load16_shared(b + P::pairs * 1024));
        if (NORM) squares += square(low[q]);
        if (NORM && many) more += square(high[q]);
        if (m + ahead < P::messages) bring(base, (m + ahead) * P::depth + r, low[q], high[q]);
      }
      if (last) {  // earlier rows leave the weights for the next ones
        warp_sync();
        if (lane == 0) barrier_arrive(&s.empty[slot]);
      }
    }
    if (!last)  // the next rows come while these are summed up
#pragma unroll
      for (int q = 0; q < held; q++) bring(base + CHUNK, q, low[q], high[q]);
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
      if (feature < P::n) store(base + row, feature, total, second, ask(base + row, feature));
    }
    if (!last) part_sync(COMPUTE);
  }
  message += P::messages;
}
#endif

// --- a block but for its attention ---

// rows: where rows of this layer lie, worked out when it is asked for, so that it holds no registers.
//   in()                       [rows, D]: the residual stream
//   middle(), out()            the same after attention and after the block; or both are `in`, written in
//   place qkv(), attended(), gated() [rows, QKV_N], [rows, HEADS * HEAD], [rows, F]
// attend() turns qkv into attended; expect() runs before all of qkv is there.
template <class Rows, class Expect, class Attend>
DEVICE void block(Shared& s, Course& now, u32* meeting, u32& turn, const Rows& r, int rows, float eps,
                  bool stamping, Expect expect, Attend attend) {
  STAMP(0);
  product<Qkv, true>(
      s, now, r.in().at, 1, 0, rows, eps, nothing,
      [&](int row, int feature, const float* sum, const float*, u32) {
        put(r.qkv(), (row * QKV_N + feature) / EACH, word_of(sum));
      },
      stamping ? 24 : 0);
  STAMP(1);
  expect();
  meet(meeting, turn);
  STAMP(2);
  attend();
  STAMP(3);
  meet(meeting, turn);
  STAMP(4);
  const auto ask = [](const Words& x) {
    return [=](int row, int feature) {
      const u32* at[1] = {x.at + (row * D + feature) / EACH};
      u32 word;
      take<1>(at, &word);
      return word;
    };
  };
  const auto add = [&](const Words& to, int row, int feature, const float* sum, u32 before) {
    float x[EACH];
    values_of(before, x);
#pragma unroll
    for (int e = 0; e < EACH; e++) x[e] += rounded(sum[e]);
    put(to, (row * D + feature) / EACH, word_of(x));
  };
  product<Out, false>(
      s, now, r.attended().at, 1, 0, rows, 0.f, ask(r.in()),
      [&](int row, int feature, const float* sum, const float*, u32 before) {
        add(r.middle(), row, feature, sum, before);
      },
      stamping ? 28 : 0);
  STAMP(5);
  meet(meeting, turn);
  STAMP(6);
  product<Gate, true>(
      s, now, r.middle().at, 1, 0, rows, eps, nothing,
      [&](int row, int feature, const float* sum, const float* up, u32) {
        float y[EACH];
#pragma unroll
        for (int e = 0; e < EACH; e++) {
          const float gate = rounded(sum[e]);
          y[e] = rounded(gate / (1.f + expf(-gate))) * rounded(up[e]);
        }
        put(r.gated(), (row * F + feature) / EACH, word_of(y));
      },
      stamping ? 16 : 0);
  STAMP(7);
  meet(meeting, turn);
  STAMP(8);
  product<Down, false>(
      s, now, r.gated().at, 1, 0, rows, 0.f, ask(r.middle()),
      [&](int row, int feature, const float* sum, const float*, u32 before) {
        add(r.out(), row, feature, sum, before);
      },
      stamping ? 20 : 0);
  STAMP(9);
  meet(meeting, turn);
  STAMP(10);
}
