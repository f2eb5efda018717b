//! Parameters, gradient sums and optimizer state of a model on one device. Every tensor carries a version,
//! the number of updates it has seen: an instruction of step n reads version n and finds nothing else.

use shoal_kernels::{Device, Element, Tensor};
use shoal_model::{Chain, Precision, TensorSpec};
use shoal_nn::layer::element;
use shoal_nn::{GradientSum, OptimizerSettings, init};

use crate::error::Result;

/// One tensor of the model and everything kept for it.
pub struct Held {
    /// The master, in fp32.
    pub parameter: Tensor,
    /// What layers compute with, where that is not the master itself: the master, rounded.
    pub copy: Option<Tensor>,
    /// None while an instruction has it, or where nothing is trained.
    pub gradient: Option<GradientSum>,
    pub optimizer: Vec<Tensor>,
    /// Updates applied so far.
    pub version: u64,
}

impl Held {
    /// What layers compute with.
    pub fn compute(&self) -> &Tensor {
        self.copy.as_ref().unwrap_or(&self.parameter)
    }
}

pub struct ModelState {
    pub tensors: Vec<Held>,
    /// Cosines and sines by position, for rotary models.
    pub rotary: Option<Tensor>,
    pub precision: Precision,
}

impl ModelState {
    /// Room for a model; parameters are unset until [`ModelState::fill`] or a checkpoint sets them.
    /// Without an optimizer there is neither gradient nor optimizer state: inference.
    pub fn allocate(
        device: &dyn Device,
        chain: &Chain,
        sequence: usize,
        precision: Precision,
        optimizer: Option<&OptimizerSettings>,
    ) -> Result<ModelState> {
        assert!(
            device.computes(element(precision)),
            "ask a device what it computes in before planning for it"
        );
        let allocate = |(index, spec)| {
            let copy = chain.copy_elements(index, precision).map(|elements| (element(precision), elements));
            let gradient = chain.gradient_elements(index, precision);
            allocate_one(device, spec, copy, gradient, optimizer)
        };
        let tensors = chain.tensors.iter().enumerate().map(allocate).collect::<Result<_>>()?;
        let rotary = match init::rotary_table(chain, sequence) {
            Some(table) => {
                let mut tensor = Tensor::new(device.arena(), "the rotary table", table.len())?;
                device.write_floats(&mut tensor, &mut |out| out.copy_from_slice(&table))?;
                Some(tensor)
            }
            None => None,
        };
        Ok(ModelState { tensors, rotary, precision })
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
        self.refresh_copies(device)
    }

    /// Makes the compute copies anew from masters that were set.
    pub fn refresh_copies(&mut self, device: &dyn Device) -> Result {
        for held in &mut self.tensors {
            if let Some(copy) = &mut held.copy {
                device.convert(&held.parameter, copy)?;
            }
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
    copy: Option<(Element, usize)>,
    gradient_elements: usize,
    optimizer: Option<&OptimizerSettings>,
) -> Result<Held> {
    let arena = device.arena();
    let who = |what: &str| format!("{what} {}", spec.name);
    let elements = spec.elements();
    let parameter = Tensor::new(arena, &who("parameter"), elements)?;
    let copy = copy
        .map(|(element, elements)| Tensor::of(arena, &who("compute copy of"), element, elements))
        .transpose()?;
    let (gradient, states) = match optimizer {
        None => (None, Vec::new()),
        Some(settings) => {
            let sum = Tensor::new(arena, &who("gradient of"), gradient_elements)?;
            let state = |name: &&str| -> Result<Tensor> {
                let mut state = Tensor::new(arena, &who(&format!("{name} of")), elements)?;
                device.zero(&mut state)?;
                Ok(state)
            };
            let states = settings.state_names().iter().map(state).collect::<Result<_>>()?;
            (Some(GradientSum { sum, started: false }), states)
        }
    };
    Ok(Held { parameter, copy, gradient, optimizer: states, version: 0 })
}
