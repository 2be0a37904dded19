// The hybrid block mask (arXiv 2602.13515, Eq. 9 and Alg. 1): which key blocks each query block attends to.
//
//   block_means     q, k -> fp32 means of their blocks, read once at the speed of memory
//   pooled_scores   means -> fp32 scores (B, H, n_q, pitch), scaled and finite, with kNoScore as padding
//   select_blocks   scores -> bits and counts, for Top-k united with Top-p
// or, for a target sparsity,
//   bin_rows        scores -> each row in bins of falling score, and between which masses the sample's cut lies
//   rank_open       scores, bins -> bits of what is certain; the exact mass before each entry that is not
//   count_exact     those masses -> counts of the few that share the cut's cell
//   keep_target     those masses up to the cut -> the other bits, counts
// and then
//   order_rows      counts -> the order in which the forward kernel takes the rows
//
// A row is ordered by score, ties by the lower index; entry r of that order has the mass c_r of the r entries before
// it, and is kept iff r < floor or c_r < p. Masses are integers, fractions of the row in units of 2^-31: finer than
// fp32 sums, and the same in whatever order they are added. So the result never depends on timing.

// ---------------------------------------------------------------------------------------------------------------------
// Rows of scores

constexpr int kWarp = 32;
constexpr u32 kAllLanes = 0xffffffffu;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kMassUnits = 2147483648.f;  // 2^31 units make a row's whole mass, so its sum fits 32 bits
constexpr float kScoreLimit = 1e38f;        // differences of two scores stay finite
constexpr float kNoScore = -3e38f;          // below every score, and without mass

extern __shared__ __align__(128) uint4 dynamic_shared[];

DEVICE int lane_id() { return threadIdx.x % kWarp; }

// A score as the rest of the file wants it: finite, NaN lowest, no negative zero.
DEVICE float finite_score(float score) { return fminf(fmaxf(score, -kScoreLimit), kScoreLimit) + 0.f; }

// Integers that order as scores do, and back.
DEVICE u32 ordered_key(float score) {
  const u32 bits = __float_as_uint(score);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEVICE float key_score(u32 key) {
  key -= key == 0x7fffffffu;  // negative zero is no score, and would compare equal to zero; no score lies in between
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Softmax of one row in units of mass. It depends on the score alone, so it may be taken again anywhere.
struct RowSoftmax {
  float highest, units;  // units: kMassUnits / sum of exponentials

  DEVICE float exponential(float score) const {
    return exp2_approx(__fmul_rn(__fsub_rn(score, highest), kLog2E));
  }
  DEVICE u32 to_units(float exponential) const { return __float2uint_rn(__fmul_rn(exponential, units)); }
  DEVICE u32 mass(float score) const { return to_units(exponential(score)); }
};

template <class T>
DEVICE T shuffle_xor(T value, int lanes) { return __shfl_xor_sync(kAllLanes, value, lanes); }

// Combines the values of a warp in a fixed order; every lane gets the result.
template <class T, class Combine>
DEVICE T across_lanes(T value, Combine combine) {
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) value = combine(value, shuffle_xor(value, lanes));
  return value;
}

// Combines one value of each warp of the block in a fixed order; every thread gets the result.
template <class T, class Combine>
DEVICE T across_warps(T value, Combine combine) {
  __shared__ T exchange[kWarp];
  const int warps = blockDim.x / kWarp;
  if (warps == 1) return value;
  __syncthreads();  // an earlier exchange has been read
  if (lane_id() == 0) exchange[threadIdx.x / kWarp] = value;
  __syncthreads();
  T result = exchange[0];
#pragma unroll 1
  for (int warp = 1; warp < warps; ++warp) result = combine(result, exchange[warp]);
  return result;
}

template <class T, class Combine>
DEVICE T across_block(T value, Combine combine) { return across_warps(across_lanes(value, combine), combine); }

struct Sum {
  template <class T>
  DEVICE T operator()(T a, T b) const { return a + b; }
};
struct Highest {
  DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
  DEVICE u32 operator()(u32 a, u32 b) const { return a > b ? a : b; }
};
struct Lowest {
  DEVICE float operator()(float a, float b) const { return fminf(a, b); }
  DEVICE u32 operator()(u32 a, u32 b) const { return a < b ? a : b; }
};

// Sum of the values of the lanes before this one.
template <class T>
DEVICE T sum_of_lanes_before(T value) {
  T sum = value;
#pragma unroll
  for (int lanes = 1; lanes < kWarp; lanes *= 2) {
    const T other = __shfl_up_sync(kAllLanes, sum, lanes);
    if (lane_id() >= lanes) sum += other;
  }
  return sum - value;
}

// Sum of the values of all threads before this one.
template <class T>
DEVICE T sum_before(T value) {
  __shared__ T totals[kWarp];
  T before = sum_of_lanes_before(value);
  __syncthreads();  // earlier totals have been read
  if (lane_id() == kWarp - 1) totals[threadIdx.x / kWarp] = before + value;
  __syncthreads();
#pragma unroll 1
  for (int other = 0; other < threadIdx.x / kWarp; ++other) before += totals[other];
  return before;
}

// ---------------------------------------------------------------------------------------------------------------------
// Block means

constexpr int kPoolTokens = 128;  // of a thread block: one query block or two key blocks
constexpr int kPoolThreads = 128;
constexpr int kPoolLanes = kHeadDim / 8;                   // threads across a token, 16 bytes each
constexpr int kPoolStep = kPoolThreads / kPoolLanes;       // tokens loaded side by side
constexpr int kPoolLoads = kPoolTokens / kPoolStep;        // loads of a thread, all in flight together
static_assert(kPoolTokens == kBlockQ && kPoolTokens == 2 * kBlockK, "a thread block pools whole mask blocks");

// Means of one tensor, each as two half-precision numbers: mean = (high + low) * unit with 22 significant bits, `unit`
// a power of two that suits the row's largest channel.
struct SplitMeans {
  u16* parts;    // (B * H * n, 2, D): high, low
  float* units;  // (B * H * n,)
};

struct MeansParams {
  TensorView q, k;
  SplitMeans q_means, k_means;
  int q_len, k_len, heads;
};

DEVICE u16 to_half(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

DEVICE float half_to_float(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// Stores one channel of a mean whose largest channel is `largest`.
DEVICE void store_mean(const SplitMeans& means, i64 row, int channel, float mean, float largest) {
  // 2^exponent brings the largest channel to [2^14, 2^15), so that the low part is exact to 2^-24 of it, or better.
  const int exponent = min(141 - static_cast<int>(__float_as_uint(largest) >> 23), 126);
  const float scaled = mean * __uint_as_float(static_cast<u32>(127 + exponent) << 23);
  const u16 high = to_half(scaled);
  u16* parts = means.parts + row * (2 * kHeadDim) + channel;
  parts[0] = high;
  parts[kHeadDim] = to_half(scaled - half_to_float(high));
  if (channel == 0) means.units[row] = __uint_as_float(static_cast<u32>(127 - exponent) << 23);
}

// 16 bytes that are read once, so they pass by L1; zeros, and no access, where `valid` is false.
DEVICE uint4 load_once(const u16* source, bool valid) {
  uint4 data;
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ne.u32 valid, %5, 0;\n"
      "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
      "@valid ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=&r"(data.x), "=&r"(data.y), "=&r"(data.z), "=&r"(data.w)
      : "l"(source), "r"(static_cast<u32>(valid)));
  return data;
}

DEVICE void add_elements(float (&sum)[8], uint4 data) {
  const u32 words[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += to_float(static_cast<u16>(words[i] & 0xffff));
    sum[2 * i + 1] += to_float(static_cast<u16>(words[i] >> 16));
  }
}

// Grid (heads * chunks of q and of k, batch). Neighbouring thread blocks take the heads of the same tokens, which lie
// side by side in a (B, L, H * D) tensor, so that open memory pages are read to their end.
extern "C" __global__ void __launch_bounds__(kPoolThreads, 4) block_means(const __grid_constant__ MeansParams p) {
  __shared__ float warp_sums[2][kPoolThreads / kWarp][kHeadDim];
  __shared__ float peaks[2][kPoolThreads / kWarp];

  const int head = blockIdx.x % p.heads, batch = blockIdx.y;
  const int q_chunks = ceil_div(p.q_len, kPoolTokens);
  const bool is_query = static_cast<int>(blockIdx.x / p.heads) < q_chunks;
  const int chunk = static_cast<int>(blockIdx.x / p.heads) - (is_query ? 0 : q_chunks);
  const TensorView& view = is_query ? p.q : p.k;
  const int tokens = min(kPoolTokens, (is_query ? p.q_len : p.k_len) - chunk * kPoolTokens);

  const int first = threadIdx.x / kPoolLanes;
  const int channel = threadIdx.x % kPoolLanes * 8;
  const u16* source = view.row(batch, head, chunk * kPoolTokens + first) + channel;
  uint4 data[kPoolLoads];
#pragma unroll
  for (int i = 0; i < kPoolLoads; ++i) {
    data[i] = load_once(source, first + i * kPoolStep < tokens);
    source += kPoolStep * view.token_stride;
  }

  float sums[2][8] = {};  // of the first and the second 64 tokens
#pragma unroll
  for (int i = 0; i < kPoolLoads; ++i) add_elements(sums[i / (kPoolLoads / 2)], data[i]);

#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int lanes = kPoolLanes; lanes < kWarp; lanes *= 2)
        sums[half][i] += shuffle_xor(sums[half][i], lanes);
    }
    if (lane_id() < kPoolLanes) {
      float4* target = reinterpret_cast<float4*>(&warp_sums[half][threadIdx.x / kWarp][channel]);
      target[0] = make_float4(sums[half][0], sums[half][1], sums[half][2], sums[half][3]);
      target[1] = make_float4(sums[half][4], sums[half][5], sums[half][6], sums[half][7]);
    }
  }
  __syncthreads();

  const int channel_id = threadIdx.x % kHeadDim;  // with 64 channels, half of the threads repeat the others' work
  float means[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int warp = 0; warp < kPoolThreads / kWarp; ++warp) means[half] += warp_sums[half][warp][channel_id];
  }
  if (is_query) {
    means[0] = (means[0] + means[1]) / tokens;
  } else {
    means[0] /= min(tokens, kBlockK);
    means[1] /= max(tokens - kBlockK, 1);  // 0 where there is no second block
  }
  float largest[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float warp_peak = across_lanes(fabsf(means[half]), Highest());
    if (lane_id() == 0) peaks[half][threadIdx.x / kWarp] = warp_peak;
  }
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int warp = 0; warp < kPoolThreads / kWarp; ++warp) largest[half] = fmaxf(largest[half], peaks[half][warp]);
  }
  if (threadIdx.x >= kHeadDim) return;
  const i64 batch_head = static_cast<i64>(batch) * p.heads + head;
  if (is_query) {
    store_mean(p.q_means, batch_head * q_chunks + chunk, channel_id, means[0], largest[0]);
  } else {
    const i64 row = batch_head * ceil_div(p.k_len, kBlockK) + 2 * chunk;
    store_mean(p.k_means, row, channel_id, means[0], largest[0]);
    if (tokens > kBlockK) store_mean(p.k_means, row + 1, channel_id, means[1], largest[1]);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Scores
//
// Matrix instructions with fp32 accuracy: each mean is the sum of two half-precision numbers, and three of the four
// products of a pair are taken. What is lost is below 2^-21 of each product, far less than the bound on the rounding
// of an fp32 sum of head_dim products, head_dim * 2^-24.

constexpr int kTileQ = 128;
constexpr int kTileK = 64;
constexpr int kTileRows = kTileQ + kTileK;  // of means in shared memory: queries, then keys
constexpr int kScoreThreads = 256;          // 4 x 2 warps of 32 x 32 scores
constexpr int kSlab = 64;                   // channels that arrive together; 128 bytes of a row's high or low part
constexpr int kSlabs = kHeadDim / kSlab;
constexpr int kSlabVectors = kSlab / 8;     // 16-byte vectors
constexpr int kPlaneBytes = kTileRows * kSlab * 2;  // the high or the low parts of a slab

struct ScoresParams {
  SplitMeans q_means, k_means;
  float* scores;  // (B * H, n_q, pitch)
  u32* zeroed;    // (zeroed_words,) counters of the kernels that follow
  int n_q, n_k, pitch;
  float scale;
  int zeroed_words;
};

DEVICE void copy_async(u32 target, const u16* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

template <int kPending>
DEVICE void wait_async() { asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory"); }

// Four 8 x 8 matrices of halves; lane i names row i % 8 of matrix i / 8.
DEVICE void load_matrices(u32 (&matrices)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(address)
               : "memory");
}

// c (16 x 8) += a (16 x 16) * b (16 x 8)
DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Grid (tiles of keys, tiles of queries, B * H).
extern "C" __global__ void __launch_bounds__(kScoreThreads, 2) pooled_scores(const __grid_constant__ ScoresParams p) {
  const int first_q = blockIdx.y * kTileQ, first_k = blockIdx.x * kTileK;
  const i64 q_rows = static_cast<i64>(blockIdx.z) * p.n_q, k_rows = static_cast<i64>(blockIdx.z) * p.n_k;
  const u32 shared = shared_address(dynamic_shared);

  const i64 thread_blocks = static_cast<i64>(gridDim.x) * gridDim.y * gridDim.z;
  const i64 thread_block = (static_cast<i64>(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  for (i64 i = thread_block * kScoreThreads + threadIdx.x; i < p.zeroed_words; i += thread_blocks * kScoreThreads)
    p.zeroed[i] = 0;

  // All of the tile's means, one commit group a slab: (slab, high or low, row, vector), where row r keeps its vector v
  // at v ^ r % 8, so that 8 rows of one matrix lie in different banks. Rows past the end repeat the last one; their
  // scores are not stored.
  constexpr int kStep = kScoreThreads / kSlabVectors;  // rows copied side by side
  constexpr int kCopies = kTileRows / kStep;
  static_assert(kTileQ % kStep == 0 && kTileK % kStep == 0, "each copy is of queries or of keys");
  {
    const int row = threadIdx.x / kSlabVectors, vector = threadIdx.x % kSlabVectors;
    const u32 target = shared + row * (kSlab * 2) + (vector ^ row % 8) * 16;
    const u16* sources[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const bool is_query = i * kStep < kTileQ;
      const int index = i * kStep + row + (is_query ? first_q : first_k - kTileQ);
      const i64 source = is_query ? q_rows + min(index, p.n_q - 1) : k_rows + min(index, p.n_k - 1);
      sources[i] = (is_query ? p.q_means.parts : p.k_means.parts) + source * (2 * kHeadDim) + vector * 8;
    }
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int i = 0; i < kCopies; ++i)
          copy_async(target + (slab * 2 + part) * kPlaneBytes + i * kStep * (kSlab * 2),
                     sources[i] + part * kHeadDim + slab * kSlab);
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
    }
  }

  const int warp = threadIdx.x / kWarp, lane = lane_id();
  const int warp_q = warp % 4 * 32, warp_k = warp / 4 * 32;
  // Matrices of an a fragment: (rows 0 to 7, k 0 to 7), (8 to 15, 0 to 7), (0 to 7, 8 to 15), (8 to 15, 8 to 15); of
  // two b fragments: the same with the middle ones swapped.
  const int matrix = lane / 8, matrix_row = lane % 8;
  const u32 a_address = shared + (warp_q + matrix % 2 * 8 + matrix_row) * (kSlab * 2) + (matrix / 2 ^ matrix_row) * 16;
  const u32 b_address =
      shared + (kTileQ + warp_k + matrix / 2 * 8 + matrix_row) * (kSlab * 2) + (matrix % 2 ^ matrix_row) * 16;

  float c[2][4][4] = {};
#pragma unroll
  for (int slab = 0; slab < kSlabs; ++slab) {
    if (slab < kSlabs - 1) wait_async<kSlabs - 1>();
    else wait_async<0>();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kSlab / 16; ++step) {
      u32 a[2][2][4], b[2][2][4];  // part, pair of fragments
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const u32 plane = (slab * 2 + part) * kPlaneBytes;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          load_matrices(a[part][i], (a_address ^ step * 32) + plane + i * 16 * (kSlab * 2));
          load_matrices(b[part][i], (b_address ^ step * 32) + plane + i * 16 * (kSlab * 2));
        }
      }
      // The small products first; neighbouring instructions add to different sums, so none waits for another.
#pragma unroll
      for (int product = 0; product < 3; ++product) {
        const int q_part = product == 0, k_part = product == 1;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j)
            multiply(c[i][j], a[q_part][i], b[k_part][j / 2][j % 2 * 2], b[k_part][j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }

  const int group = lane / 4, member = lane % 4;  // row and pair of columns of a result
  float k_units[4][2];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      k_units[j][i] = p.k_means.units[k_rows + min(first_k + warp_k + j * 8 + member * 2 + i, p.n_k - 1)];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = first_q + warp_q + i * 8 + group;
    if (row >= p.n_q) continue;
    const float q_unit = p.q_means.units[q_rows + row];
    float* target = p.scores + (q_rows + row) * p.pitch;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = first_k + warp_k + j * 8 + member * 2;
      if (column >= p.pitch) continue;
      float pair[2];
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const float score = c[i / 2][j][i % 2 * 2 + side] * q_unit * k_units[j][side] * p.scale;
        pair[side] = column + side < p.n_k ? finite_score(score) : kNoScore;
      }
      *reinterpret_cast<float2*>(target + column) = make_float2(pair[0], pair[1]);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows in bins of falling score
//
// No sort: a row's entries are counted in bins, and only the few bins that a cut falls in are ever put in order.

constexpr int kMaxRowThreads = 512;  // up to 8192 key blocks
#if __CUDA_ARCH__ == 800
constexpr int kRowBlocks = 1;  // of so many threads at once; two would spill a register there
#else
constexpr int kRowBlocks = 2;
#endif
constexpr int kBins = 256;
constexpr int kLaneBins = kBins / kWarp;
constexpr int kSampled = 8;  // registers that the range of the bins is taken from

template <int kCount, class Visit>
DEVICE void unrolled(Visit visit) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) visit(i);
}

// An integer from 0 up as the float 2^23 + integer, whose bits count up too.
constexpr float kIntegers = 8388608.f;
constexpr u32 kIntegerBits = 0x4b000000u;

// Bins of descending score; the last one also takes all that is lower.
struct ScoreBins {
  float highest, per_score;

  DEVICE static ScoreBins covering(float highest, float lowest) {
    return {highest, (kBins - 1) / (highest - lowest)};
  }
  // kIntegers + bin. It never falls while the score falls, whatever the rounding; not-a-number is the last bin.
  DEVICE float of(float score) const {
    float below;  // volatile, or the compiler keeps what it knows of 40 scores in registers, and spills
    asm volatile("sub.f32 %0, %1, %2;" : "=f"(below) : "f"(highest), "f"(score));
    return fminf(__fmaf_rn(below, per_score, kIntegers), kIntegers + (kBins - 1));
  }
};

DEVICE void count_in_shared(u32* counter, u32 amount) {
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(shared_address(counter)), "r"(amount) : "memory");
}

DEVICE u32 take_place(u32* counter) {
  u32 place;
  asm volatile("atom.shared.add.u32 %0, [%1], 1;" : "=r"(place) : "r"(shared_address(counter)) : "memory");
  return place;
}

// The threads of a row: one warp of a thread block that has several, or all of the thread block.
template <bool kOneWarp>
struct RowThreads {
  DEVICE static int count() { return kOneWarp ? kWarp : blockDim.x; }
  DEVICE static int rank() { return kOneWarp ? lane_id() : threadIdx.x; }
  DEVICE static int warps() { return kOneWarp ? 1 : blockDim.x / kWarp; }
  DEVICE static int warp() { return kOneWarp ? 0 : threadIdx.x / kWarp; }
  // Of the thread block.
  DEVICE static int row() { return kOneWarp ? threadIdx.x / kWarp : 0; }
  DEVICE static int rows() { return kOneWarp ? blockDim.x / kWarp : 1; }

  DEVICE static void sync() {
    if (kOneWarp) __syncwarp();
    else __syncthreads();
  }
  template <class T, class Combine>
  DEVICE static T across(T value, Combine combine) {
    value = across_lanes(value, combine);
    return kOneWarp ? value : across_warps(value, combine);
  }
};

// Entries of each bin and their mass, in shared memory.
struct BinSums {
  uint4 count_vectors[kBins / 4], mass_vectors[kBins / 4];
};

// A lane's neighbouring bins, and the sums of all bins before them.
struct LaneBins {
  u32 counts[kLaneBins], masses[kLaneBins], count_before, mass_before;

  DEVICE LaneBins(const BinSums& sums, int n_k) {
    const int lane = lane_id();
    count_before = 0, mass_before = 0;
#pragma unroll
    for (int i = 0; i < kLaneBins; i += 4) {
      const uint4 count = sums.count_vectors[(lane * kLaneBins + i) / 4];
      const uint4 mass = sums.mass_vectors[(lane * kLaneBins + i) / 4];
      counts[i] = count.x, counts[i + 1] = count.y, counts[i + 2] = count.z, counts[i + 3] = count.w;
      masses[i] = mass.x, masses[i + 1] = mass.y, masses[i + 2] = mass.z, masses[i + 3] = mass.w;
      count_before += count.x + count.y + count.z + count.w, mass_before += mass.x + mass.y + mass.z + mass.w;
    }
    const u32 padding = across_lanes(count_before, Sum()) - n_k;
    if (lane == kWarp - 1) counts[kLaneBins - 1] -= padding;  // the last bin counted it, too
    count_before = sum_of_lanes_before(count_before), mass_before = sum_of_lanes_before(mass_before);
  }
};

// A row in registers: entry i * threads + thread is in register i.
template <int kValues, bool kOneWarp>
struct BinnedRow {
  float scores[kValues];
  RowSoftmax softmax;
  ScoreBins bins;

  // source: this thread's first score. chunks: registers of this warp that hold scores or padding. All threads of the
  // row call it; afterwards the sums are complete.
  DEVICE void fill(const float* source, int chunks, int n_k, BinSums& sums) {
    using Threads = RowThreads<kOneWarp>;
    const int thread = Threads::rank(), threads = Threads::count();
    for (int i = thread; i < kBins / 4; i += threads)
      sums.count_vectors[i] = sums.mass_vectors[i] = make_uint4(0, 0, 0, 0);
    unrolled<kValues>([&](int i) { scores[i] = i < chunks ? source[i * threads] : kNoScore; });
    float highest = kNoScore;
    unrolled<kValues>([&](int i) { highest = fmaxf(highest, scores[i]); });
    float lowest = thread < n_k ? scores[0] : kScoreLimit;  // of a sample that holds no padding
    unrolled<kSampled>([&](int i) { lowest = i + 1 < chunks ? fminf(lowest, scores[i]) : lowest; });
    highest = Threads::across(highest, Highest());
    bins = ScoreBins::covering(highest, Threads::across(lowest, Lowest()));

    softmax = {highest, 0.f};
    float exponentials[kValues], sum = 0.f;
    unrolled<kValues>([&](int i) {
      exponentials[i] = softmax.exponential(scores[i]);
      sum += exponentials[i];
    });
    softmax.units = kMassUnits / Threads::across(sum, Sum());
    u32* counts = reinterpret_cast<u32*>(sums.count_vectors);
    u32* masses = reinterpret_cast<u32*>(sums.mass_vectors);
    Threads::sync();  // the bins are empty
    unrolled<kValues>([&](int i) {
      const u32 bin = __float_as_uint(bins.of(scores[i])) - kIntegerBits;
      count_in_shared(counts + bin, 1);
      count_in_shared(masses + bin, softmax.to_units(exponentials[i]));
    });
    Threads::sync();
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Top-k united with Top-p

constexpr int kHalvings = 10;   // rounds that halve the range of scores, before those that halve the range of keys

struct SelectParams {
  const float* scores;  // (rows, pitch)
  u32* bits;            // (rows, words)
  int* counts;          // (rows,)
  int rows, n_k, pitch, words;
  u32 floor;       // ranks below it are kept, at least 1
  u32 mass_limit;  // ranks with less mass before them are kept
};

// What is known of a row: `above` entries of mass `mass_above` are kept; the last kept one is among the next `open`.
struct Search {
  u32 above, mass_above, open;
};

// The last kept entry, and how many are kept.
struct Cut {
  float score;
  u32 index, kept;
};

// Entries that are still open, few enough for one lane each, in any order.
struct Candidates {
  float scores[kWarp];
  u32 indices[kWarp];
  u32 count;

  DEVICE void add(float score, u32 index) {
    const u32 place = take_place(&count);
    scores[place] = score, indices[place] = index;
  }

  DEVICE Cut cut(const Search& search, const RowSoftmax& softmax, const SelectParams& p) const {
    const u32 lane = lane_id(), own = min(lane, search.open - 1);
    const float score = scores[own];
    const u32 index = indices[own], own_mass = softmax.mass(score);
    u32 rank = search.above, mass = search.mass_above;
#pragma unroll 1
    for (u32 other = 0; other < search.open; ++other) {
      const u32 other_mass = __shfl_sync(kAllLanes, own_mass, other);
      if (scores[other] > score || (scores[other] == score && indices[other] < index)) ++rank, mass += other_mass;
    }
    const bool keep = lane < search.open && (rank < p.floor || mass < p.mass_limit);
    const u32 kept = search.above + __popc(__ballot_sync(kAllLanes, keep));
    const int last = __ffs(__ballot_sync(kAllLanes, keep && rank + 1 == kept)) - 1;
    return {__shfl_sync(kAllLanes, score, last), __shfl_sync(kAllLanes, index, last), kept};
  }
};

// A row in memory, for the rare searches that go over it again and again.
template <bool kOneWarp>
struct StoredRow {
  const float* scores;
  RowSoftmax softmax;

  template <class Visit>
  DEVICE void each(const SelectParams& p, Visit visit) const {
    using Threads = RowThreads<kOneWarp>;
#pragma unroll 1
    for (int i = Threads::rank(); i < p.n_k; i += Threads::count()) visit(scores[i], static_cast<u32>(i));
  }

  // Finds the cut among scores from `lowest` to `highest` that are too many for `Candidates`, as outliers or repeated
  // blocks make them: halves the range until few entries, or entries of one score only, are left.
  DEVICE Cut search_range(
      Search search, float lowest, float highest, Candidates& candidates, const SelectParams& p) const {
    using Threads = RowThreads<kOneWarp>;
    u32 low = ordered_key(lowest) - 1, high = ordered_key(highest);  // all above `high` are kept, none up to `low` is
#pragma unroll 1
    for (int round = 0; search.open > kWarp && high - low > 1; ++round) {
      u32 pivot = round < kHalvings ? ordered_key(0.5f * (key_score(low) + key_score(high))) : low + (high - low) / 2;
      pivot = min(max(pivot, low + 1), high - 1);
      const float pivot_score = key_score(pivot);
      u32 count = 0, mass = 0;
      each(p, [&](float score, u32) {
        if (score > pivot_score) ++count, mass += softmax.mass(score);
      });
      count = Threads::across(count, Sum()), mass = Threads::across(mass, Sum());
      if (count < p.floor || mass < p.mass_limit) {  // then the first entry that is not above the pivot is kept
        high = pivot;
        search.open -= count - search.above, search.above = count, search.mass_above = mass;
      } else {
        low = pivot, search.open = count - search.above;
      }
    }
    const float low_score = key_score(low), high_score = key_score(high);
    if (search.open <= kWarp) {
      each(p, [&](float score, u32 index) {
        if (score > low_score && score <= high_score) candidates.add(score, index);
      });
      Threads::sync();
      return candidates.cut(search, softmax, p);
    }
    // All are of one score, so each has the same mass, and those of the lowest indices are kept.
    const u32 tie_mass = softmax.mass(high_score);
    const u32 by_count = p.floor > search.above ? p.floor - search.above : 0;
    const u32 mass_wanted = p.mass_limit > search.mass_above ? p.mass_limit - search.mass_above : 0;
    const u32 by_mass = tie_mass > 0 ? mass_wanted / tie_mass + (mass_wanted % tie_mass > 0)
                                     : mass_wanted > 0 ? search.open : 0;
    const u32 ties = min(search.open, max(by_count, by_mass));
    u32 first = 0, end = p.n_k - 1;  // the lowest index up to which there are enough ties
#pragma unroll 1
    while (first < end) {
      const u32 middle = (first + end) / 2;
      u32 count = 0;
      each(p, [&](float score, u32 index) { count += score == high_score && index <= middle; });
      if (Threads::across(count, Sum()) >= ties) end = middle;
      else first = middle + 1;
    }
    return {high_score, end, search.above + ties};
  }
};

// kRows: of a thread block. The last row first: the latest scores are still in the cache.
template <int kValues, bool kOneWarp, int kRows>
DEVICE void select_blocks(const SelectParams& p) {
  using Threads = RowThreads<kOneWarp>;
  __shared__ BinSums all_sums[kRows];
  __shared__ Candidates all_candidates[kRows];
  __shared__ u32 all_words[kRows][kValues * (kOneWarp ? kWarp : kMaxRowThreads) / kWarp];
  BinSums& sums = all_sums[Threads::row()];
  Candidates& candidates = all_candidates[Threads::row()];
  u32* words = all_words[Threads::row()];

  const int row = p.rows - 1 - static_cast<int>(blockIdx.x * Threads::rows() + Threads::row());
  if (row < 0) return;
  const int thread = Threads::rank(), threads = Threads::count(), lane = lane_id();
  const int warps = Threads::warps(), warp = Threads::warp();
  const int chunks = ceil_div(p.words - warp, warps);
  const float* source = p.scores + static_cast<i64>(row) * p.pitch + thread;
  if (thread == 0) candidates.count = 0;

  BinnedRow<kValues, kOneWarp> binned;
  binned.fill(source, chunks, p.n_k, sums);

  // Every warp finds the last bin that holds entries and whose first entry is kept.
  Search search = {0, 0, 0};
  int end_bin = 0;
  {
    const LaneBins lane_bins(sums, p.n_k);
    u32 count = lane_bins.count_before, mass = lane_bins.mass_before;
    unrolled<kLaneBins>([&](int i) {
      const u32 entries = lane_bins.counts[i];
      if (entries > 0 && (count < p.floor || mass < p.mass_limit))
        search = {count, mass, entries}, end_bin = lane * kLaneBins + i;
      count += entries, mass += lane_bins.masses[i];
    });
  }
  const int end_lane = kWarp - 1 - __clz(__ballot_sync(kAllLanes, search.open > 0));
  search.above = __shfl_sync(kAllLanes, search.above, end_lane);
  search.mass_above = __shfl_sync(kAllLanes, search.mass_above, end_lane);
  search.open = __shfl_sync(kAllLanes, search.open, end_lane);
  const float end = kIntegers + __shfl_sync(kAllLanes, end_bin, end_lane);

  Cut cut;
  if (search.open <= kWarp) {
    unrolled<kValues>([&](int i) {
      if (binned.bins.of(binned.scores[i]) == end) {
        if (binned.scores[i] != kNoScore) candidates.add(binned.scores[i], i * threads + thread);
      }
    });
    Threads::sync();
    cut = candidates.cut(search, binned.softmax, p);
  } else {
    const StoredRow<kOneWarp> stored = {source - thread, binned.softmax};
    float low = kScoreLimit, high = -kScoreLimit;
    stored.each(p, [&](float score, u32) {
      if (binned.bins.of(score) == end) low = fminf(low, score), high = fmaxf(high, score);
    });
    cut = stored.search_range(search, Threads::across(low, Lowest()), Threads::across(high, Highest()), candidates, p);
  }

  // Each register of a warp is one word of bits.
  u32 kept = 0;
  unrolled<kValues>([&](int i) {
    const u32 word = __ballot_sync(kAllLanes, binned.scores[i] >= cut.score);
    if (lane == 0) words[i * warps + warp] = word;
    kept += __popc(word);
  });
  if (!kOneWarp) kept = across_warps(kept, Sum());
  if (kept != cut.kept) {  // entries of the cut's score and a higher index are dropped
#pragma unroll 1
    for (int i = 0; i < chunks; ++i) {
      const float score = source[i * threads];
      const u32 index = i * threads + thread;
      const u32 word = __ballot_sync(kAllLanes, score > cut.score || (score == cut.score && index <= cut.index));
      if (lane == 0) words[i * warps + warp] = word;
    }
  }
  Threads::sync();
  u32* bits = p.bits + static_cast<i64>(row) * p.words;
  for (int i = thread; i < p.words; i += threads) bits[i] = words[i];
  if (thread == 0) p.counts[row] = cut.kept;
}

extern "C" __global__ void __launch_bounds__(kWarp, 16) select_blocks_512(const __grid_constant__ SelectParams p) {
  select_blocks<16, true, 1>(p);
}

extern "C" __global__ void __launch_bounds__(4 * kWarp, 4) select_blocks_1280(const __grid_constant__ SelectParams p) {
  select_blocks<40, true, 4>(p);
}

extern "C" __global__ void __launch_bounds__(kMaxRowThreads, kRowBlocks)
    select_blocks_8192(const __grid_constant__ SelectParams p) {
  select_blocks<16, false, 1>(p);
}

// ---------------------------------------------------------------------------------------------------------------------
// Target sparsity
//
// Each sample keeps the entries that Top-k keeps and, of all others, the wanted number with the least mass before them.
// So the cut is an order statistic of those masses. Entries of a bin have at least the mass before them that lies
// before the bin, and at most that before the next one: counted once at the one and once at the other, they enclose
// the cut between two masses. Only rows' entries in bins that reach in between are open; each gets its exact mass,
// and two rounds of counting, in up to 2^16 cells each, find the cut among them. Entries at a row's end that are too
// low to have mass of their own have all the same before them, and are kept or dropped together.

constexpr int kTargetThreads = 256;
constexpr int kTargetWarps = kTargetThreads / kWarp;
constexpr int kOpenLoads = 16;  // of a thread, in flight together

constexpr u32 kFloorCell = 0;         // kept by Top-k; the mass before every other entry is at least 1
constexpr u32 kNoCell = 0xffffffffu;  // dropped, or padding

// Levels of mass, 64 to an octave, finest next to nothing and next to a whole row: a row of 8192 entries has at least
// 2^18 units before its second one, and what a row's rounded masses add up to strays from 2^31 by less than 2^12.
constexpr int kLevelBits = 6;
constexpr u32 kLowOctave = 18, kHighOctave = 10, kHalfMass = 1u << 30, kFullMass = (1u << 31) + (1u << 12);
constexpr u32 kLowLevels = (30 - kLowOctave) << kLevelBits, kHighLevels = (30 - kHighOctave) << kLevelBits;
constexpr int kLevels = kLowLevels + kHighLevels;
constexpr u32 kMostMass = kNoCell - 1;

// Steps of a scale whose octaves, from 2^first_octave up, have 2^kLevelBits steps each.
DEVICE u32 octave_step(u32 value, u32 first_octave) {
  const u32 base = (127 + first_octave) << kLevelBits;
  return max(__float_as_uint(__uint2float_rz(value)) >> (23 - kLevelBits), base) - base;
}
DEVICE u32 octave_step_start(u32 step, u32 first_octave) {
  const u32 base = (127 + first_octave) << kLevelBits;
  return step == 0 ? 0 : __float2uint_rz(__uint_as_float((base + step) << (23 - kLevelBits)));
}

// It never falls while the mass grows.
DEVICE u32 mass_level(u32 mass) {
  if (mass < kHalfMass) return octave_step(mass, kLowOctave);
  const u32 left = mass < kFullMass ? kFullMass - mass : 0;
  return kLevels - 1 - octave_step(min(left, kHalfMass - 1), kHighOctave);
}
// The least mass of a level.
DEVICE u32 level_start(u32 level) {
  if (level <= kLowLevels) return octave_step_start(level, kLowOctave);
  return kFullMass + 1 - octave_step_start(kLevels - level, kHighOctave);
}
DEVICE u32 level_end(u32 level) { return level == kLevels - 1 ? kMostMass : level_start(level + 1) - 1; }

// Counts of 2^16 cells, and of groups of them, which make it quick to find one.
constexpr int kGroups = kTargetThreads;
constexpr int kGroupCells = kTargetThreads;
struct CellCounts {
  u32 groups[kGroups], cells[kGroups * kGroupCells];
};

// Of one sample. pooled_scores zeroes it, and each kernel leaves for the next ones what they need.
struct TargetSearch {
  u32 starts[kLevels], ends[kLevels];  // entries by the least and by the most mass that may lie before them
  u32 below;            // entries with less mass before them than `lowest`
  u32 lowest, shift;    // mass where the first cell starts, and log2 of the size of a cell
  u32 first, wanted;    // mass where the cut's own cell starts, and entries to keep of it
  u32 unused[3];
  CellCounts coarse;    // open entries by cell
  CellCounts exact;     // those of the cut's cell by mass
};
static_assert(sizeof(TargetSearch) % 16 == 0, "samples lie one behind the other");

// A row between the kernels.
constexpr u32 kMaxOpen = 128;
struct RowBins {
  ScoreBins bins;
  float units;    // of its softmax
  u32 floor_bin;  // bins before it hold entries that Top-k keeps, and no others
  uint4 through[kBins / 4];  // mass up to the end of each bin
};
struct RowOpen {
  u32 kept, count;       // certain entries, and open ones; beyond kMaxOpen, masses of all are in the scores' place
  u32 tail, whole;       // entries after the open ones, all with the mass `whole` before them; 0 if they are dropped
  u32 masses[kMaxOpen];  // before each open entry; kFloorCell where Top-k keeps it
  u16 indices[kMaxOpen];
};
union RowState {
  RowBins binned;  // from bin_rows
  RowOpen open;    // from rank_open
};

struct TargetParams {
  float* scores;           // (B * rows of a sample, pitch)
  RowState* rows;          // (B * rows of a sample,)
  TargetSearch* searches;  // (B,)
  u32* bits;               // (B * rows of a sample, words)
  int* counts;             // (B * rows of a sample,)
  int sample_rows, n_k, pitch, words;
  u32 floor;   // ranks below it are kept, at least 1
  u32 wanted;  // entries of a sample to keep beyond those that Top-k keeps, at least 1
};

struct Place {
  u32 index, wanted;
};

// The first of kCount counters up to which there are `wanted` entries, and how many of its own are among them. All
// kTargetThreads threads of the block call it and get it.
template <int kCount>
DEVICE Place find_place(const u32* counters, u32 wanted) {
  constexpr int kOwn = kCount / kTargetThreads;
  __shared__ Place found;
  u32 own[kOwn], count = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    own[i] = counters[threadIdx.x * kOwn + i];
    count += own[i];
  }
  u32 before = sum_before(count);
  if (before < wanted && wanted <= before + count) {  // true for one thread
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (before < wanted && wanted <= before + own[i]) found = {threadIdx.x * kOwn + i, wanted - before};
      before += own[i];
    }
  }
  __syncthreads();
  return found;
}

DEVICE Place find_cell(const CellCounts& counts, u32 wanted) {
  const Place group = find_place<kGroups>(counts.groups, wanted);
  const Place cell = find_place<kGroupCells>(counts.cells + group.index * kGroupCells, group.wanted);
  return {group.index * kGroupCells + cell.index, cell.wanted};
}

// Grid (any, B). Each row is put in bins, whose entries are counted at the levels that enclose the mass before them.
template <int kValues, bool kOneWarp>
DEVICE void bin_rows(const TargetParams& p) {
  using Threads = RowThreads<kOneWarp>;
  __shared__ BinSums all_sums[kOneWarp ? kTargetWarps : 1];
  __shared__ u32 starts[kLevels], ends[kLevels];
  BinSums& sums = all_sums[Threads::row()];
  for (int i = threadIdx.x; i < kLevels; i += blockDim.x) starts[i] = ends[i] = 0;
  __syncthreads();

  const int chunks = ceil_div(p.words - Threads::warp(), Threads::warps());
  // The last row first: the latest scores are still in the cache.
#pragma unroll 1
  for (int i = blockIdx.x * Threads::rows() + Threads::row(); i < p.sample_rows; i += gridDim.x * Threads::rows()) {
    const i64 row = static_cast<i64>(blockIdx.y) * p.sample_rows + p.sample_rows - 1 - i;
    BinnedRow<kValues, kOneWarp> binned;
    binned.fill(p.scores + row * p.pitch + Threads::rank(), chunks, p.n_k, sums);
    if (Threads::warp() == 0) {
      const LaneBins lane_bins(sums, p.n_k);
      u32 count = lane_bins.count_before, mass = lane_bins.mass_before, level = mass_level(mass);
      u32 floor_bin = 0, through[kLaneBins];
      unrolled<kLaneBins>([&](int j) {
        const u32 entries = lane_bins.counts[j];
        const u32 beyond = entries - min(entries, max(p.floor, count) - count);
        count += entries, mass += lane_bins.masses[j];
        floor_bin += count <= p.floor;
        through[j] = mass;
        const u32 next_level = mass_level(mass);
        if (beyond > 0) {
          count_in_shared(starts + level, beyond);
          count_in_shared(ends + (entries > 1 ? next_level : level), beyond);  // before a single one lies no other
        }
        level = next_level;
      });
      floor_bin = across_lanes(floor_bin, Sum());
      RowBins& target = p.rows[row].binned;
#pragma unroll
      for (int j = 0; j < kLaneBins / 4; ++j)
        target.through[lane_id() * (kLaneBins / 4) + j] =
            make_uint4(through[j * 4], through[j * 4 + 1], through[j * 4 + 2], through[j * 4 + 3]);
      if (lane_id() == 0) {
        target.bins = binned.bins;
        target.units = binned.softmax.units;
        target.floor_bin = floor_bin;
      }
    }
    Threads::sync();  // the bins have been read
  }
  __syncthreads();
  TargetSearch& search = p.searches[blockIdx.y];
  for (int i = threadIdx.x; i < kLevels; i += blockDim.x) {
    if (starts[i] > 0) atomicAdd(&search.starts[i], starts[i]);
    if (ends[i] > 0) atomicAdd(&search.ends[i], ends[i]);
  }
}

extern "C" __global__ void __launch_bounds__(kTargetThreads, 3) bin_rows_512(const __grid_constant__ TargetParams p) {
  bin_rows<16, true>(p);
}

extern "C" __global__ void __launch_bounds__(kTargetThreads, 2) bin_rows_1280(const __grid_constant__ TargetParams p) {
  bin_rows<40, true>(p);
}

extern "C" __global__ void __launch_bounds__(kMaxRowThreads, kRowBlocks)
    bin_rows_8192(const __grid_constant__ TargetParams p) {
  bin_rows<16, false>(p);
}

// Counts open entries in the cells between two masses. Every count of a thread goes through `add`.
struct OpenCounts {
  u32* groups;  // in shared memory
  u32* cells;   // in global memory
  u32 lowest, highest, shift;

  DEVICE bool holds(u32 mass) const { return mass >= lowest && mass <= highest; }
  DEVICE u32 cell(u32 mass) const { return (mass - lowest) >> shift; }
  DEVICE void add(u32 cell, u32 entries) const {
    count_in_shared(groups + cell / kGroupCells, entries);
    atomicAdd(cells + cell, entries);
  }
};

// A row's open bins, and what lies before them.
struct OpenBins {
  ScoreBins bins;
  RowSoftmax softmax;
  int first, last;
  u32 kept, mass_before, count;  // count: open entries

  // kIntegers + bin; padding is past the last one.
  DEVICE float bin(float score) const { return score != kNoScore ? bins.of(score) : kIntegers + kBins; }
  DEVICE bool is_certain(float bin) const { return bin < kIntegers + first; }
  DEVICE bool is_open(float bin) const { return bin >= kIntegers + first && bin <= kIntegers + last; }
};

// The row whose open entries are too many for one warp: the whole block sorts them. The mass before each entry takes
// the place of its score. Returns how many of this thread's entries have less before them than `counts.lowest`.
DEVICE u32 rank_many(const OpenBins& row, float* scores, const OpenCounts& counts, const TargetParams& p) {
  __shared__ u32 appended;
  u64* keys = reinterpret_cast<u64*>(dynamic_shared);  // of falling score and rising index
  u32* cells = reinterpret_cast<u32*>(scores);
  const int thread = threadIdx.x;
  if (thread == 0) appended = 0;
  __syncthreads();
#pragma unroll 1
  for (int i = thread; i < p.pitch; i += kTargetThreads) {
    const float score = scores[i], bin = row.bin(score);
    cells[i] = row.is_certain(bin) ? kFloorCell : kNoCell;
    if (row.is_open(bin)) keys[take_place(&appended)] = static_cast<u64>(~ordered_key(score)) << 32 | i;
  }
  int size = kTargetThreads;
  while (size < static_cast<int>(row.count)) size *= 2;
  for (int i = row.count + thread; i < size; i += kTargetThreads) keys[i] = ~0ull;
  __syncthreads();
#pragma unroll 1
  for (int run = 2; run <= size; run *= 2) {
#pragma unroll 1
    for (int step = run / 2; step > 0; step /= 2) {
#pragma unroll 1
      for (int i = thread; i < size / 2; i += kTargetThreads) {
        const int a = 2 * i - (i & (step - 1)), b = a + step;
        const u64 low = min(keys[a], keys[b]), high = max(keys[a], keys[b]);
        keys[a] = a & run ? high : low, keys[b] = a & run ? low : high;
      }
      __syncthreads();
    }
  }

  const u32 own = size / kTargetThreads, first = thread * own, end = min(first + own, row.count);
  u32 mass = 0;
#pragma unroll 1
  for (u32 i = first; i < end; ++i) mass += row.softmax.mass(key_score(~static_cast<u32>(keys[i] >> 32)));
  mass = row.mass_before + sum_before(mass);
  u32 below = 0, cell = 0, entries = 0;  // entries: of the latest cell, so that ties are counted together
#pragma unroll 1
  for (u32 i = first; i < end; ++i) {
    const bool by_floor = row.kept + i < p.floor;
    cells[static_cast<u32>(keys[i])] = by_floor ? kFloorCell : mass;
    if (!by_floor && mass < counts.lowest) ++below;
    if (!by_floor && counts.holds(mass)) {
      if (entries > 0 && counts.cell(mass) != cell) counts.add(cell, entries), entries = 0;
      cell = counts.cell(mass), ++entries;
    }
    mass += row.softmax.mass(key_score(~static_cast<u32>(keys[i] >> 32)));
  }
  if (entries > 0) counts.add(cell, entries);
  __syncthreads();  // the keys have been read
  return below;
}

// Grid (any, B); one warp a row at a time. Writes the bits of the entries that are certain.
extern "C" __global__ void __launch_bounds__(kTargetThreads, 4) rank_open(const __grid_constant__ TargetParams p) {
  struct Entry {
    float score;
    u32 mass;
  };
  __shared__ Entry all_entries[kTargetWarps][kMaxOpen];
  __shared__ u16 all_indices[kTargetWarps][kMaxOpen];
  __shared__ OpenBins many[kTargetWarps];
  __shared__ u32 groups[kGroups];

  TargetSearch& search = p.searches[blockIdx.y];
  groups[threadIdx.x] = 0;
  // The mass before every entry that Top-k does not keep is at least 1.
  const u32 lowest = max(level_start(find_place<kLevels>(search.starts, p.wanted).index), 1);
  const u32 highest = level_end(find_place<kLevels>(search.ends, p.wanted).index);
  const u32 shift = max(16 - __clz(highest - lowest), 0);
  const OpenCounts counts = {groups, search.coarse.cells, lowest, highest, shift};
  if (blockIdx.x == 0 && threadIdx.x == 0) search.lowest = lowest, search.shift = shift;

  const int warp = threadIdx.x / kWarp, lane = lane_id();
  Entry* entries = all_entries[warp];
  u16* indices = all_indices[warp];
  u32 below = 0;  // entries with less than `lowest` before them
#pragma unroll 1
  for (int start = blockIdx.x * kTargetWarps; start < p.sample_rows; start += gridDim.x * kTargetWarps) {
    const i64 start_row = static_cast<i64>(blockIdx.y) * p.sample_rows + start, row = start_row + warp;
    OpenBins open = {};
    u32 whole = 0;  // the row's mass
    if (start + warp < p.sample_rows) {
      const RowBins& binned = p.rows[row].binned;
      open.bins = binned.bins;
      open.softmax = {binned.bins.highest, binned.units};
      {
        const uint4 low = binned.through[lane * 2], high = binned.through[lane * 2 + 1];
        const u32 through[kLaneBins] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        // Three counts of bins, 10 bits each: those that end below `lowest`, those that the last one which starts up to
        // `highest` comes after, and those that mass comes after.
        u32 bins_before = 0;
        whole = __shfl_sync(kAllLanes, through[kLaneBins - 1], kWarp - 1);
        unrolled<kLaneBins>([&](int i) {
          bins_before += through[i] < lowest ? 1 : 0;
          bins_before += through[i] <= highest && lane * kLaneBins + i < kBins - 1 ? 1 << 10 : 0;
          bins_before += through[i] < whole ? 1 << 20 : 0;
        });
        bins_before = across_lanes(bins_before, Sum());
        const int floor_bin = binned.floor_bin;
        open.first = max(static_cast<int>(bins_before & 1023), floor_bin);
        open.last = max(static_cast<int>(min(bins_before >> 10 & 1023, bins_before >> 20)), floor_bin);
        unrolled<kLaneBins>([&](int i) {
          if (lane * kLaneBins + i < open.first) open.mass_before = through[i];
        });
        open.mass_before = across_lanes(open.mass_before, Highest());
      }

      const float* source = p.scores + row * p.pitch + lane;
#pragma unroll 1
      for (int first = 0; first < p.words; first += kOpenLoads) {
        float scores[kOpenLoads];
        unrolled<kOpenLoads>([&](int i) {
          scores[i] = first + i < p.words ? source[(first + i) * kWarp] : kNoScore;
        });
        u32 own = 0;
        unrolled<kOpenLoads>([&](int i) {
          const float bin = open.bin(scores[i]);
          const u32 certain = __ballot_sync(kAllLanes, open.is_certain(bin));
          const u32 opened = __ballot_sync(kAllLanes, open.is_open(bin));
          if (lane == i) own = certain;
          open.kept += __popc(certain);
          if (opened != 0) {
            const u32 place = open.count + __popc(opened & ((1u << lane) - 1));
            if (opened >> lane & 1 && place < kMaxOpen)
              entries[place].score = scores[i], indices[place] = (first + i) * kWarp + lane;
            open.count += __popc(opened);
          }
        });
        if (lane < kOpenLoads && first + lane < p.words) p.bits[row * p.words + first + lane] = own;
      }
      __syncwarp();
      RowOpen& target = p.rows[row].open;
      if (lane == 0) {
        // Certain entries beyond the floor lie in bins that end below `lowest`.
        below += max(open.kept, p.floor) - p.floor;
        const u32 tail = whole <= highest ? p.n_k - open.kept - open.count : 0;
        if (tail > 0) counts.add(counts.cell(whole), tail);
        target.kept = open.kept, target.count = open.count, target.tail = tail, target.whole = whole;
      }
      if (open.count <= kMaxOpen) {
        for (u32 i = lane; i < open.count; i += kWarp) entries[i].mass = open.softmax.mass(entries[i].score);
        __syncwarp();
#pragma unroll 1
        for (u32 i = lane; i < open.count; i += kWarp) {
          const float own = entries[i].score;
          u32 rank = open.kept, mass = open.mass_before;
#pragma unroll 4
          for (u32 other = 0; other < open.count; ++other) {
            const Entry entry = entries[other];
            if (entry.score > own || (entry.score == own && other < i)) ++rank, mass += entry.mass;
          }
          const bool by_floor = rank < p.floor;
          target.masses[i] = by_floor ? kFloorCell : mass;
          target.indices[i] = indices[i];
          if (!by_floor && mass < lowest) ++below;
          if (!by_floor && counts.holds(mass)) counts.add(counts.cell(mass), 1);
        }
      }
    }
    if (lane == 0) many[warp] = open;
    if (__syncthreads_or(open.count > kMaxOpen)) {
#pragma unroll 1
      for (int i = 0; i < kTargetWarps; ++i) {
        if (many[i].count > kMaxOpen) below += rank_many(many[i], p.scores + (start_row + i) * p.pitch, counts, p);
      }
      __syncthreads();  // `many` has been read
    }
  }
  below = across_block(below, Sum());
  if (threadIdx.x == 0 && below > 0) atomicAdd(&search.below, below);
  __syncthreads();
  if (groups[threadIdx.x] > 0) atomicAdd(&search.coarse.groups[threadIdx.x], groups[threadIdx.x]);
}

// Grid (any, B); one warp a row at a time. Counts the open entries of the cut's cell by their very mass.
extern "C" __global__ void __launch_bounds__(kTargetThreads) count_exact(const __grid_constant__ TargetParams p) {
  TargetSearch& search = p.searches[blockIdx.y];
  const Place cell = find_cell(search.coarse, p.wanted - search.below);
  const u32 first = search.lowest + (cell.index << search.shift), size = 1u << search.shift;
  if (blockIdx.x == 0 && threadIdx.x == 0) search.first = first, search.wanted = cell.wanted;

  const auto add = [&](u32 mass, u32 entries) {
    if (mass - first < size) {  // never true of kFloorCell and kNoCell
      atomicAdd(&search.exact.cells[mass - first], entries);
      atomicAdd(&search.exact.groups[(mass - first) / kGroupCells], entries);
    }
  };
  const int lane = lane_id();
#pragma unroll 1
  for (int i = blockIdx.x * kTargetWarps + threadIdx.x / kWarp; i < p.sample_rows; i += gridDim.x * kTargetWarps) {
    const i64 row = static_cast<i64>(blockIdx.y) * p.sample_rows + i;
    const RowOpen& open = p.rows[row].open;
    const u32* masses = open.masses;
    u32 count = open.count;
    if (count > kMaxOpen) masses = reinterpret_cast<const u32*>(p.scores + row * p.pitch), count = p.n_k;
#pragma unroll 1
    for (u32 j = 0; j < count; j += kWarp) {
      const u32 mass = j + lane < count ? masses[j + lane] : kNoCell;
      const u32 ties = __match_any_sync(kAllLanes, mass);  // counted together, or all would wait for one counter
      if (__ffs(ties) - 1 == lane) add(mass, __popc(ties));
    }
    if (lane == 0 && open.tail > 0) add(open.whole, open.tail);
  }
}

// Grid (any, B); one warp a row at a time.
extern "C" __global__ void __launch_bounds__(kTargetThreads) keep_target(const __grid_constant__ TargetParams p) {
  const TargetSearch& search = p.searches[blockIdx.y];
  const u32 cut = search.first + find_cell(search.exact, search.wanted).index;
  const int lane = lane_id();
#pragma unroll 1
  for (int i = blockIdx.x * kTargetWarps + threadIdx.x / kWarp; i < p.sample_rows; i += gridDim.x * kTargetWarps) {
    const i64 row = static_cast<i64>(blockIdx.y) * p.sample_rows + i;
    const RowOpen& open = p.rows[row].open;
    u32* bits = p.bits + row * p.words;
    u32 kept = 0;
    if (open.tail > 0 && open.whole <= cut) {
      kept = p.n_k;
      for (int word = lane; word < p.words; word += kWarp)
        bits[word] = kAllLanes >> (word == p.words - 1 ? p.pitch - p.n_k : 0);
    } else if (open.count <= kMaxOpen) {
      kept = open.kept;
#pragma unroll 1
      for (u32 first = 0; first < open.count; first += kWarp) {
        const bool keep = first + lane < open.count && open.masses[first + lane] <= cut;
        const u32 index = open.indices[first + lane];
        if (keep) atomicOr(bits + index / 32, 1u << index % 32);
        kept += __popc(__ballot_sync(kAllLanes, keep));
      }
    } else {
      const u32* cells = reinterpret_cast<const u32*>(p.scores + row * p.pitch) + lane;
#pragma unroll 1
      for (int word = 0; word < p.words; ++word) {
        const u32 own = __ballot_sync(kAllLanes, cells[word * kWarp] <= cut);
        if (lane == 0) bits[word] = own;
        kept += __popc(own);
      }
    }
    if (lane == 0) p.counts[row] = kept;
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Order of the rows

constexpr int kOrderThreads = 1024;
constexpr int kOrderWarps = kOrderThreads / kWarp;
constexpr float kHeavy = 4.f;   // times the mean: rows that must not come last
constexpr float kLight = 0.5f;  // times the mean: rows that fill the end evenly
// Length classes, each longest first: heavy rows in steps of 4 means, then 16 in between, then light rows.
constexpr int kHeavyClasses = 16;
constexpr int kMiddleClasses = 16;
constexpr int kLightClasses = 8;
constexpr int kFirstMiddle = kHeavyClasses;
constexpr int kFirstLight = kFirstMiddle + kMiddleClasses;
constexpr int kClasses = kFirstLight + kLightClasses;

struct OrderParams {
  const int* counts;  // (heads, n_q)
  int* order;         // (heads * n_q,)
  int heads, n_q;     // heads of all samples
};

DEVICE int length_class(float means) {
  if (means > kHeavy) return kHeavyClasses - min(static_cast<int>(means / kHeavy), kHeavyClasses);
  if (means >= kLight) {
    const int step = static_cast<int>((means - kLight) * (kMiddleClasses / (kHeavy - kLight)));
    return kFirstLight - 1 - min(step, kMiddleClasses - 1);
  }
  return kClasses - 1 - min(static_cast<int>(means * (kLightClasses / kLight)), kLightClasses - 1);
}

// Calls visit(row, length class, rank, size) for the rows of a head, one a lane at a time; a warp takes neighbouring
// rows, so that those of a class keep their order. rank: among the warp's 32 rows, within the class; size: rows of the
// class there, for the one of rank 0, otherwise 0. Not a generic lambda: older NVRTC takes those for host code.
template <class ClassOf, class Visit>
DEVICE void each_chunk(int n_q, ClassOf class_of, Visit visit) {
  const int warp = threadIdx.x / kWarp, chunks = ceil_div(n_q, kOrderThreads);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int row = (warp * chunks + chunk) * kWarp + lane_id();
    const int length = row < n_q ? class_of(row) : kClasses;
    const u32 peers = __match_any_sync(kAllLanes, length);
    const int rank = __popc(peers & ((1u << lane_id()) - 1));
    visit(row, length, rank, rank == 0 ? __popc(peers) : 0);
    __syncwarp();
  }
}

// Heavy rows of all heads first, longest first: started late, one of them would keep a few multiprocessors busy alone.
// Then head by head, so that its keys and values stay in the cache, longest first within a head. Light rows of all
// heads come last, so that the multiprocessors, which reach them at different times, end together. Rows of a class
// stay in their order. One thread block places the rows of one head.
extern "C" __global__ void __launch_bounds__(kOrderThreads) order_rows(const __grid_constant__ OrderParams p) {
  __shared__ u32 places[kClasses * kOrderWarps];  // rows of a class and a warp, then where the next one goes
  __shared__ u32 class_rows[kClasses], rows_before[kClasses];  // of all heads, of the heads before this one; not middle
  const int head = blockIdx.x, thread = threadIdx.x, warp = threadIdx.x / kWarp, n_q = p.n_q;
  const int rows = p.heads * n_q;

  if (thread < kClasses) class_rows[thread] = rows_before[thread] = 0;
  u64 total = 0;
#pragma unroll 8
  for (int row = thread; row < rows; row += kOrderThreads) total += p.counts[row];
  total = across_block(total, Sum());
  const float per_mean = static_cast<float>(rows) / static_cast<float>(total);
  const auto class_of = [&](int row) { return length_class(p.counts[row] * per_mean); };
  const auto is_middle = [](int length) { return length >= kFirstMiddle && length < kFirstLight; };

  __syncthreads();
#pragma unroll 8
  for (int row = thread; row < rows; row += kOrderThreads) {
    const int length = class_of(row);
    if (!is_middle(length)) {
      atomicAdd(&class_rows[length], 1);
      if (row < head * n_q) atomicAdd(&rows_before[length], 1);
    }
  }

  const auto class_in_head = [&](int row) { return class_of(head * n_q + row); };
  for (int i = thread; i < kClasses * kOrderWarps; i += kOrderThreads) places[i] = 0;
  __syncthreads();
  each_chunk(n_q, class_in_head, [&](int row, int length, int rank, int size) {
    if (row < n_q && rank == 0) places[length * kOrderWarps + warp] += size;
  });
  __syncthreads();
  {
    constexpr int kCells = (kClasses * kOrderWarps + kOrderThreads - 1) / kOrderThreads;  // of a thread
    const int first = min(thread * kCells, kClasses * kOrderWarps);
    const int end = min(first + kCells, kClasses * kOrderWarps);
    u32 count = 0;
    for (int i = first; i < end; ++i) count += places[i];
    u32 place = sum_before(count);
    for (int i = first; i < end; ++i) {
      const u32 size = places[i];
      places[i] = place;
      place += size;
    }
  }
  __syncthreads();

  // Warp 0 has the first place of each class.
  __shared__ int offsets[kClasses];  // from a row's place in its head to its place in the order
  if (thread < kClasses) {
    int place = 0;
    if (is_middle(thread)) {
      place = head * n_q;
      for (int length = 0; length < kFirstMiddle; ++length) place += class_rows[length] - rows_before[length];
      for (int length = kFirstLight; length < kClasses; ++length) place -= rows_before[length];
    } else if (thread < kFirstMiddle) {
      place = rows_before[thread];
      for (int length = 0; length < thread; ++length) place += class_rows[length];
    } else {
      place = rows + rows_before[thread];
      for (int length = thread; length < kClasses; ++length) place -= class_rows[length];
    }
    offsets[thread] = place - static_cast<int>(places[(is_middle(thread) ? kFirstMiddle : thread) * kOrderWarps]);
  }
  __syncthreads();
  each_chunk(n_q, class_in_head, [&](int row, int length, int rank, int size) {
    if (row < n_q) p.order[offsets[length] + places[length * kOrderWarps + warp] + rank] = head * n_q + row;
    __syncwarp();
    if (row < n_q && rank == 0) places[length * kOrderWarps + warp] += size;
  });
}
