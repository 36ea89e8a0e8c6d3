// What set-up and benchmarks launch: does a peer's memory really take what we write, and what does a launch cost.

#if HAS(FAMILY_PROBES)
DEVICE u32 probe_word(u32 seed, u64 i) {
    const u32 mixed = (seed ^ static_cast<u32>(i)) * 0x9E3779B1u;
    return mixed ^ mixed >> 15;
}

// Writes `words` 32-bit words to `address`, a peer's memory; probe_read of the same seed on that peer finds them.
KERNEL probe_write(u64 address, u64 words, u32 seed) {
    for (u64 i = thread_index(); i < words; i += all_threads()) {
        st_relaxed_sys(address + i * 4, probe_word(seed, i));
    }
}

// Counts into *wrong, zero before, the words at `address` that are not those of probe_write.
KERNEL probe_read(u64 address, u64 words, u32 seed, u32* wrong) {
    u32 found = 0;
    for (u64 i = thread_index(); i < words; i += all_threads()) {
        found += ld_relaxed_sys(address + i * 4) != probe_word(seed, i);
    }
    if (found) count_up(wrong, found);
}

KERNEL empty() {}
#endif
