//! System calls that a thread can make (Linux `Documentation/userspace-api/seccomp_filter.rst`).
//!
//! Filters add up: the kernel makes a call only if every filter of the thread allows it. A thread
//! inherits the filters of the thread that starts it.
//!
//! | filter | installed on | refused calls | effect of a refused call |
//! |---|---|---|---|
//! | refusals | the process | calls that libraries try and can do without (`clone3`, executable memory) | fails |
//! | base | the process | calls that no thread needs, not even for the setup | fails and is reported, or ends the process |
//! | unread | a thread, by its role | opening files, which a panic's backtrace tries | fails |
//! | role | a thread, by its role | calls that the role does not need | fails and is reported, or ends the process |
//!
//! The process-wide filters are in force from the start of `run`. A new thread installs its own
//! filters at its start. The first thread installs its filters in
//! [`complete`](crate::Confinement::complete), after the setup, which needs more calls. Threads
//! that start while a guest runs, such as those of a migration, inherit the owner's filters and add
//! their own. Therefore the owner's filters must allow every call of the threads that the owner
//! starts.

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

/// Compiled filters.
#[derive(Debug)]
pub(crate) struct Programs {
    process: Vec<BpfProgram>,
    roles: BTreeMap<Role, Vec<BpfProgram>>,
}

impl Programs {
    /// Compiles all filters.
    ///
    /// # Errors
    /// Returns an error if a list cannot be compiled, which would be a bug in this crate.
    pub(crate) fn compile(mode: Mode) -> Result<Self, String> {
        let process = vec![
            compile(roles::refusals(mode), SeccompAction::Allow, SeccompAction::Errno(ENOSYS))?,
            compile(roles::base(), forbidden(mode), SeccompAction::Allow)?,
        ];
        let role = |role: Role| {
            let mut programs = Vec::new();
            // `unread` is installed first, because the role's filter may forbid the installation of
            // further filters.
            if let Some(unread) = roles::unread(role) {
                programs.push(compile(unread, SeccompAction::Allow, refused(mode))?);
            }
            programs.push(compile(roles::role(role), forbidden(mode), SeccompAction::Allow)?);
            Ok((role, programs))
        };
        Ok(Self { process, roles: Role::ALL.into_iter().map(role).collect::<Result<_, String>>()? })
    }

    /// Installs the process-wide filters on all threads of the process.
    ///
    /// # Errors
    /// Returns the reason if the kernel refuses a filter.
    pub(crate) fn confine_process(&self) -> Result<(), String> {
        self.process.iter().try_for_each(|program| {
            seccompiler::apply_filter_all_threads(program).map_err(|error| error.to_string())
        })
    }

    /// Installs the filters of `role` on the calling thread.
    ///
    /// # Errors
    /// Returns an error if the kernel refuses a filter, for example for lack of memory.
    pub(crate) fn confine_thread(&self, role: Role) -> Result<(), String> {
        // `compile` has made the filters of every role.
        self.roles
            .get(&role)
            .into_iter()
            .flatten()
            .try_for_each(|program| seccompiler::apply_filter(program).map_err(|error| error.to_string()))
    }
}

/// Error with which `clone3` fails, because its flags are in memory that a filter cannot read.
/// After this error, glibc starts threads with `clone`.
const ENOSYS: u32 = libc::ENOSYS.unsigned_abs();

/// Returns the action for a call that is not on a list. [`violation`] explains why such a call does
/// not kill the process directly.
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

    /// Most instructions of a filter that the kernel accepts: `BPF_MAXINSNS`.
    const MOST: usize = 4096;

    #[test]
    fn every_role_has_a_filter_that_the_kernel_accepts() {
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
    fn role_that_starts_threads_may_make_their_calls() {
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

    /// Returns the rows of the table in the guide for embedders: a role, and the calls that the row
    /// names.
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
        // An embedder's threads do not need the calls for the command's filters and capabilities,
        // or for files that a thread opens by name.
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
