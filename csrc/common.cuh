// Shared by every kernel: plain types, the element type, tensor views and one-instruction wrappers.
//
// Nothing here (or anywhere in csrc/) includes a header: a module is a list of files that the runtime concatenates, so
// the same text compiles with NVRTC on a user's machine and with nvcc in a release build.
// Options: -DELEMENT_FP16=1 for half precision (bfloat16 otherwise), -DHEAD_DIM=64|128.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__

#ifdef ELEMENT_FP16
#define ELEMENT "f16"
#else
#define ELEMENT "bf16"
#endif

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif

constexpr int kHeadDim = HEAD_DIM;
constexpr int kBlockQ = 128;  // query tokens of a mask row
constexpr int kBlockK = 64;   // key tokens of a mask column

// A (batch, head, token, channel) tensor with unit channel stride; strides count elements.
struct TensorView {
  u16* data;
  i64 batch_stride, head_stride, token_stride;

  DEVICE u16* row(int batch, int head, int token) const {
    return data + batch * batch_stride + head * head_stride + token * token_stride;
  }
};

DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

DEVICE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// 2^x and log2(x), one instruction each; subnormal results flush to zero.
DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats to two elements, rounded to nearest even; `low` is the lower half.
DEVICE u32 pack_elements(float low, float high) {
  u32 packed;
  asm("cvt.rn." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// One element to float.
DEVICE float to_float(u16 bits) {
  float value;
#ifdef ELEMENT_FP16
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
#else
  asm("mov.b32 %0, {%1, %2};" : "=f"(value) : "h"(static_cast<u16>(0)), "h"(bits));
#endif
  return value;
}

// The two elements of a packed pair.
DEVICE float low_element(u32 pair) {
#ifdef ELEMENT_FP16
  return to_float(static_cast<u16>(pair));
#else
  return __uint_as_float(pair << 16);
#endif
}

DEVICE float high_element(u32 pair) {
#ifdef ELEMENT_FP16
  return to_float(static_cast<u16>(pair >> 16));
#else
  return __uint_as_float(pair & 0xffff0000u);
#endif
}
