//! The search: every lineup is cut by the model at every size of pieces, the best are compiled, held to the memory of
//! their devices and played through, and the best of those improved step by step.

use shoal_fleet::{Costs, Fleet};
use shoal_model::Chain;
use shoal_plan::memory::{MemoryForecast, forecast_in};
use shoal_plan::one_device::StepShape;
use shoal_plan::{Activations, DeviceRow, Layout, Order, Purpose, Residence, compile_in};
use shoal_sim::{FleetWorld, Settings, simulate};

use super::cut::{Cut, Model, Wanted};
use super::lineup::{FEW_NODES, Lineup, in_turns, lineups};
use super::table::table;
use super::{GroupStage, Mixed, MixedPlanned, PlayError};
use crate::bound::least_seconds;
use crate::device_rows;

/// Instructions that may be compiled to try out what the model likes best, and to improve the best of that.
const TRIED_INSTRUCTIONS: usize = 200_000;
const POLISHED_INSTRUCTIONS: usize = 300_000;
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
const IN_TURNS_SIZES: usize = 2;
/// How much longer than the best a pipeline may take by the model to be tried at all.
const PROMISING: f64 = 1.4;
/// How often a pipeline is changed because its forecast was too high.
const CORRECTIONS: usize = 8;
/// Pieces on the way for each device of the groups behind: one that it computes, one that waits for it.
const UNDER_WAY: usize = 2;
/// Bytes of a device that its slices of state may lose to rounding, for each tensor.
const ROUNDING_BYTES: f64 = 1024.0;
/// Sizes of pieces that are looked at.
const PIECES: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];
/// Steps that are larger with pieces of one sample are looked at with a few sizes of pieces, and tried and improved with
/// a part of that effort; with no pieces at all that would make them larger still.
const LARGE_INSTRUCTIONS: usize = 10_000;
const LARGE_SIZES: usize = 3;
const LARGE_PART: usize = 3;
const LARGEST_INSTRUCTIONS: usize = 25_000;

/// The best pipeline of groups that fits; none where no such pipeline does.
pub fn plan(
    chain: &Chain,
    step: StepShape,
    fleet: &Fleet,
    costs: &Costs,
) -> Result<Option<MixedPlanned>, PlayError> {
    search(chain, step, fleet, costs, false)
}

/// The same search where every group is one device: a plain pipeline of one replica, beside which mixtures can be held. A
/// device may have several stages that do not follow each other.
pub fn plan_singles(
    chain: &Chain,
    step: StepShape,
    fleet: &Fleet,
    costs: &Costs,
) -> Result<Option<MixedPlanned>, PlayError> {
    search(chain, step, fleet, costs, true)
}

fn search(
    chain: &Chain,
    step: StepShape,
    fleet: &Fleet,
    costs: &Costs,
    singles: bool,
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
    let (once, again) = search.candidates(&pieces);
    let mut tried = search.try_best(once, if singles { POLISHED_SINGLES_MOST } else { POLISHED_MOST })?;
    let share = search.effort(POLISHED_INSTRUCTIONS) / tried.len().max(1);
    tried.extend(search.try_best(again, POLISHED_AGAIN_MOST)?);
    let mut best: Option<MixedPlanned> = None;
    for planned in tried {
        let polished = search.polish(planned, share)?;
        if best.as_ref().is_none_or(|best| polished.simulated.seconds < best.simulated.seconds) {
            best = Some(polished);
        }
    }
    Ok(best)
}

/// Places of the best of different lineups, of those that are sorted by their time.
fn chosen(tried: &[MixedPlanned], most: usize) -> Vec<usize> {
    let mut known: Vec<Vec<&[usize]>> = Vec::new();
    let mut places = Vec::new();
    for (place, planned) in tried.iter().enumerate() {
        let lineup: Vec<&[usize]> = planned.mixed.stages.iter().map(|stage| &stage.devices[..]).collect();
        if places.len() < most && !known.contains(&lineup) {
            known.push(lineup);
            places.push(place);
        }
    }
    places
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

struct Search<'a> {
    model: &'a Model<'a>,
    devices: &'a [DeviceRow],
    /// Whether every group is one device.
    singles: bool,
}

impl Search<'_> {
    /// What may be spent of so many instructions.
    fn effort(&self, instructions: usize) -> usize {
        let large = is_large(self.model.chain, self.model.step.global_batch);
        if large { instructions / LARGE_PART } else { instructions }
    }

    fn instructions(&self, mixed: &Mixed) -> usize {
        let piece = mixed.stages.iter().map(|stage| stage.piece).min().unwrap_or(1);
        instructions(self.model.chain, self.model.step.global_batch, piece)
    }

    /// All in question whose groups have one stage each, and those made of the best of them whose groups have several; the
    /// best by the model first.
    fn candidates(&self, pieces: &[usize]) -> (Vec<Candidate>, Vec<Candidate>) {
        let cut = |lineups: &[Lineup], pieces: &[usize]| -> Vec<Candidate> {
            let mut found: Vec<Candidate> =
                lineups.iter().flat_map(|lineup| self.cuts(lineup, pieces)).collect();
            found.sort_by(|a, b| a.cut.seconds.total_cmp(&b.cut.seconds));
            found
        };
        let fleet = self.model.fleet;
        let once = cut(&lineups(fleet, &self.model.speeds()), pieces);
        let mut best: Vec<&Lineup> = Vec::new();
        for Candidate { lineup, .. } in &once {
            if best.len() < IN_TURNS_MOST && !best.contains(&lineup) {
                best.push(lineup);
            }
        }
        let turns: Vec<Lineup> = best.into_iter().flat_map(in_turns).collect();
        // Many pieces are what keeps groups busy between their turns.
        let small = &pieces[..pieces.len().min(IN_TURNS_SIZES)];
        let again = if fleet.nodes.len() <= FEW_NODES { cut(&turns, small) } else { Vec::new() };
        (once, again)
    }

    /// A lineup's cuts, where it is of the kind that is looked for.
    fn cuts(&self, lineup: &Lineup, pieces: &[usize]) -> Vec<Candidate> {
        let mut found = Vec::new();
        // What is last has one piece on the way, and room for it.
        let mut lean = vec![Activations::Recompute; lineup.len()];
        lean[lineup.len() - 1] = Activations::Keep;
        for returns in [false, true] {
            let single = lineup.iter().all(|group| group.len() == 1) && !returns;
            if single != self.singles {
                continue;
            }
            for ways in [vec![Activations::Keep; lineup.len()], lean.clone()] {
                for piece in pieces.iter().copied() {
                    let reserves = &vec![0; lineup.len()];
                    let wanted = Wanted { lineup, returns, piece, activations: &ways, reserves };
                    if let Some(cut) = self.model.cut(&wanted) {
                        let (lineup, ways) = (lineup.clone(), ways.clone());
                        found.push(Candidate { lineup, returns, piece, ways, cut });
                    }
                }
            }
        }
        found
    }

    /// The best candidates that fit, played through: the quickest of so many lineups, first of all the quickest.
    fn try_best(&self, candidates: Vec<Candidate>, most: usize) -> Result<Vec<MixedPlanned>, PlayError> {
        let mut tried: Vec<MixedPlanned> = Vec::new();
        let Some(least) = candidates.first().map(|first| first.cut.seconds) else { return Ok(tried) };
        let (mut spent, mut count) = (0, 0);
        for candidate in candidates {
            let enough = !tried.is_empty()
                && (candidate.cut.seconds > PROMISING * least
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
            let within = last.map(|place| tried[*place].simulated.seconds);
            if let Some(planned) = self.fitted(candidate, within)? {
                let place =
                    tried.partition_point(|other| other.simulated.seconds <= planned.simulated.seconds);
                tried.insert(place, planned);
            }
        }
        let places = chosen(&tried, most);
        let mut place = 0..;
        tried.retain(|_| place.next().is_some_and(|place| places.contains(&place)));
        Ok(tried)
    }

    /// A candidate, made to fit: groups that lack memory have fewer pieces on the way, then keep less of their
    /// activations, then have fewer layers.
    fn fitted(&self, candidate: Candidate, within: Option<f64>) -> Result<Option<MixedPlanned>, PlayError> {
        let Candidate { lineup, returns, piece, mut ways, mut cut } = candidate;
        let ample: Vec<usize> =
            (0..lineup.len()).map(|group| self.ample(&lineup, group, returns, piece)).collect();
        let mut stashes = ample.clone();
        let mut reserves = vec![0; lineup.len()];
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
            let short = match self.play(Mixed { stages, order: Order::OneForwardOneBackward }, within)? {
                Outcome::Fits(planned) => return Ok(Some(*planned)),
                Outcome::Short(short) => short,
                Outcome::Slow => return Ok(None),
            };
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
            let wanted = Wanted { lineup: &lineup, returns, piece, activations: &ways, reserves: &reserves };
            match self.model.cut(&wanted) {
                Some(again) => cut = again,
                None => return Ok(None),
            }
        }
        Ok(None)
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
    fn play(&self, mixed: Mixed, within: Option<f64>) -> Result<Outcome, PlayError> {
        let Model { chain, step, fleet, costs, .. } = *self.model;
        let mut rooms: Vec<f64> = self.devices.iter().map(|row| row.budget_bytes as f64).collect();
        let mut is_level = false;
        loop {
            let plan = table(chain, step, costs, self.devices.to_vec(), &mixed, &rooms);
            let layout = Layout::new(&plan, chain);
            let world = FleetWorld::new(fleet, costs, &layout);
            if within.is_some_and(|within| least_seconds(&layout, &world) >= within) {
                return Ok(Outcome::Slow);
            }
            let programs = compile_in(&layout, Purpose::Train, &world)?;
            let memory: Vec<MemoryForecast> =
                programs.iter().map(|program| forecast_in(program, &layout)).collect();
            let short: Vec<u64> = memory
                .iter()
                .zip(self.devices)
                .map(|(memory, row)| memory.total().saturating_sub(row.budget_bytes))
                .collect();
            if short.iter().all(|bytes| *bytes == 0) {
                let simulated = simulate(&programs, &layout, &world, Settings::default())?;
                if within.is_some_and(|within| simulated.seconds >= within) {
                    return Ok(Outcome::Slow);
                }
                drop(layout);
                let planned = MixedPlanned { mixed, plan, simulated, memory };
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
            let mut neighbours = self.neighbours(&planned.mixed);
            if idle >= neighbours.len() {
                return Ok(planned);
            }
            let neighbour = neighbours.swap_remove(next % neighbours.len());
            let work = self.instructions(&neighbour);
            let Some(rest) = left.checked_sub(work) else { return Ok(planned) };
            left = rest;
            match self.play(neighbour, Some(planned.simulated.seconds * (1.0 - 1e-9)))? {
                // What helped once may help again.
                Outcome::Fits(other) => (planned, idle) = (*other, 0),
                Outcome::Short(_) | Outcome::Slow => (next, idle) = (next + 1, idle + 1),
            }
        }
    }

    /// Pipelines that differ in one cut, one stage's activations, copies or pieces, or the order.
    fn neighbours(&self, mixed: &Mixed) -> Vec<Mixed> {
        let mut found = Vec::new();
        let mut with = |change: &dyn Fn(&mut Mixed)| {
            let mut other = mixed.clone();
            change(&mut other);
            if other != *mixed {
                found.push(other);
            }
        };
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
            for other in [2 * stash, stash + 1, stash - 1].into_iter().filter(|other| *other > 0) {
                with(&|mixed| mixed.stages[place].stash = Some(other));
            }
        }
        for order in [Order::OneForwardOneBackward, Order::Varuna, Order::Gpipe] {
            with(&|mixed| mixed.order = order);
        }
        found
    }
}
