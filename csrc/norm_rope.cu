// What a Wan layer does to its queries and keys before they attend, in one pass over memory: RMSNorm over all channels
// of a token (Wan normalises across heads), then the rotary embedding of each head.
//
// One thread block takes one token. Its channels stay in registers between the two steps, which on their own would each
// read and write the whole tensor. Rounded where the two steps round, so the numbers are theirs.

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kVector = 8;  // channels of a 16-byte load, all of one head
constexpr int kPairs = kVector / 2;
static_assert(kThreads * kVector % kHeadDim == 0, "all vectors of a thread have the same place in their heads");

struct NormRopeParams {
  const uint4* x;          // (rows, channels)
  const uint4* weight;     // (channels,)
  const float4* rotation;  // (period, D / 2): the 2 x 2 matrix of each pair of channels, by rows
  uint4* out;              // (rows, channels)
  int channels, period;    // row r is rotated as token r % period
  float epsilon;
};

// Sum over the thread block in a fixed order; every thread gets it.
DEVICE float sum_of_block(float value) {
  __shared__ float of_warps[kWarps];
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(~0u, value, lanes);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0.f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) value += of_warps[warp];
  return value;
}

// A pair of channels, normalised and then rotated.
DEVICE u32 normalised_and_rotated(u32 pair, u32 weights, float scale, float4 matrix) {
  const u32 normalised = pack_elements(low_element(pair) * scale * low_element(weights),
                                       high_element(pair) * scale * high_element(weights));
  const float x = low_element(normalised), y = high_element(normalised);
  return pack_elements(matrix.x * x + matrix.y * y, matrix.z * x + matrix.w * y);
}

// kVectors: of a thread, at most.
template <int kVectors>
DEVICE void norm_and_rotate(const NormRopeParams& p) {
  const i64 row = blockIdx.x;
  const int vectors = p.channels / kVector;
  const uint4* x = p.x + row * vectors;
  uint4* out = p.out + row * vectors;

  uint4 channels[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int vector = i * kThreads + threadIdx.x;
    channels[i] = vector < vectors ? x[vector] : make_uint4(0, 0, 0, 0);
  }
  const float4* rotation = p.rotation + row % p.period * (kHeadDim / 2) + threadIdx.x * kPairs % (kHeadDim / 2);
  const float4 matrices[kPairs] = {rotation[0], rotation[1], rotation[2], rotation[3]};

  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const u32 pairs[kPairs] = {channels[i].x, channels[i].y, channels[i].z, channels[i].w};
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const float low = low_element(pairs[pair]), high = high_element(pairs[pair]);
      squares += low * low + high * high;
    }
  }
  const float scale = rsqrtf(sum_of_block(squares) / p.channels + p.epsilon);

#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int vector = i * kThreads + threadIdx.x;
    if (vector < vectors) {
      const uint4 weights = p.weight[vector];
      out[vector] = make_uint4(normalised_and_rotated(channels[i].x, weights.x, scale, matrices[0]),
                               normalised_and_rotated(channels[i].y, weights.y, scale, matrices[1]),
                               normalised_and_rotated(channels[i].z, weights.z, scale, matrices[2]),
                               normalised_and_rotated(channels[i].w, weights.w, scale, matrices[3]));
    }
  }
}

// By the most channels of a token: fewer leave registers for more thread blocks side by side.
extern "C" __global__ void __launch_bounds__(kThreads) norm_rope_2048(const __grid_constant__ NormRopeParams p) {
  norm_and_rotate<2>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads) norm_rope_5120(const __grid_constant__ NormRopeParams p) {
  norm_and_rotate<5>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads) norm_rope_8192(const __grid_constant__ NormRopeParams p) {
  norm_and_rotate<8>(p);
}
