//! How a share comes to be: room for what the table gives this worker, then its content, made new, read from a checkpoint,
//! or brought from those who have it.

use std::sync::Arc;
use std::time::Instant;

use shoal_control::message::{Checkpoint, Epoch, Installation, Source, Spent, WorkerId};
use shoal_engine::stepping::Evaluation;
use shoal_engine::{EngineError, Executor, LossScale, ModelState};
use shoal_model::Precision;
use shoal_net::Fabric;
use shoal_plan::{Layout, Plan, Program, compile, verify};

use crate::assembly::Assembled;
use crate::brake::Brake;
use crate::error::{CrewError, Result, lacks_room};
use crate::hands::Hands;
use crate::peers::{Peers, Purpose, own_id};
use crate::save::save_number;
use crate::share::{Body, Share};
use crate::table::Table;
use crate::transfer::{Filling, Transfer};

/// A device whose own work is foreseen to be less of a step than this is not judged by it: what so little takes says more of
/// who else was on the processor.
const JUDGED_SHARE_MIN: f64 = 0.05;

/// What is known of a share before it has any state.
struct Frame {
    plan: Arc<Plan>,
    plan_id: String,
    peers: Peers,
    program: Arc<Program>,
    work_ms: Option<f64>,
    bubble: f64,
}

/// Those between whom state passes, connected.
struct Meeting {
    /// The plan that they have and the one that they are to have.
    tables: [Plan; 2],
    transfer: Transfer,
    peers: Peers,
    fabric: Option<Arc<Fabric>>,
}

impl Hands {
    /// Gets this worker's share of a plan; none where it only has something that others need.
    pub(crate) fn try_install(
        &mut self,
        epoch: Epoch,
        installation: &Installation,
        brake: &Brake,
    ) -> Result<Option<Share>> {
        let own = own_id(&self.crewed.setup.about, &installation.abouts)?;
        // Those who have the state are met first: they then wait for as long as this worker takes to get ready.
        let meeting = self.meet(epoch, installation, own, brake)?;
        let installed = self.install_share(installation, own, meeting.as_ref());
        if let (Err(error), Some(Meeting { fabric: Some(fabric), .. })) = (&installed, &meeting) {
            fabric.abort(&error.to_string());
        }
        brake.detach();
        installed
    }

    fn install_share(
        &mut self,
        installation: &Installation,
        own: WorkerId,
        meeting: Option<&Meeting>,
    ) -> Result<Option<Share>> {
        self.assemble(&installation.description)?;
        let frame = self.frame(installation, own)?;
        let mut state = frame.as_ref().map(|frame| self.allocate(frame)).transpose()?;
        let plan = frame.as_ref().map(|frame| &frame.plan);
        let loss_scale = match (&installation.source, meeting) {
            (Source::Fresh, _) => self.fill_fresh(plan, &mut state)?,
            (Source::Checkpoint(checkpoint), _) => self.fill_saved(*checkpoint, plan, &mut state)?,
            (Source::Held { epoch, step, .. }, Some(meeting)) => {
                self.fill_held((*epoch, *step), meeting, &mut state)?
            }
            (Source::Held { .. }, None) => return Err(CrewError::Stopped),
        };
        let (Some(frame), Some(state)) = (frame, state) else { return Ok(None) };
        let assembled = self.assembled()?;
        let (tiers, chain) = (assembled.tiers.clone(), assembled.chain.clone());
        let mut executor = Executor::with(tiers, None, chain, frame.plan.sequence, state)?;
        executor.set_replay(assembled.replay);
        if let Some(paced) = &assembled.paced {
            executor.set_pace(paced(&frame.plan, &frame.program));
        }
        let Frame { plan, plan_id, peers, program, work_ms, bubble } = frame;
        Ok(Some(Share {
            plan,
            plan_id,
            peers,
            abouts: installation.abouts.clone(),
            evaluation: Evaluation::new(program.device),
            program,
            work_ms,
            bubble,
            predicted_ms: installation.plan.step_ms,
            step: installation.source.step(),
            loss_scale,
            spent: Spent::default(),
            began: Instant::now(),
            body: Body::Executor(Box::new(executor)),
        }))
    }

    /// This worker's part of the plan; none where it has none.
    fn frame(&self, installation: &Installation, own: WorkerId) -> Result<Option<Frame>> {
        let Some(index) = installation.plan.place(own) else { return Ok(None) };
        let table = Table::of(&installation.plan)?;
        let chain = &self.assembled()?.chain;
        let plan_id = table.plan.id();
        let plan = table.named(&installation.plan.members);
        let mut programs = compile(&plan, chain, shoal_plan::Purpose::Train).map_err(EngineError::from)?;
        let program = programs.swap_remove(index);
        verify(&program, &plan, chain, shoal_plan::Purpose::Train).map_err(EngineError::from)?;
        if program.instructions.is_empty() {
            return Err(CrewError::Table { what: "it gives this worker nothing to do".into() });
        }
        let least_ms = JUDGED_SHARE_MIN * installation.plan.step_ms as f64;
        let work_ms =
            table.work_ms.get(index).copied().filter(|work_ms| *work_ms > 0.0 && *work_ms >= least_ms);
        let bubble = table.bubbles.get(index).copied().unwrap_or(0.0).clamp(0.0, 1.0);
        let peers = Peers::new(installation.plan.members.clone(), own)?;
        Ok(Some(Frame { plan: plan.into(), plan_id, peers, program: program.into(), work_ms, bubble }))
    }

    /// Room for a share, if need be where other shares of the job were: these then wait in the host's memory.
    fn allocate(&mut self, frame: &Frame) -> Result<ModelState> {
        let room = |assembled: &Assembled| {
            let layout = Layout::new(&frame.plan, &assembled.chain);
            let optimizer = Some(&assembled.optimizer);
            ModelState::allocate_share(&assembled.tiers, &layout, frame.peers.rank, optimizer)
        };
        let assembled = self.assembled.as_ref().ok_or(CrewError::Stopped)?;
        match room(assembled) {
            Err(error) if lacks_room(&error) && !self.shares.is_empty() => {
                for (epoch, share) in &mut self.shares {
                    share.park(&assembled.chain)?;
                    let sentence = "its state waits in host memory, to make room for the next plan's";
                    self.crewed.note(self.job, Some(*epoch), sentence.to_owned(), false);
                }
                Ok(room(assembled)?)
            }
            other => Ok(other?),
        }
    }

    fn fill_fresh(
        &mut self,
        plan: Option<&Arc<Plan>>,
        state: &mut Option<ModelState>,
    ) -> Result<Option<LossScale>> {
        let assembled = self.assembled.as_mut().ok_or(CrewError::Stopped)?;
        let Assembled { tiers, chain, initial, .. } = assembled;
        if let Some(state) = state {
            state.load(tiers, chain, &[], 0, |spec, _, out| initial(spec, out))?;
        }
        Ok(plan.and_then(|plan| scaled(plan)).map(|()| LossScale::default()))
    }

    fn fill_saved(
        &mut self,
        checkpoint: Checkpoint,
        plan: Option<&Arc<Plan>>,
        state: &mut Option<ModelState>,
    ) -> Result<Option<LossScale>> {
        let Assembled { tiers, chain, optimizer, store, .. } = self.assembled()?;
        let store = store.as_ref().ok_or(CrewError::NoStore)?;
        let unreadable = |source| CrewError::Checkpoint { step: checkpoint.step, source };
        let saved = store.load_save(checkpoint.step, save_number(checkpoint.id)).map_err(unreadable)?;
        if let Some(state) = state {
            let states = optimizer.state_names();
            let loaded =
                state.load_ranges(tiers, chain, states, checkpoint.step, |spec, role, range, out| {
                    Ok(saved.read(&spec.name, role, range, out)?)
                });
            loaded.map_err(|error| match error {
                EngineError::State(source) => unreadable(source),
                other => other.into(),
            })?;
        }
        Ok(plan.and_then(|plan| scaled(plan)).map(|()| LossScale::restore(&saved.header().extra)))
    }

    /// Connects those between whom state passes; none where it comes from elsewhere.
    fn meet(
        &self,
        epoch: Epoch,
        installation: &Installation,
        own: WorkerId,
        brake: &Brake,
    ) -> Result<Option<Meeting>> {
        let Source::Held { epoch: from, plan, step, alive } = &installation.source else { return Ok(None) };
        match self.shares.get(from) {
            Some(share) => share.expect_at(*from, *step)?,
            None if alive.contains(&own) => {
                let what = "this worker does not have it any more".to_owned();
                return Err(CrewError::NotHeld { epoch: from.0, step: *step, what });
            }
            None => {}
        }
        let before = Table::of(plan)?.named(&plan.members);
        let after = Table::of(&installation.plan)?.named(&installation.plan.members);
        let transfer = Transfer::new(&before, (&after, &installation.plan.members), alive, own)?;
        let concerned = transfer.concerned();
        let peers = match concerned.contains(&own) {
            true => Peers::new(concerned, own)?,
            false => Peers::new(vec![own], own)?,
        };
        let key = (self.job, epoch, Purpose::Install);
        let partners = transfer.partners().into_iter().filter_map(|worker| peers.rank_of(worker)).collect();
        let fabric = peers.connect(&self.crewed, key, partners, &installation.abouts, brake)?;
        Ok(Some(Meeting { tables: [before, after], transfer, peers, fabric }))
    }

    fn fill_held(
        &mut self,
        (from, step): (Epoch, u64),
        meeting: &Meeting,
        state: &mut Option<ModelState>,
    ) -> Result<Option<LossScale>> {
        let assembled = self.assembled()?;
        for table in &meeting.tables {
            table.check(&assembled.chain).map_err(|error| CrewError::Table { what: error.to_string() })?;
        }
        let filling = Filling {
            held: self.shares.get(&from),
            new: state.as_mut().map(|state| (state, &assembled.tiers)),
            chain: &assembled.chain,
            states: assembled.optimizer.state_names(),
            step,
        };
        meeting.transfer.carry_out(meeting.fabric.as_ref(), &meeting.peers, filling)
    }
}

/// Whether losses are scaled under a plan.
fn scaled(plan: &Plan) -> Option<()> {
    (plan.precision == Precision::Fp16).then_some(())
}
