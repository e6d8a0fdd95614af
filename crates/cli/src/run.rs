//! `vmferry run`: a guest, or a place for one.

use crate::api::{Api, Errand, MigrateRequest, Order, Place, Shared};
use crate::args::RunArgs;
use crate::console::Console;
use crate::guest::Machine;
use crate::speed::{EVERY, Sample};
use crate::{Status, balloon, dirty_rate, output};
use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};
use vmferry_control::{Events, Limits, Server};
use vmferry_dirty::Policy;
use vmferry_engine::{
    LazyRestore, Listener, MigrateError, MigrationState, Monitor, ReceiveFailure, Report, Settings,
    TrackerKind, Uri, migrate, receive, restore, restore_lazy, save, save_copy,
};

/// How often the machine's owner looks whether the guest has ended.
const TICK: Duration = Duration::from_millis(20);
/// How long the report of a completed migration waits to be read before the process ends.
const GRACE: Duration = Duration::from_secs(10);
/// How long if somebody has said that the process is to end: whoever watches the migration looks more often.
const LAST_GRACE: Duration = Duration::from_secs(1);

/// How long it is kept for others after somebody has read it.
const LINGER: Duration = Duration::from_millis(200);

/// Runs until the guest ends, moves away, or somebody says so.
pub(crate) fn run(args: &RunArgs) -> Result<Status> {
    if args.die_with_parent {
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    }
    let mut machine = Machine::build(args)?;
    let (orders, errands) = sync_channel(4);
    let probe = Arc::new(machine.probe());
    let shared = Arc::new(Shared::new(
        args.guest.to_string(),
        probe,
        (args.peer_timeout, args.stay_awake.into()),
        orders,
    ));
    let events = Events::new().context("cannot make the control socket's descriptor")?;
    let api = |path| Server::start(path, Arc::new(Api(Arc::clone(&shared))), &events, Limits::default());
    let server = args.api.as_deref().map(api).transpose().context("--api")?;
    let on_signal = Arc::clone(&shared);
    ctrlc::set_handler(move || on_signal.ask_to_quit()).context("cannot catch Ctrl-C")?;
    if let Some(least) = args.balloon_auto {
        let balloon = shared.probe.balloon().context("--balloon-auto needs --balloon on")?;
        balloon::auto::start(balloon, least, &shared)?;
    }
    let console = match args.serial.as_deref() {
        Some("stdio") => Some(Console::start(&shared)?),
        _ => None,
    };
    let watched = Arc::clone(&shared);
    std::thread::Builder::new().name("speed".into()).spawn(move || {
        loop {
            watched.speed.look(&watched.probe);
            std::thread::sleep(EVERY);
        }
    })?;
    let result = match &args.incoming {
        Some(uri) => await_guest(uri, args.insecure, &mut machine, &shared),
        None => machine.start().map(|()| Arrived::Here(None)),
    };
    let (result, restore) = match result {
        Ok(Arrived::Here(restore)) => {
            shared.set_place(Place::Running);
            (serve(&mut machine, &shared, &errands), restore)
        }
        Ok(Arrived::Nobody) => (Ok(Status::Done), None),
        Err(error) => (Err(error), None),
    };
    if shared.lacks_pages() {
        // Its vCPUs may sleep on pages that are not here, and must not be woken with anything else in them.
        drop(server);
        let status = result.unwrap_or_else(|error| {
            eprintln!("vmferry: {error:#}");
            Status::Failed
        });
        // Nothing is dropped on this way out.
        drop(console);
        std::process::exit(status as i32);
    }
    // Pages out of a file go on coming until the vCPUs have stopped.
    machine.stop();
    drop(restore);
    drop(server);
    drop(console);
    result
}

/// Who came.
enum Arrived {
    Nobody,
    /// A guest; perhaps one whose pages still come.
    Here(Option<Box<LazyRestore>>),
}

/// Waits for a guest, or takes it out of a file.
fn await_guest(uri: &Uri, insecure: bool, machine: &mut Machine, shared: &Arc<Shared>) -> Result<Arrived> {
    if let Uri::File(path) = uri {
        return take_out(path, machine, shared).map(Arrived::Here);
    }
    let listener = Listener::bind(uri, insecure)?;
    let at = listener.uri()?.to_string();
    eprintln!("vmferry: waiting for a guest at {at}");
    shared.set_incoming(at);
    match receive(machine.target(), &listener, &shared.arrival) {
        Ok(mut received) => {
            eprintln!("vmferry: the guest came from {} and runs", received.source);
            let rest = received.rest.take();
            shared.set_received(serde_json::to_value(received)?);
            if let Some(rest) = rest {
                shared.set_rest(rest.watch());
                let watched = Arc::clone(shared);
                std::thread::Builder::new()
                    .name("rest".into())
                    .spawn(move || drop(rest.finish(&listener, &watched.arrival)))?;
            }
            Ok(Arrived::Here(None))
        }
        Err(ReceiveFailure::Stopped) => Ok(Arrived::Nobody),
        Err(error) => Err(error.into()),
    }
}

/// Runs the guest in a file: at once, where pages can come later, or else when all of them have been read.
fn take_out(path: &Path, machine: &mut Machine, shared: &Shared) -> Result<Option<Box<LazyRestore>>> {
    match restore_lazy(machine.target(), path) {
        Ok(restore) => {
            shared.set_received(serde_json::to_value(restore.received())?);
            shared.set_restore(restore.watch());
            Ok(Some(Box::new(restore)))
        }
        Err(error @ MigrateError::NotLazy { .. }) => {
            eprintln!("vmferry: {error}; it starts when all of the file has been read");
            let received = restore(machine.target(), path)?;
            shared.set_received(serde_json::to_value(received)?);
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// Owns the machine while it has a guest.
fn serve(machine: &mut Machine, shared: &Shared, errands: &Receiver<Errand>) -> Result<Status> {
    let mut moved: Option<Instant> = None;
    loop {
        let quit = shared.quit.load(Ordering::Acquire);
        if let Some(since) = moved {
            // Whoever watches must see it, also if this process was told to end: or would think that it died while it was
            // still needed.
            let longest = if quit { LAST_GRACE } else { GRACE };
            if shared.seen.load(Ordering::Acquire) && since.elapsed() > LINGER || since.elapsed() > longest {
                return Ok(Status::Done);
            }
        } else if quit && shared.place() != Place::Unknown {
            return Ok(Status::Done);
        }
        if let Some((how, status)) = shared.probe.exit()
            && moved.is_none()
        {
            shared.set_place(Place::Ended);
            return match status {
                Status::Failed => Err(anyhow!("the guest ended: {how}")),
                Status::Reset => {
                    eprintln!(
                        "vmferry: {how}; it is not started again (exit status {})",
                        Status::Reset as u8
                    );
                    Ok(status)
                }
                status => Ok(status),
            };
        }
        let Ok(Errand { order, reply, abandoned }) = errands.recv_timeout(TICK) else { continue };
        if abandoned.load(Ordering::Acquire) {
            continue;
        }
        let result = match order {
            Order::DirtyRate(request) => {
                let measured =
                    shared.all_here().and_then(|()| dirty_rate::measure(machine, shared, &request));
                let _ = reply.send(measured.map_err(|error| format!("{error:#}")));
                continue;
            }
            Order::Pause => machine.source().pause().map(|()| Place::Paused).map_err(anyhow::Error::new),
            Order::Resume => machine.source().resume().map(|()| Place::Running).map_err(anyhow::Error::new),
            Order::Recover { take } => recover(machine, shared, take),
            Order::Migrate(request) => {
                // Answered when it has begun; how it goes on is asked for by `status`.
                match prepare(&request, shared) {
                    Ok((uri, tracker, reaper)) => {
                        machine.set_reaper(reaper);
                        let _ = reply.send(Ok(json!({})));
                        if move_away(machine, shared, &request, &uri, tracker) == Place::Moved {
                            moved = Some(Instant::now());
                        }
                    }
                    Err(error) => {
                        let _ = reply.send(Err(format!("{error:#}")));
                    }
                }
                continue;
            }
        };
        let result = result.map(|place| {
            shared.set_place(place);
            json!({})
        });
        let _ = reply.send(result.map_err(|error| format!("{error:#}")));
    }
}

fn recover(machine: &mut Machine, shared: &Shared, take: bool) -> Result<Place> {
    if shared.place() != Place::Unknown {
        bail!("there is nothing to recover: it is known where the guest is");
    }
    if !take {
        shared.ask_to_quit();
        return Ok(Place::Moved);
    }
    machine.source().resume()?;
    Ok(Place::Running)
}

fn prepare(request: &MigrateRequest, shared: &Shared) -> Result<(Uri, Option<TrackerKind>, Policy)> {
    if shared.place() == Place::Paused {
        bail!("the guest is paused; resume it first, so that it runs on the other side");
    }
    let tracker = tracker(request.tracker.as_deref())?;
    let reaper = request.reaper.as_deref().map(str::parse).transpose()?.unwrap_or_default();
    let uri = request.uri.parse()?;
    if request.keep_running && !matches!(uri, Uri::File(_)) {
        bail!(
            "a guest that goes on here can only be copied into a file; leave --keep-running, or use file:PATH"
        );
    }
    shared.all_here()?;
    // From here on, before the answer: whoever asks for the status next must not see an older migration's.
    shared.begin_migration(Arc::new(Monitor::new()));
    Ok((uri, tracker, reaper))
}

/// The tracker that a request asks for; `None` for what the guest's kind does best.
pub(crate) fn tracker(name: Option<&str>) -> Result<Option<TrackerKind>> {
    Ok(match name {
        None | Some("auto") => None,
        Some("log") => Some(TrackerKind::Log),
        Some("ring") => Some(TrackerKind::Ring),
        Some("wp") => Some(TrackerKind::Wp),
        Some(other) => bail!("there is no tracker '{other}'; use auto, log, ring or wp"),
    })
}

/// Moves the guest and says where it is then.
fn move_away(
    machine: &mut Machine,
    shared: &Shared,
    request: &MigrateRequest,
    uri: &Uri,
    tracker: Option<TrackerKind>,
) -> Place {
    let monitor = shared.monitor();
    let speed_before = shared.speed.recent();
    let (began, before) = (Instant::now(), shared.probe.stats().ok().map(|stats| Sample::of(&stats)));
    let settings = Settings { stay_awake: shared.stay_awake, ..request.settings() };
    let result = match uri {
        Uri::File(path) if request.keep_running => save_copy(machine.source(), path, &monitor),
        Uri::File(path) => save(machine.source(), path, &monitor),
        _ => migrate(machine.source(), uri, tracker, &settings, &monitor),
    };
    let elapsed = began.elapsed();
    let after = shared.probe.stats().ok();
    let (mut report, place) = match result {
        Ok(report) => {
            let place = match report.state {
                MigrationState::Completed if request.keep_running => Place::Running,
                MigrationState::Completed => Place::Moved,
                MigrationState::Unknown => Place::Unknown,
                // It ran elsewhere; nothing that is here of it may run.
                MigrationState::Lost => Place::Moved,
                _ => Place::Running,
            };
            (serde_json::to_value(report).unwrap_or_else(|error| not_begun(&error.to_string())), place)
        }
        Err(error) => (not_begun(&error.to_string()), Place::Running),
    };
    let during = before.zip(after.as_ref()).map(|(before, after)| {
        #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
        let writes = after.writes().saturating_sub(before.writes) as f64;
        // Comparing pages stops the guest on request only: that time is nobody's downtime, and not counted here either.
        let verify = report["verify_ms"].as_f64().unwrap_or(0.0) / 1e3;
        writes / (elapsed.as_secs_f64() - verify).max(1e-3)
    });
    report["guest"] = json!({
        "before_writes_per_s": speed_before,
        "during_writes_per_s": during,
        "stall_max_us": after.and_then(|stats| stats.cpus().iter().map(|cpu| cpu.stall_max_us).max()),
    });
    shared.end_migration(report, place);
    place
}

/// The document of a migration that did not begin.
fn not_begun(why: &str) -> Value {
    let report = output::failed(Report::default(), why);
    serde_json::to_value(report)
        .unwrap_or_else(|_| json!({ "state": "failed", "outcome": "failed", "error": why }))
}
