//! Memory does not grow with the data: a text far larger than the bound is prepared and read. A binary of
//! its own, because the peak it looks at is the whole process's.

use shoal_data::{Dataset, DatasetSpec, Order, Tokenizer};
use std::io::Write;
use std::sync::Arc;

const TEXT_BYTES: usize = 160 << 20;
const PEAK_BYTES_MAX: u64 = 40 << 20;

/// The most memory this process has had so far, where the system tells.
fn peak_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}

#[test]
fn preparing_and_reading_take_a_few_megabytes() {
    let Some(before) = peak_bytes() else {
        eprintln!("skipped: this system does not tell a process's peak memory");
        return;
    };
    assert!(before < PEAK_BYTES_MAX, "the bound is below what an empty process takes");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large.txt");
    let mut file = std::fs::File::create(&path).unwrap();
    let line = "a line of text without much in it, again and again and again\n".repeat(1 << 10);
    for _ in 0..TEXT_BYTES / line.len() {
        file.write_all(line.as_bytes()).unwrap();
    }

    let spec = DatasetSpec::new(&path, Arc::new(Tokenizer::Bytes), 1024, 256, folder.path().join("cache"));
    let dataset = Dataset::open(&spec, &mut |_, _| ()).unwrap();
    let order = Order::new(dataset.len(), 1, true);
    for position in 0..dataset.len() {
        dataset.batch(&order, position..position + 1).unwrap();
    }
    let peak = peak_bytes().unwrap();
    assert!(peak < PEAK_BYTES_MAX, "{peak} bytes at the peak");
}
