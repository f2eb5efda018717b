//! `preprocessor_config.json`: how the images that a model saw were normalised and sized, as transformers keeps it
//! beside the weights. Read for its defaults, written at export.

use std::path::Path;

use serde_json::{Value, json};

use crate::error::{CliError, Result};

pub const FILE: &str = "preprocessor_config.json";

/// Pixels of bytes stand for 0 to 1.
const RESCALE: f64 = 1.0 / 255.0;

/// Mean and deviation of each channel, where the folder says them.
pub fn read(folder: &Path, channels: usize) -> Result<Option<(Vec<f32>, Vec<f32>)>> {
    let path = folder.join(FILE);
    let bad = |what: String| {
        CliError::said(
            format!("{}: {what}", path.display()),
            "correct it, or set both data.mean and data.std",
        )
    };
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(CliError::File { path, source }),
    };
    let file: Value = serde_json::from_str(&text).map_err(|error| bad(format!("it is not JSON: {error}")))?;
    if file["do_normalize"] == json!(false) {
        return Ok(Some((vec![0.0; channels], vec![1.0; channels])));
    }
    let rescale = file["rescale_factor"].as_f64().unwrap_or(RESCALE);
    if file["do_rescale"] == json!(false) || (rescale - RESCALE).abs() > 1e-6 {
        return Err(bad("it scales pixels otherwise than to 0..1".into()));
    }
    let numbers = |key: &str| -> Result<Option<Vec<f32>>> {
        let value = &file[key];
        if value.is_null() {
            return Ok(None);
        }
        let all = |numbers: &Vec<Value>| numbers.iter().map(|n| Some(n.as_f64()? as f32)).collect();
        let numbers: Option<Vec<f32>> = value.as_array().and_then(all);
        match numbers.filter(|numbers| numbers.len() == channels) {
            Some(numbers) => Ok(Some(numbers)),
            None => Err(bad(format!("\"{key}\" is {value}, not {channels} numbers"))),
        }
    };
    Ok(numbers("image_mean")?.zip(numbers("image_std")?))
}

/// The file for a model that was trained on images of `size` so normalised. The processor it names does what is done
/// to pictures here: the shorter side is scaled to the size, bilinearly, and the middle is taken.
pub fn write(mean: &Value, std: &Value, size: usize) -> Value {
    json!({
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": true,
        "do_resize": true, "size": {"shortest_edge": size}, "resample": 2,
        "do_center_crop": true, "crop_size": {"height": size, "width": size},
        "do_rescale": true, "rescale_factor": RESCALE,
        "do_normalize": true, "image_mean": mean, "image_std": std,
    })
}
