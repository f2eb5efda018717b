//! Collectives against plain sums, over every transport: all sizes of groups, slices of all lengths.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::common::{Random, TRANSPORTS, Transport, each, fabrics, settings};
use shoal_net::collective::{Wire, all_gather, all_gather_bytes, all_reduce, even, reduce_scatter, sum_f64};
use shoal_net::{Error, Fabric, Settings, Tag, in_process};

/// Ascending slices, some empty, with gaps, in a buffer of this length.
fn random_slices(random: &mut Random, members: usize, length: usize) -> Vec<Range<usize>> {
    let mut cuts: Vec<usize> = (0..2 * members).map(|_| random.below(length + 1)).collect();
    cuts.sort_unstable();
    if random.below(2) == 0 {
        // Slices that touch, one of them empty.
        for pair in 1..members {
            cuts[2 * pair] = cuts[2 * pair - 1];
        }
        let empty = random.below(members);
        cuts[2 * empty + 1] = cuts[2 * empty];
        if empty + 1 < members {
            cuts[2 * empty + 2] = cuts[2 * empty + 1];
        }
    }
    cuts.chunks(2).map(|cut| cut[0]..cut[1]).collect()
}

fn inputs(seed: u64, members: usize, length: usize) -> Vec<Vec<f32>> {
    let mut random = Random(seed);
    (0..members).map(|_| (0..length).map(|_| random.number()).collect()).collect()
}

fn sums(inputs: &[Vec<f32>]) -> Vec<f64> {
    (0..inputs[0].len()).map(|place| inputs.iter().map(|input| input[place] as f64).sum()).collect()
}

struct Case {
    members: Vec<usize>,
    slices: Vec<Range<usize>>,
    inputs: Vec<Vec<f32>>,
}

impl Case {
    fn draw(seed: u64) -> Case {
        let mut random = Random(seed);
        let size = 1 + random.below(6);
        let mut members: Vec<usize> = (0..6).collect();
        while members.len() > size {
            members.remove(random.below(members.len()));
        }
        let length = [0, 1, 7, 1000, 5000, 70_000, 400_000][random.below(7)];
        let slices = random_slices(&mut random, size, length);
        Case { members, slices, inputs: inputs(seed, size, length) }
    }

    /// What each member's buffer holds after `work`, by place.
    fn run(
        &self,
        workers: &[Arc<Fabric>],
        work: impl Fn(&Fabric, &[usize], &[Range<usize>], &mut [f32]) -> Result<(), Error> + Sync,
    ) -> Vec<Vec<f32>> {
        let results = each(workers, |fabric| {
            let place = self.members.binary_search(&fabric.rank()).ok()?;
            let mut buffer = self.inputs[place].clone();
            work(fabric, &self.members, &self.slices, &mut buffer).expect("the collective succeeds");
            Some(buffer)
        });
        results.into_iter().flatten().collect()
    }

    fn tolerance(&self, wire: Wire) -> f64 {
        let size = self.members.len() as f64;
        match wire {
            // Each addition of numbers below the members' count rounds by at most half of 2^-23 of it.
            Wire::F32 => size * size * 2f64.powi(-24),
            // Shares up to 1 keep eight bits, and so does the sum where it is gathered.
            Wire::Bf16 => size * 2f64.powi(-9) + size * 2f64.powi(-9),
        }
    }
}

fn bits(buffer: &[f32]) -> Vec<u32> {
    buffer.iter().map(|number| number.to_bits()).collect()
}

#[test]
fn random_collectives_are_plain_sums_and_copies() {
    for transport in TRANSPORTS {
        let workers = fabrics(transport, 6, &settings());
        for seed in 0..if matches!(transport, Transport::InProcess) { 120u64 } else { 40 } {
            let case = Case::draw(seed);
            for wire in [Wire::F32, Wire::Bf16] {
                check(&workers, &case, wire, Tag(seed as u128 * 10 + wire as u128), transport, seed);
            }
        }
    }
}

fn check(workers: &[Arc<Fabric>], case: &Case, wire: Wire, tag: Tag, transport: Transport, seed: u64) {
    let context = format!("{transport:?} {wire:?} seed {seed}");
    let sums = sums(&case.inputs);
    let close = |found: f32, wanted: f64| (found as f64 - wanted).abs() <= case.tolerance(wire);

    let reduced = case
        .run(workers, |fabric, members, _, buffer| all_reduce(fabric, members, buffer, wire, tag.part(1)));
    assert!(
        reduced[0].iter().zip(&sums).all(|(found, wanted)| close(*found, *wanted)),
        "all-reduce {context}"
    );
    assert!(reduced.iter().all(|buffer| bits(buffer) == bits(&reduced[0])), "all members' bits {context}");

    let scattered = case.run(workers, |fabric, members, slices, buffer| {
        reduce_scatter(fabric, members, slices, buffer, wire, tag.part(2))
    });
    for (slice, buffer) in case.slices.iter().zip(&scattered) {
        let same = slice.clone().all(|place| close(buffer[place], sums[place]));
        assert!(same, "reduce-scatter {context}");
    }

    let gathered = case.run(workers, |fabric, members, slices, buffer| {
        all_gather(fabric, members, slices, buffer, wire, tag.part(3))
    });
    for (place, buffer) in gathered.iter().enumerate() {
        for (owner, slice) in case.slices.iter().enumerate() {
            let (found, wanted) = (&buffer[slice.clone()], &case.inputs[owner][slice.clone()]);
            match wire {
                Wire::F32 => assert_eq!(bits(found), bits(wanted), "all-gather {context}"),
                Wire::Bf16 => {
                    assert!(
                        found.iter().zip(wanted).all(|(f, w)| close(*f, *w as f64)),
                        "all-gather {context}"
                    );
                    assert_eq!(
                        bits(found),
                        bits(&gathered[owner][slice.clone()]),
                        "all members' bits {context}"
                    );
                }
            }
        }
        // Gaps stay as they were.
        let covered = |index: usize| case.slices.iter().any(|slice| slice.contains(&index));
        let untouched = (0..buffer.len()).filter(|index| !covered(*index));
        assert!(
            untouched.into_iter().all(|index| buffer[index] == case.inputs[place][index]),
            "gaps {context}"
        );
    }
}

#[test]
fn the_same_inputs_give_the_same_bits() {
    for transport in TRANSPORTS {
        let workers = fabrics(transport, 6, &settings());
        for length in [3000, 600_000] {
            let case =
                Case { members: (0..6).collect(), slices: even(length, 6), inputs: inputs(1, 6, length) };
            for wire in [Wire::F32, Wire::Bf16] {
                let run = |number: u128| {
                    case.run(&workers, |fabric, members, _, buffer| {
                        all_reduce(fabric, members, buffer, wire, Tag(number))
                    })
                };
                let first = run(length as u128 * 10);
                for repeat in 1..4 {
                    assert_eq!(
                        bits(&run(length as u128 * 10 + repeat)[3]),
                        bits(&first[0]),
                        "{transport:?} {wire:?}"
                    );
                }
            }
        }
    }
}

/// Both transports, and all members, give what the ring's order of additions gives.
#[test]
fn the_ring_adds_in_its_order() {
    for transport in TRANSPORTS {
        let workers = fabrics(transport, 4, &settings());
        let length = 100_000;
        let case = Case { members: (0..4).collect(), slices: even(length, 4), inputs: inputs(7, 4, length) };
        let found = case.run(&workers, |fabric, members, _, buffer| {
            all_reduce(fabric, members, buffer, Wire::F32, Tag(1))
        });
        for (owner, slice) in case.slices.iter().enumerate() {
            for index in slice.clone() {
                let wanted = (1..=4).map(|step| case.inputs[(owner + step) % 4][index]).reduce(|a, b| b + a);
                assert_eq!(Some(found[0][index].to_bits()), wanted.map(f32::to_bits), "{transport:?}");
            }
        }
    }
}

#[test]
fn bytes_are_gathered_too() {
    for transport in TRANSPORTS {
        let workers = fabrics(transport, 4, &settings());
        for (number, length) in [13usize, 3_000_001].into_iter().enumerate() {
            let slices = [0..length / 3, length / 3..length / 3, length / 3..length - 1, length - 1..length];
            let whole = Random(3).bytes(length);
            let results = each(&workers, |fabric| {
                let own = slices[fabric.rank()].clone();
                let mut buffer = vec![0; length];
                buffer[own.clone()].copy_from_slice(&whole[own]);
                all_gather_bytes(fabric, &[0, 1, 2, 3], &slices, &mut buffer, Tag(number as u128))
                    .map(|()| buffer)
            });
            assert!(results.into_iter().all(|result| result.expect("gathered") == whole), "{transport:?}");
        }
    }
}

#[test]
fn a_few_numbers_are_summed_in_the_order_of_members() {
    let groups = [vec![0, 2, 3, 4], vec![0, 1, 2, 3, 4, 6], vec![0, 1, 2, 3, 4, 5, 6]];
    for (transport, members) in
        TRANSPORTS.into_iter().flat_map(|one| groups.iter().map(move |group| (one, group)))
    {
        let workers = fabrics(transport, 7, &settings());
        let values = |rank: usize| [0.1 * rank as f64, 1e17 / (rank + 1) as f64, -3.0];
        let mut wanted = [0.0; 3];
        for rank in members.iter().copied() {
            wanted.iter_mut().zip(values(rank)).for_each(|(sum, value)| *sum += value);
        }
        let results = each(&workers, |fabric| {
            let mut sums = values(fabric.rank());
            members
                .contains(&fabric.rank())
                .then(|| sum_f64(fabric, members, &mut sums, Tag(4)).map(|()| sums))
        });
        for result in results.into_iter().flatten() {
            assert_eq!(result.expect("summed").map(f64::to_bits), wanted.map(f64::to_bits), "{transport:?}");
        }
    }
}

#[test]
fn groups_and_slices_that_cannot_be_are_refused_before_anything_is_sent() {
    let workers = fabrics(Transport::InProcess, 3, &settings());
    let fabric = &workers[0];
    let refused = |members: &[usize], slices: &[Range<usize>]| {
        let result = all_gather(fabric, members, slices, &mut [0.0; 10], Wire::F32, Tag(1));
        assert!(matches!(result, Err(Error::Collective { .. })), "{members:?} {slices:?}: {result:?}");
    };
    refused(&[0, 1], &[0..2, 2..4, 4..6]);
    refused(&[1, 0], &[0..5, 5..10]);
    refused(&[0, 0], &[0..5, 5..10]);
    refused(&[1, 2], &[0..5, 5..10]);
    refused(&[0, 3], &[0..5, 5..10]);
    refused(&[0, 1], &[0..5, 4..10]);
    refused(&[0, 1], &[0..5, 5..11]);
    assert!(fabric.failure().is_none());
}

/// Whoever gives a sum up because another has left says who, though it gives up messages with others by it.
#[test]
fn a_sum_that_lacks_a_member_names_it_to_all() {
    let mut fabrics = in_process(3, &Settings::default());
    drop(fabrics.remove(1));
    for fabric in fabrics {
        let error = sum_f64(&fabric, &[0, 1, 2], &mut [1.0], Tag(7)).unwrap_err();
        assert!(error.to_string().contains("worker 1 has left"), "{error}");
    }
}

/// Those who wait begin all sums at once, those who compute one after the other: what has come early for one sum must not keep
/// another from its bytes.
#[test]
fn sums_that_are_under_way_at_once_do_not_wait_for_each_other() {
    const SUMS: usize = 24;
    let settings = Settings { streams: 1, message_deadline: Duration::from_secs(20), ..settings() };
    for transport in TRANSPORTS {
        let workers = fabrics(transport, 4, &settings);
        // Groups overlap, and most have a ring of their own.
        let groups = [vec![0, 1, 2, 3], vec![0, 2, 3], vec![1, 2, 3], vec![0, 1, 3]];
        let sum = |fabric: &Fabric, number: usize| {
            let members = &groups[number % groups.len()];
            if !members.contains(&fabric.rank()) {
                return;
            }
            let length = 300_000;
            let mut buffer = vec![fabric.rank() as f32 + 1.0; length];
            let slices = even(length, members.len());
            let done = reduce_scatter(fabric, members, &slices, &mut buffer, Wire::F32, Tag(number as u128));
            done.unwrap_or_else(|error| panic!("{transport:?} {number}: {error}"));
            let own = &slices[members.iter().position(|member| *member == fabric.rank()).unwrap()];
            let wanted: f32 = members.iter().map(|member| *member as f32 + 1.0).sum();
            assert!(buffer[own.clone()].iter().all(|found| *found == wanted));
        };
        each(&workers, |fabric| {
            let sum = &sum;
            std::thread::scope(|scope| {
                let computes = fabric.rank() < 2;
                for number in 0..SUMS {
                    match computes {
                        true => sum(fabric, number),
                        false => drop(scope.spawn(move || sum(fabric, number))),
                    }
                }
            });
        });
    }
}
