//! Arbiter in the simulation: slow, unreachable, or with requests and answers that arrive
//! unexpectedly late.

use super::rng::Rng;
use super::world::{Defect, Item, World};
use crate::arbiter::simulated::{arbiter_placeholder, content_after};
use crate::arbiter::{Arbiter, ArbiterError, ArbiterRequest, Ownership, Side};
use crate::target::session as target;
use std::sync::Arc;
use std::time::Duration;

/// Register, and the faults between it and the hosts.
#[derive(Debug)]
pub(super) struct SimArbiter {
    pub(super) register: Option<Ownership>,
    /// Requests that are lost, per mille.
    fails: u64,
    /// Interval in which no request arrives.
    down: (u64, u64),
}

pub(super) fn choose(rng: &mut Rng) -> Option<Arc<dyn Arbiter>> {
    rng.per_mille(500).then(arbiter_placeholder)
}

impl SimArbiter {
    pub(super) fn new() -> Self {
        Self { register: Some(Ownership::Open), fails: 0, down: (0, 0) }
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

    fn receive(&mut self, request: ArbiterRequest) -> Result<Ownership, ArbiterError> {
        let held = self.register.as_mut().ok_or_else(|| ArbiterError::NoRegister("it was closed".into()))?;
        *held = content_after(*held, request);
        Ok(*held)
    }
}

impl World {
    pub(super) fn has_arbiter(&self) -> bool {
        self.source.settings.arbiter.is_some()
    }

    /// A host makes a request.
    pub(super) fn ask_arbiter(&mut self, side: Side, request: ArbiterRequest, after: Duration) {
        let planted = match (self.defect, request) {
            (Defect::StartsUnclaimed, ArbiterRequest::Claim(Side::Target)) => {
                Some(Ownership::Target { runs: false })
            }
            (Defect::ForgetsToGiveBack, ArbiterRequest::GiveBack) => Some(Ownership::Source),
            _ => None,
        };
        if let Some(owner) = planted {
            self.at(1, Item::ArbiterAnswers(side, request, Ok(owner)));
            return;
        }
        if request == ArbiterRequest::Claim(Side::Target) {
            self.target_claims();
        }
        let after = u64::try_from(after.as_micros()).expect("short");
        let (from, until) = self.arbiter.down;
        let down = (from..until).contains(&(self.now + after)) || self.rng.per_mille(self.arbiter.fails);
        let fault_free = self.faults.fault_free;
        if fault_free || !down {
            let late = !fault_free && self.rng.per_mille(100);
            let way = self.rng.latency(800) + if late { self.rng.below(20_000_000) } else { 0 };
            self.at(after + way, Item::ArbiterReceives(side, request, true));
            return;
        }
        // The sender cannot tell whether the request arrived, and it may arrive much later.
        if self.rng.per_mille(500) {
            let longest = [1000, 5_000_000, 60_000_000][self.rng.index(3)];
            let way = self.rng.below(longest);
            self.at(after + way, Item::ArbiterReceives(side, request, false));
        }
        let patience = self.rng.below(3_000_000);
        let error = ArbiterError::Unreachable("no answer".into());
        self.at(after + patience, Item::ArbiterAnswers(side, request, Err(error)));
    }

    pub(super) fn arbiter_receives(&mut self, side: Side, request: ArbiterRequest, answered: bool) {
        let answer = self.arbiter.receive(request);
        if self.defect == Defect::LeaseRunsOut && matches!(request, ArbiterRequest::Claim(_)) {
            self.at(3_000_000, Item::LeaseEnds);
        }
        if answered {
            let way = self.rng.latency(800);
            self.at(way, Item::ArbiterAnswers(side, request, answer));
        }
    }

    /// Lets a lease expire, for the defect that uses leases.
    pub(super) fn lease_ends(&mut self) {
        self.arbiter.register = Some(Ownership::Open);
    }

    pub(super) fn arbiter_answers(
        &mut self,
        side: Side,
        request: ArbiterRequest,
        answer: Result<Ownership, ArbiterError>,
    ) {
        if request == ArbiterRequest::Runs {
            // Repeated until it is received, as long as the target lives.
            if matches!(answer, Err(ArbiterError::Unreachable(_))) && !self.target.crashed {
                self.ask_arbiter(side, request, Duration::from_secs(1));
            }
            return;
        }
        match side {
            Side::Source => {
                let answer = match answer {
                    Err(_) if self.defect == Defect::TakesSilenceForAWin => Ok(Ownership::Source),
                    answer => answer,
                };
                self.source.answers.push_back(answer);
            }
            Side::Target => {
                let answer = match answer {
                    Ok(Ownership::Source)
                        if self.defect == Defect::IgnoresLostClaim
                            && request == ArbiterRequest::Claim(Side::Target) =>
                    {
                        Ok(Ownership::Target { runs: false })
                    }
                    answer => answer,
                };
                self.target.answers.push_back((request, answer));
            }
        }
    }

    /// Returns the additional time that a host needs for a permitted action, because it was stopped
    /// at that moment.
    pub(super) fn stopped_for(&mut self) -> u64 {
        let stopped = self.has_arbiter() && !self.faults.fault_free && self.rng.per_mille(150);
        if stopped { self.rng.below(90_000_000) } else { 0 }
    }

    /// Returns true if no claim of the source can be granted any more, and no living host can
    /// change that.
    pub(super) fn no_claim_can_be_granted(&self) -> bool {
        let moved = self.target.outcome == Some(target::Outcome::Completed);
        !self.has_arbiter()
            || (!moved && matches!(self.arbiter.register, None | Some(Ownership::Target { .. })))
    }
}
