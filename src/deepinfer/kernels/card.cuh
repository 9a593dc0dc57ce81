// A card; or, for the tests, a machine in its place.
#pragma once

#include <cstdint>

#ifdef HOST_TWIN
#include "cuda_host.h"
#else
#include <cuda_runtime.h>
// A block's shared memory, of the size that its launch says.
#define SHARED(name, alignment) extern __shared__ __align__(alignment) unsigned char name[]
// Lets a kernel's blocks have so much of it; returns an error's number or 0.
template <typename Kernel>
int make_room(Kernel kernel, int bytes) {
  if (bytes <= 48 * 1024) return 0;
  return static_cast<int>(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}
#endif
