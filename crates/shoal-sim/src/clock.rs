//! The virtual clock.

use std::collections::HashMap;

use serde::Serialize;
use shoal_plan::events::Events;
use shoal_plan::memory::Meter;
use shoal_plan::{Lane, Layout, Meetings, Op, Program, ProgramError};

use crate::flows::{End, Flows, Resource};
use crate::world::{Work, World};

/// Lanes on which one instruction at a time runs; the network is not among them.
const SERIAL_LANES: usize = 5;

fn serial(lane: Lane) -> Option<usize> {
    match lane {
        Lane::Compute => Some(0),
        Lane::CopyIn => Some(1),
        Lane::CopyOut => Some(2),
        Lane::Host => Some(3),
        Lane::Disk => Some(4),
        Lane::Network => None,
    }
}

/// Random slowness: every instruction takes longer by up to so much of itself.
#[derive(Clone, Copy, Debug)]
pub struct Jitter {
    pub seed: u64,
    pub most: f64,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Settings {
    pub jitter: Option<Jitter>,
    /// Whether memory is followed too.
    pub memory: bool,
}

/// When an instruction ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Span {
    pub start: f64,
    pub end: f64,
}

/// What a device did during a step, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct DeviceTime {
    /// Forward and backward.
    pub computing: f64,
    pub recomputing: f64,
    pub updating: f64,
    /// Nothing on its compute lane: bubbles, and waits for transfers.
    pub idle: f64,
}

/// A step, played through.
#[derive(Clone, Debug)]
pub struct Simulated {
    pub seconds: f64,
    /// Of each program's instructions, in their order.
    pub spans: Vec<Vec<Span>>,
    /// Of each program's device.
    pub devices: Vec<DeviceTime>,
    /// The most bytes of values alive at a time, by program; empty unless asked for.
    pub values_bytes: Vec<u64>,
}

/// Plays programs through. They must have been verified together.
pub fn simulate(
    programs: &[Program],
    layout: &Layout,
    world: &dyn World,
    settings: Settings,
) -> Result<Simulated, ProgramError> {
    let meetings = Meetings::new(programs, layout)?;
    let devices = layout.plan.devices.len();
    let mut clock = Clock::new(devices, &meetings, world.resources(), settings);
    for program in programs {
        clock.add(program, layout, world, program.device);
    }
    for device in 0..devices {
        clock.go_on(device);
    }
    clock.run(&mut |_, _, _| {});
    clock.result()
}

/// How far a program has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Milestone {
    /// All its layers are computed: sums, updates and copies remain.
    Computed,
    Over,
}

/// Told of programs' milestones; it may add others.
type Told<'t, 'a> = dyn FnMut(&mut Clock<'a>, usize, Milestone) + 't;

enum Event {
    /// An instruction's fixed time is over, its bytes remain.
    Moves {
        what: What,
    },
    Flow(End),
    Finished {
        what: What,
    },
}

/// An instruction, or one that several devices have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Instruction(usize, usize),
    Meeting(usize),
}

/// A program under way.
struct Course<'a> {
    program: &'a Program,
    /// How many of those that each instruction comes after have not finished.
    awaits: Vec<u32>,
    /// Who comes after each: offsets into `followers`.
    first_follower: Vec<u32>,
    followers: Vec<u32>,
    has_started: Vec<bool>,
    /// The first that has not started.
    next: usize,
    /// Those that may start ahead, by the place from which on they may, the last first.
    early: Vec<(usize, usize)>,
    /// Those of them that may by now.
    may: Vec<usize>,
    spans: Vec<Span>,
    left: usize,
    computations_left: usize,
    meter: Option<Memory<'a>>,
    world: &'a dyn World,
    /// Where it runs: not always the device that the program names.
    device: usize,
}

struct Memory<'a> {
    meter: Meter<'a>,
    phases: Vec<(u64, i64)>,
    live: i64,
    most: i64,
}

impl<'a> Course<'a> {
    fn new(
        program: &'a Program,
        layout: &'a Layout,
        world: &'a dyn World,
        device: usize,
        memory: bool,
    ) -> Course<'a> {
        let instructions = &program.instructions;
        let compiled = instructions.iter().enumerate().all(|(place, i)| i.id as usize == place);
        let by_id: HashMap<u32, u32> = match compiled {
            true => HashMap::new(),
            false => (0u32..).zip(instructions).map(|(place, i)| (i.id, place)).collect(),
        };
        let place = |id: u32| if compiled { id } else { by_id[&id] };
        let mut first_follower = vec![0u32; instructions.len() + 1];
        for id in instructions.iter().flat_map(|i| &i.after) {
            first_follower[place(*id) as usize + 1] += 1;
        }
        for at in 1..first_follower.len() {
            first_follower[at] += first_follower[at - 1];
        }
        let mut fill = first_follower.clone();
        let mut followers = vec![0u32; first_follower[instructions.len()] as usize];
        for (at, instruction) in (0u32..).zip(instructions) {
            for id in &instruction.after {
                let slot = &mut fill[place(*id) as usize];
                followers[*slot as usize] = at;
                *slot += 1;
            }
        }
        let ahead = instructions.iter().enumerate().filter(|(_, i)| i.ahead > 0);
        let mut early: Vec<(usize, usize)> =
            ahead.map(|(place, i)| (place.saturating_sub(i.ahead as usize), place)).collect();
        early.sort_unstable_by(|a, b| b.cmp(a));
        Course {
            program,
            awaits: instructions.iter().map(|i| i.after.len() as u32).collect(),
            first_follower,
            followers,
            has_started: vec![false; instructions.len()],
            next: 0,
            early,
            may: Vec::new(),
            world,
            device,
            spans: vec![Span::default(); instructions.len()],
            left: instructions.len(),
            computations_left: instructions.iter().filter(|i| i.op.computes_layer()).count(),
            meter: memory.then(|| Memory {
                meter: Meter::new(layout, program.device),
                phases: vec![(0, 0); instructions.len()],
                live: 0,
                most: 0,
            }),
        }
    }

    fn can_start(&self, place: usize, busy: &[bool; SERIAL_LANES]) -> bool {
        self.awaits[place] == 0
            && serial(self.program.instructions[place].lane).is_none_or(|lane| !busy[lane])
    }

    /// An instruction that can start now, with these lanes of the device busy.
    fn startable(&mut self, busy: &[bool; SERIAL_LANES]) -> Option<usize> {
        while self.has_started.get(self.next).copied().unwrap_or(false) {
            self.next += 1;
        }
        while self.early.last().is_some_and(|(from, _)| *from <= self.next) {
            let place = self.early.pop().expect("there is a last").1;
            self.may.push(place);
        }
        if self.next < self.has_started.len() && self.can_start(self.next, busy) {
            return Some(self.next);
        }
        let may =
            self.may.iter().position(|place| !self.has_started[*place] && self.can_start(*place, busy))?;
        Some(self.may.swap_remove(may))
    }

    fn start(&mut self, place: usize, now: f64) {
        let instruction = &self.program.instructions[place];
        self.has_started[place] = true;
        self.spans[place].start = now;
        if let Some(memory) = &mut self.meter {
            let phase = memory.meter.phase(&instruction.op);
            memory.phases[place] = (phase.peak, phase.gain as i64 - phase.loss as i64);
            memory.live += phase.peak as i64;
            memory.most = memory.most.max(memory.live);
        }
    }

    fn finish(&mut self, place: usize, now: f64) {
        self.spans[place].end = now;
        self.left -= 1;
        if self.program.instructions[place].op.computes_layer() {
            self.computations_left -= 1;
        }
        let range = self.first_follower[place] as usize..self.first_follower[place + 1] as usize;
        for follower in range {
            self.awaits[self.followers[follower] as usize] -= 1;
        }
        if let Some(memory) = &mut self.meter {
            let (peak, change) = memory.phases[place];
            memory.live += change - peak as i64;
        }
    }

    /// What the device spent its time on.
    fn time(&self, seconds: f64) -> DeviceTime {
        let mut time = DeviceTime::default();
        for (instruction, span) in self.program.instructions.iter().zip(&self.spans) {
            if instruction.lane == Lane::Compute {
                let spent = span.end - span.start;
                match instruction.op {
                    Op::Recompute { .. } => time.recomputing += spent,
                    Op::Update { .. } => time.updating += spent,
                    _ => time.computing += spent,
                }
            }
        }
        time.idle = seconds - time.computing - time.recomputing - time.updating;
        time
    }
}

/// Programs under way, on devices that they may share.
pub(crate) struct Clock<'a> {
    courses: Vec<Course<'a>>,
    /// Programs on each device that are not over, the one that came first first: it has every lane before the others.
    here: Vec<Vec<usize>>,
    busy: Vec<[bool; SERIAL_LANES]>,
    meetings: &'a Meetings,
    /// Members of each meeting that have not started.
    missing: Vec<u32>,
    settings: Settings,
    flows: Flows,
    /// What each transfer belongs to.
    carried: Vec<What>,
    events: Events<Event>,
    pub(crate) now: f64,
}

impl<'a> Clock<'a> {
    pub(crate) fn new(
        devices: usize,
        meetings: &'a Meetings,
        resources: &[Resource],
        settings: Settings,
    ) -> Clock<'a> {
        Clock {
            courses: Vec::new(),
            here: vec![Vec::new(); devices],
            busy: vec![[false; SERIAL_LANES]; devices],
            missing: meetings.all.iter().map(|meeting| meeting.members.len() as u32).collect(),
            meetings,
            settings,
            flows: Flows::new(resources.to_vec()),
            carried: Vec::new(),
            events: Events::default(),
            now: 0.0,
        }
    }

    /// One more program on a device, behind those that are there. Returns its number.
    pub(crate) fn add(
        &mut self,
        program: &'a Program,
        layout: &'a Layout,
        world: &'a dyn World,
        device: usize,
    ) -> usize {
        let number = self.courses.len();
        self.courses.push(Course::new(program, layout, world, device, self.settings.memory));
        self.here[device].push(number);
        number
    }

    /// Until nothing is under way.
    pub(crate) fn run(&mut self, told: &mut Told<'_, 'a>) {
        while let Some((at, event)) = self.events.pop() {
            match event {
                Event::Finished { what } => {
                    self.now = at;
                    self.finish(what, told);
                }
                Event::Moves { what } => {
                    self.now = at;
                    self.move_bytes(what);
                }
                Event::Flow(end) => {
                    let mut foreseen = Vec::new();
                    if self.flows.end(end, &mut |end| foreseen.push(end)) {
                        self.now = at;
                        self.foresee_ends(foreseen);
                        self.finish(self.carried[end.flow], told);
                    }
                }
            }
        }
    }

    fn foresee_ends(&mut self, ends: Vec<End>) {
        for end in ends {
            self.events.push(end.at, Event::Flow(end));
        }
    }

    /// Starts all that a device's programs can start.
    pub(crate) fn go_on(&mut self, device: usize) {
        let mut turn = 0;
        while turn < self.here[device].len() {
            let program = self.here[device][turn];
            match self.courses[program].startable(&self.busy[device]) {
                None => turn += 1,
                Some(place) => self.start(program, place),
            }
        }
    }

    fn start(&mut self, program: usize, place: usize) {
        let course = &mut self.courses[program];
        course.start(place, self.now);
        if let Some(lane) = serial(course.program.instructions[place].lane) {
            self.busy[course.device][lane] = true;
        }
        match self.meetings.of((program, place)) {
            None => self.begin(What::Instruction(program, place)),
            Some(meeting) => {
                self.missing[meeting] -= 1;
                if self.missing[meeting] == 0 {
                    self.begin(What::Meeting(meeting));
                }
            }
        }
    }

    fn work(&self, what: What) -> Work {
        match what {
            What::Instruction(program, place) => {
                let course = &self.courses[program];
                course.world.alone(&course.program.instructions[place].op, course.device)
            }
            What::Meeting(meeting) => {
                let (program, place) = self.meetings.all[meeting].members[0];
                let course = &self.courses[program];
                course.world.together(&course.program.instructions[place].op, course.device)
            }
        }
    }

    /// All that it waits for is there.
    fn begin(&mut self, what: What) {
        let work = self.work(what);
        let seconds = work.seconds * self.slowness(what);
        match work.bytes > 0.0 {
            true if seconds > 0.0 => self.events.push(self.now + seconds, Event::Moves { what }),
            true => self.move_bytes(what),
            false => self.events.push(self.now + seconds, Event::Finished { what }),
        }
    }

    fn move_bytes(&mut self, what: What) {
        let work = self.work(what);
        let bytes = work.bytes * self.slowness(what);
        let mut foreseen = Vec::new();
        let flow = self.flows.begin(self.now, bytes, &work.resources, &mut |end| foreseen.push(end));
        if flow >= self.carried.len() {
            self.carried.push(what);
        }
        self.carried[flow] = what;
        self.foresee_ends(foreseen);
    }

    fn slowness(&self, what: What) -> f64 {
        let Some(Jitter { seed, most }) = self.settings.jitter else { return 1.0 };
        let number = match what {
            What::Instruction(program, place) => (program as u64) << 32 | place as u64,
            What::Meeting(meeting) => 1 << 63 | meeting as u64,
        };
        let mut mixed = seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 31)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 29;
        1.0 + most * (mixed >> 11) as f64 / (1u64 << 53) as f64
    }

    fn finish(&mut self, what: What, told: &mut Told<'_, 'a>) {
        let alone = match what {
            What::Instruction(program, place) => [(program, place)],
            What::Meeting(_) => [(0, 0)],
        };
        let meetings = self.meetings;
        let members = match what {
            What::Instruction(..) => &alone[..],
            What::Meeting(meeting) => &meetings.all[meeting].members[..],
        };
        for (program, place) in members {
            let course = &mut self.courses[*program];
            course.finish(*place, self.now);
            let (device, is_over) = (course.device, course.left == 0);
            let lane = course.program.instructions[*place].lane;
            let layer = course.program.instructions[*place].op.computes_layer();
            let computed = layer && course.computations_left == 0;
            if let Some(lane) = serial(lane) {
                self.busy[device][lane] = false;
            }
            if computed {
                told(self, *program, Milestone::Computed);
            }
            if is_over {
                self.here[device].retain(|other| other != program);
                told(self, *program, Milestone::Over);
            }
        }
        for (program, _) in members {
            self.go_on(self.courses[*program].device);
        }
    }

    fn result(self) -> Result<Simulated, ProgramError> {
        let seconds = self.now;
        for course in &self.courses {
            if course.left > 0 {
                let place = course.has_started.iter().position(|started| !started).unwrap_or(0);
                let instruction = course.program.instructions[place].to_string();
                return Err(ProgramError::Stuck { device: course.program.device, instruction });
            }
        }
        let memories = self.courses.iter().filter_map(|course| course.meter.as_ref());
        Ok(Simulated {
            seconds,
            devices: self.courses.iter().map(|course| course.time(seconds)).collect(),
            values_bytes: memories.map(|memory| memory.most.unsigned_abs()).collect(),
            spans: self.courses.into_iter().map(|course| course.spans).collect(),
        })
    }
}
