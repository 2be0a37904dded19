// Block-sparse attention forward for every GPU since compute capability 8.0 (mma.sync, cp.async).
//
// One CTA computes one mask row: 128 queries against the key blocks whose bits are set, in ascending order, with the
// online softmax of FlashAttention. Shared memory holds the queries and a ring of key and value tiles,
//   K0 V0 K1 V1 K2 ...
// each copied kRing - 1 tiles before it is used. Two small CTAs share a multiprocessor, so that one's softmax runs
// beside the other's matrix products.

#ifndef RING
#define RING 4
#endif
#ifndef TILE_KEYS
#define TILE_KEYS 64
#endif
#ifndef ROW_TILES
#define ROW_TILES 2
#endif
#ifndef CTAS
#define CTAS 2
#endif
#ifndef EARLY
#define EARLY (RING == 2)
#endif

constexpr int kRing = RING;            // tiles
constexpr int kTileKeys = TILE_KEYS;   // keys of one tile: a key block or half of one
constexpr int kRowTiles = ROW_TILES;   // 16-query tiles of one warp
constexpr int kWarps = kBlockQ / (16 * kRowTiles);
constexpr int kThreads = 32 * kWarps;
constexpr int kQueryBytes = kBlockQ * kRowBytes;
constexpr int kTileBytes = kTileKeys * kRowBytes;
constexpr int kKeyTiles = kTileKeys / 8;    // 8-key column tiles of the scores
constexpr int kValueTiles = kHeadDim / 8;   // 8-channel column tiles of the output

// The running maximum may lag behind by a factor of 2^8 before the output is rescaled: the result is the same, since
// output and sum share the reference, and 2^8 is far from overflow in either element type.
constexpr float kLag = 8.f;
// Above this, the rounding of reference * scale is no longer small beside one unit of the exponent.
constexpr float kLargeExponent = 4096.f;

struct Params {
  TensorView q, k, v, out;
  float* lse;       // (batch, heads, q_len), base 2
  const u32* bits;  // (batch, heads, query blocks, words)
  const int* counts;
  const int* order;  // the mask row of each CTA
  int heads, q_len, k_len;
  float scale_log2;  // > 0
};

// Walks the set bits of one mask row. The lanes of each warp hold 32 words at a time.
struct KeptBlocks {
  const u32* words;
  int count, first;  // words of the row; the word that lane 0 holds
  u32 word, pending;   // this lane's word without the bits taken; which lanes' words have bits left

  DEVICE KeptBlocks(const u32* row, int row_words) : words(row), count(row_words), first(-32), word(0), pending(0) {}

  // The next kept block, or -1 after the last. All lanes call it together.
  DEVICE int next() {
    const int lane = threadIdx.x % 32;
    while (pending == 0) {
      if (first + 32 >= count) return -1;
      first += 32;
      word = first + lane < count ? words[first + lane] : 0;
      pending = __ballot_sync(~0u, word != 0);
    }
    const int owner = __ffs(pending) - 1;
    const u32 current = __shfl_sync(~0u, word, owner);
    const u32 rest = current & (current - 1);
    if (lane == owner) word = rest;
    if (rest == 0) pending &= pending - 1;
    return (first + owner) * 32 + __ffs(current) - 1;
  }
};

// Copies the kept blocks' tiles into the ring, in the order in which they are used.
struct TileStream {
  KeptBlocks blocks;
  const u16 *keys, *values;
  i64 key_stride, value_stride;
  int k_len, first_key;
  u32 ring, slot;

  DEVICE void load_keys() {
    constexpr int kLastPart = kBlockK - kTileKeys;
    first_key = (first_key & (kBlockK - 1)) == kLastPart ? blocks.next() * kBlockK : first_key + kTileKeys;
    load(keys, key_stride);
  }
  DEVICE void load_values() { load(values, value_stride); }

  DEVICE void load(const u16* tokens, i64 stride) {
    if (first_key >= 0)
      load_tile<kTileKeys, kThreads>(ring + slot * kTileBytes, tokens + first_key * stride, stride, k_len - first_key);
    copy_async_commit();
    slot = slot + 1 == kRing ? 0 : slot + 1;
  }
};

DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

typedef float Scores[kRowTiles][kKeyTiles][4];
typedef float Output[kRowTiles][kValueTiles][4];
typedef float RowValue[kRowTiles][2];  // one number for each of the lane's rows: lane / 4 and lane / 4 + 8 of a tile

// scores = queries * keys^T
DEVICE void multiply_keys(Scores& scores, u32 queries, u32 keys) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 query_row = queries + tile_offset(warp * 16 * kRowTiles + lane % 16, lane / 16);
  const u32 key_row = keys + tile_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[t][n][e] = 0.f;
#pragma unroll
  for (int d = 0; d < kHeadDim / 16; ++d) {
    u32 a[kRowTiles][4];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
      load_matrices(a[t], (query_row ^ chunk_offset(2 * d)) + t * 16 * kRowBytes);
#pragma unroll
    for (int n = 0; n < kKeyTiles; n += 2) {
      u32 b[4];
      load_matrices(b, (key_row ^ chunk_offset(2 * d)) + n * 8 * kRowBytes);
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        multiply_add(scores[t][n], a[t], b[0], b[1]);
        multiply_add(scores[t][n + 1], a[t], b[2], b[3]);
      }
    }
  }
}

// output += scores * values; the layout of the scores is already that of a left operand.
DEVICE void multiply_values(Output& output, const Scores& scores, u32 values) {
  const int lane = threadIdx.x % 32;
  const u32 value_row = values + tile_offset(lane % 16, lane / 16);
#pragma unroll
  for (int k = 0; k < kTileKeys / 16; ++k) {
    u32 a[kRowTiles][4];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float(&s)[4] = scores[t][2 * k + half];
        a[t][2 * half] = pack_elements(s[0], s[1]);
        a[t][2 * half + 1] = pack_elements(s[2], s[3]);
      }
#pragma unroll
    for (int n = 0; n < kValueTiles; n += 2) {
      u32 b[4];
      load_matrices_transposed(b, (value_row ^ chunk_offset(n)) + k * 16 * kRowBytes);
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        multiply_add(output[t][n], a[t], b[0], b[1]);
        multiply_add(output[t][n + 1], a[t], b[2], b[3]);
      }
    }
  }
}

// The scores of keys from `valid` on become -inf.
DEVICE void mask_keys(Scores& scores, int valid) {
  const int first = threadIdx.x % 4 * 2;
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (n * 8 + first + e % 2 >= valid) scores[t][n][e] = -__int_as_float(0x7f800000);
}

struct OnlineSoftmax {
  RowValue reference;  // what exponents are relative to: the row's maximum, or at most kLag / scale_log2 less
  RowValue sum;        // of this lane's columns
  float scale_log2;
  bool large;  // some reference * scale is above kLargeExponent

  // Replaces scores by probabilities relative to the reference.
  DEVICE void apply(Scores& scores, Output& output) {
    RowValue top;
    bool outgrown = false;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[t][r] = scores[t][0][2 * r];
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n)
          top[t][r] = fmaxf(top[t][r], fmaxf(scores[t][n][2 * r], scores[t][n][2 * r + 1]));
        outgrown |= (top[t][r] - reference[t][r]) * scale_log2 > kLag;
      }
    if (__any_sync(~0u, outgrown)) raise_reference(top, output);
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float offset = reference[t][r] * scale_log2;
        if (large) {
          // Subtract before scaling: a fused multiply-add would leave the rounding of `offset` in the exponent.
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n) {
            scores[t][n][2 * r] -= reference[t][r];
            scores[t][n][2 * r + 1] -= reference[t][r];
          }
          offset = 0.f;
        }
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; ++e) {
            scores[t][n][e] = exp2_approx(fmaf(scores[t][n][e], scale_log2, -offset));
            sum[t][r] += scores[t][n][e];
          }
      }
  }

  DEVICE void raise_reference(const RowValue& top, Output& output) {
    bool any_large = false;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float raised = quad_max(fmaxf(reference[t][r], top[t][r]));
        const float shrink = exp2_approx((reference[t][r] - raised) * scale_log2);
        reference[t][r] = raised;
        sum[t][r] *= shrink;
        any_large |= fabsf(raised * scale_log2) > kLargeExponent;
#pragma unroll
        for (int n = 0; n < kValueTiles; ++n) {
          output[t][n][2 * r] *= shrink;
          output[t][n][2 * r + 1] *= shrink;
        }
      }
    large = __any_sync(~0u, any_large);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, CTAS) forward_mma(const __grid_constant__ Params params) {
  extern __shared__ __align__(kTileAlignment) u8 shared_memory[];
  const u32 queries = shared_address(shared_memory);
  const u32 ring = queries + kQueryBytes;

  const int query_blocks = ceil_div(params.q_len, kBlockQ), key_blocks = ceil_div(params.k_len, kBlockK);
  const int words = ceil_div(key_blocks, 32);
  const int mask_row = params.order[blockIdx.x];
  const int query_block = mask_row % query_blocks;
  const int head = mask_row / query_blocks % params.heads, batch = mask_row / query_blocks / params.heads;
  const u32* bits = params.bits + static_cast<i64>(mask_row) * words;

  const int first_query = query_block * kBlockQ;
  load_tile<kBlockQ, kThreads>(queries, params.q.row(batch, head, first_query), params.q.token_stride,
                               params.q_len - first_query);
  TileStream stream{KeptBlocks(bits, words),
                    params.k.row(batch, head, 0),
                    params.v.row(batch, head, 0),
                    params.k.token_stride,
                    params.v.token_stride,
                    params.k_len,
                    kBlockK - kTileKeys,
                    ring,
                    0};
  auto load_next = [&](bool is_key) {
    if (is_key)
      stream.load_keys();
    else
      stream.load_values();
  };
#pragma unroll
  for (int tile = 0; tile < kRing - 1; ++tile) load_next(tile % 2 == 0);

  // Only the last key block can be ragged, and it is the last of the row, so the row's real keys lie together.
  const bool keeps_last = bits[words - 1] >> ((key_blocks - 1) % 32) & 1;
  const int kept_keys =
      params.counts[mask_row] * kBlockK - (keeps_last ? key_blocks * kBlockK - params.k_len : 0);

  Output output;
  OnlineSoftmax softmax;
  softmax.scale_log2 = params.scale_log2;
  softmax.large = false;
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      softmax.reference[t][r] = -__int_as_float(0x7f800000);
      softmax.sum[t][r] = 0.f;
    }
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) output[t][n][e] = 0.f;
  }

  u32 read_slot = 0;
  auto next_tile = [&](bool is_key) -> u32 {
    copy_async_wait<kRing - 2>();
    __syncthreads();
    load_next(is_key == (kRing % 2 == 1));
    const u32 tile = ring + read_slot * kTileBytes;
    read_slot = read_slot + 1 == kRing ? 0 : read_slot + 1;
    return tile;
  };
  for (int left = kept_keys; left > 0; left -= kTileKeys) {
    Scores scores;
    const u32 keys = next_tile(true);
    multiply_keys(scores, queries, keys);
    if (left < kTileKeys) mask_keys(scores, left);
    u32 values;
    if (EARLY) values = next_tile(false);
    softmax.apply(scores, output);
    if (!EARLY) values = next_tile(false);
    multiply_values(output, scores, values);
  }

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = first_query + (warp * kRowTiles + t) * 16 + r * 8 + lane / 4;
      const float sum = quad_sum(softmax.sum[t][r]);
      const float inverse = sum == 0.f ? 0.f : 1.f / sum;
      if (query >= params.q_len) continue;
      u32* out = reinterpret_cast<u32*>(params.out.row(batch, head, query)) + lane % 4;
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n)
        out[n * 4] = pack_elements(output[t][n][2 * r] * inverse, output[t][n][2 * r + 1] * inverse);
      if (lane % 4 == 0)
        params.lse[(static_cast<i64>(batch) * params.heads + head) * params.q_len + query] =
            softmax.reference[t][r] * params.scale_log2 + log2_approx(sum);
    }
}
