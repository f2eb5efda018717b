//! This machine's GPU in the lab: devices of a fleet that are shares of it. NVIDIA's MPS lets processes use one GPU side by
//! side, each with its part of the multiprocessors. The lab starts a server of its own unless one is there, and ends it with
//! itself.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use shoal_fleet::catalogue;
use shoal_kernels::CudaDevice;

use crate::assemble::LocalDevice;
use crate::error::{CliError, Result};
use crate::job::{DeviceChoice, Job};

/// The program that starts, asks and ends the server.
const CONTROL: &str = "nvidia-cuda-mps-control";

/// Where a server's clients find it unless they are told otherwise, and the file there that says so.
const USUAL_PIPES: &str = "/tmp/nvidia-mps";
const PIPE: &str = "control";
/// How long a server that has started may take to be found.
const READY_LIMIT: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(20);

const PIPES: &str = "CUDA_MPS_PIPE_DIRECTORY";
const LOGS: &str = "CUDA_MPS_LOG_DIRECTORY";
const PERCENT: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";

/// A device that is a share of this machine's GPU: its name, the share in hundredths, and the kind that it is a share of.
pub struct Share<'a> {
    pub name: &'a str,
    pub percent: u32,
    pub whole: &'a str,
}

/// The hundredths of its GPU that this process was given; none where it has all of it.
pub fn percent_here() -> Option<u32> {
    let said = std::env::var(PERCENT).ok()?.trim().parse::<f64>().ok()?;
    Some(said.round() as u32).filter(|percent| (1..100).contains(percent))
}

/// Makes sure that all shares are of the GPU here and together no more than it, and that its kernels are compiled: every
/// worker would do so for itself.
pub fn prepare(shares: &[Share], job: &Job) -> Result {
    let Some(first) = shares.first() else { return Ok(()) };
    assert_fits(shares)?;
    let local = LocalDevice::choose(DeviceChoice::Cuda, None, None).map_err(|error| {
        let what = format!("{} is a share of a GPU, and none can be used here: {error}", first.name);
        CliError::said(what, "`shoal doctor` says what is missing; --paced plays all devices")
    })?;
    if let Some(other) = shares.iter().find(|share| !catalogue::same(share.whole, local.kind())) {
        let what =
            format!("{} is a share of {}, and the GPU here is {}", other.name, other.whole, local.kind());
        return Err(CliError::said(what, "name the kind that is here, or play all devices with --paced"));
    }
    local.assert_takes(job)?;
    if let Some(facts) = &local.gpu
        && !CudaDevice::is_prepared(facts)?
    {
        CudaDevice::new("the lab", 0, CudaDevice::workspace_bytes())?;
    }
    Ok(())
}

fn assert_fits(shares: &[Share]) -> Result {
    let sum: u32 = shares.iter().map(|share| share.percent).sum();
    if sum <= 100 {
        return Ok(());
    }
    let names: Vec<&str> = shares.iter().map(|share| share.name).collect();
    let what = format!("{} are {sum} % of the one GPU here", names.join(", "));
    Err(CliError::said(what, "let their shares add up to 1, or play all devices with --paced"))
}

/// A server that processes with shares are clients of; ended when dropped, if it was started here.
pub struct Mps {
    control: String,
    /// Where its clients find it; none where they find one that was there before.
    pipes: Option<PathBuf>,
}

impl Mps {
    /// The server that is there, or a new one whose logs go to this folder.
    pub fn start(folder: &Path) -> Result<Mps> {
        Mps::start_with(CONTROL, folder)
    }

    fn start_with(control: &str, folder: &Path) -> Result<Mps> {
        let missing = |error: std::io::Error| {
            let what = format!("shares of a GPU need NVIDIA's MPS, and {control} cannot be run: {error}");
            CliError::said(what, "install it with the driver, or play all devices with --paced")
        };
        if is_running(control).map_err(missing)? {
            return Ok(Mps { control: control.into(), pipes: None });
        }
        let logs = folder.join("mps");
        std::fs::create_dir_all(&logs).map_err(CliError::at(&logs))?;
        let logs = logs.canonicalize().map_err(CliError::at(&logs))?;
        // Sockets have short names, which a run's folder need not have.
        let pipes = std::env::temp_dir().join(format!("shoal-mps-{}", std::process::id()));
        std::fs::create_dir_all(&pipes).map_err(CliError::at(&pipes))?;
        // From here on what was started is ended.
        let mps = Mps { control: control.into(), pipes: Some(pipes.clone()) };
        let said = logs.join("start.log");
        let errors = File::create(&said).map_err(CliError::at(&said))?;
        // No pipes to it: it goes on behind, and would hold them open.
        let mut command = Command::new(control);
        command.arg("-d").stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
        let status = command.env(PIPES, &pipes).env(LOGS, &logs).status().map_err(missing)?;
        if status.success() {
            // Clients that come too early would have the whole GPU. One that names its pipes otherwise is given the time.
            let limit = Instant::now() + READY_LIMIT;
            while !pipes.join(PIPE).exists() && Instant::now() < limit {
                std::thread::sleep(LOOK_EVERY);
            }
            return Ok(mps);
        }
        let why = std::fs::read_to_string(&said).unwrap_or_default();
        let what = format!("NVIDIA's MPS did not start: {} ({status})", why.trim());
        Err(CliError::said(what, format!("see {}, or play all devices with --paced", logs.display())))
    }

    /// Makes a process one of its clients, with so many hundredths of the GPU.
    pub fn admit(&self, command: &mut Command, percent: u32) {
        if let Some(pipes) = &self.pipes {
            command.env(PIPES, pipes);
        }
        command.env(PERCENT, percent.to_string());
    }
}

impl Drop for Mps {
    fn drop(&mut self) {
        let Some(pipes) = &self.pipes else { return };
        // One that did not start has nothing to end, and nobody is left to hear of it.
        let _ = ask(Command::new(&self.control).env(PIPES, pipes), "quit");
        let _ = std::fs::remove_dir_all(pipes);
    }
}

/// Whether processes that are started now find a server.
fn is_running(control: &str) -> std::io::Result<bool> {
    let pipes = std::env::var_os(PIPES).map_or_else(|| USUAL_PIPES.into(), PathBuf::from);
    Ok(pipes.join(PIPE).exists() && ask(&mut Command::new(control), "get_server_list")?)
}

/// Tells the server something; false where it does not answer.
fn ask(command: &mut Command, what: &str) -> std::io::Result<bool> {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    if let Some(mut input) = child.stdin.take() {
        // One that has ended meanwhile says so by its status.
        let _ = writeln!(input, "{what}");
    }
    Ok(child.wait()?.success())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A folder with a stand-in for the control program: it notes what it is told, and what is told with it.
    fn stand_in(name: &str, starts: bool) -> (PathBuf, String) {
        let folder = std::env::temp_dir().join(format!("shoal-mps-test-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (control, notes) = (folder.join("control"), folder.join("notes"));
        let start = if starts {
            "touch $CUDA_MPS_PIPE_DIRECTORY/control; exit 0"
        } else {
            "echo no such device >&2; exit 3"
        };
        let script = format!(
            "#!/bin/sh\nif [ \"$1\" = -d ]; then echo \"start $CUDA_MPS_PIPE_DIRECTORY\" >> {notes}; {start}; fi\n\
             read line; echo \"$line $CUDA_MPS_PIPE_DIRECTORY\" >> {notes}\n[ \"$line\" = quit ]\n",
            notes = notes.display()
        );
        std::fs::write(&control, script).unwrap();
        std::fs::set_permissions(&control, std::fs::Permissions::from_mode(0o755)).unwrap();
        (folder, control.display().to_string())
    }

    #[test]
    fn a_server_is_started_and_ended_and_what_keeps_it_from_that_is_told() {
        let (folder, control) = stand_in("started", true);
        let mps = Mps::start_with(&control, &folder).unwrap();
        let pipes = mps.pipes.clone().unwrap();
        let mut client = Command::new("true");
        mps.admit(&mut client, 25);
        let told: Vec<_> =
            client.get_envs().filter_map(|(key, value)| Some((key.to_str()?, value?.to_str()?))).collect();
        assert_eq!(told, [(PERCENT, "25"), (PIPES, pipes.to_str().unwrap())]);
        assert!(pipes.is_dir());
        drop(mps);
        assert!(!pipes.exists());
        let notes = std::fs::read_to_string(folder.join("notes")).unwrap();
        let of = pipes.display();
        assert_eq!(notes, format!("start {of}\nquit {of}\n"));
        std::fs::remove_dir_all(folder).unwrap();
        // In the same test: a process has one server at a time.
        let (folder, control) = stand_in("refused", false);
        let error = Mps::start_with(&control, &folder).err().unwrap();
        assert!(error.to_string().contains("no such device") && error.hint().is_some(), "{error}");
        let error = Mps::start_with("/nowhere/mps", &folder).err().unwrap();
        assert!(error.to_string().contains("cannot be run") && error.hint().is_some(), "{error}");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn shares_are_no_more_than_the_whole() {
        let share = |percent| Share { name: "n:0", percent, whole: "H200" };
        assert!(assert_fits(&[share(40), share(30), share(20), share(10)]).is_ok());
        let error = assert_fits(&[share(60), share(50)]).unwrap_err();
        assert!(error.to_string().contains("110 %"), "{error}");
    }
}
