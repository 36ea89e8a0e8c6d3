// Runs a grid of one rank as threads. It is included after the source of the kernels.
#pragma once

// ---- memory, what needs the kernels' types -------------------------------------------------------------------

DEVICE Vector ld_vector(const void* address) {
    Vector v;
    std::memcpy(&v, address, sizeof v);
    return v;
}
DEVICE void st_vector(void* address, const Vector& v) { std::memcpy(address, &v, sizeof v); }
// Accesses the words one by one, from a random one on, with stalls in between. A GPU does not order them either.
DEVICE Vector ld_relaxed_sys_v4(u64 address) {
    Vector v;
    const u32 first = host_faults.stalls_per_million.load(std::memory_order_relaxed) ? host_random() : 0;
    for (u32 k = 0; k < 4; ++k) {
        host_stall();
        const u32 w = (first + k) % 4;
        v.word[w] = host_load(address + 4 * w);
    }
    return v;
}
DEVICE void st_relaxed_sys_v4(u64 address, const Vector& v) {
    const u32 first = host_faults.stalls_per_million.load(std::memory_order_relaxed) ? host_random() : 0;
    for (u32 k = 0; k < 4; ++k) {
        host_stall();
        const u32 w = (first + k) % 4;
        host_store(address + 4 * w, v.word[w]);
    }
}
#ifdef GC_WEAK_CLEARS  // 32 bits at a time, the flag last and first: all that the model of delays knows
DEVICE Pairs ld_relaxed_sys_pairs(u64 address) {
    Pairs v;
    for (u32 k = 0; k < 2; ++k) {
        const u64 flag = host_load(address + 8 * k + 4);
        std::atomic_thread_fence(std::memory_order_acquire);
        v.pair[k] = flag << 32 | host_load(address + 8 * k);
    }
    return v;
}
DEVICE void st_relaxed_sys_pairs(u64 address, const Pairs& v) {
    for (u32 k = 0; k < 2; ++k) {
        host_store(address + 8 * k, static_cast<u32>(v.pair[k]));
        std::atomic_thread_fence(std::memory_order_release);
        host_store(address + 8 * k + 4, static_cast<u32>(v.pair[k] >> 32));
    }
}
#else
DEVICE Pairs ld_relaxed_sys_pairs(u64 address) {
    Pairs v;
    for (u32 k = 0; k < 2; ++k) {
        host_stall();
        v.pair[k] = host_word<u64>(address + 8 * k).load(std::memory_order_relaxed);
    }
    return v;
}
DEVICE void st_relaxed_sys_pairs(u64 address, const Pairs& v) {
    for (u32 k = 0; k < 2; ++k) {
        host_stall();
        host_word<u64>(address + 8 * k).store(v.pair[k], std::memory_order_relaxed);
    }
}
#endif

// Adds in float32 in an order that changes from call to call, as the switch may, and rounds once.
DEVICE Vector multimem_sum(u64 address) {
    host_require_fence();
    const u32 first = host_random(), step = host_random() % 2 ? 1 : WORLD_SIZE - 1;
    float total[ELEMENTS];
    for (u32 k = 0; k < WORLD_SIZE; ++k) {
        float addend[ELEMENTS];
        unpack(ld_relaxed_sys_v4(host_replica(address, first % WORLD_SIZE + u64{k} * step)), addend);
        for (u32 e = 0; e < ELEMENTS; ++e) total[e] = k ? total[e] + addend[e] : addend[e];
    }
    return pack(total);
}
DEVICE void multimem_store(u64 address, const Vector& v) {
    host_require_fence();
    const u32 first = host_random() % WORLD_SIZE;
    for (u32 k = 0; k < WORLD_SIZE; ++k) st_relaxed_sys_v4(host_replica(address, first + k), v);
}

// ---- a launch ------------------------------------------------------------------------------------------------

template <class... Arguments, std::size_t... Index>
void host_call(void (*kernel)(Arguments...), void** args, std::index_sequence<Index...>) {
    kernel(*static_cast<std::remove_cv_t<Arguments>*>(args[Index])...);
}
template <class... Arguments>
void host_call(void (*kernel)(Arguments...), void** args) {
    host_call(kernel, args, std::index_sequence_for<Arguments...>());
}

inline bool host_run_thread(const std::string& name, void** args) {
#define GC_NAMED_KERNEL(kernel) \
    if (name == #kernel) return host_call(kernel, args), true
#define GC_KERNEL(kernel) GC_NAMED_KERNEL(kernel)  // which replaces GC_ONLY by the name
#ifdef GC_ONLY  // a program that launches a single kernel compiles in two thirds of the time
    GC_KERNEL(GC_ONLY);
#else
    GC_KERNEL(push_one_shot);
    GC_KERNEL(push_two_shot);
    GC_KERNEL(push_reduce_scatter);
    GC_KERNEL(push_all_gather);
    GC_KERNEL(pull_one_shot);
    GC_KERNEL(pull_two_shot);
    GC_KERNEL(push_add_rms_norm);
    GC_KERNEL(push_two_shot_add_rms_norm);
    GC_KERNEL(add_rms_norm);
    GC_KERNEL(push_add_rms_norm_fp8);
    GC_KERNEL(push_two_shot_add_rms_norm_fp8);
    GC_KERNEL(add_rms_norm_fp8);
    GC_KERNEL(push_add_rms_norm_nvfp4);
    GC_KERNEL(push_two_shot_add_rms_norm_nvfp4);
    GC_KERNEL(add_rms_norm_nvfp4);
    GC_KERNEL(push_moe_finalize);
    GC_KERNEL(moe_finalize);
    GC_KERNEL(multimem_one_shot);
    GC_KERNEL(multimem_two_shot);
    GC_KERNEL(staged_all_gather);
    GC_KERNEL(expert_dispatch);
    GC_KERNEL(expert_combine);
#endif
#undef GC_KERNEL
#undef GC_NAMED_KERNEL
    return false;
}

// A block of 512 threads on two cores would take seconds. The grid is therefore cut, by the same rule on all ranks.
struct HostLimits {
    std::atomic<unsigned> grid{2}, block{2};
};
inline HostLimits host_limits;

inline int host_launch(const char* kernel, unsigned grid_x, unsigned block_x, unsigned grid_y, void** args,
                       unsigned cluster = 1) {
    // A grid consists of whole clusters.
    const unsigned grid = std::max(cluster, std::min<unsigned>(grid_x, host_limits.grid) / cluster * cluster);
    const unsigned block = std::min<unsigned>(block_x, host_limits.block);
    const std::string name = kernel;
    std::atomic<bool> known{true};
    std::vector<std::unique_ptr<HostBlock>> blocks;
    std::vector<std::thread> threads;
    std::vector<std::unique_ptr<HostCluster>> clusters;
    for (unsigned b = 0; b < grid * grid_y; ++b) {
        if (b % cluster == 0) clusters.push_back(std::make_unique<HostCluster>(cluster, block));
        blocks.push_back(std::make_unique<HostBlock>(block));
        blocks.back()->cluster = clusters.back().get();
        blocks.back()->place = b % cluster;
        clusters.back()->block[b % cluster] = blocks.back().get();
    }
#ifdef GC_WEAK_CLEARS
    static std::atomic<unsigned> launches[8];
    const Params* params = name.starts_with("push") ? static_cast<const Params*>(args[0]) : nullptr;
    const unsigned number = params ? ++launches[params->rank] : 0;
#endif
    auto run = [&](unsigned b, unsigned t) {
        threadIdx.x = t;
        blockIdx = {b % grid, b / grid};
        blockDim.x = block;
        gridDim = {grid, grid_y};
        host_block = blocks[b].get();
#ifdef GC_WEAK_CLEARS
        host_delay = params ? &host_delays[params->rank] : nullptr;
        host_launch_number = number;
        host_own = params ? params->workspace[params->rank] : 0;
        host_own_end = params ? host_own + FLAGS_BYTES + 2 * params->arena_bytes : 0;
#endif
        if (!host_run_thread(name, args)) known = false;
    };
    for (unsigned i = 1; i < grid * grid_y * block; ++i) threads.emplace_back(run, i / block, i % block);
    run(0, 0);
    for (auto& thread : threads) thread.join();
    return known ? 0 : 1;
}

extern "C" {
// Returns 0 when the grid is done, or 1 if there is no such kernel.
inline __attribute__((used)) int launch(const char* kernel, unsigned grid_x, unsigned block_x, void** args) {
    return host_launch(kernel, grid_x, block_x, 1, args);
}
// Does the same with clusters of `cluster` blocks.
inline __attribute__((used)) int launch_clusters(const char* kernel, unsigned grid_x, unsigned block_x,
                                                 unsigned cluster, void** args) {
    return host_launch(kernel, grid_x, block_x, 1, args, cluster);
}
// Does the same as `launch` for a build with -DEMULATE=1, where each rank has a row of blocks.
inline __attribute__((used)) int launch_rows(const char* kernel, unsigned grid_x, unsigned grid_y, unsigned block_x,
                                             void** args) {
    return host_launch(kernel, grid_x, block_x, grid_y, args);
}
// Limits the blocks, and the threads of a block, that run, whatever a launch asks for. The first limits are 2 and 2.
inline __attribute__((used)) void set_limits(unsigned grid, unsigned block) {
    host_limits.grid = grid;
    host_limits.block = block;
}
inline __attribute__((used)) void set_stalls(unsigned seed, unsigned per_million) {
    host_faults.seed = seed;
    host_faults.stalls_per_million = per_million;
}
inline __attribute__((used)) unsigned params_bytes() { return sizeof(Params); }
// Converts floats to 8 bits as the norms do.
inline __attribute__((used)) void convert_e4m3(const float* values, unsigned char* out, unsigned long long count) {
    for (unsigned long long i = 0; i < count; ++i) out[i] = static_cast<unsigned char>(e4m3_of(values[i]));
}
}
