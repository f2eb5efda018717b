//! The operations every device offers. They stand at the height where fusing happens (a linear layer with
//! its bias and residual, not a bare product), so that each kind of hardware can fuse in its own way and
//! layers need not know which. Accumulating operations overwrite where `accumulate` is false: a first
//! gradient needs no pass that clears the sum.
//!
//! - `arguments`: what operations are given.
//! - `course`: when they are done.
//! - `error`: why one was not.

mod arguments;
mod course;
mod error;

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

pub use arguments::{
    AdamW, AttentionBackward, AttentionShape, ClassLoss, DropoutSite, Gelu, Guard, Linear, LossMode, Mat,
    MatMut, NormKind, PatchShape, SCALAR_ELEMENTS, Sgd, Sum, Updated,
};
pub(crate) use course::Place;
pub use course::{Mark, Pass, Span, Stamp};
pub use error::DeviceError;

use crate::buffer::HostBuffer;
use crate::convolutional::Convolutional;
use crate::memory::Arena;
use crate::tensor::{Element, Tensor};

pub type Result<T = ()> = std::result::Result<T, DeviceError>;

pub trait Device: Convolutional + Send + Sync {
    fn name(&self) -> &str;

    /// Begins a pass over operations that are always the same ones, with the same arguments, under this key. A
    /// device that starts many small operations slowly may note them down, and from then on start them at once,
    /// as long as memory is in use as it was. Whatever was made in between must be gone when the pass ends, and
    /// the operations wait for nothing.
    fn begin_pass(&self, _key: u64) -> Result<Pass> {
        Ok(Pass::Direct)
    }

    /// Ends the pass that was begun last.
    fn end_pass(&self) -> Result {
        Ok(())
    }

    /// Ends it without queueing anything that is not queued already: something failed.
    fn abandon_pass(&self) {}

    fn arena(&self) -> &Arc<Arena>;

    /// Bytes in use on a device with memory of its own, by whomever, as its driver counts them.
    fn driver_bytes(&self) -> Option<u64> {
        None
    }

    /// Starts or stops timing kernels; the spans since it was started. A device that does not time its
    /// kernels has none.
    fn profile(&self, _on: bool) -> Result<Vec<Span>> {
        Ok(Vec::new())
    }

    /// The moment at which what was asked so far is done.
    fn stamp(&self) -> Result<Stamp> {
        Ok(Stamp { asked: Instant::now(), mark: 0 })
    }

    /// Seconds between each stamp and the next. Waits for the last.
    fn seconds_between(&self, stamps: Vec<Stamp>) -> Result<Vec<f64>> {
        Ok(stamps.windows(2).map(|pair| (pair[1].asked - pair[0].asked).as_secs_f64()).collect())
    }

    /// Runs `work` where the device's operations start fastest (on the CPU, inside its thread pool).
    fn run(&self, work: &mut (dyn FnMut() + Send));

    /// Waits until everything asked of the device is done.
    fn wait(&self) -> Result;

    /// Whether layers can compute with elements of this kind.
    fn computes(&self, element: Element) -> bool;

    fn set_scalar(&self, scalar: &mut Tensor, value: f64) -> Result;

    /// Waits for what was asked of the device and reads scalars.
    fn scalars(&self, scalars: &[&Tensor]) -> Result<Vec<f64>>;

    /// The same for one.
    fn scalar(&self, scalar: &Tensor) -> Result<f64> {
        Ok(self.scalars(&[scalar])?[0])
    }

    fn zero(&self, tensor: &mut Tensor) -> Result;

    /// `to` becomes `from`, rounded to its kind of element; what is left of a longer `to` becomes zero.
    fn convert(&self, from: &Tensor, to: &mut Tensor) -> Result;

    /// Lets `fill` write the tensor's numbers: in place where the memory is the host's, else through a
    /// buffer that is copied over.
    fn write_floats(&self, tensor: &mut Tensor, fill: &mut dyn FnMut(&mut [f32])) -> Result;

    /// The tensor's numbers where the host can read them: in place, or as a copy.
    fn host_floats<'a>(&self, tensor: &'a Tensor) -> Result<Cow<'a, [f32]>>;

    /// The place that what was asked so far ends at. Bytes are copied beside what is computed, and wait for this much of
    /// it: all that uses their memory must have been asked before.
    fn mark(&self) -> Result<Mark> {
        Ok(Mark::default())
    }

    /// The bytes of some of the tensor's elements where the host can read them: in place, or as a copy.
    fn host_bytes<'a>(
        &self,
        after: &Mark,
        tensor: &'a Tensor,
        elements: Range<usize>,
    ) -> Result<Cow<'a, [u8]>>;

    /// Hands the bytes of some of the tensor's elements to `take`: all of them in place where the memory is the host's,
    /// else piece by piece, each with the place of its first byte, while the next ones come over.
    fn read_bytes(
        &self,
        after: &Mark,
        tensor: &Tensor,
        elements: Range<usize>,
        take: &mut dyn FnMut(usize, &[u8]),
    ) -> Result {
        take(0, &self.host_bytes(after, tensor, elements)?);
        Ok(())
    }

    /// Lets `fill` write the bytes of some of the tensor's elements: all of them in place where the memory is the host's,
    /// else piece by piece, each with the place of its first byte, while the ones before go over. It must not wait for
    /// anything else that is copied to the device. When this returns they are there.
    fn write_bytes(
        &self,
        after: &Mark,
        tensor: &mut Tensor,
        elements: Range<usize>,
        fill: &mut dyn FnMut(usize, &mut [u8]),
    ) -> Result;

    /// An arena of host memory. Where the device can copy from and to it by itself, it may.
    fn host_arena(&self, name: &str, budget: u64) -> Result<Arc<Arena>> {
        Ok(Arena::new(name, budget)?)
    }

    /// Has the device copy some elements of a tensor in host memory to a tensor of its own, from element `first` on, with no
    /// thread of the host touching them. When this returns they are there; or it is false, nothing was done, and they
    /// go by [`Device::write_bytes`].
    ///
    /// # Panics
    /// If the tensors' elements differ, or are fewer; likewise below.
    fn copy_in(
        &self,
        _after: &Mark,
        _from: &Tensor,
        _elements: Range<usize>,
        _to: &mut Tensor,
        _first: usize,
    ) -> Result<bool> {
        Ok(false)
    }

    /// The same in the other direction: some elements of a tensor of its own to one in host memory.
    fn copy_out(
        &self,
        _after: &Mark,
        _from: &Tensor,
        _elements: Range<usize>,
        _to: &mut Tensor,
        _first: usize,
    ) -> Result<bool> {
        Ok(false)
    }

    /// Has the device copy some elements of a tensor of its own to a buffer, from byte `first` on, with no thread of the host
    /// touching them. When this returns they are there; or it is false, nothing was done, and they go by
    /// [`Device::read_bytes`].
    ///
    /// # Panics
    /// If there are fewer elements, or bytes; likewise below.
    fn copy_to_buffer(
        &self,
        _after: &Mark,
        _from: &Tensor,
        _elements: Range<usize>,
        _to: &mut HostBuffer,
        _first: usize,
    ) -> Result<bool> {
        Ok(false)
    }

    /// The same in the other direction: some elements of a tensor of its own, from a buffer's byte `first` on.
    fn copy_from_buffer(
        &self,
        _after: &Mark,
        _from: &HostBuffer,
        _first: usize,
        _to: &mut Tensor,
        _elements: Range<usize>,
    ) -> Result<bool> {
        Ok(false)
    }

    fn write_integers(&self, tensor: &mut Tensor, values: &[i32]) -> Result;

    /// `out = residual + bias + x * W`
    fn linear(
        &self,
        x: Mat,
        weight: Linear,
        bias: Option<&Tensor>,
        residual: Option<&Tensor>,
        out: MatMut,
    ) -> Result;

    /// `before = bias + x * W`, `out = gelu(before)`
    fn linear_gelu(
        &self,
        kind: Gelu,
        x: Mat,
        weight: Linear,
        bias: Option<&Tensor>,
        before: &mut Tensor,
        out: &mut Tensor,
    ) -> Result {
        let target = MatMut::new(before, x.rows, weight.outputs);
        self.linear(x, weight, bias, None, target)?;
        self.gelu(kind, before, out)
    }

    /// `dx = (dy * Wᵀ) * gelu'(before)`: back through a projection and the activation that fed it.
    fn linear_gelu_input_gradient(
        &self,
        kind: Gelu,
        dy: Mat,
        weight: Linear,
        before: &Tensor,
        dx: &mut Tensor,
    ) -> Result;

    /// `dx (+)= dy * Wᵀ`
    fn linear_input_gradient(&self, dy: Mat, weight: Linear, dx: MatMut, accumulate: bool) -> Result;

    /// `gradient (+)= xᵀ * dy`, in the layout `in_out` says.
    fn linear_weight_gradient(
        &self,
        x: Mat,
        dy: Mat,
        gradient: &mut Tensor,
        in_out: bool,
        accumulate: bool,
    ) -> Result;

    /// `gradient (+)= column sums of dy`; where the gradient is longer, the rest of the sum is zero.
    fn bias_gradient(&self, dy: Mat, gradient: &mut Tensor, accumulate: bool) -> Result;

    /// Normalises rows of `x` into `out` and keeps the rows' statistics.
    #[allow(clippy::too_many_arguments)]
    fn norm(
        &self,
        kind: NormKind,
        eps: f32,
        x: Mat,
        weight: &Tensor,
        bias: Option<&Tensor>,
        statistics: &mut Tensor,
        out: &mut Tensor,
    ) -> Result;

    /// From the gradient of the norm's output: weight and bias gradients, `dx (+)=` the input's gradient,
    /// and `dy` becomes the norm's output again, which the weight gradients that come next are made from.
    /// `dx_sums (+)=` the column sums of what `dx` is then, before it is rounded to its element: where `x` is a
    /// residual stream, the bias gradient of the projection that added to it last, without a pass over `dx`.
    #[allow(clippy::too_many_arguments)]
    fn norm_backward(
        &self,
        kind: NormKind,
        x: Mat,
        weight: &Tensor,
        bias: Option<&Tensor>,
        statistics: &Tensor,
        dy: &mut Tensor,
        weight_gradient: Sum,
        bias_gradient: Option<Sum>,
        dx: Sum,
        dx_sums: Option<Sum>,
    ) -> Result;

    /// `out = gelu(x)`
    fn gelu(&self, kind: Gelu, x: &Tensor, out: &mut Tensor) -> Result;

    /// From `x` and the gradient of `gelu(x)`: `x` becomes `gelu(x)`, `gradient` becomes the gradient of
    /// `x`. One pass gives the backward both things it needs.
    fn gelu_backward(&self, kind: Gelu, x: &mut Tensor, gradient: &mut Tensor) -> Result;

    /// `out = silu(gate) * up`
    fn swiglu(&self, gate: &Tensor, up: &Tensor, out: &mut Tensor) -> Result;

    /// From `gate`, `up` and the gradient of their product: `gate` and `up` become their gradients,
    /// `gradient` becomes the product itself.
    fn swiglu_backward(&self, gate: &mut Tensor, up: &mut Tensor, gradient: &mut Tensor) -> Result;

    /// Turns queries and keys of `qkv` in place by the angles of `table` ([sequence, head_size]: cosines
    /// then sines of a row's pairs); `inverse` turns back, which is the gradient.
    fn rotary(&self, shape: AttentionShape, table: &Tensor, inverse: bool, qkv: &mut Tensor) -> Result;

    /// Softmax attention. `logsumexp` (one for each row and head, in an order of the device's own) is what the
    /// backward needs of the scores. `lengths`, an integer a sample in 1..=sequence, says how many of the sample's
    /// rows count where not all do: no query sees a key past them, and queries past them get zeros.
    fn attention(
        &self,
        shape: AttentionShape,
        dropout: Option<DropoutSite>,
        lengths: Option<&Tensor>,
        qkv: &Tensor,
        out: &mut Tensor,
        logsumexp: &mut Tensor,
    ) -> Result;

    /// Gradients of queries, keys and values; those of rows past their sample's length are zero, whatever the gradient
    /// of their output.
    fn attention_backward(
        &self,
        shape: AttentionShape,
        dropout: Option<DropoutSite>,
        of: AttentionBackward,
    ) -> Result;

    /// `out = tokens' rows of the table (+ rows of the position table) (+ the first row of the type table)`
    #[allow(clippy::too_many_arguments)]
    fn embed(
        &self,
        tokens: &Tensor,
        sequence: usize,
        width: usize,
        table: &Tensor,
        positions: Option<&Tensor>,
        types: Option<&Tensor>,
        out: &mut Tensor,
    ) -> Result;

    /// Adds each token's gradient row to its row of `gradient`; tokens that repeat all count.
    fn embed_gradient(
        &self,
        tokens: &Tensor,
        width: usize,
        dy: &Tensor,
        gradient: &mut Tensor,
        accumulate: bool,
    ) -> Result;

    /// Sums gradient rows over samples, one row per position.
    fn position_gradient(
        &self,
        sequence: usize,
        width: usize,
        dy: &Tensor,
        gradient: &mut Tensor,
        accumulate: bool,
    ) -> Result;

    /// Gathers images (f32, [channels, size, size] each) in rows: one of zeros, which leaves room for a row that is
    /// not of the image, then one a patch, its pixels channel by channel.
    fn patches(&self, shape: PatchShape, images: &Tensor, out: &mut Tensor) -> Result;

    /// Of each sample of `sequence` rows the first becomes `first`; then every row has its position's row added.
    fn place_rows(
        &self,
        sequence: usize,
        width: usize,
        first: &Tensor,
        positions: &Tensor,
        out: &mut Tensor,
    ) -> Result;

    /// Rows of `to` become those of `from`, or zeros.
    fn set_rows(&self, from: Option<Mat>, to: MatMut) -> Result;

    /// `out = residual + dropped x`, rows of `cols` in samples of `sequence` rows; without a residual just
    /// the dropped `x`. `x` and `out` are the same tensor.
    fn dropout(
        &self,
        site: DropoutSite,
        sequence: usize,
        cols: usize,
        residual: Option<&Tensor>,
        out: &mut Tensor,
    ) -> Result;

    /// `out = dropped x`
    fn dropout_copy(
        &self,
        site: DropoutSite,
        sequence: usize,
        cols: usize,
        x: &Tensor,
        out: &mut Tensor,
    ) -> Result;

    /// Adds the cross-entropies of the logits' rows to the scalar `loss`; their targets are the elements of
    /// `targets` from `first` on, and a negative one counts for nothing. Works in place: the logits exist
    /// once. Where the rows lie apart, the gradient is zero between them too.
    fn cross_entropy(
        &self,
        targets: &Tensor,
        first: usize,
        mode: LossMode,
        logits: MatMut,
        loss: &mut Tensor,
    ) -> Result;

    /// The same for classes, of which there are few: the targets may be smoothed, and rows whose likeliest class is
    /// their target are added to the scalar `correct`.
    fn class_loss(
        &self,
        targets: &Tensor,
        first: usize,
        settings: ClassLoss,
        logits: MatMut,
        loss: &mut Tensor,
        correct: Option<&mut Tensor>,
    ) -> Result;

    /// Sets the scalar to the sum of squares over all the tensors.
    fn sum_squares(&self, tensors: &[&Tensor], sum: &mut Tensor) -> Result;

    /// One AdamW update of all the tensors: moments, decay and parameter in one pass.
    fn adamw(&self, settings: &AdamW, guard: Guard, tensors: &mut [Updated]) -> Result;

    /// One SGD update of all the tensors; without a state tensor there is no momentum.
    fn sgd(&self, settings: &Sgd, guard: Guard, tensors: &mut [Updated]) -> Result;
}
