//! Training speed on this machine's processor, beside PyTorch's from the same minutes, over shapes from wide
//! to small: `shoal bench`, three times.

use std::env;
use std::process::{Command, Stdio};

use crate::{cargo, root};

/// (gpt2:width,layers,heads,vocabulary; sequence; batch)
const SHAPES: [(&str, &str, &str); 3] = [
    ("gpt2:768,12,12,50257", "256", "4"),
    ("gpt2:512,8,8,8192", "256", "8"),
    ("gpt2:384,6,6,256", "256", "16"),
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
    for (model, sequence, batch) in SHAPES {
        let mut command = Command::new(root().join("target/release/shoal"));
        command.args(["bench", model, "--device", "cpu", "--sequence", sequence, "--batch", batch]);
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
