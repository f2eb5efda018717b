//! The report's cases, on a profile made up here: layers whose times do not fall below a floor, and dense ones whose
//! gradients are large.

use super::*;

/// A chain of dense layers, as a file: each takes a floor of time and some a sample.
fn made_up() -> Measured {
    let mut text = String::new();
    for batch in [1usize, 2, 4, 8, 16, 32, 64] {
        for (features, floor, each) in [(512, 100, 40), (512, 400, 4), (512, 50, 60), (512, 900, 1)] {
            let forward = floor + each * batch;
            text += &format!(
                "linear{{\"bias\":true,\"in_features\":{features},\"out_features\":{features}}}[{batch}]{features} 0 {forward} {}\n",
                2 * forward
            );
        }
    }
    profile::read(&text, "made up", Shape::Chain).unwrap()
}

#[test]
fn ours_is_never_slower_and_faster_where_the_rule_is_greedy() {
    let measured = made_up();
    let mut strictly = 0;
    for (network, devices) in [(Network::Flat, 8), (Network::Flat, 16), (Network::Nodes, 16)] {
        let case = case(&measured, network, devices, 64).unwrap();
        let (ours, theirs) = (&case.at_greedy_device_seconds, &case.greedy);
        assert!(ours.step_seconds <= theirs.step_seconds);
        assert!(ours.device_seconds <= theirs.device_seconds * (1.0 + 1e-6));
        strictly += usize::from(ours.step_seconds < theirs.step_seconds * 0.999);
        assert!(case.fastest.step_seconds <= case.data_parallel.step_seconds);
        assert!(case.fastest.step_seconds <= ours.step_seconds);
        assert!(case.shared.step_seconds <= case.data_parallel.step_seconds * (1.0 + 1e-6));
        assert!(
            case.shared_within_five_percent.step_seconds
                <= 1.05 * case.data_parallel.step_seconds * (1.0 + 1e-6)
        );
        for shared in [&case.shared, &case.shared_within_five_percent, &case.shared_at_greedy_pace] {
            assert!(shared.throughput_over_data_parallel <= case.throughput_ceiling * (1.0 + 1e-9));
        }
        assert!(case.shared.throughput_over_data_parallel >= 1.0 - 1e-9);
        let (shared, after) = (&case.shared_with_sums_after, &case.data_parallel_sums_after);
        assert!(after.step_seconds > case.data_parallel.step_seconds);
        assert!(shared.step_seconds <= after.step_seconds * (1.0 + 1e-6));
        assert!(shared.throughput_over_data_parallel >= 1.0 - 1e-9);
    }
    assert!(strictly >= 2, "faster in {strictly}");
}

#[test]
fn sharing_gains_where_layers_do_not_divide() {
    let case = case(&made_up(), Network::Flat, 16, 64).unwrap();
    let gained = case.shared_within_five_percent.throughput_over_data_parallel;
    assert!(gained > 1.2, "{gained}");
}

#[test]
fn dividing_the_computation_alone_gives_the_ratio_of_two_sums() {
    let limits = compute_only(&made_up(), &Published { compute_only_batch: 64, ..MODELS[0] });
    // 1450 µs and 105 µs a sample.
    assert!((limits.speedup - (1450.0 + 105.0 * 64.0) / (1450.0 + 105.0 * 8.0)).abs() < 1e-9);
    assert!((limits.speedup * limits.amplification - 8.0).abs() < 1e-9);
}

#[test]
fn a_folder_without_the_files_is_refused_by_name() {
    let error = report(Path::new("no-such-folder")).unwrap_err();
    assert!(error.to_string().contains("A100_vgg.prof"), "{error}");
    assert!(error.hint().unwrap().contains("A100_wrn.prof"));
}
