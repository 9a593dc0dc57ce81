// The packed products for Hopper on a CPU: launchers of small schedules, instructions done at once.
#include <array>
#include <map>
#include <utility>

#include "cuda_host.h"

#define __ldg(p) (*(p))
#define __grid_constant__
#define __forceinline__
using std::size_t;
typedef unsigned u32;
typedef unsigned long long u64;

namespace host {

struct Barrier {
  int count = 0, pending = 0;
  long bytes = 0;
  unsigned turn = 0;
  void settle() {
    ++progress;
    if (!pending && !bytes) pending = count, ++turn;
  }
};
using Key = std::pair<const Block*, u32>;
inline std::map<Key, Barrier> held_barriers;
inline std::map<Key, Gate> gates;
inline Barrier& barrier(u32 at) { return held_barriers[{&block(), at}]; }

inline unsigned char* at(u32 offset) { return shared_memory() + offset; }

}  // namespace host

inline u32 __shfl_up_sync(u32 full, int v, int by) { return __shfl_up_sync(full, u32(v), by); }

inline u32 address(const void* p) {
  return u32(static_cast<const unsigned char*>(p) - host::shared_memory());
}
inline float bf16_value(u32 bits) { return __uint_as_float(bits << 16); }
inline u32 bf16_bits(float x) {
  const u32 v = __float_as_uint(x);
  return (v + 0x7FFF + (v >> 16 & 1)) >> 16;
}
inline float e4m3_value(u32 byte) {
  const int e = byte >> 3 & 15, m = byte & 7;
  const float size = e ? std::ldexp(1.f + m / 8.f, e - 7) : std::ldexp(m / 8.f, -6);
  return byte & 128 ? -size : size;
}
inline u32 times(u32 a, u32 b) {
  return bf16_bits(bf16_value(a & 65535) * bf16_value(b & 65535)) |
         bf16_bits(bf16_value(a >> 16) * bf16_value(b >> 16)) << 16;
}
inline u32 pack_bf16(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }

inline void barrier_init(u32 bar, int count) { host::barrier(bar) = {count, count, 0, 0}; }
inline void barrier_arrive(u32 bar) {
  host::Barrier& b = host::barrier(bar);
  if (--b.pending < 0) std::abort();
  b.settle();
}
inline void barrier_expect(u32 bar, u32 bytes) {
  host::barrier(bar).bytes += bytes;
  barrier_arrive(bar);
}
inline void barrier_wait(u32 bar, u32 parity) {
  while ((host::barrier(bar).turn & 1) == parity) host::leave();
}
inline void bulk_copy(u32 target, const void* source, u32 bytes, u32 bar, u64) {
  if (target % 16 || reinterpret_cast<uintptr_t>(source) % 16 || bytes % 16) std::abort();
  std::memcpy(host::at(target), source, bytes);
  host::barrier(bar).bytes -= bytes;
  host::barrier(bar).settle();
}
inline u64 read_once() { return 0; }
struct TokenMap {
  const unsigned char* start;
  long long width, rows, row_bytes;
  int box;
};
// Boxes of 128 bytes by `box` rows, swizzled; what lies outside is zero.
inline void copy_tokens(u32 target, const TokenMap& map, int column, int row, u32 bar) {
  if (target % 1024 || column % 16) std::abort();
  for (int i = 0; i < map.box; ++i)
    for (int piece = 0; piece < 8; ++piece) {
      unsigned char* to = host::at(target + i * 128 + ((piece ^ (i & 7)) << 4));
      if (row + i < map.rows)
        std::memcpy(to, map.start + (row + i) * map.row_bytes + column + piece * 16, 16);
      else
        std::memset(to, 0, 16);
    }
  host::barrier(bar).bytes -= map.box * 128;
  host::barrier(bar).settle();
}
inline void copy16(u32 target, const void* source) {
  if (target % 16 || reinterpret_cast<uintptr_t>(source) % 16) std::abort();
  std::memcpy(host::at(target), source, 16);
}
inline void copies_arrive(u32 bar) { barrier_arrive(bar); }
inline void copies_commit() {}
template <int N>
void copies_wait() {}
inline void group_fence() {}
inline void group_commit() {}
inline void group_wait() {}
inline uint4 load16(u32 at) {
  uint4 v;
  std::memcpy(&v, host::at(at), 16);
  return v;
}
inline u32 load4(u32 at) {
  u32 v;
  std::memcpy(&v, host::at(at), 4);
  return v;
}
inline void load_matrices(u32 at, u32* v) {
  static std::map<const host::Block*, std::vector<u32>> all;
  auto& rows = all[&host::block()];
  rows.resize(1024);
  const int self = host::thread(), warp = self / 32 * 32, lane = self % 32;
  if (at % 16) std::abort();
  rows[self] = at;
  host::warp_wait();
  for (int i = 0; i < 4; ++i)
    std::memcpy(v + i, host::at(rows[warp + 8 * i + lane / 4]) + lane % 4 * 4, 4);
  host::warp_wait();
}
template <class T>
void keep_in_place(T&) {}
inline void store_transposed(u32 at, u32 first, u32 second) {
  static std::map<const host::Block*, std::vector<std::array<u32, 3>>> all;
  auto& rows = all[&host::block()];
  rows.resize(1024);
  const int self = host::thread(), warp = self / 32 * 32, lane = self % 32;
  rows[self] = {at, first, second};
  host::warp_wait();
  for (int tile = 0; tile < 2; ++tile)
    for (int i = 0; i < 2; ++i) {  // this lane holds row lane / 4, columns 2 (lane % 4) + i
      const int column = lane % 4 * 2 + i;
      const uint16_t v = uint16_t(rows[self][1 + tile] >> (16 * i));
      std::memcpy(host::at(rows[warp + tile * 8 + column][0]) + lane / 4 * 2, &v, 2);
    }
  host::warp_wait();
}
inline void named_barrier(int id, int threads) {
  host::wait(host::gates[{&host::block(), u32(id)}], threads);
}
inline void barriers_ready() {}
inline void shared_to_products() {}
inline void previous_kernel_wait() {}
inline void next_kernel_may_start() {}
template <int N>
void fewer_registers() {}
template <int N>
void more_registers() {}

template <bool FP8, int N>
struct Mma {
  static void run(float (&d)[N / 2], const u32* a, u64 b, int keep) {
    const int self = host::thread(), lane = self % 32;
    static std::map<const host::Block*, std::vector<std::array<u32, 4>>> all;
    auto& rows = all[&host::block()];
    rows.resize(1024);
    std::memcpy(rows[self].data(), a, 16);
    host::warp_wait();
    constexpr int K = FP8 ? 32 : 16, BYTES = 32 / K, REACH = 4 / BYTES;  // inputs of a register
    const u32 start = u32(b & 0x3FFF) << 4;
    for (int i = 0; i < N / 2; ++i) {
      const int n = i / 4 * 8 + lane % 4 * 2 + i % 2, low = i / 2 % 2;
      float sum = 0;
      for (int k = 0; k < K; ++k) {
        const int inside = k % (4 * REACH);
        const u32 word = rows[self / 4 * 4 + inside / REACH][low + 2 * (k / (4 * REACH))];
        u32 at = start + n * 128 + k * BYTES;
        at ^= (at >> 7 & 7) << 4;
        const unsigned char* p = host::at(at);
        const u32 shift = 8 * BYTES * (inside % REACH);
        if (FP8) {
          sum += e4m3_value(word >> shift & 255) * e4m3_value(*p);
        } else {
          uint16_t v;
          std::memcpy(&v, p, 2);
          sum += bf16_value(word >> shift & 65535) * bf16_value(v);
        }
      }
      d[i] = keep ? d[i] + sum : sum;
    }
    host::warp_wait();
  }
};

inline void warp_product(float* d, const u32* a, u32 b0, u32 b1) {
  static std::map<const host::Block*, std::vector<std::array<u32, 6>>> all;
  auto& rows = all[&host::block()];
  rows.resize(1024);
  const int self = host::thread(), warp = self / 32 * 32, lane = self % 32;
  rows[self] = {a[0], a[1], a[2], a[3], b0, b1};
  host::warp_wait();
  for (int i = 0; i < 4; ++i) {
    const int n = lane % 4 * 2 + i % 2, low = i / 2;
    float sum = 0;
    for (int k = 0; k < 16; ++k) {
      const u32 wide = rows[self / 4 * 4 + k % 8 / 2][low + 2 * (k / 8)];
      const u32 thin = rows[warp + n * 4 + k % 8 / 2][4 + k / 8];
      sum += bf16_value(wide >> (16 * (k % 2)) & 65535) * bf16_value(thin >> (16 * (k % 2)) & 65535);
    }
    d[i] += sum;
  }
  host::warp_wait();
}

// By search: the nearest code, the even one of two.
inline u32 e4m3_byte(float x) {
  const u32 sign = __float_as_uint(x) >> 24 & 128;
  if (x != x) return 127;
  const float size = std::fabs(x);
  u32 best = 0;
  for (u32 b = 1; b < 127; ++b) {
    const float now = std::fabs(e4m3_value(b) - size), before = std::fabs(e4m3_value(best) - size);
    if (now < before || (now == before && !(b & 1))) best = b;
  }
  return best | sign;
}
inline u32 e4m3_pair(float low, float high) { return e4m3_byte(low) | e4m3_byte(high) << 8; }
inline void e4m3_values(u32 pair, float& low, float& high) {
  low = e4m3_value(pair & 255), high = e4m3_value(pair >> 8 & 255);
}
struct uint2 {
  u32 x, y;
};
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }

#include "../../src/deepinfer/kernels/packed/core.cuh"
#define __shared__ static  // blocks run one after the other
#include "../../src/deepinfer/kernels/packed/tokens.cuh"

namespace {

template <class K>
int run_blocks(const Args& a, int blocks) {
  host::held_barriers.clear();
  host::gates.clear();
  const TokenMap map = {a.x, a.inputs * (K::FP8 ? 1 : 2), a.rows, a.x_row_bytes, K::BOX};
  host::launch(blocks, K::THREADS, K::SHARED, [&] { K::run(a, map); });
  return 0;
}

}  // namespace

#define LAUNCHER(name, ...)                                                                       \
  extern "C" int name(const void* x, const void* token_scale, const void* source,                 \
                      const void* weight, const void* row_scale, const void* offsets, void* out,  \
                      long long experts, long long outputs, long long inputs, long long x_row,    \
                      long long rows, long long least, long long most, long long blocks, void*) { \
    Args a = {(const unsigned char*)x, (const float*)token_scale, (const long long*)source,       \
              (const unsigned char*)weight, (const float*)row_scale, (const long long*)offsets,   \
              (unsigned short*)out, int(experts), int(outputs), int(inputs), int(x_row),          \
              int(rows), int(least), int(most)};                                                  \
    return run_blocks<Kernel<__VA_ARGS__>>(a, int(blocks));                                       \
  }
#include "../../src/deepinfer/kernels/packed/schedules.cuh"

extern "C" int gather(const void* x, void* out, const void* source, const void* offsets, long long rows,
                      long long experts, long long inputs, long long x_row, void*) {
  host::launch(int(rows), int(inputs / VALUES), 0, [=] {
    gather_kernel((const unsigned short*)x, (unsigned short*)out, (const long long*)source,
                  (const long long*)offsets, int(experts), int(inputs), x_row);
  });
  return 0;
}

extern "C" int fold(const void* x, void* codes, void* scale, const void* source, const void* offsets,
                    long long rows, long long experts, long long inputs, long long x_row, void*) {
  host::launch(int(rows), int(inputs / VALUES), 0, [=] {
    fold_kernel((const unsigned short*)x, (unsigned char*)codes, (float*)scale, (const long long*)source,
                (const long long*)offsets, int(experts), int(inputs), x_row);
  });
  return 0;
}

extern "C" int gate(const void* gate_up, const void* weight, void* out, void* scale,
                    const void* offsets, long long rows, long long experts, long long inputs,
                    double limit, long long quantize, long long fold, void*) {
  const auto kernel = fold       ? gate_kernel<false, true>
                      : quantize ? gate_kernel<true, false>
                                 : gate_kernel<false, false>;
  host::launch(int(rows), int(inputs / VALUES), 0, [=] {
    kernel((const unsigned short*)gate_up, (const float*)weight, out, (float*)scale,
           (const long long*)offsets, int(experts), int(inputs), float(limit));
  });
  return 0;
}
