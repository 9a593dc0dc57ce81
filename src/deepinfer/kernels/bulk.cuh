// Bulk copies into shared memory and the barriers that tell of their end, on SM90.
#pragma once

#include <cstdint>

#ifdef HOST_TWIN
#include "cuda_host_copy.h"
#else
__device__ inline uint32_t address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}
__device__ inline void barrier_begin(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(barrier)) : "memory");
}
__device__ inline void barriers_seen() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
// What this block read of shared memory, before a barrier, was read before copies that follow write.
__device__ inline void reads_before_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// A copy of a multiple of 16 bytes that completes the barrier's phase.
__device__ inline void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  const uint32_t at = address(barrier);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
      "r"(address(to)), "l"(from), "r"(bytes), "r"(at) : "memory");
}
__device__ inline void barrier_wait(uint64_t* barrier, uint32_t phase) {
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(address(barrier)), "r"(phase) : "memory");
  } while (!done);
}
// A barrier that `count` signals complete, phase after phase: what is written before a signal is seen
// behind the wait. Nobody may be two phases ahead of a wait.
__device__ inline void signals_begin(uint64_t* barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(count)
               : "memory");
}
__device__ inline void signal(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(address(barrier))
               : "memory");
}
__device__ inline void signals_wait(uint64_t* barrier, uint32_t phase) {
  barrier_wait(barrier, phase);
}
// Copies of 16 bytes by a thread, which alone waits for them.
__device__ inline void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address(to)), "l"(from) : "memory");
}
__device__ inline void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ inline void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
#endif
