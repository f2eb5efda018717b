//! The pipelines that the search finds: against all there are where that can be tried, and within every budget.

use shoal_fleet::{Costs, Fleet, KindTable, LayerTable, TimeCurve};
use shoal_model::{Chain, Precision, presets};
use shoal_plan::draw::{self, Draw};
use shoal_plan::memory::forecast_in;
use shoal_plan::{Activations, DeviceRow, Layout, Order, Purpose, StepShape, compile_paced, verify_all};
use shoal_planner::pipeline::{
    Pipeline, PipelineError, PipelinePlanned, PipelineWanted, Replica, Stage, State, plan, table,
};
use shoal_sim::{FleetWorld, Settings, simulate};

fn shape(global_batch: usize, sequence: usize) -> StepShape {
    StepShape { global_batch, sequence, ..StepShape::ADAM }
}

/// One device a node, of these kinds and this memory.
fn fleet(devices: &[(&str, u64)], network: &str) -> Fleet {
    fleet_on(devices, network, "1 us")
}

fn fleet_on(devices: &[(&str, u64)], network: &str, latency: &str) -> Fleet {
    let nodes = devices.iter().enumerate().map(|(number, (kind, bytes))| {
        format!(
            "[[node]]\nname = \"n{number}\"\nhost_memory = \"64 GiB\"\nnetwork = \"{network}\"\nlatency = \"{latency}\"\n\
             devices = [{{ kind = \"{kind}\", memory = \"{bytes} B\", host_link = \"12 GB/s\" }}]\n"
        )
    });
    Fleet::parse(&nodes.collect::<String>(), "fleet.toml").unwrap()
}

/// Kinds of different speeds, each with layers of its own.
fn costs(chain: &Chain, fleet: &Fleet, draw: &mut Draw) -> Costs {
    let layers: Vec<LayerTable> = chain
        .layers
        .iter()
        .map(|layer| LayerTable { name: layer.name.clone(), parameters: 1, output_bytes: 1 })
        .collect();
    let tables: Vec<KindTable> = fleet
        .kinds()
        .into_iter()
        .map(|kind| {
            let speed = draw.of(&[1e-3, 2e-3, 5e-3]);
            let overhead = draw.of(&[0.1, 0.5, 1.0]);
            let mut curve = |factor: f64| {
                let layer = speed * factor * draw.of(&[0.5, 1.0, 1.3, 2.0]);
                let seconds = [1.0, 2.0, 4.0, 8.0].map(|samples| layer * (overhead + samples));
                TimeCurve::new(vec![1, 2, 4, 8], seconds.to_vec())
            };
            KindTable {
                kind: kind.to_owned(),
                forward: chain.layers.iter().map(|_| curve(1.0)).collect(),
                backward: chain.layers.iter().map(|_| curve(2.0)).collect(),
                update_seconds_per_parameter: 1e-9,
            }
        })
        .collect();
    Costs::from_tables(layers, &tables, fleet).unwrap()
}

fn rows(fleet: &Fleet) -> Vec<DeviceRow> {
    let row = |device: &shoal_fleet::Device| DeviceRow {
        name: device.name.clone(),
        budget_bytes: device.memory_bytes,
        workspace_bytes: 0,
        stash: None,
        leeway: 0,
        puts_off: 0,
    };
    fleet.devices.iter().map(row).collect()
}

/// Seconds of a pipeline's step; none where it does not fit.
fn seconds(chain: &Chain, step: StepShape, fleet: &Fleet, costs: &Costs, pipeline: &Pipeline) -> Option<f64> {
    let plan = table(chain, step, rows(fleet), pipeline);
    let layout = Layout::new(&plan, chain);
    let world = FleetWorld::new(fleet, costs, &layout);
    let programs = compile_paced(&plan, chain, Purpose::Train, &world).unwrap();
    let fits = |program: &shoal_plan::Program| {
        forecast_in(program, &layout).total() <= plan.devices[program.device].budget_bytes
    };
    let simulated = simulate(&programs, &layout, &world, Settings::default()).unwrap();
    programs.iter().all(fits).then_some(simulated.seconds)
}

/// What must hold of every plan that is returned.
fn assert_sound(chain: &Chain, step: StepShape, fleet: &Fleet, costs: &Costs, planned: &PipelinePlanned) {
    let PipelinePlanned { plan, pipeline, .. } = planned;
    assert_eq!(*plan, table(chain, step, rows(fleet), pipeline));
    let layout = Layout::new(plan, chain);
    let world = FleetWorld::new(fleet, costs, &layout);
    let programs = compile_paced(plan, chain, Purpose::Train, &world).unwrap();
    verify_all(&programs, plan, chain, Purpose::Train).unwrap();
    for program in &programs {
        let forecast = forecast_in(program, &layout);
        assert!(forecast.total() <= fleet.devices[program.device].memory_bytes);
        assert_eq!(forecast, planned.memory[program.device]);
    }
    let simulated = simulate(&programs, &layout, &world, Settings::default()).unwrap();
    assert_eq!(simulated.seconds, planned.seconds);
    assert!(planned.pipeline_seconds <= planned.seconds);
    let samples: usize = pipeline.replicas.iter().map(|replica| replica.samples.len()).sum();
    assert_eq!(samples, step.global_batch);
}

/// Every cut of so many layers into so many stages.
fn cuts(layers: usize, stages: usize) -> Vec<Vec<usize>> {
    if stages == 1 {
        return vec![vec![layers]];
    }
    let with_last = |last: usize| {
        cuts(layers - last, stages - 1).into_iter().map(move |mut sizes| {
            sizes.push(last);
            sizes
        })
    };
    (1..=layers + 1 - stages).flat_map(with_last).collect()
}

/// Every list of rows of some of the devices.
fn divisions(devices: usize) -> Vec<Vec<Vec<usize>>> {
    let mut found = vec![Vec::new()];
    for device in 0..devices {
        let before = found.clone();
        for division in before {
            for (row, places) in division.iter().enumerate() {
                for at in 0..=Vec::len(places) {
                    let mut with = division.clone();
                    Vec::insert(&mut with[row], at, device);
                    found.push(with);
                }
            }
            let mut with = division;
            with.push(vec![device]);
            found.push(with);
        }
    }
    found.retain(|division| !division.is_empty());
    found
}

/// Every way to give so many samples to so many replicas.
fn shares(samples: usize, replicas: usize) -> Vec<Vec<usize>> {
    cuts(samples, replicas)
}

/// The least seconds of all pipelines with these choices.
fn brute_force(
    chain: &Chain,
    step: StepShape,
    fleet: &Fleet,
    costs: &Costs,
    order: Order,
    activations: Activations,
) -> (f64, Option<Pipeline>, usize) {
    let (mut best, mut found, mut tried) = (f64::INFINITY, None, 0);
    let layers = chain.layers.len();
    for division in divisions(fleet.devices.len()) {
        let replicas = division.len();
        if replicas > step.global_batch || division.iter().any(|row| row.len() > layers) {
            continue;
        }
        let mut all_cuts: Vec<Vec<Vec<usize>>> = vec![Vec::new()];
        for row in &division {
            let with = |cut: &Vec<Vec<usize>>| {
                let before = cut.clone();
                cuts(layers, row.len()).into_iter().map(move |sizes| {
                    let mut all = before.clone();
                    all.push(sizes);
                    all
                })
            };
            all_cuts = all_cuts.iter().flat_map(with).collect();
        }
        for cut in &all_cuts {
            for share in shares(step.global_batch, replicas) {
                // One size for all, as the last is ragged where it does not divide a replica's samples.
                for size in 1..=*share.iter().max().unwrap() {
                    let mut first = 0;
                    let replicas = division.iter().zip(cut).zip(&share).map(|((row, sizes), samples)| {
                        let range = first..first + samples;
                        first += samples;
                        let mut layer = 0;
                        let stages = row.iter().zip(sizes).map(|(device, size)| {
                            let layers = layer..layer + size;
                            layer += size;
                            Stage { device: *device, layers, activations, stash: None }
                        });
                        Replica { stages: stages.collect(), samples: range, micro_batch: size }
                    });
                    let pipeline = Pipeline { replicas: replicas.collect(), order, state: State::Divided };
                    tried += 1;
                    if let Some(seconds) = seconds(chain, step, fleet, costs, &pipeline)
                        && seconds < best
                    {
                        (best, found) = (seconds, Some(pipeline));
                    }
                }
            }
        }
    }
    (best, found, tried)
}

#[test]
fn no_pipeline_of_a_few_devices_is_more_than_two_percent_quicker() {
    let (mut all, mut worst) = (0, 0.0f64);
    for seed in 0..120 {
        let mut draw = Draw::new(seed);
        let chain = Chain::new(&presets::llama(40, 16, 1 + draw.below(3), 4, 2, 24, 8, 1e4, draw.chance(50)));
        let kinds = ["V100", "T4", "P40"];
        let devices: Vec<(&str, u64)> = (0..1 + draw.below(3))
            .map(|_| (draw.of(&kinds), draw.of(&[300_000, 1 << 20, 1 << 30])))
            .collect();
        let network = draw.of(&["100 Mbit/s", "1 Gbit/s", "100 Gbit/s"]);
        let fleet = fleet(&devices, network);
        let step = shape(1 + draw.below(8), 8);
        let costs = costs(&chain, &fleet, &mut draw);
        let order = draw.of(&[Order::Varuna, Order::OneForwardOneBackward]);
        let activations = draw.of(&[Activations::Keep, Activations::Recompute]);
        let (best, quickest, tried) = brute_force(&chain, step, &fleet, &costs, order, activations);
        all += tried;
        let wanted = PipelineWanted {
            order: Some(order),
            activations: Some(activations),
            state: Some(State::Divided),
            devices: Some(rows(&fleet)),
            ..PipelineWanted::default()
        };
        match plan(&chain, step, &fleet, &costs, &wanted) {
            Ok(planned) => {
                assert_sound(&chain, step, &fleet, &costs, &planned);
                worst = worst.max(planned.seconds / best);
                assert!(
                    planned.seconds <= best * 1.02,
                    "seed {seed}: {} s, {best} s is possible; {devices:?} {network} {:?}, not {quickest:?}",
                    planned.seconds,
                    planned.pipeline
                );
            }
            Err(PipelineError::TooSmall { short_bytes, .. }) => {
                assert!(
                    best == f64::INFINITY,
                    "seed {seed}: {short_bytes} bytes short, but {best} s is possible"
                );
            }
            Err(error) => panic!("seed {seed}: {error}"),
        }
    }
    println!(
        "{all} pipelines tried by hand; the search's were at most {:.2} % slower",
        100.0 * (worst - 1.0)
    );
}

#[test]
fn a_model_that_fits_no_device_gets_a_plan() {
    let chain = Chain::new(&presets::gpt2(50257, 1024, 24, 16, 1024));
    let step = StepShape { precision: Precision::Fp16, ..shape(32, 1024) };
    // 355 million parameters take 6.4 GB.
    let fleet = fleet(&[("V100", 4 << 30), ("T4", 3 << 30), ("V100", 4 << 30), ("T4", 3 << 30)], "10 Gbit/s");
    let costs = Costs::new(&chain, &fleet, None, Precision::Fp16, 1024).unwrap();
    let wanted = PipelineWanted { devices: Some(rows(&fleet)), ..PipelineWanted::default() };
    let planned = plan(&chain, step, &fleet, &costs, &wanted).unwrap();
    assert_sound(&chain, step, &fleet, &costs, &planned);
    assert!(planned.pipeline.replicas.iter().all(|replica| replica.stages.len() > 1));
    assert!(planned.runner_up.is_some_and(|other| other.seconds >= planned.seconds));
}

/// An embedding that is the head's matrix too is a third of this model: at both ends of a pipeline it would cross the
/// network after every step.
#[test]
fn ends_that_share_a_matrix_share_a_device() {
    let chain = Chain::new(&presets::gpt2(50257, 512, 8, 8, 128));
    let step = shape(32, 128);
    let fleet = fleet(&[("V100", 2 << 30), ("V100", 2 << 30), ("V100", 2 << 30)], "10 Gbit/s");
    let costs = Costs::new(&chain, &fleet, None, Precision::Fp32, 128).unwrap();
    let wanted =
        PipelineWanted { devices: Some(rows(&fleet)), replicas: Some(1), ..PipelineWanted::default() };
    let planned = plan(&chain, step, &fleet, &costs, &wanted).unwrap();
    assert_sound(&chain, step, &fleet, &costs, &planned);
    let stages = &planned.pipeline.replicas[0].stages;
    assert_eq!(stages.len(), 4);
    assert_eq!(stages[0].device, stages[3].device);
    let mut open = planned.pipeline.clone();
    let replica = &mut open.replicas[0];
    let ends = replica.stages.pop().unwrap();
    replica.stages[2].layers.end = ends.layers.end;
    let parted = seconds(&chain, step, &fleet, &costs, &open).unwrap();
    assert!(planned.seconds < 0.9 * parted, "{} against {parted}", planned.seconds);
}

#[test]
fn what_fits_nowhere_is_refused_with_what_is_missing() {
    let chain = Chain::new(&presets::gpt2(50257, 1024, 24, 16, 1024));
    let step = StepShape { precision: Precision::Fp16, ..shape(32, 1024) };
    let fleet = fleet(&[("V100", 1 << 29), ("T4", 1 << 29)], "10 Gbit/s");
    let costs = Costs::new(&chain, &fleet, None, Precision::Fp16, 1024).unwrap();
    let error = plan(&chain, step, &fleet, &costs, &PipelineWanted::default()).unwrap_err();
    assert!(
        matches!(error, PipelineError::TooSmall { devices: 2, short_bytes, .. } if short_bytes > 1 << 28)
    );
    assert!(error.hint().unwrap().contains("MiB more"), "{error}");
    let impossible = PipelineWanted { replicas: Some(3), ..PipelineWanted::default() };
    let error = plan(&chain, step, &fleet, &costs, &impossible).unwrap_err();
    assert!(matches!(error, PipelineError::NoDivision { .. }) && error.hint().is_some(), "{error}");
    let order = PipelineWanted { order: Some(Order::LayerFirst), ..PipelineWanted::default() };
    assert!(matches!(plan(&chain, step, &fleet, &costs, &order), Err(PipelineError::Order { .. })));
    let size = PipelineWanted { micro_batch: Some(33), ..PipelineWanted::default() };
    assert!(matches!(plan(&chain, step, &fleet, &costs, &size), Err(PipelineError::TooFewSamples { .. })));
}

#[test]
fn every_plan_for_any_model_is_sound() {
    let (mut planned, mut refused) = (0, 0);
    for seed in 0..120 {
        let mut draw = Draw::new(1000 + seed);
        let (chain, sequence) = draw::model(&mut draw);
        let step = draw::step(&mut draw, sequence);
        let devices: Vec<(&str, u64)> = (0..1 + draw.below(7))
            .map(|_| (draw.of(&["V100", "T4", "A100"]), draw.of(&[200_000, 1 << 20, 1 << 30])))
            .collect();
        // Where messages take longer than layers, more of them may take no longer.
        let fleet = fleet_on(&devices, draw.of(&["1 Gbit/s", "100 Gbit/s"]), draw.of(&["1 us", "300 us"]));
        let costs = Costs::new(&chain, &fleet, None, step.precision, step.sequence).unwrap();
        let wanted = PipelineWanted { devices: Some(rows(&fleet)), ..PipelineWanted::default() };
        match plan(&chain, step, &fleet, &costs, &wanted) {
            Ok(found) => {
                assert_sound(&chain, step, &fleet, &costs, &found);
                planned += 1;
            }
            Err(PipelineError::TooSmall { .. }) => refused += 1,
            Err(error) => panic!("seed {seed}: {error}"),
        }
    }
    assert!(planned >= 40 && refused > 0, "{planned} planned, {refused} refused");
}
