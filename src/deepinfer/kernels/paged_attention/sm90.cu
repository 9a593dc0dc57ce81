// Sparse attention over packed cache entries, SM90a.
//
// One CTA takes a row of 64 heads x 512 dims (or a share of its slots: several then take the row)
// and walks its slots in tiles of 64. Its warps have roles:
//   8 decode   turn packed entries, read a tile ahead into registers, into bf16 in one of two key
//              buffers
//   4 score    multiply queries by keys and turn scores into weights
//   4 + 4 add  the weighted entries, each group half of the dims
//
// Decoded entries carry a common factor 2^-8, which the scale of the scores and the last division
// take back; with it, a 4-bit entry times its scale is one product of bf16 values, and exact.
//
// Where cosines and sines are given, the tail of a query turns in shared memory before the first scores,
// and that of a result turns back in registers, where ACT8 follows: with the roundings of kernels of
// their own. Blocks that take whole rows know at compile time whether (TURNED).

#ifdef __CUDACC__
#include "sm90.cuh"
#else
#include "paged_host.h"
#endif
#include "../act8.cuh"
#include "../chain.cuh"

namespace {

constexpr int HEADS = 64, DIM = 512, TILE = 64;
constexpr int PAIRS = 32;  // that turn, the last of a head
constexpr int DECODERS = 8, SCORERS = 4, ADDERS = 8;  // warps
constexpr int THREADS = 32 * (DECODERS + SCORERS + ADDERS);
constexpr int SHARED_REGISTERS = 96;  // of all warps, where a row's shares are added
constexpr int DECODE_REGISTERS = 48, SCORE_REGISTERS = 64, ADD_REGISTERS = 160;  // of 96 on average
constexpr int MAIN_BYTES = 288, WINDOW_BYTES = 528;
constexpr int STEPS = TILE / 2 / DECODERS;  // of a decoder in a tile, two keys a step

constexpr uint32_t Q_AT = 0, K_AT = 65536, KEYS = 65536, P_AT = K_AT + 2 * KEYS;
constexpr uint32_t MISC_AT = P_AT + 8192;
constexpr uint32_t Q_FULL = MISC_AT, Q_EMPTY = MISC_AT + 8;
constexpr uint32_t P_FULL = MISC_AT + 16, P_EMPTY = MISC_AT + 24;
constexpr uint32_t K_FULL = MISC_AT + 32;
constexpr uint32_t K_EMPTY = MISC_AT + 48;  // by buffer and half of its keys
constexpr uint32_t VALID = MISC_AT + 80;  // by buffer and decoder, a byte each
constexpr uint32_t FADE = MISC_AT + 512, INVERSE = MISC_AT + 1024;  // of two tiles, two rows
constexpr uint32_t SHRINK = INVERSE;  // of shares, by group and row
constexpr uint32_t PEAK = MISC_AT + 1536, TOTAL = MISC_AT + 1792;
constexpr uint32_t TURN = MISC_AT + 2048;  // of three rows, 32 cosines and sines each
constexpr uint32_t SMEM = TURN + 768;
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
    uint32_t window_inverse, main_inverse;  // 2^32 over them, rounded up
    int rows, window_slots, main_slots;
    float scale;  // of the scores, in base 2, with the 2^8
    float* parts;     // what a CTA passes to the next one, or null
    uint32_t* flags;  // PASSED for each CTA, 0 where nothing is passed
    const float *cos, *sin;  // of each row, PAIRS, or null where nothing turns
};

constexpr int PART = (ADDERS * 128 + SCORERS * 4) * 32;  // floats that a CTA passes
constexpr int PASSED = ADDERS + SCORERS;                 // flags, of the warps that pass them

__device__ alignas(16) uint8_t nothing[WINDOW_BYTES];  // what an absent entry reads

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
// A code's two halves look up the bytes of a bf16, whose bits are value * 2^-126.
DEVICE void decode_main(uint32_t codes, uint32_t scale, uint32_t (&out)[4]) {
    const uint32_t low = (codes & 0x33333333u) | 0x44444444u;
    const uint32_t high = ((codes >> 2) & 0x33333333u) | 0x44444444u;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const uint32_t lows = bytes(0, 0xC0804000u, low >> (16 * j));
        const uint32_t highs = bytes(0, 0x81800100u, high >> (16 * j));
        out[2 * j] = product(bytes(lows, highs, 0x5140), scale);
        out[2 * j + 1] = product(bytes(lows, highs, 0x7362), scale);
    }
}

// Eight e4m3 codes -> values * scale * 2^-8; scale comes from window_scale.
DEVICE void decode_window(uint2 codes, uint32_t scale, uint32_t (&out)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t x = bytes(j < 2 ? codes.x : codes.y, 0, j % 2 ? 0x3424 : 0x1404);
        x = (x & 0x80008000u) | ((x >> 4) & 0x07F007F0u);  // the bits are value * 2^-120
        out[j] = product(product(x, TWO_120), scale);
    }
}

// ---- matrix products -------------------------------------------------------------------------

// A tile of 128-byte rows in groups of 8; `lead` and `stride` are the descriptor's two offsets in bytes.
DEVICE uint2 describe(uint32_t at, uint32_t lead, uint32_t stride) {
    return make_uint2((lead >> 4) << 16 | (at & 0x3FFFF) >> 4, 1u << 30 | stride >> 4);
}

DEVICE uint2 further(uint2 tile, uint32_t bytes) {
    return make_uint2(tile.x + (bytes >> 4), tile.y);
}

DEVICE void load_queries(const CUtensorMap* map, int row, uint32_t smem, int warp) {  // a quarter
    const uint32_t bar = smem + Q_FULL;
    arrive_expect(bar, HEADS * DIM * 2 / SCORERS);
#pragma unroll
    for (int i = 0; i < DIM / 64 / SCORERS; i++) {
        const int c = i * SCORERS + warp;
        copy_box(smem + Q_AT + c * 8192, map, c * 64, row * HEADS, bar);
    }
}

// ---- the walk over a row's tiles -------------------------------------------------------------

struct Walk {  // which tiles of which rows this CTA takes
    int row, row_step, rank, window_tiles, tiles, count, fulls;  // whole rows, or shares of rows
    int head, tail, pieces, total;  // tiles of a row that the next CTA ends; first of a row that was begun
};

// With CUT the rows' tiles are cut into equal runs, one for each CTA. A row that two CTAs take is
// begun by the first, before anything else, and ended by the second, after everything else: its sums
// and maxima pass through memory, so that its bits are those of an uncut row.
template <int SHARES, bool CUT>
DEVICE Walk walk_of(const Params& p) {
    Walk w;
    w.rank = SHARES == 1 ? 0 : blockIdx.x % SHARES;
    w.window_tiles = (p.window_slots + TILE - 1) / TILE;
    w.tiles = w.window_tiles + (p.main_slots + TILE - 1) / TILE;
    const int count = (w.tiles - w.rank + SHARES - 1) / SHARES;
    w.count = count > 0 ? count : 1;  // of no tile, an empty one
    w.head = w.tail = 0;
    if (SHARES > 1) {
        w.row = blockIdx.x / SHARES;
        w.row_step = w.fulls = 1;
    } else if (!CUT) {
        w.row = blockIdx.x;
        w.row_step = gridDim.x;
        w.fulls = (p.rows - w.row + w.row_step - 1) / w.row_step;
    } else {
        const int begin = int((long long)blockIdx.x * p.rows * w.tiles / gridDim.x);
        const int end = int((long long)(blockIdx.x + 1) * p.rows * w.tiles / gridDim.x);
        w.row = (begin + w.tiles - 1) / w.tiles;
        w.row_step = 1;
        w.fulls = end / w.tiles - w.row;
        w.head = end % w.tiles;
        w.tail = begin % w.tiles;
    }
    w.pieces = (w.head > 0) + w.fulls + (w.tail > 0);
    w.total = w.head + w.fulls * w.count + (w.tail ? w.tiles - w.tail : 0);
    return w;
}

struct Piece {  // tiles of a row, whose sums another CTA began or ends
    int row, first, end;
    bool begun, left;
};

template <bool CUT>
DEVICE Piece piece_of(const Walk& w, int n) {
    if (!CUT) return {w.row + n * w.row_step, 0, w.count, false, false};
    if (w.head && n == 0) return {w.row + w.fulls, 0, w.head, false, true};
    const int full = n - (w.head > 0);
    if (full < w.fulls) return {w.row + full * w.row_step, 0, w.count, false, false};
    return {w.row - 1, w.tail, w.tiles, true, false};
}

// Shares end with the window, of whose keys fewer are on their way at a time.
template <int SHARES>
DEVICE int tile_of(const Walk& w, int t) {
    return SHARES == 1 ? t : w.rank + SHARES * (w.count - 1 - t);
}

DEVICE int entry_of(const Params& p, const Walk& w, int row, int tile, int key) {
    if (tile >= w.tiles) return -1;
    bool main = tile >= w.window_tiles;
    int slot = (main ? tile - w.window_tiles : tile) * TILE + key;
    int slots = main ? p.main_slots : p.window_slots;
    const long long* list = main ? p.main_idx : p.window_idx;
    return slot < slots ? int(__ldg(list + (long long)row * slots + slot)) : -1;
}

DEVICE const uint8_t* address_of(const Params& p, bool main, int entry) {
    if (entry < 0) return nothing;
    const int entries = main ? p.main_entries : p.window_entries;
    int block = __umulhi(entry, main ? p.main_inverse : p.window_inverse);  // or one too many
    int offset = entry - block * entries;
    if (offset < 0) {
        block--;
        offset += entries;
    }
    if (main) return p.main + block * p.main_block + offset * MAIN_BYTES;
    return p.window + block * p.window_block + offset * WINDOW_BYTES;
}

struct Place {  // a tile of a piece
    int n, row, t, end;
};

template <bool CUT>
DEVICE Place place_of(const Walk& w, int n) {
    const Piece piece = piece_of<CUT>(w, n);
    return {n, piece.row, piece.first, piece.end};
}

template <bool CUT>
DEVICE Place after(const Walk& w, const Place& at) {
    return at.t + 1 < at.end ? Place{at.n, at.row, at.t + 1, at.end} : place_of<CUT>(w, at.n + 1);
}

// What a lane holds of the entries to come, 16 dims of each key: four steps of main entries or two of
// window entries, two keys a step.
struct Ahead {
    uint32_t main[4][2][3];  // by step and key: codes, scale; a window key takes a main step
};

// Main entries of a step, whose addresses two lanes hold.
template <int STEP>
DEVICE void read_main(Ahead& to, unsigned long long source, int lane) {
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const unsigned long long from = __shfl_sync(~0u, source, 2 * STEP + k);
        fetch64(to.main[STEP][k], from + lane * 8);
        to.main[STEP][k][2] = fetch8(from + 256 + lane);
    }
}

template <int STEP>
DEVICE void read_window(Ahead& to, unsigned long long source, int lane) {
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const unsigned long long from = __shfl_sync(~0u, source, 2 * STEP + k);
        uint32_t(&x)[2][3] = to.main[STEP % 2 * 2 + k];
        fetch128(x[0][0], x[0][1], x[1][0], x[1][1], from + lane * 16);
        x[0][2] = fetch8(from + 512 + lane / 2);
    }
}

DEVICE void put_key(uint32_t at, const uint32_t (&low)[4], const uint32_t (&high)[4]) {
    store128(at, low);
    store128(at ^ 16, high);
}

template <int SHARES, bool CUT>
struct Decoder {
    const Params& p;
    const Walk& w;
    const uint32_t smem;
    const int warp, lane;
    const bool swap;       // a lane decodes 16 dims, their halves in an order that spreads the stores
    uint32_t place;        // of neighbours over all banks
    unsigned long long source, source_next;  // where the lane's entry of a tile lies
    Ahead ahead;
    bool main_next, more;

    template <int STEP>
    DEVICE void main_step(uint32_t keys, uint32_t room, uint32_t parity) {
        if (STEP % 2 == 0) wait(room + STEP * 4, parity);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const uint32_t(&x)[3] = ahead.main[STEP][k];
            const uint32_t scale = main_scale(x[2]);
            uint32_t low[4], high[4];
            decode_main(swap ? x[1] : x[0], scale, low);
            decode_main(swap ? x[0] : x[1], scale, high);
            put_key((k ? keys ^ 16 : keys) + STEP * 16384 + k * 128, low, high);
        }
        if (!more) return;
        if (main_next) {
            read_main<STEP>(ahead, source_next, lane);
        } else if (STEP % 2) {
            read_window<STEP / 2>(ahead, source_next, lane);
        }
    }

    template <int STEP>
    DEVICE void window_step(uint32_t keys, uint32_t room, uint32_t parity) {
        if (STEP % 2 == 0) wait(room + STEP * 4, parity);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const uint32_t(&x)[2][3] = ahead.main[STEP % 2 * 2 + k];
            const uint32_t scale = window_scale(x[0][2]);
            uint32_t low[4], high[4];
            decode_window(swap ? make_uint2(x[1][0], x[1][1]) : make_uint2(x[0][0], x[0][1]), scale, low);
            decode_window(swap ? make_uint2(x[0][0], x[0][1]) : make_uint2(x[1][0], x[1][1]), scale, high);
            put_key((k ? keys ^ 16 : keys) + STEP * 16384 + k * 128, low, high);
        }
        if (STEP < 2) {
            read_window<STEP % 2 + 2>(ahead, source, lane);
        } else if (more) {
            if (main_next) {
                read_main<STEP % 2 * 2>(ahead, source_next, lane);
                read_main<STEP % 2 * 2 + 1>(ahead, source_next, lane);
            } else {
                read_window<STEP % 2>(ahead, source_next, lane);
            }
        }
    }

    DEVICE bool is_main(const Place& at) const { return tile_of<SHARES>(w, at.t) >= w.window_tiles; }
    DEVICE int entry_at(const Place& at) const {  // of lane 2 i + j: key j of step i
        const int key = 2 * DECODERS * (lane / 2) + 2 * warp + lane % 2;
        return lane < 2 * STEPS ? entry_of(p, w, at.row, tile_of<SHARES>(w, at.t), key) : -1;
    }

    DEVICE Decoder(const Params& p_, const Walk& w_, uint32_t smem_, int warp_, int lane_)
        : p(p_), w(w_), smem(smem_), warp(warp_), lane(lane_), swap(lane_ / 4 % 2) {
        const int first = 2 * (warp % 4), part = 2 * (lane % 4) + swap;
        place = smem + K_AT + (warp / 4) * 8192 + (lane / 4) * 1024 + first * 128 + ((part ^ first) << 4);
    }

    DEVICE void run() {
        if (!w.total) return;
        Place at = place_of<CUT>(w, 0);
        int entry = entry_at(at);
        bool main = is_main(at);
        at = after<CUT>(w, at);
        int entry_next = w.total > 1 ? entry_at(at) : -1;
        main_next = is_main(at);
        source = (unsigned long long)address_of(p, main, entry);
        if (main) {
            read_main<0>(ahead, source, lane);
            read_main<1>(ahead, source, lane);
            read_main<2>(ahead, source, lane);
            read_main<3>(ahead, source, lane);
        } else {
            read_window<0>(ahead, source, lane);
            read_window<1>(ahead, source, lane);
        }
        uint32_t valid = __ballot_sync(~0u, entry >= 0);
        for (int turn = 0; turn < w.total; turn++) {
            const uint32_t buffer = turn & 1, parity = turn >> 1 & 1 ^ 1;
            const uint32_t keys = place + buffer * KEYS, room = smem + K_EMPTY + buffer * 16;
            more = turn + 1 < w.total;
            source_next = (unsigned long long)address_of(p, main_next, entry_next);
            const uint32_t valid_next = __ballot_sync(~0u, entry_next >= 0);
            at = after<CUT>(w, at);
            entry_next = turn + 2 < w.total ? entry_at(at) : -1;
            if (main) {
                main_step<0>(keys, room, parity);
                main_step<1>(keys, room, parity);
                main_step<2>(keys, room, parity);
                main_step<3>(keys, room, parity);
            } else {
                window_step<0>(keys, room, parity);
                window_step<1>(keys, room, parity);
                window_step<2>(keys, room, parity);
                window_step<3>(keys, room, parity);
            }
            if (lane == 0) store8(smem + VALID + buffer * 8 + warp, valid);
            fence_async();
            __syncwarp();
            if (lane == 0) arrive(smem + K_FULL + buffer * 8);
            valid = valid_next;
            source = source_next;
            main = main_next;
            main_next = is_main(at);
        }
    }
};

// A warp's sixteen heads by 64 dims as boxes lie: eight lanes a head, four pairs each.
DEVICE void turn_box(uint32_t box, int lane, const float4& cos, const float4& sin) {
    const uint32_t at = box + lane / 8 * 128;
    uint4 held[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        held[i] = load_words(at + i * 512 + ((lane % 8 ^ (lane / 8 + 4 * i & 7)) << 4));
#pragma unroll
    for (int i = 0; i < 4; i++) {
        Eight x;
        x.unpack(held[i]);
        x.turn(cos, sin);
        store_words(at + i * 512 + ((lane % 8 ^ (lane / 8 + 4 * i & 7)) << 4), x.pack());
    }
}

DEVICE float4 minus(const float4& x) { return make_float4(-x.x, -x.y, -x.z, -x.w); }

constexpr float LAZY = 8.0f;  // a maximum is raised only when weights would pass 2^8
constexpr float LOG2_E = 1.4426950408889634f;

// A thread holds rows `head` and `head + 8`, columns 2 * (lane % 4) + {0, 1} of each 8.
template <int SHARES, bool CUT, bool TURNED>
DEVICE void score(const Params& p, const CUtensorMap* map, uint32_t smem, int warp, int lane) {
    const Walk w = walk_of<SHARES, CUT>(p);
    const int head = 16 * warp + lane / 4, quad = lane % 4;
    const float sink0 = __ldg(p.sink + head) * LOG2_E, sink1 = __ldg(p.sink + head + 8) * LOG2_E;
    const bool turns = SHARES > 1 ? p.cos != nullptr : TURNED;
    uint32_t turn = 0, row_turn = 0;
    for (int n = 0; n < w.pieces; n++, row_turn ^= 1) {
        const Piece piece = piece_of<CUT>(w, n);
        float peak0 = -1e30f, peak1 = -1e30f, total0 = 0.0f, total1 = 0.0f;
        if (CUT && piece.begun) {
            await(p.flags + (blockIdx.x - 1) * PASSED + ADDERS + warp, lane == 0);
            const float4 x = load_passed(
                p.parts + (blockIdx.x - 1) * PART + ADDERS * 32 * 128 + (warp * 32 + lane) * 4);
            peak0 = x.x, peak1 = x.y, total0 = x.z, total1 = x.w;
        }
        float4 cos, sin;
        if (turns) {
            const long long at = (long long)piece.row * PAIRS + lane % 8 * 4;
            cos = __ldg(reinterpret_cast<const float4*>(p.cos + at));
            sin = __ldg(reinterpret_cast<const float4*>(p.sin + at));
        }
        wait(smem + Q_FULL, row_turn);
        if (turns) {
            if (warp == 0 && lane < 8) {  // kept for the results
                store_floats(smem + TURN + n % 3 * 256 + lane * 16, cos);
                store_floats(smem + TURN + n % 3 * 256 + 128 + lane * 16, sin);
            }
            turn_box(smem + Q_AT + 7 * 8192 + warp * 2048, lane, cos, sin);
            fence_async();
            group_sync(2);  // products read what all four have turned
        }
        for (int t = piece.first; t < piece.end; t++, turn++) {
            const uint32_t buffer = turn & 1;
            const bool last = t == piece.end - 1;
            wait(smem + K_FULL + buffer * 8, (turn >> 1) & 1);
            float s[32];
            products_begin();
            {
                const uint2 queries = describe(smem + Q_AT, 16, 1024);
                const uint32_t odd = __ballot_sync(~0u, buffer) & 1;  // known to be the warp's
                const uint2 keys = describe(smem + K_AT + odd * KEYS, 16, 8192);
#pragma unroll
                for (int c = 0; c < 8; c++)
#pragma unroll
                    for (int k = 0; k < 4; k++)
                        score_product(s, further(queries, c * 8192 + k * 32),
                                      further(keys, c * 1024 + k * 32), c + k > 0);
            }
            products_commit();
            // Bit 2 i + b: column 16 i + 2 quad + b, and 8 more.
            const uint32_t valid0 = load8(smem + VALID + buffer * 8 + quad);
            const uint32_t valid1 = load8(smem + VALID + buffer * 8 + quad + 4);
            products_wait<0>();
            hold(s);
            if (last && n + 1 < w.pieces) {  // the last products with these queries
                if (lane == 0) {
                    arrive(smem + Q_EMPTY);
                    wait(smem + Q_EMPTY, row_turn);
                    load_queries(map, piece_of<CUT>(w, n + 1).row, smem, warp);
                }
                __syncwarp();
            }

            if (!__all_sync(~0u, (valid0 & valid1) == 255)) {
#pragma unroll
                for (int i = 0; i < 32; i++)
                    if (!((i % 8 < 4 ? valid0 : valid1) >> (i / 8 * 2 + i % 2) & 1)) s[i] = -INFINITY;
            }
            float top0 = fmaxf(s[0], s[1]), top1 = fmaxf(s[2], s[3]);
#pragma unroll
            for (int i = 4; i < 32; i += 4) {
                top0 = fmaxf(top0, fmaxf(s[i], s[i + 1]));
                top1 = fmaxf(top1, fmaxf(s[i + 2], s[i + 3]));
            }
            top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, 1));
            top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, 1));
            top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, 2)) * p.scale;
            top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, 2)) * p.scale;
            const float new0 = top0 > peak0 + LAZY ? top0 : peak0;
            const float new1 = top1 > peak1 + LAZY ? top1 : peak1;
            const float fade0 = exp2_fast(peak0 - new0), fade1 = exp2_fast(peak1 - new1);
            peak0 = new0;
            peak1 = new1;
            float sum0 = 0.0f, sum1 = 0.0f;
            uint32_t weights[16];
#pragma unroll
            for (int i = 0; i < 32; i += 4) {
                const float x0 = exp2_fast(fmaf(s[i], p.scale, -peak0));
                const float x1 = exp2_fast(fmaf(s[i + 1], p.scale, -peak0));
                const float y0 = exp2_fast(fmaf(s[i + 2], p.scale, -peak1));
                const float y1 = exp2_fast(fmaf(s[i + 3], p.scale, -peak1));
                sum0 += x0 + x1;
                sum1 += y0 + y1;
                weights[i / 2] = pair(x0, x1);
                weights[i / 2 + 1] = pair(y0, y1);
            }
            total0 = total0 * fade0 + sum0;
            total1 = total1 * fade1 + sum1;
            if (turn > 0) wait(smem + P_EMPTY, (turn - 1) & 1);
            {
                const uint32_t line = smem + P_AT + head * 128 + quad * 4;
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const uint32_t at = line + ((j ^ (head & 7)) << 4);
                    store32(at, weights[2 * j]);
                    store32(at + 1024, weights[2 * j + 1]);
                }
            }
            if (quad == 0) {
                const uint32_t at = smem + FADE + buffer * 256 + head * 4;
                storef(at, fade0);
                storef(at + 32, fade1);
            }
            if (CUT && last && piece.left) {
                store_passed(p.parts + blockIdx.x * PART + ADDERS * 32 * 128 + (warp * 32 + lane) * 4,
                             make_float4(peak0, peak1, total0, total1));
                publish(p.flags + blockIdx.x * PASSED + ADDERS + warp, lane == 0);
            } else if (last) {
                total0 += __shfl_xor_sync(~0u, total0, 1);
                total1 += __shfl_xor_sync(~0u, total1, 1);
                total0 += __shfl_xor_sync(~0u, total0, 2);
                total1 += __shfl_xor_sync(~0u, total1, 2);
                if (SHARES > 1 && quad == 0) {
                    storef(smem + PEAK + head * 4, peak0);
                    storef(smem + PEAK + head * 4 + 32, peak1);
                    storef(smem + TOTAL + head * 4, total0);
                    storef(smem + TOTAL + head * 4 + 32, total1);
                }
                if (SHARES == 1 && quad == 0) {
                    total0 += exp2_fast(sink0 - peak0);
                    total1 += exp2_fast(sink1 - peak1);
                    const uint32_t at = smem + INVERSE + row_turn * 256 + head * 4;
                    storef(at, 256.0f / total0);
                    storef(at + 32, 256.0f / total1);
                }
            }
            fence_async();
            __syncwarp();
            if (lane == 0) arrive(smem + P_FULL);
        }
    }
}

// A power of two that takes sums so large below 2^15.
DEVICE float room_for(float top) {
    const int exponent = int(__float_as_uint(top) >> 23) - 127;
    return __uint_as_float(uint32_t(min(127 + 14 - exponent, 253)) << 23);
}

// Give half a buffer back once all but LEFT groups of products are done.
template <int LEFT>
DEVICE void release(uint32_t smem, uint32_t buffer, int half, bool one) {
    products_wait<LEFT>();
    if (one) arrive(smem + K_EMPTY + buffer * 16 + half * 8);
}

// Two values of bf16, turned.
DEVICE uint32_t turn_pair(uint32_t x, float cos, float sin) {
    const float even = __uint_as_float(x << 16), odd = __uint_as_float(x & 0xFFFF0000u);
    return pair(__fsub_rn(__fmul_rn(even, cos), __fmul_rn(odd, sin)),
                __fadd_rn(__fmul_rn(even, sin), __fmul_rn(odd, cos)));
}

// Eight of a lane, 32 of four lanes.
DEVICE void round_words(uint32_t (&x)[4]) {
    Eight y;
    y.unpack(make_uint4(x[0], x[1], x[2], x[3]));
    y.round();
    const uint4 z = y.pack();
    x[0] = z.x, x[1] = z.y, x[2] = z.z, x[3] = z.w;
}

template <int SHARES, bool CUT, bool TURNED>
DEVICE void add(const Params& p, const CUtensorMap* out_map, uint32_t smem, int group, int warp,
                int lane) {
    const Walk w = walk_of<SHARES, CUT>(p);
    const int head = 16 * warp + lane / 4, quad = lane % 4;
    uint32_t turn = 0, row_turn = 0;
    float out[2][64];  // two products' worth: one would need more registers than a launch grants
    for (int n = 0; n < w.pieces; n++, row_turn ^= 1) {
        const Piece piece = piece_of<CUT>(w, n);
        const int row = piece.row;
        if (CUT && piece.begun) {
            await(p.flags + (blockIdx.x - 1) * PASSED + 4 * group + warp, lane == 0);
            const float* from = p.parts + (blockIdx.x - 1) * PART + (4 * group + warp) * 4096 + lane * 4;
#pragma unroll
            for (int i = 0; i < 32; i++) {
                const float4 x = load_passed(from + i * 128);
                float* to = out[i / 16] + i % 16 * 4;
                to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
            }
        }
        for (int t = piece.first; t < piece.end; t++, turn++) {
            const uint32_t buffer = turn & 1;
            const bool fresh = t == piece.first && !piece.begun;
            wait(smem + P_FULL, turn & 1);
            if (!fresh) {
                const uint32_t at = smem + FADE + buffer * 256 + head * 4;
                const float fade0 = loadf(at), fade1 = loadf(at + 32);
                if (!__all_sync(~0u, fade0 == 1.0f && fade1 == 1.0f)) {
#pragma unroll
                    for (int n = 0; n < 2; n++)
#pragma unroll
                        for (int i = 0; i < 64; i += 4) {
                            out[n][i] *= fade0;
                            out[n][i + 1] *= fade0;
                            out[n][i + 2] *= fade1;
                            out[n][i + 3] *= fade1;
                        }
                }
            }
            hold(out[0]), hold(out[1]);
            products_begin();
            const uint2 weights = describe(smem + P_AT, 16, 1024);
            const uint2 entries = describe(smem + K_AT + buffer * KEYS + group * 4096, 1024, 8192);
#pragma unroll
            for (int k = 0; k < 4; k++) {
#pragma unroll
                for (int i = 0; i < 2; i++)
                    value_product(out[i], further(weights, k * 32),
                                  further(entries, k * 16384 + i * 2048), k > 0 || !fresh);
                if (k % 2) products_commit();
            }
            if (SHARES == 1 && t == piece.end - 1 && !piece.left) {  // the buffer is given back below
                products_wait<0>();
            } else {
                release<1>(smem, buffer, 0, lane == 0);
                release<0>(smem, buffer, 1, lane == 0);
            }
            if (lane == 0) arrive(smem + P_EMPTY);
            hold(out[0]), hold(out[1]);
        }
        if (CUT && piece.left) {
            float* to = p.parts + blockIdx.x * PART + (4 * group + warp) * 4096 + lane * 4;
#pragma unroll
            for (int i = 0; i < 32; i++) {
                const float* x = out[i / 16] + i % 16 * 4;
                store_passed(to + i * 128, make_float4(x[0], x[1], x[2], x[3]));
            }
            publish(p.flags + blockIdx.x * PASSED + 4 * group + warp, lane == 0);
        } else if (SHARES == 1) {
            const uint32_t at = smem + INVERSE + row_turn * 256 + head * 4;
            const float r0 = loadf(at), r1 = loadf(at + 32);
            // The row lies where the group's half of the last keys was until it is on its way.
            const uint32_t buffer = (turn - 1) & 1;
            const uint32_t mine = smem + K_AT + buffer * KEYS + group * 4096 + warp % 2 * 2048 +
                                  warp / 2 * 8192;
            group_sync(group);
#pragma unroll
            for (int c = 0; c < 8; c++) {  // 16 heads x 32 dims
                const uint32_t line = mine + c / 2 * 16384 + lane / 4 * 128 + quad * 4;
                uint32_t low[4], high[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float* x = out[c / 4] + (c % 4 * 4 + j) * 4;
                    low[j] = pair(x[0] * r0, x[1] * r0);
                    high[j] = pair(x[2] * r1, x[3] * r1);
                }
                if (TURNED) {
                    if (c >= 6 && group) {
                        const uint32_t turn = smem + TURN + n % 3 * 256 + (c - 6) * 64 + quad * 4;
#pragma unroll
                        for (int j = 0; j < 4; j++) {
                            const float cos = loadf(turn + j * 16), sin = -loadf(turn + 128 + j * 16);
                            low[j] = turn_pair(low[j], cos, sin);
                            high[j] = turn_pair(high[j], cos, sin);
                        }
                    }
                    round_words(low);
                    round_words(high);
                }
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const uint32_t at_j = line + ((c % 2 * 4 + j ^ (lane / 4)) << 4);
                    store32(at_j, low[j]);
                    store32(at_j + 1024, high[j]);
                }
                if (c % 4 < 3) continue;
                fence_async();  // half of the row, where half of the keys were
                __syncwarp();
                if (lane == 0) {
                    for (int i = c / 2 - 1; i <= c / 2; i++)
                        store_box(out_map, group * 256 + i * 64, row * HEADS + warp * 16, mine + i * 16384);
                    stores_commit();
                }
            }
            if (lane == 0) {
                stores_read<1>();
                arrive(smem + K_EMPTY + buffer * 16);
                stores_read<0>();
                arrive(smem + K_EMPTY + buffer * 16 + 8);
            }
            __syncwarp();
        } else {
            // Sums of this share in 16 bits, relative to the row's largest. They lie where the keys were, groups of 8 swizzled by head.
            float top0 = 0.0f, top1 = 0.0f;
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int k = 0; k < 64; k += 4) {
                    top0 = fmaxf(top0, fmaxf(fabsf(out[i][k]), fabsf(out[i][k + 1])));
                    top1 = fmaxf(top1, fmaxf(fabsf(out[i][k + 2]), fabsf(out[i][k + 3])));
                }
            top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, 1));
            top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, 1));
            const float grow0 = room_for(fmaxf(top0, __shfl_xor_sync(~0u, top0, 2)));
            const float grow1 = room_for(fmaxf(top1, __shfl_xor_sync(~0u, top1, 2)));
            if (quad == 0) {
                const uint32_t at = smem + SHRINK + group * 256 + head * 4;
                storef(at, 1.0f / grow0);
                storef(at + 32, 1.0f / grow1);
            }
            adders_sync();  // no product reads the keys any more
#pragma unroll
            for (int j = 0; j < 32; j++) {
                const uint32_t at =
                    smem + K_AT + head * 1024 + group * 512 + ((j ^ (head & 7)) << 4) + quad * 4;
                const float* x = out[j / 16] + 4 * (j % 16);
                store32(at, pair16(x[0] * grow0, x[1] * grow0));
                store32(at + 8 * 1024, pair16(x[2] * grow1, x[3] * grow1));
            }
        }
    }
}

constexpr int ITEMS = HEADS * DIM / 8;  // eight sums of a head each

DEVICE uint32_t sums_at(uint32_t smem, int item) {
    return smem + K_AT + item / 32 * 512 + ((item % 32 ^ (item / 64 & 7)) << 4);
}

// What a block passes to the others of its row through memory: sums, and peaks, totals and factors.
template <int SHARES>
DEVICE void pass_on(const Params& p, uint32_t smem, int rank) {
    __syncthreads();
    float* to = p.parts + (long long)blockIdx.x * PART;
    for (int i = threadIdx.x; i < ITEMS; i += THREADS)
        if (i / THREADS % SHARES != rank) store_passed(to + i * 4, load_floats(sums_at(smem, i)));
    if (threadIdx.x < 4 * HEADS) {
        const int i = threadIdx.x, head = i % HEADS;
        to[ITEMS * 4 + i] = i < HEADS       ? loadf(smem + PEAK + head * 4)
                            : i < 2 * HEADS ? loadf(smem + TOTAL + head * 4)
                                            : loadf(smem + SHRINK + (i - 2 * HEADS) * 4);
    }
    __threadfence();
    __syncthreads();
    const int other = threadIdx.x;
    if (other < SHARES && other != rank) {
        raise(p.flags + blockIdx.x * PASSED + other);
        lower(p.flags + (blockIdx.x - rank + other) * PASSED + rank);
    }
    __syncthreads();
}

// Each block of a row adds the shares of some of the sums.
template <int SHARES>
DEVICE void combine(const Params& p, uint32_t smem, int rank, int row) {
    constexpr int STRIDE = SHARES * THREADS, EACH = (ITEMS + STRIDE - 1) / STRIDE;
    const float* passed = p.parts + (long long)(blockIdx.x - rank) * PART;
    const int first = rank * THREADS + threadIdx.x;
    float4 x[EACH][SHARES];
#pragma unroll
    for (int e = 0; e < EACH; e++)
#pragma unroll
        for (int s = 0; s < SHARES; s++) {
            const int i = first + e * STRIDE;
            if (i >= ITEMS) break;
            x[e][s] = s == rank ? load_floats(sums_at(smem, i)) : load_passed(passed + s * PART + i * 4);
        }
    if (threadIdx.x < 2 * HEADS) {  // what the shares of half a head are multiplied with
        const int head = threadIdx.x / 2, group = threadIdx.x % 2;
        float peaks[SHARES], totals[SHARES], shrinks[SHARES];
#pragma unroll
        for (int s = 0; s < SHARES; s++) {
            const float* from = passed + s * PART + ITEMS * 4 + head;
            const bool own = s == rank;
            peaks[s] = own ? loadf(smem + PEAK + head * 4) : load_passed_one(from);
            totals[s] = own ? loadf(smem + TOTAL + head * 4) : load_passed_one(from + HEADS);
            shrinks[s] = own ? loadf(smem + SHRINK + group * 256 + head * 4)
                             : load_passed_one(from + (2 + group) * HEADS);
        }
        float peak = peaks[0], total = 0.0f;
#pragma unroll
        for (int s = 1; s < SHARES; s++) peak = fmaxf(peak, peaks[s]);
#pragma unroll
        for (int s = 0; s < SHARES; s++) {
            const float fade = exp2_fast(peaks[s] - peak);
            total += fade * totals[s];
            storef(smem + P_AT + threadIdx.x * 64 + s * 4, fade * shrinks[s]);
        }
        total += exp2_fast(__ldg(p.sink + head) * LOG2_E - peak);
        storef(smem + P_AT + threadIdx.x * 64 + 60, 256.0f / total);
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int i = first + e * STRIDE;
        if (i >= ITEMS) break;
        const uint32_t at = smem + P_AT + i / 32 * 64;
        const float r = loadf(at + 60);
        float sum[8] = {};
#pragma unroll
        for (int s = 0; s < SHARES; s++) {
            const float factor = loadf(at + s * 4);
            const float words[4] = {x[e][s].x, x[e][s].y, x[e][s].z, x[e][s].w};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                sum[2 * k] += factor * low16(__float_as_uint(words[k]));
                sum[2 * k + 1] += factor * high16(__float_as_uint(words[k]));
            }
        }
        Eight y;
#pragma unroll
        for (int k = 0; k < 8; k++) y.at[k] = sum[k] * r;
        if (p.cos) {
            if (i % 64 >= 64 - PAIRS / 4) {
                const uint32_t turn = smem + TURN + (i % 64 - (64 - PAIRS / 4)) * 16;
                y.unpack(y.pack());
                y.turn(load_floats(turn), minus(load_floats(turn + 128)));
            }
            y.unpack(y.pack());
            y.round();
        }
        *reinterpret_cast<uint4*>(p.out + (long long)row * HEADS * DIM + i * 8) = y.pack();
    }
}

template <int SHARES, bool CUT, bool TURNED>
DEVICE void walk(const CUtensorMap* map, const CUtensorMap* out_map, const Params& p, uint32_t smem) {
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        init_barrier(smem + Q_FULL, SCORERS);
        init_barrier(smem + Q_EMPTY, SCORERS);
        init_barrier(smem + P_FULL, SCORERS);
        init_barrier(smem + P_EMPTY, ADDERS);
        for (int i = 0; i < 2; i++) init_barrier(smem + K_FULL + i * 8, DECODERS);
        for (int i = 0; i < 4; i++) init_barrier(smem + K_EMPTY + i * 8, ADDERS);
        barriers_made();
    }
    __syncthreads();
    previous_kernel_wait();
    next_kernel_may_start();
    if (warp < DECODERS) {
        registers_down<DECODE_REGISTERS>();
        const Walk w = walk_of<SHARES, CUT>(p);
        Decoder<SHARES, CUT>(p, w, smem, warp, lane).run();
        if (SHARES > 1) registers_up<SHARED_REGISTERS>();
    } else if (warp < DECODERS + SCORERS) {
        registers_down<SCORE_REGISTERS>();
        const Walk w = walk_of<SHARES, CUT>(p);
        if (lane == 0 && w.pieces > 0)
            load_queries(map, piece_of<CUT>(w, 0).row, smem, warp - DECODERS);
        __syncwarp();
        score<SHARES, CUT, TURNED>(p, map, smem, warp - DECODERS, lane);
        if (SHARES > 1) registers_up<SHARED_REGISTERS>();
    } else {
        registers_up<ADD_REGISTERS>();
        const int place = warp - DECODERS - SCORERS;
        add<SHARES, CUT, TURNED>(p, out_map, smem, place / 4, place % 4, lane);
        if (SHARES > 1) registers_down<SHARED_REGISTERS>();
    }
}

uint32_t inverse(int count) {  // of at least 2
    return uint32_t(((1ull << 32) + count - 1) / count);
}

Params params(const void* window, const void* window_idx, const void* main, const void* main_idx,
              const void* sink, void* out, long long rows, long long window_slots,
              long long main_slots, long long window_entries, long long window_block,
              long long main_entries, long long main_block, double scale, void* parts, void* flags,
              const void* cos, const void* sin) {
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
    p.window_inverse = inverse(p.window_entries);
    p.main_inverse = inverse(p.main_entries);
    p.rows = int(rows);
    p.window_slots = int(window_slots);
    p.main_slots = int(main_slots);
    p.parts = static_cast<float*>(parts);
    p.flags = static_cast<uint32_t*>(flags);
    p.cos = static_cast<const float*>(cos);
    p.sin = static_cast<const float*>(sin);
    p.scale = float(scale * 256.0 * 1.4426950408889634);
    return p;
}

}  // namespace

#ifdef __CUDACC__

namespace {

template <int SHARES, bool CUT = false, bool TURNED = false>
__global__ void __launch_bounds__(THREADS, 1)
    attend(const __grid_constant__ CUtensorMap map, const __grid_constant__ CUtensorMap out_map,
           const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t smem = uint32_t(__cvta_generic_to_shared(shared));
    if (smem % 1024) __trap();
    walk<SHARES, CUT, TURNED>(&map, &out_map, p, smem);
    if constexpr (SHARES > 1) {
        pass_on<SHARES>(p, smem, blockIdx.x % SHARES);
        combine<SHARES>(p, smem, blockIdx.x % SHARES, blockIdx.x / SHARES);
    }
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

template <int SHARES, bool CUT = false, bool TURNED = false>
cudaError_t start(const CUtensorMap& map, const CUtensorMap& out_map, const Params& p, int grid,
                  cudaStream_t stream) {
    const auto kernel = attend<SHARES, CUT, TURNED>;
    const auto ready = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM);
    if (ready != cudaSuccess) return ready;
    return LAUNCH_NEXT(kernel, dim3(grid), dim3(THREADS), int(SMEM), stream, map, out_map, p);
}

}  // namespace

// Returns a CUDA error code. Strides in bytes; `shares` CTAs take one row. `parts` and `flags`, which are 0
// and are left 0, have room for a CTA a processor: rows are cut with them so that all CTAs have like much,
// and shares meet there. `cos` and `sin` [rows, 32] turn queries, and results back, which are rounded with
// ACT8 then.
extern "C" int paged_attention(void* q, const void* window, const void* window_idx, const void* main,
                               const void* main_idx, const void* sink, void* out, long long rows,
                               long long window_slots, long long main_slots, long long window_entries,
                               long long window_block, long long main_entries, long long main_block,
                               long long shares, double scale, void* parts, void* flags,
                               const void* cos, const void* sin, void* stream) {
    static Encode encode = [] {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult status;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                         &status);
        return reinterpret_cast<Encode>(found);
    }();
    if (!encode) return cudaErrorNotSupported;
    CUtensorMap map, out_map;
    const cuuint64_t sizes[2] = {DIM, cuuint64_t(rows) * HEADS}, strides[1] = {DIM * 2};
    auto boxes = [&](CUtensorMap* to, void* values, cuuint32_t heads) {
        const cuuint32_t box[2] = {64, heads}, steps[2] = {1, 1};
        return encode(to, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, values, sizes, strides, box, steps,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    if (boxes(&map, q, HEADS) || boxes(&out_map, out, 16)) return cudaErrorInvalidValue;
    const Params p = params(window, window_idx, main, main_idx, sink, out, rows, window_slots,
                            main_slots, window_entries, window_block, main_entries, main_block,
                            scale, parts, flags, cos, sin);
    auto s = static_cast<cudaStream_t>(stream);
    static int processors = [] {
        int device = 0, count = 0;
        cudaGetDevice(&device);
        cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
        return count;
    }();
    if (shares == 1) {
        const int grid = p.rows < processors ? p.rows : processors;
        const bool cut = parts && p.rows >= processors;
        return cut ? p.cos ? start<1, true, true>(map, out_map, p, grid, s)
                           : start<1, true>(map, out_map, p, grid, s)
               : p.cos ? start<1, false, true>(map, out_map, p, grid, s)
                       : start<1>(map, out_map, p, grid, s);
    }
    const int grid = p.rows * int(shares);
    if (!parts || grid > processors) return cudaErrorInvalidValue;  // CTAs would wait for each other
    if (shares == 2) return start<2>(map, out_map, p, grid, s);
    if (shares == 3) return start<3>(map, out_map, p, grid, s);
    if (shares == 4) return start<4>(map, out_map, p, grid, s);
    if (shares == 5) return start<5>(map, out_map, p, grid, s);
    if (shares == 10) return start<10>(map, out_map, p, grid, s);
    return cudaErrorInvalidValue;
}

#endif
