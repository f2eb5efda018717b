//! Parameters, gradient sums and optimizer state of a model on one device. Every tensor carries a version,
//! the number of updates it has seen: an instruction of step n reads version n and finds nothing else.

use shoal_kernels::{Device, Tensor};
use shoal_model::{Chain, TensorSpec};
use shoal_nn::{GradientSum, OptimizerSettings, init};

use crate::error::Result;

/// One tensor of the model and everything kept for it.
pub struct Held {
    pub parameter: Tensor,
    /// None while an instruction has it, or where nothing is trained.
    pub gradient: Option<GradientSum>,
    pub optimizer: Vec<Tensor>,
    /// Updates applied so far.
    pub version: u64,
}

pub struct ModelState {
    pub tensors: Vec<Held>,
    /// Cosines and sines by position, for rotary models.
    pub rotary: Option<Tensor>,
}

impl ModelState {
    /// Room for a model; parameters are unset until [`ModelState::fill`] or a checkpoint sets them.
    /// Without an optimizer there is neither gradient nor optimizer state: inference.
    pub fn allocate(
        device: &dyn Device,
        chain: &Chain,
        sequence: usize,
        optimizer: Option<&OptimizerSettings>,
    ) -> Result<ModelState> {
        let tensors =
            chain.tensors.iter().map(|spec| allocate_one(device, spec, optimizer)).collect::<Result<_>>()?;
        let rotary = match init::rotary_table(chain, sequence) {
            Some(table) => {
                let mut tensor = Tensor::new(device.arena(), "the rotary table", table.len())?;
                device.write_floats(&mut tensor, &mut |out| out.copy_from_slice(&table))?;
                Some(tensor)
            }
            None => None,
        };
        Ok(ModelState { tensors, rotary })
    }

    /// Sets every parameter, tensor by tensor.
    pub fn fill(
        &mut self,
        device: &dyn Device,
        chain: &Chain,
        mut set: impl FnMut(&TensorSpec, &mut [f32]) -> Result,
    ) -> Result {
        for (held, spec) in self.tensors.iter_mut().zip(&chain.tensors) {
            write(device, &mut held.parameter, |out| set(spec, out))?;
        }
        Ok(())
    }
}

/// Sets a tensor by a function that may fail.
pub fn write(device: &dyn Device, tensor: &mut Tensor, set: impl FnOnce(&mut [f32]) -> Result) -> Result {
    let (mut set, mut result) = (Some(set), Ok(()));
    device.write_floats(tensor, &mut |out| {
        if let Some(set) = set.take() {
            result = set(out);
        }
    })?;
    result
}

fn allocate_one(
    device: &dyn Device,
    spec: &TensorSpec,
    optimizer: Option<&OptimizerSettings>,
) -> Result<Held> {
    let arena = device.arena();
    let who = |what: &str| format!("{what} {}", spec.name);
    let elements = spec.elements();
    let parameter = Tensor::new(arena, &who("parameter"), elements)?;
    let (gradient, states) = match optimizer {
        None => (None, Vec::new()),
        Some(settings) => {
            let sum = Tensor::new(arena, &who("gradient of"), elements)?;
            let state = |name: &&str| -> Result<Tensor> {
                let mut state = Tensor::new(arena, &who(&format!("{name} of")), elements)?;
                device.zero(&mut state)?;
                Ok(state)
            };
            let states = settings.state_names().iter().map(state).collect::<Result<_>>()?;
            (Some(GradientSum { sum, started: false }), states)
        }
    };
    Ok(Held { parameter, gradient, optimizer: states, version: 0 })
}
