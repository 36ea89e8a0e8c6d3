// All-reduces by the switches of NVLink (multimem instructions), from sm_90 on. all_reduce.cu holds the barrier of blocks.
// DESIGN.md, "Multimem", describes and proves the protocol, and says why the one-shot form must be asked for.

#if HAS(FAMILY_MULTIMEM)
// An area of `staging_bytes` on every rank. `own` is the address of this rank's area, for all instructions
// but multimem; `all` is the multimem address of the areas of all ranks, for multimem instructions only.
struct MulticastArea {
    u64 own;
    u64 all;
};
static_assert(sizeof(MulticastArea) == 16, "kernel_layout.py packs 16 bytes");
#endif

#if HAS(FAMILY_MULTIMEM) && (defined(GC_HOST_BUILD) || __CUDA_ARCH__ >= 900)
#ifndef GC_HOST_BUILD
#if DTYPE == 0
#define MULTIMEM_ADD "add.v4.f32"
#define MULTIMEM_VECTOR "v4.f32"
#elif DTYPE == 1
#define MULTIMEM_ADD "add.acc::f32.v4.f16x2"
#define MULTIMEM_VECTOR "v4.f16x2"
#else
#define MULTIMEM_ADD "add.acc::f32.v4.bf16x2"
#define MULTIMEM_VECTOR "v4.bf16x2"
#endif

// The sum of the vectors of all ranks at a multimem address, in an order that the switch chooses.
DEVICE Vector multimem_sum(u64 address) {
    Vector v;
    asm volatile("multimem.ld_reduce.relaxed.sys.global." MULTIMEM_ADD " {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(address)
                 : "memory");
    return v;
}

// Stores a vector in the memory of all ranks.
DEVICE void multimem_store(u64 address, const Vector& v) {
    asm volatile("multimem.st.relaxed.sys.global." MULTIMEM_VECTOR " [%0], {%1, %2, %3, %4};" ::"l"(address),
                 "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
}

DEVICE void fence_proxy_alias() { asm volatile("fence.proxy.alias;" ::: "memory"); }
#endif

// A barrier between accesses to an area by its own address and by the multimem address. The two are aliases, so the barrier
// alone orders nothing between them; a proxy fence must lie on the path from each access to each access behind the barrier
// (PTX ISA, 8.9.5). Every thread fences behind the barrier, so all of these paths end with one.
DEVICE void change_address(const Params& p, Call& call) {
    block_barrier(p, call);
    fence_proxy_alias();
}

// Vector i of every shard of a tensor, from `in` to the own area. The block that stages it here has the index of the blocks
// that sum it elsewhere, because a barrier is between blocks of the same index.
DEVICE void stage(u64 area, const char* in, u64 bytes, u64 shard, u64 i) {
    Vector v[WORLD_SIZE];
#pragma unroll
    for (u32 r = 0; r < WORLD_SIZE; ++r) v[r] = load(in, r * shard + i, bytes, true);
#pragma unroll
    for (u32 r = 0; r < WORLD_SIZE; ++r) st_relaxed_sys_v4(area + (r * shard + i) * 16, v[r]);
}

// Replaces the vectors of a shard by their sums on all ranks, four at a time so that the switch works on several.
DEVICE void sum_shard(u64 address, u64 shard) {
    const u64 step = all_threads();
    u64 i = thread_index();
#pragma unroll 1
    for (; i + 3 * step < shard; i += 4 * step) {
        Vector v[4];
#pragma unroll
        for (u32 k = 0; k < 4; ++k) v[k] = multimem_sum(address + (i + k * step) * 16);
#pragma unroll
        for (u32 k = 0; k < 4; ++k) multimem_store(address + (i + k * step) * 16, v[k]);
    }
#pragma unroll 1
    for (; i < shard; i += step) multimem_store(address + i * 16, multimem_sum(address + i * 16));
}

// in and out: aligned to 16 bytes, may be equal. Shards are equal, padded with zeros. One rank sums a shard and stores the
// sum on all ranks, so that all get the same bits although the order of the sum is not defined.
KERNEL multimem_two_shot(PARAMS, EACH(MulticastArea) areas, EACH(const void*) inputs, EACH(void*) outputs,
                         u64 count) {
    OWN_PARAMS;
    const MulticastArea area = OWN(areas);
    Call call = enter_pull(p, MULTIMEM_TWO_SHOT);
    const char* in = static_cast<const char*>(OWN(inputs));
    char* out = static_cast<char*>(OWN(outputs));
    const u64 bytes = count * ELEMENT_BYTES;
    const u64 shard = (vectors_of(bytes) + WORLD_SIZE - 1) / WORLD_SIZE;
    for (u64 i = thread_index(); call.alive && i < shard; i += all_threads()) stage(area.own, in, bytes, shard, i);
    change_address(p, call);
    if (call.alive) sum_shard(area.all + p.rank * shard * 16, shard);
    change_address(p, call);
    for (u64 i = thread_index(); call.alive && i < shard; i += all_threads()) {
        Vector v[WORLD_SIZE];
#pragma unroll
        for (u32 r = 0; r < WORLD_SIZE; ++r) v[r] = ld_relaxed_sys_v4(area.own + (r * shard + i) * 16);
#pragma unroll
        for (u32 r = 0; r < WORLD_SIZE; ++r) store(out, r * shard + i, bytes, v[r]);
    }
    leave_pull(p, call);
}

// in and out: aligned to 16 bytes, may be equal. Every rank asks the switch for every sum, so ranks need not get equal bits.
KERNEL multimem_one_shot(PARAMS, EACH(MulticastArea) areas, EACH(const void*) inputs, EACH(void*) outputs,
                         u64 count) {
    OWN_PARAMS;
    const MulticastArea area = OWN(areas);
    Call call = enter_pull(p, MULTIMEM_ONE_SHOT);
    const char* in = static_cast<const char*>(OWN(inputs));
    char* out = static_cast<char*>(OWN(outputs));
    const u64 bytes = count * ELEMENT_BYTES, vectors = vectors_of(bytes), step = all_threads();
    for (u64 i = thread_index(); call.alive && i < vectors; i += step) {
        st_relaxed_sys_v4(area.own + i * 16, load(in, i, bytes, true));
    }
    change_address(p, call);
    u64 i = call.alive ? thread_index() : vectors;
#pragma unroll 1
    for (; i + 3 * step < vectors; i += 4 * step) {
        Vector v[4];
#pragma unroll
        for (u32 k = 0; k < 4; ++k) v[k] = multimem_sum(area.all + (i + k * step) * 16);
#pragma unroll
        for (u32 k = 0; k < 4; ++k) store(out, i + k * step, bytes, v[k]);
    }
#pragma unroll 1
    for (; i < vectors; i += step) store(out, i, bytes, multimem_sum(area.all + i * 16));
    change_address(p, call);  // no peer sums what is staged here any more: the next call may replace it
    leave_pull(p, call);
}
#endif
