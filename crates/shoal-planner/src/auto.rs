//! The best of all shapes. Each search proposes a table by its own model; all are then played through on the same clock
//! and held to the same memory, and the fastest that fits wins.

use std::sync::{Mutex, PoisonError};

use serde::Serialize;
use shoal_fleet::{Costs, Fleet};
use shoal_model::Chain;
use shoal_plan::memory::{MemoryForecast, forecasts};
use shoal_plan::one_device::StepShape;
use shoal_plan::{Layout, Plan, Purpose, compile_in, parallel};
use shoal_sim::{FleetWorld, Settings, Simulated, simulate};
use thiserror::Error;

use crate::bound::least_seconds;
use crate::mirrors::MirrorError;
use crate::mixed::{MixedPlanned, PlayError};
use crate::pipeline::{self, PipelineWanted};
use crate::usual::{self, State};
use crate::{burst, improve, leeway, mirrors, mixed, sharded, spilled};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Shape {
    Pipeline,
    Sharded,
    Burst,
    Mixed,
    Spilled,
    /// Equal samples, equal slices of the state.
    Even,
    /// Equal samples, all of the state for everyone.
    #[serde(rename = "data-parallel")]
    DataParallel,
}

impl Shape {
    /// Those that are searched.
    pub const ALL: [Shape; 5] = [Shape::Pipeline, Shape::Sharded, Shape::Burst, Shape::Mixed, Shape::Spilled];
    /// What is run where nobody plans: only what is asked for by name.
    pub const USUAL: [Shape; 2] = [Shape::Even, Shape::DataParallel];

    pub fn name(self) -> &'static str {
        match self {
            Shape::Pipeline => "pipeline",
            Shape::Sharded => "sharded",
            Shape::Burst => "burst",
            Shape::Mixed => "mixed",
            Shape::Spilled => "spilled",
            Shape::Even => "even",
            Shape::DataParallel => "data-parallel",
        }
    }

    pub fn named(name: &str) -> Option<Shape> {
        Shape::ALL.into_iter().chain(Shape::USUAL).find(|shape| shape.name() == name)
    }
}

/// A table, played through.
#[derive(Clone)]
pub struct Candidate {
    pub shape: Shape,
    pub plan: Plan,
    pub simulated: Simulated,
    /// By device.
    pub memory: Vec<MemoryForecast>,
}

/// What became of a shape.
#[derive(Clone, Debug, Serialize)]
pub struct Tried {
    pub shape: Shape,
    /// Of a step, where it has a plan that fits.
    pub seconds: Option<f64>,
    /// Why there is none.
    pub refused: Option<String>,
}

pub struct Found {
    pub best: Candidate,
    /// All shapes, the fastest first.
    pub tried: Vec<Tried>,
    /// What a step of the best took before it was made better, where it was.
    pub improved_from_seconds: Option<f64>,
    /// Machines that may be lost at once without taking state with them.
    pub survives: usize,
}

#[derive(Debug, Error)]
pub enum AutoError {
    #[error("the fleet has no device")]
    NoDevice,
    #[error("no plan of any shape fits this fleet: {}", reasons(.tried))]
    Nothing { tried: Vec<Tried> },
    #[error(transparent)]
    Mirrors(#[from] MirrorError),
}

impl AutoError {
    pub fn hint(&self) -> String {
        match self {
            AutoError::Mirrors(error) => error.hint(),
            AutoError::NoDevice | AutoError::Nothing { .. } => {
                "add devices or host memory to the fleet, shorten data.sequence, or choose a smaller model"
                    .into()
            }
        }
    }
}

fn reasons(tried: &[Tried]) -> String {
    let said = tried
        .iter()
        .map(|tried| format!("{} ({})", tried.shape.name(), tried.refused.as_deref().unwrap_or("too slow")));
    said.collect::<Vec<_>>().join("; ")
}

/// What is to be trained on what.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    pub chain: &'a Chain,
    pub step: StepShape,
    pub fleet: &'a Fleet,
    pub costs: &'a Costs,
    pub shapes: &'a [Shape],
    /// Machines that may be lost at once without taking any state with them: so many mirrors are planned with.
    pub survive: usize,
    /// Instructions that may be played through to make the best plan better; about a million a second on one core.
    pub improve_instructions: usize,
}

impl<'a> Request<'a> {
    /// Every shape, without mirrors, the best as its search has it.
    pub fn new(chain: &'a Chain, step: StepShape, fleet: &'a Fleet, costs: &'a Costs) -> Request<'a> {
        Request { chain, step, fleet, costs, shapes: &Shape::ALL, survive: 0, improve_instructions: 0 }
    }
}

/// The fastest plan of some shapes.
pub fn plan(request: &Request) -> Result<Found, AutoError> {
    // What every shape takes is of interest.
    let searched = candidates(request, f64::INFINITY, &|plan| (plan, None))?;
    let mut best: Option<Candidate> = None;
    let mut tried = Vec::new();
    for (shape, found) in searched {
        match found.and_then(|candidates| quickest(candidates).ok_or_else(|| NOTHING.to_owned())) {
            Ok(candidate) => {
                let seconds = candidate.simulated.seconds;
                if best.as_ref().is_none_or(|best| seconds < best.simulated.seconds) {
                    best = Some(candidate);
                }
                tried.push(Tried { shape, seconds: Some(seconds), refused: None });
            }
            Err(refused) => tried.push(Tried { shape, seconds: None, refused: Some(refused) }),
        }
    }
    tried.sort_by(|a, b| {
        let seconds = |tried: &Tried| tried.seconds.unwrap_or(f64::INFINITY);
        seconds(a).total_cmp(&seconds(b))
    });
    match best {
        Some(found) => {
            let before = found.simulated.seconds;
            // What people run who do not plan stays what they run.
            let best = match Shape::USUAL.contains(&found.shape) {
                true => found,
                false => leeway::given(improve(found, request, request.improve_instructions), request),
            };
            let improved_from_seconds = Some(before).filter(|before| best.simulated.seconds < *before);
            Ok(Found { best, tried, improved_from_seconds, survives: request.survive })
        }
        None => Err(AutoError::Nothing { tried }),
    }
}

/// The same, with as many of the losses survived as machines and their memory allow.
pub fn plan_surviving(request: &Request) -> Result<Found, AutoError> {
    as_many(request, plan)
}

/// What can be found for a request, or else for one that survives fewer losses: better that than nothing.
pub(crate) fn as_many<T>(
    request: &Request,
    find: impl Fn(&Request) -> Result<T, AutoError>,
) -> Result<T, AutoError> {
    let mut survive = request.survive.min(request.fleet.nodes.len().saturating_sub(1));
    loop {
        match find(&Request { survive, ..*request }) {
            Err(AutoError::Nothing { .. } | AutoError::Mirrors(_)) if survive > 0 => survive -= 1,
            answer => return answer,
        }
    }
}

const NOTHING: &str = "nothing was proposed";

/// A shape and its tables that fit, or why there is none.
pub(crate) type Searched = (Shape, Result<Vec<Candidate>, String>);

/// Gives a table's places to other devices that are like those which have them; says to which, if to any others.
pub(crate) type Seating<'a> = dyn Fn(Plan) -> (Plan, Option<Vec<usize>>) + Sync + 'a;

/// By shape, every table that its search proposes and that fits, mirrored and its places given away, played through; or why
/// there is none. Those that cannot but take so many times what the best does are left out.
pub(crate) fn candidates(
    request: &Request,
    worst: f64,
    seating: &Seating,
) -> Result<Vec<Searched>, AutoError> {
    let Request { chain, step, fleet, shapes, survive, .. } = *request;
    if fleet.devices.is_empty() {
        return Err(AutoError::NoDevice);
    }
    if survive > 0 && survive >= fleet.nodes.len() {
        return Err(MirrorError::Machines { survive, machines: fleet.nodes.len() }.into());
    }
    let roomy = mirrors::reserved(chain, step, fleet, survive);
    let best = Mutex::new(f64::INFINITY);
    let least = || *best.lock().unwrap_or_else(PoisonError::into_inner);
    let fitting = |method: Method, proposed: Proposed| {
        let mut refused = None;
        let mut fitting = Vec::new();
        for table in proposed.tables {
            match table.rated(method.shape(), request, seating, &|| worst * least()) {
                Ok(Some(candidate)) => {
                    let mut best = best.lock().unwrap_or_else(PoisonError::into_inner);
                    *best = best.min(candidate.simulated.seconds);
                    fitting.push(candidate);
                }
                Ok(None) => {}
                Err(reason) => refused = Some(reason),
            }
        }
        match refused {
            Some(refused) if fitting.is_empty() => Err(refused),
            _ => Ok((fitting, proposed.seconds)),
        }
    };
    let rated = |method: Method, proposed: Result<Proposed, String>, known_seconds: f64| {
        let found = fitting(method, proposed?);
        // Hosts that a plan has filled have no room for mirrors: it is made again with that room left free.
        match (found, &roomy) {
            (Err(_), Some(roomy)) => fitting(method, propose(method, request, roomy, known_seconds)?),
            (found, _) => found,
        }
    };
    let asked = |method: &&Method| shapes.contains(&method.shape());
    let first: Vec<Method> = Method::FIRST.iter().filter(asked).copied().collect();
    let mut found = match worst.is_finite() {
        // Most searches keep one core busy.
        false => parallel::map(&first, |method| {
            (*method, rated(*method, propose(*method, request, fleet, f64::INFINITY), f64::INFINITY))
        }),
        // Beside what a search has played through already, the others' proposals may not be worth it.
        true => {
            let proposed =
                parallel::map(&first, |method| (*method, propose(*method, request, fleet, f64::INFINITY)));
            let is_played = |proposed: &Result<Proposed, String>| {
                proposed.as_ref().is_ok_and(|proposed| proposed.seconds.is_finite())
            };
            let (played, others): (Vec<_>, Vec<_>) =
                proposed.into_iter().partition(|(_, proposed)| is_played(proposed));
            let rated = |(method, proposed)| (method, rated(method, proposed, f64::INFINITY));
            let mut found: Vec<_> = played.into_iter().map(rated).collect();
            found.extend(parallel::map_into(others, rated));
            found
        }
    };
    let seconds = found.iter().filter_map(|(_, found)| found.as_ref().ok()).map(|(_, seconds)| *seconds);
    let known_seconds = seconds.fold(f64::INFINITY, f64::min);
    let second: Vec<Method> = Method::SECOND.iter().filter(asked).copied().collect();
    found.extend(parallel::map(&second, |method| {
        // Where all shapes are of interest, another is no reason to pass one over.
        let known_seconds = match method {
            Method::Mixed if worst == f64::INFINITY => f64::INFINITY,
            _ => known_seconds,
        };
        (*method, rated(*method, propose(*method, request, fleet, known_seconds), known_seconds))
    }));
    let mut searched: Vec<Searched> = shapes.iter().map(|shape| (*shape, Err(NOTHING.to_owned()))).collect();
    for (method, found) in found {
        let Some((_, all)) = searched.iter_mut().find(|(shape, _)| *shape == method.shape()) else {
            continue;
        };
        match (&mut *all, found) {
            (Ok(all), Ok((more, _))) => all.extend(more),
            (Err(_), Ok((more, _))) if !more.is_empty() || method != Method::Singles => *all = Ok(more),
            (Err(reason), Err(refused)) if method != Method::Singles => *reason = refused,
            _ => {}
        }
    }
    Ok(searched)
}

/// A search of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    Pipeline,
    /// One replica in orders and with stashes that the search for replicas does not look at.
    Singles,
    Sharded,
    Burst,
    Mixed,
    Spilled,
    Usual(State),
}

impl Method {
    const FIRST: [Method; 6] = [
        Method::Pipeline,
        Method::Sharded,
        Method::Burst,
        Method::Spilled,
        Method::Usual(State::InEqualSlices),
        Method::Usual(State::Everyone),
    ];
    /// Those that are told what a pipeline takes.
    const SECOND: [Method; 2] = [Method::Mixed, Method::Singles];

    fn shape(self) -> Shape {
        match self {
            Method::Pipeline | Method::Singles => Shape::Pipeline,
            Method::Sharded => Shape::Sharded,
            Method::Burst => Shape::Burst,
            Method::Mixed => Shape::Mixed,
            Method::Spilled => Shape::Spilled,
            Method::Usual(State::InEqualSlices) => Shape::Even,
            Method::Usual(State::Everyone) => Shape::DataParallel,
        }
    }
}

/// A search's own best tables.
struct Proposed {
    tables: Vec<Table>,
    /// Of a step, where the search has played it through.
    seconds: f64,
}

impl Proposed {
    fn unplayed(plans: Vec<Plan>) -> Proposed {
        let tables = plans.into_iter().map(|plan| Table { plan, played: None });
        Proposed { tables: tables.collect(), seconds: f64::INFINITY }
    }

    fn played(plan: Plan, simulated: Simulated, memory: Vec<MemoryForecast>) -> Proposed {
        let seconds = simulated.seconds;
        let played = Some(Played { simulated, memory });
        Proposed { tables: vec![Table { plan, played }], seconds }
    }
}

struct Table {
    plan: Plan,
    played: Option<Played>,
}

/// What is known of a table that was played through.
struct Played {
    simulated: Simulated,
    /// By device.
    memory: Vec<MemoryForecast>,
}

impl Played {
    /// The same where devices that are alike have changed places, by which the step does not change.
    fn seated(self, places: &[usize]) -> Played {
        let Played { simulated: Simulated { seconds, spans, devices, values_bytes }, memory } = self;
        let simulated = Simulated {
            seconds,
            spans: moved(spans, places),
            devices: moved(devices, places),
            values_bytes: moved(values_bytes, places),
        };
        Played { simulated, memory: moved(memory, places) }
    }
}

/// What is said of devices, where each is in a new place.
fn moved<T>(of_devices: Vec<T>, places: &[usize]) -> Vec<T> {
    let mut all: Vec<(usize, T)> = places.iter().copied().zip(of_devices).collect();
    all.sort_by_key(|(place, _)| *place);
    all.into_iter().map(|(_, one)| one).collect()
}

impl Table {
    /// With the mirrors that are asked for and its places given away, played through; or why it cannot be had.
    fn rated(
        self,
        shape: Shape,
        request: &Request,
        seating: &Seating,
        within: &dyn Fn() -> f64,
    ) -> Result<Option<Candidate>, String> {
        let mirrored = mirrors::mirrored(&self.plan, request.fleet, request.survive);
        let mirrored = mirrored.map_err(|error| error.to_string())?;
        let played = self.played.filter(|_| mirrored == self.plan);
        let (plan, places) = seating(mirrored);
        // Searches play tables of their own making through without a look at whether they are one.
        plan.check(request.chain).map_err(|error| error.to_string())?;
        let Some(played) = played else { return play(shape, plan, request, within()) };
        let Played { simulated, memory } = match places {
            Some(places) => played.seated(&places),
            None => played,
        };
        hold(&plan, request.fleet, &memory)?;
        Ok(Some(Candidate { shape, plan, simulated, memory }))
    }
}

fn quickest(candidates: Vec<Candidate>) -> Option<Candidate> {
    candidates.into_iter().min_by(|a, b| a.simulated.seconds.total_cmp(&b.simulated.seconds))
}

/// What a search proposes, or why it has nothing. Beside a plan that is known already, of so many seconds a step, it may have
/// nothing because all that it could propose takes much longer.
fn propose(method: Method, request: &Request, fleet: &Fleet, known_seconds: f64) -> Result<Proposed, String> {
    let Request { chain, step, costs, .. } = *request;
    let played = |planned: Result<Option<MixedPlanned>, PlayError>| match planned {
        Ok(Some(MixedPlanned { plan, simulated, memory, .. })) => {
            Ok(Proposed::played(plan, simulated, memory))
        }
        Ok(None) if known_seconds.is_finite() => Ok(Proposed::unplayed(Vec::new())),
        Ok(None) => Err("no pipeline of groups fits the nodes' devices".into()),
        Err(error) => Err(error.to_string()),
    };
    match method {
        Method::Pipeline => {
            let wanted = PipelineWanted { survive: request.survive, ..PipelineWanted::default() };
            pipeline::plan(chain, step, fleet, costs, &wanted)
                .map(|planned| Proposed::played(planned.plan, planned.simulated, planned.memory))
                .map_err(|error| error.to_string())
        }
        Method::Singles => played(mixed::plan_singles(chain, step, fleet, costs, known_seconds)),
        Method::Sharded => sharded::plan(&sharded::Request::new(chain, step, fleet, costs))
            .map(|planned| Proposed::unplayed(vec![planned.plan]))
            .map_err(|error| error.to_string()),
        Method::Burst => {
            let problem = burst::Problem::new(chain, step, fleet, costs);
            let planned =
                burst::Planner::new(&problem).and_then(|planner| planner.plan(burst::Goal::Fastest));
            planned
                .and_then(|planned| burst::table(chain, step, fleet, &planned.decision))
                .map(|plan| Proposed::unplayed(vec![plan]))
                .map_err(|error| error.to_string())
        }
        Method::Mixed => played(mixed::plan(chain, step, fleet, costs, known_seconds)),
        Method::Spilled => match fleet.devices.len() {
            1 => spilled::plan(chain, step, fleet, costs, 0)
                .map(|planned| Proposed::unplayed(vec![planned.plan]))
                .map_err(|error| error.to_string()),
            count => Err(format!("it is for one device, the fleet has {count}")),
        },
        Method::Usual(state) => Ok(Proposed::unplayed(usual::tables(chain, step, fleet, state))),
    }
}

/// A table with the mirrors that are asked for, played through; or why it cannot be had.
pub fn rated(shape: Shape, plan: &Plan, request: &Request) -> Result<Candidate, String> {
    let mirrored = mirrors::mirrored(plan, request.fleet, request.survive);
    let mirrored = mirrored.map_err(|error| error.to_string())?;
    mirrored.check(request.chain).map_err(|error| error.to_string())?;
    let candidate = play(shape, mirrored, request, f64::INFINITY)?;
    candidate.ok_or_else(|| NOTHING.to_owned())
}

/// Plays a table through and holds it to the fleet's memory; none where it cannot but take longer than it may.
fn play(shape: Shape, plan: Plan, request: &Request, within: f64) -> Result<Option<Candidate>, String> {
    let Request { chain, fleet, costs, .. } = *request;
    let layout = Layout::new(&plan, chain);
    let world = FleetWorld::new(fleet, costs, &layout);
    if within.is_finite() && least_seconds(&layout, &world) > within {
        return Ok(None);
    }
    let programs = compile_in(&layout, Purpose::Train, &world).map_err(|error| error.to_string())?;
    let memory = forecasts(&programs, &layout);
    hold(&plan, fleet, &memory)?;
    let simulated =
        simulate(&programs, &layout, &world, Settings::default()).map_err(|error| error.to_string())?;
    drop(layout);
    Ok(Some(Candidate { shape, plan, simulated, memory }))
}

/// Holds a table to the memory of a fleet's devices, hosts and disks; says what is short.
pub(crate) fn hold(plan: &Plan, fleet: &Fleet, memory: &[MemoryForecast]) -> Result<(), String> {
    for (row, memory) in plan.devices.iter().zip(memory) {
        if memory.total() > row.budget_bytes {
            return Err(format!("{} would need {} bytes of {}", row.name, memory.total(), row.budget_bytes));
        }
    }
    for node in &fleet.nodes {
        let (mut host, mut disk) = (0, 0);
        for memory in &memory[node.devices.clone()] {
            host += memory.host;
            disk += memory.disk;
        }
        let room = node.disk.as_ref().map_or(0, |disk| disk.bytes);
        if host > node.host_memory_bytes || disk > room {
            let there = node.host_memory_bytes;
            return Err(format!(
                "{} would need {host} bytes of host memory of {there}, {disk} of disk of {room}",
                node.name
            ));
        }
    }
    Ok(())
}
