//! Attacker on the network path of an encrypted connection, who changes, drops, repeats and inserts
//! bytes in any order.

use super::super::authority::Authority;
use super::*;
use std::sync::OnceLock;

/// Largest number of bytes that an end sends, and about the largest number in flight. The memory
/// under test should be that of the connection, not of the simulated path.
const MOST: usize = 256 << 10;

/// One end of the connection, and its bytes in flight to the other end.
struct End {
    shared: TlsConnection,
    shaken: bool,
    /// Bytes in flight.
    wire: Vec<u8>,
    sent: Vec<u8>,
    got: Vec<u8>,
    /// First error of the end.
    failed: Option<Error>,
    /// Number of received bytes when the receiver got the first error. Bytes that were decrypted
    /// before are still returned.
    ended: Option<usize>,
    /// True if more bytes arrived than the end keeps. Its caller would end the connection.
    overrun: bool,
}

impl End {
    fn new(conn: Result<Conn, Error>) -> Self {
        let shared = TlsConnection::new(conn.expect("certificates that fit"));
        let (wire, sent, got) = (Vec::new(), Vec::new(), Vec::new());
        Self { shared, shaken: false, wire, sent, got, failed: None, ended: None, overrun: false }
    }

    fn flush(&mut self) {
        self.wire.extend(self.shared.own.bytes());
        self.shared.own.clear();
    }

    /// Continues the handshake, as [`Records::shake`] does.
    fn shake(&mut self) {
        while !self.shaken && self.failed.is_none() {
            match self.shared.shake_on() {
                Ok(Step::Open) => self.shaken = true,
                Ok(Step::Flush) => self.flush(),
                Ok(Step::More | Step::Blocked | Step::Closed) => return,
                Err(error) => {
                    self.shared.take_alert();
                    self.flush();
                    self.fail(error);
                }
            }
        }
    }

    /// Delivers `bytes` to this end.
    fn come(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && !self.overrun {
            let Ok(room) = self.shared.room() else {
                self.overrun = true;
                return;
            };
            let len = room.len().min(bytes.len());
            room[..len].copy_from_slice(&bytes[..len]);
            self.shared.end += len;
            bytes = &bytes[len..];
            self.shake();
        }
    }

    /// Sends bytes as [`Records::send`] does.
    fn send(&mut self, len: usize) {
        if !self.shaken || self.sent.len() > MOST {
            return;
        }
        let plain: Vec<u8> =
            (self.sent.len()..self.sent.len() + len).map(|at| (at % 251).to_le_bytes()[0]).collect();
        let mut sealed = Outgoing::default();
        match self.shared.seal(&plain, &mut sealed) {
            Ok(()) => {
                assert!(self.failed.is_none(), "an end sent bytes after a failure");
                self.wire.extend(sealed.bytes());
                self.sent.extend(plain);
            }
            Err(error) => self.fail(error),
        }
    }

    /// Receives bytes into two buffers, as [`Records::receive`] does. Bytes that were written there
    /// before an error do not count.
    fn receive(&mut self, len: usize) {
        if !self.shaken {
            return;
        }
        let mut bytes = vec![0; len];
        let (one, two) = bytes.split_at_mut(len / 3);
        let mut bufs = [IoBuf::from_bytes_mut(one), IoBuf::from_bytes_mut(two)];
        let opened = self.shared.open(&mut bufs);
        if opened.is_ok() {
            self.shared.at += copy_all(&mut bufs, &self.shared.plain[self.shared.at..]);
        }
        let left: usize = bufs.iter_mut().map(|buf| buf.take(&mut vec![0; len])).sum();
        match opened {
            Ok(_) => self.got.extend(&bytes[..len - left]),
            Err(error) => {
                self.fail(error);
                let ended = *self.ended.get_or_insert(self.got.len());
                assert_eq!(ended, self.got.len(), "bytes were received after a failure");
            }
        }
    }

    fn fail(&mut self, error: Error) {
        // A peer that has closed is no failure of the records.
        if self.shared.failed.is_none() {
            return;
        }
        let first = self.failed.get_or_insert_with(|| error.clone());
        assert_eq!(*first, error, "a second, different failure");
    }
}

/// Runs the attack that `bytes` encode. The first byte says whether the handshake is completed
/// before.
///
/// # Panics
/// If an end receives bytes that the other did not send, receives them in another order, or
/// continues after a failure. Also if a connection that was not attacked does not deliver all
/// bytes.
pub fn drive_tls(bytes: &[u8]) {
    static HOST: OnceLock<Tls> = OnceLock::new();
    let host = HOST.get_or_init(|| {
        let authority = Authority::new();
        let (certificate, key) = authority.issue("host.example");
        let tls = Tls::from_pem(certificate.as_bytes(), key.as_bytes(), authority.pem.as_bytes());
        tls.expect("certificates that fit")
    });
    let Some((first, mut rest)) = bytes.split_first() else { return };
    let mut ends = [End::new(Conn::client(host, Some("host.example"))), End::new(Conn::server(host))];
    ends[0].shake();
    if first & 1 != 0 {
        pass_all(&mut ends);
    }
    let mut harmed = false;
    while let [deed, much, tail @ ..] = rest {
        rest = tail;
        let [one, other] = &mut ends;
        let (from, to) = if deed & 8 == 0 { (one, other) } else { (other, one) };
        let much = usize::from(*much);
        let len = from.wire.len();
        match deed & 7 {
            // Some bytes arrive.
            0 => to.come(&from.wire.drain(..len.min((much + 1) * 16)).collect::<Vec<_>>()),
            1 => to.come(&std::mem::take(&mut from.wire)),
            // A byte in flight is changed.
            2 if len > 0 => {
                from.wire[much * 7 % len] ^= 1 << (deed >> 4 & 7);
                harmed = true;
            }
            3 => {
                harmed |= len > 0;
                from.wire.drain(..len.min(much + 1));
            }
            4 => {
                let (new, tail) = rest.split_at(rest.len().min(much % 32));
                rest = tail;
                harmed |= !new.is_empty();
                from.wire.splice(..0, new.iter().copied());
            }
            // A record is repeated.
            5 if (6..MOST).contains(&len) => {
                let record = 5 + usize::from(from.wire[3]) * 256 + usize::from(from.wire[4]);
                if let Some(record) = from.wire.get(..record).map(<[u8]>::to_vec) {
                    from.wire.splice(..0, record);
                    harmed = true;
                }
            }
            6 => from.send((much + 1) * 97),
            7 => from.receive(much * 83),
            _ => {}
        }
        check(&ends);
    }
    if !harmed && !ends.iter().any(|end| end.overrun) {
        carry_all(&mut ends);
        let [one, other] = &ends;
        assert!(!one.overrun && !other.overrun, "an end overran although its bytes were received");
        assert!(
            one.shaken && other.shaken && one.got == other.sent && other.got == one.sent,
            "not all bytes arrived"
        );
        assert!(one.failed.is_none() && other.failed.is_none());
    }
    check(&ends);
}

fn check(ends: &[End; 2]) {
    let [one, other] = ends;
    for (from, to) in [(one, other), (other, one)] {
        assert!(from.sent.starts_with(&to.got), "bytes arrived that were not sent");
    }
}

/// Delivers all bytes in flight.
fn pass_all([one, other]: &mut [End; 2]) {
    while !(one.wire.is_empty() && other.wire.is_empty()) {
        other.come(&std::mem::take(&mut one.wire));
        one.come(&std::mem::take(&mut other.wire));
    }
}

/// Delivers all bytes in flight, and receives them as they arrive: more may be in flight than an
/// end keeps.
fn carry_all(ends: &mut [End; 2]) {
    loop {
        // The first receive returns bytes that were decrypted during a send, the second the rest.
        ends.iter_mut().for_each(|end| (0..2).for_each(|_| end.receive(1 << 20)));
        let [one, other] = &mut *ends;
        if one.wire.is_empty() && other.wire.is_empty() {
            return;
        }
        let pass = |from: &mut End, to: &mut End| {
            // As much is delivered as the end would ask the kernel for.
            let room = to.shared.room().map_or(1, |room| room.len());
            to.come(&from.wire.drain(..from.wire.len().min(room)).collect::<Vec<_>>());
        };
        pass(one, other);
        pass(other, one);
    }
}
