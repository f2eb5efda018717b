//! Training speed on this machine's processor, beside PyTorch's from the same minutes, over shapes from wide
//! to small and on a model of images: `shoal bench`, four times.

use std::env;
use std::process::{Command, Stdio};

use crate::{cargo, root};

/// A model (gpt2:width,layers,heads,vocabulary), and the size and number of its samples.
const SHAPES: [[&str; 5]; 4] = [
    ["gpt2:768,12,12,50257", "--sequence", "256", "--batch", "4"],
    ["gpt2:512,8,8,8192", "--sequence", "256", "--batch", "8"],
    ["gpt2:384,6,6,256", "--sequence", "256", "--batch", "16"],
    ["resnet18", "--image-size", "64", "--batch", "32"],
];

/// A Python that has PyTorch.
fn python() -> Option<String> {
    let python = env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    let probe = Command::new(&python).args(["-c", "import torch"]).stderr(Stdio::null()).status();
    probe.is_ok_and(|status| status.success()).then_some(python)
}

pub fn cpu() -> Result<(), String> {
    cargo(&["build", "--release", "--package", "shoal"])?;
    let python = python();
    if python.is_none() {
        eprintln!("no Python with PyTorch found: our figures alone (set PYTHON to name one)");
    }
    for shape in SHAPES {
        let mut command = Command::new(root().join("target/release/shoal"));
        command.arg("bench").args(shape).args(["--device", "cpu"]);
        if let Some(python) = &python {
            command.args(["--peer", python]);
        }
        let status = command.status().map_err(|error| format!("{command:?}: {error}"))?;
        if !status.success() {
            return Err(format!("{command:?}: {status}"));
        }
        println!();
    }
    Ok(())
}
