//! Hostile peers: they accept and never read, or connect and send nothing, or one byte per second.

use super::pair::{LOAD, TestPair, bounded, check_kept_speed, speed};
use crate::command::faults::{Channel, Harm, Link, Phase};
use crate::command::sample::Sample;
use crate::command::side::PATIENCE;
use anyhow::{Result, bail, ensure};
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmferry_report::json::Case;
use vmferry_wire::{FEATURES, Hello, MigrationId, Role, Token, VERSION_MAX, VERSION_MIN};

/// Migrates to a target that accepts connections but neither reads nor writes.
pub(super) fn no_answer(case: &mut Case, wrong: &mut Vec<String>) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut pair = TestPair::new("process", "64M", LOAD)?;
    let before = speed(&mut pair.source)?;
    pair.start_migration(&TestPair::request(&format!("tcp:{}", listener.local_addr()?)))?;
    let during = speed(&mut pair.source)?;
    check_kept_speed(case, wrong, before, during);
    given_up(&mut pair, case, wrong)?;
    pair.move_it(case, wrong)
}

/// Migrates over a link that stops reading in both directions: on all channels during setup, or
/// later on the control channel or the bulk channels.
pub(super) fn deaf(what: &str, case: &mut Case, wrong: &mut Vec<String>) -> Result<()> {
    let (phase, channel) = match what {
        "setup" => (Phase::Setup, None),
        "control" => (Phase::FirstPass, Some(Channel::Control)),
        _ => (Phase::FirstPass, Some(Channel::Bulk)),
    };
    let mut pair = TestPair::new("process", "64M", LOAD)?;
    let link = Link::to(pair.uri.parse()?, &"tcp:127.0.0.1:0".parse()?)?;
    let before = speed(&mut pair.source)?;
    link.hold_at(phase);
    pair.start_migration(&TestPair::request(&link.uri()))?;
    ensure!(link.reached(PATIENCE), "the migration did not reach the phase {phase}");
    link.harm(Harm::Deaf, channel);
    link.release();
    let during = speed(&mut pair.source)?;
    check_kept_speed(case, wrong, before, during);
    bounded(case, wrong, "target", &Sample::of(pair.target.pid())?, pair.before.rss_kib);
    given_up(&mut pair, case, wrong)?;
    pair.another_target()?;
    pair.move_it(case, wrong)
}

/// Checks that the source gives up, keeps its guest, and releases what the attempt used.
fn given_up(pair: &mut TestPair, case: &mut Case, wrong: &mut Vec<String>) -> Result<()> {
    let began = Instant::now();
    let report = pair.ended()?;
    case.metric("given_up_ms", began.elapsed().as_secs_f64() * 1e3);
    ensure!(
        report["outcome"] == "failed",
        "the migration ended as {}: {}",
        report["outcome"],
        report["error"]
    );
    ensure!(report["vm"]["place"] == "running", "the guest is {}", report["vm"]["place"]);
    pair.source.whole()?;
    let now = Sample::of(pair.source.pid())?;
    bounded(case, wrong, "source", &now, pair.before.rss_kib);
    if now.descriptors > pair.before.descriptors {
        wrong.push(format!(
            "{} descriptors are open after the attempt, {} before",
            now.descriptors, pair.before.descriptors
        ));
    }
    Ok(())
}

/// Behaviour of the hostile peers that connect to the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bad {
    /// The peers send nothing.
    Silent,
    /// The peers send one byte of a hello each second.
    Trickle,
    /// The peers send the hello of a migration and announce no guest.
    Hello,
}

/// Connects hostile peers to a waiting target, and then migrates a guest to it.
pub(super) fn sources(bad: Bad, case: &mut Case, quick: bool, wrong: &mut Vec<String>) -> Result<()> {
    let count = if quick { 100 } else { 400 };
    case.params.insert("strangers".into(), count.into());
    let mut pair = TestPair::new("process", "64M", LOAD)?;
    let before = speed(&mut pair.source)?;
    let unknown_peers = Hostile::new(bad, &pair.uri, count)?;
    let during = speed(&mut pair.source)?;
    check_kept_speed(case, wrong, before, during);
    bounded(case, wrong, "target", &Sample::of(pair.target.pid())?, pair.before.rss_kib);
    if bad == Bad::Hello {
        // The target waits for one of the hostile peers, for five seconds at most, and refuses
        // other sources meanwhile.
        retry_until_moved(&mut pair, case, wrong)?;
    } else {
        pair.move_it(case, wrong)?;
    }
    drop(unknown_peers);
    Ok(())
}

fn retry_until_moved(pair: &mut TestPair, case: &mut Case, wrong: &mut Vec<String>) -> Result<()> {
    let began = Instant::now();
    loop {
        pair.start_migration(&TestPair::request(&pair.uri))?;
        let report = pair.ended()?;
        if report["outcome"] == "completed" {
            case.metric("kept_out_ms", began.elapsed().as_secs_f64() * 1e3);
            return pair.arrived(&report, case, wrong);
        }
        if began.elapsed() > PATIENCE {
            bail!("hostile peers keep the source out: {}", report["error"]);
        }
    }
}

/// Connections of hostile peers, which stay open until this value is dropped.
struct Hostile {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Hostile {
    fn new(bad: Bad, uri: &str, count: usize) -> Result<Self> {
        let at = uri.strip_prefix("tcp:").unwrap_or(uri);
        let mut streams = Vec::new();
        for number in 0..count {
            let mut stream = TcpStream::connect(at)?;
            stream.set_nonblocking(true)?;
            let hello = hello(u8::try_from(number % 251).unwrap_or_default());
            if bad == Bad::Hello {
                // The target closes the connections that it refuses, so a write may fail.
                let _ = stream.write_all(&hello);
            }
            streams.push((stream, hello));
        }
        let stop = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("unknown-peers".into()).spawn(move || {
            for second in 0.. {
                for (stream, hello) in &mut streams {
                    if bad == Bad::Trickle
                        && let Some(byte) = hello.get(second..=second)
                    {
                        let _ = stream.write_all(byte);
                    }
                }
                let next = Instant::now() + Duration::from_secs(1);
                while Instant::now() < next {
                    if ends.load(Ordering::Acquire) {
                        return;
                    }
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn hello(id: u8) -> Vec<u8> {
    let hello = Hello {
        version_min: VERSION_MIN,
        version_max: VERSION_MAX,
        features: FEATURES,
        migration: MigrationId([id; 16]),
        role: Role::Control,
        index: 0,
        token: Token::NONE,
        arbiter: 0,
    };
    hello.encode().to_vec()
}
