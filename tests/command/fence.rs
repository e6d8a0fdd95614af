//! Who owns a guest whose handover was cut at the worst moment, decided by a real etcd: never two, and never nobody for longer than
//! the etcd is out of reach.

use crate::authority::Authority;
use crate::etcd::{self, Etcd, Slow};
use crate::support::{
    Folder, Run, beside, can_track, code, errors, finish, kinds, say, spawn, vmferry, wait_for,
};
use rustix::process::Signal;
use serde_json::Value;
use std::net::TcpListener;
use std::process::Child;
use std::time::Duration;
use vmferry_engine::Uri;
use vmferry_testkit_peers::link::{Harm, Proxy, Rule, Way};

/// The commit of a precopy, or a postcopy, is cut: it still arrives (`CutBehindCommit`), or it does not.
const CUTS: [Harm; 2] = [Harm::CutBehindCommit, Harm::CutAllAtCommit];
const MODES: [&str; 2] = ["precopy", "postcopy"];

/// `None`, and says why, where there is none, or no guest can be moved.
fn an_etcd() -> Option<Etcd> {
    can_track().then(etcd::start).flatten()
}

/// A precopy with these arguments ends, however much the guest writes.
const ENDS: [&str; 6] = ["--max-bandwidth", "40M/s", "--timeout", "2s", "--on-timeout", "switch"];

struct Pair {
    source: Run,
    target: Run,
    /// Where the source goes.
    uri: String,
    proxy: Proxy,
    _folder: Folder,
}

impl Pair {
    /// Two sides with a fence each, and a link between them that is cut at the commit.
    fn new(kind: &str, fences: [&str; 2], harm: Option<Harm>) -> Self {
        Self::with_target(kind, fences, "10s", harm)
    }

    /// A precopy that ends within two seconds, and an etcd that was stopped when it had begun.
    fn begun_without(&self, etcd: &Etcd) -> Child {
        self.begun(|| self.migrate(&ENDS), || etcd.signal(Signal::STOP).unwrap())
    }

    /// A precopy that `migrate` begins. It cannot end before `meanwhile` has returned: its pages
    /// take minutes until then.
    fn begun(&self, migrate: impl FnOnce() -> Child, meanwhile: impl FnOnce()) -> Child {
        self.proxy.slow_pages(true);
        let child = migrate();
        let begun = |s: &Value| s["passes"].as_array().is_some_and(|all| !all.is_empty());
        self.source.wait("the first pass", |s| s["state"] == "precopy" && begun(s));
        meanwhile();
        self.proxy.slow_pages(false);
        child
    }

    /// The same, with a target that loses patience with a silent source only after so long.
    fn with_target(kind: &str, fences: [&str; 2], patience: &str, harm: Option<Harm>) -> Self {
        let folder = Folder::new();
        let at = folder.path("wire");
        let uri = format!("unix:{at}");
        let workload = ["--workload", crate::support::WORKLOAD, "--fence", fences[0]];
        let source = Run::start(kind, &folder, "source", &workload);
        source.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
        let incoming = ["--incoming", &uri, "--peer-timeout", patience, "--fence", fences[1]];
        let target = Run::start(kind, &folder, "target", &incoming);
        target.wait("the target listening", |s| s["vm"]["incoming"].is_string());
        let way = Way { connection: 0, to_target: true };
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

    /// Waits until one side runs the guest and the other never will; says whether it is the target.
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

/// Where the guest is, as a side's process says; `None` once that has ended.
fn place(run: &Run) -> Option<String> {
    run.status()?["vm"]["place"].as_str().map(str::to_owned)
}

#[test]
fn an_answer_that_is_lost_at_the_handover_is_asked_of_the_fence() {
    let Some(etcd) = an_etcd() else { return };
    let fence = etcd.fence();
    beside(kinds(), |kind| {
        for mode in MODES {
            for harm in CUTS {
                let what = format!("{kind}, {mode}, {harm:?}");
                let mut pair = Pair::new(kind, [&fence, &fence], Some(harm));
                let output = finish(pair.migrate(&["--mode", mode]));
                assert!(pair.proxy.harmed() > 0, "{what}: no commit was cut: {output:?}");
                let moved = pair.one_owner(&what);
                // Whoever asked is told where it is: by its exit status, and in words.
                let (wanted, words) = if moved { (0, "completed") } else { (1, "stays at the source") };
                assert_eq!(code(&output), wanted, "{what}: {output:?}");
                let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), errors(&output));
                assert!(said.contains(words), "{what}: {said}");
                // A commit that did not arrive moves nothing; after one that did both may claim, and one wins.
                assert!(!moved || harm == Harm::CutBehindCommit, "{what}");
                say(format!("{what}: {}", if moved { "target" } else { "source" }));
            }
        }
    });
}

/// How the fence is out of reach at the handover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outage {
    /// Its process stands still, with what was sent to it in its sockets.
    Stopped,
    /// It is killed, and started again.
    Killed,
    /// What it answers comes too late; what it is told comes.
    Late,
}

#[test]
fn while_the_fence_is_out_of_reach_nobody_runs_and_then_one_does() {
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
        let fence = slow.fence();
        let mut pair = Pair::new("process", [&fence, &fence], Some(harm));
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
            // The target has the commit and all of the guest, and does not run it: nobody has said that it may.
            pair.target.wait("not knowing there", |s| s["state"] == "unknown");
            assert_eq!(code(&vmferry(&["status", "--api", &pair.target.api])), 3);
        }
        match outage {
            Outage::Stopped => etcd.signal(Signal::CONT).unwrap(),
            Outage::Killed => etcd.start_again().unwrap(),
            Outage::Late => slow.delay(Duration::ZERO),
        }
        let moved = pair.one_owner(&what);
        say(format!("fence {what}: {}", if moved { "target" } else { "source" }));
    });
}

/// Without an answer for as long as the link holds the guest goes back by the target's own word.
#[test]
fn a_target_that_cannot_claim_gives_the_guest_back() {
    let Some(etcd) = an_etcd() else { return };
    beside(MODES, |mode| {
        // Only the target's way to the fence is lost, after the register was looked for.
        let slow = Slow::before(&etcd);
        // A source that has handed over is silent: the link must hold for as long as three attempts take.
        let mut pair = Pair::with_target("process", [&etcd.fence(), &slow.fence()], "60s", None);
        let slowly = ["--mode", "hybrid", "--max-bandwidth", "30M/s", "--reconnect-for", "5s"];
        let migrate = || pair.migrate_patiently("60s", &slowly);
        let child = pair.begun(migrate, || slow.delay(Duration::from_secs(30)));
        if mode == "postcopy" {
            assert_eq!(code(&vmferry(&["switch", "--api", &pair.source.api])), 0);
        }
        let output = finish(child);
        assert_eq!(code(&output), 1, "{output:?}");
        // By its own word after three attempts.
        assert!(errors(&output).contains("the guest was not started on the target"), "{output:?}");
        assert!(!pair.one_owner(mode));
    });
}

/// A side that stands still between being told and doing it finds out what became of the guest meanwhile.
#[test]
fn a_side_that_was_stopped_for_long_does_not_run_what_the_other_has() {
    let (Some(one), Some(other)) = (an_etcd(), an_etcd()) else { return };
    beside([("target", one), ("source", other)], |(stopped, etcd)| {
        let fence = etcd.fence();
        let mut pair = Pair::new("process", [&fence, &fence], Some(Harm::CutBehindCommit));
        let child = pair.begun_without(&etcd);
        let side = if stopped == "target" { &pair.target } else { &pair.source };
        side.wait("not knowing", |s| s["state"] == "unknown");
        side.signal(Signal::STOP);
        etcd.signal(Signal::CONT).unwrap();
        // Either side may have won by now: what the one that stands still had asked may be granted too.
        let other = if stopped == "target" { &pair.source } else { &pair.target };
        // If it was the target, the source waits to hear that the guest runs there.
        let given = |status: &Value| {
            let ruling = status["progress"]["fence"].as_str();
            ruling.is_some_and(|ruling| ruling.contains("has given it to the target"))
        };
        wait_for("the other side's ruling", || match other.status() {
            Some(status) if status["state"] == "unknown" && !given(&status) => Err(status),
            _ => Ok(()),
        });
        let other_runs = place(other).as_deref() == Some("running");
        side.signal(Signal::CONT);
        finish(child);
        let moved = pair.one_owner(stopped);
        let won = if moved == (stopped == "source") { "the other" } else { "the one that stood still" };
        assert!(!other_runs || won == "the other", "{stopped} stood still");
        say(format!("fence, {stopped} stopped: {won} has the guest"));
    });
}

/// Each request that the two members do not answer takes 4 s, and each side makes several.
#[test]
fn migration_succeeds_when_the_first_two_members_never_answer() {
    let Some(etcd) = an_etcd() else { return };
    let silent = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let ports = silent.iter().map(|silent| silent.local_addr().unwrap().port()).chain([etcd.port()]);
    let members: Vec<_> = ports.map(|port| format!("http://127.0.0.1:{port}")).collect();
    let fence = format!("etcd:{}", members.join(","));
    let mut pair = Pair::new("process", [&fence, &fence], None);
    let output = finish(pair.migrate(&[]));
    assert_eq!(code(&output), 0, "{output:?}");
    assert!(pair.one_owner("two silent members"));
}

#[test]
fn sides_that_would_not_ask_the_same_fence_are_told_apart_before_anything_moves() {
    let (Some(etcd), Some(other)) = (an_etcd(), an_etcd()) else { return };
    let folder = Folder::new();
    let source = Run::source("process", &folder);
    let (plain, plain_uri) = Run::target("process", &folder, "plain", "tcp:127.0.0.1:0");
    let more = ["--incoming", "tcp:127.0.0.1:0", "--fence", &etcd.fence()];
    let fenced = Run::start("process", &folder, "fenced", &more);
    let status = fenced.wait("the target listening", |s| s["vm"]["incoming"].is_string());
    let fenced_uri = status["vm"]["incoming"].as_str().unwrap();
    let prefixed = format!("{},prefix=/elsewhere", etcd.fence());
    let nobody = "etcd:http://127.0.0.1:1".to_owned();
    let refused = |uri: &str, fence: Option<&str>, words: &str| {
        let more: Vec<&str> = fence.map_or(vec![], |fence| vec!["--fence", fence]);
        let output = source.migrate(uri, &more);
        assert_eq!(code(&output), 1, "{output:?}");
        assert!(errors(&output).contains(words), "{words}: {output:?}");
        source.goes_on();
    };
    refused(&plain_uri, Some(&etcd.fence()), "do not have the same fence");
    refused(fenced_uri, None, "do not have the same fence");
    refused(fenced_uri, Some(&prefixed), "do not have the same fence");
    refused(fenced_uri, Some(&other.fence()), "this is not the etcd that the source uses");
    refused(fenced_uri, Some(&nobody), "the fence cannot be used");
    refused(fenced_uri, Some("etcd:http://192.0.2.1:2379"), "say --insecure");
    let output = source.migrate(fenced_uri, &["--fence", "consul:x"]);
    assert!(code(&output) == 2 && errors(&output).contains("is no arbiter"), "{output:?}");
    // After all that both still wait for a guest.
    plain.wait("the target waiting", |s| s["vm"]["place"] == "awaited");
    let output = source.migrate(fenced_uri, &["--fence", &etcd.fence(), "--verify"]);
    assert_eq!(code(&output), 0, "{output:?}");
    fenced.goes_on();
    fenced.whole();
}

/// Once nobody asks any more the register decides what a person may do, and what the register says is theirs to write.
#[test]
fn a_person_takes_only_what_the_fence_gives() {
    let Some(etcd) = an_etcd() else { return };
    let fence = etcd.fence();
    let mut pair = Pair::new("process", [&fence, &fence], Some(Harm::CutBehindCommit));
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
    let output = recover("--take");
    assert!(code(&output) == 1 && errors(&output).contains("the guest may run at the target"), "{output:?}");
    etcd.signal(Signal::CONT).unwrap();
    // Its source may have been granted it before, or not.
    wait_for("the target's ruling", || match place(&pair.target) {
        Some(place) if place != "running" => Err(place),
        _ => Ok(()),
    });
    let output = recover("--take");
    if place(&pair.target).is_some() {
        assert!(code(&output) == 1 && errors(&output).contains("must not run at the source as well"), "{output:?}");
        pair.target.goes_on();
        assert_eq!(code(&recover("--abandon")), 0);
    } else {
        assert_eq!(code(&output), 0, "{output:?}");
        pair.source.goes_on();
    }
    pair.one_owner("a person");
}

/// By https and with a certificate of its own, on processes that are confined: `run` may read the files that it was given, and needs none of
/// those that `migrate` was.
#[test]
fn a_fence_with_certificates_is_reached_from_within_the_sandbox() {
    if !can_track() {
        return;
    }
    let (folder, authority) = (Folder::new(), Authority::new());
    let (certificate, key) = authority.issue("127.0.0.1");
    let started = Etcd::start_encrypted(&certificate, &key, &authority.pem);
    let Some(etcd) = etcd::or_skip(started) else { return };
    let fence = |name: &str| {
        let (certificate, key) = authority.issue(name);
        let files = [("ca", &authority.pem), ("cert", &certificate), ("key", &key)].map(|(what, text)| {
            let path = folder.path(&format!("{name}.{what}"));
            std::fs::write(&path, text).unwrap();
            format!("{what}={path}")
        });
        format!("etcd:https://127.0.0.1:{},{}", etcd.port(), files.join(","))
    };
    let source = Run::source("process", &folder);
    let more = ["--incoming", "tcp:127.0.0.1:0", "--fence", &fence("target.example")];
    let target = Run::start("process", &folder, "target", &more);
    let status = target.wait("the target listening", |s| s["vm"]["incoming"].is_string());
    let uri = status["vm"]["incoming"].as_str().unwrap();
    let missing = fence("source.example").replace("source.example.key", "nobody.key");
    let refused = source.migrate(uri, &["--fence", &missing]);
    assert!(code(&refused) == 1 && errors(&refused).contains("nobody.key"), "{refused:?}");
    let output = source.migrate(uri, &["--fence", &fence("source.example")]);
    assert_eq!(code(&output), 0, "{output:?}");
    target.goes_on();
}
