//! How what is under way is stopped from outside its thread: by a flag that is asked before each instruction, and by the end
//! of the fabric, which ends every wait.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use shoal_control::message::Epoch;
use shoal_control::worker::EngineCommand;
use shoal_net::Fabric;

/// What peers hear of one that was told to stop. It is nobody's fault.
const REASON: &str = "it was told to stop";

/// One thing under way.
#[derive(Default)]
pub struct Brake {
    pulled: AtomicBool,
    fabric: Mutex<Option<Arc<Fabric>>>,
}

impl Brake {
    pub fn flag(&self) -> &AtomicBool {
        &self.pulled
    }

    pub fn is_pulled(&self) -> bool {
        self.pulled.load(Ordering::SeqCst)
    }

    /// From now on pulling ends this fabric; at once if it was pulled before.
    pub fn attach(&self, fabric: &Arc<Fabric>) {
        *lock(&self.fabric) = Some(fabric.clone());
        if self.is_pulled() {
            fabric.abort(REASON);
        }
    }

    pub fn detach(&self) {
        *lock(&self.fabric) = None;
    }

    pub fn pull(&self) {
        self.pulled.store(true, Ordering::SeqCst);
        if let Some(fabric) = &*lock(&self.fabric) {
            fabric.abort(REASON);
        }
    }
}

/// What a job's thread is at, as others see it.
#[derive(Default)]
pub struct Task(Mutex<Option<(Epoch, Arc<Brake>)>>);

impl Task {
    /// Something of an epoch begins. Commands are to be looked for after this, not before.
    pub fn begin(&self, epoch: Epoch) -> Arc<Brake> {
        let brake = Arc::new(Brake::default());
        *lock(&self.0) = Some((epoch, brake.clone()));
        brake
    }

    pub fn end(&self) {
        *lock(&self.0) = None;
    }

    pub fn stop(&self, stops: &Stops) {
        if let Some((epoch, brake)) = &*lock(&self.0)
            && stops.stops(*epoch)
        {
            brake.pull();
        }
    }
}

/// What a command stops at once.
pub enum Stops {
    Nothing,
    Only(Epoch),
    AllBut(BTreeSet<Epoch>),
    All,
}

impl Stops {
    pub fn of(command: &EngineCommand) -> Stops {
        match command {
            EngineCommand::Halt { epoch, after: None } => Stops::Only(*epoch),
            EngineCommand::KeepOnly { epochs } => Stops::AllBut(epochs.clone()),
            _ => Stops::Nothing,
        }
    }

    pub fn stops(&self, epoch: Epoch) -> bool {
        match self {
            Stops::Nothing => false,
            Stops::Only(only) => *only == epoch,
            Stops::AllBut(kept) => !kept.contains(&epoch),
            Stops::All => true,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Whatever is kept here is whole between statements.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
