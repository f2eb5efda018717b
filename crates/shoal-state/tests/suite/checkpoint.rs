//! Checkpoints as a run uses them: save, list, resume from the newest that is whole, remove the old. Any
//! byte that changes on the disk is noticed.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use shoal_state::Error;
use shoal_state::checkpoint::{Entry, Header, Store};
use tempfile::TempDir;

fn header(step: u64) -> Header {
    Header {
        extra: BTreeMap::from([("schedule".to_owned(), serde_json::json!({"warmup": 100, "final": 0.1}))]),
        ..crate::common::header(step)
    }
}

fn save(store: &Store, step: u64, value: f32) -> PathBuf {
    let weights = [value; 6];
    let moments = [value / 2.0; 6];
    let entries = [
        Entry { name: "w", role: "parameter", shape: &[2, 3], data: &weights },
        Entry { name: "w", role: "first_moment", shape: &[2, 3], data: &moments },
    ];
    store.save(header(step), entries).expect("saved").path
}

fn open(dir: &TempDir) -> Store {
    Store::open(&dir.path().join("checkpoints")).expect("opened")
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> =
        fs::read_dir(dir).expect("listed").map(|entry| entry.expect("listed").path()).collect();
    paths.sort();
    paths
}

#[test]
fn a_checkpoint_comes_back_as_it_was_saved() {
    let dir = TempDir::new().expect("a temporary folder");
    let store = open(&dir);
    assert!(store.latest().expect("an empty folder is no error").is_none());
    save(&store, 100, 1.0);
    let path = save(&store, 200, 2.0);
    assert!(path.ends_with("checkpoints/step-00000200-save-1-part-1-of-1"), "{path:?}");

    assert_eq!(store.list().expect("listed"), [100, 200]);
    let (checkpoint, skipped) = store.latest().expect("whole").expect("there is one");
    assert!(skipped.is_empty());
    assert_eq!(checkpoint.header(), &header(200));
    let [manifest] = checkpoint.manifests() else { panic!("one part") };
    assert_eq!((checkpoint.id(), manifest.part, manifest.of), (1, 1, 1));
    let files: Vec<&str> = manifest.shards.iter().map(|shard| shard.file.as_str()).collect();
    assert_eq!(files, ["first_moment-00001.safetensors", "parameter-00001.safetensors"]);
    assert_eq!(manifest.shards[1].tensors[0].shape, [2, 3]);

    let mut out = [0.0; 6];
    checkpoint.read("w", "parameter", 0..6, &mut out).expect("read");
    assert_eq!(out, [2.0; 6]);
    checkpoint.read("w", "first_moment", 0..6, &mut out).expect("read");
    assert_eq!(out, [1.0; 6]);
    store.load(100).expect("whole").read("w", "parameter", 0..6, &mut out).expect("read");
    assert_eq!(out, [1.0; 6]);

    let no_role = checkpoint.read("w", "momentum", 0..6, &mut out).expect_err("not saved");
    assert!(no_role.to_string().ends_with("the checkpoint holds no momentum of tensor `w`"), "{no_role}");
    assert!(checkpoint.contains("w", "parameter") && !checkpoint.contains("v", "parameter"));
    checkpoint.read("w", "parameter", 2..5, &mut out[..3]).expect("read");
    assert_eq!(out[..4], [2.0, 2.0, 2.0, 1.0]);
    let short = checkpoint.read("w", "parameter", 0..6, &mut out[1..]).expect_err("too small");
    let message = "elements 0 to 6 of tensor `w` were asked for, which has 6; the buffer has 5";
    assert!(short.to_string().ends_with(message), "{short}");
    assert!(checkpoint.read("w", "parameter", 2..7, &mut out[..5]).is_err(), "past the end");
    let absent = store.load(300).expect_err("not saved");
    assert!(absent.to_string().ends_with("there is no checkpoint of step 300"), "{absent}");
    assert_eq!(absent.hint().expect("a hint"), "the checkpoints there: [100, 200]");
}

#[test]
fn a_tensor_larger_than_a_shard_is_split_and_joined() {
    let dir = TempDir::new().expect("a temporary folder");
    let store = open(&dir).with_shard_bytes_max(40);
    let large: Vec<f32> = (0..25).map(|index| index as f32).collect();
    let entries = ["a", "b", "c"].map(|name| {
        let (shape, data): (&[usize], _) =
            if name == "b" { (&[5, 5], &large[..]) } else { (&[4], &large[..4]) };
        Entry { name, role: "parameter", shape, data }
    });
    store.save(header(1), entries).expect("saved");
    let checkpoint = store.load(1).expect("whole");
    let layout: Vec<Vec<(&str, u64, u64)>> = checkpoint.manifests()[0]
        .shards
        .iter()
        .map(|shard| {
            shard.tensors.iter().map(|entry| (entry.name.as_str(), entry.start, entry.end)).collect()
        })
        .collect();
    let expected =
        [vec![("a", 0, 4)], vec![("b", 0, 10)], vec![("b", 10, 20)], vec![("b", 20, 25), ("c", 0, 4)]];
    assert_eq!(layout, expected);
    let mut out = [0.0; 25];
    checkpoint.read("b", "parameter", 0..25, &mut out).expect("read");
    assert!(out[..] == large[..]);
    checkpoint.read("c", "parameter", 0..4, &mut out[..4]).expect("read");
    assert!(out[..4] == large[..4]);
}

#[test]
fn any_changed_byte_is_noticed_and_the_older_checkpoint_used() {
    let dir = TempDir::new().expect("a temporary folder");
    let store = open(&dir);
    save(&store, 100, 1.0);
    let newest = save(&store, 200, 2.0);
    let mut noticed = 0;
    for path in files(&newest) {
        let sound = fs::read(&path).expect("read");
        for at in 0..sound.len() {
            let mut changed = sound.clone();
            changed[at] ^= 0x20;
            fs::write(&path, &changed).expect("written");
            let (checkpoint, skipped) =
                store.latest().expect("the older one is whole").expect("there is one");
            assert_eq!(checkpoint.header().step, 100, "byte {at} of {path:?}");
            assert_eq!(skipped.len(), 1);
            assert_eq!(skipped[0].step, 200);
            let message = skipped[0].to_string();
            assert!(
                message.starts_with("checkpoint of step 200 skipped: ") && message.contains("hash"),
                "{message}"
            );
            noticed += 1;
        }
        fs::write(&path, &sound[..sound.len() - 1]).expect("written");
        assert_eq!(store.latest().expect("whole").expect("some").0.header().step, 100, "{path:?} cut short");
        assert_eq!(store.list().expect("listed"), [100]);
        fs::remove_file(&path).expect("removed");
        assert_eq!(store.latest().expect("whole").expect("some").0.header().step, 100, "{path:?} missing");
        fs::write(&path, &sound).expect("written");
    }
    assert!(noticed > 1000);
    assert_eq!(store.latest().expect("whole").expect("some").0.header().step, 200);
}

#[test]
fn a_run_never_starts_anew_because_its_checkpoints_went_bad() {
    let dir = TempDir::new().expect("a temporary folder");
    let store = open(&dir);
    for step in [100, 200] {
        let path = save(&store, step, 1.0);
        let shard = path.join("parameter-00001.safetensors");
        let file = File::options().write(true).open(shard).expect("opened");
        file.set_len(step).expect("cut");
    }
    let error = store.latest().expect_err("none is whole");
    let Error::NoneValid { skipped, .. } = &error else { panic!("{error}") };
    assert_eq!(skipped.iter().map(|skip| skip.step).collect::<Vec<_>>(), [200, 100]);
    let message = error.to_string();
    assert!(message.contains("none of the 2 checkpoints can be used: step 200: "), "{message}");
    assert!(
        message.contains("parameter-00001.safetensors: the shard has 100 bytes, the manifest says"),
        "{message}"
    );
    assert!(error.hint().expect("a hint").contains("nothing was removed"));
    assert!(store.load(100).expect_err("cut").hint().expect("a hint").contains("earlier"));

    fs::remove_file(dir.path().join("checkpoints/step-00000100-save-1-part-1-of-1/manifest.json"))
        .expect("removed");
    fs::remove_dir_all(dir.path().join("checkpoints/step-00000200-save-1-part-1-of-1")).expect("removed");
    assert!(
        matches!(store.latest(), Err(Error::NoneValid { .. })),
        "a folder without a manifest is not nothing"
    );
}

#[test]
fn a_manifest_of_another_format_or_step_is_not_read() {
    let dir = TempDir::new().expect("a temporary folder");
    let store = open(&dir);
    save(&store, 100, 1.0);
    let path = save(&store, 200, 2.0).join("manifest.json");
    let text = fs::read_to_string(&path).expect("read");
    let rewritten = |from: &str, to: &str| {
        let body =
            text[..text.find(",\n  \"blake3\"").expect("every shard's hash has more indentation")].to_owned();
        let body = body.replacen(from, to, 1);
        let hash = blake3::hash(body.as_bytes()).to_hex();
        fs::write(&path, format!("{body},\n  \"blake3\": \"{hash}\"\n}}\n")).expect("written");
    };

    rewritten("\"format\": 2", "\"format\": 3");
    let error = store.latest().expect_err("falling back would lose the newer program's work");
    assert!(
        error.to_string().ends_with("the checkpoint has format 3; this program reads up to 2"),
        "{error}"
    );
    assert!(error.hint().expect("a hint").contains("version of the program"));

    rewritten("\"step\": 200", "\"step\": 300");
    let error = store.load(200).expect_err("another step's");
    assert!(error.to_string().ends_with("the manifest is of step 300, the folder of step 200"), "{error}");
    rewritten("\"id\": 1", "\"id\": 4");
    let error = store.load(200).expect_err("another save's");
    assert!(error.to_string().contains("is of step-00000200-save-4-part-1-of-1, the folder of"), "{error}");
    rewritten("\"block_bytes\": 4194304", "\"block_bytes\": 0");
    let error = store.load(200).expect_err("no size of a block");
    assert!(error.to_string().contains("not hashed in blocks of 0 bytes"), "{error}");
    rewritten("\"block_bytes\": 4194304", "\"block_bytes\": 50");
    let error = store.load(200).expect_err("too few hashes");
    assert!(error.to_string().contains("has 1 hashes, not 2"), "{error}");
    rewritten("parameter-00001", "../step-00000100/parameter-00001");
    let error = store.load(200).expect_err("outside");
    assert!(error.to_string().contains("would lie outside the checkpoint"), "{error}");
    rewritten("\"end\": 6", "\"end\": 5");
    let error = store.load(200).expect_err("not what the shard holds");
    assert!(error.to_string().contains("does not hold the manifest's slice of \"w\""), "{error}");
    rewritten("2,\n            3", "2,\n            4");
    let error = store.load(200).expect_err("not the whole tensor");
    assert!(error.to_string().contains("are not the whole tensor"), "{error}");
    rewritten("", "");
    assert_eq!(store.load(200).expect("as it was saved").header().step, 200);
}

#[test]
fn the_old_ones_are_collected_and_the_newest_whole_one_never() {
    let dir = TempDir::new().expect("a temporary folder");
    let store = open(&dir);
    for step in [1, 2, 3, 4, 5] {
        save(&store, step, 1.0);
    }
    assert_eq!(store.collect(3).expect("collected"), [1, 2]);
    assert_eq!(store.list().expect("listed"), [3, 4, 5]);
    fs::write(dir.path().join("checkpoints/step-00000005-save-1-part-1-of-1/manifest.json"), "{}")
        .expect("spoilt");
    assert_eq!(store.collect(1).expect("collected"), [3], "the spoilt one does not count as kept");
    assert_eq!(store.list().expect("listed"), [4]);
    assert_eq!(store.collect(0).expect("collected"), [0u64; 0]);
    assert_eq!(store.latest().expect("whole").expect("some").0.header().step, 4);
}

#[test]
fn leftovers_are_tidied_by_the_writer_and_left_by_a_reader() {
    let dir = TempDir::new().expect("a temporary folder");
    save(&open(&dir), 100, 1.0);
    let root = dir.path().join("checkpoints");
    let partial = root.join("step-00000200-save-1-part-1-of-1.partial");
    fs::create_dir(&partial).expect("made");
    fs::write(partial.join("parameter-00001.safetensors"), "half").expect("written");
    fs::create_dir(root.join("mine.partial")).expect("made");
    let reader = Store::open_existing(&root).expect("opened");
    assert_eq!(reader.latest().expect("whole").expect("some").0.header().step, 100);
    assert!(partial.exists(), "a run may be writing it");
    open(&dir);
    assert!(!partial.exists());
    assert!(root.join("mine.partial").exists(), "what we did not make we do not remove");
    let absent = Store::open_existing(&dir.path().join("absent")).expect_err("absent");
    assert!(absent.hint().expect("a hint").contains("check the path"));
}

#[test]
fn a_step_saved_again_is_replaced() {
    let dir = TempDir::new().expect("a temporary folder");
    let store = open(&dir);
    let path = save(&store, 100, 1.0);
    fs::write(path.join("manifest.json"), "torn").expect("spoilt");
    save(&store, 100, 3.0);
    let mut out = [0.0; 6];
    store.load(100).expect("whole").read("w", "parameter", 0..6, &mut out).expect("read");
    assert_eq!(out, [3.0; 6]);
    assert_eq!(files(store.root()).len(), 1);
}

#[test]
fn entries_that_cannot_be_saved_are_refused_before_anything_is_written() {
    let dir = TempDir::new().expect("a temporary folder");
    let store = open(&dir);
    let good = Entry { name: "w", role: "parameter", shape: &[1], data: &[1.0] };
    let refused = |entries: &[Entry<'_>]| {
        store.save(header(1), entries.iter().copied()).expect_err("refused").to_string()
    };
    assert!(
        refused(&[good, good]).ends_with("cannot write tensor `w`: some of it is given twice as parameter")
    );
    assert!(refused(&[Entry { shape: &[2], ..good }]).ends_with("its shape [2] does not have 1 elements"));
    assert!(refused(&[Entry { role: "../x", ..good }]).contains("cannot be part of a file name"));
    assert!(refused(&[Entry { name: "__metadata__", ..good }]).contains("keeps this name"));
    assert!(files(store.root()).is_empty());
}
