//! What is in force, and what is not and why.

use serde::Serialize;

/// One means of confinement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Measure {
    /// Whether it is in force.
    pub in_force: bool,
    /// What exactly, or why not.
    pub detail: String,
}

impl Measure {
    pub(crate) fn there(detail: impl Into<String>) -> Self {
        Self { in_force: true, detail: detail.into() }
    }

    pub(crate) fn missing(detail: impl Into<String>) -> Self {
        Self { in_force: false, detail: detail.into() }
    }
}

/// All of them, for `status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct InForce {
    /// What was asked for.
    pub mode: crate::Mode,
    /// System calls, thread by thread.
    pub seccomp: Measure,
    /// Files, ports, signals.
    pub landlock: Measure,
    /// Programs with more privileges cannot be had by executing them.
    pub no_new_privs: Measure,
    /// What root may do besides.
    pub capabilities: Measure,
    /// A root directory of its own, another user.
    pub jail: Measure,
}

impl InForce {
    /// Before anything is done.
    pub(crate) fn nothing(mode: crate::Mode) -> Self {
        let why = match mode {
            crate::Mode::On | crate::Mode::Kill => "not done yet",
            crate::Mode::Log => "--sandbox log only logs system calls",
            crate::Mode::Off => "--sandbox off",
        };
        let not = || Measure::missing(why);
        let jail = Measure::missing("not asked for (--jail)");
        Self { mode, seccomp: not(), landlock: not(), no_new_privs: not(), capabilities: not(), jail }
    }

    /// All, with their names.
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
