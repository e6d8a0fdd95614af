//! Whoever sits on the wire of an encrypted connection: changes, drops, repeats and invents what goes over it, in any order.

use super::super::authority::Authority;
use super::*;
use std::sync::OnceLock;

/// Most that an end sends, and about what waits on the wire: what is asked of memory is to be the connection's, not the wire's.
const MOST: usize = 256 << 10;

/// One end, and what is on its way to the other.
struct End {
    shared: Shared,
    shaken: bool,
    /// On its way, and not there.
    way: Vec<u8>,
    sent: Vec<u8>,
    got: Vec<u8>,
    /// How it failed.
    failed: Option<Error>,
    /// What it had got when its receiver was told so: what was opened before is still given out.
    ended: Option<usize>,
    /// More came than it keeps: its caller would end it.
    overrun: bool,
}

impl End {
    fn new(conn: Result<Conn, Error>) -> Self {
        let shared = Shared::new(conn.expect("certificates that fit"));
        let (way, sent, got) = (Vec::new(), Vec::new(), Vec::new());
        Self { shared, shaken: false, way, sent, got, failed: None, ended: None, overrun: false }
    }

    fn flush(&mut self) {
        self.way.extend(self.shared.own.bytes());
        self.shared.own.clear();
    }

    /// As [`Records::shake`] does with what is there.
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

    /// Takes in what comes.
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

    /// As [`Records::send`] does.
    fn send(&mut self, len: usize) {
        if !self.shaken || self.sent.len() > MOST {
            return;
        }
        let plain: Vec<u8> =
            (self.sent.len()..self.sent.len() + len).map(|at| (at % 251).to_le_bytes()[0]).collect();
        let mut sealed = Outgoing::default();
        match self.shared.seal(&plain, &mut sealed) {
            Ok(()) => {
                assert!(self.failed.is_none(), "it sends after it has failed");
                self.way.extend(sealed.bytes());
                self.sent.extend(plain);
            }
            Err(error) => self.fail(error),
        }
    }

    /// As [`Records::receive`] does with what is there, into two buffers; what came into them before an error is nobody's.
    fn receive(&mut self, len: usize) {
        if !self.shaken {
            return;
        }
        let mut bytes = vec![0; len];
        let (one, two) = bytes.split_at_mut(len / 3);
        let mut bufs = [IoBuf::from_bytes_mut(one), IoBuf::from_bytes_mut(two)];
        let opened = self.shared.open(&mut bufs);
        if opened.is_ok() {
            self.shared.at += put_all(&mut bufs, &self.shared.plain[self.shared.at..]);
        }
        let left: usize = bufs.iter_mut().map(|buf| buf.take(&mut vec![0; len])).sum();
        match opened {
            Ok(_) => self.got.extend(&bytes[..len - left]),
            Err(error) => {
                self.fail(error);
                let ended = *self.ended.get_or_insert(self.got.len());
                assert_eq!(ended, self.got.len(), "something was received after a failure");
            }
        }
    }

    fn fail(&mut self, error: Error) {
        // A peer that has closed is no failure of the records.
        if self.shared.failed.is_none() {
            return;
        }
        let first = self.failed.get_or_insert_with(|| error.clone());
        assert_eq!(*first, error, "another failure after the first");
    }
}

/// Does to a connection what `bytes` say; the first says whether keys are agreed on before.
///
/// # Panics
/// If an end takes anything that the other did not send, takes it in another order, or goes on after it has failed; or if a connection to
/// which nothing was done does not carry all.
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
        let len = from.way.len();
        match deed & 7 {
            // Some arrives.
            0 => to.come(&from.way.drain(..len.min((much + 1) * 16)).collect::<Vec<_>>()),
            1 => to.come(&std::mem::take(&mut from.way)),
            // Some of what is on its way becomes something else.
            2 if len > 0 => {
                from.way[much * 7 % len] ^= 1 << (deed >> 4 & 7);
                harmed = true;
            }
            3 => {
                harmed |= len > 0;
                from.way.drain(..len.min(much + 1));
            }
            4 => {
                let (new, tail) = rest.split_at(rest.len().min(much % 32));
                rest = tail;
                harmed |= !new.is_empty();
                from.way.splice(..0, new.iter().copied());
            }
            // A record comes twice.
            5 if (6..MOST).contains(&len) => {
                let record = 5 + usize::from(from.way[3]) * 256 + usize::from(from.way[4]);
                if let Some(record) = from.way.get(..record).map(<[u8]>::to_vec) {
                    from.way.splice(..0, record);
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
        assert!(!one.overrun && !other.overrun, "more is kept than fits, though it is received");
        assert!(one.shaken && other.shaken && one.got == other.sent && other.got == one.sent, "not all came");
        assert!(one.failed.is_none() && other.failed.is_none());
    }
    check(&ends);
}

fn check(ends: &[End; 2]) {
    let [one, other] = ends;
    for (from, to) in [(one, other), (other, one)] {
        assert!(from.sent.starts_with(&to.got), "something came that was not sent");
    }
}

/// All that is on its way arrives.
fn pass_all([one, other]: &mut [End; 2]) {
    while !(one.way.is_empty() && other.way.is_empty()) {
        other.come(&std::mem::take(&mut one.way));
        one.come(&std::mem::take(&mut other.way));
    }
}

/// The same, and is received as it comes: more may be on its way than an end keeps.
fn carry_all(ends: &mut [End; 2]) {
    loop {
        // What was opened while something was sent, and then the rest.
        ends.iter_mut().for_each(|end| (0..2).for_each(|_| end.receive(1 << 20)));
        let [one, other] = &mut *ends;
        if one.way.is_empty() && other.way.is_empty() {
            return;
        }
        let pass = |from: &mut End, to: &mut End| {
            // As much as it would ask the kernel for.
            let room = to.shared.room().map_or(1, |room| room.len());
            to.come(&from.way.drain(..from.way.len().min(room)).collect::<Vec<_>>());
        };
        pass(one, other);
        pass(other, one);
    }
}
