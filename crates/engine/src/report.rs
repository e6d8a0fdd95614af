//! The account of a migration, in the shape of the `migrate --json` document.

use crate::monitor::MigrationState;
use crate::plan::CourseChange;
use crate::source::MigrationMode;
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;
use vmferry_core::{RingFigures, TrackerKind};
use vmferry_wire::{FaultLatency, LazyFigures};

/// Everything that is known of a migration after its end.
#[must_use = "its `state` says who owns the guest"]
#[derive(Debug, Clone, Default, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// How it ended.
    pub state: MigrationState,
    /// The same, as one word; `None` while it runs.
    pub outcome: Option<String>,
    /// What went wrong, in words; `None` if nothing did.
    pub error: Option<String>,
    /// The guest is this side's and stands still: it could not be resumed, as the error says. Nobody else runs it.
    pub stands_still: bool,
    /// The target cannot do what was asked for, and has taken nothing: it can be asked for less.
    #[serde(skip)]
    pub refused_feature: bool,
    /// Name of the migration, 32 hexadecimal digits.
    pub id: String,
    /// Way in which the guest left its host.
    #[serde(rename = "mode")]
    pub way: Way,
    /// Tracker of dirty pages. `None` for a guest that was paused while its memory was read.
    #[serde(serialize_with = "kind_or_none")]
    pub tracker: Option<TrackerKind>,
    /// From the first connection to the guest running on the target, in ms.
    pub total_ms: f64,
    /// From the pause to the target's word that the guest runs, in ms, without the time that verification took.
    pub downtime_ms: f64,
    /// From the first connection to the first page, in ms.
    pub setup_ms: f64,
    /// The downtime that was predicted when the guest was stopped, in ms.
    pub predicted_downtime_ms: Option<f64>,
    /// What the downtime was made of.
    pub downtime: Downtime,
    /// What was sent.
    pub bytes: Bytes,
    /// One entry a pass.
    pub passes: Vec<PassReport>,
    /// What was done when: ascending, and each with its beginning and length.
    pub phases: Vec<PhaseReport>,
    /// Bytes on the wire over the time from the first page to the end, in Mbit/s.
    pub throughput_mbps: f64,
    /// How the dirty rings did; `None` for a tracker without.
    pub ring: Option<RingFigures>,
    /// How pages came to the running guest; `None` if all came before it ran.
    pub postcopy: Option<PostcopyFigures>,
    /// How the bulk was paced beside pages that the guest waited for; `None` if no pace had to be found.
    pub pace: Option<PaceFigures>,
    /// How often the link was lost in postcopy, and taken up again.
    pub interruptions: u64,
    /// How often the guest could not be stopped, or went on after it was, because its I/O did not come to rest in time.
    pub put_off: u64,
    /// For how long it stood still for that, all together, in ms. No part of the downtime.
    pub put_off_ms: f64,
    /// Number of trial pauses: the guest was stopped for an instant, to learn how long that takes.
    pub trial_pauses: u64,
    /// Time for which no vCPU ran in trial pauses, all together, in ms. No part of the downtime.
    pub trial_pause_ms: f64,
    /// How free pages were learnt of; `None` if nobody could be asked, or was to be.
    pub free_pages: Option<FreePagesFigures>,
    /// How the guest was slowed; `None` if it never was.
    pub throttle: Option<ThrottleFigures>,
    /// What this migration has done by itself, and why ([`Settings::auto`](crate::Settings::auto)).
    pub course: Vec<CourseChange>,
    /// CPU time of the engine's threads.
    pub cpu_ms: Cpu,
    /// Pages compared on both sides.
    pub verified_pages: u64,
    /// Pages that differed.
    pub mismatched_pages: u64,
    /// Pages that were not compared because their content does not count.
    pub skipped_pages: u64,
    /// Pages that were sent again because they arrived damaged.
    pub suspect_pages_resent: u64,
    /// Time that verification took, outside the downtime, in ms.
    pub verify_ms: f64,
}

/// Way in which a guest leaves its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Way {
    /// To a target.
    Live(MigrationMode),
    /// Into a file.
    File,
}

impl Default for Way {
    fn default() -> Self {
        Self::Live(MigrationMode::default())
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Live(mode) => mode.fmt(f),
            Self::File => f.write_str("file"),
        }
    }
}

impl Serialize for Way {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Writes the tracker's kind as one word, `none` included.
fn kind_or_none<S: Serializer>(kind: &Option<TrackerKind>, serializer: S) -> Result<S::Ok, S::Error> {
    match kind {
        Some(kind) => serializer.collect_str(kind),
        None => serializer.serialize_str("none"),
    }
}

/// End of a migration, and the side that owns the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// The guest runs on the target.
    Completed,
    /// The operator or a policy wanted the guest to stay. It runs on the source.
    Cancelled {
        /// The reason.
        why: String,
    },
    /// The guest could not be moved. It is the source's.
    Failed {
        /// The reason.
        why: String,
        /// The guest could not be resumed either: it is paused on the source, and no other side runs it.
        paused: bool,
    },
    /// The target was told to run the guest, and the source does not know whether it does. The guest is
    /// paused on the source. Do not resume it before you know that the target does not run it.
    OwnershipUnknown {
        /// The reason.
        why: String,
    },
    /// The guest ran on the target, and was given up before all of its memory was there.
    Lost {
        /// The reason.
        why: String,
    },
}

impl Report {
    /// Returns how the migration ended. `None` if it has not ended: only
    /// [`Monitor::report`](crate::Monitor::report) returns such a report.
    pub fn ended(&self) -> Option<Ended> {
        let why = || self.error.clone().unwrap_or_default();
        Some(match self.state {
            MigrationState::Completed => Ended::Completed,
            MigrationState::Cancelled => Ended::Cancelled { why: why() },
            MigrationState::Unknown => Ended::OwnershipUnknown { why: why() },
            MigrationState::Lost => Ended::Lost { why: why() },
            MigrationState::Failed => Ended::Failed { why: why(), paused: self.stands_still },
            MigrationState::Setup
            | MigrationState::Precopy
            | MigrationState::Switchover
            | MigrationState::Postcopy
            | MigrationState::PostcopyPaused => return None,
        })
    }
}

/// The parts of the downtime, in ms. Together they are the downtime, but for what the driver does between two steps.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Downtime {
    /// Until the last vCPU had stopped.
    pub pause_ms: f64,
    /// Handing the device state over to the link.
    pub send_state_ms: f64,
    /// The last harvest of dirty pages.
    pub last_harvest_ms: f64,
    /// Listing the pages that the last pass sends. In postcopy: listing the missing pages, and telling the target which they are.
    pub list_pages_ms: f64,
    /// Sending the last pages until the target had them.
    pub last_pages_ms: f64,
    /// What the target does before it loads the device state, with the round trip of the request: it checks that its memory is complete. In
    /// postcopy it drops the pages that are stale and begins to take faults.
    pub target_prepare_ms: f64,
    /// Saving the device state here and loading it there.
    pub device_state_ms: f64,
    /// From the target being ready to its word that the guest runs, without starting it.
    pub commit_ms: f64,
    /// Starting the vCPUs there.
    pub resume_ms: f64,
}

/// What was sent.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Bytes {
    /// All bytes of the bulk channels.
    pub wire: u64,
    /// Pages sent with their content.
    pub raw_pages: u64,
    /// Pages sent as a count of zeros, or not at all because they were never touched.
    pub zero_pages: u64,
    /// Pages skipped because the guest said that they are free, and never sent afterwards.
    pub free_pages_skipped: u64,
    /// Bytes of pages sent as differences.
    pub delta: u64,
    /// Bytes of pages sent compressed.
    pub compressed: u64,
}

/// One pass over the dirty pages.
#[derive(Debug, Clone, Default, Serialize)]
pub struct PassReport {
    /// Its number, from 0.
    pub pass: u32,
    /// When it began, in ms since the first connection.
    pub start_ms: f64,
    /// Pages it had to look at.
    pub pages: u64,
    /// Bytes it sent.
    pub wire_bytes: u64,
    /// From its first byte until the target had all of it, in ms.
    pub ms: f64,
    /// The harvest after it, in ms.
    pub harvest_ms: f64,
    /// Pages that the guest had dirtied by then.
    pub dirtied: u64,
}

/// A stretch of a migration.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PhaseReport {
    /// `setup`, `precopy`, `switchover` (the guest stands still), `verify` (within that, and not counted as downtime) or
    /// `postcopy`.
    pub phase: &'static str,
    /// When it began, in ms since the first connection.
    pub start_ms: f64,
    /// How long it took, in ms.
    pub ms: f64,
}

/// How pages came to a guest that was running on the target.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PostcopyFigures {
    /// Faults on pages that had to be asked for.
    pub faults: u64,
    /// From reading a fault to its page being placed, in microseconds: the mean.
    pub mean_us: f64,
    /// The median.
    pub p50_us: f64,
    /// 99 of 100 took no longer.
    pub p99_us: f64,
    /// The longest.
    pub max_us: f64,
    /// How many took less than so many microseconds and not less than half of that.
    pub hist_us: BTreeMap<u64, u64>,
    /// The same for each vCPU; the last is everybody else.
    pub vcpus: Vec<FaultFigures>,
    /// Pages that were asked for.
    pub requests: u64,
    /// Pages that came with content, on any channel.
    pub pages: u64,
    /// Pages that came as zeros.
    pub zero_pages: u64,
    /// Pages that came twice.
    pub duplicates: u64,
    /// Pages that came damaged, and again.
    pub damaged: u64,
    /// Faults on pages that were known to be zero.
    pub zero_faults: u64,
    /// Pages asked for ahead of a run of faults.
    pub prefetched: u64,
    /// How many of them were used, as far as that can be seen.
    pub prefetched_used: u64,
    /// From the guest's start until its last page was there, in ms.
    pub ms: f64,
}

/// How the pace of the bulk was found.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PaceFigures {
    /// The last pace, in Mbit/s without headers.
    pub mbps: f64,
    /// The smallest round trip of the last seconds, in microseconds.
    pub base_round_trip_us: Option<f64>,
    /// How often it was lowered because of a queue.
    pub cuts: u64,
    /// How long it insisted on its least share beside a stream that does not give way, in ms.
    pub contended_ms: f64,
    /// Probes sent.
    pub probes: u64,
    /// Probes that came back.
    pub echoes: u64,
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

/// One vCPU's share of [`PostcopyFigures`].
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct FaultFigures {
    /// Its faults.
    pub faults: u64,
    /// How long it stood still for them, in microseconds.
    pub blocked_us: u64,
    /// The mean.
    pub mean_us: f64,
    /// The median.
    pub p50_us: f64,
    /// 99 of 100 took no longer.
    pub p99_us: f64,
    /// The longest.
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

impl From<&LazyFigures> for PostcopyFigures {
    fn from(figures: &LazyFigures) -> Self {
        let all = FaultFigures::from(&figures.all);
        let buckets = figures.all.buckets.iter().zip(0u32..).filter(|(count, _)| **count > 0);
        Self {
            faults: all.faults,
            mean_us: all.mean_us,
            p50_us: all.p50_us,
            p99_us: all.p99_us,
            max_us: all.max_us,
            // What a peer sends may have more buckets than there are numbers.
            hist_us: buckets
                .map(|(count, power)| (1u64.checked_shl(power).unwrap_or(u64::MAX), *count))
                .collect(),
            vcpus: figures.latency.iter().map(FaultFigures::from).collect(),
            requests: figures.requests,
            pages: figures.pages,
            zero_pages: figures.zero_pages,
            duplicates: figures.duplicates,
            damaged: figures.damaged,
            zero_faults: figures.zero_faults,
            prefetched: figures.ahead,
            prefetched_used: figures.ahead_used,
            ms: figures.elapsed_us as f64 / 1e3,
        }
    }
}

/// How free pages were learnt of.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct FreePagesFigures {
    /// How often it was asked which pages are free.
    pub questions: u64,
    /// Answers that came, or parts of them.
    pub reports: u64,
    /// Those of them that came when what they would have been for was over.
    pub late_reports: u64,
    /// Those of them that were not used, because they were late, or for a question that nobody asked.
    pub dropped_reports: u64,
    /// Pages that were said to be free and that the guest does not have.
    pub outside_pages: u64,
    /// Pages that were protected and put off, to be left out or to be sent at the end of the pass.
    pub put_off_pages: u64,
    /// From the first question to the first answer, in ms; `None` if none came.
    pub first_answer_ms: Option<f64>,
}

/// How a guest was slowed so that it dirtied less.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ThrottleFigures {
    /// The share of its time that each vCPU was to stand still in the end; the last stands for all further ones.
    pub shares: Vec<f64>,
    /// The highest share that any had.
    pub highest_share: f64,
    /// How long each vCPU stood still for it, in ms.
    pub held_ms: Vec<f64>,
}

/// CPU time in ms.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Cpu {
    /// Of the source's engine threads.
    pub source: f64,
    /// Of the target's engine threads.
    pub destination: f64,
}

/// The state as its one word in JSON, for an outcome.
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
