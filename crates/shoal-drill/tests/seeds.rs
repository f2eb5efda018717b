//! A thousand courses of events, everything that must hold, and mistakes that must be found.

use shoal_control::Bug;
use shoal_drill::{ALL, Failure, run_many, run_with};

const SEEDS: u64 = 1_000;

#[test]
fn a_thousand_seeds_hold_and_leave_nothing_untried() {
    let tally = run_many(0..SEEDS, None);
    for (what, seeds) in &tally.seeds_with {
        println!("{what:<44} {seeds:>5} of {SEEDS} seeds");
    }
    println!("{} events", tally.events);
    for failure in &tally.failures {
        println!("{failure}");
    }
    assert!(tally.failures.is_empty(), "{} seeds fail", tally.failures.len());
    for what in ALL {
        let seeds = tally.seeds_with.get(what).copied().unwrap_or(0);
        assert!(seeds * 100 >= SEEDS, "{what:?} happened in {seeds} of {SEEDS} seeds only");
    }
}

/// The rules that a mistake breaks, beside progress, which many end.
fn rules(bug: Bug) -> &'static [&'static str] {
    match bug {
        Bug::SayBeforeSync | Bug::KeepTornTail => &["nothing said that can be forgotten"],
        Bug::CountAgain => &["every step counted once"],
        Bug::DeadTooSoon | Bug::StartUnfenced | Bug::IgnoreLease => &["one plan"],
        Bug::PartMissing | Bug::RemoveEarly | Bug::RemoveLate | Bug::SavedTooSoon => &["no torn checkpoint"],
        Bug::DecideEarly | Bug::ObeyOld => &["one plan", "one version"],
        Bug::GoBack | Bug::StartUnready | Bug::ForgetHolders | Bug::DropEarly => &["one version"],
        Bug::SettleAgain | Bug::OwnPosition => &["every sample once"],
        // Survivors without the gradient of a step that others have applied can only go back.
        Bug::GiveUp | Bug::UpdateEarly => &["nothing given up"],
        Bug::RemoveUnreadable => &["no torn checkpoint"],
        Bug::PassDeadEnd => &["dead ends end"],
        Bug::KeepOld => &["room is made"],
        Bug::ForgetPlanner | Bug::ReadForever => &["progress"],
    }
}

#[test]
fn every_planted_bug_is_found() {
    for bug in Bug::ALL {
        let by_its_rule = |failure: &Failure| rules(bug).contains(&failure.rule);
        let failure = (0..SEEDS).find_map(|seed| run_with(seed, Some(bug), None).err().filter(by_its_rule));
        let failure = failure.unwrap_or_else(|| panic!("{bug:?} is not found in {SEEDS} seeds"));
        println!("{bug:?}: {}", failure.to_string().lines().next().unwrap_or_default());
        let replay = format!("--example replay -- --seed {} --bug {bug:?}", failure.seed);
        assert!(failure.to_string().ends_with(&replay), "{failure}");
    }
}

#[test]
fn a_seed_is_the_same_course_every_time() {
    let course = |seed| {
        let mut lines = Vec::new();
        let report = run_with(seed, None, Some(&mut |line: &str| lines.push(line.to_owned())));
        (report.expect("holds").events, lines)
    };
    assert_eq!(course(17), course(17));
    assert_ne!(course(17).1, course(18).1);
}
