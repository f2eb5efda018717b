//! `shoal up`: a controller, until it is stopped. It goes on from what its folder has.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::json;
use shoal_control::Settings;
use shoal_fleet::Profile;
use shoal_service::access::state_folder;
use shoal_service::server::{self, Controller, default_folder};

use crate::error::{CliError, Result};
use crate::fleet_plan::shapes;
use crate::live::leash::Leash;
use crate::live::planner::FleetPlanner;
use crate::live::within::JobsUnder;

#[derive(clap::Args)]
pub struct Options {
    /// Where it listens; beyond this machine if you say so
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:7700")]
    listen: SocketAddr,
    /// Where it keeps its log, its keys and its tokens
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
    /// A name or an address that others reach it by; the first one is shown to them
    #[arg(long, value_name = "NAME")]
    host: Vec<String>,
    /// What layers were measured to take, as `shoal profile` wrote it; other kinds of devices are estimated
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Search one shape of plan only
    #[arg(long, value_name = "SHAPE")]
    shape: Option<String>,
    /// Silence after which a worker is taken for dead
    #[arg(long, value_name = "SECONDS", default_value_t = 0.9)]
    deadline: f64,
    /// How long the token that it shows is good
    #[arg(long, value_name = "MINUTES", default_value_t = 60)]
    token_minutes: u64,
    #[command(flatten)]
    jobs_under: JobsUnder,
    /// Print where it is and how to join as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    leash: Leash,
}

pub fn run(options: Options) -> Result {
    options.leash.hold();
    if options.listen.ip().is_unspecified() && options.host.is_empty() {
        let what =
            format!("{}: it listens on every address, and nobody knows which to join at", options.listen);
        return Err(CliError::said(what, "name the one that workers reach: --host NAME"));
    }
    let within = options.jobs_under.within(options.listen.ip())?;
    let profile = options.profile.as_deref().map(Profile::read).transpose()?;
    let folder = options.folder.unwrap_or_else(|| default_folder(&state_folder()));
    let start = server::Options {
        listen: options.listen,
        folder: folder.clone(),
        hosts: options.host,
        settings: settings(options.deadline)?,
    };
    let complaints = Arc::new(|what: &str| eprintln!("warning: {what}"));
    if let Some(sentence) = within.sentence() {
        eprintln!("{sentence}");
    }
    let planner = FleetPlanner::new(profile, shapes(options.shape.as_deref())?, within);
    let controller = Controller::start(start, Arc::new(planner), complaints)?;
    let token = controller.token(options.token_minutes)?;
    let url = &controller.access().url;
    if options.json {
        let line = json!({
            "url": url, "folder": folder, "join": token.command, "token": token.token, "pid": std::process::id(),
        });
        println!("{line}");
    } else {
        println!("controller at {url}, in {}", folder.display());
        println!("join a machine, once and within {} minutes, with:", options.token_minutes);
        println!("    {}", token.command);
        println!("`shoal token` makes another; `shoal train JOB.toml --controller {url}` submits a job");
    }
    let stop = controller.stopper();
    ctrlc::set_handler(stop).map_err(|error| CliError::Said {
        sentence: format!("signals cannot be handled: {error}"),
        hint: None,
    })?;
    Ok(controller.wait()?)
}

/// Reports and leases in their usual proportion to the deadline.
fn settings(deadline_seconds: f64) -> Result<Settings> {
    let usual = Settings::default();
    if !(0.1..=600.0).contains(&deadline_seconds) {
        return Err(CliError::said(
            format!("--deadline is {deadline_seconds}"),
            "choose one of 0.1 to 600 seconds",
        ));
    }
    let times = deadline_seconds * 1e3 / usual.deadline_ms as f64;
    let scaled = |ms: u64| (ms as f64 * times) as u64;
    Ok(Settings {
        report_every_ms: scaled(usual.report_every_ms),
        lease_ms: scaled(usual.lease_ms),
        halt_ms_max: scaled(usual.halt_ms_max),
        deadline_ms: scaled(usual.deadline_ms),
        ..usual
    })
}
