//! `shoal receipt`: where jobs' time and money went, until now.

use serde_json::json;
use shoal_service::receipt::ReceiptView;

use crate::error::Result;
use crate::live::reach::Reach;
use crate::live::receipt;

#[derive(clap::Args)]
pub struct Options {
    /// The job's number, as `shoal ps` shows it; all jobs, and their sum, where it is left out
    job: Option<u64>,
    #[command(flatten)]
    reach: Reach,
}

pub fn run(options: Options) -> Result {
    let client = options.reach.client()?;
    let jobs = match options.job {
        Some(job) => vec![job],
        None => client.jobs()?.iter().map(|view| view.job).collect(),
    };
    let mut receipts: Vec<ReceiptView> = Vec::new();
    for job in jobs {
        receipts.push(client.receipt(job)?);
    }
    let total = receipt::total(&receipts);
    if options.reach.json {
        println!("{}", json!({ "receipts": receipts, "total": total }));
        return Ok(());
    }
    if receipts.is_empty() {
        println!("no jobs; `shoal train JOB.toml --controller URL` submits one");
    }
    let texts = receipts.iter().map(receipt::text).chain(total.iter().map(receipt::total_text));
    print!("{}", texts.collect::<Vec<String>>().join("\n"));
    Ok(())
}
