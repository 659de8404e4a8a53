// SPDX-License-Identifier: Apache-2.0
// The block Hadamard rotation of hf_mxfp4/numerics/hadamard.py, with its bits: the same sums and differences in the same
// order, the scale last. Each element is read once and written once.

#include "blocks.h"
#include "threads.h"

namespace {

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

// As torch rounds: infinity and NaN stay.
inline void store_any(Type type, char* p, Floats x) {
    if (type == kFloat32) {
        std::memcpy(p, &x, sizeof x);
        return;
    }
    const Words bits = reinterpret_cast<Words>(x);
    const Words rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    const Halves half = __builtin_convertvector(x == x ? rounded : Words{} + 0x7FC0, Halves);
    std::memcpy(p, &half, sizeof half);
}

template <int kParts>
void rotate_blocks(Type type, const char* in, Type written, char* out, int64_t first, int64_t last, float scale) {
    const int64_t step = kLanes * size_of(type), out_step = kLanes * size_of(written);
    for (int64_t block = first; block < last; ++block) {
        Floats part[kParts];
        for (int i = 0; i < kParts; ++i) part[i] = within(load(type, in + (block * kParts + i) * step));
        for (int half = 1; half < kParts; half *= 2)
            for (int i = 0; i < kParts; ++i) {
                if (i & half) continue;
                const Floats sum = part[i] + part[i + half], difference = part[i] - part[i + half];
                part[i] = sum, part[i + half] = difference;
            }
        for (int i = 0; i < kParts; ++i) store_any(written, out + (block * kParts + i) * out_step, part[i] * scale);
    }
}

}  // namespace

// `count` blocks of 16, 32, 64 or 128 elements, one after the other; written as float32 or bfloat16.
extern "C" void mxfp4_rotate(const char* in, int type, char* out, int written, int64_t size, float scale, int64_t count,
                             int64_t threads) {
    const Type from = static_cast<Type>(type), to = static_cast<Type>(written);
    const auto rotate = size == 16   ? rotate_blocks<1>
                        : size == 32 ? rotate_blocks<2>
                        : size == 64 ? rotate_blocks<4>
                                     : rotate_blocks<8>;
    in_threads(count, threads, [&](int64_t first, int64_t last) { rotate(from, in, to, out, first, last, scale); });
}
