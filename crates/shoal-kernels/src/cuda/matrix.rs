//! Matrix products by cuBLASLt, and what follows them (bias, residual, GELU and its gradient) done on the
//! way to memory. Our matrices are rows after rows, cuBLASLt's columns after columns: the transposed product
//! of the transposed matrices is the same memory, and a bias of our columns is one of its rows.
//!
//! The library is asked once per kind of product which algorithms it would use. Its first answer is taken, or,
//! for large products where the caller allows it, the fastest, measured once on this machine ([`Ranks`]).

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::{result, sys};
use sys::cublasLtEpilogue_t as Kind;
use sys::cublasLtMatmulDescAttributes_t as Attribute;
use sys::cublasLtMatmulPreferenceAttributes_t as Wish;
use sys::cublasLtReductionScheme_t as Scheme;

use super::compile::cache_folder;
use super::context::Context;
use super::launch::Address;
use super::ranks::Ranks;
use crate::device::{DeviceError, Result};
use crate::tensor::Element;

/// What cuBLASLt may use for itself, counted like everything else; NVIDIA's advice for Hopper, more than
/// enough for older ones.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;

/// The largest alignment that algorithms ask for.
const ALIGNMENT_MAX: u64 = 256;

/// What biases and GELU's inputs are aligned to: vectorised epilogues read that much at once.
const EPILOGUE_ALIGNMENT: u64 = 16;

/// The library takes rows of GELU's input only at multiples of this many elements.
const BEFORE_STRIDE_UNIT: usize = 8;

/// Algorithms asked for.
const CANDIDATES: usize = 8;

/// Multiplications from which on another answer than the first is worth looking for.
const WORTH_MEASURING: usize = 1 << 32;
/// Runs of a candidate: one to warm up, then so many.
const MEASURED_RUNS: usize = 3;
/// How much faster than the first answer another must be: less is noise.
const CLEARLY_FASTER: f32 = 0.97;

/// A matrix as a product reads it: rows of `stride`, or, transposed, columns of it.
#[derive(Clone, Copy)]
pub(super) struct Factor {
    pub(super) at: Address,
    pub(super) element: Element,
    pub(super) stride: usize,
    pub(super) transposed: bool,
}

/// What happens to a product on its way to memory.
#[derive(Clone, Copy)]
pub(super) enum Epilogue {
    Plain,
    /// A bias (of the output's element) per column.
    Bias(Address),
    /// `out = gelu(product + bias)`, the tanh approximation; `before`, of the output's element, gets
    /// product + bias.
    Gelu {
        bias: Option<Address>,
        before: Address,
        before_stride: usize,
    },
    /// `out = product * gelu'(before)`, and, if asked, the column sums of `out` in `bias_gradient`. They are
    /// overwritten, never added to, and of the output's element: rounded to bf16 where the output is.
    GeluBackward {
        before: Address,
        before_stride: usize,
        bias_gradient: Option<Address>,
    },
}

#[derive(Clone, Copy)]
pub(super) struct Output {
    pub(super) at: Address,
    pub(super) element: Element,
    pub(super) stride: usize,
}

#[derive(Clone, Copy)]
pub(super) struct Product {
    /// m, n, k
    pub(super) shape: (usize, usize, usize),
    pub(super) a: Factor,
    pub(super) b: Factor,
    /// Address and stride of a matrix of the output's element that is added before the epilogue: another one
    /// (a residual), or the output itself (a sum that grows).
    pub(super) addend: Option<(Address, usize)>,
    pub(super) out: Output,
    pub(super) epilogue: Epilogue,
    /// Rounds fp32 factors to TF32; says nothing to others.
    pub(super) tf32: bool,
    /// Takes the algorithm that measured fastest, rather than the library's first answer.
    pub(super) fastest: bool,
}

/// An epilogue in the library's terms.
struct Parts {
    kind: Kind,
    /// Read as a bias, or written as its gradient.
    bias: Option<Address>,
    before: Option<(Address, usize)>,
}

impl Epilogue {
    /// What it adds to a product's name in a profile.
    pub(super) fn name(self) -> &'static str {
        match self {
            Epilogue::Plain => "",
            Epilogue::Bias(_) => ", bias",
            Epilogue::Gelu { .. } => ", GELU",
            Epilogue::GeluBackward { .. } => ", GELU backward",
        }
    }

    fn parts(self) -> Parts {
        match self {
            Epilogue::Plain => Parts { kind: Kind::CUBLASLT_EPILOGUE_DEFAULT, bias: None, before: None },
            Epilogue::Bias(bias) => {
                Parts { kind: Kind::CUBLASLT_EPILOGUE_BIAS, bias: Some(bias), before: None }
            }
            Epilogue::Gelu { bias, before, before_stride } => {
                let kind = match bias {
                    Some(_) => Kind::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
                    None => Kind::CUBLASLT_EPILOGUE_GELU_AUX,
                };
                Parts { kind, bias, before: Some((before, before_stride)) }
            }
            Epilogue::GeluBackward { before, before_stride, bias_gradient } => {
                let kind = match bias_gradient {
                    Some(_) => Kind::CUBLASLT_EPILOGUE_DGELU_BGRAD,
                    None => Kind::CUBLASLT_EPILOGUE_DGELU,
                };
                Parts { kind, bias: bias_gradient, before: Some((before, before_stride)) }
            }
        }
    }
}

impl Product {
    fn assert_sound(&self, parts: &Parts) {
        let (m, n, k) = self.shape;
        assert!(k > 0, "a product over nothing");
        assert_eq!(self.a.element, self.b.element);
        assert!(self.out.element == Element::F32 || self.out.element == self.a.element);
        assert!(self.a.stride >= if self.a.transposed { m } else { k });
        assert!(self.b.stride >= if self.b.transposed { k } else { n });
        assert!(self.out.stride >= n);
        if let Some((at, stride)) = self.addend {
            assert!(stride >= n);
            assert!(at.0 != self.out.at.0 || stride == self.out.stride, "a sum grows where it stands");
        }
        assert!(parts.before.is_none_or(|(_, stride)| stride >= n));
    }

    /// What the library asks of an epilogue's operands, or leaves open; its search does not check all of it.
    fn fits(&self, parts: &Parts) -> bool {
        let aligned = |at: Address| at.0.is_multiple_of(EPILOGUE_ALIGNMENT);
        parts.bias.is_none_or(aligned)
            && parts.before.is_none_or(|(at, stride)| {
                let whole = stride.is_multiple_of(BEFORE_STRIDE_UNIT);
                aligned(at) && whole && self.out.element == self.a.element
            })
    }
}

/// All that an algorithm depends on: everything but the addresses, of which only the alignment counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    shape: (usize, usize, usize),
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
fn alignment(at: Address) -> u32 {
    1 << at.0.trailing_zeros().min(ALIGNMENT_MAX.trailing_zeros())
}

impl Key {
    fn of(product: &Product, parts: &Parts, workspace_bytes: usize) -> Key {
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

fn check<T>(call: &'static str, outcome: std::result::Result<T, result::CublasError>) -> Result<T> {
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
struct Layout(sys::cublasLtMatrixLayout_t);

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

struct Description(sys::cublasLtMatmulDesc_t);

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
    fn point(&self, parts: &Parts) -> Result {
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
struct Plan {
    description: Description,
    a: Layout,
    b: Layout,
    /// Only where it differs from the output's.
    addend: Option<Layout>,
    out: Layout,
    /// The library's answers, the one to take first.
    algorithms: Vec<sys::cublasLtMatmulAlgo_t>,
}

impl Plan {
    /// None where the library has no algorithm.
    fn find(handle: sys::cublasLtHandle_t, key: &Key, parts: &Parts) -> Result<Option<Plan>> {
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
        let algorithms: Vec<_> = working.map(|candidate| candidate.algo).collect();
        Ok((!algorithms.is_empty()).then_some(Plan { description, a, b, addend, out, algorithms }))
    }
}

pub(super) struct Blas {
    context: Arc<Context>,
    handle: sys::cublasLtHandle_t,
    /// What each kind of product came to, None where there is no algorithm. A job has some dozens of kinds.
    plans: Mutex<HashMap<Key, Option<Plan>>>,
    ranks: Mutex<Ranks>,
}

// SAFETY: the handle may be used from any thread, by several at once.
unsafe impl Send for Blas {}
// SAFETY: as above; the descriptors are touched behind the lock only.
unsafe impl Sync for Blas {}

impl Blas {
    pub(super) fn new(context: Arc<Context>) -> Result<Blas> {
        // SAFETY: only asks whether the library can be loaded.
        if !unsafe { sys::is_culib_present() } {
            return Err(DeviceError::NoLibrary { library: "libcublasLt.so", part: "cuBLASLt" });
        }
        context.enter()?;
        let handle = check("cublasLtCreate", result::create_handle())?;
        // SAFETY: every version has it.
        let version = unsafe { sys::cublasLtGetVersion() };
        let ranks = Mutex::new(Ranks::read(cache_folder(), &context.facts()?.model, version));
        Ok(Blas { context, handle, plans: Mutex::new(HashMap::new()), ranks })
    }

    /// `out[m, n] = epilogue(a[m, k] * b[k, n] (+ addend))`. False, and nothing done, where the library has
    /// no algorithm for this combination: the caller does it in pieces then.
    ///
    /// # Safety
    /// All that is named lies inside device memory that may be used so, as does the workspace, whose address
    /// is a multiple of 256 and which nothing outside the stream's order uses.
    pub(super) unsafe fn product(&self, product: &Product, workspace: (Address, usize)) -> Result<bool> {
        let (m, n, _) = product.shape;
        if m == 0 || n == 0 {
            return Ok(true);
        }
        let parts = product.epilogue.parts();
        product.assert_sound(&parts);
        if !product.fits(&parts) {
            return Ok(false);
        }
        self.context.enter()?;
        let key = Key::of(product, &parts, workspace.1);
        // A panic leaves no plan half made, and a plan's addresses are set before each use.
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let plan = match plans.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let mut plan = Plan::find(self.handle, &key, &parts)?;
                if let Some(plan) = &mut plan {
                    // SAFETY: by this function's contract.
                    unsafe { self.rank(plan, &key, product, &parts, workspace) }?;
                }
                new.insert(plan)
            }
        };
        let Some(plan) = plan else { return Ok(false) };
        // SAFETY: by this function's contract.
        unsafe { self.run(plan, 0, product, &parts, workspace) }?;
        Ok(true)
    }

    /// Puts the fastest of a plan's algorithms first, where that is wanted and can be found out.
    ///
    /// # Safety
    /// As for `product`.
    unsafe fn rank(
        &self,
        plan: &mut Plan,
        key: &Key,
        product: &Product,
        parts: &Parts,
        workspace: (Address, usize),
    ) -> Result {
        let (m, n, k) = key.shape;
        // A sum that grows in place would grow with every run.
        let in_place = product.addend.is_some_and(|(at, _)| at.0 == product.out.at.0);
        if !key.fastest || in_place || m * n * k < WORTH_MEASURING {
            return Ok(());
        }
        let name = format!("{key:?}");
        // What is known is whole lines; a panic leaves no half of one.
        let mut ranks = self.ranks.lock().unwrap_or_else(PoisonError::into_inner);
        let best = match ranks.get(&name) {
            Some(rank) => rank,
            None => {
                let mut times = Vec::new();
                for rank in 0..plan.algorithms.len() {
                    // SAFETY: by this function's contract; the output is overwritten each time.
                    times.push(unsafe { self.measure(plan, rank, product, parts, workspace) }?);
                }
                let best = (0..times.len()).min_by(|a, b| times[*a].total_cmp(&times[*b])).unwrap_or(0);
                let best = if times[best] < CLEARLY_FASTER * times[0] { best } else { 0 };
                ranks.keep(&name, best);
                best
            }
        };
        if best < plan.algorithms.len() {
            plan.algorithms.swap(0, best);
        }
        Ok(())
    }

    /// Milliseconds of a few runs.
    ///
    /// # Safety
    /// As for `product`.
    unsafe fn measure(
        &self,
        plan: &Plan,
        rank: usize,
        product: &Product,
        parts: &Parts,
        workspace: (Address, usize),
    ) -> Result<f32> {
        // SAFETY: by this function's contract; likewise below.
        unsafe { self.run(plan, rank, product, parts, workspace) }?;
        self.context.wait()?;
        let started = std::time::Instant::now();
        for _ in 0..MEASURED_RUNS {
            // SAFETY: as above.
            unsafe { self.run(plan, rank, product, parts, workspace) }?;
        }
        self.context.wait()?;
        Ok(1e3 * started.elapsed().as_secs_f32())
    }

    /// # Safety
    /// As for `product`.
    unsafe fn run(
        &self,
        plan: &Plan,
        rank: usize,
        product: &Product,
        parts: &Parts,
        workspace: (Address, usize),
    ) -> Result {
        plan.description.point(parts)?;
        let (addend, beta) = match product.addend {
            Some((at, _)) => (at, 1.0f32),
            // The library wants an address even for what it does not read.
            None => (product.out.at, 0.0),
        };
        let alpha = 1.0f32;
        // SAFETY: by this function's contract; scalars and descriptors are read from the host during the
        // call, and the stream lives as long as the context.
        let run = unsafe {
            result::matmul(
                self.handle,
                plan.description.0,
                std::ptr::from_ref(&alpha).cast(),
                std::ptr::from_ref(&beta).cast(),
                product.b.at.0 as *const _,
                plan.b.0,
                product.a.at.0 as *const _,
                plan.a.0,
                addend.0 as *const _,
                plan.addend.as_ref().unwrap_or(&plan.out).0,
                product.out.at.0 as *mut _,
                plan.out.0,
                &plan.algorithms[rank],
                workspace.0.0 as *mut _,
                workspace.1,
                self.context.stream().cast(),
            )
        };
        check("cublasLtMatmul", run)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        let _ = self.context.wait();
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;
    use std::time::Instant;

    use super::*;
    use crate::cuda::CudaDevice;
    use crate::random::{fill_normal, fold, key_of};
    use crate::tensor::Tensor;

    /// The GPU, or a line that says why the test is skipped.
    fn open(budget: u64) -> Option<CudaDevice> {
        match CudaDevice::count() {
            Ok(0) => eprintln!("skipped: no GPU on this machine"),
            // A GPU that is there must open.
            Ok(_) => return Some(CudaDevice::new("cuda:0", 0, budget).unwrap_or_else(|e| panic!("{e}"))),
            Err(error) => eprintln!("skipped: {error}"),
        }
        None
    }

    fn gpu() -> Option<&'static CudaDevice> {
        static GPU: OnceLock<Option<CudaDevice>> = OnceLock::new();
        GPU.get_or_init(|| open(1 << 30)).as_ref()
    }

    fn run(gpu: &CudaDevice, product: &Product) -> Result<bool> {
        // SAFETY: the tests name only memory they hold.
        unsafe { gpu.blas.product(product, (gpu.workspace.at(0), gpu.workspace.bytes())) }
    }

    fn encode(element: Element, values: &[f32]) -> Vec<u8> {
        match element {
            Element::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            half => values.iter().flat_map(|value| half.encode(*value).to_le_bytes()).collect(),
        }
    }

    fn decode(element: Element, bytes: &[u8]) -> Vec<f32> {
        match element {
            Element::F32 => {
                bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect()
            }
            half => bytes
                .chunks_exact(2)
                .map(|pair| half.decode(u16::from_le_bytes([pair[0], pair[1]])))
                .collect(),
        }
    }

    #[test]
    fn alignments_are_the_largest_power_of_two_up_to_256() {
        let found = [2, 4, 6, 48, 128, 256, 512 + 256, 1 << 20].map(|at| alignment(Address(at)));
        assert_eq!(found, [2, 4, 2, 16, 128, 256, 256, 256]);
    }

    /// A matrix inside a larger tensor, NaN around it: what reads there spoils its result, what writes there
    /// is seen.
    struct Strided {
        tensor: Tensor,
        cols: usize,
        first: usize,
        stride: usize,
        /// The tensor as it starts.
        bytes: Vec<u8>,
        /// The matrix, as its element holds it.
        values: Vec<f64>,
    }

    impl Strided {
        /// Normal numbers of a `deviation`, or NaN without one; `first` and `after` elements around a row.
        fn new(
            gpu: &CudaDevice,
            element: Element,
            (rows, cols): (usize, usize),
            (first, after): (usize, usize),
            filled: Option<(u64, f32)>,
        ) -> Strided {
            let stride = first + cols + after;
            let mut all = vec![f32::NAN; rows * stride];
            if let Some((key, deviation)) = filled {
                let mut values = vec![0.0; rows * cols];
                fill_normal(&mut values, key, 0, deviation);
                for (row, values) in values.chunks_exact(cols).enumerate() {
                    all[row * stride + first..][..cols].copy_from_slice(values);
                }
            }
            let tensor = Tensor::of(&gpu.arena, "a test", element, all.len()).unwrap();
            let bytes = encode(element, &all);
            let mut matrix = Strided { tensor, cols, first, stride, bytes, values: Vec::new() };
            matrix.values = matrix.inside(&matrix.bytes);
            matrix.reset(gpu);
            matrix
        }

        fn element(&self) -> Element {
            self.tensor.element()
        }

        fn at(&self) -> Address {
            self.tensor.at(self.first)
        }

        fn reset(&self, gpu: &CudaDevice) {
            // SAFETY: the tensor is that long.
            unsafe { gpu.context.copy_in(self.tensor.at(0).0, &self.bytes) }.unwrap();
        }

        fn read(&self, gpu: &CudaDevice) -> Vec<u8> {
            let mut bytes = vec![0; self.bytes.len()];
            // SAFETY: the tensor is that long.
            unsafe { gpu.context.copy_out(&mut bytes, self.tensor.at(0).0) }.unwrap();
            bytes
        }

        fn inside(&self, bytes: &[u8]) -> Vec<f64> {
            let all = decode(self.element(), bytes);
            let rows = all.chunks_exact(self.stride).flat_map(|row| &row[self.first..][..self.cols]);
            rows.map(|value| f64::from(*value)).collect()
        }

        /// Whether the margins are what they were.
        fn margins_kept(&self, bytes: &[u8]) -> bool {
            let size = self.element().bytes();
            let (from, to) = (self.first * size, (self.first + self.cols) * size);
            let (now, then) =
                (bytes.chunks_exact(self.stride * size), self.bytes.chunks_exact(self.stride * size));
            now.zip(then).all(|(now, then)| now[..from] == then[..from] && now[to..] == then[to..])
        }
    }

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Addend {
        None,
        InPlace,
        Other,
    }

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Follow {
        Plain,
        Bias,
        Gelu,
        GeluBias,
        Backward,
        BackwardSums,
    }

    #[derive(Clone, Copy, Debug)]
    struct Case {
        seed: u64,
        aligned: bool,
        input: Element,
        output: Element,
        tf32: bool,
        transposed: [bool; 2],
        addend: Addend,
        follow: Follow,
    }

    impl Case {
        fn number(self, name: &str) -> u64 {
            fold(fold(key_of("product"), self.seed), key_of(name))
        }

        fn pick(self, name: &str, choices: &[usize]) -> usize {
            choices[(self.number(name) % choices.len() as u64) as usize]
        }

        fn side(self, name: &str) -> usize {
            match self.aligned {
                true => self.pick(name, &[16, 32, 80, 144, 272]),
                false => self.pick(name, &[1, 2, 3, 8, 15, 17, 33, 63, 65, 129, 257]),
            }
        }

        fn depth(self) -> usize {
            match self.aligned {
                true => self.pick("k", &[16, 64, 272, 1040]),
                false => self.pick("k", &[1, 2, 7, 8, 31, 65, 257, 1001]),
            }
        }

        fn margins(self, name: &str) -> (usize, usize) {
            let pick = |side: &str, choices| self.pick(&format!("{name} {side}"), choices);
            match self.aligned {
                true => (pick("first", &[0, 0, 16]), pick("after", &[0, 0, 16, 48])),
                false => (pick("first", &[0, 0, 1, 3]), pick("after", &[0, 0, 1, 5, 20])),
            }
        }

        fn gelu(self) -> bool {
            !matches!(self.follow, Follow::Plain | Follow::Bias)
        }

        /// Whether there must be an algorithm.
        fn required(self) -> bool {
            match self.gelu() {
                // No caller adds to what goes through GELU, or widens it.
                true => self.aligned && self.addend == Addend::None && self.input == self.output,
                // In fp32 there is nothing else to fall back to.
                false => self.aligned || (self.input == Element::F32 && self.follow == Follow::Plain),
            }
        }

        fn tolerance(self) -> f64 {
            match self.output {
                Element::Bf16 => 1e-2,
                Element::F16 => 2e-3,
                Element::F32 if self.tf32 => 2e-3,
                // The GPU's own tanh is good to some 5e-4.
                Element::F32 if self.gelu() => 1e-3,
                Element::F32 => 1e-5,
            }
        }
    }

    /// The tanh approximation and its slope.
    fn gelu(x: f64) -> (f64, f64) {
        let (scale, cube) = ((2.0 / std::f64::consts::PI).sqrt(), 0.044715);
        let tanh = (scale * (x + cube * x * x * x)).tanh();
        let slope = scale * (1.0 + 3.0 * cube * x * x);
        (0.5 * x * (1.0 + tanh), 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * slope)
    }

    /// `a[m, k] * b[k, n]` of matrices as they lie.
    fn reference((m, n, k): (usize, usize, usize), a: &Strided, b: &Strided, flipped: [bool; 2]) -> Vec<f64> {
        let mut out = vec![0.0; m * n];
        for (row, out) in out.chunks_exact_mut(n).enumerate() {
            for inner in 0..k {
                let left = a.values[if flipped[0] { inner * m + row } else { row * k + inner }];
                for (col, out) in out.iter_mut().enumerate() {
                    *out += left * b.values[if flipped[1] { col * k + inner } else { inner * n + col }];
                }
            }
        }
        out
    }

    /// Norm of the difference over norm of what is expected; NaN if any is. Where a few numbers cancel,
    /// what is left can be no better than its terms, so the norm counts for at least `floor` per number.
    fn off(found: &[f64], expected: &[f64], floor: f64) -> f64 {
        assert_eq!(found.len(), expected.len());
        let difference: f64 = found.iter().zip(expected).map(|(a, b)| (a - b).powi(2)).sum();
        let norm = expected.iter().map(|b| b * b).sum::<f64>().sqrt();
        difference.sqrt() / norm.max(floor * (expected.len() as f64).sqrt())
    }

    /// How far the case is off, None where there is no algorithm.
    fn compare(gpu: &CudaDevice, case: Case) -> std::result::Result<Option<f64>, String> {
        let shape @ (m, n, k) = (case.side("m"), case.side("n"), case.depth());
        let filled = |name: &str, deviation: f32| Some((case.number(name), deviation));
        let stored = |rows, cols, flipped| if flipped { (cols, rows) } else { (rows, cols) };
        let lie = stored(m, k, case.transposed[0]);
        let a = Strided::new(gpu, case.input, lie, case.margins("a"), filled("a", 1.0));
        let lie = stored(k, n, case.transposed[1]);
        let b = Strided::new(gpu, case.input, lie, case.margins("b"), filled("b", (k as f32).powf(-0.5)));
        let earlier = if case.addend == Addend::InPlace { filled("addend", 1.0) } else { None };
        let out = Strided::new(gpu, case.output, (m, n), case.margins("out"), earlier);
        let other = Strided::new(gpu, case.output, (m, n), case.margins("addend"), filled("addend", 1.0));
        let (forward, backward) = (
            matches!(case.follow, Follow::Gelu | Follow::GeluBias),
            matches!(case.follow, Follow::Backward | Follow::BackwardSums),
        );
        // Odd rows with an even stride too: the library takes those.
        let margins = match case.number("before") % 2 {
            0 if !case.aligned => (0, n.next_multiple_of(8) - n),
            _ => case.margins("before"),
        };
        let before = if backward { filled("before", 1.0) } else { None };
        let before = Strided::new(gpu, case.output, (m, n), margins, before);
        let sums = case.follow == Follow::BackwardSums;
        let bias = if sums { None } else { filled("bias", 1.0) };
        let bias = Strided::new(gpu, case.output, (1, n), (0, 0), bias);

        let product = Product {
            shape,
            a: Factor { at: a.at(), element: a.element(), stride: a.stride, transposed: case.transposed[0] },
            b: Factor { at: b.at(), element: b.element(), stride: b.stride, transposed: case.transposed[1] },
            addend: match case.addend {
                Addend::None => None,
                Addend::InPlace => Some((out.at(), out.stride)),
                Addend::Other => Some((other.at(), other.stride)),
            },
            out: Output { at: out.at(), element: out.element(), stride: out.stride },
            epilogue: {
                let (at, before_stride) = (before.at(), before.stride);
                match case.follow {
                    Follow::Plain => Epilogue::Plain,
                    Follow::Bias => Epilogue::Bias(bias.at()),
                    Follow::Gelu => Epilogue::Gelu { bias: None, before: at, before_stride },
                    Follow::GeluBias => Epilogue::Gelu { bias: Some(bias.at()), before: at, before_stride },
                    Follow::Backward | Follow::BackwardSums => Epilogue::GeluBackward {
                        before: at,
                        before_stride,
                        bias_gradient: sums.then_some(bias.at()),
                    },
                }
            },
            tf32: case.tf32,
            fastest: false,
        };
        let written = [&out, &before, &bias];
        let mut runs = Vec::new();
        for _ in 0..2 {
            written.iter().for_each(|matrix| matrix.reset(gpu));
            if !run(gpu, &product).map_err(|error| format!("{shape:?}: {error}"))? {
                return Ok(None);
            }
            gpu.context.wait().map_err(|error| format!("{shape:?}: {error}"))?;
            runs.push(written.map(|matrix| matrix.read(gpu)));
        }
        if runs[0] != runs[1] {
            return Err(format!("{shape:?}: two runs differ"));
        }
        let [found, found_before, found_bias] = runs.swap_remove(0);
        if !out.margins_kept(&found) || !before.margins_kept(&found_before) {
            return Err(format!("{shape:?}: written beside the matrix"));
        }

        let mut expected = reference(shape, &a, &b, case.transposed);
        match case.addend {
            Addend::None => {}
            Addend::InPlace => expected.iter_mut().zip(&out.values).for_each(|(sum, value)| *sum += value),
            Addend::Other => expected.iter_mut().zip(&other.values).for_each(|(sum, value)| *sum += value),
        }
        if matches!(case.follow, Follow::Bias | Follow::GeluBias) {
            expected.iter_mut().enumerate().for_each(|(i, sum)| *sum += bias.values[i % n]);
        }
        let mut results = Vec::new();
        if forward {
            results.push(("before", off(&before.inside(&found_before), &expected, 0.1)));
            expected.iter_mut().for_each(|value| *value = gelu(*value).0);
        }
        if backward {
            expected.iter_mut().zip(&before.values).for_each(|(value, x)| *value *= gelu(*x).1);
        }
        results.push(("out", off(&out.inside(&found), &expected, 0.1)));
        if sums {
            let columns: Vec<f64> =
                (0..n).map(|col| expected.iter().skip(col).step_by(n).sum::<f64>()).collect();
            results
                .push(("bias gradient", off(&bias.inside(&found_bias), &columns, 0.3 * (m as f64).sqrt())));
        }
        let mut worst = 0.0;
        for (what, off) in results {
            if off.is_nan() || off > case.tolerance() {
                return Err(format!(
                    "{shape:?}: {what} is off by {off:.2e}, allowed {:.0e}",
                    case.tolerance()
                ));
            }
            worst = off.max(worst);
        }
        Ok(Some(worst))
    }

    #[test]
    fn products_are_those_of_the_host() {
        let Some(gpu) = gpu() else { return };
        use Element::{Bf16, F16, F32};
        use Follow::{Backward, BackwardSums, Bias, Gelu, GeluBias, Plain};
        let kinds = [
            (F32, F32, false),
            (F32, F32, true),
            (Bf16, Bf16, false),
            (Bf16, F32, false),
            (F16, F16, false),
            (F16, F32, false),
        ];
        let (mut seed, mut failures) = (0, Vec::new());
        for (input, output, tf32) in kinds {
            let (mut done, mut refused, mut worst) = (0, Vec::new(), 0.0f64);
            for follow in [Plain, Bias, Gelu, GeluBias, Backward, BackwardSums] {
                for addend in [Addend::None, Addend::InPlace, Addend::Other] {
                    for choice in 0..8 {
                        let (aligned, transposed) = (choice & 4 == 0, [choice & 1 == 1, choice & 2 == 2]);
                        seed += 1;
                        let case = Case { seed, aligned, input, output, tf32, transposed, addend, follow };
                        match compare(gpu, case) {
                            Ok(Some(off)) => {
                                done += 1;
                                worst = worst.max(off);
                            }
                            Ok(None) if case.required() => failures.push(format!("{case:?}: no algorithm")),
                            Ok(None) => refused.push((follow, addend, aligned)),
                            Err(said) => failures.push(format!("{case:?}: {said}")),
                        }
                    }
                }
            }
            let kind = if tf32 { "TF32".into() } else { format!("{input:?} to {output:?}") };
            eprintln!("{kind}: {done} products off by at most {worst:.1e}; {} refused", refused.len());
            refused.dedup();
            refused.iter().for_each(|what| eprintln!("  refused {what:?}"));
        }
        assert!(failures.is_empty(), "{} failed:\n{}", failures.len(), failures.join("\n"));
    }

    #[test]
    fn a_product_of_no_rows_is_nothing() {
        let Some(gpu) = gpu() else { return };
        let factor = Factor { at: Address(0), element: Element::F32, stride: 8, transposed: false };
        let product = Product {
            shape: (0, 8, 8),
            a: factor,
            b: factor,
            addend: None,
            out: Output { at: Address(0), element: Element::F32, stride: 8 },
            epilogue: Epilogue::Plain,
            tf32: false,
            fastest: false,
        };
        assert!(run(gpu, &product).unwrap());
    }

    /// Memory with random bits of normal numbers: what a multiplier burns depends on its operands.
    fn random(gpu: &CudaDevice, element: Element, elements: usize, deviation: f32) -> Tensor {
        let tensor = Tensor::of(&gpu.arena, "a test", element, elements).unwrap();
        // An odd length, so that rows differ.
        let mut values = vec![0.0; elements.min(1_000_003)];
        fill_normal(&mut values, key_of("rates"), elements as u64, deviation);
        let bytes = encode(element, &values);
        for first in (0..elements).step_by(values.len()) {
            let length = values.len().min(elements - first) * element.bytes();
            // SAFETY: the piece lies inside the tensor.
            unsafe { gpu.context.copy_in(tensor.at(first).0, &bytes[..length]) }.unwrap();
        }
        tensor
    }

    /// Prints what the GPU reaches on the products of a GPT-2 of 768 columns.
    #[test]
    #[ignore = "a measurement"]
    fn report_rates() {
        const CALLS: usize = 20;
        let Some(gpu) = open(20 << 30) else { return };
        use Addend::{InPlace, None as Nothing, Other};
        use Element::{Bf16, F32};
        use Follow::{Backward, BackwardSums, Bias, GeluBias, Plain};
        let rows = 32768;
        let (straight, a_flipped, b_flipped) = ([false, false], [true, false], [false, true]);
        let mut products = vec![
            ((rows, 2304, 768), straight, Bf16, Bias, Nothing),
            ((rows, 768, 768), straight, Bf16, Bias, Other),
            ((rows, 3072, 768), straight, Bf16, GeluBias, Nothing),
            ((rows, 3072, 768), straight, Bf16, Bias, Nothing),
            ((rows, 768, 3072), straight, Bf16, Bias, Other),
            ((rows, 3072, 768), b_flipped, Bf16, BackwardSums, Nothing),
            ((rows, 3072, 768), b_flipped, Bf16, Backward, Nothing),
            ((rows, 3072, 768), b_flipped, Bf16, Plain, Nothing),
        ];
        for (m, n) in [(768, 2304), (768, 3072), (3072, 768), (768, 768)] {
            products.push(((m, n, rows), a_flipped, F32, Plain, Nothing));
            products.push(((m, n, rows), a_flipped, F32, Plain, InPlace));
        }
        products.push(((rows, 50304, 768), b_flipped, Bf16, Plain, Nothing));
        products.push(((rows, 768, 50304), straight, Bf16, Plain, Nothing));
        products.push(((50257, 768, rows), a_flipped, F32, Plain, Nothing));

        for (shape @ (m, n, k), transposed, element, follow, addend) in products {
            // The vocabulary's rows are padded; so is what lies in them.
            let padded = |side: usize| if side == 50257 { 50304 } else { side };
            let (a_stride, b_stride) =
                (if transposed[0] { padded(m) } else { k }, if transposed[1] { k } else { n });
            let a = random(&gpu, Bf16, if transposed[0] { k * a_stride } else { m * a_stride }, 1.0);
            let b = random(&gpu, Bf16, if transposed[1] { n * b_stride } else { k * b_stride }, 0.02);
            let out = random(&gpu, element, m * n, 1.0);
            let other = random(&gpu, element, if addend == Other { m * n } else { 1 }, 1.0);
            let gelu = !matches!(follow, Plain | Bias);
            let before = random(&gpu, element, if gelu { m * n } else { 1 }, 1.0);
            let bias = random(&gpu, element, n, 1.0);
            let factor =
                |at: &Tensor, stride, transposed| Factor { at: at.at(0), element: Bf16, stride, transposed };
            let product = Product {
                shape,
                a: factor(&a, a_stride, transposed[0]),
                b: factor(&b, b_stride, transposed[1]),
                addend: match addend {
                    Nothing => None,
                    InPlace => Some((out.at(0), n)),
                    Other => Some((other.at(0), n)),
                },
                out: Output { at: out.at(0), element, stride: n },
                epilogue: match follow {
                    Plain => Epilogue::Plain,
                    Bias => Epilogue::Bias(bias.at(0)),
                    Follow::Gelu | GeluBias => Epilogue::Gelu {
                        bias: (follow == GeluBias).then_some(bias.at(0)),
                        before: before.at(0),
                        before_stride: n,
                    },
                    Backward | BackwardSums => Epilogue::GeluBackward {
                        before: before.at(0),
                        before_stride: n,
                        bias_gradient: (follow == BackwardSums).then_some(bias.at(0)),
                    },
                },
                tf32: false,
                fastest: false,
            };
            let name = format!(
                "{m:>6} x {n:>5} x {k:>5} {}{} to {element:?}, {follow:?}, addend {addend:?}",
                if transposed[0] { "T" } else { "N" },
                if transposed[1] { "T" } else { "N" },
            );
            let mut possible = true;
            for _ in 0..3 {
                possible &= run(&gpu, &product).unwrap_or_else(|error| panic!("{name}: {error}"));
            }
            if !possible {
                println!("{name}: no algorithm");
                continue;
            }
            gpu.context.wait().unwrap();
            let start = Instant::now();
            for _ in 0..CALLS {
                run(&gpu, &product).unwrap();
            }
            gpu.context.wait().unwrap();
            let seconds = start.elapsed().as_secs_f64() / CALLS as f64;
            let rate = 2.0 * (m * n) as f64 * k as f64 / seconds / 1e12;
            println!("{name}: {:.3} ms, {rate:.0} TFLOP/s", 1e3 * seconds);
        }
    }
}
