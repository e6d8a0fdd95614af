//! What can fail before and around a migration, as a person reads it.

use crate::fence::ArbiterError;
use crate::snapshot::RestoreError;
use std::io;
use vmferry_wire::{RefusalCode, VERSION_MAX, VERSION_MIN, WireError};

/// A migration that could not begin, or an address that cannot be used. The guest is where it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MigrateError {
    /// A channel could not be connected.
    #[error("cannot connect to {uri}: {source}; does the target wait for a guest there?")]
    Connect {
        /// Where.
        uri: String,
        /// Why.
        source: io::Error,
    },
    /// Somebody wanted the guest to stay before all connections were there.
    #[error("cancelled on request, while {uri} was being connected to")]
    Cancelled {
        /// Where.
        uri: String,
    },
    /// The connection broke while greeting.
    #[error(
        "{uri} did not answer the greeting: {source}; is it a vmferry target, and does it wait for a guest?"
    )]
    Hello {
        /// Where.
        uri: String,
        /// Why.
        source: io::Error,
    },
    /// The peer is something else.
    #[error("{uri}: {source}")]
    Peer {
        /// Where.
        uri: String,
        /// What it sent.
        source: WireError,
    },
    /// The peer says no.
    #[error("{uri} refused: {code}{}", versions(*code, *theirs))]
    RefusedHello {
        /// Where.
        uri: String,
        /// Why.
        code: RefusalCode,
        /// The newest version it speaks.
        theirs: u16,
    },
    /// No encrypted connection came about.
    #[error(
        "no encrypted connection to {uri}: {source}; check that each side has a certificate of an authority that the other side trusts, for the name that the other side expects"
    )]
    Tls {
        /// Where.
        uri: String,
        /// Why.
        source: io::Error,
    },
    /// The address cannot be listened on.
    #[error("cannot listen at {uri}: {source}")]
    Listen {
        /// Where.
        uri: String,
        /// Why.
        source: io::Error,
    },
    /// Unencrypted traffic would leave the host.
    #[error(
        "{uri} is not on this host, and plain connections can be read and changed on the way: encrypt them on both sides, or permit plain connections"
    )]
    NotLoopback {
        /// Where.
        uri: String,
    },
    /// A socket of the caller's, or of its connector, cannot be used, or not for this.
    #[error("{uri} cannot be used: {source}")]
    Passed {
        /// Which.
        uri: String,
        /// Why.
        source: io::Error,
    },
    /// The address is of a kind that has no sockets to connect or accept, or names sockets that
    /// were not handed over.
    #[error("{uri} cannot be used here: live migration needs tcp:, unix:, or sockets that were passed (fd:)")]
    NoSockets {
        /// Where.
        uri: String,
    },
    /// A file cannot be made or opened.
    #[error("cannot use {uri}: {source}")]
    File {
        /// Which.
        uri: String,
        /// Why.
        source: io::Error,
    },
    /// The guest cannot be taken out of a file.
    #[error("{uri}: {source}")]
    Snapshot {
        /// Which.
        uri: String,
        /// Why.
        source: RestoreError,
    },
    /// Pages cannot come while the guest runs.
    #[error("pages cannot come while the guest runs: {why}")]
    NotLazy {
        /// What is missing, and how to permit it.
        why: String,
    },
    /// Pages of the guest still arrive from the host, or the file, that it came from.
    #[error("pages of this guest still arrive from where it was: wait until all are here")]
    StillArriving,
    /// The settings ask for something impossible.
    #[error("{0}")]
    Settings(String),
    /// The VMM's memory layout cannot be migrated, or it gave an error before anything was sent.
    #[error("{0}")]
    Vm(String),
    /// Nobody could decide if it came to that, so nothing is begun.
    #[error(
        "the fence cannot be used: {0}. Nothing is moved without it: check that it is up, and that both sides use the same fence"
    )]
    Fence(ArbiterError),
    /// The host refused a thread or random bits.
    #[error("the host refused {what}: {source}")]
    Host {
        /// What was asked.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// Returns the versions of both sides, if they are why the peer refused.
fn versions(code: RefusalCode, theirs: u16) -> String {
    match code {
        RefusalCode::Version => {
            format!(" (it speaks protocol version {theirs}, this side {VERSION_MIN} to {VERSION_MAX})")
        }
        _ => String::new(),
    }
}
