// The dense products for Hopper on a CPU, instructions done at once.
#include "packed_host.h"

namespace host {

inline int cluster = 1;
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
inline void cluster_barrier() {
  host::wait(host::gates[{&host::first_of_cluster(), 99}], host::cluster * host::running);
}
inline void expect_map(const TokenMap&) {}
inline float4 load_remote16(u32 at, int rank) {
  float4 v;
  load_remote(at, rank, v.x, v.y);
  load_remote(at + 8, rank, v.z, v.w);
  return v;
}

#include "../../src/deepinfer/kernels/packed/dense.cuh"

namespace {

template <class K>
int run_dense(const DenseArgs& a, const void* x, long long row_bytes, int programs, int cluster) {
  if (cluster > 8 || (cluster > 1 && !K::SHARES)) return 1;
  const TokenMap map = {(const unsigned char*)x, 2LL * a.inputs * a.groups, a.rows, row_bytes, a.share};
  host::cluster = cluster;
  host::held_barriers.clear();
  host::gates.clear();
  const int blocks = cluster > 1 ? cluster * K::tiles(a) : min(K::tiles(a), programs);
  host::launch(blocks, K::THREADS, K::SHARED, [&] { K::run(a, map); }, cluster > 1);
  return 0;
}

}  // namespace

#define DENSE(name, ...)                                                                          \
  extern "C" int name(const void* x, const void* weight, const void* row_scale, void* out,        \
                      long long groups, long long outputs, long long inputs, long long row_bytes, \
                      long long rows, long long share, long long out_row, long long programs,     \
                      long long cluster, void*) {                                                 \
    DenseArgs a = {(const unsigned char*)weight, (const float*)row_scale, (unsigned short*)out,   \
                   int(groups), int(outputs), int(inputs), int(rows), int(out_row), int(share)};  \
    return run_dense<Dense<__VA_ARGS__>>(a, x, row_bytes, int(programs), int(cluster));           \
  }
#include "../../src/deepinfer/kernels/packed/dense_schedules.cuh"
