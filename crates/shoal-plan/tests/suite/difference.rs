//! From one random table to another: applied, the moves leave every holder with what it should have, bring nothing that
//! was there, and lose only what nobody had.

use std::collections::{BTreeSet, HashMap};

use shoal_plan::difference::{Difference, Move, Place};
use shoal_plan::draw::{self, Draw};
use shoal_plan::{Plan, Residence};

/// Who has each element of each tensor, by the table alone.
fn elements(plan: &Plan, is_there: impl Fn(&str) -> bool) -> HashMap<(usize, usize), BTreeSet<Place>> {
    let mut all: HashMap<(usize, usize), BTreeSet<Place>> = HashMap::new();
    for (tensor, row) in plan.tensors.iter().enumerate() {
        for held in &row.optimizer {
            let device = plan.devices[held.holder.device()].name.clone();
            if is_there(&device) {
                for element in held.slice.range() {
                    let place = Place { device: device.clone(), tier: held.holder.tier() };
                    all.entry((tensor, element)).or_default().insert(place);
                }
            }
        }
    }
    all
}

#[test]
fn moves_bring_what_is_missing_and_nothing_else() {
    let (mut moved, mut copied, mut lost) = (0, 0, 0);
    for seed in 0..300 {
        let mut draw = Draw::new(seed);
        let (chain, sequence) = draw::model(&mut draw);
        let step = draw::step(&mut draw, sequence);
        let (before, after) =
            (draw::table(&chain, step, 5, &mut draw), draw::table(&chain, step, 5, &mut draw));
        let gone = draw.chance(50).then(|| format!("device {}", draw.below(5)));
        let is_there = |device: &str| gone.as_deref() != Some(device);
        let difference = Difference::new(&before, &after, is_there);
        let had = elements(&before, is_there);
        let mut has = had.clone();
        for Move { tensor, slice, from, to } in &difference.moves {
            for element in slice.range() {
                assert!(had[&(*tensor, element)].contains(from), "seed {seed}: {from:?} never had it");
                assert!(
                    has.get_mut(&(*tensor, element)).unwrap().insert(to.clone()),
                    "seed {seed}: brought twice"
                );
            }
        }
        let nowhere: BTreeSet<(usize, usize)> = difference
            .lost
            .iter()
            .flat_map(|(tensor, slice)| slice.range().map(move |element| (*tensor, element)))
            .collect();
        for (element, wanted) in elements(&after, |_| true) {
            match had.get(&element) {
                None => assert!(nowhere.contains(&element), "seed {seed}: {element:?}"),
                Some(_) => {
                    assert!(!nowhere.contains(&element));
                    assert!(wanted.is_subset(&has[&element]), "seed {seed}: {element:?}");
                }
            }
        }
        for Move { from, to, slice, tensor } in &difference.moves {
            let on_device = |place: &Place| place.device == to.device;
            let here = slice.range().all(|element| had[&(*tensor, element)].iter().any(on_device));
            assert_eq!(here, from.device == to.device, "seed {seed}: what is on the device comes from there");
        }
        copied += copies_are_whole(&before, &after, &is_there, &had);
        moved += difference.moves.len();
        lost += difference.lost.len();
    }
    assert!(moved > 1000 && copied > 1000 && lost > 100, "{moved} {copied} {lost}");
}

/// Every element of every copy that stays is on its device, or comes with the state, or comes by itself, once.
fn copies_are_whole(
    before: &Plan,
    after: &Plan,
    is_there: &impl Fn(&str) -> bool,
    had: &HashMap<(usize, usize), BTreeSet<Place>>,
) -> usize {
    let copies = Difference::copies(before, after, is_there);
    let mut brought: BTreeSet<(usize, usize, String)> = BTreeSet::new();
    for Move { tensor, slice, from, to } in &copies {
        for element in slice.range() {
            assert!(had[&(*tensor, element)].contains(from));
            assert!(brought.insert((*tensor, element, to.device.clone())), "brought twice");
        }
    }
    let kept = elements(after, |_| true);
    for (tensor, row) in after.tensors.iter().enumerate() {
        for copy in row.compute_copies.iter().filter(|copy| copy.residence == Residence::Resident) {
            let device = &after.devices[copy.device].name;
            let is_here = |place: &Place| place.device == *device;
            for element in (0..row.elements).filter(|element| had.contains_key(&(tensor, *element))) {
                let here = had[&(tensor, element)].iter().any(is_here);
                let comes = kept[&(tensor, element)].iter().any(is_here);
                assert_eq!(brought.contains(&(tensor, element, device.clone())), !here && !comes);
            }
        }
    }
    copies.len()
}

#[test]
fn the_same_table_moves_nothing() {
    for seed in 0..50 {
        let mut draw = Draw::new(seed);
        let (chain, sequence) = draw::model(&mut draw);
        let step = draw::step(&mut draw, sequence);
        let plan = draw::table(&chain, step, 5, &mut draw);
        assert_eq!(Difference::new(&plan, &plan, |_| true), Difference::default());
    }
}
