//! Linear layers: products with their bias, residual and bias gradient.

use rayon::prelude::*;

use super::CpuDevice;
use super::matrix::{Source, Target, product};
use crate::device::{Linear, Mat, MatMut};
use crate::tensor::Tensor;

fn source<'a>(mat: Mat<'a>) -> Source<'a> {
    Source::new(&mat.tensor.floats()[mat.offset..], mat.stride, 1)
}

fn target<'a>(mat: MatMut<'a>) -> Target<'a> {
    Target::new(&mut mat.tensor.floats_mut()[mat.offset..], mat.stride, 1)
}

/// The weight as an [inputs, outputs] matrix, however it is stored.
fn weight_source(weight: Linear) -> Source {
    assert_eq!(weight.weight.len(), weight.inputs * weight.outputs);
    if weight.in_out {
        Source::new(weight.weight.floats(), weight.outputs, 1)
    } else {
        Source::new(weight.weight.floats(), 1, weight.inputs)
    }
}

impl CpuDevice {
    pub(super) fn linear_forward(
        &self,
        x: Mat,
        weight: Linear,
        bias: Option<&Tensor>,
        residual: Option<&Tensor>,
        mut out: MatMut,
    ) {
        assert_eq!((x.rows, x.cols, weight.outputs), (out.rows, weight.inputs, out.cols));
        let (rows, cols, stride) = (out.rows, out.cols, out.stride);
        // The product adds onto what the output already holds, so bias and residual cost one writing pass.
        let accumulate = bias.is_some() || residual.is_some();
        if accumulate {
            self.prefill(bias, residual, &mut out);
        }
        let out = target(MatMut { tensor: out.tensor, offset: out.offset, rows, cols, stride });
        product(self.threads(), (rows, cols, x.cols), out, accumulate, source(x), weight_source(weight), 1.0);
    }

    /// Rows of `out` become residual + bias.
    fn prefill(&self, bias: Option<&Tensor>, residual: Option<&Tensor>, out: &mut MatMut) {
        let (cols, stride, rows) = (out.cols, out.stride, out.rows);
        let bias = bias.map(|bias| &bias.floats()[..cols]);
        let residual = residual.map(|residual| {
            assert_eq!(residual.len(), rows * cols);
            residual.floats()
        });
        let end = (rows * stride).min(out.tensor.len() - out.offset);
        let region = &mut out.tensor.floats_mut()[out.offset..out.offset + end];
        let chunk_rows = rows.div_ceil(self.threads()).max(1);
        region.par_chunks_mut(chunk_rows * stride).enumerate().for_each(|(chunk, part)| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    for (index, row) in part.chunks_mut(stride).enumerate() {
                        let row = &mut row[..cols];
                        let first = (chunk * chunk_rows + index) * cols;
                        match (residual.map(|all| &all[first..first + cols]), bias) {
                            (Some(residual), Some(bias)) => {
                                for ((out, r), b) in row.iter_mut().zip(residual).zip(bias) {
                                    *out = r + b;
                                }
                            }
                            (Some(residual), None) => row.copy_from_slice(residual),
                            (None, Some(bias)) => row.copy_from_slice(bias),
                            (None, None) => {}
                        }
                    }
                },
            );
        });
    }

    pub(super) fn linear_dx(&self, dy: Mat, weight: Linear, dx: MatMut, accumulate: bool) {
        assert_eq!((dy.rows, dy.cols, weight.inputs), (dx.rows, weight.outputs, dx.cols));
        let shape = (dx.rows, dx.cols, dy.cols);
        let weight = weight_source(weight).transposed();
        product(self.threads(), shape, target(dx), accumulate, source(dy), weight, 1.0);
    }

    pub(super) fn linear_dw(&self, x: Mat, dy: Mat, gradient: &mut Tensor, in_out: bool, accumulate: bool) {
        assert_eq!(x.rows, dy.rows);
        assert_eq!(gradient.len(), x.cols * dy.cols);
        let shape = (x.cols, dy.cols, x.rows);
        let out = if in_out {
            Target::new(gradient.floats_mut(), dy.cols, 1)
        } else {
            Target::new(gradient.floats_mut(), 1, x.cols)
        };
        product(self.threads(), shape, out, accumulate, source(x).transposed(), source(dy), 1.0);
    }

    /// Column sums: each thread owns some columns and walks all rows, so no partial sums need merging.
    pub(super) fn column_sums(&self, dy: Mat, gradient: &mut Tensor, accumulate: bool) {
        let (gradient, rest) = gradient.floats_mut().split_at_mut(dy.cols);
        if !accumulate {
            rest.fill(0.0);
        }
        let values = &dy.tensor.floats()[dy.offset..];
        let chunk = dy.cols.div_ceil(self.threads()).next_multiple_of(16);
        gradient.par_chunks_mut(chunk).enumerate().for_each(|(index, sums)| {
            let first = index * chunk;
            self.arch.dispatch(
                #[inline(always)]
                || {
                    if !accumulate {
                        sums.fill(0.0);
                    }
                    for row in 0..dy.rows {
                        let from = row * dy.stride + first;
                        for (sum, value) in sums.iter_mut().zip(&values[from..]) {
                            *sum += value;
                        }
                    }
                },
            );
        });
    }
}
