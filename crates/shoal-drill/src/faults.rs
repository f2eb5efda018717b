//! What goes wrong when, drawn from the seed before anything happens.

use shoal_control::controller::state::{Class, Interval, JobSpec, Wish};
use shoal_control::message::JobId;

use crate::random::Random;

/// Faults happen before this; after it everything heals.
pub const FAULTS_END_MS: u64 = 14_000;

#[derive(Clone, Debug)]
pub enum Fault {
    /// A worker's process starts, if it is not there.
    Start {
        node: usize,
    },
    /// `reset`: the machine is still there, and resets the connections that the process had.
    Kill {
        node: usize,
        for_ms: u64,
        reset: bool,
    },
    Freeze {
        node: usize,
        for_ms: u64,
    },
    Slow {
        node: usize,
        percent: u32,
    },
    /// A preemption notice; the machine is gone after that, and comes back later.
    Notice {
        node: usize,
        in_ms: u64,
        back_ms: u64,
    },
    KillController {
        for_ms: u64,
    },
    /// The power goes after so many operations on its disk.
    Fuse {
        operations: u64,
        for_ms: u64,
    },
    FreezeController {
        for_ms: u64,
    },
    Cut {
        from: Option<usize>,
        to: Option<usize>,
        both: bool,
        for_ms: u64,
    },
    /// From everyone.
    Isolate {
        node: Option<usize>,
        for_ms: u64,
    },
    /// From everyone, who see its connections end at once, though it lives.
    Reset {
        node: usize,
        for_ms: u64,
    },
    /// A worker has room for one plan's state only.
    Cramp {
        node: usize,
        for_ms: u64,
    },
    /// A worker cannot install anything.
    Break {
        node: usize,
        for_ms: u64,
    },
    /// A job's checkpoints cannot be read: all or the newest, for a while or for good.
    Damage {
        job: JobId,
        all: bool,
        for_ms: Option<u64>,
    },
    Submit {
        job: JobId,
        spec: JobSpec,
    },
    Wish {
        job: JobId,
        wish: Wish,
    },
}

/// What the network does to messages, in percent.
#[derive(Clone, Copy, Debug)]
pub struct Weather {
    pub lost: u64,
    pub doubled: u64,
    pub late: u64,
}

pub struct Course {
    pub nodes: usize,
    pub weather: Weather,
    pub faults: Vec<(u64, Fault)>,
}

pub fn draw(random: &mut Random) -> Course {
    let nodes = random.between(2, 5) as usize;
    let mut faults = Vec::new();
    for node in 0..nodes {
        let late = node >= 2 && random.chance(40);
        let at_ms = if late { random.below(FAULTS_END_MS) } else { random.below(200) };
        faults.push((at_ms, Fault::Start { node }));
    }
    for job in 0..random.between(1, 2) {
        draw_job(random, JobId(job + 1), nodes, &mut faults);
    }
    let weather = match random.below(3) {
        0 => Weather { lost: 0, doubled: 0, late: 0 },
        1 => Weather { lost: random.below(10), doubled: random.below(10), late: random.below(5) },
        _ => Weather { lost: random.below(30), doubled: random.below(30), late: random.below(20) },
    };
    // Calm, rough or wild: at most so long between two faults.
    let pause_ms = [6_000, 2_500, 1_000][random.below(3) as usize];
    let mut at_ms = random.below(1_000);
    while at_ms < FAULTS_END_MS {
        faults.push((at_ms, draw_fault(random, nodes)));
        // Some come together.
        at_ms += if random.chance(15) { random.below(20) } else { random.between(1, pause_ms) };
    }
    Course { nodes, weather, faults }
}

fn draw_job(random: &mut Random, job: JobId, nodes: usize, faults: &mut Vec<(u64, Fault)>) {
    let spec = JobSpec {
        name: format!("job {}", job.0),
        class: if random.chance(50) { Class::Foreground } else { Class::Background },
        priority: random.below(2) as i32,
        steps: random.between(20, 110),
        workers_min: random.between(1, 2.min(nodes as u64)) as usize,
        workers_max: random.between(2, 6) as usize,
        checkpoint_every: match random.chance(20) {
            true => Interval::Auto,
            false => Interval::Steps(random.between(5, 25)),
        },
        checkpoints_kept: random.between(1, 3) as usize,
        description: String::new(),
    };
    let at_ms = if job.0 == 1 { 0 } else { random.below(FAULTS_END_MS / 2) };
    faults.push((at_ms, Fault::Submit { job, spec }));
    if random.chance(30) {
        let pause_ms = at_ms + random.below(FAULTS_END_MS - at_ms);
        faults.push((pause_ms, Fault::Wish { job, wish: Wish::Pause }));
        let resume_ms = pause_ms + random.below(3_000);
        faults.push((resume_ms, Fault::Wish { job, wish: Wish::Run }));
    }
    if random.chance(8) {
        faults.push((at_ms + random.below(6_000), Fault::Wish { job, wish: Wish::Cancel }));
    }
}

fn draw_fault(random: &mut Random, nodes: usize) -> Fault {
    let node = random.below(nodes as u64) as usize;
    let other = (node + random.between(1, nodes as u64 - 1) as usize) % nodes;
    let for_ms = random.between(50, 2_500);
    let both = random.chance(60);
    let job = JobId(random.between(1, 2));
    match random.below(26) {
        0..=2 => Fault::Kill { node, for_ms, reset: random.chance(50) },
        3..=4 => Fault::Freeze { node, for_ms },
        5 => Fault::Slow { node, percent: [100, 300, 900][random.below(3) as usize] },
        6 => Fault::Notice { node, in_ms: random.between(300, 3_000), back_ms: for_ms },
        7 => Fault::KillController { for_ms: for_ms / 2 },
        8..=9 => Fault::Fuse { operations: random.below(12), for_ms: for_ms / 2 },
        10 => Fault::FreezeController { for_ms: for_ms / 2 },
        11 => Fault::Cut { from: Some(node), to: Some(other), both, for_ms: for_ms * 2 },
        12 => Fault::Cut { from: Some(node), to: None, both, for_ms },
        13 => Fault::Cut { from: None, to: Some(node), both, for_ms },
        14 => Fault::Isolate { node: Some(node), for_ms },
        15..=16 => Fault::Cramp { node, for_ms: for_ms * 3 },
        17 => Fault::Break { node, for_ms },
        18..=22 => {
            let for_ms = random.chance(60).then_some(for_ms * 3);
            Fault::Damage { job, all: random.chance(30), for_ms }
        }
        23..=24 => Fault::Reset { node, for_ms },
        _ => Fault::Isolate { node: None, for_ms },
    }
}
