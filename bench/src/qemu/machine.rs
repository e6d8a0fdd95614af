//! One QEMU process.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::error::QemuError;
use super::qmp::Qmp;
use super::{QemuSpec, balloon};
use crate::child::Reaped;
use crate::cpu::CpuMeter;
use crate::density::Budget;
use crate::host::QEMU;
use crate::link::{End, Link};

/// Longest time until QEMU opens its control socket.
const START_LIMIT: Duration = Duration::from_secs(20);

/// Longest time until QEMU ends after the command `quit`. Then it is killed.
const QUIT_LIMIT: Duration = Duration::from_secs(5);

/// Running QEMU process, which is killed on drop.
#[derive(Debug)]
pub(crate) struct Machine {
    side: &'static str,
    stderr: PathBuf,
    qmp: Qmp,
    child: Reaped,
}

/// QEMU process whose control socket may not answer yet.
struct Process {
    child: Reaped,
    socket: PathBuf,
    stderr: PathBuf,
}

/// Settings that the two processes of a migration share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup<'a> {
    /// Folder for sockets and logs.
    pub(crate) folder: &'a Path,
    /// Image of the guest.
    pub(crate) kernel: &'a Path,
    /// Command line of the guest.
    pub(crate) cmdline: &'a str,
    /// Specification of the machine.
    pub(crate) spec: &'a QemuSpec,
    /// Link between whose ends the two processes run.
    pub(crate) link: &'a Link,
}

impl Machine {
    /// Starts QEMU and connects to its control socket. `side` names the process in messages and
    /// files. An `incoming` process waits for a migration instead of booting.
    pub(crate) fn start(side: &'static str, incoming: bool, setup: Setup<'_>) -> Result<Self, QemuError> {
        Self::start_within(side, incoming, setup, None)
    }

    /// Does the same as [`start`](Self::start), within `budget` if there is one.
    pub(crate) fn start_within(
        side: &'static str,
        incoming: bool,
        setup: Setup<'_>,
        budget: Option<&Budget>,
    ) -> Result<Self, QemuError> {
        let incoming = if incoming { vec!["defer".into()] } else { Vec::new() };
        let mut process = Self::spawn(side, &incoming, setup, budget)?;
        let qmp = Self::connect(side, &process.socket, &mut process.child, &process.stderr)?;
        Ok(Machine { side, stderr: process.stderr, qmp, child: process.child })
    }

    /// Starts the target of an upgrade, which waits at the sockets `channels`: the one for the
    /// migration, and the one for descriptors. Calls `hand_over` as soon as the target waits. Its
    /// control socket answers only after it has received the descriptors.
    pub(crate) fn succeed(
        setup: Setup<'_>,
        channels: [&Path; 2],
        hand_over: impl FnOnce() -> Result<(), QemuError>,
    ) -> Result<Self, QemuError> {
        let side = "destination";
        let [main, descriptors] = channels.map(|path| path.display().to_string());
        let address = json!({ "transport": "socket", "type": "unix", "path": descriptors });
        let incoming =
            [format!("unix:{main}"), json!({ "channel-type": "cpr", "addr": address }).to_string()];
        let mut process = Self::spawn(side, &incoming, setup, None)?;
        let deadline = Instant::now() + START_LIMIT;
        while !listens(channels[1])? {
            let ended =
                process.child.wait_for(Duration::from_millis(1)).map_err(QemuError::io("wait for it"))?;
            if ended.is_some() || Instant::now() > deadline {
                return Err(QemuError::Ended { side, detail: tail(&process.stderr) });
            }
        }
        hand_over()?;
        let qmp = Self::connect(side, &process.socket, &mut process.child, &process.stderr)?;
        Ok(Machine { side, stderr: process.stderr, qmp, child: process.child })
    }

    /// Starts QEMU, which waits for a migration on each channel of `incoming`, if there is any.
    fn spawn(
        side: &'static str,
        incoming: &[String],
        setup: Setup<'_>,
        budget: Option<&Budget>,
    ) -> Result<Process, QemuError> {
        let socket = setup.folder.join(format!("{side}.qmp"));
        let stderr = setup.folder.join(format!("{side}.stderr"));
        let log = File::create(&stderr).map_err(QemuError::io("create its log"))?;
        let mut command = Command::new(QEMU);
        command.args(arguments(side, !incoming.is_empty(), &socket, setup));
        for channel in incoming {
            command.args(["-incoming", channel]);
        }
        let end = if incoming.is_empty() { End::Source } else { End::Destination };
        setup.link.enter(end, &mut command).map_err(QemuError::io("enter its network namespace"))?;
        if let Some(budget) = budget {
            budget.enter(&mut command).map_err(QemuError::io("enter its memory cgroup"))?;
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = Reaped::spawn(&mut command).map_err(QemuError::io("start it"))?;
        if let Some(budget) = budget {
            budget.adopt(child.id()).map_err(QemuError::io("find it in its memory cgroup"))?;
        }
        Ok(Process { child, socket, stderr })
    }

    /// Connects to the control socket of a new process.
    fn connect(
        side: &'static str,
        socket: &Path,
        child: &mut Reaped,
        stderr: &Path,
    ) -> Result<Qmp, QemuError> {
        let deadline = Instant::now() + START_LIMIT;
        loop {
            if let Some(qmp) = Qmp::connect(side, socket)? {
                return Ok(qmp);
            }
            let ended = child.wait_for(Duration::from_millis(20)).map_err(QemuError::io("wait for it"))?;
            if ended.is_some() {
                return Err(QemuError::Ended { side, detail: tail(stderr) });
            }
            if Instant::now() > deadline {
                let detail = tail(stderr);
                return Err(QemuError::Timeout {
                    side,
                    what: "the control socket",
                    limit: START_LIMIT,
                    detail,
                });
            }
        }
    }

    /// Returns the name of the process in messages.
    pub(crate) fn side(&self) -> &'static str {
        self.side
    }

    /// Returns the process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the exit status of the process, or `None` while the process runs.
    pub(crate) fn ended(&mut self) -> Result<Option<ExitStatus>, QemuError> {
        self.child.wait_for(Duration::ZERO).map_err(QemuError::io("wait for it"))
    }

    /// Returns the path of the file that receives the guest's serial line of the machine `side`.
    pub(crate) fn serial_path(folder: &Path, side: &str) -> PathBuf {
        folder.join(format!("{side}.serial"))
    }

    /// Runs a QMP command.
    pub(crate) fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, QemuError> {
        self.qmp.execute(command, arguments)
    }

    /// Runs a QMP command and extracts one value from its answer.
    pub(crate) fn query<T>(
        &mut self,
        command: &str,
        wanted: &'static str,
        take: impl Fn(&Value) -> Option<T>,
    ) -> Result<T, QemuError> {
        let answer = self.execute(command, json!({}))?;
        take(&answer).ok_or_else(|| self.qmp.strange(command, &answer, wanted))
    }

    /// Returns the time of the first `event` among those that were read so far.
    pub(crate) fn when(&self, event: &str) -> Option<Instant> {
        self.qmp.when(event)
    }

    /// Fails if the process has ended.
    pub(crate) fn still_runs(&mut self) -> Result<(), QemuError> {
        match self.ended()? {
            None => Ok(()),
            Some(_) => Err(QemuError::Ended { side: self.side, detail: self.last_words() }),
        }
    }

    /// Returns the end of QEMU's standard error.
    pub(crate) fn last_words(&self) -> String {
        tail(&self.stderr)
    }

    /// Starts to measure the processor time of the process.
    pub(crate) fn cpu_meter(&self) -> Result<CpuMeter, QemuError> {
        // QEMU names its vCPU threads "CPU 0/KVM" when asked to by `-name debug-threads=on`.
        CpuMeter::start(self.child.id(), |name| name.starts_with("CPU "))
            .map_err(QemuError::io("read its CPU time"))
    }

    /// Ends the process with the command `quit`, or kills it if it does not end in time.
    pub(crate) fn quit(mut self) {
        // The answer may be lost when the process ends. Dropping `self` kills the process in any
        // case.
        let _ = self.qmp.execute("quit", json!({}));
        let _ = self.child.wait_for(QUIT_LIMIT);
    }
}

/// Returns QEMU's command line: a PC with only a serial line, and anonymous memory with huge pages,
/// which is QEMU's default.
fn arguments(side: &str, incoming: bool, socket: &Path, setup: Setup<'_>) -> Vec<OsString> {
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
    if spec.upgrade {
        let memory = format!("memory-backend-memfd,id=pc.ram,size={}B,share=on", spec.memory);
        pair("-object", memory.into());
        pair("-machine", "pc,memory-backend=pc.ram,aux-ram-share=on".into());
    } else if incoming && (spec.prealloc || spec.small_pages) {
        // The source has this memory under the same name.
        let kind = if spec.small_pages { "memfd,share=on" } else { "ram" };
        let prealloc = if spec.prealloc { "on" } else { "off" };
        let memory = format!("memory-backend-{kind},id=pc.ram,size={}B,prealloc={prealloc}", spec.memory);
        pair("-object", memory.into());
        pair("-machine", "pc,memory-backend=pc.ram".into());
    } else if spec.balloon.is_none() {
        pair("-machine", "pc".into());
    }
    pair("-accel", accelerator.into());
    // Some hosts' KVM offers IA32_ARCH_CAPABILITIES and then refuses to set it, which makes QEMU
    // abort. The guest does not use it.
    pair("-cpu", "host,-arch-capabilities".into());
    pair("-smp", spec.vcpus.to_string().into());
    pair("-m", format!("{}B", spec.memory).into());
    pair("-kernel", setup.kernel.into());
    pair("-append", setup.cmdline.into());
    if let Some(initrd) = spec.initrd.as_ref().filter(|_| !incoming) {
        pair("-initrd", initrd.into());
    }
    pair("-chardev", file_option("file,id=serial,path=", &Machine::serial_path(setup.folder, side), ""));
    pair("-serial", "chardev:serial".into());
    pair("-qmp", file_option("unix:", socket, ",server=on,wait=off"));
    arguments.extend(spec.balloon.iter().flat_map(balloon::arguments).map(OsString::from));
    arguments
}

/// Returns the end of a log in one line.
fn tail(path: &Path) -> String {
    let text = fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().rev().take(3).collect();
    if lines.is_empty() {
        return "no output".into();
    }
    format!("last output: {}", lines.into_iter().rev().collect::<Vec<_>>().join(" / "))
}

/// Returns whether a socket of this network namespace listens at `path`. Its file exists before it
/// listens, and the connection of a test would be the only one that QEMU accepts.
///
/// Source: `proc_pid_net(5)`, `/proc/pid/net/unix`; the flag is `__SO_ACCEPTCON`.
fn listens(path: &Path) -> Result<bool, QemuError> {
    const LISTENS: &str = "00010000";
    let sockets = fs::read("/proc/self/net/unix").map_err(QemuError::io("list the sockets of this host"))?;
    let path = path.display().to_string();
    Ok(String::from_utf8_lossy(&sockets).lines().any(|line| {
        // The columns are number, references, protocol, flags, type, state, inode and path.
        let mut columns = line.split_ascii_whitespace();
        columns.nth(3) == Some(LISTENS) && columns.nth(3) == Some(&path)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bound_socket_does_not_listen_yet() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap();
        assert!(!listens(&path).unwrap());
        socket.bind(&socket2::SockAddr::unix(&path).unwrap()).unwrap();
        assert!(path.exists() && !listens(&path).unwrap());
        socket.listen(1).unwrap();
        assert!(listens(&path).unwrap());
    }

    #[test]
    fn command_line_follows_the_spec() {
        let spec = QemuSpec { memory: 1 << 30, vcpus: 2, dirty_ring: Some(4096), ..QemuSpec::default() };
        let setup = Setup {
            folder: Path::new("/t"),
            kernel: Path::new("/t/guest"),
            cmdline: "a=b c",
            spec: &spec,
            link: &Link::Loopback,
        };
        let arguments = arguments("source", false, Path::new("/t/source.qmp"), setup);
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
    fn only_the_target_allocates_its_memory_at_its_start() {
        let spec = QemuSpec { memory: 1 << 30, prealloc: true, ..QemuSpec::default() };
        let (folder, kernel) = (Path::new("/t"), Path::new("/t/guest"));
        let setup = Setup { folder, kernel, cmdline: "", spec: &spec, link: &Link::Loopback };
        let text = |incoming| {
            let arguments = arguments("side", incoming, Path::new("/t/side.qmp"), setup);
            arguments.join(" ".as_ref()).into_string().unwrap()
        };
        assert!(text(false).contains("-machine pc ") && !text(false).contains("prealloc"));
        let backend = "-object memory-backend-ram,id=pc.ram,size=1073741824B,prealloc=on ";
        assert!(text(true).contains(backend) && text(true).contains("-machine pc,memory-backend=pc.ram "));
        let spec = QemuSpec { memory: 1 << 30, small_pages: true, ..QemuSpec::default() };
        let setup = Setup { spec: &spec, ..setup };
        let arguments = arguments("side", true, Path::new("/t/side.qmp"), setup);
        let text = arguments.join(" ".as_ref()).into_string().unwrap();
        let backend = "-object memory-backend-memfd,share=on,id=pc.ram,size=1073741824B,prealloc=off ";
        assert!(text.contains(backend), "{text}");
    }

    #[test]
    fn tail_returns_the_last_three_lines_of_a_log() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        assert_eq!(tail(&log), "no output");
        fs::write(&log, b"one\ntwo\nthree\nfo\xffur\n").unwrap();
        assert_eq!(tail(&log), "last output: two / three / fo\u{fffd}ur");
    }
}
