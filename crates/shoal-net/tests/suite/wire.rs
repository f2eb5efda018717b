//! A short run of what `examples/fuzz_wire.rs` does at length.

#[path = "../common/fuzz.rs"]
mod fuzz;

#[test]
fn harmed_conversations_pass_or_are_refused_and_proper_ones_pass() {
    let outcomes = fuzz::run(0..200_000);
    let met = |end: &str| outcomes.0.keys().any(|outcome| outcome.ends_with(end));
    // The inputs reach what they are meant to reach.
    let ends =
        ["Foreign", "Version", "Checksum", "Oversized", "PastTheEnd", "Unexpected", "OutOfOrder", "Twice"];
    for end in ends.into_iter().chain(["Unwanted", "OtherTotal", "Window", "passed", "middle of a frame"]) {
        assert!(met(end), "nothing ended with {end}: {:?}", outcomes.0);
    }
}
