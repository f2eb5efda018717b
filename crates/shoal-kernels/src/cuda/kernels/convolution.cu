// What a convolution by products gathers, and the sum that a gradient of its filters is added to.

struct Window {
    u32 height, width, channels;
    u32 kernel_height, kernel_width, stride;
    u32 padding_down, padding_across;
    // Places of the window in a column, and in a row.
    u32 places_down, places_across;
    u32 outputs;
};

// Rows of what lies under the window, as a filter has it, from the place `first` on.
template <typename T>
__device__ __forceinline__ void convolution_seen(Window of, i64 first, i64 rows, const T *__restrict__ images,
                                                 T *__restrict__ out) {
    u32 line = of.kernel_width * of.channels, elements = of.kernel_height * line;
    u32 places = of.places_down * of.places_across;
    EACH(index, rows * elements) {
        i64 row = first + index / elements, sample = row / places;
        u32 column = index % elements, place = row % places;
        // In the padding above and before the image these are negative, which as u32 is past its end.
        u32 y = place / of.places_across * of.stride + column / line - of.padding_down;
        u32 x = place % of.places_across * of.stride + column % line / of.channels - of.padding_across;
        bool inside = y < of.height && x < of.width;
        i64 pixel = (sample * of.height + y) * of.width + x;
        out[index] = inside ? images[pixel * of.channels + column % of.channels] : from_float<T>(0.0f);
    }
}
TYPED(convolution_seen, (Window of, i64 first, i64 rows, const T *images, T *out), (of, first, rows, images, out))

// Rows of what pixels have part in, from the pixel `first` on: of each output, and of each spot under the window,
// what `gradient` holds at the place that has the pixel there. That is the order of the filters, so rows times
// filters are the pixels' gradient.
template <typename T>
__device__ __forceinline__ void convolution_seeing(Window of, i64 first, i64 rows, const T *__restrict__ gradient,
                                                   T *__restrict__ out) {
    u32 spots = of.kernel_height * of.kernel_width, elements = of.outputs * spots, pixels = of.height * of.width;
    EACH(index, rows * elements) {
        i64 row = first + index / elements, sample = row / pixels;
        u32 column = index % elements, spot = column % spots, pixel = row % pixels;
        // Negative as u32 where the window would begin before the padding: too large for a place.
        u32 y = pixel / of.width + of.padding_down - spot / of.kernel_width;
        u32 x = pixel % of.width + of.padding_across - spot % of.kernel_width;
        bool seen = y % of.stride == 0 && x % of.stride == 0 && y / of.stride < of.places_down &&
                    x / of.stride < of.places_across;
        i64 place = (sample * of.places_down + y / of.stride) * of.places_across + x / of.stride;
        out[index] = seen ? gradient[place * of.outputs + column / spots] : from_float<T>(0.0f);
    }
}
TYPED(convolution_seeing, (Window of, i64 first, i64 rows, const T *gradient, T *out),
      (of, first, rows, gradient, out))

// sum (+)= from
template <typename T>
__device__ __forceinline__ void convolution_sum(i64 count, const T *__restrict__ from, int accumulate,
                                                float *__restrict__ sum) {
    EACH(index, count) sum[index] = to_float(from[index]) + (accumulate ? sum[index] : 0.0f);
}
TYPED(convolution_sum, (i64 count, const T *from, int accumulate, float *sum), (count, from, accumulate, sum))
