// Shared by all kernels: types, the hash of `random.rs`, and reductions whose order is fixed.
// The files are compiled as one program, this one first; no header is needed.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define KERNEL extern "C" __global__ void
#define ALL_LANES 0xffffffffu

// Elements `index` of a grid that walks `0..count`.
#define EACH(index, count) \
    for (i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x; index < (count); \
         index += (i64)gridDim.x * blockDim.x)

__device__ __forceinline__ u64 mix64(u64 x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

__device__ __forceinline__ u32 mix32(u32 x) {
    x = (x ^ (x >> 16)) * 0x21f0aaadu;
    x = (x ^ (x >> 15)) * 0x735a2d97u;
    return x ^ (x >> 15);
}

__device__ __forceinline__ u64 fold(u64 key, u64 coordinate) {
    return mix64(key + 0x9e3779b97f4a7c15ull + coordinate * 0xd6e8feb86659fd93ull);
}

// A dropout site as the host passes it; `threshold` 0 with `scale` 1 drops nothing.
struct Dropout {
    u64 key;
    u64 first_sample;
    u32 threshold;
    float scale;
};

// The mask's key of one row of a sample: the same as `RowMask` of the CPU.
__device__ __forceinline__ u32 row_key(const Dropout &site, u64 sample, u64 row) {
    return (u32)fold(fold(site.key, site.first_sample + sample), row);
}

__device__ __forceinline__ float drop_factor(const Dropout &site, u32 key, i64 col) {
    u32 hash = mix32((u32)col * 0x9e3779b9u + key);
    return hash >= site.threshold ? site.scale : 0.0f;
}

struct Add {
    template <typename N> __device__ static N of(N a, N b) { return a + b; }
};

struct Max {
    template <typename N> __device__ static N of(N a, N b) { return a > b ? a : b; }
};

// Combines one value of each thread of the block, in an order that depends on nothing; every thread gets
// the result. The block has whole warps; `none` is the operation's neutral element.
template <typename Operation, typename N> __device__ N block_reduce(N value, N none) {
    __shared__ N parts[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int apart = 16; apart > 0; apart /= 2) {
        value = Operation::of(value, __shfl_xor_sync(ALL_LANES, value, apart));
    }
    // Whoever still reads the parts of an earlier call must be done.
    __syncthreads();
    if (lane == 0) parts[warp] = value;
    __syncthreads();
    value = lane < warps ? parts[lane] : none;
    for (int apart = 16; apart > 0; apart /= 2) {
        value = Operation::of(value, __shfl_xor_sync(ALL_LANES, value, apart));
    }
    return value;
}

__device__ __forceinline__ float block_sum(float value) { return block_reduce<Add>(value, 0.0f); }
__device__ __forceinline__ double block_sum(double value) { return block_reduce<Add>(value, 0.0); }

#define NEGATIVE_INFINITY __int_as_float(0xff800000)
#define NOT_A_NUMBER __int_as_float(0x7fffffff)
