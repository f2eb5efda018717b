//! Weights from a model's folder into its state.

use shoal_kernels::Device;
use shoal_model::{Chain, TensorSpec};
use shoal_state::hugging_face::Folder;

use crate::error::Result;
use crate::state::ModelState;

/// The names a tensor may have: a model saved without its head has no prefix, and the first BERTs called what
/// their norms learn gamma and beta.
fn candidates(name: &str) -> Vec<String> {
    let bare = ["transformer.", "model.", "bert."].iter().find_map(|prefix| name.strip_prefix(prefix));
    let older = |name: &str| {
        let renamed = [("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")];
        renamed.into_iter().find_map(|(now, then)| Some(name.strip_suffix(now)?.to_owned() + then))
    };
    std::iter::once(name)
        .chain(bare)
        .flat_map(|name| [Some(name.to_owned()), older(name)])
        .flatten()
        .collect()
}

/// Reads every parameter; a missing or misshapen tensor is an error that names it.
pub fn import(folder: &Folder, device: &dyn Device, chain: &Chain, state: &mut ModelState) -> Result {
    state.fill(device, chain, reader(folder, |_, _| false))
}

/// Reads one parameter after the other, but for tensors that `instead` sets; it says which.
pub fn reader(
    folder: &Folder,
    mut instead: impl FnMut(&TensorSpec, &mut [f32]) -> bool,
) -> impl FnMut(&TensorSpec, &mut [f32]) -> Result {
    let mut theirs = Vec::new();
    move |spec, out| {
        if instead(spec, out) {
            return Ok(());
        }
        if spec.turned.is_none() {
            return Ok(folder.read(&candidates(&spec.name), &spec.shape, out)?);
        }
        theirs.resize(out.len(), 0.0);
        folder.read(&candidates(&spec.name), &spec.shape, &mut theirs)?;
        spec.turn_in(&theirs, out);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_names_are_tried_after_the_ones_that_transformers_writes_now() {
        assert_eq!(candidates("model.norm.weight"), ["model.norm.weight", "norm.weight"]);
        let names = candidates("bert.embeddings.LayerNorm.bias");
        let expected = ["bert.embeddings.LayerNorm.bias", "bert.embeddings.LayerNorm.beta"];
        assert_eq!(names[..2], expected);
        assert_eq!(names[2..], expected.map(|name| name.replace("bert.", "")));
    }
}
