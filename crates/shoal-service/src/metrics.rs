//! The controller's figures, in Prometheus's text format.

use std::fmt::Write;

use crate::driver::Sight;
use crate::view;

pub fn text(sight: Sight) -> String {
    let Sight { state, links, .. } = sight;
    let mut out = String::new();
    let leaving = state.members.values().filter(|member| member.leaves_by_ms.is_some()).count();
    let aside = state.members.values().filter(|member| member.quarantined_until_ms.is_some()).count();
    gauge(&mut out, "shoal_workers", "Workers that are alive.", state.members.len());
    gauge(&mut out, "shoal_workers_connected", "Workers whose connection stands.", links.len());
    gauge(&mut out, "shoal_workers_leaving", "Workers that are to leave.", leaving);
    gauge(&mut out, "shoal_workers_set_aside", "Workers that their peers could not reach.", aside);
    gauge(&mut out, "shoal_records", "Records in the controller's log so far.", state.revision);
    type Figure = (&'static str, &'static str, fn(&view::JobView) -> u64);
    let figures: [Figure; 4] = [
        ("shoal_job_step", "Steps that are done.", |job| job.step),
        ("shoal_job_steps_undone_total", "Steps that a return to a checkpoint undid.", |job| job.undone),
        ("shoal_job_plans_total", "Plans that the job has had.", |job| job.epoch),
        ("shoal_job_workers", "Workers that run it.", |job| job.workers.len() as u64),
    ];
    let jobs = view::jobs(sight);
    for (name, help, figure) in figures {
        head(&mut out, name, help);
        for job in &jobs {
            let _ =
                writeln!(out, "{name}{{job=\"{}\",name=\"{}\"}} {}", job.job, escape(&job.name), figure(job));
        }
    }
    head(&mut out, "shoal_job_state", "One for the state that a job is in.");
    for job in &jobs {
        let _ = writeln!(out, "shoal_job_state{{job=\"{}\",state=\"{}\"}} 1", job.job, job.state);
    }
    out
}

fn head(out: &mut String, name: &str, help: &str) {
    let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn gauge(out: &mut String, name: &str, help: &str, value: impl std::fmt::Display) {
    head(out, name, help);
    let _ = writeln!(out, "{name} {value}");
}

fn escape(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_cannot_break_out() {
        assert_eq!(escape("a\"} 1\n\\"), "a\\\"} 1\\n\\\\");
    }
}
