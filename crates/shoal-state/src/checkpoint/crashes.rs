//! Crash points. Several writers go on by turns in one folder, each with its part of a save, perhaps beside one that was
//! left behind by an earlier attempt and one who removes what is old; at some operation everything dies, and of what was
//! not flushed anything may be left. Whatever a reader then finds is a state that somebody saved, bit for bit and whole.

use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use tempfile::TempDir;

use super::tests::{State, state};
use super::{Checkpoint, Slice, Store};
use crate::error::{Error, Result};
use crate::faults::{FaultyDisk, Plan, mixed};
use crate::place::Folder;

/// Crash points that are tried where nobody asks for more.
const CASES_USUAL: u64 = 300;

/// More operations than a case has, so that some come to their end.
const OPERATIONS_MAX: u64 = 75;

/// Of a seed, one after the other.
struct Draw(u64);

impl Draw {
    fn below(&mut self, count: u64) -> u64 {
        self.0 = mixed(self.0);
        self.0 % count
    }
}

/// What one writer of a save does.
struct Task<'a> {
    state: &'a State,
    id: u64,
    part: usize,
    of: usize,
    /// Of each of the state's tensors.
    ranges: Vec<Vec<Range<usize>>>,
    /// Removes what is older than the newest complete checkpoint once its part is written.
    collects: bool,
}

fn at(root: &Path, disk: Arc<FaultyDisk>) -> Store {
    let folder = Folder::existing(root, disk).expect("the folder exists");
    Store::at(Arc::new(folder)).with_shard_bytes_max(24).with_block_bytes(50)
}

impl Task<'_> {
    fn run(&self, store: &Store) -> Result<()> {
        let (mut slices, mut data) = (Vec::new(), Vec::new());
        for ((name, role, shape, values), ranges) in self.state.tensors.iter().zip(&self.ranges) {
            for range in ranges {
                slices.push(Slice { name, role, shape, range: range.clone() });
                data.push(&values[range.clone()]);
            }
        }
        let writer = store.begin_part(self.state.header(), self.id, self.part, self.of)?;
        writer.write(&slices, |index| Ok::<_, Error>(Cow::Borrowed(data[index])))?;
        if self.collects {
            store.collect(1)?;
        }
        Ok(())
    }
}

/// A save of a state, dealt out to a few writers.
fn save<'a>(state: &'a State, id: u64, draw: &mut Draw) -> Vec<Task<'a>> {
    let of = 1 + draw.below(4) as usize;
    let mut tasks: Vec<Task> = (1..=of)
        .map(|part| Task {
            state,
            id,
            part,
            of,
            ranges: vec![Vec::new(); state.tensors.len()],
            collects: false,
        })
        .collect();
    for (tensor, (_, _, _, values)) in state.tensors.iter().enumerate() {
        let cut = draw.below(values.len() as u64 + 1) as usize;
        let mut pieces = vec![0..cut, cut..values.len()];
        // One of the two where the other is nothing, of an empty tensor as well.
        if cut == 0 || cut == values.len() {
            pieces.remove(usize::from(cut > 0));
        }
        for piece in pieces {
            tasks[draw.below(of as u64) as usize].ranges[tensor].push(piece);
        }
    }
    tasks[0].collects = draw.below(2) == 0;
    tasks
}

fn load_is_one_of(checkpoint: &Checkpoint, states: &[(&State, u64)]) -> bool {
    states.iter().any(|(state, id)| checkpoint.id() == *id && state.is_in(checkpoint))
}

/// Tries one crash. Says whether it happened before everyone was done.
fn crashes(seed: u64) -> bool {
    let mut draw = Draw(seed);
    let root = TempDir::new().expect("a temporary folder");
    let root = root.path();
    let (old, left_behind) = (state(100, 1), state(200, 2));
    let new = state(if draw.below(3) == 0 { 100 } else { 200 }, 3);
    let clean = at(root, FaultyDisk::shared(Plan::Never));
    let has_old = draw.below(4) > 0;
    if has_old {
        save(&old, 1, &mut draw).iter().for_each(|task| task.run(&clean).expect("nothing fails"));
    }

    let mut tasks = save(&new, 3, &mut draw);
    let writers_of_new = tasks.len();
    if draw.below(2) == 0 {
        // One attempt before, of which a few writers are still at it.
        tasks.extend(save(&left_behind, 2, &mut draw).into_iter().filter(|_| draw.below(3) > 0));
    }
    let plan = Plan::CrashAt(draw.below(OPERATIONS_MAX), draw.below(u64::MAX));
    let disk = FaultyDisk::new(plan);
    let disks = disk.by_turns(tasks.len(), draw.below(u64::MAX));
    let done: Vec<bool> = std::thread::scope(|scope| {
        let writers = tasks.iter().zip(disks).map(|(task, disk)| {
            scope.spawn(move || {
                let store = at(root, disk);
                task.run(&store).is_ok()
            })
        });
        let writers: Vec<_> = writers.collect();
        writers.into_iter().map(|writer| writer.join().expect("no writer panics")).collect()
    });

    let known = [(&old, 1), (&left_behind, 2), (&new, 3)];
    let reader = at(root, FaultyDisk::shared(Plan::Never));
    let is_new = |checkpoint: &Checkpoint| checkpoint.id() == 3 && new.is_in(checkpoint);
    match reader.latest().expect("what is there is sound") {
        None => assert!(!has_old && !done[..writers_of_new].iter().all(|done| *done), "seed {seed}: lost"),
        Some((checkpoint, skipped)) => {
            assert!(skipped.is_empty(), "seed {seed}: {skipped:?}");
            assert!(load_is_one_of(&checkpoint, &known), "seed {seed}: a state that nobody saved");
            let all_done = done[..writers_of_new].iter().all(|done| *done);
            let newer = checkpoint.header().step > new.step;
            assert!(
                !all_done || newer || is_new(&checkpoint),
                "seed {seed}: what was said saved is not there"
            );
        }
    }
    for step in reader.list().expect("listed") {
        let checkpoint = reader.load(step).expect("what is listed is sound");
        checkpoint.verify().expect("every byte of it");
        assert!(load_is_one_of(&checkpoint, &known), "seed {seed}: step {step}");
    }
    // Whoever comes next finds a folder that can be saved into.
    let next = Store::open_on(root, FaultyDisk::shared(Plan::Never)).expect("tidied");
    next.save(state(300, 4).header(), state(300, 4).entries()).expect("saved");
    assert!(state(300, 4).is_in(&next.latest().expect("sound").expect("there is one").0), "seed {seed}");
    disk.died()
}

#[test]
fn no_crash_point_leaves_a_wrong_checkpoint() {
    let environment = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let first = environment("SHOAL_SEED").unwrap_or(0);
    let wanted = environment("SHOAL_CASES").unwrap_or(CASES_USUAL);
    let (mut crashed, mut finished, mut seed) = (0, 0, first);
    while crashed < wanted {
        match crashes(seed) {
            true => crashed += 1,
            false => finished += 1,
        }
        seed += 1;
    }
    println!("{crashed} crash points, and {finished} saves that came to their end first");
    assert!(wanted < 100 || (finished > 0 && finished < crashed), "crash points lie all over the save");
}
