//! The planner behind a controller: reads the job, makes a fleet of those who are there, and plans anew from what is in
//! force.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};

use shoal_control::controller::{Keeping, Proposal};
use shoal_control::message::{self, JobId, NUMBER_MAX, WorkerId};
use shoal_crew::{About, Table, checkpoint_of};
use shoal_fleet::pace::{AS_PROFILED_PERCENT, paced, stretched};
use shoal_fleet::{Costs, Device, Fleet, Profile};
use shoal_model::{Chain, Precision};
use shoal_plan::{Layout, Plan, Purpose, compile_paced};
use shoal_planner::auto::{Request, Shape};
use shoal_planner::breakdown::{self, Breakdown};
use shoal_planner::replan::{InForce, Replanned, replan, replan_as};
use shoal_service::planning::{Candidate, Planner, Question, Unfit};
use shoal_sim::{FleetWorld, Settings, simulate};
use shoal_state::checkpoint::Store;

use super::description::Description;
use super::members::{Members, device_name};
use super::within::Within;
use crate::assemble::step_shape;
use crate::error::{CliError, Result};
use crate::fleet_plan::SURVIVE_DEFAULT;

/// Written into a run folder by the controller that has taken a job for it: its checkpoints are that job's.
const CLAIM: &str = "fleet-job";

pub struct FleetPlanner {
    /// What layers were measured to take; other kinds of devices are estimated.
    profile: Option<Profile>,
    /// Of plans.
    shapes: Vec<Shape>,
    /// Where jobs' files may lie.
    within: Within,
    /// What was found for fleets so far, by what was asked: machines that come and go leave fleets behind that were there
    /// before.
    known: Mutex<HashMap<String, Plan>>,
}

/// How many may be lost or join at once for plans to be known before.
const LOST_MAX: usize = 8;
const JOINED_MAX: u64 = 4;

/// Plans that are remembered; more than that is another life.
const KNOWN_MAX: usize = 1_000;

impl Planner for FleetPlanner {
    fn take(&self, description: &str) -> std::result::Result<(), Unfit> {
        let unfit = |error: CliError| Unfit { why: error.to_string(), hint: error.hint() };
        take(description, &self.within).map_err(unfit)
    }

    fn plan(&self, question: &Question) -> std::result::Result<Proposal, String> {
        self.proposal(question).map_err(said)
    }

    fn foresee(&self, question: &Question, is_free: &dyn Fn() -> bool) {
        for workers in near(&question.workers) {
            if !is_free() {
                return;
            }
            // Where there is no plan, whoever asks hears why.
            let _ = self.look_up(&Question { workers, held: None, ..question.clone() });
        }
    }

    fn keep_checkpoints(
        &self,
        _: JobId,
        description: &str,
        keeping: &Keeping,
    ) -> std::result::Result<(), String> {
        let keep = || -> Result {
            let job = Description::parse(description)?.job(&self.within)?;
            let spares = |number| keeping.spares(checkpoint_of(number));
            Ok(Store::open_existing_at(&job.checkpoints)?.keep_only(spares)?)
        };
        keep().map_err(said)
    }
}

/// Fleets that one may soon become, the likeliest first: without any one of its workers, without several, with more of them.
/// Where machines are alike, one answer is for all that have as many.
fn near(workers: &[Candidate]) -> impl Iterator<Item = Vec<Candidate>> {
    let without_one = (0..workers.len()).map(move |lost| [&workers[..lost], &workers[lost + 1..]].concat());
    let without =
        (2..=LOST_MAX).filter_map(move |lost| Some(workers[..workers.len().checked_sub(lost)?].to_vec()));
    let with = (1..=JOINED_MAX).filter_map(move |joined| {
        let like = workers.last()?;
        let more = (1..=joined).map(|number| newcomer(like, number)).collect::<Option<Vec<Candidate>>>()?;
        Some([workers, &more].concat())
    });
    without_one.chain(without).filter(|workers| !workers.is_empty()).chain(with)
}

/// A worker that may join: a machine of its own, and otherwise like one that is there.
fn newcomer(like: &Candidate, number: u64) -> Option<Candidate> {
    let mut about = About::parse(&like.about).ok()?;
    // Machines stand in the order of their names, and it is as well to stand last.
    about.machine = format!("~{number}");
    let worker = WorkerId(NUMBER_MAX + number);
    Some(Candidate { worker, name: about.machine.clone(), about: about.text(), ..like.clone() })
}

/// For those who are elsewhere: the error and its hint in one sentence.
fn said(error: CliError) -> String {
    match error.hint() {
        Some(hint) => format!("{error} (hint: {hint})"),
        None => error.to_string(),
    }
}

/// Reads a job and claims its run folder: two jobs' checkpoints must not meet.
fn take(description: &str, within: &Within) -> Result {
    let job = Description::parse(description)?.new_job(within)?;
    let folder = &job.run_folder;
    std::fs::create_dir_all(folder).map_err(CliError::at(folder))?;
    let store = Store::open_at(&job.checkpoints)?;
    let used = || {
        let hint = "choose another with checkpoint.to";
        CliError::said(format!("{}: the run folder is another job's already", folder.display()), hint)
    };
    if !store.list()?.is_empty() {
        return Err(used());
    }
    let path = folder.join(CLAIM);
    let claimed = OpenOptions::new().write(true).create_new(true).open(&path);
    let mut file = claimed.map_err(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => used(),
        _ => CliError::at(&path)(error),
    })?;
    writeln!(file, "{}", job.name).map_err(CliError::at(&path))
}

impl FleetPlanner {
    pub fn new(profile: Option<Profile>, shapes: Vec<Shape>, within: Within) -> FleetPlanner {
        FleetPlanner { profile, shapes, within, known: Mutex::default() }
    }

    /// The best plan, searched only where it was not for a fleet just like this.
    fn found(
        &self,
        question: &Question,
        members: &Members,
        request: &Request,
        in_force: Option<InForce>,
    ) -> Result<Replanned> {
        let key = key(question, members);
        let known = self.known().get(&key).cloned();
        let again = known.and_then(|plan| replan_as(request, &members.pace_percent, in_force, &plan));
        if let Some(again) = again {
            return Ok(again);
        }
        let found = replan(request, &members.pace_percent, in_force)
            .map_err(|error| CliError::said(error.to_string(), error.hint()))?;
        let mut known = self.known();
        if known.len() >= KNOWN_MAX {
            known.clear();
        }
        known.insert(key, found.plan.clone());
        Ok(found)
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, Plan>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sees to it that the plan for a fleet is known.
    fn look_up(&self, question: &Question) -> Result {
        let job = Description::parse(&question.description)?.job(&self.within)?;
        let members = Members::new(&question.workers, job.precision.name())?;
        if !self.known().contains_key(&key(question, &members)) {
            self.proposal(question)?;
        }
        Ok(())
    }

    fn proposal(&self, question: &Question) -> Result<Proposal> {
        let job = Description::parse(&question.description)?.job(&self.within)?;
        let chain = job.chain();
        let members = Members::new(&question.workers, job.precision.name())?;
        let costs = Costs::new(&chain, &members.fleet, self.profile.as_ref(), job.precision, job.sequence)?;
        let (fleet, costs) = self.rated(&members, &costs, job.precision);
        let (fleet, costs) = stretched(&fleet, &costs, members.stretch);
        let held = question.held.as_ref().map(|(plan, alive)| held(plan, alive)).transpose()?;
        let in_force = held.as_ref().map(|(plan, alive)| InForce { plan, alive });
        let survive = job.survive.unwrap_or(SURVIVE_DEFAULT);
        let shapes = &self.shapes;
        let request = Request { survive, shapes, ..Request::new(&chain, step_shape(&job), &fleet, &costs) };
        let found = self.found(question, &members, &request, in_force)?;
        let usual = step_of(&found.plan, &chain, &fleet, &costs)?;
        let work_ms = usual.iter().map(|device| 1e3 * device.busy()).collect();
        let (fleet, costs) = paced(&fleet, &costs, &members.pace_percent);
        let foreseen = step_of(&found.plan, &chain, &fleet, &costs)?;
        let share = |device: &Breakdown| device.bubble / device.seconds().max(f64::MIN_POSITIVE);
        let bubbles = foreseen.iter().map(share).collect();
        let move_ms = milliseconds(found.moving.seconds);
        let table = Table { plan: found.plan, work_ms, bubbles };
        let plan = table.message(&members.workers, milliseconds(found.step_seconds).max(1));
        let staying_ms = found.staying_seconds.map(milliseconds);
        Ok(Proposal { plan, move_ms, staying_ms })
    }

    /// Devices as quick as they were measured to be, where their kinds were not profiled.
    fn rated(&self, members: &Members, costs: &Costs, precision: Precision) -> (Fleet, Costs) {
        let profiled = |kind: &str| {
            self.profile.as_ref().is_some_and(|profile| profile.device(kind, precision).is_some())
        };
        let devices = members.fleet.devices.iter().zip(&members.rated_percent);
        let percent = |(device, rated): (&Device, &u32)| match profiled(&device.kind) {
            true => AS_PROFILED_PERCENT,
            false => *rated,
        };
        let percent: Vec<u32> = devices.map(percent).collect();
        paced(&members.fleet, costs, &percent)
    }
}

/// What a plan depends on: of a fleet just like another one it is the same.
fn key(question: &Question, members: &Members) -> String {
    format!("{}\n{:?}", question.description, members.likeness())
}

fn milliseconds(seconds: f64) -> u64 {
    (seconds * 1e3).ceil() as u64
}

/// The table in force, by the names that this planner gives devices, and who of it is there.
fn held(plan: &message::Plan, alive: &[message::WorkerId]) -> Result<(Plan, Vec<bool>)> {
    let table =
        Table::of(plan).map_err(|error| CliError::said(error.to_string(), "is it of this version?"))?;
    let mut table = table.plan;
    for (device, worker) in table.devices.iter_mut().zip(&plan.members) {
        device.name = device_name(*worker);
    }
    let alive = plan.members.iter().map(|worker| alive.contains(worker)).collect();
    Ok((table, alive))
}

/// Where each device's part of a step goes, on a virtual clock. At its usual pace own work takes what workers measure theirs
/// against; at the pace that it was seen to have, a bubble is what the plan expects.
fn step_of(plan: &Plan, chain: &Chain, fleet: &Fleet, costs: &Costs) -> Result<Vec<Breakdown>> {
    let layout = Layout::new(plan, chain);
    let world = FleetWorld::new(fleet, costs, &layout);
    let programs = compile_paced(plan, chain, Purpose::Train, &world)?;
    let simulated = simulate(&programs, &layout, &world, Settings::default())?;
    Ok(breakdown::of(&programs, &simulated, &layout)?)
}
