//! `shoal validate`: other systems' published measurements and plans beside what our models say. Each part of the folder
//! that is there is read; nothing in our models is fitted to it.

use std::path::PathBuf;

use serde_json::{Value, json};
use shoal_planner::validation::{cephalo, comparison::Group, deeppool, published, sailor};

use crate::error::{CliError, Result};
use crate::show::percent;

#[derive(clap::Args)]
pub struct Options {
    /// The folder with cephalo/, deeppool/, sailor/ and published_times.csv, or some of them
    data: PathBuf,
    /// Print everything as JSON
    #[arg(long)]
    json: bool,
}

/// One part of the folder.
struct Part {
    path: &'static str,
    /// As text, and as JSON.
    report: fn(&std::path::Path) -> Result<(String, Value)>,
}

const PARTS: [Part; 4] = [
    Part { path: "cephalo", report: cephalo_report },
    Part { path: "deeppool", report: deeppool_report },
    Part { path: "sailor", report: sailor_report },
    Part { path: "published_times.csv", report: published_report },
];

pub fn run(options: Options) -> Result {
    let there: Vec<&Part> = PARTS.iter().filter(|part| options.data.join(part.path).exists()).collect();
    if there.is_empty() {
        let names: Vec<&str> = PARTS.iter().map(|part| part.path).collect();
        return Err(CliError::said(
            format!("{}: it has none of {}", options.data.display(), names.join(", ")),
            "name the folder that holds the published data",
        ));
    }
    let mut all = serde_json::Map::new();
    for part in there {
        eprintln!("{} …", part.path);
        let (text, value) = (part.report)(&options.data.join(part.path))?;
        if !options.json {
            println!("{text}");
        }
        all.insert(part.path.trim_end_matches(".csv").to_owned(), value);
    }
    if options.json {
        println!("{}", Value::Object(all));
    }
    Ok(())
}

fn said(error: impl std::fmt::Display, hint: Option<String>) -> CliError {
    CliError::Said { sentence: error.to_string(), hint }
}

fn cephalo_report(folder: &std::path::Path) -> Result<(String, Value)> {
    let report = cephalo::report(folder).map_err(|error| {
        let hint = error.hint();
        said(error, hint)
    })?;
    let golden = &report.golden;
    let mut text = format!(
        "Cephalo's shipped plan, {} on {}, {} samples\n",
        golden.model,
        golden.gpus.join(", "),
        golden.batch
    );
    let mut line = |name: &str, division: Option<&shoal_planner::sharded::cephalo::Division>| {
        let Some(division) = division else {
            text += &format!("  {name:<22} no plan\n");
            return;
        };
        let over = division.over_gib.iter().copied().fold(0.0, f64::max);
        let fits = if over > 0.0 { format!("{over:.2} GiB over on one") } else { "fits each".into() };
        text += &format!(
            "  {name:<22} {:.3} ms a layer, samples {:?} in {:?} micro-batches, {fits}\n",
            division.layer_ms, division.batches, division.micro_batches
        );
    };
    line("by its rules", Some(&golden.theirs));
    line("made feasible", golden.theirs_made_feasible.as_ref());
    line("ours", golden.ours.as_ref());
    let same = if golden.agrees { "is" } else { "IS NOT" };
    text += &format!("  by its rules it {same} the plan that it ships\n");
    let planned = report.mixtures.iter().filter(|mixture| mixture.ours_ms.is_some());
    let slowest = report.mixtures.iter().map(|mixture| mixture.our_seconds).fold(0.0, f64::max);
    let both = report
        .mixtures
        .iter()
        .filter_map(|mixture| Some((mixture.theirs_made_feasible_ms?, mixture.ours_ms?)));
    let slower = both.filter(|(theirs, ours)| *ours > theirs * (1.0 + 1e-9)).count();
    text += &format!(
        "  {} of {} mixtures of models and GPUs planned, each within {:.3} s; in {slower} theirs made feasible is faster\n",
        planned.count(),
        report.mixtures.len(),
        slowest
    );
    Ok((text, json!(report)))
}

fn deeppool_report(folder: &std::path::Path) -> Result<(String, Value)> {
    let report = deeppool::report(folder).map_err(|error| {
        let hint = error.hint();
        said(error, hint)
    })?;
    let mut text = format!(
        "DeepPool's profiles, {} samples a step: milliseconds a step, and the throughput of foreground and background over\ndata parallelism's, the foreground being no slower than it, than 1.05 times it, and than DeepPool's rule makes it; at last the same over data\nparallelism as DeepPool runs it, whose sums come after the backward\n  {:<28} {:>9} {:>9} {:>9} {:>12} {:>9} {:>8} {:>8} {:>8} {:>10} {:>9}\n",
        report.assumptions.global_batch,
        "",
        "data par.",
        "its rule",
        "ours",
        "same budget",
        "no slower",
        "by 5 %",
        "its pace",
        "at most",
        "sums after",
        "no slower"
    );
    for model in &report.models {
        for case in &model.cases {
            let name = format!("{}, {:?} {}", model.model, case.network, case.devices);
            let ms = |outcome: &deeppool::Outcome| 1e3 * outcome.step_seconds;
            text += &format!(
                "  {name:<28} {:>9.2} {:>9.2} {:>9.2} {:>12.2} {:>8.2}x {:>7.2}x {:>7.2}x {:>7.2}x {:>10.2} {:>8.2}x\n",
                ms(&case.data_parallel),
                ms(&case.greedy),
                ms(&case.fastest),
                ms(&case.at_greedy_device_seconds),
                case.shared.throughput_over_data_parallel,
                case.shared_within_five_percent.throughput_over_data_parallel,
                case.shared_at_greedy_pace.throughput_over_data_parallel,
                case.throughput_ceiling,
                ms(&case.data_parallel_sums_after),
                case.shared_with_sums_after.throughput_over_data_parallel
            );
        }
    }
    text += "  (same budget: ours at no more device-seconds than its rule takes; at most: with every device at work all the time,\n   the foreground's part of it at the best pace that its layers have)\n";
    Ok((text, json!(report)))
}

fn groups(text: &mut String, groups: &[Group]) {
    for group in groups {
        let worst = group.worst.first().map_or(String::new(), |row| {
            format!("; worst {} ({:+.0} %)", row.name, 100.0 * row.compared.error)
        });
        *text += &format!(
            "  {:<44} {:>4} rows  off by {} on average, {:+.1} % on the whole{worst}\n",
            group.name,
            group.rows,
            percent(group.mean_absolute_error),
            100.0 * group.mean_error
        );
    }
}

fn sailor_report(folder: &std::path::Path) -> Result<(String, Value)> {
    let report = sailor::report(folder).map_err(|error| {
        let hint = error.hint();
        said(error, hint)
    })?;
    let mut text = format!(
        "Sailor's measured plans\n  {:<34} {:>9} {:>9} {:>8} {:>9} {:>9} {:>8}\n",
        "plan", "predicted", "measured", "error", "predicted", "measured", "error"
    );
    for step in &report.steps {
        let gib = |bytes: f64| bytes / f64::from(1 << 30);
        text += &format!(
            "  {:<34} {:>7.3} s {:>7.3} s {:>+6.1} % {:>5.1} GiB {:>5.1} GiB {:>+6.1} %\n",
            step.name,
            step.seconds.predicted,
            step.seconds.measured,
            100.0 * step.seconds.error,
            gib(step.bytes.predicted),
            gib(step.bytes.measured),
            100.0 * step.bytes.error,
        );
    }
    text += " time\n";
    groups(&mut text, &report.seconds);
    text += " memory\n";
    groups(&mut text, &report.bytes);
    Ok((text, json!(report)))
}

fn published_report(file: &std::path::Path) -> Result<(String, Value)> {
    let report = published::report(file).map_err(|error| {
        let hint = error.hint();
        said(error, hint)
    })?;
    let mut text = "Published step times, from the catalogue's figures alone\n".to_owned();
    groups(&mut text, &report.groups);
    text += " the publishers' own models, on the same rows\n";
    groups(&mut text, &report.their_groups);
    for skipped in &report.skipped {
        text += &format!("  left out: {} of {} ({})\n", skipped.rows, skipped.source, skipped.reason);
    }
    Ok((text, json!(report)))
}
