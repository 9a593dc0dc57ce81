// Routed experts in one launch: both products of packed weights and the gate between them.
//
// Blocks are persistent and take tiles from a counter, first all of the first product, then those of
// the second: no round of tiles is left half empty between the two. The block that stores the last of
// the first product for some rows gates them; what reads their tokens waits for that. It waits for
// tiles of smaller numbers alone: these were taken before, by blocks that run, each of which makes its
// tiles in order. So any number of blocks ends, also one alone; a launch that makes none takes none.
// The bits are those of single products and `gate_kernel`.
#pragma once
#include "core.cuh"
#include "tokens.cuh"

struct Chain {
  Args of[2];           // of[1].x and of[1].token_scale: what the gate writes
  const float* routed;  // [R] weights of the rows, or null
  // Zeros at the start: tiles taken, then of each tile of tokens the parts that are stored; READY when
  // it is gated.
  u32* state;
  float limit;
  int quantize;  // ACT8 of bf16 rows
};

constexpr u32 READY = 1u << 30, END = ~0u;
constexpr int HEIGHTS = 8;  // of boxes of tokens

struct Maps {
  TokenMap of[2][HEIGHTS];
};

template <class K>
struct Experts {
  using Place = typename K::Place;
  using Ring = typename K::Ring;
  using Room = typename K::Room;
  static constexpr int WARPS = 4 * K::GROUPS;
  static constexpr int ALL = K::GROUPS + 1;  // a barrier of all consumers
  // Pieces of a gated row that a thread asks for at a time.
  static constexpr int BATCH = K::GROUPS == 4 && K::TOKENS == 64 ? 5 : 9;

  // Boxes in steps of 8 rows up to a whole tile, each tile by the least that holds its rows.
  static constexpr __host__ __device__ int height(int i) {
    const int rows = K::TOKENS - 8 * (HEIGHTS - 1 - i);
    return rows < 8 ? 8 : rows;
  }
  static constexpr __host__ __device__ int box_of(int rows) {
    const int i = HEIGHTS - 1 - (K::TOKENS - rows) / 8;
    return i < 0 ? 0 : i;
  }
  static constexpr bool least_boxes() {
    for (int rows = 1; rows <= K::TOKENS; ++rows) {
      const int i = box_of(rows);
      if (height(i) < rows || (height(i) >= rows + 8 && i)) return false;
    }
    return true;
  }
  static_assert(least_boxes(), "each number of rows has its box");

  // One warp of the producers.
  static __device__ void produce(const Chain& c, const Maps& maps, const Room& room, int tiles,
                                 int all) {
    const u32 tokens = address(room.tokens), weights = address(room.weights);
    const int lane = threadIdx.x & 31;
    const u64 policy = read_once();
    Ring ring;
    u32 following = lane == 0 ? atomicAdd(c.state, 1u) : 0;
    for (;;) {
      const int item = __shfl_sync(~0u, static_cast<int>(following), 0);
      if (item >= all) break;
      const int second = item >= tiles;
      const Args& a = c.of[second];
      const Place p = K::locate(a, room.first, second ? item - tiles : item);
      if (lane < 8)
        into_second_level(a.row_scale + size_t(p.expert) * a.outputs + p.output + 32 * lane);
      if (lane == 0) {
        const int which = box_of(p.rows), rows = height(which);
        const TokenMap& map = maps.of[second][which];
        const unsigned char* w = K::weights_of(a, p);
        const int steps = K::steps_of(a);
        for (int step = 0; step < steps; ++step) {
          barrier_wait(room.empty + 8 * ring.stage, ring.parity ^ 1);
          const u32 bar = room.full + 8 * ring.stage, to = tokens + ring.stage * K::TOKEN_BYTES;
          if (step == 0) store_word(room.slots + 4 * ring.stage, item);
          if (step == max(0, steps - 2)) following = atomicAdd(c.state, 1u);  // as late as it is free
          K::fetch(w, step, weights + ring.stage * K::WEIGHT_BYTES, bar, policy,
                   K::ATOMS * 128 * rows);
          if (second && step == 0) {
            wait_told(c.state + 1 + p.tokens, READY);
            writes_before_copies();
          }
#pragma unroll
          for (int atom = 0; atom < K::ATOMS; ++atom)
            copy_tokens(to + atom * (K::TOKENS * 128), map, (step * K::ATOMS + atom) * 128, p.row, bar);
          ring.next();
        }
      }
    }
    if (lane == 0) {
      barrier_wait(room.empty + 8 * ring.stage, ring.parity ^ 1);
      store_word(room.slots + 4 * ring.stage, END);
      barrier_arrive(room.full + 8 * ring.stage);
    }
  }

  static __device__ int runs_of(const Chain& c, const Room& room) {
    return room.first[c.of[0].experts];
  }
  static __device__ int tiles_of(const Chain& c, const Room& room, int which) {
    return runs_of(c, room) * (c.of[which].outputs / K::HEIGHT);
  }

  static __device__ void consume(const Chain& c, const Room& room) {
    Ring ring;
    for (;;) {
      barrier_wait(room.full + 8 * ring.stage, ring.parity);
      u32 item = load4(room.slots + 4 * ring.stage);
      if (item == END) break;
      // Found anew each time, so that sums have the registers.
      const auto where = [&]() -> typename K::Work {
        keep_in_place(item);
        const int tiles = tiles_of(c, room, 0), second = int(item) >= tiles;
        const Args& a = c.of[second];
        return {a, K::locate(a, room.first, int(item) - (second ? tiles : 0))};
      };
      K::multiply_tile(where, ring, room);
      if (int(item) < tiles_of(c, room, 0)) stored(c, where().p, room);
    }
  }

  // Tell that a tile of the first product is stored; the last one's block gates its rows.
  static __device__ void stored(const Chain& c, const Place& p, const Room& room) {
    u32* told = c.state + 1 + p.tokens;
    const u32 last = address(room.first + K::MAX_EXPERTS + 1);
    named_barrier(ALL, 128 * K::GROUPS);
    if (threadIdx.x == 128) store_word(last, tell_one(told) + 1 == u32(c.of[0].outputs / K::HEIGHT));
    named_barrier(ALL, 128 * K::GROUPS);
    if (!load4(last)) return;
    gate(c, p);
    writes_before_copies();
    named_barrier(ALL, 128 * K::GROUPS);
    if (threadIdx.x == 128) tell(told, READY);
  }

  // A warp takes a row, a thread eight neighbouring values of each 256, as many loads under way as
  // registers hold. Rows that become codes are written over their gate values first, until their
  // largest is known.
  static __device__ void gate(const Chain& c, const Place& p) {
    u32 thread = threadIdx.x;
    keep_in_place(thread);  // nothing of this is worth a register before
    const int inputs = c.of[1].inputs, lane = thread & 31, last = inputs / VALUES;
    for (int row = p.row + int(thread) / 32 - 4; row < p.row + p.rows; row += WARPS) {
      uint4* from = reinterpret_cast<uint4*>(c.of[0].out + size_t(row) * 2 * inputs);
      uint4* to = K::FP8 ? from
                         : reinterpret_cast<uint4*>(const_cast<unsigned char*>(c.of[1].x)) +
                               size_t(row) * last;
      const float routed = c.routed ? __ldg(c.routed + row) : 1.f;
      float most = 0.f;
#pragma unroll 1
      for (int start = lane; start < last; start += 32 * BATCH) {
        uint4 g[BATCH], u[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
          const int i = min(start + 32 * j, last - 32 + lane);  // the last one again where none is left
          g[j] = load_written(from + i), u[j] = load_written(from + last + i);
        }
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
          if (start + 32 * j >= last) break;
          const Eight gate = unpack(g[j]), up = unpack(u[j]);
          Eight hidden;
#pragma unroll
          for (int k = 0; k < VALUES; ++k) hidden.v[k] = routed * gated(gate.v[k], up.v[k], c.limit);
          uint4 rounded = pack(hidden);
          if (!K::FP8 && c.quantize) {
            hidden = unpack(rounded);
            round_group(hidden);
            rounded = pack(hidden);
          }
          if (K::FP8) most = fmaxf(most, largest(unpack(rounded)));
          to[start + 32 * j] = rounded;
        }
      }
      if constexpr (K::FP8) {
#pragma unroll
        for (int d = 16; d; d /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
        const float factor = scale_of(most), inverse = inverse_of(factor);
        if (lane == 0) const_cast<float*>(c.of[1].token_scale)[row] = factor;
        unsigned char* codes = const_cast<unsigned char*>(c.of[1].x) + size_t(row) * inputs;
#pragma unroll 9
        for (int i = lane; i < last; i += 32)
          store_codes(codes + i * VALUES, unpack(load_written(from + i)), inverse);
      }
    }
  }

  static __device__ void run(const Chain& c, const Maps& maps) {
    const Room room = K::begin(c.of[0]);
    if (!runs_of(c, room)) return;  // another launch's work: it counts with the same numbers
    if (threadIdx.x < 128) {
      fewer_registers<K::PRODUCER_REGS>();
      if (threadIdx.x < 32) {
        const int tiles = tiles_of(c, room, 0);
        produce(c, maps, room, tiles, tiles + tiles_of(c, room, 1));
      }
    } else {
      more_registers<K::CONSUMER_REGS>();
      consume(c, room);
    }
  }
};

// What launchers are given, as the kernel takes it.
template <class K>
Chain chain(const void* x, const void* token_scale, const void* up, const void* up_scale,
            const void* down, const void* down_scale, const void* offsets, const void* routed,
            void* gate_up, void* hidden, void* hidden_scale, void* out, void* state, long long experts,
            long long dim, long long inner, long long rows, long long least, long long most,
            double limit, long long quantize) {
  const int bytes = K::FP8 ? 1 : 2;
  Args a = {};
  a.x = static_cast<const unsigned char*>(x);
  a.token_scale = static_cast<const float*>(token_scale);
  a.weight = static_cast<const unsigned char*>(up);
  a.row_scale = static_cast<const float*>(up_scale);
  a.offsets = static_cast<const long long*>(offsets);
  a.out = static_cast<unsigned short*>(gate_up);
  a.experts = static_cast<int>(experts), a.rows = static_cast<int>(rows);
  a.outputs = static_cast<int>(2 * inner), a.inputs = static_cast<int>(dim);
  a.x_row_bytes = a.inputs * bytes;
  a.least = static_cast<int>(least), a.most = static_cast<int>(most);
  Args b = a;
  b.x = static_cast<const unsigned char*>(hidden);
  b.token_scale = static_cast<const float*>(hidden_scale);
  b.weight = static_cast<const unsigned char*>(down);
  b.row_scale = static_cast<const float*>(down_scale);
  b.out = static_cast<unsigned short*>(out);
  b.outputs = static_cast<int>(dim), b.inputs = static_cast<int>(inner);
  b.x_row_bytes = b.inputs * bytes;
  return {{a, b}, static_cast<const float*>(routed), static_cast<u32*>(state),
          static_cast<float>(limit), static_cast<int>(quantize)};
}

#ifdef __CUDACC__

template <class K>
__global__ void __launch_bounds__(K::THREADS, 1)
    experts_kernel(const __grid_constant__ Chain c, const __grid_constant__ Maps maps) {
  Experts<K>::run(c, maps);
}

template <class K>
int launch_experts(const Chain& c, long long blocks, void* stream) {
  static bool ready = false;
  if (!ready) {
    cudaError_t e = cudaFuncSetAttribute(experts_kernel<K>,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, K::SHARED);
    if (e != cudaSuccess) return e;
    ready = true;
  }
  Maps maps = {};
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < HEIGHTS; ++j) {
      const Args& a = c.of[i];
      if (!describe_rows(maps.of[i][j], a.x, a.inputs * (K::FP8 ? 1 : 2), a.rows, a.x_row_bytes,
                         Experts<K>::height(j)))
        return cudaErrorInvalidValue;
    }
  cudaError_t e = launch_next(experts_kernel<K>, dim3(static_cast<unsigned>(blocks)), dim3(K::THREADS),
                              K::SHARED, static_cast<cudaStream_t>(stream), c, maps);
  return e != cudaSuccess ? e : cudaGetLastError();
}

#endif
