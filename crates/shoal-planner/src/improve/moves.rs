//! Small changes of a table. Each leaves every sample computed once in every layer and every slice held; whether it fits, and
//! whether it is quicker, is for those who play it through.

use std::ops::Range;

use shoal_model::Chain;
use shoal_plan::draw::Draw;
use shoal_plan::{Activations, Compute, Op, Order, Plan, Program, Samples};

use crate::kept;

/// Where the changes that are proposed come from: always the same ones.
const SEED: u64 = 0x5ea5;

/// Layers that are given other activations at a time.
const RUN_MOST: usize = 8;

/// Proposes changes.
pub struct Changes<'a> {
    chain: &'a Chain,
    draw: Draw,
    /// Batch norms take samples together that pieces must not part.
    may_recut: bool,
}

impl<'a> Changes<'a> {
    pub fn new(chain: &'a Chain) -> Changes<'a> {
        let may_recut = (0..chain.layers.len()).all(|layer| chain.batch_norm(layer).is_none());
        Changes { chain, draw: Draw::new(SEED), may_recut }
    }

    /// A table that differs in one or a few places, where one was found. By device, `in_flight` are the most units that lie
    /// between forward and backward now.
    pub fn propose(&mut self, plan: &Plan, in_flight: &[usize]) -> Option<Plan> {
        let mut changed = plan.clone();
        for _ in 0..self.draw.of(&[1, 1, 2, 3]) {
            self.change(&mut changed, in_flight);
        }
        (changed != *plan).then_some(changed)
    }

    /// A table with one or two layers on other devices.
    pub fn propose_layer(&mut self, plan: &Plan) -> Option<Plan> {
        let mut changed = plan.clone();
        for _ in 0..self.draw.of(&[1, 1, 2]) {
            self.layer(&mut changed);
        }
        (changed != *plan).then_some(changed)
    }

    fn change(&mut self, plan: &mut Plan, in_flight: &[usize]) {
        let is_pipelined = plan.order != Order::LayerFirst;
        match self.draw.below(100) {
            0..30 if is_pipelined => self.stash(plan, in_flight),
            0..70 if self.may_recut => self.pieces(plan),
            70..85 => self.layer(plan),
            85..97 => self.activations(plan),
            97.. if is_pipelined => {
                plan.order = self.draw.of(&[Order::OneForwardOneBackward, Order::Varuna, Order::Gpipe]);
            }
            _ => {}
        }
    }

    /// How many units may lie between forward and backward, on one device or on all. A cap that is not reached changes
    /// nothing, so caps are set by what there is now.
    fn stash(&mut self, plan: &mut Plan, in_flight: &[usize]) {
        let all = self.draw.chance(30);
        let one = self.draw.below(plan.devices.len());
        let by = self.draw.of(&[-2isize, -1, 1, 2, 4]);
        for (device, row) in plan.devices.iter_mut().enumerate() {
            if in_flight[device] > 0 && (all || device == one) {
                let now = row.stash.map_or(in_flight[device], |stash| stash.min(in_flight[device]));
                row.stash = Some(now.saturating_add_signed(by).max(1));
            }
        }
    }

    /// One piece, or the pieces of an end, larger or smaller by some samples.
    fn pieces(&mut self, plan: &mut Plan) {
        let cuts = cuts(plan);
        let Some(widest) = cuts.windows(2).map(|pair| pair[1] - pair[0]).max() else { return };
        let inner = &cuts[1..cuts.len() - 1];
        match self.draw.below(10) {
            0..3 if widest > 1 => {
                let pieces: Vec<&[usize]> = cuts.windows(2).filter(|pair| pair[1] - pair[0] > 1).collect();
                // As often among the first and the last as anywhere: there a pipeline fills and drains.
                let near = self.draw.of(&[pieces.len(), 4.min(pieces.len())]);
                let place = self.draw.below(near);
                let place = if self.draw.chance(50) { place } else { pieces.len() - 1 - place };
                let [start, end] = [pieces[place][0], pieces[place][1]];
                split(plan, start + 1 + self.draw.below(end - start - 1));
            }
            3..6 if !inner.is_empty() => {
                merge(plan, self.draw.of(inner));
            }
            6.. if !inner.is_empty() => {
                let place = 1 + self.draw.below(inner.len());
                let cut = cuts[place];
                let other = if self.draw.chance(50) { cut - 1 } else { cut + 1 };
                if cuts[place - 1] < other && other < cuts[place + 1] {
                    shift(plan, cut, other);
                }
            }
            _ => {}
        }
    }

    /// A device has a layer less and another one more, those between as many as before: at every change of device on the way the
    /// layer there goes over, with all that is held of it.
    fn layer(&mut self, plan: &mut Plan) {
        let runs = runs(plan);
        if runs.len() < 2 {
            return;
        }
        let from = self.draw.below(runs.len());
        let near = [from.saturating_sub(1), (from + 1).min(runs.len() - 1), self.draw.below(runs.len())];
        let to = self.draw.of(&near);
        let moved: Vec<(usize, usize)> = match from < to {
            true => (from..to).map(|run| (runs[run].end - 1, runs[run].end)).collect(),
            false => (to..from).map(|run| (runs[run].end, runs[run].end - 1)).collect(),
        };
        // Each is given to who had its neighbour before.
        let before = plan.clone();
        for (layer, neighbour) in moved {
            let Some(compute) = before.layers.get(neighbour).map(|row| &row.compute[..]) else { return };
            if let [compute] = compute {
                self.give(plan, layer, compute);
            }
        }
    }

    /// Gives a layer that one device has to another, if nobody else has anything of it.
    fn give(&self, plan: &mut Plan, moved: usize, compute: &Compute) {
        let [Compute { device: from, .. }] = plan.layers[moved].compute[..] else { return };
        let own: Vec<usize> = self.chain.layers[moved].tensors.iter().map(|(_, tensor)| *tensor).collect();
        let is_alone = |tensor: usize| {
            let row = &plan.tensors[tensor];
            self.chain.users(tensor).count() == 1
                && row.compute_copies.len() == 1
                && row.gradient.len() == 1
                && row.gradient == row.optimizer
                && row.gradient[0].holder.device() == from
        };
        if compute.device == from || !own.iter().all(|tensor| is_alone(*tensor)) {
            return;
        }
        let device = compute.device;
        let activations = kept(&self.chain.layers[moved].kind, compute.activations);
        plan.layers[moved].compute = vec![Compute { activations, ..compute.clone() }];
        for tensor in own {
            let row = &mut plan.tensors[tensor];
            row.compute_copies[0].device = device;
            for held in row.gradient.iter_mut().chain(&mut row.optimizer) {
                held.holder = held.holder.of(device);
            }
        }
    }

    /// What becomes of some layers' activations on a device.
    fn activations(&mut self, plan: &mut Plan) {
        let first = self.draw.below(plan.layers.len());
        let place = self.draw.below(plan.layers[first].compute.len());
        let device = plan.layers[first].compute[place].device;
        let activations = self.draw.of(&[Activations::Keep, Activations::Recompute]);
        let run = 1 + self.draw.below(RUN_MOST);
        for (row, layer) in plan.layers.iter_mut().zip(&self.chain.layers).skip(first).take(run) {
            for compute in row.compute.iter_mut().filter(|compute| compute.device == device) {
                compute.activations = kept(&layer.kind, activations);
            }
        }
    }
}

/// Runs of layers that one device has, where each has its layers for itself; none where one is shared.
fn runs(plan: &Plan) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (layer, row) in plan.layers.iter().enumerate() {
        let [Compute { device, .. }] = row.compute[..] else { return Vec::new() };
        match runs.last_mut() {
            Some(run) if plan.layers[run.start].compute[0].device == device => run.end = layer + 1,
            _ => runs.push(layer..layer + 1),
        }
    }
    runs
}

/// By device, the most units of consecutive layers that lie between forward and backward at a time.
pub fn in_flight(programs: &[Program]) -> Vec<usize> {
    let most = |program: &Program| {
        let (mut now, mut most, mut before) = (0usize, 0, None);
        for instruction in &program.instructions {
            match instruction.op {
                Op::Forward { layer, samples, .. } => {
                    now += usize::from(before != layer.checked_sub(1).map(|layer| (layer, samples)));
                    before = Some((layer, samples));
                }
                Op::Backward { layer, samples } => {
                    // A unit ends where its backward does; the one that follows is another's.
                    let follows = before == Some((layer + 1, samples));
                    now = now.saturating_sub(usize::from(!follows));
                    before = Some((layer, samples));
                }
                _ => {}
            }
            most = now.max(most);
        }
        most
    };
    programs.iter().map(most).collect()
}

/// Where pieces of any layer begin and end.
fn cuts(plan: &Plan) -> Vec<usize> {
    let pieces = plan.layers.iter().flat_map(|row| &row.compute).flat_map(|compute| &compute.micro_batches);
    let mut cuts: Vec<usize> = pieces.flat_map(|samples| [samples.start, samples.end]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    cuts
}

/// Every piece with this place inside becomes two.
fn split(plan: &mut Plan, at: usize) {
    for compute in plan.layers.iter_mut().flat_map(|row| &mut row.compute) {
        let inside = |samples: &Samples| samples.start < at && at < samples.end;
        if let Some(place) = compute.micro_batches.iter().position(inside) {
            let Samples { start, end } = compute.micro_batches[place];
            let halves = [Samples { start, end: at }, Samples { start: at, end }];
            compute.micro_batches.splice(place..=place, halves);
        }
    }
}

/// Pieces that meet here become one, wherever one device has both.
fn merge(plan: &mut Plan, at: usize) {
    for compute in plan.layers.iter_mut().flat_map(|row| &mut row.compute) {
        let meet = |pair: &[Samples]| pair[0].end == at && pair[1].start == at;
        if let Some(place) = compute.micro_batches.windows(2).position(meet) {
            let whole = Samples {
                start: compute.micro_batches[place].start,
                end: compute.micro_batches[place + 1].end,
            };
            compute.micro_batches.splice(place..=place + 1, [whole]);
        }
    }
}

/// Pieces that meet at a place meet at another, which no other piece reaches.
fn shift(plan: &mut Plan, from: usize, to: usize) {
    for samples in
        plan.layers.iter_mut().flat_map(|row| &mut row.compute).flat_map(|compute| &mut compute.micro_batches)
    {
        if samples.start == from {
            samples.start = to;
        }
        if samples.end == from {
            samples.end = to;
        }
    }
}
