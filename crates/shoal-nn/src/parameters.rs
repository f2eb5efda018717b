//! A layer's view of its tensors, and of the gradient sums it adds to. Layers name slots, never places: who
//! holds a tensor and in how many pieces is the plan's affair.

use shoal_kernels::Tensor;
use shoal_kernels::device::Sum;
use shoal_model::Slot;

/// The compute copies a layer reads.
pub struct Parameters<'a> {
    entries: Vec<(Slot, &'a Tensor)>,
}

impl<'a> Parameters<'a> {
    pub fn new(entries: Vec<(Slot, &'a Tensor)>) -> Self {
        Parameters { entries }
    }

    pub fn optional(&self, slot: Slot) -> Option<&'a Tensor> {
        self.entries.iter().find(|(name, _)| *name == slot).map(|(_, tensor)| *tensor)
    }

    /// # Panics
    /// If the layer has no such tensor: the chain that lists the slots and the layer that asks disagree.
    pub fn get(&self, slot: Slot) -> &'a Tensor {
        self.optional(slot).unwrap_or_else(|| panic!("the layer has no {slot:?}"))
    }
}

/// A gradient sum over the step's micro-batches. The first contribution overwrites, so nothing is cleared.
pub struct GradientSum {
    pub sum: Tensor,
    /// Whether this step has contributed.
    pub started: bool,
}

/// The gradient sums a layer's backward adds to, lent for one instruction.
pub struct Gradients {
    entries: Vec<(Slot, GradientSum)>,
}

impl Gradients {
    pub fn new(entries: Vec<(Slot, GradientSum)>) -> Self {
        Gradients { entries }
    }

    pub fn into_entries(self) -> impl Iterator<Item = (Slot, GradientSum)> {
        self.entries.into_iter()
    }

    fn position(&self, slot: Slot) -> Option<usize> {
        self.entries.iter().position(|(name, _)| *name == slot)
    }

    pub fn has(&self, slot: Slot) -> bool {
        self.position(slot).is_some()
    }

    /// The sum and whether to add to it; from now on it counts as started.
    pub fn add_to(&mut self, slot: Slot) -> (&mut Tensor, bool) {
        let index = self.position(slot).unwrap_or_else(|| panic!("the layer has no gradient for {slot:?}"));
        let entry = &mut self.entries[index].1;
        let accumulate = std::mem::replace(&mut entry.started, true);
        (&mut entry.sum, accumulate)
    }

    /// Several sums at once, those of slots that the layer has.
    pub fn add_to_all<const N: usize>(&mut self, slots: [Option<Slot>; N]) -> [Option<Sum<'_>>; N] {
        let mut sums = [const { None }; N];
        for (slot, entry) in &mut self.entries {
            if let Some(place) = slots.iter().position(|wanted| *wanted == Some(*slot)) {
                let more = std::mem::replace(&mut entry.started, true);
                sums[place] = Some((&mut entry.sum, more));
            }
        }
        sums
    }
}
