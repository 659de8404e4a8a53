// SPDX-License-Identifier: Apache-2.0
// Products of rows with packed weights: what is common to the ways to compute a tile of them.
//
// A row of a weight is read in groups of 16 blocks. Of each group a tile reads the scales first, with all factors of
// their blocks in them, as floats. Blocks whose scale byte is so large that their values may saturate are rare: their
// scale counts as zero, and what they add is added apart.

#pragma once

#include "lanes.h"

namespace {

constexpr int kGroup = 16;                        // blocks
constexpr int kGroupBytes = kGroup * kBlock / 2;  // of codes
constexpr int kColumns = 16;                      // of the output, that are written together
constexpr int kMostRows = 8;                      // of a tile
constexpr int kLargestByte = 250;

// The weights of all experts, or the one weight, in rows of `length`.
struct Weight {
    const uint8_t *codes, *scale, *macro, *residual_codes, *residual_scale;
    int64_t length;
    const Scheme* scheme;

    int64_t blocks() const { return (length + kBlock - 1) / kBlock; }
    int64_t code_bytes() const { return (length + 1) / 2; }
    int64_t groups() const { return (blocks() + kGroup - 1) / kGroup; }
    int64_t macros() const { return (blocks() + scheme->macro_blocks - 1) / scheme->macro_blocks; }
};

struct Span {
    int64_t first, last;
};

// Rows of x in the order in which a kernel reads them, zeros where there are none.
struct Tile {
    const char* ordered;
    int64_t first;  // row of x and of the output
    int rows;       // that exist
    int capacity;   // that the kernel computes
};

// Scale bytes; that of 1 where there is none, since the least, a subnormal number, is slow to multiply with.
inline Bytes first_bytes(const uint8_t* p, int64_t count) {
    Bytes bytes = Bytes{} + 127;
    if (count >= kGroup)
        std::memcpy(&bytes, p, sizeof bytes);
    else
#ifdef __AVX512BW__
        bytes = reinterpret_cast<Bytes>(
            _mm_mask_loadu_epi8(reinterpret_cast<__m128i>(bytes), static_cast<__mmask16>((1u << count) - 1), p));
#else
        for (int64_t i = 0; i < count; ++i) bytes[i] = p[i];
#endif
    return bytes;
}

inline Words wide(Bytes bytes) { return __builtin_convertvector(__builtin_convertvector(bytes, Halves), Words); }

inline bool any(Ints mask) {
#ifdef __AVX512F__
    return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(mask), reinterpret_cast<__m512i>(mask)) != 0;
#else
    int32_t found = 0;
    for (int i = 0; i < kLanes; ++i) found |= mask[i];
    return found != 0;
#endif
}

struct InverseFactors {
    float of[256];
};

constexpr InverseFactors make_inverse_factors() {
    InverseFactors all{};
    for (int m8 = 0; m8 < 256; ++m8) all.of[m8] = 256.0f / static_cast<float>(256 + m8);
    return all;
}

constexpr InverseFactors kInverseFactors = make_inverse_factors();

// The four macro bytes of a group, where a macro block is four blocks.
inline uint32_t four_macros(const Weight& w, int64_t row, int64_t group) {
    const int64_t left = w.macros() - group * (kGroup / 4);
    const uint8_t* macro = w.macro + row * w.macros() + group * (kGroup / 4);
    uint32_t packed = 0;
    if (left >= 4)
        std::memcpy(&packed, macro, 4);
    else
        for (int64_t i = 0; i < left; ++i) packed |= static_cast<uint32_t>(macro[i]) << (8 * i);
    return packed;
}

// The mantissas of the blocks of a group, under block mantissas.
inline Words block_mantissas(const Weight& w, int64_t row, int64_t group) {
    const Words shift = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    return ((Words{} + four_macros(w, row, group)) >> shift) & 3;
}

// What the values of the blocks of a group are multiplied with under macro factors.
inline Floats macro_factors(const Weight& w, int64_t row, int64_t group) {
    const Floats one = splat(1.0f);
    const auto floats = [](Words x) { return __builtin_convertvector(reinterpret_cast<Ints>(x), Floats); };
    if (w.scheme->search == kBlockwise) return floats(block_mantissas(w, row, group)) * 0.25f + one;
    const int64_t per_macro = w.scheme->macro_blocks, first = group * kGroup;
    if (per_macro == 4) {
        const uint32_t four = four_macros(w, row, group);
        const float* table = kInverseFactors.of;
        const float a = table[four & 255], b = table[(four >> 8) & 255], c = table[(four >> 16) & 255], d = table[four >> 24];
        return Floats{a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d};
    }
    const uint8_t* macro = w.macro + row * w.macros() + first / per_macro;
    Floats factor = one;
    for (int64_t i = 0; i < kGroup && first + i < w.blocks(); ++i)
        factor[i] = kInverseFactors.of[macro[(first + i) / per_macro - first / per_macro]];
    return factor;
}

// The scales of a group in one pass (0: the weight, 1: its residual).
inline Floats group_scales(const Weight& w, int64_t row, int64_t group, int pass) {
    const int64_t at = row * w.blocks() + group * kGroup, count = w.blocks() - group * kGroup;
    const bool fallback = w.scheme->fallback;
    const Bytes main = first_bytes(w.scale + at, count);
    const Bytes residual = fallback ? first_bytes(w.residual_scale + at, count) : main;
    const Bytes largest = main > residual ? main : residual;
    const float unit = pass ? w.scheme->alpha : 1;
    Floats scale;
#ifdef __AVX512F__
    Words bits = wide(pass ? residual : main) << 23;
    bits = bits > 0x00400000 ? bits : Words{} + 0x00400000;
    scale = as_floats(reinterpret_cast<Ints>(wide(largest) > kLargestByte ? Words{} : bits)) * unit;
#elif defined(MXFP4_AVX2)
    const __m128i found = reinterpret_cast<__m128i>(pass ? residual : main), most = reinterpret_cast<__m128i>(largest);
    const __m128i rare = _mm_cmpeq_epi8(_mm_max_epu8(most, _mm_set1_epi8(static_cast<char>(kLargestByte + 1))), most);
    __m256 half[2];
    for (int i = 0; i < 2; ++i) {
        const __m256i byte = _mm256_cvtepu8_epi32(i ? _mm_srli_si128(found, 8) : found);
        const __m256i bits = _mm256_max_epi32(_mm256_slli_epi32(byte, 23), _mm256_set1_epi32(0x00400000));
        const __m256i hidden = _mm256_cvtepi8_epi32(i ? _mm_srli_si128(rare, 8) : rare);
        half[i] = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_andnot_si256(hidden, bits)), _mm256_set1_ps(unit));
    }
    std::memcpy(&scale, half, sizeof scale);
#else
    uint8_t bytes[kGroup], most[kGroup];
    float factors[kGroup];
    std::memcpy(bytes, pass ? &residual : &main, sizeof bytes);
    std::memcpy(most, &largest, sizeof most);
    for (int i = 0; i < kGroup; ++i) {
        uint32_t bits = static_cast<uint32_t>(bytes[i]) << 23;
        bits = bits > 0x00400000 ? bits : 0x00400000;
        factors[i] = as_float(most[i] > kLargestByte ? 0 : bits) * unit;
    }
    std::memcpy(&scale, factors, sizeof scale);
#endif
    if (w.scheme->search != kNone) scale *= macro_factors(w, row, group);
    return scale;
}

// Whether a row of a weight has rare blocks.
inline bool has_rare(const Weight& w, int64_t row) {
    Bytes largest = {};
    for (const uint8_t* scale : {w.scale, w.residual_scale})
        for (int64_t b = 0; scale != nullptr && b < w.blocks(); b += kGroup) {
            const Bytes found = first_bytes(scale + row * w.blocks() + b, w.blocks() - b);
            largest = found > largest ? found : largest;
        }
    return any(reinterpret_cast<Ints>(wide(largest) > kLargestByte));
}

// The values of one block.
inline Block block_values(const Weight& w, int64_t row, int64_t b) {
    const int64_t at = row * w.blocks() + b, byte = row * w.code_bytes() + b * kBlock / 2, left = w.length - b * kBlock;
    Block value = decode_block(w.codes + byte, left, w.scale[at]);
    if (w.scheme->fallback)
        value = plus(value,
                     times(decode_block(w.residual_codes + byte, left, w.residual_scale[at]), w.scheme->alpha));
    if (w.scheme->search == kNone) return value;
    const uint8_t macro = w.macro[row * w.macros() + b / w.scheme->macro_blocks];
    if (w.scheme->search != kBlockwise) return over(value, macro_factor(macro));
    value = times(value, mantissa_factor((macro >> (2 * (b % 4))) & 3));
    return {{clamp(value.part[0], kMaxFloat), clamp(value.part[1], kMaxFloat)}};
}

// Adds what the rare blocks of a row of a weight add to the sums of a column, or all blocks, for each row of a tile.
__attribute__((noinline)) void add_rare(const Matrix& x, const Tile& tile, const Weight& w, int64_t row, bool all,
                                        float* sums) {
    for (int64_t b = 0; b < w.blocks(); ++b) {
        const int64_t at = row * w.blocks() + b;
        if (!all && w.scale[at] <= kLargestByte && !(w.scheme->fallback && w.residual_scale[at] > kLargestByte))
            continue;
        const Block value = block_values(w, row, b);
        for (int m = 0; m < tile.rows; ++m) {
            const Block own = load_block(x.type, x.at(tile.first + m, b * kBlock), x.length - b * kBlock);
            for (int part = 0; part < 2; ++part)
                for (int j = 0; j < kLanes && b * kBlock + part * kLanes + j < w.length; ++j)
                    sums[m * kColumns] += own.part[part][j] * value.part[part][j];
        }
    }
}

}  // namespace
