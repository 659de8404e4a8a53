// SPDX-License-Identifier: Apache-2.0
// Sixteen floats at a time for products, with fused multiply-adds: AVX-512, AVX2, or the compiler's own vectors.

#pragma once

#include "blocks.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define MXFP4_AVX2 1
#endif

namespace {

// The values of the 16 codes.
constexpr float kGrid[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

#if defined(__AVX512F__)

struct Lanes {
    __m512 all;
};

inline Lanes zero_lanes() { return {_mm512_setzero_ps()}; }
inline Lanes lanes_at(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Lanes lanes_of(float x) { return {_mm512_set1_ps(x)}; }
inline Lanes times(Lanes x, Lanes y) { return {_mm512_mul_ps(x.all, y.all)}; }
inline Lanes times_plus(Lanes x, Lanes y, Lanes sum) { return {_mm512_fmadd_ps(x.all, y.all, sum.all)}; }
inline float sum_of(Lanes x) { return _mm512_reduce_add_ps(x.all); }

// The elements of a block in the order in which `grid_values` gives them.
constexpr int kOrder[kBlock] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};

// Grid values of a block.
inline void grid_values(const uint8_t* codes, Lanes& even, Lanes& odd) {
    const __m512 table = _mm512_loadu_ps(kGrid);
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    // Permutations read the lower four bits of an index.
    even = {_mm512_permutexvar_ps(bytes, table)};
    odd = {_mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table)};
}

#elif defined(MXFP4_AVX2)

struct Lanes {
    __m256 low, high;
};

inline Lanes zero_lanes() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Lanes lanes_at(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Lanes lanes_of(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Lanes times(Lanes x, Lanes y) { return {_mm256_mul_ps(x.low, y.low), _mm256_mul_ps(x.high, y.high)}; }
inline Lanes times_plus(Lanes x, Lanes y, Lanes sum) {
    return {_mm256_fmadd_ps(x.low, y.low, sum.low), _mm256_fmadd_ps(x.high, y.high, sum.high)};
}
inline float sum_of(Lanes x) {
    const __m256 both = _mm256_add_ps(x.low, x.high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

// The elements of a block in the order in which `grid_values` gives them.
constexpr int kOrder[kBlock] = {0,  4,  8,  12, 1,  5,  9,  13, 2,  6,  10, 14, 3,  7,  11, 15,
                                16, 20, 24, 28, 17, 21, 25, 29, 18, 22, 26, 30, 19, 23, 27, 31};

// By two tables of bytes: the upper halves of floats.
inline void grid_values(const uint8_t* codes, Lanes& first, Lanes& second) {
    const __m256i upper = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40, -0x80, -0x41, -0x41, -0x41, -0x40, -0x40, -0x40, -0x40));
    const __m256i lower = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0, -0x80, -0x40, 0, 0x40, -0x80, -0x40, 0, 0, -0x80, -0x40, 0, 0x40, -0x80, -0x40));
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m256i nibbles =
        _mm256_and_si256(_mm256_srlv_epi32(both, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4)), _mm256_set1_epi8(15));
    const __m256i high = _mm256_shuffle_epi8(upper, nibbles), low = _mm256_shuffle_epi8(lower, nibbles);
    const __m256i words[2] = {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
    Lanes* found[2] = {&first, &second};
    for (int i = 0; i < 2; ++i) {
        found[i]->low = _mm256_castsi256_ps(_mm256_slli_epi32(words[i], 16));
        found[i]->high = _mm256_castsi256_ps(_mm256_and_si256(words[i], _mm256_set1_epi32(-0x10000)));
    }
}

#else

// The elements of a block in the order in which `grid_values` gives them.
constexpr int kOrder[kBlock] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};

struct GridPairs {
    float of[256][2];
};

constexpr GridPairs make_grid_pairs() {
    GridPairs all{};
    for (int byte = 0; byte < 256; ++byte) all.of[byte][0] = kGrid[byte % 16], all.of[byte][1] = kGrid[byte / 16];
    return all;
}

constexpr GridPairs kPairs = make_grid_pairs();

struct Lanes {
    Floats all;
};

inline Lanes zero_lanes() { return {Floats{}}; }
inline Lanes lanes_at(const float* p) {
    Lanes x;
    std::memcpy(&x.all, p, sizeof x.all);
    return x;
}
inline Lanes lanes_of(float x) { return {splat(x)}; }
inline Lanes times(Lanes x, Lanes y) { return {x.all * y.all}; }
inline Lanes times_plus(Lanes x, Lanes y, Lanes sum) {
#ifdef __FP_FAST_FMAF
    for (int i = 0; i < kLanes; ++i) sum.all[i] = __builtin_fmaf(x.all[i], y.all[i], sum.all[i]);
    return sum;
#else
    return {x.all * y.all + sum.all};
#endif
}
inline float sum_of(Lanes x) {
    float total[kLanes];
    std::memcpy(total, &x.all, sizeof total);
    for (int step = kLanes / 2; step > 0; step /= 2)
        for (int i = 0; i < step; ++i) total[i] += total[i + step];
    return total[0];
}

// By a table of pairs.
inline void grid_values(const uint8_t* codes, Lanes& first, Lanes& second) {
    float values[kBlock];
    for (int i = 0; i < kLanes; ++i) std::memcpy(values + 2 * i, kPairs.of[codes[i]], 2 * sizeof(float));
    first = lanes_at(values), second = lanes_at(values + kLanes);
}

#endif

}  // namespace
