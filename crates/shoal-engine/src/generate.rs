//! What a trained model says next: predictions by the same programs and executor that training uses.

use std::ops::Range;
use std::sync::Arc;

use shoal_data::Inputs;
use shoal_kernels::random::fold;
use shoal_kernels::{CpuDevice, Device};
use shoal_model::{Chain, Precision};
use shoal_plan::one_device::table;
use shoal_plan::{Activations, DeviceOffer, Purpose, StepShape, compile, verify};

use crate::error::Result;
use crate::executor::{Batch, Executor, StepInput};
use crate::state::ModelState;

/// How the next token is chosen.
#[derive(Clone, Copy, Debug)]
pub struct Sampling {
    /// Zero takes the likeliest token; higher is more adventurous.
    pub temperature: f32,
    /// Only this many of the likeliest tokens are considered; zero considers all.
    pub top_k: usize,
    pub seed: u64,
}

/// A model that answers.
pub struct Generator {
    executor: Executor,
    offer: DeviceOffer,
    context: usize,
}

/// Prompts of equal length, end to end.
struct Prompts<'a> {
    tokens: &'a [i32],
    length: usize,
}

impl Batch for Prompts<'_> {
    fn read(&self, samples: Range<usize>, inputs: Inputs, targets: &mut [i32]) -> Result {
        let tokens = inputs.tokens();
        tokens.copy_from_slice(&self.tokens[samples.start * self.length..samples.end * self.length]);
        targets.fill(-1);
        Ok(())
    }
}

impl Generator {
    /// Room for a causal model, its parameters set by `fill`; prompts and answers fit `context` tokens together.
    pub fn new(
        chain: &Chain,
        context: usize,
        threads: usize,
        budget_bytes: u64,
        fill: impl FnOnce(&dyn Device, &mut ModelState) -> Result,
    ) -> Result<Generator> {
        assert!(chain.causal, "only a model that predicts the next token continues a text");
        let context = context.min(chain.positions);
        let device: Arc<dyn Device> = Arc::new(CpuDevice::new("cpu:0", threads, budget_bytes)?);
        let mut state = ModelState::allocate(&*device, chain, context, Precision::Fp32, None)?;
        fill(&*device, &mut state)?;
        let executor = Executor::new(device, chain.clone(), context, state)?;
        let workspace_bytes = CpuDevice::workspace_bytes(threads);
        let offer = DeviceOffer { name: "cpu:0".into(), budget_bytes, workspace_bytes, rows_enough: 2048 };
        Ok(Generator { executor, offer, context })
    }

    /// Logits of the token after each prompt. Prompts are equally long and lie end to end.
    pub fn next_logits(&mut self, tokens: &[i32], length: usize) -> Result<Vec<f32>> {
        let samples = tokens.len() / length;
        assert_eq!(samples * length, tokens.len());
        let chain = self.executor.chain();
        let precision = Precision::Fp32;
        let shape = StepShape {
            global_batch: samples,
            sequence: length,
            precision,
            optimizer_states: 0,
            gradients: Default::default(),
        };
        // One prompt at a time where they are long: memory stays small and nothing is lost.
        let micro_batch = (2048 / length).clamp(1, samples);
        let plan = table(chain, shape, &self.offer, micro_batch, Activations::Keep, false);
        let program = compile(&plan, chain, Purpose::Predict)?.remove(0);
        verify(&program, &plan, chain, Purpose::Predict)?;
        self.executor.set_sequence(length);
        let batch = Prompts { tokens, length };
        Ok(self.executor.run(&program, &StepInput::evaluate(0, &batch))?.logits)
    }

    /// Continues a prompt token by token until `most` tokens or `end`; each token goes to `on_token`.
    pub fn generate(
        &mut self,
        prompt: &[i32],
        most: usize,
        end: Option<i32>,
        sampling: Sampling,
        on_token: &mut dyn FnMut(i32),
    ) -> Result {
        let mut tokens = prompt.to_vec();
        for index in 0..most {
            let seen = &tokens[tokens.len().saturating_sub(self.context)..];
            let logits = self.next_logits(seen, seen.len())?;
            let token = choose(&logits, sampling, index as u64);
            if Some(token) == end {
                break;
            }
            on_token(token);
            tokens.push(token);
        }
        Ok(())
    }
}

/// The likeliest token.
pub fn likeliest(logits: &[f32]) -> i32 {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.map_or(0, |(token, _)| token as i32)
}

fn choose(logits: &[f32], sampling: Sampling, index: u64) -> i32 {
    if sampling.temperature <= 0.0 {
        return likeliest(logits);
    }
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    if sampling.top_k > 0 {
        order.truncate(sampling.top_k);
    }
    let highest = logits[order[0]];
    let weight = |token: &usize| f64::from((logits[*token] - highest) / sampling.temperature).exp();
    let total: f64 = order.iter().map(weight).sum();
    // A number in 0..1 that depends on the seed and the place alone.
    let mut left = (fold(sampling.seed, index) >> 11) as f64 / (1u64 << 53) as f64 * total;
    for token in &order {
        left -= weight(token);
        if left < 0.0 {
            return *token as i32;
        }
    }
    order[order.len() - 1] as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_follows_the_weights_and_the_seed() {
        let logits = [0.0, 2.0f32.ln(), f32::NEG_INFINITY, 0.0];
        let sampling = |seed| Sampling { temperature: 1.0, top_k: 0, seed };
        let mut counts = [0; 4];
        for index in 0..8000 {
            counts[choose(&logits, sampling(1), index) as usize] += 1;
        }
        assert_eq!(counts[2], 0);
        assert!((counts[1] - 4000i32).abs() < 300 && (counts[0] - 2000i32).abs() < 300, "{counts:?}");
        assert_eq!(choose(&logits, sampling(7), 3), choose(&logits, sampling(7), 3));
        assert_eq!(choose(&logits, Sampling { temperature: 1.0, top_k: 1, seed: 0 }, 5), 1);
        assert_eq!(choose(&logits, Sampling { temperature: 0.0, top_k: 0, seed: 0 }, 5), 1);
    }
}
