//! Documents as samples of their own: what stands around them, where long ones are cut, that padding is no
//! target, and that the same documents are the same samples whichever file they came from.

use crate::common::{Folder, all, assert_refused, byte_level_tokenizer, jsonl, open, parquet_of};
use shoal_data::{Dataset, DatasetSpec, Error, IGNORED, Inputs, Order, Tokenizer};
use std::sync::Arc;

const CLS: i32 = 261;
const SEP: i32 = 262;
const PAD: i32 = 263;
const MASK: i32 = 264;

/// The byte-level tokenizer with a BERT's special tokens.
fn bert_tokenizer() -> String {
    let mut json: serde_json::Value = serde_json::from_str(&byte_level_tokenizer()).unwrap();
    for (id, content) in [(CLS, "[CLS]"), (SEP, "[SEP]"), (PAD, "[PAD]"), (MASK, "[MASK]")] {
        let mut token = json["added_tokens"][0].clone();
        (token["id"], token["content"]) = (id.into(), content.into());
        json["added_tokens"].as_array_mut().unwrap().push(token);
    }
    json.to_string()
}

/// Documents of a file, in samples of `sequence`, with a BERT's tokenizer.
fn documents(folder: &Folder, name: &str, content: impl AsRef<[u8]>, sequence: usize) -> DatasetSpec {
    folder.write("tokenizer.json", bert_tokenizer());
    let tokenizer = Arc::new(Tokenizer::load("tokenizer.json", folder.path()).unwrap());
    let spec = DatasetSpec::new(folder.write(name, content), tokenizer, sequence, 265, folder.cache());
    DatasetSpec { masked: Some(3), documents: true, ..spec }
}

/// Bytes of a file's documents: no token stands around them, and zeros pad them.
fn bytes(folder: &Folder, name: &str, content: impl AsRef<[u8]>, sequence: usize) -> DatasetSpec {
    let spec = folder.bytes(folder.write(name, content), sequence);
    DatasetSpec { masked: Some(3), documents: true, vocabulary: 257, ..spec }
}

/// A sample without its masks: tokens, how many of them count, and where targets are.
fn restored(dataset: &Dataset, epoch: u64, index: u64) -> (Vec<i32>, usize, Vec<usize>) {
    let sequence = dataset.sequence();
    let (mut inputs, mut labels, mut length) = (vec![7; sequence], vec![7; sequence], [0]);
    dataset.read(epoch, index, Inputs::Padded(&mut inputs, &mut length), &mut labels).unwrap();
    let targets: Vec<usize> = (0..sequence).filter(|place| labels[*place] != IGNORED).collect();
    targets.iter().for_each(|place| inputs[*place] = labels[*place]);
    (inputs, length[0] as usize, targets)
}

fn ids(text: &str) -> Vec<i32> {
    text.bytes().map(i32::from).collect()
}

#[test]
fn a_document_is_framed_and_padded() {
    let folder = Folder::new();
    let tokenizer = Tokenizer::load("tokenizer.json", {
        folder.write("tokenizer.json", bert_tokenizer());
        folder.path()
    });
    let tokenizer = tokenizer.unwrap();
    let tokens = |text: &str| -> Vec<i32> {
        tokenizer.encode(text).unwrap().into_iter().map(|id| id as i32).collect()
    };
    // The second is too long for one sample; the third has no text, and is no document.
    let texts = ["gulls", "the kelp and foam", "", "a [SEP] b"];
    let dataset = open(&documents(&folder, "a.jsonl", jsonl(&texts), 10)).unwrap();
    assert_eq!(dataset.documents(), Some(3));
    let mut expected = Vec::new();
    for text in [texts[0], texts[1], texts[3]] {
        for piece in tokens(text).chunks(8) {
            let mut sample = [&[CLS], piece, &[SEP]].concat();
            let length = sample.len();
            sample.resize(10, PAD);
            expected.push((sample, length, piece.len()));
        }
    }
    assert!(expected.len() > 3, "one of them is cut");
    assert_eq!(dataset.len(), expected.len() as u64);
    for (index, (sample, length, own)) in expected.into_iter().enumerate() {
        for epoch in 0..20 {
            let (tokens, found, targets) = restored(&dataset, epoch, index as u64);
            assert_eq!((&tokens, found), (&sample, length), "sample {index}");
            // What stands around a document is no target, nor is a special token inside it.
            assert!(
                !targets.is_empty() && targets.iter().all(|place| (1..=own).contains(place)),
                "{targets:?}"
            );
            assert!(targets.iter().all(|place| tokens[*place] != SEP), "{targets:?}");
        }
    }
}

#[test]
fn bytes_have_no_frame_and_zeros_pad_them() {
    let folder = Folder::new();
    let dataset = open(&bytes(&folder, "a.jsonl", jsonl(&["kelp", "foam on the jetty", "x"]), 6)).unwrap();
    let samples: Vec<_> = (0..dataset.len()).map(|index| restored(&dataset, 0, index)).collect();
    let padded = |text: &str| {
        let mut sample = ids(text);
        sample.resize(6, 0);
        (sample, text.len())
    };
    let expected: Vec<_> =
        ["kelp", "foam o", "n the ", "jetty", "x"].iter().map(|text| padded(text)).collect();
    let found: Vec<_> = samples.iter().map(|(tokens, length, _)| (tokens.clone(), *length)).collect();
    assert_eq!(found, expected);
    assert!(samples.iter().all(|(_, length, targets)| targets.iter().all(|place| place < length)));
    // A file of text is one document.
    let one = open(&bytes(&folder, "b.txt", "kelp\nfoam\n", 6)).unwrap();
    assert_eq!((one.len(), one.documents()), (2, Some(1)));
}

#[test]
fn masks_follow_the_epoch_and_the_order_takes_every_document_once() {
    let folder = Folder::new();
    let texts: Vec<String> = (0..40).map(|index| format!("gull {index} and kelp {index}")).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let spec = bytes(&folder, "a.jsonl", jsonl(&texts), 32);
    let (dataset, again) = (open(&spec).unwrap(), open(&spec).unwrap());
    assert_eq!(all(&dataset), all(&again));
    let order = Order::new(dataset.len(), 7, true);
    let (first, second) = (dataset.batch(&order, 0..40).unwrap(), dataset.batch(&order, 40..80).unwrap());
    assert_ne!(first.labels, second.labels, "another epoch, other masks");
    // Read from the middle on, as a resumed run does.
    let rest = dataset.batch(&order, 23..40).unwrap();
    assert_eq!(rest.inputs, first.inputs[23 * 32..]);
    assert_eq!(rest.lengths, first.lengths[23..]);
    for epoch in [&first, &second] {
        let mut lengths = epoch.lengths.clone();
        let mut expected: Vec<i32> = texts.iter().map(|text| text.len() as i32).collect();
        lengths.sort_unstable();
        expected.sort_unstable();
        assert_eq!(lengths, expected);
    }
}

/// More documents than are looked up at once, of every size.
#[test]
fn every_piece_of_many_documents_is_found() {
    let folder = Folder::new();
    let texts: Vec<String> =
        (0..3000).map(|index| "abcdefghij".repeat(5)[..1 + index * 7 % 50].into()).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let dataset = open(&bytes(&folder, "a.jsonl", jsonl(&texts), 8)).unwrap();
    let pieces: Vec<&[u8]> = texts.iter().flat_map(|text| text.as_bytes().chunks(8)).collect();
    assert_eq!(dataset.len(), pieces.len() as u64);
    for (index, piece) in pieces.iter().enumerate() {
        let (tokens, length, _) = restored(&dataset, 0, index as u64);
        let expected: Vec<i32> = piece.iter().map(|byte| i32::from(*byte)).collect();
        assert_eq!(tokens[..length], expected, "sample {index}");
    }
}

#[test]
fn the_same_documents_are_the_same_data_and_others_are_not() {
    let folder = Folder::new();
    let texts = ["kelp", "foam on the jetty", "gulls"];
    let fingerprint = |spec: DatasetSpec| open(&spec).unwrap().fingerprint();
    let one = fingerprint(bytes(&folder, "a.jsonl", jsonl(&texts), 6));
    assert_eq!(one, fingerprint(bytes(&folder, "b.parquet", parquet_of(&texts), 6)));
    // The same tokens in other documents.
    let other = ["kelpfoam on", " the jetty", "gulls"];
    assert_ne!(one, fingerprint(bytes(&folder, "c.jsonl", jsonl(&other), 6)));
    assert_ne!(one, fingerprint(bytes(&folder, "a.jsonl", jsonl(&texts), 7)));
    let packed = DatasetSpec { documents: false, ..bytes(&folder, "a.jsonl", jsonl(&texts), 6) };
    assert_ne!(one, fingerprint(packed));
}

#[test]
fn what_is_in_the_cache_is_taken_and_what_is_damaged_is_made_anew() {
    let folder = Folder::new();
    let spec = bytes(&folder, "a.jsonl", jsonl(&["kelp", "foam on the jetty"]), 6);
    let before = all(&open(&spec).unwrap());
    let [ends] = folder.cached("ends").try_into().unwrap();
    let stored = std::fs::read(&ends).unwrap();
    assert_eq!(stored.len(), 16);
    std::fs::write(&ends, &stored[..8]).unwrap();
    assert_eq!(all(&open(&spec).unwrap()), before);
    assert_eq!(std::fs::read(&ends).unwrap(), stored);
    std::fs::remove_file(&ends).unwrap();
    assert_eq!(all(&open(&spec).unwrap()), before);
    // Of the right size, but not about these tokens.
    std::fs::write(&ends, [255; 16]).unwrap();
    assert!(matches!(open(&spec), Err(Error::Damaged { .. })));
    assert_refused(&spec, &["ends", "does not fit"], "remove it");
}

#[test]
fn what_has_no_documents_or_no_room_is_refused() {
    let folder = Folder::new();
    let spec = bytes(&folder, "a.bin", [1, 0, 2, 0, 3, 0], 2);
    assert_refused(&spec, &["a.bin", "where a document ends"], "data.samples");
    let spec = documents(&folder, "a.jsonl", jsonl(&["kelp"]), 2);
    assert_refused(&spec, &["data.sequence is 2", "stand around"], "more than 2");
}
