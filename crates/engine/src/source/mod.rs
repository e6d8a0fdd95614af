//! Source of a migration: moves a guest to a target.

// Input from a peer or the host must not panic a thread of the engine. Tests may panic.
#![cfg_attr(
    not(test),
    warn(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable, clippy::todo)
)]

pub(crate) mod answer_wait;
mod driver;
pub(crate) mod encode;
pub(crate) mod hashes;
pub(crate) mod inbox;
mod measure;
pub mod pace;
mod parallel;
pub(crate) mod pending;
pub(crate) mod postcopy;
pub(crate) mod sender;
mod settings;
pub(crate) mod skip;
mod spans;
mod timings;
mod turns;

pub(crate) use vmferry_protocol::source as session;

pub use measure::probe;
#[doc(hidden)]
pub use pending::WalkedPass;
pub use settings::{BulkLimit, Deltas, PageCodec, Settings, UrgentPath};
pub use vmferry_protocol::source::{
    AutoConverge, MigrationMode, OnTimeout, Outcome, SwitchoverBandwidth, Verification,
};

use crate::arbiter::ArbiterClient;
use crate::channel::{Connect, Dialer, Pacer, Stream, passes_descriptors};
use crate::clock::Clock;
use crate::demand::still_arrives;
use crate::handle::{MigrationHandle, MigrationState, thread_cpu_us};
use crate::handoff::{SharedMemory, Untracked};
use crate::idle::IdleCores;
use crate::report::{MigrationKind, Report, word};
use crate::vm::warn_if_panics_abort;
use crate::{MigrateError, random};
use encode::Codecs;
use hashes::Answers;
use parallel::sending_channels;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use turns::Turns;
use vmferry_core::{DirtyTracker, Layout, PAGE_SIZE, SourceVm, StateReader, TrackerKind, VmError};
use vmferry_wire::{
    FEATURE_KNOWN_PAGES, FEATURE_LOCAL_MEMORY, FEATURE_SEGMENTS, FEATURE_STREAMS, MAX_DESCRIPTION_BYTES,
    MAX_STREAMS, MigrationId, Role, Token,
};

/// Moves the guest of `vm` to the target that `connector` connects to, and blocks until the
/// migration has ended.
///
/// To connect to an address, pass a [`Uri`](crate::Uri) as `connector`. `tracker` selects the kind
/// of dirty-page tracker; `None` lets the VM choose.
///
/// In [`MigrationMode::Local`], the target is another process of this host, which takes over the
/// memory: see [`SourceVm::share_memory`].
///
/// The guest runs while its memory is sent, unless the operator has paused the guest. In precopy,
/// the source makes one or more trial pauses to measure how long stopping the guest takes, unless
/// the VMM declares these costs ([`SourceVm::pause_costs`]). The source then stops the guest for
/// the switchover. Afterwards, the report states which of these cases holds:
///
/// - The guest runs on the target
///   ([`MigrationState::Completed`](crate::MigrationState::Completed)).
/// - The guest runs on the source again (`Cancelled`, `Failed`), or the source owns the guest but
///   could not resume it ([`Report::resume_failed`]).
/// - The owner of the guest is not known (`Unknown`). The guest stays stopped on the source.
/// - The guest ran on the target and was given up before all of its memory had arrived (`Lost`).
///
/// If the link is lost in postcopy and cannot be restored within [`Settings::reconnect_for`], the
/// call blocks until another thread calls [`MigrationHandle::recover`] or
/// [`MigrationHandle::abandon`].
///
/// # Errors
/// If the migration could not begin, for example because the target cannot be reached or refuses
/// the connection, because the settings are invalid, or because the tracker is not available. The
/// guest is not affected.
pub fn migrate(
    vm: &mut dyn SourceVm,
    connector: &dyn Connect,
    tracker: Option<TrackerKind>,
    settings: &Settings,
    handle: &MigrationHandle,
) -> Result<Report, MigrateError> {
    let clock = Clock::start();
    let cpu_before_us = thread_cpu_us();
    warn_if_panics_abort();
    check(vm, settings)?;
    let local = settings.mode == MigrationMode::Local;
    // A handoff sends no pages. One bulk channel is the least that the protocol allows.
    let one_channel = local.then(|| Settings { channels: 1, ..settings.clone() });
    let settings = one_channel.as_ref().unwrap_or(settings);
    let dialer = Dialer::new(connector, settings);
    dialer.check()?;
    let shared = local.then(|| SharedMemory::of(vm)).transpose().map_err(MigrateError::Vm)?;
    let tracker = tracker_of(vm, tracker, local)?;
    let streams = streams(vm)?;
    let migration = MigrationId(random()?);
    let known = Report {
        id: migration.to_string(),
        kind: MigrationKind::Live(settings.mode),
        tracker: (!local).then(|| tracker.kind()),
        ..Report::default()
    };
    handle.begin(clock.began, known.clone());
    let usable = |control: &Stream| {
        if local && let Err(why) = takes_memory(&dialer, control) {
            return Err(MigrateError::NotLocal { uri: dialer.name(), why });
        }
        check_streams(&streams, control.features)
    };
    let control = match open_control(&dialer, settings, migration, (handle, usable)) {
        Err(why @ MigrateError::Cancelled { .. }) => {
            handle.update(|progress| progress.state = MigrationState::Cancelled);
            return Ok(cancelled(known, &why, &clock));
        }
        control => control?,
    };
    let encodes = !local && control.features & FEATURE_SEGMENTS != 0;
    let codecs = encodes.then(|| codecs(settings, vm.memory().layout()));
    let cache_limit = codecs.and_then(|codecs| codecs.cache_limit(settings.channels));
    handle.counters.encodings.begin_caches(cache_limit);
    let context = driver::Context {
        dialer,
        settings,
        handle,
        migration,
        memory: vm.memory(),
        pacer: Pacer::new(settings.max_bandwidth),
        unpaced: Pacer::new(None),
        turns: (settings.adapt_channels && !local).then(|| Turns::new(sending_channels(settings))),
        stop: AtomicBool::new(false),
        clock,
        codecs,
        idle: Arc::new(IdleCores::open()),
        answers: (encodes && control.features & FEATURE_KNOWN_PAGES != 0)
            .then(|| Answers::new(settings.channels)),
        shared,
        cpu_before_us,
    };
    let mut report =
        std::thread::scope(|scope| driver::Driver::run(&context, scope, vm, (tracker, streams), control));
    // The channel threads have ended, so their CPU time is complete.
    let threads = handle.counters.cpu_us.load(std::sync::atomic::Ordering::Relaxed);
    report.pace = handle.pace();
    report.cpu_ms.source = (threads + thread_cpu_us().saturating_sub(cpu_before_us)) as f64 / 1e3;
    Ok(report)
}

/// Returns the tracker of a migration. A handoff inside one host (`local`) tracks no pages.
fn tracker_of(
    vm: &mut dyn SourceVm,
    kind: Option<TrackerKind>,
    local: bool,
) -> Result<Box<dyn DirtyTracker>, MigrateError> {
    match (local, kind) {
        (true, Some(_)) => Err(MigrateError::Settings("a handoff tracks no pages; omit the tracker".into())),
        (true, None) => Ok(Box::new(Untracked)),
        (false, kind) => vm.tracker(kind).map_err(MigrateError::Vm),
    }
}

/// Returns the report of a migration that was cancelled while it was connecting.
fn cancelled(known: Report, why: &MigrateError, clock: &Clock) -> Report {
    Report {
        state: MigrationState::Cancelled,
        outcome: word(MigrationState::Cancelled),
        error: Some(why.to_string()),
        total_ms: clock.now().as_secs_f64() * 1e3,
        ..known
    }
}

/// Returns an error with the reason if the target does not map the memory of the guest.
fn takes_memory(dialer: &Dialer<'_>, control: &Stream) -> Result<(), String> {
    if dialer.carries_all() {
        return Err("one connection carries all channels; pass one socket for each channel".into());
    }
    passes_descriptors(control).map_err(|error| error.to_string())?;
    if control.features & FEATURE_LOCAL_MEMORY == 0 {
        return Err(
            "the target does not support it, or runs as another user; move the guest by precopy".into()
        );
    }
    Ok(())
}

/// Returns an error if the VM has streams of device state and the target, which has `features`,
/// does not take them.
fn check_streams(streams: &[Box<dyn StateReader>], features: u64) -> Result<(), MigrateError> {
    match streams.first() {
        Some(stream) if features & FEATURE_STREAMS == 0 => Err(MigrateError::Vm(VmError::new(format!(
            "the VM sends device state as streams, such as {}, and the target's version does not support \
             them: update the target",
            stream.name()
        )))),
        _ => Ok(()),
    }
}

/// Returns the codecs of `settings` for a guest with the memory `layout`.
fn codecs(settings: &Settings, layout: &Layout) -> Codecs {
    let each = delta_cache_bytes(settings, layout) / u64::from(settings.channels.max(1));
    Codecs {
        codec: settings.codec,
        deltas: settings.deltas,
        cache_bytes: usize::try_from(each).unwrap_or(usize::MAX),
    }
}

/// Returns the memory for the versions that deltas refer to, of all channels together, in bytes.
pub(crate) fn delta_cache_bytes(settings: &Settings, layout: &Layout) -> u64 {
    /// Share of the guest's memory, and minimum in bytes.
    const SHARE: u64 = 16;
    const LEAST: u64 = 16 << 20;
    /// Maximum memory for a version in addition to its content, in bytes.
    const VERSION: u64 = 64;
    let bytes = settings.delta_cache.unwrap_or_else(|| {
        let most = available_memory().map_or(u64::MAX, |bytes| bytes / 4);
        (layout.pages() * PAGE_SIZE / SHARE).max(LEAST).min(most)
    });
    // The tables of a cache are allocated for its capacity. A larger cache than the guest's memory
    // would only have larger tables.
    bytes.min(layout.pages() * (PAGE_SIZE + VERSION) + LEAST)
}

/// Returns the memory that the host can give to processes without swapping, in bytes. `None` if the
/// kernel does not tell.
fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// Returns the VM's streams of device state, or an error if there are more than the protocol can
/// carry.
fn streams(vm: &mut dyn SourceVm) -> Result<Vec<Box<dyn StateReader>>, MigrateError> {
    let streams = vm.streams().map_err(MigrateError::Vm)?;
    if streams.len() > MAX_STREAMS {
        let count = streams.len();
        return Err(MigrateError::Vm(VmError::new(format!(
            "the VM has {count} streams of device state; at most {MAX_STREAMS} can be sent"
        ))));
    }
    Ok(streams)
}

/// Opens the register at the arbiter, if an arbiter is configured, and then the control channel.
fn open_control(
    dialer: &Dialer<'_>,
    settings: &Settings,
    migration: MigrationId,
    (handle, usable): (&MigrationHandle, impl Fn(&Stream) -> Result<(), MigrateError>),
) -> Result<Stream, MigrateError> {
    // The register is opened before the hello. The target's time limit for announcing a guest
    // starts at the hello, and an arbiter may take longer than that limit.
    settings.arbiter.iter().try_for_each(|arbiter| arbiter.open(migration)).map_err(MigrateError::Arbiter)?;
    let control = dialer.open((migration, Role::Control, 0, Token::NONE), Some(handle));
    control.and_then(|control| usable(&control).map(|()| control)).inspect_err(|_| {
        // No target reads the register of a guest that was never announced.
        if let Some(arbiter) = &settings.arbiter {
            ArbiterClient::new(Arc::clone(arbiter), migration).close();
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
            "invalid number of channels: {} (allowed: 1 to {most})",
            settings.channels
        )));
    }
    if settings.may_use_postcopy() && !(1..=most).contains(&settings.urgent_channels) {
        return Err(MigrateError::Settings(format!(
            "invalid number of urgent channels: {} (allowed: 1 to {most})",
            settings.urgent_channels
        )));
    }
    if settings.peer_timeout.is_zero() {
        return Err(MigrateError::Settings("the peer timeout is 0; it must be greater than 0".into()));
    }
    let stopped = settings.switchover_bandwidth == Some(SwitchoverBandwidth::AtMost(0));
    if settings.max_bandwidth == Some(0) || stopped {
        return Err(MigrateError::Settings("the bandwidth limit is 0; omit it for no limit".into()));
    }
    if settings.pace == BulkLimit::Rate(0) {
        return Err(MigrateError::Settings(
            "the rate limit of postcopy is 0, so its pages would never be sent; use BulkLimit::Off for no limit".into(),
        ));
    }
    if settings.mode == MigrationMode::Local && settings.verify {
        return Err(MigrateError::Settings(
            "a handoff copies no page, so there is nothing to verify; omit the verification".into(),
        ));
    }
    let description = vm.description().len();
    if description > MAX_DESCRIPTION_BYTES {
        return Err(MigrateError::Vm(VmError::new(format!(
            "the VMM's description of the guest has {description} bytes; at most {} KiB can be sent",
            MAX_DESCRIPTION_BYTES >> 10
        ))));
    }
    let config = vm.config();
    let layout = Layout::new(config.regions).map_err(|error| MigrateError::Vm(VmError::new(error)))?;
    if layout != *vm.memory().layout() {
        return Err(MigrateError::Vm(VmError::new(
            "the memory regions in the VMM's configuration differ from those of its memory",
        )));
    }
    Ok(())
}
