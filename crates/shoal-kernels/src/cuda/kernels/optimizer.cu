// Updates of all tensors at once, and the sum of squares they are clipped by. The tensors' addresses come in
// a table; their elements are cut into chunks, one a block. Whether and how much to update is decided from
// norm and loss where they lie: no update waits for the host.

// Elements that a block takes.
#define CHUNK (1 << 14)

// The entry that has the chunk: the last one whose first chunk is not past it. The whole block searches.
template <typename Entry> __device__ __forceinline__ const Entry &entry_of(const Entry *table, int entries, i64 chunk) {
    int low = 0, span = entries;
    while (span > 1) {
        int step = (span + blockDim.x - 1) / blockDim.x, at = threadIdx.x * step;
        int found = __syncthreads_count(at < span && table[low + at].first_chunk <= chunk);
        low += (found - 1) * step;
        span = min(step, span - (found - 1) * step);
    }
    return table[low];
}

struct Squared {
    const float *values;
    i64 count, first_chunk;
};

// Each chunk's sum of squares: a thread's few terms as floats, the threads' sums as doubles.
KERNEL __launch_bounds__(THREADS) squares(const Squared *table, int entries, double *parts) {
    const Squared of = entry_of(table, entries, blockIdx.x);
    i64 begin = (blockIdx.x - of.first_chunk) * CHUNK;
    const float *values = of.values + begin;
    int count = min((i64)CHUNK, of.count - begin);
    float sum = 0.0f;
    for (int start = threadIdx.x * 4; start < count; start += LOADS * THREADS * 4) {
        Piece<float> pieces[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++) pieces[i] = load_piece(values, start + i * THREADS * 4, count, true);
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            float x[4];
            unpack(pieces[i], x);
            sum += (x[0] * x[0] + x[1] * x[1]) + (x[2] * x[2] + x[3] * x[3]);
        }
    }
    double total = block_sum((double)sum);
    if (threadIdx.x == 0) parts[blockIdx.x] = total;
}

// *sum = the parts, by one block.
KERNEL add_parts(const double *parts, i64 count, double *sum) {
    double total = 0.0;
#pragma unroll 8
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) total += parts[i];
    total = block_sum(total);
    if (threadIdx.x == 0) *sum = total;
}

// A tensor to update; `first` and `second` are the optimizer's own, `copy` is what layers compute with. All
// but the gradient and the parameter may be null.
struct Updated {
    const float *gradient;
    float *parameter, *first, *second;
    void *copy;
    i64 count, first_chunk;
    float decay;
    int copy_element;
};

// `Guard` of device.rs, without a limit where `clip` is infinite.
struct Guard {
    const double *norm_squared, *loss;
    float scale, clip;

    // What gradients are multiplied by; false for no update.
    __device__ bool factor(float *factor) const {
        double squared = *norm_squared, lost = *loss;
        // Of what is not finite, the difference from itself is NaN.
        if (!(squared - squared == 0.0 && lost - lost == 0.0)) return false;
        double by = (double)clip / (sqrt(squared) / scale + 1e-6);
        *factor = (float)((by < 1.0 ? by : 1.0) / scale);
        return true;
    }
};

enum { COPY_NONE, COPY_F32, COPY_BF16, COPY_F16 };

// Four elements of a copy in elements of two bytes.
template <typename T>
__device__ __forceinline__ void store_copy(T *copy, int first, int end, const float (&values)[4]) {
    if (first + 4 <= end) {
        *(uint2 *)(copy + first) = make_uint2(pair<T>(values[0], values[1]), pair<T>(values[2], values[3]));
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (first + i < end) copy[first + i] = from_float<T>(values[i]);
    }
}

// Runs `step(gradient, first, second, parameter)` over the `count` elements from `begin` on.
template <typename Step, typename Wide>
__device__ __forceinline__ void update_elements(const Updated &of, i64 begin, int count, Wide wide, float factor,
                                                Step step) {
    const float *gradient = of.gradient + begin;
    float *first = of.first ? of.first + begin : 0, *second = of.second ? of.second + begin : 0;
    float *parameter = of.parameter + begin;
    for (int at = threadIdx.x * 4; at < count; at += THREADS * 4) {
        float g[4], m[4] = {}, v[4] = {}, p[4];
        load_values(gradient, at, count, wide, g);
        if (first) load_values((const float *)first, at, count, wide, m);
        if (second) load_values((const float *)second, at, count, wide, v);
        load_values((const float *)parameter, at, count, wide, p);
#pragma unroll
        for (int i = 0; i < 4; i++) step(g[i] * factor, m[i], v[i], p[i]);
        if (first) store_values(first, at, count, wide, m);
        if (second) store_values(second, at, count, wide, v);
        store_values(parameter, at, count, wide, p);
        if (of.copy_element == COPY_BF16) store_copy((bf16 *)of.copy + begin, at, count, p);
        if (of.copy_element == COPY_F16) store_copy((f16 *)of.copy + begin, at, count, p);
        if (of.copy_element == COPY_F32) store_values((float *)of.copy + begin, at, count, wide, p);
    }
}

template <typename Step>
__device__ __forceinline__ void update_chunk(const Updated &of, i64 chunk, float factor, Step step) {
    i64 begin = chunk * CHUNK;
    int count = min((i64)CHUNK, of.count - begin);
    if (count == CHUNK) update_elements(of, begin, count, Whole(), factor, step);
    else update_elements(of, begin, count, true, factor, step);
}

// The block's chunk, and what is decided for all of it at once: `keep` is what decay leaves of a parameter.
struct Decided {
    bool update;
    float factor, keep;
};

__device__ __forceinline__ Decided decide(const Guard &guard, double lr, float decay) {
    __shared__ Decided decided;
    if (threadIdx.x == 0) {
        decided.update = guard.factor(&decided.factor);
        decided.keep = (float)(1.0 - lr * decay);
    }
    __syncthreads();
    return decided;
}

struct AdamW {
    double lr;
    float step, root_correction, beta1, beta2, eps;
};

KERNEL __launch_bounds__(THREADS) adamw(Guard guard, AdamW by, const Updated *table, int entries) {
    const Updated of = entry_of(table, entries, blockIdx.x);
    Decided decided = decide(guard, by.lr, of.decay);
    if (!decided.update) return;
    update_chunk(of, blockIdx.x - of.first_chunk, decided.factor, [&](float g, float &m, float &v, float &p) {
        m = fmaf(1.0f - by.beta1, g - m, m);
        v = by.beta2 * v + (1.0f - by.beta2) * g * g;
        p = p * decided.keep - by.step * (m / (sqrtf(v) / by.root_correction + by.eps));
    });
}

// The velocity may be missing; the first update does not read what it held.
KERNEL __launch_bounds__(THREADS) sgd(Guard guard, float lr, float momentum, int first, const Updated *table,
                                      int entries) {
    const Updated of = entry_of(table, entries, blockIdx.x);
    Decided decided = decide(guard, lr, of.decay);
    if (!decided.update) return;
    update_chunk(of, blockIdx.x - of.first_chunk, decided.factor, [&](float g, float &v, float &, float &p) {
        v = (of.first && !first ? momentum * v : 0.0f) + (g + of.decay * p);
        p -= lr * v;
    });
}
