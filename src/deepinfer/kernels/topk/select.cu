// Stable selection of the best entries of each row, one block of threads per row.
//
// 1. One pass over the row keeps the largest key of every group of 16 entries in shared memory.
// 2. The count-th largest of these bounds the count-th largest entry from below, since that many
//    groups hold at least one entry each that is not less. It is found by interval search.
// 3. Only groups that reach the bound are read again: at most twice `count`, the groups equal to
//    the bound being cut after the first `count` of them, which hold all ties that can be kept.
// 4. The entries above the bound give the exact threshold by the same search.
// 5. Bits of kept entries and of ties, counted from the left, give the ascending output; ties are
//    taken from the left until the count is full.
//
// Keys are integers in the order of the values: -0 equals 0, NaN is above everything, and nothing
// at or below the key of -inf is ever taken. No step depends on the order of arrival.

#ifdef HOST_TWIN
#include "cuda_host.h"
#else
#include <cuda_runtime.h>
#define LAUNCH(kernel, grid, block, shared, stream, ...) \
  kernel<<<grid, block, shared, stream>>>(__VA_ARGS__)
#define SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

#include <cstdint>

namespace {

using u16 = uint16_t;
using u32 = uint32_t;
constexpr u32 kFull = 0xFFFFFFFFu;
constexpr int kGroup = 16;

template <typename T>
struct Format;

template <>
struct Format<u16> {  // bfloat16
  static constexpr int kPerVector = 8;
  static constexpr u32 kLeast = 0x007Fu;  // key of -inf
  static constexpr u32 kFill = 0xFF80FF80u;
  __device__ static u32 key(u32 bits) {
    if ((bits & 0x7FFFu) > 0x7F80u) return 0xFFFFu;
    if (bits == 0x8000u) bits = 0;
    return bits & 0x8000u ? 0xFFFFu - bits : bits | 0x8000u;
  }
  __device__ static u32 larger(u32 a, u32 b) {  // of both halves; NaN wins
#ifdef HOST_TWIN
    u32 r = 0;
    for (int s = 0; s < 32; s += 16) {
      const u32 x = a >> s & 0xFFFFu, y = b >> s & 0xFFFFu;
      r |= (key(x) >= key(y) ? x : y) << s;
    }
    return r;
#else
    u32 r;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
#endif
  }
  __device__ static u32 top(u32 m) {  // key of the larger half
    return max(key(m & 0xFFFFu), key(m >> 16));
  }
  __device__ static u32 element(const uint4& v, int i) {
    const u32 w = i < 4 ? (i < 2 ? v.x : v.y) : (i < 6 ? v.z : v.w);
    return i & 1 ? w >> 16 : w & 0xFFFFu;
  }
};

template <>
struct Format<u32> {  // float
  static constexpr int kPerVector = 4;
  static constexpr u32 kLeast = 0x007FFFFFu;
  static constexpr u32 kFill = 0xFF800000u;
  __device__ static u32 key(u32 bits) {
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return kFull;
    if (bits == 0x80000000u) bits = 0;
    return bits & 0x80000000u ? kFull - bits : bits | 0x80000000u;
  }
  __device__ static u32 larger(u32 a, u32 b) {
#ifdef HOST_TWIN
    return key(a) >= key(b) ? a : b;
#else
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
#endif
  }
  __device__ static u32 top(u32 m) { return key(m); }
  __device__ static u32 element(const uint4& v, int i) {
    return i < 2 ? (i < 1 ? v.x : v.y) : (i < 3 ? v.z : v.w);
  }
};

__device__ inline uint4 load_once(const uint4* p) {
#ifdef HOST_TWIN
  return *p;
#else
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
#endif
}

// What a block keeps besides its large arrays.
struct Scratch {
  u32 counts[3][4];
  u32 totals[2][32];
  u32 least, most, listed, parity;
};

// Counts of a shared array's keys that reach each of three guesses, summed over the block.
template <typename T, int THREADS>
__device__ void count(const T* keys, int n, u32 a, u32 b, u32 c, u32* totals) {
  u32 na = 0, nb = 0, nc = 0;
  if (sizeof(T) == 2) {
    const u32* words = reinterpret_cast<const u32*>(keys);
    const u32 ha = a << 16, hb = b << 16, hc = c << 16;
    for (int i = threadIdx.x; i < (n + 1) / 2; i += THREADS) {
      const u32 high = words[i], low = high << 16;
      na += (high >= ha) + (low >= ha);
      nb += (high >= hb) + (low >= hb);
      nc += (high >= hc) + (low >= hc);
    }
  } else {
    for (int i = threadIdx.x; i < n; i += THREADS) {
      const u32 key = keys[i];
      na += key >= a;
      nb += key >= b;
      nc += key >= c;
    }
  }
  na = __reduce_add_sync(kFull, na);
  nb = __reduce_add_sync(kFull, nb);
  nc = __reduce_add_sync(kFull, nc);
  if (threadIdx.x % 32 == 0) {
    atomicAdd(totals, na);
    atomicAdd(totals + 1, nb);
    atomicAdd(totals + 2, nc);
  }
}

// The threshold t in lo..hi with `above` = count(> t) < want <= count(>= t), or any t with
// want <= above <= want + slack. Known: count(>= lo) >= want > count(> hi) = 0.
// The array ends in zeros up to a multiple of two; lo >= 1. Ends with a barrier passed.
template <typename T, int THREADS>
__device__ u32 search(const T* keys, int n, u32 lo, u32 hi, u32 want, u32 slack, Scratch& s,
                      u32& above) {
  if (threadIdx.x < 4) s.counts[0][threadIdx.x] = 0;
  __syncthreads();
  above = 0;
  for (int turn = 0; lo < hi; turn = turn == 2 ? 0 : turn + 1) {
    const u32 span = hi - lo, quarter = span / 4;
    const u32 a = lo + (quarter ? quarter : 1), b = lo + (span / 2 ? span / 2 : 1);
    const u32 c = hi - quarter;
    u32* totals = s.counts[turn];
    count<T, THREADS>(keys, n, a, b, c, totals);
    if (threadIdx.x < 4) s.counts[turn == 2 ? 0 : turn + 1][threadIdx.x] = 0;
    __syncthreads();
    const u32 na = totals[0], nb = totals[1], nc = totals[2];
    if (nc >= want) {
      lo = c;
      if (nc <= want + slack) return above = nc, c - 1;
    } else if (nb >= want) {
      lo = b, hi = c - 1, above = nc;
      if (nb <= want + slack) return above = nb, b - 1;
    } else if (na >= want) {
      lo = a, hi = b - 1, above = nb;
      if (na <= want + slack) return above = na, a - 1;
    } else {
      hi = a - 1, above = na;
    }
  }
  return lo;
}

// Writes the places of set bits in order: all of `kept`, and the first `room` of `tied`.
// Each thread holds PER words in a row. Carries the counts over calls; all threads call it.
template <int THREADS, int PER, typename Write>
__device__ void emit(const u32* kept, const u32* tied, int words, u32 room, u32& num_kept,
                     u32& num_tied, Scratch& s, int& parity, Write write) {
  constexpr int kWarps = THREADS / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int base = 0; base < words; base += THREADS * PER) {
    const int first = base + threadIdx.x * PER;
    u32 own[PER], ties[PER], sum = 0;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      own[i] = first + i < words ? kept[first + i] : 0;
      ties[i] = first + i < words ? tied[first + i] : 0;
      sum += __popc(own[i]) + (__popc(ties[i]) << 16);
    }
    u32 upto = sum;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const u32 other = __shfl_up_sync(kFull, upto, d);
      if (lane >= d) upto += other;
    }
    if (lane == 31) s.totals[parity][warp] = upto;
    __syncthreads();
    u32 part = lane < kWarps ? s.totals[parity][lane] : 0;
    parity ^= 1;
    const u32 before_warp = __reduce_add_sync(kFull, lane < warp ? part : 0);
    const u32 all = __reduce_add_sync(kFull, part);
    const u32 before = before_warp + upto - sum;
    u32 place = num_kept + (before & 0xFFFFu), tie = num_tied + (before >> 16);
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      for (u32 bits = own[i] | ties[i]; bits; bits &= bits - 1) {
        const int bit = __ffs(bits) - 1;
        const bool equal = ties[i] >> bit & 1;
        const u32 taken = min(tie, room);
        if (!equal || tie < room) write(place + taken, (first + i) * 32 + bit);
        tie += equal;
        place += !equal;
      }
    }
    num_kept += all & 0xFFFFu;
    num_tied += all >> 16;
  }
}

// The 16 entries of a group as keys; those at or beyond `end` are 0.
template <typename T>
__device__ void load_group(const T* row, int group, int end, u32* keys) {
  constexpr int kPer = Format<T>::kPerVector;
  const int first = group * kGroup;
  if (first + kGroup <= end) {
#pragma unroll
    for (int v = 0; v < kGroup / kPer; ++v) {
      const uint4 data = reinterpret_cast<const uint4*>(row + first)[v];
#pragma unroll
      for (int i = 0; i < kPer; ++i) keys[v * kPer + i] = Format<T>::key(Format<T>::element(data, i));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) keys[i] = first + i < end ? Format<T>::key(row[first + i]) : 0;
  }
}

__host__ __device__ inline int round_up(int n, int m) { return (n + m - 1) / m * m; }

struct Sizes {  // bytes of the shared arrays, one after the other
  int keys, list, groups, window;
  __host__ __device__ Sizes(int entries, int count, int size, int threads) {
    keys = round_up((entries + kGroup - 1) / kGroup * size + 16, 16);
    list = round_up((count + count / 8 + 1) * kGroup * size, 16);
    groups = round_up((2 * count + 1) * 4, 16);
    window = threads * (4096 / threads) * 4;  // 131,072 bits
  }
  __host__ __device__ int total() const { return keys + list + groups + 2 * window; }
};

template <typename T, int THREADS, int LOADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
select_kernel(const T* scores, const int64_t* visible, int64_t* out, int entries, int64_t stride,
              int want) {
  using F = Format<T>;
  constexpr int kPer = F::kPerVector, kLanes = kGroup / kPer, kWords = 4096 / THREADS;
  SHARED(memory);
#ifdef HOST_TWIN
  Scratch& s = *reinterpret_cast<Scratch*>(host_scratch());
#else
  __shared__ Scratch s;
#endif
  const Sizes sizes(entries, want, sizeof(T), THREADS);
  T* keys = reinterpret_cast<T*>(memory);
  T* list = reinterpret_cast<T*>(memory + sizes.keys);
  u32* groups = reinterpret_cast<u32*>(memory + sizes.keys + sizes.list);
  u32* kept = reinterpret_cast<u32*>(memory + sizes.keys + sizes.list + sizes.groups);
  u32* tied = kept + sizes.window / 4;
  const int tid = threadIdx.x, lane = tid % 32;
  const T* row = scores + blockIdx.x * stride;
  int64_t* target = out + static_cast<int64_t>(blockIdx.x) * want;
  const int64_t seen = visible[blockIdx.x];
  const int end = static_cast<int>(seen < 0 ? 0 : seen < entries ? seen : entries);
  const int num_groups = (end + kGroup - 1) / kGroup;

  if (tid == 0) s.least = kFull, s.most = 0, s.listed = 0;
  if (tid < 4) {  // the search reads whole words
    if (num_groups + tid < sizes.keys / static_cast<int>(sizeof(T))) keys[num_groups + tid] = 0;
  }
  __syncthreads();

  // 1. The largest key of every group.
  u32 least = kFull, most = 0;
  const int vectors = (end + kPer - 1) / kPer, whole = end / kPer;
  for (int base = 0; base < vectors; base += THREADS * LOADS) {
    uint4 data[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int v = base + i * THREADS + tid;
      data[i] = make_uint4(F::kFill, F::kFill, F::kFill, F::kFill);
      if (v < whole) data[i] = load_once(reinterpret_cast<const uint4*>(row) + v);
    }
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int v = base + i * THREADS + tid;
      u32 m = F::larger(F::larger(data[i].x, data[i].y), F::larger(data[i].z, data[i].w));
      if (sizeof(T) == 4) {  // fmaxf drops NaN: keys keep it
        m = max(max(F::key(data[i].x), F::key(data[i].y)),
                max(F::key(data[i].z), F::key(data[i].w)));
      }
      if (v == whole && v < vectors) {
        u32 best = 0;
        for (int j = whole * kPer; j < end; ++j) best = max(best, F::key(row[j]));
        m = best;
      } else if (sizeof(T) == 2) {
        m = F::top(m);
      }
#pragma unroll
      for (int d = 1; d < kLanes; d *= 2) m = max(m, __shfl_xor_sync(kFull, m, d));
      const int g = v / kLanes;
      if (v % kLanes == 0 && g < num_groups) {
        keys[g] = static_cast<T>(m);
        least = min(least, m);
        most = max(most, m);
      }
    }
  }
  least = __reduce_min_sync(kFull, least);
  most = __reduce_max_sync(kFull, most);
  if (lane == 0) {
    atomicMin(&s.least, least);
    atomicMax(&s.most, most);
  }
  __syncthreads();

  // 2. A bound that enough groups reach; kLeast bounds nothing.
  const u32 top = s.most;
  u32 bound = F::kLeast, above = 0;
  if (num_groups >= want && top > F::kLeast) {
    const u32 from = max(s.least, F::kLeast);
    bound = search<T, THREADS>(keys, num_groups, from, top, want, want / 8, s, above);
    bound = max(bound, F::kLeast);
  }

  // 3. The groups to look into, ascending.
  int parity = 0;
  u32 num_kept = 0, num_tied = 0;
  const int group_words = (num_groups + 31) / 32;
  // Bits of all groups fit the window: entries / 16 <= 131,072.
  for (int g = tid; g < group_words * 32; g += THREADS) {
    const u32 key = g < num_groups ? keys[g] : 0;
    const u32 more = __ballot_sync(kFull, key > bound);
    const u32 equal = __ballot_sync(kFull, key == bound && bound > F::kLeast);
    if (lane == 0) kept[g / 32] = more, tied[g / 32] = equal;
  }
  __syncthreads();
  const u32 tie_groups = above >= static_cast<u32>(want) ? 0 : want;
  emit<THREADS, 1>(kept, tied, group_words, tie_groups, num_kept, num_tied, s, parity,
                   [&](u32 place, int group) { groups[place] = group; });
  const int num_listed = static_cast<int>(num_kept + min(num_tied, tie_groups));
  __syncthreads();

  // 4. The entries above the bound, and the threshold among them.
  for (int base = 0; base < num_listed; base += THREADS) {
    u32 found[kGroup], mine = 0;
    if (base + tid < num_listed) {
      load_group(row, groups[base + tid], end, found);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) mine += found[i] > bound;
    }
    u32 upto = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const u32 other = __shfl_up_sync(kFull, upto, d);
      if (lane >= d) upto += other;
    }
    u32 start = 0;
    if (lane == 31) start = atomicAdd(&s.listed, upto);
    start = __shfl_sync(kFull, start, 31) + upto - mine;
    if (mine) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if (found[i] > bound) list[start++] = static_cast<T>(found[i]);
      }
    }
  }
  __syncthreads();
  const int listed = static_cast<int>(s.listed);
  u32 threshold = bound;
  above = listed;
  if (listed > want) {
    if (tid == 0) list[listed] = 0;
    threshold = search<T, THREADS>(list, listed, bound + 1, top, want, 0, s, above);
  }
  const u32 room = threshold > F::kLeast && above < static_cast<u32>(want) ? want - above : 0;

  // 5. Bits of what is kept, in windows of the row.
  num_kept = num_tied = 0;
  const int window = sizes.window * 8;
  for (int from = 0; from < end; from += window) {
    const int words = (min(end - from, window) + 31) / 32;
    __syncthreads();
    for (int w = tid; w < words; w += THREADS) kept[w] = 0, tied[w] = 0;
    __syncthreads();
    for (int i = tid; i < num_listed; i += THREADS) {
      const int first = static_cast<int>(groups[i]) * kGroup - from;
      if (first < 0 || first >= window) continue;
      u32 found[kGroup], more = 0, equal = 0;
      load_group(row, groups[i], end, found);
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        more |= static_cast<u32>(found[j] > threshold) << j;
        equal |= static_cast<u32>(found[j] == threshold) << j;
      }
      if (more) atomicOr(kept + first / 32, more << first % 32);
      if (equal && room) atomicOr(tied + first / 32, equal << first % 32);
    }
    __syncthreads();
    emit<THREADS, kWords>(kept, tied, words, room, num_kept, num_tied, s, parity,
                          [&](u32 place, int entry) { target[place] = from + entry; });
  }
  for (int i = num_kept + min(num_tied, room) + tid; i < want; i += THREADS) target[i] = -1;
}

// The same over blocks of entries: the largest visible score of each; the newest is always kept.
// All keys stay in shared memory.
template <typename T, int THREADS>
__global__ void __launch_bounds__(THREADS)
blocks_kernel(const T* scores, const int64_t* visible, int64_t* out, int entries, int64_t stride,
              int want, int size) {
  using F = Format<T>;
  constexpr int kPer = F::kPerVector, kWords = 4096 / THREADS;
  constexpr u32 kTop = sizeof(T) == 2 ? 0xFF80u : 0xFF800000u;  // key of inf
  SHARED(memory);
#ifdef HOST_TWIN
  Scratch& s = *reinterpret_cast<Scratch*>(host_scratch());
#else
  __shared__ Scratch s;
#endif
  const int blocks = (entries + size - 1) / size;
  T* keys = reinterpret_cast<T*>(memory);
  u32* kept = reinterpret_cast<u32*>(memory + round_up(blocks * sizeof(T) + 16, 16));
  u32* tied = kept + (blocks + 31) / 32;
  const int tid = threadIdx.x, lane = tid % 32;
  const T* row = scores + blockIdx.x * stride;
  int64_t* target = out + static_cast<int64_t>(blockIdx.x) * want;
  const int64_t seen = visible[blockIdx.x];
  const int end = static_cast<int>(seen < 0 ? 0 : seen < entries ? seen : entries);
  const int held = (end + size - 1) / size;
  const int64_t newest = seen > 0 ? (seen - 1) / size : -1;
  if (tid == 0) s.least = kFull, s.most = 0;
  if (tid < 4) keys[held + tid] = 0;
  __syncthreads();
  u32 least = kFull, most = 0;
#pragma unroll 4
  for (int b = tid; b < held; b += THREADS) {
    u32 m = 0;
    const int first = b * size;
    if (first + size <= end) {
      for (int i = 0; i < size; i += kPer) {
        const uint4 data = load_once(reinterpret_cast<const uint4*>(row + first + i));
#pragma unroll
        for (int j = 0; j < kPer; ++j) m = max(m, F::key(F::element(data, j)));
      }
    } else {
      for (int i = first; i < end; ++i) m = max(m, F::key(row[i]));
    }
    if (b == newest) m = max(m, kTop);
    keys[b] = static_cast<T>(m);
    least = min(least, m);
    most = max(most, m);
  }
  least = __reduce_min_sync(kFull, least);
  most = __reduce_max_sync(kFull, most);
  if (lane == 0) {
    atomicMin(&s.least, least);
    atomicMax(&s.most, most);
  }
  __syncthreads();
  u32 threshold = F::kLeast, above = 0;
  if (held > want && s.most > F::kLeast) {
    const u32 from = max(s.least, F::kLeast);
    threshold = search<T, THREADS>(keys, held, from, s.most, want, 0, s, above);
    threshold = max(threshold, F::kLeast);
  }
  const u32 room = threshold > F::kLeast && above < static_cast<u32>(want) ? want - above : 0;
  const int words = (held + 31) / 32;
  for (int b = tid; b < words * 32; b += THREADS) {
    const u32 key = b < held ? keys[b] : 0;
    const u32 more = __ballot_sync(kFull, key > threshold);
    const u32 equal = __ballot_sync(kFull, key == threshold && room);
    if (lane == 0) kept[b / 32] = more, tied[b / 32] = equal;
  }
  __syncthreads();
  int parity = 0;
  u32 num_kept = 0, num_tied = 0;
  emit<THREADS, kWords>(kept, tied, words, room, num_kept, num_tied, s, parity,
                        [&](u32 place, int block) { target[place] = block; });
  for (int i = num_kept + min(num_tied, room) + tid; i < want; i += THREADS) target[i] = -1;
}

#ifndef HOST_TWIN
template <typename K>
int prepare(K kernel, int bytes) {
  if (bytes <= 48 * 1024) return 0;
  return static_cast<int>(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}
#else
template <typename K>
int prepare(K, int) { return 0; }
inline int cudaGetLastError() { return 0; }
#endif

template <typename T, int THREADS, int LOADS, int BLOCKS>
int run_select(const void* scores, const void* visible, void* out, long long rows,
               long long entries, long long stride, long long want, cudaStream_t stream) {
  const Sizes sizes(static_cast<int>(entries), static_cast<int>(want), sizeof(T), THREADS);
  auto kernel = select_kernel<T, THREADS, LOADS, BLOCKS>;
  if (const int status = prepare(kernel, sizes.total())) return status;
  LAUNCH(kernel, dim3(static_cast<unsigned>(rows)), dim3(THREADS), sizes.total(), stream,
         static_cast<const T*>(scores), static_cast<const int64_t*>(visible),
         static_cast<int64_t*>(out), static_cast<int>(entries), static_cast<int64_t>(stride),
         static_cast<int>(want));
  return static_cast<int>(cudaGetLastError());
}

template <typename T>
int run_blocks(const void* scores, const void* visible, void* out, long long rows,
               long long entries, long long stride, long long want, long long size,
               cudaStream_t stream) {
  constexpr int kThreads = 512;
  const int blocks = static_cast<int>((entries + size - 1) / size);
  const int bytes = round_up(blocks * sizeof(T) + 16, 16) + (blocks + 31) / 32 * 8;
  auto kernel = blocks_kernel<T, kThreads>;
  if (const int status = prepare(kernel, bytes)) return status;
  LAUNCH(kernel, dim3(static_cast<unsigned>(rows)), dim3(kThreads), bytes, stream,
         static_cast<const T*>(scores), static_cast<const int64_t*>(visible),
         static_cast<int64_t*>(out), static_cast<int>(entries), static_cast<int64_t>(stride),
         static_cast<int>(want), static_cast<int>(size));
  return static_cast<int>(cudaGetLastError());
}

}  // namespace

// scores [rows, entries] bf16 or fp32 with 16-byte aligned rows, visible [rows] int64,
// out [rows, want] int64. `variant` picks threads and loads in flight.
extern "C" int select_topk(const void* scores, const void* visible, void* out, long long rows,
                           long long entries, long long stride, long long want, long long size,
                           long long variant, cudaStream_t stream) {
#define RUN(T, THREADS, LOADS, BLOCKS) \
  run_select<T, THREADS, LOADS, BLOCKS>(scores, visible, out, rows, entries, stride, want, stream)
  if (size == 2) {
    switch (variant) {
      case 1: return RUN(u16, 512, 8, 3);
      case 2: return RUN(u16, 1024, 4, 2);
      case 3: return RUN(u16, 256, 8, 3);
      default: return RUN(u16, 512, 4, 3);
    }
  }
  return RUN(u32, 512, 4, 2);
#undef RUN
}

extern "C" long long select_topk_bytes(long long entries, long long want, long long size) {
  return Sizes(static_cast<int>(entries), static_cast<int>(want), static_cast<int>(size), 512).total();
}

extern "C" int select_blocks(const void* scores, const void* visible, void* out, long long rows,
                             long long entries, long long stride, long long want,
                             long long block_size, long long size, cudaStream_t stream) {
  return size == 2 ? run_blocks<u16>(scores, visible, out, rows, entries, stride, want,
                                     block_size, stream)
                   : run_blocks<u32>(scores, visible, out, rows, entries, stride, want,
                                     block_size, stream);
}
