//! Plays one seed and prints everything that happens: `replay --seed 17 [--bug IgnoreLease]`.

use std::process::ExitCode;

use shoal_control::Bug;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (seed, bug) = match words[..] {
        ["--seed", seed] => (seed, None),
        ["--seed", seed, "--bug", bug] => (seed, Some(bug)),
        _ => return usage("what to replay is missing"),
    };
    let Ok(seed) = seed.parse() else { return usage("a seed is a number") };
    let planted = Bug::ALL.into_iter().find(|known| bug == Some(&format!("{known:?}")));
    if bug.is_some() && planted.is_none() {
        return usage("no bug has this name");
    }
    let mut print = |line: &str| println!("{line}");
    match shoal_drill::run_with(seed, planted, Some(&mut print)) {
        Ok(report) => {
            println!("seed {seed}: {} events, {} ms, all rules hold", report.events, report.ended_ms);
            ExitCode::SUCCESS
        }
        Err(failure) => {
            println!("{failure}");
            ExitCode::FAILURE
        }
    }
}

fn usage(sentence: &str) -> ExitCode {
    eprintln!("{sentence}\nhint: replay --seed NUMBER [--bug NAME], with one of {:?}", Bug::ALL);
    ExitCode::FAILURE
}
