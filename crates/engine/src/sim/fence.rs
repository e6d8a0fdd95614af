//! Arbiter in the simulation: slow, unreachable, or with requests and answers that arrive
//! unexpectedly late.

use super::rng::Rng;
use super::world::{Defect, Item, World};
use crate::fence::simulated::{asked_by_the_host, heard};
use crate::fence::{Arbiter, ArbiterError, Ruling, Side, Word};
use crate::target::session as target;
use std::sync::Arc;
use std::time::Duration;

/// Register, and the faults between it and the hosts.
#[derive(Debug)]
pub(super) struct Fence {
    pub(super) register: Option<Ruling>,
    /// Requests that are lost, per mille.
    fails: u64,
    /// Interval in which no request arrives.
    down: (u64, u64),
}

pub(super) fn choose(rng: &mut Rng) -> Option<Arc<dyn Arbiter>> {
    rng.per_mille(500).then(asked_by_the_host)
}

impl Fence {
    pub(super) fn new() -> Self {
        Self { register: Some(Ruling::Open), fails: 0, down: (0, 0) }
    }

    pub(super) fn choose_faults(&mut self, rng: &mut Rng) {
        if rng.per_mille(300) {
            self.fails = 1 + rng.below(700);
        }
        if rng.per_mille(300) {
            let scale = [10_000, 100_000, 1_000_000][rng.index(3)];
            let from = rng.below(scale);
            let longest = [10_000, 1_000_000, 60_000_000][rng.index(3)];
            self.down = (from, from + rng.below(longest));
        }
    }

    fn hears(&mut self, word: Word) -> Result<Ruling, ArbiterError> {
        let held = self.register.as_mut().ok_or_else(|| ArbiterError::NoRegister("it was closed".into()))?;
        *held = heard(*held, word);
        Ok(*held)
    }
}

impl World {
    pub(super) fn fenced(&self) -> bool {
        self.here.settings.fence.is_some()
    }

    /// A host makes a request.
    pub(super) fn ask_fence(&mut self, side: Side, word: Word, after: Duration) {
        let planted = match (self.defect, word) {
            (Defect::StartsUnclaimed, Word::Claim(Side::Target)) => Some(Ruling::Target { runs: false }),
            (Defect::ForgetsToGiveBack, Word::GiveBack) => Some(Ruling::Source),
            _ => None,
        };
        if let Some(ruling) = planted {
            self.at(1, Item::FenceAnswers(side, word, Ok(ruling)));
            return;
        }
        if word == Word::Claim(Side::Target) {
            self.target_claims();
        }
        let after = u64::try_from(after.as_micros()).expect("short");
        let (from, until) = self.fence.down;
        let down = (from..until).contains(&(self.now + after)) || self.rng.per_mille(self.fence.fails);
        let calm = self.faults.calm;
        if calm || !down {
            let late = !calm && self.rng.per_mille(100);
            let way = self.rng.latency(800) + if late { self.rng.below(20_000_000) } else { 0 };
            self.at(after + way, Item::FenceHears(side, word, true));
            return;
        }
        // The sender cannot tell whether the request arrived, and it may arrive much later.
        if self.rng.per_mille(500) {
            let longest = [1000, 5_000_000, 60_000_000][self.rng.index(3)];
            let way = self.rng.below(longest);
            self.at(after + way, Item::FenceHears(side, word, false));
        }
        let patience = self.rng.below(3_000_000);
        let error = ArbiterError::Unreachable("no answer".into());
        self.at(after + patience, Item::FenceAnswers(side, word, Err(error)));
    }

    pub(super) fn fence_hears(&mut self, side: Side, word: Word, answered: bool) {
        let answer = self.fence.hears(word);
        if self.defect == Defect::LeaseRunsOut && matches!(word, Word::Claim(_)) {
            self.at(3_000_000, Item::LeaseEnds);
        }
        if answered {
            let way = self.rng.latency(800);
            self.at(way, Item::FenceAnswers(side, word, answer));
        }
    }

    /// Lets a lease expire, for the defect that uses leases.
    pub(super) fn lease_ends(&mut self) {
        self.fence.register = Some(Ruling::Open);
    }

    pub(super) fn fence_answers(&mut self, side: Side, word: Word, answer: Result<Ruling, ArbiterError>) {
        if word == Word::Runs {
            // Repeated until it is received, as long as the target lives.
            if matches!(answer, Err(ArbiterError::Unreachable(_))) && !self.there.crashed {
                self.ask_fence(side, word, Duration::from_secs(1));
            }
            return;
        }
        match side {
            Side::Source => {
                let answer = match answer {
                    Err(_) if self.defect == Defect::TakesSilenceForAWin => Ok(Ruling::Source),
                    answer => answer,
                };
                self.here.answers.push_back(answer);
            }
            Side::Target => {
                let answer = match answer {
                    Ok(Ruling::Source)
                        if self.defect == Defect::IgnoresLostClaim && word == Word::Claim(Side::Target) =>
                    {
                        Ok(Ruling::Target { runs: false })
                    }
                    answer => answer,
                };
                self.there.answers.push_back((word, answer));
            }
        }
    }

    /// Returns the additional time that a host needs for a permitted action, because it was stopped
    /// at that moment.
    pub(super) fn stopped_for(&mut self) -> u64 {
        let stopped = self.fenced() && !self.faults.calm && self.rng.per_mille(150);
        if stopped { self.rng.below(90_000_000) } else { 0 }
    }

    /// Returns true if no claim of the source can be granted any more, and no living host can
    /// change that.
    pub(super) fn no_claim_can_be_granted(&self) -> bool {
        let moved = self.there.outcome == Some(target::Outcome::Completed);
        !self.fenced() || (!moved && matches!(self.fence.register, None | Some(Ruling::Target { .. })))
    }
}
