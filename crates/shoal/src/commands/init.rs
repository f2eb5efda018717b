//! `shoal init`: a commented job file, with data, that runs as it is.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use shoal_kernels::random::fold;

use crate::error::{CliError, Result};

#[derive(clap::Args)]
pub struct Options {
    /// The folder to write into
    #[arg(default_value = ".")]
    dir: PathBuf,
    /// Write over files that are there
    #[arg(long)]
    force: bool,
}

/// The job file; every key there is appears in it.
const JOB: &str = include_str!("init.toml");

/// Lines of the sample corpora.
const TRAIN_LINES: u64 = 20_000;
const HELD_OUT_LINES: u64 = 500;

pub fn run(options: Options) -> Result {
    std::fs::create_dir_all(&options.dir).map_err(CliError::at(&options.dir))?;
    let files = [
        ("job.toml", JOB.to_owned()),
        ("corpus.txt", corpus(0, TRAIN_LINES)),
        ("held-out.txt", corpus(TRAIN_LINES, HELD_OUT_LINES)),
    ];
    if let Some((name, _)) = files.iter().find(|(name, _)| !options.force && options.dir.join(name).exists())
    {
        return Err(CliError::said(
            format!("{}: it is there already", options.dir.join(name).display()),
            "name another folder, or pass --force to write over it",
        ));
    }
    for (name, text) in &files {
        let path = options.dir.join(name);
        std::fs::write(&path, text).map_err(CliError::at(&path))?;
    }
    let job = options.dir.join("job.toml");
    println!("wrote {}, and a little generated text to train on", shown(&job));
    println!("train it with: shoal train {}", shown(&job));
    Ok(())
}

fn shown(path: &Path) -> String {
    path.strip_prefix(".").unwrap_or(path).display().to_string()
}

/// Sentences about made-up trades: enough grammar and arithmetic for a small model to learn something.
fn corpus(first: u64, lines: u64) -> String {
    const NAMES: [&str; 8] = ["Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana"];
    const GOODS: [&str; 8] = ["apples", "books", "cups", "drums", "eggs", "flutes", "globes", "hats"];
    let mut text = String::new();
    for line in first..first + lines {
        let draw = |salt: u64, below: u64| fold(fold(line, 0x5eed), salt) % below;
        let (name, other) = (NAMES[draw(0, 8) as usize], NAMES[draw(1, 8) as usize]);
        let goods = GOODS[draw(2, 8) as usize];
        let (has, gets) = (draw(3, 50), draw(4, 50));
        let _ = writeln!(
            text,
            "{name} has {has} {goods} and gets {gets} more from {other}: {} {goods}.",
            has + gets
        );
    }
    text
}
