//! The table behind a decision: layer by layer, every device its own samples, every tensor cut by the holders' shares.

use shoal_fleet::Fleet;
use shoal_model::Chain;
use shoal_model::footprint::GRANULE_BYTES;
use shoal_plan::table::FORMAT;
use shoal_plan::{
    Activations, Compute, ComputeCopy, DeviceRow, Held, Holder, LayerRow, Order, Plan, Residence, Samples,
    StepShape, TensorRow,
};

use super::Decision;
use super::work::is_remade;

/// The table of a decision that was made for this model, step and fleet.
///
/// # Panics
/// If it was not: where nobody keeps any state, or devices are missing.
pub fn table(chain: &Chain, step: StepShape, fleet: &Fleet, decision: &Decision) -> Plan {
    let micro_batches = micro_batches(decision);
    let layers = chain.layers.iter().map(|layer| {
        let compute = decision.devices.iter().enumerate().filter_map(|(device, share)| {
            let way = share.way?;
            let activations = if is_remade(&layer.kind) { way.activations } else { Activations::Keep };
            Some(Compute { device, micro_batches: micro_batches[device].clone(), activations })
        });
        LayerRow { layer: layer.name.clone(), compute: compute.collect() }
    });
    let mut cutter = Cutter::new(fleet, decision);
    let computing: Vec<usize> =
        (0..decision.devices.len()).filter(|device| decision.devices[*device].way.is_some()).collect();
    let tensors = chain.tensors.iter().map(|tensor| {
        let held = cutter.cut(tensor.elements());
        let copy = |device: &usize| {
            let is_whole = held.len() == 1 && held[0].holder == Holder::Device(*device);
            let residence = if is_whole { Residence::Resident } else { Residence::Fetched };
            ComputeCopy { device: *device, residence }
        };
        TensorRow {
            tensor: tensor.name.clone(),
            elements: tensor.elements(),
            compute_copies: computing.iter().map(copy).collect(),
            gradient: held.clone(),
            optimizer: held,
        }
    });
    let row = |(device, share): (&shoal_fleet::Device, &super::DeviceShare)| DeviceRow {
        name: device.name.clone(),
        budget_bytes: share.budget_bytes,
        workspace_bytes: share.workspace_bytes,
        stash: None,
        leeway: 0,
        puts_off: 0,
    };
    Plan {
        format: FORMAT,
        global_batch: step.global_batch,
        sequence: step.sequence,
        precision: step.precision,
        optimizer_states: step.optimizer_states,
        gradients: step.gradients,
        devices: fleet.devices.iter().zip(&decision.devices).map(row).collect(),
        order: Order::LayerFirst,
        layers: layers.collect(),
        tensors: tensors.collect(),
    }
}

/// By device: its samples follow those of the device before.
fn micro_batches(decision: &Decision) -> Vec<Vec<Samples>> {
    let mut start = 0;
    let mut cut = |share: &super::DeviceShare| {
        let end = start + share.samples;
        let mut batches = Vec::new();
        while let Some(way) = share.way.filter(|_| start < end) {
            let next = end.min(start + way.micro_batch);
            batches.push(Samples { start, end: next });
            start = next;
        }
        batches
    };
    decision.devices.iter().map(&mut cut).collect()
}

/// Cuts tensors by the holders' shares.
struct Cutter {
    holders: Vec<(Holder, f64)>,
    /// By holder, elements it has been given, and all.
    given: Vec<f64>,
    all: f64,
}

impl Cutter {
    fn new(fleet: &Fleet, decision: &Decision) -> Cutter {
        let devices = decision.devices.iter().enumerate();
        let devices = devices.map(|(device, share)| (Holder::Device(device), share.state));
        let hosts = fleet.nodes.iter().zip(&decision.hosts);
        let hosts = hosts.map(|(node, share)| (Holder::Host(node.devices.start), *share));
        let holders: Vec<(Holder, f64)> = devices.chain(hosts).filter(|(_, share)| *share > 0.0).collect();
        Cutter { given: vec![0.0; holders.len()], holders, all: 0.0 }
    }

    fn cut(&mut self, elements: usize) -> Vec<Held> {
        self.all += elements as f64;
        // Pieces of less than an allocation's least would cost more in messages than they spare.
        if elements < self.holders.len() * (GRANULE_BYTES as usize / 4) {
            let lack = |at: &usize| self.holders[*at].1 * self.all - self.given[*at];
            let neediest = (0..self.holders.len())
                .max_by(|a, b| lack(a).total_cmp(&lack(b)))
                .expect("somebody keeps state");
            self.given[neediest] += elements as f64;
            return vec![Held { holder: self.holders[neediest].0, slice: Samples::new(0..elements) }];
        }
        let (mut start, mut share) = (0, 0.0);
        let mut held = Vec::new();
        for (at, (holder, weight)) in self.holders.iter().enumerate() {
            share += weight;
            let is_last = at + 1 == self.holders.len();
            let end = if is_last { elements } else { (share * elements as f64) as usize };
            if end > start {
                held.push(Held { holder: *holder, slice: Samples { start, end } });
                self.given[at] += (end - start) as f64;
            }
            start = end.max(start);
        }
        held
    }
}
