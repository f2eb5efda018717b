//! Drills: faults that a fleet's owner orders on a live run, to see that it survives them. The controller passes one on over
//! the worker's channel, beside the state machines' messages and unknown to them, and the worker does it to itself.
//! A worker that was not started for drills has none done to it: the controller refuses, and so would the worker.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use shoal_control::message::WorkerId;

use crate::driver::Sight;
use crate::error::Refusal;
use crate::wire::Down;

/// Of what lasts.
const MS_MAX: u64 = 600_000;
const PERCENT_MAX: u32 = 10_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Drill {
    /// SIGKILL, at once. With braces, or what else is said beside it would pass unread.
    Kill {},
    /// SIGSTOP, and SIGCONT after so long.
    Freeze { ms: u64 },
    /// No connection to controller or peers for so long.
    Cut { ms: u64 },
    /// Its work takes so many percent of its usual time, for so long.
    Slow { ms: u64, percent: u32 },
}

impl Drill {
    pub fn name(self) -> &'static str {
        match self {
            Drill::Kill {} => "kill",
            Drill::Freeze { .. } => "freeze",
            Drill::Cut { .. } => "cut",
            Drill::Slow { .. } => "slow",
        }
    }

    /// What does not come back by itself.
    pub fn is_kill(self) -> bool {
        self == Drill::Kill {}
    }

    /// How long it lasts, where it ends.
    pub fn ms(self) -> u64 {
        match self {
            Drill::Kill {} => 0,
            Drill::Freeze { ms } | Drill::Cut { ms } | Drill::Slow { ms, .. } => ms,
        }
    }

    pub fn check(self) -> Result<Drill, Refusal> {
        let wrong = |message: String| Err(Refusal::new(400, "request", message));
        match self {
            Drill::Slow { percent, .. } if !(100..=PERCENT_MAX).contains(&percent) => {
                wrong(format!("a worker is slowed to 100 to {PERCENT_MAX} percent of its time"))
            }
            _ if self.ms() > MS_MAX => wrong(format!("a drill lasts at most {MS_MAX} ms")),
            _ => Ok(self),
        }
    }
}

/// Does drills to its own process.
pub type Drilled = Box<dyn FnMut(Drill) + Send>;

/// Whether a worker said, when it joined, that it may be drilled.
pub fn is_allowed(about: &Value) -> bool {
    about["drills"].as_bool().unwrap_or(false)
}

/// Hands a drill to a worker's connection, or says why not; the worker's name.
pub fn order(Sight { state, links, .. }: Sight, worker: WorkerId, drill: Drill) -> Result<String, Refusal> {
    let Some(member) = state.members.get(&worker) else {
        let message = format!("there is no worker {}, or no longer", worker.0);
        return Err(Refusal::new(404, "no_such_worker", message).hint("`shoal ps --json` has their numbers"));
    };
    let name = &member.name;
    if !serde_json::from_str(&member.about).is_ok_and(|about| is_allowed(&about)) {
        let message = format!("{name} was not started for drills");
        return Err(
            Refusal::new(403, "no_drills", message).hint("its owner allows them: shoal join … --drills")
        );
    }
    let sent = links.get(name).is_some_and(|link| link.to.try_send(Down::Drill(drill)).is_ok());
    match sent {
        true => Ok(name.clone()),
        false => Err(Refusal::new(409, "not_connected", format!("{name} is not connected just now"))),
    }
}
