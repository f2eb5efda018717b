//! Updates: one pass over gradient, moments and parameter. And the sum of squares they are clipped by.

use rayon::prelude::*;

use super::CpuDevice;
use super::math::sum_by;
use crate::device::{AdamW, Guard, Sgd, Updated};
use crate::tensor::Tensor;

/// Elements per partial sum of squares: fixed, so that the total does not depend on the threads.
const SQUARES_CHUNK: usize = 1 << 14;

impl CpuDevice {
    pub(super) fn squares(&self, tensors: &[&Tensor]) -> f64 {
        let sum_one = |tensor: &&Tensor| -> f64 {
            let parts: Vec<f64> = tensor
                .floats()
                .par_chunks(SQUARES_CHUNK)
                .map(|part| {
                    self.arch.dispatch(
                        #[inline(always)]
                        || f64::from(sum_by(part.len(), |i| part[i] * part[i])),
                    )
                })
                .collect();
            parts.iter().sum()
        };
        tensors.iter().map(sum_one).sum()
    }

    /// What gradients are multiplied by, or `None` for no update.
    fn guard_factor(&self, guard: Guard) -> Option<f32> {
        guard.factor(self.read_scalar(guard.norm_squared), self.read_scalar(guard.loss))
    }

    pub(super) fn adamw_update(&self, s: &AdamW, guard: Guard, tensors: &mut [Updated]) {
        let Some(factor) = self.guard_factor(guard) else { return };
        for updated in tensors {
            let [first, second] = updated.state else { panic!("AdamW keeps two moments") };
            self.adamw_one(
                s,
                factor,
                updated.weight_decay,
                updated.gradient,
                first,
                second,
                updated.parameter,
            );
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn adamw_one(
        &self,
        s: &AdamW,
        factor: f32,
        weight_decay: f32,
        gradient: &Tensor,
        first: &mut Tensor,
        second: &mut Tensor,
        parameter: &mut Tensor,
    ) {
        let elements = parameter.len();
        assert_eq!((first.len(), second.len()), (elements, elements));
        assert!(gradient.len() >= elements);
        let correction1 = 1.0 - f64::from(s.beta1).powf(s.update as f64);
        let correction2 = 1.0 - f64::from(s.beta2).powf(s.update as f64);
        let step = (f64::from(s.lr) / correction1) as f32;
        let root_correction = correction2.sqrt() as f32;
        let keep = (1.0 - f64::from(s.lr) * f64::from(weight_decay)) as f32;
        let (beta1, beta2, eps) = (s.beta1, s.beta2, s.eps);
        let chunk = self.element_chunk(elements).min(1 << 16);
        let moments = first.floats_mut().par_chunks_mut(chunk).zip(second.floats_mut().par_chunks_mut(chunk));
        let values =
            parameter.floats_mut().par_chunks_mut(chunk).zip(gradient.floats()[..elements].par_chunks(chunk));
        values.zip(moments).for_each(|((parameter, gradient), (first, second))| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    let values = parameter.iter_mut().zip(gradient);
                    for ((p, g), (m, v)) in values.zip(first.iter_mut().zip(second.iter_mut())) {
                        let g = g * factor;
                        *m = (1.0 - beta1).mul_add(g - *m, *m);
                        *v = beta2 * *v + (1.0 - beta2) * g * g;
                        let denominator = v.sqrt() / root_correction + eps;
                        *p = *p * keep - step * (*m / denominator);
                    }
                },
            );
        });
    }

    pub(super) fn sgd_update(&self, s: &Sgd, guard: Guard, tensors: &mut [Updated]) {
        let Some(factor) = self.guard_factor(guard) else { return };
        for updated in tensors {
            let velocity = updated.state.first_mut();
            self.sgd_one(s, factor, updated.weight_decay, updated.gradient, velocity, updated.parameter);
        }
    }

    fn sgd_one(
        &self,
        s: &Sgd,
        factor: f32,
        decay: f32,
        gradient: &Tensor,
        velocity: Option<&mut Tensor>,
        parameter: &mut Tensor,
    ) {
        assert!(gradient.len() >= parameter.len());
        let (lr, momentum) = (s.lr, s.momentum);
        let chunk = self.element_chunk(parameter.len()).min(1 << 16);
        let values = parameter.floats_mut().par_chunks_mut(chunk).zip(gradient.floats().par_chunks(chunk));
        match velocity {
            Some(velocity) => {
                // The first update has no past to keep: its velocity is the gradient.
                let first = s.update == 1;
                values.zip(velocity.floats_mut().par_chunks_mut(chunk)).for_each(
                    |((parameter, gradient), velocity)| {
                        self.arch.dispatch(
                            #[inline(always)]
                            || {
                                for ((p, g), v) in parameter.iter_mut().zip(gradient).zip(velocity.iter_mut())
                                {
                                    let past = if first { 0.0 } else { momentum * *v };
                                    *v = past + (g * factor + decay * *p);
                                    *p -= lr * *v;
                                }
                            },
                        );
                    },
                );
            }
            None => values.for_each(|(parameter, gradient)| {
                self.arch.dispatch(
                    #[inline(always)]
                    || {
                        for (p, g) in parameter.iter_mut().zip(gradient) {
                            *p -= lr * (g * factor + decay * *p);
                        }
                    },
                );
            }),
        }
    }
}
