//! Tiny files of the published formats: two blocks of width 8, so that times and sizes can be said by hand.

use std::fs;

use serde_json::{Value, json};

use super::*;

/// A folder that is gone after the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("shoal-sailor-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        let folder = Folder(path);
        folder.write(
            "training_config_opt_350.json",
            &json!({"model": "tiny", "hidden_size": 8, "sequence_length": 4, "num_layers": 2, "heads": 2,
                "max_position_embeddings": 4, "optimizer": "Adam"}),
        );
        folder.write("llm_info.json", &json!({"tiny": {"1": sizes(1), "2": sizes(2)}}));
        let flat = |rate: f64| json!([[rate], rate * 1e9]);
        folder.write(
            "multizone_bandwidths.json",
            &json!({"here": {"GH-96": {"2": {"here": {"GH-96": {"2": flat(1.0)}}}}}}),
        );
        folder.write("intra_node_bandwidths.json", &json!({"GH-96": {"2": flat(2.0)}}));
        folder.write(
            "profile_tiny_GH-96_profile.json",
            &json!({"1": {"2": times(0.5)}, "2": {"2": times(1.0)}}),
        );
        folder
    }

    fn write(&self, name: &str, content: &Value) {
        fs::write(self.0.join(name), content.to_string()).unwrap();
    }

    fn measured(&self, change: impl Fn(&mut Value)) -> Result<Step, Error> {
        let group = json!([[["GH-96", 2, "here"]], 2]);
        let mut plan = json!({"pipeline_list": [{"num_stages": 2, "layers_per_stage": [[0, 1], [2, 3]],
            "tmp_per_stage": [[group], [group]], "dp": [1, 1]}], "mbs": 2, "gbs": 4, "real": 0.5, "max_mem": 5_100_000_000u64});
        change(&mut plan);
        self.write("measured_one.json", &plan);
        report(&self.0).map(|report| report.steps[0].clone())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn sizes(degree: u64) -> Value {
    let size = |parameters: u64, kept: u64| json!({"params_floats": parameters / degree, "act_output_bytes": 128, "act_mem_bytes": kept / degree});
    json!({"0": size(160, 100), "1": size(872, 1000), "2": size(872, 1000), "3": size(144, 500)})
}

/// Forward 10 ms and backward 20 ms a layer, the update 1 ms.
fn times(scale: f64) -> Value {
    let layer = json!([0.01 * scale, 0.02 * scale, 0.001]);
    json!({"0": layer, "1": layer, "2": layer, "3": layer})
}

#[test]
fn one_stage_is_its_layers_and_its_update() {
    let folder = Folder::new("one");
    let step = folder
        .measured(|plan| {
            let pipeline = &mut plan["pipeline_list"][0];
            pipeline["layers_per_stage"] = json!([[0, 1, 2, 3]]);
            pipeline["tmp_per_stage"] = json!([[[[["GH-96", 2, "here"]], 2]]]);
            pipeline["dp"] = json!([1]);
        })
        .unwrap();
    assert_eq!((step.stages, step.replicas, step.micro_batch, step.micro_batches), (1, 1, 2, 2));
    assert!((step.seconds.predicted - (2.0 * 4.0 * 0.03 + 0.004)).abs() < 1e-6, "{}", step.seconds.predicted);
    // Half of 2048 parameters with 16 bytes each, two samples of all that is kept, the gradient of their logits.
    let bytes = 5_060_000_000u64 + 16 * 1024 + 2 * 1300 + 2 * 128;
    assert_eq!(step.bytes.predicted, bytes as f64);
}

#[test]
fn stages_exchange_before_they_compute_and_nothing_overlaps() {
    let folder = Folder::new("two");
    let step = folder.measured(|_| {}).unwrap();
    // A message takes a millisecond whatever its size (the polynomial begins at a megabyte), a gathering half of one,
    // and what it gathers into comes over the catalogue's way from the host.
    let exchange = 2.0 * 1e-3 + 0.5e-3 + (10e-6 + 256.0 / 52e9);
    // Loss and norm at the same time, each one's to the other.
    let sums = 1e-3;
    let update = 0.004 * 1032.0 / 2048.0;
    let expected = 0.02 + 2.0 * (exchange + 0.06) + (exchange + 0.04) + sums + update;
    assert!((step.seconds.predicted - expected).abs() < 1e-5, "{} for {expected}", step.seconds.predicted);
    // The first stage keeps both micro-batches; its backward has the gradients of scores and probabilities.
    let bytes = 5_060_000_000u64 + 16 * 516 + 4 * 550 + 2 * (2 * 4 * 16);
    assert_eq!(step.bytes.predicted, bytes as f64);
}

#[test]
fn replicas_add_up_their_gradients_after_everything_else() {
    let folder = Folder::new("replicas");
    let group = json!([[["GH-96", 2, "here"]], 2]);
    let alone = folder.measured(|_| {}).unwrap();
    let both = folder
        .measured(|plan| {
            let pipeline = &mut plan["pipeline_list"][0];
            pipeline["tmp_per_stage"] = json!([[group, group], [group, group]]);
            pipeline["dp"] = json!([2, 2]);
            plan["gbs"] = json!(8);
        })
        .unwrap();
    // One more message, and a deeper tree for two sums and the count of targets.
    let more = both.seconds.predicted - alone.seconds.predicted;
    assert!((1e-3..8e-3).contains(&more), "{more}");
}

#[test]
fn bad_files_are_named_with_their_keys() {
    let folder = Folder::new("bad");
    let wrong = |change: &dyn Fn(&mut Value)| {
        let error = folder.measured(change).unwrap_err();
        assert!(error.hint().is_some());
        error.to_string()
    };
    for (key, value, says) in [
        ("gbs", json!(5), "gbs is 5"),
        ("mbs", json!(0), "gbs is 4"),
        ("mbs", json!(4), "4.2 is missing"),
        ("real", json!(0.0), "real is 0 seconds"),
        ("max_mem", json!(0), "max_mem is 0"),
        ("mbs", json!("two"), "invalid type"),
        ("pipeline_list", json!([]), "pipeline_list has 0 pipelines"),
    ] {
        let error = wrong(&|plan| plan[key] = value.clone());
        assert!(error.contains(says) && error.contains(".json"), "{key}: {error}");
    }
    for (key, value, says) in [
        ("layers_per_stage", json!([[0, 1], [3, 2]]), "layers_per_stage does not have the 4 layers in order"),
        ("layers_per_stage", json!([[0, 1, 2, 3], []]), "layers_per_stage does not"),
        ("dp", json!([1, 2]), "dp is [1, 2]"),
        ("tmp_per_stage", json!([[], []]), "tmp_per_stage does not have a group"),
        (
            "tmp_per_stage",
            json!([[[[["GH-96", 4, "here"]], 2]], [[[["GH-96", 2, "here"]], 2]]]),
            "not all of one machine's",
        ),
        (
            "tmp_per_stage",
            json!([[[[["GH-96", 2, "there"]], 2]], [[[["GH-96", 2, "here"]], 2]]]),
            "there.GH-96.2.there.GH-96.2 is missing",
        ),
    ] {
        let error = wrong(&|plan| plan["pipeline_list"][0][key] = value.clone());
        assert!(error.contains(says), "{key}: {error}");
    }
    folder.write("profile_tiny_GH-96_profile.json", &json!({"2": {"2": {"0": [0.01, 0.02, 0.001]}}}));
    assert!(wrong(&|_| {}).contains("2.2.1 is missing"));
    let mut other = sizes(1);
    other["1"]["params_floats"] = json!(873);
    folder.write("llm_info.json", &json!({"tiny": {"1": other}}));
    let error = wrong(&|_| {});
    assert!(error.contains("tiny.1.1.params_floats is 873, the model's arithmetic gives 872"), "{error}");
}

#[test]
fn a_folder_without_measurements_says_so() {
    let folder = Folder::new("empty");
    let error = report(&folder.0).unwrap_err();
    assert!(error.to_string().contains("measured_*.json") && error.hint().is_some());
    let error = report(&folder.0.join("nowhere")).unwrap_err();
    assert!(matches!(error, Error::Io { .. }) && error.hint().is_some());
}

#[test]
fn a_link_ends_where_its_polynomial_turns() {
    let file = File { path: "links.json".into(), is: () };
    let link = read::link(&file, "a.b", &(vec![-1.0, 6.0, 5.0], 14.2e9)).unwrap();
    // GB/s at 1, 2, 4 and 8 MB, where it is highest.
    assert_eq!(link.by_size, [(1_000_000, 5e9), (2_000_000, 10e9), (4_000_000, 13e9), (8_000_000, 14e9)]);
    assert_eq!(link.bytes_per_second, 14.2e9);
    let error = read::link(&file, "a.b", &(vec![-1.0], 1.0)).unwrap_err();
    assert_eq!(error.to_string(), "links.json: a.b is no bandwidth");
}
