//! What this machine has: processor, cores, memory. Read from the system, so that a banner and a budget say
//! what is really there, containers included.

use std::fs;
use std::path::Path;

/// The share of what can still be had that a run takes where nothing is said.
pub const DEFAULT_SHARE: f64 = 0.9;

/// The processor's name as the system gives it.
pub fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}

/// Cores this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Bytes that can still be had: the system's estimate, or what a container's limit leaves.
pub fn available_bytes() -> u64 {
    let system = meminfo("MemAvailable:").unwrap_or(4 << 30);
    container_limit_bytes().map_or(system, |limit| system.min(limit))
}

/// Of it, what a run may take where nothing is said.
pub fn budget_bytes() -> u64 {
    (available_bytes() as f64 * DEFAULT_SHARE) as u64
}

/// Bytes that can still be written into a folder, or where it would be made.
pub fn free_disk_bytes(folder: &Path) -> u64 {
    let there = folder.ancestors().find(|path| path.exists()).unwrap_or(Path::new("."));
    rustix::fs::statvfs(there).map_or(0, |disk| disk.f_bavail * disk.f_frsize)
}

pub fn total_bytes() -> u64 {
    let system = meminfo("MemTotal:").unwrap_or(4 << 30);
    container_limit_bytes().map_or(system, |limit| system.min(limit))
}

fn meminfo(key: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let kib: u64 =
        text.lines().find(|line| line.starts_with(key))?.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib << 10)
}

/// What the control group leaves, where there is a limit.
fn container_limit_bytes() -> Option<u64> {
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let limit = number("/sys/fs/cgroup/memory.max")?;
    Some(limit.saturating_sub(number("/sys/fs/cgroup/memory.current").unwrap_or(0)))
}

/// The most memory this process has had resident.
pub fn resident_peak_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find(|line| line.starts_with("VmHWM:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? << 10)
}
