// Products of decoder layers in kernels that stay, cut over clusters of programs; for kernels with few rows.
//
// A product splits its features over clusters, and k over the programs of a cluster: each reads its part of a
// row only, and of the sums it sends every program of its cluster those of the features that are that one's to
// finish. So a program reads few rows, and a phase ends with one trip within a cluster and one meeting of the
// grid. Of several chunks of rows, one is multiplied while the sums of the one before are on their way. Weights
// come through a ring, as in phases.cuh, in the matrix unit's order: weights are its rows (16 features),
// activations its columns (8 rows).
//
// weights: [layer][program][phase]; of a phase:  [k block][k part][tile of 16 features][half of the block][lane][16 bytes]
// a k block is 64 bytes of a row; lane 4 g + t holds, of features g and g + 8, words t and ... of phases.cuh's
// pair of tiles: a e b f and c g d h.
//
// TILES of eight rows make a chunk; OUT_PARTS, OUT_TILES: what the product after attention takes; SEVERAL:
// there may be more chunks than one, so that a phase's weights must find room in the ring.

#define CLUSTERS (GRID / CLUSTER)
#define CHUNK (8 * TILES)

static_assert(HALF, "in bfloat16 only");

template <int N, int K_, int PARTS, bool TWO>
struct Product {
  static constexpr int K = K_;
  static constexpr int features = N / CLUSTERS;    // of a cluster, and of each half if there are TWO
  static constexpr int half = ceil_div(features, 16);
  static constexpr int tiles = TWO ? 2 * half : half;
  static constexpr int slice = K / CLUSTER;        // k of a program
  static constexpr int parts = PARTS;              // ... cut in so many, for warps
  static constexpr int blocks = slice / 32 / PARTS;
  static constexpr int block_bytes = PARTS * tiles * 1024;
  static constexpr int depth = fitting(blocks, SLOT / block_bytes);  // k blocks of a message
  static constexpr int messages = blocks / depth;
  static constexpr int bytes = depth * block_bytes;
  static constexpr int sources = CLUSTER * PARTS;  // of sums
  static_assert(N % CLUSTERS == 0 && features % 8 == 0 && slice % (32 * PARTS) == 0, "even sizes");
  static_assert(bytes <= SLOT && (!SEVERAL || messages <= SLOTS), "the ring holds a phase's weights");
};
constexpr int QKV_PARTS = 2 * ceil_div(QKV_N / CLUSTERS, 16) <= WARPS ? 2 : 1;  // else some warps idle
typedef Product<QKV_N, D, QKV_PARTS, false> Qkv;
typedef Product<D, HEADS * HEAD, OUT_PARTS, false> Out;
typedef Product<F, D, 1, true> Gate;
typedef Product<D, F, WARPS, false> Down;
// Of a program's weights of a layer.
constexpr int MINE_BYTES = Qkv::bytes * Qkv::messages + Out::bytes * Out::messages +
                           Gate::bytes * Gate::messages + Down::bytes * Down::messages;

#define STAGE_PITCH (D / CLUSTER * 2 + 64)  // bytes between rows
// A program finishes, of each tile's 16 features, SHARE from SHARE rank on and SHARE from 8 + SHARE rank on:
// so a lane's four sums are one program's.
#define SHARE (8 / CLUSTER)
template <class P, int N>
constexpr int floats = P::sources * P::tiles * N * SHARE * 16;  // of sums of N tiles of rows
constexpr int SUMS =
    most(most(floats<Qkv, TILES>, floats<Gate, TILES>), most(floats<Out, OUT_TILES>, floats<Down, TILES>));
static_assert(CLUSTER == 2 || CLUSTER == 4, "a pair of features is one program's");

// What products keep in a program's shared memory.
struct Exchange {
  char ring[SLOTS][SLOT];
  char stage[SEVERAL ? 2 : 1][CHUNK * STAGE_PITCH];
  float sums[2][SUMS];
  float squares[2][CLUSTER][CHUNK];
  u64 full[SLOTS], empty[SLOTS], sent[2];
};

// What a program's phases go on with.
struct Turn {
  int message, chunk;
  u32 meeting;
};

DEVICE int rank_id() { return cta_id() % CLUSTER; }
DEVICE int cluster_id() { return cta_id() / CLUSTER; }

// Before anything else: barriers, which the whole cluster must know of.
DEVICE void begin(Exchange& s) {
  if (thread_id() == 0) {
    for (int i = 0; i < SLOTS; i++) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], WARPS);
    for (int i = 0; i < 2; i++) barrier_init(&s.sent[i], 1);
    barrier_init_done();
  }
  cta_sync();
  cluster_sync();
}

DEVICE void gate(const float* sum, const float* up, T* to) {
  float y[2];
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const float gate = rounded(sum[e]);
    y[e] = rounded(gate / (1.f + expf(-gate))) * rounded(up[e]);
  }
  *(u32*)to = word_of(y);
}

// --- weights come in ---

template <class P>
DEVICE void send(Exchange& s, int& message, const char*& from) {
#pragma unroll 1
  for (int m = 0; m < P::messages; m++, message++, from += P::bytes) {
    const int slot = message % SLOTS;
    barrier_wait(&s.empty[slot], ((message / SLOTS) & 1) ^ 1);
    fetch(s.ring[slot], from, P::bytes, &s.full[slot]);
  }
}

DEVICE void send_all(Exchange& s, const void* weights, int times) {
  int message = 0;
#pragma unroll 1
  for (int i = 0; i < times * LAYERS; i++) {
    const char* from = (const char*)weights + ((long long)(i % LAYERS) * GRID + cta_id()) * MINE_BYTES;
    send<Qkv>(s, message, from);
    send<Out>(s, message, from);
    send<Gate>(s, message, from);
    send<Down>(s, message, from);
  }
}

// --- a product ---

// One k block of a warp: TILES_ tiles of features, STEP apart, times N tiles of rows.
template <int COUNT, int N>
DEVICE void multiply(float (*sum)[N][4], const char* weights, int step, const Vec* x, int there) {
#pragma unroll
  for (int i = 0; i < COUNT; i++)
    if (i < there) {
      const Vec one = load16_shared(weights + i * step), two = load16_shared(weights + i * step + 512);
#pragma unroll
      for (int n = 0; n < N; n++) {
        mma(sum[i][n], one.x, one.y, one.z, one.w, x[n].x, x[n].y);
        mma(sum[i][n], two.x, two.y, two.z, two.w, x[n].z, x[n].w);
      }
    }
}

DEVICE const char* await(Exchange& s, int message) {
  if (!NO_WEIGHTS) barrier_wait(&s.full[message % SLOTS], (message / SLOTS) & 1);
  return s.ring[message % SLOTS];
}
DEVICE void done(Exchange& s, int message) {
  warp_sync();
  if (lane_id() == 0) barrier_arrive(&s.empty[message % SLOTS]);
}

// Send a tile's sums to those who finish them; n is the first of these tiles of rows, of N.
template <class P, int N, int COUNT>
DEVICE void spread(Exchange& s, int chunk, int part, int tile, int n, const float (*sum)[4]) {
  const int g = lane_id() >> 2, t = lane_id() & 3, owner = g / SHARE;
  const int block = ((rank_id() * P::parts + part) * P::tiles + tile) * N + n;
  const Far to = far_address(&s.sums[chunk & 1][(block * SHARE * 4 + g % SHARE * 4 + t) * 4], owner);
  const Far barrier = far_address(&s.sent[chunk & 1], owner);
#pragma unroll
  for (int i = 0; i < COUNT; i++)
    send_far(to + i * (SHARE * 64), sum[i], barrier);
}

// What was sent arrives by itself; one thread says how much will.
template <class P, int N, bool NORM>
DEVICE void sent(Exchange& s, int chunk) {
  if (thread_id() == 0)
    barrier_expect(&s.sent[chunk & 1], (floats<P, N> + (NORM ? CLUSTER * CHUNK : 0)) * 4);
}
// All of the cluster have sent what they had.
DEVICE void gather(Exchange& s, int chunk) { barrier_wait_far(&s.sent[chunk & 1], (chunk >> 1) & 1); }

// Two features of one row that this program finishes.
struct Item {
  int place, feature, at;  // row of the chunk, first feature of the product, first of its sums
};
template <class P, int N>
constexpr int items = P::half* N*(SHARE / 2) * 16;

template <class P, int N>
DEVICE Item item_of(int o) {
  const int e = o % 2, t = o / 2 % 4, upper = o / 8 % 2, pair = o / 16 % (SHARE / 2), n = o / (8 * SHARE) % N,
            tile = o / (8 * SHARE * N), feature = tile * 16 + upper * 8 + rank_id() * SHARE + 2 * pair;
  return {n * 8 + 2 * t + e, feature < P::features ? cluster_id() * P::features + feature : -1,
          ((tile * N + n) * SHARE * 4 + pair * 8 + t) * 4 + 2 * upper + e};
}

// The sums of its features, and those of the up half of a gated product.
template <class P, int N>
DEVICE void sum_up(const Exchange& s, int chunk, int at, float* total, float* second) {
  constexpr int source = P::tiles * N * SHARE * 16;
  const float* from = s.sums[chunk & 1] + at;
#pragma unroll
  for (int f = 0; f < 2; f++) total[f] = second[f] = 0;
#pragma unroll
  for (int i = 0; i < P::sources; i++)
#pragma unroll
    for (int f = 0; f < 2; f++) {
      total[f] += from[i * source + f * 16];
      if (P::tiles > P::half) second[f] += from[i * source + f * 16 + P::half * N * SHARE * 16];
    }
}

// store(place, feature, sums, seconds), normed.
template <class P, int N, class Store>
DEVICE void finish(Exchange& s, int chunk, float eps, Store store) {
  gather(s, chunk);
#pragma unroll 1
  for (int o = thread_id(); o < items<P, N>; o += COMPUTE) {
    const Item i = item_of<P, N>(o);
    float total[2], second[2], scale = 0;
    sum_up<P, N>(s, chunk, i.at, total, second);
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) scale += s.squares[chunk & 1][r][i.place];
    scale = rsqrtf(scale / P::K + eps);
#pragma unroll
    for (int f = 0; f < 2; f++) total[f] *= scale, second[f] *= scale;
    if (i.feature >= 0) store(i.place, i.feature, total, second);
  }
}

// Sums are added to row_of(place) of x [..., D], where that is not negative; what is there is asked for before
// sums have come.
template <class P, int N, class RowOf>
DEVICE void finish_added(Exchange& s, int chunk, T* x, RowOf row_of) {
  static_assert(P::tiles == P::half, "one product");
  constexpr int each = ceil_div(items<P, N>, COMPUTE);
  u32* at[each];
  u32 old[each];
#pragma unroll
  for (int j = 0; j < each; j++) {
    const int o = thread_id() + j * COMPUTE;
    const Item i = item_of<P, N>(o);
    const int row = o < items<P, N> && i.feature >= 0 ? row_of(i.place) : -1;
    at[j] = row < 0 ? nullptr : (u32*)(x + (long long)row * D + i.feature);
    old[j] = at[j] ? load4(at[j]) : 0;
  }
  gather(s, chunk);
#pragma unroll
  for (int j = 0; j < each; j++)
    if (at[j] != nullptr) {
      float total[2], second[2];
      sum_up<P, N>(s, chunk, item_of<P, N>(thread_id() + j * COMPUTE).at, total, second);
      *at[j] = pack_half(first_of(old[j]) + rounded(total[0]), second_of(old[j]) + rounded(total[1]));
    }
}

// Rows of D values, scaled to unit root mean square, times weights; tiles of features are spread over warps.
template <class P, class Store>
DEVICE void product(Exchange& s, Turn& now, const T* in, int rows, float eps, Store store) {
  const int lane = lane_id(), warp = warp_id(), g = lane >> 2, t = lane & 3;
  constexpr int each = ceil_div(CHUNK, WARPS), pieces = ceil_div(P::slice / 8, 32);
  constexpr int items = P::tiles * P::parts, mine = ceil_div(items, WARPS);
  static_assert(P::slice == D / CLUSTER, "the stage is made for these");
  static_assert(P::parts == 1 || items <= WARPS, "a warp's tiles are of one part of k");
  const int part = least(warp / P::tiles, P::parts - 1);
  Vec row[each][pieces];
  const auto ask = [&](int base) {
#pragma unroll
    for (int i = 0; i < each; i++)
#pragma unroll
      for (int p = 0; p < pieces; p++) {
        const int place = base + warp + i * WARPS, at = (p * 32 + lane) * 8;
        row[i][p] = Vec{0, 0, 0, 0};
        if (place < rows && at < P::slice && warp + i * WARPS < CHUNK)
          row[i][p] = load16(in + (long long)place * P::K + rank_id() * P::slice + at);
      }
  };
  ask(0);
#pragma unroll 1
  for (int base = 0; base < rows + CHUNK; base += CHUNK) {
    const bool here = base < rows, last = base + CHUNK >= rows;
    float squares[each] = {}, sum[mine][TILES][4] = {};
    if (here) {
      char* stage = s.stage[SEVERAL ? now.chunk & 1 : 0];
#pragma unroll
      for (int i = 0; i < each; i++)
#pragma unroll
        for (int p = 0; p < pieces; p++) {
          squares[i] += square(row[i][p]);
          const int at = p * 32 + lane;
          if (at < P::slice / 8 && warp + i * WARPS < CHUNK)
            *(Vec*)(stage + (warp + i * WARPS) * STAGE_PITCH + at * 16) = row[i][p];
        }
      part_sync(COMPUTE);
      if (!last) ask(base + CHUNK);
#pragma unroll
      for (int m = 0; m < P::messages; m++) {
        const char* w = await(s, now.message + m) + warp * 1024 + lane * 16;
#pragma unroll
        for (int r = 0; r < P::depth; r++) {
          Vec x[TILES];
#pragma unroll
          for (int n = 0; n < TILES; n++)
            x[n] = load16_shared(stage + (n * 8 + g) * STAGE_PITCH +
                                 (part * P::blocks + m * P::depth + r) * 64 + t * 16);
          multiply<mine, TILES>(sum, w + r * P::block_bytes, WARPS * 1024, x,
                                (items - warp + WARPS - 1) / WARPS);
        }
        if (last) done(s, now.message + m);
      }
#pragma unroll
      for (int o = 16; o; o >>= 1)
#pragma unroll
        for (int i = 0; i < each; i++) squares[i] += shuffle_xor(squares[i], o);
    }
    if (base) {
      finish<P, TILES>(s, now.chunk - 1, eps,
                       [&](int place, int feature, const float* total, const float* second) {
                         const int row = base - CHUNK + place;
                         if (row < rows) store(row, feature, total, second);
                       });
    }
    if (here) {
#pragma unroll
      for (int i = 0; i < each; i++)
        if (lane < CLUSTER && warp + i * WARPS < CHUNK) {
          const Far to = far_address(&s.squares[now.chunk & 1][rank_id()][warp + i * WARPS], lane);
          send_far(to, squares[i], far_address(&s.sent[now.chunk & 1], lane));
        }
#pragma unroll
      for (int i = 0; i < mine; i++)
        if (warp + i * WARPS < items)
          spread<P, TILES, TILES>(s, now.chunk, part, (warp + i * WARPS) % P::tiles, 0, sum[i]);
      sent<P, TILES, true>(s, now.chunk);
      now.chunk++;
    }
  }
  now.message += P::messages;
}

// The other way: a warp takes a part of k, and all tiles of it. x: HELD of its k blocks, of N tiles of rows;
// when one has been used, again(k block) may bring another there.
template <class P, int N, int HELD, class Again>
DEVICE void deep(Exchange& s, int message, int part, bool last, const Vec (*x)[N], float (*sum)[N][4],
                 Again again) {
#pragma unroll
  for (int m = 0; m < P::messages; m++) {
    const char* w = await(s, message + m) + part * (P::tiles * 1024) + lane_id() * 16;
#pragma unroll
    for (int r = 0; r < P::depth; r++) {
      const int q = m * P::depth + r;
      multiply<P::tiles, N>(sum, w + r * P::block_bytes, 1024, x[q % HELD], P::tiles);
      again(q);
    }
    if (last) done(s, message + m);
  }
}

// Such a product of rows as they lie, added to x [rows, D].
template <class P>
DEVICE void add_product(Exchange& s, Turn& now, const T* in, T* x, int rows) {
  const int g = lane_id() >> 2, t = lane_id() & 3;
  constexpr int held = least(P::blocks, 4);
  Vec row[held][TILES];
  const auto ask = [&](int base, int q) {
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const int place = base + n * 8 + g;
      row[q % held][n] = Vec{0, 0, 0, 0};
      if (place < rows)
        row[q % held][n] = load16(in + (long long)place * P::K + rank_id() * P::slice +
                                  (warp_id() * P::blocks + q) * 32 + t * 8);
    }
  };
  static_assert(P::blocks % held == 0, "the next rows take the places of these");
#pragma unroll
  for (int q = 0; q < held; q++) ask(0, q);
#pragma unroll 1
  for (int base = 0; base < rows + CHUNK; base += CHUNK) {
    const bool here = base < rows, last = base + CHUNK >= rows;
    float sum[P::tiles][TILES][4] = {};
    if (here)
      deep<P, TILES, held>(s, now.message, warp_id(), last, row, sum, [&](int q) {
        if (q + held < P::blocks)
          ask(base, q + held);
        else if (!last)
          ask(base + CHUNK, q + held - P::blocks);
      });
    if (base) {
      finish_added<P, TILES>(s, now.chunk - 1, x, [&](int place) {
        const int row = base - CHUNK + place;
        return row < rows ? row : -1;
      });
    }
    if (here) {
#pragma unroll
      for (int i = 0; i < P::tiles; i++) spread<P, TILES, TILES>(s, now.chunk, warp_id(), i, 0, sum[i]);
      sent<P, TILES, false>(s, now.chunk);
      now.chunk++;
    }
  }
  now.message += P::messages;
}
