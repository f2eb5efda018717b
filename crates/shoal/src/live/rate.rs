//! How quick this machine's processor is, and messages between its workers. The catalogue's figure is one machine's, so a fleet
//! of others would be planned badly until its steps have shown their paces. Makers' figures of GPUs hold for all of a kind.

use std::fs::File;
use std::path::Path;

use serde::{Deserialize, Serialize};
use shoal_model::Precision;
use shoal_service::access::state_folder;

use crate::assemble::LocalDevice;
use crate::error::{CliError, Result};

/// In the worker's folder: the best that was ever measured there. Others may have the cores at any one moment.
const FILE: &str = "rate.json";
/// In the folder that this user's workers have in common: whose turn it is to measure.
const TURN: &str = "rate.lock";
/// Measurements, a fifth of a second each, where nothing is known.
const TIMES: usize = 3;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Measured {
    threads: usize,
    instruction_set: String,
    matrix_flops_per_second: f64,
}

/// What a worker finds out about its machine when it joins.
#[derive(Debug, Default)]
pub struct Found {
    /// In matrix products with the threads that it gives, as `shoal doctor` measures them; none for a GPU.
    pub matrix_flops_per_second: Option<f64>,
    /// Between two of this machine's workers, by the size of the message.
    pub within_machine: Vec<(u64, f64)>,
}

/// Measures, one worker of this machine after the other: those that start together would halve each other's rates.
pub fn find_out(
    device: &LocalDevice,
    folder: &Path,
    link: impl FnOnce() -> Result<Vec<(u64, f64)>>,
) -> Result<Found> {
    let _turn = wait_for_turn();
    Ok(Found { matrix_flops_per_second: measured_rate(device, folder)?, within_machine: link()? })
}

/// Held as long as it lives. Where the file system knows no locks, nobody waits.
fn wait_for_turn() -> Option<File> {
    let folder = state_folder();
    std::fs::create_dir_all(&folder).ok()?;
    let file = File::create(folder.join(TURN)).ok()?;
    file.lock().ok()?;
    Some(file)
}

fn measured_rate(device: &LocalDevice, folder: &Path) -> Result<Option<f64>> {
    if device.gpu.is_some() {
        return Ok(None);
    }
    let path = folder.join(FILE);
    let (threads, instruction_set) = (device.threads, device.instruction_set.to_string());
    // What cannot be read is as good as unknown.
    let known = std::fs::read_to_string(&path).ok().and_then(|text| serde_json::from_str(&text).ok());
    let same = |known: &Measured| known.threads == threads && known.instruction_set == instruction_set;
    let known = known.filter(same).map(|known| known.matrix_flops_per_second);
    let times = if known.is_some() { 1 } else { TIMES };
    let mut matrix_flops_per_second = known.unwrap_or(0.0);
    for _ in 0..times {
        matrix_flops_per_second = matrix_flops_per_second.max(device.measure_rate(Precision::Fp32)?);
    }
    let measured = Measured { threads, instruction_set, matrix_flops_per_second };
    let text = serde_json::to_string(&measured).expect("plain data is JSON");
    std::fs::write(&path, text).map_err(CliError::at(&path))?;
    Ok(Some(matrix_flops_per_second))
}
