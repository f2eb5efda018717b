//! Table look-ups and their gradients.

use rayon::prelude::*;

use super::CpuDevice;
use crate::tensor::Tensor;

/// A table whose rows the threads write, each thread its own columns of every row.
#[derive(Clone, Copy)]
struct SharedTable(*mut f32);

// SAFETY: the users below write disjoint columns.
unsafe impl Send for SharedTable {}
// SAFETY: as above.
unsafe impl Sync for SharedTable {}

impl SharedTable {
    /// # Safety
    /// The range lies inside the table and no other thread touches it.
    unsafe fn columns<'a>(self, start: usize, length: usize) -> &'a mut [f32] {
        // SAFETY: by this function's contract.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), length) }
    }
}

impl CpuDevice {
    #[allow(clippy::too_many_arguments)]
    pub(super) fn look_up(
        &self,
        tokens: &Tensor,
        sequence: usize,
        width: usize,
        table: &Tensor,
        positions: Option<&Tensor>,
        types: Option<&Tensor>,
        out: &mut Tensor,
    ) {
        let (tokens, table) = (tokens.integers(), table.floats());
        let positions = positions.map(Tensor::floats);
        let first_type = types.map(|types| &types.floats()[..width]);
        assert_eq!(out.len(), tokens.len() * width);
        let chunk = tokens.len().div_ceil(self.threads()).max(1);
        out.floats_mut().par_chunks_mut(chunk * width).enumerate().for_each(|(index, rows)| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    for (row, out) in rows.chunks_exact_mut(width).enumerate() {
                        let row = index * chunk + row;
                        let from = &table[tokens[row] as usize * width..][..width];
                        match positions {
                            Some(positions) => {
                                let place = &positions[row % sequence * width..][..width];
                                for ((out, token), place) in out.iter_mut().zip(from).zip(place) {
                                    *out = token + place;
                                }
                            }
                            None => out.copy_from_slice(from),
                        }
                        if let Some(first_type) = first_type {
                            for (out, value) in out.iter_mut().zip(first_type) {
                                *out += value;
                            }
                        }
                    }
                },
            );
        });
    }

    /// Each thread owns some columns of the whole table and walks all tokens in order: repeated tokens
    /// cannot collide, and every sum is made in the same order every time.
    pub(super) fn scatter_add(
        &self,
        tokens: &Tensor,
        width: usize,
        dy: &Tensor,
        gradient: &mut Tensor,
        accumulate: bool,
    ) {
        let (tokens, dy) = (tokens.integers(), dy.floats());
        assert_eq!(dy.len(), tokens.len() * width);
        if !accumulate {
            self.fill_zero(gradient);
        }
        let rows = gradient.len() / width;
        assert!(tokens.iter().all(|token| (*token as usize) < rows), "a token past the table");
        let table = SharedTable(gradient.floats_mut().as_mut_ptr());
        let pieces: Vec<_> = super::cut(width, self.threads(), 16).collect();
        pieces.into_par_iter().for_each(|cols| {
            let table: SharedTable = table;
            self.arch.dispatch(
                #[inline(always)]
                || {
                    for (row, token) in tokens.iter().enumerate() {
                        let from = &dy[row * width + cols.start..row * width + cols.end];
                        // SAFETY: the token was checked against the table; this piece alone has these columns.
                        let sums = unsafe { table.columns(*token as usize * width + cols.start, cols.len()) };
                        for (sum, value) in sums.iter_mut().zip(from) {
                            *sum += value;
                        }
                    }
                },
            );
        });
    }

    pub(super) fn position_sums(
        &self,
        sequence: usize,
        width: usize,
        dy: &Tensor,
        gradient: &mut Tensor,
        accumulate: bool,
    ) {
        let dy = dy.floats();
        let samples = dy.len() / (sequence * width);
        assert_eq!(samples * sequence * width, dy.len());
        assert!(gradient.len() >= sequence * width);
        if !accumulate {
            self.fill_zero(gradient);
        }
        let used = &mut gradient.floats_mut()[..sequence * width];
        let chunk = sequence.div_ceil(self.threads()).max(1) * width;
        used.par_chunks_mut(chunk).enumerate().for_each(|(index, sums)| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    for sample in 0..samples {
                        let from = sample * sequence * width + index * chunk;
                        for (sum, value) in sums.iter_mut().zip(&dy[from..]) {
                            *sum += value;
                        }
                    }
                },
            );
        });
    }

    pub(super) fn fill_zero(&self, tensor: &mut Tensor) {
        let chunk = self.element_chunk(tensor.len());
        tensor.floats_mut().par_chunks_mut(chunk).for_each(|part| part.fill(0.0));
    }
}
