//! Deliberate flaws, and the promises that the model finds broken with them.

use super::{Bounds, Protocol, wants_shortest};
use crate::source::MigrationMode::{self, Hybrid, Local, Postcopy, Precopy};

/// Mutation of the hosts around the sessions: another order of steps, or another reaction to an
/// event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flaw {
    LosesPage,
    HarvestsBeforePause,
    HarvestsBeforeSaving,
    ProtectsLate,
    AcknowledgedEarly,
    BlindToDamage,
    StartsAtLoad,
    KeepsDisks,
    ResumesAfterCommit,
    TakesForUnsent,
    ResumesInPostcopy,
    OlderOverNewer,
    SendsTwice,
    KeepsStale,
    ForgetsSuspects,
    CompleteEarly,
    ForgetsTheLast,
    ClaimSurvives,
    RetoldEarly,
    StartsAbandoned,
    StartsRenounced,
    EndsRenounced,
    DeafOnceRenounced,
    StartsUnclaimed,
    IgnoresLostClaim,
    TakesSilenceForAWin,
    ForgetsToGiveBack,
    EndsClaiming,
    LeaseRunsOut,
    WritesAfterSaving,
    WritesAtLoad,
}

impl Flaw {
    /// All flaws, each with the migration mode that shows it, and the minimum number of faults.
    pub(super) const ALL: [(Self, MigrationMode, u8); 31] = [
        (Self::LosesPage, Precopy, 0),
        (Self::HarvestsBeforePause, Precopy, 0),
        (Self::HarvestsBeforeSaving, Precopy, 0),
        (Self::ProtectsLate, Precopy, 0),
        (Self::AcknowledgedEarly, Precopy, 0),
        (Self::BlindToDamage, Precopy, 1),
        (Self::StartsAtLoad, Precopy, 0),
        (Self::KeepsDisks, Precopy, 0),
        (Self::ResumesAfterCommit, Precopy, 1),
        (Self::TakesForUnsent, Precopy, 1),
        (Self::ResumesInPostcopy, Postcopy, 1),
        (Self::OlderOverNewer, Postcopy, 0),
        (Self::SendsTwice, Postcopy, 0),
        (Self::KeepsStale, Hybrid, 0),
        (Self::ForgetsSuspects, Hybrid, 1),
        (Self::CompleteEarly, Postcopy, 0),
        (Self::ForgetsTheLast, Postcopy, 1),
        (Self::ClaimSurvives, Postcopy, 1),
        (Self::RetoldEarly, Postcopy, 1),
        (Self::StartsAbandoned, Postcopy, 1),
        (Self::StartsRenounced, Postcopy, 1),
        (Self::EndsRenounced, Postcopy, 1),
        (Self::DeafOnceRenounced, Postcopy, 1),
        (Self::StartsUnclaimed, Precopy, 0),
        (Self::IgnoresLostClaim, Precopy, 1),
        (Self::TakesSilenceForAWin, Precopy, 2),
        (Self::ForgetsToGiveBack, Precopy, 2),
        (Self::EndsClaiming, Precopy, 2),
        (Self::LeaseRunsOut, Precopy, 0),
        (Self::WritesAfterSaving, Local, 0),
        (Self::WritesAtLoad, Local, 0),
    ];

    /// Returns true if the flaw needs a migration with an arbiter.
    fn needs_arbiter(self) -> bool {
        matches!(
            self,
            Self::StartsUnclaimed
                | Self::IgnoresLostClaim
                | Self::TakesSilenceForAWin
                | Self::ForgetsToGiveBack
                | Self::EndsClaiming
                | Self::LeaseRunsOut
        )
    }

    /// Returns the description for the table in the documentation.
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::LosesPage => "a harvest loses a page",
            Self::HarvestsBeforePause => {
                "bitmap swapped too early: the last harvest is the one before the pause"
            }
            Self::HarvestsBeforeSaving => {
                "the state is saved, which may write memory, after the last harvest"
            }
            Self::ProtectsLate => "a page is protected after it was read",
            Self::AcknowledgedEarly => {
                "acknowledgement reordered: a pass is acknowledged before its last page came"
            }
            Self::BlindToDamage => "damaged pages are accepted",
            Self::StartsAtLoad => "the target starts when the state is loaded",
            Self::KeepsDisks => "the source commits and keeps the disks",
            Self::ResumesAfterCommit => "resume after commit, when the link is lost",
            Self::TakesForUnsent => "a commit that was sent in part counts as not sent",
            Self::ResumesInPostcopy => "resume when the link is lost in postcopy",
            Self::OlderOverNewer => "older copy over newer: what comes again is written over what is there",
            Self::SendsTwice => "what was asked for is sent even if it was sent",
            Self::KeepsStale => "stale pages are kept at the handover",
            Self::ForgetsSuspects => "damaged pages are not named at the handover",
            Self::CompleteEarly => "complete is reported while a page is missing",
            Self::ForgetsTheLast => "the report of the last page is lost with its link",
            Self::ClaimSurvives => "what was claimed for a lost link stays claimed on the next",
            Self::RetoldEarly => "missing pages are named while lost channels still deliver pages",
            Self::StartsAbandoned => "the guest is started over pages that were given up as zeros",
            Self::StartsRenounced => "a late commit starts a guest that was renounced",
            Self::EndsRenounced => {
                "a target that renounced the guest ends, and its source never learns of it"
            }
            Self::DeafOnceRenounced => "a target that renounced the guest refuses its source",
            Self::StartsUnclaimed => "with an arbiter, the target runs a committed guest without a claim",
            Self::IgnoresLostClaim => "the target runs a guest that the arbiter gave to the source",
            Self::TakesSilenceForAWin => "the source treats a missing answer of the arbiter as a grant",
            Self::ForgetsToGiveBack => {
                "the target renounces what it has claimed, and does not tell the arbiter"
            }
            Self::EndsClaiming => "a target that is stopped while it claims ends, and gives nothing back",
            Self::LeaseRunsOut => "the arbiter gives a guest again after a lease has expired",
            Self::WritesAfterSaving => "a device of the source writes the memory after its state was saved",
            Self::WritesAtLoad => "the target writes the shared memory when it loads the state",
        }
    }
}

/// Searches for a broken promise with this number of faults.
fn found(flaw: Flaw, mode: MigrationMode, faults: u8) -> Option<(&'static str, Vec<String>)> {
    let bounds = Bounds { faults, ..Bounds::SHORT };
    let with_arbiter = flaw.needs_arbiter();
    let model = Protocol { flaw: Some(flaw), with_arbiter, ..Protocol::new(mode, bounds) };
    model.counterexample()
}

/// Returns a trace for the table: without the beginning of every migration, and with a repetition
/// count for equal steps in a row.
fn told(steps: &[String]) -> String {
    let begun = steps.iter().position(|step| step == "source hears ChannelsUp").map_or(0, |at| at + 1);
    let mut told: Vec<(&str, u32)> = Vec::new();
    for step in &steps[begun..] {
        match told.last_mut() {
            Some((last, times)) if last == step => *times += 1,
            _ => told.push((step, 1)),
        }
    }
    let told = told.into_iter().map(|(step, times)| match times {
        1 => step.to_owned(),
        times => format!("{step} ({times} times)"),
    });
    told.collect::<Vec<_>>().join("; ")
}

#[test]
fn each_flaw_breaks_a_promise() {
    if vmferry_testkit::skip_long_search_if_emulated() {
        return;
    }
    let (mut missed, mut rows) = (Vec::new(), Vec::new());
    for (flaw, mode, faults) in Flaw::ALL {
        // The minimum number of faults is checked only for the table, because the check takes long.
        let fewer = if wants_shortest() { 0..faults } else { 0..0 };
        let fewer = fewer.into_iter().find_map(|faults| found(flaw, mode, faults));
        assert!(fewer.is_none(), "{flaw:?} takes less than {faults} faults: {fewer:?}");
        match found(flaw, mode, faults) {
            Some((property, steps)) => rows.push(format!(
                "| {} | {mode} | {property} | {faults} | {} | {} |",
                flaw.text(),
                steps.len(),
                told(&steps)
            )),
            None => missed.push(flaw),
        }
    }
    let head = "| mutation | migration | what breaks | faults | steps | a trace, once channels are up |";
    println!("{head}\n|---|---|---|---|---|---|\n{}", rows.join("\n"));
    assert!(missed.is_empty(), "not found: {missed:?}");
}
