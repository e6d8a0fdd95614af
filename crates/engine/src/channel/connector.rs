//! Connectors, which provide the connections of a source.

use crate::handle::MigrationHandle;
use crate::source::Settings;
use std::fmt;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use vmferry_wire::Role;

/// Connects the channels of a migration to its target.
///
/// [`Uri`](crate::Uri) connects to an address, and [`Sockets`](crate::Sockets) provides sockets
/// that are already connected. Implement this trait if channels are connected in another way, for
/// example by a management daemon, over vsock, or through a tunnel.
///
/// # Requirements of a connection
///
/// A connection must be a connected TCP, Unix or vsock stream socket, because the engine sends
/// guest memory without copying it, and relies on the socket timeouts of the kernel.
///
/// To use a stream that is not a socket, such as your own TLS, create a pair of Unix sockets.
/// Return one end, and copy between the other end and the stream on two threads. When a thread
/// reaches the end of its direction, it must pass the end on with `shutdown`, because source and
/// target end their directions separately.
///
/// # Calls
///
/// The engine asks for the control channel first, and then for the other channels one by one. If
/// the link is lost in postcopy, the engine asks for all channels again at each attempt to
/// reconnect. All calls come from the thread that called [`migrate`](crate::migrate) or
/// [`probe`](crate::plan::probe).
///
/// # Time limit of a call
///
/// The engine does not limit the time of a call, so the implementation must. Because the migration
/// makes no progress during a call, a call should take no longer than [`Attempt::timeout`]. An
/// implementation that connects a socket itself should pass the socket to [`Attempt::watch`] first,
/// so that a cancel ends the call.
pub trait Connect: fmt::Debug + Send + Sync {
    /// Returns the name of the target for messages, such as its address.
    fn name(&self) -> String;

    /// Connects one channel.
    ///
    /// # Errors
    /// The migration reports the text of the error. An error before the handover ends the
    /// migration. In postcopy, the engine tries again for
    /// [`reconnect_for`](crate::Settings::reconnect_for). If the error wraps a
    /// [`MigrateError`](crate::MigrateError), the engine returns that error unchanged.
    fn connect(&self, attempt: &Attempt<'_>) -> io::Result<Connected>;

    /// Checks before a migration begins whether its channels can be connected. The default accepts
    /// every migration.
    ///
    /// # Errors
    /// If the implementation knows that it cannot connect these channels. The migration then does
    /// not begin.
    fn check(&self, channels: &ChannelCounts) -> io::Result<()> {
        let _ = channels;
        Ok(())
    }

    /// Returns the name or address that the target's certificate must have. If this is `None`,
    /// which is the default, encrypted channels need the name that
    /// [`Tls::expecting`](crate::Tls::expecting) sets.
    fn host(&self) -> Option<&str> {
        None
    }
}

/// Connection that an implementation of [`Connect`] has made.
#[derive(Debug)]
#[non_exhaustive]
pub enum Connected {
    /// Connection for the requested channel.
    Channel(OwnedFd),
    /// Connection for all channels. The engine asks for another connection only after this one has
    /// ended. The target must be able to take all channels from one connection, which older
    /// versions cannot.
    All(OwnedFd),
}

impl From<TcpStream> for Connected {
    fn from(socket: TcpStream) -> Self {
        Self::Channel(socket.into())
    }
}

impl From<UnixStream> for Connected {
    fn from(socket: UnixStream) -> Self {
        Self::Channel(socket.into())
    }
}

/// Attempt to connect one channel.
#[derive(Debug)]
pub struct Attempt<'a> {
    role: Role,
    index: u16,
    timeout: Duration,
    permits_remote: bool,
    /// Migration handle. `None` if a cancel has no effect on this attempt.
    handle: Option<&'a MigrationHandle>,
}

impl<'a> Attempt<'a> {
    pub(super) fn new(
        (role, index): (Role, u16),
        settings: &Settings,
        handle: Option<&'a MigrationHandle>,
    ) -> Self {
        let permits_remote = settings.permits_remote();
        Self { role, index, timeout: settings.peer_timeout, permits_remote, handle }
    }

    /// Returns the purpose of the channel.
    #[must_use]
    pub fn role(&self) -> Role {
        self.role
    }

    /// Returns the number of the channel among the channels of its role, from 0.
    #[must_use]
    pub fn index(&self) -> u16 {
        self.index
    }

    /// Returns the time that the attempt may take, which is the migration's
    /// [`peer_timeout`](crate::Settings::peer_timeout).
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns true if the connection may leave this host, because it will be encrypted or because
    /// the settings allow unencrypted connections. If this is false, the engine refuses a TCP
    /// connection to another host.
    #[must_use]
    pub fn permits_remote(&self) -> bool {
        self.permits_remote
    }

    /// Returns true if the migration was cancelled.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.handle.is_some_and(MigrationHandle::cancelled)
    }

    /// Registers `socket`, so that a cancel shuts it down. A call that waits for the socket then
    /// returns.
    ///
    /// The socket replaces the one that was registered before, and need not be connected yet.
    ///
    /// # Errors
    /// `Interrupted` if the migration is already cancelled. Another error if the process cannot
    /// open another descriptor.
    pub fn watch(&self, socket: &impl AsFd) -> io::Result<()> {
        self.handle.map_or(Ok(()), |handle| handle.opening(socket))
    }
}

/// Number of channels that a migration opens, by role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChannelCounts {
    /// Number of control channels, which carry messages.
    pub control: u16,
    /// Number of bulk channels, which carry pages that no vCPU waits for.
    pub bulk: u16,
    /// Number of urgent channels, which carry pages that vCPUs wait for.
    pub urgent: u16,
    /// Number of channels for probes, which measure the round trip of the link.
    pub probe: u16,
}

impl ChannelCounts {
    pub(super) fn of(settings: &Settings) -> Self {
        let (bulk, urgent, probe) = (settings.channels, settings.urgent_count(), settings.probe().into());
        Self { control: 1, bulk, urgent, probe }
    }

    /// Returns the total number of channels.
    #[must_use]
    pub fn total(&self) -> usize {
        [self.control, self.bulk, self.urgent, self.probe].into_iter().map(usize::from).sum()
    }
}

impl fmt::Display for ChannelCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { control, bulk, urgent, probe } = self;
        let total = self.total();
        write!(f, "{total} channels ({control} control, {bulk} bulk, {urgent} urgent, {probe} probe)")
    }
}
