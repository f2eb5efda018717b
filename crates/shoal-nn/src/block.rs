//! A transformer block. Between forward and backward it keeps what is dear to make again (projections,
//! attention) and nothing that one cheap pass restores (normed rows, activations). The allocations here are
//! the ones `shoal_model::footprint` counts, in the same order.

use shoal_kernels::device::Result;
use shoal_kernels::{AttentionBackward, AttentionShape, DropoutSite, Linear, Mat, MatMut, Tensor};
use shoal_model::{BlockSpec, NormPlace, Slot};

use crate::layer::{Call, Feed, gelu};
use crate::norm::NormSite;
use crate::parameters::{Gradients, Parameters};

const ATTENTION_SITE: u64 = 0;
const ATTENTION_OUTPUT_SITE: u64 = 1;
const MLP_OUTPUT_SITE: u64 = 2;

/// What a block keeps for its backward.
pub struct BlockSaved {
    /// The block's input, and how much of each sample counts where not all does.
    x: Tensor,
    lengths: Option<Tensor>,
    attention_statistics: Tensor,
    /// Queries, keys and values, already turned.
    qkv: Tensor,
    attention: Tensor,
    logsumexp: Tensor,
    /// The residual stream between attention and MLP, before any norm.
    middle: Tensor,
    mlp_statistics: Tensor,
    mlp: MlpSaved,
    /// The residual stream after the MLP, where a norm comes after it.
    last: Option<Tensor>,
}

impl BlockSaved {
    pub(crate) fn into_input(self) -> Feed {
        match self.lengths {
            Some(lengths) => Feed::Padded(self.x, lengths),
            None => Feed::Hidden(self.x),
        }
    }
}

/// What the gradients of the projections of normed rows are made of, where a backward puts them off.
pub struct PutOff {
    /// The rows that the MLP's projections took, and the gradients of what they made of them.
    mlp_rows: Tensor,
    ups: Vec<ProjectionGradient>,
    /// The same of queries, keys and values.
    attention_rows: Tensor,
    qkv_gradient: Tensor,
}

/// The part of what a block keeps that belongs to the MLP.
struct MlpSaved {
    /// The gate's projection, in gated blocks.
    gate: Option<Tensor>,
    up: Tensor,
    /// Where the precision keeps it.
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
fn qkv_projections(spec: &BlockSpec, is_joint: bool) -> Vec<Projection> {
    let (query, kv) = (spec.query_width(), spec.kv_width());
    let projection = |weight, bias, first, outputs| Projection { weight, bias, first, outputs };
    if is_joint {
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
                causal: spec.causal,
            },
        }
    }

    fn linear(&self, slot: Slot, inputs: usize, outputs: usize) -> Linear<'a> {
        Linear { weight: self.parameters.get(slot), inputs, outputs, in_out: self.spec.weights_in_out }
    }

    fn width_rows<'t>(&self, tensor: &'t Tensor) -> Mat<'t> {
        Mat::new(tensor, self.rows, self.spec.width)
    }

    fn attention_dropout(&self) -> Option<DropoutSite<'_>> {
        self.call.dropout(ATTENTION_SITE, self.spec.attention_dropout)
    }

    fn residual_dropout(&self, site: u64) -> Option<DropoutSite<'_>> {
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

    /// The bias of a projection back into the stream, where its gradient is the sum of the stream's as it
    /// stands: the backward of a norm of that stream makes it on the way.
    fn stream_bias(&self, gradients: &Gradients, bias: Slot, site: u64) -> Option<Slot> {
        (gradients.has(bias) && self.residual_dropout(site).is_none()).then_some(bias)
    }

    fn attention_stream_bias(&self, gradients: &Gradients) -> Option<Slot> {
        self.stream_bias(gradients, Slot::AttentionOutputBias, ATTENTION_OUTPUT_SITE)
    }

    /// Norms that come before the MLP do not see the stream after it.
    fn mlp_stream_bias(&self, gradients: &Gradients) -> Option<Slot> {
        let after = self.spec.norm_place == NormPlace::After;
        self.stream_bias(gradients, Slot::DownBias, MLP_OUTPUT_SITE).filter(|_| after)
    }
}

/// Runs the block; without `want_output` it stops where the backward's needs are met.
pub(crate) fn forward(
    spec: &BlockSpec,
    call: &Call,
    parameters: &Parameters,
    x: Tensor,
    lengths: Option<Tensor>,
    want_output: bool,
) -> Result<(BlockSaved, Option<Tensor>)> {
    let block = Block::new(spec, call, parameters);
    match spec.norm_place {
        NormPlace::Before => block.forward_norms_before(x, lengths, want_output),
        // The last norm's statistics are among the backward's needs, and the output comes with them.
        NormPlace::After => {
            block.forward_norms_after(x, lengths).map(|(saved, output)| (saved, Some(output)))
        }
    }
}

/// From the gradient of the output to that of the input, in the same room; and what the gradients are made of that
/// [`weight_gradients`] adds up later, where some are put off.
pub(crate) fn backward(
    spec: &BlockSpec,
    call: &Call,
    parameters: &Parameters,
    gradients: &mut Gradients,
    saved: BlockSaved,
    dy: Tensor,
    puts_off: bool,
) -> Result<(Tensor, Option<PutOff>)> {
    let block = Block::new(spec, call, parameters);
    match spec.norm_place {
        NormPlace::Before => block.backward_norms_before(gradients, saved, dy, puts_off),
        NormPlace::After => block.backward_norms_after(gradients, saved, dy, puts_off),
    }
}

/// Adds up the gradients that a backward put off. It reads no parameters.
pub(crate) fn weight_gradients(
    spec: &BlockSpec,
    call: &Call,
    gradients: &mut Gradients,
    put_off: &PutOff,
) -> Result {
    let parameters = Parameters::new(Vec::new());
    let block = Block::new(spec, call, &parameters);
    let PutOff { mlp_rows, ups, attention_rows, qkv_gradient } = put_off;
    block.up_parameter_gradients(gradients, ups, mlp_rows)?;
    block.qkv_parameter_gradients(gradients, qkv_gradient, attention_rows)
}

/// `x + attention(norm(x))`, then the same with the MLP.
impl Block<'_> {
    fn forward_norms_before(
        &self,
        x: Tensor,
        lengths: Option<Tensor>,
        want_output: bool,
    ) -> Result<(BlockSaved, Option<Tensor>)> {
        let (spec, call, parameters) = (self.spec, self.call, self.parameters);
        let device = call.device;
        let mut normed = call.rows_of("normed rows", spec.width)?;
        let mut attention_statistics = self.statistics()?;
        let input = self.width_rows(&x);
        self.attention_norm.forward(device, parameters, input, &mut attention_statistics, &mut normed)?;
        let (qkv, attention, logsumexp) = self.attend(&normed, lengths.as_ref())?;
        let middle = self.attention_sum(&attention, &x)?;

        let mut mlp_statistics = self.statistics()?;
        let input = self.width_rows(&middle);
        self.mlp_norm.forward(device, parameters, input, &mut mlp_statistics, &mut normed)?;
        let keeps = spec.keeps_activation(call.precision);
        let (gate, up, activated) = self.project_up(&normed, want_output || keeps)?;
        let output = match (&activated, want_output) {
            (Some(activated), true) => {
                // The normed rows have done their work: their room becomes the output's.
                self.mlp_sum(activated, &middle, &mut normed)?;
                Some(normed)
            }
            _ => None,
        };
        let activated = activated.filter(|_| keeps);
        let saved = BlockSaved {
            x,
            lengths,
            attention_statistics,
            qkv,
            attention,
            logsumexp,
            middle,
            mlp_statistics,
            mlp: MlpSaved { gate, up, activated },
            last: None,
        };
        Ok((saved, output))
    }

    fn backward_norms_before(
        &self,
        gradients: &mut Gradients,
        saved: BlockSaved,
        mut dy: Tensor,
        puts_off: bool,
    ) -> Result<(Tensor, Option<PutOff>)> {
        let (spec, device, parameters) = (self.spec, self.call.device, self.parameters);
        let BlockSaved { x, lengths, attention_statistics, qkv, attention, logsumexp, .. } = saved;
        let BlockSaved { middle, mlp_statistics, mlp, .. } = saved;
        // First the gradient of normed rows; a norm's backward then leaves the rows themselves there.
        let mut scratch = self.call.rows_of("scratch rows", spec.width)?;

        let ups = self.activation_backward(gradients, mlp, &mut scratch, &dy)?;
        self.up_input_gradient(&ups, &mut scratch, false)?;
        let (norm, input) = (self.mlp_norm, self.width_rows(&middle));
        let (to, bias) = ((&mut dy, true), self.attention_stream_bias(gradients));
        norm.backward(device, parameters, gradients, input, &mlp_statistics, &mut scratch, to, bias)?;
        let mut put_off_ups = None;
        if puts_off {
            drop((middle, mlp_statistics));
            let rows = std::mem::replace(&mut scratch, self.call.rows_of("scratch rows", spec.width)?);
            put_off_ups = Some((ups, rows));
        } else {
            self.up_parameter_gradients(gradients, &ups, &scratch)?;
            drop((ups, middle, mlp_statistics));
        }

        let attended = Attended { lengths, qkv, attention, logsumexp };
        let qkv_gradient = self.attention_gradient(gradients, attended, &mut scratch, &dy)?;
        self.qkv_input_gradient(&qkv_gradient, &mut scratch, false)?;
        let (norm, input) = (self.attention_norm, self.width_rows(&x));
        let to = (&mut dy, true);
        norm.backward(device, parameters, gradients, input, &attention_statistics, &mut scratch, to, None)?;
        match put_off_ups {
            Some((ups, mlp_rows)) => {
                Ok((dy, Some(PutOff { mlp_rows, ups, attention_rows: scratch, qkv_gradient })))
            }
            None => {
                self.qkv_parameter_gradients(gradients, &qkv_gradient, &scratch)?;
                Ok((dy, None))
            }
        }
    }
}

/// `norm(x + attention(x))`, then the same with the MLP.
impl Block<'_> {
    fn forward_norms_after(&self, x: Tensor, lengths: Option<Tensor>) -> Result<(BlockSaved, Tensor)> {
        let (spec, call, parameters) = (self.spec, self.call, self.parameters);
        let device = call.device;
        let mut normed = call.rows_of("normed rows", spec.width)?;
        let (qkv, attention, logsumexp) = self.attend(&x, lengths.as_ref())?;
        let middle = self.attention_sum(&attention, &x)?;
        let mut attention_statistics = self.statistics()?;
        let input = self.width_rows(&middle);
        self.attention_norm.forward(device, parameters, input, &mut attention_statistics, &mut normed)?;

        let (gate, up, activated) = self.project_up(&normed, true)?;
        let activated = activated.expect("an activation that was asked for");
        let mut last = call.rows_of("residual", spec.width)?;
        self.mlp_sum(&activated, &normed, &mut last)?;
        let mut mlp_statistics = self.statistics()?;
        // The rows that went into the MLP have done their work: their room becomes the output's.
        let input = self.width_rows(&last);
        self.mlp_norm.forward(device, parameters, input, &mut mlp_statistics, &mut normed)?;
        let activated = Some(activated).filter(|_| spec.keeps_activation(call.precision));
        let saved = BlockSaved {
            x,
            lengths,
            attention_statistics,
            qkv,
            attention,
            logsumexp,
            middle,
            mlp_statistics,
            mlp: MlpSaved { gate, up, activated },
            last: Some(last),
        };
        Ok((saved, normed))
    }

    fn backward_norms_after(
        &self,
        gradients: &mut Gradients,
        saved: BlockSaved,
        mut dy: Tensor,
        puts_off: bool,
    ) -> Result<(Tensor, Option<PutOff>)> {
        let (spec, device, parameters) = (self.spec, self.call.device, self.parameters);
        let BlockSaved { x, lengths, attention_statistics, qkv, attention, logsumexp, .. } = saved;
        let BlockSaved { middle, mlp_statistics, mlp, last, .. } = saved;
        let last = last.expect("norms that come after keep what the last one normed");
        let mut scratch = self.call.rows_of("scratch rows", spec.width)?;

        // A norm's backward moves the gradient into the other room and leaves its output in the first.
        let (norm, input) = (self.mlp_norm, self.width_rows(&last));
        let (to, bias) = ((&mut scratch, false), self.mlp_stream_bias(gradients));
        norm.backward(device, parameters, gradients, input, &mlp_statistics, &mut dy, to, bias)?;
        std::mem::swap(&mut dy, &mut scratch);
        drop((last, mlp_statistics));

        let ups = self.activation_backward(gradients, mlp, &mut scratch, &dy)?;
        self.up_input_gradient(&ups, &mut dy, true)?;
        let (norm, input) = (self.attention_norm, self.width_rows(&middle));
        let (to, bias) = ((&mut scratch, false), self.attention_stream_bias(gradients));
        norm.backward(device, parameters, gradients, input, &attention_statistics, &mut dy, to, bias)?;
        std::mem::swap(&mut dy, &mut scratch);
        let mut put_off_ups = None;
        if puts_off {
            drop((middle, attention_statistics));
            let rows = std::mem::replace(&mut scratch, self.call.rows_of("scratch rows", spec.width)?);
            put_off_ups = Some((ups, rows));
        } else {
            self.up_parameter_gradients(gradients, &ups, &scratch)?;
            drop((ups, middle, attention_statistics));
        }

        let attended = Attended { lengths, qkv, attention, logsumexp };
        let qkv_gradient = self.attention_gradient(gradients, attended, &mut scratch, &dy)?;
        self.qkv_input_gradient(&qkv_gradient, &mut dy, true)?;
        match put_off_ups {
            Some((ups, mlp_rows)) => {
                Ok((dy, Some(PutOff { mlp_rows, ups, attention_rows: x, qkv_gradient })))
            }
            None => {
                self.qkv_parameter_gradients(gradients, &qkv_gradient, &x)?;
                Ok((dy, None))
            }
        }
    }
}

/// What the backward of the attention reads.
struct Attended {
    lengths: Option<Tensor>,
    qkv: Tensor,
    attention: Tensor,
    logsumexp: Tensor,
}

/// The gradient of a projection's output, and the projection's slots.
type ProjectionGradient = (Tensor, (Slot, Slot));

/// The parts that both are made of.
impl Block<'_> {
    fn statistics(&self) -> Result<Tensor> {
        self.call.float_rows_of("norm statistics", self.attention_norm.kind.statistics())
    }

    /// Queries, keys and values of the rows, and their attention with its sums.
    fn attend(&self, x: &Tensor, lengths: Option<&Tensor>) -> Result<(Tensor, Tensor, Tensor)> {
        let (spec, call, rows) = (self.spec, self.call, self.rows);
        let device = call.device;
        let mut qkv = call.rows_of("queries, keys and values", spec.qkv_width())?;
        for projection in qkv_projections(spec, self.parameters.optional(Slot::QkvWeight).is_some()) {
            let linear = self.linear(projection.weight, spec.width, projection.outputs);
            let bias = self.parameters.optional(projection.bias);
            let out = MatMut::columns(&mut qkv, rows, projection.first, projection.outputs, spec.qkv_width());
            device.linear(self.width_rows(x), linear, bias, None, out)?;
        }
        if let Some(table) = call.rotary.filter(|_| spec.rotary) {
            device.rotary(self.shape, table, false, &mut qkv)?;
        }
        let mut attention = call.rows_of("attention", spec.query_width())?;
        let mut logsumexp = call.float_rows_of("attention sums", spec.heads)?;
        let site = self.attention_dropout();
        device.attention(self.shape, site, lengths, &qkv, &mut attention, &mut logsumexp)?;
        Ok((qkv, attention, logsumexp))
    }

    /// The residual stream between attention and MLP.
    fn attention_sum(&self, attention: &Tensor, residual: &Tensor) -> Result<Tensor> {
        let mut sum = self.call.rows_of("residual", self.spec.width)?;
        let attended = Mat::new(attention, self.rows, self.spec.query_width());
        let slots = (Slot::AttentionOutputWeight, Slot::AttentionOutputBias);
        self.project_back(attended, slots, ATTENTION_OUTPUT_SITE, residual, &mut sum)?;
        Ok(sum)
    }

    /// The residual stream after the MLP.
    fn mlp_sum(&self, activated: &Tensor, residual: &Tensor, sum: &mut Tensor) -> Result {
        let activated = Mat::new(activated, self.rows, self.spec.mlp_width);
        self.project_back(activated, (Slot::DownWeight, Slot::DownBias), MLP_OUTPUT_SITE, residual, sum)
    }

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
        match gelu(self.spec.activation) {
            Some(kind) => {
                let mut up = room("MLP projection")?;
                if !activate {
                    project(Slot::UpWeight, Slot::UpBias, &mut up)?;
                    return Ok((None, up, None));
                }
                let mut activated = room("activation")?;
                let linear = self.linear(Slot::UpWeight, self.spec.width, mlp);
                let bias = self.parameters.optional(Slot::UpBias);
                device.linear_gelu(kind, input, linear, bias, &mut up, &mut activated)?;
                Ok((None, up, Some(activated)))
            }
            None => {
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

    /// `to (+)=` the gradient of the rows that the MLP's projections took.
    fn up_input_gradient(&self, ups: &[ProjectionGradient], to: &mut Tensor, accumulate: bool) -> Result {
        let (spec, rows) = (self.spec, self.rows);
        for (index, (gradient, (weight, _))) in ups.iter().enumerate() {
            let linear = self.linear(*weight, spec.width, spec.mlp_width);
            let (gradient, to) =
                (Mat::new(gradient, rows, spec.mlp_width), MatMut::new(to, rows, spec.width));
            self.call.device.linear_input_gradient(gradient, linear, to, accumulate || index > 0)?;
        }
        Ok(())
    }

    /// Gradients of the MLP's projections of the rows `x`.
    fn up_parameter_gradients(
        &self,
        gradients: &mut Gradients,
        ups: &[ProjectionGradient],
        x: &Tensor,
    ) -> Result {
        for (gradient, slots) in ups {
            let gradient = Mat::new(gradient, self.rows, self.spec.mlp_width);
            self.parameter_gradients(gradients, *slots, self.width_rows(x), gradient)?;
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
    ) -> Result<Vec<ProjectionGradient>> {
        let (device, rows, mlp) = (self.call.device, self.rows, self.spec.mlp_width);
        let linear = self.linear(Slot::DownWeight, mlp, self.spec.width);
        let mut gradient = self.call.rows_of("gradient of the activation", mlp)?;
        let d = self.back_gradient(MLP_OUTPUT_SITE, dy, scratch)?;
        if self.mlp_stream_bias(gradients).is_none() {
            self.bias_gradient(gradients, Slot::DownBias, d)?;
        }
        let kind = gelu(self.spec.activation);
        if let (Some(kind), Some(activated)) = (kind, activated) {
            device.linear_gelu_input_gradient(kind, d, linear, &up, &mut gradient)?;
            self.weight_gradient(gradients, Slot::DownWeight, Mat::new(&activated, rows, mlp), d)?;
            return Ok(vec![(gradient, (Slot::UpWeight, Slot::UpBias))]);
        }
        device.linear_input_gradient(d, linear, MatMut::new(&mut gradient, rows, mlp), false)?;
        match (kind, gate) {
            (Some(kind), _) => {
                device.gelu_backward(kind, &mut up, &mut gradient)?;
                self.weight_gradient(gradients, Slot::DownWeight, Mat::new(&up, rows, mlp), d)?;
                Ok(vec![(gradient, (Slot::UpWeight, Slot::UpBias))])
            }
            (None, gate) => {
                let mut gate = gate.expect("a gated block keeps its gate");
                device.swiglu_backward(&mut gate, &mut up, &mut gradient)?;
                self.weight_gradient(gradients, Slot::DownWeight, Mat::new(&gradient, rows, mlp), d)?;
                let slots = [(Slot::GateWeight, Slot::GateBias), (Slot::UpWeight, Slot::UpBias)];
                Ok([gate, up].into_iter().zip(slots).collect())
            }
        }
    }

    /// Through the attention's output projection and the attention: the gradient of queries, keys, values.
    fn attention_gradient(
        &self,
        gradients: &mut Gradients,
        Attended { lengths, qkv, attention, logsumexp }: Attended,
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
            if self.attention_stream_bias(gradients).is_none() {
                self.bias_gradient(gradients, Slot::AttentionOutputBias, d)?;
            }
        }
        let per_row = spec.attention_scratch(self.call.precision);
        let mut attention_scratch = self.call.float_rows_of("scratch of the attention", per_row)?;
        let mut qkv_gradient = self.call.rows_of("gradient of queries, keys and values", spec.qkv_width())?;
        device.attention_backward(
            self.shape,
            self.attention_dropout(),
            AttentionBackward {
                lengths: lengths.as_ref(),
                qkv: &qkv,
                out: &attention,
                logsumexp: &logsumexp,
                out_gradient: &attention_gradient,
                scratch: &mut attention_scratch,
                qkv_gradient: &mut qkv_gradient,
            },
        )?;
        if let Some(table) = self.call.rotary.filter(|_| spec.rotary) {
            device.rotary(self.shape, table, true, &mut qkv_gradient)?;
        }
        Ok(qkv_gradient)
    }

    /// `to (+)=` the gradient of the rows that queries, keys and values were made of.
    fn qkv_input_gradient(&self, qkv_gradient: &Tensor, to: &mut Tensor, accumulate: bool) -> Result {
        let is_joint = self.parameters.optional(Slot::QkvWeight).is_some();
        for (index, projection) in qkv_projections(self.spec, is_joint).iter().enumerate() {
            let linear = self.linear(projection.weight, self.spec.width, projection.outputs);
            let gradient = self.qkv_columns(qkv_gradient, projection);
            let to = MatMut::new(to, self.rows, self.spec.width);
            self.call.device.linear_input_gradient(gradient, linear, to, accumulate || index > 0)?;
        }
        Ok(())
    }

    /// Gradients of the projections that made queries, keys and values of the rows `x`.
    fn qkv_parameter_gradients(
        &self,
        gradients: &mut Gradients,
        qkv_gradient: &Tensor,
        x: &Tensor,
    ) -> Result {
        for projection in &qkv_projections(self.spec, gradients.has(Slot::QkvWeight)) {
            let slots = (projection.weight, projection.bias);
            let gradient = self.qkv_columns(qkv_gradient, projection);
            self.parameter_gradients(gradients, slots, self.width_rows(x), gradient)?;
        }
        Ok(())
    }

    fn qkv_columns<'t>(&self, qkv: &'t Tensor, projection: &Projection) -> Mat<'t> {
        Mat::columns(qkv, self.rows, projection.first, projection.outputs, self.spec.qkv_width())
    }
}
