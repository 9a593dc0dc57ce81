// Launchers of the packed products, one per schedule.
#include <cuda_runtime.h>

#include "core.cuh"

#define LAUNCHER(name, ...)                                                                         \
  extern "C" int name(const void* x, const void* token_scale, const void* source,                   \
                      const void* weight, const void* row_scale, const void* offsets, void* out,    \
                      long long experts, long long outputs, long long inputs, long long row_bytes,  \
                      long long rows, long long least, long long most, long long blocks,            \
                      void* stream) {                                                               \
    Args a = {static_cast<const unsigned char*>(x),                                                 \
              static_cast<const float*>(token_scale),                                               \
              static_cast<const long long*>(source),                                                \
              static_cast<const unsigned char*>(weight),                                            \
              static_cast<const float*>(row_scale),                                                 \
              static_cast<const long long*>(offsets),                                               \
              static_cast<unsigned short*>(out),                                                    \
              static_cast<int>(experts),                                                            \
              static_cast<int>(outputs),                                                            \
              static_cast<int>(inputs),                                                             \
              static_cast<int>(row_bytes),                                                          \
              static_cast<int>(rows),                                                               \
              static_cast<int>(least),                                                              \
              static_cast<int>(most)};                                                              \
    return launch<Kernel<__VA_ARGS__>>(a, blocks, stream);                                          \
  }

#include "schedules.cuh"
