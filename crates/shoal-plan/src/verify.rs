//! Whether a program's order is one its dependencies allow, and whether it does a whole step of the plan.
//! The engine runs nothing that has not passed here.

use foldhash::{HashMap, HashSet};
use shoal_model::Chain;
use thiserror::Error;

use crate::compile::lane;
use crate::effects::{Effects, Fact, Sum, Value, effects};
use crate::layout::Layout;
use crate::meetings::Meetings;
use crate::program::{Instruction, Keep, Lane, Op, Pass, Program, Purpose};
use crate::table::{FORMAT, Plan, Samples};

/// Why a program is refused: each names the instruction.
#[derive(Debug, Error, PartialEq)]
pub enum ProgramError {
    #[error("the program is of format {found}, this version reads format {FORMAT}")]
    Format { found: u32 },
    #[error("the program is for {found:?}, not for {expected:?}")]
    Purpose { found: Purpose, expected: Purpose },
    #[error("the program is for device {device}, the plan has {devices}")]
    Device { device: usize, devices: usize },
    #[error("two instructions have the id {id}")]
    DuplicateId { id: u32 },
    #[error("{instruction} names a layer or tensor that the model does not have")]
    OutOfRange { instruction: String },
    #[error("{instruction} is on the {found:?} lane, and what it does is done on the {expected:?} lane")]
    OtherLane { instruction: String, found: Lane, expected: Lane },
    #[error("{instruction} must follow instruction {after}, which does not stand before it")]
    TooEarly { instruction: String, after: String },
    #[error("{instruction} needs what {after} makes, and does not wait for it")]
    NotAwaited { instruction: String, after: String },
    #[error("{instruction} uses {value}, which nothing before it has made")]
    NotMade { instruction: String, value: String },
    #[error("{instruction} makes {value} a second time")]
    MadeTwice { instruction: String, value: String },
    #[error("{instruction} needs {fact} first")]
    FactMissing { instruction: String, fact: String },
    #[error("{instruction} adds to {sum} out of turn: {earlier} comes first")]
    SumOrder { instruction: String, sum: String, earlier: String },
    #[error("{instruction} stands before {pending}, which still adds to {sum}")]
    SumIncomplete { instruction: String, sum: String, pending: String },
    #[error("{instruction} reads tensor {tensor} after its update")]
    StaleRead { instruction: String, tensor: usize },
    #[error("{instruction} reads layer {layer}'s gathered parameters after their release")]
    Released { instruction: String, layer: usize },
    #[error("at the program's end {value} is left over: an instruction is missing")]
    LeftOver { value: String },
    #[error("the program does not {what}")]
    Incomplete { what: String },
    #[error("device {device}: {instruction} is not what the plan has it do there")]
    NotPlanned { device: usize, instruction: String },
    #[error("device {device}: {instruction} has no counterpart on device {other}")]
    Unmet { device: usize, instruction: String, other: usize },
    #[error("device {device}: {instruction} would wait forever")]
    Stuck { device: usize, instruction: String },
}

impl ProgramError {
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            ProgramError::TooEarly { .. }
            | ProgramError::NotAwaited { .. }
            | ProgramError::NotMade { .. }
            | ProgramError::FactMissing { .. }
            | ProgramError::SumOrder { .. }
            | ProgramError::SumIncomplete { .. }
            | ProgramError::StaleRead { .. }
            | ProgramError::Released { .. } => {
                "reorder instructions only where every id in `after` still stands earlier in the list, and keep those ids".into()
            }
            _ => "write the program again with `shoal plan JOB.toml --program FILE`".into(),
        })
    }
}

/// Checks a device's program against its plan and model.
pub fn verify(program: &Program, plan: &Plan, chain: &Chain, purpose: Purpose) -> Result<(), ProgramError> {
    verify_in(program, &Layout::new(plan, chain), purpose)
}

/// Checks the programs of all the plan's devices: each alone, and that they meet and none waits forever.
pub fn verify_all(
    programs: &[Program],
    plan: &Plan,
    chain: &Chain,
    purpose: Purpose,
) -> Result<(), ProgramError> {
    let layout = Layout::new(plan, chain);
    for program in programs {
        verify_in(program, &layout, purpose)?;
    }
    Meetings::new(programs, &layout)?.come_to_an_end(programs)
}

fn verify_in(program: &Program, layout: &Layout, purpose: Purpose) -> Result<(), ProgramError> {
    if program.format != FORMAT {
        return Err(ProgramError::Format { found: program.format });
    }
    if program.purpose != purpose {
        return Err(ProgramError::Purpose { found: program.purpose, expected: purpose });
    }
    let devices = layout.plan.devices.len();
    if program.device >= devices {
        return Err(ProgramError::Device { device: program.device, devices });
    }
    let mut walk = Walk::new(program, layout)?;
    for instruction in &program.instructions {
        walk.step(instruction)?;
    }
    walk.finish()
}

/// Whether an instruction starts only when an earlier one in the list has ended, by their places alone: one after the
/// other on a lane, or in a line, or done on the spot, as computations and loads are.
fn follows(instruction: &Instruction, earlier: &Instruction) -> bool {
    let on_the_spot = earlier.lane == Lane::Compute || matches!(earlier.op, Op::Load { .. });
    let same_line = earlier.op.line() == instruction.op.line();
    let in_line = earlier.lane == instruction.lane && earlier.lane != Lane::Network && same_line;
    instruction.ahead == 0 && (on_the_spot || in_line)
}

/// Who adds to a sum, in the order the schedule fixed.
struct Turns {
    ids: Vec<u32>,
    taken: usize,
}

struct Walk<'a> {
    layout: &'a Layout<'a>,
    device: usize,
    by_id: HashMap<u32, &'a Instruction>,
    purpose: Purpose,
    done: HashSet<u32>,
    live: HashSet<Value>,
    ever_made: HashMap<Value, u32>,
    facts: HashMap<Fact, u32>,
    /// The first instruction that could start before something it needs has ended: lanes work side by side.
    not_awaited: Option<ProgramError>,
    /// Tensors whose next version is here.
    replaced: HashSet<usize>,
    sums: HashMap<Sum, Turns>,
    /// Samples of each layer that went forward, and backward.
    passed: HashMap<(usize, bool), usize>,
}

/// Whether an instruction speaks of layers, tensors and devices that there are.
fn is_in_range(op: &Op, layout: &Layout) -> bool {
    let (layers, batch) = (layout.chain.layers.len(), layout.plan.global_batch);
    let some = |samples: Samples| samples.start < samples.end && samples.end <= batch;
    match *op {
        Op::Begin { layer, samples }
        | Op::BeginBackward { layer, samples }
        | Op::Forward { layer, samples, .. }
        | Op::Offload { layer, samples }
        | Op::Restore { layer, samples }
        | Op::Recompute { layer, samples }
        | Op::Backward { layer, samples }
        | Op::WeightGradients { layer, samples }
        | Op::Predict { layer, samples } => layer < layers && some(samples),
        Op::Send { layer, reader, samples, .. } | Op::Receive { layer, reader, samples, .. } => {
            layer < reader && reader < layers && some(samples)
        }
        Op::Gather { layer, .. }
        | Op::Release { layer, .. }
        | Op::Reduce { layer }
        | Op::HandOver { layer } => layer < layers,
        Op::Exchange { layer, group, .. } => {
            let norm = if layer < layers { layout.chain.batch_norm(layer) } else { None };
            norm.is_some_and(|norm| group < norm.group_count(batch))
        }
        Op::Update { tensor, .. } => tensor < layout.chain.tensors.len(),
        Op::Load { samples } => some(samples),
        Op::CountTargets | Op::SumLoss | Op::GradientNorm => true,
    }
}

/// Whether the plan has the device do this at all: its own samples, and movements that the table asks for.
fn is_planned(op: &Op, layout: &Layout, device: usize) -> bool {
    let last = layout.chain.layers.len() - 1;
    let shares = |layer, samples| layout.share(device, layer, samples).is_some();
    match *op {
        Op::Load { samples } => layout.loads(device, samples),
        Op::Begin { layer, samples }
        | Op::BeginBackward { layer, samples }
        | Op::Forward { layer, samples, .. }
        | Op::Offload { layer, samples }
        | Op::Restore { layer, samples }
        | Op::Recompute { layer, samples }
        | Op::Backward { layer, samples }
        | Op::Predict { layer, samples } => shares(layer, samples),
        Op::WeightGradients { layer, samples } => shares(layer, samples) && layout.puts_off(device, layer),
        Op::Gather { layer, pass } => layout.gather(layer, pass).is_some_and(|group| group.has(device)),
        Op::Release { layer, pass } => layout.gather(layer, pass).is_some_and(|group| group.receives(device)),
        Op::Reduce { layer } => layout.reduce(layer).is_some_and(|group| group.has(device)),
        Op::HandOver { layer } => layout.hand_over(layer).is_some_and(|group| group.has(device)),
        Op::Exchange { layer, group, .. } => {
            layout.exchange(layer, group).is_some_and(|group| group.has(device))
        }
        Op::Update { tensor, at } => layout.held(tensor, device).iter().any(|held| held.holder.tier() == at),
        // Values that are used up must have been made, and receives have their sends.
        Op::Send { .. } | Op::Receive { .. } => true,
        Op::CountTargets => layout.computing(last).any(|other| other == device),
        Op::SumLoss | Op::GradientNorm => layout.members().binary_search(&device).is_ok(),
    }
}

impl<'a> Walk<'a> {
    fn new(program: &'a Program, layout: &'a Layout) -> Result<Walk<'a>, ProgramError> {
        let device = program.device;
        let mut by_id = HashMap::default();
        let mut sums: HashMap<Sum, Turns> = HashMap::default();
        for instruction in &program.instructions {
            if by_id.insert(instruction.id, instruction).is_some() {
                return Err(ProgramError::DuplicateId { id: instruction.id });
            }
            if !is_in_range(&instruction.op, layout) {
                return Err(ProgramError::OutOfRange { instruction: instruction.to_string() });
            }
            if !is_planned(&instruction.op, layout, device) {
                return Err(ProgramError::NotPlanned { device, instruction: instruction.to_string() });
            }
            let expected = lane(&instruction.op, layout);
            if instruction.lane != expected {
                let (instruction, found) = (instruction.to_string(), instruction.lane);
                return Err(ProgramError::OtherLane { instruction, found, expected });
            }
            for sum in effects(&instruction.op, layout, device).adds_to {
                sums.entry(sum).or_insert(Turns { ids: Vec::new(), taken: 0 }).ids.push(instruction.id);
            }
        }
        // Ids are given in schedule order, so they are the order of the additions.
        sums.values_mut().for_each(|turns| turns.ids.sort_unstable());
        Ok(Walk {
            layout,
            device,
            by_id,
            purpose: program.purpose,
            done: HashSet::default(),
            live: HashSet::default(),
            ever_made: HashMap::default(),
            facts: HashMap::default(),
            not_awaited: None,
            replaced: HashSet::default(),
            sums,
            passed: HashMap::default(),
        })
    }

    fn step(&mut self, instruction: &Instruction) -> Result<(), ProgramError> {
        let name = || instruction.to_string();
        if let Some(after) = instruction.after.iter().find(|id| !self.done.contains(id)) {
            let after =
                self.by_id.get(after).map_or_else(|| after.to_string(), |i| format!("{} ({})", i.id, i.op));
            return Err(ProgramError::TooEarly { instruction: name(), after });
        }
        let effects = effects(&instruction.op, self.layout, self.device);
        if self.not_awaited.is_none() {
            self.not_awaited = self.not_awaited_by(instruction, &effects);
        }
        for value in effects.uses_up {
            if !self.live.remove(&value) {
                return Err(ProgramError::NotMade { instruction: name(), value: value.to_string() });
            }
        }
        if let Some(fact) = effects.needs.iter().find(|fact| !self.facts.contains_key(fact)) {
            return Err(ProgramError::FactMissing { instruction: name(), fact: fact.to_string() });
        }
        for tensor in effects.reads_tensors {
            if self.replaced.contains(&tensor) {
                return Err(ProgramError::StaleRead { instruction: name(), tensor });
            }
        }
        if let Some((layer, pass)) = effects.reads_gathered
            && self.facts.contains_key(&Fact::Released { layer, pass })
        {
            return Err(ProgramError::Released { instruction: name(), layer });
        }
        self.replaced.extend(effects.replaces);
        for sum in effects.adds_to {
            let turns = self.sums.get_mut(&sum).expect("every sum was collected");
            let turn = turns.ids[turns.taken];
            if turn != instruction.id {
                let earlier = self.by_id[&turn].to_string();
                return Err(ProgramError::SumOrder { instruction: name(), sum: sum.to_string(), earlier });
            }
            turns.taken += 1;
        }
        for sum in effects.needs_complete {
            if let Some(turns) = self.sums.get(&sum).filter(|turns| turns.taken < turns.ids.len()) {
                let pending = self.by_id[&turns.ids[turns.taken]].to_string();
                return Err(ProgramError::SumIncomplete {
                    instruction: name(),
                    sum: sum.to_string(),
                    pending,
                });
            }
        }
        for value in effects.makes {
            if self.ever_made.insert(value, instruction.id).is_some() {
                return Err(ProgramError::MadeTwice { instruction: name(), value: value.to_string() });
            }
            self.live.insert(value);
        }
        if let Some(fact) = effects.establishes
            && self.facts.insert(fact, instruction.id).is_some()
        {
            return Err(ProgramError::MadeTwice { instruction: name(), value: fact.to_string() });
        }
        match instruction.op {
            Op::Forward { layer, samples, keep } => {
                let trains = self.purpose == Purpose::Train;
                if trains == (keep == Keep::Nothing) {
                    let what = if trains { "keep what the backward needs" } else { "let go of what it made" };
                    return Err(ProgramError::Incomplete { what: format!("{what} in {}", name()) });
                }
                *self.passed.entry((layer, false)).or_default() += samples.count();
            }
            Op::Predict { layer, samples } => {
                *self.passed.entry((layer, false)).or_default() += samples.count();
            }
            Op::Backward { layer, samples } => {
                *self.passed.entry((layer, true)).or_default() += samples.count();
            }
            _ => {}
        }
        self.done.insert(instruction.id);
        Ok(())
    }

    /// What an instruction needs and does not wait for. That it stands earlier in the list is not enough: what is on
    /// another lane may be under way still. So no update begins before the norm is there from all devices, and no
    /// device adds to the norm before its gradients are whole.
    fn not_awaited_by(&self, instruction: &Instruction, effects: &Effects) -> Option<ProgramError> {
        let makers = effects.uses_up.iter().filter_map(|value| self.ever_made.get(value));
        let makers = makers.chain(effects.needs.iter().filter_map(|fact| self.facts.get(fact)));
        let turns = |sum: &Sum| self.sums.get(sum);
        let before = effects.adds_to.iter().filter_map(turns);
        let before = before.filter_map(|turns| turns.ids.get(turns.taken.checked_sub(1)?));
        let last = effects.needs_complete.iter().filter_map(turns).filter_map(|turns| turns.ids.last());
        let mut needed = makers.chain(before).chain(last);
        let id =
            needed.find(|id| !instruction.after.contains(id) && !follows(instruction, self.by_id[*id]))?;
        let (instruction, after) = (instruction.to_string(), self.by_id[id].to_string());
        Some(ProgramError::NotAwaited { instruction, after })
    }

    fn finish(mut self) -> Result<(), ProgramError> {
        // A prediction has no use for targets.
        self.live.retain(|value| self.purpose != Purpose::Predict || !matches!(value, Value::Targets(_)));
        if let Some(value) = self.live.iter().next() {
            return Err(ProgramError::LeftOver { value: value.to_string() });
        }
        let incomplete = |what: String| Err(ProgramError::Incomplete { what });
        let (layout, device) = (self.layout, self.device);
        let trains = self.purpose == Purpose::Train;
        for layer in 0..layout.chain.layers.len() {
            let shares = layout.shares(layer).iter().filter(|share| share.device == device);
            let planned: usize = shares.map(|share| share.samples.count()).sum();
            for backward in [false, true] {
                let passed = self.passed.get(&(layer, backward)).copied().unwrap_or_default();
                if passed != planned && (trains || !backward) {
                    let way = if backward { "backward" } else { "forward" };
                    return incomplete(format!("take its {planned} samples {way} through layer {layer}"));
                }
            }
        }
        match self.expected_facts().into_iter().find(|fact| !self.facts.contains_key(fact)) {
            Some(fact) => incomplete(format!("make {fact}")),
            None => self.not_awaited.map_or(Ok(()), Err),
        }
    }

    /// What must be true at the end.
    fn expected_facts(&self) -> Vec<Fact> {
        let (layout, device) = (self.layout, self.device);
        let mut expected = Vec::new();
        if self.purpose == Purpose::Predict || layout.members().binary_search(&device).is_err() {
            return expected;
        }
        expected.push(Fact::Loss);
        for layer in 0..layout.chain.layers.len() {
            let passes: &[Pass] = match (layout.is_layered(), self.purpose == Purpose::Train) {
                (true, true) => &[Pass::Forward, Pass::Backward, Pass::Update],
                (true, false) => &[Pass::Forward],
                (false, true) => &[Pass::Step, Pass::Update],
                (false, false) => &[Pass::Step],
            };
            for pass in passes.iter().copied() {
                let group = layout.gather(layer, pass).filter(|group| group.has(device));
                expected.extend(group.map(|_| Fact::Gathered { layer, pass }));
                let released = self.purpose == Purpose::Train && pass != Pass::Update;
                let group = group.filter(|group| released && group.receives(device));
                expected.extend(group.map(|_| Fact::Released { layer, pass }));
            }
        }
        if self.purpose == Purpose::Train {
            expected.push(Fact::GradientNorm);
            for tensor in 0..layout.chain.tensors.len() {
                let held = layout.held(tensor, device).iter();
                expected.extend(held.map(|held| Fact::Updated { tensor, at: held.holder.tier() }));
            }
        }
        expected
    }
}
