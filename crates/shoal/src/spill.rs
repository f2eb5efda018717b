//! Models larger than this machine's device. Their layers stream through it, and what is not under way waits in the host's
//! memory or, where that is too small, in a folder of the run. Which of it is where is planned as for a fleet of one.

use std::path::Path;

use shoal_engine::{Tiers, rate};
use shoal_fleet::catalogue::{self, CPU};
use shoal_fleet::costs::HOST_UPDATE_BYTES;
use shoal_fleet::{Costs, Fleet};
use shoal_kernels::Device;
use shoal_model::{Chain, Precision};
use shoal_plan::{Plan, Planned, StepShape, Tier};
use shoal_planner::{GPU_PROCESS_BYTES, spilled};

use crate::assemble::LocalDevice;
use crate::error::{CliError, Result};
use crate::machine;

/// Rates of a disk of which nothing is known.
const DISK_READ: &str = "2 GB/s";
const DISK_WRITE: &str = "1 GB/s";

/// What else this machine has beside its device.
#[derive(Clone, Copy, Debug)]
pub struct Around {
    pub host_bytes: u64,
    pub disk_bytes: u64,
}

impl Around {
    /// What is free now. `folder` is the run's, which need not exist yet.
    pub fn of(folder: &Path) -> Around {
        Around { host_bytes: machine::budget_bytes(), disk_bytes: machine::free_disk_bytes(folder) }
    }
}

/// A plan that streams a model through its device.
pub struct Streamed {
    pub planned: Planned,
    /// Of a step, by public figures of the device and the host's measured rate.
    pub seconds: f64,
}

/// The fastest plan of a model whose state does not all fit the device; none for a device that the catalogue does not know.
pub fn plan(
    chain: &Chain,
    step: StepShape,
    device: &LocalDevice,
    around: Around,
) -> Result<Option<Streamed>> {
    let kind = device.gpu.as_ref().map_or(CPU, |facts| &facts.model);
    if catalogue::find(kind).is_none() {
        return Ok(None);
    }
    // Plans set that aside again.
    let memory = device.budget_bytes + GPU_PROCESS_BYTES;
    let Around { host_bytes, disk_bytes } = around;
    let host_rate = HOST_UPDATE_BYTES as f64 * rate::host_updates_per_second(device.threads)?;
    let mut fleet = format!(
        "[[node]]\nname = \"{}\"\nhost_memory = \"{host_bytes} B\"\nhost_bandwidth = \"{:.3} GB/s\"\n\
         devices = [{{ kind = \"{kind}\", memory = \"{memory} B\" }}]\n",
        device.node(),
        host_rate / 1e9,
    );
    if disk_bytes > 0 {
        fleet += &format!(
            "disk = {{ size = \"{disk_bytes} B\", read = \"{DISK_READ}\", write = \"{DISK_WRITE}\" }}\n"
        );
    }
    let fleet = Fleet::parse(&fleet, "this machine")?;
    let costs = Costs::new(chain, &fleet, None, step.precision, step.sequence)?;
    let found = spilled::plan(chain, step, &fleet, &costs, 0)
        .map_err(|error| CliError::Said { sentence: error.to_string(), hint: error.hint() })?;
    let spilled::Spilled { plan, program, memory, simulated, .. } = found;
    Ok(Some(Streamed { planned: Planned { plan, program, memory }, seconds: simulated.seconds }))
}

/// Whether any state is elsewhere than in the device's own memory.
pub fn is_spilled(plan: &Plan) -> bool {
    plan.tensors.iter().flat_map(|row| &row.optimizer).any(|held| held.holder.tier() != Tier::Device)
}

/// The memories that a spilled plan was made for; what goes to the disk goes into `folder`.
pub fn tiers(
    device: &LocalDevice,
    around: Around,
    planned: &Planned,
    precision: Precision,
    deterministic: bool,
    folder: &Path,
) -> Result<Tiers> {
    // All that there is: sums, and slices on their way from a disk, come to what the forecast counts.
    if planned.memory.disk > 0 {
        std::fs::create_dir_all(folder).map_err(CliError::at(folder))?;
    }
    let opened = device.open(precision, deterministic)?;
    Ok(Tiers::around(opened, "host", device.threads, around.host_bytes, folder)?)
}

/// Says so where the state's host memory was to be page-locked and is not.
pub fn tell_refusal(tiers: &Tiers) {
    if let Some(why) = tiers.host.arena().refusal() {
        eprintln!("note: host memory cannot be page-locked, and is slower to copy ({why})");
        eprintln!("hint: raise the limit on locked memory (ulimit -l)");
    }
}

#[cfg(test)]
mod tests {
    use shoal_model::{Model, presets};

    use super::*;
    use crate::commands::trial::{Trial, TrialSettings};

    fn settings() -> TrialSettings {
        TrialSettings {
            batch: 4,
            sequence: 32,
            precision: Precision::Fp32,
            micro_batch: None,
            deterministic: false,
        }
    }

    /// Steps on a device of this budget, beside a host and a disk of these; where the state was, and the last loss. With its
    /// state the model takes 110 MB.
    fn trained(device: u64, host: u64, disk: u64) -> (Option<Tier>, f64) {
        let model = Model::Transformer(presets::gpt2(2048, 256, 8, 4, 32));
        let device = LocalDevice::new(Some(device), Some(2));
        let folder = tempfile::tempdir().expect("a folder");
        let around = Around { host_bytes: host, disk_bytes: disk };
        let beside = Some((around, folder.path()));
        let mut trial = Trial::new(&model, &settings(), &device, beside).expect("fits");
        let held = trial.planned.plan.tensors.iter().flat_map(|row| &row.optimizer);
        let elsewhere = held.map(|held| held.holder.tier()).find(|tier| *tier != Tier::Device);
        let (_, loss) = trial.train(3).expect("trained");
        assert!(trial.executor.device().arena().peak() <= device.budget_bytes);
        (elsewhere, loss)
    }

    #[test]
    fn a_model_that_does_not_fit_trains_all_the_same() {
        let (nowhere, whole) = trained(1 << 30, 1 << 30, 1 << 30);
        assert_eq!(nowhere, None);
        for (host, disk, place) in [(1 << 30, 0, Tier::Host), (32 << 20, 1 << 30, Tier::Disk)] {
            let (elsewhere, loss) = trained(96 << 20, host, disk);
            assert_eq!(elsewhere, Some(place));
            assert!((loss - whole).abs() <= 1e-5 * whole, "{loss} against {whole}");
        }
    }
}
