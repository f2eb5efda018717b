// LayerNorm and RMSNorm, and sums over columns. Rows are held in registers while they are worked on: each
// element moves once. Column sums are made in two stages whose cut depends on the shape alone.

// A row's subtracted mean and multiplied reciprocal.
struct RowScale {
    float mean, scale;
    __device__ __forceinline__ float normal(float x) const { return (x - mean) * scale; }
};

__device__ __forceinline__ RowScale row_scale(bool layer, const float *statistics, i64 row) {
    RowScale result;
    result.mean = layer ? statistics[2 * row] : 0.0f;
    result.scale = layer ? statistics[2 * row + 1] : statistics[row];
    return result;
}

// The norm's output: forward and backward make it alike, to the bit.
__device__ __forceinline__ float scaled(float normal, float weight, const float *bias, float shift) {
    return bias ? fmaf(normal, weight, shift) : normal * weight;
}

// The threads that share a row: a warp, or the block.
struct WarpTeam {
    __device__ static int rank() { return threadIdx.x % 32; }
    __device__ static int size() { return 32; }
    __device__ static float sum(float value) { return warp_sum(value); }
};

struct BlockTeam {
    __device__ static int rank() { return threadIdx.x; }
    __device__ static int size() { return blockDim.x; }
    __device__ static float sum(float value) { return block_sum(value); }
};

// How rows may be moved: those of x, those of tensors without a stride, and the parameters'. Loops that only
// send pieces are unrolled where that takes little code.
struct AnyRows {
    static const int UNROLL = 1;
    bool x, out, floats;
    __device__ static bool inside(i64 col, i64 cols) { return col < cols; }
};

struct WholeRows {
    static const int UNROLL = 8;
    Whole x, out, floats;
    __device__ static bool inside(i64, i64) { return true; }
};

template <typename T> struct Norm {
    const T *x;
    i64 stride, rows, cols;
    const float *weight, *bias;
    float *statistics;
    T *out;
    float eps;
    int layer;
};

// Pieces that cover so many columns with a team of 32.
#define HELD_FOR(T, COLS) ((COLS) / 32 / Piece<T>::SIZE)

// A row that a team goes over more than once: HELD pieces a thread stay in registers.
template <typename T, typename Team, int HELD> struct HeldRow {
    static const int SIZE = Piece<T>::SIZE;
    i64 cols;
    Piece<T> held[HELD];

    __device__ static __forceinline__ i64 first(int index) {
        return (i64)(Team::rank() + index * Team::size()) * SIZE;
    }

    // Calls work(index, first, values) for each piece; values past the row's end are zero.
    template <typename Work> __device__ __forceinline__ void each(Work work) const {
        float values[SIZE];
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            if (first(i) >= cols) return;
            unpack(held[i], values);
            work(i, first(i), values);
        }
    }
};

// What a longer row has past those pieces is read again.
template <typename T, typename Team, int HELD, typename Wide> struct LongRow : HeldRow<T, Team, HELD> {
    typedef HeldRow<T, Team, HELD> Held;
    const T *start;
    Wide wide;

    __device__ __forceinline__ LongRow(const T *start, i64 cols, Wide wide) : start(start), wide(wide) {
        this->cols = cols;
#pragma unroll
        for (int i = 0; i < HELD; i++) this->held[i] = load_piece(start, Held::first(i), cols, wide);
    }

    template <typename Work> __device__ __forceinline__ void each(Work work) const {
        Held::each(work);
        float values[Held::SIZE];
        for (i64 at = Held::first(HELD); at < this->cols; at += Team::size() * Held::SIZE) {
            load_values(start, at, this->cols, wide, values);
            work(HELD, at, values);
        }
    }
};

// A row's mean and reciprocal, written down by the team's first thread.
template <typename Team, typename Rows, typename T, typename Values>
__device__ __forceinline__ RowScale measure(const Norm<T> &of, i64 row, const Values &values) {
    const int SIZE = Piece<T>::SIZE;
    RowScale by = {0.0f, 0.0f};
    if (of.layer) {
        float sum = 0.0f;
        values.each([&](int, i64, const float (&x)[SIZE]) {
#pragma unroll
            for (int i = 0; i < SIZE; i++) sum += x[i];
        });
        by.mean = Team::sum(sum) / of.cols;
    }
    float squares = 0.0f;
    values.each([&](int, i64 first, const float (&x)[SIZE]) {
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            float apart = Rows::inside(first + i, of.cols) ? x[i] - by.mean : 0.0f;
            squares = fmaf(apart, apart, squares);
        }
    });
    by.scale = 1.0f / sqrtf(Team::sum(squares) / of.cols + of.eps);
    if (Team::rank() == 0) {
        if (of.layer) {
            of.statistics[2 * row] = by.mean;
            of.statistics[2 * row + 1] = by.scale;
        } else {
            of.statistics[row] = by.scale;
        }
    }
    return by;
}

// Pieces of a warp's coming rows that each lane has on their way: three rows of halves, one of floats.
#define FORWARD_AHEAD 12

// A warp's rows, those that follow already on their way. A lane has the same columns in every row, whose
// parameters stay with it, and takes back what it sent itself.
template <typename T, typename Rows>
__device__ __forceinline__ void norm_rows(const Norm<T> &of, uint4 (&coming)[FORWARD_AHEAD][32], Rows rows) {
    const int SIZE = Piece<T>::SIZE, HELD = HELD_FOR(T, 1024), COMING = FORWARD_AHEAD / HELD;
    int lane = threadIdx.x % 32, cols = of.cols;
    i64 row = (i64)blockIdx.x * WARPS + threadIdx.x / 32, step = (i64)gridDim.x * WARPS;
    auto first = [&](int i) { return (i * 32 + lane) * SIZE; };
    auto send = [&](i64 row, int place) {
#pragma unroll Rows::UNROLL
        for (int i = 0; i < HELD; i++) {
            if (row >= of.rows || first(i) >= cols) break;
            send_piece(&coming[place * HELD + i][lane], of.x + row * of.stride, first(i), cols, rows.x);
        }
        close_group();
    };
#pragma unroll
    for (int i = 0; i < COMING; i++) send(row + i * step, i);
    float weights[HELD][SIZE], shifts[HELD][SIZE] = {};
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        load_floats(of.weight, first(i), cols, rows.floats, weights[i]);
        if (of.bias) load_floats(of.bias, first(i), cols, rows.floats, shifts[i]);
    }
    for (int place = 0; row < of.rows; row += step, place = place + 1 < COMING ? place + 1 : 0) {
        HeldRow<T, WarpTeam, HELD> values = {cols};
        wait_groups<COMING - 1>();
#pragma unroll
        for (int i = 0; i < HELD; i++) values.held[i] = whole_piece((const T *)&coming[place * HELD + i][lane]);
        send(row + COMING * step, place);
        RowScale by = measure<WarpTeam, Rows>(of, row, values);
        values.each([&](int piece, i64 first, const float (&x)[SIZE]) {
            float results[SIZE];
#pragma unroll
            for (int i = 0; i < SIZE; i++) {
                results[i] = scaled(by.normal(x[i]), weights[piece][i], of.bias, shifts[piece][i]);
            }
            store_values(of.out + row * cols, first, of.cols, rows.out, results);
        });
    }
}

// One warp a row, for rows of up to 1024 columns. Warps stay for as many rows as there are.
template <typename T> __device__ __forceinline__ void norm(const Norm<T> &of) {
    __shared__ uint4 coming[WARPS][FORWARD_AHEAD][32];
    AnyRows rows = {aligned(of.x, of.stride), of.cols % Piece<T>::SIZE == 0, true};
    if (rows.x && rows.out) norm_rows(of, coming[threadIdx.x / 32], WholeRows());
    else norm_rows(of, coming[threadIdx.x / 32], rows);
}
BOUNDED(norm, __launch_bounds__(THREADS, 2), (Norm<T> of), (of))

template <typename T, typename Rows>
__device__ __forceinline__ void norm_wide_row(const Norm<T> &of, i64 row, Rows rows) {
    const int SIZE = Piece<T>::SIZE;
    i64 cols = of.cols;
    LongRow<T, BlockTeam, HELD_FOR(T, 512), decltype(rows.x)> values(of.x + row * of.stride, cols, rows.x);
    RowScale by = measure<BlockTeam, Rows>(of, row, values);
    T *out = of.out + row * cols;
    values.each([&](int, i64 first, const float (&x)[SIZE]) {
        float weights[SIZE], shifts[SIZE] = {}, results[SIZE];
        load_floats(of.weight, first, cols, rows.floats, weights);
        if (of.bias) load_floats(of.bias, first, cols, rows.floats, shifts);
#pragma unroll
        for (int i = 0; i < SIZE; i++) results[i] = scaled(by.normal(x[i]), weights[i], of.bias, shifts[i]);
        store_values(out, first, cols, rows.out, results);
    });
}

// One block a row: any width.
template <typename T> __device__ __forceinline__ void norm_wide(const Norm<T> &of) {
    AnyRows rows = {aligned(of.x, of.stride), of.cols % Piece<T>::SIZE == 0, true};
    if (rows.x && rows.out) norm_wide_row(of, blockIdx.x, WholeRows());
    else norm_wide_row(of, blockIdx.x, rows);
}
BOUNDED(norm_wide, __launch_bounds__(1024), (Norm<T> of), (of))

// What a norm's backward works on. Each block takes `share` rows and leaves one row of partial sums: those
// of the weight's gradient, those of the bias's, and, where they are asked for, those of dx.
template <typename T> struct NormBackward {
    const T *x;
    i64 stride, rows, cols, share;
    const float *weight, *bias, *statistics;
    T *dy, *dx;
    float *parts;
    int layer, accumulate, sum_dx;
};

// The same sixteen bytes, but what was unpacked from them before is not worth its registers.
template <typename T> __device__ __forceinline__ void unpack_again(Piece<T> piece, float (&values)[Piece<T>::SIZE]) {
#pragma unroll
    for (int i = 0; i < 4; i++) asm volatile("" : "+r"(piece.words[i]));
    unpack(piece, values);
}

// A thread's sums of the columns of one piece.
template <int SIZE> struct ColumnSums {
    float weight[SIZE], bias[SIZE], dx[SIZE];
};

// With x̂ the normalised row and g = dy * weight:
// dx = scale * (g - mean(g) - x̂ * mean(g * x̂)), and no mean(g) for the root mean square.
// This is one piece's part of both means, and of the columns' sums.
template <typename T, typename Rows>
__device__ __forceinline__ void norm_backward_means(const NormBackward<T> &of, int first, RowScale by,
                                                    const Piece<T> &x, const Piece<T> &dy, Rows rows, float &along,
                                                    float &average, ColumnSums<Piece<T>::SIZE> &sums) {
    const int SIZE = Piece<T>::SIZE;
    float values[SIZE], slopes[SIZE], weights[SIZE];
    unpack(x, values);
    unpack(dy, slopes);
    load_floats(of.weight, first, (int)of.cols, rows.floats, weights);
#pragma unroll
    for (int i = 0; i < SIZE; i++) {
        float normal = by.normal(values[i]), g = slopes[i] * weights[i];
        along = fmaf(g, normal, along);
        average += g;
        sums.weight[i] = fmaf(slopes[i], normal, sums.weight[i]);
        sums.bias[i] += slopes[i];
    }
}

// One piece's dx, added to what there was of it, and the norm's output again. Of dx the columns are summed
// before it is rounded.
template <typename T, typename Rows>
__device__ __forceinline__ void norm_backward_piece(const NormBackward<T> &of, i64 row, int first, int row_cols,
                                                    RowScale by, const Piece<T> &x, const Piece<T> &dy,
                                                    const Piece<T> &before, Rows rows, float along, float average,
                                                    ColumnSums<Piece<T>::SIZE> &sums) {
    const int SIZE = Piece<T>::SIZE;
    int cols = of.cols;
    float values[SIZE], slopes[SIZE], weights[SIZE], shifts[SIZE] = {}, results[SIZE];
    unpack_again(x, values);
    unpack_again(dy, slopes);
    unpack(before, results);
    const float *weight = of.weight;
    asm volatile("" : "+l"(weight));
    load_floats(weight, first, cols, rows.floats, weights);
    if (of.bias) load_floats(of.bias, first, cols, rows.floats, shifts);
#pragma unroll
    for (int i = 0; i < SIZE; i++) {
        float normal = by.normal(values[i]);
        results[i] += by.scale * (slopes[i] * weights[i] - average - normal * along);
        sums.dx[i] += results[i];
        values[i] = scaled(normal, weights[i], of.bias, shifts[i]);
    }
    store_values(of.dx + row * cols, first, row_cols, rows.out, results);
    store_values(of.dy + row * cols, first, row_cols, rows.out, values);
}

// Warps of a block that each have rows of their own, and pieces of such a row that a lane has at most: norm.rs
// counts on both.
#define BACKWARD_WARPS 6
#define LANE_PIECES 4

// A warp's next row, on its way while the warp works on the one before: registers would not hold both, nor
// hold x until its second use. A lane takes back what it sent itself, so nobody waits for another.
struct NextRow {
    uint4 x[2][LANE_PIECES][32], dy[LANE_PIECES][32], dx[LANE_PIECES][32];
};

// A warp's rows of the block's share. A lane has the same columns in every row, so their sums stay with it;
// what lies past the row's end is zero and adds nothing anywhere.
template <typename T, typename Rows>
__device__ __forceinline__ void norm_backward_rows(const NormBackward<T> &of, NextRow &next_row,
                                                   ColumnSums<Piece<T>::SIZE> (&sums)[LANE_PIECES], Rows rows) {
    const int SIZE = Piece<T>::SIZE;
    int lane = threadIdx.x % 32, cols = of.cols;
    float part = 1.0f / cols;
    i64 end = min((blockIdx.x + 1) * of.share, of.rows), row = blockIdx.x * of.share + threadIdx.x / 32;
    // The pieces that some lane has.
    auto used = [&](int i) { return i * 32 * SIZE < cols; };
    auto first = [&](int i) { return (i * 32 + lane) * SIZE; };
    auto send_inputs = [&](i64 row, int turn) {
#pragma unroll Rows::UNROLL
        for (int i = 0; i < LANE_PIECES; i++) {
            if (row >= end || !used(i)) break;
            send_piece(&next_row.x[turn][i][lane], of.x + row * of.stride, first(i), cols, rows.x);
            send_piece(&next_row.dy[i][lane], (const T *)of.dy + row * cols, first(i), cols, rows.out);
        }
        close_group();
    };
    auto send_before = [&](i64 row) {
#pragma unroll Rows::UNROLL
        for (int i = 0; i < LANE_PIECES; i++) {
            if (row >= end || !used(i) || !of.accumulate) break;
            send_piece(&next_row.dx[i][lane], (const T *)of.dx + row * cols, first(i), cols, rows.out);
        }
        close_group();
    };
    RowScale next_by = {0.0f, 0.0f};
    send_inputs(row, 0);
    send_before(row);
    if (row < end) next_by = row_scale(of.layer, of.statistics, row);
    // Two groups are open at a time, a row's inputs and its dx, and the older is always the one needed.
    for (int turn = 0; row < end; row += BACKWARD_WARPS, turn ^= 1) {
        i64 next = row + BACKWARD_WARPS;
        RowScale by = next_by;
        Piece<T> dy[LANE_PIECES];
        wait_groups<1>();
#pragma unroll
        for (int i = 0; i < LANE_PIECES; i++) {
            if (used(i)) dy[i] = whole_piece((const T *)&next_row.dy[i][lane]);
        }
        send_inputs(next, turn ^ 1);
        if (next < end) next_by = row_scale(of.layer, of.statistics, next);
        float along = 0.0f, average = 0.0f;
#pragma unroll
        for (int i = 0; i < LANE_PIECES; i++) {
            if (!used(i)) break;
            Piece<T> x = whole_piece((const T *)&next_row.x[turn][i][lane]);
            norm_backward_means(of, first(i), by, x, dy[i], rows, along, average, sums[i]);
        }
        along = warp_sum(along) * part;
        average = of.layer ? warp_sum(average) * part : 0.0f;
        wait_groups<1>();
#pragma unroll
        for (int i = 0; i < LANE_PIECES; i++) {
            if (!used(i)) break;
            Piece<T> x = whole_piece((const T *)&next_row.x[turn][i][lane]), before = {{0, 0, 0, 0}};
            if (of.accumulate) before = whole_piece((const T *)&next_row.dx[i][lane]);
            norm_backward_piece(of, row, first(i), cols, by, x, dy[i], before, rows, along, average, sums[i]);
        }
        send_before(next);
    }
}

// One warp a row, for rows of up to LANE_PIECES pieces a lane. Warps meet only when their rows are done.
template <typename T, typename Rows>
__device__ __forceinline__ void norm_backward_warps(const NormBackward<T> &of, Rows rows) {
    const int SIZE = Piece<T>::SIZE, COLS = LANE_PIECES * 32 * SIZE;
    __shared__ NextRow next_rows[BACKWARD_WARPS];
    float (*lines)[COLS] = (float (*)[COLS])next_rows;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, cols = of.cols;
    ColumnSums<SIZE> sums[LANE_PIECES] = {};
    norm_backward_rows(of, next_rows[warp], sums, rows);
    float *parts = of.parts + blockIdx.x * 3 * of.cols;
    // The warps' sums, added in their order.
#pragma unroll
    for (int set = 0; set < 3; set++) {
        if (set == 2 && !of.sum_dx) return;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < LANE_PIECES; i++) {
            const auto &own = set == 0 ? sums[i].weight : set == 1 ? sums[i].bias : sums[i].dx;
            store_floats(lines[warp], (i * 32 + lane) * SIZE, COLS, Whole(), own);
        }
        __syncthreads();
        for (int col = threadIdx.x; col < cols; col += blockDim.x) {
            float sum = 0.0f;
#pragma unroll
            for (int line = 0; line < BACKWARD_WARPS; line++) sum += lines[line][col];
            parts[set * cols + col] = sum;
        }
    }
}

// Of aligned rows of whole pieces, and of any. The order of sums is the same; two kernels, because the code for
// the second would take registers from the first.
template <typename T> __device__ __forceinline__ void norm_backward(const NormBackward<T> &of) {
    norm_backward_warps(of, WholeRows());
}
BOUNDED(norm_backward, __launch_bounds__(BACKWARD_WARPS * 32, 2), (NormBackward<T> of), (of))

template <typename T> __device__ __forceinline__ void norm_backward_any(const NormBackward<T> &of) {
    AnyRows rows = {aligned(of.x, of.stride), of.cols % Piece<T>::SIZE == 0, true};
    norm_backward_warps(of, rows);
}
BOUNDED(norm_backward_any, __launch_bounds__(BACKWARD_WARPS * 32, 2), (NormBackward<T> of), (of))

// Sums over the block, warps in order. Calls alternate between two places: one barrier is enough to keep a
// warp that is ahead from writing where another still reads.
__device__ __forceinline__ void team_sums(float &a, float &b, int turn) {
    __shared__ float parts[2][2][32];
    a = warp_sum(a), b = warp_sum(b);
    int own = threadIdx.x / 32, warps = blockDim.x / 32;
    if (threadIdx.x % 32 == 0) parts[turn][0][own] = a, parts[turn][1][own] = b;
    __syncthreads();
    a = 0.0f, b = 0.0f;
    for (int warp = 0; warp < warps; warp++) a += parts[turn][0][warp], b += parts[turn][1][warp];
}

// The block's rows, one after the other; a thread has one piece of each.
template <typename T, typename Rows>
__device__ __forceinline__ void norm_backward_team_rows(const NormBackward<T> &of, int first,
                                                        ColumnSums<Piece<T>::SIZE> &sums, Rows rows) {
    int cols = of.cols, turn = 0;
    float part = 1.0f / cols;
    i64 begin = blockIdx.x * of.share, end = min(begin + of.share, of.rows);
    for (i64 row = begin; row < end; row++, turn ^= 1) {
        Piece<T> x = load_piece(of.x + row * of.stride, first, cols, rows.x);
        Piece<T> dy = load_piece((const T *)of.dy + row * cols, first, cols, rows.out);
        Piece<T> before = load_piece((const T *)of.dx + row * cols, first, of.accumulate ? cols : 0, rows.out);
        RowScale by = row_scale(of.layer, of.statistics, row);
        float along = 0.0f, average = 0.0f;
        norm_backward_means(of, first, by, x, dy, rows, along, average, sums);
        team_sums(along, average, turn);
        along *= part;
        average = of.layer ? average * part : 0.0f;
        norm_backward_piece(of, row, first, cols, by, x, dy, before, rows, along, average, sums);
    }
}

// One block a row, for rows of one piece a thread.
template <typename T> __device__ __forceinline__ void norm_backward_team(const NormBackward<T> &of) {
    const int SIZE = Piece<T>::SIZE;
    int cols = of.cols, first = threadIdx.x * SIZE;
    ColumnSums<SIZE> sums = {};
    AnyRows rows = {aligned(of.x, of.stride), cols % SIZE == 0, true};
    if (rows.x && rows.out) norm_backward_team_rows(of, first, sums, WholeRows());
    else norm_backward_team_rows(of, first, sums, rows);
    float *parts = of.parts + blockIdx.x * 3 * of.cols;
    // Rows of parts are aligned only by chance, and written once.
#pragma unroll
    for (int i = 0; i < SIZE; i++) {
        if (first + i >= cols) return;
        parts[first + i] = sums.weight[i], parts[cols + first + i] = sums.bias[i];
        if (of.sum_dx) parts[2 * cols + first + i] = sums.dx[i];
    }
}
BOUNDED(norm_backward_team, __launch_bounds__(1024), (NormBackward<T> of), (of))

// The sums of two values over the block; what `block_sum` gives, in half the barriers.
__device__ __forceinline__ void block_sums(float &a, float &b) {
    __shared__ float parts[2][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    a = warp_sum(a), b = warp_sum(b);
    // Whoever still reads the parts of the row before must be done.
    __syncthreads();
    if (lane == 0) parts[0][warp] = a, parts[1][warp] = b;
    __syncthreads();
    bool inside = lane < blockDim.x / 32;
    a = warp_sum(inside ? parts[0][lane] : 0.0f), b = warp_sum(inside ? parts[1][lane] : 0.0f);
}

// The same for rows of any width, one block a row: rows are read twice, and the sums lie in the parts from
// the start.
template <typename T> __device__ __forceinline__ void norm_backward_wide(const NormBackward<T> &of) {
    i64 cols = of.cols, end = min((blockIdx.x + 1) * of.share, of.rows);
    i64 sets = of.sum_dx ? 3 : 2;
    float *weight_sums = of.parts + blockIdx.x * 3 * cols, *bias_sums = weight_sums + cols, *dx_sums = bias_sums + cols;
    for (i64 col = threadIdx.x; col < cols; col += blockDim.x) {
        for (i64 set = 0; set < sets; set++) weight_sums[set * cols + col] = 0.0f;
    }
    for (i64 row = blockIdx.x * of.share; row < end; row++) {
        const T *x = of.x + row * of.stride;
        T *dy = of.dy + row * cols, *dx = of.dx + row * cols;
        RowScale by = row_scale(of.layer, of.statistics, row);
        float along = 0.0f, average = 0.0f;
        for (i64 col = threadIdx.x; col < cols; col += blockDim.x) {
            float g = to_float(dy[col]) * of.weight[col];
            along = fmaf(g, by.normal(to_float(x[col])), along);
            average += g;
        }
        block_sums(along, average);
        along /= cols;
        average = of.layer ? average / cols : 0.0f;
        for (i64 col = threadIdx.x; col < cols; col += blockDim.x) {
            float normal = by.normal(to_float(x[col])), slope = to_float(dy[col]), weight = of.weight[col];
            weight_sums[col] = fmaf(slope, normal, weight_sums[col]);
            bias_sums[col] += slope;
            float sum = of.accumulate ? to_float(dx[col]) : 0.0f;
            sum += by.scale * (slope * weight - average - normal * along);
            if (of.sum_dx) dx_sums[col] += sum;
            dx[col] = from_float<T>(sum);
            dy[col] = from_float<T>(scaled(normal, weight, of.bias, of.bias ? of.bias[col] : 0.0f));
        }
    }
}
BOUNDED(norm_backward_wide, __launch_bounds__(1024), (NormBackward<T> of), (of))

// Where sums go; nowhere if null.
struct RowsSum {
    float *out;
    int accumulate;
};

// A block of STRIP x STRIP_LINES threads sums STRIP pieces' columns of a chunk of rows.
#define STRIP 32
#define STRIP_LINES 8
// Partial rows of a thread that are on their way together.
#define STRIP_LOADS 6

// The sums of this thread's piece of columns, over its lines of rows `begin..end`. While COUNT rows are added,
// as many are on their way.
template <int COUNT, typename T, typename Wide>
__device__ __forceinline__ void strip_sums(const T *values, i64 stride, i64 cols, i64 first, i64 begin, i64 end,
                                           Wide wide, float (&sums)[Piece<T>::SIZE]) {
    const int SIZE = Piece<T>::SIZE;
    Piece<T> current[COUNT], next[COUNT];
    auto load = [&](i64 row, Piece<T> (&pieces)[COUNT]) {
#pragma unroll
        for (int i = 0; i < COUNT; i++, row += STRIP_LINES) {
            // Past the chunk's end all is zero.
            pieces[i] = load_piece(values + row * stride, first, row < end ? cols : 0, wide);
        }
    };
    i64 row = begin + threadIdx.y;
    load(row, current);
    for (; row < end; row += COUNT * STRIP_LINES) {
        load(row + COUNT * STRIP_LINES, next);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            float terms[SIZE];
            unpack(current[i], terms);
#pragma unroll
            for (int j = 0; j < SIZE; j++) sums[j] += terms[j];
            current[i] = next[i];
        }
    }
}

// The lines' sums of a strip's columns, lines in order; thread `place` gets those of column `place`.
template <int COLS>
__device__ __forceinline__ float add_lines(const float (&lines)[STRIP_LINES][COLS], int place) {
    float sum = 0.0f;
#pragma unroll
    for (int line = 0; line < STRIP_LINES; line++) sum += lines[line][place];
    return sum;
}

// The sums of every STRIP_LINES-th partial row of a strip in each line.
template <int COLS>
__device__ __forceinline__ void add_parts_of(const float *parts, int rows, float (&lines)[STRIP_LINES][COLS]) {
    const int SIZE = COLS / STRIP;
    int own = threadIdx.x * SIZE;
    float sums[SIZE] = {};
    for (int row = threadIdx.y; row < rows; row += STRIP_LOADS * STRIP_LINES) {
        float4 terms[STRIP_LOADS][SIZE / 4];
#pragma unroll
        for (int i = 0; i < STRIP_LOADS; i++) {
            int from = row + i * STRIP_LINES;
#pragma unroll
            for (int j = 0; j < SIZE / 4; j++) {
                terms[i][j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (from < rows) terms[i][j] = __ldcg((const float4 *)&parts[from * COLS + own + 4 * j]);
            }
        }
#pragma unroll
        for (int i = 0; i < STRIP_LOADS; i++) {
#pragma unroll
            for (int j = 0; j < SIZE / 4; j++) {
                float4 four = terms[i][j];
                sums[4 * j] += four.x, sums[4 * j + 1] += four.y;
                sums[4 * j + 2] += four.z, sums[4 * j + 3] += four.w;
            }
        }
    }
    store_floats(lines[threadIdx.y], own, COLS, Whole(), sums);
}

// Whether this block is the last of `blocks` that come here; what the others wrote before is then seen by
// loads that pass by the first cache. The last one leaves the counter as it was.
__device__ __forceinline__ bool is_last(u32 *counter, u32 blocks) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0 && threadIdx.y == 0) {
        last = atomicAdd(counter, 1) == blocks - 1;
        if (last) *counter = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

// to (+)= the column sums of the values. Every block leaves its sums in `parts`; of each strip, the last block
// to be done adds them up, chunks in order, so that it does not matter which block that is. One chunk needs
// no parts.
template <typename T>
__device__ __forceinline__ void column_sums(const T *values, i64 stride, i64 rows, i64 cols, i64 chunk, float *parts,
                                            u32 *counters, RowsSum to) {
    const int SIZE = Piece<T>::SIZE, COLS = STRIP * SIZE;
    __shared__ __align__(16) float lines[STRIP_LINES][COLS];
    int place = threadIdx.y * STRIP + threadIdx.x, own = threadIdx.x * SIZE;
    i64 first = (i64)blockIdx.x * COLS + own, col = (i64)blockIdx.x * COLS + place;
    i64 begin = blockIdx.y * chunk, end = min(begin + chunk, rows);
    bool wide = aligned(values, stride);
    float sums[SIZE] = {};
    if (wide && cols % SIZE == 0) strip_sums<LOADS>(values, stride, cols, first, begin, end, Whole(), sums);
    else strip_sums<2>(values, stride, cols, first, begin, end, wide, sums);
    store_floats(lines[threadIdx.y], own, COLS, Whole(), sums);
    __syncthreads();
    float sum = place < COLS ? add_lines(lines, place) : 0.0f;
    if (gridDim.y > 1) {
        parts += (i64)blockIdx.x * gridDim.y * COLS;
        if (place < COLS) parts[blockIdx.y * COLS + place] = sum;
        if (!is_last(counters + blockIdx.x, gridDim.y)) return;
        add_parts_of(parts, gridDim.y, lines);
        __syncthreads();
        sum = place < COLS ? add_lines(lines, place) : 0.0f;
    }
    if (place < COLS && col < cols) to.out[col] = to.accumulate ? to.out[col] + sum : sum;
}
BOUNDED(column_sums, __launch_bounds__(STRIP * STRIP_LINES, 2),
        (const T *values, i64 stride, i64 rows, i64 cols, i64 chunk, float *parts, u32 *counters, RowsSum to),
        (values, stride, rows, cols, chunk, parts, counters, to))

// Partial rows of a thread that are on their way together: all that the narrow norms' backward leaves.
#define PART_LOADS 9

// out (+)= the sum of `rows` partial rows. A row has `cols` of the first output, then of the second, then of
// the third; blocks of y make one each. A block of 32 x 32 threads sums 32 columns.
KERNEL add_rows(const float *parts, i64 stride, i64 rows, i64 cols, RowsSum first, RowsSum second, RowsSum third) {
    __shared__ float lines[32][33];
    i64 col = (i64)blockIdx.x * 32 + threadIdx.x;
    RowsSum to = blockIdx.y == 0 ? first : blockIdx.y == 1 ? second : third;
    if (!to.out) return;
    parts += blockIdx.y * cols;
    float sum = 0.0f;
    for (i64 row = threadIdx.y; row < rows && col < cols; row += 32 * PART_LOADS) {
        float terms[PART_LOADS];
#pragma unroll
        for (int i = 0; i < PART_LOADS; i++) {
            terms[i] = row + i * 32 < rows ? parts[(row + i * 32) * stride + col] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < PART_LOADS; i++) sum += terms[i];
    }
    lines[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    // Each warp adds up one column's lines.
    sum = warp_sum(lines[threadIdx.x][threadIdx.y]);
    col = (i64)blockIdx.x * 32 + threadIdx.y;
    if (threadIdx.x == 0 && col < cols) to.out[col] = to.accumulate ? to.out[col] + sum : sum;
}
