// SPDX-License-Identifier: Apache-2.0
// Tiles of products in float32: of inputs of any type, on any processor.

#pragma once

#include "product.h"

namespace {

struct FloatKernel {
    static constexpr int kUnit = kBlock;  // elements of a row that lie together
    static constexpr int kUnitBytes = kBlock * 4;

    // Rows and columns of a tile: as many as have room in registers.
#if defined(__AVX512F__)
    static constexpr int kMostRows = 4;
    static constexpr int columns(int) { return 4; }
#elif defined(MXFP4_AVX2)
    static constexpr int kMostRows = 4;
    static constexpr int columns(int rows) { return rows == 1 ? 2 : 1; }
#else
    static constexpr int kMostRows = 1;
    static constexpr int columns(int) { return 2; }
#endif

    // A unit of a row, as `grid_values` gives what it meets.
    static void order(const Matrix& x, int64_t row, int64_t at, char* out) {
        const Block block = load_block(x.type, x.at(row, at), x.length - at);
        float values[kBlock], ordered[kBlock];
        std::memcpy(values, &block, sizeof values);
        for (int i = 0; i < kBlock; ++i) ordered[i] = values[kOrder[i]];
        std::memcpy(out, ordered, sizeof ordered);
    }

    template <int kRows>
    static void tile(const Tile& tile, const Weight& w, const int64_t* rows, Span groups, float* sums) {
        constexpr int kN = columns(kRows);
        constexpr int64_t kStride = kGroup * kRows * kUnitBytes;
        State<kRows> s;
        s.ahead = kN * w.code_bytes();
        for (int m = 0; m < kRows; ++m)
            for (int n = 0; n < kN; ++n) s.total[m][n] = zero_lanes();
        for (int pass = 0; pass <= w.scheme->fallback; ++pass)
            for (int64_t group = groups.first; group < groups.last; ++group) {
                const int64_t left = w.code_bytes() - group * kGroupBytes;
                const int blocks = static_cast<int>(std::min<int64_t>(kGroup, w.blocks() - group * kGroup));
                uint8_t padded[kN][kGroupBytes];
                for (int n = 0; n < kN; ++n) {
                    const Floats found = group_scales(w, rows[n], group, pass);
                    std::memcpy(s.scale[n], &found, sizeof found);
                    s.codes[n] = (pass ? w.residual_codes : w.codes) + rows[n] * w.code_bytes() + group * kGroupBytes;
                    if (left >= blocks * (kBlock / 2)) continue;
                    std::memset(padded[n], 0, sizeof padded[n]);
                    std::memcpy(padded[n], s.codes[n], static_cast<size_t>(left));
                    s.codes[n] = padded[n];
                }
                add_group(s, tile.ordered + group * kStride, blocks);
            }
        for (int m = 0; m < kRows; ++m)
            for (int n = 0; n < kN; ++n) sums[m * kColumns + n] += sum_of(s.total[m][n]);
    }

  private:
    template <int kRows>
    struct State {
        Lanes total[kRows][columns(kRows)];
        float scale[columns(kRows)][kGroup];
        const uint8_t* codes[columns(kRows)];
        int64_t ahead;  // bytes to what will be read soon
    };

    template <int kRows>
    static inline __attribute__((always_inline)) void add_group(State<kRows>& s, const char* own, int blocks) {
        constexpr int kN = columns(kRows);
        Lanes total[kRows][kN];  // a copy, which stays in registers
        for (int m = 0; m < kRows; ++m)
            for (int n = 0; n < kN; ++n) total[m][n] = s.total[m][n];
        for (int b = 0; b < blocks; ++b, own += kRows * kUnitBytes) {
            Lanes one[kN], two[kN], factor[kN];
            for (int n = 0; n < kN; ++n) {
                const uint8_t* p = s.codes[n] + b * (kBlock / 2);
                __builtin_prefetch(p + s.ahead);
                grid_values(p, one[n], two[n]);
                factor[n] = lanes_of(s.scale[n][b]);
                if (kRows > 2) one[n] = times(one[n], factor[n]), two[n] = times(two[n], factor[n]);
            }
            for (int m = 0; m < kRows; ++m) {
                const float* at = reinterpret_cast<const float*>(own + m * kUnitBytes);
                for (int n = 0; n < kN; ++n)
                    if (kRows <= 2)
                        total[m][n] = times_plus(
                            times_plus(lanes_at(at + kLanes), two[n], times(lanes_at(at), one[n])), factor[n], total[m][n]);
                    else
                        total[m][n] =
                            times_plus(lanes_at(at + kLanes), two[n], times_plus(lanes_at(at), one[n], total[m][n]));
            }
        }
        for (int m = 0; m < kRows; ++m)
            for (int n = 0; n < kN; ++n) s.total[m][n] = total[m][n];
    }
};

}  // namespace
