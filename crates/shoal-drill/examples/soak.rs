//! Plays any number of seeds on all cores, and prints how often everything happened: `soak COUNT [FIRST]`.

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut numbers = std::env::args().skip(1).map(|argument| argument.parse::<u64>());
    let (Some(Ok(count)), first) = (numbers.next(), numbers.next()) else {
        eprintln!("how many seeds?\nhint: soak COUNT [FIRST]");
        return ExitCode::FAILURE;
    };
    let first = first.and_then(Result::ok).unwrap_or(0);
    let tally = shoal_drill::run_many(first..first + count, None);
    for (what, seeds) in &tally.seeds_with {
        println!("{what:<44} {seeds:>8} seeds");
    }
    println!("{} seeds, {} events, {} failures", count, tally.events, tally.failures.len());
    for failure in &tally.failures {
        println!("{failure}");
    }
    if tally.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
