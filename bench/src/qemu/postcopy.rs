//! Migrations by QEMU's postcopy, observed through the guest's statistics page.
//!
//! From QEMU's docs/devel/migration/postcopy.rst and qapi/migration.json: `postcopy-ram` on both
//! sides, `migrate`, then `migrate-start-postcopy`. `pmemsave` reads the guest's page. Therefore no
//! report goes over the serial line, and all sides of a comparison are measured in the same way.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use vmferry_guest_abi::{GuestArgs, STATS_GPA, State, StatsError, StatsSink, StatsSnapshot, offset};

use super::machine::{Machine, Setup};
use super::{
    MIGRATION_LIMIT, QemuError, QemuSpec, READY_LIMIT, UNLIMITED_BYTES_PER_S, available, completed,
    from_info, listen, word_of,
};
use crate::link::{End, Link};
use crate::postcopy::{CaseSpec, Observation, POLL, Run, SpeedBack, Vcpu, Watch};
use crate::warm::Warm;

/// Interval at which the state of a migration is polled. QEMU's main thread answers besides its own
/// work.
const STATE_POLL: Duration = Duration::from_millis(5);

/// Number of attempts of `migrate-start-postcopy`. QEMU may refuse it directly after `migrate`.
const START_TRIES: u32 = 100;

/// Boots the guest, migrates it by postcopy at once, and observes it meanwhile.
///
/// # Errors
///
/// Fails with [`QemuError::Unavailable`] if QEMU or KVM cannot be used on this host. The caller
/// then skips the case. Every other error is a failure.
pub fn postcopy(spec: &CaseSpec, preempt: bool, watch: Watch<'_>) -> Result<Run, QemuError> {
    let machine = QemuSpec {
        memory: spec.memory,
        vcpus: spec.vcpus,
        workload: spec.workload(),
        warm_up: watch.before,
        ..QemuSpec::default()
    };
    let mut pair = Pair::start(&machine, watch.link)?;
    let before = pair.observe(&machine, POLL)?;
    pair.configure(preempt)?;
    let run = pair.migrate(before, watch)?;
    pair.quit();
    Ok(run)
}

/// Statistics of all vCPUs, and the time at which they were read.
pub(super) type Look = (Instant, Vec<Vcpu>);

/// Returns the observations of these reports, in seconds since `start`.
pub(super) fn observations(looks: Vec<Look>, start: Instant) -> Vec<Observation> {
    looks.into_iter().map(|look| observation(look, start)).collect()
}

/// Returns the observation of a report, in seconds since `start`.
pub(super) fn observation((at, vcpus): Look, start: Instant) -> Observation {
    Observation { at: seconds(start, at), vcpus }
}

/// QEMU process, and the file through which its guest's statistics are read.
#[derive(Debug)]
pub(super) struct Guest {
    side: &'static str,
    pub(super) machine: Machine,
    page: PathBuf,
    bytes: usize,
}

impl Guest {
    fn start(side: &'static str, incoming: bool, setup: Setup<'_>) -> Result<Self, QemuError> {
        let blocks = usize::try_from(setup.spec.vcpus).unwrap_or(usize::MAX).min(64) * offset::BLOCK_WORDS;
        let bytes = (offset::BLOCKS + blocks) * 8;
        let page = setup.folder.join(format!("{side}.page"));
        Ok(Guest { side, machine: Machine::start(side, incoming, setup)?, page, bytes })
    }

    /// Reads the guest's statistics. Returns `None` if there are none yet or the guest was writing
    /// them.
    fn stats(&mut self) -> Result<Option<StatsSnapshot>, QemuError> {
        let Some(name) = self.page.to_str() else {
            return Err(QemuError::Usage("the folder for temporary files has no name in UTF-8".into()));
        };
        let place = json!({ "val": STATS_GPA, "size": self.bytes, "filename": name });
        self.machine.execute("pmemsave", place)?;
        let bytes = fs::read(&self.page).map_err(QemuError::io("read the guest's statistics"))?;
        match StatsSnapshot::read(|word| word_of(&bytes, word)) {
            Ok(stats) if matches!(stats.state, State::Corrupt | State::Panicked) => Err(QemuError::Guest(
                format!("state {:?}, first damage {:?}", stats.state, stats.first_corrupt()),
            )),
            Ok(stats) => Ok(Some(stats)),
            Err(StatsError::NotYet | StatsError::Busy { .. }) => Ok(None),
            Err(error) => Err(QemuError::Guest(error.to_string())),
        }
    }

    pub(super) fn look(&mut self) -> Result<Option<Look>, QemuError> {
        let stats = self.stats()?;
        Ok(stats.map(|stats| (Instant::now(), stats.cpus().iter().map(Vcpu::from).collect())))
    }

    fn wait_until_ready(&mut self) -> Result<(), QemuError> {
        let deadline = Instant::now() + READY_LIMIT;
        loop {
            self.machine.still_runs()?;
            let ready = |stats: &StatsSnapshot| {
                stats.state == State::Running && stats.cpus().iter().all(|cpu| cpu.reports > 0)
            };
            if self.stats()?.as_ref().is_some_and(ready) {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(self.late("the guest's first report", READY_LIMIT));
            }
            std::thread::sleep(POLL);
        }
    }

    pub(super) fn late(&self, what: &'static str, limit: Duration) -> QemuError {
        QemuError::Timeout { side: self.side, what, limit, detail: self.machine.last_words() }
    }
}

/// Source and target, whose guest reports in its statistics page.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) source: Guest,
    pub(super) destination: Guest,
    // Dropped last: the machines' sockets are in it.
    _folder: TempDir,
}

impl Pair {
    /// Starts both processes, and waits until the guest has filled its memory and each vCPU has
    /// reported.
    ///
    /// # Errors
    ///
    /// Fails with [`QemuError::Unavailable`] if QEMU or KVM cannot be used on this host.
    pub(super) fn start(spec: &QemuSpec, link: &Link) -> Result<Self, QemuError> {
        available()?;
        let (folder, kernel) = super::guest_folder()?;
        let workload = &spec.workload;
        let workload = workload.parse().map_err(|e| QemuError::Usage(format!("workload {workload}: {e}")))?;
        let cmdline = GuestArgs { stats: StatsSink::Page, ..GuestArgs::new(workload) }.to_string();
        let setup = Setup { folder: folder.path(), kernel: &kernel, cmdline: &cmdline, spec, link };
        let source = Guest::start("source", false, setup)?;
        let destination = Guest::start("destination", true, setup)?;
        let mut pair = Pair { source, destination, _folder: folder };
        pair.source.wait_until_ready()?;
        Ok(pair)
    }

    /// Reads the guest once per `interval` for the warm-up time, and returns its reports.
    pub(super) fn observe(&mut self, spec: &QemuSpec, interval: Duration) -> Result<Vec<Look>, QemuError> {
        let _warm = Warm::hold(spec.memory);
        let (begin, mut looks) = (Instant::now(), Vec::new());
        while begin.elapsed() < spec.warm_up {
            looks.extend(self.source.look()?);
            std::thread::sleep(interval);
        }
        Ok(looks)
    }

    /// Ends both processes.
    pub(super) fn quit(self) {
        self.source.machine.quit();
        self.destination.machine.quit();
    }

    fn configure(&mut self, preempt: bool) -> Result<(), QemuError> {
        let capabilities = json!({ "capabilities": [
            { "capability": "postcopy-ram", "state": true },
            { "capability": "postcopy-preempt", "state": preempt },
        ]});
        for guest in [&mut self.source, &mut self.destination] {
            guest.machine.execute("migrate-set-capabilities", capabilities.clone()).map_err(|error| {
                // QEMU is too old, or the user may not use userfaultfd.
                match error {
                    QemuError::Refused { description, .. } => QemuError::Unavailable(description),
                    other => other,
                }
            })?;
            let parameters = json!({ "max-bandwidth": UNLIMITED_BYTES_PER_S });
            guest.machine.execute("migrate-set-parameters", parameters)?;
        }
        Ok(())
    }

    fn migrate(&mut self, mut source: Vec<Look>, watch: Watch<'_>) -> Result<Run, QemuError> {
        let uri = listen(&mut self.destination.machine, watch.link.address(End::Destination))?;
        source.extend(self.source.look()?);
        let start = Instant::now();
        self.source.machine.execute("migrate", json!({ "uri": uri }))?;
        self.start_postcopy()?;
        let mut target = Vec::new();
        let info = self.follow(start, &mut source, &mut target)?;
        let end = Instant::now();
        let (stopped, resumed) = (self.source.machine.when("STOP"), self.destination.machine.when("RESUME"));
        let (Some(stopped), Some(resumed)) = (stopped, resumed) else {
            return Err(self.destination.late("the running guest", MIGRATION_LIMIT));
        };
        let (source, mut target) = (observations(source, start), observations(target, start));
        let mut back = SpeedBack::new(&source);
        // At least one report of each vCPU after the end is needed.
        let least = end + POLL * 2;
        loop {
            if let Some(look) = self.destination.look()? {
                let at = look.0;
                let observed = observation(look, start);
                let done = back.is_back(&observed);
                target.push(observed);
                if at > least && (done || at > end + watch.after) {
                    break;
                }
            }
            if Instant::now() > end + watch.after + super::AFTER_LIMIT {
                return Err(self.destination.late("a report of the guest", super::AFTER_LIMIT));
            }
            std::thread::sleep(POLL);
        }
        let result = from_info(&info)?;
        Ok(Run {
            source,
            target,
            switched: seconds(start, resumed),
            end: seconds(start, end),
            // QEMU's own figure covers only the source's part of the downtime.
            result: crate::result::MigrationResult { downtime: resumed - stopped, ..result },
            own: None,
            huge: [None; 2],
        })
    }

    fn start_postcopy(&mut self) -> Result<(), QemuError> {
        for _ in 0..START_TRIES {
            match self.source.machine.execute("migrate-start-postcopy", json!({})) {
                Err(QemuError::Refused { .. }) => std::thread::sleep(Duration::from_millis(1)),
                other => return other.map(drop),
            }
        }
        self.source.machine.execute("migrate-start-postcopy", json!({})).map(drop)
    }

    /// Observes the guest, wherever it runs, until the migration is complete. Returns QEMU's
    /// account of it.
    fn follow(
        &mut self,
        start: Instant,
        source: &mut Vec<Look>,
        target: &mut Vec<Look>,
    ) -> Result<Value, QemuError> {
        let mut next_look = Instant::now();
        loop {
            if let Some(info) = completed(&mut self.source.machine, &self.destination.machine)? {
                return Ok(info);
            }
            if start.elapsed() > MIGRATION_LIMIT {
                return Err(self.source.late("the end of the migration", MIGRATION_LIMIT));
            }
            self.source.machine.still_runs()?;
            self.destination.machine.still_runs()?;
            if self.destination.machine.when("RESUME").is_none() {
                // The target's memory must not be read before the guest runs there: `pmemsave`
                // would wait for missing pages that the source does not send yet. The answer to
                // `query-status` brings the event.
                self.destination.machine.execute("query-status", json!({}))?;
                if self.source.machine.when("STOP").is_none() {
                    source.extend(self.source.look()?);
                }
            } else if Instant::now() >= next_look {
                target.extend(self.destination.look()?);
                next_look = Instant::now() + POLL;
            }
            std::thread::sleep(STATE_POLL);
        }
    }
}

/// Returns the seconds from `start` to `at`. Negative if `at` is earlier.
fn seconds(start: Instant, at: Instant) -> f64 {
    at.saturating_duration_since(start).as_secs_f64() - start.saturating_duration_since(at).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::Link;
    use crate::postcopy::{Options, Side};
    use vmferry_testkit::{Need, skip};

    #[test]
    fn words_beyond_the_copy_are_zero() {
        let bytes: Vec<u8> = (1..=12).collect();
        assert_eq!(word_of(&bytes, 0), u64::from_le_bytes([1, 2, 3, 4, 5, 6, 7, 8]));
        assert_eq!((word_of(&bytes, 1), word_of(&bytes, 1 << 40)), (0, 0));
    }

    /// Runs a whole postcopy of a small guest. Skipped without QEMU, KVM or userfaultfd.
    #[test]
    fn writing_guest_moves_before_its_memory() {
        if crate::qemu::tests::is_skipped() {
            return;
        }
        let mut spec = Options::quick().cases.remove(0);
        (spec.memory, spec.data, spec.sides) = (128 << 20, 64 << 20, vec![Side::Qemu { preempt: true }]);
        let after = Duration::from_millis(200);
        let watch = Watch { link: &Link::Loopback, before: after, after };
        let run = match postcopy(&spec, true, watch) {
            Ok(run) => run,
            Err(QemuError::Unavailable(why)) => return skip(Need::Uffd, why),
            Err(error) => panic!("{error}"),
        };
        assert!(run.switched > 0.0 && run.switched < run.end, "{run:?}");
        assert!(run.result.data_bytes >= spec.data, "{run:?}");
        let writes = |observed: &Observation| observed.vcpus[0].writes;
        let (Some(before), Some(after)) = (run.source.last(), run.target.last()) else { panic!("{run:?}") };
        assert!(writes(after) > writes(before), "{run:?}");
    }
}
