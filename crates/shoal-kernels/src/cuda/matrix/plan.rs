//! A kind of product as cuBLASLt knows it: descriptors, and the algorithms that the library would use.

use cudarc::cublaslt::{result, sys};
use sys::cublasLtClusterShape_t as Shape;
use sys::cublasLtEpilogue_t as Kind;
use sys::cublasLtMatmulAlgoConfigAttributes_t as Config;
use sys::cublasLtMatmulDescAttributes_t as Attribute;
use sys::cublasLtMatmulPreferenceAttributes_t as Wish;
use sys::cublasLtReductionScheme_t as Scheme;

use super::{Parts, Product};
use crate::cuda::launch::Address;
use crate::device::{DeviceError, Result};
use crate::tensor::Element;

/// The largest alignment that algorithms ask for.
const ALIGNMENT_MAX: u64 = 256;

/// Algorithms asked for.
const CANDIDATES: usize = 8;

/// Multiplications from which on another way than the first is worth looking for.
const WORTH_MEASURING: usize = 1 << 32;

/// Blocks that an algorithm may let run side by side and share memory.
///
/// On a share of a GPU (NVIDIA's MPS) the library leaves parts of an output unwritten where blocks go in fours or more,
/// at most sizes of the share: cuBLASLt of CUDA 13.0 on an H200, of 300 products in halves 131 at 40 %, 91 at 30 %, 34 at
/// 20 %, none at 10, 25, 50 and 90 %, the same ones each time; PyTorch's come out wrong as ours did. With blocks alone or
/// in pairs none of 1,500 did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Clusters {
    Any,
    Pairs,
}

impl Clusters {
    fn allow(self, shape: u16) -> bool {
        let pairs = [
            Shape::CUBLASLT_CLUSTER_SHAPE_1x1x1,
            Shape::CUBLASLT_CLUSTER_SHAPE_2x1x1,
            Shape::CUBLASLT_CLUSTER_SHAPE_1x2x1,
        ];
        self == Clusters::Any || pairs.iter().any(|pair| *pair as u16 == shape)
    }
}

/// How an algorithm's blocks are clustered; none where it knows no clusters.
fn cluster(algorithm: &sys::cublasLtMatmulAlgo_t) -> Option<u16> {
    let (mut shape, mut written) = (0u16, 0);
    // SAFETY: the library writes no more than it is told there is room for.
    let status = unsafe {
        sys::cublasLtMatmulAlgoConfigGetAttribute(
            algorithm,
            Config::CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID,
            std::ptr::from_mut(&mut shape).cast(),
            size_of::<u16>(),
            &mut written,
        )
    };
    (status == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS).then_some(shape)
}

/// All that an algorithm depends on: everything but the addresses, of which only the alignment counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) shape: (usize, usize, usize),
    /// Element, stride, transposed.
    a: (Element, usize, bool),
    b: (Element, usize, bool),
    addend_stride: Option<usize>,
    out: (Element, usize),
    epilogue: Kind,
    before_stride: Option<usize>,
    tf32: bool,
    fastest: bool,
    workspace_bytes: usize,
    /// Of a, b, the addend, the output, the bias and GELU's input.
    alignments: [u32; 6],
}

/// The largest power of two that divides the address, up to what matters.
pub(super) fn alignment(at: Address) -> u32 {
    1 << at.0.trailing_zeros().min(ALIGNMENT_MAX.trailing_zeros())
}

impl Key {
    pub(super) fn is_worth_measuring(&self) -> bool {
        let (m, n, k) = self.shape;
        self.fastest && m * n * k >= WORTH_MEASURING
    }

    /// The same product with nothing added.
    pub(super) fn overwriting(&self) -> Key {
        Key { addend_stride: None, ..*self }
    }

    pub(super) fn of(product: &Product, parts: &Parts, workspace_bytes: usize) -> Key {
        let Product { shape, a, b, addend, out, tf32, fastest, .. } = *product;
        let or_best = |at: Option<Address>| at.map_or(ALIGNMENT_MAX as u32, alignment);
        // Without an addend the library is told the output in its place.
        let added = addend.map_or(out.at, |(at, _)| at);
        let before = parts.before.map(|(at, _)| at);
        Key {
            shape,
            a: (a.element, a.stride, a.transposed),
            b: (b.element, b.stride, b.transposed),
            addend_stride: addend.map(|(_, stride)| stride),
            out: (out.element, out.stride),
            epilogue: parts.kind,
            before_stride: parts.before.map(|(_, stride)| stride),
            tf32,
            fastest,
            workspace_bytes,
            alignments: [
                alignment(a.at),
                alignment(b.at),
                alignment(added),
                alignment(out.at),
                or_best(parts.bias),
                or_best(before),
            ],
        }
    }
}

pub(super) fn check<T>(
    call: &'static str,
    outcome: std::result::Result<T, result::CublasError>,
) -> Result<T> {
    outcome.map_err(|error| DeviceError::Blas { call, said: format!("{:?}", error.0) })
}

fn data_type(element: Element) -> sys::cudaDataType {
    match element {
        Element::F32 => sys::cudaDataType::CUDA_R_32F,
        Element::Bf16 => sys::cudaDataType::CUDA_R_16BF,
        Element::F16 => sys::cudaDataType::CUDA_R_16F,
    }
}

/// A matrix as the library sees it: our rows are its columns.
pub(super) struct Layout(pub(super) sys::cublasLtMatrixLayout_t);

impl Layout {
    fn new(element: Element, (rows, cols): (usize, usize), stride: usize) -> Result<Layout> {
        let side = |value: usize| i32::try_from(value).expect("a side of a matrix fits 31 bits") as u64;
        let layout =
            result::create_matrix_layout(data_type(element), side(cols), side(rows), side(stride) as i64);
        check("cublasLtMatrixLayoutCreate", layout).map(Layout)
    }

    /// `rows` x `cols` as the product sees it, which for a transposed factor is not how it lies.
    fn factor(
        (element, stride, transposed): (Element, usize, bool),
        rows: usize,
        cols: usize,
    ) -> Result<Layout> {
        Layout::new(element, if transposed { (cols, rows) } else { (rows, cols) }, stride)
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

pub(super) struct Description(pub(super) sys::cublasLtMatmulDesc_t);

impl Description {
    fn new(key: &Key) -> Result<Description> {
        let compute = match key.tf32 && key.a.0 == Element::F32 {
            true => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            false => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let created = result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F);
        let description = Description(check("cublasLtMatmulDescCreate", created)?);
        // CUBLAS_OP_N and CUBLAS_OP_T. Its A is our b.
        description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, i32::from(key.b.2))?;
        description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, i32::from(key.a.2))?;
        description.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, key.epilogue)?;
        if let Some(stride) = key.before_stride {
            description.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, stride as i64)?;
        }
        // The elements of bias and GELU's input are left to the defaults, which are the output's: NVIDIA has
        // them set for fp8 only.
        Ok(description)
    }

    /// Tells where bias and GELU's input are; the search looks at their alignment.
    pub(super) fn point(&self, parts: &Parts) -> Result {
        if let Some(bias) = parts.bias {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.0)?;
        }
        if let Some((before, _)) = parts.before {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, before.0)?;
        }
        Ok(())
    }

    fn set<T: Copy>(&self, attribute: Attribute, value: T) -> Result {
        let (from, bytes) = (std::ptr::from_ref(&value).cast(), size_of::<T>());
        // SAFETY: the library copies the value, and refuses a size that is not the attribute's.
        let set = unsafe { result::set_matmul_desc_attribute(self.0, attribute, from, bytes) };
        check("cublasLtMatmulDescSetAttribute", set)
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

/// What an algorithm must be content with.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new(key: &Key) -> Result<Preference> {
        let preference = Preference(check("cublasLtMatmulPreferenceCreate", result::create_matmul_pref())?);
        preference.set(Wish::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, key.workspace_bytes as u64)?;
        preference.set(Wish::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions(key.out.0))?;
        let [a, b, addend, out, ..] = key.alignments;
        preference.set(Wish::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b)?;
        preference.set(Wish::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a)?;
        preference.set(Wish::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, addend)?;
        preference.set(Wish::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out)?;
        Ok(preference)
    }

    fn set<T: Copy>(&self, attribute: Wish, value: T) -> Result {
        let (from, bytes) = (std::ptr::from_ref(&value).cast(), size_of::<T>());
        // SAFETY: as for a description's attributes.
        let set = unsafe { result::set_matmul_pref_attribute(self.0, attribute, from, bytes) };
        check("cublasLtMatmulPreferenceSetAttribute", set)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

/// How a product that is cut along k may be put together. Every scheme adds in a fixed order (the one in
/// place has counters for it), so all are reproducible; but two of them add up in the output's element,
/// which for a half would no longer be fp32 accumulation.
fn reductions(out: Element) -> u32 {
    match out {
        Element::F32 => Scheme::CUBLASLT_REDUCTION_SCHEME_MASK as u32,
        Element::Bf16 | Element::F16 => Scheme::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32,
    }
}

/// One kind of product, ready to run.
pub(super) struct Plan {
    pub(super) description: Description,
    pub(super) a: Layout,
    pub(super) b: Layout,
    /// Only where it differs from the output's.
    pub(super) addend: Option<Layout>,
    pub(super) out: Layout,
    /// The library's answers, the one to take first.
    pub(super) algorithms: Vec<sys::cublasLtMatmulAlgo_t>,
}

impl Plan {
    /// None where the library has no algorithm.
    pub(super) fn find(
        handle: sys::cublasLtHandle_t,
        key: &Key,
        parts: &Parts,
        clusters: Clusters,
    ) -> Result<Option<Plan>> {
        let (m, n, k) = key.shape;
        let description = Description::new(key)?;
        description.point(parts)?;
        let (element, stride) = key.out;
        let a = Layout::factor(key.a, m, k)?;
        let b = Layout::factor(key.b, k, n)?;
        let out = Layout::new(element, (m, n), stride)?;
        let addend = match key.addend_stride {
            Some(own) if own != stride => Some(Layout::new(element, (m, n), own)?),
            _ => None,
        };
        let preference = Preference::new(key)?;
        // SAFETY: plain numbers, for all of which zero is a value.
        let mut found: [sys::cublasLtMatmulHeuristicResult_t; CANDIDATES] = unsafe { std::mem::zeroed() };
        let mut count = 0;
        // SAFETY: all descriptors live; `found` has room for that many.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                description.0,
                b.0,
                a.0,
                addend.as_ref().unwrap_or(&out).0,
                out.0,
                preference.0,
                CANDIDATES as i32,
                found.as_mut_ptr(),
                &mut count,
            )
        };
        if status == sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED {
            return Ok(None);
        }
        check("cublasLtMatmulAlgoGetHeuristic", status.result())?;
        let works = |candidate: &&sys::cublasLtMatmulHeuristicResult_t| {
            candidate.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS
                && candidate.workspaceSize <= key.workspace_bytes
        };
        let working = found[..count as usize].iter().filter(works);
        let mut plan = Plan { description, a, b, addend, out, algorithms: Vec::new() };
        let mut others = Vec::new();
        for candidate in working {
            match cluster(&candidate.algo) {
                Some(shape) if !clusters.allow(shape) => {
                    let alone = plan.alone(handle, key, candidate.algo);
                    // One that names no shape and cannot be given one knows no clusters.
                    let none = shape == Shape::CUBLASLT_CLUSTER_SHAPE_AUTO as u16;
                    others.extend(alone.or(none.then_some(candidate.algo)));
                }
                _ => plan.algorithms.push(candidate.algo),
            }
        }
        plan.algorithms.extend(others);
        Ok((!plan.algorithms.is_empty()).then_some(plan))
    }

    /// An algorithm with every block by itself, where it can be had so.
    fn alone(
        &self,
        handle: sys::cublasLtHandle_t,
        key: &Key,
        mut algorithm: sys::cublasLtMatmulAlgo_t,
    ) -> Option<sys::cublasLtMatmulAlgo_t> {
        let shape = Shape::CUBLASLT_CLUSTER_SHAPE_1x1x1 as u16;
        // SAFETY: plain numbers, for all of which zero is a value.
        let mut checked: sys::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        // SAFETY: the library copies the value, and refuses a size that is not the attribute's; all descriptors live.
        let status = unsafe {
            sys::cublasLtMatmulAlgoConfigSetAttribute(
                &mut algorithm,
                Config::CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID,
                std::ptr::from_ref(&shape).cast(),
                size_of::<u16>(),
            )
            .result()
            .and_then(|()| {
                sys::cublasLtMatmulAlgoCheck(
                    handle,
                    self.description.0,
                    self.b.0,
                    self.a.0,
                    self.addend.as_ref().unwrap_or(&self.out).0,
                    self.out.0,
                    &algorithm,
                    &mut checked,
                )
                .result()
            })
        };
        (status.is_ok() && checked.workspaceSize <= key.workspace_bytes).then_some(algorithm)
    }
}
