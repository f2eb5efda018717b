//! A fleet of one's own: a controller and workers as processes of this machine, on loopback and free ports, in a folder
//! that has nothing to do with the user's fleets. Whatever happens, none of them outlives the process that started it.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde_json::Value;
use shoal_service::access::{ACCESS_FILE, ACCESS_VARIABLE, Access};
use shoal_service::client::Client;

use crate::error::{CliError, Result};

/// How long a process may take to begin, on a machine that has much else to do.
const START_LIMIT: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(20);
const CONTROLLER: &str = "controller";
const TOKEN_MINUTES: u64 = 10;

struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

/// What runs; whoever handles signals ends it too.
#[derive(Clone, Default)]
pub struct Processes(Arc<Mutex<Vec<Process>>>);

impl Processes {
    fn lock(&self) -> MutexGuard<'_, Vec<Process>> {
        self.0.lock().expect("nobody panics while holding it")
    }

    /// Ends all of them, at once.
    pub fn end(&self) {
        let mut all = std::mem::take(&mut *self.lock());
        // One that has ended by itself cannot be killed, which is as well.
        all.iter_mut().for_each(|process| drop(process.child.kill()));
        all.iter_mut().for_each(|process| drop(process.child.wait()));
    }

    /// An error if one of them has ended by itself.
    pub fn check(&self) -> Result {
        for process in self.lock().iter_mut() {
            if let Ok(Some(status)) = process.child.try_wait() {
                return Err(process.failure(&status.to_string()));
            }
        }
        Ok(())
    }
}

impl Process {
    /// What it said last, or how it ended.
    fn failure(&self, how: &str) -> CliError {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let said = |start: &str| log.lines().rev().find_map(|line| line.strip_prefix(start));
        let what = said("error: ").map_or_else(|| format!("it ended: {how}"), str::to_owned);
        let hint = said("hint: ").map_or_else(|| format!("see {}", self.log.display()), str::to_owned);
        CliError::said(format!("{}: {what}", who(&self.name)), hint)
    }
}

fn who(name: &str) -> String {
    if name == CONTROLLER { "this fleet's controller".to_owned() } else { format!("worker {name}") }
}

pub struct OwnFleet {
    folder: PathBuf,
    program: PathBuf,
    url: String,
    pub client: Client,
    processes: Processes,
}

impl OwnFleet {
    /// Starts the controller, told so. The folder is its own.
    pub fn start(folder: &Path, processes: &Processes, told: &[String]) -> Result<OwnFleet> {
        let folder = std::path::absolute(folder).map_err(CliError::at(folder))?;
        std::fs::create_dir_all(&folder).map_err(CliError::at(&folder))?;
        let program = std::env::current_exe().map_err(CliError::at(&folder))?;
        let own = folder.join(CONTROLLER);
        let mut command = Command::new(&program);
        command.args(["up", "--leash", "--json", "--listen", "127.0.0.1:0", "--folder"]).arg(&own);
        command.args(told);
        command.stdout(Stdio::piped());
        let url = said_url(spawn(command, CONTROLLER, &folder, processes)?, processes)?;
        let client = Client::new(&Access::read(&own.join(ACCESS_FILE))?, None)?;
        Ok(OwnFleet { folder, program, url, client, processes: processes.clone() })
    }

    /// Starts a worker, which gives what the arguments say.
    pub fn join(&self, name: &str, given: &[&str]) -> Result {
        let token = self.client.token(TOKEN_MINUTES, Some(name.to_owned()))?;
        let mut command = Command::new(&self.program);
        command.args(["join", &self.url, "--leash", "--token", &token.token, "--name", name, "--folder"]);
        command.arg(self.folder.join(name)).args(["--cloud", "none"]).args(given).stdout(Stdio::null());
        spawn(command, name, &self.folder, &self.processes).map(drop)
    }

    /// Until so many workers have joined.
    pub fn await_workers(&self, count: usize) -> Result {
        let limit = Instant::now() + START_LIMIT;
        while self.client.workers()?.len() < count {
            self.processes.check()?;
            if Instant::now() > limit {
                let what = format!("{count} workers did not join within {} s", START_LIMIT.as_secs());
                return Err(CliError::said(what, format!("see the logs in {}", self.folder.display())));
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// Says a line to a worker that listens to its input.
    pub fn tell(&self, name: &str, line: &str) -> Result {
        let mut all = self.processes.lock();
        let input =
            all.iter_mut().find(|process| process.name == name).and_then(|one| one.child.stdin.as_mut());
        match input {
            Some(input) => writeln!(input, "{line}").map_err(CliError::at(Path::new(name))),
            None => Err(CliError::said(format!("there is no worker {name}"), "is it one of this fleet?")),
        }
    }

    /// SIGKILL, without a word before.
    pub fn kill(&self, name: &str) -> Result {
        let mut all = self.processes.lock();
        let place = all.iter().position(|process| process.name == name);
        let mut process = all.swap_remove(place.ok_or_else(|| {
            CliError::said(format!("there is no worker {name} to kill"), "is it one of this fleet?")
        })?);
        process.child.kill().and_then(|()| process.child.wait()).map_err(CliError::at(&process.log))?;
        Ok(())
    }

    /// An error if a process has ended by itself.
    pub fn check(&self) -> Result {
        self.processes.check()
    }
}

impl Drop for OwnFleet {
    fn drop(&mut self) {
        self.processes.end();
    }
}

/// In a process group of its own: who presses Ctrl-C means the one that started it, which then ends the others.
fn spawn(
    mut command: Command,
    name: &str,
    folder: &Path,
    processes: &Processes,
) -> Result<Option<ChildStdout>> {
    let log = folder.join(format!("{name}.log"));
    let errors = File::create(&log).map_err(CliError::at(&log))?;
    command.stdin(Stdio::piped()).stderr(errors).process_group(0);
    command.env("XDG_STATE_HOME", folder.join("state")).env_remove(ACCESS_VARIABLE);
    let mut child = command.spawn().map_err(|error| {
        CliError::said(format!("{} cannot be started: {error}", who(name)), "are there too many processes?")
    })?;
    let output = child.stdout.take();
    processes.lock().push(Process { name: name.to_owned(), child, log });
    Ok(output)
}

/// Where the controller listens, by its own word.
fn said_url(output: Option<ChildStdout>, processes: &Processes) -> Result<String> {
    let (say, heard) = channel();
    std::thread::spawn(move || {
        let line = output.and_then(|output| BufReader::new(output).lines().next());
        // Whoever listens may have given up.
        let _ = line.map(|line| say.send(line.unwrap_or_default()));
    });
    let line = heard.recv_timeout(START_LIMIT);
    let said = line.as_ref().ok().and_then(|line| serde_json::from_str::<Value>(line).ok());
    if let Some(url) = said.as_ref().and_then(|said| said["url"].as_str()) {
        return Ok(url.to_owned());
    }
    let mut all = processes.lock();
    let process = all.first_mut().expect("the controller was started");
    let how = match line {
        Err(RecvTimeoutError::Timeout) => format!("it did not begin within {} s", START_LIMIT.as_secs()),
        _ => process.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string()),
    };
    Err(process.failure(&how))
}
