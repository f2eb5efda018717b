//! A whole run over a fleet that comes and goes: what is trained, what it costs, and where every device-second went.

use std::collections::BTreeSet;

use serde::Serialize;
use shoal_fleet::Trace;
use shoal_fleet::trace::TraceEvent;
use shoal_plan::Plan;
use shoal_plan::difference::Difference;

use crate::breakdown::Breakdown;

/// Changes so close together are taken as one.
const TOGETHER_SECONDS: f64 = 1.0;

/// The best plan for some machines, and a step of it.
#[derive(Clone)]
pub struct Step {
    pub plan: Plan,
    pub seconds: f64,
    /// Of the plan's devices.
    pub devices: Vec<Breakdown>,
}

/// What happens when the fleet changes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Morphing {
    /// State moves between the machines that stay, and to those that come.
    Live {
        /// From the loss of a machine until state begins to move: it is noticed, and planned anew.
        notice_seconds: f64,
        /// The same where machines have only come, and what is best with them was planned while training went on.
        switch_seconds: f64,
        /// Steps that a loss costs beside.
        lost_steps: f64,
        /// Of each machine, each way.
        bytes_per_second: f64,
    },
    /// Everything stops and starts again from the last checkpoint.
    Restart { restart_seconds: f64 },
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    pub morphing: Morphing,
    /// Between two checkpoints, and how long one holds up training.
    pub checkpoint_every_seconds: f64,
    pub checkpoint_seconds: f64,
    pub devices_per_machine: usize,
    pub dollars_per_machine_hour: f64,
    /// Of the optimizer's state and the parameters, an element.
    pub state_bytes: u64,
}

/// The order in which machines take the places of a plan: those that stay keep theirs as far as they can, so that little
/// moves; newcomers, and then the last, fill what is left open.
#[derive(Clone, Debug, Default)]
pub struct Places(Vec<String>);

impl Places {
    /// The machines that are there now, each in its place.
    pub fn of(&mut self, machines: &BTreeSet<String>) -> &[String] {
        let mut newcomers: Vec<&String> =
            machines.iter().filter(|machine| !self.0.contains(machine)).rev().collect();
        for place in (0..self.0.len()).rev() {
            if machines.contains(&self.0[place]) {
                continue;
            }
            match newcomers.pop() {
                Some(machine) => self.0[place] = machine.clone(),
                None => drop(self.0.swap_remove(place)),
            }
        }
        self.0.extend(newcomers.into_iter().rev().cloned());
        &self.0
    }
}

/// Where device-seconds went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spent {
    /// Forward, backward and update of steps that count.
    pub useful: f64,
    pub recompute: f64,
    /// During those steps, nothing to compute until others are done.
    pub bubble: f64,
    /// During those steps, nothing to compute while something moves: the network, copies to and from hosts and disks.
    pub wait: f64,
    pub checkpoint: f64,
    /// From a change until training goes on.
    pub morph: f64,
    /// Steps that were done again.
    pub lost: f64,
    /// Machines that were there without a plan that uses them.
    pub unused: f64,
}

/// A part of what was spent, and its name.
pub type SpentPart = (&'static str, fn(&Spent) -> f64);

impl Spent {
    /// All of them: they add up to every device-second that was paid for.
    pub const PARTS: [SpentPart; 8] = [
        ("useful", |spent| spent.useful),
        ("recompute", |spent| spent.recompute),
        ("bubble", |spent| spent.bubble),
        ("wait", |spent| spent.wait),
        ("checkpoint", |spent| spent.checkpoint),
        ("morph", |spent| spent.morph),
        ("lost", |spent| spent.lost),
        ("unused", |spent| spent.unused),
    ];

    pub fn total(&self) -> f64 {
        Spent::PARTS.iter().map(|(_, part)| part(self)).sum()
    }

    /// So many steps of a plan's devices; fewer than none takes them back.
    fn add(&mut self, steps: f64, devices: &[Breakdown]) {
        for device in devices {
            self.useful += steps * (device.computing + device.updating);
            self.recompute += steps * device.recomputing;
            self.bubble += steps * device.bubble;
            self.wait += steps * device.waiting();
        }
    }
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    pub seconds: f64,
    pub steps: f64,
    pub dollars: f64,
    /// Changes of the fleet, and how many of them changed the plan.
    pub changes: usize,
    pub morphs: usize,
    /// Changes after which some state was only in a checkpoint.
    pub restores: usize,
    /// Device-seconds.
    pub spent: Spent,
}

impl Report {
    /// The share of machine time that trained.
    pub fn effective(&self) -> f64 {
        (self.spent.useful + self.spent.recompute + self.spent.bubble + self.spent.wait)
            / self.spent.total().max(f64::MIN_POSITIVE)
    }
}

/// Plays a run over a trace. `plan_for` gives the best step for some machines, none where they cannot hold the model;
/// it is asked once for each set of machines.
pub fn over(
    trace: &Trace,
    settings: &Settings,
    plan_for: &mut dyn FnMut(&BTreeSet<String>) -> Option<Step>,
) -> Report {
    let mut run = Run {
        settings,
        now: 0.0,
        machines: BTreeSet::new(),
        step: None,
        since_checkpoint: 0.0,
        report: Report::default(),
        mean_between_changes: mean_between_changes(trace),
    };
    let mut events = trace.events.iter().peekable();
    while let Some((at, first)) = events.next() {
        run.train_until(*at);
        let mut machines = run.machines.clone();
        change(&mut machines, first);
        while let Some((_, event)) = events.next_if(|(next, _)| next - at <= TOGETHER_SECONDS) {
            change(&mut machines, event);
        }
        if machines != run.machines {
            run.change(*at, machines, plan_for);
        }
    }
    run.train_until(trace.seconds);
    run.report.seconds = run.now;
    run.report
}

/// The machine that a device is in: fleets name devices after them.
fn machine(device: &str) -> &str {
    device.rsplit_once(':').map_or(device, |(machine, _)| machine)
}

fn change(machines: &mut BTreeSet<String>, event: &TraceEvent) {
    match event {
        TraceEvent::Add(name) => drop(machines.insert(name.clone())),
        TraceEvent::Remove(name) => drop(machines.remove(name)),
    }
}

fn mean_between_changes(trace: &Trace) -> f64 {
    let (mut changes, mut last) = (0, f64::NEG_INFINITY);
    for (at, _) in &trace.events {
        if at - last > TOGETHER_SECONDS {
            (changes, last) = (changes + 1, *at);
        }
    }
    trace.seconds / changes.max(1) as f64
}

struct Run<'a> {
    settings: &'a Settings,
    now: f64,
    machines: BTreeSet<String>,
    step: Option<Step>,
    /// Seconds of training that the last checkpoint does not have.
    since_checkpoint: f64,
    report: Report,
    mean_between_changes: f64,
}

impl Run<'_> {
    /// Passes time in which nothing is trained.
    fn wait(&mut self, seconds: f64, on: fn(&mut Spent) -> &mut f64) {
        let devices = self.devices();
        *on(&mut self.report.spent) += seconds * devices;
        self.pay(seconds);
        self.now += seconds;
    }

    fn devices(&self) -> f64 {
        (self.machines.len() * self.settings.devices_per_machine) as f64
    }

    fn pay(&mut self, seconds: f64) {
        let hours = seconds * self.machines.len() as f64 / 3600.0;
        self.report.dollars += hours * self.settings.dollars_per_machine_hour;
    }

    fn train_until(&mut self, until: f64) {
        let seconds = until - self.now;
        if seconds <= 0.0 {
            return;
        }
        let Some(step) = &self.step else {
            self.wait(seconds, |spent| &mut spent.unused);
            return;
        };
        let Settings { checkpoint_every_seconds, checkpoint_seconds, .. } = *self.settings;
        let saving = checkpoint_seconds / (checkpoint_every_seconds + checkpoint_seconds);
        let training = seconds * (1.0 - saving);
        let steps = training / step.seconds;
        let count = self.devices();
        let spent = &mut self.report.spent;
        spent.add(steps, &step.devices);
        spent.unused += training * (count - step.devices.len() as f64).max(0.0);
        spent.checkpoint += seconds * saving * count;
        self.report.steps += steps;
        self.since_checkpoint = (self.since_checkpoint + training) % checkpoint_every_seconds;
        self.pay(seconds);
        self.now = until;
    }

    /// So many of the last seconds' steps have to be done again.
    fn lose(&mut self, seconds: f64) {
        let Some(step) = &self.step else { return };
        let steps = (seconds / step.seconds).min(self.report.steps);
        let spent = &mut self.report.spent;
        spent.add(-steps, &step.devices);
        spent.lost += steps * step.seconds * step.devices.len() as f64;
        self.report.steps -= steps;
    }

    /// One that comes while the one before is not over begins anew from there: what was moved by then is not in force.
    fn change(
        &mut self,
        at: f64,
        machines: BTreeSet<String>,
        plan_for: &mut dyn FnMut(&BTreeSet<String>) -> Option<Step>,
    ) {
        self.report.changes += 1;
        let gone = self.step.as_ref().is_some_and(|step| {
            step.plan.devices.iter().any(|device| !machines.contains(machine(&device.name)))
        });
        let next = plan_for(&machines);
        self.machines = machines;
        if !gone && !self.pays(next.as_ref()) {
            return;
        }
        self.report.morphs += 1;
        let seconds = match self.settings.morphing {
            Morphing::Restart { restart_seconds } => {
                self.lose(self.since_checkpoint);
                self.since_checkpoint = 0.0;
                restart_seconds
            }
            Morphing::Live { notice_seconds, switch_seconds, lost_steps, .. } => {
                let (moving, lost) = self.moving(next.as_ref());
                if lost {
                    self.report.restores += 1;
                    self.lose(self.since_checkpoint);
                    self.since_checkpoint = 0.0;
                } else if gone && at >= self.now {
                    let step = self.step.as_ref().map_or(0.0, |step| step.seconds);
                    self.lose(lost_steps * step);
                }
                moving + if gone { notice_seconds } else { switch_seconds }
            }
        };
        self.step = next;
        self.wait((at + seconds - self.now).max(0.0), |spent| &mut spent.morph);
    }

    /// Whether a better plan is worth the change before the next one is to be expected.
    fn pays(&self, next: Option<&Step>) -> bool {
        let (Some(now), Some(next)) = (&self.step, next) else { return next.is_some() };
        let cost = match self.settings.morphing {
            Morphing::Restart { restart_seconds } => restart_seconds + self.since_checkpoint,
            Morphing::Live { switch_seconds, .. } => switch_seconds + self.moving(Some(next)).0,
        };
        let gained = 1.0 - next.seconds / now.seconds;
        gained * self.mean_between_changes > cost
    }

    /// How long the state moves, and whether some of it is gone.
    fn moving(&self, next: Option<&Step>) -> (f64, bool) {
        let (Some(now), Some(next)) = (&self.step, next) else { return (0.0, false) };
        let Morphing::Live { bytes_per_second, .. } = self.settings.morphing else { return (0.0, false) };
        let difference =
            Difference::new(&now.plan, &next.plan, |device| self.machines.contains(machine(device)));
        let traffic = difference.traffic();
        let most = traffic.values().map(|(received, sent)| *received.max(sent)).max().unwrap_or_default();
        let seconds = (most * self.settings.state_bytes) as f64 / bytes_per_second;
        (seconds, !difference.lost.is_empty())
    }
}
