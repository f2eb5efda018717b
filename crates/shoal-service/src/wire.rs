//! What travels between the controller and a worker: the state machines' messages, and beside them the lines of the jobs'
//! books. Each is a JSON text of bounded size; what is not one of these, or is too large in any of its parts, ends the
//! connection. Nothing here knows sockets, so anything can be fed to it.

use serde::{Deserialize, Serialize};
use shoal_control::Settings;
use shoal_control::message::{JobId, ToController, ToWorker};

use crate::drill::Drill;
use crate::token::check_name;

/// Of a message from a worker, and of one to it, which may bear the table of a plan for many.
pub const UP_BYTES_MAX: usize = 1 << 20;
pub const DOWN_BYTES_MAX: usize = 1 << 26;
/// Taken from a connection at a time. Most messages are a few hundred bytes; room for more is emptied at every look.
pub const READ_BYTES: usize = 1 << 12;
const ABOUT_BYTES_MAX: usize = 1 << 16;
pub const LINES_MAX: usize = 256;
pub const LINE_BYTES_MAX: usize = 1 << 14;
/// What was read may be longer when it is written: 9e15 in all its digits. It is not so many times as long.
const REWRITTEN_TIMES_MAX: usize = 8;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Up {
    Control(ToController),
    /// What steps of a job came to. Said until the controller has said that it has them.
    Steps {
        job: JobId,
        lines: Vec<StepLine>,
    },
}

/// A line of a job's books.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepLine {
    /// Steps done, this one included.
    pub step: u64,
    /// Loss, time and all else that the engine says of it.
    pub record: serde_json::Map<String, serde_json::Value>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Down {
    /// The first of a connection: what the worker is to live by.
    Settings(Settings),
    Control(ToWorker),
    /// These steps' lines are in the books.
    Kept {
        job: JobId,
        steps: Vec<u64>,
    },
    /// A fault that it is to do to itself, once.
    Drill(Drill),
}

/// Reads what a worker sent; the reason why not is for the log.
pub fn up(text: &str) -> Result<Up, String> {
    if text.len() > UP_BYTES_MAX {
        return Err(format!("a message of {} bytes", text.len()));
    }
    let message: Up = serde_json::from_str(text).map_err(|error| error.to_string())?;
    match &message {
        Up::Control(ToController::Join { name, about, .. }) => {
            check_name(name).map_err(|refusal| refusal.message)?;
            if about.len() > ABOUT_BYTES_MAX {
                return Err(format!("a description of {} bytes", about.len()));
            }
        }
        Up::Control(ToController::Report(_)) => {}
        Up::Steps { lines, .. } => {
            let bytes =
                |line: &StepLine| serde_json::to_string(&line.record).map_or(usize::MAX, |text| text.len());
            // Nearly all are so short that none of their lines needs to be written again to be measured.
            let may_be_long = text.len() * REWRITTEN_TIMES_MAX > LINE_BYTES_MAX;
            let is_long = |line: &StepLine| may_be_long && bytes(line) > LINE_BYTES_MAX;
            if lines.len() > LINES_MAX || lines.iter().any(is_long) {
                return Err("too many lines, or too long ones".into());
            }
        }
    }
    Ok(message)
}

/// Reads what a controller sent.
pub fn down(text: &str) -> Result<Down, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}
