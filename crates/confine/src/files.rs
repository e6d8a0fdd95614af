//! Files, TCP ports and processes that this process can reach (Linux
//! `Documentation/userspace-api/landlock.rst`).
//!
//! The ruleset forbids everything that landlock can restrict on this kernel, except what the plan
//! names. An older kernel can restrict less, and the detail of the [`Measure`] says what is not
//! restricted.

use crate::report::Measure;
use landlock::{
    ABI, Access as _, AccessFs, AccessNet, AddRuleError, AddRulesError, BitFlags, CompatLevel, Compatible,
    LandlockStatus, NetPort, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr,
    RulesetError, RulesetStatus, Scope, make_bitflags,
};
use rustix::fs::FileType;
use std::path::{Path, PathBuf};

/// Newest landlock ABI whose rights [`Use`] covers. On a kernel with a newer ABI, the ruleset
/// forbids only what this ABI can forbid.
const KNOWN: ABI = ABI::V7;

/// Permitted use of a file, or of all files beneath a folder. Later variants permit more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Use {
    /// Reading the file, or listing the folder and reading the files in it.
    Read,
    /// Reading the file, and `ioctl` requests of a device.
    ReadDevice,
    /// Reading and writing the file, which is created if it does not exist.
    Output,
    /// Reading and writing the file.
    Write,
    /// Reading and writing the file, and `ioctl` requests of a device.
    Device,
    /// Creating sockets in the folder and removing them. Landlock has no right for the removal of
    /// sockets alone, so every file in the folder can be removed.
    Sockets,
    /// Creating, using and removing files and sockets in the folder.
    Folder,
}

/// File or folder that the process may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// Path of the file or folder.
    pub path: PathBuf,
    /// Permitted use.
    pub use_for: Use,
}

impl File {
    /// Creates the permission to use the file or folder `path` as `use_for` describes.
    pub fn new(path: impl Into<PathBuf>, use_for: Use) -> Self {
        Self { path: path.into(), use_for }
    }

    fn rights(&self, folder: bool) -> BitFlags<AccessFs> {
        let write = make_bitflags!(AccessFs::{ ReadFile | WriteFile | Truncate });
        let rights = match self.use_for {
            Use::Read => make_bitflags!(AccessFs::{ ReadFile | ReadDir }),
            Use::ReadDevice => make_bitflags!(AccessFs::{ ReadFile | IoctlDev }),
            Use::Output | Use::Write => write,
            Use::Device => write | AccessFs::IoctlDev,
            Use::Sockets => make_bitflags!(AccessFs::{ MakeSock | RemoveFile }),
            Use::Folder => write | make_bitflags!(AccessFs::{ ReadDir | MakeReg | MakeSock | RemoveFile }),
        };
        // landlock_add_rule(2) refuses a rule for a file that has a right of folders.
        if folder { rights } else { rights & AccessFs::from_file(KNOWN) }
    }
}

/// TCP ports at which the process may listen. Connections to other hosts are not restricted,
/// because the address of a peer is known only when a client sends `migrate`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ports {
    /// Only the given ports. Port 0 permits a port that the kernel chooses.
    Only(Vec<u16>),
    /// All ports, for a process that receives the address to listen at later.
    Any,
}

/// Confines the calling thread, and the threads that it starts later, to `files` and `ports`. After
/// that, they cannot send signals to other processes.
///
/// Files that do not exist are omitted, and they stay unreachable if they are created later. If the
/// host does not support landlock, nothing is restricted, and the measure gives the reason.
///
/// # Errors
/// Returns the reason if the host supports landlock and the kernel refuses a part of the ruleset.
pub(crate) fn confine(files: &[File], ports: &Ports) -> Result<Measure, String> {
    let refused = |error: RulesetError| format!("the kernel refuses the landlock ruleset: {error}");
    let mut ruleset = ruleset(ports).map_err(refused)?;
    for file in files {
        permit(&mut ruleset, file).map_err(|error| {
            format!("the kernel refuses the landlock rule for {}: {error}", file.path.display())
        })?;
    }
    let status = ruleset.restrict_self().map_err(refused)?;
    Ok(match (status.ruleset, status.landlock) {
        (RulesetStatus::NotEnforced, why) => Measure::missing(without(why)),
        (_, LandlockStatus::Available { effective_abi, .. }) => {
            Measure::in_force(describe(effective_abi, ports))
        }
        (_, why) => Measure::missing(without(why)),
    })
}

/// Creates a ruleset that permits `ports` and no file.
fn ruleset(ports: &Ports) -> Result<RulesetCreated, RulesetError> {
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(KNOWN))?
        .scope(make_bitflags!(Scope::{ AbstractUnixSocket | Signal }))?;
    if matches!(ports, Ports::Only(_)) {
        ruleset = ruleset.handle_access(AccessNet::BindTcp)?;
    }
    let mut created = ruleset.create()?;
    if let Ports::Only(ports) = ports {
        for port in ports {
            created = created.add_rule(NetPort::new(*port, AccessNet::BindTcp))?;
        }
    }
    Ok(created)
}

/// Adds the rule for `file` to `ruleset`. Does nothing if the file does not exist.
fn permit(ruleset: &mut RulesetCreated, file: &File) -> Result<(), RulesetError> {
    let Ok(opened) = PathFd::new(&file.path) else { return Ok(()) };
    let folder = rustix::fs::fstat(&opened).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode).is_dir());
    let rights = file.rights(folder);
    // A file that takes the place of a folder for sockets has no rights. landlock refuses a rule
    // without rights.
    if rights.is_empty() {
        return Ok(());
    }
    match ruleset.add_rule(PathBeneath::new(opened, rights)) {
        Err(error) if !needs_no_rule(&error) => Err(error),
        _ => Ok(()),
    }
}

/// Returns true if `error` means that the file is on a file system without a mount point, such as a
/// pipe or a memfd that a path in `/dev/fd` names. landlock refuses rules for such files (EBADFD),
/// and permits all access to them (Linux `security/landlock/fs.c`, `is_nouser_or_private`).
fn needs_no_rule(error: &RulesetError) -> bool {
    match error {
        RulesetError::AddRules(AddRulesError::Fs(AddRuleError::AddRuleCall { source, .. })) => {
            source.raw_os_error() == Some(libc::EBADFD)
        }
        _ => false,
    }
}

fn without(status: LandlockStatus) -> String {
    match status {
        LandlockStatus::NotEnabled => {
            "landlock is not enabled: boot with lsm=landlock,... (or CONFIG_LSM)".to_owned()
        }
        LandlockStatus::NotImplemented => {
            "the kernel has no landlock: Linux 5.13 with CONFIG_SECURITY_LANDLOCK".to_owned()
        }
        LandlockStatus::Available { .. } => "this landlock can restrict none of these rights".to_owned(),
    }
}

/// Returns a description of what landlock forbids with the version `abi`.
fn describe(abi: ABI, ports: &Ports) -> String {
    let mut text = format!("ABI {}: files", abi as i32);
    let later = [
        (ABI::V3, "truncation", ""),
        (ABI::V4, "listening at TCP ports", "Linux 6.7"),
        (ABI::V5, "devices' requests", "Linux 6.10"),
        (ABI::V6, "signals to other processes", "Linux 6.12"),
    ];
    for (since, what, linux) in later {
        let known = abi >= since;
        if since == ABI::V4 && *ports == Ports::Any {
            text += "; any TCP port, because the address to listen at is given later";
        } else if known {
            text = format!("{text}, {what}");
        } else if !linux.is_empty() {
            text = format!("{text}; not {what} (needs {linux})");
        }
    }
    text
}

/// Returns the restrictions that landlock offers on this host. They are tried on a thread that ends
/// afterwards.
pub(crate) fn probe() -> Measure {
    let probe = || {
        let confined = confine(&[File::new(Path::new("/"), Use::Read)], &Ports::Only(Vec::new()));
        confined.unwrap_or_else(Measure::missing)
    };
    std::thread::spawn(probe).join().unwrap_or_else(|_| Measure::missing("the trial failed".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use vmferry_testkit::{Need, skip};

    #[test]
    fn file_without_a_mount_point_does_not_prevent_the_confinement() {
        let offered = probe();
        if !offered.in_force {
            return skip(Need::Kernel, offered.detail);
        }
        let key = rustix::fs::memfd_create("key", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let path = format!("/proc/self/fd/{}", key.as_raw_fd());
        // The rules apply to this thread only.
        let confined = std::thread::spawn(move || {
            let measure = confine(&[File::new(&path, Use::Read)], &Ports::Only(vec![])).unwrap();
            (measure, std::fs::File::open(&path).is_ok(), std::fs::File::open("/etc/passwd").is_ok())
        });
        let (measure, key_opens, other_opens) = confined.join().unwrap();
        assert!(measure.in_force && key_opens && !other_opens, "{measure:?} {key_opens} {other_opens}");
    }

    #[test]
    fn folder_for_sockets_that_is_a_file_has_no_rights() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let sockets = File::new(file.path(), Use::Sockets);
        let confined = std::thread::spawn(move || confine(&[sockets], &Ports::Any));
        assert!(confined.join().unwrap().is_ok());
    }

    #[test]
    fn files_have_no_rights_that_only_folders_have() {
        for use_for in [Use::Read, Use::Output, Use::Write, Use::Device, Use::Sockets, Use::Folder] {
            let file = File::new("x", use_for);
            assert!(AccessFs::from_file(KNOWN).contains(file.rights(false)), "{use_for:?}");
            assert!(file.rights(true).contains(file.rights(false)));
            assert!(!file.rights(true).contains(AccessFs::Execute), "no use permits execution");
        }
    }

    #[test]
    fn description_names_what_an_older_kernel_does_not_forbid() {
        let text = describe(ABI::V1, &Ports::Only(vec![]));
        for part in ["ABI 1", "not listening at TCP ports (needs Linux 6.7)", "not signals"] {
            assert!(text.contains(part), "{text}");
        }
        let text = describe(ABI::V7, &Ports::Only(vec![]));
        assert!(!text.contains("not "), "{text}");
        assert!(describe(ABI::V7, &Ports::Any).contains("any TCP port"));
    }
}
