//! Final norm, output projection and cross-entropy; before them a dense layer with an activation, where the
//! model has one. A head that says a sample's class works on the sample's first row alone. Where the backward
//! follows at once, the logits become their own gradient in place; where only the loss is wanted they exist a
//! few rows at a time.

use shoal_kernels::device::Result;
use shoal_kernels::{ClassLoss, Element, Gelu, Linear, LossMode, Mat, MatMut, Tensor};
use shoal_model::footprint::head_chunk_rows;
use shoal_model::{HeadSpec, Predicts, Slot};

use crate::layer::{Call, LossSink, element, gelu};
use crate::norm::NormSite;
use crate::parameters::{Gradients, Parameters};

/// What the head keeps for its backward.
pub struct HeadSaved {
    x: Tensor,
    /// Kept only because it arrived with `x`; released with the rest.
    _targets: Tensor,
    transformed: Option<Transformed>,
    /// Of the norm, where there is one.
    statistics: Option<Tensor>,
    /// Already the gradient of the loss.
    logits: Tensor,
}

/// What a dense layer makes.
struct Transformed {
    /// The projection.
    before: Tensor,
    /// Its activation, which is normed.
    after: Tensor,
}

fn norm_site(spec: &HeadSpec) -> Option<NormSite> {
    let site = |norm| NormSite::new(norm, spec.norm_eps, Slot::FinalNormWeight, Slot::FinalNormBias);
    spec.norm.map(site)
}

/// The activation of the dense layer, where there is one.
fn transform(spec: &HeadSpec) -> Option<Gelu> {
    spec.transform.map(|activation| gelu(activation).expect("a head's activation is not gated"))
}

/// The dense layer's matrix; every architecture that has one stores it as [out, in].
fn transform_linear<'a>(spec: &HeadSpec, parameters: &Parameters<'a>) -> Linear<'a> {
    let weight = parameters.get(Slot::TransformWeight);
    Linear { weight, inputs: spec.width, outputs: spec.width, in_out: false }
}

/// The output matrix, with the rows of zeros that its copy ends in.
fn output_linear<'a>(spec: &HeadSpec, call: &Call, parameters: &Parameters<'a>) -> Linear<'a> {
    // Every architecture stores the output matrix like the embedding it may be tied to: a row a token.
    let weight = parameters.get(Slot::OutputWeight);
    Linear { weight, inputs: spec.width, outputs: spec.logit_columns(call.precision), in_out: false }
}

/// The rows that have logits.
fn logit_rows<'a>(spec: &HeadSpec, call: &Call, x: &'a Tensor) -> Mat<'a> {
    let rows = spec.rows(call.samples.len(), call.sequence);
    match spec.predicts {
        Predicts::NextToken | Predicts::OwnToken => Mat::new(x, rows, spec.width),
        Predicts::Class => Mat::columns(x, rows, 0, spec.width, call.sequence * spec.width),
    }
}

/// Adds up the losses of rows of logits, whose targets start at `first`; the logits become what `mode` says.
fn add_losses(
    spec: &HeadSpec,
    call: &Call,
    (targets, first): (&Tensor, usize),
    mode: LossMode,
    logits: MatMut,
    loss: &mut LossSink,
) -> Result {
    match spec.predicts {
        Predicts::NextToken | Predicts::OwnToken => {
            call.device.cross_entropy(targets, first, mode, logits, loss.sum)
        }
        Predicts::Class => {
            // Held-out losses are those of the targets as they are.
            let smoothing = if call.randomness.is_some() { spec.label_smoothing } else { 0.0 };
            let (settings, correct) = (ClassLoss { mode, smoothing }, loss.correct.as_deref_mut());
            call.device.class_loss(targets, first, settings, logits, loss.sum, correct)
        }
    }
}

/// Rows on their way to the logits.
struct Normed {
    transformed: Option<Transformed>,
    /// Statistics and normed rows, where there is a norm.
    normed: Option<(Tensor, Tensor)>,
}

impl Normed {
    /// The rows that are projected, from those that came in.
    fn rows<'a>(&'a self, x: Mat<'a>) -> Mat<'a> {
        match (&self.normed, &self.transformed) {
            (Some((_, normed)), _) => Mat::new(normed, x.rows, x.cols),
            (None, Some(made)) => Mat::new(&made.after, x.rows, x.cols),
            (None, None) => x,
        }
    }
}

/// Everything before the output projection.
fn norm_rows(spec: &HeadSpec, call: &Call, parameters: &Parameters, x: Mat) -> Result<Normed> {
    let (device, norm, kind) = (call.device, norm_site(spec), element(call.precision));
    let room = |what: &str| call.room(what, kind, x.rows * spec.width);
    let transformed = match transform(spec) {
        None => None,
        Some(kind) => {
            let (mut before, mut after) = (room("the head's projection")?, room("the head's activation")?);
            let (linear, bias) = (transform_linear(spec, parameters), parameters.get(Slot::TransformBias));
            device.linear_gelu(kind, x, linear, Some(bias), &mut before, &mut after)?;
            Some(Transformed { before, after })
        }
    };
    let Some(norm) = norm else { return Ok(Normed { transformed, normed: None }) };
    let mut statistics = call.room("norm statistics", Element::F32, x.rows * norm.kind.statistics())?;
    let mut normed = room("normed rows")?;
    let input = transformed.as_ref().map_or(x, |made| Mat::new(&made.after, x.rows, spec.width));
    norm.forward(device, parameters, input, &mut statistics, &mut normed)?;
    Ok(Normed { transformed, normed: Some((statistics, normed)) })
}

pub(crate) fn forward(
    spec: &HeadSpec,
    call: &Call,
    parameters: &Parameters,
    x: Tensor,
    targets: Tensor,
    mut loss: LossSink,
) -> Result<HeadSaved> {
    let (device, rows) = (call.device, spec.rows(call.samples.len(), call.sequence));
    let made = norm_rows(spec, call, parameters, logit_rows(spec, call, &x))?;
    let columns = spec.logit_columns(call.precision);
    let mut logits = call.room("logits", element(call.precision), rows * columns)?;
    let target = MatMut::new(&mut logits, rows, columns);
    let (input, bias) = (made.rows(logit_rows(spec, call, &x)), parameters.optional(Slot::OutputBias));
    device.linear(input, output_linear(spec, call, parameters), bias, None, target)?;
    let mode = LossMode::Gradient { scale: loss.scale };
    let rows_of_logits = MatMut::columns(&mut logits, rows, 0, spec.vocabulary, columns);
    add_losses(spec, call, (&targets, 0), mode, rows_of_logits, &mut loss)?;
    let Normed { transformed, normed } = made;
    let statistics = normed.map(|(statistics, _)| statistics);
    Ok(HeadSaved { x, _targets: targets, transformed, statistics, logits })
}

/// The loss alone: logits exist some rows at a time.
pub(crate) fn loss_only(
    spec: &HeadSpec,
    call: &Call,
    parameters: &Parameters,
    x: &Tensor,
    targets: &Tensor,
    mut loss: LossSink,
) -> Result {
    let (device, rows) = (call.device, spec.rows(call.samples.len(), call.sequence));
    let made = norm_rows(spec, call, parameters, logit_rows(spec, call, x))?;
    let chunk = rows.min(head_chunk_rows(call.precision));
    let columns = spec.logit_columns(call.precision);
    let mut logits = call.room("a chunk of logits", element(call.precision), chunk * columns)?;
    let (linear, bias) = (output_linear(spec, call, parameters), parameters.optional(Slot::OutputBias));
    for first in (0..rows).step_by(chunk) {
        let count = chunk.min(rows - first);
        let input = made.rows(logit_rows(spec, call, x)).rows(first, count);
        let target = MatMut::new(&mut logits, chunk, columns).rows(0, count);
        device.linear(input, linear, bias, None, target)?;
        let rows_of_logits = MatMut::columns(&mut logits, count, 0, spec.vocabulary, columns);
        add_losses(spec, call, (targets, first), LossMode::LossOnly, rows_of_logits, &mut loss)?;
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
    let (device, rows) = (call.device, spec.rows(call.samples.len(), call.sequence));
    let norm = norm_site(spec);
    let columns = spec.logit_columns(call.precision);
    let HeadSaved { x, transformed, statistics, logits, _targets } = saved;
    // First the gradient of the normed rows; the norm's backward then leaves the rows themselves there.
    let room = |what: &str| call.room(what, element(call.precision), rows * spec.width);
    let mut normed = room("normed rows")?;
    let target = MatMut::new(&mut normed, rows, spec.width);
    let slopes = Mat::new(&logits, rows, columns);
    device.linear_input_gradient(slopes, output_linear(spec, call, parameters), target, false)?;
    let x = logit_rows(spec, call, &x);
    let input = transformed.as_ref().map_or(x, |made| Mat::new(&made.after, rows, spec.width));
    let mut dx = None;
    if let Some((norm, statistics)) = norm.zip(statistics.as_ref()) {
        let dx = dx.insert(room("gradient of the norm's input")?);
        norm.backward(device, parameters, gradients, input, statistics, &mut normed, (dx, false), None)?;
    }
    let projected = if dx.is_some() { Mat::new(&normed, rows, spec.width) } else { input };
    let (sum, more) = gradients.add_to(Slot::OutputWeight);
    device.linear_weight_gradient(projected, slopes, sum, false, more)?;
    if gradients.has(Slot::OutputBias) {
        let (sum, more) = gradients.add_to(Slot::OutputBias);
        device.bias_gradient(slopes, sum, more)?;
    }
    // Without a norm the gradient of what is projected is that of what came in.
    let Some(mut dx) = dx else { return all_rows(spec, call, normed) };
    let (Some(kind), Some(Transformed { mut before, .. })) = (transform(spec), transformed) else {
        return all_rows(spec, call, dx);
    };
    device.gelu_backward(kind, &mut before, &mut dx)?;
    let dy = Mat::new(&dx, rows, spec.width);
    let (sum, more) = gradients.add_to(Slot::TransformWeight);
    device.linear_weight_gradient(x, dy, sum, false, more)?;
    let (sum, more) = gradients.add_to(Slot::TransformBias);
    device.bias_gradient(dy, sum, more)?;
    let target = MatMut::new(&mut normed, rows, spec.width);
    device.linear_input_gradient(dy, transform_linear(spec, parameters), target, false)?;
    all_rows(spec, call, normed)
}

/// The gradient of all rows from that of the rows that have logits: the others' is zero.
fn all_rows(spec: &HeadSpec, call: &Call, dx: Tensor) -> Result<Tensor> {
    match spec.predicts {
        Predicts::NextToken | Predicts::OwnToken => Ok(dx),
        Predicts::Class => {
            let (device, samples) = (call.device, call.samples.len());
            let mut all = call.rows_of("gradient of all rows", spec.width)?;
            device.zero(&mut all)?;
            let target = MatMut::columns(&mut all, samples, 0, spec.width, call.sequence * spec.width);
            device.set_rows(Some(Mat::new(&dx, samples, spec.width)), target)?;
            Ok(all)
        }
    }
}

/// Logits in rows of [`HeadSpec::logit_columns`]: of each sample's last position, which is what a model that
/// predicts the next token would say next; or of every row that has logits.
pub fn predict(spec: &HeadSpec, call: &Call, parameters: &Parameters, x: &Tensor) -> Result<Tensor> {
    let (device, rows) = (call.device, spec.predicted_rows(call.samples.len(), call.sequence));
    let all = logit_rows(spec, call, x);
    let x = match spec.predicts {
        Predicts::OwnToken | Predicts::Class => all,
        Predicts::NextToken => {
            let (stride, last) = (call.sequence * spec.width, (call.sequence - 1) * spec.width);
            Mat { offset: last, rows, stride, ..all }
        }
    };
    let made = norm_rows(spec, call, parameters, x)?;
    let columns = spec.logit_columns(call.precision);
    let mut logits = call.room("predicted logits", element(call.precision), rows * columns)?;
    let target = MatMut::new(&mut logits, rows, columns);
    let (input, bias) = (made.rows(x), parameters.optional(Slot::OutputBias));
    device.linear(input, output_linear(spec, call, parameters), bias, None, target)?;
    Ok(logits)
}
