// What kernels/paged_attention/sm90.cuh offers, on a CPU: copies and products are done at once.
#pragma once

#define HOST_TWIN
#include "cuda_host_wgmma.h"

#include <map>

#define DEVICE inline

struct CUtensorMap {
  const uint16_t* values;  // rows of 512
};
struct uint2 {
  uint32_t x, y;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace host {

struct Barrier {
  int count = 0, left = 0;
  long bytes = 0;
  uint32_t phase = 0;
  void settle() {
    if (left || bytes) return;
    left = count;
    ++phase;
    ++progress;
  }
};
inline std::map<std::pair<Block*, uint32_t>, Barrier> barriers;
inline std::map<Block*, Gate> adders;
inline std::map<std::pair<Block*, int>, Gate> groups;

inline Barrier& barrier(uint32_t at) {
  const auto found = barriers.find({&block(), at});
  if (found == barriers.end()) std::abort();
  return found->second;
}
inline unsigned char* at(uint32_t address) { return shared_memory() + address; }
inline float bf16(const void* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return __uint_as_float(static_cast<uint32_t>(v) << 16);
}
// Byte of a tile that a descriptor names: element k of row n, rows contiguous in k or in n.
inline const unsigned char* element(uint2 d, int n, int k, bool along_n) {
  const uint32_t start = (d.x & 0x3FFF) << 4, lead = (d.x >> 16 & 0x3FFF) << 4;
  const uint32_t stride = (d.y & 0x3FFF) << 4;
  if (d.y >> 30 != 1) std::abort();
  uint32_t a = along_n ? start + n / 64 * lead + n % 64 * 2 + k / 8 * stride + k % 8 * 128
                       : start + n / 8 * stride + n % 8 * 128 + k * 2;
  return at(a ^ ((a >> 7 & 7) << 4));
}
template <int N>
void multiply(float (&d)[N / 2], uint2 a, uint2 b, int add, bool along_n) {
  const int l = thread() % 128;
  for (int half = 0; half < 2; ++half) {
    const int row = l / 32 * 16 + l % 32 / 4 + 8 * half;
    float x[16];
    for (int k = 0; k < 16; ++k) x[k] = bf16(element(a, row, k, false));
    for (int i = 0; i < N / 4; ++i) {
      const int n = i / 2 * 8 + l % 4 * 2 + i % 2, place = i / 2 * 4 + 2 * half + i % 2;
      float sum = add ? d[place] : 0.0f;
      for (int k = 0; k < 16; ++k) sum += x[k] * bf16(element(b, n, k, along_n));
      d[place] = sum;
    }
  }
}

}  // namespace host

inline void init_barrier(uint32_t bar, int count) {
  host::barriers[{&host::block(), bar}] = host::Barrier{count, count, 0, 0};
}
inline void arrive(uint32_t bar) {
  auto& b = host::barrier(bar);
  if (b.left <= 0) std::abort();
  --b.left;
  b.settle();
}
inline void arrive_expect(uint32_t bar, int bytes) {
  auto& b = host::barrier(bar);
  b.bytes += bytes;
  arrive(bar);
}
inline bool passed(uint32_t bar, uint32_t parity) { return (host::barrier(bar).phase & 1) != parity; }
inline void wait(uint32_t bar, uint32_t parity) {
  while (!passed(bar, parity)) host::leave();
}
inline void copied(uint32_t bar, int bytes) {
  auto& b = host::barrier(bar);
  b.bytes -= bytes;
  b.settle();
}
inline void fetch(void* to, unsigned long long from, int bytes) {
  if (from % static_cast<unsigned>(bytes)) std::abort();
  std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
}
inline void fetch64(uint32_t (&x)[3], unsigned long long from) { fetch(x, from, 8); }
inline void fetch128(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, unsigned long long from) {
  uint32_t x[4];
  fetch(x, from, 16);
  a = x[0], b = x[1], c = x[2], d = x[3];
}
inline uint32_t fetch8(unsigned long long from) {
  return *reinterpret_cast<const unsigned char*>(from);
}
inline void store_box(const CUtensorMap* map, int column, int row, uint32_t from) {
  for (int r = 0; r < 16; ++r)
    for (int piece = 0; piece < 8; ++piece)
      std::memcpy(const_cast<uint16_t*>(map->values) + static_cast<long>(row + r) * 512 + column +
                      piece * 8,
                  host::at(from + r * 128 + ((piece ^ r % 8) << 4)), 16);
}
inline void stores_commit() {}
template <int LEFT>
void stores_read() {}
inline void store_passed(float* to, float4 x) { std::memcpy(to, &x, 16); }
inline float4 load_passed(const float* from) {
  float4 x;
  std::memcpy(&x, from, 16);
  return x;
}
inline float load_passed_one(const float* from) { return *from; }
inline void raise(uint32_t* flag) { *flag = 1; }
inline void lower(uint32_t* flag) {
  while (!*flag) host::leave();
  *flag = 0;
}
inline void publish(uint32_t* flag, bool one) {
  host::warp_wait();
  if (one) raise(flag);
}
inline void await(uint32_t* flag, bool one) {
  if (one) lower(flag);
  host::warp_wait();
}
inline void __threadfence() {}
inline unsigned long long __shfl_sync(uint32_t full, unsigned long long v, int lane) {
  const auto low = __shfl_sync(full, static_cast<uint32_t>(v), lane);
  return low | static_cast<unsigned long long>(
                   __shfl_sync(full, static_cast<uint32_t>(v >> 32), lane)) << 32;
}
inline void copy_box(uint32_t to, const CUtensorMap* map, int column, int row, uint32_t bar) {
  for (int r = 0; r < 64; ++r)
    for (int piece = 0; piece < 8; ++piece)
      std::memcpy(host::at(to + r * 128 + ((piece ^ r % 8) << 4)),
                  map->values + static_cast<long>(row + r) * 512 + column + piece * 8, 16);
  copied(bar, 64 * 128);
}
inline void fence_async() {}
inline void barriers_made() {}
inline uint32_t load32(uint32_t at) {
  uint32_t x;
  std::memcpy(&x, host::at(at), 4);
  return x;
}
inline uint4 load_words(uint32_t at) {
  uint4 x;
  std::memcpy(&x, host::at(at), 16);
  return x;
}
inline float4 load_floats(uint32_t at) {
  float4 x;
  std::memcpy(&x, host::at(at), 16);
  return x;
}
inline void store_words(uint32_t at, const uint4& x) { std::memcpy(host::at(at), &x, 16); }
inline void store_floats(uint32_t at, const float4& x) { std::memcpy(host::at(at), &x, 16); }
inline uint32_t load8(uint32_t at) { return *host::at(at); }
inline float loadf(uint32_t at) { return __uint_as_float(load32(at)); }
inline void store32(uint32_t at, uint32_t x) { std::memcpy(host::at(at), &x, 4); }
inline void store8(uint32_t at, uint32_t x) { *host::at(at) = static_cast<unsigned char>(x); }
inline void storef(uint32_t at, float x) { store32(at, __float_as_uint(x)); }
inline void store128(uint32_t at, const uint32_t (&x)[4]) { std::memcpy(host::at(at), x, 16); }
inline uint32_t product(uint32_t a, uint32_t b) {
  uint32_t r = 0;
  for (int i = 0; i < 32; i += 16) {
    const float x = __uint_as_float(a >> i << 16), y = __uint_as_float(b >> i << 16);
    r |= static_cast<uint32_t>(bf16_bits(x * y)) << i;
  }
  return r;
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
}
inline float exp2_fast(float x) { return std::exp2(x); }
inline uint32_t pair(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
inline uint32_t bytes(uint32_t a, uint32_t b, uint32_t s) { return pick(a, b, s); }
template <typename T>
T __ldg(const T* p) {
  return *p;
}
inline bool __all_sync(uint32_t, bool yes) { return __ballot_sync(0, yes) == ~0u; }
inline void products_begin() {}
inline void products_commit() {}
template <int LEFT>
void products_wait() {  // of the whole warp
  host::warp_wait();
}
template <int N>
void hold(float (&)[N]) {}
inline void score_product(float (&s)[32], uint2 a, uint2 b, int add) {
  host::multiply<64>(s, a, b, add, false);
}
inline void value_product(float (&o)[64], uint2 a, uint2 b, int add) {
  host::multiply<128>(o, a, b, add, true);
}
inline void adders_sync() { host::wait(host::adders[&host::block()], 256); }
inline void group_sync(int group) { host::wait(host::groups[{&host::block(), group}], 128); }
template <int N>
void registers_down() {}
template <int N>
void registers_up() {}
inline float low16(uint32_t x) {
  _Float16 h;
  std::memcpy(&h, &x, 2);
  return h;
}
inline float high16(uint32_t x) { return low16(x >> 16); }
inline uint32_t pair16(float low, float high) {
  const _Float16 h[2] = {static_cast<_Float16>(low), static_cast<_Float16>(high)};
  uint32_t x;
  std::memcpy(&x, h, 4);
  return x;
}
