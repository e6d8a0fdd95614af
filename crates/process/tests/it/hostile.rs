//! Hostile targets of a postcopy migration.

use crate::rig::{is_stopped, running, whole};
use std::io::Write;
use std::ops::{Deref, DerefMut};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use vmferry_core::{PageIndex, RegionId};
use vmferry_engine::{BulkLimit, MigrationHandle, MigrationMode, MigrationState, Report, Settings, migrate};
use vmferry_process::ProcessGuest;
use vmferry_testkit::{PATIENCE, in_parallel, wait, wait_for};
use vmferry_testkit_peers::peer::{Listener, Target, answer};
use vmferry_wire::{
    MAX_AHEAD, MissingPages, PagingFigures, Refusal, RefusalCode, Request, ToSource, ToTarget, Token,
};

fn page(region: u32, page: u64, ahead: u16, again: bool) -> Request {
    Request::Page { region: RegionId(region), page: PageIndex(page), ahead, again }
}

/// Scripted hostile target, with what the source knows.
struct Liar<'a> {
    target: Target<'a>,
    /// Handle to the source's migration.
    handle: &'a MigrationHandle,
    /// True if the target recovers a link that it loses, so the test does not abandon the
    /// migration.
    returns: &'a AtomicBool,
}

impl<'a> Deref for Liar<'a> {
    type Target = Target<'a>;

    fn deref(&self) -> &Target<'a> {
        &self.target
    }
}

impl DerefMut for Liar<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.target
    }
}

impl Liar<'_> {
    /// Plays along until everything but the commit was sent.
    fn until_handed_over(&mut self) {
        self.accept(2);
        while !matches!(self.receive().unwrap(), ToTarget::LoadLazily { .. }) {}
    }

    /// Plays along until the target has the guest.
    fn until_running(&mut self) {
        self.until_handed_over();
        self.send(&ToSource::Ready { load_us: 1 });
        assert_eq!(self.receive(), Some(ToTarget::Commit));
        self.send(&ToSource::Running { start_us: 1, cpu_us: 1 });
        // Later messages take another channel than this one, and may arrive first.
        wait("the source to know that it runs", || self.handle.progress().runs_on_target);
    }

    fn send_request(&mut self, request: Request) {
        let _ = self.data[1].write_all(&request.encode());
    }

    /// Loses the link and recovers it up to the new control channel.
    fn until_back(&mut self) {
        self.until_running();
        self.back_after(|liar| {
            let _ = liar.control.shutdown(std::net::Shutdown::Both);
            liar.data.clear();
        });
    }

    /// Calls `lose`, which loses the link, and recovers the link up to the new control channel.
    ///
    /// The source opens the link when it is told to, so no time limit has to hold.
    fn back_after(&mut self, lose: impl FnOnce(&mut Self)) {
        self.returns.store(true, Ordering::Release);
        lose(self);
        wait("the source to wait for the operator", || self.handle.progress().awaits_recover);
        self.handle.recover();
        let mut control = self.connection();
        assert_eq!(answer(&mut control).unwrap().token, Target::RESUME);
        self.control = control;
        wait("the source to take up the link", || !self.handle.progress().awaits_recover);
        self.returns.store(false, Ordering::Release);
    }

    fn resume(&mut self, pages: u64) {
        self.send(&ToSource::Resume { pages, bulk: Token([4; 16]), urgent: Token([5; 16]) });
    }
}

type Script = Box<dyn FnOnce(&mut Liar<'_>) + Send>;

/// Returns true if `what` the source finds is silence.
fn is_silence(what: &str) -> bool {
    ["has not", "did not answer", "timed out"].into_iter().any(|text| what.contains(text))
}

/// Silence is borne for a short time where `what` the source finds is silence. The time is long
/// enough for the threads of a starved host to say what they have to say before it.
///
/// A lost link is not opened again by itself: an attempt would replace the reason for the loss, and
/// a starved test could miss that reason.
fn settings(what: &str) -> Settings {
    Settings {
        mode: MigrationMode::Postcopy,
        channels: 1,
        urgent_channels: 1,
        pace: BulkLimit::Off,
        max_bandwidth: Some(4 << 20),
        peer_timeout: if is_silence(what) { Duration::from_secs(4) } else { PATIENCE },
        reconnect_for: Duration::ZERO,
        ..Settings::default()
    }
}

/// Migrates to a target that follows `script`. Abandons the migration when neither side tries any
/// more. Returns the reasons for which the link was lost as well.
fn run_against(settings: &Settings, script: Script) -> (Report, ProcessGuest, Vec<String>) {
    let mut source = running();
    let listener = Listener::tcp();
    let uri = listener.uri().clone();
    let (handle, reasons) = (MigrationHandle::new(), Mutex::new(Vec::new()));
    let returns = AtomicBool::new(false);
    let report = std::thread::scope(|scope| {
        let sending = scope.spawn(|| migrate(&mut source, &uri, None, settings, &handle).unwrap());
        let (handle, returns) = (&handle, &returns);
        let lying = scope.spawn(move || {
            script(&mut Liar { target: Target::accept_control(&listener), handle, returns });
        });
        wait_for("the end", || {
            let progress = handle.progress();
            if let Some(why) = &progress.interrupted {
                let mut reasons = reasons.lock().unwrap();
                if reasons.last() != Some(why) {
                    reasons.push(why.clone());
                }
            }
            if progress.awaits_recover && !returns.load(Ordering::Acquire) {
                handle.abandon();
            }
            if sending.is_finished() { Ok(()) } else { Err(Box::new(progress)) }
        });
        lying.join().unwrap();
        sending.join().unwrap()
    });
    (report, source, reasons.into_inner().unwrap())
}

fn all(mut cases: Vec<(&'static str, Script)>, check: impl Fn(&str, Script) + Sync) {
    // The cases that last longest begin first, and next to each other.
    cases.sort_by_key(|(what, _)| !is_silence(what));
    in_parallel(4, cases, |(what, script)| check(what, script));
}

#[test]
fn guest_stays_on_the_source_whatever_the_target_does_before_the_commit() {
    let after_handover = |request: Request| -> Script {
        Box::new(move |liar| {
            liar.until_handed_over();
            liar.send_request(request);
            liar.listen();
        })
    };
    let sends = |message: ToSource| -> Script {
        Box::new(move |liar| {
            liar.until_handed_over();
            liar.send(&message);
            liar.listen();
        })
    };
    let missing = MissingPages { region: RegionId(0), first: 0, words: vec![1; 8] };
    let cases: Vec<(&str, Script)> = vec![
        ("which does not exist", after_handover(page(77, 0, 0, false))),
        ("which does not exist", after_handover(page(0, u64::MAX, MAX_AHEAD, true))),
        ("which does not exist", after_handover(page(0, 6144, 0, false))),
        ("echo on an urgent channel", after_handover(Request::Echo { number: 1, held_ns: 0 })),
        ("were not sent to it", sends(ToSource::Complete(PagingFigures::default()))),
        ("Lacking, which is not allowed", sends(ToSource::Lacking(missing))),
        (
            "Resume, which is not allowed",
            sends(ToSource::Resume { pages: 0, bulk: Token::NONE, urgent: Token::NONE }),
        ),
        ("no room", sends(ToSource::Failed(Refusal::new(RefusalCode::Memory, "no room")))),
        (
            "did not answer the greeting",
            Box::new(|liar| {
                liar.agree();
                liar.take(1);
                // The target never answers on the urgent channel.
                liar.listen();
            }),
        ),
        (
            "has not loaded the device state",
            Box::new(|liar| {
                liar.until_handed_over();
                liar.listen();
            }),
        ),
    ];
    all(cases, |what, script| {
        let (report, source, _) = run_against(&settings(what), script);
        let error = report.error.unwrap_or_default();
        assert_eq!(report.state, MigrationState::Failed, "{what}: {error}");
        assert!(error.contains(what), "wanted '{what}', got '{error}'");
        whole(&source, what);
    });
}

/// Returns what a target does after it has started the guest, each with a part of the report of
/// the source.
fn harms_of_a_running_target() -> Vec<(&'static str, Script)> {
    let asks = |request: Request| -> Script {
        Box::new(move |liar| {
            liar.until_running();
            liar.send_request(request);
            liar.listen();
        })
    };
    vec![
        ("which does not exist", asks(page(1, 0, 0, false))),
        ("which does not exist", asks(page(0, 1 << 40, MAX_AHEAD, false))),
        ("echo on an urgent channel", asks(Request::Echo { number: u64::MAX, held_ns: 0 })),
        (
            "Ready, which is not allowed",
            Box::new(|liar| {
                liar.until_running();
                liar.send(&ToSource::Ready { load_us: 1 });
                liar.listen();
            }),
        ),
        (
            "were not sent to it",
            Box::new(|liar| {
                liar.until_running();
                liar.send(&ToSource::Complete(PagingFigures::default()));
                liar.listen();
            }),
        ),
        // The target requests one page without end and receives none. Neither memory nor threads
        // are lost.
        (
            "timed out",
            Box::new(|liar| {
                liar.until_running();
                let requests = page(0, 6143, MAX_AHEAD, true).encode().repeat(1000);
                let mut urgent = liar.data[1].try_clone().unwrap();
                let sender = std::thread::spawn(move || while urgent.write_all(&requests).is_ok() {});
                liar.listen();
                sender.join().unwrap();
            }),
        ),
    ]
}

/// Returns what a target does over a new link after the loss of the old one, each with a part of
/// the report of the source.
fn harms_of_a_target_that_is_back() -> Vec<(&'static str, Script)> {
    let back = |pages: u64, piece: Option<(u32, u64, usize)>, channels: usize| -> Script {
        Box::new(move |liar| {
            liar.until_back();
            if let Some((region, first, len)) = piece {
                let words = vec![0xff; len];
                liar.send(&ToSource::Lacking(MissingPages { region: RegionId(region), first, words }));
            }
            liar.resume(pages);
            liar.take(channels);
            liar.listen();
        })
    };
    vec![
        // The source opens its channels before it reacts to a wrong number.
        ("were announced", back(5, None, 2)),
        ("were announced", back(1, Some((0, 0, 8)), 2)),
        ("names pages beyond its end", back(64, Some((0, 6144, 8)), 0)),
        ("the region does not exist", back(64, Some((7, 0, 8)), 0)),
        ("has a length or an offset that the protocol does not allow", back(8, Some((0, 0, 1)), 0)),
        (
            "has not answered",
            Box::new(|liar| {
                liar.until_back();
                liar.listen();
            }),
        ),
        // The target reports its missing pages and accepts no channel.
        (
            "did not answer the greeting",
            Box::new(|liar| {
                liar.until_back();
                let words = vec![0xff; 8];
                liar.send(&ToSource::Lacking(MissingPages { region: RegionId(0), first: 0, words }));
                liar.resume(64);
                liar.listen();
            }),
        ),
    ]
}

/// The target owns the guest, so the source cannot repair what the target does. The source reports
/// what it sees, keeps its memory, and ends when the operator says so.
#[test]
fn source_reports_what_a_hostile_target_does_after_the_commit() {
    let mut cases = harms_of_a_running_target();
    cases.extend(harms_of_a_target_that_is_back());
    all(cases, |what, script| {
        let (report, source, reasons) = run_against(&settings(what), script);
        assert_eq!(report.state, MigrationState::Lost, "{what}: {:?} {reasons:?}", report.error);
        assert!(reasons.iter().any(|why| why.contains(what)), "wanted '{what}', got {reasons:?}");
        is_stopped(&source, what);
    });
}

/// A target that is asked again for its missing pages may report none. Only the target knows them,
/// so the source believes it.
#[test]
fn source_believes_a_target_that_reports_no_missing_page() {
    let (report, source, reasons) = run_against(
        &settings("were not sent to it"),
        Box::new(|liar| {
            liar.until_running();
            liar.back_after(|liar| {
                liar.send(&ToSource::Complete(PagingFigures::default()));
                liar.listen();
            });
            liar.resume(0);
            liar.send(&ToSource::Complete(PagingFigures::default()));
            assert_eq!(liar.receive(), Some(ToTarget::Thanks));
        }),
    );
    assert_eq!(report.state, MigrationState::Completed, "{:?} {reasons:?}", report.error);
    assert!(reasons.iter().any(|why| why.contains("were not sent to it")), "{reasons:?}");
    is_stopped(&source, "believed");
}
