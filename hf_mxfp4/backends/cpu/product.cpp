// SPDX-License-Identifier: Apache-2.0
// y = x W^T + b on packed weights, of one weight or of all experts. Every element of y is computed alike whatever the
// number of threads.

#include <memory>

#include "product_bf16.h"
#include "product_float.h"
#include "threads.h"

int mxfp4_process = 0;

extern "C" void mxfp4_quantize(const char*, int, int64_t, const Scheme*, int64_t, int64_t, char*,
                               uint8_t*, uint8_t*, uint8_t*, uint8_t*, uint8_t*);

namespace {

// As in library.py.
struct Arguments {
    const char* x;
    int64_t type;  // of x, the bias and y
    int64_t n_rows;
    const Scheme* inputs;  // how x is quantized first; null: not at all
    const uint8_t *codes, *scale, *macro, *residual_codes, *residual_scale;
    int64_t in_features, out_features;
    const Scheme* weights;
    const char* bias;     // or null
    const int32_t* ends;  // of the rows of each expert, or null
    int64_t n_experts;    // 1 without
    char* y;
    int64_t threads;
};

struct Expert {
    int64_t index, first_tile, last_tile;
};

constexpr int64_t kNearestCache = 1 << 15;

// Quantities beyond which float32 products without their scales may overflow, or are not finite.
constexpr uint32_t kHugeBits = static_cast<uint32_t>(120 + 127) << 23;

Floats load_some(Type type, const char* p, int64_t count) {
    char padded[4 * kLanes] = {};
    std::memcpy(padded, p, static_cast<size_t>(count * size_of(type)));
    return load(type, padded);
}

bool has_huge(const Matrix& x, int64_t n_rows) {
    Ints found = {};
    const int64_t count = n_rows * x.length;
    for (int64_t at = 0; at < count; at += kLanes) {
        const char* p = x.data + at * size_of(x.type);
        const Floats values = count - at >= kLanes ? load(x.type, p) : load_some(x.type, p, count - at);
        found |= (bits_of(values) & 0x7FFFFFFF) >= static_cast<int32_t>(kHugeBits);
    }
    return any(found);
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

template <class Kernel>
class Product {
  public:
    explicit Product(const Arguments& arguments)
        : a_(arguments),
          x_{a_.x, static_cast<Type>(a_.type), a_.in_features},
          weight_{a_.codes,          a_.scale,        a_.macro, a_.residual_codes,
                  a_.residual_scale, a_.in_features, a_.weights} {
        if (a_.inputs != nullptr) quantize_input();
        all_rare_ = has_huge(x_, a_.n_rows);
        const int32_t one_end[1] = {static_cast<int32_t>(a_.n_rows)};
        const int32_t* ends = a_.ends == nullptr ? one_end : a_.ends;
        for (int64_t e = 0, first = 0; e < a_.n_experts; first = ends[e++]) add_expert(e, first, ends[e]);
        chunks_ = (a_.out_features + kColumns - 1) / kColumns;
        if (!all_rare_) order_rows();
    }

    void run() {
        std::atomic<int64_t> next{0};
        in_each(items() > 1 ? a_.threads : 1, [&] {
            for (int64_t item = next++; item < items(); item = next++) columns(item);
        });
    }

  private:
    int64_t items() const { return static_cast<int64_t>(experts_.size()) * chunks_; }

    void quantize_input();

    void add_expert(int64_t index, int64_t first, int64_t last) {
        if (first >= last) return;
        const auto begin = static_cast<int64_t>(tiles_.size());
        for (int64_t row = first; row < last; row += Kernel::kMostRows) {
            const int rows = static_cast<int>(std::min<int64_t>(Kernel::kMostRows, last - row));
            tiles_.push_back({nullptr, row, rows, rows <= 2 ? rows : rows <= 4 ? 4 : Kernel::kMostRows});
        }
        experts_.push_back({index, begin, static_cast<int64_t>(tiles_.size())});
    }

    void order_rows() {
        const int64_t units = (x_.length + Kernel::kUnit - 1) / Kernel::kUnit;
        int64_t size = 0;
        for (const Tile& tile : tiles_) size += tile.capacity * units * Kernel::kUnitBytes;
        ordered_.reset(new char[static_cast<size_t>(size + 64)]);
        char* out = ordered_.get() + (64 - reinterpret_cast<uintptr_t>(ordered_.get()) % 64) % 64;
        for (Tile& tile : tiles_) {
            tile.ordered = out;
            for (int64_t unit = 0; unit < units; ++unit)
                for (int m = 0; m < tile.capacity; ++m, out += Kernel::kUnitBytes)
                    if (m < tile.rows)
                        Kernel::order(x_, tile.first + m, unit * Kernel::kUnit, out);
                    else
                        std::memset(out, 0, Kernel::kUnitBytes);
        }
    }

    // 16 columns of the rows of an expert, or the fewer that there are.
    void columns(int64_t item) {
        const Expert& expert = experts_[static_cast<size_t>(item / chunks_)];
        const int64_t first = item % chunks_ * kColumns;
        const int64_t count = std::min<int64_t>(kColumns, a_.out_features - first);
        for (int64_t t = expert.first_tile; t < expert.last_tile; ++t) columns(expert, tiles_[t], first, count);
    }

    // The same of a tile.
    void columns(const Expert& expert, const Tile& tile, int64_t first, int64_t count) {
        float sums[kMostRows * kColumns] = {};
        const int64_t base = expert.index * a_.out_features + first;
        for (int n = 0; n < count; ++n)
            if (all_rare_ || has_rare(weight_, base + n)) add_rare(x_, tile, weight_, base + n, all_rare_, sums + n);
        if (!all_rare_) sum_columns(tile, base, count, sums);
        Floats bias{};
        if (a_.bias != nullptr) bias = load_some(x_.type, a_.bias + base * size_of(x_.type), count);
        for (int m = 0; m < tile.rows; ++m) {
            Floats sum;
            std::memcpy(&sum, sums + m * kColumns, sizeof sum);
            char* out = a_.y + ((tile.first + m) * a_.out_features + first) * size_of(x_.type);
            store_sums(x_.type, out, count, sum + bias);
        }
    }

    void sum_columns(const Tile& tile, int64_t base, int64_t count, float* sums) {
        if constexpr (Kernel::kMostRows >= 8)
            if (tile.capacity == 8) return sum_columns<8>(tile, base, count, sums);
        if constexpr (Kernel::kMostRows >= 4) {
            if (tile.capacity == 4) return sum_columns<4>(tile, base, count, sums);
            if (tile.capacity == 2) return sum_columns<2>(tile, base, count, sums);
        }
        sum_columns<1>(tile, base, count, sums);
    }

    template <int kRows>
    void sum_columns(const Tile& tile, int64_t base, int64_t count, float* sums) {
        constexpr int kN = Kernel::columns(kRows);
        // So many groups at a time that what is read of x again for every column stays in the nearest cache.
        constexpr int64_t kTogether = kNearestCache / (kRows * (kGroup * kBlock / Kernel::kUnit) * Kernel::kUnitBytes);
        for (int64_t first = 0; first < weight_.groups(); first += kTogether)
            for (int n = 0; n < count; n += kN) {
                int64_t rows[kN];
                for (int i = 0; i < kN; ++i) rows[i] = base + std::min<int64_t>(n + i, count - 1);
                const Span groups{first, std::min(first + kTogether, weight_.groups())};
                Kernel::template tile<kRows>(tile, weight_, rows, groups, sums + n);
            }
    }

    const Arguments& a_;
    Matrix x_;
    Weight weight_;
    bool all_rare_ = false;
    int64_t chunks_ = 0;
    std::vector<Tile> tiles_;
    std::vector<Expert> experts_;
    std::unique_ptr<char[]> ordered_, quantized_;
};

template <class Kernel>
void Product<Kernel>::quantize_input() {
    quantized_.reset(new char[static_cast<size_t>(a_.n_rows * x_.length * size_of(x_.type))]);
    mxfp4_quantize(x_.data, x_.type, x_.length, a_.inputs, a_.n_rows, a_.threads, quantized_.get(), nullptr, nullptr,
                   nullptr, nullptr, nullptr);
    x_.data = quantized_.get();
}

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

extern "C" void mxfp4_product(const Arguments* arguments) {
#ifdef __AVX512BF16__
    if (arguments->type == kBFloat16) return Product<BFloat16Kernel>(*arguments).run();
#endif
    Product<FloatKernel>(*arguments).run();
}
