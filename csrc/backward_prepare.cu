// What the backward kernels of every GPU need beforehand.
//
//   row_records      LSE of the forward pass, out and d_out -> a record of each mask row
//   transpose_mask   bits of the mask rows (key blocks of a query block) -> bits and counts of the mask columns

constexpr int kRecordThreads = 256;

struct RecordParams {
  TensorView out, d_out;
  const float* lse;  // (batch, head, query), base 2
  float* records;    // (row, kRecordFloats)
  int heads, query_length;
};

// Grid: one block a row.
extern "C" __global__ void __launch_bounds__(kRecordThreads) row_records(const __grid_constant__ RecordParams p) {
  constexpr int kLanes = kHeadDim / 8;  // that share a query, 16 bytes each
  constexpr int kQueriesAtOnce = kRecordThreads / kLanes;
  const int row = blockIdx.x, query_blocks = ceil_div(p.query_length, kBlockQ);
  const int plane = row / query_blocks, first_query = row % query_blocks * kBlockQ;
  const int batch = plane / p.heads, head = plane % p.heads;
  const int lane = threadIdx.x % kLanes;
  float* record = p.records + static_cast<i64>(row) * kRecordFloats;
#pragma unroll 4
  for (int i = 0; i < kBlockQ; i += kQueriesAtOnce) {
    const int within = i + threadIdx.x / kLanes, query = first_query + within;
    const bool real = query < p.query_length;
    float sum = 0.f;
    if (real) {
      const uint4 out = *reinterpret_cast<const uint4*>(p.out.row(batch, head, query) + 8 * lane);
      const uint4 d_out = *reinterpret_cast<const uint4*>(p.d_out.row(batch, head, query) + 8 * lane);
      const u32 left[4] = {out.x, out.y, out.z, out.w}, right[4] = {d_out.x, d_out.y, d_out.z, d_out.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sum = fmaf(low_element(left[j]), low_element(right[j]), sum);
        sum = fmaf(high_element(left[j]), high_element(right[j]), sum);
      }
    }
#pragma unroll
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (lane == 0) {
      const i64 at = static_cast<i64>(plane) * p.query_length + query;
      record[record_place(within)] = real ? p.lse[at] : __int_as_float(0x7f800000);
      record[kBlockQ + record_place(within)] = sum;
    }
  }
}

constexpr int kTransposeThreads = 128;

struct TransposeParams {
  const u32* bits;   // (plane, query block, word): key block j of a row is bit j % 32 of word j / 32
  u32* column_bits;  // (plane, key block, column word): query block i of a column is bit i % 32 of word i / 32
  int* column_counts;  // (plane, key block)
  int query_blocks, key_blocks, words, column_words;
};

// Grid (words, planes): 32 columns each. A warp turns 32 x 32 bits at a time.
extern "C" __global__ void __launch_bounds__(kTransposeThreads)
    transpose_mask(const __grid_constant__ TransposeParams p) {
  __shared__ int counts[32];
  const int lane = threadIdx.x % 32, key_block = blockIdx.x * 32 + lane;
  const i64 plane = blockIdx.y;
  if (threadIdx.x < 32) counts[lane] = 0;
  __syncthreads();
  int count = 0;
  for (int word = threadIdx.x / 32; word < p.column_words; word += kTransposeThreads / 32) {
    const int query_block = word * 32 + lane;
    const u32 row_bits =
        query_block < p.query_blocks ? p.bits[(plane * p.query_blocks + query_block) * p.words + blockIdx.x] : 0;
    u32 own = 0;
#pragma unroll
    for (int bit = 0; bit < 32; ++bit) {
      const u32 column = __ballot_sync(~0u, row_bits >> bit & 1);
      if (lane == bit) own = column;
    }
    if (key_block < p.key_blocks) p.column_bits[(plane * p.key_blocks + key_block) * p.column_words + word] = own;
    count += __popc(own);
  }
  atomicAdd(&counts[lane], count);
  __syncthreads();
  if (threadIdx.x < 32 && key_block < p.key_blocks) p.column_counts[plane * p.key_blocks + key_block] = counts[lane];
}
