//! Records of a connection: the layer between plain buffers and the socket.
//!
//! There are two locks. A sender holds `sending` for the whole send. `shared` protects the keys and
//! the received bytes. A thread holds `shared` while it encrypts or decrypts records, and while the
//! kernel hands over bytes that are available, but never while it waits. Therefore a waiting
//! receiver does not delay a sender, and a waiting sender does not delay a receiver. Lock order:
//! `sending`, then `shared`.

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

/// Maximum number of plain bytes that are encrypted at once. The bytes and their records fit into
/// the processor's cache.
const PORTION: usize = 128 << 10;
/// Maximum number of received bytes that are not decrypted yet.
const WINDOW: usize = 256 << 10;
/// Number of bytes that is larger than the longest record (RFC 8446, 5.2), so that this number of
/// bytes contains a complete record.
const LONGEST: usize = 17 << 10;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Converts a TLS error to the error of a failed connection. The cause is that the peer is not the
/// expected one, or that its bytes were changed on the network.
fn broken(error: Error) -> io::Error {
    let text = match error {
        Error::AlertReceived(alert) => format!("the peer refused the encrypted connection: {alert:?}"),
        Error::InvalidCertificate(why) => format!("the peer's certificate is not accepted: {why}"),
        other => format!("encryption failed: {other}"),
    };
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// Connection, with its received bytes.
struct TlsConnection {
    conn: Conn,
    /// Bytes that the connection itself must send, before anything else.
    own: Outgoing,
    /// Received bytes. `incoming[start..end]` is not decrypted: `start <= end <= incoming.len()`.
    ///
    /// Every step passes the whole range to the connection, because the connection remembers at
    /// which position of the range a message began.
    incoming: Box<[u8]>,
    start: usize,
    end: usize,
    /// Decrypted bytes. `plain[at..]` has not been requested yet: `at <= plain.len() <= WINDOW`.
    plain: Vec<u8>,
    at: usize,
    /// Time at which the kernel received the bytes that were read last, if it was asked.
    stamp: Option<SystemTime>,
    /// True if the peer has closed its direction.
    closed: bool,
    /// Error after which nothing can be sent or decrypted any more. Afterwards, no thread makes
    /// another step, because the connection would process the refused bytes again, or the bytes
    /// behind them.
    failed: Option<Error>,
}

struct Sending {
    plain: Box<[u8]>,
    sealed: Outgoing,
}

/// Encryption of one connection.
pub(in crate::channel) struct Records {
    shared: Mutex<TlsConnection>,
    sending: Mutex<Sending>,
    peer: CertificateDer<'static>,
}

impl std::fmt::Debug for Records {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Records").finish_non_exhaustive()
    }
}

impl Records {
    /// Performs the handshake over `raw` within `time`, as the side that connected to `host`.
    pub(in crate::channel) fn connect(
        tls: &Tls,
        host: Option<&str>,
        raw: &RawStream,
        time: Duration,
    ) -> io::Result<Self> {
        let conn = Conn::client(tls, host).map_err(broken)?;
        Self::shake(conn, raw, time)
    }

    /// Performs the handshake over `raw` within `time`, as the side that accepted the connection.
    pub(in crate::channel) fn accept(tls: &Tls, raw: &RawStream, time: Duration) -> io::Result<Self> {
        let records = Self::shake(Conn::server(tls).map_err(broken)?, raw, time)?;
        tls.check_client(&records.peer).map_err(broken)?;
        Ok(records)
    }

    fn shake(conn: Conn, raw: &RawStream, time: Duration) -> io::Result<Self> {
        let deadline = after(time);
        let mut shared = TlsConnection::new(conn);
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
                    // The alert tells the peer the reason, if the peer still reads.
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

    /// Returns the certificate that the peer presented.
    pub(in crate::channel) fn peer(&self) -> &[u8] {
        &self.peer
    }

    /// Encrypts all of `bufs`, uses them up, and passes the encrypted bytes to `send`, a portion at
    /// a time.
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

    /// Fills all of `bufs`, and uses them up. Waits at most until `deadline`, or without a deadline
    /// for the socket's timeout.
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
            shared.at += copy_all(bufs, &shared.plain[shared.at..]);
        }
        Ok(())
    }

    /// Receives the bytes that are available, at least one.
    pub(in crate::channel) fn receive_some(&self, bytes: &mut [u8], raw: &RawStream) -> io::Result<usize> {
        let mut shared = self.opened(raw, None, false, &mut [])?;
        let shared = &mut *shared;
        let taken = IoBuf::from_bytes_mut(bytes).copy_from(&shared.plain[shared.at..]);
        shared.at += taken;
        Ok(taken)
    }

    /// Fills `bytes`. Returns the time at which the kernel received the last bytes that were read
    /// for this, if it is known.
    pub(in crate::channel) fn receive_stamped(
        &self,
        bytes: &mut [u8],
        raw: &RawStream,
    ) -> io::Result<Option<SystemTime>> {
        let (mut filled, mut stamp) = (0, None);
        while filled < bytes.len() {
            let mut shared = self.opened(raw, None, true, &mut [])?;
            let shared = &mut *shared;
            let taken = IoBuf::from_bytes_mut(&mut bytes[filled..]).copy_from(&shared.plain[shared.at..]);
            shared.at += taken;
            filled += taken;
            stamp = shared.stamp;
        }
        Ok(stamp)
    }

    /// Returns true if received bytes have not been requested yet, decrypted or not.
    pub(in crate::channel) fn has_input(&self) -> bool {
        let shared = lock(&self.shared);
        shared.at < shared.plain.len() || shared.start < shared.end
    }

    /// Waits until there is a plain byte. Plain bytes that fit into `to` are written there
    /// directly.
    fn opened(
        &self,
        raw: &RawStream,
        deadline: Option<Instant>,
        stamped: bool,
        to: &mut [IoBuf<'_>],
    ) -> io::Result<MutexGuard<'_, TlsConnection>> {
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

/// Copies as much of `bytes` into `bufs` as fits, in order. Advances `bufs` by the number of copied
/// bytes, and returns this number.
fn copy_all(mut bufs: &mut [IoBuf<'_>], bytes: &[u8]) -> usize {
    let mut put = 0;
    while put < bytes.len()
        && let Some(rest) = skip_empty(bufs)
    {
        bufs = rest;
        put += bufs[0].copy_from(&bytes[put..]);
    }
    put
}

impl TlsConnection {
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

    /// Makes a step of the connection. Decrypted bytes go to `to` as far as they fit, if no earlier
    /// ones wait, and otherwise to `plain`. If the connection is open, `seal` is encrypted.
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
            let put = if plain.is_empty() { copy_all(to, bytes) } else { 0 };
            plain.extend_from_slice(&bytes[put..]);
        };
        let (done, step) =
            self.conn.step(&mut self.incoming[self.start..self.end], &mut self.own, take, seal);
        self.start += done;
        self.closed |= matches!(step, Ok(Step::Closed));
        self.failed = step.as_ref().err().cloned();
        step
    }

    /// Takes the alert that the connection sends about its failure, without letting the connection
    /// process the refused bytes again.
    fn take_alert(&mut self) {
        let error = self.failed.take();
        while self.conn.must_send() && matches!(self.step(), Ok(Step::More)) {}
        self.failed = error;
    }

    /// Continues the handshake until there are bytes to send, more bytes of the peer are needed, or
    /// the connection is open.
    fn shake_on(&mut self) -> Result<Step, Error> {
        loop {
            match self.step()? {
                // A peer that has finished the handshake first may already have sent data.
                Step::More if self.at < self.plain.len() => return Ok(Step::Open),
                Step::More => {}
                step => return Ok(step),
            }
        }
    }

    /// Decrypts records until there is a plain byte or `to` is full. Returns false if there is no
    /// complete record any more.
    ///
    /// Bytes that were decrypted before a failure are returned first.
    fn open(&mut self, to: &mut [IoBuf<'_>]) -> Result<bool, Error> {
        let wanted = !to.is_empty();
        loop {
            if self.at < self.plain.len() || wanted && to.iter().all(IoBuf::is_empty) {
                return Ok(true);
            }
            match self.step_with(to, None) {
                // The connection's own bytes are sent with the next data. The receiver need not
                // wait for them.
                Ok(Step::More | Step::Flush) => {}
                Ok(Step::Open | Step::Blocked | Step::Closed) => return Ok(false),
                // The error is returned again at the next call.
                Err(_) if self.at < self.plain.len() => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Encrypts `plain` and adds the result to `sealed`, after the bytes that the connection itself
    /// must send. Also decrypts bytes received in the meantime. These, and their plain content, are
    /// at most a window.
    fn seal(&mut self, plain: &[u8], sealed: &mut Outgoing) -> Result<(), Error> {
        // Each step except the last takes a record or a message, and a window cannot contain more
        // of them than it has bytes. Therefore this number of steps suffices.
        for _ in 0..WINDOW {
            sealed.append(&mut self.own);
            match self.step_with(&mut [], Some((plain, sealed)))? {
                Step::Open => return Ok(()),
                Step::Blocked => return Err(Error::HandshakeNotComplete),
                // A peer that has closed its direction can still receive. The state is returned
                // once.
                Step::More | Step::Flush | Step::Closed => {}
            }
        }
        Err(Error::General("the connection is closed".into()))
    }

    /// Returns the free space for received bytes.
    fn room(&mut self) -> io::Result<&mut [u8]> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.incoming.len() - self.start < LONGEST {
            // A record must fit completely behind `start`.
            self.incoming.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.end == self.incoming.len() {
            return Err(broken(Error::General("a record is longer than the protocol allows".into())));
        }
        Ok(&mut self.incoming[self.end..])
    }

    /// Reads the bytes that the kernel has received. Returns false if there are none yet.
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
