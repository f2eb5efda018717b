//! What layers cost on the devices of a fleet: measured where something was measured, estimated elsewhere.

use proptest::prelude::*;
use shoal_fleet::{
    Costs, Error, Fleet, KindTable, LayerTable, Profile, TimeCurve, catalogue, estimate, pace,
};
use shoal_model::{Chain, Model, Precision};

fn chain(model: &str) -> Chain {
    Model::preset(model).unwrap().chain()
}

/// A node with one device of each kind.
fn fleet(kinds: &[&str]) -> Fleet {
    let devices: Vec<String> =
        kinds.iter().map(|kind| format!("{{ kind = \"{kind}\", memory = \"16 GiB\" }}")).collect();
    let text = format!(
        "[[node]]\nhost_memory = \"64 GiB\"\nhost_bandwidth = \"280 GB/s\"\nhost_link = \"12 GB/s\"\ndevices = [{}]",
        devices.join(", ")
    );
    Fleet::parse(&text, "fleet.toml").unwrap()
}

fn step_seconds(chain: &Chain, costs: &Costs, device: usize, samples: usize) -> f64 {
    let layer = |layer: usize| costs.forward(layer, device, samples) + costs.backward(layer, device, samples);
    (0..costs.layers()).map(layer).sum::<f64>() + costs.update(device, chain.parameters())
}

#[test]
fn an_estimated_step_is_within_a_factor_of_two_of_the_measured_one() {
    // 32 sequences of 1024 tokens took 57.8 ms on an H200 in bf16 (docs/performance.md).
    let (chain, fleet) = (chain("gpt2-124m"), fleet(&["H200"]));
    let costs = Costs::new(&chain, &fleet, None, Precision::Bf16, 1024).unwrap();
    let seconds = step_seconds(&chain, &costs, 0, 32);
    assert!((0.0578 / 2.0..0.0578 * 2.0).contains(&seconds), "{seconds}");
    assert!(costs.estimated("NVIDIA H200"));
}

#[test]
fn estimated_convolutions_are_near_the_profiles_kept_here() {
    for (text, model) in [
        (include_str!("../../../../profiles/h200-vgg16.json"), "vgg16"),
        (include_str!("../../../../profiles/h200-wide_resnet101_2.json"), "wide_resnet101_2"),
    ] {
        let (chain, fleet) = (chain(model), fleet(&["H200"]));
        let profile = Profile::parse(text, model).unwrap();
        let estimated = Costs::new(&chain, &fleet, None, Precision::Bf16, 1).unwrap();
        let measured = Costs::new(&chain, &fleet, Some(&profile), Precision::Bf16, 1).unwrap();
        assert!(estimated.estimated("H200") && !measured.estimated("H200"));
        for samples in [1, 16, 256] {
            let ratio =
                step_seconds(&chain, &estimated, 0, samples) / step_seconds(&chain, &measured, 0, samples);
            assert!((0.4..2.5).contains(&ratio), "{model}, {samples} samples: {ratio}");
        }
    }
}

#[test]
fn measured_kinds_cost_what_was_measured_and_others_are_estimated() {
    let (chain, fleet) = (chain("gpt2-124m"), fleet(&["A100", "T4"]));
    let mut device = estimate::device(&chain, catalogue::find("A100").unwrap(), Precision::Fp16, 256);
    device.estimated = false;
    device.update_seconds_per_parameter = Some(2e-11);
    device.layers[1].forward = TimeCurve::new(vec![1, 4], vec![1.0, 7.0]);
    let profile =
        Profile { format: 2, model: "gpt2-124m".into(), sequence: 256, devices: vec![device], links: vec![] };
    let costs = Costs::new(&chain, &fleet, Some(&profile), Precision::Fp16, 256).unwrap();
    assert!(!costs.estimated("A100") && costs.estimated("T4"));
    assert_eq!(costs.layers(), 14);
    for block in 1..13 {
        let at = [1, 2, 4, 8].map(|samples| costs.forward(block, 0, samples));
        assert_eq!(at, [1.0, 3.0, 7.0, 15.0]);
    }
    assert!((costs.update(0, 1_000_000) - 2e-5).abs() < 1e-12);
    assert_eq!(costs.host_update(0, 1_000_000_000), 0.1);
    assert!(costs.forward(1, 1, 4) < 1.0);
    assert_eq!(costs.forward(1, 0, 0), 0.0);
    assert_eq!(costs.output_bytes(1), 256 * 768 * 2);
    let block = 12 * 768 * 768 + 13 * 768;
    assert_eq!((costs.parameters(1), costs.parameters(13)), (block, 50257 * 768 + 2 * 768));

    let other = Costs::new(&chain, &fleet, Some(&profile), Precision::Fp16, 512).unwrap_err();
    assert!(matches!(other, Error::OtherSequence { found: 256, wanted: 512 }));
    let larger =
        Costs::new(&self::chain("gpt2-355m"), &fleet, Some(&profile), Precision::Fp16, 256).unwrap_err();
    assert!(matches!(larger, Error::OtherModel { .. }), "{larger}");
}

#[test]
fn faster_kinds_are_estimated_to_be_faster() {
    let kinds = ["CPU", "P40", "T4", "V100", "A100", "H100"];
    let (chain, fleet) = (chain("gpt2-124m"), fleet(&kinds));
    let costs = Costs::new(&chain, &fleet, None, Precision::Fp16, 1024).unwrap();
    let steps: Vec<f64> = (0..kinds.len()).map(|device| step_seconds(&chain, &costs, device, 8)).collect();
    assert!(steps.windows(2).all(|pair| pair[0] > pair[1]), "{steps:?}");
    let halves = Costs::new(&chain, &fleet, None, Precision::Fp32, 1024).unwrap();
    assert!((2..6).all(|device| costs.forward(1, device, 8) < halves.forward(1, device, 8)));
}

#[test]
fn every_preset_is_estimated() {
    let fleet = fleet(&["L4"]);
    for name in Model::preset_names() {
        let model = Model::preset(name).unwrap();
        let (chain, sequence) = (model.chain(), model.positions().min(256));
        for precision in Precision::ALL {
            let costs = Costs::new(&chain, &fleet, None, precision, sequence).unwrap();
            for layer in 0..costs.layers() {
                let (forward, backward) = (costs.forward(layer, 0, 4), costs.backward(layer, 0, 4));
                assert!(forward > 0.0 && backward >= forward, "{name}, {}", chain.layers[layer].name);
            }
        }
    }
}

#[test]
fn a_kind_that_nobody_knows_is_refused() {
    let fleet = fleet(&["V10O-32"]);
    let error = Costs::new(&chain("gpt2-124m"), &fleet, None, Precision::Fp16, 64).unwrap_err();
    assert!(matches!(error, Error::UnknownKind { .. }));
    assert!(error.hint().unwrap().contains("V100-32"));
}

fn table(kind: &str, forward: Vec<TimeCurve>) -> KindTable {
    let backward = forward.iter().map(|curve| curve.scaled(2.0)).collect();
    KindTable { kind: kind.into(), forward, backward, update_seconds_per_parameter: 1e-10 }
}

fn layer(name: &str) -> LayerTable {
    LayerTable { name: name.into(), parameters: 5, output_bytes: 7 }
}

#[test]
fn published_tables_need_no_chain() {
    let fleet = fleet(&["T4", "Quirk 9", "T4"]);
    let curve = |scale: f64| TimeCurve::new(vec![1, 2], vec![scale, 2.0 * scale]);
    let tables =
        [table("quirk-9", vec![curve(1.0), curve(3.0)]), table("Tesla T4", vec![curve(5.0), curve(5.0)])];
    let costs = Costs::from_tables(vec![layer("a"), layer("b")], &tables, &fleet).unwrap();
    assert_eq!((costs.forward(1, 1, 2), costs.backward(1, 1, 2), costs.forward(0, 2, 3)), (6.0, 12.0, 15.0));
    assert_eq!((costs.parameters(1), costs.output_bytes(0)), (5, 7));
    assert!(!costs.estimated("T4"));

    let short = Costs::from_tables(vec![layer("a")], &tables, &fleet).unwrap_err();
    assert!(matches!(short, Error::TableLength { found: 2, wanted: 1, .. }));
    let none = Costs::from_tables(vec![layer("a"), layer("b")], &tables[..1], &fleet).unwrap_err();
    assert!(matches!(none, Error::UnknownKind { .. }));
    let empty = [table("T4", vec![TimeCurve::default(); 2]), tables[0].clone()];
    let empty = Costs::from_tables(vec![layer("a"), layer("b")], &empty, &fleet).unwrap_err();
    assert!(matches!(empty, Error::TableCurve { .. }), "{empty}");
}

proptest! {
    /// What is worked out beforehand is what the curve says, near and far.
    #[test]
    fn costs_are_the_curve(points in proptest::collection::btree_map(1usize..3000, 0.0..1.0f64, 1..10), asked in 0usize..5000) {
        let curve = TimeCurve::new(points.keys().copied().collect(), points.values().copied().collect());
        let fleet = fleet(&["T4"]);
        let costs = Costs::from_tables(vec![layer("a")], &[table("T4", vec![curve.clone()])], &fleet).unwrap();
        prop_assert_eq!(costs.forward(0, 0, asked), curve.at(asked));
    }
}

#[test]
fn a_share_costs_what_was_measured_of_it_or_its_part_of_the_whole() {
    let chain = chain("gpt2-124m");
    let text = "[[node]]\nhost_memory = \"64 GiB\"\n\
                devices = [{ kind = \"H200\" }, { kind = \"H200\", share = 0.25 }, { kind = \"H200\", share = 0.5 }]";
    let fleet = Fleet::parse(text, "fleet.toml").unwrap();
    let costs = Costs::new(&chain, &fleet, None, Precision::Bf16, 1024).unwrap();
    let [whole, quarter, half] = [0, 1, 2].map(|device| step_seconds(&chain, &costs, device, 8));
    assert!((whole / quarter - 0.26).abs() < 1e-9 && (whole / half - 0.5).abs() < 1e-9);
    assert_eq!((costs.scaled("25 % of H200"), costs.scaled("H200")), (Some(("H200", 0.26)), None));
    assert!(costs.estimated("25 % of H200"));
    // One that was measured itself is what it was measured to be.
    let mut device = estimate::device(&chain, catalogue::find("A100").unwrap(), Precision::Bf16, 1024);
    (device.kind, device.estimated) = ("25 % of H200".into(), false);
    let profile =
        Profile { format: 2, model: "m".into(), sequence: 1024, devices: vec![device], links: Vec::new() };
    let measured = Costs::new(&chain, &fleet, Some(&profile), Precision::Bf16, 1024).unwrap();
    assert!(step_seconds(&chain, &measured, 1, 8) < quarter, "an A100 is faster than a quarter of an H200");
    assert!(measured.scaled("25 % of H200").is_none() && !measured.estimated("25 % of H200"));
    assert_eq!(step_seconds(&chain, &measured, 2, 8), half);
}

#[test]
fn a_slow_device_takes_longer_and_is_like_no_other() {
    let (chain, fleet) = (chain("gpt2-124m"), fleet(&["V100", "V100", "V100", "T4"]));
    let costs = Costs::new(&chain, &fleet, None, Precision::Fp16, 1024).unwrap();
    let (slow_fleet, slow) = pace::paced(&fleet, &costs, &[100, 300, 300, 50]);
    for (device, times) in [(0, 1.0), (1, 3.0), (2, 3.0), (3, 0.5)] {
        let (before, after) =
            (step_seconds(&chain, &costs, device, 4), step_seconds(&chain, &slow, device, 4));
        assert!((after / before - times).abs() < 1e-6, "device {device}: {before} s, then {after} s");
    }
    assert_eq!(slow_fleet.kinds(), ["V100-16", "V100-16 at 300 %", "T4 at 50 %"]);
    let (same, _) = pace::paced(&fleet, &costs, &[pace::AS_PROFILED_PERCENT; 4]);
    assert_eq!(same, fleet);
}
