//! Small changes of a table. Each leaves every sample computed once in every layer and every slice held; whether it fits, and
//! whether it is quicker, is for those who play it through.

use std::ops::Range;

use shoal_model::Chain;
use shoal_plan::draw::Draw;
use shoal_plan::{Activations, Compute, ComputeCopy, Holder, Op, Order, Plan, Program, Residence, Samples};

use crate::kept;

/// Where the changes that are proposed come from: always the same ones.
const SEED: u64 = 0x5ea5;

/// Layers whose activations or state are changed at a time.
const RUN_MOST: usize = 8;

/// More units than put anything off in any pipeline worth its name.
pub const PUT_OFF_MOST: usize = 64;

/// Proposes changes.
pub struct Changes<'a> {
    chain: &'a Chain,
    draw: Draw,
    /// By device, whether it is a processor. What its host does beside it, its own cores do: nothing is gained by that.
    is_processor: Vec<bool>,
    /// Batch norms take samples together that pieces must not part.
    may_recut: bool,
}

impl<'a> Changes<'a> {
    pub fn new(chain: &'a Chain, is_processor: Vec<bool>) -> Changes<'a> {
        let may_recut = (0..chain.layers.len()).all(|layer| chain.batch_norm(layer).is_none());
        Changes { chain, draw: Draw::new(SEED), is_processor, may_recut }
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
            0..25 if is_pipelined => self.stash(plan, in_flight),
            25..33 if is_pipelined => self.put_off(plan, in_flight),
            0..70 if self.may_recut => self.pieces(plan),
            70..80 => self.layer(plan),
            80..85 if is_pipelined => self.share(plan),
            85..93 => self.activations(plan),
            93..97 => self.state(plan),
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

    /// How many units' gradients of weights may wait, on one device or on all.
    fn put_off(&mut self, plan: &mut Plan, in_flight: &[usize]) {
        let all = self.draw.chance(40);
        let one = self.draw.below(plan.devices.len());
        let most = self.draw.of(&[0, 1, 2, 3, 4, 8, PUT_OFF_MOST]);
        for (device, row) in plan.devices.iter_mut().enumerate() {
            if in_flight[device] > 0 && (all || device == one) {
                row.puts_off = most;
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
            let Some(row) = before.layers.get(neighbour) else { return };
            // All pieces, also of one that is shared.
            let micro_batches = pieces(&row.compute);
            let Compute { device, activations, .. } = *primary(&row.compute);
            self.give(plan, layer, Compute { device, micro_batches, activations });
        }
    }

    /// Where the device changes, some of a layer's pieces go to the other device, which fetches a copy to compute them with; they are
    /// some from the middle, so that the copy has come by then and their gradients have gone before the step ends. Or back.
    fn share(&mut self, plan: &mut Plan) {
        let shared: Vec<usize> =
            (0..plan.layers.len()).filter(|layer| plan.layers[*layer].compute.len() == 2).collect();
        if !shared.is_empty() && self.draw.chance(30) {
            let layer = self.draw.of(&shared);
            self.unshare(plan, layer);
            return;
        }
        let runs = runs(plan);
        if runs.len() < 2 {
            return;
        }
        let end = runs[self.draw.below(runs.len() - 1)].end;
        let (layer, neighbour) = if self.draw.chance(50) { (end - 1, end) } else { (end, end - 1) };
        let other = primary(&plan.layers[neighbour].compute).device;
        let [compute] = &plan.layers[layer].compute[..] else { return };
        let pieces = compute.micro_batches.len();
        if pieces < 4 || compute.device == other || !self.is_alone(plan, layer, compute.device) {
            return;
        }
        let count = 1 + self.draw.below(pieces / 2);
        let first = 1 + self.draw.below(pieces - count - 1);
        let compute = &mut plan.layers[layer].compute;
        let given: Vec<Samples> = compute[0].micro_batches.drain(first..first + count).collect();
        let activations = compute[0].activations;
        compute.push(Compute { device: other, micro_batches: given, activations });
        for (_, tensor) in &self.chain.layers[layer].tensors {
            let copy = ComputeCopy { device: other, residence: Residence::Fetched };
            plan.tensors[*tensor].compute_copies.push(copy);
        }
    }

    /// The pieces of a shared layer go back to the one that holds it.
    fn unshare(&self, plan: &mut Plan, layer: usize) {
        let own: Vec<usize> = self.chain.layers[layer].tensors.iter().map(|(_, tensor)| *tensor).collect();
        let Some(holder) = own.first().map(|tensor| plan.tensors[*tensor].optimizer[0].holder.device())
        else {
            return;
        };
        let compute = &mut plan.layers[layer].compute;
        let is_fetched = |tensor: &usize| {
            let row = &plan.tensors[*tensor];
            let copies = &row.compute_copies;
            self.chain.users(*tensor).count() == 1
                && row.optimizer.len() == 1
                && row.optimizer[0].holder.device() == holder
                && copies.iter().all(|copy| copy.device == holder || copy.residence == Residence::Fetched)
        };
        if compute.iter().all(|compute| compute.device != holder) || !own.iter().all(is_fetched) {
            return;
        }
        let all = pieces(compute);
        compute.retain(|compute| compute.device == holder);
        compute[0].micro_batches = all;
        for tensor in own {
            plan.tensors[tensor].compute_copies.retain(|copy| copy.device == holder);
        }
    }

    /// Whether nobody but a device has anything of a layer's tensors.
    fn is_alone(&self, plan: &Plan, layer: usize, device: usize) -> bool {
        self.chain.layers[layer].tensors.iter().all(|(_, tensor)| {
            let row = &plan.tensors[*tensor];
            self.chain.users(*tensor).count() == 1
                && row.compute_copies.len() == 1
                && [&row.gradient, &row.optimizer].map(|held| held.len()) == [1, 1]
                && [&row.gradient, &row.optimizer].iter().all(|held| held[0].holder.device() == device)
        })
    }

    /// Gives a layer that one device has to another, if nobody else has anything of it.
    fn give(&self, plan: &mut Plan, moved: usize, compute: Compute) {
        let [Compute { device: from, .. }] = plan.layers[moved].compute[..] else { return };
        let own: Vec<usize> = self.chain.layers[moved].tensors.iter().map(|(_, tensor)| *tensor).collect();
        if compute.device == from || !self.is_alone(plan, moved, from) {
            return;
        }
        let device = compute.device;
        let activations = kept(&self.chain.layers[moved].kind, compute.activations);
        plan.layers[moved].compute = vec![Compute { activations, ..compute }];
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
        let activations = self.draw.of(&[Activations::Keep, Activations::Recompute, Activations::Offload]);
        let run = 1 + self.draw.below(RUN_MOST);
        if self.is_processor[device] && activations == Activations::Offload {
            return;
        }
        for (row, layer) in plan.layers.iter_mut().zip(&self.chain.layers).skip(first).take(run) {
            for compute in row.compute.iter_mut().filter(|compute| compute.device == device) {
                compute.activations = kept(&layer.kind, activations);
            }
        }
    }

    /// What a device's memory holds of some layers' state goes to its host's, where there is more room and updates take longer;
    /// or comes back. State that goes gives room for larger pieces.
    fn state(&mut self, plan: &mut Plan) {
        let first = self.draw.below(plan.layers.len());
        let run = 1 + self.draw.below(RUN_MOST);
        let device = primary(&plan.layers[first].compute).device;
        if self.is_processor[device] {
            return;
        }
        let (from, to) = match self.draw.chance(50) {
            true => (Holder::Device(device), Holder::Host(device)),
            false => (Holder::Host(device), Holder::Device(device)),
        };
        for layer in self.chain.layers.iter().skip(first).take(run) {
            for (_, tensor) in &layer.tensors {
                let held = &mut plan.tensors[*tensor].optimizer;
                for place in 0..held.len() {
                    // Nobody holds a slice twice.
                    let slice = held[place].slice;
                    let is_there = held.iter().any(|other| other.holder == to && other.slice == slice);
                    if held[place].holder == from && !is_there {
                        held[place].holder = to;
                    }
                }
            }
        }
    }
}

/// A layer's pieces, whoever has them.
fn pieces(compute: &[Compute]) -> Vec<Samples> {
    let mut pieces: Vec<Samples> =
        compute.iter().flat_map(|compute| compute.micro_batches.iter().copied()).collect();
    pieces.sort_unstable();
    pieces
}

/// The most of a layer.
fn primary(compute: &[Compute]) -> &Compute {
    let samples =
        |compute: &&Compute| compute.micro_batches.iter().map(|samples| samples.count()).sum::<usize>();
    compute.iter().max_by_key(samples).expect("every layer is computed")
}

/// Runs of layers of which one device has the most, where nobody shares more than single ones; none elsewhere.
fn runs(plan: &Plan) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (layer, row) in plan.layers.iter().enumerate() {
        if row.compute.len() > 2 {
            return Vec::new();
        }
        let device = primary(&row.compute).device;
        match runs.last_mut() {
            Some(run) if primary(&plan.layers[run.start].compute).device == device => run.end = layer + 1,
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
