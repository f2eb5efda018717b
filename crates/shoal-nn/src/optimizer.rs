//! Optimizers: what state a tensor needs beside itself, and one update of it.

use serde::{Deserialize, Serialize};
use shoal_kernels::device::Result;
use shoal_kernels::{AdamW, Clip, Device, Sgd, Tensor};
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

    /// Applies update number `update` (from 1) to one tensor. `lr` is the scheduled rate.
    #[allow(clippy::too_many_arguments)]
    pub fn apply(
        &self,
        device: &dyn Device,
        spec: &TensorSpec,
        lr: f64,
        update: u64,
        norm_squared: &Tensor,
        gradient: &Tensor,
        state: &mut [Tensor],
        parameter: &mut Tensor,
    ) -> Result {
        let clip = self.clip_norm.map(|max| Clip { norm_squared, max });
        let decayed = self.decay == Decay::All || spec.is_matrix();
        let weight_decay = if decayed { self.weight_decay } else { 0.0 };
        match (self.kind, state) {
            (OptimizerKind::AdamW { beta1, beta2, eps }, [first, second]) => {
                let settings = AdamW { lr: lr as f32, beta1, beta2, eps, weight_decay, update };
                device.adamw(&settings, clip, gradient, first, second, parameter)
            }
            (OptimizerKind::Sgd { momentum }, state) => {
                let settings = Sgd { lr: lr as f32, momentum, weight_decay, update };
                device.sgd(&settings, clip, gradient, state.first_mut(), parameter)
            }
            (kind, state) => panic!("{kind:?} with {} state tensors", state.len()),
        }
    }
}
