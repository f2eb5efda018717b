//! What is certain of a program's course at each place of its list: which instructions have finished, and so which bytes
//! are free again.

use std::collections::BinaryHeap;

use foldhash::HashMap;
use shoal_model::footprint::Phase;

use crate::program::{Instruction, Lane};

/// Which instructions have certainly finished.
pub(super) struct Course<'a> {
    instructions: &'a [Instruction],
    phases: &'a [Phase],
    /// Where each number stands, unless each stands at its own place.
    place_of: HashMap<u32, usize>,
    is_over: Vec<bool>,
    /// Places on each lane that works one after the other, and how many of them are over.
    lanes: [(Vec<usize>, usize); Lane::SERIAL],
    /// The last computation that started in its turn, unless it is over.
    computing: Option<usize>,
    /// Computations that may have started ahead, with what each takes beside what it leaves behind: the most first. Those that
    /// are over are taken out when they come first.
    ahead: BinaryHeap<(u64, usize)>,
    /// Bytes, without what computations take that started ahead and last.
    live: i64,
}

/// What an instruction leaves behind beyond what it uses up: nothing where it uses up more.
fn left(phase: &Phase) -> u64 {
    phase.gain.saturating_sub(phase.loss)
}

impl<'a> Course<'a> {
    pub fn new(instructions: &'a [Instruction], phases: &'a [Phase]) -> Course<'a> {
        let mut lanes: [(Vec<usize>, usize); Lane::SERIAL] = Default::default();
        for (place, instruction) in instructions.iter().enumerate() {
            if let Some(lane) = instruction.serial() {
                lanes[lane].0.push(place);
            }
        }
        let places = || instructions.iter().enumerate();
        let reordered = places().any(|(place, instruction)| instruction.id as usize != place);
        Course {
            place_of: match reordered {
                true => places().map(|(place, instruction)| (instruction.id, place)).collect(),
                false => HashMap::default(),
            },
            is_over: vec![false; instructions.len()],
            instructions,
            phases,
            lanes,
            computing: None,
            ahead: BinaryHeap::new(),
            live: 0,
        }
    }

    fn place(&self, id: u32) -> Option<usize> {
        match self.place_of.is_empty() {
            true => Some(id as usize),
            false => self.place_of.get(&id).copied(),
        }
    }

    /// Bytes that may be alive now. Computations follow each other, so one at a time takes more than it leaves behind.
    pub fn live(&mut self) -> i64 {
        while self.ahead.peek().is_some_and(|(_, place)| self.is_over[*place]) {
            self.ahead.pop();
        }
        let most = self.ahead.peek().map_or(0, |(more, _)| *more as i64);
        let now = self.computing.map_or(0, |place| {
            let Phase { peak, gain, loss } = self.phases[place];
            peak as i64 + loss as i64 - gain as i64
        });
        self.live + (most - now).max(0)
    }

    /// From here on an instruction may start that stands further behind.
    pub fn may_start(&mut self, place: usize) {
        let phase = &self.phases[place];
        if self.instructions[place].computes_ahead() {
            self.live += left(phase) as i64;
            self.ahead.push((phase.peak.saturating_sub(left(phase)), place));
        } else {
            self.live += phase.peak as i64;
        }
    }

    /// It starts, in its turn.
    pub fn start(&mut self, place: usize) {
        self.live += self.phases[place].peak as i64;
        if self.instructions[place].lane == Lane::Compute {
            self.computing = Some(place);
        }
    }

    /// The instruction at this place has started: what it came after has finished, and what its lane did before.
    pub fn learn(&mut self, place: usize) {
        let instruction = &self.instructions[place];
        for id in &instruction.after {
            if let Some(earlier) = self.place(*id).filter(|earlier| *earlier < place) {
                self.lane_up_to(earlier);
                self.over(earlier);
            }
        }
        if instruction.ahead == 0 {
            self.lane_up_to(place);
        }
    }

    /// All that stands before a place on its lane is over.
    fn lane_up_to(&mut self, place: usize) {
        let instruction = &self.instructions[place];
        let Some(lane) = instruction.serial().filter(|_| instruction.ahead == 0) else { return };
        while let Some(next) = self.lanes[lane].0.get(self.lanes[lane].1).filter(|next| **next < place) {
            self.over(*next);
            self.lanes[lane].1 += 1;
        }
    }

    pub fn over(&mut self, place: usize) {
        if !std::mem::replace(&mut self.is_over[place], true) {
            let Phase { peak, gain, loss } = self.phases[place];
            let counted = match self.instructions[place].computes_ahead() {
                true => left(&self.phases[place]),
                false => peak,
            };
            self.live += gain as i64 - loss as i64 - counted as i64;
            self.computing = self.computing.filter(|computing| *computing != place);
        }
    }
}
