//! Tests of the register in a real etcd, and with other servers in its place.

use super::*;
use authority::Authority;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Barrier;
use std::time::Instant;

#[expect(dead_code, reason = "the command's tests use the rest")]
#[path = "../../../../tests/command/etcd.rs"]
mod etcd_process;

#[path = "../../../engine/src/channel/tls/authority.rs"]
mod authority;

fn at(port: u16) -> Etcd {
    Etcd::new(vec![format!("http://127.0.0.1:{port}")], "/test/".into(), Access::default()).unwrap()
}

fn id(number: u8) -> MigrationId {
    MigrationId([number; 16])
}

const TARGET_OWNS: Ownership = Ownership::Target { runs: false };
const TARGET_RUNS: Ownership = Ownership::Target { runs: true };

#[test]
fn a_register_goes_one_way() {
    let Some(process) = etcd_process::start() else { return };
    let etcd = at(process.port());
    let missing = etcd.request(id(1), ArbiterRequest::Claim(Side::Source));
    assert!(
        matches!(&missing, Err(ArbiterError::NoRegister(why)) if why.contains("no key /test/0101")),
        "{missing:?}"
    );
    for request in [
        ArbiterRequest::Look,
        ArbiterRequest::Claim(Side::Target),
        ArbiterRequest::Runs,
        ArbiterRequest::GiveBack,
    ] {
        assert!(matches!(etcd.request(id(1), request), Err(ArbiterError::NoRegister(_))), "{request:?}");
    }
    etcd.open(id(1)).unwrap();
    assert!(matches!(etcd.open(id(1)), Err(ArbiterError::NoRegister(_))), "opened once");
    let said = |request, owner| assert_eq!(etcd.request(id(1), request), Ok(owner), "{request:?}");
    said(ArbiterRequest::Look, Ownership::Open);
    said(ArbiterRequest::Runs, Ownership::Open);
    said(ArbiterRequest::Claim(Side::Target), TARGET_OWNS);
    said(ArbiterRequest::Claim(Side::Target), TARGET_OWNS);
    said(ArbiterRequest::Claim(Side::Source), TARGET_OWNS);
    said(ArbiterRequest::Runs, TARGET_RUNS);
    said(ArbiterRequest::Claim(Side::Source), TARGET_RUNS);
    etcd.open(id(2)).unwrap();
    for (request, owner) in [
        (ArbiterRequest::Claim(Side::Target), TARGET_OWNS),
        (ArbiterRequest::GiveBack, Ownership::Source),
        (ArbiterRequest::Claim(Side::Target), Ownership::Source),
        (ArbiterRequest::Runs, Ownership::Source),
        (ArbiterRequest::Look, Ownership::Source),
    ] {
        assert_eq!(etcd.request(id(2), request), Ok(owner), "{request:?}");
    }
    // Registers are independent, and so are prefixes.
    said(ArbiterRequest::Look, TARGET_RUNS);
    let elsewhere =
        Etcd::new(vec![format!("http://127.0.0.1:{}", process.port())], "/other/".into(), Access::default())
            .unwrap();
    assert!(matches!(elsewhere.request(id(1), ArbiterRequest::Look), Err(ArbiterError::NoRegister(_))));
    assert_ne!(elsewhere.name(), etcd.name());
    etcd.close(id(1)).unwrap();
    assert!(
        matches!(etcd.request(id(1), ArbiterRequest::Claim(Side::Source)), Err(ArbiterError::NoRegister(_))),
        "a deleted register is not opened again"
    );
    // A value that an operator writes by hand counts if it is valid.
    let put = json!({ "key": BASE64.encode(etcd.key(id(1))), "value": BASE64.encode("Target\u{1b}") });
    etcd.post("put", &put).unwrap();
    let odd = etcd.request(id(1), ArbiterRequest::Claim(Side::Source));
    assert!(
        matches!(&odd, Err(ArbiterError::NoRegister(why)) if why.contains("holds 'Target\u{fffd}'")),
        "{odd:?}"
    );
}

#[test]
fn one_side_wins_of_concurrent_claims() {
    let Some(process) = etcd_process::start() else { return };
    let etcd = at(process.port());
    let mut won = [0, 0];
    for number in 0..40 {
        etcd.open(id(number)).unwrap();
        let start = Barrier::new(6);
        let claim = |side| {
            start.wait();
            etcd.request(id(number), ArbiterRequest::Claim(side)).unwrap()
        };
        let answers: Vec<Ownership> = std::thread::scope(|scope| {
            let sides = [Side::Source, Side::Target].into_iter().cycle().take(6);
            let threads: Vec<_> = sides.map(|side| scope.spawn(move || claim(side))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
        won[usize::from(answers[0] == TARGET_OWNS)] += 1;
    }
    vmferry_testkit::print_line(format!(
        "etcd: of 40 races the source won {}, the target {}",
        won[0], won[1]
    ));
}

/// Returns an etcd at a server that answers every connection with `bytes`, and with `more` until
/// the client closes.
fn answering(bytes: &'static [u8], more: &'static [u8]) -> Etcd {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let mut request = [0; 4096];
                let _ = stream.read(&mut request);
                let _ = stream.write_all(bytes);
                while !more.is_empty() && stream.write_all(more).is_ok() {}
            });
        }
    });
    at(port)
}

#[test]
fn foreign_answers_decide_nothing_and_cost_bounded_time_and_memory() {
    const OK: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n";
    let answers: [(&str, &'static [u8], &'static [u8]); 12] = [
        ("nothing", b"", b""),
        ("no HTTP", b"SSH-2.0-OpenSSH_9.2\r\n", b""),
        ("no JSON", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", b""),
        ("other JSON", b"HTTP/1.1 200 OK\r\nContent-Length: 18\r\n\r\n{\"succeeded\":true}", b""),
        ("an error", b"HTTP/1.1 503 No\r\nContent-Length: 26\r\n\r\n{\"error\":\"no leader\\u001b\"}", b""),
        ("not there", b"HTTP/1.1 404 Not Found\r\nContent-Length: 19\r\n\r\n404 page not found\n", b""),
        (
            "elsewhere",
            b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
            b"",
        ),
        ("cut off", b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{\"header\":{},\"succeeded\":true", b""),
        ("endless header", b"HTTP/1.1 200 OK\r\nX: ", &[b'x'; 4096]),
        ("endless headers", b"HTTP/1.1 200 OK\r\n", b"A: b\r\nC: d\r\nE: f\r\nG: h\r\n"),
        ("endless body", OK, &[b'x'; 4096]),
        ("endless JSON", b"HTTP/1.1 200 OK\r\n\r\n{\"header\":{},\"succeeded\":true,\"x\":\"", &[b'x'; 4096]),
    ];
    for (what, bytes, more) in answers {
        let etcd = answering(bytes, more);
        let began = Instant::now();
        for request in [ArbiterRequest::Look, ArbiterRequest::Claim(Side::Source), ArbiterRequest::GiveBack] {
            match etcd.request(id(3), request) {
                Err(ArbiterError::Unreachable(why)) => {
                    assert!(why.len() < 2000 && !why.contains('\u{1b}'), "{what}: {why}");
                }
                other => panic!("{what}: {other:?}"),
            }
        }
        assert!(etcd.open(id(3)).is_err() && etcd.close(id(3)).is_err(), "{what}");
        assert!(began.elapsed() < vmferry_testkit::PATIENCE, "{what}: {:?}", began.elapsed());
    }
}

#[test]
fn silent_member_is_given_up_and_the_next_member_is_asked() {
    let Some(process) = etcd_process::start() else { return };
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let members = [silent.local_addr().unwrap().port(), 1, process.port()];
    let members = members.map(|port| format!("http://127.0.0.1:{port}")).to_vec();
    let began = Instant::now();
    let etcd = Etcd::new(members, "/test/".into(), Access::default()).unwrap();
    etcd.open(id(4)).unwrap();
    assert_eq!(etcd.request(id(4), ArbiterRequest::Claim(Side::Target)), Ok(TARGET_OWNS));
    assert!(began.elapsed() < vmferry_testkit::PATIENCE, "{:?}", began.elapsed());
    drop(TcpStream::connect(silent.local_addr().unwrap()));
}

/// A member has created the key, and its answer was lost.
#[test]
fn key_of_a_repeated_request_is_no_key_of_another_program() {
    let Some(process) = etcd_process::start() else { return };
    at(process.port()).open(id(7)).unwrap();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let members = [silent.local_addr().unwrap().port(), process.port()];
    let members = members.map(|port| format!("http://127.0.0.1:{port}")).to_vec();
    let etcd = Etcd::new(members, "/test/".into(), Access::default()).unwrap();
    etcd.open(id(7)).unwrap();
    // The second member is asked first now, so the request is not repeated.
    assert!(matches!(etcd.open(id(7)), Err(ArbiterError::NoRegister(_))));
}

/// Members that accept connections and never answer cost [`PATIENCE`] each, with the first request
/// only.
#[test]
fn silent_members_are_asked_only_with_the_first_request() {
    let Some(process) = etcd_process::start() else { return };
    let silent = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let ports = silent.iter().map(|silent| silent.local_addr().unwrap().port()).chain([process.port()]);
    let members = ports.map(|port| format!("http://127.0.0.1:{port}")).collect();
    let etcd = Etcd::new(members, "/test/".into(), Access::default()).unwrap();
    etcd.open(id(5)).unwrap();
    for (request, owner) in [
        (ArbiterRequest::Look, Ownership::Open),
        (ArbiterRequest::Claim(Side::Target), TARGET_OWNS),
        (ArbiterRequest::Runs, TARGET_RUNS),
        (ArbiterRequest::GiveBack, Ownership::Source),
    ] {
        assert_eq!(etcd.request(id(5), request), Ok(owner), "{request:?}");
    }
    etcd.close(id(5)).unwrap();
    for silent in silent {
        silent.set_nonblocking(true).unwrap();
        let asked = silent.incoming().take_while(Result::is_ok).count();
        assert_eq!(asked, 1, "a member that never answered was asked {asked} times");
    }
}

/// After a failure of the member that answered last, the next one in the list is asked.
#[test]
fn member_that_no_longer_answers_is_left_for_the_next() {
    let (Some(mut first), Some(second)) = (etcd_process::start(), etcd_process::start()) else { return };
    let members = [first.port(), second.port()].map(|port| format!("http://127.0.0.1:{port}")).to_vec();
    let etcd = Etcd::new(members, "/test/".into(), Access::default()).unwrap();
    // Two processes that form no cluster, to see which of them was asked.
    let opened_at = |port| at(port).request(id(6), ArbiterRequest::Look) == Ok(Ownership::Open);
    etcd.open(id(6)).unwrap();
    assert!(opened_at(first.port()) && !opened_at(second.port()));
    first.kill().unwrap();
    etcd.open(id(6)).unwrap();
    assert!(opened_at(second.port()));
    first.start_again().unwrap();
    etcd.close(id(6)).unwrap();
    assert!(opened_at(first.port()) && !opened_at(second.port()), "the second answered last");
}

/// Invalid certificates are refused before any request.
#[test]
fn files_that_are_no_certificates_are_refused() {
    let build = |ca: &[u8], own: Option<(&[u8], &[u8])>| {
        let own = own.map(|(cert, key)| (cert.to_vec(), key.to_vec()));
        let access = Access { ca: Some(ca.to_vec()), own, user: None };
        Etcd::new(vec!["https://127.0.0.1:1".into()], "/test/".into(), access)
    };
    let error = build(b"hello", None).unwrap_err();
    assert!(format!("{error:#}").contains("ca: it contains no certificate"), "{error:#}");
    let own = rcgen::generate_simple_self_signed(vec!["localhost".into()]).unwrap();
    let (cert, key) = (own.cert.pem(), own.signing_key.serialize_pem());
    assert!(build(cert.as_bytes(), Some((cert.as_bytes(), b"no key"))).is_err());
    assert!(build(cert.as_bytes(), Some((cert.as_bytes(), key.as_bytes()))).is_ok());
}

/// An etcd with https accepts clients with a certificate of its own authority only.
#[test]
fn etcd_with_client_certificates_accepts_ours() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let (certificate, key) = ours.issue("127.0.0.1");
    let started = etcd_process::Etcd::start_encrypted(&certificate, &key, &ours.pem);
    let Some(process) = etcd_process::or_skip(started) else { return };
    let access = |trusted: &Authority, issuer: Option<&Authority>| {
        let own = issuer.map(|issuer| issuer.issue("a.host.example"));
        let own = own.map(|(cert, key)| (cert.into_bytes(), key.into_bytes()));
        let access = Access { ca: Some(trusted.pem.clone().into_bytes()), own, user: None };
        Etcd::new(vec![format!("https://127.0.0.1:{}", process.port())], "/test/".into(), access).unwrap()
    };
    let etcd = access(&ours, Some(&ours));
    etcd.open(id(1)).unwrap();
    assert_eq!(etcd.request(id(1), ArbiterRequest::Claim(Side::Target)), Ok(TARGET_OWNS));
    for (foreign, why) in [
        (access(&theirs, Some(&ours)), "an etcd that is not trusted"),
        (access(&ours, Some(&theirs)), "a certificate that it does not know"),
        (access(&ours, None), "no certificate"),
    ] {
        let said = foreign.request(id(1), ArbiterRequest::Claim(Side::Source));
        assert!(matches!(said, Err(ArbiterError::Unreachable(_))), "{why}: {said:?}");
    }
    assert_eq!(etcd.request(id(1), ArbiterRequest::Look), Ok(TARGET_OWNS));
}

/// An etcd with users gives tokens that expire.
#[test]
fn expired_token_is_replaced_by_a_new_login() {
    let Some(process) = etcd_process::start() else { return };
    let root = at(process.port());
    let asked = |path: &str, body: Value| root.post_to(&root.endpoints[0], path, &body, None).unwrap();
    asked("auth/user/add", json!({ "name": "root", "password": "r" }));
    asked("auth/user/grant", json!({ "user": "root", "role": "root" }));
    asked("auth/user/add", json!({ "name": "host", "password": "secret" }));
    asked("auth/role/add", json!({ "name": "fence" }));
    let (from, to) = (BASE64.encode("/test/"), BASE64.encode("/test0"));
    let perm = json!({ "permType": "READWRITE", "key": from, "range_end": to });
    asked("auth/role/grant", json!({ "name": "fence", "perm": perm }));
    asked("auth/user/grant", json!({ "user": "host", "role": "fence" }));
    asked("auth/enable", json!({}));
    let login = |prefix: &str, password: &str| {
        let access = Access { user: Some(("host".into(), password.into())), ..Access::default() };
        Etcd::new(root.endpoints.clone(), prefix.into(), access).unwrap()
    };
    let etcd = login("/test/", "secret");
    etcd.open(id(1)).unwrap();
    assert_eq!(etcd.request(id(1), ArbiterRequest::Claim(Side::Source)), Ok(Ownership::Source));
    // A token that etcd does not know has the same effect as an expired one.
    *etcd.login.as_ref().unwrap().token() = Some("forgotten.1".into());
    assert_eq!(etcd.request(id(1), ArbiterRequest::Claim(Side::Target)), Ok(Ownership::Source));
    for (other, expected) in [
        (at(process.port()), "user name is empty"),
        (login("/test/", "wrong"), "as user host: 400 Bad Request: etcdserver: authentication failed"),
        (login("/elsewhere/", "secret"), "permission denied"),
    ] {
        let said = other.request(id(1), ArbiterRequest::Look);
        assert!(
            matches!(&said, Err(ArbiterError::Unreachable(why)) if why.contains(expected)),
            "{expected}: {said:?}"
        );
    }
}
