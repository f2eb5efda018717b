//! `shoal events`: what the controller has recorded: who came and went, and what became of jobs.

use serde_json::Value;
use shoal_service::history::Noted;

use crate::error::Result;
use crate::live::reach::Reach;

#[derive(clap::Args)]
pub struct Options {
    /// Those after this number
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    after: u64,
    /// Go on
    #[arg(long)]
    follow: bool,
    /// Also steps that were counted, of which there are many
    #[arg(long)]
    steps: bool,
    #[command(flatten)]
    reach: Reach,
}

pub fn run(options: Options) -> Result {
    let client = options.reach.client()?;
    let mut after = options.after;
    loop {
        let found = client.events(after, options.follow)?;
        for noted in &found.events {
            let record = serde_json::to_value(&noted.record).expect("records are JSON");
            if options.steps || record["job"]["change"].get("committed").is_none() {
                println!("{}", if options.reach.json { json_line(noted) } else { text(noted, &record) });
            }
        }
        match found.events.last() {
            Some(last) => after = last.revision,
            None if options.follow => {}
            None => return Ok(()),
        }
    }
}

fn json_line(noted: &Noted) -> String {
    serde_json::to_string(noted).expect("events are JSON")
}

/// `12:30:05.123  #17  job 1  started`, and what else the record says.
fn text(noted: &Noted, record: &Value) -> String {
    let day_ms = noted.at_ms % 86_400_000;
    let (seconds, ms) = (day_ms / 1000, day_ms % 1000);
    let time = format!("{:02}:{:02}:{:02}.{ms:03}", seconds / 3600, seconds / 60 % 60, seconds % 60);
    let (kind, said) = named(record);
    let (subject, what) = match kind {
        "job" => (format!("job {}", said["job"]), named(&said["change"])),
        "submitted" => (format!("job {}", said["job"]), (kind, &said["spec"])),
        _ => (format!("worker {}", said["worker"]), (kind, said)),
    };
    format!("{time}  #{:<5} {subject:<10} {}{}", noted.revision, what.0, details(what.1))
}

/// A variant's name and what is in it.
fn named(value: &Value) -> (&str, &Value) {
    match value {
        Value::String(name) => (name, &Value::Null),
        Value::Object(fields) => {
            fields.iter().next().map_or(("?", &Value::Null), |(name, inner)| (name, inner))
        }
        _ => ("?", value),
    }
}

/// What is short enough to read in a line; `--json` has all of it.
fn details(said: &Value) -> String {
    const HIDDEN: [&str; 6] = ["worker", "job", "at_ms", "boot", "about", "description"];
    let Value::Object(fields) = said else { return String::new() };
    let mut out = String::new();
    for (name, value) in fields.iter().filter(|(name, _)| !HIDDEN.contains(&name.as_str())) {
        let value = match value {
            Value::Null => continue,
            Value::Object(plan) if plan.contains_key("table") => format!("on {}", plan["members"]),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        out += &format!("  {name} {value}");
    }
    out
}
