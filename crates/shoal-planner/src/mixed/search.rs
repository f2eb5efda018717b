//! The search: every lineup is cut by the model at every size of pieces, the best are compiled, held to the memory of
//! their devices and played through, and the best of those improved step by step.

use std::collections::HashSet;

use shoal_fleet::{Costs, Fleet};
use shoal_model::Chain;
use shoal_plan::memory::{MemoryForecast, forecast_in};
use shoal_plan::one_device::StepShape;
use shoal_plan::{Activations, DeviceRow, Layout, Op, Order, Program, Residence};
use shoal_sim::{FleetWorld, Settings, simulate};

use super::cut::{Cut, Model, Wanted};
use super::lineup::{FEW_NODES, Lineup, in_turns, lineups};
use super::table::table;
use super::{GroupStage, Mixed, MixedPlanned, PlayError};
use crate::bound::Within;
use crate::device_rows;

/// Instructions that may be compiled to try out what the model likes best, and to improve the best of that.
const TRIED_INSTRUCTIONS: usize = 200_000;
const POLISHED_INSTRUCTIONS: usize = 450_000;
/// At least so many are tried, and at most.
const TRIED_LEAST: usize = 3;
const TRIED_MOST: usize = 60;
/// How many of those are improved, at most: fewer where every device is a stage, since those have more neighbours.
const POLISHED_MOST: usize = 5;
const POLISHED_SINGLES_MOST: usize = 3;
/// The same of lineups that pieces pass several times.
const POLISHED_AGAIN_MOST: usize = 2;
/// Of lineups that pieces pass once, so many of the best are looked at with several turns too, at so many sizes of pieces.
const IN_TURNS_MOST: usize = 16;
const IN_TURNS_SIZES: usize = 3;
/// How much longer than the best a pipeline may take by the model to be tried at all, and for its lineup to be looked at with
/// several turns.
const PROMISING: f64 = 1.4;
const PROMISING_IN_TURNS: f64 = 2.0;
/// How much longer than the best so far one may take to be improved: hardly one that takes longer comes to be quicker. What
/// lacked memory before it was made to fit has more to gain. Small steps are all improved.
const OVERTAKING: f64 = 1.05;
const OVERTAKING_SHORT: f64 = 1.3;
/// How much longer than a plan that is known the best one may take that is not improved yet, and of how many one must do
/// that before the others are given up.
const HOPELESS: f64 = 1.1;
const HOPELESS_TRIED: usize = 3;
/// How often a pipeline is changed because its forecast was too high.
const CORRECTIONS: usize = 8;
/// Pieces on the way for each device of the groups behind: one that it computes, one that waits for it.
const UNDER_WAY: usize = 2;
/// Bytes of a device that its slices of state may lose to rounding, for each tensor.
const ROUNDING_BYTES: f64 = 1024.0;
/// Sizes of pieces that are looked at.
const PIECES: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];
/// Pipelines of at most so many stages are also changed in several stages at once.
const SHIFTED_STAGES_MOST: usize = 6;
/// Steps that are larger with pieces of one sample are tried and improved with a part of that effort.
const SMALL_INSTRUCTIONS: usize = 5_000;
const MEDIUM_PART: usize = 2;
/// Those are also looked at with a few sizes of pieces only; with no pieces at all that would make them larger still.
const LARGE_INSTRUCTIONS: usize = 10_000;
const LARGE_PART: usize = 3;
const LARGE_SIZES: usize = 3;
const LARGEST_INSTRUCTIONS: usize = 25_000;

/// The best pipeline of groups that fits; none where no such pipeline does, or all take much longer than a plan that is
/// known already, of so many seconds a step.
pub fn plan(
    chain: &Chain,
    step: StepShape,
    fleet: &Fleet,
    costs: &Costs,
    known_seconds: f64,
) -> Result<Option<MixedPlanned>, PlayError> {
    search(chain, step, fleet, costs, false, known_seconds)
}

/// The same search where every group is one device: a plain pipeline of one replica, beside which mixtures can be held. A
/// device may have several stages that do not follow each other.
pub fn plan_singles(
    chain: &Chain,
    step: StepShape,
    fleet: &Fleet,
    costs: &Costs,
    known_seconds: f64,
) -> Result<Option<MixedPlanned>, PlayError> {
    search(chain, step, fleet, costs, true, known_seconds)
}

fn search(
    chain: &Chain,
    step: StepShape,
    fleet: &Fleet,
    costs: &Costs,
    singles: bool,
    known_seconds: f64,
) -> Result<Option<MixedPlanned>, PlayError> {
    // Batch statistics take samples together that pieces would part.
    let normed = (0..chain.layers.len()).any(|layer| chain.batch_norm(layer).is_some());
    if step.global_batch == 0 || fleet.devices.is_empty() || normed {
        return Ok(None);
    }
    let devices = device_rows(fleet);
    let pieces = sizes(chain, step.global_batch);
    let model = Model::new(chain, step, fleet, costs, &devices, &pieces);
    let search = Search { model: &model, devices: &devices, singles };
    let most = if singles { POLISHED_SINGLES_MOST } else { POLISHED_MOST };
    let once = search.once(&pieces, PROMISING_IN_TURNS);
    let again = search.again(&once, &pieces);
    let mut tried = search.try_best(once, most, known_seconds)?;
    if tried.is_empty() && known_seconds == f64::INFINITY {
        // None of the promising fits.
        tried = search.try_best(search.once(&pieces, f64::INFINITY), most, known_seconds)?;
    }
    let share = search.effort(POLISHED_INSTRUCTIONS) / tried.len().max(1);
    let least = tried.iter().map(Tried::seconds).fold(known_seconds, f64::min);
    tried.extend(search.try_best(again, POLISHED_AGAIN_MOST, least)?);
    tried.sort_by(|a, b| a.seconds().total_cmp(&b.seconds()));
    if tried.first().is_none_or(|first| first.seconds() >= HOPELESS * known_seconds) {
        return Ok(None);
    }
    let (mut best, mut least): (Option<MixedPlanned>, f64) = (None, known_seconds);
    for Tried { planned, was_short } in tried {
        if best.is_some() && planned.simulated.seconds >= search.overtaking(was_short) * least {
            continue;
        }
        let polished = search.polish(planned, share)?;
        least = least.min(polished.simulated.seconds);
        if best.as_ref().is_none_or(|best| polished.simulated.seconds < best.simulated.seconds) {
            best = Some(polished);
        }
    }
    Ok(best)
}

/// Places of the best of different lineups, of those that are sorted by their time.
fn chosen(tried: &[Tried], most: usize) -> Vec<usize> {
    let mut known: Vec<Vec<&[usize]>> = Vec::new();
    let mut places = Vec::new();
    for (place, Tried { planned, .. }) in tried.iter().enumerate() {
        let lineup: Vec<&[usize]> = planned.mixed.stages.iter().map(|stage| &stage.devices[..]).collect();
        if places.len() < most && !known.contains(&lineup) {
            known.push(lineup);
            places.push(place);
        }
    }
    places
}

/// By device, the most pieces that it has between forward and backward.
fn stashed(mixed: &Mixed, programs: &[Program]) -> Vec<usize> {
    let begins: HashSet<usize> = mixed.stages.iter().map(|stage| stage.layers.start).collect();
    let most = |program: &Program| {
        let (mut now, mut most) = (0usize, 0);
        for instruction in &program.instructions {
            match instruction.op {
                Op::Forward { layer, .. } if begins.contains(&layer) => now += 1,
                Op::Backward { layer, .. } if begins.contains(&layer) => now -= 1,
                _ => {}
            }
            most = now.max(most);
        }
        most
    };
    programs.iter().map(most).collect()
}

/// Takes a layer from one stage to another; those between have as many as before.
fn shift(mixed: &mut Mixed, from: usize, to: usize) {
    let stages = &mut mixed.stages;
    for place in from.min(to)..from.max(to) {
        // Each cut between the two moves by one, towards where the layer comes from.
        let (before, after) = stages.split_at_mut(place + 1);
        let (before, after) = (&mut before[place].layers, &mut after[0].layers);
        match from < to {
            true => (before.end, after.start) = (before.end - 1, after.start - 1),
            false => (before.end, after.start) = (before.end + 1, after.start + 1),
        }
    }
}

/// Sizes of pieces worth a look.
fn sizes(chain: &Chain, global_batch: usize) -> Vec<usize> {
    let all: Vec<usize> = PIECES.into_iter().filter(|piece| *piece <= global_batch).collect();
    let small = |piece: &usize| instructions(chain, global_batch, *piece) <= LARGEST_INSTRUCTIONS;
    let mut few: Vec<usize> = all.iter().copied().filter(small).collect();
    if is_large(chain, global_batch) {
        few.truncate(LARGE_SIZES);
    }
    if few.is_empty() { all.last().copied().into_iter().collect() } else { few }
}

fn is_large(chain: &Chain, global_batch: usize) -> bool {
    instructions(chain, global_batch, 1) > LARGE_INSTRUCTIONS
}

/// About how many instructions a step has.
fn instructions(chain: &Chain, global_batch: usize, piece: usize) -> usize {
    3 * chain.layers.len() * global_batch.div_ceil(piece.max(1))
}

/// A lineup with a cut, by the model.
#[derive(Clone)]
struct Candidate {
    lineup: Lineup,
    returns: bool,
    piece: usize,
    /// By group.
    ways: Vec<Activations>,
    cut: Cut,
}

/// What came of trying a pipeline.
enum Outcome {
    Fits(Box<MixedPlanned>),
    /// By device, bytes that it lacks.
    Short(Vec<u64>),
    /// It takes longer than was asked for.
    Slow,
}

/// One that fits, played through.
struct Tried {
    planned: MixedPlanned,
    /// Whether it lacked memory before it was made to fit.
    was_short: bool,
}

impl Tried {
    fn seconds(&self) -> f64 {
        self.planned.simulated.seconds
    }
}

struct Search<'a> {
    model: &'a Model<'a>,
    devices: &'a [DeviceRow],
    /// Whether every group is one device.
    singles: bool,
}

impl Search<'_> {
    /// How much longer than the best one may take to be improved.
    fn overtaking(&self, was_short: bool) -> f64 {
        let Model { chain, step, .. } = self.model;
        match instructions(chain, step.global_batch, 1) {
            ..=SMALL_INSTRUCTIONS => f64::INFINITY,
            _ if was_short => OVERTAKING_SHORT,
            _ => OVERTAKING,
        }
    }

    /// What may be spent of so many instructions.
    fn effort(&self, instructions: usize) -> usize {
        let Model { chain, step, .. } = self.model;
        let size = self::instructions(chain, step.global_batch, 1);
        match () {
            () if size <= SMALL_INSTRUCTIONS => instructions,
            () if size <= LARGE_INSTRUCTIONS => instructions / MEDIUM_PART,
            () => instructions / LARGE_PART,
        }
    }

    fn instructions(&self, mixed: &Mixed) -> usize {
        let piece = mixed.stages.iter().map(|stage| stage.piece).min().unwrap_or(1);
        instructions(self.model.chain, self.model.step.global_batch, piece)
    }

    /// All whose groups have one stage each and that take no longer by the model than so many times the best of them,
    /// which comes first.
    fn once(&self, pieces: &[usize], promising: f64) -> Vec<Candidate> {
        let lineups = lineups(self.model.fleet, &self.model.speeds());
        self.candidates(&lineups, pieces, promising)
    }

    /// Those made of the best of them whose groups have several stages.
    fn again(&self, once: &[Candidate], pieces: &[usize]) -> Vec<Candidate> {
        if self.model.fleet.nodes.len() > FEW_NODES {
            return Vec::new();
        }
        let mut best: Vec<&Lineup> = Vec::new();
        for Candidate { lineup, .. } in once {
            if best.len() < IN_TURNS_MOST && !best.contains(&lineup) {
                best.push(lineup);
            }
        }
        let turns: Vec<Lineup> = best.into_iter().flat_map(in_turns).collect();
        // Many pieces are what keeps groups busy between their turns.
        let small = &pieces[..pieces.len().min(IN_TURNS_SIZES)];
        self.candidates(&turns, small, PROMISING)
    }

    /// Cuts of lineups that take no longer than so many times the best.
    fn candidates(&self, lineups: &[Lineup], pieces: &[usize], promising: f64) -> Vec<Candidate> {
        let (mut found, mut least) = (Vec::new(), f64::INFINITY);
        for lineup in lineups {
            let reserves = &vec![0; lineup.len()];
            for (returns, ways, piece) in self.uses(lineup, pieces) {
                let within = promising * least;
                let wanted = Wanted { lineup, returns, piece, activations: &ways, reserves, within };
                if let Some(cut) = self.model.cut(&wanted) {
                    least = least.min(cut.seconds);
                    found.push(Candidate { lineup: lineup.clone(), returns, piece, ways, cut });
                }
            }
        }
        found.retain(|candidate: &Candidate| candidate.cut.seconds <= promising * least);
        found.sort_by(|a, b| a.cut.seconds.total_cmp(&b.cut.seconds));
        found
    }

    /// How a lineup may be used, where it is of the kind that is looked for: whether the last layer returns to its first
    /// group, what becomes of each group's activations, and the size of pieces.
    fn uses(&self, lineup: &Lineup, pieces: &[usize]) -> Vec<(bool, Vec<Activations>, usize)> {
        let single = lineup.iter().all(|group| group.len() == 1);
        let returns = [false, true].into_iter().filter(|returns| (single && !returns) == self.singles);
        // What is last has one piece on the way, and room for it.
        let mut lean = vec![Activations::Recompute; lineup.len()];
        lean[lineup.len() - 1] = Activations::Keep;
        let ways = [vec![Activations::Keep; lineup.len()], lean];
        let mut found = Vec::new();
        for returns in returns {
            for ways in &ways {
                found.extend(pieces.iter().map(|piece| (returns, ways.clone(), *piece)));
            }
        }
        found
    }

    /// The best candidates that fit, played through: the quickest of so many lineups, first of all the quickest, without
    /// those that are hopeless beside a plan that is known already, of so many seconds a step.
    fn try_best(
        &self,
        candidates: Vec<Candidate>,
        most: usize,
        known_seconds: f64,
    ) -> Result<Vec<Tried>, PlayError> {
        let mut tried: Vec<Tried> = Vec::new();
        let Some(promised) = candidates.first().map(|first| first.cut.seconds) else { return Ok(tried) };
        let (mut spent, mut count, mut has_room) = (0, 0, false);
        for candidate in candidates {
            let hopeless = tried.is_empty() && known_seconds.is_finite() && count >= HOPELESS_TRIED;
            let enough = has_room
                && (hopeless
                    || candidate.cut.seconds > PROMISING * promised
                    || count >= TRIED_LEAST && spent > self.effort(TRIED_INSTRUCTIONS)
                    || count >= TRIED_MOST);
            if enough {
                break;
            }
            spent += instructions(self.model.chain, self.model.step.global_batch, candidate.piece);
            count += 1;
            // Who takes longer than the last of those will not be among them.
            let places = chosen(&tried, most);
            let last = places.last().filter(|_| places.len() == most);
            let last = last.map_or(f64::INFINITY, |place| tried[*place].seconds());
            let least = tried.first().map_or(known_seconds, |first| first.seconds().min(known_seconds));
            let within = |was_short| Within::seconds(last.min(self.overtaking(was_short) * least));
            match self.fitted(candidate, within(false), within(true))? {
                (Outcome::Fits(planned), was_short) => {
                    let one = Tried { planned: *planned, was_short };
                    tried.insert(tried.partition_point(|other| other.seconds() <= one.seconds()), one);
                    has_room = true;
                }
                (Outcome::Slow, _) => has_room = true,
                (Outcome::Short(_), _) => {}
            }
        }
        let places = chosen(&tried, most);
        let mut place = 0..;
        tried.retain(|_| place.next().is_some_and(|place| places.contains(&place)));
        Ok(tried)
    }

    /// A candidate, made to fit: groups that lack memory have fewer pieces on the way, then keep less of their
    /// activations, then have fewer layers. Also whether any had to; from then on other times are of interest.
    fn fitted(
        &self,
        candidate: Candidate,
        within: Within,
        within_if_short: Within,
    ) -> Result<(Outcome, bool), PlayError> {
        let Candidate { lineup, returns, piece, mut ways, mut cut } = candidate;
        let ample: Vec<usize> =
            (0..lineup.len()).map(|group| self.ample(&lineup, group, returns, piece)).collect();
        let mut stashes = ample.clone();
        let (mut reserves, mut short) = (vec![0; lineup.len()], Vec::new());
        for _ in 0..CORRECTIONS {
            let stages = cut.layers.iter().enumerate().map(|(stage, layers)| {
                // Past the lineup's end comes the first group again.
                let group = if stage < lineup.len() { stage } else { 0 };
                GroupStage {
                    devices: lineup[group].clone(),
                    layers: layers.clone(),
                    piece,
                    activations: ways[group],
                    copies: if stage == 0 { Residence::Resident } else { Residence::Fetched },
                    stash: Some(stashes[group]),
                }
            });
            let stages: Vec<GroupStage> = stages.collect();
            let within = if short.is_empty() { within } else { within_if_short };
            match self.play(Mixed { stages, order: Order::OneForwardOneBackward }, within)? {
                Outcome::Short(lacking) => short = lacking,
                outcome => return Ok((outcome, !short.is_empty())),
            }
            for (group, devices) in lineup.iter().enumerate() {
                let lacks = devices.iter().map(|device| short[*device]).max().unwrap_or(0);
                let stash = &mut stashes[group];
                if lacks == 0 {
                    continue;
                }
                if 2 * *stash > ample[group] && *stash > 1 {
                    *stash = (*stash * 3 / 4).min(*stash - 1);
                } else if ways[group] == Activations::Keep {
                    (ways[group], *stash) = (Activations::Recompute, ample[group]);
                } else {
                    reserves[group] += lacks;
                }
            }
            let wanted = Wanted {
                lineup: &lineup,
                returns,
                piece,
                activations: &ways,
                reserves: &reserves,
                within: f64::INFINITY,
            };
            match self.model.cut(&wanted) {
                Some(again) => cut = again,
                None => break,
            }
        }
        Ok((Outcome::Short(short), true))
    }

    /// Pieces that each member of a group must have between forward and backward so that none behind it waits; where
    /// the last layer returns to the lineup's first group, that counts twice.
    fn ample(&self, lineup: &Lineup, group: usize, returns: bool, piece: usize) -> usize {
        let own = lineup[group].len();
        let devices = lineup[group..].iter().map(Vec::len).sum::<usize>() + if returns { own } else { 0 };
        let all = self.model.step.global_batch.div_ceil(piece).div_ceil(own);
        let stages = lineup.iter().filter(|other| **other == lineup[group]).count() + usize::from(returns);
        (UNDER_WAY * devices).div_ceil(own).min(all * stages)
    }

    /// Compiles a pipeline, divides its state by the rooms that are left, and plays it through if it fits and may be
    /// quicker than so many seconds.
    fn play(&self, mixed: Mixed, within: Within) -> Result<Outcome, PlayError> {
        let Model { chain, step, fleet, costs, .. } = *self.model;
        let mut rooms: Vec<f64> = self.devices.iter().map(|row| row.budget_bytes as f64).collect();
        let mut is_level = false;
        loop {
            let plan = table(chain, step, costs, self.devices.to_vec(), &mixed, &rooms);
            let layout = Layout::new(&plan, chain);
            let world = FleetWorld::new(fleet, costs, &layout);
            let Some(ordered) = within.order(&layout, &world)? else { return Ok(Outcome::Slow) };
            let foreseen_seconds = ordered.foreseen_seconds;
            let programs = ordered.link();
            let memory: Vec<MemoryForecast> =
                programs.iter().map(|program| forecast_in(program, &layout)).collect();
            let short: Vec<u64> = memory
                .iter()
                .zip(self.devices)
                .map(|(memory, row)| memory.total().saturating_sub(row.budget_bytes))
                .collect();
            if short.iter().all(|bytes| *bytes == 0) {
                let simulated = simulate(&programs, &layout, &world, Settings::default())?;
                if simulated.seconds >= within.seconds {
                    return Ok(Outcome::Slow);
                }
                drop(layout);
                let stashed = stashed(&mixed, &programs);
                let planned = MixedPlanned { mixed, plan, simulated, foreseen_seconds, stashed, memory };
                return Ok(Outcome::Fits(Box::new(planned)));
            }
            if is_level {
                return Ok(Outcome::Short(short));
            }
            is_level = true;
            let rounding = ROUNDING_BYTES * chain.tensors.len() as f64;
            for (device, memory) in memory.iter().enumerate() {
                let slices: usize = (0..chain.tensors.len())
                    .flat_map(|tensor| layout.held(tensor, device))
                    .map(|held| held.slice.count())
                    .sum();
                let state = (4 * (2 + step.optimizer_states) * slices) as f64;
                let rest = memory.total() as f64 - state + rounding;
                rooms[device] = (self.devices[device].budget_bytes as f64 - rest).max(0.0);
            }
        }
    }

    /// Goes from a pipeline to a neighbour that is quicker, as long as there is one.
    fn polish(&self, mut planned: MixedPlanned, mut left: usize) -> Result<MixedPlanned, PlayError> {
        // The place of the next neighbour, and how many in a row were no better.
        let (mut next, mut idle) = (0, 0);
        loop {
            let mut neighbours = self.neighbours(&planned);
            if idle >= neighbours.len() {
                return Ok(planned);
            }
            let neighbour = neighbours.swap_remove(next % neighbours.len());
            let work = self.instructions(&neighbour);
            let Some(rest) = left.checked_sub(work) else { return Ok(planned) };
            left = rest;
            let within = Within::quicker(planned.simulated.seconds, planned.foreseen_seconds);
            match self.play(neighbour, within)? {
                // What helped once may help again.
                Outcome::Fits(other) => (planned, idle) = (*other, 0),
                Outcome::Short(_) | Outcome::Slow => (next, idle) = (next + 1, idle + 1),
            }
        }
    }

    /// Pipelines that differ in one cut, one stage's activations, copies or pieces, what it stashes, or the order.
    fn neighbours(&self, planned: &MixedPlanned) -> Vec<Mixed> {
        let mixed = &planned.mixed;
        let mut found = Vec::new();
        let mut with = |change: &dyn Fn(&mut Mixed)| {
            let mut other = mixed.clone();
            change(&mut other);
            if other != *mixed {
                found.push(other);
            }
        };
        // Waiting is passed on from stage to stage: one that may stash more gains little where the next may not.
        let capped = mixed.stages.iter().filter(|stage| stage.stash.is_some()).count();
        if (2..=SHIFTED_STAGES_MOST).contains(&capped) {
            for more in [|stash: usize| 2 * stash, |stash| stash + 2, |stash| stash + 1] {
                with(&|mixed| {
                    for stash in mixed.stages.iter_mut().filter_map(|stage| stage.stash.as_mut()) {
                        *stash = more(*stash);
                    }
                });
            }
        }
        for (place, stages) in mixed.stages.windows(2).enumerate() {
            // A head that returns stays what it is.
            let returned = place + 2 == mixed.stages.len() && stages[1].devices == mixed.stages[0].devices;
            if stages[1].layers.len() > 1 && !returned {
                with(&|mixed| {
                    mixed.stages[place].layers.end += 1;
                    mixed.stages[place + 1].layers.start += 1;
                });
            }
            if stages[0].layers.len() > 1 && !returned {
                with(&|mixed| {
                    mixed.stages[place].layers.end -= 1;
                    mixed.stages[place + 1].layers.start -= 1;
                });
            }
        }
        // A layer that passes the stages between.
        let ends = mixed.stages.len() >= 2
            && mixed.stages[mixed.stages.len() - 1].devices == mixed.stages[0].devices;
        let movable = mixed.stages.len() - usize::from(ends);
        let few = movable <= SHIFTED_STAGES_MOST;
        for (from, to) in (0..movable).flat_map(|from| (0..movable).map(move |to| (from, to))) {
            if few && from.abs_diff(to) > 1 && mixed.stages[from].layers.len() > 1 {
                with(&|mixed| shift(mixed, from, to));
            }
        }
        for place in 0..mixed.stages.len() {
            with(&|mixed| {
                let activations = &mut mixed.stages[place].activations;
                *activations = match activations {
                    Activations::Keep => Activations::Recompute,
                    Activations::Recompute | Activations::Offload => Activations::Keep,
                };
            });
            // One device has all that it computes with, wherever others fetch.
            if mixed.stages[place].devices.len() > 1 {
                with(&|mixed| {
                    let copies = &mut mixed.stages[place].copies;
                    *copies = match copies {
                        Residence::Resident => Residence::Fetched,
                        Residence::Fetched => Residence::Resident,
                    };
                });
            }
            for piece in [mixed.stages[place].piece * 2, mixed.stages[place].piece / 2] {
                if (1..=self.model.step.global_batch).contains(&piece) {
                    with(&|mixed| mixed.stages[place].piece = piece);
                }
            }
        }
        for (place, stage) in mixed.stages.iter().enumerate() {
            let Some(stash) = stage.stash else { continue };
            // A device with several stages stashes as the first says.
            let had =
                |device: &usize| mixed.stages[..place].iter().any(|other| other.devices.contains(device));
            if stage.devices.iter().any(had) {
                continue;
            }
            let most = stage.devices.iter().map(|device| planned.stashed[*device]).max().unwrap_or(0);
            // A cap that is not reached changes nothing.
            let matters =
                |other: &usize| if *other > stash { most >= stash } else { (1..most).contains(other) };
            for other in [2 * stash, stash + 1, stash - 1].into_iter().filter(matters) {
                with(&|mixed| mixed.stages[place].stash = Some(other));
            }
        }
        for order in [Order::OneForwardOneBackward, Order::Varuna, Order::Gpipe] {
            with(&|mixed| mixed.order = order);
        }
        found
    }
}
