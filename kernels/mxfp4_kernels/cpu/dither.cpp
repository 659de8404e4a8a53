// SPDX-License-Identifier: Apache-2.0
// Move float32 weights that are 16-bit numbers to random places within half an ulp of these, without changing what they
// are quantized to. The definition is hf_mxfp4/prepare/dither.py; every result here has its bits.

#include "blocks.h"
#include "threads.h"

namespace {

// As in __init__.py.
struct Dither {
    int64_t half_cell;  // float32 numbers between a 16-bit number and the midpoint to the next
    int64_t attempts;   // draws of a place; those of the later half come nearer and nearer to the 16-bit number
    uint64_t seed;
};

constexpr int kCounters = kBlock / 4;  // each gives four words
constexpr int kRounds = 10;

// Philox4x32-10 of consecutive counters: a random word for each element of a block; see hf_mxfp4/numerics/rng.py.
inline void random_words(uint64_t counter, uint32_t draw, uint64_t seed, uint32_t* words) {
    uint32_t c0[kCounters], c1[kCounters], c2[kCounters], c3[kCounters];
    for (int i = 0; i < kCounters; ++i) {
        c0[i] = static_cast<uint32_t>(counter + i);
        c1[i] = static_cast<uint32_t>((counter + i) >> 32);
        c2[i] = draw;
        c3[i] = 0;
    }
    auto k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < kRounds; ++round) {
        for (int i = 0; i < kCounters; ++i) {
            const uint64_t first = uint64_t{0xD2511F53} * c0[i], second = uint64_t{0xCD9E8D57} * c2[i];
            c0[i] = static_cast<uint32_t>(second >> 32) ^ c1[i] ^ k0;
            c1[i] = static_cast<uint32_t>(second);
            c2[i] = static_cast<uint32_t>(first >> 32) ^ c3[i] ^ k1;
            c3[i] = static_cast<uint32_t>(first);
        }
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    for (int i = 0; i < kCounters; ++i) {
        words[4 * i] = c0[i];
        words[4 * i + 1] = c1[i];
        words[4 * i + 2] = c2[i];
        words[4 * i + 3] = c3[i];
    }
}

// Draw how many float32 numbers farther from zero each weight of a block goes. Zeros, infinities and NaN stay.
inline void draw_places(const float* weights, uint64_t counter, uint32_t draw, const Dither& dither, int32_t* places) {
    uint32_t words[kBlock];
    random_words(counter, draw, dither.seed, words);
    const auto limit = static_cast<int32_t>(dither.half_cell - 1);
    const auto count = static_cast<float>(2 * limit + 1);
    for (int i = 0; i < kBlock; ++i) {
        const float uniform = static_cast<float>(words[i] >> 8) * 5.9604644775390625e-8f;  // 2**-24
        int32_t place = static_cast<int32_t>(uniform * count) - limit;
        const uint32_t bits = bits_of(weights[i]) & 0x7FFFFFFF;
        // The cell of a power of two has a third of its width below it, and half of its float32 numbers.
        const bool too_low = (bits & 0x7FFFFF) == 0 && place < 0 && place % 3 == 0;
        place = too_low ? -place : place;
        places[i] = bits == 0 || !finite(bits) ? 0 : place;
    }
}

// What the blocks of a group are quantized to; a sink of `for_each_block`.
struct Codes {
    std::vector<Quantized> first, second;
    std::vector<int> macro_bytes;

    void block(int64_t, int64_t index, const Quantized& one, const Quantized& two, const Block&) {
        first[index] = one;
        second[index] = two;
    }
    void macro(int64_t, int64_t index, int m8) { macro_bytes[index] = m8; }
};

// Blocks of a row that are quantized together and independently of all others.
class Group {
  public:
    Group(const Scheme& scheme, const Dither& dither, int64_t blocks)
        : scheme_(scheme), dither_(dither), blocks_(blocks), weights_(blocks * kBlock), tried_(blocks * kBlock) {
        places_.resize(blocks * kBlock);
        const int64_t macros = (blocks + scheme.macro_blocks - 1) / scheme.macro_blocks;
        for (Codes* codes : {&wanted_, &found_}) {
            codes->first.resize(blocks);
            codes->second.resize(blocks);
            codes->macro_bytes.resize(macros);
        }
    }

    // Move `length` weights in place; return how many of them that are not zero stayed.
    int64_t dither(float* weights, int64_t length, uint64_t counter) {
        blocks_ = (length + kBlock - 1) / kBlock;
        std::fill(weights_.begin(), weights_.end(), 0.0f);
        std::copy(weights, weights + length, weights_.begin());
        quantize(weights_, length, wanted_);
        for (int64_t b = 0; b < blocks_; ++b)
            draw_places(&weights_[b * kBlock], counter + b * kCounters, 0, dither_, &places_[b * kBlock]);
        bool is_same = false;
        for (int64_t attempt = 0; attempt < dither_.attempts && !is_same; ++attempt) {
            move();
            quantize(tried_, length, found_);
            is_same = !replace_changed(counter, attempt);
        }
        int64_t stayed = 0;
        for (int64_t i = 0; i < length; ++i) {
            if (is_same) weights[i] = tried_[i];
            stayed += (!is_same || places_[i] == 0) && weights_[i] != 0.0f;
        }
        return stayed;
    }

  private:
    void quantize(const std::vector<float>& values, int64_t length, Codes& codes) {
        const Matrix row{reinterpret_cast<const char*>(values.data()), kFloat32, length};
        for_each_block(row, 0, 1, scheme_, codes);
    }

    void move() {
        for (int64_t i = 0; i < blocks_ * kBlock; ++i)
            tried_[i] = as_float(bits_of(weights_[i]) + static_cast<uint32_t>(places_[i]));
    }

    // Whether all elements of a block count as changed: a scale or macro byte of theirs differs.
    bool scales_differ(int64_t b) const {
        const int64_t macro = b / scheme_.macro_blocks;
        return wanted_.first[b].byte != found_.first[b].byte || wanted_.second[b].byte != found_.second[b].byte ||
               wanted_.macro_bytes[macro] != found_.macro_bytes[macro];
    }

    // Draw again for what an attempt changed; return whether it changed anything.
    bool replace_changed(uint64_t counter, int64_t attempt) {
        const auto nearer = static_cast<int>(std::max<int64_t>(0, attempt - dither_.attempts / 2));
        bool changed = false;
        for (int64_t b = 0; b < blocks_; ++b) {
            const bool all = scales_differ(b);
            int32_t drawn[kBlock];
            bool is_drawn = false;
            for (int i = 0; i < kBlock; ++i) {
                const int part = i / kLanes, lane = i % kLanes;
                const bool differs = wanted_.first[b].q.part[part][lane] != found_.first[b].q.part[part][lane] ||
                                     wanted_.second[b].q.part[part][lane] != found_.second[b].q.part[part][lane];
                if (!all && !differs) continue;
                if (!is_drawn)
                    draw_places(&weights_[b * kBlock], counter + b * kCounters, static_cast<uint32_t>(attempt + 1),
                                dither_, drawn);
                is_drawn = changed = true;
                places_[b * kBlock + i] = drawn[i] < 0 ? -(-drawn[i] >> nearer) : drawn[i] >> nearer;
            }
        }
        return changed;
    }

    const Scheme& scheme_;
    const Dither& dither_;
    int64_t blocks_;
    std::vector<float> weights_, tried_;  // padded with zeros to whole blocks
    std::vector<int32_t> places_;
    Codes wanted_, found_;
};

// Without a scheme every place will do.
int64_t dither_alone(float* weights, int64_t length, uint64_t counter, const Dither& dither) {
    int64_t stayed = 0;
    for (int64_t at = 0; at < length; at += kBlock) {
        const int64_t count = std::min<int64_t>(kBlock, length - at);
        float padded[kBlock] = {};
        int32_t places[kBlock];
        std::copy(weights + at, weights + at + count, padded);
        draw_places(padded, counter + at / 4, 0, dither, places);
        for (int64_t i = 0; i < count; ++i) {
            weights[at + i] = as_float(bits_of(padded[i]) + static_cast<uint32_t>(places[i]));
            stayed += places[i] == 0 && padded[i] != 0.0f;
        }
    }
    return stayed;
}

}  // namespace

// Rows are moved in place. `scheme` may be null; `stayed` counts the weights other than zeros that were not moved.
extern "C" void mxfp4_dither(float* rows, int64_t length, const Scheme* scheme, int64_t n_rows, int64_t threads,
                             const Dither* dither, int64_t* stayed) {
    const int64_t counters = (length + 3) / 4;
    std::atomic<int64_t> total{0};
    in_threads(n_rows, threads, [&](int64_t first, int64_t last) {
        int64_t own = 0;
        if (scheme == nullptr) {
            for (int64_t row = first; row < last; ++row)
                own += dither_alone(rows + row * length, length, static_cast<uint64_t>(row * counters), *dither);
            total += own;
            return;
        }
        const int64_t together = scheme->macro_blocks;
        Group group(*scheme, *dither, together);
        for (int64_t row = first; row < last; ++row)
            for (int64_t at = 0; at < length; at += together * kBlock) {
                const int64_t count = std::min(together * kBlock, length - at);
                own += group.dither(rows + row * length + at, count, static_cast<uint64_t>(row * counters + at / 4));
            }
        total += own;
    });
    *stayed = total;
}
