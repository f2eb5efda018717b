//! `shoal generate`: continue a prompt with a trained model.

use std::io::Write;
use std::path::PathBuf;

use serde_json::json;
use shoal_engine::generate::{Generator, Sampling};

use crate::assemble::LocalDevice;
use crate::error::{CliError, Result};
use crate::model_folder::ModelFolder;

#[derive(clap::Args)]
pub struct Options {
    /// A run folder or a Hugging Face folder
    dir: PathBuf,
    /// The text to continue
    prompt: String,
    /// Tokens to add
    #[arg(long, default_value_t = 100)]
    tokens: usize,
    /// 0 takes the likeliest token every time
    #[arg(long, default_value_t = 0.8)]
    temperature: f32,
    /// Consider only this many of the likeliest tokens; 0 considers all
    #[arg(long, default_value_t = 50)]
    top_k: usize,
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// A tokenizer.json, or "bytes"
    #[arg(long)]
    tokenizer: Option<String>,
    #[arg(long)]
    json: bool,
}

pub fn run(options: Options) -> Result {
    if !(options.temperature.is_finite() && options.temperature >= 0.0) {
        return Err(CliError::said(
            format!("--temperature is {}", options.temperature),
            "0 takes the likeliest token, 1 samples as the model was trained",
        ));
    }
    let model = ModelFolder::open(&options.dir, None)?;
    if model.model.image().is_some() {
        return Err(CliError::said(
            format!("{}: this model tells images apart, it does not continue a text", options.dir.display()),
            "generate with a gpt2, llama or qwen2 model",
        ));
    }
    if !model.model.is_causal() {
        return Err(CliError::said(
            format!(
                "{}: this model fills in masked tokens, it does not continue a text",
                options.dir.display()
            ),
            "generate with a gpt2, llama or qwen2 model",
        ));
    }
    let tokenizer = model.tokenizer(options.tokenizer.as_deref())?;
    let prompt: Vec<i32> = tokenizer.encode(&options.prompt)?.into_iter().map(|id| id as i32).collect();
    if prompt.is_empty() {
        return Err(CliError::said("the prompt is empty", "give the model at least one token to continue"));
    }
    let vocabulary = model.model.vocabulary();
    if let Some(id) = prompt.iter().find(|id| **id as usize >= vocabulary) {
        return Err(CliError::said(
            format!("the prompt has token {id}, but the model's vocabulary is {vocabulary}"),
            "use the tokenizer the model was trained with",
        ));
    }
    let chain = model.model.chain();
    let context = prompt.len() + options.tokens;
    let device = LocalDevice::new(None, None);
    let mut generator =
        Generator::new(&chain, context, device.threads, device.budget_bytes, |device, state| {
            model.fill(device, &chain, state)
        })?;
    let sampling = Sampling { temperature: options.temperature, top_k: options.top_k, seed: options.seed };
    let end = tokenizer.end_of_document().map(|id| id as i32);
    let mut answer: Vec<u32> = Vec::new();
    let mut shown = 0;
    generator.generate(&prompt, options.tokens, end, sampling, &mut |token| {
        answer.push(token as u32);
        if options.json {
            return;
        }
        // A character may need several tokens: what is printed ends where the text is whole.
        let text = tokenizer.decode(&answer);
        let whole = text.trim_end_matches('\u{fffd}');
        if shown == 0 {
            print!("{}", options.prompt);
        }
        if let Some(new) = whole.get(shown..) {
            print!("{new}");
            shown = whole.len().max(1);
            let _ = std::io::stdout().flush();
        }
    })?;
    if options.json {
        println!(
            "{}",
            json!({"prompt": options.prompt, "text": tokenizer.decode(&answer), "tokens": answer.len()})
        );
    } else {
        println!();
    }
    Ok(())
}
