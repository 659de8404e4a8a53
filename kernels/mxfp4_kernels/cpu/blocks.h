// SPDX-License-Identifier: Apache-2.0
// Blocks of an MXFP4 quantization, each held in registers from load to store. The definition is hf_mxfp4/numerics; every
// result here has its bits. Compiled by __init__.py; needs the vector extensions of GCC or Clang and no library.
//
// Floating-point arithmetic must stay as written: no contraction to fused multiply-adds, no reassociation.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#ifdef __clang__
#define MXFP4_SHUFFLE(x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
#else
#define MXFP4_SHUFFLE(x, ...) __builtin_shuffle(x, Ints{__VA_ARGS__})
#endif

namespace {

constexpr int kLanes = 16;
constexpr int kBlock = 32;
constexpr int kNaNByte = 255;

typedef float Floats __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes), aligned(2)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes), aligned(1)));

// One block of 32 elements, in registers.
struct Block {
    Floats part[2];
};

inline Ints bits_of(Floats x) { return reinterpret_cast<Ints>(x); }
inline Floats as_floats(Ints x) { return reinterpret_cast<Floats>(x); }
inline Floats splat(float x) { return Floats{} + x; }
inline float as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline Floats clamp(Floats x, float limit) {  // NaN passes
    x = x > limit ? splat(limit) : x;
    return x < -limit ? splat(-limit) : x;
}

// ---- element types: 16 values in and out ----

enum Type { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

constexpr float kMaxFloat = 3.4028234663852886e38f;
// Largest finite value; and the largest scale byte with which every result is finite, whatever the scheme.
constexpr float kMax[] = {kMaxFloat, 3.3895313892515355e38f, 65504.0f};
constexpr int kSafeByte[] = {250, 250, 138};

inline int64_t size_of(Type type) { return type == kFloat32 ? 4 : 2; }

inline Floats load(Type type, const char* p) {
    if (type == kFloat32) {
        Floats x;
        std::memcpy(&x, p, sizeof x);
        return x;
    }
    Halves h;
    std::memcpy(&h, p, sizeof h);
    Words w = __builtin_convertvector(h, Words);
    if (type == kBFloat16) return as_floats(reinterpret_cast<Ints>(w << 16));
    Floats magnitude = as_floats(reinterpret_cast<Ints>((w & 0x7FFF) << 13)) * 5.192296858534828e33f;  // 2**112
    Words bits = reinterpret_cast<Words>(magnitude);
    bits = (w & 0x7C00) == 0x7C00 ? (bits | 0x7F800000) : bits;
    return as_floats(reinterpret_cast<Ints>(bits | ((w & 0x8000) << 16)));
}

// Finite values that are in range, unless `guard`, which saturates them and keeps NaN.
inline void store(Type type, char* p, Floats x, bool guard) {
    if (guard) x = clamp(x, kMax[type]);
    if (type == kFloat32) {
        std::memcpy(p, &x, sizeof x);
        return;
    }
    Words bits = reinterpret_cast<Words>(x), half;
    if (type == kBFloat16) {
        half = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    } else {
        Words sign = bits & 0x80000000;
        Words magnitude = bits ^ sign;
        Words normal = (magnitude + 0xFFF + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
        // Adding 0.5 leaves the units of 2**-24, the subnormal step, in the last mantissa bits, rounded to even.
        Floats shifted = as_floats(reinterpret_cast<Ints>(magnitude)) + 0.5f;
        Words subnormal = reinterpret_cast<Words>(shifted) - 0x3F000000;
        half = (magnitude < (113u << 23) ? subnormal : normal) | (sign >> 16);
    }
    if (guard) half = x == x ? half : Words{} + (type == kBFloat16 ? 0x7FC0 : 0x7E00);
    Halves h = __builtin_convertvector(half, Halves);
    std::memcpy(p, &h, sizeof h);
}

inline Block load_block(Type type, const char* p, int64_t count) {
    const int64_t size = size_of(type);
    if (count >= kBlock) return {{load(type, p), load(type, p + kLanes * size)}};
    char padded[4 * kBlock] = {};
    std::memcpy(padded, p, static_cast<size_t>(count * size));
    return {{load(type, padded), load(type, padded + kLanes * size)}};
}

inline void store_block(Type type, char* p, int64_t count, const Block& block, bool guard) {
    const int64_t size = size_of(type);
    if (count >= kBlock) {
        store(type, p, block.part[0], guard);
        store(type, p + kLanes * size, block.part[1], guard);
        return;
    }
    char padded[4 * kBlock];
    store(type, padded, block.part[0], guard);
    store(type, padded + kLanes * size, block.part[1], guard);
    std::memcpy(p, padded, static_cast<size_t>(count * size));
}

// ---- scales ----

// Bits of the largest magnitude; of a NaN when there is one, since those are the largest.
inline uint32_t amax_bits(const Block& z) {
    Ints first = bits_of(z.part[0]) & 0x7FFFFFFF, second = bits_of(z.part[1]) & 0x7FFFFFFF;
    Ints m = first > second ? first : second, other;
    other = MXFP4_SHUFFLE(m, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    m = m > other ? m : other;
    other = MXFP4_SHUFFLE(m, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    m = m > other ? m : other;
    other = MXFP4_SHUFFLE(m, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    m = m > other ? m : other;
    return static_cast<uint32_t>(std::max(m[0], m[1]));
}

inline bool finite(uint32_t magnitude_bits) { return magnitude_bits < 0x7F800000; }

inline int scale_byte(uint32_t amax, uint32_t carry) {
    if (!finite(amax)) return kNaNByte;
    int byte = static_cast<int>((amax + carry) >> 23) - 2;
    return std::min(std::max(byte, 0), 254);
}

inline float scale_value(int byte) {
    if (byte == 0) return as_float(0x00400000);
    if (byte == kNaNByte) return as_float(0x7FC00000);
    return as_float(static_cast<uint32_t>(byte) << 23);
}

inline float inverse_scale(int byte) {  // of 0..254
    return byte == 254 ? as_float(0x00400000) : as_float(static_cast<uint32_t>(254 - byte) << 23);
}

inline float inverse_power_of_two(uint32_t amax) {
    int exponent = static_cast<int>((amax >> 23) & 0xFF);
    return as_float(static_cast<uint32_t>(std::min(std::max(254 - exponent, 1), 254)) << 23);
}

inline float macro_factor(int m8) { return static_cast<float>(m8) * (1.0f / 256.0f) + 1.0f; }
inline float mantissa_factor(int mantissa) { return static_cast<float>(mantissa) * 0.25f + 1.0f; }

inline int static_macro(uint32_t amax) {
    if (amax >= 0x7F000000) return 0;  // 2**127 and more, infinite or NaN
    return (bits_of(6.0f / as_float(amax)) >> 15) & 0xFF;
}

// ---- one block ----

// Rounded to the grid continued beyond 6.
inline Floats round_nearest(Floats y) {
    Ints exponent = bits_of(y) & 0x7F800000;
    exponent = exponent > 0x3F800000 ? exponent : Ints{} + 0x3F800000;
    // Twice the grid step times 0.75 * 2**23: adding it rounds to a multiple of the step, ties to even.
    const Floats anchor = as_floats(exponent) * 6291456.0f;
    return (y + anchor) - anchor;
}

// Grid values of z at a scale. `clips`: the scale may be too small for the largest of them.
inline Block round_to_grid(const Block& z, int byte, bool clips) {
    if (byte == kNaNByte) return Block{};
    const float inverse = inverse_scale(byte);
    Block q{{round_nearest(z.part[0] * inverse), round_nearest(z.part[1] * inverse)}};
    if (clips || byte > 252) {  // 6 * 2**126 is not finite
        const float limit = byte < 253 ? 6.0f : byte == 253 ? 3.0f : 1.5f;
        q = {{clamp(q.part[0], limit), clamp(q.part[1], limit)}};
    }
    return q;
}

inline Block times(const Block& x, float factor) { return {{x.part[0] * factor, x.part[1] * factor}}; }
inline Block over(const Block& x, float divisor) { return {{x.part[0] / divisor, x.part[1] / divisor}}; }
inline Block minus(const Block& x, const Block& y) { return {{x.part[0] - y.part[0], x.part[1] - y.part[1]}}; }
inline Block plus(const Block& x, const Block& y) { return {{x.part[0] + y.part[0], x.part[1] + y.part[1]}}; }

// Squares in units of 2**-23, each cut to an integer: their sum is the same in whatever order. Below 2**25 each.
inline Ints squares(Floats error) { return __builtin_convertvector((error * error) * 8388608.0f, Ints); }

inline int64_t sum(Ints lanes) {
    int64_t total = 0;
    for (int i = 0; i < kLanes; ++i) total += lanes[i];
    return total;
}

inline int64_t sum_of_squares(const Block& error) { return sum(squares(error.part[0]) + squares(error.part[1])); }

struct Rule {
    uint32_t carry;         // of ScaleRule in mxfp4_kernels/scale_rules.py
    int32_t clips;          // the scale may be too small for the block's maximum
    int32_t least_squares;  // try the neighbouring scales too
};

struct Quantized {
    Block q;
    int byte;
};

inline Quantized quantize_block(const Block& z, uint32_t amax, const Rule& rule) {
    const int first = scale_byte(amax, rule.carry);
    Quantized best{round_to_grid(z, first, rule.clips), first};
    if (!rule.least_squares || first == kNaNByte) return best;
    const float unit = inverse_power_of_two(amax);
    int64_t best_error = sum_of_squares(times(minus(times(best.q, scale_value(first)), z), unit));
    for (int offset : {1, -1}) {
        const int byte = std::min(std::max(first + offset, 0), 254);
        const Block q = round_to_grid(z, byte, true);
        const int64_t error = sum_of_squares(times(minus(times(q, scale_value(byte)), z), unit));
        if (error < best_error) best_error = error, best = {q, byte};
    }
    return best;
}

// ---- one macro block ----

enum MacroSearch { kNone = 0, kStatic = 1, kDynamic = 2, kBlockwise = 3 };

// As in __init__.py.
struct Scheme {
    Rule rule;
    MacroSearch search;
    int64_t mantissas;     // candidates of kBlockwise: 4, or 3 for values that E4M3 holds
    int64_t macro_blocks;  // blocks per macro block; 1 without
    int32_t fallback;
    float alpha;
};

// Squared error of one block under a macro factor.
inline int64_t macro_error(const Block& z, uint32_t amax, float factor, float unit, const Rule& rule) {
    const Quantized result = quantize_block(times(z, factor), bits_of(as_float(amax) * factor), rule);
    return sum_of_squares(times(minus(over(times(result.q, scale_value(result.byte)), factor), z), unit));
}

inline int search_macro(const Block* z, const uint32_t* amax, int64_t blocks, uint32_t macro_amax, const Rule& rule) {
    if (macro_amax >= 0x7F000000) return 0;
    const float unit = inverse_power_of_two(macro_amax);
    int best = 0;
    int64_t best_error = 0;
    for (int candidate = 0; candidate < 16; ++candidate) {
        const float factor = macro_factor(16 * candidate);
        int64_t error = 0;
        for (int64_t b = 0; b < blocks; ++b) error += macro_error(z[b], amax[b], factor, unit, rule);
        if (candidate == 0 || error < best_error) best = 16 * candidate, best_error = error;
    }
    return best;
}

inline int search_mantissa(const Block& z, uint32_t amax, const Rule& rule, int64_t candidates) {
    if (!finite(amax)) return 0;
    const float unit = inverse_power_of_two(amax);
    int best = 0;
    int64_t best_error = 0;
    for (int candidate = 0; candidate < candidates; ++candidate) {
        const float factor = mantissa_factor(candidate);
        const Quantized result = quantize_block(over(z, factor), bits_of(as_float(amax) / factor), rule);
        Block back = times(times(result.q, scale_value(result.byte)), factor);
        back = {{clamp(back.part[0], kMaxFloat), clamp(back.part[1], kMaxFloat)}};
        const int64_t error = sum_of_squares(times(minus(back, z), unit));
        if (candidate == 0 || error < best_error) best = candidate, best_error = error;
    }
    return best;
}

// ---- rows ----

// Contiguous rows; `data` is not used where the elements are written.
struct Matrix {
    const char* data;
    Type type;
    int64_t length;
    int64_t blocks() const { return (length + kBlock - 1) / kBlock; }
    int64_t code_bytes() const { return (length + 1) / 2; }
    int64_t offset(int64_t row, int64_t column) const { return (row * length + column) * size_of(type); }
    const char* at(int64_t row, int64_t column) const { return data + offset(row, column); }
};

// Calls sink.block(row, index, first pass, second pass, value) for each block, the second pass being that of outlier
// fallback, and sink.macro(row, index, byte) for each macro block.
template <MacroSearch kSearch, bool kFallback, class Sink>
void for_each_block(const Matrix& x, int64_t first, int64_t last, const Scheme& scheme, Sink& sink) {
    // Without macro blocks, portions of some blocks keep more loads under way.
    const int64_t per_macro = kSearch == kNone ? 8 : scheme.macro_blocks;
    const int64_t n_macro = (x.blocks() + per_macro - 1) / per_macro;
    std::vector<Block> z(per_macro);
    std::vector<uint32_t> amax(per_macro);

    // `scaled` is under its macro factor or over its mantissa, which is `factor`.
    const auto finish = [&](int64_t row, int64_t index, const Block& scaled, float factor, const Quantized& one) {
        Quantized two{};
        Block value = times(one.q, scale_value(one.byte));
        if (kFallback) {
            const Block residual = one.byte == kNaNByte ? Block{} : minus(scaled, value);
            two = quantize_block(residual, amax_bits(residual), scheme.rule);
            value = plus(value, times(times(two.q, scale_value(two.byte)), scheme.alpha));
        }
        if (kSearch == kBlockwise) value = times(value, factor);
        if (kSearch == kStatic || kSearch == kDynamic) value = over(value, factor);
        sink.block(row, index, one, two, value);
    };

    for (int64_t row = first; row < last; ++row) {
        for (int64_t m = 0; m < n_macro; ++m) {
            const int64_t start = m * per_macro;
            const int64_t blocks = std::min(per_macro, x.blocks() - start);
            uint32_t macro_amax = 0;
            for (int64_t b = 0; b < blocks; ++b) {
                const int64_t at = (start + b) * kBlock;
                z[b] = load_block(x.type, x.at(row, at), x.length - at);
                amax[b] = amax_bits(z[b]);
                macro_amax = std::max(macro_amax, amax[b]);
            }
            int m8 = 0;
            if (kSearch == kStatic) m8 = static_macro(macro_amax);
            if (kSearch == kDynamic) m8 = search_macro(z.data(), amax.data(), blocks, macro_amax, scheme.rule);
            for (int64_t b = 0; b < blocks; ++b) {
                uint32_t scaled_amax = amax[b];
                Block scaled = z[b];
                float factor = macro_factor(m8);
                if (kSearch == kBlockwise) {
                    const int mantissa = search_mantissa(z[b], amax[b], scheme.rule, scheme.mantissas);
                    m8 |= mantissa << (2 * b);
                    factor = mantissa_factor(mantissa);
                    scaled = over(z[b], factor);
                    scaled_amax = bits_of(as_float(scaled_amax) / factor) & 0x7FFFFFFF;
                } else if (kSearch != kNone) {
                    scaled = times(z[b], factor);
                    scaled_amax = bits_of(as_float(scaled_amax) * factor) & 0x7FFFFFFF;
                }
                finish(row, start + b, scaled, factor, quantize_block(scaled, scaled_amax, scheme.rule));
            }
            if (kSearch != kNone) sink.macro(row, m, m8);
        }
    }
}

template <class Sink>
void for_each_block(const Matrix& x, int64_t first, int64_t last, const Scheme& scheme, Sink& sink) {
    const auto run = [&](auto search) {
        constexpr MacroSearch kSearch = decltype(search)::value;
        if (scheme.fallback)
            for_each_block<kSearch, true>(x, first, last, scheme, sink);
        else
            for_each_block<kSearch, false>(x, first, last, scheme, sink);
    };
    if (scheme.search == kNone) run(std::integral_constant<MacroSearch, kNone>{});
    if (scheme.search == kStatic) run(std::integral_constant<MacroSearch, kStatic>{});
    if (scheme.search == kDynamic) run(std::integral_constant<MacroSearch, kDynamic>{});
    if (scheme.search == kBlockwise) run(std::integral_constant<MacroSearch, kBlockwise>{});
}

}  // namespace
