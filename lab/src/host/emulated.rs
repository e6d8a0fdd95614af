//! Run of the scenarios in emulated machines: one, or two with a link between them.

use super::machine::{Machine, Setup};
use super::run::{Watch, own_record, under_way};
use super::{Whole, initramfs, write};
use anyhow::{Result, bail};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};
use vmferry_lab::death::{self, Death};
use vmferry_lab::peer;
use vmferry_lab::plan::Plan;
use vmferry_lab::record::{self, CURRENT, Outcome, Record};

/// Longest time without a new line on the console of a machine that boots. The machine's pace is
/// not known by then.
const BOOT: Duration = Duration::from_secs(300);
/// Largest number of attempts of a scenario that end in an emulator failure.
const TRIES: usize = 3;
/// Number of emulator failures that ends a run, because the emulator is then unusable.
const MOST_DEATHS: usize = 8;
/// The agent ends a scenario at its limit. An agent that has not done so at this multiple of the
/// limit hangs with its kernel.
const HUNG: u32 = 3;
/// Interval at which the results are read.
const TICK: Duration = Duration::from_millis(250);
/// Names of the machines' own records.
const MACHINE: &str = "outer-machine";
const OTHER: &str = "other-machine";
/// Processors of each machine. With two, on two threads of QEMU, kernels sometimes panicked
/// (`lab/README.md`).
const CPUS: u32 = 1;
/// Addresses on the link between the machines.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 8, 0, 1);
const OTHER_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 8, 0, 2);
/// Texts of a kernel's error reports.
const TROUBLE: [&str; 7] = [
    "Kernel panic",
    "BUG:",
    "Oops:",
    "soft lockup",
    "general protection fault",
    "rcu_sched self-detected",
    "Call Trace:",
];

/// Returns the plan with the paths of the machine.
pub(crate) fn plan(scenarios: Vec<String>, two: bool, whole: &Whole) -> Plan {
    let inside = |name: &str| PathBuf::from("/lab").join(name);
    Plan {
        scenarios,
        results: "/share/results".into(),
        vmferry: inside("vmferry"),
        kernel: inside("kernel"),
        kernel_lacks: whole.guest.reporting_lacks(),
        poisoning: whole.poisoning(Path::new("/lab")),
        vmlinux: inside("vmlinux"),
        initrd: inside("initrd"),
        disk: Some(inside("disk.img")),
        slow_disk: Some("/dev/vda".into()),
        fsck: Some(inside("e2fsck")),
        peer: two.then_some(SocketAddr::from((OTHER_ADDRESS, peer::PORT))),
        emulated: true,
    }
}

/// Settings that the machines of a run share.
struct MachineSettings<'a> {
    folder: &'a Path,
    share: &'a Path,
    whole: &'a Whole,
    initrd: PathBuf,
}

impl MachineSettings<'_> {
    fn serial(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.log"))
    }

    fn link(&self) -> PathBuf {
        self.folder.join("link")
    }

    fn start(&self, name: &str, memory_mib: u32, options: String, network: Vec<String>) -> Result<Machine> {
        let slow = self.share.join(super::SLOW_DISK);
        Machine::start(&Setup {
            qemu: &self.whole.qemu,
            kernel: &self.whole.outer,
            initrd: &self.initrd,
            share: self.share,
            memory_mib,
            cpus: CPUS,
            options,
            serial: Some(self.serial(name)),
            network,
            // Only one machine may write the disk.
            slow: (name == MACHINE).then_some(&*slow),
        })
    }

    /// Starts the machine that runs the scenarios.
    fn first(&self, two: bool) -> Result<Machine> {
        let mut options = "lab.mode=agent lab.agent=run,/share/plan.json".to_owned();
        let network = if two {
            options.push_str(&format!(" lab.address={ADDRESS}"));
            card("on", &self.link(), 1)
        } else {
            vec!["-nic".into(), "none".into()]
        };
        self.start(MACHINE, 4096, options, network)
    }

    /// Starts the machine that guests are moved to.
    fn other(&self) -> Result<Machine> {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !self.link().exists() {
            if Instant::now() > deadline {
                bail!("the first machine did not open the link at {}", self.link().display());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let serve = SocketAddr::from((Ipv4Addr::UNSPECIFIED, peer::PORT));
        let options = format!("lab.mode=agent lab.agent=serve,{serve} lab.address={OTHER_ADDRESS}");
        self.start(OTHER, 2048, options, card("off", &self.link(), 2))
    }
}

/// Returns the QEMU options of a network card on the link. One machine serves the socket.
fn card(server: &str, link: &Path, number: u8) -> Vec<String> {
    let path = link.to_string_lossy().replace(',', ",,");
    vec![
        "-netdev".into(),
        format!("stream,id=link,server={server},addr.type=unix,addr.path={path}"),
        "-device".into(),
        format!("virtio-net-pci,netdev=link,mac=52:54:00:08:00:0{number}"),
    ]
}

/// Result of a run in emulated machines.
#[derive(Debug, Default)]
pub(crate) struct Run {
    pub(crate) records: Vec<Record>,
    pub(crate) deaths: Vec<Death>,
}

/// Runs the plan in the machines. After an emulator failure, new machines continue with the
/// scenario that was running.
pub(crate) fn run(folder: &Path, share: &Path, whole: &Whole, two: bool) -> Result<Run> {
    let initrd = folder.join("initrd");
    write(&initrd, &initramfs::outer(&whole.outer, &whole.busybox)?)?;
    let hall = MachineSettings { folder, share, whole, initrd };
    let results = share.join("results");
    let mut deaths: Vec<Death> = Vec::new();
    let mut given_up = Vec::new();
    let machines = loop {
        let ended = once(&hall, two)?;
        let Some(proof) = ended.proof else { break ended.machines };
        let scenario = tried_last(&results)?;
        println!("emulator failure ({proof})");
        let log = format!("{}.lost-{}.log", ended.dead, deaths.len() + 1);
        deaths.push(Death { scenario: scenario.clone(), proof, seconds: ended.lived.as_secs_f64(), log });
        if deaths.iter().filter(|death| death.scenario == scenario).count() >= TRIES {
            println!("{scenario}: {TRIES} emulator failures, it is not tried again");
            given_up.push(scenario);
        }
        if leave(&hall, deaths.len(), &given_up)? == 0 || deaths.len() >= MOST_DEATHS {
            break ended.machines;
        }
        println!("a new machine continues");
    };
    let mut records = machines;
    records.extend(resolved(record::read(&results)?, &deaths, &given_up));
    let under_way = under_way(&results, &records);
    records.extend(under_way);
    Ok(Run { records, deaths })
}

/// Returns the scenario that was running, or whose guest the agent found to be lost.
fn tried_last(results: &Path) -> Result<String> {
    let current = std::fs::read_to_string(results.join(CURRENT)).unwrap_or_default();
    if !current.is_empty() {
        return Ok(current);
    }
    let last = record::read(results)?.pop().filter(|record| record.outcome == Outcome::Emulator);
    Ok(last.map_or_else(|| "boot".to_owned(), |record| record.scenario))
}

/// Returns the records that count. An attempt that ended in an emulator failure does not count, but
/// its scenario's record has the number of such attempts.
fn resolved(records: Vec<Record>, deaths: &[Death], given_up: &[String]) -> Vec<Record> {
    let mut resolved: Vec<_> =
        records.into_iter().filter(|record| record.outcome != Outcome::Emulator).collect();
    for record in &mut resolved {
        let count = deaths.iter().filter(|death| death.scenario == record.scenario).count();
        if count > 0 {
            record.figures.insert("emulator_deaths".into(), count.into());
        }
    }
    resolved.extend(given_up.iter().map(|name| {
        let last = deaths.iter().rfind(|death| &death.scenario == name).map(|death| death.proof.clone());
        Record::new(name, Outcome::Emulator, last, 0.0)
    }));
    resolved
}

/// Plans the remaining scenarios for new machines, and returns their number. The logs and results
/// of the old machines are renamed, so that those of the new ones can be stored beside them.
fn leave(hall: &MachineSettings<'_>, number: usize, given_up: &[String]) -> Result<usize> {
    let path = hall.share.join("plan.json");
    let mut plan = Plan::read(&path)?;
    let results = hall.share.join("results");
    let done = resolved(record::read(&results)?, &[], given_up);
    plan.scenarios.retain(|name| done.iter().all(|record| &record.scenario != name));
    plan.write(&path)?;
    let lost = format!("lost-{number}");
    for name in [MACHINE, OTHER] {
        let log = hall.serial(name);
        if log.exists() {
            std::fs::rename(&log, log.with_extension(format!("{lost}.log")))?;
        }
    }
    for name in plan.scenarios.iter().chain(given_up) {
        let shown = results.join(name);
        if shown.exists() {
            std::fs::rename(&shown, shown.with_extension(&lost))?;
        }
    }
    write(&results.join(CURRENT), b"")?;
    let _ = std::fs::remove_file(hall.link());
    Ok(plan.scenarios.len())
}

/// Result of a pair of machines.
struct Ended {
    /// Records of the machines.
    machines: Vec<Record>,
    /// Proof of an emulator failure.
    proof: Option<String>,
    /// Machine whose log has the proof.
    dead: &'static str,
    lived: Duration,
}

/// Boots the machines, and waits until one of them is off.
fn once(hall: &MachineSettings<'_>, two: bool) -> Result<Ended> {
    let began = Instant::now();
    let results = hall.share.join("results");
    let mut machine = hall.first(two)?;
    let mut other = two.then(|| hall.other()).transpose()?;
    let mut watch = Watch::new(results.clone(), began)?;
    let stop = wait(hall, &mut machine, other.as_mut(), &mut watch)?;
    drop((machine, other));
    let consoles = [MACHINE, OTHER].map(|name| said(&hall.serial(name)));
    let lost = record::read(&results)?.pop().filter(|record| record.outcome == Outcome::Emulator);
    let proofs = [
        (MACHINE, stop.status.and_then(death::in_status)),
        (MACHINE, death::in_console(&consoles[0])),
        (OTHER, stop.other.and_then(death::in_status)),
        (OTHER, death::in_console(&consoles[1])),
        (MACHINE, lost.and_then(|record| record.why)),
    ];
    let (dead, proof) = proofs.into_iter().find(|(_, proof)| proof.is_some()).unwrap_or((MACHINE, None));
    let why = stop.why.or_else(|| trouble(&consoles[0], true));
    let mut first = own_record(MACHINE, why, began.elapsed());
    if let Some(begun) = watch.begun() {
        first.figures.insert("boot_s".into(), begun.as_secs_f64().into());
    }
    first.figures.insert("kernel".into(), hall.whole.outer.version.clone().into());
    let mut machines = vec![first];
    if two {
        let why = stop.other.map(|status| format!("it switched off by itself ({status})"));
        machines.push(own_record(OTHER, why.or_else(|| trouble(&consoles[1], false)), began.elapsed()));
    }
    Ok(Ended { machines, proof, dead, lived: began.elapsed() })
}

/// Reason why the lab stops waiting for the machines.
#[derive(Debug, Default)]
struct Stop {
    /// Exit status of the first machine, if it ended by itself.
    status: Option<ExitStatus>,
    /// Exit status of the other machine, if it ended by itself.
    other: Option<ExitStatus>,
    /// Failure of the first machine.
    why: Option<String>,
}

/// Waits until a machine is off or hangs.
fn wait(
    hall: &MachineSettings<'_>,
    machine: &mut Machine,
    mut other: Option<&mut Machine>,
    watch: &mut Watch,
) -> Result<Stop> {
    let mut quiet = (0, Instant::now());
    loop {
        watch.look()?;
        if let Some(status) = machine.ended()? {
            watch.look()?;
            let why = (!status.success()).then(|| format!("QEMU ended with {status}"));
            return Ok(Stop { status: Some(status), why, ..Stop::default() });
        }
        if let Some(other) = &mut other
            && let Some(status) = other.ended()?
        {
            let why = Some("it was switched off, because the other machine ended".to_owned());
            return Ok(Stop { other: Some(status), why, ..Stop::default() });
        }
        let said = std::fs::metadata(hall.serial(MACHINE)).map_or(0, |data| data.len());
        if said != quiet.0 {
            quiet = (said, Instant::now());
        }
        if watch.begun().is_none() && quiet.1.elapsed() > BOOT {
            let why = Some(format!("it did not boot, and its console was silent for {} s", BOOT.as_secs()));
            return Ok(Stop { why, ..Stop::default() });
        }
        if let Some(name) = watch.hangs(HUNG) {
            let why = Some(format!("it hung in {name}, and was switched off"));
            return Ok(Stop { why, ..Stop::default() });
        }
        std::thread::sleep(TICK);
    }
}

fn said(serial: &Path) -> String {
    String::from_utf8_lossy(&std::fs::read(serial).unwrap_or_default()).into_owned()
}

/// Returns the error report of a machine's kernel, or the reason why its end was too early.
fn trouble(serial: &str, ends: bool) -> Option<String> {
    let line = death::kernel(serial).find(|line| TROUBLE.iter().any(|trouble| line.contains(trouble)));
    if let Some(line) = line {
        return Some(format!("its kernel reports an error: {}", line.trim()));
    }
    (ends && !serial.contains("LAB ended with status 0"))
        .then(|| "it switched off before the agent had finished".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_error_reports_and_early_ends_are_detected() {
        assert_eq!(trouble("[ 1.0] all is well\nLAB ended with status 0\n", true), None);
        let found = trouble("x\n[ 2.0] BUG: unable to handle page fault\nLAB ended with status 0\n", true);
        assert!(found.unwrap().contains("unable to handle"));
        assert!(trouble("[ 1.0] all is well\n", true).unwrap().contains("before the agent had finished"));
        assert_eq!(trouble("[ 1.0] all is well\n", false), None);
        assert!(trouble("LAB ended with status 1\n", true).is_some());
        let quoted = "LAB 9.0 FAILED linux-boot (1.0 s): its kernel reports an error: [\"Call Trace:\"]\nLAB ended with status 0\n";
        assert_eq!(trouble(quoted, true), None, "the error is of a guest's kernel");
    }

    fn death(scenario: &str) -> Death {
        let log = "outer-machine.lost-1.log".to_owned();
        Death { scenario: scenario.into(), proof: "BUG: x".into(), seconds: 1.0, log }
    }

    #[test]
    fn attempt_that_ended_in_an_emulator_failure_is_not_recorded() {
        let record = |name: &str, outcome| Record::new(name, outcome, None, 1.0);
        let records = vec![
            record("a", Outcome::Emulator),
            record("a", Outcome::Passed),
            record("b", Outcome::Failed),
            record("c", Outcome::Emulator),
        ];
        let deaths = [death("a"), death("c"), death("c"), death("c")];
        let resolved = resolved(records, &deaths, &["c".to_owned()]);
        let short: Vec<_> =
            resolved.iter().map(|record| (record.scenario.as_str(), record.outcome)).collect();
        assert_eq!(short, [("a", Outcome::Passed), ("b", Outcome::Failed), ("c", Outcome::Emulator)]);
        assert_eq!(resolved[0].figures["emulator_deaths"], 1);
        assert_eq!(resolved[1].figures.get("emulator_deaths"), None);
        assert_eq!(resolved[2].why.as_deref(), Some("BUG: x"));
    }

    #[test]
    fn emulator_failure_belongs_to_the_running_scenario_or_that_of_the_lost_guest() {
        let results = tempfile::tempdir().unwrap();
        assert_eq!(tried_last(results.path()).unwrap(), "boot");
        Record::new("a", Outcome::Passed, None, 1.0).append(results.path()).unwrap();
        assert_eq!(tried_last(results.path()).unwrap(), "boot");
        Record::new("b", Outcome::Emulator, None, 1.0).append(results.path()).unwrap();
        assert_eq!(tried_last(results.path()).unwrap(), "b");
        std::fs::write(results.path().join(CURRENT), "c").unwrap();
        assert_eq!(tried_last(results.path()).unwrap(), "c");
    }
}
