//! `shoal logs`: what a job's counted steps came to.

use serde_json::Value;
use shoal_service::view::JobView;

use crate::error::Result;
use crate::live::follow::follow;
use crate::live::reach::Reach;
use crate::live::receipt;

#[derive(clap::Args)]
pub struct Options {
    /// The job's number, as `shoal ps` shows it
    job: u64,
    /// Steps after this one
    #[arg(long, value_name = "STEP", default_value_t = 0)]
    after: u64,
    /// Go on until the job is over
    #[arg(long)]
    follow: bool,
    #[command(flatten)]
    reach: Reach,
}

pub fn run(options: Options) -> Result {
    let client = options.reach.client()?;
    let mut show = |line: &Value| match options.reach.json {
        true => println!("{line}"),
        false => println!("{}", text(line)),
    };
    if options.follow {
        let mut tell = |view: &JobView| eprintln!("job {} is {}", view.job, view.state);
        follow(&client, options.job, options.after, &mut show, &mut tell)?;
        // Beside the lines: they are data.
        eprint!("{}", receipt::text(&client.receipt(options.job)?));
        return Ok(());
    }
    let mut after = options.after;
    loop {
        let lines = client.logs(options.job, after, false)?.lines;
        let Some(last) = lines.last() else { return Ok(()) };
        after = last["step"].as_u64().unwrap_or(u64::MAX);
        lines.iter().for_each(&mut show);
    }
}

fn text(line: &Value) -> String {
    let number = |key: &str| line[key].as_f64();
    let part =
        |name: &str, value: Option<String>| value.map_or(String::new(), |value| format!("  {name}{value}"));
    format!(
        "step {}{}{}{}{}{}{}",
        line["step"],
        part("loss ", number("loss").map(|loss| format!("{loss:.4}"))),
        part("norm ", number("grad_norm").map(|norm| format!("{norm:.3}"))),
        part("lr ", number("lr").map(|lr| format!("{lr:.2e}"))),
        part("", number("step_ms").map(|ms| format!("{ms:.1} ms"))),
        part("held-out ", number("eval_loss").map(|loss| format!("{loss:.4}"))),
        part("right ", number("eval_accuracy").map(|share| format!("{:.1} %", 100.0 * share))),
    )
}
