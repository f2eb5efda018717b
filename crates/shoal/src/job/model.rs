//! What `[model]` names: a preset or a folder, changed where the job says so, and where its weights come from.

use std::path::Path;

use serde_json::Value;
use shoal_model::{Model, shape};

use super::{Validator, Weights, join, keys, raw};
use crate::error::{CliError, Result};

impl Validator<'_> {
    /// The model, the description it was imported with, and its weights.
    pub(super) fn model(&self, raw: &raw::Model, base: &Path) -> Result<(Model, Option<Value>, Weights)> {
        let (mut model, original, folder) = match (&raw.from, &raw.preset) {
            (Some(_), Some(_)) => {
                return Err(self.bad("model", "has both `from` and `preset`", "keep one of them"));
            }
            (None, None) => {
                let hint = format!("set from = \"FOLDER\", or preset to one of {}", names());
                return Err(self.bad("model", "has neither `from` nor `preset`", hint));
            }
            (None, Some(name)) => (self.preset(name)?, None, None),
            (Some(from), None) => {
                let folder = join(base, from);
                let (model, described) = read_folder(&folder)?;
                (model, Some(described), Some(folder))
            }
        };
        if let Some(rate) = raw.dropout {
            if !(0.0..1.0).contains(&rate) {
                return Err(self.bad("model.dropout", format!("is {rate}"), "set it between 0 and 1"));
            }
            if !model.set_dropout(rate) {
                return Err(self.bad("model.dropout", "is set, but the model has none", "leave it out"));
            }
        }
        let imported = model.clone();
        self.resize(raw, &mut model)?;
        let weights = match (raw.init.as_deref(), folder) {
            (None | Some("checkpoint"), Some(path)) => {
                let (before, now) = (imported.image(), model.image());
                if let (true, Some(before)) = (before != now && model.is_bound_to_size(), before) {
                    let hint = "leave it out, or set init = \"random\": only a ResNet's and an Inception's weights fit any size";
                    let what =
                        format!("is set, but the weights in {} are for {}", path.display(), before.size);
                    return Err(self.bad("model.image_size", what, hint));
                }
                Weights::Folder { path, new_head: imported.vocabulary() != model.vocabulary() }
            }
            (None | Some("random"), None) | (Some("random"), Some(_)) => Weights::Random,
            (Some("checkpoint"), None) => {
                let hint = "set init = \"random\", or name a folder with model.from";
                let what = "is \"checkpoint\", but a preset has no weights";
                return Err(self.bad("model.init", what, hint));
            }
            (Some(other), _) => {
                let hint = "set it to \"checkpoint\" or \"random\"";
                return Err(self.bad("model.init", format!("is \"{other}\""), hint));
            }
        };
        Ok((model, original, weights))
    }

    fn preset(&self, name: &str) -> Result<Model> {
        Model::preset(name).ok_or_else(|| {
            let hint = match keys::nearest(name, Model::preset_names()) {
                Some(nearest) => format!("did you mean \"{nearest}\"?"),
                None => format!("the presets are {}", names()),
            };
            self.bad("model.preset", format!("\"{name}\" is not known"), hint)
        })
    }

    /// Classes and image size as the job has them.
    fn resize(&self, raw: &raw::Model, model: &mut Model) -> Result {
        for (key, size) in [("model.classes", raw.classes), ("model.image_size", raw.image_size)] {
            let Some(size) = size else { continue };
            if model.image().is_none() {
                return Err(self.bad(key, "is set, but the model takes tokens", "leave it out"));
            }
            match key {
                "model.classes" => model.set_classes(size),
                _ => model.set_image_size(size),
            }
            if let Some(defect) = model.defect() {
                let hint = "a ViT's size is a multiple of its patch, a VGG's at least 32, an Inception's at least 75; \
                            classes are at least 1";
                return Err(self.bad(key, format!("is {size}: {defect}"), hint));
            }
        }
        Ok(())
    }
}

fn names() -> String {
    Model::preset_names().collect::<Vec<_>>().join(", ")
}

/// The description alone: a folder to take only the architecture from needs no weights.
fn read_folder(folder: &Path) -> Result<(Model, Value)> {
    let file = if folder.join(shape::FILE).is_file() { shape::FILE } else { shoal_model::model::CONFIG_FILE };
    let path = folder.join(file);
    let text = std::fs::read_to_string(&path).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => CliError::said(
            format!("{}: there is neither config.json nor shape.json there", folder.display()),
            "model.from names a folder as transformers' save_pretrained or `shoal export` writes it",
        ),
        _ => CliError::File { path: path.clone(), source },
    })?;
    let described: Value = serde_json::from_str(&text).map_err(|error| {
        let hint = match file {
            shape::FILE => "docs/models.md says what belongs in it",
            _ => "use the config.json that transformers' save_pretrained writes",
        };
        CliError::said(format!("{}: it is not JSON: {error}", path.display()), hint)
    })?;
    let model = Model::read(&described).map_err(|error| CliError::Said {
        sentence: format!("{}: {error}", path.display()),
        hint: error.hint(),
    })?;
    Ok((model, described))
}
