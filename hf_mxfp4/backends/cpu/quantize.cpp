// SPDX-License-Identifier: Apache-2.0
// Quantize, fake-quantize and dequantize the rows of a matrix: each element is read once and written once, and nothing
// else touches memory.

#include "decode.h"
#include "threads.h"

namespace {

inline Halves codes_of(Floats q) {
    Ints top = (bits_of(q) >> 22) & 0x1FF;  // exponent and first mantissa bit; 0.5 is 252, 1 is 254
    Ints magnitude = top > 252 ? top - 252 : (top == 252 ? Ints{} + 1 : Ints{});
    Ints sign = (bits_of(q) >> 28) & 8;
    Words code = reinterpret_cast<Words>(magnitude > 0 ? magnitude | sign : Ints{});
    return __builtin_convertvector(code, Halves);
}

inline void store_codes(uint8_t* p, int64_t count, const Block& q) {
    const Halves codes[2] = {codes_of(q.part[0]), codes_of(q.part[1])};
    Words pairs;  // two codes in each, the even one in the low half
    std::memcpy(&pairs, codes, sizeof pairs);
    const Bytes packed = __builtin_convertvector(__builtin_convertvector(pairs | (pairs >> 12), Halves), Bytes);
    if (count >= kBlock)
        std::memcpy(p, &packed, sizeof packed);
    else
        std::memcpy(p, &packed, static_cast<size_t>((count + 1) / 2));
}

struct StoreValues {
    const Matrix& x;
    char* values;

    void block(int64_t row, int64_t index, const Result& result) {
        const int64_t at = index * kBlock;
        store_block(x.type, values + x.offset(row, at), x.length - at, result.value,
                    result.one.byte > kSafeByte[x.type]);
    }
    void macro(int64_t, int64_t, int) {}
};

struct Packed {
    uint8_t *codes, *scale, *macro, *residual_codes, *residual_scale;
};

struct StorePacked {
    const Matrix& x;
    const Scheme& scheme;
    const Packed& out;

    void block(int64_t row, int64_t index, const Result& result) {
        const int64_t at = index * kBlock;
        const int64_t byte = row * x.code_bytes() + at / 2, block = row * x.blocks() + index;
        store_codes(out.codes + byte, x.length - at, result.one.q);
        out.scale[block] = static_cast<uint8_t>(result.one.byte);
        if (!scheme.fallback) return;
        store_codes(out.residual_codes + byte, x.length - at, result.two.q);
        out.residual_scale[block] = static_cast<uint8_t>(result.two.byte);
    }
    void macro(int64_t row, int64_t index, int m8) {
        const int64_t per_row = (x.blocks() + scheme.macro_blocks - 1) / scheme.macro_blocks;
        out.macro[row * per_row + index] = static_cast<uint8_t>(m8);
    }
};

// The 32 values of a pair in their order, of finite values in range.
inline void store_pair(Type type, char* p, const Pair& value) {
    if (type == kBFloat16) {
        const auto rounded = [](Floats x) {
            const Words bits = reinterpret_cast<Words>(x);
            return bits + 0x7FFF + ((bits >> 16) & 1);
        };
        const Words both = (rounded(value.odd) & 0xFFFF0000) | (rounded(value.even) >> 16);
        std::memcpy(p, &both, sizeof both);
        return;
    }
    const Block block = together(value);
    store(type, p, block.part[0], false);
    store(type, p + kLanes * size_of(type), block.part[1], false);
}

// One whole block of ordinary scale, by its grid values or their quotients by a macro factor.
#ifdef __AVX512F__
inline Pair ordinary_block(const uint8_t* codes, Floats table, float scale) {
    const Pair value = look_up(codes, table);
    return {value.even * scale, value.odd * scale};
}
#endif

void dequantize_rows(const Matrix& x, int64_t first, int64_t last, const Scheme& scheme, const Packed& in, char* out) {
    const int64_t n_macro = (x.blocks() + scheme.macro_blocks - 1) / scheme.macro_blocks;
    const bool divides = scheme.search == kStatic || scheme.search == kDynamic;
#ifdef __AVX512F__
    const Floats grid = grid_table();
    Floats table = grid;
#endif
    for (int64_t row = first; row < last; ++row) {
        const uint8_t* macro = in.macro + row * n_macro;
        for (int64_t b = 0; b < x.blocks(); ++b) {
            const int64_t at = b * kBlock, left = x.length - at;
            const int64_t byte = row * x.code_bytes() + at / 2, block = row * x.blocks() + b;
            char* target = out + x.offset(row, at);
            const float mantissa = scheme.search == kBlockwise ? mantissa_factor((macro[b / 4] >> (2 * (b % 4))) & 3) : 1;
#ifdef __AVX512F__
            if (divides && b % scheme.macro_blocks == 0) table = grid / macro_factor(macro[b / scheme.macro_blocks]);
            // Multiplying by a power of two is exact there, and so is a mantissa of two bits.
            if (!scheme.fallback && left >= kBlock && is_ordinary(in.scale[block], kSafeByte[x.type])) {
                store_pair(x.type, target,
                           ordinary_block(in.codes + byte, table, scale_value(in.scale[block]) * mantissa));
                continue;
            }
#endif
            Block value = decode_block(in.codes + byte, left, in.scale[block]);
            if (scheme.fallback)
                value = plus(value, times(decode_block(in.residual_codes + byte, left, in.residual_scale[block]),
                                          scheme.alpha));
            if (scheme.search == kBlockwise)
                value = times(value, mantissa);
            else if (divides)
                value = over(value, macro_factor(macro[b / scheme.macro_blocks]));
            const int largest = std::max(in.scale[block], scheme.fallback ? in.residual_scale[block] : uint8_t{0});
            store_block(x.type, target, left, value, largest > kSafeByte[x.type]);
        }
    }
}

}  // namespace

// Either `values` or the packed tensors.
extern "C" void mxfp4_quantize(const char* input, int type, int64_t length, const Scheme* scheme, int64_t n_rows,
                               int64_t threads, char* values, uint8_t* codes, uint8_t* scale, uint8_t* macro,
                               uint8_t* residual_codes, uint8_t* residual_scale) {
    const Matrix x{input, static_cast<Type>(type), length};
    const Packed packed{codes, scale, macro, residual_codes, residual_scale};
    in_threads(n_rows, threads, [&](int64_t first, int64_t last) {
        if (values != nullptr) {
            StoreValues sink{x, values};
            for_each_block(x, first, last, *scheme, sink);
        } else {
            StorePacked sink{x, *scheme, packed};
            for_each_block(x, first, last, *scheme, sink);
        }
    });
}

extern "C" void mxfp4_dequantize(char* values, int type, int64_t length, const Scheme* scheme, int64_t n_rows,
                                 int64_t threads, uint8_t* codes, uint8_t* scale, uint8_t* macro, uint8_t* residual_codes,
                                 uint8_t* residual_scale) {
    const Matrix x{nullptr, static_cast<Type>(type), length};
    const Packed packed{codes, scale, macro, residual_codes, residual_scale};
    in_threads(n_rows, threads,
               [&](int64_t first, int64_t last) { dequantize_rows(x, first, last, *scheme, packed, values); });
}
