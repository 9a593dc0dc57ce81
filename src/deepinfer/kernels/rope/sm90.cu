// Rotary positions over the last 64 dimensions of bf16 vectors, and ACT8 or FP4 rounding behind. A
// thread holds eight neighbouring values; only tails are touched where nothing is rounded.

#include "../act8.cuh"
#include "../card.cuh"
#include "../chain.cuh"

namespace {

constexpr int kThreads = 256, kTail = 64, kHalf = kTail / 2, kTailVectors = kTail / 8;

struct Call {
  const uint16_t* x;        // [rows, heads, dim]; strides in values
  const float *cos, *sin;   // [rows, 32]
  uint16_t* out;            // [rows, heads, dim], or x itself with its strides
  int heads, dim;
  long long row_stride, head_stride, out_row, out_head;
  float sign;               // of the sines
};

__device__ inline void turn(const Call& p, Eight& v, long long row, int tail_vector) {
  const float4 c = reinterpret_cast<const float4*>(p.cos + row * kHalf)[tail_vector];
  float4 s = reinterpret_cast<const float4*>(p.sin + row * kHalf)[tail_vector];
  s.x *= p.sign, s.y *= p.sign, s.z *= p.sign, s.w *= p.sign;
  v.turn(c, s);
}

// Eight threads a vector, which stays where it is but for its tail.
constexpr int kTailHeads = kThreads / kTailVectors;
__global__ void __launch_bounds__(kThreads) tails_kernel(const Call p) {
  const int head = blockIdx.y * kTailHeads + threadIdx.x / kTailVectors;
  const int part = threadIdx.x % kTailVectors;
  previous_kernel_wait();
  next_kernel_may_start();
  if (head >= p.heads) return;
  const long long row = blockIdx.x, tail = p.dim - kTail + part * 8;
  Eight v;
  v.unpack(*reinterpret_cast<const uint4*>(p.x + row * p.row_stride + head * p.head_stride + tail));
  turn(p, v, row, part);
  *reinterpret_cast<uint4*>(p.out + row * p.out_row + head * p.out_head + tail) = v.pack();
}

// Groups of 32 values, those of four neighbouring threads, to FP4 and back. A group's scale is the
// least power of two that is not below its largest magnitude / 6.
__device__ inline void round_four(Eight& v) {
  float most = 6 * 0x1p-126f;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(v.at[i]));
  most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
  most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
  const uint32_t up = (__float_as_uint(most) + 0x3FFFFFu) & 0x7F800000u;  // 6 = 1.5 * 2^2
  const float scale = __uint_as_float(up - (2u << 23));
  const float inverse = __uint_as_float((254u + 2u << 23) - up);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float size = fminf(fabsf(v.at[i] * inverse), 6.f);
    const float step = size < 2.f ? 0.5f : size < 4.f ? 1.f : 2.f;
    const float fine = size < 2.f ? 2.f : size < 4.f ? 1.f : 0.5f;
    v.at[i] = copysignf((size * fine + 0x1p23f - 0x1p23f) * step * scale, v.at[i]);
  }
}

// A warp takes vectors of DIM values whole: twice one of 512, or two of 128.
constexpr int kVectors = 2;
template <int DIM>
__global__ void __launch_bounds__(kThreads) whole_kernel(const Call p) {
  constexpr int kLanes = DIM < 256 ? DIM / 8 : 32, kSide = 32 / kLanes, kEach = DIM / 8 / kLanes;
  constexpr int kHeads = kThreads / 32 * kVectors * kSide;
  const int lane = threadIdx.x % kLanes;
  const int begin = blockIdx.y * kHeads + threadIdx.x / 32 * (kVectors * kSide);
  const int first = begin + threadIdx.x / kLanes % kSide;
  const long long row = blockIdx.x;
  previous_kernel_wait();
  next_kernel_may_start();
  if (begin >= p.heads) return;
  uint4 data[kVectors][kEach];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const uint16_t* from = p.x + row * p.row_stride + min(first + v * kSide, p.heads - 1) * p.head_stride;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      data[v][i] = *reinterpret_cast<const uint4*>(from + (i * kLanes + lane) * 8);
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    uint16_t* to = p.out + row * p.out_row + (first + v * kSide) * p.out_head;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      Eight own;
      own.unpack(data[v][i]);
      if (i == kEach - 1 && lane >= kLanes - kTailVectors) {
        turn(p, own, row, lane - (kLanes - kTailVectors));
        own.unpack(own.pack());
      }
      if (DIM == 128) {
        round_four(own);
      } else {
        own.round();
      }
      if (first + v * kSide < p.heads) {
        *reinterpret_cast<uint4*>(to + (i * kLanes + lane) * 8) = own.pack();
      }
    }
  }
}

}  // namespace

// x, out: bf16 in 16-byte aligned pieces, strides in values; cos, sin [rows, 32] fp32. Without
// `quantize` only tails of `out` are written, so it is x. `quantize` takes ACT8 of dim 512 or FP4 of
// dim 128.
extern "C" int rotate_tail(const void* x, const void* cos, const void* sin, void* out,
                           long long rows, long long heads, long long dim, long long row_stride,
                           long long head_stride, long long out_row, long long out_head,
                           long long inverse, long long quantize, cudaStream_t stream) {
  Call p;
  p.x = static_cast<const uint16_t*>(x), p.out = static_cast<uint16_t*>(out);
  p.cos = static_cast<const float*>(cos), p.sin = static_cast<const float*>(sin);
  p.heads = static_cast<int>(heads), p.dim = static_cast<int>(dim);
  p.row_stride = row_stride, p.head_stride = head_stride;
  p.out_row = out_row, p.out_head = out_head;
  p.sign = inverse ? -1.f : 1.f;
  const int per_block = quantize ? kThreads / 32 * kVectors * (dim == 128 ? 2 : 1) : kTailHeads;
  const dim3 grid(static_cast<unsigned>(rows), (p.heads + per_block - 1) / per_block);
  if (quantize && dim == 128) {
    LAUNCH_NEXT(whole_kernel<128>, grid, dim3(kThreads), 0, stream, p);
  } else if (quantize) {
    if (dim != 512) return -1;
    LAUNCH_NEXT(whole_kernel<512>, grid, dim3(kThreads), 0, stream, p);
  } else {
    LAUNCH_NEXT(tails_kernel, grid, dim3(kThreads), 0, stream, p);
  }
  return static_cast<int>(cudaGetLastError());
}
