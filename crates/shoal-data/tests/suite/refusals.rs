//! What people get wrong, and what they are told: the file, the place in it, and what to do.

use crate::common::{
    Folder, assert_refused, jsonl, open, parquet, parquet_of, stored, tensors, word_tokenizer,
};
use parquet::basic::Compression;
use safetensors::Dtype;
use shoal_data::{DatasetSpec, Error, Tokenizer};
use std::sync::Arc;

#[test]
fn paths_that_lead_nowhere() {
    let folder = Folder::new();
    let spec = |source: &str| folder.bytes(folder.join(source), 4);
    assert_refused(&spec("absent.txt"), &["no file or folder", "absent.txt"], "check the path");

    folder.write("table.csv", "a,b");
    let kinds = ".txt, .jsonl, .parquet, .bin and .safetensors";
    assert_refused(&spec("table.csv"), &["table.csv is of no known kind", kinds], "convert it");
    folder.write("lines.jsonl.gz", "");
    assert_refused(&spec("lines.jsonl.gz"), &["lines.jsonl.gz"], "unpack");
    folder.write("array.json", "[]");
    assert_refused(&spec("array.json"), &["array.json"], ".jsonl");
    folder.write("no ending", "");
    assert_refused(&spec("no ending"), &["no ending is of no known kind"], "rename");

    folder.write("empty/README.md", "");
    assert_refused(&spec("empty"), &["the folder", "empty holds no", kinds], "hidden files");
    folder.write("mixed/a.txt", "a");
    folder.write("mixed/deep/b.jsonl", "{}");
    let parts = ["mixes kinds", "mixed/a.txt", "mixed/deep/b.jsonl"];
    assert_refused(&spec("mixed"), &parts, "one kind");

    folder.write("circle/a.txt", "a");
    std::os::unix::fs::symlink(folder.join("circle"), folder.join("circle/again")).unwrap();
    assert_refused(&spec("circle"), &["circle/again/again", "16 folders deep"], "link");
}

#[test]
fn object_stores() {
    let folder = Folder::new();
    for url in ["s3://bucket/data", "gs://b/x.txt", "az://c", "http://host/x.bin", "https://host/x"] {
        assert_refused(&folder.bytes(url, 4), &[url, "object store"], "copy it to a local folder");
    }
}

#[test]
fn too_little() {
    let folder = Folder::new();
    let spec = |name: &str, content: &str, sequence| folder.bytes(folder.write(name, content), sequence);
    assert_refused(&spec("zero.txt", "abc", 0), &["data.sequence is 0"], "set data.sequence");
    assert_refused(&spec("empty.txt", "", 4), &["empty.txt is empty"], "check how");
    assert_refused(&spec("empty.bin", "", 4), &["empty.bin is empty"], "check how");
    assert_refused(&spec("blank.jsonl", "\n\n", 4), &["blank.jsonl is empty"], "check how");
    assert_refused(&spec("nulls.jsonl", "{\"text\":null}\n{\"text\":\"\"}", 4), &["is empty"], "check how");
    let parts = ["short.txt is too short", "holds 4 tokens", "needs 5"];
    assert_refused(&spec("short.txt", "abcd", 4), &parts, "at most 3");
    assert_refused(&spec("one.txt", "a", 4), &["holds 1 tokens", "needs 5"], "add text");
    assert_refused(&spec("two.bin", "a\0b\0", usize::MAX / 4), &["holds 2 tokens"], "at most 1");
}

#[test]
fn text_that_is_not_utf8() {
    let folder = Folder::new();
    let refused = |name: &str, content: &[u8], place: &str| {
        let spec = folder.bytes(folder.write(name, content), 4);
        assert_refused(&spec, &[name, "not UTF-8", place], "UTF-8");
    };
    refused("latin.txt", b"caf\xe9 au lait", "byte 3");
    refused("torn.txt", b"abc\xe2\x82", "byte 3");
    let mut far = vec![b'x'; 3_000_000];
    far.push(0xff);
    refused("far.txt", &far, "byte 3000000");
    refused("lines.jsonl", b"{\"text\":\"a\"}\n{\"text\":\"\xff\"}\n", "byte 22");

    let rows: [Option<&[u8]>; 5] = [Some(b"a"), None, Some(b"b"), None, Some(b"\xff\xfe")];
    for rows_a_group in [1, 3, 10] {
        let file = parquet(&rows, rows_a_group, Compression::UNCOMPRESSED);
        refused(&format!("{rows_a_group}.parquet"), &file, "row 4");
    }
}

#[test]
fn lines_that_are_not_what_they_should_be() {
    let folder = Folder::new();
    let refused = |name: &str, content: &str, parts: &[&str], hint: &str| {
        let spec = folder.bytes(folder.write(name, content), 4);
        assert_refused(&spec, parts, hint);
    };
    let torn = "{\"text\": \"fine\"}\n\n{\"text\": \"torn\n";
    refused("torn.jsonl", torn, &["torn.jsonl:3: ", "control character", "column"], "one whole JSON object");
    refused("end.jsonl", "{\"text\": \"a\"", &["end.jsonl:1: EOF", "(column 12)"], "one whole JSON object");
    refused("list.jsonl", "[1]", &["list.jsonl:1: an array, not a JSON object"], "one whole JSON object");
    let other = format!("{}{{\"body\": \"x\", \"title\": \"y\"}}", jsonl(&["a"]));
    refused(
        "other.jsonl",
        &other,
        &["other.jsonl:2: no field \"text\", only \"body\", \"title\""],
        "text_field",
    );
    refused("none.jsonl", "{}", &["none.jsonl:1: no field \"text\", only none"], "text_field");
    refused("number.jsonl", "{\"text\": 3}", &["number.jsonl:1:", "\"text\" is a number"], "text_field");
}

#[test]
fn columns_that_are_not_what_they_should_be() {
    let folder = Folder::new();
    let mut spec = folder.bytes(folder.write("rows.parquet", parquet_of(&["some text"])), 4);
    spec.text_field = "body".into();
    let parts = ["rows.parquet has no column \"body\", only \"id\", \"text\", \"marks\""];
    assert_refused(&spec, &parts, "data.text_field");
    spec.text_field = "id".into();
    assert_refused(&spec, &["the column \"id\"", "rows.parquet holds INT32"], "data.text_field");
    spec.text_field = "marks".into();
    assert_refused(&spec, &["the column \"marks\"", "rows.parquet holds lists"], "data.text_field");
}

#[test]
fn a_model_that_is_too_small_for_the_tokenizer() {
    let folder = Folder::new();
    let mut spec = folder.bytes(folder.write("data.txt", "one two three"), 2);
    spec.vocabulary = 255;
    assert_refused(&spec, &["\"bytes\" has 256 token ids", "only 255"], "at least 256");

    folder.write("words.json", word_tokenizer());
    spec.tokenizer = Arc::new(Tokenizer::load("words.json", folder.path()).unwrap());
    spec.vocabulary = 70_000;
    assert_refused(&spec, &["words.json has 70001 token ids", "only 70000"], "at least 70001");
    spec.vocabulary = 70_001;
    open(&spec).unwrap();
}

#[test]
fn ids_that_the_model_does_not_have() {
    let folder = Folder::new();
    let bin = |name: &str, ids: &[u16]| {
        folder.write(name, ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>())
    };
    bin("parts/a.bin", &[1, 2, 3]);
    bin("parts/b.bin", &[4, 300, 5]);
    let mut spec = folder.bytes(folder.join("parts"), 2);
    let parts = ["parts/b.bin, token 1: the id 300", "vocabulary of 256"];
    assert_refused(&spec, &parts, "b.bin.json");
    assert!(folder.cached("checked").is_empty(), "what was refused is not noted as checked");
    spec.vocabulary = 301;
    open(&spec).unwrap();
    spec.vocabulary = 300;
    assert_refused(&spec, &parts[..1], "the model these tokens were made for");

    let rows = |tokens: &[i64], labels: &[i64]| {
        let file = tensors(&[
            ("tokens", Dtype::I64, &[2, 2], stored(Dtype::I64, tokens)),
            ("labels", Dtype::I64, &[2, 2], stored(Dtype::I64, labels)),
        ]);
        folder.bytes(folder.write(&format!("{tokens:?}{labels:?}.safetensors"), file), 2)
    };
    open(&rows(&[1, 2, 3, 4], &[-100, 2, 255, -100])).unwrap();
    let refused = |tokens: &[i64], labels: &[i64], place: &str| {
        assert_refused(&rows(tokens, labels), &[".safetensors", place], "made for");
    };
    refused(&[1, 2, 3, 256], &[0; 4], "row 1, column 1 of \"tokens\": the id 256");
    refused(&[1, -100, 3, 4], &[0; 4], "row 0, column 1 of \"tokens\": the id -100");
    refused(&[1, 2, 3, 4], &[0, 0, 256, 0], "row 1, column 0 of \"labels\": the id 256");
    refused(&[1, 2, 3, 4], &[0, -1, 0, 0], "row 0, column 1 of \"labels\": the id -1");
    refused(&[1, 2, i64::MAX, 4], &[0; 4], "row 1, column 0 of \"tokens\"");
}

#[test]
fn token_files_of_the_wrong_size_or_type() {
    let folder = Folder::new();
    let path = folder.write("odd.bin", [0; 7]);
    assert_refused(&folder.bytes(&path, 2), &["odd.bin has 7 bytes", "the 2 of one u16"], "odd.bin.json");
    folder.write("odd.bin.json", "{\"dtype\": \"u32\"}");
    assert_refused(&folder.bytes(&path, 2), &["odd.bin has 7 bytes", "the 4 of one u32"], "copied whole");
    folder.write("odd.bin.json", "{\"dtype\": \"f32\"}");
    assert_refused(&folder.bytes(&path, 2), &["odd.bin.json", "\"f32\""], "\"u16\"");
    folder.write("odd.bin.json", "dtype = u16");
    assert_refused(&folder.bytes(&path, 2), &["cannot read", "odd.bin.json"], "\"u16\"");
    folder.write("odd.bin.json", "{\"dtpye\": \"u16\"}");
    assert_refused(&folder.bytes(&path, 2), &["odd.bin.json", "missing field `dtype`"], "\"u16\"");
}

#[test]
fn a_cache_that_cannot_be_made() {
    let folder = Folder::new();
    let mut spec = folder.bytes(folder.write("data.txt", "some text"), 2);
    spec.cache = folder.write("a file", "").join("cache");
    assert_refused(&spec, &["a file/cache", "Not a directory"], "");
}

#[test]
fn errors_can_be_matched_on() {
    let folder = Folder::new();
    let spec = DatasetSpec::new(folder.join("no.txt"), Arc::new(Tokenizer::Bytes), 2, 256, folder.cache());
    assert!(matches!(open(&spec), Err(Error::Missing { path }) if path == folder.join("no.txt")));
}
