//! In which numbers a model is computed. Master parameters, gradients, norms, softmax, loss and optimizer
//! are fp32 in every precision; what changes is what activations and the parameters' compute copies are.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::chain::{BlockSpec, Chain, HeadSpec, TensorSpec};
use crate::config::Activation;
use crate::slot::Slot;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    #[default]
    Fp32,
    /// fp32 in memory; matrix products round their inputs to 19 bits where the device has units for that.
    Tf32,
    Bf16,
    /// Its range is small: the loss is scaled up, and a step that overflows is skipped.
    Fp16,
}

/// A name that is no precision's.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("the precisions are fp32, tf32, bf16 and fp16")]
pub struct UnknownPrecision;

impl FromStr for Precision {
    type Err = UnknownPrecision;

    fn from_str(name: &str) -> Result<Precision, UnknownPrecision> {
        Precision::ALL.into_iter().find(|known| known.name() == name).ok_or(UnknownPrecision)
    }
}

/// Rows of an output matrix's copy, and so columns of logits, are padded to a multiple of this: fast matrix
/// products want rows that start on multiples of 16 bytes, and vocabularies are often odd.
const LOGIT_COLUMNS: usize = 64;

impl Precision {
    pub const ALL: [Precision; 4] = [Precision::Fp32, Precision::Tf32, Precision::Bf16, Precision::Fp16];

    pub fn name(self) -> &'static str {
        match self {
            Precision::Fp32 => "fp32",
            Precision::Tf32 => "tf32",
            Precision::Bf16 => "bf16",
            Precision::Fp16 => "fp16",
        }
    }

    /// Whether layers compute on two-byte elements, with copies of the parameters made for that.
    pub fn is_half(self) -> bool {
        matches!(self, Precision::Bf16 | Precision::Fp16)
    }

    /// Bytes of an activation's element.
    pub fn bytes(self) -> usize {
        if self.is_half() { 2 } else { 4 }
    }
}

impl HeadSpec {
    /// Elements from one row of logits to the next.
    pub fn logit_columns(&self, precision: Precision) -> usize {
        match precision.is_half() {
            true => self.vocabulary.next_multiple_of(LOGIT_COLUMNS),
            false => self.vocabulary,
        }
    }
}

impl BlockSpec {
    /// Whether the activation is kept for the backward beside what it was made from. In half precision both
    /// are made at once, and making it again would cost a pass over memory.
    pub fn keeps_activation(&self, precision: Precision) -> bool {
        precision.is_half() && self.activation != Activation::SwiGlu
    }

    /// fp32 elements per row that the attention's backward works in: a number a head, and in half precision
    /// room for fused kernels: the queries' gradient in fp32 and, where heads share keys, each head's gradient
    /// of keys and values before they are added up.
    pub fn attention_scratch(&self, precision: Precision) -> usize {
        let shared = if self.kv_heads < self.heads { self.query_width() } else { 0 };
        match precision.is_half() {
            true => 2 * self.heads + self.query_width() + shared,
            false => self.heads,
        }
    }
}

/// Who uses a tensor, and as what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorUse {
    /// In chain order: more than one where it is tied.
    pub layers: Vec<usize>,
    is_fp32: bool,
    is_output: bool,
}

impl TensorUse {
    fn add(&mut self, layer: usize, slot: Slot) {
        if self.layers.last() != Some(&layer) {
            self.layers.push(layer);
        }
        self.is_fp32 |= slot.is_fp32();
        self.is_output |= slot.is_output();
    }

    /// Elements of the copy that layers compute with; `None` where they compute with the parameter itself.
    pub fn copy_elements(&self, spec: &TensorSpec, precision: Precision) -> Option<usize> {
        let copied = precision.is_half() && !self.is_fp32;
        copied.then(|| self.gradient_elements(spec, precision))
    }

    /// Elements of a tensor's gradient sum: padded like the copy, with zeros.
    pub fn gradient_elements(&self, spec: &TensorSpec, precision: Precision) -> usize {
        match precision.is_half() && self.is_output {
            true => spec.elements() / spec.shape[0] * spec.shape[0].next_multiple_of(LOGIT_COLUMNS),
            false => spec.elements(),
        }
    }
}

impl Chain {
    /// Of every tensor, in one walk through the chain: planners lay out thousands of tables.
    pub fn uses(&self) -> Vec<TensorUse> {
        let mut all = vec![TensorUse::default(); self.tensors.len()];
        for (layer, row) in self.layers.iter().enumerate() {
            row.tensors.iter().for_each(|(slot, tensor)| all[*tensor].add(layer, *slot));
        }
        all
    }

    /// The same of one tensor.
    fn use_of(&self, tensor: usize) -> TensorUse {
        let mut found = TensorUse::default();
        for (layer, row) in self.layers.iter().enumerate() {
            let own = row.tensors.iter().filter(|(_, index)| *index == tensor);
            own.for_each(|(slot, _)| found.add(layer, *slot));
        }
        found
    }

    /// [`TensorUse::copy_elements`] of a tensor.
    pub fn copy_elements(&self, tensor: usize, precision: Precision) -> Option<usize> {
        self.use_of(tensor).copy_elements(&self.tensors[tensor], precision)
    }

    /// [`TensorUse::gradient_elements`] of a tensor.
    pub fn gradient_elements(&self, tensor: usize, precision: Precision) -> usize {
        self.use_of(tensor).gradient_elements(&self.tensors[tensor], precision)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

    #[test]
    fn one_walk_says_of_every_tensor_what_a_walk_for_it_does() {
        for name in presets::NAMES.iter().copied() {
            let chain = Chain::new(&presets::preset(name).expect("it is a preset"));
            let uses = chain.uses();
            for (tensor, use_of) in uses.iter().enumerate() {
                assert_eq!(*use_of, chain.use_of(tensor), "{name}: {}", chain.tensors[tensor].name);
                assert_eq!(use_of.layers, chain.users(tensor).collect::<Vec<_>>());
            }
        }
    }
}
