//! How exactly shaped links keep their shape: messages over one link, over two that share an egress, and with latency, in
//! one process and over TCP, each beside the time it should take.
//!
//!     cargo run --release -p shoal-net --example shape

use std::error::Error;
use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use shoal_net::{Endpoint, Fabric, LinkShape, Security, Settings, Shape, Tag, connect, in_process};

const ROUNDS: usize = 7;

struct Case {
    what: &'static str,
    bytes: usize,
    /// Worker 0 sends to these.
    receivers: &'static [usize],
    egress_bytes_per_s: Option<f64>,
    link: LinkShape,
    seconds: f64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let link = |rate: f64, latency_ms: u64| LinkShape {
        bytes_per_s: Some(rate),
        latency: Duration::from_millis(latency_ms),
    };
    let free = LinkShape::default();
    let cases = [
        Case {
            what: "10 MB at 100 MB/s",
            bytes: 10_000_000,
            receivers: &[1],
            egress_bytes_per_s: None,
            link: link(100e6, 0),
            seconds: 0.100,
        },
        Case {
            what: "10 MB at 100 MB/s, 20 ms",
            bytes: 10_000_000,
            receivers: &[1],
            egress_bytes_per_s: None,
            link: link(100e6, 20),
            seconds: 0.120,
        },
        Case {
            what: "2 x 5 MB, egress 100 MB/s",
            bytes: 5_000_000,
            receivers: &[1, 2],
            egress_bytes_per_s: Some(100e6),
            link: free,
            seconds: 0.100,
        },
        Case {
            what: "50 MB at 1 GB/s, 5 ms",
            bytes: 50_000_000,
            receivers: &[1],
            egress_bytes_per_s: None,
            link: link(1e9, 5),
            seconds: 0.055,
        },
        Case {
            what: "1 KB at 100 MB/s, 20 ms",
            bytes: 1000,
            receivers: &[1],
            egress_bytes_per_s: None,
            link: link(100e6, 20),
            seconds: 0.02001,
        },
    ];
    println!("{:28} {:>10} {:>12} {:>8} {:>12} {:>8}", "", "should, ms", "in process", "", "TCP", "");
    for case in cases {
        let links = (0..3).map(|rank| (rank, case.link)).collect();
        let shape = Shape { egress_bytes_per_s: case.egress_bytes_per_s, links, ..Shape::default() };
        let settings = Settings { shape: Some(shape), ..Settings::default() };
        let local = median(&in_process(3, &settings), &case)?;
        let tcp = median(&over_tcp(3, &settings)?, &case)?;
        let off = |found: f64| (found / case.seconds - 1.0) * 100.0;
        let (should, ms) = (case.seconds * 1e3, 1e3);
        println!(
            "{:28} {should:>10.2} {:>12.2} {:>+7.2}% {:>12.2} {:>+7.2}%",
            case.what,
            local * ms,
            off(local),
            tcp * ms,
            off(tcp)
        );
    }
    Ok(())
}

fn over_tcp(count: usize, settings: &Settings) -> Result<Vec<Arc<Fabric>>, Box<dyn Error>> {
    let listeners = (0..count).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<Result<Vec<_>, _>>()?;
    let addresses = listeners.iter().map(TcpListener::local_addr).collect::<Result<Vec<_>, _>>()?;
    thread::scope(|scope| {
        let join = |(rank, listener)| {
            let endpoint = Endpoint {
                rank,
                listener,
                addresses: addresses.clone(),
                fabric: 1,
                security: Security::Plain,
            };
            scope.spawn(move || connect(endpoint, settings))
        };
        let joining: Vec<_> = listeners.into_iter().enumerate().map(join).collect();
        joining.into_iter().map(|joined| Ok(joined.join().map_err(|_| "a worker panicked")??)).collect()
    })
}

/// Seconds from the beginning of sending to the last receiver's end; the messages have been asked for before.
fn median(workers: &[Arc<Fabric>], case: &Case) -> Result<f64, Box<dyn Error>> {
    let mut times = Vec::new();
    for round in 0..ROUNDS {
        let tag = Tag(round as u128);
        let bytes = vec![1u8; case.bytes];
        let begin = Instant::now() + Duration::from_millis(100);
        let ends = thread::scope(|scope| {
            let receiving: Vec<_> = case
                .receivers
                .iter()
                .map(|receiver| {
                    let fabric = &workers[*receiver];
                    // Written to, so that its pages are there before the clock runs.
                    let mut into = vec![2u8; case.bytes];
                    scope.spawn(move || fabric.receive(0, tag, &mut into).map(|()| Instant::now()))
                })
                .collect();
            thread::sleep(begin.saturating_duration_since(Instant::now()));
            let begin = Instant::now();
            for receiver in case.receivers {
                let (fabric, bytes) = (&workers[0], &bytes);
                scope.spawn(move || fabric.send(*receiver, tag, bytes));
            }
            let ends: Result<Vec<_>, _> = receiving
                .into_iter()
                .map(|thread| thread.join().map_err(|_| "a receiver panicked"))
                .collect();
            ends.map(|ends| (begin, ends))
        });
        let (begin, ends) = ends?;
        let mut last = begin;
        for end in ends {
            last = last.max(end?);
        }
        times.push((last - begin).as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times[ROUNDS / 2])
}
