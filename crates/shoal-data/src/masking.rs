//! Masked tokens: what a model that sees both sides of a position learns from. Some tokens become targets,
//! and most of these are hidden from it; which and how is a function of (seed, epoch, sample, position), so
//! that a resumed run and every cut of the batch see the same.

use crate::IGNORED;
use crate::error::{Error, Result};
use crate::order::mix;
use crate::tokenizer::Tokenizer;

/// Of the tokens become targets.
const TARGET_SHARE: f64 = 0.15;
/// Of the targets are replaced by the mask.
const MASKED_SHARE: f64 = 0.8;
/// Of the targets are replaced by some other token; the rest stays, so that no input can be taken on trust.
const RANDOM_SHARE: f64 = 0.1;

/// How tokens are masked.
#[derive(Debug)]
pub(crate) struct Masking {
    seed: u64,
    mask: i32,
    /// Ids that are never masked, in order.
    special: Vec<i32>,
    /// What a target may be replaced by: all other ids that the tokenizer has.
    ordinary: Vec<i32>,
}

impl Masking {
    /// Masks of the tokenizer's tokens for a model of this vocabulary. `is_text` says that the tokenizer
    /// makes the tokens: ids that a file brings along may be anything to the byte tokenizer.
    pub fn new(tokenizer: &Tokenizer, vocabulary: usize, seed: u64, is_text: bool) -> Result<Self> {
        let no_mask = |why: &'static str| Error::NoMask { tokenizer: tokenizer.name(), why };
        let bytes = matches!(tokenizer, Tokenizer::Bytes);
        if bytes && !is_text {
            return Err(no_mask("did not make these tokens"));
        }
        let mask = tokenizer.mask().ok_or_else(|| no_mask("has no token \"[MASK]\""))?;
        if mask as usize >= vocabulary && bytes {
            return Err(no_mask("leaves no room for a mask in the model's vocabulary"));
        }
        let tokenizer_ids = tokenizer.vocabulary().max(mask as usize + 1);
        if tokenizer_ids > vocabulary {
            return Err(Error::VocabularyTooSmall { tokenizer: tokenizer.name(), tokenizer_ids, vocabulary });
        }
        let (special, ordinary) = tokenizer.special_and_ordinary();
        if ordinary.is_empty() {
            return Err(no_mask("has no token that could be masked"));
        }
        let ids = |ids: Vec<u32>| ids.into_iter().map(|id| id as i32).collect();
        Ok(Self { seed, mask: mask as i32, special: ids(special), ordinary: ids(ordinary) })
    }

    /// Turns tokens into inputs and labels: a target's label is the token that stood there, every other label
    /// is ignored. A sample has at least one target, unless all its tokens are special.
    pub fn apply(&self, epoch: u64, sample: u64, inputs: &mut [i32], labels: &mut [i32]) {
        labels.fill(IGNORED);
        let key = mix(mix(mix(self.seed).wrapping_add(epoch)).wrapping_add(sample));
        let mut lowest: Option<(u64, usize)> = None;
        let mut targets = 0;
        for position in 0..inputs.len() {
            if self.special.binary_search(&inputs[position]).is_ok() {
                continue;
            }
            let draw = mix(key.wrapping_add(position as u64));
            if share(draw) < TARGET_SHARE {
                self.hide(draw, &mut inputs[position], &mut labels[position]);
                targets += 1;
            }
            lowest = Some(lowest.map_or((draw, position), |lowest| lowest.min((draw, position))));
        }
        if let Some((draw, position)) = lowest.filter(|_| targets == 0) {
            self.hide(draw, &mut inputs[position], &mut labels[position]);
        }
    }

    /// Makes a target of a token.
    fn hide(&self, draw: u64, input: &mut i32, label: &mut i32) {
        *label = *input;
        let fate = mix(draw);
        if share(fate) < MASKED_SHARE {
            *input = self.mask;
        } else if share(fate) < MASKED_SHARE + RANDOM_SHARE {
            *input = self.ordinary[(mix(fate) % self.ordinary.len() as u64) as usize];
        }
    }
}

/// A draw as a number in 0..1.
fn share(draw: u64) -> f64 {
    (draw >> 11) as f64 / (1u64 << 53) as f64
}
