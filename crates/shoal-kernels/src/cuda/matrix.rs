//! Matrix products by cuBLASLt, and what follows them (bias, residual, GELU and its gradient) done on the
//! way to memory. Our matrices are rows after rows, cuBLASLt's columns after columns: the transposed product
//! of the transposed matrices is the same memory, and a bias of our columns is one of its rows.
//!
//! The library is asked once per kind of product which algorithms it would use. Its first answer is taken, or,
//! for large products where the caller allows it, the fastest, measured once on this machine ([`Ranks`]).
//!
//! - [`plan`]: a kind of product in the library's terms, and its algorithms.

mod plan;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::{result, sys};
use plan::{Clusters, Key, Plan, check};
use sys::cublasLtEpilogue_t as Kind;

use super::compile::cache_folder;
use super::context::Context;
use super::launch::Address;
use super::ranks::{Ranks, fastest};
use super::recording::while_nothing_is_recorded;
use crate::device::{DeviceError, Result};
use crate::tensor::Element;

/// What cuBLASLt may use for itself, counted like everything else; NVIDIA's advice for Hopper, more than
/// enough for older ones.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;

/// What biases and GELU's inputs are aligned to: vectorised epilogues read that much at once.
const EPILOGUE_ALIGNMENT: u64 = 16;

/// The library takes rows of GELU's input only at multiples of this many elements.
const BEFORE_STRIDE_UNIT: usize = 8;

/// Runs of what is measured: one to warm up, then so many.
const MEASURED_RUNS: usize = 3;

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
    /// `out = product * gelu'(before)`
    GeluBackward {
        before: Address,
        before_stride: usize,
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
            Epilogue::GeluBackward { before, before_stride } => {
                let kind = Kind::CUBLASLT_EPILOGUE_DGELU;
                Parts { kind, bias: None, before: Some((before, before_stride)) }
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

pub(super) struct Blas {
    context: Arc<Context>,
    handle: sys::cublasLtHandle_t,
    clusters: Clusters,
    /// What each kind of product came to, None where there is no algorithm. A job has some dozens of kinds.
    plans: Mutex<HashMap<Key, Option<Plan>>>,
    ranks: Mutex<Ranks>,
    fusions: Mutex<Fusions>,
}

/// Which epilogues are quicker in a pass of their own.
struct Fusions {
    /// What was asked for before, by the product with its epilogue.
    apart: HashMap<Key, bool>,
    ranks: Ranks,
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
        let handle = check("cublasLtCreate", while_nothing_is_recorded(result::create_handle))?;
        // SAFETY: every version has it.
        let version = unsafe { sys::cublasLtGetVersion() };
        let (facts, library) = (context.facts()?, format!("cublaslt{version}"));
        // On a part of the multiprocessors others are fastest than on all.
        let gpu = match facts.is_shared {
            true => format!("{} {}", facts.model, facts.multiprocessors),
            false => facts.model,
        };
        let ranks = |kind| Ranks::read(cache_folder(), kind, &gpu, &library);
        let fusions = Fusions { apart: HashMap::new(), ranks: ranks("fusions") }.into();
        let ranks = ranks("products").into();
        let clusters = if facts.is_shared { Clusters::Pairs } else { Clusters::Any };
        Ok(Blas { context, handle, clusters, plans: Mutex::new(HashMap::new()), ranks, fusions })
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
                let mut plan = Plan::find(self.handle, &key, &parts, self.clusters)?;
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

    /// Whether what follows a product is quicker in a pass of its own than on the product's way to memory, as measured once
    /// with both ways of doing it. Where that is not to be measured, or cannot be now, it is assumed not to be.
    ///
    /// On a share of a GPU, where blocks may be paired at most ([`Clusters`]), the library's product with GELU's gradient for
    /// 4096 x 6400 x 1600 halves took 1.33 ms on a quarter of an H200 beside 0.52 ms for the product and 0.16 ms for the pass;
    /// on the whole of one it is the quicker by far.
    pub(super) fn is_quicker_apart(
        &self,
        product: &Product,
        workspace_bytes: usize,
        mut together: impl FnMut() -> Result,
        mut apart: impl FnMut() -> Result,
    ) -> Result<bool> {
        let key = Key::of(product, &product.epilogue.parts(), workspace_bytes);
        if !key.is_worth_measuring() {
            return Ok(false);
        }
        // Choices are whole; a panic leaves no half of one.
        let mut fusions = self.fusions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = fusions.apart.get(&key) {
            return Ok(*known);
        }
        let name = format!("{key:?}");
        let best = match fusions.ranks.get(&name) {
            Some(best) => best,
            None if !self.context.is_direct() => return Ok(false),
            None => {
                let best = fastest(2, |way| self.measure(|| if way == 0 { together() } else { apart() }))?;
                fusions.ranks.keep(&name, best);
                best
            }
        };
        fusions.apart.insert(key, best == 1);
        Ok(best == 1)
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
        if !key.is_worth_measuring() {
            return Ok(());
        }
        let name = format!("{key:?}");
        // What is known is whole lines; a panic leaves no half of one.
        let mut ranks = self.ranks.lock().unwrap_or_else(PoisonError::into_inner);
        let best = match ranks.get(&name) {
            Some(rank) => rank,
            // A sum that grows in place would grow with every run. The library answers it as it does the product that overwrites,
            // with which a sum begins, so it takes the same; that is kept, lest a later run know more and round differently.
            None if product.addend.is_some_and(|(at, _)| at.0 == product.out.at.0) => {
                let overwriting = key.overwriting();
                let best = ranks.get(&format!("{overwriting:?}")).unwrap_or(0);
                ranks.keep(&name, best);
                best
            }
            None => {
                let best = fastest(plan.algorithms.len(), |rank| {
                    // SAFETY: by this function's contract; the output is overwritten each time.
                    self.measure(|| unsafe { self.run(plan, rank, product, parts, workspace) })
                })?;
                ranks.keep(&name, best);
                best
            }
        };
        if best < plan.algorithms.len() {
            plan.algorithms.swap(0, best);
        }
        Ok(())
    }

    /// Milliseconds of a few runs of some work.
    fn measure(&self, mut work: impl FnMut() -> Result) -> Result<f32> {
        work()?;
        self.context.wait()?;
        let started = std::time::Instant::now();
        (0..MEASURED_RUNS).try_for_each(|_| work())?;
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
        if self.context.is_replayed() {
            return Ok(());
        }
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
        let _ = while_nothing_is_recorded(|| unsafe { result::destroy_handle(self.handle) });
    }
}
