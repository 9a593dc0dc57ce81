// Blocks of a launch that meet at counters in memory, and products of a warp, on SM90. Blocks that
// wait must all run at the same time: no more are launched than the card has multiprocessors.
#pragma once

#include "card.cuh"
#include "chain.cuh"

#ifdef HOST_TWIN
#include "cuda_host_site.h"
#else
// acc[16, 8] += a[16, 16] b[16, 8], bf16 pairs
__device__ inline void multiply(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline uint4 load_once(const uint16_t* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
// What a thread wrote, or saw behind a barrier, is seen behind a wait for this count.
__device__ inline void count_in(uint32_t* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ inline void wait_for(const uint32_t* counter, uint32_t least) {
  uint32_t seen;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  } while (seen < least);
}
// Also counts out: the last of all to leave sets the counter back.
__device__ inline uint32_t leave(uint32_t* counter) { return atomicAdd(counter, 1u); }
__device__ inline void was_last(uint32_t* counter, uint32_t left, uint32_t last) {
  if (left == last - 1) atomicExch(counter, 0u);
}
__device__ inline void count_out(uint32_t* counter, uint32_t last) {
  was_last(counter, leave(counter), last);
}
// What another block has written in this launch.
__device__ inline float fresh(const float* p) { return __ldcg(p); }
__device__ inline float4 fresh(const float4* p) { return __ldcg(p); }
// Launches a kernel whose blocks meet; returns an error's number or 0.
template <typename Parameters>
int launch_meeting(void (*kernel)(Parameters), dim3 grid, dim3 block, int shared,
                   cudaStream_t stream, const Parameters& parameters) {
  const int status = make_room(kernel, shared);
  if (status) return status;
  return static_cast<int>(LAUNCH_NEXT(kernel, grid, block, shared, stream, parameters));
}
#endif
