// Scores of 384 experts, the choice among them and ACT8 of the input, in one launch.
//
// Inputs of 5120 are cut into 8 parts, each part into 4 slices that belong to warps. A block takes a
// part of 48 or 96 experts: their weights stay in registers, read before the kernel in front has
// ended. Tokens come in tiles of 16 through a ring in shared memory; the block adds the four slices of
// a tile up and publishes its part. When all blocks of its group of tokens have counted themselves
// in, each warp adds the 8 parts of a token and chooses. Every sum has one order, so a token's bits
// depend on nothing but the token.
//
// Where other ranks hold experts, a token's choices come out as slots in the order of experts, counted
// as they are made.
//
// Experts stand in the rows of an instruction and tokens in its columns. The order of inputs inside
// an instruction is free: a lane reads 16 bytes of an expert and of a token and uses them in two steps.

#include "../act8.cuh"
#include "../bulk.cuh"
#include "../card.cuh"
#include "../chain.cuh"
#include "../meeting.cuh"

namespace {

using u16 = uint16_t;
using u32 = uint32_t;
constexpr u32 kFull = 0xFFFFFFFFu;
constexpr int kExperts = 384, kWidth = 5120, kParts = 8, kPart = kWidth / kParts;
constexpr int kSlices = 4, kChunks = kPart / kSlices / 32;  // of 32 inputs
constexpr int kColumns = 3, kWarps = kSlices * kColumns, kThreads = 32 * kWarps;
constexpr int kTile = 16, kSlots = 4;
constexpr int kRow = kPart * 2 + 64;  // bytes of a token's part, spread over banks
constexpr int kPieces = kPart / 8;    // of 16 bytes
constexpr int kOwn = kExperts / 32;   // experts of a lane in the choice

template <int EACH>  // tiles of 16 experts a warp
struct Shape {
  static constexpr int kHeld = kColumns * EACH * 16, kTiles = kExperts / kHeld;
  static constexpr int kBlocks = kParts * kTiles;       // of a group
  static constexpr int kPitch = kHeld + 4;              // of partial sums, spread over banks
  static constexpr int kSums = kSlices * kTile * kPitch;
  static constexpr int kShared = kSlots * kTile * kRow + 2 * kSums * 4;
};

struct Call {
  const u16 *x, *gate;   // [T, C], [E, C]
  long long x_row;       // stride in values
  const float* bias;     // [E]
  float* sums;           // [parts, T, E]
  u32* counters;         // [groups], zero before and after
  int64_t* chosen;       // [T, active]
  float* weights;        // [T, active]
  u16* rounded;          // [T, C] or null
  int num_rows, groups, active;
  float scaling, eps;
  const int64_t *slots_of, *copies;  // [E, copies], [E], or null: experts come out
  unsigned long long* counts;        // [E]
  const unsigned char* live;         // [T], or null: all are
  int64_t* places;                   // [T, active]
  int most_copies, self, spread;
};

#ifndef HOST_TWIN
__device__ inline float root(float x) { return __fsqrt_rn(x); }
__device__ inline float exponential(float x) { return __expf(x); }
__device__ inline float logarithm(float x) { return __logf(x); }
// Stays in front of the wait for the previous kernel, where a load of constants would not.
__device__ inline uint4 load_early(const u16* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
#else
inline float root(float x) { return std::sqrt(x); }
inline float logarithm(float x) { return std::log(x); }
inline uint4 load_early(const u16* p) { return *reinterpret_cast<const uint4*>(p); }
#endif

// sqrt(log(1 + e^x)), short: with z = e^-|x|, a series where 1 + z loses z's bits.
__device__ inline float score_of(float x) {
  const float z = exponential(-fabsf(x));
  const float series = z * fmaf(z, fmaf(z, fmaf(z, -0.25f, 1.f / 3.f), -0.5f), 1.f);
  const float rest = z < 0x1p-6f ? series : logarithm(1.f + z);
  return root(x > 20.f ? x : (x > 0.f ? x : 0.f) + rest);
}
// An integer in the order of the values: -0 equals 0, NaN is above everything, 0 below.
__device__ inline u32 key_of(float x) {
  if (x != x) return kFull;
  const u32 bits = __float_as_uint(x + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// A warp chooses a token's experts.
__device__ inline void choose(const Call& p, int row, const float (&bias)[kOwn]) {
  const int lane = threadIdx.x % 32;
  auto expert = [&](int i) { return (i / 4 * 32 + lane) * 4 + i % 4; };
  float4 parts[kParts][kOwn / 4];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const float* from = p.sums + (static_cast<int64_t>(part) * p.num_rows + row) * kExperts;
#pragma unroll
    for (int i = 0; i < kOwn / 4; ++i) {
      parts[part][i] = fresh(reinterpret_cast<const float4*>(from) + i * 32 + lane);
    }
  }
  float score[kOwn];
  u32 key[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn / 4; ++i) {
    float4 sum = parts[0][i];
#pragma unroll
    for (int part = 1; part < kParts; ++part) {
      sum.x += parts[part][i].x, sum.y += parts[part][i].y;
      sum.z += parts[part][i].z, sum.w += parts[part][i].w;
    }
    score[4 * i] = sum.x, score[4 * i + 1] = sum.y;
    score[4 * i + 2] = sum.z, score[4 * i + 3] = sum.w;
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    score[i] = score_of(score[i]);
    key[i] = key_of(score[i] + bias[i]);
  }
  float total = 0.f, own = 0.f;
  int own_place = 0;
  for (int turn = 0; turn < p.active; ++turn) {
    u32 best = key[0];
    int place = expert(0);
#pragma unroll
    for (int i = 1; i < kOwn; ++i) {
      if (key[i] > best) best = key[i], place = expert(i);
    }
    const u32 top = __reduce_max_sync(kFull, best);
    place = static_cast<int>(__reduce_min_sync(kFull, best == top ? place : kFull));
    float mine = 0.f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (expert(i) == place) mine = score[i], key[i] = 0;
    }
    mine = __uint_as_float(__shfl_sync(kFull, __float_as_uint(mine), place / 4 % 32));
    total += mine;
    if (lane == turn) own = mine, own_place = place;
  }
  const int64_t first = static_cast<int64_t>(row) * p.active;
  const float weight = __fmul_rn(__fdiv_rn(own, total + p.eps), p.scaling);
  if (p.slots_of != nullptr) {
    int rank = 0;
    for (int other = 0; other < p.active; ++other) {
      rank += static_cast<int>(__shfl_sync(kFull, static_cast<u32>(own_place), other)) < own_place;
    }
    if (lane < p.active) {
      const int64_t at = first + rank;
      int64_t slot = -1;
      if (p.live == nullptr || p.live[row]) {
        int64_t copy = 0;
        if (p.most_copies > 1) {
          copy = (p.self + static_cast<int64_t>(row) * p.spread) % p.copies[own_place];
        }
        slot = p.slots_of[static_cast<int64_t>(own_place) * p.most_copies + copy];
        atomicAdd(p.counts + own_place, 1ull);
      }
      p.chosen[at] = slot;
      p.weights[at] = weight;
      p.places[at] = slot < 0 ? -1 : at;
    }
  } else if (lane < p.active) {
    p.chosen[first + lane] = own_place;
    p.weights[first + lane] = weight;
  }
}

template <int EACH>
__global__ void __launch_bounds__(kThreads, 1) route_kernel(const Call p) {
  using S = Shape<EACH>;
  SHARED(memory, 128);
  unsigned char* ring = memory;
  float* sums = reinterpret_cast<float*>(memory + kSlots * kTile * kRow);
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int part = blockIdx.x % kParts, tile_of_experts = blockIdx.x / kParts % S::kTiles;
  const int group = blockIdx.x / S::kBlocks;
  const int tiles = (p.num_rows + kTile - 1) / kTile;
  const int num_tiles = (tiles - group + p.groups - 1) / p.groups;
  const int slice = warp % kSlices, column = warp / kSlices;

  // The weights, as an instruction takes them: rows lane / 4 and lane / 4 + 8.
  uint4 w[EACH][kChunks][2];
#pragma unroll
  for (int m = 0; m < EACH; ++m) {
    const int expert = tile_of_experts * S::kHeld + (column * EACH + m) * 16 + lane / 4;
    const u16* from = p.gate + static_cast<int64_t>(expert) * kWidth + part * kPart +
                      slice * kChunks * 32 + lane % 4 * 8;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      w[m][c][0] = load_early(from + c * 32);
      w[m][c][1] = load_early(from + 8 * kWidth + c * 32);
    }
  }
  previous_kernel_wait();
  next_kernel_may_start();

  auto first_row = [&](int i) { return (group + i * p.groups) * kTile; };
  auto fetch = [&](int i) {
    if (i < num_tiles) {
      unsigned char* slot = ring + i % kSlots * kTile * kRow;
      const int token = tid / kPieces, at = tid % kPieces * 8;
      constexpr int kOnce = kThreads / kPieces;  // tokens at a time
      const u16* from = p.x + (first_row(i) + token) * p.x_row + part * kPart + at;
      unsigned char* to = slot + token * kRow + at * 2;
#pragma unroll
      for (int t = 0; t < kTile; t += kOnce) {
        if (token < kOnce && first_row(i) + token + t < p.num_rows) {
          copy16(to + t * kRow, from + t * p.x_row);
        }
      }
    }
    copies_end();
  };
  // Adds the slices of a tile up.
  auto publish = [&](int i) {
    constexpr int kFours = S::kHeld / 4;
    const int token = tid / kFours, four = tid % kFours, row = first_row(i) + token;
    if (token >= kTile || row >= p.num_rows) return;
    const float* from = sums + i % 2 * S::kSums + token * S::kPitch + four * 4;
    float4 sum = *reinterpret_cast<const float4*>(from);
#pragma unroll
    for (int s = 1; s < kSlices; ++s) {
      const float4 v = *reinterpret_cast<const float4*>(from + s * kTile * S::kPitch);
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    float* to = p.sums + (static_cast<int64_t>(part) * p.num_rows + row) * kExperts;
    *reinterpret_cast<float4*>(to + tile_of_experts * S::kHeld + four * 4) = sum;
  };
#pragma unroll
  for (int i = 0; i < kSlots - 1; ++i) fetch(i);
  for (int i = 0; i < num_tiles; ++i) {
    copies_wait<kSlots - 2>();
    __syncthreads();
    fetch(i + kSlots - 1);
    const unsigned char* slot = ring + i % kSlots * kTile * kRow;
    const unsigned char* own = slot + lane / 4 * kRow + (slice * kChunks * 32 + lane % 4 * 8) * 2;
    const bool both = first_row(i) + 8 < p.num_rows;
    float acc[EACH][2][4] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        if (n == 0 || both) {
          const uint4 b = *reinterpret_cast<const uint4*>(own + n * 8 * kRow + c * 64);
#pragma unroll
          for (int m = 0; m < EACH; ++m) {
            const u32 low[4] = {w[m][c][0].x, w[m][c][1].x, w[m][c][0].y, w[m][c][1].y};
            const u32 high[4] = {w[m][c][0].z, w[m][c][1].z, w[m][c][0].w, w[m][c][1].w};
            multiply(acc[m][n], low, b.x, b.y);
            multiply(acc[m][n], high, b.z, b.w);
          }
        }
      }
    }
    if (i > 0) publish(i - 1);
    float* to = sums + i % 2 * S::kSums + slice * kTile * S::kPitch;
#pragma unroll
    for (int m = 0; m < EACH; ++m) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int token = n * 8 + lane % 4 * 2 + e % 2;
          to[token * S::kPitch + (column * EACH + m) * 16 + lane / 4 + e / 2 * 8] = acc[m][n][e];
        }
      }
    }
    if (p.rounded != nullptr) {  // blocks of a part share its rows
      constexpr int kRows = kTile / S::kTiles;
      for (int piece = tid; piece / 32 * 32 < kRows * kPieces; piece += kThreads) {
        const bool held = piece < kRows * kPieces;
        const int token = held ? piece / kPieces * S::kTiles + tile_of_experts : 0;
        const int at = held ? piece % kPieces : 0, row = first_row(i) + token;
        Eight values;
        values.unpack(*reinterpret_cast<const uint4*>(slot + token * kRow + at * 16));
        values.round();
        if (held && row < p.num_rows) {
          u16* out = p.rounded + static_cast<int64_t>(row) * kWidth + part * kPart + at * 8;
          *reinterpret_cast<uint4*>(out) = values.pack();
        }
      }
    }
  }
  __syncthreads();
  publish(num_tiles - 1);
  float bias[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) bias[i] = p.bias[(i / 4 * 32 + lane) * 4 + i % 4];
  __syncthreads();
  u32 *counter = p.counters + group, left = 0;
  if (tid == 0) {
    count_in(counter);
    wait_for(counter, S::kBlocks);
    left = leave(counter);  // known when the rest is done
  }
  __syncthreads();
  const int self = warp * S::kBlocks + static_cast<int>(blockIdx.x) % S::kBlocks;
  for (int j = self; j < num_tiles * kTile; j += kWarps * S::kBlocks) {
    const int row = first_row(j / kTile) + j % kTile;
    if (row < p.num_rows) choose(p, row, bias);
  }
  if (tid == 0) was_last(counter, left, 2 * S::kBlocks);
}

template <int EACH>
int run(const Call& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.groups * Shape<EACH>::kBlocks));
  return launch_meeting(route_kernel<EACH>, grid, dim3(kThreads), Shape<EACH>::kShared, stream, p);
}

}  // namespace

// x, gate and rounded (or null) are bf16, 5120 wide and aligned to 16 bytes, x with a row stride in
// values; bias fp32, 384 experts, active <= 32. sums: room for [8, rows, 384] floats. wide: blocks of
// 96 experts instead of 48, 32 instead of 64 a group; all groups' blocks must run at once. slots_of
// [384, most_copies], or null: then `chosen` takes experts and what follows is not used; counts [384],
// live [rows] or null.
extern "C" int route(const void* x, long long x_row, const void* gate, const void* bias, void* sums,
                     void* counters, void* chosen, void* weights, void* rounded, long long num_rows,
                     long long groups, long long wide, long long active, double scaling,
                     double eps, const void* slots_of, const void* copies, void* counts,
                     const void* live, void* places, long long most_copies, long long self,
                     long long spread, cudaStream_t stream) {
  Call p;
  p.x = static_cast<const u16*>(x), p.gate = static_cast<const u16*>(gate);
  p.x_row = x_row, p.bias = static_cast<const float*>(bias), p.sums = static_cast<float*>(sums);
  p.counters = static_cast<u32*>(counters), p.chosen = static_cast<int64_t*>(chosen);
  p.weights = static_cast<float*>(weights), p.rounded = static_cast<u16*>(rounded);
  p.num_rows = static_cast<int>(num_rows), p.groups = static_cast<int>(groups);
  p.active = static_cast<int>(active);
  p.scaling = static_cast<float>(scaling), p.eps = static_cast<float>(eps);
  p.slots_of = static_cast<const int64_t*>(slots_of);
  p.copies = static_cast<const int64_t*>(copies);
  p.counts = static_cast<unsigned long long*>(counts);
  p.live = static_cast<const unsigned char*>(live);
  p.places = static_cast<int64_t*>(places);
  p.most_copies = static_cast<int>(most_copies), p.self = static_cast<int>(self);
  p.spread = static_cast<int>(spread);
  return wide ? run<2>(p, stream) : run<1>(p, stream);
}
