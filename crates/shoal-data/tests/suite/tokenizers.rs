//! Tokenizers: bytes, and files of the format Hugging Face uses.

use crate::common::{Folder, byte_level_tokenizer, word_tokenizer};
use shoal_data::Tokenizer;

#[test]
fn bytes_are_their_own_tokens() {
    let bytes = Tokenizer::load("bytes", "/nowhere".as_ref()).unwrap();
    assert_eq!(bytes.vocabulary(), 256);
    let ids = bytes.encode("aé").unwrap();
    assert_eq!(ids, [97, 0xc3, 0xa9]);
    assert_eq!(bytes.decode(&ids), "aé");
    assert_eq!(bytes.decode(&[97, 0xc3, 98]), "a\u{fffd}b", "half a character");
}

#[test]
fn a_file_is_read_relative_to_the_job_and_its_added_tokens_count() {
    let folder = Folder::new();
    folder.write("model/tokenizer.json", byte_level_tokenizer());
    let tokenizer = Tokenizer::load("model/tokenizer.json", folder.path()).unwrap();
    assert_eq!(tokenizer.vocabulary(), 261);
    assert_eq!(tokenizer.end_of_document(), Some(260), "the end of text comes before the end of a turn");
    let ids = tokenizer.encode("the other thé").unwrap();
    assert_eq!(ids, [257, 32, 111, 257, 114, 32, 256, 0xc3, 0xa9]);
    assert_eq!(tokenizer.decode(&ids), "the other thé");
    assert_eq!(tokenizer.encode("a<|endoftext|>b").unwrap(), [97, 260, 98]);
    let long = tokenizer.encode("a long text that the file would cut off after four tokens").unwrap();
    assert!(long.len() > 16, "the file's truncation and padding do not apply: {long:?}");

    let by_folder = Tokenizer::load("model", folder.path()).unwrap();
    assert_eq!(by_folder.fingerprint(), tokenizer.fingerprint());
}

#[test]
fn a_file_without_an_end_of_text_has_none() {
    let folder = Folder::new();
    folder.write("words.json", word_tokenizer());
    let tokenizer = Tokenizer::load("words.json", folder.path()).unwrap();
    assert_eq!(tokenizer.vocabulary(), 70001, "ids have a gap; the highest counts");
    assert_eq!(tokenizer.end_of_document(), None);
    assert_eq!(tokenizer.encode("one two four").unwrap(), [1, 2, 0]);
    assert_eq!(tokenizer.decode(&[1, 99, 2]), "one two", "no token has the id 99");
}

#[test]
fn fingerprints_follow_the_content() {
    let folder = Folder::new();
    folder.write("a.json", word_tokenizer());
    folder.write("b.json", word_tokenizer());
    folder.write("c.json", byte_level_tokenizer());
    let print = |name: &str| Tokenizer::load(name, folder.path()).unwrap().fingerprint();
    assert_eq!(print("a.json"), print("b.json"));
    assert_ne!(print("a.json"), print("c.json"));
    assert_ne!(print("bytes"), print("c.json"));
}

#[test]
fn a_file_that_is_no_tokenizer_is_refused_by_name() {
    let folder = Folder::new();
    folder.write("torn.json", &byte_level_tokenizer()[..500]);
    folder.write("other.json", "{\"architectures\": []}");
    for (name, reason) in [("torn.json", "EOF"), ("other.json", "expected"), ("absent.json", "No such file")]
    {
        let error = Tokenizer::load(name, folder.path()).expect_err("it loaded");
        let message = error.to_string();
        assert!(message.contains(name) && message.contains(reason), "{message}");
        assert!(error.hint().unwrap().contains("data.tokenizer"));
    }
}
