//! `shoal train JOB.toml --controller URL`: the same job on a fleet.

use serde_json::{Value, json};
use shoal_control::controller::state::Class;
use shoal_engine::RunEvent;
use shoal_engine::metrics::StepRecord;
use shoal_service::receipt::ReceiptView;
use shoal_service::view::JobView;

use super::Options;
use crate::error::{CliError, Result};
use crate::job::Job;
use crate::live::description::Description;
use crate::live::follow::follow;
use crate::live::within::Within;
use crate::live::{reach, receipt};
use crate::show::Progress;

pub fn run(options: &Options, url: &str) -> Result {
    if options.stop_at.is_some() || options.program.is_some() {
        let hint = "leave them out, or train here: without --controller";
        return Err(CliError::said("--stop-at and --program are for training on this machine", hint));
    }
    let description = Description::read(&options.job, &options.set)?;
    let job = description.new_job(&Within::anywhere())?;
    let client = reach::client(Some(url))?;
    let class = if options.background { Class::Background } else { Class::Foreground };
    let number = client.submit(&description.spec(&job, class, options.priority))?;
    if options.detach {
        match options.json {
            true => println!("{}", json!({ "job": number })),
            false => println!("job {number}; `shoal logs {number} --follow` follows it"),
        }
        return Ok(());
    }
    detach_on_signals(number)?;
    let mut progress = Progress::new(job.steps, 0, options.json);
    let (mut loss, mut held_out) = (None, None);
    let mut show = |line: &Value| {
        loss = line["loss"].as_f64().or(loss);
        held_out = line["eval_loss"].as_f64().or(held_out);
        if let Ok(record) = serde_json::from_value::<StepRecord>(line.clone()) {
            progress.event(&RunEvent::Step(record));
        }
    };
    let mut tell = |view: &JobView| {
        if !options.json {
            let reason = view.reason.as_ref().map_or(String::new(), |reason| format!(": {reason}"));
            let on = if view.workers.is_empty() {
                String::new()
            } else {
                format!(" on {}", view.workers.join(", "))
            };
            eprintln!("job {number} is {}{on}{reason}", view.state);
        }
    };
    let view = follow(&client, number, 0, &mut show, &mut tell)?;
    progress.finish();
    let receipt = client.receipt(number)?;
    report(&view, (loss, held_out), &job, &receipt, options.json)
}

/// Whoever follows may go; the job does not.
fn detach_on_signals(job: u64) -> Result {
    let handler = move || {
        eprintln!(
            "\njob {job} goes on; `shoal logs {job} --follow` follows it, `shoal cancel {job}` ends it"
        );
        std::process::exit(130);
    };
    ctrlc::set_handler(handler).map_err(|error| CliError::Said {
        sentence: format!("signals cannot be handled: {error}"),
        hint: None,
    })
}

fn report(
    view: &JobView,
    (loss, held_out): (Option<f64>, Option<f64>),
    job: &Job,
    receipt: &ReceiptView,
    json: bool,
) -> Result {
    let folder = job.run_folder.display();
    if json {
        let run = &job.run_folder;
        println!(
            "{}",
            json!({ "job": view, "loss": loss, "eval_loss": held_out, "run": run, "receipt": receipt })
        );
    }
    let mut shown = loss.map_or(String::new(), |loss| format!(", loss {loss:.4}"));
    shown += &held_out.map_or(String::new(), |loss| format!(", held-out {loss:.4}"));
    match view.state.as_str() {
        "failed" => {
            if !json {
                eprint!("{}", receipt::text(receipt));
            }
            let reason = view.reason.as_deref().unwrap_or("nobody said why");
            let hint = format!("`shoal resume {}` has it tried again", view.job);
            Err(CliError::said(format!("job {} failed at step {}: {reason}", view.job, view.step), hint))
        }
        _ if json => Ok(()),
        "done" => {
            println!("finished {} steps{shown}\n\n{}", view.step, receipt::text(receipt));
            println!("export it with: shoal export {folder} DIR");
            Ok(())
        }
        other => {
            println!(
                "job {} is {other} at step {}{shown}\n\n{}",
                view.job,
                view.step,
                receipt::text(receipt)
            );
            Ok(())
        }
    }
}
