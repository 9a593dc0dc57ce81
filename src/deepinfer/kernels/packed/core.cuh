// Grouped products of few-bit weights with tokens on SM90a: out[r, n] = sum_k x[r, k] * w[e(r), n, k].
//
// The weights are the wide side of the tensor instruction (64 rows, decoded in registers), the tokens
// its narrow side (8..136, from shared memory), so a tile of few tokens wastes nothing. One producer
// warpgroup streams packed weights (bulk copies of contiguous tiles) and tokens (16-byte copies into
// swizzled rows) through a ring of stages; consumer warpgroups decode, multiply and store. Blocks are
// persistent: while one tile is stored, the next one's weights arrive.
//
// The order of every sum is fixed by K alone: a row's bits do not depend on its batch.
#pragma once
#include "decode.cuh"
#ifdef __CUDACC__
#include "boxes.cuh"
#include "mma.cuh"
#include "ptx.cuh"
#endif

enum Format { FP4_AS_FP8 = 0, FP4_AS_BF16 = 1 };

// How a kernel's roles are cut. TOGETHER: 128 producer threads copy tokens, fence them and tell, one of
// them streams weights. OWN: one thread streams weights alone, 96 others copy tokens, readers fence.
// FEW: as OWN, and products are those of single warps, with the same bits: faster for up to 8 tokens.
// BOXED: one thread brings weights and tokens, rows of x side by side, one box for each atom.
// FEW_BOXED: both.
enum Way { TOGETHER = 0, OWN = 1, FEW = 2, BOXED = 3, FEW_BOXED = 4 };

// Of one packed block, 64 rows by 64 inputs: bytes of its codes, and with its scales.
constexpr int CODES = 2048, BLOCK = CODES + 128;

template <int N>
struct Number {
  static constexpr int value = N;
};

struct Args {
  const unsigned char* x;       // [rows of x, K] e4m3 or bf16 bytes
  const float* token_scale;     // [rows of x] of e4m3 tokens, else null; boxed: read in groups of 4
  const long long* source;      // [R] row of x of each row of the result, null: the same
  const unsigned char* weight;  // [E][N/256][K/64][4][BLOCK]
  const float* row_scale;       // [E, N]
  const long long* offsets;     // [E + 1] first row of each expert
  unsigned short* out;          // [R, N] bf16
  int experts, outputs, inputs, x_row_bytes;
  int rows;  // of x
  // Products of fewer rows than `least`, or of `most` and more, are another launch's work.
  int least, most;
};

// ---- the kernel ----------------------------------------------------------------------------------

// GROUPS consumer warpgroups of TILES 64-row tiles (256 rows in all), at most TOKENS tokens a tile,
// STAGES stages of BLOCKS 64-wide K blocks. PROMOTE: e4m3 partial sums of 128 inputs leave the tensor
// unit, whose accumulator keeps fewer bits than fp32. AHEAD: products are asked for before the ones
// before them are done.
template <int FORMAT, int GROUPS_, int TILES, int TOKENS_, int BLOCKS, int STAGES_, bool PROMOTE,
          int WAY = TOGETHER, bool AHEAD = false>
struct Kernel {
  static constexpr int GROUPS = GROUPS_, TOKENS = TOKENS_, STAGES = STAGES_;
  static constexpr bool BOXES = WAY == BOXED || WAY == FEW_BOXED;
  static constexpr bool SINGLE = WAY == FEW || WAY == FEW_BOXED;
  static constexpr int PARTS = GROUPS * TILES;  // of 64 rows
  static constexpr int HEIGHT = 64 * PARTS;
  static_assert(PARTS == 4, "a packed run of 256 rows");
  static constexpr bool FP8 = FORMAT == FP4_AS_FP8;
  static_assert(!SINGLE || !FP8, "single warps multiply bf16");
  static constexpr int ATOMS = FP8 ? BLOCKS / 2 : BLOCKS;  // 128-byte columns of tokens in a stage
  static constexpr int UNITS = ATOMS * TILES;              // steps of 4 instructions in a stage
  static constexpr int COPY = PARTS * BLOCK;
  static constexpr int WEIGHT_BYTES = BLOCKS * COPY;
  static constexpr int TOKEN_BYTES = ATOMS * TOKENS * 128;
  static_assert(!SINGLE || ATOMS % 2 == 0, "codes of two atoms in turn");
  static_assert(!AHEAD || (!FP8 && UNITS % 2 == 0), "codes of two units in turn, sums that stay");
  static constexpr int MAX_EXPERTS = 512;
  static constexpr int PLACES = MAX_EXPERTS + 2;  // words: tiles before each expert and one of use, rows
  static constexpr int THREADS = 128 * (GROUPS + 1);
  static constexpr int CHUNK = GROUPS == 4 ? 32 : TOKENS < 64 ? TOKENS : 64;  // stored at a time
  // Boxed: a group's scales of rows and tokens of its tile, brought while it multiplies.
  static constexpr int SCALES = BOXES ? 4 * (64 * TILES + (FP8 ? TOKENS + 8 : 0)) : 0;
  static constexpr int SHARED = STAGES * (WEIGHT_BYTES + TOKEN_BYTES) + GROUPS * (CHUNK * 128 + SCALES) +
                                20 * STAGES + 8 * PLACES + 1024 + 64;
  static constexpr int BOX = BOXES ? TOKENS : 0;  // rows of a box
  static constexpr int CONSUMER_REGS = GROUPS == 4 ? 112 : BOXES ? 240 : 232;
  static constexpr int PRODUCER_REGS = GROUPS == 4 ? 32 : BOXES ? 24 : 40;

  struct Place {  // of a tile: expert, first output, first row, number of rows, which tile of tokens
    int expert, output, row, rows, tokens;
  };

  static __device__ Place locate(const Args& a, const int* first, int tile) {
    const int blocks = a.outputs / HEIGHT, lane = threadIdx.x & 31;
    int expert = 0;
    for (int base = 0; base < a.experts; base += 32) {
      const int e = base + lane;
      const bool before = e < a.experts && first[e + 1] * blocks <= tile;
      expert += __popc(__ballot_sync(~0u, before));
    }
    const int* row = first + PLACES;
    const int begin = row[expert], count = row[expert + 1] - begin;
    const int tiles = first[expert + 1] - first[expert], rest = tile - first[expert] * blocks;
    const int part = rest % tiles, share = ((count + tiles - 1) / tiles + 7) & ~7;
    Place p;
    p.expert = expert;
    p.output = rest / tiles * HEIGHT;
    p.row = begin + part * share;
    p.rows = max(0, min(share, count - part * share));
    p.tokens = first[expert] + part;
    return p;
  }

  struct Work {
    const Args& a;
    Place p;
  };

  struct Ring {
    int stage = 0;
    u32 parity = 0;
    __device__ void next() {
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
  };

  // Row of x of a row of the result.
  static __device__ size_t row_of(const Args& a, int row) {
    return a.source ? static_cast<size_t>(__ldg(a.source + row)) : row;
  }

  static __device__ int steps_of(const Args& a) { return a.inputs / (64 * BLOCKS); }

  static __device__ const unsigned char* weights_of(const Args& a, const Place& p) {
    const int run = p.output / 256, inside = p.output % 256 / 64;
    const size_t blocks = (size_t(p.expert) * (a.outputs / 256) + run) * (a.inputs / 64) * 4 + inside;
    return a.weight + blocks * BLOCK;
  }

  static __device__ void fetch(const unsigned char* w, int step, u32 target, u32 bar, u64 policy,
                               int token_bytes = 0) {
    barrier_expect(bar, WEIGHT_BYTES + token_bytes);
    bulk_copy(target, w + size_t(step) * WEIGHT_BYTES, WEIGHT_BYTES, bar, policy);
  }

  static __device__ void produce(const Args& a, const int* first, int total, u32 tokens, u32 weights,
                                 u32 full, u32 empty) {
    const int t = threadIdx.x & 127, piece = t & 7, steps = steps_of(a);
    const u64 policy = read_once();
    // Tokens are complete, and told so, LAG stages later: so long their copies may take.
    constexpr int LAG = STAGES > 4 ? 2 : 1;
    static_assert(STAGES >= LAG + 3, "the consumers hold two stages");
    int pending = 0;
    Ring ring, told;
    for (int tile = blockIdx.x; tile < total; tile += gridDim.x) {
      const Place p = locate(a, first, tile);
      const unsigned char* w = weights_of(a, p);
      for (int step = 0; step < steps; ++step) {
        barrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
        const u32 bar = full + 8 * ring.stage;
        if (t == 0) fetch(w, step, weights + ring.stage * WEIGHT_BYTES, bar, policy);
        const u32 to = tokens + ring.stage * TOKEN_BYTES;
        for (int row = t >> 3; row < p.rows; row += 16) {
          const int r = p.row + row;
          const unsigned char* from =
              a.x + row_of(a, r) * a.x_row_bytes + step * (ATOMS * 128) + piece * 16;
          const u32 at = to + row * 128 + ((piece ^ (row & 7)) << 4);
#pragma unroll
          for (int atom = 0; atom < ATOMS; ++atom)
            copy16(at + atom * (TOKENS * 128), from + atom * 128);
        }
        copies_commit();
        ring.next();
        if (++pending > LAG) {
          copies_wait<LAG>();
          shared_to_products();
          barrier_arrive(full + 8 * told.stage);
          told.next();
        }
      }
    }
    copies_wait<0>();
    shared_to_products();
    for (pending = min(pending, LAG); pending > 0; --pending) {
      barrier_arrive(full + 8 * told.stage);
      told.next();
    }
  }

  // OWN, FEW: one thread streams weights, as far ahead as there are free stages, ...
  static __device__ void produce_weights(const Args& a, const int* first, int total, u32 weights,
                                         u32 full, u32 empty) {
    const int steps = steps_of(a);
    const u64 policy = read_once();
    Ring ring;
    for (int tile = blockIdx.x; tile < total; tile += gridDim.x) {
      const Place p = locate(a, first, tile);
      if (threadIdx.x & 31) continue;
      const unsigned char* w = weights_of(a, p);
      for (int step = 0; step < steps; ++step) {
        barrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
        fetch(w, step, weights + ring.stage * WEIGHT_BYTES, full + 8 * ring.stage, policy);
        ring.next();
      }
    }
  }

  // ... three warps copy tokens.
  static __device__ void produce_tokens(const Args& a, const int* first, int total, u32 tokens,
                                        u32 full, u32 empty) {
    const int t = threadIdx.x - 32, piece = t & 7, steps = steps_of(a);
    Ring ring;
    for (int tile = blockIdx.x; tile < total; tile += gridDim.x) {
      const Place p = locate(a, first, tile);
      for (int step = 0; step < steps; ++step) {
        barrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
        const u32 to = tokens + ring.stage * TOKEN_BYTES;
        for (int row = t >> 3; row < p.rows; row += 12) {
          const unsigned char* from =
              a.x + row_of(a, p.row + row) * a.x_row_bytes + step * (ATOMS * 128) + piece * 16;
          const u32 at = to + row * 128 + ((piece ^ (row & 7)) << 4);
#pragma unroll
          for (int atom = 0; atom < ATOMS; ++atom)
            copy16(at + atom * (TOKENS * 128), from + atom * 128);
        }
        copies_arrive(full + 8 * ring.stage);
        ring.next();
      }
    }
  }

  // BOXED: both. A box may take rows of the next tile along, whose sums nobody stores.
  static __device__ void produce_boxes(const Args& a, const TokenMap& map, const int* first, int total,
                                       u32 tokens, u32 weights, u32 full, u32 empty) {
    const int steps = steps_of(a);
    const u64 policy = read_once();
    Ring ring;
    for (int tile = blockIdx.x; tile < total; tile += gridDim.x) {
      const Place p = locate(a, first, tile);
      if (threadIdx.x & 31) continue;
      const unsigned char* w = weights_of(a, p);
      for (int step = 0; step < steps; ++step) {
        barrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
        const u32 bar = full + 8 * ring.stage, to = tokens + ring.stage * TOKEN_BYTES;
        fetch(w, step, weights + ring.stage * WEIGHT_BYTES, bar, policy, TOKEN_BYTES);
#pragma unroll
        for (int atom = 0; atom < ATOMS; ++atom)
          copy_tokens(to + atom * (TOKENS * 128), map, (step * ATOMS + atom) * 128, p.row, bar);
        ring.next();
      }
    }
  }

  // One unit: 64 rows by 128 bytes of a token, 16 registers of A.
  static __device__ void decode(u32 block, u32 pair_bytes, u32 (&a)[16]) {
    const int t = threadIdx.x & 127, warp = t >> 5, g = (t & 31) >> 2;
    if constexpr (FORMAT == FP4_AS_FP8) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 at = block + half * COPY;
        const uint4 q = load16(at + t * 16);
        const u32 s = load4(at + CODES + (warp * 8 + g) * 4);
        u32* to = a + half * 8;
        fp4_to_fp8(q.x, byte_of<0>(s), to[0], to[2]);
        fp4_to_fp8(q.y, byte_of<2>(s), to[1], to[3]);
        fp4_to_fp8(q.z, byte_of<1>(s), to[4], to[6]);
        fp4_to_fp8(q.w, byte_of<3>(s), to[5], to[7]);
      }
    } else {
      const uint4 q = load16(block + t * 16);
      const u32 s = load4(block + CODES + (warp * 8 + g) * 4);
      const u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        const u32 upper = (group ? byte_of<1>(s) : byte_of<0>(s)) * 0x00800080u;
        const u32 lower = (group ? byte_of<3>(s) : byte_of<2>(s)) * 0x00800080u;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          u32 pair[4];
          fp4_to_pairs(words[2 * group + k], pair_bytes, pair);
          u32* to = a + (2 * group + k) * 4;
          to[0] = times(pair[0], upper);
          to[1] = times(pair[1], lower);
          to[2] = times(pair[2], upper);
          to[3] = times(pair[3], lower);
        }
      }
    }
  }

  // Descriptor of swizzled token rows: 8 rows of 128 bytes an atom.
  static __device__ u64 describe(u32 at) {
    return u64((at & 0x3FFFF) >> 4) | (u64(1) << 16) | (u64(64) << 32) | (u64(1) << 62);
  }

  template <int N>
  struct Sums {
    float done[TILES][N / 2];
    float part[FP8 && PROMOTE ? N / 2 : 1];
  };

  static __device__ u32 block_of(u32 weights, int atom, int tile) {
    const int group = threadIdx.x / 128 - 1;
    return weights + (FP8 ? 2 * atom : atom) * COPY + (group * TILES + tile) * BLOCK;
  }

  struct Stage {  // where the stage in use lies
    u32 tokens, weights, empty;
  };

  static __device__ Stage enter(Ring& ring, u32 tokens, u32 weights, u32 full, u32 empty) {
    barrier_wait(full + 8 * ring.stage, ring.parity);
    if constexpr (WAY == OWN) shared_to_products();  // tokens, which come by ordinary copies
    const Stage s = {tokens + ring.stage * TOKEN_BYTES, weights + ring.stage * WEIGHT_BYTES,
                     empty + 8 * ring.stage};
    ring.next();
    return s;
  }

  // Multiply unit UNIT of a stage, held in `now`; meanwhile decode the unit after it into `then`.
  template <int N, int UNIT>
  static __device__ void unit(Sums<N>& sums, u32 (&now)[16], u32 (&then)[16], Stage& stage, bool more,
                              Ring& ring, u32 pair_bytes, u32 tokens, u32 weights, u32 full,
                              u32 empty) {
    constexpr int atom = UNIT / TILES, tile = UNIT % TILES;
    const u64 b = describe(stage.tokens + atom * (TOKENS * 128));
    const u32 release = stage.empty;
    keep_in_place(now);
    group_fence();
    if constexpr (FP8 && PROMOTE) {
#pragma unroll
      for (int k = 0; k < 4; ++k) Mma<FP8, N>::run(sums.part, now + 4 * k, b + 2 * k, k != 0);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) Mma<FP8, N>::run(sums.done[tile], now + 4 * k, b + 2 * k, 1);
    }
    group_commit();
    if constexpr (UNIT + 1 < UNITS) {
      // A branch that is always taken: the assembler moves products behind decoding within a block.
      if (pair_bytes)
        decode(block_of(stage.weights, (UNIT + 1) / TILES, (UNIT + 1) % TILES), pair_bytes, then);
    } else {
      if (more) {
        stage = enter(ring, tokens, weights, full, empty);
        decode(block_of(stage.weights, 0, 0), pair_bytes, then);
      }
    }
    keep_in_place(then);
    group_wait();
    if constexpr (FP8 && PROMOTE) {
      keep_in_place(sums.part);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) sums.done[tile][i] += sums.part[i];
    }
    if (UNIT + 1 == UNITS && (threadIdx.x & 31) == 0) barrier_arrive(release);
    if constexpr (UNIT + 1 < UNITS)
      unit<N, UNIT + 1>(sums, then, now, stage, more, ring, pair_bytes, tokens, weights, full, empty);
  }

  // AHEAD: a unit is asked for before the one before it is done; that one's stage is free then.
  template <int N, int UNIT>
  static __device__ void unit_ahead(Sums<N>& sums, u32 (&now)[16], u32 (&then)[16], Stage& stage,
                                    u32& held, bool more, Ring& ring, u32 pair_bytes, u32 tokens,
                                    u32 weights, u32 full, u32 empty) {
    constexpr int atom = UNIT / TILES, tile = UNIT % TILES;
    const u64 b = describe(stage.tokens + atom * (TOKENS * 128));
    keep_in_place(now);
    group_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) Mma<FP8, N>::run(sums.done[tile], now + 4 * k, b + 2 * k, 1);
    group_commit();
    group_but_one_wait();
    keep_in_place(then);
    if (UNIT == 0) {
      if (held && (threadIdx.x & 31) == 0) barrier_arrive(held);
      held = stage.empty;
    }
    if constexpr (UNIT + 1 < UNITS) {
      if (pair_bytes)
        decode(block_of(stage.weights, (UNIT + 1) / TILES, (UNIT + 1) % TILES), pair_bytes, then);
      unit_ahead<N, UNIT + 1>(sums, then, now, stage, held, more, ring, pair_bytes, tokens, weights,
                              full, empty);
    } else if (more) {
      stage = enter(ring, tokens, weights, full, empty);
      decode(block_of(stage.weights, 0, 0), pair_bytes, then);
    }
  }

  // where(): what the tile is of, asked for again where its sums are stored.
  template <int N, class Where>
  static __device__ void multiply(int steps, const Where& where, Ring& ring, u32 tokens, u32 weights,
                                  u32 full, u32 empty, unsigned char* staging) {
    Sums<N> sums;
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int i = 0; i < N / 2; ++i) sums.done[m][i] = 0.f;
    const u32 pair_bytes = load4(full - 16);
    Stage stage = enter(ring, tokens, weights, full, empty);
    if constexpr (SINGLE) {
      multiply_few(sums, stage, steps, pair_bytes, ring, tokens, weights, full, empty);
    } else {
      u32 even[16], odd[16];
      decode(block_of(stage.weights, 0, 0), pair_bytes, even);
      if constexpr (AHEAD) {
        u32 held = 0;
#pragma unroll 1
        for (int left = steps - 1; left >= 0; --left)
          unit_ahead<N, 0>(sums, even, odd, stage, held, left > 0, ring, pair_bytes, tokens, weights,
                           full, empty);
        group_wait();
#pragma unroll
        for (int m = 0; m < TILES; ++m) keep_in_place(sums.done[m]);
        if ((threadIdx.x & 31) == 0) barrier_arrive(held);
        store<N>(where(), sums, staging);
        return;
      }
#pragma unroll 1
      for (int left = steps - 1; left >= 0; --left) {
        unit<N, 0>(sums, even, odd, stage, left > 0, ring, pair_bytes, tokens, weights, full, empty);
        if constexpr (UNITS % 2) {
          if (--left < 0) break;
          unit<N, 0>(sums, odd, even, stage, left > 0, ring, pair_bytes, tokens, weights, full, empty);
        }
      }
    }
    store<N>(where(), sums, staging);
  }

  // FEW: every warp multiplies its 16 rows of each tile, an atom of 64 inputs at a time, and decodes
  // the next atom meanwhile.
  template <int N>
  static __device__ void multiply_few(Sums<N>& sums, Stage stage, int steps, u32 pair_bytes, Ring& ring,
                                      u32 tokens, u32 weights, u32 full, u32 empty) {
    const u32 row = threadIdx.x & 7, piece = threadIdx.x >> 3 & 3;
    const u32 near = row * 128 + ((piece ^ row) << 4), far = row * 128 + (((4 + piece) ^ row) << 4);
    u32 codes[2][TILES][16];
#pragma unroll
    for (int m = 0; m < TILES; ++m) decode(block_of(stage.weights, 0, m), pair_bytes, codes[0][m]);
#pragma unroll 1
    for (int left = steps - 1; left >= 0; --left) {
#pragma unroll
      for (int atom = 0; atom < ATOMS; ++atom) {
        const u32 at = stage.tokens + atom * (TOKENS * 128), release = stage.empty;
        u32 held[N / 8][8];
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
          load_matrices(at + j * 1024 + near, held[j]);
          load_matrices(at + j * 1024 + far, held[j] + 4);
        }
        if (atom + 1 == ATOMS && left > 0) stage = enter(ring, tokens, weights, full, empty);
#pragma unroll
        for (int m = 0; m < TILES; ++m)  // behind the last step once more its first atom, for nothing
          decode(block_of(stage.weights, (atom + 1) % ATOMS, m), pair_bytes, codes[(atom + 1) & 1][m]);
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
          for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int j = 0; j < N / 8; ++j)
              warp_product(sums.done[m] + 4 * j, codes[atom & 1][m] + 4 * k, held[j][2 * k],
                           held[j][2 * k + 1]);
        if (atom + 1 == ATOMS) {
          __syncwarp();
          if ((threadIdx.x & 31) == 0) barrier_arrive(release);
        }
      }
    }
  }

  static __device__ u32 scales_of(const unsigned char* staging) {
    return address(staging) + GROUPS * CHUNK * 128 + (threadIdx.x / 128 - 1) * SCALES;
  }
  static __device__ void bring_scales(const Work& work, const unsigned char* staging) {
    const Args& a = work.a;
    const int group = threadIdx.x / 128 - 1, t = threadIdx.x & 127;
    const u32 to = scales_of(staging);
    const size_t row = size_t(work.p.expert) * a.outputs + work.p.output + group * TILES * 64;
    if (t < 16 * TILES) copy16(to + 16 * t, a.row_scale + row + 4 * t);
    if constexpr (FP8) {  // from the sixteen bytes on in which the first lies, to those of the last
      const int before = work.p.row & 3;
      if (4 * t < before + work.p.rows)
        copy16(to + 256 * TILES + 16 * t, a.token_scale + work.p.row - before + 4 * t);
    }
    copies_commit();
  }

  // Partial sums into shared memory, over the ring, which has been read.
  template <int N>
  static __device__ void store(const Work& work, Sums<N>& sums, unsigned char* staging) {
    const Args& a = work.a;
    const Place& p = work.p;
    const int group = threadIdx.x / 128 - 1, t = threadIdx.x & 127, warp = t >> 5, lane = t & 31;
    const u32 base = address(staging) + group * (CHUNK * 128), scales = scales_of(staging);
    if constexpr (BOXES) {
      copies_wait<0>();
      named_barrier(group + 1, 128);
    }
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
      const int output = p.output + (group * TILES + m) * 64;
      float upper, lower;
      if constexpr (BOXES) {
        const u32 at = scales + 4 * (m * 64 + warp * 16 + (lane >> 2));
        upper = __uint_as_float(load4(at)), lower = __uint_as_float(load4(at + 32));
      } else {
        const float* at = a.row_scale + size_t(p.expert) * a.outputs + output + warp * 16 + (lane >> 2);
        upper = __ldg(at), lower = __ldg(at + 8);
      }
#pragma unroll
      for (int start = 0; start < N; start += CHUNK) {
        if (start && start >= p.rows) break;
        constexpr int SIZE = N < CHUNK ? N : CHUNK;
#pragma unroll
        for (int j = 0; j < SIZE / 8; ++j) {
          if (start + 8 * j >= N) break;
          const float* v = sums.done[m] + start / 2 + 4 * j;
          float s0 = 1.f, s1 = 1.f;
          if constexpr (FP8) {
            const int column = start + 8 * j + (lane & 3) * 2, end = p.rows - 1;
            if constexpr (BOXES) {
              const u32 at = scales + 256 * TILES + 4 * ((p.row & 3) + column);
              s0 = __uint_as_float(load4(at)), s1 = __uint_as_float(load4(at + 4));
            } else {
              s0 = load_written(a.token_scale + row_of(a, p.row + min(column, end)));
              s1 = load_written(a.token_scale + row_of(a, p.row + min(column + 1, end)));
            }
          }
          const u32 r0 = pack_bf16(v[0] * upper * s0, v[1] * upper * s1);
          const u32 r1 = pack_bf16(v[2] * lower * s0, v[3] * lower * s1);
          const int token = 8 * j + (lane & 7), part = 2 * warp + ((lane >> 3) & 1);
          const u32 at = base + token * 128 + ((part ^ (token & 7)) << 4);
          store_transposed(at, r0, r1);
        }
        named_barrier(group + 1, 128);
        const int held = min(SIZE, p.rows - start) * 8;
        for (int i = t; i < held; i += 128) {
          const int token = i >> 3, part = i & 7;
          const uint4 v = load16(base + token * 128 + ((part ^ (token & 7)) << 4));
          *reinterpret_cast<uint4*>(a.out + size_t(p.row + start + token) * a.outputs + output + part * 8) =
              v;
        }
        named_barrier(group + 1, 128);
      }
    }
  }

  template <int MOST, int N, int... MORE, class F>
  static __device__ void fitting(int rows, const F& with) {
    if constexpr (N == MOST) {
      with(Number<N>());
    } else {
      if (rows <= N)
        with(Number<N>());
      else
        fitting<MOST, MORE...>(rows, with);
    }
  }

  static __device__ unsigned char* ring_memory() {
    SHARED(raw);
    return raw + ((1024 - (address(raw) & 1023)) & 1023);
  }

  struct Room {  // where things lie in shared memory
    unsigned char *tokens, *weights, *staging;
    int* first;
    u32 full, empty, slots;
  };

  // Prepare shared memory, wait for the kernel before, count the tiles and rows before each expert.
  static __device__ Room begin(const Args& a) {
    Room r;
    r.tokens = ring_memory();
    r.weights = r.tokens + STAGES * TOKEN_BYTES;
    r.staging = r.weights + STAGES * WEIGHT_BYTES;
    unsigned char* bars = r.staging + GROUPS * (CHUNK * 128 + SCALES) + 16;  // behind a constant
    r.full = address(bars), r.empty = r.full + 8 * STAGES, r.slots = r.full + 16 * STAGES;
    r.first = reinterpret_cast<int*>(bars + 20 * STAGES);
    int* first = r.first;
    if (threadIdx.x == 0) {
      *reinterpret_cast<u32*>(bars - 16) = PAIR_BYTES;
      for (int i = 0; i < STAGES; ++i) {
        barrier_init(r.full + 8 * i, WAY == TOGETHER ? 129 : BOXES ? 1 : 1 + 96);
        barrier_init(r.empty + 8 * i, 4 * GROUPS);
      }
      barriers_ready();
    }
    previous_kernel_wait();
    if (threadIdx.x < 32) {
      const long long all = __ldg(a.offsets + a.experts);
      const bool mine = a.least <= all && all < a.most;
      int sum = 0;
      if (threadIdx.x == 0) first[0] = 0, first[PLACES] = static_cast<int>(__ldg(a.offsets));
      for (int base = 0; base < a.experts; base += 32) {
        const int e = base + threadIdx.x;
        int n = 0;
        if (mine && e < a.experts) {
          const int end = static_cast<int>(__ldg(a.offsets + e + 1));
          first[PLACES + e + 1] = end;
          n = (end - static_cast<int>(__ldg(a.offsets + e)) + TOKENS - 1) / TOKENS;
        }
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
          const int other = __shfl_up_sync(~0u, n, d);
          if (threadIdx.x >= d) n += other;
        }
        if (e < a.experts) first[e + 1] = sum + n;
        sum += __shfl_sync(~0u, n, 31);
      }
    }
    __syncthreads();
    next_kernel_may_start();
    return r;
  }

  // The smallest instruction that takes all rows of a tile.
  template <class Where>
  static __device__ void multiply_tile(const Where& where, Ring& ring, const Room& room) {
    const Work work = where();
    const int rows = work.p.rows, steps = steps_of(work.a);
    if constexpr (BOXES) bring_scales(work, room.staging);
    const u32 x = address(room.tokens), w = address(room.weights);
    const auto with = [&](auto n) {
      multiply<decltype(n)::value>(steps, where, ring, x, w, room.full, room.empty, room.staging);
    };
    if constexpr (TOKENS <= 32)
      fitting<TOKENS, 8, 16, 24, 32>(rows, with);
    else if constexpr (TOKENS == 48)
      fitting<TOKENS, 8, 16, 24, 32, 40, 48>(rows, with);
    else if constexpr (TOKENS == 64 && GROUPS == 4)
      fitting<TOKENS, 8, 16, 24, 32, 40, 48, 56, 64>(rows, with);
    else if constexpr (TOKENS == 64)
      fitting<TOKENS, 16, 32, 48, 64>(rows, with);
    else if constexpr (BOXES)
      fitting<TOKENS, 96, 104, 112, 120, 128, 136>(rows, with);
    else
      with(Number<TOKENS>());
  }

  static __device__ void run(const Args& a, const TokenMap& map) {
    const Room room = begin(a);
    const int* first = room.first;
    const u32 tokens = address(room.tokens), weights = address(room.weights);
    const u32 full = room.full, empty = room.empty;
    const int total = first[a.experts] * (a.outputs / HEIGHT);
    if (threadIdx.x < 128) {
      fewer_registers<PRODUCER_REGS>();
      if constexpr (WAY == TOGETHER) {
        produce(a, first, total, tokens, weights, full, empty);
      } else if constexpr (BOXES) {
        if (threadIdx.x < 32)
          produce_boxes(a, map, first, total, tokens, weights, full, empty);
      } else if (threadIdx.x < 32) {
        produce_weights(a, first, total, weights, full, empty);
      } else {
        produce_tokens(a, first, total, tokens, full, empty);
      }
    } else {
      more_registers<CONSUMER_REGS>();
      Ring ring;
      for (int tile = blockIdx.x; tile < total; tile += gridDim.x) {
        const Work work = {a, locate(a, first, tile)};
        multiply_tile([&] { return work; }, ring, room);
      }
    }
  }
};

#ifdef __CUDACC__

template <class K>
__global__ void __launch_bounds__(K::THREADS, 1)
    run_kernel(const __grid_constant__ Args a, const __grid_constant__ TokenMap map) {
  K::run(a, map);
}

template <class K>
int launch(const Args& a, long long blocks, void* stream) {
  static bool ready = false;
  if (!ready) {
    cudaError_t e =
        cudaFuncSetAttribute(run_kernel<K>, cudaFuncAttributeMaxDynamicSharedMemorySize, K::SHARED);
    if (e != cudaSuccess) return e;
    ready = true;
  }
  TokenMap map = {};
  if (K::BOX && (a.source || !describe_rows(map, a.x, a.inputs * (K::FP8 ? 1 : 2), a.rows,
                                            a.x_row_bytes, K::BOX)))
    return cudaErrorInvalidValue;
  cudaError_t e = launch_next(run_kernel<K>, dim3(static_cast<unsigned>(blocks)), dim3(K::THREADS),
                              K::SHARED, static_cast<cudaStream_t>(stream), a, map);
  return e != cudaSuccess ? e : cudaGetLastError();
}

#endif
