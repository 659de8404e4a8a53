// SPDX-License-Identifier: Apache-2.0
// Work shared out over the threads that torch computes with: OpenMP's threads spin for milliseconds before they sleep,
// so a second pool would compete with them. No Python code runs in these threads, and no signal handler.

#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

// The process in which torch's OpenMP may be used: a forked one would wait for threads that it does not have. See
// library.py.
extern "C" int mxfp4_process;

namespace {

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

// GOMP_parallel of the library that torch has loaded, or null.
inline Parallel openmp() {
    static const auto found = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    return getpid() == mxfp4_process ? found : nullptr;
}

// Call `work` in each of several threads. OpenMP may give fewer than asked for.
template <class Work>
void in_each(int64_t threads, Work&& work) {
    if (threads <= 1) return work();
    if (const Parallel parallel = openmp()) {
        const auto call = [](void* own) { (*static_cast<std::remove_reference_t<Work>*>(own))(); };
        return parallel(call, &work, static_cast<unsigned>(threads), 0);
    }
    std::vector<std::thread> others;
    for (int64_t i = 1; i < threads; ++i) others.emplace_back([&work] { work(); });
    work();
    for (auto& other : others) other.join();
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
