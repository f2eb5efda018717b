//! What operations are given: views of tensors, shapes, choices. Each says what it means on its own, whichever device takes
//! it.

use crate::tensor::{Element, Tensor};

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

/// A scalar is a tensor of two elements holding one f64: losses and norms stay on the device until someone
/// asks for them.
pub const SCALAR_ELEMENTS: usize = 2;
