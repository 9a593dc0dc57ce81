// The dense products for Hopper on a CPU, instructions done at once.
#include "packed_host.h"

namespace host {

inline int cluster = 1;
inline std::map<const Fiber*, long> arrived;  // which turn of its cluster's gate
inline Block& first_of_cluster() { return blocks[(&block() - blocks.data()) / cluster * cluster]; }

}  // namespace host

inline void products_wait() {}
inline void store4(u32 at, float v) { std::memcpy(host::at(at), &v, 4); }
inline void load_remote(u32 at, int rank, float& first, float& second) {
  std::vector<unsigned char>& shared = (&host::first_of_cluster() + rank)->shared;
  const auto start = reinterpret_cast<uintptr_t>(shared.data());
  const unsigned char* base = shared.data() + (1024 - start % 1024) % 1024;
  std::memcpy(&first, base + at, 4);
  std::memcpy(&second, base + at + 4, 4);
}
inline int cluster_blocks() { return host::cluster; }
inline int cluster_place() { return blockIdx.x % host::cluster; }
inline void send16(u32 at, int rank, const float* v, u32 bar) {
  host::Block& block = *(&host::first_of_cluster() + rank);
  const auto start = reinterpret_cast<uintptr_t>(block.shared.data());
  std::memcpy(block.shared.data() + (1024 - start % 1024) % 1024 + at, v, 16);
  host::Barrier& barrier = host::held_barriers[{&block, bar}];
  if (!barrier.count) std::abort();  // not ready
  barrier.bytes -= 16;
  barrier.settle();
}
inline void barrier_wait_cluster(u32 bar, u32 parity) { barrier_wait(bar, parity); }
inline void cluster_arrive() {
  host::Gate& gate = host::gates[{&host::first_of_cluster(), 99}];
  host::arrived[&host::fiber()] = gate.turn;
  ++host::progress;
  if (++gate.waiting == host::cluster * host::running) gate.waiting = 0, ++gate.turn;
}
inline void cluster_wait() {
  host::Gate& gate = host::gates[{&host::first_of_cluster(), 99}];
  while (gate.turn == host::arrived.at(&host::fiber())) host::leave();
}
inline float4 load_remote16(u32 at, int rank) {
  float4 v;
  load_remote(at, rank, v.x, v.y);
  load_remote(at + 8, rank, v.z, v.w);
  return v;
}
inline void cluster_barrier() {
  cluster_arrive();
  cluster_wait();
}
inline float load_now(const float* at) { return *at; }
inline void expect_map(const TokenMap&) {}

#include "../../src/deepinfer/kernels/packed/dense.cuh"
#include "../../src/deepinfer/kernels/packed/slim.cuh"

namespace {

TokenMap map_of(const DenseArgs& a, const void* x, long long row_bytes, int box) {
  return {(const unsigned char*)x, 2LL * a.inputs * a.groups, a.rows, row_bytes, box};
}

template <class K>
int run_dense(DenseArgs a, const void* x, long long row_bytes, int programs, int parts) {
  const int cluster = K::TAKES_WHOLE ? 1 : parts;
  a.parts = parts;
  if (cluster > 8 || (cluster > 1 && !K::SHARES)) return 1;
  const TokenMap map = map_of(a, x, row_bytes, a.share);
  host::cluster = cluster;
  host::held_barriers.clear();
  host::gates.clear();
  host::arrived.clear();
  const int blocks = cluster > 1 ? cluster * K::tiles(a) : min(K::tiles(a), programs);
  host::launch(blocks, K::THREADS, K::SHARED, [&] { K::run(a, map); }, cluster > 1);
  return 0;
}

template <class K>
int run_slim(const DenseArgs& a, const void* x, long long row_bytes, int programs, int) {
  const TokenMap map = map_of(a, x, row_bytes, K::TOKENS);
  host::held_barriers.clear();
  host::launch(min(K::tiles(a), programs), K::THREADS, K::SHARED, [&] { K::run(a, map); });
  return 0;
}

}  // namespace

#define PRODUCT(name, run, K)                                                                     \
  extern "C" int name(const void* x, const void* weight, const void* row_scale, void* out,        \
                      long long groups, long long outputs, long long inputs, long long row_bytes, \
                      long long rows, long long share, long long out_row, long long rounds,       \
                      long long programs, long long parts, void*) {                               \
    DenseArgs a = {(const unsigned char*)weight, (const float*)row_scale, (unsigned short*)out,   \
                   int(groups), int(outputs), int(inputs), int(rows), int(out_row), int(share),   \
                   int(rounds)};                                                                  \
    return run<K>(a, x, row_bytes, int(programs), int(parts));                                    \
  }
#define DENSE(name, ...)                \
  using Of_##name = Dense<__VA_ARGS__>; \
  PRODUCT(name, run_dense, Of_##name)
#define SLIM(name, ...)                \
  using Of_##name = Slim<__VA_ARGS__>; \
  PRODUCT(name, run_slim, Of_##name)
#include "../../src/deepinfer/kernels/packed/dense_schedules.cuh"
