//! Final norm, output projection and cross-entropy. Where the backward follows at once, the logits become
//! their own gradient in place; where only the loss is wanted they exist a few rows at a time.

use shoal_kernels::device::Result;
use shoal_kernels::{Linear, LossMode, Mat, MatMut, Tensor};
use shoal_model::footprint::HEAD_CHUNK_ROWS;
use shoal_model::{HeadSpec, Slot};

use crate::layer::{Call, LossSink};
use crate::norm::NormSite;
use crate::parameters::{Gradients, Parameters};

/// What the head keeps for its backward.
pub struct HeadSaved {
    x: Tensor,
    /// Kept only because it arrived with `x`; released with the rest.
    _targets: Tensor,
    statistics: Tensor,
    /// Already the gradient of the loss.
    logits: Tensor,
}

fn norm_site(spec: &HeadSpec) -> NormSite {
    NormSite::new(spec.norm, spec.norm_eps, Slot::FinalNormWeight, Slot::FinalNormBias)
}

fn output_linear<'a>(spec: &HeadSpec, parameters: &Parameters<'a>) -> Linear<'a> {
    // Every architecture stores the output matrix like the embedding it may be tied to: a row a token.
    let weight = parameters.get(Slot::OutputWeight);
    Linear { weight, inputs: spec.width, outputs: spec.vocabulary, in_out: false }
}

pub(crate) fn forward(
    spec: &HeadSpec,
    call: &Call,
    parameters: &Parameters,
    x: Tensor,
    targets: Tensor,
    loss: LossSink,
) -> Result<HeadSaved> {
    let (device, rows) = (call.device, call.rows());
    let norm = norm_site(spec);
    let mut statistics = call.rows_of("norm statistics", norm.kind.statistics())?;
    let mut normed = call.rows_of("normed rows", spec.width)?;
    norm.forward(device, parameters, Mat::new(&x, rows, spec.width), &mut statistics, &mut normed)?;
    let mut logits = call.rows_of("logits", spec.vocabulary)?;
    let target = MatMut::new(&mut logits, rows, spec.vocabulary);
    device.linear(
        Mat::new(&normed, rows, spec.width),
        output_linear(spec, parameters),
        None,
        None,
        target,
    )?;
    let mode = LossMode::Gradient { scale: loss.scale };
    device.cross_entropy(&targets, 0..rows, spec.vocabulary, mode, &mut logits, loss.sum)?;
    Ok(HeadSaved { x, _targets: targets, statistics, logits })
}

/// The loss alone: logits exist [`HEAD_CHUNK_ROWS`] rows at a time.
pub(crate) fn loss_only(
    spec: &HeadSpec,
    call: &Call,
    parameters: &Parameters,
    x: &Tensor,
    targets: &Tensor,
    loss: LossSink,
) -> Result {
    let (device, rows) = (call.device, call.rows());
    let norm = norm_site(spec);
    let mut statistics = call.rows_of("norm statistics", norm.kind.statistics())?;
    let mut normed = call.rows_of("normed rows", spec.width)?;
    norm.forward(device, parameters, Mat::new(x, rows, spec.width), &mut statistics, &mut normed)?;
    let chunk = rows.min(HEAD_CHUNK_ROWS);
    let mut logits = Tensor::new(device.arena(), "a chunk of logits", chunk * spec.vocabulary)?;
    let linear = output_linear(spec, parameters);
    for first in (0..rows).step_by(chunk) {
        let count = chunk.min(rows - first);
        let input = Mat::new(&normed, rows, spec.width).rows(first, count);
        let target = MatMut::new(&mut logits, chunk, spec.vocabulary).rows(0, count);
        device.linear(input, linear, None, None, target)?;
        let range = first..first + count;
        device.cross_entropy(targets, range, spec.vocabulary, LossMode::LossOnly, &mut logits, loss.sum)?;
    }
    Ok(())
}

pub(crate) fn backward(
    spec: &HeadSpec,
    call: &Call,
    parameters: &Parameters,
    gradients: &mut Gradients,
    saved: HeadSaved,
) -> Result<Tensor> {
    let (device, rows) = (call.device, call.rows());
    let norm = norm_site(spec);
    let input = Mat::new(&saved.x, rows, spec.width);
    let logits = Mat::new(&saved.logits, rows, spec.vocabulary);
    let mut normed = call.rows_of("normed rows", spec.width)?;
    norm.again(device, parameters, input, &saved.statistics, &mut normed)?;
    let (sum, more) = gradients.add_to(Slot::OutputWeight);
    device.linear_weight_gradient(Mat::new(&normed, rows, spec.width), logits, sum, false, more)?;
    let target = MatMut::new(&mut normed, rows, spec.width);
    device.linear_input_gradient(logits, output_linear(spec, parameters), target, false)?;
    let HeadSaved { x, statistics, logits, _targets } = saved;
    drop(logits);
    let mut dx = call.rows_of("gradient of the head's input", spec.width)?;
    let input = Mat::new(&x, rows, spec.width);
    norm.backward(device, parameters, gradients, input, &statistics, &normed, &mut dx, false)?;
    Ok(dx)
}

/// Logits of each sample's last position: what the model would say next.
pub fn next_token_logits(
    spec: &HeadSpec,
    call: &Call,
    parameters: &Parameters,
    x: &Tensor,
) -> Result<Tensor> {
    let (device, samples) = (call.device, call.samples.len());
    let norm = norm_site(spec);
    let arena = device.arena();
    let mut statistics = Tensor::new(arena, "norm statistics", samples * norm.kind.statistics())?;
    let mut normed = Tensor::new(arena, "normed rows", samples * spec.width)?;
    let (stride, last) = (call.sequence * spec.width, (call.sequence - 1) * spec.width);
    let rows = Mat { tensor: x, offset: last, rows: samples, cols: spec.width, stride };
    norm.forward(device, parameters, rows, &mut statistics, &mut normed)?;
    let mut logits = Tensor::new(arena, "next-token logits", samples * spec.vocabulary)?;
    let target = MatMut::new(&mut logits, samples, spec.vocabulary);
    let input = Mat::new(&normed, samples, spec.width);
    device.linear(input, output_linear(spec, parameters), None, None, target)?;
    Ok(logits)
}
