//! Where a device's part of a step goes. The simulator says when each instruction ran; what a device waits for while it
//! computes nothing takes all programs together: a receive that has started may be waiting for its sender, and only from
//! the moment that both have started does anything move.

use serde::Serialize;
use shoal_plan::{Lane, Layout, Meetings, Op, Program, ProgramError};
use shoal_sim::{Simulated, Span};

/// Seconds of a device's step; they add up to the step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Breakdown {
    /// Forward and backward.
    pub computing: f64,
    pub recomputing: f64,
    /// The optimizer, on the device.
    pub updating: f64,
    /// Nothing is computed, and something passes the network to or from it.
    pub network: f64,
    /// Nothing is computed and nothing of its own is on the network, but copies to or from its host or disk are under way,
    /// or the host's optimizer.
    pub copies: f64,
    /// Neither: others have yet to make what it needs, or all is done.
    pub bubble: f64,
}

/// A kind of time, and how it reads in a sentence.
pub type Part = (&'static str, fn(&Breakdown) -> f64);

impl Breakdown {
    pub const PARTS: [Part; 6] = [
        ("computing", |time| time.computing),
        ("recomputing", |time| time.recomputing),
        ("updating", |time| time.updating),
        ("network", |time| time.network),
        ("copies", |time| time.copies),
        ("bubble", |time| time.bubble),
    ];

    /// On the compute lane.
    pub fn busy(&self) -> f64 {
        self.computing + self.recomputing + self.updating
    }

    /// For something that moves.
    pub fn waiting(&self) -> f64 {
        self.network + self.copies
    }

    pub fn seconds(&self) -> f64 {
        self.busy() + self.waiting() + self.bubble
    }

    pub fn plus(&self, other: &Breakdown) -> Breakdown {
        Breakdown {
            computing: self.computing + other.computing,
            recomputing: self.recomputing + other.recomputing,
            updating: self.updating + other.updating,
            network: self.network + other.network,
            copies: self.copies + other.copies,
            bubble: self.bubble + other.bubble,
        }
    }
}

/// When each program's instructions were really at work: those that act together, from the moment that all have started.
pub fn active(
    programs: &[Program],
    simulated: &Simulated,
    layout: &Layout,
) -> Result<Vec<Vec<Span>>, ProgramError> {
    let mut spans = simulated.spans.clone();
    for meeting in Meetings::new(programs, layout)?.all {
        let starts = meeting.members.iter().map(|(program, place)| simulated.spans[*program][*place].start);
        let met = starts.fold(0.0, f64::max);
        for (program, place) in meeting.members {
            spans[program][place].start = met;
        }
    }
    Ok(spans)
}

/// Of each program's device, in the order of the programs.
pub fn of(
    programs: &[Program],
    simulated: &Simulated,
    layout: &Layout,
) -> Result<Vec<Breakdown>, ProgramError> {
    let active = active(programs, simulated, layout)?;
    let each = programs.iter().zip(&active).zip(&simulated.spans).map(|((program, spans), started)| {
        // A device's step begins when its own part of the one before is over.
        let starts = program.instructions.iter().zip(started).filter(|(next, _)| next.op.line().is_none());
        let began = starts.map(|(_, span)| span.start).fold(f64::INFINITY, f64::min);
        let within = |moment: f64| (moment - began).clamp(0.0, simulated.seconds);
        let mut changes: Vec<(f64, usize, i32)> = Vec::new();
        for (instruction, span) in program.instructions.iter().zip(spans) {
            let (start, end) = (within(span.start), within(span.end));
            if end > start {
                let part = part(instruction.lane, &instruction.op);
                changes.extend([(start, part, 1), (end, part, -1)]);
            }
        }
        swept(changes, simulated.seconds)
    });
    Ok(each.collect())
}

/// Which of [`Breakdown::PARTS`] an instruction's time is. Where several go on at once, the first counts.
fn part(lane: Lane, op: &Op) -> usize {
    match (lane, op) {
        (Lane::Compute, Op::Recompute { .. }) => 1,
        (Lane::Compute, Op::Update { .. }) => 2,
        (Lane::Compute, _) => 0,
        (Lane::Network, _) => 3,
        (Lane::CopyIn | Lane::CopyOut | Lane::Host | Lane::Disk, _) => 4,
    }
}

/// How long each part was the first of those under way; `changes` are moments at which one begins or ends.
fn swept(mut changes: Vec<(f64, usize, i32)>, seconds: f64) -> Breakdown {
    changes.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (mut under_way, mut spent, mut now) = ([0i32; 5], [0.0; 6], 0.0);
    for (at, part, change) in changes.into_iter().chain([(seconds, 0, 0)]) {
        let first = under_way.iter().position(|count| *count > 0).unwrap_or(5);
        spent[first] += at - now;
        now = at;
        under_way[part] += change;
    }
    let [computing, recomputing, updating, network, copies, bubble] = spent;
    Breakdown { computing, recomputing, updating, network, copies, bubble }
}

/// What holds a step up: what its busiest device spends most of its time on.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bottleneck {
    /// By its place in the plan.
    pub device: usize,
    pub what: Limit,
    /// Of the step.
    pub share: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// The device's own work.
    Computing,
    Network,
    Copies,
    /// Others' work that comes before its own.
    Bubble,
}

impl Limit {
    pub fn name(self) -> &'static str {
        match self {
            Limit::Computing => "computing",
            Limit::Network => "network",
            Limit::Copies => "copies",
            Limit::Bubble => "bubble",
        }
    }
}

/// None where there is no device.
pub fn bottleneck(devices: &[Breakdown]) -> Option<Bottleneck> {
    let (device, time) =
        devices.iter().enumerate().max_by(|a, b| a.1.busy().total_cmp(&b.1.busy()).then(b.0.cmp(&a.0)))?;
    let limits = [
        (Limit::Computing, time.busy()),
        (Limit::Network, time.network),
        (Limit::Copies, time.copies),
        (Limit::Bubble, time.bubble),
    ];
    let (what, seconds) = limits.into_iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
    Some(Bottleneck { device, what, share: seconds / time.seconds().max(f64::MIN_POSITIVE) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_on_at_once_counts_as_the_first_of_it() {
        // A transfer from 1 to 4 under a computation from 0 to 2 and a copy from 3 to 6; the step ends at 8.
        let changes = vec![(0.0, 0, 1), (2.0, 0, -1), (1.0, 3, 1), (4.0, 3, -1), (3.0, 4, 1), (6.0, 4, -1)];
        let time = swept(changes, 8.0);
        assert_eq!(
            time,
            Breakdown { computing: 2.0, network: 2.0, copies: 2.0, bubble: 2.0, ..Breakdown::default() }
        );
        assert_eq!((time.seconds(), time.busy(), time.waiting()), (8.0, 2.0, 4.0));
    }

    #[test]
    fn the_busiest_device_says_what_holds_the_step_up() {
        let one = Breakdown { computing: 3.0, network: 4.0, bubble: 1.0, ..Breakdown::default() };
        let other = Breakdown { computing: 2.0, bubble: 6.0, ..Breakdown::default() };
        let found = bottleneck(&[other, one]).unwrap();
        assert_eq!(found, Bottleneck { device: 1, what: Limit::Network, share: 0.5 });
        assert_eq!(bottleneck(&[]), None);
    }
}
