// SPDX-License-Identifier: Apache-2.0
// Quantize, fake-quantize, dequantize and rotate the rows of a matrix: each element is read once and written once, and
// nothing else touches memory.

#include "blocks.h"
#include "threads.h"

namespace {

// The bytes of up to 32 codes.
inline void copy_codes(void* to, const void* from, int64_t count) {
    if (count >= kBlock)
        std::memcpy(to, from, kBlock / 2);
    else
        std::memcpy(to, from, static_cast<size_t>((count + 1) / 2));
}

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
    copy_codes(p, &packed, count);
}

inline Floats values_of(Halves codes) {
    const Words wide = __builtin_convertvector(codes, Words);
    const Words magnitude = wide & 7;
    // Exponent and mantissa as they stand from 1 up; 0 and 0.5, the subnormal, apart.
    const Words bits = magnitude > 1 ? (magnitude + 252) << 22 : (magnitude == 1 ? Words{} + 0x3F000000 : Words{});
    return as_floats(reinterpret_cast<Ints>(bits | ((wide & 8) << 28)));
}

inline Block load_values(const uint8_t* p, int64_t count, int byte) {
    Bytes packed = {};
    copy_codes(&packed, p, count);
    const Words bytes = __builtin_convertvector(__builtin_convertvector(packed, Halves), Words);
    const Words pairs = (bytes | (bytes << 12)) & 0x000F000F;
    Halves codes[2];
    std::memcpy(codes, &pairs, sizeof pairs);
    const Block value = times(Block{{values_of(codes[0]), values_of(codes[1])}}, scale_value(byte));
    return byte > 252 ? Block{{clamp(value.part[0], kMaxFloat), clamp(value.part[1], kMaxFloat)}} : value;
}

struct StoreValues {
    const Matrix& x;
    char* values;

    void block(int64_t row, int64_t index, const Quantized& one, const Quantized&, const Block& value) {
        const int64_t at = index * kBlock;
        store_block(x.type, values + x.offset(row, at), x.length - at, value, one.byte > kSafeByte[x.type]);
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

    void block(int64_t row, int64_t index, const Quantized& one, const Quantized& two, const Block&) {
        const int64_t at = index * kBlock;
        const int64_t byte = row * x.code_bytes() + at / 2, block = row * x.blocks() + index;
        store_codes(out.codes + byte, x.length - at, one.q);
        out.scale[block] = static_cast<uint8_t>(one.byte);
        if (!scheme.fallback) return;
        store_codes(out.residual_codes + byte, x.length - at, two.q);
        out.residual_scale[block] = static_cast<uint8_t>(two.byte);
    }
    void macro(int64_t row, int64_t index, int m8) {
        const int64_t per_row = (x.blocks() + scheme.macro_blocks - 1) / scheme.macro_blocks;
        out.macro[row * per_row + index] = static_cast<uint8_t>(m8);
    }
};

void dequantize_rows(const Matrix& x, int64_t first, int64_t last, const Scheme& scheme, const Packed& in, char* out) {
    const int64_t n_macro = (x.blocks() + scheme.macro_blocks - 1) / scheme.macro_blocks;
    for (int64_t row = first; row < last; ++row) {
        const uint8_t* macro = in.macro + row * n_macro;
        for (int64_t b = 0; b < x.blocks(); ++b) {
            const int64_t at = b * kBlock, left = x.length - at;
            const int64_t byte = row * x.code_bytes() + at / 2, block = row * x.blocks() + b;
            Block value = load_values(in.codes + byte, left, in.scale[block]);
            int largest = in.scale[block];
            if (scheme.fallback) {
                const Block residual = load_values(in.residual_codes + byte, left, in.residual_scale[block]);
                value = plus(value, times(residual, scheme.alpha));
                largest = std::max<int>(largest, in.residual_scale[block]);
            }
            if (scheme.search == kBlockwise)
                value = times(value, mantissa_factor((macro[b / 4] >> (2 * (b % 4))) & 3));
            else if (scheme.search != kNone)
                value = over(value, macro_factor(macro[b / scheme.macro_blocks]));
            store_block(x.type, out + x.offset(row, at), left, value, largest > kSafeByte[x.type]);
        }
    }
}

// ---- the block Hadamard rotation of hf_mxfp4/numerics/hadamard.py: the same sums and differences in the same order ----

// The sums and differences of lanes that are `other` apart: the first of two plus the second, and minus it.
inline Floats butterfly(Floats x, Floats other, Ints is_second) {
    return other + as_floats(bits_of(x) ^ (is_second & static_cast<int32_t>(0x80000000)));
}

inline Floats within(Floats x) {
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    x = butterfly(x, MXFP4_SHUFFLE(x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14), (lane & 1) != 0);
    x = butterfly(x, MXFP4_SHUFFLE(x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13), (lane & 2) != 0);
    x = butterfly(x, MXFP4_SHUFFLE(x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11), (lane & 4) != 0);
    return butterfly(x, MXFP4_SHUFFLE(x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7), (lane & 8) != 0);
}

template <int kParts>
void rotate_blocks(Type type, const char* in, float* out, int64_t first, int64_t last, float scale) {
    const int64_t step = kLanes * size_of(type);
    for (int64_t block = first; block < last; ++block) {
        Floats part[kParts];
        for (int i = 0; i < kParts; ++i) part[i] = within(load(type, in + (block * kParts + i) * step));
        for (int half = 1; half < kParts; half *= 2)
            for (int i = 0; i < kParts; ++i) {
                if (i & half) continue;
                const Floats sum = part[i] + part[i + half], difference = part[i] - part[i + half];
                part[i] = sum, part[i + half] = difference;
            }
        for (int i = 0; i < kParts; ++i) {
            const Floats scaled = part[i] * scale;
            std::memcpy(out + (block * kParts + i) * kLanes, &scaled, sizeof scaled);
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

// `count` blocks of 16, 32, 64 or 128 elements, one after the other.
extern "C" void mxfp4_rotate(const char* in, int type, float* out, int64_t size, float scale, int64_t count,
                             int64_t threads) {
    const Type from = static_cast<Type>(type);
    const auto rotate = size == 16   ? rotate_blocks<1>
                        : size == 32 ? rotate_blocks<2>
                        : size == 64 ? rotate_blocks<4>
                                     : rotate_blocks<8>;
    in_threads(count, threads, [&](int64_t first, int64_t last) { rotate(from, in, out, first, last, scale); });
}
