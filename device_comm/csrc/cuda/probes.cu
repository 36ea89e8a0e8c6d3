// Kernels for setup and benchmarks: test whether writes arrive in a peer's memory, and measure the cost of a launch.

#if HAS(FAMILY_PROBES)
DEVICE u32 probe_word(u32 seed, u64 i) {
    const u32 mixed = (seed ^ static_cast<u32>(i)) * 0x9E3779B1u;
    return mixed ^ mixed >> 15;
}

// Writes `words` 32-bit words to `address`, a peer's memory; probe_read with the same seed on that peer checks them.
KERNEL probe_write(u64 address, u64 words, u32 seed) {
    for (u64 i = thread_index(); i < words; i += all_threads()) {
        st_relaxed_sys(address + i * 4, probe_word(seed, i));
    }
}

// Adds to *wrong, initially zero, the number of words at `address` that differ from those of probe_write.
KERNEL probe_read(u64 address, u64 words, u32 seed, u32* wrong) {
    u32 found = 0;
    for (u64 i = thread_index(); i < words; i += all_threads()) {
        found += ld_relaxed_sys(address + i * 4) != probe_word(seed, i);
    }
    if (found) count_up(wrong, found);
}

KERNEL empty() {}
#endif
