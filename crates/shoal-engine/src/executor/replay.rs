//! Steps that repeat: what a device has done before it may start at once.

use std::hash::{DefaultHasher, Hash, Hasher};

use shoal_kernels::Pass;
use shoal_kernels::random::fold;
use shoal_plan::{Instruction, Lane, Op, Program, Samples};

use super::Executor;
use super::step::{Step, StepInput};
use crate::error::Result;

/// What a device may start at once instead of one by one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Replay {
    #[default]
    Nothing,
    /// All of a step from its samples to its gradients.
    Step,
    /// Each instruction of it alone.
    Instruction,
}

impl Executor {
    /// Lets the device start at once what it has done before.
    pub fn set_replay(&mut self, replay: Replay) {
        self.replay = replay;
    }

    /// Runs a training program, and says how many seconds the device took for each instruction that computes, and for
    /// updates, of which the first stands for all that reach the device with it. One that starts whole steps at once
    /// cannot tell.
    pub fn time_instructions(&mut self, program: &Program, input: &StepInput) -> Result<Vec<(Op, f64)>> {
        assert_ne!(self.replay, Replay::Step, "a step that is started at once has no parts");
        self.stamps = Some((Vec::new(), Vec::new()));
        let run = self.run(program, input);
        let (stamps, ops) = self.stamps.take().unwrap_or_default();
        let seconds = self.device.seconds_between(stamps);
        // What failed first is what is told.
        run?;
        Ok(ops.into_iter().zip(seconds?).collect())
    }

    /// Notes when an instruction was done, or when the first one began.
    pub(super) fn stamp(&mut self, done: Option<Op>) -> Result {
        if let Some((stamps, ops)) = &mut self.stamps
            && (done.is_some() || stamps.is_empty())
        {
            stamps.push(self.device.stamp()?);
            ops.extend(done);
        }
        Ok(())
    }

    /// Instructions that only compute: as one pass, as a pass each, or one by one.
    pub(super) fn compute(
        &mut self,
        step: &mut Step,
        instructions: &[Instruction],
        replay: Replay,
    ) -> Result {
        self.stamp(None)?;
        if replay == Replay::Nothing {
            for instruction in instructions {
                self.execute(step, instruction)?;
                self.stamp(Some(instruction.op))?;
            }
            return Ok(());
        }
        let mut key = self.pass_key(step, instructions);
        let passes = match replay {
            Replay::Instruction => instructions.chunks(1),
            _ => instructions.chunks(instructions.len()),
        };
        for instructions in passes {
            key = next_key(key, instructions);
            let pass = self.device.begin_pass(key)?;
            // A whole step that is known leaves nothing behind; parts of one make what later parts use, though
            // the device does nothing for it yet.
            let skipped = pass == Pass::Replayed && replay == Replay::Step;
            let done = match skipped {
                true => {
                    step.values.clear();
                    instructions.iter().for_each(|instruction| step.note(&instruction.op));
                    Ok(())
                }
                false => instructions.iter().try_for_each(|instruction| self.execute(step, instruction)),
            };
            if let Err(error) = done {
                self.device.abandon_pass();
                return Err(error);
            }
            self.device.end_pass()?;
            self.stamp(Some(instructions[0].op))?;
        }
        Ok(())
    }

    /// What the operations of these instructions depend on, beside which memory is in use: who asks for what, by what
    /// seed elements are dropped, where the samples lie, and by what the loss is multiplied.
    fn pass_key(&self, step: &Step, instructions: &[Instruction]) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.number, self.sequence, step.input.seed, step.loss_scale().to_bits()).hash(&mut hasher);
        for instruction in instructions {
            (instruction.id, instruction.op).hash(&mut hasher);
        }
        let mut places: Vec<(Samples, u8, u64)> = step.sample_places().collect();
        places.sort_unstable();
        places.hash(&mut hasher);
        hasher.finish()
    }
}

/// Whether an instruction does nothing but compute on what is on the device already.
pub(super) fn only_computes(instruction: &Instruction) -> bool {
    instruction.lane == Lane::Compute
        && matches!(
            instruction.op,
            Op::Begin { .. }
                | Op::Forward { .. }
                | Op::Recompute { .. }
                | Op::BeginBackward { .. }
                | Op::Backward { .. }
                | Op::WeightGradients { .. }
                | Op::SumLoss
                | Op::GradientNorm
        )
}

/// The key of a pass over these instructions, after one with another key. One over the first instruction alone is not
/// the one over the whole step that begins with it.
fn next_key(key: u64, instructions: &[Instruction]) -> u64 {
    fold(fold(key, u64::from(instructions[0].id)), instructions.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_is_known_by_where_it_begins_and_how_far_it_goes() {
        let instruction =
            |id| Instruction { id, op: Op::SumLoss, lane: Lane::Compute, after: Vec::new(), ahead: 0 };
        let all = [instruction(3), instruction(4)];
        let keys = [next_key(7, &all), next_key(7, &all[..1]), next_key(7, &all[1..]), next_key(8, &all)];
        assert_eq!(keys.iter().collect::<std::collections::HashSet<_>>().len(), keys.len());
    }
}
