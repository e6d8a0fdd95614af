//! Which faults there are, when they come, and what may become of the guest then.

use std::fmt;

/// A moment of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::command) enum Phase {
    /// The guest is being announced.
    Setup,
    /// In the first pass over its memory.
    FirstPass,
    /// As a later pass begins.
    LaterPass,
    /// The guest stands still, its state is sent, nothing is committed.
    Switchover,
    /// The commit is on its way.
    Commit,
    /// The target runs the guest, and that word is on its way.
    Answer,
    /// The guest runs at the target, its memory follows.
    Postcopy,
    /// The link is lost meanwhile, and nobody has asked for it to be taken up again.
    Paused,
    /// It is being taken up again: the target has said what it lacks.
    Recovery,
    /// The guest is on its way into a file.
    Save,
}

/// A kind of channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::command) enum Channel {
    Control,
    Bulk,
    Urgent,
}

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::command) enum Fault {
    KillSource,
    KillTarget,
    /// Stopped as it stands, for longer than anybody waits, and then let go on.
    StopSource,
    StopTarget,
    CutAll,
    Cut(Channel),
    /// Nothing comes any more, and no end of it either.
    Stall(Channel),
    /// A bit is turned over.
    Corrupt(Channel),
    /// Bytes are missing, and then it ends.
    Truncate(Channel),
    /// The target's monotonic clock is a day ahead of the source's.
    Clock,
    /// From then on there is hardly any memory for it but what it has: what can be given back is taken, and if that does not do, the kernel
    /// kills it.
    PressSource,
    PressTarget,
    /// The disk with the file is slow.
    SlowDisk,
}

/// What became of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::command) enum End {
    /// It runs at the target, whole.
    Moved,
    /// It runs at the source, whole.
    Stayed,
    /// The source says that nobody knows, and does not run it.
    Unknown,
    /// It runs at the target without all of its memory, whose rest died with the source; or the source says so of a target that died.
    Lost,
    /// It was where it was killed, and nobody else runs it.
    Died,
}

pub(in crate::command) const FAULTS: [Fault; 21] = [
    Fault::KillSource,
    Fault::KillTarget,
    Fault::StopSource,
    Fault::StopTarget,
    Fault::CutAll,
    Fault::Cut(Channel::Control),
    Fault::Cut(Channel::Bulk),
    Fault::Cut(Channel::Urgent),
    Fault::Stall(Channel::Control),
    Fault::Stall(Channel::Bulk),
    Fault::Stall(Channel::Urgent),
    Fault::Corrupt(Channel::Control),
    Fault::Corrupt(Channel::Bulk),
    Fault::Corrupt(Channel::Urgent),
    Fault::Truncate(Channel::Control),
    Fault::Truncate(Channel::Bulk),
    Fault::Truncate(Channel::Urgent),
    Fault::Clock,
    Fault::PressSource,
    Fault::PressTarget,
    Fault::SlowDisk,
];

/// What is not done here, and why.
pub(in crate::command) const NOT_DONE: [(&str, &str); 1] = [(
    "clock-jump",
    "a process's monotonic clock cannot be set, and setting the host's time of day would reach everybody on it; the target runs \
     with another clock instead (clock)",
)];

impl Phase {
    /// Those of a mode.
    pub(in crate::command) fn of(mode: &str) -> &'static [Self] {
        use Phase::{
            Answer, Commit, FirstPass, LaterPass, Paused, Postcopy, Recovery, Save, Setup, Switchover,
        };
        match mode {
            "precopy" => &[Setup, FirstPass, LaterPass, Switchover, Commit, Answer],
            "postcopy" => &[Setup, Switchover, Commit, Answer, Postcopy, Paused, Recovery],
            "file" => &[Save],
            _ => &[Setup, FirstPass, LaterPass, Switchover, Commit, Answer, Postcopy, Paused, Recovery],
        }
    }

    /// Whether a fence has something to decide then.
    pub(in crate::command) fn fenced(self) -> bool {
        matches!(self, Self::Commit | Self::Answer)
    }

    /// Whether the guest is the source's beyond doubt.
    fn before_commit(self) -> bool {
        matches!(self, Self::Setup | Self::FirstPass | Self::LaterPass | Self::Switchover)
    }
}

impl Fault {
    /// Whether there is something for it to hit.
    pub(in crate::command) fn fits(self, mode: &str, phase: Phase) -> bool {
        let channel = match self {
            Self::Cut(channel) | Self::Stall(channel) | Self::Corrupt(channel) | Self::Truncate(channel) => {
                channel
            }
            Self::Clock => return phase == Phase::Setup,
            Self::SlowDisk => return phase == Phase::Save,
            Self::KillSource => return true,
            // There is no link to cut, and no target.
            Self::CutAll => return !matches!(phase, Phase::Paused | Phase::Save),
            _ => return phase != Phase::Save,
        };
        match channel {
            _ if phase == Phase::Save => false,
            Channel::Control => phase != Phase::Paused,
            // A damaged page of a postcopy's handover needs pages that are sent.
            Channel::Bulk => !matches!(phase, Phase::Setup | Phase::Paused | Phase::Recovery),
            Channel::Urgent => mode != "precopy" && phase == Phase::Postcopy,
        }
    }

    /// What may become of the guest where the kernel killed the side that it took memory from: at that moment, or at a later one.
    pub(in crate::command) fn allowed_if_killed(self, phase: Phase) -> &'static [End] {
        use End::{Died, Lost, Moved, Stayed, Unknown};
        match self {
            Self::PressSource => &[Died, Lost, Moved],
            _ if matches!(phase, Phase::Postcopy | Phase::Paused | Phase::Recovery) => &[Lost],
            _ => &[Stayed, Unknown, Lost],
        }
    }

    /// What may become of the guest; with a fence, in the end.
    pub(in crate::command) fn allowed(self, mode: &str, phase: Phase, fenced: bool) -> &'static [End] {
        use End::{Died, Lost, Moved, Stayed, Unknown};
        let lazy = mode != "precopy";
        match (self, phase) {
            (Self::Clock | Self::SlowDisk, _) => &[Moved],
            (Self::KillSource, Phase::Save) => &[Died],
            (Self::KillSource, phase) if phase.before_commit() => &[Died],
            (Self::KillTarget, phase) if phase.before_commit() => &[Stayed],
            // Things that pass, or hit pages that come again, stop nothing.
            (_, phase) if phase.before_commit() => &[Stayed, Moved],
            (Self::KillSource, Phase::Commit) if lazy => &[Lost, Died, Moved],
            (Self::KillSource, Phase::Commit) => &[Moved, Died],
            (Self::KillSource, _) if lazy => &[Lost, Moved],
            (Self::KillSource, _) => &[Moved],
            // It has asked for the guest, or has not.
            (Self::KillTarget, Phase::Commit) if fenced => &[Stayed, Unknown, Lost],
            (Self::KillTarget, Phase::Commit) => &[Unknown],
            // Its word that it runs the guest is under way, and may still come.
            (Self::KillTarget, Phase::Answer) => &[Unknown, Lost],
            (Self::KillTarget, _) => &[Lost],
            (_, Phase::Commit) if lazy || fenced => &[Moved, Stayed],
            (_, Phase::Commit) => &[Unknown, Moved, Stayed],
            (_, Phase::Answer) if !lazy && !fenced => &[Unknown, Moved],
            _ => &[Moved],
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Setup => "setup",
            Self::FirstPass => "first-pass",
            Self::LaterPass => "later-pass",
            Self::Switchover => "switchover",
            Self::Commit => "commit",
            Self::Answer => "answer",
            Self::Postcopy => "postcopy",
            Self::Paused => "paused",
            Self::Recovery => "recovery",
            Self::Save => "save",
        })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, channel) = match self {
            Self::KillSource => ("kill-source", None),
            Self::KillTarget => ("kill-target", None),
            Self::StopSource => ("stop-source", None),
            Self::StopTarget => ("stop-target", None),
            Self::CutAll => ("cut-all", None),
            Self::Clock => ("clock", None),
            Self::PressSource => ("press-source", None),
            Self::PressTarget => ("press-target", None),
            Self::SlowDisk => ("slow-disk", None),
            Self::Cut(channel) => ("cut-", Some(channel)),
            Self::Stall(channel) => ("stall-", Some(channel)),
            Self::Corrupt(channel) => ("corrupt-", Some(channel)),
            Self::Truncate(channel) => ("truncate-", Some(channel)),
        };
        f.write_str(what)?;
        channel.map_or(Ok(()), |channel| {
            f.write_str(match channel {
                Channel::Control => "control",
                Channel::Bulk => "bulk",
                Channel::Urgent => "urgent",
            })
        })
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Moved => "moved",
            Self::Stayed => "stayed",
            Self::Unknown => "unknown",
            Self::Lost => "lost",
            Self::Died => "died",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_fits_somewhere_and_something_is_allowed() {
        for fault in FAULTS {
            let mut fits = 0;
            for mode in ["precopy", "postcopy", "hybrid", "file"] {
                for phase in Phase::of(mode) {
                    fits += usize::from(fault.fits(mode, *phase));
                    for fenced in [false, true] {
                        let allowed = fault.allowed(mode, *phase, fenced);
                        assert!(!allowed.is_empty());
                        // A guest that is the source's beyond doubt is never lost or in doubt.
                        let lost = allowed.iter().any(|end| matches!(end, End::Lost | End::Unknown));
                        assert!(!(lost && phase.before_commit()), "{fault} {phase}");
                        // A fence leaves nothing in doubt while both sides live.
                        let killed = matches!(fault, Fault::KillSource | Fault::KillTarget);
                        assert!(!(fenced && !killed && phase.fenced() && lost), "{fault} {phase}");
                    }
                }
            }
            assert!(fits > 0, "{fault}");
        }
    }
}
