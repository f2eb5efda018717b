//! Updates: one pass over gradient, moments and parameter. And the sum of squares they are clipped by.

use rayon::prelude::*;

use super::CpuDevice;
use super::math::sum_by;
use super::round::encode;
use crate::device::{AdamW, Guard, Sgd, Updated};
use crate::tensor::Element;

/// Elements that a thread updates at a time: with gradient and moments a quarter of a core's cache at most.
const PIECE: usize = 1 << 13;

/// Elements per partial sum of squares: fixed, so that the total does not depend on the threads.
const SQUARES_CHUNK: usize = 1 << 14;

impl CpuDevice {
    /// The sum of numbers' squares, by all threads.
    pub fn squares(&self, values: &[f32]) -> f64 {
        self.pool.install(|| {
            let chunks = values.par_chunks(SQUARES_CHUNK).map(|part| {
                self.arch.dispatch(
                    #[inline(always)]
                    || f64::from(sum_by(part.len(), |i| part[i] * part[i])),
                )
            });
            let parts: Vec<f64> = chunks.collect();
            parts.iter().sum()
        })
    }

    /// What gradients are multiplied by, or `None` for no update.
    fn guard_factor(&self, guard: Guard) -> Option<f32> {
        guard.factor(self.read_scalar(guard.norm_squared), self.read_scalar(guard.loss))
    }

    /// Does an update of all the tensors' pieces, whichever tensors they are of: small ones do not wait for each other.
    /// What is copied is rounded while it is in the cache.
    fn update_pieces(
        &self,
        tensors: &mut [Updated],
        by: impl Fn(&mut [f32], &[f32], [&mut [f32]; 2], f32) + Sync,
    ) {
        let mut pieces: Vec<Piece> = tensors.iter_mut().flat_map(Piece::all).collect();
        pieces.par_iter_mut().for_each(|piece| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    let Piece { parameter, gradient, state: [first, second], copy, weight_decay } = piece;
                    by(parameter, gradient, [first, second], *weight_decay);
                    if let Some((element, copy)) = copy {
                        encode(bytemuck::cast_slice(parameter), *element, copy);
                    }
                },
            );
        });
    }

    pub(super) fn adamw_update(&self, s: &AdamW, guard: Guard, tensors: &mut [Updated]) {
        let Some(factor) = self.guard_factor(guard) else { return };
        assert!(tensors.iter().all(|updated| updated.state.len() == 2), "AdamW keeps two moments");
        let correction1 = 1.0 - f64::from(s.beta1).powf(s.update as f64);
        let correction2 = 1.0 - f64::from(s.beta2).powf(s.update as f64);
        let step = (f64::from(s.lr) / correction1) as f32;
        let root_correction = correction2.sqrt() as f32;
        let (beta1, beta2, eps) = (s.beta1, s.beta2, s.eps);
        self.update_pieces(
            tensors,
            #[inline(always)]
            |parameter, gradient, [first, second], weight_decay| {
                let keep = (1.0 - f64::from(s.lr) * f64::from(weight_decay)) as f32;
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
    }

    pub(super) fn sgd_update(&self, s: &Sgd, guard: Guard, tensors: &mut [Updated]) {
        let Some(factor) = self.guard_factor(guard) else { return };
        assert!(tensors.iter().all(|updated| updated.state.len() <= 1), "SGD keeps one velocity at most");
        let (lr, momentum) = (s.lr, s.momentum);
        // The first update has no past to keep: its velocity is the gradient.
        let is_first = s.update == 1;
        self.update_pieces(
            tensors,
            #[inline(always)]
            |parameter, gradient, [velocity, _], decay| {
                let values = parameter.iter_mut().zip(gradient);
                if velocity.is_empty() {
                    for (p, g) in values {
                        *p -= lr * (g * factor + decay * *p);
                    }
                    return;
                }
                for ((p, g), v) in values.zip(velocity.iter_mut()) {
                    let past = if is_first { 0.0 } else { momentum * *v };
                    *v = past + (g * factor + decay * *p);
                    *p -= lr * *v;
                }
            },
        );
    }
}

/// Some elements of a tensor to update, so few that all of it stays in a core's cache.
struct Piece<'a> {
    parameter: &'a mut [f32],
    gradient: &'a [f32],
    /// Empty where the optimizer keeps fewer.
    state: [&'a mut [f32]; 2],
    copy: Option<(Element, &'a mut [u8])>,
    weight_decay: f32,
}

impl<'a> Piece<'a> {
    /// A tensor's pieces.
    ///
    /// # Panics
    /// If its tensors do not fit each other.
    fn all<'b: 'a>(updated: &'a mut Updated<'b>) -> impl Iterator<Item = Piece<'a>> {
        let Updated { gradient, state, parameter, copy, weight_decay } = updated;
        let elements = parameter.len();
        assert!(gradient.len() >= elements);
        assert!(state.iter().all(|state| state.len() == elements));
        let mut parameters = parameter.floats_mut().chunks_mut(PIECE);
        let mut gradients = gradient.floats()[..elements].chunks(PIECE);
        let mut states = state.iter_mut().map(|state| state.floats_mut().chunks_mut(PIECE));
        let mut states = [states.next(), states.next()];
        let mut copies = copy.as_mut().map(|copy| {
            let element = copy.element();
            (element, copy.bytes_of_mut(0..elements).chunks_mut(element.bytes() * PIECE))
        });
        std::iter::from_fn(move || {
            let mut state =
                |which: usize| states[which].as_mut().and_then(Iterator::next).unwrap_or_default();
            Some(Piece {
                parameter: parameters.next()?,
                gradient: gradients.next()?,
                state: [state(0), state(1)],
                copy: copies.as_mut().and_then(|(element, copies)| Some((*element, copies.next()?))),
                weight_decay: *weight_decay,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Device, SCALAR_ELEMENTS};
    use crate::memory::Arena;
    use crate::random::fill_normal;
    use crate::tensor::Tensor;

    /// A copy is its parameter, rounded, whatever its kind and length; it stays as it was where nothing is updated, and past
    /// the parameter's end.
    #[test]
    fn copies_follow_their_parameters() {
        let arena = Arena::poisoned("cpu", 64 << 20).unwrap();
        let device = CpuDevice::with_arena(arena.clone(), 3).unwrap();
        let random = |key: u64, elements: usize| {
            let mut tensor = Tensor::new(&arena, "test", elements).unwrap();
            fill_normal(tensor.floats_mut(), key, 0, 1.0);
            tensor
        };
        let scalar = |value: f64| {
            let mut scalar = Tensor::new(&arena, "test", SCALAR_ELEMENTS).unwrap();
            device.set_scalar(&mut scalar, value).unwrap();
            scalar
        };
        let (fine, broken) = (scalar(2.0), scalar(f64::NAN));
        let adamw = AdamW { lr: 0.1, beta1: 0.9, beta2: 0.95, eps: 1e-8, update: 3 };
        let sgd = Sgd { lr: 0.1, momentum: 0.9, update: 3 };
        let kinds = [Element::Bf16, Element::F16, Element::F32];
        let lengths = [1, 3, PIECE, PIECE + 1, 5 * PIECE + 77];
        for states in 0..3 {
            let of = |length: usize| -> Vec<Tensor> {
                (0..states)
                    .map(|state| {
                        let mut state = random(state, length);
                        state.floats_mut().iter_mut().for_each(|value| *value = value.abs());
                        state
                    })
                    .collect()
            };
            let mut held: Vec<_> = lengths
                .iter()
                .zip(kinds.iter().cycle())
                .map(|(length, kind)| {
                    let copy = Tensor::of(&arena, "test", *kind, length + 5).unwrap();
                    (random(7, *length), random(8, *length), of(*length), copy)
                })
                .collect();
            for (loss, updates) in [(&broken, false), (&fine, true)] {
                let guard = Guard { norm_squared: &fine, loss, scale: 1.0, clip_norm: Some(1.0) };
                let mut updated: Vec<Updated> = held
                    .iter_mut()
                    .map(|(gradient, parameter, state, copy)| Updated {
                        gradient,
                        state,
                        parameter,
                        copy: Some(copy),
                        weight_decay: 0.1,
                    })
                    .collect();
                match states {
                    2 => device.adamw(&adamw, guard, &mut updated).unwrap(),
                    _ => device.sgd(&sgd, guard, &mut updated).unwrap(),
                }
                for (_, parameter, _, copy) in &held {
                    let (length, element) = (parameter.len(), copy.element());
                    let mut expected = vec![0xff; copy.len() * element.bytes()];
                    if updates {
                        element.write(parameter.floats(), &mut expected[..length * element.bytes()]);
                    }
                    assert!(copy.bytes_of(0..copy.len()) == expected, "{length} of {element:?}");
                }
            }
        }
    }
}
