//! What must not happen while passes are noted down. Making and closing a library's handle waits for everything
//! on the GPU, and such a wait spoils what any thread of the process is noting down there. So the two exclude
//! each other, whichever devices they belong to.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

struct Recordings {
    under_way: Mutex<usize>,
    one_over: Condvar,
}

static RECORDINGS: Recordings = Recordings { under_way: Mutex::new(0), one_over: Condvar::new() };

fn under_way() -> MutexGuard<'static, usize> {
    // A count is changed in one go.
    RECORDINGS.under_way.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Held while a pass is noted down.
#[derive(Debug)]
pub(super) struct Recording(());

impl Recording {
    pub(super) fn begin() -> Recording {
        *under_way() += 1;
        Recording(())
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        *under_way() -= 1;
        RECORDINGS.one_over.notify_all();
    }
}

/// Does what waits for the whole GPU, when nothing is noted down. The caller notes nothing down itself: libraries
/// are opened before or during the passes that are queued as they come.
pub(super) fn while_nothing_is_recorded<T>(work: impl FnOnce() -> T) -> T {
    let mut recordings = under_way();
    while *recordings > 0 {
        recordings = RECORDINGS.one_over.wait(recordings).unwrap_or_else(PoisonError::into_inner);
    }
    work()
}
