// What the backward kernels share: the record of a mask row, which row_stats writes and the others read.
//
// A record holds two numbers for each of the row's kBlockQ queries: first the LSE in base 2, by which P = 2^(score - LSE),
// then delta = rowsum(d_out * out), by which dS = P (dP - delta). Queries beyond the end have an LSE of infinity: P = 0.

constexpr int kRecordFloats = 2 * kBlockQ;

// Where a query's number stands in its half of a record. In the fragment of a product whose columns are queries, a thread
// holds the pairs 2c, 2c + 1 and 8 + 2c, 9 + 2c of every 16: here the four are neighbours and one 16-byte read.
DEVICE int record_place(int query) {
  return (query & ~15) | (query & 6) << 1 | (query & 8) >> 2 | (query & 1);
}
