// SPDX-License-Identifier: Apache-2.0
// Work shared out over torch's OpenMP threads: these spin for milliseconds before they sleep, so a second pool would
// compete with them.

#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

// The process that may use torch's OpenMP: a forked one would wait for threads that it does not have. See __init__.py.
extern "C" int mxfp4_process;

namespace {

// Call `work` in each of several threads, or fewer: in one where torch's OpenMP cannot be used.
template <class Work>
void in_each(int64_t threads, Work&& work) {
    using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
    static const auto parallel = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    if (threads <= 1 || parallel == nullptr || getpid() != mxfp4_process) return work();
    const auto call = [](void* own) { (*static_cast<std::remove_reference_t<Work>*>(own))(); };
    parallel(call, &work, static_cast<unsigned>(threads), 0);
}

// Call `work(first, last)` on consecutive ranges that make up 0..count.
template <class Work>
void in_threads(int64_t count, int64_t threads, Work&& work) {
    const int64_t spans = std::min(threads, count);
    if (spans <= 1) return work(0, count);
    std::atomic<int64_t> next{0};
    in_each(threads, [&] {
        for (int64_t i = next++; i < spans; i = next++) work(count * i / spans, count * (i + 1) / spans);
    });
}

}  // namespace
