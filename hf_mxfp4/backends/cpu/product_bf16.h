// SPDX-License-Identifier: Apache-2.0
// Tiles of products of bfloat16 inputs on processors with AVX-512 BF16: grid values are bfloat16 numbers, and the
// processor multiplies pairs of those and adds up in float32. Subnormal inputs count as zero there.

#pragma once

#include "product.h"

#ifdef __AVX512BF16__

namespace {

// Of the grid, for indices of five bits: twice, so that the fifth bit does not matter; and what a block's mantissa makes
// of it, for indices of six bits.
struct Grids {
    alignas(64) uint16_t twice[32];
    alignas(64) uint16_t scaled[64];
    alignas(64) uint16_t places[32];
};

constexpr Grids make_grids() {
    constexpr uint16_t grid[8] = {0, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0};
    // Those numbers times 1.25, 1.5 and 1.75.
    constexpr uint16_t more[3][8] = {{0, 0x3F20, 0x3FA0, 0x3FF0, 0x4020, 0x4070, 0x40A0, 0x40F0},
                                     {0, 0x3F40, 0x3FC0, 0x4010, 0x4040, 0x4090, 0x40C0, 0x4110},
                                     {0, 0x3F60, 0x3FE0, 0x4028, 0x4060, 0x40A8, 0x40E0, 0x4128}};
    Grids all{};
    for (int code = 0; code < 16; ++code) {
        const uint16_t sign = code < 8 ? 0 : 0x8000;
        for (int i = 0; i < 2; ++i) {
            all.twice[16 * i + code] = static_cast<uint16_t>(grid[code % 8] | sign);
            all.places[16 * i + code] = static_cast<uint16_t>(code);
        }
        for (int m = 0; m < 4; ++m)
            all.scaled[16 * m + code] = static_cast<uint16_t>((m == 0 ? grid[code % 8] : more[m - 1][code % 8]) | sign);
    }
    return all;
}

constexpr Grids kGrids = make_grids();

struct BFloat16Kernel {
    static constexpr int kUnit = 2 * kBlock;  // elements of a row that lie together
    static constexpr int kUnitBytes = kUnit * 2;
    static constexpr int kMostRows = 8;

    static constexpr int columns(int) { return 4; }

    // A unit of a row: elements of even index, then those of odd index.
    static void order(const Matrix& x, int64_t row, int64_t at, char* out) {
        const char* from = x.at(row, at);
        char padded[kUnitBytes] = {};
        if (x.length - at < kUnit) {
            std::memcpy(padded, from, static_cast<size_t>(2 * (x.length - at)));
            from = padded;
        }
        for (int i = 0; i < 2; ++i) {
            const __m512i pairs = _mm512_loadu_si512(from + 64 * i);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 32 * i), _mm512_cvtepi32_epi16(pairs));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 64 + 32 * i),
                                _mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)));
        }
    }

    template <int kRows>
    static void tile(const Tile& tile, const Weight& w, const int64_t* rows, Span groups, float* sums) {
        bool folds = kRows > 1 && !w.scheme->fallback && (w.scheme->search == kNone || w.scheme->macro_blocks == 4);
        for (int n = 0; n < columns(kRows) && folds; ++n) folds = is_ordinary_row(w, w.scale, rows[n]);
        if (!folds) return add_all<kRows, kFactors>(tile, w, rows, groups, sums);
        if constexpr (kRows > 1) {
            if (w.scheme->search == kNone) return add_all<kRows, kPowers>(tile, w, rows, groups, sums);
            if (w.scheme->search == kBlockwise) return add_all<kRows, kMantissas>(tile, w, rows, groups, sums);
            return add_all<kRows, kMacro>(tile, w, rows, groups, sums);
        }
    }

    // How the scales of blocks come in: as factors of partial sums, whatever they are; or in the table of the grid's
    // values, with a power of two or also a mantissa, and the factor of a macro block of four on partial sums.
    enum Way { kFactors, kPowers, kMantissas, kMacro };

    // Columns at a time, for which there are registers.
    static constexpr int width(int rows, Way way) { return rows == 8 || (rows == 4 && way == kMacro) ? 2 : 4; }

    template <int kRows>
    struct State {
        __m512 total[kRows][4];
        __m512i scale[4], mantissa[4];
        __m512 factor[4];
        const uint8_t* codes[4];
        int64_t ahead;  // bytes to what will be read soon
    };

    // Whether all scales of a row of a weight can be added to the exponents of the grid's values.
    static bool is_ordinary_row(const Weight& w, const uint8_t* scales, int64_t row) {
        const uint8_t* scale = scales + row * w.blocks();
        __m512i smallest = _mm512_set1_epi8(127), largest = smallest;
        for (int64_t b = 0; b < w.blocks(); b += 64) {
            const __mmask64 here = _bzhi_u64(~0ull, static_cast<unsigned>(std::min<int64_t>(64, w.blocks() - b)));
            const __m512i bytes = _mm512_mask_loadu_epi8(smallest, here, scale + b);
            smallest = _mm512_min_epu8(smallest, bytes);
            largest = _mm512_max_epu8(largest, bytes);
        }
        return _mm512_cmplt_epu8_mask(smallest, _mm512_set1_epi8(4)) == 0 &&
               _mm512_cmpgt_epu8_mask(largest, _mm512_set1_epi8(static_cast<char>(kLargestByte))) == 0;
    }

    // The codes of two blocks, in words: even elements in the lower nibble, odd ones in the upper one.
    template <bool kEnds>
    static inline __attribute__((always_inline)) __m512i load_codes(const uint8_t* p, int64_t left) {
        return _mm512_cvtepu8_epi16(
            kEnds ? _mm256_maskz_loadu_epi8(_bzhi_u32(~0u, static_cast<unsigned>(std::min<int64_t>(32, left))), p)
                  : _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }

    // The values of the codes of two blocks, `at` of a group, with their scales.
    template <int kRows, Way kWay>
    static inline __attribute__((always_inline)) void decode_two(const State<kRows>& s, int n, __m512i index,
                                                                 __m512i code, __m512bh& even, __m512bh& odd) {
        const __m512i half = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
        __m512i table = _mm512_load_si512(kGrids.twice);
        if (kWay != kFactors) {
            if (kWay == kMantissas)
                table = _mm512_permutex2var_epi16(
                    _mm512_load_si512(kGrids.scaled),
                    _mm512_or_si512(_mm512_permutexvar_epi32(index, s.mantissa[n]), _mm512_load_si512(kGrids.places)),
                    _mm512_load_si512(kGrids.scaled + 32));
            // Zeros stay.
            table = _mm512_mask_add_epi16(table, 0xFEFEFEFE, table, _mm512_permutexvar_epi32(index, s.scale[n]));
        }
        const __m512i low = kWay == kFactors ? code : _mm512_ternarylogic_epi32(code, _mm512_set1_epi16(15), half, 0xEA);
        const __m512i high = _mm512_srli_epi16(code, 4);
        even = (__m512bh)_mm512_permutexvar_epi16(low, table);
        odd = (__m512bh)_mm512_permutexvar_epi16(kWay == kFactors ? high : _mm512_or_si512(high, half), table);
    }

    // What one group adds; `left` bytes of codes of each column are there, which fill the group unless `kEnds`.
    template <int kRows, Way kWay, bool kEnds>
    static inline __attribute__((always_inline)) void add_group(State<kRows>& s, const char* own, int64_t left) {
        constexpr int kN = width(kRows, kWay), kStep = kWay == kMacro ? 2 : 1;
        __m512 total[kRows][kN];  // a copy, which stays in registers
        for (int m = 0; m < kRows; ++m)
            for (int n = 0; n < kN; ++n) total[m][n] = s.total[m][n];
        __m512i index = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        for (int64_t at = 0; at < (kEnds ? left : kGroupBytes); at += kStep * kBlock) {
            __m512bh even[kStep][kN], odd[kStep][kN];
            __m512 factor[kN];
            for (int n = 0; n < kN; ++n)
                if (kWay == kFactors || kWay == kMacro)
                    factor[n] = _mm512_permutexvar_ps(index, kWay == kMacro ? s.factor[n] : (__m512)s.scale[n]);
            for (int step = 0; step < kStep && (!kEnds || at + step * kBlock < left); ++step) {
                for (int n = 0; n < kN; ++n) {
                    const uint8_t* p = s.codes[n] + at + step * kBlock;
                    _mm_prefetch(reinterpret_cast<const char*>(p + s.ahead), _MM_HINT_T0);
                    decode_two<kRows, kWay>(s, n, index, load_codes<kEnds>(p, left - at - step * kBlock), even[step][n],
                                            odd[step][n]);
                }
                index = _mm512_add_epi32(index, _mm512_set1_epi32(2));
            }
            for (int m = 0; m < kRows; ++m, own += kUnitBytes)
                for (int n = 0; n < kN; ++n) {
                    __m512 sum = kWay == kPowers || kWay == kMantissas ? total[m][n] : _mm512_setzero_ps();
                    for (int step = 0; step < kStep && (!kEnds || at + step * kBlock < left); ++step) {
                        const char* p = own + step * kRows * kUnitBytes;
                        sum = _mm512_dpbf16_ps(sum, even[step][n], (__m512bh)_mm512_load_si512(p));
                        sum = _mm512_dpbf16_ps(sum, odd[step][n], (__m512bh)_mm512_load_si512(p + 64));
                    }
                    if (kWay == kFactors || kWay == kMacro) sum = _mm512_fmadd_ps(sum, factor[n], total[m][n]);
                    total[m][n] = sum;
                }
            own += (kStep - 1) * kRows * kUnitBytes;
        }
        for (int m = 0; m < kRows; ++m)
            for (int n = 0; n < kN; ++n) s.total[m][n] = total[m][n];
    }

    // The scales of a group of one column.
    template <int kRows, Way kWay>
    static inline __attribute__((always_inline)) void load_scales(State<kRows>& s, int n, const Weight& w, int64_t row,
                                                                  int64_t group, int pass) {
        if (kWay == kFactors) {
            s.scale[n] = (__m512i)group_scales(w, row, group, pass);
            return;
        }
        const int64_t at = row * w.blocks() + group * kGroup, count = w.blocks() - group * kGroup;
        const __m128i one = _mm_set1_epi8(127);  // of blocks that are not there
        const __mmask16 here = static_cast<__mmask16>(_bzhi_u32(0xFFFF, static_cast<unsigned>(std::min<int64_t>(16, count))));
        const uint8_t* scale = pass ? w.residual_scale : w.scale;
        const __m512i byte = _mm512_cvtepu8_epi32(_mm_mask_loadu_epi8(one, here, scale + at));
        // In both halves of a word.
        const __m512i exponent = _mm512_slli_epi32(_mm512_sub_epi32(byte, _mm512_set1_epi32(127)), 7);
        s.scale[n] = _mm512_or_si512(_mm512_and_si512(exponent, _mm512_set1_epi32(0xFFFF)), _mm512_slli_epi32(exponent, 16));
        if (kWay == kMacro) s.factor[n] = (__m512)macro_factors(w, row, group);
        if (kWay == kMantissas) {
            const __m512i mantissa = _mm512_slli_epi32((__m512i)block_mantissas(w, row, group), 4);
            const __m512i lanes = _mm512_or_si512(mantissa, _mm512_slli_epi32(mantissa, 16));
            s.mantissa[n] = lanes;
        }
    }

    template <int kRows, Way kWay>
    static void add_all(const Tile& tile, const Weight& w, const int64_t* rows, Span groups, float* sums) {
        for (int n = 0; n < columns(kRows); n += width(kRows, kWay)) add<kRows, kWay>(tile, w, rows + n, groups, sums + n);
    }

    template <int kRows, Way kWay>
    static void add(const Tile& tile, const Weight& w, const int64_t* rows, Span groups, float* sums) {
        constexpr int kN = width(kRows, kWay);
        State<kRows> s;
        s.ahead = kN * w.code_bytes();
        for (int m = 0; m < kRows; ++m)
            for (int n = 0; n < kN; ++n) s.total[m][n] = _mm512_setzero_ps();
        for (int pass = 0; pass <= (kWay == kFactors ? w.scheme->fallback : 0); ++pass) {
            for (int n = 0; n < kN; ++n)
                s.codes[n] =
                    (pass ? w.residual_codes : w.codes) + rows[n] * w.code_bytes() + groups.first * kGroupBytes;
            constexpr int kStride = kGroup / 2 * kRows * kUnitBytes;
            const char* own = tile.ordered + groups.first * kStride;
            for (int64_t group = groups.first; group < groups.last; ++group, own += kStride) {
                for (int n = 0; n < kN; ++n) load_scales<kRows, kWay>(s, n, w, rows[n], group, pass);
                const int64_t left = w.code_bytes() - group * kGroupBytes;
                if (left >= kGroupBytes)
                    add_group<kRows, kWay, false>(s, own, left);
                else
                    add_group<kRows, kWay, true>(s, own, left);
                for (int n = 0; n < kN; ++n) s.codes[n] += kGroupBytes;
            }
        }
        for (int m = 0; m < kRows; ++m)
            for (int n = 0; n < kN; ++n) sums[m * kColumns + n] += _mm512_reduce_add_ps(s.total[m][n]);
    }
};

}  // namespace

#endif
