//! The processes of the fleet: started, killed and replaced; all of them end with it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::Value;

use super::{Blow, WAIT_MAX};
use crate::root;

const LOOK_EVERY: Duration = Duration::from_millis(25);

fn binary() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    target.join("release/shoal")
}

/// A command in a folder, whose fleets are those of this folder.
fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(binary());
    command.args(arguments).current_dir(folder).stdin(Stdio::null());
    command.env("XDG_STATE_HOME", folder.join("state")).env_remove("SHOAL_ACCESS");
    command
}

/// What a command says that has to succeed.
pub fn shoal(folder: &Path, arguments: &[&str]) -> Result<String, String> {
    let output = command(folder, arguments).output().map_err(|error| format!("shoal: {error}"))?;
    let (said, why) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    match output.status.success() {
        true => Ok(said.into_owned()),
        false => Err(format!("shoal {}: {why}{said}", arguments.join(" "))),
    }
}

pub fn lines(text: &str) -> Result<Vec<Value>, String> {
    text.lines().map(|line| serde_json::from_str(line).map_err(|error| format!("{error}: {line}"))).collect()
}

fn json(text: &str) -> Result<Value, String> {
    serde_json::from_str(text).map_err(|error| format!("{error}: {text}"))
}

/// A process that ends with its owner.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub struct Fleet {
    folder: PathBuf,
    address: String,
    controller: Option<Process>,
    workers: Vec<Process>,
    joined: usize,
}

impl Fleet {
    /// A controller and workers, all of which are there.
    pub fn start(folder: &Path, data: &Path, workers: usize) -> Result<Fleet, String> {
        let said = |error: std::io::Error| format!("{}: {error}", folder.display());
        let _ = fs::remove_dir_all(folder);
        fs::create_dir_all(folder).map_err(said)?;
        for name in ["job.toml", "corpus.txt"] {
            fs::copy(data.join(name), folder.join(name)).map_err(said)?;
        }
        let address = "127.0.0.1:0".to_owned();
        let mut fleet =
            Fleet { folder: folder.to_owned(), address, controller: None, workers: Vec::new(), joined: 0 };
        fleet.up()?;
        for _ in 0..workers {
            fleet.join()?;
        }
        fleet.poll(WAIT_MAX, "its workers", |ps| ps["workers"].as_array().map(Vec::len) >= Some(workers))?;
        Ok(fleet)
    }

    fn spawn(&self, arguments: &[&str], log: &str) -> Result<Process, String> {
        let said = |error: std::io::Error| format!("{log}: {error}");
        let file = |name: String| {
            File::options().create(true).append(true).open(self.folder.join(name)).map_err(said)
        };
        let mut command = command(&self.folder, arguments);
        command.stdout(file(format!("{log}.out"))?).stderr(file(format!("{log}.err"))?);
        Ok(Process(command.spawn().map_err(said)?))
    }

    fn up(&mut self) -> Result<(), String> {
        let out = self.folder.join("controller.out");
        let _ = fs::remove_file(&out);
        let address = self.address.clone();
        self.controller = Some(self.spawn(&["up", "--listen", &address, "--json"], "controller")?);
        let until = Instant::now() + WAIT_MAX;
        loop {
            let text = fs::read_to_string(&out).unwrap_or_default();
            if let Ok(said) = json(&text) {
                let url = said["url"].as_str().unwrap_or_default();
                self.address = url.trim_start_matches("https://").to_owned();
                return Ok(());
            }
            let ended =
                self.controller.as_mut().is_none_or(|process| !matches!(process.0.try_wait(), Ok(None)));
            if ended || Instant::now() >= until {
                let why = fs::read_to_string(self.folder.join("controller.err")).unwrap_or_default();
                return Err(format!("the controller does not start: {why}"));
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn join(&mut self) -> Result<(), String> {
        let token = json(&shoal(&self.folder, &["token", "--json"])?)?;
        let token = token["token"].as_str().unwrap_or_default();
        self.joined += 1;
        let (name, url) = (format!("w{}", self.joined), format!("https://{}", self.address));
        let device = ["--device", "cpu", "--threads", "1", "--memory", "1GiB", "--host-memory", "1GiB"];
        let arguments =
            [&["join", &url, "--token", token, "--name", &name, "--drills"], &device[..]].concat();
        let worker = self.spawn(&arguments, &name)?;
        self.workers.push(worker);
        Ok(())
    }

    pub fn submit(&self) -> Result<(), String> {
        let url = format!("https://{}", self.address);
        shoal(&self.folder, &["train", "job.toml", "--controller", &url, "--detach"]).map(drop)
    }

    /// Looks at the fleet until something is so.
    fn poll(
        &mut self,
        patience: Duration,
        what: &str,
        mut so: impl FnMut(&Value) -> bool,
    ) -> Result<Value, String> {
        let until = Instant::now() + patience;
        loop {
            let ps = json(&shoal(&self.folder, &["ps", "--json"])?)?;
            if so(&ps) {
                return Ok(ps);
            }
            if Instant::now() >= until {
                return Err(format!("waited in vain for {what}: {ps}"));
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Looks at the job until something is so.
    pub fn until(
        &mut self,
        patience: Duration,
        what: &str,
        so: impl Fn(&Value) -> bool,
    ) -> Result<Value, String> {
        let over = |job: &Value| matches!(job["state"].as_str(), Some("done" | "failed" | "cancelled"));
        let ps = self.poll(patience, what, |ps| so(&ps["jobs"][0]) || over(&ps["jobs"][0]))?;
        let job = ps["jobs"][0].clone();
        match so(&job) {
            true => Ok(job),
            false => Err(format!("the job is {} at step {}, before {what}", job["state"], job["step"])),
        }
    }

    /// One fault by `shoal chaos`, on whichever worker of the plan it draws; whoever dies of it is replaced at once.
    pub fn strike(&mut self, kind: &str, seconds: &str, seed: u64) -> Result<Blow, String> {
        let (fault, seed) = (format!("--{kind}"), seed.to_string());
        let arguments =
            ["chaos", &fault, "1", "--seconds", seconds, "--every", "0.5", "--seed", &seed, "--json"];
        let mut chaos = command(&self.folder, &arguments);
        chaos.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut chaos = chaos.spawn().map_err(|error| format!("shoal chaos: {error}"))?;
        loop {
            let ended = chaos.try_wait().map_err(|error| format!("shoal chaos: {error}"))?.is_some();
            let before = self.workers.len();
            self.workers.retain_mut(|worker| matches!(worker.0.try_wait(), Ok(None)));
            for _ in self.workers.len()..before {
                self.join()?;
            }
            if ended {
                break;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        let output = chaos.wait_with_output().map_err(|error| format!("shoal chaos: {error}"))?;
        let (said, why) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        if !output.status.success() {
            return Err(format!("shoal chaos: {why}{said}"));
        }
        let outcome = &json(&said)?["faults"][0]["outcome"];
        let number = |key: &str| outcome[key].as_u64().ok_or_else(|| format!("no {key} in {outcome}"));
        Ok(Blow {
            next_step_ms: number("next_step_after_ms")?,
            done_again: number("done_again")?,
            of_controller: false,
        })
    }

    /// The controller is killed a moment from now, and started again at once.
    pub fn kill_controller(&mut self, moment: Duration) -> Result<Blow, String> {
        let revision = self.revision()?;
        std::thread::sleep(moment);
        let killed_ms = unix_ms();
        self.controller = None;
        self.up()?;
        let until = Instant::now() + WAIT_MAX;
        loop {
            let after = revision.to_string();
            let events = lines(&shoal(&self.folder, &["events", "--json", "--steps", "--after", &after])?)?;
            let counted = |event: &&Value| {
                event["at_ms"].as_u64() > Some(killed_ms)
                    && event["record"]["job"]["change"].get("committed").is_some()
            };
            if let Some(event) = events.iter().find(counted) {
                let at_ms = event["at_ms"].as_u64().unwrap_or(u64::MAX);
                let restored = |event: &&Value| event["record"]["job"]["change"].get("restored").is_some();
                let done_again = if events.iter().any(|event| restored(&event)) { u64::MAX } else { 0 };
                return Ok(Blow { next_step_ms: at_ms - killed_ms, done_again, of_controller: true });
            }
            if Instant::now() >= until {
                return Err("no step was counted after the controller's death".to_owned());
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Of the newest event.
    fn revision(&self) -> Result<u64, String> {
        let events = lines(&shoal(&self.folder, &["events", "--json", "--steps"])?)?;
        Ok(events.last().and_then(|event| event["revision"].as_u64()).unwrap_or(0))
    }

    pub fn logs(&self) -> Result<Vec<Value>, String> {
        lines(&shoal(&self.folder, &["logs", "1", "--json"])?)
    }
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(0)
}
