// Shared by all kernels: parameters, memory operations, number formats, entry, waiting and exit.
//
// No header is included: NVRTC compiles this file and the ones after it (kernels.py, FRAGMENTS) on machines without a
// CUDA toolkit. Under GC_HOST_BUILD g++ compiles the same text behind the tests' shim. DESIGN.md, "Custom all-reduce
// on CUDA", describes and proves the protocol. kernel_layout.py defines the same numbers.

#if WORLD_SIZE < 2 || WORLD_SIZE > 8
#error "WORLD_SIZE must be 2 to 8"
#endif
#if DTYPE < 0 || DTYPE > 2
#error "DTYPE must be 0 (float32), 1 (float16) or 2 (bfloat16)"
#endif

// A module holds one family of kernels, because compiling all families takes three times as long as a start may take.
// Without FAMILY all are compiled.
#define FAMILY_ONE_SHOT 1
#define FAMILY_TWO_SHOT 2
#define FAMILY_SHARDS 3
#define FAMILY_PULL 4
#define FAMILY_NORM 5
#define FAMILY_NORM_FP8 6
#define FAMILY_FINALIZE 7
#define FAMILY_MULTIMEM 8
#define FAMILY_NORM_NVFP4 9
#ifdef FAMILY
#define HAS(family) (FAMILY == (family))
#else
#define HAS(family) 1
#endif

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 MAX_BLOCKS = 256;
constexpr u64 FLAG_LINE_BYTES = 128;
constexpr u64 FLAGS_BYTES = MAX_BLOCKS * FLAG_LINE_BYTES;
constexpr u32 STATE_BARRIER_WORD = MAX_BLOCKS;
constexpr u32 STATE_POISONED_WORD = 2 * MAX_BLOCKS;
constexpr u64 ABORT_OFFSET = 32;
constexpr u32 SENTINEL = 0xFFFFFFFFu;
constexpr u32 SENTINEL_SENT_AS = 0x7FFF7FFFu;  // NaN like the sentinel: one of 32 bits, or two of 16
constexpr u32 NORM_GROUPS = 4;         // of the lanes of a norm's sum: a block of a cluster has one or more of them
constexpr u32 GROUP_LANES = 256;
constexpr u32 NORM_LANES = NORM_GROUPS * GROUP_LANES;
// About 0.7 ms of polling an H100's own memory, so that one read over PCIe in that time costs nothing.
constexpr u32 POLLS_PER_CHECK = 1024;
#if DTYPE == 0
typedef u32 Element;
#else
typedef u16 Element;
#endif
constexpr u32 ELEMENT_BYTES = sizeof(Element);
constexpr u32 ELEMENTS = 16 / ELEMENT_BYTES;

enum Reason : u32 { DEADLINE = 1, ABORTED = 2, UNREGISTERED = 3 };
enum Kernel : u32 {
    PUSH_ONE_SHOT = 1,
    PUSH_TWO_SHOT,
    PUSH_REDUCE_SCATTER,
    PUSH_ALL_GATHER,
    PULL_ONE_SHOT,
    PULL_TWO_SHOT,
    PUSH_ADD_RMS_NORM,
    PUSH_TWO_SHOT_ADD_RMS_NORM,
    PUSH_ADD_RMS_NORM_FP8,
    PUSH_TWO_SHOT_ADD_RMS_NORM_FP8,
    PUSH_MOE_FINALIZE,
    MULTIMEM_TWO_SHOT,
    PUSH_ADD_RMS_NORM_NVFP4,
    PUSH_TWO_SHOT_ADD_RMS_NORM_NVFP4,
    STAGED_ALL_GATHER,
    MULTIMEM_ONE_SHOT
};

struct Params {
    u64 workspace[8];
    u64 state;
    u64 error;
    u64 deadline_ns;
    u64 arena_bytes;
    u64 results_offset;
    u32 rank;
    u32 pad;
};
static_assert(sizeof(Params) == 112, "kernel_layout.py packs 112 bytes");

struct alignas(16) Vector {
    u32 word[4];
};
struct alignas(16) Pairs {
    u64 pair[2];
};

// Declaration of a kernel. With EMULATE one launch on one GPU runs all ranks: blockIdx.y is the rank, and every argument
// that differs between ranks is a table in device memory.
#ifdef GC_HOST_BUILD
constexpr u32 WARP = 1;  // every thread is a warp of its own
#define KERNEL static void
#define __grid_constant__
#define SHARED(type, name) type& name = host_shared<type>()
#else
constexpr u32 WARP = 32;
#define KERNEL extern "C" __global__ void __launch_bounds__(512, 1)
#define SHARED(type, name) __shared__ type name
#define DEVICE __device__ __forceinline__
#endif
#ifdef EMULATE
#define PARAMS const Params* params_table
#define OWN_PARAMS const Params& p = params_table[blockIdx.y]
#define EACH(type) type const*
#define OWN(argument) (argument)[blockIdx.y]
#else
// A __grid_constant__ is read in place: indexing it at run time needs no copy in local memory.
#define PARAMS const __grid_constant__ Params params
#define OWN_PARAMS const Params& p = params
#define EACH(type) type
#define OWN(argument) (argument)
#endif

// ---- memory --------------------------------------------------------------------------------------------------
// A 16-byte access is not atomic: it acts as four accesses of 32 bits or two of 64 bits, in any order.

#ifndef GC_HOST_BUILD
DEVICE u64 as_global(const void* address) { return __cvta_generic_to_global(address); }

// A plain load: several of them may be in flight while the thread does something else.
DEVICE Vector ld_vector(const void* address) { return *static_cast<const Vector*>(address); }

DEVICE void st_vector(void* address, const Vector& v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(as_global(address)), "r"(v.word[0]),
                 "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
}

DEVICE Vector ld_relaxed_sys_v4(u64 address) {
    Vector v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(address)
                 : "memory");
    return v;
}

DEVICE void st_relaxed_sys_v4(u64 address, const Vector& v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.word[0]),
                 "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
}

DEVICE Pairs ld_relaxed_sys_pairs(u64 address) {
    Pairs v;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(v.pair[0]), "=l"(v.pair[1])
                 : "l"(address)
                 : "memory");
    return v;
}

DEVICE void st_relaxed_sys_pairs(u64 address, const Pairs& v) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(v.pair[0]), "l"(v.pair[1])
                 : "memory");
}

DEVICE u32 ld_relaxed_sys(u64 address) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

DEVICE void st_relaxed_sys(u64 address, u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

DEVICE void st_relaxed_sys_u64(u64 address, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// SYNC flag->peers (acquire): used by block_barrier, which says what the flag orders.
DEVICE u32 ld_acquire_sys(u64 address) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

// SYNC flag->peers (release): used by block_barrier, which says what the flag orders.
DEVICE void st_release_sys(u64 address, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// SYNC clear->push (release): used by order_pushes(), which says what it orders.
DEVICE void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// SYNC clear->push (acquire): used by acquire_pushes(), which says what it orders. From sm_90 and CUDA 12.7 on (PTX ISA 8.6)
// it only invalidates the L1 cache; the older form also waits for this thread's stores.
DEVICE void fence_acquire_sys() {
#if __CUDA_ARCH__ >= 900 && (__CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 7))
    asm volatile("fence.acquire.sys;" ::: "memory");
#else
    asm volatile("fence.acq_rel.sys;" ::: "memory");
#endif
}

DEVICE u64 globaltimer() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}

DEVICE bool first_to_set(u64 address) {
    return atomicCAS(reinterpret_cast<u32*>(address), 0u, 1u) == 0u;
}

DEVICE void spin_hint() {}

// With programmatic dependent launch a kernel may begin before the previous one on the stream has ended. This waits until
// that kernel has ended and its writes are visible, so the code after it can rely on stream order. Otherwise a no-op.
DEVICE void wait_for_the_stream() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel on the stream begin, if it was launched for that, once all blocks are here. No wait for a peer may
// follow: the next kernel's blocks would take the room of kernels that the peer, or another group, may be waiting for.
DEVICE void let_the_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif

// ---- numbers -------------------------------------------------------------------------------------------------

#ifndef GC_HOST_BUILD
DEVICE float add_rn(float a, float b) { return __fadd_rn(a, b); }
DEVICE float multiply_rn(float a, float b) { return __fmul_rn(a, b); }
DEVICE float divide_rn(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float square_root_rn(float a) { return __fsqrt_rn(a); }
DEVICE u32 bits_of(float value) { return __float_as_uint(value); }
DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }

DEVICE float float_of_half(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

DEVICE u16 half_of(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

DEVICE float element_of(u16 bits) {
#if DTYPE == 1
    return float_of_half(bits);
#else
    return float_of(static_cast<u32>(bits) << 16);
#endif
}

// Rounds to nearest, ties to even; every NaN becomes 0x7FFF.
DEVICE u32 rounded(float value) {
#if DTYPE == 1
    u32 bits = half_of(value);
#else
    u32 bits = bits_of(value);
    bits = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
#endif
    return value != value ? 0x7FFFu : bits;
}

DEVICE void unpack(const Vector& v, float (&values)[ELEMENTS]) {
#pragma unroll
    for (u32 w = 0; w < 4; ++w) {
#if DTYPE == 0
        values[w] = float_of(v.word[w]);
#else
        values[2 * w] = element_of(static_cast<u16>(v.word[w]));
        values[2 * w + 1] = element_of(static_cast<u16>(v.word[w] >> 16));
#endif
    }
}

// Rounds once to the element type. All NaNs get one pattern, so that no result is the sentinel and all ranks agree.
DEVICE Vector pack(const float (&values)[ELEMENTS]) {
    Vector v;
#pragma unroll
    for (u32 w = 0; w < 4; ++w) {
#if DTYPE == 0
        v.word[w] = values[w] != values[w] ? 0x7FFFFFFFu : bits_of(values[w]);
#else
        v.word[w] = rounded(values[2 * w]) | rounded(values[2 * w + 1]) << 16;
#endif
    }
    return v;
}

// The float32 sum in rank order 0, 1, ... It starts from the first addend instead of 0, which keeps -0.
DEVICE Vector sum_in_rank_order(const Vector (&inputs)[WORLD_SIZE]) {
    float total[ELEMENTS];
    unpack(inputs[0], total);
#pragma unroll
    for (u32 r = 1; r < WORLD_SIZE; ++r) {
        float addend[ELEMENTS];
        unpack(inputs[r], addend);
#pragma unroll
        for (u32 e = 0; e < ELEMENTS; ++e) total[e] = add_rn(total[e], addend[e]);
    }
    return pack(total);
}

// ---- tensors -------------------------------------------------------------------------------------------------

// Vectors of a tensor: at least one, because a launch that moves nothing would not synchronize the ranks.
DEVICE u64 vectors_of(u64 bytes) { return bytes ? (bytes + 15) / 16 : 1; }

// Vector i of a tensor of `bytes` bytes, padded with zeros. `aligned`: base is a multiple of 16, else of an element.
DEVICE Vector load(const char* base, u64 i, u64 bytes, bool aligned) {
    const u64 at = i * 16;
    if (aligned && at + 16 <= bytes) return ld_vector(base + at);
    u64 low = 0, high = 0;
#pragma unroll 1
    for (u32 b = 0; b < 16 && at + b < bytes; b += ELEMENT_BYTES) {
        const u64 element = *reinterpret_cast<const Element*>(base + at + b);
        low |= b < 8 ? element << b * 8 : 0;
        high |= b < 8 ? 0 : element << (b - 8) * 8;
    }
    return {{static_cast<u32>(low), static_cast<u32>(low >> 32), static_cast<u32>(high), static_cast<u32>(high >> 32)}};
}

// Stores vector i of a tensor of `bytes` bytes; drops what exceeds its end.
DEVICE void store(char* base, u64 i, u64 bytes, const Vector& v) {
    const u64 at = i * 16;
    if (at + 16 <= bytes) {
        st_vector(base + at, v);
        return;
    }
    const u64 low = v.word[0] | static_cast<u64>(v.word[1]) << 32;
    const u64 high = v.word[2] | static_cast<u64>(v.word[3]) << 32;
#pragma unroll 1
    for (u32 b = 0; b < 16 && at + b < bytes; b += ELEMENT_BYTES) {
        *reinterpret_cast<Element*>(base + at + b) = static_cast<Element>((b < 8 ? low : high) >> b % 8 * 8);
    }
}

// ---- entry, waiting, exit ------------------------------------------------------------------------------------

struct Call {
    u32 kernel;
    u32 epoch;   // push: number of this launch; pull: number of the block's last barrier
    bool alive;  // false: this communicator has failed; the thread only takes part in __syncthreads
    u64 own;     // own workspace
    u64 arena;   // push: offset of this launch's arena in every workspace
};

struct Spin {
    u32 polls;
    u64 start_ns;
};

DEVICE u64 state_word(const Params& p, u32 word) { return p.state + 4ull * word; }
DEVICE u32 ld_state(const Params& p, u32 word) { return *reinterpret_cast<const u32*>(state_word(p, word)); }
DEVICE void st_state(const Params& p, u32 word, u32 value) {
    *reinterpret_cast<u32*>(state_word(p, word)) = value;
}
DEVICE u64 thread_index() { return static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; }
DEVICE u64 all_threads() { return static_cast<u64>(gridDim.x) * blockDim.x; }
// The k-th peer after this rank, so that the ranks do not all write to rank 0 first.
DEVICE u32 peer(const Params& p, u32 k) {
    const u32 r = p.rank + k;
    return r < WORLD_SIZE ? r : r - WORLD_SIZE;
}

// Orders what our previous launch cleared before all that this thread pushes. It stands before the loads of this launch:
// behind loads in flight the fence takes twice as long (1.2 instead of 0.6 us with 2 ranks on an H200).
DEVICE void order_pushes() {
    // SYNC clear->push (release): the peers' acquire_pushes() is the other end.
    fence_acq_rel_sys();
}

// What a launch that uses the arenas goes by. The stream has been waited for.
DEVICE Call call_of(const Params& p, u32 kernel) {
    Call call;
    call.kernel = kernel;
    call.epoch = ld_state(p, blockIdx.x);
    call.alive = ld_relaxed_sys(state_word(p, STATE_POISONED_WORD)) == 0;
    call.own = p.workspace[p.rank];
    call.arena = FLAGS_BYTES + (call.epoch & 1) * p.arena_bytes;
    return call;
}

DEVICE Call enter_push(const Params& p, u32 kernel) {
    wait_for_the_stream();
    order_pushes();
    return call_of(p, kernel);
}

// Called after a block's last poll. What the peers cleared before they pushed the vectors that we have read
// is then ordered before the pushes of our next launch. One thread that has read a vector of every peer
// suffices. It is the first thread of a warp of block 0 in all kernels: thread 0, or in the two-shot norm
// that of the warp with this rank's number, which owns vectors of the row.
DEVICE void acquire_pushes() {
    // SYNC clear->push (acquire): a fence in the next launch would be in another thread, which has read nothing (DESIGN.md,
    // "The push in PTX's memory model").
    if (blockIdx.x == 0 && threadIdx.x % WARP == 0) fence_acquire_sys();
}

// Keeps the epochs of all blocks equal, including those that are not in this grid.
DEVICE void leave_push(const Params& p, const Call& call) {
    acquire_pushes();
    // The first thread of a block that lets the next kernel begin speaks for the block, so all have to be here.
    __syncthreads();
    let_the_next_kernel_begin();
    if (threadIdx.x == 0) st_state(p, blockIdx.x, call.epoch + 1);
    if (blockIdx.x == 0) {
        for (u32 b = gridDim.x + threadIdx.x; b < MAX_BLOCKS; b += blockDim.x) st_state(p, b, call.epoch + 1);
    }
}

// The first thread of this rank that fails reports why, in one 64-bit word, so the host never sees half of it.
DEVICE void report(const Params& p, const Call& call, Reason reason, u32 missing) {
    if (!first_to_set(state_word(p, STATE_POISONED_WORD))) return;
    u32 lowest = 0;
    while (lowest < WORLD_SIZE - 1 && !(missing >> lowest & 1)) ++lowest;
    const u32 low = reason | call.kernel << 8 | lowest << 16 | missing << 24;
    st_relaxed_sys_u64(p.error, static_cast<u64>(call.epoch) << 32 | low);
}

// Called between two polls; returns whether to poll again. `missing`: mask of the ranks that the thread waits for.
DEVICE bool may_wait(const Params& p, Call& call, Spin& spin, u32 missing) {
    spin_hint();
    if (++spin.polls % POLLS_PER_CHECK) return true;
    const u64 now = globaltimer();
    if (spin.start_ns == 0) spin.start_ns = now;
    const bool aborted = ld_relaxed_sys(p.error + ABORT_OFFSET) != 0;
    if (aborted || now - spin.start_ns > p.deadline_ns) {
        report(p, call, aborted ? ABORTED : DEADLINE, missing);
        call.alive = false;
    } else if (ld_relaxed_sys(state_word(p, STATE_POISONED_WORD)) != 0) {
        call.alive = false;
    }
    return call.alive;
}
