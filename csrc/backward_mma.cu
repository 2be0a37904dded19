// Block-sparse attention, backward, for every GPU since compute capability 8.0 (mma.sync, ldmatrix, cp.async).
//
//   P = 2^(scale_log2 * Q K^T - LSE)     dP = dO V^T     dS = P (dP - delta)
//   dQ = scale * dS K                    row_gradients:     a mask row (128 queries) a CTA, over its key blocks
//   dK = scale * dS^T Q   dV = P^T dO    column_gradients:  a mask column (64 keys) a CTA, over its query blocks
//
// Each output has one owner, so that nothing is added atomically and the same inputs give the same bits; the price is that
// S and dP are computed twice.
//
// A CTA is four warps of 32 rows each, so that every fragment of a right operand that a warp loads serves two tiles of 16:
// shared memory would otherwise be the limit. In row_gradients the rows are its 128 queries. In column_gradients two warps
// hold the 64 keys for S^T, P and dV, and two for dP^T, dS and dK, which get P through shared memory: one warp has no
// registers for both gradients. Tiles of the other tokens are copied one ahead; a CTA waits at each for its copies and its
// warps, and so two CTAs share a multiprocessor that has the shared memory for them.
//
// S, P, dP, dS and the sums are fp32; P and dS are rounded to the element type for the products that they enter.

#define kInfinity __int_as_float(0x7f800000)

constexpr int kBlocksPerMultiprocessor = 2;
constexpr int kThreads = 128;
constexpr int kRowTiles = 2;  // of a warp
constexpr int kWarpRows = 16 * kRowTiles;
constexpr int kChannelTiles = kHeadDim / 8;

extern __shared__ __align__(kTileAlignment) u8 memory[];

// Where a CTA's row or column of the mask lies.
struct Place {
  int line, batch, head, block;

  DEVICE Place(const int* order, int heads, int blocks) : line(order[blockIdx.x]) {
    const int plane = line / blocks;
    batch = plane / heads;
    head = plane % heads;
    block = line % blocks;
  }
};

// The first tokens of the tiles of kTile tokens of the kept blocks of kBlock tokens, ascending. Each warp walks for itself;
// its lanes hold 32 words of the line's bits at a time.
template <int kTile, int kBlock>
struct TileWalk {
  const u32* words;
  int count;   // of the words
  int length;  // of the sequence: no tile starts behind it
  int first = kBlock - kTile;
  int base = -32;   // which word lane 0 holds
  u32 word = 0;     // this lane's, without the bits that were taken
  u32 pending = 0;  // the lanes whose words have bits left

  // -1 after the last.
  DEVICE int next() {
    const int following = first + kTile;
    first = following % kBlock != 0 && following < length ? following : next_block() * kBlock;
    return first;
  }

  DEVICE int next_block() {
    const int lane = threadIdx.x % 32;
    while (pending == 0) {
      if (base + 32 >= count) return -1;
      base += 32;
      word = base + lane < count ? words[base + lane] : 0;
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

// What one thread copies of a tensor's tiles.
struct CopySource {
  const u16* first;  // of the head's token 0
  i64 stride;

  DEVICE CopySource(const TensorView& tensor, const Place& at)
      : first(copy_source(tensor.row(at.batch, at.head, 0), tensor.token_stride)), stride(tensor.token_stride) {}

  // Tokens from `token` on; those from `length` on become zeros.
  template <int kRows>
  DEVICE void copy(u32 tile, int token, int length) const {
    copy_tile<kRows, kThreads>(tile, first + token * stride, stride, length - token);
  }
};

// ---- products --------------------------------------------------------------------------------------------------------
//
// A lane holds two rows (r = 0, 1: lane / 4 and 8 below) of each of its warp's 16-row tiles t. Element 2r + c of column
// tile n is column 8n + 2 (lane % 4) + c.

typedef float Gradient[kRowTiles][kChannelTiles][4];

// product[32 x 8 kTiles] = left[32 x D] * right[8 kTiles x D]^T
template <int kTiles>
DEVICE void multiply_by_channels(float (&product)[kRowTiles][kTiles][4], u32 left, u32 right) {
  const int lane = threadIdx.x % 32;
  const u32 left_row = left + tile_offset(lane % 16, lane / 16);
  const u32 right_row = right + tile_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) product[t][n][e] = 0.f;
#pragma unroll
  for (int chunk = 0; chunk < kRowChunks; chunk += 2) {
    u32 a[kRowTiles][4];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) load_matrices(a[t], (left_row ^ chunk_offset(chunk)) + t * 16 * kRowBytes);
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      u32 b[4];
      load_matrices(b, (right_row ^ chunk_offset(chunk)) + n * 8 * kRowBytes);
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        multiply_add(product[t][n], a[t], b[0], b[1]);
        multiply_add(product[t][n + 1], a[t], b[2], b[3]);
      }
    }
  }
}

// sum[32 x D] += left[32 x 16] * tokens[16 x D]
DEVICE void multiply_by_tokens(Gradient& sum, const u32 (&left)[kRowTiles][4], u32 tokens) {
  const int lane = threadIdx.x % 32;
  const u32 row = tokens + tile_offset(lane % 16, lane / 16);
#pragma unroll
  for (int n = 0; n < kChannelTiles; n += 2) {
    u32 b[4];
    load_matrices_transposed(b, row ^ chunk_offset(n));
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      multiply_add(sum[t][n], left[t], b[0], b[1]);
      multiply_add(sum[t][n + 1], left[t], b[2], b[3]);
    }
  }
}

DEVICE void clear(Gradient& sum) {
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
    for (int n = 0; n < kChannelTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[t][n][e] = 0.f;
}

// Stores the warp's 32 rows of a gradient, times `factor`, from `token` on.
DEVICE void store_gradient(const TensorView& to, const Gradient& sum, float factor, const Place& at, int token,
                           int length) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int own = token + 16 * t + 8 * r + lane / 4;
      if (own >= length) continue;
      u32* out = reinterpret_cast<u32*>(to.row(at.batch, at.head, own)) + lane % 4;
#pragma unroll
      for (int n = 0; n < kChannelTiles; ++n)
        out[4 * n] = pack_elements(sum[t][n][2 * r] * factor, sum[t][n][2 * r + 1] * factor);
    }
}

// ---- dQ ----------------------------------------------------------------------------------------------------------------
//
// Shared memory: Q, dO, and two stages of kRowKeys keys and values.

constexpr int kRowKeys = kBlockK / 2;
constexpr int kRowKeyTiles = kRowKeys / 8;
constexpr int kQueryBytes = kBlockQ * kRowBytes;
constexpr int kRowTileBytes = kRowKeys * kRowBytes;

struct RowParams {
  TensorView q, d_out, k, v, d_q;
  const float* records;  // (row, kRecordFloats)
  const u32* bits;       // (row, word)
  const int* order;      // (row): the row that each CTA takes
  int heads, query_blocks;
  int query_length, key_length;
  int words;
  float scale, scale_log2;
};

// P in the place of the scores, dS in that of P; then dQ.
DEVICE void add_row_tile(Gradient& d_q, const RowParams& p, const float (&lse)[kRowTiles][2],
                         const float (&delta)[kRowTiles][2], u32 queries, u32 d_outs, u32 keys, int real_keys) {
  float scores[kRowTiles][kRowKeyTiles][4], d_probabilities[kRowTiles][kRowKeyTiles][4];
  multiply_by_channels(scores, queries, keys);
  if (real_keys < kRowKeys) {
    const int first_column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int n = 0; n < kRowKeyTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (8 * n + first_column + e % 2 >= real_keys) scores[t][n][e] = -kInfinity;
  }
  multiply_by_channels(d_probabilities, d_outs, keys + kRowTileBytes);
#pragma unroll
  for (int n = 0; n < kRowKeyTiles; n += 2) {
    u32 a[kRowTiles][4];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = i % 2;
        const float* score = &scores[t][n + i / 2][2 * r];
        const float* d_probability = &d_probabilities[t][n + i / 2][2 * r];
        const float left = exp2_approx(fmaf(score[0], p.scale_log2, -lse[t][r]));
        const float right = exp2_approx(fmaf(score[1], p.scale_log2, -lse[t][r]));
        a[t][i] = pack_elements(left * (d_probability[0] - delta[t][r]), right * (d_probability[1] - delta[t][r]));
      }
    multiply_by_tokens(d_q, a, keys + n * 8 * kRowBytes);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    row_gradients(const __grid_constant__ RowParams p) {
  const u32 queries = shared_address(memory), d_outs = queries + kQueryBytes, stages = d_outs + kQueryBytes;
  const Place at(p.order, p.heads, p.query_blocks);
  const int lane = threadIdx.x % 32, first_query = threadIdx.x / 32 * kWarpRows;
  CopySource(p.q, at).copy<kBlockQ>(queries, at.block * kBlockQ, p.query_length);
  CopySource(p.d_out, at).copy<kBlockQ>(d_outs, at.block * kBlockQ, p.query_length);

  const CopySource keys(p.k, at), values(p.v, at);
  const auto copy_ahead = [&](int stage, int key) {
    const u32 tile = stages + stage * (2 * kRowTileBytes);
    if (key >= 0) {
      keys.copy<kRowKeys>(tile, key, p.key_length);
      values.copy<kRowKeys>(tile + kRowTileBytes, key, p.key_length);
    }
    copy_async_commit();
  };
  TileWalk<kRowKeys, kBlockK> walk{p.bits + static_cast<i64>(at.line) * p.words, p.words, p.key_length};
  int key = walk.next(), stage = 0;
  copy_ahead(stage, key);

  float lse[kRowTiles][2], delta[kRowTiles][2];
  const float* record = p.records + static_cast<i64>(at.line) * kRecordFloats;
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int place = record_place(first_query + 16 * t + 8 * r + lane / 4);
      lse[t][r] = record[place];
      delta[t][r] = record[kBlockQ + place];
    }
  Gradient d_q;
  clear(d_q);
  while (key >= 0) {
    const int next = walk.next();
    copy_async_wait<0>();
    __syncthreads();  // this tile is there for all, and the other stage has been read
    copy_ahead(stage ^ 1, next);
    add_row_tile(d_q, p, lse, delta, queries + first_query * kRowBytes, d_outs + first_query * kRowBytes,
                 stages + stage * (2 * kRowTileBytes), p.key_length - key);
    key = next;
    stage ^= 1;
  }
  copy_async_wait<0>();
  store_gradient(p.d_q, d_q, p.scale, at, at.block * kBlockQ + first_query, p.query_length);
}

// ---- dK and dV ---------------------------------------------------------------------------------------------------------
//
// Shared memory: K, V, two stages of kQueries queries and their dO, and P of two warps.

constexpr int kKeyBytes = kBlockK * kRowBytes;

struct ColumnParams {
  TensorView q, d_out, k, v, d_k, d_v;
  const float* records;  // (row, kRecordFloats)
  const u32* bits;       // (column, word)
  const int* order;      // (column): the column that each CTA takes
  int heads, key_blocks, query_blocks;
  int query_length, key_length;
  int words;
  float scale, scale_log2;
};

// The two warps that hold the same keys, one for each gradient: P is written before it and read after it.
DEVICE void pair_sync(int pair) { asm volatile("bar.sync %0, 64;" ::"r"(1 + pair) : "memory"); }

template <int kQueries>
struct ColumnKernel {
  static constexpr int kTiles = kQueries / 8;
  static constexpr int kSteps = kQueries / 16;
  static constexpr int kTileBytes = kQueries * kRowBytes;
  static constexpr int kExchangeBytes = kWarpRows * kQueries * 2;  // of a warp
  typedef float Product[kRowTiles][kTiles][4];
  typedef u32 Packed[kSteps][kRowTiles][4];  // as left operands
  typedef float4 Numbers[kSteps];            // LSE or delta of the lane's columns: 0, 1 of the first 8 of 16, then of the rest

  static DEVICE float number(const Numbers& numbers, int n, int c) {
    const float4& four = numbers[n / 2];
    return n % 2 == 0 ? (c == 0 ? four.x : four.y) : (c == 0 ? four.z : four.w);
  }

  static DEVICE void exponentiate(Packed& packed, const Product& scores, const Numbers& lse, float scale_log2) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int n = 2 * k + i / 2;
          const float* score = &scores[t][n][i % 2 * 2];
          packed[k][t][i] = pack_elements(exp2_approx(fmaf(score[0], scale_log2, -number(lse, n, 0))),
                                          exp2_approx(fmaf(score[1], scale_log2, -number(lse, n, 1))));
        }
  }

  // From P to dS.
  static DEVICE void differentiate(Packed& packed, const Product& d_probabilities, const Numbers& delta) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int n = 2 * k + i / 2;
          const float* d_probability = &d_probabilities[t][n][i % 2 * 2];
          packed[k][t][i] = pack_elements(low_element(packed[k][t][i]) * (d_probability[0] - number(delta, n, 0)),
                                          high_element(packed[k][t][i]) * (d_probability[1] - number(delta, n, 1)));
        }
  }

  static DEVICE void run(const ColumnParams& p) {
    const u32 keys = shared_address(memory), values = keys + kKeyBytes, stages = values + kKeyBytes;
    const Place at(p.order, p.heads, p.key_blocks);
    CopySource(p.k, at).copy<kBlockK>(keys, at.block * kBlockK, p.key_length);
    CopySource(p.v, at).copy<kBlockK>(values, at.block * kBlockK, p.key_length);

    const CopySource queries(p.q, at), d_outs(p.d_out, at);
    const auto copy_ahead = [&](int stage, int query) {
      const u32 tile = stages + stage * (2 * kTileBytes);
      if (query >= 0) {
        queries.copy<kQueries>(tile, query, p.query_length);
        d_outs.copy<kQueries>(tile + kTileBytes, query, p.query_length);
      }
      copy_async_commit();
    };
    TileWalk<kQueries, kBlockQ> walk{p.bits + static_cast<i64>(at.line) * p.words, p.words, p.query_length};
    int query = walk.next(), stage = 0;
    copy_ahead(stage, query);

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int pair = warp % 2, first_key = pair * kWarpRows;
    const bool for_values = warp < 2;  // S, P and dV; else dP, dS and dK
    const u32 left = (for_values ? keys : values) + first_key * kRowBytes;
    const u32 exchange = stages + 4 * kTileBytes + pair * kExchangeBytes + lane * 16;
    const float* numbers = p.records + static_cast<i64>(at.line / p.key_blocks) * p.query_blocks * kRecordFloats +
                           (for_values ? 0 : kBlockQ) + lane % 4 * 4;
    Gradient sum;
    clear(sum);
    while (query >= 0) {
      const int next = walk.next();
      Numbers own;
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
        own[k] = *reinterpret_cast<const float4*>(numbers + query / kBlockQ * kRecordFloats + query % kBlockQ + 16 * k);
      copy_async_wait<0>();
      __syncthreads();  // this tile is there for all, and the other stage and P of the last tile have been read
      copy_ahead(stage ^ 1, next);
      const u32 tile = stages + stage * (2 * kTileBytes);
      Product product;
      Packed packed;
      multiply_by_channels(product, left, for_values ? tile : tile + kTileBytes);
      if (for_values) {
        exponentiate(packed, product, own, p.scale_log2);
#pragma unroll
        for (int i = 0; i < kSteps * kRowTiles; ++i)
          write_words(exchange + 512 * i, packed[i / kRowTiles][i % kRowTiles]);
        pair_sync(pair);
      } else {
        pair_sync(pair);
#pragma unroll
        for (int i = 0; i < kSteps * kRowTiles; ++i)
          read_words(packed[i / kRowTiles][i % kRowTiles], exchange + 512 * i);
        differentiate(packed, product, own);
      }
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
        multiply_by_tokens(sum, packed[k], (for_values ? tile + kTileBytes : tile) + k * 16 * kRowBytes);
      query = next;
      stage ^= 1;
    }
    copy_async_wait<0>();
    store_gradient(for_values ? p.d_v : p.d_k, sum, for_values ? 1.f : p.scale, at, at.block * kBlockK + first_key,
                   p.key_length);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    column_gradients(const __grid_constant__ ColumnParams p) {
  ColumnKernel<32>::run(p);
}

#if HEAD_DIM == 128 && (__CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000)
// Where a multiprocessor has 208 KB for two CTAs: half as many barriers.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    column_gradients_wide(const __grid_constant__ ColumnParams p) {
  ColumnKernel<64>::run(p);
}
#endif
