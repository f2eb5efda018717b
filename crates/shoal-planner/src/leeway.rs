//! How far devices may go ahead where something is late. A step as it is foreseen gains nothing by it; steps on networks that lose
//! packets and machines that others use do, and what it takes is memory that nothing else wants. So a plan that is otherwise
//! done is given as much as its devices have room for.

use std::collections::BTreeSet;

use shoal_plan::memory::forecasts;
use shoal_plan::{Instruction, Layout, Op, Order, Plan, Purpose, compile_in};
use shoal_sim::{FleetWorld, Settings, simulate};

use crate::auto::{Candidate, Request, hold};
use crate::improve::INSTRUCTIONS_MOST;

/// How many units devices may go ahead: what is tried, in turn.
const TRIED: [usize; 3] = [4, 2, 1];

/// By how much slower a step may be that nothing is late in: to begin something just before what is waited for comes costs a
/// little.
const SLOWER_MOST: f64 = 1.002;

/// The plan, with as much leeway as there is room for.
pub(crate) fn given(candidate: Candidate, request: &Request) -> Candidate {
    let plan = &candidate.plan;
    let has_any = plan.devices.iter().any(|row| row.leeway > 0);
    let instructions: usize = candidate.simulated.spans.iter().map(Vec::len).sum();
    if plan.order == Order::LayerFirst || has_any || instructions > INSTRUCTIONS_MOST {
        return candidate;
    }
    let within = SLOWER_MOST * candidate.simulated.seconds;
    TRIED.iter().find_map(|most| with(*most, &candidate, request, within)).unwrap_or(candidate)
}

/// The same plan with so much leeway, or less on those devices that lack the room. None where that is nowhere any, or too slow.
fn with(most: usize, candidate: &Candidate, request: &Request, within: f64) -> Option<Candidate> {
    let Request { chain, fleet, costs, .. } = *request;
    let mut plan = candidate.plan.clone();
    let shares = candidate.plan.layers.iter().flat_map(|row| &row.compute);
    let computing: BTreeSet<usize> = shares.map(|compute| compute.device).collect();
    computing.into_iter().for_each(|device| plan.devices[device].leeway = most);
    loop {
        let layout = Layout::new(&plan, chain);
        let world = FleetWorld::new(fleet, costs, &layout);
        let programs = compile_in(&layout, Purpose::Train, &world).ok()?;
        let goes_ahead = |next: &Instruction| next.computes_ahead() && matches!(next.op, Op::Forward { .. });
        if !programs.iter().flat_map(|program| &program.instructions).any(goes_ahead) {
            return None;
        }
        let memory = forecasts(&programs, &layout);
        if hold(&plan, fleet, &memory).is_ok() {
            let simulated = simulate(&programs, &layout, &world, Settings::default()).ok()?;
            drop(layout);
            let candidate = Candidate { shape: candidate.shape, plan, simulated, memory };
            return Some(candidate).filter(|candidate| candidate.simulated.seconds <= within);
        }
        drop(layout);
        if !lower(&mut plan, |device| memory[device].total() > candidate.plan.devices[device].budget_bytes) {
            return None;
        }
    }
}

/// Halves the leeway of devices that lack room; where none lacks it, of all: then it is a host that does. False where there is
/// nothing left to take.
fn lower(plan: &mut Plan, lacks_room: impl Fn(usize) -> bool) -> bool {
    let any = (0..plan.devices.len()).any(&lacks_room);
    let mut lowered = false;
    for (device, row) in plan.devices.iter_mut().enumerate() {
        if row.leeway > 0 && (!any || lacks_room(device)) {
            row.leeway /= 2;
            lowered = true;
        }
    }
    lowered
}

#[cfg(test)]
mod tests {
    use shoal_fleet::{Costs, Fleet};
    use shoal_model::{Chain, presets};
    use shoal_plan::one_device::StepShape;
    use shoal_plan::{compile, compile_paced, verify_all};

    use super::*;
    use crate::auto;

    fn fleet(count: usize, memory: &str) -> Fleet {
        let text = format!(
            "[[node]]\nname = \"n\"\ncount = {count}\nhost_memory = \"16 GiB\"\nnetwork = \"5 Gbit/s\"\n\
             devices = [{{ kind = \"V100\", memory = \"{memory}\" }}]\n"
        );
        Fleet::parse(&text, "fleet").unwrap()
    }

    #[test]
    fn pipelines_get_as_much_leeway_as_there_is_room_for() {
        let chain = Chain::new(&presets::gpt2(4096, 512, 10, 8, 256));
        let step = StepShape { global_batch: 32, sequence: 256, ..StepShape::ADAM };
        let mut leeways = Vec::new();
        for memory in ["16 GiB", "800 MiB"] {
            let fleet = fleet(4, memory);
            let costs = Costs::new(&chain, &fleet, None, step.precision, step.sequence).unwrap();
            let request = auto::Request {
                shapes: &[auto::Shape::Pipeline],
                ..auto::Request::new(&chain, step, &fleet, &costs)
            };
            let found = auto::plan(&request).unwrap().best;
            hold(&found.plan, &fleet, &found.memory).unwrap();
            let layout = Layout::new(&found.plan, &chain);
            let world = FleetWorld::new(&fleet, &costs, &layout);
            let programs = compile_paced(&found.plan, &chain, Purpose::Train, &world).unwrap();
            verify_all(&programs, &found.plan, &chain, Purpose::Train).unwrap();
            leeways.push(found.plan.devices.iter().map(|row| row.leeway).sum::<usize>());
            let mut without = found.plan.clone();
            without.devices.iter_mut().for_each(|row| row.leeway = 0);
            let calm = auto::rated(found.shape, &without, &request).unwrap().simulated.seconds;
            assert!(found.simulated.seconds <= SLOWER_MOST * calm, "{memory}");
            // What has some keeps it.
            let again = given(found.clone(), &request);
            assert_eq!(again.plan, found.plan);
        }
        assert!(leeways[0] > leeways[1], "{leeways:?}");
    }

    #[test]
    fn a_device_to_which_nothing_comes_gets_none() {
        let chain = Chain::new(&presets::gpt2(4096, 512, 10, 8, 256));
        let step = StepShape { global_batch: 32, sequence: 256, ..StepShape::ADAM };
        let fleet = fleet(1, "4 GiB");
        let costs = Costs::new(&chain, &fleet, None, step.precision, step.sequence).unwrap();
        let request = auto::Request {
            shapes: &[auto::Shape::Pipeline],
            ..auto::Request::new(&chain, step, &fleet, &costs)
        };
        let mut plan = auto::plan(&request).unwrap().best.plan;
        assert_eq!(plan.devices[0].leeway, 0);
        // Asked for all the same, it changes nothing.
        let without = compile(&plan, &chain, Purpose::Train).unwrap();
        plan.devices[0].leeway = 3;
        assert_eq!(compile(&plan, &chain, Purpose::Train).unwrap(), without);
    }
}
