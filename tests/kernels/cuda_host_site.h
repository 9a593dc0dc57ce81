// Products of a warp, waiting for other blocks and short arithmetic for cuda_host.h.
#pragma once

#include "cuda_host_copy.h"
#include "cuda_host_rows.h"

inline void multiply(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int lane = host::thread() % 32;
  uint32_t* all = reinterpret_cast<uint32_t*>(&host::block().operands[host::thread() / 32 * 256]);
  const uint32_t own[6] = {a[0], a[1], a[2], a[3], b0, b1};
  std::memcpy(all + lane * 8, own, sizeof own);
  host::warp_wait();
  auto half = [](uint32_t word, int which) {
    return __uint_as_float(which ? word & 0xFFFF0000u : word << 16);
  };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    float sum = 0;
    for (int k = 0; k < 16; ++k) {
      const int from = k % 8 / 2;
      sum += half(all[(row % 8 * 4 + from) * 8 + row / 8 + k / 8 * 2], k % 2) *
             half(all[(column * 4 + from) * 8 + 4 + k / 8], k % 2);
    }
    acc[i] += sum;
  }
  host::warp_wait();
}

inline void multiply(float (&acc)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                     uint32_t b0, uint32_t b1) {
  const uint32_t a[4] = {a0, a1, a2, a3};
  multiply(acc, a, b0, b1);
}
inline void meet(int name, int threads) { host::wait(host::block().named[name], threads); }
inline void meet() { host::wait(host::block().named[1], host::running - 96); }
inline void load_matrix(uint32_t (&a)[4], const unsigned char* rows, int column) {
  const int lane = host::thread() % 32, stride = 1024 * 2 + 16;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i % 2 * 8, at = column + lane % 4 * 2 + i / 2 * 8;
    std::memcpy(&a[i], rows + row * stride + at * 2, 4);
  }
}
inline uint4 load_once(const uint16_t* p) { return *reinterpret_cast<const uint4*>(p); }
inline void count_in(uint32_t* counter) { ++*counter; ++host::progress; }
inline void wait_for(const uint32_t* counter, uint32_t least) {
  while (*counter < least) host::leave();
}
inline void add_local(uint32_t* counter) { ++*counter; ++host::progress; }
inline void wait_local(const uint32_t* counter, uint32_t least) {
  while (*counter < least) host::leave();
}
template <typename Parameters>
int launch_meeting(void (*kernel)(Parameters), dim3 grid, dim3 block, int shared, void*,
                   const Parameters& parameters) {
  host::launch_together(grid, block, shared, [&] { kernel(parameters); });
  return 0;
}
inline uint32_t leave(uint32_t* counter) { return (*counter)++; }
inline void was_last(uint32_t* counter, uint32_t left, uint32_t last) {
  if (left == last - 1) *counter = 0;
}
inline void count_out(uint32_t* counter, uint32_t last) { was_last(counter, leave(counter), last); }
inline float fresh(const float* p) { return *p; }
inline float4 fresh(const float4* p) { return *p; }
inline float inverse(float x) { return 1.f / x; }
inline float fast_inverse(float x) { return 1.f / x; }
inline float inverse_root(float x) { return 1.f / std::sqrt(x); }
inline float exponential(float x) { return std::exp(x); }
