//! Faults, the phases at which they occur, and the outcomes that each combination allows.

use std::fmt;

/// Phase of a migration at which a fault occurs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::command) enum Phase {
    /// The source announces the guest.
    Setup,
    /// The first pass over the guest's memory is under way.
    FirstPass,
    /// A later pass begins.
    LaterPass,
    /// The guest is stopped and its state is sent, before the commit.
    Switchover,
    /// The commit is on its way to the target.
    Commit,
    /// The target runs the guest, and its `Running` message is on its way to the source.
    Answer,
    /// The guest runs at the target, and its memory follows.
    Postcopy,
    /// The link was lost in postcopy, and the operator has not asked for a recovery.
    Paused,
    /// The recovery is under way: the target has sent the list of missing pages.
    Recovery,
    /// The source writes the guest to a file. In a snapshot, the guest runs meanwhile.
    Save,
    /// The guest is paused for a snapshot, and the freeze hook runs.
    Freeze,
    /// The parent has taken the instant of a branch and has resumed its guest. The children were
    /// passed the branch, and none has run.
    Instant,
    /// The children of a branch run, and share pages with the parent.
    Shared,
}

/// Kind of channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::command) enum Channel {
    Control,
    Bulk,
    Urgent,
}

/// Fault of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::command) enum Fault {
    /// The process that has the guest is killed. In a branch, this is the parent.
    KillSource,
    KillTarget,
    /// The command that has requested the operation is killed.
    KillCommand,
    /// One of the children of a branch is killed.
    KillChild,
    /// The process is stopped for longer than any peer timeout, and then continues.
    StopSource,
    StopTarget,
    CutAll,
    Cut(Channel),
    /// Bytes of the channel are dropped, and the connection stays open.
    Stall(Channel),
    /// One bit of the channel's data is flipped.
    Corrupt(Channel),
    /// Bytes of the channel are lost, and then the connection ends.
    Truncate(Channel),
    /// The target's monotonic clock is a day ahead of the source's.
    Clock,
    /// The process gets hardly any memory beyond what it has. The kernel reclaims what it can, and
    /// kills the process if that is not enough.
    PressSource,
    PressTarget,
    /// The children of a branch get hardly any memory.
    PressChildren,
    /// The disk that holds the file is slow.
    SlowDisk,
    /// The file system that holds the file has too little room.
    FullDisk,
    /// The process may not write a file of this length (`RLIMIT_FSIZE`).
    FileLimit,
    /// The folder of the file is removed.
    RemoveFolder,
    /// The operator cancels the operation.
    Cancel,
    /// The process that has the guest can open hardly any descriptor (`RLIMIT_NOFILE`).
    FewDescriptors,
    /// The command, and the processes that it starts, can open hardly any descriptor.
    FewDescriptorsCommand,
}

/// Outcome of a case for the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::command) enum End {
    /// The guest runs at the target, with all of its memory.
    Moved,
    /// The guest runs at the source, with all of its memory.
    Stayed,
    /// The source reports that the ownership is unknown, and does not run the guest.
    Unknown,
    /// The guest runs at the target without memory that was lost with the source, or the source
    /// reports that a dead target had the guest.
    Lost,
    /// The guest's process was killed, and no other process runs the guest.
    Died,
    /// The guest runs where it did, with all of its memory, and its copy is complete: the snapshot,
    /// or every child of the branch that was not killed.
    Copied,
    /// The guest's process was killed, and the copy of the guest is complete.
    Copy,
}

pub(in crate::command) const FAULTS: [Fault; 30] = [
    Fault::KillSource,
    Fault::KillTarget,
    Fault::KillCommand,
    Fault::KillChild,
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
    Fault::PressChildren,
    Fault::SlowDisk,
    Fault::FullDisk,
    Fault::FileLimit,
    Fault::RemoveFolder,
    Fault::Cancel,
    Fault::FewDescriptors,
    Fault::FewDescriptorsCommand,
];

/// Faults that this bench does not inject, each with the reason.
pub(in crate::command) const NOT_DONE: [(&str, &str); 1] = [(
    "clock-jump",
    "a process's monotonic clock cannot be set, and setting the host's time of day would affect every process on it; the \
     target runs with another clock instead (clock)",
)];

impl Phase {
    /// Returns the phases of a mode.
    pub(in crate::command) fn of(mode: &str) -> &'static [Self] {
        use Phase::{
            Answer, Commit, FirstPass, Freeze, Instant, LaterPass, Paused, Postcopy, Recovery, Save, Setup,
            Shared, Switchover,
        };
        match mode {
            "local" => &[Setup, Switchover, Commit, Answer],
            "snapshot" => &[Setup, Freeze, Save],
            "branch" => &[Setup, Instant, Shared],
            "precopy" => &[Setup, FirstPass, LaterPass, Switchover, Commit, Answer],
            "postcopy" => &[Setup, Switchover, Commit, Answer, Postcopy, Paused, Recovery],
            "file" => &[Save],
            _ => &[Setup, FirstPass, LaterPass, Switchover, Commit, Answer, Postcopy, Paused, Recovery],
        }
    }

    /// Returns whether an arbiter has something to decide at this phase.
    pub(in crate::command) fn with_arbiter(self) -> bool {
        matches!(self, Self::Commit | Self::Answer)
    }

    /// Returns whether the source certainly owns the guest at this phase.
    fn before_commit(self) -> bool {
        matches!(self, Self::Setup | Self::FirstPass | Self::LaterPass | Self::Switchover)
    }
}

impl Fault {
    /// Returns whether this fault can have an effect in the mode `mode` at `phase`.
    pub(in crate::command) fn fits(self, mode: &str, phase: Phase) -> bool {
        match mode {
            "snapshot" => self.fits_snapshot(phase),
            "branch" => self.fits_branch(phase),
            "local" => self.fits_local(),
            _ => self.fits_move(mode, phase),
        }
    }

    fn fits_snapshot(self, phase: Phase) -> bool {
        match self {
            Self::KillSource
            | Self::KillCommand
            | Self::StopSource
            | Self::PressSource
            | Self::RemoveFolder
            | Self::Cancel => phase != Phase::Setup,
            Self::SlowDisk | Self::FullDisk => phase == Phase::Save,
            Self::FileLimit | Self::FewDescriptors => phase == Phase::Setup,
            _ => false,
        }
    }

    fn fits_branch(self, phase: Phase) -> bool {
        match self {
            Self::KillSource | Self::KillChild | Self::StopSource | Self::PressSource => true,
            // The command has ended when the children run.
            Self::KillCommand => phase != Phase::Shared,
            Self::PressChildren => phase != Phase::Setup,
            Self::FewDescriptors | Self::FewDescriptorsCommand => phase == Phase::Setup,
            _ => false,
        }
    }

    /// A handoff has a control channel, and no pages that could be damaged.
    fn fits_local(self) -> bool {
        matches!(
            self,
            Self::KillSource
                | Self::KillTarget
                | Self::StopSource
                | Self::StopTarget
                | Self::CutAll
                | Self::PressSource
                | Self::PressTarget
                | Self::Cut(Channel::Control)
                | Self::Stall(Channel::Control)
                | Self::Corrupt(Channel::Control)
                | Self::Truncate(Channel::Control)
        )
    }

    fn fits_move(self, mode: &str, phase: Phase) -> bool {
        let channel = match self {
            Self::KillCommand
            | Self::KillChild
            | Self::PressChildren
            | Self::FullDisk
            | Self::FileLimit
            | Self::RemoveFolder
            | Self::Cancel
            | Self::FewDescriptors
            | Self::FewDescriptorsCommand => return false,
            Self::Cut(channel) | Self::Stall(channel) | Self::Corrupt(channel) | Self::Truncate(channel) => {
                channel
            }
            Self::Clock => return phase == Phase::Setup,
            Self::SlowDisk => return phase == Phase::Save,
            Self::KillSource => return true,
            // A paused migration has no link to cut, and a save to a file has no target.
            Self::CutAll => return !matches!(phase, Phase::Paused | Phase::Save),
            _ => return phase != Phase::Save,
        };
        match channel {
            _ if phase == Phase::Save => false,
            Channel::Control => phase != Phase::Paused,
            // Damage to a bulk channel in the handover of a postcopy needs pages that are being
            // sent.
            Channel::Bulk => !matches!(phase, Phase::Setup | Phase::Paused | Phase::Recovery),
            Channel::Urgent => mode != "precopy" && phase == Phase::Postcopy,
        }
    }

    /// Returns whether this fault at `phase` of the mode `mode` is also injected while pages are
    /// sent compressed and as deltas.
    pub(in crate::command) fn hits_encoded_pages(self, mode: &str, phase: Phase) -> bool {
        let bulk = |channel| channel == Channel::Bulk;
        let hits = match self {
            Self::KillSource | Self::KillTarget | Self::StopTarget | Self::CutAll => true,
            Self::Cut(channel) | Self::Stall(channel) | Self::Corrupt(channel) | Self::Truncate(channel) => {
                bulk(channel)
            }
            _ => false,
        };
        hits && matches!(mode, "precopy" | "postcopy" | "hybrid")
            && matches!(
                phase,
                Phase::FirstPass | Phase::LaterPass | Phase::Switchover | Phase::Postcopy | Phase::Recovery
            )
    }

    /// Returns the allowed outcomes if the kernel killed the side under memory pressure, at `phase`
    /// or later.
    pub(in crate::command) fn allowed_if_killed(self, mode: &str, phase: Phase) -> &'static [End] {
        use End::{Copied, Copy, Died, Lost, Moved, Stayed, Unknown};
        match self {
            Self::PressSource if mode == "branch" => &[Died, Copy],
            Self::PressSource if mode == "snapshot" => &[Died],
            Self::PressChildren => &[Stayed, Copied],
            Self::PressSource => &[Died, Lost, Moved],
            _ if matches!(phase, Phase::Postcopy | Phase::Paused | Phase::Recovery) => &[Lost],
            _ => &[Stayed, Unknown, Lost],
        }
    }

    /// Returns the allowed outcomes. With an arbiter, these are the final ones.
    pub(in crate::command) fn allowed(self, mode: &str, phase: Phase, with_arbiter: bool) -> &'static [End] {
        match mode {
            "snapshot" => self.allowed_in_snapshot(phase),
            "branch" => self.allowed_in_branch(phase),
            _ => self.allowed_in_move(mode, phase, with_arbiter),
        }
    }

    fn allowed_in_snapshot(self, phase: Phase) -> &'static [End] {
        use End::{Copied, Died, Stayed};
        match self {
            Self::KillSource => &[Died],
            // The pause for the hooks ends with the time limit of the hooks.
            Self::KillCommand if phase == Phase::Freeze => &[Stayed],
            Self::FullDisk | Self::FileLimit | Self::RemoveFolder | Self::Cancel => &[Stayed],
            Self::PressSource => &[Stayed, Copied],
            // The snapshot goes on without its command, and after a limit was raised.
            _ => &[Copied],
        }
    }

    fn allowed_in_branch(self, phase: Phase) -> &'static [End] {
        use End::{Copied, Copy, Died, Stayed};
        match (self, phase) {
            (Self::KillSource, Phase::Setup) => &[Died],
            // The parent may die before it has said that the files of the branch are sealed.
            (Self::KillSource, Phase::Instant) => &[Died, Copy],
            (Self::KillSource, _) => &[Copy],
            // The command ends all children if one of them does not run.
            (Self::KillChild, Phase::Setup | Phase::Instant) => &[Stayed],
            (Self::KillCommand, Phase::Setup) => &[Stayed],
            (Self::PressSource | Self::PressChildren, Phase::Setup | Phase::Instant) => &[Stayed, Copied],
            _ => &[Copied],
        }
    }

    fn allowed_in_move(self, mode: &str, phase: Phase, with_arbiter: bool) -> &'static [End] {
        use End::{Died, Lost, Moved, Stayed, Unknown};
        let postcopy = matches!(mode, "postcopy" | "hybrid");
        match (self, phase) {
            (Self::Clock | Self::SlowDisk, _) => &[Moved],
            (Self::KillSource, Phase::Save) => &[Died],
            (Self::KillSource, phase) if phase.before_commit() => &[Died],
            (Self::KillTarget, phase) if phase.before_commit() => &[Stayed],
            // Faults that are transient or hit pages that are sent again do not stop the migration.
            (_, phase) if phase.before_commit() => &[Stayed, Moved],
            (Self::KillSource, Phase::Commit) if postcopy => &[Lost, Died, Moved],
            (Self::KillSource, Phase::Commit) => &[Moved, Died],
            (Self::KillSource, _) if postcopy => &[Lost, Moved],
            (Self::KillSource, _) => &[Moved],
            // The target may or may not have claimed the guest at the arbiter.
            (Self::KillTarget, Phase::Commit) if with_arbiter => &[Stayed, Unknown, Lost],
            (Self::KillTarget, Phase::Commit) => &[Unknown],
            // The target's `Running` message is on its way and may still arrive.
            (Self::KillTarget, Phase::Answer) => &[Unknown, Lost],
            (Self::KillTarget, _) => &[Lost],
            (_, Phase::Commit) if postcopy || with_arbiter => &[Moved, Stayed],
            (_, Phase::Commit) => &[Unknown, Moved, Stayed],
            (_, Phase::Answer) if !postcopy && !with_arbiter => &[Unknown, Moved],
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
            Self::Freeze => "freeze",
            Self::Instant => "instant",
            Self::Shared => "shared",
        })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, channel) = match self {
            Self::KillSource => ("kill-source", None),
            Self::KillTarget => ("kill-target", None),
            Self::KillCommand => ("kill-command", None),
            Self::KillChild => ("kill-child", None),
            Self::StopSource => ("stop-source", None),
            Self::StopTarget => ("stop-target", None),
            Self::CutAll => ("cut-all", None),
            Self::Clock => ("clock", None),
            Self::PressSource => ("press-source", None),
            Self::PressTarget => ("press-target", None),
            Self::PressChildren => ("press-children", None),
            Self::SlowDisk => ("slow-disk", None),
            Self::FullDisk => ("full-disk", None),
            Self::FileLimit => ("file-limit", None),
            Self::RemoveFolder => ("remove-folder", None),
            Self::Cancel => ("cancel", None),
            Self::FewDescriptors => ("few-descriptors", None),
            Self::FewDescriptorsCommand => ("few-descriptors-command", None),
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
            Self::Copied => "copied",
            Self::Copy => "copy",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::MODES;
    use super::*;

    #[test]
    fn every_fault_fits_a_phase_and_has_an_allowed_outcome() {
        for fault in FAULTS {
            let mut fits = 0;
            for mode in MODES {
                for phase in Phase::of(mode) {
                    fits += usize::from(fault.fits(mode, *phase));
                    for with_arbiter in [false, true] {
                        let allowed = fault.allowed(mode, *phase, with_arbiter);
                        assert!(!allowed.is_empty());
                        // A guest that the source certainly owns is never lost or of unknown
                        // ownership.
                        let lost = allowed.iter().any(|end| matches!(end, End::Lost | End::Unknown));
                        assert!(!(lost && phase.before_commit()), "{fault} {phase}");
                        // With an arbiter, the ownership is never unknown while both sides live.
                        let killed = matches!(fault, Fault::KillSource | Fault::KillTarget);
                        assert!(
                            !(with_arbiter && !killed && phase.with_arbiter() && lost),
                            "{fault} {phase}"
                        );
                    }
                }
            }
            assert!(fits > 0, "{fault}");
        }
    }

    #[test]
    fn pages_are_encoded_while_bulk_channels_are_damaged() {
        for mode in ["precopy", "postcopy", "hybrid"] {
            let encoded = |fault: Fault| {
                Phase::of(mode)
                    .iter()
                    .any(|phase| fault.fits(mode, *phase) && fault.hits_encoded_pages(mode, *phase))
            };
            assert!(
                encoded(Fault::Corrupt(Channel::Bulk)) && encoded(Fault::Truncate(Channel::Bulk)),
                "{mode}"
            );
            assert!(!encoded(Fault::Clock) && !encoded(Fault::Cut(Channel::Control)), "{mode}");
        }
    }
}
