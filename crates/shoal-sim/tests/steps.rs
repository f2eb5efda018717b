//! Steps on the virtual clock: random tables under any delay, and pipelines whose time can be said by hand.

use shoal_fleet::costs::{Handling, KindTable, LayerTable};
use shoal_fleet::{Costs, Fleet, Seat, TimeCurve};
use shoal_model::{Chain, Precision, presets};
use shoal_plan::draw::{self, Draw};
use shoal_plan::memory::forecast_in;
use shoal_plan::{
    Activations, Compute, ComputeCopy, DeviceRow, GradientWire, Held, Holder, LayerRow, Layout, Moved, Op,
    Order, Pass, Plan, Purpose, Residence, Samples, TensorRow, compile, compile_paced, verify_all,
};
use shoal_sim::flows::Resource;
use shoal_sim::{FleetWorld, Jitter, Settings, Work, World, simulate};

/// Every instruction takes some time that depends on nothing but its kind and the seed.
struct AnyDelay {
    seed: u64,
}

impl AnyDelay {
    fn delay(&self, op: &Op, device: usize) -> Work {
        let kind: usize = format!("{op}").bytes().map(usize::from).sum();
        let mut draw = Draw::new(self.seed ^ (kind * 31 + device) as u64);
        // Some take a thousand times as long as others, and some nothing.
        let seconds = draw.of(&[0.0, 1e-3, 1e-2, 0.1, 1.0]);
        let resources = vec![draw.below(2) as u32, 2 + draw.below(2) as u32];
        Work {
            seconds,
            bytes: if draw.chance(30) { 10.0 } else { 0.0 },
            resources,
            handled_bytes: 5.0,
            handled_messages: 1.0,
        }
    }
}

impl World for AnyDelay {
    fn resources(&self) -> &[Resource] {
        const fn some(bytes_per_second: f64, is_pool: bool) -> Resource {
            Resource { bytes_per_second, is_pool }
        }
        const ALL: [Resource; 4] = [some(1.0, false), some(100.0, true), some(1e3, false), some(1e4, true)];
        &ALL
    }

    fn alone(&self, op: &Op, device: usize) -> Work {
        self.delay(op, device)
    }

    fn handling(&self, device: usize) -> Handling {
        let times = if device.is_multiple_of(2) { 1.0 } else { 0.0 };
        Handling { seconds_per_byte: 0.02 * times, seconds_per_message: 0.3 * times }
    }

    fn seat(&self, device: usize) -> Option<Seat> {
        let alone = if self.seed.is_multiple_of(3) { 1.0 } else { 0.4 };
        Some(Seat { chip: device % 2, part: 1.0 + device as f64, alone })
    }

    fn together(&self, op: &Op, _device: usize) -> Work {
        self.delay(op, 0)
    }
}

#[test]
fn no_delay_stops_a_step_or_takes_more_memory_than_forecast() {
    for seed in 0..1500 {
        let mut draw = Draw::new(seed);
        let (chain, sequence) = draw::model(&mut draw);
        let step = draw::step(&mut draw, sequence);
        let plan = draw::table(&chain, step, 5, &mut draw);
        let layout = Layout::new(&plan, &chain);
        let programs = compile(&plan, &chain, Purpose::Train).unwrap();
        let predicted: Vec<u64> =
            programs.iter().map(|program| forecast_in(program, &layout).values).collect();
        for delays in 0..3 {
            let jitter = Some(Jitter { seed: delays, most: 3.0 });
            let settings = Settings { jitter, memory: true, alone: false };
            let world = AnyDelay { seed: seed * 3 + delays };
            let simulated = simulate(&programs, &layout, &world, settings)
                .unwrap_or_else(|error| panic!("seed {seed}, delays {delays}: {error}"));
            for (device, (used, predicted)) in simulated.values_bytes.iter().zip(&predicted).enumerate() {
                assert!(
                    used <= predicted,
                    "seed {seed}, delays {delays}, device {device}: {used} of {predicted}"
                );
            }
            let again = simulate(&programs, &layout, &world, settings).unwrap();
            assert_eq!(again.spans, simulated.spans);
        }
    }
}

/// A model of equal blocks on stages, one device each: embedding and head go with the first and last block.
fn pipeline(chain: &Chain, stages: usize, batches: usize, order: Order, recompute: bool) -> Plan {
    let micro_batches: Vec<Samples> = (0..batches).map(|start| Samples { start, end: start + 1 }).collect();
    let layers = chain.layers.len();
    let stage = |layer: usize| (layer.saturating_sub(1) * stages / (layers - 2)).min(stages - 1);
    let activations = if recompute { Activations::Recompute } else { Activations::Keep };
    let rows = chain.layers.iter().enumerate().map(|(layer, spec)| LayerRow {
        layer: spec.name.clone(),
        compute: vec![Compute { device: stage(layer), micro_batches: micro_batches.clone(), activations }],
    });
    let tensors = chain.tensors.iter().enumerate().map(|(tensor, spec)| {
        let mut devices: Vec<usize> = chain.users(tensor).map(stage).collect();
        devices.dedup();
        let slice = Samples { start: 0, end: spec.elements() };
        let held: Vec<Held> =
            devices.iter().map(|device| Held { holder: Holder::Device(*device), slice }).collect();
        let copies =
            devices.iter().map(|device| ComputeCopy { device: *device, residence: Residence::Resident });
        TensorRow {
            tensor: spec.name.clone(),
            elements: spec.elements(),
            compute_copies: copies.collect(),
            gradient: held.clone(),
            optimizer: held,
        }
    });
    Plan {
        format: shoal_plan::table::FORMAT,
        global_batch: batches,
        sequence: 8,
        precision: Precision::Fp32,
        optimizer_states: 2,
        gradients: GradientWire::default(),
        devices: (0..stages)
            .map(|device| DeviceRow {
                name: format!("{device}"),
                budget_bytes: u64::MAX,
                workspace_bytes: 0,
                stash: None,
                leeway: 0,
                puts_off: 0,
            })
            .collect(),
        order,
        layers: rows.collect(),
        tensors: tensors.collect(),
    }
}

fn fleet(devices: usize, network: &str) -> Fleet {
    let text = format!(
        "[[node]]\nname = \"n\"\ncount = {devices}\nhost_memory = \"64 GiB\"\ndevices = [{{ kind = \"V100\" }}]\nnetwork = \"{network}\"\nlatency = \"0 us\"\n"
    );
    Fleet::parse(&text, "fleet.toml").unwrap()
}

/// Blocks take a second forward and two backward; embedding and head nothing.
fn unit_costs(chain: &Chain, fleet: &Fleet) -> Costs {
    let layers = chain.layers.iter().enumerate().map(|(number, layer)| LayerTable {
        name: layer.name.clone(),
        parameters: if number == 0 { 0 } else { 1 },
        output_bytes: 1000,
    });
    let curve = |layer: usize, seconds: f64| {
        let inner = layer > 0 && layer + 1 < chain.layers.len();
        TimeCurve::new(vec![1, 2], vec![seconds, 2.0 * seconds]).scaled(if inner { 1.0 } else { 1e-12 })
    };
    let table = KindTable {
        kind: "V100".into(),
        forward: (0..chain.layers.len()).map(|layer| curve(layer, 1.0)).collect(),
        backward: (0..chain.layers.len()).map(|layer| curve(layer, 2.0)).collect(),
        update_seconds_per_parameter: 0.0,
    };
    Costs::from_tables(layers.collect(), &[table], fleet).unwrap()
}

fn untied(layers: usize) -> Chain {
    Chain::new(&presets::llama(50, 16, layers, 4, 2, 24, 12, 1e4, false))
}

fn seconds(chain: &Chain, plan: &Plan, network: &str) -> f64 {
    let fleet = fleet(plan.devices.len(), network);
    let costs = unit_costs(chain, &fleet);
    let layout = Layout::new(plan, chain);
    let world = FleetWorld::new(&fleet, &costs, &layout);
    let programs = compile_paced(plan, chain, Purpose::Train, &world).unwrap();
    simulate(&programs, &layout, &world, Settings { memory: true, ..Settings::default() }).unwrap().seconds
}

#[test]
fn pipelines_take_what_arithmetic_says() {
    let chain = untied(4);
    for (stages, batches) in [(1, 3), (2, 4), (4, 8), (4, 2)] {
        let blocks = 4.0 / stages as f64;
        // The first micro-batch fills the pipeline, the last drains it.
        let expected = 3.0 * blocks * (batches + stages - 1) as f64;
        for order in [Order::OneForwardOneBackward, Order::Gpipe] {
            let plan = pipeline(&chain, stages, batches, order, false);
            let seconds = seconds(&chain, &plan, "1000 Gbit/s");
            assert!(
                (seconds / expected - 1.0).abs() < 1e-3,
                "{order:?} {stages} x {batches}: {seconds}, not {expected}"
            );
        }
    }
}

/// A device makes a micro-batch again while its gradient is still on its way: what the pipeline waits for in the end is
/// the backwards alone.
#[test]
fn recomputation_hides_in_waits() {
    let chain = untied(4);
    for order in [Order::Varuna, Order::OneForwardOneBackward, Order::Gpipe] {
        let seconds = seconds(&chain, &pipeline(&chain, 4, 16, order, true), "1000 Gbit/s");
        // Each micro-batch costs a device 1 + 1 + 2; three forwards fill, three backwards drain.
        let expected = 16.0 * 4.0 + 3.0 * 1.0 + 3.0 * 2.0;
        assert!((seconds / expected - 1.0).abs() < 1e-3, "{order:?}: {seconds}, not {expected}");
    }
}

/// Gradients of weights are made while a device has nothing else to do. Of what drains the pipeline that is a part at each stage but
/// the first, which makes its last ones in the end; and where two may wait, the last stage too begins its last backward earlier.
#[test]
fn gradients_of_weights_fill_waits() {
    let chain = untied(4);
    for (stages, batches) in [(2, 4), (4, 8), (4, 3)] {
        let blocks = 4.0 / stages as f64;
        for (most, earlier) in [(0, 0), (1, stages - 1), (2, stages), (64, stages)] {
            let mut plan = pipeline(&chain, stages, batches, Order::OneForwardOneBackward, false);
            plan.devices.iter_mut().for_each(|row| row.puts_off = most);
            let share = Layout::new(&plan, &chain).put_off_share(0, 1);
            assert_eq!(share > 0.2, most > 0);
            let put_off = 2.0 * blocks * share;
            let expected = 3.0 * blocks * (batches + stages - 1) as f64 - earlier as f64 * put_off;
            let seconds = seconds(&chain, &plan, "1000 Gbit/s");
            assert!(
                (seconds / expected - 1.0).abs() < 1e-3,
                "{stages} x {batches}, {most} wait: {seconds}, not {expected}"
            );
        }
    }
}

/// Forwards take a second and backwards two, messages nothing, but for the gradient of one micro-batch: that is late.
struct LateGradient {
    samples: Samples,
    seconds: f64,
}

impl World for LateGradient {
    fn resources(&self) -> &[Resource] {
        &[]
    }

    fn alone(&self, op: &Op, _device: usize) -> Work {
        let seconds = match op {
            Op::Forward { layer: 1..=2, .. } => 1.0,
            Op::Backward { layer: 1..=2, .. } => 2.0,
            _ => 0.0,
        };
        Work { seconds, ..Work::default() }
    }

    fn together(&self, op: &Op, _device: usize) -> Work {
        let is_late = |samples: &Samples| *samples == self.samples;
        let seconds = match op {
            Op::Send { moved: Moved::Gradient, samples, .. }
            | Op::Receive { moved: Moved::Gradient, samples, .. }
                if is_late(samples) =>
            {
                self.seconds
            }
            _ => 0.0,
        };
        Work { seconds, ..Work::default() }
    }
}

/// While it waits for a gradient that is late the first device computes forwards that come later, as many as it may; its
/// backwards keep their order, so every sum is added to as ever.
#[test]
fn what_comes_later_is_computed_while_a_gradient_is_late() {
    let chain = untied(2);
    let late = Samples { start: 1, end: 2 };
    let played = |leeway: usize, seconds: f64| {
        let mut plan = pipeline(&chain, 2, 8, Order::OneForwardOneBackward, false);
        plan.devices.iter_mut().for_each(|row| row.leeway = leeway);
        let layout = Layout::new(&plan, &chain);
        let programs = compile(&plan, &chain, Purpose::Train).unwrap();
        verify_all(&programs, &plan, &chain, Purpose::Train).unwrap();
        let memory = forecast_in(&programs[0], &layout).values;
        let settings = Settings { memory: true, ..Settings::default() };
        let world = LateGradient { samples: late, seconds };
        let simulated = simulate(&programs, &layout, &world, settings).unwrap();
        assert!(simulated.values_bytes[0] <= memory);
        let start = |op: &dyn Fn(&Op) -> Option<Samples>| {
            let places = programs[0].instructions.iter().zip(&simulated.spans[0]);
            let mut starts: Vec<(f64, usize)> =
                places.filter_map(|(next, span)| Some((span.start, op(&next.op)?.start))).collect();
            starts.sort_by(|a, b| a.0.total_cmp(&b.0));
            starts
        };
        let backwards = start(&|op| match op {
            Op::Backward { layer: 1, samples } => Some(*samples),
            _ => None,
        });
        assert!(backwards.iter().map(|(_, batch)| *batch).eq(0..8), "{backwards:?}");
        let forwards = start(&|op| match op {
            Op::Forward { layer: 1, samples, .. } => Some(*samples),
            _ => None,
        });
        let before = forwards.iter().filter(|(at, _)| *at < backwards[1].0).count();
        (simulated.seconds, before, memory)
    };
    // The second device is never kept waiting where nothing is late, so nothing is gained then, and nothing lost.
    let (calm, stashed, _) = played(0, 0.0);
    assert_eq!(calm, 3.0 * 9.0);
    assert_eq!(stashed, 3);
    assert_eq!(played(2, 0.0).0, calm);
    let found = [0, 1, 2, 3].map(|leeway| played(leeway, 12.0));
    assert_eq!(found.map(|(_, before, _)| before), [3, 4, 5, 6]);
    assert!(found.windows(2).all(|pair| pair[1].0 < pair[0].0), "{found:?}");
    assert!(found.windows(2).all(|pair| pair[1].2 > pair[0].2), "what may be stashed is counted: {found:?}");
}

#[test]
fn a_slow_link_is_waited_for() {
    let chain = untied(2);
    let plan = pipeline(&chain, 2, 1, Order::OneForwardOneBackward, false);
    let bytes = chain.layers[1].kind.output_bytes(1, 8, Precision::Fp32) as f64;
    // Out, and back as a gradient, at a thousand bytes a second.
    let seconds = seconds(&chain, &plan, "8 kbit/s");
    let expected = 2.0 * 3.0 + 2.0 * bytes / 1000.0;
    assert!((seconds / expected - 1.0).abs() < 1e-3, "{seconds}, not {expected}");
}

/// Where messages take their handlers' own time.
struct Handled<'a>(FleetWorld<'a>, f64);

impl World for Handled<'_> {
    fn resources(&self) -> &[Resource] {
        self.0.resources()
    }

    fn alone(&self, op: &Op, device: usize) -> Work {
        self.0.alone(op, device)
    }

    fn together(&self, op: &Op, device: usize) -> Work {
        self.0.together(op, device)
    }

    fn handling(&self, _device: usize) -> Handling {
        Handling { seconds_per_byte: self.1, seconds_per_message: 0.0 }
    }
}

/// What is sent and received while a device computes makes its computing longer, byte by byte; where it only waits, nothing.
#[test]
fn messages_take_the_time_of_those_who_handle_them_and_compute() {
    let chain = untied(2);
    let fleet = fleet(2, "8 kbit/s");
    let costs = unit_costs(&chain, &fleet);
    let bytes = chain.layers[1].kind.output_bytes(1, 8, Precision::Fp32) as f64;
    let seconds = |batches: usize, handling: f64| {
        let plan = pipeline(&chain, 2, batches, Order::Gpipe, false);
        let layout = Layout::new(&plan, &chain);
        let world = Handled(FleetWorld::new(&fleet, &costs, &layout), handling);
        let programs = compile_paced(&plan, &chain, Purpose::Train, &world.0).unwrap();
        simulate(&programs, &layout, &world, Settings::default()).unwrap()
    };
    // With one micro-batch everyone waits for every message.
    assert_eq!(seconds(1, 0.0).seconds, seconds(1, 0.01 / bytes).seconds);
    // With more the first device computes forwards while it sends, and the second backwards.
    let (free, handled) = (seconds(4, 0.0), seconds(4, 0.01 / bytes));
    let longer = handled.devices.iter().zip(&free.devices).map(|(a, b)| a.computing - b.computing);
    let longer: Vec<f64> = longer.collect();
    assert!(longer.iter().all(|seconds| *seconds > 0.0 && *seconds <= 0.08 + 1e-9), "{longer:?}");
}

/// Where devices are parts of one chip.
struct OneChip<'a>(FleetWorld<'a>, f64);

impl World for OneChip<'_> {
    fn resources(&self) -> &[Resource] {
        self.0.resources()
    }

    fn alone(&self, op: &Op, device: usize) -> Work {
        self.0.alone(op, device)
    }

    fn together(&self, op: &Op, device: usize) -> Work {
        self.0.together(op, device)
    }

    fn seat(&self, _device: usize) -> Option<Seat> {
        Some(Seat { chip: 0, part: 1.0, alone: self.1 })
    }
}

/// Two on one core take turns: whatever they have to compute, it takes as long as one after the other, and half as long as it
/// was measured to beside a neighbour that always computes. A pipeline's bubbles are no loss there.
#[test]
fn devices_of_one_chip_are_quicker_while_others_rest() {
    let chain = untied(2);
    let fleet = fleet(2, "1000 Gbit/s");
    let costs = unit_costs(&chain, &fleet);
    for batches in [1, 4] {
        let plan = pipeline(&chain, 2, batches, Order::Gpipe, false);
        let layout = Layout::new(&plan, &chain);
        let step = |alone: f64| {
            let world = OneChip(FleetWorld::new(&fleet, &costs, &layout), alone);
            let programs = compile_paced(&plan, &chain, Purpose::Train, &world.0).unwrap();
            simulate(&programs, &layout, &world, Settings::default()).unwrap()
        };
        let (apart, together) = (step(1.0), step(0.5));
        let work: f64 = apart.devices.iter().map(|device| device.computing).sum();
        assert!((together.seconds / (work / 2.0) - 1.0).abs() < 1e-3, "{} {work}", together.seconds);
        // With one micro-batch one of them always rests.
        let least = if batches == 1 { 0.5 } else { 0.7 };
        let less = together.seconds / apart.seconds;
        assert!(less >= least - 1e-3 && less < 1.0, "{batches}: {less}");
    }
}

#[test]
fn gathered_parameters_are_there_when_their_layer_begins() {
    for seed in 0..300 {
        let mut draw = Draw::new(seed);
        let (chain, sequence) = draw::model(&mut draw);
        let step = draw::step(&mut draw, sequence);
        let plan = draw::table(&chain, step, 4, &mut draw);
        let layout = Layout::new(&plan, &chain);
        let programs = compile(&plan, &chain, Purpose::Train).unwrap();
        let simulated = simulate(&programs, &layout, &AnyDelay { seed }, Settings::default()).unwrap();
        for (program, spans) in programs.iter().zip(&simulated.spans) {
            for (reader, read) in program.instructions.iter().zip(spans) {
                let Op::Forward { layer, .. } = reader.op else { continue };
                for (gather, got) in program.instructions.iter().zip(spans) {
                    let passes = [Pass::Forward, Pass::Step];
                    let got_by_it = |pass: &&Pass| {
                        gather.op == Op::Gather { layer, pass: **pass }
                            && layout.gather(layer, **pass).unwrap().receives(program.device)
                    };
                    if passes.iter().any(|pass| got_by_it(&pass)) {
                        assert!(got.end <= read.start, "seed {seed}: {reader} before {gather}");
                    }
                }
            }
        }
    }
}

/// A forward takes a second, a backward two, an update of a tensor in host memory a part of one; all else nothing.
struct SlowUpdates {
    update_seconds: f64,
}

impl World for SlowUpdates {
    fn resources(&self) -> &[Resource] {
        &[]
    }

    fn alone(&self, op: &Op, _device: usize) -> Work {
        let seconds = match op {
            Op::Forward { .. } => 1.0,
            Op::Backward { .. } => 2.0,
            Op::Update { .. } => self.update_seconds,
            _ => 0.0,
        };
        Work { seconds, ..Work::default() }
    }

    fn together(&self, op: &Op, device: usize) -> Work {
        self.alone(op, device)
    }
}

/// On one device, with all state in its own memory or elsewhere.
fn streamed(chain: &Chain, holder: Holder) -> Plan {
    let mut plan = pipeline(chain, 1, 2, Order::LayerFirst, false);
    let residence = if holder.tier().is_device() { Residence::Resident } else { Residence::Fetched };
    for row in &mut plan.tensors {
        row.gradient.iter_mut().chain(&mut row.optimizer).for_each(|held| held.holder = holder);
        row.compute_copies.iter_mut().for_each(|copy| copy.residence = residence);
    }
    plan
}

/// Updates follow each other from the step's beginning on, in the order of the layers, and each layer's forward waits for
/// its own.
#[test]
fn a_step_runs_beside_the_updates_of_the_one_before() {
    let chain = untied(4);
    for holder in [Holder::Host(0), Holder::Disk(0), Holder::Device(0)] {
        let plan = streamed(&chain, holder);
        let layout = Layout::new(&plan, &chain);
        let programs = compile(&plan, &chain, Purpose::Train).unwrap();
        for update_seconds in [0.0, 0.05, 0.2, 0.5, 3.0] {
            let world = SlowUpdates { update_seconds };
            let played =
                |alone| simulate(&programs, &layout, &world, Settings { alone, ..Settings::default() });
            let (steady, alone) = (played(false).unwrap(), played(true).unwrap());
            let computing = 2.0 * 3.0 * chain.layers.len() as f64;
            let updating = update_seconds * chain.tensors.len() as f64;
            assert!((alone.seconds - computing - updating).abs() < 1e-9, "{holder:?}: {}", alone.seconds);
            let (mut computed, mut updated) = (0f64, 0.0);
            for layer in 0..chain.layers.len() {
                updated += update_seconds * layout.owned(layer).len() as f64;
                computed = computed.max(updated) + 2.0;
            }
            let beside = computed + 2.0 * 2.0 * chain.layers.len() as f64;
            let expected = if holder.tier().is_device() { alone.seconds } else { beside };
            assert!(
                (steady.seconds - expected).abs() < 1e-9,
                "{holder:?}, updates of {update_seconds}: {}, not {expected}",
                steady.seconds
            );
            let is_hidden = !holder.tier().is_device() && update_seconds > 0.0;
            assert_eq!(steady.seconds < alone.seconds - 1e-9, is_hidden, "{holder:?}, {update_seconds}");
            let ends = steady.spans.iter().flatten().map(|span| span.end);
            assert!(ends.fold(0.0, f64::max) <= steady.seconds + 1e-9);
        }
    }
}

/// A device begins its next step when its own part of the last one is over, whatever others have yet to do. Alone, or where all
/// end at once, that changes nothing.
#[test]
fn steps_follow_each_other_device_by_device() {
    let (mut shorter, mut single) = (0, 0);
    for seed in 0..600 {
        let mut draw = Draw::new(seed);
        let (chain, sequence) = draw::model(&mut draw);
        let step = draw::step(&mut draw, sequence);
        let plan = draw::table(&chain, step, 4, &mut draw);
        let layout = Layout::new(&plan, &chain);
        let programs = compile(&plan, &chain, Purpose::Train).unwrap();
        let played = |alone| {
            simulate(&programs, &layout, &AnyDelay { seed }, Settings { alone, ..Settings::default() })
                .unwrap()
        };
        let (steady, alone) = (played(false), played(true));
        if programs.iter().any(|program| !program.left_behind().is_empty()) {
            continue;
        }
        match layout.members() {
            [_] => {
                assert!((steady.seconds - alone.seconds).abs() <= 1e-9 * alone.seconds, "seed {seed}");
                single += 1;
            }
            // Other transfers meet on shared links, which may cost a little.
            _ => {
                assert!(
                    steady.seconds <= 1.05 * alone.seconds,
                    "seed {seed}: {} {}",
                    steady.seconds,
                    alone.seconds
                );
                shorter += usize::from(steady.seconds < 0.999 * alone.seconds);
            }
        }
    }
    assert!(shorter > 20 && single > 20, "{shorter} shorter, {single} on one device");
}

/// Where dropping something takes no time, as in every other world.
struct ReleasedAtOnce(AnyDelay);

impl World for ReleasedAtOnce {
    fn resources(&self) -> &[Resource] {
        self.0.resources()
    }

    fn alone(&self, op: &Op, device: usize) -> Work {
        if matches!(op, Op::Release { .. }) { Work::default() } else { self.0.alone(op, device) }
    }

    fn together(&self, op: &Op, device: usize) -> Work {
        self.0.together(op, device)
    }
}

/// What a step finds under way is the same whether the one before is played from its beginning or from its closing sums on. (With
/// memory it is played whole.)
#[test]
fn a_step_before_counts_from_its_closing_sums_on() {
    let mut leaving = 0;
    for seed in 0..400 {
        let mut draw = Draw::new(seed);
        let (chain, sequence) = draw::model(&mut draw);
        let step = draw::step(&mut draw, sequence);
        let plan = draw::table(&chain, step, 4, &mut draw);
        let layout = Layout::new(&plan, &chain);
        let programs = compile(&plan, &chain, Purpose::Train).unwrap();
        if programs.iter().all(|program| program.left_behind().is_empty()) {
            continue;
        }
        let played = |memory| {
            let world = ReleasedAtOnce(AnyDelay { seed });
            simulate(&programs, &layout, &world, Settings { memory, ..Settings::default() }).unwrap()
        };
        let (whole, short) = (played(true), played(false));
        let is_near = |a: f64, b: f64| (a - b).abs() <= 1e-9 * whole.seconds;
        assert!(is_near(whole.seconds, short.seconds), "seed {seed}: {} {}", whole.seconds, short.seconds);
        for (program, (one, other)) in programs.iter().zip(whole.spans.iter().zip(&short.spans)) {
            for (instruction, (one, other)) in program.instructions.iter().zip(one.iter().zip(other)) {
                assert!(
                    is_near(one.start, other.start) && is_near(one.end, other.end),
                    "seed {seed}, {instruction}: {one:?}, {other:?}"
                );
            }
        }
        leaving += 1;
    }
    assert!(leaving > 50, "{leaving} tables");
}
