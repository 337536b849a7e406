// All passes of a code predictor in one launch, on phases.cuh. resident.py says what is computed and names
// the twin.

#define PASSES (TOKENS - 1)
#define PAIRS ((HEAD / 2 + 31) / 32)  // of a head's values, rotated together, in a lane

// What a launch reads again and again.
struct Constants {
  T norms[LAYERS * 2 * HEAD];
  T cosine[TOKENS * HEAD], sine[TOKENS * HEAD];
  u32 keys[TOKENS];  // of this program's first row, and its options
  float temperature;
  u32 top_k;
};
static_assert(sizeof(Constants) <= CONSTANTS, "the host thinks that less shared memory is needed");

struct Args {
  const T* weights;  // [LAYERS][qkv, out, gate and up, down], then [PASSES] heads, packed
  const T* norms;    // [LAYERS][HEAD of q, HEAD of k]
  const T* cosine;   // [TOKENS, HEAD]
  const T* sine;     // [TOKENS, HEAD]
  const T* embed;    // [PASSES, VOCAB, D]
  const T* first;    // [2 b, D]: the two rows of the first pass
  u32* fresh;        // [2 b, D]: what a pass begins with
  u32* x;            // [2 b, D]
  u32* middle;       // [2 b, D]
  u32* qkv;          // [2 b, QKV_N]
  u32* attended;     // [2 b, HEADS * HEAD]
  u32* gated;        // [2 b, F]
  u32* logits;       // [2 b, VOCAB]; if WAITED, of these seven each twice, and all EMPTY
  T* all_logits;     // [b, PASSES, VOCAB], or null
  T* kv;             // [LAYERS, b, HEADS, 2, TOKENS, HEAD]: a head's own, so that nobody waits for another's
  u32* meeting;      // zero before the first launch ever; launches leave its lower bits zero
  const float* temperature;
  const int* top_k;
  const long long* slots;
  const long long* key;
  long long* codes;
  long long temperature_stride, top_k_stride, key_stride, codes_stride;
  float eps, scale;
  int b;
};

// --- attention over the few tokens of a frame: a warp takes one query head of one row ---

// A lane's values of a head: PAIRS of the lower half, then the PAIRS they are rotated with.
struct Piece {
  float v[2 * PAIRS];
};

static_assert(PAIRS * sizeof(T) == 4, "a lane's part of half a head is one word");

// Normalise and rotate; every product is rounded as the twin's are.
DEVICE Piece turned(Piece x, const T* norm, const T* cosine, const T* sine, float eps) {
  const int p = lane_id() * PAIRS;
  float total = 0;
#pragma unroll
  for (int i = 0; i < 2 * PAIRS; i++) total += x.v[i] * x.v[i];
#pragma unroll
  for (int o = 16; o; o >>= 1) total += shuffle_xor(total, o);
  const float scale = rsqrtf(total / HEAD + eps);
  if (p < HEAD / 2) {
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      const float a = rounded(wide(norm[p + i]) * rounded(x.v[i] * scale));
      const float b = rounded(wide(norm[HEAD / 2 + p + i]) * rounded(x.v[PAIRS + i] * scale));
      x.v[i] = rounded(rounded(a * wide(cosine[p + i])) + rounded(-b * wide(sine[p + i])));
      x.v[PAIRS + i] =
          rounded(rounded(b * wide(cosine[HEAD / 2 + p + i])) + rounded(a * wide(sine[HEAD / 2 + p + i])));
    }
  }
  return x;
}

// Kept keys and values lie as lanes hold them, [lane][2 PAIRS], and stay packed until they are used.
struct Kept {
  u32 w[2 * PAIRS * sizeof(T) / 4];
};

DEVICE Kept packed(const Piece& x) {
  Kept k;
#pragma unroll
  for (int i = 0; i < (int)(sizeof(k.w) / 4); i++)
#if HALF
    k.w[i] = pack_half(x.v[2 * i], x.v[2 * i + 1]);
#else
    k.w[i] = float_to_bits(x.v[i]);
#endif
  return k;
}
DEVICE Piece unpacked(const Kept& k) {
  Piece x;
#pragma unroll
  for (int i = 0; i < (int)(sizeof(k.w) / 4); i++)
#if HALF
    x.v[2 * i] = first_of(k.w[i]), x.v[2 * i + 1] = second_of(k.w[i]);
#else
    x.v[i] = first_of(k.w[i]);
#endif
  return x;
}
DEVICE void keep(T* at, const Kept& k) {
  if (lane_id() * PAIRS < HEAD / 2)
#pragma unroll
    for (int i = 0; i < (int)(sizeof(k.w) / 4); i++) ((u32*)(at + lane_id() * 2 * PAIRS))[i] = k.w[i];
}
DEVICE Kept kept(const T* at) {
  Kept k{};
  const u32* mine = (const u32*)(at + lane_id() * 2 * PAIRS);
  constexpr int words = sizeof(k.w) / 4;
  if (lane_id() * PAIRS < HEAD / 2) {
    if constexpr (words == 1)
      k.w[0] = load4(mine);
    else
#pragma unroll
      for (int i = 0; i < words; i += 2) load8(mine + i, k.w + i);
  }
  return k;
}

// A warp's item: one query head of one stream.
struct Item {
  int stream, head, kv_head;
  T* past;
};
DEVICE Item item_of(const Args& a, int layer, int item) {
  const int stream = item / HEADS, head = item % HEADS, kv_head = head / GROUP;
  return {stream, head, kv_head, a.kv + ((layer * a.b + stream) * HEADS + head) * (2 * TOKENS * HEAD)};
}

// Keys and values of earlier passes, which are there before this pass's.
struct Past {
  Kept k[TOKENS], v[TOKENS];
};

DEVICE void recall(const Args& a, int layer, int item, int start, Past& p) {
  const T* past = item_of(a, layer, item).past;
#pragma unroll
  for (int j = 0; j < TOKENS; j++) {
    p.k[j] = p.v[j] = Kept{};
    if (j < start && item < a.b * HEADS)
      p.k[j] = kept(past + j * HEAD), p.v[j] = kept(past + (TOKENS + j) * HEAD);
  }
}

DEVICE void attend(const Args& a, const Constants& c, const u32* qkv, const Words& attended, int layer,
                   int start, int n, Past& p) {
  static_assert(TOKENS == 16, "a lane pair holds one token's score");
  const int lane = lane_id(), first = warp_id() * GRID + cta_id();
#pragma unroll 1
  for (int item = first; item < a.b * HEADS; item += WARPS * GRID) {
    const Item it = item_of(a, layer, item);
    if (item != first) recall(a, layer, item, start, p);
#pragma unroll 1
    for (int i = 0; i < n; i++) {
      const int now = start + i;
      const u32* row = qkv + (it.stream * n + i) * (QKV_N / EACH) + lane;
      const bool mine = lane * PAIRS < HEAD / 2;
      const int places[3] = {it.head * HEAD, (HEADS + it.kv_head) * HEAD, (HEADS + KV + it.kv_head) * HEAD};
      const u32* at[6];
      u32 words[6];
#pragma unroll
      for (int w = 0; w < 6; w++)
        at[w] = (mine ? row : row - lane) + (places[w / 2] + w % 2 * (HEAD / 2)) / EACH;
      take<6>(at, words);
      warp_sync();
      Piece q{}, here{}, fresh{};
      if (mine) {
        values_of(words[0], q.v), values_of(words[1], q.v + PAIRS);
        values_of(words[2], here.v), values_of(words[3], here.v + PAIRS);
        values_of(words[4], fresh.v), values_of(words[5], fresh.v + PAIRS);
      }
      const Kept new_v = packed(fresh);
      q = turned(q, c.norms + layer * 2 * HEAD, c.cosine + now * HEAD, c.sine + now * HEAD, a.eps);
      const Kept new_k = packed(
          turned(here, c.norms + (layer * 2 + 1) * HEAD, c.cosine + now * HEAD, c.sine + now * HEAD, a.eps));
      keep(it.past + now * HEAD, new_k);
      keep(it.past + (TOKENS + now) * HEAD, new_v);
      float score[TOKENS];
#pragma unroll
      for (int j = 0; j < TOKENS; j++) {
        if (j == now) p.k[j] = new_k, p.v[j] = new_v;
        score[j] = 0;
        const Piece key = unpacked(p.k[j]);
#pragma unroll
        for (int e = 0; e < 2 * PAIRS; e++) score[j] += q.v[e] * key.v[e];
      }
      // Sixteen sums over 32 lanes at once: each step halves the scores a lane cares for.
#pragma unroll
      for (int half = TOKENS / 2, o = 16; half; half >>= 1, o >>= 1)
#pragma unroll
        for (int j = 0; j < half; j++) {
          const float away = lane & o ? score[j] : score[j + half];
          const float mine = lane & o ? score[j + half] : score[j];
          score[j] = mine + shuffle_xor(away, o);
        }
      const int token = lane >> 1;  // whose score this lane now has
      float own = score[0] + shuffle_xor(score[0], 1);
      own = token <= now ? own * a.scale : -INFINITY;
      float peak = own;
#pragma unroll
      for (int o = 2; o < 32; o <<= 1) peak = fmaxf(peak, shuffle_xor(peak, o));
      const float part = expf(own - peak);
      float weight = part;
#pragma unroll
      for (int o = 2; o < 32; o <<= 1) weight += shuffle_xor(weight, o);
      Piece out{};
#pragma unroll
      for (int j = 0; j < TOKENS; j++) {
        const float share = shuffle(part, 2 * j);
        const Piece value = unpacked(p.v[j]);
#pragma unroll
        for (int e = 0; e < 2 * PAIRS; e++) out.v[e] += share * value.v[e];
      }
      const int to = ((it.stream * n + i) * (HEADS * HEAD) + it.head * HEAD) / EACH + lane;
      weight = 1 / weight;
#pragma unroll
      for (int e = 0; e < 2 * PAIRS; e++) out.v[e] *= weight;
      if (mine)
        put(attended, to, word_of(out.v)), put(attended, to + HEAD / 2 / EACH, word_of(out.v + PAIRS));
    }
  }
}

// --- a draw: one program takes one row; the meaning is draw.py's ---

DEVICE u32 mixed(u32 x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

CALLED float gumbel(float uniform) { return -logf(-logf(uniform)); }

DEVICE void draw(Shared& s, const Args& a, const Constants& c, const u32* logits, const Words& fresh,
                 int pass, bool more) {
  constexpr int words = ceil_div(VOCAB / EACH, COMPUTE), each = words * EACH;
  const auto token_of = [&](int i) { return (i / EACH * COMPUTE + thread_id()) * EACH + i % EACH; };
  const int thread = thread_id(), warp = warp_id();
  for (int row = cta_id(); row < a.b; row += GRID) {
    const bool first = row == cta_id();
    const long long slot = first ? 0 : a.slots[row];
    const float heat = first ? c.temperature : a.temperature[slot * a.temperature_stride];
    const u32 key = first ? c.keys[pass + 1] : (u32)a.key[row * a.key_stride + pass + 1];
    u32 k = first ? c.top_k : (u32)a.top_k[slot * a.top_k_stride], least = 0;
    if ((int)k <= 0 || k > VOCAB) k = VOCAB;
    float score[each];
    u32 order[each];
    const u32* at[words];
    u32 got[words];
#pragma unroll
    for (int w = 0; w < words; w++)
      at[w] =
          logits + row * (VOCAB / EACH) + (w * COMPUTE + thread < VOCAB / EACH ? w * COMPUTE + thread : 0);
    take<words>(at, got);
#pragma unroll
    for (int w = 0; w < words; w++) values_of(got[w], score + w * EACH);
#pragma unroll
    for (int i = 0; i < each; i++) {
      const int token = token_of(i);
      const u32 bits = float_to_bits(score[i] + 0.f);  // -0 counts as 0
      order[i] = token >= VOCAB ? 0 : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
      if (!STAMPS && a.all_logits != nullptr && token < VOCAB)
        a.all_logits[((long long)row * PASSES + pass) * VOCAB + token] = narrow(score[i]);
    }
    // The k-th largest, two bits at a time, over integers that are ordered as the scores are.
#pragma unroll 1
    for (int i = 0; i < (HALF ? 8 : 16); i++) {
      const u32 bit = 1u << (30 - 2 * i);
      u32 low = 0, middle = 0, high = 0;
#pragma unroll
      for (int j = 0; j < each; j++) {
        low += order[j] >= least + bit;
        middle += order[j] >= least + 2 * bit;
        high += order[j] >= least + 3 * bit;
      }
      u32 counts = warp_sum(low | middle << 10 | high << 20);  // at most 32 `each` < 1024 in a warp
      if (lane_id() == 0) s.count[i & 1][warp] = counts;
      part_sync(COMPUTE);
      low = middle = high = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        counts = s.count[i & 1][w];
        low += counts & 1023, middle += counts >> 10 & 1023, high += counts >> 20;
      }
      least += high >= k ? 3 * bit : middle >= k ? 2 * bit : low >= k ? bit : 0;
    }
    float best = -INFINITY;
    u32 drawn = 0xffffffffu;
#pragma unroll
    for (int i = 0; i < each; i++) {
      const u32 token = token_of(i);
      if (token < VOCAB && order[i] >= least) {  // few: the logarithms are worth a branch
        float value = score[i];
        if (heat != 0) {
          const u32 noise = mixed(key ^ mixed(token + 1)) >> 9;
          value = value / heat + gumbel(((float)noise + 0.5f) * 1.1920928955078125e-07f);
        }
        if (value > best || drawn == 0xffffffffu) best = value, drawn = token;
      }
    }
#pragma unroll
    for (int o = 16; o; o >>= 1) {
      const float other = shuffle_xor(best, o);
      const u32 token = float_to_bits(shuffle_xor(bits_to_float(drawn), o));
      if (token != 0xffffffffu && (drawn == 0xffffffffu || other > best || (other == best && token < drawn)))
        best = other, drawn = token;
    }
    if (lane_id() == 0) s.best[warp] = best, s.token[warp] = drawn;
    part_sync(COMPUTE);
    best = s.best[0], drawn = s.token[0];
#pragma unroll
    for (int w = 1; w < WARPS; w++) {
      const float other = s.best[w];
      const u32 token = s.token[w];
      if (token != 0xffffffffu && (drawn == 0xffffffffu || other > best || (other == best && token < drawn)))
        best = other, drawn = token;
    }
    if (drawn >= VOCAB) drawn = 0;  // logits that are not numbers
    if (thread == 0) a.codes[row * a.codes_stride + pass + 1] = drawn;
    if (more) {
      const T* from = a.embed + ((long long)(pass + 1) * VOCAB + drawn) * D;
#pragma unroll 1
      for (int i = thread * VALUES; i < D; i += COMPUTE * VALUES)
        put4(fresh, (row * D + i) / EACH, load16_constant(from + i));
    }
    part_sync(COMPUTE);
  }
}

// --- all passes ---

// Of a buffer's two halves the one that is written now and then, if words are waited for.
DEVICE Words words(const Args& a, u32* buffer, int width, int now) {
  const int size = 2 * a.b * (width / EACH);
  return WAITED && now & 1 ? Words{buffer + size, -size} : Words{buffer, size};
}

// Where rows of a layer lie.
struct Level {
  const Args& a;
  int pass, layer;
  DEVICE_MEMBER Words in() const { return layer ? words(a, a.x, D, level()) : words(a, a.fresh, D, pass); }
  DEVICE_MEMBER Words middle() const { return words(a, a.middle, D, level()); }
  DEVICE_MEMBER Words out() const { return words(a, a.x, D, level() + 1); }
  DEVICE_MEMBER Words qkv() const { return words(a, a.qkv, QKV_N, level()); }
  DEVICE_MEMBER Words attended() const { return words(a, a.attended, HEADS * HEAD, level()); }
  DEVICE_MEMBER Words gated() const { return words(a, a.gated, F, level()); }
  DEVICE_MEMBER int level() const { return pass * LAYERS + layer; }
};

DEVICE void send_all(Shared& s, const Args& a) {
  int message = 0;
  const char* heads = (const char*)a.weights + LAYERS * BLOCK_BYTES;
  for (int pass = 0; pass < PASSES; pass++) {
    const char* from = (const char*)a.weights;
    for (int layer = 0; layer < LAYERS; layer++) send_block(s, message, from, pass ? a.b : 2 * a.b);
    send<Head>(s, message, heads, times(a.b));
  }
}

KERNEL(COMPUTE + 32) predict(const Args a) {
  SHARED_MEMORY(memory);
  Shared& s = *(Shared*)memory;
#if STAMPS
  stamps = (long long*)a.all_logits;
#endif
  Constants& c = *(Constants*)s.constants;
  for (int i = thread_id(); i < LAYERS * 2 * HEAD; i += COMPUTE + 32) c.norms[i] = a.norms[i];
  for (int i = thread_id(); i < TOKENS * HEAD; i += COMPUTE + 32)
    c.cosine[i] = a.cosine[i], c.sine[i] = a.sine[i];
  if (cta_id() < a.b) {
    const int row = cta_id();
    if (thread_id() < TOKENS) c.keys[thread_id()] = (u32)a.key[row * a.key_stride + thread_id()];
    if (thread_id() == 0) {
      c.temperature = a.temperature[a.slots[row] * a.temperature_stride];
      c.top_k = (u32)a.top_k[a.slots[row] * a.top_k_stride];
    }
  }
  begin(s);
  if (warp_id() == WARPS) {
    if (lane_id() == 0 && !NO_WEIGHTS) send_all(s, a);
    return;
  }
  u32 turn = load_acquire(a.meeting);  // nobody can have met, or ended, before this program comes
  Course now{};
  const Words fresh = words(a, a.fresh, D, 0);
#pragma unroll 1
  for (int i = (cta_id() * COMPUTE + thread_id()) * VALUES; i < 2 * a.b * D; i += GRID * COMPUTE * VALUES)
    put4(fresh, i / EACH, load16_constant(a.first + i));
  meet(a.meeting, turn);
#pragma unroll 1
  for (int pass = 0; pass < PASSES; pass++) {
    const int n = pass ? 1 : 2, start = pass ? pass + 1 : 0;
#pragma unroll 1
    for (int layer = 0; layer < LAYERS; layer++) {
      const Level r{a, pass, layer};
      Past past;
      block(
          s, now, a.meeting, turn, r, a.b * n, a.eps, STAMPS && pass == 7 && layer == 2,
          [&] { recall(a, layer, warp_id() * GRID + cta_id(), start, past); },
          [&] { attend(a, c, r.qkv().at, r.attended(), layer, start, n, past); });
    }
    [[maybe_unused]] const bool stamping = STAMPS && pass == 7;
    STAMP(11);
    product<Head, true>(s, now, words(a, a.x, D, (pass + 1) * LAYERS).at, n, n - 1, a.b, a.eps, nothing,
                        [&](int row, int feature, const float* sum, const float*, u32) {
                          put(words(a, a.logits, VOCAB, pass), (row * VOCAB + feature) / EACH, word_of(sum));
                        });
    STAMP(12);
    meet(a.meeting, turn);
    STAMP(13);
    draw(s, a, c, words(a, a.logits, VOCAB, pass).at, words(a, a.fresh, D, pass + 1), pass,
         pass + 1 < PASSES);
    STAMP(14);
    if (pass + 1 < PASSES) meet(a.meeting, turn);
    STAMP(15);
  }
}

#ifdef RUN
RUN(predict, COMPUTE + 32, sizeof(Shared))
#endif
