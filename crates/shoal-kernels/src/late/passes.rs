//! Passes over the same operations, noted down and replayed by the rules that the driver's graphs have: a pass serves as
//! long as memory is in use as it was, and nothing is waited for while one is noted down.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::queue::{Queue, Work};
use crate::device::{Pass, Result};
use crate::memory::Arena;
use crate::random::fold;

/// Passes that are queued as they come before one is noted down.
const DIRECT_PASSES: u32 = 2;

enum Known {
    /// Passed over so often.
    Seen(u32),
    Noted(Vec<Work>),
}

#[derive(Default)]
struct State {
    known: HashMap<u64, Known>,
    /// The pass under way, and what has been noted down of it.
    current: Option<(u64, Pass, Vec<Work>)>,
    /// How many passes were replayed.
    replayed: usize,
}

#[derive(Default)]
pub(super) struct Passes(Mutex<State>);

impl Passes {
    fn state(&self) -> MutexGuard<'_, State> {
        // Entries are inserted whole or not at all.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn begin(&self, arena: &Arena, key: u64) -> Pass {
        let mut state = self.state();
        assert!(state.current.is_none(), "a pass begins when the one before has ended");
        let key = fold(key, arena.layout());
        let pass = match state.known.entry(key).or_insert(Known::Seen(0)) {
            Known::Noted(_) => Pass::Replayed,
            Known::Seen(times) if *times < DIRECT_PASSES => {
                *times += 1;
                Pass::Direct
            }
            Known::Seen(_) => Pass::Recorded,
        };
        state.current = Some((key, pass, Vec::new()));
        pass
    }

    pub(super) fn end(&self, queue: &Queue) -> Result {
        let mut state = self.state();
        let (key, pass, noted) = state.current.take().expect("a pass was begun");
        if pass == Pass::Recorded {
            state.known.insert(key, Known::Noted(noted));
        }
        state.replayed += usize::from(pass == Pass::Replayed);
        match &state.known[&key] {
            Known::Noted(works) if pass != Pass::Direct => queue.push(works.iter().cloned()),
            _ => Ok(()),
        }
    }

    pub(super) fn replayed(&self) -> usize {
        self.state().replayed
    }

    pub(super) fn abandon(&self) {
        self.state().current = None;
    }

    /// Takes an operation that belongs to a pass; gives it back where it is to be queued.
    pub(super) fn note(&self, work: Work) -> Option<Work> {
        match &mut self.state().current {
            Some((_, Pass::Recorded, noted)) => {
                noted.push(work);
                None
            }
            Some((_, Pass::Replayed, _)) => None,
            _ => Some(work),
        }
    }

    /// # Panics
    /// If a pass is noted down or replayed: what is asked for in it is not under way yet, so nobody may wait for it.
    pub(super) fn assert_nothing_waits(&self) {
        let pass = self.state().current.as_ref().map(|(_, pass, _)| *pass);
        assert!(!matches!(pass, Some(Pass::Recorded | Pass::Replayed)), "something waits within a pass");
    }
}
