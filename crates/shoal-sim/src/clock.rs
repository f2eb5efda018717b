//! The virtual clock: programs that are under way on their devices, and what happens when.

mod course;

use std::collections::VecDeque;

use serde::Serialize;
use shoal_plan::events::Events;
use shoal_plan::{Lane, Layout, Meetings, Op, Program, ProgramError, Tier};

use course::{Course, Slot};

use crate::flows::{End, Flows, Resource};
use crate::handling::Handling;
use crate::sharing::{Sharing, Turn};
use crate::world::{Work, World};

/// Lines in which updates wait: the host's and the disk's.
const LINES: usize = 2;

fn line(op: &Op) -> Option<usize> {
    op.line().map(|tier| usize::from(tier == Tier::Disk))
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
    /// Whether the step is played by itself: nothing is under way before, and it ends when all of it is over.
    pub alone: bool,
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

/// A step, played through: one of many that follow each other. Every device begins it when its own part of the step before is
/// over, beside updates that others have yet to do or that were left under way.
#[derive(Clone, Debug)]
pub struct Simulated {
    /// From a moment of the step before to the same of this one. Devices that end later than others have less than this between
    /// the first one's beginning and their own end, for they began later too.
    pub seconds: f64,
    /// Of each program's instructions, in their order, from the moment on that the first device began. Of updates that outlast
    /// their step, those of the step before.
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
    clock.handling = Handling::new((0..devices).map(|device| world.handling(device)).collect());
    clock.sharing = Sharing::new((0..devices).map(|device| world.seat(device)).collect());
    let closes = programs.iter().any(|program| closing_place(program).is_some());
    let steps = if settings.alone || !closes { 1 } else { 2 };
    for _ in 0..steps {
        clock.open_step(programs, layout, world);
    }
    if steps == 2 && !settings.memory {
        // What comes behind the closing sums is of interest; memory is at its highest before that.
        clock.pass_closing_sums(programs.len());
    }
    // When each began its last step, for those who have a part in it.
    let mut begun: Vec<Option<f64>> =
        programs.iter().map(|program| Some(0.0).filter(|_| !program.instructions.is_empty())).collect();
    for number in 0..programs.len() {
        clock.enter(number, layout);
        // Who has nothing left to wait for of the step before is in the next one.
        if steps == 2 && clock.courses[number].listed_left == 0 {
            clock.enter(number + programs.len(), layout);
        }
    }
    (0..devices).for_each(|device| clock.go_on(device));
    clock.run(&mut |clock, program, milestone| {
        if milestone == Milestone::Listed && steps == 2 && program < programs.len() {
            begun[program] = Some(clock.now);
            clock.enter(program + programs.len(), layout);
        }
    });
    clock.result(programs, &begun)
}

/// A step's closing sums, loss and norm: they wait for all that takes time before them, and all updates for them.
fn is_closing(op: &Op) -> bool {
    matches!(op, Op::SumLoss | Op::GradientNorm)
}

/// Where a program has the last of them.
fn closing_place(program: &Program) -> Option<usize> {
    program.instructions.iter().rposition(|instruction| is_closing(&instruction.op))
}

/// How far a program has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Milestone {
    /// All its layers are computed: sums, updates and copies remain.
    Computed,
    /// All that its list waits for is over: the next step may begin.
    Listed,
    Over,
}

/// Told of programs' milestones; it may add others.
type Told<'t, 'a> = dyn FnMut(&mut Clock<'a>, usize, Milestone) + 't;

enum Event {
    Flow(End),
    Computed(Turn),
    Finished { what: What },
}

/// An instruction, or one that several devices have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Instruction(usize, usize),
    Meeting(usize),
}

/// What a transfer belongs to.
#[derive(Clone, Copy)]
struct Carried {
    what: What,
    /// When its last message leaves at the soonest, and how long that is under way.
    least: f64,
    then: f64,
}

/// Programs under way, on devices that they may share.
pub(crate) struct Clock<'a> {
    courses: Vec<Course<'a>>,
    /// Programs on each device that are not over, the one that came first first: it has every lane before the others.
    here: Vec<Vec<usize>>,
    busy: Vec<[bool; Lane::SERIAL]>,
    /// Updates in other memories by device, in their order; the first of each line is under way.
    lines: Vec<[VecDeque<(usize, usize)>; LINES]>,
    meetings: &'a Meetings,
    /// Members of each meeting that have not started, step by step.
    missing: Vec<u32>,
    settings: Settings,
    flows: Flows,
    handling: Option<Handling>,
    sharing: Option<Sharing>,
    /// What each device computes that shares its chip.
    computing: Vec<What>,
    /// By transfer.
    carried: Vec<Carried>,
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
            busy: vec![[false; Lane::SERIAL]; devices],
            lines: vec![Default::default(); devices],
            missing: Vec::new(),
            meetings,
            settings,
            flows: Flows::new(resources.to_vec()),
            handling: None,
            sharing: None,
            computing: vec![What::Meeting(0); devices],
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
        self.courses
            .push(Course { number, ..Course::new(program, layout, world, device, self.settings.memory) });
        self.here[device].push(number);
        number
    }

    /// The programs of one more step, none of which has begun.
    fn open_step(&mut self, programs: &'a [Program], layout: &'a Layout, world: &'a dyn World) {
        let step = self.courses.len() / programs.len().max(1);
        self.missing.extend(self.meetings.all.iter().map(|meeting| meeting.members.len() as u32));
        for (number, program) in programs.iter().enumerate() {
            let first = self.courses.get(number).filter(|_| step > 0);
            let course = match first.and_then(Course::again) {
                Some(again) => again,
                None => Course::new(program, layout, world, program.device, self.settings.memory),
            };
            self.courses.push(Course { number, step, ..course });
        }
    }

    /// Takes the first of the steps up at the moment when its closing sums are known: nothing is under way then.
    fn pass_closing_sums(&mut self, programs: usize) {
        for number in 0..programs {
            let passed = 0..self.courses[number].pass_closing_sums();
            for meeting in passed.filter_map(|place| self.meetings.of((number, place))) {
                self.missing[meeting] -= 1;
            }
        }
    }

    /// A program begins, beside what the same device's one of the step before has left under way.
    fn enter(&mut self, number: usize, layout: &'a Layout) {
        let programs = self.meetings.programs();
        if let Some(before) = number.checked_sub(programs) {
            let (earlier, own) = self.courses.split_at_mut(number);
            own[0].follow(&mut earlier[before], layout, number);
        }
        self.here[self.courses[number].device].push(number);
    }

    /// Until nothing is under way.
    pub(crate) fn run(&mut self, told: &mut Told<'_, 'a>) {
        while let Some((at, event)) = self.events.pop() {
            match event {
                Event::Finished { what } => {
                    self.now = at;
                    self.finish(what, told);
                }
                Event::Flow(end) => {
                    let Clock { flows, events, .. } = self;
                    if flows.end(end, &mut |end| events.push(end.at, Event::Flow(end))) {
                        self.now = at;
                        let Carried { what, least, then } = self.carried[end.flow];
                        let arrives = at.max(least) + then;
                        match arrives > at {
                            true => self.events.push(arrives, Event::Finished { what }),
                            false => self.finish(what, told),
                        }
                    }
                }
                Event::Computed(turn) => {
                    let Clock { sharing, events, .. } = self;
                    let foresee = &mut |turn: Turn| events.push(turn.at, Event::Computed(turn));
                    if sharing.as_mut().is_some_and(|sharing| sharing.end(turn, foresee)) {
                        self.now = at;
                        self.finish(self.computing[turn.device], told);
                    }
                }
            }
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
        let device = course.device;
        let Slot { lane, line, .. } = course.slots[place];
        if let Some(line) = line.map(usize::from) {
            course.line_up(place);
            self.lines[device][line].push_back((program, place));
            if self.lines[device][line].len() == 1 {
                self.serve(device, line);
            }
            return;
        }
        course.start(place, self.now);
        if let Some(lane) = lane {
            self.busy[device][lane as usize] = true;
        }
        match self.meetings.of((course.number, place)) {
            None => self.begin(What::Instruction(program, place)),
            Some(meeting) => {
                let meeting = course.step * self.meetings.all.len() + meeting;
                self.missing[meeting] -= 1;
                if self.missing[meeting] == 0 {
                    self.begin(What::Meeting(meeting));
                }
            }
        }
    }

    /// Begins the update whose turn it is in a line.
    fn serve(&mut self, device: usize, line: usize) {
        if let Some((program, place)) = self.lines[device][line].front().copied() {
            self.courses[program].start(place, self.now);
            self.begin(What::Instruction(program, place));
        }
    }

    /// The members of a meeting, by the programs of its step.
    fn members(&self, meeting: usize) -> (&'a [(usize, usize)], usize) {
        let meetings = self.meetings;
        let (step, number) = (meeting / meetings.all.len(), meeting % meetings.all.len());
        (&meetings.all[number].members, step * meetings.programs())
    }

    fn work(&self, what: What) -> Work {
        match what {
            What::Instruction(program, place) => {
                let course = &self.courses[program];
                course.world.alone(&course.program.instructions[place].op, course.device)
            }
            What::Meeting(meeting) => {
                let (members, first) = self.members(meeting);
                let (program, place) = members[0];
                let course = &self.courses[first + program];
                course.world.together(&course.program.instructions[place].op, course.device)
            }
        }
    }

    /// All that it waits for is there.
    fn begin(&mut self, what: What) {
        let work = self.work(what);
        let seconds = work.seconds * self.slowness(what) + self.begin_handling(what, &work);
        if work.bytes <= 0.0 && seconds > 0.0 && self.compute_beside_others(what, seconds) {
            return;
        }
        match work.bytes > 0.0 {
            true => self.move_bytes(what, &work, seconds),
            false => self.events.push(self.now + seconds, Event::Finished { what }),
        }
    }

    /// Begins something that is computed on a chip which others share; returns whether it is that.
    fn compute_beside_others(&mut self, what: What, seconds: f64) -> bool {
        let Clock { sharing: Some(sharing), events, courses, computing, now, .. } = self else {
            return false;
        };
        let What::Instruction(program, place) = what else { return false };
        let device = courses[program].computes_on(place).filter(|device| sharing.is_shared(*device));
        let Some(device) = device else { return false };
        computing[device] = what;
        let is_layer = courses[program].slots[place].computes_layer;
        sharing
            .begin(device, seconds, is_layer, *now, &mut |turn| events.push(turn.at, Event::Computed(turn)));
        true
    }

    /// Returns by how much longer something lasts because of what was handled beside the computing before it.
    fn begin_handling(&mut self, what: What, work: &Work) -> f64 {
        if self.handling.is_none() {
            return 0.0;
        }
        match what {
            What::Instruction(program, place) => {
                let (device, now) = (self.courses[program].computes_on(place), self.now);
                let both = self.handling.as_mut().zip(device);
                both.map_or(0.0, |(handling, device)| handling.compute(device, now))
            }
            What::Meeting(meeting) => {
                let (devices, now) = (self.devices_of(meeting), self.now);
                if let Some(handling) = self.handling.as_mut().filter(|_| work.handled_bytes > 0.0) {
                    handling.begin(meeting, devices.into_iter(), now);
                }
                0.0
            }
        }
    }

    /// Returns when something is over whose bytes have passed, if their handling takes longer.
    fn end_handling(&mut self, what: What) -> Option<f64> {
        self.handling.as_ref()?;
        let now = self.now;
        match what {
            What::Instruction(program, place) => {
                let device = self.courses[program].computes_on(place)?;
                self.handling.as_mut()?.computed(device, now);
                None
            }
            What::Meeting(meeting) => {
                let (devices, work) = (self.devices_of(meeting), self.work(what));
                self.handling.as_mut()?.end(meeting, devices.into_iter(), &work, now)
            }
        }
    }

    fn devices_of(&self, meeting: usize) -> Vec<usize> {
        let (members, first) = self.members(meeting);
        members.iter().map(|(program, _)| self.courses[first + program].device).collect()
    }

    /// Bytes leave at once, and arrive by so much later. Where several messages follow each other others' bytes pass while they
    /// are under way: what the links are busy with meanwhile takes nothing of them, and only the last one's way remains.
    fn move_bytes(&mut self, what: What, work: &Work, seconds: f64) {
        let bytes = work.bytes * self.slowness(what);
        let Clock { flows, events, now, .. } = self;
        let then = seconds / work.handled_messages.max(1.0);
        let least = *now + seconds - then + flows.seconds_alone(bytes, &work.resources);
        let flow =
            flows.begin(*now, bytes, &work.resources, &mut |end| events.push(end.at, Event::Flow(end)));
        let carried = Carried { what, least, then };
        if flow >= self.carried.len() {
            self.carried.push(carried);
        }
        self.carried[flow] = carried;
    }

    fn slowness(&self, what: What) -> f64 {
        let Some(Jitter { seed, most }) = self.settings.jitter else { return 1.0 };
        let number = match what {
            What::Instruction(program, place) => (self.courses[program].number as u64) << 32 | place as u64,
            What::Meeting(meeting) => 1 << 63 | (meeting % self.meetings.all.len()) as u64,
        };
        let mut mixed = seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 31)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 29;
        1.0 + most * (mixed >> 11) as f64 / (1u64 << 53) as f64
    }

    fn finish(&mut self, what: What, told: &mut Told<'_, 'a>) {
        if let Some(over) = self.end_handling(what) {
            return self.events.push(over, Event::Finished { what });
        }
        let alone = match what {
            What::Instruction(program, place) => [(program, place)],
            What::Meeting(_) => [(0, 0)],
        };
        let (members, first) = match what {
            What::Instruction(..) => (&alone[..], 0),
            What::Meeting(meeting) => self.members(meeting),
        };
        for (program, place) in members {
            let program = first + program;
            let course = &mut self.courses[program];
            course.finish(*place, self.now);
            let (device, is_over) = (course.device, course.left == 0);
            let Slot { lane, line, computes_layer, is_left_behind, .. } = course.slots[*place];
            let computed = computes_layer && course.computations_left == 0;
            let listed = course.listed_left == 0 && !is_left_behind;
            if is_left_behind {
                for (follower, place) in course.followed_by.remove(place).unwrap_or_default() {
                    self.courses[follower].slots[place].awaits -= 1;
                }
            }
            if let Some(lane) = lane {
                self.busy[device][lane as usize] = false;
            }
            if let Some(line) = line.map(usize::from) {
                self.lines[device][line].pop_front();
                self.serve(device, line);
            }
            if computed {
                told(self, program, Milestone::Computed);
            }
            if listed {
                told(self, program, Milestone::Listed);
            }
            if is_over {
                self.here[device].retain(|other| *other != program);
                told(self, program, Milestone::Over);
            }
        }
        for (program, _) in members {
            self.go_on(self.courses[first + program].device);
        }
    }

    /// Of the last step, whose programs began then.
    fn result(self, programs: &[Program], begun: &[Option<f64>]) -> Result<Simulated, ProgramError> {
        for course in &self.courses {
            if course.left > 0 {
                let slots = course.slots[..course.spans.len()].iter();
                let place = slots.into_iter().position(|slot| !slot.has_started).unwrap_or(0);
                let instruction = course.program.instructions[place].to_string();
                return Err(ProgramError::Stuck { device: course.program.device, instruction });
            }
        }
        let (earlier, last) = self.courses.split_at(self.courses.len() - programs.len());
        // Everyone waits for the closing sums, so that is one moment for all; alone a step lasts until all of it is over.
        let closed = |courses: &[Course]| {
            let spans =
                courses.iter().flat_map(|course| course.program.instructions.iter().zip(&course.spans));
            spans.filter(|(next, _)| is_closing(&next.op)).map(|(_, span)| span.end).reduce(f64::max)
        };
        let seconds = match (closed(earlier), closed(last)) {
            (Some(before), Some(now)) => now - before,
            _ => self.now,
        };
        let began = begun.iter().flatten().copied().fold(f64::INFINITY, f64::min).min(self.now);
        let spans = last.iter().enumerate().map(|(number, course)| {
            let before = earlier.get(number);
            let listed = course.listed_end;
            let span = |(place, own): (usize, &Span)| {
                let is_left_behind = course.slots[place].is_left_behind;
                let span = match before.filter(|_| is_left_behind && own.end > listed) {
                    Some(before) => before.spans[place],
                    None => *own,
                };
                Span { start: (span.start - began).max(0.0), end: (span.end - began).max(0.0) }
            };
            course.spans.iter().enumerate().map(span).collect()
        });
        let most = |course: &Course| course.meter.as_ref().map(|memory| memory.most.unsigned_abs());
        let values_bytes = last.iter().enumerate().filter_map(|(number, course)| {
            Some(earlier.get(number).and_then(most).unwrap_or(0).max(most(course)?))
        });
        Ok(Simulated {
            seconds,
            spans: spans.collect(),
            devices: last.iter().map(|course| course.time(seconds)).collect(),
            values_bytes: values_bytes.collect(),
        })
    }
}
