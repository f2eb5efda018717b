//! Checkpoints under faults: the disk fills at every byte, the process dies or the power goes at every
//! operation, and each time the reader must find the old state or the new one, bit for bit.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use tempfile::TempDir;

use super::{Checkpoint, Entry, Header, Store};
use crate::error::Error;
use crate::faults::{FaultyDisk, Plan};

/// Small enough that one tensor is split and every role has several shards.
const SHARD_BYTES_MAX: u64 = 24;

/// Small enough that a shard has several, and that one ends inside a tensor.
const BLOCK_BYTES: u64 = 50;

/// No operation of these tests needs more; a loop that gets here does not end.
const OPERATIONS_MAX: u64 = 500;

pub(super) struct State {
    pub(super) step: u64,
    pub(super) tensors: Vec<(&'static str, &'static str, Vec<usize>, Vec<f32>)>,
}

/// A state whose every bit depends on `seed`, NaNs and subnormals included.
pub(super) fn state(step: u64, seed: u32) -> State {
    let mut bits = seed;
    let mut values = |count: usize| -> Vec<f32> {
        let next = || {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from_bits(bits)
        };
        std::iter::repeat_with(next).take(count).collect()
    };
    let tensors = vec![
        ("wte.weight", "parameter", vec![5, 2], values(10)),
        ("ln.bias", "parameter", vec![2], values(2)),
        ("ln.bias", "first_moment", vec![2], values(2)),
        ("nothing", "first_moment", vec![0, 3], Vec::new()),
        ("scale", "first_moment", vec![], values(1)),
    ];
    State { step, tensors }
}

impl State {
    pub(super) fn header(&self) -> Header {
        Header {
            job: "tiny".to_owned(),
            step: self.step,
            position: 32 * self.step,
            seed: u64::MAX,
            rng: "philox".to_owned(),
            plan: "one device".to_owned(),
            extra: BTreeMap::from([("loss_scale".to_owned(), 0.1.into())]),
        }
    }

    pub(super) fn entries(&self) -> impl DoubleEndedIterator<Item = Entry<'_>> {
        self.tensors.iter().map(|(name, role, shape, data)| Entry { name, role, shape, data })
    }

    pub(super) fn is_in(&self, checkpoint: &Checkpoint) -> bool {
        checkpoint.header().step == self.step
            && self.tensors.iter().all(|(name, role, _, data)| {
                let mut read = vec![0.0; data.len()];
                checkpoint
                    .read(name, role, 0..data.len(), &mut read)
                    .expect("a verified checkpoint can be read");
                let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                bits(&read) == bits(data)
            })
    }
}

fn store(root: &Path, plan: Plan) -> (Store, Arc<FaultyDisk>) {
    let disk = FaultyDisk::shared(plan);
    let store = Store::open_on(root, disk.clone()).expect("an empty or tidy folder opens");
    (store.with_shard_bytes_max(SHARD_BYTES_MAX).with_block_bytes(BLOCK_BYTES), disk)
}

fn saved(root: &Path, state: &State) {
    store(root, Plan::Never).0.save(state.header(), state.entries()).expect("nothing fails");
}

fn latest_is_one_of(store: &Store, states: &[&State]) -> bool {
    match store.latest().expect("some checkpoint verifies, or there is none") {
        Some((checkpoint, skipped)) => {
            assert!(skipped.is_empty(), "a torn checkpoint got its name: {skipped:?}");
            states.iter().any(|state| state.is_in(&checkpoint))
        }
        None => states.is_empty(),
    }
}

fn names(root: &Path) -> Vec<String> {
    let listed = fs::read_dir(root).expect("the folder exists");
    let mut names: Vec<String> =
        listed.map(|entry| entry.expect("listed").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Saves `new` over `old` with a death at every operation in turn.
fn die_everywhere(old: Option<&State>, new: &State, plan_at: fn(u64) -> Plan) {
    for operation in 0..OPERATIONS_MAX {
        let root = TempDir::new().expect("a temporary folder");
        if let Some(old) = old {
            saved(root.path(), old);
        }
        let (dying, disk) = store(root.path(), plan_at(operation));
        let outcome = dying.save(new.header(), new.entries());
        if !disk.died() {
            assert!(operation > 20, "the save is made of more operations than {operation}");
            assert!(outcome.is_ok() && latest_is_one_of(&dying, &[new]));
            assert!(disk.is_flushed(), "what is saved survives a power cut");
            return;
        }

        let before_tidying = Store::open_existing(root.path()).expect("the folder is there");
        let found = before_tidying.latest().expect("the old, the new or nothing");
        let (after, _) = store(root.path(), Plan::Never);
        match (found, old) {
            (None, old) => assert!(old.is_none(), "operation {operation}: the old checkpoint is lost"),
            (Some((checkpoint, skipped)), old) => {
                assert!(skipped.is_empty(), "operation {operation}: {skipped:?}");
                assert!(new.is_in(&checkpoint) || old.is_some_and(|old| old.is_in(&checkpoint)));
                assert!(latest_is_one_of(&after, &[old.unwrap_or(new), new]), "operation {operation}");
            }
        }
        assert!(names(root.path()).iter().all(|name| !name.contains('.')), "tidied");
        after.save(new.header(), new.entries()).expect("the folder can be saved into again");
        assert!(latest_is_one_of(&after, &[new]));
    }
    panic!("the save never ends");
}

#[test]
fn a_death_at_any_operation_leaves_the_old_or_the_new() {
    let (old, new, again) = (state(100, 1), state(200, 2), state(100, 3));
    for plan_at in [Plan::KilledAt, Plan::PowerLostAt] {
        die_everywhere(None, &new, plan_at);
        die_everywhere(Some(&old), &new, plan_at);
        die_everywhere(Some(&old), &again, plan_at);
    }
}

#[test]
fn a_death_while_tidying_changes_nothing() {
    let (old, again) = (state(100, 1), state(100, 3));
    let mut repaired_after_death = 0;
    for save_operation in 0..OPERATIONS_MAX {
        for tidy_operation in 0..OPERATIONS_MAX {
            let root = TempDir::new().expect("a temporary folder");
            saved(root.path(), &old);
            let (dying, save_disk) = store(root.path(), Plan::KilledAt(save_operation));
            let _ = dying.save(again.header(), again.entries());
            if !save_disk.died() {
                assert!(repaired_after_death > 20);
                return;
            }
            let tidy_disk = FaultyDisk::shared(Plan::KilledAt(tidy_operation));
            let _ = Store::open_on(root.path(), tidy_disk.clone());
            assert!(latest_is_one_of(&store(root.path(), Plan::Never).0, &[&old, &again]));
            if !tidy_disk.died() {
                break;
            }
            repaired_after_death += 1;
        }
    }
    panic!("the save never ends");
}

#[test]
fn a_death_while_collecting_leaves_the_newest() {
    for operation in 0..OPERATIONS_MAX {
        let root = TempDir::new().expect("a temporary folder");
        let states = [state(1, 1), state(2, 2), state(3, 3)];
        states.iter().for_each(|state| saved(root.path(), state));
        let (dying, disk) = store(root.path(), Plan::KilledAt(operation));
        let outcome = dying.collect(1);
        let (after, _) = store(root.path(), Plan::Never);
        assert!(latest_is_one_of(&after, &[&states[2]]), "operation {operation}");
        for step in after.list().expect("listed") {
            assert!(after.load(step).is_ok(), "what is listed is whole");
        }
        assert_eq!(names(root.path()).len(), after.list().expect("listed").len(), "nothing half gone stays");
        if !disk.died() {
            assert_eq!(outcome.expect("collected"), [1, 2]);
            assert_eq!(names(root.path()), ["step-00000003-save-1-part-1-of-1"]);
            return;
        }
    }
    panic!("the removal never ends");
}

#[test]
fn a_disk_that_fills_at_any_byte_costs_nothing_but_the_save() {
    let (old, mut new) = (state(100, 1), state(200, 2));
    // Every byte costs a save: a split tensor and one more are enough.
    new.tensors.truncate(2);
    let root = TempDir::new().expect("a temporary folder");
    saved(root.path(), &old);
    let measured = TempDir::new().expect("a temporary folder");
    let (whole, disk) = store(measured.path(), Plan::Never);
    let bytes = whole.save(new.header(), new.entries()).expect("nothing fails").bytes;
    assert_eq!(bytes, disk.bytes(), "the size reported is the size written");

    let refused = (0..bytes).map(Plan::FullAfter);
    let silent = (0..bytes).step_by(29).map(Plan::SilentlyFullAfter);
    for plan in refused.chain(silent).chain([Plan::FullOnFlush]) {
        let (full, _) = store(root.path(), plan);
        let error = full.save(new.header(), new.entries()).expect_err("the disk is full");
        let Error::DiskFull { path, needed_bytes, .. } = &error else { panic!("{plan:?}: {error}") };
        assert!(path.starts_with(root.path().join("step-00000200-save-1-part-1-of-1.partial")));
        assert_eq!(*needed_bytes, bytes);
        let hint = error.hint().expect("a full disk has a hint");
        assert!(hint.starts_with("free at least 2.") && hint.contains("intact"), "{hint}");
        assert_eq!(
            names(root.path()),
            ["step-00000100-save-1-part-1-of-1"],
            "{plan:?}: the partial folder gives its space back"
        );
        assert!(latest_is_one_of(&full, &[&old]));
    }
    let (enough, _) = store(root.path(), Plan::FullAfter(bytes));
    enough.save(new.header(), new.entries()).expect("there is exactly enough room");
}

#[test]
fn the_same_state_gives_the_same_bytes_in_any_order() {
    let state = state(7, 7);
    let (left, right) = (TempDir::new().expect("a folder"), TempDir::new().expect("a folder"));
    let (forward, _) = store(left.path(), Plan::Never);
    let (backward, _) = store(right.path(), Plan::Never);
    let forward = forward.save(state.header(), state.entries()).expect("saved").path;
    let backward = backward.save(state.header(), state.entries().rev()).expect("saved").path;
    assert_eq!(names(&forward), names(&backward));
    assert!(names(&forward).len() > 4, "several shards: {:?}", names(&forward));
    for name in names(&forward) {
        assert_eq!(
            fs::read(forward.join(&name)).expect("read"),
            fs::read(backward.join(&name)).expect("read")
        );
    }
}
