//! What tests of random tables are made of: samples and initial parameters, drawn.

use std::ops::Range;

use shoal_data::Inputs;
use shoal_engine::EngineError;
use shoal_engine::executor::Batch;
use shoal_kernels::random::{fill_normal, fold, key_of, mix64};
use shoal_model::{Chain, TensorSpec};
use shoal_nn::init;

/// Of a host that keeps state.
pub const HOST_BYTES: u64 = 256 << 20;

/// Random tokens or images; some targets are ignored.
pub struct RandomBatch {
    pub classes: usize,
    pub step: u64,
}

impl Batch for RandomBatch {
    fn read(&self, samples: Range<usize>, inputs: Inputs, targets: &mut [i32]) -> Result<(), EngineError> {
        let each = targets.len() / samples.len();
        let draw = |at: usize| mix64(fold(self.step, at as u64));
        let mut counting = vec![each; samples.len()];
        let draw_tokens = |tokens: &mut [i32]| {
            for (place, token) in tokens.iter_mut().enumerate() {
                *token = (draw(samples.start * each + place) % self.classes as u64) as i32;
            }
        };
        match inputs {
            Inputs::Tokens(tokens) => draw_tokens(tokens),
            Inputs::Padded(tokens, lengths) => {
                draw_tokens(tokens);
                for ((sample, length), counting) in samples.clone().zip(lengths).zip(&mut counting) {
                    *counting = 1 + (mix64(77 + sample as u64) % each as u64) as usize;
                    *length = *counting as i32;
                }
            }
            Inputs::Images(images) => {
                let before = samples.start * (images.len() / samples.len());
                fill_normal(images, fold(9, self.step), before as u64, 1.0);
            }
        }
        for (place, target) in targets.iter_mut().enumerate() {
            let at = samples.start * each + place;
            let padding = place % each >= counting[place / each];
            let ignored = padding || ((draw(at) >> 40).is_multiple_of(4) && at > 0);
            *target = if ignored { -100 } else { ((draw(at) >> 20) % self.classes as u64) as i32 };
        }
        Ok(())
    }
}

/// Initial parameters, away from zeros and ones.
pub fn fill(spec: &TensorSpec, out: &mut [f32]) -> Result<(), EngineError> {
    init::fill(spec, 3, 0, out);
    if spec.running.is_none() {
        let mut noise = vec![0.0; out.len()];
        fill_normal(&mut noise, key_of(&spec.name), 0, 0.05);
        out.iter_mut().zip(&noise).for_each(|(value, noise)| *value += noise);
    }
    Ok(())
}

pub fn classes(chain: &Chain) -> usize {
    if chain.image.is_some() { 3 } else { 50 }
}
