//! The lab's processes, from start to end. Whatever happens here, none of them outlives the lab.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::Namespace;
use super::assignment::{Assignment, Order, Report};
use super::gpu::Mps;
use crate::error::{CliError, Result};

/// How long a worker may take to begin.
const START_LIMIT: Duration = Duration::from_secs(60);
/// Between two looks at whether someone asked to stop.
const LOOK_EVERY: Duration = Duration::from_millis(100);

struct Worker {
    name: String,
    child: Child,
    orders: Option<ChildStdin>,
    log: PathBuf,
    ended: Option<bool>,
    /// The lab ended it: it had frozen.
    is_put_down: bool,
}

/// What a worker said, or that it says nothing more.
enum Heard {
    Report(Report),
    Silence,
}

pub struct Workers {
    all: Vec<Worker>,
    heard: Receiver<(usize, Heard)>,
}

impl Workers {
    /// Starts a process for each assignment, in its network namespace where there is one; they are told of each other. Those
    /// with a share of the GPU are clients of the server.
    pub fn start(
        folder: &Path,
        assignments: &[Assignment],
        mps: Option<&Mps>,
        namespaces: &[Namespace],
    ) -> Result<Workers> {
        let program = std::env::current_exe().map_err(CliError::at(folder))?;
        let (say, heard) = channel();
        let mut workers = Workers { all: Vec::new(), heard };
        for (rank, assignment) in assignments.iter().enumerate() {
            let path = folder.join(format!("worker-{rank}.json"));
            let text =
                serde_json::to_string(assignment).map_err(|error| CliError::at(&path)(error.into()))?;
            std::fs::write(&path, text).map_err(CliError::at(&path))?;
            let log = folder.join(format!("worker-{rank}.log"));
            let errors = File::create(&log).map_err(CliError::at(&log))?;
            let mut command = match namespaces.get(rank) {
                None => Command::new(&program),
                Some(namespace) => namespace.command(&program),
            };
            command.arg("worker").arg(&path);
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(errors);
            if let (Some(mps), Some(percent)) = (mps, assignment.gpu_percent) {
                mps.admit(&mut command, percent);
            }
            let mut child = command.spawn().map_err(CliError::at(&program))?;
            let (orders, answers) = (child.stdin.take(), child.stdout.take());
            let name = assignment.plan.devices[rank].name.clone();
            workers.all.push(Worker { name, child, orders, log, ended: None, is_put_down: false });
            let say = say.clone();
            std::thread::spawn(move || {
                for line in answers.into_iter().flat_map(|answers| BufReader::new(answers).lines()) {
                    // A line that is no report is a worker's own affair: nobody else writes there.
                    let report = line.ok().and_then(|line| serde_json::from_str(&line).ok());
                    if report.is_none_or(|report| say.send((rank, Heard::Report(report))).is_err()) {
                        break;
                    }
                }
                // Whoever listens has gone, or is told.
                let _ = say.send((rank, Heard::Silence));
            });
        }
        let addresses = workers.addresses()?;
        workers.tell_all(&Order::Join(addresses));
        Ok(workers)
    }

    fn addresses(&mut self) -> Result<Vec<SocketAddr>> {
        let mut addresses: Vec<Option<SocketAddr>> = vec![None; self.all.len()];
        let limit = Instant::now() + START_LIMIT;
        while addresses.iter().any(Option::is_none) {
            let left = limit.saturating_duration_since(Instant::now());
            match self.heard.recv_timeout(left) {
                Ok((rank, Heard::Report(Report::Listening(address)))) => addresses[rank] = Some(address),
                Ok((rank, Heard::Silence)) => return Err(self.failure(rank)),
                Ok(_) => {}
                Err(_) => {
                    let late = addresses.iter().position(Option::is_none).unwrap_or(0);
                    let what =
                        format!("{} did not start within {} s", self.all[late].name, START_LIMIT.as_secs());
                    return Err(CliError::said(what, format!("see {}", self.all[late].log.display())));
                }
            }
        }
        Ok(addresses.into_iter().flatten().collect())
    }

    fn tell(&mut self, rank: usize, order: &Order) {
        let line = serde_json::to_string(order).expect("an order is JSON") + "\n";
        if let Some(orders) = &mut self.all[rank].orders {
            // One that has ended is told of by its silence.
            let _ = orders.write_all(line.as_bytes());
        }
    }

    fn tell_all(&mut self, order: &Order) {
        (0..self.all.len()).for_each(|rank| self.tell(rank, order));
    }

    /// Follows the workers to their end. `stops` is asked now and then; the one that leads is told. When one has failed,
    /// the others end by themselves, having lost it; one that does not within the `grace` is ended.
    pub fn follow(
        &mut self,
        leader: usize,
        grace: Duration,
        mut stops: impl FnMut() -> bool,
        mut on_report: impl FnMut(Report),
    ) -> Result {
        let (mut told, mut left) = (false, self.all.len());
        let mut failed: Option<(usize, Instant)> = None;
        while left > 0 {
            match self.heard.recv_timeout(LOOK_EVERY) {
                Ok((_, Heard::Report(report))) => {
                    if matches!(report, Report::Done { .. }) {
                        // Whoever has no part waits for this.
                        self.all.iter_mut().for_each(|worker| worker.orders = None);
                    }
                    on_report(report);
                }
                Ok((rank, Heard::Silence)) => {
                    left -= 1;
                    let status = self.all[rank].child.wait();
                    let well = status.is_ok_and(|status| status.success());
                    self.all[rank].ended = Some(well);
                    if !well {
                        failed.get_or_insert((rank, Instant::now()));
                        self.all.iter_mut().for_each(|worker| worker.orders = None);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if failed.is_some_and(|(_, at)| at.elapsed() > grace) {
                for worker in self.all.iter_mut().filter(|worker| worker.ended.is_none()) {
                    // It may be ending right now.
                    let _ = worker.child.kill();
                    worker.is_put_down = true;
                }
            }
            if !told && stops() {
                told = true;
                self.tell(leader, &Order::Stop);
            }
        }
        match failed {
            Some((rank, _)) => Err(self.failure(rank)),
            None => Ok(()),
        }
    }

    /// What the workers that failed said, the first to fail first.
    fn failure(&self, first: usize) -> CliError {
        let said = |worker: &Worker| {
            let log = std::fs::read_to_string(&worker.log).unwrap_or_default();
            let line = |start: &str| log.lines().find_map(|line| line.strip_prefix(start).map(str::to_owned));
            (line("error: "), line("hint: "))
        };
        let failed = || self.all.iter().filter(|worker| worker.ended == Some(false));
        // One that was stopped by another's failure names that one: whoever has a reason of its own tells it.
        let own = failed().find(|worker| {
            said(worker)
                .0
                .is_some_and(|error| !error.contains("stopped the work") && !error.contains(" is lost"))
        });
        // One that was killed says nothing, and whoever it left may have been heard of first.
        let killed = || failed().find(|worker| !worker.is_put_down && said(worker).0.is_none());
        let worker = own.or_else(killed).unwrap_or(&self.all[first]);
        let (error, hint) = said(worker);
        let what = error.unwrap_or_else(|| "it ended without a word".to_owned());
        let hint = hint.unwrap_or_else(|| format!("see {}", worker.log.display()));
        CliError::said(format!("{}: {what}", worker.name), hint)
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        for worker in &mut self.all {
            if worker.ended.is_none() {
                // It may have ended by itself meanwhile.
                let _ = worker.child.kill();
                let _ = worker.child.wait();
            }
        }
    }
}
