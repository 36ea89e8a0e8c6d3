// Blocks that share a row of the norm: clusters, and mailboxes in their shared memory.
//
// From sm_90 on the blocks of a cluster run at the same time and write each other's shared memory. Without a launch
// attribute, and on older devices, a cluster is one block.

#ifndef GC_HOST_BUILD
DEVICE u32 cluster_blocks() {
    u32 blocks = 1;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
#endif
    return blocks;
}

DEVICE u32 block_in_cluster() {
    u32 block = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
#endif
    return block;
}

#if __CUDA_ARCH__ >= 900
DEVICE u32 shared_address(const void* own) { return static_cast<u32>(__cvta_generic_to_shared(own)); }

DEVICE u32 shared_address_in(const void* own, u32 block) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(block));
    return address;
}
#endif

// Blocks of a cluster exchange floats through mailboxes: st.async stores into another block's shared memory
// and counts the bytes on that block's barrier. A fence is not needed; it would also wait for the stores to
// the peers. `barrier`: a word in shared memory for each mailbox. All threads of the cluster call this before
// any stores.
DEVICE void open_mailboxes(u64* barrier, u32 count) {
#if __CUDA_ARCH__ >= 900
    if (cluster_blocks() == 1) return;
    if (threadIdx.x == 0) {
        for (u32 b = 0; b < count; ++b) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier + b)) : "memory");
        }
        // SYNC mailboxes->senders (release): join_cluster() is the other end.
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}

// Waits until all blocks of the cluster run and have opened their mailboxes.
DEVICE void join_cluster() {
#if __CUDA_ARCH__ >= 900
    // SYNC mailboxes->senders (acquire)
    if (cluster_blocks() > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Waits for all threads of the cluster, after join_cluster(). Orders no memory.
DEVICE void meet_cluster() {
#if __CUDA_ARCH__ >= 900
    if (cluster_blocks() > 1) {
        asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
        asm volatile("barrier.cluster.wait;" ::: "memory");
        return;
    }
#endif
    __syncthreads();
}

// Stores a float in the mailbox of a block, at the place of `own` in this block's shared memory.
DEVICE void send_float(u64* barrier, float* own, u32 block, float value) {
#if __CUDA_ARCH__ >= 900
    if (cluster_blocks() > 1) {
        // SYNC send->await (release): counts the bytes when they are there.
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                         shared_address_in(own, block)),
                     "r"(__float_as_uint(value)), "r"(shared_address_in(barrier, block))
                     : "memory");
        return;
    }
#endif
    *own = value;
}

// Waits until `bytes` have been sent to this block's mailbox for the `use`-th time. All threads of the block call it.
DEVICE void await_mail(u64* barrier, u32 bytes, u32 use) {
#if __CUDA_ARCH__ >= 900
    if (cluster_blocks() > 1) {
        const u32 address = shared_address(barrier);
        if (threadIdx.x == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
        }
        for (u32 done = 0; !done;) {
            // SYNC send->await (acquire)
            asm volatile(
                "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; "
                "selp.u32 %0, 1, 0, p; }"
                : "=r"(done)
                : "r"(address), "r"(use & 1)
                : "memory");
        }
        return;
    }
#endif
    __syncthreads();
}
#endif
