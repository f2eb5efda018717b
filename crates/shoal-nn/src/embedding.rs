//! Tokens to vectors, with learned positions, token types and a norm where the model has them.

use shoal_kernels::device::Result;
use shoal_kernels::{Mat, Tensor};
use shoal_model::{EmbeddingSpec, Slot};

use crate::layer::Call;
use crate::norm::NormSite;
use crate::parameters::{Gradients, Parameters};

const DROPOUT_SITE: u64 = 0;

fn norm_site(spec: &EmbeddingSpec) -> Option<NormSite> {
    let site = |(norm, eps)| NormSite::new(norm, eps, Slot::EmbeddingNormWeight, Slot::EmbeddingNormBias);
    spec.norm.map(site)
}

/// The sum of what each token, its position and its type look up. Every token is of the first type.
fn look_up(spec: &EmbeddingSpec, call: &Call, parameters: &Parameters, tokens: &Tensor) -> Result<Tensor> {
    let mut out = call.rows_of("embedded tokens", spec.width)?;
    let table = parameters.get(Slot::TokenEmbedding);
    let positions = parameters.optional(Slot::PositionEmbedding);
    let types = parameters.optional(Slot::TokenTypeEmbedding);
    call.device.embed(tokens, call.sequence, spec.width, table, positions, types, &mut out)?;
    Ok(out)
}

/// The normed rows of a sum, with their statistics.
fn normed(
    spec: &EmbeddingSpec,
    call: &Call,
    parameters: &Parameters,
    norm: NormSite,
    sum: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let mut statistics = call.float_rows_of("norm statistics", norm.kind.statistics())?;
    let mut out = call.rows_of("normed rows", spec.width)?;
    let rows = Mat::new(sum, call.rows(), spec.width);
    norm.forward(call.device, parameters, rows, &mut statistics, &mut out)?;
    Ok((statistics, out))
}

pub(crate) fn forward(
    spec: &EmbeddingSpec,
    call: &Call,
    parameters: &Parameters,
    tokens: &Tensor,
) -> Result<Tensor> {
    let sum = look_up(spec, call, parameters, tokens)?;
    let mut out = match norm_site(spec) {
        Some(norm) => normed(spec, call, parameters, norm, &sum)?.1,
        None => sum,
    };
    if let Some(site) = call.dropout(DROPOUT_SITE, spec.dropout) {
        call.device.dropout(site, call.sequence, spec.width, None, &mut out)?;
    }
    Ok(out)
}

pub(crate) fn backward(
    spec: &EmbeddingSpec,
    call: &Call,
    parameters: &Parameters,
    gradients: &mut Gradients,
    tokens: &Tensor,
    mut dy: Tensor,
) -> Result {
    if let Some(site) = call.dropout(DROPOUT_SITE, spec.dropout) {
        call.device.dropout(site, call.sequence, spec.width, None, &mut dy)?;
    }
    let dy = match norm_site(spec) {
        Some(norm) => norm_backward(spec, call, parameters, gradients, norm, tokens, dy)?,
        None => dy,
    };
    let (sum, more) = gradients.add_to(Slot::TokenEmbedding);
    call.device.embed_gradient(tokens, spec.width, &dy, sum, more)?;
    if gradients.has(Slot::PositionEmbedding) {
        let (sum, more) = gradients.add_to(Slot::PositionEmbedding);
        call.device.position_gradient(call.sequence, spec.width, &dy, sum, more)?;
    }
    if gradients.has(Slot::TokenTypeEmbedding) {
        let (sum, more) = gradients.add_to(Slot::TokenTypeEmbedding);
        call.device.bias_gradient(Mat::new(&dy, call.rows(), spec.width), sum, more)?;
    }
    Ok(())
}

/// Through the norm, whose input and statistics are made again: looking up costs less than keeping them.
fn norm_backward(
    spec: &EmbeddingSpec,
    call: &Call,
    parameters: &Parameters,
    gradients: &mut Gradients,
    norm: NormSite,
    tokens: &Tensor,
    mut dy: Tensor,
) -> Result<Tensor> {
    let sum = look_up(spec, call, parameters, tokens)?;
    let (statistics, mut dx) = normed(spec, call, parameters, norm, &sum)?;
    let rows = Mat::new(&sum, call.rows(), spec.width);
    norm.backward(call.device, parameters, gradients, rows, &statistics, &mut dy, (&mut dx, false), None)?;
    Ok(dx)
}
