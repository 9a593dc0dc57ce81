// The instructions of SM90a that the packed products use, by their names. Tests put a host's in place.
#pragma once

#include "../chain.cuh"

#define SHARED(name) extern __shared__ unsigned char name[]

__device__ inline u32 times(u32 a, u32 b) {
  u32 out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// ---- barriers, copies ----------------------------------------------------------------------------

__device__ inline u32 address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}
__device__ inline void barrier_init(u32 bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
__device__ inline void barrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ inline void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}
__device__ inline void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done;\nbra again;\ndone:\n}\n" ::"r"(bar), "r"(parity)
      : "memory");
}
__device__ inline void bulk_copy(u32 target, const void* source, u32 bytes, u32 bar, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(target), "l"(source), "r"(bytes), "r"(bar), "l"(policy)
      : "memory");
}
__device__ inline u64 read_once() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline void copy16(u32 target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}
__device__ inline void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ inline void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
// The barrier hears of this thread once all its copies so far are there.
__device__ inline void copies_arrive(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
__device__ inline void group_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void group_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
__device__ inline void group_wait() {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
__device__ inline void group_but_one_wait() {
  asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}
__device__ inline uint4 load16(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at));
  return v;
}
// Four 8 x 8 tiles of 16 bits: of tile i, rows at the addresses of lanes 8 i..8 i + 7.
__device__ inline void load_matrices(u32 at, u32* v) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(at));
}
// A warp's product: 16 rows by 8 tokens by 16 inputs, bf16.
__device__ inline void warp_product(float* d, const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline u32 load4(u32 at) {
  u32 v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}
__device__ inline u32 pack_bf16(float low, float high) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
// Two e4m3 codes of two values, rounded to even and clipped to +-448, and the values of two codes.
__device__ inline u32 e4m3_pair(float low, float high) {
  unsigned short out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  return out;
}
__device__ inline void e4m3_values(u32 pair, float& low, float& high) {
  u32 both;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"(static_cast<unsigned short>(pair)));
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}\n"
      : "=f"(low), "=f"(high)
      : "r"(both));
}
// What another block may have written in this launch: never by way of the first-level cache.
__device__ inline float load_written(const float* at) { return __ldcg(at); }
__device__ inline uint4 load_written(const uint4* at) { return __ldcg(at); }
// Values that the compiler must have in their registers here.
template <int N>
__device__ inline void keep_in_place(float (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(v[i])::"memory");
}
template <int N>
__device__ inline void keep_in_place(u32 (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(v[i])::"memory");
}
__device__ inline void keep_in_place(u32& v) { asm volatile("" : "+r"(v)::"memory"); }
__device__ inline void store_word(u32 at, u32 v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}
__device__ inline void store4(u32 at, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
}
// Two 8 x 8 tiles of 16 bits, transposed; lanes 0..15 give the addresses of the rows written.
__device__ inline void store_transposed(u32 at, u32 first, u32 second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(first),
               "r"(second)
               : "memory");
}
__device__ inline void load_remote(u32 at, int rank, float& first, float& second) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(at), "r"(rank));
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(first), "=f"(second)
               : "r"(remote)
               : "memory");
}

// ---- order ---------------------------------------------------------------------------------------

__device__ inline int cluster_blocks() {
  int n;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
  return n;
}
__device__ inline int cluster_place() {
  int n;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(n));
  return n;
}
__device__ inline void cluster_barrier() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ inline void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void shared_to_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Between blocks: a number told once all writes before it are there, and waited for.
__device__ inline void tell(u32* at, u32 value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
__device__ inline void wait_told(const u32* at, u32 value) {
  for (;;) {
    u32 now;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(at) : "memory");
    if (now >= value) return;
    __nanosleep(64);
  }
}
// One more who tells, with all writes before it; sees those of the ones before, whose number it is.
__device__ inline u32 tell_one(u32* at) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(at) : "memory");
  return before;
}
__device__ inline void writes_before_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ inline void into_second_level(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}
template <int N>
__device__ inline void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ inline void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
