//! TLS connection without its socket: bytes in, bytes out.

use super::Tls;
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::CertificateDer;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus};
use rustls::{CommonState, Error};
use std::sync::Arc;

/// Maximum difference in bytes between a record and its content, including room for a change of
/// keys.
const OVERHEAD: usize = 1024;
/// Largest number of plain bytes in a record (RFC 8446, 5.1).
const RECORD: usize = 16 << 10;

/// Result of a step of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// The received bytes may contain more records or messages, so the caller must step again.
    More,
    /// The outgoing bytes must be sent before anything else.
    Flush,
    /// No progress is possible without more bytes of the peer, and nothing may be sent.
    Blocked,
    /// All received bytes are processed, and both ends may send.
    Open,
    /// The peer will send no more.
    Closed,
}

/// Bytes that are to be sent. The buffer is reused and never cleared, because filling it with zeros
/// would cost as much as filling it with records.
#[derive(Default)]
pub(super) struct Outgoing {
    buffer: Vec<u8>,
    len: usize,
}

impl std::fmt::Debug for Outgoing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Outgoing").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Outgoing {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer[..self.len]
    }

    pub(super) fn clear(&mut self) {
        self.len = 0;
    }

    /// Moves the bytes of `other` to the end of these.
    pub(super) fn append(&mut self, other: &mut Self) {
        if other.len > 0 {
            self.buffer.truncate(self.len);
            self.buffer.extend_from_slice(other.bytes());
            self.len = self.buffer.len();
            other.clear();
        }
    }

    /// Lets `write` append bytes, with room for `least` bytes, or for as many as `write` then asks
    /// for.
    fn grow(
        &mut self,
        least: usize,
        mut write: impl FnMut(&mut [u8]) -> Result<usize, Result<usize, Error>>,
    ) -> Result<(), Error> {
        let mut room = least;
        for _ in 0..2 {
            if self.buffer.len() < self.len + room {
                self.buffer.resize(self.len + room, 0);
            }
            match write(&mut self.buffer[self.len..]) {
                Ok(written) => {
                    self.len += written;
                    return Ok(());
                }
                Err(Ok(more)) => room = more,
                Err(Err(error)) => return Err(error),
            }
        }
        Err(Error::General("a TLS message grew while it was written".into()))
    }
}

/// TLS state machine of one connection. The types are large, so they are boxed.
pub(super) enum Conn {
    Client(Box<UnbufferedClientConnection>),
    Server(Box<UnbufferedServerConnection>),
}

impl Conn {
    pub(super) fn client(tls: &Tls, host: Option<&str>) -> Result<Self, Error> {
        let connection = UnbufferedClientConnection::new(Arc::clone(&tls.client), tls.name_of(host)?)?;
        Ok(Self::Client(Box::new(connection)))
    }

    pub(super) fn server(tls: &Tls) -> Result<Self, Error> {
        Ok(Self::Server(Box::new(UnbufferedServerConnection::new(Arc::clone(&tls.server))?)))
    }

    fn state(&self) -> &CommonState {
        match self {
            Self::Client(connection) => connection,
            Self::Server(connection) => connection,
        }
    }

    /// Returns the peer's certificate, once the peer has presented it.
    pub(super) fn peer(&self) -> Option<CertificateDer<'static>> {
        Some(self.state().peer_certificates()?.first()?.clone().into_owned())
    }

    /// Returns true if the next steps produce outgoing bytes before they process received ones.
    pub(super) fn must_send(&self) -> bool {
        self.state().wants_write()
    }

    #[cfg(all(test, feature = "ring"))]
    pub(super) fn change_keys(&mut self) {
        fn change<Data>(status: UnbufferedStatus<'_, '_, Data>) {
            let Ok(ConnectionState::WriteTraffic(traffic)) = status.state else { panic!("it is not open") };
            traffic.refresh_traffic_keys().unwrap();
        }
        match self {
            Self::Client(connection) => change(connection.process_tls_records(&mut [])),
            Self::Server(connection) => change(connection.process_tls_records(&mut [])),
        }
    }

    /// Processes a record, or as much as possible, at the front of `incoming`.
    ///
    /// `incoming` must contain all bytes that were received and not yet discarded. Outgoing bytes
    /// are added to `own`, and received plain bytes are passed to `take`. If the connection is open
    /// and has nothing else to send, the first element of `seal` is encrypted and added to its
    /// second element. Returns the number of bytes of `incoming` that can be discarded.
    pub(super) fn step(
        &mut self,
        incoming: &mut [u8],
        own: &mut Outgoing,
        take: &mut dyn FnMut(&[u8]),
        seal: Option<(&[u8], &mut Outgoing)>,
    ) -> (usize, Result<Step, Error>) {
        match self {
            Self::Client(connection) => apply(connection.process_tls_records(incoming), own, take, seal),
            Self::Server(connection) => apply(connection.process_tls_records(incoming), own, take, seal),
        }
    }
}

/// Performs the action that `status` requires.
fn apply<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    own: &mut Outgoing,
    take: &mut dyn FnMut(&[u8]),
    seal: Option<(&[u8], &mut Outgoing)>,
) -> (usize, Result<Step, Error>) {
    let UnbufferedStatus { mut discard, state } = status;
    let step = match state {
        Err(error) => Err(error),
        Ok(ConnectionState::ReadTraffic(mut traffic)) => {
            let mut done = Ok(Step::More);
            while let Some(record) = traffic.next_record() {
                match record {
                    Ok(record) => {
                        discard += record.discard;
                        take(record.payload);
                    }
                    Err(error) => {
                        done = Err(error);
                        break;
                    }
                }
            }
            done
        }
        Ok(ConnectionState::EncodeTlsData(mut data)) => own
            .grow(0, |room| match data.encode(room) {
                Ok(written) => Ok(written),
                Err(EncodeError::InsufficientSize(size)) => Err(Ok(size.required_size)),
                Err(EncodeError::AlreadyEncoded) => Err(Err(Error::General("encoded twice".into()))),
            })
            .map(|()| Step::More),
        Ok(ConnectionState::TransmitTlsData(data)) => {
            data.done();
            Ok(Step::Flush)
        }
        Ok(ConnectionState::WriteTraffic(mut traffic)) => match seal {
            None => Ok(Step::Open),
            Some((plain, out)) => {
                let least = plain.len() + plain.len().div_ceil(RECORD) * 64 + OVERHEAD;
                out.grow(least, |room| match traffic.encrypt(plain, room) {
                    Ok(written) => Ok(written),
                    Err(EncryptError::InsufficientSize(size)) => Err(Ok(size.required_size)),
                    Err(EncryptError::EncryptExhausted) => Err(Err(Error::EncryptError)),
                })
                .map(|()| Step::Open)
            }
        },
        Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => Ok(Step::Closed),
        Ok(ConnectionState::BlockedHandshake) => Ok(Step::Blocked),
        // Servers of this crate do not offer early data. Other states would belong to features that
        // the local end did not request.
        Ok(_) => Err(Error::General("the peer requests a TLS feature that this side does not offer".into())),
    };
    (discard, step)
}
