//! What tests of checkpoints have in common.

use std::collections::BTreeMap;

use shoal_state::checkpoint::Header;

/// Of a save after a step, with nothing of its own.
pub fn header(step: u64) -> Header {
    Header {
        job: "0123abcd".to_owned(),
        step,
        position: 32 * step,
        seed: 7,
        rng: "philox".to_owned(),
        plan: "some devices".to_owned(),
        extra: BTreeMap::new(),
    }
}
