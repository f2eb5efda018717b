//! `shoal ps`: the fleet's jobs and workers.

use serde_json::json;
use shoal_service::view::{JobView, WorkerView};

use crate::error::Result;
use crate::live::reach::Reach;
use crate::show::table;

#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    reach: Reach,
}

pub fn run(options: Options) -> Result {
    let client = options.reach.client()?;
    let (jobs, workers) = (client.jobs()?, client.workers()?);
    if options.reach.json {
        println!("{}", json!({ "jobs": jobs, "workers": workers }));
        return Ok(());
    }
    if jobs.is_empty() {
        println!("no jobs; `shoal train JOB.toml --controller URL` submits one");
    } else {
        let head = ["job", "name", "state", "step", "saved", "a step", "workers"];
        print!("{}", table(&head, jobs.iter().map(job_row)));
        for job in &jobs {
            if let Some(reason) = &job.reason {
                println!("job {}: {reason}", job.job);
            }
        }
    }
    println!();
    if workers.is_empty() {
        println!("no workers; `shoal token` shows how one joins");
    } else {
        print!("{}", table(&["worker", "device", "state", "pace", "jobs"], workers.iter().map(worker_row)));
    }
    Ok(())
}

fn job_row(job: &JobView) -> Vec<String> {
    vec![
        job.job.to_string(),
        job.name.clone(),
        job.state.clone(),
        format!("{}/{}", job.step, job.steps),
        job.saved_step.map_or("-".into(), |step| step.to_string()),
        job.predicted_step_ms.map_or("-".into(), |ms| format!("{ms} ms")),
        if job.workers.is_empty() { "-".into() } else { job.workers.join(" ") },
    ]
}

fn worker_row(worker: &WorkerView) -> Vec<String> {
    let state = match (worker.connected, worker.leaves_by_ms, worker.set_aside_until_ms) {
        (false, _, _) => "silent",
        (true, Some(_), _) => "leaving",
        (true, None, Some(_)) => "set aside",
        (true, None, None) => "ready",
    };
    let jobs: Vec<String> = worker.jobs.iter().map(u64::to_string).collect();
    vec![
        worker.name.clone(),
        worker.about["device"]["kind"].as_str().unwrap_or("-").to_owned(),
        state.to_owned(),
        format!("{} %", worker.pace_percent),
        if jobs.is_empty() { "-".into() } else { jobs.join(" ") },
    ]
}
