//! How fast collectives are between processes on loopback, plain and with TLS, and, with `--mpi`, the same sizes through
//! Open MPI over TCP and over shared memory, with the ratios.
//!
//!     cargo run --release -p shoal-net --example collectives -- --processes 4 [--mpi] [--min-kib 1] [--max-mib 256]
//!         [--repeats 3] [--streams 2] [--mbit 10000]
//!
//! `--mbit` holds what each process sends to so many megabits a second, as a network card would (not for `--mpi`). A size
//! is that of the whole buffer; a time is rank 0's, from a barrier to its end. All ways take turns, `--repeats` times, so
//! that whatever else the machine does meets all of them: what is shown is the median of all rounds, and the ratios once
//! more by the fastest rounds.

#[path = "../processes/mod.rs"]
mod processes;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use processes::{Outcome, Processes, join};
use shoal_net::collective::{Wire, all_gather, all_reduce, even, reduce_scatter, sum_f64};
use shoal_net::{Fabric, Settings, Shape, Tag};

/// Seconds of every round by operation and bytes.
type Times = BTreeMap<(String, usize), Vec<f64>>;

const OPERATIONS: [&str; 3] = ["all-reduce", "all-gather", "reduce-scatter"];
/// Rounds of one size, all repeats together, move about this much.
const BYTES_A_SIZE: usize = 256 << 20;

struct Options {
    processes: usize,
    min_bytes: usize,
    max_bytes: usize,
    repeats: usize,
    streams: usize,
    /// What each process may send; zero is no limit.
    megabits: usize,
}

impl Options {
    /// Bytes, and how often each is measured in one repeat.
    fn sizes(&self) -> Vec<(usize, usize)> {
        let rounds =
            |bytes: usize| (BYTES_A_SIZE / bytes / self.repeats).clamp(5_usize.div_ceil(self.repeats), 101);
        (0..)
            .map(|step| 1024usize << (2 * step))
            .skip_while(|bytes| *bytes < self.min_bytes)
            .take_while(|bytes| *bytes <= self.max_bytes)
            .map(|bytes| (bytes, rounds(bytes)))
            .collect()
    }

    fn size_words(&self) -> Vec<String> {
        self.sizes().into_iter().flat_map(|(bytes, rounds)| [bytes.to_string(), rounds.to_string()]).collect()
    }
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|word| word == "worker") {
        return worker(&arguments[1..]);
    }
    let number = |name: &str, otherwise: usize| -> Outcome<usize> {
        match arguments.iter().position(|word| word == name) {
            Some(place) => Ok(arguments.get(place + 1).ok_or(format!("{name} needs a number"))?.parse()?),
            None => Ok(otherwise),
        }
    };
    let options = Options {
        processes: number("--processes", 2)?,
        min_bytes: number("--min-kib", 1)? << 10,
        max_bytes: number("--max-mib", 256)? << 20,
        repeats: number("--repeats", 3)?.max(1),
        streams: number("--streams", Settings::default().streams)?,
        megabits: number("--mbit", 0)?,
    };
    let mpi = arguments.iter().any(|word| word == "--mpi").then(build_mpi).transpose()?;
    let [mut plain, mut tls, mut over_tcp, mut in_memory] = [(); 4].map(|()| Times::new());
    for _ in 0..options.repeats {
        ours(&options, false, &mut plain)?;
        if let Some(program) = &mpi {
            run_mpi(program, "self,tcp", &options, &mut over_tcp)?;
        }
        ours(&options, true, &mut tls)?;
        if let Some(program) = &mpi {
            run_mpi(program, "self,vader", &options, &mut in_memory)?;
        }
    }
    if let Some(program) = mpi {
        std::fs::remove_file(program)?;
    }
    show(&options, &plain, &tls, &over_tcp, &in_memory);
    Ok(())
}

fn show(options: &Options, plain: &Times, tls: &Times, over_tcp: &Times, in_memory: &Times) {
    let limit =
        if options.megabits > 0 { format!(", {} Mbit/s each", options.megabits) } else { String::new() };
    println!(
        "{} processes on loopback, {} streams{limit}; milliseconds, medians; ratios of medians / of fastest rounds",
        options.processes, options.streams
    );
    println!(
        "{:14} {:>8} {:>9} {:>9} {:>9} {:>9} {:>14} {:>14}",
        "", "KiB", "plain", "TLS", "MPI TCP", "MPI sm", "TLS/plain", "MPI TCP/plain"
    );
    for operation in OPERATIONS {
        for (bytes, _) in options.sizes() {
            let key = (operation.to_owned(), bytes);
            let found = |times: &Times| times.get(&key).map(|rounds| (median(rounds), fastest(rounds)));
            let time =
                |times| found(times).map_or(String::new(), |(median, _)| format!("{:.3}", median * 1e3));
            let ratio = |one, other| match (found(one), found(other)) {
                (Some(one), Some(other)) => format!("{:.2}x {:.2}x", one.0 / other.0, one.1 / other.1),
                _ => String::new(),
            };
            println!(
                "{operation:14} {:>8} {:>9} {:>9} {:>9} {:>9} {:>14} {:>14}",
                bytes >> 10,
                time(plain),
                time(tls),
                time(over_tcp),
                time(in_memory),
                ratio(tls, plain),
                ratio(over_tcp, plain)
            );
        }
    }
}

fn median(rounds: &[f64]) -> f64 {
    let mut rounds = rounds.to_vec();
    rounds.sort_by(f64::total_cmp);
    rounds[rounds.len() / 2]
}

fn fastest(rounds: &[f64]) -> f64 {
    rounds.iter().copied().fold(f64::INFINITY, f64::min)
}

fn ours(options: &Options, secure: bool, times: &mut Times) -> Outcome<()> {
    let words = |rank: usize| {
        let numbers = [rank, options.streams, options.megabits];
        let mut words = numbers.map(|number| number.to_string()).to_vec();
        words.push(secure.to_string());
        words.extend(options.size_words());
        words
    };
    let mut workers = Processes::start((0..options.processes).map(words))?;
    for line in workers.outputs.remove(0) {
        note(&line?, times)?;
    }
    workers.finish()
}

fn note(line: &str, times: &mut Times) -> Outcome<()> {
    if let ["time", operation, bytes, seconds] = line.split_whitespace().collect::<Vec<_>>()[..] {
        times.entry((operation.to_owned(), bytes.parse()?)).or_default().push(seconds.parse()?);
    }
    Ok(())
}

fn build_mpi() -> Outcome<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/collectives/mpi.c");
    let program = std::env::temp_dir().join(format!("shoal-net-mpi-{}", std::process::id()));
    let built = Command::new("mpicc").args(["-O3", "-o"]).arg(&program).arg(&source).status();
    let built = built.map_err(|cause| format!("mpicc: {cause} (Debian: openmpi-bin, libopenmpi-dev)"))?;
    if built.success() { Ok(program) } else { Err("mpicc failed".into()) }
}

fn run_mpi(program: &Path, carriers: &str, options: &Options, times: &mut Times) -> Outcome<()> {
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "--mca", "btl", carriers]);
    command.args(["--mca", "btl_tcp_if_include", "lo", "-np", &options.processes.to_string()]);
    let output = command.arg(program).args(options.size_words()).stderr(Stdio::inherit()).output()?;
    if !output.status.success() {
        return Err(format!("mpirun ended with {}", output.status).into());
    }
    String::from_utf8(output.stdout)?.lines().try_for_each(|line| note(line, times))
}

fn worker(arguments: &[String]) -> Outcome<()> {
    let [rank, streams, megabits, secure, sizes @ ..] = arguments else {
        return Err("worker needs four words, then sizes and rounds".into());
    };
    let megabits: usize = megabits.parse()?;
    let egress =
        |megabits: usize| Shape { egress_bytes_per_s: Some(megabits as f64 * 1e6 / 8.0), ..Shape::default() };
    let shape = (megabits > 0).then(|| egress(megabits));
    let settings = Settings { streams: streams.parse()?, shape, ..Settings::default() };
    let fabric = join(rank.parse()?, secure, &settings)?;
    measure(&fabric, sizes)
}

/// `sizes` are pairs of bytes and rounds, as they are for MPI.
fn measure(fabric: &Fabric, sizes: &[String]) -> Outcome<()> {
    let members: Vec<usize> = (0..fabric.size()).collect();
    let mut tag = 0u128;
    for [bytes, rounds] in sizes.as_chunks().0 {
        let (bytes, rounds): (usize, usize) = (bytes.parse()?, rounds.parse()?);
        let mut buffer: Vec<f32> = (0..bytes / 4).map(|place| (place % 7) as f32).collect();
        let slices = even(buffer.len(), members.len());
        for operation in OPERATIONS {
            let mut times = Vec::with_capacity(rounds + 1);
            for _ in 0..=rounds {
                tag += 2;
                sum_f64(fabric, &members, &mut [0.0], Tag(tag))?;
                let begin = Instant::now();
                let tag = Tag(tag + 1);
                match operation {
                    "all-reduce" => all_reduce(fabric, &members, &mut buffer, Wire::F32, tag)?,
                    "all-gather" => all_gather(fabric, &members, &slices, &mut buffer, Wire::F32, tag)?,
                    _ => reduce_scatter(fabric, &members, &slices, &mut buffer, Wire::F32, tag)?,
                }
                times.push(begin.elapsed().as_secs_f64());
            }
            // The first one warms up.
            for seconds in times.iter().skip(1).filter(|_| fabric.rank() == 0) {
                println!("time {operation} {bytes} {seconds:.9}");
            }
        }
    }
    Ok(())
}
