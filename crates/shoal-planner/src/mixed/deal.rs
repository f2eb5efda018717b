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
                .map(|layer| costs.forward(layer, device, samples) + costs.backward(layer, device, samples))
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

#[cfg(test)]
mod tests {
    use shoal_fleet::Fleet;
    use shoal_model::{Chain, Precision, presets};
    use shoal_plan::{Activations, Residence};

    use super::*;

    #[test]
    fn every_sample_is_dealt_once_and_the_quick_take_more() {
        let chain = Chain::new(&presets::preset("gpt2-124m").unwrap());
        let text = "[[node]]\nhost_memory = \"64 GiB\"\ndevices = [{ kind = \"T4\" }, { kind = \"V100\", count = 2 }]\n";
        let fleet = Fleet::parse(text, "fleet").unwrap();
        let costs = Costs::new(&chain, &fleet, None, Precision::Fp16, 1024).unwrap();
        let layers = chain.layers.len();
        let stage = |layers, piece| GroupStage {
            devices: vec![0, 1, 2],
            layers,
            piece,
            activations: Activations::Keep,
            copies: Residence::Resident,
            stash: None,
        };
        let stages = [stage(0..layers - 1, 1), stage(layers - 1..layers, 3)];
        let dealt = deal(&costs, &stages, 23);
        for (stage, dealt) in stages.iter().zip(&dealt) {
            let mut all: Vec<Samples> = dealt.concat();
            all.sort();
            assert!(all.iter().all(|samples| samples.count() <= stage.piece));
            assert_eq!(
                all.iter().flat_map(|samples| samples.range()).collect::<Vec<_>>(),
                (0..23).collect::<Vec<_>>()
            );
        }
        // Of the first stage, nobody could be done earlier by giving its last piece to another.
        let one = |device: usize| -> f64 {
            (0..layers - 1)
                .map(|layer| costs.forward(layer, device, 1) + costs.backward(layer, device, 1))
                .sum()
        };
        let counts: Vec<usize> = dealt[0].iter().map(Vec::len).collect();
        for giver in 0..3 {
            for taker in 0..3 {
                assert!(
                    counts[giver] as f64 * one(giver)
                        <= (counts[taker] + 1) as f64 * one(taker) * (1.0 + 1e-9)
                );
            }
        }
        assert!(counts[0] < counts[1], "{counts:?}");
    }
}
