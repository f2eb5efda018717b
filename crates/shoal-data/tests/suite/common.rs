//! What the tests make their data with: a folder of its own for each, and the files in it.

use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, Int32Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use shoal_data::{Dataset, DatasetSpec, Error, Samples, Tokenizer};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A folder that is removed when the test ends.
pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a file, with the folders above it.
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        path
    }

    pub fn cache(&self) -> PathBuf {
        self.join("the cache")
    }

    /// The bytes of `source`, in samples of `sequence`.
    pub fn bytes(&self, source: impl AsRef<Path>, sequence: usize) -> DatasetSpec {
        DatasetSpec::new(source.as_ref(), Arc::new(Tokenizer::Bytes), sequence, 256, self.cache())
    }

    /// Files in the cache that end so.
    pub fn cached(&self, ending: &str) -> Vec<PathBuf> {
        let Ok(entries) = std::fs::read_dir(self.cache()) else { return Vec::new() };
        let paths = entries.map(|entry| entry.unwrap().path());
        paths.filter(|path| path.extension().is_some_and(|found| found == ending)).collect()
    }
}

pub fn open(spec: &DatasetSpec) -> Result<Dataset, Error> {
    Dataset::open(spec, &mut |done, total| assert!(done <= total))
}

/// All samples of a dataset in their own order.
pub fn all(dataset: &Dataset) -> Samples {
    let order = shoal_data::Order::new(dataset.len(), 0, false);
    dataset.batch(&order, 0..dataset.len()).unwrap()
}

/// The message and the hint that opening gives.
pub fn refusal(spec: &DatasetSpec) -> (String, String) {
    let error = open(spec).map(|dataset| dataset.len()).expect_err("the dataset opened");
    (error.to_string(), error.hint().unwrap_or_default())
}

/// Holds that opening is refused in a message with all of `parts` and a hint with `hint`.
#[track_caller]
pub fn assert_refused(spec: &DatasetSpec, parts: &[&str], hint: &str) {
    let (message, found) = refusal(spec);
    for part in parts {
        assert!(message.contains(part), "no {part:?} in {message:?}");
    }
    assert!(found.contains(hint), "no {hint:?} in the hint {found:?} of {message:?}");
}

pub fn jsonl(documents: &[&str]) -> String {
    let line = |text: &&str| format!("{}\n", serde_json::json!({"id": 7, "text": text}));
    documents.iter().map(line).collect()
}

/// A Parquet file with the columns `id` and `text`, `rows` rows a group; `None` is a null.
pub fn parquet(documents: &[Option<&[u8]>], rows: usize, compression: Compression) -> Vec<u8> {
    let schema = "message m { required int32 id; optional binary text (utf8); repeated int32 marks; }";
    let properties = WriterProperties::builder().set_compression(compression).build();
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut file = SerializedFileWriter::new(Vec::new(), schema, Arc::new(properties)).unwrap();
    for documents in documents.chunks(rows.max(1)) {
        let levels: Vec<i16> = documents.iter().map(|text| i16::from(text.is_some())).collect();
        let texts: Vec<ByteArray> = documents.iter().flatten().map(|text| text.to_vec().into()).collect();
        let ids: Vec<i32> = (0..documents.len() as i32).collect();
        let none = vec![0; documents.len()];
        let mut group = file.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<Int32Type>().write_batch(&ids, None, None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&texts, Some(&levels), None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<Int32Type>().write_batch(&[], Some(&none), Some(&none)).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    }
    file.into_inner().unwrap()
}

pub fn parquet_of(documents: &[&str]) -> Vec<u8> {
    let documents: Vec<_> = documents.iter().map(|text| Some(text.as_bytes())).collect();
    parquet(&documents, 2, Compression::SNAPPY)
}

/// A safetensors file of the named tensors: type, shape, bytes.
pub fn tensors(tensors: &[(&str, Dtype, &[usize], Vec<u8>)]) -> Vec<u8> {
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (*name, TensorView::new(*dtype, shape.to_vec(), data).unwrap()));
    safetensors::serialize(views, None).unwrap()
}

/// Values as they are stored in one of the integer types.
pub fn stored(dtype: Dtype, values: &[i64]) -> Vec<u8> {
    let width = dtype.bitsize() / 8;
    values.iter().flat_map(|value| value.to_le_bytes()[..width].to_vec()).collect()
}

/// A byte-level BPE with three merges and an end of text: small, but of the kind real models use.
pub fn byte_level_tokenizer() -> String {
    let mut characters: Vec<char> = Vec::new();
    let mut replaced = 0x100;
    for byte in 0..=255u8 {
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        if printable {
            characters.push(char::from(byte));
        } else {
            characters.push(char::from_u32(replaced).unwrap());
            replaced += 1;
        }
    }
    let mut vocabulary: Vec<String> = characters.iter().map(char::to_string).collect();
    vocabulary.extend(["th", "the", "Ġthe"].map(String::from));
    let vocabulary: serde_json::Map<_, _> =
        vocabulary.into_iter().enumerate().map(|(id, token)| (token, id.into())).collect();
    let split = serde_json::json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true
    });
    serde_json::json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": {"Fixed": 16}, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "!"
        },
        "added_tokens": [
            {"id": 259, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
             "normalized": false, "special": true},
            {"id": 260, "content": "<|endoftext|>", "single_word": false, "lstrip": false, "rstrip": false,
             "normalized": false, "special": true}
        ],
        "normalizer": null,
        "pre_tokenizer": split,
        "post_processor": null,
        "decoder": split,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": vocabulary, "merges": ["t h", "th e", "Ġ the"]
        }
    })
    .to_string()
}

/// Whole words only, nothing that ends a document.
pub fn word_tokenizer() -> String {
    serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {
            "type": "WordLevel", "unk_token": "?",
            "vocab": {"?": 0, "one": 1, "two": 2, "three": 3, "high": 70000}
        }
    })
    .to_string()
}
