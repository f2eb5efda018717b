//! Where checkpoints go. A part is torn until it has been written to its end.

use std::collections::{BTreeMap, BTreeSet};

use shoal_control::message::JobId;

use crate::toy::Slice;

#[derive(Clone, Copy)]
struct Part {
    slice: Slice,
    whole: bool,
}

#[derive(Default)]
pub struct Store(BTreeMap<(JobId, u64, usize), Part>);

impl Store {
    pub fn begin(&mut self, job: JobId, checkpoint: u64, part: usize, slice: Slice) {
        self.0.insert((job, checkpoint, part), Part { slice, whole: false });
    }

    pub fn end(&mut self, job: JobId, checkpoint: u64, part: usize) {
        if let Some(part) = self.0.get_mut(&(job, checkpoint, part)) {
            part.whole = true;
        }
    }

    /// A part, if it is there and whole.
    pub fn read(&self, job: JobId, checkpoint: u64, part: usize) -> Option<Slice> {
        self.0.get(&(job, checkpoint, part)).filter(|part| part.whole).map(|part| part.slice)
    }

    pub fn keep(&mut self, job: JobId, ids: &[u64]) {
        let ids: BTreeSet<u64> = ids.iter().copied().collect();
        self.0.retain(|(owner, id, _), _| *owner != job || ids.contains(id));
    }
}
