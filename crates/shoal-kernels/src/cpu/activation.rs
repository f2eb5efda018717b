//! GELU and SwiGLU, forward and backward, one pass each.

use rayon::prelude::*;

use super::CpuDevice;
use super::math::{gelu, gelu_both, sigmoid};
use crate::tensor::Tensor;

impl CpuDevice {
    /// Elements per piece of an elementwise operation.
    pub(super) fn element_chunk(&self, elements: usize) -> usize {
        elements.div_ceil(self.threads()).next_multiple_of(64).max(64)
    }

    pub(super) fn gelu_forward(&self, x: &Tensor, out: &mut Tensor) {
        assert_eq!(x.len(), out.len());
        let chunk = self.element_chunk(x.len());
        let pieces = out.floats_mut().par_chunks_mut(chunk).zip(x.floats().par_chunks(chunk));
        pieces.for_each(|(out, x)| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    for (out, x) in out.iter_mut().zip(x) {
                        *out = gelu(*x);
                    }
                },
            );
        });
    }

    pub(super) fn gelu_gradient(&self, x: &mut Tensor, gradient: &mut Tensor) {
        assert_eq!(x.len(), gradient.len());
        let chunk = self.element_chunk(x.len());
        let pieces = x.floats_mut().par_chunks_mut(chunk).zip(gradient.floats_mut().par_chunks_mut(chunk));
        pieces.for_each(|(x, gradient)| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    for (x, gradient) in x.iter_mut().zip(gradient.iter_mut()) {
                        let (value, slope) = gelu_both(*x);
                        *x = value;
                        *gradient *= slope;
                    }
                },
            );
        });
    }

    /// `gradient *= gelu'(x)`
    pub(super) fn gelu_slope(&self, x: &Tensor, gradient: &mut Tensor) {
        assert_eq!(x.len(), gradient.len());
        let chunk = self.element_chunk(x.len());
        let pieces = gradient.floats_mut().par_chunks_mut(chunk).zip(x.floats().par_chunks(chunk));
        pieces.for_each(|(gradient, x)| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    for (gradient, x) in gradient.iter_mut().zip(x) {
                        *gradient *= gelu_both(*x).1;
                    }
                },
            );
        });
    }

    pub(super) fn swiglu_forward(&self, gate: &Tensor, up: &Tensor, out: &mut Tensor) {
        assert_eq!((gate.len(), up.len()), (out.len(), out.len()));
        let chunk = self.element_chunk(out.len());
        let inputs = gate.floats().par_chunks(chunk).zip(up.floats().par_chunks(chunk));
        out.floats_mut().par_chunks_mut(chunk).zip(inputs).for_each(|(out, (gate, up))| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
                        *out = gate * sigmoid(*gate) * up;
                    }
                },
            );
        });
    }

    pub(super) fn swiglu_gradient(&self, gate: &mut Tensor, up: &mut Tensor, gradient: &mut Tensor) {
        assert_eq!((gate.len(), up.len()), (gradient.len(), gradient.len()));
        let chunk = self.element_chunk(gradient.len());
        let gates = gate.floats_mut().par_chunks_mut(chunk);
        let pieces = gates.zip(up.floats_mut().par_chunks_mut(chunk));
        pieces.zip(gradient.floats_mut().par_chunks_mut(chunk)).for_each(|((gate, up), gradient)| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    for ((gate, up), gradient) in gate.iter_mut().zip(up.iter_mut()).zip(gradient.iter_mut())
                    {
                        let s = sigmoid(*gate);
                        let silu = *gate * s;
                        let slope = s * (*gate).mul_add(1.0 - s, 1.0);
                        let (d, u) = (*gradient, *up);
                        *gate = d * u * slope;
                        *up = d * silu;
                        *gradient = silu * u;
                    }
                },
            );
        });
    }
}
