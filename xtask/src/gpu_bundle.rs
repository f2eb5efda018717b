//! `cargo xtask gpu-bundle`: everything a GPU machine needs to run the tests, in one folder. Such machines
//! often have neither Rust nor a network, so the binaries are built here, stripped, and run as they are.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{cargo_command, root};

/// The most a bundle may weigh: it travels often.
const BYTES_MAX: u64 = 64 << 20;

/// What runs there beside the tests: the binary, and the operations' rates.
const PROGRAMS: [(&str, &[&str]); 2] = [
    ("shoal", &["--package", "shoal"]),
    ("rates", &["--package", "shoal-kernels", "--example", "gpu_rates"]),
];

/// Name in the bundle, and what cargo builds it from.
const TESTS: [(&str, &[&str]); 6] = [
    ("kernels-cuda", &["--package", "shoal-kernels", "--test", "cuda"]),
    ("kernels-unit", &["--package", "shoal-kernels", "--lib"]),
    ("goldens", &["--package", "shoal-engine", "--test", "goldens"]),
    ("budgets", &["--package", "shoal-engine", "--test", "budgets"]),
    ("tables", &["--package", "shoal-engine", "--test", "tables"]),
    ("jobs", &["--package", "shoal", "--test", "gpu"]),
];

/// What is run there: every test, the same under compute-sanitizer, and the fleets of docs/performance.md.
const SCRIPTS: [(&str, &str); 3] = [
    ("run.sh", include_str!("../gpu/run.sh")),
    ("sanitize.sh", include_str!("../gpu/sanitize.sh")),
    ("fleet.sh", include_str!("../gpu/fleet.sh")),
];

pub fn build() -> Result<(), String> {
    let bundle = root().join("target/gpu-bundle");
    let said = |path: &Path| {
        let path = path.display().to_string();
        move |error: std::io::Error| format!("{path}: {error}")
    };
    if bundle.exists() {
        fs::remove_dir_all(&bundle).map_err(said(&bundle))?;
    }
    fs::create_dir_all(&bundle).map_err(said(&bundle))?;
    for (name, target) in TESTS {
        let arguments = [&["test", "--release", "--no-run"], target].concat();
        strip(&executable(&arguments)?, &bundle.join(name))?;
    }
    for (name, target) in PROGRAMS {
        let arguments = [&["build", "--release"], target].concat();
        strip(&executable(&arguments)?, &bundle.join(name))?;
    }
    copy_folder(&root().join("crates/shoal-engine/tests/golden"), &bundle.join("golden"))?;
    copy_folder(&root().join("examples"), &bundle.join("examples"))?;
    for (name, text) in SCRIPTS {
        let script = bundle.join(name);
        fs::write(&script, text).map_err(said(&script))?;
    }
    let bytes = folder_bytes(&bundle).map_err(said(&bundle))?;
    println!(
        "{}: {:.1} MiB; there, run: sh run.sh, sh sanitize.sh, sh fleet.sh quarters|uneven|larger",
        bundle.display(),
        bytes as f64 / f64::from(1 << 20)
    );
    if bytes > BYTES_MAX {
        return Err(format!("the bundle has {bytes} bytes, more than {BYTES_MAX}"));
    }
    Ok(())
}

/// Builds, and finds the one executable in what cargo reports.
fn executable(arguments: &[&str]) -> Result<PathBuf, String> {
    let output = cargo_command(arguments)
        .arg("--message-format=json-render-diagnostics")
        .stderr(std::process::Stdio::inherit())
        .output()
        .map_err(|error| format!("cargo {}: {error}", arguments.join(" ")))?;
    if !output.status.success() {
        return Err(format!("cargo {}: {}", arguments.join(" "), output.status));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    // Tests of a binary build the binary as well.
    let wanted = format!("\"test\":{}", arguments[0] == "test");
    let ours = text.lines().filter(|line| {
        let profile = line.split_once("\"profile\":{").and_then(|(_, rest)| rest.split_once('}'));
        profile.is_some_and(|(profile, _)| profile.contains(&wanted))
    });
    let found = ours.filter_map(|line| line.split_once("\"executable\":\"")?.1.split_once('"'));
    found
        .map(|(path, _)| PathBuf::from(path))
        .next_back()
        .ok_or_else(|| format!("cargo {} names no executable", arguments.join(" ")))
}

/// Copies a binary without its symbols; whole where there is no `strip`.
fn strip(from: &Path, to: &Path) -> Result<(), String> {
    let stripped = Command::new("strip").arg("-o").args([to, from]).status();
    if stripped.is_ok_and(|status| status.success()) {
        return Ok(());
    }
    fs::copy(from, to).map(|_| ()).map_err(|error| format!("{}: {error}", to.display()))
}

fn copy_folder(from: &Path, to: &Path) -> Result<(), String> {
    let said = |error: std::io::Error| format!("{}: {error}", from.display());
    fs::create_dir_all(to).map_err(said)?;
    for entry in fs::read_dir(from).map_err(said)? {
        let path = entry.map_err(said)?.path();
        let target = to.join(path.file_name().unwrap_or_default());
        if path.is_dir() {
            copy_folder(&path, &target)?;
        } else {
            fs::copy(&path, &target).map_err(|error| format!("{}: {error}", path.display()))?;
        }
    }
    Ok(())
}

fn folder_bytes(folder: &Path) -> std::io::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        bytes += if entry.path().is_dir() { folder_bytes(&entry.path())? } else { entry.metadata()?.len() };
    }
    Ok(bytes)
}
