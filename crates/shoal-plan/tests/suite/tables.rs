//! What must hold for any table: it compiles to programs that verify, that survive JSON, in which every sample visits
//! every layer once and every gradient reaches every holder of its slice once. The tables are random ones from the whole
//! space, and the coverage of its features is counted.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use shoal_model::Chain;
use shoal_plan::draw::{self, Draw};
use shoal_plan::{
    Held, Instruction, Lane, Layout, Op, Plan, Program, ProgramError, Purpose, Samples, Tier, common,
    compile, verify, verify_all,
};

const CASES: u64 = 4000;

fn case(seed: u64) -> (Chain, Plan) {
    let mut draw = Draw::new(seed);
    let (chain, sequence) = draw::model(&mut draw);
    let step = draw::step(&mut draw, sequence);
    let plan = draw::table(&chain, step, 5, &mut draw);
    (chain, plan)
}

/// How often each sample of each layer passes, on whichever device.
fn passes(programs: &[Program], layers: usize, batch: usize, backward: bool) -> Vec<Vec<usize>> {
    let mut counts = vec![vec![0; batch]; layers];
    for instruction in programs.iter().flat_map(|program| &program.instructions) {
        let passed = match instruction.op {
            Op::Forward { layer, samples, .. } if !backward => Some((layer, samples)),
            Op::Backward { layer, samples } if backward => Some((layer, samples)),
            _ => None,
        };
        if let Some((layer, samples)) = passed {
            samples.range().for_each(|sample| counts[layer][sample] += 1);
        }
    }
    counts
}

/// Follows every tensor's gradient by hand: each device's share is complete when it is reduced, every holder takes part
/// in the reduction, and each of its slices is updated once, after it and after what was added up elsewhere has come.
fn gradients_reach_their_holders(programs: &[Program], plan: &Plan, chain: &Chain) {
    for (tensor, row) in plan.tensors.iter().enumerate() {
        let owner = chain.users(tensor).next().unwrap();
        let mut updated: HashMap<(usize, Tier), usize> = HashMap::new();
        for program in programs {
            let place = |wanted: &dyn Fn(&Op) -> bool| {
                program
                    .instructions
                    .iter()
                    .enumerate()
                    .filter(|(_, i)| wanted(&i.op))
                    .map(|(at, _)| at)
                    .collect::<Vec<_>>()
            };
            let device = program.device;
            let added = place(
                &|op| matches!(op, Op::Backward { layer, .. } if chain.users(tensor).any(|user| user == *layer)),
            );
            let reduced = place(&|op| *op == Op::Reduce { layer: owner });
            let held = row.gradient.iter().filter(|held| held.holder.device() == device).count();
            let whole_here =
                row.gradient.iter().all(|held| held.holder == shoal_plan::Holder::Device(device));
            let elsewhere = programs.iter().any(|other| {
                other.device != device
                    && other.instructions.iter().any(|i| matches!(i.op, Op::Backward { layer, .. } if chain.users(tensor).any(|user| user == layer)))
            });
            // Unless all is computed and held here, it must be reduced, once, after the last addition.
            if (!added.is_empty() || held > 0) && (!whole_here || elsewhere) {
                assert_eq!(reduced.len(), 1, "{}: device {device}", row.tensor);
                assert!(added.iter().all(|at| *at < reduced[0]), "{}: device {device}", row.tensor);
            }
            let handed = place(&|op| *op == Op::HandOver { layer: owner });
            assert!(
                handed.len() <= 1
                    && handed.iter().all(|at| reduced.iter().chain(&added).all(|earlier| earlier < at))
            );
            for (at, instruction) in program.instructions.iter().enumerate() {
                if let Op::Update { tensor: of, at: tier } = instruction.op
                    && of == tensor
                {
                    assert!(reduced.iter().chain(&added).all(|earlier| *earlier < at));
                    let here = |held: &&Held| held.holder.device() == device && held.holder.tier() == tier;
                    let sums: Vec<_> = row.gradient.iter().filter(here).map(|held| held.slice).collect();
                    let has = |slice: Samples| {
                        let within = sums.iter().filter_map(|sum| common(*sum, slice));
                        within.map(|common| common.count()).sum::<usize>() == slice.count()
                    };
                    if row.optimizer.iter().filter(here).any(|held| !has(held.slice)) {
                        assert!(handed.len() == 1 && handed[0] < at, "{}: device {device}", row.tensor);
                    }
                    *updated.entry((device, tier)).or_default() += 1;
                }
            }
        }
        let mut expected: HashMap<(usize, Tier), usize> = HashMap::new();
        for held in &row.optimizer {
            expected.insert((held.holder.device(), held.holder.tier()), 1);
        }
        assert_eq!(updated, expected, "{}", row.tensor);
    }
}

/// What passes between devices where gradients are handed over: every element that one of them needs and has not, once,
/// from one that has it.
#[test]
fn handed_over_is_what_is_lacking() {
    let mut handed = 0;
    for seed in 0..CASES / 4 {
        let (chain, plan) = case(seed);
        let layout = Layout::new(&plan, &chain);
        for (tensor, row) in plan.tensors.iter().enumerate() {
            let parts = layout.handed_parts(chain.users(tensor).next().unwrap());
            let parts: Vec<_> = parts.iter().filter(|part| part.tensor == tensor).collect();
            let covering = |held: &[Held], element: usize| -> BTreeSet<usize> {
                let covers = |held: &&Held| held.slice.range().contains(&element);
                held.iter().filter(covers).map(|held| held.holder.device()).collect()
            };
            for element in 0..row.elements {
                let (sums, needs) = (covering(&row.gradient, element), covering(&row.optimizer, element));
                let given: Vec<usize> = parts
                    .iter()
                    .filter(|part| part.slice.range().contains(&element))
                    .map(|part| part.device)
                    .collect();
                let lacking = !needs.is_subset(&sums);
                assert_eq!(given.len(), usize::from(lacking), "seed {seed}: {} {element}", row.tensor);
                assert!(given.iter().all(|device| sums.contains(device)), "seed {seed}: {}", row.tensor);
            }
            handed += usize::from(!parts.is_empty());
        }
    }
    assert!(handed > 500, "{handed}");
}

#[test]
fn any_table_compiles_and_comes_to_an_end() {
    let mut coverage: BTreeMap<&str, u64> = BTreeMap::new();
    for seed in 0..CASES {
        let (chain, plan) = case(seed);
        plan.check(&chain).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        for name in draw::features(&plan, &chain) {
            *coverage.entry(name).or_default() += 1;
        }
        for purpose in [Purpose::Train, Purpose::Evaluate, Purpose::Predict] {
            let programs =
                compile(&plan, &chain, purpose).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            verify_all(&programs, &plan, &chain, purpose)
                .unwrap_or_else(|error| panic!("seed {seed}, {purpose:?}: {error}"));
            if purpose == Purpose::Train {
                for backward in [false, true] {
                    let counts = passes(&programs, chain.layers.len(), plan.global_batch, backward);
                    assert!(counts.iter().flatten().all(|count| *count == 1), "seed {seed}");
                }
                gradients_reach_their_holders(&programs, &plan, &chain);
            }
        }
        if seed % 50 == 0 {
            let text = serde_json::to_string(&plan).unwrap();
            assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan);
            let programs = compile(&plan, &chain, Purpose::Train).unwrap();
            let text = serde_json::to_string(&programs).unwrap();
            assert_eq!(serde_json::from_str::<Vec<Program>>(&text).unwrap(), programs);
        }
    }
    println!("features of {CASES} random tables:");
    for (name, count) in &coverage {
        println!("{:>5.1} %  {name}", *count as f64 / CASES as f64 * 100.0);
    }
    assert!(coverage.len() == 26, "{} features", coverage.len());
    assert!(coverage.values().all(|count| 20 * count >= CASES), "{coverage:?}");
}

/// A step that lacks any movement, or has one twice, is refused.
#[test]
fn no_movement_may_be_missing() {
    let mut refused = 0;
    for seed in 0..400 {
        let (chain, plan) = case(seed);
        let mut programs = compile(&plan, &chain, Purpose::Train).unwrap();
        let moves: Vec<(usize, usize)> = programs
            .iter()
            .enumerate()
            .flat_map(|(number, program)| {
                let places = program.instructions.iter().enumerate();
                places
                    .filter(|(_, i)| i.op.moves() && !matches!(i.op, Op::Update { .. }))
                    .map(move |(place, _)| (number, place))
            })
            .collect();
        if moves.is_empty() {
            continue;
        }
        let (program, place) = moves[Draw::new(seed).below(moves.len())];
        let gone = programs[program].instructions.remove(place).id;
        for instruction in &mut programs[program].instructions {
            instruction.after.retain(|id| *id != gone);
        }
        let error = verify_all(&programs, &plan, &chain, Purpose::Train);
        assert!(error.is_err(), "seed {seed}");
        refused += 1;
    }
    assert!(refused > 200, "{refused}");
}

/// Two devices whose lists make each wait for the other are found out.
#[test]
fn a_step_that_would_wait_forever_is_refused() {
    let mut found = 0;
    for seed in 0..400 {
        let (chain, plan) = case(seed);
        let mut programs = compile(&plan, &chain, Purpose::Train).unwrap();
        // Everything that a device receives or computes waits for the last thing that it sends.
        let Some(program) = programs.iter_mut().find(|program| {
            program.instructions.iter().any(|i| matches!(i.op, Op::Send { .. }))
                && program.instructions.iter().any(|i| matches!(i.op, Op::Receive { .. }))
        }) else {
            continue;
        };
        let sends = program.instructions.iter().filter(|i| matches!(i.op, Op::Send { .. }));
        let last = sends.map(|i| i.id).max().unwrap();
        let first = program.instructions.iter_mut().find(|i| matches!(i.op, Op::Receive { .. })).unwrap();
        first.after.push(last);
        match verify_all(&programs, &plan, &chain, Purpose::Train) {
            Err(ProgramError::TooEarly { .. } | ProgramError::Stuck { .. }) => found += 1,
            other => assert!(other.is_ok(), "seed {seed}: {other:?}"),
        }
    }
    assert!(found > 50, "{found}");
}

/// No holder updates before every holder has the step's gradients: an update waits for the norm, which is a meeting of all,
/// and nobody comes to it with gradients that are not whole. A program that does not say so is refused.
#[test]
fn no_update_begins_before_everyone_has_the_gradients() {
    let (mut updates, mut reductions, mut hand_overs, mut alone) = (0, 0, 0, 0);
    for seed in 0..300 {
        let (chain, plan) = case(seed);
        let layout = Layout::new(&plan, &chain);
        let programs = compile(&plan, &chain, Purpose::Train).unwrap();
        for program in programs.iter().filter(|program| !program.instructions.is_empty()) {
            let refused = |change: &dyn Fn(&mut Program)| {
                let mut changed = program.clone();
                change(&mut changed);
                verify(&changed, &plan, &chain, Purpose::Train).unwrap_err()
            };
            let is_norm = |instruction: &Instruction| instruction.op == Op::GradientNorm;
            let norm = program.instructions.iter().position(is_norm).unwrap();
            let norm_id = program.instructions[norm].id;
            if layout.members().len() > 1 {
                assert_eq!(program.instructions[norm].lane, Lane::Network);
                let error = refused(&|program| program.instructions[norm].lane = Lane::Compute);
                assert!(matches!(error, ProgramError::OtherLane { .. }), "seed {seed}: {error}");
            } else {
                alone += 1;
            }
            let update = program.instructions.iter().position(|i| matches!(i.op, Op::Update { .. }));
            // A device alone does both on the spot.
            if let Some(place) = update.filter(|_| layout.members().len() > 1) {
                let error = refused(&|program| {
                    program.instructions[place].after.retain(|id| *id != norm_id);
                });
                assert!(matches!(error, ProgramError::NotAwaited { .. }), "seed {seed}: {error}");
                updates += 1;
            }
            for (count, is_one) in [
                (&mut reductions, (|op| matches!(op, Op::Reduce { .. })) as fn(Op) -> bool),
                (&mut hand_overs, |op| matches!(op, Op::HandOver { .. })),
            ] {
                let needed = program.instructions.iter().find(|instruction| is_one(instruction.op));
                let Some(needed) = needed else { continue };
                let error = refused(&|program| {
                    program.instructions[norm].after.retain(|id| *id != needed.id);
                });
                assert!(matches!(error, ProgramError::NotAwaited { .. }), "seed {seed}: {error}");
                *count += 1;
            }
        }
    }
    println!("{updates} updates, {reductions} reductions, {hand_overs} hand-overs, {alone} devices alone");
    assert!(updates > 300 && reductions > 300 && hand_overs > 60 && alone > 10);
}
