//! Faults of a snapshot of a running guest.
//!
//! The file has its name only if it is complete, and the guest runs on after every fault that
//! leaves its process alive.

use super::plan::{End, Fault, Phase};
use super::rlimits;
use super::run::{ALL_MEMORY, Case, Early, LEAST_MEMORY, LOAD, Ran, STOPPED};
use crate::command::order::{Limits, Order, arguments};
use crate::command::side::{Folder, PATIENCE, Side, Start};
use crate::density::Budget;
use crate::slow_disk::SlowDisk;
use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Resource, Signal};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Rate at which a file is written, so that the fault hits a snapshot that is under way.
const RATE: &str = "8M/s";
/// Bytes that are in the file at the moment of the fault.
const UNDER_WAY: u64 = 2 << 20;
/// Speed of the slow disk in bytes per second, and the shortest plausible time of a snapshot on it.
const SLOW: (u64, Duration) = (8 << 20, Duration::from_secs(2));
/// Size of the file system that has too little room for the guest.
const SMALL_DISK: u64 = 20 << 20;
/// Length of the longest file that the process may write.
const LONGEST_FILE: u64 = 20 << 20;
/// Time limit of the freeze hook. The hook of a killed command does not answer.
const HOOK_LIMIT: &str = "15s";

/// Script that mounts a small file system at `$0` and executes the rest of its arguments.
const ON_A_SMALL_DISK: &str = r#"mount -t tmpfs -o "size=$SMALL_DISK" none "$0" && exec "$@""#;

/// Returns the reason why this host has no small disk for a process.
pub(super) fn no_small_disk() -> Option<String> {
    let folder = Folder::new().map_err(|error| error.to_string());
    let mounted = folder.and_then(|folder| {
        let output = in_a_small_disk(&folder.0).arg("true").stdin(Stdio::null()).output();
        let output = output.map_err(|error| format!("unshare: {error}"))?;
        if output.status.success() {
            return Ok(());
        }
        Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
    });
    mounted.err().map(|why| format!("cannot mount a small file system: {why}"))
}

/// Returns a command that runs its further arguments with a small file system at `place`.
fn in_a_small_disk(place: &Path) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", ON_A_SMALL_DISK]).arg(place);
    command.env("SMALL_DISK", SMALL_DISK.to_string());
    command
}

/// Guest, and the folder for its snapshots.
struct Scene {
    source: Side,
    folder: Folder,
    // Dropped last: the process of the guest is in this cgroup.
    slow: Option<SlowDisk>,
}

impl Scene {
    fn new(case: Case) -> Result<Self> {
        let folder = Folder::new()?;
        std::fs::create_dir_all(folder.0.join("files/new"))?;
        let files = folder.0.join("files").display().to_string();
        let fault = |fault| case.fault == fault;
        let slow = fault(Fault::SlowDisk).then(|| SlowDisk::below(&folder.0, SLOW.0)).transpose()?;
        let budget = fault(Fault::PressSource).then(|| Budget::new(ALL_MEMORY)).transpose()?;
        let start = Start {
            args: ["--workload", LOAD, "--migrate-dir", &files].map(String::from).to_vec(),
            slow: slow.as_ref(),
            budget,
            within: fault(Fault::FullDisk).then(|| in_a_small_disk(&folder.0.join("files/new"))),
            ..case.start()
        };
        let mut source = Side::start(start, &folder.0, "source")?;
        source.working()?;
        Ok(Self { source, folder, slow })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.0.join(name)
    }

    /// Returns the path of the folder for the snapshot, as the process of the guest sees it.
    fn new_files(&self) -> PathBuf {
        self.path("files/new")
    }

    /// Requests a snapshot with the file name `name`.
    fn order(&self, name: &str, more: &[&str]) -> Result<Order> {
        let mut args = arguments(&["snapshot"], &self.path("source"));
        args.push(format!("file:{}", self.path(name).display()).into());
        args.extend(more.iter().map(Into::into));
        Order::start(&args, self.path("snapshot.log"), Limits::default())
    }

    /// Waits until the process of the guest has reported the end of the snapshot, or has ended.
    fn ended(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if self.source.starved()? || self.source.dead() {
                return Ok(());
            }
            let status = self.source.status();
            if status.as_ref().is_some_and(|status| !status["outcome"].is_null()) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "the snapshot does not end: {status:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns what is in the folder for the snapshot: whether a file has the name of the snapshot,
    /// and the names of other files.
    fn files(&self) -> Result<(bool, Vec<String>)> {
        // The process may have a file system of its own there.
        let root = PathBuf::from(format!("/proc/{}/root", self.source.pid()));
        let folder = self.new_files();
        let inside = root.join(folder.strip_prefix("/").unwrap_or(&folder));
        let folder = if self.source.dead() { folder } else { inside };
        let mut names = Vec::new();
        if folder.exists() {
            for entry in std::fs::read_dir(&folder)? {
                names.push(entry?.file_name().to_string_lossy().into_owned());
            }
        }
        let all = names.len();
        names.retain(|name| name != "guest");
        Ok((names.len() < all, names))
    }

    /// Checks the guest and its file, and returns the outcome.
    fn judge(&mut self, case: Case) -> Result<End> {
        let dead = self.source.dead();
        let (complete, others) = self.files()?;
        if complete {
            self.restored(case, "files/new/guest").context("the file has its name")?;
        }
        if dead {
            return Ok(if complete { End::Copy } else { End::Died });
        }
        ensure!(others.is_empty(), "the snapshot has left {others:?}");
        let status = self.source.status().context("no status")?;
        ensure!(
            (status["outcome"] == "completed") == complete,
            "the file exists: {complete}; the status says {}: {}",
            status["outcome"],
            status["error"]
        );
        self.source.whole()?;
        Ok(if complete { End::Copied } else { End::Stayed })
    }

    /// Checks that the guest in the file `name` has all its pages.
    fn restored(&self, case: Case, name: &str) -> Result<()> {
        let args = vec!["--incoming".into(), format!("file:{}", self.path(name).display())];
        let mut copy = Side::start(Start { args, ..case.start() }, &self.folder.0, "copy")?;
        copy.wait("the guest out of the file", |status| status["vm"]["place"] == "running")?;
        copy.whole()
    }

    /// Takes another snapshot, which must succeed: nothing of the first one is in its way.
    fn again(&mut self, case: Case) -> Result<()> {
        let mut order = self.order("files/again", &[])?;
        order.ended()?.map_err(anyhow::Error::msg).context("a later snapshot")?;
        self.restored(case, "files/again").context("a later snapshot")
    }
}

pub(super) fn run(case: Case) -> Result<Ran> {
    let mut scene = Scene::new(case)?;
    let began = Instant::now();
    let (end, killed, took) = match case.fault {
        Fault::FewDescriptors => (few_descriptors(case, &mut scene)?, false, began.elapsed()),
        _ => at_a_moment(case, &mut scene)?,
    };
    if !scene.source.dead() && case.fault != Fault::PressSource {
        for resource in [Resource::Nofile, Resource::Fsize] {
            rlimits::set(&scene.source, resource, None)?;
        }
        scene.again(case)?;
        scene.source.whole()?;
    }
    Ok(Ran { end, took, killed })
}

/// Raises the limit of descriptors until the snapshot succeeds.
fn few_descriptors(case: Case, scene: &mut Scene) -> Result<End> {
    let (file, log) = (scene.path("files/new/guest"), scene.path("snapshot.log"));
    let mut args = arguments(&["snapshot"], &scene.path("source"));
    args.push(format!("file:{}", file.display()).into());
    rlimits::until_enough(&mut scene.source, |source, number| {
        rlimits::allow(source, number)?;
        let ended = Order::start(&args, log.clone(), Limits::default())?.ended()?;
        ensure!(ended.is_ok() == file.exists(), "the file exists: {}; the command: {ended:?}", file.exists());
        Ok(ended.is_ok())
    })?;
    scene.judge(case)
}

/// Takes a snapshot, and injects the fault when the phase is reached. Returns the outcome, whether
/// the kernel has killed the process, and the time since the fault.
fn at_a_moment(case: Case, scene: &mut Scene) -> Result<(End, bool, Duration)> {
    if case.fault == Fault::FileLimit {
        rlimits::set(&scene.source, Resource::Fsize, Some(LONGEST_FILE))?;
    }
    let (frozen, held) = (scene.path("frozen"), scene.path("held"));
    let hook = format!("touch {}; while test -e {}; do sleep 0.05; done", frozen.display(), held.display());
    let more = match (case.phase, case.fault) {
        (Phase::Freeze, _) => vec!["--freeze-hook", &hook, "--hook-timeout", HOOK_LIMIT],
        // These faults are in effect from the start.
        (_, Fault::SlowDisk | Fault::FullDisk | Fault::FileLimit) => vec![],
        _ => vec!["--max-bandwidth", RATE],
    };
    std::fs::write(&held, "")?;
    let mut began = Instant::now();
    let mut order = scene.order("files/new/guest", &more)?;
    if case.phase == Phase::Freeze || more.len() == 2 {
        reach(case, scene, &mut order, &frozen)?;
        began = Instant::now();
        apply(case.fault, scene, &mut order)?;
    }
    std::fs::remove_file(&held)?;
    let said = if case.fault == Fault::KillCommand { None } else { Some(order.ended()?) };
    scene.ended()?;
    let took = began.elapsed();
    let killed = scene.source.starved()?;
    let end = scene.judge(case).with_context(|| format!("the command: {said:?}"))?;
    ensure!(
        said.as_ref().is_none_or(|said| said.is_ok() == (end == End::Copied)),
        "the outcome is {end}, and the command says {said:?}"
    );
    ensure!(scene.slow.is_none() || took > SLOW.1, "the disk was not slow: {took:?}");
    Ok((end, killed, took))
}

/// Waits until the snapshot is at the phase of the case.
fn reach(case: Case, scene: &mut Scene, order: &mut Order, frozen: &Path) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let status = scene.source.status().unwrap_or_default();
        let here = match case.phase {
            Phase::Freeze => frozen.exists(),
            _ => status["state"] == "precopy" && status["progress"]["wire_bytes"].as_u64() > Some(UNDER_WAY),
        };
        if order.has_ended()? || Instant::now() > deadline {
            bail!(Early { phase: case.phase, status });
        }
        if here {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn apply(fault: Fault, scene: &mut Scene, order: &mut Order) -> Result<()> {
    match fault {
        Fault::KillSource => scene.source.kill(),
        Fault::KillCommand => order.kill(),
        Fault::StopSource => {
            scene.source.signal(Signal::STOP)?;
            std::thread::sleep(STOPPED);
            scene.source.signal(Signal::CONT)
        }
        Fault::PressSource => {
            Ok(scene.source.budget().context("no limit of memory")?.squeeze(LEAST_MEMORY)?)
        }
        Fault::RemoveFolder => Ok(std::fs::remove_dir_all(scene.new_files())?),
        Fault::Cancel => scene.source.command("cancel", json!({})).map(drop),
        other => bail!("{other} has no effect on a snapshot"),
    }
}
