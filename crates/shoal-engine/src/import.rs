//! Weights from a Hugging Face folder into a model's state.

use shoal_kernels::Device;
use shoal_model::Chain;
use shoal_state::hugging_face::Folder;

use crate::error::Result;
use crate::state::ModelState;

/// The names a tensor may have: a model saved without its head has no prefix.
fn candidates(name: &str) -> Vec<String> {
    let bare = ["transformer.", "model."].iter().find_map(|prefix| name.strip_prefix(prefix));
    std::iter::once(name).chain(bare).map(str::to_owned).collect()
}

/// Reads every parameter; a missing or misshapen tensor is an error that names it.
pub fn import(folder: &Folder, device: &dyn Device, chain: &Chain, state: &mut ModelState) -> Result {
    state.fill(device, chain, |spec, out| Ok(folder.read(&candidates(&spec.name), &spec.shape, out)?))
}
