//! How quick messages pass between two workers of this machine: as workers exchange them, with the same proof of who they are,
//! both ways at once. Workers of one machine share its cores, so this is what woken threads and ciphers take, and no network.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Instant;

use shoal_net::collective::{all_gather_bytes, even};
use shoal_net::identity::Identity;
use shoal_net::{Endpoint, Fabric, Security, Settings, Tag, connect};

use crate::commands::trial::median;
use crate::error::{CliError, Result};

/// Bytes of a message, each way.
const SIZES: [usize; 5] = [1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20];
/// Times that each is exchanged; the median counts.
const ROUNDS: usize = 9;
/// What the two ends call what they do: they know of no other.
const FABRIC: u128 = 0x6c6f_6f70;

/// Bytes of a message, and the bytes a second that it moves at, its latency included. In some hundredths of a second.
pub fn measured(identity: &Identity, name: &str, settings: &Settings) -> Result<Vec<(u64, f64)>> {
    let here = || CliError::at(Path::new("127.0.0.1"));
    let listen = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(here());
    let (listener, other) = (listen()?, listen()?);
    let addresses = vec![listener.local_addr().map_err(here())?, other.local_addr().map_err(here())?];
    let end = |rank: usize, listener: TcpListener| {
        join(rank, listener, addresses.clone(), identity, name, settings)
    };
    std::thread::scope(|scope| {
        let answers = scope.spawn(|| exchange(&*end(1, other)?).map(drop));
        let measured = end(0, listener).and_then(|fabric| exchange(&fabric));
        answers.join().unwrap_or(Ok(()))?;
        measured
    })
}

fn join(
    rank: usize,
    listener: TcpListener,
    addresses: Vec<SocketAddr>,
    identity: &Identity,
    name: &str,
    settings: &Settings,
) -> Result<Arc<Fabric>> {
    // Both ends are this worker.
    let security = Security::Tls { identity: identity.clone(), names: vec![name.to_owned(); 2] };
    Ok(connect(Endpoint { rank, listener, addresses, fabric: FABRIC, security }, settings)?)
}

/// Each message is another thread's to move, as it is for one who trains: handing it over and being woken is part of what it
/// takes.
fn exchange(fabric: &Fabric) -> Result<Vec<(u64, f64)>> {
    let (start, started) = channel::<(usize, Tag)>();
    let (end, ended) = channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut both = vec![1u8; 2 * SIZES[SIZES.len() - 1]];
            for (size, tag) in started {
                let gathered =
                    all_gather_bytes(fabric, &[0, 1], &even(2 * size, 2), &mut both[..2 * size], tag);
                let _ = end.send(gathered);
            }
        });
        let mut by_size = Vec::new();
        for (number, size) in SIZES.into_iter().enumerate() {
            let mut seconds = Vec::new();
            for round in 0..ROUNDS {
                let tag = Tag((number * ROUNDS + round) as u128);
                let began = Instant::now();
                let gathered = start.send((size, tag)).ok().and_then(|()| ended.recv().ok());
                gathered.unwrap_or(Ok(()))?;
                seconds.push(began.elapsed().as_secs_f64());
            }
            by_size.push((size as u64, size as f64 / median(&mut seconds).max(f64::MIN_POSITIVE)));
        }
        drop(start);
        Ok(by_size)
    })
}

#[cfg(test)]
mod tests {
    use shoal_net::identity::Authority;

    use super::*;

    #[test]
    fn longer_messages_move_at_higher_rates() {
        let identity = Authority::new().unwrap().issue("a").unwrap();
        let by_size = measured(&identity, "a", &Settings::default()).unwrap();
        assert_eq!(by_size.len(), SIZES.len());
        let [first, last] = [by_size[0].1, by_size[SIZES.len() - 1].1];
        assert!(first > 0.0 && last > 2.0 * first, "{by_size:?}");
    }
}
