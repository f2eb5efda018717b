//! How fast collectives are between processes on loopback, plain and with TLS, and, with `--mpi`, the same sizes through
//! Open MPI over TCP in the same run, with the ratio.
//!
//!     cargo run --release -p shoal-net --example collectives -- --processes 4 [--mpi] [--max-mib 256] [--streams 2]
//!         [--mbit 10000]
//!
//! `--mbit` holds what each process sends to so many megabits a second, as a network card would (not for `--mpi`). A size is that of the whole buffer; a time is rank 0's, from a barrier to its end, the median of some rounds.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use shoal_net::collective::{Wire, all_gather, all_reduce, even, reduce_scatter, sum_f64};
use shoal_net::identity::{Authority, Identity};
use shoal_net::{Endpoint, Fabric, Security, Settings, Shape, Tag, connect};

type Outcome<T> = Result<T, Box<dyn Error>>;
/// Seconds by operation and bytes.
type Times = BTreeMap<(String, usize), f64>;

const OPERATIONS: [&str; 3] = ["all-reduce", "all-gather", "reduce-scatter"];

struct Options {
    processes: usize,
    mpi: bool,
    max_bytes: usize,
    streams: usize,
    /// What each process may send; zero is no limit.
    megabits: usize,
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
        mpi: arguments.iter().any(|word| word == "--mpi"),
        max_bytes: number("--max-mib", 256)? << 20,
        streams: number("--streams", Settings::default().streams)?,
        megabits: number("--mbit", 0)?,
    };
    let plain = ours(&options, false)?;
    let mpi = if options.mpi { mpi(&options)? } else { Times::new() };
    let tls = ours(&options, true)?;
    let limit =
        if options.megabits > 0 { format!(", {} Mbit/s each", options.megabits) } else { String::new() };
    println!("{} processes on loopback, {} streams{limit}; milliseconds", options.processes, options.streams);
    println!(
        "{:14} {:>10} {:>10} {:>10} {:>10} {:>9} {:>9}",
        "", "KiB", "plain", "TLS", "Open MPI", "MPI/plain", "MPI/TLS"
    );
    for operation in OPERATIONS {
        for (bytes, _) in sizes(options.max_bytes) {
            let key = (operation.to_owned(), bytes);
            let (plain, tls) = (plain[&key] * 1e3, tls[&key] * 1e3);
            print!("{operation:14} {:>10} {plain:>10.3} {tls:>10.3}", bytes >> 10);
            match mpi.get(&key) {
                Some(seconds) => {
                    let theirs = seconds * 1e3;
                    println!(" {theirs:>10.3} {:>8.2}x {:>8.2}x", theirs / plain, theirs / tls);
                }
                None => println!(),
            }
        }
    }
    Ok(())
}

/// Bytes, and how often each is measured.
fn sizes(max_bytes: usize) -> Vec<(usize, usize)> {
    (0..)
        .map(|step| 1024usize << (2 * step))
        .take_while(|bytes| *bytes <= max_bytes)
        .map(|bytes| (bytes, ((256 << 20) / bytes).clamp(5, 101) | 1))
        .collect()
}

fn ours(options: &Options, secure: bool) -> Outcome<Times> {
    let authority = Authority::new()?;
    let mut workers: Vec<Child> = Vec::new();
    let mut outputs = Vec::new();
    let mut addresses = Vec::new();
    for rank in 0..options.processes {
        let numbers = [rank, options.processes, options.max_bytes, options.streams, options.megabits];
        let mut worker = Command::new(std::env::current_exe()?)
            .arg("worker")
            .args(numbers.map(|number| number.to_string()))
            .arg(secure.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut lines = BufReader::new(worker.stdout.take().ok_or("no output")?).lines();
        addresses.push(lines.next().ok_or("a worker ended early")??);
        outputs.push(lines);
        workers.push(worker);
    }
    for (rank, worker) in workers.iter_mut().enumerate() {
        let identity = authority.issue(&name(rank))?;
        let pems = [identity.certificate_pem(), identity.key_pem(), identity.authority_pem()];
        let pems = pems.map(|pem| pem.replace('\n', "|"));
        writeln!(worker.stdin.take().ok_or("no input")?, "{}\n{}", addresses.join(" "), pems.join("\n"))?;
    }
    let mut times = Times::new();
    for line in outputs.remove(0) {
        note(&line?, &mut times)?;
    }
    for mut worker in workers {
        let status = worker.wait()?;
        if !status.success() {
            return Err(format!("a worker ended with {status}").into());
        }
    }
    Ok(times)
}

fn note(line: &str, times: &mut Times) -> Outcome<()> {
    if let ["time", operation, bytes, seconds] = line.split_whitespace().collect::<Vec<_>>()[..] {
        times.insert((operation.to_owned(), bytes.parse()?), seconds.parse()?);
    }
    Ok(())
}

fn name(rank: usize) -> String {
    format!("worker-{rank}.bench")
}

fn mpi(options: &Options) -> Outcome<Times> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/collectives/mpi.c");
    let program = std::env::temp_dir().join(format!("shoal-net-mpi-{}", std::process::id()));
    let built = Command::new("mpicc").args(["-O3", "-o"]).arg(&program).arg(&source).status();
    let built = built.map_err(|cause| format!("mpicc: {cause} (Debian: openmpi-bin, libopenmpi-dev)"))?;
    if !built.success() {
        return Err("mpicc failed".into());
    }
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "--mca", "btl", "self,tcp"]);
    command.args(["--mca", "btl_tcp_if_include", "lo", "-np", &options.processes.to_string()]).arg(&program);
    for (bytes, rounds) in sizes(options.max_bytes) {
        command.args([bytes.to_string(), rounds.to_string()]);
    }
    let output = command.stderr(Stdio::inherit()).output()?;
    std::fs::remove_file(&program)?;
    if !output.status.success() {
        return Err(format!("mpirun ended with {}", output.status).into());
    }
    let mut times = Times::new();
    for line in String::from_utf8(output.stdout)?.lines() {
        note(line, &mut times)?;
    }
    Ok(times)
}

fn worker(arguments: &[String]) -> Outcome<()> {
    let [rank, count, max_bytes, streams, megabits, secure] = arguments else {
        return Err("worker needs six words".into());
    };
    let (rank, count): (usize, usize) = (rank.parse()?, count.parse()?);
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("{}", listener.local_addr()?);
    let mut lines = std::io::stdin().lines();
    let mut line = || -> Outcome<String> { Ok(lines.next().ok_or("the input ended")??) };
    let addresses = line()?.split(' ').map(str::parse).collect::<Result<Vec<SocketAddr>, _>>()?;
    let security = match secure.as_str() {
        "true" => {
            let mut pem = || line().map(|line| line.replace('|', "\n"));
            let identity = Identity::from_pem(&pem()?, &pem()?, &pem()?)?;
            Security::Tls { identity, names: (0..count).map(name).collect() }
        }
        _ => Security::Plain,
    };
    let megabits: usize = megabits.parse()?;
    let egress =
        |megabits: usize| Shape { egress_bytes_per_s: Some(megabits as f64 * 1e6 / 8.0), ..Shape::default() };
    let shape = (megabits > 0).then(|| egress(megabits));
    let settings = Settings { streams: streams.parse()?, shape, ..Settings::default() };
    let fabric = connect(Endpoint { rank, listener, addresses, fabric: 1, security }, &settings)?;
    measure(&fabric, max_bytes.parse()?)
}

fn measure(fabric: &Fabric, max_bytes: usize) -> Outcome<()> {
    let members: Vec<usize> = (0..fabric.size()).collect();
    let mut tag = 0u128;
    for (bytes, rounds) in sizes(max_bytes) {
        let mut buffer: Vec<f32> = (0..bytes / 4).map(|place| (place % 7) as f32).collect();
        let slices = even(buffer.len(), members.len());
        for operation in OPERATIONS {
            let mut times = Vec::with_capacity(rounds);
            for round in 0..=rounds {
                tag += 2;
                sum_f64(fabric, &members, &mut [0.0], Tag(tag))?;
                let begin = Instant::now();
                let tag = Tag(tag + 1);
                match operation {
                    "all-reduce" => all_reduce(fabric, &members, &mut buffer, Wire::F32, tag)?,
                    "all-gather" => all_gather(fabric, &members, &slices, &mut buffer, Wire::F32, tag)?,
                    _ => reduce_scatter(fabric, &members, &slices, &mut buffer, Wire::F32, tag)?,
                }
                if round > 0 {
                    times.push(begin.elapsed().as_secs_f64());
                }
            }
            times.sort_by(f64::total_cmp);
            if fabric.rank() == 0 {
                println!("time {operation} {bytes} {:.9}", times[times.len() / 2]);
            }
        }
    }
    Ok(())
}
