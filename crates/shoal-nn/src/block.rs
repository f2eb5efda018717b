//! A transformer block. Between forward and backward it keeps what is dear to make again (projections,
//! attention) and nothing that one cheap pass restores (normed rows, activations). The allocations here are
//! the ones `shoal_model::footprint` counts, in the same order.

use shoal_kernels::device::Result;
use shoal_kernels::{AttentionShape, DropoutSite, Linear, Mat, MatMut, Tensor};
use shoal_model::{Activation, BlockSpec, Slot};

use crate::layer::Call;
use crate::norm::NormSite;
use crate::parameters::{Gradients, Parameters};

const ATTENTION_SITE: u64 = 0;
const ATTENTION_OUTPUT_SITE: u64 = 1;
const MLP_OUTPUT_SITE: u64 = 2;

/// What a block keeps for its backward.
pub struct BlockSaved {
    /// The block's input.
    x: Tensor,
    attention_statistics: Tensor,
    /// Queries, keys and values, already turned.
    qkv: Tensor,
    attention: Tensor,
    logsumexp: Tensor,
    /// The residual stream between attention and MLP.
    middle: Tensor,
    mlp_statistics: Tensor,
    /// The gate's projection, in gated blocks.
    gate: Option<Tensor>,
    up: Tensor,
}

impl BlockSaved {
    pub(crate) fn into_input(self) -> Tensor {
        self.x
    }
}

/// A projection: weight, bias, and the columns of the joint rows it fills.
struct Projection {
    weight: Slot,
    bias: Slot,
    first: usize,
    outputs: usize,
}

/// The projections that make queries, keys and values: one joint matrix, or three.
fn qkv_projections(spec: &BlockSpec, parameters: &Parameters) -> Vec<Projection> {
    let (query, kv) = (spec.query_width(), spec.kv_width());
    let projection = |weight, bias, first, outputs| Projection { weight, bias, first, outputs };
    if parameters.optional(Slot::QkvWeight).is_some() {
        return vec![projection(Slot::QkvWeight, Slot::QkvBias, 0, spec.qkv_width())];
    }
    vec![
        projection(Slot::QueryWeight, Slot::QueryBias, 0, query),
        projection(Slot::KeyWeight, Slot::KeyBias, query, kv),
        projection(Slot::ValueWeight, Slot::ValueBias, query + kv, kv),
    ]
}

/// A block at work on one micro-batch.
struct Block<'a> {
    spec: &'a BlockSpec,
    call: &'a Call<'a>,
    parameters: &'a Parameters<'a>,
    rows: usize,
    attention_norm: NormSite,
    mlp_norm: NormSite,
    shape: AttentionShape,
}

impl<'a> Block<'a> {
    fn new(spec: &'a BlockSpec, call: &'a Call, parameters: &'a Parameters) -> Block<'a> {
        let norm = |weight, bias| NormSite::new(spec.norm, spec.norm_eps, weight, bias);
        Block {
            spec,
            call,
            parameters,
            rows: call.rows(),
            attention_norm: norm(Slot::AttentionNormWeight, Slot::AttentionNormBias),
            mlp_norm: norm(Slot::MlpNormWeight, Slot::MlpNormBias),
            shape: AttentionShape {
                samples: call.samples.len(),
                sequence: call.sequence,
                heads: spec.heads,
                kv_heads: spec.kv_heads,
                head_size: spec.head_size,
                scale: spec.attention_scale,
            },
        }
    }

    fn linear(&self, slot: Slot, inputs: usize, outputs: usize) -> Linear<'a> {
        Linear { weight: self.parameters.get(slot), inputs, outputs, in_out: self.spec.weights_in_out }
    }

    fn width_rows<'t>(&self, tensor: &'t Tensor) -> Mat<'t> {
        Mat::new(tensor, self.rows, self.spec.width)
    }

    fn attention_dropout(&self) -> Option<DropoutSite> {
        self.call.dropout(ATTENTION_SITE, self.spec.attention_dropout)
    }

    fn residual_dropout(&self, site: u64) -> Option<DropoutSite> {
        self.call.dropout(site, self.spec.residual_dropout)
    }

    /// `out = residual + dropped (x * W + bias)`: a projection back into the residual stream.
    fn project_back(
        &self,
        x: Mat,
        (weight, bias): (Slot, Slot),
        site: u64,
        residual: &Tensor,
        out: &mut Tensor,
    ) -> Result {
        let (device, width) = (self.call.device, self.spec.width);
        let linear = self.linear(weight, x.cols, width);
        let bias = self.parameters.optional(bias);
        match self.residual_dropout(site) {
            None => device.linear(x, linear, bias, Some(residual), MatMut::new(out, self.rows, width)),
            Some(site) => {
                device.linear(x, linear, bias, None, MatMut::new(out, self.rows, width))?;
                device.dropout(site, self.call.sequence, width, Some(residual), out)
            }
        }
    }

    /// Gradients of a projection back into the residual stream. `scratch` holds the dropped gradient where
    /// something is dropped.
    #[allow(clippy::too_many_arguments)]
    fn back_gradient<'t>(&self, site: u64, dy: &'t Tensor, scratch: &'t mut Tensor) -> Result<Mat<'t>> {
        match self.residual_dropout(site) {
            None => Ok(self.width_rows(dy)),
            Some(site) => {
                self.call.device.dropout_copy(site, self.call.sequence, self.spec.width, dy, scratch)?;
                Ok(self.width_rows(scratch))
            }
        }
    }

    /// Adds up the gradients of a projection's weight and bias.
    fn parameter_gradients(
        &self,
        gradients: &mut Gradients,
        (weight, bias): (Slot, Slot),
        x: Mat,
        dy: Mat,
    ) -> Result {
        let device = self.call.device;
        let (sum, more) = gradients.add_to(weight);
        device.linear_weight_gradient(x, dy, sum, self.spec.weights_in_out, more)?;
        if gradients.has(bias) {
            let (sum, more) = gradients.add_to(bias);
            device.bias_gradient(dy, sum, more)?;
        }
        Ok(())
    }
}

/// Runs the block; without `want_output` it stops where the backward's needs are met.
pub(crate) fn forward(
    spec: &BlockSpec,
    call: &Call,
    parameters: &Parameters,
    x: Tensor,
    want_output: bool,
) -> Result<(BlockSaved, Option<Tensor>)> {
    let block = Block::new(spec, call, parameters);
    let (device, rows) = (call.device, block.rows);
    let statistics = block.attention_norm.kind.statistics();

    let mut normed = call.rows_of("normed rows", spec.width)?;
    let mut attention_statistics = call.rows_of("norm statistics", statistics)?;
    let input = block.width_rows(&x);
    block.attention_norm.forward(device, parameters, input, &mut attention_statistics, &mut normed)?;

    let mut qkv = call.rows_of("queries, keys and values", spec.qkv_width())?;
    for projection in qkv_projections(spec, parameters) {
        let linear = block.linear(projection.weight, spec.width, projection.outputs);
        let bias = parameters.optional(projection.bias);
        let out = MatMut::columns(&mut qkv, rows, projection.first, projection.outputs, spec.qkv_width());
        device.linear(block.width_rows(&normed), linear, bias, None, out)?;
    }
    if let Some(table) = call.rotary.filter(|_| spec.rotary) {
        device.rotary(block.shape, table, false, &mut qkv)?;
    }

    let mut attention = call.rows_of("attention", spec.query_width())?;
    let mut logsumexp = call.rows_of("attention sums", spec.heads)?;
    device.attention(block.shape, block.attention_dropout(), &qkv, &mut attention, &mut logsumexp)?;

    let mut middle = call.rows_of("residual", spec.width)?;
    let attended = Mat::new(&attention, rows, spec.query_width());
    let output_slots = (Slot::AttentionOutputWeight, Slot::AttentionOutputBias);
    block.project_back(attended, output_slots, ATTENTION_OUTPUT_SITE, &x, &mut middle)?;

    let mut mlp_statistics = call.rows_of("norm statistics", statistics)?;
    let input = block.width_rows(&middle);
    block.mlp_norm.forward(device, parameters, input, &mut mlp_statistics, &mut normed)?;

    let project = |weight: Slot, bias: Slot, what: &str| -> Result<Tensor> {
        let mut out = call.rows_of(what, spec.mlp_width)?;
        let linear = block.linear(weight, spec.width, spec.mlp_width);
        let target = MatMut::new(&mut out, rows, spec.mlp_width);
        device.linear(block.width_rows(&normed), linear, parameters.optional(bias), None, target)?;
        Ok(out)
    };
    let gate = match spec.activation {
        Activation::GeluTanh => None,
        Activation::SwiGlu => Some(project(Slot::GateWeight, Slot::GateBias, "gate")?),
    };
    let up = project(Slot::UpWeight, Slot::UpBias, "MLP projection")?;

    let output = if want_output {
        let mut activated = call.rows_of("activation", spec.mlp_width)?;
        match &gate {
            None => device.gelu(&up, &mut activated)?,
            Some(gate) => device.swiglu(gate, &up, &mut activated)?,
        }
        // The normed rows have done their work: their room becomes the output's.
        let activated = Mat::new(&activated, rows, spec.mlp_width);
        let down = (Slot::DownWeight, Slot::DownBias);
        block.project_back(activated, down, MLP_OUTPUT_SITE, &middle, &mut normed)?;
        Some(normed)
    } else {
        None
    };
    let saved =
        BlockSaved { x, attention_statistics, qkv, attention, logsumexp, middle, mlp_statistics, gate, up };
    Ok((saved, output))
}

/// From the gradient of the output to that of the input, in the same room.
pub(crate) fn backward(
    spec: &BlockSpec,
    call: &Call,
    parameters: &Parameters,
    gradients: &mut Gradients,
    saved: BlockSaved,
    mut dy: Tensor,
) -> Result<Tensor> {
    let block = Block::new(spec, call, parameters);
    let BlockSaved { x, attention_statistics, qkv, attention, logsumexp, middle, mlp_statistics, gate, up } =
        saved;
    let mut scratch = call.rows_of("scratch rows", spec.width)?;
    block.mlp_backward(gradients, gate, up, &middle, &mlp_statistics, &mut scratch, &mut dy)?;
    drop((middle, mlp_statistics));
    let qkv_gradient = block.attention_gradient(gradients, qkv, attention, logsumexp, &mut scratch, &dy)?;
    block.qkv_backward(gradients, &qkv_gradient, &x, &attention_statistics, &mut scratch, &mut dy)?;
    Ok(dy)
}

impl Block<'_> {
    /// Through the MLP and its norm; `dy` becomes the gradient of the residual stream before it.
    #[allow(clippy::too_many_arguments)]
    fn mlp_backward(
        &self,
        gradients: &mut Gradients,
        gate: Option<Tensor>,
        mut up: Tensor,
        middle: &Tensor,
        statistics: &Tensor,
        scratch: &mut Tensor,
        dy: &mut Tensor,
    ) -> Result {
        let (spec, device, rows, mlp) = (self.spec, self.call.device, self.rows, self.spec.mlp_width);
        let down = (Slot::DownWeight, Slot::DownBias);
        let mut activated_gradient = self.call.rows_of("gradient of the activation", mlp)?;
        // (gradient of a projection's output, its slots), for the projections that fed the activation.
        let projections: Vec<(Tensor, (Slot, Slot))> = {
            let d = self.back_gradient(MLP_OUTPUT_SITE, dy, scratch)?;
            let target = MatMut::new(&mut activated_gradient, rows, mlp);
            device.linear_input_gradient(d, self.linear(Slot::DownWeight, mlp, spec.width), target, false)?;
            match gate {
                None => {
                    device.gelu_backward(&mut up, &mut activated_gradient)?;
                    self.parameter_gradients(gradients, down, Mat::new(&up, rows, mlp), d)?;
                    drop(up);
                    vec![(activated_gradient, (Slot::UpWeight, Slot::UpBias))]
                }
                Some(mut gate) => {
                    device.swiglu_backward(&mut gate, &mut up, &mut activated_gradient)?;
                    let activated = Mat::new(&activated_gradient, rows, mlp);
                    self.parameter_gradients(gradients, down, activated, d)?;
                    drop(activated_gradient);
                    let slots = [(Slot::GateWeight, Slot::GateBias), (Slot::UpWeight, Slot::UpBias)];
                    [gate, up].into_iter().zip(slots).collect()
                }
            }
        };
        let input = self.width_rows(middle);
        self.mlp_norm.again(device, self.parameters, input, statistics, scratch)?;
        for (gradient, slots) in &projections {
            let gradient = Mat::new(gradient, rows, mlp);
            self.parameter_gradients(gradients, *slots, self.width_rows(scratch), gradient)?;
        }
        for (index, (gradient, (weight, _))) in projections.iter().enumerate() {
            let linear = self.linear(*weight, spec.width, mlp);
            let target = MatMut::new(scratch, rows, spec.width);
            device.linear_input_gradient(Mat::new(gradient, rows, mlp), linear, target, index > 0)?;
        }
        drop(projections);
        let norm = self.mlp_norm;
        norm.backward(device, self.parameters, gradients, input, statistics, scratch, dy, true)
    }

    /// Through the attention's output projection and the attention: the gradient of queries, keys, values.
    fn attention_gradient(
        &self,
        gradients: &mut Gradients,
        qkv: Tensor,
        attention: Tensor,
        logsumexp: Tensor,
        scratch: &mut Tensor,
        dy: &Tensor,
    ) -> Result<Tensor> {
        let (spec, device, rows, query) = (self.spec, self.call.device, self.rows, self.spec.query_width());
        let mut attention_gradient = self.call.rows_of("gradient of the attention", query)?;
        {
            let d = self.back_gradient(ATTENTION_OUTPUT_SITE, dy, scratch)?;
            let linear = self.linear(Slot::AttentionOutputWeight, query, spec.width);
            let target = MatMut::new(&mut attention_gradient, rows, query);
            device.linear_input_gradient(d, linear, target, false)?;
            let slots = (Slot::AttentionOutputWeight, Slot::AttentionOutputBias);
            self.parameter_gradients(gradients, slots, Mat::new(&attention, rows, query), d)?;
        }
        let mut delta = self.call.rows_of("attention deltas", spec.heads)?;
        let mut qkv_gradient = self.call.rows_of("gradient of queries, keys and values", spec.qkv_width())?;
        device.attention_backward(
            self.shape,
            self.attention_dropout(),
            &qkv,
            &attention,
            &logsumexp,
            &attention_gradient,
            &mut delta,
            &mut qkv_gradient,
        )?;
        if let Some(table) = self.call.rotary.filter(|_| spec.rotary) {
            device.rotary(self.shape, table, true, &mut qkv_gradient)?;
        }
        Ok(qkv_gradient)
    }

    /// Through the projections and the first norm; `dy` becomes the gradient of the block's input.
    fn qkv_backward(
        &self,
        gradients: &mut Gradients,
        qkv_gradient: &Tensor,
        x: &Tensor,
        statistics: &Tensor,
        scratch: &mut Tensor,
        dy: &mut Tensor,
    ) -> Result {
        let (spec, device, rows) = (self.spec, self.call.device, self.rows);
        let input = self.width_rows(x);
        self.attention_norm.again(device, self.parameters, input, statistics, scratch)?;
        let projections = qkv_projections(spec, self.parameters);
        let columns = |projection: &Projection| {
            Mat::columns(qkv_gradient, rows, projection.first, projection.outputs, spec.qkv_width())
        };
        for projection in &projections {
            let slots = (projection.weight, projection.bias);
            self.parameter_gradients(gradients, slots, self.width_rows(scratch), columns(projection))?;
        }
        for (index, projection) in projections.iter().enumerate() {
            let linear = self.linear(projection.weight, spec.width, projection.outputs);
            let target = MatMut::new(scratch, rows, spec.width);
            device.linear_input_gradient(columns(projection), linear, target, index > 0)?;
        }
        let norm = self.attention_norm;
        norm.backward(device, self.parameters, gradients, input, statistics, scratch, dy, true)
    }
}
