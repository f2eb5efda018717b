//! The search itself: every likely division of the devices is cut and rated by the model, the best are tried replica by
//! replica, the last few as whole steps, and the quickest that fits wins.

use std::collections::{BTreeMap, HashMap, HashSet};

use shoal_fleet::{Costs, Fleet};
use shoal_model::Chain;
use shoal_plan::one_device::StepShape;
use shoal_plan::{Activations, Order, parallel};

use super::candidate::{Candidate, Confirmed, Key, Options, Row, Trial, Tuned, bucket, stages};
use super::cuts::{Cut, Place, Suffixes, best_cut, shortage};
use super::divide::{Bounds, FEW_DEVICES, divisions, orders};
use super::outcome::{PipelineError, PipelinePlanned, PipelineWanted, RunnerUp};
use super::shares::{Pace, shares};
use super::stages::{Classes, Judge, Sized, StateBytes, TensorBytes, parameters};
use super::trial::Bench;
use super::{Pipeline, Replica, State};
use crate::device_rows;

/// How many candidates are tried replica by replica, as whole steps, and improved step by step: at least so many, at
/// most so many, and between them as many as have so many instructions in all.
const TRIED: Effort = Effort { least: 5, most: 200, instructions: 100_000 };
const CONFIRMED: Effort = Effort { least: 2, most: 64, instructions: 60_000 };
const POLISHED: Effort = Effort { least: 2, most: 8, instructions: 20_000 };
/// Of the first, one in so many, and the best, is tried in every order and with state in every place.
const VARIED: usize = 8;

/// How much longer than the best a candidate may take by the model to be tried at all.
const PROMISING: f64 = 1.3;

/// How much longer than the best so far a step may take to be improved: hardly one that takes longer comes to be quicker.
/// Steps of so few instructions are improved in any case.
const OVERTAKING: f64 = 1.15;
const SMALL_INSTRUCTIONS: usize = 1_000;

struct Effort {
    least: usize,
    most: usize,
    instructions: usize,
}

impl Effort {
    /// For candidates of about so many instructions.
    fn count(&self, instructions: usize) -> usize {
        (self.instructions / instructions.max(1)).clamp(self.least, self.most)
    }
}

/// What a larger micro-batch must gain: two sizes in a row that do not, and no larger one is looked at.
const WORTHWHILE: f64 = 1.003;

/// Past so many instructions only the best is played through as a whole: that takes seconds.
const LARGE_INSTRUCTIONS: usize = 1_000_000;

/// Up to so many instructions plans are tried with their ends on one device too.
const LOOPED_INSTRUCTIONS: usize = 300_000;

/// How often the next best are tried where none of the best fits.
const ROUNDS: usize = 8;

/// How often a cut is made again because its forecast was higher than thought.
const CORRECTIONS: usize = 5;

/// Finds the quickest pipeline that fits.
pub fn plan(
    chain: &Chain,
    step: StepShape,
    fleet: &Fleet,
    costs: &Costs,
    wanted: &PipelineWanted,
) -> Result<PipelinePlanned, PipelineError> {
    check(step, fleet, wanted)?;
    let rows = wanted.devices.clone().unwrap_or_else(|| device_rows(fleet));
    let bench = Bench { chain, step, fleet, costs, devices: &rows };
    let mut search = Search::new(bench, wanted);
    let states: &[&[State]] = match wanted.state {
        Some(State::Whole) => &[&[State::Whole]],
        Some(State::Divided) => &[&[State::Divided]],
        Some(State::Host) => &[&[State::Host]],
        None => &[&[State::Divided, State::Whole], &[State::Host]],
    };
    for states in states {
        let mut candidates = search.candidates(states[0]);
        // Those that the model likes best may turn out not to fit.
        for _ in 0..ROUNDS {
            let variants = search.variants(&mut candidates, states);
            if let Some(planned) = search.confirm(search.try_rows(variants)?)? {
                return Ok(planned);
            }
        }
    }
    Err(search.shortage(states.last().and_then(|states| states.first()).copied().unwrap_or(State::Host)))
}

fn check(step: StepShape, fleet: &Fleet, wanted: &PipelineWanted) -> Result<(), PipelineError> {
    let global_batch = step.global_batch;
    if fleet.devices.is_empty() {
        return Err(PipelineError::NoDevice);
    }
    if let Some(size) = wanted.micro_batch.filter(|size| *size == 0 || *size > global_batch) {
        return Err(PipelineError::TooFewSamples { what: format!("a micro-batch of {size}"), global_batch });
    }
    if let Some(count) = wanted.replicas.filter(|count| *count == 0 || *count > global_batch) {
        return Err(PipelineError::TooFewSamples { what: format!("{count} replicas"), global_batch });
    }
    match wanted.order {
        None | Some(Order::Varuna | Order::OneForwardOneBackward) => Ok(()),
        Some(order) => Err(PipelineError::Order { order }),
    }
}

/// What is known so far.
pub(super) struct Search<'a> {
    pub chain: &'a Chain,
    pub step: StepShape,
    pub costs: &'a Costs,
    pub wanted: &'a PipelineWanted,
    pub classes: Classes<'a>,
    pub bench: Bench<'a>,
    activations: Vec<Activations>,
    /// Samples that are never parted.
    pub grain: usize,
    sized: BTreeMap<usize, Sized>,
    states: HashMap<(State, usize), StateBytes>,
    /// Trained numbers by layer.
    pub parameters: Vec<u64>,
    suffixes: HashMap<(usize, State, usize, bool), Suffixes>,
}

impl<'a> Search<'a> {
    fn new(bench: Bench<'a>, wanted: &'a PipelineWanted) -> Search<'a> {
        let Bench { chain, step, fleet, costs, devices } = bench;
        let tensors = TensorBytes::all(chain, step);
        let activations = match wanted.activations {
            Some(activations) => vec![activations],
            None => vec![Activations::Keep, Activations::Recompute, Activations::Offload],
        };
        let mut search = Search {
            chain,
            step,
            costs,
            wanted,
            classes: Classes::new(fleet, devices),
            bench,
            activations,
            grain: grain(chain, step.global_batch),
            sized: BTreeMap::new(),
            states: HashMap::new(),
            parameters: parameters(chain.layers.len(), &tensors),
            suffixes: HashMap::new(),
        };
        for size in search.sizes() {
            let sized = Sized::new(chain, step, costs, &search.classes, size);
            search.sized.insert(size, sized);
        }
        for replicas in (1..=fleet.devices.len()).map(bucket) {
            for state in [State::Whole, State::Divided, State::Host] {
                search
                    .states
                    .entry((state, replicas))
                    .or_insert_with(|| StateBytes::new(chain.layers.len(), step, &tensors, state, replicas));
            }
        }
        search
    }

    /// Micro-batch sizes worth a look: every small one, then ever fewer.
    fn sizes(&self) -> Vec<usize> {
        if let Some(size) = self.wanted.micro_batch {
            return vec![size];
        }
        let units = self.step.global_batch.div_ceil(self.grain);
        let usual = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256];
        usual.iter().filter(|size| **size <= units).map(|size| size * self.grain).collect()
    }

    fn units(&self) -> usize {
        self.step.global_batch.div_ceil(self.grain)
    }

    fn orders(&self) -> Vec<Order> {
        self.wanted.order.map_or(vec![Order::Varuna, Order::OneForwardOneBackward], |order| vec![order])
    }

    /// All divisions, rated by the model, the best first.
    fn candidates(&mut self, state: State) -> Vec<Candidate> {
        let Some(middle) = self.sized.values().nth(self.sized.len() / 2) else { return Vec::new() };
        let speeds: Vec<f64> =
            (0..self.classes.all.len()).map(|class| 1.0 / middle.whole(class).max(1e-12)).collect();
        let bounds = Bounds {
            replicas_most: self.units(),
            depth_most: self.chain.layers.len(),
            replicas: self.wanted.replicas,
        };
        // The other order takes more memory, not less time, as far as the model goes.
        let order = self.wanted.order.unwrap_or(Order::OneForwardOneBackward);
        let mut candidates = Vec::new();
        let mut seen = HashSet::new();
        for division in divisions(&self.classes, &speeds, bounds) {
            let mut signature: Vec<Vec<Place>> =
                division.iter().map(|row| places(&mut self.classes, row)).collect();
            signature.sort_unstable();
            if seen.insert(signature) {
                candidates.extend(self.rate(&division, order, state).into_iter().flatten());
            }
        }
        candidates.sort_by(|a: &Candidate, b| a.seconds.total_cmp(&b.seconds));
        candidates
    }

    /// The best of different kinds, in every order and with state in every place that is in question.
    fn variants(&self, candidates: &mut Vec<Candidate>, states: &[State]) -> Vec<Candidate> {
        let Some(first) = candidates.first() else { return Vec::new() };
        let instructions = self.instructions(&self.pipeline(first));
        let (best, count) = (first.seconds, TRIED.count(instructions));
        // By the model, state is never better everywhere than in slices. Where only one plan is played through that decides.
        let states = if instructions > LARGE_INSTRUCTIONS { &states[..1] } else { states };
        let varied = count.div_ceil(VARIED);
        let mut kinds: Vec<Candidate> = Vec::new();
        candidates.retain(|candidate| {
            // Where many can be tried, so can those that differ in little.
            let other = count == TRIED.most || kinds.iter().all(|other| other.kind() != candidate.kind());
            let chosen = kinds.len() < count && other && candidate.seconds <= PROMISING * best;
            if chosen {
                kinds.push(candidate.clone());
            }
            !chosen
        });
        let mut variants = Vec::new();
        for (rank, candidate) in kinds.into_iter().enumerate() {
            // Without stages behind each other all orders are the same.
            let is_ordered = candidate.rows.iter().any(|row| row.devices.len() > 1);
            let orders = if rank < varied && is_ordered { self.orders() } else { vec![self.orders()[0]] };
            for order in orders {
                for state in states.iter().copied() {
                    // One replica has all of it wherever it is.
                    let same = state == State::Whole && candidate.rows.len() == 1 && states.len() > 1;
                    if !same && (state == candidate.state || rank < varied) {
                        variants.push(Candidate { order, state, ..candidate.clone() });
                    }
                }
            }
        }
        variants
    }

    /// A division cut and given its samples, by the model.
    fn rate(&mut self, division: &[Vec<usize>], order: Order, state: State) -> Option<Vec<Candidate>> {
        let replicas = bucket(division.len());
        let mut known: HashMap<Vec<Place>, usize> = HashMap::new();
        let mut options: Vec<Options> = Vec::new();
        let mut of = Vec::with_capacity(division.len());
        for row in division {
            let places = places(&mut self.classes, row);
            let number = match known.get(&places) {
                Some(number) => *number,
                None => {
                    options.push(self.options(row, order, state, replicas)?);
                    known.insert(places, options.len() - 1);
                    options.len() - 1
                }
            };
            of.push(number);
        }
        let kinds: Vec<Vec<Pace>> = options.iter().map(|options| options.paces(self.grain)).collect();
        let units = shares(self.units(), &kinds, &of);
        let with_sizes = |chosen: &dyn Fn(usize, usize) -> usize| {
            let rows = division.iter().zip(of.iter().zip(&units)).map(|(row, (number, units))| {
                let (order, places, cut, size) = &options[*number].by_size[chosen(*number, *units)];
                // The order is one of another row's devices: the same places in this one.
                let devices = reordered(&self.classes, row, order, places);
                let pace = Pace { fill: cut.fill, period: cut.period, micro_batch: *size };
                let (places, cut) = (places.clone(), cut.clone());
                Row { devices, places, cut, pace, samples: 0, reserves: Vec::new() }
            });
            Candidate { rows: rows.collect(), order, state, seconds: 0.0 }
        };
        let suited = |number: usize, units: usize| {
            let seconds = |place: &usize| kinds[number][*place].seconds(units);
            let by_time = |a: &usize, b: &usize| seconds(a).total_cmp(&seconds(b));
            (0..kinds[number].len()).min_by(by_time).unwrap_or(0)
        };
        let mut best = with_sizes(&suited);
        self.give(&mut best, &units);
        let mut candidates = vec![best];
        if self.classes.of.len() <= FEW_DEVICES {
            let most = options.iter().map(|options| options.by_size.len()).max().unwrap_or(0);
            candidates.extend((0..most).map(|size| {
                let limited = |number: usize, _| size.min(options[number].by_size.len() - 1);
                let mut candidate = with_sizes(&limited);
                self.share(&mut candidate);
                candidate
            }));
        }
        Some(candidates)
    }

    /// The best order and cut of a row for every size that fits.
    fn options(&mut self, row: &[usize], order: Order, state: State, replicas: usize) -> Option<Options> {
        let rows: Vec<(Vec<usize>, Vec<Place>)> = orders(&self.classes, row)
            .into_iter()
            .map(|row| {
                let places = places(&mut self.classes, &row);
                (row, places)
            })
            .collect();
        let (mut by_size, mut best_rate, mut idle) = (Vec::new(), 0.0f64, 0);
        let sizes: Vec<usize> = self.sized.keys().copied().collect();
        for size in sizes {
            self.sized.get_mut(&size)?.know_links(&self.classes);
            let key = (size, state, replicas, order == Order::Varuna);
            let mut suffixes = self.suffixes.remove(&key).unwrap_or_default();
            let judge = self.judge(size, order, state, replicas);
            let cuts = rows.iter().filter_map(|(row, places)| {
                let cut = suffixes.cut(&judge, places)?;
                Some((row.clone(), places.clone(), cut, size))
            });
            let best = cuts.min_by(|a, b| {
                (a.2.period, a.2.fill)
                    .partial_cmp(&(b.2.period, b.2.fill))
                    .unwrap_or(std::cmp::Ordering::Equal)
            });
            self.suffixes.insert(key, suffixes);
            // Larger ones do not fit either.
            let Some(best) = best else { break };
            let rate = size as f64 / best.2.period;
            by_size.push(best);
            if rate > best_rate * WORTHWHILE {
                (best_rate, idle) = (best_rate.max(rate), 0);
            } else {
                idle += 1;
            }
            if idle == 2 {
                break;
            }
        }
        (!by_size.is_empty()).then_some(Options { by_size })
    }

    fn judge(&self, size: usize, order: Order, state: State, replicas: usize) -> Judge<'_> {
        Judge {
            chain: self.chain,
            step: self.step,
            classes: &self.classes,
            sized: &self.sized[&size],
            state: &self.states[&(state, replicas)],
            order,
            activations: &self.activations,
        }
    }

    /// Finds every row's samples by its pace.
    fn share(&self, candidate: &mut Candidate) {
        let distinct = candidate.distinct();
        let kinds: Vec<Vec<Pace>> =
            candidate.rows.iter().map(|row| vec![row.pace.in_units(self.grain)]).collect();
        let units = shares(self.units(), &kinds, &distinct);
        self.give(candidate, &units);
    }

    /// Gives every row its samples; rows without any are left out. Then the whole is rated anew.
    fn give(&self, candidate: &mut Candidate, units: &[usize]) {
        let mut left = self.step.global_batch;
        for (row, units) in candidate.rows.iter_mut().zip(units) {
            row.samples = (units * self.grain).min(left);
            left -= row.samples;
        }
        candidate.rows.retain(|row| row.samples > 0);
        candidate.seconds = self.seconds(candidate);
    }

    /// Candidates with every row's pace as the simulator sees it, without those that do not fit; the best first.
    fn try_rows(&self, candidates: Vec<Candidate>) -> Result<Vec<Candidate>, PipelineError> {
        let mut trials: Vec<Trial> = Vec::new();
        let mut known: HashMap<Key, usize> = HashMap::new();
        let mut of: Vec<Vec<usize>> = Vec::new();
        for candidate in &candidates {
            let replicas = bucket(candidate.rows.len());
            let number = |row: &Row| {
                let trial =
                    Trial { row: row.clone(), order: candidate.order, state: candidate.state, replicas };
                *known.entry(trial.key()).or_insert_with(|| {
                    trials.push(trial);
                    trials.len() - 1
                })
            };
            of.push(candidate.rows.iter().map(number).collect());
        }
        let results: Vec<Option<Tuned>> =
            parallel::map(&trials, |trial| self.try_row(trial)).into_iter().collect::<Result<_, _>>()?;
        let mut tried = Vec::new();
        for (mut candidate, numbers) in candidates.into_iter().zip(of) {
            if numbers.iter().all(|number| results[*number].is_some()) {
                for (row, number) in candidate.rows.iter_mut().zip(numbers) {
                    if let Some(Tuned { cut, pace, reserves }) = results[number].clone() {
                        (row.cut, row.pace, row.reserves) = (cut, pace, reserves);
                    }
                }
                self.share(&mut candidate);
                tried.push(candidate);
            }
        }
        tried.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        Ok(tried)
    }

    /// Cuts a row for its number of micro-batches, and again until its forecast fits.
    fn try_row(&self, trial: &Trial) -> Result<Option<Tuned>, PipelineError> {
        let Trial { row, order, state, replicas } = trial;
        let count = row.samples.div_ceil(row.pace.micro_batch);
        let mut reserves = vec![0; row.devices.len()];
        let judge = self.judge(row.pace.micro_batch, *order, *state, *replicas);
        for _ in 0..CORRECTIONS {
            let Some(cut) = best_cut(&judge, &row.places, &reserves, count) else { return Ok(None) };
            let stages = stages(&row.devices, &cut, *order);
            let replica = Replica { samples: 0..0, micro_batch: row.pace.micro_batch, stages };
            let tried = self.bench.replica(&replica, count, *order, *state, *replicas)?;
            let short = |place: usize| {
                let needed = judge.divided_bytes(cut.stages[place].layers.clone()) + tried.bytes[place];
                needed.saturating_sub(self.bench.devices[row.devices[place]].budget_bytes)
            };
            let short: Vec<u64> = (0..cut.stages.len()).map(short).collect();
            if short.iter().all(|bytes| *bytes == 0) {
                return Ok(Some(Tuned { cut, pace: tried.pace, reserves }));
            }
            reserve(&mut reserves, &cut, &short);
        }
        Ok(None)
    }

    fn pipeline(&self, candidate: &Candidate) -> Pipeline {
        let mut next = 0;
        let replicas = candidate.rows.iter().map(|row| {
            let samples = next..next + row.samples;
            next = samples.end;
            Replica {
                samples,
                micro_batch: row.pace.micro_batch,
                stages: stages(&row.devices, &row.cut, candidate.order),
            }
        });
        Pipeline { replicas: replicas.collect(), order: candidate.order, state: candidate.state }
    }

    /// Whole steps of the best candidates; the quickest that fits, and the next best kind.
    fn confirm(&self, candidates: Vec<Candidate>) -> Result<Option<PipelinePlanned>, PipelineError> {
        let Some(first) = candidates.first() else { return Ok(None) };
        let instructions = self.instructions(&self.pipeline(first));
        let is_large = instructions > LARGE_INSTRUCTIONS;
        let wanted = if is_large { 1 } else { CONFIRMED.count(instructions) };
        let survive = if is_large { self.wanted.survive } else { 0 };
        let mut confirmed: Vec<Confirmed> = Vec::new();
        let mut candidates = candidates.into_iter().peekable();
        while confirmed.len() < wanted && candidates.peek().is_some() {
            let next: Vec<Candidate> = candidates.by_ref().take(wanted - confirmed.len()).collect();
            for tried in parallel::map(&next, |candidate| self.confirm_one(candidate, survive)) {
                confirmed.extend(tried?);
            }
        }
        let by_time = |a: &Confirmed, b: &Confirmed| a.tried.seconds.total_cmp(&b.tried.seconds);
        confirmed.sort_by(by_time);
        // What comes second may have more to gain.
        let mut best: Vec<Confirmed> =
            confirmed.drain(..confirmed.len().min(POLISHED.count(instructions))).collect();
        if instructions <= LOOPED_INSTRUCTIONS {
            let least = best.first().map_or(f64::INFINITY, |best| best.tried.seconds);
            for looped in parallel::map(&best, |confirmed| self.looped(confirmed, least)) {
                best.extend(looped?);
            }
        }
        best.sort_by(by_time);
        let overtaking = if instructions > SMALL_INSTRUCTIONS { OVERTAKING } else { f64::INFINITY };
        let (mut known, mut least) = (HashMap::new(), f64::INFINITY);
        for best in &mut best {
            if best.tried.seconds < overtaking * least {
                self.polish(best, &mut known)?;
                least = least.min(best.tried.seconds);
            }
        }
        confirmed.extend(best);
        confirmed.sort_by(by_time);
        let mut confirmed = confirmed.into_iter();
        let Some(Confirmed { estimated_seconds, kind, pipeline, tried }) = confirmed.next() else {
            return Ok(None);
        };
        let second = confirmed.find(|other| other.kind != kind).map(|other| RunnerUp {
            pipeline: other.pipeline,
            seconds: other.tried.seconds,
            is_simulated: true,
        });
        let runner_up = second.or_else(|| {
            let other = candidates.find(|other| other.kind() != kind)?;
            Some(RunnerUp { pipeline: self.pipeline(&other), seconds: other.seconds, is_simulated: false })
        });
        Ok(Some(PipelinePlanned {
            bottleneck: self.bottleneck(&pipeline),
            pipeline,
            estimated_seconds,
            seconds: tried.seconds,
            pipeline_seconds: tried.pipeline_seconds,
            simulated: tried.simulated,
            memory: tried.memory,
            plan: tried.plan,
            runner_up,
        }))
    }

    /// A candidate's whole step, with mirrors for so many losses, cut again while it does not fit.
    fn confirm_one(&self, candidate: &Candidate, survive: usize) -> Result<Option<Confirmed>, PipelineError> {
        let mut candidate = candidate.clone();
        for _ in 0..CORRECTIONS {
            let pipeline = self.pipeline(&candidate);
            let tried = self.bench.step_mirrored(&pipeline, survive)?;
            let short = self.bench.short(&tried);
            if short.is_empty() {
                let (estimated_seconds, kind) = (candidate.seconds, candidate.kind());
                return Ok(Some(Confirmed { estimated_seconds, kind, pipeline, tried }));
            }
            let replicas = bucket(candidate.rows.len());
            for row in &mut candidate.rows {
                let short: Vec<u64> =
                    row.devices.iter().map(|device| short.get(device).copied().unwrap_or(0)).collect();
                if short.iter().any(|bytes| *bytes > 0) {
                    row.reserves.resize(row.devices.len(), 0);
                    reserve(&mut row.reserves, &row.cut, &short);
                    let judge = self.judge(row.pace.micro_batch, candidate.order, candidate.state, replicas);
                    let count = row.samples.div_ceil(row.pace.micro_batch);
                    match best_cut(&judge, &row.places, &row.reserves, count) {
                        Some(cut) => row.cut = cut,
                        None => return Ok(None),
                    }
                }
            }
        }
        Ok(None)
    }

    /// How much is missing at the leanest: all devices in a row, a sample at a time.
    fn shortage(&mut self, state: State) -> PipelineError {
        let (devices, layers) = (self.classes.of.len(), self.chain.layers.len());
        let replicas = self.wanted.replicas.unwrap_or(1);
        if replicas > devices {
            return PipelineError::NoDivision { replicas, devices, layers };
        }
        let Some(size) = self.sized.keys().next().copied() else { return PipelineError::NoDevice };
        let mut row: Vec<usize> = (0..devices).collect();
        row.sort_by_key(|device| std::cmp::Reverse(self.classes.budget(*device)));
        row.truncate(devices / replicas);
        row.truncate(layers);
        let places = places(&mut self.classes, &row);
        if let Some(sized) = self.sized.get_mut(&size) {
            sized.know_links(&self.classes);
        }
        let order = self.wanted.order.unwrap_or(Order::OneForwardOneBackward);
        let (short, place) = shortage(&self.judge(size, order, state, bucket(replicas)), &places);
        let device = &self.bench.devices[row[place]];
        PipelineError::TooSmall {
            devices,
            device: device.name.clone(),
            short_bytes: short.max(1),
            budget_bytes: device.budget_bytes,
            how: if state == State::Host {
                "the optimizer on the host"
            } else {
                "the optimizer on the devices"
            },
        }
    }
}

/// Keeps free what stages turned out to lack, in those too that are run in the same way and as full: once the first
/// gives way it would be their turn.
fn reserve(reserves: &mut [u64], cut: &Cut, short: &[u64]) {
    for place in (0..short.len()).filter(|place| short[*place] > 0) {
        let own = reserves[place] + short[place];
        reserves[place] = own;
        for (other, stage) in cut.stages.iter().enumerate() {
            let alike = stage.choice.activations == cut.stages[place].choice.activations;
            if alike && stage.choice.stash.is_some() {
                reserves[other] = reserves[other].max(own);
            }
        }
    }
}

fn places(classes: &mut Classes, row: &[usize]) -> Vec<Place> {
    let place = |number: usize| Place {
        class: classes.of[row[number]],
        link: row.get(number + 1).map(|next| classes.link(row[number], *next)),
    };
    (0..row.len()).map(place).collect()
}

/// A row's devices in the order of another's, class by class.
fn reordered(classes: &Classes, row: &[usize], order: &[usize], places: &[Place]) -> Vec<usize> {
    let same: Vec<usize> = row.iter().map(|device| classes.of[*device]).collect();
    if same.iter().zip(places).all(|(class, place)| *class == place.class) {
        return row.to_vec();
    }
    let mut left: Vec<usize> = row.to_vec();
    let taken = order.iter().filter_map(|device| {
        let class = classes.of[*device];
        let place = left.iter().position(|other| classes.of[*other] == class)?;
        Some(left.remove(place))
    });
    taken.collect()
}

/// Samples that batch norms take together, so that no micro-batch may part them.
fn grain(chain: &Chain, global_batch: usize) -> usize {
    let norms = (0..chain.layers.len()).filter_map(|layer| chain.batch_norm(layer));
    let groups = norms.map(|norm| norm.group.unwrap_or(global_batch));
    groups.fold(1, least_common_multiple).min(global_batch)
}

fn least_common_multiple(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}
