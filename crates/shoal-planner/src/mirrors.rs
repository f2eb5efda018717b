//! Against loss: state that is on one machine only gets a mirror in the memory of another machine's host. The mirror
//! receives the reduced gradient and applies the same update, so it is always at the same step; it costs a sixth of what
//! copying the state each step would.

use shoal_fleet::Fleet;
use shoal_plan::{Held, Holder, Plan, TensorRow};

/// The table with every slice on two machines at least, where there are two.
pub fn mirrored(plan: &Plan, fleet: &Fleet) -> Plan {
    let mut plan = plan.clone();
    if fleet.nodes.len() > 1 {
        plan.tensors.iter_mut().for_each(|row| mirror(row, fleet));
    }
    plan
}

fn mirror(row: &mut TensorRow, fleet: &Fleet) {
    let node = |holder: Holder| fleet.devices[holder.device()].node;
    let mut added = Vec::new();
    for held in &row.optimizer {
        let others = row.optimizer.iter().filter(|other| other.slice == held.slice);
        if others.into_iter().all(|other| node(other.holder) == node(held.holder)) {
            // The next machine's: each then mirrors about as much as it holds.
            let next = (node(held.holder) + 1) % fleet.nodes.len();
            let holder = Holder::Host(fleet.nodes[next].devices.start);
            let mirror = Held { holder, slice: held.slice };
            if !added.contains(&mirror) {
                added.push(mirror);
            }
        }
    }
    row.optimizer.extend(added.iter().cloned());
    row.gradient.extend(added);
}
