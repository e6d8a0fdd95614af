//! Connections of a target that do not come from its acceptor: the lanes of connections that carry
//! all channels of a migration.

use super::carrier;
use super::greeting::Connection;
use socket2::Socket;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vmferry_thread::{Role, spawn};

/// Maximum number of connections that carry lanes. A migration needs one such connection. Each uses
/// a thread, and a socket pair for each lane.
const MOST: usize = 4;

/// Connections that wait for their hello to be read, and connections that carry lanes.
#[derive(Debug)]
pub(super) struct CarriedConnections {
    state: Mutex<State>,
    /// Socket that is readable after a write to `wake_writer`.
    wake_reader: UnixStream,
    wake_writer: UnixStream,
}

#[derive(Debug, Default)]
struct State {
    waiting: Vec<Connection>,
    carried: Vec<Arc<Carried>>,
}

/// Connection that carries lanes.
#[derive(Debug)]
pub(super) struct Carried {
    /// Duplicate of the socket, through which the connection can be shut down.
    socket: Socket,
    /// True once a lane of the connection has sent a valid hello, encrypted if the target requires
    /// that.
    proven: AtomicBool,
}

impl Carried {
    /// Records that a lane has sent a valid hello. From now on, this connection is not closed to
    /// make room for another.
    pub(super) fn prove(&self) {
        self.proven.store(true, Ordering::Release);
    }
}

impl CarriedConnections {
    pub(super) fn new() -> io::Result<Self> {
        let (wake_reader, wake_writer) = UnixStream::pair()?;
        wake_reader.set_nonblocking(true)?;
        wake_writer.set_nonblocking(true)?;
        Ok(Self { state: Mutex::default(), wake_reader, wake_writer })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the descriptor that is readable after a [`wake`](Self::wake).
    pub(super) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake_reader.as_fd()
    }

    /// Wakes the listener, because connections wait or the last connection may have ended.
    pub(super) fn wake(&self) {
        // The write fails only if the socket is full. In that case, the other end is already
        // readable.
        let _ = (&self.wake_writer).write(&[0]);
    }

    pub(super) fn add(&self, connection: Connection) {
        self.lock().waiting.push(connection);
        self.wake();
    }

    /// Takes the waiting connections.
    pub(super) fn take(&self) -> Vec<Connection> {
        let _ = (&self.wake_reader).read(&mut [0; 64]);
        std::mem::take(&mut self.lock().waiting)
    }

    /// Returns true if no connection waits and none carries lanes.
    pub(super) fn is_idle(&self) -> bool {
        let state = self.lock();
        state.waiting.is_empty() && state.carried.is_empty()
    }

    /// Admits a connection that carries lanes. If there are too many, the oldest one without a
    /// valid hello is shut down.
    ///
    /// # Errors
    /// If there is no room, or the process cannot open another descriptor.
    pub(super) fn admit(&self, socket: &impl AsFd) -> io::Result<Arc<Carried>> {
        let socket = socket.as_fd().try_clone_to_owned()?.into();
        let carried = Arc::new(Carried { socket, proven: AtomicBool::new(false) });
        let mut state = self.lock();
        if state.carried.len() >= MOST {
            let oldest = state.carried.iter().position(|carried| !carried.proven.load(Ordering::Acquire));
            let oldest = oldest.ok_or_else(|| {
                io::Error::new(io::ErrorKind::QuotaExceeded, "too many connections carry channels already")
            })?;
            // The thread of that connection ends when it notices the shutdown.
            let _ = state.carried.remove(oldest).socket.shutdown(Shutdown::Both);
        }
        state.carried.push(Arc::clone(&carried));
        Ok(carried)
    }

    /// Starts a thread that carries the lanes of `socket`, which was [admitted](Self::admit) as
    /// `carried`.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(super) fn carry(
        self: &Arc<Self>,
        socket: Socket,
        peer: String,
        carried: Arc<Carried>,
    ) -> io::Result<()> {
        let (own, known) = (Arc::clone(self), Arc::clone(&carried));
        let work = move || {
            let lane = |socket| {
                let (peer, lane_of) = (peer.clone(), Some(Arc::clone(&carried)));
                own.add(Connection { socket, peer, lane_of, lasting: false });
            };
            if let Err(error) = carrier::carry(socket, lane) {
                tracing::warn!("cannot carry the channels of {peer}: {error}");
            }
            own.forget(&carried);
        };
        spawn(Role::Listener, "target-carrier", work).inspect_err(|_| self.forget(&known)).map(drop)
    }

    /// Removes a connection that does not carry lanes any more, or never will.
    pub(super) fn forget(&self, carried: &Arc<Carried>) {
        self.lock().carried.retain(|known| !Arc::ptr_eq(known, carried));
        self.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmferry_testkit::PATIENCE;

    fn pair() -> (Socket, Socket) {
        let (one, other) = UnixStream::pair().unwrap();
        (one.into(), other.into())
    }

    #[test]
    fn connection_without_a_valid_hello_gives_way_and_others_do_not() {
        let arrivals = CarriedConnections::new().unwrap();
        let ends: Vec<_> = (0..=MOST).map(|_| pair()).collect();
        let admitted: Vec<_> = ends[..MOST].iter().map(|(own, _)| arrivals.admit(own).unwrap()).collect();
        admitted[0].prove();
        let newest = arrivals.admit(&ends[MOST].0).unwrap();
        let mut oldest = &ends[1].1;
        oldest.set_read_timeout(Some(PATIENCE)).unwrap();
        assert_eq!(oldest.read(&mut [0]).unwrap(), 0, "the oldest connection without a hello is shut down");
        admitted.iter().for_each(|carried| carried.prove());
        newest.prove();
        assert!(arrivals.admit(&ends[1].0).is_err(), "every remaining connection has sent a hello");
        arrivals.forget(&newest);
        assert!(arrivals.admit(&ends[1].0).is_ok());
    }
}
