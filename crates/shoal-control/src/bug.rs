//! Mistakes that the drill plants, one at a time, to see whether it would find them. Each is one that these machines could
//! have had; nothing but the drill can make one happen, and no message, record or setting names them.

/// A mistake, and in its sentence the one place where it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bug {
    /// The keeper says things before the records behind them are on the disk.
    SayBeforeSync,
    /// The log goes on after a torn record instead of cutting it off.
    KeepTornTail,
    /// A report counts the steps that it tells of, though they were counted.
    CountAgain,
    /// The controller takes a worker for dead as soon as its reports are a little late, though its lease still runs.
    DeadTooSoon,
    /// The controller takes a checkpoint for complete when all parts but the last are there.
    PartMissing,
    /// The controller does not wait for the last worker of the old plan to stop and settle.
    DecideEarly,
    /// The controller lets all stay where the slowest is.
    GoBack,
    /// The controller starts a plan before the last worker has its state.
    StartUnready,
    /// The controller starts a plan while a worker that has vanished may still run the one before.
    StartUnfenced,
    /// The controller forgets, when it starts again, what it had asked the planner.
    ForgetPlanner,
    /// The controller does not look whether a slice has lost its last holder.
    ForgetHolders,
    /// The controller goes back to a checkpoint whenever a worker dies, though others have its slices.
    GiveUp,
    /// The controller removes checkpoints when the next one begins, not when it is complete.
    RemoveEarly,
    /// Checkpoints that were begun since are removed with old ones, if that is done late.
    RemoveLate,
    /// The controller tries a checkpoint that cannot be read again and again.
    ReadForever,
    /// The controller removes checkpoints that could not be read, though they may be tried again.
    RemoveUnreadable,
    /// The controller does not hear that nobody would get further in a job, and has the next plan go past it.
    PassDeadEnd,
    /// The worker runs on without a lease.
    IgnoreLease,
    /// The worker obeys what was said before what it has heard.
    ObeyOld,
    /// The worker rolls forward whenever it is told where to go, also when it is there.
    SettleAgain,
    /// The worker lets go of its old state when the new plan comes, not when it starts.
    DropEarly,
    /// The worker keeps its old state beside what comes from storage.
    KeepOld,
    /// The engine says that its part of a checkpoint is saved when it begins to write.
    SavedTooSoon,
    /// The engine updates as soon as it has the gradient, without waiting for everyone to have it.
    UpdateEarly,
    /// The engine counts its own steps to know which samples come next.
    OwnPosition,
}

impl Bug {
    pub const ALL: [Bug; 25] = [
        Bug::SayBeforeSync,
        Bug::KeepTornTail,
        Bug::CountAgain,
        Bug::DeadTooSoon,
        Bug::PartMissing,
        Bug::DecideEarly,
        Bug::GoBack,
        Bug::StartUnready,
        Bug::StartUnfenced,
        Bug::ForgetPlanner,
        Bug::ForgetHolders,
        Bug::GiveUp,
        Bug::RemoveEarly,
        Bug::RemoveLate,
        Bug::ReadForever,
        Bug::RemoveUnreadable,
        Bug::PassDeadEnd,
        Bug::IgnoreLease,
        Bug::ObeyOld,
        Bug::SettleAgain,
        Bug::DropEarly,
        Bug::KeepOld,
        Bug::SavedTooSoon,
        Bug::UpdateEarly,
        Bug::OwnPosition,
    ];
}
