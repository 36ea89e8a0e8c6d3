// What the GPU tests launch around the kernels: they make each replay's input and look at its result on the device.
// Header-free, as the kernels are. DTYPE: 0 float32, 1 float16, 2 bfloat16.

typedef unsigned int u32;
typedef unsigned long long u64;

// Integers from -30 to 30: sums of eight are exact in every dtype, and each rank, step and place has its own.
__device__ __forceinline__ int value_of(u32 rank, u32 step, u64 i) {
    return static_cast<int>((i * 7 + step * 13 + rank * 29) % 61) - 30;
}

__device__ __forceinline__ u32 bits_of(int value) {
    const float wide = static_cast<float>(value);
#if DTYPE == 0
    return __float_as_uint(wide);
#elif DTYPE == 1
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(wide));
    return bits;
#else
    return __float_as_uint(wide) >> 16;
#endif
}

#if DTYPE == 0
typedef u32 Element;
#else
typedef unsigned short Element;
#endif

extern "C" __global__ void fill(Element* in, u64 count, u32 rank, const u32* step) {
    for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        in[i] = static_cast<Element>(bits_of(value_of(rank, *step, i)));
    }
}

// Counts into *wrong the elements that are not the sum of all ranks' inputs of this step.
extern "C" __global__ void check(const Element* out, u64 count, u32 world, const u32* step, u32* wrong) {
    u32 found = 0;
    for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        int sum = 0;
        for (u32 r = 0; r < world; ++r) sum += value_of(r, *step, i);
        found += out[i] != static_cast<Element>(bits_of(sum));
    }
    if (found) atomicAdd(wrong, found);
}

extern "C" __global__ void empty() {}

extern "C" __global__ void tick(u32* step) { ++*step; }

// Holds the stream for about so many nanoseconds.
extern "C" __global__ void spin(u64 nanoseconds) {
    u64 begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin)::"memory");
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    } while (now - begin < nanoseconds);
}
