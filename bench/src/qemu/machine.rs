//! One QEMU process.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::error::QemuError;
use super::qmp::Qmp;
use super::{QemuSpec, balloon};
use crate::child::Reaped;
use crate::cpu::CpuMeter;
use crate::host::QEMU;
use crate::link::{End, Link};

/// How long QEMU may take to open its control socket.
const START_LIMIT: Duration = Duration::from_secs(20);

/// How long QEMU may take to end when told to; then it is killed.
const QUIT_LIMIT: Duration = Duration::from_secs(5);

/// A running QEMU under our control. It is killed when this value goes.
#[derive(Debug)]
pub(crate) struct Machine {
    side: &'static str,
    stderr: PathBuf,
    qmp: Qmp,
    child: Reaped,
}

/// What the two processes of a migration share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup<'a> {
    /// A folder for sockets and logs.
    pub(crate) folder: &'a Path,
    /// The guest's file.
    pub(crate) kernel: &'a Path,
    /// Its command line.
    pub(crate) cmdline: &'a str,
    /// The machine.
    pub(crate) spec: &'a QemuSpec,
    /// Between which ends the two run.
    pub(crate) link: &'a Link,
}

impl Machine {
    /// Starts QEMU and connects to it. `side` names it in messages and in its files; one that is
    /// `incoming` waits for a migration instead of booting.
    pub(crate) fn start(side: &'static str, incoming: bool, setup: Setup<'_>) -> Result<Self, QemuError> {
        let socket = setup.folder.join(format!("{side}.qmp"));
        let stderr = setup.folder.join(format!("{side}.stderr"));
        let log = File::create(&stderr).map_err(QemuError::io("create its log"))?;
        let mut command = Command::new(QEMU);
        command.args(arguments(side, &socket, setup));
        if incoming {
            command.args(["-incoming", "defer"]);
        }
        let end = if incoming { End::Destination } else { End::Source };
        setup.link.enter(end, &mut command).map_err(QemuError::io("enter its network namespace"))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let mut child = Reaped::spawn(&mut command).map_err(QemuError::io("start it"))?;

        let deadline = Instant::now() + START_LIMIT;
        let qmp = loop {
            if let Some(qmp) = Qmp::connect(side, &socket)? {
                break qmp;
            }
            let ended = child.wait_for(Duration::from_millis(20)).map_err(QemuError::io("wait for it"))?;
            if ended.is_some() {
                return Err(QemuError::Ended { side, detail: tail(&stderr) });
            }
            if Instant::now() > deadline {
                let detail = tail(&stderr);
                return Err(QemuError::Timeout {
                    side,
                    what: "the control socket",
                    limit: START_LIMIT,
                    detail,
                });
            }
        };
        Ok(Machine { side, stderr, qmp, child })
    }

    /// Where the guest's serial line of the machine `side` goes.
    pub(crate) fn serial_path(folder: &Path, side: &str) -> PathBuf {
        folder.join(format!("{side}.serial"))
    }

    /// Runs a QMP command.
    pub(crate) fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, QemuError> {
        self.qmp.execute(command, arguments)
    }

    /// Runs a QMP command and takes one thing out of its answer.
    pub(crate) fn ask<T>(
        &mut self,
        command: &str,
        wanted: &'static str,
        take: impl Fn(&Value) -> Option<T>,
    ) -> Result<T, QemuError> {
        let answer = self.execute(command, json!({}))?;
        take(&answer).ok_or_else(|| self.qmp.strange(command, &answer, wanted))
    }

    /// When QEMU said that `event` happened: the first time that it did, if it was among what was read so far.
    pub(crate) fn when(&self, event: &str) -> Option<Instant> {
        self.qmp.when(event)
    }

    /// Fails when the process has ended.
    pub(crate) fn still_runs(&mut self) -> Result<(), QemuError> {
        match self.child.wait_for(Duration::ZERO).map_err(QemuError::io("wait for it"))? {
            None => Ok(()),
            Some(_) => Err(QemuError::Ended { side: self.side, detail: self.last_words() }),
        }
    }

    /// The end of what QEMU wrote to its standard error.
    pub(crate) fn last_words(&self) -> String {
        tail(&self.stderr)
    }

    /// Starts to measure the process.
    pub(crate) fn cpu_meter(&self) -> Result<CpuMeter, QemuError> {
        // QEMU names its vCPU threads "CPU 0/KVM" when asked to by `-name debug-threads=on`.
        CpuMeter::start(self.child.id(), |name| name.starts_with("CPU "))
            .map_err(QemuError::io("read its CPU time"))
    }

    /// Ends the process: by word, or when that does not help by force.
    pub(crate) fn quit(mut self) {
        // The answer may be lost in the end of the process: dropping `self` makes sure of it either way.
        let _ = self.qmp.execute("quit", json!({}));
        let _ = self.child.wait_for(QUIT_LIMIT);
    }
}

/// QEMU's command line: a PC with nothing but the serial line, memory anonymous and with huge pages (QEMU's default).
fn arguments(side: &str, socket: &Path, setup: Setup<'_>) -> Vec<OsString> {
    let spec = setup.spec;
    let accelerator = match spec.dirty_ring {
        Some(entries) => format!("kvm,dirty-ring-size={entries}"),
        None => "kvm".into(),
    };
    let file_option = |before: &str, path: &Path, after: &str| {
        let mut option = OsString::from(before);
        option.push(path);
        option.push(after);
        option
    };
    let mut arguments: Vec<OsString> = ["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]
        .into_iter()
        .map(OsString::from)
        .collect();
    let mut pair = |name: &str, value: OsString| arguments.extend([name.into(), value]);
    pair("-name", format!("{side},debug-threads=on").into());
    if spec.balloon.is_none() {
        pair("-machine", "pc".into());
    }
    pair("-accel", accelerator.into());
    // Some hosts' KVM offers IA32_ARCH_CAPABILITIES and then refuses to set it, at which QEMU aborts. The guest does not
    // look at it.
    pair("-cpu", "host,-arch-capabilities".into());
    pair("-smp", spec.vcpus.to_string().into());
    pair("-m", format!("{}B", spec.memory).into());
    pair("-kernel", setup.kernel.into());
    pair("-append", setup.cmdline.into());
    pair("-chardev", file_option("file,id=serial,path=", &Machine::serial_path(setup.folder, side), ""));
    pair("-serial", "chardev:serial".into());
    pair("-qmp", file_option("unix:", socket, ",server=on,wait=off"));
    arguments.extend(spec.balloon.iter().flat_map(balloon::arguments).map(OsString::from));
    arguments
}

/// The end of a log, in one line.
fn tail(path: &Path) -> String {
    let text = fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().rev().take(3).collect();
    if lines.is_empty() {
        return "it said nothing".into();
    }
    format!("it said: {}", lines.into_iter().rev().collect::<Vec<_>>().join(" / "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_follows_the_spec() {
        let spec = QemuSpec { memory: 1 << 30, vcpus: 2, dirty_ring: Some(4096), ..QemuSpec::default() };
        let setup = Setup {
            folder: Path::new("/t"),
            kernel: Path::new("/t/guest"),
            cmdline: "a=b c",
            spec: &spec,
            link: &Link::Loopback,
        };
        let arguments = arguments("source", Path::new("/t/source.qmp"), setup);
        let text = arguments.join(" ".as_ref()).into_string().unwrap();
        for part in [
            "-accel kvm,dirty-ring-size=4096 ",
            "-smp 2 ",
            "-m 1073741824B ",
            "-append a=b c ",
            "path=/t/source.serial",
        ] {
            assert!(text.contains(part), "{part:?} is not in {text:?}");
        }
    }

    #[test]
    fn the_tail_of_a_log() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        assert_eq!(tail(&log), "it said nothing");
        fs::write(&log, b"one\ntwo\nthree\nfo\xffur\n").unwrap();
        assert_eq!(tail(&log), "it said: two / three / fo\u{fffd}ur");
    }
}
