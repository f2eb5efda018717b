// Softmax and cross-entropy in place: the logits become their own gradient. One block a row; the rows'
// losses are added up by one block, in their order.

// Pieces of a row that a thread holds from its first use to its second, at most, and threads of such a block:
// what fits the registers of a multiprocessor.
#define LOSS_HELD 7
#define LOSS_THREADS 1024
// Threads of a block for longer rows, and pieces that each loads before it uses the first.
#define LOSS_LONG_THREADS 512
#define LOSS_AHEAD 4

// Below every logit that counts, yet finite: differences from it are numbers.
#define LOWEST (-1.7e38f)

// The row's logits lie `stride` apart from the next row's, inside `length` elements in all. `ahead` rows of a
// block have room in shared memory on their way.
struct Logits {
    i64 rows, cols, stride, length;
    int with_gradient, ahead;
    float scale;
};

// A softmax as far as it has come: the highest logit, and the sum of exponentials relative to it.
template <typename T> struct Softmax {
    float highest, sum;

    __device__ __forceinline__ void add(const float (&x)[Piece<T>::SIZE]) {
        const int SIZE = Piece<T>::SIZE;
        float best = highest;
#pragma unroll
        for (int i = 0; i < SIZE; i++) best = Max::of(x[i], best);
        if (best > highest) {
            sum *= Functions<T>::exp(highest, best);
            highest = best;
        }
#pragma unroll
        for (int i = 0; i < SIZE; i++) sum += Functions<T>::exp(x[i], highest);
    }

    // Only the part of a piece that lies inside the row.
    __device__ __forceinline__ void add_some(float (&x)[Piece<T>::SIZE], int inside) {
#pragma unroll
        for (int i = 0; i < Piece<T>::SIZE; i++) x[i] = i < inside ? x[i] : NEGATIVE_INFINITY;
        add(x);
    }

    // All of the warp's, in every lane.
    __device__ __forceinline__ void join() {
        float own = highest;
        for (int apart = 16; apart > 0; apart /= 2) {
            highest = Max::of(highest, __shfl_xor_sync(ALL_LANES, highest, apart));
        }
        sum = warp_sum(sum * Functions<T>::exp(own, highest));
    }

    // All of the block's, in every thread. Calls alternate between two places: one barrier is enough to keep
    // a warp that is ahead from writing where another still reads.
    __device__ __forceinline__ void join_block(int turn) {
        __shared__ float parts[2][2][32];
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
        join();
        if (lane == 0) parts[turn][0][warp] = highest, parts[turn][1][warp] = sum;
        __syncthreads();
        highest = lane < warps ? parts[turn][0][lane] : LOWEST;
        sum = lane < warps ? parts[turn][1][lane] : 0.0f;
        join();
    }
};

// A piece of the gradient from the logits; zeros past the row's end.
template <typename T>
__device__ __forceinline__ void loss_slopes(const Logits &shape, const Softmax<T> &of, float factor, int target,
                                            int first, float (&x)[Piece<T>::SIZE]) {
    const int SIZE = Piece<T>::SIZE;
    int cols = shape.cols;
#pragma unroll
    for (int i = 0; i < SIZE; i++) x[i] = Functions<T>::exp(x[i], of.highest) * factor;
    if (target >= first && target < first + SIZE) {
#pragma unroll
        for (int i = 0; i < SIZE; i++) x[i] -= first + i == target ? shape.scale : 0.0f;
    }
    if (first + SIZE > cols) {
#pragma unroll
        for (int i = 0; i < SIZE; i++) x[i] = first + i < cols ? x[i] : 0.0f;
    }
}

// Zeros from `first` on in steps: all of a row whose target does not count, or what follows its last logit.
template <typename T, typename Wide>
__device__ __forceinline__ void clear_row(T *values, int first, int step, int end, Wide wide) {
    float zeros[Piece<T>::SIZE] = {};
    for (; first < end; first += step) store_values(values, first, end, wide, zeros);
}

// Where a row ends: the last one may do so with its last logit, others have zeros up to the next one.
__device__ __forceinline__ int row_end(const Logits &shape, i64 row) {
    return min(shape.stride, shape.length - row * shape.stride);
}

// Blocks that go from row to row. A thread holds its pieces of one row, those of the rows that follow are on
// their way: memory is not idle while the block computes.
template <typename T, typename Wide>
__device__ __forceinline__ void held_rows(const Logits &shape, const int *targets, T *logits, float *losses,
                                          Wide wide) {
    const int SIZE = Piece<T>::SIZE;
    extern __shared__ uint4 coming[];
    int cols = shape.cols, step = blockDim.x * SIZE, start = threadIdx.x * SIZE;
    // Threads' pieces of a row side by side, as many as a row has.
    int row_pieces = (cols + SIZE - 1) / SIZE;
    auto send = [&](i64 row, int place) {
        if (row < shape.rows) {
            const T *values = logits + row * shape.stride;
            for (int first = start; first < cols; first += step) {
                send_piece(&coming[place * row_pieces + first / SIZE], values, first, cols, wide);
            }
        }
        close_group();
    };
    for (int i = 0; i < shape.ahead; i++) send(blockIdx.x + (i64)i * gridDim.x, i);
    int place = 0, turn = 0, next_target = blockIdx.x < shape.rows ? targets[blockIdx.x] : 0;
    for (i64 row = blockIdx.x; row < shape.rows; row += gridDim.x) {
        int target = next_target, end = row_end(shape, row);
        T *values = logits + row * shape.stride;
        Piece<T> held[LOSS_HELD];
        if (shape.ahead > 1) wait_groups<1>();
        else wait_groups<0>();
#pragma unroll
        for (int i = 0; i < LOSS_HELD; i++) {
            int first = start + i * step;
            if (first >= cols) break;
            if (shape.ahead) held[i] = whole_piece((const T *)&coming[place * row_pieces + first / SIZE]);
            else held[i] = load_piece((const T *)values, first, cols, wide);
        }
        if (shape.ahead) send(row + (i64)shape.ahead * gridDim.x, place);
        place = place + 1 < shape.ahead ? place + 1 : 0;
        if (row + gridDim.x < shape.rows) next_target = targets[row + gridDim.x];
        if (target < 0) {
            if (shape.with_gradient) clear_row(values, start, step, end, wide);
            if (threadIdx.x == 0) losses[row] = 0.0f;
            continue;
        }
        // Read before the barrier, after which it is overwritten.
        float at_target = 0.0f;
        if (threadIdx.x == 0) at_target = target < cols ? to_float(values[target]) : NOT_A_NUMBER;
        Softmax<T> of = {LOWEST, 0.0f};
#pragma unroll
        for (int i = 0; i < LOSS_HELD; i++) {
            int first = start + i * step;
            if (first >= cols) break;
            float x[SIZE];
            unpack(held[i], x);
            if (first + SIZE <= cols) of.add(x);
            else of.add_some(x, cols - first);
        }
        of.join_block(turn);
        turn ^= 1;
        if (threadIdx.x == 0) losses[row] = logf(of.sum) + (of.highest - at_target);
        if (!shape.with_gradient) continue;
        float factor = shape.scale / of.sum;
#pragma unroll
        for (int i = 0; i < LOSS_HELD; i++) {
            int first = start + i * step;
            if (first >= cols) break;
            float x[SIZE];
            unpack(held[i], x);
            loss_slopes(shape, of, factor, target, first, x);
            store_values(values, first, end, wide, x);
        }
        clear_row(values, row_pieces * SIZE + start, step, end, wide);
    }
}

// Of aligned rows that all end with a whole piece, and of any; the bits are the same. Two kernels, because the
// code for the second would take registers from the first.
template <typename T>
__device__ __forceinline__ void cross_entropy(const Logits &shape, const int *targets, T *logits, float *losses) {
    held_rows(shape, targets, logits, losses, Whole());
}
BOUNDED(cross_entropy, __launch_bounds__(LOSS_THREADS, 1),
        (Logits shape, const int *targets, T *logits, float *losses), (shape, targets, logits, losses))

template <typename T>
__device__ __forceinline__ void cross_entropy_any(const Logits &shape, const int *targets, T *logits, float *losses) {
    held_rows(shape, targets, logits, losses, aligned(logits, shape.stride));
}
BOUNDED(cross_entropy_any, __launch_bounds__(LOSS_THREADS, 1),
        (Logits shape, const int *targets, T *logits, float *losses), (shape, targets, logits, losses))

// Rows that are too long for that: one block each, which reads its row twice.
template <typename T>
__device__ __forceinline__ void cross_entropy_long(Logits shape, const int *targets, T *logits, float *losses) {
    const int SIZE = Piece<T>::SIZE;
    i64 row = blockIdx.x;
    int cols = shape.cols, step = blockDim.x * SIZE, start = threadIdx.x * SIZE, target = targets[row];
    T *values = logits + row * shape.stride;
    int end = row_end(shape, row), first = start;
    bool wide = aligned(logits, shape.stride);
    if (target < 0) {
        if (shape.with_gradient) clear_row(values, start, step, end, wide);
        if (threadIdx.x == 0) losses[row] = 0.0f;
        return;
    }
    // Read by all threads before the barrier below, after which it is overwritten.
    float at_target = target < cols ? to_float(values[target]) : NOT_A_NUMBER;
    Softmax<T> of = {LOWEST, 0.0f};
    for (; wide && first + (LOSS_AHEAD - 1) * step + SIZE <= cols; first += LOSS_AHEAD * step) {
        Piece<T> pieces[LOSS_AHEAD];
#pragma unroll
        for (int i = 0; i < LOSS_AHEAD; i++) pieces[i] = whole_piece(values + first + i * step);
#pragma unroll
        for (int i = 0; i < LOSS_AHEAD; i++) {
            float x[SIZE];
            unpack(pieces[i], x);
            of.add(x);
        }
    }
    for (; first < cols; first += step) {
        float x[SIZE];
        load_values((const T *)values, first, cols, wide, x);
        of.add_some(x, cols - first);
    }
    of.join_block(0);
    if (threadIdx.x == 0) losses[row] = logf(of.sum) + (of.highest - at_target);
    if (!shape.with_gradient) return;
    float factor = shape.scale / of.sum;
    for (first = start; first < cols; first += step) {
        float x[SIZE];
        load_values((const T *)values, first, cols, wide, x);
        loss_slopes(shape, of, factor, target, first, x);
        store_values(values, first, end, wide, x);
    }
    clear_row(values, first, step, end, wide);
}
BOUNDED(cross_entropy_long, __launch_bounds__(LOSS_LONG_THREADS, 2),
        (Logits shape, const int *targets, T *logits, float *losses), (shape, targets, logits, losses))

// *sum += the values, by one block.
KERNEL add_losses(const float *values, i64 count, double *sum) {
    double total = 0.0;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) total += values[i];
    total = block_sum(total);
    if (threadIdx.x == 0) *sum += total;
}
