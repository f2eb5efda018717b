//! Masked tokens: the shares, that nothing but seed, epoch, sample and position decides, and what is left
//! alone.

use crate::common::{Folder, assert_refused, byte_level_tokenizer, open, stored, tensors};
use safetensors::Dtype;
use shoal_data::{Dataset, DatasetSpec, IGNORED, Inputs, Tokenizer};
use std::sync::Arc;

/// The mask of the byte tokenizer.
const MASK: i32 = 256;

/// Lines of some words, ends of documents among them as bytes 0.
fn text(bytes: usize) -> Vec<u8> {
    let words = b"kelp and foam on the jetty\n";
    (0..bytes).map(|index| if index % 97 == 96 { 0 } else { words[index % words.len()] }).collect()
}

fn masked(spec: DatasetSpec, seed: u64) -> DatasetSpec {
    DatasetSpec { masked: Some(seed), vocabulary: 257, ..spec }
}

fn sample(dataset: &Dataset, epoch: u64, index: u64) -> (Vec<i32>, Vec<i32>) {
    let (mut inputs, mut labels) = (vec![7; dataset.sequence()], vec![7; dataset.sequence()]);
    dataset.read(epoch, index, Inputs::Tokens(&mut inputs), &mut labels).unwrap();
    (inputs, labels)
}

#[test]
fn of_the_tokens_15_percent_are_targets_and_most_of_these_are_hidden() {
    let folder = Folder::new();
    let content = text(200_000);
    let spec = masked(folder.bytes(folder.write("a.txt", &content), 500), 1);
    let dataset = open(&spec).unwrap();
    let (mut ordinary, mut targets, mut hidden, mut replaced) = (0, 0, 0, 0);
    for index in 0..dataset.len() {
        let (inputs, labels) = sample(&dataset, 0, index);
        for (position, (input, label)) in inputs.into_iter().zip(labels).enumerate() {
            let Some(token) = content.get(index as usize * 500 + position).map(|byte| i32::from(*byte))
            else {
                assert_eq!(label, IGNORED, "past the end of the stream");
                continue;
            };
            if token == 0 {
                assert_eq!((input, label), (0, IGNORED), "the end of a document is left alone");
                continue;
            }
            ordinary += 1;
            if label == IGNORED {
                assert_eq!(input, token);
                continue;
            }
            assert_eq!(label, token);
            targets += 1;
            hidden += usize::from(input == MASK);
            replaced += usize::from(input != MASK && input != token);
            assert!(input == MASK || (1..256).contains(&input), "{input} is no byte of a text");
        }
    }
    let share = |part: usize, of: usize| part as f64 / of as f64;
    assert!((share(targets, ordinary) - 0.15).abs() < 0.005, "{targets} of {ordinary}");
    assert!((share(hidden, targets) - 0.8).abs() < 0.01, "{hidden} of {targets}");
    assert!((share(replaced, targets) - 0.1).abs() < 0.01, "{replaced} of {targets}");
}

#[test]
fn masks_follow_seed_epoch_and_sample_alone() {
    let folder = Folder::new();
    // The same text in every sample: what differs is the mask.
    let path = folder.write("a.txt", "kelp and foam on\n".repeat(200));
    let open_with = |seed| open(&masked(folder.bytes(&path, 34), seed)).unwrap();
    let (one, again, other) = (open_with(1), open_with(1), open_with(2));
    assert_eq!(sample(&one, 3, 5), sample(&again, 3, 5));
    let first = sample(&one, 3, 5);
    for (what, second) in
        [("seed", sample(&other, 3, 5)), ("epoch", sample(&one, 4, 5)), ("sample", sample(&one, 3, 6))]
    {
        assert_ne!(first, second, "another {what}");
    }
}

#[test]
fn a_sample_has_a_target_unless_all_of_it_is_special() {
    let folder = Folder::new();
    let dataset = open(&masked(folder.bytes(folder.write("a.txt", text(300)), 2), 9)).unwrap();
    for index in 0..dataset.len() {
        let (_, labels) = sample(&dataset, 0, index);
        assert!(labels.iter().any(|label| *label != IGNORED), "sample {index}");
    }
    let special = open(&masked(folder.bytes(folder.write("zeros.txt", [0; 9]), 4), 9)).unwrap();
    assert_eq!(sample(&special, 0, 0), (vec![0; 4], vec![IGNORED; 4]));
}

#[test]
fn rows_with_labels_are_taken_as_they_are_and_others_are_masked() {
    let folder = Folder::new();
    let tokens = stored(Dtype::I32, &(1..=40).collect::<Vec<i64>>());
    let labels = stored(Dtype::I32, &[5; 40]);
    let labelled = tensors(&[
        ("tokens", Dtype::I32, &[2, 20], tokens.clone()),
        ("labels", Dtype::I32, &[2, 20], labels),
    ]);
    // No mask is needed where nothing is masked.
    let spec = DatasetSpec {
        vocabulary: 256,
        ..masked(folder.bytes(folder.write("labelled.safetensors", labelled), 20), 1)
    };
    let expected = ((21..=40).collect(), vec![5; 20]);
    assert_eq!(sample(&open(&spec).unwrap(), 0, 1), expected);

    folder.write("tokenizer.json", with_mask());
    let tokenizer = Arc::new(Tokenizer::load("tokenizer.json", folder.path()).unwrap());
    let plain = tensors(&[("tokens", Dtype::I32, &[2, 20], tokens)]);
    let spec = DatasetSpec::new(folder.write("plain.safetensors", plain), tokenizer, 19, 262, folder.cache());
    let dataset = open(&DatasetSpec { masked: Some(1), ..spec }).unwrap();
    let (inputs, labels) = sample(&dataset, 0, 0);
    for (position, (input, label)) in inputs.into_iter().zip(labels).enumerate() {
        let token = position as i32 + 1;
        assert!(label == token || (label == IGNORED && input == token), "{position}: {input}, {label}");
    }
}

/// The byte-level tokenizer with a mask, id 261.
fn with_mask() -> String {
    let mut json: serde_json::Value = serde_json::from_str(&byte_level_tokenizer()).unwrap();
    let mut mask = json["added_tokens"][0].clone();
    (mask["id"], mask["content"]) = (261.into(), "[MASK]".into());
    json["added_tokens"].as_array_mut().unwrap().push(mask);
    json.to_string()
}

#[test]
fn a_file_tells_its_mask_and_its_special_tokens() {
    let folder = Folder::new();
    folder.write("tokenizer.json", with_mask());
    let tokenizer = Arc::new(Tokenizer::load("tokenizer.json", folder.path()).unwrap());
    let source = folder.write("a.txt", "the foam</s>".repeat(300));
    let spec = DatasetSpec::new(source, tokenizer, 64, 262, folder.cache());
    let dataset = open(&DatasetSpec { masked: Some(4), ..spec }).unwrap();
    let samples: Vec<_> = (0..dataset.len()).map(|index| sample(&dataset, 0, index)).collect();
    assert!(samples.iter().any(|(inputs, _)| inputs.contains(&261)));
    assert!(samples.iter().all(|(_, labels)| !labels.contains(&259)), "special tokens are no targets");
}

#[test]
fn without_a_mask_there_is_a_refusal() {
    let folder = Folder::new();
    let path = folder.write("a.txt", text(100));
    let spec = DatasetSpec { vocabulary: 256, ..masked(folder.bytes(&path, 8), 1) };
    assert_refused(&spec, &["bytes", "no room for a mask"], "257");

    folder.write("tokenizer.json", byte_level_tokenizer());
    let tokenizer = Arc::new(Tokenizer::load("tokenizer.json", folder.path()).unwrap());
    let spec = DatasetSpec { tokenizer, ..masked(folder.bytes(&path, 8), 1) };
    assert_refused(&DatasetSpec { vocabulary: 300, ..spec }, &["tokenizer.json", "[MASK]"], "data.tokenizer");

    let tokens = folder.write("a.bin", [1u8, 0].repeat(50));
    assert_refused(&masked(folder.bytes(tokens, 8), 1), &["did not make these tokens"], "data.tokenizer");
}
