// Asynchronous copies for cuda_host.h, done at once.
#pragma once

#include "cuda_host.h"

inline void copy16(void* to, const void* from) { std::memcpy(to, from, 16); }
inline void copy4(void* to, const void* from) { std::memcpy(to, from, 4); }
inline void copies_end() {}
template <int N>
void copies_wait() {}

inline void barrier_begin(uint64_t*) {}
inline void barriers_seen() {}
inline void reads_before_copies() {}
inline void barrier_wait(uint64_t*, uint32_t) {}
inline void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t*) {
  std::memcpy(to, from, bytes);
}

inline void signals_begin(uint64_t* barrier, uint32_t count) { *barrier = uint64_t{count} << 32; }
inline void signal(uint64_t* barrier) { ++*barrier; ++host::progress; }
inline void signals_wait(uint64_t* barrier, uint32_t phase) {
  while (((*barrier & 0xFFFFFFFFu) / (*barrier >> 32) & 1) == phase) host::leave();
}
