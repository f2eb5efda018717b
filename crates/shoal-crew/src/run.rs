//! Step after step, until the last one, until told to stop, or until a peer fails. Before each instruction the lease is
//! asked; between two steps commands are looked at. However it ends, it ends with where the slices stand.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use shoal_control::message::{Epoch, Spent, WorkerId};
use shoal_control::worker::{EngineCommand, EngineEvent};
use shoal_engine::executor::Gate;
use shoal_engine::partners::partners;
use shoal_engine::stepping::{Work, needs_table};
use shoal_engine::{EngineError, Traced};
use shoal_plan::{Instruction, Lane, Layout, Op, Program, Standing};

use crate::brake::{Brake, Stops};
use crate::error::{CrewError, Result};
use crate::hands::{Hands, order_of, terms_of};
use crate::peers::Purpose;
use crate::slowness::Stretch;

/// How far a run is to go.
struct Bounds {
    steps: u64,
    /// It was told to end after this step.
    after: Option<u64>,
    /// Nobody wants to know how it ends.
    let_go: bool,
}

impl Bounds {
    fn is_over(&self, step: u64) -> bool {
        self.let_go || step >= self.steps || self.after.is_some_and(|after| step > after)
    }
}

impl Hands {
    pub(crate) fn run(&mut self, epoch: Epoch, steps: u64) {
        if !self.shares.contains_key(&epoch) {
            return self.note(Some(epoch), "a plan is to run whose state is not here".to_owned(), true);
        }
        let brake = self.task.begin(epoch);
        let mut bounds = Bounds { steps, after: None, let_go: false };
        let mut later = Vec::new();
        let ran = self.go(epoch, &mut bounds, &brake, &mut later);
        self.task.end();
        self.end_run(epoch, ran, &brake);
        // What came meanwhile and was for another plan.
        for command in later {
            self.obey(command);
        }
    }

    /// Looks at what was told meanwhile.
    fn look(&mut self, epoch: Epoch, bounds: &mut Bounds, brake: &Brake, later: &mut Vec<EngineCommand>) {
        while let Ok(command) = self.told.try_recv() {
            match command {
                EngineCommand::Halt { epoch: other, after } if other == epoch => match after {
                    Some(_) => bounds.after = after,
                    None => brake.pull(),
                },
                EngineCommand::Save { epoch: other, save } if other == epoch => {
                    self.wanted = Some((epoch, save));
                }
                command => {
                    bounds.let_go |= Stops::of(&command).stops(epoch);
                    later.push(command);
                }
            }
        }
    }

    fn go(
        &mut self,
        epoch: Epoch,
        bounds: &mut Bounds,
        brake: &Arc<Brake>,
        later: &mut Vec<EngineCommand>,
    ) -> Result {
        self.look(epoch, bounds, brake, later);
        let share = self.shares.get_mut(&epoch).ok_or(CrewError::Stopped)?;
        if brake.is_pulled() || bounds.is_over(share.step) {
            return Ok(());
        }
        let key = (self.job, epoch, Purpose::Run);
        let partners = match &self.assembled {
            // Evaluation deals its samples out in other ways than steps do.
            Some(assembled) if assembled.held_out.is_none() => {
                partners(&Layout::new(&share.plan, &assembled.chain), &share.program)
            }
            _ => share.peers.everyone(),
        };
        let fabric = share.peers.connect(&self.crewed, key, partners, &share.abouts, brake)?;
        let (may_run, pulled) = (self.crewed.setup.may_run.clone(), brake.clone());
        let gate: Gate = Arc::new(move || !pulled.is_pulled() && may_run());
        let parked =
            || CrewError::NotHeld { epoch: epoch.0, step: 0, what: "it waits in host memory".into() };
        let executor = share.executor().ok_or_else(parked)?;
        executor.set_fabric(fabric.clone());
        executor.set_gate(Some(gate));
        let stepped = self.step_on(epoch, bounds, brake, later);
        let stepped = stepped.and_then(|()| self.catch_up(epoch));
        brake.detach();
        if let Some(executor) = self.shares.get_mut(&epoch).and_then(|share| share.executor()) {
            executor.set_fabric(None);
            executor.set_gate(None);
        }
        stepped.map_err(|error| match (error, self.shares.get(&epoch)) {
            (CrewError::Engine(EngineError::Net(error)), Some(share)) => {
                let first = fabric.as_ref().and_then(|fabric| fabric.failure()).unwrap_or(error);
                share.peers.failure(first, fabric.as_deref())
            }
            (error, _) => error,
        })
    }

    /// Waits for what the last step left under way; how that failed is how the run did.
    fn catch_up(&mut self, epoch: Epoch) -> Result {
        let executor = self.shares.get_mut(&epoch).and_then(|share| share.executor());
        executor.map_or(Ok(()), |executor| Ok(executor.catch_up()?))
    }

    fn step_on(
        &mut self,
        epoch: Epoch,
        bounds: &mut Bounds,
        brake: &Brake,
        later: &mut Vec<EngineCommand>,
    ) -> Result {
        let plan = self.shares[&epoch].plan.clone();
        let chain = self.assembled()?.chain.clone();
        let layout = Layout::new(&plan, &chain);
        let layout = needs_table(&layout, &self.shares[&epoch].program).then_some(&layout);
        let order = order_of(self.assembled()?);
        self.make_up(epoch)?;
        let played = self.assembled()?.paced.as_ref().map(|paced| paced(&plan, &self.shares[&epoch].program));
        let mut stretch = Stretch::new(played);
        loop {
            if self.saves_now() {
                self.catch_up(epoch)?;
            }
            self.save_if_there();
            let assembled = self.assembled.as_ref().ok_or(CrewError::Stopped)?;
            let share = self.shares.get_mut(&epoch).ok_or(CrewError::Stopped)?;
            if brake.is_pulled() || bounds.is_over(share.step) {
                return Ok(());
            }
            let (step, loss_scale) = (share.step, share.loss_scale);
            let every = assembled.timed_every.max(1);
            let times = self.crewed.slowness.times();
            let timed = step.is_multiple_of(every) || stretch.lacks(times);
            let terms = terms_of(assembled, &order);
            share.began = Instant::now();
            let program = share.program.clone();
            let executor = share.executor().ok_or(CrewError::Stopped)?;
            executor.set_traces(timed);
            if let Some(durations) = stretch.change(times) {
                executor.set_pace(durations);
            }
            let work = Work { plan: &plan, program: &program, layout, tells: None };
            let outcome = terms.train(executor, work, step, loss_scale)?;
            if stretch.lacks(times) {
                // What is stretched is all that was timed.
                executor.catch_up()?;
            }
            let traced = executor.take_traced();
            // Others hear where this worker's slices stand after each step. Updates in other memories go on beside the next.
            let standing = executor.standing_so_far()?;
            let record = share.complete(&terms, &outcome);
            let own = timed.then(|| OwnWork::of(&program, &traced));
            if timed {
                stretch.learn(&program, &traced);
            }
            if let Some(own) = &own {
                let spent = own.spent(record.step_ms, share.bubble, every);
                share.spent.add(&spent);
            }
            let pace = own.zip(share.work_ms).map(|(own, work_ms)| (step, percent(own.total_ms(), work_ms)));
            let spent = share.spent;
            // Before anyone hears of the step, so that its line is whole when it counts.
            self.measure(epoch, record)?;
            self.tell(EngineEvent::Moved { epoch, standing, pace, spent });
            self.look(epoch, bounds, brake, later);
        }
    }

    /// Says where the slices stand, and why it ended.
    fn end_run(&mut self, epoch: Epoch, ran: Result, brake: &Brake) {
        let culprit = ran.as_ref().err().and_then(CrewError::culprit);
        self.tell_dead_end(epoch, ran.as_ref().err());
        if let Err(error) = &ran
            && !brake.is_pulled()
        {
            self.note(Some(epoch), format!("stopped: {error}"), false);
            self.failed = error.keeps_from_running();
        }
        match self.last_standing(epoch) {
            Ok(standing) => {
                self.tell(EngineEvent::Halted { epoch, standing, culprit: blamed(culprit, brake) })
            }
            Err(error) => self.note(Some(epoch), format!("where the state stands is unknown: {error}"), true),
        }
        self.save_if_there();
    }

    /// Where the slices stand. A step whose updates were all applied here counts, though its end was not seen.
    fn last_standing(&mut self, epoch: Epoch) -> Result<Standing> {
        let share = self.shares.get_mut(&epoch).ok_or(CrewError::Stopped)?;
        let standing = share.executor().ok_or(CrewError::Stopped)?.standing()?;
        if standing.step > share.step
            && let Some(closing) = standing.closing
        {
            self.complete_by(epoch, &closing);
        }
        Ok(standing)
    }
}

/// One that was told to stop blames nobody.
fn blamed(culprit: Option<WorkerId>, brake: &Brake) -> Option<WorkerId> {
    culprit.filter(|_| !brake.is_pulled())
}

/// What this worker's own work took in a step: what its device computed, which is what plans foresee of it.
struct OwnWork {
    useful_ms: f64,
    recompute_ms: f64,
}

impl OwnWork {
    fn of(program: &Program, traced: &[Traced]) -> OwnWork {
        let mut own = OwnWork { useful_ms: 0.0, recompute_ms: 0.0 };
        let by_id: HashMap<u32, &Instruction> =
            program.instructions.iter().map(|next| (next.id, next)).collect();
        // Instructions that reach the device as one call are all noted with its whole time.
        let mut counted_until = f64::NEG_INFINITY;
        for Traced { id, start, end } in traced {
            let Some(next) = by_id.get(id).filter(|next| next.lane == Lane::Compute) else { continue };
            let took_ms = 1e3 * (end - start.max(counted_until)).max(0.0);
            counted_until = end.max(counted_until);
            match next.op {
                Op::Recompute { .. } => own.recompute_ms += took_ms,
                _ => own.useful_ms += took_ms,
            }
        }
        own
    }

    fn total_ms(&self) -> f64 {
        self.useful_ms + self.recompute_ms
    }

    /// Where a step's time went; those that were not timed are taken for like this one. Waiting is not told apart by what it
    /// was for. The plan has foreseen that so much of a step is a bubble: of what was waited, that is one, and what is more
    /// was waiting for something to move.
    fn spent(&self, step_ms: f64, bubble: f64, steps: u64) -> Spent {
        let whole = |ms: f64| (ms * steps as f64).round() as u64;
        let waited_ms = (step_ms - self.total_ms()).max(0.0);
        Spent {
            useful_ms: whole(self.useful_ms),
            recompute_ms: whole(self.recompute_ms),
            bubble_ms: whole(waited_ms.min(bubble * step_ms)),
        }
    }
}

fn percent(took_ms: f64, predicted_ms: f64) -> u32 {
    (100.0 * took_ms / predicted_ms).round().clamp(1.0, f64::from(u32::MAX)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_reached_the_device_as_one_call_is_counted_once() {
        let instruction = |id: u32, lane, op| Instruction { id, lane, op, after: Vec::new(), ahead: 0 };
        let update = |tensor| Op::Update { tensor, at: shoal_plan::Tier::Device };
        let program = Program {
            format: shoal_plan::table::FORMAT,
            purpose: shoal_plan::Purpose::Train,
            device: 0,
            instructions: vec![
                instruction(0, Lane::Compute, Op::SumLoss),
                instruction(1, Lane::Network, Op::GradientNorm),
                instruction(2, Lane::Compute, update(0)),
                instruction(3, Lane::Compute, update(1)),
                instruction(4, Lane::Host, update(2)),
            ],
        };
        let traced = |id, start, end| Traced { id, start, end };
        let course = [
            traced(0, 1.0, 1.5),
            traced(1, 1.5, 9.0),
            traced(2, 9.0, 9.25),
            traced(3, 9.0, 9.25),
            traced(4, 9.0, 12.0),
        ];
        let own = OwnWork::of(&program, &course);
        assert_eq!((own.useful_ms, own.recompute_ms), (750.0, 0.0));
    }

    #[test]
    fn of_what_was_waited_the_foreseen_part_is_a_bubble() {
        let own = OwnWork { useful_ms: 50.0, recompute_ms: 10.0 };
        let bubble_ms = |step_ms, bubble| own.spent(step_ms, bubble, 2).bubble_ms;
        let spent = Spent { useful_ms: 100, recompute_ms: 20, bubble_ms: 50 };
        assert_eq!(own.spent(100.0, 0.25, 2), spent, "of 40 ms, 25 were foreseen");
        assert_eq!(bubble_ms(100.0, 0.5), 80, "no more than was waited");
        assert_eq!(bubble_ms(200.0, 0.25), 100, "a share of the step, however long it was");
        assert_eq!((bubble_ms(100.0, 0.0), bubble_ms(55.0, 0.5)), (0, 0));
    }
}
