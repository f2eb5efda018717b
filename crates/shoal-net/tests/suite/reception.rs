//! Many fabrics over one port: each connection reaches the fabric it is for, also when it comes first, and whatever else
//! comes to the port holds nobody up.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::{Random, settings, worker_name};
use shoal_net::identity::Authority;
use shoal_net::wire::{HEADER_BYTES, Header, Hello, Kind};
use shoal_net::{Error, Fabric, Guard, Reception, Seat, Settings, Tag, all_but};

fn receptions(count: usize, secure: bool) -> Vec<Reception> {
    let authority = Authority::new().expect("an authority");
    let open = |rank: usize| {
        let guard = match secure {
            true => Guard::Tls(authority.issue(&worker_name(rank)).expect("an identity")),
            false => Guard::Plain,
        };
        Reception::open(TcpListener::bind("127.0.0.1:0").expect("a free port"), guard).expect("it opens")
    };
    (0..count).map(open).collect()
}

fn seat(receptions: &[Reception], rank: usize, fabric: u128) -> Seat {
    let addresses: Vec<SocketAddr> = receptions.iter().map(Reception::address).collect();
    let names = (0..receptions.len()).map(worker_name).collect();
    Seat { rank, peers: all_but(rank, addresses.len()), addresses, fabric, names }
}

fn join(reception: &Reception, seat: Seat) -> Arc<Fabric> {
    reception.connect(seat, &settings(), &AtomicBool::new(false)).expect("it joins")
}

#[test]
fn fabrics_come_and_go_over_one_port_and_do_not_mix() {
    const FABRICS: u128 = 6;
    for secure in [false, true] {
        let receptions = receptions(3, secure);
        std::thread::scope(|scope| {
            for fabric in 0..FABRICS {
                for (rank, reception) in receptions.iter().enumerate() {
                    let receptions = &receptions;
                    scope.spawn(move || {
                        // Some are told of a fabric long before others.
                        std::thread::sleep(Duration::from_millis(30 * ((fabric as u64 + rank as u64) % 4)));
                        let joined = join(reception, seat(receptions, rank, fabric));
                        let (next, before) = ((rank + 1) % 3, (rank + 2) % 3);
                        let mut got = vec![0; 70_000];
                        std::thread::scope(|inner| {
                            inner.spawn(|| joined.send(next, Tag(1), &[fabric as u8; 70_000]).expect("sent"));
                            joined.receive(before, Tag(1), &mut got).expect("received");
                        });
                        assert!(got.iter().all(|byte| *byte == fabric as u8), "fabric {fabric}");
                    });
                }
            }
        });
    }
}

#[test]
fn who_is_missing_is_told_by_rank_and_joining_can_be_given_up() {
    let receptions = receptions(3, false);
    let impatient = Settings { join_deadline: Duration::from_millis(500), ..settings() };
    let errors: Vec<Error> = std::thread::scope(|scope| {
        let joining: Vec<_> = [0, 2]
            .map(|rank| {
                let (receptions, impatient) = (&receptions, &impatient);
                scope.spawn(move || {
                    let own = seat(receptions, rank, 9);
                    receptions[rank]
                        .connect(own, impatient, &AtomicBool::new(false))
                        .expect_err("one is missing")
                })
            })
            .into_iter()
            .collect();
        joining.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    for error in errors {
        let Error::Join { ranks, .. } = &error else { panic!("{error}") };
        assert_eq!(ranks, &[1], "{error}");
    }
    let given_up = AtomicBool::new(false);
    let patient = Settings { join_deadline: Duration::from_secs(600), ..settings() };
    let own = seat(&receptions, 0, 10);
    std::thread::scope(|scope| {
        let joining = scope.spawn(|| receptions[0].connect(own, &patient, &given_up).expect_err("given up"));
        given_up.store(true, Ordering::SeqCst);
        joining.join().expect("no panic");
    });
    // The number is free again.
    std::thread::scope(|scope| {
        for (rank, reception) in receptions.iter().enumerate() {
            let own = seat(&receptions, rank, 10);
            scope.spawn(move || join(reception, own));
        }
    });
}

#[test]
fn a_worker_that_is_cut_off_is_lost_to_all_and_comes_back() {
    for secure in [false, true] {
        let receptions = receptions(3, secure);
        let join_all = |fabric: u128| -> Vec<Arc<Fabric>> {
            std::thread::scope(|scope| {
                let receptions = &receptions;
                let joining: Vec<_> = (0..3)
                    .map(|rank| scope.spawn(move || join(&receptions[rank], seat(receptions, rank, fabric))))
                    .collect();
                joining.into_iter().map(|joined| joined.join().expect("it joins")).collect()
            })
        };
        let before = join_all(1);
        let cut = std::time::Instant::now();
        let lasting = Duration::from_millis(400);
        receptions[1].cut(lasting);
        let told = |rank: usize, from: usize| before[rank].receive(from, Tag(1), &mut [0; 8]);
        assert!(matches!(told(0, 1), Err(Error::PeerLost { rank: 1, .. })), "{:?}", told(0, 1));
        assert!(matches!(told(2, 1), Err(Error::PeerLost { rank: 1, .. })), "{:?}", told(2, 1));
        assert!(matches!(told(1, 0), Err(Error::PeerLost { .. })), "{:?}", told(1, 0));
        // Whoever asks for it meanwhile waits until it is over.
        let after = join_all(2);
        assert!(cut.elapsed() >= lasting);
        after[1].send(0, Tag(1), &[7; 8]).expect("sent");
        let mut got = [0; 8];
        after[0].receive(1, Tag(1), &mut got).expect("received");
        assert_eq!(got, [7; 8]);
    }
}

#[test]
fn what_ends_a_fabric_reaches_those_who_have_nothing_to_exchange() {
    // In a row: each knows its neighbours alone.
    const COUNT: usize = 5;
    let receptions = receptions(COUNT, false);
    let row = |rank: usize| Seat {
        peers: all_but(rank, COUNT).into_iter().filter(|peer| peer.abs_diff(rank) == 1).collect(),
        ..seat(&receptions, rank, 3)
    };
    let mut fabrics: Vec<Arc<Fabric>> = std::thread::scope(|scope| {
        let joining: Vec<_> = (0..COUNT)
            .map(|rank| (&receptions[rank], row(rank)))
            .map(|(own, seat)| scope.spawn(|| join(own, seat)))
            .collect();
        joining.into_iter().map(|joined| joined.join().expect("it joins")).collect()
    });
    assert!(matches!(fabrics[0].send(2, Tag(1), &[1]), Err(Error::NoPeer { peer: 2, .. })));
    receptions[COUNT - 1].cut(Duration::from_secs(60));
    drop(fabrics.pop());
    for fabric in &fabrics[..COUNT - 2] {
        let told = fabric.receive((fabric.rank() + 1) % COUNT, Tag(2), &mut [0; 8]);
        assert!(matches!(told, Err(Error::PeerLost { rank, .. }) if rank == COUNT - 1), "{told:?}");
    }
}

#[test]
fn a_worker_under_another_name_is_refused() {
    let authority = Authority::new().expect("an authority");
    let open = |name: &str| {
        let guard = Guard::Tls(authority.issue(name).expect("an identity"));
        Reception::open(TcpListener::bind("127.0.0.1:0").expect("a free port"), guard).expect("it opens")
    };
    // A member of the fleet that says it is worker 1, and is not.
    let receptions = [open(&worker_name(0)), open(&worker_name(5))];
    let impatient = Settings { join_deadline: Duration::from_millis(1500), ..settings() };
    let said: Vec<String> = std::thread::scope(|scope| {
        let joining: Vec<_> = (0..2)
            .map(|rank| {
                let (own, impatient) = (seat(&receptions, rank, 4), &impatient);
                let reception = &receptions[rank];
                scope.spawn(move || {
                    reception
                        .connect(own, impatient, &AtomicBool::new(false))
                        .expect_err("refused")
                        .to_string()
                })
            })
            .collect();
        joining.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    assert!(said[0].contains("its certificate is another's"), "{said:?}");
}

#[test]
fn garbage_and_connections_that_nobody_wants_hold_nobody_up_and_are_closed() {
    let receptions = receptions(2, false);
    let mut strangers: Vec<TcpStream> = Vec::new();
    for number in 0..40u64 {
        let mut stranger = TcpStream::connect(receptions[0].address()).expect("the port is open");
        let mut random = Random(number);
        let mut hello = Hello { fabric: 77, rank: 1, size: 2, line: 0, lines: 3 }.header().encode();
        match number % 4 {
            0 => stranger.write_all(&random.bytes(200)).expect("written"),
            1 => {
                hello[random.below(HEADER_BYTES)] ^= 1 << random.below(8);
                stranger.write_all(&hello).expect("written");
            }
            2 => stranger.write_all(&hello).expect("written"),
            _ => {}
        }
        strangers.push(stranger);
    }
    std::thread::scope(|scope| {
        for (rank, reception) in receptions.iter().enumerate() {
            let own = seat(&receptions, rank, 1);
            scope.spawn(move || join(reception, own));
        }
    });
    for stranger in &mut strangers {
        stranger.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        // An end, in order or not; never a welcome, and never left open.
        let read = stranger.read(&mut [0; HEADER_BYTES]);
        assert!(
            matches!(&read, Ok(0)) || read.is_err_and(|error| error.kind() != std::io::ErrorKind::WouldBlock)
        );
    }
}

#[test]
fn plain_receptions_stay_on_loopback() {
    let listener = TcpListener::bind("0.0.0.0:0").expect("a free port");
    assert!(matches!(Reception::open(listener, Guard::Plain), Err(Error::PlainOutside { .. })));
    let receptions = receptions(2, false);
    let mut own = seat(&receptions, 0, 1);
    own.addresses[1] = "10.0.0.7:9000".parse().expect("an address");
    let refused = receptions[0].connect(own, &settings(), &AtomicBool::new(false));
    assert!(matches!(refused, Err(Error::PlainOutside { .. })));
}

#[test]
fn hellos_come_back_as_they_were_and_whatever_else_is_refused() {
    let mut random = Random(5);
    let mut refused = 0;
    for _ in 0..100_000 {
        let word = |random: &mut Random| {
            if random.below(2) == 0 { random.next() } else { random.next() % (9 << 32) }
        };
        let header = Header {
            kind: if random.below(8) == 0 { Kind::Welcome } else { Kind::Hello },
            tag: Tag(random.next() as u128),
            total: word(&mut random),
            offset: word(&mut random),
            length: 0,
        };
        match Hello::of(&header) {
            Ok(hello) => assert_eq!(hello.header(), header),
            Err(_) => refused += 1,
        }
    }
    assert!((1..100_000).contains(&refused));
}
