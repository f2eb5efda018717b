// Softmax and cross-entropy in place: the logits become their own gradient. One block a row; the rows'
// losses are added up by one block, in their order.

KERNEL cross_entropy(const int *targets, i64 vocabulary, int with_gradient, float scale, float *logits,
                     float *losses) {
    i64 row = blockIdx.x;
    float *values = logits + row * vocabulary;
    i64 target = targets[row];
    if (target < 0) {
        if (with_gradient) {
            for (i64 i = threadIdx.x; i < vocabulary; i += blockDim.x) values[i] = 0.0f;
        }
        if (threadIdx.x == 0) losses[row] = 0.0f;
        return;
    }
    float highest = NEGATIVE_INFINITY;
    for (i64 i = threadIdx.x; i < vocabulary; i += blockDim.x) highest = Max::of(values[i], highest);
    highest = block_reduce<Max>(highest, NEGATIVE_INFINITY);
    float at_target = target < vocabulary ? values[target] : NOT_A_NUMBER;
    float sum = 0.0f;
    for (i64 i = threadIdx.x; i < vocabulary; i += blockDim.x) sum += expf(values[i] - highest);
    sum = block_sum(sum);
    if (threadIdx.x == 0) losses[row] = logf(sum) + (highest - at_target);
    if (!with_gradient) return;
    // `at_target` was read by all threads before the sum's barriers, so it may be overwritten now.
    float factor = scale / sum;
    for (i64 i = threadIdx.x; i < vocabulary; i += blockDim.x) {
        float value = expf(values[i] - highest) * factor;
        values[i] = i == target ? value - scale : value;
    }
}

// *sum += the values, by one block.
KERNEL add_losses(const float *values, i64 count, double *sum) {
    double total = 0.0;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) total += values[i];
    total = block_sum(total);
    if (threadIdx.x == 0) *sum += total;
}
