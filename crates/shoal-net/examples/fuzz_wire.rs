//! Feeds seeded inputs, proper and harmed, to the parser of frames and the state machine of a connection, and prints how
//! they ended. A panic, a proper conversation that is refused, or memory past its bound ends it with an error.
//!
//!     cargo run --release -p shoal-net --example fuzz_wire -- [INPUTS] [FIRST_SEED]

#[path = "../tests/common/fuzz.rs"]
mod fuzz;

use std::time::Instant;

fn main() -> Result<(), std::num::ParseIntError> {
    let mut numbers = std::env::args().skip(1).map(|word| word.parse::<u64>());
    let count = numbers.next().transpose()?.unwrap_or(10_000_000);
    let first = numbers.next().transpose()?.unwrap_or(0);
    let begin = Instant::now();
    let outcomes = fuzz::run(first..first + count);
    println!("{count} inputs from seed {first} in {:.1} s:", begin.elapsed().as_secs_f64());
    for (outcome, inputs) in outcomes.0 {
        println!("{inputs:>12}  {outcome}");
    }
    Ok(())
}
