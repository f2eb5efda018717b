//! Final norm, output projection and cross-entropy. Where the backward follows at once, the logits become
//! their own gradient in place; where only the loss is wanted they exist a few rows at a time.

use shoal_kernels::device::Result;
use shoal_kernels::{Linear, LossMode, Mat, MatMut, Tensor};
use shoal_model::footprint::head_chunk_rows;
use shoal_model::{HeadSpec, Slot};

use crate::layer::{Call, LossSink, element};
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

/// The output matrix, with the rows of zeros that its copy ends in.
fn output_linear<'a>(spec: &HeadSpec, call: &Call, parameters: &Parameters<'a>) -> Linear<'a> {
    // Every architecture stores the output matrix like the embedding it may be tied to: a row a token.
    let weight = parameters.get(Slot::OutputWeight);
    Linear { weight, inputs: spec.width, outputs: spec.logit_columns(call.precision), in_out: false }
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
    let mut statistics = call.float_rows_of("norm statistics", norm.kind.statistics())?;
    let mut normed = call.rows_of("normed rows", spec.width)?;
    norm.forward(device, parameters, Mat::new(&x, rows, spec.width), &mut statistics, &mut normed)?;
    let columns = spec.logit_columns(call.precision);
    let mut logits = call.rows_of("logits", columns)?;
    let target = MatMut::new(&mut logits, rows, columns);
    let input = Mat::new(&normed, rows, spec.width);
    device.linear(input, output_linear(spec, call, parameters), None, None, target)?;
    let mode = LossMode::Gradient { scale: loss.scale };
    let rows_of_logits = MatMut::columns(&mut logits, rows, 0, spec.vocabulary, columns);
    device.cross_entropy(&targets, 0, mode, rows_of_logits, loss.sum)?;
    Ok(HeadSaved { x, _targets: targets, statistics, logits })
}

/// The loss alone: logits exist some rows at a time.
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
    let mut statistics = call.float_rows_of("norm statistics", norm.kind.statistics())?;
    let mut normed = call.rows_of("normed rows", spec.width)?;
    norm.forward(device, parameters, Mat::new(x, rows, spec.width), &mut statistics, &mut normed)?;
    let chunk = rows.min(head_chunk_rows(call.precision));
    let columns = spec.logit_columns(call.precision);
    let kind = element(call.precision);
    let mut logits = Tensor::of(device.arena(), "a chunk of logits", kind, chunk * columns)?;
    let linear = output_linear(spec, call, parameters);
    for first in (0..rows).step_by(chunk) {
        let count = chunk.min(rows - first);
        let input = Mat::new(&normed, rows, spec.width).rows(first, count);
        let target = MatMut::new(&mut logits, chunk, columns).rows(0, count);
        device.linear(input, linear, None, None, target)?;
        let rows_of_logits = MatMut::columns(&mut logits, count, 0, spec.vocabulary, columns);
        device.cross_entropy(targets, first, LossMode::LossOnly, rows_of_logits, loss.sum)?;
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
    let columns = spec.logit_columns(call.precision);
    let HeadSaved { x, statistics, logits, _targets } = saved;
    // First the gradient of the normed rows; the norm's backward then leaves the rows themselves there.
    let mut normed = call.rows_of("normed rows", spec.width)?;
    let target = MatMut::new(&mut normed, rows, spec.width);
    let slopes = Mat::new(&logits, rows, columns);
    device.linear_input_gradient(slopes, output_linear(spec, call, parameters), target, false)?;
    let mut dx = call.rows_of("gradient of the head's input", spec.width)?;
    let input = Mat::new(&x, rows, spec.width);
    let to = (&mut dx, false);
    norm.backward(device, parameters, gradients, input, &statistics, &mut normed, to, None)?;
    let (sum, more) = gradients.add_to(Slot::OutputWeight);
    device.linear_weight_gradient(Mat::new(&normed, rows, spec.width), slopes, sum, false, more)?;
    Ok(dx)
}

/// Logits of each sample's last position, in rows of [`HeadSpec::logit_columns`]: what the model would say
/// next.
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
    let kind = element(call.precision);
    let mut normed = Tensor::of(arena, "normed rows", kind, samples * spec.width)?;
    let (stride, last) = (call.sequence * spec.width, (call.sequence - 1) * spec.width);
    let rows = Mat { tensor: x, offset: last, rows: samples, cols: spec.width, stride };
    norm.forward(device, parameters, rows, &mut statistics, &mut normed)?;
    let columns = spec.logit_columns(call.precision);
    let mut logits = Tensor::of(arena, "next-token logits", kind, samples * columns)?;
    let target = MatMut::new(&mut logits, samples, columns);
    let input = Mat::new(&normed, samples, spec.width);
    device.linear(input, output_linear(spec, call, parameters), None, None, target)?;
    Ok(logits)
}
