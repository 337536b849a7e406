// All layers of a language model for one token a row in one launch, on clusters.cuh, over a paged cache. Heads
// are not normalised; rotation is in fp32. language.py says what is computed and names the twin.

#define LANES (HEAD / 8)      // that hold one token's head, 16 bytes each
#define TOGETHER (32 / LANES)  // tokens a warp looks at with one load
#define UNROLL 4               // ... and loads it has under way

struct Args {
  const T* weights;        // [LAYERS][qkv, out, gate and up, down], packed, norms multiplied in
  const float* cosine;     // [b, HEAD]
  const float* sine;       // [b, HEAD]
  T* x;                    // [b, D]; overwritten
  T* qkv;                  // [b, QKV_N]
  T* attended;             // [b, HEADS * HEAD]
  T* gated;                // [b, F]
  T* kv;                   // [LAYERS, 2, blocks, block_tokens, KV, HEAD]
  const int* blocks;       // [slots, blocks_stride]
  const long long* slots;  // [b]
  const int* position;     // [b]
  const long long* index;  // [b]: flat cache row of this token
  u32* meeting;            // zero before the first launch ever; launches leave its lower bits zero
  long long layer_stride, kv_stride, blocks_stride;
  float eps, scale;
  int b, block_tokens;
};

struct Shared : Exchange {
  float parts[WARPS][HEAD + 2];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host thinks that less shared memory is needed");
static_assert(LANES >= 2 && LANES <= 32, "a head is two to 32 lanes wide");

// A lane's 16 bytes of a head; lanes of each TOGETHER-th part of a warp hold the whole.
struct Piece {
  float v[8];
};
DEVICE Piece spread_out(const Vec& x) {
  Piece p;
  const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; i++) values_of(words[i], p.v + 2 * i);
  return p;
}
DEVICE Vec gathered(const Piece& p) {
  return Vec{word_of(p.v), word_of(p.v + 2), word_of(p.v + 4), word_of(p.v + 6)};
}

// Rotate, and round once. The value a lane's value is rotated with is in the lane half a head away.
DEVICE Vec turned(const Vec& x, const float* cosine, const float* sine) {
  const int at = lane_id() % LANES * 8;
  Piece p = spread_out(x);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float other = shuffle_xor(p.v[i], LANES / 2);
    p.v[i] = p.v[i] * cosine[at + i] + (at < HEAD / 2 ? -other : other) * sine[at + i];
  }
  return gathered(p);
}

DEVICE float dot(const Piece& a, const Piece& b) {
  float total = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) total += a.v[i] * b.v[i];
#pragma unroll
  for (int o = LANES / 2; o; o >>= 1) total += shuffle_xor(total, o);
  return total;
}

// One program takes one query head of one row; warps share its past.
DEVICE void attend(Shared& s, const Args& a, int layer) {
  const int lane = lane_id(), warp = warp_id(), part = lane / LANES, at = lane % LANES * 8;
#pragma unroll 1
  for (int item = cta_id(); item < a.b * HEADS; item += GRID) {
    const int row = item / HEADS, head = item % HEADS, kv_head = head / GROUP, past = a.position[row];
    const int* table = a.blocks + a.slots[row] * a.blocks_stride;
    T* keys = a.kv + layer * a.layer_stride + kv_head * HEAD + at;
    T* values = keys + a.kv_stride;
    const T* qkv = a.qkv + (long long)row * QKV_N + at;
    const Vec asked = load16(qkv + head * HEAD), asked_k = load16(qkv + (HEADS + kv_head) * HEAD),
              new_v = load16(qkv + (HEADS + KV + kv_head) * HEAD);
    const Piece q = spread_out(turned(asked, a.cosine + row * HEAD, a.sine + row * HEAD));
    const Vec new_k = turned(asked_k, a.cosine + row * HEAD, a.sine + row * HEAD);
    const bool first = warp == 0 && part == 0;  // the token of this step is looked at once
    if (first && head % GROUP == 0) {
      const long long place = a.index[row] * (KV * HEAD);
      *(Vec*)(keys + place) = new_k, *(Vec*)(values + place) = new_v;
    }
    Piece out;
    const Piece fresh = spread_out(new_v);
    const float own = dot(q, spread_out(new_k)) * a.scale;
    float best = first ? own : -INFINITY, weight = first ? 1.f : 0.f;
#pragma unroll
    for (int e = 0; e < 8; e++) out.v[e] = first ? fresh.v[e] : 0.f;
#pragma unroll 1
    for (int start = 0; start < past; start += WARPS * TOGETHER * UNROLL) {
      Vec k[UNROLL], v[UNROLL];
      bool there[UNROLL];
      float score[UNROLL], peak = best;
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        const int token = start + (u * WARPS + warp) * TOGETHER + part;
        there[u] = token < past;
        k[u] = v[u] = Vec{0, 0, 0, 0};
        if (there[u]) {
          const long long place = ((long long)table[token / a.block_tokens] * a.block_tokens +
                                   token % a.block_tokens) *
                                  (KV * HEAD);
          k[u] = load16(keys + place), v[u] = load16(values + place);
        }
      }
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        score[u] = dot(q, spread_out(k[u])) * a.scale;
        if (there[u]) peak = fmaxf(peak, score[u]);
      }
      const float shrink = best == -INFINITY ? 0.f : expf(best - peak);
      weight *= shrink, best = peak;
#pragma unroll
      for (int e = 0; e < 8; e++) out.v[e] *= shrink;
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        const float p = there[u] ? expf(score[u] - peak) : 0.f;
        const Piece value = spread_out(v[u]);
        weight += p;
#pragma unroll
        for (int e = 0; e < 8; e++) out.v[e] += p * value.v[e];
      }
    }
    // Parts of a warp, then warps, are put together: each counts by how far its peak is below the highest.
    float peak = best;
#pragma unroll
    for (int o = LANES; o < 32; o <<= 1) peak = fmaxf(peak, shuffle_xor(peak, o));
    const float share = best == -INFINITY ? 0.f : expf(best - peak);
    weight *= share;
#pragma unroll
    for (int o = LANES; o < 32; o <<= 1) weight += shuffle_xor(weight, o);
#pragma unroll
    for (int e = 0; e < 8; e++) {
      out.v[e] *= share;
#pragma unroll
      for (int o = LANES; o < 32; o <<= 1) out.v[e] += shuffle_xor(out.v[e], o);
    }
    float* mine = s.parts[warp];
    if (part == 0) {
#pragma unroll
      for (int e = 0; e < 8; e++) mine[at + e] = out.v[e];
      if (lane == 0) mine[HEAD] = peak, mine[HEAD + 1] = weight;
    }
    part_sync(COMPUTE);
#pragma unroll 1
    for (int e = 2 * thread_id(); e < HEAD; e += 2 * COMPUTE) {
      float highest = -INFINITY, total[2] = {}, sum = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) highest = fmaxf(highest, s.parts[w][HEAD]);
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const float* from = s.parts[w];
        const float share = from[HEAD] == -INFINITY ? 0.f : expf(from[HEAD] - highest);
        total[0] += share * from[e], total[1] += share * from[e + 1], sum += share * from[HEAD + 1];
      }
      total[0] /= sum, total[1] /= sum;
      *(u32*)(a.attended + (long long)row * (HEADS * HEAD) + head * HEAD + e) = word_of(total);
    }
    part_sync(COMPUTE);
  }
}

CLUSTERED_KERNEL(COMPUTE + 32, CLUSTER) language(const Args a) {
  SHARED_MEMORY(memory);
  Shared& s = *(Shared*)memory;
  begin(s);
  if (warp_id() == WARPS) {
    if (lane_id() == 0 && !NO_WEIGHTS) send_all(s, a.weights, 1);
    return;
  }
  Turn now{0, 0, load_acquire(a.meeting)};  // nobody can have met, or ended, before this program comes
#pragma unroll 1
  for (int layer = 0; layer < LAYERS; layer++) {
    product<Qkv>(s, now, a.x, a.b, a.eps, [&](int row, int feature, const float* sum, const float*) {
      *(u32*)(a.qkv + (long long)row * QKV_N + feature) = word_of(sum);
    });
    meet(a.meeting, now.meeting);
    attend(s, a, layer);
    meet(a.meeting, now.meeting);
    add_product<Out>(s, now, a.attended, a.x, a.b);
    meet(a.meeting, now.meeting);
    product<Gate>(s, now, a.x, a.b, a.eps, [&](int row, int feature, const float* sum, const float* up) {
      gate(sum, up, a.gated + (long long)row * F + feature);
    });
    meet(a.meeting, now.meeting);
    add_product<Down>(s, now, a.gated, a.x, a.b);
    meet(a.meeting, now.meeting);
  }
}

#ifdef RUN
RUN(language, COMPUTE + 32, sizeof(Shared))
#endif
