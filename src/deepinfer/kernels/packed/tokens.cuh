// Tokens between the products of an expert: gated, rounded with ACT8 or folded into e4m3 codes.
//
// One block a row, everything in registers between one read and one write.
#pragma once
#include "decode.cuh"
#ifdef __CUDACC__
#include "ptx.cuh"
#endif
#include "powers.cuh"

constexpr int VALUES = 8;    // of a thread at a time; four threads hold a group of 32
constexpr int COPIERS = 128;  // threads of a row that is copied or folded: many rows under way
constexpr int PIECES = 8;     // of eight values, most of such a thread

struct Eight {
  float v[VALUES];
};

__device__ inline float low_half(u32 pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_half(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

__device__ inline Eight unpack(uint4 q) {
  const u32 words[4] = {q.x, q.y, q.z, q.w};
  Eight out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out.v[2 * i] = low_half(words[i]);
    out.v[2 * i + 1] = high_half(words[i]);
  }
  return out;
}

__device__ inline uint4 pack(const Eight& x) {
  return make_uint4(pack_bf16(x.v[0], x.v[1]), pack_bf16(x.v[2], x.v[3]), pack_bf16(x.v[4], x.v[5]),
                    pack_bf16(x.v[6], x.v[7]));
}

__device__ inline float largest(const Eight& x) {
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < VALUES; ++i) most = fmaxf(most, fabsf(x.v[i]));
  return most;
}

// silu(gate) * up, both clamped where there is a limit.
__device__ inline float gated(float gate, float up, float limit) {
  if (limit > 0.f) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
  }
  return __fdividef(gate, 1.f + __expf(-gate)) * up;
}

// ACT8 there and back of a group of 32, which four neighbouring threads hold.
__device__ inline void round_group(Eight& x) {
  float most = largest(x);
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  const float power = scale_of(most);
#pragma unroll
  for (int i = 0; i < VALUES; i += 2) round_by(power, x.v[i], x.v[i + 1]);
}

// The largest of a row, for all its threads.
__device__ inline float row_largest(float most) {
  __shared__ float parts[32];
#pragma unroll
  for (int d = 16; d; d /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
  if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = most;
  __syncthreads();
  for (int i = 0; i < int(blockDim.x) / 32; ++i) most = fmaxf(most, parts[i]);
  return most;
}

__device__ inline void store_codes(unsigned char* out, const Eight& x, float inverse) {
  const u32 low = e4m3_pair(x.v[0] * inverse, x.v[1] * inverse) |
                  e4m3_pair(x.v[2] * inverse, x.v[3] * inverse) << 16;
  const u32 high = e4m3_pair(x.v[4] * inverse, x.v[5] * inverse) |
                   e4m3_pair(x.v[6] * inverse, x.v[7] * inverse) << 16;
  *reinterpret_cast<uint2*>(out) = make_uint2(low, high);
}

// The row of x that a block reads: its own, or the one at its place in `source` [rows]; -1 for places
// from offsets[experts] on.
__device__ inline long long source_of(const long long* source, const long long* offsets, int experts) {
  if (!source) return blockIdx.x;
  return blockIdx.x < offsets[experts] ? source[blockIdx.x] : -1;
}

// Where a thread's i-th piece of a row begins, and all its pieces.
__device__ inline int place(int i) { return (i * COPIERS + int(threadIdx.x)) * VALUES; }
__device__ inline void load_row(const unsigned short* row, int inputs, uint4 (&held)[PIECES]) {
#pragma unroll
  for (int i = 0; i < PIECES; ++i)
    if (place(i) < inputs) held[i] = *reinterpret_cast<const uint4*>(row + place(i));
}

// Words that the kernel behind counts with begin at zero.
__device__ inline void clear(u32* counts, int words) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x)
    counts[i] = 0;
}

// x [T, K] bf16 -> out [rows, K], a copy of the rows that `source` names
__global__ void gather_kernel(const unsigned short* x, unsigned short* out, const long long* source,
                              const long long* offsets, int experts, int inputs, long long x_row,
                              u32* counts, int words) {
  next_kernel_may_start();
  previous_kernel_wait();
  clear(counts, words);
  const long long row = blockIdx.x, from = source_of(source, offsets, experts);
  if (from < 0) return;
  uint4 held[PIECES];
  load_row(x + from * x_row, inputs, held);
  uint4* to = reinterpret_cast<uint4*>(out + row * inputs);
#pragma unroll
  for (int i = 0; i < PIECES; ++i)
    if (place(i) < inputs) to[place(i) / VALUES] = held[i];
}

// x [T, K] bf16 -> codes [rows, K], scale [rows], of its rows in order or as `source` names them
__global__ void fold_kernel(const unsigned short* x, unsigned char* codes, float* scale,
                            const long long* source, const long long* offsets, int experts, int inputs,
                            long long x_row, u32* counts, int words) {
  next_kernel_may_start();
  previous_kernel_wait();
  clear(counts, words);
  const long long row = blockIdx.x, from = source_of(source, offsets, experts);
  if (from < 0) return;
  uint4 held[PIECES];
  load_row(x + from * x_row, inputs, held);
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < PIECES; ++i)
    if (place(i) < inputs) most = fmaxf(most, largest(unpack(held[i])));
  const float factor = scale_of(row_largest(most)), inverse = inverse_of(factor);
  if (threadIdx.x == 0) scale[row] = factor;
#pragma unroll
  for (int i = 0; i < PIECES; ++i)
    if (place(i) < inputs) store_codes(codes + row * inputs + place(i), unpack(held[i]), inverse);
}

// gate_up [rows, 2 K] bf16 -> out [rows, K] bf16, rounded with ACT8 where QUANTIZE; or codes and scale
template <bool QUANTIZE, bool FOLD>
__global__ void gate_kernel(const unsigned short* gate_up, const float* weight, void* out, float* scale,
                            const long long* offsets, int experts, int inputs, float limit) {
  previous_kernel_wait();
  next_kernel_may_start();
  const long long row = blockIdx.x;
  const unsigned short* from = gate_up + row * 2 * inputs + threadIdx.x * VALUES;
  const uint4 g = *reinterpret_cast<const uint4*>(from);
  const uint4 u = *reinterpret_cast<const uint4*>(from + inputs);
  const float routed = weight ? weight[row] : 1.f;
  if (row >= offsets[experts]) return;
  const Eight gate = unpack(g), up = unpack(u);
  Eight hidden;
#pragma unroll
  for (int i = 0; i < VALUES; ++i) hidden.v[i] = routed * gated(gate.v[i], up.v[i], limit);
  const uint4 rounded = pack(hidden);
  hidden = unpack(rounded);
  const long long at = row * inputs + threadIdx.x * VALUES;
  if constexpr (FOLD) {
    const float factor = scale_of(row_largest(largest(hidden)));
    if (threadIdx.x == 0) scale[row] = factor;
    store_codes(static_cast<unsigned char*>(out) + at, hidden, inverse_of(factor));
  } else if constexpr (QUANTIZE) {
    round_group(hidden);
    *reinterpret_cast<uint4*>(static_cast<unsigned short*>(out) + at) = pack(hidden);
  } else {
    *reinterpret_cast<uint4*>(static_cast<unsigned short*>(out) + at) = rounded;
  }
}
