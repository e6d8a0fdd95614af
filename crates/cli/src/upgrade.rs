//! `vmferry upgrade`: continues a guest in a new process of this host, without copying its memory.
//!
//! # Order
//! 1. The command asks the old process for its command line, and starts the new process with the
//!    same options. The new process has the ends of two pairs of sockets, and listens for clients
//!    next to the old control socket.
//! 2. When the new process waits for the guest, the command passes the other ends to the old
//!    process, and makes it hand the guest over.
//! 3. The new process starts the guest, and moves its control socket to the path of the old one.
//! 4. The command makes the old process end.
//!
//! Until the old process has sent the commit, a failure of either process or of this command leaves
//! the guest in the old process. The new process then ends, because its sockets have ended. From
//! step 2 on, the command ends the new process only if the old one reports that it keeps the guest.

use crate::api::{Client, MigrateRequest};
use crate::args::UpgradeArgs;
use crate::ctrl_c::Stage;
use crate::handed::Handed;
use crate::successor::{StartArguments, SuccessorArguments};
use crate::{Status, advice, ctrl_c, migrate, net, output};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use vmferry_control::Server;
use vmferry_engine::Uri;

/// Interval at which the command checks whether the new process is ready.
const POLL: Duration = Duration::from_millis(2);
/// Longest time for which the command waits for the end of the old process.
const END: Duration = Duration::from_secs(5);
/// Channels of a handoff: control and bulk.
const CHANNELS: usize = 2;

/// Returns the path of the control socket of a new process that waits to take the place of the
/// process at `path`. Two upgrades at the same time would use the same path, so the second is
/// refused.
pub(crate) fn waiting_at(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(".next");
    name.into()
}

/// Moves the control socket of this process to `path`, the place of the process that had the guest.
pub(crate) fn succeed(server: &mut Server, path: &Path) {
    if let Err(error) = server.move_to(path) {
        eprintln!(
            "vmferry: the control socket stays at {}, because it cannot be moved to {}: {error}",
            waiting_at(path).display(),
            path.display()
        );
    }
}

pub(crate) fn upgrade(args: &UpgradeArgs) -> Result<Status> {
    let began = Instant::now();
    let json_out = args.json.as_deref().map(output::open).transpose()?;
    let stage = ctrl_c::caught(&args.api)?;
    let mut old = Client::connect(&args.api)?;
    let (sockets, ends) = pairs()?;
    let handed = Handed::ask(&mut old).context("the process does not pass its descriptors")?;
    let arguments = with_handed(arguments(&mut old, &args.api, &ends)?, &handed)?;
    let old_pid = old.peer_pid()?;
    let inherited: Vec<_> = ends.iter().map(AsFd::as_fd).chain(handed.all()).collect();
    let mut new = NewProcess::start(args, &arguments, &inherited)?;
    // The new process notices the end of its sockets only if no other process has them.
    drop(ends);
    new.wait_until_ready(args, &stage)?;
    let ready = began.elapsed();
    let mut report = hand_over(&mut old, sockets, &stage).context("the guest stays in the old process")?;
    let status = output::exit_status(&report);
    let _ = stage.ended.set(status);
    report["upgrade"] = json!({
        "from_pid": old_pid,
        "to_pid": new.pid(),
        "ready_ms": ready.as_secs_f64() * 1e3,
    });
    match status {
        // If the owner is unknown, the new process may run the guest.
        Status::Done | Status::Unknown => new.release(),
        _ => new.end(),
    }
    if status == Status::Done {
        retire(old);
    }
    conclude(args, &report, status, json_out)?;
    Ok(status)
}

/// Returns the sockets for the channels: the ends of the old process, and those of the new one.
fn pairs() -> Result<(Vec<UnixStream>, Vec<UnixStream>)> {
    let pair = |_| UnixStream::pair().context("cannot create a pair of sockets");
    Ok((0..CHANNELS).map(pair).collect::<Result<Vec<_>>>()?.into_iter().unzip())
}

/// Returns the command line of the new process. `ends` are its sockets.
fn arguments(old: &mut Client, api: &Path, ends: &[UnixStream]) -> Result<SuccessorArguments> {
    let start = StartArguments::ask(old)
        .with_context(|| format!("cannot use the command line of the process at {}", api.display()))?;
    let arguments = SuccessorArguments::from_start(&start)?;
    let backing = arguments.value("memory-backing").and_then(|backing| backing.to_str());
    if !matches!(backing, Some("memfd" | "hugetlbfs")) {
        bail!(
            "the guest's memory is anonymous, so that no other process can map it. Start guests with --memory-backing memfd if they are to \
             be upgraded. Move this guest with `vmferry run --incoming unix:PATH` and `vmferry migrate --api {} unix:PATH`, which copies its \
             memory",
            api.display()
        );
    }
    if arguments.value("serial").is_some_and(|to| to == "stdio") {
        bail!(
            "the guest's console is the terminal of its process (--serial stdio), which cannot pass to another process; start guests with \
             --serial FILE if they are to be upgraded"
        );
    }
    let own = arguments.path("api").context("the process has no --api in its command line")?;
    let numbers: Vec<_> = ends.iter().map(|end| end.as_raw_fd().to_string()).collect();
    let arguments = ["pass-fd", "successor"].iter().fold(arguments, |all, name| all.without(name));
    Ok(arguments
        .arriving_from(format!("fd:{}", numbers.join(",")))
        // The memory of the guest takes the place of the memory that the new process starts with.
        // A memfd takes no pages as long as it is not written.
        .replace("memory-backing", "memfd")
        .replace("prealloc", "off")
        .replace("api", own)
        .flag("successor"))
}

/// Returns `arguments` with the descriptors `handed` of the old process.
fn with_handed(arguments: SuccessorArguments, handed: &Handed) -> Result<SuccessorArguments> {
    let nets: Vec<_> = arguments.values("net").map(|net| net.to_string_lossy().into_owned()).collect();
    let plugged = nets.iter().filter(|net| !net::is_unplugged(net)).count();
    if plugged != handed.taps.len() {
        bail!(
            "the process has {plugged} network interfaces with a tap, and passed {} taps",
            handed.taps.len()
        );
    }
    let arguments = arguments.without("net").without("metrics-descriptor");
    let mut taps = handed.taps.iter();
    let arguments = nets.iter().fold(arguments, |arguments, value| {
        let tap = if net::is_unplugged(value) { None } else { taps.next() };
        let value = tap.map_or_else(|| value.clone(), |tap| net::with_descriptor(value, tap.as_raw_fd()));
        arguments.with("net", value)
    });
    Ok(match &handed.metrics {
        Some(listener) => arguments.with("metrics-descriptor", listener.as_raw_fd().to_string()),
        None => arguments,
    })
}

/// New process, which is killed when this value is dropped before it was released.
struct NewProcess {
    child: Option<Child>,
    api: PathBuf,
    pid: u32,
}

impl NewProcess {
    fn start(
        args: &UpgradeArgs,
        arguments: &SuccessorArguments,
        inherited: &[BorrowedFd<'_>],
    ) -> Result<Self> {
        let program = match &args.binary {
            Some(binary) => std::fs::canonicalize(binary)
                .with_context(|| format!("cannot find the executable {}", binary.display()))?,
            None => std::env::current_exe().context("cannot find this executable")?,
        };
        let stderr = match &args.log {
            Some(path) => {
                let file = File::options().append(true).create(true).open(path);
                file.with_context(|| format!("cannot write {}", path.display()))?.into()
            }
            None => Stdio::inherit(),
        };
        let api = arguments.path("api").context("the process has no --api in its command line")?;
        let child = arguments.spawn(&program, inherited, stderr)?;
        Ok(Self { pid: child.id(), child: Some(child), api: waiting_at(&api) })
    }

    fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits until the new process waits for the guest.
    fn wait_until_ready(&mut self, args: &UpgradeArgs, stage: &Stage) -> Result<()> {
        let deadline = Instant::now() + args.start_timeout;
        let mut client = None;
        loop {
            if let Some(child) = &mut self.child
                && let Some(status) = child.try_wait()?
            {
                self.child = None;
                let log = args.log.as_deref().map(|path| format!(", see {}", path.display()));
                bail!(
                    "the new process ended before it was ready for the guest ({status}{}); the guest stays in the old process",
                    log.unwrap_or_default()
                );
            }
            client = client.or_else(|| Client::connect(&self.api).ok());
            match client.as_mut().map(|client| client.call("status", json!({}))) {
                Some(Ok(status))
                    if status["vm"]["pid"] == self.pid && status["vm"]["incoming"].is_string() =>
                {
                    return Ok(());
                }
                // The next turn reports whether the process has ended.
                Some(Err(_)) => client = None,
                Some(Ok(_)) | None => {}
            }
            if stage.interrupted.load(Ordering::Acquire) {
                bail!("interrupted before the guest was handed over; it stays in the old process");
            }
            if Instant::now() > deadline {
                bail!(
                    "the new process was not ready for the guest within {:?}; the guest stays in the old process. Allow it more time with \
                     --start-timeout",
                    args.start_timeout
                );
            }
            std::thread::sleep(POLL);
        }
    }

    /// Leaves the new process running.
    fn release(&mut self) {
        self.child = None;
    }

    /// Ends the new process, which has not run the guest.
    fn end(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for NewProcess {
    fn drop(&mut self) {
        self.end();
    }
}

/// Makes the old process hand over the guest, and returns the report. If the old process does not
/// answer, the report says that the owner is unknown.
///
/// # Errors
/// Returns an error if the handoff has not begun and will not begin.
fn hand_over(old: &mut Client, sockets: Vec<UnixStream>, stage: &Stage) -> Result<Value> {
    let names: Vec<_> = (0..sockets.len()).map(|n| format!("upgrade-{}-{n}", std::process::id())).collect();
    for (name, socket) in names.iter().zip(&sockets) {
        old.pass(name, socket.as_fd())?;
    }
    // From now on, the old process alone has these ends.
    drop(sockets);
    let request = MigrateRequest { local: true, ..MigrateRequest::to(&Uri::Fd(names.clone()).to_string()) };
    let unanswered = migrate::begin(old, "migrate", serde_json::to_value(request)?);
    if unanswered.is_err() {
        for name in &names {
            let _ = old.close(name);
        }
    }
    let unanswered = unanswered?;
    stage.begun.store(true, Ordering::Release);
    Ok(unanswered.unwrap_or_else(|| migrate::watch(old, None, &stage.interrupted, &mut |_| {})))
}

/// Returns the message for an unknown owner. It names the processes by their ids: the new process
/// may take the path of the old one's control socket at any time, so a path stands for neither.
fn undecided(report: &Value, api: &Path) -> String {
    let (old, new) = (&report["upgrade"]["from_pid"], &report["upgrade"]["to_pid"]);
    format!(
        "it is not known whether the guest is in the old process {old} or in the new process {new} ({}). End neither process yet. Repeat \
         `vmferry status --api {}`, and `vmferry status --api {}` while that socket exists: the process that reports the place `running` or \
         `paused` has the guest, and `pid` is its id. If the new process has the guest, end the old one with `kill -9 {old}`. If the new \
         process has ended, decide with `vmferry recover --api {}`",
        report["error"].as_str().unwrap_or("no reason was given"),
        api.display(),
        waiting_at(api).display(),
        api.display()
    )
}

/// Makes the old process end, and waits for its end.
fn retire(mut old: Client) {
    let deadline = Instant::now() + END;
    // The process may have ended by itself.
    let _ = old.call("quit", json!({}));
    while Instant::now() < deadline && old.call("status", json!({})).is_ok() {
        std::thread::sleep(POLL);
    }
}

/// Prints the result.
fn conclude(
    args: &UpgradeArgs,
    report: &Value,
    status: Status,
    json_out: Option<Box<dyn std::io::Write + Send>>,
) -> Result<()> {
    if let Some(mut out) = json_out {
        writeln!(out, "{}", serde_json::to_string_pretty(report)?)?;
    }
    let upgrade = &report["upgrade"];
    if status != Status::Done {
        let message = match status {
            Status::Unknown => undecided(report, &args.api),
            // The control socket of the new process names the target of the advice.
            _ => advice::advice(report, &Uri::Unix(waiting_at(&args.api))),
        };
        output::print_message(&message);
        return Ok(());
    }
    let ms = |field: &str| report[field].as_f64().unwrap_or(0.0);
    output::print_message(&format!(
        "the guest continues in process {} instead of {}: it was stopped for {:.1} ms, and handed over within {:.1} ms",
        upgrade["to_pid"],
        upgrade["from_pid"],
        ms("downtime_ms"),
        ms("total_ms")
    ));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;
    use vmferry_testkit::Folder;

    /// Answer of a process to one command.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Answer {
        Done,
        Refused,
        /// A line that is no answer.
        Nonsense,
        /// The process ends.
        End,
    }

    /// Hands over the guest of a process that executes each command, except that it answers
    /// `command` with `answer`.
    fn handed_over(command: &str, answer: Answer) -> Result<Value> {
        let folder = Folder::new();
        let listener = UnixListener::bind(folder.file("api")).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut socket, _) = listener.accept().unwrap();
                writeln!(socket, "{}", json!({"QMP": {"version": {}, "capabilities": []}})).unwrap();
                for line in BufReader::new(socket.try_clone().unwrap()).lines() {
                    let Ok(line) = line else { return };
                    let request: Value = serde_json::from_str(&line).unwrap();
                    let own = request["execute"] == command;
                    let id = &request["id"];
                    let text = match if own { answer } else { Answer::Done } {
                        Answer::Done => json!({"return": {}, "id": id}).to_string(),
                        Answer::Refused => {
                            json!({"error": {"class": "GenericError", "desc": "busy"}, "id": id}).to_string()
                        }
                        Answer::Nonsense => "nonsense".to_owned(),
                        Answer::End => return,
                    };
                    writeln!(socket, "{text}").unwrap();
                }
            });
            let mut old = Client::connect(&folder.file("api")).unwrap();
            hand_over(&mut old, pairs().unwrap().0, &Stage::default())
        })
    }

    #[test]
    fn message_for_an_unknown_owner_names_both_processes() {
        let report = json!({ "error": "it broke", "upgrade": { "from_pid": 17, "to_pid": 42 } });
        let message = undecided(&report, Path::new("vm.sock"));
        for words in [
            "old process 17",
            "new process 42 (it broke)",
            "--api vm.sock`",
            "--api vm.sock.next`",
            "`kill -9 17`",
        ] {
            assert!(message.contains(words), "{words}: {message}");
        }
    }

    #[test]
    fn new_process_is_kept_unless_the_old_one_certainly_keeps_the_guest() {
        for (command, answer) in [
            ("getfd", Answer::Refused),
            ("getfd", Answer::Nonsense),
            ("getfd", Answer::End),
            ("x-vmferry-migrate", Answer::Refused),
        ] {
            let result = handed_over(command, answer);
            assert!(result.is_err(), "{command} {answer:?}: {result:?}");
        }
        for (command, answer, field) in [
            ("x-vmferry-migrate", Answer::Nonsense, "source_silent"),
            ("x-vmferry-migrate", Answer::End, "source_gone"),
            ("x-vmferry-status", Answer::Nonsense, "source_silent"),
            ("x-vmferry-status", Answer::Refused, "source_silent"),
            ("x-vmferry-status", Answer::End, "source_gone"),
        ] {
            let report = handed_over(command, answer).unwrap();
            assert_eq!(output::exit_status(&report), Status::Unknown, "{command} {answer:?}: {report}");
            assert_eq!(report[field], true, "{command} {answer:?}: {report}");
        }
    }
}
