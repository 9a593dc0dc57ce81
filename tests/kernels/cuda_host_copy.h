// Asynchronous copies for cuda_host.h, done at once.
#pragma once

#include "cuda_host.h"

inline void copy16(void* to, const void* from) { std::memcpy(to, from, 16); }
inline void copy4(void* to, const void* from) { std::memcpy(to, from, 4); }
inline void copies_end() {}
template <int N>
void copies_wait() {}
