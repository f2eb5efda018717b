//! From table to programs, one a device. The schedule decides the order of each list; dependencies are derived from
//! the instructions' effects alone, so there is one place that knows what must precede what.

use foldhash::{HashMap, HashSet};
use shoal_model::Chain;
use thiserror::Error;

use crate::effects::{Fact, Sum, Value, effects};
use crate::layout::Layout;
use crate::parallel;
use crate::program::{Instruction, Lane, Moved, Op, Pass, Program, Purpose};
use crate::schedule::{ByArithmetic, Listed, Pace, lists};
use crate::table::{FORMAT, Order, Plan, Samples, TableError, Tier};

#[derive(Debug, Error, PartialEq)]
pub enum CompileError {
    #[error(transparent)]
    Table(#[from] TableError),
    #[error(
        "{layer} norms samples together that are in different micro-batches, of which the first would be done before the last begins"
    )]
    SplitGroup { layer: String },
}

/// Compiles the programs of the plan's devices for one step (or one evaluation, or one prediction), in the order of
/// its devices. Pipelines are ordered by the layers' arithmetic.
pub fn compile(plan: &Plan, chain: &Chain, purpose: Purpose) -> Result<Vec<Program>, CompileError> {
    compile_paced(plan, chain, purpose, &ByArithmetic::new(chain, plan.sequence))
}

/// The same, ordered by what work was measured to cost.
pub fn compile_paced(
    plan: &Plan,
    chain: &Chain,
    purpose: Purpose,
    pace: &dyn Pace,
) -> Result<Vec<Program>, CompileError> {
    plan.check(chain)?;
    compile_in(&Layout::new(plan, chain), purpose, pace)
}

/// The same, of a table that [`Plan::check`] has passed, where its layout is at hand.
pub fn compile_in(layout: &Layout, purpose: Purpose, pace: &dyn Pace) -> Result<Vec<Program>, CompileError> {
    Ok(Ordered::new(layout, purpose, pace)?.link())
}

/// Instructions of a step whose programs are worth a thread for each core.
pub(crate) const LARGE_INSTRUCTIONS: usize = 200_000;

/// Programs on their way: what every device does in which order, but not yet what follows what. That is the larger part of
/// the work, and those who try many tables may know enough before it.
pub struct Ordered<'a> {
    layout: &'a Layout<'a>,
    purpose: Purpose,
    lists: Vec<Vec<Listed>>,
    /// When the last backward ends by the pace, where micro-batches follow each other; zero where they go layer by layer.
    /// Links that many share at a time are not in it.
    pub foreseen_seconds: f64,
}

impl<'a> Ordered<'a> {
    /// Of a table that [`Plan::check`] has passed.
    pub fn new(
        layout: &'a Layout<'a>,
        purpose: Purpose,
        pace: &dyn Pace,
    ) -> Result<Ordered<'a>, CompileError> {
        if purpose == Purpose::Train {
            refuse_split_groups(layout)?;
        }
        let (lists, foreseen_seconds) = lists(layout, purpose, pace);
        Ok(Ordered { layout, purpose, lists, foreseen_seconds })
    }

    pub fn link(self) -> Vec<Program> {
        let Ordered { layout, purpose, lists, .. } = self;
        let program = |(device, list)| {
            let instructions = Linker::default().link(list, layout, device);
            Program { format: FORMAT, purpose, device, instructions }
        };
        let count: usize = lists.iter().map(Vec::len).sum();
        let lists = lists.into_iter().enumerate();
        match count > LARGE_INSTRUCTIONS {
            true => parallel::map_into(lists.collect(), program),
            false => lists.map(program).collect(),
        }
    }
}

/// A group's micro-batches must all have begun a layer before one of them goes on: they go layer by layer.
fn refuse_split_groups(layout: &Layout) -> Result<(), CompileError> {
    if layout.plan.order == Order::LayerFirst {
        return Ok(());
    }
    let split = |layer: &usize| {
        let batches: Vec<Samples> = layout.shares(*layer).iter().map(|share| share.samples).collect();
        splits_groups(layout.chain, *layer, &batches)
    };
    match (0..layout.chain.layers.len()).find(split) {
        Some(layer) => Err(CompileError::SplitGroup { layer: layout.chain.layers[layer].name.clone() }),
        None => Ok(()),
    }
}

/// Whether some group that a layer's batch norm takes together is in several micro-batches.
pub(crate) fn splits_groups(chain: &Chain, layer: usize, batches: &[Samples]) -> bool {
    let groups = |samples: &Samples| chain.batch_norm(layer).map(|norm| norm.groups(samples.range()));
    let mut seen = HashSet::default();
    batches.iter().filter_map(groups).flatten().any(|(group, _)| !seen.insert(group))
}

/// What part of a device an instruction occupies.
pub(crate) fn lane(op: &Op, layout: &Layout) -> Lane {
    let alone = layout.members().len() == 1;
    match *op {
        Op::Load { .. } | Op::Restore { .. } => Lane::CopyIn,
        Op::Offload { .. } => Lane::CopyOut,
        Op::Gather { layer, pass } => {
            layout.gather(layer, pass).map_or(Lane::Compute, |group| group.lane(true))
        }
        Op::Reduce { layer } => layout.reduce(layer).map_or(Lane::Compute, |group| group.lane(false)),
        Op::HandOver { layer } => layout.hand_over(layer).map_or(Lane::Compute, |group| group.lane(false)),
        Op::Send { .. } | Op::Receive { .. } | Op::Exchange { .. } => Lane::Network,
        Op::SumLoss | Op::GradientNorm if !alone => Lane::Network,
        Op::CountTargets => {
            let last = layout.chain.layers.len() - 1;
            let first = layout.computing(last).next();
            match layout.computing(last).all(|device| Some(device) == first) {
                true => Lane::Compute,
                false => Lane::Network,
            }
        }
        Op::Update { at: Tier::Host, .. } => Lane::Host,
        Op::Update { at: Tier::Disk, .. } => Lane::Disk,
        _ => Lane::Compute,
    }
}

/// Numbers a list's instructions and derives what each must follow.
#[derive(Default)]
struct Linker {
    maker: HashMap<Value, u32>,
    fact_maker: HashMap<Fact, u32>,
    last_addition: HashMap<Sum, u32>,
    /// Who reads a layer's parameters, in order, but for those that one of the others comes after.
    readers: HashMap<usize, Vec<u32>>,
    gathered_readers: HashMap<(usize, Pass), Vec<u32>>,
    sent: HashMap<(usize, usize, Samples), u32>,
}

impl Linker {
    fn link(mut self, list: Vec<Listed>, layout: &Layout, device: usize) -> Vec<Instruction> {
        let mut instructions = Vec::with_capacity(list.len());
        for (id, Listed { op, after, from }) in (0u32..).zip(list) {
            let mut after: Vec<u32> = after.into_iter().map(|place| place as u32).collect();
            self.follow(id, &op, layout, device, &mut after);
            after.sort_unstable();
            after.dedup();
            instructions.push(Instruction {
                id,
                op,
                lane: lane(&op, layout),
                after,
                ahead: id - from as u32,
            });
        }
        instructions
    }

    fn follow(&mut self, id: u32, op: &Op, layout: &Layout, device: usize, after: &mut Vec<u32>) {
        let effects = effects(op, layout, device);
        after.extend(effects.uses_up.iter().filter_map(|value| self.maker.remove(value)));
        after.extend(effects.needs.iter().filter_map(|fact| self.fact_maker.get(fact)));
        for sum in effects.needs_complete.iter().chain(&effects.adds_to) {
            after.extend(self.last_addition.get(sum));
        }
        let replaced = effects.replaces.iter().flat_map(|tensor| layout.users(*tensor));
        after.extend(replaced.filter_map(|layer| self.readers.get(layer)).flatten());
        match *op {
            Op::Release { layer, pass } => {
                after.extend(self.gathered_readers.remove(&(layer, pass)).into_iter().flatten());
            }
            Op::Send { moved: Moved::Activation, layer, reader, samples, .. } => {
                self.sent.insert((layer, reader, samples), id);
            }
            // A gradient comes back after the activation went, so this costs nothing; it says that the way out is
            // free again.
            Op::Receive { moved: Moved::Gradient, layer, reader, samples, .. } => {
                after.extend(self.sent.remove(&(layer, reader, samples)));
            }
            _ => {}
        }
        self.maker.extend(effects.makes.iter().map(|value| (*value, id)));
        self.fact_maker.extend(effects.establishes.map(|fact| (fact, id)));
        self.last_addition.extend(effects.adds_to.iter().map(|sum| (*sum, id)));
        if let Some(layer) = op.layer().filter(|_| !effects.reads_tensors.is_empty()) {
            let readers = self.readers.entry(layer).or_default();
            for earlier in after.iter() {
                if let Ok(place) = readers.binary_search(earlier) {
                    readers.remove(place);
                }
            }
            readers.push(id);
        }
        if let Some(read) = effects.reads_gathered {
            self.gathered_readers.entry(read).or_default().push(id);
        }
    }
}
