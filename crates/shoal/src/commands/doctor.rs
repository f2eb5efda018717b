//! `shoal doctor`: what this machine has, what works, what to fix.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use serde_json::json;
use shoal_kernels::CudaDevice;
use shoal_kernels::device::DeviceError;
use shoal_model::Precision;

use crate::assemble::LocalDevice;
use crate::error::{CliError, Result};
use crate::job::{DeviceChoice, bytes_text};
use crate::machine;
use crate::show::flops_text;

#[derive(clap::Args)]
pub struct Options {
    #[arg(long)]
    json: bool,
}

/// Bytes written to measure the disk: enough to outlast its first burst a little, gone in a moment.
const DISK_TEST_BYTES: usize = 64 << 20;

pub fn run(options: Options) -> Result {
    let device = LocalDevice::new(None, None);
    let flops = device.measure_rate(Precision::Fp32)?;
    let disk = disk_bytes_per_second(Path::new("."));
    let gpu = find_gpu();
    if options.json {
        println!(
            "{}",
            json!({
                "version": env!("CARGO_PKG_VERSION"),
                "processor": device.processor, "threads": device.threads,
                "instruction_set": device.instruction_set, "matrix_flops_per_second": flops,
                "memory_total_bytes": machine::total_bytes(), "memory_available_bytes": machine::available_bytes(),
                "default_budget_bytes": device.budget_bytes,
                "disk_write_bytes_per_second": disk.as_ref().ok(),
                "nvidia_gpu_present": !matches!(gpu, Ok(None)), "gpu_used": matches!(gpu, Ok(Some(_))),
                "gpu": gpu.as_ref().ok().and_then(Option::as_ref).map(|(gpu, rates)| json!({
                    "kind": gpu.kind(), "matrix_flops_per_second": rates[0].1,
                    "matrix_flops_per_second_by_precision":
                        rates.iter().map(|(precision, rate)| (precision.name(), rate)).collect::<BTreeMap<_, _>>(),
                    "default_budget_bytes": gpu.budget_bytes,
                })),
            })
        );
        return Ok(());
    }
    println!("shoal {}", env!("CARGO_PKG_VERSION"));
    println!(
        "ok    processor   {}, {} threads, {}",
        device.processor, device.threads, device.instruction_set
    );
    if device.instruction_set == "plain" {
        println!("slow  vectors     neither AVX2 nor AVX-512: training works, several times slower");
    }
    println!("ok    matrix rate {:.0} GFLOP/s in fp32, measured", flops / 1e9);
    println!(
        "ok    memory      {} of {} available; a job gets {} unless plan.memory says otherwise, and {} for the process",
        bytes_text(machine::available_bytes()),
        bytes_text(machine::total_bytes()),
        bytes_text(device.budget_bytes),
        bytes_text(device.process_bytes())
    );
    match disk {
        Ok(rate) => println!("ok    disk        {}/s writing here", bytes_text(rate as u64)),
        Err(error) => println!("fix   disk        this folder cannot be written: {error}"),
    }
    match gpu {
        Ok(Some((gpu, rates))) => {
            println!("ok    GPU         {}", gpu.describe());
            let rates: Vec<String> = rates
                .iter()
                .map(|(precision, rate)| format!("{} in {}", flops_text(*rate), precision.name()))
                .collect();
            println!("                  {}, measured", rates.join(", "));
            println!(
                "                  a job trains on it, with {}, unless plan.device says otherwise",
                bytes_text(gpu.budget_bytes)
            );
        }
        Ok(None) => println!("note  GPU         none found: jobs train on the processor"),
        Err(error) => {
            println!("fix   GPU         {error}");
            if let Some(hint) = error.hint() {
                println!("                  {hint}");
            }
        }
    }
    Ok(())
}

/// A GPU with its measured rates, fp32 first.
type Measured = (LocalDevice, Vec<(Precision, f64)>);

/// The GPU with its measured rates, where there is one; an error where there is one that cannot be used.
fn find_gpu() -> Result<Option<Measured>> {
    match CudaDevice::count() {
        // No driver on a machine without a GPU is nothing to fix.
        Ok(0) => return Ok(None),
        Err(DeviceError::NoLibrary { .. }) if !Path::new("/dev/nvidia0").exists() => return Ok(None),
        Ok(_) => {}
        Err(error) => return Err(error.into()),
    }
    let gpu = LocalDevice::choose(DeviceChoice::Cuda, None, None)?;
    let known = gpu.precisions();
    let computed = Precision::ALL.into_iter().filter(|precision| known.contains(&precision.name()));
    let rates = computed.map(|precision| Ok((precision, gpu.measure_rate(precision)?)));
    let rates = rates.collect::<Result<Vec<_>>>()?;
    Ok(Some((gpu, rates)))
}

/// Writes a temporary file in the folder and flushes it to the disk.
fn disk_bytes_per_second(folder: &Path) -> Result<f64> {
    let path = folder.join(format!(".shoal-doctor-{}", std::process::id()));
    let chunk = vec![0x5a; 1 << 20];
    let started = Instant::now();
    let write = || -> std::io::Result<()> {
        let mut file = std::fs::File::create(&path)?;
        for _ in 0..DISK_TEST_BYTES / chunk.len() {
            file.write_all(&chunk)?;
        }
        file.sync_all()
    };
    let result = write();
    let seconds = started.elapsed().as_secs_f64();
    let _ = std::fs::remove_file(&path);
    result.map_err(CliError::at(folder))?;
    Ok(DISK_TEST_BYTES as f64 / seconds)
}
