//! Models that stream through a device.

use shoal_fleet::{Costs, Fleet};
use shoal_model::{Chain, Precision, presets};
use shoal_plan::memory::after_computing;
use shoal_plan::one_device::StepShape;
use shoal_plan::{Activations, Layout, Purpose, Tier, compile, verify_all};
use shoal_planner::spilled::{self, SpilledError, plan, together};

fn host(devices: usize, memory: &str, host_memory: &str) -> Fleet {
    let text = format!(
        "[[node]]\nname = \"host\"\nhost_memory = \"{host_memory}\"\nhost_bandwidth = \"300 GB/s\"\nhost_link = \"12 GB/s\"\nnetwork = \"10 Gbit/s\"\ndevices = [{{ kind = \"V100\", count = {devices}, memory = \"{memory}\" }}]\n"
    );
    Fleet::parse(&text, "fleet.toml").unwrap()
}

fn step(global_batch: usize) -> StepShape {
    StepShape { global_batch, sequence: 1024, precision: Precision::Fp16, ..StepShape::ADAM }
}

#[test]
fn what_fits_stays_and_what_does_not_is_streamed() {
    let chain = Chain::new(&presets::preset("gpt2-124m").unwrap());
    let large = host(1, "16 GiB", "64 GiB");
    let costs = Costs::new(&chain, &large, None, Precision::Fp16, 1024).unwrap();
    let stays = plan(&chain, step(8), &large, &costs, 0).unwrap();
    assert_eq!((stays.spill.on_device, stays.memory.host), (1.0, 0));
    let small = host(1, "2 GiB", "64 GiB");
    let streams = plan(&chain, step(8), &small, &costs, 0).unwrap();
    assert!(streams.memory.total() <= (2 << 30) - shoal_planner::GPU_PROCESS_BYTES);
    assert!(streams.memory.host > 1 << 30 && streams.spill.elsewhere == Tier::Host);
    assert!(streams.simulated.seconds > stays.simulated.seconds);
    let programs = compile(&streams.plan, &chain, Purpose::Train).unwrap();
    verify_all(&programs, &streams.plan, &chain, Purpose::Train).unwrap();
}

/// What is not made again is kept: as much as there is room for, and it is worth it.
#[test]
fn room_that_is_left_keeps_activations() {
    let chain = Chain::new(&presets::preset("gpt2-124m").unwrap());
    let mut last = f64::INFINITY;
    let mut kept = Vec::new();
    for memory in ["1300 MiB", "2 GiB", "3 GiB", "4 GiB"] {
        let fleet = host(1, memory, "64 GiB");
        let costs = Costs::new(&chain, &fleet, None, Precision::Fp16, 1024).unwrap();
        let planned = plan(&chain, step(8), &fleet, &costs, 0).unwrap();
        let keeps = planned.plan.layers.iter().map(|row| row.compute[0].activations);
        assert_eq!(keeps.filter(|how| *how == Activations::Keep).count(), planned.spill.kept_layers);
        assert!(planned.simulated.seconds <= last, "{memory}");
        last = planned.simulated.seconds;
        kept.push(planned.spill.kept_layers);
        let programs = compile(&planned.plan, &chain, Purpose::Train).unwrap();
        verify_all(&programs, &planned.plan, &chain, Purpose::Train).unwrap();
        // What is left when all layers are computed: gradients on their way to the host.
        let layout = Layout::new(&planned.plan, &chain);
        let after = after_computing(&planned.program, &layout);
        assert!(after > 0 && after < planned.memory.total(), "{after} of {}", planned.memory.total());
    }
    assert!(kept.iter().any(|layers| (1..chain.layers.len()).contains(layers)), "{kept:?}");
}

#[test]
fn what_fits_nowhere_is_refused() {
    let chain = Chain::new(&presets::preset("gpt2-124m").unwrap());
    let fleet = host(1, "700 MiB", "64 GiB");
    let costs = Costs::new(&chain, &fleet, None, Precision::Fp16, 1024).unwrap();
    let Err(error) = plan(&chain, step(8), &fleet, &costs, 0) else { panic!("it was planned") };
    assert!(matches!(error, SpilledError::TooSmall { .. }), "{error}");
    let fleet = host(1, "2 GiB", "1 GiB");
    let Err(error) = plan(&chain, step(8), &fleet, &costs, 0) else { panic!("it was planned") };
    assert!(matches!(error, SpilledError::HostTooSmall { .. }), "{error}");
    assert!(error.hint().is_some());
}

/// Twelve models on eight devices take one and a half times what eight do, not twice.
#[test]
fn many_models_share_a_pool() {
    let chain = Chain::new(&presets::gpt2(50257, 1024, 12, 16, 1024));
    for devices in [1, 2, 8] {
        let fleet = host(devices, "4 GiB", "512 GiB");
        let costs = Costs::new(&chain, &fleet, None, Precision::Fp16, 1024).unwrap();
        let spilled::Together { seconds, bound_seconds, one_after_another_seconds } =
            together(&chain, step(8), &fleet, &costs, 12, 8).unwrap();
        assert!(seconds >= bound_seconds, "{seconds} < {bound_seconds}");
        assert!(
            seconds <= one_after_another_seconds * 1.001,
            "{devices}: {seconds}, {one_after_another_seconds}"
        );
    }
}
