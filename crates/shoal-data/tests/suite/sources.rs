//! Every kind of file, alone and in folders: the same text gives the same samples.

use crate::common::{Folder, all, byte_level_tokenizer, jsonl, open, parquet, parquet_of, stored, tensors};
use parquet::basic::{Compression, ZstdLevel};
use safetensors::Dtype;
use shoal_data::{DatasetSpec, IGNORED, Inputs, Samples, Tokenizer};
use std::sync::Arc;

const TEXTS: [&str; 3] = ["the first document, thé shortest", "then the other\nover two lines", "the end"];

fn little_endian<const WIDTH: usize>(ids: &[i32]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()[..WIDTH].to_vec()).collect()
}

/// The stream that samples were cut from.
fn tokens(samples: &Samples) -> Vec<i32> {
    let labels = samples.labels.iter().copied().filter(|&label| label != IGNORED);
    samples.inputs[..1].iter().copied().chain(labels).collect()
}

#[test]
fn the_same_text_gives_the_same_samples_whatever_holds_it() {
    let folder = Folder::new();
    folder.write("tokenizer.json", byte_level_tokenizer());
    let file = Tokenizer::load("tokenizer.json", folder.path()).unwrap();
    for (tokenizer, last) in [(Tokenizer::Bytes, i32::from(b'd')), (file, 260)] {
        let tokenizer = Arc::new(tokenizer);
        let spec = |source: &str| {
            DatasetSpec::new(folder.join(source), Arc::clone(&tokenizer), 6, 400, folder.cache())
        };
        for (number, text) in TEXTS.iter().enumerate() {
            folder.write(&format!("texts/part {number}.txt"), text);
        }
        let dataset = open(&spec("texts")).unwrap();
        let samples = all(&dataset);
        assert_eq!(dataset.documents(), Some(3));
        assert_eq!(tokens(&samples).len() as u64, dataset.tokens());
        assert_eq!(tokens(&samples).last(), Some(&last), "ended by a token, or the last byte itself");

        folder.write("lines.jsonl", format!("\n{}  \r\n\n", jsonl(&TEXTS)));
        folder.write("lines/b/2.jsonl", jsonl(&TEXTS[1..]).trim_end());
        folder.write("lines/a/1.jsonl", jsonl(&TEXTS[..1]));
        folder.write("rows.parquet", parquet_of(&TEXTS));
        folder.write("narrow.bin", little_endian::<2>(&tokens(&samples)));
        folder.write("wide.bin", little_endian::<4>(&tokens(&samples)));
        folder.write("wide.bin.json", "{\"dtype\": \"u32\", \"made_by\": \"a test\"}");
        let half = tokens(&samples).len() / 2;
        folder.write("parts/a.bin", little_endian::<2>(&tokens(&samples)[..half]));
        folder.write("parts/b.bin", little_endian::<4>(&tokens(&samples)[half..]));
        folder.write("parts/b.bin.json", "{\"dtype\": \"u32\"}");
        for source in ["lines.jsonl", "lines", "rows.parquet", "narrow.bin", "wide.bin", "parts"] {
            let other = open(&spec(source)).unwrap();
            assert_eq!(all(&other), samples, "{source}");
            assert_eq!(other.fingerprint(), dataset.fingerprint(), "{source}");
        }

        // Rows do not overlap on disk as windows do in a stream: each brings its own first token.
        let mut rows = Vec::new();
        for (inputs, labels) in samples.inputs.chunks(6).zip(samples.labels.chunks(6)) {
            if !labels.contains(&IGNORED) {
                rows.push(i64::from(inputs[0]));
                rows.extend(labels.iter().copied().map(i64::from));
            }
        }
        let shape = [rows.len() / 7, 7];
        for dtype in [Dtype::I64, Dtype::U64, Dtype::I32, Dtype::U32, Dtype::I16, Dtype::U16] {
            let bytes = tensors(&[("tokens", dtype, &shape, stored(dtype, &rows))]);
            let name = format!("{dtype} {last}.safetensors");
            folder.write(&name, bytes);
            let other = all(&open(&spec(&name)).unwrap());
            assert_eq!(other.inputs, samples.inputs[..shape[0] * 6], "{dtype}");
            assert_eq!(other.labels, samples.labels[..shape[0] * 6], "{dtype}");
        }
    }
}

#[test]
fn bytes_fit_tensors_of_bytes() {
    let folder = Folder::new();
    for (dtype, top) in [(Dtype::U8, 255), (Dtype::I8, 127)] {
        let file = tensors(&[("tokens", dtype, &[1, 3], stored(dtype, &[0, 1, top]))]);
        let path = folder.write(&format!("{dtype}.safetensors"), file);
        let samples = all(&open(&folder.bytes(path, 2)).unwrap());
        assert_eq!((samples.inputs, samples.labels), (vec![0, 1], vec![1, top as i32]), "{dtype}");
    }
}

#[test]
fn labels_of_their_own_replace_the_next_token() {
    let folder = Folder::new();
    let labels = [-100i64, 9, 8, 7, -100, 6];
    for columns in [3, 4] {
        let ids: Vec<i64> = (1..=2 * columns as i64).collect();
        let bytes = tensors(&[
            ("labels", Dtype::I16, &[2, 3], stored(Dtype::I16, &labels)),
            ("tokens", Dtype::U8, &[2, columns], stored(Dtype::U8, &ids)),
            ("weights", Dtype::F32, &[1], vec![0; 4]),
        ]);
        let path = folder.write("rows.safetensors", bytes);
        let dataset = open(&folder.bytes(path, 3)).unwrap();
        assert_eq!((dataset.len(), dataset.tokens()), (2, 2 * columns as u64));
        let samples = all(&dataset);
        let second = columns as i32;
        assert_eq!(samples.inputs, [1, 2, 3, second + 1, second + 2, second + 3]);
        assert_eq!(samples.labels, labels.map(|label| label as i32));
    }
}

#[test]
fn several_files_of_rows_follow_each_other() {
    let folder = Folder::new();
    for (name, ids) in [("a", vec![1, 2, 3]), ("b", vec![4, 5, 6, 7, 8, 9]), ("c", vec![10, 11, 12])] {
        let bytes = tensors(&[("tokens", Dtype::U16, &[ids.len() / 3, 3], stored(Dtype::U16, &ids))]);
        folder.write(&format!("rows/{name}.safetensors"), bytes);
    }
    let dataset = open(&folder.bytes(folder.join("rows"), 2)).unwrap();
    assert_eq!(dataset.len(), 4);
    assert_eq!(all(&dataset).inputs, [1, 2, 4, 5, 7, 8, 10, 11]);
    assert_eq!(all(&dataset).labels, [2, 3, 5, 6, 8, 9, 11, 12]);
}

#[test]
fn every_compression_of_parquet_is_read_and_nulls_are_passed_over() {
    let folder = Folder::new();
    let rows = [Some("ab"), None, Some(""), Some("cd"), None, Some("e")].map(|row| row.map(str::as_bytes));
    let zstd = Compression::ZSTD(ZstdLevel::default());
    for compression in [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::GZIP(Default::default()),
        Compression::LZ4_RAW,
        zstd,
    ] {
        for rows_a_group in [1, 2, 100] {
            let path = folder.write(
                &format!("{compression} {rows_a_group}.parquet"),
                parquet(&rows, rows_a_group, compression),
            );
            let dataset = open(&folder.bytes(path, 6)).unwrap();
            assert_eq!(dataset.documents(), Some(3));
            let read: Vec<u8> = tokens(&all(&dataset)).into_iter().map(|id| id as u8).collect();
            assert_eq!(read, b"ab\0cd\0e", "{compression}");
        }
    }
}

#[test]
fn the_text_may_be_in_another_field() {
    let folder = Folder::new();
    let mut spec = folder.bytes(folder.write("data.jsonl", "{\"content\": \"abcd\", \"text\": 5}\n"), 3);
    spec.text_field = "content".into();
    assert_eq!(all(&open(&spec).unwrap()).inputs, b"abc".map(i32::from));
}

#[test]
fn a_folder_is_its_visible_files_of_a_known_kind() {
    let folder = Folder::new();
    folder.write("data/b.TXT", "b1");
    folder.write("data/a/z.txt", "az");
    folder.write("data/empty.txt", "");
    folder.write("data/README.md", "not data");
    folder.write("data/.hidden.jsonl", "not data either");
    folder.write("data/.git/c.txt", "nor this");
    let samples = all(&open(&folder.bytes(folder.join("data"), 4)).unwrap());
    assert_eq!(samples.inputs, b"az\0b".map(i32::from));
}

#[test]
fn a_byte_order_mark_is_no_text() {
    let folder = Folder::new();
    let text = folder.write("marked.txt", "\u{feff}abc");
    let lines = folder.write("marked.jsonl", format!("\u{feff}{}", jsonl(&["abc"])));
    for path in [text, lines] {
        assert_eq!(all(&open(&folder.bytes(path, 2)).unwrap()).inputs, b"ab".map(i32::from));
    }
}

#[test]
fn characters_may_straddle_the_blocks_a_file_is_read_in() {
    let folder = Folder::new();
    // Three bytes a character: no power of two is a multiple, so every block ends within one.
    let text = "€".repeat(1_200_000);
    let path = folder.write("long.txt", &text);
    let dataset = open(&folder.bytes(path, 1000)).unwrap();
    assert_eq!(dataset.tokens(), text.len() as u64);
    let read: Vec<u8> = tokens(&all(&dataset)).into_iter().map(|id| id as u8).collect();
    assert!(read == text.as_bytes());
}

#[test]
fn a_long_document_is_encoded_in_chunks_as_it_would_be_whole() {
    let folder = Folder::new();
    folder.write("tokenizer.json", byte_level_tokenizer());
    let tokenizer = Arc::new(Tokenizer::load("tokenizer.json", folder.path()).unwrap());
    // Words, runs of spaces and lines of many lengths, several chunks long.
    let mut text = String::new();
    let mut number = 1u64;
    while text.len() < 1_500_000 {
        number = number.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let words = ["the", " other", "  thé", "\n", "\n\n   then", ". ", " the, the", "themes 42"];
        text.push_str(words[(number >> 60) as usize % words.len()]);
    }
    let path = folder.write("long.txt", &text);
    let spec = |source| DatasetSpec::new(source, Arc::clone(&tokenizer), 512, 261, folder.cache());
    let dataset = open(&spec(path)).unwrap();
    let mut whole: Vec<i32> = tokenizer.encode(&text).unwrap().into_iter().map(|id| id as i32).collect();
    whole.push(260);
    assert!(tokens(&all(&dataset)) == whole);

    let path = folder.write("long.jsonl", jsonl(&[&text]));
    assert_eq!(open(&spec(path)).unwrap().fingerprint(), dataset.fingerprint());
}

#[test]
fn ids_beyond_16_bits_are_kept() {
    let folder = Folder::new();
    folder.write("words.json", crate::common::word_tokenizer());
    let words = Arc::new(Tokenizer::load("words.json", folder.path()).unwrap());
    let path = folder.write("data.txt", "one high two high");
    let spec = DatasetSpec::new(path, Arc::clone(&words), 3, 70001, folder.cache());
    let samples = all(&open(&spec).unwrap());
    assert_eq!((samples.inputs, samples.labels), (vec![1, 70000, 2], vec![70000, 2, 70000]));

    let path = folder.write("data.bin", little_endian::<4>(&[1, 70000, 2]));
    let spec = DatasetSpec::new(path, words, 2, 70001, folder.cache());
    assert_eq!(all(&open(&spec).unwrap()).labels, [70000, 2], "a large vocabulary means u32");
}

#[test]
fn a_batch_follows_the_order_across_epochs() {
    let folder = Folder::new();
    let path = folder.write("data.txt", "abcdefghijk");
    let dataset = open(&folder.bytes(path, 2)).unwrap();
    let order = shoal_data::Order::new(dataset.len(), 5, true);
    let batch = dataset.batch(&order, 3..9).unwrap();
    for (row, position) in (3..9).enumerate() {
        let (mut inputs, mut labels) = ([0; 2], [0; 2]);
        dataset.read(0, order.index(position).1, Inputs::Tokens(&mut inputs), &mut labels).unwrap();
        assert_eq!(batch.inputs[2 * row..][..2], inputs);
        assert_eq!(batch.labels[2 * row..][..2], labels);
    }
}
