//! Whether a program's order is one its dependencies allow, and whether it does a whole step of the plan.
//! The engine runs nothing that has not passed here.

use std::collections::{HashMap, HashSet};

use shoal_model::Chain;
use thiserror::Error;

use crate::effects::{Fact, Sum, Value, effects};
use crate::program::{Instruction, Op, Program, Purpose};
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
    #[error("{instruction} must follow instruction {after}, which does not stand before it")]
    TooEarly { instruction: String, after: String },
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
    #[error("at the program's end {value} is left over: an instruction is missing")]
    LeftOver { value: String },
    #[error("the program does not {what}")]
    Incomplete { what: String },
}

impl ProgramError {
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            ProgramError::TooEarly { .. }
            | ProgramError::NotMade { .. }
            | ProgramError::FactMissing { .. }
            | ProgramError::SumOrder { .. }
            | ProgramError::SumIncomplete { .. }
            | ProgramError::StaleRead { .. } => {
                "reorder instructions only where every id in `after` still stands earlier in the list".into()
            }
            _ => "write the program again with `shoal plan JOB.toml --program FILE`".into(),
        })
    }
}

/// Checks a program against its plan and model.
pub fn verify(program: &Program, plan: &Plan, chain: &Chain, purpose: Purpose) -> Result<(), ProgramError> {
    if program.format != FORMAT {
        return Err(ProgramError::Format { found: program.format });
    }
    if program.purpose != purpose {
        return Err(ProgramError::Purpose { found: program.purpose, expected: purpose });
    }
    if program.device >= plan.devices.len() {
        return Err(ProgramError::Device { device: program.device, devices: plan.devices.len() });
    }
    let mut walk = Walk::new(program, chain)?;
    for instruction in &program.instructions {
        walk.step(instruction)?;
    }
    walk.finish(plan)
}

/// Who adds to a sum, in the order the schedule fixed.
struct Turns {
    ids: Vec<u32>,
    taken: usize,
}

struct Walk<'a> {
    chain: &'a Chain,
    by_id: HashMap<u32, &'a Instruction>,
    purpose: Purpose,
    done: HashSet<u32>,
    live: HashSet<Value>,
    ever_made: HashSet<Value>,
    facts: HashSet<Fact>,
    sums: HashMap<Sum, Turns>,
    loaded: Vec<Samples>,
}

impl<'a> Walk<'a> {
    fn new(program: &'a Program, chain: &'a Chain) -> Result<Walk<'a>, ProgramError> {
        let mut by_id = HashMap::new();
        let mut sums: HashMap<Sum, Turns> = HashMap::new();
        for instruction in &program.instructions {
            if by_id.insert(instruction.id, instruction).is_some() {
                return Err(ProgramError::DuplicateId { id: instruction.id });
            }
            let known = match instruction.op {
                Op::Begin { layer, .. }
                | Op::BeginBackward { layer, .. }
                | Op::Forward { layer, .. }
                | Op::Recompute { layer, .. }
                | Op::Backward { layer, .. }
                | Op::Predict { layer, .. } => layer < chain.layers.len(),
                Op::Update { tensor } => tensor < chain.tensors.len(),
                Op::Load { .. } | Op::CountTargets | Op::SumLoss | Op::GradientNorm => true,
            };
            if !known {
                return Err(ProgramError::OutOfRange { instruction: instruction.to_string() });
            }
            for sum in effects(&instruction.op, chain).adds_to {
                sums.entry(sum).or_insert(Turns { ids: Vec::new(), taken: 0 }).ids.push(instruction.id);
            }
        }
        // Ids are given in schedule order, so they are the order of the additions.
        sums.values_mut().for_each(|turns| turns.ids.sort_unstable());
        Ok(Walk {
            chain,
            by_id,
            purpose: program.purpose,
            done: HashSet::new(),
            live: HashSet::new(),
            ever_made: HashSet::new(),
            facts: HashSet::new(),
            sums,
            loaded: Vec::new(),
        })
    }

    fn step(&mut self, instruction: &Instruction) -> Result<(), ProgramError> {
        let name = || instruction.to_string();
        if let Some(after) = instruction.after.iter().find(|id| !self.done.contains(id)) {
            let after =
                self.by_id.get(after).map_or_else(|| after.to_string(), |i| format!("{} ({})", i.id, i.op));
            return Err(ProgramError::TooEarly { instruction: name(), after });
        }
        let effects = effects(&instruction.op, self.chain);
        for value in effects.uses_up {
            if !self.live.remove(&value) {
                return Err(ProgramError::NotMade { instruction: name(), value: value.to_string() });
            }
        }
        if let Some(fact) = effects.needs.iter().find(|fact| !self.facts.contains(fact)) {
            return Err(ProgramError::FactMissing { instruction: name(), fact: fact.to_string() });
        }
        for tensor in effects.reads_tensors {
            if self.facts.contains(&Fact::Updated { tensor }) {
                return Err(ProgramError::StaleRead { instruction: name(), tensor });
            }
        }
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
            if !self.ever_made.insert(value) {
                return Err(ProgramError::MadeTwice { instruction: name(), value: value.to_string() });
            }
            self.live.insert(value);
        }
        if let Some(fact) = effects.establishes
            && !self.facts.insert(fact)
        {
            return Err(ProgramError::MadeTwice { instruction: name(), value: fact.to_string() });
        }
        if let Op::Load { samples } = instruction.op {
            self.loaded.push(samples);
        }
        self.done.insert(instruction.id);
        Ok(())
    }

    fn finish(mut self, plan: &Plan) -> Result<(), ProgramError> {
        // A prediction has no use for targets.
        self.live.retain(|value| self.purpose != Purpose::Predict || !matches!(value, Value::Targets(_)));
        if let Some(value) = self.live.iter().next() {
            return Err(ProgramError::LeftOver { value: value.to_string() });
        }
        let incomplete = |what: &str| Err(ProgramError::Incomplete { what: what.into() });
        self.loaded.sort();
        let mut next = 0;
        for samples in &self.loaded {
            if samples.start != next || samples.count() == 0 {
                return incomplete("load every sample exactly once");
            }
            next = samples.end;
        }
        if next != plan.global_batch {
            return incomplete(&format!("load the {} samples of the global batch", plan.global_batch));
        }
        if self.purpose == Purpose::Predict {
            return Ok(());
        }
        if !self.facts.contains(&Fact::Loss) {
            return incomplete("sum the loss");
        }
        if self.purpose == Purpose::Evaluate {
            return Ok(());
        }
        let layers = self.chain.layers.len();
        let backwards = |layer: usize| {
            let ids = self.done.iter().filter_map(|id| match self.by_id[id].op {
                Op::Backward { layer: at, samples } if at == layer => Some(samples.count()),
                _ => None,
            });
            ids.sum::<usize>()
        };
        // Values are linear, so what reached layer 0 passed through every layer.
        if (0..layers).any(|layer| backwards(layer) != plan.global_batch) {
            return incomplete("take every sample backward through every layer");
        }
        let missing =
            (0..self.chain.tensors.len()).find(|t| !self.facts.contains(&Fact::Updated { tensor: *t }));
        match missing {
            Some(tensor) => incomplete(&format!("update tensor {tensor}")),
            None => Ok(()),
        }
    }
}
