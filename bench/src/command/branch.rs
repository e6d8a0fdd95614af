//! vmferry's side of `vmferry-bench branch`: guests in separate processes that are branched, or
//! copied through a file.

use super::args::BenchArgs;
use super::{Finished, no_kvm, program};
use crate::branch::{
    self, Cold, ColdSpec, Fleet, GuestSpec, Kind, Options, OurError, OurRunner, Outcome, Run, Way,
};
use crate::density::Budget;
use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use vmferry_client::{Client, Environment, Role, Setup, SingleProcess};

/// Time that a guest may take to fill its memory, and a child to end.
const PATIENCE: Duration = Duration::from_secs(120);
/// Time over which the speed of the guest is measured.
const WINDOW: Duration = Duration::from_secs(1);
/// Interval at which processes are polled.
const POLL: Duration = Duration::from_millis(1);

pub(super) fn bench(args: &BenchArgs) -> Result<Finished> {
    let mut options = if args.quick { Options::quick() } else { Options::full() };
    options.repeats = args.rounds.map_or(options.repeats, usize::from);
    options.only.clone_from(&args.only);
    let mut progress = |what: &str| eprintln!("branch: {what}");
    let Outcome { document, failures } = branch::run(&options, &mut Ours, &mut progress);
    let (table, page) = (branch::table(&document), branch::page(&document));
    Ok(Finished { table, page: Some(page), document, failures })
}

struct Ours;

impl OurRunner for Ours {
    fn copy(&mut self, spec: &GuestSpec) -> Result<Run, OurError> {
        available(spec.side.kind)?;
        let run = match spec.side.way {
            Way::Branch => branched(spec, None).map(|(run, _, _)| run),
            Way::File => through_a_file(spec),
        };
        run.map_err(|error| OurError::Failed(error.into()))
    }

    fn fleet(&mut self, spec: &GuestSpec, budget: &Budget) -> Result<Fleet, OurError> {
        available(spec.side.kind)?;
        fleet(spec, budget).map_err(|error| OurError::Failed(error.into()))
    }

    fn cold(&mut self, spec: &ColdSpec) -> Result<Cold, OurError> {
        available(spec.side.kind)?;
        cold(spec).map_err(|error| OurError::Failed(error.into()))
    }
}

fn available(kind: Kind) -> Result<(), OurError> {
    match no_kvm().filter(|_| kind == Kind::Kvm) {
        Some(why) => Err(OurError::Unavailable(why)),
        None => Ok(()),
    }
}

/// Environment of a parent: memory that can be shared, and perhaps a memory limit.
#[derive(Debug)]
struct Shareable<'a>(Option<&'a Budget>);

impl Environment for Shareable<'_> {
    fn options(&self, _: Role) -> Vec<OsString> {
        ["--memory-backing", "memfd"].map(OsString::from).into()
    }

    fn enter(&self, _: Role, command: &mut Command) -> io::Result<()> {
        self.0.map_or(Ok(()), |budget| budget.enter(command))
    }

    fn started(&self, _: Role, pid: u32) -> io::Result<()> {
        self.0.map_or(Ok(()), |budget| budget.adopt(pid))
    }
}

/// Starts the guest, and waits until its memory has content.
fn start(spec: &GuestSpec, environment: &dyn Environment) -> Result<SingleProcess> {
    start_guest(spec.side.kind, (spec.memory(), spec.workload()), environment)
}

/// Starts a guest with this memory and this workload, and waits until its memory has content.
fn start_guest(
    kind: Kind,
    (memory, workload): (u64, String),
    environment: &dyn Environment,
) -> Result<SingleProcess> {
    let setup =
        Setup { guest: kind.name(), environment, ..Setup::new(program::vmferry()?, memory, workload) };
    let mut parent = SingleProcess::start(&setup)?;
    let deadline = Instant::now() + PATIENCE;
    while parent.runner.status()?["vm"]["guest"]["state"] != "running" {
        if Instant::now() > deadline {
            bail!("the guest did not fill its memory in time");
        }
        std::thread::sleep(10 * POLL);
    }
    Ok(parent)
}

fn writes(parent: &mut SingleProcess) -> Result<f64> {
    parent.runner.status()?["vm"]["guest"]["writes"].as_f64().context("the guest reports no writes")
}

/// Returns the number of writes of the guest in [`WINDOW`].
fn speed(parent: &mut SingleProcess) -> Result<f64> {
    let before = writes(parent)?;
    std::thread::sleep(WINDOW);
    Ok(writes(parent)? - before)
}

/// Children of a branch. Dropping the value ends them.
struct Children(Vec<(Client, Pid)>);

impl Children {
    fn of(document: &Value) -> Result<Self> {
        let mut all = Self(Vec::new());
        for child in document["children"].as_array().context("no children")? {
            let api = child["api"].as_str().context("a child without a control socket")?;
            let pid = child["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
            all.0.push((Client::connect(Path::new(api))?, pid.context("a child without a process id")?));
        }
        Ok(all)
    }

    /// Checks that all children are intact.
    fn check(&mut self) -> Result<()> {
        for (client, _) in &mut self.0 {
            let guest = client.call("status", json!({}))?["vm"]["guest"].clone();
            if guest["corrupt"].as_u64() != Some(0) {
                bail!("a child found damaged pages: {guest}");
            }
        }
        Ok(())
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for (client, pid) in &mut self.0 {
            if client.call("quit", json!({})).is_err() {
                let _ = kill_process(*pid, Signal::KILL);
            }
        }
        let deadline = Instant::now() + PATIENCE;
        for (client, _) in &mut self.0 {
            // The answer fails when the process has closed its socket.
            while client.call("status", json!({})).is_ok() && Instant::now() < deadline {
                std::thread::sleep(10 * POLL);
            }
        }
    }
}

/// Branches the guest. Returns its times, the parent and the children.
fn branched(spec: &GuestSpec, budget: Option<&Budget>) -> Result<(Run, SingleProcess, Children)> {
    let mut parent = start(spec, &Shareable(budget))?;
    let folder = tempfile::tempdir()?;
    let before = speed(&mut parent)?;
    let mut command = Command::new(program::vmferry()?);
    command.args(["branch", "--json", "-", "--count", &spec.children.to_string(), "--api"]);
    command.arg(parent.runner.client.path()).arg("--api-dir").arg(folder.path());
    if let Some(budget) = budget {
        // The children inherit the cgroup of the command.
        budget.enter(&mut command)?;
    }
    let output = command.stdin(Stdio::null()).output()?;
    if !output.status.success() {
        bail!("vmferry branch: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let document: Value = serde_json::from_slice(&output.stdout).context("vmferry branch printed no JSON")?;
    let mut children = Children::of(&document)?;
    let after = speed(&mut parent)?;
    children.check()?;
    let number = |name: &str| document[name].as_f64().with_context(|| format!("no {name}"));
    let runs = document["children"].as_array().into_iter().flatten();
    let runs_ms = runs.filter_map(|child| child["runs_ms"].as_f64()).fold(0.0, f64::max);
    let (pause_ms, total_ms) = (number("pause_ms")?, number("total_ms")?);
    let speed_kept = (before > 0.0).then(|| after / before);
    Ok((Run { pause_ms, runs_ms, total_ms, speed_kept }, parent, children))
}

/// Copies the guest into a file, and restores the file on demand.
fn through_a_file(spec: &GuestSpec) -> Result<Run> {
    let folder = tempfile::tempdir()?;
    let place = folder.path().to_owned();
    let mut parent = start(spec, &Within(place.clone()))?;
    let before = speed(&mut parent)?;
    let file = place.join("copy");
    let began = Instant::now();
    let document = write_copy(&parent, &file)?;
    let api = place.join("child.sock");
    let mut child = Command::new(program::vmferry()?)
        .args(["run", "--guest", spec.side.kind.name(), "--memory", &spec.memory().to_string(), "--api"])
        .arg(&api)
        .arg(format!("--incoming=file:{}", file.display()))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let runs = until_it_runs(&api, began);
    let after = speed(&mut parent);
    child.kill()?;
    child.wait()?;
    let pause_ms = document["downtime_ms"].as_f64().context("no downtime_ms")?;
    let (runs_ms, after) = (runs?, after?);
    let speed_kept = (before > 0.0).then(|| after / before);
    Ok(Run { pause_ms, runs_ms, total_ms: runs_ms, speed_kept })
}

/// Writes a copy of the guest to `file`. Returns the report.
fn write_copy(parent: &SingleProcess, file: &Path) -> Result<Value> {
    let output = Command::new(program::vmferry()?)
        .args(["migrate", "--keep-running", "--json", "-", "--api"])
        .arg(parent.runner.client.path())
        .arg(format!("file:{}", file.display()))
        .stdin(Stdio::null())
        .output()?;
    if !output.status.success() {
        bail!("vmferry migrate: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    serde_json::from_slice(&output.stdout).context("vmferry migrate printed no JSON")
}

/// Guest that runs from a snapshot. It is killed when the value is dropped.
struct Shared {
    process: Child,
    api: PathBuf,
    began: Instant,
}

impl Shared {
    /// Starts the guest in `file`, with the option `option` for its working set.
    fn start(spec: &ColdSpec, file: &Path, option: Option<(&str, &Path)>) -> Result<Self> {
        let api = file.with_extension("sock");
        let began = Instant::now();
        let mut command = Command::new(program::vmferry()?);
        command
            .args(["run", "--guest", spec.side.kind.name(), "--memory", &spec.memory().to_string(), "--api"])
            .arg(&api)
            .args(["--shared", "--from"])
            .arg(file);
        if let Some((option, set)) = option {
            command.arg(option).arg(set);
        }
        let process = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        Ok(Self { process, api, began })
    }

    /// Waits until the guest has made `writes` writes. Returns the times until it ran and until
    /// then, in ms.
    fn wait_for_writes(&self, writes: u64) -> Result<(f64, f64)> {
        let runs = until_it_runs(&self.api, self.began)?;
        let mut client = Client::connect(&self.api)?;
        let mut now = || -> Result<u64> {
            let answer = client.call("writes", json!({}))?;
            let vcpus = answer["vcpus"].as_array().context("no vCPUs")?;
            Ok(vcpus.iter().filter_map(|vcpu| vcpu[1].as_u64()).sum())
        };
        let (first, deadline) = (now()?, Instant::now() + PATIENCE);
        while now()? < first + writes {
            if Instant::now() > deadline {
                bail!("the guest did not use its working set in time");
            }
            std::thread::sleep(POLL);
        }
        Ok((runs, self.began.elapsed().as_secs_f64() * 1e3))
    }

    /// Ends the guest, which writes its working set.
    fn quit(mut self) -> Result<()> {
        Client::connect(&self.api)?.call("quit", json!({}))?;
        if !self.process.wait()?.success() {
            bail!("the guest did not end as it should");
        }
        Ok(())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Starts a guest from a snapshot that is not in the page cache.
fn cold(spec: &ColdSpec) -> Result<Cold> {
    let folder = tempfile::tempdir()?;
    let (file, set) = (folder.path().join("copy"), folder.path().join("set"));
    let within = Within(folder.path().to_owned());
    let parent = start_guest(spec.side.kind, (spec.memory(), spec.workload()), &within)?;
    write_copy(&parent, &file)?;
    drop(parent);
    let (mut option, mut recorded) = (None, None);
    if spec.side.prefetch {
        let first = Shared::start(spec, &file, Some(("--record", &set)))?;
        first.wait_for_writes(spec.writes())?;
        first.quit()?;
        option = Some(("--prefetch", &*set));
    }
    // Pages that are mapped or not written out would stay in the page cache.
    let open = std::fs::File::open(&file)?;
    open.sync_all()?;
    rustix::fs::fadvise(&open, 0, None, rustix::fs::Advice::DontNeed)?;
    let guest = Shared::start(spec, &file, option)?;
    let (runs_ms, used_ms) = guest.wait_for_writes(spec.writes())?;
    if option.is_some() {
        let status = Client::connect(&guest.api)?.call("status", json!({}))?;
        recorded = Some(status["vm"]["prefetch"]["pages"].as_u64().context("no prefetch")?);
    }
    guest.quit()?;
    Ok(Cold { runs_ms, used_ms, recorded })
}

/// Environment of a guest that may be written into a folder.
#[derive(Debug)]
struct Within(std::path::PathBuf);

impl Environment for Within {
    fn options(&self, _: Role) -> Vec<OsString> {
        vec!["--memory-backing".into(), "memfd".into(), "--migrate-dir".into(), self.0.clone().into()]
    }
}

/// Waits until the guest at `api` runs. Returns the time since `began` in ms.
fn until_it_runs(api: &Path, began: Instant) -> Result<f64> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let status = Client::connect(api).and_then(|mut client| client.call("status", json!({})));
        if status.is_ok_and(|status| status["vm"]["place"] == "running") {
            return Ok(began.elapsed().as_secs_f64() * 1e3);
        }
        if Instant::now() > deadline {
            bail!("the copy did not start");
        }
        std::thread::sleep(POLL);
    }
}

/// Branches the guest within `budget`, and measures the memory when all guests have written their
/// working set. A guest that has done so is paused, so that it takes no processor from the others.
fn fleet(spec: &GuestSpec, budget: &Budget) -> Result<Fleet> {
    let (run, mut parent, mut children) = branched(spec, Some(budget))?;
    // Several guests share a processor, so the sweep may take longer than the guests intend.
    let needed = (spec.working_set >> 12) as f64;
    let deadline = Instant::now() + 10 * spec.sweep() + PATIENCE;
    let begun = parent.runner.status()?["vm"]["guest"]["writes"].as_f64().context("no writes")?;
    parent.runner.client.call("pause", json!({}))?;
    let mut waiting: Vec<usize> = (0..children.0.len()).collect();
    while !waiting.is_empty() {
        let mut left = Vec::new();
        for index in waiting {
            let client = &mut children.0[index].0;
            let status = client.call("status", json!({}))?;
            let now = status["vm"]["guest"]["writes"].as_f64().context("a child reports no writes")?;
            // Each child goes on with the count of the parent, which has written more since.
            if now - begun >= needed {
                client.call("pause", json!({}))?;
            } else {
                left.push(index);
            }
        }
        waiting = left;
        if Instant::now() > deadline {
            bail!("the children did not write their working set in time");
        }
        std::thread::sleep(100 * POLL);
    }
    let used = budget.used()?;
    if budget.kills()? > 0 {
        bail!("the kernel killed a guest, because the cgroup has too little memory");
    }
    children.check()?;
    drop(children);
    drop(parent);
    Ok(Fleet { used, pause_ms: run.pause_ms, runs_ms: run.runs_ms })
}
