//! Minimal HTTP server for scrapes: `GET /metrics`, one answer, then the connection closes. A
//! client gets a few seconds and a few kilobytes, and few clients are served at once. Clients
//! cannot delay the guest or the control socket.

use super::plain::plain;
use crate::usage::wrong_usage;
use anyhow::{Context, Result, bail};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Most scrapes at once. Further ones are refused.
const MOST_CLIENTS: usize = 8;
/// Longest request in bytes.
const MOST_BYTES: usize = 8 << 10;
/// Longest time of a scrape.
const PATIENCE: Duration = Duration::from_secs(5);
/// Content type of OpenMetrics, for clients that accept it.
const OPEN: &str = "application/openmetrics-text";
const OPEN_CONTENT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Content type for other clients.
const PLAIN_CONTENT: &str = "text/plain; version=0.0.4; charset=utf-8";
const WORDS: &str = "text/plain; charset=utf-8";

/// Function that makes the text of a scrape.
pub(crate) type Source = dyn Fn() -> Result<String> + Send + Sync;

/// A server that listens until the process ends.
pub(crate) struct Exporter {
    /// Address at which the server listens.
    pub(crate) address: SocketAddr,
    /// Socket of the server.
    pub(crate) listener: OwnedFd,
}

/// Refuses an address that other hosts can reach, unless `public`.
pub(crate) fn check(address: SocketAddr, public: bool) -> Result<()> {
    if !public && !address.ip().is_loopback() {
        wrong_usage!(
            "--metrics {address} lets every host that reaches it read the metrics, unencrypted; use 127.0.0.1:{}, or add --metrics-public",
            address.port()
        );
    }
    Ok(())
}

impl Exporter {
    /// Serves scrapes at `address`, on the given socket if there is one. An address that other
    /// hosts can reach needs `public`.
    pub(crate) fn start(
        at: (SocketAddr, Option<TcpListener>),
        public: bool,
        source: Arc<Source>,
    ) -> Result<Self> {
        Self::with_patience(at, public, PATIENCE, source)
    }

    fn with_patience(
        (address, listener): (SocketAddr, Option<TcpListener>),
        public: bool,
        patience: Duration,
        source: Arc<Source>,
    ) -> Result<Self> {
        check(address, public)?;
        let listener = match listener {
            Some(listener) => Ok(listener),
            None => TcpListener::bind(address),
        };
        let listener = listener.with_context(|| format!("cannot listen at {address} (--metrics)"))?;
        let own = Self { address: listener.local_addr()?, listener: listener.try_clone()?.into() };
        let clients = Arc::new(AtomicUsize::new(0));
        vmferry_thread::spawn(vmferry_thread::Role::Metrics, "metrics", move || {
            for stream in listener.incoming() {
                match stream {
                    Ok(stream) => accept(stream, patience, &clients, &source),
                    // The process is out of descriptors. Waiting lets other connections close.
                    Err(_) => std::thread::sleep(Duration::from_millis(100)),
                }
            }
        })?;
        Ok(own)
    }
}

fn accept(mut stream: TcpStream, patience: Duration, clients: &Arc<AtomicUsize>, source: &Arc<Source>) {
    if clients.fetch_add(1, Ordering::AcqRel) >= MOST_CLIENTS {
        clients.fetch_sub(1, Ordering::AcqRel);
        let _ = stream.set_nonblocking(true);
        let _ = stream
            .write_all(answer("503 Service Unavailable", WORDS, "too many scrapes at once\n").as_bytes());
        return;
    }
    let (own, source) = (Arc::clone(clients), Arc::clone(source));
    let work = move || {
        // Errors of a client have no effect on the server.
        let _ = converse(&mut stream, patience, &*source);
        own.fetch_sub(1, Ordering::AcqRel);
    };
    if vmferry_thread::spawn(vmferry_thread::Role::Metrics, "metrics-client", work).is_err() {
        clients.fetch_sub(1, Ordering::AcqRel);
    }
}

fn converse(stream: &mut TcpStream, patience: Duration, source: &Source) -> Result<()> {
    let deadline = Instant::now() + patience;
    let mut request = Vec::new();
    let mut piece = [0; 1024];
    while !ends(&request) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || request.len() > MOST_BYTES {
            let status =
                if left.is_zero() { "408 Request Timeout" } else { "431 Request Header Fields Too Large" };
            return send(stream, deadline + patience, &answer(status, WORDS, ""));
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut piece) {
            Ok(0) => return Ok(()),
            Ok(read) => request.extend_from_slice(&piece[..read]),
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                ) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let answer = respond(&request, source);
    send(stream, deadline, &answer)
}

/// Sends the whole text until `deadline`. A client that reads too slowly is disconnected.
fn send(stream: &mut TcpStream, deadline: Instant, text: &str) -> Result<()> {
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            bail!("the client reads too slowly");
        }
        stream.set_write_timeout(Some(left))?;
        let sent = stream.write(rest)?;
        rest = &rest[sent..];
    }
    Ok(())
}

fn ends(request: &[u8]) -> bool {
    request.windows(4).any(|bytes| bytes == b"\r\n\r\n") || request.windows(2).any(|bytes| bytes == b"\n\n")
}

fn respond(request: &[u8], source: &Source) -> String {
    let first = request.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let first = String::from_utf8_lossy(first);
    let mut words = first.split_whitespace();
    let (method, target, version) = (words.next(), words.next().unwrap_or_default(), words.next());
    if !version.is_some_and(|version| version.starts_with("HTTP/1.")) || words.next().is_some() {
        return answer("400 Bad Request", WORDS, "no HTTP/1 request\n");
    }
    let path = target.split('?').next().unwrap_or_default();
    match (method, path) {
        (Some("GET"), "/metrics") => match source() {
            Ok(text) if accepts_open(request) => answer("200 OK", OPEN_CONTENT, &text),
            Ok(text) => answer("200 OK", PLAIN_CONTENT, &plain(&text)),
            Err(error) => answer("500 Internal Server Error", WORDS, &format!("{error:#}\n")),
        },
        (Some("GET"), _) => answer("404 Not Found", WORDS, "the metrics are at /metrics\n"),
        _ => answer("405 Method Not Allowed", WORDS, "only GET\n"),
    }
}

/// Returns whether the client accepts OpenMetrics.
fn accepts_open(request: &[u8]) -> bool {
    String::from_utf8_lossy(request).lines().any(|line| {
        let header = line.split_once(':');
        header.is_some_and(|(name, value)| name.eq_ignore_ascii_case("accept") && value.contains(OPEN))
    })
}

fn answer(status: &str, content: &str, body: &str) -> String {
    let allow = if status.starts_with("405") { "Allow: GET\r\n" } else { "" };
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content}\r\nContent-Length: {}\r\nConnection: close\r\n{allow}\r\n{body}",
        body.len()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exporter(patience: Duration) -> Exporter {
        let source = || Ok("x 1\n".repeat(1000));
        Exporter::with_patience(("127.0.0.1:0".parse().unwrap(), None), false, patience, Arc::new(source))
            .unwrap()
    }

    fn send_request(exporter: &Exporter, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(exporter.address).unwrap();
        stream.set_read_timeout(Some(vmferry_testkit::PATIENCE)).unwrap();
        let _ = stream.write_all(request);
        let mut text = Vec::new();
        let _ = stream.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    }

    #[test]
    fn valid_and_invalid_requests_are_answered() {
        let exporter = exporter(vmferry_testkit::PATIENCE);
        let good = send_request(&exporter, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(
            good.starts_with("HTTP/1.1 200 OK\r\n") && good.contains("\r\nContent-Length: 4000\r\n"),
            "{good}"
        );
        assert!(good.contains("\r\nContent-Type: text/plain; version=0.0.4; "), "{good}");
        let open = send_request(
            &exporter,
            b"GET /metrics HTTP/1.1\r\naccept: text/html,application/openmetrics-text;q=0.5\r\n\r\n",
        );
        assert!(open.contains("\r\nContent-Type: application/openmetrics-text; version=1.0.0; "), "{open}");
        for (request, status) in [
            (&b"GET / HTTP/1.1\r\n\r\n"[..], "404"),
            (b"GET /metrics?a=b HTTP/1.0\n\n", "200"),
            (b"POST /metrics HTTP/1.1\r\n\r\n", "405"),
            (b"\xff\xfe\x00\r\n\r\n", "400"),
            (b"GET /metrics HTTP/2\r\n\r\n", "400"),
            (b"\r\n\r\n", "400"),
        ] {
            let answer = send_request(&exporter, request);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request:?}: {answer}");
        }
        // The request is longer than the server reads: the answer may be lost, but the client must
        // not hang.
        let _ = send_request(&exporter, &vec![b'x'; 4 << 20]);
        assert!(send_request(&exporter, b"GET /metrics HTTP/1.1\r\n\r\n").contains(" 200 "));
    }

    #[test]
    fn slow_clients_are_disconnected_and_block_others_only_briefly() {
        // A request may also be refused while slow clients are connected, so it is repeated.
        let exporter = exporter(Duration::from_millis(300));
        let slow: Vec<TcpStream> = (0..MOST_CLIENTS * 2)
            .map(|_| {
                let mut stream = TcpStream::connect(exporter.address).unwrap();
                let _ = stream.write_all(b"GET /met");
                stream
            })
            .collect();
        vmferry_testkit::wait("an answer beside slow clients", || {
            send_request(&exporter, b"GET /metrics HTTP/1.1\r\n\r\n").contains(" 200 ")
        });
        drop(slow);
    }

    #[test]
    fn other_hosts_are_served_only_on_request() {
        let start = |public| {
            Exporter::start(("0.0.0.0:0".parse().unwrap(), None), public, Arc::new(|| Ok(String::new())))
        };
        assert!(start(false).err().unwrap().to_string().contains("--metrics-public"));
        assert!(start(true).is_ok());
    }
}
