//! Every key there is. Serde could refuse unknown keys by itself, but a misspelt key deserves the nearest
//! one's name, and overrides on the command line deserve the same check.

use std::path::Path;

use toml::Value;

use crate::error::{CliError, Result};

/// Sections and their keys; the empty section is the top of the file.
const KEYS: &[(&str, &[&str])] = &[
    ("", &["name", "model", "data", "train", "checkpoint", "eval", "plan"]),
    ("model", &["from", "preset", "init", "classes", "image_size", "dropout"]),
    (
        "data",
        &[
            "train",
            "tokenizer",
            "sequence",
            "samples",
            "shuffle",
            "text_field",
            "mean",
            "std",
            "flip",
            "crop_padding",
        ],
    ),
    (
        "train",
        &[
            "global_batch",
            "steps",
            "seed",
            "precision",
            "gradients",
            "deterministic",
            "label_smoothing",
            "norm_group",
            "optimizer",
            "schedule",
        ],
    ),
    ("train.optimizer", &["kind", "lr", "betas", "eps", "momentum", "weight_decay", "decay", "clip_norm"]),
    ("train.schedule", &["kind", "warmup", "final", "factor", "every", "at", "rise", "start"]),
    ("checkpoint", &["to", "every", "keep"]),
    ("eval", &["data", "every"]),
    ("plan", &["micro_batch", "activations", "order", "memory", "threads", "device", "graphs", "survive"]),
];

/// The closest of the names, if any is close.
pub(super) fn nearest<'a>(wrong: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    names
        .map(|name| (strsim::jaro_winkler(wrong, name), name))
        .filter(|(likeness, _)| *likeness > 0.75)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| name)
}

fn parse(file: &Path, text: &str) -> Result<toml::Table> {
    toml::from_str(text).map_err(|error| {
        CliError::said(
            format!("{}: {}", file.display(), error.to_string().trim_end()),
            "job files are TOML: `key = value` lines under [section] headers",
        )
    })
}

/// Refuses keys that mean nothing.
pub(super) fn check(file: &Path, text: &str) -> Result {
    check_table(file, text, "", &parse(file, text)?)
}

fn check_table(file: &Path, text: &str, section: &str, table: &toml::Table) -> Result {
    let Some((_, known)) = KEYS.iter().find(|(name, _)| *name == section) else { return Ok(()) };
    for (key, value) in table {
        let path = if section.is_empty() { key.clone() } else { format!("{section}.{key}") };
        if !known.contains(&key.as_str()) {
            let place = line_of(text, key).map_or(String::new(), |line| format!(":{line}"));
            let sentence = format!("{}{place}: unknown key {path}", file.display());
            return Err(CliError::said(sentence, suggestion(section, key, known)));
        }
        let is_section = KEYS.iter().any(|(name, _)| *name == path);
        match value {
            Value::Table(inner) => check_table(file, text, &path, inner)?,
            other if is_section => {
                return Err(CliError::said(
                    format!("{}: {path} is a {}, not a table", file.display(), other.type_str()),
                    format!("write it as [{path}] with keys, or {path} = {{ … }}"),
                ));
            }
            _ => {}
        }
    }
    Ok(())
}

fn suggestion(section: &str, key: &str, known: &[&str]) -> String {
    let full = |section: &str, key: &str| match section {
        "" => key.to_owned(),
        _ => format!("{section}.{key}"),
    };
    if let Some(name) = nearest(key, known.iter().copied()) {
        return format!("did you mean {}?", full(section, name));
    }
    // Right key, wrong section?
    let elsewhere = KEYS.iter().find(|(_, keys)| keys.contains(&key));
    match elsewhere {
        Some((section, _)) => format!("did you mean {}?", full(section, key)),
        None => format!("keys here are {}", known.join(", ")),
    }
}

/// The first line that sets `key`.
fn line_of(text: &str, key: &str) -> Option<usize> {
    let sets = |line: &str| {
        let line = line.trim_start().trim_start_matches('[');
        line.strip_prefix(key).is_some_and(|rest| rest.trim_start().starts_with(['=', '.', ']']))
            || line.contains(&format!("{{ {key} "))
            || line.contains(&format!(", {key} "))
    };
    text.lines().position(sets).map(|index| index + 1)
}

/// The file's text with `section.key=value` settings laid over it.
pub(super) fn with_overrides(file: &Path, text: &str, overrides: &[String]) -> Result<String> {
    if overrides.is_empty() {
        return Ok(text.to_owned());
    }
    let mut table = parse(file, text)?;
    for setting in overrides {
        let bad = |what: &str| {
            CliError::said(format!("--set {setting}: {what}"), "write --set train.steps=100, say")
        };
        let (path, value) = setting.split_once('=').ok_or_else(|| bad("there is no `=`"))?;
        // What does not read as a TOML value is text: --set plan.memory=2GiB needs no quotes.
        let value = toml::from_str::<toml::Table>(&format!("value = {value}"))
            .ok()
            .and_then(|mut parsed| parsed.remove("value"))
            .unwrap_or_else(|| Value::String(value.to_owned()));
        let mut parts: Vec<&str> = path.trim().split('.').collect();
        let last = parts.pop().unwrap_or_default();
        let mut at = &mut table;
        for part in parts {
            let inner = at.entry(part).or_insert_with(|| Value::Table(toml::Table::new()));
            at = inner.as_table_mut().ok_or_else(|| bad("a part of the path is not a section"))?;
        }
        at.insert(last.to_owned(), value);
    }
    toml::to_string(&table)
        .map_err(|error| CliError::said(format!("{}: {error}", file.display()), "check the --set values"))
}
