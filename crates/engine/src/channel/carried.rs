//! Connections that come to a target in another way than from its acceptor: the lanes of connections
//! that carry a whole migration.

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

/// Connections that may carry lanes at once. A migration needs one; each takes a thread and a
/// socket pair for each lane.
const MOST: usize = 4;

/// Connections that wait to be heard, and those that carry lanes.
#[derive(Debug)]
pub(super) struct Arrivals {
    state: Mutex<State>,
    /// `door` is readable after a write to `knock`.
    door: UnixStream,
    knock: UnixStream,
}

#[derive(Debug, Default)]
struct State {
    waiting: Vec<Connection>,
    carried: Vec<Arc<Carried>>,
}

/// A connection that carries lanes.
#[derive(Debug)]
pub(super) struct Carried {
    /// A duplicate of the socket, to end the connection by.
    socket: Socket,
    /// One of its lanes said a proper hello: encrypted, where the target wants that.
    proven: AtomicBool,
}

impl Carried {
    /// A lane said a proper hello: from now on this connection gives way to no other one.
    pub(super) fn prove(&self) {
        self.proven.store(true, Ordering::Release);
    }
}

impl Arrivals {
    pub(super) fn new() -> io::Result<Self> {
        let (door, knock) = UnixStream::pair()?;
        door.set_nonblocking(true)?;
        knock.set_nonblocking(true)?;
        Ok(Self { state: Mutex::default(), door, knock })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the descriptor that is readable after a [`knock`](Self::knock).
    pub(super) fn door(&self) -> BorrowedFd<'_> {
        self.door.as_fd()
    }

    /// Wakes the listener: connections wait, or the last one may have ended.
    pub(super) fn knock(&self) {
        // The write fails only if the socket is full. The door is readable then.
        let _ = (&self.knock).write(&[0]);
    }

    pub(super) fn add(&self, connection: Connection) {
        self.lock().waiting.push(connection);
        self.knock();
    }

    /// Takes the connections that wait.
    pub(super) fn take(&self) -> Vec<Connection> {
        let _ = (&self.door).read(&mut [0; 64]);
        std::mem::take(&mut self.lock().waiting)
    }

    /// Returns whether no connection waits and none carries lanes.
    pub(super) fn is_idle(&self) -> bool {
        let state = self.lock();
        state.waiting.is_empty() && state.carried.is_empty()
    }

    /// Makes room for a connection that carries lanes. The oldest one that has not proven itself
    /// gives way.
    ///
    /// # Errors
    /// If there is no room, or the host has no descriptor.
    pub(super) fn admit(&self, socket: &impl AsFd) -> io::Result<Arc<Carried>> {
        let socket = socket.as_fd().try_clone_to_owned()?.into();
        let carried = Arc::new(Carried { socket, proven: AtomicBool::new(false) });
        let mut state = self.lock();
        if state.carried.len() >= MOST {
            let oldest = state.carried.iter().position(|carried| !carried.proven.load(Ordering::Acquire));
            let oldest = oldest.ok_or_else(|| {
                io::Error::new(io::ErrorKind::QuotaExceeded, "too many connections carry channels already")
            })?;
            // Its thread ends as soon as it notices.
            let _ = state.carried.remove(oldest).socket.shutdown(Shutdown::Both);
        }
        state.carried.push(Arc::clone(&carried));
        Ok(carried)
    }

    /// Has a thread carry the lanes of `socket`, which was [admitted](Self::admit) as `carried`.
    ///
    /// # Errors
    /// If the host has no thread for it.
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
                tracing::warn!("{peer}: its channels cannot be carried: {error}");
            }
            own.forget(&carried);
        };
        spawn(Role::Listener, "target-carrier", work).inspect_err(|_| self.forget(&known)).map(drop)
    }

    /// Forgets a connection that does not carry lanes any more, or never will.
    pub(super) fn forget(&self, carried: &Arc<Carried>) {
        self.lock().carried.retain(|known| !Arc::ptr_eq(known, carried));
        self.knock();
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
    fn a_connection_that_proved_nothing_gives_way_and_others_do_not() {
        let arrivals = Arrivals::new().unwrap();
        let ends: Vec<_> = (0..=MOST).map(|_| pair()).collect();
        let admitted: Vec<_> = ends[..MOST].iter().map(|(own, _)| arrivals.admit(own).unwrap()).collect();
        admitted[0].prove();
        let newest = arrivals.admit(&ends[MOST].0).unwrap();
        let mut oldest = &ends[1].1;
        oldest.set_read_timeout(Some(PATIENCE)).unwrap();
        assert_eq!(oldest.read(&mut [0]).unwrap(), 0, "the oldest that proved nothing is ended");
        admitted.iter().for_each(|carried| carried.prove());
        newest.prove();
        assert!(arrivals.admit(&ends[1].0).is_err(), "all that are left have proven themselves");
        arrivals.forget(&newest);
        assert!(arrivals.admit(&ends[1].0).is_ok());
    }
}
