//! Where checkpoints go. A part is torn until it has been written to its end.

use std::collections::BTreeMap;

use shoal_control::controller::Keeping;
use shoal_control::message::JobId;

use crate::toy::Slice;

#[derive(Clone, Copy)]
struct Part {
    slice: Slice,
    whole: bool,
}

/// What a reader gets.
pub enum Found {
    Whole(Slice),
    /// It is there, but cannot be read: its medium is damaged, or away for a while.
    Unreadable,
    /// It is not there, or torn.
    Missing,
}

#[derive(Default)]
pub struct Store {
    parts: BTreeMap<(JobId, u64, usize), Part>,
    /// Checkpoints that cannot be read, and whether that is for good.
    unreadable: BTreeMap<(JobId, u64), bool>,
}

impl Store {
    pub fn begin(&mut self, job: JobId, checkpoint: u64, part: usize, slice: Slice) {
        self.parts.insert((job, checkpoint, part), Part { slice, whole: false });
    }

    pub fn end(&mut self, job: JobId, checkpoint: u64, part: usize) {
        if let Some(part) = self.parts.get_mut(&(job, checkpoint, part)) {
            part.whole = true;
        }
    }

    pub fn read(&self, job: JobId, checkpoint: u64, part: usize) -> Found {
        match self.written(job, checkpoint, part) {
            Some(_) if self.unreadable.contains_key(&(job, checkpoint)) => Found::Unreadable,
            Some(slice) => Found::Whole(slice),
            None => Found::Missing,
        }
    }

    /// A part, if it is there and whole, readable or not.
    pub fn written(&self, job: JobId, checkpoint: u64, part: usize) -> Option<Slice> {
        self.parts.get(&(job, checkpoint, part)).filter(|part| part.whole).map(|part| part.slice)
    }

    pub fn damage(&mut self, job: JobId, checkpoint: u64, for_good: bool) {
        let lasts = self.unreadable.entry((job, checkpoint)).or_default();
        *lasts |= for_good;
    }

    /// What was only away is there again.
    pub fn mend(&mut self) {
        self.unreadable.retain(|_, for_good| *for_good);
    }

    pub fn is_lost(&self, job: JobId, checkpoint: u64) -> bool {
        self.unreadable.get(&(job, checkpoint)) == Some(&true)
    }

    pub fn keep(&mut self, job: JobId, keeping: &Keeping) {
        self.parts.retain(|(owner, id, _), _| *owner != job || keeping.spares(*id));
    }
}
