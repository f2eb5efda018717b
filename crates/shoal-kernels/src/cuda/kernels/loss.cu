// Softmax and cross-entropy in place: the logits become their own gradient. One block a row; the rows'
// losses are added up by one block, in their order.

#define LOSS_THREADS 512
// Pieces of a row that a thread loads before it uses the first.
#define LOSS_AHEAD 4

// Below every logit that counts, yet finite: differences from it are numbers.
#define LOWEST (-1.7e38f)

// The row's logits lie `stride` apart from the next row's, inside `length` elements in all. With `keep` the
// row waits in shared memory for its second use, otherwise it is read again.
struct Logits {
    i64 cols, stride, length;
    int with_gradient, keep;
    float scale;
};

template <typename T>
__device__ __forceinline__ void cross_entropy(Logits shape, const int *targets, T *logits, float *losses) {
    const int SIZE = Piece<T>::SIZE;
    extern __shared__ uint4 row_pieces[];
    i64 row = blockIdx.x, cols = shape.cols, step = blockDim.x * SIZE;
    T *values = logits + row * shape.stride;
    // The last row may end with its last logit; other rows have zeros up to the next one.
    i64 end = min(shape.stride, shape.length - row * shape.stride);
    bool wide = aligned(logits, shape.stride);
    i64 target = targets[row];
    if (target < 0) {
        if (shape.with_gradient) {
            float zeros[SIZE] = {};
            for (i64 first = threadIdx.x * SIZE; first < end; first += step) {
                store_values(values, first, end, wide, zeros);
            }
        }
        if (threadIdx.x == 0) losses[row] = 0.0f;
        return;
    }
    // Read by all threads before the barriers below, after which it is overwritten.
    float at_target = target < cols ? to_float(values[target]) : NOT_A_NUMBER;
    float highest = LOWEST, sum = 0.0f;
    for (i64 start = threadIdx.x * SIZE; start < cols; start += LOSS_AHEAD * step) {
        Piece<T> pieces[LOSS_AHEAD];
#pragma unroll
        for (int i = 0; i < LOSS_AHEAD; i++) pieces[i] = load_piece(values, start + i * step, cols, wide);
#pragma unroll
        for (int i = 0; i < LOSS_AHEAD; i++) {
            i64 first = start + i * step;
            if (first >= cols) break;
            if (shape.keep) store_whole((T *)&row_pieces[first / SIZE], pieces[i]);
            float x[SIZE];
            unpack(pieces[i], x);
            if (first + SIZE > cols) {
#pragma unroll
                for (int j = 0; j < SIZE; j++) x[j] = first + j < cols ? x[j] : NEGATIVE_INFINITY;
            }
            float best = highest;
#pragma unroll
            for (int j = 0; j < SIZE; j++) best = Max::of(x[j], best);
            if (best > highest) {
                sum *= Functions<T>::exp(highest, best);
                highest = best;
            }
#pragma unroll
            for (int j = 0; j < SIZE; j++) sum += Functions<T>::exp(x[j], highest);
        }
    }
    float own = highest;
    highest = block_reduce<Max>(highest, LOWEST);
    sum = block_sum(sum * Functions<T>::exp(own, highest));
    if (threadIdx.x == 0) losses[row] = logf(sum) + (highest - at_target);
    if (!shape.with_gradient) return;
    float factor = shape.scale / sum;
#pragma unroll 2
    for (i64 first = threadIdx.x * SIZE; first < end; first += step) {
        float x[SIZE] = {};
        if (first < cols) {
            // A thread takes back what it kept itself.
            if (shape.keep) unpack(whole_piece((const T *)&row_pieces[first / SIZE]), x);
            else load_values(values, first, cols, wide, x);
#pragma unroll
            for (int j = 0; j < SIZE; j++) x[j] = Functions<T>::exp(x[j], highest) * factor;
            if (target >= first && target < first + SIZE) {
#pragma unroll
                for (int j = 0; j < SIZE; j++) x[j] -= first + j == target ? shape.scale : 0.0f;
            }
            if (first + SIZE > cols) {
#pragma unroll
                for (int j = 0; j < SIZE; j++) x[j] = first + j < cols ? x[j] : 0.0f;
            }
        }
        store_values(values, first, end, wide, x);
    }
}
BOUNDED(cross_entropy, __launch_bounds__(LOSS_THREADS, 2),
        (Logits shape, const int *targets, T *logits, float *losses), (shape, targets, logits, losses))

// *sum += the values, by one block.
KERNEL add_losses(const float *values, i64 count, double *sum) {
    double total = 0.0;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) total += values[i];
    total = block_sum(total);
    if (threadIdx.x == 0) *sum += total;
}
