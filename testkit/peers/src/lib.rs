//! Links and peers of migrations, for the test suites of vmferry.
//!
//! Tests of crates that do not use the wire or the engine depend on `vmferry-testkit` only, and do
//! not wait for this crate to be built.
//!
//! | module | content |
//! |---|---|
//! | [`link`] | [`Proxy`](link::Proxy): a link that fails at a chosen byte, or at the commit |
//! | [`peer`] | [`Target`](peer::Target) and [`Source`](peer::Source): peers that follow a script |
//! | [`pair`] | [`moved`](pair::moved): a source and a target that run together |
//! | [`memory`] | [`digests`](memory::digests): the content of each page |
//! | [`gated`] | [`Gated`](gated::Gated): a source whose senders wait for the guest's free pages |
//!
//! Example: a source whose target closes the connection instead of accepting the guest.
//!
//! ```no_run
//! use vmferry_engine::{MigrationHandle, MigrationState, Settings, SourceVm, migrate};
//! use vmferry_testkit_peers::peer::{Listener, Target};
//!
//! fn guest_stays(vm: &mut dyn SourceVm) {
//!     let listener = Listener::unix();
//!     let uri = listener.uri().clone();
//!     let report = std::thread::scope(|scope| {
//!         scope.spawn(|| {
//!             let mut target = Target::accept_control(&listener);
//!             assert!(target.receive().is_some(), "the setup");
//!         });
//!         migrate(vm, &uri, None, &Settings::default(), &MigrationHandle::new()).unwrap()
//!     });
//!     assert_eq!(report.state, MigrationState::Failed);
//! }
//! ```

pub mod gated;
pub mod link;
pub mod memory;
pub mod pair;
pub mod peer;

mod socket;

pub use socket::{unix_uri, until_hung_up};
pub use socket2::Socket;
