// Rotary positions over the last 64 dimensions of bf16 vectors, and ACT8 rounding behind them. A
// thread holds eight neighbouring values; only tails are touched where nothing is rounded.

#ifdef HOST_TWIN
#include "cuda_host.h"
#else
#include <cuda_runtime.h>
#endif

#include <cstdint>

#include "../act8.cuh"
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

// A warp takes two vectors of DIM values whole.
constexpr int kVectors = 2, kHeads = kThreads / 32 * kVectors;
template <int DIM>
__global__ void __launch_bounds__(kThreads) whole_kernel(const Call p) {
  constexpr int kEach = DIM / 256;
  const int lane = threadIdx.x % 32, first = blockIdx.y * kHeads + threadIdx.x / 32 * kVectors;
  const long long row = blockIdx.x;
  previous_kernel_wait();
  next_kernel_may_start();
  if (first >= p.heads) return;
  uint4 data[kVectors][kEach];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const uint16_t* from = p.x + row * p.row_stride + min(first + v, p.heads - 1) * p.head_stride;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      data[v][i] = *reinterpret_cast<const uint4*>(from + (i * 32 + lane) * 8);
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    uint16_t* to = p.out + row * p.out_row + (first + v) * p.out_head;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      Eight own;
      own.unpack(data[v][i]);
      if (i == kEach - 1 && lane >= 32 - kTailVectors) {
        turn(p, own, row, lane - (32 - kTailVectors));
        own.unpack(own.pack());
      }
      own.round();
      if (first + v < p.heads) *reinterpret_cast<uint4*>(to + (i * 32 + lane) * 8) = own.pack();
    }
  }
}

#ifdef HOST_TWIN
inline int cudaGetLastError() { return 0; }
#endif

}  // namespace

// x, out: bf16 in 16-byte aligned pieces, strides in values; cos, sin [rows, 32] fp32. Without
// `quantize` only tails of `out` are written, so it is x. `quantize` takes dim 512.
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
  const int per_block = quantize ? kHeads : kTailHeads;
  const dim3 grid(static_cast<unsigned>(rows), (p.heads + per_block - 1) / per_block);
  if (quantize) {
    if (dim != 512) return -1;
    LAUNCH_NEXT(whole_kernel<512>, grid, dim3(kThreads), 0, stream, p);
  } else {
    LAUNCH_NEXT(tails_kernel, grid, dim3(kThreads), 0, stream, p);
  }
  return static_cast<int>(cudaGetLastError());
}
