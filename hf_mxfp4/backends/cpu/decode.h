// SPDX-License-Identifier: Apache-2.0
// Codes to values, a block at a time, in the order in which the nibbles of its bytes give them.

#pragma once

#include "blocks.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

// The values of the 16 codes.
constexpr float kGrid[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

// Values of a block: those of even index, then those of odd index, as the nibbles of its bytes give them.
struct Pair {
    Floats even, odd;
};

inline Block together(const Pair& x) {
#ifdef __clang__
    return {{__builtin_shufflevector(x.even, x.odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
             __builtin_shufflevector(x.even, x.odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)}};
#else
    return {{__builtin_shuffle(x.even, x.odd, Ints{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}),
             __builtin_shuffle(x.even, x.odd, Ints{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31})}};
#endif
}

inline Floats decode(Halves codes) {
    const Words wide = __builtin_convertvector(codes, Words);
    const Words magnitude = wide & 7;
    // Exponent and mantissa as they stand from 1 up; 0 and 0.5, the subnormal, apart.
    const Words bits = magnitude > 1 ? (magnitude + 252) << 22 : (magnitude == 1 ? Words{} + 0x3F000000 : Words{});
    return as_floats(reinterpret_cast<Ints>(bits | ((wide & 8) << 28)));
}

inline Block decode_block(const uint8_t* p, int64_t count) {
    Bytes packed = {};
    if (count >= kBlock)
        std::memcpy(&packed, p, sizeof packed);
    else
        std::memcpy(&packed, p, static_cast<size_t>((count + 1) / 2));
    const Words bytes = __builtin_convertvector(__builtin_convertvector(packed, Halves), Words);
    const Words pairs = (bytes | (bytes << 12)) & 0x000F000F;
    Halves codes[2];
    std::memcpy(codes, &pairs, sizeof pairs);
    return {{decode(codes[0]), decode(codes[1])}};
}

inline Block decode_block(const uint8_t* codes, int64_t count, int byte) {
    Block value = times(decode_block(codes, count), scale_value(byte));
    if (byte > 252) value = {{clamp(value.part[0], kMaxFloat), clamp(value.part[1], kMaxFloat)}};
    return value;
}

#ifdef __AVX512F__
inline Floats grid_table() {
    Floats table;
    std::memcpy(&table, kGrid, sizeof table);
    return table;
}

// What a table of 16 floats has for the codes in 16 bytes.
inline Pair look_up(const uint8_t* p, Floats values) {
    Bytes packed;
    std::memcpy(&packed, p, sizeof packed);
    const __m512 table = reinterpret_cast<__m512>(values);
    const __m512i bytes = _mm512_cvtepu8_epi32(reinterpret_cast<__m128i>(packed));
    // Permutations read the lower four bits of an index.
    return {reinterpret_cast<Floats>(_mm512_permutexvar_ps(bytes, table)),
            reinterpret_cast<Floats>(_mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table))};
}
#endif

// Whether the quotients of values of this scale by a macro factor are normal numbers, and none saturates up to the
// largest byte given.
inline bool is_ordinary(int byte, int largest) { return byte >= 4 && byte <= largest; }

}  // namespace
