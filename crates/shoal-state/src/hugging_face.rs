//! Model folders as Hugging Face `transformers` saves and loads them: `config.json` beside
//! `model.safetensors`, or beside an index and its shards. [`Folder`] reads one, [`export`] makes one. What
//! the tensors mean is not known here: names and shapes come from the caller, and so does the name of the file that
//! describes the model where it is not `config.json`.

mod export;
mod folder;
#[cfg(test)]
mod tests;

pub use export::{ExportOptions, Exported, export};
pub use folder::Folder;

const CONFIG_FILE: &str = "config.json";
const WEIGHTS_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";
