// Index scores of FP4 keys where they lie in the cache: 32 heads of 128.
//
// One warp group takes R rows of one sequence and a stretch of keys, 64 at a time. Of candidate
// blocks it takes those that any of its rows has, and each score finds its column by its row's bits.
// Keys are the rows of the product and are decoded into registers, R x 32 queries lie in shared
// memory. Both are e5m2, and negated, which is a step less for keys: a code times a power of two
// relative to the largest group of its vector, exact within 25 binades; what lies further below
// counts as zero. The order of the 128 dimensions is free, so each thread decodes 16 bytes of one
// group: thread l % 4 = c holds group c, and byte b of half h of step s is dimension
// 32 c + 8 s + 4 h + b.
//
// Raw keys travel through a ring in shared memory that every thread fills for itself alone, so no
// barrier stands in the loop; what overlaps product and arithmetic are the other blocks of the
// multiprocessor.

#include "../card.cuh"
#include "../chain.cuh"
#ifdef HOST_TWIN
#include "cuda_host_wgmma.h"
#else
#include "wgmma.cuh"
#endif

namespace {

using u16 = uint16_t;
using u32 = uint32_t;
constexpr u32 kFull = 0xFFFFFFFFu;
constexpr int kHeads = 32, kDim = 128, kTile = 64, kThreads = 128, kStages = 4;
constexpr int kStageBytes = kThreads * 40;
constexpr int kTop = 12;  // power of two that the largest group of a key is moved to

struct Cache {
  const unsigned char* codes;   // entry: 64 bytes, 16-byte aligned
  const unsigned char* scales;  // entry: 4 bytes, 4-byte aligned
  u32 code_block, scale_block;  // strides in bytes
  int code_entry, scale_entry;
  int log_entries;              // entries of a block = 1 << log_entries
};

#ifndef HOST_TWIN
__device__ inline void copy16(void* to, const void* from) {
  const u32 at = static_cast<u32>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}
__device__ inline void copy4(void* to, const void* from) {
  const u32 at = static_cast<u32>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(from) : "memory");
}
__device__ inline void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ inline void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
__device__ inline u32 pick(u32 low, u32 high, u32 selector) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(selector));
  return r;
}
__device__ inline u32 e5m2_pair(float low, float high) {
  u16 r;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}
__device__ inline uint64_t descriptor(const void* tile) {
  const uint64_t at = static_cast<u32>(__cvta_generic_to_shared(tile));
  return (at & 0x3FFFF) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
__device__ inline void product_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void product_end() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
__device__ inline void product_wait() {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
// Nothing that reads or reuses a register of a product may move in front of the wait.
__device__ inline void settle(float& x) { asm volatile("" : "+f"(x)::"memory"); }
__device__ inline void settle(u32& x) { asm volatile("" : "+r"(x)::"memory"); }
__device__ inline void shared_to_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline u16 bf16_bits(float x) {
  u16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}
#endif

__device__ inline void put(float* p, float x) { *p = x; }
__device__ inline void put(u16* p, float x) { *p = bf16_bits(x); }
__device__ inline float value(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }

// Sixteen bytes of FP4 codes of one group as e5m2, negated: words[s][h] of the four steps.
// `shift` = place of the group below the top, 0..25; negative: the group counts as zero. `signs` is
// kSigns, in a register that the assembler does not know.
constexpr u32 kSigns = 0x40404040u;
__device__ inline void decode(const uint4& codes, int shift, u32 signs, u32 (&words)[4][2]) {
  const u32 by = shift < 0 ? 0u : static_cast<u32>(shift);
  const u32 low = shift < 0 ? 0u : 0x0A080400u + by * 0x04040400u;
  const u32 high = shift < 0 ? 0u : 0x12100E0Cu + by * 0x04040404u;
  const u32 packed[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    const u32 x = packed[s], sizes = x & 0x77777777u;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // A selector's top bit repeats the sign of the byte: 0x40 becomes 0 where it is set.
      const u32 positive = pick(signs, signs, h ? x >> 16 : x);
      words[s][h] = pick(low, high, h ? sizes >> 16 : sizes) + 2 * positive;
    }
  }
}

// max(x, 0) 2^-40, exact: products stay under 2^36. A saturating product runs where fused
// multiply-adds do; a maximum would share a pipe of half the width with the decoding.
constexpr u32 kDown = (127u - 40u) << 23, kUp = (127u + 40u) << 23;
__device__ inline float positive(float x) { return __saturatef(x * __uint_as_float(kDown)); }

__device__ inline int largest_byte(u32 x) {
  const u32 a = max(x & 0xFFu, x >> 8 & 0xFFu), b = max(x >> 16 & 0xFFu, x >> 24);
  return static_cast<int>(max(a, b));
}

// How many of a row's candidate blocks, ascending and padded with -1, lie below a block; by a warp.
__device__ inline int blocks_below(const int64_t* list, int count, int64_t block) {
  const int lane = threadIdx.x % 32, stride = (count + 31) / 32;
  auto below = [&](int i) {
    if (i >= count) return false;
    const int64_t own = list[i];
    return own >= 0 && own < block;
  };
  const int begun = __popc(__ballot_sync(kFull, below(lane * stride)));  // stretches that begin below
  if (!begun) return 0;
  const int first = (begun - 1) * stride;
  int sum = first + 1;
  for (int i = 1; i < stride; i += 32) {
    sum += __popc(__ballot_sync(kFull, i + lane < stride && below(first + i + lane)));
  }
  return sum;
}

constexpr int kWords = 128;  // of a bitmap of the blocks of a stretch

// The candidate blocks of R rows inside a stretch of 32 * kWords blocks.
template <int R>
struct Candidates {
  u32 bits[R][kWords];    // whose they are
  int ranks[R][kWords];   // candidates of the row in front of a word
  u16 united[32 * kWords];  // those of any row, ascending
  int begin[R], totals[4];
};

constexpr u32 kNothing = 0xFF800000u;  // -inf

// -inf in columns from..end-1 of rows begin..stop-1; from is a multiple of 64, rows are aligned.
template <typename O>
__device__ void fill(O* out, int64_t stride, int begin, int stop, int from, int end) {
  constexpr int kPer = 16 / sizeof(O);
  const u32 word = sizeof(O) == 2 ? kNothing | kNothing >> 16 : kNothing;
  for (int row = begin; row < stop; ++row) {
    O* line = out + row * stride;
    for (int i = from + threadIdx.x * kPer; i < end; i += kThreads * kPer) {
      if (i + kPer <= end) {
        *reinterpret_cast<uint4*>(line + i) = make_uint4(word, word, word, word);
      } else {
        for (int j = i; j < end; ++j) put(line + j, __uint_as_float(kNothing));
      }
    }
  }
}

template <int R, typename O, int BLOCKS, bool CANDIDATES>
__global__ void __launch_bounds__(kThreads, BLOCKS)
scores_kernel(const u16* q, const u16* weight, Cache cache, const int64_t* table,
              int64_t table_stride, const int64_t* sequence, const int64_t* visible,
              const int64_t* candidates, int num_candidates, int log_size, O* out,
              int64_t out_stride, int num_rows, int entries, int chunk) {
  constexpr int N = R * kHeads, kPairs = R > 1 ? R / 2 : 1;
  SHARED(memory, 1024);
  unsigned char* queries = memory;                          // N rows of 128 bytes
  float* factors = reinterpret_cast<float*>(memory + N * kDim);  // [R][4][8]
  u32* constants = reinterpret_cast<u32*>(memory + N * kDim + N * 4);
  unsigned char* ring = memory + N * kDim + N * 4 + 16;
  Candidates<R>& found = *reinterpret_cast<Candidates<R>*>(ring + kStages * kStageBytes);
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, c = tid % 4;
  const int first_row = blockIdx.y * R;

  previous_kernel_wait();
  next_kernel_may_start();
  // Queries: four threads a head, each one group of 32 dimensions.
  for (int n = tid / 4; n < N; n += kThreads / 4) {
    const int row = first_row + n / kHeads, head = n % kHeads;
    uint4 raw[4];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      raw[s] = make_uint4(0, 0, 0, 0);
      if (row < num_rows) {
        const int64_t at = (static_cast<int64_t>(row) * kHeads + head) * kDim + c * 32 + s * 8;
        raw[s] = *reinterpret_cast<const uint4*>(q + at);
      }
    }
    u32 largest = 0;  // bits of the magnitude
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const u32 words[4] = {raw[s].x, raw[s].y, raw[s].z, raw[s].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        largest = max(largest, max(words[i] & 0x7FFFu, words[i] >> 16 & 0x7FFFu));
      }
    }
    largest = max(largest, __shfl_xor_sync(kFull, largest, 1));
    largest = max(largest, __shfl_xor_sync(kFull, largest, 2));
    // The largest moves to [2^13, 2^14); a head of zeros, or of nearly nothing, stays zero.
    const int exponent = static_cast<int>(largest >> 7);
    const bool held = exponent >= 14 && exponent <= 240;
    const float up = held ? -__uint_as_float(static_cast<u32>(127 + 13 - (exponent - 127)) << 23) : 0.f;
    const float down = held ? __uint_as_float(static_cast<u32>(exponent - 13) << 23) : 0.f;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const u32 words[4] = {raw[s].x, raw[s].y, raw[s].z, raw[s].w};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        u32 packed = 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const u32 w = words[2 * h + i];
          const float a = __uint_as_float(w << 16) * up, b = __uint_as_float(w & 0xFFFF0000u) * up;
          packed |= e5m2_pair(a, b) << 16 * i;
        }
        const int piece = 2 * s + h;
        *reinterpret_cast<u32*>(queries + n * kDim + ((piece ^ (n & 7)) << 4) + c * 4) = packed;
      }
    }
    if (c == 0) {
      const float w = row < num_rows ? value(weight[static_cast<int64_t>(row) * kHeads + head]) : 0.f;
      // Column 8 j + 2 c + e of a row belongs to thread c: [row][c][2 j + e].
      factors[(n / kHeads * 4 + head % 8 / 2) * 8 + head / 8 * 2 + head % 2] = w * down * __uint_as_float(kUp);
    }
  }
  if (tid == 0) *constants = kSigns;
  shared_to_products();
  __syncthreads();
  const u32 signs = *reinterpret_cast<volatile u32*>(constants);
  const uint64_t tile_b = descriptor(queries);

  // Rows of one sequence at a time; mostly that is all of them.
  const int last_row = min(first_row + R, num_rows);
  for (int begin = first_row; begin < last_row;) {
    const int64_t owner = sequence[begin];
    int stop = begin, limit = 0;
    while (stop < last_row && sequence[stop] == owner) {
      limit = max(limit, static_cast<int>(min(visible[stop], static_cast<int64_t>(entries))));
      ++stop;
    }
    const int64_t* pages = table + owner * table_stride;
    const int seen = limit, mask = (1 << log_size) - 1;
    const int from = blockIdx.x * chunk, end = min(from + chunk, entries);
    const int to = min(end, limit);  // nobody sees what lies beyond
    int num_keys = max(to - from, 0), num_united = 0;
    const int first_block = from >> log_size;
    if (CANDIDATES) {
      const int last_block = (end + mask) >> log_size, words = (last_block - first_block + 31) / 32;
      __syncthreads();
      for (int i = tid; i < R * kWords; i += kThreads) (&found.bits[0][0])[i] = 0;
      __syncthreads();
      for (int row = begin + warp; row < stop; row += kThreads / 32) {
        const int64_t* list = candidates + static_cast<int64_t>(row) * num_candidates;
        const int lower = blocks_below(list, num_candidates, first_block);
        const int upper = blocks_below(list, num_candidates, last_block);
        if (lane == 0) found.begin[row - first_row] = lower;
        for (int i = lower + lane; i < upper; i += 32) {
          const int block = static_cast<int>(list[i]) - first_block;
          atomicOr(&found.bits[row - first_row][block / 32], 1u << block % 32);
        }
        if (blockIdx.x == 0) {  // what is absent, or no entry of the sequence
          const int held = blocks_below(list, num_candidates, (entries + mask) >> log_size);
          O* line = out + row * out_stride;
          for (int i = (held << log_size) + lane; i < num_candidates << log_size; i += 32) {
            put(line + i, __uint_as_float(kNothing));
          }
        }
      }
      __syncthreads();
      for (int row = begin - first_row + warp; row < stop - first_row; row += kThreads / 32) {
        int before = found.begin[row];
        for (int w = lane; w < (words + 31) / 32 * 32; w += 32) {
          const u32 own = __popc(found.bits[row][w]);
          u32 upto = own;
#pragma unroll
          for (int d = 1; d < 32; d *= 2) {
            const u32 other = __shfl_up_sync(kFull, upto, d);
            if (lane >= d) upto += other;
          }
          found.ranks[row][w] = before + static_cast<int>(upto - own);
          before += static_cast<int>(__shfl_sync(kFull, upto, 31));
        }
      }
      u32 any_row = 0;
      for (int r = 0; r < R; ++r) any_row |= found.bits[r][tid];
      u32 upto = __popc(any_row);
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const u32 other = __shfl_up_sync(kFull, upto, d);
        if (lane >= d) upto += other;
      }
      if (lane == 31) found.totals[warp] = static_cast<int>(upto);
      __syncthreads();
      int place = static_cast<int>(upto) - __popc(any_row);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if (w < warp) place += found.totals[w];
        num_united += found.totals[w];
      }
      for (u32 bits = any_row; bits; bits &= bits - 1) {
        found.united[place++] = static_cast<u16>(tid * 32 + __ffs(bits) - 1);
      }
      __syncthreads();
      num_keys = num_united << log_size;
    }
    const int num_tiles = (num_keys + kTile - 1) / kTile;
    // The entry that key number i of this stretch is.
    auto entry_of = [&](int i) {
      return CANDIDATES ? (first_block + found.united[i >> log_size]) << log_size | (i & mask)
                        : from + i;
    };
    int sees[kPairs];  // entries that this thread's rows see
    int everyone = stop - begin == R ? entries : 0;  // entries that all rows see
    for (int row = begin; row < stop; ++row) {
      everyone = static_cast<int>(min(visible[row], static_cast<int64_t>(everyone)));
    }
    O* own_out = out + (first_row + (R > 1 && (c & 2) ? R / 2 : 0)) * out_stride + from + warp * 16 +
                 lane / 4 + (c & 1 ? 8 : 0);
#pragma unroll
    for (int r = 0; r < kPairs; ++r) {
      const int row = first_row + r + (R > 1 && (c & 2) ? R / 2 : 0);
      sees[r] = row >= begin && row < stop ? static_cast<int>(min(visible[row], static_cast<int64_t>(entries))) : 0;
    }
    const int own = warp * 16 + lane / 4;  // and 8 further

    const bool whole = !CANDIDATES && cache.log_entries >= 6;  // a tile lies in one block
    const unsigned char* group_codes = cache.codes + c * 16;
    const unsigned char* own_codes = group_codes + own * cache.code_entry;
    const unsigned char* own_scales = cache.scales + own * cache.scale_entry;
    const u32* pages_low = reinterpret_cast<const u32*>(pages);  // the lower halves of its numbers
    auto block_of = [&](int page) { return pages_low[2 * page]; };
    auto place = [](u32 block, u32 stride, int inside) {
      return static_cast<uint64_t>(block) * stride + static_cast<u32>(inside);
    };
    auto fetch = [&](int tile) {
      unsigned char* stage = ring + tile % kStages * kStageBytes;
      if (whole) {
        const int first = from + tile * kTile;
        const u32 block = block_of(first >> cache.log_entries);
        const int inside = first & ((1 << cache.log_entries) - 1);
        const unsigned char* codes = own_codes + place(block, cache.code_block, inside * cache.code_entry);
        const unsigned char* scales =
            own_scales + place(block, cache.scale_block, inside * cache.scale_entry);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          copy16(stage + (i * kThreads + tid) * 16, codes);
          copy4(stage + 2 * kThreads * 16 + (i * kThreads + tid) * 4, scales);
          codes += 8 * cache.code_entry;
          scales += 8 * cache.scale_entry;
        }
        return;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int key = entry_of(min(tile * kTile + own + 8 * i, num_keys - 1));
        if (CANDIDATES && key >= seen) key = 0;
        const u32 block = block_of(key >> cache.log_entries);
        const int inside = key & ((1 << cache.log_entries) - 1);
        const unsigned char* codes =
            group_codes + place(block, cache.code_block, inside * cache.code_entry);
        const unsigned char* scales =
            cache.scales + place(block, cache.scale_block, inside * cache.scale_entry);
        copy16(stage + (i * kThreads + tid) * 16, codes);
        copy4(stage + 2 * kThreads * 16 + (i * kThreads + tid) * 4, scales);
      }
    };
    const bool any = seen > 0;  // else no key may be read, and every candidate is absent
#pragma unroll
    for (int t = 0; t < kStages - 1; ++t) {
      if (t < num_tiles && any) fetch(t);
      copies_end();
    }
    u32 a[4][4];
    float scale[2];
    auto unpack = [&](int tile, u32 (&into)[4][4], float (&scales_of)[2]) {
      const unsigned char* stage = ring + tile % kStages * kStageBytes;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 codes = *reinterpret_cast<const uint4*>(stage + (i * kThreads + tid) * 16);
        const u32 scales =
            *reinterpret_cast<const u32*>(stage + 2 * kThreads * 16 + (i * kThreads + tid) * 4);
        const int largest = largest_byte(scales);
        const int mine = static_cast<int>(scales >> 8 * c & 0xFFu);
        u32 words[4][2];
        decode(codes, mine - largest + 13 + kTop, signs, words);
#pragma unroll
        for (int s = 0; s < 4; ++s) into[s][i] = words[s][0], into[s][2 + i] = words[s][1];
        scales_of[i] = __uint_as_float(largest > kTop ? static_cast<u32>(largest - kTop) << 23 : 0u);
      }
    };
    for (int tile = 0; tile < num_tiles; ++tile) {
      copies_wait<kStages - 2>();
      unpack(tile, a, scale);
      float d[N / 2];
      product_begin();
#pragma unroll
      for (int s = 0; s < 4; ++s) Wgmma<N>::run(d, a[s], tile_b + 2 * s, s > 0);
      product_end();
      if (tile + kStages - 1 < num_tiles && any) fetch(tile + kStages - 1);
      copies_end();
      product_wait();
#pragma unroll
      for (int i = 0; i < N / 2; ++i) settle(d[i]);
#pragma unroll
      for (int i = 0; i < 16; ++i) settle(a[i / 4][i % 4]);

      // relu, head weights, sum over this thread's heads and then over four threads.
      float part[R];
      const bool odd = c & 1, upper = c & 2;
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const float4* w = reinterpret_cast<const float4*>(factors + (r * 4 + c) * 8);
        const float4 w0 = w[0], w1 = w[1];
        const float ws[8] = {w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z, w1.w};
        float s0 = 0.f, s1 = 0.f;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            s0 = fmaf(positive(d[(r * 4 + j) * 4 + e]), ws[2 * j + e], s0);
            s1 = fmaf(positive(d[(r * 4 + j) * 4 + 2 + e]), ws[2 * j + e], s1);
          }
        }
        const float keep = odd ? s1 : s0, send = odd ? s0 : s1;
        part[r] = keep + __shfl_xor_sync(kFull, send, 1);
      }
      const float factor = odd ? scale[1] : scale[0];
      float sums[kPairs];
#pragma unroll
      for (int r = 0; r < kPairs; ++r) {
        if (R == 1) {
          sums[r] = part[0] + __shfl_xor_sync(kFull, part[0], 2);
        } else {
          const float keep = upper ? part[r + R / 2] : part[r];
          const float send = upper ? part[r] : part[r + R / 2];
          sums[r] = keep + __shfl_xor_sync(kFull, send, 2);
        }
        sums[r] *= factor;
      }
      O* to_out = own_out + tile * kTile;
      if (!CANDIDATES && from + (tile + 1) * kTile <= everyone) {
#pragma unroll
        for (int r = 0; r < kPairs; ++r) {
          if (R > 1 || !upper) put(to_out, sums[r]);
          to_out += out_stride;
        }
      } else {
        const int number = tile * kTile + own + (odd ? 8 : 0);
        const bool here = CANDIDATES ? number < num_keys : from + number < end;
        const int united = CANDIDATES && here ? found.united[number >> log_size] : 0;
        const int key = CANDIDATES ? (first_block + united) << log_size | (number & mask) : from + number;
#pragma unroll
        for (int r = 0; r < kPairs; ++r) {
          const int member = r + (R > 1 && upper ? R / 2 : 0), row = first_row + member;
          if (key >= sees[r]) sums[r] = __uint_as_float(kNothing);
          if (CANDIDATES) {
            const u32 bits = found.bits[member][united / 32];
            if (here && (bits >> united % 32 & 1) && (R > 1 || !upper)) {
              const int rank = found.ranks[member][united / 32] +
                               __popc(bits & ((1u << united % 32) - 1));
              put(out + row * out_stride + ((rank << log_size) + (number & mask)), sums[r]);
            }
          } else if (here && row >= begin && row < stop && (R > 1 || !upper)) {
            put(to_out, sums[r]);
          }
          to_out += out_stride;
        }
      }
    }
    if (!CANDIDATES) fill(out, out_stride, begin, stop, from + num_tiles * kTile, end);
    copies_wait<0>();
    begin = stop;
  }
}

template <int R, typename O, int BLOCKS, bool CANDIDATES>
int run(const void* q, const void* weight, const Cache& cache, const void* table,
        long long table_stride, const void* sequence, const void* visible, const void* candidates,
        long long num_candidates, int log_size, void* out, long long out_stride,
        long long num_rows, long long entries, long long chunk, cudaStream_t stream) {
  const int bytes = R * kHeads * (kDim + 4) + 16 + kStages * kStageBytes +
                    (CANDIDATES ? static_cast<int>(sizeof(Candidates<R>)) : 0);
  auto kernel = scores_kernel<R, O, BLOCKS, CANDIDATES>;
  const int status = make_room(kernel, bytes);
  if (status) return status;
  const dim3 grid(static_cast<unsigned>((entries + chunk - 1) / chunk),
                  static_cast<unsigned>((num_rows + R - 1) / R));
  LAUNCH_NEXT(kernel, grid, dim3(kThreads), bytes, stream, static_cast<const u16*>(q),
         static_cast<const u16*>(weight), cache, static_cast<const int64_t*>(table),
         static_cast<int64_t>(table_stride), static_cast<const int64_t*>(sequence),
         static_cast<const int64_t*>(visible), static_cast<const int64_t*>(candidates),
         static_cast<int>(num_candidates), log_size, static_cast<O*>(out),
         static_cast<int64_t>(out_stride), static_cast<int>(num_rows), static_cast<int>(entries),
         static_cast<int>(chunk));
  return static_cast<int>(cudaGetLastError());
}

}  // namespace

// q [rows, 32, 128] bf16 on the FP4 grid, weight [rows, 32] bf16,
// table [sequences, width] of blocks, sequence and visible [rows], all int64;
// out bf16 (out_size 2) or fp32 [rows, ...] with out_stride elements a row, 16-byte aligned; -inf
// where a row sees nothing.
// rows_each: rows that share a read of the keys: 1, 2, 4, 6 or 8. candidates null, or [rows, K].
extern "C" int index_scores(const void* q, const void* weight,
                            const void* codes, long long code_block, long long code_entry,
                            const void* scales, long long scale_block, long long scale_entry,
                            long long log_entries, const void* table, long long table_stride,
                            const void* sequence, const void* visible, const void* candidates,
                            long long num_candidates, long long log_size, void* out,
                            long long out_size, long long out_stride, long long num_rows,
                            long long entries, long long rows_each, long long chunk,
                            cudaStream_t stream) {
  const Cache cache{static_cast<const unsigned char*>(codes),
                    static_cast<const unsigned char*>(scales),
                    static_cast<u32>(code_block), static_cast<u32>(scale_block),
                    static_cast<int>(code_entry),
                    static_cast<int>(scale_entry), static_cast<int>(log_entries)};
#define RUN(O, R, BLOCKS, CANDIDATES)                                                         \
  return run<R, O, BLOCKS, CANDIDATES>(q, weight, cache, table, table_stride, sequence,      \
                                       visible, candidates, num_candidates,                  \
                                       static_cast<int>(log_size), out, out_stride,          \
                                       num_rows, entries, chunk, stream)
#define TYPES(...)                            \
  do {                                        \
    if (out_size == 2) RUN(u16, __VA_ARGS__); \
    RUN(float, __VA_ARGS__);                  \
  } while (false)
  if (candidates) {
    switch (rows_each) {
      case 1: TYPES(1, 4, true);
      case 2: TYPES(2, 4, true);
      case 4: TYPES(4, 3, true);
      case 6: TYPES(6, 3, true);
      case 8: TYPES(8, 2, true);
    }
  }
  switch (rows_each) {
    case 1: TYPES(1, 4, false);
    case 2: TYPES(2, 4, false);
    case 4: TYPES(4, 3, false);
    case 6: TYPES(6, 3, false);
    case 8: TYPES(8, 2, false);
  }
#undef TYPES
#undef RUN
  return -1;
}
