// ACT8's powers of two, and rounding by them.
#pragma once

// The power of two of a group whose largest bf16 magnitude is `most`: the least that is no less than
// a 448th of it.
__device__ inline float scale_of(float most) {
  const u32 bits = __float_as_uint(fmaxf(most, 1e-4f));
  return __uint_as_float(((bits + 0x1FFFFFu) & 0xFF800000u) - (8u << 23));  // 448 = 1.75 * 2^8
}
__device__ inline float inverse_of(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
}
// Two values of that group to the e4m3 grid and back.
__device__ inline void round_by(float power, float& first, float& second) {
  const float inverse = inverse_of(power);
  e4m3_values(e4m3_pair(first * inverse, second * inverse), first, second);
  first *= power, second *= power;
}
