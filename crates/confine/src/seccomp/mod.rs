//! Which system calls a thread can make (Linux `Documentation/userspace-api/seccomp_filter.rst`).
//!
//! Filters stack: a call is made only if every filter of the thread allows it, and a thread inherits those of the thread that starts it.
//!
//! | filter | whose | what it does not allow |
//! |---|---|---|
//! | refusals | the process's | fails: what libraries try and do without (`clone3`, executable memory) |
//! | base | the process's | fails, and is told of or ends the process: what no thread needs, not even to set up |
//! | unread | a thread's, by its role | fails: opening files, which a panic's backtrace tries |
//! | role | a thread's, by its role | fails, and is told of or ends the process: what its role does not need |
//!
//! The first two are in force from the start of `run`; the others from the start of each thread, and for the first thread when it has
//! set up what needs more ([`settle`](crate::Confinement::settle)). Threads that are started while a guest runs (a migration's) get theirs
//! alike, on top of the owner's, which allows whatever a thread that it starts may.

mod names;
mod policy;
mod request;
mod roles;
pub(crate) mod violation;

use crate::Mode;
use policy::Policy;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};
use std::collections::BTreeMap;
use vmferry_thread::Role;

/// Filters, ready to be installed.
#[derive(Debug)]
pub(crate) struct Programs {
    process: Vec<BpfProgram>,
    roles: BTreeMap<Role, Vec<BpfProgram>>,
}

impl Programs {
    /// Makes them.
    ///
    /// # Errors
    /// If a list cannot be made a filter: a bug.
    pub(crate) fn compile(mode: Mode) -> Result<Self, String> {
        let process = vec![
            compile(roles::refusals(mode), SeccompAction::Allow, SeccompAction::Errno(ENOSYS))?,
            compile(roles::base(), forbidden(mode), SeccompAction::Allow)?,
        ];
        let role = |role: Role| {
            let mut programs = Vec::new();
            // First: the last one may forbid to install more.
            if let Some(unread) = roles::unread(role) {
                programs.push(compile(unread, SeccompAction::Allow, refused(mode))?);
            }
            programs.push(compile(roles::role(role), forbidden(mode), SeccompAction::Allow)?);
            Ok((role, programs))
        };
        Ok(Self { process, roles: Role::ALL.into_iter().map(role).collect::<Result<_, String>>()? })
    }

    /// Confines all of the process's threads by what holds for the process.
    ///
    /// # Errors
    /// Why that is not possible here.
    pub(crate) fn confine_process(&self) -> Result<(), String> {
        self.process.iter().try_for_each(|program| {
            seccompiler::apply_filter_all_threads(program).map_err(|error| error.to_string())
        })
    }

    /// Confines the calling thread by its role.
    ///
    /// # Errors
    /// If the kernel has no memory for the filter.
    pub(crate) fn confine_thread(&self, role: Role) -> Result<(), String> {
        // Every role is there: `compile` has seen to it.
        self.roles
            .get(&role)
            .into_iter()
            .flatten()
            .try_for_each(|program| seccompiler::apply_filter(program).map_err(|error| error.to_string()))
    }
}

/// glibc starts threads by `clone` where `clone3`, whose flags no filter can see, is not implemented.
const ENOSYS: u32 = libc::ENOSYS.unsigned_abs();

/// What becomes of a call that is not on a list: see [`violation`] for why it is not killed outright.
fn forbidden(mode: Mode) -> SeccompAction {
    if mode == Mode::Log { SeccompAction::Log } else { SeccompAction::Trap }
}

fn refused(mode: Mode) -> SeccompAction {
    if mode == Mode::Log { SeccompAction::Log } else { SeccompAction::Errno(libc::EACCES.unsigned_abs()) }
}

fn compile(policy: Policy, otherwise: SeccompAction, listed: SeccompAction) -> Result<BpfProgram, String> {
    let rules = policy.rules().map_err(|error| error.to_string())?;
    let filter = SeccompFilter::new(rules, otherwise, listed, TargetArch::x86_64);
    filter.and_then(BpfProgram::try_from).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// What the kernel takes: `BPF_MAXINSNS`.
    const MOST: usize = 4096;

    #[test]
    fn every_role_has_a_filter_that_the_kernel_takes() {
        for mode in [Mode::On, Mode::Log] {
            let programs = Programs::compile(mode).unwrap();
            assert_eq!(programs.roles.len(), Role::ALL.len());
            for (role, programs) in &programs.roles {
                for program in programs {
                    assert!((3..MOST).contains(&program.len()), "{role}: {}", program.len());
                }
            }
        }
    }

    #[test]
    fn whoever_starts_threads_may_do_what_they_do() {
        for (parent, children) in roles::STARTS {
            for child in *children {
                let missing = roles::role(*child).beyond(&roles::role(*parent));
                assert_eq!(missing, Vec::<String>::new(), "{parent} starts {child}, which needs more");
            }
        }
        for role in Role::ALL {
            assert_eq!(roles::role(role).beyond(&roles::base()), Vec::<String>::new(), "{role}");
        }
    }

    /// The rows of the table in the guide for embedders: a role, and the calls that the row names.
    fn table_for_embedders() -> Vec<(&'static str, BTreeSet<&'static str>)> {
        let guide = include_str!("../../../../docs/embedding.md");
        let (_, table) = guide.split_once("<!-- system calls:").expect("the table's mark");
        let rows = table.lines().skip(3).take_while(|line| line.starts_with('|'));
        rows.map(|row| {
            let cells: Vec<_> = row.split('|').map(str::trim).collect();
            (cells[1], cells[2].split(' ').map(|name| name.trim_matches('`')).collect())
        })
        .collect()
    }

    #[test]
    fn guide_for_embedders_names_the_system_calls_of_each_engine_thread() {
        // Not of an embedder's threads: the command's filters and capabilities, and files that a thread reaches by name.
        let own: BTreeSet<_> = ["seccomp", "capget", "capset"].into();
        let rows = table_for_embedders();
        let each = &rows[0].1;
        let told: Vec<_> = rows[1..].iter().map(|(role, _)| *role).collect();
        assert_eq!(told, ["sender", "receiver", "control", "listener", "fault", "snapshot", "tracker"]);
        for (name, calls) in &rows[1..] {
            let role = Role::ALL.into_iter().find(|role| role.to_string() == *name).expect("a role");
            let needed: BTreeSet<_> = roles::called(role).names().difference(&own).copied().collect();
            let told: BTreeSet<_> = each.union(calls).copied().collect();
            assert_eq!(told, needed, "{name}");
        }
    }
}
