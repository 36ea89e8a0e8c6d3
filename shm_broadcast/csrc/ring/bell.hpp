// This file holds the bell of a process: one futex word, in memory that it shares with the writers of several rings, on which a
// thread of it sleeps until any of these rings has something for it.
#pragma once

#include "futex.hpp"

namespace ring {

struct Bell {
    std::atomic<uint32_t> word;       // futex word that changes each time that the bell sounds
    std::atomic<uint32_t> listeners;  // number of threads that sleep on `word`, or are about to

    // Begins to listen. Returns the value of `word` to sleep on. The caller then looks at each ring, and sleeps if it finds nothing.
    uint32_t begin() {
        // SYNC bell->listener (acquire): a thread that sees the word changed also sees the reason for it.
        const uint32_t seen = word.load(std::memory_order_acquire);
        // SYNC listeners->sequence (seq_cst): either the writer sees that a thread listens, or the thread sees what it published.
        listeners.fetch_add(1, std::memory_order_seq_cst);
        return seen;
    }

    void end() { listeners.fetch_sub(1, std::memory_order_relaxed); }

    // Wakes the threads that listen. Without any this costs one load, of a line that changes only when a thread begins to listen
    // or stops.
    void sound() {
        // SYNC listeners->sequence (seq_cst): this follows the change of a ring's sequence word.
        if (listeners.load(std::memory_order_seq_cst) == 0) return;
        // SYNC bell->listener (release)
        word.fetch_add(1, std::memory_order_release);
        futex_wake_all(word);
    }
};
static_assert(sizeof(Bell) == 8);

}  // namespace ring
