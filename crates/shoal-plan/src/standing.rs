//! Where survivors stand when a step was cut short, and where they all go from there. No holder updates a slice before
//! every holder has the step's reduced gradients, since updates need the norm, and the norm needs everyone's, handed
//! over to where updates read them ([`crate::effects`]). So whoever knows a step's closing sums may have updated, and
//! everyone else can: all go on to the next step. Where nobody knows them nobody has updated, and all stay. No two
//! workers are ever more than a step apart.

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

/// Where a worker's slices are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Standing {
    /// Updates that every slice here has seen: the version that all are at, or some have just left.
    pub step: u64,
    /// Whether some slices have already seen the next one.
    pub applied: bool,
    /// Whether the gradients of the step that leads on from there are here, added up over all devices.
    pub reduced: bool,
    /// Of the last step whose sums are known here: that one, or the one before.
    pub closing: Option<Closing>,
}

impl Standing {
    /// At a step, with nothing of the next.
    pub fn at(step: u64) -> Standing {
        Standing { step, applied: false, reduced: false, closing: None }
    }

    /// The version that this worker's slices can be brought to.
    pub fn reaches(&self) -> u64 {
        self.step.max(self.closing.map_or(0, |closing| closing.step + 1))
    }
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

/// The step that all of a plan's devices who are left go to, given by their numbers, and the closing sums of the one before
/// it. Someone else may know how far the job came at least, and by which sums.
pub fn meet(
    least: u64,
    known: Option<Closing>,
    standings: &[(usize, Standing)],
) -> Result<(u64, Option<Closing>), Disagreement> {
    let reached = standings.iter().map(|(_, standing)| standing.reaches()).max();
    let step = reached.ok_or(Disagreement::Nobody)?.max(least);
    let closes = |closing: &Closing| closing.step + 1 == step;
    let mut closing = known.filter(closes);
    for (device, standing) in standings {
        let Some(told) = standing.closing.filter(closes) else { continue };
        if *closing.get_or_insert(told) != told {
            return Err(Disagreement::OtherClosing { device: *device, step: told.step });
        }
    }
    for (device, Standing { step: at, applied, reduced, .. }) in standings.iter().copied() {
        if at == step && !applied {
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
    Ok((step, closing))
}

/// Where the survivors of a plan's devices go.
pub fn agree(plan: &Plan, standings: &[(usize, Standing)]) -> Result<Target, Disagreement> {
    let (step, closing) = meet(0, None, standings)?;
    let is_there = |name: &str| standings.iter().any(|(device, _)| plan.devices[*device].name == name);
    let lost = Difference::new(plan, plan, is_there).lost;
    Ok(Target { step, closing, lost })
}
