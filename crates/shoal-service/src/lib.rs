//! Controller and workers as processes: what puts `shoal-control`'s state machines on sockets. The only async code in the
//! project is here, because a controller talks with a thousand workers at once; nothing that trains waits for it.
//!
//! The controller's side, from the outside in:
//! - [`server`]: the process: folder, authority, TLS, connections, and the threads that serve them.
//! - [`routes`]: every route, in one table; [`openapi`], its description.
//! - [`api`]: who is let in, and the answers; [`guard`], what headers must say.
//! - [`channel`]: a worker's WebSocket; [`wire`], what travels on it.
//! - [`driver`]: the thread that owns the controller; [`planning`], the threads that plan for it.
//! - [`history`], [`books`], [`view`], [`receipt`], [`metrics`]: what people ask for.
//!
//! The worker's side: [`membership`], how it joins; [`worker_driver`], the thread that owns its state machine; [`uplink`], its
//! connection; [`notice`], how clouds say that a machine will be taken away; [`drill`], faults that are ordered.
//!
//! The command's side: [`access`] and [`client`].
//!
//! # Who may do what
//!
//! Everything is TLS, under a fleet's own authority. Commands show the API's token on every route; it lies in the
//! controller's folder, which only its owner may read. A machine joins by a token that serves once and for a while, and
//! carries the hash of the authority's certificate; its key stays where it was made. From then on its certificate is its
//! name, and it speaks for nobody else.

pub mod access;
pub mod api;
pub mod books;
pub mod channel;
pub mod client;
pub mod clock;
pub mod drill;
pub mod driver;
pub mod error;
pub mod folder;
pub mod guard;
pub mod history;
pub mod http;
pub mod membership;
pub mod metrics;
pub mod notice;
pub mod openapi;
pub mod planning;
pub mod receipt;
pub mod routes;
pub mod secret;
pub mod server;
mod socket;
pub mod tls;
pub mod token;
pub mod uplink;
pub mod view;
pub mod wire;
pub mod worker_driver;

pub use error::{Error, Refusal, Result};

/// Where a process says what its owner may want to see, since nothing below the command line prints.
pub type Complaints = std::sync::Arc<dyn Fn(&str) + Send + Sync>;
