// Attention in tiles: scores exist for a tile of queries and keys at a time, never as a whole. The
// forward keeps one number per row and head (the logarithm of the softmax's sum); the backward makes the
// scores again from it, in one kernel by query tiles (gradients of queries) and one by key tiles (of keys
// and values), so that no two blocks add to the same number.
//
// Plain fp32 arithmetic on any kind of element: this is what faster ones are held against, and what serves
// heads that they have no room for. The sums and deltas of a sample's head lie together. A block is 16 x 16 threads; a thread
// has rows `y + 16 i` and columns `x + 16 j` of every tile. TILE is the queries or keys of a tile, WIDTH
// the largest head the registers hold; the head's own size is `size`.

#define SIDE 16

struct Attention {
    i64 samples, sequence, heads, kv_heads, size;
    float scale;
    int causal;
    // A sample's rows that count, where not all do.
    const int *lengths;
};

__device__ __forceinline__ i64 length_of(const Attention &shape, i64 sample) {
    return shape.lengths ? shape.lengths[sample] : shape.sequence;
}

// How many keys, from the first on, a query of a sample of this length sees.
__device__ __forceinline__ i64 keys_seen(const Attention &shape, i64 length, i64 query) {
    return shape.causal ? min(length, query + 1) : length;
}

// Where the keys end that some query of the tile from `first` on sees: queries past the length see none.
template <int TILE> __device__ __forceinline__ i64 keys_end(const Attention &shape, i64 length, i64 first) {
    return first < length ? keys_seen(shape, length, first + TILE - 1) : 0;
}

// One head's columns of one sample inside joint rows.
template <typename T> struct HeadRows {
    const T *start;
    i64 stride;
};

// Where a row's sum of a head lies.
__device__ __forceinline__ i64 sum_at(const Attention &shape, i64 sample, i64 head, i64 row) {
    return (sample * shape.heads + head) * shape.sequence + row;
}

__device__ __forceinline__ i64 qkv_width(const Attention &shape) {
    return (shape.heads + 2 * shape.kv_heads) * shape.size;
}

// Column block `index` of a sample's rows of `qkv`: queries, then keys, then values.
template <typename T>
__device__ __forceinline__ HeadRows<T> qkv_head(const Attention &shape, const T *qkv, i64 sample, i64 index) {
    i64 width = qkv_width(shape);
    HeadRows<T> rows = {qkv + sample * shape.sequence * width + index * shape.size, width};
    return rows;
}

template <typename T>
__device__ __forceinline__ HeadRows<T> out_head(const Attention &shape, const T *out, i64 sample, i64 head) {
    i64 width = shape.heads * shape.size;
    HeadRows<T> rows = {out + sample * shape.sequence * width + head * shape.size, width};
    return rows;
}

// Rows `first..` of a head into shared memory; rows past the sequence as zeros.
template <int TILE, typename T>
__device__ __forceinline__ void load_tile(const Attention &shape, HeadRows<T> from, i64 first, float *tile) {
    i64 stride = shape.size + 1;
    for (int row = threadIdx.y; row < TILE; row += SIDE) {
        const T *source = from.start + (first + row) * from.stride;
        bool inside = first + row < shape.sequence;
        for (int col = threadIdx.x; col < shape.size; col += SIDE) {
            tile[row * stride + col] = inside ? to_float(source[col]) : 0.0f;
        }
    }
}

// scores[i][j] = a's row y + 16 i times b's row x + 16 j
template <int EACH_WAY>
__device__ __forceinline__ void tile_products(int size, const float *a, const float *b,
                                              float (&scores)[EACH_WAY][EACH_WAY]) {
    int stride = size + 1;
    for (int i = 0; i < EACH_WAY; i++) {
        for (int j = 0; j < EACH_WAY; j++) scores[i][j] = 0.0f;
    }
    for (int col = 0; col < size; col++) {
        float left[EACH_WAY], right[EACH_WAY];
#pragma unroll
        for (int i = 0; i < EACH_WAY; i++) {
            left[i] = a[(threadIdx.y + SIDE * i) * stride + col];
            right[i] = b[(threadIdx.x + SIDE * i) * stride + col];
        }
#pragma unroll
        for (int i = 0; i < EACH_WAY; i++) {
#pragma unroll
            for (int j = 0; j < EACH_WAY; j++) scores[i][j] = fmaf(left[i], right[j], scores[i][j]);
        }
    }
}

// sums[i][j] += over the tile's lines: weight(line, y + 16 i) * values[line][x + 16 j]
template <int TILE, int EACH_WAY, int COLUMNS, typename Weight>
__device__ __forceinline__ void add_weighted(int size, const float *values, Weight weight,
                                             float (&sums)[EACH_WAY][COLUMNS]) {
    int stride = size + 1;
    for (int line = 0; line < TILE; line++) {
        float by[EACH_WAY];
#pragma unroll
        for (int i = 0; i < EACH_WAY; i++) by[i] = weight(line, threadIdx.y + SIDE * i);
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            int col = threadIdx.x + SIDE * j;
            if (col < size) {
                float value = values[line * stride + col];
#pragma unroll
                for (int i = 0; i < EACH_WAY; i++) sums[i][j] = fmaf(by[i], value, sums[i][j]);
            }
        }
    }
}

template <int TILE, int COLUMNS, typename T>
__device__ __forceinline__ void store_tile(const Attention &shape, HeadRows<T> to, i64 first,
                                           const float (&sums)[TILE / SIDE][COLUMNS]) {
#pragma unroll
    for (int i = 0; i < TILE / SIDE; i++) {
        i64 row = first + threadIdx.y + SIDE * i;
        if (row >= shape.sequence) continue;
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            int col = threadIdx.x + SIDE * j;
            if (col < shape.size) const_cast<T *>(to.start)[row * to.stride + col] = from_float<T>(sums[i][j]);
        }
    }
}

template <typename Operation> __device__ __forceinline__ float row_reduce(float value) {
    for (int apart = SIDE / 2; apart > 0; apart /= 2) {
        value = Operation::of(value, __shfl_xor_sync(ALL_LANES, value, apart));
    }
    return value;
}

template <int TILE, int WIDTH, typename T>
__device__ void attend(const Attention &shape, const Dropout &site, const T *qkv, T *out, float *logsumexp) {
    const int EACH_WAY = TILE / SIDE, COLUMNS = WIDTH / SIDE;
    extern __shared__ float shared[];
    int size = shape.size, score_stride = TILE + 1;
    float *query_tile = shared, *key_tile = query_tile + TILE * (size + 1);
    float *weights = key_tile + TILE * (size + 1);
    // Late queries see most keys: they start first.
    i64 first = (i64)(gridDim.x - 1 - blockIdx.x) * TILE, head = blockIdx.y, sample = blockIdx.z;
    i64 kv_head = head / (shape.heads / shape.kv_heads), length = length_of(shape, sample);
    HeadRows<T> keys = qkv_head(shape, qkv, sample, shape.heads + kv_head);
    HeadRows<T> values = qkv_head(shape, qkv, sample, shape.heads + shape.kv_heads + kv_head);
    load_tile<TILE, T>(shape, qkv_head(shape, qkv, sample, head), first, query_tile);

    float sums[EACH_WAY][COLUMNS] = {}, scores[EACH_WAY][EACH_WAY];
    float highest[EACH_WAY], total[EACH_WAY];
    u32 mask[EACH_WAY];
    for (int i = 0; i < EACH_WAY; i++) {
        highest[i] = NEGATIVE_INFINITY, total[i] = 0.0f;
        mask[i] = row_key(site, sample, head * shape.sequence + first + threadIdx.y + SIDE * i);
    }
    i64 end = keys_end<TILE>(shape, length, first);
    for (i64 start = 0; start < end; start += TILE) {
        load_tile<TILE, T>(shape, keys, start, key_tile);
        __syncthreads();
        tile_products<EACH_WAY>(size, query_tile, key_tile, scores);
#pragma unroll
        for (int i = 0; i < EACH_WAY; i++) {
            int row = threadIdx.y + SIDE * i;
            float best = highest[i];
            i64 seen = min(end, keys_seen(shape, length, first + row));
#pragma unroll
            for (int j = 0; j < EACH_WAY; j++) {
                i64 key = start + threadIdx.x + SIDE * j;
                scores[i][j] = key < seen ? scores[i][j] * shape.scale : NEGATIVE_INFINITY;
                best = Max::of(scores[i][j], best);
            }
            best = row_reduce<Max>(best);
            // Every row sees key 0, which is in the first tile, so `best` is finite from then on.
            float shrink = expf(highest[i] - best), sum = 0.0f;
#pragma unroll
            for (int j = 0; j < EACH_WAY; j++) {
                int col = threadIdx.x + SIDE * j;
                float weight = expf(scores[i][j] - best);
                sum += weight;
                weights[row * score_stride + col] = weight * drop_factor(site, mask[i], start + col);
            }
            total[i] = total[i] * shrink + row_reduce<Add>(sum);
            highest[i] = best;
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) sums[i][j] *= shrink;
        }
        __syncthreads();
        float *value_tile = key_tile;
        load_tile<TILE, T>(shape, values, start, value_tile);
        __syncthreads();
        add_weighted<TILE>(size, value_tile, [&](int key, int row) { return weights[row * score_stride + key]; },
                           sums);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < EACH_WAY; i++) {
        i64 row = first + threadIdx.y + SIDE * i;
        bool counts = row < length;
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) sums[i][j] = counts ? sums[i][j] / total[i] : 0.0f;
        if (threadIdx.x == 0 && row < shape.sequence) {
            logsumexp[sum_at(shape, sample, head, row)] = counts ? highest[i] + logf(total[i]) : 0.0f;
        }
    }
    store_tile<TILE, WIDTH / SIDE, T>(shape, out_head(shape, out, sample, head), first, sums);
}

// delta: the rows' products of output and its gradient, one warp per row and head.
template <typename T>
__device__ void attention_delta(const Attention &shape, const T *out, const T *out_gradient, float *delta) {
    i64 unit = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32, size = shape.size;
    if (unit >= shape.samples * shape.sequence * shape.heads) return;
    float sum = 0.0f;
    for (i64 i = unit * size + threadIdx.x % 32; i < (unit + 1) * size; i += 32) {
        sum = fmaf(to_float(out[i]), to_float(out_gradient[i]), sum);
    }
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, apart);
    i64 row = unit / shape.heads;
    if (threadIdx.x % 32 == 0) {
        delta[sum_at(shape, row / shape.sequence, unit % shape.heads, row % shape.sequence)] = sum;
    }
}

// From tiles of queries, keys, values and output gradients: the weights as they met the values, and the
// slopes of the scores.
template <int TILE>
__device__ __forceinline__ void score_gradients(const Attention &shape, const Dropout &site, i64 sample,
                                                i64 length, i64 head, i64 first_query, i64 first_key,
                                                const float *query_tile, const float *key_tile,
                                                const float *value_tile, const float *gradient_tile,
                                                const float *logsumexp, const float *delta, float *weights,
                                                float *slopes) {
    const int EACH_WAY = TILE / SIDE;
    float scores[EACH_WAY][EACH_WAY], products[EACH_WAY][EACH_WAY];
    tile_products<EACH_WAY>(shape.size, query_tile, key_tile, scores);
    tile_products<EACH_WAY>(shape.size, gradient_tile, value_tile, products);
#pragma unroll
    for (int i = 0; i < EACH_WAY; i++) {
        int row = threadIdx.y + SIDE * i;
        i64 query = first_query + row;
        bool inside = query < length;
        i64 place = sum_at(shape, sample, head, query);
        float lse = inside ? logsumexp[place] : 0.0f, offset = inside ? delta[place] : 0.0f;
        u32 mask = row_key(site, sample, head * shape.sequence + query);
        i64 visible = inside ? keys_seen(shape, length, query) : 0;
#pragma unroll
        for (int j = 0; j < EACH_WAY; j++) {
            int col = threadIdx.x + SIDE * j;
            bool seen = first_key + col < visible;
            float probability = seen ? expf(scores[i][j] * shape.scale - lse) : 0.0f;
            float factor = drop_factor(site, mask, first_key + col);
            weights[row * (TILE + 1) + col] = probability * factor;
            slopes[row * (TILE + 1) + col] = probability * (factor * products[i][j] - offset) * shape.scale;
        }
    }
}

template <int TILE, int WIDTH, typename T>
__device__ void attend_query_gradient(const Attention &shape, const Dropout &site, const T *qkv,
                                      const float *logsumexp, const T *out_gradient,
                                      const float *delta, T *qkv_gradient) {
    extern __shared__ float shared[];
    i64 stride = shape.size + 1;
    float *query_tile = shared, *gradient_tile = query_tile + TILE * stride;
    float *key_tile = gradient_tile + TILE * stride, *value_tile = key_tile + TILE * stride;
    float *weights = value_tile + TILE * stride, *slopes = weights + TILE * (TILE + 1);
    i64 first = (i64)(gridDim.x - 1 - blockIdx.x) * TILE, head = blockIdx.y, sample = blockIdx.z;
    i64 kv_head = head / (shape.heads / shape.kv_heads), length = length_of(shape, sample);
    HeadRows<T> keys = qkv_head(shape, qkv, sample, shape.heads + kv_head);
    HeadRows<T> values = qkv_head(shape, qkv, sample, shape.heads + shape.kv_heads + kv_head);
    load_tile<TILE, T>(shape, qkv_head(shape, qkv, sample, head), first, query_tile);
    load_tile<TILE, T>(shape, out_head(shape, out_gradient, sample, head), first, gradient_tile);
    float sums[TILE / SIDE][WIDTH / SIDE] = {};
    i64 end = keys_end<TILE>(shape, length, first);
    for (i64 start = 0; start < end; start += TILE) {
        load_tile<TILE, T>(shape, keys, start, key_tile);
        load_tile<TILE, T>(shape, values, start, value_tile);
        __syncthreads();
        score_gradients<TILE>(shape, site, sample, length, head, first, start, query_tile, key_tile, value_tile,
                              gradient_tile, logsumexp, delta, weights, slopes);
        __syncthreads();
        add_weighted<TILE>(shape.size, key_tile, [&](int key, int row) { return slopes[row * (TILE + 1) + key]; },
                           sums);
        __syncthreads();
    }
    store_tile<TILE, WIDTH / SIDE, T>(shape, qkv_head(shape, qkv_gradient, sample, head), first, sums);
}

template <int TILE, int WIDTH, typename T>
__device__ void attend_key_value_gradient(const Attention &shape, const Dropout &site, const T *qkv,
                                          const float *logsumexp, const T *out_gradient,
                                          const float *delta, T *qkv_gradient) {
    extern __shared__ float shared[];
    i64 stride = shape.size + 1;
    float *query_tile = shared, *gradient_tile = query_tile + TILE * stride;
    float *key_tile = gradient_tile + TILE * stride, *value_tile = key_tile + TILE * stride;
    float *weights = value_tile + TILE * stride, *slopes = weights + TILE * (TILE + 1);
    i64 first = (i64)blockIdx.x * TILE, kv_head = blockIdx.y, sample = blockIdx.z;
    i64 group = shape.heads / shape.kv_heads, length = length_of(shape, sample);
    i64 key_index = shape.heads + kv_head, value_index = key_index + shape.kv_heads;
    load_tile<TILE, T>(shape, qkv_head(shape, qkv, sample, key_index), first, key_tile);
    load_tile<TILE, T>(shape, qkv_head(shape, qkv, sample, value_index), first, value_tile);
    float key_sums[TILE / SIDE][WIDTH / SIDE] = {}, value_sums[TILE / SIDE][WIDTH / SIDE] = {};
    // Queries past the length see no key, and nobody sees a key past it.
    i64 earliest = first >= length ? length : shape.causal ? first : 0;
    // The query heads that share this one add up here, in order.
    for (i64 head = kv_head * group; head < (kv_head + 1) * group; head++) {
        HeadRows<T> queries = qkv_head(shape, qkv, sample, head);
        HeadRows<T> gradients = out_head(shape, out_gradient, sample, head);
        for (i64 start = earliest; start < length; start += TILE) {
            load_tile<TILE, T>(shape, queries, start, query_tile);
            load_tile<TILE, T>(shape, gradients, start, gradient_tile);
            __syncthreads();
            score_gradients<TILE>(shape, site, sample, length, head, start, first, query_tile, key_tile, value_tile,
                                  gradient_tile, logsumexp, delta, weights, slopes);
            __syncthreads();
            add_weighted<TILE>(shape.size, gradient_tile,
                               [&](int query, int key) { return weights[query * (TILE + 1) + key]; },
                               value_sums);
            add_weighted<TILE>(shape.size, query_tile,
                               [&](int query, int key) { return slopes[query * (TILE + 1) + key]; }, key_sums);
            __syncthreads();
        }
    }
    store_tile<TILE, WIDTH / SIDE, T>(shape, qkv_head(shape, qkv_gradient, sample, key_index), first, key_sums);
    store_tile<TILE, WIDTH / SIDE, T>(shape, qkv_head(shape, qkv_gradient, sample, value_index), first, value_sums);
}

TYPED(attention_delta, (Attention shape, const T *out, const T *out_gradient, float *delta),
      (shape, out, out_gradient, delta))

#define FORWARD(TILE, WIDTH, WHICH) \
    template <typename T> \
    __device__ void attention_##TILE##_##WIDTH(const Attention &shape, const Dropout &site, const T *qkv, T *out, \
                                               float *logsumexp) { \
        attend<TILE, WIDTH>(shape, site, qkv, out, logsumexp); \
    } \
    WHICH(attention_##TILE##_##WIDTH, \
          (Attention shape, Dropout site, const T *qkv, T *out, float *logsumexp), \
          (shape, site, qkv, out, logsumexp))

#define GRADIENT(NAME, TILE, WIDTH, WHICH) \
    template <typename T> \
    __device__ void NAME##_##TILE##_##WIDTH(const Attention &shape, const Dropout &site, const T *qkv, \
                                            const float *logsumexp, const T *out_gradient, const float *delta, \
                                            T *qkv_gradient) { \
        attend_##NAME<TILE, WIDTH>(shape, site, qkv, logsumexp, out_gradient, delta, qkv_gradient); \
    } \
    WHICH(NAME##_##TILE##_##WIDTH, \
          (Attention shape, Dropout site, const T *qkv, const float *logsumexp, const T *out_gradient, \
           const float *delta, T *qkv_gradient), \
          (shape, site, qkv, logsumexp, out_gradient, delta, qkv_gradient))

#define BACKWARD(TILE, WIDTH, WHICH) \
    GRADIENT(query_gradient, TILE, WIDTH, WHICH) \
    GRADIENT(key_value_gradient, TILE, WIDTH, WHICH)

// Elements of two bytes have faster kernels for all but the widest heads.
#define FLOATS(NAME, PARAMETERS, ARGUMENTS) INSTANCE(NAME, f32, __launch_bounds__(THREADS), PARAMETERS, ARGUMENTS)

FORWARD(64, 64, FLOATS)
FORWARD(32, 128, FLOATS)
FORWARD(16, 256, TYPED)
BACKWARD(32, 64, FLOATS)
BACKWARD(32, 128, FLOATS)
BACKWARD(16, 128, FLOATS)
BACKWARD(16, 256, TYPED)
