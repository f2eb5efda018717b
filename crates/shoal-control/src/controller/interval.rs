//! How often a running job is saved, where its owner leaves that open: so that what saving costs and what a loss is expected
//! to undo balance. That is Young's first-order rule, sqrt(2 · cost of a checkpoint · mean time between losses).

use super::state::{Changes, Job, State};
use crate::settings::Settings;

/// Of the time between two checkpoints, saving takes at most this part.
const COST_PART_MAX: u64 = 20;

/// In steps, of which there is at least one.
pub fn save_every_steps(job: &Job, state: &State, settings: &Settings, now_ms: u64) -> u64 {
    let (step_ms, members) = job.held().map_or((1, 1), |plan| (plan.step_ms, plan.members.len()));
    let losses_every_ms = losses_every_ms(&state.changes, settings, now_ms);
    // Losses elsewhere in the fleet undo nothing here.
    let mine_every_ms = losses_every_ms.saturating_mul(state.members.len() as u64) / members.max(1) as u64;
    let every_ms = match job.save_cost_ms {
        // The first one is made early, to learn what it costs.
        None => settings.save_every_ms_min,
        Some(cost_ms) => balance_ms(cost_ms, mine_every_ms, settings),
    };
    every_ms.div_ceil(step_ms.max(1)).max(1)
}

fn balance_ms(cost_ms: u64, losses_every_ms: u64, settings: &Settings) -> u64 {
    let balanced_ms = cost_ms.saturating_mul(2).saturating_mul(losses_every_ms).isqrt();
    let bounded_ms = balanced_ms.min(settings.save_every_ms_max).max(settings.save_every_ms_min);
    bounded_ms.max(cost_ms.saturating_mul(COST_PART_MAX))
}

/// The mean time between losses anywhere in the fleet. What is expected beforehand counts as one more loss, so that a short
/// time without any does not promise that there will be none.
fn losses_every_ms(changes: &Changes, settings: &Settings, now_ms: u64) -> u64 {
    let watched_ms = if changes.count == 0 { 0 } else { now_ms.saturating_sub(changes.first_ms) };
    watched_ms.saturating_add(settings.changes_every_ms) / (changes.losses + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_expected_as_often_as_they_were_seen_and_a_little_more() {
        let settings = Settings { changes_every_ms: 1_000, ..Settings::default() };
        let seen = Changes { count: 12, first_ms: 5_000, last_ms: 90_000, losses: 9 };
        assert_eq!(losses_every_ms(&seen, &settings, 104_000), 10_000);
        assert_eq!(losses_every_ms(&Changes { losses: 0, ..seen }, &settings, 104_000), 100_000);
        assert_eq!(
            losses_every_ms(&Changes::default(), &settings, 104_000),
            1_000,
            "nobody was there to be lost"
        );
    }

    #[test]
    fn the_interval_is_youngs_within_its_bounds() {
        let settings =
            Settings { save_every_ms_min: 1_000, save_every_ms_max: 50_000, ..Settings::default() };
        assert_eq!(balance_ms(50, 1_000_000, &settings), 10_000);
        assert_eq!(balance_ms(200, 1_000_000, &settings), 20_000, "four times the cost, twice as long");
        assert_eq!(balance_ms(50, 4_000_000, &settings), 20_000, "a quarter of the losses, twice as long");
        assert_eq!(balance_ms(0, 1_000_000, &settings), 1_000);
        assert_eq!(balance_ms(1_000, u64::MAX, &settings), 50_000);
        assert_eq!(balance_ms(4_000, 1, &settings), 80_000, "training is more than saving, whatever is lost");
    }
}
