//! Sends and receives, the same over every transport.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::common::{Random, TRANSPORTS, Transport, each, fabrics, settings};
use shoal_net::board::Board;
use shoal_net::{Error, LinkShape, Settings, Shape, SharedWays, Tag, Way};

const LENGTHS: [usize; 9] = [0, 1, 3, 1000, 65_536, 65_537, 300_001, 1 << 20, 5_000_003];

/// Messages of all lengths around a ring of three.
fn all_lengths(transport: Transport, settings: &Settings) {
    let workers = fabrics(transport, 3, settings);
    each(&workers, |fabric| {
        let (next, before) = ((fabric.rank() + 1) % 3, (fabric.rank() + 2) % 3);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for (number, length) in LENGTHS.into_iter().enumerate() {
                    let bytes = Random((fabric.rank() * 100 + number) as u64).bytes(length);
                    fabric.send(next, Tag(number as u128), &bytes).expect("sent");
                }
            });
            for (number, length) in LENGTHS.into_iter().enumerate() {
                let mut bytes = vec![0; length];
                fabric.receive(before, Tag(number as u128), &mut bytes).expect("received");
                assert!(
                    bytes == Random((before * 100 + number) as u64).bytes(length),
                    "{transport:?} {length}"
                );
            }
        });
    });
}

#[test]
fn messages_of_every_length_arrive_whole() {
    for transport in TRANSPORTS {
        all_lengths(transport, &settings());
        all_lengths(transport, &Settings { streams: 5, ..settings() });
    }
}

#[test]
fn messages_over_shaped_links_arrive_whole() {
    let links = [
        LinkShape { bytes_per_s: Some(400e6), latency: Duration::ZERO },
        LinkShape { bytes_per_s: None, latency: Duration::from_millis(2) },
        LinkShape { bytes_per_s: Some(1e9), latency: Duration::from_millis(1) },
    ];
    for transport in TRANSPORTS {
        for link in links {
            let shape = Shape { egress_bytes_per_s: Some(800e6), other_links: link, ..Shape::default() };
            all_lengths(transport, &Settings { shape: Some(shape), ..settings() });
        }
    }
}

fn over_shared_ways(board: &Arc<Board>, latency: Duration) -> Settings {
    let way = |peers: &[usize]| Way { bytes_per_s: 200e6, peers: peers.iter().copied().collect() };
    let shared = SharedWays { board: board.clone(), ways: [(0, way(&[0, 1])), (1, way(&[1, 2]))].into() };
    let other_links = LinkShape { bytes_per_s: Some(400e6), latency };
    let shape = Shape { ways: vec![way(&[0])], shared: Some(shared), other_links, ..Shape::default() };
    Settings { shape: Some(shape), ..settings() }
}

#[test]
fn messages_over_shared_ways_arrive_whole() {
    let path = temporary("shared-ways");
    Board::create(&path, 2).expect("written");
    let board = Board::open(&path).expect("it is there");
    for transport in TRANSPORTS {
        for latency in [Duration::ZERO, Duration::from_millis(1)] {
            all_lengths(transport, &over_shared_ways(&board, latency));
        }
    }
    std::fs::remove_file(path).expect("it was there");
}

/// Sender and receiver both learn that it is the file, and neither has to wait until the other counts as dead.
#[test]
fn a_board_that_has_lost_its_clocks_ends_the_fabric_and_is_named() {
    let path = temporary("short");
    Board::create(&path, 0).expect("written");
    let board = Board::open(&path).expect("it is there");
    for transport in TRANSPORTS {
        for latency in [Duration::ZERO, Duration::from_millis(1)] {
            let workers = fabrics(transport, 2, &over_shared_ways(&board, latency));
            let errors = each(&workers, |fabric| match fabric.rank() {
                0 => fabric.send(1, Tag(1), &[1; 300_000]).expect_err("it has no clocks"),
                _ => fabric.receive(0, Tag(1), &mut [0; 300_000]).expect_err("nothing can be sent"),
            });
            assert!(matches!(&errors[0], Error::Board { path: named, .. } if *named == path), "{errors:?}");
            assert!(errors[1].to_string().contains("shorter than its clocks"), "{errors:?}");
        }
    }
    std::fs::remove_file(path).expect("it was there");
}

fn temporary(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("shoal-net-{name}-{}", std::process::id()))
}

/// What a link delays at the end is delivered all the same.
#[test]
fn last_words_over_a_slow_link_arrive() {
    for transport in TRANSPORTS {
        let link = LinkShape { bytes_per_s: None, latency: Duration::from_millis(100) };
        let shape = Shape { other_links: link, ..Shape::default() };
        let mut workers = fabrics(transport, 2, &Settings { shape: Some(shape), ..settings() });
        let leaving = workers.remove(1);
        std::thread::scope(|scope| {
            scope.spawn(move || leaving.send(0, Tag(1), &[3; 500_000]).expect("sent"));
            let mut bytes = vec![0; 500_000];
            workers[0].receive(1, Tag(1), &mut bytes).expect("what was sent before the end");
            assert!(bytes.iter().all(|byte| *byte == 3), "{transport:?}");
        });
    }
}

#[test]
fn small_messages_are_received_in_any_order_without_being_asked_for() {
    for transport in TRANSPORTS {
        let workers = fabrics(transport, 2, &settings());
        each(&workers, |fabric| {
            let peer = 1 - fabric.rank();
            for number in 0..50u8 {
                fabric.send(peer, Tag(number as u128), &[number; 100]).expect("sent");
            }
            for number in (0..50u8).rev() {
                let mut bytes = [0; 100];
                fabric.receive(peer, Tag(number as u128), &mut bytes).expect("received");
                assert_eq!(bytes, [number; 100]);
            }
        });
    }
}

/// Nothing blocks behind a message that nobody asked for yet: the large ones wait at their sender, each in its thread.
#[test]
fn large_messages_are_received_in_the_order_of_asking() {
    for transport in TRANSPORTS {
        let workers = fabrics(transport, 2, &settings());
        each(&workers, |fabric| {
            std::thread::scope(|scope| {
                for number in 0..4usize {
                    if fabric.rank() == 0 {
                        scope.spawn(move || {
                            let bytes = Random(number as u64).bytes(1_000_000 + number);
                            fabric.send(1, Tag(number as u128), &bytes).expect("sent");
                        });
                    }
                }
                for number in (0..4usize).rev().filter(|_| fabric.rank() == 1) {
                    let mut bytes = vec![0; 1_000_000 + number];
                    fabric.receive(0, Tag(number as u128), &mut bytes).expect("received");
                    assert!(bytes == Random(number as u64).bytes(1_000_000 + number));
                }
            });
        });
    }
}

/// Many lanes at once, both ways, over the same streams.
#[test]
fn lanes_do_not_disturb_each_other() {
    for transport in TRANSPORTS {
        let workers = fabrics(transport, 3, &settings());
        each(&workers, |fabric| {
            std::thread::scope(|scope| {
                for lane in 0..4usize {
                    for peer in (0..3).filter(|peer| *peer != fabric.rank()) {
                        let length = move |from: usize, round: usize| {
                            (from * 7 + lane * 131_071 + round * 77_777) % 700_000
                        };
                        let tag = move |from: usize, round: usize| {
                            Tag((from * 10_000 + lane * 100 + round) as u128)
                        };
                        scope.spawn(move || {
                            for round in 0..10 {
                                let bytes = vec![(lane * 16 + round) as u8; length(fabric.rank(), round)];
                                fabric.send(peer, tag(fabric.rank(), round), &bytes).expect("sent");
                            }
                        });
                        scope.spawn(move || {
                            for round in 0..10 {
                                let mut bytes = vec![0; length(peer, round)];
                                fabric.receive(peer, tag(peer, round), &mut bytes).expect("received");
                                assert!(bytes.iter().all(|byte| *byte == (lane * 16 + round) as u8));
                            }
                        });
                    }
                }
            });
        });
    }
}

#[test]
fn a_message_can_be_written_and_read_in_parts() {
    for transport in TRANSPORTS {
        for length in [40_000, 3_000_000] {
            let workers = fabrics(transport, 2, &settings());
            each(&workers, |fabric| {
                let all = Random(9).bytes(length);
                if fabric.rank() == 0 {
                    let mut outgoing = fabric.outgoing(1, Tag(1), length).expect("begun");
                    all.chunks(10_000).for_each(|part| outgoing.write(part).expect("written"));
                    return;
                }
                let mut incoming = fabric.incoming(0, Tag(1), length).expect("begun");
                let mut start = vec![0; length / 4];
                incoming.read(&mut start).expect("read");
                incoming
                    .read_with(length - start.len(), |piece| start.extend_from_slice(piece))
                    .expect("read");
                assert!(start == all);
            });
        }
    }
}

/// More small messages than the window holds: the rest wait at the sender until they are asked for.
#[test]
fn the_window_of_small_messages_is_no_trap() {
    for transport in TRANSPORTS {
        let workers = fabrics(transport, 2, &settings());
        let count = 200u8;
        each(&workers, |fabric| {
            for number in 0..count {
                match fabric.rank() {
                    0 => fabric.send(1, Tag(number as u128), &vec![number; 60_000]).expect("sent"),
                    _ => {
                        let mut bytes = vec![0; 60_000];
                        fabric.receive(0, Tag(number as u128), &mut bytes).expect("received");
                        assert!(bytes.iter().all(|byte| *byte == number));
                    }
                }
            }
        });
    }
}

#[test]
fn lengths_that_differ_are_an_error_on_both_sides_that_names_them() {
    for transport in TRANSPORTS {
        for (sent, wanted) in [(1_000_000u64, 999_999u64), (1_000_000, 10), (0, 500_000)] {
            let workers = fabrics(transport, 2, &settings());
            let results = each(&workers, |fabric| match fabric.rank() {
                0 => fabric.send(1, Tag(5), &vec![1; sent as usize]),
                _ => fabric.receive(0, Tag(5), &mut vec![0; wanted as usize]),
            });
            assert!(
                matches!(&results[1], Err(Error::Length { sent: s, wanted: w, .. }) if (*s, *w) == (sent, wanted)),
                "{transport:?} {sent} {wanted}: {results:?}"
            );
            if sent > 65_536 {
                assert!(matches!(&results[0], Err(Error::Length { .. })), "{transport:?}: {results:?}");
            }
            // It concerns one message only.
            let results = each(&workers, |fabric| match fabric.rank() {
                0 => fabric.send(1, Tag(6), &[7]),
                _ => fabric.receive(0, Tag(6), &mut [0]),
            });
            assert_eq!(results, [Ok(()), Ok(())]);
        }
    }
}

#[test]
fn an_abort_ends_every_wait_with_its_reason() {
    for transport in TRANSPORTS {
        let workers = fabrics(transport, 3, &settings());
        let results = each(&workers, |fabric| match fabric.rank() {
            0 => fabric.receive(1, Tag(1), &mut vec![0; 1_000_000]),
            1 => fabric.send(0, Tag(2), &vec![0; 1_000_000]),
            _ => {
                fabric.abort("the disk is full");
                fabric.send(0, Tag(3), &[1])
            }
        });
        for result in results {
            let Err(Error::Aborted { by, reason }) = result else { panic!("{transport:?}: {result:?}") };
            assert_eq!((by.as_str(), reason.as_str()), (workers[0].name(2), "the disk is full"));
        }
    }
}

#[test]
fn who_left_in_good_order_is_named_and_what_it_sent_can_be_received() {
    for transport in TRANSPORTS {
        let mut workers = fabrics(transport, 2, &settings());
        workers[1].send(0, Tag(1), b"last words").expect("sent");
        drop(workers.pop());
        let mut bytes = [0; 10];
        workers[0].receive(1, Tag(1), &mut bytes).expect("what was sent before the end");
        assert_eq!(&bytes, b"last words");
        let result = workers[0].receive(1, Tag(2), &mut bytes);
        assert!(matches!(result, Err(Error::PeerLeft { rank: 1, .. })), "{result:?}");
        assert!(workers[0].failure().is_none(), "a clean end is no failure");
    }
}

#[test]
fn a_message_that_nobody_sends_is_late() {
    for transport in TRANSPORTS {
        let settings = Settings { message_deadline: Duration::from_millis(300), ..settings() };
        let workers = fabrics(transport, 2, &settings);
        for length in [10, 1_000_000] {
            let result = workers[0].receive(1, Tag(1), &mut vec![0; length]);
            assert!(matches!(result, Err(Error::Late { .. } | Error::Aborted { .. })), "{result:?}");
        }
        let result = workers[1].receive(0, Tag(7), &mut [0]);
        assert!(matches!(result, Err(Error::Aborted { .. })), "a message given up ends the work: {result:?}");
    }
}

#[test]
fn ranks_that_are_nobody_are_refused() {
    for transport in TRANSPORTS {
        let workers = fabrics(transport, 2, &settings());
        for peer in [0, 2] {
            assert_eq!(workers[0].send(peer, Tag(0), &[]), Err(Error::NoPeer { rank: 0, size: 2, peer }));
        }
    }
}
