// What kernels that stay share: sizes, numbers, and how the whole grid meets.

#define COMPUTE (WARPS * 32)
#define VALUES (16 / (int)sizeof(T))  // of a lane's 16 bytes
#define GROUP (HEADS / KV)
#define QKV_N ((HEADS + 2 * KV) * HEAD)

#define EACH (4 / (int)sizeof(T))  // values of a 32-bit word

#ifndef WAITED  // phases.cuh says what for
#define WAITED 0
#endif

// Measuring: what a launch costs without its meetings, or without its weights. Results are wrong then.
#ifndef NO_MEETINGS
#define NO_MEETINGS 0
#endif
#ifndef NO_WEIGHTS
#define NO_WEIGHTS 0
#endif

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

// --- sizes ---

COMPILE_TIME int most(int a, int b) { return a > b ? a : b; }
COMPILE_TIME int least(int a, int b) { return a < b ? a : b; }
COMPILE_TIME int ceil_div(int a, int b) { return (a + b - 1) / b; }
// k blocks of one message: the most that fit and divide their number
COMPILE_TIME int fitting(int share, int room) {
  int best = 1;
  for (int r = 1; r <= share && r <= room; r++)
    if (share % r == 0) best = r;
  return best;
}

// --- the grid meets: the top bit of a counter turns when the last program has come ---

// Called, not copied: what a layer executes must stay in the instruction cache.
CALLED void meet(u32* meeting, u32& turn) {
  if (WAITED) return;
  part_sync(COMPUTE);
  if (NO_MEETINGS) return;
  if (thread_id() == 0) {
    add_release(meeting, cta_id() == 0 ? 0x80000000u - (GRID - 1) : 1u);
    while (((load_acquire(meeting) ^ turn) & 0x80000000u) == 0) idle();
    turn ^= 0x80000000u;
  }
  part_sync(COMPUTE);
}
