// Dense products of packed e4m3 weights with at most eight tokens on SM90a.
//
// The warps of a block share the K of 64 outputs. Each has a ring of its own that it fills by the copy
// engine and empties alone: no thread waits for another before the parts are added up, in the order of
// the warps, within the block. There are no clusters, which start late, and blocks of one kernel and
// the next seldom meet on a multiprocessor: in a chain of small kernels that counts for more than what
// a product takes alone.
#pragma once
#include "dense.cuh"

template <int WARPS, int STAGES, int PER_SM>
struct Slim {
  static constexpr int TOKENS = 8, THREADS = 32 * WARPS, RESIDENT = PER_SM, HEIGHT = 64;
  static constexpr int BLOCK = 4096 + 16, TOKEN_BYTES = TOKENS * 128;  // of a stage of 64 inputs
  static constexpr int RING = WARPS * STAGES * (TOKEN_BYTES + BLOCK);
  static constexpr int SUMS = WARPS * TOKENS * HEIGHT * 4;
  static constexpr int SHARED = RING + SUMS + 8 * WARPS * STAGES + 1024;
  static_assert(THREADS % HEIGHT == 0, "a thread adds up one output of several tokens");

  __host__ __device__ static int tiles(const DenseArgs& a) { return a.groups * a.outputs / HEIGHT; }

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

  static __device__ void fetch_weights(const DenseArgs& a, const Warp& w, const Next& next, u64 policy) {
    const size_t row = size_t(next.tile / 4) * (a.inputs / 64) + next.step;
    const u32 bar = w.full + 8 * next.stage;
    barrier_expect(bar, BLOCK + TOKEN_BYTES);
    bulk_copy(w.weights + next.stage * BLOCK, a.weight + (row * 4 + next.tile % 4) * BLOCK, BLOCK, bar,
              policy);
  }

  static __device__ void fetch_tokens(const DenseArgs& a, const TokenMap& map, const Warp& w,
                                      const Next& next) {
    const int group = a.groups == 1 ? 0 : next.tile * HEIGHT / a.outputs;
    copy_tokens(w.tokens + next.stage * TOKEN_BYTES, map, (group * (a.inputs / 64) + next.step) * 128, 0,
                w.full + 8 * next.stage);
  }

  // 16 rows by 64 inputs, as registers of A.
  static __device__ void decode(u32 at, u32 scales, u32 (&a)[16]) {
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      const uint4 q = load16(at + piece * 2048);
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

  static __device__ void multiply(float (&sums)[4][4], const Warp& w, int stage) {
    const u32 lane = threadIdx.x & 31, row = lane & 7, piece = lane >> 3;
    const u32 tokens = w.tokens + stage * TOKEN_BYTES + row * 128, weights = w.weights + stage * BLOCK;
    u32 held[8];
    load_matrices(tokens + ((piece ^ row) << 4), held);
    load_matrices(tokens + (((4 + piece) ^ row) << 4), held + 4);
    const u32 scales[2] = {load4(weights + 4096), load4(weights + 4100)};
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      u32 codes[2][16];
#pragma unroll
      for (int m = 0; m < 2; ++m)
        decode(weights + (2 * pair + m) * 512 + lane * 16, scales[pair], codes[m]);
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int m = 0; m < 2; ++m)
          warp_product(sums[2 * pair + m], codes[m] + 4 * k, held[2 * k], held[2 * k + 1]);
    }
#pragma unroll
    for (int m = 0; m < 4; ++m) keep_in_place(sums[m]);  // all that was read has been used
  }

  // Where a warp's sum of a token and a row lies: no two of its lanes' in one bank.
  static __device__ u32 place_of(int warp, int token, int row) {
    return ((warp * TOKENS + token) * HEIGHT + (row ^ ((token >> 1 & 3) << 3))) * 4;
  }

  // The block's outputs of a tile: the warps' sums, added up in their order.
  static __device__ void store(const DenseArgs& a, int tile, float factor, u32 sums) {
    for (int i = threadIdx.x; i < a.rows * HEIGHT; i += THREADS) {
      const int token = i / HEIGHT, row = i % HEIGHT;
      float sum = __uint_as_float(load4(sums + place_of(0, token, row)));
#pragma unroll
      for (int k = 1; k < WARPS; ++k) sum += __uint_as_float(load4(sums + place_of(k, token, row)));
      sum = as_bf16(sum * factor);
      if (a.rounds) {
        float none = 0.f;
        round_by(scale_of(largest_of(fabsf(sum), 31)), sum, none);
      }
      a.out[size_t(token) * a.out_row + tile * HEIGHT + row] =
          static_cast<unsigned short>(__float_as_uint(sum) >> 16);
    }
  }

  static __device__ void run(const DenseArgs& a, const TokenMap& map) {
    SHARED(raw);
    const u32 base = (address(raw) + 1023) & ~1023u;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const u32 weights = base + WARPS * STAGES * TOKEN_BYTES, shared = base + RING;
    const int wide = a.inputs / 64, total = tiles(a);
    const Warp w = {base + warp * (STAGES * TOKEN_BYTES), weights + warp * (STAGES * BLOCK),
                    shared + SUMS + warp * (8 * STAGES), wide * warp / WARPS, wide * (warp + 1) / WARPS};
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
      for (int i = 0; i < early; ++i, advance(ahead, w)) fetch_weights(a, w, ahead, policy);
      expect_map(map);
      previous_kernel_wait();
      for (int i = 0; i < early; ++i, --left, advance(next, w)) fetch_tokens(a, map, w, next);
    }
    __syncwarp();
    left = __shfl_sync(0xFFFFFFFFu, left, 0);
    int stage = 0;
    u32 parity = 0;
    for (int tile = first; tile < total; tile += gridDim.x) {
      const float factor = load_now(a.row_scale + tile * HEIGHT + threadIdx.x % HEIGHT);
      float sums[4][4] = {};
#pragma unroll 1
      for (int step = w.begin; step < w.end; ++step) {
        barrier_wait(w.full + 8 * stage, parity);
        multiply(sums, w, stage);
        __syncwarp();
        if (lane == 0 && left > 0) {
          fetch_weights(a, w, next, policy);
          fetch_tokens(a, map, w, next);
          --left, advance(next, w);
        }
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
      if (tile != first) __syncthreads();  // the sums of the tile before have been read
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          store4(shared + place_of(warp, (lane & 3) * 2 + (i & 1), m * 16 + (lane >> 2) + (i & 2) * 4),
                 sums[m][i]);
      __syncthreads();
      store(a, tile, factor, shared);
    }
  }
};

#ifdef __CUDACC__

template <class K>
__global__ void __launch_bounds__(K::THREADS, K::RESIDENT)
    run_slim(const __grid_constant__ DenseArgs a, const __grid_constant__ TokenMap map) {
  K::run(a, map);
}

template <class K>
int launch_slim(const DenseArgs& a, const void* x, long long row_bytes, long long programs, long long,
                void* stream) {
  if (a.rows > K::TOKENS) return cudaErrorInvalidValue;
  return launch_alone(run_slim<K>, K::THREADS, K::SHARED, min<long long>(K::tiles(a), programs), a, x,
                      row_bytes, K::TOKENS, stream);
}

#endif
