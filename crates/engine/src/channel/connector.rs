//! Connections of a migration's source: what the engine asks a connector for.

use crate::monitor::Monitor;
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
/// [`Uri`](crate::Uri) connects to an address. [`Sockets`](crate::Sockets) hands over sockets that
/// are connected already. Implement this trait where a channel is connected in another way, such as
/// by a management daemon, over vsock, or through a tunnel.
///
/// # What a connection is
///
/// A connection is a connected stream socket: TCP, Unix or vsock. The engine sends guest memory from
/// where it is, and waits for a socket with timeouts that the kernel keeps. A stream that is not a
/// socket, such as TLS of the caller's own, is joined with a pair of Unix sockets: return one end, and
/// copy between the other end and the stream on two threads. Each of these threads has to pass on the
/// end of its direction (`shutdown`), because each side of a migration ends its direction by itself.
///
/// # When it is called
///
/// The engine asks for the control channel first, and then for the other channels one by one. A
/// postcopy whose link is lost asks for all of them again, as often as it tries to take the link up.
/// All calls come from the thread that migrates, or that [probes](crate::plan::probe).
///
/// # Who bounds a call
///
/// The implementation does. Nothing else goes on in the migration during the call, so it should take
/// no longer than [`Attempt::timeout`]. A call that connects a socket itself should give the socket to
/// [`Attempt::watch`] first: a cancel then ends the call.
pub trait Connect: fmt::Debug + Send + Sync {
    /// Returns the name of the target for messages, such as its address.
    fn name(&self) -> String;

    /// Connects one channel.
    ///
    /// # Errors
    /// The migration reports the error with its text. Before the migration has begun, it ends with the
    /// error. In postcopy, the engine tries again for
    /// [`reconnect_for`](crate::Settings::reconnect_for). A [`MigrateError`](crate::MigrateError)
    /// inside the error is reported as it is.
    fn connect(&self, attempt: &Attempt<'_>) -> io::Result<Connected>;

    /// Refuses a migration before it begins, if its channels cannot be connected.
    ///
    /// # Errors
    /// If it is known already that the migration cannot have these channels.
    fn check(&self, channels: &ChannelCounts) -> io::Result<()> {
        let _ = channels;
        Ok(())
    }

    /// Returns the name or address that the target's certificate has to be for. Without one, encrypted
    /// channels need the name that [`Tls::expecting`](crate::Tls::expecting) gives.
    fn host(&self) -> Option<&str> {
        None
    }
}

/// A connection that a [`Connect`] has made.
#[derive(Debug)]
#[non_exhaustive]
pub enum Connected {
    /// A connection for the channel that was asked for.
    Channel(OwnedFd),
    /// A connection for all channels. The engine asks for no other one until it ends. The target must
    /// know how to take all channels from one connection.
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

/// One attempt to connect a channel.
#[derive(Debug)]
pub struct Attempt<'a> {
    role: Role,
    index: u16,
    timeout: Duration,
    permits_remote: bool,
    /// `None` where a cancel has no effect any more.
    monitor: Option<&'a Monitor>,
}

impl<'a> Attempt<'a> {
    pub(super) fn new((role, index): (Role, u16), settings: &Settings, monitor: Option<&'a Monitor>) -> Self {
        let permits_remote = settings.permits_remote();
        Self { role, index, timeout: settings.peer_timeout, permits_remote, monitor }
    }

    /// Purpose of the channel.
    #[must_use]
    pub fn role(&self) -> Role {
        self.role
    }

    /// Number of the channel among those of its role, from 0.
    #[must_use]
    pub fn index(&self) -> u16 {
        self.index
    }

    /// Time that the attempt may take: the migration's
    /// [`peer_timeout`](crate::Settings::peer_timeout).
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns true if the connection may leave this host, because it will be encrypted or because the
    /// caller permits plain ones. If it is false, the engine refuses a TCP connection to another host.
    #[must_use]
    pub fn permits_remote(&self) -> bool {
        self.permits_remote
    }

    /// Returns true if the migration was cancelled.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.monitor.is_some_and(Monitor::cancelled)
    }

    /// Has a cancel shut `socket` down from now on, so that a call that waits for it returns. It replaces
    /// the socket that was watched before. The socket may be one that is not connected yet.
    ///
    /// # Errors
    /// `Interrupted` if the migration is cancelled already, or another error if the host has no
    /// descriptor.
    pub fn watch(&self, socket: &impl AsFd) -> io::Result<()> {
        self.monitor.map_or(Ok(()), |monitor| monitor.opening(socket))
    }
}

/// Number of channels that a migration opens, by role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChannelCounts {
    /// Channels for the messages of the two sessions.
    pub control: u16,
    /// Channels for pages.
    pub bulk: u16,
    /// Channels for the pages that vCPUs wait for.
    pub urgent: u16,
    /// Channels for probes of the link.
    pub probe: u16,
}

impl ChannelCounts {
    pub(super) fn of(settings: &Settings) -> Self {
        let (bulk, urgent, probe) = (settings.channels, settings.urgent_count(), settings.probe().into());
        Self { control: 1, bulk, urgent, probe }
    }

    /// Returns the number of all channels.
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
