//! Timestamps taken by the driver, from which the report is made.

use super::driver::Context;
use super::session::Session;
use super::spans::Spans;
use crate::clock::Clock;
use crate::handle::{MigrationHandle, MigrationState, thread_cpu_us};
use crate::report::{
    Bytes, Cpu, Downtime, MigrationKind, PassReport, PhaseReport, PostcopyFigures, Report, ThrottleFigures,
    word,
};
use crate::source::MigrationMode;
use crate::vm::shielded;
use std::sync::atomic::Ordering;
use std::time::Duration;
use vmferry_core::DirtyTracker;
use vmferry_protocol::source::{Event, Outcome};
use vmferry_wire::{RefusalCode, ToSource, ToTarget};

#[derive(Debug, Default)]
pub(super) struct Timings {
    clock: Clock,
    spans: Spans,
    /// Time that the tracker needed to start.
    tracking: Option<Duration>,
    first_page: Option<Duration>,
    /// Start of the newest pass, with the bytes that had been sent and saved by then.
    pass: Option<(Duration, (u64, u64))>,
    /// Bytes on the wire of the last pass, divided by the bytes without encoding.
    on_the_wire: Option<f64>,
    passes: Vec<PassReport>,
    /// Start of each pass of `passes`.
    starts: Vec<Duration>,
    pause: Option<Duration>,
    paused: Option<Duration>,
    saved: Option<Duration>,
    /// Time at which the driver began the step after sending the device state: the last harvest, or
    /// the list of missing pages.
    state_sent: Option<Duration>,
    /// End of the last harvest.
    harvested: Option<Duration>,
    /// Time that listing the pages of the newest pass took.
    listing: Duration,
    /// Time for which the pages of the current pass were held back.
    held: Duration,
    /// Time at which the target was asked to load the state.
    loading: Option<Duration>,
    last_pages: Option<Duration>,
    received: Option<Duration>,
    verify: Option<Duration>,
    verified: Option<Duration>,
    ready: Option<Duration>,
    running: Option<Duration>,
    /// True if the guest runs on the target before the target has all of the memory.
    in_postcopy: bool,
    complete: Option<Duration>,
    resumed: Option<Duration>,
    predicted: Option<Duration>,
    /// Number of trial pauses, and the time for which no vCPU ran in them.
    trials: u64,
    trial: Duration,
    /// Shares of the last throttle, and the highest share so far.
    shares: Vec<f64>,
    highest: f64,
    /// Time for which each vCPU had been stopped by a throttle before this migration.
    held_before: Vec<Duration>,
}

impl Timings {
    /// Creates the timings of a migration. `held_before` is the time for which each vCPU had been
    /// stopped by a throttle before.
    pub(super) fn new(context: &Context<'_>, held_before: Vec<Duration>) -> Self {
        let spans = Spans::begin(&context.migration.to_string(), &context.settings.mode.to_string());
        Self { clock: context.clock, spans, held_before, ..Self::default() }
    }

    /// Notes that the tracker has started, from `began` until now.
    pub(super) fn tracking_started(&mut self, began: Duration) {
        self.tracking = Some(self.clock.since(began));
    }

    pub(super) fn begin_pass(&mut self, pass: u32, pages: u64, handle: &MigrationHandle) {
        let now = self.clock.now();
        if self.first_page.is_none() && self.pause.is_none() {
            self.spans.precopy();
        }
        self.spans.pass(pass, pages);
        self.first_page.get_or_insert(now);
        self.pass = Some((now, sent(handle)));
        self.starts.push(now);
        self.passes.push(PassReport { pass, pages, ..PassReport::default() });
        if self.pause.is_some() {
            self.last_pages.get_or_insert(now);
        }
    }

    /// Notes that the pages of the next pass were listed, from `began` until now.
    pub(super) fn listed(&mut self, began: Duration) {
        self.listing = self.clock.since(began);
    }

    /// Notes that the pages of the next pass were held back for `time`.
    pub(super) fn held_back(&mut self, time: Duration) {
        self.held = time;
    }

    /// Records that the device state, if there is any, has been passed to the link.
    pub(super) fn state_sent(&mut self) {
        if self.saved.is_some() {
            self.state_sent.get_or_insert(self.clock.now());
        }
    }

    /// Notes that all channels have sent the pass. Returns the event that reports it.
    pub(super) fn pass_sent(&mut self, handle: &MigrationHandle) -> Event {
        let (_, (wire_before, saved_before)) = self.pass.unwrap_or_default();
        let (wire, saved) = sent(handle);
        let (wire, saved) = (wire - wire_before, saved - saved_before);
        if let Some(report) = self.passes.last_mut()
            && self.verify.is_none()
        {
            report.wire_bytes = wire;
        }
        // The session predicts the time for a number of pages, so it must know the rate of pages
        // and not that of encoded bytes.
        let bytes = wire + saved;
        self.on_the_wire = (bytes > 0).then(|| wire as f64 / bytes as f64);
        Event::PassSent { bytes, listing: self.listing, held: std::mem::take(&mut self.held) }
    }

    /// Returns the rate of the link for a rate of pages as if they were not encoded, in bytes per
    /// second.
    pub(super) fn on_the_wire(&self, rate: f64) -> f64 {
        rate * self.on_the_wire.unwrap_or(1.0)
    }

    /// Notes the end of a harvest that began at `began` and spent `in_kernel` in the kernel.
    /// `of_pass` is true if the harvest found the pages that were written during the last pass.
    pub(super) fn harvested(
        &mut self,
        began: Duration,
        in_kernel: Option<Duration>,
        pages: u64,
        of_pass: bool,
    ) {
        let elapsed = self.clock.since(began);
        // The tracker and the driver may use different clocks.
        let in_kernel = in_kernel.map(|time| time.min(elapsed));
        self.harvested = Some(self.clock.now());
        if let Some(report) = self.passes.last_mut().filter(|_| of_pass) {
            report.harvest_ms = ms(elapsed);
            report.harvest_kernel_ms = in_kernel.map(ms);
            report.harvest_walk_ms = in_kernel.map(|time| ms(elapsed - time));
            report.dirtied = pages;
        }
    }

    pub(super) fn pausing(&mut self, predicted: Option<Duration>) {
        self.spans.switchover();
        self.pause = Some(self.clock.now());
        self.predicted = predicted;
    }

    /// Notes the end of a trial pause in which no vCPU ran for `time`.
    pub(super) fn trial_paused(&mut self, time: Duration) {
        self.trials += 1;
        self.trial += time;
    }

    pub(super) fn paused(&mut self) {
        self.paused = Some(self.clock.now());
    }

    pub(super) fn saved(&mut self) {
        self.saved = Some(self.clock.now());
    }

    /// Returns the time since the guest was paused.
    pub(super) fn paused_time(&self) -> Duration {
        between(self.pause, Some(self.clock.now()))
    }

    /// Cancels the pause of a deferred switchover, after which the guest continues to run. A `mode`
    /// with passes returns to its precopy phase.
    pub(super) fn went_on(&mut self, mode: MigrationMode) {
        if matches!(mode, MigrationMode::Postcopy | MigrationMode::Local) {
            self.spans.setup()
        } else {
            self.spans.precopy()
        }
        (self.pause, self.paused, self.saved, self.predicted) = (None, None, None, None);
        self.state_sent = None;
    }

    pub(super) fn throttled(&mut self, shares: Vec<f64>) {
        self.highest = shares.iter().copied().fold(self.highest, f64::max);
        self.shares = shares;
    }

    fn throttle(&self, held: &[Duration]) -> Option<ThrottleFigures> {
        let before = self.held_before.iter().copied().chain(std::iter::repeat(Duration::ZERO));
        let held = held.iter().zip(before).map(|(now, before)| ms(now.saturating_sub(before)));
        (!self.shares.is_empty()).then(|| ThrottleFigures {
            shares: self.shares.clone(),
            highest_share: self.highest,
            held_ms: held.collect(),
        })
    }

    pub(super) fn ended(&mut self, outcome: &Outcome) {
        self.spans.end(match outcome {
            Outcome::Completed => "completed",
            Outcome::Cancelled(_) => "cancelled",
            Outcome::Failed(_) => "failed",
            Outcome::Unknown(_) => "unknown",
            Outcome::Lost(_) => "lost",
        });
    }

    /// Records that the guest runs on the source again. The downtime of the failed attempt ends
    /// now, however long the cleanup takes.
    pub(super) fn resumed(&mut self) {
        self.resumed = Some(self.clock.now());
    }

    pub(super) fn verifying(&mut self) {
        self.spans.verify();
        self.verify = Some(self.clock.now());
    }

    pub(super) fn sending(&mut self, message: &ToTarget) {
        self.in_postcopy |= matches!(message, ToTarget::LoadLazily { .. });
        if matches!(message, ToTarget::Load | ToTarget::LoadLazily { .. }) {
            self.loading = Some(self.clock.now());
            // A handoff has no step between the device state and this message.
            self.state_sent = self.state_sent.or(self.loading);
            if self.verify.is_some() {
                self.spans.verified();
                self.verified = self.loading;
            }
        }
    }

    pub(super) fn message(&mut self, message: &ToSource) {
        let now = self.clock.now();
        match message {
            ToSource::Received { .. } if self.verify.is_none() => {
                self.received = Some(now);
                if let (Some((began, _)), Some(report)) = (self.pass, self.passes.last_mut()) {
                    report.ms = ms(now.saturating_sub(began));
                }
            }
            ToSource::Ready { .. } => self.ready = Some(now),
            ToSource::Running { .. } => {
                if self.in_postcopy {
                    self.spans.postcopy();
                }
                self.running = Some(now);
            }
            // The message that the guest runs was lost, so the time of this message is used as an
            // upper bound.
            ToSource::Resume { .. } => {
                self.running.get_or_insert(now);
            }
            ToSource::Complete(_) => self.complete = Some(now),
            _ => {}
        }
    }

    fn verify_time(&self) -> Duration {
        between(self.verify, self.verified)
    }

    fn downtime(&self, session: &Session) -> Downtime {
        let save = between(self.paused, self.saved);
        // Each part begins where the one before it ends, so the parts add up to the whole downtime.
        // A handover sends a list of missing pages instead of a last pass. A postcopy without
        // precopy has no harvest.
        let harvested = self.harvested.max(self.state_sent);
        let (listed, sent) =
            if self.in_postcopy { (self.loading, self.loading) } else { (self.last_pages, self.received) };
        let verified = self.verify_time();
        let list = between(harvested, listed).saturating_sub(if self.in_postcopy {
            verified
        } else {
            Duration::ZERO
        });
        let check = if self.in_postcopy {
            Duration::ZERO
        } else {
            between(sent, self.loading).saturating_sub(verified)
        };
        let (loading, starting) = (between(self.loading, self.ready), between(self.ready, self.running));
        // The target reports these times.
        let summary = session.summary();
        let (load, start) = (summary.load_time.min(loading), summary.start_time.min(starting));
        Downtime {
            pause_ms: ms(between(self.pause, self.paused)),
            send_state_ms: ms(between(self.saved, self.state_sent)),
            last_harvest_ms: ms(between(self.state_sent, harvested)),
            list_pages_ms: ms(list),
            last_pages_ms: ms(if self.in_postcopy {
                Duration::ZERO
            } else {
                between(self.last_pages, self.received)
            }),
            target_prepare_ms: ms(check + loading - load),
            device_state_ms: ms(save + load),
            commit_ms: ms(starting - start),
            resume_ms: ms(start),
        }
    }

    fn passes(&self) -> Vec<PassReport> {
        let passes = self.passes.iter().zip(&self.starts);
        passes.map(|(pass, start)| PassReport { start_ms: ms(*start), ..pass.clone() }).collect()
    }

    /// Returns the phases in their order. A phase that was not reached is missing, and a phase that
    /// has not ended ends at `end`.
    fn phases(&self, end: Duration) -> Vec<PhaseReport> {
        let started = self.running.or(self.resumed);
        // Without precopy the guest is stopped before the first page is sent.
        let precopy = self.first_page.filter(|first| self.pause.is_none_or(|pause| *first < pause));
        let spans = [
            ("setup", Some(Duration::ZERO), precopy.or(self.pause)),
            ("precopy", precopy, self.pause),
            ("switchover", self.pause, started),
            ("verify", self.verify, self.verified),
            ("postcopy", self.running.filter(|running| *running < end), Some(end)),
        ];
        let of = |(phase, from, to): (&'static str, Option<Duration>, Option<Duration>)| {
            let from = from?;
            Some(PhaseReport { phase, start_ms: ms(from), ms: ms(to.unwrap_or(end).saturating_sub(from)) })
        };
        spans.into_iter().filter_map(of).collect()
    }

    /// Returns the report so far of a migration that has not ended. The handle adds the state and
    /// the figures that change continuously.
    pub(super) fn account(
        &self,
        context: &Context<'_>,
        session: &Session,
        tracker: &dyn DirtyTracker,
        held: &[Duration],
    ) -> Report {
        let counters = &context.handle.counters;
        let local = context.shared.is_some();
        let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let started = self.running.or(self.resumed).unwrap_or_else(|| self.clock.now());
        let end = self.complete.unwrap_or(started);
        let wire = load(&counters.wire_bytes);
        let codecs = counters.encodings.figures();
        let moving = between(self.first_page, Some(end)).saturating_sub(self.verify_time()).as_secs_f64();
        let verification = session.verification().cloned().unwrap_or_default();
        let stopped = between(self.pause, Some(started));
        let verified_in_postcopy = session.figures().filter(|_| context.settings.verify);
        let verified_in_postcopy =
            verified_in_postcopy.map_or(0, |figures| figures.pages.saturating_add(figures.zero_pages));
        Report {
            id: context.migration.to_string(),
            kind: MigrationKind::Live(context.settings.mode),
            postcopy: session.figures().map(PostcopyFigures::from),
            pace: context.handle.pace(),
            interruptions: session.interruptions(),
            deferrals: session.deferrals(),
            deferred_ms: ms(session.deferred_time()),
            trial_pauses: self.trials,
            trial_pause_ms: ms(self.trial),
            tracker: (!local).then(|| tracker.kind()),
            total_ms: ms(end),
            downtime_ms: ms(stopped.saturating_sub(self.verify_time())),
            setup_ms: ms(self.first_page.or(self.pause.filter(|_| local)).unwrap_or_default()),
            enable_tracking_ms: self.tracking.map(ms),
            predicted_downtime_ms: self.predicted.map(ms),
            downtime: self.downtime(session),
            bytes: Bytes {
                wire,
                raw_pages: load(&counters.raw_pages),
                zero_pages: load(&counters.zero_pages) + load(&counters.untouched),
                ..Bytes::of_codecs(codecs.as_ref())
            },
            codecs,
            delta_cache: counters.encodings.delta_cache(),
            known_pages: counters.hashes.figures(),
            passes: self.passes(),
            phases: self.phases(end),
            throughput_mbps: if moving > 0.0 { wire as f64 * 8e-6 / moving } else { 0.0 },
            ring: shielded("reading the figures of the dirty rings failed", || tracker.ring()),
            throttle: self.throttle(held),
            course: session.course().to_vec(),
            cpu_ms: Cpu {
                // CPU time that this thread used before the migration does not count.
                source: (load(&counters.cpu_us) + thread_cpu_us()).saturating_sub(context.cpu_before_us)
                    as f64
                    / 1e3,
                target: ms(session.summary().target_cpu),
            },
            // A page that arrived after the handover was placed only if it matched its digest.
            verified_pages: verification.pages.saturating_add(verified_in_postcopy),
            mismatched_pages: verification.mismatched,
            digest_mismatches_resent: session.summary().digest_mismatches_resent,
            verify_ms: ms(self.verify_time()),
            ..Report::default()
        }
    }

    /// Returns the report of a migration that has ended with `outcome`.
    pub(super) fn report(
        &self,
        context: &Context<'_>,
        session: &Session,
        outcome: &Outcome,
        tracker: &dyn DirtyTracker,
        held: &[Duration],
    ) -> Report {
        let (state, error) = match outcome {
            Outcome::Completed => (MigrationState::Completed, None),
            Outcome::Cancelled(why) => (MigrationState::Cancelled, Some(why.clone())),
            Outcome::Failed(why) => (MigrationState::Failed, Some(why.to_string())),
            Outcome::Unknown(why) => (MigrationState::Unknown, Some(why.clone())),
            Outcome::Lost(why) => (MigrationState::Lost, Some(why.clone())),
        };
        Report {
            state,
            outcome: word(state),
            error,
            resume_failed: session.resume_failed(),
            refused_feature: self.passes.is_empty()
                && matches!(outcome, Outcome::Failed(why) if why.code == RefusalCode::Feature),
            ..self.account(context, session, tracker, held)
        }
    }
}

/// Returns the bytes that were sent, and the bytes that encoded pages have saved.
fn sent(handle: &MigrationHandle) -> (u64, u64) {
    let counters = &handle.counters;
    (counters.wire_bytes.load(Ordering::Relaxed), counters.encodings.saved())
}

fn between(from: Option<Duration>, to: Option<Duration>) -> Duration {
    match (from, to) {
        (Some(from), Some(to)) => to.saturating_sub(from),
        _ => Duration::ZERO,
    }
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
