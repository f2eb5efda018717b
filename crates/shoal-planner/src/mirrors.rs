//! Against loss: state that is on too few machines gets mirrors in the memories of other machines' hosts. A mirror receives
//! the reduced gradient and applies the same update, so it is always at the same step; it costs a sixth of what copying
//! the state each step would.

use std::collections::{BTreeMap, BTreeSet};

use shoal_fleet::Fleet;
use shoal_model::Chain;
use shoal_plan::one_device::StepShape;
use shoal_plan::{Held, Holder, Plan, Slice, TensorRow};
use thiserror::Error;

#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum MirrorError {
    #[error(
        "to survive the loss of {survive} machines at once, state must be on {} of them, and the fleet has {machines}",
        survive + 1
    )]
    Machines { survive: usize, machines: usize },
    #[error(
        "to survive the loss of {survive} machines at once, state must be on {} of them: {tensor} has no room in so many \
         hosts' memories, which are {short_bytes} bytes short",
        survive + 1
    )]
    Room { survive: usize, tensor: String, short_bytes: u64 },
}

impl MirrorError {
    pub fn hint(&self) -> String {
        let more = match self {
            MirrorError::Machines { .. } => "add machines to the fleet",
            MirrorError::Room { .. } => "add machines or host memory to the fleet",
        };
        format!("{more}, or ask to survive fewer losses (plan.survive, --survive; 0 keeps no mirrors)")
    }
}

/// The table with every slice on `survive` machines more than one, so that so many may be lost at once. What has enough
/// holders gets no more.
pub fn mirrored(plan: &Plan, fleet: &Fleet, survive: usize) -> Result<Plan, MirrorError> {
    let machines = fleet.nodes.len();
    if survive >= machines && survive > 0 {
        return Err(MirrorError::Machines { survive, machines });
    }
    let mut plan = plan.clone();
    let mut rooms = Rooms::new(&plan, fleet);
    for row in &mut plan.tensors {
        let added = rooms.mirrors(row, survive)?;
        let slices: BTreeSet<Slice> = row.gradient.iter().map(|held| held.slice).collect();
        // A device that computes alone has the sum already, and hands it over; others add up together with the mirrors,
        // which costs the network no more than handing over afterwards. Where the sum is cut otherwise, it is handed over
        // to mirrors as to the other holders.
        let adds_alone = row.compute_copies.len() == 1;
        for mirror in added.iter().filter(|_| !adds_alone) {
            if slices.contains(&mirror.slice) && !row.gradient.contains(mirror) {
                row.gradient.push(mirror.clone());
            }
        }
        row.optimizer.extend(added);
    }
    Ok(plan)
}

/// The fleet without the room that mirrors take of its hosts if everything is mirrored, and evenly; none where there are
/// none to make room for.
pub(crate) fn reserved(chain: &Chain, step: StepShape, fleet: &Fleet, survive: usize) -> Option<Fleet> {
    if survive == 0 {
        return None;
    }
    let mirrors = element_bytes(step.optimizer_states) * chain.parameters() * survive as u64;
    let each = mirrors.div_ceil(fleet.nodes.len().max(1) as u64);
    let mut fleet = fleet.clone();
    for node in &mut fleet.nodes {
        node.host_memory_bytes = node.host_memory_bytes.saturating_sub(each);
    }
    Some(fleet)
}

/// Of an element in a host's memory: parameter, gradient and what the optimizer keeps.
fn element_bytes(optimizer_states: usize) -> u64 {
    4 * (2 + optimizer_states as u64)
}

/// Bytes that every node's host has left.
struct Rooms<'a> {
    fleet: &'a Fleet,
    left: Vec<u64>,
    element_bytes: u64,
}

impl Rooms<'_> {
    fn new<'a>(plan: &Plan, fleet: &'a Fleet) -> Rooms<'a> {
        let left = fleet.nodes.iter().map(|node| node.host_memory_bytes).collect();
        let mut rooms = Rooms { fleet, left, element_bytes: element_bytes(plan.optimizer_states) };
        for held in plan.tensors.iter().flat_map(|row| &row.optimizer) {
            if let Holder::Host(device) = held.holder {
                let left = &mut rooms.left[fleet.devices[device].node];
                *left = left.saturating_sub(rooms.element_bytes * held.slice.count() as u64);
            }
        }
        rooms
    }

    /// The mirrors that a tensor's slices still need.
    fn mirrors(&mut self, row: &TensorRow, survive: usize) -> Result<Vec<Held>, MirrorError> {
        let mut nodes: BTreeMap<Slice, BTreeSet<usize>> = BTreeMap::new();
        for held in &row.optimizer {
            nodes.entry(held.slice).or_default().insert(self.fleet.devices[held.holder.device()].node);
        }
        let mut added = Vec::new();
        for held in &row.optimizer {
            // By the first of its holders.
            let Some(mut nodes) = nodes.remove(&held.slice) else { continue };
            while nodes.len() <= survive {
                let node = self.place(held, &nodes).ok_or_else(|| self.short(row, held, &nodes, survive))?;
                self.left[node] -= self.bytes(held);
                nodes.insert(node);
                let holder = Holder::Host(self.serving(held.holder.device(), node));
                added.push(Held { holder, slice: held.slice });
            }
        }
        Ok(added)
    }

    fn bytes(&self, held: &Held) -> u64 {
        self.element_bytes * held.slice.count() as u64
    }

    /// The next machine with room: each then mirrors about as much as it holds, and what a machine holds has its mirrors
    /// together, so that few take part in adding up a layer's gradients.
    fn place(&self, held: &Held, nodes: &BTreeSet<usize>) -> Option<usize> {
        let (count, first) = (self.fleet.nodes.len(), self.fleet.devices[held.holder.device()].node);
        let others = (1..count).map(|step| (first + step) % count);
        others.into_iter().find(|node| !nodes.contains(node) && self.left[*node] >= self.bytes(held))
    }

    /// The device whose lanes serve a mirror there: its neighbours' mirrors are its neighbours' affair.
    fn serving(&self, device: usize, node: usize) -> usize {
        let place = device - self.fleet.nodes[self.fleet.devices[device].node].devices.start;
        let devices = self.fleet.nodes[node].devices.clone();
        devices.start + place % devices.len().max(1)
    }

    fn short(&self, row: &TensorRow, held: &Held, nodes: &BTreeSet<usize>, survive: usize) -> MirrorError {
        let others = (0..self.left.len()).filter(|node| !nodes.contains(node));
        let roomiest = others.map(|node| self.left[node]).max().unwrap_or_default();
        let short_bytes = self.bytes(held).saturating_sub(roomiest);
        MirrorError::Room { survive, tensor: row.tensor.clone(), short_bytes }
    }
}
