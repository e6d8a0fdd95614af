//! One run of the lab.

use super::build::Programs;
use super::machine::{Machine, Setup};
use super::{Whole, fill, initramfs, parts, write};
use crate::LabArgs;
use anyhow::{Context, Result, bail};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use vmferry_lab::plan::Plan;
use vmferry_lab::record::{self, CURRENT, Outcome, Record};
use vmferry_lab::scenarios::{self, Scenario};
use vmferry_lab::summary::Summary;

/// How long all of it may take, in the short form and in the long one.
const LIMIT_QUICK: Duration = Duration::from_secs(6 * 60);
const LIMIT: Duration = Duration::from_secs(15 * 60);
/// What is left to the machine to come up, and to us to sum up.
const RESERVE: Duration = Duration::from_secs(25);
/// How long the machine may take until its first scenario begins.
const BOOT: Duration = Duration::from_secs(120);
/// How often the results are looked at.
const TICK: Duration = Duration::from_millis(250);
/// The record of the machine itself.
const MACHINE: &str = "outer-machine";
/// What a kernel says when something is wrong with it.
const TROUBLE: [&str; 7] = [
    "Kernel panic",
    "BUG:",
    "Oops:",
    "soft lockup",
    "general protection fault",
    "rcu_sched self-detected",
    "Call Trace:",
];

/// Runs the lab; `true` if all is well.
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
    // What a first build takes is cargo's, not the lab's.
    let begin = Instant::now();
    let end = begin + if args.quick { LIMIT_QUICK } else { LIMIT };
    fill(&share, whole, &programs)?;
    let names: Vec<_> = chosen.iter().map(|scenario| scenario.name.to_owned()).collect();
    let seconds = end.saturating_duration_since(Instant::now() + RESERVE).as_secs();
    plan(names.clone(), seconds).write(&share.join("plan.json"))?;
    println!(
        "built in {:.0} s; starting the emulated machine (Linux {})",
        built.as_secs_f64(),
        whole.outer.version
    );
    let mut records = emulated(&folder, &share, whole, end)?;
    complete(&mut records, &names);
    let summary = Summary::new(records, begin.elapsed().as_secs_f64(), args.quick, "emulated");
    summary.write(&folder)?;
    println!("\n{}\nlogs and summaries: {}", summary.table(), folder.display());
    Ok(summary.is_good())
}

/// The scenarios that were asked for.
fn choose(args: &LabArgs) -> Result<Vec<&'static Scenario>> {
    let all = scenarios::all();
    for wanted in &args.scenarios {
        if !all.iter().any(|scenario| scenario.name.starts_with(wanted.as_str())) {
            bail!("there is no scenario '{wanted}'; `cargo xtask lab list` says which there are");
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

/// The plan as the outer machine sees it.
fn plan(scenarios: Vec<String>, seconds: u64) -> Plan {
    let inside = |name: &str| PathBuf::from("/lab").join(name);
    Plan {
        scenarios,
        results: "/share/results".into(),
        vmferry: inside("vmferry"),
        kernel: inside("kernel"),
        initrd: inside("initrd"),
        seconds,
        emulated: true,
    }
}

/// Boots the outer machine and waits for it.
fn emulated(folder: &Path, share: &Path, whole: &Whole, end: Instant) -> Result<Vec<Record>> {
    let initrd = folder.join("initrd");
    write(&initrd, &initramfs::outer(&whole.outer, &whole.busybox)?)?;
    let serial = folder.join("serial-a.log");
    let began = Instant::now();
    let mut machine = Machine::start(&Setup {
        qemu: &whole.qemu,
        kernel: &whole.outer,
        initrd: &initrd,
        share,
        memory_mib: 4096,
        cpus: 2,
        options: "lab.mode=agent lab.agent=run,/share/plan.json".into(),
        serial: Some(serial.clone()),
        network: vec!["-nic".into(), "none".into()],
    })?;
    let results = share.join("results");
    let mut watch = Watch::new(results.clone(), began);
    let mut why = None;
    loop {
        watch.look()?;
        if let Some(status) = machine.ended()? {
            watch.look()?;
            if !status.success() {
                why = Some(format!("QEMU ended with {status}"));
            }
            break;
        }
        if watch.begun.is_none() && began.elapsed() > BOOT {
            why = Some(format!("it did not come up within {} s", BOOT.as_secs()));
            break;
        }
        if Instant::now() > end {
            why = Some("the lab's time was up, and it was switched off".into());
            break;
        }
        std::thread::sleep(TICK);
    }
    drop(machine);
    let said = std::fs::read(&serial).unwrap_or_default();
    let why = why.or_else(|| trouble(&String::from_utf8_lossy(&said)));
    let outcome = if why.is_none() { Outcome::Passed } else { Outcome::Failed };
    let mut records = record::read(&results)?;
    let current = std::fs::read_to_string(results.join(CURRENT)).unwrap_or_default();
    if !current.is_empty() && !records.iter().any(|record| record.scenario == current) {
        let why = "the machine ended while this was under way".to_owned();
        records.push(Record::new(&current, Outcome::Failed, Some(why), 0.0));
    }
    let mut own = Record::new(MACHINE, outcome, why, began.elapsed().as_secs_f64());
    if let Some(begun) = watch.begun {
        own.figures.insert("boot_s".into(), begun.as_secs_f64().into());
    }
    own.figures.insert("kernel".into(), whole.outer.version.clone().into());
    records.insert(0, own);
    Ok(records)
}

/// What the outer kernel complains of, or that it did not end as it should.
fn trouble(serial: &str) -> Option<String> {
    let line = serial.lines().find(|line| TROUBLE.iter().any(|trouble| line.contains(trouble)));
    if let Some(line) = line {
        return Some(format!("its kernel complains: {}", line.trim()));
    }
    (!serial.contains("LAB ended with status 0")).then(|| "it went off before it was done".to_owned())
}

/// Scenarios that have no record did not get their turn.
fn complete(records: &mut Vec<Record>, names: &[String]) {
    for name in names {
        if !records.iter().any(|record| &record.scenario == name) {
            records.push(Record::new(name, Outcome::NotRun, Some("it did not get its turn".into()), 0.0));
        }
    }
}

/// Tells people how it goes.
struct Watch {
    results: PathBuf,
    start: Instant,
    seen: usize,
    current: String,
    begun: Option<Duration>,
}

impl Watch {
    fn new(results: PathBuf, start: Instant) -> Self {
        Self { results, start, seen: 0, current: String::new(), begun: None }
    }

    fn look(&mut self) -> Result<()> {
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
        }
        Ok(())
    }

    fn seconds(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }
}

/// Two runs would write into one folder.
fn lock() -> Result<File> {
    let path = parts::folder().join("lock");
    std::fs::create_dir_all(parts::folder())?;
    let file = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)
        .context("another run of the lab is under way here")?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernels_troubles_are_found_and_so_is_an_early_end() {
        assert_eq!(trouble("[ 1.0] all is well\nLAB ended with status 0\n"), None);
        let found = trouble("x\n[ 2.0] BUG: unable to handle page fault\nLAB ended with status 0\n");
        assert!(found.unwrap().contains("unable to handle"));
        assert!(trouble("[ 1.0] all is well\n").unwrap().contains("before it was done"));
        assert!(trouble("LAB ended with status 1\n").is_some());
    }

    #[test]
    fn what_did_not_run_is_said() {
        let mut records = vec![Record::new("a", Outcome::Passed, None, 1.0)];
        complete(&mut records, &["a".to_owned(), "b".to_owned()]);
        assert_eq!(records.len(), 2);
        assert_eq!((records[1].scenario.as_str(), records[1].outcome), ("b", Outcome::NotRun));
    }
}
