//! Who of a group takes which samples. Pieces are dealt in the order of their samples, each to whoever would be done with
//! it first; so all are done at about the same time, whatever their speeds, and none idles because a micro-batch has
//! fewer samples than the group has members.

use shoal_fleet::Costs;
use shoal_plan::Samples;

use super::GroupStage;

/// The pieces of a batch.
pub(super) fn pieces(global_batch: usize, piece: usize) -> impl Iterator<Item = Samples> {
    let piece = piece.max(1);
    (0..global_batch)
        .step_by(piece)
        .map(move |start| Samples { start, end: (start + piece).min(global_batch) })
}

/// Which member takes each next thing, where things take each of them so long and they are busy already: the one that
/// is done first.
pub(super) fn next(busy: &[f64], seconds: impl Fn(usize) -> f64) -> usize {
    let done = |member: &usize| busy[*member] + seconds(*member);
    (0..busy.len()).min_by(|a, b| done(a).total_cmp(&done(b))).unwrap_or(0)
}

/// The pieces of every member of every stage.
pub(super) fn deal(costs: &Costs, stages: &[GroupStage], global_batch: usize) -> Vec<Vec<Vec<Samples>>> {
    // By device: a group that has two stages balances them together.
    let devices = stages.iter().flat_map(|stage| &stage.devices).max().map_or(0, |most| most + 1);
    let mut busy = vec![0.0; devices];
    let of_stage = |stage: &GroupStage| {
        let seconds = |device: usize, samples: usize| -> f64 {
            let layers = stage.layers.clone();
            layers
                .map(|layer| {
                    costs.forward(layer, device, samples) + costs.backward(layer, device, samples)
                })
                .sum()
        };
        let whole: Vec<f64> = stage.devices.iter().map(|device| seconds(*device, stage.piece)).collect();
        let mut dealt = vec![Vec::new(); stage.devices.len()];
        for samples in pieces(global_batch, stage.piece) {
            let takes = |member: usize| match samples.count() == stage.piece {
                true => whole[member],
                false => seconds(stage.devices[member], samples.count()),
            };
            let own: Vec<f64> = stage.devices.iter().map(|device| busy[*device]).collect();
            let member = next(&own, takes);
            busy[stage.devices[member]] += takes(member);
            dealt[member].push(samples);
        }
        dealt
    };
    stages.iter().map(of_stage).collect()
}
