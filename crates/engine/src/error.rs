//! Errors before and around a migration, with texts for the operator.

use crate::arbiter::ArbiterError;
use crate::snapshot::RestoreError;
use std::io;
use vmferry_core::VmError;
use vmferry_wire::{RefusalCode, VERSION_MAX, VERSION_MIN, WireError, WorkingSetError};

/// Reason why a migration, a save or a restore could not begin, or why an address cannot be used.
/// The guest stays where it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MigrateError {
    /// A channel could not be connected.
    #[error("cannot connect to {uri}: {source}; check that the target waits for a guest at this address")]
    Connect {
        /// Address of the peer.
        uri: String,
        /// Error of the connection.
        source: io::Error,
    },
    /// The migration was cancelled before all connections were open.
    #[error("cancelled on request while connecting to {uri}")]
    Cancelled {
        /// Address of the peer.
        uri: String,
    },
    /// The connection failed during the exchange of hellos.
    #[error(
        "{uri} did not answer the greeting: {source}; check that a vmferry target waits for a guest there"
    )]
    Hello {
        /// Address of the peer.
        uri: String,
        /// Error of the connection.
        source: io::Error,
    },
    /// The peer does not use the migration protocol.
    #[error("{uri}: {source}")]
    Peer {
        /// Address of the peer.
        uri: String,
        /// Error in the bytes that the peer sent.
        source: WireError,
    },
    /// The peer refused the hello.
    #[error("{uri} refused: {code}{}", versions(*code, *peer_version))]
    RefusedHello {
        /// Address of the peer.
        uri: String,
        /// Reason for the refusal.
        code: RefusalCode,
        /// Newest protocol version that the peer supports.
        peer_version: u16,
    },
    /// No encrypted connection could be established.
    #[error(
        "no encrypted connection to {uri}: {source}; check that source and target each have a certificate of an authority that the peer trusts, for the name that the peer expects"
    )]
    Tls {
        /// Address of the peer.
        uri: String,
        /// Error of the TLS handshake.
        source: io::Error,
    },
    /// The host cannot listen at the address.
    #[error("cannot listen at {uri}: {source}")]
    Listen {
        /// Address of the listener.
        uri: String,
        /// Error of the system call.
        source: io::Error,
    },
    /// Unencrypted traffic would leave the host.
    #[error(
        "{uri} is not on this host, and plain connections can be read and changed on the way: encrypt them on source and target, or permit plain connections"
    )]
    NotLoopback {
        /// Address that is not on this host.
        uri: String,
    },
    /// A socket that the caller or the caller's connector passed cannot be used, or cannot be used
    /// for this purpose.
    #[error("{uri} cannot be used: {source}")]
    Passed {
        /// Name of the socket.
        uri: String,
        /// Reason why the socket cannot be used.
        source: io::Error,
    },
    /// The address is of a kind that cannot be connected to or listened on, or it names sockets
    /// that were not passed.
    #[error("{uri} cannot be used: live migration needs tcp:, unix:, or sockets that were passed (fd:)")]
    NoSockets {
        /// Address that cannot be used.
        uri: String,
    },
    /// A file cannot be created or opened.
    #[error("cannot use {uri}: {source}")]
    File {
        /// Name of the file.
        uri: String,
        /// Error of the system call.
        source: io::Error,
    },
    /// The guest cannot be restored from a file.
    #[error("{uri}: {source}")]
    Snapshot {
        /// Name of the file.
        uri: String,
        /// Reason why the guest cannot be restored.
        source: RestoreError,
    },
    /// A working set cannot be used. The guest has not run.
    #[error("{uri}: {source}")]
    WorkingSet {
        /// Name of the file: of the working set that cannot be read, or of the snapshot to which
        /// the working set does not belong.
        uri: String,
        /// Reason why the working set cannot be used.
        source: WorkingSetError,
    },
    /// The VM or the host has no demand paging.
    #[error("demand paging is not possible: {why}")]
    NoDemandPaging {
        /// Reason, and how to permit demand paging.
        why: String,
    },
    /// Pages of the guest are still arriving from the source or the file that the guest came from.
    /// The guest can be moved or saved once all of them have arrived.
    #[error("pages of this guest still arrive from its source or file: wait until all have arrived")]
    StillArriving,
    /// The target does not take over the memory of the guest.
    #[error("the guest cannot be handed to {uri} without copying its memory: {why}")]
    NotLocal {
        /// Address of the target.
        uri: String,
        /// The reason.
        why: String,
    },
    /// The settings are contradictory or out of range.
    #[error("{0}")]
    Settings(String),
    /// The VMM's memory layout cannot be migrated, or the VMM returned an error before anything was
    /// sent.
    #[error("{0}")]
    Vm(VmError),
    /// The arbiter cannot be used. The migration does not begin, because the arbiter could not
    /// decide later who owns the guest.
    #[error(
        "the arbiter cannot be used: {0}; check that it runs, and that source and target use the same one"
    )]
    Arbiter(ArbiterError),
    /// The host refused a resource, such as a thread or an event descriptor.
    #[error("the host refused {what}: {source}")]
    Host {
        /// Requested resource.
        what: &'static str,
        /// Error of the system call.
        source: io::Error,
    },
}

/// Returns a text with the versions of peer and program if `code` refuses the version. Otherwise,
/// the text is empty.
fn versions(code: RefusalCode, peer_version: u16) -> String {
    match code {
        RefusalCode::Version => {
            format!(
                " (the peer supports protocol versions up to {peer_version}, this program {VERSION_MIN} to {VERSION_MAX})"
            )
        }
        _ => String::new(),
    }
}
