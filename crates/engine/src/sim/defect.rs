//! What can be wrong on purpose.

/// A defect that is planted to see whether the simulation finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Defect {
    None,
    /// A harvest now and then loses a page.
    LostPage,
    /// The guest is started when its state is loaded, before the commit.
    StartsAtLoad,
    /// A link that breaks after the commit is taken for one that broke before it.
    ResumesAfterCommit,
    /// The source keeps what the target needs to run the guest.
    KeepsDisks,
    /// Pages are protected after they were read, not before.
    ProtectsLate,
    /// The target says that all pages are sound.
    BlindToDamage,
    /// A link that breaks when the guest runs at the target, before all of its memory is there, brings it back here.
    ResumesInPostcopy,
    /// Pages that are asked for are sent even if they were sent, and what comes is written over what is there.
    OlderOverNewer,
    /// Pages that are asked for are sent even if they were sent.
    SendsTwice,
    /// Pages that were claimed for a lost channel stay claimed on the next.
    ClaimSurvives,
    /// The target tells what it lacks while the lost channels still bring pages.
    RetoldEarly,
    /// What is stale at the handover is kept.
    KeepsStale,
    /// Pages that came damaged are not named at the handover.
    ForgetsSuspects,
    /// The target says that all is here when a page is lacking.
    CompleteEarly,
    /// The word that the last page is here is lost with the link that it came on.
    ForgetsTheLast,
    /// A target that has renounced the guest ends, and its source never hears of it.
    EndsRenounced,
    /// A target that has renounced the guest starts it when the commit comes late.
    StartsRenounced,
    /// What is moot at the target's end is dropped again and again, and the end with it.
    DropsTheEnd,
    /// The loop tells the target's session of a stop again and again, whether the session acts on it or not.
    RepeatsStop,
    /// The target is not told that the operator has paused the guest.
    LosesPause,
    /// Pages are left out by an answer that was asked for before they were protected.
    #[cfg(test)]
    AsksFirst,
    /// Pages are protected when the answer by which they are left out has come.
    #[cfg(test)]
    ProtectsAfterAsking,
    /// Pages are protected anew that were sent.
    #[cfg(test)]
    ProtectsSent,
    /// What the guest says of a pass that has ended counts for the next.
    #[cfg(test)]
    TakesLateAnswers,
    /// What was free before the pause is left out after it.
    #[cfg(test)]
    SettlesEarly,
    /// The target runs a guest that it was told to run, without a claim.
    StartsUnclaimed,
    /// The target runs a guest that the fence has given to the source.
    IgnoresLostClaim,
    /// The source takes a fence that gives no answer for one that says yes.
    TakesSilenceForAWin,
    /// The target renounces a guest that it has claimed, and does not say so to the fence.
    ForgetsToGiveBack,
    /// What the fence has given it gives again after a while.
    LeaseRunsOut,
}

impl Defect {
    /// All but [`Defect::None`].
    pub(super) const PLANTED: &[Self] = &[
        Self::LostPage,
        Self::StartsAtLoad,
        Self::ResumesAfterCommit,
        Self::KeepsDisks,
        Self::ProtectsLate,
        Self::BlindToDamage,
        Self::ResumesInPostcopy,
        Self::OlderOverNewer,
        Self::SendsTwice,
        Self::ClaimSurvives,
        Self::RetoldEarly,
        Self::KeepsStale,
        Self::ForgetsSuspects,
        Self::CompleteEarly,
        Self::ForgetsTheLast,
        Self::EndsRenounced,
        Self::StartsRenounced,
        Self::DropsTheEnd,
        Self::RepeatsStop,
        Self::LosesPause,
        // Of code that has them only for tests.
        #[cfg(test)]
        Self::AsksFirst,
        #[cfg(test)]
        Self::ProtectsAfterAsking,
        #[cfg(test)]
        Self::ProtectsSent,
        #[cfg(test)]
        Self::TakesLateAnswers,
        #[cfg(test)]
        Self::SettlesEarly,
        Self::StartsUnclaimed,
        Self::IgnoresLostClaim,
        Self::TakesSilenceForAWin,
        Self::ForgetsToGiveBack,
        Self::LeaseRunsOut,
    ];
}
