//! `shoal token`: what lets one more machine join.

use crate::error::Result;
use crate::live::reach::Reach;

#[derive(clap::Args)]
pub struct Options {
    /// How long it is good
    #[arg(long, value_name = "MINUTES", default_value_t = 60)]
    minutes: u64,
    /// The one name that it is for, which may be one that a machine had before
    #[arg(long, value_name = "NAME")]
    worker: Option<String>,
    #[command(flatten)]
    reach: Reach,
}

pub fn run(options: Options) -> Result {
    let token = options.reach.client()?.token(options.minutes, options.worker)?;
    match options.reach.json {
        true => println!("{}", serde_json::to_string(&token).expect("a token is JSON")),
        false => println!("{}", token.command),
    }
    Ok(())
}
