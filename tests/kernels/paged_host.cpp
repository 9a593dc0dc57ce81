// The attention kernel for Hopper on a CPU: a library with the launcher's name and arguments.
#include "../../src/deepinfer/kernels/paged_attention/sm90.cu"

namespace {

template <int SHARES, bool CUT = false, bool TURNED = false>
void run(const CUtensorMap& map, const CUtensorMap& out_map, const Params& p, int grid) {
  for (int first = 0; first < grid; first += SHARES) {  // the blocks of a row at a time
    host::barriers.clear();
    host::adders.clear();
    host::groups.clear();
    host::launch_together(SHARES, THREADS, SMEM, [&] {
      const int rank = static_cast<int>(&host::block() - host::blocks.data());
      host::block().id.x = first + rank;
      host::grid_size.x = grid;
      walk<SHARES, CUT, TURNED>(&map, &out_map, p, 0);
      if (SHARES > 1) {
        pass_on<SHARES>(p, 0, rank);
        combine<SHARES>(p, 0, rank, first / SHARES);
      }
    });
  }
}

}  // namespace

extern "C" int paged_attention(void* q, const void* window, const void* window_idx, const void* main,
                               const void* main_idx, const void* sink, void* out, long long rows,
                               long long window_slots, long long main_slots,
                               long long window_entries, long long window_block,
                               long long main_entries, long long main_block, long long shares,
                               double scale, long long processors, const void* cos,
                               const void* sin) {
  const CUtensorMap map{static_cast<const uint16_t*>(q)}, to{static_cast<const uint16_t*>(out)};
  const auto blocks = std::max(processors, 10 * rows);
  std::vector<float> parts(blocks * PART + 4);
  std::vector<uint32_t> flags(blocks * PASSED);
  const Params p = params(window, window_idx, main, main_idx, sink, out, rows, window_slots,
                          main_slots, window_entries, window_block, main_entries, main_block, scale,
                          shares == 1 ? nullptr : parts.data(), flags.data(), cos, sin);
  const int few = rows < processors ? rows : processors;
  if (shares == 0 && !cos) run<1, true>(map, to, p, processors);
  if (shares == 0 && cos) run<1, true, true>(map, to, p, processors);
  if (shares == 1 && !cos) run<1>(map, to, p, few);
  if (shares == 1 && cos) run<1, false, true>(map, to, p, few);
  if (shares == 2) run<2>(map, to, p, 2 * rows);
  if (shares == 3) run<3>(map, to, p, 3 * rows);
  if (shares == 4) run<4>(map, to, p, 4 * rows);
  if (shares == 5) run<5>(map, to, p, 5 * rows);
  if (shares == 10) run<10>(map, to, p, 10 * rows);
  for (uint32_t flag : flags)
    if (flag) return 1;
  return 0;
}

// Floats and flags of what a block passes on.
extern "C" void passed_sizes(int* to) {
  to[0] = PART;
  to[1] = PASSED;
}

// Every code with every scale byte, as bf16 bits: [256 scales][16 codes] and [256 scales][256 codes].
extern "C" void decoded(uint16_t* main, uint16_t* window) {
  for (uint32_t scale = 0; scale < 256; ++scale) {
    for (uint32_t half = 0; half < 2; ++half) {
      uint32_t out[4];
      decode_main(half ? 0xFEDCBA98u : 0x76543210u, main_scale(scale), out);
      std::memcpy(main + scale * 16 + half * 8, out, 16);
    }
    for (uint32_t code = 0; code < 256; code += 8) {
      uint32_t out[4];
      const uint32_t low = 0x03020100u + code * 0x01010101u;
      decode_window({low, low + 0x04040404u}, window_scale(scale), out);
      std::memcpy(window + scale * 256 + code, out, 16);
    }
  }
}
