// Launchers of the packed products, one per schedule.
#include <cuda_runtime.h>

#include "core.cuh"

#define LAUNCHER(name, ...)                                                                         \
  extern "C" int name(const void* x, const void* token_scale, const void* source,                   \
                      const void* weight, const void* row_scale, const void* offsets, void* out,    \
                      long long experts, long long outputs, long long inputs, long long row_bytes,  \
                      long long rows, long long part_bytes, long long out_row, long long blocks,    \
                      long long cluster, void* stream) {                                            \
    Args a = {static_cast<const unsigned char*>(x),                                                 \
              static_cast<const float*>(token_scale),                                               \
              static_cast<const int*>(source),                                                      \
              static_cast<const unsigned char*>(weight),                                            \
              static_cast<const float*>(row_scale),                                                 \
              static_cast<const int*>(offsets),                                                     \
              static_cast<unsigned short*>(out),                                                    \
              static_cast<int>(experts),                                                            \
              static_cast<int>(outputs),                                                            \
              static_cast<int>(inputs),                                                             \
              static_cast<int>(row_bytes),                                                          \
              static_cast<int>(rows),                                                               \
              static_cast<int>(part_bytes),                                                         \
              static_cast<int>(out_row)};                                                           \
    return launch<Kernel<__VA_ARGS__>>(a, blocks, cluster, stream);                                 \
  }

// format, consumer groups, 64-row tiles a group, tokens a tile, K blocks a stage, stages, promote
LAUNCHER(fp8_32, FP4_AS_FP8, 4, 1, 32, 2, 8, true)
LAUNCHER(fp8_64, FP4_AS_FP8, 2, 2, 64, 2, 7, true)
LAUNCHER(fp8_128, FP4_AS_FP8, 2, 2, 128, 2, 5, true)
LAUNCHER(fp8_128_fast, FP4_AS_FP8, 2, 2, 128, 2, 5, false)
LAUNCHER(exact_32, FP4_AS_BF16, 4, 1, 32, 2, 7, false)
LAUNCHER(exact_64, FP4_AS_BF16, 2, 2, 64, 2, 5, false)
LAUNCHER(exact_128, FP4_AS_BF16, 2, 2, 128, 1, 7, false)
// the same, dense; blocks a multiprocessor
LAUNCHER(dense_32, FP8_AS_BF16, 2, 1, 32, 1, 8, false, true, 2)
LAUNCHER(dense_96, FP8_AS_BF16, 2, 2, 96, 1, 6, false, true)
LAUNCHER(dense_128, FP8_AS_BF16, 2, 2, 128, 1, 6, false, true)
