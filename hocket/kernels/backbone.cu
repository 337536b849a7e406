// All layers of a backbone for one token a row in one launch, on phases.cuh, over a paged cache. resident.py
// says what is computed and names the twin.

#define LANES (HEAD / VALUES)  // that hold one token's head, 16 bytes each
#define TOGETHER (32 / LANES)  // tokens a warp looks at with one load
#define UNROLL 4               // ... and loads it has under way

struct Args {
  const T* weights;        // [LAYERS][qkv, out, gate and up, down], packed
  const T* norms;          // [LAYERS][HEAD of q, HEAD of k], then D
  const T* cosine;         // [b, HEAD]
  const T* sine;           // [b, HEAD]
  T* x;                    // [b, D]; overwritten
  T* qkv;                  // [b, QKV_N]
  T* attended;             // [b, HEADS * HEAD]
  T* gated;                // [b, F]
  T* out;                  // [b, D]: normalised
  T* kv;                   // [LAYERS, 2, blocks, block_tokens, KV, HEAD]
  const int* blocks;       // [slots, blocks_stride]
  const long long* slots;  // [b]
  const int* position;     // [b]
  const long long* index;  // [b]: flat cache row of this token
  u32* meeting;
  long long* stamps;  // for measuring
  long long layer_stride, kv_stride, blocks_stride;
  float eps, scale;
  int b, block_tokens;
};

#define TABLE 256  // entries of a row's block table that are kept at hand

// What a launch reads again and again: of this program's first row, but for the norms.
struct Constants {
  T norms[LAYERS * 2 * HEAD];
  T cosine[HEAD], sine[HEAD];
  int table[TABLE];
  int past;
  long long index;
};
static_assert(sizeof(Constants) <= CONSTANTS, "the host thinks that less shared memory is needed");

// A lane's 16 bytes of a head; lanes of each TOGETHER-th part of a warp hold the whole.
struct Piece {
  float v[VALUES];
};

DEVICE Piece spread(const Vec& x) {
  Piece p;
  const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < VALUES; i++)
#if HALF
    p.v[i] = i & 1 ? second_of(words[i / 2]) : first_of(words[i / 2]);
#else
    p.v[i] = first_of(words[i]);
#endif
  return p;
}
DEVICE Vec gathered(const Piece& p) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
#if HALF
    words[i] = pack_half(p.v[2 * i], p.v[2 * i + 1]);
#else
    words[i] = float_to_bits(p.v[i]);
#endif
  return Vec{words[0], words[1], words[2], words[3]};
}

// Normalise and rotate; every product is rounded as the twin's are. The value a lane's value is rotated with
// is in the lane half a head away.
DEVICE Piece turned(Piece x, const T* norm, const T* cosine, const T* sine, float eps) {
  const int at = lane_id() % LANES * VALUES;
  float total = 0;
#pragma unroll
  for (int i = 0; i < VALUES; i++) total += x.v[i] * x.v[i];
#pragma unroll
  for (int o = LANES / 2; o; o >>= 1) total += shuffle_xor(total, o);
  const float scale = rsqrtf(total / HEAD + eps);
  const Piece w = spread(*(const Vec*)(norm + at)), c = spread(*(const Vec*)(cosine + at)),
              n = spread(*(const Vec*)(sine + at));
#pragma unroll
  for (int i = 0; i < VALUES; i++) {
    const float mine = rounded(w.v[i] * rounded(x.v[i] * scale));
    const float other = shuffle_xor(mine, LANES / 2);
    x.v[i] = rounded(rounded(mine * c.v[i]) + rounded((at < HEAD / 2 ? -other : other) * n.v[i]));
  }
  return x;
}

DEVICE float dot(const Piece& a, const Piece& b) {
  float total = 0;
#pragma unroll
  for (int i = 0; i < VALUES; i++) total += a.v[i] * b.v[i];
#pragma unroll
  for (int o = LANES / 2; o; o >>= 1) total += shuffle_xor(total, o);
  return total;
}

// One program takes one key/value head of one row, with the query heads that share it; warps share its past.
DEVICE void attend(Shared& s, const Args& a, const Constants& c, int layer) {
  static_assert(LANES >= 2 && LANES <= 32, "a head is two to 32 lanes wide");
  static_assert(WARPS * GROUP * (HEAD + 2) <= WARPS * 16 * PITCH, "the warps' parts fit where sums do");
  const int lane = lane_id(), warp = warp_id(), part = lane / LANES, at = lane % LANES * VALUES;
#pragma unroll 1
  for (int item = cta_id(); item < a.b * KV; item += GRID) {
    const bool known = item == cta_id();
    const int row = item / KV, head = item % KV, past = known ? c.past : a.position[row];
    const int* table =
        known && past <= TABLE * a.block_tokens ? c.table : a.blocks + a.slots[row] * a.blocks_stride;
    T* keys = a.kv + layer * a.layer_stride + head * HEAD + at;
    T* values = keys + a.kv_stride;
    const T* qkv = a.qkv + (long long)row * QKV_N + at;
    const T *cosine = known ? c.cosine : a.cosine + row * HEAD, *sine = known ? c.sine : a.sine + row * HEAD;
    Vec asked[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; i++) asked[i] = load16(qkv + (head * GROUP + i) * HEAD);
    const Vec asked_k = load16(qkv + (HEADS + head) * HEAD), new_v = load16(qkv + (HEADS + KV + head) * HEAD);
    Piece q[GROUP], out[GROUP];
    float best[GROUP], weight[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; i++)
      q[i] = turned(spread(asked[i]), c.norms + layer * 2 * HEAD, cosine, sine, a.eps);
    const Vec new_k =
        gathered(turned(spread(asked_k), c.norms + (layer * 2 + 1) * HEAD, cosine, sine, a.eps));
    if (warp == 0 && part == 0) {
      const long long place = (known ? c.index : a.index[row]) * (KV * HEAD);
      *(Vec*)(keys + place) = new_k, *(Vec*)(values + place) = new_v;
    }
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      const float score = dot(q[i], spread(new_k)) * a.scale;
      const bool mine = warp == 0 && part == 0;  // the token of this step is looked at once
      best[i] = mine ? score : -INFINITY, weight[i] = mine ? 1.f : 0.f;
      const Piece v = spread(new_v);
#pragma unroll
      for (int e = 0; e < VALUES; e++) out[i].v[e] = mine ? v.v[e] : 0.f;
    }
#pragma unroll 1
    for (int start = 0; start < past; start += WARPS * TOGETHER * UNROLL) {
      Vec k[UNROLL], v[UNROLL];
      bool there[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        const int token = start + (u * WARPS + warp) * TOGETHER + part;
        there[u] = token < past;
        const long long place =
            there[u] ? ((long long)table[token / a.block_tokens] * a.block_tokens + token % a.block_tokens) *
                           (KV * HEAD)
                     : 0;
        k[u] = v[u] = Vec{0, 0, 0, 0};
        if (there[u]) k[u] = load16(keys + place), v[u] = load16(values + place);
      }
#pragma unroll
      for (int i = 0; i < GROUP; i++) {
        float score[UNROLL], peak = best[i];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
          score[u] = dot(q[i], spread(k[u])) * a.scale;
          if (there[u]) peak = fmaxf(peak, score[u]);
        }
        const float shrink = best[i] == -INFINITY ? 0.f : expf(best[i] - peak);
        weight[i] *= shrink, best[i] = peak;
#pragma unroll
        for (int e = 0; e < VALUES; e++) out[i].v[e] *= shrink;
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
          const float p = there[u] ? expf(score[u] - peak) : 0.f;
          const Piece value = spread(v[u]);
          weight[i] += p;
#pragma unroll
          for (int e = 0; e < VALUES; e++) out[i].v[e] += p * value.v[e];
        }
      }
    }
    // Parts of a warp, then warps, are put together: each counts by how far its peak is below the highest.
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      float peak = best[i];
#pragma unroll
      for (int o = LANES; o < 32; o <<= 1) peak = fmaxf(peak, shuffle_xor(peak, o));
      const float share = best[i] == -INFINITY ? 0.f : expf(best[i] - peak);
      weight[i] *= share;
#pragma unroll
      for (int o = LANES; o < 32; o <<= 1) weight[i] += shuffle_xor(weight[i], o);
#pragma unroll
      for (int e = 0; e < VALUES; e++) {
        out[i].v[e] *= share;
#pragma unroll
        for (int o = LANES; o < 32; o <<= 1) out[i].v[e] += shuffle_xor(out[i].v[e], o);
      }
      float* mine = s.sums + (warp * GROUP + i) * (HEAD + 2);
      if (part == 0) {
#pragma unroll
        for (int e = 0; e < VALUES; e++) mine[at + e] = out[i].v[e];
        if (lane == 0) mine[HEAD] = peak, mine[HEAD + 1] = weight[i];
      }
    }
    part_sync(COMPUTE);
#pragma unroll 1
    for (int o = thread_id(); o < GROUP * HEAD; o += COMPUTE) {
      const int i = o / HEAD, e = o % HEAD;
      const float* from = s.sums + i * (HEAD + 2);
      float peak = -INFINITY, total = 0, sum = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) peak = fmaxf(peak, from[w * GROUP * (HEAD + 2) + HEAD]);
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const float* part = from + w * GROUP * (HEAD + 2);
        const float share = part[HEAD] == -INFINITY ? 0.f : expf(part[HEAD] - peak);
        total += share * part[e], sum += share * part[HEAD + 1];
      }
      a.attended[(long long)row * (HEADS * HEAD) + (head * GROUP + i) * HEAD + e] = narrow(total / sum);
    }
    part_sync(COMPUTE);
  }
}

// Ask for the past of the first row into L2, while the products before are still on their way.
DEVICE void recall(const Args& a, const Constants& c, int layer) {
  constexpr int lines = most(1, HEAD * (int)sizeof(T) / 128);  // of 128 bytes in a token's head
  if (cta_id() >= a.b * KV) return;
  const bool known = c.past <= TABLE * a.block_tokens;
  const T* keys = a.kv + layer * a.layer_stride + cta_id() % KV * HEAD;
#pragma unroll 1
  for (int i = thread_id(); known && i < c.past * lines; i += COMPUTE) {
    const int token = i / lines, block = c.table[token / a.block_tokens];
    const T* at = keys + ((long long)block * a.block_tokens + token % a.block_tokens) * (KV * HEAD) +
                  i % lines * (128 / (int)sizeof(T));
    prefetch(at), prefetch(at + a.kv_stride);
  }
}

// The last norm: one program takes one row.
#if HALF
DEVICE u32 normed(u32 x, u32 g, float scale) {
  x = pack_half(first_of(x) * scale,
                second_of(x) * scale);  // rounded before the norm's weight, as the twin does
  return pack_half(first_of(x) * first_of(g), second_of(x) * second_of(g));
}
#else
DEVICE u32 normed(u32 x, u32 g, float scale) {
  return float_to_bits(bits_to_float(x) * scale * bits_to_float(g));
}
#endif

DEVICE void finish(Shared& s, const Args& a) {
  const T* norm = a.norms + LAYERS * 2 * HEAD;
  for (int row = cta_id(); row < a.b; row += GRID) {
    const T* x = a.x + (long long)row * D;
    float total = 0;
    for (int i = thread_id() * VALUES; i < D; i += COMPUTE * VALUES) {
      const Vec v = load16(x + i);
      total += square(v);
    }
#pragma unroll
    for (int o = 16; o; o >>= 1) total += shuffle_xor(total, o);
    if (lane_id() == 0) s.best[warp_id()] = total;
    part_sync(COMPUTE);
    total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += s.best[w];
    const float scale = rsqrtf(total / D + a.eps);
    for (int i = thread_id() * VALUES; i < D; i += COMPUTE * VALUES) {
      const Vec v = load16(x + i), w = load16_constant(norm + i);
      *(Vec*)(a.out + (long long)row * D + i) = Vec{normed(v.x, w.x, scale), normed(v.y, w.y, scale),
                                                    normed(v.z, w.z, scale), normed(v.w, w.w, scale)};
    }
    part_sync(COMPUTE);
  }
}

// Where rows lie: the residual stream is written in place.
struct Rows {
  const Args& a;
  DEVICE_MEMBER Words in() const { return {(u32*)a.x, 0}; }
  DEVICE_MEMBER Words middle() const { return in(); }
  DEVICE_MEMBER Words out() const { return in(); }
  DEVICE_MEMBER Words qkv() const { return {(u32*)a.qkv, 0}; }
  DEVICE_MEMBER Words attended() const { return {(u32*)a.attended, 0}; }
  DEVICE_MEMBER Words gated() const { return {(u32*)a.gated, 0}; }
};

KERNEL(COMPUTE + 32) advance(const Args a) {
  SHARED_MEMORY(memory);
  Shared& s = *(Shared*)memory;
#if STAMPS
  stamps = a.stamps;
#endif
  Constants& c = *(Constants*)s.constants;
  for (int i = thread_id(); i < LAYERS * 2 * HEAD; i += COMPUTE + 32) c.norms[i] = a.norms[i];
  if (cta_id() < a.b * KV) {
    const int row = cta_id() / KV;
    const int* table = a.blocks + a.slots[row] * a.blocks_stride;
    for (int i = thread_id(); i < HEAD; i += COMPUTE + 32)
      c.cosine[i] = a.cosine[row * HEAD + i], c.sine[i] = a.sine[row * HEAD + i];
    for (int i = thread_id(); i < least(TABLE, (a.position[row] + a.block_tokens - 1) / a.block_tokens);
         i += COMPUTE + 32)
      c.table[i] = table[i];
    if (thread_id() == 0) c.past = a.position[row], c.index = a.index[row];
  }
  begin(s);
  if (warp_id() == WARPS) {
    if (lane_id() == 0 && !NO_WEIGHTS) {
      int message = 0;
      const char* from = (const char*)a.weights;
      for (int layer = 0; layer < LAYERS; layer++) send_block(s, message, from, a.b);
    }
    return;
  }
  u32 turn = load_acquire(a.meeting);  // nobody can have met before this program comes
  Course now{};
  const Rows r{a};
#pragma unroll 1
  for (int layer = 0; layer < LAYERS; layer++)
    block(
        s, now, a.meeting, turn, r, a.b, a.eps, STAMPS && layer == LAYERS / 2, [&] { recall(a, c, layer); },
        [&] { attend(s, a, c, layer); });
  finish(s, a);
}

#ifdef RUN
RUN(advance, COMPUTE + 32, sizeof(Shared))
#endif
