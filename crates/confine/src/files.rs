//! Which files, ports and processes this process can reach (Linux `Documentation/userspace-api/landlock.rst`).
//!
//! Everything that landlock knows how to forbid is forbidden, but for what is named. Where the kernel's landlock is older, it forbids less;
//! what it does is said.

use crate::report::Measure;
use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, LandlockStatus, NetPort,
    PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
    make_bitflags,
};
use std::path::{Path, PathBuf};

/// The newest landlock of which every right was thought about here. A newer one that knows how to forbid more forbids no more than this.
const KNOWN: ABI = ABI::V7;

/// What may be done with a file, or with all beneath a folder: more, the further down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Use {
    /// Reading it, and listing folders.
    Read,
    /// Reading it, and a device's own requests.
    ReadDevice,
    /// Reading and writing it. It is made if it is not there.
    Output,
    /// Reading and writing it.
    Write,
    /// Reading, writing, and a device's own requests.
    Device,
    /// Making sockets in this folder, and removing them: landlock cannot keep that from other files in it.
    Sockets,
    /// Making and removing files and sockets in this folder, and using them.
    Folder,
}

/// A file that the process was told of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// Where.
    pub path: PathBuf,
    /// What for.
    pub use_for: Use,
}

impl File {
    /// `path`, for `use_for`.
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
        // A right that only folders have is an error for a file.
        if folder { rights } else { rights & AccessFs::from_file(KNOWN) }
    }
}

/// TCP ports at which the process may listen: connecting is free, for whoever says `migrate` names the peer then.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ports {
    /// These; 0 stands for one that the kernel chooses.
    Only(Vec<u16>),
    /// All: where to listen is said later.
    Any,
}

/// Confines the calling thread, and those that it starts from then on, to `files` and `ports`, and from signals to processes outside.
/// Files that are not there are left out: they stay unreachable if they appear later.
pub(crate) fn confine(files: &[File], ports: &Ports) -> Measure {
    match restrict(files, ports) {
        Ok(measure) => measure,
        Err(error) => Measure::missing(format!("the kernel refuses: {error}")),
    }
}

fn restrict(files: &[File], ports: &Ports) -> Result<Measure, RulesetError> {
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(KNOWN))?
        .scope(make_bitflags!(Scope::{ AbstractUnixSocket | Signal }))?;
    if matches!(ports, Ports::Only(_)) {
        ruleset = ruleset.handle_access(AccessNet::BindTcp)?;
    }
    let mut created = ruleset.create()?;
    for file in files {
        let Ok(parent) = PathFd::new(&file.path) else { continue };
        created = created.add_rule(PathBeneath::new(parent, file.rights(file.path.is_dir())))?;
    }
    if let Ports::Only(ports) = ports {
        for port in ports {
            created = created.add_rule(NetPort::new(*port, AccessNet::BindTcp))?;
        }
    }
    let status = created.restrict_self()?;
    Ok(match (status.ruleset, status.landlock) {
        (RulesetStatus::NotEnforced, why) => Measure::missing(without(why)),
        (_, LandlockStatus::Available { effective_abi, .. }) => {
            Measure::there(describe(effective_abi, ports))
        }
        (_, why) => Measure::missing(without(why)),
    })
}

fn without(status: LandlockStatus) -> String {
    match status {
        LandlockStatus::NotEnabled => {
            "landlock is not enabled: boot with lsm=landlock,... (or CONFIG_LSM)".to_owned()
        }
        LandlockStatus::NotImplemented => {
            "the kernel has no landlock: Linux 5.13 with CONFIG_SECURITY_LANDLOCK".to_owned()
        }
        LandlockStatus::Available { .. } => "landlock does not know what is to be forbidden".to_owned(),
    }
}

/// What landlock of this age forbids.
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
            text += "; any TCP port, for where to listen is said later";
        } else if known {
            text = format!("{text}, {what}");
        } else if !linux.is_empty() {
            text = format!("{text}; not {what} (needs {linux})");
        }
    }
    text
}

/// What the host's landlock can do, found out on a thread of its own that ends confined.
pub(crate) fn probe() -> Measure {
    let probe = || confine(&[File::new(Path::new("/"), Use::Read)], &Ports::Only(Vec::new()));
    std::thread::spawn(probe).join().unwrap_or_else(|_| Measure::missing("it could not be tried".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_have_no_rights_that_only_folders_have() {
        for use_for in [Use::Read, Use::Output, Use::Write, Use::Device, Use::Sockets, Use::Folder] {
            let file = File::new("x", use_for);
            assert!(AccessFs::from_file(KNOWN).contains(file.rights(false)), "{use_for:?}");
            assert!(file.rights(true).contains(file.rights(false)));
            assert!(!file.rights(true).contains(AccessFs::Execute), "nothing is ever executed");
        }
    }

    #[test]
    fn what_an_older_kernel_does_not_forbid_is_said() {
        let text = describe(ABI::V1, &Ports::Only(vec![]));
        for part in ["ABI 1", "not listening at TCP ports (needs Linux 6.7)", "not signals"] {
            assert!(text.contains(part), "{text}");
        }
        let text = describe(ABI::V7, &Ports::Only(vec![]));
        assert!(!text.contains("not "), "{text}");
        assert!(describe(ABI::V7, &Ports::Any).contains("any TCP port"));
    }
}
