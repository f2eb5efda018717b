//! Twelve models of 1.5 billion parameters on devices that cannot hold one.

use shoal_fleet::{Costs, Fleet};
use shoal_model::{Chain, Precision, presets};
use shoal_plan::one_device::StepShape;
use shoal_planner::spilled::{plan, together};

fn main() {
    let chain = Chain::new(&presets::preset("gpt2-1.5b").expect("a preset"));
    let step = StepShape { global_batch: 8, sequence: 1024, precision: Precision::Fp16, optimizer_states: 2 };
    for devices in [1, 2, 4, 8] {
        let text = format!(
            "[[node]]\nname = \"host\"\nhost_memory = \"512 GiB\"\nhost_bandwidth = \"300 GB/s\"\nhost_link = \"12 GB/s\"\nnetwork = \"10 Gbit/s\"\ndevices = [{{ kind = \"V100\", count = {devices}, memory = \"16 GiB\" }}]\n"
        );
        let fleet = Fleet::parse(&text, "fleet").expect("a fleet");
        let costs = Costs::new(&chain, &fleet, None, step.precision, step.sequence).expect("costs");
        let one = plan(&chain, step, &fleet, &costs, 0).expect("a plan");
        let t = one.simulated.devices[0];
        println!(
            "{:?} step {:.3} s computing {:.3} recomputing {:.3} idle {:.3} memory {} MiB host {} MiB",
            one.spill,
            one.simulated.seconds,
            t.computing,
            t.recomputing,
            t.idle,
            one.memory.total() >> 20,
            one.memory.host >> 20
        );
        let all = together(&chain, step, &fleet, &costs, 12, 40).expect("it ends");
        println!(
            "{devices} devices: {:.1} s, bound {:.1} s ({:.3}), one after another {:.1} s",
            all.seconds,
            all.bound_seconds,
            all.seconds / all.bound_seconds,
            all.one_after_another_seconds
        );
    }
}
