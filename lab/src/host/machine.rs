//! The outer machine: a QEMU process that emulates a whole machine, including AMD's virtualization.

use super::parts::Kernel;
use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Hidden command of this program that ties the life of a QEMU process to this process.
pub(crate) const LEASH: &str = "leash";

/// Write speed of the slow disk in bytes per second.
const SLOW: u32 = 400_000;

/// Longest time limits that the kernel allows for its own watchdogs. A busy host may give the
/// machine a thirtieth of a processor, and then a soft lockup is no sign of an error.
const PATIENCE: &str = "watchdog_thresh=60 rcupdate.rcu_cpu_stall_timeout=300";

/// Settings of a machine.
#[derive(Debug)]
pub(crate) struct Setup<'a> {
    pub(crate) qemu: &'a Path,
    pub(crate) kernel: &'a Kernel,
    /// File with the initramfs.
    pub(crate) initrd: &'a Path,
    /// Folder that the machine shares with the host.
    pub(crate) share: &'a Path,
    pub(crate) memory_mib: u32,
    pub(crate) cpus: u32,
    /// Options for the machine's init: `lab.mode=..` and others.
    pub(crate) options: String,
    /// File for the output of the serial port. `None` means this terminal.
    pub(crate) serial: Option<PathBuf>,
    /// Arguments for the network.
    pub(crate) network: Vec<String>,
    /// File with the content of a disk that the emulator makes slow.
    pub(crate) slow: Option<&'a Path>,
}

/// Running machine. It ends on drop.
#[derive(Debug)]
pub(crate) struct Machine {
    child: Child,
}

impl Machine {
    /// Starts a machine.
    pub(crate) fn start(setup: &Setup<'_>) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args([LEASH, &std::process::id().to_string()]).arg(setup.qemu);
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        command.args(["-accel", "tcg,thread=multi", "-cpu", "max,+svm"]);
        command.args(["-smp", &setup.cpus.to_string(), "-m", &setup.memory_mib.to_string()]);
        command.arg("-kernel").arg(&setup.kernel.image).arg("-initrd").arg(setup.initrd);
        // Mitigations guard against other users of a machine, which an emulated machine does not
        // have, and they are expensive there. The emulator's TSCs agree, although its processors do
        // not announce that. Any other clock costs an access to an emulated device.
        let line = format!(
            "console=ttyS0 oops=panic panic=-1 mitigations=off tsc=reliable {PATIENCE} {}",
            setup.options
        );
        command.args(["-append", &line]);
        command.arg("-fsdev").arg(option("local,id=lab,security_model=none,path=", setup.share));
        command.args(["-device", "virtio-9p-pci,fsdev=lab,mount_tag=lab"]);
        match &setup.serial {
            Some(path) => command.arg("-serial").arg(option("file:", path)).stdin(Stdio::null()),
            None => command.args(["-chardev", "stdio,id=terminal,signal=off", "-serial", "chardev:terminal"]),
        };
        command.args(&setup.network);
        if let Some(path) = setup.slow {
            let limit = format!("if=none,id=slow,format=raw,throttling.bps-write={SLOW},file=");
            command.arg("-drive").arg(option(&limit, path)).args(["-device", "virtio-blk-pci,drive=slow"]);
        }
        let child = command.spawn().context("cannot start QEMU")?;
        Ok(Self { child })
    }

    /// Returns the exit status of QEMU, if it has ended.
    pub(crate) fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Waits until the machine is off. Returns `false` if that does not happen before the deadline.
    pub(crate) fn wait(&mut self, deadline: Instant) -> Result<bool> {
        while Instant::now() < deadline {
            if self.ended()?.is_some() {
                return Ok(true);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(false)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns `prefix` and a path with doubled commas, as QEMU requires.
fn option(prefix: &str, path: &Path) -> OsString {
    let path = path.to_string_lossy().replace(',', ",,");
    OsString::from(format!("{prefix}{path}"))
}

/// Replaces this process by `command`, which then ends together with `parent`, even if `parent` is
/// killed.
///
/// The kernel keeps the parent death signal of a process across `exec`. Only the process itself can
/// set it.
pub(crate) fn leash(parent: u32, command: &[OsString]) -> Result<bool> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    // The parent may have ended before that call.
    let now = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    if now.and_then(|pid| u32::try_from(pid).ok()) != Some(parent) {
        bail!("the process that started this one has ended");
    }
    let [program, arguments @ ..] = command else { bail!("no command to start") };
    Err(Command::new(program).args(arguments).exec())
        .with_context(|| format!("cannot start {}", program.display()))
}
