//! `cargo xtask test`, `bench` and `gpu-bundle`: everything a contributor or CI runs, in one place.

mod bench;
mod drawn;
mod fleet;
mod gpu_bundle;
mod lab;
mod living;
mod namespaces;

use std::env;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

const USAGE: &str = "cargo xtask test         formatting, lints, every test
cargo xtask bench cpu    training speed beside PyTorch's, where a Python with PyTorch is found
                         (PYTHON names it; else python3)
cargo xtask bench plan   how long planning and simulating take, and how they grow with the fleet
cargo xtask bench checkpoint
                         what saving every ten steps costs a run of gpt2-124m's shape; two quiet cores
cargo xtask bench lab    predicted steps beside measured ones, on fleets of played devices; two quiet cores
cargo xtask bench drawn [--seed N] [--count N]
                         the same on fleets, models and plans that are drawn at random; two quiet cores
cargo xtask bench workers
                         the same on two real workers with half of the cores each, by a profile measured first
cargo xtask bench trace FILE [--from SECONDS] [--seconds SECONDS]
                         a run on 32 played machines that come and go as a spot trace says, twenty times faster,
                         beside the simulator; two quiet cores
cargo xtask bench slow   one of four played devices becomes three times slower; two quiet cores
cargo xtask bench namespaces
                         a pipeline beside data parallel over 1 Gbit/s between network namespaces; Linux, root
cargo xtask bench fleet  a live fleet of four workers on loopback whose processes are killed, frozen and cut off, beside one
                         device that nothing happens to: [--model tiny|mini] [--fault kill|freeze|cut] [--count N] [--seed N]
cargo xtask gpu-bundle   target/gpu-bundle: tests and the binary for a GPU machine without Rust or network";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match words[..] {
        ["test"] => test(),
        ["bench", "cpu"] => bench::cpu(),
        ["bench", "plan"] => {
            cargo(&["run", "--release", "--package", "shoal-planner", "--example", "plan_speed"])
        }
        ["bench", "checkpoint"] => {
            cargo(&["run", "--release", "--package", "shoal-engine", "--example", "checkpoint_overhead"])
        }
        ["bench", "lab"] => lab::bench(),
        ["bench", "drawn", ref options @ ..] => drawn::bench(options),
        ["bench", "workers"] => lab::workers(),
        ["bench", "trace", file, ref more @ ..] => living::trace(file, more),
        ["bench", "slow"] => living::slow(),
        ["bench", "namespaces"] => namespaces::bench(),
        ["bench", "fleet", ref options @ ..] => fleet::bench(options),
        ["gpu-bundle"] => gpu_bundle::build(),
        _ => Err(USAGE.to_owned()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(sentence) => {
            eprintln!("{sentence}");
            ExitCode::FAILURE
        }
    }
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Cargo in the workspace, as if it were called by hand: what the one that runs this has said of xtask would have build scripts
/// that look at it run again, and all that stands on them built anew, whenever one calls cargo by hand in between.
fn cargo_command(arguments: &[&str]) -> Command {
    eprintln!("$ cargo {}", arguments.join(" "));
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let of_xtask = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in env::vars_os().filter(|(name, _)| name.to_str().is_some_and(of_xtask)) {
        command.env_remove(name);
    }
    command.args(arguments).current_dir(root());
    command
}

/// Runs cargo in the workspace; an error names the command.
fn cargo(arguments: &[&str]) -> Result<(), String> {
    let status = cargo_command(arguments).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("cargo {}: {status}", arguments.join(" "))),
        Err(error) => Err(format!("cargo {}: {error}", arguments.join(" "))),
    }
}

/// What is not built unless it is asked for.
const OBJECTS: &str = "shoal-state/object-store";

fn test() -> Result<(), String> {
    cargo(&["fmt", "--all", "--check"])?;
    // The profile of the shipped binary throughout: the tests train real models, and one profile means
    // dependencies are built once.
    let all = ["--release", "--workspace", "--all-targets", "--features", OBJECTS];
    cargo(&[&["clippy"], &all[..], &["--", "-D", "warnings"]].concat())?;
    // Examples have no tests, and were looked at above.
    cargo(&["test", "--release", "--workspace", "--lib", "--bins", "--tests"])?;
    // Of the whole workspace, so that what it stands on is what was built above.
    cargo(&["test", "--release", "--workspace", "--features", OBJECTS, "--test", "object_store"])
}
