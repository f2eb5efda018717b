// What is done to images beside convolving them. Channels lie last, so that a pixel is a row and a channel a column.
//
// Everywhere a thread has eight columns side by side: a byte of a mask, eight bytes of places, sixteen bytes of
// halves or twice as many of floats. Sums go over lines, warps and blocks in an order that shapes decide.

typedef unsigned char u8;

#define EIGHT 8
#define NO_PLACE 255

// Eight elements as they lie in memory.
template <typename T> struct Eight {
    static const int PIECES = EIGHT / Piece<T>::SIZE;
    Piece<T> pieces[PIECES];
};

// Rows that a thread has on their way together: as many bytes of halves as of floats.
template <typename T> struct Ahead {
    static const int ONE_INPUT = 4 / Eight<T>::PIECES, TWO_INPUTS = 2 / Eight<T>::PIECES;
};

// Columns `first..` of a row that ends at `end`; zeros past it.
template <typename T, typename Wide>
__device__ __forceinline__ Eight<T> load_eight(const T *row, int first, int end, Wide wide) {
    Eight<T> eight;
#pragma unroll
    for (int i = 0; i < Eight<T>::PIECES; i++) {
        eight.pieces[i] = load_piece(row, first + i * Piece<T>::SIZE, end, wide);
    }
    return eight;
}

template <typename T> __device__ __forceinline__ void unpack_eight(const Eight<T> &eight, float (&values)[EIGHT]) {
    const int SIZE = Piece<T>::SIZE;
#pragma unroll
    for (int i = 0; i < Eight<T>::PIECES; i++) {
        float part[SIZE];
        unpack(eight.pieces[i], part);
#pragma unroll
        for (int j = 0; j < SIZE; j++) values[i * SIZE + j] = part[j];
    }
}

template <typename T, typename Wide>
__device__ __forceinline__ void store_eight(T *row, int first, int end, Wide wide, const float (&values)[EIGHT]) {
    const int SIZE = Piece<T>::SIZE;
#pragma unroll
    for (int i = 0; i < Eight<T>::PIECES; i++) {
        float part[SIZE];
#pragma unroll
        for (int j = 0; j < SIZE; j++) part[j] = values[i * SIZE + j];
        store_values(row, first + i * SIZE, end, wide, part);
    }
}

// What goes with columns, wherever it lies.
__device__ __forceinline__ void load_columns(const float *of, int first, int cols, float (&values)[EIGHT]) {
    load_floats(of, first, cols, aligned(of, 0), values);
}

// How blocks go over rows: `across` threads side by side, a power of two up to a warp, have a row's strip; blocks of
// x have other strips, those of y other chunks of rows. `whole` says that all rows are aligned and made of eights.
// Rows are numbered by an int, and the last numbers tried lie past the end: there are fewer than 2^30.
struct Strips {
    int rows, chunk, cols, across, whole;
};

// A thread's columns and its rows: every so many-th from `row` on.
struct Share {
    int first, lines, row, end;
};

// `width` is where columns end: past a row's end where there is a mask to fill.
__device__ __forceinline__ Share share_of(const Strips &of, int width) {
    Share share;
    share.first = (blockIdx.x * of.across + threadIdx.x % of.across) * EIGHT;
    share.lines = blockDim.x / of.across;
    int begin = blockIdx.y * of.chunk;
    share.row = begin + threadIdx.x / of.across;
    share.end = share.first < width ? min(begin + of.chunk, of.rows) : begin;
    return share;
}

// Bytes of a row's mask, which is made of whole integers.
__device__ __forceinline__ int mask_bytes(int cols) { return (cols + 31) / 32 * 4; }

__device__ __forceinline__ u8 *mask_at(u8 *mask, int row, int first, int cols) {
    return mask + (i64)row * mask_bytes(cols) + first / EIGHT;
}

// The byte of a row's mask; all ones where there is none.
__device__ __forceinline__ u32 load_mask(const u8 *mask, int row, int first, int cols, bool inside) {
    if (!mask) return 255;
    return inside ? mask[(i64)row * mask_bytes(cols) + first / EIGHT] : 0;
}

__device__ __forceinline__ void apply_mask(u32 mask, float (&values)[EIGHT]) {
#pragma unroll
    for (int i = 0; i < EIGHT; i++) values[i] = mask >> i & 1 ? values[i] : 0.0f;
}

// ReLU, and its byte of the mask. NaN stays, so that the loss shows it. Columns past the row's end hold zeros or
// NaN, whose bits are not set.
__device__ __forceinline__ u32 rectify(float (&values)[EIGHT]) {
    u32 mask = 0;
#pragma unroll
    for (int i = 0; i < EIGHT; i++) {
        mask |= (u32)(values[i] > 0.0f) << i;
        values[i] = values[i] < 0.0f ? 0.0f : values[i];
    }
    return mask;
}

// Kernels that only pass over rows have blocks of THREADS; those that sum columns have more, so that fewer blocks
// leave fewer partial sums.
#define SUM_THREADS 512
#define SUM_WARPS (SUM_THREADS / 32)
#define STRIP_COLS (32 * EIGHT)
#define SUMMING(NAME, PARAMETERS, ARGUMENTS) BOUNDED(NAME, __launch_bounds__(SUM_THREADS, 2), PARAMETERS, ARGUMENTS)
#define PASSING(NAME, PARAMETERS, ARGUMENTS) BOUNDED(NAME, __launch_bounds__(THREADS, 3), PARAMETERS, ARGUMENTS)

// Where column sums go, by way of partial sums and a counter for each strip; nowhere if null.
struct ColumnsSum {
    float *out;
    int accumulate;
};

// Whether this block is the last of its strip; what the others wrote before is then seen by loads that pass by the
// first cache. The last one leaves the counter as it was.
__device__ __forceinline__ bool is_last_chunk(u32 *counters) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(counters + blockIdx.x, 1) == gridDim.y - 1;
        if (last) counters[blockIdx.x] = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

// Eight floats of the partial sums, past the first cache.
__device__ __forceinline__ void load_parts(const float *at, float (&values)[EIGHT]) {
    float4 low = __ldcg((const float4 *)at), high = __ldcg((const float4 *)at + 1);
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
}

// Threads' sums to the block's: a warp's lines first, then the warps in order. Thread `place` gets column `place` of
// the strip.
template <int SETS>
__device__ __forceinline__ void add_lines(float (&sums)[SETS][EIGHT], int across, float (&totals)[SETS]) {
    __shared__ __align__(16) float lines[SUM_WARPS][STRIP_COLS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int apart = 16; apart >= across; apart /= 2) {
#pragma unroll
        for (int set = 0; set < SETS; set++) {
#pragma unroll
            for (int i = 0; i < EIGHT; i++) sums[set][i] += __shfl_xor_sync(ALL_LANES, sums[set][i], apart);
        }
    }
#pragma unroll
    for (int set = 0; set < SETS; set++) {
        // Whoever still reads the lines of the set before must be done.
        __syncthreads();
        if (lane < across) store_floats(lines[warp], lane * EIGHT, STRIP_COLS, Whole(), sums[set]);
        __syncthreads();
        totals[set] = 0.0f;
        if (threadIdx.x < across * EIGHT) {
#pragma unroll
            for (int line = 0; line < SUM_WARPS; line++) totals[set] += lines[line][threadIdx.x];
        }
    }
}

// The same over all chunks of the strip; whether this block has them. A chunk's sums lie side by side in the parts,
// set after set.
template <int SETS>
__device__ __forceinline__ bool add_chunks(float (&sums)[SETS][EIGHT], int across, float *parts, u32 *counters,
                                           float (&totals)[SETS]) {
    add_lines(sums, across, totals);
    if (gridDim.y == 1) return true;
    int cols = across * EIGHT;
    parts += (i64)blockIdx.x * gridDim.y * SETS * cols;
    if (threadIdx.x < cols) {
#pragma unroll
        for (int set = 0; set < SETS; set++) parts[(blockIdx.y * SETS + set) * cols + threadIdx.x] = totals[set];
    }
    if (!is_last_chunk(counters)) return false;
    int own = threadIdx.x % across * EIGHT, lines = blockDim.x / across;
#pragma unroll
    for (int set = 0; set < SETS; set++) {
#pragma unroll
        for (int i = 0; i < EIGHT; i++) sums[set][i] = 0.0f;
    }
#pragma unroll 4
    for (int chunk = threadIdx.x / across; chunk < gridDim.y; chunk += lines) {
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            float terms[EIGHT];
            load_parts(parts + (chunk * SETS + set) * cols + own, terms);
#pragma unroll
            for (int i = 0; i < EIGHT; i++) sums[set][i] += terms[i];
        }
    }
    add_lines(sums, across, totals);
    return true;
}

// The column of the strip whose sums this thread has; -1 where it has none.
__device__ __forceinline__ int summed_column(const Strips &of) {
    int strip = of.across * EIGHT, col = blockIdx.x * strip + threadIdx.x;
    return threadIdx.x < strip && col < of.cols ? col : -1;
}

// Nowhere, where nobody wants it.
__device__ __forceinline__ void put_sum(const ColumnsSum &to, int col, float sum) {
    if (!to.out) return;
    to.out[col] = to.accumulate ? to.out[col] + sum : sum;
}

// out += bias, then ReLU where there is a mask to fill.
template <int ROWS, typename T, typename Wide>
__device__ __forceinline__ void bias_rows(const Strips &of, const float *bias, u8 *mask, T *out, Wide wide) {
    int cols = of.cols;
    Share own = share_of(of, mask ? mask_bytes(cols) * EIGHT : cols);
    float more[EIGHT] = {};
    if (bias) load_columns(bias, own.first, cols, more);
    for (int row = own.row; row < own.end; row += ROWS * own.lines) {
        Eight<T> eights[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            int at = row + i * own.lines;
            eights[i] = load_eight((const T *)out + (i64)at * cols, own.first, at < own.end ? cols : 0, wide);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            int at = row + i * own.lines;
            if (at >= own.end) break;
            float values[EIGHT];
            unpack_eight(eights[i], values);
#pragma unroll
            for (int j = 0; j < EIGHT; j++) values[j] += more[j];
            if (mask) *mask_at(mask, at, own.first, cols) = rectify(values);
            store_eight(out + (i64)at * cols, own.first, cols, wide, values);
        }
    }
}

template <typename T>
__device__ __forceinline__ void pixel_bias(const Strips &of, const float *bias, u8 *mask, T *out) {
    if (of.whole) bias_rows<Ahead<T>::ONE_INPUT>(of, bias, mask, out, Whole());
    else bias_rows<1>(of, bias, mask, out, false);
}
PASSING(pixel_bias, (Strips of, const float *bias, u8 *mask, T *out), (of, bias, mask, out))

// The gradient becomes what the mask leaves of it; its column sums where they are asked for.
template <int ROWS, typename T, typename Wide>
__device__ __forceinline__ void mask_rows(const Strips &of, const u8 *mask, T *gradient, Wide wide,
                                          float (&sums)[1][EIGHT]) {
    int cols = of.cols;
    Share own = share_of(of, cols);
    for (int row = own.row; row < own.end; row += ROWS * own.lines) {
        Eight<T> eights[ROWS];
        u32 masks[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            int at = row + i * own.lines;
            bool inside = at < own.end;
            eights[i] = load_eight((const T *)gradient + (i64)at * cols, own.first, inside ? cols : 0, wide);
            masks[i] = load_mask(mask, at, own.first, cols, inside);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            int at = row + i * own.lines;
            if (at >= own.end) break;
            float values[EIGHT];
            unpack_eight(eights[i], values);
            apply_mask(masks[i], values);
#pragma unroll
            for (int j = 0; j < EIGHT; j++) sums[0][j] += values[j];
            store_eight(gradient + (i64)at * cols, own.first, cols, wide, values);
        }
    }
}

template <typename T>
__device__ __forceinline__ void pixel_mask(const Strips &of, const u8 *mask, T *gradient, float *parts, u32 *counters,
                                           const ColumnsSum &to) {
    float sums[1][EIGHT] = {}, totals[1];
    if (of.whole) mask_rows<Ahead<T>::ONE_INPUT>(of, mask, gradient, Whole(), sums);
    else mask_rows<1>(of, mask, gradient, false, sums);
    if (!to.out || !add_chunks(sums, of.across, parts, counters, totals)) return;
    int col = summed_column(of);
    if (col >= 0) put_sum(to, col, totals[0]);
}
SUMMING(pixel_mask, (Strips of, const u8 *mask, T *gradient, float *parts, u32 *counters, ColumnsSum to),
        (of, mask, gradient, parts, counters, to))

// Eight bytes of places; none past the row's end.
__device__ __forceinline__ uint2 load_places(const u8 *row, int first, int end, Whole) {
    return first < end ? *(const uint2 *)(row + first) : make_uint2(~0u, ~0u);
}

__device__ __forceinline__ uint2 load_places(const u8 *row, int first, int end, bool) {
    u32 words[2] = {~0u, ~0u};
#pragma unroll
    for (int i = 0; i < EIGHT; i++) {
        int shift = i % 4 * 8;
        if (first + i < end) words[i / 4] = (words[i / 4] & ~(255u << shift)) | (u32)row[first + i] << shift;
    }
    return make_uint2(words[0], words[1]);
}

__device__ __forceinline__ void store_places(u8 *row, int first, int end, Whole, const u32 (&words)[2]) {
    if (first < end) *(uint2 *)(row + first) = make_uint2(words[0], words[1]);
}

__device__ __forceinline__ void store_places(u8 *row, int first, int end, bool, const u32 (&words)[2]) {
#pragma unroll
    for (int i = 0; i < EIGHT; i++) {
        if (first + i < end) row[first + i] = (u8)(words[i / 4] >> (i % 4 * 8));
    }
}

// Whether byte `i` is that of a word whose every byte is `all`.
__device__ __forceinline__ bool is_byte(const uint2 &bytes, int i, u32 all) {
    return (((i < 4 ? bytes.x : bytes.y) ^ all) & 255u << (i % 4 * 8)) == 0;
}

// Column sums of the numbers that a ReLU let through, which have a place.
template <int ROWS, typename T, typename Wide>
__device__ __forceinline__ void placed_rows(const Strips &of, const u8 *places, const T *dy, Wide wide,
                                            float (&sums)[1][EIGHT]) {
    int cols = of.cols;
    Share own = share_of(of, cols);
    for (int row = own.row; row < own.end; row += ROWS * own.lines) {
        Eight<T> eights[ROWS];
        uint2 bytes[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            int at = row + i * own.lines;
            int end = at < own.end ? cols : 0;
            eights[i] = load_eight(dy + (i64)at * cols, own.first, end, wide);
            bytes[i] = load_places(places + (i64)at * cols, own.first, end, wide);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            float values[EIGHT];
            unpack_eight(eights[i], values);
#pragma unroll
            for (int j = 0; j < EIGHT; j++) {
                if (!is_byte(bytes[i], j, ~0u)) sums[0][j] += values[j];
            }
        }
    }
}

template <typename T>
__device__ __forceinline__ void pixel_placed_sums(const Strips &of, const u8 *places, const T *dy, float *parts,
                                                  u32 *counters, const ColumnsSum &to) {
    float sums[1][EIGHT] = {}, totals[1];
    if (of.whole) placed_rows<Ahead<T>::ONE_INPUT>(of, places, dy, Whole(), sums);
    else placed_rows<1>(of, places, dy, false, sums);
    if (!add_chunks(sums, of.across, parts, counters, totals)) return;
    int col = summed_column(of);
    if (col >= 0) put_sum(to, col, totals[0]);
}
SUMMING(pixel_placed_sums, (Strips of, const u8 *places, const T *dy, float *parts, u32 *counters, ColumnsSum to),
        (of, places, dy, parts, counters, to))

// `factor * x`, added to what was there where `accumulate`. Two roundings, like the CPU's.
__device__ __forceinline__ void scale_eight(float factor, int accumulate, const float (&before)[EIGHT],
                                            float (&values)[EIGHT]) {
#pragma unroll
    for (int i = 0; i < EIGHT; i++) {
        values[i] = __fmul_rn(factor, values[i]);
        if (accumulate) values[i] = __fadd_rn(before[i], values[i]);
    }
}

// Of numbers that lie side by side. Threads have ADDED eights each, a block's width apart.
#define ADDED 2
template <typename T>
__device__ __forceinline__ void pixel_add(i64 count, float factor, const T *__restrict__ x, T *out, int accumulate) {
    Eight<T> eights[ADDED], befores[ADDED];
    i64 own = ((i64)blockIdx.x * ADDED * THREADS + threadIdx.x) * EIGHT;
    auto left = [&](int i) { return (int)max(min(count - own - i * THREADS * EIGHT, (i64)EIGHT), (i64)0); };
#pragma unroll
    for (int i = 0; i < ADDED; i++) {
        i64 at = own + i * THREADS * EIGHT;
        eights[i] = load_eight(x + at, 0, left(i), aligned(x, 0));
        if (accumulate) befores[i] = load_eight((const T *)out + at, 0, left(i), true);
    }
#pragma unroll
    for (int i = 0; i < ADDED; i++) {
        float values[EIGHT], before[EIGHT] = {};
        unpack_eight(eights[i], values);
        if (accumulate) unpack_eight(befores[i], before);
        scale_eight(factor, accumulate, before, values);
        store_eight(out + own + i * THREADS * EIGHT, 0, left(i), true, values);
    }
}
TYPED(pixel_add, (i64 count, float factor, const T *x, T *out, int accumulate), (count, factor, x, out, accumulate))

// Of rows `stride` apart.
template <typename T, typename Wide>
__device__ __forceinline__ void add_strided(const Strips &of, float factor, const T *x, i64 stride, T *out,
                                            int accumulate, Wide wide) {
    int cols = of.cols;
    Share own = share_of(of, cols);
    for (int row = own.row; row < own.end; row += own.lines) {
        float values[EIGHT], before[EIGHT] = {};
        Eight<T> eight = load_eight(x + row * stride, own.first, cols, wide);
        if (accumulate) unpack_eight(load_eight((const T *)out + (i64)row * cols, own.first, cols, wide), before);
        unpack_eight(eight, values);
        scale_eight(factor, accumulate, before, values);
        store_eight(out + (i64)row * cols, own.first, cols, wide, values);
    }
}

template <typename T>
__device__ __forceinline__ void pixel_add_rows(const Strips &of, float factor, const T *x, i64 stride, T *out,
                                               int accumulate) {
    if (of.whole) add_strided(of, factor, x, stride, out, accumulate, Whole());
    else add_strided(of, factor, x, stride, out, accumulate, false);
}
PASSING(pixel_add_rows, (Strips of, float factor, const T *x, i64 stride, T *out, int accumulate),
        (of, factor, x, stride, out, accumulate))

// out = x, of rows that lie apart on either side.
template <int ROWS, typename T, typename Wide>
__device__ __forceinline__ void copy_strided(const Strips &of, const T *x, i64 stride, T *out, i64 out_stride,
                                             Wide wide) {
    int cols = of.cols;
    Share own = share_of(of, cols);
    for (int row = own.row; row < own.end; row += ROWS * own.lines) {
        Eight<T> eights[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            int at = row + i * own.lines;
            eights[i] = load_eight(x + at * stride, own.first, at < own.end ? cols : 0, wide);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            int at = row + i * own.lines;
            if (at >= own.end) break;
            float values[EIGHT];
            unpack_eight(eights[i], values);
            store_eight(out + at * out_stride, own.first, cols, wide, values);
        }
    }
}

template <typename T>
__device__ __forceinline__ void pixel_copy(const Strips &of, const T *x, i64 stride, T *out, i64 out_stride) {
    if (of.whole) copy_strided<Ahead<T>::ONE_INPUT>(of, x, stride, out, out_stride, Whole());
    else copy_strided<1>(of, x, stride, out, out_stride, false);
}
PASSING(pixel_copy, (Strips of, const T *x, i64 stride, T *out, i64 out_stride), (of, x, stride, out, out_stride))

// Numbers' mean and their squared distances from it, of eight columns.
struct Moments {
    float count, mean[EIGHT], squares[EIGHT];
};

// The share of `more` numbers beside `count` others; nothing of nothing.
__device__ __forceinline__ float share_of_counts(float count, float more) {
    return more > 0.0f ? more / (count + more) : 0.0f;
}

// By the means' distance: no difference of large sums is taken.
__device__ __forceinline__ void merge_moments(float count, float share, float more_mean, float more_squares,
                                              float &mean, float &squares) {
    float apart = more_mean - mean;
    mean = fmaf(apart, share, mean);
    squares += fmaf(apart * count * share, apart, more_squares);
}

// A thread's rows, some at a time: their distances from the mean so far move it, and what they would have moved it by
// is taken off their squares. The first row is the first mean, so that these never cancel.
template <int ROWS, typename T, typename Wide>
__device__ __forceinline__ void measure_rows(const Strips &of, const T *x, i64 stride, Wide wide, Moments &moments) {
    Share own = share_of(of, of.cols);
    for (int row = own.row; row < own.end; row += ROWS * own.lines) {
        Eight<T> eights[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            int at = row + i * own.lines;
            eights[i] = load_eight(x + at * stride, own.first, at < own.end ? of.cols : 0, wide);
        }
        if (row == own.row) unpack_eight(eights[0], moments.mean);
        float sums[EIGHT] = {}, squares[EIGHT] = {};
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (row + i * own.lines >= own.end) break;
            float values[EIGHT];
            unpack_eight(eights[i], values);
#pragma unroll
            for (int j = 0; j < EIGHT; j++) {
                float apart = values[j] - moments.mean[j];
                sums[j] += apart, squares[j] = fmaf(apart, apart, squares[j]);
            }
            moments.count += 1.0f;
        }
        float part = 1.0f / moments.count;
#pragma unroll
        for (int j = 0; j < EIGHT; j++) {
            float moved = sums[j] * part;
            moments.mean[j] += moved, moments.squares[j] += fmaf(-sums[j], moved, squares[j]);
        }
    }
}

// Threads' moments to the block's, as `add_lines` does sums. Threads of a line have the same count.
__device__ __forceinline__ void merge_lines(Moments &own, int across, float &mean, float &squares) {
    __shared__ __align__(16) float means[SUM_WARPS][STRIP_COLS], distances[SUM_WARPS][STRIP_COLS];
    __shared__ float counts[SUM_WARPS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int apart = 16; apart >= across; apart /= 2) {
        float more = __shfl_xor_sync(ALL_LANES, own.count, apart), share = share_of_counts(own.count, more);
#pragma unroll
        for (int i = 0; i < EIGHT; i++) {
            float more_mean = __shfl_xor_sync(ALL_LANES, own.mean[i], apart);
            float more_squares = __shfl_xor_sync(ALL_LANES, own.squares[i], apart);
            merge_moments(own.count, share, more_mean, more_squares, own.mean[i], own.squares[i]);
        }
        own.count += more;
    }
    // Whoever still reads what an earlier call left must be done.
    __syncthreads();
    if (lane == 0) counts[warp] = own.count;
    if (lane < across) {
        store_floats(means[warp], lane * EIGHT, STRIP_COLS, Whole(), own.mean);
        store_floats(distances[warp], lane * EIGHT, STRIP_COLS, Whole(), own.squares);
    }
    __syncthreads();
    mean = 0.0f, squares = 0.0f;
    if (threadIdx.x >= across * EIGHT) return;
    float count = 0.0f;
    for (int line = 0; line < SUM_WARPS; line++) {
        float more = counts[line], share = share_of_counts(count, more);
        merge_moments(count, share, means[line][threadIdx.x], distances[line][threadIdx.x], mean, squares);
        count += more;
    }
}

// Each column's mean, then each column's mean squared distance from it.
template <typename T>
__device__ __forceinline__ void pixel_statistics(const Strips &of, const T *x, i64 stride, float *parts, u32 *counters,
                                                 float *statistics) {
    Moments own = {};
    if (of.whole) measure_rows<Ahead<T>::ONE_INPUT>(of, x, stride, Whole(), own);
    else measure_rows<1>(of, x, stride, false, own);
    float mean, squares;
    // Threads past the columns' end have counted nothing, and nothing becomes of what they have.
    merge_lines(own, of.across, mean, squares);
    if (gridDim.y > 1) {
        int cols = of.across * EIGHT;
        parts += (i64)blockIdx.x * gridDim.y * 2 * cols;
        if (threadIdx.x < cols) {
            parts[blockIdx.y * 2 * cols + threadIdx.x] = mean;
            parts[(blockIdx.y * 2 + 1) * cols + threadIdx.x] = squares;
        }
        if (!is_last_chunk(counters)) return;
        int first = threadIdx.x % of.across * EIGHT, lines = blockDim.x / of.across;
        own = {};
#pragma unroll 2
        for (int chunk = threadIdx.x / of.across; chunk < gridDim.y; chunk += lines) {
            float means[EIGHT], distances[EIGHT], more = min(of.chunk, of.rows - chunk * of.chunk);
            load_parts(parts + chunk * 2 * cols + first, means);
            load_parts(parts + (chunk * 2 + 1) * cols + first, distances);
            float share = share_of_counts(own.count, more);
#pragma unroll
            for (int i = 0; i < EIGHT; i++) {
                merge_moments(own.count, share, means[i], distances[i], own.mean[i], own.squares[i]);
            }
            own.count += more;
        }
        merge_lines(own, of.across, mean, squares);
    }
    int col = summed_column(of);
    if (col >= 0) statistics[col] = mean, statistics[of.cols + col] = squares / (float)of.rows;
}
SUMMING(pixel_statistics, (Strips of, const T *x, i64 stride, float *parts, u32 *counters, float *statistics),
        (of, x, stride, parts, counters, statistics))

// Statistics of `into` become those of both, `share` of whose rows are of `of`.
KERNEL pixel_merge(i64 cols, const float *of, double share, float *into) {
    EACH(col, cols) {
        double apart = (double)of[col] - (double)into[col];
        double within = share * of[cols + col] + (1.0 - share) * into[cols + col];
        into[cols + col] = (float)(within + share * (1.0 - share) * apart * apart);
        into[col] = (float)(into[col] + share * apart);
    }
}

// What columns are normed by.
struct ColumnNorm {
    Strips of;
    const float *mean, *variance, *weight, *bias;
    float eps;
};

// What each column's distance from its mean is multiplied by to be of variance 1.
__device__ __forceinline__ void load_scales(const ColumnNorm &norm, int first, float (&scales)[EIGHT]) {
    load_columns(norm.variance, first, norm.of.cols, scales);
#pragma unroll
    for (int i = 0; i < EIGHT; i++) scales[i] = 1.0f / sqrtf(scales[i] + norm.eps);
}

// out = x normed, plus the residual, then ReLU where there is a mask to fill. Rounded like the CPU's, so that both
// agree on which numbers are above zero.
template <int ROWS, typename T, typename Wide>
__device__ __forceinline__ void norm_rows(const ColumnNorm &norm, const T *x, const T *residual, u8 *mask, T *out,
                                          Wide wide) {
    int cols = norm.of.cols;
    Share own = share_of(norm.of, mask ? mask_bytes(cols) * EIGHT : cols);
    float mean[EIGHT], factor[EIGHT], bias[EIGHT], weight[EIGHT];
    load_scales(norm, own.first, factor);
    load_columns(norm.mean, own.first, cols, mean);
    load_columns(norm.weight, own.first, cols, weight);
    load_columns(norm.bias, own.first, cols, bias);
#pragma unroll
    for (int i = 0; i < EIGHT; i++) factor[i] *= weight[i];
    for (int row = own.row; row < own.end; row += ROWS * own.lines) {
        Eight<T> eights[ROWS], residuals[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            int at = row + i * own.lines;
            int end = at < own.end ? cols : 0;
            eights[i] = load_eight(x + (i64)at * cols, own.first, end, wide);
            if (residual) residuals[i] = load_eight(residual + (i64)at * cols, own.first, end, wide);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            int at = row + i * own.lines;
            if (at >= own.end) break;
            float values[EIGHT], more[EIGHT];
            unpack_eight(eights[i], values);
#pragma unroll
            for (int j = 0; j < EIGHT; j++) {
                values[j] = __fadd_rn(__fmul_rn(values[j] - mean[j], factor[j]), bias[j]);
            }
            if (residual) {
                unpack_eight(residuals[i], more);
#pragma unroll
                for (int j = 0; j < EIGHT; j++) values[j] += more[j];
            }
            if (mask) *mask_at(mask, at, own.first, cols) = rectify(values);
            store_eight(out + (i64)at * cols, own.first, cols, wide, values);
        }
    }
}

template <typename T>
__device__ __forceinline__ void pixel_norm(const ColumnNorm &norm, const T *x, const T *residual, u8 *mask, T *out) {
    if (norm.of.whole) norm_rows<Ahead<T>::TWO_INPUTS>(norm, x, residual, mask, out, Whole());
    else norm_rows<1>(norm, x, residual, mask, out, false);
}
PASSING(pixel_norm, (ColumnNorm norm, const T *x, const T *residual, u8 *mask, T *out), (norm, x, residual, mask, out))

// What else the sums are added to, and where the statistics go; each may be nowhere.
struct NormGradients {
    ColumnsSum bias, weight, mean, variance;
    float mean_factor, variance_factor;
};

// Sums of what the mask leaves of dy, and of that times the distance from the mean.
template <int ROWS, typename T, typename Wide>
__device__ __forceinline__ void norm_sums_rows(const ColumnNorm &norm, const T *x, const u8 *mask, const T *dy,
                                               Wide wide, float (&sums)[2][EIGHT]) {
    int cols = norm.of.cols;
    Share own = share_of(norm.of, cols);
    float mean[EIGHT];
    load_columns(norm.mean, own.first, cols, mean);
    for (int row = own.row; row < own.end; row += ROWS * own.lines) {
        Eight<T> eights[ROWS], slopes[ROWS];
        u32 masks[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            int at = row + i * own.lines;
            bool inside = at < own.end;
            eights[i] = load_eight(x + (i64)at * cols, own.first, inside ? cols : 0, wide);
            slopes[i] = load_eight(dy + (i64)at * cols, own.first, inside ? cols : 0, wide);
            masks[i] = load_mask(mask, at, own.first, cols, inside);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (row + i * own.lines >= own.end) break;
            float values[EIGHT], slope[EIGHT];
            unpack_eight(eights[i], values);
            unpack_eight(slopes[i], slope);
            apply_mask(masks[i], slope);
#pragma unroll
            for (int j = 0; j < EIGHT; j++) {
                sums[0][j] += slope[j], sums[1][j] = fmaf(slope[j], values[j] - mean[j], sums[1][j]);
            }
        }
    }
}

template <typename T>
__device__ __forceinline__ void pixel_norm_sums(const ColumnNorm &norm, const T *x, const u8 *mask, const T *dy,
                                                float *parts, u32 *counters, const ColumnsSum &to,
                                                const NormGradients &gradients) {
    float sums[2][EIGHT] = {}, totals[2];
    if (norm.of.whole) norm_sums_rows<Ahead<T>::TWO_INPUTS>(norm, x, mask, dy, Whole(), sums);
    else norm_sums_rows<1>(norm, x, mask, dy, false, sums);
    if (!add_chunks(sums, norm.of.across, parts, counters, totals)) return;
    int col = summed_column(norm.of);
    if (col < 0) return;
    float along = totals[1] / sqrtf(norm.variance[col] + norm.eps);
    put_sum(to, col, totals[0]);
    put_sum(to, norm.of.cols + col, along);
    // The norm's own gradients, where they are wanted.
    put_sum(gradients.bias, col, totals[0]);
    put_sum(gradients.weight, col, along);
    put_sum(gradients.mean, col, gradients.mean_factor * norm.mean[col]);
    put_sum(gradients.variance, col, gradients.variance_factor * norm.variance[col]);
}
SUMMING(pixel_norm_sums,
        (ColumnNorm norm, const T *x, const u8 *mask, const T *dy, float *parts, u32 *counters, ColumnsSum to,
         NormGradients gradients),
        (norm, x, mask, dy, parts, counters, to, gradients))

// x becomes its gradient: weight * scale * (dy - (plain + normed * along) * share), with what columns have in common
// multiplied out first. With `keep`, dy becomes what the mask leaves of it.
template <int ROWS, typename T, typename Wide>
__device__ __forceinline__ void norm_gradient_rows(const ColumnNorm &norm, const float *sums, float share,
                                                   const u8 *mask, T *dy, int keep, T *x, Wide wide) {
    int cols = norm.of.cols;
    Share own = share_of(norm.of, cols);
    float mean[EIGHT], factor[EIGHT], tilt[EIGHT], shift[EIGHT], weight[EIGHT];
    load_scales(norm, own.first, factor);
    load_columns(norm.mean, own.first, cols, mean);
    load_columns(norm.weight, own.first, cols, weight);
    load_columns(sums, own.first, cols, shift);
    load_columns(sums + cols, own.first, cols, tilt);
#pragma unroll
    for (int i = 0; i < EIGHT; i++) {
        tilt[i] *= factor[i] * factor[i] * weight[i] * share;
        factor[i] *= weight[i];
        shift[i] *= factor[i] * share;
    }
    for (int row = own.row; row < own.end; row += ROWS * own.lines) {
        Eight<T> eights[ROWS], slopes[ROWS];
        u32 masks[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            int at = row + i * own.lines;
            bool inside = at < own.end;
            eights[i] = load_eight((const T *)x + (i64)at * cols, own.first, inside ? cols : 0, wide);
            slopes[i] = load_eight((const T *)dy + (i64)at * cols, own.first, inside ? cols : 0, wide);
            masks[i] = load_mask(mask, at, own.first, cols, inside);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            int at = row + i * own.lines;
            if (at >= own.end) break;
            float values[EIGHT], slope[EIGHT];
            unpack_eight(eights[i], values);
            unpack_eight(slopes[i], slope);
            apply_mask(masks[i], slope);
            if (keep) store_eight(dy + (i64)at * cols, own.first, cols, wide, slope);
#pragma unroll
            for (int j = 0; j < EIGHT; j++) {
                values[j] = fmaf(factor[j], slope[j], -fmaf(tilt[j], values[j] - mean[j], shift[j]));
            }
            store_eight(x + (i64)at * cols, own.first, cols, wide, values);
        }
    }
}

template <typename T>
__device__ __forceinline__ void pixel_norm_gradient(const ColumnNorm &norm, const float *sums, float share,
                                                    const u8 *mask, T *dy, int keep, T *x) {
    if (norm.of.whole) {
        norm_gradient_rows<Ahead<T>::TWO_INPUTS>(norm, sums, share, mask, dy, keep, x, Whole());
    } else {
        norm_gradient_rows<1>(norm, sums, share, mask, dy, keep, x, false);
    }
}
PASSING(pixel_norm_gradient,
        (ColumnNorm norm, const float *sums, float share, const u8 *mask, T *dy, int keep, T *x),
        (norm, sums, share, mask, dy, keep, x))

// Images seen through a window, and its places in a column (`down`) and in a row (`across`).
struct Pool {
    int height, width, channels, kernel_height, kernel_width, stride, padding_height, padding_width, down, across;
};

// Pixels of a window's line that are on their way together.
#define POOL_AHEAD 3

// A block has a line of the window's places, in all channels.
template <typename T, typename Wide>
__device__ __forceinline__ void max_line(const Pool &of, const T *x, const float *bias, int rectified, u8 *places,
                                         T *out, Wide wide) {
    int channels = of.channels, eights = (channels + EIGHT - 1) / EIGHT, sample = blockIdx.x / of.down;
    int top = blockIdx.x % of.down * of.stride - of.padding_height;
    int below_end = min(of.kernel_height, of.height - top);
    x += (i64)sample * of.height * of.width * channels;
    places += (i64)blockIdx.x * of.across * channels, out += (i64)blockIdx.x * of.across * channels;
    for (int unit = threadIdx.x; unit < of.across * eights; unit += blockDim.x) {
        int place = unit / eights, first = unit % eights * EIGHT, left = place * of.stride - of.padding_width;
        int beside_end = min(of.kernel_width, of.width - left);
        float best[EIGHT];
        u32 where[EIGHT];
        bool none = true;
        for (int below = max(0, -top); below < below_end; below++) {
            const T *line = x + (i64)(top + below) * of.width * channels;
            for (int beside = max(0, -left); beside < beside_end; beside += POOL_AHEAD) {
                Eight<T> ahead[POOL_AHEAD];
#pragma unroll
                for (int i = 0; i < POOL_AHEAD; i++) {
                    int end = beside + i < beside_end ? channels : 0;
                    ahead[i] = load_eight(line + (i64)(left + beside + i) * channels, first, end, wide);
                }
#pragma unroll
                for (int i = 0; i < POOL_AHEAD; i++) {
                    if (beside + i >= beside_end) break;
                    u32 here = below * of.kernel_width + beside + i;
                    float values[EIGHT];
                    unpack_eight(ahead[i], values);
#pragma unroll
                    for (int j = 0; j < EIGHT; j++) {
                        // No number is larger than NaN: it goes on, so that the loss shows it.
                        bool larger = none || values[j] != values[j] || values[j] > best[j];
                        best[j] = larger ? values[j] : best[j];
                        where[j] = larger ? here : where[j];
                    }
                    none = false;
                }
            }
        }
        float more[EIGHT] = {};
        if (bias) load_columns(bias, first, channels, more);
        u32 words[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < EIGHT; j++) {
            best[j] += more[j];
            if (rectified && best[j] <= 0.0f) best[j] = 0.0f, where[j] = NO_PLACE;
            words[j / 4] |= where[j] << (j % 4 * 8);
        }
        store_eight(out + (i64)place * channels, first, channels, wide, best);
        store_places(places + (i64)place * channels, first, channels, wide, words);
    }
}

template <typename T>
__device__ __forceinline__ void pixel_max(const Pool &of, const T *x, const float *bias, int rectified, u8 *places,
                                          T *out) {
    if (of.channels % EIGHT == 0) max_line(of, x, bias, rectified, places, out, Whole());
    else max_line(of, x, bias, rectified, places, out, false);
}
TYPED(pixel_max, (Pool of, const T *x, const float *bias, int rectified, u8 *places, T *out),
      (of, x, bias, rectified, places, out))

// The first place of the window that sees a row or column, which is counted from the padding's start.
__device__ __forceinline__ int first_place(int at, int kernel, int stride) {
    return at < kernel ? 0 : (at - kernel) / stride + 1;
}

// A block has a line of pixels, in all channels. Each pixel takes what the windows that see it found there.
template <typename T, typename Wide>
__device__ __forceinline__ void max_gradient_line(const Pool &of, const u8 *places, const T *dy, T *dx, Wide wide) {
    int channels = of.channels, eights = (channels + EIGHT - 1) / EIGHT, sample = blockIdx.x / of.height;
    int y = blockIdx.x % of.height + of.padding_height;
    int down_first = first_place(y, of.kernel_height, of.stride), down_last = min(y / of.stride, of.down - 1);
    places += (i64)sample * of.down * of.across * channels, dy += (i64)sample * of.down * of.across * channels;
    dx += (i64)blockIdx.x * of.width * channels;
    for (int unit = threadIdx.x; unit < of.width * eights; unit += blockDim.x) {
        int column = unit / eights, first = unit % eights * EIGHT, x = column + of.padding_width;
        int across_first = first_place(x, of.kernel_width, of.stride), across_last = min(x / of.stride, of.across - 1);
        float sums[EIGHT] = {};
        for (int down = down_first; down <= down_last; down++) {
            int line = (y - down * of.stride) * of.kernel_width + x;
            for (int across = across_first; across <= across_last; across += 2) {
                Eight<T> slopes[2];
                uint2 bytes[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    int end = across + i <= across_last ? channels : 0;
                    i64 at = (i64)(down * of.across + across + i) * channels;
                    slopes[i] = load_eight(dy + at, first, end, wide);
                    bytes[i] = load_places(places + at, first, end, wide);
                }
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    if (across + i > across_last) break;
                    float values[EIGHT];
                    unpack_eight(slopes[i], values);
                    u32 here = (line - (across + i) * of.stride) * 0x01010101u;
#pragma unroll
                    for (int j = 0; j < EIGHT; j++) {
                        if (is_byte(bytes[i], j, here)) sums[j] += values[j];
                    }
                }
            }
        }
        store_eight(dx + (i64)column * channels, first, channels, wide, sums);
    }
}

template <typename T>
__device__ __forceinline__ void pixel_max_gradient(const Pool &of, const u8 *places, const T *dy, T *dx) {
    if (of.channels % EIGHT == 0) max_gradient_line(of, places, dy, dx, Whole());
    else max_gradient_line(of, places, dy, dx, false);
}
TYPED(pixel_max_gradient, (Pool of, const u8 *places, const T *dy, T *dx), (of, places, dy, dx))

// A line's pixels `first..end`, `channels` apart, added to the sums in their order.
template <typename T, typename Wide>
__device__ __forceinline__ void add_pixels(const T *line, int from, int end, int channels, int first, Wide wide,
                                           float (&sums)[EIGHT]) {
    for (int pixel = from; pixel < end; pixel += POOL_AHEAD) {
        Eight<T> ahead[POOL_AHEAD];
#pragma unroll
        for (int i = 0; i < POOL_AHEAD; i++) {
            ahead[i] = load_eight(line + (i64)(pixel + i) * channels, first, pixel + i < end ? channels : 0, wide);
        }
#pragma unroll
        for (int i = 0; i < POOL_AHEAD; i++) {
            float values[EIGHT];
            unpack_eight(ahead[i], values);
            // Zeros past the end change nothing.
#pragma unroll
            for (int j = 0; j < EIGHT; j++) sums[j] += values[j];
        }
    }
}

// A block has a line of the window's places, in all channels; padding counts as zeros.
template <typename T, typename Wide>
__device__ __forceinline__ void mean_line(const Pool &of, const T *x, T *out, Wide wide) {
    int channels = of.channels, eights = (channels + EIGHT - 1) / EIGHT, sample = blockIdx.x / of.down;
    int top = blockIdx.x % of.down * of.stride - of.padding_height;
    int line_end = min(top + of.kernel_height, of.height);
    float share = 1.0f / (of.kernel_height * of.kernel_width);
    x += (i64)sample * of.height * of.width * channels, out += (i64)blockIdx.x * of.across * channels;
    for (int unit = threadIdx.x; unit < of.across * eights; unit += blockDim.x) {
        int place = unit / eights, first = unit % eights * EIGHT, left = place * of.stride - of.padding_width;
        float sums[EIGHT] = {};
        for (int line = max(0, top); line < line_end; line++) {
            add_pixels(x + (i64)line * of.width * channels, max(0, left), min(left + of.kernel_width, of.width),
                       channels, first, wide, sums);
        }
#pragma unroll
        for (int j = 0; j < EIGHT; j++) sums[j] *= share;
        store_eight(out + (i64)place * channels, first, channels, wide, sums);
    }
}

template <typename T> __device__ __forceinline__ void pixel_mean(const Pool &of, const T *x, T *out) {
    if (of.channels % EIGHT == 0) mean_line(of, x, out, Whole());
    else mean_line(of, x, out, false);
}
TYPED(pixel_mean, (Pool of, const T *x, T *out), (of, x, out))

// A block has a line of pixels, in all channels. Each pixel takes its share from all places that saw it.
template <typename T, typename Wide>
__device__ __forceinline__ void mean_gradient_line(const Pool &of, const T *dy, T *dx, Wide wide) {
    int channels = of.channels, eights = (channels + EIGHT - 1) / EIGHT, sample = blockIdx.x / of.height;
    int y = blockIdx.x % of.height + of.padding_height;
    int down_first = first_place(y, of.kernel_height, of.stride), down_last = min(y / of.stride, of.down - 1);
    float share = 1.0f / (of.kernel_height * of.kernel_width);
    dy += (i64)sample * of.down * of.across * channels, dx += (i64)blockIdx.x * of.width * channels;
    for (int unit = threadIdx.x; unit < of.width * eights; unit += blockDim.x) {
        int column = unit / eights, first = unit % eights * EIGHT, x = column + of.padding_width;
        int across_first = first_place(x, of.kernel_width, of.stride), across_last = min(x / of.stride, of.across - 1);
        float sums[EIGHT] = {};
        for (int down = down_first; down <= down_last; down++) {
            add_pixels(dy + (i64)down * of.across * channels, across_first, across_last + 1, channels, first, wide,
                       sums);
        }
#pragma unroll
        for (int j = 0; j < EIGHT; j++) sums[j] *= share;
        store_eight(dx + (i64)column * channels, first, channels, wide, sums);
    }
}

template <typename T> __device__ __forceinline__ void pixel_mean_gradient(const Pool &of, const T *dy, T *dx) {
    if (of.channels % EIGHT == 0) mean_gradient_line(of, dy, dx, Whole());
    else mean_gradient_line(of, dy, dx, false);
}
TYPED(pixel_mean_gradient, (Pool of, const T *dy, T *dx), (of, dy, dx))

// Images averaged over bins, `down` of them in a column and `across` in a row. Of a block, `side` threads have eight
// columns each of a strip, `lines` share a bin's pixels, and what threads are left have other bins.
struct Bins {
    int rows, height, width, channels, down, across, side, lines;
};

// Where a bin's pixels start and end in one direction. Sizes are below 2^15, so that products are ints.
__device__ __forceinline__ int bin_start(u32 index, u32 bins, u32 size) { return index * size / bins; }
__device__ __forceinline__ int bin_end(u32 index, u32 bins, u32 size) { return ((index + 1) * size + bins - 1) / bins; }

// Pixels that a thread has on their way together.
#define AVERAGE_AHEAD 4

template <typename T, typename Wide>
__device__ __forceinline__ void average_bins(const Bins &of, const T *x, T *out, Wide wide) {
    __shared__ __align__(16) float parts[THREADS * EIGHT];
    int side = of.side, lines = of.lines, channels = of.channels;
    int line = threadIdx.x / side % lines, first = (blockIdx.y * side + threadIdx.x % side) * EIGHT;
    int row = blockIdx.x * (THREADS / (side * lines)) + threadIdx.x / (side * lines);
    int sample = row / (of.down * of.across), bin = row % (of.down * of.across);
    int down = bin / of.across, across = bin % of.across;
    int top = bin_start(down, of.down, of.height), runs = bin_end(down, of.down, of.height) - top;
    int left = bin_start(across, of.across, of.width), run = bin_end(across, of.across, of.width) - left;
    float share = 1.0f / (runs * run), sums[EIGHT] = {};
    // Whole lines lie side by side.
    if (run == of.width) run *= runs, runs = 1;
    if (row >= of.rows) runs = 0;
    for (int below = 0; below < runs; below++) {
        const T *from = x + (i64)((sample * of.height + top + below) * of.width + left) * channels;
        for (int beside = line; beside < run; beside += AVERAGE_AHEAD * lines) {
            Eight<T> eights[AVERAGE_AHEAD];
#pragma unroll
            for (int i = 0; i < AVERAGE_AHEAD; i++) {
                int at = beside + i * lines;
                eights[i] = load_eight(from + (i64)at * channels, first, at < run ? channels : 0, wide);
            }
#pragma unroll
            for (int i = 0; i < AVERAGE_AHEAD; i++) {
                float values[EIGHT];
                unpack_eight(eights[i], values);
#pragma unroll
                for (int j = 0; j < EIGHT; j++) sums[j] += values[j];
            }
        }
    }
    if (lines > 1) {
        store_floats(parts, (int)threadIdx.x * EIGHT, THREADS * EIGHT, Whole(), sums);
        __syncthreads();
        if (line > 0) return;
        for (int other = 1; other < lines; other++) {
            float more[EIGHT];
            load_floats(parts, (int)(threadIdx.x + other * side) * EIGHT, THREADS * EIGHT, Whole(), more);
#pragma unroll
            for (int j = 0; j < EIGHT; j++) sums[j] += more[j];
        }
    }
    if (row >= of.rows) return;
#pragma unroll
    for (int j = 0; j < EIGHT; j++) sums[j] *= share;
    store_eight(out + (i64)row * channels, first, channels, wide, sums);
}

template <typename T> __device__ __forceinline__ void pixel_average(const Bins &of, const T *x, T *out) {
    if (of.channels % EIGHT == 0) average_bins(of, x, out, Whole());
    else average_bins(of, x, out, false);
}
TYPED(pixel_average, (Bins of, const T *x, T *out), (of, x, out))

// Here `rows` are pixels and `lines` is 1: each pixel takes its share of every bin it lies in.
template <typename T, typename Wide>
__device__ __forceinline__ void spread_bins(const Bins &of, const T *dy, T *dx, Wide wide) {
    int side = of.side, channels = of.channels, first = (blockIdx.y * side + threadIdx.x % side) * EIGHT;
    int row = blockIdx.x * (THREADS / side) + threadIdx.x / side, sample = row / (of.height * of.width);
    if (row >= of.rows || first >= channels) return;
    int pixel = row % (of.height * of.width), y = pixel / of.width, x = pixel % of.width;
    // Bins that see a pixel lie to it as pixels of a bin do to that.
    int down_first = bin_start(y, of.height, of.down), down_end = bin_end(y, of.height, of.down);
    int across_first = bin_start(x, of.width, of.across), across_end = bin_end(x, of.width, of.across);
    float sums[EIGHT] = {};
    for (int down = down_first; down < down_end; down++) {
        int runs = bin_end(down, of.down, of.height) - bin_start(down, of.down, of.height);
        for (int across = across_first; across < across_end; across++) {
            int run = bin_end(across, of.across, of.width) - bin_start(across, of.across, of.width);
            float share = 1.0f / (runs * run), values[EIGHT];
            const T *from = dy + (i64)((sample * of.down + down) * of.across + across) * channels;
            unpack_eight(load_eight(from, first, channels, wide), values);
#pragma unroll
            for (int j = 0; j < EIGHT; j++) sums[j] = __fadd_rn(sums[j], __fmul_rn(share, values[j]));
        }
    }
    store_eight(dx + (i64)row * channels, first, channels, wide, sums);
}

template <typename T> __device__ __forceinline__ void pixel_average_gradient(const Bins &of, const T *dy, T *dx) {
    if (of.channels % EIGHT == 0) spread_bins(of, dy, dx, Whole());
    else spread_bins(of, dy, dx, false);
}
TYPED(pixel_average_gradient, (Bins of, const T *dy, T *dx), (of, dy, dx))

// Channels of a tile, at most, and floats of one.
#define TILE_CHANNELS 32
#define TILE_FLOATS 4096

// [samples, channels, pixels] to [samples, pixels, channels]. Blocks of x have tiles of `tile` pixels, a multiple of
// 32; those of y have TILE_CHANNELS channels each, those of z samples.
template <typename T>
__device__ __forceinline__ void pixel_channels_last(i64 channels, i64 pixels, int tile,
                                                    const float *__restrict__ images, T *__restrict__ out) {
    // A line is one float longer, so that a column does not lie in one bank.
    __shared__ float values[TILE_FLOATS + TILE_CHANNELS];
    i64 first_pixel = (i64)blockIdx.x * tile, first_channel = (i64)blockIdx.y * TILE_CHANNELS;
    int width = min((i64)TILE_CHANNELS, channels - first_channel), length = min((i64)tile, pixels - first_pixel);
    images += ((i64)blockIdx.z * channels + first_channel) * pixels + first_pixel;
    out += ((i64)blockIdx.z * pixels + first_pixel) * channels + first_channel;
    for (int channel = 0; channel < width; channel++) {
#pragma unroll 4
        for (int pixel = threadIdx.x; pixel < length; pixel += THREADS) {
            values[channel * (tile + 1) + pixel] = images[channel * pixels + pixel];
        }
    }
    __syncthreads();
#pragma unroll 4
    for (int index = threadIdx.x; index < length * width; index += THREADS) {
        int pixel = index / width, channel = index % width;
        out[pixel * channels + channel] = from_float<T>(values[channel * (tile + 1) + pixel]);
    }
}
TYPED(pixel_channels_last, (i64 channels, i64 pixels, int tile, const float *images, T *out),
      (channels, pixels, tile, images, out))
