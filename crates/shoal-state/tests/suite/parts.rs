//! Checkpoints of several parts: writers that know nothing of each other, readers that want other slices than were
//! written, saves that must not mix, and folders as earlier versions left them.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::Path;

use proptest::prelude::*;
use shoal_state::Error;
use shoal_state::checkpoint::{Checkpoint, Header, Slice, Store};
use tempfile::TempDir;

const TENSORS: [(&str, [usize; 2]); 3] = [("a", [7, 9]), ("b", [1, 5]), ("c", [0, 3])];
const ROLES: [&str; 2] = ["first_moment", "parameter"];

fn header(step: u64) -> Header {
    Header { extra: BTreeMap::from([("loss_scale".to_owned(), 0.5.into())]), ..crate::common::header(step) }
}

/// What element `index` of a tensor is in a save of which `seed` tells the others apart.
fn value(tensor: usize, role: usize, index: usize, seed: u64) -> f32 {
    (100_000 * tensor + 10_000 * role + index) as f32 + seed as f32 / 16.0
}

/// Writes one part: of each tensor the given ranges, in both roles.
fn write_part(
    store: &Store,
    save: (u64, u64),
    part: usize,
    of: usize,
    ranges: &[Vec<Range<usize>>],
) -> Result<(), Error> {
    let (step, id) = save;
    let (mut slices, mut data) = (Vec::new(), Vec::new());
    for (tensor, (name, shape)) in TENSORS.iter().enumerate() {
        for (number, role) in ROLES.iter().enumerate() {
            for range in &ranges[tensor] {
                slices.push(Slice { name, role, shape, range: range.clone() });
                data.push(range.clone().map(|index| value(tensor, number, index, id)).collect::<Vec<f32>>());
            }
        }
    }
    let writer = store.begin_part(header(step), id, part, of)?;
    writer.write(&slices, |index| Ok::<_, Error>(Cow::Borrowed(&data[index][..])))?;
    Ok(())
}

/// The parts of a save that cuts every tensor in `of` pieces of about equal size.
fn even(of: usize) -> Vec<Vec<Vec<Range<usize>>>> {
    let cut = |elements: usize, part: usize| part * elements / of..(part + 1) * elements / of;
    (0..of)
        .map(|part| TENSORS.iter().map(|(_, shape)| vec![cut(shape[0] * shape[1], part)]).collect())
        .collect()
}

fn write_all(store: &Store, step: u64, id: u64, of: usize) {
    for (index, ranges) in even(of).iter().enumerate() {
        write_part(store, (step, id), index + 1, of, ranges).expect("written");
    }
}

fn assert_holds(checkpoint: &Checkpoint, id: u64) {
    assert_eq!(checkpoint.id(), id);
    for (tensor, (name, shape)) in TENSORS.iter().enumerate() {
        for (number, role) in ROLES.iter().enumerate() {
            let elements = shape[0] * shape[1];
            let mut out = vec![0.0; elements];
            checkpoint.read(name, role, 0..elements, &mut out).expect("read");
            for (index, found) in out.iter().enumerate() {
                assert_eq!(*found, value(tensor, number, index, id), "{role} of {name}, element {index}");
            }
        }
    }
}

fn store(dir: &TempDir) -> Store {
    Store::open(dir.path()).expect("opened").with_shard_bytes_max(64)
}

#[test]
fn writers_at_once_make_one_checkpoint() {
    let dir = TempDir::new().expect("a temporary folder");
    store(&dir);
    std::thread::scope(|scope| {
        for (index, ranges) in even(5).into_iter().enumerate() {
            let root = dir.path();
            scope.spawn(move || {
                let own = Store::open_existing(root).expect("opened").with_shard_bytes_max(64);
                write_part(&own, (10, 2), index + 1, 5, &ranges).expect("written");
            });
        }
    });
    let (checkpoint, skipped) = store(&dir).latest().expect("sound").expect("complete");
    assert!(skipped.is_empty());
    assert_eq!((checkpoint.header(), checkpoint.manifests().len()), (&header(10), 5));
    assert_holds(&checkpoint, 2);
}

#[test]
fn a_checkpoint_is_absent_until_its_last_part_is_there() {
    let dir = TempDir::new().expect("a temporary folder");
    let store = store(&dir);
    for part in [3, 1, 4, 2] {
        assert!(store.latest().expect("nothing is no error").is_none());
        assert_eq!(store.list().expect("listed"), [0u64; 0]);
        let absent = store.load(10).expect_err("incomplete");
        assert!(matches!(absent, Error::NoCheckpoint { .. }), "{absent}");
        write_part(&store, (10, 2), part, 4, &even(4)[part - 1]).expect("written");
    }
    assert_holds(&store.load(10).expect("complete"), 2);
    assert_holds(&store.load_save(10, 2).expect("complete"), 2);
    assert!(store.load_save(10, 3).is_err());
    assert_eq!(store.list().expect("listed"), [10]);
}

#[test]
fn saves_of_one_step_never_mix() {
    let dir = TempDir::new().expect("a temporary folder");
    let store = store(&dir);
    // The first save lost a writer; the second has its parts between those of the first.
    for (save, part) in [(2, 1), (3, 2), (3, 1), (2, 3), (3, 3)] {
        assert!(store.latest().expect("nothing is no error").is_none(), "a part of each is no checkpoint");
        write_part(&store, (10, save), part, 3, &even(3)[part - 1]).expect("written");
    }
    assert_holds(&store.load(10).expect("complete"), 3);
    write_part(&store, (10, 2), 2, 3, &even(3)[1]).expect("the one left behind comes to its end");
    assert_holds(&store.load(10).expect("complete"), 3);
    assert_holds(&store.load_save(10, 2).expect("complete too"), 2);
    assert_eq!(store.next_id(10).expect("a number"), 4);
    assert_eq!(store.collect(1).expect("collected"), [0u64; 0], "the step is still there");
    assert!(store.load_save(10, 2).is_err(), "the earlier save is not needed");
    assert_holds(&store.load(10).expect("complete"), 3);
    let again = write_part(&store, (10, 3), 1, 3, &even(3)[0]).expect_err("it is finished");
    assert!(again.to_string().ends_with("cannot write it: the part is there already"), "{again}");
}

#[test]
fn parts_that_do_not_belong_together_are_not_read() {
    let refusal = |second: Header, ranges: &[Vec<Vec<Range<usize>>>; 2]| {
        let dir = TempDir::new().expect("a temporary folder");
        let store = store(&dir);
        write_part(&store, (10, 2), 1, 2, &ranges[0]).expect("written");
        let slices = [Slice { name: "a", role: "parameter", shape: &[7, 9], range: ranges[1][0][0].clone() }];
        let data = vec![0.0; slices[0].range.len()];
        let writer = store.begin_part(second, 2, 2, 2).expect("begun");
        writer.write(&slices, |_| Ok::<_, Error>(Cow::Borrowed(&data[..]))).expect("written");
        assert!(matches!(store.latest(), Err(Error::NoneValid { .. })), "it is not taken for nothing");
        store.load(10).expect_err("refused").to_string()
    };
    let halves = |first: Range<usize>, second: Range<usize>| {
        [vec![vec![first], vec![0..5], vec![0..0]], vec![vec![second]]]
    };
    let other = Header { plan: "another".to_owned(), ..header(10) };
    assert!(refusal(other, &halves(0..30, 30..63)).contains("does not agree with the first part's manifest"));
    for (first, second) in [(0..30, 31..63), (0..30, 29..63), (0..30, 30..62), (0..63, 0..63)] {
        let message = refusal(header(10), &halves(first, second));
        assert!(message.contains("are not the whole tensor"), "{message}");
    }
}

#[test]
fn damage_in_one_part_is_noticed_when_it_is_read_and_by_latest_before() {
    let dir = TempDir::new().expect("a temporary folder");
    let store = store(&dir);
    write_all(&store, 10, 2, 2);
    write_all(&store, 20, 3, 3);
    let shard = dir.path().join("step-00000020-save-3-part-2-of-3/parameter-00001.safetensors");
    let mut bytes = fs::read(&shard).expect("read");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&shard, bytes).expect("written");
    let (checkpoint, skipped) = store.latest().expect("the older one is sound").expect("there is one");
    assert_holds(&checkpoint, 2);
    assert!(skipped[0].to_string().contains("part-2-of-3/parameter-00001.safetensors"), "{}", skipped[0]);
    assert_eq!(store.list().expect("listed"), [10, 20], "sizes are all that a listing looks at");
}

#[test]
fn what_is_not_kept_is_removed_whole_or_not() {
    let dir = TempDir::new().expect("a temporary folder");
    let store = store(&dir);
    (2..=5).for_each(|id| write_all(&store, 10 * id, id, 2));
    write_part(&store, (60, 6), 1, 2, &even(2)[0]).expect("written");
    write_part(&store, (15, 7), 1, 2, &even(2)[0]).expect("written");
    assert_eq!(store.collect(2).expect("collected"), [15, 20, 30]);
    assert_eq!(store.list().expect("listed"), [40, 50]);
    let reader = store.load(40).expect("complete");
    store.keep_only(|id| [5, 8].contains(&id)).expect("removed");
    assert_eq!(store.list().expect("listed"), [50]);
    assert_eq!(fs::read_dir(dir.path()).expect("listed").count(), 2, "the incomplete one is gone as well");
    assert_holds(&reader, 4);
}

#[test]
fn parts_that_cannot_be_begun_are_refused() {
    let dir = TempDir::new().expect("a temporary folder");
    let store = store(&dir);
    for (id, part, of) in [(2, 0, 1), (2, 2, 1), (2, 1, 0), (0, 1, 1)] {
        assert!(matches!(store.begin_part(header(1), id, part, of), Err(Error::Part { .. })));
    }
    let slices = [Slice { name: "a", role: "parameter", shape: &[7, 9], range: 0..64 }];
    let writer = store.begin_part(header(1), 2, 1, 1).expect("begun");
    let error = writer.write(&slices, |_| Ok::<_, Error>(Cow::Owned(vec![0.0; 64]))).expect_err("too many");
    assert!(error.to_string().ends_with("its shape [7, 9] does not have elements 0 to 64"), "{error}");
    let slices = [Slice { range: 0..63, ..slices[0].clone() }];
    let writer = store.begin_part(header(1), 2, 1, 1).expect("begun");
    let error = writer.write(&slices, |_| Ok::<_, Error>(Cow::Owned(vec![0.0; 62]))).expect_err("too few");
    assert!(error.to_string().ends_with("62 elements were given for 0..63"), "{error}");
    assert_eq!(fs::read_dir(dir.path()).expect("listed").count(), 0, "nothing is left of them");
}

/// Folders as the version before parts wrote them: step 7, and step 3 set aside by a replacement that was interrupted.
#[test]
fn folders_of_format_1_are_read() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/format-1");
    let dir = TempDir::new().expect("a temporary folder");
    for folder in fs::read_dir(&golden).expect("listed").map(|entry| entry.expect("listed")) {
        let copy = dir.path().join(folder.file_name());
        fs::create_dir(&copy).expect("made");
        for file in fs::read_dir(folder.path()).expect("listed").map(|entry| entry.expect("listed")) {
            fs::copy(file.path(), copy.join(file.file_name())).expect("copied");
        }
    }
    let assert_golden = |store: &Store, step: u64| {
        let checkpoint = store.load(step).expect("sound");
        let header = Header { plan: "one device".to_owned(), ..header(step) };
        assert_eq!(*checkpoint.header(), header);
        let mut out = [0.0; 25];
        for role in ["parameter", "first_moment"] {
            checkpoint.read("b", role, 0..25, &mut out).expect("read");
            assert!(
                out.iter().enumerate().all(|(index, found)| *found == (index as u64 + step) as f32 / 8.0)
            );
            checkpoint.read("b", role, 9..21, &mut out[..12]).expect("read");
            assert_eq!((out[0], out[11]), ((9 + step) as f32 / 8.0, (20 + step) as f32 / 8.0));
            checkpoint.read("c", role, 0..4, &mut out[..4]).expect("read");
            assert_eq!(out[3], (3 + step) as f32 / 8.0);
        }
    };
    let reader = Store::open_existing(dir.path()).expect("opened");
    assert_golden(&reader, 3);
    let store = store(&dir);
    assert_eq!(store.list().expect("listed"), [3, 7]);
    assert!(dir.path().join("step-00000003").is_dir(), "the half replacement was undone");
    [3, 7].iter().for_each(|step| assert_golden(&store, *step));

    // New saves go beside them and push them out.
    write_all(&store, 7, store.next_id(7).expect("a number"), 2);
    assert_holds(&store.load(7).expect("complete"), 1);
    assert_eq!(store.collect(1).expect("collected"), [3]);
    assert_eq!(fs::read_dir(dir.path()).expect("listed").count(), 2);

    fs::rename(
        dir.path().join("step-00000007-save-1-part-1-of-2"),
        dir.path().join("step-00000008-save-1-part-1-of-1"),
    )
    .expect("renamed");
    let error = store.load(8).expect_err("a folder that was renamed");
    assert!(error.to_string().ends_with("the manifest is of step 7, the folder of step 8"), "{error}");
}

/// A table of the given elements cut at random places and dealt out to writers.
fn dealt(elements: usize, of: usize) -> impl Strategy<Value = Vec<Vec<Range<usize>>>> {
    (prop::collection::vec(0..=elements, 0..6), prop::collection::vec(0..of, 8)).prop_map(
        move |(mut cuts, owners)| {
            cuts.extend([0, elements]);
            cuts.sort_unstable();
            cuts.dedup();
            let mut dealt = vec![Vec::new(); of];
            if elements == 0 {
                dealt[owners[0]].push(0..0);
            }
            for (window, owner) in cuts.windows(2).zip(owners) {
                dealt[owner].push(window[0]..window[1]);
            }
            dealt
        },
    )
}

fn tables() -> impl Strategy<Value = (usize, Vec<Vec<Vec<Range<usize>>>>)> {
    (1usize..5).prop_flat_map(|of| {
        let each: Vec<_> = TENSORS.iter().map(|(_, shape)| dealt(shape[0] * shape[1], of)).collect();
        (Just(of), each)
    })
}

proptest! {
    // Every shard is flushed to the disk, which takes milliseconds.
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Any layout to any layout: whatever was written by whom, every range comes back.
    #[test]
    fn any_range_of_any_layout_is_read((of, dealt) in tables(), ranges in prop::collection::vec((0usize..64, 0usize..64), 20), shard_bytes in 40u64..300) {
        let dir = TempDir::new().expect("a temporary folder");
        let store = Store::open(dir.path()).expect("opened").with_shard_bytes_max(shard_bytes);
        for part in 0..of {
            let own: Vec<Vec<Range<usize>>> = dealt.iter().map(|tensor| tensor[part].clone()).collect();
            write_part(&store, (10, 2), part + 1, of, &own).expect("written");
        }
        let checkpoint = store.load(10).expect("complete");
        assert_holds(&checkpoint, 2);
        for (left, right) in ranges {
            let (start, end) = (left.min(right).min(63), left.max(right).min(63));
            let mut out = vec![0.0; end - start];
            checkpoint.read("a", "parameter", start..end, &mut out).expect("read");
            prop_assert!(out.iter().zip(start..).all(|(found, index)| *found == value(0, 1, index, 2)));
        }
    }
}
