//! Process `vmferry run` with a guest in it, or as a target that waits for one.

use crate::guest_report::GuestReport;
use crate::pace::{self, Limit};
use crate::programs::{Answer, ProgramHost, ProgramOutput, Request};
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::cell::Cell;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Interval at which a console is read.
const TICK: Duration = Duration::from_millis(50);
/// Longest time for a process to start, to answer or to end.
const PROMPT: Duration = Duration::from_secs(30);
/// Longest time until a guest answers on its console.
const ANSWER: Duration = Duration::from_secs(60);

/// Settings of a guest, which are the same on both sides of a move.
#[derive(Debug, Clone)]
pub(crate) struct Guest {
    pub(crate) memory: &'static str,
    pub(crate) cpus: u32,
    pub(crate) dirty_ring: bool,
    /// Options on the kernel's command line besides the console.
    pub(crate) options: String,
    /// Arguments of `vmferry run`, such as those of a disk or a network device.
    pub(crate) devices: Vec<String>,
}

impl Guest {
    /// Returns a guest that writes and checks 32 MiB, and keeps a file.
    pub(crate) fn usual() -> Self {
        Self {
            memory: "192M",
            cpus: 1,
            dirty_ring: false,
            options: "lab.stress_mib=32".into(),
            devices: Vec::new(),
        }
    }
}

/// Requested report of a guest. The guest read its clocks between `requested` and `read`, however
/// long the report took to arrive.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) guest_report: GuestReport,
    pub(crate) requested: Instant,
    pub(crate) read: Instant,
}

/// Files that a guest boots from.
#[derive(Debug, Clone)]
pub(crate) struct Boot {
    pub(crate) vmferry: PathBuf,
    pub(crate) kernel: PathBuf,
    pub(crate) initrd: PathBuf,
}

/// One process `vmferry run`.
#[derive(Debug)]
pub(crate) struct Vm {
    host: Rc<dyn ProgramHost>,
    vmferry: PathBuf,
    /// Number of the process at its host. `None` if the host did not start it.
    id: Option<u32>,
    api: PathBuf,
    console: PathBuf,
    errors: PathBuf,
    /// Number of bytes of the console that have been read.
    read: Cell<u64>,
}

impl Vm {
    /// Boots a guest. Its console is written to a file in `folder`.
    pub(crate) fn boot(
        host: &Rc<dyn ProgramHost>,
        boot: &Boot,
        guest: &Guest,
        folder: &Path,
        name: &str,
    ) -> Result<Self> {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        // The console is quiet, because each byte on the serial port is an exit, which takes a
        // millisecond in an emulated machine.
        // Distributions make the kernel zero every page when it is allocated. A driver that
        // allocates pages to report them as free would then write to all of them first, with a
        // fault for each page while dirty pages are tracked, and block its processor meanwhile.
        let line = format!("console=ttyS0 quiet init_on_alloc=0 {}", guest.options);
        let more = ["--kernel", &text(&boot.kernel), "--initrd", &text(&boot.initrd), "--cmdline", &line];
        Self::start(host, boot, guest, folder, name, &more)
    }

    /// Runs the bare-metal guest.
    pub(crate) fn measuring(
        host: &Rc<dyn ProgramHost>,
        boot: &Boot,
        guest: &Guest,
        folder: &Path,
        name: &str,
        workload: &str,
    ) -> Result<Self> {
        Self::start(host, boot, guest, folder, name, &["--workload", workload])
    }

    /// Starts a target that waits for a guest at `address`.
    pub(crate) fn awaiting(
        host: &Rc<dyn ProgramHost>,
        boot: &Boot,
        guest: &Guest,
        folder: &Path,
        name: &str,
        address: Ipv4Addr,
    ) -> Result<Self> {
        let at = format!("tcp:{address}:0");
        let insecure = (!address.is_loopback()).then_some("--insecure");
        let at: Vec<_> = std::iter::once(at.as_str()).chain(insecure).collect();
        Self::awaiting_at(host, boot, guest, folder, name, &at)
    }

    /// Starts a target that waits for a guest at `at`: a URI, and further arguments.
    pub(crate) fn awaiting_at(
        host: &Rc<dyn ProgramHost>,
        boot: &Boot,
        guest: &Guest,
        folder: &Path,
        name: &str,
        at: &[&str],
    ) -> Result<Self> {
        let silence = pace::peer_timeout();
        let more = [&["--peer-timeout", &silence, "--incoming"], at].concat();
        Self::start(host, boot, guest, folder, name, &more)
    }

    /// Restores the guest from `file`, a URI.
    pub(crate) fn restored(
        host: &Rc<dyn ProgramHost>,
        boot: &Boot,
        guest: &Guest,
        folder: &Path,
        name: &str,
        file: &str,
    ) -> Result<Self> {
        Self::start(host, boot, guest, folder, name, &["--incoming", file])
    }

    fn start(
        host: &Rc<dyn ProgramHost>,
        boot: &Boot,
        guest: &Guest,
        folder: &Path,
        name: &str,
        more: &[&str],
    ) -> Result<Self> {
        // Sockets must be on the machine where the process runs, because the shared folder supports
        // none.
        let api = PathBuf::from(format!("/tmp/lab-{}-{name}.sock", std::process::id()));
        let (console, errors) =
            (folder.join(format!("{name}.console")), folder.join(format!("{name}.errors")));
        let mut command = vec![boot.vmferry.to_string_lossy().into_owned()];
        let cpus = guest.cpus.to_string();
        let ring = if guest.dirty_ring { "4096" } else { "off" };
        let api_text = api.to_string_lossy().into_owned();
        let common =
            ["run", "--die-with-parent", "--memory", guest.memory, "--cpus", &cpus, "--dirty-ring", ring];
        command.extend(
            common
                .iter()
                .chain(&["--serial", "stdio", "--api", &api_text])
                .chain(more)
                .map(ToString::to_string),
        );
        command.extend(guest.devices.iter().cloned());
        if !guest.devices.iter().any(|word| word == "--on-reset") {
            // A guest that resets without a request has failed, and the failure must be visible.
            command.extend(["--on-reset", "exit"].map(str::to_owned));
        }
        println!("{name}: {}", command.join(" "));
        let request = Request::Start { command, output: console.clone(), errors: errors.clone() };
        let Answer::Started { id } = host.execute(request)? else { bail!("{name} did not start") };
        let vm = Self {
            host: Rc::clone(host),
            vmferry: boot.vmferry.clone(),
            id: Some(id),
            api,
            console,
            errors,
            read: Cell::new(0),
        };
        let limit = Limit::new(PROMPT);
        while vm.command(&["status"]).is_err() {
            if let Some(status) = vm.ended()? {
                bail!("{name} ended with status {status}: {}", vm.said());
            }
            ensure!(!limit.is_over(), "{name} does not answer within {}: {}", limit.words(), vm.said());
            std::thread::sleep(TICK);
        }
        Ok(vm)
    }

    /// Returns branch `number` of `parent`, which was started with control sockets in `folder`.
    pub(crate) fn branched(parent: &Self, folder: &Path, number: u32) -> Self {
        let file = |extension: &str| folder.join(format!("{number}.{extension}"));
        Self {
            host: Rc::clone(&parent.host),
            vmferry: parent.vmferry.clone(),
            id: None,
            api: file("sock"),
            console: file("serial"),
            errors: file("log"),
            read: Cell::new(0),
        }
    }

    /// Returns the number of the process at its host.
    fn started(&self) -> Result<u32> {
        self.id.context("the host did not start this process")
    }

    /// Returns the standard error of the process.
    pub(crate) fn said(&self) -> String {
        let request = Request::Read { path: self.errors.clone(), from: 0 };
        match self.host.execute(request) {
            Ok(Answer::Read(bytes)) => String::from_utf8_lossy(&bytes).trim().to_owned(),
            _ => String::new(),
        }
    }

    /// Returns the first arguments of a subcommand that uses the process's API socket.
    pub(crate) fn subcommand(&self, name: &str) -> Vec<String> {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        vec![text(&self.vmferry), name.to_owned(), "--api".to_owned(), text(&self.api)]
    }

    /// Runs a subcommand of vmferry with the process's API socket.
    pub(crate) fn run(&self, arguments: &[&str]) -> Result<ProgramOutput> {
        let (first, rest) = arguments.split_first().context("no subcommand")?;
        let mut command = self.subcommand(first);
        command.extend(rest.iter().map(ToString::to_string));
        match self.host.execute(Request::Run { command })? {
            Answer::Ran(ran) => Ok(ran),
            other => bail!("unexpected: {other:?}"),
        }
    }

    /// Runs a subcommand that must succeed, and returns its output.
    pub(crate) fn command(&self, arguments: &[&str]) -> Result<String> {
        let ran = self.run(arguments)?;
        ensure!(
            ran.status == 0,
            "`vmferry {}` failed ({}): {}",
            arguments.join(" "),
            ran.status,
            ran.errors.trim()
        );
        Ok(ran.output)
    }

    /// Returns the status document.
    pub(crate) fn status(&self) -> Result<Value> {
        serde_json::from_str(&self.command(&["status"])?).context("the status is not JSON")
    }

    /// Waits until `find` returns a value for the status document.
    pub(crate) fn until<T>(&self, what: &str, find: impl Fn(&Value) -> Result<Option<T>>) -> Result<T> {
        let limit = Limit::new(PROMPT);
        loop {
            if let Some(found) = find(&self.status()?)? {
                return Ok(found);
            }
            ensure!(!limit.is_over(), "{what} did not happen within {}: {}", limit.words(), self.said());
            std::thread::sleep(TICK);
        }
    }

    /// Returns the time for which each vCPU's thread has run and waited for a processor, as text.
    ///
    /// When a guest's kernel reports a stall, the text distinguishes a busy host from a vCPU that
    /// was not woken.
    pub(crate) fn vcpus(&self) -> Result<String> {
        let pid = self.status()?["vm"]["pid"].as_u64().context("the status has no process")?;
        let script =
            format!("for t in /proc/{pid}/task/*; do echo \"$(cat $t/comm):$(cat $t/schedstat)\"; done");
        let request = Request::Run { command: ["sh", "-c", &script].map(str::to_owned).to_vec() };
        let Answer::Ran(ran) = self.host.execute(request)? else { bail!("cannot read the threads") };
        let waits: Vec<_> = ran.output.lines().filter_map(waited).collect();
        ensure!(!waits.is_empty(), "process {pid} has no threads of vCPUs: {}{}", ran.output, ran.errors);
        Ok(waits.join(", "))
    }

    /// Returns the resident memory of the process in bytes, as the kernel counts it page by page.
    pub(crate) fn resident(&self) -> Result<u64> {
        let pid = self.status()?["vm"]["pid"].as_u64().context("the status has no process")?;
        let path = PathBuf::from(format!("/proc/{pid}/smaps_rollup"));
        let Answer::Read(bytes) = self.host.execute(Request::Read { path: path.clone(), from: 0 })? else {
            bail!("cannot read {}", path.display())
        };
        resident_in(&String::from_utf8_lossy(&bytes))
            .with_context(|| format!("{} has no Rss", path.display()))
    }

    /// Returns the address at which the process waits for a guest.
    pub(crate) fn uri(&self) -> Result<String> {
        self.until("listening", |status| Ok(status["vm"]["incoming"].as_str().map(str::to_owned)))
    }

    /// Returns the exit status of the process, if its host has started it and it has ended.
    pub(crate) fn ended(&self) -> Result<Option<i32>> {
        let Some(id) = self.id else { return Ok(None) };
        match self.host.execute(Request::Ended { id })? {
            Answer::Ended(status) => Ok(status),
            other => bail!("unexpected: {other:?}"),
        }
    }

    /// Waits until the process has ended, and returns its exit status.
    pub(crate) fn end(&self, within: Duration) -> Result<i32> {
        let limit = Limit::new(within);
        loop {
            if let Some(status) = self.ended()? {
                return Ok(status);
            }
            ensure!(!limit.is_over(), "its process did not end within {}", limit.words());
            std::thread::sleep(TICK);
        }
    }

    /// Kills the process.
    pub(crate) fn kill(&self) -> Result<()> {
        self.host.execute(Request::Kill { id: self.started()? })?;
        Ok(())
    }

    /// Types a line on the guest's console.
    pub(crate) fn enter(&self, line: &str) -> Result<()> {
        self.host.execute(Request::Type { id: self.started()?, text: format!("{line}\n") })?;
        Ok(())
    }

    /// Skips the output of the console so far.
    pub(crate) fn skip(&self) -> Result<()> {
        while !self.more()?.is_empty() {}
        Ok(())
    }

    /// Waits for a line for which `find` returns a value.
    pub(crate) fn wait<T>(
        &self,
        what: &str,
        within: Duration,
        find: impl Fn(&str) -> Option<T>,
    ) -> Result<T> {
        let limit = Limit::new(within);
        let mut rest = Vec::new();
        loop {
            rest.extend(self.more()?);
            while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = rest.drain(..=end).collect();
                let line = String::from_utf8_lossy(&line);
                if let Some(wrong) = line.find("LAB-WRONG") {
                    bail!("the guest reports: {}", line[wrong..].trim());
                }
                if let Some(found) = find(&line) {
                    // The rest of the output is left for the next wait.
                    self.read.set(self.read.get() - rest.len() as u64);
                    return Ok(found);
                }
            }
            if let Some(status) = self.ended()? {
                bail!("while waiting for {what}, its process ended with status {status}: {}", self.said());
            }
            ensure!(!limit.is_over(), "{what} did not happen within {}", limit.words());
            std::thread::sleep(TICK);
        }
    }

    /// Waits until the guest has booted and works.
    pub(crate) fn up(&self, within: Duration) -> Result<()> {
        self.wait("the guest's boot", within, |line| line.contains("LAB-GUEST-UP").then_some(()))
    }

    /// Returns the next report that the guest prints without a request.
    pub(crate) fn guest_report(&self) -> Result<GuestReport> {
        self.skip()?;
        self.wait("the guest's next report", ANSWER, GuestReport::in_line)
    }

    /// Makes the guest check everything, by a command to its shell on the console, and returns its
    /// report.
    pub(crate) fn verified(&self, how: &str) -> Result<Seen> {
        self.skip()?;
        let requested = Instant::now();
        self.enter(&format!("lab-guest {how}"))?;
        let guest_report = self.wait("the guest's report after all checks", ANSWER, |line| {
            GuestReport::in_line(line).filter(|guest_report| guest_report.whole)
        })?;
        Ok(Seen { guest_report, requested, read: Instant::now() })
    }

    /// Runs a command in the shell on the console, and waits for `answer` at the start of a line.
    pub(crate) fn shell(&self, line: &str, answer: &str) -> Result<()> {
        self.skip()?;
        self.enter(line)?;
        self.wait(&format!("the shell's answer to `{line}`"), ANSWER, |said| {
            said.trim_start().starts_with(answer).then_some(())
        })
    }

    fn more(&self) -> Result<Vec<u8>> {
        let request = Request::Read { path: self.console.clone(), from: self.read.get() };
        let Answer::Read(bytes) = self.host.execute(request)? else { bail!("cannot read the console") };
        self.read.set(self.read.get() + bytes.len() as u64);
        Ok(bytes)
    }
}

/// Returns the resident memory in bytes from the text of `smaps_rollup`
/// (Documentation/filesystems/proc.rst).
fn resident_in(rollup: &str) -> Option<u64> {
    let kib = rollup.lines().find_map(|line| line.strip_prefix("Rss:")?.trim().strip_suffix(" kB"))?;
    Some(kib.parse::<u64>().ok()? << 10)
}

/// Returns the times of a vCPU's thread as text, from a line `NAME:RAN WAITED SLICES` in
/// nanoseconds (Linux, Documentation/scheduler/sched-stats.rst). `None` for other threads.
fn waited(line: &str) -> Option<String> {
    let (name, times) = line.split_once(':').filter(|(name, _)| name.starts_with("vcpu"))?;
    let mut times =
        times.split_whitespace().map_while(|word| word.parse::<u64>().ok()).map(Duration::from_nanos);
    let (ran, waited) = (times.next()?, times.next()?);
    Some(format!(
        "{name} ran {:.1} s and waited {:.1} s for a processor",
        ran.as_secs_f64(),
        waited.as_secs_f64()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resident_memory_is_read_in_bytes() {
        let text = "55e0-7ffe ---p 00000000 00:00 0    [rollup]\nRss:      1234 kB\nPss:     1000 kB\n";
        assert_eq!(resident_in(text), Some(1234 << 10));
        assert_eq!(resident_in(""), None);
    }

    #[test]
    fn only_times_of_vcpu_threads_are_returned() {
        let text = waited("vcpu 1:2500000000 12300000000 77").unwrap();
        assert_eq!(text, "vcpu 1 ran 2.5 s and waited 12.3 s for a processor");
        assert_eq!(waited("net-0:1 2 3"), None);
        assert_eq!(waited("vcpu 1:"), None);
    }
}
