//! State of each restriction, with the reason if it is not in force.

use serde::Serialize;

/// State of one restriction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Measure {
    /// True if the restriction is in force.
    pub in_force: bool,
    /// Extent of the restriction, or the reason why it is not in force.
    pub detail: String,
}

impl Measure {
    pub(crate) fn in_force(detail: impl Into<String>) -> Self {
        Self { in_force: true, detail: detail.into() }
    }

    pub(crate) fn missing(detail: impl Into<String>) -> Self {
        Self { in_force: false, detail: detail.into() }
    }
}

/// State of all restrictions, as the command `status` reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct InForce {
    /// Mode that the plan requested.
    pub mode: crate::Mode,
    /// Restriction of the system calls, by the role of the thread.
    pub seccomp: Measure,
    /// Restriction of files, TCP ports and signals.
    pub landlock: Measure,
    /// Restriction that executed programs gain no privileges.
    pub no_new_privs: Measure,
    /// Restriction of the capabilities that root has.
    pub capabilities: Measure,
    /// Separate root directory and user.
    pub jail: Measure,
}

impl InForce {
    /// Returns the state of a process that is not confined yet.
    pub(crate) fn nothing(mode: crate::Mode) -> Self {
        let why = match mode {
            crate::Mode::On | crate::Mode::Kill => "not done yet",
            crate::Mode::Log => "this mode only logs system calls",
            crate::Mode::Off => "not asked for",
        };
        let not = || Measure::missing(why);
        let jail = Measure::missing("not asked for");
        Self { mode, seccomp: not(), landlock: not(), no_new_privs: not(), capabilities: not(), jail }
    }

    /// Returns all restrictions with their names.
    #[must_use]
    pub fn measures(&self) -> [(&'static str, &Measure); 5] {
        [
            ("seccomp", &self.seccomp),
            ("landlock", &self.landlock),
            ("no_new_privs", &self.no_new_privs),
            ("capabilities", &self.capabilities),
            ("jail", &self.jail),
        ]
    }
}
