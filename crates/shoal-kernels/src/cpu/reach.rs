//! Which pixels a convolution's pixels are made of. Pixels that see the window's same part (all of it inside the
//! image, or what an edge leaves) are worked on together: their sums have the same terms, and none are spent on
//! padding or, in the gradient of a strided window, on pixels that a tap never met.

use crate::convolutional::Window;

/// In one direction, the pixels that are made by the same taps.
#[derive(Debug)]
struct Reach {
    /// Each tap, and how far its pixel is from the first tap's.
    taps: Vec<(usize, usize)>,
    /// Each pixel made, and the pixel under its first tap.
    pixels: Vec<(usize, usize)>,
}

/// `under` gives the pixel that a tap of a made pixel lies on, if any.
fn reaches(pixels: usize, kernel: usize, under: impl Fn(usize, usize) -> Option<usize>) -> Vec<Reach> {
    let mut all: Vec<Reach> = Vec::new();
    for pixel in 0..pixels {
        // In rising order of what lies under, so that distances are not negative.
        let mut seen: Vec<(usize, usize)> =
            (0..kernel).filter_map(|tap| under(pixel, tap).map(|at| (tap, at))).collect();
        seen.sort_by_key(|(_, at)| *at);
        let first = seen.first().map_or(0, |(_, at)| *at);
        let taps: Vec<(usize, usize)> = seen.into_iter().map(|(tap, at)| (tap, at - first)).collect();
        match all.iter_mut().find(|reach| reach.taps == taps) {
            Some(reach) => reach.pixels.push((pixel, first)),
            None => all.push(Reach { taps, pixels: vec![(pixel, first)] }),
        }
    }
    all
}

/// Pixels of every sample that are made by the same taps.
#[derive(Debug)]
pub(super) struct Class {
    /// Each tap (counted by the window's rows), and how many pixels its pixel is from the first tap's; by rising
    /// distance.
    pub taps: Vec<(usize, usize)>,
    /// Of a sample: each pixel made, and the pixel under its first tap.
    pub pixels: Vec<(usize, usize)>,
}

/// Everything that is made of what, `width` being the pixels between the lines of what is under the taps.
fn classes(
    down: &[Reach],
    across: &[Reach],
    (made_width, width): (usize, usize),
    kernel: usize,
) -> Vec<Class> {
    let of = |down: &[(usize, usize)], across: &[(usize, usize)], (first, second): (usize, usize)| {
        let pairs = down.iter().flat_map(|down| across.iter().map(move |across| (down, across)));
        pairs.map(|(down, across)| (down.0 * first + across.0, down.1 * second + across.1)).collect()
    };
    let pairs = down.iter().flat_map(|down| across.iter().map(move |across| (down, across)));
    let class = |(down, across): (&Reach, &Reach)| Class {
        taps: of(&down.taps, &across.taps, (kernel, width)),
        pixels: of(&down.pixels, &across.pixels, (made_width, width)),
    };
    pairs.map(class).collect()
}

/// What a convolution's output is made of.
pub(super) fn output_classes(window: &Window) -> Vec<Class> {
    let reaches = |places: usize, kernel: usize, padding: usize, size: usize| {
        reaches(places, kernel, |place, tap| {
            (place * window.stride + tap).checked_sub(padding).filter(|at| *at < size)
        })
    };
    let (kernel, padding, places) = (window.kernel, window.padding, window.places());
    let down = reaches(places.0, kernel.0, padding.0, window.height);
    let across = reaches(places.1, kernel.1, padding.1, window.width);
    classes(&down, &across, (places.1, window.width), kernel.1)
}

/// What the gradient of its input is made of: places from which the pixel was seen.
pub(super) fn input_classes(window: &Window) -> Vec<Class> {
    let reaches = |places: usize, kernel: usize, padding: usize, size: usize| {
        reaches(size, kernel, |pixel, tap| {
            let from = (pixel + padding).checked_sub(tap)?;
            (from.is_multiple_of(window.stride) && from / window.stride < places)
                .then_some(from / window.stride)
        })
    };
    let (kernel, padding, places) = (window.kernel, window.padding, window.places());
    let down = reaches(places.0, kernel.0, padding.0, window.height);
    let across = reaches(places.1, kernel.1, padding.1, window.width);
    classes(&down, &across, (window.width, places.1), kernel.1)
}

/// Rows `first..` of a class over all samples, sample after sample: (pixel made, pixel under its first tap), each
/// counted over all samples.
pub(super) fn rows(
    class: &Class,
    first: usize,
    (made, under): (usize, usize),
) -> impl Iterator<Item = (usize, usize)> {
    let each = class.pixels.len();
    let mut sample = first / each;
    let mut at = first % each;
    std::iter::repeat_with(move || {
        if at == each {
            (sample, at) = (sample + 1, 0);
        }
        let pixel = class.pixels[at];
        at += 1;
        (sample * made + pixel.0, sample * under + pixel.1)
    })
}
