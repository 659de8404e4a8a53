// SPDX-License-Identifier: Apache-2.0
// Sums over the error of quantizing a matrix: those of hf_mxfp4/lab/errors/statistics.py, in one pass and in float64.

#include <cmath>

#include "blocks.h"
#include "threads.h"

namespace {

constexpr int kDoubleLanes = 8;
constexpr int kBins = 64;
constexpr double kFirstBin = -2.0, kBinsPerUnit = 16.0;

typedef double Doubles __attribute__((vector_size(8 * kDoubleLanes), aligned(8)));
typedef int64_t Longs __attribute__((vector_size(8 * kDoubleLanes), aligned(8)));
typedef float Eight __attribute__((vector_size(4 * kDoubleLanes), aligned(4)));
typedef int32_t EightInts __attribute__((vector_size(4 * kDoubleLanes), aligned(4)));

// As in functions.py.
enum Sum {
    kEnergy,
    kScaleBias,
    kDeadzone,
    kGrid,
    kScaleDotGrid,
    kQuantizedDot,
    kHiddenEnergy,      // of x in the deadzone
    kHiddenQuantized,   // of Q in the deadzone
    kHiddenDot,         // of Q and x in the deadzone
    kDeadzoneCount,
    kZeroCount,
    kBlocks,
    kGamma,
    kGammaSquare,
    kDelta,
    kDeltaSquare,
    kNotFinite,
    kSums
};

inline Eight round_nearest(Eight y) {
    EightInts exponent = reinterpret_cast<EightInts>(y) & 0x7F800000;
    exponent = exponent > 0x3F800000 ? exponent : EightInts{} + 0x3F800000;
    const Eight anchor = reinterpret_cast<Eight>(exponent) * 6291456.0f;
    return (y + anchor) - anchor;
}

inline double total(Doubles lanes) {
    double sum = 0.0;
    for (int i = 0; i < kDoubleLanes; ++i) sum += lanes[i];
    return sum;
}

struct AddUp {
    int64_t length;
    double sums[kSums] = {};
    int64_t bins[kBins] = {};

    void block(int64_t, int64_t index, const Result& result) {
        if (!finite(result.amax)) {
            sums[kNotFinite] += 1.0;
            return;
        }
        if (result.amax == 0) return;
        const double amax = as_float(result.amax);
        const double ideal_scale = amax / 6.0;
        Doubles energy{}, scale_bias{}, deadzone{}, grid{}, cross{}, dot{}, hidden{}, hidden_q{}, hidden_dot{};
        Longs in_deadzone{}, zeroed{};
        float xs[kBlock], qs[kBlock];
        std::memcpy(xs, &result.x, sizeof xs);
        std::memcpy(qs, &result.value, sizeof qs);
        for (int i = 0; i < kBlock; i += kDoubleLanes) {
            Eight narrow_x, narrow_q;
            std::memcpy(&narrow_x, xs + i, sizeof narrow_x);
            std::memcpy(&narrow_q, qs + i, sizeof narrow_q);
            // The float32 range, to which results are saturated.
            narrow_q = narrow_q > kMaxFloat ? Eight{} + kMaxFloat : narrow_q;
            narrow_q = narrow_q < -kMaxFloat ? Eight{} - kMaxFloat : narrow_q;
            const Doubles x = __builtin_convertvector(narrow_x, Doubles), q = __builtin_convertvector(narrow_q, Doubles);
            const Doubles magnitude = x < 0.0 ? -x : x;
            const Longs inside = magnitude * 24.0 < amax;
            const Eight ratio = __builtin_convertvector(x * 6.0 / amax, Eight);
            const Doubles on_grid = __builtin_convertvector(round_nearest(ratio), Doubles) * ideal_scale;
            const Doubles ideal = __builtin_convertvector(__builtin_convertvector(on_grid, Eight), Doubles);
            const Doubles error = q - x, zero{};
            const Doubles grid_error = inside ? zero : ideal - x;
            const Doubles scale_error = inside ? zero : error - grid_error;
            const Doubles dead_error = inside ? error : zero;
            const Doubles hidden_x = inside ? x : zero, hidden_value = inside ? q : zero;
            energy += x * x;
            scale_bias += scale_error * scale_error;
            deadzone += dead_error * dead_error;
            grid += grid_error * grid_error;
            cross += scale_error * grid_error;
            dot += q * x;
            hidden += hidden_x * hidden_x;
            hidden_q += hidden_value * hidden_value;
            hidden_dot += hidden_value * hidden_x;
            in_deadzone -= inside;
            zeroed -= (q == 0.0) & (x != 0.0);
        }
        const Doubles vectors[] = {energy, scale_bias, deadzone, grid, cross, dot, hidden, hidden_q, hidden_dot};
        for (int i = kEnergy; i <= kHiddenDot; ++i) sums[i] += total(vectors[i]);
        for (int i = 0; i < kDoubleLanes; ++i) {
            sums[kDeadzoneCount] += static_cast<double>(in_deadzone[i]);
            sums[kZeroCount] += static_cast<double>(zeroed[i]);
        }
        // Padding lies in the deadzone too.
        sums[kDeadzoneCount] -= static_cast<double>(std::max<int64_t>(0, (index + 1) * kBlock - length));
        const double gamma = static_cast<double>(scale_value(result.one.byte)) / (as_float(result.scaled_amax) / 6.0);
        const double delta = std::log2(gamma);
        sums[kBlocks] += 1.0;
        sums[kGamma] += gamma;
        sums[kGammaSquare] += gamma * gamma;
        sums[kDelta] += delta;
        sums[kDeltaSquare] += delta * delta;
        const double bin = std::floor((delta - kFirstBin) * kBinsPerUnit);
        bins[static_cast<int>(std::min(std::max(bin, 0.0), kBins - 1.0))] += 1;
    }
    void macro(int64_t, int64_t, int) {}
};

}  // namespace

// Sums and bins of each portion of rows, in whose layout functions.py knows them. Added up by portion, so that they do not
// depend on the number of threads.
extern "C" void mxfp4_statistics(const char* input, int type, int64_t length, const Scheme* scheme, int64_t n_rows,
                                 int64_t threads, int64_t portion, double* sums, int64_t* bins) {
    in_threads((n_rows + portion - 1) / portion, threads, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            AddUp sink{length};
            const int64_t end = std::min((i + 1) * portion, n_rows);
            for_each_block(Matrix{input, static_cast<Type>(type), length}, i * portion, end, *scheme, sink);
            std::copy_n(sink.sums, kSums, sums + i * kSums);
            std::copy_n(sink.bins, kBins, bins + i * kBins);
        }
    });
}
