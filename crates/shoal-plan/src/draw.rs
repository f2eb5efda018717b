//! Random tables from the whole space, for whatever must hold for every one of them: that it compiles, runs without
//! waiting forever, keeps its memory, trains the same model. A table is a function of its seed; [`features`] says what
//! is in it, so that a test can show that nothing was left out.

use std::collections::BTreeSet;

use shoal_model::{Chain, ConvolutionalConfig, ImageShape, Precision, presets};

use crate::compile::splits_groups;
use crate::layout::Layout;
use crate::one_device::StepShape;
use crate::table::{
    Activations, Compute, ComputeCopy, DeviceRow, FORMAT, Held, Holder, LayerRow, Order, Plan, Residence,
    Samples, TensorRow,
};

/// Numbers drawn from a seed.
#[derive(Clone, Debug)]
pub struct Draw(u64);

impl Draw {
    pub fn new(seed: u64) -> Draw {
        Draw(seed)
    }

    fn next(&mut self) -> u64 {
        // A Weyl sequence through a mixer of 64 bits: any seed serves.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// One of so many numbers, from 0 on.
    pub fn below(&mut self, count: usize) -> usize {
        (self.next() % count as u64) as usize
    }

    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Cuts 0..length into at most so many runs.
    fn cut(&mut self, length: usize, most: usize) -> Vec<Samples> {
        let mut at = BTreeSet::from([0, length]);
        for _ in 1..=self.below(most) {
            at.insert(self.below(length.max(1)));
        }
        let at: Vec<usize> = at.into_iter().collect();
        at.windows(2).map(|pair| Samples { start: pair[0], end: pair[1] }).collect()
    }
}

/// A table for a model, on up to so many devices.
pub fn table(chain: &Chain, step: StepShape, most_devices: usize, draw: &mut Draw) -> Plan {
    let devices = 1 + draw.below(most_devices);
    let layers = match draw.below(3) {
        0 => stages(chain, step.global_batch, devices, draw),
        1 => everywhere(chain, step.global_batch, devices, draw),
        _ => anyhow(chain, step.global_batch, devices, draw),
    };
    let orders = [
        Order::MicroBatchFirst,
        Order::LayerFirst,
        Order::OneForwardOneBackward,
        Order::Varuna,
        Order::Gpipe,
        Order::LayerFirst,
    ];
    let mut plan = Plan {
        format: FORMAT,
        global_batch: step.global_batch,
        sequence: step.sequence,
        precision: step.precision,
        optimizer_states: step.optimizer_states,
        gradients: step.gradients,
        devices: (0..devices).map(|device| device_row(device, draw)).collect(),
        order: draw.of(&orders),
        layers,
        tensors: Vec::new(),
    };
    plan.tensors = tensors(chain, &plan, draw);
    let splits = (0..chain.layers.len()).any(|layer| {
        let rows = plan.layers[layer].compute.iter();
        let batches: Vec<Samples> = rows.flat_map(|compute| compute.micro_batches.clone()).collect();
        splits_groups(chain, layer, &batches)
    });
    if splits {
        plan.order = Order::LayerFirst;
    }
    plan
}

fn device_row(device: usize, draw: &mut Draw) -> DeviceRow {
    DeviceRow {
        name: format!("device {device}"),
        budget_bytes: u64::MAX,
        workspace_bytes: 1 << 12,
        stash: draw.chance(25).then(|| 1 + draw.below(3)),
        leeway: draw.of(&[0, 0, 1, 2, 5]),
        puts_off: draw.of(&[0, 0, 1, 2, 9]),
    }
}

fn activations(draw: &mut Draw) -> Activations {
    draw.of(&[Activations::Keep, Activations::Recompute, Activations::Offload])
}

/// A layer's row from its micro-batches and their devices.
fn row(layer: &str, shares: &[(Samples, usize)], draw: &mut Draw) -> LayerRow {
    let devices: BTreeSet<usize> = shares.iter().map(|(_, device)| *device).collect();
    let compute = devices.into_iter().map(|device| {
        let own = shares.iter().filter(|(_, other)| *other == device);
        let micro_batches = own.map(|(samples, _)| *samples).collect();
        Compute { device, micro_batches, activations: activations(draw) }
    });
    LayerRow { layer: layer.into(), compute: compute.collect() }
}

/// Micro-batches of a run of samples.
fn micro_batches(samples: Samples, draw: &mut Draw) -> Vec<Samples> {
    let cuts = draw.cut(samples.count(), 4).into_iter();
    cuts.map(|cut| Samples { start: samples.start + cut.start, end: samples.start + cut.end }).collect()
}

/// Replicas that each send their samples through some devices, one after the other; each cuts the chain its own way.
fn stages(chain: &Chain, batch: usize, devices: usize, draw: &mut Draw) -> Vec<LayerRow> {
    let replicas = draw.cut(batch, 3);
    let mut shares: Vec<Vec<(Samples, usize)>> = vec![Vec::new(); chain.layers.len()];
    for replica in replicas {
        let batches = micro_batches(replica, draw);
        for run in draw.cut(chain.layers.len(), devices) {
            let device = draw.below(devices);
            for layer in run.range() {
                shares[layer].extend(batches.iter().map(|samples| (*samples, device)));
            }
        }
    }
    rows(chain, shares, draw)
}

/// Every layer on the same devices, with unequal samples.
fn everywhere(chain: &Chain, batch: usize, devices: usize, draw: &mut Draw) -> Vec<LayerRow> {
    let mut shares = Vec::new();
    for samples in draw.cut(batch, devices) {
        let device = draw.below(devices);
        shares.extend(micro_batches(samples, draw).into_iter().map(|samples| (samples, device)));
    }
    rows(chain, vec![shares; chain.layers.len()], draw)
}

/// Layers that follow the one before, or are cut anew.
fn anyhow(chain: &Chain, batch: usize, devices: usize, draw: &mut Draw) -> Vec<LayerRow> {
    let mut shares: Vec<Vec<(Samples, usize)>> = Vec::new();
    for _ in &chain.layers {
        let mut next = match shares.last() {
            Some(before) if draw.chance(60) => before.clone(),
            _ => draw.cut(batch, 5).into_iter().map(|samples| (samples, draw.below(devices))).collect(),
        };
        if draw.chance(15) {
            let moved = draw.below(next.len());
            next[moved].1 = draw.below(devices);
        }
        shares.push(next);
    }
    rows(chain, shares, draw)
}

fn rows(chain: &Chain, shares: Vec<Vec<(Samples, usize)>>, draw: &mut Draw) -> Vec<LayerRow> {
    let layers = chain.layers.iter().zip(shares);
    layers.map(|(layer, shares)| row(&layer.name, &shares, draw)).collect()
}

fn tensors(chain: &Chain, plan: &Plan, draw: &mut Draw) -> Vec<TensorRow> {
    let devices = plan.devices.len();
    // Whole tables are of one kind, or anything goes for each tensor.
    let style = draw.below(4);
    let residence = draw.of(&[Residence::Resident, Residence::Fetched]);
    let mut rows: Vec<TensorRow> = (0..chain.tensors.len())
        .map(|tensor| {
            let spec = &chain.tensors[tensor];
            let users: BTreeSet<usize> = chain
                .users(tensor)
                .flat_map(|layer| plan.layers[layer].compute.iter().map(|compute| compute.device))
                .collect();
            let held: Vec<Held> = match style {
                0 => users.iter().map(|device| whole(Holder::Device(*device), spec.elements())).collect(),
                1 => slices(spec.elements(), devices, draw),
                2 => vec![whole(holder(devices, draw), spec.elements())],
                _ if draw.chance(50) => slices(spec.elements(), devices, draw),
                _ => users.iter().map(|device| whole(Holder::Device(*device), spec.elements())).collect(),
            };
            let compute_copies = users.iter().map(|device| {
                let residence = if draw.chance(80) { residence } else { Residence::Fetched };
                ComputeCopy { device: *device, residence }
            });
            TensorRow {
                tensor: spec.name.clone(),
                elements: spec.elements(),
                compute_copies: compute_copies.collect(),
                gradient: held.clone(),
                optimizer: held,
            }
        })
        .collect();
    if draw.chance(25) {
        for row in &mut rows {
            if draw.chance(60) {
                row.gradient = sums(row, devices, draw);
            }
        }
    }
    rows
}

/// A gradient that is added up elsewhere than it is needed: where layers compute it, in slices, or in one place.
fn sums(row: &TensorRow, devices: usize, draw: &mut Draw) -> Vec<Held> {
    let users = row.compute_copies.iter().map(|copy| Holder::Device(copy.device));
    match draw.below(3) {
        0 => users.map(|holder| whole(holder, row.elements)).collect(),
        1 => slices(row.elements, devices, draw),
        _ => vec![whole(holder(devices, draw), row.elements)],
    }
}

fn whole(holder: Holder, elements: usize) -> Held {
    Held { holder, slice: Samples { start: 0, end: elements } }
}

fn holder(devices: usize, draw: &mut Draw) -> Holder {
    let device = draw.below(devices);
    draw.of(&[Holder::Device(device), Holder::Device(device), Holder::Host(device), Holder::Disk(device)])
}

/// Slices, some of them with a second holder.
fn slices(elements: usize, devices: usize, draw: &mut Draw) -> Vec<Held> {
    let mut held = Vec::new();
    for slice in draw.cut(elements, 3) {
        let first = holder(devices, draw);
        held.push(Held { holder: first, slice });
        let second = holder(devices, draw);
        if draw.chance(30) && second != first {
            held.push(Held { holder: second, slice });
        }
    }
    held
}

/// Small models of every kind that differs to a plan: tied tensors, none, branches, batch norms, lengths.
/// The second number is the sequence.
pub fn model(draw: &mut Draw) -> (Chain, usize) {
    let layers = 1 + draw.below(4);
    match draw.below(6) {
        0 => (Chain::new(&presets::gpt2(50, 16, layers, 4, 12)), 12),
        1 => (Chain::new(&presets::llama(50, 16, layers, 4, 2, 24, 12, 1e4, false)), 12),
        2 => {
            let mut chain = Chain::new(&presets::bert(50, 16, layers, 4, 24, 12));
            chain.padded = draw.chance(50);
            (chain, 12)
        }
        3 => {
            let image = ImageShape { channels: 1, size: 4, patch: 2 };
            (Chain::new(&presets::vit(image, 3, 16, layers, 4, 24)), image.patches() + 1)
        }
        4 => (
            convolutional(
                r#"{"architecture": "vgg11", "classifier": [4], "first_channels": 2, "classes": 3, "image": 32}"#,
            ),
            1,
        ),
        _ => {
            let shape = r#"{"architecture": "resnet", "block": "basic", "blocks": [1, 2], "first_channels": 4, "classes": 3, "image": 16}"#;
            let mut chain = convolutional(shape);
            chain.set_norm_group(draw.of(&[None, Some(1), Some(2), Some(3)]));
            (chain, 1)
        }
    }
}

fn convolutional(shape: &str) -> Chain {
    let shape = serde_json::from_str(shape).expect("the text is JSON");
    Chain::convolutional(&ConvolutionalConfig::read(&shape).expect("the shape is one"))
}

/// A step that any table may be drawn for.
pub fn step(draw: &mut Draw, sequence: usize) -> StepShape {
    let precision = draw.of(&[Precision::Fp32, Precision::Fp32, Precision::Bf16]);
    StepShape { global_batch: 1 + draw.below(9), sequence, precision, ..StepShape::ADAM }
}

/// What is in a table, by name.
pub fn features(plan: &Plan, chain: &Chain) -> BTreeSet<&'static str> {
    let layout = Layout::new(plan, chain);
    let mut found = BTreeSet::new();
    let mut note = |is_there: bool, name: &'static str| {
        if is_there {
            found.insert(name);
        }
    };
    note(
        true,
        match plan.order {
            Order::MicroBatchFirst => "micro-batch first",
            Order::LayerFirst => "layer first",
            Order::OneForwardOneBackward => "one forward, one backward",
            Order::Varuna => "Varuna's rule",
            Order::Gpipe => "GPipe's order",
        },
    );
    note(plan.devices.iter().any(|device| device.stash.is_some()), "a cap on what is stashed");
    let mut computing = BTreeSet::new();
    for layer in 0..chain.layers.len() {
        let devices: BTreeSet<usize> = layout.computing(layer).collect();
        note(devices.len() > 1, "a layer on several devices");
        computing.extend(devices);
        for share in layout.shares(layer) {
            note(share.activations == Activations::Recompute, "recomputed");
            note(share.activations == Activations::Offload, "offloaded");
            for reader in layout.readers(layer) {
                let pieces: Vec<(Samples, usize)> = layout.pieces(*reader, share.samples).collect();
                note(pieces.iter().any(|(_, to)| *to != share.device), "activations move");
                note(pieces.iter().any(|(piece, _)| *piece != share.samples), "cut anew");
            }
        }
        let counts: BTreeSet<usize> = plan.layers[layer]
            .compute
            .iter()
            .map(|compute| compute.micro_batches.iter().map(|samples| samples.count()).sum())
            .collect();
        note(counts.len() > 1, "unequal samples");
        let norm = chain.batch_norm(layer);
        let groups = norm.map_or(0, |norm| norm.group_count(plan.global_batch));
        note(
            (0..groups).any(|group| layout.exchange(layer, group).is_some()),
            "a group over several devices",
        );
    }
    note(computing.len() < layout.members().len(), "a device that only keeps state");
    for (tensor, row) in plan.tensors.iter().enumerate() {
        let places: BTreeSet<Holder> = row.optimizer.iter().map(|held| held.holder).collect();
        let slices: BTreeSet<Samples> = row.optimizer.iter().map(|held| held.slice).collect();
        note(places.iter().any(|holder| matches!(holder, Holder::Host(_))), "state on a host");
        note(places.iter().any(|holder| matches!(holder, Holder::Disk(_))), "state on a disk");
        note(places.len() > 2, "state in three places");
        note(slices.len() > 1, "state in slices");
        note(row.optimizer.len() > slices.len(), "a slice with several holders");
        note(row.compute_copies.iter().any(|copy| copy.residence == Residence::Fetched), "fetched");
        note(!layout.all_handed(tensor).is_empty(), "gradients that are handed over");
        note(!layout.handed_parts_of(tensor).is_empty(), "gradients handed to other devices");
        let users: BTreeSet<usize> = chain.users(tensor).flat_map(|layer| layout.computing(layer)).collect();
        note(chain.users(tensor).count() > 1 && users.len() > 1, "tied over several devices");
    }
    note(layout.has_branches(), "branches");
    let is_pipelined = !layout.is_layered() && !layout.has_branches() && plan.global_batch > 1;
    let has_leeway = computing.iter().any(|device| plan.devices[*device].leeway > 0);
    let puts_off = |layer: usize| layout.computing(layer).any(|device| layout.puts_off(device, layer));
    if (0..chain.layers.len()).any(puts_off) {
        found.insert("gradients of weights that are put off");
    }
    if is_pipelined && has_leeway && found.contains("activations move") {
        found.insert("computations before others that are late");
    }
    found
}
