// Launchers of routed experts, one per schedule.
#include <cuda_runtime.h>

#include "experts.cuh"

#define LAUNCHER(name, ...)                                                                         \
  extern "C" int name(const void* x, const void* token_scale, const void* up, const void* up_scale, \
                      const void* down, const void* down_scale, const void* offsets,                \
                      const void* routed, void* gate_up, void* hidden, void* hidden_scale,          \
                      void* out, void* state, long long experts, long long dim, long long inner,    \
                      long long rows, long long least, long long most, double limit,                \
                      long long quantize, long long blocks, void* stream) {                         \
    return launch_experts<Kernel<__VA_ARGS__>>(                                                     \
        chain<Kernel<__VA_ARGS__>>(x, token_scale, up, up_scale, down, down_scale, offsets, routed, \
                                   gate_up, hidden, hidden_scale, out, state, experts, dim, inner,  \
                                   rows, least, most, limit, quantize),                             \
        blocks, stream);                                                                            \
  }

#include "experts_schedules.cuh"
