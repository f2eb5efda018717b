//! What a person does wrong, or a disk, or a download: every mistake ends in one `error:` that names the
//! file or the key and a `hint:` that says what to do, and nothing that was saved is lost.

use std::fs;
use std::path::Path;
use std::process::Command;

use safetensors::tensor::{SafeTensors, TensorView};
use serde_json::{Value, json};

use crate::common::{Folder, JOB, checkpoint_of, checkpoints, column, files, integer_rows, metrics};

/// [`JOB`] with one piece of its text replaced.
#[track_caller]
fn job_with(from: &str, to: &str) -> String {
    assert!(JOB.contains(from), "the job has no {from:?}");
    JOB.replace(from, to)
}

/// Trains the job of a text; the folder is the job's alone.
fn train(job: &str) -> crate::common::Outcome {
    Folder::with_job(job).shoal(&["train", "job.toml"])
}

/// Trains the plain job with settings laid over it.
fn train_set(settings: &[&str]) -> crate::common::Outcome {
    let mut arguments = vec!["train", "job.toml"];
    arguments.extend(settings.iter().flat_map(|setting| ["--set", *setting]));
    Folder::with_job(JOB).shoal(&arguments)
}

#[test]
fn a_key_that_means_nothing_gets_the_nearest_one_suggested() {
    let cases = [
        ("name = \"test\"", "nmae = \"test\"", "job.toml:1: unknown key nmae", "did you mean name?"),
        ("[model]", "[modle]", "job.toml:3: unknown key modle", "did you mean model?"),
        (
            "sequence = 32",
            "sequnce = 32",
            "job.toml:8: unknown key data.sequnce",
            "did you mean data.sequence?",
        ),
        ("lr = 1e-3", "lrr = 1e-3", "unknown key train.optimizer.lrr", "did you mean train.optimizer.lr?"),
        ("steps = 4", "tokenizer = \"bytes\"\nsteps = 4", "unknown key train.tokenizer", "data.tokenizer?"),
        ("steps = 4", "xyzzy = 1\nsteps = 4", "unknown key train.xyzzy", "keys here are global_batch, steps"),
    ];
    for (from, to, sentence, hint) in cases {
        train(&job_with(from, to)).fails(&[sentence], hint);
    }
    for (setting, key, hint) in [
        ("train.stpes=5", "train.stpes", "did you mean train.steps?"),
        ("trian.steps=5", "trian", "did you mean train?"),
        ("steps=5", "steps", "did you mean train.steps?"),
        ("plan.micro_bach=1", "plan.micro_bach", "did you mean plan.micro_batch?"),
    ] {
        train_set(&[setting]).fails(&["unknown key", key], hint);
    }
}

#[test]
fn a_setting_that_is_no_setting_is_refused() {
    train_set(&["train.steps"]).fails(&["--set train.steps", "no `=`"], "--set train.steps=100");
    train_set(&["name.first=1"]).fails(&["--set name.first=1"], "--set");
    train_set(&["=1"]).fails(&["job.toml"], "");
    train_set(&["train.=1"]).fails(&["job.toml", "train."], "");
}

#[test]
fn a_value_of_the_wrong_type_is_refused_by_its_key() {
    for (from, to, key) in [
        ("name = \"test\"", "name = 7", "name"),
        ("preset = \"gpt2-tiny\"", "preset = 7", "preset"),
        ("[model]\npreset = \"gpt2-tiny\"", "[model]\npreset = \"gpt2-tiny\"\ndropout = \"some\"", "dropout"),
        ("sequence = 32", "sequence = \"long\"", "sequence"),
        ("sequence = 32", "sequence = 32.5", "sequence"),
        ("sequence = 32", "sequence = -1", "sequence"),
        ("sequence = 32", "sequence = 32\nshuffle = 1", "shuffle"),
        ("steps = 4", "steps = [4]", "steps"),
        ("clip_norm = 1.0", "betas = [0.9]", "betas"),
        ("every = \"1000 steps\"", "every = 5", "every"),
    ] {
        train(&job_with(from, to)).fails(&["job.toml", key], "");
    }
    let not_a_table = train(&job_with("[model]\npreset = \"gpt2-tiny\"\n", "").replace("name =", "model ="));
    not_a_table.fails(&["job.toml", "model is a string, not a table"], "[model]");
}

#[test]
fn a_missing_key_is_named() {
    for (gone, key) in [
        ("[model]\npreset = \"gpt2-tiny\"\n", "model"),
        ("preset = \"gpt2-tiny\"\n", "neither `from` nor `preset`"),
        ("train = \"corpus.txt\"\n", "train"),
        ("sequence = 32\n", "sequence"),
        ("global_batch = 4\n", "global_batch"),
        ("steps = 4\n", "steps"),
    ] {
        train(&job_with(gone, "")).fails(&["job.toml", key], "");
    }
}

#[test]
fn what_is_no_job_file_is_refused() {
    for (text, part) in [
        ("[model", "job.toml"),
        ("name = ", "job.toml"),
        ("name = \"a\"\nname = \"b\"\n", "job.toml"),
        ("prose, not keys", "job.toml"),
        ("", "model"),
    ] {
        train(text).fails(&["job.toml", part], "");
    }
    let folder = Folder::with_job(JOB);
    folder.write("binary.toml", [0xff, 0xfe, 0x00, 0x80]);
    folder.shoal(&["train", "binary.toml"]).fails(&["binary.toml", "UTF-8"], "TOML");
    folder.shoal(&["train", "nowhere.toml"]).fails(&["nowhere.toml", "no such job file"], "shoal init");
    folder.shoal(&["train", "."]).fails(&["."], "path");
    folder.shoal(&["plan", "nowhere.toml"]).fails(&["nowhere.toml", "no such job file"], "shoal init");
}

#[test]
fn a_value_out_of_its_range_is_refused_by_its_key() {
    for (setting, parts, hint) in [
        ("train.global_batch=0", &["train.global_batch", "is 0"][..], "at least one sample"),
        ("train.steps=0", &["train.steps", "is 0"], "at least one step"),
        ("data.sequence=0", &["data.sequence", "is 0"], "at least one token"),
        ("data.sequence=257", &["data.sequence is 257", "256 positions"], "256 or less"),
        ("train.precision=fp8", &["train.precision", "\"fp8\""], "fp32, tf32, bf16 and fp16"),
        ("train.precision=bf16", &["processor does not compute in bf16"], "train.precision"),
        ("checkpoint.every=often", &["checkpoint.every", "\"often\""], "100 steps"),
        ("checkpoint.every=0 steps", &["checkpoint.every", "0 steps"], "100 steps"),
        ("checkpoint.every=-5m", &["checkpoint.every", "\"-5m\""], "100 steps"),
        ("checkpoint.keep=0", &["checkpoint.keep", "is 0"], "at least one"),
        ("checkpoint.to=s3://bucket/run", &["checkpoint.to", "s3://bucket/run"], "name a folder"),
        ("checkpoint.to=s3://key:secret@bucket", &["checkpoint.to", "in the environment"], "name a folder"),
        ("plan.memory=lots", &["plan.memory", "\"lots\""], "4GiB"),
        ("plan.memory=0B", &["plan.memory", "\"0B\""], "4GiB"),
        ("plan.micro_batch=0", &["micro-batch of 0"], "plan.micro_batch"),
        ("plan.micro_batch=5", &["micro-batch of 5", "global batch has 4"], "plan.micro_batch"),
        ("plan.threads=0", &["plan.threads", "is 0"], "at least one thread"),
        ("plan.activations=some", &["plan.activations", "\"some\""], "recompute"),
        ("plan.order=any", &["plan.order", "\"any\""], "layer_first"),
        ("model.preset=gpt2-125m", &["model.preset", "\"gpt2-125m\""], "did you mean \"gpt2-124m\"?"),
        ("model.preset=zebra", &["model.preset", "\"zebra\""], "gpt2-tiny"),
        ("model.from=elsewhere", &["both `from` and `preset`"], "one of them"),
        ("model.init=checkpoint", &["model.init", "no weights"], "random"),
        ("model.init=maybe", &["model.init", "\"maybe\""], "random"),
        ("model.dropout=1.0", &["model.dropout", "is 1"], "between 0 and 1"),
        ("model.dropout=-0.1", &["model.dropout", "is -0.1"], "between 0 and 1"),
        ("train.optimizer.lr=0", &["train.optimizer.lr", "is 0"], "positive"),
        ("train.optimizer.lr=nan", &["train.optimizer.lr", "NaN"], "positive"),
        ("train.optimizer.kind=adam", &["train.optimizer.kind", "\"adam\""], "adamw"),
        ("train.optimizer.betas=[0.9, 1.0]", &["train.optimizer.betas", "is 1"], "0..1"),
        ("train.optimizer.eps=-1", &["train.optimizer.eps", "is -1"], "positive"),
        ("train.optimizer.momentum=1.5", &["train.optimizer.momentum", "is 1.5"], "0..1"),
        ("train.optimizer.weight_decay=-1", &["train.optimizer.weight_decay", "is -1"], "zero or positive"),
        ("train.optimizer.decay=none", &["train.optimizer.decay", "\"none\""], "matrices"),
        ("train.optimizer.clip_norm=0", &["train.optimizer.clip_norm", "is 0"], "leave it out"),
        ("train.schedule.kind=square", &["train.schedule.kind", "\"square\""], "cosine"),
        ("train.schedule.final=2", &["train.schedule.final", "is 2"], "0..1"),
        ("train.schedule.kind=step", &["train.schedule", "neither `every` nor `at`"], "every"),
        ("train.schedule={kind=\"step\", every=0}", &["train.schedule.every", "is 0"], "every"),
        ("train.schedule={kind=\"step\", at=[5,3]}", &["train.schedule.at", "[5, 3]"], "at ="),
        ("train.schedule={kind=\"step\", every=2, at=[3]}", &["both `every` and `at`"], "keep one"),
        ("train.schedule={kind=\"step\", every=2, factor=0}", &["train.schedule.factor", "is 0"], "above 0"),
        ("train.schedule={kind=\"one_cycle\", rise=3}", &["train.schedule.rise", "is 3"], "0..1"),
        (
            "train.schedule={kind=\"one_cycle\", warmup=3}",
            &["train.schedule.warmup", "one_cycle"],
            "leave it out",
        ),
        ("train.schedule={kind=\"cosine\", every=3}", &["train.schedule.every", "cosine"], "leave it out"),
        ("name=", &["name is \"\""], "a word without `/`"),
        ("name=a/b", &["name is \"a/b\""], "a word without `/`"),
    ] {
        train_set(&[setting]).fails(parts, hint);
    }
    let eval = train_set(&["eval.data=corpus.txt", "eval.every=auto"]);
    eval.fails(&["eval.every", "auto"], "200 steps");
}

/// A job that imports the folder `model`, a copy of a reference model.
fn importing() -> Folder {
    let folder = Folder::with_job(&job_with("preset = \"gpt2-tiny\"", "from = \"model\""));
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shoal-engine/tests/golden/gpt2");
    fs::create_dir(folder.join("model")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(golden.join(name), folder.join("model").join(name)).unwrap();
    }
    folder
}

fn edit_config(folder: &Folder, key: &str, value: Value) {
    let path = folder.join("model/config.json");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    match value {
        Value::Null => drop(config.as_object_mut().unwrap().remove(key)),
        value => config[key] = value,
    }
    fs::write(path, config.to_string()).unwrap();
}

#[test]
fn a_model_folder_that_is_none_is_refused_by_its_path() {
    let train = |folder: &Folder| folder.shoal(&["train", "job.toml"]);
    // The control: as it is, the folder trains.
    train(&importing()).succeeds();

    let folder = importing();
    fs::remove_dir_all(folder.join("model")).unwrap();
    train(&folder).fails(&["model", "config.json"], "save_pretrained");

    let folder = importing();
    fs::remove_file(folder.join("model/config.json")).unwrap();
    train(&folder).fails(&["model", "config.json"], "save_pretrained");

    let folder = importing();
    folder.write("model/config.json", "{\"model_type\": ");
    train(&folder).fails(&["model/config.json", "JSON"], "save_pretrained");

    let folder = importing();
    fs::remove_file(folder.join("model/model.safetensors")).unwrap();
    train(&folder).fails(&["model", "neither model.safetensors"], "init = \"random\"");
    // Which is what that hint promises:
    folder.shoal(&["train", "job.toml", "--set", "model.init=random"]).succeeds();

    let folder = importing();
    fs::rename(folder.join("model/model.safetensors"), folder.join("model/pytorch_model.bin")).unwrap();
    train(&folder).fails(&["model", "pytorch_model.bin", "pickle"], "save_pretrained");
}

#[test]
fn a_config_that_does_not_fit_is_refused() {
    for (key, value, parts) in [
        ("model_type", json!("mamba"), &["config.json", "mamba"][..]),
        ("model_type", Value::Null, &["config.json", "model_type"]),
        ("model_type", json!(5), &["config.json", "model_type"]),
        ("vocab_size", Value::Null, &["config.json", "vocab_size"]),
        ("vocab_size", json!("many"), &["config.json", "vocab_size"]),
        ("n_embd", json!(-64), &["config.json", "n_embd"]),
        ("n_embd", json!(0), &["config.json"]),
        ("n_head", json!(5), &["config.json"]),
        ("activation_function", json!("swish"), &["config.json", "activation_function"]),
        // These are sound by themselves, but the weights are another model's.
        ("n_embd", json!(128), &["model.safetensors", "shape", "128"]),
        ("n_inner", json!(100), &["model.safetensors", "shape", "100"]),
        ("vocab_size", json!(300), &["model.safetensors", "wte.weight", "300"]),
        ("n_layer", json!(3), &["model", "no tensor", "h.2.ln_1.weight"]),
        ("n_positions", json!(128), &["model.safetensors", "wpe.weight", "128"]),
    ] {
        let folder = importing();
        edit_config(&folder, key, value);
        folder.shoal(&["train", "job.toml"]).fails(parts, "");
    }
}

/// A safetensors file: the header's length, the header, the data.
fn tensor_file(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

#[test]
fn a_weights_file_that_contradicts_itself_is_refused() {
    let whole = fs::read(importing().join("model/model.safetensors")).unwrap();
    let trailing = [&whole[..], b"more"].concat();
    let absurd = [&u64::MAX.to_le_bytes(), &whole[8..]].concat();
    let past_end = [&(whole.len() as u64).to_le_bytes(), &whole[8..]].concat();
    let overlap = tensor_file(
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#,
        &[0; 12],
    );
    let reversed = tensor_file(r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}"#, &[0; 8]);
    let wrong_length = tensor_file(r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#, &[0; 8]);
    let html = b"<!DOCTYPE html><html><body>Not found, but saved all the same</body></html>".to_vec();
    for (what, bytes, part) in [
        ("empty", Vec::new(), "too few"),
        ("cut in the header", whole[..100].to_vec(), "the header claims"),
        ("cut in the data", whole[..whole.len() - 100].to_vec(), "the file has"),
        ("trailing bytes", trailing, "4 bytes at the end"),
        ("an absurd header length", absurd, "the header claims 18446744073709551615 bytes"),
        ("a header past the end", past_end, "the header claims"),
        ("overlapping tensors", overlap, "overlap"),
        ("reversed offsets", reversed, "reversed"),
        ("a shape that does not fill its bytes", wrong_length, "does not fill"),
        ("a web page", html, "the header claims"),
    ] {
        let folder = importing();
        folder.write("model/model.safetensors", bytes);
        println!("{what}");
        folder.shoal(&["train", "job.toml"]).fails(&["model/model.safetensors", part], "");
    }
}

#[test]
fn data_that_cannot_be_trained_on_is_refused_by_its_path() {
    let row: Vec<i64> = (0..33).collect();
    let far: Vec<i64> = (0..33).map(|token| token * 100).collect();
    for (name, content, parts) in [
        ("empty.txt", Vec::new(), &["empty.txt", "empty"][..]),
        ("short.txt", b"too short".to_vec(), &["short.txt", "too short", "9 tokens"]),
        ("latin.txt", [&b"caf"[..], &[0xe9], &b" ".repeat(100)].concat(), &["latin.txt", "UTF-8", "byte 3"]),
        ("text.csv", b"a,b\n".repeat(100), &["text.csv", "no known kind"]),
        ("lines.jsonl", b"{\"text\": \"fine\"}\nnot JSON\n".to_vec(), &["lines.jsonl:2"]),
        ("fields.jsonl", b"{\"body\": \"fine\"}\n".to_vec(), &["fields.jsonl:1", "text", "body"]),
        ("torn.parquet", b"PAR1 and no more".to_vec(), &["torn.parquet"]),
        ("odd.bin", vec![0; 101], &["odd.bin", "101 bytes"]),
        ("torn.safetensors", vec![1, 2, 3], &["torn.safetensors"]),
        ("rows.safetensors", integer_rows(&[("tokens", 11, &row)]), &["rows.safetensors", "11"]),
        ("names.safetensors", integer_rows(&[("ids", 33, &row)]), &["names.safetensors", "tokens", "ids"]),
        ("far.safetensors", integer_rows(&[("tokens", 33, &far)]), &["far.safetensors", "300", "256"]),
    ] {
        let folder = Folder::with_job(JOB);
        folder.write(name, content);
        for setting in
            [&[format!("data.train={name}")][..], &[format!("eval.data={name}"), "eval.every=9s".into()]]
        {
            let mut arguments = vec!["train", "job.toml"];
            arguments.extend(setting.iter().flat_map(|setting| ["--set", setting]));
            folder.shoal(&arguments).fails(parts, "");
        }
    }
    train_set(&["data.train=nowhere.txt"]).fails(&["nowhere.txt"], "");
    train_set(&["data.train=s3://bucket/data"]).fails(&["s3://bucket/data"], "");
    let folder = Folder::with_job(JOB);
    fs::create_dir(folder.join("hollow")).unwrap();
    folder.shoal(&["train", "job.toml", "--set", "data.train=hollow"]).fails(&["hollow"], "");
}

#[test]
fn labels_that_are_all_ignored_are_an_error_that_names_the_step() {
    let folder = Folder::with_job(JOB);
    let tokens: Vec<i64> = (0..8 * 32).map(|place| place % 200).collect();
    // The first four rows have targets, the others none.
    let labels: Vec<i64> = (0..8 * 32).map(|place| if place < 4 * 32 { 7 } else { -100 }).collect();
    folder.write("rows.safetensors", integer_rows(&[("labels", 32, &labels), ("tokens", 32, &tokens)]));
    let settings = ["--set", "data.train=rows.safetensors", "--set", "data.shuffle=false"];
    let outcome = folder.shoal(&[&["train", "job.toml"][..], &settings].concat());
    outcome.fails(&["step 2", "target"], "-100");
    assert_eq!(metrics(&folder.join("run")).len(), 1, "the step before it counts");
}

#[test]
fn a_tokenizer_that_does_not_fit_is_refused() {
    let words = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "unk_token": "?", "vocab": {"?": 0, "the": 1, "high": 70000}},
    });
    let folder = Folder::with_job(JOB);
    folder.write("tokenizer.json", words.to_string());
    folder.write("torn.json", &words.to_string()[..60]);
    let train = |name: &str| folder.shoal(&["train", "job.toml", "--set", &format!("data.tokenizer={name}")]);
    train("tokenizer.json").fails(&["tokenizer.json", "70001", "256"], "70001");
    train("torn.json").fails(&["torn.json"], "bytes");
    train("nowhere.json").fails(&["nowhere.json"], "bytes");
}

#[test]
fn the_run_folder_of_another_job_is_refused_by_the_key_that_differs() {
    let folder = Folder::with_job(JOB);
    folder.shoal(&["train", "job.toml"]).succeeds();
    let kept = files(&checkpoint_of(&folder.join("run"), 4));
    let lines = metrics(&folder.join("run"));
    folder.write("other.txt", "another text altogether, long enough for a few samples. ".repeat(20));
    for (setting, parts) in [
        ("train.global_batch=5", &["train.global_batch", "4", "5"][..]),
        ("train.optimizer.kind=sgd", &["train.optimizer.kind"]),
        ("train.seed=1", &["train.seed"]),
        ("data.sequence=16", &["data.sequence"]),
        ("data.shuffle=false", &["data.shuffle"]),
        ("data.train=other.txt", &["data.train"]),
        ("model.preset=llama-tiny", &["model.config"]),
        ("model.dropout=0.5", &["model.config"]),
    ] {
        let outcome = folder.shoal(&["train", "job.toml", "--set", setting]);
        outcome.fails(&[&["run", "another job"][..], parts].concat(), "checkpoint.to");
    }
    assert!(files(&checkpoint_of(&folder.join("run"), 4)) == kept, "the refused jobs changed a checkpoint");
    assert_eq!(metrics(&folder.join("run")), lines, "the refused jobs changed the metrics");
    let fewer = folder.shoal(&["train", "job.toml", "--set", "train.steps=3"]);
    fewer.fails(&["run", "already at step 4", "train.steps = 3"], "raise it");
    // What the state does not depend on may change: how long, how it is cut, what it is called, how fast it
    // learns; the last is told.
    let settings = [
        "train.steps=6",
        "plan.micro_batch=1",
        "name=renamed",
        "checkpoint.keep=5",
        "train.optimizer.lr=1e-4",
    ];
    let mut arguments = vec!["train", "job.toml"];
    arguments.extend(settings.iter().flat_map(|setting| ["--set", *setting]));
    let outcome = folder.shoal(&arguments).succeeds();
    assert!(outcome.stderr.contains("note: train.optimizer.lr was 0.001 there and is 0.0001 now"));
    assert_eq!(metrics(&folder.join("run")).len(), 6);
}

#[test]
fn weights_that_are_no_numbers_stop_the_first_step() {
    let folder = importing();
    let path = folder.join("model/model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<(String, _, _, Vec<u8>)> = file
        .tensors()
        .into_iter()
        .map(|(name, view)| (name, view.dtype(), view.shape().to_vec(), view.data().to_vec()))
        .collect();
    let spoilt = tensors.iter_mut().find(|(name, ..)| name.ends_with("h.1.mlp.c_fc.weight")).unwrap();
    spoilt.3[400..404].copy_from_slice(&f32::NAN.to_le_bytes());
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
    folder.shoal(&["train", "job.toml"]).fails(&["step 1", "loss", "NaN"], "imported weights");
    assert!(checkpoints(&folder.join("run")).is_empty(), "nothing worth keeping was made");
}

#[test]
fn a_run_that_diverges_keeps_its_last_good_checkpoint() {
    let folder = Folder::with_job(JOB);
    let settings = [
        "train.optimizer={kind=\"sgd\", lr=30.0, momentum=0.9}",
        "train.steps=500",
        "checkpoint.every=1 steps",
    ];
    let mut arguments = vec!["train", "job.toml"];
    arguments.extend(settings.iter().flat_map(|setting| ["--set", *setting]));
    let run = folder.join("run");
    let outcome = folder.shoal(&arguments);
    let lines = metrics(&run);
    let last = lines.len() as u64;
    assert!(last > 1, "some steps were good");
    assert!(column(&lines, "loss").iter().all(|loss| loss.is_finite()), "only numbers are recorded");
    let (failed, kept) = (format!("step {}", last + 1), format!("checkpoint of step {last}"));
    outcome.fails(&[&failed, "not a finite number"], &kept);
    // Again: it fails at the same step, and the checkpoint is still there.
    folder.shoal(&arguments).fails(&[&failed], &kept);
    assert!(checkpoint_of(&run, last).is_dir());
    folder.shoal(&["export", "run", "exported"]).succeeds();
    let bytes = fs::read(folder.join("exported/model.safetensors")).unwrap();
    for (name, tensor) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
        let (words, _) = tensor.data().as_chunks::<4>();
        let finite = words.iter().all(|word| f32::from_le_bytes(*word).is_finite());
        assert!(finite, "{name} of the last good checkpoint holds what is no number");
    }
}

#[test]
fn commands_that_read_a_model_say_what_is_missing() {
    let folder = Folder::with_job(JOB);
    folder.shoal(&["export", "nowhere", "out"]).fails(&["nowhere"], "run folder");
    folder.shoal(&["generate", "nowhere", "hello"]).fails(&["nowhere"], "run folder");
    folder.shoal(&["generate", ".", "hello"]).fails(&["config.json"], "config.json");
    folder.shoal(&["train", "job.toml"]).succeeds();
    folder.shoal(&["export", "run", "out", "--step", "3"]).fails(&["step 3"], "[4]");
    folder.shoal(&["generate", "run", ""]).fails(&["prompt is empty"], "at least one token");
    folder.shoal(&["generate", "run", "a", "--temperature=-1"]).fails(&["--temperature"], "0 takes");
    fs::remove_dir_all(folder.join("run/checkpoints")).unwrap();
    folder.shoal(&["export", "run", "out"]).fails(&["run", "no checkpoint"], "first checkpoint");
    folder.write("run/run.json", "{");
    folder.shoal(&["train", "job.toml"]).fails(&["run/run.json"], "remove");
}

/// A small file system in memory, unmounted when the test ends however it ends.
struct SmallDisk<'a>(&'a Path);

impl<'a> SmallDisk<'a> {
    /// `None` where this user may not mount anything.
    fn mount(at: &'a Path, size: &str) -> Option<SmallDisk<'a>> {
        fs::create_dir_all(at).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]).arg(at);
        let done = mount.output().is_ok_and(|output| output.status.success());
        done.then_some(SmallDisk(at))
    }

    fn grow(&self, size: &str) {
        let options = format!("remount,size={size}");
        let status = Command::new("mount").args(["-o", &options]).arg(self.0).status().unwrap();
        assert!(status.success());
    }
}

impl Drop for SmallDisk<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0).status();
    }
}

#[test]
fn a_full_disk_leaves_the_checkpoint_before_and_the_run_goes_on_when_there_is_space() {
    let folder = Folder::with_job(JOB);
    let run = folder.join("run");
    let command = ["train", "job.toml", "--set", "checkpoint.every=2 steps", "--set", "train.steps=8"];
    // One checkpoint of the model takes 1.6 MiB: there is space for one and a half.
    let Some(disk) = SmallDisk::mount(&run, "2500k") else {
        println!("SKIPPED: a file system cannot be mounted here, so a full disk was not tried");
        return;
    };
    folder.shoal(&command).fails(&["run/checkpoints", "the disk is full"], "what was saved before is intact");
    assert_eq!(
        checkpoints(&run),
        [checkpoint_of(&run, 2)],
        "the save that failed leaves nothing to be taken for one"
    );
    folder.shoal(&["export", "run", "exported"]).succeeds();
    folder.shoal(&command).fails(&["the disk is full"], "free at least");
    disk.grow("32m");
    let resumed = folder.shoal(&command).succeeds();
    assert!(resumed.stderr.contains("resumes after step 2"), "{}", resumed.stderr);
    let undisturbed = Folder::with_job(JOB);
    undisturbed.shoal(&command).succeeds();
    let undisturbed = undisturbed.join("run");
    assert_eq!(column(&metrics(&run), "loss"), column(&metrics(&undisturbed), "loss"));
    crate::common::assert_same_files(&checkpoint_of(&run, 8), &checkpoint_of(&undisturbed, 8));
}
