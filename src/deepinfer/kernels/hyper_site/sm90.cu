// A hyper-connection site in one launch: streams take the last sublayer's output, give the next
// sublayer its normed input, and the coefficients of the site after it. Four streams of 5120.
//
// Channels are cut into 20 slices of 256, tokens into tiles of 16. A block keeps its slice of the
// projection in shared memory and goes through the tiles of its group: each of 16 warps updates the
// streams of one token, whole 512-byte stretches at a time, then all multiply the rounded streams
// with the projection on tensor cores. Streams are exact there, the projection is a sum of two bf16,
// prepared once. Blocks of a group exchange sums through memory: they publish, count themselves in,
// and come back to a tile two tiles later, when the others are through with it, to write their slice
// of the normed input. Three more warps keep these waits away from the 16: one counts in, one waits
// for the others and makes the norm's factors, one makes the coefficients of one token of a tile.
// All blocks must run at the same time: no more than the card has multiprocessors are launched.
//
// Groups take whole tiles in turn and share what is left evenly; warps without a token rest, so few
// rows are spread over all groups. Where an iteration of the coefficients changes nothing but the last
// bits, those that follow are left out.
//
// The output may come as terms: rows of what experts returned, which are added up in the order of
// their places, and another row last.
//
// Without an output the streams stay as they are: only the coefficients are made. A launch may begin
// while the kernel before it ends, since the projection does not come from there.
//
// All sums over channels have one fixed order: a token's bits depend on nothing but the token.

#include "../act8.cuh"
#include "../bulk.cuh"
#include "../card.cuh"
#include "../chain.cuh"
#include "../meeting.cuh"

namespace {

using u16 = uint16_t;
using u32 = uint32_t;
constexpr u32 kFull = 0xFFFFFFFFu;
constexpr int kStreams = 4, kWidth = 5120, kOut = 24, kSlices = 20, kSlice = kWidth / kSlices;
constexpr int kTokens = 16, kWarps = 16, kWorkers = 32 * kWarps, kThreads = kWorkers + 96;
constexpr int kDepth = kStreams * kSlice;              // of the product in a slice
constexpr int kSteps = kDepth / 16, kOwnSteps = kSteps / kWarps;
constexpr int kWeights = kDepth * kOut * 2 * 2;        // bytes of a slice of the projection
constexpr int kRow = kDepth * 2 + 16;                  // bytes of a token's streams, spread over banks
constexpr int kLag = 2;                                // tiles between publishing and coming back
constexpr int kInputs = kTokens * kSlice * 2;          // bytes of a tile's mixed input
constexpr int kCells = kTokens * kOut;
constexpr int kTerms = 6;                              // of a token's output, at most
constexpr u32 kNone = 0xFFFFFFFFu;                     // place of a term that is not there
constexpr float kSettled = 0x1p-22f;
// Counts of a tile until it is done with, with and without the normed input.
template <bool WHOLE>
constexpr u32 kLeaving = kSlices + kTokens + (WHOLE ? kSlices : 0);

struct Site {
  const u16 *h, *y, *norm_weight;      // [T, 4, C], [T, C], [C]
  const float *post, *comb, *pre;      // [T, 4], [T, 4, 4], [T, 4]
  const u16* fn;                       // [slice][step][3][lane][part][half][2]
  const float *scale, *base;           // [3], [24]
  u16 *streams, *x, *rounded;          // [T, 4, C], [T, C]; x with ACT8 behind, or null
  float *new_pre, *new_post, *new_comb;
  float *sums, *squares;               // published: [tiles, slices, 16, 24], [.., 16, 2]
  u32* counters;                       // [tiles], zero before and after
  const u16* terms;                    // [P, C], or null: y is the whole output
  const int64_t* places;               // [T, num_terms], rows of terms, -1 = none
  int num_rows, groups, iters, num_terms;
  float norm_eps, hc_eps;
};

#ifndef HOST_TWIN
__device__ inline void meet() { asm volatile("bar.sync 1, %0;" ::"n"(kWorkers) : "memory"); }
// a[16, 16] of a tile of rows, as an instruction takes it
__device__ inline void load_matrix(u32 (&a)[4], const unsigned char* rows, int column) {
  const int lane = threadIdx.x % 32;
  const u32 at = address(rows + lane % 16 * kRow + (column + lane / 16 * 8) * 2);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
}
// Counters of a block's warps in shared memory: what is written before an add is seen after a wait.
__device__ inline void add_local(u32* counter) {
  asm volatile("red.release.cta.shared::cta.add.u32 [%0], 1;" ::"r"(address(counter)) : "memory");
}
__device__ inline void wait_local(const u32* counter, u32 least) {
  u32 seen;
  do {
    asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(seen) : "r"(address(counter))
                 : "memory");
  } while (seen < least);
}
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

// A lane's coefficient of a token: pre and post are final, comb is still to be settled. Lanes hold
// the token's 24 projections and, behind them, its sum of squares.
__device__ inline float begun(const Site& p, const float* params, float projection) {
  const int lane = threadIdx.x % 32, which = lane < 8 ? lane / 4 : 2;
  const float squares = __shfl_sync(kFull, projection, kOut);
  const float norm = inverse_root(squares / static_cast<float>(kStreams * kWidth) + p.norm_eps);
  const float value = projection * norm * params[which] + params[3 + lane % kOut];
  float peak = fmaxf(value, __shfl_xor_sync(kFull, value, 1));
  peak = fmaxf(peak, __shfl_xor_sync(kFull, peak, 2));
  const float power = exponential(lane < 8 ? -value : value - peak);
  float k[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) k[j] = __shfl_sync(kFull, power, lane / 4 * 4 + j);
  const float divided = inverse(lane < 8 ? 1.f + power : ((k[0] + k[1]) + k[2]) + k[3]);
  if (lane >= 8) return power * divided + p.hc_eps;
  return lane < 4 ? divided + p.hc_eps : 2.f * divided;
}

// Settles a token's comb, begun in k.
__device__ inline void settle(const Site& p, const float* begun, int row) {
  float k[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) k[i][j] = begun[4 * i + j];
  }
  // The iterations only scale rows and columns: c_ij = r_i k_ij s_j, with u = 1 / r and v = 1 / s. They
  // end early where one changes nothing but the last bits.
  float r[4], s[4], u[4] = {1.f, 1.f, 1.f, 1.f}, v[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    v[j] = ((k[0][j] + k[1][j]) + k[2][j]) + k[3][j] + p.hc_eps;
    s[j] = fast_inverse(v[j]);
    r[j] = 1.f;
  }
  for (int turn = 1; turn < p.iters; ++turn) {
    bool settled = turn > 1;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float before = u[i];
      u[i] = fmaf(k[i][1], s[1], fmaf(k[i][0], s[0], p.hc_eps * before)) +
             fmaf(k[i][3], s[3], k[i][2] * s[2]);
      settled = settled && fabsf(u[i] - before) <= kSettled * u[i];
      r[i] = fast_inverse(u[i]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      v[j] = fmaf(k[1][j], r[1], fmaf(k[0][j], r[0], p.hc_eps * v[j])) +
             fmaf(k[3][j], r[3], k[2][j] * r[2]);
      s[j] = fast_inverse(v[j]);
    }
    if (settled) break;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      p.new_comb[row * 16 + 4 * i + j] = r[i] * k[i][j] * s[j];
    }
  }
}

// Shared memory. Where terms are added up, coefficients lie in the token's row until the streams come
// there, and the norm's weight is read where it is: no byte is left otherwise.
template <bool SUMS>
struct Memory {
  static constexpr int kCoefs = SUMS ? 0 : kWarps * 24 * 4, kGains = SUMS ? 0 : kSlice * 2;
  static constexpr int kBegun = SUMS ? 17 : kOut + 1, kComb = SUMS ? 0 : 8;  // of a tile's token
  static constexpr int kOwnTerms = SUMS ? kTerms * kSlice * 2 : 0;           // of a warp
  static constexpr int kBytes = kWeights + kTokens * kRow + (kLag + 1) * kInputs + kWarps * kCells * 4 +
                                kCoefs + 32 * kBegun * 4 + (kLag + 1) * kTokens * 4 + 16 + 112 + kGains +
                                kWarps * kOwnTerms;
};

template <bool WHOLE, bool SUMS>
__global__ void __launch_bounds__(kThreads, 1) site_kernel(const Site p) {
  using M = Memory<SUMS>;
  SHARED(memory, 128);
  unsigned char* weights = memory;
  unsigned char* rows = weights + kWeights;
  unsigned char* inputs = rows + kTokens * kRow;
  float* partial = reinterpret_cast<float*>(inputs + (kLag + 1) * kInputs);
  float* coefs = partial + kWarps * kCells;
  float* totals = coefs + M::kCoefs / 4;            // of up to 32 tiles' tokens
  float* factors = totals + 32 * M::kBegun;
  uint64_t* barrier = reinterpret_cast<uint64_t*>(factors + (kLag + 1) * kTokens);
  u32* published = reinterpret_cast<u32*>(barrier + 1);  // warps, times tiles
  u32* finished = published + 1;                         // tiles whose factors are there
  float* params = reinterpret_cast<float*>(barrier + 2);  // scale, base
  unsigned char* gains = reinterpret_cast<unsigned char*>(params + 28);  // the norm's, of this slice
  unsigned char* terms = gains + M::kGains;                              // of each warp's token
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int slice = blockIdx.x % kSlices, group = blockIdx.x / kSlices;
  // Groups take whole tiles in turn, then equal shares of the rest: no group has a tile more.
  auto tile_of = [&](int i) { return group + i * p.groups; };
  const int rounds = p.num_rows / (p.groups * kTokens);
  const int first = rounds * p.groups * kTokens, rest = p.num_rows - first;
  const int begin = first + rest * group / p.groups, end = first + rest * (group + 1) / p.groups;
  const int num_tiles = rounds + (end > begin);
  auto row_of = [&](int i, int token) {
    return i < rounds ? tile_of(i) * kTokens + token : begin + token;
  };
  auto rows_of = [&](int i) { return i < rounds ? kTokens : end - begin; };
  if (tid == 0) {
    *published = 0, *finished = 0;
    barrier_begin(barrier);
    barriers_seen();
    bulk_copy(weights, p.fn + static_cast<int64_t>(slice) * (kWeights / 2), kWeights, barrier);
  }
  previous_kernel_wait();
  next_kernel_may_start();
  __syncthreads();

  if (warp == kWarps) {
    for (int i = 0; i < num_tiles; ++i) {
      if (lane == 0) {
        wait_local(published, kWarps * (i + 1));
        count_in(p.counters + tile_of(i));
      }
    }
    return;
  }
  if (warp == kWarps + 1) {
    for (int i = 0; WHOLE && i < num_tiles; ++i) {
      const int tile = tile_of(i);
      if (lane == 0) wait_for(p.counters + tile, kSlices);
      __syncwarp();
      if (lane < kTokens) {
        const float* from = p.squares + (static_cast<int64_t>(tile) * kSlices * kTokens + lane) * 2 + 1;
        float sum = 0.f;
#pragma unroll
        for (int s = 0; s < kSlices; ++s) sum += fresh(from + s * kTokens * 2);
        factors[i % (kLag + 1) * kTokens + lane] =
            inverse_root(sum / static_cast<float>(kWidth) + p.norm_eps);
      }
      __syncwarp();
      if (lane == 0) {
        add_local(finished);
        count_out(p.counters + tile, kLeaving<WHOLE>);
      }
    }
    return;
  }
  if (warp == kWarps + 2) {  // of token number `slice` of each tile
    if (slice >= kTokens) return;
    if (lane < 3 + kOut) params[lane] = lane < 3 ? p.scale[lane] : p.base[lane - 3];
    __syncwarp();
    for (int i = 0; i < num_tiles; ++i) {
      const int tile = tile_of(i);
      if (lane == 0) wait_for(p.counters + tile, kSlices);
      __syncwarp();
      float sum = 0.f;
      if (lane <= kOut) {
        const int64_t first = static_cast<int64_t>(tile) * kSlices;
        const float* from = lane < kOut ? p.sums + (first * kTokens + slice) * kOut + lane
                                        : p.squares + (first * kTokens + slice) * 2;
        const int step = lane < kOut ? kCells : kTokens * 2;
#pragma unroll
        for (int s = 0; s < kSlices; ++s) sum += fresh(from + s * step);
      }
      const u32 left = lane == 0 ? leave(p.counters + tile) : 0;  // known when the rest is done
      const float value = begun(p, params, sum);
      if (lane >= 8 && lane < kOut) totals[i % 32 * M::kBegun + M::kComb + lane - 8] = value;
      if (lane < 8 && slice < rows_of(i)) {
        (lane < 4 ? p.new_pre : p.new_post)[row_of(i, slice) * 4 + lane % 4] = value;
      }
      __syncwarp();
      if (i % 32 == 31 || i + 1 == num_tiles) {  // a lane for each tile
        const int row = row_of(i / 32 * 32 + lane, slice);
        if (lane <= i % 32 && slice < rows_of(i / 32 * 32 + lane)) {
          settle(p, totals + lane * M::kBegun + M::kComb, row);
        }
        __syncwarp();
      }
      if (lane == 0) was_last(p.counters + tile, left, kLeaving<WHOLE>);
    }
    return;
  }

  const int channel = slice * kSlice + lane * 8;
  uint4 v[5];  // streams and output of this warp's token
  u32 place = kNone;  // of this lane's term of the token that is read next
  int rank = kTerms;  // of this lane's term of the token that was read
  unsigned char* own_terms = terms + warp * M::kOwnTerms + lane * 16;
  float coef = 0.f;
  auto find = [&](int i) {
    if (!SUMS || i >= num_tiles || warp >= rows_of(i)) return;
    const int64_t at = static_cast<int64_t>(row_of(i, warp)) * p.num_terms + lane;
    place = lane < p.num_terms ? static_cast<u32>(p.places[at]) : kNone;
  };
  auto read = [&](int i) {
    if (warp >= rows_of(i)) return;
    const int row = row_of(i, warp);
    const u16* from = p.h + static_cast<int64_t>(row) * kStreams * kWidth + channel;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) v[j] = load_once(from + j * kWidth);
    if (!WHOLE) return;
    v[4] = load_once(p.y + static_cast<int64_t>(row) * kWidth + channel);
    if (SUMS) {
      rank = place == kNone ? kTerms : 0;
#pragma unroll
      for (int t = 0; t < kTerms; ++t) {
        const u32 other = __shfl_sync(kFull, place, t);
        if (other != kNone) {
          copy16(own_terms + t * kSlice * 2, p.terms + static_cast<int64_t>(other) * kWidth + channel);
        }
        rank += other < place && place != kNone;
      }
      copies_end();
      find(i + 1);
    }
    if (lane < 24) {
      coef = lane < 4 ? p.post[row * 4 + lane]
                      : lane < 8 ? p.pre[row * 4 + lane - 4] : p.comb[row * 16 + lane - 8];
    }
  };
  find(0);
  read(0);
  if (WHOLE && !SUMS && warp == 0) {
    *reinterpret_cast<uint4*>(gains + lane * 16) = load_once(p.norm_weight + channel);
  }
  for (int i = 0; i < num_tiles + (WHOLE ? kLag : 0); ++i) {
    if (i < num_tiles) {
      const int tile = tile_of(i), row = row_of(i, warp);
      const bool held = warp < rows_of(i);  // else the token's sums are of nothing, and nobody reads them
      float streams_squared = 0.f, input_squared = 0.f;
      if (WHOLE && held) {
        float* own = SUMS ? reinterpret_cast<float*>(rows + warp * kRow) : coefs + warp * 24;
        if (lane < 24) own[lane] = coef;
        __syncwarp();
        Four post, pre, comb[4];
        post.load(own);
        pre.load(own + 4);
#pragma unroll
        for (int j = 0; j < 4; ++j) comb[j].load(own + 8 + 4 * j);
        if (SUMS) {
          copies_wait<0>();
          float sum[8] = {};
#pragma unroll
          for (int t = 0; t < kTerms; ++t) {
            const u32 lanes = __ballot_sync(kFull, rank == t);
            if (lanes) {
              const int from = __ffs(lanes) - 1;
              const uint4 term = *reinterpret_cast<const uint4*>(own_terms + from * kSlice * 2);
#pragma unroll
              for (int q = 0; q < 4; ++q) {
                sum[2 * q] += low_half(word(term, q)), sum[2 * q + 1] += high_half(word(term, q));
              }
            }
          }
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            set_word(v[4], q, bf16_pair(sum[2 * q] + low_half(word(v[4], q)),
                                        sum[2 * q + 1] + high_half(word(v[4], q))));
          }
          __syncwarp();  // streams follow where the coefficients were
        }
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const float y0 = low_half(word(v[4], q)), y1 = high_half(word(v[4], q));
          float h0[4], h1[4], x0 = 0.f, x1 = 0.f;
#pragma unroll
          for (int s = 0; s < 4; ++s) {
            h0[s] = low_half(word(v[s], q)), h1[s] = high_half(word(v[s], q));
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
            set_word(v[j], q, both);
            const float f0 = low_half(both), f1 = high_half(both);
            streams_squared = fmaf(f0, f0, fmaf(f1, f1, streams_squared));
            x0 = fmaf(pre.at[j], f0, x0), x1 = fmaf(pre.at[j], f1, x1);
          }
          const u32 both = bf16_pair(x0, x1);
          set_word(v[4], q, both);
          const float f0 = low_half(both), f1 = high_half(both);
          input_squared = fmaf(f0, f0, fmaf(f1, f1, input_squared));
        }
      } else if (held) {
#pragma unroll
        for (int q = 0; q < 16; ++q) {
          const u32 both = word(v[q % 4], q / 4);
          const float f0 = low_half(both), f1 = high_half(both);
          streams_squared = fmaf(f0, f0, fmaf(f1, f1, streams_squared));
        }
      }
      u16* to = p.streams + static_cast<int64_t>(row) * kStreams * kWidth + channel;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (WHOLE && held) *reinterpret_cast<uint4*>(to + j * kWidth) = v[j];
        if (held) *reinterpret_cast<uint4*>(rows + warp * kRow + (j * kSlice + lane * 8) * 2) = v[j];
      }
      unsigned char* slot = inputs + i % (kLag + 1) * kInputs;
      if (WHOLE && held) *reinterpret_cast<uint4*>(slot + (warp * kSlice + lane * 8) * 2) = v[4];
      if (i + 1 < num_tiles) read(i + 1);
      if (held) {
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
          streams_squared += __shfl_xor_sync(kFull, streams_squared, d);
          input_squared += __shfl_xor_sync(kFull, input_squared, d);
        }
      }
      const int64_t cell = (static_cast<int64_t>(tile) * kSlices + slice) * kTokens;
      if (lane < 2) p.squares[(cell + warp) * 2 + lane] = lane ? input_squared : streams_squared;
      if (i == 0) barrier_wait(barrier, 0);
      meet();
      float acc[3][4] = {};
#pragma unroll
      for (int s = 0; s < kOwnSteps; ++s) {
        const int step = warp * kOwnSteps + s;
        u32 a[4];
        load_matrix(a, rows, step * 16);
#pragma unroll
        for (int t = 0; t < 3; ++t) {
          const uint4 b = *reinterpret_cast<const uint4*>(weights + ((step * 3 + t) * 32 + lane) * 16);
          multiply(acc[t], a, b.x, b.y);
          multiply(acc[t], a, b.z, b.w);
        }
      }
      float* own = partial + warp * kCells + lane / 4 * kOut + lane % 4 * 2;
#pragma unroll
      for (int t = 0; t < 3; ++t) {
        own[t * 8] = acc[t][0], own[t * 8 + 1] = acc[t][1];
        own[8 * kOut + t * 8] = acc[t][2], own[8 * kOut + t * 8 + 1] = acc[t][3];
      }
      meet();
      if (tid < kCells) {
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += partial[w * kCells + tid];
        p.sums[cell * kOut + tid] = sum;
      }
      __syncwarp();
      if (lane == 0) add_local(published);
    }
    if (WHOLE && i >= kLag) {
      const int row = row_of(i - kLag, warp);
      if (warp >= rows_of(i - kLag)) continue;
      if (lane == 0) wait_local(finished, i - kLag + 1);
      __syncwarp();
      const float f = factors[(i - kLag) % (kLag + 1) * kTokens + warp];
      const unsigned char* slot = inputs + (i - kLag) % (kLag + 1) * kInputs;
      const uint4 gain = SUMS ? *reinterpret_cast<const uint4*>(p.norm_weight + channel)
                              : *reinterpret_cast<const uint4*>(gains + lane * 16);
      uint4 x = *reinterpret_cast<const uint4*>(slot + (warp * kSlice + lane * 8) * 2);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        set_word(x, q, bf16_pair(low_half(word(gain, q)) * (low_half(word(x, q)) * f),
                                 high_half(word(gain, q)) * (high_half(word(x, q)) * f)));
      }
      *reinterpret_cast<uint4*>(p.x + static_cast<int64_t>(row) * kWidth + channel) = x;
      if (p.rounded != nullptr) {
        Eight values;
        values.unpack(x);
        values.round();
        *reinterpret_cast<uint4*>(p.rounded + static_cast<int64_t>(row) * kWidth + channel) =
            values.pack();
      }
    }
  }
}

template <bool WHOLE, bool SUMS = false>
int run(const Site& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.groups * kSlices));
  return launch_meeting(site_kernel<WHOLE, SUMS>, grid, dim3(kThreads), Memory<SUMS>::kBytes, stream, p);
}

}  // namespace

// Streams, outputs and the norm's weight are bf16, coefficients fp32; fn as `Site` says. 20 * groups
// blocks, no more than the card runs at once, and no more groups than rows. sums,
// squares: room for [tiles, 20, 16, 24] and [tiles, 20, 16, 2] floats. rounded may be null: x with
// ACT8 behind is not made. Terms, or null: rows at places [rows, num_terms <= 6] that belong to y,
// which comes last. Without y (null) only the coefficients of h are made; of the others
// norm_weight, post, comb, pre, streams, x and rounded are null too.
extern "C" int hyper_site(const void* h, const void* y, const void* norm_weight, const void* post,
                          const void* comb, const void* pre, const void* fn, const void* scale,
                          const void* base, void* streams, void* x, void* rounded, void* new_pre,
                          void* new_post, void* new_comb, void* sums, void* squares, void* counters,
                          const void* terms, const void* places, long long num_terms,
                          long long num_rows, long long groups, long long iters, double norm_eps,
                          double hc_eps, cudaStream_t stream) {
  Site p;
  p.h = static_cast<const u16*>(h), p.y = static_cast<const u16*>(y);
  p.norm_weight = static_cast<const u16*>(norm_weight);
  p.post = static_cast<const float*>(post), p.comb = static_cast<const float*>(comb);
  p.pre = static_cast<const float*>(pre), p.fn = static_cast<const u16*>(fn);
  p.scale = static_cast<const float*>(scale), p.base = static_cast<const float*>(base);
  p.streams = static_cast<u16*>(streams), p.x = static_cast<u16*>(x);
  p.rounded = static_cast<u16*>(rounded);
  p.new_pre = static_cast<float*>(new_pre), p.new_post = static_cast<float*>(new_post);
  p.new_comb = static_cast<float*>(new_comb);
  p.sums = static_cast<float*>(sums), p.squares = static_cast<float*>(squares);
  p.counters = static_cast<u32*>(counters);
  p.terms = static_cast<const u16*>(terms), p.places = static_cast<const int64_t*>(places);
  p.num_terms = static_cast<int>(num_terms);
  p.num_rows = static_cast<int>(num_rows), p.groups = static_cast<int>(groups);
  p.iters = static_cast<int>(iters);
  p.norm_eps = static_cast<float>(norm_eps), p.hc_eps = static_cast<float>(hc_eps);
  if (terms != nullptr) return run<true, true>(p, stream);
  return y == nullptr ? run<false>(p, stream) : run<true>(p, stream);
}
