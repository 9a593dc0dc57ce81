// The gate of an expert on bf16 rows, rounded with ACT8 where asked for: eight neighbouring values a
// thread.

#include "../act8.cuh"
#include "../card.cuh"
#ifndef HOST_TWIN
#define LAUNCH(kernel, grid, block, shared, stream, ...) \
  kernel<<<grid, block, shared, stream>>>(__VA_ARGS__)
#endif

namespace {

constexpr int kThreads = 128;

struct Call {
  const uint16_t *gate, *up;  // [rows, dim], strides in values
  const float* weight;        // [rows], or null
  uint16_t* out;              // [rows, dim]
  int dim;
  long long gate_row, up_row;
  float limit;                // 0: none
  bool quantize;
};

__global__ void __launch_bounds__(kThreads) gate_kernel(const Call p) {
  const long long row = blockIdx.x;
  const int place = (blockIdx.y * kThreads + threadIdx.x) * 8, from = min(place, p.dim - 8);
  Eight g, u;
  g.unpack(*reinterpret_cast<const uint4*>(p.gate + row * p.gate_row + from));
  u.unpack(*reinterpret_cast<const uint4*>(p.up + row * p.up_row + from));
  const float weight = p.weight == nullptr ? 1.f : p.weight[row];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float a = g.at[i], b = u.at[i];
    if (p.limit > 0.f) {  // NaN stays
      a = a > p.limit ? p.limit : a;
      b = b > p.limit ? p.limit : (b < -p.limit ? -p.limit : b);
    }
    g.at[i] = weight * (__fdiv_rn(a, 1.f + expf(-a)) * b);
  }
  if (p.quantize) {
    g.unpack(g.pack());
    g.round();
  }
  if (place < p.dim) *reinterpret_cast<uint4*>(p.out + row * p.dim + place) = g.pack();
}

}  // namespace

// gate, up, out: bf16 in 16-byte aligned pieces, dim a multiple of 32; weight may be null.
extern "C" int swiglu(const void* gate, const void* up, const void* weight, void* out,
                      long long rows, long long dim, long long gate_row, long long up_row,
                      long long quantize, double limit, cudaStream_t stream) {
  Call p;
  p.gate = static_cast<const uint16_t*>(gate), p.up = static_cast<const uint16_t*>(up);
  p.weight = static_cast<const float*>(weight), p.out = static_cast<uint16_t*>(out);
  p.dim = static_cast<int>(dim);
  p.gate_row = gate_row, p.up_row = up_row;
  p.limit = static_cast<float>(limit), p.quantize = quantize != 0;
  const dim3 grid(static_cast<unsigned>(rows), (p.dim / 8 + kThreads - 1) / kThreads);
  LAUNCH(gate_kernel, grid, dim3(kThreads), 0, stream, p);
  return static_cast<int>(cudaGetLastError());
}
