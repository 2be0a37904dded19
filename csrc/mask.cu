// The hybrid block mask (arXiv 2602.13515, Eq. 9 and Alg. 1): which key blocks each query block attends to.
//
//   block_means     q, k -> fp32 means of their blocks, read once at the speed of memory
//   pooled_scores   means -> fp32 scores (B, H, n_q, pitch), scaled and finite, with kNoScore as padding
//   select_blocks   scores -> bits and counts, for Top-k united with Top-p
// or, for a target sparsity,
//   rank_blocks     scores -> in their place the mass before each entry, 0 where Top-k keeps it anyway
//   count_digits    (three times) digit counts of those masses, from which the sample's own cut follows
//   keep_target     masses up to the cut -> bits and counts
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
  int n_q, n_k, pitch;
  float scale;
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
// Top-k united with Top-p

constexpr int kMaxSelectThreads = 512;  // up to 8192 key blocks
constexpr int kSelectBins = 256;        // of descending score
constexpr int kLaneBins = kSelectBins / kWarp;
constexpr int kSampled = 8;    // registers that the range of the bins is taken from
constexpr int kHalvings = 10;  // rounds that halve the range of scores, before those that halve the range of keys

struct SelectParams {
  const float* scores;  // (rows, pitch)
  u32* bits;            // (rows, words)
  int* counts;          // (rows,)
  int n_k, pitch, words;
  u32 floor;       // ranks below it are kept, at least 1
  u32 mass_limit;  // ranks with less mass before them are kept
};

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
  float highest, per_score, last;

  DEVICE ScoreBins(float highest, float lowest)
      : highest(highest), per_score((kSelectBins - 1) / (highest - lowest)), last(kIntegers + (kSelectBins - 1)) {}
  // kIntegers + bin. It never falls while the score falls, whatever the rounding; not-a-number is the last bin.
  DEVICE float of(float score) const {
    float below;  // volatile, or the compiler keeps what it knows of 40 scores in registers, and spills
    asm volatile("sub.f32 %0, %1, %2;" : "=f"(below) : "f"(highest), "f"(score));
    return fminf(__fmaf_rn(below, per_score, kIntegers), last);
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

// The threads of a row: one warp, whose number the compiler then knows, or all of a thread block.
template <bool kOneWarp>
struct RowThreads {
  DEVICE static int count() { return kOneWarp ? kWarp : blockDim.x; }
  template <class T, class Combine>
  DEVICE static T across(T value, Combine combine) {
    value = across_lanes(value, combine);
    return kOneWarp ? value : across_warps(value, combine);
  }
};

// A row in memory, for the rare searches that go over it again and again.
template <bool kOneWarp>
struct StoredRow {
  const float* scores;
  RowSoftmax softmax;

  template <class Visit>
  DEVICE void each(const SelectParams& p, Visit visit) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < p.n_k; i += RowThreads<kOneWarp>::count()) visit(scores[i], static_cast<u32>(i));
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
      __syncthreads();
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

// One thread block a row, the last row first: the latest scores are still in the cache. No sort: the entries are
// counted in bins of descending score, which tells in which bin the kept prefix ends; only that bin is put in order.
// Entry i * threads + thread is in register i.
template <int kValues, bool kOneWarp>
DEVICE void select_blocks(const SelectParams& p) {
  using Threads = RowThreads<kOneWarp>;
  __shared__ uint4 count_vectors[kSelectBins / 4], mass_vectors[kSelectBins / 4];
  __shared__ Candidates candidates;
  __shared__ u32 words[kValues * (kOneWarp ? kWarp : kMaxSelectThreads) / kWarp];
  u32* bin_counts = reinterpret_cast<u32*>(count_vectors);
  u32* bin_masses = reinterpret_cast<u32*>(mass_vectors);

  const int row = gridDim.x - 1 - blockIdx.x, thread = threadIdx.x, lane = lane_id();
  const int threads = Threads::count(), warps = threads / kWarp, warp = kOneWarp ? 0 : thread / kWarp;
  const int chunks = ceil_div(p.words - warp, warps);  // registers of this warp that hold scores or padding
  const float* row_scores = p.scores + static_cast<i64>(row) * p.pitch;
  for (int i = thread; i < kSelectBins / 4; i += threads)
    count_vectors[i] = mass_vectors[i] = make_uint4(0, 0, 0, 0);
  if (thread == 0) candidates.count = 0;

  float scores[kValues];
  const float* source = row_scores + thread;
  unrolled<kValues>([&](int i) { scores[i] = i < chunks ? source[i * threads] : kNoScore; });
  float highest = kNoScore;
  unrolled<kValues>([&](int i) { highest = fmaxf(highest, scores[i]); });
  float lowest = thread < p.n_k ? scores[0] : kScoreLimit;  // of a sample that holds no padding
  unrolled<kSampled>([&](int i) { lowest = i + 1 < chunks ? fminf(lowest, scores[i]) : lowest; });
  highest = Threads::across(highest, Highest());
  lowest = Threads::across(lowest, Lowest());

  RowSoftmax softmax = {highest, 0.f};
  float exponentials[kValues], sum = 0.f;
  unrolled<kValues>([&](int i) {
    exponentials[i] = softmax.exponential(scores[i]);
    sum += exponentials[i];
  });
  softmax.units = kMassUnits / Threads::across(sum, Sum());
  const ScoreBins bins(highest, lowest);
  __syncthreads();  // the bins are empty
  unrolled<kValues>([&](int i) {
    const u32 bin = __float_as_uint(bins.of(scores[i])) - kIntegerBits;
    count_in_shared(bin_counts + bin, 1);
    count_in_shared(bin_masses + bin, softmax.to_units(exponentials[i]));
  });
  __syncthreads();

  // Every warp finds the last bin that holds entries and whose first entry is kept. Each lane looks at neighbouring
  // bins.
  u32 lane_counts[kLaneBins], lane_masses[kLaneBins];
  unrolled<kLaneBins / 4>([&](int i) {
    const uint4 counts = count_vectors[lane * (kLaneBins / 4) + i], sums = mass_vectors[lane * (kLaneBins / 4) + i];
    lane_counts[i * 4] = counts.x, lane_counts[i * 4 + 1] = counts.y;
    lane_counts[i * 4 + 2] = counts.z, lane_counts[i * 4 + 3] = counts.w;
    lane_masses[i * 4] = sums.x, lane_masses[i * 4 + 1] = sums.y;
    lane_masses[i * 4 + 2] = sums.z, lane_masses[i * 4 + 3] = sums.w;
  });
  u32 count = 0, mass = 0;
  unrolled<kLaneBins>([&](int i) { count += lane_counts[i], mass += lane_masses[i]; });
  count = sum_of_lanes_before(count), mass = sum_of_lanes_before(mass);
  Search search = {0, 0, 0};
  int end_bin = 0;
  unrolled<kLaneBins>([&](int i) {
    const bool is_last = lane == kWarp - 1 && i == kLaneBins - 1;
    const u32 entries = is_last ? p.n_k - count : lane_counts[i];  // the last bin also counted the padding
    if (entries > 0 && (count < p.floor || mass < p.mass_limit))
      search = {count, mass, entries}, end_bin = lane * kLaneBins + i;
    count += lane_counts[i], mass += lane_masses[i];
  });
  const int end_lane = kWarp - 1 - __clz(__ballot_sync(kAllLanes, search.open > 0));
  search.above = __shfl_sync(kAllLanes, search.above, end_lane);
  search.mass_above = __shfl_sync(kAllLanes, search.mass_above, end_lane);
  search.open = __shfl_sync(kAllLanes, search.open, end_lane);
  const float end = kIntegers + __shfl_sync(kAllLanes, end_bin, end_lane);

  Cut cut;
  if (search.open <= kWarp) {
    unrolled<kValues>([&](int i) {
      if (bins.of(scores[i]) == end) {
        if (scores[i] != kNoScore) candidates.add(scores[i], i * threads + thread);
      }
    });
    __syncthreads();
    cut = candidates.cut(search, softmax, p);
  } else {
    const StoredRow<kOneWarp> stored = {row_scores, softmax};
    float low = kScoreLimit, high = -kScoreLimit;
    stored.each(p, [&](float score, u32) {
      if (bins.of(score) == end) low = fminf(low, score), high = fmaxf(high, score);
    });
    cut = stored.search_range(search, Threads::across(low, Lowest()), Threads::across(high, Highest()), candidates, p);
  }

  // Each register of a warp is one word of bits.
  u32 kept = 0;
  unrolled<kValues>([&](int i) {
    const u32 word = __ballot_sync(kAllLanes, scores[i] >= cut.score);
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
  __syncthreads();
  u32* bits = p.bits + static_cast<i64>(row) * p.words;
  for (int i = thread; i < p.words; i += threads) bits[i] = words[i];
  if (thread == 0) p.counts[row] = cut.kept;
}

extern "C" __global__ void __launch_bounds__(kWarp, 16) select_blocks_512(const __grid_constant__ SelectParams p) {
  select_blocks<16, true>(p);
}

extern "C" __global__ void __launch_bounds__(kWarp, 16) select_blocks_1280(const __grid_constant__ SelectParams p) {
  select_blocks<40, true>(p);
}

extern "C" __global__ void __launch_bounds__(kMaxSelectThreads, 2)
    select_blocks_8192(const __grid_constant__ SelectParams p) {
  select_blocks<16, false>(p);
}

// ---------------------------------------------------------------------------------------------------------------------
// Target sparsity
//
// Each sample keeps the entries that Top-k keeps and, of all others, the wanted number with the least mass before them.
// So the cut is an order statistic of those masses: a radix search finds it, 11, 11 and 10 bits at a time.

constexpr int kRankBins = 1024;
constexpr int kBinVectors = kRankBins / 4;
constexpr int kBinSpace = kBinVectors + kBinVectors / 4 + 1;  // vectors: a gap after every fourth, and one past the end
constexpr int kRankValues = 10;        // entries of a thread
constexpr int kRankSampled = 2;        // registers that the range of the bins is taken from
constexpr int kMaxRankThreads = 1024;  // up to 8192 key blocks
constexpr float kRankSpread = 3.f;     // bins cover the mean and so many standard deviations on either side
constexpr u32 kFloorCell = 0;     // kept by Top-k; the mass before every other entry is at least 1
constexpr u32 kNoCell = 0xffffffffu;  // padding of a row

constexpr int kDigitRounds = 3;
constexpr int kDigits = 2048;  // counters of a round

// Of one sample; zeroed by rank_blocks.
struct TargetSearch {
  u64 counts[kDigitRounds][kDigits];
  struct Cut {
    u64 wanted;  // entries to keep among those that start with `prefix`
    u64 prefix;  // the digits that are known of the cut
  } cuts[kDigitRounds];
};

struct RankParams {
  u32* cells;        // (rows, pitch) scores, replaced
  TargetSearch* searches;  // (B,)
  int n_k, pitch, samples;
  u32 floor;
};

// Where bin `bin` lies; the gaps let the threads of a warp read neighbouring sixteens of bins from different banks.
DEVICE u32 bin_place(u32 bin) { return bin + bin / 16 * 4; }

// One thread block a row. Entries are dropped into bins of descending score; the exact order is then only a matter
// within each bin, where every entry looks at the few others. Entry i * threads + thread is in register i.
extern "C" __global__ void __launch_bounds__(kMaxRankThreads) rank_blocks(const __grid_constant__ RankParams p) {
  struct Summary {
    float highest, lowest, entries, sum, squares;
  };
  const int threads = blockDim.x, thread = threadIdx.x, n_k = p.n_k;
  uint4* count_vectors = dynamic_shared;             // entries of a bin, then of all bins before it
  uint4* mass_vectors = count_vectors + kBinSpace;   // and their mass
  float2* binned = reinterpret_cast<float2*>(mass_vectors + kBinSpace);  // n_k: score and mass (as bits), bin by bin
  u32* origins = reinterpret_cast<u32*>(binned + n_k);                   // n_k: key block, and bin * 2^16
  u32* bin_counts = reinterpret_cast<u32*>(count_vectors);
  u32* bin_masses = reinterpret_cast<u32*>(mass_vectors);
  u32* cells = p.cells + static_cast<i64>(blockIdx.x) * p.pitch;

  const i64 search_words = static_cast<i64>(p.samples) * (sizeof(TargetSearch) / sizeof(u64));
  for (i64 i = static_cast<i64>(blockIdx.x) * threads + thread; i < search_words;
       i += static_cast<i64>(gridDim.x) * threads)
    reinterpret_cast<u64*>(p.searches)[i] = 0;
  for (int i = thread; i < kBinSpace; i += threads) count_vectors[i] = mass_vectors[i] = make_uint4(0, 0, 0, 0);

  const int size = (n_k - 1 - thread + threads) / threads;  // registers of this thread that hold entries
  const float first_score = __uint_as_float(cells[0]);
  float scores[kRankValues];
  unrolled<kRankValues>([&](int i) {
    scores[i] = i < size ? __uint_as_float(cells[i * threads + thread]) : kNoScore;
  });
  __syncthreads();  // cells[0] has been read, and the bins are empty

  Summary row = {kNoScore, kScoreLimit, 0.f, 0.f, 0.f};
  unrolled<kRankValues>([&](int i) {
    row.highest = fmaxf(row.highest, scores[i]);
    row.lowest = i < size ? fminf(row.lowest, scores[i]) : row.lowest;
  });
  unrolled<kRankSampled>([&](int i) {
    const float distance = i < size ? scores[i] - first_score : 0.f;
    row.entries += i < size ? 1.f : 0.f, row.sum += distance, row.squares += distance * distance;
  });
  row = {across_lanes(row.highest, Highest()), across_lanes(row.lowest, Lowest()), across_lanes(row.entries, Sum()),
         across_lanes(row.sum, Sum()), across_lanes(row.squares, Sum())};
  row = across_warps(row, [](const Summary& a, const Summary& b) {
    return Summary{fmaxf(a.highest, b.highest), fminf(a.lowest, b.lowest), a.entries + b.entries, a.sum + b.sum,
                   a.squares + b.squares};
  });

  RowSoftmax softmax = {row.highest, 0.f};
  float exponentials[kRankValues], sum = 0.f;
  unrolled<kRankValues>([&](int i) {
    exponentials[i] = softmax.exponential(scores[i]);
    sum += exponentials[i];
  });
  softmax.units = kMassUnits / across_block(sum, Sum());

  if (row.highest == row.lowest) {  // the order is that of the indices
    const u32 mass = softmax.mass(row.highest);
    for (int index = thread; index < p.pitch; index += threads)
      cells[index] = index >= n_k ? kNoCell : index < static_cast<int>(p.floor) ? kFloorCell : index * mass;
    return;
  }

  const float mean = row.sum / row.entries;
  const float spread = kRankSpread * sqrtf(fmaxf(row.squares / row.entries - mean * mean, 0.f));
  const float top = first_score + mean + spread, bins_per_score = kRankBins / (2.f * spread);
  u32 places[kRankValues];  // bin, and place in it * 2^16: first come, first served, which changes no result
  unrolled<kRankValues>([&](int i) {
    // The bin never falls while the score falls, whatever the rounding; not-a-number is bin 0.
    const float below = __fmaf_rn(__fsub_rn(top, scores[i]), bins_per_score, kIntegers);
    const u32 bin = __float_as_uint(fminf(fmaxf(below, kIntegers), kIntegers + (kRankBins - 1))) - kIntegerBits;
    if (i < size) {
      places[i] = bin | take_place(bin_counts + bin_place(bin)) << 16;
      count_in_shared(bin_masses + bin_place(bin), softmax.to_units(exponentials[i]));
    }
  });
  __syncthreads();
  {
    const int vectors = max(kBinVectors / threads, 1);  // of a thread
    const int first = min(thread * vectors, kBinVectors), end = min(first + vectors, kBinVectors);
    u32 count = 0, mass = 0;
#pragma unroll 1
    for (int i = first; i < end; ++i) {
      const uint4 counts = count_vectors[i + i / 4], masses = mass_vectors[i + i / 4];
      count += counts.x + counts.y + counts.z + counts.w, mass += masses.x + masses.y + masses.z + masses.w;
    }
    // Both sums stay below 2^32, so one carries neither into the other.
    const u64 before = sum_before(static_cast<u64>(count) << 32 | mass);
    count = static_cast<u32>(before >> 32), mass = static_cast<u32>(before);
#pragma unroll 1
    for (int i = first; i < end; ++i) {
      const uint4 counts = count_vectors[i + i / 4], masses = mass_vectors[i + i / 4];
      count_vectors[i + i / 4] = make_uint4(count, count + counts.x, count + counts.x + counts.y,
                                            count + counts.x + counts.y + counts.z);
      mass_vectors[i + i / 4] =
          make_uint4(mass, mass + masses.x, mass + masses.x + masses.y, mass + masses.x + masses.y + masses.z);
      count += counts.x + counts.y + counts.z + counts.w, mass += masses.x + masses.y + masses.z + masses.w;
    }
    if (thread == 0) bin_counts[bin_place(kRankBins)] = n_k;
  }
  __syncthreads();
  unrolled<kRankValues>([&](int i) {
    if (i < size) {
      const u32 bin = places[i] & 0xffff;
      const u32 position = bin_counts[bin_place(bin)] + (places[i] >> 16);
      binned[position] = make_float2(scores[i], __uint_as_float(softmax.to_units(exponentials[i])));
      origins[position] = bin << 16 | (i * threads + thread);
    }
  });
  __syncthreads();

  u32 results[kRankValues];
  unrolled<kRankValues>([&](int i) {
    if (i < size) {
      const int position = i * threads + thread;
      const float own = binned[position].x;
      const u32 index = origins[position] & 0xffff, bin = origins[position] >> 16;
      const u32 end = bin_counts[bin_place(bin + 1)];
      u32 rank = bin_counts[bin_place(bin)], mass = bin_masses[bin_place(bin)];
#pragma unroll 1
      for (u32 other = rank; other < end; ++other) {
        const float2 entry = binned[other];
        if (entry.x > own || (entry.x == own && (origins[other] & 0xffff) < index))
          ++rank, mass += __float_as_uint(entry.y);
      }
      results[i] = rank < p.floor ? kFloorCell : mass;
    }
  });
  __syncthreads();  // the binned scores have been read; results take their place, in the order of the key blocks
  u32* by_index = reinterpret_cast<u32*>(binned);
  unrolled<kRankValues>([&](int i) {
    if (i < size) by_index[origins[i * threads + thread] & 0xffff] = results[i];
  });
  __syncthreads();
  for (int index = thread; index < p.pitch; index += threads)
    cells[index] = index < n_k ? by_index[index] : kNoCell;
}

constexpr int kDigitThreads = 512;

struct DigitParams {
  const u32* cells;  // (B, rows of a sample, pitch)
  TargetSearch* searches;
  i64 sample_cells;
  u64 wanted;  // entries of a sample to keep beyond those that Top-k keeps, at least 1
  int round;
};

DEVICE int digit_bits(int round) { return round < kDigitRounds - 1 ? 11 : 10; }
DEVICE int digit_shift(int round) { return round == 0 ? 21 : round == 1 ? 10 : 0; }

// The cut after `rounds` rounds have been counted. Every thread of the block calls it and gets it.
DEVICE TargetSearch::Cut find_cut(const TargetSearch& search, int rounds, u64 wanted) {
  __shared__ TargetSearch::Cut found;
  if (rounds == 0) return {wanted, 0};
  const TargetSearch::Cut cut = rounds == 1 ? TargetSearch::Cut{wanted, 0} : search.cuts[rounds - 1];
  const int digits = kDigits / blockDim.x;  // of a thread
  const u64* counts = search.counts[rounds - 1] + threadIdx.x * digits;
  u64 count = 0;
#pragma unroll 1
  for (int i = 0; i < digits; ++i) count += counts[i];
  u64 before = sum_before(count);
  if (before < cut.wanted && cut.wanted <= before + count) {  // true for one thread
    int digit = 0;
    while (before + counts[digit] < cut.wanted) before += counts[digit++];
    found = {cut.wanted - before, cut.prefix << digit_bits(rounds - 1) | (threadIdx.x * digits + digit)};
  }
  __syncthreads();
  return found;
}

// Grid (any, B).
extern "C" __global__ void __launch_bounds__(kDigitThreads) count_digits(const __grid_constant__ DigitParams p) {
  __shared__ u32 counts[kDigits];
  TargetSearch& search = p.searches[blockIdx.y];
  const TargetSearch::Cut cut = find_cut(search, p.round, p.wanted);
  if (blockIdx.x == 0 && threadIdx.x == 0) search.cuts[p.round] = cut;  // for the next round
  for (int i = threadIdx.x; i < kDigits; i += kDigitThreads) counts[i] = 0;
  __syncthreads();

  const int shift = digit_shift(p.round), bits = digit_bits(p.round);
  const uint4* cells = reinterpret_cast<const uint4*>(p.cells + blockIdx.y * p.sample_cells);
  const i64 step = static_cast<i64>(gridDim.x) * kDigitThreads;
#pragma unroll 4
  for (i64 i = static_cast<i64>(blockIdx.x) * kDigitThreads + threadIdx.x; i < p.sample_cells / 4; i += step) {
    const uint4 vector = cells[i];
    const u32 four[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const u64 cell = four[j];
      if (cell != kFloorCell && cell != kNoCell && cell >> (shift + bits) == cut.prefix)
        atomicAdd(&counts[cell >> shift & ((1 << bits) - 1)], 1);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kDigits; i += kDigitThreads)
    if (counts[i] != 0) atomicAdd(&search.counts[p.round][i], static_cast<u64>(counts[i]));
}

constexpr int kKeepThreads = 256;

struct KeepParams {
  const u32* cells;  // (B, rows of a sample, pitch)
  const TargetSearch* searches;
  u32* bits;    // (B * rows of a sample, words)
  int* counts;  // (B * rows of a sample,)
  u64 wanted;
  int sample_rows, pitch, words;
};

// Grid (any, B); one warp a row at a time.
extern "C" __global__ void __launch_bounds__(kKeepThreads) keep_target(const __grid_constant__ KeepParams p) {
  const u32 cut = static_cast<u32>(find_cut(p.searches[blockIdx.y], kDigitRounds, p.wanted).prefix);
  const int lane = lane_id(), warps = kKeepThreads / kWarp;
  for (int i = blockIdx.x * warps + threadIdx.x / kWarp; i < p.sample_rows; i += gridDim.x * warps) {
    const i64 row = static_cast<i64>(blockIdx.y) * p.sample_rows + i;
    const u32* cells = p.cells + row * p.pitch + lane;
    int kept = 0;
    for (int first = 0; first < p.words; first += kWarp) {
      const int words = min(kWarp, p.words - first);
      u32 own = 0;
#pragma unroll 8
      for (int word = 0; word < words; ++word) {
        const u32 bits = __ballot_sync(kAllLanes, cells[(first + word) * kWarp] <= cut);
        if (lane == word) own = bits;
        kept += __popc(bits);
      }
      if (lane < words) p.bits[row * p.words + first + lane] = own;
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
