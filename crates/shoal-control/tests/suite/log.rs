//! What a crash, a full disk and a damaged one leave of the controller's log.

use std::path::Path;

use shoal_control::controller::Event;
use shoal_control::controller::state::{Class, Interval, JobSpec, State};
use shoal_control::disk::{Disk, Folder};
use shoal_control::keeper::LOG_BYTES_MAX;
use shoal_control::log::{Log, LogError};
use shoal_control::message::{JobId, Price, ToController};
use shoal_control::{Keeper, Settings};

fn spec(name: &str) -> JobSpec {
    JobSpec {
        name: name.to_owned(),
        class: Class::Foreground,
        priority: 0,
        steps: 10,
        workers_min: 1,
        workers_max: 4,
        checkpoint_every: Interval::Steps(5),
        description: String::new(),
        checkpoints_kept: 2,
    }
}

/// A controller's folder after a few events, and its state.
fn written(folder: &Path, log_bytes_max: u64) -> State {
    let disk = Folder::open(folder).expect("made");
    let settings = Settings::default();
    let opened = Keeper::open_with(settings, disk, 0, log_bytes_max, None);
    let (mut keeper, _, _) = opened.expect("opens");
    for number in 0..4 {
        let (name, about) = (format!("worker {number}"), String::new());
        let join = ToController::Join { name, boot: 1, about, price: Price::default() };
        keeper.step(10 + number, Event::Message(join)).expect("written");
        let (job, spec) = (JobId(number), spec(&format!("job {number}")));
        keeper.step(20 + number, Event::Submit { job, spec }).expect("written");
    }
    keeper.state().clone()
}

fn reopened(folder: &Path) -> Result<(State, u64), LogError> {
    let (_, state, opened) = Log::open(Folder::open(folder)?, None)?;
    Ok((state, opened.cut_bytes))
}

#[test]
fn what_was_written_is_read_back_with_and_without_a_snapshot() {
    for log_bytes_max in [LOG_BYTES_MAX, 400] {
        let folder = tempfile::tempdir().expect("made");
        let state = written(folder.path(), log_bytes_max);
        let (found, cut_bytes) = reopened(folder.path()).expect("opens");
        assert_eq!((found, cut_bytes), (state, 0));
        let names = Folder::open(folder.path()).and_then(|disk| disk.names()).expect("read");
        assert_eq!(names.contains("snapshot"), log_bytes_max < LOG_BYTES_MAX, "{names:?}");
    }
}

#[test]
fn events_taken_in_together_lead_where_they_lead_one_by_one() {
    let events =
        || (0..4).map(|number| Event::Submit { job: JobId(number), spec: spec(&format!("job {number}")) });
    let folders = [tempfile::tempdir().expect("made"), tempfile::tempdir().expect("made")];
    let open = |folder: &Path| Keeper::open(Settings::default(), Folder::open(folder).expect("made"), 0);
    let (mut together, _, _) = open(folders[0].path()).expect("opens");
    let (mut single, _, _) = open(folders[1].path()).expect("opens");
    let step = together.step_all(7, events()).expect("written");
    let mut records = Vec::new();
    for event in events() {
        records.extend(single.step(7, event).expect("written").records);
    }
    assert_eq!(step.records, records);
    assert!(together.log_bytes() < single.log_bytes(), "one frame for all");
    assert_eq!(reopened(folders[0].path()).expect("opens").0, *single.state());
}

#[test]
fn a_torn_end_is_cut_off_wherever_it_is_torn() {
    let folder = tempfile::tempdir().expect("made");
    let state = written(folder.path(), LOG_BYTES_MAX);
    let path = folder.path().join("log");
    let whole = std::fs::read(&path).expect("read");
    // Each length would be better still, were it not for the flushes; the drill tears at all of them.
    for length in (0..whole.len()).step_by(23) {
        std::fs::write(&path, &whole[..length]).expect("written");
        let (found, cut_bytes) = reopened(folder.path()).expect("opens");
        assert!(found.revision < state.revision, "at {length}");
        assert_eq!(std::fs::read(&path).expect("read").len() as u64, length as u64 - cut_bytes);
        let again = reopened(folder.path()).expect("opens");
        assert_eq!(again, (found, 0), "what is cut off is cut off for good");
    }
}

#[test]
fn records_behind_a_damaged_one_are_not_thrown_away_in_silence() {
    let folder = tempfile::tempdir().expect("made");
    written(folder.path(), LOG_BYTES_MAX);
    let path = folder.path().join("log");
    let mut bytes = std::fs::read(&path).expect("read");
    // The first 30 bytes are the frame that every log begins with.
    bytes[40] ^= 1;
    std::fs::write(&path, bytes).expect("written");
    let error = reopened(folder.path()).expect_err("damaged");
    assert!(matches!(error, LogError::Damaged(30)), "{error}");
    assert!(error.hint().contains("checkpoints"));
}

#[test]
fn a_damaged_snapshot_and_a_log_without_its_snapshot_are_refused() {
    let folder = tempfile::tempdir().expect("made");
    written(folder.path(), 400);
    let path = folder.path().join("snapshot");
    let bytes = std::fs::read(&path).expect("read");
    std::fs::write(&path, &bytes[..bytes.len() - 1]).expect("written");
    assert!(matches!(reopened(folder.path()), Err(LogError::DamagedSnapshot)));
    std::fs::remove_file(&path).expect("removed");
    assert!(matches!(reopened(folder.path()), Err(LogError::Gap { expected: 0, .. })));
    std::fs::write(&path, bytes).expect("written");
    std::fs::remove_file(folder.path().join("log")).expect("removed");
    assert!(matches!(reopened(folder.path()), Err(LogError::NoLog)));
}

#[test]
fn a_crash_between_snapshot_and_new_log_counts_nothing_twice() {
    let folder = tempfile::tempdir().expect("made");
    let state = written(folder.path(), LOG_BYTES_MAX);
    let log = std::fs::read(folder.path().join("log")).expect("read");
    let (mut whole, found, _) = Log::open(Folder::open(folder.path()).expect("made"), None).expect("opens");
    whole.snapshot(&found).expect("written");
    std::fs::write(folder.path().join("log"), log).expect("written");
    assert_eq!(reopened(folder.path()).expect("opens").0, state);
}

/// A disk that is full from some moment on.
struct Full(Folder, bool);

impl Disk for Full {
    fn names(&self) -> std::io::Result<std::collections::BTreeSet<String>> {
        self.0.names()
    }
    fn read(&self, name: &str) -> std::io::Result<Vec<u8>> {
        self.0.read(name)
    }
    fn create(&mut self, name: &str, bytes: &[u8]) -> std::io::Result<()> {
        self.0.create(name, bytes)
    }
    fn append(&mut self, name: &str, bytes: &[u8]) -> std::io::Result<()> {
        self.0.append(name, bytes)
    }
    fn cut(&mut self, name: &str, length: u64) -> std::io::Result<()> {
        self.0.cut(name, length)
    }
    fn sync(&mut self, name: &str) -> std::io::Result<()> {
        match self.1 {
            true => Err(std::io::ErrorKind::StorageFull.into()),
            false => self.0.sync(name),
        }
    }
    fn rename(&mut self, from: &str, to: &str) -> std::io::Result<()> {
        self.0.rename(from, to)
    }
    fn sync_names(&mut self) -> std::io::Result<()> {
        self.0.sync_names()
    }
}

#[test]
fn after_a_failed_flush_nothing_is_said_any_more() {
    let folder = tempfile::tempdir().expect("made");
    let disk = Full(Folder::open(folder.path()).expect("made"), false);
    let (mut keeper, _, _) = Keeper::open(Settings::default(), disk, 0).expect("opens");
    keeper.disk_mut().1 = true;
    let submit = |number| Event::Submit { job: JobId(number), spec: spec("one") };
    assert!(matches!(keeper.step(1, submit(1)), Err(LogError::Disk(_))));
    keeper.disk_mut().1 = false;
    assert!(
        matches!(keeper.step(2, submit(2)), Err(LogError::Failed)),
        "the disk may have forgotten the first"
    );
}
