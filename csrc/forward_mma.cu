// Block-sparse attention, forward, for every GPU since compute capability 8.0 (mma.sync, ldmatrix, cp.async).
//
//   O = softmax(scale * Q K^T restricted to the kept key blocks) V          LSE = log2 of the softmax's denominator
//
// One CTA of four warps computes one mask row: 128 queries, 32 a warp, against the key blocks whose bits are set, in
// ascending order. Every K or V fragment that a warp loads serves its two tiles of 16 queries: shared memory, which
// would otherwise be the limit, is read half as often. A CTA waits at each tile for its copies and its warps, and so two
// CTAs share a multiprocessor.
//
// Shared memory: the queries, then a ring of kRing tiles that are used in the order K0 V0 K1 V1 K2 ... A tile is copied
// kRing - 1 tiles ahead, into the place of the tile that was used last.
//
// Softmax: any reference M gives the same result as long as nothing overflows, so M is the row's running maximum only to
// within 2^kLag, and the output is rescaled rarely. S, sums and O are fp32; P is rounded to the element type.

#define kInfinity __int_as_float(0x7f800000)

constexpr int kBlocksPerMultiprocessor = 2;
constexpr int kRowTiles = 2;  // 16-query tiles of a warp
constexpr int kThreads = 32 * kBlockQ / (16 * kRowTiles);
constexpr int kValueTiles = kHeadDim / 8;  // 8-channel column tiles of the output
constexpr int kQueryBytes = kBlockQ * kRowBytes;

// How far, in powers of two, a score may exceed the reference: far from overflow, in P's own type too.
constexpr float kLag = 8.f;
// Above this |scale * M| (in powers of two), rounding scale * M would show in the result, so M is subtracted first.
constexpr float kFusedLimit = 4096.f;

struct Params {
  TensorView q, k, v, out;
  float* lse;         // (batch, head, query)
  const u32* bits;    // (row, mask word)
  const int* counts;  // (row)
  const int* order;   // (row): the row that each CTA takes
  int heads;
  int query_length, key_length;
  float scale_log2;  // scale * log2(e), above 0: scores in units of powers of two
};

// The mask row of this CTA. Made anew where it is needed: the main loop has no register to spare for it.
struct Place {
  int row, batch, head, first_query;

  DEVICE Place(const Params& p) : row(p.order[blockIdx.x]) {
    const int query_blocks = ceil_div(p.query_length, kBlockQ);
    const int plane = row / query_blocks;
    batch = plane / p.heads;
    head = plane % p.heads;
    first_query = row % query_blocks * kBlockQ;
  }
};

// ---- Tiles of the kept key blocks ----------------------------------------------------------------------------------

// Walks the set bits of the mask row. Each warp does so for itself; its lanes hold 32 words at a time.
struct KeptBlocks {
  const Params& p;
  int base = -32;   // which word lane 0 holds
  u32 word = 0;     // this lane's, without the bits that were taken
  u32 pending = 0;  // the lanes whose words have bits left

  // The next kept block, or -1 after the last.
  DEVICE int next() {
    const int lane = threadIdx.x % 32;
    while (pending == 0) {
      const int words = ceil_div(p.key_length, 32 * kBlockK);
      if (base + 32 >= words) return -1;
      base += 32;
      const u32* row_words = p.bits + static_cast<i64>(Place(p).row) * words;
      word = base + lane < words ? row_words[base + lane] : 0;
      pending = __ballot_sync(~0u, word != 0);
    }
    const int source = __ffs(pending) - 1;
    const u32 set = __shfl_sync(~0u, word, source);
    const u32 rest = set & (set - 1);
    if (lane == source) word = rest;
    if (rest == 0) pending &= pending - 1;
    return (base + source) * 32 + __ffs(set) - 1;
  }
};

// The real keys of the row's kept blocks. Only the last key block can be ragged, so they are the row's first ones.
DEVICE int kept_keys(const Params& p, int row) {
  const int blocks = ceil_div(p.key_length, kBlockK), words = ceil_div(blocks, 32);
  const u32 last_word = p.bits[static_cast<i64>(row) * words + words - 1];
  const bool keeps_last = last_word >> ((blocks - 1) % 32) & 1;
  return p.counts[row] * kBlockK - (keeps_last ? blocks * kBlockK - p.key_length : 0);
}

typedef float Output[kRowTiles][kValueTiles][4];
typedef float RowValues[kRowTiles][2];

DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// The kernel for tiles of kTileKeys keys, a key block or half of one, kRing of them in shared memory.
template <int kTileKeys, int kRing>
struct Attention {
  static constexpr int kKeyTiles = kTileKeys / 8;  // 8-key column tiles of the scores
  static constexpr int kTileBytes = kTileKeys * kRowBytes;

  struct TileRing {
    const Params& p;
    KeptBlocks blocks;
    const u16 *keys, *values;               // of the head; what this thread copies of its first tile
    int first_key = kBlockK - kTileKeys;    // of the tile copied last; negative after the last block
    u32 first, current;                     // tiles in shared memory

    DEVICE TileRing(const Params& params, const Place& at, u32 memory)
        : p(params), blocks{params}, keys(copy_source(p.k.row(at.batch, at.head, 0), p.k.token_stride)),
          values(copy_source(p.v.row(at.batch, at.head, 0), p.v.token_stride)), first(memory),
          current(memory + (kRing - 1) * kTileBytes) {
#pragma unroll
      for (int tile = 0; tile < kRing - 1; ++tile) copy_ahead(memory + tile * kTileBytes, tile % 2 == 0);
    }

    // Waits for the tile to use next, keys or values in turn, and replaces the one used before it.
    DEVICE u32 next(bool is_keys) {
      copy_async_wait<kRing - 2>();
      __syncthreads();
      copy_ahead(current, is_keys == (kRing % 2 == 1));
      current = current == first + (kRing - 1) * kTileBytes ? first : current + kTileBytes;
      return current;
    }

    DEVICE void copy_ahead(u32 tile, bool is_keys) {
      constexpr int kLastPart = kBlockK - kTileKeys;
      if (is_keys) {
        const bool block_ends = first_key < 0 || first_key % kBlockK == kLastPart;
        first_key = block_ends ? blocks.next() * kBlockK : first_key + kTileKeys;
      }
      const i64 stride = is_keys ? p.k.token_stride : p.v.token_stride;
      if (first_key >= 0)
        copy_tile<kTileKeys, kThreads>(tile, (is_keys ? keys : values) + first_key * stride, stride,
                                       p.key_length - first_key);
      copy_async_commit();
    }
  };

  // ---- Softmax -------------------------------------------------------------------------------------------------------
  //
  // A lane holds two rows (r = 0, 1: lane / 4 and 8 below) of each of its warp's 16-query tiles t. Element 2r + c of
  // column tile n is column 8n + 2 (lane % 4) + c; the output likewise.

  typedef float Scores[kRowTiles][kKeyTiles][4];

  static DEVICE void hide_keys_from(Scores& scores, int keys) {
    const int first_column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (8 * n + first_column + e % 2 >= keys) scores[t][n][e] = -kInfinity;
  }

  struct Softmax {
    float scale_log2;
    RowValues reference;  // M, a raw score
    RowValues sum;        // of this lane's columns only

    DEVICE Softmax(float scale) : scale_log2(scale) {
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          reference[t][r] = -kInfinity;
          sum[t][r] = 0.f;
        }
    }

    // Makes M high enough for these scores, and scores and shift such that P = 2^(scale * score + shift).
    DEVICE void prepare(Scores& scores, Output& output, RowValues& shift) {
      RowValues top;
      bool outgrown = false;
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          top[t][r] = -kInfinity;
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n)
            top[t][r] = fmaxf(top[t][r], fmaxf(scores[t][n][2 * r], scores[t][n][2 * r + 1]));
          outgrown |= (top[t][r] - reference[t][r]) * scale_log2 > kLag;
        }
      if (__any_sync(~0u, outgrown)) raise_reference(top, output);

      bool subtract_first = false;
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          shift[t][r] = -reference[t][r] * scale_log2;
          subtract_first |= fabsf(shift[t][r]) > kFusedLimit;
        }
      if (__any_sync(~0u, subtract_first)) subtract_reference(scores, shift);
    }

    DEVICE void raise_reference(const RowValues& top, Output& output) {
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float raised = quad_max(fmaxf(reference[t][r], top[t][r]));
          const float rescale = exp2_approx((reference[t][r] - raised) * scale_log2);
          reference[t][r] = raised;
          sum[t][r] *= rescale;
#pragma unroll
          for (int n = 0; n < kValueTiles; ++n) {
            output[t][n][2 * r] *= rescale;
            output[t][n][2 * r + 1] *= rescale;
          }
        }
    }

    DEVICE void subtract_reference(Scores& scores, RowValues& shift) const {
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          shift[t][r] = 0.f;
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n) {
            scores[t][n][2 * r] -= reference[t][r];
            scores[t][n][2 * r + 1] -= reference[t][r];
          }
        }
    }

    // P of 16 keys, from column tile n on, as the left operand of a product.
    DEVICE void exponentiate(u32 (&p)[kRowTiles][4], const Scores& scores, const RowValues& shift, int n) {
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = i % 2;
          const float* score = &scores[t][n + i / 2][2 * r];
          const float left = exp2_approx(fmaf(score[0], scale_log2, shift[t][r]));
          const float right = exp2_approx(fmaf(score[1], scale_log2, shift[t][r]));
          sum[t][r] += left + right;
          p[t][i] = pack_elements(left, right);
        }
    }
  };

  // ---- Matrix products -----------------------------------------------------------------------------------------------

  // S = Q K^T
  static DEVICE void multiply_keys(Scores& scores, u32 queries, u32 keys) {
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
    for (int chunk = 0; chunk < kRowChunks; chunk += 2) {
      u32 a[kRowTiles][4];
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t)
        load_matrices(a[t], (query_row ^ chunk_offset(chunk)) + t * 16 * kRowBytes);
#pragma unroll
      for (int n = 0; n < kKeyTiles; n += 2) {
        u32 b[4];
        load_matrices(b, (key_row ^ chunk_offset(chunk)) + n * 8 * kRowBytes);
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
          multiply_add(scores[t][n], a[t], b[0], b[1]);
          multiply_add(scores[t][n + 1], a[t], b[2], b[3]);
        }
      }
    }
  }

  // O += P V, 16 keys at a time, so that the exponentials of the next ones run beside the products of these.
  static DEVICE void multiply_values(Output& output, Softmax& softmax, const Scores& scores, const RowValues& shift,
                                     u32 values) {
    const int lane = threadIdx.x % 32;
    const u32 value_row = values + tile_offset(lane % 16, lane / 16);
#pragma unroll
    for (int key = 0; key < kTileKeys; key += 16) {
      u32 a[kRowTiles][4];
      softmax.exponentiate(a, scores, shift, key / 8);
#pragma unroll
      for (int n = 0; n < kValueTiles; n += 2) {
        u32 b[4];
        load_matrices_transposed(b, (value_row ^ chunk_offset(n)) + key * kRowBytes);
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
          multiply_add(output[t][n], a[t], b[0], b[1]);
          multiply_add(output[t][n + 1], a[t], b[2], b[3]);
        }
      }
    }
  }

  static DEVICE void store_row(const Params& p, const Output& output, const Softmax& softmax) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Place at(p);
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float sum = quad_sum(softmax.sum[t][r]);
        const float inverse = sum == 0.f ? 0.f : 1.f / sum;  // a row without keys gives zeros
        const int query = at.first_query + (warp * kRowTiles + t) * 16 + r * 8 + lane / 4;
        if (query >= p.query_length) continue;
        u32* out = reinterpret_cast<u32*>(p.out.row(at.batch, at.head, query)) + lane % 4;
#pragma unroll
        for (int n = 0; n < kValueTiles; ++n)
          out[4 * n] = pack_elements(output[t][n][2 * r] * inverse, output[t][n][2 * r + 1] * inverse);
        if (lane % 4 == 0)
          p.lse[(static_cast<i64>(at.batch) * p.heads + at.head) * p.query_length + query] =
              softmax.reference[t][r] * p.scale_log2 + log2_approx(sum);
      }
  }

  static DEVICE void run(const Params& p) {
    extern __shared__ __align__(kTileAlignment) u8 memory[];
    const u32 queries = shared_address(memory);
    const Place at(p);
    const i64 query_stride = p.q.token_stride;
    copy_tile<kBlockQ, kThreads>(queries, copy_source(p.q.row(at.batch, at.head, at.first_query), query_stride),
                                 query_stride, p.query_length - at.first_query);
    TileRing ring(p, at, queries + kQueryBytes);

    Softmax softmax(p.scale_log2);
    Output output;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) output[t][n][e] = 0.f;

    for (int left = kept_keys(p, at.row); left > 0; left -= kTileKeys) {
      Scores scores;
      RowValues shift;
      multiply_keys(scores, queries, ring.next(true));
      if (left < kTileKeys) hide_keys_from(scores, left);
      const u32 values = ring.next(false);
      softmax.prepare(scores, output, shift);
      multiply_values(output, softmax, scores, shift, values);
    }
    copy_async_wait<0>();
    store_row(p, output, softmax);
  }
};

// Two thread blocks of 48 KB fit into the 100 KB that a multiprocessor has in compute capability 8.6, 8.9 and 12.0.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    forward_mma(const __grid_constant__ Params p) {
#if HEAD_DIM == 128
  Attention<32, 2>::run(p);
#else
  Attention<64, 4>::run(p);
#endif
}

#if HEAD_DIM == 128 && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000)
// Two of 64 KB, where a multiprocessor has more: whole key blocks need half as many barriers.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    forward_mma_wide(const __grid_constant__ Params p) {
  Attention<64, 2>::run(p);
}
#endif
