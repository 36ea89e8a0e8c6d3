// Gives g++ what the CUDA kernels need from a GPU. A thread of a grid is a thread of this process.
//
// It is included before the source of the kernels. host_launch.hpp follows it and defines what needs its types.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#define GC_HOST_BUILD 1
#define DEVICE static inline

struct HostIndex {
    unsigned x = 0, y = 0;
};
inline thread_local HostIndex threadIdx, blockIdx, blockDim, gridDim;

// ---- faults that a test asks for -----------------------------------------------------------------------------

struct HostFaults {
    std::atomic<unsigned> seed{0};
    std::atomic<unsigned> stalls_per_million{0};  // of memory operations
    std::atomic<unsigned> threads{0};
};
inline HostFaults host_faults;

inline unsigned host_random() {
    static thread_local unsigned state = 0;
    if (!state) state = (host_faults.seed + 1 + host_faults.threads.fetch_add(1)) * 2654435761u | 1u;
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
}

inline void host_stall() {
    const unsigned rate = host_faults.stalls_per_million.load(std::memory_order_relaxed);
    if (!rate || host_random() % 1000000 >= rate) return;
    if (host_random() % 4) {
        sched_yield();
    } else {
        usleep(host_random() % 200);
    }
}

// ---- a block -------------------------------------------------------------------------------------------------

struct HostBlock {
    explicit HostBlock(unsigned threads) { pthread_barrier_init(&barrier, nullptr, threads); }
    ~HostBlock() { pthread_barrier_destroy(&barrier); }
    HostBlock(const HostBlock&) = delete;
    pthread_barrier_t barrier;
    alignas(16) char shared[16384] = {};
    struct HostCluster* cluster = nullptr;
    unsigned place = 0;
};
inline thread_local HostBlock* host_block = nullptr;

struct HostCluster {
    HostCluster(unsigned blocks, unsigned threads) : blocks(blocks) {
        pthread_barrier_init(&barrier, nullptr, blocks * threads);
    }
    ~HostCluster() { pthread_barrier_destroy(&barrier); }
    HostCluster(const HostCluster&) = delete;
    unsigned blocks;
    HostBlock* block[8] = {};
    pthread_barrier_t barrier;
};

template <class Type>
Type& host_shared() {
    static_assert(sizeof(Type) <= sizeof host_block->shared);
    return *reinterpret_cast<Type*>(host_block->shared);
}
inline unsigned cluster_blocks() { return host_block->cluster->blocks; }
inline unsigned block_in_cluster() { return host_block->place; }
inline void open_mailboxes(unsigned long long*, unsigned) {}
inline void meet_cluster() { pthread_barrier_wait(&host_block->cluster->barrier); }
inline void join_cluster() { meet_cluster(); }
inline void send_float(unsigned long long*, float* own, unsigned block, float value) {
    char* there = host_block->cluster->block[block]->shared + (reinterpret_cast<char*>(own) - host_block->shared);
    std::atomic_ref<float>(*reinterpret_cast<float*>(there)).store(value, std::memory_order_relaxed);
}
inline void await_mail(unsigned long long*, unsigned, unsigned) { meet_cluster(); }
// Whether this thread has fenced since its last barrier: only then is visible at a multimem address what others wrote to the
// ranks' own addresses, and the reverse.
inline thread_local bool host_fenced = false;
inline void __syncthreads() {
    host_fenced = false;
    if (blockDim.x > 1) pthread_barrier_wait(&host_block->barrier);
}

// ---- memory --------------------------------------------------------------------------------------------------

using HostAddress = unsigned long long;

template <class Word>
std::atomic_ref<Word> host_word(HostAddress address) {
    return std::atomic_ref<Word>(*reinterpret_cast<Word*>(address));
}

#ifdef GC_WEAK_CLEARS
// A rank's writes into its own workspace reach its own threads at once. Until a fence of the same thread or of a later
// launch, however, peers' writes to the same address may overtake them. Only the host build with this flag shows why
// the fence at the entry is needed, because x86 never delays a store that long.
struct HostDelay {
    struct Store {
        unsigned value, launch;
        unsigned* word;
    };
    std::mutex mutex;
    std::map<HostAddress, Store> pending;
};
inline HostDelay host_delays[8];
inline thread_local HostDelay* host_delay = nullptr;
inline thread_local unsigned host_launch_number = 0;
inline thread_local HostAddress host_own = 0, host_own_end = 0;

inline void host_drain(bool all) {
    if (!host_delay) return;
    std::lock_guard guard(host_delay->mutex);
    auto& pending = host_delay->pending;
    for (auto each = pending.begin(); each != pending.end();) {
        const bool due = all ? each->second.launch != host_launch_number : host_random() % 512 == 0;
        if (!due) {
            ++each;
            continue;
        }
        host_word<unsigned>(each->first).store(each->second.value, std::memory_order_relaxed);
        each = pending.erase(each);
    }
}

inline unsigned host_load(HostAddress address) {
    if (host_delay && address >= host_own && address < host_own_end) {
        std::lock_guard guard(host_delay->mutex);
        auto found = host_delay->pending.find(address);
        if (found != host_delay->pending.end()) return found->second.value;
    }
    return host_word<unsigned>(address).load(std::memory_order_relaxed);
}

inline void host_store(HostAddress address, unsigned value) {
    if (host_delay && address >= host_own && address < host_own_end) {
        std::lock_guard guard(host_delay->mutex);
        host_delay->pending[address] = {value, host_launch_number, nullptr};
        return;
    }
    host_word<unsigned>(address).store(value, std::memory_order_relaxed);
}
#else
inline void host_drain(bool) {}
inline unsigned host_load(HostAddress address) {
    return host_word<unsigned>(address).load(std::memory_order_relaxed);
}
inline void host_store(HostAddress address, unsigned value) {
    host_word<unsigned>(address).store(value, std::memory_order_relaxed);
}
#endif

// ---- multimem addresses --------------------------------------------------------------------------------------

// A multimem address lies in a window that no access but multimem may touch: its pages are protected. The window begins at
// the middle of an aligned range of 4 GiB, whose first page names the memory of each rank. tests/fake_multicast.py makes it.
struct HostWindow {
    unsigned long long magic, ranks, bytes, memory[8];
};
constexpr HostAddress HOST_RANGE = 1ull << 32, HOST_WINDOW = 1ull << 31, HOST_WINDOW_MAGIC = 0x4D554C54494D454D;

inline HostAddress host_make_window(const std::vector<HostAddress>& memory, unsigned long long bytes) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    const auto reserved = reinterpret_cast<HostAddress>(mmap(nullptr, 2 * HOST_RANGE, PROT_NONE, flags, -1, 0));
    const HostAddress start = (reserved + HOST_RANGE - 1) / HOST_RANGE * HOST_RANGE;
    mprotect(reinterpret_cast<void*>(start), 4096, PROT_READ | PROT_WRITE);
    auto& window = *reinterpret_cast<HostWindow*>(start);
    window = {HOST_WINDOW_MAGIC, memory.size(), bytes, {}};
    for (std::size_t r = 0; r < memory.size(); ++r) window.memory[r] = memory[r];
    return start + HOST_WINDOW;
}
inline const HostWindow& host_window(HostAddress address) {
    const auto& window = *reinterpret_cast<const HostWindow*>(address / HOST_RANGE * HOST_RANGE);
    if (window.magic != HOST_WINDOW_MAGIC || address % HOST_RANGE - HOST_WINDOW + 16 > window.bytes) {
        std::fprintf(stderr, "%llx is no multimem address\n", address);
        std::abort();
    }
    return window;
}
inline HostAddress host_replica(HostAddress address, unsigned long long rank) {
    const HostWindow& window = host_window(address);
    return window.memory[rank % window.ranks] + (address % HOST_RANGE - HOST_WINDOW);
}
inline void host_require_fence() {
    if (host_fenced) return;
    std::fprintf(stderr, "no fence.proxy.alias between a barrier and a multimem access\n");
    std::abort();
}

struct Vector;
struct Pairs;
DEVICE Vector ld_vector(const void* address);
DEVICE void st_vector(void* address, const Vector& v);
DEVICE Vector ld_relaxed_sys_v4(HostAddress address);
DEVICE void st_relaxed_sys_v4(HostAddress address, const Vector& v);
DEVICE Vector multimem_sum(HostAddress address);
DEVICE void multimem_store(HostAddress address, const Vector& v);
DEVICE Pairs ld_relaxed_sys_pairs(HostAddress address);
DEVICE void st_relaxed_sys_pairs(HostAddress address, const Pairs& v);

DEVICE unsigned ld_relaxed_sys(HostAddress address) {
    host_stall();
    return host_word<unsigned>(address).load(std::memory_order_relaxed);
}
DEVICE void st_relaxed_sys(HostAddress address, unsigned value) {
    host_word<unsigned>(address).store(value, std::memory_order_relaxed);
}
DEVICE void st_relaxed_sys_u64(HostAddress address, unsigned long long value) {
    host_word<unsigned long long>(address).store(value, std::memory_order_relaxed);
}
DEVICE unsigned ld_acquire_sys(HostAddress address) {
    host_stall();
    return host_word<unsigned>(address).load(std::memory_order_acquire);
}
DEVICE void st_release_sys(HostAddress address, unsigned value) {
    host_stall();
    host_word<unsigned>(address).store(value, std::memory_order_release);
}
DEVICE void fence_acq_rel_sys() {
#ifndef __SANITIZE_THREAD__  // it does not know fences; every access that this one orders is atomic
    std::atomic_thread_fence(std::memory_order_acq_rel);
#endif
    host_drain(true);
}
DEVICE void fence_acquire_sys() {
#ifndef __SANITIZE_THREAD__
    std::atomic_thread_fence(std::memory_order_acquire);
#endif
}
DEVICE void fence_proxy_alias() { host_fenced = true; }
DEVICE unsigned long long globaltimer() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}
DEVICE bool first_to_set(HostAddress address) {
    unsigned expected = 0;
    return host_word<unsigned>(address).compare_exchange_strong(expected, 1, std::memory_order_relaxed);
}
// Every 16th call sleeps: waiting threads would otherwise take the processors from those that they wait for.
DEVICE void spin_hint() {
    host_drain(false);
#ifndef GC_WEAK_CLEARS  // its delayed stores are written in this function, and more than 16 calls may be due
    static thread_local unsigned calls = 0;
    if (++calls % 16 == 0) {
        usleep(20);
        return;
    }
#endif
    sched_yield();
}
DEVICE void wait_for_the_stream() {}
DEVICE void let_the_next_kernel_begin() {}

// ---- numbers -------------------------------------------------------------------------------------------------

DEVICE float add_rn(float a, float b) { return a + b; }
DEVICE float multiply_rn(float a, float b) { return a * b; }
DEVICE float divide_rn(float a, float b) { return a / b; }
DEVICE float square_root_rn(float a) { return std::sqrt(a); }
DEVICE unsigned bits_of(float value) { return std::bit_cast<unsigned>(value); }
DEVICE float float_of(unsigned bits) { return std::bit_cast<float>(bits); }
DEVICE float float_of_half(unsigned short bits) { return static_cast<float>(std::bit_cast<_Float16>(bits)); }
DEVICE unsigned short half_of(float value) { return std::bit_cast<unsigned short>(static_cast<_Float16>(value)); }
