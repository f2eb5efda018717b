//! A convolution and what follows it: batch norm, the sum with another branch, a pool, ReLU, dropout. Kept are the
//! input, what the norm was given, where a maximum was found, and a bit for each number that the ReLU let through.

use shoal_kernels::device::Result;
use shoal_kernels::{Averages, Element, Filters, Mat, Tensor, Window};
use shoal_model::{BatchNorm, ConvolutionSpec, Pool, Slot};

use crate::layer::Call;
use crate::parameters::{Gradients, Parameters};

const DROPOUT_SITE: u64 = 0;

/// What the layer keeps for its backward.
pub struct ConvolutionSaved {
    x: Tensor,
    normed: Option<Normed>,
    /// The pixels that maxima came from.
    places: Option<Tensor>,
    mask: Option<Tensor>,
}

/// What a batch norm was given, with the means and variances of its channels.
struct Normed {
    before: Tensor,
    statistics: Tensor,
}

fn room(call: &Call, what: &str, elements: usize) -> Result<Tensor> {
    call.room(what, Element::F32, elements)
}

fn window(spec: &ConvolutionSpec, call: &Call) -> Window {
    let (height, width, channels) = spec.image;
    let (kernel, stride, padding) = (spec.kernel, spec.stride, spec.padding);
    Window { samples: call.samples.len(), height, width, channels, kernel, stride, padding }
}

fn scratch(spec: &ConvolutionSpec, call: &Call) -> Result<Option<Tensor>> {
    let elements = spec.scratch_elements(call.samples.len());
    elements.map(|elements| room(call, "pixels under the window", elements)).transpose()
}

/// The window of a maximum over what the convolution made.
fn pool_window(spec: &ConvolutionSpec, call: &Call) -> Option<Window> {
    let Some(Pool::Max { kernel, stride, padding }) = spec.pool else { return None };
    let ((height, width), channels) = (spec.convolved(), spec.outputs);
    let kernel = (kernel, kernel);
    Some(Window { samples: call.samples.len(), height, width, channels, kernel, stride, padding })
}

/// One average of the whole image.
fn average(spec: &ConvolutionSpec, call: &Call) -> Option<Averages> {
    let ((height, width), channels) = (spec.convolved(), spec.outputs);
    let shape = Averages { samples: call.samples.len(), height, width, channels, bins: (1, 1) };
    (spec.pool == Some(Pool::Average)).then_some(shape)
}

fn filters<'a>(spec: &ConvolutionSpec, parameters: &Parameters<'a>) -> Filters<'a> {
    Filters { weight: parameters.get(Slot::ConvolutionWeight), outputs: spec.outputs }
}

/// A row of the two that statistics and sums have.
fn row(tensor: &Tensor, columns: usize, index: usize) -> Mat<'_> {
    Mat::new(tensor, 2, columns).rows(index, 1)
}

/// Also the other branch's output where the layer joins two.
pub(crate) fn forward(
    spec: &ConvolutionSpec,
    call: &Call,
    parameters: &Parameters,
    x: Tensor,
    other: Option<Tensor>,
) -> Result<(ConvolutionSaved, Tensor)> {
    let (device, samples) = (call.device, call.samples.len());
    let mut x = x;
    if spec.first {
        let mut pixels = room(call, "images", x.len())?;
        device.channels_last(samples, spec.image.2, &x, &mut pixels)?;
        x = pixels;
    }
    let window = window(spec, call);
    let mut out = room(call, "the convolution", samples * spec.convolved_elements())?;
    {
        let mut scratch = scratch(spec, call)?;
        let bias = parameters.optional(Slot::ConvolutionBias);
        device.convolution(window, &x, filters(spec, parameters), bias, scratch.as_mut(), &mut out)?;
    }
    let mut normed = None;
    if let Some(norm) = spec.norm {
        let (saved, after) = normalise(spec, call, parameters, norm, out, other)?;
        (normed, out) = (Some(saved), after);
    }
    let mut places = None;
    if let Some(window) = pool_window(spec, call) {
        let elements = samples * spec.output_elements();
        let mut found = room(call, "where maxima are", elements)?;
        let mut pooled = room(call, "maxima", elements)?;
        device.max_pool(window, &out, &mut found, &mut pooled)?;
        (places, out) = (Some(found), pooled);
    }
    let mut mask = None;
    if spec.relu {
        let mut bits = room(call, "what is positive", spec.mask_elements(samples))?;
        device.relu(&mut out, Some(&mut bits))?;
        mask = Some(bits);
    }
    if let Some(shape) = average(spec, call) {
        let mut averages = room(call, "averages", samples * spec.outputs)?;
        device.average_pool(shape, &out, &mut averages)?;
        out = averages;
    }
    if let Some(site) = call.dropout(DROPOUT_SITE, spec.dropout) {
        let rows = spec.output_elements() / spec.outputs;
        device.dropout(site, rows, spec.outputs, None, &mut out)?;
    }
    Ok((ConvolutionSaved { x, normed, places, mask }, out))
}

/// By the batch's own statistics while training, else by the running ones.
fn normalise(
    spec: &ConvolutionSpec,
    call: &Call,
    parameters: &Parameters,
    norm: BatchNorm,
    before: Tensor,
    other: Option<Tensor>,
) -> Result<(Normed, Tensor)> {
    let (device, columns) = (call.device, spec.outputs);
    let x = Mat::new(&before, before.len() / columns, columns);
    let mut statistics = room(call, "batch statistics", 2 * columns)?;
    let mut out = room(call, "normed pixels", before.len())?;
    let (mean, variance) = if call.batch_statistics {
        device.column_statistics(x, &mut statistics)?;
        (row(&statistics, columns, 0), row(&statistics, columns, 1))
    } else {
        let running = |slot: Slot| Mat::new(parameters.get(slot), 1, columns);
        (running(Slot::RunningMean), running(Slot::RunningVariance))
    };
    let (weight, bias) = (parameters.get(Slot::BatchNormWeight), parameters.get(Slot::BatchNormBias));
    device.column_norm(norm.eps, x, mean, variance, weight, bias, other.as_ref(), &mut out)?;
    Ok((Normed { before, statistics }, out))
}

/// The gradients of the inputs: none where they are images, and the other branch's after the first.
pub(crate) fn backward(
    spec: &ConvolutionSpec,
    call: &Call,
    parameters: &Parameters,
    gradients: &mut Gradients,
    saved: ConvolutionSaved,
    mut dy: Tensor,
) -> Result<Vec<Tensor>> {
    let (device, samples) = (call.device, call.samples.len());
    let ConvolutionSaved { x, normed, places, mask } = saved;
    let convolved = samples * spec.convolved_elements();
    if let Some(site) = call.dropout(DROPOUT_SITE, spec.dropout) {
        let rows = spec.output_elements() / spec.outputs;
        device.dropout(site, rows, spec.outputs, None, &mut dy)?;
    }
    if let Some(shape) = average(spec, call) {
        let mut dx = room(call, "gradient of averaged pixels", convolved)?;
        device.average_pool_gradient(shape, &dy, &mut dx)?;
        dy = dx;
    }
    if let Some(mask) = mask {
        device.relu_gradient(&mask, &mut dy)?;
    }
    if let Some((window, places)) = pool_window(spec, call).zip(places) {
        let mut dx = room(call, "gradient of pooled pixels", convolved)?;
        device.max_pool_gradient(window, &places, &dy, &mut dx)?;
        dy = dx;
    }
    let mut others = Vec::new();
    if spec.joins {
        let mut copy = room(call, "gradient of the other branch", convolved)?;
        device.add_scaled(1.0, Mat::new(&dy, samples, convolved / samples), (&mut copy, false))?;
        others.push(copy);
    }
    if let Some((norm, normed)) = spec.norm.zip(normed) {
        norm_backward(spec, call, parameters, gradients, norm, normed, &mut dy)?;
    }
    if gradients.has(Slot::ConvolutionBias) {
        let (sum, more) = gradients.add_to(Slot::ConvolutionBias);
        device.bias_gradient(Mat::new(&dy, convolved / spec.outputs, spec.outputs), sum, more)?;
    }
    let window = window(spec, call);
    let mut scratch = scratch(spec, call)?;
    let sum = gradients.add_to(Slot::ConvolutionWeight);
    device.convolution_weight_gradient(window, &x, &dy, scratch.as_mut(), sum)?;
    let mut all = Vec::new();
    if !spec.first {
        let mut dx = room(call, "gradient of the input", x.len())?;
        device.convolution_input_gradient(
            window,
            &dy,
            filters(spec, parameters),
            scratch.as_mut(),
            &mut dx,
        )?;
        all.push(dx);
    }
    all.append(&mut others);
    Ok(all)
}

/// The gradient of what was normed becomes that of what the norm was given. The batch's statistics go into sums of
/// their own, negative, like gradients that lead the running ones towards them.
fn norm_backward(
    spec: &ConvolutionSpec,
    call: &Call,
    parameters: &Parameters,
    gradients: &mut Gradients,
    norm: BatchNorm,
    normed: Normed,
    gradient: &mut Tensor,
) -> Result {
    let (device, columns) = (call.device, spec.outputs);
    let Normed { before, statistics } = normed;
    let rows = before.len() / columns;
    let x = Mat::new(&before, rows, columns);
    let mut sums = room(call, "sums of the batch norm", 2 * columns)?;
    device.column_norm_sums(norm.eps, x, &statistics, gradient, &mut sums)?;
    let weight = parameters.get(Slot::BatchNormWeight);
    device.column_norm_gradient(norm.eps, x, &statistics, weight, &sums, rows, gradient)?;
    // The running variance is that of a sample of the batch's size.
    let unbiased = rows as f32 / (rows.max(2) - 1) as f32;
    let additions = [
        (Slot::BatchNormBias, &sums, 0, 1.0),
        (Slot::BatchNormWeight, &sums, 1, 1.0),
        (Slot::RunningMean, &statistics, 0, -1.0),
        (Slot::RunningVariance, &statistics, 1, -unbiased),
    ];
    for (slot, from, index, factor) in additions {
        device.add_scaled(factor, row(from, columns, index), gradients.add_to(slot))?;
    }
    Ok(())
}
