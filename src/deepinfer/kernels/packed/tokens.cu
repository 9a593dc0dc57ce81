// Launchers of what stands before and between the packed products.
#include <cuda_runtime.h>

#include "tokens.cuh"

namespace {

// A row for each block, beginning while the kernel before it ends.
template <class... Parameters, class... Arguments>
int start(void (*kernel)(Parameters...), long long rows, long long threads, void* stream,
          Arguments... arguments) {
  cudaError_t e =
      launch_next(kernel, dim3(static_cast<unsigned>(rows)), dim3(static_cast<unsigned>(threads)), 0,
                  static_cast<cudaStream_t>(stream), arguments...);
  return e != cudaSuccess ? e : cudaGetLastError();
}

}  // namespace

extern "C" int gather(const void* x, void* out, const void* source, const void* offsets, long long rows,
                      long long experts, long long inputs, long long x_row, void* counts,
                      long long words, void* stream) {
  return start(gather_kernel, rows, COPIERS, stream, static_cast<const unsigned short*>(x),
               static_cast<unsigned short*>(out), static_cast<const long long*>(source),
               static_cast<const long long*>(offsets), experts, inputs, x_row,
               static_cast<u32*>(counts), words);
}

extern "C" int fold(const void* x, void* codes, void* scale, const void* source, const void* offsets,
                    long long rows, long long experts, long long inputs, long long x_row,
                    void* counts, long long words, void* stream) {
  return start(fold_kernel, rows, COPIERS, stream, static_cast<const unsigned short*>(x),
               static_cast<unsigned char*>(codes), static_cast<float*>(scale),
               static_cast<const long long*>(source), static_cast<const long long*>(offsets), experts,
               inputs, x_row, static_cast<u32*>(counts), words);
}

extern "C" int gate(const void* gate_up, const void* weight, void* out, void* scale,
                    const void* offsets, long long rows, long long experts, long long inputs,
                    double limit, long long quantize, long long fold, void* stream) {
  const auto kernel = fold       ? gate_kernel<false, true>
                      : quantize ? gate_kernel<true, false>
                                 : gate_kernel<false, false>;
  return start(kernel, rows, inputs / VALUES, stream, static_cast<const unsigned short*>(gate_up),
               static_cast<const float*>(weight), out, static_cast<float*>(scale),
               static_cast<const long long*>(offsets), experts, inputs, limit);
}
