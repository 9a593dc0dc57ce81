// The packed products for Hopper on a CPU: launchers of small schedules, instructions done at once.
#include "packed_host.h"

#define __forceinline__

inline u32 __shfl_up_sync(u32 full, int v, int by) { return __shfl_up_sync(full, u32(v), by); }
inline void copy16(u32 target, const void* source) {
  if (target % 16 || reinterpret_cast<uintptr_t>(source) % 16) std::abort();
  std::memcpy(host::at(target), source, 16);
}
inline void copies_arrive(u32 bar) { barrier_arrive(bar); }
inline void copies_commit() {}
template <int N>
void copies_wait() {}
inline void group_wait() {}
inline void group_but_one_wait() {}
inline void shared_to_products() {}

struct uint2 {
  u32 x, y;
};
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }

inline float load_written(const float* at) { return *at; }
inline uint4 load_written(const uint4* at) { return *at; }
inline void store_word(u32 at, u32 v) { std::memcpy(host::at(at), &v, 4); }
inline void tell(u32* at, u32 value) { ++host::progress, *at = value; }
inline void wait_told(const u32* at, u32 value) {
  while (*at < value) host::leave();
}
inline void writes_before_copies() {}
inline u32 tell_one(u32* at) { return atomicAdd(at, 1); }
inline void into_second_level(const void*) {}

#include "../../src/deepinfer/kernels/packed/core.cuh"
#define __shared__ static  // of blocks that run one after the other
#include "../../src/deepinfer/kernels/packed/experts.cuh"

namespace {

template <class K>
int run_blocks(const Args& a, int blocks) {
  host::held_barriers.clear();
  host::gates.clear();
  const TokenMap map = {a.x, a.inputs * (K::FP8 ? 1 : 2), a.rows, a.x_row_bytes, K::BOX};
  host::launch(blocks, K::THREADS, K::SHARED, [&] { K::run(a, map); });
  return 0;
}

// Blocks of a chain run together: one waits for tiles of another. A negative number of them runs one
// after the other, as on a card that has room for one: no tile may wait for a block that comes later.
template <class K>
int run_chain(const Chain& c, int blocks) {
  host::held_barriers.clear();
  host::gates.clear();
  Maps maps;
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < HEIGHTS; ++j) {
      const Args& a = c.of[i];
      maps.of[i][j] = {a.x, a.inputs * (K::FP8 ? 1 : 2), a.rows, a.x_row_bytes, Experts<K>::height(j)};
    }
  const auto body = [&] { Experts<K>::run(c, maps); };
  host::launch(std::abs(blocks), K::THREADS, K::SHARED, body, blocks > 0);
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
#undef LAUNCHER
#define LAUNCHER(name, ...)                                                                      \
  extern "C" int name(const void* x, const void* token_scale, const void* up,                    \
                      const void* up_scale, const void* down, const void* down_scale,            \
                      const void* offsets, const void* routed, void* gate_up, void* hidden,      \
                      void* hidden_scale, void* out, void* state, long long experts,             \
                      long long dim, long long inner, long long rows, long long least,           \
                      long long most, double limit, long long quantize, long long blocks,        \
                      void*) {                                                                   \
    return run_chain<Kernel<__VA_ARGS__>>(                                                       \
        chain<Kernel<__VA_ARGS__>>(x, token_scale, up, up_scale, down, down_scale, offsets,      \
                                   routed, gate_up, hidden, hidden_scale, out, state, experts,   \
                                   dim, inner, rows, least, most, limit, quantize),              \
        int(blocks));                                                                            \
  }
#include "../../src/deepinfer/kernels/packed/experts_schedules.cuh"

extern "C" int gather(const void* x, void* out, const void* source, const void* offsets, long long rows,
                      long long experts, long long inputs, long long x_row, void* counts,
                      long long words, void*) {
  host::launch(int(rows), COPIERS, 0, [=] {
    gather_kernel((const unsigned short*)x, (unsigned short*)out, (const long long*)source,
                  (const long long*)offsets, int(experts), int(inputs), x_row,
                  (u32*)counts, int(words));
  });
  return 0;
}

extern "C" int fold(const void* x, void* codes, void* scale, const void* source, const void* offsets,
                    long long rows, long long experts, long long inputs, long long x_row, void* counts,
                      long long words, void*) {
  host::launch(int(rows), COPIERS, 0, [=] {
    fold_kernel((const unsigned short*)x, (unsigned char*)codes, (float*)scale, (const long long*)source,
                (const long long*)offsets, int(experts), int(inputs), x_row,
                  (u32*)counts, int(words));
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
