// Operations on single elements or pairs of them: activations, rotary positions, dropout, conversions, the
// bias and residual that a product is added onto, and scalars.

// Pieces of each input that a thread loads before it uses the first: `Grid::walk` counts on it.
#define AHEAD 2

// Calls `work(first, values)` with the elements `first..` of every input, all over `0..count`.
template <typename T, int INPUTS, typename Work>
__device__ __forceinline__ void walk(i64 count, const T *const (&inputs)[INPUTS], Work work) {
    const int SIZE = Piece<T>::SIZE;
    Piece<T> pieces[AHEAD][INPUTS];
    i64 own = ((i64)blockIdx.x * AHEAD * THREADS + threadIdx.x) * SIZE;
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ahead++) {
#pragma unroll
        for (int input = 0; input < INPUTS; input++) {
            pieces[ahead][input] = load_piece(inputs[input], own + ahead * THREADS * SIZE, count, true);
        }
    }
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ahead++) {
        i64 first = own + ahead * THREADS * SIZE;
        if (first >= count) return;
        float values[INPUTS][SIZE];
#pragma unroll
        for (int input = 0; input < INPUTS; input++) unpack(pieces[ahead][input], values[input]);
        work(first, values);
    }
}

#define GELU_SCALE 0.7978845608f
#define GELU_CUBE 0.044715f

// gelu(x) is x * (1 + tanh(u)) / 2, which is x * sigmoid(2u): the gate is the sigmoid.
struct TanhGelu {
    template <typename T> static __device__ __forceinline__ float gate(float x) {
        return Functions<T>::sigmoid(2.0f * GELU_SCALE * x * fmaf(GELU_CUBE * x, x, 1.0f));
    }

    static __device__ __forceinline__ float slope(float x, float gate) {
        float inner = GELU_SCALE * fmaf(3.0f * GELU_CUBE * x, x, 1.0f);
        return fmaf(2.0f * x * gate * (1.0f - gate), inner, gate);
    }
};

// gelu(x) is x times the normal distribution's share below it, which is the gate.
struct ErfGelu {
    template <typename T> static __device__ __forceinline__ float gate(float x) {
        return 0.5f * (1.0f + erff(0.7071067812f * x));
    }

    static __device__ __forceinline__ float slope(float x, float gate) {
        return fmaf(0.3989422804f * x, expf(-0.5f * x * x), gate);
    }
};

template <typename Gelu, typename T> __device__ __forceinline__ void activate(const T *x, T *out, i64 count) {
    const T *const inputs[1] = {x};
    walk(count, inputs, [&](i64 first, float (&values)[1][Piece<T>::SIZE]) {
#pragma unroll
        for (int i = 0; i < Piece<T>::SIZE; i++) values[0][i] *= Gelu::template gate<T>(values[0][i]);
        store_values(out, first, count, true, values[0]);
    });
}

// `x` becomes gelu(x), `gradient` the gradient of `x`.
template <typename Gelu, typename T>
__device__ __forceinline__ void activate_backward(T *x, T *gradient, i64 count) {
    const T *const inputs[2] = {x, gradient};
    walk(count, inputs, [&](i64 first, float (&values)[2][Piece<T>::SIZE]) {
#pragma unroll
        for (int i = 0; i < Piece<T>::SIZE; i++) {
            float value = values[0][i], gate = Gelu::template gate<T>(value);
            values[0][i] = value * gate;
            values[1][i] *= Gelu::slope(value, gate);
        }
        store_values(x, first, count, true, values[0]);
        store_values(gradient, first, count, true, values[1]);
    });
}

// gradient *= gelu'(x)
template <typename Gelu, typename T>
__device__ __forceinline__ void activation_slope(const T *x, T *gradient, i64 count) {
    const T *const inputs[2] = {x, gradient};
    walk(count, inputs, [&](i64 first, float (&values)[2][Piece<T>::SIZE]) {
#pragma unroll
        for (int i = 0; i < Piece<T>::SIZE; i++) {
            values[1][i] *= Gelu::slope(values[0][i], Gelu::template gate<T>(values[0][i]));
        }
        store_values(gradient, first, count, true, values[1]);
    });
}

#define GELU(NAME, KIND) \
    template <typename T> __device__ __forceinline__ void NAME(const T *x, T *out, i64 count) { \
        activate<KIND>(x, out, count); \
    } \
    TYPED(NAME, (const T *x, T *out, i64 count), (x, out, count)) \
    template <typename T> __device__ __forceinline__ void NAME##_backward(T *x, T *gradient, i64 count) { \
        activate_backward<KIND>(x, gradient, count); \
    } \
    TYPED(NAME##_backward, (T *x, T *gradient, i64 count), (x, gradient, count)) \
    template <typename T> __device__ __forceinline__ void NAME##_slope(const T *x, T *gradient, i64 count) { \
        activation_slope<KIND>(x, gradient, count); \
    } \
    TYPED(NAME##_slope, (const T *x, T *gradient, i64 count), (x, gradient, count))

GELU(gelu, TanhGelu)
GELU(gelu_erf, ErfGelu)

template <typename T> __device__ __forceinline__ void swiglu(const T *gate, const T *up, T *out, i64 count) {
    const T *const inputs[2] = {gate, up};
    walk(count, inputs, [&](i64 first, float (&values)[2][Piece<T>::SIZE]) {
#pragma unroll
        for (int i = 0; i < Piece<T>::SIZE; i++) {
            float g = values[0][i];
            values[0][i] = g * Functions<T>::sigmoid(g) * values[1][i];
        }
        store_values(out, first, count, true, values[0]);
    });
}
TYPED(swiglu, (const T *gate, const T *up, T *out, i64 count), (gate, up, out, count))

// `gate` and `up` become their gradients, `gradient` the product.
template <typename T> __device__ __forceinline__ void swiglu_backward(T *gate, T *up, T *gradient, i64 count) {
    const T *const inputs[3] = {gate, up, gradient};
    walk(count, inputs, [&](i64 first, float (&values)[3][Piece<T>::SIZE]) {
#pragma unroll
        for (int i = 0; i < Piece<T>::SIZE; i++) {
            float g = values[0][i], u = values[1][i], d = values[2][i];
            float s = Functions<T>::sigmoid(g), silu = g * s;
            values[0][i] = d * u * (s * fmaf(g, 1.0f - s, 1.0f));
            values[1][i] = d * silu;
            values[2][i] = silu * u;
        }
        store_values(gate, first, count, true, values[0]);
        store_values(up, first, count, true, values[1]);
        store_values(gradient, first, count, true, values[2]);
    });
}
TYPED(swiglu_backward, (T *gate, T *up, T *gradient, i64 count), (gate, up, gradient, count))

// Rows as `rotary` takes them: the first `turned` heads of each are turned, in pairs (i, i + half).
struct Turned {
    i64 rows, sequence, width;
    u32 turned, half;
    float sign;
};

template <int N>
__device__ __forceinline__ void turn(float sign, const float (&cosines)[N], const float (&sines)[N],
                                     float (&low)[N], float (&high)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        float a = low[i], b = high[i], sine = sign * sines[i];
        low[i] = a * cosines[i] - b * sine;
        high[i] = b * cosines[i] + a * sine;
    }
}

// A thread turns as many neighbouring pairs as fit sixteen bytes, or a single one where halves of heads do
// not start at such places. The host keeps the number of units below 2^32.
template <typename T> __device__ __forceinline__ void rotary(Turned shape, const float *table, T *qkv) {
    const int SIZE = Piece<T>::SIZE;
    bool wide = shape.half % SIZE == 0;
    u32 each = wide ? SIZE : 1, in_half = shape.half / each, in_row = in_half * shape.turned;
    EACH(unit, shape.rows * in_row) {
        u32 row = (u32)unit / in_row, place = (u32)unit % in_row;
        u32 head = place / in_half, pair = place % in_half * each;
        const float *angles = table + (i64)(row % (u32)shape.sequence) * 2 * shape.half;
        T *low = qkv + row * shape.width + head * 2 * shape.half + pair, *high = low + shape.half;
        if (wide) {
            float cosines[SIZE], sines[SIZE], a[SIZE], b[SIZE];
            unpack(whole_piece(low), a);
            unpack(whole_piece(high), b);
            load_floats(angles, pair, shape.half, true, cosines);
            load_floats(angles + shape.half, pair, shape.half, true, sines);
            turn(shape.sign, cosines, sines, a, b);
            store_whole(low, pack(a, T()));
            store_whole(high, pack(b, T()));
        } else {
            float cosine[1] = {angles[pair]}, sine[1] = {angles[shape.half + pair]};
            float a[1] = {to_float(*low)}, b[1] = {to_float(*high)};
            turn(shape.sign, cosine, sine, a, b);
            *low = from_float<T>(a[0]);
            *high = from_float<T>(b[0]);
        }
    }
}
TYPED(rotary, (Turned shape, const float *table, T *qkv), (shape, table, qkv))

// out = (residual +) dropped x; one warp a row. `x` and `out` may be the same.
template <typename T>
__device__ __forceinline__ void dropout(Dropout site, i64 rows, i64 sequence, i64 cols, const T *x, const T *residual,
                                        T *out) {
    const int SIZE = Piece<T>::SIZE;
    i64 row = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= rows) return;
    bool wide = cols % SIZE == 0;
    u32 key = row_key(site, row / sequence, row % sequence);
    x += row * cols, out += row * cols;
    if (residual) residual += row * cols;
#pragma unroll 4
    for (i64 first = threadIdx.x % 32 * SIZE; first < cols; first += 32 * SIZE) {
        float values[SIZE], added[SIZE] = {};
        load_values(x, first, cols, wide, values);
        if (residual) load_values(residual, first, cols, wide, added);
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            float value = values[i] * drop_factor(site, key, first + i);
            values[i] = residual ? added[i] + value : value;
        }
        store_values(out, first, cols, wide, values);
    }
}
TYPED(dropout, (Dropout site, i64 rows, i64 sequence, i64 cols, const T *x, const T *residual, T *out),
      (site, rows, sequence, cols, x, residual, out))

// The first `count` of `to` become `from`, the others zero.
template <typename T> __device__ __forceinline__ void convert(const float *from, i64 count, T *to, i64 length) {
    const int SIZE = Piece<T>::SIZE;
    for (i64 first = ((i64)blockIdx.x * THREADS + threadIdx.x) * SIZE; first < length;
         first += (i64)gridDim.x * THREADS * SIZE) {
        float values[SIZE];
        load_floats(from, first, count, true, values);
        store_values(to, first, length, true, values);
    }
}
TYPED(convert, (const float *from, i64 count, T *to, i64 length), (from, count, to, length))

// Rows of `out` become residual + bias, either of which may be missing.
template <typename T>
__device__ void prefill(const T *bias, const T *residual, T *out, i64 rows, i64 cols, i64 stride) {
    EACH(i, rows * cols) {
        i64 row = i / cols, col = i % cols;
        float value = bias ? to_float(bias[col]) : 0.0f;
        out[row * stride + col] = from_float<T>(residual ? to_float(residual[i]) + value : value);
    }
}
TYPED(prefill, (const T *bias, const T *residual, T *out, i64 rows, i64 cols, i64 stride),
      (bias, residual, out, rows, cols, stride))

KERNEL set_scalar(double *scalar, double value) { *scalar = value; }
