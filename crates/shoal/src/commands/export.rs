//! `shoal export`: a run's model as a folder that transformers loads, or, for a VGG, ResNet or Inception,
//! torchvision.

use std::borrow::Cow;
use std::path::PathBuf;

use serde_json::json;
use shoal_engine::ModelState;
use shoal_kernels::CpuDevice;
use shoal_model::Precision;
use shoal_state::hugging_face::{ExportOptions, export};
use shoal_state::tensors::TensorData;

use crate::error::Result;
use crate::job::bytes_text;
use crate::machine;
use crate::model_folder::ModelFolder;

#[derive(clap::Args)]
pub struct Options {
    /// The run folder (checkpoint.to of the job)
    run: PathBuf,
    /// The folder to write
    dir: PathBuf,
    /// The checkpoint to export; the newest if left out
    #[arg(long)]
    step: Option<u64>,
    /// Replace an exported model that is there already
    #[arg(long)]
    replace: bool,
    #[arg(long)]
    json: bool,
}

pub fn run(options: Options) -> Result {
    let model = ModelFolder::open(&options.run, options.step)?;
    let chain = model.model.chain();
    let elements: usize = chain.tensors.iter().map(|tensor| tensor.elements()).sum();
    let bytes = shoal_model::footprint::allocation_bytes(1) * chain.tensors.len() as u64
        + 4 * elements as u64
        + CpuDevice::workspace_bytes(1)
        + (1 << 20);
    let device = CpuDevice::new("cpu:0", 1, bytes)?;
    let mut state = ModelState::allocate(&device, &chain, 1, Precision::Fp32, None)?;
    model.fill(&device, &chain, &mut state)?;
    let turned: Vec<Cow<[f32]>> = state
        .tensors
        .iter()
        .zip(&chain.tensors)
        .map(|(held, spec)| spec.turn_out(held.parameter().floats()))
        .collect();
    let tensors: Vec<TensorData> = chain
        .tensors
        .iter()
        .zip(&turned)
        .map(|(spec, data)| TensorData { name: &spec.name, shape: &spec.shape, data })
        .collect();
    let extra = model.files_beside();
    let config = model.model.write(Some(&model.raw_config));
    let settings = ExportOptions {
        replace: options.replace,
        config_file: model.model.file(),
        documents: model.documents(),
        ..ExportOptions::default()
    };
    let exported = export(&options.dir, &config, &tensors, &extra, &settings)?;
    if options.json {
        println!(
            "{}",
            json!({
                "dir": exported.dir, "files": exported.files, "bytes": exported.bytes, "step": model.step(),
                "resident_peak_bytes": machine::resident_peak_bytes(),
            })
        );
        return Ok(());
    }
    let step = model.step().map_or(String::new(), |step| format!(" of step {step}"));
    println!("wrote the model{step} to {}: {}", options.dir.display(), bytes_text(exported.bytes));
    Ok(())
}
