// Packed codes to tensor operands, on the host too, for exhaustive tests.
#pragma once

typedef unsigned u32;
typedef unsigned long long u64;

// 8 e2m1 values -> 8 e4m3 bytes. word: magnitudes in the low 3 bits of each nibble, the signs of
// values 0..3 in bits 7, 15, 23, 31 and of 4..7 in bits 3, 11, 19, 27. step: 8 * (binade above the
// lowest of the row), so that the table of magnitudes 0 .5 1 1.5 2 3 4 6 is shifted by an addition.
__host__ __device__ inline u32 permute(u32 low, u32 high, u32 selector) {
#ifdef __CUDA_ARCH__
  u32 out;  // not the intrinsic, which masks the selector first
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
  return out;
#else
  u64 both = (u64(high) << 32) | low;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 which = selector >> (4 * i) & 15, byte = u32(both >> (8 * (which & 7))) & 255;
    out |= (which & 8 ? byte >> 7 ? 255u : 0u : byte) << (8 * i);
  }
  return out;
#endif
}

// (word & mask) | bits
__host__ __device__ inline u32 pick(u32 word, u32 mask, u32 bits) {
#ifdef __CUDA_ARCH__
  u32 out;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(word), "r"(mask), "r"(bits));
  return out;
#else
  return (word & mask) | bits;
#endif
}

// Integer dot products run beside bit operations, which bound decoding: the upper half of a word, ...
__host__ __device__ inline u32 upper_half(u32 word) {
#ifdef __CUDA_ARCH__
  u32 out;
  asm("dp2a.lo.u32.u32 %0, %1, 256, 0;" : "=r"(out) : "r"(word));
  return out;
#else
  return word >> 16;
#endif
}

// ... and one of its bytes.
template <int I>
__host__ __device__ inline u32 byte_of(u32 word) {
#ifdef __CUDA_ARCH__
  u32 out;
  asm("dp4a.u32.u32 %0, %1, %2, 0;" : "=r"(out) : "r"(word), "n"(1 << (8 * I)));
  return out;
#else
  return word >> (8 * I) & 255;
#endif
}

__host__ __device__ inline void fp4_to_fp8(u32 word, u32 step, u32& first, u32& second) {
  const u32 low = 0x14100800u + step * 0x01010100u;
  const u32 high = 0x24201C18u + step * 0x01010101u;
  const u32 magnitude = word & 0x77777777u;
  first = pick(word, 0x80808080u, permute(low, high, magnitude));
  second = pick(word << 4, 0x80808080u, permute(low, high, upper_half(magnitude)));
}

// 8 e2m1 values -> 4 pairs of bf16, times 2^-126. word: nibbles 2i and 2i + 1 of its 16-bit halves
// hold (low exponent bit, mantissa) and (sign, high exponent bit) in their low or high two bits.
// low: PAIR_BYTES, from memory, or the compiler copies the constant for each use.
constexpr u32 PAIR_BYTES = 0xC0804000u;
__host__ __device__ inline void fp4_to_pairs(u32 word, u32 low, u32 out[4]) {
  const u32 high = 0x81800100u;
  const u32 first = pick(word, 0x33333333u, 0x40404040u);
  const u32 second = pick(word >> 2, 0x33333333u, 0x40404040u);
  out[0] = permute(low, high, first);
  out[1] = permute(low, high, upper_half(first));
  out[2] = permute(low, high, second);
  out[3] = permute(low, high, upper_half(second));
}

// 4 e4m3 codes -> 2 pairs of bf16, times 2^-120. A half of the word holds a code of the first pair, its
// sign and magnitude where bf16 has them, and around it one of the second: sign and magnitude in bits
// 11, 14..12 and 3..0.
__host__ __device__ inline void fp8_to_pairs(u32 word, u32& first, u32& second) {
  first = word & 0x87F087F0u;
  second = pick(word << 4, 0x80F080F0u, word >> 4 & 0x07000700u);
}
