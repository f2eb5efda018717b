//! What the tests of the binary share: folders with a job and data, the binary itself under a deadline, and
//! what a run leaves behind.

#![allow(dead_code)] // compiled into every test file, each of which needs its own part

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::Value;
use shoal_kernels::random::mix64;
use tempfile::TempDir;

/// Longer than any command here takes on a busy machine; past it a command is taken to hang.
pub const DEADLINE: Duration = Duration::from_secs(120);
/// Between two looks at something awaited.
pub const POLL: Duration = Duration::from_millis(2);

/// A job of a small model that trains in well under a second.
pub const JOB: &str = r#"name = "test"

[model]
preset = "gpt2-tiny"

[data]
train = "corpus.txt"
sequence = 32

[train]
global_batch = 4
steps = 4
optimizer = { lr = 1e-3, clip_norm = 1.0 }

[checkpoint]
to = "run"
every = "1000 steps"
"#;

/// A folder that is removed when the test ends.
pub struct Folder(TempDir);

impl Folder {
    pub fn empty() -> Folder {
        Folder(TempDir::new().unwrap())
    }

    /// A folder with `job.toml` and the `corpus.txt` that [`JOB`] trains on.
    pub fn with_job(job: &str) -> Folder {
        let folder = Folder::empty();
        folder.write("job.toml", job);
        folder.write("corpus.txt", corpus(400));
        folder
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    /// Runs the binary in this folder.
    pub fn shoal(&self, arguments: &[&str]) -> Outcome {
        self.start(arguments).wait()
    }

    /// Starts the binary in this folder.
    pub fn start(&self, arguments: &[&str]) -> Running {
        let outputs = TempDir::new().unwrap();
        let file = |name: &str| File::create(outputs.path().join(name)).unwrap();
        let child = Command::new(binary())
            .args(arguments)
            .current_dir(self.path())
            // What commands remember of fleets.
            .env("XDG_STATE_HOME", self.join("state"))
            .env_remove("SHOAL_ACCESS")
            .stdin(Stdio::null())
            .stdout(file("stdout"))
            .stderr(file("stderr"))
            .spawn()
            .unwrap();
        Running { child, outputs, command: arguments.join(" ") }
    }
}

/// The binary: cargo's, or where `SHOAL_BINARY` says, for tests that run on another machine than they were
/// built on.
fn binary() -> PathBuf {
    let named = std::env::var_os("SHOAL_BINARY").map(PathBuf::from);
    named.map_or_else(|| env!("CARGO_BIN_EXE_shoal").into(), |path| fs::canonicalize(path).unwrap())
}

/// Varied lines of text.
pub fn corpus(lines: u64) -> String {
    let words = ["boat", "crab", "drift", "eel", "foam", "gull", "harbour", "isle", "jetty", "kelp"];
    let word = |line: u64, salt: u64| words[(line * line + salt * line + salt) as usize % words.len()];
    let text = |line| format!("{line}: the {} and the {} near {}.\n", word(line, 1), word(line, 3), line * 7);
    (0..lines).map(text).collect()
}

/// A process of the binary; dropping it ends it.
pub struct Running {
    child: Child,
    outputs: TempDir,
    command: String,
}

impl Running {
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Sends a signal by name, as `kill` knows it.
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args(["-s", name, &self.child.id().to_string()]).status().unwrap();
        assert!(status.success(), "{}: it ended before SIG{name} was sent", self.command);
    }

    /// Waits until `happened`; the process must still run then.
    pub fn wait_until(&mut self, what: &str, mut happened: impl FnMut() -> bool) {
        let started = Instant::now();
        while !happened() {
            let running = self.is_running();
            assert!(running, "{} ended before {what}: {}", self.command, self.output("stderr"));
            assert!(started.elapsed() < DEADLINE, "{}: waited in vain for {what}", self.command);
            std::thread::sleep(POLL);
        }
    }

    /// Waits for the end.
    pub fn wait(mut self) -> Outcome {
        let started = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            let waited = started.elapsed();
            assert!(waited < DEADLINE, "shoal {} hangs after {}", self.command, self.output("stderr"));
            std::thread::sleep(POLL);
        };
        Outcome {
            code: status.code(),
            stdout: self.output("stdout"),
            stderr: self.output("stderr"),
            command: self.command.clone(),
        }
    }

    /// The file that its output goes to.
    pub fn stdout_path(&self) -> PathBuf {
        self.outputs.path().join("stdout")
    }

    /// What it has said so far, on `stdout` or `stderr`.
    pub fn output(&self, name: &str) -> String {
        String::from_utf8(fs::read(self.outputs.path().join(name)).unwrap()).expect("output is text")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Already reaped where `wait` was called; then this does nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How a command ended and what it said.
#[derive(Debug)]
pub struct Outcome {
    /// `None` where a signal ended it.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
    command: String,
}

impl Outcome {
    #[track_caller]
    pub fn succeeds(self) -> Outcome {
        assert_eq!(self.code, Some(0), "shoal {} failed:\n{}", self.command, self.stderr);
        self
    }

    /// Holds that the command failed as people may expect: exit code 1, an `error:` with all of `parts`, a
    /// `hint:` with `hint`, nothing on stdout, no panic.
    #[track_caller]
    pub fn fails(self, parts: &[&str], hint: &str) -> Outcome {
        let Outcome { code, stdout, stderr, command } = &self;
        let place = format!("shoal {command}\n--- stdout\n{stdout}\n--- stderr\n{stderr}\n---");
        assert_eq!(*code, Some(1), "{place}");
        assert!(!stderr.contains("panicked"), "{place}");
        assert_eq!(stdout, "", "{place}");
        let (_, said) = stderr.split_once("error: ").unwrap_or_else(|| panic!("no error: in {place}"));
        let (sentence, hinted) = said.split_once("\nhint: ").unwrap_or_else(|| panic!("no hint: in {place}"));
        for part in parts {
            assert!(sentence.contains(part), "the error has no {part:?}: {place}");
        }
        assert!(hinted.contains(hint), "the hint has no {hint:?}: {place}");
        self
    }

    /// The one JSON value on stdout.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {}", self.stdout))
    }
}

/// The lines of a run's `metrics.jsonl` that are whole so far.
pub fn metrics(run: &Path) -> Vec<Value> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The same without what depends on the clock.
pub fn timeless_metrics(run: &Path) -> Vec<Value> {
    let mut lines = metrics(run);
    for line in &mut lines {
        let fields = line.as_object_mut().unwrap();
        for timed in ["step_ms", "tokens_per_s", "mfu"] {
            assert!(fields.remove(timed).is_some(), "a line without {timed}");
        }
    }
    lines
}

/// One number of every line.
pub fn column(lines: &[Value], name: &str) -> Vec<f64> {
    lines.iter().map(|line| line[name].as_f64().unwrap_or_else(|| panic!("{name} in {line}"))).collect()
}

/// The folders of a run's checkpoints, oldest first; what a save is still working on is not among them.
pub fn checkpoints(run: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(run.join("checkpoints")) else { return Vec::new() };
    let mut folders: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    folders.retain(|path| path.extension().is_none());
    folders.sort();
    folders
}

/// The folder of a step's checkpoint, of its first part where it has several; one that is not there if there is none.
pub fn checkpoint_of(run: &Path, step: u64) -> PathBuf {
    let start = run.join(format!("checkpoints/step-{step:08}"));
    let named = |path: &PathBuf| path.to_string_lossy().starts_with(&*start.to_string_lossy());
    checkpoints(run).into_iter().find(named).unwrap_or(start)
}

/// Every file of a folder by name.
pub fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let read =
        |path: PathBuf| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap());
    entries.map(|entry| read(entry.unwrap().path())).collect()
}

/// Holds that two folders have the same files, byte for byte.
#[track_caller]
pub fn assert_same_files(left: &Path, right: &Path) {
    let (left, right) = (files(left), files(right));
    assert_eq!(left.keys().collect::<Vec<_>>(), right.keys().collect::<Vec<_>>());
    for (name, bytes) in &left {
        if bytes != &right[name] {
            let text = |bytes: &[u8]| String::from_utf8_lossy(&bytes[..bytes.len().min(400)]).into_owned();
            panic!("{name} differs:\n{}\n---\n{}", text(bytes), text(&right[name]));
        }
    }
}

/// Flips one bit in the middle of a file.
pub fn damage(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(file, bytes).unwrap();
}

/// A safetensors file of integer tensors with two dimensions.
pub fn integer_rows(tensors: &[(&str, usize, &[i64])]) -> Vec<u8> {
    let bytes = |values: &[i64]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let stored: Vec<(&str, Vec<usize>, Vec<u8>)> = tensors
        .iter()
        .map(|(name, columns, values)| (*name, vec![values.len() / columns, *columns], bytes(values)))
        .collect();
    let views = stored
        .iter()
        .map(|(name, shape, data)| (*name, TensorView::new(Dtype::I64, shape.clone(), data).unwrap()));
    safetensors::serialize(views, None).unwrap()
}

/// A draw below `below` that a seed and a counter fix (SplitMix64).
pub fn draw(seed: u64, counter: u64, below: usize) -> usize {
    let mut z =
        seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(counter.wrapping_mul(0xd1b5_4a32_d192_ed03));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) % below as u64) as usize
}

/// Images of noise around a colour, which is the class, as a safetensors file. The levels of a class's red, green and
/// blue are its number times the factors, wrapped, in steps.
#[derive(Clone, Copy)]
pub struct Colours {
    pub size: usize,
    pub classes: u64,
    pub step: u64,
    pub factors: [u64; 3],
}

impl Colours {
    pub fn images(self, first: u64, count: u64) -> Vec<u8> {
        let (mut pixels, mut labels) = (Vec::new(), Vec::new());
        let area = self.size * self.size;
        for image in first..first + count {
            let class = mix64(image) % self.classes;
            for place in 0..3 * area {
                let level = self.step * (class * self.factors[place / area] % self.classes);
                pixels.push((level + mix64(image << 16 | place as u64) % 100) as u8);
            }
            labels.push(class as u8);
        }
        let shape = vec![count as usize, 3, self.size, self.size];
        let views = [
            ("images", TensorView::new(Dtype::U8, shape, &pixels).unwrap()),
            ("labels", TensorView::new(Dtype::U8, vec![count as usize], &labels).unwrap()),
        ];
        safetensors::serialize(views, None).unwrap()
    }
}
