//! The operations every device offers. They stand at the height where fusing happens (a linear layer with
//! its bias and residual, not a bare product), so that each kind of hardware can fuse in its own way and
//! layers need not know which. Accumulating operations overwrite where `accumulate` is false: a first
//! gradient needs no pass that clears the sum.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use thiserror::Error;

use crate::convolutional::Convolutional;
use crate::memory::{Arena, MemoryError};
use crate::tensor::{Element, Tensor};

#[derive(Debug, Error)]
pub enum DeviceError {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("{part} is not on this machine: {library} cannot be loaded")]
    NoLibrary { library: &'static str, part: &'static str },
    #[error("the NVIDIA driver is too old: it speaks CUDA {}.{}, {}.{} is needed", found / 1000, found % 1000 / 10, needed / 1000, needed % 1000 / 10)]
    OldDriver { found: i32, needed: i32 },
    #[error("there is no GPU {asked}: the driver finds {found}")]
    NoGpu { asked: usize, found: usize },
    #[error("this machine's NVRTC {}.{} has no code for a GPU of compute capability {}.{}", nvrtc.0, nvrtc.1, capability / 10, capability % 10)]
    OldGpu { capability: i32, nvrtc: (i32, i32) },
    #[error("{device}: {call} failed: {system}")]
    Driver { device: String, call: &'static str, system: String },
    #[error("the kernels could not be compiled: {call} failed: {said}")]
    Compile { call: &'static str, said: String },
    #[error("{call} failed: {said}")]
    Blas { call: &'static str, said: String },
    #[error("{call} failed: {said}")]
    Cudnn { call: &'static str, said: String },
}

impl DeviceError {
    pub fn hint(&self) -> Option<String> {
        match self {
            DeviceError::Memory(error) => error.hint(),
            DeviceError::NoLibrary { library, .. } => Some(match *library {
                "libcuda.so.1" => "install the NVIDIA driver, or train on the processor".into(),
                library => format!(
                    "install the CUDA runtime libraries (12 or newer) and name {library}'s folder in LD_LIBRARY_PATH, or train on the processor"
                ),
            }),
            DeviceError::OldDriver { .. } => Some("install a newer NVIDIA driver".into()),
            DeviceError::NoGpu { .. } => {
                Some("look at nvidia-smi and CUDA_VISIBLE_DEVICES, or train on the processor".into())
            }
            DeviceError::OldGpu { .. } => {
                Some("install the libraries of an older CUDA: version 12 still has this GPU".into())
            }
            DeviceError::Driver { .. } => {
                Some("nvidia-smi shows the state of the GPU; the kernel log names hardware faults".into())
            }
            DeviceError::Compile { .. } | DeviceError::Blas { .. } | DeviceError::Cudnn { .. } => None,
        }
    }
}

pub type Result<T = ()> = std::result::Result<T, DeviceError>;

/// Rows of a tensor: `cols` elements from `offset`, then again every `stride`.
#[derive(Clone, Copy)]
pub struct Mat<'a> {
    pub tensor: &'a Tensor,
    pub offset: usize,
    pub rows: usize,
    pub cols: usize,
    pub stride: usize,
}

impl<'a> Mat<'a> {
    /// The whole tensor as `rows` rows.
    pub fn new(tensor: &'a Tensor, rows: usize, cols: usize) -> Mat<'a> {
        Mat::columns(tensor, rows, 0, cols, cols)
    }

    /// Columns `first..first + cols` of a tensor whose rows are `stride` wide.
    pub fn columns(tensor: &'a Tensor, rows: usize, first: usize, cols: usize, stride: usize) -> Mat<'a> {
        assert_fits(tensor, first, rows, cols, stride);
        Mat { tensor, offset: first, rows, cols, stride }
    }

    /// Rows `first..first + rows` of this matrix.
    pub fn rows(self, first: usize, rows: usize) -> Mat<'a> {
        assert!(first + rows <= self.rows);
        Mat { offset: self.offset + first * self.stride, rows, ..self }
    }
}

/// Rows of a tensor that an operation writes.
pub struct MatMut<'a> {
    pub tensor: &'a mut Tensor,
    pub offset: usize,
    pub rows: usize,
    pub cols: usize,
    pub stride: usize,
}

impl<'a> MatMut<'a> {
    pub fn new(tensor: &'a mut Tensor, rows: usize, cols: usize) -> MatMut<'a> {
        MatMut::columns(tensor, rows, 0, cols, cols)
    }

    pub fn columns(
        tensor: &'a mut Tensor,
        rows: usize,
        first: usize,
        cols: usize,
        stride: usize,
    ) -> MatMut<'a> {
        assert_fits(tensor, first, rows, cols, stride);
        MatMut { tensor, offset: first, rows, cols, stride }
    }

    /// Rows `first..first + rows` of this matrix.
    pub fn rows(self, first: usize, rows: usize) -> MatMut<'a> {
        assert!(first + rows <= self.rows);
        MatMut { offset: self.offset + first * self.stride, rows, ..self }
    }
}

fn assert_fits(tensor: &Tensor, offset: usize, rows: usize, cols: usize, stride: usize) {
    assert!(cols <= stride, "rows of {cols} overlap at a stride of {stride}");
    let end = if rows == 0 { 0 } else { offset + (rows - 1) * stride + cols };
    assert!(end <= tensor.len(), "a matrix that ends at {end} in a tensor of {}", tensor.len());
}

/// A weight matrix and how it is stored.
#[derive(Clone, Copy)]
pub struct Linear<'a> {
    pub weight: &'a Tensor,
    pub inputs: usize,
    pub outputs: usize,
    /// Stored as [inputs, outputs]; otherwise as [outputs, inputs].
    pub in_out: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Subtract the mean, divide by the deviation; two statistics a row.
    Layer,
    /// Divide by the root mean square; one statistic a row.
    Rms,
}

impl NormKind {
    pub fn statistics(self) -> usize {
        match self {
            NormKind::Layer => 2,
            NormKind::Rms => 1,
        }
    }
}

/// Which of the two functions called GELU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gelu {
    /// Its approximation by the hyperbolic tangent.
    Tanh,
    /// `x` times the normal distribution's share below `x`, exactly.
    Erf,
}

/// What an attention operation works on. Queries, keys and values are columns of one `qkv` row:
/// `heads * head_size` of queries, then `kv_heads * head_size` each of keys and values.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    pub samples: usize,
    pub sequence: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_size: usize,
    pub scale: f32,
    /// Whether a query sees only the keys up to its own position; else it sees all of its sample's.
    pub causal: bool,
}

impl AttentionShape {
    pub fn query_width(&self) -> usize {
        self.heads * self.head_size
    }

    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_size
    }

    pub fn rows(&self) -> usize {
        self.samples * self.sequence
    }

    /// # Panics
    /// If there are lengths, but not one a sample.
    pub(crate) fn assert_lengths(&self, lengths: Option<&Tensor>) {
        if let Some(lengths) = lengths {
            assert_eq!((lengths.element(), lengths.len()), (Element::F32, self.samples));
        }
    }

    /// How many keys, from the first on, a query sees.
    pub fn keys_seen(&self, query: usize) -> usize {
        if self.causal { query + 1 } else { self.sequence }
    }
}

/// Images, each in rows of its own: one of zeros, then one a patch.
#[derive(Clone, Copy, Debug)]
pub struct PatchShape {
    pub samples: usize,
    pub channels: usize,
    /// Rows of pixels, and columns; a multiple of `patch`.
    pub size: usize,
    pub patch: usize,
}

impl PatchShape {
    /// Rows of one image.
    pub fn rows(&self) -> usize {
        (self.size / self.patch).pow(2) + 1
    }
}

/// What the backward of attention reads and writes.
pub struct AttentionBackward<'a> {
    /// As the forward had them.
    pub lengths: Option<&'a Tensor>,
    pub qkv: &'a Tensor,
    pub out: &'a Tensor,
    pub logsumexp: &'a Tensor,
    pub out_gradient: &'a Tensor,
    /// At least of the size of `logsumexp`; where it has more, a faster kernel may fit.
    pub scratch: &'a mut Tensor,
    pub qkv_gradient: &'a mut Tensor,
}

impl AttentionBackward<'_> {
    /// # Panics
    /// If a length is not what the shape says.
    pub(crate) fn assert_fits(&self, shape: &AttentionShape) {
        let (joint, single) = (shape.rows() * shape.qkv_width(), shape.rows() * shape.query_width());
        shape.assert_lengths(self.lengths);
        assert_eq!((self.qkv.len(), self.qkv_gradient.len()), (joint, joint));
        assert_eq!((self.out.len(), self.out_gradient.len()), (single, single));
        assert_eq!(self.logsumexp.len(), shape.rows() * shape.heads);
        assert!(self.scratch.len() >= self.logsumexp.len());
    }
}

/// Where elements are dropped: the mask is a function of this and of (sample, row, column).
#[derive(Clone, Copy)]
pub struct DropoutSite<'a> {
    pub rate: f32,
    /// Seed, layer and site, folded.
    pub key: u64,
    /// A scalar that is folded into the key: the step's number. It lies on the device, so that a step's operations
    /// are the same ones every time.
    pub step: Option<&'a Tensor>,
    /// Number of the micro-batch's first sample within the global batch.
    pub first_sample: u64,
}

/// What a cross-entropy leaves in the place of the logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LossMode {
    /// The gradient of `scale * sum of losses`.
    Gradient { scale: f32 },
    /// Nothing of use: only the loss is wanted.
    LossOnly,
}

/// The cross-entropy of classes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClassLoss {
    pub mode: LossMode,
    /// The share of each target that is spread evenly over all classes.
    pub smoothing: f32,
}

/// Whether gradients are applied at all, and by how much: decided on the device, where norm and loss lie, so
/// that no update waits for the host. An update does nothing where either of them is not a finite number.
#[derive(Clone, Copy)]
pub struct Guard<'a> {
    /// A scalar: the sum of squares over all gradients, as they stand.
    pub norm_squared: &'a Tensor,
    /// A scalar.
    pub loss: &'a Tensor,
    /// What the gradients were multiplied by on their way; updates divide by it.
    pub scale: f32,
    /// Gradients are shortened to this norm where they are longer.
    pub clip_norm: Option<f32>,
}

impl Guard<'_> {
    /// What gradients are multiplied by, `None` for no update, from the two scalars.
    pub(crate) fn factor(&self, norm_squared: f64, loss: f64) -> Option<f32> {
        if !(norm_squared.is_finite() && loss.is_finite()) {
            return None;
        }
        let scale = f64::from(self.scale);
        let clip = self.clip_norm.map_or(1.0, |max| f64::from(max) / (norm_squared.sqrt() / scale + 1e-6));
        Some((clip.min(1.0) / scale) as f32)
    }
}

/// A tensor to update.
pub struct Updated<'a> {
    /// It may be longer: what is past the parameter's end is zero.
    pub gradient: &'a Tensor,
    /// The optimizer's own tensors, as many as its kind has.
    pub state: &'a mut [Tensor],
    pub parameter: &'a mut Tensor,
    /// The copy that layers compute with, where that is not the parameter itself; it may be longer.
    pub copy: Option<&'a mut Tensor>,
    pub weight_decay: f32,
}

/// A sum, and whether to add to what it holds.
pub type Sum<'a> = (&'a mut Tensor, bool);

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    pub lr: f32,
    pub beta1: f32,
    pub beta2: f32,
    pub eps: f32,
    /// The number of this update, from 1: it decides the bias corrections.
    pub update: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    pub lr: f32,
    pub momentum: f32,
    /// The number of this update, from 1: the first one starts the momentum.
    pub update: u64,
}

/// What one kind of kernel took while a device was profiled.
#[derive(Clone, Debug)]
pub struct Span {
    pub name: String,
    pub calls: usize,
    pub seconds: f64,
}

/// A moment in the course of what a device is asked for: see [`Device::stamp`].
pub struct Stamp {
    /// When it was asked for.
    pub(crate) asked: Instant,
    /// The device's own mark, where it works behind the host's back.
    pub(crate) mark: u64,
}

/// A place in the order of what a device is asked for: see [`Device::mark`]. One by default where it is done as soon as it
/// is asked.
#[derive(Clone, Default)]
pub struct Mark(Option<Arc<dyn Place>>);

/// What a device knows a mark by.
pub(crate) trait Place: Send + Sync {
    fn wait(&self) -> Result;
}

impl Mark {
    pub(crate) fn at(place: Arc<dyn Place>) -> Mark {
        Mark(Some(place))
    }

    /// Waits until the device has come there.
    pub(crate) fn wait(&self) -> Result {
        self.0.as_ref().map_or(Ok(()), |place| place.wait())
    }
}

/// A scalar is a tensor of two elements holding one f64: losses and norms stay on the device until someone
/// asks for them.
pub const SCALAR_ELEMENTS: usize = 2;

/// How a pass over some operations goes: see [`Device::begin_pass`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Each operation is queued when it is asked for.
    Direct,
    /// Operations are noted down, and queued together when the pass ends.
    Recorded,
    /// They were noted down before: none is asked for again, and all are queued when the pass ends.
    Replayed,
}

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
