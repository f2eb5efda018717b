//! Which instructions of different devices act together: a send and its receive, all members of a gathering, a
//! reduction or a small sum. The verifier asks whether all of them come about, the simulator when.

use foldhash::HashMap;

use crate::layout::Layout;
use crate::program::{Lane, Op, Program};
use crate::verify::ProgramError;

/// An instruction, by its program and its place there.
pub type Place = (usize, usize);

/// Instructions that finish together, once all have started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Meeting {
    pub members: Vec<Place>,
}

/// All of a step's meetings.
#[derive(Debug, Default)]
pub struct Meetings {
    pub all: Vec<Meeting>,
    /// Of each program's instructions, in their order.
    of: Vec<Vec<Option<u32>>>,
}

/// What the instructions of a meeting have in common: a receive is seen from the sender's side.
fn subject(op: &Op, device: usize) -> Op {
    match *op {
        Op::Receive { moved, layer, reader, samples, .. } => {
            Op::Send { moved, layer, reader, samples, to: device }
        }
        other => other,
    }
}

impl Meetings {
    /// Finds who meets whom; a meeting that lacks a member is refused.
    pub fn new(programs: &[Program], layout: &Layout) -> Result<Meetings, ProgramError> {
        let mut by_subject: HashMap<Op, u32> = HashMap::default();
        let mut meetings = Meetings { all: Vec::new(), of: Vec::with_capacity(programs.len()) };
        for (number, program) in programs.iter().enumerate() {
            let mut of = vec![None; program.instructions.len()];
            for (place, instruction) in program.instructions.iter().enumerate() {
                if instruction.lane == Lane::Network {
                    let next = meetings.all.len() as u32;
                    let subject = subject(&instruction.op, program.device);
                    let meeting = *by_subject.entry(subject).or_insert(next);
                    if meeting == next {
                        meetings.all.push(Meeting::default());
                    }
                    meetings.all[meeting as usize].members.push((number, place));
                    of[place] = Some(meeting);
                }
            }
            meetings.of.push(of);
        }
        for meeting in &meetings.all {
            meetings.check(meeting, programs, layout)?;
        }
        Ok(meetings)
    }

    /// How many programs they are of.
    pub fn programs(&self) -> usize {
        self.of.len()
    }

    /// The meeting of an instruction.
    pub fn of(&self, (program, place): Place) -> Option<usize> {
        self.of.get(program)?[place].map(|meeting| meeting as usize)
    }

    fn check(&self, meeting: &Meeting, programs: &[Program], layout: &Layout) -> Result<(), ProgramError> {
        let (first, place) = meeting.members[0];
        let instruction = &programs[first].instructions[place];
        let device = programs[first].device;
        let unmet = |other: usize| {
            let instruction = instruction.to_string();
            Err(ProgramError::Unmet { device, instruction, other })
        };
        let mut there: Vec<usize> =
            meeting.members.iter().map(|(program, _)| programs[*program].device).collect();
        there.sort_unstable();
        let mut expected: Vec<usize> = match instruction.op {
            Op::Send { to: other, .. } | Op::Receive { from: other, .. } => {
                vec![device.min(other), device.max(other)]
            }
            Op::Gather { layer, pass } => {
                layout.gather(layer, pass).map(|group| group.devices.clone()).unwrap_or_default()
            }
            Op::Reduce { layer } => {
                layout.reduce(layer).map(|group| group.devices.clone()).unwrap_or_default()
            }
            Op::HandOver { layer } => {
                layout.hand_over(layer).map(|group| group.devices.clone()).unwrap_or_default()
            }
            Op::Exchange { layer, group, .. } => {
                layout.exchange(layer, group).map(|group| group.devices).unwrap_or_default()
            }
            Op::CountTargets => layout.computing(layout.chain.layers.len() - 1).collect(),
            _ => layout.members().to_vec(),
        };
        expected.sort_unstable();
        expected.dedup();
        match expected.iter().find(|device| there.binary_search(device).is_err()) {
            Some(other) => unmet(*other),
            None if there.len() != expected.len() => unmet(device),
            None => Ok(()),
        }
    }

    /// Starts every device's instructions in their order, as they may, until all are done or nothing can start.
    pub(crate) fn come_to_an_end(&self, programs: &[Program]) -> Result<(), ProgramError> {
        let mut walks: Vec<Walk> = programs.iter().map(Walk::new).collect();
        let mut missing: Vec<usize> = self.all.iter().map(|meeting| meeting.members.len()).collect();
        let mut ready: Vec<usize> = (0..programs.len()).collect();
        while let Some(number) = ready.pop() {
            let started = walks[number].start(&programs[number]);
            for place in started {
                match self.of((number, place)) {
                    None => ready.extend(walks[number].finish(place).then_some(number)),
                    Some(meeting) => {
                        missing[meeting] -= 1;
                        if missing[meeting] == 0 {
                            for (program, place) in &self.all[meeting].members {
                                ready.extend(walks[*program].finish(*place).then_some(*program));
                            }
                        }
                    }
                }
            }
        }
        for (walk, program) in walks.iter().zip(programs) {
            if let Some(instruction) = program.instructions.get(walk.next) {
                let (device, instruction) = (program.device, instruction.to_string());
                return Err(ProgramError::Stuck { device, instruction });
            }
        }
        Ok(())
    }
}

/// How far a program has come.
struct Walk {
    place_of: HashMap<u32, usize>,
    is_finished: Vec<bool>,
    next: usize,
}

impl Walk {
    fn new(program: &Program) -> Walk {
        let places = program.instructions.iter().enumerate();
        Walk {
            place_of: places.map(|(place, instruction)| (instruction.id, place)).collect(),
            is_finished: vec![false; program.instructions.len()],
            next: 0,
        }
    }

    /// The places that can start now, in order: without any that may start ahead, which is the hardest case.
    fn start(&mut self, program: &Program) -> Vec<usize> {
        let mut started = Vec::new();
        while let Some(instruction) = program.instructions.get(self.next) {
            let waits = |id: &u32| self.place_of.get(id).is_none_or(|place| !self.is_finished[*place]);
            if instruction.after.iter().any(waits) {
                break;
            }
            started.push(self.next);
            self.next += 1;
            if instruction.lane != Lane::Network {
                // What stands behind it may wait for it: it is to be finished first.
                break;
            }
        }
        started
    }

    /// Returns whether others may now start.
    fn finish(&mut self, place: usize) -> bool {
        !std::mem::replace(&mut self.is_finished[place], true)
    }
}
