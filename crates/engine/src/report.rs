//! Report of a migration. Serialized, it is the document that `migrate --json` prints.

use crate::handle::MigrationState;
use crate::plan::CourseChange;
use crate::source::MigrationMode;
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;
use vmferry_codec::SentFigures;
use vmferry_core::{RingFigures, TrackerKind};
use vmferry_wire::{FaultLatency, PagingFigures};

/// Outcome and figures of a migration, or of a save to a file.
#[must_use = "its `state` says who owns the guest"]
#[derive(Debug, Clone, Default, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// State of the migration. After the end, the final state.
    pub state: MigrationState,
    /// Final state as one lower-case name. `None` while the migration runs.
    pub outcome: Option<String>,
    /// Reason why the migration did not complete. `None` if it completed, or has not ended.
    pub error: Option<String>,
    /// True if the source owns the guest but could not resume it, as `error` says. The guest is
    /// paused, and the target does not run it.
    #[serde(rename = "stands_still")]
    pub resume_failed: bool,
    /// True if the target refused a feature that the source asked for. No page was sent, so the
    /// caller may migrate again without the feature.
    #[serde(skip)]
    pub refused_feature: bool,
    /// Identifier of the migration, 32 hexadecimal digits.
    pub id: String,
    /// Kind of migration: to a target, with the mode, or into a file.
    #[serde(rename = "mode")]
    pub kind: MigrationKind,
    /// Dirty-page tracker that was used. `None` for a guest that was paused while its memory was
    /// read.
    #[serde(serialize_with = "kind_or_none")]
    pub tracker: Option<TrackerKind>,
    /// Time in ms from the start of the migration until the guest ran on the target with all of its
    /// memory, or was resumed on the source. The migration starts with the call of
    /// [`migrate`](crate::migrate).
    pub total_ms: f64,
    /// Downtime in ms: from the beginning of the pause until the target confirmed that the guest
    /// runs, or until the source resumed the guest. Verification is not included.
    pub downtime_ms: f64,
    /// Time from the start of the migration to the first page, in ms. In postcopy mode, this
    /// includes the switchover, because no page is sent before it. In a handoff inside one host, in
    /// which no page is sent, this is the time to the pause.
    pub setup_ms: f64,
    /// Time that the tracker needed to start to track dirty pages, in ms. Part of
    /// [`setup_ms`](Self::setup_ms). `None` if no tracker was started.
    pub enable_tracking_ms: Option<f64>,
    /// Downtime that was predicted when the guest was stopped, in ms.
    pub predicted_downtime_ms: Option<f64>,
    /// Parts of the downtime.
    pub downtime: Downtime,
    /// Bytes and pages that were sent.
    pub bytes: Bytes,
    /// Figures of encoded pages. `None` if no page was encoded.
    pub codecs: Option<CodecFigures>,
    /// Figures of the cache of versions that deltas refer to. `None` if the source could not send
    /// deltas.
    pub delta_cache: Option<DeltaCacheFigures>,
    /// Figures of known pages. `None` if the source sent no hash of a page, because the target has
    /// no known pages.
    pub known_pages: Option<KnownPagesFigures>,
    /// Passes over the dirty pages, in order.
    pub passes: Vec<PassReport>,
    /// Phases of the migration that were reached, in order of their start.
    pub phases: Vec<PhaseReport>,
    /// Mean throughput in Mbit/s: bytes on the wire, divided by the time from the first page to the
    /// end without verification.
    pub throughput_mbps: f64,
    /// Figures of the dirty rings. `None` for a tracker without rings.
    pub ring: Option<RingFigures>,
    /// Figures of page faults and missing pages on the target. `None` if all pages arrived before
    /// the guest ran there.
    pub postcopy: Option<PostcopyFigures>,
    /// Figures of the bulk rate control in postcopy. `None` if the rate was not controlled.
    pub pace: Option<PaceFigures>,
    /// Figures of the bulk channels that sent at the same time. `None` unless
    /// [`Settings::adapt_channels`](crate::Settings::adapt_channels) is set.
    pub senders: Option<SenderFigures>,
    /// Number of times the link was lost after the handover, whether or not the link was restored.
    /// A cut that the operator requested counts, too.
    pub interruptions: u64,
    /// Number of deferrals because of I/O: attempts to stop the guest at which its I/O did not
    /// quiesce in time. After such an attempt the guest continues to run, and the source tries
    /// again later.
    #[serde(rename = "put_off")]
    pub deferrals: u64,
    /// Total time for which the guest was paused at these attempts, in ms. Not part of the
    /// downtime.
    #[serde(rename = "put_off_ms")]
    pub deferred_ms: f64,
    /// Number of trial pauses, in which the source stops the guest briefly to measure how long
    /// stopping takes.
    pub trial_pauses: u64,
    /// Total time for which no vCPU ran in trial pauses, in ms. Not part of the downtime.
    pub trial_pause_ms: f64,
    /// Figures of the free pages that the guest reported. `None` if the guest could not be asked,
    /// or the settings forbid it.
    pub free_pages: Option<FreePagesFigures>,
    /// Figures of the throttle. `None` if the guest was never throttled.
    pub throttle: Option<ThrottleFigures>,
    /// Changes that the migration made by itself, with reasons
    /// ([`Settings::auto`](crate::Settings::auto)).
    pub course: Vec<CourseChange>,
    /// CPU time of the engine's threads on source and target.
    pub cpu_ms: Cpu,
    /// Number of pages whose content was compared between source and target.
    pub verified_pages: u64,
    /// Number of compared pages whose content differed.
    pub mismatched_pages: u64,
    /// Number of pages that were not compared, because the guest had reported them as free.
    pub skipped_pages: u64,
    /// Number of pages that were sent again because of a digest mismatch.
    #[serde(rename = "suspect_pages_resent")]
    pub digest_mismatches_resent: u64,
    /// Time for verification in ms. Not part of the downtime.
    pub verify_ms: f64,
    /// Figures of a snapshot of a running guest. `None` for every other migration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotFigures>,
}

/// Figures of a snapshot of a running guest ([`snapshot_background`](crate::snapshot_background)).
///
/// [`Report::setup_ms`] is the time in which memory was protected before the pause, and
/// [`Downtime::last_harvest_ms`] the time for this during the pause.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct SnapshotFigures {
    /// Name of the file of the base, if the snapshot is an increment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// Number of pages with content that were not written, because the base has them.
    pub base_pages: u64,
    /// Number of rounds in which memory was protected while the guest ran.
    pub arming_rounds: u64,
    /// Number of faults of the guest in these rounds.
    pub arming_faults: u64,
    /// Number of pages that were protected while the guest was paused, at least.
    pub last_pages: u64,
    /// Time that the hook took while the guest was paused, in ms.
    pub hook_ms: f64,
    /// Number of faults on protected pages while the file was written.
    pub faults: u64,
    /// Number of pages that were copied for these faults.
    pub copied_pages: u64,
    /// Number of faults that waited for a writer because the buffer was full.
    pub waits: u64,
    /// Total time of these waits, in ms.
    pub wait_ms: f64,
    /// Longest of these waits, in ms.
    pub longest_wait_ms: f64,
    /// Size of the buffer in bytes.
    pub buffer_bytes: u64,
    /// Largest part of the buffer that was in use, in bytes.
    pub buffer_peak_bytes: u64,
    /// Time until the file had reached the disk, after its last byte was written, in ms.
    pub sync_ms: f64,
}

/// Kind of migration, by the destination of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MigrationKind {
    /// To a target, in this mode.
    Live(MigrationMode),
    /// Into a file.
    File,
}

impl Default for MigrationKind {
    fn default() -> Self {
        Self::Live(MigrationMode::default())
    }
}

impl fmt::Display for MigrationKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Live(mode) => mode.fmt(f),
            Self::File => f.write_str("file"),
        }
    }
}

impl Serialize for MigrationKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Serializes the name of the tracker's kind, or `none`.
fn kind_or_none<S: Serializer>(kind: &Option<TrackerKind>, serializer: S) -> Result<S::Ok, S::Error> {
    match kind {
        Some(kind) => serializer.collect_str(kind),
        None => serializer.serialize_str("none"),
    }
}

/// Outcome of a migration. Each variant states which host owns the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// The guest runs on the target.
    Completed,
    /// The operator or a policy cancelled the migration. The guest runs on the source.
    Cancelled {
        /// The reason.
        why: String,
    },
    /// The guest could not be moved. The source owns the guest.
    Failed {
        /// The reason.
        why: String,
        /// True if the guest could not be resumed either. The guest is paused on the source, and
        /// the target does not run it.
        paused: bool,
    },
    /// The target was told to run the guest, and the source does not know whether it does. The
    /// guest is paused on the source. Do not resume it unless you know that the target has never
    /// run it. If the target has run it and has ended since, the disks are newer than this memory.
    OwnershipUnknown {
        /// The reason.
        why: String,
    },
    /// The guest ran on the target and was given up before all of its memory had arrived.
    Lost {
        /// The reason.
        why: String,
    },
}

impl Report {
    /// Returns how the migration ended, or `None` if it has not ended yet.
    ///
    /// [`migrate`](crate::migrate) returns only reports of migrations that have ended.
    /// [`MigrationHandle::report`](crate::MigrationHandle::report) also returns reports of running
    /// migrations.
    pub fn ended(&self) -> Option<Ended> {
        let why = || self.error.clone().unwrap_or_default();
        Some(match self.state {
            MigrationState::Completed => Ended::Completed,
            MigrationState::Cancelled => Ended::Cancelled { why: why() },
            MigrationState::Unknown => Ended::OwnershipUnknown { why: why() },
            MigrationState::Lost => Ended::Lost { why: why() },
            MigrationState::Failed => Ended::Failed { why: why(), paused: self.resume_failed },
            MigrationState::Setup
            | MigrationState::Precopy
            | MigrationState::Switchover
            | MigrationState::Postcopy
            | MigrationState::PostcopyPaused => return None,
        })
    }
}

/// Parts of the downtime, in ms.
///
/// Each part begins where the part before it ends, so the parts add up to the downtime.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Downtime {
    /// Time from the beginning of the pause until the last vCPU had stopped.
    pub pause_ms: f64,
    /// Time to pass the device state to the link.
    pub send_state_ms: f64,
    /// Time of the last harvest of dirty pages.
    pub last_harvest_ms: f64,
    /// Time to list the pages of the last pass. In postcopy: time to list the missing pages and to
    /// send the list to the target.
    pub list_pages_ms: f64,
    /// Time from the start of the last pass until the target had received all of its pages. Zero in
    /// postcopy.
    pub last_pages_ms: f64,
    /// Time that the target needs before it loads the device state, including the round trip of the
    /// request.
    ///
    /// In this time, the target checks that its memory is complete. In postcopy, it drops stale
    /// pages and starts to handle faults instead.
    pub target_prepare_ms: f64,
    /// Time to save the device state on the source and to load it on the target.
    pub device_state_ms: f64,
    /// Time from the target's message that it is ready to its message that the guest runs,
    /// excluding the start of the vCPUs.
    pub commit_ms: f64,
    /// Time to start the vCPUs on the target.
    pub resume_ms: f64,
}

/// Bytes and pages that were sent.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Bytes {
    /// Bytes sent on all bulk channels.
    pub wire: u64,
    /// Number of pages sent with their content.
    pub raw_pages: u64,
    /// Number of pages sent as runs of zeros, or not sent because the guest never touched them.
    pub zero_pages: u64,
    /// Number of pages that were skipped because the guest reported them as free, and that were not
    /// sent later.
    pub free_pages_skipped: u64,
    /// Bytes of pages sent as deltas.
    pub delta: u64,
    /// Bytes of pages sent compressed.
    pub compressed: u64,
}

/// Figures of encoded pages.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CodecFigures {
    /// Pages compressed with LZ4.
    pub lz4: EncodingFigures,
    /// Pages compressed with Zstandard.
    pub zstd: EncodingFigures,
    /// Pages sent as deltas.
    pub delta: EncodingFigures,
}

impl Bytes {
    /// Returns the bytes of encoded pages. The other fields are 0.
    pub(crate) fn of_codecs(codecs: Option<&CodecFigures>) -> Self {
        let Some(CodecFigures { lz4, zstd, delta }) = codecs else { return Self::default() };
        Self { delta: delta.bytes, compressed: lz4.bytes + zstd.bytes, ..Self::default() }
    }
}

/// Figures of the pages of one encoding.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct EncodingFigures {
    /// Number of pages.
    pub pages: u64,
    /// Bytes of these pages without the encoding.
    pub raw_bytes: u64,
    /// Bytes of the encoded pages.
    pub bytes: u64,
    /// CPU time of the source for the encoding, in ms. It includes pages that did not become
    /// smaller, and were sent in another way.
    pub cpu_ms: f64,
}

/// Figures of the cache of versions that deltas refer to, for all channels together.
///
/// The processor time of the cache is part of [`CodecFigures::delta`].
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct DeltaCacheFigures {
    /// Number of pages that were sent as deltas.
    pub hits: u64,
    /// Number of pages whose earlier version was not in the cache.
    pub misses: u64,
    /// Number of pages whose delta was too long, and that were sent in another way.
    pub large: u64,
    /// Number of versions that entered the cache.
    pub admitted: u64,
    /// Number of versions that lost their place to another page.
    pub evicted: u64,
    /// Bytes by which the deltas were shorter than their pages.
    pub saved_bytes: u64,
    /// Memory of the cache in bytes. The cache grows as it fills, until the source sends no more
    /// deltas. After that, its last size.
    pub memory_bytes: u64,
    /// Largest memory that the cache may have, in bytes.
    pub limit_bytes: u64,
}

impl DeltaCacheFigures {
    /// Returns the figures of caches that have done `done`, hold `memory_bytes` and may hold
    /// `limit_bytes`.
    pub(crate) fn of(done: SentFigures, memory_bytes: u64, limit_bytes: u64) -> Self {
        let SentFigures { hits, misses, large, admitted, evicted, saved_bytes, .. } = done;
        Self { hits, misses, large, admitted, evicted, saved_bytes, memory_bytes, limit_bytes }
    }
}

/// Figures of known pages, which the target takes from its files.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct KnownPagesFigures {
    /// Number of pages whose hash was sent.
    pub hashes: u64,
    /// Number of these pages that the target knew. They came from its files.
    pub known: u64,
    /// Bytes of the pages that the target knew.
    pub known_bytes: u64,
    /// Number of pages that the target did not know. The source sent them with their content.
    pub unknown: u64,
    /// Bytes of the frames with hashes. Part of [`Bytes::wire`].
    pub wire_bytes: u64,
    /// CPU time of the source for the hashes, in ms.
    pub cpu_ms: f64,
}

/// Figures of one pass over the dirty pages.
#[derive(Debug, Clone, Default, Serialize)]
pub struct PassReport {
    /// Number of the pass, from 0.
    pub pass: u32,
    /// Start of the pass, in ms since the start of the migration.
    pub start_ms: f64,
    /// Number of pages that the pass began with.
    pub pages: u64,
    /// Bytes that the pass sent.
    pub wire_bytes: u64,
    /// Time from the first byte of the pass until the target had received the whole pass, in ms.
    pub ms: f64,
    /// Time of the harvest after the pass, in ms.
    pub harvest_ms: f64,
    /// Part of [`harvest_ms`](Self::harvest_ms) in which the tracker got the written pages from the
    /// kernel, in ms. `None` if the tracker does not measure it.
    pub harvest_kernel_ms: Option<f64>,
    /// Rest of [`harvest_ms`](Self::harvest_ms), in ms: the source merged the pages into its sets
    /// and counted them. `None` if [`harvest_kernel_ms`](Self::harvest_kernel_ms) is `None`.
    pub harvest_walk_ms: Option<f64>,
    /// Number of pages that the guest dirtied during the pass, according to the harvest after it.
    pub dirtied: u64,
}

/// Phase of a migration.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PhaseReport {
    /// Name of the phase: `setup`, `precopy`, `switchover` (no vCPU runs), `verify` (within
    /// `switchover`, not counted as downtime) or `postcopy`.
    pub phase: &'static str,
    /// Start of the phase, in ms since the start of the migration.
    pub start_ms: f64,
    /// Duration of the phase, in ms.
    pub ms: f64,
}

/// Figures of page faults and missing pages of a guest that ran on the target before all of its
/// memory had arrived.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PostcopyFigures {
    /// Number of faults on pages that had to be requested.
    pub faults: u64,
    /// Mean fault latency in microseconds, from reading the fault to placing the page.
    pub mean_us: f64,
    /// Median fault latency, in microseconds.
    pub p50_us: f64,
    /// 99th percentile of the fault latency, in microseconds.
    pub p99_us: f64,
    /// Longest fault latency, in microseconds.
    pub max_us: f64,
    /// Histogram of the fault latency: number of faults in each bucket. The key is the exclusive
    /// upper bound of the bucket in microseconds. The lower bound is half the key.
    pub hist_us: BTreeMap<u64, u64>,
    /// Fault figures of each vCPU. The last entry covers the faults of all other threads.
    pub vcpus: Vec<FaultFigures>,
    /// Number of pages that were requested.
    pub requests: u64,
    /// Number of pages that arrived with content, on any channel.
    pub pages: u64,
    /// Number of pages that arrived as zeros.
    pub zero_pages: u64,
    /// Number of pages that arrived more than once.
    pub duplicates: u64,
    /// Number of pages with a digest mismatch, which were sent again.
    #[serde(rename = "damaged")]
    pub digest_mismatches: u64,
    /// Number of faults on pages that were known to be zero.
    pub zero_faults: u64,
    /// Number of pages that the target requested ahead, because faults followed a sequence.
    pub prefetched: u64,
    /// Number of these prefetched pages that the guest used, as far as the target can observe.
    pub prefetched_used: u64,
    /// Time from the start of the guest on the target until its last page arrived, in ms.
    pub ms: f64,
}

/// Figures of the bulk rate control.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PaceFigures {
    /// Last bulk rate in Mbit/s, not counting packet headers.
    pub mbps: f64,
    /// Smallest recent round trip, in microseconds: the round trip of the network path without
    /// queues. `None` if none was measured.
    pub base_round_trip_us: Option<f64>,
    /// Number of times the rate was lowered because of a queue.
    pub cuts: u64,
    /// Time for which the bulk channels kept their minimum share of the link against a competing
    /// stream that does not yield, in ms.
    pub contended_ms: f64,
    /// Number of probes sent.
    pub probes: u64,
    /// Number of probes that were answered.
    pub echoes: u64,
}

/// Figures of the bulk channels that send at the same time, if their number adapts to the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct SenderFigures {
    /// Number of channels that may send at the same time while the guest runs: the current or the
    /// last one.
    pub now: u16,
    /// Smallest number so far.
    pub least: u16,
    /// Largest number so far.
    pub most: u16,
    /// Number of changes.
    pub changes: u64,
    /// Time in us for which vCPUs waited for processors of the host while the guest ran, summed
    /// over all vCPUs. 0 if the VMM does not tell
    /// ([`SourceVm::run_delays`](crate::SourceVm::run_delays)).
    pub vcpu_wait_us: u64,
}

impl From<&crate::source::pace::Figures> for PaceFigures {
    fn from(figures: &crate::source::pace::Figures) -> Self {
        Self {
            mbps: figures.rate as f64 * 8e-6,
            base_round_trip_us: figures.base_round_trip.map(|time| time.as_secs_f64() * 1e6),
            cuts: figures.cuts,
            contended_ms: figures.contended.as_secs_f64() * 1e3,
            probes: figures.probes,
            echoes: figures.echoes,
        }
    }
}

/// Fault figures of one vCPU, part of [`PostcopyFigures`].
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct FaultFigures {
    /// Number of faults of the vCPU on pages that had to be requested.
    pub faults: u64,
    /// Total time for which these faults blocked the vCPU, in microseconds.
    pub blocked_us: u64,
    /// Mean fault latency, in microseconds.
    pub mean_us: f64,
    /// Median fault latency, in microseconds.
    pub p50_us: f64,
    /// 99th percentile of the fault latency, in microseconds.
    pub p99_us: f64,
    /// Longest fault latency, in microseconds.
    pub max_us: f64,
}

impl From<&FaultLatency> for FaultFigures {
    fn from(latency: &FaultLatency) -> Self {
        let FaultLatency { faults, sum_us, .. } = *latency;
        let us = |ns: u64| ns as f64 / 1e3;
        Self {
            faults,
            blocked_us: sum_us,
            mean_us: if faults == 0 { 0.0 } else { sum_us as f64 / faults as f64 },
            p50_us: us(latency.p50_ns),
            p99_us: us(latency.p99_ns),
            max_us: us(latency.max_ns),
        }
    }
}

impl From<&PagingFigures> for PostcopyFigures {
    fn from(figures: &PagingFigures) -> Self {
        let all = FaultFigures::from(&figures.all);
        let buckets = figures.all.buckets.iter().zip(0u32..).filter(|(count, _)| **count > 0);
        Self {
            faults: all.faults,
            mean_us: all.mean_us,
            p50_us: all.p50_us,
            p99_us: all.p99_us,
            max_us: all.max_us,
            // A peer may send more buckets than a `u64` has powers of two.
            hist_us: buckets
                .map(|(count, power)| (1u64.checked_shl(power).unwrap_or(u64::MAX), *count))
                .collect(),
            vcpus: figures.latency.iter().map(FaultFigures::from).collect(),
            requests: figures.requests,
            pages: figures.pages,
            zero_pages: figures.zero_pages,
            duplicates: figures.duplicates,
            digest_mismatches: figures.digest_mismatches,
            zero_faults: figures.zero_faults,
            prefetched: figures.ahead,
            prefetched_used: figures.ahead_used,
            ms: figures.elapsed_us as f64 / 1e3,
        }
    }
}

/// Figures of the free pages that the guest reported.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct FreePagesFigures {
    /// Number of times the guest was asked which pages are free.
    pub questions: u64,
    /// Number of reports, which are answers or parts of answers, that arrived.
    pub reports: u64,
    /// Number of reports that arrived after the end of the pass in which the guest was asked.
    pub late_reports: u64,
    /// Number of reports that were not used, because they were late or answered no question.
    pub dropped_reports: u64,
    /// Number of pages that were reported as free and are outside the guest's memory.
    pub outside_pages: u64,
    /// Number of pages that were write-protected and moved to the end of the pass, where they are
    /// either skipped or sent.
    #[serde(rename = "put_off_pages")]
    pub postponed_pages: u64,
    /// Time from the first question to the first answer, in ms. `None` if there was no answer.
    pub first_answer_ms: Option<f64>,
    /// Time for which the source waited for an answer before it sent the first page, in ms.
    pub waited_ms: f64,
}

/// Figures of the throttle, which stops the vCPUs for a share of the time so that the guest dirties
/// fewer pages.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ThrottleFigures {
    /// Share of the time, 0 to 1, for which the last throttle setting stopped each vCPU. The last
    /// entry applies to all further vCPUs.
    pub shares: Vec<f64>,
    /// Highest share of any vCPU during the migration.
    pub highest_share: f64,
    /// Time for which the throttle stopped each vCPU, in ms.
    pub held_ms: Vec<f64>,
}

/// CPU time in ms.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Cpu {
    /// CPU time of the engine's threads on the source.
    pub source: f64,
    /// CPU time of the engine's threads on the target.
    #[serde(rename = "destination")]
    pub target: f64,
}

/// Returns the name of a final state in JSON, or `None` if the migration has not ended.
pub(crate) fn word(state: MigrationState) -> Option<String> {
    let word = match state {
        MigrationState::Completed => "completed",
        MigrationState::Cancelled => "cancelled",
        MigrationState::Failed => "failed",
        MigrationState::Unknown => "unknown",
        MigrationState::Lost => "lost",
        MigrationState::Setup
        | MigrationState::Precopy
        | MigrationState::Switchover
        | MigrationState::Postcopy
        | MigrationState::PostcopyPaused => return None,
    };
    Some(word.into())
}
