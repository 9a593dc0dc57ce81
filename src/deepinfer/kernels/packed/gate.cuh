// The gate between the products of an expert, and ACT8 of eight values a thread.
#pragma once
#include "decode.cuh"
#ifdef __CUDACC__
#include "ptx.cuh"
#endif

constexpr int VALUES = 8;  // of a thread; four threads hold a group of 32

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

// ACT8's power of two of a group's largest bf16 magnitude: the least that is no less than a 448th.
__device__ inline float scale_of(float most) {
  const u32 bits = __float_as_uint(fmaxf(most, 1e-4f));
  return __uint_as_float(((bits + 0x1FFFFFu) & 0xFF800000u) - (8u << 23));  // 448 = 1.75 * 2^8
}
__device__ inline float inverse_of(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
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
  const float factor = scale_of(most), inverse = inverse_of(factor);
#pragma unroll
  for (int i = 0; i < VALUES; i += 2) {
    e4m3_values(e4m3_pair(x.v[i] * inverse, x.v[i + 1] * inverse), x.v[i], x.v[i + 1]);
    x.v[i] *= factor, x.v[i + 1] *= factor;
  }
}
