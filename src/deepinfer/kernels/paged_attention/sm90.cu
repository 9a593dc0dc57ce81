// Sparse attention over packed cache entries, SM90a.
//
// One CTA takes a row of 64 heads x 512 dims (or a share of its slots: a cluster then takes the row)
// and walks its slots in tiles of 64. Four producer warps bring packed entries into a ring by bulk
// copies, decode them to bf16 and put them into one of two key buffers. Two consumer groups own the
// tiles in turns: the owner multiplies queries by keys, takes the softmax and hands the weights over;
// both then add the weighted entries to their half of the dims.
//
// Decoded entries carry a common factor 2^-8, which the scale of the scores and the last division
// take back; with it, a 4-bit entry times its scale is one product of bf16 values, and exact.

#ifdef __CUDACC__
#include "sm90.cuh"
#else
#include "paged_host.h"
#endif

namespace {

#ifndef PRODUCERS
#define PRODUCERS 8
#endif
constexpr int HEADS = 64, DIM = 512, TILE = 64, THREADS = 256 + 32 * PRODUCERS;
constexpr int MAIN_BYTES = 288, WINDOW_BYTES = 528;
constexpr int STEPS = TILE / 2 / PRODUCERS;  // of a producer warp in a tile, 2 keys a step
constexpr int UNIT = 2 * MAIN_BYTES, UNITS = 40 / PRODUCERS;  // raw ring of a producer warp

constexpr uint32_t Q_AT = 0, K_AT = 65536, KEYS = 65536, P_AT = K_AT + 2 * KEYS;
constexpr uint32_t RAW_AT = P_AT + 8192, MISC_AT = RAW_AT + PRODUCERS * UNITS * UNIT;
constexpr uint32_t Q_FULL = MISC_AT, P_FULL = MISC_AT + 8, K_FULL = MISC_AT + 16;
constexpr uint32_t K_EMPTY = MISC_AT + 32;  // by buffer and half of its keys
constexpr uint32_t RAW_FULL = MISC_AT + 64, VALID = MISC_AT + 384;
constexpr uint32_t PEAK = MISC_AT + 512, TOTAL = MISC_AT + 1024, SMEM = MISC_AT + 2048;
static_assert(SMEM <= 232448, "shared memory");

struct Params {
    const uint8_t* window;
    const uint8_t* main;
    const long long* window_idx;
    const long long* main_idx;
    const float* sink;
    uint16_t* out;
    long long window_block, main_block;  // bytes from block to block
    int window_entries, main_entries;    // entries of a block
    int rows, window_slots, main_slots;
    float scale;  // of the scores, in base 2, with the 2^8
};

__device__ alignas(16) uint8_t nothing[544];  // what an absent entry reads

// ---- number formats --------------------------------------------------------------------------

constexpr uint32_t TWO_127 = 0x7F007F00, TWO_111 = 0x77007700, TWO_120 = 0x7B807B80;
constexpr uint32_t TWO_M8 = 0x3B803B80;

// e4m3 byte without sign -> its value times 2^118, twice.
DEVICE uint32_t main_scale(uint32_t byte) {
    return product(product(byte * 0x00100010u, TWO_127), TWO_111);  // the bits are value * 2^-120
}

// ue8m0 byte -> its value times 2^-8, twice.
DEVICE uint32_t window_scale(uint32_t byte) { return product(byte * 0x00800080u, TWO_M8); }

// Eight e2m1 codes, the first lowest -> values * scale * 2^-8; scale comes from main_scale.
DEVICE void decode_main(uint32_t codes, uint32_t scale, uint32_t (&out)[4]) {
    uint32_t x = codes, t = ((x >> 4) ^ x) & 0x00F000F0u;
    x = x ^ t ^ (t << 4);
    x = __byte_perm(x, 0, 0x3120);  // now codes 0 2 4 6 1 3 5 7
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t code = (x >> (4 * j)) & 0x000F000Fu;
        out[j] = product((code * 0x1040u) & 0x81C081C0u, scale);  // the bits are value * 2^-126
    }
}

// Eight e4m3 codes -> values * scale * 2^-8; scale comes from window_scale.
DEVICE void decode_window(uint2 codes, uint32_t scale, uint32_t (&out)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t x = __byte_perm(j < 2 ? codes.x : codes.y, 0, j % 2 ? 0x3424 : 0x1404);
        x = (x & 0x80008000u) | ((x >> 4) & 0x07F007F0u);  // the bits are value * 2^-120
        out[j] = product(product(x, TWO_120), scale);
    }
}

// ---- matrix products -------------------------------------------------------------------------

constexpr uint64_t SWIZZLED = uint64_t(1) << 62;

// 128-byte rows in groups of 8; `lead` and `stride` are the descriptor's two offsets in bytes.
DEVICE uint64_t describe(uint32_t at, uint32_t lead, uint32_t stride) {
    return SWIZZLED | (uint64_t(stride >> 4) << 32) | (uint64_t(lead >> 4) << 16) |
           ((at & 0x3FFFF) >> 4);
}

DEVICE void load_queries(const CUtensorMap* map, int row, uint32_t smem) {
    uint32_t bar = smem + Q_FULL;
    arrive_expect(bar, HEADS * DIM * 2);
#pragma unroll
    for (int c = 0; c < DIM / 64; c++)
        copy_box(smem + Q_AT + c * 8192, map, c * 64, row * HEADS, bar);
}

// ---- the walk over a row's tiles -------------------------------------------------------------

struct Walk {  // which tiles of which rows this CTA takes
    int row, row_step, rows, rank, shares, window_tiles, tiles, count;
};

template <int SHARES>
DEVICE Walk walk_of(const Params& p) {
    Walk w;
    w.rank = SHARES == 1 ? 0 : blockIdx.x % SHARES;
    w.row = SHARES == 1 ? blockIdx.x : blockIdx.x / SHARES;
    w.row_step = SHARES == 1 ? gridDim.x : p.rows;
    w.rows = p.rows;
    w.shares = SHARES;
    w.window_tiles = (p.window_slots + TILE - 1) / TILE;
    w.tiles = w.window_tiles + (p.main_slots + TILE - 1) / TILE;
    int count = (w.tiles - w.rank + SHARES - 1) / SHARES;
    w.count = count > 0 ? count : 1;  // of no tile, an empty one
    return w;
}

DEVICE int entry_of(const Params& p, const Walk& w, int row, int tile, int key) {
    if (row >= w.rows || tile >= w.tiles) return -1;
    bool main = tile >= w.window_tiles;
    int slot = (main ? tile - w.window_tiles : tile) * TILE + key;
    int slots = main ? p.main_slots : p.window_slots;
    const long long* list = main ? p.main_idx : p.window_idx;
    return slot < slots ? int(__ldg(list + (long long)row * slots + slot)) : -1;
}

DEVICE const uint8_t* address_of(const Params& p, bool main, int entry) {
    if (entry < 0) return nothing;
    uint32_t entries = main ? p.main_entries : p.window_entries;
    uint32_t block = uint32_t(entry) / entries, offset = uint32_t(entry) % entries;
    if (main) return p.main + block * p.main_block + offset * MAIN_BYTES;
    return p.window + block * p.window_block + offset * WINDOW_BYTES;
}

template <int SHARES>
DEVICE void produce(const Params& p, uint32_t smem, int warp, int lane) {
    const Walk w = walk_of<SHARES>(p);
    const uint32_t raw = smem + RAW_AT + warp * UNITS * UNIT;
    const uint32_t full = smem + RAW_FULL + warp * UNITS * 8;
    // Lane 2 i + j copies key j of step i.
    const int key = 2 * PRODUCERS * (lane / 2) + 2 * warp + lane % 2;

    // Copies run ahead of decoding by as much as the ring holds.
    int row = w.row, tile = w.rank, step = 0, left = w.count;  // the next copy
    uint32_t issued = 0, taken = 0, head = 0, tail = 0, parities = 0;
    int ahead = lane < 2 * STEPS ? entry_of(p, w, row, tile, key) : -1;  // of the tile after
    const uint8_t* source = nullptr;
    bool main = false;
    auto start = [&] {
        main = tile >= w.window_tiles;
        source = address_of(p, main, ahead);
        int next = left > 1 ? tile + SHARES : w.rank;
        int next_row = left > 1 ? row : row + w.row_step;
        if (lane < 2 * STEPS) ahead = entry_of(p, w, next_row, next, key);
    };
    auto issue = [&] {
        while (row < w.rows) {
            const uint32_t need = main ? 1 : 2, skip = need == 2 && head == UNITS - 1;
            if (issued + skip + need - taken > UNITS) break;
            if (skip) head = 0;
            int bytes = main ? MAIN_BYTES : WINDOW_BYTES;
            if (lane == 2 * step) arrive_expect(full + head * 8, 2 * bytes);
            __syncwarp();
            if (lane / 2 == step)
                bulk_copy(raw + head * UNIT + (lane % 2) * bytes, source, bytes, full + head * 8);
            issued += skip + need;
            head += need;
            if (head >= UNITS) head = 0;
            if (++step == STEPS) {
                step = 0;
                if (--left == 0) {
                    left = w.count;
                    tile = w.rank;
                    row += w.row_step;
                } else {
                    tile += SHARES;
                }
                start();
            }
        }
    };
    start();
    issue();

    const uint32_t chunk = (warp / 4) * 8192 + (lane / 8) * 1024, place = lane % 8;
    const int first = 2 * (warp % 4);
    const uint32_t put0 = chunk + first * 128 + ((place ^ first) << 4);
    const uint32_t put1 = chunk + (first + 1) * 128 + ((place ^ (first + 1)) << 4);
    uint32_t turn = 0;
    for (int at_row = w.row; at_row < w.rows; at_row += w.row_step) {
        for (int n = 0, at = w.rank; n < w.count; n++, at += SHARES, turn++) {
            const uint32_t buffer = turn & 1;
            const bool is_main = at >= w.window_tiles;
            int entry0 = -1, entry1 = -1;
            if (warp == 0) {
                entry0 = entry_of(p, w, at_row, at, lane);
                entry1 = entry_of(p, w, at_row, at, lane + 32);
            }
            uint32_t keys = smem + K_AT + buffer * KEYS;
            for (int i = 0; i < STEPS; i++, keys += PRODUCERS / 4 * 8192) {
                if (i % (STEPS / 2) == 0)
                    wait(smem + K_EMPTY + buffer * 16 + (i ? 8 : 0), ((turn >> 1) & 1) ^ 1);
                const uint32_t need = is_main ? 1 : 2;
                if (need == 2 && tail == UNITS - 1) {
                    tail = 0;
                    taken++;
                }
                wait(full + tail * 8, (parities >> tail) & 1);
                parities ^= 1u << tail;
                const uint32_t from = raw + tail * UNIT;
                uint32_t v[4][4];
                if (is_main) {
                    uint32_t codes[4], scales[4];
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        uint32_t at_key = from + (k / 2) * MAIN_BYTES;
                        codes[k] = load32(at_key + (k % 2) * 128 + lane * 4);
                        scales[k] = load8(at_key + 256 + (k % 2) * 16 + lane / 2);
                    }
#pragma unroll
                    for (int k = 0; k < 4; k++) decode_main(codes[k], main_scale(scales[k]), v[k]);
                } else {
                    uint2 codes[4];
                    uint32_t scales[4];
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        uint32_t at_key = from + (k / 2) * WINDOW_BYTES;
                        codes[k] = load64(at_key + (k % 2) * 256 + lane * 8);
                        scales[k] = load8(at_key + 512 + (k % 2) * 8 + lane / 4);
                    }
#pragma unroll
                    for (int k = 0; k < 4; k++)
                        decode_window(codes[k], window_scale(scales[k]), v[k]);
                }
                store128(keys + put0, v[0]);
                store128(keys + put0 + 4096, v[1]);
                store128(keys + put1, v[2]);
                store128(keys + put1 + 4096, v[3]);
                taken += need;
                tail += need;
                if (tail >= UNITS) tail = 0;
                __syncwarp();
                issue();
            }
            fence_async();
            if (warp == 0) {
                uint32_t valid0 = __ballot_sync(~0u, entry0 >= 0);
                uint32_t valid1 = __ballot_sync(~0u, entry1 >= 0);
                if (lane == 0) {
                    store32(smem + VALID + buffer * 8, valid0);
                    store32(smem + VALID + buffer * 8 + 4, valid1);
                }
            }
            __syncwarp();
            if (lane == 0) arrive(smem + K_FULL + buffer * 8);
        }
    }
}

// What a consumer thread holds: rows `head` and `head + 8`, columns 2 * (lane % 4) + {0, 1} of each 8.
struct Sums {
    float out[2][64];  // two instructions' worth: one would need more registers than a launch grants
    float peak[2], total[2];
};

constexpr float LAZY = 8.0f;  // a maximum is raised only when weights would pass 2^8

DEVICE void raise(Sums& a, float peak0, float peak1) {
    float fade0 = exp2_fast(a.peak[0] - peak0), fade1 = exp2_fast(a.peak[1] - peak1);
    bool same = peak0 == a.peak[0] && peak1 == a.peak[1];
    a.peak[0] = peak0;
    a.peak[1] = peak1;
    if (__all_sync(~0u, same)) return;
    a.total[0] *= fade0;
    a.total[1] *= fade1;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 64; i += 4) {
            a.out[n][i] *= fade0;
            a.out[n][i + 1] *= fade0;
            a.out[n][i + 2] *= fade1;
            a.out[n][i + 3] *= fade1;
        }
}

// Give half a buffer back once all but LEFT groups of products are done.
template <int LEFT>
DEVICE void release(uint32_t smem, uint32_t buffer, int half, bool one) {
    products_wait<LEFT>();
    if (one) arrive(smem + K_EMPTY + buffer * 16 + half * 8);
}

DEVICE void add_values(Sums& a, uint32_t smem, int group, uint32_t buffer, bool one) {
    hold(a.out[0]), hold(a.out[1]);
    products_begin();
    const uint64_t weights = describe(smem + P_AT, 16, 1024);
    const uint64_t entries = describe(smem + K_AT + buffer * KEYS + group * 4096, 1024, 8192);
#pragma unroll
    for (int k = 0; k < 4; k++) {
#pragma unroll
        for (int n = 0; n < 2; n++)
            value_product(a.out[n], weights + k * (32 >> 4),
                          entries + k * (16384 >> 4) + n * (2048 >> 4));
        if (k % 2) products_commit();
    }
    release<1>(smem, buffer, 0, one);
    release<0>(smem, buffer, 1, one);
    hold(a.out[0]), hold(a.out[1]);
}

template <int SHARES>
DEVICE void consume(const Params& p, const CUtensorMap* map, uint32_t smem, int group, int warp,
                    int lane) {
    const Walk w = walk_of<SHARES>(p);
    const int head = 16 * warp + lane / 4, quad = lane % 4;
    const uint32_t lists = smem + PEAK;
    uint32_t turn = 0, row_turn = 0;
    Sums a;
    for (int row = w.row; row < w.rows; row += w.row_step, row_turn ^= 1) {
#pragma unroll
        for (int i = 0; i < 128; i++) a.out[i / 64][i % 64] = 0.0f;
        a.peak[0] = a.peak[1] = -1e30f;
        a.total[0] = a.total[1] = 0.0f;
        for (int t = (turn ^ group) & 1;; t += 2) {
            const uint32_t own = turn + t, other = own - 1;
            if (t > 0) {
                wait(smem + P_FULL, other & 1);
                const uint32_t list = lists + (other & 1) * 256 + head * 4;
                raise(a, loadf(list), loadf(list + 32));
                add_values(a, smem, group, other & 1, lane == 0);
            }
            if (t >= w.count) break;
            const uint32_t buffer = own & 1;
            if (t < 2) wait(smem + Q_FULL, row_turn);
            wait(smem + K_FULL + buffer * 8, (own >> 1) & 1);
            float s[32];
            products_begin();
            {
                const uint64_t queries = describe(smem + Q_AT, 16, 1024);
                const uint64_t keys = describe(smem + K_AT + buffer * KEYS, 16, 8192);
#pragma unroll
                for (int c = 0; c < 8; c++)
#pragma unroll
                    for (int k = 0; k < 4; k++)
                        score_product(s, queries + c * (8192 >> 4) + k * (32 >> 4),
                                      keys + c * (1024 >> 4) + k * (32 >> 4), c + k > 0);
            }
            products_commit();
            const uint32_t valid0 = load32(smem + VALID + buffer * 8) >> (2 * quad);
            const uint32_t valid1 = load32(smem + VALID + buffer * 8 + 4) >> (2 * quad);
            products_wait<0>();
            hold(s);

            // Scores to weights.
            float top0 = -INFINITY, top1 = -INFINITY;
#pragma unroll
            for (int i = 0; i < 32; i += 4) {
                const uint32_t bits = (i < 16 ? valid0 : valid1) >> (2 * (i % 16));
#pragma unroll
                for (int j = 0; j < 4; j++)
                    s[i + j] = (bits >> (j % 2)) & 1 ? s[i + j] * p.scale : -INFINITY;
                top0 = fmaxf(top0, fmaxf(s[i], s[i + 1]));
                top1 = fmaxf(top1, fmaxf(s[i + 2], s[i + 3]));
            }
            top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, 1));
            top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, 1));
            top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, 2));
            top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, 2));
            const float peak0 = top0 > a.peak[0] + LAZY ? top0 : a.peak[0];
            const float peak1 = top1 > a.peak[1] + LAZY ? top1 : a.peak[1];
            float sum0 = 0.0f, sum1 = 0.0f;
            uint32_t weights[16];
#pragma unroll
            for (int i = 0; i < 32; i += 4) {
                const float x0 = exp2_fast(s[i] - peak0), x1 = exp2_fast(s[i + 1] - peak0);
                const float y0 = exp2_fast(s[i + 2] - peak1), y1 = exp2_fast(s[i + 3] - peak1);
                sum0 += x0 + x1;
                sum1 += y0 + y1;
                weights[i / 2] = pair(x0, x1);
                weights[i / 2 + 1] = pair(y0, y1);
            }
            // The weights before are read by both groups before these overwrite them.
            if (own > 0) wait(smem + K_EMPTY + (other & 1) * 16 + 8, (other >> 1) & 1);
            {
                const uint32_t line = smem + P_AT + head * 128 + quad * 4;
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const uint32_t at = line + ((j ^ (head & 7)) << 4);
                    store32(at, weights[2 * j]);
                    store32(at + 1024, weights[2 * j + 1]);
                }
                if (quad == 0) {
                    const uint32_t list = lists + buffer * 256 + head * 4;
                    storef(list, peak0);
                    storef(list + 32, peak1);
                }
            }
            fence_async();
            __syncwarp();
            if (lane == 0) arrive(smem + P_FULL);
            raise(a, peak0, peak1);
            a.total[0] += sum0;
            a.total[1] += sum1;
            wait(smem + P_FULL, own & 1);
            if (t == w.count - 1 && warp == 0 && lane == 0 && row + w.row_step < w.rows)
                load_queries(map, row + w.row_step, smem);  // all products with these are done
            add_values(a, smem, group, buffer, lane == 0);
            if (t == w.count - 1) break;
        }
        turn += w.count;

        // The groups' shares of the sum come together.
#pragma unroll
        for (int i = 0; i < 2; i++) {
            a.total[i] += __shfl_xor_sync(~0u, a.total[i], 1);
            a.total[i] += __shfl_xor_sync(~0u, a.total[i], 2);
        }
        const uint32_t sums = smem + TOTAL + row_turn * 512 + head * 4;
        if (quad == 0) {
            storef(sums + group * 256, a.total[0]);
            storef(sums + group * 256 + 32, a.total[1]);
        }
        if (SHARES == 1) {
            consumers_sync();
            const float log2e = 1.4426950408889634f;
            float total0 = loadf(sums) + loadf(sums + 256);
            float total1 = loadf(sums + 32) + loadf(sums + 256 + 32);
            total0 += exp2_fast(__ldg(p.sink + head) * log2e - a.peak[0]);
            total1 += exp2_fast(__ldg(p.sink + head + 8) * log2e - a.peak[1]);
            const float r0 = 256.0f / total0, r1 = 256.0f / total1;
            // Lanes trade pairs so that each stores four neighbours.
            const bool odd = quad & 1;
            uint16_t* out = p.out + ((long long)row * HEADS + head) * DIM + group * 256 +
                            (odd ? 8 : 0) + 4 * (quad / 2);
#pragma unroll
            for (int j = 0; j < 32; j += 2) {
                const float* x = a.out[j / 16] + 4 * (j % 16);
                uint32_t a0 = pair(x[0] * r0, x[1] * r0), a1 = pair(x[2] * r1, x[3] * r1);
                uint32_t b0 = pair(x[4] * r0, x[5] * r0), b1 = pair(x[6] * r1, x[7] * r1);
                uint32_t got0 = __shfl_xor_sync(~0u, odd ? a0 : b0, 1);
                uint32_t got1 = __shfl_xor_sync(~0u, odd ? a1 : b1, 1);
                *reinterpret_cast<uint2*>(out + 8 * j) =
                    odd ? make_uint2(got0, b0) : make_uint2(a0, got0);
                *reinterpret_cast<uint2*>(out + 8 * j + 8 * DIM) =
                    odd ? make_uint2(got1, b1) : make_uint2(a1, got1);
            }
        } else {
            // Sums of this share, fp32, where the keys were; groups of 8 floats swizzled by head.
            if (group == 0 && quad == 0) {
                storef(lists + head * 4, a.peak[0]);
                storef(lists + head * 4 + 32, a.peak[1]);
            }
            consumers_sync();  // no product reads the keys any more
#pragma unroll
            for (int j = 0; j < 32; j++) {
                const uint32_t at = smem + K_AT + head * 2048 + group * 1024 +
                                    ((j ^ (head & 7)) << 5) + quad * 8;
                const float* x = a.out[j / 16] + 4 * (j % 16);
                storef2(at, x[0], x[1]);
                storef2(at + 8 * 2048, x[2], x[3]);
            }
        }
    }
}

// Each CTA of a cluster adds the shares of some heads.
template <int SHARES>
DEVICE void combine(const Params& p, uint32_t smem, int rank, int row) {
    const float log2e = 1.4426950408889634f;
    for (int i = threadIdx.x; i < HEADS / SHARES * DIM / 4; i += THREADS) {
        const int head = rank * (HEADS / SHARES) + i / 128, at4 = i % 128;
        float peaks[SHARES], peak = -1e30f, total = 0.0f;
#pragma unroll
        for (int s = 0; s < SHARES; s++) {
            peaks[s] = peer_float(peer(smem + PEAK + head * 4, s));
            peak = fmaxf(peak, peaks[s]);
        }
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int s = 0; s < SHARES; s++) {
            const float fade = exp2_fast(peaks[s] - peak);
            const uint32_t sums = peer(smem + TOTAL + head * 4, s);
            total += fade * (peer_float(sums) + peer_float(sums + 256));
            const uint32_t at = K_AT + head * 2048 + (((at4 / 2) ^ (head & 7)) << 5) + (at4 % 2) * 16;
            const float4 x = peer_float4(peer(smem + at, s));
            sum.x += fade * x.x;
            sum.y += fade * x.y;
            sum.z += fade * x.z;
            sum.w += fade * x.w;
        }
        total += exp2_fast(__ldg(p.sink + head) * log2e - peak);
        const float r = 256.0f / total;
        *reinterpret_cast<uint2*>(p.out + ((long long)row * HEADS + head) * DIM + at4 * 4) =
            make_uint2(pair(sum.x * r, sum.y * r), pair(sum.z * r, sum.w * r));
    }
}

template <int SHARES>
DEVICE void walk(const CUtensorMap* map, const Params& p, uint32_t smem) {
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        init_barrier(smem + Q_FULL, 1);
        init_barrier(smem + P_FULL, 4);
        for (int i = 0; i < 2; i++) init_barrier(smem + K_FULL + i * 8, PRODUCERS);
        for (int i = 0; i < 4; i++) init_barrier(smem + K_EMPTY + i * 8, 8);
        for (int i = 0; i < PRODUCERS * UNITS; i++) init_barrier(smem + RAW_FULL + i * 8, 1);
        barriers_made();
    }
    __syncthreads();
    if (warp < PRODUCERS) {
        registers_down<PRODUCERS == 4 ? 104 : 56>();
        produce<SHARES>(p, smem, warp, lane);
    } else {
        registers_up<200>();
        if (threadIdx.x == PRODUCERS * 32) load_queries(map, blockIdx.x / SHARES, smem);
        __syncwarp();
        consume<SHARES>(p, map, smem, (warp - PRODUCERS) / 4, warp % 4, lane);
    }
}

Params params(const void* window, const void* window_idx, const void* main, const void* main_idx,
              const void* sink, void* out, long long rows, long long window_slots,
              long long main_slots, long long window_entries, long long window_block,
              long long main_entries, long long main_block, double scale) {
    Params p;
    p.window = static_cast<const uint8_t*>(window);
    p.main = static_cast<const uint8_t*>(main);
    p.window_idx = static_cast<const long long*>(window_idx);
    p.main_idx = static_cast<const long long*>(main_idx);
    p.sink = static_cast<const float*>(sink);
    p.out = static_cast<uint16_t*>(out);
    p.window_block = window_block;
    p.main_block = main_block;
    p.window_entries = int(window_entries);
    p.main_entries = int(main_entries);
    p.rows = int(rows);
    p.window_slots = int(window_slots);
    p.main_slots = int(main_slots);
    p.scale = float(scale * 256.0 * 1.4426950408889634);
    return p;
}

}  // namespace

#ifdef __CUDACC__

namespace {

template <int SHARES>
__global__ void __launch_bounds__(THREADS, 1)
    attend(const __grid_constant__ CUtensorMap map, const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t smem = uint32_t(__cvta_generic_to_shared(shared));
    if (smem % 1024) __trap();
    walk<SHARES>(&map, p, smem);
    if (SHARES > 1) {
        cluster_sync();
        combine<SHARES>(p, smem, blockIdx.x % SHARES, blockIdx.x / SHARES);
        cluster_sync();  // a peer may still read this CTA's shared memory
    }
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

template <int SHARES>
cudaError_t start(const CUtensorMap& map, const Params& p, int grid, cudaStream_t stream) {
    const cudaError_t ready =  // of this device
        cudaFuncSetAttribute(attend<SHARES>, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM);
    if (ready != cudaSuccess) return ready;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = SMEM;
    config.stream = stream;
    cudaLaunchAttribute cluster[1];
    cluster[0].id = cudaLaunchAttributeClusterDimension;
    cluster[0].val.clusterDim = {SHARES, 1, 1};
    config.attrs = cluster;
    config.numAttrs = SHARES > 1 ? 1 : 0;
    return cudaLaunchKernelEx(&config, attend<SHARES>, map, p);
}

}  // namespace

// Returns a CUDA error code. Strides in bytes; `shares` CTAs take one row: 1, 2 or 4.
extern "C" int paged_attention(void* q, const void* window, const void* window_idx, const void* main,
                               const void* main_idx, const void* sink, void* out, long long rows,
                               long long window_slots, long long main_slots, long long window_entries,
                               long long window_block, long long main_entries, long long main_block,
                               long long shares, double scale, void* stream) {
    static Encode encode = [] {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult status;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                         &status);
        return reinterpret_cast<Encode>(found);
    }();
    if (!encode) return cudaErrorNotSupported;
    CUtensorMap map;
    const cuuint64_t sizes[2] = {DIM, cuuint64_t(rows) * HEADS}, strides[1] = {DIM * 2};
    const cuuint32_t box[2] = {64, HEADS}, steps[2] = {1, 1};
    if (encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, q, sizes, strides, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))
        return cudaErrorInvalidValue;
    const Params p = params(window, window_idx, main, main_idx, sink, out, rows, window_slots,
                            main_slots, window_entries, window_block, main_entries, main_block,
                            scale);
    auto s = static_cast<cudaStream_t>(stream);
    static int processors = [] {
        int device = 0, count = 0;
        cudaGetDevice(&device);
        cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
        return count;
    }();
    if (shares == 1) return start<1>(map, p, p.rows < processors ? p.rows : processors, s);
    if (shares == 2) return start<2>(map, p, p.rows * 2, s);
    if (shares == 4) return start<4>(map, p, p.rows * 4, s);
    return cudaErrorInvalidValue;
}

#endif
