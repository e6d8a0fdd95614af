//! One run of the lab.

use super::build::Programs;
use super::emulated::Run;
use super::{Whole, direct, emulated, fill, parts};
use crate::LabArgs;
use anyhow::{Context, Result, bail};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use vmferry_lab::record::{self, CURRENT, Outcome, PACE, Record};
use vmferry_lab::scenarios::{self, Scenario};
use vmferry_lab::summary::Summary;

/// Runs the lab. Returns whether all scenarios passed or were skipped.
pub(crate) fn run(args: &LabArgs, whole: &Whole) -> Result<bool> {
    let start = Instant::now();
    let chosen = choose(args)?;
    let _lock = lock()?;
    let folder = parts::folder().join("run");
    if folder.exists() {
        std::fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    let share = folder.join("share");
    std::fs::create_dir_all(share.join("in"))?;
    std::fs::create_dir_all(share.join("results"))?;
    println!("building static programs");
    let programs = Programs::build()?;
    let built = start.elapsed();
    // The time of a first build belongs to cargo, so the run is measured without it.
    let begin = Instant::now();
    fill(&share, whole, &programs)?;
    let names: Vec<_> = chosen.iter().map(|scenario| scenario.name.to_owned()).collect();
    let two = chosen.iter().any(|scenario| scenario.machines > 1);
    let path = share.join("plan.json");
    println!("built in {:.0} s", built.as_secs_f64());
    let own = direct::plan(names.clone(), &share, whole);
    let lack = if args.emulate {
        Some("not used, because of --emulate".to_owned())
    } else {
        direct::lacks(&own, &folder)?
    };
    let Run { mut records, deaths } = match &lack {
        None => {
            println!("this host's KVM boots Linux guests: the scenarios run on this host");
            own.write(&path)?;
            let records = direct::run(&programs.path("lab-agent"), &path, &own, &folder)?;
            Run { records, ..Run::default() }
        }
        Some(why) => {
            println!("this host's own KVM: {why}");
            println!("starting the emulated machine (Linux {})", whole.outer.version);
            emulated::plan(names.clone(), two, whole).write(&path)?;
            emulated::run(&folder, &share, whole, two)?
        }
    };
    complete(&mut records, &names);
    let summary = Summary::new(
        records,
        deaths,
        begin.elapsed().as_secs_f64(),
        args.quick,
        if lack.is_none() { "direct" } else { "emulated" },
    );
    summary.write(&folder)?;
    println!("\n{}\nlogs and summaries: {}", summary.table(), folder.display());
    Ok(summary.is_good())
}

/// Returns the scenarios that the arguments select.
fn choose(args: &LabArgs) -> Result<Vec<&'static Scenario>> {
    let all = scenarios::all();
    for wanted in &args.scenarios {
        if !all.iter().any(|scenario| scenario.name.starts_with(wanted.as_str())) {
            bail!("there is no scenario '{wanted}'; `cargo xtask lab list` lists them");
        }
    }
    let fits = |scenario: &&Scenario| {
        if args.scenarios.is_empty() {
            scenario.quick || !args.quick
        } else {
            args.scenarios.iter().any(|wanted| scenario.name.starts_with(wanted.as_str()))
        }
    };
    Ok(all.into_iter().filter(fits).collect())
}

/// Returns the record of a machine.
pub(crate) fn own_record(name: &str, why: Option<String>, lived: Duration) -> Record {
    let outcome = if why.is_none() { Outcome::Passed } else { Outcome::Failed };
    Record::new(name, outcome, why, lived.as_secs_f64())
}

/// Returns the record of the scenario that was running when its machine ended, if there was one.
pub(crate) fn under_way(results: &Path, records: &[Record]) -> Option<Record> {
    let current = std::fs::read_to_string(results.join(CURRENT)).unwrap_or_default();
    if current.is_empty() || records.iter().any(|record| record.scenario == current) {
        return None;
    }
    let why = "the machine ended while this scenario was running".to_owned();
    Some(Record::new(&current, Outcome::Failed, Some(why), 0.0))
}

/// Adds records for scenarios that were not started.
fn complete(records: &mut Vec<Record>, names: &[String]) {
    for name in names {
        if !records.iter().any(|record| &record.scenario == name) {
            records.push(Record::new(name, Outcome::NotRun, Some("it was not started".into()), 0.0));
        }
    }
}

/// Progress output of a run.
pub(crate) struct Watch {
    results: PathBuf,
    start: Instant,
    seen: usize,
    current: String,
    since: Instant,
    begun: Option<Duration>,
}

impl Watch {
    /// Creates the output for the records that are added from now on.
    pub(crate) fn new(results: PathBuf, start: Instant) -> Result<Self> {
        let seen = record::read(&results)?.len();
        Ok(Self { results, start, seen, current: String::new(), since: start, begun: None })
    }

    /// Returns the time until the first scenario began.
    pub(crate) fn begun(&self) -> Option<Duration> {
        self.begun
    }

    pub(crate) fn look(&mut self) -> Result<()> {
        let records = record::read(&self.results)?;
        for record in records.iter().skip(self.seen) {
            let why = record.why.as_deref().map_or_else(String::new, |why| format!(": {why}"));
            println!("{:6.0} s  {:8} {}{why}", self.seconds(), record.outcome.word(), record.scenario);
        }
        self.seen = records.len();
        let current = std::fs::read_to_string(self.results.join(CURRENT)).unwrap_or_default();
        if current != self.current {
            self.begun.get_or_insert(self.start.elapsed());
            if !current.is_empty() {
                println!("{:6.0} s  begins   {current}", self.seconds());
            }
            self.current = current;
            self.since = Instant::now();
        }
        Ok(())
    }

    /// Returns the scenario that has run for longer than `times` its limit, at the pace that the
    /// agent measured.
    pub(crate) fn hangs(&self, times: u32) -> Option<&str> {
        let pace = std::fs::read_to_string(self.results.join(PACE)).ok().and_then(|text| text.parse().ok());
        let limit = scenarios::find(&self.current)?.limit.mul_f64(pace.unwrap_or(1.0)) * times;
        (self.since.elapsed() > limit).then_some(self.current.as_str())
    }

    fn seconds(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }
}

/// Takes a lock, because two runs would write to the same folder.
fn lock() -> Result<File> {
    let path = parts::folder().join("lock");
    std::fs::create_dir_all(parts::folder())?;
    let file = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)
        .context("another run of the lab uses this folder")?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scenarios_without_a_record_are_recorded_as_not_run() {
        let mut records = vec![Record::new("a", Outcome::Passed, None, 1.0)];
        complete(&mut records, &["a".to_owned(), "b".to_owned()]);
        assert_eq!(records.len(), 2);
        assert_eq!((records[1].scenario.as_str(), records[1].outcome), ("b", Outcome::NotRun));
    }

    #[test]
    fn agent_hangs_if_a_scenario_exceeds_a_multiple_of_its_limit() {
        let results = tempfile::tempdir().unwrap();
        let mut watch = Watch::new(results.path().to_owned(), Instant::now()).unwrap();
        assert_eq!(watch.hangs(0), None, "no scenario is running");
        std::fs::write(results.path().join(CURRENT), "host").unwrap();
        watch.look().unwrap();
        let limit = scenarios::find("host").unwrap().limit;
        watch.since = Instant::now().checked_sub(limit * 4).unwrap();
        assert_eq!(watch.hangs(3), Some("host"));
        std::fs::write(results.path().join(PACE), "1.5").unwrap();
        assert_eq!(watch.hangs(3), None);
    }

    #[test]
    fn scenario_that_ran_when_the_machine_ended_has_failed() {
        let results = tempfile::tempdir().unwrap();
        assert_eq!(under_way(results.path(), &[]), None);
        std::fs::write(results.path().join(CURRENT), "a").unwrap();
        assert_eq!(under_way(results.path(), &[]).unwrap().outcome, Outcome::Failed);
        assert_eq!(under_way(results.path(), &[Record::new("a", Outcome::Passed, None, 1.0)]), None);
    }
}
