use super::authority::Authority;
use super::conn::{Conn, Outgoing, Step};
use super::*;
use crate::channel::{Dialer, IoBuf, Listener, Stream, Uri};
use crate::source::Settings;
use crate::wake::Ending;
use crate::{MigrateError, MigrationHandle, random};
use rcgen::KeyPair;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmferry_testkit::{PATIENCE, wait};
use vmferry_wire::{MigrationId, RefusalCode, Role, Token};

const SOON: Duration = Duration::from_secs(10);

fn host_that_trusts(own: &Authority, name: &str, trusted: &Authority) -> Tls {
    let (certificate, key) = own.issue(name);
    Tls::from_pem(certificate.as_bytes(), key.as_bytes(), trusted.pem.as_bytes()).unwrap()
}

fn host(authority: &Authority, name: &str) -> Tls {
    host_that_trusts(authority, name, authority)
}

fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (here, listener.accept().unwrap().0)
}

fn stream(socket: TcpStream) -> Stream {
    Stream::new(socket.into(), "peer".into()).unwrap()
}

/// Performs the handshake over `source` and `target`, which may be the ends of two connections with
/// a relay between them. Returns both results.
fn shake(
    (source, target): (TcpStream, TcpStream),
    (client, server): (&Tls, &Tls),
) -> (io::Result<Stream>, io::Result<Stream>) {
    std::thread::scope(|scope| {
        let there = scope.spawn(|| {
            let mut there = stream(target);
            there.encrypt_from(server, SOON).map(|()| there)
        });
        let mut here = stream(source);
        let here = here.encrypt_to(client, Some("127.0.0.1"), SOON).map(|()| here);
        (here, there.join().unwrap())
    })
}

fn pair() -> (Stream, Stream) {
    let authority = Authority::new();
    let (here, there) = shake(sockets(), (&host(&authority, "127.0.0.1"), &host(&authority, "127.0.0.1")));
    (here.unwrap(), there.unwrap())
}

#[test]
fn both_directions_at_once_arrive_in_order_however_they_are_cut() {
    let (a, b) = pair();
    let pieces: Vec<Vec<u8>> = (0..3000_u32).map(|i| vec![i.to_le_bytes()[0]; (i % 700) as usize]).collect();
    let want = pieces.concat();
    let send = |stream: &Stream| {
        let mut bufs: Vec<IoBuf<'_>> = pieces.iter().map(|piece| IoBuf::from_bytes(piece)).collect();
        stream.send(&mut bufs).unwrap();
    };
    let receive = |stream: &Stream| {
        let mut got = vec![0; want.len()];
        let (left, right) = got.split_at_mut(12_345);
        stream.receive(&mut [IoBuf::from_bytes_mut(left), IoBuf::from_bytes_mut(right)]).unwrap();
        assert!(got == want);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| send(&a));
        scope.spawn(|| send(&b));
        scope.spawn(|| receive(&a));
        receive(&b);
    });
    // Bytes that arrived together are known to be available, even if the socket has no more.
    a.send(&mut [IoBuf::from_bytes(b"two")]).unwrap();
    b.receive_bytes(&mut [0]).unwrap();
    assert!(b.has_input() && b.wait_for_input(std::time::Instant::now()).unwrap());
    let mut rest = [0; 8];
    assert_eq!(b.receive_some(&mut rest).unwrap(), 2);
    assert_eq!(&rest[..2], b"wo");
    assert!(!b.has_input());
    drop(a);
    assert_eq!(b.receive_bytes(&mut [0]).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
}

#[test]
fn transfer_continues_past_the_window_and_changes_of_keys() {
    let (a, b) = pair();
    // The lengths around those of a record, in many windows.
    let lens = (0..400).map(|i| [1, 4096 + 80, 16 << 10, (16 << 10) + 1, 300_000][i % 5]);
    let lens: Vec<usize> = lens.collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for (i, len) in lens.iter().enumerate() {
                if i % 100 == 50 {
                    a.change_keys();
                }
                a.send(&mut [IoBuf::from_bytes(&vec![i.to_le_bytes()[0]; *len])]).unwrap();
            }
        });
        for (i, len) in lens.iter().enumerate() {
            let mut got = vec![0; *len];
            b.receive_bytes(&mut got).unwrap();
            assert!(got.iter().all(|byte| *byte == i.to_le_bytes()[0]), "{i}");
        }
    });
    // The side that only received so far has new keys, too.
    b.send(&mut [IoBuf::from_bytes(b"back")]).unwrap();
    a.receive_bytes(&mut [0; 4]).unwrap();
}

/// Passes on the bytes that `from` sends, changed by `change`, which gets the number of bytes
/// before.
fn relay(mut from: TcpStream, mut to: TcpStream, change: impl Fn(u64, &mut [u8])) {
    let (mut buffer, mut passed) = ([0; 4096], 0);
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        change(passed, &mut buffer[..len]);
        passed += len as u64;
        if to.write_all(&buffer[..len]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

#[test]
fn changed_record_ends_both_directions() {
    let authority = Authority::new();
    let tls = host(&authority, "127.0.0.1");
    let ((source, near), (far, target)) = (sockets(), sockets());
    let spoil = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (a, b) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        scope.spawn(|| {
            relay(a, b, |_, bytes| {
                if spoil.load(Ordering::Acquire) {
                    *bytes.last_mut().unwrap() ^= 1;
                }
            });
        });
        scope.spawn(|| relay(far, near, |_, _| ()));
        let (here, there) = shake((source, target), (&tls, &tls));
        let (here, there) = (here.unwrap(), there.unwrap());
        here.send(&mut [IoBuf::from_bytes(b"good")]).unwrap();
        let mut got = [0; 4];
        there.receive_bytes(&mut got).unwrap();
        assert_eq!(&got, b"good");
        spoil.store(true, Ordering::Release);
        here.send(&mut [IoBuf::from_bytes(b"evil")]).unwrap();
        let error = there.receive_bytes(&mut got).unwrap_err();
        assert_eq!((error.kind(), &got), (io::ErrorKind::InvalidData, b"good"), "{error}");
        // After the failure no thread can receive the later bytes, and none can send.
        spoil.store(false, Ordering::Release);
        here.send(&mut [IoBuf::from_bytes(b"more")]).unwrap();
        for _ in 0..2 {
            let failed = there.send(&mut [IoBuf::from_bytes(b"back")]).unwrap_err();
            assert!(failed.nothing_left, "{failed:?}");
            let again = there.receive_bytes(&mut got).unwrap_err();
            assert_eq!(again.to_string(), error.to_string());
        }
        here.shutdown();
        there.shutdown();
    });
}

/// Returns the errors of both ends for a connection that must be refused. A source gets its error
/// at the latest when it waits for the answer to its hello.
fn refused(client: &Tls, server: &Tls) -> (String, String) {
    let (here, there) = shake(sockets(), (client, server));
    let there = there.expect_err("the target accepted").to_string();
    let here = here.and_then(|here| {
        here.set_timeouts(Some(SOON), Some(SOON))?;
        here.receive_bytes(&mut [0])
    });
    (here.expect_err("the source accepted").to_string(), there)
}

#[test]
fn accepts_only_certificates_of_the_authority_with_the_right_name() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let (near, far) = (host(&ours, "127.0.0.1"), host(&ours, "127.0.0.1"));
    // A host of another authority as the target, and as the source.
    let (here, _) = refused(&near, &host(&theirs, "127.0.0.1"));
    assert!(here.contains("certificate is not accepted"), "{here}");
    let (here, there) = refused(&host_that_trusts(&theirs, "127.0.0.1", &ours), &far);
    assert!(there.contains("certificate is not accepted"), "{there}");
    assert!(here.contains("refused the encrypted connection"), "{here}");
    // A host of the right authority with the name of another host.
    let (here, _) = refused(&near, &host(&ours, "elsewhere.example"));
    assert!(here.contains("not valid for"), "{here}");
    // A target that accepts only one host.
    let (_, there) = refused(&near, &far.clone().expecting("source.example").unwrap());
    assert!(there.contains("not valid for"), "{there}");
    let (here, there) = shake(
        sockets(),
        (
            &host(&ours, "source.example").expecting("127.0.0.1").unwrap(),
            &far.expecting("source.example").unwrap(),
        ),
    );
    assert_eq!(here.unwrap().peer_certificate().is_some(), there.unwrap().peer_certificate().is_some());
    assert!(near.expecting("not a name").is_err());
}

/// Connects with the settings `source` to a target with the settings `target`.
fn connect_pair(source: Option<Tls>, target: Option<Tls>) -> Result<(), MigrateError> {
    let uri = Uri::Tcp { host: "127.0.0.1".into(), port: 0 };
    let listener = match target {
        Some(tls) => Listener::bind_encrypted(&uri, tls),
        None => Listener::bind(&uri, false),
    };
    let listener = listener.unwrap();
    let uri = listener.uri().unwrap();
    let ending = Ending::new().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            listener.serve(&ending, |incoming| {
                crate::channel::answer(&incoming.stream, &incoming.hello, Ok(())).unwrap();
            });
        });
        let settings = Settings { tls: source, peer_timeout: SOON, ..Settings::default() };
        let id = (MigrationId(random().unwrap()), Role::Control, 0, Token::NONE);
        let result = Dialer::new(&uri, &settings).open(id, None).map(drop);
        ending.end();
        result
    })
}

#[test]
fn mismatch_of_encryption_is_reported_by_the_source() {
    let authority = Authority::new();
    let tls = host(&authority, "127.0.0.1");
    connect_pair(Some(tls.clone()), Some(tls.clone())).unwrap();
    connect_pair(None, None).unwrap();
    let error = connect_pair(None, Some(tls.clone())).unwrap_err();
    assert!(matches!(error, MigrateError::RefusedHello { code: RefusalCode::Encryption, .. }), "{error}");
    let error = connect_pair(Some(tls), None).unwrap_err();
    assert!(matches!(error, MigrateError::Tls { .. }), "{error}");
    assert!(
        error.to_string().contains("check that source and target each have a certificate of an authority"),
        "{error}"
    );
}

/// Returns true if a connection of this host to `port` of loopback waits for the answer to its
/// first packet.
fn is_connecting_to(port: u16) -> bool {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    // Remote address and state; 02 is SYN_SENT.
    let want = format!("0100007F:{port:04X} 02");
    table.lines().any(|line| line.contains(&want))
}

#[test]
fn cancel_ends_each_wait_of_opening_a_connection() {
    let authority = Authority::new();
    let tls = host(&authority, "127.0.0.1");
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    // The listener has room for one connection. Others wait for the first step of their handshake.
    let full = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    let any: std::net::SocketAddr = "127.0.0.1:0".parse().unwrap();
    full.bind(&any.into()).unwrap();
    full.listen(0).unwrap();
    let full = TcpListener::from(full);
    let _one = TcpStream::connect(full.local_addr().unwrap()).unwrap();
    // The state of the source can be observed: its first bytes arrive, or the kernel has begun a
    // connection and not completed it.
    let waits = |listener: &TcpListener| {
        if std::ptr::eq(listener, &full) {
            return wait("a connection in its making", || {
                is_connecting_to(full.local_addr().unwrap().port())
            });
        }
        let (mut other, _) = listener.accept().unwrap();
        other.read_exact(&mut [0]).unwrap();
        // The connection is kept open. It neither answers nor ends.
        std::mem::forget(other);
    };
    for (what, listener, tls) in
        [("hello", &silent, None), ("handshake", &silent, Some(tls)), ("connection", &full, None)]
    {
        let uri = Uri::Tcp { host: "127.0.0.1".into(), port: listener.local_addr().unwrap().port() };
        // Without the cancel the source would wait longer than this test.
        let settings = Settings { tls, peer_timeout: PATIENCE * 2, ..Settings::default() };
        let id = (MigrationId(random().unwrap()), Role::Control, 0, Token::NONE);
        for while_it_waits in [true, false] {
            let (handle, began) = (MigrationHandle::new(), Instant::now());
            std::thread::scope(|scope| {
                if !while_it_waits {
                    handle.cancel();
                }
                let opened = scope.spawn(|| Dialer::new(&uri, &settings).open(id, Some(&handle)).map(drop));
                if while_it_waits {
                    waits(listener);
                    assert!(!opened.is_finished(), "{what}: {:?}", opened.join());
                    handle.cancel();
                }
                let error = opened.join().unwrap().unwrap_err();
                assert!(matches!(error, MigrateError::Cancelled { .. }), "{what}: {error}");
            });
            assert!(began.elapsed() < PATIENCE, "{what}: {:?}", began.elapsed());
        }
    }
}

#[test]
fn unusable_certificates_and_keys_are_reported() {
    let authority = Authority::new();
    let other = KeyPair::generate().unwrap().serialize_pem();
    let cases: [(&[u8], &[u8], &str); 4] = [
        (b"nothing", other.as_bytes(), "no certificate in it"),
        (authority.pem.as_bytes(), b"nothing", "the key cannot be used"),
        (authority.pem.as_bytes(), other.as_bytes(), "the certificate and its key cannot be used"),
        (
            b"-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n",
            other.as_bytes(),
            "the certificate cannot",
        ),
    ];
    for (certificate, key, want) in cases {
        let error = Tls::from_pem(certificate, key, authority.pem.as_bytes()).unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
    }
    let missing = Path::new("/nonexistent/cert.pem");
    let error = Tls::load(missing, missing, missing).unwrap_err().to_string();
    assert!(error.contains("/nonexistent/cert.pem"), "{error}");
    // The debug output must not contain keys.
    assert!(!format!("{:?}", host(&authority, "x")).to_ascii_lowercase().contains("key"));
}

#[test]
fn nothing_is_encrypted_before_both_sides_are_authenticated() {
    let mut conn = Conn::client(&host(&Authority::new(), "x"), Some("x")).unwrap();
    let (mut own, mut sealed) = (Outgoing::default(), Outgoing::default());
    for _ in 0..8 {
        let (_, step) = conn.step(&mut [], &mut own, &mut |_| (), Some((b"secret", &mut sealed)));
        assert_ne!(step.unwrap(), Step::Open);
    }
    assert!(sealed.bytes().is_empty());
    assert!(!own.bytes().windows(6).any(|bytes| bytes == b"secret"));
}

/// Returns the provider `ring` with one cipher suite.
fn only(suite: rustls::CipherSuite) -> Arc<CryptoProvider> {
    let mut provider = rustls::crypto::ring::default_provider();
    provider.cipher_suites.retain(|known| known.suite() == suite);
    Arc::new(provider)
}

#[test]
fn provider_of_the_caller_is_used() {
    use rustls::CipherSuite::{
        TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256,
    };
    let authority = Authority::new();
    let (certificate, key) = authority.issue("127.0.0.1");
    let by = |suite| {
        let (provider, authorities) = (only(suite), authority.pem.as_bytes());
        Tls::with_provider(provider, certificate.as_bytes(), key.as_bytes(), authorities)
    };
    let (aes, chacha) = (by(TLS13_AES_256_GCM_SHA384).unwrap(), by(TLS13_CHACHA20_POLY1305_SHA256).unwrap());
    assert!(!aes.is_fips(), "ring is not certified");
    for tls in [&aes, &chacha] {
        let (here, there) = shake(sockets(), (tls, tls));
        assert!(here.is_ok() && there.is_ok());
    }
    let (_, there) = refused(&aes, &chacha);
    assert!(there.contains("NoCipherSuitesInCommon"), "{there}");
    // A suite of TLS 1.2 only.
    let error = by(TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256).unwrap_err().to_string();
    assert!(error.starts_with("the provider of cryptography cannot be used"), "{error}");
}
