//! Deadlines and leases, and what must hold between them.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The share by which two machines' clocks may run apart, in percent.
pub const CLOCK_DRIFT_PERCENT: u64 = 2;

/// The same for a controller and all its workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Between two reports of a worker that has nothing new to say.
    pub report_every_ms: u64,
    /// From sending a report until a worker that heard no answer stops.
    pub lease_ms: u64,
    /// From giving up a step until no lane of the engine works on it.
    pub halt_ms_max: u64,
    /// Silence after which a worker is dead.
    pub deadline_ms: u64,
    /// How long workers that are to stop at a step's end may take before the step is given up, or three steps if those are
    /// longer.
    pub grace_ms: u64,
    /// How long jobs that run go on as they are after a worker has joined: others may be about to.
    pub gather_ms: u64,
    /// How long a worker that its peers cannot reach, though the controller can, gets no work.
    pub quarantine_ms: u64,
    /// Before state that could not be had is tried to be had again; twice as long with each further try.
    pub retry_ms: u64,
    /// A device is slow from this share of its predicted time on, in percent, seen in so many steps one after the other.
    pub slow_percent: u32,
    pub slow_steps: u32,
    /// And for so long, unless it takes twice its time: short steps one after the other are slow together whenever a core is
    /// shared for a moment.
    pub slow_ms: u64,
    /// Expected between two changes of the fleet before any two were seen.
    pub changes_every_ms: u64,
    /// Steps from asking for a checkpoint to the one it is taken after, so that everyone hears of it in time.
    pub save_ahead_steps: u64,
    /// Between two checkpoints, where a job leaves that open.
    pub save_every_ms_min: u64,
    pub save_every_ms_max: u64,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            report_every_ms: 150,
            lease_ms: 600,
            halt_ms_max: 200,
            deadline_ms: 900,
            grace_ms: 2_000,
            gather_ms: 300,
            quarantine_ms: 30_000,
            retry_ms: 500,
            slow_percent: 150,
            slow_steps: 3,
            slow_ms: 1_000,
            changes_every_ms: 600_000,
            save_ahead_steps: 2,
            save_every_ms_min: 10_000,
            save_every_ms_max: 1_800_000,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SettingsError {
    #[error(
        "a lease of {lease_ms} ms and {halt_ms_max} ms to stop, on clocks that may differ, do not end before the \
         deadline of {deadline_ms} ms"
    )]
    LeaseOutlivesDeadline { lease_ms: u64, halt_ms_max: u64, deadline_ms: u64 },
    #[error(
        "reports every {report_every_ms} ms do not renew a lease of {lease_ms} ms if one of them is lost"
    )]
    ReportsTooRare { report_every_ms: u64, lease_ms: u64 },
}

impl Settings {
    /// What makes leases fence: see the crate's head.
    pub fn check(self) -> Result<Settings, SettingsError> {
        let Settings { lease_ms, halt_ms_max, deadline_ms, report_every_ms, .. } = self;
        let stopped_ms = lease_ms.saturating_add(halt_ms_max).saturating_mul(100 + CLOCK_DRIFT_PERCENT);
        if stopped_ms >= deadline_ms.saturating_mul(100 - CLOCK_DRIFT_PERCENT) {
            return Err(SettingsError::LeaseOutlivesDeadline { lease_ms, halt_ms_max, deadline_ms });
        }
        if report_every_ms.saturating_mul(2) >= lease_ms {
            return Err(SettingsError::ReportsTooRare { report_every_ms, lease_ms });
        }
        Ok(self)
    }
}
