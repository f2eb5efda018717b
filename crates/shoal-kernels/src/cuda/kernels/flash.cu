// Flash attention on tensor cores, for elements of two bytes. Tiles of rows lie in shared memory as they lie
// in the joint rows, scores and all sums are fp32 in registers, and only the factors of a product are
// rounded to the half type. The score tile that a product leaves in a warp's registers is laid out as the
// next product's left factor, so scores never pass through shared memory: the forward and the gradient of
// queries give a warp rows of queries, the gradient of keys and values gives it rows of keys and computes
// the scores transposed. No two blocks add to the same number.
//
// WIDTH is the head as padded with zeros in shared memory; M counts a warp's 16 rows, N the 8 columns of a
// score tile.

namespace flash {

typedef unsigned short u16;

#define FLASH_INLINE __device__ __forceinline__

// Without asynchronous copies a second buffer would only take room.
#if __CUDA_ARCH__ >= 800
#define FLASH_STAGES 2
#else
#define FLASH_STAGES 1
#endif

struct Shape {
    int samples, sequence, heads, kv_heads, size;
    float scale;
    int causal;
    // All rows begin on 16 bytes.
    int vectors;
    // A sample's rows that count, where not all do.
    const int *lengths;
};

struct Bf16 {};
struct F16 {};

// Instructions, one function each.

FLASH_INLINE u32 shared_address(const void *pointer) {
    u32 address;
    asm("{ .reg .u64 wide; cvta.to.shared.u64 wide, %1; cvt.u32.u64 %0, wide; }"
        : "=r"(address) : "l"(pointer));
    return address;
}

FLASH_INLINE float power_of_two(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

FLASH_INLINE u32 pack(Bf16, float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

FLASH_INLINE u32 pack(F16, float low, float high) {
    u32 both;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm("{ .reg .b16 low, high; cvt.rn.f16.f32 low, %1; cvt.rn.f16.f32 high, %2; mov.b32 %0, {low, high}; }"
        : "=r"(both) : "f"(low), "f"(high));
#endif
    return both;
}

FLASH_INLINE float to_float(Bf16, u16 bits) { return __int_as_float((int)((u32)bits << 16)); }

FLASH_INLINE float to_float(F16, u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Four 8 x 8 matrices; each lane gives the address of one of their rows.
FLASH_INLINE void load_matrices(u32 address, u32 (&to)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}

FLASH_INLINE void load_transposed(u32 address, u32 (&to)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}

// sums += left (16 x 16) * right (16 x 8)
FLASH_INLINE void multiply(Bf16, float (&sums)[4], const u32 (&left)[4], u32 low, u32 high) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(low), "r"(high));
}

FLASH_INLINE void multiply(F16, float (&sums)[4], const u32 (&left)[4], u32 low, u32 high) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(low), "r"(high));
#else
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(left[0]), "r"(left[1]), "r"(low));
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(left[2]), "r"(left[3]), "r"(high));
#endif
}

// 16 bytes to shared memory, there when `copies_done` returns. What is not `inside` is not read and becomes
// zeros.
FLASH_INLINE void copy_vector(char *to, const u16 *from, bool inside) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared_address(to)), "l"(from), "r"(inside ? 16 : 0) : "memory");
#else
    uint4 none = {0, 0, 0, 0};
    *(uint4 *)to = inside ? *(const uint4 *)from : none;
#endif
}

FLASH_INLINE void copy_float(float *to, const float *from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                 :: "r"(shared_address(to)), "l"(from) : "memory");
#else
    *to = *from;
#endif
}

FLASH_INLINE void copies_done() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// End of the instructions.

#define LOG2_E 1.4426950408889634f

// One head's columns of one sample inside joint rows.
struct Rows {
    const u16 *start;
    int stride;
};

// Column block `index` of a sample's rows of `qkv`: queries, then keys, then values.
FLASH_INLINE Rows qkv_rows(const Shape &shape, const u16 *qkv, i64 sample, int index) {
    int width = (shape.heads + 2 * shape.kv_heads) * shape.size;
    Rows rows = {qkv + sample * shape.sequence * width + index * shape.size, width};
    return rows;
}

FLASH_INLINE Rows out_rows(const Shape &shape, const u16 *out, i64 sample, int head) {
    int width = shape.heads * shape.size;
    Rows rows = {out + sample * shape.sequence * width + head * shape.size, width};
    return rows;
}

// The order of a row's 16-byte chunks is turned row by row: eight rows at one chunk, as a matrix is read
// and as sums are written, lie in eight different groups of banks. Rows of 96 already alternate between
// two halves of the banks.
template <int WIDTH> FLASH_INLINE int turned(int row) { return WIDTH % 64 == 0 ? row % 8 : row / 2 % 4; }

template <int WIDTH> FLASH_INLINE int place(int row, int chunk) {
    return 2 * WIDTH * row + 16 * (chunk ^ turned<WIDTH>(row));
}

// This lane's address of the 16 x 16 elements at a tile's start, so that the four matrices come in the order
// of a left factor. Read transposed, the first two and the last two are right factors of eight columns each.
template <int WIDTH> FLASH_INLINE u32 lane_start(const char *tile) {
    int lane = threadIdx.x % 32;
    return shared_address(tile) + place<WIDTH>(lane % 16, lane / 16);
}

// The same in the order of two right factors of eight of the tile's rows each.
template <int WIDTH> FLASH_INLINE u32 right_start(const char *tile) {
    int lane = threadIdx.x % 32;
    return shared_address(tile) + place<WIDTH>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// From a lane's start to the elements at row `row` and column 16 `step`. A tile starts at a multiple of 256
// bytes, so the bits that turn are free of carries.
template <int WIDTH> FLASH_INLINE u32 matrices_at(u32 start, int row, int step) {
    constexpr int TURNED = WIDTH % 64 == 0 ? WIDTH / 16 : 2;
    return (start ^ 32 * (step % TURNED)) + 32 * (step - step % TURNED) + 2 * WIDTH * row;
}

// Rows `first..first + ROWS` of a head into shared memory, with zeros past the sequence and the head.
template <int WIDTH, int ROWS, int BLOCK_THREADS>
FLASH_INLINE void load_rows(const Shape &shape, Rows from, int first, char *tile) {
    // Neighbours copy neighbouring chunks; each thread's chunks are turned alike, so that their places
    // differ by constants.
    constexpr int CHUNKS = WIDTH / 8, ACROSS = WIDTH % 64 == 0 ? CHUNKS : 4, DOWN = BLOCK_THREADS / ACROSS;
    static_assert(ROWS % DOWN == 0 && DOWN % 8 == 0, "every thread copies the same number of chunks");
    const u16 *start = from.start + (i64)first * from.stride;
    int rows = shape.sequence - first, size = shape.size, stride = from.stride;
    if (shape.vectors) {
        int own_row = threadIdx.x / ACROSS, own_chunk = threadIdx.x % ACROSS;
        char *to = tile + place<WIDTH>(own_row, own_chunk);
        const u16 *source = start + own_row * stride + 8 * own_chunk;
#pragma unroll
        for (int row = 0; row < ROWS; row += DOWN) {
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk += ACROSS) {
                bool inside = own_row + row < rows && 8 * (own_chunk + chunk) < size;
                copy_vector(to + 2 * WIDTH * row + 16 * chunk, source + row * stride + 8 * chunk, inside);
            }
        }
    } else {
#pragma unroll 1
        for (int index = threadIdx.x; index < ROWS * CHUNKS; index += BLOCK_THREADS) {
            int row = index / CHUNKS, chunk = index % CHUNKS;
            u16 *to = (u16 *)(tile + place<WIDTH>(row, chunk));
#pragma unroll 1
            for (int i = 0; i < 8; i++) {
                int col = 8 * chunk + i;
                to[i] = row < rows && col < size ? start[row * stride + col] : 0;
            }
        }
    }
}

// A warp's sums as rows `first..` of a head, by way of its own rows of a tile that nobody reads any more.
template <typename Half, int WIDTH, int M>
FLASH_INLINE void store_rows(const Shape &shape, Rows to, int first, char *tile,
                             const float (&sums)[M][WIDTH / 8][4]) {
    int lane = threadIdx.x % 32, rows = shape.sequence - first, size = shape.size, stride = to.stride;
    u16 *start = const_cast<u16 *>(to.start) + (i64)first * to.stride;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < WIDTH / 8; n++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = 16 * m + 8 * half + lane / 4;
                *(u32 *)(tile + place<WIDTH>(row, n) + 4 * (lane % 4)) =
                    pack(Half(), sums[m][n][2 * half], sums[m][n][2 * half + 1]);
            }
        }
    }
    __syncwarp();
    if (shape.vectors) {
#pragma unroll
        for (int pass = 0; pass < M * WIDTH / 16; pass++) {
            int index = lane + 32 * pass, row = index / (WIDTH / 8), chunk = index % (WIDTH / 8);
            if (row < rows && 8 * chunk < size) {
                *(uint4 *)(start + row * stride + 8 * chunk) =
                    *(const uint4 *)(tile + place<WIDTH>(row, chunk));
            }
        }
    } else {
#pragma unroll 1
        for (int index = lane; index < 16 * M * WIDTH; index += 32) {
            int row = index / WIDTH, col = index % WIDTH;
            if (row < rows && col < size) {
                start[row * stride + col] = ((const u16 *)(tile + place<WIDTH>(row, col / 8)))[col % 8];
            }
        }
    }
}

template <int WIDTH, int M> FLASH_INLINE void load_left(u32 tile, int step, u32 (&left)[M][4]) {
#pragma unroll
    for (int m = 0; m < M; m++) load_matrices(matrices_at<WIDTH>(tile, 16 * m, step), left[m]);
}

// products += 16 columns of the warp's rows times as many of a tile's rows
template <typename Half, int WIDTH, int M, int N>
FLASH_INLINE void add_products(const u32 (&left)[M][4], u32 right_tile, int step,
                               float (&products)[M][N][4]) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        u32 right[4];
        load_matrices(matrices_at<WIDTH>(right_tile, 8 * n, step), right);
#pragma unroll
        for (int m = 0; m < M; m++) {
            multiply(Half(), products[m][n], left[m], right[0], right[1]);
            multiply(Half(), products[m][n + 1], left[m], right[2], right[3]);
        }
    }
}

template <int M, int N> FLASH_INLINE void clear(float (&sums)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sums[m][n][i] = 0.0f;
        }
    }
}

// products = the warp's rows of one tile times the rows of another
template <typename Half, int WIDTH, int M, int N>
FLASH_INLINE void row_products(u32 left_tile, u32 right_tile, float (&products)[M][N][4]) {
    clear(products);
#pragma unroll
    for (int step = 0; step < WIDTH / 16; step++) {
        u32 left[M][4];
        load_left<WIDTH>(left_tile, step, left);
        add_products<Half, WIDTH>(left, right_tile, step, products);
    }
}

// A score tile as left factor.
template <typename Half, int M, int N>
FLASH_INLINE void pack_tile(const float (&scores)[M][N][4], u32 (&packed)[M][N / 2][4]) {
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                packed[m][n / 2][n % 2 * 2 + half] =
                    pack(Half(), scores[m][n][2 * half], scores[m][n][2 * half + 1]);
            }
        }
    }
}

// sums += weights times the tile's rows
template <typename Half, int WIDTH, int M, int STEPS>
FLASH_INLINE void add_weighted_rows(const u32 (&weights)[M][STEPS][4], u32 tile,
                                    float (&sums)[M][WIDTH / 8][4]) {
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
        for (int n = 0; n < WIDTH / 8; n += 2) {
            u32 right[4];
            load_transposed(matrices_at<WIDTH>(tile, 16 * step, n / 2), right);
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply(Half(), sums[m][n], weights[m][step], right[0], right[1]);
                multiply(Half(), sums[m][n + 1], weights[m][step], right[2], right[3]);
            }
        }
    }
}

// This thread's elements of a score tile.
#define FLASH_EACH_SCORE(M, N, m, n, i) \
    _Pragma("unroll") for (int m = 0; m < M; m++) \
        _Pragma("unroll") for (int n = 0; n < N; n++) \
            _Pragma("unroll") for (int i = 0; i < 4; i++)

// Row and column of element [m][n][i] inside the warp's part of a tile.
FLASH_INLINE int score_row(int m, int i) { return 16 * m + 8 * (i / 2) + threadIdx.x % 32 / 4; }
FLASH_INLINE int score_col(int n, int i) { return 8 * n + 2 * (threadIdx.x % 4) + i % 2; }

FLASH_INLINE float quad_sum(float value) {
    value += __shfl_xor_sync(ALL_LANES, value, 1);
    return value + __shfl_xor_sync(ALL_LANES, value, 2);
}

FLASH_INLINE float quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 1));
    return fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 2));
}

// A number that all lanes have. Taken from one of them, the compiler knows, and keeps what is made of it out
// of the lanes' registers.
FLASH_INLINE int uniform(int value) { return __shfl_sync(ALL_LANES, value, 0); }

FLASH_INLINE int length_of(const Shape &shape, int sample) {
    return uniform(shape.lengths ? shape.lengths[sample] : shape.sequence);
}

// Keys that a query of a sample of this length sees.
FLASH_INLINE int seen_keys(const Shape &shape, int length, int query) {
    return shape.causal ? min(length, query + 1) : length;
}

// Tiles of KEYS keys that the queries from `first` to `last` see; those past the length see none.
template <int KEYS> FLASH_INLINE int seen_tiles(const Shape &shape, int length, int first, int last) {
    return first < length ? (seen_keys(shape, length, last) + KEYS - 1) / KEYS : 0;
}

// A block's head, and whether there is one. A grid is a section of heads, then tiles, then sections: all heads
// of a section start with the tile that has most work, so that short ones are left for the end, and the
// blocks that share a head's rows run close to each other.
struct Turn {
    int head, sample;
    bool exists;
};

FLASH_INLINE Turn own_turn(const Shape &shape, int heads) {
    int index = blockIdx.x + gridDim.x * blockIdx.z;
    int sample = uniform(index / heads);
    Turn turn = {index - heads * sample, sample, sample < shape.samples};
    return turn;
}

extern __shared__ __align__(256) char tiles[];

// A block is four warps of 32 queries. Keys and values take turns: while one is worked on, the other is
// under way.
template <typename Half, int WIDTH>
FLASH_INLINE void attend(const Shape &shape, const Dropout &site, const u16 *qkv, u16 *out,
                         float *logsumexp) {
    constexpr int M = 2, BLOCK_WARPS = 4, QUERIES = 16 * M * BLOCK_WARPS, KEYS = 64, N = KEYS / 8, BLOCK_THREADS = 32 * BLOCK_WARPS;
    // Registers for the queries are left where heads are narrow.
    constexpr int HELD = WIDTH <= 64 ? WIDTH / 16 : 0;
    int lane = threadIdx.x % 32, warp_row = uniform(threadIdx.x / 32) * 16 * M;
    Turn turn = own_turn(shape, shape.heads);
    if (!turn.exists) return;
    // Late queries see most keys: they start first.
    int first = (int)(gridDim.y - 1 - blockIdx.y) * QUERIES;
    i64 sample = turn.sample;
    int length = length_of(shape, turn.sample);
    int head = turn.head, kv_head = uniform(head / (shape.heads / shape.kv_heads));
    Rows keys = qkv_rows(shape, qkv, sample, shape.heads + kv_head);
    Rows values = qkv_rows(shape, qkv, sample, shape.heads + shape.kv_heads + kv_head);
    char *own_tile = tiles + 2 * WIDTH * warp_row;
    char *key_tile = tiles + 2 * WIDTH * QUERIES, *value_tile = key_tile + 2 * WIDTH * KEYS;
    u32 query_at = lane_start<WIDTH>(own_tile), key_at = right_start<WIDTH>(key_tile);
    u32 value_at = lane_start<WIDTH>(value_tile);

    load_rows<WIDTH, QUERIES, BLOCK_THREADS>(shape, qkv_rows(shape, qkv, sample, head), first, tiles);
    load_rows<WIDTH, KEYS, BLOCK_THREADS>(shape, keys, 0, key_tile);
    int first_own = first + warp_row, last_own = first_own + 16 * M - 1;
    bool drops = site.threshold > 0;
    float sums[M][WIDTH / 8][4], highest[M][2], total[M][2], slope = shape.scale * LOG2_E;
    u32 masks[M][2];
    clear(sums);
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            highest[m][half] = NEGATIVE_INFINITY, total[m][half] = 0.0f, masks[m][half] = 0;
            int query = first_own + score_row(m, 2 * half);
            if (drops) masks[m][half] = row_key(site, sample, (i64)head * shape.sequence + query);
        }
    }
    copies_done();
    __syncthreads();
    u32 queries[HELD + 1][M][4];
#pragma unroll
    for (int step = 0; step < HELD; step++) load_left<WIDTH>(query_at, step, queries[step]);

    int count = seen_tiles<KEYS>(shape, length, first, first + QUERIES - 1);
    for (int tile = 0; tile < count; tile++) {
        int start = KEYS * tile;
        // Whether any query of this warp sees any of the keys.
        bool sees = !shape.causal || start <= last_own;
        load_rows<WIDTH, KEYS, BLOCK_THREADS>(shape, values, start, value_tile);
        u32 weights[M][N / 2][4];
        if (sees) {
            float scores[M][N][4];
            if (HELD > 0) {
                clear(scores);
#pragma unroll
                for (int step = 0; step < HELD; step++) {
                    add_products<Half, WIDTH>(queries[step], key_at, step, scores);
                }
            } else {
                row_products<Half, WIDTH>(query_at, key_at, scores);
            }
            if (start + KEYS > length || (shape.causal && start + KEYS - 1 > first_own)) {
                FLASH_EACH_SCORE(M, N, m, n, i) {
                    if (score_col(n, i) >= seen_keys(shape, length, first_own + score_row(m, i)) - start) {
                        scores[m][n][i] = NEGATIVE_INFINITY;
                    }
                }
            }
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float best = highest[m][half], sum = 0.0f;
#pragma unroll
                    for (int n = 0; n < N; n++) {
                        best = fmaxf(best, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
                    }
                    // Every query sees key 0 of the first tile, so `best` is finite from then on.
                    best = quad_max(best);
                    float shrink = power_of_two((highest[m][half] - best) * slope), shift = best * slope;
#pragma unroll
                    for (int n = 0; n < N; n++) {
#pragma unroll
                        for (int i = 2 * half; i < 2 * half + 2; i++) {
                            scores[m][n][i] = power_of_two(fmaf(scores[m][n][i], slope, -shift));
                            sum += scores[m][n][i];
                        }
                    }
                    total[m][half] = fmaf(total[m][half], shrink, sum);
                    highest[m][half] = best;
#pragma unroll
                    for (int n = 0; n < WIDTH / 8; n++) {
                        sums[m][n][2 * half] *= shrink;
                        sums[m][n][2 * half + 1] *= shrink;
                    }
                }
            }
            if (drops) {
                FLASH_EACH_SCORE(M, N, m, n, i) {
                    scores[m][n][i] *= drop_factor(site, masks[m][i / 2], start + score_col(n, i));
                }
            }
            pack_tile<Half>(scores, weights);
        }
        // The values are there, and nobody needs the keys any more.
        copies_done();
        __syncthreads();
        if (tile + 1 < count) load_rows<WIDTH, KEYS, BLOCK_THREADS>(shape, keys, start + KEYS, key_tile);
        if (sees) add_weighted_rows<Half, WIDTH>(weights, value_at, sums);
        copies_done();
        __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int query = first_own + score_row(m, 2 * half);
            bool counts = query < length;
            float all = quad_sum(total[m][half]), share = counts ? 1.0f / all : 0.0f;
#pragma unroll
            for (int n = 0; n < WIDTH / 8; n++) {
                sums[m][n][2 * half] *= share;
                sums[m][n][2 * half + 1] *= share;
            }
            if (lane % 4 == 0 && query < shape.sequence) {
                logsumexp[(sample * shape.heads + head) * shape.sequence + query] =
                    counts ? fmaf(highest[m][half], shape.scale, logf(all)) : 0.0f;
            }
        }
    }
    store_rows<Half, WIDTH>(shape, out_rows(shape, out, sample, head), first_own, own_tile, sums);
}

// delta: the rows' products of output and its gradient, eight lanes per row and head.
template <typename Half>
FLASH_INLINE void row_deltas(const Shape &shape, i64 count, const u16 *out, const u16 *out_gradient,
                             float *delta) {
    i64 unit = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 8;
    int size = shape.size, lane = threadIdx.x % 8;
    float sum = 0.0f;
    if (unit < count) {
        const u16 *left = out + unit * size, *right = out_gradient + unit * size;
        if (shape.vectors) {
            for (int col = 8 * lane; col < size; col += 64) {
                uint4 a = *(const uint4 *)(left + col), b = *(const uint4 *)(right + col);
                u32 lefts[4] = {a.x, a.y, a.z, a.w}, rights[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    sum = fmaf(to_float(Half(), (u16)lefts[i]), to_float(Half(), (u16)rights[i]), sum);
                    sum = fmaf(to_float(Half(), lefts[i] >> 16), to_float(Half(), rights[i] >> 16), sum);
                }
            }
        } else {
            for (int col = lane; col < size; col += 8) {
                sum = fmaf(to_float(Half(), left[col]), to_float(Half(), right[col]), sum);
            }
        }
    }
    sum = quad_sum(sum);
    sum += __shfl_xor_sync(ALL_LANES, sum, 4);
    if (unit < count && lane == 0) {
        i64 row = unit / shape.heads, sample = row / shape.sequence;
        int head = unit % shape.heads, query = row % shape.sequence;
        delta[(sample * shape.heads + head) * shape.sequence + query] = sum;
    }
}

// Walks tiles in order: while `work(stage)` has one, the next that `load(stage)` copies is under way.
template <typename Load, typename Work> FLASH_INLINE void stream_tiles(int count, Load load, Work work) {
    if (count == 0) {
        // The block's own rows are still under way, to where its results go next.
        copies_done();
        __syncthreads();
        return;
    }
    if (FLASH_STAGES == 2) load(0);
    for (int tile = 0; tile < count; tile++) {
        if (FLASH_STAGES == 1) {
            __syncthreads();
            load(0);
        }
        // The tile is there, and nobody needs the one before it any more.
        copies_done();
        __syncthreads();
        if (FLASH_STAGES == 2 && tile + 1 < count) load((tile + 1) % 2);
        work(FLASH_STAGES == 2 ? tile % 2 : 0);
    }
}

// A block is BLOCK_WARPS warps of 16 M queries.
template <typename Half, int WIDTH, int M, int BLOCK_WARPS, int KEYS>
FLASH_INLINE void query_gradient(const Shape &shape, const Dropout &site, const u16 *qkv,
                                 const float *logsumexp, const u16 *out_gradient, const float *delta,
                                 u16 *qkv_gradient) {
    constexpr int QUERIES = 16 * M * BLOCK_WARPS, N = KEYS / 8, BLOCK_THREADS = 32 * BLOCK_WARPS, TILE = 2 * WIDTH * KEYS;
    int warp_row = uniform(threadIdx.x / 32) * 16 * M;
    Turn turn = own_turn(shape, shape.heads);
    if (!turn.exists) return;
    int first = (int)(gridDim.y - 1 - blockIdx.y) * QUERIES;
    i64 sample = turn.sample;
    int length = length_of(shape, turn.sample);
    int head = turn.head, kv_head = uniform(head / (shape.heads / shape.kv_heads));
    Rows keys = qkv_rows(shape, qkv, sample, shape.heads + kv_head);
    Rows values = qkv_rows(shape, qkv, sample, shape.heads + shape.kv_heads + kv_head);
    char *own_tile = tiles + 2 * WIDTH * warp_row;
    char *gradient_tile = tiles + 2 * WIDTH * QUERIES, *streamed = gradient_tile + 2 * WIDTH * QUERIES;
    u32 query_at = lane_start<WIDTH>(own_tile), streamed_at = lane_start<WIDTH>(streamed);
    u32 streamed_right_at = right_start<WIDTH>(streamed);
    u32 gradient_at = query_at + 2 * WIDTH * QUERIES;

    load_rows<WIDTH, QUERIES, BLOCK_THREADS>(shape, qkv_rows(shape, qkv, sample, head), first, tiles);
    load_rows<WIDTH, QUERIES, BLOCK_THREADS>(shape, out_rows(shape, out_gradient, sample, head), first,
                                       gradient_tile);
    int first_own = first + warp_row, last_own = first_own + 16 * M - 1;
    bool drops = site.threshold > 0;
    float sums[M][WIDTH / 8][4], shifts[M][2], offsets[M][2], slope = shape.scale * LOG2_E;
    u32 masks[M][2];
    clear(sums);
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int query = first_own + score_row(m, 2 * half);
            i64 at = (sample * shape.heads + head) * shape.sequence + query;
            // Queries past the length weigh nothing.
            bool inside = query < length;
            shifts[m][half] = inside ? logsumexp[at] * LOG2_E : -NEGATIVE_INFINITY;
            offsets[m][half] = inside ? delta[at] : 0.0f;
            masks[m][half] = drops ? row_key(site, sample, (i64)head * shape.sequence + query) : 0;
        }
    }
    int next = 0, following = 0;
    auto load = [&](int stage) {
        load_rows<WIDTH, KEYS, BLOCK_THREADS>(shape, keys, next, streamed + 2 * TILE * stage);
        load_rows<WIDTH, KEYS, BLOCK_THREADS>(shape, values, next, streamed + 2 * TILE * stage + TILE);
        next += KEYS;
    };
    auto work = [&](int stage) {
        int start = following;
        following += KEYS;
        if (shape.causal && start > last_own) return;
        u32 key_at = streamed_right_at + 2 * TILE * stage, value_at = key_at + TILE;
        float scores[M][N][4], products[M][N][4];
        row_products<Half, WIDTH>(query_at, key_at, scores);
        FLASH_EACH_SCORE(M, N, m, n, i) {
            scores[m][n][i] = power_of_two(fmaf(scores[m][n][i], slope, -shifts[m][i / 2]));
        }
        if (start + KEYS > length || (shape.causal && start + KEYS - 1 > first_own)) {
            FLASH_EACH_SCORE(M, N, m, n, i) {
                if (score_col(n, i) >= seen_keys(shape, length, first_own + score_row(m, i)) - start) {
                    scores[m][n][i] = 0.0f;
                }
            }
        }
        row_products<Half, WIDTH>(gradient_at, value_at, products);
        if (drops) {
            FLASH_EACH_SCORE(M, N, m, n, i) {
                products[m][n][i] *= drop_factor(site, masks[m][i / 2], start + score_col(n, i));
            }
        }
        FLASH_EACH_SCORE(M, N, m, n, i) scores[m][n][i] *= products[m][n][i] - offsets[m][i / 2];
        u32 slopes[M][N / 2][4];
        pack_tile<Half>(scores, slopes);
        add_weighted_rows<Half, WIDTH>(slopes, streamed_at + 2 * TILE * stage, sums);
    };
    stream_tiles(seen_tiles<KEYS>(shape, length, first, first + QUERIES - 1), load, work);
    FLASH_EACH_SCORE(M, WIDTH / 8, m, n, i) sums[m][n][i] *= shape.scale;
    store_rows<Half, WIDTH>(shape, qkv_rows(shape, qkv_gradient, sample, head), first_own, own_tile, sums);
}

// A block is BLOCK_WARPS warps of 16 M keys; score tiles have a row per key.
template <typename Half, int WIDTH, int M, int BLOCK_WARPS, int QUERIES>
FLASH_INLINE void key_value_gradient(const Shape &shape, const Dropout &site, const u16 *qkv,
                                     const float *logsumexp, const u16 *out_gradient, const float *delta,
                                     u16 *qkv_gradient) {
    constexpr int KEYS = 16 * M * BLOCK_WARPS, N = QUERIES / 8, BLOCK_THREADS = 32 * BLOCK_WARPS, TILE = 2 * WIDTH * QUERIES;
    static_assert(QUERIES <= BLOCK_THREADS, "a thread copies one query's numbers");
    static_assert(N <= 8, "32 bits say what is kept");
    int warp_row = uniform(threadIdx.x / 32) * 16 * M;
    Turn turn = own_turn(shape, shape.kv_heads);
    if (!turn.exists) return;
    // Early keys are seen by most queries: they start first.
    int first = (int)blockIdx.y * KEYS;
    i64 sample = turn.sample;
    int length = length_of(shape, turn.sample);
    int kv_head = turn.head, group = shape.heads / shape.kv_heads;
    int key_index = shape.heads + kv_head, value_index = key_index + shape.kv_heads;
    char *own_keys = tiles + 2 * WIDTH * warp_row, *own_values = own_keys + 2 * WIDTH * KEYS;
    char *streamed = tiles + 4 * WIDTH * KEYS;
    // Of each stage: logarithms of sums, deltas, and keys of masks.
    float *numbers = (float *)(streamed + 2 * TILE * FLASH_STAGES);
    u32 key_at = lane_start<WIDTH>(own_keys), value_at = key_at + 2 * WIDTH * KEYS;
    u32 streamed_at = lane_start<WIDTH>(streamed), streamed_right_at = right_start<WIDTH>(streamed);

    load_rows<WIDTH, KEYS, BLOCK_THREADS>(shape, qkv_rows(shape, qkv, sample, key_index), first, tiles);
    load_rows<WIDTH, KEYS, BLOCK_THREADS>(shape, qkv_rows(shape, qkv, sample, value_index), first,
                                    tiles + 2 * WIDTH * KEYS);
    int first_own = first + warp_row, last_own = first_own + 16 * M - 1;
    bool drops = site.threshold > 0;
    float key_sums[M][WIDTH / 8][4], value_sums[M][WIDTH / 8][4], slope = shape.scale * LOG2_E;
    clear(key_sums);
    clear(value_sums);
    // The query heads that share this one add up here, in order.
    int earliest = shape.causal ? first / QUERIES * QUERIES : 0;
    int count = first < length ? group * ((length - earliest + QUERIES - 1) / QUERIES) : 0;
    int head = kv_head * group, next = earliest, start = earliest;
    auto load = [&](int stage) {
        char *to = streamed + 2 * TILE * stage;
        load_rows<WIDTH, QUERIES, BLOCK_THREADS>(shape, qkv_rows(shape, qkv, sample, head), next, to);
        load_rows<WIDTH, QUERIES, BLOCK_THREADS>(shape, out_rows(shape, out_gradient, sample, head), next,
                                           to + TILE);
        int own = threadIdx.x, query = next + own;
        if (own < QUERIES) {
            i64 at = (sample * shape.heads + head) * shape.sequence + query;
            float *number = numbers + 3 * QUERIES * stage + own;
            if (query < length) {
                copy_float(number, logsumexp + at);
                copy_float(number + QUERIES, delta + at);
            } else {
                // Queries past the length weigh nothing.
                number[0] = -NEGATIVE_INFINITY, number[QUERIES] = 0.0f;
            }
            if (drops) {
                ((u32 *)number)[2 * QUERIES] = row_key(site, sample, (i64)head * shape.sequence + query);
            }
        }
        next += QUERIES;
        if (next >= length) next = earliest, head++;
    };
    auto work = [&](int stage) {
        int first_query = start;
        start = start + QUERIES < length ? start + QUERIES : earliest;
        if (shape.causal && first_query + QUERIES - 1 < first_own) return;
        u32 query_at = streamed_at + 2 * TILE * stage, gradient_at = query_at + TILE;
        u32 query_right_at = streamed_right_at + 2 * TILE * stage, gradient_right_at = query_right_at + TILE;
        const float *number = numbers + 3 * QUERIES * stage;
        float scores[M][N][4], products[M][N][4];
        row_products<Half, WIDTH>(key_at, query_right_at, scores);
#pragma unroll
        for (int n = 0; n < N; n++) {
            float2 shift = *(const float2 *)(number + score_col(n, 0));
            shift.x *= LOG2_E, shift.y *= LOG2_E;
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    scores[m][n][i] =
                        power_of_two(fmaf(scores[m][n][i], slope, i % 2 == 0 ? -shift.x : -shift.y));
                }
            }
        }
        if (shape.causal && first_query < last_own) {
            FLASH_EACH_SCORE(M, N, m, n, i) {
                if (score_col(n, i) < first_own + score_row(m, i) - first_query) scores[m][n][i] = 0.0f;
            }
        }
        // Bit 4 n + i: whether the element is kept.
        u32 packed[M][N / 2][4], kept[M] = {};
        if (drops) {
            FLASH_EACH_SCORE(M, N, m, n, i) {
                u32 mask = ((const u32 *)number)[2 * QUERIES + score_col(n, i)];
                float factor = drop_factor(site, mask, first_own + score_row(m, i));
                kept[m] |= (u32)(factor > 0.0f) << (4 * n + i);
                products[m][n][i] = scores[m][n][i] * factor;
            }
            pack_tile<Half>(products, packed);
        } else {
            pack_tile<Half>(scores, packed);
        }
        add_weighted_rows<Half, WIDTH>(packed, gradient_at, value_sums);
        row_products<Half, WIDTH>(value_at, gradient_right_at, products);
        if (drops) {
            FLASH_EACH_SCORE(M, N, m, n, i) {
                products[m][n][i] *= kept[m] >> (4 * n + i) & 1 ? site.scale : 0.0f;
            }
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            float2 offset = *(const float2 *)(number + QUERIES + score_col(n, 0));
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    scores[m][n][i] *= products[m][n][i] - (i % 2 == 0 ? offset.x : offset.y);
                }
            }
        }
        pack_tile<Half>(scores, packed);
        add_weighted_rows<Half, WIDTH>(packed, query_at, key_sums);
    };
    stream_tiles(count, load, work);
    // Keys past the length were seen by nobody, whatever their scores would have been.
    FLASH_EACH_SCORE(M, WIDTH / 8, m, n, i) {
        bool counts = first_own + score_row(m, i) < length;
        key_sums[m][n][i] = counts ? key_sums[m][n][i] * shape.scale : 0.0f;
        value_sums[m][n][i] = counts ? value_sums[m][n][i] : 0.0f;
    }
    store_rows<Half, WIDTH>(shape, qkv_rows(shape, qkv_gradient, sample, key_index), first_own, own_keys,
                            key_sums);
    store_rows<Half, WIDTH>(shape, qkv_rows(shape, qkv_gradient, sample, value_index), first_own, own_values,
                            value_sums);
}

} // namespace flash

// Where the GPU lacks the instructions the kernels are empty, and the host does not start them.
#if __CUDA_ARCH__ >= 750
#define FLASH_F16(call) call
#else
#define FLASH_F16(call)
#endif
#if __CUDA_ARCH__ >= 800
#define FLASH_BF16(call) call
#else
#define FLASH_BF16(call)
#endif

// What no GPU of the architecture would be given: before sm_80 a block has 64 KB of shared memory, from
// there on at least 99.
#define FLASH_NOWHERE(call)
#if __CUDA_ARCH__ >= 800
#define FLASH_ROOMY(WHERE) WHERE
#define FLASH_TIGHT(WHERE) FLASH_NOWHERE
#else
#define FLASH_ROOMY(WHERE) FLASH_NOWHERE
#define FLASH_TIGHT(WHERE) WHERE
#endif

#define FLASH_KERNEL(BLOCK_THREADS, BLOCKS) extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BLOCKS)

#define FLASH_FORWARD(NAME, HALF, WHERE, WIDTH) \
    FLASH_KERNEL(128, 2) flash_attention_##NAME##_##WIDTH(flash::Shape shape, Dropout site, \
                                                          const flash::u16 *qkv, flash::u16 *out, \
                                                          float *logsumexp) { \
        WHERE((flash::attend<HALF, WIDTH>(shape, site, qkv, out, logsumexp))); \
    }

#define FLASH_BACKWARD(KIND, NAME, HALF, WHERE, BLOCKS, WIDTH, M, BLOCK_WARPS, OTHER) \
    FLASH_KERNEL(32 * BLOCK_WARPS, BLOCKS) flash_##KIND##_##NAME(flash::Shape shape, Dropout site, \
                                                           const flash::u16 *qkv, const float *logsumexp, \
                                                           const flash::u16 *out_gradient, \
                                                           const float *delta, flash::u16 *qkv_gradient) { \
        WHERE((flash::KIND<HALF, WIDTH, M, BLOCK_WARPS, OTHER>(shape, site, qkv, logsumexp, out_gradient, delta, \
                                                         qkv_gradient))); \
    }

#define FLASH_DELTA(NAME, HALF, WHERE) \
    KERNEL flash_delta_##NAME(flash::Shape shape, i64 count, const flash::u16 *out, \
                              const flash::u16 *out_gradient, float *delta) { \
        WHERE((flash::row_deltas<HALF>(shape, count, out, out_gradient, delta))); \
    }

// The kernels of one element; `flash.rs` has the same numbers.
#define FLASH_KERNELS(NAME, HALF, WHERE) \
    FLASH_FORWARD(NAME, HALF, WHERE, 64) \
    FLASH_FORWARD(NAME, HALF, WHERE, 96) \
    FLASH_FORWARD(NAME, HALF, WHERE, 128) \
    FLASH_DELTA(NAME, HALF, WHERE) \
    FLASH_BACKWARD(query_gradient, NAME##_64, HALF, WHERE, 2, 64, 2, 4, 64) \
    FLASH_BACKWARD(query_gradient, NAME##_96, HALF, FLASH_ROOMY(WHERE), 1, 96, 1, 8, 64) \
    FLASH_BACKWARD(query_gradient, NAME##_96_narrow, HALF, FLASH_TIGHT(WHERE), 2, 96, 1, 4, 32) \
    FLASH_BACKWARD(query_gradient, NAME##_128, HALF, FLASH_ROOMY(WHERE), 1, 128, 1, 8, 64) \
    FLASH_BACKWARD(query_gradient, NAME##_128_narrow, HALF, WHERE, 2, 128, 1, 4, 32) \
    FLASH_BACKWARD(key_value_gradient, NAME##_64, HALF, WHERE, 2, 64, 2, 4, 32) \
    FLASH_BACKWARD(key_value_gradient, NAME##_96, HALF, FLASH_ROOMY(WHERE), 1, 96, 1, 8, 64) \
    FLASH_BACKWARD(key_value_gradient, NAME##_96_narrow, HALF, FLASH_TIGHT(WHERE), 2, 96, 1, 4, 32) \
    FLASH_BACKWARD(key_value_gradient, NAME##_128, HALF, FLASH_ROOMY(WHERE), 1, 128, 1, 8, 64) \
    FLASH_BACKWARD(key_value_gradient, NAME##_128_narrow, HALF, WHERE, 2, 128, 1, 4, 32)

// A unit of its own for each kind of element: they take the compiler longest.
#ifdef FLASH_OF_BF16
FLASH_KERNELS(bf16, flash::Bf16, FLASH_BF16)
#else
FLASH_KERNELS(f16, flash::F16, FLASH_F16)
#endif
