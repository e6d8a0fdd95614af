//! The side that a guest leaves.

// What a peer or the host says must not panic a thread of the engine. Tests may.
#![cfg_attr(
    not(test),
    warn(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable, clippy::todo)
)]

mod driver;
pub(crate) mod inbox;
mod measure;
pub mod pace;
pub(crate) mod pending;
pub(crate) mod postcopy;
pub(crate) mod sender;
mod settings;
pub(crate) mod skip;
mod spans;
mod timings;

pub(crate) use vmferry_protocol::source as session;

pub use measure::probe;
pub use settings::{Pace, Settings, UrgentPath};
pub use vmferry_protocol::source::{
    AutoConverge, MigrationMode, OnTimeout, Outcome, SwitchoverBandwidth, Verification,
};

use crate::channel::{Connect, Dialer, Pacer, Stream};
use crate::clock::Clock;
use crate::demand::still_arrives;
use crate::fence::Asker;
use crate::monitor::{MigrationState, Monitor, thread_cpu_us};
use crate::report::{Report, Way, word};
use crate::vm::warn_if_panics_abort;
use crate::{MigrateError, random};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use vmferry_core::{Layout, SourceVm, StateReader, TrackerKind};
use vmferry_wire::{FEATURE_STREAMS, MAX_DESCRIPTION_BYTES, MAX_STREAMS, MigrationId, Role, Token};

/// Moves the guest of `vm` to the target that `connector` connects to, and blocks until that has ended, one way or the other. A
/// [`Uri`](crate::Uri) is a connector.
///
/// The guest, unless its operator has paused it, runs on while its memory is sent, is stopped once or more to learn what that takes,
/// stops for the downtime, and then runs either on the target ([`MigrationState::Completed`](crate::MigrationState::Completed)) or here
/// again (`Cancelled`, `Failed`; or is this side's and [stands still](Report::stands_still)); in the one case in which nobody can know
/// (`Unknown`), it stays stopped here. Which it was is in the report.
///
/// A postcopy whose link is lost, and stays lost for [`Settings::reconnect_for`], waits for [`Monitor::recover`] or [`Monitor::abandon`].
///
/// # Errors
/// If nothing was begun: the target cannot be reached or refuses, the settings are impossible, the tracker cannot be
/// had. The guest has not noticed.
pub fn migrate(
    vm: &mut dyn SourceVm,
    connector: &dyn Connect,
    tracker: Option<TrackerKind>,
    settings: &Settings,
    monitor: &Monitor,
) -> Result<Report, MigrateError> {
    let clock = Clock::start();
    let cpu_before_us = thread_cpu_us();
    warn_if_panics_abort();
    check(vm, settings)?;
    let dialer = Dialer::new(connector, settings);
    dialer.check()?;
    let tracker = vm.tracker(tracker).map_err(|error| MigrateError::Vm(error.to_string()))?;
    let streams = streams(vm)?;
    let migration = MigrationId(random()?);
    let known = Report {
        id: migration.to_string(),
        way: Way::Live(settings.mode),
        tracker: Some(tracker.kind()),
        ..Report::default()
    };
    monitor.begin(clock.began, known.clone());
    let control = match open_control(&dialer, settings, migration, monitor) {
        Err(why @ MigrateError::Cancelled { .. }) => {
            monitor.update(|progress| progress.state = MigrationState::Cancelled);
            return Ok(Report {
                state: MigrationState::Cancelled,
                outcome: word(MigrationState::Cancelled),
                error: Some(why.to_string()),
                total_ms: clock.now().as_secs_f64() * 1e3,
                ..known
            });
        }
        control => control?,
    };
    if let Some(stream) = streams.first()
        && control.features & FEATURE_STREAMS == 0
    {
        return Err(MigrateError::Vm(format!(
            "the VM sends device state as streams, such as {}, and the target's version takes none: update the target",
            stream.name()
        )));
    }
    let context = driver::Context {
        dialer,
        settings,
        monitor,
        migration,
        memory: vm.memory(),
        pacer: Pacer::new(settings.max_bandwidth),
        unpaced: Pacer::new(None),
        stop: AtomicBool::new(false),
        clock,
        cpu_before_us,
    };
    let mut report =
        std::thread::scope(|scope| driver::Driver::run(&context, scope, vm, (tracker, streams), control));
    // The channel threads have ended by now: their CPU time is complete.
    let threads = monitor.counters.cpu_us.load(std::sync::atomic::Ordering::Relaxed);
    report.pace = monitor.pace();
    report.cpu_ms.source = (threads + thread_cpu_us().saturating_sub(cpu_before_us)) as f64 / 1e3;
    Ok(report)
}

/// Returns the VM's streams of device state, if the wire carries that many.
fn streams(vm: &mut dyn SourceVm) -> Result<Vec<Box<dyn StateReader>>, MigrateError> {
    let streams = vm.streams().map_err(|error| MigrateError::Vm(error.to_string()))?;
    if streams.len() > MAX_STREAMS {
        let count = streams.len();
        return Err(MigrateError::Vm(format!(
            "the VM has {count} streams of device state, and {MAX_STREAMS} can be sent"
        )));
    }
    Ok(streams)
}

/// Opens the register at the arbiter, if there is one, and then the control channel.
fn open_control(
    dialer: &Dialer<'_>,
    settings: &Settings,
    migration: MigrationId,
    monitor: &Monitor,
) -> Result<Stream, MigrateError> {
    // Before the hello: the target's limit for announcing a guest begins there, and an arbiter may
    // take longer than that.
    settings.fence.iter().try_for_each(|fence| fence.open(migration)).map_err(MigrateError::Fence)?;
    dialer.open((migration, Role::Control, 0, Token::NONE), Some(monitor)).inspect_err(|_| {
        // No target reads the register of a guest that was never announced.
        if let Some(fence) = &settings.fence {
            Asker::new(Arc::clone(fence), migration).close();
        }
    })
}

fn check(vm: &dyn SourceVm, settings: &Settings) -> Result<(), MigrateError> {
    if still_arrives(&vm.memory()) {
        return Err(MigrateError::StillArriving);
    }
    let most = Settings::MAX_CHANNELS;
    if !(1..=most).contains(&settings.channels) {
        return Err(MigrateError::Settings(format!(
            "{} channels: 1 to {most} are possible",
            settings.channels
        )));
    }
    if settings.may_be_lazy() && !(1..=most).contains(&settings.urgent_channels) {
        return Err(MigrateError::Settings(format!(
            "{} urgent channels: 1 to {most} are possible",
            settings.urgent_channels
        )));
    }
    if settings.peer_timeout.is_zero() {
        return Err(MigrateError::Settings(
            "a timeout of the peer of 0 gives it up before it can answer".into(),
        ));
    }
    let stopped = settings.switchover_bandwidth == Some(SwitchoverBandwidth::AtMost(0));
    if settings.max_bandwidth == Some(0) || stopped {
        return Err(MigrateError::Settings(
            "a bandwidth of 0 moves nothing; leave it out for no limit".into(),
        ));
    }
    let description = vm.description().len();
    if description > MAX_DESCRIPTION_BYTES {
        return Err(MigrateError::Vm(format!(
            "the VMM's description of the guest has {description} bytes; {} KiB can be sent",
            MAX_DESCRIPTION_BYTES >> 10
        )));
    }
    let config = vm.config();
    let layout = Layout::new(config.regions).map_err(|error| MigrateError::Vm(error.to_string()))?;
    if layout != *vm.memory().layout() {
        return Err(MigrateError::Vm(
            "the VMM's configuration and its memory disagree about the regions".into(),
        ));
    }
    Ok(())
}
