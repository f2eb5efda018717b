//! How a model's layers hang together: in series, and between a fork and its join in branches. Found from each layer's
//! inputs alone.

/// Layers one after another, and what lies between each and the next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Series {
    /// Every path through the series passes all of these.
    pub layers: Vec<usize>,
    /// What leads to each layer, and last what leads out: the branches from the place before. One branch without
    /// layers is a plain edge. Outside of a whole model nothing leads, and there are no branches.
    pub links: Vec<Vec<Branch>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Branch {
    Series(Series),
    /// Layers in an order of their own that is neither series nor branches: they stay together.
    Bundle(Vec<usize>),
}

impl Branch {
    pub fn is_plain(&self) -> bool {
        matches!(self, Branch::Series(series) if series.layers.is_empty())
    }

    /// All its layers, however deep, in chain order.
    pub fn layers(&self) -> Vec<usize> {
        let mut layers = match self {
            Branch::Bundle(layers) => layers.clone(),
            Branch::Series(series) => {
                let inner = series.links.iter().flatten().flat_map(Branch::layers);
                series.layers.iter().copied().chain(inner).collect()
            }
        };
        layers.sort_unstable();
        layers
    }
}

/// A place in the model: a layer, or what is before the first or after the last.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Node {
    Before,
    Layer(usize),
    After,
}

/// The whole model: its first layer takes what comes from outside, its last is the one that nobody reads.
pub fn series(inputs: &[Vec<usize>]) -> Series {
    let all: Vec<usize> = (0..inputs.len()).collect();
    let mut series = between(inputs, &all, Node::Before, Node::After);
    if let (Some(first), Some(last)) = (series.links.first(), series.links.last()) {
        // Plain edges at both ends lead nowhere.
        let plain = [first, last].map(|link| link.iter().all(Branch::is_plain));
        if plain[0] {
            series.links[0].clear();
        }
        if plain[1] {
            let end = series.links.len() - 1;
            series.links[end].clear();
        }
    }
    series
}

/// Edges among a set of layers and the two places around it.
fn edges(inputs: &[Vec<usize>], within: &[usize], from: Node, to: Node) -> Vec<(Node, Node)> {
    let has = |layer: usize| within.binary_search(&layer).is_ok();
    let mut edges = Vec::new();
    for layer in within {
        for input in &inputs[*layer] {
            match has(*input) {
                true => edges.push((Node::Layer(*input), Node::Layer(*layer))),
                false => edges.push((from, Node::Layer(*layer))),
            }
        }
        if inputs[*layer].is_empty() {
            edges.push((from, Node::Layer(*layer)));
        }
        let is_read_here = within.iter().any(|reader| inputs[*reader].contains(layer));
        let is_read_after = match to {
            Node::Layer(to) => inputs[to].contains(layer),
            _ => !is_read_here,
        };
        if is_read_after {
            edges.push((Node::Layer(*layer), to));
        }
    }
    edges
}

fn rank(node: Node) -> usize {
    match node {
        Node::Before => 0,
        Node::Layer(layer) => layer + 1,
        Node::After => usize::MAX,
    }
}

/// Those of some layers (rising) that every path between two places passes. Layers stand after their inputs, so these
/// are the ones that no edge passes by.
fn on_every_path(within: &[usize], edges: &[(Node, Node)], from: Node, to: Node) -> Vec<usize> {
    let ends = |(a, b): &(Node, Node)| {
        (if *a == from { 0 } else { rank(*a) }, if *b == to { usize::MAX } else { rank(*b) })
    };
    let passed = |layer: usize| {
        let place = rank(Node::Layer(layer));
        edges.iter().map(ends).any(|(a, b)| a < place && place < b)
    };
    within.iter().copied().filter(|layer| !passed(*layer)).collect()
}

/// The series of these layers between two places.
fn between(inputs: &[Vec<usize>], within: &[usize], from: Node, to: Node) -> Series {
    let edges = edges(inputs, within, from, to);
    let layers = on_every_path(within, &edges, from, to);
    let mut places = vec![from];
    places.extend(layers.iter().map(|layer| Node::Layer(*layer)));
    places.push(to);
    let links = places.windows(2).map(|ends| {
        let low = if ends[0] == from { 0 } else { rank(ends[0]) };
        let high = if ends[1] == to { usize::MAX } else { rank(ends[1]) };
        let inner = within.iter().copied().filter(|layer| low < layer + 1 && layer + 1 < high);
        let mut branches = branches(inputs, &inner.collect::<Vec<_>>(), ends[0], ends[1]);
        let direct = edges.contains(&(ends[0], ends[1]));
        // An empty set between its ends is itself a plain edge.
        if direct || branches.is_empty() {
            branches.push(Branch::Series(Series::default()));
        }
        branches
    });
    let links = links.collect();
    Series { layers, links }
}

/// The parts of a set of layers that hang together.
fn branches(inputs: &[Vec<usize>], within: &[usize], from: Node, to: Node) -> Vec<Branch> {
    let mut part_of: Vec<usize> = (0..within.len()).collect();
    for (reader, layer) in within.iter().enumerate() {
        for input in &inputs[*layer] {
            if let Ok(read) = within.binary_search(input) {
                let (a, b) = (part_of[reader], part_of[read]);
                part_of.iter_mut().filter(|part| **part == a).for_each(|part| *part = b);
            }
        }
    }
    let mut parts: Vec<usize> = part_of.clone();
    parts.sort_unstable();
    parts.dedup();
    // In the order of their first layers.
    let mut sets: Vec<Vec<usize>> = parts
        .into_iter()
        .map(|part| (0..within.len()).filter(|at| part_of[*at] == part).map(|at| within[at]).collect())
        .collect();
    sets.sort_unstable();
    let branch = |set: Vec<usize>| {
        let edges = edges(inputs, &set, from, to);
        match on_every_path(&set, &edges, from, to).is_empty() {
            true => Branch::Bundle(set),
            false => Branch::Series(between(inputs, &set, from, to)),
        }
    };
    sets.into_iter().map(branch).collect()
}

#[cfg(test)]
mod tests {
    use shoal_model::convolutional::preset;
    use shoal_model::{Chain, presets};

    use super::*;

    fn inputs(chain: &Chain) -> Vec<Vec<usize>> {
        chain.layers.iter().map(|layer| layer.inputs.clone()).collect()
    }

    fn plain() -> Vec<Branch> {
        vec![Branch::Series(Series::default())]
    }

    fn one(layer: usize) -> Branch {
        Branch::Series(Series { layers: vec![layer], links: vec![plain(), plain()] })
    }

    #[test]
    fn a_transformer_is_a_series() {
        let found = series(&inputs(&Chain::new(&presets::gpt2(50, 16, 3, 4, 12))));
        assert_eq!(found.layers, [0, 1, 2, 3, 4]);
        assert!(found.links[1..5].iter().all(|link| *link == plain()));
    }

    #[test]
    fn a_fork_in_a_branch_is_found_and_so_is_an_edge_around_all() {
        // 0 to 1, 2; 2 to 3, 4; all of 1, 3, 4 and 0 itself to 5.
        let found = series(&[vec![], vec![0], vec![0], vec![2], vec![2], vec![0, 1, 3, 4]]);
        assert_eq!(found.layers, [0, 5]);
        let nested = Branch::Series(Series { layers: vec![2], links: vec![plain(), vec![one(3), one(4)]] });
        assert_eq!(found.links[1], [one(1), nested, plain()[0].clone()]);
    }

    #[test]
    fn what_is_no_series_stays_together() {
        // 1 and 2 both read 0, 3 reads both, 4 reads 2 alone, 5 joins.
        let found = series(&[vec![], vec![0], vec![0], vec![1, 2], vec![2], vec![3, 4]]);
        assert_eq!(found.links[1], [Branch::Bundle(vec![1, 2, 3, 4])]);
    }

    #[test]
    fn every_layer_of_the_published_models_has_one_place() {
        for name in ["vgg16", "resnet50", "wide_resnet101_2", "inception_v3"] {
            let chain = Chain::convolutional(&preset(name).unwrap());
            let found = Branch::Series(series(&inputs(&chain)));
            assert_eq!(found.layers(), (0..chain.layers.len()).collect::<Vec<_>>(), "{name}");
            let Branch::Series(whole) = found else { unreachable!() };
            let inner = whole.links.iter().flatten().collect::<Vec<_>>();
            assert!(!inner.iter().any(|branch| matches!(branch, Branch::Bundle(_))), "{name}");
        }
    }
}
