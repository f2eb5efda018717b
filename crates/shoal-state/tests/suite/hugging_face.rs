//! Model folders in and out: what is exported opens again with the same bits, single or sharded; folders
//! that are incomplete, mislead or hold code are refused with a message that says what to do.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use shoal_state::hugging_face::{ExportOptions, Exported, Folder, export};
use shoal_state::tensors::{TensorData, TensorFile};
use shoal_state::{Error, Result};
use tempfile::TempDir;

/// Tensor names and shapes of a model small enough to write down.
const MODEL: [(&str, &[usize]); 4] =
    [("wte.weight", &[8, 4]), ("h.0.ln.weight", &[4]), ("h.0.ln.bias", &[4]), ("h.0.mlp.weight", &[4, 16])];

fn values() -> Vec<Vec<f32>> {
    let value = |tensor: usize, element: usize| (tensor * 1000 + element) as f32 / 7.0;
    let count = |shape: &[usize]| shape.iter().product::<usize>();
    MODEL
        .iter()
        .enumerate()
        .map(|(index, (_, shape))| (0..count(shape)).map(|at| value(index, at)).collect())
        .collect()
}

fn config() -> Value {
    json!({"model_type": "gpt2", "n_embd": 4, "dtype": "float32"})
}

fn export_model(dir: &Path, extra: &[PathBuf], options: &ExportOptions) -> Result<Exported> {
    let values = values();
    let tensors: Vec<TensorData<'_>> =
        MODEL.iter().zip(&values).map(|((name, shape), data)| TensorData { name, shape, data }).collect();
    export(dir, &config(), &tensors, extra, options)
}

fn sharded() -> ExportOptions {
    ExportOptions { shard_bytes_max: 150, ..ExportOptions::default() }
}

fn assert_is_model(dir: &Path) {
    let folder = Folder::open(dir).expect("sound");
    assert_eq!(folder.config(), &config());
    assert_eq!(folder.names().count(), MODEL.len());
    for ((name, shape), expected) in MODEL.iter().zip(values()) {
        let mut out = vec![0.0; expected.len()];
        folder.read(&[format!("transformer.{name}"), (*name).to_owned()], shape, &mut out).expect("read");
        assert_eq!(out, expected, "{name}");
        assert_eq!(folder.info(name).expect("there").shape, *shape);
    }
}

/// A folder holding a config and nothing else, or what `prepare` adds.
fn folder_with(prepare: impl FnOnce(&Path)) -> TempDir {
    let dir = TempDir::new().expect("a temporary folder");
    fs::write(dir.path().join("config.json"), "{}").expect("written");
    prepare(dir.path());
    dir
}

fn refused(dir: &Path) -> (Error, String, String) {
    let error = Folder::open(dir).expect_err("refused");
    let (message, hint) = (error.to_string(), error.hint().expect("a hint"));
    assert!(message.starts_with(&dir.display().to_string()), "{message}");
    (error, message, hint)
}

#[test]
fn an_export_is_a_model_again() {
    let dir = TempDir::new().expect("a temporary folder");
    let tokenizer = dir.path().join("tokenizer.json");
    fs::write(&tokenizer, "{\"version\":\"1.0\"}").expect("written");
    let out = dir.path().join("new/model");
    let exported = export_model(&out, &[tokenizer], &ExportOptions::default()).expect("exported");
    assert_eq!(exported.files, ["config.json", "model.safetensors", "tokenizer.json"]);
    let sizes = exported.files.iter().map(|name| fs::metadata(out.join(name)).expect("there").len());
    assert_eq!(exported.bytes, sizes.sum::<u64>());
    assert_is_model(&out);
    assert_eq!(fs::read(out.join("tokenizer.json")).expect("copied"), b"{\"version\":\"1.0\"}");
    let weights = TensorFile::open(&out.join("model.safetensors")).expect("sound");
    assert_eq!(weights.metadata(), &BTreeMap::from([("format".to_owned(), "pt".to_owned())]));
    assert!(fs::read_to_string(out.join("config.json")).expect("read").starts_with("{\n  \""), "pretty");
}

#[test]
fn a_sharded_export_is_a_model_again() {
    let dir = TempDir::new().expect("a temporary folder");
    let out = dir.path().join("model");
    let exported = export_model(&out, &[], &sharded()).expect("exported");
    // The second tensor still fits beside the first, the third does not; the last is larger than a shard.
    let expected = [
        "config.json",
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ];
    assert_eq!(exported.files, expected);
    assert_is_model(&out);
    let index: Value =
        serde_json::from_slice(&fs::read(out.join("model.safetensors.index.json")).expect("read"))
            .expect("JSON");
    assert_eq!(index["metadata"], json!({"total_parameters": 104, "total_size": 416}));
    assert_eq!(index["weight_map"]["h.0.mlp.weight"], "model-00003-of-00003.safetensors");
    assert_eq!(index["weight_map"]["wte.weight"], index["weight_map"]["h.0.ln.weight"]);
}

#[test]
fn names_and_shapes_are_checked_against_the_model() {
    let dir = TempDir::new().expect("a temporary folder");
    let out = dir.path().join("model");
    export_model(&out, &[], &ExportOptions::default()).expect("exported");
    let folder = Folder::open(&out).expect("sound");
    let wanted = ["h.0.ln.wieght".to_owned(), "transformer.h.0.ln.wieght".to_owned()];
    let missing = folder.read(&wanted, &[4], &mut [0.0; 4]).expect_err("misspelt");
    let expected = "there is no tensor `h.0.ln.wieght` (nor `transformer.h.0.ln.wieght`); \
        the nearest names are `h.0.ln.weight`, `h.0.mlp.weight`, `h.0.ln.bias`, `wte.weight`";
    assert!(missing.to_string().ends_with(expected), "{missing}");
    assert!(missing.hint().expect("a hint").contains("architecture"));

    let shape = folder.read(&["wte.weight".to_owned()], &[4, 8], &mut [0.0; 32]).expect_err("transposed");
    let expected = "model.safetensors: tensor `wte.weight` has shape [8, 4], the model wants [4, 8]";
    assert!(shape.to_string().ends_with(expected), "{shape}");
    assert!(shape.hint().expect("a hint").contains("config.json"));
}

#[test]
fn folders_without_a_config_or_weights_are_refused() {
    let empty = TempDir::new().expect("a temporary folder");
    let (_, message, hint) = refused(empty.path());
    assert!(message.contains("there is neither config.json nor shape.json"), "{message}");
    assert!(hint.contains("save_pretrained"), "{hint}");
    assert!(refused(&empty.path().join("absent")).2.contains("check the path"));

    let (_, message, hint) = refused(folder_with(|_| {}).path());
    assert!(
        message.ends_with("there is neither model.safetensors nor model.safetensors.index.json"),
        "{message}"
    );
    assert!(hint.contains("init = \"random\""), "{hint}");

    let broken = folder_with(|dir| fs::write(dir.join("config.json"), "{\"n_embd\": 4,}").expect("written"));
    assert!(refused(broken.path()).1.contains("config.json: it cannot be understood: "));
    let list = folder_with(|dir| fs::write(dir.join("config.json"), "[1]").expect("written"));
    assert!(refused(list.path()).1.ends_with("config.json: it is not a JSON object"));
}

#[test]
fn pickles_are_never_read() {
    for name in ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "weights.ckpt"] {
        let dir = folder_with(|dir| fs::write(dir.join(name), "\u{80}\u{2}").expect("written"));
        let (_, message, hint) = refused(dir.path());
        let expected =
            format!("the weights are only in {name}, a pickle; pickles can execute code and are never read");
        assert!(message.ends_with(&expected), "{message}");
        assert!(hint.contains("save_pretrained(DIR, safe_serialization=True)"), "{hint}");
    }
    let both = TempDir::new().expect("a temporary folder");
    let out = both.path().join("model");
    export_model(&out, &[], &ExportOptions::default()).expect("exported");
    fs::write(out.join("pytorch_model.bin"), "code").expect("written");
    assert_is_model(&out);
}

#[test]
fn indices_that_mislead_are_refused() {
    let dir = TempDir::new().expect("a temporary folder");
    let out = dir.path().join("model");
    export_model(&out, &[], &sharded()).expect("exported");
    fs::copy(out.join("model-00001-of-00003.safetensors"), dir.path().join("outside.safetensors"))
        .expect("copied");
    let index_path = out.join("model.safetensors.index.json");
    let with_entry = |tensor: &str, file: &str| {
        let mut index: Value = serde_json::from_slice(&fs::read(&index_path).expect("read")).expect("JSON");
        let sound = index.to_string();
        index["weight_map"][tensor] = file.into();
        fs::write(&index_path, index.to_string()).expect("written");
        let refusal = refused(&out);
        fs::write(&index_path, sound).expect("written");
        refusal
    };
    let outside = dir.path().join("outside.safetensors").display().to_string();
    for file in ["../outside.safetensors", "x/../../outside.safetensors", &outside, "", ".."] {
        let (error, message, hint) = with_entry("wte.weight", file);
        assert!(matches!(error, Error::IndexEscapes { .. }), "{message}");
        assert!(
            message.contains("puts tensor `wte.weight` in `") && message.ends_with("outside the folder"),
            "{message}"
        );
        assert!(hint.contains("do not use this folder"), "{hint}");
    }
    let (_, message, hint) = with_entry("wte.weight", "model-00009-of-00009.safetensors");
    assert!(
        message.ends_with("the shard `model-00009-of-00009.safetensors`, which is not in the folder"),
        "{message}"
    );
    assert!(hint.contains("missing shard"), "{hint}");
    let (_, message, hint) = with_entry("lm_head.weight", "model-00001-of-00003.safetensors");
    let expected =
        "puts tensor `lm_head.weight` in `model-00001-of-00003.safetensors`, which does not hold it";
    assert!(message.ends_with(expected), "{message}");
    assert!(hint.contains("same revision"), "{hint}");
    assert_is_model(&out);

    fs::write(&index_path, "{\"metadata\": {}}").expect("written");
    assert!(refused(&out).1.contains("missing field `weight_map`"));
    fs::write(out.join("model-00002-of-00003.safetensors"), "cut").expect("written");
    fs::write(&index_path, r#"{"weight_map": {"x": "model-00002-of-00003.safetensors"}}"#).expect("written");
    assert!(refused(&out).1.contains("model-00002-of-00003.safetensors: the file has 3 bytes, too few"));
}

#[test]
fn the_download_cache_keeps_links_and_they_are_followed() {
    let dir = TempDir::new().expect("a temporary folder");
    let (blobs, snapshot) = (dir.path().join("blobs"), dir.path().join("snapshot"));
    let exported = export_model(&blobs, &[], &sharded()).expect("exported");
    fs::create_dir(&snapshot).expect("made");
    for name in exported.files {
        std::os::unix::fs::symlink(Path::new("../blobs").join(&name), snapshot.join(&name)).expect("linked");
    }
    assert_is_model(&snapshot);
}

#[test]
fn nothing_of_the_users_is_overwritten() {
    let dir = TempDir::new().expect("a temporary folder");
    let out = dir.path().join("model");
    let replace = ExportOptions { replace: true, ..ExportOptions::default() };
    let refused = |options: &ExportOptions| {
        let error = export_model(&out, &[], options).expect_err("refused");
        assert!(error.hint().expect("a hint").contains("empty or does not exist"), "{error}");
        error.to_string()
    };
    fs::create_dir(&out).expect("made");
    fs::write(out.join("thesis.txt"), "years").expect("written");
    assert!(
        refused(&ExportOptions::default()).ends_with("model: cannot export here: the folder is not empty")
    );
    assert!(refused(&replace).ends_with("the folder holds more than a model, so it is not replaced"));
    fs::write(out.join("config.json"), "{}").expect("written");
    fs::create_dir(out.join(".git")).expect("made");
    assert!(refused(&replace).contains("more than a model"));
    assert_eq!(fs::read(out.join("thesis.txt")).expect("still there"), b"years");
    fs::remove_dir_all(&out).expect("removed");

    fs::create_dir(&out).expect("made");
    export_model(&out, &[], &sharded()).expect("an empty folder is free");
    assert!(refused(&ExportOptions::default()).contains("not empty"));
    export_model(&out, &[], &replace).expect("told to");
    assert_is_model(&out);
    assert!(!out.join("model.safetensors.index.json").exists(), "nothing of the old export remains");
    fs::write(dir.path().join("file"), "").expect("written");
    let error = export_model(&dir.path().join("file"), &[], &replace).expect_err("a file");
    assert!(error.to_string().ends_with("it is a file"), "{error}");
    assert!(export_model(Path::new("/"), &[], &replace).is_err());
}

#[test]
fn extra_files_must_exist_and_have_names_of_their_own() {
    let dir = TempDir::new().expect("a temporary folder");
    let out = dir.path().join("model");
    let absent = dir.path().join("tokenizer.json");
    let error =
        export_model(&out, std::slice::from_ref(&absent), &ExportOptions::default()).expect_err("absent");
    assert!(error.to_string().starts_with(&absent.display().to_string()), "{error}");
    let config = dir.path().join("config.json");
    fs::write(&config, "{}").expect("written");
    let error = export_model(&out, &[config], &ExportOptions::default()).expect_err("taken");
    assert!(error.to_string().ends_with("cannot be copied: its name is taken"), "{error}");
    assert!(!out.exists());
}
