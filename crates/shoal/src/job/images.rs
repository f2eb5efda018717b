//! How samples that are images are read: normalised by what the job says, else by what came with the model.

use std::path::Path;

use shoal_model::Model;
use shoal_model::convolutional::Body;

use super::{ImageReading, Validator, raw};
use crate::error::Result;
use crate::preprocessor;

/// What torchvision's weights were trained with, but for Inception's.
const IMAGENET_MEAN: [f32; 3] = [0.485, 0.456, 0.406];
const IMAGENET_STD: [f32; 3] = [0.229, 0.224, 0.225];

/// transformers' processor for ViT has this for every channel, and torchvision's Inception makes it so itself before its
/// first layer.
const HALF: f32 = 0.5;

impl Validator<'_> {
    /// How images are read, where the model takes images; `folder` is the one it comes from.
    pub(super) fn images(
        &self,
        raw: &raw::Data,
        model: &Model,
        folder: Option<&Path>,
    ) -> Result<Option<ImageReading>> {
        let Some(image) = model.image() else {
            let set = [
                ("data.mean", raw.mean.is_some()),
                ("data.std", raw.std.is_some()),
                ("data.flip", raw.flip.is_some()),
                ("data.crop_padding", raw.crop_padding.is_some()),
            ];
            return match set.into_iter().find(|(_, is_set)| *is_set) {
                Some((key, _)) => Err(self.bad(key, "is set, but the model takes tokens", "leave it out")),
                None => Ok(None),
            };
        };
        let (mut mean, mut std) = match (model, image.channels) {
            (Model::Convolutional(model), 3) if !matches!(model.shape.body, Body::Inception { .. }) => {
                (IMAGENET_MEAN.to_vec(), IMAGENET_STD.to_vec())
            }
            (_, channels) => (vec![HALF; channels], vec![HALF; channels]),
        };
        // The file matters only where the job leaves something open.
        if let Some(folder) = folder.filter(|_| raw.mean.is_none() || raw.std.is_none())
            && let Some(found) = preprocessor::read(folder, image.channels)?
        {
            (mean, std) = found;
        }
        let mean = self.channels("data.mean", raw.mean.as_ref(), mean)?;
        let std = self.channels("data.std", raw.std.as_ref(), std)?;
        if let Some(zero) = std.iter().find(|std| **std <= 0.0) {
            let hint = "channels are divided by it: it is positive";
            return Err(self.bad("data.std", format!("is {zero}"), hint));
        }
        let crop_padding = raw.crop_padding.unwrap_or(0);
        if crop_padding > image.size {
            let hint = "images are shifted by at most their own size";
            return Err(self.bad("data.crop_padding", format!("is {crop_padding}"), hint));
        }
        Ok(Some(ImageReading { mean, std, flip: raw.flip.unwrap_or(false), crop_padding }))
    }

    /// A number a channel.
    fn channels(&self, key: &str, raw: Option<&raw::Channels>, usual: Vec<f32>) -> Result<Vec<f32>> {
        let channels = usual.len();
        let numbers = match raw {
            None => usual,
            Some(raw::Channels::All(number)) => vec![*number; channels],
            Some(raw::Channels::Each(numbers)) => numbers.clone(),
        };
        if numbers.len() != channels || numbers.iter().any(|number| !number.is_finite()) {
            let hint = format!("write one number, or {channels}: one a channel");
            return Err(self.bad(key, format!("is {numbers:?}"), hint));
        }
        Ok(numbers)
    }
}
