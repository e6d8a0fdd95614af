//! Faults of a branch: the parent and its children do not depend on each other once the children
//! run, and no child runs without the others before.

use super::plan::{End, Fault, Phase};
use super::rlimits;
use super::run::{ALL_MEMORY, Case, Early, LEAST_MEMORY, LOAD, Ran, STOPPED};
use crate::command::order::{Limits, Order, arguments};
use crate::command::side::{Folder, PATIENCE, Side, Start};
use crate::density::Budget;
use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Resource, Signal};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Number of children.
const CHILDREN: usize = 2;
/// Time after which a process has certainly taken its next step: a child waits for the branch, or
/// the command has passed the branch on.
const SETTLE: Duration = Duration::from_millis(100);
/// Interval at which the start of the children is awaited. A child needs some milliseconds until it
/// waits for the branch.
const SOON: Duration = Duration::from_micros(100);

/// Parent, the command that branches it, and its children.
struct Family {
    children: Vec<Side>,
    order: Option<Order>,
    parent: Side,
    // Dropped after the processes that are in it.
    budget: Option<Budget>,
    folder: Folder,
}

impl Family {
    fn new(case: Case) -> Result<Self> {
        let folder = Folder::new()?;
        let limit = |fault| (case.fault == fault).then(|| Budget::new(ALL_MEMORY)).transpose();
        let start = Start {
            args: ["--memory-backing", "memfd", "--workload", LOAD].map(String::from).to_vec(),
            budget: limit(Fault::PressSource)?,
            ..case.start()
        };
        let mut parent = Side::start(start, &folder.0, "parent")?;
        parent.working()?;
        let budget = limit(Fault::PressChildren)?;
        Ok(Self { children: Vec::new(), order: None, parent, budget, folder })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.0.join(name)
    }

    /// Starts a command that branches the parent `count` times. The control sockets of the children
    /// are in the folder `name`.
    fn order(&self, name: &str, count: usize, limits: Limits<'_>) -> Result<Order> {
        let mut args = arguments(&["branch", "--count", &count.to_string()], &self.path("parent"));
        args.extend(["--api-dir".into(), self.path(name).into()]);
        args.extend(["--json".into(), self.path(&format!("{name}.json")).into()]);
        Order::start(&args, self.path(&format!("{name}.log")), limits)
    }

    /// Returns the children of a command that has succeeded.
    fn of(&self, name: &str) -> Result<Vec<Side>> {
        let text = std::fs::read(self.path(&format!("{name}.json")))?;
        let document: Value = serde_json::from_slice(&text)?;
        let mut all = Vec::new();
        for child in document["children"].as_array().context("no children")? {
            let api = Path::new(child["api"].as_str().context("a child without a control socket")?);
            let id = child["pid"].as_u64().and_then(|id| u32::try_from(id).ok());
            let id = id.context("a child without a process id")?;
            let mut side = Side::adopt(id, api.with_extension("log"))?;
            side.connect(api)?;
            all.push(side);
        }
        Ok(all)
    }

    /// Returns whether the parent has taken the instant of a branch: since then, its memory is
    /// mapped privately.
    fn instant_has_passed(&self) -> Result<bool> {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.parent.pid()))?;
        let mut memory = maps.lines().filter(|line| line.contains("/memfd:vmferry-"));
        Ok(memory.any(|line| line.split_whitespace().nth(1).is_some_and(|access| access.ends_with('p'))))
    }

    /// Starts the branch, and holds it at the phase.
    fn reach(&mut self, phase: Phase) -> Result<()> {
        let limits = Limits { budget: self.budget.as_ref(), ..Limits::default() };
        let mut order = self.order("children", CHILDREN, limits)?;
        if phase == Phase::Shared {
            order.ended()?.map_err(anyhow::Error::msg)?;
            self.children = self.of("children")?;
            self.order = Some(order);
            return Ok(());
        }
        let deadline = Instant::now() + PATIENCE;
        let mut ids = Vec::new();
        while ids.len() < CHILDREN {
            ids = children_of(order.id())?;
            if order.has_ended()? || Instant::now() > deadline {
                bail!(Early { phase, status: json!(order.said()) });
            }
            std::thread::sleep(SOON);
        }
        order.signal(Signal::STOP)?;
        for (number, id) in ids.into_iter().enumerate() {
            let log = self.path(&format!("children/{number}.log"));
            self.children.push(Side::adopt(id, log)?);
        }
        for number in 0..CHILDREN {
            let api = self.path(&format!("children/{number}.sock"));
            self.children[number].connect(&api)?;
        }
        std::thread::sleep(SETTLE);
        if self.instant_has_passed()? {
            bail!(Early { phase, status: json!("the command was stopped too late") });
        }
        if phase == Phase::Instant {
            self.signal_children(Signal::STOP);
            order.signal(Signal::CONT)?;
            let deadline = Instant::now() + PATIENCE;
            while !self.instant_has_passed()? {
                if order.has_ended()? || Instant::now() > deadline {
                    bail!(Early { phase, status: json!(order.said()) });
                }
                std::thread::sleep(SOON);
            }
            // The command passes the branch on to the children, which are stopped.
            std::thread::sleep(SETTLE);
        }
        self.order = Some(order);
        Ok(())
    }

    fn signal_children(&self, signal: Signal) {
        for child in &self.children {
            // A child may have ended, because the command has noticed the death of another one.
            let _ = child.signal(signal);
        }
    }

    fn apply(&mut self, fault: Fault) -> Result<()> {
        match fault {
            Fault::KillSource => self.parent.kill(),
            Fault::KillChild => self.children[0].kill(),
            Fault::KillCommand => {
                // The kernel sends SIGHUP to a stopped process whose parent dies, because its
                // process group is an orphan then. The children need longer to start their guests
                // than this process needs to kill the command.
                self.signal_children(Signal::CONT);
                self.order.as_mut().context("no command")?.kill()
            }
            Fault::StopSource => self.parent.signal(Signal::STOP),
            Fault::PressSource => {
                Ok(self.parent.budget().context("no limit of memory")?.squeeze(LEAST_MEMORY)?)
            }
            Fault::PressChildren => {
                Ok(self.budget.as_ref().context("no limit of memory")?.squeeze(LEAST_MEMORY)?)
            }
            other => bail!("{other} has no effect on a branch"),
        }
    }

    /// Lets all processes continue, and waits for the end of the command. Returns the messages of a
    /// command that has failed.
    fn release(&mut self, case: Case) -> Result<Option<Result<(), String>>> {
        self.signal_children(Signal::CONT);
        let order = self.order.as_mut().context("no command")?;
        if case.phase == Phase::Setup && case.fault != Fault::KillCommand {
            order.signal(Signal::CONT)?;
        }
        if case.fault == Fault::StopSource {
            std::thread::sleep(STOPPED);
            self.parent.signal(Signal::CONT)?;
        }
        Ok(if case.fault == Fault::KillCommand { None } else { Some(order.ended()?) })
    }

    /// Waits until each child has ended or runs its guest, and checks the guests that run. Returns
    /// their number.
    fn running(&mut self) -> Result<usize> {
        let mut running = 0;
        for (number, child) in self.children.iter_mut().enumerate() {
            let deadline = Instant::now() + PATIENCE;
            loop {
                if child.ends(Duration::ZERO)? {
                    break;
                }
                let status = child.status();
                if status.as_ref().is_some_and(|status| status["vm"]["place"] == "running") {
                    running += usize::from(survives(child).with_context(|| format!("child {number}"))?);
                    break;
                }
                ensure!(Instant::now() < deadline, "child {number} neither runs nor ends: {status:?}");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        Ok(running)
    }

    /// Checks the guests, and returns the outcome and whether the kernel has killed a process.
    fn judge(&mut self, case: Case, said: Option<&Result<(), String>>) -> Result<(End, bool)> {
        let running = self.running()?;
        let alive = survives(&mut self.parent).context("the parent")?;
        let killed = self.budget.as_ref().map_or(Ok(0), Budget::kills)? > 0 || self.parent.starved()?;
        let lost = usize::from(case.fault == Fault::KillChild && case.phase == Phase::Shared);
        let complete = running + lost == CHILDREN || (running > 0 && case.fault == Fault::PressChildren);
        ensure!(complete || running == 0 || killed, "{running} of {CHILDREN} children run after {said:?}");
        ensure!(
            said.is_none_or(|said| said.is_ok() || running == 0),
            "the command has failed ({said:?}), and {running} children run"
        );
        Ok((
            match (alive, complete) {
                (true, true) => End::Copied,
                (true, false) => End::Stayed,
                (false, true) => End::Copy,
                (false, false) => End::Died,
            },
            killed,
        ))
    }

    /// Branches the parent again, which must succeed: nothing of the first branch is in its way.
    fn again(&mut self) -> Result<()> {
        let mut order = self.order("again", 1, Limits::default())?;
        order.ended()?.map_err(anyhow::Error::msg).context("a later branch")?;
        for mut child in self.of("again")? {
            child.whole().context("the child of a later branch")?;
        }
        self.parent.whole().context("the parent after a later branch")
    }

    /// Raises the limit of the descriptors until the branch succeeds.
    fn few_descriptors(&mut self, of_the_parent: bool) -> Result<End> {
        let api = self.path("parent");
        let (dir, json, log) = (self.path("children"), self.path("children.json"), self.path("children.log"));
        let mut args = arguments(&["branch", "--count", &CHILDREN.to_string()], &api);
        args.extend(["--api-dir".into(), dir.clone().into(), "--json".into(), json.into()]);
        rlimits::until_enough(&mut self.parent, |parent, number| {
            let mut limits = Limits::default();
            if of_the_parent {
                rlimits::allow(parent, number)?;
            } else {
                // Without standard input, output and error, no program starts.
                limits.descriptors = Some(number + 3);
            }
            let mut order = Order::start(&args, log.clone(), limits)?;
            let failed = order.ended()?.is_err();
            for number in 0..CHILDREN {
                let api = dir.join(format!("{number}.sock"));
                ensure!(!failed || !api.exists(), "child {number} is left after {}", order.said());
            }
            Ok(!failed)
        })?;
        self.children = self.of("children")?;
        let (end, _) = (self.running()?, self.parent.whole()?);
        ensure!(end == CHILDREN, "{end} of {CHILDREN} children run");
        Ok(End::Copied)
    }
}

/// Checks the guest of a process that may be killed meanwhile by the kernel. Returns false if it
/// was killed.
fn survives(side: &mut Side) -> Result<bool> {
    if side.ends(Duration::ZERO)? {
        return Ok(false);
    }
    match side.whole() {
        Err(_) if side.starved()? || side.ends(Duration::ZERO)? => Ok(false),
        checked => checked.map(|()| true),
    }
}

/// Returns the processes that the process `id` has started, in the order of their start.
fn children_of(id: u32) -> Result<Vec<u32>> {
    let mut all = Vec::new();
    // The process may end at any moment.
    let Ok(threads) = std::fs::read_dir(format!("/proc/{id}/task")) else { return Ok(all) };
    for thread in threads.flatten() {
        let text = std::fs::read_to_string(thread.path().join("children")).unwrap_or_default();
        all.extend(text.split_whitespace().filter_map(|word| word.parse::<u32>().ok()));
    }
    all.sort_unstable();
    Ok(all)
}

pub(super) fn run(case: Case) -> Result<Ran> {
    let mut family = Family::new(case)?;
    let began = Instant::now();
    if matches!(case.fault, Fault::FewDescriptors | Fault::FewDescriptorsCommand) {
        let end = family.few_descriptors(case.fault == Fault::FewDescriptors)?;
        let took = began.elapsed();
        rlimits::set(&family.parent, Resource::Nofile, None)?;
        family.again()?;
        return Ok(Ran { end, took, killed: false });
    }
    family.reach(case.phase)?;
    let began = Instant::now();
    family.apply(case.fault)?;
    let said = family.release(case)?;
    let (end, killed) = family
        .judge(case, said.as_ref())
        .with_context(|| format!("the command: {said:?}; the parent: {}", family.parent.said()))?;
    let took = began.elapsed();
    if !family.parent.dead() && !killed && case.fault != Fault::PressSource {
        family.again()?;
    }
    Ok(Ran { end, took, killed })
}
