//! Arbiter in the model: its register, and the requests that are being sent to it.
//!
//! A request is received at any time, in one step, and its answer arrives in another. A missing
//! answer is a counted fault: the request may then be received at any later time, or never. Delays
//! have no duration in the model, so a request that is repeated "after a while" may be received at
//! once.

use super::Flaw;
use super::step::Step;
use super::world::World;
use crate::arbiter::simulated::content_after;
use crate::arbiter::{ArbiterError, ArbiterRequest, Ownership, Side};
use crate::target;
use std::time::Duration;

/// All requests, with the host that makes them. Other code refers to a request by its index.
const REQUESTS: [(Side, ArbiterRequest); 5] = [
    (Side::Source, ArbiterRequest::Claim(Side::Source)),
    (Side::Target, ArbiterRequest::Look),
    (Side::Target, ArbiterRequest::Claim(Side::Target)),
    (Side::Target, ArbiterRequest::Runs),
    (Side::Target, ArbiterRequest::GiveBack),
];
const SOURCE_CLAIM: usize = 0;
const TARGET_CLAIM: usize = 2;
const RUNS: usize = 3;

/// Answer to a request: the content of the register, or nothing if there is no register any more.
type Answer = Option<Ownership>;

#[derive(Debug, Clone, PartialEq, Hash)]
pub(super) struct ModelArbiter {
    /// `None` after the register was closed.
    pub(super) register: Answer,
    /// Requests that wait for an answer. A request is repeated only after its answer.
    asked: [bool; REQUESTS.len()],
    /// Requests whose answer is not awaited, and which may be received nevertheless. Twice has the
    /// same effect as once.
    late: [bool; REQUESTS.len()],
    answers: [Option<Answer>; REQUESTS.len()],
    /// Last answer to the source's claim. The next answer is delivered only if it differs, because
    /// a run could otherwise ask without end.
    told: Option<Answer>,
    /// True if a lease has expired, for the flaw that uses leases.
    lapsed: bool,
}

/// Step of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Fate {
    Received,
    Answered,
    /// The sender gets no answer.
    Unanswered,
    ReceivedLate,
}

impl ModelArbiter {
    pub(super) fn new() -> Self {
        Self {
            register: Some(Ownership::Open),
            asked: [false; REQUESTS.len()],
            late: [false; REQUESTS.len()],
            answers: [None; REQUESTS.len()],
            told: None,
            lapsed: false,
        }
    }

    /// Returns the steps that are possible for requests now. A host that died waits for no answer.
    pub(super) fn fates(&self, faults: bool) -> Vec<(usize, Fate)> {
        let mut fates = Vec::new();
        for (at, (_, request)) in REQUESTS.into_iter().enumerate() {
            let would_answer = self.register.map(|held| content_after(held, request));
            let news = at != SOURCE_CLAIM || self.told != Some(would_answer);
            for (can, fate) in [
                (self.asked[at] && self.answers[at].is_none() && news, Fate::Received),
                (self.answers[at].is_some(), Fate::Answered),
                // The request `Runs` is repeated until it was received.
                (faults && self.asked[at] && at != RUNS, Fate::Unanswered),
                (self.late[at], Fate::ReceivedLate),
            ] {
                fates.extend(can.then_some((at, fate)));
            }
        }
        fates
    }

    /// Returns whether the target waits for the answer to its claim.
    pub(super) fn target_claims(&self) -> bool {
        self.asked[TARGET_CLAIM]
    }

    pub(super) fn can_lapse(&self) -> bool {
        !self.lapsed && !matches!(self.register, None | Some(Ownership::Open))
    }

    pub(super) fn lapse(&mut self) {
        (self.lapsed, self.register) = (true, Some(Ownership::Open));
    }

    fn receive(&mut self, request: usize) {
        self.register = self.register.map(|held| content_after(held, REQUESTS[request].1));
    }

    /// Records the death of a host: its requests may still be received, and no answer is awaited.
    pub(super) fn dies(&mut self, side: Side) {
        for at in (0..REQUESTS.len()).filter(|at| REQUESTS[*at].0 == side) {
            self.late[at] |= self.asked[at] && self.answers[at].is_none();
            (self.asked[at], self.answers[at]) = (false, None);
        }
    }

    pub(super) fn describe(at: usize, fate: Fate) -> String {
        let (side, request) = REQUESTS[at];
        let request = match request {
            ArbiterRequest::Look => "whether there is a register",
            ArbiterRequest::Claim(_) => "claim",
            ArbiterRequest::Runs => "word that it runs",
            ArbiterRequest::GiveBack => "word that it never will",
        };
        let side = if side == Side::Source { "source" } else { "target" };
        match fate {
            Fate::Received => format!("the fence hears the {side}'s {request}"),
            Fate::Answered => format!("the fence answers the {side}'s {request}"),
            Fate::Unanswered => format!("THE FENCE GIVES NO ANSWER to the {side}'s {request}"),
            Fate::ReceivedLate => format!("the fence hears the {side}'s {request} late"),
        }
    }
}

impl World {
    /// Returns true if no request in progress can change the knowledge of the source.
    pub(super) fn arbiter_is_idle(&self) -> bool {
        self.arbiter.as_ref().is_none_or(|arbiter| arbiter.fates(false).is_empty())
    }

    /// Returns whether the arbiter permits the guest to run on a host. `None` without an arbiter.
    pub(super) fn arbiter_permits(&self, side: Side) -> Option<bool> {
        let held = self.arbiter.as_ref()?.register;
        Some(match side {
            Side::Source => held == Some(Ownership::Source),
            Side::Target => matches!(held, Some(Ownership::Target { .. })),
        })
    }
}

impl Step<'_> {
    fn arbiter(&mut self) -> &mut ModelArbiter {
        self.world.arbiter.as_mut().expect("only sessions with a fence ask one")
    }

    /// A host makes a request.
    pub(super) fn ask_arbiter(&mut self, side: Side, request: ArbiterRequest) {
        let at =
            REQUESTS.iter().position(|known| *known == (side, request)).expect("there is no other request");
        let planted = match at {
            TARGET_CLAIM if self.flaw(Flaw::StartsUnclaimed) => Some(Ownership::Target { runs: false }),
            _ if request == ArbiterRequest::GiveBack && self.flaw(Flaw::ForgetsToGiveBack) => {
                Some(Ownership::Source)
            }
            _ => None,
        };
        let arbiter = self.arbiter();
        assert!(!arbiter.asked[at], "{request:?} is said twice at a time");
        arbiter.asked[at] = true;
        arbiter.answers[at] = planted.map(Some);
    }

    pub(super) fn arbiter_step(&mut self, at: usize, fate: Fate) {
        match fate {
            Fate::Received => {
                let arbiter = self.arbiter();
                arbiter.receive(at);
                if at == RUNS {
                    // The answer to this request is not awaited.
                    arbiter.asked[at] = false;
                } else {
                    arbiter.answers[at] = Some(arbiter.register);
                }
            }
            Fate::ReceivedLate => {
                self.arbiter().late[at] = false;
                self.arbiter().receive(at);
            }
            Fate::Answered => {
                let arbiter = self.arbiter();
                arbiter.asked[at] = false;
                let Some(answer) = arbiter.answers[at].take() else { return };
                if at == SOURCE_CLAIM {
                    arbiter.told = Some(answer);
                }
                self.arbiter_answers(
                    at,
                    answer.ok_or_else(|| ArbiterError::NoRegister("it was closed".into())),
                );
            }
            Fate::Unanswered => {
                self.fault();
                let arbiter = self.arbiter();
                arbiter.late[at] |= arbiter.answers[at].take().is_none();
                arbiter.asked[at] = false;
                self.arbiter_answers(at, Err(ArbiterError::Unreachable("no answer".into())));
            }
        }
    }

    fn arbiter_answers(&mut self, at: usize, answer: Result<Ownership, ArbiterError>) {
        let (side, request) = REQUESTS[at];
        let answer = match answer {
            Err(_) if at == SOURCE_CLAIM && self.flaw(Flaw::TakesSilenceForAWin) => Ok(Ownership::Source),
            Ok(Ownership::Source) if at == TARGET_CLAIM && self.flaw(Flaw::IgnoresLostClaim) => {
                Ok(Ownership::Target { runs: false })
            }
            answer => answer,
        };
        match side {
            Side::Source if !self.world.source.ended() => {
                self.tell_source(Duration::ZERO, vmferry_protocol::source::Event::ArbiterAnswered(answer));
            }
            Side::Target if !self.world.target.ended() => {
                self.tell_target(target::session::Event::ArbiterAnswered(request, answer));
            }
            // The host has ended, and receives nothing.
            Side::Source | Side::Target => {}
        }
    }
}
