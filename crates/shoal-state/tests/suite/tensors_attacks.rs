//! safetensors files made to break their reader. Each is refused with a message that names the file and,
//! where there is one, the tensor; none panics, none makes the reader allocate what the header claims.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use proptest::prelude::*;
use safetensors::SafeTensors;
use shoal_state::Error;
use shoal_state::tensors::{Fault, TensorFile};
use tempfile::TempDir;

/// A file of this header, padded with spaces as writers do, and `data` bytes of zeros.
fn file_bytes(header: &str, data: usize) -> Vec<u8> {
    let padded = header.to_owned() + &" ".repeat(header.len().next_multiple_of(8) - header.len());
    let mut bytes = (padded.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(padded.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

fn open(bytes: &[u8]) -> Result<TensorFile, Error> {
    let dir = TempDir::new().expect("a temporary folder");
    let path = dir.path().join("model.safetensors");
    fs::write(&path, bytes).expect("written");
    TensorFile::open(&path)
}

/// The fault of a refused file, its message without the folder, and its hint.
fn refused(bytes: &[u8]) -> (Fault, String, String) {
    let error = open(bytes).expect_err("the file must be refused");
    let message = error.to_string();
    let hint = error.hint().expect("a refused file has a hint");
    let Error::TensorFile { path, fault } = error else { panic!("another error: {message}") };
    let message =
        message.strip_prefix(&path.display().to_string()).expect("the message names the file").to_owned();
    (fault, message, hint)
}

fn message_of(header: &str, data: usize) -> String {
    refused(&file_bytes(header, data)).1
}

const A: &str = r#""a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;

#[test]
fn a_sound_file_opens() {
    let file = open(&file_bytes(&format!(r#"{{"__metadata__":{{"format":"pt"}},{A}}}"#), 8)).expect("sound");
    assert_eq!(file.tensors()["a"].shape, [2]);
    assert_eq!(file.metadata()["format"], "pt");
}

#[test]
fn absurd_header_lengths_are_refused_before_anything_is_allocated() {
    let mut bytes = file_bytes(&format!("{{{A}}}"), 8);
    bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let (fault, message, hint) = refused(&bytes);
    assert_eq!(fault, Fault::HeaderTooLarge { bytes: u64::MAX });
    assert_eq!(message, ": the header claims 18446744073709551615 bytes; the format allows 100000000");
    assert!(hint.contains("is this a safetensors file?"), "{hint}");

    bytes[..8].copy_from_slice(&99_999_999u64.to_le_bytes());
    let (_, message, hint) = refused(&bytes);
    assert_eq!(message, ": the header claims 99999999 bytes, but only 64 follow");
    assert!(hint.contains("cut short"), "{hint}");
}

#[test]
fn files_without_a_header_are_refused() {
    assert_eq!(refused(b"").1, ": the file has 0 bytes, too few for a safetensors header");
    assert_eq!(refused(b"\x01\0\0\0\0\0\0").0, Fault::TooShort { bytes: 7 });
    assert!(message_of("PK not json", 0).starts_with(": the header is not a valid safetensors header: "));
    assert!(matches!(refused(&file_bytes("[]", 0)).0, Fault::HeaderContent { .. }));
    assert!(matches!(refused(&file_bytes("{\"\u{e9}", 0)[..]).0, Fault::HeaderContent { .. }));
    let mut not_utf8 = file_bytes(r#"{"x":1}"#, 0);
    not_utf8[10] = 0xff;
    assert!(matches!(refused(&not_utf8).0, Fault::HeaderContent { .. }));
    let deep = "[".repeat(100_000);
    assert!(matches!(refused(&file_bytes(&format!(r#"{{"a":{deep}"#), 0)).0, Fault::HeaderContent { .. }));
}

#[test]
fn headers_that_lie_about_one_tensor_are_refused() {
    let lies = [
        (
            r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,16]}}"#,
            8,
            "it ends at data byte 16, but the file has 8",
        ),
        (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}"#, 8, "its offsets are reversed (8 to 0)"),
        (
            r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#,
            8,
            "shape [3] of F32 does not fill its 8 bytes",
        ),
        (
            r#"{"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,8]}}"#,
            8,
            "shape [2] of BF16 does not fill its 8 bytes",
        ),
        (
            r#"{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}"#,
            1,
            "shape [3] of F4 does not fill its 1 bytes",
        ),
    ];
    for (header, data, reason) in lies {
        assert_eq!(message_of(header, data), format!(": tensor `a`: {reason}"));
    }
    let big = usize::MAX;
    let overflow = format!(r#"{{"a":{{"dtype":"F32","shape":[{big},{big}],"data_offsets":[0,8]}}}}"#);
    assert!(matches!(refused(&file_bytes(&overflow, 8)).0, Fault::ShapeOverflow { .. }));
    // Few enough elements, too many bytes.
    let overflow = format!(r#"{{"a":{{"dtype":"F64","shape":[{}],"data_offsets":[0,8]}}}}"#, big / 8);
    assert!(matches!(refused(&file_bytes(&overflow, 8)).0, Fault::ShapeOverflow { .. }));
}

#[test]
fn headers_whose_tensors_do_not_tile_the_file_are_refused() {
    let b = |start, end| {
        format!(r#""b":{{"dtype":"U8","shape":[{}],"data_offsets":[{start},{end}]}}"#, end - start)
    };
    let with_b = |start, end, data| message_of(&format!("{{{},{A}}}", b(start, end)), data);
    assert_eq!(with_b(4, 12, 12), ": tensor `b`: its bytes overlap those of tensor `a`");
    assert_eq!(with_b(9, 12, 12), ": tensor `b`: 1 bytes before it belong to no tensor");
    assert_eq!(message_of(&format!("{{{A}}}"), 11), ": 3 bytes at the end of the file belong to no tensor");
    assert_eq!(message_of("{}", 1), ": 1 bytes at the end of the file belong to no tensor");
    let twice = refused(&file_bytes(&format!("{{{A},{A}}}"), 8));
    assert!(twice.1.contains("`a` appears twice"), "{}", twice.1);
    assert!(twice.2.contains("safetensors file?"));
}

#[test]
fn truncated_files_are_refused_at_every_length() {
    let whole = file_bytes(&format!("{{{A}}}"), 8);
    open(&whole).expect("sound");
    for length in 0..whole.len() {
        refused(&whole[..length]);
    }
}

#[test]
fn malformed_entries_name_their_tensor_and_cannot_reach_the_terminal() {
    let unknown = message_of(r#"{"x\u001b[2J":{"dtype":"F31","shape":[],"data_offsets":[0,4]}}"#, 4);
    assert!(unknown.contains(r"`x\") && unknown.contains("F31"), "{unknown}");
    assert!(!unknown.contains('\u{1b}'));
    let negative = message_of(r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#, 4);
    assert!(negative.contains("`a`"), "{negative}");
    let metadata = message_of(r#"{"__metadata__":{"n":1}}"#, 0);
    assert!(metadata.contains("`__metadata__`"), "{metadata}");
}

#[test]
fn a_file_larger_than_memory_costs_only_its_header() {
    // Sparse: 512 GiB on paper, with one real tensor at the end.
    let huge = 1u64 << 39;
    let header = format!(
        r#"{{"huge":{{"dtype":"U8","shape":[{huge}],"data_offsets":[0,{huge}]}},"last":{{"dtype":"F32","shape":[1],"data_offsets":[{huge},{}]}}}}"#,
        huge + 4
    );
    let dir = TempDir::new().expect("a temporary folder");
    let path = dir.path().join("huge.safetensors");
    let prefix = file_bytes(&header, 0);
    fs::write(&path, &prefix).expect("written");
    let file = File::options().write(true).open(&path).expect("opened");
    file.write_all_at(&1.5f32.to_le_bytes(), prefix.len() as u64 + huge).expect("a sparse file");
    let mut out = [0.0];
    TensorFile::open(&path).expect("sound").read_f32("last", &mut out).expect("read");
    assert_eq!(out, [1.5]);
}

#[test]
fn reading_what_is_not_there_says_what_is() {
    let file = open(&file_bytes(&format!("{{{A}}}"), 8)).expect("sound");
    let missing = file.read_f32("b", &mut [0.0; 2]).expect_err("no such tensor");
    assert!(missing.to_string().ends_with("there is no tensor `b`; the nearest names are `a`"), "{missing}");
    let short = file.read_f32("a", &mut [0.0]).expect_err("the buffer is too small");
    assert!(short.to_string().ends_with("tensor `a` has 2 elements, the buffer 1"), "{short}");
    let integers =
        open(&file_bytes(r#"{"i":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}"#, 8)).expect("sound");
    let dtype = integers.read_f32("i", &mut [0.0]).expect_err("not a float");
    assert!(
        dtype.to_string().ends_with("tensor `i` holds I64 elements, which cannot be read as f32"),
        "{dtype}"
    );
    assert!(dtype.hint().expect("a hint").contains("convert"));
}

#[test]
fn a_file_that_shrinks_after_opening_is_an_error() {
    let dir = TempDir::new().expect("a temporary folder");
    let path = dir.path().join("model.safetensors");
    let bytes = file_bytes(&format!("{{{A}}}"), 8);
    fs::write(&path, &bytes).expect("written");
    let file = TensorFile::open(&path).expect("sound");
    File::options()
        .write(true)
        .open(&path)
        .expect("opened")
        .set_len(bytes.len() as u64 - 1)
        .expect("shortened");
    let error = file.read_f32("a", &mut [0.0; 2]).expect_err("the bytes are gone");
    assert!(error.hint().expect("a hint").contains("became shorter"), "{error}");
}

#[test]
fn what_is_no_file_is_refused() {
    let dir = TempDir::new().expect("a temporary folder");
    let folder = TensorFile::open(dir.path()).expect_err("a folder");
    assert!(folder.to_string().ends_with("cannot open: not a regular file"), "{folder}");
    let absent = TensorFile::open(&dir.path().join("absent")).expect_err("absent");
    assert!(absent.hint().expect("a hint").contains("check the path"));
    assert!(TensorFile::open(Path::new("/dev/zero")).is_err(), "a device has no end");
}

proptest! {
    /// Whatever happens to a file, it is refused or the reference implementation accepts it too.
    #[test]
    fn nothing_is_accepted_that_the_reference_refuses(
        changes in prop::collection::vec((0usize..200, any::<u8>()), 0..3),
        digits in prop::collection::vec((0usize..200, b'0'..=b'9'), 0..9),
    ) {
        let header = format!(r#"{{{A},"b":{{"dtype":"F16","shape":[2,2],"data_offsets":[8,16]}},"c":{{"dtype":"F32","shape":[0],"data_offsets":[16,16]}}}}"#);
        let mut bytes = file_bytes(&header, 16);
        let length = bytes.len();
        for (at, digit) in digits {
            // Keeps the JSON whole, so that what it says is judged.
            if bytes[at % length].is_ascii_digit() {
                bytes[at % length] = digit;
            }
        }
        for (at, byte) in changes {
            bytes[at % length] = byte;
        }
        match open(&bytes) {
            Ok(file) => {
                let reference = SafeTensors::deserialize(&bytes).expect("the reference accepts it");
                prop_assert_eq!(file.tensors().len(), reference.len());
                for (name, info) in file.tensors() {
                    let view = reference.tensor(name).expect("there too");
                    prop_assert_eq!(&info.shape[..], view.shape());
                }
            }
            Err(error) => prop_assert!(error.hint().is_some()),
        }
    }
}
