// Launchers of the dense products, one per schedule.
#include <cuda_runtime.h>

#include <algorithm>
using std::max;
using std::min;

#include "dense.cuh"
#include "slim.cuh"

#define PRODUCT(name, launch, K)                                                                    \
  extern "C" int name(const void* x, const void* weight, const void* row_scale, void* out,          \
                      long long groups, long long outputs, long long inputs, long long row_bytes,   \
                      long long rows, long long share, long long out_row, long long rounds,         \
                      long long programs, long long parts, void* stream) {                          \
    DenseArgs a = {static_cast<const unsigned char*>(weight),                                       \
                   static_cast<const float*>(row_scale),                                            \
                   static_cast<unsigned short*>(out),                                               \
                   static_cast<int>(groups),                                                        \
                   static_cast<int>(outputs),                                                       \
                   static_cast<int>(inputs),                                                        \
                   static_cast<int>(rows),                                                          \
                   static_cast<int>(out_row),                                                       \
                   static_cast<int>(share),                                                         \
                   static_cast<int>(rounds)};                                                       \
    return launch<K>(a, x, row_bytes, programs, parts, stream);                                     \
  }
#define DENSE(name, ...)                                   \
  using Of_##name = Dense<__VA_ARGS__>;                    \
  PRODUCT(name, launch_dense, Of_##name)                   \
  extern "C" int name##_held(long long cluster) {          \
    return dense_held<Of_##name>(cluster);                 \
  }
#define SLIM(name, ...)                  \
  using Of_##name = Slim<__VA_ARGS__>;   \
  PRODUCT(name, launch_slim, Of_##name)

#include "dense_schedules.cuh"
