// Stable selection of the best entries of each row, one block of threads per row at a time.
//
// 1. Rows stream through a ring in shared memory, filled by bulk copies that run ahead, into the
//    next row too. Of every group of 16 entries the largest key stays in shared memory, of larger
//    groups ("supers", four a thread) in registers.
// 2. The count-th largest super bounds the count-th largest entry from below, since that many
//    supers hold at least one entry each that is not less. It is found by counting keys into bins
//    where they span few, else by interval search.
// 3. The groups above the bound are listed in order, a few more than `count`. Should ties or
//    neighbours make them many, the search is done again over all groups, which leaves fewer than
//    `count` above the bound, and of those equal to it the first `count`: ties behind are not kept.
// 4. The entries of these groups above the bound give the exact threshold in the same way.
// 5. Kept entries and ties, counted from the left, give the ascending output; ties are taken from
//    the left until the count is full.
//
// A row's steps 2 to 5 run once, so instructions that are few and near each other count: numbers are
// compared two at a time where no NaN and no sign is in the way, and hits are taken one by one.
//
// Keys are integers in the order of the values: -0 equals 0, NaN is above everything, and nothing
// at or below the key of -inf is ever taken. No step depends on the order of arrival.

#include "../bulk.cuh"
#include "../card.cuh"
#include "../chain.cuh"

namespace {

using u16 = uint16_t;
using u32 = uint32_t;
constexpr u32 kFull = 0xFFFFFFFFu;
constexpr int kGroup = 16, kPairs = 2;  // entries of a group, groups of a thread in a chunk

template <typename T>
struct Format;

template <>
struct Format<u16> {  // bfloat16
  static constexpr int kPerVector = 8;
  static constexpr u32 kLeast = 0x007Fu;  // keys of -inf, 0 and inf
  static constexpr u32 kZero = 0x8000u, kMost = 0xFF80u;
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
    return key(larger(m, m >> 16) & 0xFFFFu);
  }
  __device__ static u32 element(const uint4& v, int i) {
    const u32 w = i < 4 ? (i < 2 ? v.x : v.y) : (i < 6 ? v.z : v.w);
    return i & 1 ? w >> 16 : w & 0xFFFFu;
  }
  // A bit for each of eight numbers above `than`, as numbers; NaN is not.
  __device__ static u32 above(const uint4& v, u32 than) {
    const u32 both = than | than << 16;
    return eight(greater(v.x, both), greater(v.y, both), greater(v.z, both), greater(v.w, both));
  }
  __device__ static u32 same(const uint4& v, u32 as) {
    const u32 both = as | as << 16;
    return eight(equal(v.x, both), equal(v.y, both), equal(v.z, both), equal(v.w, both));
  }
  __device__ static u32 eight(u32 a, u32 b, u32 c, u32 d) {  // a bit of each half
    const u32 bits = (a & 0x00010001u) | (b & 0x00040004u) | (c & 0x00100010u) | (d & 0x00400040u);
    return (bits & 0x55u) | (bits >> 15 & 0xAAu);
  }
  // 0xFFFF for each half that is greater, or equal
  __device__ static u32 greater(u32 a, u32 b) {
#ifdef HOST_TWIN
    u32 r = 0;
    for (int s = 0; s < 32; s += 16) {
      const float x = __uint_as_float(a >> s << 16), y = __uint_as_float(b >> s << 16);
      r |= (x > y ? 0xFFFFu : 0u) << s;
    }
    return r;
#else
    u32 r;
    asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
#endif
  }
  __device__ static u32 equal(u32 a, u32 b) {
#ifdef HOST_TWIN
    u32 r = 0;
    for (int s = 0; s < 32; s += 16) {
      const float x = __uint_as_float(a >> s << 16), y = __uint_as_float(b >> s << 16);
      r |= (x == y ? 0xFFFFu : 0u) << s;
    }
    return r;
#else
    u32 r;
    asm("set.eq.u32.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
#endif
  }
};

template <>
struct Format<u32> {  // float
  static constexpr int kPerVector = 4;
  static constexpr u32 kLeast = 0x007FFFFFu;
  static constexpr u32 kZero = 0x80000000u, kMost = 0xFF800000u;
  __device__ static u32 key(u32 bits) {
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return kFull;
    if (bits == 0x80000000u) bits = 0;
    return bits & 0x80000000u ? kFull - bits : bits | 0x80000000u;
  }
  __device__ static u32 larger(u32 a, u32 b) {
#ifdef HOST_TWIN
    return key(a) >= key(b) ? a : b;
#else
    u32 r;
    asm("max.NaN.f32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
#endif
  }
  __device__ static u32 top(u32 m) { return key(m); }
  __device__ static u32 element(const uint4& v, int i) {
    return i < 2 ? (i < 1 ? v.x : v.y) : (i < 3 ? v.z : v.w);
  }
  __device__ static u32 above(const uint4& v, u32 than) {
    const float t = __uint_as_float(than);
    return static_cast<u32>(__uint_as_float(v.x) > t) | static_cast<u32>(__uint_as_float(v.y) > t) << 1 |
           static_cast<u32>(__uint_as_float(v.z) > t) << 2 |
           static_cast<u32>(__uint_as_float(v.w) > t) << 3;
  }
};

constexpr int kThreads = 512, kWarps = kThreads / 32;

// What a block keeps besides its large arrays.
struct Scratch {
  u32 counts[2][3][32];
  u32 totals[2][2][32];
  u32 bins[kThreads];  // listed entries by key, from the bound on
  u32 least, most, listed, threshold, above;
};

// Adds this thread's share of a shared array's keys that reach each of three guesses. The array ends
// in zeros up to a whole word.
template <typename T>
__device__ void count_keys(const T* keys, int n, u32 a, u32 b, u32 c, u32& na, u32& nb,
                           u32& nc) {
  if (sizeof(T) == 2) {
    const u32* words = reinterpret_cast<const u32*>(keys);
    const u32 ha = a << 16, hb = b << 16, hc = c << 16;
    for (int i = threadIdx.x; i < (n + 1) / 2; i += kThreads) {
      const u32 high = words[i], low = high << 16;
      na += (high >= ha) + (low >= ha);
      nb += (high >= hb) + (low >= hb);
      nc += (high >= hc) + (low >= hc);
    }
  } else {
    for (int i = threadIdx.x; i < n; i += kThreads) {
      const u32 key = keys[i];
      na += key >= a;
      nb += key >= b;
      nc += key >= c;
    }
  }
}

// The threshold t in lo..hi with `above` = count(> t) < want <= count(>= t), or any t with
// want <= above <= want + slack. Known: count(> hi) = 0, and count(>= lo) >= want unless lo is to be
// the answer where no other is; lo >= 1. `count` adds a thread's share to three sums.
template <typename Count>
__device__ u32 search(u32 lo, u32 hi, u32 want, u32 slack, Scratch& s, u32& above, Count count) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  above = 0;
  for (int turn = 0; lo < hi; turn ^= 1) {
    const u32 span = hi - lo, quarter = span / 4;
    const u32 a = lo + (quarter ? quarter : 1), b = lo + (span / 2 ? span / 2 : 1);
    const u32 c = hi - quarter;
    u32 na = 0, nb = 0, nc = 0;
    count(a, b, c, na, nb, nc);
    na = __reduce_add_sync(kFull, na);
    nb = __reduce_add_sync(kFull, nb);
    nc = __reduce_add_sync(kFull, nc);
    if (lane < 3) s.counts[turn][lane][warp] = lane ? (lane == 1 ? nb : nc) : na;
    __syncthreads();
    na = __reduce_add_sync(kFull, lane < kWarps ? s.counts[turn][0][lane] : 0);
    nb = __reduce_add_sync(kFull, lane < kWarps ? s.counts[turn][1][lane] : 0);
    nc = __reduce_add_sync(kFull, lane < kWarps ? s.counts[turn][2][lane] : 0);
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

template <typename T>
__device__ u32 search_keys(const T* keys, int n, u32 lo, u32 hi, u32 want, u32 slack, Scratch& s,
                           u32& above) {
  return search(lo, hi, want, slack, s, above,
                [&](u32 a, u32 b, u32 c, u32& na, u32& nb, u32& nc) {
                  count_keys(keys, n, a, b, c, na, nb, nc);
                });
}

// Sums of two values over the threads in front of this one, and over all threads.
__device__ inline void sums_before(u32 x, u32 y, u32& before_x, u32& before_y, u32& all_x,
                                   u32& all_y, Scratch& s, int& parity) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 upto_x = x, upto_y = y;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const u32 other_x = __shfl_up_sync(kFull, upto_x, d), other_y = __shfl_up_sync(kFull, upto_y, d);
    if (lane >= d) upto_x += other_x, upto_y += other_y;
  }
  if (lane == 31) s.totals[parity][0][warp] = upto_x, s.totals[parity][1][warp] = upto_y;
  __syncthreads();
  const u32 part_x = lane < kWarps ? s.totals[parity][0][lane] : 0;
  const u32 part_y = lane < kWarps ? s.totals[parity][1][lane] : 0;
  parity ^= 1;
  all_x = __reduce_add_sync(kFull, part_x), all_y = __reduce_add_sync(kFull, part_y);
  before_x = __reduce_add_sync(kFull, lane < warp ? part_x : 0) + upto_x - x;
  before_y = __reduce_add_sync(kFull, lane < warp ? part_y : 0) + upto_y - y;
}

// Writes the places of keys of a shared array in order: all above the threshold, and the first
// `room` of those equal to it. Every thread takes neighbouring keys. Returns how many are written,
// or the number of those above where that exceeds `most`: then nothing is written.
template <typename T, typename Write>
__device__ u32 emit_keys(const T* keys, int n, u32 threshold, u32 room, u32 most, bool plain, Scratch& s, int& parity,
                         Write write) {
  constexpr int kPer = Format<T>::kPerVector;
  const int each = ((n + kThreads - 1) / kThreads + kPer - 1) / kPer * kPer;
  const int first = min(static_cast<int>(threadIdx.x) * each, n), last = min(first + each, n);
  if (sizeof(T) == 2 && plain && each <= 32) {  // keys of positive numbers are their bits and a sign
    u32 more = 0, equal = 0;
#pragma unroll 1
    for (int i = first; i < last; i += kPer) {
      uint4 data = *reinterpret_cast<const uint4*>(keys + i);  // room for it is behind them
      data.x ^= 0x80008000u, data.y ^= 0x80008000u, data.z ^= 0x80008000u, data.w ^= 0x80008000u;
      more |= Format<u16>::above(data, threshold ^ 0x8000u) << (i - first);
      if (room) equal |= Format<u16>::same(data, threshold ^ 0x8000u) << (i - first);
    }
    const u32 held = last - first < 32 ? (1u << max(last - first, 0)) - 1 : kFull;
    more &= held, equal &= held;
    u32 above, ties, all_above, all_equal;
    sums_before(__popc(more), __popc(equal), above, ties, all_above, all_equal, s, parity);
    if (all_above > most) return all_above;
#pragma unroll 1
    for (u32 bits = more | equal; bits; bits &= bits - 1) {
      const int bit = __ffs(bits) - 1;
      if (more >> bit & 1) {
        write(above++ + min(ties, room), first + bit);
      } else {
        if (ties < room) write(above + ties, first + bit);
        ++ties;
      }
    }
    return all_above + min(all_equal, room);
  }
  auto visit = [&](auto use) {  // this thread's keys, a vector at a time
    for (int i = first; i < last; i += kPer) {
      const uint4 data = *reinterpret_cast<const uint4*>(keys + i);  // room for it is behind them
      if (i + kPer <= last) {
#pragma unroll
        for (int j = 0; j < kPer; ++j) use(Format<T>::element(data, j), i + j);
      } else {
#pragma unroll
        for (int j = 0; j < kPer; ++j) {
          if (i + j < last) use(Format<T>::element(data, j), i + j);
        }
      }
    }
  };
  u32 num_above = 0, num_equal = 0;
  visit([&](u32 key, int) {
    num_above += key > threshold;
    num_equal += key == threshold;
  });
  if (!room) num_equal = 0;
  u32 above, equal, all_above, all_equal;
  sums_before(num_above, num_equal, above, equal, all_above, all_equal, s, parity);
  if (all_above > most) return all_above;
  if (num_above || (num_equal && equal < room)) {
    visit([&](u32 key, int i) {
      if (key > threshold) {
        write(above++ + min(equal, room), i);
      } else if (key == threshold) {
        if (equal < room) write(above + equal, i);
        ++equal;
      }
    });
  }
  return all_above + min(all_equal, room);
}

// The 16 entries of a group as they lie in memory. Those at or beyond `end` count as none.
template <typename T>
struct Group {
  using F = Format<T>;
  static constexpr int kPer = F::kPerVector;
  uint4 data[kGroup / kPer];
  u32 held;  // a bit for each entry that is there

  __device__ void load(const T* row, int first, int end) {
    held = first + kGroup <= end ? 0xFFFFu : (1u << (end - first)) - 1;
#pragma unroll
    for (int v = 0; v < kGroup / kPer; ++v) {
      const bool any = first + v * kPer < end;  // rows are readable up to whole vectors
      data[v] = any ? *reinterpret_cast<const uint4*>(row + first + v * kPer)
                    : make_uint4(0, 0, 0, 0);
    }
  }
  __device__ void clear() {
    held = 0;
#pragma unroll
    for (int v = 0; v < kGroup / kPer; ++v) data[v] = make_uint4(0, 0, 0, 0);
  }
  // `plain`: only keys above that of 0 matter and there is no NaN, so a positive number's bits are
  // its key but for one.
  __device__ u32 key(int i, bool plain) const {
    constexpr int kWords = kGroup / kPer * 4, kEach = kPer / 4;
    u32 words[kWords];
#pragma unroll
    for (int n = 0; n < kWords / 4; ++n) {
      words[4 * n] = data[n].x, words[4 * n + 1] = data[n].y;
      words[4 * n + 2] = data[n].z, words[4 * n + 3] = data[n].w;
    }
    // By arithmetic: the compiler makes a look-up in memory of a choice.
#pragma unroll
    for (int span = kWords / 2; span; span /= 2) {
      const u32 upper = 0 - static_cast<u32>(i / (span * kEach) & 1);
#pragma unroll
      for (int n = 0; n < span; ++n) words[n] ^= (words[n] ^ words[n + span]) & upper;
    }
    const u32 bits = kEach == 1 ? words[0] : words[0] >> i % 2 * 16 & 0xFFFFu;
    return plain ? bits ^ F::kZero : F::key(bits);
  }
  __device__ u32 above(u32 bound, bool plain) const {  // a bit for each entry that is
    u32 bits = 0;
    if (plain) {
#pragma unroll
      for (int v = 0; v < kGroup / kPer; ++v) bits |= F::above(data[v], bound ^ F::kZero) << v * kPer;
    } else {
#pragma unroll 1
      for (int i = 0; i < kGroup; ++i) bits |= static_cast<u32>(key(i, false) > bound) << i;
    }
    return bits & held;
  }
};

// Rows of a block one after the other, cut into chunks of two groups a thread. The first thread
// asks for chunks ahead of their use; a row's last chunk may be short.
template <typename T, int STAGES>
struct Stream {
  static constexpr int kEntries = kThreads * kGroup * kPairs, kBytes = kEntries * sizeof(T);
  const T* scores;
  const int64_t* visible;
  int64_t stride;
  unsigned char* ring;
  uint64_t* barriers;
  int rows, entries;
  int row, chunk, asked, used;  // next to ask for; chunks so far
  int limit;                    // entries of the row to ask for

  __device__ int seen(int of) const {
    const int64_t v = visible[of];
    return static_cast<int>(v < 0 ? 0 : v < entries ? v : entries);
  }
  __device__ void ask() {  // one thread
    while (row < rows && chunk * kEntries >= limit) {
      row += gridDim.x, chunk = 0;
      limit = row < rows ? seen(row) : 0;
    }
    if (row >= rows) return;
    const int64_t first = static_cast<int64_t>(chunk) * kEntries;
    const u32 bytes = min(kEntries, limit - static_cast<int>(first)) * sizeof(T);
    const int stage = asked++ % STAGES;
    bulk_copy(ring + stage * kBytes, scores + row * stride + first, (bytes + 15) / 16 * 16,
              barriers + stage);
    ++chunk;
  }
  __device__ void begin() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < STAGES; ++i) barrier_begin(barriers + i);
      barriers_seen();
    }
    previous_kernel_wait();
    next_kernel_may_start();
    row = blockIdx.x, chunk = 0, asked = 0, used = 0, limit = seen(row);
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int i = 0; i < STAGES; ++i) ask();
    }
    __syncthreads();
  }
  // Which of a thread's vectors comes in which place: place i holds vector i ^ turn(), so that the
  // eight threads of a load meet all banks.
  static constexpr int kVectors = kPairs * kGroup * sizeof(T) / 16;
  __device__ static int turn() { return threadIdx.x / (8 / kVectors) % kVectors; }
  // The thread's 32 entries of the next chunk.
  __device__ void next(uint4 (&data)[kVectors]) {
    const int stage = used % STAGES;
    barrier_wait(barriers + stage, used / STAGES & 1);
    const uint4* own = reinterpret_cast<const uint4*>(ring + stage * kBytes) + threadIdx.x * kVectors;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) data[i] = own[i ^ turn()];
    ++used;
    __syncthreads();
    if (threadIdx.x == 0) {
      reads_before_copies();  // without it a copy writes over what is still being read
      ask();
    }
  }
};

__host__ __device__ inline int up16(int n) { return (n + 15) / 16 * 16; }
constexpr int kPlaces = 2048;  // listed entries whose places are kept
__host__ __device__ inline int most_groups(int want) { return want > 512 ? 2 * want : 1024; }
__host__ __device__ inline int groups_of(int entries) { return (entries + kGroup - 1) / kGroup; }

// Shared memory of the selection: ring, then keys of groups or of listed entries, then groups.
template <typename T, int STAGES>
__host__ __device__ inline int keys_bytes(int entries, int want) {
  const int keys = up16(groups_of(entries) * sizeof(T) + 16);
  const int list = up16(most_groups(want) * kGroup * sizeof(T) + 16);
  return keys > list ? keys : list;
}
template <typename T, int STAGES>
__host__ __device__ inline int select_bytes(int entries, int want) {
  return STAGES * Stream<T, STAGES>::kBytes + keys_bytes<T, STAGES>(entries, want) +
         most_groups(want) * 4 + kPlaces * 4 + 8 * STAGES;
}

template <typename T>
__device__ u32 largest_of(const uint4& v) {  // as `larger` leaves it
  return Format<T>::larger(Format<T>::larger(v.x, v.y), Format<T>::larger(v.z, v.w));
}

// The largest key among neighbouring vectors.
template <typename T, int VECTORS>
__device__ u32 largest(const uint4* data) {
  u32 m = largest_of<T>(data[0]);
#pragma unroll
  for (int i = 1; i < VECTORS; ++i) m = Format<T>::larger(m, largest_of<T>(data[i]));
  return Format<T>::top(m);
}

template <typename T, int STAGES, int BLOCKS>
__global__ void __launch_bounds__(kThreads, BLOCKS)
select_kernel(const T* scores, const int64_t* visible, int64_t* out, int rows, int entries,
              int64_t stride, int want) {
  using F = Format<T>;
  SHARED(memory, 16);
#ifdef HOST_TWIN
  Scratch& s = *reinterpret_cast<Scratch*>(host_scratch());
#else
  __shared__ Scratch s;
#endif
  unsigned char* after = memory + STAGES * Stream<T, STAGES>::kBytes;
  T* keys = reinterpret_cast<T*>(after);
  T* list = keys;  // once the groups are listed
  u32* groups = reinterpret_cast<u32*>(after + keys_bytes<T, STAGES>(entries, want));
  const int most_listed = most_groups(want);
  const int tid = threadIdx.x, lane = tid % 32;
  Stream<T, STAGES> stream{scores, visible, stride, memory,
                           reinterpret_cast<uint64_t*>(groups + most_listed + kPlaces), rows, entries};
  int* places = reinterpret_cast<int*>(groups + most_listed);
  stream.begin();
  int parity = 0;
  for (int at = blockIdx.x; at < rows; at += gridDim.x) {
    const T* row = scores + at * stride;
    int64_t* target = out + static_cast<int64_t>(at) * want;
    const int end = stream.seen(at), num_groups = groups_of(end);
    constexpr int kVectors = Stream<T, STAGES>::kVectors, kEach = kVectors / kPairs;
    const int chunks = (num_groups + kPairs * kThreads - 1) / (kPairs * kThreads);
    const int per_super = (chunks + 3) / 4;
    const int flip = stream.turn() / kEach;  // the thread's groups change places
    if (tid == 0) s.least = kFull, s.most = 0, s.listed = 0;
    s.bins[tid] = 0;

    // 1. The largest keys of groups and supers. A super of a thread that has no entry there is 0.
    u32 supers[4] = {0, 0, 0, 0}, least = kFull, most = 0;
    for (int chunk = 0, super = 0, left = per_super; chunk < chunks; ++chunk) {
      uint4 data[kVectors];
      stream.next(data);
      const int own = (chunk * kThreads + tid) * kPairs;
      u32 both[kPairs] = {0, 0};
      if ((own + kPairs) * kGroup <= end) {
#pragma unroll
        for (int g = 0; g < kPairs; ++g) both[g] = largest<T, kEach>(data + g * kEach);
      } else if (own * kGroup < end) {
#pragma unroll
        for (int i = 0; i < kPairs * kGroup; ++i) {
          const u32 key = F::key(F::element(data[i / F::kPerVector], i % F::kPerVector));
          const int entry = own * kGroup + (i ^ stream.turn() * F::kPerVector);
          both[i / kGroup] = max(both[i / kGroup], entry < end ? key : 0u);
        }
      }
#pragma unroll
      for (int g = 0; g < kPairs; ++g) {
        if (own + (g ^ flip) <= num_groups + 3) keys[own + (g ^ flip)] = static_cast<T>(both[g]);
      }
#pragma unroll
      for (int g = 0; g < kPairs; ++g) {
        const int mine = chunks * kPairs <= 4 ? chunk * kPairs + g : super;  // few: each its own
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (mine == i) supers[i] = max(supers[i], both[g]);
        }
      }
      if (--left == 0) ++super, left = per_super;
    }
    int held = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      most = max(most, supers[i]);
      if (supers[i]) least = min(least, supers[i]), ++held;
    }
    if (tid < 4) keys[num_groups + tid] = 0;  // whole words; rewritten, where another thread did
    least = __reduce_min_sync(kFull, least);
    most = __reduce_max_sync(kFull, most);
    const u32 holders = __reduce_add_sync(kFull, static_cast<u32>(held));
    if (lane == 0 && chunks) {
      atomicMin(&s.least, least);
      atomicMax(&s.most, most);
      atomicAdd(&s.listed, holders);
    }
    __syncthreads();
    const u32 top = s.most, num_supers = s.listed, from = max(s.least, F::kLeast);

    // 2. A bound that enough supers exceed; kLeast bounds nothing.
    u32 bound = F::kLeast, above = 0;
    if (num_supers >= static_cast<u32>(want) && top > F::kLeast) {
      if (top - from < kThreads) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (supers[i] >= from) atomicAdd(s.bins + (supers[i] - from), 1u);
        }
        __syncthreads();
        if (tid == 0) s.threshold = from, s.above = 0;
        const u32 own = s.bins[kThreads - 1 - tid];
        u32 larger, none, all, nothing;
        sums_before(own, 0, larger, none, all, nothing, s, parity);
        s.bins[kThreads - 1 - tid] = 0;
        if (larger < static_cast<u32>(want) && larger + own >= static_cast<u32>(want)) {
          s.threshold = from + kThreads - 1 - tid, s.above = larger;
        }
        __syncthreads();
        bound = s.threshold, above = s.above;
      } else {
        bound = search(from, top, want, want / 8, s, above,
                       [&](u32 a, u32 b, u32 c, u32& na, u32& nb, u32& nc) {
#pragma unroll
                         for (int i = 0; i < 4; ++i) {
                           na += supers[i] >= a, nb += supers[i] >= b, nc += supers[i] >= c;
                         }
                       });
      }
      if (above < static_cast<u32>(want)) --bound;  // those equal to it are needed
      bound = max(bound, F::kLeast);
    }

    // 3. The groups to look into, ascending.
    const bool plain_groups = bound > F::kZero && top <= F::kMost;
    auto list_group = [&](u32 place, int group) { groups[place] = group; };
    u32 num_listed = emit_keys(keys, num_groups, bound, 0, most_listed, plain_groups, s, parity, list_group);
    if (num_listed > static_cast<u32>(most_listed)) {
      bound = search_keys(keys, num_groups, max(bound, F::kLeast), top, want, want / 8, s, above);
      const u32 ties = above < static_cast<u32>(want) && bound > F::kLeast ? want : 0;
      num_listed = emit_keys(keys, num_groups, bound, ties, most_listed, false, s, parity, list_group);
    }
    __syncthreads();

    // 4. The entries above the bound, in order, and the threshold among them.
    const bool plain = bound > F::kZero && top <= F::kMost;
    const bool binned = top - bound <= kThreads;  // a bin for each key above the bound
    u32 listed = 0;
    for (u32 base = 0; base < num_listed; base += 2 * kThreads) {
      Group<T> group[2];
      int first[2] = {0, 0};
      u32 mine[2] = {0, 0};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u32 number = base + h * kThreads + tid;
        if (number < num_listed) {
          first[h] = static_cast<int>(groups[number]) * kGroup;
          group[h].load(row, first[h], end);
        } else {
          group[h].clear();
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) mine[h] = group[h].above(bound, plain);
      u32 start[2], all, more;
      sums_before(__popc(mine[0]), __popc(mine[1]), start[0], start[1], all, more, s, parity);
      start[0] += listed, start[1] += listed + all;
      listed += all + more;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll 1
        for (u32 bits = mine[h]; bits; bits &= bits - 1) {
          const int i = __ffs(bits) - 1;
          const u32 key = group[h].key(i, plain);
          list[start[h]] = static_cast<T>(key);
          if (start[h] < kPlaces) places[start[h]] = first[h] + i;
          if (binned) atomicAdd(s.bins + (key - bound - 1), 1u);
          ++start[h];
        }
      }
    }
    __syncthreads();
    u32 threshold = bound;
    above = listed;
    if (listed > static_cast<u32>(want)) {
      if (binned) {
        const u32 own = s.bins[kThreads - 1 - tid];
        u32 larger, none, all, nothing;
        sums_before(own, 0, larger, none, all, nothing, s, parity);
        if (larger < static_cast<u32>(want) && larger + own >= static_cast<u32>(want)) {
          s.threshold = bound + kThreads - tid, s.above = larger;
        }
        __syncthreads();
        threshold = s.threshold, above = s.above;
      } else {
        if (tid == 0) list[listed] = 0;
        __syncthreads();
        threshold = search_keys(list, listed, bound + 1, top, want, 0, s, above);
      }
    }
    const u32 room = threshold > F::kLeast && above < static_cast<u32>(want) ? want - above : 0;

    // 5. What is kept, in order.
    u32 num_kept = 0, num_tied = 0;
    // The places of all entries that may be kept are there, unless ties at the bound are, or many.
    if ((threshold > bound || !room) && listed <= kPlaces) {
      const int each = static_cast<int>(listed + kThreads - 1) / kThreads, begin = tid * each;
      u32 more = 0, equal = 0;
      for (int i = 0; i < each; ++i) {
        const u32 key = begin + i < static_cast<int>(listed) ? list[begin + i] : 0;
        more |= static_cast<u32>(key > threshold) << i;
        equal |= static_cast<u32>(key == threshold && room) << i;
      }
      u32 place, tie;
      sums_before(__popc(more), __popc(equal), place, tie, num_kept, num_tied, s, parity);
      for (int i = 0; i < each; ++i) {
        if (more >> i & 1) target[place++ + min(tie, room)] = places[begin + i];
        if (equal >> i & 1) {
          if (tie < room) target[place + tie] = places[begin + i];
          ++tie;
        }
      }
      for (int i = num_kept + min(num_tied, room) + tid; i < want; i += kThreads) target[i] = -1;
      continue;
    }
    for (u32 base = 0; base < num_listed; base += kThreads) {
      u32 more = 0, equal = 0;
      int first = 0;
      if (base + tid < num_listed) {
        Group<T> group;
        first = static_cast<int>(groups[base + tid]) * kGroup;
        group.load(row, first, end);
#pragma unroll 1
        for (int j = 0; j < kGroup; ++j) {
          more |= static_cast<u32>(group.key(j, plain) > threshold) << j;
          equal |= static_cast<u32>(group.key(j, plain) == threshold) << j;
        }
        more &= group.held;
        equal = room ? equal & group.held : 0;
      }
      u32 place, tie, all_kept, all_tied;
      sums_before(__popc(more), __popc(equal), place, tie, all_kept, all_tied, s, parity);
      place += num_kept, tie += num_tied;
      for (u32 bits = more | equal; bits; bits &= bits - 1) {
        const int bit = __ffs(bits) - 1;
        const bool is_tie = equal >> bit & 1;
        if (!is_tie || tie < room) target[place + min(tie, room)] = first + bit;
        tie += is_tie, place += !is_tie;
      }
      num_kept += all_kept, num_tied += all_tied;
    }
    for (int i = num_kept + min(num_tied, room) + tid; i < want; i += kThreads) target[i] = -1;
  }
}

// The same over blocks of SIZE entries: the largest visible score of each; the newest is always
// kept. All keys stay in shared memory.
template <typename T, int STAGES, int SIZE>
__global__ void __launch_bounds__(kThreads, 1)
blocks_kernel(const T* scores, const int64_t* visible, int64_t* out, int rows, int entries,
              int64_t stride, int want) {
  using F = Format<T>;
  constexpr int kEach = kPairs * kGroup / SIZE;
  SHARED(memory, 16);
#ifdef HOST_TWIN
  Scratch& s = *reinterpret_cast<Scratch*>(host_scratch());
#else
  __shared__ Scratch s;
#endif
  T* keys = reinterpret_cast<T*>(memory + STAGES * Stream<T, STAGES>::kBytes);
  const int blocks = (entries + SIZE - 1) / SIZE;
  const int tid = threadIdx.x, lane = tid % 32;
  Stream<T, STAGES> stream{
      scores, visible, stride, memory,
      reinterpret_cast<uint64_t*>(reinterpret_cast<unsigned char*>(keys) + up16(blocks * sizeof(T) + 16)),
      rows, entries};
  stream.begin();
  int parity = 0;
  for (int at = blockIdx.x; at < rows; at += gridDim.x) {
    int64_t* target = out + static_cast<int64_t>(at) * want;
    const int end = stream.seen(at), held = (end + SIZE - 1) / SIZE;
    const int chunks = (groups_of(end) + kPairs * kThreads - 1) / (kPairs * kThreads);
    const int64_t seen = visible[at], newest = seen > 0 ? (seen - 1) / SIZE : -1;
    if (tid == 0) s.least = kFull, s.most = 0;
    u32 least = kFull, most = 0;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      uint4 data[Stream<T, STAGES>::kVectors];
      stream.next(data);
      const int first = (chunk * kThreads + tid) * kPairs * kGroup;
#pragma unroll
      for (int b = 0; b < kEach; ++b) {
        u32 key = 0;
        if (first + kPairs * kGroup <= end) {
          key = largest<T, SIZE / F::kPerVector>(data + b * (SIZE / F::kPerVector));
        } else {
#pragma unroll
          for (int i = b * SIZE; i < (b + 1) * SIZE; ++i) {
            const u32 own = F::key(F::element(data[i / F::kPerVector], i % F::kPerVector));
            const int entry = first + (i ^ stream.turn() * F::kPerVector);
            key = max(key, entry < end ? own : 0u);
          }
        }
        const int block = first / SIZE + (b ^ stream.turn() * F::kPerVector / SIZE);
        if (block == newest) key = max(key, F::kMost);
        if (block < held) {
          keys[block] = static_cast<T>(key);
          least = min(least, key);
          most = max(most, key);
        }
      }
    }
    if (tid < 4) keys[held + tid] = 0;
    least = __reduce_min_sync(kFull, least);
    most = __reduce_max_sync(kFull, most);
    if (lane == 0 && chunks) {
      atomicMin(&s.least, least);
      atomicMax(&s.most, most);
    }
    __syncthreads();
    u32 threshold = F::kLeast, above = 0;
    if (held > want && s.most > F::kLeast) {
      const u32 from = max(s.least, F::kLeast);
      threshold = max(search_keys(keys, held, from, s.most, want, 0, s, above), F::kLeast);
    }
    const u32 room = threshold > F::kLeast && above < static_cast<u32>(want) ? want - above : 0;
    const bool plain = threshold > F::kZero && s.most <= F::kMost;
    const u32 written = emit_keys(keys, held, threshold, room, kFull, plain, s, parity,
                                  [&](u32 place, int block) { target[place] = block; });
    for (int i = written + tid; i < want; i += kThreads) target[i] = -1;
  }
}

template <typename T, typename K>
int run(K kernel, int bytes, const void* scores, const void* visible, void* out, long long rows,
        long long entries, long long stride, long long want, long long blocks,
        cudaStream_t stream) {
  if (const int status = make_room(kernel, bytes)) return status;
  LAUNCH_NEXT(kernel, dim3(static_cast<unsigned>(min(rows, blocks))), dim3(kThreads), bytes, stream,
         static_cast<const T*>(scores), static_cast<const int64_t*>(visible),
         static_cast<int64_t*>(out), static_cast<int>(rows), static_cast<int>(entries),
         static_cast<int64_t>(stride), static_cast<int>(want));
  return static_cast<int>(cudaGetLastError());
}

constexpr int kShared = 227 * 1024;  // of a multiprocessor, for blocks
constexpr int kStatic = sizeof(Scratch) + 1024;

template <typename T, int STAGES, int BLOCKS>
int run_select(const void* scores, const void* visible, void* out, long long rows,
               long long entries, long long stride, long long want, long long processors,
               cudaStream_t stream) {
  const int bytes = select_bytes<T, STAGES>(static_cast<int>(entries), static_cast<int>(want));
  const int fit = max(1, min(BLOCKS, kShared / (bytes + kStatic)));
  return run<T>(select_kernel<T, STAGES, BLOCKS>, bytes, scores, visible, out, rows, entries,
                stride, want, processors * fit, stream);
}

template <typename T, int STAGES, int SIZE>
int run_blocks(const void* scores, const void* visible, void* out, long long rows,
               long long entries, long long stride, long long want, long long processors,
               cudaStream_t stream) {
  const int blocks = static_cast<int>((entries + SIZE - 1) / SIZE);
  const int bytes =
      STAGES * Stream<T, STAGES>::kBytes + up16(blocks * sizeof(T) + 16) + 8 * STAGES;
  const int fit = max(1, kShared / (bytes + kStatic));
  return run<T>(blocks_kernel<T, STAGES, SIZE>, bytes, scores, visible, out, rows, entries, stride,
                want, processors * fit, stream);
}

}  // namespace

// scores [rows, entries] bf16 (size 2) or fp32 with 16-byte aligned rows, readable up to the next
// 16 bytes; visible [rows] int64; out [rows, want] int64.
extern "C" int select_topk(const void* scores, const void* visible, void* out, long long rows,
                           long long entries, long long stride, long long want, long long size,
                           long long processors, cudaStream_t stream) {
#define RUN(...) \
  run_select<__VA_ARGS__>(scores, visible, out, rows, entries, stride, want, processors, stream)
  return size == 2 ? RUN(u16, 2, 2) : RUN(u32, 2, 1);
#undef RUN
}

// As above over blocks of 8 or 16 entries.
extern "C" int select_blocks(const void* scores, const void* visible, void* out, long long rows,
                             long long entries, long long stride, long long want,
                             long long block_size, long long size, long long processors,
                             cudaStream_t stream) {
#define RUN(...) \
  run_blocks<__VA_ARGS__>(scores, visible, out, rows, entries, stride, want, processors, stream)
  if (block_size == 8) return size == 2 ? RUN(u16, 2, 8) : RUN(u32, 2, 8);
  if (block_size == 16) return size == 2 ? RUN(u16, 2, 16) : RUN(u32, 2, 16);
#undef RUN
  return -1;
}
