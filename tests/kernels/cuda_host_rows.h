// Short conversions and correctly rounded arithmetic for cuda_host.h.
#pragma once

#include "cuda_host.h"

inline uint32_t bf16_pair(float low, float high) {
  auto bits = [](float x) {
    const uint32_t v = __float_as_uint(x);
    return (v + 0x7FFF + (v >> 16 & 1)) >> 16;
  };
  return bits(low) | bits(high) << 16;
}
inline float e4m3_nearest(float x) {
  const float size = std::fabs(x);
  int exponent;
  std::frexp(size, &exponent);
  const float step = std::ldexp(1.f, std::max(exponent - 4, -9));
  return std::copysign(std::min(std::nearbyint(size / step) * step, 448.f), x);
}
inline void e4m3_round(float& low, float& high) {
  low = e4m3_nearest(low), high = e4m3_nearest(high);
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
