//! Host side of the lab: finds the parts, builds the programs, boots the machines, waits, and
//! writes the summary.

mod build;
mod cpio;
mod direct;
mod emulated;
pub(crate) mod exits;
pub(crate) mod fetch;
mod initramfs;
pub(crate) mod machine;
mod modules;
pub(crate) mod parts;
mod run;
mod vmlinux;

use crate::LabArgs;
use anyhow::{Context, Result, bail};
use build::Programs;
use machine::{Machine, Setup};
use parts::{Kernel, Parts};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};
use vmferry_lab::plan::Poisoning;
use vmferry_lab::scenarios;

/// File in the shared folder with the content of the slow disk.
const SLOW_DISK: &str = "slow.img";

/// Parts of the lab, none of which is missing.
struct Whole {
    qemu: PathBuf,
    busybox: PathBuf,
    fsck: PathBuf,
    outer: Rc<Kernel>,
    guest: Rc<Kernel>,
    poisoning: Result<Rc<Kernel>, String>,
}

impl Whole {
    fn find() -> Result<Self> {
        let parts = Parts::find();
        let missing = parts.missing();
        let poisoning = parts.poisoning.unwrap_or_else(|| Err("the kernels were not searched".into()));
        match (parts.qemu, parts.busybox, parts.fsck, parts.outer, parts.guest) {
            (Some(qemu), Some(busybox), Some(fsck), Some(outer), Some(guest)) if missing.is_empty() => {
                Ok(Self { qemu, busybox, fsck, outer, guest, poisoning })
            }
            _ => bail!("the lab cannot run, because this is missing:\n  {}", missing.join("\n  ")),
        }
    }
}

/// Prints which parts were found and which are missing.
pub(crate) fn check() -> Result<bool> {
    let parts = Parts::find();
    let version = |kernel: &Option<Rc<Kernel>>| kernel.as_ref().map(|kernel| kernel.image.clone());
    for (what, path) in [
        ("QEMU", parts.qemu.clone()),
        ("busybox", parts.busybox.clone()),
        ("e2fsck", parts.fsck.clone()),
        ("outer kernel", version(&parts.outer)),
        ("guests' kernel", version(&parts.guest)),
    ] {
        if let Some(path) = path {
            println!("there    {what:15} {}", path.display());
        }
    }
    match &parts.poisoning {
        Some(Ok(kernel)) => println!("there    {:15} {}", "page poisoning", kernel.image.display()),
        Some(Err(why)) => println!("optional {:15} {why}", "page poisoning"),
        None => {}
    }
    let missing = parts.missing();
    missing.iter().for_each(|line| println!("missing  {line}"));
    Ok(missing.is_empty())
}

/// Prints the scenarios.
pub(crate) fn list() -> Result<bool> {
    for scenario in scenarios::all() {
        println!("{:24} {}{}", scenario.name, if scenario.quick { "(quick) " } else { "" }, scenario.about);
    }
    Ok(true)
}

/// Runs the lab.
pub(crate) fn lab(args: &LabArgs) -> Result<bool> {
    run::run(args, &Whole::find()?)
}

/// Runs a shell or a script in the outer machine.
pub(crate) fn shell(script: Option<&Path>) -> Result<bool> {
    /// Longest time of a session, so that a script that hangs ends too.
    const LONGEST: Duration = Duration::from_secs(4 * 3600);
    let whole = Whole::find()?;
    let share = parts::folder().join("shell");
    std::fs::create_dir_all(share.join("in"))?;
    fill(&share, &whole, &Programs::build()?)?;
    let initrd = parts::folder().join("shell-initrd");
    write(&initrd, &initramfs::outer(&whole.outer, &whole.busybox)?)?;
    let mode = match script {
        Some(script) => {
            std::fs::copy(script, share.join("script"))
                .with_context(|| format!("cannot copy {}", script.display()))?;
            "script"
        }
        None => "shell",
    };
    let mut machine = Machine::start(&Setup {
        qemu: &whole.qemu,
        kernel: &whole.outer,
        initrd: &initrd,
        share: &share,
        memory_mib: 4096,
        cpus: 2,
        options: format!("quiet lab.mode={mode}"),
        serial: None,
        network: vec!["-nic".into(), "none".into()],
        slow: None,
    })?;
    machine.wait(Instant::now() + LONGEST)
}

/// Names of the kernel with page poisoning and of its initramfs in the folder of the guests' files.
const POISON_KERNEL: &str = "kernel-poison";
const POISON_INITRD: &str = "initrd-poison";

impl Whole {
    /// Returns the kernel with page poisoning, with its files in the folder `inside`.
    fn poisoning(&self, inside: &Path) -> Poisoning {
        match &self.poisoning {
            Ok(kernel) => Poisoning::Kernel {
                version: kernel.version.clone(),
                kernel: inside.join(POISON_KERNEL),
                initrd: inside.join(POISON_INITRD),
            },
            Err(why) => Poisoning::None { why: why.clone() },
        }
    }
}

/// Fills the shared folder with the files that the outer machine copies.
fn fill(share: &Path, whole: &Whole, programs: &Programs) -> Result<()> {
    let inside = share.join("in");
    for name in ["vmferry", "lab-agent"] {
        let from = programs.path(name);
        std::fs::copy(&from, inside.join(name)).with_context(|| format!("cannot copy {}", from.display()))?;
    }
    let initrd = initramfs::guest(&whole.guest, &whole.busybox, &programs.path("lab-guest"))?;
    write(&inside.join("initrd"), &initrd)?;
    let image = &whole.guest.image;
    std::fs::copy(image, inside.join("kernel"))
        .with_context(|| format!("cannot copy {}", image.display()))?;
    let elf = std::fs::read(image).map_err(Into::into).and_then(|image| vmlinux::of(&image));
    write(
        &inside.join("vmlinux"),
        &elf.with_context(|| format!("cannot take the ELF file out of {}", image.display()))?,
    )?;
    if let Ok(kernel) = &whole.poisoning {
        let initrd = initramfs::guest(kernel, &whole.busybox, &programs.path("lab-guest"))?;
        write(&inside.join(POISON_INITRD), &initrd)?;
        let image = &kernel.image;
        std::fs::copy(image, inside.join(POISON_KERNEL))
            .with_context(|| format!("cannot copy {}", image.display()))?;
    }
    let fsck = &whole.fsck;
    std::fs::copy(fsck, inside.join("e2fsck")).with_context(|| format!("cannot copy {}", fsck.display()))?;
    disk(&inside.join("disk.img"))?;
    disk(&share.join(SLOW_DISK))
}

/// Creates an empty file system for a guest's disk.
fn disk(path: &Path) -> Result<()> {
    const BYTES: u64 = 24 << 20;
    let mkfs = parts::tool(parts::MKFS).with_context(|| format!("{} is not installed", parts::MKFS))?;
    let file = std::fs::File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
    file.set_len(BYTES)?;
    let output = std::process::Command::new(&mkfs)
        .args(["-q", "-F", "-b", "4096"])
        .arg(path)
        .output()
        .with_context(|| format!("cannot run {}", mkfs.display()))?;
    if !output.status.success() {
        bail!("{} failed: {}", mkfs.display(), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    std::fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}
