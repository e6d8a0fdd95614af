//! Deliberate defects.

/// Defect that is planted to check that the simulation finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Defect {
    None,
    /// A harvest sometimes loses a page.
    LostPage,
    /// The guest is started when its state is loaded, before the commit.
    StartsAtLoad,
    /// A link that breaks after the commit counts as one that broke before it.
    ResumesAfterCommit,
    /// The source keeps what the target needs to run the guest.
    KeepsDisks,
    /// Pages are protected after they were read, not before.
    ProtectsLate,
    /// The target reports that all pages match their digests.
    BlindToDamage,
    /// If the link breaks while the guest runs on the target and misses pages, the source resumes
    /// the guest.
    ResumesInPostcopy,
    /// Requested pages are sent even if they were sent before, and arriving pages overwrite present
    /// ones.
    OlderOverNewer,
    /// Requested pages are sent even if they were sent before.
    SendsTwice,
    /// Pages that were claimed for a lost channel stay claimed on the next one.
    ClaimSurvives,
    /// The target names its missing pages while the lost channels still deliver pages.
    RetoldEarly,
    /// Stale pages are kept at the handover.
    KeepsStale,
    /// Pages with a digest mismatch are not named at the handover.
    ForgetsSuspects,
    /// The target reports that all pages have arrived while one is missing.
    CompleteEarly,
    /// The report of the last page is lost with its link.
    ForgetsTheLast,
    /// A target that has renounced the guest ends, and its source never learns of it.
    EndsRenounced,
    /// A target that has renounced the guest starts it when the commit arrives late.
    StartsRenounced,
    /// Obsolete actions are dropped repeatedly at the target's end, and the end with them.
    DropsTheEnd,
    /// The loop reports a stop to the target's session repeatedly, whether the session acts on it
    /// or not.
    RepeatsStop,
    /// The target is not told that the operator has paused the guest.
    LosesPause,
    /// The source keeps the versions of pages when it sends damaged pages again.
    KeepsVersions,
    /// The source keeps the version of a page that it sends in another way.
    RemembersWhole,
    /// A channel sends pages that belonged to another channel in the pass before.
    SharesPages,
    /// In a handoff, the source writes memory after it has saved the device state.
    WritesAfterSaving,
    /// In a handoff, the target writes memory before it has the guest.
    WritesAtLoad,
    /// Pages are skipped because of an answer that was asked for before they were protected.
    #[cfg(test)]
    AsksFirst,
    /// Pages are protected only after the answer because of which they are skipped.
    #[cfg(test)]
    ProtectsAfterAsking,
    /// Pages that were sent are protected again.
    #[cfg(test)]
    ProtectsSent,
    /// An answer for a pass that has ended is used for the next one.
    #[cfg(test)]
    TakesLateAnswers,
    /// Pages that were free before the pause are skipped after it.
    #[cfg(test)]
    SettlesEarly,
    /// The target runs a guest after the commit without a claim.
    StartsUnclaimed,
    /// The target runs a guest that the arbiter has given to the source.
    IgnoresLostClaim,
    /// The source treats a missing answer of the arbiter as a grant.
    TakesSilenceForAWin,
    /// The target renounces a guest that it has claimed, and does not tell the arbiter.
    ForgetsToGiveBack,
    /// The arbiter gives a guest again after a lease has expired.
    LeaseRunsOut,
}

impl Defect {
    /// All defects except [`Defect::None`].
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
        Self::KeepsVersions,
        Self::RemembersWhole,
        Self::SharesPages,
        Self::WritesAfterSaving,
        Self::WritesAtLoad,
        // Defects in code that can have them in tests only.
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
