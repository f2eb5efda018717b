//! Where survivors stand when a step was cut short, and where they all go from there. No holder updates a slice before
//! every holder has the step's reduced gradients, since updates need the norm, and the norm needs everyone's
//! ([`crate::effects`]). So whoever knows a step's closing sums may have updated, and everyone else can: all go on to the
//! next step. Where nobody knows them nobody has updated, and all stay. No two workers are ever more than a step apart.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::difference::Difference;
use crate::table::{Plan, Slice};

/// A number told bit for bit, whatever it is written into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Exact(u64);

impl From<f64> for Exact {
    fn from(value: f64) -> Exact {
        Exact(value.to_bits())
    }
}

impl From<Exact> for f64 {
    fn from(exact: Exact) -> f64 {
        f64::from_bits(exact.0)
    }
}

/// What is added up over all devices at the end of a step, and its updates go by. All else that they read follows from
/// the step's number, and whoever lacks these sums was in that step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Closing {
    /// The step that they close: its updates take slices from this version to the next.
    pub step: u64,
    /// The sum of the losses of all targets.
    pub loss: Exact,
    /// Of the gradient, with the loss's scale in it.
    pub norm_squared: Exact,
    /// Targets that count, and those predicted rightly.
    pub targets: u64,
    pub correct: Exact,
}

/// How far a step's updates have come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Applied {
    Nothing,
    /// Some slices are at the next version already.
    Partly,
}

/// Where a worker's slices are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Standing {
    /// Which of the plan's devices it is.
    pub device: usize,
    /// Updates that every slice here has seen: the version that all are at, or some have just left.
    pub step: u64,
    /// What has been applied of the step that leads on from there. With all of it applied, that step is the next.
    pub applied: Applied,
    /// Whether that step's gradients are here, added up over all devices.
    pub reduced: bool,
    /// Of the last step whose sums are known here: that one, or the one before.
    pub closing: Option<Closing>,
}

/// Where all survivors go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// The version that every surviving slice is to be at.
    pub step: u64,
    /// Of the step before it, by which those who are not there yet apply it.
    pub closing: Option<Closing>,
    /// Slices, with their tensors' numbers, that no survivor holds: they are in checkpoints only.
    pub lost: Vec<(usize, Slice)>,
}

/// Why survivors cannot be brought together. Programs that were verified do not come to this.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Disagreement {
    #[error("nobody is left")]
    Nobody,
    #[error("device {device} is at step {step}, others at {target}: more than one step apart")]
    Apart { device: usize, step: u64, target: u64 },
    #[error("device {device} is to apply step {step}, whose closing sums nobody knows")]
    NoClosing { device: usize, step: u64 },
    #[error("device {device} is to apply step {step} without all of its gradients")]
    NotReduced { device: usize, step: u64 },
    #[error("device {device} has other closing sums of step {step} than others have")]
    OtherClosing { device: usize, step: u64 },
}

/// Where the survivors of a plan's devices go.
pub fn agree(plan: &Plan, standings: &[Standing]) -> Result<Target, Disagreement> {
    let reaches = |standing: &Standing| {
        let closes = standing.closing.map_or(0, |closing| closing.step + 1);
        standing.step.max(closes)
    };
    let step = standings.iter().map(reaches).max().ok_or(Disagreement::Nobody)?;
    let mut closing: Option<Closing> = None;
    for standing in standings {
        let Some(known) = standing.closing.filter(|known| known.step + 1 == step) else { continue };
        if *closing.get_or_insert(known) != known {
            return Err(Disagreement::OtherClosing { device: standing.device, step: known.step });
        }
    }
    for Standing { device, step: at, applied, reduced, .. } in standings.iter().copied() {
        if at == step && applied == Applied::Nothing {
            continue;
        }
        if at + 1 < step {
            return Err(Disagreement::Apart { device, step: at, target: step });
        }
        if at == step || closing.is_none() {
            return Err(Disagreement::NoClosing { device, step: at });
        }
        if !reduced {
            return Err(Disagreement::NotReduced { device, step: at });
        }
    }
    let is_there = |name: &str| standings.iter().any(|standing| plan.devices[standing.device].name == name);
    let lost = Difference::new(plan, plan, is_there).lost;
    Ok(Target { step, closing, lost })
}
