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
    /// Where the precision keeps it.
    activated: Option<Tensor>,
}

impl BlockSaved {
    pub(crate) fn into_input(self) -> Tensor {
        self.x
    }
}

/// The part of it that belongs to the MLP.
struct MlpSaved {
    gate: Option<Tensor>,
    up: Tensor,
    activated: Option<Tensor>,
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
        self.weight_gradient(gradients, weight, x, dy)?;
        self.bias_gradient(gradients, bias, dy)
    }

    fn weight_gradient(&self, gradients: &mut Gradients, weight: Slot, x: Mat, dy: Mat) -> Result {
        let (sum, more) = gradients.add_to(weight);
        self.call.device.linear_weight_gradient(x, dy, sum, self.spec.weights_in_out, more)
    }

    fn bias_gradient(&self, gradients: &mut Gradients, bias: Slot, dy: Mat) -> Result {
        if !gradients.has(bias) {
            return Ok(());
        }
        let (sum, more) = gradients.add_to(bias);
        self.call.device.bias_gradient(dy, sum, more)
    }

    /// The attention's output bias, where its gradient is the sum of the stream's as it stands.
    fn undropped_attention_bias(&self, gradients: &Gradients) -> Option<Slot> {
        let slot = Slot::AttentionOutputBias;
        (gradients.has(slot) && self.residual_dropout(ATTENTION_OUTPUT_SITE).is_none()).then_some(slot)
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
    let mut attention_statistics = call.float_rows_of("norm statistics", statistics)?;
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
    let mut logsumexp = call.float_rows_of("attention sums", spec.heads)?;
    device.attention(block.shape, block.attention_dropout(), &qkv, &mut attention, &mut logsumexp)?;

    let mut middle = call.rows_of("residual", spec.width)?;
    let attended = Mat::new(&attention, rows, spec.query_width());
    let output_slots = (Slot::AttentionOutputWeight, Slot::AttentionOutputBias);
    block.project_back(attended, output_slots, ATTENTION_OUTPUT_SITE, &x, &mut middle)?;

    let mut mlp_statistics = call.float_rows_of("norm statistics", statistics)?;
    let input = block.width_rows(&middle);
    block.mlp_norm.forward(device, parameters, input, &mut mlp_statistics, &mut normed)?;

    let keeps = spec.keeps_activation(call.precision);
    let (gate, up, activated) = block.project_up(&normed, want_output || keeps)?;
    let output = match (&activated, want_output) {
        (Some(activated), true) => {
            // The normed rows have done their work: their room becomes the output's.
            let activated = Mat::new(activated, rows, spec.mlp_width);
            let down = (Slot::DownWeight, Slot::DownBias);
            block.project_back(activated, down, MLP_OUTPUT_SITE, &middle, &mut normed)?;
            Some(normed)
        }
        _ => None,
    };
    let activated = activated.filter(|_| keeps);
    let saved = BlockSaved {
        x,
        attention_statistics,
        qkv,
        attention,
        logsumexp,
        middle,
        mlp_statistics,
        gate,
        up,
        activated,
    };
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
    let BlockSaved { x, attention_statistics, qkv, attention, logsumexp, .. } = saved;
    let BlockSaved { middle, mlp_statistics, gate, up, activated, .. } = saved;
    let mut scratch = call.rows_of("scratch rows", spec.width)?;
    let mlp = MlpSaved { gate, up, activated };
    block.mlp_backward(gradients, mlp, &middle, &mlp_statistics, &mut scratch, &mut dy)?;
    drop((middle, mlp_statistics));
    let qkv_gradient = block.attention_gradient(gradients, qkv, attention, logsumexp, &mut scratch, &dy)?;
    block.qkv_backward(gradients, &qkv_gradient, &x, &attention_statistics, &mut scratch, &mut dy)?;
    Ok(dy)
}

impl Block<'_> {
    /// The projections of the normed rows, and, if wanted, their activation.
    fn project_up(
        &self,
        normed: &Tensor,
        activate: bool,
    ) -> Result<(Option<Tensor>, Tensor, Option<Tensor>)> {
        let (device, mlp) = (self.call.device, self.spec.mlp_width);
        let input = self.width_rows(normed);
        let project = |weight: Slot, bias: Slot, out: &mut Tensor| {
            let linear = self.linear(weight, self.spec.width, mlp);
            let target = MatMut::new(out, self.rows, mlp);
            device.linear(input, linear, self.parameters.optional(bias), None, target)
        };
        let room = |what: &str| self.call.rows_of(what, mlp);
        match self.spec.activation {
            Activation::GeluTanh => {
                let mut up = room("MLP projection")?;
                if !activate {
                    project(Slot::UpWeight, Slot::UpBias, &mut up)?;
                    return Ok((None, up, None));
                }
                let mut activated = room("activation")?;
                let linear = self.linear(Slot::UpWeight, self.spec.width, mlp);
                let bias = self.parameters.optional(Slot::UpBias);
                device.linear_gelu(input, linear, bias, &mut up, &mut activated)?;
                Ok((None, up, Some(activated)))
            }
            Activation::SwiGlu => {
                let mut gate = room("gate")?;
                project(Slot::GateWeight, Slot::GateBias, &mut gate)?;
                let mut up = room("MLP projection")?;
                project(Slot::UpWeight, Slot::UpBias, &mut up)?;
                if !activate {
                    return Ok((Some(gate), up, None));
                }
                let mut activated = room("activation")?;
                device.swiglu(&gate, &up, &mut activated)?;
                Ok((Some(gate), up, Some(activated)))
            }
        }
    }

    /// Through the MLP and its norm; `dy` becomes the gradient of the residual stream before it.
    fn mlp_backward(
        &self,
        gradients: &mut Gradients,
        mlp: MlpSaved,
        middle: &Tensor,
        statistics: &Tensor,
        scratch: &mut Tensor,
        dy: &mut Tensor,
    ) -> Result {
        let projections = self.activation_backward(gradients, mlp, scratch, dy)?;
        let (spec, device, rows) = (self.spec, self.call.device, self.rows);
        for (index, (gradient, (weight, _))) in projections.iter().enumerate() {
            let linear = self.linear(*weight, spec.width, spec.mlp_width);
            let target = MatMut::new(scratch, rows, spec.width);
            device.linear_input_gradient(
                Mat::new(gradient, rows, spec.mlp_width),
                linear,
                target,
                index > 0,
            )?;
        }
        let (norm, input) = (self.mlp_norm, self.width_rows(middle));
        let bias = self.undropped_attention_bias(gradients);
        norm.backward(device, self.parameters, gradients, input, statistics, scratch, (dy, true), bias)?;
        for (gradient, slots) in &projections {
            let gradient = Mat::new(gradient, rows, spec.mlp_width);
            self.parameter_gradients(gradients, *slots, self.width_rows(scratch), gradient)?;
        }
        Ok(())
    }

    /// Through the projection back and the activation: the gradient of each projection that fed it, and its
    /// slots.
    fn activation_backward(
        &self,
        gradients: &mut Gradients,
        MlpSaved { gate, mut up, activated }: MlpSaved,
        scratch: &mut Tensor,
        dy: &Tensor,
    ) -> Result<Vec<(Tensor, (Slot, Slot))>> {
        let (device, rows, mlp) = (self.call.device, self.rows, self.spec.mlp_width);
        let down = (Slot::DownWeight, Slot::DownBias);
        let linear = self.linear(Slot::DownWeight, mlp, self.spec.width);
        let mut gradient = self.call.rows_of("gradient of the activation", mlp)?;
        let d = self.back_gradient(MLP_OUTPUT_SITE, dy, scratch)?;
        if let Some(activated) = activated {
            device.linear_gelu_input_gradient(d, linear, &up, &mut gradient)?;
            self.parameter_gradients(gradients, down, Mat::new(&activated, rows, mlp), d)?;
            return Ok(vec![(gradient, (Slot::UpWeight, Slot::UpBias))]);
        }
        device.linear_input_gradient(d, linear, MatMut::new(&mut gradient, rows, mlp), false)?;
        match gate {
            None => {
                device.gelu_backward(&mut up, &mut gradient)?;
                self.parameter_gradients(gradients, down, Mat::new(&up, rows, mlp), d)?;
                Ok(vec![(gradient, (Slot::UpWeight, Slot::UpBias))])
            }
            Some(mut gate) => {
                device.swiglu_backward(&mut gate, &mut up, &mut gradient)?;
                self.parameter_gradients(gradients, down, Mat::new(&gradient, rows, mlp), d)?;
                let slots = [(Slot::GateWeight, Slot::GateBias), (Slot::UpWeight, Slot::UpBias)];
                Ok([gate, up].into_iter().zip(slots).collect())
            }
        }
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
            let attended = Mat::new(&attention, rows, query);
            self.weight_gradient(gradients, Slot::AttentionOutputWeight, attended, d)?;
            // Where nothing was dropped, the MLP norm's backward has made the bias's.
            if self.undropped_attention_bias(gradients).is_none() {
                self.bias_gradient(gradients, Slot::AttentionOutputBias, d)?;
            }
        }
        let per_row = spec.attention_scratch(self.call.precision);
        let mut attention_scratch = self.call.float_rows_of("scratch of the attention", per_row)?;
        let mut qkv_gradient = self.call.rows_of("gradient of queries, keys and values", spec.qkv_width())?;
        device.attention_backward(
            self.shape,
            self.attention_dropout(),
            &qkv,
            &attention,
            &logsumexp,
            &attention_gradient,
            &mut attention_scratch,
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
        let projections = qkv_projections(spec, self.parameters);
        let columns = |projection: &Projection| {
            Mat::columns(qkv_gradient, rows, projection.first, projection.outputs, spec.qkv_width())
        };
        for (index, projection) in projections.iter().enumerate() {
            let linear = self.linear(projection.weight, spec.width, projection.outputs);
            let target = MatMut::new(scratch, rows, spec.width);
            device.linear_input_gradient(columns(projection), linear, target, index > 0)?;
        }
        let (norm, input) = (self.attention_norm, self.width_rows(x));
        norm.backward(device, self.parameters, gradients, input, statistics, scratch, (dy, true), None)?;
        for projection in &projections {
            let slots = (projection.weight, projection.bias);
            self.parameter_gradients(gradients, slots, self.width_rows(scratch), columns(projection))?;
        }
        Ok(())
    }
}
