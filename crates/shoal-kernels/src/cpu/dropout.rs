//! Dropout by hashing: an element's fate is a function of (site, sample, row, column), so the backward
//! draws the same mask again and nothing is stored.

use rayon::prelude::*;

use super::CpuDevice;
use super::operations::read_scalar;
use crate::device::DropoutSite;
use crate::random::{fold, mix32};
use crate::tensor::Tensor;

/// The mask of one row of a sample.
#[derive(Clone, Copy)]
pub(super) struct RowMask {
    key: u32,
    threshold: u32,
    scale: f32,
}

impl RowMask {
    #[inline(always)]
    pub(super) fn new(site: &DropoutSite, sample: u64, row: u64) -> RowMask {
        // An f64 has room for every step's number.
        let key = site.step.map_or(site.key, |step| fold(site.key, read_scalar(step) as u64));
        RowMask {
            key: fold(fold(key, site.first_sample + sample), row) as u32,
            threshold: (f64::from(site.rate) * 4_294_967_296.0) as u32,
            scale: 1.0 / (1.0 - site.rate),
        }
    }

    /// What the element in this column is multiplied by.
    #[inline(always)]
    pub(super) fn factor(self, col: usize) -> f32 {
        let hash = mix32((col as u32).wrapping_mul(0x9e37_79b9).wrapping_add(self.key));
        if hash >= self.threshold { self.scale } else { 0.0 }
    }
}

impl CpuDevice {
    pub(super) fn drop_in_place(
        &self,
        site: DropoutSite,
        sequence: usize,
        cols: usize,
        residual: Option<&Tensor>,
        out: &mut Tensor,
    ) {
        let rows = out.len() / cols;
        assert_eq!(rows * cols, out.len());
        let residual = residual.map(|residual| {
            assert_eq!(residual.len(), out.len());
            residual.floats()
        });
        let chunk = rows.div_ceil(self.threads()).max(1);
        out.floats_mut().par_chunks_mut(chunk * cols).enumerate().for_each(|(index, part)| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    for (row, out) in part.chunks_exact_mut(cols).enumerate() {
                        let row = index * chunk + row;
                        let mask = RowMask::new(&site, (row / sequence) as u64, (row % sequence) as u64);
                        match residual {
                            Some(all) => {
                                let residual = &all[row * cols..(row + 1) * cols];
                                for (col, (out, residual)) in out.iter_mut().zip(residual).enumerate() {
                                    *out = residual + *out * mask.factor(col);
                                }
                            }
                            None => {
                                for (col, out) in out.iter_mut().enumerate() {
                                    *out *= mask.factor(col);
                                }
                            }
                        }
                    }
                },
            );
        });
    }

    pub(super) fn drop_copy(
        &self,
        site: DropoutSite,
        sequence: usize,
        cols: usize,
        x: &Tensor,
        out: &mut Tensor,
    ) {
        assert_eq!(x.len(), out.len());
        out.floats_mut().copy_from_slice(x.floats());
        self.drop_in_place(site, sequence, cols, None, out);
    }
}
