//! State machines of the live-migration protocol, without I/O.
//!
//! Source and target each run a session: [`source::Session`] moves a guest away, and
//! [`target::Session`] receives a guest. A session takes events ("the target accepted", "the
//! harvest found 12 pages", "the link is lost") and returns actions ("send this message", "pause
//! the guest"). A session opens no socket, maps no memory, starts no thread and reads no clock.
//! Instead, the host of the session performs the actions in their order, and reports the results as
//! events.
//!
//! [`run::advance`] is the loop between a session and its [`run::Host`]. The crate `vmferry-engine`
//! implements the hosts that move real guests. A simulation and a model checker implement other
//! hosts, and run the same sessions and the same loop.
//!
//! # Example
//!
//! A target that cannot take the guest refuses it, and the guest continues on the source:
//!
//! ```
//! use std::time::Duration;
//! use vmferry_core::MachineConfig;
//! use vmferry_protocol::source::{Action, Event, Outcome, Session, Settings};
//! use vmferry_wire::{Refusal, RefusalCode, ToSource, ToTarget};
//!
//! let machine = MachineConfig {
//!     kind: "example".into(),
//!     vcpus: 1,
//!     regions: vec![],
//!     extra: vec![],
//!     features: vec![],
//! };
//! let (mut session, first) = Session::begin(Settings::default(), machine, 0, Duration::ZERO);
//! assert!(matches!(first[..], [Action::Send(ToTarget::Setup { .. })]));
//!
//! let why = Refusal::new(RefusalCode::Machine, "the target has no such device");
//! let refused = Event::Message(ToSource::Failed(why.clone()));
//! // The source resumes the guest whether it was paused or not.
//! assert_eq!(session.handle(Duration::from_millis(3), refused), [Action::Resume]);
//! let ended = session.handle(Duration::from_millis(4), Event::Resumed);
//! assert_eq!(ended, [Action::Finish(Outcome::Failed(why))]);
//! ```

// Input from a peer or from the host must not panic a session. Tests may panic.
#![cfg_attr(
    not(test),
    warn(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable, clippy::todo)
)]

pub mod arbiter;
pub mod run;
pub mod source;
pub mod target;
