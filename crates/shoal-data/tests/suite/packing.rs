//! Whatever the tokens, the files and the sequence: every token but the first is a label exactly once, and
//! what fills the last window counts for nothing.

use crate::common::{Folder, all, open};
use proptest::prelude::*;
use shoal_data::IGNORED;

/// What the windows over `tokens` must be, worked out from the rule and not from offsets.
fn expected(tokens: &[i32], sequence: usize) -> (Vec<i32>, Vec<i32>) {
    let (mut inputs, mut labels) = (Vec::new(), Vec::new());
    for window in tokens[1..].chunks(sequence) {
        labels.extend_from_slice(window);
        labels.resize(labels.len() + sequence - window.len(), IGNORED);
    }
    for position in 0..labels.len() {
        inputs.push(tokens.get(position).copied().unwrap_or(0));
    }
    (inputs, labels)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]

    #[test]
    fn windows_cover_every_token_once(
        files in prop::collection::vec(prop::collection::vec(0u16..1000, 1..90), 1..5),
        sequence in 1usize..70,
    ) {
        let folder = Folder::new();
        for (number, tokens) in files.iter().enumerate() {
            let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
            folder.write(&format!("data/{number}.bin"), bytes);
        }
        let tokens: Vec<i32> = files.concat().into_iter().map(i32::from).collect();
        let mut spec = folder.bytes(folder.join("data"), sequence);
        spec.vocabulary = 1000;
        if tokens.len() < sequence + 1 {
            prop_assert!(open(&spec).is_err());
            return Ok(());
        }
        let dataset = open(&spec).unwrap();
        prop_assert_eq!(dataset.tokens(), tokens.len() as u64);
        let samples = all(&dataset);
        let (inputs, labels) = expected(&tokens, sequence);
        prop_assert_eq!(&samples.inputs, &inputs);
        prop_assert_eq!(&samples.labels, &labels);
        let counted: Vec<i32> = samples.labels.into_iter().filter(|&label| label != IGNORED).collect();
        prop_assert_eq!(&counted, &tokens[1..]);
    }

    #[test]
    fn documents_are_joined_by_one_zero_byte(
        documents in prop::collection::vec("[a-zé\n ]{0,20}", 1..8), sequence in 1usize..9
    ) {
        let folder = Folder::new();
        let texts: Vec<&str> = documents.iter().map(String::as_str).collect();
        let path = folder.write("data.jsonl", crate::common::jsonl(&texts));
        let with_text: Vec<&str> = texts.into_iter().filter(|text| !text.is_empty()).collect();
        let bytes: Vec<i32> = with_text.join("\0").bytes().map(i32::from).collect();
        let dataset = open(&folder.bytes(path, sequence));
        if bytes.len() < sequence + 1 {
            prop_assert!(dataset.is_err());
            return Ok(());
        }
        let dataset = dataset.unwrap();
        prop_assert_eq!(dataset.documents(), Some(with_text.len() as u64));
        let (inputs, labels) = expected(&bytes, sequence);
        let samples = all(&dataset);
        prop_assert_eq!(samples.inputs, inputs);
        prop_assert_eq!(samples.labels, labels);
    }
}

#[test]
fn a_window_that_fits_exactly_is_the_last() {
    let folder = Folder::new();
    let path = folder.write("data.txt", "abcdefg");
    let dataset = open(&folder.bytes(&path, 3)).unwrap();
    assert_eq!(dataset.len(), 2);
    let samples = all(&dataset);
    assert_eq!(samples.inputs, b"abcdef".map(i32::from));
    assert_eq!(samples.labels, b"bcdefg".map(i32::from));

    let path = folder.write("one-more.txt", "abcdefgh");
    let samples = all(&open(&folder.bytes(&path, 3)).unwrap());
    assert_eq!(samples.inputs[6..], [i32::from(b'g'), i32::from(b'h'), 0]);
    assert_eq!(samples.labels[6..], [i32::from(b'h'), IGNORED, IGNORED]);
}
