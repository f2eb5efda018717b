//! A convolution and what follows it: batch norm, the sum with another branch, a pool, ReLU, dropout. Kept are the
//! input, what the norm was given, where a maximum was found, and a bit for each number that the ReLU let through.
//!
//! A batch norm takes groups of samples together, and a plan may cut a group into micro-batches. So its forward
//! and backward come in two parts: [`begin`] adds a micro-batch's share to the statistics of its groups, and
//! [`forward`] goes on when they are complete; likewise [`begin_backward`] and [`backward`].

use std::collections::HashMap;
use std::ops::Range;

use shoal_kernels::device::Result;
use shoal_kernels::{ColumnNorm, Device, Element, Filters, Mat, NormGradients, Tensor, Window};
use shoal_model::{BatchNorm, ConvolutionSpec, Slot};

use crate::layer::{Call, element};
use crate::parameters::{Gradients, Parameters};
use crate::pool::{Pooling, drop_some};

/// What a batch norm knows of a group of samples.
pub struct Group {
    /// Means, then variances.
    statistics: Tensor,
    /// Pixels that they are made of.
    rows: usize,
    /// What all its members' gradients depend on.
    sums: Option<Tensor>,
}

/// A device's share of what is known of a group: pixels, and two numbers a column.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupShare {
    pub rows: u64,
    pub columns: Vec<f32>,
}

impl Group {
    /// This device's share of the statistics, or of the backward's sums.
    ///
    /// # Panics
    /// If the backward has not begun.
    pub fn share(&self, device: &dyn Device, backward: bool) -> Result<GroupShare> {
        let tensor = match backward {
            false => &self.statistics,
            true => self.sums.as_ref().expect("the backward began it"),
        };
        Ok(GroupShare { rows: self.rows as u64, columns: device.host_floats(tensor)?.into_owned() })
    }

    /// Takes the shares of all devices for the whole, in their order: every device comes to the same bits.
    pub fn complete(&mut self, device: &dyn Device, backward: bool, shares: &[GroupShare]) -> Result {
        let whole = if backward { added(shares) } else { merged(shares) };
        let tensor = match backward {
            false => &mut self.statistics,
            true => self.sums.as_mut().expect("the backward began it"),
        };
        device.write_floats(tensor, &mut |out| out.copy_from_slice(&whole))?;
        if !backward {
            self.rows = shares.iter().map(|share| share.rows as usize).sum();
        }
        Ok(())
    }
}

fn added(shares: &[GroupShare]) -> Vec<f32> {
    let columns = 0..shares[0].columns.len();
    columns.map(|at| shares.iter().map(|share| f64::from(share.columns[at])).sum::<f64>() as f32).collect()
}

/// Means, then variances, of all rows: the variance within shares, and that of their means.
fn merged(shares: &[GroupShare]) -> Vec<f32> {
    let columns = shares[0].columns.len() / 2;
    let rows: f64 = shares.iter().map(|share| share.rows as f64).sum();
    let weighted = |value: &dyn Fn(&GroupShare) -> f64| -> f64 {
        shares.iter().map(|share| share.rows as f64 * value(share)).sum::<f64>() / rows
    };
    let mut whole = vec![0.0; 2 * columns];
    for at in 0..columns {
        let mean = weighted(&|share| f64::from(share.columns[at]));
        let variance = weighted(&|share| {
            f64::from(share.columns[columns + at]) + (f64::from(share.columns[at]) - mean).powi(2)
        });
        (whole[at], whole[columns + at]) = (mean as f32, variance as f32);
    }
    whole
}

/// A layer's groups by their number, as far as their samples have begun.
pub type Groups = HashMap<usize, Group>;

/// A forward that waits for the statistics of its groups.
pub struct Begun {
    x: Tensor,
    before: Tensor,
}

/// What the layer keeps for its backward.
pub struct ConvolutionSaved {
    x: Tensor,
    /// What the norm was given; not there where it will be made again from the input.
    before: Option<Tensor>,
    /// Where under the window maxima were.
    places: Option<Tensor>,
    mask: Option<Tensor>,
}

/// A backward that waits for the sums of its groups.
pub struct BegunBackward {
    x: Tensor,
    before: Tensor,
    mask: Option<Tensor>,
    /// The gradient of what the norm made, as far as the ReLU's is not taken yet.
    gradient: Tensor,
}

/// Activations.
fn room(call: &Call, what: &str, elements: usize) -> Result<Tensor> {
    call.room(what, element(call.precision), elements)
}

/// Numbers of four bytes, in any precision.
fn words(call: &Call, what: &str, elements: usize) -> Result<Tensor> {
    call.room(what, Element::F32, elements)
}

fn window(spec: &ConvolutionSpec, call: &Call) -> Window {
    let (height, width, channels) = spec.image;
    let (kernel, stride, padding) = (spec.kernel, spec.stride, spec.padding);
    Window { samples: call.samples.len(), height, width, channels, kernel, stride, padding }
}

fn scratch(spec: &ConvolutionSpec, call: &Call) -> Result<Option<Tensor>> {
    let elements = spec.scratch_elements(call.samples.len(), call.precision);
    elements.map(|elements| words(call, "pixels under the window", elements)).transpose()
}

/// The pool that follows, if one does.
fn pooling(spec: &ConvolutionSpec) -> Option<Pooling> {
    let (image, channels) = (spec.convolved(), spec.outputs);
    spec.pool.map(|pool| Pooling { pool, image, channels })
}

fn filters<'a>(spec: &ConvolutionSpec, parameters: &Parameters<'a>) -> Filters<'a> {
    Filters { weight: parameters.get(Slot::ConvolutionWeight), outputs: spec.outputs }
}

/// Room for the ReLU's bits, where some are kept.
fn mask_room(spec: &ConvolutionSpec, call: &Call) -> Result<Option<Tensor>> {
    let elements = spec.has_mask().then(|| spec.mask_elements(call.samples.len()));
    elements.map(|elements| words(call, "what is positive", elements)).transpose()
}

/// The layer's groups among the call's samples: each with the rows of pixels that are its.
fn parts(spec: &ConvolutionSpec, norm: BatchNorm, call: &Call) -> Vec<(usize, Range<usize>)> {
    let pixels = spec.convolved().0 * spec.convolved().1;
    let first = call.samples.start;
    let rows = |samples: Range<usize>| (samples.start - first) * pixels..(samples.end - first) * pixels;
    norm.groups(call.samples.clone()).map(|(group, samples)| (group, rows(samples))).collect()
}

/// A row of the two that statistics and sums have.
fn row(tensor: &Tensor, columns: usize, index: usize) -> Mat<'_> {
    Mat::new(tensor, 2, columns).rows(index, 1)
}

fn column_norm<'a>(
    spec: &ConvolutionSpec,
    norm: BatchNorm,
    parameters: &Parameters<'a>,
    statistics: &'a Tensor,
    rows: Range<usize>,
) -> ColumnNorm<'a> {
    ColumnNorm {
        eps: norm.eps,
        rows,
        cols: spec.outputs,
        mean: row(statistics, spec.outputs, 0),
        variance: row(statistics, spec.outputs, 1),
        weight: parameters.get(Slot::BatchNormWeight),
        bias: parameters.get(Slot::BatchNormBias),
    }
}

/// The layer's input with its channels last.
fn take_input(spec: &ConvolutionSpec, call: &Call, x: Tensor) -> Result<Tensor> {
    if !spec.first {
        return Ok(x);
    }
    let mut pixels = room(call, "images", x.len())?;
    call.device.channels_last(call.samples.len(), spec.image.2, &x, &mut pixels)?;
    Ok(pixels)
}

/// The convolution alone, with its ReLU where there is a mask to fill.
fn convolve(
    spec: &ConvolutionSpec,
    call: &Call,
    parameters: &Parameters,
    x: &Tensor,
    with_bias: bool,
    with_mask: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let mut out = room(call, "the convolution", call.samples.len() * spec.convolved_elements())?;
    let mut mask = if with_mask { mask_room(spec, call)? } else { None };
    let mut scratch = scratch(spec, call)?;
    let bias = parameters.optional(Slot::ConvolutionBias).filter(|_| with_bias);
    let filters = filters(spec, parameters);
    call.device.convolution(
        window(spec, call),
        x,
        filters,
        bias,
        mask.as_mut(),
        scratch.as_mut(),
        &mut out,
    )?;
    Ok((out, mask))
}

/// Convolves, and adds the result's statistics to those of its groups.
pub(crate) fn begin(
    spec: &ConvolutionSpec,
    call: &Call,
    parameters: &Parameters,
    x: Tensor,
    groups: &mut Groups,
) -> Result<Begun> {
    let norm = spec.norm.expect("only a layer with a batch norm begins");
    let x = take_input(spec, call, x)?;
    let (before, _) = convolve(spec, call, parameters, &x, false, false)?;
    let pixels = Mat::new(&before, before.len() / spec.outputs, spec.outputs);
    for (group, rows) in parts(spec, norm, call) {
        let mut statistics = words(call, "statistics of a group", 2 * spec.outputs)?;
        call.device.column_statistics(pixels.rows(rows.start, rows.len()), &mut statistics)?;
        match groups.get_mut(&group) {
            None => {
                groups.insert(group, Group { statistics, rows: rows.len(), sums: None });
            }
            Some(known) => {
                let into = (&mut known.statistics, known.rows);
                call.device.merge_statistics((&statistics, rows.len()), into)?;
                known.rows += rows.len();
            }
        }
    }
    Ok(Begun { x, before })
}

/// A layer without a norm, from its input.
pub(crate) fn forward(
    spec: &ConvolutionSpec,
    call: &Call,
    parameters: &Parameters,
    x: Tensor,
) -> Result<(ConvolutionSaved, Tensor)> {
    let x = take_input(spec, call, x)?;
    // A maximum is taken before bias and ReLU: it is the same one, and there are fewer of them.
    let pools = spec.takes_maxima();
    let (out, mask) = convolve(spec, call, parameters, &x, !pools, !pools)?;
    let bias = parameters.optional(Slot::ConvolutionBias).filter(|_| pools);
    let (places, out) = pool(spec, call, bias, out)?;
    Ok((ConvolutionSaved { x, before: None, places, mask }, out))
}

/// What comes after the beginning, when the statistics of its groups are complete. `other` is the other branch's
/// output where the layer joins two.
pub(crate) fn finish(
    spec: &ConvolutionSpec,
    call: &Call,
    parameters: &Parameters,
    begun: Begun,
    other: Option<Tensor>,
    groups: &Groups,
) -> Result<(ConvolutionSaved, Tensor)> {
    let norm = spec.norm.expect("only a layer with a batch norm begins");
    let Begun { x, before } = begun;
    let mut out = room(call, "normed pixels", before.len())?;
    let mut mask = mask_room(spec, call)?;
    for (group, rows) in parts(spec, norm, call) {
        let by = column_norm(spec, norm, parameters, &groups[&group].statistics, rows);
        call.device.column_norm(&by, &before, other.as_ref(), mask.as_mut(), &mut out)?;
    }
    let (places, out) = pool(spec, call, None, out)?;
    Ok((ConvolutionSaved { x, before: Some(before), places, mask }, out))
}

/// The forward where nothing is trained: a batch norm goes by the running statistics, or by those of these samples.
pub(crate) fn evaluate(
    spec: &ConvolutionSpec,
    call: &Call,
    parameters: &Parameters,
    x: Tensor,
    other: Option<Tensor>,
) -> Result<Tensor> {
    let Some(norm) = spec.norm else { return Ok(forward(spec, call, parameters, x)?.1) };
    let x = take_input(spec, call, x)?;
    let (before, _) = convolve(spec, call, parameters, &x, false, false)?;
    let rows = before.len() / spec.outputs;
    let mut out = room(call, "normed pixels", before.len())?;
    let mut mask = mask_room(spec, call)?;
    let measured;
    let by = if call.batch_statistics {
        let mut statistics = words(call, "statistics of the samples", 2 * spec.outputs)?;
        call.device.column_statistics(Mat::new(&before, rows, spec.outputs), &mut statistics)?;
        measured = statistics;
        column_norm(spec, norm, parameters, &measured, 0..rows)
    } else {
        let running = |slot: Slot| Mat::new(parameters.get(slot), 1, spec.outputs);
        ColumnNorm {
            eps: norm.eps,
            rows: 0..rows,
            cols: spec.outputs,
            mean: running(Slot::RunningMean),
            variance: running(Slot::RunningVariance),
            weight: parameters.get(Slot::BatchNormWeight),
            bias: parameters.get(Slot::BatchNormBias),
        }
    };
    call.device.column_norm(&by, &before, other.as_ref(), mask.as_mut(), &mut out)?;
    Ok(pool(spec, call, None, out)?.1)
}

/// What comes last: a pool, with bias and ReLU where it takes maxima, and dropout. Also where maxima were.
fn pool(
    spec: &ConvolutionSpec,
    call: &Call,
    bias: Option<&Tensor>,
    mut out: Tensor,
) -> Result<(Option<Tensor>, Tensor)> {
    let mut places = None;
    if let Some(pooling) = pooling(spec) {
        (places, out) = pooling.forward(call, &out, bias, spec.relu)?;
    }
    drop_last(spec, call, &mut out)?;
    Ok((places, out))
}

/// Dropout of the output, or of its gradient.
fn drop_last(spec: &ConvolutionSpec, call: &Call, out: &mut Tensor) -> Result {
    drop_some(call, spec.dropout, spec.output_elements() / spec.outputs, spec.outputs, out)
}

/// What stays where it is while the input is away.
pub struct WithoutInput {
    places: Option<Tensor>,
    mask: Option<Tensor>,
}

impl WithoutInput {
    pub(crate) fn with(self, x: Tensor) -> ConvolutionSaved {
        let WithoutInput { places, mask } = self;
        ConvolutionSaved { x, before: None, places, mask }
    }
}

impl ConvolutionSaved {
    /// The input, and the rest; what is made again from it is dropped.
    pub(crate) fn apart(self) -> (Tensor, WithoutInput) {
        let ConvolutionSaved { x, places, mask, .. } = self;
        (x, WithoutInput { places, mask })
    }

    /// The same without what [`recompute`] makes again.
    pub(crate) fn lean(self) -> ConvolutionSaved {
        ConvolutionSaved { before: None, ..self }
    }
}

/// What the norm was given, once more.
pub(crate) fn recompute(
    spec: &ConvolutionSpec,
    call: &Call,
    parameters: &Parameters,
    saved: ConvolutionSaved,
) -> Result<ConvolutionSaved> {
    let (before, _) = convolve(spec, call, parameters, &saved.x, false, false)?;
    Ok(ConvolutionSaved { before: Some(before), ..saved })
}

/// The gradient of what a pool was given. With a bias' sum, that of the pool's bias is added to it.
fn unpool(
    spec: &ConvolutionSpec,
    call: &Call,
    places: Option<Tensor>,
    mut dy: Tensor,
    bias: Option<(&mut Tensor, bool)>,
) -> Result<Tensor> {
    drop_last(spec, call, &mut dy)?;
    match pooling(spec) {
        Some(pooling) => pooling.backward(call, places, &dy, bias),
        None => Ok(dy),
    }
}

/// Adds to the sums that the gradients of its groups' members depend on.
pub(crate) fn begin_backward(
    spec: &ConvolutionSpec,
    call: &Call,
    parameters: &Parameters,
    gradients: &mut Gradients,
    saved: ConvolutionSaved,
    dy: Tensor,
    groups: &mut Groups,
) -> Result<BegunBackward> {
    let norm = spec.norm.expect("only a layer with a batch norm begins");
    let ConvolutionSaved { x, before, places, mask } = saved;
    let before = before.expect("what the norm was given is kept or recomputed");
    let gradient = unpool(spec, call, places, dy, None)?;
    let share = 1.0 / norm.group_count(call.global_batch) as f32;
    let samples = norm.groups(call.samples.clone()).map(|(_, samples)| samples);
    for ((number, rows), samples) in parts(spec, norm, call).into_iter().zip(samples) {
        let group = groups.get_mut(&number).expect("the forward began it");
        let more = group.sums.is_some();
        let mut sums = match group.sums.take() {
            Some(sums) => sums,
            None => words(call, "sums of a group", 2 * spec.outputs)?,
        };
        let by = column_norm(spec, norm, parameters, &group.statistics, rows);
        // The groups' statistics go into sums of their own, negative, like gradients that lead the running ones
        // towards their mean: once each, by whoever has the group's first sample.
        let follows = samples.start == number * norm.group.unwrap_or(0);
        let running = [Slot::RunningMean, Slot::RunningVariance].map(|slot| Some(slot).filter(|_| follows));
        let [bias, weight, mean, variance] = gradients.add_to_all([
            Some(Slot::BatchNormBias),
            Some(Slot::BatchNormWeight),
            running[0],
            running[1],
        ]);
        let (Some(bias), Some(weight)) = (bias, weight) else {
            panic!("layer {} has no gradients for its norm", call.layer)
        };
        // The running variance is that of a sample of the group's size.
        let unbiased = group.rows as f32 / (group.rows.max(2) - 1) as f32;
        let running =
            mean.zip(variance).map(|(mean, variance)| [(-share, mean), (-share * unbiased, variance)]);
        call.device.column_norm_sums(
            &by,
            &before,
            mask.as_ref(),
            &gradient,
            (&mut sums, more),
            Some(NormGradients { bias, weight, running }),
        )?;
        group.sums = Some(sums);
    }
    Ok(BegunBackward { x, before, mask, gradient })
}

/// From a begun backward: the gradients of the inputs, none where they are images, the other branch's last.
pub(crate) fn finish_backward(
    spec: &ConvolutionSpec,
    call: &Call,
    parameters: &Parameters,
    gradients: &mut Gradients,
    begun: BegunBackward,
    groups: &Groups,
) -> Result<Vec<Tensor>> {
    let norm = spec.norm.expect("only a layer with a batch norm begins");
    let BegunBackward { x, mut before, mask, mut gradient } = begun;
    for (number, rows) in parts(spec, norm, call) {
        let group = &groups[&number];
        let sums = group.sums.as_ref().expect("the backward began it");
        let by = column_norm(spec, norm, parameters, &group.statistics, rows);
        call.device.column_norm_gradient(
            &by,
            sums,
            group.rows,
            mask.as_ref(),
            &mut gradient,
            spec.joins,
            &mut before,
        )?;
    }
    drop(mask);
    // What the ReLU let through is also the gradient of the other branch's output.
    let others = Some(gradient).filter(|_| spec.joins);
    let mut all = convolution_gradients(spec, call, parameters, gradients, x, &before)?;
    all.extend(others);
    Ok(all)
}

/// The whole backward of a layer without a norm.
pub(crate) fn backward(
    spec: &ConvolutionSpec,
    call: &Call,
    parameters: &Parameters,
    gradients: &mut Gradients,
    saved: ConvolutionSaved,
    dy: Tensor,
) -> Result<Vec<Tensor>> {
    let ConvolutionSaved { x, places, mask, .. } = saved;
    let pools = spec.takes_maxima();
    let has_bias = gradients.has(Slot::ConvolutionBias);
    let bias = (has_bias && pools).then(|| gradients.add_to(Slot::ConvolutionBias));
    let mut dy = unpool(spec, call, places, dy, bias)?;
    let bias = (has_bias && !pools).then(|| gradients.add_to(Slot::ConvolutionBias));
    match (mask, bias) {
        (Some(mask), bias) => call.device.relu_gradient(spec.outputs, &mask, &mut dy, bias)?,
        (None, Some((sum, more))) => {
            let pixels = Mat::new(&dy, dy.len() / spec.outputs, spec.outputs);
            call.device.bias_gradient(pixels, sum, more)?;
        }
        (None, None) => {}
    }
    convolution_gradients(spec, call, parameters, gradients, x, &dy)
}

/// The convolution's own: its filters', and its input's where that is not the samples themselves.
fn convolution_gradients(
    spec: &ConvolutionSpec,
    call: &Call,
    parameters: &Parameters,
    gradients: &mut Gradients,
    x: Tensor,
    dy: &Tensor,
) -> Result<Vec<Tensor>> {
    let window = window(spec, call);
    let mut scratch = scratch(spec, call)?;
    let sum = gradients.add_to(Slot::ConvolutionWeight);
    call.device.convolution_weight_gradient(window, &x, dy, scratch.as_mut(), sum)?;
    if spec.first {
        return Ok(Vec::new());
    }
    let mut dx = room(call, "gradient of the input", x.len())?;
    let filters = filters(spec, parameters);
    call.device.convolution_input_gradient(window, dy, filters, scratch.as_mut(), &mut dx)?;
    Ok(vec![dx])
}
