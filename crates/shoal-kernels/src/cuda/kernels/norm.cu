// LayerNorm and RMSNorm, and sums over columns. One block a row for outputs and input gradients; column
// sums in two stages whose cut depends on the shape alone.

// A row's subtracted mean and multiplied reciprocal.
struct RowScale {
    float mean, scale;
};

__device__ __forceinline__ RowScale row_scale(bool layer, const float *statistics, i64 row) {
    RowScale result;
    result.mean = layer ? statistics[2 * row] : 0.0f;
    result.scale = layer ? statistics[2 * row + 1] : statistics[row];
    return result;
}

__device__ __forceinline__ void norm_apply(RowScale by, i64 cols, const float *x, const float *weight,
                                           const float *bias, float *out) {
    for (i64 col = threadIdx.x; col < cols; col += blockDim.x) {
        float value = (x[col] - by.mean) * by.scale * weight[col];
        out[col] = bias ? value + bias[col] : value;
    }
}

KERNEL norm_forward(int layer, float eps, const float *x, i64 stride, i64 cols, const float *weight,
                    const float *bias, float *statistics, float *out) {
    i64 row = blockIdx.x;
    x += row * stride;
    RowScale by = {0.0f, 0.0f};
    if (layer) {
        float sum = 0.0f;
        for (i64 col = threadIdx.x; col < cols; col += blockDim.x) sum += x[col];
        by.mean = block_sum(sum) / cols;
    }
    float squares = 0.0f;
    for (i64 col = threadIdx.x; col < cols; col += blockDim.x) {
        float apart = x[col] - by.mean;
        squares = fmaf(apart, apart, squares);
    }
    by.scale = 1.0f / sqrtf(block_sum(squares) / cols + eps);
    if (threadIdx.x == 0) {
        if (layer) {
            statistics[2 * row] = by.mean;
            statistics[2 * row + 1] = by.scale;
        } else {
            statistics[row] = by.scale;
        }
    }
    norm_apply(by, cols, x, weight, bias, out + row * cols);
}

KERNEL norm_again(int layer, const float *x, i64 stride, i64 cols, const float *weight, const float *bias,
                  const float *statistics, float *out) {
    i64 row = blockIdx.x;
    norm_apply(row_scale(layer, statistics, row), cols, x + row * stride, weight, bias, out + row * cols);
}

// With x̂ the normalised row and g = dy * weight:
// dx = scale * (g - mean(g) - x̂ * mean(g * x̂)), and no mean(g) for the root mean square.
KERNEL norm_input_gradient(int layer, const float *x, i64 stride, i64 cols, const float *weight,
                           const float *statistics, const float *dy, float *dx, int accumulate) {
    i64 row = blockIdx.x;
    x += row * stride, dy += row * cols, dx += row * cols;
    RowScale by = row_scale(layer, statistics, row);
    float along = 0.0f, average = 0.0f;
    for (i64 col = threadIdx.x; col < cols; col += blockDim.x) {
        float g = dy[col] * weight[col];
        along = fmaf(g, (x[col] - by.mean) * by.scale, along);
        average += g;
    }
    along = block_sum(along) / cols;
    average = layer ? block_sum(average) / cols : 0.0f;
    for (i64 col = threadIdx.x; col < cols; col += blockDim.x) {
        float normal = (x[col] - by.mean) * by.scale;
        float value = by.scale * (dy[col] * weight[col] - average - normal * along);
        dx[col] = accumulate ? dx[col] + value : value;
    }
}

#define STRIP 32
#define STRIP_ROWS 8

// The block's sum of `term(row)` for its column, over the rows of its chunk; threads of the first line
// have the result.
template <typename Term> __device__ float column_sum(i64 rows, i64 chunk, bool inside, Term term) {
    __shared__ float lines[STRIP_ROWS][STRIP];
    i64 first = (i64)blockIdx.y * chunk, end = first + chunk < rows ? first + chunk : rows;
    float sum = 0.0f;
    if (inside) {
        for (i64 row = first + threadIdx.y; row < end; row += STRIP_ROWS) sum += term(row);
    }
    lines[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int line = 0; line < STRIP_ROWS; line++) sum += lines[line][threadIdx.x];
    return sum;
}

__device__ __forceinline__ void store_column(float sum, i64 col, i64 cols, float *out, int accumulate) {
    if (threadIdx.y == 0 && col < cols) {
        float *place = out + (i64)blockIdx.y * cols + col;
        *place = accumulate ? *place + sum : sum;
    }
}

// Row `blockIdx.y` of `out` gets the column sums of the rows of that chunk.
KERNEL column_sums(const float *values, i64 stride, i64 rows, i64 cols, i64 chunk, float *out,
                   int accumulate) {
    i64 col = (i64)blockIdx.x * STRIP + threadIdx.x;
    float sum = column_sum(rows, chunk, col < cols, [&](i64 row) { return values[row * stride + col]; });
    store_column(sum, col, cols, out, accumulate);
}

// The same of dy * x̂: the gradient of a norm's weight.
KERNEL norm_weight_sums(int layer, const float *x, i64 stride, i64 rows, i64 cols, i64 chunk,
                        const float *statistics, const float *dy, float *out, int accumulate) {
    i64 col = (i64)blockIdx.x * STRIP + threadIdx.x;
    float sum = column_sum(rows, chunk, col < cols, [&](i64 row) {
        RowScale by = row_scale(layer, statistics, row);
        return dy[row * cols + col] * ((x[row * stride + col] - by.mean) * by.scale);
    });
    store_column(sum, col, cols, out, accumulate);
}
