//! The outer machine: a QEMU that emulates everything, AMD's virtualization included.

use super::parts::Kernel;
use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The hidden chore by which a QEMU ends with us, however we end.
pub(crate) const LEASH: &str = "leash";

/// Bytes a second that a slow disk takes.
const SLOW: u32 = 400_000;

/// The longest time limits that the kernel allows for its own watchdogs: a busy host may give the
/// machine a thirtieth of a processor, and then a soft lockup says nothing.
const PATIENCE: &str = "watchdog_thresh=60 rcupdate.rcu_cpu_stall_timeout=300";

/// How a machine is to be.
#[derive(Debug)]
pub(crate) struct Setup<'a> {
    pub(crate) qemu: &'a Path,
    pub(crate) kernel: &'a Kernel,
    /// Its initramfs, in a file.
    pub(crate) initrd: &'a Path,
    /// The folder that it shares with us.
    pub(crate) share: &'a Path,
    pub(crate) memory_mib: u32,
    pub(crate) cpus: u32,
    /// What its init is told: `lab.mode=..` and so on.
    pub(crate) options: String,
    /// Where its serial port goes; none: to this terminal.
    pub(crate) serial: Option<PathBuf>,
    /// Arguments for its network, if it has one.
    pub(crate) network: Vec<String>,
    /// What its disk is kept in, which the emulator makes slow.
    pub(crate) slow: Option<&'a Path>,
}

/// A running one. When this is dropped it ends.
#[derive(Debug)]
pub(crate) struct Machine {
    child: Child,
}

impl Machine {
    /// Switches one on.
    pub(crate) fn start(setup: &Setup<'_>) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args([LEASH, &std::process::id().to_string()]).arg(setup.qemu);
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        command.args(["-accel", "tcg,thread=multi", "-cpu", "max,+svm"]);
        command.args(["-smp", &setup.cpus.to_string(), "-m", &setup.memory_mib.to_string()]);
        command.arg("-kernel").arg(&setup.kernel.image).arg("-initrd").arg(setup.initrd);
        // Mitigations guard against neighbours that an emulated machine does not have, and cost it much.
        // The emulator's TSCs agree, though its processors do not claim so; any other clock costs an emulated device's access.
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

    /// How it ended, if it did.
    pub(crate) fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Waits until it is off; `false` if that does not happen in time.
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

/// `prefix` and a path, in which QEMU wants its commas doubled.
fn option(prefix: &str, path: &Path) -> OsString {
    let path = path.to_string_lossy().replace(',', ",,");
    OsString::from(format!("{prefix}{path}"))
}

/// Becomes `command`, which then ends together with `parent`, even if that is killed.
///
/// The kernel keeps this promise for a process across `exec`; only the process itself can ask for it.
pub(crate) fn leash(parent: u32, command: &[OsString]) -> Result<bool> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    // It may have ended before that call.
    let now = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    if now.and_then(|pid| u32::try_from(pid).ok()) != Some(parent) {
        bail!("the process that started this one is gone");
    }
    let [program, arguments @ ..] = command else { bail!("nothing to start") };
    Err(Command::new(program).args(arguments).exec())
        .with_context(|| format!("cannot start {}", program.display()))
}
