// A stack over short sequences in one launch, on clusters.cuh: a sequence's last PATCH tokens are entered from
// what is given, and READ of its tokens leave. With MOVES it is the whole loop of a flow: what leaves is a
// velocity, and between estimates lie Euler steps. flow.py says what is computed and names the twins.
//
// Attention is part of the product after it: a program's part of k is some heads, and each warp attends for
// one of them and one sequence, for all clusters alike. What it gives lies in registers as that product takes
// it, if the columns of the weights are in the order 8 r + HEAD / 4 t + i instead of 32 r + 8 t + i.

#define HERE OUT_PARTS            // heads of a program
#define SEQUENCES (WARPS / HERE)  // that it attends for at a time
#define NEW (PATCH * FEAT)
#define GIVEN (READ * LEAVE)

static_assert(TOKENS <= 16 && PATCH < TOKENS, "a sequence is one tile of the matrix unit");
static_assert(HERE == HEADS / CLUSTER && GROUP % HERE == 0 && WARPS % HERE == 0, "a program's heads share keys");
static_assert(OUT_TILES == 2 * SEQUENCES, "a sequence is two tiles of rows");
static_assert(HEAD == 64 || HEAD == 128, "halves of a head are spread over four lanes");
static_assert(D % (2 * GRID) == 0 && FEAT % 8 == 0, "every program enters whole words");
static_assert(!MOVES || (READ == PATCH && LEAVE == FEAT), "what moves is as wide as its velocity");


struct Shared : Exchange {
  // Of a token, four values at a time, lane by lane: [four of HEAD / 8][token][quarter of a warp]
  Vec cosine[HEAD / 32][16][4], sine[HEAD / 32][16][4];
  float x[MOVES ? STREAMS : 1][NEW];  // where each stream stands
  u32 now[STREAMS][NEW / 2];          // the same, rounded
  u32 enter[D / GRID][FEAT / 2 + 1];  // this program's features of the way in
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host thinks that less shared memory is needed");

struct Args {
  const T* weights;       // [LAYERS][qkv, out, gate and up, down], packed, norms multiplied in
  const float* cosine;    // [TOKENS, HEAD]
  const float* sine;      // [TOKENS, HEAD]
  const T* enter;         // [D, FEAT]
  const T* enter_bias;    // [D]
  const T* leave;         // [LEAVE, D], times the last norm
  const T* leave_bias;    // [LEAVE]
  const T* head;          // [sides, calls, b, TOKENS - PATCH, D]: tokens before the patch
  const float* guidance;  // [b]
  const float* length;    // [calls, b]
  float* state;           // [b, NEW]: what enters; moved
  T* x;                   // [sides b TOKENS, D]: the residual stream
  T* qkv;                 // [sides b TOKENS, QKV_N]
  T* gated;               // [sides b TOKENS, F]
  float* made;            // [sides b, GIVEN]: what leaves; with MOVES the velocity
  u32* meeting;           // zero before the first launch ever; launches leave its lower bits zero
  float eps, scale;
  int b, sides, calls;
};

// --- attention ---

#define WORDS (HEAD / 16)  // of half a head, in a lane
#define COLUMNS (HEAD / 8)  // of the matrix unit's tiles, in a head

// Words 0 ... WORDS - 1: values HEAD / 8 t ... of the lower half; then those they are rotated with.
DEVICE void load_head(u32* w, const T* at, bool there) {
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int i = 0; i < WORDS / 4; i++) {
      Vec v{0, 0, 0, 0};
      if (there) v = load16_near(at + half * (HEAD / 2) + (lane_id() & 3) * (HEAD / 8) + i * 8);
      u32* to = w + half * WORDS + i * 4;
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    }
}

// Rotate a query head and a key head of one token.
DEVICE void rotate(const Shared& s, u32* q, u32* k, int token) {
#pragma unroll
  for (int i = 0; i < WORDS / 2; i++) {
    const Vec cs = load16_shared(&s.cosine[i][token][lane_id() & 3]),
              ns = load16_shared(&s.sine[i][token][lane_id() & 3]);
    const u32 c[4] = {cs.x, cs.y, cs.z, cs.w}, n[4] = {ns.x, ns.y, ns.z, ns.w};
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int which = 0; which < 2; which++) {
        u32 *low = (which ? k : q) + 2 * i + half, *high = low + WORDS;
        float a[2], b[2], turned_a[2], turned_b[2];
        values_of(*low, a), values_of(*high, b);
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float cosine = bits_to_float(c[2 * half + e]), sine = bits_to_float(n[2 * half + e]);
          turned_a[e] = a[e] * cosine - b[e] * sine;
          turned_b[e] = b[e] * cosine + a[e] * sine;
        }
        *low = word_of(turned_a), *high = word_of(turned_b);
      }
  }
}

DEVICE u32 joined(u32 a, u32 b, int upper) {
  return upper ? (a >> 16) | (b & 0xffff0000u) : (a & 0xffffu) | (b << 16);
}

// One head of one sequence, by one warp; what it gives lies as `deep` takes it.
DEVICE void attend(const Shared& s, const T* qkv, int head, bool there, float scale, Vec (*out)[2]) {
  const int g = lane_id() >> 2, t = lane_id() & 3;
  u32 q[2][2 * WORDS], k[2][2 * WORDS], v[4][COLUMNS / 2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int token = g + 8 * h;
    const T* row = qkv + (long long)token * QKV_N;
    load_head(q[h], row + head * HEAD, there && token < TOKENS);
    load_head(k[h], row + (HEADS + head / GROUP) * HEAD, there && token < TOKENS);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int token = 2 * t + i % 2 + i / 2 * 8;
    const T* at = qkv + (long long)token * QKV_N + (HEADS + KV + head / GROUP) * HEAD + g * COLUMNS;
#pragma unroll
    for (int c = 0; c < COLUMNS / 8; c++) {
      Vec x{0, 0, 0, 0};
      if (there && token < TOKENS) x = load16_near(at + c * 8);
      v[i][c * 4] = x.x, v[i][c * 4 + 1] = x.y, v[i][c * 4 + 2] = x.z, v[i][c * 4 + 3] = x.w;
    }
  }
#pragma unroll
  for (int h = 0; h < 2; h++) rotate(s, q[h], k[h], g + 8 * h);
  float score[2][4] = {};
#pragma unroll
  for (int i = 0; i < WORDS; i++)
#pragma unroll
    for (int n = 0; n < 2; n++)
      mma(score[n], q[0][2 * i], q[1][2 * i], q[0][2 * i + 1], q[1][2 * i + 1], k[n][2 * i], k[n][2 * i + 1]);
  float share[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float peak = -INFINITY, total = 0;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& x = score[n][2 * h + e];
        x = 8 * n + 2 * t + e < TOKENS ? x * scale : -INFINITY;
        peak = fmaxf(peak, x);
      }
    peak = fmaxf(peak, shuffle_xor(peak, 1)), peak = fmaxf(peak, shuffle_xor(peak, 2));
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& x = score[n][2 * h + e];
        x = expf(x - peak);
        total += x;
      }
    total += shuffle_xor(total, 1), total += shuffle_xor(total, 2);
    share[h] = 1 / total;
  }
  const u32 p[4] = {pack_half(score[0][0], score[0][1]), pack_half(score[0][2], score[0][3]),
                    pack_half(score[1][0], score[1][1]), pack_half(score[1][2], score[1][3])};
  // Column 2 t + e of tile j is value (2 t + e) COLUMNS + j of the head, so that a lane's values of v, and of
  // the result, lie side by side.
  u32 words[2][HEAD / 8];
#pragma unroll
  for (int j = 0; j < COLUMNS; j += 2) {
    float one[4] = {}, two[4] = {};
    const int w = j / 2;
    mma(one, p[0], p[1], p[2], p[3], joined(v[0][w], v[1][w], 0), joined(v[2][w], v[3][w], 0));
    mma(two, p[0], p[1], p[2], p[3], joined(v[0][w], v[1][w], 1), joined(v[2][w], v[3][w], 1));
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int e = 0; e < 2; e++)
        words[h][e * (COLUMNS / 2) + w] = pack_half(one[2 * h + e] * share[h], two[2 * h + e] * share[h]);
  }
#pragma unroll
  for (int r = 0; r < HEAD / 32; r++)
#pragma unroll
    for (int h = 0; h < 2; h++)
      out[r][h] =
          Vec{words[h][4 * r], words[h][4 * r + 1], words[h][4 * r + 2], words[h][4 * r + 3]};
}

DEVICE void attend_and_out(Shared& s, Turn& now, const T* qkv, T* x, int sequences, float scale) {
  typedef Out P;
  static_assert(P::blocks == HEAD / 32, "a warp's part of k is a head");
  const int part = warp_id() % HERE, mine = warp_id() / HERE;
#pragma unroll 1
  for (int base = 0; base < sequences + SEQUENCES; base += SEQUENCES) {
    const bool here = base < sequences;
    float sum[P::tiles][2][4] = {};
    if (here) {
      Vec row[P::blocks][2];
      attend(s, qkv + (long long)(base + mine) * (TOKENS * QKV_N), rank_id() * HERE + part,
             base + mine < sequences, scale, row);
      deep<P, 2, P::blocks>(s, now.message, part, base + SEQUENCES >= sequences, row, sum, [](int) {});
    }
    if (base)
      finish_added<P, OUT_TILES>(s, now.chunk - 1, x, [&](int place) {
        const int sequence = base - SEQUENCES + place / 16, token = place % 16;
        return token < TOKENS && sequence < sequences ? sequence * TOKENS + token : -1;
      });
    if (here) {
#pragma unroll
      for (int i = 0; i < P::tiles; i++) spread<P, OUT_TILES, 2>(s, now.chunk, part, i, 2 * mine, sum[i]);
      sent<P, OUT_TILES, false>(s, now.chunk);
      now.chunk++;
    }
  }
  now.message += P::messages;
}

// --- the ends of an estimate ---

#if MOVES
// Each program moves all streams, alike.
DEVICE void step(Shared& s, const Args& a, int call) {
  for (int b = warp_id(); b < a.b; b += WARPS) {
    const float *p = a.made + b * NEW, *q = a.made + (a.b + b) * NEW, length = a.length[call * a.b + b];
    float both = 0, other = 0;
    if (a.sides == 2) {
      for (int i = lane_id(); i < NEW; i += 32) {
        const float y = bits_to_float(load4(q + i));
        both += bits_to_float(load4(p + i)) * y, other += y * y;
      }
#pragma unroll
      for (int o = 16; o; o >>= 1) both += shuffle_xor(both, o), other += shuffle_xor(other, o);
    }
    const float fit = both / (other + 1e-8f);
    for (int i = lane_id(); i < NEW; i += 32) {
      float v = bits_to_float(load4(p + i));
      if (a.sides == 2) {
        const float base = bits_to_float(load4(q + i)) * fit;
        v = base + a.guidance[b] * (v - base);
      }
      s.x[b][i] -= length * v;
    }
  }
  part_sync(COMPUTE);
}
#endif

// Rows of the next estimate, this program's values of each.
DEVICE void enter(Shared& s, const Args& a, int call) {
  constexpr int mine = D / GRID, before = TOKENS - PATCH;
  const int first = cta_id() * mine;
  const float* from = MOVES ? &s.x[0][0] : a.state;
  for (int i = thread_id(); i < a.b * (NEW / 2); i += COMPUTE)
    (&s.now[0][0])[i] = pack_half(from[2 * i], from[2 * i + 1]);
  for (int i = thread_id(); i < a.sides * a.b * before * (mine / 2); i += COMPUTE) {
    const int word = i % (mine / 2), token = i / (mine / 2) % before, sequence = i / (mine / 2) / before;
    const int side = sequence / a.b, b = sequence % a.b;
    const T* at =
        a.head + ((((long long)side * a.calls + call) * a.b + b) * before + token) * D + first + 2 * word;
    *(u32*)(a.x + (sequence * TOKENS + token) * D + first + 2 * word) = load4(at);
  }
  part_sync(COMPUTE);
  for (int i = thread_id(); i < a.b * PATCH * (mine / 2); i += COMPUTE) {
    const int pair = i % (mine / 2), token = i / (mine / 2) % PATCH, b = i / (mine / 2) / PATCH;
    float sum[2] = {};
#pragma unroll 8
    for (int k = 0; k < FEAT / 2; k++) {
      const u32 x = s.now[b][token * (FEAT / 2) + k];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const u32 w = s.enter[2 * pair + e][k];
        sum[e] += first_of(x) * first_of(w) + second_of(x) * second_of(w);
      }
    }
#pragma unroll
    for (int e = 0; e < 2; e++) sum[e] += wide(a.enter_bias[first + 2 * pair + e]);
    for (int side = 0; side < a.sides; side++)
      *(u32*)(a.x + ((side * a.b + b) * TOKENS + before + token) * D + first + 2 * pair) = word_of(sum);
  }
}

// A warp makes one value at a time, the norm of its row included.
DEVICE void leave_all(const Args& a) {
  for (int i = warp_id() * GRID + cta_id(); i < a.sides * a.b * GIVEN; i += WARPS * GRID) {
    const int feature = i % LEAVE, token = i / LEAVE % READ, sequence = i / GIVEN;
    const T *row = a.x + (sequence * TOKENS + FIRST + token) * D, *w = a.leave + feature * D;
    float sum = 0, squares = 0;
#pragma unroll 4
    for (int k = lane_id() * 8; k < D; k += 256) {
      const Vec x = load16(row + k), y = load16_constant(w + k);
      const u32 xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
      squares += square(x);
#pragma unroll
      for (int e = 0; e < 4; e++) sum += first_of(xs[e]) * first_of(ys[e]) + second_of(xs[e]) * second_of(ys[e]);
    }
#pragma unroll
    for (int o = 16; o; o >>= 1) sum += shuffle_xor(sum, o), squares += shuffle_xor(squares, o);
    if (lane_id() == 0) {
      sum = rounded(sum * rsqrtf(squares / D + a.eps) + wide(a.leave_bias[feature]));
      ((u32*)a.made)[i] = float_to_bits(sum);
    }
  }
}

// --- the loop ---

CLUSTERED_KERNEL(COMPUTE + 32, CLUSTER) flow(const Args a) {
  SHARED_MEMORY(memory);
  Shared& s = *(Shared*)memory;
  const int thread = thread_id(), all = COMPUTE + 32;
  for (int i = thread; i < 16 * HEAD / 2; i += all) {
    const int token = i / (HEAD / 2), value = i % (HEAD / 2), lane = value / (HEAD / 8), k = value % (HEAD / 8);
    const int from = least(token, TOKENS - 1) * HEAD + value;
    ((float*)&s.cosine[k / 4][token][lane])[k % 4] = a.cosine[from];
    ((float*)&s.sine[k / 4][token][lane])[k % 4] = a.sine[from];
  }
  for (int i = thread; MOVES && i < a.b * NEW; i += all) (&s.x[0][0])[i] = a.state[i];
  for (int i = thread; i < D / GRID * (FEAT / 2); i += all)
    s.enter[i / (FEAT / 2)][i % (FEAT / 2)] = ((const u32*)(a.enter + cta_id() * (D / GRID) * FEAT))[i];
  begin(s);
  if (warp_id() == WARPS) {
    if (lane_id() == 0 && !NO_WEIGHTS) send_all(s, a.weights, a.calls);
    return;
  }
  Turn now{0, 0, load_acquire(a.meeting)};  // nobody can have met, or ended, before this program comes
  const int sequences = a.sides * a.b, rows = sequences * TOKENS;
#pragma unroll 1
  for (int call = 0; call < a.calls; call++) {
#if MOVES
    if (call) step(s, a, call - 1);
#endif
    enter(s, a, call);
    meet(a.meeting, now.meeting);
#pragma unroll 1
    for (int layer = 0; layer < LAYERS; layer++) {
      product<Qkv>(s, now, a.x, rows, a.eps, [&](int row, int feature, const float* sum, const float*) {
        *(u32*)(a.qkv + (long long)row * QKV_N + feature) = word_of(sum);
      });
      meet(a.meeting, now.meeting);
      attend_and_out(s, now, a.qkv, a.x, sequences, a.scale);
      meet(a.meeting, now.meeting);
      product<Gate>(s, now, a.x, rows, a.eps, [&](int row, int feature, const float* sum, const float* up) {
        gate(sum, up, a.gated + (long long)row * F + feature);
      });
      meet(a.meeting, now.meeting);
      add_product<Down>(s, now, a.gated, a.x, rows);
      meet(a.meeting, now.meeting);
    }
    leave_all(a);
#if MOVES
    meet(a.meeting, now.meeting);
#endif
  }
#if MOVES
  step(s, a, a.calls - 1);
  if (cta_id() == 0)
    for (int i = thread; i < a.b * NEW; i += COMPUTE) a.state[i] = (&s.x[0][0])[i];
#endif
}

#ifdef RUN
RUN(flow, COMPUTE + 32, sizeof(Shared))
#endif
