//! `shoal pause`, `shoal resume`, `shoal cancel`: what a job's owner wants.

use crate::error::Result;
use crate::live::reach::Reach;

#[derive(clap::Args)]
pub struct Options {
    /// The job's number, as `shoal ps` shows it
    job: u64,
    #[command(flatten)]
    reach: Reach,
}

pub fn run(verb: &str, options: Options) -> Result {
    let view = options.reach.client()?.wish(options.job, verb)?;
    if options.reach.json {
        println!("{}", serde_json::to_string(&view).expect("a job is JSON"));
        return Ok(());
    }
    let said = match verb {
        "pause" => "it stops at a step's end and is saved",
        "resume" => "it goes on as soon as there are workers for it",
        _ => "it ends",
    };
    println!("job {} ({}) was {} at step {}: {said}", view.job, view.name, view.state, view.step);
    Ok(())
}
