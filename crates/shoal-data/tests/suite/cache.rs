//! Preparation happens once, is never half done, and is done again when anything it depends on changes.

use crate::common::{Folder, all, byte_level_tokenizer, open};
use shoal_data::{Dataset, DatasetSpec, Error, Tokenizer};
use std::path::Path;
use std::sync::Arc;

/// Opens and says whether the source was read for it.
fn opened(spec: &DatasetSpec) -> (Dataset, bool) {
    let mut calls = 0;
    let dataset = Dataset::open(spec, &mut |_, _| calls += 1).unwrap();
    (dataset, calls > 0)
}

/// Sets a file's time, since two writes may fall into one tick of the clock.
fn touch(path: &Path, seconds: u64) {
    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
    std::fs::File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
}

#[test]
fn text_is_prepared_once() {
    let folder = Folder::new();
    let path = folder.write("data.txt", "hello world");
    let spec = folder.bytes(&path, 3);
    let (first, prepared) = opened(&spec);
    assert!(prepared);
    let (again, prepared) = opened(&spec);
    assert!(!prepared);
    assert_eq!(all(&first), all(&again));
    assert_eq!(first.fingerprint(), again.fingerprint());
    assert_eq!(first.documents(), again.documents());

    let mut longer = spec.clone();
    longer.sequence = 5;
    let (longer, prepared) = opened(&longer);
    assert!(!prepared, "tokens do not depend on the sequence");
    assert_ne!(longer.fingerprint(), first.fingerprint(), "samples do");
    assert_eq!(folder.cached("tokens").len(), 1);
    assert_eq!(folder.cached("part").len(), 0);
}

#[test]
fn what_tokens_depend_on_makes_them_anew() {
    let folder = Folder::new();
    folder.write("tokenizer.json", byte_level_tokenizer());
    let path = folder.write("data/a.jsonl", "{\"text\": \"hello world\", \"body\": \"other text\"}");
    let mut spec = folder.bytes(folder.join("data"), 3);
    spec.vocabulary = 400;
    let (before, _) = opened(&spec);

    touch(&path, 1_000_000_000);
    let (touched, prepared) = opened(&spec);
    assert!(prepared);
    assert_eq!(touched.fingerprint(), before.fingerprint(), "the samples are what they were");

    folder.write("data/b.jsonl", "{\"text\": \"more\"}");
    let (more, prepared) = opened(&spec);
    assert!(prepared);
    assert_eq!(more.documents(), Some(2));

    std::fs::remove_file(folder.join("data/b.jsonl")).unwrap();
    spec.text_field = "body".into();
    let (body, prepared) = opened(&spec);
    assert!(prepared);
    assert_ne!(body.fingerprint(), before.fingerprint());

    spec.tokenizer = Arc::new(Tokenizer::load("tokenizer.json", folder.path()).unwrap());
    assert!(opened(&spec).1);
    assert!(!opened(&spec).1);
}

#[test]
fn damaged_tokens_are_made_anew() {
    let folder = Folder::new();
    let spec = folder.bytes(folder.write("data.txt", "hello world"), 3);
    let (before, _) = opened(&spec);
    let expected = all(&before);
    let tokens = folder.cached("tokens").pop().unwrap();
    let good = std::fs::read(&tokens).unwrap();
    let mut other_magic = good.clone();
    other_magic[0] ^= 1;
    let mut other_version = good.clone();
    other_version[8] ^= 1;
    let mut other_width = good.clone();
    other_width[12] = 3;
    let mut endless = good.clone();
    endless[16..24].fill(0xff);
    let longer = [&good[..], b"x"].concat();
    let damaged = [
        &good[..good.len() - 1],
        &good[..20],
        b"",
        &other_magic,
        &other_version,
        &other_width,
        &endless,
        &longer,
    ];
    for damaged in damaged {
        std::fs::write(&tokens, damaged).unwrap();
        let (again, prepared) = opened(&spec);
        assert!(prepared, "{} bytes were believed", damaged.len());
        assert_eq!(all(&again), expected);
        assert_eq!(std::fs::read(&tokens).unwrap(), good);
    }
}

#[test]
fn a_failed_preparation_leaves_nothing() {
    let folder = Folder::new();
    let spec = folder.bytes(folder.write("data.jsonl", "{\"text\": \"fine\"}\n{\"text\": 3}\n"), 3);
    open(&spec).unwrap_err();
    assert!(folder.cached("tokens").is_empty() && folder.cached("part").is_empty());
}

#[test]
fn a_killed_preparation_is_taken_over() {
    let folder = Folder::new();
    let spec = folder.bytes(folder.write("data.txt", "hello world"), 3);
    opened(&spec);
    let tokens = folder.cached("tokens").pop().unwrap();
    let part = tokens.with_extension("part");
    std::fs::rename(&tokens, &part).unwrap();
    std::fs::write(&part, "half of something longer than the tokens will be".repeat(9)).unwrap();
    let (again, prepared) = opened(&spec);
    assert!(prepared);
    assert_eq!(again.tokens(), 11);
    assert!(folder.cached("part").is_empty());
}

#[test]
fn a_file_that_changes_while_it_is_prepared_is_refused() {
    let folder = Folder::new();
    let path = folder.write("data.txt", "hello world");
    let mut grew = false;
    let error = Dataset::open(&folder.bytes(&path, 3), &mut |_, _| {
        if !std::mem::replace(&mut grew, true) {
            std::fs::write(&path, "hello world, and more").unwrap();
        }
    });
    assert!(matches!(error, Err(Error::Changed { path: named }) if named == path));
    assert!(folder.cached("tokens").is_empty());
}

#[test]
fn of_many_that_open_at_once_one_prepares() {
    let folder = Folder::new();
    let spec = folder.bytes(folder.write("data.txt", "hello world ".repeat(100_000)), 64);
    let prepared: Vec<bool> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..6).map(|_| scope.spawn(|| opened(&spec).1)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(prepared.iter().filter(|prepared| **prepared).count(), 1);
}

#[test]
fn token_files_are_looked_through_once() {
    let folder = Folder::new();
    let path = folder.write("data.bin", [1, 0, 2, 0, 200, 0, 4, 0]);
    let mut spec = folder.bytes(&path, 3);
    assert!(opened(&spec).1);
    assert!(!opened(&spec).1);
    spec.vocabulary = 201;
    assert!(!opened(&spec).1, "the largest id is known");
    spec.vocabulary = 200;
    let error = open(&spec).unwrap_err();
    assert!(error.to_string().contains("token 2: the id 200"), "{error}");

    spec.vocabulary = 256;
    let note = folder.cached("checked").pop().unwrap();
    std::fs::write(&note, "{}").unwrap();
    assert!(opened(&spec).1, "a note that says nothing is none");
    touch(&path, 1_000_000_000);
    assert!(opened(&spec).1);
    folder.write("data.bin.json", "{\"dtype\": \"u16\"}");
    assert!(!opened(&spec).1, "the same type, said in words");
    folder.write("data.bin.json", "{\"dtype\": \"u32\"}");
    assert!(open(&spec).is_err(), "another type is another look");
}
