// Eight neighbouring bf16 values of a thread: unpacking, packing, and rounding with ACT8, on SM90.
#pragma once

#include <cstdint>

#ifdef HOST_TWIN
#include "cuda_host_rows.h"
#else
__device__ inline uint32_t bf16_pair(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// Both values to the e4m3 grid and back.
__device__ inline void e4m3_round(float& low, float& high) {
  uint16_t codes;
  uint32_t halves;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
      : "=f"(low), "=f"(high) : "r"(halves));
}
#endif

struct Eight {
  float at[8];

  __device__ void unpack(const uint4& v) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      at[2 * i] = __uint_as_float(words[i] << 16);
      at[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
  }
  __device__ uint4 pack() const {
    return make_uint4(bf16_pair(at[0], at[1]), bf16_pair(at[2], at[3]), bf16_pair(at[4], at[5]),
                      bf16_pair(at[6], at[7]));
  }
  // Adjacent pairs turned by four angles, as the definition rounds; s holds the sines.
  __device__ void turn(const float4& c, const float4& s) {
    const float cos[4] = {c.x, c.y, c.z, c.w}, sin[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float even = at[2 * i], odd = at[2 * i + 1];
      at[2 * i] = __fsub_rn(__fmul_rn(even, cos[i]), __fmul_rn(odd, sin[i]));
      at[2 * i + 1] = __fadd_rn(__fmul_rn(even, sin[i]), __fmul_rn(odd, cos[i]));
    }
  }
  // Groups of 32 values are those of four neighbouring threads. A group's scale is the least power
  // of two that is not below its largest magnitude / 448.
  __device__ void round() {
    float most = 1e-4f;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(at[i]));
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
    const uint32_t up = (__float_as_uint(most) + 0x1FFFFFu) & 0x7F800000u;  // 448 = 1.75 * 2^8
    const float scale = __uint_as_float(up - (8u << 23));
    const float inverse = __uint_as_float((254u + 8u << 23) - up);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      float low = at[i] * inverse, high = at[i + 1] * inverse;
      e4m3_round(low, high);
      at[i] = low * scale, at[i + 1] = high * scale;
    }
  }
};
