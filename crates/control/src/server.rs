//! Server of the control socket, with one thread that never waits for a client, and one thread for
//! the commands of each client.
//!
//! The server's thread reads from the sockets, writes to them, and keeps the sessions. Other
//! threads execute the commands, put the results into the hub and wake the server's thread.
//! Therefore a client that sends half a message, sends without end, or never reads cannot delay
//! another client.

mod conn;
mod socket;
mod worker;

use crate::events::{EventQueue, Events};
use crate::machine::Machine;
use crate::message::{self, Event, QmpError, Version};
use crate::session::{End, Limits};
use conn::Conn;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use worker::Workers;

/// Maximum number of simultaneous clients. Further clients are refused.
const MOST_CLIENTS: usize = 32;
/// Maximum number of threads for the commands of clients. It exceeds the number of clients, because
/// the thread of a disconnected client runs until its command ends.
const MOST_WORKERS: usize = 2 * MOST_CLIENTS;
/// Interval at which the server checks time limits while clients are connected.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };
/// Maximum time for which a dropped server continues, to finish commands and to send their answers.
/// The server ends earlier if nothing is left to do.
const LAST: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 1 });
/// Time for which a client that the server disconnects can read the reason.
const FAREWELL: Duration = Duration::from_secs(1);

/// Error that starting a server returns.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// Another process listens at the path, or the path is not a socket.
    #[error("another process listens at {0}, or it is not a socket; give another path, or end that process")]
    Taken(PathBuf),
    /// The socket cannot be created.
    #[error("cannot listen at {0}")]
    Listen(PathBuf, #[source] std::io::Error),
    /// A thread cannot be started.
    #[error("cannot start a thread for the control socket")]
    Thread(#[source] std::io::Error),
    /// Another server already uses the [`Events`].
    #[error("another control socket sends these events")]
    Twice,
}

/// Running server of a control socket. Dropping it sends the pending answers, which may take up to
/// a second, closes the connections and removes the socket.
#[derive(Debug)]
pub struct Server {
    path: PathBuf,
    /// Device and inode of the socket. Another process may have put its own socket at the path
    /// since.
    file: Option<(u64, u64)>,
    events: Events,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts a server that listens at `path`, for clients of this user and of root. `machine`
    /// executes the clients' commands, and the clients receive the events that are sent to
    /// `events`.
    ///
    /// If a socket exists at `path` but no process listens there any more, it is replaced.
    ///
    /// # Errors
    /// Returns an error if the path is in use or cannot be used, if a thread cannot be started, or
    /// if another server uses `events`.
    pub fn start(
        path: &Path,
        machine: Arc<dyn Machine>,
        events: &Events,
        limits: Limits,
    ) -> Result<Self, ServerError> {
        {
            let mut inbox = events.0.lock();
            if inbox.open {
                return Err(ServerError::Twice);
            }
            // Nothing of an earlier server is for the clients of this one.
            (inbox.open, inbox.stop) = (true, false);
            inbox.events.clear();
            inbox.done.clear();
        }
        let close = |error| {
            events.0.lock().open = false;
            error
        };
        let listener = socket::listen(path).map_err(close)?;
        let hub = Arc::clone(&events.0);
        let workers = Workers::start(Arc::clone(&machine), Arc::clone(&hub));
        let workers = workers.map_err(|error| close(ServerError::Thread(error)))?;
        let io = Io {
            version: machine.version(),
            listener,
            hub,
            workers,
            limits,
            clients: BTreeMap::new(),
            next: 0,
            rest_until: None,
        };
        let thread = vmferry_thread::spawn(vmferry_thread::Role::Api, "api", move || io.run());
        let thread = thread.map_err(|error| close(ServerError::Thread(error)))?;
        Ok(Self { path: path.into(), file: file_at(path), events: events.clone(), thread: Some(thread) })
    }

    /// Moves the socket to `path`, in the same folder. What is at `path` is replaced in the same
    /// step: a client that connects to `path` reaches the old owner or this server, and never
    /// nothing. Connected clients stay connected.
    ///
    /// # Errors
    /// Returns an error if the socket cannot be renamed. The server then stays at its path.
    pub fn move_to(&mut self, path: &Path) -> std::io::Result<()> {
        std::fs::rename(&self.path, path)?;
        self.path = path.into();
        Ok(())
    }
}

/// Returns device and inode of the file at `path`, or `None` if there is no file.
fn file_at(path: &Path) -> Option<(u64, u64)> {
    let meta = std::fs::symlink_metadata(path).ok()?;
    Some((meta.dev(), meta.ino()))
}

impl Drop for Server {
    fn drop(&mut self) {
        let mut inbox = self.events.0.lock();
        inbox.stop = true;
        inbox.open = false;
        drop(inbox);
        self.events.0.wake();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
        // A server of another process that has moved to this path must stay reachable.
        if self.file.is_some() && file_at(&self.path) == self.file {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// State of the server's thread.
struct Io {
    version: Version,
    listener: UnixListener,
    hub: Arc<EventQueue>,
    workers: Workers,
    limits: Limits,
    clients: BTreeMap<u64, Conn>,
    next: u64,
    /// Time until which no client is accepted, because the host refused a connection, for example
    /// for lack of descriptors.
    rest_until: Option<Instant>,
}

impl Io {
    fn run(mut self) {
        let mut last = None;
        loop {
            let (ready, accept) = self.wait(last.is_some());
            let now = Instant::now();
            self.take(now);
            if accept {
                self.accept(now);
            }
            for (id, flags) in ready {
                if let Some(client) = self.clients.get_mut(&id) {
                    client.read(flags, now);
                }
            }
            self.attend(now);
            let (stop, left) = self.left();
            if stop {
                let until = *last.get_or_insert(now + LAST);
                if now >= until || !left {
                    return;
                }
            }
        }
    }

    /// Returns two flags: true if the server must end, and true if work is left that it must do
    /// before.
    fn left(&self) -> (bool, bool) {
        let inbox = self.hub.lock();
        let unread = self.clients.values().any(Conn::has_output);
        // Events that arrived after the inbox was emptied must be sent too, because the last event
        // tells the clients that this process ends.
        (inbox.stop, unread || inbox.busy > 0 || !inbox.done.is_empty() || !inbox.events.is_empty())
    }

    /// Waits until a socket is ready. Returns the clients that are ready, and true if a connection
    /// can be accepted.
    fn wait(&self, ending: bool) -> (Vec<(u64, PollFlags)>, bool) {
        let accepts = !ending && self.rest_until.is_none();
        let mut fds = vec![PollFd::from_borrowed_fd(self.hub.waker(), PollFlags::IN)];
        fds.push(PollFd::new(&self.listener, if accepts { PollFlags::IN } else { PollFlags::empty() }));
        for client in self.clients.values() {
            fds.push(PollFd::from_borrowed_fd(client.stream().as_fd(), client.interest()));
        }
        let quick = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        let idle = self.clients.is_empty() && self.rest_until.is_none();
        let timeout = if ending { Some(&quick) } else { (!idle).then_some(&TICK) };
        // After an error (a signal, no memory), no socket counts as ready, and the next round polls
        // again.
        let _ = poll(&mut fds, timeout);
        let ready = self.clients.keys().zip(&fds[2..]);
        let ready = ready.map(|(id, fd)| (*id, fd.revents())).filter(|(_, flags)| !flags.is_empty());
        (ready.collect(), accepts && fds[1].revents().contains(PollFlags::IN))
    }

    /// Takes the events for all clients and the results for single clients from the hub.
    fn take(&mut self, now: Instant) {
        let (events, done) = self.hub.take();
        for event in &events {
            self.tell(event);
        }
        for done in done {
            // The client may have disconnected.
            if let Some(client) = self.clients.get_mut(&done.client) {
                client.answer(done);
            }
        }
        if self.rest_until.is_some_and(|until| now >= until) {
            self.rest_until = None;
        }
    }

    fn tell(&mut self, event: &Event) {
        for client in self.clients.values_mut() {
            client.session.event(event);
        }
    }

    fn accept(&mut self, now: Instant) {
        // The number is bounded, because a flood of connections would otherwise delay the connected
        // clients.
        for _ in 0..MOST_CLIENTS {
            match self.listener.accept() {
                Ok((stream, _)) => self.add_client(stream, now),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    tracing::warn!(%error, "the control socket accepts no clients for a second");
                    self.rest_until = Some(now + Duration::from_secs(1));
                    return;
                }
            }
        }
    }

    fn add_client(&mut self, stream: UnixStream, now: Instant) {
        if let Err(why) = socket::check_peer(&stream) {
            tracing::warn!("control socket: {why}");
            return turn_away(&stream, &why);
        }
        if self.clients.len() >= MOST_CLIENTS || self.workers.count() >= MOST_WORKERS {
            return turn_away(&stream, "too many clients; try again when one has disconnected");
        }
        let id = self.next;
        self.next += 1;
        if let Ok(client) = Conn::new(id, stream, &self.version, self.limits.clone(), now) {
            self.clients.insert(id, client);
        }
    }

    /// Advances every session: passes requests to the workers, and bytes to the sockets.
    fn attend(&mut self, now: Instant) {
        let Self { clients, workers, .. } = self;
        clients.retain(|_, client| {
            client.advance(workers, now);
            if let Some(why) = client.gone(now) {
                if why != End::Done {
                    tracing::warn!("control socket: {why}");
                }
                return false;
            }
            !client.broken()
        });
    }
}

/// Sends the reason `why` to a client that is refused, if the socket has room for it. The caller
/// closes the connection.
fn turn_away(stream: &UnixStream, why: &str) {
    use std::io::Write;
    if stream.set_nonblocking(true).is_ok() {
        let _ = (&mut &*stream).write(&message::answer(Err(QmpError::generic(why)), None));
    }
}

#[cfg(test)]
#[path = "server/tests.rs"]
mod tests;
