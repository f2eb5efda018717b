//! A plan made better step by step, whatever its shape. Searches look at tables of their own kind: pieces of one size, stages
//! cut by a model. Here the table itself is changed in small ways that none of them knows (a sample more in one piece, small
//! pieces where a pipeline fills and drains, a layer's activations, what may be stashed, a layer to the next device), each change is
//! played through, and what is quicker and fits is kept. Sometimes what is a little slower is kept too, less so towards the
//! end, since one change alone often does not help where two do.
//!
//! How much is tried is bounded by instructions, not by a clock: the same request has the same plan on every machine.

mod moves;

use shoal_plan::memory::forecasts;
use shoal_plan::{Layout, Order, Plan, Program, parallel};
use shoal_sim::{FleetWorld, Settings, simulate};

use crate::auto::{Candidate, Request, Shape, hold};
use crate::bound::Within;
use moves::{Changes, PUT_OFF_MOST, in_flight};

/// Changes that are tried beside each other; the best of them is gone on with.
const AT_ONCE: usize = 8;

/// By how much slower than the plan in hand one may be that is gone on with, at the beginning of so many rounds; at their end not
/// at all. Then it begins again: who tries longer goes the same way, and further.
const SLOWER_MOST: f64 = 0.006;
const ROUNDS: usize = 100;

/// After so many rounds in a row in which nothing better than the best was found the search goes on from the best again, with
/// layers on other devices, which may be slower by so much at first: what suits them is found from there.
const IDLE_MOST: usize = 20;
const SLOWER_AT_FIRST: f64 = 0.05;

/// Steps of more instructions are left as they are: too little could be tried of what there is.
pub(crate) const INSTRUCTIONS_MOST: usize = 60_000;

/// The plan, or a quicker one like it, as far as that is found by playing so many instructions.
pub fn improve(candidate: Candidate, request: &Request, instructions: usize) -> Candidate {
    let Some(mut current) = Played::new(&candidate, request) else { return candidate };
    let cost = current.programs.iter().map(|program| program.instructions.len()).sum::<usize>().max(1);
    let rounds = instructions / (cost * AT_ONCE);
    if cost > INSTRUCTIONS_MOST || rounds == 0 {
        return candidate;
    }
    let devices = 0..request.fleet.devices.len();
    let is_processor = devices.map(|device| request.costs.is_processor(device)).collect();
    let mut changes = Changes::new(request.chain, is_processor);
    let (mut best, mut idle) = (candidate, 0);
    if let Some(quicker) = putting_off(&best, request) {
        best = quicker.candidate.clone();
        current = quicker;
    }
    for round in 0..rounds {
        let from_best = idle == IDLE_MOST;
        if from_best {
            idle = 0;
            let Some(again) = Played::new(&best, request) else { break };
            current = again;
        }
        let in_flight = in_flight(&current.programs);
        let plan = &current.candidate.plan;
        let propose = |_| match from_best {
            true => changes.propose_layer(plan),
            false => changes.propose(plan, &in_flight),
        };
        let tried: Vec<Plan> = (0..AT_ONCE).filter_map(propose).collect();
        let slower = match from_best {
            true => 1.0 + SLOWER_AT_FIRST,
            false => 1.0 + SLOWER_MOST * (1.0 - (round % ROUNDS) as f64 / ROUNDS as f64),
        };
        let within = Within::quicker(slower * current.seconds(), slower * current.foreseen_seconds);
        let played = parallel::map_into(tried, |plan| Played::within(best.shape, plan, request, within));
        let quickest = played.into_iter().flatten().min_by(|a, b| a.seconds().total_cmp(&b.seconds()));
        current = quickest.unwrap_or(current);
        if current.seconds() < best.simulated.seconds {
            best = current.candidate.clone();
            idle = 0;
        } else {
            idle += 1;
        }
    }
    best
}

/// How many units' gradients of weights may wait: what is tried of all devices at once.
const PUT_OFF_TRIED: [usize; 4] = [1, 2, 4, PUT_OFF_MOST];

/// The plan with weights' gradients put off by all devices, where that is quicker. No search knows of it, and little of what makes
/// pipelines quicker without it does so with it: what else is changed is changed from there.
fn putting_off(candidate: &Candidate, request: &Request) -> Option<Played> {
    if candidate.plan.order == Order::LayerFirst {
        return None;
    }
    let tried = PUT_OFF_TRIED.map(|most| {
        let mut plan = candidate.plan.clone();
        plan.devices.iter_mut().for_each(|row| row.puts_off = most);
        plan
    });
    let within = Within::seconds(candidate.simulated.seconds * (1.0 - 1e-9));
    let played =
        parallel::map_into(tried.into(), |plan| Played::within(candidate.shape, plan, request, within));
    played.into_iter().flatten().min_by(|a, b| a.seconds().total_cmp(&b.seconds()))
}

/// A plan with what changes are made by.
struct Played {
    candidate: Candidate,
    programs: Vec<Program>,
    foreseen_seconds: f64,
}

impl Played {
    fn seconds(&self) -> f64 {
        self.candidate.simulated.seconds
    }

    fn new(candidate: &Candidate, request: &Request) -> Option<Played> {
        Played::within(candidate.shape, candidate.plan.clone(), request, Within::any())
    }

    /// None where a plan does not compile, fit or come to an end soon enough.
    fn within(shape: Shape, plan: Plan, request: &Request, within: Within) -> Option<Played> {
        let Request { chain, fleet, costs, .. } = *request;
        plan.check(chain).ok()?;
        let layout = Layout::new(&plan, chain);
        let world = FleetWorld::new(fleet, costs, &layout);
        let ordered = within.order(&layout, &world).ok()??;
        let foreseen_seconds = ordered.foreseen_seconds;
        let programs = ordered.link();
        let simulated = simulate(&programs, &layout, &world, Settings::default()).ok()?;
        if simulated.seconds >= within.seconds {
            return None;
        }
        let memory = forecasts(&programs, &layout);
        hold(&plan, fleet, &memory).ok()?;
        drop(layout);
        let candidate = Candidate { shape, plan, simulated, memory };
        Some(Played { candidate, programs, foreseen_seconds })
    }
}

#[cfg(test)]
mod tests {
    use shoal_fleet::{Costs, Fleet};
    use shoal_model::{Chain, presets};
    use shoal_plan::draw::{self, Draw};
    use shoal_plan::one_device::StepShape;
    use shoal_plan::{Purpose, compile_paced, verify_all};

    use super::*;
    use crate::auto;

    #[test]
    fn whatever_is_changed_of_any_table_it_stays_one_that_runs() {
        let (mut changed, mut layers) = (0, 0);
        for seed in 0..300 {
            let mut draw = Draw::new(seed);
            let (chain, sequence) = draw::model(&mut draw);
            let step = draw::step(&mut draw, sequence);
            let plan = draw::table(&chain, step, 5, &mut draw);
            let pace = shoal_plan::ByArithmetic::new(&chain, sequence);
            let programs = compile_paced(&plan, &chain, Purpose::Train, &pace).unwrap();
            let mut changes = Changes::new(&chain, vec![false, true, false, false, false]);
            for _ in 0..10 {
                let proposed = [changes.propose(&plan, &in_flight(&programs)), changes.propose_layer(&plan)];
                for other in proposed.into_iter().flatten() {
                    changed += 1;
                    layers += usize::from(other.tensors != plan.tensors);
                    other.check(&chain).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
                    // Pieces of a batch norm's group may have to go layer by layer.
                    let Ok(programs) = compile_paced(&other, &chain, Purpose::Train, &pace) else { continue };
                    let verified = verify_all(&programs, &other, &chain, Purpose::Train);
                    verified.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
                }
            }
        }
        assert!(changed > 1500 && layers > 20, "{changed} tables, {layers} with layers elsewhere");
    }

    fn fleet(memory: &str) -> Fleet {
        let node = |name: &str, kind: &str| {
            format!(
                "[[node]]\nname = \"{name}\"\nhost_memory = \"16 GiB\"\nnetwork = \"10 Gbit/s\"\n\
                 devices = [{{ kind = \"{kind}\", memory = \"{memory}\" }}]\n"
            )
        };
        let nodes = [("a", "V100"), ("b", "T4"), ("c", "V100")].map(|(name, kind)| node(name, kind));
        Fleet::parse(&nodes.concat(), "fleet").unwrap()
    }

    #[test]
    fn what_is_improved_is_quicker_fits_and_is_the_same_every_time() {
        let chain = Chain::new(&presets::gpt2(4096, 512, 10, 8, 256));
        let step = StepShape { global_batch: 32, sequence: 256, ..StepShape::ADAM };
        let mut gains = Vec::new();
        for (memory, survive) in [("1.5 GiB", 0), ("1 GiB", 0), ("4 GiB", 1)] {
            let fleet = fleet(memory);
            let costs = Costs::new(&chain, &fleet, None, step.precision, step.sequence).unwrap();
            let request = auto::Request { survive, ..auto::Request::new(&chain, step, &fleet, &costs) };
            let before = auto::plan(&request).unwrap().best;
            let after = improve(before.clone(), &request, 1_000_000);
            let again = improve(before.clone(), &request, 1_000_000);
            assert_eq!(after.plan, again.plan, "{memory}");
            assert_eq!(after.simulated.seconds, again.simulated.seconds, "{memory}");
            assert!(after.simulated.seconds <= before.simulated.seconds, "{memory}");
            hold(&after.plan, &fleet, &after.memory).unwrap_or_else(|short| panic!("{memory}: {short}"));
            let same = Played::new(&after, &request).expect("it was played");
            assert_eq!(same.seconds(), after.simulated.seconds, "{memory}");
            // What state is where, and how often, is no matter of speed.
            let kept = |plan: &Plan| plan.tensors.iter().map(|row| row.optimizer.len()).collect::<Vec<_>>();
            assert_eq!(kept(&after.plan), kept(&before.plan), "{memory}");
            assert_eq!(improve(before.clone(), &request, 0).plan, before.plan, "{memory}");
            gains.push(1.0 - after.simulated.seconds / before.simulated.seconds);
        }
        assert!(gains.iter().any(|gain| *gain > 0.01), "{gains:?}");
    }
}
