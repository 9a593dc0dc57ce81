// A hyper-connection site in one launch: streams take the last sublayer's output, give the next
// sublayer its normed input, and the coefficients of the site after it. Four streams of 5120.
//
// Tokens are cut into tiles, the 5120 channels into `slices`. A block takes one slice of a tile:
// per chunk of 32 channels a warp updates the streams of 16 tokens, keeps the mixed input, and
// multiplies the rounded streams with the projection on tensor cores. Streams are exact there, the
// projection is a sum of two bf16, prepared once. Blocks of a tile exchange sums through memory:
// they publish, count themselves in, and wait for each other, so all blocks must run at the same
// time: no more blocks than multiprocessors are launched. Then each writes its own slice of the
// normed input, and the coefficients of its share of the tokens.
//
// All sums over channels form one fixed tree, whatever the number of slices: two chunks as the
// instructions do, eight of these units in pairs, then 10 groups in order. A token's bits depend on
// nothing but the token.

#ifdef HOST_TWIN
#include "cuda_host.h"
#include "cuda_host_site.h"
#else
#include <cuda_runtime.h>
#define SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#endif

#include <cstdint>

namespace {

using u16 = uint16_t;
using u32 = uint32_t;
constexpr u32 kFull = 0xFFFFFFFFu;
constexpr int kStreams = 4, kWidth = 5120, kChunk = 32, kChunks = kWidth / kChunk, kOut = 24;
constexpr int kGroups = 10, kUnit = 2, kStages = 2;
constexpr int kWeights = kStreams * 2 * kOut * kChunk * 2;  // bytes of a chunk's projection
constexpr int kCoefficients = 24;                           // post, pre, comb of a token
constexpr int kSums = 28;                                   // floats of a published token

struct Site {
  const u16 *h, *y, *norm_weight;      // [T, 4, C], [T, C], [C]
  const float *post, *comb, *pre;      // [T, 4], [T, 4, 4], [T, 4]
  const u16 *fn;                       // [chunk][stream][part][output][32]
  const float *scale, *base;           // [3], [24]
  u16 *streams, *x;                    // [T, 4, C], [T, C]
  float *new_pre, *new_post, *new_comb;
  float *sums, *squares;               // published: [tiles, slices, TOKENS, 28], [.., TOKENS]
  u32* counters;                       // [tiles], zero before and after
  int num_rows, tiles, slices, iters;
  float norm_eps, hc_eps;
};

#ifndef HOST_TWIN
__device__ inline u32 address(const void* shared) {
  return static_cast<u32>(__cvta_generic_to_shared(shared));
}
__device__ inline void barrier_begin(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(barrier)) : "memory");
}
__device__ inline void barriers_seen() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void bulk_copy(void* to, const void* from, u32 bytes, uint64_t* barrier) {
  const u32 at = address(barrier);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
      "r"(address(to)), "l"(from), "r"(bytes), "r"(at) : "memory");
}
__device__ inline void barrier_wait(uint64_t* barrier, u32 phase) {
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(address(barrier)), "r"(phase) : "memory");
  } while (!done);
}
__device__ inline void meet(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
__device__ inline uint4 load_once(const u16* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ inline u32 bf16_pair(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// acc[16, 8] += a[16, 16] b[16, 8], bf16 pairs
__device__ inline void multiply(float (&acc)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ inline void count_in(u32* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ inline void wait_for(const u32* counter, u32 least) {
  u32 seen;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  } while (seen < least);
}
// Also counts out: the last of all to leave sets the counter back.
__device__ inline void count_out(u32* counter, u32 last) {
  if (atomicAdd(counter, 1u) == last - 1) atomicExch(counter, 0u);
}
__device__ inline float fresh(const float* p) { return __ldcg(p); }
__device__ inline float inverse_root(float x) { return __fdiv_rn(1.f, __fsqrt_rn(x)); }
__device__ inline float inverse(float x) { return __frcp_rn(x); }
__device__ inline float fast_inverse(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ inline float exponential(float x) { return expf(x); }
#endif

__device__ inline float low_half(u32 w) { return __uint_as_float(w << 16); }
__device__ inline float high_half(u32 w) { return __uint_as_float(w & 0xFFFF0000u); }
__device__ inline u32 word(const uint4& v, int i) {
  return i < 2 ? (i < 1 ? v.x : v.y) : (i < 3 ? v.z : v.w);
}
__device__ inline void set_word(uint4& v, int i, u32 w) {
  if (i == 0) v.x = w;
  if (i == 1) v.y = w;
  if (i == 2) v.z = w;
  if (i == 3) v.w = w;
}

struct Four {
  float at[4];
  __device__ void load(const float* p) {
    const float4 v = *reinterpret_cast<const float4*>(p);
    at[0] = v.x, at[1] = v.y, at[2] = v.z, at[3] = v.w;
  }
};

// Sum over slices of published values, each `step` floats after the other, in the fixed order.
__device__ inline float over_slices(const float* p, int slices, int step) {
  float all = 0.f;
  if (slices == kGroups) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) all += fresh(p + g * step);
  } else if (slices == 2 * kGroups) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) all += fresh(p + 2 * g * step) + fresh(p + (2 * g + 1) * step);
  } else {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const float* q = p + 4 * g * step;
      all += (fresh(q) + fresh(q + step)) + (fresh(q + 2 * step) + fresh(q + 3 * step));
    }
  }
  return all;
}

// Coefficients of a token from its 24 projections and the sum of squares; all lanes do the same.
__device__ inline void coefficients(const Site& p, const float* sums, int row, int lane) {
  const float norm = inverse_root(sums[kOut] / static_cast<float>(kStreams * kWidth) + p.norm_eps);
  float k[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float a = sums[i] * norm * p.scale[0] + p.base[i];
    const float b = sums[4 + i] * norm * p.scale[1] + p.base[4 + i];
    const float pre = inverse(1.f + exponential(-a)) + p.hc_eps;
    const float post = 2.f * inverse(1.f + exponential(-b));
    if (lane == i) p.new_pre[row * 4 + i] = pre;
    if (lane == i) p.new_post[row * 4 + i] = post;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      k[i][j] = sums[8 + 4 * i + j] * norm * p.scale[2] + p.base[8 + 4 * i + j];
    }
    const float peak = fmaxf(fmaxf(k[i][0], k[i][1]), fmaxf(k[i][2], k[i][3]));
#pragma unroll
    for (int j = 0; j < 4; ++j) k[i][j] = exponential(k[i][j] - peak);
    const float sum = inverse(((k[i][0] + k[i][1]) + k[i][2]) + k[i][3]);
#pragma unroll
    for (int j = 0; j < 4; ++j) k[i][j] = k[i][j] * sum + p.hc_eps;
  }
  // The iterations only scale rows and columns: c_ij = r_i k_ij s_j.
  float r[4] = {1.f, 1.f, 1.f, 1.f}, s[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    s[j] = fast_inverse(((k[0][j] + k[1][j]) + k[2][j]) + k[3][j] + p.hc_eps);
  }
  for (int turn = 1; turn < p.iters; ++turn) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float sum = (k[i][0] * s[0] + k[i][1] * s[1]) + (k[i][2] * s[2] + k[i][3] * s[3]);
      r[i] *= fast_inverse(r[i] * sum + p.hc_eps);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float sum = (k[0][j] * r[0] + k[1][j] * r[1]) + (k[2][j] * r[2] + k[3][j] * r[3]);
      s[j] *= fast_inverse(s[j] * sum + p.hc_eps);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (lane == 4 * i + j) p.new_comb[row * 16 + lane] = r[i] * k[i][j] * s[j];
    }
  }
}

template <int MT, int KT>
int shared_bytes(int leaves) {
  const int tokens = 16 * MT;
  return kStages * KT * kWeights + leaves * 2 * 32 * MT * KT * 16 + tokens * kCoefficients * 4 +
         (KT - 1) * tokens * 26 * 4 + tokens * 4 + MT * KT * kSums * 4 + kStages * KT * 8;
}

// MT warps side by side over tokens, KT over channels; AHEAD: both chunks of a unit are asked for
// before the first is used.
template <int MT, int KT, bool AHEAD>
__global__ void __launch_bounds__(32 * MT * KT, 1) site_kernel(const Site p) {
  constexpr int kThreads = 32 * MT * KT, kTokens = 16 * MT;
  SHARED(memory);
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, c = lane % 4;
  const int m = warp % MT, k = warp / MT;
  const int slice = blockIdx.x % p.slices, group = blockIdx.x / p.slices;
  const int num_groups = gridDim.x / p.slices;
  const int leaves = kChunks / p.slices / KT;
  const int first_chunk = slice * (kChunks / p.slices) + k * leaves;
  unsigned char* weights = memory;
  unsigned char* mixed = weights + kStages * KT * kWeights;
  float* coefs = reinterpret_cast<float*>(mixed + leaves * 2 * kThreads * 16);
  float* partial = coefs + kTokens * kCoefficients;
  float* factor = partial + (KT - 1) * kTokens * 26;
  float* totals = factor + kTokens;
  uint64_t* barriers = reinterpret_cast<uint64_t*>(totals + MT * KT * kSums) + k * kStages;

  // Projections of chunks come in order, tile after tile; a warp of those that share them asks.
  const int my_tiles = p.tiles > group ? (p.tiles - group + num_groups - 1) / num_groups : 0;
  const bool asks = m == 0 && lane == 0;
  auto ask = [&](int turn) {
    if (turn >= my_tiles * leaves) return;
    const int chunk = first_chunk + turn % leaves, stage = turn % kStages;
    bulk_copy(weights + (stage * KT + k) * kWeights, p.fn + static_cast<int64_t>(chunk) * (kWeights / 2),
              kWeights, barriers + stage);
  };
  if (asks) {
    for (int i = 0; i < kStages; ++i) barrier_begin(barriers + i);
    barriers_seen();
    for (int i = 0; i < kStages; ++i) ask(i);
  }
  int turn = 0;
  for (int tile = group; tile < p.tiles; tile += num_groups) {
    __syncthreads();
    for (int i = tid; i < kTokens * kCoefficients; i += kThreads) {
      const int row = min(tile * kTokens + i / kCoefficients, p.num_rows - 1), at = i % kCoefficients;
      coefs[i] = at < 4 ? p.post[row * 4 + at]
                        : at < 8 ? p.pre[row * 4 + at - 4] : p.comb[row * 16 + at - 8];
    }
    const u16* rows[2];
    const u16* outputs[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = min(tile * kTokens + m * 16 + lane / 4 + 8 * r, p.num_rows - 1);
      rows[r] = p.h + static_cast<int64_t>(row) * kStreams * kWidth + first_chunk * kChunk + c * 8;
      outputs[r] = p.y + static_cast<int64_t>(row) * kWidth + first_chunk * kChunk + c * 8;
    }
    __syncthreads();
    float leaf[16], total[16];
    for (int unit = 0; unit < leaves; unit += kUnit) {
      float acc[3][4] = {};
      float squares[4] = {};  // streams of both rows, then inputs
      uint4 v[AHEAD ? kUnit : 1][2][5];
      auto read = [&](int i, uint4 (&to)[2][5]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (int j = 0; j < kStreams; ++j) {
            to[r][j] = load_once(rows[r] + (unit + i) * kChunk + j * kWidth);
          }
          to[r][4] = load_once(outputs[r] + (unit + i) * kChunk);
        }
      };
      if (AHEAD) {
#pragma unroll
        for (int i = 0; i < kUnit; ++i) read(i, v[AHEAD ? i : 0]);
      }
#pragma unroll(AHEAD ? kUnit : 1)
      for (int i = 0; i < kUnit; ++i, ++turn) {
        uint4(&w)[2][5] = v[AHEAD ? i : 0];
        if (!AHEAD) read(i, w);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float* own = coefs + (m * 16 + lane / 4 + 8 * r) * kCoefficients;
          Four post, pre, comb[4];
          post.load(own);
          pre.load(own + 4);
#pragma unroll
          for (int j = 0; j < 4; ++j) comb[j].load(own + 8 + 4 * j);
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            const float y0 = low_half(word(w[r][4], q)), y1 = high_half(word(w[r][4], q));
            float h0[4], h1[4], x0 = 0.f, x1 = 0.f;
#pragma unroll
            for (int s = 0; s < 4; ++s) {
              h0[s] = low_half(word(w[r][s], q)), h1[s] = high_half(word(w[r][s], q));
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              float n0 = comb[0].at[j] * h0[0], n1 = comb[0].at[j] * h1[0];
#pragma unroll
              for (int s = 1; s < 4; ++s) {
                n0 = fmaf(comb[s].at[j], h0[s], n0), n1 = fmaf(comb[s].at[j], h1[s], n1);
              }
              n0 = fmaf(post.at[j], y0, n0), n1 = fmaf(post.at[j], y1, n1);
              const u32 both = bf16_pair(n0, n1);
              set_word(w[r][j], q, both);
              const float f0 = low_half(both), f1 = high_half(both);
              squares[r] = fmaf(f0, f0, fmaf(f1, f1, squares[r]));
              x0 = fmaf(pre.at[j], f0, x0), x1 = fmaf(pre.at[j], f1, x1);
            }
            const u32 both = bf16_pair(x0, x1);
            set_word(w[r][4], q, both);
            const float f0 = low_half(both), f1 = high_half(both);
            squares[2 + r] = fmaf(f0, f0, fmaf(f1, f1, squares[2 + r]));
          }
          const int row = tile * kTokens + m * 16 + lane / 4 + 8 * r;
          if (row < p.num_rows) {
            u16* to = p.streams + (rows[r] - p.h) + (unit + i) * kChunk;
#pragma unroll
            for (int j = 0; j < 4; ++j) *reinterpret_cast<uint4*>(to + j * kWidth) = w[r][j];
          }
          *reinterpret_cast<uint4*>(mixed + (((unit + i) * 2 + r) * kThreads + tid) * 16) = w[r][4];
        }
        const int stage = turn % kStages;
        barrier_wait(barriers + stage, turn / kStages & 1);
        const unsigned char* fn = weights + (stage * KT + k) * kWeights + (lane / 4) * 64 + c * 16;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            uint4 b[3];
#pragma unroll
            for (int t = 0; t < 3; ++t) {
              b[t] = *reinterpret_cast<const uint4*>(fn + ((j * 2 + part) * kOut + t * 8) * 64);
            }
#pragma unroll
            for (int t = 0; t < 3; ++t) {
              multiply(acc[t], w[0][j].x, w[1][j].x, w[0][j].y, w[1][j].y, b[t].x, b[t].y);
            }
#pragma unroll
            for (int t = 0; t < 3; ++t) {
              multiply(acc[t], w[0][j].z, w[1][j].z, w[0][j].w, w[1][j].w, b[t].z, b[t].w);
            }
          }
        }
        meet(1 + k, 32 * MT);
        if (asks) ask(turn + kStages);
      }
#pragma unroll
      for (int n = 0; n < 12; ++n) leaf[n] = acc[n / 4][n % 4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        float sum = squares[n];
        sum += __shfl_xor_sync(kFull, sum, 1);
        sum += __shfl_xor_sync(kFull, sum, 2);
        leaf[12 + n] = sum;
      }
#pragma unroll
      for (int n = 0; n < 16; ++n) total[n] = unit ? total[n] + leaf[n] : leaf[n];
    }
#pragma unroll
    for (int n = 0; n < 16; ++n) leaf[n] = total[n];

    // Warps over the same tokens, then everybody's sums to memory.
    const int token = m * 16 + lane / 4;
    auto place = [&](int n) {  // [token][column] of a value
      return (token + (n >= 12 ? (n - 12) % 2 : n / 2 % 2) * 8) * 26 +
             (n >= 12 ? kOut + (n - 12) / 2 : n / 4 * 8 + 2 * c + n % 2);
    };
    if (KT > 1) {
      if (k > 0) {
#pragma unroll
        for (int n = 0; n < 16; ++n) {
          if (n < 12 || c == 0) partial[(k - 1) * kTokens * 26 + place(n)] = leaf[n];
        }
      }
      __syncthreads();
      if (k == 0) {
#pragma unroll
        for (int n = 0; n < 16; ++n) {
          const float* other = partial + place(n);
          leaf[n] += other[0];
          if (KT == 4) leaf[n] += other[kTokens * 26] + other[2 * kTokens * 26];
        }
      }
    }
    const int64_t published = static_cast<int64_t>(tile) * p.slices * kTokens;
    if (k == 0) {
      float* sums = p.sums + (published + slice * kTokens) * kSums;
      float* squares = p.squares + published + slice * kTokens;
#pragma unroll
      for (int n = 0; n < 12; n += 2) {
        const int at = token + n / 2 % 2 * 8;
        float* to = sums + at * kSums + n / 4 * 8 + 2 * c;
        to[0] = leaf[n], to[1] = leaf[n + 1];
      }
      if (c < 2) sums[(token + 8 * c) * kSums + kOut] = c ? leaf[13] : leaf[12];
      if (c < 2) squares[token + 8 * c] = c ? leaf[15] : leaf[14];
    }
    __syncthreads();
    if (tid == 0) count_in(p.counters + tile);
    if (tid == 0) wait_for(p.counters + tile, p.slices);
    __syncthreads();

    if (tid < kTokens) {
      const float sum = over_slices(p.squares + published + tid, p.slices, kTokens);
      factor[tid] = inverse_root(sum / static_cast<float>(kWidth) + p.norm_eps);
    }
    const int own = slice + warp * p.slices;  // this warp's token of the tile, if any
    const bool owns = own < kTokens && tile * kTokens + own < p.num_rows;
    if (owns && lane <= kOut) {
      totals[warp * kSums + lane] =
          over_slices(p.sums + (published + own) * kSums + lane, p.slices, kTokens * kSums);
    }
    __syncthreads();
    if (tid == 0) count_out(p.counters + tile, 2u * p.slices);
    for (int i = 0; i < leaves; ++i) {
      const int channel = (first_chunk + i) * kChunk + c * 8;
      const uint4 w = *reinterpret_cast<const uint4*>(p.norm_weight + channel);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int at = token + 8 * r, row = tile * kTokens + at;
        uint4 x = *reinterpret_cast<const uint4*>(mixed + ((i * 2 + r) * kThreads + tid) * 16);
        const float f = factor[at];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          set_word(x, q, bf16_pair(low_half(word(w, q)) * (low_half(word(x, q)) * f),
                                   high_half(word(w, q)) * (high_half(word(x, q)) * f)));
        }
        if (row < p.num_rows) {
          *reinterpret_cast<uint4*>(p.x + static_cast<int64_t>(row) * kWidth + channel) = x;
        }
      }
    }
    if (owns) coefficients(p, totals + warp * kSums, tile * kTokens + own, lane);
  }
}

template <int MT, int KT, bool AHEAD>
int run(Site p, int groups, cudaStream_t stream) {
  constexpr int kThreads = 32 * MT * KT;
  const int leaves = kChunks / p.slices / KT, bytes = shared_bytes<MT, KT>(leaves);
  p.tiles = (p.num_rows + 16 * MT - 1) / (16 * MT);
  const dim3 grid(static_cast<unsigned>(groups * p.slices));
#ifdef HOST_TWIN
  host::launch_together(grid, dim3(kThreads), bytes, [&] { site_kernel<MT, KT, AHEAD>(p); });
  return 0;
#else
  auto kernel = site_kernel<MT, KT, AHEAD>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return static_cast<int>(status);
  kernel<<<grid, kThreads, bytes, stream>>>(p);
  return static_cast<int>(cudaGetLastError());
#endif
}

}  // namespace

// Streams, outputs and the norm's weight are bf16, coefficients fp32; fn as `Site` says. `form`: 0 =
// tiles of 32 tokens, 4 warps, 40 slices; 1 = 32 tokens, 8 warps, 10 or 20; 2 = 64 tokens, 16 warps,
// 10. slices * groups blocks, no more than the card runs at once. sums, squares: room for [tiles,
// slices, tile, 28] and [tiles, slices, tile] floats.
extern "C" int hyper_site(const void* h, const void* y, const void* norm_weight, const void* post,
                          const void* comb, const void* pre, const void* fn, const void* scale,
                          const void* base, void* streams, void* x, void* new_pre, void* new_post,
                          void* new_comb, void* sums, void* squares, void* counters,
                          long long num_rows, long long form, long long slices, long long groups,
                          long long iters, double norm_eps, double hc_eps, cudaStream_t stream) {
  Site p;
  p.h = static_cast<const u16*>(h), p.y = static_cast<const u16*>(y);
  p.norm_weight = static_cast<const u16*>(norm_weight);
  p.post = static_cast<const float*>(post), p.comb = static_cast<const float*>(comb);
  p.pre = static_cast<const float*>(pre), p.fn = static_cast<const u16*>(fn);
  p.scale = static_cast<const float*>(scale), p.base = static_cast<const float*>(base);
  p.streams = static_cast<u16*>(streams), p.x = static_cast<u16*>(x);
  p.new_pre = static_cast<float*>(new_pre), p.new_post = static_cast<float*>(new_post);
  p.new_comb = static_cast<float*>(new_comb);
  p.sums = static_cast<float*>(sums), p.squares = static_cast<float*>(squares);
  p.counters = static_cast<u32*>(counters);
  p.num_rows = static_cast<int>(num_rows), p.slices = static_cast<int>(slices);
  p.iters = static_cast<int>(iters);
  p.norm_eps = static_cast<float>(norm_eps), p.hc_eps = static_cast<float>(hc_eps);
  const int blocks = static_cast<int>(groups);
  if (form == 0) return run<2, 2, true>(p, blocks, stream);
  if (form == 1) return run<2, 4, true>(p, blocks, stream);
  return run<4, 4, false>(p, blocks, stream);
}
