//! Optimizers: what state a tensor needs beside itself, and one update of many.

use serde::{Deserialize, Serialize};
use shoal_kernels::device::Result;
use shoal_kernels::{AdamW, Device, Guard, Sgd, Updated};
use shoal_model::TensorSpec;

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    AdamW { beta1: f32, beta2: f32, eps: f32 },
    Sgd { momentum: f32 },
}

/// Which tensors are decayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// Norms and biases are left alone.
    Matrices,
    All,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct OptimizerSettings {
    pub kind: OptimizerKind,
    /// The peak learning rate.
    pub lr: f64,
    pub weight_decay: f32,
    pub decay: Decay,
    pub clip_norm: Option<f32>,
}

impl OptimizerSettings {
    /// Names of the state tensors each parameter has beside itself, as checkpoints call them.
    pub fn state_names(&self) -> &'static [&'static str] {
        match self.kind {
            OptimizerKind::AdamW { .. } => &["first_moment", "second_moment"],
            OptimizerKind::Sgd { momentum: 0.0 } => &[],
            OptimizerKind::Sgd { .. } => &["velocity"],
        }
    }

    /// Which decay a tensor has.
    pub fn decay_of(&self, spec: &TensorSpec) -> f32 {
        let decayed = self.decay == Decay::All || spec.is_matrix();
        if decayed { self.weight_decay } else { 0.0 }
    }

    /// Applies update number `update` (from 1) to the tensors. `lr` is the scheduled rate.
    pub fn apply(
        &self,
        device: &dyn Device,
        lr: f64,
        update: u64,
        guard: Guard,
        tensors: &mut [Updated],
    ) -> Result {
        let lr = lr as f32;
        match self.kind {
            OptimizerKind::AdamW { beta1, beta2, eps } => {
                device.adamw(&AdamW { lr, beta1, beta2, eps, update }, guard, tensors)
            }
            OptimizerKind::Sgd { momentum } => device.sgd(&Sgd { lr, momentum, update }, guard, tensors),
        }
    }
}
