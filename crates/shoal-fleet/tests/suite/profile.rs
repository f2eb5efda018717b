//! profile.json: written, read back, read in its first format, merged.

use proptest::prelude::*;
use shoal_fleet::{
    DeviceProfile, Error, LayerProfile, Link, LinkProfile, LinkScope, Profile, Seen, TimeCurve, catalogue,
    estimate,
};
use shoal_model::{Model, Precision};

const FIRST_FORMAT: &str = r#"{"format": 1, "model": "vgg16", "device": "cuda:0 (NVIDIA H200)", "precision": "bf16",
    "sequence": 1, "samples": [1, 2], "step_seconds": [0.002, 0.0021], "layers": [
    {"layer": "features.0", "parameters": 1792, "forward_flops": 173408256, "output_bytes": 6422528,
     "forward_seconds": [4.2e-05, 5.1e-05], "backward_seconds": [3.5e-05, 4.9e-05]}]}"#;

fn layer(names: &[&str], seconds: &[(usize, f64)]) -> LayerProfile {
    let curve = |scale: f64| {
        let (samples, seconds) = seconds.iter().map(|(samples, seconds)| (*samples, scale * seconds)).unzip();
        TimeCurve::new(samples, seconds)
    };
    LayerProfile {
        layers: names.iter().map(|name| name.to_string()).collect(),
        parameters: 10,
        forward_flops: 20,
        output_bytes: 30,
        forward: curve(1.0),
        backward: curve(2.0),
    }
}

fn profile(kind: &str, layers: Vec<LayerProfile>) -> Profile {
    let device = DeviceProfile {
        kind: kind.into(),
        device: format!("cuda:0 ({kind})"),
        precision: Precision::Bf16,
        estimated: false,
        update_seconds_per_parameter: Some(1e-11),
        handling_seconds_per_byte: None,
        handling_seconds_per_message: None,
        alone: None,
        step: Some(TimeCurve::new(vec![1], vec![0.5])),
        layers,
    };
    Profile { format: 2, model: "m".into(), sequence: 8, devices: vec![device], links: Vec::new() }
}

#[test]
fn the_first_format_is_read() {
    let profile = Profile::parse(FIRST_FORMAT, "p.json").unwrap();
    let device = profile.device("h200", Precision::Bf16).unwrap();
    assert_eq!((profile.format, profile.sequence, device.kind.as_str()), (2, 1, "H200"));
    assert_eq!(device.step.as_ref().unwrap().at(2), 0.0021);
    let layer = device.layer("features.0").unwrap();
    assert_eq!((layer.parameters, layer.forward.at(2), layer.backward.at(1)), (1792, 5.1e-5, 3.5e-5));
    assert!(device.update_seconds_per_parameter.is_none() && device.layer("features.1").is_none());
    assert!(
        profile.device("H200", Precision::Fp16).is_none() && profile.device("T4", Precision::Bf16).is_none()
    );
}

#[test]
fn the_profiles_kept_here_are_of_this_format() {
    for (text, model) in [
        (include_str!("../../../../profiles/h200-vgg16.json"), "vgg16"),
        (include_str!("../../../../profiles/h200-wide_resnet101_2.json"), "wide_resnet101_2"),
    ] {
        let profile = Profile::parse(text, model).unwrap();
        assert_eq!(profile.model, model);
        assert_eq!(profile.to_text(), text, "written as the command writes it");
        let names = Model::preset(model).unwrap().chain().layers.into_iter().map(|layer| layer.name);
        let device = profile.device("H200", Precision::Bf16).unwrap();
        assert!(names.into_iter().all(|name| device.layer(&name).is_some()));
    }
}

#[test]
fn what_is_no_profile_is_refused() {
    let bad = |from: &str, to: &str| {
        let error = Profile::parse(&FIRST_FORMAT.replace(from, to), "p.json").unwrap_err();
        assert!(error.to_string().starts_with("p.json: ") && error.hint().is_some());
        error.to_string()
    };
    assert!(bad("\"format\": 1", "\"format\": 9").contains("format 9"));
    assert!(bad("[1, 2]", "[2, 1]").contains("not rising"));
    assert!(bad("[3.5e-05, 4.9e-05]", "[3.5e-05]").contains("H200 in bf16, layer features.0: backward"));
    assert!(bad("{\"format\"", "{\"form\"").contains("no profile"));
    let text = profile("T4", vec![layer(&["a"], &[(1, 1.0)])]).to_text();
    let error = Profile::parse(&text.replace("\"update_sec", "\"updat_sec"), "p.json").unwrap_err();
    assert!(error.to_string().contains("updat_sec"), "{error}");
}

#[test]
fn a_profile_is_a_layer_a_line_of_five_digits() {
    let text =
        profile("T4", vec![layer(&["a", "b"], &[(1, 0.123456789)]), layer(&["c"], &[(1, 1e-5)])]).to_text();
    assert_eq!(text.lines().filter(|line| line.starts_with("{\"layers\"")).count(), 2);
    assert!(text.contains("[0.12346]") && text.contains("[0.24691]"), "{text}");
}

/// Whatever its maker calls it; but for two that were measured a fleet must say which it means.
#[test]
fn the_processor_that_was_measured_is_what_a_fleet_calls_a_cpu() {
    let of = |kind: &str| {
        let mut profile = profile(kind, vec![layer(&["a"], &[(1, 1.0)])]);
        profile.devices[0].device = "the processor".into();
        profile
    };
    let one = of("Some Processor");
    assert_eq!(one.device("CPU", Precision::Bf16).unwrap().kind, "Some Processor");
    assert!(one.device("CPU", Precision::Fp32).is_none() && one.device("T4", Precision::Bf16).is_none());
    let with_gpu = one.clone().merge(profile("T4", vec![layer(&["a"], &[(1, 1.0)])])).unwrap();
    assert_eq!(with_gpu.device("CPU", Precision::Bf16).unwrap().kind, "Some Processor");
    let two = one.clone().merge(of("Another")).unwrap();
    assert!(two.device("CPU", Precision::Bf16).is_none());
    // What a run took is noted under the fleet's name for it.
    let seen = |is_backward: bool, expected_seconds: f64| Seen {
        kind: "CPU".into(),
        layer: "a".into(),
        is_backward,
        seconds: 2.0 * expected_seconds,
        expected_seconds,
        beside: None,
    };
    let corrected = one.corrected(Precision::Bf16, &[seen(false, 1.0), seen(true, 2.0)]);
    let forward = corrected.profile.devices[0].layers[0].forward.seconds[0];
    assert_eq!((corrected.layers.len(), forward), (1, 2.0));
}

#[test]
fn what_handling_takes_is_kept_and_the_least_of_two_counts() {
    let of = |seconds: f64| {
        let mut profile = profile("T4", vec![layer(&["a"], &[(1, 1.0)])]);
        profile.devices[0].handling_seconds_per_byte = Some(seconds);
        profile
    };
    let merged = of(3e-10).merge(of(2e-10)).unwrap();
    let read = Profile::parse(&merged.to_text(), "p.json").unwrap();
    assert_eq!(read.devices[0].handling_seconds_per_byte, Some(2e-10));
    let broken = of(1.0)
        .to_text()
        .replace("\"handling_seconds_per_byte\": 1.0", "\"handling_seconds_per_byte\": -1.0");
    let error = Profile::parse(&broken, "p.json").unwrap_err().to_string();
    assert!(error.contains("handling_seconds_per_byte"), "{error}");
}

#[test]
fn what_layers_take_alone_is_a_share() {
    let of = |alone: f64| {
        let mut profile = profile("25 % of H200", vec![layer(&["a"], &[(1, 1.0)])]);
        profile.devices[0].alone = Some(alone);
        profile
    };
    let merged = of(0.75).merge(of(0.25)).unwrap();
    assert_eq!(Profile::parse(&merged.to_text(), "p.json").unwrap().devices[0].alone, Some(0.5));
    for wrong in [0.0, -0.5, 1.5] {
        let error = Profile::parse(&of(wrong).to_text(), "p.json").unwrap_err().to_string();
        assert!(error.contains("25 % of H200 in bf16: alone"), "{error}");
    }
}

#[test]
fn profiles_are_written_and_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("profile.json");
    let chain = Model::preset("gpt2-124m").unwrap().chain();
    let device = estimate::device(&chain, catalogue::find("A100").unwrap(), Precision::Fp16, 256);
    let link = Link { by_size: vec![(1 << 10, 1e8)], ..Link::new(2e9, 1e-5) };
    let links = vec![LinkProfile { scope: LinkScope::Process, kind: "tcp".into(), link }];
    let profile =
        Profile { format: 2, model: "gpt2-124m".into(), sequence: 256, devices: vec![device], links };
    profile.write(&path).unwrap();
    let read = Profile::read(&path).unwrap();
    assert_eq!(read.links, profile.links);
    assert!(read.devices[0].estimated);
    // Equal blocks are one row.
    assert_eq!(read.devices[0].layers.len(), 3);
    let (one, other) = (&read.devices[0].layers[1].forward, &profile.devices[0].layers[1].forward);
    assert!(one.seconds.iter().zip(&other.seconds).all(|(a, b)| (a / b - 1.0).abs() < 1e-4));
    // What has five digits already stays as it is.
    assert_eq!(Profile::parse(&read.to_text(), "p.json").unwrap(), read);
}

#[test]
fn machines_of_several_kinds_are_merged() {
    let t4 = profile("T4", vec![layer(&["a"], &[(1, 1.0), (4, 4.0)])]);
    let mut more =
        profile("Tesla T4", vec![layer(&["a"], &[(2, 2.0), (4, 4.4)]), layer(&["b"], &[(1, 1.0)])]);
    more.links.push(LinkProfile { scope: LinkScope::Host, kind: "T4".into(), link: Link::new(12e9, 1e-5) });
    let merged = t4.merge(profile("L4", vec![layer(&["a"], &[(1, 0.5)])])).unwrap().merge(more).unwrap();
    assert_eq!(merged.devices.iter().map(|device| device.kind.as_str()).collect::<Vec<_>>(), ["T4", "L4"]);
    let device = merged.device("T4", Precision::Bf16).unwrap();
    let forward = &device.layer("a").unwrap().forward;
    assert_eq!((&forward.samples[..], &forward.seconds[..]), (&[1, 2, 4][..], &[1.0, 2.0, 4.2][..]));
    assert!(device.layer("b").is_some());
    assert_eq!(merged.link(LinkScope::Host, "Tesla T4").unwrap().bytes_per_second, 12e9);
}

#[test]
fn other_groups_of_equal_layers_are_merged_layer_by_layer() {
    let grouped = profile("T4", vec![layer(&["a", "b"], &[(1, 1.0)])]);
    let single = profile("T4", vec![layer(&["a"], &[(1, 1.0)]), layer(&["b"], &[(1, 1.1)])]);
    let merged = grouped.merge(single).unwrap();
    let device = &merged.devices[0];
    assert_eq!(device.layers.len(), 2);
    assert_eq!(device.layer("b").unwrap().forward.seconds, [1.05]);
}

#[test]
fn an_estimate_gives_way_to_a_measurement() {
    let measured = profile("T4", vec![layer(&["a"], &[(1, 1.0)])]);
    let mut guessed = profile("T4", vec![layer(&["a"], &[(1, 9.0)])]);
    guessed.devices[0].estimated = true;
    for merged in [measured.clone().merge(guessed.clone()), guessed.merge(measured.clone())] {
        assert_eq!(merged.unwrap(), measured);
    }
}

#[test]
fn contradictions_are_named() {
    let base = || profile("T4", vec![layer(&["a"], &[(1, 1.0), (4, 4.0)])]);
    let named = |change: &dyn Fn(&mut Profile), what: &str| {
        let mut other = base();
        change(&mut other);
        let error = base().merge(other).unwrap_err();
        assert!(matches!(error, Error::Contradiction { .. }) && error.hint().is_some());
        assert!(error.to_string().contains(what), "{error}");
    };
    named(&|other| other.model = "n".into(), "one is of the model m, the other of n");
    named(&|other| other.sequence = 16, "8 rows, the other of 16");
    named(&|other| other.devices[0].layers[0].parameters = 11, "parameters of a is 10 in one and 11");
    named(
        &|other| other.devices[0].layers[0].backward.seconds[1] = 20.0,
        "a's backward of 4 samples takes 8",
    );
    named(
        &|other| other.devices[0].step = Some(TimeCurve::new(vec![1], vec![5.0])),
        "T4 in bf16: a step of 1",
    );
    named(&|other| other.devices[0].update_seconds_per_parameter = Some(1e-9), "the update of a parameter");
}

proptest! {
    #[test]
    fn merging_a_profile_with_itself_changes_nothing(seconds in proptest::collection::vec(1e-6..1.0f64, 1..6)) {
        let points: Vec<(usize, f64)> = seconds.into_iter().enumerate().map(|(index, s)| (index + 1, s)).collect();
        let one = profile("T4", vec![layer(&["a", "b"], &points), layer(&["c"], &points)]);
        prop_assert_eq!(one.clone().merge(one.clone()).unwrap(), one);
    }
}
