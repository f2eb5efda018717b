// Operations on single elements or pairs of them: activations, rotary positions, dropout, the bias and
// residual that a product is added onto, and scalars.

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

#define GELU_SCALE 0.7978845608f
#define GELU_CUBE 0.044715f

// x * (1 + tanh(u)) / 2, which is x * sigmoid(2u).
__device__ __forceinline__ float gelu_gate(float x) {
    return sigmoid(2.0f * GELU_SCALE * x * fmaf(GELU_CUBE * x, x, 1.0f));
}

KERNEL gelu(const float *x, float *out, i64 count) {
    EACH(i, count) { out[i] = x[i] * gelu_gate(x[i]); }
}

// `x` becomes gelu(x), `gradient` the gradient of `x`.
KERNEL gelu_backward(float *x, float *gradient, i64 count) {
    EACH(i, count) {
        float value = x[i], s = gelu_gate(value);
        float slope = GELU_SCALE * fmaf(3.0f * GELU_CUBE * value, value, 1.0f);
        x[i] = value * s;
        gradient[i] *= fmaf(2.0f * value * s * (1.0f - s), slope, s);
    }
}

KERNEL swiglu(const float *gate, const float *up, float *out, i64 count) {
    EACH(i, count) { out[i] = gate[i] * sigmoid(gate[i]) * up[i]; }
}

// `gate` and `up` become their gradients, `gradient` the product.
KERNEL swiglu_backward(float *gate, float *up, float *gradient, i64 count) {
    EACH(i, count) {
        float g = gate[i], u = up[i], d = gradient[i];
        float s = sigmoid(g), silu = g * s;
        gate[i] = d * u * (s * fmaf(g, 1.0f - s, 1.0f));
        up[i] = d * silu;
        gradient[i] = silu * u;
    }
}

// Turns the pairs (i, i + half) of the first `turned_heads` heads of each row.
KERNEL rotary(float *qkv, const float *table, i64 rows, i64 sequence, i64 width, i64 turned_heads, i64 half,
              float sign) {
    EACH(i, rows * turned_heads * half) {
        i64 pair = i % half, head = i / half % turned_heads, row = i / half / turned_heads;
        const float *angles = table + row % sequence * 2 * half;
        float cosine = angles[pair], sine = sign * angles[half + pair];
        float *low = qkv + row * width + head * 2 * half + pair, *high = low + half;
        float a = *low, b = *high;
        *low = a * cosine - b * sine;
        *high = b * cosine + a * sine;
    }
}

// out = (residual +) dropped x; one block a row. `x` and `out` may be the same.
KERNEL dropout(Dropout site, i64 sequence, i64 cols, const float *x, const float *residual, float *out) {
    i64 row = blockIdx.x;
    u32 key = row_key(site, row / sequence, row % sequence);
    for (i64 col = threadIdx.x; col < cols; col += blockDim.x) {
        i64 i = row * cols + col;
        float value = x[i] * drop_factor(site, key, col);
        out[i] = residual ? residual[i] + value : value;
    }
}

// Rows of `out` become residual + bias, either of which may be missing.
KERNEL prefill(const float *bias, const float *residual, float *out, i64 rows, i64 cols, i64 stride) {
    EACH(i, rows * cols) {
        i64 row = i / cols, col = i % cols;
        float value = bias ? bias[col] : 0.0f;
        out[row * stride + col] = residual ? residual[i] + value : value;
    }
}

KERNEL set_scalar(double *scalar, double value) { *scalar = value; }
