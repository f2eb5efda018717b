//! Exports under faults: whatever is interrupted, the destination is a whole model or is not there.

use std::fs;
use std::path::Path;

use serde_json::json;
use tempfile::TempDir;

use super::export::export_on;
use super::{ExportOptions, Exported, Folder};
use crate::error::{Error, Result};
use crate::faults::{FaultyDisk, Plan};
use crate::tensors::TensorData;

/// No export of these tests needs more operations.
const OPERATIONS_MAX: u64 = 500;

/// Exports three tensors of `value` in two shards, with a copied file.
fn export_value(disk: &FaultyDisk, parent: &Path, value: f32) -> Result<Exported> {
    let extra = parent.join("tokenizer.json");
    let data = [value; 6];
    let tensors = [("a", 2), ("b", 4), ("c", 6)].map(|(name, count)| (name, [count], &data[..count]));
    let tensors: Vec<_> =
        tensors.iter().map(|(name, shape, data)| TensorData { name, shape, data }).collect();
    let options = ExportOptions { shard_bytes_max: 24, replace: true, ..ExportOptions::default() };
    export_on(disk, &parent.join("out"), &json!({"model_type": "x"}), &tensors, &[extra], &options)
}

fn new_parent() -> TempDir {
    let parent = TempDir::new().expect("a temporary folder");
    fs::write(parent.path().join("tokenizer.json"), "{}").expect("written");
    parent
}

fn exported_value(dir: &Path) -> f32 {
    assert_eq!(fs::read(dir.join("tokenizer.json")).expect("copied"), b"{}");
    let folder = Folder::open(dir).expect("what has the name is whole");
    let mut out = [0.0; 6];
    folder.read(&["c".to_owned()], &[6], &mut out).expect("read");
    folder.read(&["a".to_owned()], &[2], &mut out[..2]).expect("read");
    assert!(out.iter().all(|value| *value == out[0]), "not a mixture of two exports");
    out[0]
}

fn beside(parent: &Path) -> Vec<String> {
    let listed = fs::read_dir(parent).expect("listed");
    let mut names: Vec<_> =
        listed.map(|entry| entry.expect("listed").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn a_death_at_any_operation_leaves_a_whole_model_or_none() {
    for (plan_at, replaces) in
        [(Plan::KilledAt as fn(u64) -> Plan, false), (Plan::KilledAt, true), (Plan::PowerLostAt, true)]
    {
        let mut finished = false;
        for operation in 0..OPERATIONS_MAX {
            let parent = new_parent();
            let dir = parent.path().join("out");
            if replaces {
                export_value(&FaultyDisk::new(Plan::Never), parent.path(), 1.0).expect("nothing fails");
            }
            let disk = FaultyDisk::new(plan_at(operation));
            let outcome = export_value(&disk, parent.path(), 2.0);
            if dir.exists() {
                let value = exported_value(&dir);
                assert!(value == 2.0 || (replaces && value == 1.0), "operation {operation}");
            }
            if replaces {
                let full = FaultyDisk::new(Plan::FullAfter(0));
                export_value(&full, parent.path(), 3.0).expect_err("the disk is full");
                assert!(exported_value(&dir) < 3.0, "what was moved aside is back");
            }
            export_value(&FaultyDisk::new(Plan::Never), parent.path(), 3.0).expect("exports again");
            assert_eq!(exported_value(&dir), 3.0);
            assert_eq!(beside(parent.path()), ["out", "tokenizer.json"], "nothing is left beside it");
            if !disk.died() {
                assert!(outcome.is_ok() && operation > 10 && disk.is_flushed());
                finished = true;
                break;
            }
        }
        assert!(finished, "the export never ends");
    }
}

#[test]
fn a_disk_that_fills_at_any_byte_leaves_the_model_that_was_there() {
    let parent = new_parent();
    let dir = parent.path().join("out");
    let disk = FaultyDisk::new(Plan::Never);
    let bytes = export_value(&disk, parent.path(), 1.0).expect("nothing fails").bytes;
    assert_eq!(bytes, disk.bytes(), "the size reported is the size written");
    for room in 0..bytes {
        let error =
            export_value(&FaultyDisk::new(Plan::FullAfter(room)), parent.path(), 2.0).expect_err("full");
        assert!(matches!(error, Error::DiskFull { needed_bytes, .. } if needed_bytes == bytes), "{error}");
        assert_eq!(exported_value(&dir), 1.0);
        assert_eq!(beside(parent.path()), ["out", "tokenizer.json"]);
    }
    export_value(&FaultyDisk::new(Plan::FullAfter(bytes)), parent.path(), 2.0).expect("exactly enough room");
}
