//! Tokens to vectors, with learned positions where the model has them.

use shoal_kernels::Tensor;
use shoal_kernels::device::Result;
use shoal_model::{EmbeddingSpec, Slot};

use crate::layer::Call;
use crate::parameters::{Gradients, Parameters};

const DROPOUT_SITE: u64 = 0;

pub(crate) fn forward(
    spec: &EmbeddingSpec,
    call: &Call,
    parameters: &Parameters,
    tokens: &Tensor,
) -> Result<Tensor> {
    let mut out = call.rows_of("embedded tokens", spec.width)?;
    let (table, positions) =
        (parameters.get(Slot::TokenEmbedding), parameters.optional(Slot::PositionEmbedding));
    call.device.embed(tokens, call.sequence, spec.width, table, positions, &mut out)?;
    if let Some(site) = call.dropout(DROPOUT_SITE, spec.dropout) {
        call.device.dropout(site, call.sequence, spec.width, None, &mut out)?;
    }
    Ok(out)
}

pub(crate) fn backward(
    spec: &EmbeddingSpec,
    call: &Call,
    gradients: &mut Gradients,
    tokens: &Tensor,
    mut dy: Tensor,
) -> Result {
    if let Some(site) = call.dropout(DROPOUT_SITE, spec.dropout) {
        call.device.dropout(site, call.sequence, spec.width, None, &mut dy)?;
    }
    let (sum, more) = gradients.add_to(Slot::TokenEmbedding);
    call.device.embed_gradient(tokens, spec.width, &dy, sum, more)?;
    if gradients.has(Slot::PositionEmbedding) {
        let (sum, more) = gradients.add_to(Slot::PositionEmbedding);
        call.device.position_gradient(call.sequence, spec.width, &dy, sum, more)?;
    }
    Ok(())
}
