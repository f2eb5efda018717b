//! Drills on this process: what a worker that allows them does to itself when its fleet's owner orders a fault.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, Signal, getpid, kill_process};
use shoal_crew::Slowness;
use shoal_net::Reception;
use shoal_service::drill::{Drill, Drilled};

use crate::error::{CliError, Result};

/// The process that ends a freeze: nothing that is frozen can wake itself.
#[derive(clap::Args)]
pub struct ThawOptions {
    pid: i32,
    ms: u64,
}

/// What does drills here.
pub fn drilled(reception: Arc<Reception>, slowness: Arc<Slowness>) -> Drilled {
    Box::new(move |drill| {
        let done = match drill {
            Drill::Kill {} => signal(getpid(), Signal::KILL),
            Drill::Freeze { ms } => freeze(ms),
            Drill::Cut { ms } => {
                reception.cut(Duration::from_millis(ms));
                Ok(())
            }
            Drill::Slow { ms, percent } => {
                slowness.begin(f64::from(percent) / 100.0, Duration::from_millis(ms));
                Ok(())
            }
        };
        if let Err(error) = done {
            eprintln!("warning: the drill `{}` could not be done: {error}", drill.name());
        }
    })
}

/// Stops this process until a child of it, which is started first, lets it go on.
fn freeze(ms: u64) -> Result {
    let unable = |error: std::io::Error| {
        CliError::said(
            format!("nothing can be started that would end it: {error}"),
            "is this program still there?",
        )
    };
    let program = std::env::current_exe().map_err(unable)?;
    let own = getpid().as_raw_nonzero().to_string();
    let mut thaw = Command::new(program);
    thaw.args(["thaw", &own, &ms.to_string()]).stdin(Stdio::null()).stdout(Stdio::null());
    let mut thaw = thaw.spawn().map_err(unable)?;
    let frozen = signal(getpid(), Signal::STOP);
    // It has ended by now, or will; nobody waits for it here.
    std::thread::spawn(move || thaw.wait());
    frozen
}

/// `shoal thaw PID MS`: lets a process go on after so long.
pub fn thaw(options: ThawOptions) -> Result {
    std::thread::sleep(Duration::from_millis(options.ms));
    let pid = Pid::from_raw(options.pid).filter(|_| options.pid > 1);
    let pid =
        pid.ok_or_else(|| CliError::said(format!("{} is no process", options.pid), "drills start it"))?;
    signal(pid, Signal::CONT)
}

fn signal(pid: Pid, signal: Signal) -> Result {
    kill_process(pid, signal).map_err(|error| {
        CliError::said(format!("no signal can be sent: {error}"), "is this process allowed to?")
    })
}
