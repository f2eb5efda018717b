//! What is certain of a program's course at each place of its list: which instructions have finished, and so which bytes
//! are free again.

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
    /// Bytes.
    pub live: i64,
}

impl<'a> Course<'a> {
    pub fn new(instructions: &'a [Instruction], phases: &'a [Phase]) -> Course<'a> {
        let mut lanes: [(Vec<usize>, usize); Lane::SERIAL] = Default::default();
        for (place, instruction) in instructions.iter().enumerate() {
            if let Some(lane) = instruction.serial().filter(|_| instruction.ahead == 0) {
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
            live: 0,
        }
    }

    fn place(&self, id: u32) -> Option<usize> {
        match self.place_of.is_empty() {
            true => Some(id as usize),
            false => self.place_of.get(&id).copied(),
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
            self.live += gain as i64 - loss as i64 - peak as i64;
        }
    }
}
