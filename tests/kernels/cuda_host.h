// Runs a CUDA source on a CPU: every thread of a block is a fiber, blocks run one after the other.
//
// Only what the sources of this project use. Barriers and warp operations wait for all threads they
// name, so code that leaves some behind hangs: the scheduler then stops with a message. Integer
// atomics need no care, since fibers switch only where they wait.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define LAUNCH(kernel, grid, block, shared, stream, ...) \
  host::launch(grid, block, shared, [&] { kernel(__VA_ARGS__); })
#define SHARED(name, ...) unsigned char* name = host::shared_memory()

using std::max;
using std::min;
using cudaStream_t = void*;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct float4 {
  float x, y, z, w;
};
struct uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

namespace host {

struct Gate {
  int waiting = 0;
  long turn = 0;
};
struct Block {
  dim3 id;
  std::vector<unsigned char> shared, scratch;
  Gate whole, named[16];
  std::vector<Gate> warps;
  std::vector<uint32_t> slots;
  std::vector<float> operands;  // eight a thread
};
struct Fiber {
  ucontext_t context;
  Block* block = nullptr;
  int id = 0;
  bool done = false;
};

constexpr int kStack = 1 << 15;
inline std::vector<Fiber> fibers;
inline std::vector<Block> blocks;
inline ucontext_t scheduler;
inline int turn = 0, running = 0, alive = 0;  // whose turn it is; threads of a block
inline long progress = 0;
inline dim3 block_size, grid_size;
inline std::function<void()> body;

inline Fiber& fiber() { return fibers[turn]; }
inline Block& block() { return *fiber().block; }
inline int thread() { return fiber().id; }
inline dim3 thread_id() { return dim3(thread() % block_size.x, thread() / block_size.x); }

inline void leave() { swapcontext(&fiber().context, &scheduler); }

inline void wait(Gate& gate, int size) {
  ++progress;
  if (++gate.waiting == size) {
    gate.waiting = 0;
    ++gate.turn;
    return;
  }
  for (const long turn = gate.turn; gate.turn == turn;) leave();
}

inline void start() {
  body();
  fiber().done = true;
  ++progress;
  --alive;
}

// Blocks first..last-1 at the same time.
inline void run(int first, int last, int bytes) {
  blocks.assign(last - first, Block{});
  fibers.assign(static_cast<size_t>(last - first) * running, Fiber{});
  std::vector<char*> stacks;
  for (int b = first; b < last; ++b) {
    Block& block = blocks[b - first];
    block.id = dim3(b % grid_size.x, b / grid_size.x % grid_size.y, b / grid_size.x / grid_size.y);
    block.shared.assign(bytes + 1024, 0xA5);  // poison
    block.scratch.assign(1 << 12, 0xA5);
    block.warps.assign((running + 31) / 32, Gate{});
    block.slots.resize(running + 32);
    block.operands.resize(8 * (running + 32));
    for (int i = 0; i < running; ++i) {
      Fiber& f = fibers[static_cast<size_t>(b - first) * running + i];
      f.block = &block;
      f.id = i;
      stacks.push_back(static_cast<char*>(std::malloc(kStack)));
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = stacks.back();
      f.context.uc_stack.ss_size = kStack;
      f.context.uc_link = &scheduler;
      makecontext(&f.context, start, 0);
    }
  }
  alive = static_cast<int>(fibers.size());
  while (alive) {
    const long before = progress;
    for (size_t i = 0; i < fibers.size(); ++i) {
      if (fibers[i].done) continue;
      turn = static_cast<int>(i);
      swapcontext(&scheduler, &fibers[i].context);
    }
    if (progress == before) {
      std::fprintf(stderr, "threads wait for each other for ever\n");
      std::abort();
    }
  }
  for (char* stack : stacks) std::free(stack);
}

inline void launch(dim3 grid, dim3 block, int bytes, std::function<void()> kernel,
                   bool together = false) {
  body = std::move(kernel);
  grid_size = grid;
  block_size = block;
  running = static_cast<int>(block.x * block.y * block.z);
  const int count = static_cast<int>(grid.x * grid.y * grid.z);
  for (int b = 0; b < count; b = together ? count : b + 1) run(b, together ? count : b + 1, bytes);
}
inline void launch_together(dim3 grid, dim3 block, int bytes, std::function<void()> kernel) {
  launch(grid, block, bytes, std::move(kernel), true);
}

inline unsigned char* shared_memory() {  // aligned as widely as any kernel asks
  const auto at = reinterpret_cast<uintptr_t>(block().shared.data());
  return block().shared.data() + (1024 - at % 1024) % 1024;
}

inline uint32_t* warp_slots() { return &block().slots[thread() / 32 * 32]; }
inline void warp_wait() {
  wait(block().warps[thread() / 32], std::min(32, running - thread() / 32 * 32));
}

inline uint32_t exchange(uint32_t value, int source) {
  warp_slots()[thread() % 32] = value;
  warp_wait();
  const uint32_t got = warp_slots()[source & 31];
  warp_wait();
  return got;
}

template <typename Combine>
uint32_t reduce(uint32_t value, Combine combine) {
  warp_slots()[thread() % 32] = value;
  warp_wait();
  uint32_t all = warp_slots()[0];
  for (int i = 1; i < 32; ++i) all = combine(all, warp_slots()[i]);
  warp_wait();
  return all;
}

}  // namespace host

#define threadIdx (host::thread_id())
#define blockIdx (host::block().id)
#define blockDim (host::block_size)
#define gridDim (host::grid_size)

inline unsigned char* host_scratch() { return host::block().scratch.data(); }
inline void __syncthreads() { host::wait(host::block().whole, host::running); }
inline void __syncwarp(uint32_t = 0) { host::warp_wait(); }
inline uint32_t __shfl_sync(uint32_t, uint32_t v, int lane) { return host::exchange(v, lane); }
inline uint32_t __shfl_xor_sync(uint32_t, uint32_t v, int mask) {
  return host::exchange(v, host::thread() % 32 ^ mask);
}
inline float __uint_as_float(uint32_t v) {
  float f;
  std::memcpy(&f, &v, 4);
  return f;
}
inline uint32_t __float_as_uint(float f) {
  uint32_t v;
  std::memcpy(&v, &f, 4);
  return v;
}
inline int __shfl_sync(uint32_t full, int v, int lane) {
  return static_cast<int>(__shfl_sync(full, static_cast<uint32_t>(v), lane));
}
inline float __shfl_sync(uint32_t full, float v, int lane) {
  return __uint_as_float(__shfl_sync(full, __float_as_uint(v), lane));
}
inline float __shfl_xor_sync(uint32_t full, float v, int mask) {
  return __uint_as_float(__shfl_xor_sync(full, __float_as_uint(v), mask));
}
inline uint32_t __shfl_up_sync(uint32_t, uint32_t v, int by) {
  const int lane = host::thread() % 32;
  return host::exchange(v, lane < by ? lane : lane - by);
}
inline uint32_t __ballot_sync(uint32_t, bool yes) {
  const int lane = host::thread() % 32;
  return host::reduce(yes ? 1u << lane : 0u, [](uint32_t a, uint32_t b) { return a | b; });
}
inline uint32_t __reduce_add_sync(uint32_t, uint32_t v) {
  return host::reduce(v, [](uint32_t a, uint32_t b) { return a + b; });
}
inline uint32_t __reduce_min_sync(uint32_t, uint32_t v) {
  return host::reduce(v, [](uint32_t a, uint32_t b) { return std::min(a, b); });
}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t v) {
  return host::reduce(v, [](uint32_t a, uint32_t b) { return std::max(a, b); });
}
inline void atomicAdd(unsigned long long* p, unsigned long long v) { *p += v; }
inline uint32_t atomicAdd(uint32_t* p, uint32_t v) {
  const uint32_t old = *p;
  *p += v;
  return old;
}
inline void atomicMin(uint32_t* p, uint32_t v) { *p = std::min(*p, v); }
inline void atomicMax(uint32_t* p, uint32_t v) { *p = std::max(*p, v); }
inline void atomicOr(uint32_t* p, uint32_t v) { *p |= v; }
template <typename Kernel>
int make_room(Kernel, int) {
  return 0;
}
inline int cudaGetLastError() { return 0; }
inline int __popc(uint32_t v) { return __builtin_popcount(v); }
inline int __ffs(uint32_t v) { return __builtin_ffs(static_cast<int>(v)); }
