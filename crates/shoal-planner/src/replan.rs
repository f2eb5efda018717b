//! A plan anew, for the machines that are there now and the pace that they were seen to have. One call answers all that a
//! controller asks: the table, what a step of it takes, and how long training pauses while state moves there.
//!
//! Of plans that are about as fast as the best, the one is taken to which the shortest pause leads. Equal machines are
//! given those places of a table whose state they have already (`seats`), what moves then is the difference of the two
//! tables over the fleet's links ([`moving`]), and the plan in force stands for election too, if all its devices still do.

pub mod moving;
mod seats;

use std::panic::resume_unwind;
use std::thread;

use shoal_fleet::pace::paced;
use shoal_plan::{MemoryForecast, Plan, StepShape};

use crate::auto::{self, AutoError, Candidate, Request, Shape};
use crate::{device_rows, leeway};
use moving::Moving;

/// Plans whose steps take so much of the best one's are as good.
const AS_GOOD: f64 = 1.02;

/// A plan whose state is there. Devices are the same in two plans if they have the same name.
#[derive(Clone, Copy)]
pub struct InForce<'a> {
    pub plan: &'a Plan,
    /// By device of that plan: whether it is still there with what it held. It need not be one of the new plan's.
    pub alive: &'a [bool],
}

impl InForce<'_> {
    /// Its devices that still have their state.
    fn is_there(&self, name: &str) -> bool {
        let rows = self.plan.devices.iter().zip(self.alive);
        rows.into_iter().any(|(row, alive)| *alive && row.name == name)
    }
}

pub struct Replanned {
    /// Its devices are the fleet's, in their order.
    pub plan: Plan,
    /// None where the plan in force goes on as it is.
    pub shape: Option<Shape>,
    /// Of a step, by the simulator.
    pub step_seconds: f64,
    pub moving: Moving,
    /// Of a step of the plan in force, on the devices as they are now; none where it cannot go on.
    pub staying_seconds: Option<f64>,
    /// Machines that may be lost at once without taking state with them: fewer than asked for where there are not so many
    /// machines, or not so much memory.
    pub survives: usize,
    /// By device.
    pub memory: Vec<MemoryForecast>,
}

/// The best plan for the fleet's devices, each of which takes so many hundredths of what its kind does.
///
/// # Panics
/// If there is not a pace for every device of the fleet, or not a word on every device of the plan in force.
pub fn replan(
    request: &Request,
    pace_percent: &[u32],
    in_force: Option<InForce>,
) -> Result<Replanned, AutoError> {
    if let Some(in_force) = &in_force {
        assert_eq!(in_force.plan.devices.len(), in_force.alive.len(), "a word on every device");
    }
    let (fleet, costs) = paced(request.fleet, request.costs, pace_percent);
    let request = Request { fleet: &fleet, costs: &costs, ..*request };
    auto::as_many(&request, |request| surviving(request, in_force))
}

/// The same with just so many mirrors.
fn surviving(request: &Request, in_force: Option<InForce>) -> Result<Replanned, AutoError> {
    let fleet = request.fleet;
    let seated = |plan| match &in_force {
        Some(in_force) => seats::seated(plan, fleet, in_force),
        None => (plan, None),
    };
    // Searches do not keep all cores busy all the time.
    let (searched, stays) = thread::scope(|scope| {
        let stays = in_force.map(|in_force| scope.spawn(move || staying(request, &in_force)));
        let searched = auto::candidates(request, AS_GOOD, &seated);
        let stays = stays.map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
        (searched, stays.flatten())
    });
    let (mut options, mut tried) = (Vec::new(), Vec::new());
    for (shape, found) in searched? {
        match found {
            Ok(candidates) => options.extend(candidates.into_iter().map(|one| (Some(shape), one))),
            Err(refused) => tried.push(auto::Tried { shape, seconds: None, refused: Some(refused) }),
        }
    }
    chosen(request, in_force, options, stays).ok_or(AutoError::Nothing { tried })
}

/// The same where a plan is known already that was made for such a fleet: as many devices of the same kinds and paces, in the
/// same order, whatever they are called. Nothing is searched. None where it does not fit.
///
/// # Panics
/// As [`replan`] does.
pub fn replan_as(
    request: &Request,
    pace_percent: &[u32],
    in_force: Option<InForce>,
    known: &Plan,
) -> Option<Replanned> {
    let (fleet, costs) = paced(request.fleet, request.costs, pace_percent);
    if known.devices.len() != fleet.devices.len() {
        return None;
    }
    let request = Request { fleet: &fleet, costs: &costs, ..*request };
    let places: Vec<usize> = (0..fleet.devices.len()).collect();
    let plan = seats::moved(known, device_rows(&fleet), &places);
    let plan = match &in_force {
        Some(in_force) => seats::seated(plan, &fleet, in_force).0,
        None => plan,
    };
    let rated = auto::rated(Shape::Mixed, &plan, &request).ok()?;
    let stays = in_force.and_then(|in_force| staying(&request, &in_force));
    chosen(&request, in_force, vec![(None, rated)], stays)
}

/// Of plans about as fast as the best, the plan in force among them, the one that the shortest pause leads to.
fn chosen(
    request: &Request,
    in_force: Option<InForce>,
    mut options: Vec<(Option<Shape>, Candidate)>,
    stays: Option<Candidate>,
) -> Option<Replanned> {
    let Request { fleet, survive, .. } = *request;
    let seconds = |candidate: &Candidate| candidate.simulated.seconds;
    let staying_seconds = stays.as_ref().map(seconds);
    options.extend(stays.map(|stays| (None, stays)));
    let best = options.iter().map(|(_, candidate)| seconds(candidate)).fold(f64::INFINITY, f64::min);
    let as_good = options.into_iter().filter(|(_, candidate)| seconds(candidate) <= AS_GOOD * best);
    let chosen = as_good
        .map(|(shape, candidate)| (moving::between(in_force, &candidate.plan, fleet), shape, candidate))
        .min_by(|(moves, _, one), (others, _, other)| {
            moves.seconds.total_cmp(&others.seconds).then(seconds(one).total_cmp(&seconds(other)))
        });
    let (moving, shape, candidate) = chosen?;
    let Candidate { plan, simulated, memory, .. } = leeway::given(candidate, request);
    let step_seconds = simulated.seconds;
    Some(Replanned { plan, shape, step_seconds, moving, staying_seconds, survives: survive, memory })
}

/// The plan in force on the devices as they are now, with mirrors for what lacks them.
fn staying(request: &Request, in_force: &InForce) -> Option<Candidate> {
    let Request { chain, step, fleet, .. } = *request;
    let Plan { global_batch, sequence, precision, optimizer_states, gradients, .. } = *in_force.plan;
    let found = StepShape { global_batch, sequence, precision, optimizer_states, gradients };
    if found != step || in_force.plan.check(chain).is_err() {
        return None;
    }
    let place = |name: &String| fleet.devices.iter().position(|device| device.name == *name);
    let names =
        in_force.plan.devices.iter().map(|row| Some(&row.name).filter(|name| in_force.is_there(name)));
    let places: Vec<usize> = names.map(|name| place(name?)).collect::<Option<_>>()?;
    let plan = seats::moved(in_force.plan, device_rows(fleet), &places);
    // Which shape it was does not matter any more.
    auto::rated(Shape::Mixed, &plan, request).ok()
}
