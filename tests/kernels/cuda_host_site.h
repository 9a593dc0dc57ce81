// Products of a warp, waiting for other blocks and short arithmetic for cuda_host.h.
#pragma once

#include "cuda_host_copy.h"

inline uint32_t bf16_bits(float x) {
  const uint32_t v = __float_as_uint(x);
  return (v + 0x7FFF + (v >> 16 & 1)) >> 16;
}
inline uint32_t bf16_pair(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }

inline float tf32(float x) { return __uint_as_float(__float_as_uint(x) & 0xFFFFE000u); }

inline void multiply(float (&acc)[4], const float (&a)[4], float b0, float b1) {
  const int lane = host::thread() % 32;
  float* all = &host::block().operands[host::thread() / 32 * 256];
  float* own = all + lane * 8;
  for (int i = 0; i < 4; ++i) own[i] = tf32(a[i]);
  own[4] = tf32(b0), own[5] = tf32(b1);
  host::warp_wait();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double sum = 0;
    for (int k = 0; k < 8; ++k) {
      sum += static_cast<double>(all[(row % 8 * 4 + k % 4) * 8 + row / 8 + k / 4 * 2]) *
             all[(column * 4 + k % 4) * 8 + 4 + k / 4];
    }
    acc[i] += static_cast<float>(sum);
  }
  host::warp_wait();
}

inline void count_in(uint32_t* counter) { ++*counter; ++host::progress; }
inline void wait_for(const uint32_t* counter, uint32_t least) {
  while (*counter < least) host::leave();
}
inline void count_out(uint32_t* counter, uint32_t last) {
  if (++*counter == last) *counter = 0;
}
inline float fresh(const float* p) { return *p; }
inline float inverse(float x) { return 1.f / x; }
inline float fast_inverse(float x) { return 1.f / x; }
inline float inverse_root(float x) { return 1.f / std::sqrt(x); }
inline float exponential(float x) { return std::exp(x); }
