// The hybrid block mask (arXiv 2602.13515, Eq. 9 and Alg. 1): which key blocks each query block attends to.
//
//   block_means     q, k -> fp32 means of their blocks, read once at the speed of memory
//   pooled_scores   means -> fp32 scores (B, H, n_q, pitch), scaled; the only array that grows with n_q * n_k
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

extern __shared__ uint4 dynamic_shared[];

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

// Sum of the values of all threads before this one.
template <class T>
DEVICE T sum_before(T value) {
  __shared__ T totals[kWarp];
  const int lane = lane_id(), warp = threadIdx.x / kWarp;
  T sum = value;
#pragma unroll
  for (int lanes = 1; lanes < kWarp; lanes *= 2) {
    const T other = __shfl_up_sync(kAllLanes, sum, lanes);
    if (lane >= lanes) sum += other;
  }
  __syncthreads();  // earlier totals have been read
  if (lane == kWarp - 1) totals[warp] = sum;
  __syncthreads();
  T before = sum - value;
#pragma unroll 1
  for (int other = 0; other < warp; ++other) before += totals[other];
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

struct MeansParams {
  TensorView q, k;
  float *q_means, *k_means;  // (B, H, n_q, D), (B, H, n_k, D)
  int q_len, k_len, heads;
};

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

  if (threadIdx.x >= kHeadDim) return;
  float totals[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int warp = 0; warp < kPoolThreads / kWarp; ++warp) totals[half] += warp_sums[half][warp][threadIdx.x];
  }
  const i64 batch_head = static_cast<i64>(batch) * p.heads + head;
  if (is_query) {
    p.q_means[(batch_head * q_chunks + chunk) * kHeadDim + threadIdx.x] = (totals[0] + totals[1]) / tokens;
  } else {
    const int blocks = ceil_div(p.k_len, kBlockK);
    float* means = p.k_means + (batch_head * blocks + 2 * chunk) * kHeadDim + threadIdx.x;
    means[0] = totals[0] / min(tokens, kBlockK);
    if (tokens > kBlockK) means[kHeadDim] = totals[1] / (tokens - kBlockK);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Scores
//
// Matrix instructions with fp32 accuracy: each factor is split into two TF32 numbers of 11 significant bits each, and
// three of their four products are taken. What is lost is below 2^-21 of each product, far less than the bound on the
// rounding of an fp32 sum of head_dim products, head_dim * 2^-24.

constexpr int kTileQ = 128;
constexpr int kTileK = 64;
constexpr int kTileRows = kTileQ + kTileK;  // of means in shared memory: queries, then keys
constexpr int kScoreThreads = 256;          // 4 x 2 warps of 32 x 32 scores
constexpr int kSlab = 32;                   // channels that arrive together; a row of a slab is 128 bytes
constexpr int kSlabs = kHeadDim / kSlab;
constexpr int kSlabVectors = kSlab / 4;     // 16-byte vectors

struct ScoresParams {
  const float *q_means, *k_means;
  float* scores;  // (B * H, n_q, pitch)
  int n_q, n_k, pitch;
  float scale;
};

// Where vector `v` of a slab's row lies. Odd rows swap their halves, so that 8 lanes reading 4 vectors of 2 rows touch
// all banks once.
DEVICE int slab_vector(int row, int v) { return row * kSlabVectors + (v ^ (row & 1) * (kSlabVectors / 2)); }

DEVICE void copy_async(uint4* target, const float* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target)), "l"(source) : "memory");
}

template <int kPending>
DEVICE void wait_async() { asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory"); }

// x = high + low, exactly: `high` is x rounded to the 11 bits of a TF32 number, and the instruction reads all of `low`
// but its last bit at most. (Multiplying by 2^13 + 1 rounds away the last 13 bits; the rest is exact.)
struct Split {
  u32 high, low;
};

DEVICE Split split_tf32(float x) {
  const float scaled = __fmul_rn(x, 8193.f);
  return {__float_as_uint(__fmaf_rn(x, -8192.f, scaled)), __float_as_uint(__fmaf_rn(x, 8193.f, -scaled))};
}

// c (16 x 8) += a (16 x 8) * b (8 x 8)
DEVICE void multiply_tf32(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Grid (tiles of keys, tiles of queries, B * H).
extern "C" __global__ void __launch_bounds__(kScoreThreads, 2) pooled_scores(const __grid_constant__ ScoresParams p) {
  const int first_q = blockIdx.y * kTileQ, first_k = blockIdx.x * kTileK;
  const float* q_means = p.q_means + static_cast<i64>(blockIdx.z) * p.n_q * kHeadDim;
  const float* k_means = p.k_means + static_cast<i64>(blockIdx.z) * p.n_k * kHeadDim;

  // All of the tile's means, one commit group a slab. Rows past the end repeat the last one; their scores are not
  // stored.
  constexpr int kStep = kScoreThreads / kSlabVectors;  // rows copied side by side
  constexpr int kCopies = kTileRows / kStep;
  static_assert(kTileQ % kStep == 0 && kTileK % kStep == 0, "each copy is of queries or of keys");
  const int copy_row = threadIdx.x / kSlabVectors, copy_vector = threadIdx.x % kSlabVectors;
  const float* sources[kCopies];
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const int row = i * kStep + copy_row;
    const float* source = row < kTileQ ? q_means + static_cast<i64>(min(first_q + row, p.n_q - 1)) * kHeadDim
                                       : k_means + static_cast<i64>(min(first_k + row - kTileQ, p.n_k - 1)) * kHeadDim;
    sources[i] = source + copy_vector * 4;
  }
#pragma unroll
  for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
      copy_async(dynamic_shared + slab * kTileRows * kSlabVectors + slab_vector(i * kStep + copy_row, copy_vector),
                 sources[i] + slab * kSlab);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  const int warp = threadIdx.x / kWarp;
  const int group = lane_id() / 4, member = lane_id() % 4;  // row and column of a matrix instruction's fragments
  const int warp_q = warp % 4 * 32, warp_k = warp / 4 * 32;

  float c[2][4][4] = {};
#pragma unroll
  for (int slab = 0; slab < kSlabs; ++slab) {
    // Slab `slab` is complete once at most the later ones are on their way.
    if (slab == 0) wait_async<kSlabs - 1>();
    else if (slab == 1) wait_async<kSlabs - 2>();
    else if (slab == 2) wait_async<1>();
    else wait_async<0>();
    __syncthreads();
    const float4* rows = reinterpret_cast<const float4*>(dynamic_shared) + slab * kTileRows * kSlabVectors;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      // A lane's vector holds 4 of 16 channels. Which channel stands for which k of the instruction does not matter
      // as long as both factors agree: x and y serve the first instruction, z and w the second.
      const int v = part * 4 + member;
      Split a[2][8], b[4][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 upper = rows[slab_vector(warp_q + i * 16 + group, v)];
        const float4 lower = rows[slab_vector(warp_q + i * 16 + 8 + group, v)];
        a[i][0] = split_tf32(upper.x), a[i][1] = split_tf32(lower.x);
        a[i][2] = split_tf32(upper.y), a[i][3] = split_tf32(lower.y);
        a[i][4] = split_tf32(upper.z), a[i][5] = split_tf32(lower.z);
        a[i][6] = split_tf32(upper.w), a[i][7] = split_tf32(lower.w);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float4 key = rows[slab_vector(kTileQ + warp_k + j * 8 + group, v)];
        b[j][0] = split_tf32(key.x), b[j][1] = split_tf32(key.y);
        b[j][2] = split_tf32(key.z), b[j][3] = split_tf32(key.w);
      }
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        // The small products first; neighbouring instructions add to different sums, so none waits for another.
#pragma unroll
        for (int product = 0; product < 3; ++product) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const Split* x = a[i] + step * 4;
              const Split* y = b[j] + step * 2;
              if (product == 0)
                multiply_tf32(c[i][j], x[0].low, x[1].low, x[2].low, x[3].low, y[0].high, y[1].high);
              else if (product == 1)
                multiply_tf32(c[i][j], x[0].high, x[1].high, x[2].high, x[3].high, y[0].low, y[1].low);
              else
                multiply_tf32(c[i][j], x[0].high, x[1].high, x[2].high, x[3].high, y[0].high, y[1].high);
            }
          }
        }
      }
    }
  }

#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = first_q + warp_q + i * 8 + group;
    if (row >= p.n_q) continue;
    float* target = p.scores + (static_cast<i64>(blockIdx.z) * p.n_q + row) * p.pitch;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = first_k + warp_k + j * 8 + member * 2;
      const float* values = c[i / 2][j] + i % 2 * 2;
      if (column < p.n_k)  // the pitch is even, so the second one has room
        *reinterpret_cast<float2*>(target + column) = make_float2(values[0] * p.scale, values[1] * p.scale);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Top-k united with Top-p

constexpr int kSelectValues = 40;  // scores that a thread holds in registers: one warp serves 1280 key blocks
constexpr int kSelectGroup = 8;
constexpr int kMaxSelectThreads = 256;  // up to 8192 key blocks
constexpr u32 kAllMass = 0xffffffffu;
constexpr int kHalvings = 10;  // rounds that halve the range of scores, before those that halve the range of keys

struct SelectParams {
  const float* scores;  // (rows, pitch)
  u32* bits;            // (rows, words)
  int* counts;          // (rows,)
  int n_k, pitch, words;
  u32 floor;       // ranks below it are kept, at least 1
  u32 mass_limit;  // ranks with less mass before them are kept; kAllMass: every rank
};

template <int kCount, class Visit>
DEVICE void unrolled(Visit visit) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) visit(i);
}

// Register i of a thread holds entry i * blockDim.x + threadIdx.x: how many of them are entries up to `index`.
DEVICE int registers_up_to(int index) {
  const int threads = blockDim.x;
  return (index + threads - static_cast<int>(threadIdx.x)) / threads;
}

// Entries and their mass, summed over a row. Neither sum reaches 2^32.
DEVICE u64 row_total(u32 count, u32 mass) {
  const u64 warp_total = static_cast<u64>(__reduce_add_sync(kAllLanes, count)) << 32 | __reduce_add_sync(kAllLanes, mass);
  return across_warps(warp_total, Sum());
}

// Adds to both sums if a score is above the pivot: three instructions.
DEVICE void add_if_above(float score, float pivot, u32 entry_mass, u32& count, u32& mass) {
  asm("{\n"
      ".reg .pred above;\n"
      "setp.gt.f32 above, %2, %3;\n"
      "@above add.u32 %0, %0, 1;\n"
      "@above add.u32 %1, %1, %4;\n"
      "}\n"
      : "+r"(count), "+r"(mass)
      : "f"(score), "f"(pivot), "r"(entry_mass));
}

// One thread block a row, the last row first: the latest scores are still in the cache. No sort: a search for the last
// entry of the prefix that is kept narrows a range of scores until few entries are left in it, and orders those.
template <int kValues>
DEVICE void select_blocks(const SelectParams& p) {
  __shared__ float candidate_scores[kWarp];
  __shared__ u32 candidate_masses[kWarp], candidate_indices[kWarp];

  const int row = gridDim.x - 1 - blockIdx.x;
  const int threads = blockDim.x, n_k = p.n_k;
  const int size = registers_up_to(n_k - 1);  // registers of this thread that hold scores

  float scores[kValues];
  u32 masses[kValues];
  const float* source = p.scores + static_cast<i64>(row) * p.pitch + threadIdx.x;
  unrolled<kValues>([&](int i) {
    scores[i] = i < size ? *source : 0.f;
    source += threads;
  });
  float highest = kNoScore, lowest = kScoreLimit;
  unrolled<kValues>([&](int i) {
    scores[i] = i < size ? finite_score(scores[i]) : kNoScore;
    highest = fmaxf(highest, scores[i]);
    lowest = fminf(lowest, i < size ? scores[i] : kScoreLimit);
  });
  highest = across_block(highest, Highest());
  lowest = across_block(lowest, Lowest());

  RowSoftmax softmax = {highest, 0.f};
  float exponentials = 0.f;
  unrolled<kValues>([&](int i) {
    const float exponential = softmax.exponential(scores[i]);
    masses[i] = __float_as_uint(exponential);
    exponentials += exponential;
  });
  softmax.units = kMassUnits / across_block(exponentials, Sum());
  unrolled<kValues>([&](int i) { masses[i] = softmax.to_units(__uint_as_float(masses[i])); });

  // Entries above `high` are kept: there are `above`, of mass `mass_above`. Entries up to `low` are dropped; `reach`
  // entries are above it. Between them lies the last kept entry.
  u32 low = ordered_key(lowest) - 1, high = ordered_key(highest);
  u32 above = 0, mass_above = 0, reach = n_k;
  const bool keeps_all = p.floor >= static_cast<u32>(n_k) || p.mass_limit == kAllMass;
#pragma unroll 1
  for (int round = 0; !keeps_all && reach - above > kWarp && high - low > 1; ++round) {
    u32 pivot = round < kHalvings ? ordered_key(0.5f * (key_score(low) + key_score(high))) : low + (high - low) / 2;
    pivot = min(max(pivot, low + 1), high - 1);
    const float pivot_score = key_score(pivot);
    u32 count = 0, mass = 0;
    unrolled<kValues>([&](int i) { add_if_above(scores[i], pivot_score, masses[i], count, mass); });
    const u64 total = row_total(count, mass);
    count = static_cast<u32>(total >> 32), mass = static_cast<u32>(total);
    if (count < p.floor || mass < p.mass_limit) {  // then the first entry that is not above the pivot is kept
      high = pivot, above = count, mass_above = mass;
    } else {
      low = pivot, reach = count;
    }
  }

  // The last kept entry: its score, its index and how many are kept with it.
  float cut_score;
  u32 cut_index, kept;
  const float low_score = key_score(low), high_score = key_score(high);
  const u32 undecided = reach - above;
  if (keeps_all) {
    cut_score = lowest, cut_index = n_k - 1, kept = n_k;
  } else if (undecided <= kWarp) {
    u32 own_candidates = 0;
    unrolled<kValues>([&](int i) { own_candidates += (scores[i] > low_score) & (scores[i] <= high_score); });
    u32 place = sum_before(own_candidates);
    unrolled<kValues>([&](int i) {
      if ((scores[i] > low_score) & (scores[i] <= high_score)) {
        candidate_scores[place] = scores[i];
        candidate_masses[place] = masses[i];
        candidate_indices[place] = i * threads + threadIdx.x;
        ++place;
      }
    });
    __syncthreads();
    const u32 lane = lane_id();
    const float own_score = candidate_scores[min(lane, undecided - 1)];
    const u32 own_index = candidate_indices[min(lane, undecided - 1)];
    u32 rank = 0, mass_before = 0;
#pragma unroll 1
    for (u32 other = 0; other < undecided; ++other) {
      const float score = candidate_scores[other];
      if (score > own_score || (score == own_score && candidate_indices[other] < own_index))
        ++rank, mass_before += candidate_masses[other];
    }
    const bool keep = lane < undecided && (above + rank < p.floor || mass_above + mass_before < p.mass_limit);
    const u32 keeps = __popc(__ballot_sync(kAllLanes, keep));
    const int last = __ffs(__ballot_sync(kAllLanes, keep && rank + 1 == keeps)) - 1;
    cut_score = __shfl_sync(kAllLanes, own_score, last);
    cut_index = __shfl_sync(kAllLanes, own_index, last);
    kept = above + keeps;
  } else {  // they all tie at `high`, so each has the same mass and the lowest indices are kept
    u32 tie_mass = 0;
    unrolled<kValues>([&](int i) { tie_mass = max(tie_mass, scores[i] == high_score ? masses[i] : 0); });
    tie_mass = across_block(tie_mass, Highest());
    const u32 by_count = p.floor > above ? p.floor - above : 0;
    const u32 mass_wanted = p.mass_limit > mass_above ? p.mass_limit - mass_above : 0;
    const u32 by_mass = tie_mass == 0 ? (mass_wanted ? undecided : 0) : (mass_wanted + tie_mass - 1) / tie_mass;
    const u32 ties = min(undecided, max(by_count, by_mass));
    u32 first = 0, end = n_k - 1;  // the lowest index up to which there are enough ties
    while (first < end) {
      const u32 middle = (first + end) / 2;
      const int up_to = registers_up_to(middle);
      u32 count = 0;
      unrolled<kValues>([&](int i) { count += (scores[i] == high_score) & (i < up_to); });
      if (static_cast<u32>(row_total(count, 0) >> 32) >= ties) end = middle;
      else first = middle + 1;
    }
    cut_score = high_score, cut_index = end, kept = above + ties;
  }

  // Register i of a warp is one word of bits; lane i keeps it (the first lanes also keep words 32 to 39).
  u32 words[2] = {};
  const int up_to = registers_up_to(cut_index);
  unrolled<kValues>([&](int i) {
    const bool keep = (scores[i] > cut_score) | ((scores[i] == cut_score) & (i < up_to));
    const u32 word = __ballot_sync(kAllLanes, keep);
    words[i / kWarp] = lane_id() == i % kWarp ? word : words[i / kWarp];
  });
  u32* bits = p.bits + static_cast<i64>(row) * p.words;
  const int warps = threads / kWarp;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int word = (lane_id() + i * kWarp) * warps + threadIdx.x / kWarp;
    if (word < p.words) bits[word] = words[i];
  }
  if (threadIdx.x == 0) p.counts[row] = kept;
}

extern "C" __global__ void __launch_bounds__(kMaxSelectThreads, 2)
    select_blocks_512(const __grid_constant__ SelectParams p) {
  select_blocks<16>(p);
}

extern "C" __global__ void __launch_bounds__(kMaxSelectThreads, 2)
    select_blocks_1280(const __grid_constant__ SelectParams p) {
  select_blocks<40>(p);
}

// ---------------------------------------------------------------------------------------------------------------------
// Target sparsity
//
// Each sample keeps the entries that Top-k keeps and, of all others, the wanted number with the least mass before them.
// So the cut is an order statistic of those masses: a radix search finds it, 11, 11 and 10 bits at a time.

constexpr int kRankBins = 1024;
constexpr int kRankValues = 16;  // entries of a thread
constexpr int kMaxRankThreads = 512;  // up to 8192 key blocks
constexpr float kRankSpread = 3.f;  // bins cover the mean and so many standard deviations on either side
constexpr u32 kFloorCell = 0;     // kept by Top-k; the mass before every other entry is at least 1
constexpr u32 kNoCell = 0xffffffffu;  // padding of a row

constexpr int kDigitRounds = 3;
constexpr int kDigits = 2048;  // counters of a round

// Of one sample; zeroed by rank_blocks.
struct Search {
  u64 counts[kDigitRounds][kDigits];
  struct Cut {
    u64 wanted;  // entries to keep among those that start with `prefix`
    u64 prefix;  // the digits that are known of the cut
  } cuts[kDigitRounds];
};

struct RankParams {
  u32* cells;        // (rows, pitch) scores, replaced
  Search* searches;  // (B,)
  int n_k, pitch, samples;
  u32 floor;
};

// One thread block a row. Entries are dropped into bins of descending score; the exact order is then only a matter
// within each bin, where every entry looks at the few others.
extern "C" __global__ void __launch_bounds__(kMaxRankThreads) rank_blocks(const __grid_constant__ RankParams p) {
  const int threads = blockDim.x, thread = threadIdx.x, n_k = p.n_k;
  u32* starts = reinterpret_cast<u32*>(dynamic_shared);            // kRankBins + 1: where each bin starts
  float* binned = reinterpret_cast<float*>(starts + kRankBins + 4);  // n_k scores, bin by bin
  u32* mass_before = reinterpret_cast<u32*>(binned + n_k);         // n_k + 1: mass of the positions before
  u16* indices = reinterpret_cast<u16*>(mass_before + n_k + 1);    // n_k: key blocks of the positions
  u32* cells = p.cells + static_cast<i64>(blockIdx.x) * p.pitch;

  const i64 search_words = static_cast<i64>(p.samples) * (sizeof(Search) / sizeof(u64));
  for (i64 i = static_cast<i64>(blockIdx.x) * threads + thread; i < search_words;
       i += static_cast<i64>(gridDim.x) * threads)
    reinterpret_cast<u64*>(p.searches)[i] = 0;
  for (int i = thread; i <= kRankBins; i += threads) starts[i] = 0;

  float values[kRankValues];
  float highest = -kScoreLimit, lowest = kScoreLimit, sum = 0.f;
#pragma unroll
  for (int i = 0; i < kRankValues; ++i) {
    const int index = i * threads + thread;
    if (index >= n_k) continue;
    values[i] = finite_score(__uint_as_float(cells[index]));
  }
#pragma unroll
  for (int i = 0; i < kRankValues; ++i) {
    if (i * threads + thread >= n_k) continue;
    highest = fmaxf(highest, values[i]), lowest = fminf(lowest, values[i]), sum += values[i];
  }
  highest = across_block(highest, Highest());
  lowest = across_block(lowest, Lowest());
  const float mean = across_block(sum, Sum()) / n_k;
  RowSoftmax softmax = {highest, 0.f};
  float exponentials = 0.f, squares = 0.f;
#pragma unroll
  for (int i = 0; i < kRankValues; ++i) {
    if (i * threads + thread >= n_k) continue;
    exponentials += softmax.exponential(values[i]);
    squares += (values[i] - mean) * (values[i] - mean);
  }
  softmax.units = kMassUnits / across_block(exponentials, Sum());
  const float spread = kRankSpread * sqrtf(across_block(squares, Sum()) / n_k);

  if (highest == lowest) {  // the order is that of the indices
    const u32 mass = softmax.mass(highest);
    for (int index = thread; index < p.pitch; index += threads)
      cells[index] = index >= n_k ? kNoCell : index < static_cast<int>(p.floor) ? kFloorCell : index * mass;
    return;
  }

  // Never rises with the score, whatever the rounding; not-a-number, from an infinite spread, is bin 0.
  const float top = mean + spread, bins_per_score = kRankBins / (2.f * spread);
  const auto bin_of = [&](float score) {
    return min(__float2uint_rz(__fmul_rn(__fsub_rn(top, score), bins_per_score)), kRankBins - 1u);
  };

  u32 places[kRankValues];  // bin, and place in the bin above it; first come, first served, which changes no result
#pragma unroll
  for (int i = 0; i < kRankValues; ++i) {
    if (i * threads + thread >= n_k) continue;
    const u32 bin = bin_of(values[i]);
    places[i] = bin | atomicAdd(&starts[bin], 1) * kRankBins;
  }
  __syncthreads();
  {
    const int bins = kRankBins / threads;  // of a thread
    u32 count = 0;
#pragma unroll 1
    for (int i = 0; i < bins; ++i) count += starts[thread * bins + i];
    u32 start = sum_before(count);
#pragma unroll 1
    for (int i = 0; i < bins; ++i) {
      const u32 size = starts[thread * bins + i];
      starts[thread * bins + i] = start;
      start += size;
    }
    if (thread == 0) starts[kRankBins] = n_k;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kRankValues; ++i) {
    const int index = i * threads + thread;
    if (index >= n_k) continue;
    const u32 position = starts[places[i] % kRankBins] + places[i] / kRankBins;
    binned[position] = values[i];
    indices[position] = static_cast<u16>(index);
  }
  __syncthreads();
  {
    const int positions = ceil_div(n_k, threads);  // of a thread
    const int first = min(thread * positions, n_k), end = min(first + positions, n_k);
    u32 mass = 0;
#pragma unroll 1
    for (int position = first; position < end; ++position) {
      const u32 own = softmax.mass(binned[position]);
      mass_before[position] = own;
      mass += own;
    }
    u32 before = sum_before(mass);
#pragma unroll 1
    for (int position = first; position < end; ++position) {
      const u32 own = mass_before[position];
      mass_before[position] = before;
      before += own;
    }
    if (first < end && end == n_k) mass_before[n_k] = before;
  }
  __syncthreads();

  u32 results[kRankValues];
#pragma unroll
  for (int i = 0; i < kRankValues; ++i) {
    const int position = i * threads + thread;
    if (position >= n_k) continue;
    const float own = binned[position];
    const u32 index = indices[position], bin = bin_of(own);
    const u32 first = starts[bin], end = starts[bin + 1];
    u32 rank = first, mass = mass_before[first];
#pragma unroll 1
    for (u32 other = first; other < end; ++other) {
      const float score = binned[other];
      if (score > own || (score == own && indices[other] < index))
        ++rank, mass += mass_before[other + 1] - mass_before[other];
    }
    results[i] = rank < p.floor ? kFloorCell : mass;
  }
  __syncthreads();  // the binned scores have been read; results take their place, in the order of the key blocks
  u32* by_index = reinterpret_cast<u32*>(binned);
#pragma unroll
  for (int i = 0; i < kRankValues; ++i) {
    const int position = i * threads + thread;
    if (position < n_k) by_index[indices[position]] = results[i];
  }
  __syncthreads();
  for (int index = thread; index < p.pitch; index += threads)
    cells[index] = index < n_k ? by_index[index] : kNoCell;
}

constexpr int kDigitThreads = 512;

struct DigitParams {
  const u32* cells;  // (B, rows of a sample, pitch)
  Search* searches;
  i64 sample_cells;
  u64 wanted;  // entries of a sample to keep beyond those that Top-k keeps, at least 1
  int round;
};

DEVICE int digit_bits(int round) { return round < kDigitRounds - 1 ? 11 : 10; }
DEVICE int digit_shift(int round) { return round == 0 ? 21 : round == 1 ? 10 : 0; }

// The cut after `rounds` rounds have been counted. Every thread of the block calls it and gets it.
DEVICE Search::Cut find_cut(const Search& search, int rounds, u64 wanted) {
  __shared__ Search::Cut found;
  if (rounds == 0) return {wanted, 0};
  const Search::Cut cut = rounds == 1 ? Search::Cut{wanted, 0} : search.cuts[rounds - 1];
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
  Search& search = p.searches[blockIdx.y];
  const Search::Cut cut = find_cut(search, p.round, p.wanted);
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
  const Search* searches;
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

constexpr int kOrderThreads = 256;
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

// Heavy rows of all heads first, longest first: started late, one of them would keep a few multiprocessors busy alone.
// Then head by head, so that its keys and values stay in the cache, longest first within a head. Light rows of all heads
// come last, so that the multiprocessors, which reach them at different times, end together. Rows of a class stay in
// their order. One thread block places the rows of one head.
extern "C" __global__ void __launch_bounds__(kOrderThreads) order_rows(const __grid_constant__ OrderParams p) {
  __shared__ u16 places[kClasses][kOrderThreads];  // rows of a class and a thread, then where the next one goes
  __shared__ u32 class_rows[kClasses], rows_before[kClasses];  // of all heads, of the heads before this one; not middle
  const int head = blockIdx.x, thread = threadIdx.x, n_q = p.n_q;
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

  const int own_rows = ceil_div(n_q, kOrderThreads);
  const int first = min(thread * own_rows, n_q), end = min(first + own_rows, n_q);
  for (int length = 0; length < kClasses; ++length) places[length][thread] = 0;
  for (int row = first; row < end; ++row) ++places[class_of(head * n_q + row)][thread];
  __syncthreads();
  {
    u16* line = &places[0][0] + thread * kClasses;  // of the table read as one line
    u32 count = 0;
    for (int i = 0; i < kClasses; ++i) count += line[i];
    u32 place = sum_before(count);
    for (int i = 0; i < kClasses; ++i) {
      const u32 size = line[i];
      line[i] = static_cast<u16>(place);
      place += size;
    }
  }
  __syncthreads();

  // Thread 0 has the first place of each class.
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
    offsets[thread] = place - places[is_middle(thread) ? kFirstMiddle : thread][0];
  }
  __syncthreads();
  for (int row = first; row < end; ++row) {
    const int length = class_of(head * n_q + row);
    p.order[offsets[length] + places[length][thread]++] = head * n_q + row;
  }
}
