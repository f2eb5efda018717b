//! Lines of the published format, with a model of two blocks.

use std::path::Path;

use super::*;

const COLUMNS: &str = "source,system,model,layers,hidden,heads,seq,vocab,gpu,num_gpus,gpu_mix,tp,pp,dp,cp,fsdp,mbs,gbs,layer_split,precision,recompute,step_time_s,tflops_per_gpu,predicted_s_by_source";

/// A run on one A100, with some columns otherwise.
fn line(changes: &[(&str, &str)]) -> String {
    let usual = |column: &str| match column {
        "source" => "someone",
        "model" => "small",
        "layers" => "2",
        "hidden" => "512",
        "heads" => "8",
        "seq" => "512",
        "vocab" => "1000",
        "gpu" => "A100-80GB-SXM",
        "num_gpus" | "tp" | "pp" | "dp" => "1",
        "mbs" => "4",
        "gbs" => "16",
        "precision" => "fp16",
        "step_time_s" => "0.01",
        _ => "",
    };
    let cell = |column: &str| {
        let changed = changes.iter().find(|(name, _)| *name == column).map(|(_, cell)| *cell);
        changed.unwrap_or_else(|| usual(column)).to_owned()
    };
    COLUMNS.split(',').map(cell).collect::<Vec<_>>().join(",")
}

fn report_of(lines: &[String]) -> Result<Report, Error> {
    let text = format!("{COLUMNS}\n{}\n", lines.join("\n"));
    of(&Table::parse(Path::new("times.csv"), &text)?)
}

fn predicted(changes: &[(&str, &str)]) -> f64 {
    let report = report_of(&[line(changes)]).unwrap();
    assert_eq!(report.skipped, []);
    report.rows[0].row.compared.predicted
}

#[test]
fn a_run_is_predicted_from_what_it_states() {
    let alone = predicted(&[]);
    assert!((1e-4..1.0).contains(&alone), "{alone}");
    assert!(predicted(&[("recompute", "full")]) > 1.2 * alone);
    assert!(predicted(&[("gpu", "V100-SXM2-16GB")]) > 1.5 * alone);
    // Two replicas do as much in more than half the time, and so does a group; stages leave a bubble.
    let replicas = predicted(&[("num_gpus", "2"), ("dp", "2")]);
    let group = predicted(&[("num_gpus", "2"), ("tp", "2")]);
    let stages = predicted(&[("num_gpus", "2"), ("pp", "2")]);
    for both in [replicas, group, stages] {
        assert!((0.5..1.0).contains(&(both / alone)), "{both} of {alone}");
    }
    let sharded = predicted(&[("num_gpus", "2"), ("dp", "2"), ("fsdp", "FULL_SHARD")]);
    assert!((0.5..1.2).contains(&(sharded / alone)), "{sharded} of {alone}");
}

#[test]
fn messages_that_overlap_take_less() {
    let stages = |system: &'static str| {
        predicted(&[("num_gpus", "16"), ("pp", "2"), ("dp", "8"), ("gbs", "64"), ("system", system)])
    };
    assert!(stages("OneFlow") < stages("Megatron-LM"));
}

#[test]
fn operations_tell_of_recomputation_where_nothing_else_does() {
    let chain = shoal_model::Chain::new(&shoal_model::presets::gpt2(1000, 512, 2, 8, 512));
    let forward = chain.forward_flops(512) as f64 * 16.0;
    let stated = |times: f64| {
        let rate = (times * forward / 0.01 / 1e12).to_string();
        predicted(&[("tflops_per_gpu", &rate)])
    };
    assert_eq!(stated(3.0), predicted(&[]));
    assert_eq!(stated(4.0), predicted(&[("recompute", "full")]));
}

#[test]
fn mixed_gpus_are_a_group_of_their_own_beside_their_publishers_model() {
    let mix = [
        ("source", "GitHub DachengLi1/AMP"),
        ("gpu", "V100+T4"),
        ("gpu_mix", r#""{""V100"":4,""T4"":4}""#),
        ("num_gpus", "8"),
        ("pp", "2"),
        ("dp", "4"),
        ("precision", ""),
        ("predicted_s_by_source", "0.02"),
    ];
    // Theirs has three layers before the blocks and three behind: the cut is between the two blocks.
    let split: Vec<_> = mix.into_iter().chain([("layer_split", "\"[0, 4, 8]\"")]).collect();
    let report = report_of(&[line(&split), line(&[])]).unwrap();
    let names: Vec<&str> = report.groups.iter().map(|group| group.name.as_str()).collect();
    assert_eq!(names, ["GitHub DachengLi1/AMP, mixed GPUs", "someone"]);
    assert_eq!(report.their_groups.len(), 1);
    assert!((report.their_groups[0].mean_absolute_error - 1.0).abs() < 1e-12);
    // More for the slower GPUs takes longer.
    let uneven: Vec<_> = mix.into_iter().chain([("layer_split", "\"[0, 3, 8]\"")]).collect();
    assert!(predicted(&uneven) > predicted(&split));
    assert_eq!(predicted(&mix), predicted(&split));
}

#[test]
fn what_states_too_little_is_counted_with_its_reason() {
    for (changes, reason) in [
        (vec![("layers", "")], "its model's sizes are not stated"),
        (vec![("model", "TransGAN")], "its model's sizes are not stated"),
        (vec![("step_time_s", "")], "its step time is not stated"),
        (vec![("seq", "")], "its sequence is not stated"),
        (vec![("dp", "")], "the number of its replicas is not stated"),
        (vec![("gpu", "")], "its GPU is not stated"),
        (vec![("gpu", "DGX-abacus")], "the catalogue does not know DGX-abacus"),
        (vec![("precision", "FP8")], "the catalogue has no rate for fp8"),
        (vec![("cp", "2")], "sequences are divided among GPUs, which our tables do not"),
        (vec![("tp", "2")], "2 x 1 x 1 are not its 1 GPUs"),
        (vec![("mbs", "17")], "its 1 replicas have no micro-batches of 17"),
        (
            vec![("num_gpus", "3"), ("dp", "3"), ("gbs", "16")],
            "16 samples cannot be divided among 3 replicas",
        ),
        (vec![("layer_split", "\"[0, 1, 8]\"")], "of 1 stages some have no layer of ours"),
        (vec![("source", "eth-easl/sailor")], "its own profile and bandwidths say more: validated by them"),
    ] {
        let report = report_of(&[line(&changes), line(&changes)]).unwrap();
        assert_eq!(report.rows, [], "{reason}");
        let [skipped] = report.skipped.as_slice() else { panic!("{:?}", report.skipped) };
        assert_eq!((skipped.reason.as_str(), skipped.rows), (reason, 2));
        assert_eq!(skipped.names.len(), 1);
    }
}

#[test]
fn bad_lines_are_named_with_their_columns() {
    for (lines, says) in [
        (line(&[("gbs", "many")]), "times.csv: line 2, gbs is many"),
        (line(&[("step_time_s", "-1")]), "times.csv: line 2, step_time_s is -1"),
        (line(&[("layer_split", "[0")]), "line 2, layer_split is [0"),
        (line(&[("gpu", "V100+T4")]), "line 2, gpu_mix does not have 1 GPUs of V100+T4"),
        ("a,b".to_owned(), "times.csv: line 2 has 2 cells, and there are 24 columns"),
        ("\"a".to_owned(), "times.csv: line 2 has a quotation mark that nothing closes"),
    ] {
        let error = report_of(&[lines]).unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
        assert!(error.hint().is_some());
    }
    let table = Table::parse(Path::new("times.csv"), "source,seq\nsomeone,4\n").unwrap();
    assert_eq!(of(&table).unwrap_err().to_string(), "times.csv: column model is missing");
    let empty = Table::parse(Path::new("times.csv"), "").err().map(|error| error.to_string());
    assert_eq!(empty.as_deref(), Some("times.csv: line 1 is to name the columns"));
}

#[test]
fn cells_may_have_commas_quotes_and_lines_of_their_own() {
    let text = "source,seq\r\n\"a, \"\"b\"\"\nc\",7\r\nd,n/a\n";
    let table = Table::parse(Path::new("times.csv"), text).unwrap();
    let runs: Vec<_> = table.runs().collect();
    assert_eq!(runs[0].text("source").unwrap(), Some("a, \"b\"\nc"));
    assert_eq!(runs[0].number::<usize>("seq").unwrap(), Some(7));
    assert_eq!(runs[1].text("seq").unwrap(), None);
    assert!(runs[1].wrong("seq", "is odd").to_string().contains("line 4, seq"));
}
