// Dense products of packed e4m3 weights with bf16 tokens on SM90a: out[t, n] = sum_k x[t, k] * w[n, k].
//
// Weights are the wide side of the tensor instruction (64 rows, decoded in registers), tokens its
// narrow side. One thread asks the copy engine for both: weights as runs of packed blocks, tokens as
// swizzled boxes, so nothing but barriers stands between a free stage and its next contents. A tile
// takes up to 192 tokens, so that in decode steps each weight is read and decoded once.
//
// The blocks of a cluster share a tile's K. Each adds up some of its sums, in the order of the ranks:
// of few tokens the others send theirs as they lie in registers, and one barrier counts what has come;
// of many each reads the others' from their memory. A row's bits depend on how many share K, and not
// on its batch.
#pragma once
#include "decode.cuh"
#ifdef __CUDACC__
#include "mma.cuh"
#include "ptx.cuh"

#include "boxes.cuh"
#endif
#include "powers.cuh"

struct DenseArgs {
  const unsigned char* weight;  // [groups * outputs / 256][K/64][4][BLOCK]
  const float* row_scale;       // [groups * outputs]
  unsigned short* out;          // [rows, out_row] bf16
  // Every group of the matrix's rows takes its own K inputs of the same rows of x.
  int groups, outputs, inputs, rows, out_row;
  int share;   // tokens of a tile, a multiple of 8
  int rounds;  // whether outputs are rounded with ACT8
  int parts;   // of K, in tiles of whole K
};

// What a bf16 output is.
__device__ inline float as_bf16(float v) { return __uint_as_float(pack_bf16(v, 0.f) << 16); }
// The largest of lanes that differ in the bits of `over`, for all of them.
__device__ inline float largest_of(float v, int over) {
#pragma unroll
  for (int d = 16; d; d /= 2)
    if (over & d) v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
  return v;
}

// GROUPS consumer warpgroups of TILES 64-row tiles, at most TOKENS tokens a tile, STAGES stages of
// BLOCKS 64-wide K blocks; PER_SM blocks fit a multiprocessor. Weights are decoded STEPS times 16
// inputs ahead of their products. WHOLE: a block takes all of a tile's K, but adds it up in parts, in
// the order in which a cluster of so many blocks does.
template <int GROUPS, int TILES, int TOKENS, int BLOCKS, int STAGES, int PER_SM, int STEPS,
          bool WHOLE = false>
struct Dense {
  static constexpr bool TAKES_WHOLE = WHOLE;
  static_assert(!WHOLE || TILES == 1, "one total");
  static constexpr int PARTS = GROUPS * TILES;  // of 64 rows
  static constexpr int HEIGHT = 64 * PARTS;
  static constexpr int RESIDENT = PER_SM;
  static constexpr int PIECES = 4 / STEPS;
  static constexpr int UNITS = BLOCKS * TILES * PIECES;  // of STEPS instructions in a stage
  static_assert(STEPS == 2 || STEPS == 4, "whole groups of 32 inputs");
  static constexpr int CODES = 4096, BLOCK = CODES + 16;
  static constexpr int WEIGHT_BYTES = BLOCKS * PARTS * BLOCK;
  static constexpr int TOKEN_BYTES = BLOCKS * TOKENS * 128;
  static constexpr int CONSUMERS = 128 * GROUPS;
  static constexpr int THREADS = CONSUMERS + 128;
  static constexpr bool WIDEST = TILES == 2 && TOKENS == 192;
  static constexpr int LAUNCH_REGS = 65536 / (PER_SM * THREADS) / 8 * 8;
  static constexpr int CONSUMER_REGS =
      PER_SM == 2 ? 96 : PER_SM == 3 ? 104 : GROUPS == 3 ? 152 : WIDEST ? 240 : 224;
  static constexpr int PRODUCER_REGS = PER_SM == 2 ? 48 : WIDEST ? 24 : 56;
  // A block's own registers are all it has: asking for more waits for ever.
  static_assert(GROUPS * CONSUMER_REGS + PRODUCER_REGS <= (GROUPS + 1) * LAUNCH_REGS, "registers");
  static constexpr int CHUNK = TOKENS < 64 ? TOKENS : 64;  // tokens that are stored at a time
  static constexpr int RING = STAGES * (WEIGHT_BYTES + TOKEN_BYTES);
  static constexpr int PIECE = 512;  // bytes of a warp's sums of 16 rows by 8 tokens
  // What a block is sent, of the number of blocks that makes it most.
  static constexpr int sent_bytes() {
    int most = 0;
    for (int size = 2; size <= 8; ++size) {
      const int pieces = (4 * PARTS * (TOKENS / 8) + size - 1) / size * (size - 1);
      most = pieces > most ? pieces : most;
    }
    return most * PIECE;
  }
  static constexpr bool SENDS = TOKENS <= 64;
  // Whether what a block of so many is sent for outputs that are rounded fits as well.
  static constexpr bool rounds(int size) {
    const int pairs = (2 * PARTS * (TOKENS / 8) + size - 1) / size;
    return !SENDS || 2 * pairs * (size - 1) * PIECE <= sent_bytes();
  }
  // Few sums have a place of their own; more of them come to the ring, once all have read theirs.
  static constexpr bool APART = TOKENS <= 32;
  static constexpr int PITCH = HEIGHT + 4;  // floats of a token's partial sums: no bank conflicts
  static constexpr int PART = SENDS ? APART ? 0 : sent_bytes() : TOKENS * PITCH * 4;
  static constexpr bool SHARES = PART <= RING;  // blocks of a cluster may share K
  static constexpr int STORED = GROUPS * CHUNK * 128;
  static constexpr int STAGING = APART && sent_bytes() > STORED ? sent_bytes() : STORED;
  static constexpr int SHARED = RING + STAGING + 16 * STAGES + 16 + 1024;
  static_assert(WEIGHT_BYTES % 16 == 0 && TOKEN_BYTES % 1024 == 0, "alignment of copies");

  struct Place {  // of a tile: group, first output in it, 64-row blocks, first row, number of rows
    int group, output, blocks, row, rows;
  };

  __host__ __device__ static int tiles_high(const DenseArgs& a) {
    return (a.outputs + HEIGHT - 1) / HEIGHT;
  }
  __host__ __device__ static int tiles(const DenseArgs& a) {
    return (a.rows + a.share - 1) / a.share * tiles_high(a) * a.groups;
  }

  static __device__ Place locate(const DenseArgs& a, int tile) {
    const int high = tiles_high(a), wide = (a.rows + a.share - 1) / a.share;
    Place p;
    p.group = tile / wide / high;
    p.output = tile / wide % high * HEIGHT;
    p.blocks = min(PARTS, (a.outputs - p.output) / 64);
    p.row = tile % wide * a.share;
    p.rows = min(a.share, a.rows - p.row);
    return p;
  }

  struct Ring {
    int stage = 0;
    u32 parity = 0;
    __device__ void next() {
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
  };

  // First K block of a part of the tile.
  static __device__ int start_of(const DenseArgs& a, int part) {
    return a.inputs / 128 * part / (WHOLE ? a.parts : cluster_blocks()) * 2;
  }

  // First K block of a block's share.
  static __device__ int own_start(const DenseArgs& a, int rank) {
    return WHOLE ? a.inputs / 64 * rank : start_of(a, rank);
  }

  static __device__ void fetch_weights(const DenseArgs& a, const Place& p, int block, u32 target,
                                       u32 bar, u64 policy) {
    const int first = (p.group * a.outputs + p.output) / 64, wide = a.inputs / 64;
#pragma unroll
    for (int k = 0; k < BLOCKS; ++k) {
      const u32 to = target + k * (PARTS * BLOCK);
      if constexpr (PARTS == 2 || PARTS == 4) {
        const size_t from = (size_t(first / 4) * wide + block + k) * 4 + first % 4;
        bulk_copy(to, a.weight + from * BLOCK, PARTS * BLOCK, bar, policy);
      } else {
        for (int i = 0; i < p.blocks; ++i) {
          const size_t from = (size_t((first + i) / 4) * wide + block + k) * 4 + (first + i) % 4;
          bulk_copy(to + i * BLOCK, a.weight + from * BLOCK, BLOCK, bar, policy);
        }
      }
    }
  }

  static __device__ void fetch_tokens(const DenseArgs& a, const TokenMap& map, const Place& p, int block,
                                      u32 target, u32 bar) {
#pragma unroll
    for (int k = 0; k < BLOCKS; ++k)
      copy_tokens(target + k * (TOKENS * 128), map, (p.group * (a.inputs / 64) + block + k) * 128,
                  p.row, bar);
  }

  static __device__ void produce(const DenseArgs& a, const TokenMap& map, int total, u32 tokens,
                                 u32 weights, u32 full, u32 empty) {
    const int size = cluster_blocks(), start = blockIdx.x / size, stride = gridDim.x / size;
    const int begin = own_start(a, cluster_place()), end = own_start(a, cluster_place() + 1);
    const u64 policy = read_once();
    expect_map(map);
    const u32 of_tokens = a.share * (128 * BLOCKS);
    // Weights do not wait for the kernel before this one, which makes the tokens.
    int ahead = start < total ? min(STAGES, (end - begin) / BLOCKS) : 0;
    for (int i = 0; i < ahead; ++i) {
      const Place p = locate(a, start);
      barrier_expect(full + 8 * i, p.blocks * (BLOCKS * BLOCK) + of_tokens);
      fetch_weights(a, p, begin + i * BLOCKS, weights + i * WEIGHT_BYTES, full + 8 * i, policy);
    }
    previous_kernel_wait();
    Ring ring;
    for (int tile = start; tile < total; tile += stride) {
      const Place p = locate(a, tile);
      for (int block = begin; block < end; block += BLOCKS) {
        const u32 bar = full + 8 * ring.stage;
        if (--ahead < 0) {
          barrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
          barrier_expect(bar, p.blocks * (BLOCKS * BLOCK) + of_tokens);
          fetch_weights(a, p, block, weights + ring.stage * WEIGHT_BYTES, bar, policy);
        }
        fetch_tokens(a, map, p, block, tokens + ring.stage * TOKEN_BYTES, bar);
        ring.next();
      }
    }
  }

  // One unit: 64 rows by 16 * STEPS inputs, as registers of A.
  static __device__ void decode(u32 block, int piece, u32 (&a)[4 * STEPS]) {
    const int t = threadIdx.x & 127;
    const u32 s = load4(block + CODES + (t >> 6) * 4) >> (8 * piece);
#pragma unroll
    for (int group = 0; group < STEPS / 2; ++group) {
      const uint4 q = load16(block + (piece + group) * 2048 + t * 16);
      const u32 factor = (group ? (s >> 8) & 255 : s & 255) * 0x00800080u;
      const u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        u32 pair[4];
        fp8_to_pairs(words[2 * k], pair[0], pair[1]);
        fp8_to_pairs(words[2 * k + 1], pair[2], pair[3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[(2 * group + k) * 4 + i] = times(pair[i], factor);
      }
    }
  }

  // Descriptor of swizzled token rows: 8 rows of 128 bytes an atom.
  static __device__ u64 describe(u32 at) {
    return u64((at & 0x3FFFF) >> 4) | (u64(1) << 16) | (u64(64) << 32) | (u64(1) << 62);
  }

  template <int N>
  struct Sums {
    float of[TILES][N / 2];
  };

  // A thread's two rows of each of its tiles: their scales, asked for before the products, since they
  // come from far away.
  struct Scales {
    float upper[TILES], lower[TILES];
  };
  static __device__ Scales scales_of(const DenseArgs& a, const Place& p) {
    const int slab = threadIdx.x / 128 * (TILES * 4) + (threadIdx.x >> 5 & 3);
    Scales s;
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
      const int row = min(slab + 4 * m, p.blocks * 4 - 1) * 16 + (threadIdx.x >> 2 & 7);
      const float* at = a.row_scale + p.group * a.outputs + p.output + row;
      s.upper[m] = load_now(at), s.lower[m] = load_now(at + 8);
    }
    return s;
  }

  template <int UNIT>
  static __device__ void decode_unit(u32 weights, u32 (&a)[4 * STEPS]) {
    constexpr int k = UNIT / (PIECES * TILES), tile = UNIT / PIECES % TILES;
    decode(weights + (k * PARTS + threadIdx.x / 128 * TILES + tile) * BLOCK, UNIT % PIECES, a);
  }

  struct Stage {  // where the stage in use lies
    u32 tokens, weights, empty;
  };

  static __device__ Stage enter(Ring& ring, u32 tokens, u32 weights, u32 full, u32 empty) {
    barrier_wait(full + 8 * ring.stage, ring.parity);
    const Stage s = {tokens + ring.stage * TOKEN_BYTES, weights + ring.stage * WEIGHT_BYTES,
                     empty + 8 * ring.stage};
    ring.next();
    return s;
  }

  // Multiply unit UNIT of a stage, held in `now`; meanwhile decode the unit after it into `then`.
  template <int N, int UNIT>
  static __device__ void unit(Sums<N>& sums, u32 (&now)[4 * STEPS], u32 (&then)[4 * STEPS],
                              Stage& stage, bool more, Ring& ring, u32 tokens, u32 weights, u32 full,
                              u32 empty) {
    constexpr int atom = UNIT / (PIECES * TILES), tile = UNIT / PIECES % TILES;
    const u64 b = describe(stage.tokens + atom * (TOKENS * 128)) + UNIT % PIECES * (2 * STEPS);
    const u32 release = stage.empty;
    keep_in_place(now);
    group_fence();
#pragma unroll
    for (int k = 0; k < STEPS; ++k) Mma<false, N>::run(sums.of[tile], now + 4 * k, b + 2 * k, 1);
    group_commit();
    if constexpr (UNIT + 1 < UNITS) {
      // A branch that is always taken: the assembler moves products behind decoding within a block.
      if (release) decode_unit<UNIT + 1>(stage.weights, then);
    } else {
      if (more) {
        stage = enter(ring, tokens, weights, full, empty);
        decode_unit<0>(stage.weights, then);
      }
    }
    keep_in_place(then);
    products_wait();
    if (UNIT + 1 == UNITS && (threadIdx.x & 31) == 0) barrier_arrive(release);
    if constexpr (UNIT + 1 < UNITS)
      unit<N, UNIT + 1>(sums, then, now, stage, more, ring, tokens, weights, full, empty);
  }

  template <int N>
  using Total = Sums<WHOLE ? N : 2>;

  // WHOLE: behind the last step of a part its sums are added to the total, and begin anew.
  template <int N>
  static __device__ void end_of_step(const DenseArgs& a, Sums<N>& sums, Sums<N>& total, int& part,
                                     int& until) {
    if (--until) return;
    keep_in_place(sums.of[0]);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      total.of[0][i] = part ? total.of[0][i] + sums.of[0][i] : sums.of[0][i];
      sums.of[0][i] = 0.f;
    }
    ++part;
    until = (start_of(a, part + 1) - start_of(a, part)) / BLOCKS;
  }

  template <int N>
  static __device__ void multiply(const DenseArgs& a, const Place& p, Ring& ring, u32 tokens,
                                  u32 weights, u32 full, u32 empty, u32 staging) {
    const Scales scales = scales_of(a, p);
    Sums<N> sums;
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int i = 0; i < N / 2; ++i) sums.of[m][i] = 0.f;
    u32 even[4 * STEPS], odd[4 * STEPS];
    const int steps = (own_start(a, cluster_place() + 1) - own_start(a, cluster_place())) / BLOCKS;
    Total<N> total;
    int part = 0, until = WHOLE ? start_of(a, 1) / BLOCKS : 0;
    Stage stage = enter(ring, tokens, weights, full, empty);
    decode_unit<0>(stage.weights, even);
#pragma unroll 1
    for (int left = steps - 1; left >= 0; --left) {
      unit<N, 0>(sums, even, odd, stage, left > 0, ring, tokens, weights, full, empty);
      if constexpr (WHOLE) end_of_step<N>(a, sums, total, part, until);
      if constexpr (UNITS % 2) {
        if (--left < 0) break;
        unit<N, 0>(sums, odd, even, stage, left > 0, ring, tokens, weights, full, empty);
        if constexpr (WHOLE) end_of_step<N>(a, sums, total, part, until);
      }
    }
    if constexpr (WHOLE) {
      store<N>(a, p, total, scales, staging);
      return;
    }
    if constexpr (SHARES) {
      if (cluster_blocks() > 1) {
        if constexpr (SENDS)
          share<N>(a, p, sums, scales, tokens, staging, full);
        else
          keep_part<N>(sums, tokens);
        return;
      }
    }
    store<N>(a, p, sums, scales, staging);
  }

  static __device__ u32 sums_barrier(u32 full) { return full + 16 * STAGES; }

  // Pieces of 16 rows by 8 tokens go to the blocks in turn; where outputs are rounded, two at a time,
  // since 32 rows are rounded together.
  static __device__ int together(const DenseArgs& a) { return a.rounds ? 2 : 1; }

  // How many pieces of a tile a block adds up.
  static __device__ int owned(const DenseArgs& a, const Place& p) {
    const int turns = p.blocks * 4 / together(a) * ((p.rows + 7) / 8), left = turns - cluster_place();
    return left <= 0 ? 0 : (left + cluster_blocks() - 1) / cluster_blocks() * together(a);
  }

  // Send the sums that others add up, wait for those that this block adds up, and store them.
  template <int N>
  static __device__ void share(const DenseArgs& a, const Place& p, const Sums<N>& sums,
                               const Scales& scales, u32 tokens, u32 staging, u32 full) {
    const int size = cluster_blocks(), rank = cluster_place(), lane = threadIdx.x & 31;
    const int slab = threadIdx.x / 128 * (TILES * 4) + (threadIdx.x >> 5 & 3);
    const int wide = (p.rows + 7) / 8, pair = together(a);
    const u32 place = (APART ? staging : tokens) + lane * 16, bar = sums_barrier(full);
    if constexpr (!APART) cluster_arrive();  // this thread has read its stages
    cluster_wait();
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
      const int first = (slab + 4 * m) / pair * wide;
      if (slab + 4 * m >= p.blocks * 4) break;
      int owner = first % size, at = first / size * pair + slab % pair;
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        if (j >= wide) break;
        const int turn = at * (size - 1) + rank - (rank > owner);
        if (owner != rank) send16(place + turn * PIECE, owner, sums.of[m] + 4 * j, bar);
        if (++owner == size) owner = 0, at += pair;
      }
    }
    if (!owned(a, p)) return;
    barrier_wait_cluster(bar, 0);
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
      const int first = (slab + 4 * m) / pair * wide, row = (slab + 4 * m) * 16 + (lane >> 2);
      if (slab + 4 * m >= p.blocks * 4) break;
      const int output = p.group * a.outputs + p.output + row;
      const float upper = scales.upper[m], lower = scales.lower[m];
      int owner = first % size, at = first / size * pair + slab % pair;
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        if (j >= wide) break;
        if (owner == rank) {
          const float* own = sums.of[m] + 4 * j;
          float v[4];
          u32 from = place + at * (size - 1) * PIECE;
          for (int r = 0; r < size; ++r) {
            float part[4] = {own[0], own[1], own[2], own[3]};
            if (r != rank) load_floats(from, part), from += PIECE;
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] = r ? v[i] + part[i] : part[i];
          }
          v[0] *= upper, v[1] *= upper, v[2] *= lower, v[3] *= lower;
          if (a.rounds) {
            const u32 read = (APART ? staging : tokens) + at * (size - 1) * PIECE;
            round_pieces(v, read, read + (slab & 1 ? -PIECE : PIECE) * (size - 1), slab / 2);
          }
          const int token = p.row + 8 * j + 2 * (lane & 3);
          store_pair(a, token, output, v[0], v[1], p.row + p.rows);
          store_pair(a, token, output + 8, v[2], v[3], p.row + p.rows);
        }
        if (++owner == size) owner = 0, at += pair;
      }
    }
  }

  // Round two rows of two tokens in each lane: their largest of 32 rows are those of two warps, who
  // tell each other where what they were sent lay.
  static __device__ void round_pieces(float (&v)[4], u32 own, u32 other, int warps) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = as_bf16(v[i]);
    float most[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) most[i] = largest_of(fmaxf(fabsf(v[i]), fabsf(v[i + 2])), 28);
    if (lane < 4) store4(own + lane * 8, most[0]), store4(own + lane * 8 + 4, most[1]);
    named_barrier(1 + warps, 64);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      most[i] = fmaxf(most[i], __uint_as_float(load4(other + (lane & 3) * 8 + i * 4)));
      round_by(scale_of(most[i]), v[i], v[i + 2]);
    }
  }

  static __device__ void load_floats(u32 at, float (&v)[4]) {
    const uint4 bits = load16(at);
    v[0] = __uint_as_float(bits.x), v[1] = __uint_as_float(bits.y);
    v[2] = __uint_as_float(bits.z), v[3] = __uint_as_float(bits.w);
  }

  // One output of two tokens in each lane, its neighbour's in the next four: pairs of outputs, of the
  // first token in even fours and of the second in odd ones.
  static __device__ void store_pair(const DenseArgs& a, int token, int output, float first,
                                    float second, int end) {
    const bool odd = threadIdx.x >> 2 & 1;
    const float other = __shfl_xor_sync(0xFFFFFFFFu, odd ? first : second, 4);
    const u32 pair = odd ? pack_bf16(other, second) : pack_bf16(first, other);
    token += odd;
    if (token < end)
      *reinterpret_cast<u32*>(a.out + size_t(token) * a.out_row + output - odd) = pair;
  }

  // Partial sums into shared memory, over the ring, which has been read.
  template <int N>
  static __device__ void keep_part(const Sums<N>& sums, u32 at) {
    const int group = threadIdx.x / 128, warp = (threadIdx.x & 127) >> 5, lane = threadIdx.x & 31;
    named_barrier(8, CONSUMERS);
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        const int token = i / 4 * 8 + (lane & 3) * 2 + (i & 1);
        const int row = (group * TILES + m) * 64 + warp * 16 + (lane >> 2) + (i & 2) * 4;
        store4(at + (token * PITCH + row) * 4, sums.of[m][i]);
      }
  }

  // This block's share of the cluster's tile: partial sums of SIZE blocks in the order of their ranks.
  template <int SIZE>
  static __device__ void gather(const DenseArgs& a, const Place& p, u32 at) {
    constexpr int LOADS = SIZE <= 3 ? 4 : 2;  // remote loads take long: many at a time
    const int rank = cluster_place(), fours = p.blocks * 16, work = p.rows * fours;
    const int lane = threadIdx.x & 31, end = work / 8 * (rank + 1) / SIZE * 8;
    // Warps end together; eight neighbouring lanes hold 32 outputs of a token.
    for (int first = work / 8 * rank / SIZE * 8 + threadIdx.x; first - lane < end;
         first += LOADS * CONSUMERS) {
      float4 value[LOADS][SIZE];
#pragma unroll
      for (int u = 0; u < LOADS; ++u) {
        const int i = min(first + u * CONSUMERS, end - 1);
        const u32 local = at + (i / fours * PITCH + i % fours * 4) * 4;
#pragma unroll
        for (int r = 0; r < SIZE; ++r) value[u][r] = load_remote16(local, r);
      }
#pragma unroll
      for (int u = 0; u < LOADS; ++u) {
        const int i = first + u * CONSUMERS, output = p.group * a.outputs + p.output + i % fours * 4;
        if (i - lane >= end) break;
        float4 sum = value[u][0];
#pragma unroll
        for (int r = 1; r < SIZE; ++r) {
          sum.x += value[u][r].x, sum.y += value[u][r].y;
          sum.z += value[u][r].z, sum.w += value[u][r].w;
        }
        const float* s = a.row_scale + output;
        sum.x *= __ldg(s), sum.y *= __ldg(s + 1), sum.z *= __ldg(s + 2), sum.w *= __ldg(s + 3);
        if (a.rounds) round_fours(sum);
        if (i >= end) break;
        u32* to = reinterpret_cast<u32*>(a.out + size_t(p.row + i / fours) * a.out_row + output);
        to[0] = pack_bf16(sum.x, sum.y);
        to[1] = pack_bf16(sum.z, sum.w);
      }
    }
  }

  static __device__ void round_fours(float4& v) {
    v.x = as_bf16(v.x), v.y = as_bf16(v.y), v.z = as_bf16(v.z), v.w = as_bf16(v.w);
    const float most = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
    const float power = scale_of(largest_of(most, 7));
    round_by(power, v.x, v.y);
    round_by(power, v.z, v.w);
  }

  static __device__ void gather_all(const DenseArgs& a, const Place& p, u32 at) {
    switch (cluster_blocks()) {
      case 2: return gather<2>(a, p, at);
      case 3: return gather<3>(a, p, at);
      case 4: return gather<4>(a, p, at);
      case 5: return gather<5>(a, p, at);
      case 6: return gather<6>(a, p, at);
      case 7: return gather<7>(a, p, at);
      case 8: return gather<8>(a, p, at);
    }
  }

  template <int N>
  static __device__ void store(const DenseArgs& a, const Place& p, Sums<N>& sums,
                               const Scales& scales, u32 staging) {
    const int group = threadIdx.x / 128, t = threadIdx.x & 127, warp = t >> 5, lane = t & 31;
    const u32 base = staging + group * (CHUNK * 128);
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
      if (group * TILES + m >= p.blocks) break;
      const int output = p.group * a.outputs + p.output + (group * TILES + m) * 64;
      const float upper = scales.upper[m], lower = scales.lower[m];
#pragma unroll
      for (int start = 0; start < N; start += CHUNK) {
        if (start && start >= p.rows) break;
        constexpr int SIZE = N < CHUNK ? N : CHUNK;
#pragma unroll
        for (int j = 0; j < SIZE / 8; ++j) {
          if (start + 8 * j >= N) break;
          const float* v = sums.of[m] + start / 2 + 4 * j;
          const u32 r0 = pack_bf16(v[0] * upper, v[1] * upper);
          const u32 r1 = pack_bf16(v[2] * lower, v[3] * lower);
          const int token = 8 * j + (lane & 7), part = 2 * warp + ((lane >> 3) & 1);
          store_transposed(base + token * 128 + ((part ^ (token & 7)) << 4), r0, r1);
        }
        named_barrier(group + 1, 128);
        const int held = min(SIZE, p.rows - start) * 8;
        for (int i = t; i - lane < held; i += 128) {  // warps end together
          const int token = i >> 3, part = i & 7;
          uint4 v = load16(base + token * 128 + ((part ^ (token & 7)) << 4));
          if (a.rounds) v = round_eight(v);
          if (i < held)
            *reinterpret_cast<uint4*>(a.out + size_t(p.row + start + token) * a.out_row +
                                      output + part * 8) = v;
        }
        named_barrier(group + 1, 128);
      }
    }
  }

  // Eight neighbouring outputs of a thread, as bf16; four threads hold 32 of a token.
  static __device__ uint4 round_eight(const uint4& q) {
    u32 words[4] = {q.x, q.y, q.z, q.w};
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      most = fmaxf(most, fmaxf(__uint_as_float(words[i] << 16 & 0x7FFF0000u),
                               __uint_as_float(words[i] & 0x7FFF0000u)));
    const float power = scale_of(largest_of(most, 3));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float low = __uint_as_float(words[i] << 16), high = __uint_as_float(words[i] & 0xFFFF0000u);
      round_by(power, low, high);
      words[i] = pack_bf16(low, high);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

  static __device__ unsigned char* ring_memory() {
    SHARED(raw);
    return raw + ((1024 - (address(raw) & 1023)) & 1023);
  }

  static __device__ void run(const DenseArgs& a, const TokenMap& map) {
    const u32 tokens = address(ring_memory()), weights = tokens + STAGES * TOKEN_BYTES;
    const u32 staging = weights + STAGES * WEIGHT_BYTES, full = staging + STAGING;
    const u32 empty = full + 8 * STAGES;
    const int total = tiles(a), size = cluster_blocks();
    if (threadIdx.x == 0) {
      for (int i = 0; i < STAGES; ++i) {
        barrier_init(full + 8 * i, 1);
        barrier_init(empty + 8 * i, 4 * GROUPS);
      }
      barrier_init(sums_barrier(full), 1);
      barriers_ready();
      if (SENDS && size > 1)
        barrier_expect(sums_barrier(full),
                       owned(a, locate(a, blockIdx.x / size)) * (size - 1) * PIECE);
    }
    __syncthreads();
    next_kernel_may_start();
    if (APART && size > 1) cluster_arrive();  // others may send
    if (threadIdx.x >= CONSUMERS) {
      fewer_registers<PRODUCER_REGS>();
      if (threadIdx.x == CONSUMERS) produce(a, map, total, tokens, weights, full, empty);
      __syncwarp();
      if (size > 1) {
        if constexpr (!APART) cluster_arrive();
        cluster_wait();
        if constexpr (!SENDS) cluster_barrier();
      }
      return;
    }
    more_registers<CONSUMER_REGS>();
    Ring ring;
    for (int tile = blockIdx.x / size; tile < total; tile += gridDim.x / size) {
      const Place p = locate(a, tile);
      if constexpr (TOKENS <= 32) {
        if (a.share <= 8)
          multiply<8>(a, p, ring, tokens, weights, full, empty, staging);
        else if (a.share <= 16)
          multiply<16>(a, p, ring, tokens, weights, full, empty, staging);
        else if (a.share <= 24)
          multiply<24>(a, p, ring, tokens, weights, full, empty, staging);
        else
          multiply<32>(a, p, ring, tokens, weights, full, empty, staging);
      } else if constexpr (TOKENS == 192 && !WHOLE) {
        if (size > 1 || a.share > 176)
          multiply<192>(a, p, ring, tokens, weights, full, empty, staging);
        else if (a.share > 160)
          multiply<176>(a, p, ring, tokens, weights, full, empty, staging);
        else
          multiply<160>(a, p, ring, tokens, weights, full, empty, staging);
      } else {
        multiply<TOKENS>(a, p, ring, tokens, weights, full, empty, staging);
      }
    }
    if constexpr (SHARES && !SENDS) {
      if (size > 1) {
        cluster_barrier();  // all have their partial sums
        gather_all(a, locate(a, blockIdx.x / size), tokens);
        cluster_barrier();  // others read this block's sums
      }
    }
  }
};

#ifdef __CUDACC__

template <class K>
__global__ void __launch_bounds__(K::THREADS, K::RESIDENT)
    run_dense(const __grid_constant__ DenseArgs a, const __grid_constant__ TokenMap map) {
  K::run(a, map);
}

// How many clusters of a size the device holds at once.
template <class K>
int dense_held(long long cluster) {
  cudaFuncSetAttribute(run_dense<K>, cudaFuncAttributeMaxDynamicSharedMemorySize, K::SHARED);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(cluster) * 132);
  config.blockDim = dim3(K::THREADS);
  config.dynamicSmemBytes = K::SHARED;
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeClusterDimension;
  attribute[0].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  config.attrs = attribute;
  config.numAttrs = 1;
  int held = -1;
  return cudaOccupancyMaxActiveClusters(&held, run_dense<K>, &config) == cudaSuccess ? held : -1;
}

// Blocks without clusters; tokens in boxes of `box` rows.
template <typename... More>
int launch_alone(void (*kernel)(DenseArgs, TokenMap, More...), int threads, int shared,
                 long long blocks, const DenseArgs& a, const void* x, long long row_bytes, int box,
                 void* stream, More... more) {
  cudaError_t e = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (e != cudaSuccess) return e;
  TokenMap map;
  if (!describe_rows(map, x, 2LL * a.inputs * a.groups, a.rows, row_bytes, box))
    return cudaErrorInvalidValue;
  e = launch_next(kernel, dim3(static_cast<unsigned>(blocks)), dim3(threads), shared,
                  static_cast<cudaStream_t>(stream), a, map, more...);
  return e != cudaSuccess ? e : cudaGetLastError();
}

template <class K>
int launch_dense(DenseArgs a, const void* x, long long row_bytes, long long programs,
                 long long parts, void* stream) {
  a.parts = static_cast<int>(parts);
  const long long cluster = K::TAKES_WHOLE ? 1 : parts;
  static bool ready = false;
  if (!ready) {
    cudaError_t e =
        cudaFuncSetAttribute(run_dense<K>, cudaFuncAttributeMaxDynamicSharedMemorySize, K::SHARED);
    if (e != cudaSuccess) return e;
    ready = true;
  }
  if (cluster > 8 || (cluster > 1 && !K::SHARES)) return cudaErrorInvalidValue;
  if (a.rounds && !K::rounds(static_cast<int>(cluster))) return cudaErrorInvalidValue;
  TokenMap map;
  if (!describe_rows(map, x, 2LL * a.inputs * a.groups, a.rows, row_bytes, a.share))
    return cudaErrorInvalidValue;
  const long long tiles = K::tiles(a);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(cluster > 1 ? cluster * tiles : min(tiles, programs)));
  config.blockDim = dim3(K::THREADS);
  config.dynamicSmemBytes = K::SHARED;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute[2];
  attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[0].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attribute;
  config.numAttrs = 1;
  if (cluster > 1) {
    attribute[1].id = cudaLaunchAttributeClusterDimension;
    attribute[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    config.numAttrs = 2;
  }
  cudaError_t e = cudaLaunchKernelEx(&config, run_dense<K>, a, map);
  return e != cudaSuccess ? e : cudaGetLastError();
}

#endif
