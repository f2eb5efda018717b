// Table look-ups and gradients that return to the rows they came from.

// A token past the table reads NaN, which the loss reports, rather than memory that is someone else's.
KERNEL embed(const int *tokens, i64 count, i64 sequence, i64 width, const float *table, i64 table_rows,
             const float *positions, float *out) {
    EACH(i, count * width) {
        i64 row = i / width, col = i % width;
        i64 token = tokens[row];
        float value = (u64)token < (u64)table_rows ? table[token * width + col] : NOT_A_NUMBER;
        out[i] = positions ? value + positions[row % sequence * width + col] : value;
    }
}

// One block per token, and the block of a token's first occurrence adds up the rows of all of them, in
// their order: no two blocks write the same row, and the bits are those of the CPU.
KERNEL embed_gradient(const int *tokens, i64 count, i64 width, const float *dy, float *gradient,
                      i64 table_rows) {
    __shared__ int matches[256];
    __shared__ int warp_matches[8];
    i64 own = blockIdx.x;
    int token = tokens[own];
    if ((u64)(i64)token >= (u64)table_rows) return;
    for (i64 start = 0; start < own; start += blockDim.x) {
        i64 other = start + threadIdx.x;
        if (__syncthreads_or(other < own && tokens[other] == token)) return;
    }
    float *sums = gradient + token * width;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (i64 start = own; start < count; start += blockDim.x) {
        i64 other = start + threadIdx.x;
        bool match = other < count && tokens[other] == token;
        u32 in_warp = __ballot_sync(ALL_LANES, match);
        if (lane == 0) warp_matches[warp] = __popc(in_warp);
        __syncthreads();
        int place = __popc(in_warp & ((1u << lane) - 1)), found = 0;
        for (int before = 0; before < blockDim.x / 32; before++) {
            if (before < warp) place += warp_matches[before];
            found += warp_matches[before];
        }
        if (match) matches[place] = threadIdx.x;
        __syncthreads();
        if (found > 0) {
            for (i64 col = threadIdx.x; col < width; col += blockDim.x) {
                float sum = sums[col];
                for (int i = 0; i < found; i++) sum += dy[(start + matches[i]) * width + col];
                sums[col] = sum;
            }
        }
        __syncthreads();
    }
}

// Sums over samples; the samples in order.
KERNEL position_gradient(i64 samples, i64 elements, const float *dy, float *gradient) {
    EACH(i, elements) {
        float sum = gradient[i];
        for (i64 sample = 0; sample < samples; sample++) sum += dy[sample * elements + i];
        gradient[i] = sum;
    }
}
