//! Files made or damaged to do harm: each is refused in words, without a panic and without the memory it
//! asks for.

use crate::common::{Folder, assert_refused, open, parquet, stored, tensors};
use parquet::basic::Compression;
use safetensors::Dtype;
use shoal_data::{Error, Inputs};

/// A file of a header as given and `data` zeros.
fn with_header(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

#[test]
fn safetensors_headers_are_not_believed() {
    let folder = Folder::new();
    let refused = |name: &str, content: Vec<u8>, reason: &str| {
        let name = format!("{name}.safetensors");
        let spec = folder.bytes(folder.write(&name, content), 3);
        assert_refused(&spec, &[&name, reason], "");
    };
    let tokens = |rest: &str| format!("{{\"tokens\":{{\"dtype\":\"I32\",{rest}}}}}");
    let good = tokens("\"shape\":[2,4],\"data_offsets\":[0,32]");
    open(&folder.bytes(folder.write("good.safetensors", with_header(&good, 32)), 3)).unwrap();

    refused("empty", Vec::new(), "0 bytes hold no header");
    refused("stub", vec![1, 2, 3], "3 bytes hold no header");
    refused("huge", u64::MAX.to_le_bytes().to_vec(), "claims a header of 18446744073709551615 bytes");
    let mut beyond = with_header(&good, 32);
    beyond[..8].copy_from_slice(&90_000_000u64.to_le_bytes());
    refused("beyond", beyond, "claims a header of 90000000 bytes");
    refused("no json", with_header("tokens = 3", 32), "expected");
    refused("binary", with_header("\u{1}\u{2}", 32), "expected");
    refused("deep", with_header(&"{\"a\":".repeat(50_000), 0), "line 1");
    refused("short", with_header(&good, 31), "its tensors take 32 bytes, and 31 follow");
    refused("long", with_header(&good, 33), "its tensors take 32 bytes, and 33 follow");
    let shape = tokens("\"shape\":[2,5],\"data_offsets\":[0,32]");
    refused("shape", with_header(&shape, 32), "shape");
    let backwards = tokens("\"shape\":[2,4],\"data_offsets\":[32,0]");
    refused("backwards", with_header(&backwards, 32), "nvalid");
    let overflow = tokens("\"shape\":[4611686018427387904,4],\"data_offsets\":[0,0]");
    refused("overflow", with_header(&overflow, 0), "verflow");
    let negative = tokens("\"shape\":[-2,4],\"data_offsets\":[0,32]");
    refused("negative", with_header(&negative, 32), "integer");
    let two = |first: &str, second: &str| {
        format!(
            "{{\"a\":{{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":{first}}},\
              \"tokens\":{{\"dtype\":\"U8\",\"shape\":[1,4],\"data_offsets\":{second}}}}}"
        )
    };
    refused("overlap", with_header(&two("[0,4]", "[2,6]"), 6), "nvalid");
    refused("hole", with_header(&two("[0,4]", "[6,10]"), 10), "nvalid");
    refused("outside", with_header(&two("[0,4]", "[4,8]"), 4), "its tensors take 8 bytes, and 4 follow");
}

#[test]
fn tensors_that_are_no_samples_are_refused() {
    let folder = Folder::new();
    let spec =
        |name: &str, content: Vec<u8>| folder.bytes(folder.write(&format!("{name}.safetensors"), content), 3);
    let ids = |count: usize| vec![0; count];

    let other = spec("other", tensors(&[("input_ids", Dtype::U8, &[1, 4], ids(4))]));
    assert_refused(&other, &["no tensor \"tokens\", only \"input_ids\""], "called \"tokens\"");
    let float = spec("float", tensors(&[("tokens", Dtype::F32, &[1, 4], ids(16))]));
    assert_refused(&float, &["\"tokens\"", "float.safetensors holds F32, not integers"], "as integers");
    let flags = spec("flags", tensors(&[("tokens", Dtype::BOOL, &[1, 4], ids(4))]));
    assert_refused(&flags, &["holds BOOL"], "as integers");
    let flat = spec("flat", tensors(&[("tokens", Dtype::U8, &[4], ids(4))]));
    assert_refused(&flat, &["flat.safetensors has shape [4], not [rows, tokens]"], "one sample a row");
    let none = spec("none", tensors(&[("tokens", Dtype::U8, &[0, 4], ids(0))]));
    assert_refused(&none, &["none.safetensors is empty"], "");

    let long = spec("long", tensors(&[("tokens", Dtype::U8, &[2, 9], ids(18))]));
    let parts = ["\"tokens\" in", "long.safetensors", "expected data.sequence + 1 = 4, found 9"];
    assert_refused(&long, &parts, "set data.sequence = 8");
    let thin = spec("thin", tensors(&[("tokens", Dtype::U8, &[2, 1], ids(2))]));
    assert_refused(&thin, &["expected data.sequence + 1 = 4, found 1"], "sequence + 1 tokens a row");

    let labelled = |name: &str, tokens: [usize; 2], labels: [usize; 2]| {
        let size = |shape: [usize; 2]| ids(shape[0] * shape[1]);
        let content = tensors(&[
            ("tokens", Dtype::U8, &tokens, size(tokens)),
            ("labels", Dtype::I8, &labels, size(labels)),
        ]);
        spec(name, content)
    };
    open(&labelled("fits", [2, 3], [2, 3])).unwrap();
    let labels = labelled("labels", [2, 4], [2, 5]);
    assert_refused(&labels, &["\"labels\" in", "expected data.sequence = 3, found 5"], "data.sequence = 5");
    let tokens = labelled("tokens", [2, 5], [2, 3]);
    assert_refused(&tokens, &["\"tokens\" in", "expected data.sequence = 3, or one more, found 5"], "");
    let rows = labelled("rows", [2, 3], [3, 3]);
    assert_refused(&rows, &["rows.safetensors has 2 rows", "3 rows of \"labels\""], "for each row");
}

#[test]
fn files_that_shrink_are_named_when_they_are_read() {
    let folder = Folder::new();
    let rows = stored(Dtype::U16, &[1, 2, 3, 4, 5, 6]);
    let bin = folder.write("data.bin", &rows);
    let safetensors = folder.write("data.safetensors", tensors(&[("tokens", Dtype::U16, &[2, 3], rows)]));
    let text = folder.write("data.txt", "abcdef");
    for path in [bin, safetensors, text] {
        let dataset = open(&folder.bytes(&path, 2)).unwrap();
        // What is read of a text is its prepared tokens.
        let tokens = folder.cached("tokens").pop().unwrap_or(path);
        let length = std::fs::metadata(&tokens).unwrap().len();
        std::fs::OpenOptions::new().write(true).open(&tokens).unwrap().set_len(length - 1).unwrap();
        let (mut inputs, mut labels) = ([0; 2], [0; 2]);
        dataset.read(0, 0, Inputs::Tokens(&mut inputs), &mut labels).unwrap();
        let last = dataset.len() - 1;
        let error = dataset.read(0, last, Inputs::Tokens(&mut inputs), &mut labels).unwrap_err();
        assert!(matches!(&error, Error::Shrank { path } if *path == tokens), "{error}");
        assert!(error.hint().unwrap().contains("leave the data"));
    }
}

#[test]
fn ids_are_checked_again_when_they_are_read() {
    let folder = Folder::new();
    let content =
        |id: i64| tensors(&[("tokens", Dtype::I32, &[2, 3], stored(Dtype::I32, &[1, 2, 3, 4, id, 6]))]);
    let path = folder.write("data.safetensors", content(5));
    let dataset = open(&folder.bytes(&path, 2)).unwrap();
    // Overwritten in place, so that the open file changes too.
    folder.write("data.safetensors", content(-7));
    let error = dataset.read(0, 1, Inputs::Tokens(&mut [0; 2]), &mut [0; 2]).unwrap_err();
    assert!(error.to_string().contains("row 1, column 1 of \"tokens\": the id -7"), "{error}");
}

#[test]
fn parquet_that_is_torn_or_something_else_is_refused() {
    let folder = Folder::new();
    let rows: Vec<Option<&[u8]>> = vec![Some(b"some text"); 10];
    let good = parquet(&rows, 4, Compression::SNAPPY);
    let torn = folder.write("torn.parquet", &good[..good.len() / 2]);
    let other = folder.write("other.parquet", "id,text\n1,abc\n");
    let empty = folder.write("empty.parquet", "");
    for path in [torn, other, empty] {
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        assert_refused(&folder.bytes(&path, 4), &["cannot read", &name, "as Parquet"], "copied whole");
    }
}

/// Opens `good` with every `stride`th byte changed in turn and says how often that was refused.
fn refused_with_one_byte_changed(name: &str, good: &[u8], stride: usize, change: impl Fn(u8) -> u8) -> usize {
    let folder = Folder::new();
    let refused = |place: &usize| {
        let mut bad = good.to_vec();
        bad[*place] = change(bad[*place]);
        // A name of its own each time: size and perhaps time stay what they were.
        let spec = folder.bytes(folder.write(&format!("{place} {name}"), bad), 3);
        open(&spec).is_err()
    };
    (0..good.len()).step_by(stride).filter(refused).count()
}

#[test]
fn no_damage_to_a_parquet_file_brings_the_process_down() {
    let texts: Vec<String> = (0..24).map(|number| format!("text number {}", number % 7)).collect();
    let rows: Vec<Option<&[u8]>> =
        texts.iter().enumerate().map(|(row, text)| (row % 5 != 0).then_some(text.as_bytes())).collect();
    let plain = parquet(&rows, 16, Compression::UNCOMPRESSED);
    let packed = parquet(&rows, 16, Compression::SNAPPY);
    assert!(refused_with_one_byte_changed("plain.parquet", &plain, 7, |byte| !byte) > plain.len() / 80);
    assert!(refused_with_one_byte_changed("packed.parquet", &packed, 5, |byte| byte ^ 1) > packed.len() / 80);
}

#[test]
fn no_damage_to_a_safetensors_file_brings_the_process_down() {
    let ids = stored(Dtype::I16, &[1, 2, 3, 4, 5, 6, 7, 8]);
    let good = tensors(&[("tokens", Dtype::I16, &[2, 4], ids)]);
    for change in [|byte: u8| !byte, |byte: u8| byte ^ 1, |byte: u8| byte.wrapping_add(1)] {
        assert!(refused_with_one_byte_changed("rows.safetensors", &good, 1, change) > good.len() / 2);
    }
}
