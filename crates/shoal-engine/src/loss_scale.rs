//! The factor on the loss that keeps fp16 gradients inside their small range. It halves when a step's
//! gradient overflows (that step changes nothing) and doubles after many that do not. It is part of a run's
//! state: a resumed run scales and skips as the uninterrupted one would have.

use std::collections::BTreeMap;

use serde_json::{Value, json};

const START: f32 = 65536.0;
const LEAST: f32 = 1.0;
const MOST: f32 = 16_777_216.0;
/// Steps without an overflow after which the scale doubles.
const PATIENCE: u64 = 2000;

const KEY: &str = "loss_scale";

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    pub scale: f32,
    /// Steps since it last changed.
    calm: u64,
    /// Steps that were skipped since the run began: they are no updates.
    pub skipped: u64,
}

impl Default for LossScale {
    fn default() -> LossScale {
        LossScale { scale: START, calm: 0, skipped: 0 }
    }
}

impl LossScale {
    /// Whether a smaller scale could still help.
    pub fn can_fall(&self) -> bool {
        self.scale > LEAST
    }

    /// Takes note of a step.
    pub fn after(&mut self, skipped: bool) {
        if skipped {
            *self = LossScale { scale: (self.scale / 2.0).max(LEAST), calm: 0, skipped: self.skipped + 1 };
            return;
        }
        self.calm += 1;
        if self.calm >= PATIENCE {
            (self.scale, self.calm) = ((2.0 * self.scale).min(MOST), 0);
        }
    }

    /// What [`LossScale::to_bytes`] gives.
    pub const BYTES: usize = 20;

    /// For peers that cannot know it.
    pub fn to_bytes(&self) -> [u8; LossScale::BYTES] {
        let mut bytes = [0; LossScale::BYTES];
        bytes[..4].copy_from_slice(&self.scale.to_le_bytes());
        bytes[4..12].copy_from_slice(&self.calm.to_le_bytes());
        bytes[12..].copy_from_slice(&self.skipped.to_le_bytes());
        bytes
    }

    /// A scale that cannot be is brought into its range.
    pub fn from_bytes(bytes: [u8; LossScale::BYTES]) -> LossScale {
        let [scale @ .., _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _] = bytes;
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let scale = f32::from_le_bytes(scale);
        let scale = if scale.is_finite() { scale.clamp(LEAST, MOST) } else { START };
        LossScale { scale, calm: word(4), skipped: word(12) }
    }

    pub fn save(&self, extra: &mut BTreeMap<String, Value>) {
        let state = json!({ "scale": self.scale, "calm": self.calm, "skipped": self.skipped });
        extra.insert(KEY.into(), state);
    }

    /// What a checkpoint holds; one of another precision holds nothing of it.
    pub fn restore(extra: &BTreeMap<String, Value>) -> LossScale {
        let Some(state) = extra.get(KEY) else { return LossScale::default() };
        let whole = |name: &str| state[name].as_u64().unwrap_or(0);
        let scale = state["scale"].as_f64().filter(|scale| *scale >= f64::from(LEAST));
        LossScale {
            scale: scale.map_or(START, |scale| (scale as f32).min(MOST)),
            calm: whole("calm"),
            skipped: whole("skipped"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_falls_at_once_and_rises_slowly_and_survives_a_checkpoint() {
        let mut scale = LossScale::default();
        scale.after(true);
        assert_eq!((scale.scale, scale.skipped), (START / 2.0, 1));
        for _ in 0..PATIENCE - 1 {
            scale.after(false);
        }
        assert_eq!(scale.scale, START / 2.0);
        let mut extra = BTreeMap::new();
        scale.save(&mut extra);
        assert_eq!(LossScale::restore(&extra), scale);
        assert_eq!(LossScale::from_bytes(scale.to_bytes()), scale);
        scale.after(false);
        assert_eq!(scale.scale, START);
        while scale.can_fall() {
            scale.after(true);
        }
        scale.after(true);
        assert_eq!(scale.scale, LEAST);
        assert_eq!(LossScale::restore(&BTreeMap::new()), LossScale::default());
    }
}
