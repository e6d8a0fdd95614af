//! The scenarios in emulated machines: one, or two with a link between them.

use super::machine::{Machine, Setup};
use super::run::{Watch, own_record, seconds_until, under_way};
use super::{Whole, initramfs, write};
use anyhow::{Result, bail};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use vmferry_lab::peer;
use vmferry_lab::plan::Plan;
use vmferry_lab::record::{self, CURRENT, Record};

/// How long the machine may take until its first scenario begins.
const BOOT: Duration = Duration::from_secs(120);
/// How often the results are looked at.
const TICK: Duration = Duration::from_millis(250);
/// The records of the machines themselves.
const MACHINE: &str = "outer-machine";
const OTHER: &str = "other-machine";
/// Addresses on the link between them.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 8, 0, 1);
const OTHER_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 8, 0, 2);
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

/// The plan as the machine sees it.
pub(crate) fn plan(scenarios: Vec<String>, seconds: u64, two: bool) -> Plan {
    let inside = |name: &str| PathBuf::from("/lab").join(name);
    Plan {
        scenarios,
        results: "/share/results".into(),
        vmferry: inside("vmferry"),
        kernel: inside("kernel"),
        vmlinux: inside("vmlinux"),
        initrd: inside("initrd"),
        disk: Some(inside("disk.img")),
        slow_disk: Some("/dev/vda".into()),
        fsck: Some(inside("e2fsck")),
        peer: two.then_some(SocketAddr::from((OTHER_ADDRESS, peer::PORT))),
        seconds,
        emulated: true,
    }
}

/// What the machines of a run have in common.
struct Hall<'a> {
    folder: &'a Path,
    share: &'a Path,
    whole: &'a Whole,
    initrd: PathBuf,
}

impl Hall<'_> {
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
            cpus: 2,
            options,
            serial: Some(self.serial(name)),
            network,
            // One machine writes it.
            slow: (name == MACHINE).then_some(&*slow),
        })
    }

    /// The machine that runs the scenarios.
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

    /// The machine that guests are moved to.
    fn other(&self) -> Result<Machine> {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !self.link().exists() {
            if Instant::now() > deadline {
                bail!("the first machine offers no link at {}", self.link().display());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let serve = SocketAddr::from((Ipv4Addr::UNSPECIFIED, peer::PORT));
        let options = format!("lab.mode=agent lab.agent=serve,{serve} lab.address={OTHER_ADDRESS}");
        self.start(OTHER, 2048, options, card("off", &self.link(), 2))
    }
}

/// A network card on the link; one side serves the socket.
fn card(server: &str, link: &Path, number: u8) -> Vec<String> {
    let path = link.to_string_lossy().replace(',', ",,");
    vec![
        "-netdev".into(),
        format!("stream,id=link,server={server},addr.type=unix,addr.path={path}"),
        "-device".into(),
        format!("virtio-net-pci,netdev=link,mac=52:54:00:08:00:0{number}"),
    ]
}

/// Runs the plan in the machines; what is left of it once more, if the emulator lost the first machine.
pub(crate) fn run(
    folder: &Path,
    share: &Path,
    whole: &Whole,
    two: bool,
    end: Instant,
) -> Result<Vec<Record>> {
    let initrd = folder.join("initrd");
    write(&initrd, &initramfs::outer(&whole.outer, &whole.busybox)?)?;
    let hall = Hall { folder, share, whole, initrd };
    let mut machines = once(&hall, two, end)?;
    if let Some(lost) = lost(&said(&hall.serial(MACHINE))) {
        println!("the emulator lost the machine ({lost}): another one goes on");
        leave(&hall, end)?;
        machines = once(&hall, two, end)?;
        for record in &mut machines {
            record.figures.insert("emulator_lost_a_machine".into(), lost.clone().into());
        }
    }
    let results = share.join("results");
    machines.extend(record::read(&results)?);
    let under_way = under_way(&results, &machines);
    machines.extend(under_way);
    Ok(machines)
}

/// What an outer kernel says that the emulator lost, if it did: see [`vmferry_lab::emulator`]. Behind `vmrun` nothing can interrupt it, and no
/// exception can be its own before it has loaded its own segments; whoever has one there got it from its guest.
fn lost(serial: &str) -> Option<String> {
    let mut lines = serial.lines().skip_while(|line| !line.contains("BUG:"));
    let first = lines.next()?;
    let ended = lines.clone().any(|line| line.contains("Kernel panic"));
    let there = lines.any(|line| line.contains(" svm_vcpu_enter_exit+") && !line.contains('?'));
    (there && ended).then(|| first.trim().to_owned())
}

/// Plans what is left for another machine. What the first had to show stays beside what that one will.
fn leave(hall: &Hall<'_>, end: Instant) -> Result<()> {
    let path = hall.share.join("plan.json");
    let mut plan = Plan::read(&path)?;
    let results = hall.share.join("results");
    let done = record::read(&results)?;
    plan.scenarios.retain(|name| done.iter().all(|record| &record.scenario != name));
    plan.seconds = seconds_until(end);
    plan.write(&path)?;
    for name in [MACHINE, OTHER] {
        let log = hall.serial(name);
        if log.exists() {
            std::fs::rename(&log, log.with_extension("lost.log"))?;
        }
    }
    for name in plan.scenarios {
        let shown = results.join(&name);
        if shown.exists() {
            std::fs::rename(&shown, shown.with_extension("lost"))?;
        }
    }
    write(&results.join(CURRENT), b"")?;
    let _ = std::fs::remove_file(hall.link());
    Ok(())
}

/// Boots the machines and waits for the first; the records of the machines.
fn once(hall: &Hall<'_>, two: bool, end: Instant) -> Result<Vec<Record>> {
    let began = Instant::now();
    let mut machine = hall.first(two)?;
    let other = two.then(|| hall.other()).transpose()?;
    let mut watch = Watch::new(hall.share.join("results"), began)?;
    let why = wait(&mut machine, &mut watch, end)?;
    drop(machine);
    let mut records = vec![{
        let why = why.or_else(|| trouble(&said(&hall.serial(MACHINE)), true));
        let mut record = own_record(MACHINE, why, began.elapsed());
        if let Some(begun) = watch.begun() {
            record.figures.insert("boot_s".into(), begun.as_secs_f64().into());
        }
        record.figures.insert("kernel".into(), hall.whole.outer.version.clone().into());
        record
    }];
    if let Some(mut other) = other {
        let why = other.ended()?.map(|status| format!("it went off by itself ({status})"));
        drop(other);
        let why = why.or_else(|| trouble(&said(&hall.serial(OTHER)), false));
        records.push(own_record(OTHER, why, began.elapsed()));
    }
    Ok(records)
}

/// Waits until the machine is off; what went wrong with it, if anything did.
fn wait(machine: &mut Machine, watch: &mut Watch, end: Instant) -> Result<Option<String>> {
    let began = Instant::now();
    loop {
        watch.look()?;
        if let Some(status) = machine.ended()? {
            watch.look()?;
            return Ok((!status.success()).then(|| format!("QEMU ended with {status}")));
        }
        if watch.begun().is_none() && began.elapsed() > BOOT {
            return Ok(Some(format!("it did not come up within {} s", BOOT.as_secs())));
        }
        if Instant::now() > end {
            return Ok(Some("the lab's time was up, and it was switched off".into()));
        }
        std::thread::sleep(TICK);
    }
}

fn said(serial: &Path) -> String {
    String::from_utf8_lossy(&std::fs::read(serial).unwrap_or_default()).into_owned()
}

/// What a machine's kernel complains of, or that it did not end as it should.
fn trouble(serial: &str, ends: bool) -> Option<String> {
    let line = serial.lines().find(|line| TROUBLE.iter().any(|trouble| line.contains(trouble)));
    if let Some(line) = line {
        return Some(format!("its kernel complains: {}", line.trim()));
    }
    (ends && !serial.contains("LAB ended with status 0")).then(|| "it went off before it was done".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernels_troubles_are_found_and_so_is_an_early_end() {
        assert_eq!(trouble("[ 1.0] all is well\nLAB ended with status 0\n", true), None);
        let found = trouble("x\n[ 2.0] BUG: unable to handle page fault\nLAB ended with status 0\n", true);
        assert!(found.unwrap().contains("unable to handle"));
        assert!(trouble("[ 1.0] all is well\n", true).unwrap().contains("before it was done"));
        assert_eq!(trouble("[ 1.0] all is well\n", false), None);
        assert!(trouble("LAB ended with status 1\n", true).is_some());
    }

    #[test]
    fn a_machine_is_lost_only_behind_vmrun() {
        let crash = |place: &str| {
            format!(
                "[ 1.0] fine\n[ 7.1] BUG: TASK stack guard page was hit\n[ 7.2]  ? svm_vcpu_enter_exit+0x1/0x80\n\
                 [ 7.3]  {place}+0x4a/0x80 [kvm_amd]\n[ 7.4] Kernel panic - not syncing: Fatal exception\n"
            )
        };
        let found = lost(&crash("svm_vcpu_enter_exit"));
        assert_eq!(found.as_deref(), Some("[ 7.1] BUG: TASK stack guard page was hit"));
        assert_eq!(lost(&crash("tun_get_user")), None);
        assert_eq!(lost(crash("svm_vcpu_enter_exit").split("[ 7.4]").next().unwrap()), None);
        assert_eq!(lost("LAB ended with status 0\n"), None);
    }
}
