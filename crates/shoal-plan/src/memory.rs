//! A program's memory over its course, to the byte: what the state takes, and how high the instructions
//! pile their values on top of it. A plan is accepted or refused by this number, and the engine's counted
//! bytes never pass it.
//!
//! Lanes work side by side, so an instruction that has started counts with all it takes until something shows that it
//! has finished: one that comes after it, or the next on its lane. An instruction that may start ahead counts from
//! there on; of computations that may, all count with what they leave behind, and one with what it takes while it lasts. So
//! the number holds for every course that a program's order allows.
//!
//! - [`Meter`]: what each instruction takes and releases.
//! - `course`: which of them have certainly finished.

mod course;
mod meter;

use shoal_model::Chain;
use shoal_model::footprint::{Phase, allocation_bytes, compute_bytes};

use crate::compile::LARGE_INSTRUCTIONS;
use crate::layout::Layout;
use crate::parallel;
use crate::program::{Instruction, Op, Program, Purpose};
use crate::table::{Held, Holder, Plan, Residence, Tier};
use course::Course;
pub use meter::Meter;

/// Scalars the engine keeps on the device: the loss, a loss to discard, the norm, rightly predicted classes, the
/// step's number.
pub const ENGINE_SCALARS: u64 = 5;

/// Where a device's bytes go at the highest point of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryForecast {
    /// What the device takes for itself.
    pub workspace: u64,
    pub parameters: u64,
    /// What layers compute with, where that is not the parameters themselves.
    pub copies: u64,
    pub gradients: u64,
    pub optimizer: u64,
    /// Tables and scalars.
    pub constants: u64,
    /// The highest sum of values alive at once.
    pub values: u64,
    /// The instruction (its place in the list) at which that is.
    pub highest_at: usize,
    /// What the device's program keeps in its host's memory: state, and activations at their most.
    pub host: u64,
    /// And on its disks.
    pub disk: u64,
}

impl MemoryForecast {
    pub fn total(&self) -> u64 {
        let state = self.parameters + self.copies + self.gradients + self.optimizer;
        self.workspace + state + self.constants + self.values
    }
}

/// Follows the program's values to their highest point.
pub fn forecast(program: &Program, plan: &Plan, chain: &Chain) -> MemoryForecast {
    forecast_in(program, &Layout::new(plan, chain))
}

/// Of all programs of a step, in their order.
pub fn forecasts(programs: &[Program], layout: &Layout) -> Vec<MemoryForecast> {
    let count: usize = programs.iter().map(|program| program.instructions.len()).sum();
    match count > LARGE_INSTRUCTIONS {
        true => parallel::map(programs, |program| forecast_in(program, layout)),
        false => programs.iter().map(|program| forecast_in(program, layout)).collect(),
    }
}

/// The same, where the layout is at hand.
pub fn forecast_in(program: &Program, layout: &Layout) -> MemoryForecast {
    let (plan, chain, device) = (layout.plan, layout.chain, program.device);
    let training = program.purpose == Purpose::Train;
    let rotary = match chain.rotary_frequencies.len() {
        0 => 0,
        pairs => allocation_bytes(plan.sequence * 2 * pairs),
    };
    let mut meter = Meter::new(layout, device);
    let phases: Vec<Phase> = program.instructions.iter().map(|i| meter.phase(&i.op)).collect();
    let (values, highest_at) = highest(&program.instructions, &phases);
    let offloads = program.instructions.iter().any(|i| matches!(i.op, Op::Offload { .. }));
    let host = match offloads {
        true => {
            let phases: Vec<Phase> = program.instructions.iter().map(|i| meter.host_phase(&i.op)).collect();
            highest(&program.instructions, &phases).0
        }
        false => 0,
    };
    let mut forecast = MemoryForecast {
        workspace: plan.devices[device].workspace_bytes,
        parameters: 0,
        copies: 0,
        gradients: 0,
        optimizer: 0,
        constants: rotary + ENGINE_SCALARS * allocation_bytes(2),
        values,
        highest_at,
        host,
        disk: 0,
    };
    for tensor in 0..chain.tensors.len() {
        forecast.add_state(layout, device, tensor, training);
    }
    forecast
}

impl MemoryForecast {
    /// What a device keeps of a tensor all the time.
    fn add_state(&mut self, layout: &Layout, device: usize, tensor: usize, training: bool) {
        let states = if training { layout.plan.optimizer_states as u64 } else { 0 };
        for held in layout.held(tensor, device) {
            let bytes = allocation_bytes(held.slice.count());
            match held.holder.tier() {
                Tier::Device => {
                    self.parameters += bytes;
                    self.optimizer += states * bytes;
                }
                // The numbers that layers compute with stand beside it: they are read more often than they change.
                Tier::Host => {
                    let copy = layout.copy_elements(tensor);
                    let rounded = copy.map(|_| compute_bytes(held.slice.count(), layout.plan.precision));
                    self.host += bytes * (1 + states) + rounded.unwrap_or(0);
                }
                Tier::Disk => self.disk += bytes * (1 + states),
            }
        }
        if training {
            self.add_gradients(layout, device, tensor);
        }
        let stays = match layout.residence(tensor, device) {
            Some(Residence::Resident) => true,
            Some(Residence::Fetched) => layout.holds_whole(tensor, device),
            None => false,
        };
        if stays {
            self.copies += copy_bytes(layout, device, tensor);
        }
    }

    /// Room for a tensor's sums, and where the optimizer needs them elsewhere for those that it is handed.
    fn add_gradients(&mut self, layout: &Layout, device: usize, tensor: usize) {
        let whole = layout.sums_whole(tensor, device);
        if whole {
            self.gradients += allocation_bytes(layout.gradient_elements(tensor));
        }
        let in_slices = |held: &&Held| !whole || held.holder != Holder::Device(device);
        let sums = layout.summed(tensor, device).iter().filter(in_slices);
        for held in sums.chain(layout.handed(tensor, device)) {
            let bytes = allocation_bytes(held.slice.count());
            match held.holder.tier() {
                Tier::Device => self.gradients += bytes,
                Tier::Host => self.host += bytes,
                Tier::Disk => self.disk += bytes,
            }
        }
    }
}

/// Bytes of what layers compute with, beside the parameters that the device holds itself.
fn copy_bytes(layout: &Layout, device: usize, tensor: usize) -> u64 {
    let precision = layout.plan.precision;
    match layout.copy_elements(tensor) {
        Some(elements) => compute_bytes(elements, precision),
        None if layout.holds_whole(tensor, device) => 0,
        None => allocation_bytes(layout.chain.tensors[tensor].elements()),
    }
}

/// Bytes of a device's memory that a program may still take once it has no layer left to compute: the rest is free for
/// another's.
pub fn after_computing(program: &Program, layout: &Layout) -> u64 {
    let forecast = forecast_in(program, layout);
    let mut meter = Meter::new(layout, program.device);
    let phases: Vec<Phase> = program.instructions.iter().map(|i| meter.phase(&i.op)).collect();
    let last = program.instructions.iter().rposition(|instruction| instruction.op.computes_layer());
    let mut most = 0;
    follow(&program.instructions, &phases, last, |live, _, is_computed| {
        if is_computed {
            most = most.max(live);
        }
    });
    forecast.total() - forecast.values + most.unsigned_abs()
}

/// The most bytes alive at a time, and the place of the instruction that brings them there.
fn highest(instructions: &[Instruction], phases: &[Phase]) -> (u64, usize) {
    let (mut most, mut highest_at) = (0i64, 0);
    follow(instructions, phases, None, |live, place, _| {
        if live > most {
            (most, highest_at) = (live, place);
        }
    });
    (most.unsigned_abs(), highest_at)
}

/// Tells of the bytes alive from place to place, and whether the last computation is over.
fn follow(
    instructions: &[Instruction],
    phases: &[Phase],
    last_computing: Option<usize>,
    mut see: impl FnMut(i64, usize, bool),
) {
    let mut course = Course::new(instructions, phases);
    let mut early: Vec<Vec<usize>> = vec![Vec::new(); instructions.len()];
    for (place, instruction) in instructions.iter().enumerate() {
        let from = place.saturating_sub(instruction.ahead as usize);
        if from < place {
            early[from].push(place);
        }
    }
    for place in 0..instructions.len() {
        let is_computed = last_computing.is_some_and(|last| last < place);
        // They may start while the instruction before this place still runs.
        early[place].iter().for_each(|ahead| course.may_start(*ahead));
        see(course.live(), place.saturating_sub(1), is_computed);
        course.learn(place);
        if instructions[place].ahead == 0 {
            course.start(place);
        }
        see(course.live(), place, is_computed);
        if last_computing == Some(place) {
            course.over(place);
        }
    }
}
