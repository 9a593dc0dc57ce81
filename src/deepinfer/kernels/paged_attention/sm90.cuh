// Instructions of SM90a that CUDA C++ has no words for.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>
#ifdef WATCH
#include <stdio.h>
#endif

#define DEVICE __device__ __forceinline__

DEVICE void init_barrier(uint32_t bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

DEVICE void arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

DEVICE void arrive_expect(uint32_t bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}

DEVICE bool passed(uint32_t bar, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
    return done;
}

DEVICE void wait(uint32_t bar, uint32_t parity) {
#ifdef WATCH
    for (int i = 0; !passed(bar, parity); i++)
        if (i > WATCH) {
            if (threadIdx.x % 32 == 0)
                printf("stuck: block %d warp %d barrier %d parity %u\n", blockIdx.x,
                       threadIdx.x / 32, int(bar), parity);
            __trap();
        }
#else
    while (!passed(bar, parity)) {
    }
#endif
}

// Packed entries, which nothing writes meanwhile and nobody reads again soon.
DEVICE void fetch64(uint32_t (&x)[3], unsigned long long from) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(x[0]), "=r"(x[1])
                 : "l"(from));
}

DEVICE void fetch128(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, unsigned long long from) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "l"(from));
}

DEVICE uint32_t fetch8(unsigned long long from) {
    uint32_t x;
    asm volatile("ld.global.nc.L1::no_allocate.u8 %0, [%1];" : "=r"(x) : "l"(from));
    return x;
}

DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void copy_box(uint32_t to, const CUtensorMap* map, int column, int row, uint32_t bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(bar)
        : "memory");
}

DEVICE void store_box(const CUtensorMap* map, int column, int row, uint32_t from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::
                     "l"(map), "r"(column), "r"(row), "r"(from)
                 : "memory");
}

DEVICE void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

template <int LEFT>
DEVICE void stores_read() {  // what all stores but LEFT groups take may be overwritten
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

DEVICE void store_passed(float* to, float4 x) { __stcg(reinterpret_cast<float4*>(to), x); }
DEVICE float4 load_passed(const float* from) { return __ldcg(reinterpret_cast<const float4*>(from)); }

DEVICE float load_passed_one(const float* from) { return __ldcg(from); }

DEVICE void raise(uint32_t* flag) {  // what the block stored before a fence may be read
    asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
}

DEVICE void lower(uint32_t* flag) {  // once it is up, for the next launch
    uint32_t up = 0;
    for (int i = 0; !up; i++) {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(up) : "l"(flag) : "memory");
#ifdef WATCH
        if (i > WATCH) __trap();
#endif
    }
    asm volatile("st.relaxed.gpu.global.u32 [%0], 0;" ::"l"(flag) : "memory");
    __threadfence();
}

DEVICE void publish(uint32_t* flag, bool one) {  // what this warp stored
    __threadfence();
    __syncwarp();
    if (one) raise(flag);
}

DEVICE void await(uint32_t* flag, bool one) {
    if (one) lower(flag);
    __syncwarp();
}

DEVICE uint32_t load32(uint32_t at) {
    uint32_t x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}

DEVICE uint4 load_words(uint32_t at) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at)
                 : "memory");
    return x;
}

DEVICE float4 load_floats(uint32_t at) {
    const uint4 x = load_words(at);
    return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z),
                       __uint_as_float(x.w));
}

DEVICE uint32_t load8(uint32_t at) {
    uint32_t x;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}

DEVICE float loadf(uint32_t at) { return __uint_as_float(load32(at)); }

DEVICE void store32(uint32_t at, uint32_t x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}

DEVICE void store8(uint32_t at, uint32_t x) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}

DEVICE void storef(uint32_t at, float x) { store32(at, __float_as_uint(x)); }

DEVICE void store128(uint32_t at, const uint32_t (&x)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x[0]), "r"(x[1]),
                 "r"(x[2]), "r"(x[3])
                 : "memory");
}

DEVICE void store_words(uint32_t at, const uint4& x) {
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
    store128(at, words);
}

DEVICE void store_floats(uint32_t at, const float4& x) {
    const uint32_t words[4] = {__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z),
                               __float_as_uint(x.w)};
    store128(at, words);
}

DEVICE uint32_t product(uint32_t a, uint32_t b) {  // of two pairs of bf16
    uint32_t x;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
    return x;
}

DEVICE uint32_t bytes(uint32_t a, uint32_t b, uint32_t which) {  // four of eight
    uint32_t x;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(which));
    return x;
}

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE uint32_t pair(float low, float high) {  // to bf16, rounded to even
    uint32_t x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}

// Asynchronous products of a group of four warps; tiles lie in shared memory as describe() says.
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>
DEVICE void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

template <int N>
DEVICE void hold(float (&x)[N]) {  // nothing moves over this point
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

#define R4(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define R16(x, i) R4(x, i), R4(x, i + 4), R4(x, i + 8), R4(x, i + 12)
#define R32(x, i) R16(x, i), R16(x, i + 16)

// scores[64 x 64] (+)= queries[64 x 16] * keys[64 x 16]^T
DEVICE void score_product(float (&s)[32], uint2 a, uint2 b, int add) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %36, 0;\n"
        "mov.b64 a, {%32, %33};\nmov.b64 b, {%34, %35};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
        "a, b, p, 1, 1, 0, 0;\n}"
        : R32(s, 0)
        : "r"(a.x), "r"(a.y), "r"(b.x), "r"(b.y), "r"(add));
}

// out[64 x 128] (+)= weights[64 x 16] * entries[16 x 128]
DEVICE void value_product(float (&o)[64], uint2 a, uint2 b, int add) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %68, 0;\n"
        "mov.b64 a, {%64, %65};\nmov.b64 b, {%66, %67};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
        "a, b, p, 1, 1, 0, 1;\n}"
        : R32(o, 0), R32(o, 32)
        : "r"(a.x), "r"(a.y), "r"(b.x), "r"(b.y), "r"(add));
}

DEVICE void adders_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
DEVICE void group_sync(int group) {
    asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");
}

DEVICE void barriers_made() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async();
}

template <int N>
DEVICE void registers_down() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
DEVICE void registers_up() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

DEVICE uint32_t pair16(float low, float high) {  // to fp16, rounded to even
    uint32_t x;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}

DEVICE float low16(uint32_t x) {
    float y;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;\n}" : "=f"(y) : "r"(x));
    return y;
}

DEVICE float high16(uint32_t x) {
    float y;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, h;\n}" : "=f"(y) : "r"(x));
    return y;
}

