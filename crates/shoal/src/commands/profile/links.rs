//! How fast bytes move, by the size of the message: between the device and its host's memory, and between two processes
//! of this machine. Between machines it is their network that counts, which a fleet file states.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use shoal_fleet::Link;
use shoal_fleet::profile::{LinkProfile, LinkScope};
use shoal_kernels::{CpuDevice, Device, Element, Tensor};
use shoal_net::{Endpoint, Fabric, LinkShape, Security, Settings, Shape, Tag, collective, connect};

use super::super::trial::median;
use crate::error::{CliError, Result};
use crate::machine;

/// Bytes of a message.
const SIZES: [usize; 7] = [1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 25];
/// Of a copy to the device and back: as long as a large layer's parameters.
const LARGEST_COPY: usize = 1 << 27;
/// Times that each is sent; the median counts.
const ROUNDS: usize = 7;
/// Numbers that the two add up at a time, as a layer's gradients are; the most of them.
pub const SUMMED: usize = 1 << 20;
/// So many of them after each other are in no cache.
const SUMMED_APART: usize = 16;
/// What the two processes call what they do: they know of no other.
const FABRIC: u128 = 0x6c69_6e6b;

/// Between a device and the host's memory, there and back.
pub fn host(device: &dyn Device, kind: &str) -> Result<LinkProfile> {
    let mut by_size = Vec::new();
    // As training copies: by all threads.
    let host = CpuDevice::new("host", machine::cores(), CpuDevice::workspace_bytes(machine::cores()))?;
    for bytes in SIZES.into_iter().chain([LARGEST_COPY]) {
        let mut message = vec![1u8; bytes];
        let mut tensor = Tensor::new(device.arena(), "what is copied to and fro", bytes / 4)?;
        let mut seconds = Vec::new();
        for _ in 0..ROUNDS {
            device.wait()?;
            let started = Instant::now();
            let (mark, all) = (device.mark()?, 0..bytes / 4);
            device.write_bytes(&mark, &mut tensor, all.clone(), &mut |at, out| {
                host.round(&message[at..at + out.len()], Element::F32, out);
            })?;
            device.read_bytes(&mark, &tensor, all, &mut |at, piece| {
                host.round(piece, Element::F32, &mut message[at..at + piece.len()]);
            })?;
            seconds.push(started.elapsed().as_secs_f64() / 2.0);
        }
        by_size.push((bytes as u64, bytes as f64 / median(&mut seconds)));
    }
    Ok(LinkProfile { scope: LinkScope::Host, kind: kind.to_owned(), link: Link::measured(by_size) })
}

/// What joins two processes, and what is measured over it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// As fast as the machine is: how long messages take.
    Loopback,
    /// The usual network of fleets, played: what handling sums takes. Over a network they come a piece at a time, and whoever
    /// waits for them is woken more often.
    Network,
}

/// 10 Gbit/s, and the latency that a fleet file has where it says none.
pub const USUAL_NETWORK: LinkShape =
    LinkShape { bytes_per_s: Some(1.25e9), latency: Duration::from_micros(50) };

/// This process and another one like it, joined by TCP on the loopback interface.
pub struct Pair {
    fabric: Arc<Fabric>,
    other: Child,
    sums: Sums,
}

impl Pair {
    pub fn start(over: Over) -> Result<Pair> {
        let here = Path::new("127.0.0.1");
        let program = std::env::current_exe().map_err(CliError::at(here))?;
        let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(CliError::at(here))?;
        let other = TcpListener::bind(("127.0.0.1", 0)).map_err(CliError::at(here))?;
        let addresses = [&listener, &other].map(TcpListener::local_addr);
        let [Ok(own), Ok(theirs)] = addresses else {
            let what = "127.0.0.1: a listener has no address";
            return Err(CliError::said(what, "look at the loopback interface"));
        };
        // The port is the other's from here on.
        drop(other);
        let mut other = Command::new(&program)
            .args(["echo", &own.to_string(), &theirs.to_string()])
            .args((over == Over::Network).then_some("--network"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .map_err(CliError::at(&program))?;
        match join(0, listener, vec![own, theirs], over) {
            Ok(fabric) => Ok(Pair { fabric, other, sums: Sums::new() }),
            Err(error) => {
                end(&mut other);
                Err(error)
            }
        }
    }

    /// Messages to the other and back.
    pub fn link(&mut self) -> Result<LinkProfile> {
        let mut by_size = Vec::new();
        for (size, tags) in exchanges() {
            let mut message = vec![1u8; size];
            let mut seconds = Vec::new();
            for tag in tags {
                let started = Instant::now();
                self.fabric.send(1, tag, &message)?;
                self.fabric.receive(1, tag, &mut message)?;
                seconds.push(started.elapsed().as_secs_f64() / 2.0);
            }
            by_size.push((size as u64, size as f64 / median(&mut seconds)));
        }
        let (scope, kind) = (LinkScope::Process, "TCP, loopback".to_owned());
        Ok(LinkProfile { scope, kind, link: Link::measured(by_size) })
    }

    /// The two add up so many numbers so many times, as steps do. Returns the bytes that both have sent and received.
    pub fn add_up(&mut self, numbers: usize, rounds: u64) -> Result<u64> {
        let asked = [numbers as u64, rounds].map(u64::to_le_bytes);
        self.fabric.send(1, asking(self.sums.asked), asked.as_flattened())?;
        self.sums.add_up(&self.fabric, numbers, rounds)?;
        Ok(2 * 2 * rounds * (numbers * size_of::<f32>()) as u64)
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        end(&mut self.other);
    }
}

/// It waits for messages that do not come.
fn end(other: &mut Child) {
    let _ = other.kill();
    let _ = other.wait();
}

fn join(rank: usize, listener: TcpListener, addresses: Vec<SocketAddr>, over: Over) -> Result<Arc<Fabric>> {
    let endpoint = Endpoint { rank, listener, addresses, fabric: FABRIC, security: Security::Plain };
    let shape = (over == Over::Network).then(|| Shape { other_links: USUAL_NETWORK, ..Shape::default() });
    Ok(connect(endpoint, &Settings { shape, ..Settings::default() })?)
}

/// Numbers that the two add up, copied to and from the messages as gradients are. They lie one after the other in more memory
/// than caches have, as those of layers do.
struct Sums {
    gradients: Vec<f32>,
    messages: Vec<f32>,
    /// How often something was asked of the other.
    asked: u128,
}

impl Sums {
    fn new() -> Sums {
        let numbers = || vec![1f32; SUMMED * SUMMED_APART];
        Sums { gradients: numbers(), messages: numbers(), asked: 0 }
    }

    fn add_up(&mut self, fabric: &Fabric, numbers: usize, rounds: u64) -> Result {
        for round in 0..rounds {
            let first = round as usize % SUMMED_APART * SUMMED;
            let place = first..first + numbers.min(SUMMED);
            let (gradient, message) = (&mut self.gradients[place.clone()], &mut self.messages[place]);
            message.copy_from_slice(gradient);
            let tag = Tag(asking(self.asked).0 + 1 + u128::from(round));
            collective::all_reduce(fabric, &[0, 1], message, collective::Wire::F32, tag)?;
            gradient.copy_from_slice(message);
        }
        self.asked += 1;
        Ok(())
    }
}

/// What a question to the other is known by; its sums' tags follow.
fn asking(asked: u128) -> Tag {
    Tag((1 + asked) << 64)
}

/// What the two send each other: sizes, and each round's tag.
fn exchanges() -> impl Iterator<Item = (usize, impl Iterator<Item = Tag>)> {
    SIZES.into_iter().enumerate().map(|(number, size)| {
        let first = (number * ROUNDS) as u128;
        (size, (first..first + ROUNDS as u128).map(Tag))
    })
}

/// `shoal echo`: the other of the two processes.
#[derive(clap::Args)]
pub struct EchoOptions {
    measuring: SocketAddr,
    own: SocketAddr,
    #[arg(long)]
    network: bool,
}

pub fn echo(options: EchoOptions) -> Result {
    let EchoOptions { measuring, own, network } = options;
    let over = if network { Over::Network } else { Over::Loopback };
    let listener = TcpListener::bind(own).map_err(CliError::at(Path::new(&own.to_string())))?;
    let fabric = join(1, listener, vec![measuring, own], over)?;
    if over == Over::Loopback {
        for (size, tags) in exchanges() {
            let mut message = vec![0u8; size];
            for tag in tags {
                fabric.receive(0, tag, &mut message)?;
                fabric.send(0, tag, &message)?;
            }
        }
        return Ok(());
    }
    // Until the one that measures has gone, and ends this.
    let mut sums = Sums::new();
    loop {
        let mut asked = [[0; 8]; 2];
        fabric.receive(0, asking(sums.asked), asked.as_flattened_mut())?;
        let [numbers, rounds] = asked.map(u64::from_le_bytes);
        sums.add_up(&fabric, numbers as usize, rounds)?;
    }
}
