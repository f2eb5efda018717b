//! Real processes that are killed, frozen and cut off in the middle of their work: every survivor ends within the
//! deadline, names the culprit, and leaves neither a thread nor a connection behind. And a slow receiver, whose sender
//! does not pile up what it does not take.
//!
//! The test has its own main, because it starts itself again as the workers.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use shoal_net::collective::{Wire, all_reduce};
use shoal_net::identity::{Authority, Identity};
use shoal_net::{Endpoint, Error, Fabric, Security, Settings, Tag, connect};

const DEADLINE: Duration = Duration::from_secs(1);
/// What a loaded machine may add before the test gives up on a worker.
const PATIENCE: Duration = Duration::from_secs(30);
const WORKERS: usize = 4;
const VICTIM: usize = 2;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if arguments.get(1).is_some_and(|word| word == "worker") {
        return worker(&arguments[2..]);
    }
    for secure in [false, true] {
        scenario("killed", secure, Fault::Kill);
        scenario("frozen", secure, Fault::Freeze);
        scenario("cut off", secure, Fault::Cut);
    }
    slow_receiver();
}

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    Kill,
    Freeze,
    Cut,
}

/// A worker's process and what it says.
struct Worker {
    process: Child,
    input: ChildStdin,
    lines: mpsc::Receiver<String>,
    address: SocketAddr,
}

impl Worker {
    fn start(work: &str, rank: usize, count: usize, secure: bool) -> Worker {
        let own = std::env::current_exe().expect("the test's own path");
        let mut process = Command::new(own)
            .args(["worker", work, &rank.to_string(), &count.to_string(), &secure.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a worker starts");
        let output = BufReader::new(process.stdout.take().expect("piped"));
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let input = process.stdin.take().expect("piped");
        let mut worker = Worker { process, input, lines, address: ([127, 0, 0, 1], 0).into() };
        worker.address = worker.line("listens ").parse().expect("an address");
        worker
    }

    /// The rest of the next line that begins so.
    fn line(&self, beginning: &str) -> String {
        let until = Instant::now() + PATIENCE;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let line =
                self.lines.recv_timeout(left).unwrap_or_else(|_| panic!("a worker never said {beginning:?}"));
            if let Some(rest) = line.strip_prefix(beginning) {
                return rest.to_owned();
            }
        }
    }

    fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args([signal, &self.process.id().to_string()]).status();
        assert!(sent.expect("kill runs").success(), "kill {signal}");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn scenario(what: &str, secure: bool, fault: Fault) {
    let authority = Authority::new().expect("an authority");
    let mut workers: Vec<Worker> =
        (0..WORKERS).map(|rank| Worker::start("train", rank, WORKERS, secure)).collect();
    let addresses: Vec<SocketAddr> = workers.iter().map(|worker| worker.address).collect();
    // Whatever goes to or comes from the victim passes through these.
    let links = Arc::new(AtomicBool::new(true));
    let through =
        |address: SocketAddr| if fault == Fault::Cut { forwarded(address, links.clone()) } else { address };
    let to_victim = through(addresses[VICTIM]);
    let from_victim: Vec<SocketAddr> = addresses.iter().map(|address| through(*address)).collect();
    for (rank, worker) in workers.iter_mut().enumerate() {
        let mut seen = if rank == VICTIM { from_victim.clone() } else { addresses.clone() };
        seen[VICTIM] = if rank == VICTIM { addresses[VICTIM] } else { to_victim };
        let seen: Vec<String> = seen.iter().map(SocketAddr::to_string).collect();
        let identity = authority.issue(&common::worker_name(rank)).expect("an identity");
        let pems = [identity.certificate_pem(), identity.key_pem(), identity.authority_pem()];
        let pems = pems.map(|pem| pem.replace('\n', "|"));
        writeln!(worker.input, "{}\n{}", seen.join(" "), pems.join("\n")).expect("the worker listens");
    }
    for worker in &workers {
        worker.line("step 20");
    }
    let struck = Instant::now();
    match fault {
        Fault::Kill => workers[VICTIM].process.kill().expect("killed"),
        Fault::Freeze => workers[VICTIM].signal("-STOP"),
        Fault::Cut => links.store(false, Ordering::SeqCst),
    }
    let mut slowest = 0.0f64;
    for (rank, worker) in workers.iter().enumerate().filter(|(rank, _)| *rank != VICTIM) {
        let culprit = worker.line("ended by ");
        slowest = slowest.max(struck.elapsed().as_secs_f64());
        assert!(culprit.starts_with(&format!("{VICTIM} ")), "{what}: worker {rank} was ended by {culprit}");
        assert_eq!(worker.line("left behind "), "nothing", "{what}: worker {rank}");
    }
    if fault == Fault::Cut {
        // It cannot know that it is the one who is cut off, but it must not hang either.
        workers[VICTIM].line("ended by ");
    }
    if fault == Fault::Freeze {
        workers[VICTIM].signal("-CONT");
        workers[VICTIM].line("ended by ");
    }
    println!(
        "test {what}, TLS {secure}: ok, the last survivor ended after {slowest:.2} s (deadline {DEADLINE:?})"
    );
}

/// An address that leads to another as long as `open` is true. After that nothing passes, and nothing is closed.
fn forwarded(to: SocketAddr, open: Arc<AtomicBool>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("an address");
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let Ok(server) = TcpStream::connect(to) else { continue };
            let pairs = [(client.try_clone(), server.try_clone()), (Ok(server), Ok(client))];
            for pair in pairs {
                let (Ok(mut from), Ok(mut to)) = pair else { return };
                let open = open.clone();
                thread::spawn(move || {
                    let mut bytes = vec![0; 1 << 16];
                    while let Ok(count @ 1..) = from.read(&mut bytes) {
                        while !open.load(Ordering::SeqCst) {
                            thread::park();
                        }
                        if to.write_all(&bytes[..count]).is_err() {
                            return;
                        }
                    }
                });
            }
        }
    });
    address
}

/// What the process has open: connections and threads.
fn belongings() -> (usize, usize) {
    let sockets = std::fs::read_dir("/proc/self/fd").expect("proc is mounted").filter(|entry| {
        let target = entry.as_ref().ok().and_then(|entry| std::fs::read_link(entry.path()).ok());
        target.is_some_and(|target| target.to_string_lossy().starts_with("socket:"))
    });
    (sockets.count(), std::fs::read_dir("/proc/self/task").expect("proc is mounted").count())
}

fn worker(arguments: &[String]) {
    let [work, rank, count, secure] = arguments else { panic!("worker WORK RANK COUNT SECURE") };
    let (rank, count): (usize, usize) = (rank.parse().expect("a rank"), count.parse().expect("a count"));
    let before = belongings();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    println!("listens {}", listener.local_addr().expect("an address"));
    let mut lines = std::io::stdin().lines().map_while(Result::ok);
    let addresses =
        lines.next().expect("addresses").split(' ').map(|word| word.parse().expect("an address")).collect();
    let security = match secure.as_str() {
        "true" => {
            let mut pem = || lines.next().expect("a PEM").replace('|', "\n");
            let identity = Identity::from_pem(&pem(), &pem(), &pem()).expect("an identity");
            Security::Tls { identity, names: (0..count).map(common::worker_name).collect() }
        }
        _ => Security::Plain,
    };
    let settings = Settings { deadline: DEADLINE, join_deadline: PATIENCE, ..Settings::default() };
    let fabric =
        connect(Endpoint { rank, listener, addresses, fabric: 3, security }, &settings).expect("joined");
    match work.as_str() {
        "train" => train(&fabric),
        _ => slow_transfer(&fabric),
    }
    drop(fabric);
    match belongings() == before {
        true => println!("left behind nothing"),
        false => println!("left behind {:?} where there was {before:?} (connections, threads)", belongings()),
    }
}

/// Reductions of all sizes without end, and a second lane of messages to everyone.
fn train(fabric: &Fabric) {
    let members: Vec<usize> = (0..fabric.size()).collect();
    let result = thread::scope(|scope| {
        let lane = scope.spawn(|| {
            let mut bytes = vec![1; 300_000];
            for step in 0.. {
                for peer in members.iter().copied().filter(|peer| *peer != fabric.rank()) {
                    match fabric.rank() < peer {
                        true => fabric.send(peer, Tag(1 << 64 | step), &bytes)?,
                        false => fabric.receive(peer, Tag(1 << 64 | step), &mut bytes)?,
                    }
                }
            }
            Ok::<(), Error>(())
        });
        let run = || {
            for step in 0u128.. {
                let mut buffer = vec![1.0; [100, 3_000_000, 50_000][(step % 3) as usize]];
                all_reduce(fabric, &members, &mut buffer, Wire::F32, Tag(step))?;
                assert_eq!(buffer[0], fabric.size() as f32);
                println!("step {step}");
            }
            Ok(())
        };
        let first = run();
        assert_eq!(
            first,
            lane.join().expect("the lane does not panic"),
            "every thread ends for the same reason"
        );
        first
    });
    match result {
        Err(Error::PeerLost { rank, name, why }) => println!("ended by {rank} {name}: {why}"),
        other => println!("ended by something else: {other:?}"),
    }
}

const SLOW_BYTES: usize = 1 << 30;
const SLOW_MEMORY_MAX_KIB: usize = 64 << 10;

/// A gibibyte, of which neither side holds more than it is about to write or has just read.
fn slow_transfer(fabric: &Fabric) {
    let before = memory_peak_kib();
    if fabric.rank() == 0 {
        let mut outgoing = fabric.outgoing(1, Tag(1), SLOW_BYTES).expect("begun");
        let part = vec![7; 1 << 20];
        for _ in 0..SLOW_BYTES / part.len() {
            outgoing.write(&part).expect("written");
        }
    } else {
        let mut incoming = fabric.incoming(0, Tag(1), SLOW_BYTES).expect("begun");
        for _ in 0..SLOW_BYTES >> 23 {
            thread::sleep(Duration::from_millis(5));
            let mut wrong = 0;
            incoming
                .read_with(1 << 23, |piece| wrong += piece.iter().filter(|byte| **byte != 7).count())
                .expect("read");
            assert_eq!(wrong, 0);
        }
    }
    println!("grew {}", memory_peak_kib() - before);
    // The receiver is done when it says so; the sender stays until then, or its goodbye would be early.
    match fabric.rank() {
        0 => fabric.receive(1, Tag(2), &mut [0]).expect("the receiver is done"),
        _ => fabric.send(0, Tag(2), &[1]).expect("the sender waits"),
    }
}

fn memory_peak_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("proc is mounted");
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).expect("the peak is in it");
    line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).expect("a number of KiB")
}

fn slow_receiver() {
    let mut workers: Vec<Worker> = (0..2).map(|rank| Worker::start("slow", rank, 2, false)).collect();
    let addresses = format!("{} {}", workers[0].address, workers[1].address);
    for worker in &mut workers {
        writeln!(worker.input, "{addresses}").expect("the worker listens");
    }
    let grown: Vec<usize> =
        workers.iter().map(|worker| worker.line("grew ").parse().expect("a number")).collect();
    assert!(grown.iter().all(|kib| *kib <= SLOW_MEMORY_MAX_KIB), "memory grew by {grown:?} KiB");
    println!("test slow receiver of 1 GiB: ok, memory grew by {grown:?} KiB");
}
