// SPDX-License-Identifier: Apache-2.0
// y = x W^T + b on packed weights, of one weight or of all experts, in float32. Every element of y is computed alike
// whatever the number of threads.
//
// A row of a weight is read in groups of 16 blocks. Of each group the scales are read first, with all factors of their
// blocks in them, as floats. A scale of 2**-127 counts as zero, and products beyond float32 are infinite.

#include <memory>

#include "lanes.h"
#include "threads.h"

int mxfp4_process = 0;

namespace {

constexpr int kGroup = 16;                        // blocks
constexpr int kGroupBytes = kGroup * kBlock / 2;  // of codes
constexpr int kColumns = 16;                      // of the output, that are written together
constexpr int64_t kNearestCache = 1 << 15;

// Rows and columns of a tile: as many as have room in registers.
#if defined(__AVX512F__)
constexpr int kMostRows = 4;
constexpr int columns_of_tile(int) { return 4; }
#elif defined(MXFP4_AVX2)
constexpr int kMostRows = 4;
constexpr int columns_of_tile(int rows) { return rows == 1 ? 2 : 1; }
#else
constexpr int kMostRows = 1;
constexpr int columns_of_tile(int) { return 2; }
#endif

// As in __init__.py.
struct Arguments {
    const char* x;
    int64_t type;  // of x, the bias and y
    int64_t n_rows;
    const uint8_t *codes, *scale, *macro, *residual_codes, *residual_scale;
    int64_t in_features, out_features;
    const Scheme* weights;
    const char* bias;     // or null
    const int32_t* ends;  // of the rows of each expert, or null
    int64_t n_experts;    // 1 without
    char* y;
    int64_t threads;
};

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

// ---- scales of a group ----

struct InverseFactors {
    float of[256];
};

constexpr InverseFactors make_inverse_factors() {
    InverseFactors all{};
    for (int m8 = 0; m8 < 256; ++m8) all.of[m8] = 256.0f / static_cast<float>(256 + m8);
    return all;
}

constexpr InverseFactors kInverseFactors = make_inverse_factors();

// What the values of the blocks of a group are multiplied with under macro factors.
inline Floats macro_factors(const Weight& w, int64_t row, int64_t group) {
    const int64_t per_macro = w.scheme->macro_blocks, first = group * kGroup / per_macro;
    const uint8_t* macro = w.macro + row * w.macros() + first;
    uint8_t four[4] = {};
    if (per_macro == 4 && w.macros() - first >= 4)
        std::memcpy(four, macro, 4);
    else if (per_macro == 4)
        std::memcpy(four, macro, static_cast<size_t>(w.macros() - first));
    if (w.scheme->search == kBlockwise) {
        uint32_t packed;
        std::memcpy(&packed, four, sizeof packed);
        const Words shift = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
        const Ints mantissas = reinterpret_cast<Ints>(((Words{} + packed) >> shift) & 3);
        return __builtin_convertvector(mantissas, Floats) * 0.25f + 1.0f;
    }
    const float* table = kInverseFactors.of;
    if (per_macro == 4) {
        const float a = table[four[0]], b = table[four[1]], c = table[four[2]], d = table[four[3]];
        return Floats{a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d};
    }
    Floats factor = splat(1.0f);
    for (int64_t i = 0; i < kGroup && group * kGroup + i < w.blocks(); ++i)
        factor[i] = table[macro[(group * kGroup + i) / per_macro - first]];
    return factor;
}

// The scales of a group in one pass (0: the weight, 1: its residual); zero where there is no block.
inline Floats group_scales(const Weight& w, int64_t row, int64_t group, int pass) {
    const int64_t at = row * w.blocks() + group * kGroup, count = w.blocks() - group * kGroup;
    const uint8_t* from = (pass ? w.residual_scale : w.scale) + at;
    Bytes bytes = {};
    if (count >= kGroup)
        std::memcpy(&bytes, from, sizeof bytes);
    else
        std::memcpy(&bytes, from, static_cast<size_t>(count));
    const Words wide = __builtin_convertvector(__builtin_convertvector(bytes, Halves), Words);
    const Words bits = (wide << 23) | (((wide + 1) >> 8) << 22);  // 255 is NaN
    Floats scale = as_floats(reinterpret_cast<Ints>(bits));
    if (pass) scale *= w.scheme->alpha;
    return w.scheme->search == kNone ? scale : scale * macro_factors(w, row, group);
}

// ---- tiles: some rows of x with some columns of the output ----

struct Tile {
    const float* ordered;  // rows of x, block by block, in the order of `grid_values`; zeros where there are none
    int64_t first;         // row of x and of the output
    int rows;              // that exist
    int capacity;          // that are computed
};

template <int kRows>
struct Sums {
    static constexpr int kN = columns_of_tile(kRows);
    Lanes total[kRows][kN];
    float scale[kN][kGroup];
    const uint8_t* codes[kN];
    int64_t ahead;  // bytes to what will be read soon
};

template <int kRows>
inline __attribute__((always_inline)) void add_group(Sums<kRows>& s, const float* own, int blocks) {
    constexpr int kN = Sums<kRows>::kN;
    Lanes total[kRows][kN];  // a copy, which stays in registers
    for (int m = 0; m < kRows; ++m)
        for (int n = 0; n < kN; ++n) total[m][n] = s.total[m][n];
    for (int b = 0; b < blocks; ++b, own += kRows * kBlock) {
        Lanes one[kN], two[kN], factor[kN];
        for (int n = 0; n < kN; ++n) {
            const uint8_t* p = s.codes[n] + b * (kBlock / 2);
            __builtin_prefetch(p + s.ahead);
            grid_values(p, one[n], two[n]);
            factor[n] = lanes_of(s.scale[n][b]);
            if (kRows > 2) one[n] = times(one[n], factor[n]), two[n] = times(two[n], factor[n]);
        }
        for (int m = 0; m < kRows; ++m) {
            const Lanes first = lanes_at(own + m * kBlock), second = lanes_at(own + m * kBlock + kLanes);
            for (int n = 0; n < kN; ++n)
                if (kRows <= 2)
                    total[m][n] = times_plus(times_plus(second, two[n], times(first, one[n])), factor[n], total[m][n]);
                else
                    total[m][n] = times_plus(second, two[n], times_plus(first, one[n], total[m][n]));
        }
    }
    for (int m = 0; m < kRows; ++m)
        for (int n = 0; n < kN; ++n) s.total[m][n] = total[m][n];
}

// Adds the products with `rows` of a weight to the sums, over the groups from `first` to `last`.
template <int kRows>
void add_columns(const Tile& tile, const Weight& w, const int64_t* rows, int64_t first, int64_t last, float* sums) {
    constexpr int kN = Sums<kRows>::kN;
    Sums<kRows> s;
    s.ahead = kN * w.code_bytes();
    for (int m = 0; m < kRows; ++m)
        for (int n = 0; n < kN; ++n) s.total[m][n] = zero_lanes();
    for (int pass = 0; pass <= w.scheme->fallback; ++pass)
        for (int64_t group = first; group < last; ++group) {
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
            add_group(s, tile.ordered + group * kGroup * kRows * kBlock, blocks);
        }
    for (int m = 0; m < kRows; ++m)
        for (int n = 0; n < kN; ++n) sums[m * kColumns + n] += sum_of(s.total[m][n]);
}

template <int kRows>
void add_columns(const Tile& tile, const Weight& w, int64_t base, int64_t count, float* sums) {
    // So many groups at a time that what is read of x again for every column stays in the nearest cache.
    constexpr int64_t kTogether = kNearestCache / (kRows * kGroup * kBlock * 4);
    constexpr int kN = Sums<kRows>::kN;
    for (int64_t first = 0; first < w.groups(); first += kTogether)
        for (int n = 0; n < count; n += kN) {
            int64_t rows[kN];
            for (int i = 0; i < kN; ++i) rows[i] = base + std::min<int64_t>(n + i, count - 1);
            add_columns<kRows>(tile, w, rows, first, std::min(first + kTogether, w.groups()), sums + n);
        }
}

// ---- the product ----

Floats load_some(Type type, const char* p, int64_t count) {
    char padded[4 * kLanes] = {};
    std::memcpy(padded, p, static_cast<size_t>(count * size_of(type)));
    return load(type, padded);
}

// Rounded to nearest; what is too large is infinite.
void store_sums(Type type, char* p, int64_t count, Floats x) {
    if (type == kFloat16) x = clamp(x, 65536.0f);  // rounds to infinity
    char out[4 * kLanes];
    store(type, out, x, false);
    if (type != kFloat32) {
        Halves halves;
        std::memcpy(&halves, out, sizeof halves);
        const Words is_nan = reinterpret_cast<Words>(x != x);
        const Words fixed = is_nan ? Words{} + (type == kBFloat16 ? 0x7FC0 : 0x7E00) : __builtin_convertvector(halves, Words);
        halves = __builtin_convertvector(fixed, Halves);
        std::memcpy(out, &halves, sizeof halves);
    }
    std::memcpy(p, out, static_cast<size_t>(count * size_of(type)));
}

class Product {
  public:
    explicit Product(const Arguments& arguments)
        : a_(arguments),
          x_{a_.x, static_cast<Type>(a_.type), a_.in_features},
          weight_{a_.codes, a_.scale, a_.macro, a_.residual_codes, a_.residual_scale, a_.in_features, a_.weights},
          chunks_((a_.out_features + kColumns - 1) / kColumns) {
        const int32_t one_end[1] = {static_cast<int32_t>(a_.n_rows)};
        const int32_t* ends = a_.ends == nullptr ? one_end : a_.ends;
        for (int64_t e = 0, first = 0; e < a_.n_experts; first = ends[e++]) add_expert(e, first, ends[e]);
        order_rows();
    }

    void run() {
        std::atomic<int64_t> next{0};
        const auto items = static_cast<int64_t>(experts_.size()) * chunks_;
        in_each(items > 1 ? a_.threads : 1, [&] {
            for (int64_t item = next++; item < items; item = next++) {
                const Expert& expert = experts_[static_cast<size_t>(item / chunks_)];
                for (int64_t t = expert.first_tile; t < expert.last_tile; ++t)
                    write_columns(expert, tiles_[static_cast<size_t>(t)], item % chunks_ * kColumns);
            }
        });
    }

  private:
    struct Expert {
        int64_t index, first_tile, last_tile;
    };

    void add_expert(int64_t index, int64_t first, int64_t last) {
        if (first >= last) return;
        const auto begin = static_cast<int64_t>(tiles_.size());
        for (int64_t row = first; row < last; row += kMostRows) {
            const int rows = static_cast<int>(std::min<int64_t>(kMostRows, last - row));
            tiles_.push_back({nullptr, row, rows, rows <= 2 ? rows : kMostRows});
        }
        experts_.push_back({index, begin, static_cast<int64_t>(tiles_.size())});
    }

    void order_rows() {
        int64_t size = 0;
        for (const Tile& tile : tiles_) size += tile.capacity * weight_.blocks() * kBlock;
        ordered_.reset(new float[static_cast<size_t>(size)]);
        float* out = ordered_.get();
        for (Tile& tile : tiles_) {
            tile.ordered = out;
            for (int64_t at = 0; at < x_.length; at += kBlock)
                for (int m = 0; m < tile.capacity; ++m, out += kBlock) {
                    Block block = {};
                    if (m < tile.rows) block = load_block(x_.type, x_.at(tile.first + m, at), x_.length - at);
                    float values[kBlock];
                    std::memcpy(values, &block, sizeof values);
                    for (int i = 0; i < kBlock; ++i) out[i] = values[kOrder[i]];
                }
        }
    }

    // 16 columns of the rows of a tile, or the fewer that there are.
    void write_columns(const Expert& expert, const Tile& tile, int64_t first) {
        const int64_t count = std::min<int64_t>(kColumns, a_.out_features - first);
        const int64_t base = expert.index * a_.out_features + first;
        float sums[kMostRows * kColumns] = {};
        if (tile.capacity == 1) add_columns<1>(tile, weight_, base, count, sums);
        if constexpr (kMostRows >= 4) {
            if (tile.capacity == 2) add_columns<2>(tile, weight_, base, count, sums);
            if (tile.capacity == 4) add_columns<4>(tile, weight_, base, count, sums);
        }
        Floats bias{};
        if (a_.bias != nullptr) bias = load_some(x_.type, a_.bias + base * size_of(x_.type), count);
        for (int m = 0; m < tile.rows; ++m) {
            Floats sum;
            std::memcpy(&sum, sums + m * kColumns, sizeof sum);
            char* out = a_.y + ((tile.first + m) * a_.out_features + first) * size_of(x_.type);
            store_sums(x_.type, out, count, sum + bias);
        }
    }

    const Arguments& a_;
    Matrix x_;
    Weight weight_;
    int64_t chunks_;
    std::vector<Tile> tiles_;
    std::vector<Expert> experts_;
    std::unique_ptr<float[]> ordered_;
};

}  // namespace

// Up to how many rows products on codes are faster than panels of dequantized weights with a library's product, as
// measured.
extern "C" int64_t mxfp4_product_rows() {
#if defined(__AVX512F__) || defined(MXFP4_AVX2)
    return 32;
#else
    return 2;
#endif
}

extern "C" void mxfp4_product(const Arguments* arguments) { Product(*arguments).run(); }
