//! State that more than one phase of the source reads or changes.

use super::commit::Claim;
use super::deferral::Deferral;
use crate::source::CourseChange;
use crate::source::events::{Action, Verification};
use crate::source::policy::LinkRate;
use crate::source::settings::{MigrationMode, Settings};
use std::time::Duration;
use vmferry_core::StreamName;
use vmferry_wire::{PagingFigures, ToTarget};

/// Interval between two pings, unless the peer timeout is shorter than four times this interval.
const PING_EVERY: Duration = Duration::from_secs(1);
/// Number of peer timeouts that a step of the target may take while the target answers pings. A
/// step may take long because the target is slow, or because pages of a pass are still in the
/// sockets of a slow link. The time is limited nevertheless, because a paused guest must not wait
/// for ever.
const PATIENCE: u32 = 3;
/// Minimum time for quiescing the guest's I/O, if the guest may go over to postcopy. Otherwise a
/// downtime limit that is shorter than a flush of the storage would prevent the migration.
const LEAST_IO_PATIENCE: Duration = Duration::from_millis(300);

/// Urgency of the switchover, which overrides the policy. Each value includes the values before it.
#[derive(Debug, Hash, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Urgency {
    /// The guest moves once its predicted downtime is within the limit.
    Normal,
    /// The `auto` mode has decided that the guest goes over to postcopy as soon as its I/O can be
    /// quiesced.
    Advised,
    /// The operator or the timeout requires that the guest moves to the target before all of its
    /// memory has arrived.
    Postcopy,
    /// The timeout requires that the guest is stopped and the remaining pages are sent, without a
    /// downtime limit.
    Switch,
}

impl Urgency {
    pub(super) fn raise(&mut self, to: Self) {
        *self = (*self).max(to);
    }

    /// Returns true if the VM may take unlimited time to quiesce its I/O.
    pub(super) fn insists(self) -> bool {
        self >= Self::Postcopy
    }
}

/// Measurements of the link.
#[derive(Debug, Clone)]
pub(super) struct Link {
    pub(super) rate: LinkRate,
    /// Number of the last ping, and the time at which it was sent.
    pub(super) last_ping: (u64, Duration),
    pub(super) round_trip: Duration,
}

impl Link {
    pub(super) fn pong(&mut self, at: Duration, number: u64) {
        if number == self.last_ping.0 {
            self.round_trip = at.saturating_sub(self.last_ping.1);
        }
    }
}

/// Figures that the session keeps for the report, after the phase that they belong to.
#[derive(Debug, Clone, Default)]
pub struct Summary {
    /// Changes that the migration made to its own course.
    pub(super) course: Vec<CourseChange>,
    /// Number of times that the link was lost after the handover.
    pub(super) interruptions: u64,
    /// Target's figures of postcopy.
    pub(super) figures: Option<PagingFigures>,
    pub(super) verification: Option<Verification>,
    /// Number of pages that arrived with a digest mismatch and were sent again.
    pub digest_mismatches_resent: u64,
    /// Time that the target needed to load the device state.
    pub load_time: Duration,
    /// Time that the target needed to start the guest.
    pub start_time: Duration,
    /// CPU time that the target used.
    pub target_cpu: Duration,
}

/// State that more than one phase reads or changes.
#[derive(Debug, Clone)]
pub(super) struct SourceContext {
    pub(super) settings: Settings,
    /// Number of pages of all regions.
    pub(super) pages: u64,
    /// Time at which the migration began.
    pub(super) started: Duration,
    /// Time of the last change of step.
    pub(super) last_step: Duration,
    /// Number of the current pass.
    pub(super) pass: u32,
    pub(super) urgency: Urgency,
    pub(super) link: Link,
    /// Time that the target expects to need for loading the state and starting the guest.
    pub(super) target_load: Option<Duration>,
    /// True if the target's VM needs the state of a trial pause and has not received it yet.
    pub(super) wants_trial: bool,
    /// Names of the streams of device state.
    pub(super) streams: Vec<StreamName>,
    pub(super) deferral: Deferral,
    /// Source's claim, if there is an arbiter.
    pub(super) claim: Option<Claim>,
    pub(super) summary: Summary,
}

impl SourceContext {
    pub(super) fn new(settings: Settings, pages: u64, now: Duration) -> Self {
        Self {
            link: Link { rate: LinkRate::of(&settings), last_ping: (0, now), round_trip: Duration::ZERO },
            claim: settings.arbiter.then(Claim::default),
            settings,
            pages,
            started: now,
            last_step: now,
            pass: 0,
            urgency: Urgency::Normal,
            target_load: None,
            wants_trial: false,
            streams: Vec::new(),
            deferral: Deferral::new(now),
            summary: Summary::default(),
        }
    }

    /// Returns the longest time that the target may take for a step while it answers pings.
    pub(super) fn patience(&self) -> Duration {
        self.settings.peer_timeout.saturating_mul(PATIENCE)
    }

    /// Returns a ping for the target if the interval has passed.
    pub(super) fn ping(&mut self, now: Duration) -> Vec<Action> {
        let every = PING_EVERY.min(self.settings.peer_timeout / 4);
        let (number, sent) = self.link.last_ping;
        if now.saturating_sub(sent) < every {
            return Vec::new();
        }
        self.link.last_ping = (number + 1, now);
        vec![Action::Send(ToTarget::Ping(number + 1))]
    }

    /// Returns the time within which the guest's I/O must be quiesced if there is nothing to send.
    pub(super) fn io_patience(&self) -> Duration {
        let limit = self.settings.downtime_limit;
        let auto = self.settings.auto.as_ref().is_some_and(|auto| auto.postcopy);
        let postcopy = matches!(self.settings.mode, MigrationMode::Postcopy | MigrationMode::Hybrid) || auto;
        if postcopy { limit.max(LEAST_IO_PATIENCE) } else { limit }
    }
}
