//! A device's way through its list: instructions start in its order, each when what it comes after has finished and its
//! lane is free. Movements that may start ahead do so as soon as they can, computations only where the instruction whose turn
//! it is has to wait. What only computes is done here and now. The rest is under way elsewhere meanwhile, and lands between two
//! instructions. What the step before has left under way lands here too: instructions that touch its tensors come after it.

use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use shoal_kernels::Mark;
use shoal_plan::effects::effects;
use shoal_plan::{Instruction, Lane, Layout, Op, Program, Purpose, Tier};

use super::behind::{Ended, Ending};
use super::clockwork::wait_until;
use super::replay::only_computes;
use super::settle::Progress;
use super::step::{Step, StepInput, StepOutcome};
use super::updates::Terms;
use super::{Executor, Replay};
use crate::error::{EngineError, Result};

/// How often it is looked whether a device that works behind the host's back has nothing left to do.
const LOOK_AGAIN: Duration = Duration::from_micros(50);

/// How far a program has come.
struct Course<'a> {
    instructions: &'a [Instruction],
    place_of: HashMap<u32, usize>,
    is_started: Vec<bool>,
    is_finished: Vec<bool>,
    /// Places that may start from a place before their own.
    early: Vec<Vec<usize>>,
    /// Those of them that have not, in order: movements, and computations.
    waiting: Vec<usize>,
    waiting_to_compute: Vec<usize>,
    /// How many instructions only compute, where a device may be given them as it was before: nothing but its own list
    /// takes and gives back its memory, in the same order each time. None where computations may start ahead, nor where
    /// anything moves: what comes and goes does so at any moment, and what lay there may then lie elsewhere.
    repeating: Option<usize>,
    /// Where the device must have come before it is given the next computation ahead of its turn.
    given: Option<Mark>,
    /// Lanes that are busy with an instruction elsewhere.
    busy: Vec<Lane>,
    /// Movements that have not landed.
    under_way: usize,
    /// Tensors that updates of the step before are still at, once for each.
    held_up: Vec<usize>,
    /// Tensors that each instruction touches, where some are held up.
    touched: Vec<Vec<usize>>,
}

impl<'a> Course<'a> {
    fn new(program: &'a Program, layout: Option<&Layout>, held_up: Vec<usize>) -> Course<'a> {
        let instructions = &program.instructions[..];
        let mut early = vec![Vec::new(); instructions.len()];
        for (place, instruction) in instructions.iter().enumerate().filter(|(_, next)| next.ahead > 0) {
            early[place.saturating_sub(instruction.ahead as usize)].push(place);
        }
        let touched = |layout: &Layout| -> Vec<Vec<usize>> {
            let touched = |next: &Instruction| effects(&next.op, layout, program.device).touches().collect();
            instructions.iter().map(touched).collect()
        };
        Course {
            touched: layout.filter(|_| !held_up.is_empty()).map(touched).unwrap_or_default(),
            held_up,
            instructions,
            place_of: instructions.iter().enumerate().map(|(place, next)| (next.id, place)).collect(),
            is_started: vec![false; instructions.len()],
            is_finished: vec![false; instructions.len()],
            early,
            waiting: Vec::new(),
            waiting_to_compute: Vec::new(),
            repeating: repeating(instructions),
            given: None,
            busy: Vec::new(),
            under_way: 0,
        }
    }

    /// From this place on more may start.
    fn reach(&mut self, place: usize) {
        for next in std::mem::take(&mut self.early[place]) {
            let waiting = match self.instructions[next].lane {
                Lane::Compute => &mut self.waiting_to_compute,
                _ => &mut self.waiting,
            };
            waiting.insert(waiting.partition_point(|other| *other < next), next);
        }
    }

    /// Whether what it comes after has finished and its lane is free; in a line it need not be.
    fn may_start(&self, place: usize) -> bool {
        let instruction = &self.instructions[place];
        let done = |id: &u32| self.place_of.get(id).is_some_and(|place| self.is_finished[*place]);
        let has_lane = instruction.op.line().is_some() || !self.busy.contains(&instruction.lane);
        has_lane && instruction.after.iter().all(done) && !self.is_held_up(place)
    }

    /// Whether it touches what the step before is still at.
    fn is_held_up(&self, place: usize) -> bool {
        let touched = self.touched.get(place).filter(|_| !self.held_up.is_empty());
        touched.is_some_and(|touched| touched.iter().any(|tensor| self.held_up.contains(tensor)))
    }

    /// How many instructions from a place on can be handed to the device together.
    fn together(&self, place: usize, like: impl Fn(&Instruction) -> bool) -> usize {
        let ready = |next: &usize| {
            let done = |id: &u32| {
                let earlier = self.place_of.get(id);
                earlier.is_some_and(|at| self.is_finished[*at] || (place..*next).contains(at))
            };
            let instruction = &self.instructions[*next];
            let is_ready = !self.is_started[*next] && instruction.after.iter().all(done);
            like(instruction) && is_ready && !self.is_held_up(*next)
        };
        (place..self.instructions.len()).take_while(ready).count()
    }

    /// An update of the step before has landed.
    fn let_go(&mut self, tensor: usize) {
        if let Some(place) = self.held_up.iter().position(|held_up| *held_up == tensor) {
            self.held_up.swap_remove(place);
        }
    }

    fn finish(&mut self, places: std::ops::Range<usize>) {
        self.is_started[places.clone()].fill(true);
        self.is_finished[places].fill(true);
    }
}

/// See [`Course::repeating`].
fn repeating(instructions: &[Instruction]) -> Option<usize> {
    let stays = |next: &Instruction| next.lane == Lane::Compute || matches!(next.op, Op::Load { .. });
    let repeats = |next: &Instruction| stays(next) && !next.computes_ahead();
    instructions.iter().all(repeats).then(|| instructions.iter().filter(|next| only_computes(next)).count())
}

/// Layers of which a program adds up gradients of weights by themselves. Who has all to itself has no table that says so.
fn put_off(program: &Program) -> HashSet<usize> {
    let layer = |instruction: &Instruction| match instruction.op {
        Op::WeightGradients { layer, .. } => Some(layer),
        _ => None,
    };
    program.instructions.iter().filter_map(layer).collect()
}

impl Executor {
    pub(super) fn walk(
        &mut self,
        program: &Program,
        layout: Option<&Layout>,
        input: &StepInput,
    ) -> Result<StepOutcome> {
        for sum in [&mut self.loss, &mut self.discarded_loss, &mut self.correct] {
            self.device.zero(sum)?;
        }
        if self.chain.drops() {
            self.device.set_scalar(&mut self.step_number, input.step as f64)?;
        }
        // The first addition of a step overwrites.
        for sum in self.state.tensors.iter_mut().filter_map(|held| held.gradient.as_mut()) {
            sum.started = false;
        }
        let mut step = Step {
            input,
            layout,
            device: program.device,
            training: program.purpose == Purpose::Train,
            values: HashMap::new(),
            groups: HashMap::new(),
            puts_off: put_off(program),
            global_batch: layout.map_or_else(|| program.loaded_samples(), |layout| layout.plan.global_batch),
            own_targets: 0,
            sums_loss: false,
            measures_norm: false,
            outcome: StepOutcome::default(),
        };
        if step.training {
            self.progress = Some(Progress::of(input));
        }
        let mut course = Course::new(program, layout, self.behind.tensors());
        let walked = self.start_all(&mut course, &mut step);
        if let (Err(error), Some(fabric)) = (&walked, &self.fabric) {
            // Those who wait for this device end too; so do our own threads, which then give back what they have.
            fabric.abort(&error.to_string());
        }
        // After a failure what else fails is a consequence.
        let mut result = walked.and(self.land_all(&mut course, &mut step));
        if result.is_err() || !step.training || !input.leaves_updates {
            let caught_up = self.catch_up();
            result = result.and(caught_up);
        }
        result?;
        if let Err(error) = self.close(&mut step, program) {
            self.wait_for_updates();
            return Err(error);
        }
        Ok(step.outcome)
    }

    /// The end of a step whose instructions are all done, or left under way.
    fn close(&mut self, step: &mut Step, program: &Program) -> Result {
        // The device has its work; what the next step needs is read and sent behind it.
        if let Some(next) = step.input.next.filter(|_| self.held.is_empty() && step.layout.is_none()) {
            self.read_ahead(program, step.input.step + 1, next)?;
        }
        self.finish(step)
    }

    fn start_all(&mut self, course: &mut Course, step: &mut Step) -> Result {
        let mut place = 0;
        while place < course.instructions.len() {
            course.reach(place);
            self.land_ended(course, step)?;
            self.start_early(course, step)?;
            if course.is_started[place] {
                place += 1;
                continue;
            }
            while !course.may_start(place) {
                self.compute_ahead_or_wait(course, step)?;
                self.start_early(course, step)?;
            }
            // One that may start ahead may just have.
            if !course.is_started[place] {
                place += self.start(course, step, place)?;
                course.given = None;
            }
        }
        Ok(())
    }

    /// The instruction whose turn it is has to wait: computes what may be computed ahead, one instruction at a time, so that
    /// what is waited for is not kept waiting in turn; else waits for something to end. A device that works behind the
    /// host's back is given the next when it has done the last.
    fn compute_ahead_or_wait(&mut self, course: &mut Course, step: &mut Step) -> Result {
        course.waiting_to_compute.retain(|place| !course.is_started[*place]);
        let Some(next) = course.waiting_to_compute.iter().copied().find(|place| course.may_start(*place))
        else {
            return self.land_next(course, step);
        };
        let given = course.given.take().map_or_else(|| self.device.mark(), Ok)?;
        if given.is_reached()? {
            self.start(course, step, next)?;
            course.given = Some(self.device.mark()?);
            self.land_ended(course, step)
        } else {
            course.given = Some(given);
            match self.behind.wait_for_end_within(LOOK_AGAIN) {
                Some(ended) => self.land(course, step, ended),
                None => Ok(()),
            }
        }
    }

    /// Starts the movements that may start ahead and can.
    fn start_early(&mut self, course: &mut Course, step: &mut Step) -> Result {
        let mut place = 0;
        while place < course.waiting.len() {
            let next = course.waiting[place];
            if course.is_started[next] {
                course.waiting.remove(place);
            } else if course.may_start(next) {
                course.waiting.remove(place);
                self.start(course, step, next)?;
            } else {
                place += 1;
            }
        }
        Ok(())
    }

    /// Starts the instruction at a place, and those after it that reach the device with it; says how many.
    fn start(&mut self, course: &mut Course, step: &mut Step, place: usize) -> Result<usize> {
        if self.gate.as_ref().is_some_and(|may_go_on| !may_go_on()) {
            return Err(EngineError::Stopped);
        }
        let instruction = &course.instructions[place];
        let start = Instant::now();
        let on_device = |next: &Instruction| matches!(next.op, Op::Update { at: Tier::Device, .. });
        // Instructions of a kind that stand together reach the device together: updates, because most tensors
        // are small, and what only computes, because it may be known already.
        let count = if on_device(instruction) {
            let count = course.together(place, on_device);
            let updated = course.instructions[place..place + count].iter().filter_map(|next| match next.op {
                Op::Update { tensor, .. } => Some(tensor),
                _ => None,
            });
            self.update(&Terms::of(step.input), updated)?;
            self.stamp(Some(instruction.op))?;
            count
        } else if only_computes(instruction) && step.training {
            let together = match (self.replay, course.repeating) {
                (Replay::Nothing, _) | (_, None) => 1,
                _ => course.together(place, only_computes),
            };
            // A step that is started at once is all of it: what a part leaves for the next would not be made.
            let replay = match self.replay {
                Replay::Instruction if course.repeating.is_some() => Replay::Instruction,
                Replay::Step if course.repeating == Some(together) => Replay::Step,
                _ => Replay::Nothing,
            };
            let count = if replay == Replay::Nothing { 1 } else { together };
            self.compute(step, &course.instructions[place..place + count], replay)?;
            count
        } else if instruction.lane == Lane::Compute || matches!(instruction.op, Op::Load { .. }) {
            self.execute(step, instruction)?;
            1
        } else if instruction.op.line().is_some() {
            self.line_up(step, instruction, place)?;
            course.is_started[place] = true;
            return Ok(1);
        } else {
            self.note_begun(&instruction.op);
            let job = self.start_move(step, instruction)?;
            let (ends, run, id) = (self.behind.ends.clone(), self.runs, instruction.id);
            let lasts = self.clockwork.duration(instruction, step.training);
            let lasts = lasts.filter(|_| instruction.lane != Lane::Network);
            let work = move || {
                let ending = Ending::Moved(catch_unwind(AssertUnwindSafe(job)));
                if let Some(lasts) = lasts {
                    wait_until(start + lasts);
                }
                // Whoever started it waits for it; if not, there is nobody to tell.
                let _ = ends.send(Ended { run, place, id, ending, start, end: Instant::now() });
            };
            self.lanes.start(work).map_err(|source| EngineError::Thread { source })?;
            course.under_way += 1;
            course.is_started[place] = true;
            if instruction.lane != Lane::Network {
                course.busy.push(instruction.lane);
            }
            return Ok(1);
        };
        let done = &course.instructions[place..place + count];
        self.clockwork.hold(start, done, step.training);
        if self.clockwork.traces {
            self.device.wait()?;
            let end = Instant::now();
            done.iter().for_each(|instruction| self.clockwork.note(instruction.id, start, end));
        }
        done.iter().for_each(|instruction| self.note_done(step, &instruction.op));
        course.finish(place..place + count);
        Ok(count)
    }

    /// Lands whatever has ended.
    fn land_ended(&mut self, course: &mut Course, step: &mut Step) -> Result {
        while let Some(ended) = self.behind.next_ended() {
            self.land(course, step, ended)?;
        }
        Ok(())
    }

    /// Waits for something to end.
    fn land_next(&mut self, course: &mut Course, step: &mut Step) -> Result {
        let is_any = course.under_way > 0 || !self.behind.is_empty();
        assert!(is_any, "an instruction waits for one that never starts");
        let ended = self.behind.wait_for_end();
        self.land(course, step, ended)
    }

    /// Waits for all that is under way; the first failure is what is told.
    fn land_all(&mut self, course: &mut Course, step: &mut Step) -> Result {
        let mut result = Ok(());
        while course.under_way > 0 {
            let landed = self.land_next(course, step);
            if let (Err(error), Ok(()), Some(fabric)) = (&landed, &result, &self.fabric) {
                fabric.abort(&error.to_string());
            }
            result = result.and(landed);
        }
        result
    }

    fn land(&mut self, course: &mut Course, step: &mut Step, ended: Ended) -> Result {
        let Ended { run, place, id, ending, start, end } = ended;
        let landing = match ending {
            Ending::Moved(landing) => landing,
            Ending::Updated { tensor, .. } => {
                match run == self.runs {
                    true => course.is_finished[place] = true,
                    false => course.let_go(tensor),
                }
                return self.land_update(Ended { run, place, id, ending, start, end });
            }
        };
        let instruction = &course.instructions[place];
        course.under_way -= 1;
        course.is_finished[place] = true;
        course.busy.retain(|busy| *busy != instruction.lane);
        self.clockwork.note(id, start, end);
        match landing {
            Ok(land) => land(self, step)?,
            Err(panic) => resume_unwind(panic),
        }
        self.note_done(step, &instruction.op);
        Ok(())
    }
}
