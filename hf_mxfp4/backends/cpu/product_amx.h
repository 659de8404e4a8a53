// SPDX-License-Identifier: Apache-2.0
// Products of bfloat16 inputs of several rows on processors with AMX: 16 columns of the output at a time, whose weights
// are decoded once for up to 64 rows. A tile of weights has a row for each column, a tile of inputs a column for each
// row. While the tiles of one group of blocks are multiplied, the next group is decoded.

#pragma once

#include "product_bf16.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define MXFP4_AMX 1

#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int kTileRows = 16;
constexpr int kMostTiles = 4;  // of rows of x, at a time
constexpr int kTileBytes = kTileRows * 64;

// Whether the kernel lets this process have tiles.
inline bool tiles_are_allowed() {
    constexpr long kRequest = 0x1023, kTileData = 18;
    static const bool allowed = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
    return allowed;
}

// All tiles of a thread have 16 rows of 64 bytes, from here to the end of the object's life.
class TileConfiguration {
  public:
    TileConfiguration() {
        alignas(64) uint8_t bytes[64] = {1};  // the palette
        for (int tile = 0; tile < 8; ++tile) bytes[16 + 2 * tile] = 64, bytes[48 + tile] = kTileRows;
        _tile_loadconfig(bytes);
    }
    ~TileConfiguration() { _tile_release(); }
    TileConfiguration(const TileConfiguration&) = delete;
    TileConfiguration& operator=(const TileConfiguration&) = delete;
};

struct AmxKernel {
    using Base = BFloat16Kernel;
    static constexpr int kUnitBytes = 2 * kTileBytes;  // of 64 elements of 16 rows of x

    // Whether a weight of this scheme can be decoded with all scales but macro factors in the grid's values.
    static bool takes(const Scheme& scheme) {
        return scheme.search == kNone || scheme.macro_blocks == kMacroBlocks;
    }

    // Whether 16 rows of a weight, or the fewer that there are, can be.
    static bool takes_rows(const Weight& w, int64_t first, int64_t count) {
        for (int64_t row = first; row < first + count; ++row)
            if (!Base::is_ordinary_row(w, w.scale, row) ||
                (w.scheme->fallback && !Base::is_ordinary_row(w, w.residual_scale, row)))
                return false;
        return true;
    }

    // Of 16 rows of x, or the fewer that there are, 64 elements: pairs of even elements, then of odd ones, a row of a tile
    // for each pair.
    static void order(const Matrix& x, int64_t first, int64_t rows, int64_t at, char* out) {
        alignas(64) char ordered[kTileRows][Base::kUnitBytes] = {};
        for (int64_t m = 0; m < rows; ++m) Base::order(x, first + m, at, ordered[m]);
        const __m512i places = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                                  _mm512_set1_epi32(Base::kUnitBytes));
        for (int pair = 0; pair < 2 * kTileRows; ++pair)
            _mm512_store_si512(out + 64 * pair, _mm512_i32gather_epi32(places, ordered[0] + 4 * pair, 1));
    }

    // sums[t][n][m] of `kTiles` tiles of rows of x, `stride` bytes apart, with the rows of a weight from `base` on, the
    // last of which are the same where there are fewer than 16.
    template <int kTiles>
    static void columns(const char* ordered, int64_t stride, const Weight& w, int64_t base, int64_t count, Sums* sums) {
        for (int t = 0; t < kTiles; ++t) sums[t] = {};
        for (int pass = 0; pass <= w.scheme->fallback; ++pass) {
            if (w.scheme->search == kNone)
                add<kTiles, Base::kPowers>(ordered, stride, w, base, count, pass, sums);
            else if (w.scheme->search == kBlockwise)
                add<kTiles, Base::kMantissas>(ordered, stride, w, base, count, pass, sums);
            else
                add<kTiles, Base::kMacro>(ordered, stride, w, base, count, pass, sums);
        }
    }

  private:
    static constexpr int64_t kMacroBlocks = 4;
    static constexpr int kChunks = kGroup / 2;  // pairs of blocks, of a group

    // One group of 16 rows of a weight, decoded: by pair of blocks a tile of the even elements and one of the odd ones;
    // and the factors of its macro blocks.
    struct Group {
        alignas(64) char values[kChunks][2][kTileBytes];
        alignas(64) float factors[kGroup / kMacroBlocks][kTileRows];
        int chunks;
    };

    template <Base::Way kWay>
    static inline __attribute__((always_inline)) void decode_row(const Weight& w, int64_t row, int64_t group, int pass,
                                                                 int n, float unit, Group& out) {
        Base::State<1> s;
        Base::load_scales<1, kWay>(s, 0, w, row, group, pass);
        const int64_t left = w.code_bytes() - group * kGroupBytes;
        const uint8_t* codes = (pass ? w.residual_codes : w.codes) + row * w.code_bytes() + group * kGroupBytes;
        __m512i index = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        const auto decode = [&](int chunk, __m512i code) {
            __m512bh even, odd;
            Base::decode_two<1, kWay>(s, 0, index, code, even, odd);
            _mm512_store_si512(out.values[chunk][0] + 64 * n, (__m512i)even);
            _mm512_store_si512(out.values[chunk][1] + 64 * n, (__m512i)odd);
            index = _mm512_add_epi32(index, _mm512_set1_epi32(2));
        };
        if (left >= kGroupBytes)
            for (int chunk = 0; chunk < kChunks; ++chunk) {
                _mm_prefetch(reinterpret_cast<const char*>(codes + chunk * kBlock + kGroupBytes), _MM_HINT_T0);
                decode(chunk, Base::load_codes<false>(codes + chunk * kBlock, kBlock));
            }
        else
            for (int chunk = 0; chunk < out.chunks; ++chunk)
                decode(chunk, Base::load_codes<true>(codes + chunk * kBlock, left - chunk * kBlock));
        if (kWay == Base::kMacro) {
            alignas(64) float factors[kGroup];
            _mm512_store_ps(factors, s.factor[0]);
            for (int i = 0; i < kGroup / kMacroBlocks; ++i) out.factors[i][n] = factors[i * kMacroBlocks] * unit;
        }
    }

    template <int kTiles>
    static inline __attribute__((always_inline)) void multiply(const char* x, int64_t stride, const char (*values)[kTileBytes]) {
        _tile_loadd(4, values[0], 64);
        _tile_loadd(5, values[1], 64);
#define MXFP4_MULTIPLY(t)                                      \
    if constexpr (kTiles > t) {                                \
        _tile_loadd(6, x + t * stride, 64);                    \
        _tile_dpbf16ps(t, 4, 6);                               \
        _tile_loadd(7, x + t * stride + kTileBytes, 64);       \
        _tile_dpbf16ps(t, 5, 7);                               \
    }
        MXFP4_MULTIPLY(0)
        MXFP4_MULTIPLY(1)
        MXFP4_MULTIPLY(2)
        MXFP4_MULTIPLY(3)
#undef MXFP4_MULTIPLY
    }

    static inline __attribute__((always_inline)) void add_found(const float (*found)[kTileRows], const float* factors,
                                                                float unit, Sums& sums) {
        for (int n = 0; n < kTileRows; ++n) {
            const __m512 factor = _mm512_set1_ps(factors == nullptr ? unit : factors[n]);
            const __m512 sum = _mm512_fmadd_ps(_mm512_load_ps(found[n]), factor, _mm512_load_ps(sums.of[n]));
            _mm512_store_ps(sums.of[n], sum);
        }
    }

    // Adds what the tiles of the output hold, times a factor for each column, and empties them.
    template <int kTiles>
    static inline __attribute__((always_inline)) void flush(const float* factors, float unit, Sums* sums) {
        alignas(64) float found[kTileRows][kTileRows];
#define MXFP4_FLUSH(t)                              \
    if constexpr (kTiles > t) {                     \
        _tile_stored(t, found, 64);                 \
        _tile_zero(t);                              \
        add_found(found, factors, unit, sums[t]);   \
    }
        MXFP4_FLUSH(0)
        MXFP4_FLUSH(1)
        MXFP4_FLUSH(2)
        MXFP4_FLUSH(3)
#undef MXFP4_FLUSH
    }

    template <int kTiles, Base::Way kWay>
    static void add(const char* ordered, int64_t stride, const Weight& w, int64_t base, int64_t count, int pass,
                    Sums* sums) {
        const float unit = pass ? w.scheme->alpha : 1;
        Group groups[2];
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t group = 0; group <= w.groups(); ++group) {
            Group &next = groups[group & 1], &own = groups[(group & 1) ^ 1];
            const bool decodes = group < w.groups();
            if (decodes)
                next.chunks = static_cast<int>(
                    std::min<int64_t>(kChunks, (w.code_bytes() - group * kGroupBytes + kBlock - 1) / kBlock));
            for (int n = 0; n < kTileRows; ++n) {
                if (decodes) decode_row<kWay>(w, base + std::min<int64_t>(n, count - 1), group, pass, n, unit, next);
                const int chunk = n / 2;
                if (group == 0 || n % 2 == 0 || chunk >= own.chunks) continue;
                multiply<kTiles>(ordered + ((group - 1) * kChunks + chunk) * kUnitBytes, stride, own.values[chunk]);
                if (kWay == Base::kMacro && (chunk % 2 == 1 || chunk == own.chunks - 1))
                    flush<kTiles>(own.factors[chunk / 2], 1, sums);
            }
        }
        if (kWay != Base::kMacro) flush<kTiles>(nullptr, unit, sums);
    }
};

}  // namespace

#endif
