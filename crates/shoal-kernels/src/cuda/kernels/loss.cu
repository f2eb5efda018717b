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
    i64 row = blockIdx.x;
    int cols = shape.cols, step = blockDim.x * SIZE, target = targets[row];
    T *values = logits + row * shape.stride;
    // The last row may end with its last logit; other rows have zeros up to the next one.
    int end = min(shape.stride, shape.length - row * shape.stride);
    bool wide = aligned(logits, shape.stride);
    if (target < 0) {
        if (shape.with_gradient) {
            float zeros[SIZE] = {};
            for (int first = threadIdx.x * SIZE; first < end; first += step) {
                store_values(values, first, end, wide, zeros);
            }
        }
        if (threadIdx.x == 0) losses[row] = 0.0f;
        return;
    }
    // Read by all threads before the barriers below, after which it is overwritten.
    float at_target = target < cols ? to_float(values[target]) : NOT_A_NUMBER;
    float highest = LOWEST, sum = 0.0f;
    auto add = [&](const float (&x)[SIZE]) {
        float best = highest;
#pragma unroll
        for (int i = 0; i < SIZE; i++) best = Max::of(x[i], best);
        if (best > highest) {
            sum *= Functions<T>::exp(highest, best);
            highest = best;
        }
#pragma unroll
        for (int i = 0; i < SIZE; i++) sum += Functions<T>::exp(x[i], highest);
    };
    int first = threadIdx.x * SIZE;
    for (; wide && first + (LOSS_AHEAD - 1) * step + SIZE <= cols; first += LOSS_AHEAD * step) {
        Piece<T> pieces[LOSS_AHEAD];
#pragma unroll
        for (int i = 0; i < LOSS_AHEAD; i++) pieces[i] = whole_piece(values + first + i * step);
#pragma unroll
        for (int i = 0; i < LOSS_AHEAD; i++) {
            if (shape.keep) store_whole((T *)&row_pieces[(first + i * step) / SIZE], pieces[i]);
            float x[SIZE];
            unpack(pieces[i], x);
            add(x);
        }
    }
    for (; first < cols; first += step) {
        Piece<T> piece = load_piece(values, first, cols, wide);
        if (shape.keep) store_whole((T *)&row_pieces[first / SIZE], piece);
        float x[SIZE];
        unpack(piece, x);
#pragma unroll
        for (int i = 0; i < SIZE; i++) x[i] = first + i < cols ? x[i] : NEGATIVE_INFINITY;
        add(x);
    }
    float own = highest;
    highest = block_reduce<Max>(highest, LOWEST);
    sum = block_sum(sum * Functions<T>::exp(own, highest));
    if (threadIdx.x == 0) losses[row] = logf(sum) + (highest - at_target);
    if (!shape.with_gradient) return;
    float factor = shape.scale / sum;
    auto slopes = [&](int first, float (&x)[SIZE]) {
        // A thread takes back what it kept itself.
        if (shape.keep) unpack(whole_piece((const T *)&row_pieces[first / SIZE]), x);
        else load_values((const T *)values, first, cols, wide, x);
#pragma unroll
        for (int i = 0; i < SIZE; i++) x[i] = Functions<T>::exp(x[i], highest) * factor;
        if (target >= first && target < first + SIZE) {
#pragma unroll
            for (int i = 0; i < SIZE; i++) x[i] -= first + i == target ? shape.scale : 0.0f;
        }
    };
    first = threadIdx.x * SIZE;
    for (; wide && first + SIZE <= cols; first += step) {
        float x[SIZE];
        slopes(first, x);
        store_whole(values + first, pack(x, T()));
    }
    for (; first < end; first += step) {
        float x[SIZE] = {};
        if (first < cols) slopes(first, x);
#pragma unroll
        for (int i = 0; i < SIZE; i++) x[i] = first + i < cols ? x[i] : 0.0f;
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
