// This file holds the two system calls by which threads of any process sleep and wake each other.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>

namespace ring {

// Sleeps while `word` holds `seen`, for at most `nanoseconds`. Any wake-up, signal or change ends the sleep. Returns false if
// a signal ended it.
inline bool futex_wait(std::atomic<uint32_t>& word, uint32_t seen, uint64_t nanoseconds) {
    timespec limit{static_cast<time_t>(nanoseconds / 1000000000ULL), static_cast<long>(nanoseconds % 1000000000ULL)};
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr, 0) == 0 ||
           errno != EINTR;
}

inline void futex_wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace ring
