//! The records of a connection: what lies between plain buffers and the socket.
//!
//! Two locks. Whoever sends holds `sending` for as long as that takes. `shared` has the keys and what has come; it is held while records
//! are sealed or opened, and while the kernel hands over bytes that are there, and never while anybody waits: so a receiver that waits
//! does not keep a sender waiting, nor the other way round. Order: `sending`, then `shared`.

#[cfg(feature = "hostile")]
#[cfg_attr(not(test), expect(clippy::expect_used, reason = "nothing that ships has it"))]
pub(in crate::channel) mod hostile;

use super::Tls;
use super::conn::{Conn, Outgoing, Step};
use crate::channel::iobuf::{IoBuf, skip_empty};
use crate::channel::raw::{RawStream, SendError, after};
use rustls::Error;
use rustls::pki_types::CertificateDer;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Plain bytes that are sealed at once: what they and their records take stays in the processor's cache.
const PORTION: usize = 128 << 10;
/// What may have come and not be opened.
const WINDOW: usize = 256 << 10;
/// More than the longest record (RFC 8446, 5.2): if that much is there, one is whole.
const LONGEST: usize = 17 << 10;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As a failed connection is reported: the peer is not what it should be, or somebody changed what it sent.
fn broken(error: Error) -> io::Error {
    let text = match error {
        Error::AlertReceived(alert) => format!("the peer refused the encrypted connection: {alert:?}"),
        Error::InvalidCertificate(why) => format!("the peer's certificate is not accepted: {why}"),
        other => format!("encryption failed: {other}"),
    };
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// The connection, and what has come of it.
struct Shared {
    conn: Conn,
    /// What the connection itself has to say; it goes out before anything else.
    own: Outgoing,
    /// `incoming[start..end]` has come and is not opened: `start <= end <= incoming.len()`.
    ///
    /// All of it is shown to the connection at every step, whatever the step is for: it remembers where in it a message began.
    incoming: Box<[u8]>,
    start: usize,
    end: usize,
    /// `plain[at..]` is opened, and nobody has asked for it yet: `at <= plain.len() <= WINDOW`.
    plain: Vec<u8>,
    at: usize,
    /// When the kernel got what was read last, if it was asked.
    stamp: Option<SystemTime>,
    /// The peer said that nothing more comes.
    closed: bool,
    /// Why nothing can be sent or opened any more. No step is made after it, from whichever thread: the connection would look at what it
    /// has refused, or at what stands behind it, once more.
    failed: Option<Error>,
}

struct Sending {
    plain: Box<[u8]>,
    sealed: Outgoing,
}

/// The encryption of one connection.
pub(in crate::channel) struct Records {
    shared: Mutex<Shared>,
    sending: Mutex<Sending>,
    peer: CertificateDer<'static>,
}

impl std::fmt::Debug for Records {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Records").finish_non_exhaustive()
    }
}

impl Records {
    /// Agrees on keys over `raw`, as the side that connected to `host`, within `time`.
    pub(in crate::channel) fn connect(
        tls: &Tls,
        host: Option<&str>,
        raw: &RawStream,
        time: Duration,
    ) -> io::Result<Self> {
        let conn = Conn::client(tls, host).map_err(broken)?;
        Self::shake(conn, raw, time)
    }

    /// The same as the side that was connected to.
    pub(in crate::channel) fn accept(tls: &Tls, raw: &RawStream, time: Duration) -> io::Result<Self> {
        let records = Self::shake(Conn::server(tls).map_err(broken)?, raw, time)?;
        tls.check_client(&records.peer).map_err(broken)?;
        Ok(records)
    }

    fn shake(conn: Conn, raw: &RawStream, time: Duration) -> io::Result<Self> {
        let deadline = after(time);
        let mut shared = Shared::new(conn);
        let flush = |own: &mut Outgoing| {
            let left = deadline.saturating_duration_since(Instant::now());
            let sent = raw.send_bytes_within(own.bytes(), left).map_err(|failed| failed.error);
            own.clear();
            sent
        };
        loop {
            match shared.shake_on() {
                Ok(Step::Flush) => flush(&mut shared.own)?,
                Ok(Step::Open) => break,
                Ok(Step::Closed) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(Step::Blocked | Step::More) => {
                    while !shared.take_in(raw, false)? {
                        raw.wait(Some(deadline))?;
                    }
                }
                Err(error) => {
                    // The peer is told why, if it listens.
                    shared.take_alert();
                    let _ = flush(&mut shared.own);
                    return Err(broken(error));
                }
            }
        }
        let Some(peer) = shared.conn.peer() else { return Err(broken(Error::NoCertificatesPresented)) };
        let sending = Sending { plain: vec![0; PORTION].into_boxed_slice(), sealed: Outgoing::default() };
        Ok(Self { shared: Mutex::new(shared), sending: Mutex::new(sending), peer })
    }

    #[cfg(all(test, feature = "ring"))]
    pub(in crate::channel) fn change_keys(&self) {
        lock(&self.shared).conn.change_keys();
    }

    /// The certificate that the peer showed.
    pub(in crate::channel) fn peer(&self) -> &[u8] {
        &self.peer
    }

    /// Seals all of `bufs`, uses them up, and gives the sealed bytes to `send`, a portion at a time.
    pub(in crate::channel) fn send(
        &self,
        bufs: &mut [IoBuf<'_>],
        mut send: impl FnMut(&[u8]) -> Result<(), SendError>,
    ) -> Result<(), SendError> {
        let mut sending = lock(&self.sending);
        let Sending { plain, sealed } = &mut *sending;
        let (mut first, mut nothing_left) = (0, true);
        loop {
            let mut len = 0;
            while first < bufs.len() && len < plain.len() {
                len += bufs[first].take(&mut plain[len..]);
                first += usize::from(bufs[first].is_empty());
            }
            if len == 0 {
                return Ok(());
            }
            sealed.clear();
            let done = lock(&self.shared).seal(&plain[..len], sealed);
            done.map_err(|error| SendError { nothing_left, error: broken(error) })?;
            send(sealed.bytes()).map_err(|failed| SendError {
                nothing_left: nothing_left && failed.nothing_left,
                ..failed
            })?;
            nothing_left = false;
        }
    }

    /// Fills all of `bufs`, and uses them up. Waits until `deadline`, or as long as the socket's timeout says.
    pub(in crate::channel) fn receive(
        &self,
        mut bufs: &mut [IoBuf<'_>],
        raw: &RawStream,
        deadline: Option<Instant>,
    ) -> io::Result<()> {
        while let Some(rest) = skip_empty(bufs) {
            bufs = rest;
            let mut shared = self.opened(raw, deadline, false, bufs)?;
            let shared = &mut *shared;
            shared.at += put_all(bufs, &shared.plain[shared.at..]);
        }
        Ok(())
    }

    /// Receives what there is, at least a byte.
    pub(in crate::channel) fn receive_some(&self, bytes: &mut [u8], raw: &RawStream) -> io::Result<usize> {
        let mut shared = self.opened(raw, None, false, &mut [])?;
        let shared = &mut *shared;
        let taken = IoBuf::from_bytes_mut(bytes).put(&shared.plain[shared.at..]);
        shared.at += taken;
        Ok(taken)
    }

    /// Fills `bytes`, and says when the kernel got the last of what came with them, if it knows.
    pub(in crate::channel) fn receive_stamped(
        &self,
        bytes: &mut [u8],
        raw: &RawStream,
    ) -> io::Result<Option<SystemTime>> {
        let (mut filled, mut stamp) = (0, None);
        while filled < bytes.len() {
            let mut shared = self.opened(raw, None, true, &mut [])?;
            let shared = &mut *shared;
            let taken = IoBuf::from_bytes_mut(&mut bytes[filled..]).put(&shared.plain[shared.at..]);
            shared.at += taken;
            filled += taken;
            stamp = shared.stamp;
        }
        Ok(stamp)
    }

    /// Whether bytes have come that nobody has asked for, opened or not.
    pub(in crate::channel) fn has_input(&self) -> bool {
        let shared = lock(&self.shared);
        shared.at < shared.plain.len() || shared.start < shared.end
    }

    /// Waits until there is a plain byte. What fits into `to` is put there at once, and nowhere else.
    fn opened(
        &self,
        raw: &RawStream,
        deadline: Option<Instant>,
        stamped: bool,
        to: &mut [IoBuf<'_>],
    ) -> io::Result<MutexGuard<'_, Shared>> {
        loop {
            let mut shared = lock(&self.shared);
            if shared.open(to).map_err(broken)? {
                return Ok(shared);
            }
            if shared.closed {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if !shared.take_in(raw, stamped)? {
                drop(shared);
                raw.wait(deadline)?;
            }
        }
    }
}

/// Puts as much of `bytes` into `bufs` as fits, in order, and uses that of them up. Returns how many bytes that were.
fn put_all(mut bufs: &mut [IoBuf<'_>], bytes: &[u8]) -> usize {
    let mut put = 0;
    while put < bytes.len()
        && let Some(rest) = skip_empty(bufs)
    {
        bufs = rest;
        put += bufs[0].put(&bytes[put..]);
    }
    put
}

impl Shared {
    fn new(conn: Conn) -> Self {
        Self {
            conn,
            own: Outgoing::default(),
            incoming: vec![0; WINDOW].into_boxed_slice(),
            start: 0,
            end: 0,
            plain: Vec::new(),
            at: 0,
            stamp: None,
            closed: false,
            failed: None,
        }
    }

    fn step(&mut self) -> Result<Step, Error> {
        self.step_with(&mut [], None)
    }

    /// A step of the connection. What it opens goes to `to`, if nothing stands before it and as far as it fits, and otherwise to `plain`;
    /// if it is open, `seal` is sealed.
    fn step_with(
        &mut self,
        to: &mut [IoBuf<'_>],
        seal: Option<(&[u8], &mut Outgoing)>,
    ) -> Result<Step, Error> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        if self.at == self.plain.len() {
            self.plain.clear();
            self.at = 0;
        }
        let plain = &mut self.plain;
        let take = &mut |bytes: &[u8]| {
            let put = if plain.is_empty() { put_all(to, bytes) } else { 0 };
            plain.extend_from_slice(&bytes[put..]);
        };
        let (done, step) =
            self.conn.step(&mut self.incoming[self.start..self.end], &mut self.own, take, seal);
        self.start += done;
        self.closed |= matches!(step, Ok(Step::Closed));
        self.failed = step.as_ref().err().cloned();
        step
    }

    /// Takes what the connection has to say of its failure, and does not have it look at what it has refused again.
    fn take_alert(&mut self) {
        let error = self.failed.take();
        while self.conn.has_to_say() && matches!(self.step(), Ok(Step::More)) {}
        self.failed = error;
    }

    /// Agrees on keys as far as that goes: until there is something to be sent, or to wait for, or it is open.
    fn shake_on(&mut self) -> Result<Step, Error> {
        loop {
            match self.step()? {
                // A peer that was done first has sent something already.
                Step::More if self.at < self.plain.len() => return Ok(Step::Open),
                Step::More => {}
                step => return Ok(step),
            }
        }
    }

    /// Opens records until there is a plain byte or `to` is full, or no whole record any more; false if it is that.
    ///
    /// What was opened before a failure is handed out first.
    fn open(&mut self, to: &mut [IoBuf<'_>]) -> Result<bool, Error> {
        let wanted = !to.is_empty();
        loop {
            if self.at < self.plain.len() || wanted && to.iter().all(IoBuf::is_empty) {
                return Ok(true);
            }
            match self.step_with(to, None) {
                // What the connection has to say goes out with the next bytes: nothing of it is waited for.
                Ok(Step::More | Step::Flush) => {}
                Ok(Step::Open | Step::Blocked | Step::Closed) => return Ok(false),
                // It comes again.
                Err(_) if self.at < self.plain.len() => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Adds `plain` to `sealed`, behind what the connection itself has to say. Opens what has come meanwhile, too: that is at most a
    /// window, and so is what it is opened to.
    fn seal(&mut self, plain: &[u8], sealed: &mut Outgoing) -> Result<(), Error> {
        // Each step takes a record or a message, or was the last: so many fit into a window.
        for _ in 0..WINDOW {
            sealed.append(&mut self.own);
            match self.step_with(&mut [], Some((plain, sealed)))? {
                Step::Open => return Ok(()),
                Step::Blocked => return Err(Error::HandshakeNotComplete),
                // A peer that sends no more may still be sent to; the state is met once.
                Step::More | Step::Flush | Step::Closed => {}
            }
        }
        Err(Error::General("the connection is closed".into()))
    }

    /// Where what comes goes.
    fn room(&mut self) -> io::Result<&mut [u8]> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.incoming.len() - self.start < LONGEST {
            // A record must fit whole behind `start`.
            self.incoming.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.end == self.incoming.len() {
            return Err(broken(Error::General("a record has no end".into())));
        }
        Ok(&mut self.incoming[self.end..])
    }

    /// Takes what the kernel has; false if that is nothing yet.
    fn take_in(&mut self, raw: &RawStream, stamped: bool) -> io::Result<bool> {
        let room = self.room()?;
        let received = if stamped {
            raw.receive_stamped(room, libc::MSG_DONTWAIT)
        } else {
            raw.receive_now(room).map(|received| (received, None))
        };
        match received {
            Ok((received, stamp)) => {
                self.end += received;
                self.stamp = stamp;
                Ok(true)
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}
