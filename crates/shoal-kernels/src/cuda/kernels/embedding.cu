// Table look-ups and gradients that return to the rows they came from.
//
// The gradient of a table sorts the tokens' positions by token, stably, so that a token's rows stand together
// in their order. The rows of one token are cut into pieces of fixed length from its first one on: a warp
// adds up a piece, and what follows a token's first piece is added in order by a last kernel. No two warps
// add to the same number, and a token's sum depends on its own rows alone.

// One warp a token; the first row of `types` is added to all of them. A token past the table reads NaN, which the loss reports, rather than memory that is
// someone else's.
template <typename T>
__device__ __forceinline__ void embed(const int *tokens, i64 count, i64 sequence, i64 width,
                                      const T *__restrict__ table, i64 table_rows, const T *__restrict__ positions,
                                      const T *__restrict__ types, T *__restrict__ out) {
    const int SIZE = Piece<T>::SIZE;
    i64 row = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= count) return;
    i64 token = tokens[row];
    bool inside = (u64)token < (u64)table_rows, wide = width % SIZE == 0;
    table += inside ? token * width : 0, out += row * width;
    if (positions) positions += row % sequence * width;
#pragma unroll 4
    for (i64 first = threadIdx.x % 32 * SIZE; first < width; first += 32 * SIZE) {
        float values[SIZE], places[SIZE] = {}, first_type[SIZE] = {};
        load_values(table, first, inside ? width : (i64)0, wide, values);
        if (positions) load_values(positions, first, width, wide, places);
        if (types) load_values(types, first, width, wide, first_type);
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            float value = inside ? values[i] : NOT_A_NUMBER;
            if (positions) value += places[i];
            values[i] = types ? value + first_type[i] : value;
        }
        store_values(out, first, width, wide, values);
    }
}
TYPED(embed,
      (const int *tokens, i64 count, i64 sequence, i64 width, const T *table, i64 table_rows, const T *positions,
       const T *types, T *out),
      (tokens, count, sequence, width, table, table_rows, positions, types, out))

// Bits of a key that one round of the sort orders by.
#define DIGIT_BITS 8
#define DIGITS (1 << DIGIT_BITS)

// The lanes that hold the same digit, or the one past all digits.
__device__ __forceinline__ u32 lanes_with(u32 digit) {
#if __CUDA_ARCH__ >= 700
    return __match_any_sync(ALL_LANES, digit);
#else
    u32 same = ALL_LANES;
    for (u32 bit = 1; bit <= DIGITS; bit *= 2) {
        u32 set = __ballot_sync(ALL_LANES, (digit & bit) != 0);
        same &= digit & bit ? set : ~set;
    }
    return same;
#endif
}

// What is sorted: positions, by the tokens there. `order` is null before the first round.
struct Sorted {
    const int *tokens;
    const u32 *order;
    u32 count, table_rows;

    __device__ __forceinline__ u32 position(u32 place) const { return order ? order[place] : place; }

    // Tokens outside of the table come last.
    __device__ __forceinline__ u32 key(u32 position) const {
        u32 token = tokens[position];
        return token < table_rows ? token : table_rows;
    }
};

// Each block's number of keys with each digit, over its `tile` places.
KERNEL __launch_bounds__(DIGITS) sort_count(Sorted of, int shift, u32 tile, u32 *counts) {
    __shared__ u32 found[DIGITS];
    found[threadIdx.x] = 0;
    __syncthreads();
    u32 begin = blockIdx.x * tile, end = min(begin + tile, of.count);
    for (u32 place = begin + threadIdx.x; place < end; place += DIGITS) {
        atomicAdd(&found[of.key(of.position(place)) >> shift & (DIGITS - 1)], 1);
    }
    __syncthreads();
    counts[blockIdx.x * DIGITS + threadIdx.x] = found[threadIdx.x];
}

// The sum of the values of all threads before this one.
__device__ __forceinline__ u32 sum_before(u32 value) {
    __shared__ u32 warp_sums[DIGITS / 32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 sum = value;
    for (int apart = 1; apart < 32; apart *= 2) {
        u32 other = __shfl_up_sync(ALL_LANES, sum, apart);
        if (lane >= apart) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    for (int before = 0; before < warp; before++) sum += warp_sums[before];
    return sum - value;
}

// Moves the positions to where their digits belong, equal ones in their order. A warp has a run of the
// block's places, 32 at a time; `tile` is a multiple of the block's threads.
KERNEL __launch_bounds__(DIGITS) sort_move(Sorted of, int shift, u32 tile, const u32 *counts, u32 *moved) {
    __shared__ u32 next[DIGITS / 32][DIGITS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, digit = threadIdx.x;
    u32 total = 0, earlier = 0;
#pragma unroll 8
    for (u32 block = 0; block < gridDim.x; block++) {
        u32 found = counts[block * DIGITS + digit];
        total += found;
        if (block < blockIdx.x) earlier += found;
    }
    for (int other = 0; other < DIGITS / 32; other++) next[other][digit] = 0;
    u32 start = sum_before(total) + earlier;
    __syncthreads();

    u32 run = tile / (DIGITS / 32), begin = blockIdx.x * tile + warp * run, end = min(begin + run, of.count);
    // Lanes past the end agree on a digit that no other has.
    auto digit_at = [&](u32 place, u32 &position) -> u32 {
        if (place >= end) return DIGITS;
        position = of.position(place);
        return of.key(position) >> shift & (DIGITS - 1);
    };
    for (u32 first = begin; first < end; first += 32) {
        u32 position = 0, own = digit_at(first + lane, position), same = lanes_with(own);
        if (own < DIGITS && __ffs(same) - 1 == lane) next[warp][own] += __popc(same);
        __syncwarp();
    }
    __syncthreads();
    for (int other = 0; other < DIGITS / 32; other++) {
        u32 found = next[other][digit];
        next[other][digit] = start;
        start += found;
    }
    __syncthreads();
    for (u32 first = begin; first < end; first += 32) {
        u32 position = 0, own = digit_at(first + lane, position), same = lanes_with(own);
        u32 place = own < DIGITS ? next[warp][own] + __popc(same & ((1u << lane) - 1)) : 0;
        __syncwarp();
        if (own < DIGITS && __ffs(same) - 1 == lane) next[warp][own] += __popc(same);
        __syncwarp();
        if (own < DIGITS) moved[place] = position;
    }
}

// starts[token] = the place of the token's first position, for the tokens there are.
KERNEL token_starts(Sorted of, u32 *starts) {
    EACH(place, of.count) {
        u32 key = of.key(of.order[place]);
        bool first = place == 0 || of.key(of.order[place - 1]) != key;
        if (first && key < of.table_rows) starts[key] = place;
    }
}

// Pieces of `width` that a lane adds up at a time.
#define SUM_PIECES 4

// A warp for each place that starts a piece of `length` rows: a token's first piece is added to the gradient,
// others become rows of `partial`. (Such others are more than `length` apart, so place / length is theirs.)
template <typename T>
__device__ __forceinline__ void token_sums(Sorted of, const u32 *starts, u32 length, i64 width, const T *dy,
                                           float *gradient, float *partial) {
    const int SIZE = Piece<T>::SIZE;
    u32 place = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (place >= of.count) return;
    u32 key = of.key(of.order[place]);
    if (key >= of.table_rows) return;
    u32 from_start = place - starts[key];
    if (from_start % length) return;
    u32 end = min(place + length, of.count), rows = 0;
    for (bool more = true; more && place + rows < end;) {
        u32 other = place + rows + lane;
        u32 same = __ballot_sync(ALL_LANES, other < end && of.key(of.order[other]) == key);
        more = same == ALL_LANES;
        rows += more ? 32 : __ffs(~same) - 1;
    }
    // Rows of the gradient may be aligned where those of dy are not, and neither where the width is odd.
    bool wide = width % SIZE == 0, wide_sums = width % 4 == 0;
    float *to = from_start ? partial + place / length * width : gradient + key * width;
    for (i64 base = 0; base < width; base += SUM_PIECES * 32 * SIZE) {
        float sums[SUM_PIECES][SIZE];
#pragma unroll
        for (int i = 0; i < SUM_PIECES; i++) {
            load_floats(to, base + (i * 32 + lane) * SIZE, from_start ? (i64)0 : width, wide_sums, sums[i]);
        }
#pragma unroll 2
        for (u32 row = 0; row < rows; row++) {
            const T *terms = dy + of.order[place + row] * width;
            Piece<T> pieces[SUM_PIECES];
#pragma unroll
            for (int i = 0; i < SUM_PIECES; i++) {
                pieces[i] = load_piece(terms, base + (i * 32 + lane) * SIZE, width, wide);
            }
#pragma unroll
            for (int i = 0; i < SUM_PIECES; i++) {
                float values[SIZE];
                unpack(pieces[i], values);
#pragma unroll
                for (int j = 0; j < SIZE; j++) sums[i][j] += values[j];
            }
        }
#pragma unroll
        for (int i = 0; i < SUM_PIECES; i++) {
            store_floats(to, base + (i * 32 + lane) * SIZE, width, wide_sums, sums[i]);
        }
    }
}
TYPED(token_sums,
      (Sorted of, const u32 *starts, u32 length, i64 width, const T *dy, float *gradient, float *partial),
      (of, starts, length, width, dy, gradient, partial))

// A block for each row of `partial`, which is that of at most one piece. The block whose row is a token's
// second piece adds it and those that follow it to the gradient, in order.
KERNEL __launch_bounds__(THREADS) add_token_parts(Sorted of, const u32 *starts, u32 length, i64 width,
                                                  const float *partial, float *gradient) {
    __shared__ u32 second;
    if (threadIdx.x == 0) second = ~0u;
    __syncthreads();
    u32 begin = blockIdx.x * length, end = min(begin + length, of.count);
    for (u32 place = begin + threadIdx.x; place < end; place += THREADS) {
        u32 key = of.key(of.order[place]);
        if (key < of.table_rows && place - starts[key] == length) second = place;
    }
    __syncthreads();
    if (second == ~0u) return;
    u32 key = of.key(of.order[second]);
    __shared__ u32 shared_pieces;
    if (threadIdx.x == 0) {
        // The token's last place, by halving: it has at least `second`, and never `past`.
        u32 last = second, past = of.count;
        while (past - last > 1) {
            u32 middle = last + (past - last) / 2;
            if (of.key(of.order[middle]) == key) last = middle;
            else past = middle;
        }
        shared_pieces = (last - second) / length + 1;
    }
    __syncthreads();
    u32 pieces = shared_pieces;
    for (i64 col = threadIdx.x; col < width; col += THREADS) {
        float sum = gradient[key * width + col];
#pragma unroll 8
        for (u32 piece = 0; piece < pieces; piece++) sum += partial[(second / length + piece) * width + col];
        gradient[key * width + col] = sum;
    }
}

// Sums over samples, the samples in order; a thread has a piece of the positions' rows.
template <typename T>
__device__ __forceinline__ void position_gradient(i64 samples, i64 elements, const T *dy, float *gradient,
                                                  int accumulate) {
    const int SIZE = Piece<T>::SIZE;
    i64 first = ((i64)blockIdx.x * THREADS + threadIdx.x) * SIZE;
    if (first >= elements) return;
    bool wide = elements % SIZE == 0;
    float sums[SIZE];
    load_floats(gradient, first, accumulate ? elements : (i64)0, true, sums);
    for (i64 start = 0; start < samples; start += LOADS) {
        Piece<T> pieces[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            i64 sample = start + i;
            pieces[i] = load_piece(dy + sample * elements, first, sample < samples ? elements : (i64)0, wide);
        }
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            float terms[SIZE];
            unpack(pieces[i], terms);
#pragma unroll
            for (int j = 0; j < SIZE; j++) sums[j] += terms[j];
        }
    }
    store_floats(gradient, first, elements, true, sums);
}
TYPED(position_gradient, (i64 samples, i64 elements, const T *dy, float *gradient, int accumulate),
      (samples, elements, dy, gradient, accumulate))
