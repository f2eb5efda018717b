//! Other layers' outputs side by side, channel after channel, and a pool of them. A pool looks at each channel by
//! itself, so that every input is pooled first, and less is put side by side. Kept is where maxima were.

use shoal_kernels::device::Result;
use shoal_kernels::{Mat, MatMut, Tensor};
use shoal_model::JoinSpec;

use crate::layer::{Call, element};
use crate::pool::{Pooling, drop_some};

/// What the layer keeps for its backward: where maxima were, for each input.
pub struct JoinSaved {
    places: Vec<Option<Tensor>>,
}

fn pooling(spec: &JoinSpec, channels: usize) -> Option<Pooling> {
    spec.pool.map(|pool| Pooling { pool, image: spec.image, channels })
}

/// What a row of pixels has of each input: its first column, and how many.
fn columns(spec: &JoinSpec) -> impl Iterator<Item = (usize, usize)> + '_ {
    spec.channels.iter().scan(0, |next, channels| {
        let first = *next;
        *next += channels;
        Some((first, *channels))
    })
}

pub(crate) fn forward(spec: &JoinSpec, call: &Call, inputs: &[Tensor]) -> Result<(JoinSaved, Tensor)> {
    let (mut places, mut pooled) = (Vec::new(), Vec::new());
    for (x, channels) in inputs.iter().zip(&spec.channels) {
        if let Some(pooling) = pooling(spec, *channels) {
            let (found, out) = pooling.forward(call, x, None, false)?;
            places.push(found);
            pooled.push(out);
        }
    }
    let mut out = match pooled.len() {
        1 => pooled.remove(0),
        0 => side_by_side(spec, call, inputs)?,
        _ => side_by_side(spec, call, &pooled)?,
    };
    drop_some(call, spec.dropout, spec.output_pixels(), spec.outputs(), &mut out)?;
    Ok((JoinSaved { places }, out))
}

fn side_by_side(spec: &JoinSpec, call: &Call, parts: &[Tensor]) -> Result<Tensor> {
    let (rows, outputs) = (call.samples.len() * spec.output_pixels(), spec.outputs());
    let mut out = call.room("joined channels", element(call.precision), rows * outputs)?;
    for (part, (first, channels)) in parts.iter().zip(columns(spec)) {
        let to = MatMut::columns(&mut out, rows, first, channels, outputs);
        call.device.copy_rows(Mat::new(part, rows, channels), to)?;
    }
    Ok(out)
}

/// Gradients of the inputs: each has its own channels' of the output's.
pub(crate) fn backward(
    spec: &JoinSpec,
    call: &Call,
    saved: JoinSaved,
    mut dy: Tensor,
) -> Result<Vec<Tensor>> {
    drop_some(call, spec.dropout, spec.output_pixels(), spec.outputs(), &mut dy)?;
    let (rows, outputs) = (call.samples.len() * spec.output_pixels(), spec.outputs());
    let mut places = saved.places.into_iter();
    let mut gradients = Vec::new();
    for (first, channels) in columns(spec) {
        let (pooling, places) = (pooling(spec, channels), places.next().flatten());
        if let (1, Some(pooling)) = (spec.channels.len(), &pooling) {
            gradients.push(pooling.backward(call, places, &dy, None)?);
            continue;
        }
        let mut part = call.room("gradient of joined channels", element(call.precision), rows * channels)?;
        let from = Mat::columns(&dy, rows, first, channels, outputs);
        call.device.copy_rows(from, MatMut::new(&mut part, rows, channels))?;
        gradients.push(match pooling {
            Some(pooling) => pooling.backward(call, places, &part, None)?,
            None => part,
        });
    }
    Ok(gradients)
}
