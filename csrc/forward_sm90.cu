// Block-sparse attention, forward, for compute capability 9.0 (wgmma + TMA).
//
//   O = softmax(scale * Q K^T restricted to the kept key blocks) V          LSE = log2 of the softmax's denominator
//
// One persistent block of threads per multiprocessor takes mask rows (128 queries of one head) by ticket, in the order that
// the mask kernels prepared. A row's kept 64-key blocks are paired into tiles of 128 keys, because a wgmma of N = 64 would
// wait for shared memory.
//
//   producer (1 warp)         decodes the row's bitmask, loads Q once a row and K, V once a tile
//   consumers (2 warpgroups)  64 queries each; the tiles of all rows form one continuous sequence:
//
//        issue S(t+1) = Q K(t+1)^T          the next tile may already belong to the next row,
//        issue O += P(t) V(t)               so a row's end costs no refill of the pipeline
//        P(t+1) = softmax of S(t+1)         runs while P(t) V(t) does
//
//   The two warpgroups issue in turns (named barriers), so that one's softmax runs under the other's matrix products.
//
// Shared memory                                            full when / empty when
//   Q       kQueryStages x 128 tokens   one row each       TMA done  /  O, staged in its place, has been read by TMA
//   K       kKeyStages x 128 tokens     one tile each      TMA done  /  all 8 consumer warps finished S
//   V       kValueStages x 128 tokens   one tile each      TMA done  /  all 8 consumer warps finished O
//   rows    kQueryStages x RowInfo      written by the producer before it arrives at "Q full"
//
// Softmax without a running maximum: any reference M gives the same softmax as long as nothing overflows, so M is the maximum
// of the row's first tile and later tiles are exponentiated at once. Only a tile whose sum passes kSumLimit goes the careful
// way: it raises M and rescales what came before. S, sums and O are fp32; P is rounded to the element type.

#define kInfinity __int_as_float(0x7f800000)

constexpr int kConsumerGroups = 2;
constexpr int kConsumerWarps = 4 * kConsumerGroups;
constexpr int kThreads = 128 * (1 + kConsumerGroups);
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;

constexpr int kGroupRows = kBlockQ / kConsumerGroups;  // 64: one wgmma's M
constexpr int kTileKeys = 2 * kBlockK;                 // 128
constexpr int kSlabs = kHeadDim / kSlabChannels;

constexpr int kQueryStages = 2;
constexpr int kKeyStages = 3;
constexpr int kValueStages = 2;

constexpr u32 kQuerySlabBytes = kGroupRows * kSlabRowBytes;
constexpr u32 kQueryGroupBytes = kQuerySlabBytes * kSlabs;
constexpr u32 kQueryBytes = kQueryGroupBytes * kConsumerGroups;
constexpr u32 kBlockSlabBytes = kBlockK * kSlabRowBytes;
constexpr u32 kTileSlabBytes = 2 * kBlockSlabBytes;
constexpr u32 kTileBytes = kTileSlabBytes * kSlabs;

// A thread's sum over one tile (32 columns) that makes its warp raise the reference: far from overflow, in P's own type too.
#ifdef ELEMENT_FP16
constexpr float kSumLimit = 16384.f;
#else
constexpr float kSumLimit = 1.0e12f;
#endif
// Above this |scale * M| (in powers of two), rounding scale * M would show in the result, so M is subtracted first.
constexpr float kFusedLimit = 1048576.f;

struct Params {
  TensorMap q, k, v;  // boxes of 64 tokens
  TensorMap out;      // boxes of 16 tokens, what one warp stores
  float* lse;         // (batch, head, query)
  const u32* bits;    // (row, mask word)
  const int* counts;  // (row)
  const int* order;   // (row): the row that each ticket stands for
  int* ticket;        // zero at launch, and again afterwards
  int rows, heads, query_blocks;
  int query_length, key_length;
  int words;          // mask words of a row
  float scale_log2;   // scale * log2(e): scores in units of powers of two
};

struct RowInfo {
  int row;        // -1: no more rows
  int tiles;
  int last_keys;  // real keys in the row's last tile; 0: the row keeps no block, and its one tile is zeros

  DEVICE bool hides_keys(int tile) const { return tile + 1 == tiles && last_keys > 0 && last_keys < kTileKeys; }
};

struct Shared {
  u32 q, k, v;
  u32 q_full, q_empty, k_full, k_empty, v_full, v_empty;
  volatile RowInfo* rows;

  DEVICE u32 query(int stage) const { return q + stage * kQueryBytes; }
  DEVICE u32 key(int stage) const { return k + stage * kTileBytes; }
  DEVICE u32 value(int stage) const { return v + stage * kTileBytes; }
};

constexpr u32 kBarrierOffset = kQueryStages * kQueryBytes + (kKeyStages + kValueStages) * kTileBytes;
constexpr u32 kBarrierBytes = 16 * (kQueryStages + kKeyStages + kValueStages);

DEVICE Shared shared_layout(u8* memory) {
  const u32 base = shared_address(memory);
  Shared s;
  s.q = base;
  s.k = s.q + kQueryStages * kQueryBytes;
  s.v = s.k + kKeyStages * kTileBytes;
  s.q_full = base + kBarrierOffset;
  s.q_empty = s.q_full + 8 * kQueryStages;
  s.k_full = s.q_empty + 8 * kQueryStages;
  s.k_empty = s.k_full + 8 * kKeyStages;
  s.v_full = s.k_empty + 8 * kKeyStages;
  s.v_empty = s.v_full + 8 * kValueStages;
  s.rows = reinterpret_cast<volatile RowInfo*>(memory + kBarrierOffset + kBarrierBytes);
  return s;
}

// Position in a ring of kStages: which stage, and the parity of its current phase.
template <int kStages>
struct RingPosition {
  int stage = 0;
  u32 parity = 0;

  DEVICE void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// ---- producer --------------------------------------------------------------------------------------------------------

struct Place {
  int batch, head, query_block;
};

DEVICE Place place_of(int row, const Params& p) {
  const int plane = row / p.query_blocks;
  return {plane / p.heads, plane % p.heads, row % p.query_blocks};
}

// Loads two 64-key blocks into a tile; `second` past the end of the tensor gives zeros.
DEVICE void load_tile(u32 tile, const TensorMap* map, u32 full, int first, int second, const Place& at) {
  barrier_arrive_expect(full, kTileBytes);
#pragma unroll
  for (int slab = 0; slab < kSlabs; ++slab) {
    const u32 to = tile + slab * kTileSlabBytes;
    tma_load(to, map, full, slab * kSlabChannels, first * kBlockK, at.head, at.batch);
    tma_load(to + kBlockSlabBytes, map, full, slab * kSlabChannels, second * kBlockK, at.head, at.batch);
  }
}

// Feeds K one tile ahead of V, the order in which the consumers need them. One lane issues; the warp stays together.
struct TileFeeder {
  const Params& p;
  const Shared& s;
  bool issuer;
  RingPosition<kKeyStages> key;
  RingPosition<kValueStages> value;
  bool value_due = false;
  int value_first, value_second;
  Place value_at;

  DEVICE void push(int first, int second, const Place& at) {
    barrier_wait(s.k_empty + 8 * key.stage, key.parity ^ 1);
    if (issuer) load_tile(s.key(key.stage), &p.k, s.k_full + 8 * key.stage, first, second, at);
    key.next();
    flush();
    value_due = true;
    value_first = first;
    value_second = second;
    value_at = at;
  }

  DEVICE void flush() {
    if (!value_due) return;
    barrier_wait(s.v_empty + 8 * value.stage, value.parity ^ 1);
    if (issuer)
      load_tile(s.value(value.stage), &p.v, s.v_full + 8 * value.stage, value_first, value_second, value_at);
    value.next();
    value_due = false;
  }
};

// Loads a row's queries and says what the consumers are to do with them.
DEVICE void load_row(const Params& p, const Shared& s, int stage, int row, const Place& at) {
  const u32* words = p.bits + static_cast<i64>(row) * p.words;
  const int count = p.counts[row];
  const int ragged_keys = p.key_length % kBlockK;
  const int ragged_block = p.key_length / kBlockK;  // a block only if ragged_keys > 0, and then the last one
  const bool has_ragged = ragged_keys != 0 && (words[ragged_block / 32] >> (ragged_block % 32) & 1);
  volatile RowInfo* info = s.rows + stage;
  info->row = row;
  info->tiles = max((count + 1) / 2, 1);
  info->last_keys =
      count == 0 ? 0 : (count % 2 == 0 ? kTileKeys : kBlockK) - (has_ragged ? kBlockK - ragged_keys : 0);

  const u32 full = s.q_full + 8 * stage;
  barrier_arrive_expect(full, kQueryBytes);
#pragma unroll
  for (int group = 0; group < kConsumerGroups; ++group) {
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      tma_load(s.query(stage) + group * kQueryGroupBytes + slab * kQuerySlabBytes, &p.q, full, slab * kSlabChannels,
               at.query_block * kBlockQ + group * kGroupRows, at.head, at.batch);
    }
  }
}

DEVICE void produce(const Params& p, const Shared& s) {
  constexpr u32 kWarp = 0xffffffffu;
  const int lane = threadIdx.x % 32;
  const int beyond = ceil_div(p.key_length, kBlockK);  // the block after the last: loads as zeros
  TileFeeder feeder{p, s, lane == 0};
  RingPosition<kQueryStages> query;

  int ticket = blockIdx.x;
  while (ticket < p.rows) {
    const int row = p.order[ticket];
    const Place at = place_of(row, p);
    const u32* words = p.bits + static_cast<i64>(row) * p.words;
    u32 word = lane < p.words ? words[lane] : 0;
    barrier_wait(s.q_empty + 8 * query.stage, query.parity ^ 1);
    if (lane == 0) load_row(p, s, query.stage, row, at);
    query.next();

    int unpaired = -1;
    bool fed = false;
    for (int base = 0; base < p.words; base += 32) {
      const int ahead = base + 32 + lane;
      const u32 next_word = ahead < p.words ? words[ahead] : 0;
      for (u32 lanes = __ballot_sync(kWarp, word != 0); lanes != 0; lanes &= lanes - 1) {
        const int source = __ffs(lanes) - 1;
        for (u32 set = __shfl_sync(kWarp, word, source); set != 0; set &= set - 1) {
          const int block = (base + source) * 32 + __ffs(set) - 1;
          if (unpaired < 0) {
            unpaired = block;
          } else {
            feeder.push(unpaired, block, at);
            unpaired = -1;
            fed = true;
          }
        }
      }
      word = next_word;
    }
    if (unpaired >= 0 || !fed) feeder.push(unpaired >= 0 ? unpaired : beyond, beyond, at);

    // Taken only now: a ticket held through a long row would wait for it. The tiles in flight hide the latency.
    int taken = 0;
    if (lane == 0) {
      taken = atomicAdd(p.ticket, 1);
      if (taken == p.rows - 1) *p.ticket = 0;  // every block of threads has taken its last one
    }
    ticket = gridDim.x + __shfl_sync(kWarp, taken, 0);
  }
  feeder.flush();
  barrier_wait(s.q_empty + 8 * query.stage, query.parity ^ 1);
  if (lane == 0) {
    s.rows[query.stage].row = -1;
    barrier_arrive(s.q_full + 8 * query.stage);
  }
}

// ---- consumers -------------------------------------------------------------------------------------------------------
//
// A thread holds two query rows (r = 0, 1 for its lane's row and the one 8 below): scores[4i + 2r + c] is column
// 8i + 2 (lane % 4) + c, and the output likewise.

struct Softmax {
  float reference[2];   // M, a raw score
  float sum[2];         // of this thread's columns only
  bool subtract_first;  // |M| is beyond kFusedLimit; the same in the whole warp

  DEVICE void reset() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      reference[r] = -kInfinity;
      sum[r] = 0.f;
    }
  }
};

DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

DEVICE void hide_keys_from(float (&scores)[64], int keys, int lane) {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int column = (i / 4) * 8 + (lane % 4) * 2 + i % 2;
    if (column >= keys) scores[i] = -kInfinity;
  }
}

// P = 2^(scale * score + shift), packed for wgmma's A operand (four registers hold 16 keys), and this thread's sums.
DEVICE void exponentiate(u32 (&packed)[32], float (&sum)[2], const float (&scores)[64], float scale_log2,
                         const float (&shift)[2]) {
  sum[0] = sum[1] = 0.f;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const float left = exp2_approx(fmaf(scores[2 * i], scale_log2, shift[i % 2]));
    const float right = exp2_approx(fmaf(scores[2 * i + 1], scale_log2, shift[i % 2]));
    sum[i % 2] += left;
    sum[i % 2] += right;
    packed[i] = pack_elements(left, right);
  }
}

// The careful way: raises M to the tile's maximum; `rescale` is what earlier sums and outputs must be multiplied by.
DEVICE void raise_reference(float (&scores)[64], Softmax& state, float (&rescale)[2], float scale_log2) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float maximum = state.reference[r];
#pragma unroll
    for (int i = 0; i < 16; ++i) maximum = fmaxf(maximum, fmaxf(scores[4 * i + 2 * r], scores[4 * i + 2 * r + 1]));
    maximum = quad_max(maximum);
    rescale[r] = exp2_approx((state.reference[r] - maximum) * scale_log2);
    state.reference[r] = maximum;
    state.sum[r] *= rescale[r];
  }
  const float largest = fmaxf(fabsf(state.reference[0]), fabsf(state.reference[1])) * scale_log2;
  state.subtract_first = __any_sync(0xffffffffu, largest > kFusedLimit);
}

// Turns a tile's scores into packed probabilities. Returns whether M was raised, the same in the whole warp.
DEVICE bool softmax_tile(u32 (&packed)[32], float (&scores)[64], Softmax& state, float (&rescale)[2], float scale_log2,
                         bool first_tile) {
  float sum[2];
  bool careful = first_tile || state.subtract_first;
  if (!careful) {
    const float shift[2] = {-state.reference[0] * scale_log2, -state.reference[1] * scale_log2};
    exponentiate(packed, sum, scores, scale_log2, shift);
    careful = __any_sync(0xffffffffu, fmaxf(sum[0], sum[1]) > kSumLimit);
  }
  if (careful) {
    raise_reference(scores, state, rescale, scale_log2);
    float shift[2] = {-state.reference[0] * scale_log2, -state.reference[1] * scale_log2};
    if (state.subtract_first) {
#pragma unroll
      for (int i = 0; i < 64; ++i) scores[i] -= state.reference[i / 2 % 2];
      shift[0] = shift[1] = 0.f;
    }
    exponentiate(packed, sum, scores, scale_log2, shift);
  }
  state.sum[0] += sum[0];
  state.sum[1] += sum[1];
  return careful;
}

DEVICE void issue_scores(float (&scores)[64], u64 query, u64 key) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    const int slab = k / 4, within = (k % 4) * 32;
    wgmma_m64n128k16_shared(scores, advance(query, slab * kQuerySlabBytes + within),
                            advance(key, slab * kTileSlabBytes + within), k > 0);
  }
  wgmma_commit();
}

DEVICE void issue_output(float (&out)[kHeadDim / 2], const u32 (&p)[32], u64 value, int accumulate) {
  constexpr int kStepBytes = 16 * kSlabRowBytes;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kTileKeys / 16; ++k) {
    const u64 step = advance(value, k * kStepBytes);
#if HEAD_DIM == 128
    wgmma_m64n128k16_registers(out, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], step, k > 0 ? 1 : accumulate);
#else
    wgmma_m64n64k16_registers(out, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], step, k > 0 ? 1 : accumulate);
#endif
  }
  wgmma_commit();
}

// Normalises a finished row and hands it to TMA through the warp's 16 rows of the Q stage, which nothing reads any more.
DEVICE void store_row(const Params& p, u32 staging, const float (&out)[kHeadDim / 2], const Softmax& state,
                      const RowInfo& row, int token, int lane) {
  const Place at = place_of(row.row, p);
  float inverse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = quad_sum(state.sum[r]);
    inverse[r] = 1.f / sum;
    const int query = token + lane / 4 + 8 * r;
    if (lane % 4 == 0 && query < p.query_length)
      p.lse[static_cast<i64>(row.row / p.query_blocks) * p.query_length + query] =
          row.last_keys == 0 ? -kInfinity : state.reference[r] * p.scale_log2 + log2_approx(sum);
  }
#pragma unroll
  for (int chunk = 0; chunk < kHeadDim / 8; chunk += 2) {
    const u32 slab = staging + chunk / 8 * kQuerySlabBytes;
    const float* left = out + 4 * chunk;
    const float* right = left + 4;
    store_matrices(swizzled(slab, lane % 16, chunk % 8 + lane / 16),
                   pack_elements(left[0] * inverse[0], left[1] * inverse[0]),
                   pack_elements(left[2] * inverse[1], left[3] * inverse[1]),
                   pack_elements(right[0] * inverse[0], right[1] * inverse[0]),
                   pack_elements(right[2] * inverse[1], right[3] * inverse[1]));
  }
  async_proxy_fence();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab)
      tma_store(&p.out, staging + slab * kQuerySlabBytes, slab * kSlabChannels, token, at.head, at.batch);
    tma_store_commit();
  }
}

// The warpgroups take turns at issuing matrix products: `kGroup` waits for its own barrier and then opens the other's.
template <int kGroup>
DEVICE void wait_turn() {
  named_barrier_sync<1 + kGroup, 256>();
}

template <int kGroup>
DEVICE void pass_turn() {
  named_barrier_arrive<2 - kGroup, 256>();
}

template <int kGroup>
struct Consumer {
  const Params& p;
  const Shared& s;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;

  RingPosition<kQueryStages> query;
  RingPosition<kKeyStages> key;
  RingPosition<kValueStages> value;
  RowInfo row;
  int tile = 0;
  bool storing = false;  // the previous row's store may still read its Q stage
  Softmax state;
  float scores[64];
  float out[kHeadDim / 2];

  // Lane 0 reads for its warp, because it is lane 0 that later hands the stage back.
  DEVICE RowInfo wait_row(const RingPosition<kQueryStages>& at) const {
    barrier_wait(s.q_full + 8 * at.stage, at.parity);
    volatile const RowInfo* info = s.rows + at.stage;
    RowInfo row{0, 0, 0};
    if (lane == 0) row = RowInfo{info->row, info->tiles, info->last_keys};
    return RowInfo{__shfl_sync(0xffffffffu, row.row, 0), __shfl_sync(0xffffffffu, row.tiles, 0),
                   __shfl_sync(0xffffffffu, row.last_keys, 0)};
  }

  DEVICE u64 query_descriptor(int stage) const {
    return matrix_descriptor(s.query(stage) + kGroup * kQueryGroupBytes, 0);
  }

  DEVICE void release_stored() {
    if (storing && lane == 0) {
      tma_store_wait_read();
      barrier_arrive(s.q_empty + 8 * (query.stage ^ 1));
    }
    storing = false;
  }

  // The first tile of the first row. Returns false when there is none.
  DEVICE bool start(u32 (&probabilities)[32]) {
    row = wait_row(query);
    if (row.row < 0) return false;
    barrier_wait(s.k_full + 8 * key.stage, key.parity);
    wait_turn<kGroup>();
    issue_scores(scores, query_descriptor(query.stage), matrix_descriptor(s.key(key.stage), 0));
    pass_turn<kGroup>();
    wgmma_wait<0>();
    pin(scores);
    if (lane == 0) barrier_arrive(s.k_empty + 8 * key.stage);
    key.next();
    if (row.hides_keys(0)) hide_keys_from(scores, row.last_keys, lane);
    state.reset();
    float rescale[2];
    softmax_tile(probabilities, scores, state, rescale, p.scale_log2, true);
    return true;
  }

  // O += P V of this tile beside S and P of the following one. Returns false after the last tile of the last row.
  DEVICE bool step(u32 (&probabilities)[32], u32 (&following)[32]) {
    const bool row_ends = tile + 1 == row.tiles;
    RowInfo next = row;
    RingPosition<kQueryStages> next_query = query;
    if (row_ends) {
      release_stored();  // the producer may need that stage to answer the wait
      next_query.next();
      next = wait_row(next_query);
    }
    const bool finished = next.row < 0;  // then the scores issued below read stale memory and are dropped
    if (!finished) barrier_wait(s.k_full + 8 * key.stage, key.parity);
    wait_turn<kGroup>();
    issue_scores(scores, query_descriptor(next_query.stage), matrix_descriptor(s.key(key.stage), 0));
    barrier_wait(s.v_full + 8 * value.stage, value.parity);
    issue_output(out, probabilities, matrix_descriptor(s.value(value.stage), kTileSlabBytes), tile > 0);
    pass_turn<kGroup>();
    release_stored();

    wgmma_wait<1>();
    pin(scores);
    if (lane == 0 && !finished) barrier_arrive(s.k_empty + 8 * key.stage);
    key.next();
    const Softmax done = state;
    const int next_tile = row_ends ? 0 : tile + 1;
    if (row_ends) state.reset();
    if (next.hides_keys(next_tile)) hide_keys_from(scores, next.last_keys, lane);
    float rescale[2];
    const bool raised = softmax_tile(following, scores, state, rescale, p.scale_log2, row_ends);

    wgmma_wait<0>();
    pin(out);
    pin(probabilities);
    if (lane == 0) barrier_arrive(s.v_empty + 8 * value.stage);
    value.next();
    if (row_ends) {
      const int within = kGroup * kGroupRows + warp * 16;
      const u32 staging = s.query(query.stage) + kGroup * kQueryGroupBytes + warp * 16 * kSlabRowBytes;
      store_row(p, staging, out, done, row, row.row % p.query_blocks * kBlockQ + within, lane);
      storing = true;
    } else if (raised) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) out[i] *= rescale[i / 2 % 2];
    }
    row = next;
    query = next_query;
    tile = next_tile;
    return !finished;
  }

  DEVICE void run() {
    if (kGroup == 1) pass_turn<1>();  // the first turn is group 0's
    u32 even[32], odd[32];
    if (!start(even)) return;
    while (step(even, odd) && step(odd, even)) {
    }
    if (lane == 0) tma_store_wait_read();  // shared memory must outlive the store
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) forward_sm90(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) u8 memory[];
  const Shared s = shared_layout(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQueryStages; ++i) {
      barrier_init(s.q_full + 8 * i, 1);
      barrier_init(s.q_empty + 8 * i, kConsumerWarps);
    }
    for (int i = 0; i < kKeyStages; ++i) {
      barrier_init(s.k_full + 8 * i, 1);
      barrier_init(s.k_empty + 8 * i, kConsumerWarps);
    }
    for (int i = 0; i < kValueStages; ++i) {
      barrier_init(s.v_full + 8 * i, 1);
      barrier_init(s.v_empty + 8 * i, kConsumerWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();

  const int group = threadIdx.x / 128;
  if (group == 0) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x < 32) produce(params, s);
  } else {
    take_registers<kConsumerRegisters>();
    if (group == 1) {
      Consumer<0>{params, s}.run();
    } else {
      Consumer<1>{params, s}.run();
    }
  }
}
