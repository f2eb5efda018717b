//! When a lab's workers had which instruction under way, as a file: `shoal simulate --against` lines it up with what the
//! simulator foresees.

use std::path::Path;

use serde::{Deserialize, Serialize};
use shoal_engine::Traced;

use crate::error::{CliError, Result};

pub const FORMAT: u32 = 1;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trace {
    pub format: u32,
    /// The plan's name.
    pub plan: String,
    /// How many times longer everything lasted than the fleet would take.
    pub stretch: f64,
    /// Kinds of devices that were played and not real.
    #[serde(default)]
    pub played: Vec<String>,
    /// The steps that were noted: of each of the plan's devices, when its instructions were under way, in seconds of the
    /// machine's clock.
    pub steps: Vec<Vec<Vec<Traced>>>,
}

impl Trace {
    pub fn read(path: &Path) -> Result<Trace> {
        let text = std::fs::read_to_string(path).map_err(CliError::at(path))?;
        let hint = "`shoal lab … --record FILE` writes one";
        let refused = |what: String| CliError::said(format!("{}: {what}", path.display()), hint);
        let trace: Trace =
            serde_json::from_str(&text).map_err(|error| refused(format!("it is no trace: {error}")))?;
        match trace.format == FORMAT
            && trace.steps.iter().all(|step| !step.is_empty())
            && !trace.steps.is_empty()
        {
            true => Ok(trace),
            false => Err(refused(format!("a trace of format {FORMAT} with at least a step is wanted"))),
        }
    }

    pub fn write(&self, path: &Path) -> Result {
        let text = serde_json::to_string(self).map_err(|error| CliError::at(path)(error.into()))?;
        std::fs::write(path, text).map_err(CliError::at(path))
    }
}
