// Shared by all kernels: types, the hash of `random.rs`, and reductions whose order is fixed.
// The files are compiled as one program, this one first; no header is needed.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define KERNEL extern "C" __global__ void
#define ALL_LANES 0xffffffffu
#define NEGATIVE_INFINITY __int_as_float(0xff800000)
#define NOT_A_NUMBER __int_as_float(0x7fffffff)

// Threads of a block wherever a kernel does not say otherwise, and the warps that makes.
#define THREADS 256
#define WARPS (THREADS / 32)

// Elements of two bytes. Only memory holds them: arithmetic is in float.
struct bf16 {
    u16 bits;
};
struct f16 {
    u16 bits;
};

namespace as_f32 {
typedef float T;
}
namespace as_bf16 {
typedef bf16 T;
}
namespace as_f16 {
typedef f16 T;
}

#define INSTANCE(NAME, SUFFIX, BOUNDS, PARAMETERS, ARGUMENTS) \
    namespace as_##SUFFIX { \
    extern "C" __global__ void BOUNDS NAME##_##SUFFIX PARAMETERS { NAME<T> ARGUMENTS; } \
    }

// The kernels NAME_f32, NAME_bf16 and NAME_f16 of a template over the element T.
#define BOUNDED(NAME, BOUNDS, PARAMETERS, ARGUMENTS) \
    INSTANCE(NAME, f32, BOUNDS, PARAMETERS, ARGUMENTS) \
    INSTANCE(NAME, bf16, BOUNDS, PARAMETERS, ARGUMENTS) \
    INSTANCE(NAME, f16, BOUNDS, PARAMETERS, ARGUMENTS)
#define TYPED(NAME, PARAMETERS, ARGUMENTS) BOUNDED(NAME, __launch_bounds__(THREADS), PARAMETERS, ARGUMENTS)

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float to_float(f16 x) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
    return value;
}

// To the nearest, of two equally near ones to the even; NaN stays NaN.
template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
    bf16 value;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(value.bits) : "f"(x));
#else
    u32 bits = __float_as_uint(x);
    // The bit set in a NaN keeps it one, whatever the lower half held.
    value.bits = x != x ? (u16)(bits >> 16 | 0x40) : (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
    return value;
}
template <> __device__ __forceinline__ f16 from_float<f16>(float x) {
    f16 value;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(value.bits) : "f"(x));
    return value;
}

__device__ __forceinline__ u32 bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ u32 bits_of(bf16 x) { return x.bits; }
__device__ __forceinline__ u32 bits_of(f16 x) { return x.bits; }

// Two elements in a word, the first in its lower half.
template <typename T> __device__ __forceinline__ u32 pair(float low, float high) {
    return bits_of(from_float<T>(low)) | bits_of(from_float<T>(high)) << 16;
}
#if __CUDA_ARCH__ >= 800
template <> __device__ __forceinline__ u32 pair<bf16>(float low, float high) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
template <> __device__ __forceinline__ u32 pair<f16>(float low, float high) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
#endif

// Sixteen bytes of elements, as they lie in memory. Threads move these where addresses allow it, and single
// elements elsewhere.
template <typename T> struct Piece {
    static const int SIZE = 16 / sizeof(T);
    u32 words[4];
};

__device__ __forceinline__ void unpack(const Piece<float> &piece, float (&values)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) values[i] = __uint_as_float(piece.words[i]);
}

template <typename T> __device__ __forceinline__ void unpack(const Piece<T> &piece, float (&values)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        T low = {(u16)piece.words[i]}, high = {(u16)(piece.words[i] >> 16)};
        values[2 * i] = to_float(low), values[2 * i + 1] = to_float(high);
    }
}

__device__ __forceinline__ Piece<float> pack(const float (&values)[4], float) {
    Piece<float> piece;
#pragma unroll
    for (int i = 0; i < 4; i++) piece.words[i] = __float_as_uint(values[i]);
    return piece;
}

template <typename T> __device__ __forceinline__ Piece<T> pack(const float (&values)[8], T) {
    Piece<T> piece;
#pragma unroll
    for (int i = 0; i < 4; i++) piece.words[i] = pair<T>(values[2 * i], values[2 * i + 1]);
    return piece;
}

// Whether a row's every sixteen bytes from `start` on may be moved at once, in rows `stride` apart.
template <typename T> __device__ __forceinline__ bool aligned(const T *start, i64 stride) {
    return ((u64)start | (u64)(stride * sizeof(T))) % 16 == 0;
}

template <typename T> __device__ __forceinline__ Piece<T> whole_piece(const T *at) {
    uint4 raw = *(const uint4 *)at;
    Piece<T> piece = {{raw.x, raw.y, raw.z, raw.w}};
    return piece;
}

// Says of a row that it is aligned and made of whole pieces: what kernels know of most rows before they start,
// and what spares them the tests and the code for the others.
struct Whole {};

// Elements `first..` of a row that ends at `end`; zeros past it. `wide` says that the row is aligned. Columns
// are numbered by an int where registers are short.
template <typename T, typename Index>
__device__ __forceinline__ Piece<T> load_piece(const T *row, Index first, Index end, bool wide) {
    const int SIZE = Piece<T>::SIZE;
    if (wide && first + SIZE <= end) return whole_piece(row + first);
    Piece<T> piece = {{0, 0, 0, 0}};
    if (first < end) {
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            if (first + i < end) piece.words[i * sizeof(T) / 4] |= bits_of(row[first + i]) << (i * sizeof(T) % 4 * 8);
        }
    }
    return piece;
}

template <typename T, typename Index>
__device__ __forceinline__ Piece<T> load_piece(const T *row, Index first, Index end, Whole) {
    Piece<T> zeros = {{0, 0, 0, 0}};
    return first < end ? whole_piece(row + first) : zeros;
}

template <typename T, typename Index, typename Wide>
__device__ __forceinline__ void load_values(const T *row, Index first, Index end, Wide wide,
                                            float (&values)[Piece<T>::SIZE]) {
    unpack(load_piece(row, first, end, wide), values);
}

template <typename T> __device__ __forceinline__ void store_whole(T *at, const Piece<T> &piece) {
    *(uint4 *)at = make_uint4(piece.words[0], piece.words[1], piece.words[2], piece.words[3]);
}

template <typename T, typename Index>
__device__ __forceinline__ void store_values(T *row, Index first, Index end, bool wide,
                                             const float (&values)[Piece<T>::SIZE]) {
    const int SIZE = Piece<T>::SIZE;
    if (wide && first + SIZE <= end) {
        store_whole(row + first, pack(values, T()));
        return;
    }
#pragma unroll
    for (int i = 0; i < SIZE; i++) {
        if (first + i < end) row[first + i] = from_float<T>(values[i]);
    }
}

template <typename T, typename Index>
__device__ __forceinline__ void store_values(T *row, Index first, Index end, Whole,
                                             const float (&values)[Piece<T>::SIZE]) {
    if (first < end) store_whole(row + first, pack(values, T()));
}

// N floats: the parameters and sums that go with a piece.
template <int N, typename Index, typename Wide>
__device__ __forceinline__ void load_floats(const float *row, Index first, Index end, Wide wide, float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        float four[4];
        load_values(row, first + i, end, wide, four);
#pragma unroll
        for (int j = 0; j < 4; j++) values[i + j] = four[j];
    }
}

template <int N, typename Index, typename Wide>
__device__ __forceinline__ void store_floats(float *row, Index first, Index end, Wide wide,
                                             const float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        float four[4] = {values[i], values[i + 1], values[i + 2], values[i + 3]};
        store_values(row, first + i, end, wide, four);
    }
}

// Elements `first..` of a row to shared memory, as `load_piece` gives them; the thread that asked finds them
// there once it has waited. What is not aligned comes at once.
template <typename T, typename Index>
__device__ __forceinline__ void send_piece(uint4 *to, const T *row, Index first, Index end, Whole) {
#if __CUDA_ARCH__ >= 800
    // Of no bytes nothing is read, and zeros are written.
    bool inside = first < end;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"((u32)__cvta_generic_to_shared(to)), "l"(inside ? row + first : row), "r"(inside ? 16 : 0)
                 : "memory");
#else
    store_whole((T *)to, load_piece(row, first, end, Whole()));
#endif
}

template <typename T, typename Index>
__device__ __forceinline__ void send_piece(uint4 *to, const T *row, Index first, Index end, bool wide) {
    if (wide && first + Piece<T>::SIZE <= end) send_piece(to, row, first, end, Whole());
    else store_whole((T *)to, load_piece(row, first, end, false));
}

// Makes one group of what was sent since the group before.
__device__ __forceinline__ void close_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all groups of this thread but the last LATER.
template <int LATER> __device__ __forceinline__ void wait_groups() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" :: "n"(LATER) : "memory");
#endif
}

// Functions that halves do not need to the last bit of a float.
template <typename T> struct Functions {
    __device__ static float exp2(float x) {
        float value;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
        return value;
    }
    // e^(x - from)
    __device__ static float exp(float x, float from) {
        const float LOG2_E = 1.4426950408889634f;
        return exp2(fmaf(x, LOG2_E, -from * LOG2_E));
    }
    __device__ static float sigmoid(float x) {
        float value, divisor = 1.0f + exp(-x, 0.0f);
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(divisor));
        return value;
    }
};
template <> struct Functions<float> {
    __device__ static float exp(float x, float from) { return expf(x - from); }
    __device__ static float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
};

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

// A dropout site as the host passes it; where there is a step, its number is folded into the key. `threshold` 0 with `scale` 1 drops nothing.
struct Dropout {
    u64 key;
    u64 first_sample;
    const double *step;
    u32 threshold;
    float scale;
};

// The mask's key of one row of a sample: the same as `RowMask` of the CPU.
__device__ __forceinline__ u32 row_key(const Dropout &site, u64 sample, u64 row) {
    u64 key = site.step ? fold(site.key, (u64)*site.step) : site.key;
    return (u32)fold(fold(key, site.first_sample + sample), row);
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

__device__ __forceinline__ float warp_sum(float value) {
    for (int apart = 16; apart > 0; apart /= 2) value += __shfl_xor_sync(ALL_LANES, value, apart);
    return value;
}

// Loads that a thread keeps in flight where it walks far.
#define LOADS 8
