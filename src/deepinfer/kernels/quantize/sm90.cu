// ACT8 rounding of bf16 values and back, eight neighbouring values a thread.

#include "../act8.cuh"
#include "../card.cuh"
#include "../chain.cuh"

namespace {

constexpr int kThreads = 256;

template <int EACH>
__global__ void __launch_bounds__(kThreads)
round_kernel(const uint4* x, uint4* out, long long vectors) {
  const long long first = static_cast<long long>(blockIdx.x) * kThreads * EACH + threadIdx.x;
  uint4 data[EACH];
  previous_kernel_wait();
  next_kernel_may_start();
#pragma unroll
  for (int i = 0; i < EACH; ++i) data[i] = x[min(first + i * kThreads, vectors - 1)];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    Eight v;
    v.unpack(data[i]);
    v.round();
    if (first + i * kThreads < vectors) out[first + i * kThreads] = v.pack();
  }
}

template <int EACH>
int run(const void* x, void* out, long long vectors, cudaStream_t stream) {
  const long long each = kThreads * EACH;
  LAUNCH_NEXT(round_kernel<EACH>, dim3(static_cast<unsigned>((vectors + each - 1) / each)),
         dim3(kThreads), 0, stream, static_cast<const uint4*>(x), static_cast<uint4*>(out), vectors);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace

// x, out: whole groups of 32 bf16 values, aligned to 16 bytes.
extern "C" int round_act8(const void* x, void* out, long long values, cudaStream_t stream) {
  const long long vectors = values / 8;
  return vectors > 1 << 18 ? run<4>(x, out, vectors, stream) : run<1>(x, out, vectors, stream);
}
