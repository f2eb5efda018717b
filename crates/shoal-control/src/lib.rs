//! Who is there, which plan each job runs, and how one plan gives way to the next. Everything here is pure: time, messages
//! and disks come in from outside, so the same code runs in `shoal up`, in a worker and in the drill.
//!
//! - [`message`]: what controller and workers say to each other, and the words for it.
//! - [`controller`]: membership, jobs, plans and the protocol for changing them.
//! - [`worker`]: the other side, one worker between controller and engine.
//! - [`log`]: the controller's records on a disk, cut where a crash tore them; [`disk`], what a log needs of a disk.
//! - [`keeper`]: controller and log together; nothing is said before what it rests on is on the disk.
//! - [`settings`]: deadlines and leases, and what must hold between them.
//! - [`bug`]: mistakes that the drill plants to see whether it finds them.
//!
//! # How no two plans of a job are ever active
//!
//! Every plan has an **epoch**, a number that never comes again. A worker runs an epoch only when told to, and once it has
//! stopped in an epoch it never runs that epoch again. The controller tells workers to run epoch e + 1 only when each
//! worker of epoch e has either said that it has stopped, or is dead. Dead means silent for `deadline_ms`. A worker runs
//! only within its **lease**: it counts from the sending of the last report that the controller has acknowledged, so it
//! began before the controller heard of it, and it ends early enough before the deadline for the engine to stop and for
//! the two clocks to differ. A controller that starts again gives everyone a whole deadline, since it does not know whom it
//! last heard of when.
//!
//! # What a crash of the controller between deciding and telling does
//!
//! Nothing. Each decision is a record, and no message leaves before the records that it rests on are on the disk. Messages
//! to workers are no commands that can get lost but a function of the state ([`controller::orders`]): what holds for you
//! now, with the number of the records it follows from. They are said again until they are heard, by whichever
//! controller runs, and a worker ignores those that follow from fewer records than what it has heard.
//! What workers say is their whole state too; so a decision that was not yet on the disk is made again, from what they
//! still report.

pub mod bug;
pub mod controller;
pub mod disk;
pub mod keeper;
pub mod log;
pub mod message;
pub mod settings;
pub mod worker;

pub use bug::Bug;
pub use controller::Controller;
pub use keeper::Keeper;
pub use settings::Settings;
pub use worker::Worker;
