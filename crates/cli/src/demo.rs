//! `vmferry demo`: the whole thing on one host, with real processes and the very commands that operators use.

use crate::api::{Client, MigrateRequest};
use crate::args::{DemoArgs, GuestKind, TrackerArg};
use crate::choices::OnTimeoutArg;
use crate::sandbox::SandboxArg;
use crate::speed::{EVERY, Sample};
use crate::tls::Certificates;
use crate::{Status, guest, migrate, output, speed};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::net::Ipv4Addr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};
use vmferry_bench::density::Budget;
use vmferry_bench::link::{End, Link};
use vmferry_guest_abi::Workload;

/// How long a process may take to come up, and a guest to fill its memory.
const START: Duration = Duration::from_secs(60);
/// How long the guest is watched before and after.
const WATCH: Duration = Duration::from_millis(1200);
/// How long the guest may take to check all its pages.
const CHECK: Duration = Duration::from_secs(60);

/// Entries of a dirty ring where nobody says how many.
const DEFAULT_RING: u32 = 4096;

/// A machine for two: what both `run`s of a demonstration or a measurement are started with.
pub(crate) struct Setup<'a> {
    pub(crate) guest: GuestKind,
    pub(crate) memory: u64,
    pub(crate) cpus: u32,
    pub(crate) workload: String,
    /// What else the guest is told.
    pub(crate) guest_args: String,
    /// Entries of each vCPU's dirty ring.
    pub(crate) dirty_ring: Option<u32>,
    /// Whether the processes that have the guest confine themselves.
    pub(crate) sandbox: SandboxArg,
    /// Whether the guest has a balloon; not beside QEMU's, which has none.
    pub(crate) balloon: bool,
    /// Between which ends they run. None: on loopback.
    pub(crate) link: Option<&'a Link>,
    /// In what memory they live. None: in the host's.
    pub(crate) budget: Option<&'a Budget>,
    /// Whether they speak TLS with each other, with certificates of an authority that is made for them.
    pub(crate) encrypted: bool,
}

/// A `vmferry run` of our own.
pub(crate) struct Runner {
    child: Child,
    pub(crate) client: Client,
}

impl Runner {
    /// Starts one; it waits for a guest if `incoming`.
    fn start(setup: &Setup<'_>, folder: &Path, name: &str, incoming: bool) -> Result<Self> {
        let api = folder.join(format!("{name}.sock"));
        let log = folder.join(format!("{name}.log"));
        let mut command = Command::new(std::env::current_exe().context("cannot find this executable")?);
        command.args(["run", "--die-with-parent", "--guest", &setup.guest.to_string()]);
        command.args(["--memory", &setup.memory.to_string(), "--cpus", &setup.cpus.to_string()]);
        command.arg("--api").arg(&api).args(["--sandbox", setup.sandbox.name()]);
        command.args(["--balloon", if setup.balloon { "on" } else { "off" }]);
        if let Some(entries) = setup.dirty_ring {
            command.args(["--dirty-ring", &entries.to_string()]);
        }
        if incoming {
            let address = setup.link.map_or(Ipv4Addr::LOCALHOST, |link| link.address(End::Destination));
            command.args(["--incoming", &format!("tcp:{address}:0")]);
            if !address.is_loopback() {
                command.arg("--insecure");
            }
        } else {
            command.args(["--workload", &setup.workload, "--guest-args", &setup.guest_args]);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(std::fs::File::create(&log)?);
        if setup.encrypted {
            command.args(Certificates::of(folder).options());
        }
        if let Some(link) = setup.link {
            link.enter(if incoming { End::Destination } else { End::Source }, &mut command)?;
        }
        if let Some(budget) = setup.budget {
            budget.enter(&mut command)?;
        }
        // A group of its own: Ctrl-C on the terminal is for the demonstration, which then tidies up.
        command.process_group(0);
        let mut child = command.spawn().context("cannot start another vmferry")?;
        if let Some(Err(error)) = setup.budget.map(|budget| budget.adopt(child.id())) {
            let _ = child.kill();
            let _ = child.wait();
            return Err(error).context("a guest without the limit that it was to have");
        }
        let deadline = Instant::now() + START;
        loop {
            if let Ok(client) = Client::connect(&api) {
                return Ok(Self { child, client });
            }
            if let Some(status) = child.try_wait()? {
                let said = std::fs::read_to_string(&log).unwrap_or_default();
                bail!("the {name} process ended ({status}): {}", said.trim());
            }
            if Instant::now() > deadline {
                let _ = child.kill();
                let _ = child.wait();
                bail!("the {name} process did not come up within {START:?}");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// How its process ended, if it did.
    pub(crate) fn ended(&mut self) -> Result<Option<std::process::ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    pub(crate) fn status(&mut self) -> Result<Value> {
        self.client.call("status", json!({}))
    }

    /// Waits until `ready` finds what it wants in the status.
    pub(crate) fn wait<T>(
        &mut self,
        what: &str,
        within: Duration,
        stop: &AtomicBool,
        ready: impl Fn(&Value) -> Option<T>,
    ) -> Result<T> {
        let deadline = Instant::now() + within;
        loop {
            if let Some(found) = ready(&self.status()?) {
                return Ok(found);
            }
            if stop.load(Ordering::Acquire) {
                bail!("interrupted while waiting for {what}");
            }
            if Instant::now() > deadline {
                bail!("{what} did not happen within {within:?}");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Where a waiting target listens.
    fn incoming(&mut self, stop: &AtomicBool) -> Result<String> {
        self.wait("the target listening", START, stop, |status| {
            status["vm"]["incoming"].as_str().map(str::to_owned)
        })
    }

    /// Waits until the guest runs its workload.
    fn running(&mut self, stop: &AtomicBool) -> Result<()> {
        self.wait("the guest filling its memory", START, stop, |status| match status["vm"]["guest"]["state"]
            .as_str()
        {
            Some("running" | "corrupt") => Some(()),
            _ => None,
        })
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        if self.client.call("quit", json!({})).is_ok() {
            let deadline = Instant::now() + Duration::from_secs(5);
            while Instant::now() < deadline {
                if matches!(self.child.try_wait(), Ok(Some(_))) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A guest that runs its workload in one process, and another process that waits for it.
///
/// When it is dropped, the source ends first, and the folder with their sockets is removed at last.
pub(crate) struct Pair {
    pub(crate) source: Runner,
    pub(crate) target: Runner,
    /// Where the target waits.
    pub(crate) uri: String,
    _folder: Folder,
}

impl Pair {
    /// Brings both up; given up when `stop` is set.
    pub(crate) fn start(setup: &Setup<'_>, stop: &AtomicBool) -> Result<Self> {
        let folder = Folder::new()?;
        if setup.encrypted {
            Certificates::of(folder.path()).make()?;
        }
        let mut target = Runner::start(setup, folder.path(), "target", true)?;
        let uri = target.incoming(stop)?;
        let mut source = Runner::start(setup, folder.path(), "source", false)?;
        source.running(stop)?;
        Ok(Self { source, target, uri, _folder: folder })
    }

    /// Has the guest move.
    pub(crate) fn migrate(&mut self, request: &MigrateRequest) -> Result<()> {
        self.source.client.call("migrate", serde_json::to_value(request)?)?;
        Ok(())
    }
}

/// A guest that goes nowhere.
pub(crate) struct Alone {
    pub(crate) runner: Runner,
    _folder: Folder,
}

impl Alone {
    /// Starts one; what it does it may still have to begin.
    pub(crate) fn start(setup: &Setup<'_>) -> Result<Self> {
        let folder = Folder::new()?;
        Ok(Self { runner: Runner::start(setup, folder.path(), "guest", false)?, _folder: folder })
    }
}

/// A folder of our own for sockets and logs; removed when dropped.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("vmferry-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).with_context(|| format!("cannot make the folder {}", path.display()))?;
        Ok(Self(path))
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The kind of guest to use: what was asked for, or KVM where it works.
fn kind(asked: Option<GuestKind>) -> GuestKind {
    asked.unwrap_or_else(|| match guest::no_kvm() {
        None => GuestKind::Kvm,
        Some(why) => {
            eprintln!(
                "KVM cannot be used here ({why}): a process guest is moved instead, by the same engine."
            );
            GuestKind::Process
        }
    })
}

pub(crate) fn demo(args: &DemoArgs) -> Result<Status> {
    let stop = Arc::new(AtomicBool::new(false));
    let on_signal = Arc::clone(&stop);
    ctrlc::set_handler(move || on_signal.store(true, Ordering::Release)).context("cannot catch Ctrl-C")?;
    let json_out = args.json.as_deref().map(output::open).transpose()?;
    let quiet = args.json.as_deref() == Some(Path::new("-"));
    let say = |text: String| {
        if quiet { eprintln!("{text}") } else { println!("{text}") }
    };
    let workload = fitting(&args.workload, args.memory);
    let setup = Setup {
        sandbox: args.sandbox,
        balloon: true,
        guest: kind(args.guest),
        memory: args.memory,
        cpus: args.cpus,
        workload: workload.to_string(),
        guest_args: String::new(),
        // The tracker has to be there from the start.
        dirty_ring: (args.tracker == TrackerArg::Ring).then_some(DEFAULT_RING),
        link: None,
        budget: None,
        encrypted: false,
    };
    say(format!(
        "A {} guest with {} MiB and {} vCPU(s) runs `{}`; it will move to another process while it works.",
        setup.guest,
        setup.memory >> 20,
        setup.cpus,
        setup.workload
    ));
    let mut pair = Pair::start(&setup, &stop)?;
    std::thread::sleep(WATCH);
    let before = pair.source.status()?["vm"]["guest"].clone();
    say(format!("source       process {}: {}", pair.source.pid(), describe(&before)));
    say(format!("target       process {} waits at {}", pair.target.pid(), pair.uri));
    let began = Instant::now();
    pair.migrate(&request(args, &pair.uri))?;
    let (source, target) = (&mut pair.source.client, &mut pair.target.client);
    let mut looks = Vec::new();
    // In postcopy the guest runs over there while pages still come.
    let mut on_status = |status: &Value| {
        let there = status["state"].as_str().is_some_and(|state| state.starts_with("postcopy"));
        if there && looks.last().is_none_or(|(at, _): &(Instant, Sample)| at.elapsed() >= EVERY) {
            looks.extend(look(target).ok());
        }
    };
    let mut report = migrate::watch(source, args.link, &stop, &mut on_status)?;
    let status = if report["outcome"] == "completed" {
        let (after, later) = follow(&mut pair.target, &before, &stop)?;
        looks.extend(later);
        if let Some(points) = report["guest"]["speed"]["points"].as_array_mut() {
            points.extend(speed::points(began, &looks).into_iter().map(|point| json!(point)));
        }
        report["guest"]["after_writes_per_s"] = after["writes_per_s"].clone();
        report["guest"]["stall_max_us"] = after["stall_max_us"].clone();
        report["guest"]["checked_itself"] = json!(true);
        output::print(&report, quiet)?;
        say(format!("target       process {}: {}", pair.target.pid(), describe(&after)));
        say("The guest checked every page of its own on the other side: none is lost, old or damaged.".into());
        Status::Done
    } else {
        output::print(&report, quiet)?;
        output::exit_status(&report)
    };
    if let Some(mut out) = json_out {
        use std::io::Write;
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
    }
    Ok(status)
}

/// Watches the guest after its move: it goes on counting, and finds all its pages as it left them.
///
/// Returns what it says of itself in the end, and how its count went on.
fn follow(target: &mut Runner, before: &Value, stop: &AtomicBool) -> Result<(Value, Vec<(Instant, Sample)>)> {
    const REQUEST: u64 = 1;
    target.client.call("verify-guest", json!({ "request": REQUEST }))?;
    let had = before["t_us"].as_u64().unwrap_or(0);
    target.wait("the guest going on at the target", START, stop, |status| {
        (status["vm"]["guest"]["t_us"].as_u64()? > had).then_some(())
    })?;
    let looks = watch_speed(&mut target.client)?;
    let after = target.wait("the guest checking all its pages", CHECK, stop, |status| {
        let guest = &status["vm"]["guest"];
        (guest["verify_done"].as_u64()? == REQUEST || guest["corrupt"].as_u64()? > 0).then(|| guest.clone())
    })?;
    if after["corrupt"].as_u64() != Some(0) {
        bail!(
            "the guest found {} damaged pages of its own after the move; the first: {}",
            after["corrupt"],
            after["first_corrupt"]
        );
    }
    Ok((after, looks))
}

/// Looks at the guest's count for [`WATCH`].
fn watch_speed(client: &mut Client) -> Result<Vec<(Instant, Sample)>> {
    let until = Instant::now() + WATCH;
    let mut looks = Vec::new();
    while Instant::now() < until {
        looks.push(look(client)?);
        std::thread::sleep(EVERY);
    }
    Ok(looks)
}

/// The guest's clock and count now.
fn look(client: &mut Client) -> Result<(Instant, Sample)> {
    let vcpus = client.call("writes", json!({}))?;
    let of = |cpu: &Value, index: usize| cpu[index].as_u64().unwrap_or(0);
    let cpus = || vcpus["vcpus"].as_array().into_iter().flatten();
    let t_us = cpus().map(|cpu| of(cpu, 0)).max().unwrap_or(0);
    Ok((Instant::now(), Sample { t_us, writes: cpus().map(|cpu| of(cpu, 1)).sum() }))
}

/// The default workload, made to fit where the guest is small.
fn fitting(workload: &Workload, memory: u64) -> Workload {
    let mut workload = *workload;
    let most = memory / 4 * 3;
    let cut = |size: Option<u64>| size.map(|size| size.min(most));
    (workload.ws, workload.data) = (cut(workload.ws), cut(workload.data));
    workload
}

fn request(args: &DemoArgs, uri: &str) -> MigrateRequest {
    MigrateRequest {
        mode: args.mode,
        tracker: migrate::tracker(args.tracker),
        channels: args.channels,
        max_bandwidth: args.link,
        // A link that the guest outruns must not keep the demonstration from its end.
        timeout_ms: Some(20_000),
        on_timeout: OnTimeoutArg::Switch,
        free_pages: args.free_pages,
        verify: true,
        ..MigrateRequest::to(uri)
    }
}

fn describe(guest: &Value) -> String {
    format!(
        "{:.0} writes/s, {} writes and {} checks so far, {} wrong",
        guest["writes_per_s"].as_f64().unwrap_or(0.0),
        guest["writes"],
        guest["checks"],
        guest["corrupt"]
    )
}
