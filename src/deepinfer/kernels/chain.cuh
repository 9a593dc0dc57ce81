// Launches that may begin while the kernel before them ends, on SM90.
#pragma once

#ifdef HOST_TWIN
inline void previous_kernel_wait() {}
inline void next_kernel_may_start() {}
#define LAUNCH_NEXT LAUNCH
#else
// Nothing that another kernel writes is touched before this.
__device__ inline void previous_kernel_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ inline void next_kernel_may_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
template <typename... Parameters, typename... Arguments>
cudaError_t launch_next(void (*kernel)(Parameters...), dim3 grid, dim3 block, int shared,
                        cudaStream_t stream, Arguments... arguments) {
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[0].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = block;
  config.dynamicSmemBytes = static_cast<size_t>(shared), config.stream = stream;
  config.attrs = attribute, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}
#define LAUNCH_NEXT(kernel, grid, block, shared, stream, ...) \
  launch_next(kernel, grid, block, shared, stream, __VA_ARGS__)
#endif
