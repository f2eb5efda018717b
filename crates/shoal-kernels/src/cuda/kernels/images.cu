// Images in patches, the rows around them, and the loss of classes.

struct Patches {
    i64 samples, channels, size, patch;
};

// A row of zeros for each image, then one a patch: its pixels, channel by channel.
template <typename T>
__device__ __forceinline__ void image_patches(Patches of, const float *__restrict__ images, T *__restrict__ out) {
    i64 side = of.size / of.patch, rows = side * side + 1, square = of.patch * of.patch, width = of.channels * square;
    EACH(index, of.samples * rows * width) {
        i64 row = index / width, column = index % width, sample = row / rows, place = row % rows - 1;
        float value = 0.0f;
        if (place >= 0) {
            i64 channel = column / square, y = place / side * of.patch + column % square / of.patch;
            i64 x = place % side * of.patch + column % of.patch;
            value = images[((sample * of.channels + channel) * of.size + y) * of.size + x];
        }
        out[index] = from_float<T>(value);
    }
}
TYPED(image_patches, (Patches of, const float *images, T *out), (of, images, out))

// Each sample's first row becomes `first`; then every row has its position's added.
template <typename T>
__device__ __forceinline__ void image_seats(i64 count, i64 sequence, i64 width, const T *__restrict__ first,
                                            const T *__restrict__ positions, T *__restrict__ out) {
    EACH(index, count) {
        i64 place = index % (sequence * width);
        float value = place < width ? to_float(first[place]) : to_float(out[index]);
        out[index] = from_float<T>(value + to_float(positions[place]));
    }
}
TYPED(image_seats, (i64 count, i64 sequence, i64 width, const T *first, const T *positions, T *out),
      (count, sequence, width, first, positions, out))

// Rows of `to` become those of `from`, or zeros where it is null.
template <typename T>
__device__ __forceinline__ void image_rows(i64 rows, i64 cols, const T *__restrict__ from, i64 from_stride,
                                           T *__restrict__ to, i64 to_stride) {
    EACH(index, rows * cols) {
        i64 row = index / cols, column = index % cols;
        to[row * to_stride + column] = from ? from[row * from_stride + column] : from_float<T>(0.0f);
    }
}
TYPED(image_rows, (i64 rows, i64 cols, const T *from, i64 from_stride, T *to, i64 to_stride),
      (rows, cols, from, from_stride, to, to_stride))

// The last row may end with its last logit: `length` is where the tensor ends.
struct Classes {
    i64 rows, cols, stride, length;
    int with_gradient;
    float scale, smoothing;
};

// Softmax and cross-entropy in place, one warp a row; whether the likeliest class was the target goes to `hits`.
template <typename T>
__device__ __forceinline__ void class_loss(Classes of, const int *targets, T *logits, float *losses, float *hits) {
    i64 row = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= of.rows) return;
    int lane = threadIdx.x % 32, cols = of.cols, target = targets[row];
    int end = min(of.stride, of.length - row * of.stride);
    T *values = logits + row * of.stride;
    if (target < 0) {
        for (int i = lane; i < end; i += 32) values[i] = from_float<T>(0.0f);
        if (lane == 0) losses[row] = hits[row] = 0.0f;
        return;
    }
    float highest = NEGATIVE_INFINITY, total = 0.0f, sum = 0.0f;
    int best = cols;
    for (int i = lane; i < cols; i += 32) {
        float x = to_float(values[i]);
        total += x;
        if (x > highest) highest = x, best = i;
    }
    for (int apart = 16; apart > 0; apart /= 2) {
        float other = __shfl_xor_sync(ALL_LANES, highest, apart);
        int place = __shfl_xor_sync(ALL_LANES, best, apart);
        if (other > highest || (other == highest && place < best)) highest = other, best = place;
    }
    float mean = warp_sum(total) / cols;
    for (int i = lane; i < cols; i += 32) sum += Functions<T>::exp(to_float(values[i]), highest);
    sum = warp_sum(sum);
    float at_target = target < cols ? to_float(values[target]) : NOT_A_NUMBER;
    // Everyone has read the target's logit before it is overwritten.
    __syncwarp();
    if (lane == 0) {
        losses[row] = logf(sum) + (highest - at_target) + of.smoothing * (at_target - mean);
        hits[row] = best == target ? 1.0f : 0.0f;
    }
    if (!of.with_gradient) return;
    float factor = of.scale / sum, everywhere = of.scale * of.smoothing / cols;
    for (int i = lane; i < end; i += 32) {
        float slope = 0.0f;
        if (i < cols) slope = Functions<T>::exp(to_float(values[i]), highest) * factor - everywhere;
        if (i == target) slope -= of.scale * (1.0f - of.smoothing);
        values[i] = from_float<T>(slope);
    }
}
TYPED(class_loss, (Classes of, const int *targets, T *logits, float *losses, float *hits),
      (of, targets, logits, losses, hits))
