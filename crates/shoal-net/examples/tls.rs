//! What mutual TLS costs: how fast one core seals and opens records, by cipher, and how long messages
//! take from one process to another over loopback, plain and with TLS, free and held to 1 and 10 Gbit/s.
//!
//!     cargo run --release -p shoal-net --example tls [-- --mib 256 --repeats 7]
//!
//! Plain and TLS take turns; what is shown is the median, and the ratio once more by the fastest. Beside it stands what the
//! sender and the receiver computed for each gigabyte, which other work on the cores does not change: at 10 Gbit/s an end
//! that has one core to itself can spend 0.8 s.

mod processes;

use std::hint::black_box;
use std::time::Instant;

use processes::{Outcome, Processes, join};

use ring::aead::{
    AES_128_GCM, AES_256_GCM, Aad, Algorithm, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey,
};
use rustix::time::{ClockId, clock_gettime};
use shoal_net::{LinkShape, Settings, Shape, Tag};

/// What a record holds at most.
const RECORD_BYTES: usize = 16_384;
const RATES_MBIT: [usize; 3] = [1_000, 10_000, 0];

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [first, rest @ ..] = &arguments[..]
        && first == "worker"
    {
        return worker(rest);
    }
    let number = |name: &str, otherwise: usize| -> Outcome<usize> {
        match arguments.iter().position(|word| word == name) {
            Some(place) => Ok(arguments.get(place + 1).ok_or(format!("{name} needs a number"))?.parse()?),
            None => Ok(otherwise),
        }
    };
    let (bytes, repeats) = (number("--mib", 256)? << 20, number("--repeats", 7)?.max(1));
    println!("records of {RECORD_BYTES} bytes, one core");
    for (name, algorithm) in [
        ("AES-128-GCM", &AES_128_GCM),
        ("AES-256-GCM", &AES_256_GCM),
        ("ChaCha20-Poly1305", &CHACHA20_POLY1305),
    ] {
        let [sealed, opened] = cipher(algorithm)?;
        println!("  {name:20} {:>5.2} GB/s sealed, {:>5.2} GB/s opened", sealed / 1e9, opened / 1e9);
    }
    println!("one message of {} MiB from one process to another; milliseconds", bytes >> 20);
    println!(
        "{:10} {:>9} {:>9} {:>9} {:>8} {:>8}   CPU s a GB, sender + receiver",
        "", "should", "plain", "TLS", "ratio", "fastest"
    );
    for megabits in RATES_MBIT {
        let [mut plain, mut tls] = [Vec::new(), Vec::new()];
        for _ in 0..repeats {
            plain.push(transfer(megabits, bytes, false)?);
            tls.push(transfer(megabits, bytes, true)?);
        }
        let median = |runs: &[Ran], part: fn(&Ran) -> f64| {
            let mut values: Vec<f64> = runs.iter().map(part).collect();
            values.sort_by(f64::total_cmp);
            (values[values.len() / 2], values[0])
        };
        let (should, what) = match megabits {
            0 => (String::new(), "loopback".to_owned()),
            _ => (
                format!("{:.1}", bytes as f64 * 8e-3 / megabits as f64),
                format!("{} Gbit/s", megabits / 1000),
            ),
        };
        let wall = |runs: &[Ran]| median(runs, |ran| ran.seconds);
        let spent = |runs: &[Ran]| {
            let [sent, received] = [median(runs, |ran| ran.sender_cpu), median(runs, |ran| ran.receiver_cpu)];
            format!("{:.2} + {:.2}", sent.0 / bytes as f64 * 1e9, received.0 / bytes as f64 * 1e9)
        };
        println!(
            "{what:10} {should:>9} {:>9.1} {:>9.1} {:>7.3}x {:>7.3}x   plain {}, TLS {}",
            wall(&plain).0 * 1e3,
            wall(&tls).0 * 1e3,
            wall(&tls).0 / wall(&plain).0,
            wall(&tls).1 / wall(&plain).1,
            spent(&plain),
            spent(&tls)
        );
    }
    Ok(())
}

/// One transfer, in seconds.
struct Ran {
    /// Until everything has arrived, a small message back included.
    seconds: f64,
    sender_cpu: f64,
    receiver_cpu: f64,
}

/// Bytes that the cipher itself seals, and opens with a copy, in a second of computing.
fn cipher(algorithm: &'static Algorithm) -> Outcome<[f64; 2]> {
    let failed = |_| "the cipher failed";
    let key = LessSafeKey::new(UnboundKey::new(algorithm, &vec![7; algorithm.key_len()]).map_err(failed)?);
    let nonce = || Nonce::assume_unique_for_key([1; 12]);
    let mut record = vec![3u8; RECORD_BYTES];
    let records = (256 << 20) / RECORD_BYTES;
    let rate = |before: f64| (records * RECORD_BYTES) as f64 / (computed() - before);
    let before = computed();
    for _ in 0..records {
        let seal = key.seal_in_place_separate_tag(nonce(), Aad::empty(), &mut record);
        black_box(seal.map_err(failed)?.as_ref());
    }
    let sealed = rate(before);
    key.seal_in_place_append_tag(nonce(), Aad::empty(), &mut record).map_err(failed)?;
    let mut copy = record.clone();
    let before = computed();
    for _ in 0..records {
        copy.copy_from_slice(&record);
        key.open_in_place(nonce(), Aad::empty(), &mut copy).map_err(failed)?;
    }
    Ok([sealed, rate(before)])
}

fn transfer(megabits: usize, bytes: usize, secure: bool) -> Outcome<Ran> {
    let words = |rank: usize| {
        let mut words = [rank, megabits, bytes].map(|number| number.to_string()).to_vec();
        words.push(secure.to_string());
        words
    };
    let mut workers = Processes::start((0..2).map(words))?;
    let mut numbers = Vec::new();
    for output in &mut workers.outputs {
        let line = output.next().ok_or("a worker ended early")??;
        numbers.extend(line.split(' ').map(str::parse::<f64>).collect::<Result<Vec<_>, _>>()?);
    }
    let [seconds, sender_cpu, _, receiver_cpu] = numbers[..] else { return Err("two numbers each".into()) };
    workers.finish()?;
    Ok(Ran { seconds, sender_cpu, receiver_cpu })
}

/// Seconds that all threads of this process have computed.
fn computed() -> f64 {
    let spent = clock_gettime(ClockId::ProcessCPUTime);
    spent.tv_sec as f64 + spent.tv_nsec as f64 * 1e-9
}

fn worker(arguments: &[String]) -> Outcome<()> {
    let [rank, megabits, bytes, secure] = arguments else { return Err("worker needs four words".into()) };
    let (rank, megabits, bytes): (usize, usize, usize) = (rank.parse()?, megabits.parse()?, bytes.parse()?);
    let rate = (megabits > 0).then_some(megabits as f64 * 1e6 / 8.0);
    let other_links = LinkShape { bytes_per_s: rate, ..LinkShape::default() };
    let shape = rate.map(|_| Shape { other_links, ..Shape::default() });
    let settings = Settings { shape, ..Settings::default() };
    let fabric = join(rank, secure, &settings)?;
    let mut buffer = vec![5u8; bytes];
    let mut answer = [0];
    // The first message warms up: connections grow, memory is touched.
    for round in 0..2 {
        let tag = Tag(1).part(round);
        let (begin, before) = (Instant::now(), computed());
        match rank {
            0 => {
                fabric.send(1, tag, &buffer)?;
                fabric.receive(1, tag, &mut answer)?;
            }
            _ => {
                fabric.receive(0, tag, &mut buffer)?;
                fabric.send(0, tag, &answer)?;
            }
        }
        if round == 1 {
            println!("{} {}", begin.elapsed().as_secs_f64(), computed() - before);
        }
    }
    Ok(())
}
