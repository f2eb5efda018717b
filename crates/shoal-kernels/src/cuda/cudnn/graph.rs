//! Operations and the tensors between them, and the plan that the library makes of them. A tensor is an
//! argument of the call, scratch of ours, a number, or a value that never leaves the kernel.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::cudnn::sys;
pub(super) use sys::cudnnBackendHeurMode_t as Heuristic;
pub(super) use sys::cudnnDataType_t as Data;
pub(super) use sys::cudnnPointwiseMode_t as Pointwise;
pub(super) use sys::cudnnReduceTensorOp_t as Reduction;

use super::descriptor::{Descriptor, Kind, Name, Note, Pointer, Reference, Refusal, Result};
use crate::memory::GRANULE_BYTES;
use crate::tensor::Element;

/// What tensors that live in memory are aligned to.
const ALIGNMENT_BYTES: i64 = 16;

/// Room for an engine's notes; the newest library has ten.
const NOTES_MAX: usize = 32;

/// Where engines are asked for: the library's model of what is fast, then whatever works at all. Both answer
/// the same for the same graph, library and GPU.
pub(super) const HEURISTICS: [Heuristic; 2] =
    [Heuristic::CUDNN_HEUR_MODE_A, Heuristic::CUDNN_HEUR_MODE_FALLBACK];

/// A tensor that the caller brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Argument {
    Query,
    Key,
    Value,
    Out,
    LogSumExp,
    OutGradient,
    QueryGradient,
    KeyGradient,
    ValueGradient,
    /// What a convolution's window moves over, or its gradient; likewise below.
    Images,
    Filters,
    /// What filters make of the window's places.
    Places,
}

/// Which of a convolution's tensors is made from the other two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::cuda) enum Made {
    Places,
    ImageGradient,
    FilterGradient,
}

/// A number that the call passes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Number {
    /// The attention's scale.
    Scale,
    One,
    MinusInfinity,
}

/// Where a tensor's address comes from.
#[derive(Clone, Copy)]
enum Source {
    Argument(Argument),
    Number(Number),
    /// Bytes into the workspace.
    Scratch(usize),
}

/// The four sides of a tensor and the elements between neighbours along each.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    sides: [i64; 4],
    strides: [i64; 4],
}

impl Layout {
    pub(super) fn new(sides: [usize; 4], strides: [usize; 4]) -> Layout {
        Layout { sides: sides.map(|side| side as i64), strides: strides.map(|stride| stride as i64) }
    }

    /// Without gaps, the last side innermost.
    pub(super) fn packed(sides: [usize; 4]) -> Layout {
        let [_, b, c, d] = sides;
        Layout::new(sides, [b * c * d, c * d, d, 1])
    }

    /// The same memory with the last two sides exchanged.
    pub(super) fn transposed(self) -> Layout {
        let ([a, b, c, d], [e, f, g, h]) = (self.sides, self.strides);
        Layout { sides: [a, b, d, c], strides: [e, f, h, g] }
    }

    fn elements(self) -> usize {
        self.sides.iter().product::<i64>() as usize
    }
}

/// A tensor of a graph, by its number there.
#[derive(Clone, Copy)]
pub(super) struct Node(usize);

/// Lengths of a product's rows, columns and summed side, one per sample, where they are not the tensors' own.
#[derive(Clone, Copy, Default)]
pub(super) struct Lengths {
    pub(super) rows: Option<Node>,
    pub(super) columns: Option<Node>,
    pub(super) summed: Option<Node>,
}

#[derive(Default)]
pub(super) struct Graph {
    tensors: Vec<Descriptor>,
    layouts: Vec<Layout>,
    operations: Vec<Descriptor>,
    /// What operations refer to besides tensors.
    parts: Vec<Descriptor>,
    sources: Vec<(i64, Source)>,
    scratch_bytes: usize,
    /// Scratch that holds a number of samples' lengths before the plan runs: offset, count and length.
    filled: Option<(usize, usize, u32)>,
}

impl From<Element> for Data {
    fn from(element: Element) -> Data {
        match element {
            Element::F32 => Data::CUDNN_DATA_FLOAT,
            Element::Bf16 => Data::CUDNN_DATA_BFLOAT16,
            Element::F16 => Data::CUDNN_DATA_HALF,
        }
    }
}

fn bytes(data: Data) -> usize {
    match data {
        Data::CUDNN_DATA_HALF | Data::CUDNN_DATA_BFLOAT16 => 2,
        _ => 4,
    }
}

impl Graph {
    fn tensor(&mut self, data: Data, layout: Layout, flag: Option<Name>) -> Result<Node> {
        let mut tensor = Descriptor::new(Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?;
        tensor.set(Name::CUDNN_ATTR_TENSOR_DATA_TYPE, &[data])?;
        tensor.set(Name::CUDNN_ATTR_TENSOR_DIMENSIONS, &layout.sides)?;
        tensor.set(Name::CUDNN_ATTR_TENSOR_STRIDES, &layout.strides)?;
        tensor.set(Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, &[self.next_id()])?;
        tensor.set(Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, &[ALIGNMENT_BYTES])?;
        if let Some(flag) = flag {
            tensor.set(flag, &[true])?;
        }
        tensor.finalize()?;
        self.tensors.push(tensor);
        self.layouts.push(layout);
        Ok(Node(self.tensors.len() - 1))
    }

    /// The identity of the tensor to be made next.
    fn next_id(&self) -> i64 {
        self.tensors.len() as i64 + 1
    }

    pub(super) fn argument(&mut self, which: Argument, data: Data, layout: Layout) -> Result<Node> {
        self.sources.push((self.next_id(), Source::Argument(which)));
        self.tensor(data, layout, None)
    }

    /// A tensor in the workspace.
    pub(super) fn scratch(&mut self, data: Data, layout: Layout) -> Result<Node> {
        self.sources.push((self.next_id(), Source::Scratch(self.scratch_bytes)));
        self.scratch_bytes += (bytes(data) * layout.elements()).next_multiple_of(GRANULE_BYTES);
        self.tensor(data, layout, None)
    }

    /// One integer per sample, `length` for all of them. Each call to run the plan writes them.
    pub(super) fn lengths(&mut self, samples: usize, length: usize) -> Result<Node> {
        assert!(self.filled.is_none(), "one tensor of lengths serves a graph");
        self.filled = Some((self.scratch_bytes, samples, length as u32));
        self.scratch(Data::CUDNN_DATA_INT32, Layout::packed([samples, 1, 1, 1]))
    }

    pub(super) fn number(&mut self, which: Number) -> Result<Node> {
        self.sources.push((self.next_id(), Source::Number(which)));
        let flag = Some(Name::CUDNN_ATTR_TENSOR_IS_BY_VALUE);
        self.tensor(Data::CUDNN_DATA_FLOAT, Layout::packed([1; 4]), flag)
    }

    /// A value that one operation makes and another takes.
    pub(super) fn value(&mut self, data: Data, layout: Layout) -> Result<Node> {
        self.tensor(data, layout, Some(Name::CUDNN_ATTR_TENSOR_IS_VIRTUAL))
    }

    fn reference(&self, node: Node) -> [Reference; 1] {
        [self.tensors[node.0].reference()]
    }

    fn add(&mut self, mut operation: Descriptor) -> Result {
        operation.finalize()?;
        self.operations.push(operation);
        Ok(())
    }

    /// `out = mode(inputs)`, computed as `math`; an index is that along `axis`.
    fn compute(
        &mut self,
        mode: Pointwise,
        math: Data,
        axis: Option<i64>,
        inputs: &[Node],
        out: Node,
    ) -> Result {
        const INPUTS: [Name; 3] = [
            Name::CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
            Name::CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
            Name::CUDNN_ATTR_OPERATION_POINTWISE_TDESC,
        ];
        let mut part = Descriptor::new(Kind::CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?;
        part.set(Name::CUDNN_ATTR_POINTWISE_MODE, &[mode])?;
        part.set(Name::CUDNN_ATTR_POINTWISE_MATH_PREC, &[math])?;
        if let Some(axis) = axis {
            part.set(Name::CUDNN_ATTR_POINTWISE_AXIS, &[axis])?;
        }
        part.finalize()?;
        let mut operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)?;
        operation.set(Name::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, &[part.reference()])?;
        for (name, input) in INPUTS.into_iter().zip(inputs) {
            operation.set(name, &self.reference(*input))?;
        }
        operation.set(Name::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, &self.reference(out))?;
        self.parts.push(part);
        self.add(operation)
    }

    /// `out = mode(inputs)` in f32.
    pub(super) fn pointwise(&mut self, mode: Pointwise, inputs: &[Node], out: Node) -> Result {
        self.compute(mode, Data::CUDNN_DATA_FLOAT, None, inputs, out)
    }

    /// The same as a new f32 value, laid out as the first input.
    pub(super) fn apply(&mut self, mode: Pointwise, inputs: &[Node]) -> Result<Node> {
        let out = self.value(Data::CUDNN_DATA_FLOAT, self.layouts[inputs[0].0])?;
        self.pointwise(mode, inputs, out)?;
        Ok(out)
    }

    /// Each element's own place along a side of `like`.
    pub(super) fn index(&mut self, like: Node, axis: i64, math: Data) -> Result<Node> {
        let out = self.value(Data::CUDNN_DATA_INT32, self.layouts[like.0])?;
        self.compute(Pointwise::CUDNN_POINTWISE_GEN_INDEX, math, Some(axis), &[like], out)?;
        Ok(out)
    }

    /// Whether `mode` holds, element by element.
    pub(super) fn compare(&mut self, mode: Pointwise, inputs: [Node; 2]) -> Result<Node> {
        let out = self.value(Data::CUDNN_DATA_BOOLEAN, self.layouts[inputs[0].0])?;
        self.compute(mode, Data::CUDNN_DATA_BOOLEAN, None, &inputs, out)?;
        Ok(out)
    }

    /// `out = a * b`, matrix by matrix.
    pub(super) fn product(&mut self, a: Node, b: Node, out: Node, lengths: Lengths) -> Result {
        let mut part = Descriptor::new(Kind::CUDNN_BACKEND_MATMUL_DESCRIPTOR)?;
        part.set(Name::CUDNN_ATTR_MATMUL_COMP_TYPE, &[Data::CUDNN_DATA_FLOAT])?;
        part.finalize()?;
        let mut operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)?;
        operation.set(Name::CUDNN_ATTR_OPERATION_MATMUL_ADESC, &self.reference(a))?;
        operation.set(Name::CUDNN_ATTR_OPERATION_MATMUL_BDESC, &self.reference(b))?;
        operation.set(Name::CUDNN_ATTR_OPERATION_MATMUL_CDESC, &self.reference(out))?;
        operation.set(Name::CUDNN_ATTR_OPERATION_MATMUL_DESC, &[part.reference()])?;
        for (name, length) in [
            (Name::CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC, lengths.rows),
            (Name::CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC, lengths.columns),
            (Name::CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC, lengths.summed),
        ] {
            if let Some(length) = length {
                operation.set(name, &self.reference(length))?;
            }
        }
        self.parts.push(part);
        self.add(operation)
    }

    /// Reduces the sides of `x` that are 1 in `out`.
    pub(super) fn reduce(&mut self, with: Reduction, x: Node, out: Node) -> Result {
        let mut part = Descriptor::new(Kind::CUDNN_BACKEND_REDUCTION_DESCRIPTOR)?;
        part.set(Name::CUDNN_ATTR_REDUCTION_COMP_TYPE, &[Data::CUDNN_DATA_FLOAT])?;
        part.set(Name::CUDNN_ATTR_REDUCTION_OPERATOR, &[with])?;
        part.finalize()?;
        let mut operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)?;
        operation.set(Name::CUDNN_ATTR_OPERATION_REDUCTION_DESC, &[part.reference()])?;
        operation.set(Name::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, &self.reference(x))?;
        operation.set(Name::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, &self.reference(out))?;
        self.parts.push(part);
        self.add(operation)
    }

    /// One tensor of a convolution from the other two: [samples, channels, height, width], [outputs, channels,
    /// height, width] and [samples, outputs, height, width], whatever their strides.
    pub(super) fn convolution(
        &mut self,
        made: Made,
        stride: usize,
        padding: (usize, usize),
        [images, filters, places]: [Node; 3],
    ) -> Result {
        let padding = [padding.0 as i64, padding.1 as i64];
        let mut part = Descriptor::new(Kind::CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR)?;
        part.set(Name::CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, &[2i64])?;
        part.set(Name::CUDNN_ATTR_CONVOLUTION_COMP_TYPE, &[Data::CUDNN_DATA_FLOAT])?;
        // The filters as they lie, not turned around.
        let mode = sys::cudnnConvolutionMode_t::CUDNN_CROSS_CORRELATION;
        part.set(Name::CUDNN_ATTR_CONVOLUTION_CONV_MODE, &[mode])?;
        part.set(Name::CUDNN_ATTR_CONVOLUTION_DILATIONS, &[1i64; 2])?;
        part.set(Name::CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, &[stride as i64; 2])?;
        part.set(Name::CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, &padding)?;
        part.set(Name::CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, &padding)?;
        part.finalize()?;
        let (kind, [alpha, beta, description, x, w, y]) = names(made);
        let mut operation = Descriptor::new(kind)?;
        operation.set(description, &[part.reference()])?;
        for (name, node) in [(x, images), (w, filters), (y, places)] {
            operation.set(name, &self.reference(node))?;
        }
        operation.set(alpha, &[1.0f32])?;
        operation.set(beta, &[0.0f32])?;
        self.parts.push(part);
        self.add(operation)
    }

    /// `x` with its last two sides exchanged, as a new value of `data`.
    pub(super) fn transpose(&mut self, x: Node, data: Data) -> Result<Node> {
        let out = self.value(data, self.layouts[x.0].transposed())?;
        let mut operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR)?;
        operation.set(Name::CUDNN_ATTR_OPERATION_RESHAPE_XDESC, &self.reference(x))?;
        operation.set(Name::CUDNN_ATTR_OPERATION_RESHAPE_YDESC, &self.reference(out))?;
        self.add(operation)?;
        Ok(out)
    }

    /// Hands the operations to the library, which may be asked about them from then on.
    pub(super) fn pose(self, target: &Target) -> Result<Posed> {
        let mut graph = Descriptor::new(Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
        let operations: Vec<_> = self.operations.iter().map(Descriptor::reference).collect();
        graph.set(Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, &operations)?;
        match target {
            Target::Handle(handle) => graph.set(Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, &[*handle])?,
            #[cfg(test)]
            Target::Described(_) => {}
        }
        graph.finalize()?;
        let mut made_of = self.tensors;
        made_of.extend(self.parts);
        made_of.extend(self.operations);
        Ok(Posed {
            sources: self.sources,
            filled: self.filled,
            scratch_bytes: self.scratch_bytes,
            kept: Arc::new(Kept { graph, _made_of: made_of }),
        })
    }

    /// The first engine that the library proposes and can prepare.
    pub(super) fn plan(self, target: &Target) -> Result<Plan> {
        let posed = self.pose(target)?;
        let mut refusal = None;
        for heuristic in HEURISTICS {
            let configurations = match posed.configurations(heuristic, target) {
                Ok(configurations) => configurations,
                Err(refused) => {
                    refusal.get_or_insert(refused);
                    continue;
                }
            };
            for configuration in configurations {
                match posed.prepare(configuration, target) {
                    Ok(plan) => return Ok(plan),
                    Err(refused) => {
                        refusal.get_or_insert(refused);
                    }
                }
            }
        }
        Err(refusal.unwrap_or_else(Refusal::no_engine))
    }
}

/// A convolution's descriptor, and its attributes: alpha, beta, the description, images, filters and places.
fn names(made: Made) -> (Kind, [Name; 6]) {
    match made {
        Made::Places => (
            Kind::CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
            [
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
            ],
        ),
        Made::ImageGradient => (
            Kind::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
            [
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
            ],
        ),
        Made::FilterGradient => (
            Kind::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
            [
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
            ],
        ),
    }
}

/// What a plan is made for.
pub(super) enum Target {
    Handle(sys::cudnnHandle_t),
    /// A GPU that need not be there: the plan cannot run.
    #[cfg(test)]
    Described(Descriptor),
}

/// What plans were made of.
struct Kept {
    graph: Descriptor,
    _made_of: Vec<Descriptor>,
}

// SAFETY: only `Posed` touches the graph, and whoever owns that is the only one; plans merely hold it.
unsafe impl Sync for Kept {}

/// Operations that the library has taken.
pub(super) struct Posed {
    sources: Vec<(i64, Source)>,
    filled: Option<(usize, usize, u32)>,
    scratch_bytes: usize,
    kept: Arc<Kept>,
}

/// An engine and how it is set, as the library proposes it.
pub(super) struct Configuration {
    descriptor: Descriptor,
    /// Where it was found: what tests print.
    #[cfg_attr(not(test), expect(dead_code))]
    choice: (Heuristic, usize),
}

impl Configuration {
    fn engine(&self) -> Result<Descriptor> {
        // The library fills a descriptor that is there.
        let engine = Descriptor::new(Kind::CUDNN_BACKEND_ENGINE_DESCRIPTOR)?;
        self.descriptor.get(Name::CUDNN_ATTR_ENGINECFG_ENGINE, &mut [engine.reference()])?;
        Ok(engine)
    }

    /// The engine's number among those of the operation.
    pub(super) fn number(&self) -> Result<i64> {
        let mut number = [0i64];
        self.engine()?.get(Name::CUDNN_ATTR_ENGINE_GLOBAL_INDEX, &mut number)?;
        Ok(number[0])
    }

    /// What the library notes about the engine's numbers.
    pub(super) fn notes(&self) -> Result<Vec<Note>> {
        let mut notes = [Note(u32::MAX); NOTES_MAX];
        let count = self.engine()?.get(Name::CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, &mut notes)?;
        Ok(notes[..count.min(NOTES_MAX)].to_vec())
    }

    /// Bytes of workspace that its plan will want; preparing the plan may take a thousand times as long.
    pub(super) fn workspace_bytes(&self) -> Result<usize> {
        let mut bytes = [0i64];
        self.descriptor.get(Name::CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE, &mut bytes)?;
        Ok(bytes[0].max(0) as usize)
    }
}

impl Posed {
    /// What the library proposes, what it takes for the fastest first.
    pub(super) fn configurations(&self, heuristic: Heuristic, target: &Target) -> Result<Vec<Configuration>> {
        let mut query = Descriptor::new(Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?;
        query.set(Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &[self.kept.graph.reference()])?;
        query.set(Name::CUDNN_ATTR_ENGINEHEUR_MODE, &[heuristic])?;
        match target {
            Target::Handle(_) => {}
            #[cfg(test)]
            Target::Described(gpu) => {
                query.set(Name::CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, &[gpu.reference()])?;
            }
        }
        query.finalize()?;
        let found = query.count::<Reference>(Name::CUDNN_ATTR_ENGINEHEUR_RESULTS)?;
        // The library fills descriptors that are there.
        let made: Result<Vec<_>> =
            (0..found).map(|_| Descriptor::new(Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR)).collect();
        let made = made?;
        let mut references: Vec<_> = made.iter().map(Descriptor::reference).collect();
        let filled = query.get(Name::CUDNN_ATTR_ENGINEHEUR_RESULTS, &mut references)?;
        let configuration = |(rank, descriptor)| Configuration { descriptor, choice: (heuristic, rank) };
        Ok(made.into_iter().take(filled).enumerate().map(configuration).collect())
    }

    /// The plan of an engine's configuration.
    pub(super) fn prepare(&self, configuration: Configuration, target: &Target) -> Result<Plan> {
        let mut plan = Descriptor::new(Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
        plan.set(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, &[configuration.descriptor.reference()])?;
        match target {
            Target::Handle(handle) => plan.set(Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, &[*handle])?,
            #[cfg(test)]
            Target::Described(_) => {}
        }
        plan.finalize()?;
        let mut bytes = [0i64];
        plan.get(Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, &mut bytes)?;
        Ok(Plan {
            plan,
            sources: self.sources.clone(),
            filled: self.filled,
            scratch_bytes: self.scratch_bytes,
            library_bytes: bytes[0].max(0) as usize,
            configuration,
            _kept: Arc::clone(&self.kept),
        })
    }
}

/// A graph that can run.
pub(super) struct Plan {
    plan: Descriptor,
    sources: Vec<(i64, Source)>,
    filled: Option<(usize, usize, u32)>,
    scratch_bytes: usize,
    library_bytes: usize,
    #[cfg_attr(not(test), expect(dead_code))]
    configuration: Configuration,
    _kept: Arc<Kept>,
}

impl Plan {
    /// Our scratch first, then the library's.
    pub(super) fn workspace_bytes(&self) -> usize {
        self.scratch_bytes + self.library_bytes
    }

    #[cfg(test)]
    pub(super) fn choice(&self) -> String {
        let (heuristic, rank) = self.configuration.choice;
        format!("{heuristic:?} {rank}")
    }

    /// What must be in the workspace before the plan runs: the offset and number of 4-byte elements, and
    /// what each of them is.
    pub(super) fn filled(&self) -> Option<(usize, usize, u32)> {
        self.filled
    }

    /// Queues the plan's work.
    ///
    /// # Safety
    /// The arguments and the workspace are device memory of the sizes that the plan was made for.
    pub(super) unsafe fn run(
        &self,
        handle: sys::cudnnHandle_t,
        scale: f32,
        argument: &dyn Fn(Argument) -> u64,
        workspace: u64,
    ) -> Result {
        let numbers = [scale, 1.0, f32::NEG_INFINITY];
        let pointer = |source: Source| {
            Pointer(match source {
                Source::Argument(which) => argument(which) as *mut c_void,
                Source::Scratch(offset) => (workspace + offset as u64) as *mut c_void,
                // Read while the work is queued.
                Source::Number(Number::Scale) => (&raw const numbers[0]).cast_mut().cast(),
                Source::Number(Number::One) => (&raw const numbers[1]).cast_mut().cast(),
                Source::Number(Number::MinusInfinity) => (&raw const numbers[2]).cast_mut().cast(),
            })
        };
        let identities: Vec<i64> = self.sources.iter().map(|(identity, _)| *identity).collect();
        let pointers: Vec<Pointer> = self.sources.iter().map(|(_, source)| pointer(*source)).collect();
        let library = Pointer((workspace + self.scratch_bytes as u64) as *mut c_void);
        let mut pack = Descriptor::new(Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, &identities)?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, &pointers)?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, &[library])?;
        pack.finalize()?;
        // SAFETY: by this function's contract.
        unsafe { self.plan.execute(handle, &pack) }
    }
}
