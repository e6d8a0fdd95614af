//! Ownership of a guest after a handover that was cut at the worst moment, decided by a real etcd.
//! There are never two owners, and the owner is unknown only while the etcd is out of reach.

use crate::authority::Authority;
use crate::etcd::{self, Etcd, Slow};
use crate::support::{
    Folder, Run, beside, can_track, code, document, errors, finish, kinds, print_line, spawn, vmferry,
    wait_for,
};
use rustix::process::Signal;
use serde_json::Value;
use std::net::TcpListener;
use std::process::Child;
use std::time::Duration;
use vmferry_engine::Uri;
use vmferry_testkit_peers::link::{Direction, Harm, Proxy, Rule};

/// Cuts at the commit of a precopy or postcopy migration: the commit still arrives
/// (`CutBehindCommit`), or it does not.
const CUTS: [Harm; 2] = [Harm::CutBehindCommit, Harm::CutAllAtCommit];
const MODES: [&str; 2] = ["precopy", "postcopy"];

/// Returns an etcd; `None` if there is none or no guest can be moved. The calling test is skipped
/// then.
fn an_etcd() -> Option<Etcd> {
    can_track().then(etcd::start).flatten()
}

/// Arguments with which a precopy migration ends, however much the guest writes.
const ENDS: [&str; 6] = ["--max-bandwidth", "40M/s", "--timeout", "2s", "--on-timeout", "switch"];

struct Pair {
    source: Run,
    target: Run,
    /// Address to which the source connects.
    uri: String,
    proxy: Proxy,
    _folder: Folder,
}

impl Pair {
    /// Starts source and target with an arbiter each, and a proxy that cuts the link at the commit.
    fn new(kind: &str, arbiters: [&str; 2], harm: Option<Harm>) -> Self {
        Self::with_target(kind, arbiters, "10s", harm)
    }

    /// Begins a precopy migration that ends within two seconds, and stops the etcd when the
    /// migration has begun.
    fn begun_without(&self, etcd: &Etcd) -> Child {
        self.begun(|| self.migrate(&ENDS), || etcd.signal(Signal::STOP).unwrap())
    }

    /// Begins the precopy migration that `migrate` starts. The migration cannot end before
    /// `meanwhile` has returned: its pages take minutes until then.
    fn begun(&self, migrate: impl FnOnce() -> Child, meanwhile: impl FnOnce()) -> Child {
        self.proxy.slow_pages(true);
        let child = migrate();
        let begun = |s: &Value| s["passes"].as_array().is_some_and(|all| !all.is_empty());
        self.source.wait("the first pass", |s| s["state"] == "precopy" && begun(s));
        meanwhile();
        self.proxy.slow_pages(false);
        child
    }

    /// Starts the pair with a target that gives up a silent source after `patience`.
    fn with_target(kind: &str, arbiters: [&str; 2], patience: &str, harm: Option<Harm>) -> Self {
        let folder = Folder::new();
        let at = folder.path("wire");
        let uri = format!("unix:{at}");
        let workload = ["--workload", crate::support::WORKLOAD, "--fence", arbiters[0]];
        let source = Run::start(kind, &folder, "source", &workload);
        source.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
        let incoming = ["--incoming", &uri, "--peer-timeout", patience, "--fence", arbiters[1]];
        let target = Run::start(kind, &folder, "target", &incoming);
        target.wait("the target listening", |s| s["vm"]["incoming"].is_string());
        let way = Direction { connection: 0, to_target: true };
        let proxy = Proxy::new(&Uri::Unix(at.into()), harm.map(|harm| Rule::on(way, 0, harm)));
        Self { source, target, uri: proxy.uri().to_string(), proxy, _folder: folder }
    }

    fn migrate(&self, more: &[&str]) -> Child {
        self.migrate_patiently("10s", more)
    }

    fn migrate_patiently(&self, peer_timeout: &str, more: &[&str]) -> Child {
        let args = ["migrate", "--api", &self.source.api, &self.uri, "--peer-timeout", peer_timeout];
        spawn(&[&args[..], more].concat())
    }

    /// Waits until one side runs the guest and the other never will. Returns whether the target
    /// runs it.
    fn one_owner(&mut self, what: &str) -> bool {
        let moved = wait_for("one owner", || {
            let (here, there) = (place(&self.source), place(&self.target));
            let (here_runs, there_runs) =
                (here.as_deref() == Some("running"), there.as_deref() == Some("running"));
            assert!(!(here_runs && there_runs), "{what}: it runs on both sides");
            if there_runs && matches!(here.as_deref(), None | Some("moved")) {
                Ok(true)
            } else if here_runs && there.is_none() {
                Ok(false)
            } else {
                Err(format!("{what}: source {here:?}, target {there:?}"))
            }
        });
        let owner = if moved { &self.target } else { &self.source };
        owner.wait("all of the guest", |s| s["vm"]["guest"]["corrupt"] == 0);
        owner.goes_on();
        owner.whole();
        moved
    }
}

/// Returns the place of the guest that the process reports; `None` once the process has ended.
fn place(run: &Run) -> Option<String> {
    run.status()?["vm"]["place"].as_str().map(str::to_owned)
}

#[test]
fn arbiter_decides_after_an_answer_is_lost_at_the_handover() {
    let Some(etcd) = an_etcd() else { return };
    let arbiter = etcd.arbiter();
    beside(kinds(), |kind| {
        for mode in MODES {
            for harm in CUTS {
                let what = format!("{kind}, {mode}, {harm:?}");
                let mut pair = Pair::new(kind, [&arbiter, &arbiter], Some(harm));
                let output = finish(pair.migrate(&["--mode", mode]));
                assert!(pair.proxy.harmed() > 0, "{what}: no commit was cut: {output:?}");
                let moved = pair.one_owner(&what);
                // The exit status and the text of the command name the owner.
                let (wanted, words) = if moved { (0, "completed") } else { (1, "stays at the source") };
                assert_eq!(code(&output), wanted, "{what}: {output:?}");
                let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), errors(&output));
                assert!(said.contains(words), "{what}: {said}");
                // A commit that did not arrive moves nothing. After one that arrived both sides may
                // claim, and one wins.
                assert!(!moved || harm == Harm::CutBehindCommit, "{what}");
                print_line(format!("{what}: {}", if moved { "target" } else { "source" }));
            }
        }
    });
}

/// Outage of the etcd at the handover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outage {
    /// The process is stopped, with received data in its sockets.
    Stopped,
    /// The process is killed and started again.
    Killed,
    /// Requests arrive, but the answers come too late.
    Late,
}

#[test]
fn guest_runs_nowhere_while_the_arbiter_is_unreachable_and_then_at_one_side() {
    let mut cases = Vec::new();
    for case in [
        (Outage::Stopped, Harm::CutBehindCommit),
        (Outage::Killed, Harm::CutAllAtCommit),
        (Outage::Late, Harm::CutBehindCommit),
    ] {
        let Some(etcd) = an_etcd() else { return };
        cases.push((etcd, case));
    }
    beside(cases, |(mut etcd, (outage, harm))| {
        let slow = Slow::before(&etcd);
        let what = format!("{outage:?}, {harm:?}");
        let arbiter = slow.arbiter();
        let mut pair = Pair::new("process", [&arbiter, &arbiter], Some(harm));
        let migrate = || pair.migrate(&[&ENDS[..], &["--reconnect-for", "1s"]].concat());
        let child = pair.begun(migrate, || match outage {
            Outage::Stopped => etcd.signal(Signal::STOP).unwrap(),
            Outage::Killed => etcd.kill().unwrap(),
            Outage::Late => slow.delay(Duration::from_millis(3500)),
        });
        let output = finish(child);
        assert_eq!(code(&output), 3, "{what}: {output:?}");
        assert!(errors(&output).contains("the arbiter is asked until it answers"), "{what}: {output:?}");
        let said = |s: &serde_json::Value| s["progress"]["fence"].as_str().unwrap_or_default().to_owned();
        let status =
            pair.source.wait("not knowing", |s| s["state"] == "unknown" && said(s).contains("no answer"));
        assert!(status["outcome"].is_null() && said(&status).contains("key /vmferry/"), "{what}: {status}");
        assert_ne!(place(&pair.target).as_deref(), Some("running"), "{what}");
        assert_eq!(code(&vmferry(&["status", "--api", &pair.source.api])), 3);
        for (command, words) in [
            (&["recover", "--take"][..], "the guest may run at the target"),
            (&["cancel"], "too late to cancel"),
            (&["quit"], "decide with recover"),
        ] {
            let output = vmferry(&[command, &["--api", &pair.source.api]].concat());
            assert!(code(&output) == 1 && errors(&output).contains(words), "{what}: {output:?}");
        }
        if harm == Harm::CutBehindCommit {
            // The target has the commit and the whole guest, but must not run it without an answer.
            pair.target.wait("not knowing there", |s| s["state"] == "unknown");
            assert_eq!(code(&vmferry(&["status", "--api", &pair.target.api])), 3);
        }
        match outage {
            Outage::Stopped => etcd.signal(Signal::CONT).unwrap(),
            Outage::Killed => etcd.start_again().unwrap(),
            Outage::Late => slow.delay(Duration::ZERO),
        }
        let moved = pair.one_owner(&what);
        print_line(format!("fence {what}: {}", if moved { "target" } else { "source" }));
    });
}

/// The target gives the guest back if it gets no answer while the link holds.
#[test]
fn target_that_cannot_claim_gives_the_guest_back() {
    let Some(etcd) = an_etcd() else { return };
    beside(MODES, |mode| {
        // Only the target loses the arbiter, after it has checked the register.
        let slow = Slow::before(&etcd);
        // After the handover the source is silent, so the target must tolerate silence for the
        // duration of three attempts.
        let mut pair = Pair::with_target("process", [&etcd.arbiter(), &slow.arbiter()], "60s", None);
        let slowly = ["--mode", "hybrid", "--max-bandwidth", "30M/s", "--reconnect-for", "5s"];
        let migrate = || pair.migrate_patiently("60s", &slowly);
        let child = pair.begun(migrate, || slow.delay(Duration::from_secs(30)));
        if mode == "postcopy" {
            assert_eq!(code(&vmferry(&["switch", "--api", &pair.source.api])), 0);
        }
        let output = finish(child);
        assert_eq!(code(&output), 1, "{output:?}");
        // The target gives the guest back after three attempts.
        assert!(errors(&output).contains("the guest was not started on the target"), "{output:?}");
        assert!(!pair.one_owner(mode));
    });
}

/// A process that was stopped between its claim and the answer learns the owner before it acts.
#[test]
fn process_that_was_stopped_does_not_run_a_guest_of_the_peer() {
    let (Some(one), Some(other)) = (an_etcd(), an_etcd()) else { return };
    beside([("target", one), ("source", other)], |(stopped, etcd)| {
        let arbiter = etcd.arbiter();
        let mut pair = Pair::new("process", [&arbiter, &arbiter], Some(Harm::CutBehindCommit));
        let child = pair.begun_without(&etcd);
        let side = if stopped == "target" { &pair.target } else { &pair.source };
        side.wait("not knowing", |s| s["state"] == "unknown");
        side.signal(Signal::STOP);
        etcd.signal(Signal::CONT).unwrap();
        // Either side may have won by now: the claim of the stopped one may be granted, too.
        let other = if stopped == "target" { &pair.source } else { &pair.target };
        // If the target was stopped, the source waits for the message that the guest runs.
        let given = |status: &Value| {
            let answer = status["progress"]["fence"].as_str();
            answer.is_some_and(|answer| answer.contains("has given it to the target"))
        };
        wait_for("the other side's answer", || match other.status() {
            Some(status) if status["state"] == "unknown" && !given(&status) => Err(status),
            _ => Ok(()),
        });
        let other_runs = place(other).as_deref() == Some("running");
        side.signal(Signal::CONT);
        finish(child);
        let moved = pair.one_owner(stopped);
        let won = if moved == (stopped == "source") { "the other" } else { "the stopped one" };
        assert!(!other_runs || won == "the other", "{stopped} was stopped");
        print_line(format!("fence, {stopped} stopped: {won} has the guest"));
    });
}

/// Each request takes 4 s at the two members that do not answer, and each side makes several
/// requests.
#[test]
fn migration_succeeds_when_the_first_two_members_never_answer() {
    let Some(etcd) = an_etcd() else { return };
    let silent = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let ports = silent.iter().map(|silent| silent.local_addr().unwrap().port()).chain([etcd.port()]);
    let members: Vec<_> = ports.map(|port| format!("http://127.0.0.1:{port}")).collect();
    let arbiter = format!("etcd:{}", members.join(","));
    let mut pair = Pair::new("process", [&arbiter, &arbiter], None);
    let output = finish(pair.migrate(&[]));
    assert_eq!(code(&output), 0, "{output:?}");
    assert!(pair.one_owner("two silent members"));
}

#[test]
fn different_arbiters_are_refused_before_the_migration() {
    let (Some(etcd), Some(other)) = (an_etcd(), an_etcd()) else { return };
    let folder = Folder::new();
    let source = Run::source("process", &folder);
    let (plain, plain_uri) = Run::target("process", &folder, "plain", "tcp:127.0.0.1:0");
    let more = ["--incoming", "tcp:127.0.0.1:0", "--fence", &etcd.arbiter()];
    let with_arbiter = Run::start("process", &folder, "fenced", &more);
    let status = with_arbiter.wait("the target listening", |s| s["vm"]["incoming"].is_string());
    let arbiter_uri = status["vm"]["incoming"].as_str().unwrap();
    let prefixed = format!("{},prefix=/elsewhere", etcd.arbiter());
    let absent = "etcd:http://127.0.0.1:1".to_owned();
    let refused = |uri: &str, arbiter: Option<&str>, words: &str| {
        let more: Vec<&str> = arbiter.map_or(vec![], |arbiter| vec!["--fence", arbiter]);
        let output = source.migrate(uri, &more);
        assert_eq!(code(&output), 1, "{output:?}");
        assert!(errors(&output).contains(words), "{words}: {output:?}");
        source.goes_on();
    };
    refused(&plain_uri, Some(&etcd.arbiter()), "do not use the same arbiter");
    refused(arbiter_uri, None, "do not use the same arbiter");
    refused(arbiter_uri, Some(&prefixed), "do not use the same arbiter");
    refused(arbiter_uri, Some(&other.arbiter()), "this is not the etcd that the source uses");
    refused(arbiter_uri, Some(&absent), "the arbiter cannot be used");
    refused(arbiter_uri, Some("etcd:http://192.0.2.1:2379"), "use https, or --insecure");
    let output = source.migrate(arbiter_uri, &["--fence", "consul:x"]);
    assert!(code(&output) == 2 && errors(&output).contains("is not an arbiter"), "{output:?}");
    // Both targets still wait for a guest.
    plain.wait("the target waiting", |s| s["vm"]["place"] == "awaited");
    let output = source.migrate(arbiter_uri, &["--fence", &etcd.arbiter(), "--verify"]);
    assert_eq!(code(&output), 0, "{output:?}");
    with_arbiter.goes_on();
    with_arbiter.whole();
}

/// After the attempts have ended, the register limits the operator's decision.
#[test]
fn operator_can_take_the_guest_only_if_the_arbiter_permits() {
    let Some(etcd) = an_etcd() else { return };
    let arbiter = etcd.arbiter();
    let mut pair = Pair::new("process", [&arbiter, &arbiter], Some(Harm::CutBehindCommit));
    let child = pair.begun_without(&etcd);
    pair.source.wait("not knowing", |s| s["state"] == "unknown");
    let recover = |what: &str| vmferry(&["recover", "--api", &pair.source.api, what]);
    assert_eq!(code(&recover("--abandon")), 0);
    let output = finish(child);
    assert!(
        code(&output) == 3 && errors(&output).contains("With `--fence`, `--take` is refused unless"),
        "{output:?}"
    );
    pair.source.wait("the end of asking", |s| s["vm"]["place"] == "unknown");
    // The source may have the only copy, which must not end later for an early signal.
    pair.source.signal(Signal::INT);
    let output = recover("--take");
    assert!(code(&output) == 1 && errors(&output).contains("the guest may run at the target"), "{output:?}");
    etcd.signal(Signal::CONT).unwrap();
    // The arbiter may have given the guest to the source before.
    wait_for("the target's answer", || match place(&pair.target) {
        Some(place) if place != "running" => Err(place),
        _ => Ok(()),
    });
    let output = recover("--take");
    if place(&pair.target).is_some() {
        assert!(
            code(&output) == 1 && errors(&output).contains("must not run at the source as well"),
            "{output:?}"
        );
        pair.target.goes_on();
        assert_eq!(code(&recover("--abandon")), 0);
    } else {
        assert_eq!(code(&output), 0, "{output:?}");
        pair.source.goes_on();
        // The owner is known now.
        let status = vmferry(&["status", "--api", &pair.source.api]);
        assert_eq!((code(&status), &document(&status)["state"]), (0, &"failed".into()), "{status:?}");
    }
    pair.one_owner("an operator");
}

/// An etcd with https and client certificates, used by confined processes: `run` may read its own
/// credentials, and needs no file that `migrate` was given.
#[test]
fn arbiter_with_certificates_is_reached_from_the_sandbox() {
    if !can_track() {
        return;
    }
    let (folder, authority) = (Folder::new(), Authority::new());
    let (certificate, key) = authority.issue("127.0.0.1");
    let started = Etcd::start_encrypted(&certificate, &key, &authority.pem);
    let Some(etcd) = etcd::or_skip(started) else { return };
    let arbiter = |name: &str| {
        let (certificate, key) = authority.issue(name);
        let files = [("ca", &authority.pem), ("cert", &certificate), ("key", &key)].map(|(what, text)| {
            let path = folder.path(&format!("{name}.{what}"));
            std::fs::write(&path, text).unwrap();
            format!("{what}={path}")
        });
        format!("etcd:https://127.0.0.1:{},{}", etcd.port(), files.join(","))
    };
    let source = Run::source("process", &folder);
    let more = ["--incoming", "tcp:127.0.0.1:0", "--fence", &arbiter("target.example")];
    let target = Run::start("process", &folder, "target", &more);
    let status = target.wait("the target listening", |s| s["vm"]["incoming"].is_string());
    let uri = status["vm"]["incoming"].as_str().unwrap();
    let missing = arbiter("source.example").replace("source.example.key", "absent.key");
    let refused = source.migrate(uri, &["--fence", &missing]);
    assert!(code(&refused) == 1 && errors(&refused).contains("absent.key"), "{refused:?}");
    let output = source.migrate(uri, &["--fence", &arbiter("source.example")]);
    assert_eq!(code(&output), 0, "{output:?}");
    target.goes_on();
}
