//! How exactly shaped links keep their shape: messages over one link, over two that share an egress, over a way that several
//! workers share by a board, each of which has it open for itself as processes have, and with latency; in one process and over
//! TCP, each beside the time it should take.
//!
//!     cargo run --release -p shoal-net --example shape

use std::error::Error;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use shoal_net::board::Board;
use shoal_net::{
    Endpoint, Fabric, LinkShape, Security, Settings, Shape, SharedWays, Tag, Way, connect, in_process_each,
};

const ROUNDS: usize = 7;
const WORKERS: usize = 3;

struct Case {
    what: &'static str,
    bytes: usize,
    /// Each of these sends to each of the receivers.
    senders: &'static [usize],
    receivers: &'static [usize],
    egress_bytes_per_s: Option<f64>,
    /// Of the way to the last worker, which the others share.
    way_bytes_per_s: Option<f64>,
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
            senders: &[0],
            receivers: &[1],
            egress_bytes_per_s: None,
            way_bytes_per_s: None,
            link: link(100e6, 0),
            seconds: 0.100,
        },
        Case {
            what: "10 MB at 100 MB/s, 20 ms",
            bytes: 10_000_000,
            senders: &[0],
            receivers: &[1],
            egress_bytes_per_s: None,
            way_bytes_per_s: None,
            link: link(100e6, 20),
            seconds: 0.120,
        },
        Case {
            what: "2 x 5 MB, egress 100 MB/s",
            bytes: 5_000_000,
            senders: &[0],
            receivers: &[1, 2],
            egress_bytes_per_s: Some(100e6),
            way_bytes_per_s: None,
            link: free,
            seconds: 0.100,
        },
        Case {
            what: "5 MB each of 2, way 100 MB/s",
            bytes: 5_000_000,
            senders: &[0, 1],
            receivers: &[2],
            egress_bytes_per_s: None,
            way_bytes_per_s: Some(100e6),
            link: free,
            seconds: 0.100,
        },
        Case {
            what: "the same, links 80 MB/s, 5 ms",
            bytes: 5_000_000,
            senders: &[0, 1],
            receivers: &[2],
            egress_bytes_per_s: None,
            way_bytes_per_s: Some(100e6),
            link: link(80e6, 5),
            seconds: 0.105,
        },
        Case {
            what: "50 MB at 1 GB/s, 5 ms",
            bytes: 50_000_000,
            senders: &[0],
            receivers: &[1],
            egress_bytes_per_s: None,
            way_bytes_per_s: None,
            link: link(1e9, 5),
            seconds: 0.055,
        },
        Case {
            what: "1 KB at 100 MB/s, 20 ms",
            bytes: 1000,
            senders: &[0],
            receivers: &[1],
            egress_bytes_per_s: None,
            way_bytes_per_s: None,
            link: link(100e6, 20),
            seconds: 0.02001,
        },
    ];
    println!("{:28} {:>10} {:>12} {:>8} {:>12} {:>8}", "", "should, ms", "in process", "", "TCP", "");
    let board = std::env::temp_dir().join(format!("shoal-shape-{}", std::process::id()));
    for case in cases {
        Board::create(&board, 1)?;
        let settings =
            (0..WORKERS).map(|_| settings(&case, &board)).collect::<Result<Vec<_>, Box<dyn Error>>>()?;
        let local = median(&in_process_each(&settings), &case)?;
        let tcp = median(&over_tcp(&settings)?, &case)?;
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
    std::fs::remove_file(board)?;
    Ok(())
}

/// A worker's, with the board open for itself.
fn settings(case: &Case, board: &Path) -> Result<Settings, Box<dyn Error>> {
    let shared = match case.way_bytes_per_s {
        None => None,
        Some(bytes_per_s) => {
            let way = Way { bytes_per_s, peers: [WORKERS - 1].into() };
            Some(SharedWays { board: Board::open(board)?, ways: [(0, way)].into() })
        }
    };
    let links = (0..WORKERS).map(|rank| (rank, case.link)).collect();
    let egress_bytes_per_s = case.egress_bytes_per_s;
    let shape = Shape { egress_bytes_per_s, links, shared, ..Shape::default() };
    Ok(Settings { shape: Some(shape), ..Settings::default() })
}

fn over_tcp(settings: &[Settings]) -> Result<Vec<Arc<Fabric>>, Box<dyn Error>> {
    let listeners =
        settings.iter().map(|_| TcpListener::bind("127.0.0.1:0")).collect::<Result<Vec<_>, _>>()?;
    let addresses = listeners.iter().map(TcpListener::local_addr).collect::<Result<Vec<_>, _>>()?;
    thread::scope(|scope| {
        let join = |((rank, listener), settings)| {
            let endpoint = Endpoint {
                rank,
                listener,
                addresses: addresses.clone(),
                fabric: 1,
                security: Security::Plain,
            };
            scope.spawn(move || connect(endpoint, settings))
        };
        let joining: Vec<_> = listeners.into_iter().enumerate().zip(settings).map(join).collect();
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
            let pairs =
                || case.senders.iter().flat_map(|from| case.receivers.iter().map(move |to| (*from, *to)));
            let receiving: Vec<_> = pairs()
                .map(|(from, to)| {
                    let fabric = &workers[to];
                    // Written to, so that its pages are there before the clock runs.
                    let mut into = vec![2u8; case.bytes];
                    scope.spawn(move || fabric.receive(from, tag, &mut into).map(|()| Instant::now()))
                })
                .collect();
            thread::sleep(begin.saturating_duration_since(Instant::now()));
            let begin = Instant::now();
            for (from, to) in pairs() {
                let (fabric, bytes) = (&workers[from], &bytes);
                scope.spawn(move || fabric.send(to, tag, bytes));
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
