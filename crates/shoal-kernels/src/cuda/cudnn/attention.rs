//! Attention as the library's graphs. Its engines know attention by the pattern of the operations, so each
//! step below is one that they look for, in the types that they look for: scores in f32, what enters a
//! second product in the tensors' own type.

use super::descriptor::Result;
use super::graph::{Argument, Data, Graph, Layout, Lengths, Node, Number, Pointwise, Reduction};
use crate::device::AttentionShape;
use crate::tensor::Element;

/// Rows of keys that the backward's kernels take at a time.
const BACKWARD_TILE: usize = 128;
/// Up to this version the backward counts the keys that fill up its last tile, unless lengths say where
/// they end.
pub(super) const VERSION_OF_OPEN_TILES: usize = 91500;

/// An attention that a graph is made for.
#[derive(Clone, Copy)]
pub(super) struct Problem {
    pub(super) element: Element,
    pub(super) shape: AttentionShape,
}

impl Problem {
    fn data(&self) -> Data {
        self.element.into()
    }

    /// [samples, heads, sequence, head_size] in rows of `width`.
    fn rows(&self, heads: usize, width: usize) -> Layout {
        let AttentionShape { samples, sequence, head_size, .. } = self.shape;
        Layout::new([samples, heads, sequence, head_size], [sequence * width, head_size, width, 1])
    }

    fn queries(&self) -> Layout {
        self.rows(self.shape.heads, self.shape.qkv_width())
    }

    fn keys(&self) -> Layout {
        self.rows(self.shape.kv_heads, self.shape.qkv_width())
    }

    fn out(&self) -> Layout {
        self.rows(self.shape.heads, self.shape.query_width())
    }

    /// [samples, heads, sequence, last], without gaps.
    fn by_query(&self, last: usize) -> Layout {
        Layout::packed([self.shape.samples, self.shape.heads, self.shape.sequence, last])
    }
}

/// `scores` where `kept` holds, minus infinity elsewhere.
fn keep(graph: &mut Graph, scores: Node, kept: Node) -> Result<Node> {
    let infinity = graph.number(Number::MinusInfinity)?;
    graph.apply(Pointwise::CUDNN_POINTWISE_BINARY_SELECT, &[scores, infinity, kept])
}

/// `scores` of keys up to the query's own row.
fn mask_later(graph: &mut Graph, scores: Node) -> Result<Node> {
    let row = graph.index(scores, 2, Data::CUDNN_DATA_FLOAT)?;
    let column = graph.index(scores, 3, Data::CUDNN_DATA_FLOAT)?;
    let kept = graph.compare(Pointwise::CUDNN_POINTWISE_CMP_GE, [row, column])?;
    keep(graph, scores, kept)
}

/// `scores` of rows and columns before each sample's length.
fn mask_beyond(graph: &mut Graph, scores: Node, length: Node) -> Result<Node> {
    let row = graph.index(scores, 2, Data::CUDNN_DATA_INT32)?;
    let column = graph.index(scores, 3, Data::CUDNN_DATA_INT32)?;
    let row = graph.compare(Pointwise::CUDNN_POINTWISE_CMP_LT, [row, length])?;
    let column = graph.compare(Pointwise::CUDNN_POINTWISE_CMP_LT, [column, length])?;
    let kept = graph.compare(Pointwise::CUDNN_POINTWISE_LOGICAL_AND, [row, column])?;
    keep(graph, scores, kept)
}

/// `out = softmax(scale * queries * keysᵀ) * values` and the logarithm of each row's sum of exponentials.
pub(super) fn forward(problem: &Problem) -> Result<Graph> {
    let (data, f32) = (problem.data(), Data::CUDNN_DATA_FLOAT);
    let (square, row) = (problem.by_query(problem.shape.sequence), problem.by_query(1));
    let mut graph = Graph::default();
    let query = graph.argument(Argument::Query, data, problem.queries())?;
    let key = graph.argument(Argument::Key, data, problem.keys().transposed())?;
    let products = graph.value(f32, square)?;
    graph.product(query, key, products, Lengths::default())?;
    let scale = graph.number(Number::Scale)?;
    let mut scores = graph.apply(Pointwise::CUDNN_POINTWISE_MUL, &[products, scale])?;
    if problem.shape.causal {
        scores = mask_later(&mut graph, scores)?;
    }
    let most = graph.value(f32, row)?;
    graph.reduce(Reduction::CUDNN_REDUCE_TENSOR_MAX, scores, most)?;
    let below = graph.apply(Pointwise::CUDNN_POINTWISE_SUB, &[scores, most])?;
    let exponentials = graph.apply(Pointwise::CUDNN_POINTWISE_EXP, &[below])?;
    let sum = graph.value(f32, row)?;
    graph.reduce(Reduction::CUDNN_REDUCE_TENSOR_ADD, exponentials, sum)?;
    let logarithm = graph.apply(Pointwise::CUDNN_POINTWISE_LOG, &[sum])?;
    let logsumexp = graph.argument(Argument::LogSumExp, f32, row)?;
    graph.pointwise(Pointwise::CUDNN_POINTWISE_ADD, &[most, logarithm], logsumexp)?;
    let probabilities = graph.value(data, square)?;
    graph.pointwise(Pointwise::CUDNN_POINTWISE_DIV, &[exponentials, sum], probabilities)?;
    let value = graph.argument(Argument::Value, data, problem.keys())?;
    let out = graph.argument(Argument::Out, data, problem.out())?;
    graph.product(probabilities, value, out, Lengths::default())?;
    Ok(graph)
}

/// `gradient = xᵀ * y` of each head; heads that share keys add up.
fn shared_gradient(
    graph: &mut Graph,
    problem: &Problem,
    x: Node,
    y: Node,
    length: Option<Node>,
    gradient: Argument,
) -> Result {
    let AttentionShape { heads, kv_heads, head_size, .. } = problem.shape;
    let data = problem.data();
    let turned = graph.transpose(x, data)?;
    let out = graph.argument(gradient, data, problem.keys())?;
    let lengths = Lengths { rows: length, summed: length, ..Lengths::default() };
    if heads == kv_heads {
        return graph.product(turned, y, out, lengths);
    }
    let each = graph.value(data, problem.by_query(head_size))?;
    graph.product(turned, y, each, lengths)?;
    graph.reduce(Reduction::CUDNN_REDUCE_TENSOR_ADD, each, out)
}

/// The gradients of queries, keys and values. Blocks of keys each know a part of a query's gradient, and add
/// it in f32 in whatever order they come. (The library could also keep the gradients of the scores and make a
/// product of them, the same every time; that is samples * heads * sequence² of them, and slower.)
pub(super) fn backward(problem: &Problem, version: usize) -> Result<Graph> {
    let (data, f32) = (problem.data(), Data::CUDNN_DATA_FLOAT);
    let AttentionShape { samples, sequence, head_size, .. } = problem.shape;
    let (square, row) = (problem.by_query(sequence), problem.by_query(1));
    let mut graph = Graph::default();
    let length = if version <= VERSION_OF_OPEN_TILES && !sequence.is_multiple_of(BACKWARD_TILE) {
        Some(graph.lengths(samples, sequence)?)
    } else {
        None
    };
    let scores_lengths = Lengths { rows: length, columns: length, ..Lengths::default() };

    // What each row's gradients of the probabilities average to.
    let out = graph.argument(Argument::Out, data, problem.out())?;
    let out_gradient = graph.argument(Argument::OutGradient, data, problem.out())?;
    let terms = graph.value(f32, problem.by_query(head_size))?;
    graph.pointwise(Pointwise::CUDNN_POINTWISE_MUL, &[out_gradient, out], terms)?;
    let sum = graph.value(f32, row)?;
    graph.reduce(Reduction::CUDNN_REDUCE_TENSOR_ADD, terms, sum)?;
    let one = graph.number(Number::One)?;
    let average = graph.scratch(f32, row)?;
    graph.pointwise(Pointwise::CUDNN_POINTWISE_MUL, &[sum, one], average)?;

    // The probabilities again.
    let query = graph.argument(Argument::Query, data, problem.queries())?;
    let key = graph.argument(Argument::Key, data, problem.keys().transposed())?;
    let products = graph.value(f32, square)?;
    graph.product(query, key, products, scores_lengths)?;
    let scale = graph.number(Number::Scale)?;
    let mut scores = graph.apply(Pointwise::CUDNN_POINTWISE_MUL, &[products, scale])?;
    if let Some(length) = length {
        scores = mask_beyond(&mut graph, scores, length)?;
    }
    let logsumexp = graph.argument(Argument::LogSumExp, f32, row)?;
    scores = graph.apply(Pointwise::CUDNN_POINTWISE_SUB, &[scores, logsumexp])?;
    if problem.shape.causal {
        scores = mask_later(&mut graph, scores)?;
    }
    let probabilities = graph.apply(Pointwise::CUDNN_POINTWISE_EXP, &[scores])?;
    shared_gradient(&mut graph, problem, probabilities, out_gradient, length, Argument::ValueGradient)?;

    // The gradients of the scores.
    let value = graph.argument(Argument::Value, data, problem.keys().transposed())?;
    let gradients = graph.value(f32, square)?;
    graph.product(out_gradient, value, gradients, scores_lengths)?;
    let gradients = graph.apply(Pointwise::CUDNN_POINTWISE_SUB, &[gradients, average])?;
    let gradients = graph.apply(Pointwise::CUDNN_POINTWISE_MUL, &[gradients, probabilities])?;
    let gradients = graph.apply(Pointwise::CUDNN_POINTWISE_MUL, &[gradients, scale])?;
    shared_gradient(&mut graph, problem, gradients, query, length, Argument::KeyGradient)?;

    let rows_of_keys = graph.transpose(key, f32)?;
    let query_gradient = graph.argument(Argument::QueryGradient, data, problem.queries())?;
    let lengths = Lengths { rows: length, summed: length, ..Lengths::default() };
    let sums = graph.scratch(f32, problem.by_query(head_size))?;
    graph.product(gradients, rows_of_keys, sums, lengths)?;
    graph.pointwise(Pointwise::CUDNN_POINTWISE_IDENTITY, &[sums], query_gradient)?;
    Ok(graph)
}
