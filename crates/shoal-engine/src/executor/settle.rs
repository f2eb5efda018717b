//! What is left of a step that was cut short. An executor says where its slices stand; once all survivors have agreed
//! where to go ([`shoal_plan::agree`]) it brings every slice there: it applies what is left of the step, by gradients
//! that it has and sums that it is told, or drops the step. Reduced gradients lie in the state until the next step's
//! first addition, and a device does not begin a step before its last one is applied: so keeping them costs nothing.

use std::collections::HashMap;

use shoal_plan::{Closing, Op, Standing, Tier};

use super::Executor;
use super::step::{Step, StepInput};
use super::updates::Terms;
use crate::error::{EngineError, Result};
use crate::state::{Kept, gradient_room};

/// How far a training step has come, as far as its end is concerned.
#[derive(Clone, Copy)]
pub(super) struct Progress {
    terms: Terms,
    /// The gradients that updates here read are added up over all devices and have come: the norm was begun, which needs
    /// them.
    reduced: bool,
    /// The sums over all devices are here, in the device's memory.
    has_loss: bool,
    has_norm: bool,
    /// Of all devices, once the loss is.
    targets: u64,
}

impl Progress {
    pub(super) fn of(input: &StepInput) -> Progress {
        let terms = Terms::of(input);
        Progress { terms, reduced: false, has_loss: false, has_norm: false, targets: 0 }
    }

    /// One that has ended but for some of its updates.
    pub(super) fn owed(terms: Terms) -> Progress {
        // Its sums are no longer on the device: they were noted at its end.
        Progress { terms, reduced: true, has_loss: false, has_norm: false, targets: 0 }
    }

    /// Whether it is that of a step.
    pub(super) fn is_of(&self, terms: &Terms) -> bool {
        self.terms.step == terms.step
    }

    fn closing(&self, scalars: &[f64]) -> Closing {
        Closing {
            step: self.terms.step,
            loss: scalars[0].into(),
            norm_squared: scalars[1].into(),
            targets: self.targets,
            correct: scalars[2].into(),
        }
    }
}

impl Executor {
    /// A movement begins: what it comes after has finished.
    pub(super) fn note_begun(&mut self, op: &Op) {
        if let Some(progress) = &mut self.progress {
            progress.reduced |= matches!(op, Op::GradientNorm);
        }
    }

    /// An instruction has done what it says.
    pub(super) fn note_done(&mut self, step: &Step, op: &Op) {
        let Some(progress) = &mut self.progress else { return };
        match op {
            Op::SumLoss => (progress.has_loss, progress.targets) = (true, step.outcome.targets),
            Op::GradientNorm => (progress.has_norm, progress.reduced) = (true, true),
            _ => {}
        }
    }

    /// The step has come to its end, with these sums.
    pub(super) fn note_ended(&mut self, scalars: &[f64]) {
        if let Some(progress) = self.progress.take_if(|progress| progress.has_loss && progress.has_norm) {
            self.closed = Some(progress.closing(scalars));
        }
    }

    /// Where the slices stand that are here, once what was left under way has ended. An update that failed shows in it; why
    /// it did is what the next step fails with, unless all is settled before.
    pub fn standing(&mut self) -> Result<Standing> {
        self.wait_for_updates();
        // Whatever failed on the device shows here.
        self.device.wait()?;
        let mut slices = Vec::new();
        for (tensor, held) in self.state.tensors.iter().enumerate() {
            let lent = held.slices.iter().any(|slice| matches!(slice.kept, Kept::Lent));
            if lent || self.torn == Some(tensor) {
                return Err(EngineError::Torn { tensor: self.chain.tensors[tensor].name.clone() });
            }
            slices.extend(held.slices.iter().map(|slice| slice.version));
        }
        let closing = match &self.progress {
            Some(progress) if progress.has_loss && progress.has_norm => {
                let sums = [&self.loss, &self.norm_squared, &self.correct];
                Some(progress.closing(&self.device.scalars(&sums)?))
            }
            _ => self.closed,
        };
        let first = slices.iter().min().copied().unwrap_or_else(|| self.step_without_slices());
        let last = slices.iter().max().copied().unwrap_or(first);
        assert!(last <= first + 1, "slices are at versions {first} to {last}");
        let under_way = self.progress.filter(|progress| progress.terms.step == first);
        Ok(Standing {
            step: first,
            applied: last > first,
            reduced: under_way.is_some_and(|progress| progress.reduced),
            closing,
        })
    }

    /// The same after a step that has ended, without waiting for the updates that it left under way: these slices have not
    /// seen it yet, and have all that they need to.
    pub fn standing_so_far(&mut self) -> Result<Standing> {
        let Some(closing) = self.closed.filter(|_| !self.behind.is_empty()) else { return self.standing() };
        let mut slices = self.state.tensors.iter().flat_map(|held| &held.slices);
        let applied = slices.any(|slice| slice.version > closing.step);
        Ok(Standing { step: closing.step, applied, reduced: true, closing: Some(closing) })
    }

    /// The step that a device is at which computes and keeps nothing.
    fn step_without_slices(&self) -> u64 {
        match (&self.progress, &self.closed) {
            (Some(progress), _) => progress.terms.step,
            (None, Some(closed)) => closed.step + 1,
            // Nothing was trained since the state was set.
            (None, None) => self.state.tensors.first().map_or(0, |held| held.copy_version),
        }
    }

    /// Brings every slice here to a step, by the closing sums of the step before it where they are not there yet, and drops
    /// whatever else is left of the step that was cut short. Copies to compute with that others would have renewed stay as
    /// they were, and their versions say so.
    pub fn settle(&mut self, step: u64, closing: Option<Closing>) -> Result {
        let standing = self.standing()?;
        let closing = closing.or(standing.closing).filter(|closing| closing.step + 1 == step);
        if standing.step != step || standing.applied {
            let refused = |what| EngineError::Unsettled { from: standing.step, to: step, what };
            if standing.step + 1 != step {
                return Err(refused("one step at most is applied, and none is taken back"));
            }
            let closing = closing.ok_or_else(|| refused("the sums that close the step are missing"))?;
            let progress = self.progress.filter(|_| standing.reduced);
            let progress = progress.ok_or_else(|| refused("its gradients were not added up"))?;
            let (device, mut applied) = (self.device.clone(), Ok(()));
            device.run(&mut || applied = self.apply_rest(&progress.terms, &closing));
            applied?;
        }
        self.drop_remains()?;
        self.forget_failures();
        self.closed = closing;
        Ok(())
    }

    /// Updates that the step still owes.
    fn apply_rest(&mut self, terms: &Terms, closing: &Closing) -> Result {
        let device = self.device.clone();
        device.set_scalar(&mut self.loss, closing.loss.into())?;
        device.set_scalar(&mut self.norm_squared, closing.norm_squared.into())?;
        let owed = |executor: &Executor, at: Tier| -> Vec<usize> {
            let tensors = executor.state.tensors.iter().enumerate();
            let behind = tensors.filter(|(_, held)| {
                held.slices.iter().any(|slice| slice.tier == at && slice.version == terms.step)
            });
            behind.map(|(tensor, _)| tensor).collect()
        };
        let here = owed(self, Tier::Device);
        if !here.is_empty() {
            self.update(terms, here.into_iter())?;
        }
        for at in [Tier::Host, Tier::Disk] {
            for tensor in owed(self, at) {
                let updates = self.start_update(terms, tensor, at)?(true);
                self.put_back(updates)?;
            }
        }
        device.wait()?;
        Ok(())
    }

    /// Drops what a step keeps between its instructions.
    fn drop_remains(&mut self) -> Result {
        let trained = self.progress.take().is_some();
        self.state.gathered.clear();
        self.ahead = (0, HashMap::new());
        for tensor in 0..self.state.tensors.len() {
            let held = &mut self.state.tensors[tensor];
            match &mut held.gradient {
                // The next step's first addition overwrites it.
                Some(sum) if held.keeps_sum => sum.started = false,
                Some(_) => held.gradient = None,
                // One that was lost with whoever had it.
                None if held.keeps_sum && trained => {
                    let sum = gradient_room(&*self.device, &self.chain, tensor, self.state.precision)?;
                    self.state.tensors[tensor].gradient = Some(sum);
                }
                None => {}
            }
        }
        Ok(())
    }
}
