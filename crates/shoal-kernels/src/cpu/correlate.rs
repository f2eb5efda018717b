//! Convolutions and their gradients as tiles of sums: no pixel is gathered, and only filters are copied, a panel of
//! them at a time into memory of the thread that multiplies by them. What a tile makes has one owner and one order
//! of terms, so the bits depend neither on timing nor on the number of threads.

use std::ops::Range;

use rayon::prelude::*;

use super::pixels::rectify_row;
use super::reach::{Class, input_classes, output_classes, rows};
use super::tile::{COLUMNS, ROWS, Run, Tile, pairs, rows_by_panel};
use super::{CpuDevice, SCORES, cut};
use crate::convolutional::Window;

/// Rows of a panel: what a thread's scratch holds, 128 KiB, which stays in its second cache.
const PANEL_ROWS: usize = SCORES / COLUMNS;

/// Rows whose products are summed before they are added to the filters' gradient.
const SUMMED_ROWS: usize = 128;

/// Terms that are added one after the other; their sums are added up after. Rounding grows with the root of both
/// numbers, not of their product.
const SUMMED_TERMS: usize = 64;

/// Pieces of work for each thread, so that one that falls behind does not hold up the others.
const TASKS: usize = 3;

/// Elements of the filters' gradient that a task adds to over and over: half of a second cache.
const GRADIENT_ELEMENTS: usize = 1 << 17;

/// Memory that threads write, each elements of its own.
#[derive(Clone, Copy)]
struct Shared<T>(*mut T);

// SAFETY: tasks write disjoint elements, and the borrow that the pointer came from outlives them.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// # Safety
    /// The element lies inside.
    unsafe fn at(self, element: usize) -> *mut T {
        // SAFETY: by this function's contract.
        unsafe { self.0.add(element) }
    }

    /// # Safety
    /// The elements lie inside, and nobody else touches them meanwhile.
    unsafe fn slice<'a>(self, first: usize, length: usize) -> &'a mut [T] {
        // SAFETY: by this function's contract.
        unsafe { std::slice::from_raw_parts_mut(self.at(first), length) }
    }
}

/// Some of the terms of every sum: those of some taps and channels.
struct Depth {
    taps: Range<usize>,
    channels: Range<usize>,
}

impl Depth {
    /// Pieces of all terms that fit a panel, about equal.
    fn pieces(taps: usize, channels: usize) -> Vec<Depth> {
        if channels > PANEL_ROWS {
            let of_tap = |tap: usize| {
                cut(channels, channels.div_ceil(PANEL_ROWS), 1)
                    .map(move |channels| Depth { taps: tap..tap + 1, channels })
            };
            return (0..taps).flat_map(of_tap).collect();
        }
        let pieces = taps.div_ceil(PANEL_ROWS / channels);
        cut(taps, pieces, 1).map(|taps| Depth { taps, channels: 0..channels }).collect()
    }

    /// The class's terms of these, `channels` being those of a pixel.
    fn runs(&self, class: &Class, channels: usize) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        let length = self.channels.len();
        for (tap, distance) in class.taps.iter().filter(|(tap, _)| self.taps.contains(tap)) {
            let panel_row = (tap - self.taps.start) * length;
            let step = distance * channels + self.channels.start;
            match runs.last_mut() {
                Some(last)
                    if (last.panel_row + last.length, last.step + last.length) == (panel_row, step) =>
                {
                    last.length += length;
                }
                _ => runs.push(Run { panel_row, step, length }),
            }
        }
        runs
    }
}

/// Images convolved: `x` of `channels` under the taps becomes `out` of `outputs`.
struct Correlation<'a> {
    samples: usize,
    classes: Vec<Class>,
    /// Pixels of a sample that are made, and that lie under the taps.
    pixels: (usize, usize),
    taps: usize,
    channels: usize,
    outputs: usize,
    x: &'a [f32],
}

impl Correlation<'_> {
    /// What a class gets from a piece of the depth, for some of its rows and a block of outputs.
    fn multiply(
        &self,
        device: &CpuDevice,
        class: &Class,
        range: Range<usize>,
        runs: &[Run],
        panel: &[f32],
        mut finish: impl FnMut(usize, &[f32; COLUMNS]),
    ) {
        let parts = parts(runs);
        let (mut tile, mut part): (Tile, Tile) = ([[0.0; COLUMNS]; ROWS], [[0.0; COLUMNS]; ROWS]);
        for some in cut(range.len(), range.len().div_ceil(ROWS), 1) {
            let (mut starts, mut made) = ([self.x.as_ptr(); ROWS], [0; ROWS]);
            let rows = rows(class, range.start + some.start, self.pixels).take(some.len());
            for (row, (pixel, under)) in rows.enumerate() {
                made[row] = pixel;
                starts[row] = self.x[under * self.channels..].as_ptr();
            }
            for (index, runs) in parts.iter().enumerate() {
                let to = if index == 0 { &mut tile } else { &mut part };
                // SAFETY: a class's taps lie on pixels of the image, and the panel has all their terms.
                unsafe { rows_by_panel(device.arch, some.len(), &starts, runs, panel.as_ptr(), to) };
                if index > 0 {
                    let sums = tile[..some.len()].as_flattened_mut().iter_mut();
                    sums.zip(part.as_flattened()).for_each(|(sum, part)| *sum += part);
                }
            }
            made[..some.len()].iter().zip(&tile).for_each(|(made, sums)| finish(*made, sums));
        }
    }

    /// `out =` the convolution, then bias and ReLU. `pack(block, depth, panel)` lays out the filters: terms in rows,
    /// the block's outputs in columns.
    fn run(
        &self,
        device: &CpuDevice,
        pack: impl Fn(Range<usize>, &Depth, &mut [f32]) + Sync,
        bias: Option<&[f32]>,
        mask: Option<&mut [i32]>,
        out: &mut [f32],
    ) {
        let (outputs, words) = (self.outputs, self.outputs.div_ceil(COLUMNS));
        assert_eq!(out.len(), self.samples * self.pixels.0 * outputs);
        assert_eq!(self.x.len(), self.samples * self.pixels.1 * self.channels);
        assert!(mask.as_ref().is_none_or(|mask| mask.len() == self.samples * self.pixels.0 * words));
        let (out, mask) = (Shared(out.as_mut_ptr()), mask.map(|mask| Shared(mask.as_mut_ptr())));
        let depths = Depth::pieces(self.taps, self.channels);
        // Rows are cut too where there are few blocks: each part packs the filters again, which costs little then.
        let parts = (TASKS * device.threads()).div_ceil(words);
        let tasks: Vec<(usize, usize)> =
            (0..words).flat_map(|word| (0..parts).map(move |part| (word, part))).collect();
        tasks.into_par_iter().for_each(|(word, part)| {
            let block = word * COLUMNS..(word * COLUMNS + COLUMNS).min(outputs);
            let mut scratch = device.scratch();
            let panel = &mut scratch.floats_mut()[..PANEL_ROWS * COLUMNS];
            // Terms that a class has yet to get; one without any has zeros.
            let mut left: Vec<usize> =
                self.classes.iter().map(|class| class.taps.len() * self.channels).collect();
            for (index, depth) in depths.iter().enumerate() {
                pack(block.clone(), depth, panel);
                for (class, left) in self.classes.iter().zip(&mut left) {
                    let runs = depth.runs(class, self.channels);
                    let fresh = *left == class.taps.len() * self.channels;
                    *left -= runs.iter().map(|run| run.length).sum::<usize>();
                    if runs.is_empty() && !(class.taps.is_empty() && index == 0) {
                        continue;
                    }
                    let done = *left == 0;
                    let all = self.samples * class.pixels.len();
                    let range = cut(all, parts, ROWS).nth(part).unwrap_or(0..0);
                    self.multiply(device, class, range, &runs, panel, |made, sums| {
                        // SAFETY: this task alone has the block's columns of the rows of its part.
                        let row = unsafe { out.slice(made * outputs + block.start, block.len()) };
                        let bias = bias.filter(|_| done).map(|bias| &bias[block.clone()]);
                        // SAFETY: as above: a word is of one block.
                        let mut mask =
                            mask.filter(|_| done).map(|mask| unsafe { mask.slice(made * words + word, 1) });
                        device.arch.dispatch(
                            #[inline(always)]
                            || {
                                add_sums(row, fresh, sums, bias);
                                if let Some(word) = &mut mask {
                                    rectify_row(row, word);
                                }
                            },
                        );
                    });
                }
            }
        });
    }
}

/// The same terms in parts of at most [`SUMMED_TERMS`]; one, empty, where there are none.
fn parts(runs: &[Run]) -> Vec<Vec<Run>> {
    let (mut parts, mut room) = (vec![Vec::new()], SUMMED_TERMS);
    for run in runs {
        let mut rest = *run;
        while rest.length > 0 {
            if room == 0 {
                parts.push(Vec::new());
                room = SUMMED_TERMS;
            }
            let length = rest.length.min(room);
            parts.last_mut().expect("there is one from the start").push(Run { length, ..rest });
            rest = Run {
                panel_row: rest.panel_row + length,
                step: rest.step + length,
                length: rest.length - length,
            };
            room -= length;
        }
    }
    parts
}

/// A row takes its sums, and the bias after the last of them.
#[inline(always)]
fn add_sums(row: &mut [f32], fresh: bool, sums: &[f32; COLUMNS], bias: Option<&[f32]>) {
    if fresh {
        row.copy_from_slice(&sums[..row.len()]);
    } else {
        row.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
    }
    if let Some(bias) = bias {
        row.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias);
    }
}

/// The window of a convolution with its filters, as the products see it.
pub(super) struct Convolution<'a> {
    pub window: Window,
    /// [outputs, taps, channels]
    pub weight: &'a [f32],
    pub outputs: usize,
}

impl CpuDevice {
    pub(super) fn convolve(
        &self,
        of: &Convolution,
        x: &[f32],
        bias: Option<&[f32]>,
        mask: Option<&mut [i32]>,
        out: &mut [f32],
    ) {
        let (window, elements) = (&of.window, of.window.elements());
        let places = window.places();
        let correlation = Correlation {
            samples: window.samples,
            classes: output_classes(window),
            pixels: (places.0 * places.1, window.height * window.width),
            taps: window.kernel.0 * window.kernel.1,
            channels: window.channels,
            outputs: of.outputs,
            x,
        };
        let pack = |block: Range<usize>, depth: &Depth, panel: &mut [f32]| {
            let width = depth.channels.len();
            let filters = of.weight[block.start * elements..block.end * elements].chunks_exact(elements);
            let starts = depth.taps.clone().map(|tap| tap * window.channels + depth.channels.start);
            for (start, panel) in starts.zip(panel.chunks_exact_mut(width * COLUMNS)) {
                turn(filters.clone().map(|filter| &filter[start..start + width]), panel);
            }
        };
        correlation.run(self, pack, bias, mask, out);
    }

    pub(super) fn convolve_dx(&self, of: &Convolution, dy: &[f32], dx: &mut [f32]) {
        let (window, elements) = (&of.window, of.window.elements());
        let places = window.places();
        let correlation = Correlation {
            samples: window.samples,
            classes: input_classes(window),
            pixels: (window.height * window.width, places.0 * places.1),
            taps: window.kernel.0 * window.kernel.1,
            channels: of.outputs,
            outputs: window.channels,
            x: dy,
        };
        let pack = |block: Range<usize>, depth: &Depth, panel: &mut [f32]| {
            let terms =
                depth.taps.clone().flat_map(|tap| depth.channels.clone().map(move |from| (tap, from)));
            for ((tap, from), panel) in terms.zip(panel.chunks_exact_mut(COLUMNS)) {
                let filter = &of.weight[from * elements + tap * window.channels..];
                panel[..block.len()].copy_from_slice(&filter[block.clone()]);
                panel[block.len()..].fill(0.0);
            }
        };
        correlation.run(self, pack, None, None, dx);
    }

    pub(super) fn convolve_dw(
        &self,
        window: &Window,
        outputs: usize,
        x: &[f32],
        dy: &[f32],
        gradient: &mut [f32],
        accumulate: bool,
    ) {
        let (elements, line) = (window.elements(), window.kernel.1 * window.channels);
        let places = window.places();
        let pixels = (places.0 * places.1, window.height * window.width);
        assert_eq!(gradient.len(), outputs * elements);
        assert_eq!(dy.len(), window.samples * pixels.0 * outputs);
        assert_eq!(x.len(), window.samples * pixels.1 * window.channels);
        let classes = output_classes(window);
        let gradient = Shared(gradient.as_mut_ptr());
        // A line of the window in some outputs' filters; a task has several, preferably of the same line, which
        // take turns at a few rows of the image.
        let items: Vec<(usize, Range<usize>)> = (0..window.kernel.0)
            .flat_map(|down| cut(outputs, outputs.div_ceil(ROWS), 1).map(move |outputs| (down, outputs)))
            .collect();
        let fit = (GRADIENT_ELEMENTS / (ROWS * line)).max(1);
        let each = items.len().div_ceil(TASKS * self.threads()).min(fit);
        items.par_chunks(each).for_each(|items| {
            if !accumulate {
                for (down, output) in
                    items.iter().flat_map(|(down, some)| some.clone().map(move |o| (down, o)))
                {
                    // SAFETY: these are this task's; likewise below.
                    unsafe { gradient.slice(output * elements + down * line, line) }.fill(0.0);
                }
            }
            for class in &classes {
                for range in cut(window.samples * class.pixels.len(), usize::MAX, SUMMED_ROWS) {
                    let (mut at, mut rows_of) = ([(0, 0); SUMMED_ROWS], rows(class, range.start, pixels));
                    for at in &mut at[..range.len()] {
                        let (place, under) = rows_of.next().expect("rows go on");
                        *at = (place * outputs, under * window.channels);
                    }
                    for (down, some) in items {
                        // Taps of a line lie side by side, in the filters as in the image.
                        let mut taps = class.taps.iter().filter(|(tap, _)| tap / window.kernel.1 == *down);
                        let Some((tap, distance)) = taps.next() else { continue };
                        let length = (1 + taps.count()) * window.channels;
                        let (first, step) = (tap * window.channels, distance * window.channels);
                        for column in (0..length).step_by(COLUMNS) {
                            let shape = (some.len(), COLUMNS.min(length - column));
                            // SAFETY: rows of `dy` have `outputs` numbers, what lies under the line's taps is
                            // inside of the image, and these elements of the gradient are this task's.
                            unsafe {
                                let operands = (dy.as_ptr().add(some.start), x.as_ptr().add(step + column));
                                let out = gradient.at(some.start * elements + first + column);
                                pairs(self.arch, shape, operands, &at[..range.len()], (out, elements));
                            }
                        }
                    }
                }
            }
        });
    }
}

/// Rows become the panel's columns, zeros where there are too few.
fn turn<'a>(rows: impl ExactSizeIterator<Item = &'a [f32]> + Clone, panel: &mut [f32]) {
    // As many terms at a time as one line of the cache has of each row.
    for (index, panel) in panel.chunks_mut(16 * COLUMNS).enumerate() {
        for (column, row) in rows.clone().enumerate() {
            let terms = row[16 * index..].iter();
            terms.zip(panel.chunks_exact_mut(COLUMNS)).for_each(|(value, out)| out[column] = *value);
        }
        panel.chunks_exact_mut(COLUMNS).for_each(|out| out[rows.len()..].fill(0.0));
    }
}
