// Dense products of packed e4m3 weights with at most eight tokens on SM90a.
//
// Every warp takes 32 outputs and a part of K, and has a ring of its own that it fills by the copy
// engine and empties alone: no thread waits for another before the parts are added up, in the order
// of the warps that made them, within the block. Two blocks fit a multiprocessor, so that those of
// the next kernel stand with their weights on the way when the last of this one end.
#pragma once
#include "dense.cuh"

// `ways` warps share the K of 32 outputs; the others of a block have 32 outputs more.
template <int STAGES>
struct Thin {
  static constexpr int TOKENS = 8, WARPS = 8, THREADS = 32 * WARPS, RESIDENT = 2;
  static constexpr int BLOCK = 4096 + 16;
  static constexpr int TOKEN_BYTES = TOKENS * 128, WEIGHT_BYTES = 2048;  // of a stage of 64 inputs
  static constexpr int MOST_GROUPS = 2;  // of 32 outputs in a block
  static constexpr int MOST_STEPS = 32;  // of 64 inputs a warp: a lane holds the scales of one
  static constexpr int RING = WARPS * STAGES * (TOKEN_BYTES + WEIGHT_BYTES);
  static constexpr int SUMS = WARPS * TOKENS * 32 * 4;
  static constexpr int SHARED = RING + SUMS + 8 * WARPS * STAGES + 1024;

  __host__ __device__ static int height(int ways) { return 32 * (WARPS / ways); }
  __host__ __device__ static int tiles(const DenseArgs& a, int ways) {
    return a.groups * a.outputs / height(ways);
  }

  struct Place {  // of a warp in a tile: its group, its 32 outputs, their first block and half of it
    int group, output, half;
    size_t block;
  };

  static __device__ Place locate(const DenseArgs& a, int ways, int tile) {
    Place p;
    p.output = tile * height(ways) + threadIdx.x / 32 / ways * 32;
    p.group = p.output / a.outputs;
    p.half = p.output / 32 % 2;
    p.block = size_t(p.output / 256) * (a.inputs / 64) * 4 + p.output / 64 % 4;
    return p;
  }

  struct Warp {  // where its ring lies, and its part of K in steps of 64 inputs
    u32 tokens, weights, full;
    int begin, end;
  };

  // What a warp fetches next, and into which stage.
  struct Next {
    int tile, step, stage;
  };

  static __device__ void advance(Next& next, const Warp& w) {
    if (++next.step == w.end) next.step = w.begin, next.tile += gridDim.x;
    if (++next.stage == STAGES) next.stage = 0;
  }

  static __device__ void fetch_weights(const DenseArgs& a, int ways, const Warp& w, const Next& next,
                                       u64 policy) {
    const Place p = locate(a, ways, next.tile);
    const unsigned char* from = a.weight + (p.block + next.step * 4) * BLOCK + p.half * 1024;
    const u32 to = w.weights + next.stage * WEIGHT_BYTES, bar = w.full + 8 * next.stage;
    barrier_expect(bar, WEIGHT_BYTES + TOKEN_BYTES);
    bulk_copy(to, from, 1024, bar, policy);
    bulk_copy(to + 1024, from + 2048, 1024, bar, policy);
  }

  static __device__ void fetch_tokens(const DenseArgs& a, const TokenMap& map, int ways, const Warp& w,
                                      const Next& next) {
    const Place p = locate(a, ways, next.tile);
    copy_tokens(w.tokens + next.stage * TOKEN_BYTES, map, (p.group * (a.inputs / 64) + next.step) * 128,
                0, w.full + 8 * next.stage);
  }

  // The scales of 64 inputs, one step a lane.
  static __device__ u32 scales_of(const DenseArgs& a, int ways, const Warp& w, int tile, int total) {
    const int step = w.begin + int(threadIdx.x & 31);
    if (tile >= total || step >= w.end) return 0;
    const Place p = locate(a, ways, tile);
    const unsigned char* at = a.weight + (p.block + step * 4) * BLOCK + 4096 + p.half * 4;
    return __ldg(reinterpret_cast<const u32*>(at));
  }

  // 16 rows by 64 inputs, as registers of A.
  static __device__ void decode(u32 at, u32 scales, u32 (&a)[16]) {
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      const uint4 q = load16(at + piece * 1024);
      const u32 factor = (scales >> (8 * piece) & 255) * 0x00800080u;
      const u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        u32 first, second;
        fp8_to_pairs(words[k], first, second);
        a[8 * piece + 2 * k] = times(first, factor);
        a[8 * piece + 2 * k + 1] = times(second, factor);
      }
    }
  }

  static __device__ void multiply(float (&sums)[2][4], const Warp& w, int stage, u32 scales) {
    const u32 lane = threadIdx.x & 31, row = lane & 7, piece = lane >> 3;
    const u32 tokens = w.tokens + stage * TOKEN_BYTES + row * 128;
    const u32 weights = w.weights + stage * WEIGHT_BYTES + lane * 16;
    u32 held[8], codes[2][16];
    load_matrices(tokens + ((piece ^ row) << 4), held);
    load_matrices(tokens + (((4 + piece) ^ row) << 4), held + 4);
#pragma unroll
    for (int m = 0; m < 2; ++m) decode(weights + m * 512, scales, codes[m]);
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int m = 0; m < 2; ++m)
        warp_product(sums[m], codes[m] + 4 * k, held[2 * k], held[2 * k + 1]);
#pragma unroll
    for (int m = 0; m < 2; ++m) keep_in_place(sums[m]);  // all that was read has been used
  }

  // Where a warp's sum of a token and a row lies: no two of its lanes' in one bank.
  static __device__ u32 place_of(int warp, int token, int row) {
    return ((warp * TOKENS + token) * 32 + (row ^ ((token >> 1 & 3) << 3))) * 4;
  }

  static __device__ void keep_part(const float (&sums)[2][4], u32 at) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        store4(at + place_of(warp, (lane & 3) * 2 + (i & 1), m * 16 + (lane >> 2) + (i & 2) * 4),
               sums[m][i]);
  }

  static __device__ void run(const DenseArgs& a, const TokenMap& map, int ways) {
    SHARED(raw);
    const u32 base = (address(raw) + 1023) & ~1023u;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, part = warp % ways;
    const u32 weights = base + WARPS * STAGES * TOKEN_BYTES, shared = base + RING;
    const int wide = a.inputs / 64, total = tiles(a, ways);
    const Warp w = {base + warp * (STAGES * TOKEN_BYTES), weights + warp * (STAGES * WEIGHT_BYTES),
                    shared + SUMS + warp * (8 * STAGES), wide * part / ways, wide * (part + 1) / ways};
    next_kernel_may_start();
    const int first = blockIdx.x, mine = (total - first + int(gridDim.x) - 1) / int(gridDim.x);
    int left = mine * (w.end - w.begin);  // steps that are still to be fetched
    Next next = {first, w.begin, 0};
    u64 policy = 0;
    if (lane == 0) {
      for (int i = 0; i < STAGES; ++i) barrier_init(w.full + 8 * i, 1);
      barriers_ready();
      policy = read_once();
      // Weights do not wait for the kernel before this one, which makes the tokens.
      Next ahead = next;
      const int early = min(STAGES, left);
      for (int i = 0; i < early; ++i, advance(ahead, w)) fetch_weights(a, ways, w, ahead, policy);
      expect_map(map);
    }
    u32 coming = scales_of(a, ways, w, first, total);
    if (lane == 0) {
      previous_kernel_wait();
      const int early = min(STAGES, left);
      for (int i = 0; i < early; ++i, --left, advance(next, w)) fetch_tokens(a, map, ways, w, next);
    }
    __syncwarp();
    int stage = 0;
    u32 parity = 0;
    for (int tile = first; tile < total; tile += gridDim.x) {
      const u32 scales = coming;
      coming = scales_of(a, ways, w, tile + gridDim.x, total);
      // This thread adds up the sums of one token and one row in every 32 outputs of the tile.
      float factor[MOST_GROUPS];
      const int output = tile * height(ways) + lane;
#pragma unroll
      for (int i = 0; i < MOST_GROUPS; ++i)
        factor[i] = i * 32 < height(ways) ? load_now(a.row_scale + output + i * 32) : 0.f;
      float sums[2][4] = {};
#pragma unroll 1
      for (int step = w.begin; step < w.end; ++step) {
        barrier_wait(w.full + 8 * stage, parity);
        multiply(sums, w, stage, __shfl_sync(0xFFFFFFFFu, scales, step - w.begin));
        __syncwarp();
        if (lane == 0 && left > 0) {
          fetch_weights(a, ways, w, next, policy);
          fetch_tokens(a, map, ways, w, next);
          --left, advance(next, w);
        }
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
      if (tile != first) __syncthreads();  // the sums of the tile before have been read
      keep_part(sums, shared);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < MOST_GROUPS; ++i) {
        if (i * 32 >= height(ways) || warp >= a.rows) break;
        float sum = load_float(shared + place_of(i * ways, warp, lane));
        for (int k = 1; k < ways; ++k) sum += load_float(shared + place_of(i * ways + k, warp, lane));
        sum = as_bf16(sum * factor[i]);
        if (a.rounds) {
          float none = 0.f;
          round_by(scale_of(largest_of(fabsf(sum), 31)), sum, none);
        }
        a.out[size_t(warp) * a.out_row + output + i * 32] =
            static_cast<unsigned short>(__float_as_uint(sum) >> 16);
      }
    }
  }

  static __device__ float load_float(u32 at) { return __uint_as_float(load4(at)); }
};

#ifdef __CUDACC__

template <class K>
__global__ void __launch_bounds__(K::THREADS, K::RESIDENT)
    run_thin(const __grid_constant__ DenseArgs a, const __grid_constant__ TokenMap map, int ways) {
  K::run(a, map, ways);
}

template <class K>
int launch_thin(const DenseArgs& a, const void* x, long long row_bytes, long long programs,
                long long ways, void* stream) {
  const bool fits = a.rows <= K::TOKENS && ways * K::MOST_GROUPS >= K::WARPS && ways <= K::WARPS &&
                    a.inputs / 64 >= ways && a.inputs / 64 <= ways * (K::MOST_STEPS - 1);
  if (!fits) return cudaErrorInvalidValue;
  return launch_alone(run_thin<K>, K::THREADS, K::SHARED, min<long long>(K::tiles(a, ways), programs),
                      a, x, row_bytes, K::TOKENS, stream, static_cast<int>(ways));
}

#endif
