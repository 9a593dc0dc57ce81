// Asynchronous copies, conversions and warp-group products for cuda_host.h, done at once.
#pragma once

#include "cuda_host.h"

#include "cuda_host_copy.h"

inline void product_begin() {}
inline void product_end() {}
inline void product_wait() {}
template <typename T>
void settle(T&) {}
inline void shared_to_products() {}

inline uint32_t pick(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t which = selector >> 4 * i & 15;
    const uint32_t byte = (which & 4 ? high : low) >> 8 * (which & 3) & 255;
    r |= (which & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return r;
}

inline float e5m2_value(uint32_t byte) {
  const int e = byte >> 2 & 31, m = byte & 3;
  const float size = e ? std::ldexp(1.f + m / 4.f, e - 15) : std::ldexp(m / 4.f, -14);
  return byte & 128 ? -size : size;
}
inline uint32_t e5m2_byte(float x) {  // of values that are exact
  for (uint32_t b = 0; b < 256; ++b) {
    if ((b & 124) != 124 && e5m2_value(b) == x && std::signbit(x) == (b >> 7 & 1)) return b;
  }
  std::fprintf(stderr, "%g is no e5m2 value\n", x);
  std::abort();
}
inline uint32_t e5m2_pair(float low, float high) { return e5m2_byte(low) | e5m2_byte(high) << 8; }

inline float __saturatef(float x) { return std::fmin(std::fmax(x, 0.f), 1.f); }

inline uint16_t bf16_bits(float x) {
  const uint32_t v = __float_as_uint(x);
  return static_cast<uint16_t>((v + 0x7FFF + (v >> 16 & 1)) >> 16);
}

inline uint64_t descriptor(const void* tile) { return reinterpret_cast<uintptr_t>(tile) >> 4; }

namespace host {
inline uint32_t rows_a[128][4];
}

template <int N>
struct Wgmma {
  static void run(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int add) {
    const int l = host::thread() % 128;
    std::memcpy(host::rows_a[l], a, 16);
    __syncthreads();
    for (int i = 0; i < N / 2; ++i) {
      const int n = i / 4 * 8 + l % 4 * 2 + i % 2, low = i / 2 % 2;
      float sum = 0;
      for (int k = 0; k < 32; ++k) {
        const uint32_t word = host::rows_a[l / 4 * 4 + k % 16 / 4][low + 2 * (k / 16)];
        uintptr_t at = (b << 4) + n * 128 + k;
        at ^= (at >> 7 & 7) << 4;
        sum += e5m2_value(word >> 8 * (k % 4) & 255) *
               e5m2_value(*reinterpret_cast<unsigned char*>(at));
      }
      d[i] = add ? d[i] + sum : sum;
    }
    __syncthreads();
  }
};
