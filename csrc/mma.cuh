// Tensor cores and asynchronous copies as every GPU since compute capability 8.0 has them: cp.async, ldmatrix and
// mma.sync m16n8k16, and the shared-memory layout the three agree on.

// ---- Asynchronous copies: 16 bytes from global to shared memory, completed in groups, oldest first.

DEVICE void copy_async(u32 target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

// Writes zeros, and reads nothing, where `valid` is false.
DEVICE void copy_async_or_zero(u32 target, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}

DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Returns once all but the newest `kPending` groups of this thread have arrived.
template <int kPending>
DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- Tiles: rows of kHeadDim elements in shared memory, as 16-byte chunks.
// Chunk c of row r is stored at position c ^ (r % 8), so that the eight rows that one ldmatrix phase or one copy reads
// lie in eight different groups of four banks. Tiles start at a multiple of kTileAlignment, which makes moving by
// chunks the exclusive or with a constant: see `chunk_offset`.

constexpr int kChunk = 8;  // elements
constexpr int kRowChunks = kHeadDim / kChunk;
constexpr int kRowBytes = kHeadDim * 2;
constexpr int kTileAlignment = 1024;

DEVICE u32 tile_offset(int row, int chunk) { return row * kRowBytes + ((chunk ^ (row % 8)) << 4); }

// address(row, chunk + step) == address(row, chunk) ^ chunk_offset(step) where chunk < 2 and step is even.
DEVICE u32 chunk_offset(int step) { return step << 4; }

// Where in a tile's first rows, and in the token it starts with, this thread's share of every copy begins.
DEVICE int copy_row() { return threadIdx.x / kRowChunks; }
DEVICE int copy_chunk() { return threadIdx.x % kRowChunks; }
DEVICE const u16* copy_source(const u16* token, i64 token_stride) {
  return token + copy_row() * token_stride + copy_chunk() * kChunk;
}

// All `kThreads` threads copy `kRows` consecutive tokens, each from its `copy_source`; rows from `valid` on become zero.
template <int kRows, int kThreads>
DEVICE void copy_tile(u32 tile, const u16* source, i64 token_stride, int valid) {
  constexpr int kRowsAtOnce = kThreads / kRowChunks;
  static_assert(kThreads % kRowChunks == 0 && kRows % kRowsAtOnce == 0 && kRowsAtOnce % 8 == 0, "tile shape");
  const u32 target = tile + tile_offset(copy_row(), copy_chunk());
  if (valid >= kRows) {
#pragma unroll
    for (int first = 0; first < kRows; first += kRowsAtOnce)
      copy_async(target + first * kRowBytes, source + first * token_stride);
  } else {
#pragma unroll
    for (int first = 0; first < kRows; first += kRowsAtOnce)
      copy_async_or_zero(target + first * kRowBytes, source + first * token_stride, copy_row() + first < valid);
  }
}

// ---- Fragments: what one warp's 32 lanes hold of a small matrix.

// Four 8x8 matrices; lane l gives the address of row l % 8 of matrix l / 8, and receives one pair of each.
DEVICE void load_matrices(u32 (&matrices)[4], u32 row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(row_address));
}

DEVICE void load_matrices_transposed(u32 (&matrices)[4], u32 row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(row_address));
}

// Sixteen bytes of a lane to or from shared memory.
DEVICE void write_words(u32 address, const u32 (&words)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}

DEVICE void read_words(u32 (&words)[4], u32 address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// c (16 x 8, fp32) += a (16 x 16) * b (16 x 8). With g = lane / 4 and p = 2 * (lane % 4), a lane holds
// c: (g, p), (g, p + 1), (g + 8, p), (g + 8, p + 1);   a: pairs at (g, p), (g + 8, p), (g, p + 8), (g + 8, p + 8);
// b: pairs along the rows at (p, g), (p + 8, g).
DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b_low, u32 b_high) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
}
