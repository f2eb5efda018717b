//! Memory of the engine that was measured, by arithmetic: its state, what it keeps of the micro-batches under way, what
//! a backward takes on top, and what its process takes for itself.

use shoal_plan::{Op, Program};

use super::read::LayerSize;

/// Adam in fp32 throughout: parameters, gradients and two moments.
const STATE_BYTES: u64 = 16;

/// What the driver counts beyond tensors: the context, and kernels of the libraries, which are all loaded at the start;
/// and the buffers of the communication library. Published by those who measured, for these GPUs: 4.76 GB and 0.3 GB.
const PROCESS_BYTES: u64 = 5_060_000_000;

/// The most samples that a program has between the forward and the backward of a layer.
pub fn most_under_way(program: &Program, of_layer: usize) -> usize {
    let (mut now, mut most) = (0, 0);
    for instruction in &program.instructions {
        match instruction.op {
            Op::Forward { layer, samples, .. } if layer == of_layer => now += samples.count(),
            Op::Backward { layer, samples } if layer == of_layer => now -= samples.count(),
            _ => {}
        }
        most = most.max(now);
    }
    most
}

/// What matters of a stage on one GPU of its group.
pub struct Stage<'a> {
    pub layers: Vec<&'a LayerSize>,
    /// Samples between forward and backward, and in a micro-batch.
    pub under_way: usize,
    pub micro_batch: usize,
    /// Bytes that the backward of the stage's last layer makes for a sample before it frees anything.
    pub working_bytes: u64,
}

/// Bytes in use at the stage's fullest moment: its last layer's backward with all activations still there.
pub fn peak_bytes(stage: &Stage) -> u64 {
    let parameters: u64 = stage.layers.iter().map(|size| size.params_floats).sum();
    let kept: u64 = stage.layers.iter().map(|size| size.act_mem_bytes).sum();
    PROCESS_BYTES
        + STATE_BYTES * parameters
        + kept * stage.under_way as u64
        + stage.working_bytes * stage.micro_batch as u64
}

/// The backward of attention without fused kernels has the gradient of its probabilities and that of its scores at once:
/// fp32, for the heads that a GPU has.
pub fn attention_working_bytes(heads: usize, degree: usize, sequence: usize) -> u64 {
    2 * 4 * (heads / degree * sequence * sequence) as u64
}
