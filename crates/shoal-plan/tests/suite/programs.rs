//! What must hold for every table this crate compiles: the program verifies, survives JSON, may be reordered
//! wherever its dependencies allow and nowhere else, and its memory forecast covers the order it was made for.

use proptest::prelude::*;
use shoal_model::{Chain, ModelConfig, presets};
use shoal_plan::one_device::table;
use shoal_plan::{
    Activations, ComputeCopy, DeviceOffer, Held, Holder, Instruction, Op, Order, Plan, PlanError,
    Preferences, Program, ProgramError, Purpose, Residence, Samples, StepShape, compile, forecast,
    plan_one_device, verify, verify_all,
};

fn offer(budget_bytes: u64) -> DeviceOffer {
    DeviceOffer { name: "cpu:0".into(), budget_bytes, workspace_bytes: 1 << 18, rows_enough: 4096 }
}

fn model() -> impl Strategy<Value = ModelConfig> {
    let tied = any::<bool>();
    (1usize..4, 1usize..3, tied, 0..3).prop_map(|(layers, kv_heads, tied, kind)| {
        let mut config = match kind {
            0 => presets::gpt2(50, 16, layers, 4, 12),
            1 => presets::bert(50, 16, layers, 4, 24, 12),
            _ => presets::llama(50, 16, layers, 2 * kv_heads, kv_heads, 24, 12, 1e4, tied),
        };
        config.tied = tied;
        config
    })
}

#[derive(Clone, Debug)]
struct Case {
    chain: Chain,
    plan: Plan,
}

fn case() -> impl Strategy<Value = Case> {
    let shape = (1usize..9, 1usize..9, 1usize..12);
    (model(), shape, any::<[bool; 3]>()).prop_map(|(config, shape, [recompute, layer_first, padded])| {
        let (global_batch, micro_batch, sequence) = shape;
        let chain = Chain { padded, ..Chain::new(&config) };
        let activations = if recompute { Activations::Recompute } else { Activations::Keep };
        let step = StepShape { global_batch, sequence, ..StepShape::ADAM };
        let plan =
            table(&chain, step, &offer(1 << 30), micro_batch.min(global_batch), activations, layer_first);
        Case { chain, plan }
    })
}

/// Some order that keeps every `after`, drawn by a seed.
fn shuffled(instructions: &[Instruction], mut seed: u64) -> Vec<Instruction> {
    let mut waiting = instructions.to_vec();
    let mut order: Vec<Instruction> = Vec::new();
    while !waiting.is_empty() {
        let ready: Vec<usize> = (0..waiting.len())
            .filter(|at| waiting[*at].after.iter().all(|id| order.iter().any(|done| done.id == *id)))
            .collect();
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        order.push(waiting.remove(ready[(seed >> 33) as usize % ready.len()]));
    }
    order
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_table_compiles_to_programs_that_verify_and_survive_json(case in case()) {
        for purpose in [Purpose::Train, Purpose::Evaluate, Purpose::Predict] {
            let program = compile(&case.plan, &case.chain, purpose).unwrap().remove(0);
            prop_assert_eq!(verify(&program, &case.plan, &case.chain, purpose), Ok(()));
            let text = serde_json::to_string(&program).unwrap();
            prop_assert_eq!(&serde_json::from_str::<Program>(&text).unwrap(), &program);
        }
        let text = serde_json::to_string(&case.plan).unwrap();
        prop_assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), case.plan);
    }

    #[test]
    fn every_order_that_keeps_the_dependencies_is_accepted(case in case(), seed in any::<u64>()) {
        let mut program = compile(&case.plan, &case.chain, Purpose::Train).unwrap().remove(0);
        program.instructions = shuffled(&program.instructions, seed);
        prop_assert_eq!(verify(&program, &case.plan, &case.chain, Purpose::Train), Ok(()));
    }

    /// Moving an instruction before one it must follow is refused, and the refusal names one of the two.
    /// Without its `after` list it is refused all the same: effects decide, not what the file claims.
    #[test]
    fn every_order_that_breaks_a_dependency_is_refused(
        case in case(),
        which in any::<prop::sample::Index>(),
        edge in any::<prop::sample::Index>(),
        without_edges in any::<bool>(),
    ) {
        let mut program = compile(&case.plan, &case.chain, Purpose::Train).unwrap().remove(0);
        let dependent: Vec<usize> =
            (0..program.instructions.len()).filter(|at| !program.instructions[*at].after.is_empty()).collect();
        let at = dependent[which.index(dependent.len())];
        let mut moved = program.instructions.remove(at);
        let before = moved.after[edge.index(moved.after.len())];
        let place = program.instructions.iter().position(|other| other.id == before).unwrap();
        let names = [moved.to_string(), program.instructions[place].to_string()];
        if without_edges {
            moved.after.clear();
            program.instructions.iter_mut().for_each(|instruction| instruction.after.clear());
        }
        program.instructions.insert(place, moved);
        let error = verify(&program, &case.plan, &case.chain, Purpose::Train).unwrap_err();
        let text = error.to_string();
        prop_assert!(names.iter().any(|name| text.contains(name)), "{} names none of {:?}", text, names);
    }

    /// A program that lacks any instruction, or has one twice, is refused.
    #[test]
    fn a_program_with_one_instruction_more_or_less_is_refused(
        case in case(),
        which in any::<prop::sample::Index>(),
        twice in any::<bool>(),
    ) {
        let mut program = compile(&case.plan, &case.chain, Purpose::Train).unwrap().remove(0);
        let at = which.index(program.instructions.len());
        if twice {
            let mut again = program.instructions[at].clone();
            again.id = 1_000_000;
            program.instructions.push(again);
        } else {
            let id = program.instructions.remove(at).id;
            for instruction in &mut program.instructions {
                instruction.after.retain(|after| *after != id);
            }
        }
        prop_assert!(verify(&program, &case.plan, &case.chain, Purpose::Train).is_err());
    }

    /// The planner's answer fits the budget; and where it says a budget is too small, what it asks for is enough.
    #[test]
    fn the_planner_keeps_the_budget_and_asks_for_what_it_needs(
        config in model(),
        global_batch in 1usize..9,
        budget in 18u32..24,
    ) {
        let chain = Chain::new(&config);
        let step = StepShape { global_batch, sequence: 12, ..StepShape::ADAM };
        let plan = |budget: u64| plan_one_device(&chain, step, &offer(budget), Preferences::default());
        match plan(1 << budget) {
            Ok(planned) => prop_assert!(planned.memory.total() <= 1 << budget),
            Err(PlanError::TooSmall { needed_bytes, .. }) => {
                prop_assert!(plan(needed_bytes).is_ok());
                prop_assert!(plan(needed_bytes - 1).is_err());
            }
            Err(other) => prop_assert!(false, "{}", other),
        }
    }
}

fn small() -> (Chain, Plan) {
    let chain = Chain::new(&presets::preset("gpt2-tiny").unwrap());
    let step = StepShape { global_batch: 4, sequence: 8, ..StepShape::ADAM };
    let plan = table(&chain, step, &offer(1 << 30), 2, Activations::Keep, false);
    (chain, plan)
}

#[test]
fn two_additions_into_one_gradient_keep_their_order() {
    let (chain, plan) = small();
    let mut program = compile(&plan, &chain, Purpose::Train).unwrap().remove(0);
    // Take the head's backward of the second micro-batch ahead of the first's, with all it needs.
    let is_second = |instruction: &Instruction| match instruction.op {
        Op::Forward { samples, .. } | Op::Backward { samples, .. } => samples.start == 2,
        _ => false,
    };
    let (second, first): (Vec<_>, Vec<_>) = program.instructions.into_iter().partition(is_second);
    let loads = first.iter().take_while(|i| matches!(i.op, Op::Load { .. } | Op::CountTargets)).count();
    let mut order = first;
    order.splice(loads..loads, second);
    order.iter_mut().for_each(|instruction| instruction.after.clear());
    program.instructions = order;
    let error = verify(&program, &plan, &chain, Purpose::Train).unwrap_err();
    assert!(matches!(error, ProgramError::SumOrder { .. }), "{error}");
}

/// Two devices with half of the samples each, and the state whole or halved.
fn on_two_devices(halved: bool) -> (Chain, Plan) {
    let chain = Chain::new(&presets::gpt2(50, 16, 4, 4, 12));
    let step = StepShape { global_batch: 4, sequence: 8, ..StepShape::ADAM };
    let mut plan = table(&chain, step, &offer(1 << 30), 2, Activations::Keep, true);
    plan.devices.push(plan.devices[0].clone());
    for row in &mut plan.layers {
        let mut second = row.compute[0].clone();
        second.device = 1;
        second.micro_batches.remove(0);
        row.compute[0].micro_batches.truncate(1);
        row.compute.push(second);
    }
    for row in &mut plan.tensors {
        row.compute_copies.push(ComputeCopy { device: 1, residence: Residence::Resident });
        let half = if halved { row.elements / 2 } else { row.elements };
        let second = if halved { half } else { 0 };
        let held = |device: usize, slice| Held { holder: Holder::Device(device), slice: Samples::new(slice) };
        row.gradient = vec![held(0, 0..half), held(1, second..row.elements)];
        row.optimizer.clone_from(&row.gradient);
    }
    (chain, plan)
}

/// Gradients that are added up in place may take as long as the backward does; those that free memory may not.
#[test]
fn only_sums_that_free_memory_are_waited_for_before_their_updates() {
    for halved in [false, true] {
        let (chain, plan) = on_two_devices(halved);
        let programs = compile(&plan, &chain, Purpose::Train).unwrap();
        assert_eq!(verify_all(&programs, &plan, &chain, Purpose::Train), Ok(()));
        for program in &programs {
            let is_sum = |id: &u32| matches!(program.instructions[*id as usize].op, Op::Reduce { .. });
            let backwards = program.instructions.iter().filter(|i| matches!(i.op, Op::Backward { .. }));
            let waiting = backwards.filter(|instruction| instruction.after.iter().any(is_sum)).count();
            assert_eq!(waiting > 0, halved, "{waiting}");
        }
    }
}

/// Whatever the order of work: a layer's gradients are added up while the layers before it still have their backwards to do.
#[test]
fn gradients_are_added_up_while_the_backward_goes_on() {
    for order in [Order::LayerFirst, Order::MicroBatchFirst, Order::OneForwardOneBackward, Order::Varuna] {
        let (chain, plan) = on_two_devices(false);
        let plan = Plan { order, ..plan };
        for program in compile(&plan, &chain, Purpose::Train).unwrap() {
            let place = |wanted: &dyn Fn(&Op) -> bool| {
                program.instructions.iter().position(|instruction| wanted(&instruction.op)).unwrap()
            };
            for block in 1..=4 {
                let summed = place(&|op| *op == Op::Reduce { layer: block });
                let before = place(&|op| matches!(op, Op::Backward { layer, .. } if *layer + 1 == block));
                assert!(
                    summed < before,
                    "{order:?}: layer {block} at {summed}, the backward before at {before}"
                );
            }
        }
    }
}

#[test]
fn recomputing_and_smaller_micro_batches_take_less_memory() {
    let chain = Chain::new(&presets::preset("gpt2-mini").unwrap());
    let total = |micro_batch, activations, layer_first| {
        let step = StepShape { global_batch: 8, sequence: 128, ..StepShape::ADAM };
        let plan = table(&chain, step, &offer(1 << 40), micro_batch, activations, layer_first);
        forecast(&compile(&plan, &chain, Purpose::Train).unwrap().remove(0), &plan, &chain).values
    };
    let (keep, recompute) = (Activations::Keep, Activations::Recompute);
    assert!(total(1, keep, false) < total(4, keep, false) / 3);
    assert!(total(4, recompute, false) < total(4, keep, false) / 2);
    assert!(total(1, keep, false) < total(1, keep, true));
}

#[test]
fn a_table_that_skips_a_sample_or_an_element_is_refused_by_name() {
    let (chain, plan) = small();
    let mut skips = plan.clone();
    skips.layers[1].compute[0].micro_batches[1].start = 3;
    assert!(skips.check(&chain).unwrap_err().to_string().contains("block 0: sample 2"));
    let mut unheld = plan.clone();
    unheld.tensors[0].optimizer[0].slice.end -= 1;
    assert!(unheld.check(&chain).unwrap_err().to_string().contains("transformer.wte.weight"));
    let mut elsewhere = plan.clone();
    elsewhere.layers[0].compute[0].device = 7;
    assert!(elsewhere.check(&chain).unwrap_err().to_string().contains("no device 7"));
    let other = Chain::new(&presets::preset("llama-tiny").unwrap());
    assert!(plan.check(&other).is_err());
}
