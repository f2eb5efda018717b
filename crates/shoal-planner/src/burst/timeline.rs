//! A decision's step in time, device by device: when each layer runs where, and so what a step takes and when its
//! devices have nothing to do. Layers come in chain order; branches on different devices run side by side by
//! themselves.

use std::ops::Range;

use super::place::{Ways, share};
use super::{Decision, Problem};

/// What a decision is taken to cost, and when each device is busy with it.
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    pub step_seconds: f64,
    pub device_seconds: f64,
    /// Of moving samples between layers, forth and back.
    pub moving_seconds: f64,
    /// Gradients still being added up when the backward has ended.
    pub exposed_seconds: f64,
    /// By device of the fleet, in order and apart.
    pub busy: Vec<Vec<Range<f64>>>,
}

/// Seconds of a layer on a set of devices, forward and backward: the device that takes longest decides.
pub(super) fn layer_seconds(problem: &Problem, layer: usize, devices: &[usize]) -> (f64, f64) {
    let (mut forward, mut backward) = (0.0f64, 0.0f64);
    let (mut least, mut most) = (0, usize::MAX);
    let mut last_kind = "";
    for (position, device) in devices.iter().enumerate() {
        let samples = share(problem.global_batch, devices.len(), position).count();
        let kind = problem.fleet.devices[*device].kind.as_str();
        // Neighbours of one kind with the same share take the same time.
        if kind == last_kind && (samples == least || samples == most) {
            continue;
        }
        if kind != last_kind {
            (least, most, last_kind) = (samples, samples, kind);
        } else {
            (least, most) = (least.min(samples), most.max(samples));
        }
        let update = problem.costs.update(*device, problem.costs.parameters(layer));
        forward = forward.max(problem.costs.forward(layer, *device, samples));
        backward = backward.max(problem.costs.backward(layer, *device, samples) + update);
    }
    (forward, backward)
}

/// Seconds of adding up a layer's gradient.
pub(super) fn reduction_seconds(problem: &Problem, ways: &Ways, layer: usize, devices: &[usize]) -> f64 {
    let bytes = problem.costs.parameters(layer) * problem.gradient_bytes_a_parameter;
    ways.reduction_seconds(devices, bytes)
}

pub(super) fn estimate(problem: &Problem, ways: &Ways, decision: &Decision) -> Estimate {
    let mut clock = Clock {
        problem,
        ways,
        decision,
        free: vec![0.0; problem.fleet.devices.len()],
        busy: vec![Vec::new(); problem.fleet.devices.len()],
        end: vec![0.0; problem.inputs.len()],
        giving: vec![0.0; problem.inputs.len()],
        sums_end: 0.0,
        device_seconds: 0.0,
        moving_seconds: 0.0,
    };
    let layers = problem.inputs.len();
    let times: Vec<(f64, f64)> =
        (0..layers).map(|layer| layer_seconds(problem, layer, &decision.devices[layer])).collect();
    for (layer, (forward, _)) in times.iter().enumerate() {
        let ready = clock.receive(layer, &problem.inputs[layer], |from, _| from, false);
        clock.run(layer, ready, *forward);
    }
    let turn = clock.end[layers - 1];
    clock.sums_end = turn;
    clock.giving.fill(turn);
    let mut readers: Vec<Vec<usize>> = vec![Vec::new(); layers];
    for (layer, inputs) in problem.inputs.iter().enumerate() {
        inputs.iter().for_each(|input| readers[*input].push(layer));
    }
    for layer in (0..layers).rev() {
        readers[layer].reverse();
        let ready = clock.receive(layer, &readers[layer], |_, to| to, true).max(turn);
        clock.run(layer, ready, times[layer].1);
        let sum = reduction_seconds(problem, ways, layer, &decision.devices[layer]);
        if sum > 0.0 {
            clock.sums_end = clock.sums_end.max(clock.end[layer]) + sum;
        }
    }
    let backward_end = clock.end[0];
    let step_seconds = backward_end.max(clock.sums_end);
    let exposed_seconds = step_seconds - backward_end;
    // Sums within a node are the devices' own work. Those that pass between nodes are the network's: devices wait.
    if !ways.span_nodes(&decision.devices[0]) {
        for device in &decision.devices[0] {
            clock.busy[*device].push(backward_end..step_seconds);
        }
    }
    let device_seconds = clock.device_seconds + exposed_seconds * decision.devices[0].len() as f64;
    Estimate {
        step_seconds,
        device_seconds,
        moving_seconds: clock.moving_seconds,
        exposed_seconds,
        busy: clock.busy.into_iter().map(joined).collect(),
    }
}

/// The step as it goes on.
struct Clock<'a> {
    problem: &'a Problem<'a>,
    ways: &'a Ways,
    decision: &'a Decision,
    /// When each device is free.
    free: Vec<f64>,
    busy: Vec<Vec<Range<f64>>>,
    /// When each layer's forward, and later its backward, has ended.
    end: Vec<f64>,
    /// When each layer has given away what it has given so far.
    giving: Vec<f64>,
    /// When the gradients that are complete so far will have been added up.
    sums_end: f64,
    device_seconds: f64,
    moving_seconds: f64,
}

impl Clock<'_> {
    /// When a layer has what others give it.
    fn receive(
        &mut self,
        layer: usize,
        givers: &[usize],
        whose_output: impl Fn(usize, usize) -> usize,
        backward: bool,
    ) -> f64 {
        let mut ready = 0.0f64;
        for giver in givers {
            let (from, to) = (&self.decision.devices[*giver], &self.decision.devices[layer]);
            if from == to {
                ready = ready.max(self.end[*giver]);
                continue;
            }
            let moves = self.ways.moves(from, to, self.problem.global_batch);
            let bytes = self.problem.costs.output_bytes(whose_output(*giver, layer));
            let seconds = self.ways.seconds(&moves, bytes);
            // Moves are started at the same time, and what they move passes one after the other.
            let starting = self.ways.starting_seconds(&moves);
            let passes = (self.end[*giver] + starting).max(ready).max(self.giving[*giver]);
            let start = passes - starting;
            ready = start + seconds;
            self.giving[*giver] = ready;
            // Samples on their way hold up the sums.
            if backward && self.sums_end > start {
                self.sums_end += seconds;
            }
            self.moving_seconds += seconds;
            self.device_seconds += seconds * moves.taking_part as f64;
            if seconds > 0.0 {
                let mut both: Vec<usize> = from.iter().chain(to).copied().collect();
                both.sort_unstable();
                both.dedup();
                both.into_iter().for_each(|device| self.busy[device].push(start..ready));
            }
        }
        ready
    }

    fn run(&mut self, layer: usize, ready: f64, seconds: f64) {
        let devices = &self.decision.devices[layer];
        let start = devices.iter().map(|device| self.free[*device]).fold(ready, f64::max);
        self.end[layer] = start + seconds;
        self.device_seconds += seconds * devices.len() as f64;
        for device in devices {
            self.free[*device] = self.end[layer];
            self.busy[*device].push(start..self.end[layer]);
        }
    }
}

/// Intervals in order, those that touch as one.
fn joined(mut intervals: Vec<Range<f64>>) -> Vec<Range<f64>> {
    intervals.retain(|interval| interval.end > interval.start);
    intervals.sort_by(|a, b| a.start.total_cmp(&b.start));
    let mut joined: Vec<Range<f64>> = Vec::new();
    for interval in intervals {
        match joined.last_mut() {
            Some(last) if interval.start <= last.end => last.end = last.end.max(interval.end),
            _ => joined.push(interval),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::super::background::Background;
    use super::super::testing::{Drawn, chain, costs, fleet};
    use super::*;

    fn layer(parameters: u64) -> Drawn {
        Drawn { fixed: 1e-3, each: 0.0, parameters, output_bytes: 0 }
    }

    /// Sums that are left when the backward has ended are devices' work within a node, and the network's between nodes.
    #[test]
    fn devices_wait_for_sums_between_nodes() {
        for (nodes, waits) in [(1, false), (2, true)] {
            let fleet = fleet(nodes, 4);
            let costs = costs(&[layer(400_000_000)], &fleet);
            let problem = chain(&costs, &fleet, 8);
            let estimate = estimate(&problem, &problem.ways(), &problem.data_parallel());
            assert!(estimate.exposed_seconds > 10e-3);
            let gaps = Background::new(0.0).devices_worth(&estimate);
            assert_eq!(gaps > 0.9 * fleet.devices.len() as f64, waits, "{gaps} on {nodes} nodes");
            assert_eq!(gaps == 0.0, !waits);
        }
    }

    /// Three layers that read one another device's layer: their moves are started together, and so is what comes back.
    #[test]
    fn moves_from_one_layer_are_started_together() {
        let fleet = fleet(1, 4);
        let costs = costs(&[layer(0), layer(0), layer(0), layer(0)], &fleet);
        let step = |seconds_a_move: f64| {
            let inputs = vec![vec![], vec![0], vec![0], vec![0]];
            let problem = Problem { inputs, seconds_a_move, ..chain(&costs, &fleet, 4) };
            let decision = Decision { devices: vec![vec![0], vec![1], vec![2], vec![3]] };
            estimate(&problem, &problem.ways(), &decision).step_seconds
        };
        let started = step(5e-3) - step(0.0);
        assert!((started - 10e-3).abs() < 1e-6, "a start each way, not three: {started}");
    }
}
