// Block-sparse attention, backward, for compute capability 9.0 (wgmma + TMA).
//
//   P = 2^(scale_log2 * Q K^T - LSE)     dP = dO V^T     dS = P (dP - delta)
//   dQ = scale * dS K                    row_gradients:     a mask row (128 queries) at a time, over its key blocks
//   dK = scale * dS^T Q   dV = P^T dO    column_gradients:  a mask column (64 keys) at a time, over its query blocks
//
// Each output has one owner, so that nothing is added atomically and the same inputs give the same bits; the price is that
// S and dP are computed twice. Both kernels are persistent: a producer warp takes rows or columns by ticket, decodes their
// bits and feeds the tiles of all of them as one sequence to two warpgroups, which issue the products of tile t + 1 before
// the last one of tile t, over the ends of rows and columns too. What a row or column owns (Q and dO, or K and V) stays in
// registers as the left operand: shared memory, read once a product for the right operand, would otherwise be the limit.
//
// row_gradients: each warpgroup takes 64 queries, and tiles are key blocks:
//
//        S(t+1) = Q K(t+1)^T, dP(t+1) = dO V(t+1)^T;   dQ += dS(t) K(t)   while dS(t+1) is computed
//
// column_gradients: 64 keys by 128 queries take more registers than a warpgroup has, and so the two share the work:
//
//   warpgroup 0:  S^T(t+1) = K Q(t+1)^T;    dV += P^T(t) dO(t)   while P(t+1) is computed
//   warpgroup 1:  dP^T(t+1) = V dO(t+1)^T;  dK += dS^T(t) Q(t)   while dS(t+1) is computed, from P(t+1), which a thread
//                                                                gets through shared memory from its like in warpgroup 0
//
// S, P, dP, dS and the sums are fp32; P and dS are rounded to the element type for the products that they enter.

#define kInfinity __int_as_float(0x7f800000)

constexpr int kConsumerGroups = 2;
constexpr int kConsumerWarps = 4 * kConsumerGroups;
constexpr int kThreads = 128 * (1 + kConsumerGroups);
// Of the producer's and of a consumer's threads. The consumers of rows need more than usual, and their producer gets by.
constexpr int kRowProducerRegisters = 24, kRowConsumerRegisters = 240;
constexpr int kColumnProducerRegisters = 40, kColumnConsumerRegisters = 232;

constexpr u32 kAllLanes = 0xffffffffu;
constexpr int kGroupRows = 64;  // one wgmma's M
constexpr int kSlabs = kHeadDim / kSlabChannels;
constexpr int kSteps = kHeadDim / 16;  // of a product over channels

constexpr u32 kQuerySlabBytes = kBlockQ * kSlabRowBytes;
constexpr u32 kQueryBytes = kQuerySlabBytes * kSlabs;
constexpr u32 kKeySlabBytes = kBlockK * kSlabRowBytes;
constexpr u32 kKeyBytes = kKeySlabBytes * kSlabs;
constexpr u32 kStepBytes = 16 * kSlabRowBytes;  // 16 tokens of a slab
constexpr u32 kNumbersBytes = kBlockQ * 4;      // half a record

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

// The full and empty barriers of a ring.
template <int kStages>
struct RingBarriers {
  static constexpr u32 kBytes = 16 * kStages;
  u32 base;

  DEVICE void init(int full_arrivals, int empty_arrivals) const {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full(i), full_arrivals);
      barrier_init(empty(i), empty_arrivals);
    }
  }
  DEVICE u32 full(int stage) const { return base + 8 * stage; }
  DEVICE u32 empty(int stage) const { return base + 8 * (kStages + stage); }
  DEVICE void wait_full(const RingPosition<kStages>& at) const { barrier_wait(full(at.stage), at.parity); }
  DEVICE void wait_empty(const RingPosition<kStages>& at) const { barrier_wait(empty(at.stage), at.parity ^ 1); }
};

// A row or column of the mask as the consumers see it.
struct Line {
  int index;      // -1: no more
  int tiles;      // at least 1: one that keeps nothing gets any tile, and zeros as its result
  int last_keys;  // rows: real keys of the last tile; 0: the line keeps nothing
};

// Two lines, the one at work and the next.
constexpr int kLines = 2;
struct LineRing {
  RingBarriers<kLines> barriers;
  volatile Line* lines;

  // The warp waits for the line and hands its place back.
  DEVICE Line take(RingPosition<kLines>& at, int lane) const {
    barriers.wait_full(at);
    const volatile Line& seen = lines[at.stage];
    const Line line{seen.index, seen.tiles, seen.last_keys};
    __syncwarp();
    if (lane == 0) barrier_arrive(barriers.empty(at.stage));
    at.next();
    return line;
  }

  // By the producer's lane 0, after the warp has waited for the place.
  DEVICE void put(int stage, int index, int tiles, int last_keys) const {
    volatile Line& line = lines[stage];
    line.index = index;
    line.tiles = tiles;
    line.last_keys = last_keys;
    barrier_arrive(barriers.full(stage));
  }
};

// Visits the set bits of a line's words in ascending order; the warp stays together.
template <class Visit>
DEVICE void each_set_bit(const u32* words, int count, int lane, Visit visit) {
  u32 word = lane < count ? words[lane] : 0;
  for (int base = 0; base < count; base += 32) {
    const int ahead = base + 32 + lane;
    const u32 next_word = ahead < count ? words[ahead] : 0;
    for (u32 lanes = __ballot_sync(kAllLanes, word != 0); lanes != 0; lanes &= lanes - 1) {
      const int source = __ffs(lanes) - 1;
      for (u32 set = __shfl_sync(kAllLanes, word, source); set != 0; set &= set - 1)
        visit((base + source) * 32 + __ffs(set) - 1);
    }
    word = next_word;
  }
}

// The next ticket, for the whole warp. Taken only when a line's last tile is under way: one that is held through a long
// line would wait for it. The counter is left at zero.
DEVICE int next_ticket(int* counter, int lines, int lane) {
  int taken = 0;
  if (lane == 0) {
    taken = atomicAdd(counter, 1);
    if (taken == lines - 1) *counter = 0;  // every block of threads has taken its last one
  }
  return gridDim.x + __shfl_sync(kAllLanes, taken, 0);
}

// ---- products --------------------------------------------------------------------------------------------------------
//
// A thread holds two rows of a product (r = 0, 1 for its lane's row and the one 8 below): d[4i + 2r + c] is column
// 8i + 2 (lane % 4) + c. As the left operand of the next product, four registers hold 16 columns.

// d[64 x 128 or 64] = left[64 x D] * (tokens [.. x D])^T, of tokens in slabs of kSlabBytes.
template <u32 kSlabBytes>
DEVICE void issue_by_channels(float (&d)[64], const u32 (&left)[kHeadDim / 4], u32 tokens) {
  const u64 right = matrix_descriptor(tokens, 0);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
    wgmma_m64n128k16_registers<kContiguousK>(d, left[4 * k], left[4 * k + 1], left[4 * k + 2], left[4 * k + 3],
                                             advance(right, k / 4 * kSlabBytes + k % 4 * 32), k > 0);
  wgmma_commit();
}

template <u32 kSlabBytes>
DEVICE void issue_by_channels(float (&d)[32], const u32 (&left)[kHeadDim / 4], u32 tokens) {
  const u64 right = matrix_descriptor(tokens, 0);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
    wgmma_m64n64k16_registers<kContiguousK>(d, left[4 * k], left[4 * k + 1], left[4 * k + 2], left[4 * k + 3],
                                            advance(right, k / 4 * kSlabBytes + k % 4 * 32), k > 0);
  wgmma_commit();
}

// sum[64 x D] (+)= left[64 x 2 kRegisters] * tokens[2 kRegisters... x D]; `accumulate` false clears the sum first.
template <u32 kSlabBytes, int kRegisters>
DEVICE void issue_by_tokens(float (&sum)[kHeadDim / 2], const u32 (&left)[kRegisters], u32 tokens, int accumulate) {
  const u64 right = matrix_descriptor(tokens, kSlabBytes);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kRegisters / 4; ++k) {
    const u64 step = advance(right, k * kStepBytes);
    const int add = k > 0 ? 1 : accumulate;
#if HEAD_DIM == 128
    wgmma_m64n128k16_registers(sum, left[4 * k], left[4 * k + 1], left[4 * k + 2], left[4 * k + 3], step, add);
#else
    wgmma_m64n64k16_registers(sum, left[4 * k], left[4 * k + 1], left[4 * k + 2], left[4 * k + 3], step, add);
#endif
  }
  wgmma_commit();
}

template <int kCount>
DEVICE void pack(u32 (&packed)[kCount], const float (&values)[2 * kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) packed[i] = pack_elements(values[2 * i], values[2 * i + 1]);
}

DEVICE void read_floats(float (&values)[4], u32 address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
               : "r"(address)
               : "memory");
}

DEVICE float read_float(u32 address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

DEVICE void read_words(u32 (&words)[4], u32 address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

DEVICE void write_words(u32 address, u32 w0, u32 w1, u32 w2, u32 w3) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(w0), "r"(w1), "r"(w2), "r"(w3)
               : "memory");
}

// Stores this thread's two rows of a gradient, times `factor`, from `token` and 8 below; zeros where nothing was kept.
DEVICE void store_gradient(const TensorView& to, const float (&sum)[kHeadDim / 2], float factor, bool kept, int batch,
                           int head, int token, int length, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (token + 8 * r >= length) continue;
    u32* out = reinterpret_cast<u32*>(to.row(batch, head, token + 8 * r)) + lane % 4;
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; ++i) {
      const u32 packed = pack_elements(sum[4 * i + 2 * r] * factor, sum[4 * i + 2 * r + 1] * factor);
      out[4 * i] = kept ? packed : 0;
    }
  }
}

// ---- dQ ----------------------------------------------------------------------------------------------------------------
//
// Shared memory                               full when                    empty when all 8 consumer warps have
//   Q, dO, record   one row                   TMA done                     read them into registers
//   K, V            kKeyStages x one block    TMA done                     finished dQ of it

constexpr int kKeyStages = 5;

struct RowParams {
  TensorMap q, d_out;  // boxes of 128 tokens
  TensorMap k, v;      // boxes of 64 tokens
  TensorView d_q;
  const float* records;  // (row, kRecordFloats)
  const u32* bits;       // (row, word)
  const int* counts;     // (row)
  const int* order;      // (row): the row that each ticket stands for
  int* ticket;           // zero at launch, and again afterwards
  int rows, heads, query_blocks;
  int query_length, key_length;
  int words;
  float scale, scale_log2;
};

struct RowShared {
  u32 q, d_out, record, keys;  // keys: stages of K and V
  RingBarriers<1> own;
  RingBarriers<kKeyStages> tiles;
  LineRing lines;

  DEVICE u32 key(int stage) const { return keys + stage * (2 * kKeyBytes); }
  DEVICE u32 value(int stage) const { return key(stage) + kKeyBytes; }
};

DEVICE RowShared row_layout(u8* memory) {
  RowShared s;
  s.q = shared_address(memory);
  s.d_out = s.q + kQueryBytes;
  s.keys = s.d_out + kQueryBytes;
  s.record = s.key(kKeyStages);
  s.own.base = s.record + 2 * kNumbersBytes;
  s.tiles.base = s.own.base + s.own.kBytes;
  s.lines.barriers.base = s.tiles.base + s.tiles.kBytes;
  s.lines.lines = reinterpret_cast<volatile Line*>(memory + (s.lines.barriers.base + s.lines.barriers.kBytes - s.q));
  return s;
}

DEVICE void produce_rows(const RowParams& p, const RowShared& s) {
  const int lane = threadIdx.x % 32;
  RingPosition<1> own;
  RingPosition<kLines> line;
  RingPosition<kKeyStages> tile;
  int ticket = blockIdx.x;
  while (ticket < p.rows) {
    const int row = p.order[ticket], plane = row / p.query_blocks;
    const int batch = plane / p.heads, head = plane % p.heads;
    const u32* words = p.bits + static_cast<i64>(row) * p.words;
    const int count = p.counts[row];
    s.lines.barriers.wait_empty(line);
    s.own.wait_empty(own);
    if (lane == 0) {
      const int ragged_keys = p.key_length % kBlockK;
      const int ragged_block = p.key_length / kBlockK;  // a block only if ragged_keys > 0, and then the last one
      const bool has_ragged = ragged_keys != 0 && (words[ragged_block / 32] >> (ragged_block % 32) & 1);
      s.lines.put(line.stage, row, max(count, 1), count == 0 ? 0 : has_ragged ? ragged_keys : kBlockK);
      barrier_arrive_expect(s.own.full(0), 2 * kQueryBytes + 2 * kNumbersBytes);
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab) {
        const int token = row % p.query_blocks * kBlockQ;
        tma_load(s.q + slab * kQuerySlabBytes, &p.q, s.own.full(0), slab * kSlabChannels, token, head, batch);
        tma_load(s.d_out + slab * kQuerySlabBytes, &p.d_out, s.own.full(0), slab * kSlabChannels, token, head, batch);
      }
      bulk_load(s.record, p.records + static_cast<i64>(row) * kRecordFloats, 2 * kNumbersBytes, s.own.full(0));
    }
    line.next();
    own.next();
    const auto feed = [&](int block) {
      s.tiles.wait_empty(tile);
      if (lane == 0) {
        const u32 full = s.tiles.full(tile.stage);
        barrier_arrive_expect(full, 2 * kKeyBytes);
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
          const u32 offset = slab * kKeySlabBytes;
          tma_load(s.key(tile.stage) + offset, &p.k, full, slab * kSlabChannels, block * kBlockK, head, batch);
          tma_load(s.value(tile.stage) + offset, &p.v, full, slab * kSlabChannels, block * kBlockK, head, batch);
        }
      }
      tile.next();
    };
    each_set_bit(words, p.words, lane, feed);
    if (count == 0) feed(0);
    ticket = next_ticket(p.ticket, p.rows, lane);
  }
  s.lines.barriers.wait_empty(line);
  if (lane == 0) s.lines.put(line.stage, -1, 1, 0);
}

struct RowConsumer {
  const RowParams& p;
  const RowShared& s;
  const int lane = threadIdx.x % 32;
  const int first_query = (threadIdx.x / 32 - 4) * 16;  // of the warp, in the row

  RingPosition<1> own;
  RingPosition<kLines> line_at;
  RingPosition<kKeyStages> tile_at;  // of tile t + 1
  int current_stage = 0;             // of tile t
  Line row;
  int tile = 0;
  u32 q[kHeadDim / 4], d_out[kHeadDim / 4];  // 64 queries as left operands
  float lse[2], delta[2];
  float scores[32], d_probabilities[32];
  u32 packed[16];  // dS of tile t
  float d_q[kHeadDim / 2];

  DEVICE void load_operand(u32 (&operand)[kHeadDim / 4], u32 tokens) const {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const u32 slab = tokens + k / 4 * kQuerySlabBytes;
      load_matrices(operand[4 * k], operand[4 * k + 1], operand[4 * k + 2], operand[4 * k + 3],
                    swizzled(slab, first_query + lane % 16, k % 4 * 2 + lane / 16));
    }
  }

  // Takes the next row, if there is one, into registers.
  DEVICE Line take_row() {
    const Line next = s.lines.take(line_at, lane);
    if (next.index < 0) return next;
    s.own.wait_full(own);
    load_operand(q, s.q);
    load_operand(d_out, s.d_out);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const u32 place = s.record + 4 * record_place(first_query + lane / 4 + 8 * r);
      lse[r] = read_float(place);
      delta[r] = read_float(place + kNumbersBytes);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(s.own.empty(0));
    own.next();
    return next;
  }

  DEVICE void issue_scores() {
    issue_by_channels<kKeySlabBytes>(scores, q, s.key(tile_at.stage));
    issue_by_channels<kKeySlabBytes>(d_probabilities, d_out, s.value(tile_at.stage));
  }

  // P in the place of the scores; keys beyond the end get 0.
  DEVICE void exponentiate(bool hides_keys, int keys) {
    if (hides_keys) {
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= keys) scores[i] = -kInfinity;
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) scores[i] = exp2_approx(fmaf(scores[i], p.scale_log2, -lse[i / 2 % 2]));
  }

  // dS in the place of P.
  DEVICE void differentiate() {
#pragma unroll
    for (int i = 0; i < 32; ++i) scores[i] *= d_probabilities[i] - delta[i / 2 % 2];
  }

  DEVICE bool hides_keys(const Line& line, int at) const { return at + 1 == line.tiles && line.last_keys < kBlockK; }

  // The first tile of the first row. Returns false when there is none.
  DEVICE bool start() {
    row = take_row();
    if (row.index < 0) return false;
    s.tiles.wait_full(tile_at);
    issue_scores();
    wgmma_wait<0>();
    pin(scores);
    pin(d_probabilities);
    exponentiate(hides_keys(row, 0), row.last_keys);
    differentiate();
    pack(packed, scores);
    current_stage = tile_at.stage;
    tile_at.next();
    return true;
  }

  // dQ of this tile beside dS of the following one. Returns false after the last tile of the last row.
  DEVICE bool step() {
    const bool ends = tile + 1 == row.tiles;
    Line next = row;
    if (ends) next = take_row();
    const int next_tile = ends ? 0 : tile + 1;
    const bool finished = next.index < 0;  // then the scores issued below read stale memory and are dropped
    if (!finished) s.tiles.wait_full(tile_at);
    issue_scores();
    issue_by_tokens<kKeySlabBytes>(d_q, packed, s.key(current_stage), tile > 0);

    wgmma_wait<2>();
    pin(scores);
    exponentiate(hides_keys(next, next_tile), next.last_keys);
    wgmma_wait<1>();
    pin(d_probabilities);
    pin(q);
    pin(d_out);
    differentiate();
    pin(scores);  // or the compiler would do it after the wait
    wgmma_wait<0>();
    pin(d_q);
    pin(packed);
    if (lane == 0) barrier_arrive(s.tiles.empty(current_stage));
    pack(packed, scores);
    if (ends) {
      const int plane = row.index / p.query_blocks;
      store_gradient(p.d_q, d_q, p.scale, row.last_keys > 0, plane / p.heads, plane % p.heads,
                     row.index % p.query_blocks * kBlockQ + first_query + lane / 4, p.query_length, lane);
    }
    row = next;
    tile = next_tile;
    current_stage = tile_at.stage;
    tile_at.next();
    return !finished;
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) row_gradients(const __grid_constant__ RowParams params) {
  extern __shared__ __align__(1024) u8 memory[];
  const RowShared s = row_layout(memory);
  if (threadIdx.x == 0) {
    s.own.init(1, kConsumerWarps);
    s.tiles.init(1, kConsumerWarps);
    s.lines.barriers.init(1, kConsumerWarps);
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    give_registers<kRowProducerRegisters>();
    if (threadIdx.x < 32) produce_rows(params, s);
  } else {
    take_registers<kRowConsumerRegisters>();
    RowConsumer consumer{params, s};
    if (consumer.start()) {
      while (consumer.step()) {
      }
    }
  }
}

// ---- dK and dV ---------------------------------------------------------------------------------------------------------
//
// Shared memory                                      full when                     empty when
//   Q, LSE      kQueryStages x one mask row          TMA done                      S and dK of it are done (8 warps)
//   dO, delta   kQueryStages x one mask row          TMA done                      dP and dV of it are done (8 warps)
//   P           kExchangeStages x (64 x 128 / 4)     a warp of warpgroup 0 has     its like in warpgroup 1 has read it
//               for each of four warps               written it

constexpr int kQueryStages = 3;
constexpr int kExchangeStages = 1;
constexpr u32 kExchangeBytes = 16 * kBlockQ * 2;  // of one warp: 16 keys

struct ColumnParams {
  TensorMap q, d_out;  // boxes of 128 tokens
  TensorView k, v, d_k, d_v;
  const float* records;  // (row, kRecordFloats)
  const u32* bits;       // (column, word)
  const int* counts;     // (column)
  const int* order;      // (column): the column that each ticket stands for
  int* ticket;           // zero at launch, and again afterwards
  int columns, heads, key_blocks, query_blocks;
  int key_length;
  int words;
  float scale, scale_log2;
};

struct ColumnShared {
  u32 queries, d_outs, exchange, numbers;  // numbers: LSE and delta of each stage
  RingBarriers<kQueryStages> query, d_out;
  u32 exchange_barriers;
  LineRing lines;

  DEVICE u32 query_tile(int stage) const { return queries + stage * kQueryBytes; }
  DEVICE u32 d_out_tile(int stage) const { return d_outs + stage * kQueryBytes; }
  DEVICE u32 lse(int stage) const { return numbers + stage * (2 * kNumbersBytes); }
  DEVICE u32 delta(int stage) const { return lse(stage) + kNumbersBytes; }
  DEVICE u32 exchanged(int warp, int stage) const { return exchange + (stage * 4 + warp) * kExchangeBytes; }
  DEVICE RingBarriers<kExchangeStages> exchanged(int warp) const {
    return {exchange_barriers + warp * RingBarriers<kExchangeStages>::kBytes};
  }
};

DEVICE ColumnShared column_layout(u8* memory) {
  ColumnShared s;
  s.queries = shared_address(memory);
  s.d_outs = s.query_tile(kQueryStages);
  s.exchange = s.d_out_tile(kQueryStages);
  s.numbers = s.exchanged(0, kExchangeStages);
  s.query.base = s.lse(kQueryStages);
  s.d_out.base = s.query.base + s.query.kBytes;
  s.exchange_barriers = s.d_out.base + s.d_out.kBytes;
  s.lines.barriers.base = s.exchange_barriers + 4 * RingBarriers<kExchangeStages>::kBytes;
  s.lines.lines =
      reinterpret_cast<volatile Line*>(memory + (s.lines.barriers.base + s.lines.barriers.kBytes - s.queries));
  return s;
}

DEVICE void load_tokens(u32 tile, u32 full, const TensorMap* map, u32 numbers, const float* record, int query_block,
                        int head, int batch) {
  barrier_arrive_expect(full, kQueryBytes + kNumbersBytes);
#pragma unroll
  for (int slab = 0; slab < kSlabs; ++slab)
    tma_load(tile + slab * kQuerySlabBytes, map, full, slab * kSlabChannels, query_block * kBlockQ, head, batch);
  bulk_load(numbers, record, kNumbersBytes, full);
}

DEVICE void produce_columns(const ColumnParams& p, const ColumnShared& s) {
  const int lane = threadIdx.x % 32;
  RingPosition<kLines> line;
  RingPosition<kQueryStages> at;
  int ticket = blockIdx.x;
  while (ticket < p.columns) {
    const int column = p.order[ticket], plane = column / p.key_blocks;
    const int batch = plane / p.heads, head = plane % p.heads;
    const u32* words = p.bits + static_cast<i64>(column) * p.words;
    const float* records = p.records + static_cast<i64>(plane) * p.query_blocks * kRecordFloats;
    const int count = p.counts[column];
    s.lines.barriers.wait_empty(line);
    if (lane == 0) s.lines.put(line.stage, column, max(count, 1), count);
    line.next();
    const auto feed = [&](int query_block) {
      const float* record = records + query_block * kRecordFloats;
      s.query.wait_empty(at);
      if (lane == 0)
        load_tokens(s.query_tile(at.stage), s.query.full(at.stage), &p.q, s.lse(at.stage), record, query_block, head,
                    batch);
      s.d_out.wait_empty(at);
      if (lane == 0)
        load_tokens(s.d_out_tile(at.stage), s.d_out.full(at.stage), &p.d_out, s.delta(at.stage), record + kBlockQ,
                    query_block, head, batch);
      at.next();
    };
    each_set_bit(words, p.words, lane, feed);
    if (count == 0) feed(0);
    ticket = next_ticket(p.ticket, p.columns, lane);
  }
  s.lines.barriers.wait_empty(line);
  if (lane == 0) s.lines.put(line.stage, -1, 1, 0);
}

// What the two warpgroups have in common: a column's keys or values as left operand, a product with tile t + 1 in
// `product`, and a gradient that grows by tile t.
struct ColumnConsumer {
  const ColumnParams& p;
  const ColumnShared& s;
  const TensorView& tokens;    // K or V
  const TensorView& gradient;  // dV or dK
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;

  RingPosition<kLines> line_at;
  RingPosition<kQueryStages> tile_at;     // of tile t + 1
  RingPosition<kQueryStages> current_at;  // of tile t
  RingPosition<kExchangeStages> exchange_at;
  Line column, upcoming;  // of tile t; the one whose tokens come next into `operand`
  int tile = 0;
  u32 operand[kHeadDim / 4];
  float product[64];
  u32 packed[32];
  float sum[kHeadDim / 2];

  DEVICE int first_key(int index) const { return index % p.key_blocks * kBlockK + warp * 16 + lane / 4; }

  // Takes the next column and sets out to load its tokens. Straight from global memory: one in thirty tiles, say, needs
  // it, and nothing waits for it but the next product.
  DEVICE void take_column() {
    upcoming = s.lines.take(line_at, lane);
    if (upcoming.index < 0) return;
    const int plane = upcoming.index / p.key_blocks, key = first_key(upcoming.index);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const u16* row = tokens.row(plane / p.heads, plane % p.heads, key + 8 * r);
      const u32* pairs = reinterpret_cast<const u32*>(row) + lane % 4;
#pragma unroll
      for (int i = 0; i < kHeadDim / 8; ++i)
        operand[i / 2 * 4 + i % 2 * 2 + r] = key + 8 * r < p.key_length ? pairs[4 * i] : 0;
    }
  }

  DEVICE void store(float factor) const {
    const int plane = column.index / p.key_blocks;
    store_gradient(gradient, sum, factor, column.last_keys > 0, plane / p.heads, plane % p.heads,
                   first_key(column.index), p.key_length, lane);
  }

  // The column of tile t + 1, and which of its tiles that is.
  DEVICE Line next_line(int& next_tile) const {
    const bool ends = tile + 1 == column.tiles;
    next_tile = ends ? 0 : tile + 1;
    return ends ? upcoming : column;
  }

  DEVICE void advance_to(const Line& next, int next_tile) {
    column = next;
    tile = next_tile;
    current_at = tile_at;
    tile_at.next();
  }
};

// Warpgroup 0: S^T, P and dV.
struct ValueGradient : ColumnConsumer {
  // P in the place of the scores, and a copy for warpgroup 1.
  DEVICE void exponentiate() {
    const u32 lse = s.lse(tile_at.stage) + lane % 4 * 16;
    s.exchanged(warp).wait_empty(exchange_at);
    const u32 copy = s.exchanged(warp, exchange_at.stage) + lane * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float reference[4];
      read_floats(reference, lse + 64 * i);
      float* values = product + 8 * i;
#pragma unroll
      for (int j = 0; j < 8; ++j)
        values[j] = exp2_approx(fmaf(values[j], p.scale_log2, -reference[j / 4 * 2 + j % 2]));
      write_words(copy + 512 * i, pack_elements(values[0], values[1]), pack_elements(values[2], values[3]),
                  pack_elements(values[4], values[5]), pack_elements(values[6], values[7]));
    }
    barrier_arrive(s.exchanged(warp).full(exchange_at.stage));
    __syncwarp();
    if (lane == 0) barrier_arrive(s.query.empty(tile_at.stage));
    exchange_at.next();
  }

  DEVICE bool start() {
    take_column();
    if (upcoming.index < 0) return false;
    s.query.wait_full(tile_at);
    issue_by_channels<kQuerySlabBytes>(product, operand, s.query_tile(tile_at.stage));
    wgmma_wait<0>();
    pin(product);
    pin(operand);
    column = upcoming;
    if (column.tiles == 1) take_column();
    exponentiate();
    pack(packed, product);
    advance_to(column, 0);
    return true;
  }

  DEVICE bool step() {
    int next_tile;
    const Line next = next_line(next_tile);
    const bool finished = next.index < 0;  // then the scores issued below read stale memory and are dropped
    if (!finished) s.query.wait_full(tile_at);
    issue_by_channels<kQuerySlabBytes>(product, operand, s.query_tile(tile_at.stage));
    s.d_out.wait_full(current_at);
    issue_by_tokens<kQuerySlabBytes>(sum, packed, s.d_out_tile(current_at.stage), tile > 0);

    wgmma_wait<1>();
    pin(product);
    pin(operand);
    if (!finished) {
      if (next_tile + 1 == next.tiles) take_column();
      exponentiate();
    }
    pin(product);  // or the compiler would do some of this after the wait
    wgmma_wait<0>();
    pin(sum);
    pin(packed);
    if (lane == 0) barrier_arrive(s.d_out.empty(current_at.stage));
    pack(packed, product);
    if (tile + 1 == column.tiles) store(1.f);
    advance_to(next, next_tile);
    return !finished;
  }
};

// Warpgroup 1: dP^T, dS and dK.
struct KeyGradient : ColumnConsumer {
  // dS in the place of dP.
  DEVICE void differentiate() {
    const u32 delta = s.delta(tile_at.stage) + lane % 4 * 16;
    s.exchanged(warp).wait_full(exchange_at);
    const u32 probabilities = s.exchanged(warp, exchange_at.stage) + lane * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float shift[4];
      u32 pairs[4];
      read_floats(shift, delta + 64 * i);
      read_words(pairs, probabilities + 512 * i);
      float* values = product + 8 * i;
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        values[j] = low_element(pairs[j / 2]) * (values[j] - shift[j / 4 * 2]);
        values[j + 1] = high_element(pairs[j / 2]) * (values[j + 1] - shift[j / 4 * 2 + 1]);
      }
    }
    barrier_arrive(s.exchanged(warp).empty(exchange_at.stage));
    __syncwarp();
    if (lane == 0) barrier_arrive(s.d_out.empty(tile_at.stage));
    exchange_at.next();
  }

  DEVICE bool start() {
    take_column();
    if (upcoming.index < 0) return false;
    s.d_out.wait_full(tile_at);
    issue_by_channels<kQuerySlabBytes>(product, operand, s.d_out_tile(tile_at.stage));
    wgmma_wait<0>();
    pin(product);
    pin(operand);
    column = upcoming;
    if (column.tiles == 1) take_column();
    differentiate();
    pack(packed, product);
    advance_to(column, 0);
    return true;
  }

  DEVICE bool step() {
    int next_tile;
    const Line next = next_line(next_tile);
    const bool finished = next.index < 0;
    if (!finished) s.d_out.wait_full(tile_at);
    issue_by_channels<kQuerySlabBytes>(product, operand, s.d_out_tile(tile_at.stage));
    s.query.wait_full(current_at);
    issue_by_tokens<kQuerySlabBytes>(sum, packed, s.query_tile(current_at.stage), tile > 0);

    wgmma_wait<1>();
    pin(product);
    pin(operand);
    if (!finished) {
      if (next_tile + 1 == next.tiles) take_column();
      differentiate();
    }
    pin(product);
    wgmma_wait<0>();
    pin(sum);
    pin(packed);
    if (lane == 0) barrier_arrive(s.query.empty(current_at.stage));
    pack(packed, product);
    if (tile + 1 == column.tiles) store(p.scale);
    advance_to(next, next_tile);
    return !finished;
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) column_gradients(const __grid_constant__ ColumnParams params) {
  extern __shared__ __align__(1024) u8 memory[];
  const ColumnShared s = column_layout(memory);
  if (threadIdx.x == 0) {
    s.query.init(1, kConsumerWarps);
    s.d_out.init(1, kConsumerWarps);
    for (int warp = 0; warp < 4; ++warp) s.exchanged(warp).init(32, 32);  // each lane for itself: racecheck sees no other order
    s.lines.barriers.init(1, kConsumerWarps);
    barrier_init_fence();
  }
  __syncthreads();
  const int group = threadIdx.x / 128;
  if (group == 0) {
    give_registers<kColumnProducerRegisters>();
    if (threadIdx.x < 32) produce_columns(params, s);
  } else {
    take_registers<kColumnConsumerRegisters>();
    if (group == 1) {
      ValueGradient consumer{{params, s, params.k, params.d_v}};
      if (consumer.start()) {
        while (consumer.step()) {
        }
      }
    } else {
      KeyGradient consumer{{params, s, params.v, params.d_k}};
      if (consumer.start()) {
        while (consumer.step()) {
        }
      }
    }
  }
}
