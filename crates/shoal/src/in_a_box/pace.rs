//! How long what a played device does lasts.

use shoal_plan::{Lane, Program};
use shoal_sim::{FleetWorld, World};

/// How long each of a program's instructions lasts on its device, by number; what waits for others lasts as it lasts.
pub fn durations(program: &Program, world: &FleetWorld) -> Vec<f64> {
    let mut durations =
        vec![0.0; program.instructions.iter().map(|next| next.id as usize + 1).max().unwrap_or(0)];
    for instruction in program.instructions.iter().filter(|next| next.lane != Lane::Network) {
        let work = world.alone(&instruction.op, program.device);
        let rates =
            work.resources.iter().map(|resource| world.resources()[*resource as usize].bytes_per_second);
        let moving = if work.bytes > 0.0 { work.bytes / rates.fold(f64::INFINITY, f64::min) } else { 0.0 };
        durations[instruction.id as usize] = work.seconds + moving;
    }
    durations
}
