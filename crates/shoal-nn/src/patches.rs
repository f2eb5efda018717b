//! Images to rows: a learned row that the class is read from, then one for each patch, with learned positions.
//! The images are all that is kept: gathering their patches again is cheap.

use shoal_kernels::device::Result;
use shoal_kernels::{Linear, Mat, MatMut, PatchShape, Tensor};
use shoal_model::{PatchSpec, Slot};

use crate::layer::Call;
use crate::parameters::{Gradients, Parameters};

const DROPOUT_SITE: u64 = 0;

/// The images' patches, each image's after a row of zeros: so gathered, rows stand where the output's do.
fn gather(spec: &PatchSpec, call: &Call, images: &Tensor) -> Result<Tensor> {
    let image = spec.image;
    let shape = PatchShape {
        samples: call.samples.len(),
        channels: image.channels,
        size: image.size,
        patch: image.patch,
    };
    assert_eq!(shape.rows(), call.sequence, "a row for the class and one a patch");
    let mut out = call.rows_of("patches", image.patch_elements())?;
    call.device.patches(shape, images, &mut out)?;
    Ok(out)
}

pub(crate) fn forward(
    spec: &PatchSpec,
    call: &Call,
    parameters: &Parameters,
    images: &Tensor,
) -> Result<Tensor> {
    let (device, rows, inputs) = (call.device, call.rows(), spec.image.patch_elements());
    let gathered = gather(spec, call, images)?;
    let mut out = call.rows_of("embedded patches", spec.width)?;
    let weight = parameters.get(Slot::PatchWeight);
    let linear = Linear { weight, inputs, outputs: spec.width, in_out: false };
    let (x, target) = (Mat::new(&gathered, rows, inputs), MatMut::new(&mut out, rows, spec.width));
    device.linear(x, linear, Some(parameters.get(Slot::PatchBias)), None, target)?;
    let (class, positions) = (parameters.get(Slot::ClassToken), parameters.get(Slot::PositionEmbedding));
    device.place_rows(call.sequence, spec.width, class, positions, &mut out)?;
    if let Some(site) = call.dropout(DROPOUT_SITE, spec.dropout) {
        device.dropout(site, call.sequence, spec.width, None, &mut out)?;
    }
    Ok(out)
}

pub(crate) fn backward(
    spec: &PatchSpec,
    call: &Call,
    gradients: &mut Gradients,
    images: &Tensor,
    mut dy: Tensor,
) -> Result {
    let (device, rows, samples, width) = (call.device, call.rows(), call.samples.len(), spec.width);
    if let Some(site) = call.dropout(DROPOUT_SITE, spec.dropout) {
        device.dropout(site, call.sequence, width, None, &mut dy)?;
    }
    let (sum, more) = gradients.add_to(Slot::PositionEmbedding);
    device.position_gradient(call.sequence, width, &dy, sum, more)?;
    let stride = call.sequence * width;
    let (sum, more) = gradients.add_to(Slot::ClassToken);
    device.bias_gradient(Mat::columns(&dy, samples, 0, width, stride), sum, more)?;
    // The class's rows are no patches: with a gradient of zero they add nothing to the projection's.
    device.set_rows(None, MatMut::columns(&mut dy, samples, 0, width, stride))?;
    let dy = Mat::new(&dy, rows, width);
    let (sum, more) = gradients.add_to(Slot::PatchBias);
    device.bias_gradient(dy, sum, more)?;
    let inputs = spec.image.patch_elements();
    let gathered = gather(spec, call, images)?;
    let (sum, more) = gradients.add_to(Slot::PatchWeight);
    device.linear_weight_gradient(Mat::new(&gathered, rows, inputs), dy, sum, false, more)
}
