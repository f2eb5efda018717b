// Updates, and the sum of squares they are clipped by. The clip factor is made from the norm where it
// lies: no update waits for the host.

// Each block's sum of squares.
KERNEL squares(const float *values, i64 count, double *parts) {
    double sum = 0.0;
    EACH(i, count) { sum += (double)values[i] * values[i]; }
    sum = block_sum(sum);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// *sum = the parts, by one block.
KERNEL add_parts(const double *parts, i64 count, double *sum) {
    double total = 0.0;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) total += parts[i];
    total = block_sum(total);
    if (threadIdx.x == 0) *sum = total;
}

// What gradients are multiplied by; a NaN of a spoilt norm stays one.
__device__ __forceinline__ float clip_factor(const double *norm_squared, float max) {
    if (!norm_squared) return 1.0f;
    double factor = (double)max / (sqrt(*norm_squared) + 1e-6);
    return factor >= 1.0 ? 1.0f : (float)factor;
}

KERNEL adamw(const double *norm_squared, float max_norm, float step, float root_correction, float keep,
             float beta1, float beta2, float eps, const float *gradient, float *first, float *second,
             float *parameter, i64 count) {
    __shared__ float shared_factor;
    if (threadIdx.x == 0) shared_factor = clip_factor(norm_squared, max_norm);
    __syncthreads();
    float factor = shared_factor;
    EACH(i, count) {
        float g = gradient[i] * factor, m = first[i], v = second[i];
        m = fmaf(1.0f - beta1, g - m, m);
        v = beta2 * v + (1.0f - beta2) * g * g;
        first[i] = m;
        second[i] = v;
        parameter[i] = parameter[i] * keep - step * (m / (sqrtf(v) / root_correction + eps));
    }
}

// `past` multiplies the old velocity, which may be missing; the first update does not read it.
KERNEL sgd(const double *norm_squared, float max_norm, float lr, float decay, float momentum, int first,
           const float *gradient, float *velocity, float *parameter, i64 count) {
    __shared__ float shared_factor;
    if (threadIdx.x == 0) shared_factor = clip_factor(norm_squared, max_norm);
    __syncthreads();
    float factor = shared_factor;
    EACH(i, count) {
        float p = parameter[i], change = gradient[i] * factor + decay * p;
        if (velocity) {
            change += first ? 0.0f : momentum * velocity[i];
            velocity[i] = change;
        }
        parameter[i] = p - lr * change;
    }
}
