//! Arbiter in the model: its register, and the requests that are being sent to it.
//!
//! A request is received at any time, in one step, and its answer arrives in another. A missing
//! answer is a counted fault: the request may then be received at any later time, or never. Delays
//! have no duration in the model, so a request that is repeated "after a while" may be received at
//! once.

use super::Flaw;
use super::step::Step;
use super::world::World;
use crate::fence::simulated::heard;
use crate::fence::{ArbiterError, Ruling, Side, Word};
use crate::target;
use std::time::Duration;

/// All requests, with the host that makes them. Other code refers to a request by its index.
const WORDS: [(Side, Word); 5] = [
    (Side::Source, Word::Claim(Side::Source)),
    (Side::Target, Word::Look),
    (Side::Target, Word::Claim(Side::Target)),
    (Side::Target, Word::Runs),
    (Side::Target, Word::GiveBack),
];
const CLAIM_HERE: usize = 0;
const CLAIM_THERE: usize = 2;
const RUNS: usize = 3;

/// Answer to a request: the content of the register, or nothing if there is no register any more.
type Answer = Option<Ruling>;

#[derive(Debug, Clone, PartialEq, Hash)]
pub(super) struct Fence {
    /// `None` after the register was closed.
    pub(super) register: Answer,
    /// Requests that wait for an answer. A request is repeated only after its answer.
    asked: [bool; WORDS.len()],
    /// Requests whose answer is not awaited, and which may be received nevertheless. Twice has the
    /// same effect as once.
    late: [bool; WORDS.len()],
    answers: [Option<Answer>; WORDS.len()],
    /// Last answer to the source's claim. The next answer is delivered only if it differs, because
    /// a run could otherwise ask without end.
    told: Option<Answer>,
    /// True if a lease has expired, for the flaw that uses leases.
    lapsed: bool,
}

/// Step of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Fate {
    Heard,
    Answered,
    /// The sender gets no answer.
    Unanswered,
    HeardLate,
}

impl Fence {
    pub(super) fn new() -> Self {
        Self {
            register: Some(Ruling::Open),
            asked: [false; WORDS.len()],
            late: [false; WORDS.len()],
            answers: [None; WORDS.len()],
            told: None,
            lapsed: false,
        }
    }

    /// Returns the steps that are possible for requests now. A host that died waits for no answer.
    pub(super) fn fates(&self, faults: bool) -> Vec<(usize, Fate)> {
        let mut fates = Vec::new();
        for (at, (_, word)) in WORDS.into_iter().enumerate() {
            let would_say = self.register.map(|held| heard(held, word));
            let news = at != CLAIM_HERE || self.told != Some(would_say);
            for (can, fate) in [
                (self.asked[at] && self.answers[at].is_none() && news, Fate::Heard),
                (self.answers[at].is_some(), Fate::Answered),
                // The request `Runs` is repeated until it was received.
                (faults && self.asked[at] && at != RUNS, Fate::Unanswered),
                (self.late[at], Fate::HeardLate),
            ] {
                fates.extend(can.then_some((at, fate)));
            }
        }
        fates
    }

    /// Returns whether the target waits for the answer to its claim.
    pub(super) fn target_claims(&self) -> bool {
        self.asked[CLAIM_THERE]
    }

    pub(super) fn can_lapse(&self) -> bool {
        !self.lapsed && !matches!(self.register, None | Some(Ruling::Open))
    }

    pub(super) fn lapse(&mut self) {
        (self.lapsed, self.register) = (true, Some(Ruling::Open));
    }

    fn hear(&mut self, word: usize) {
        self.register = self.register.map(|held| heard(held, WORDS[word].1));
    }

    /// Records the death of a host: its requests may still be received, and no answer is awaited.
    pub(super) fn dies(&mut self, side: Side) {
        for at in (0..WORDS.len()).filter(|at| WORDS[*at].0 == side) {
            self.late[at] |= self.asked[at] && self.answers[at].is_none();
            (self.asked[at], self.answers[at]) = (false, None);
        }
    }

    pub(super) fn told(at: usize, fate: Fate) -> String {
        let (side, word) = WORDS[at];
        let word = match word {
            Word::Look => "whether there is a register",
            Word::Claim(_) => "claim",
            Word::Runs => "word that it runs",
            Word::GiveBack => "word that it never will",
        };
        let side = if side == Side::Source { "source" } else { "target" };
        match fate {
            Fate::Heard => format!("the fence hears the {side}'s {word}"),
            Fate::Answered => format!("the fence answers the {side}'s {word}"),
            Fate::Unanswered => format!("THE FENCE GIVES NO ANSWER to the {side}'s {word}"),
            Fate::HeardLate => format!("the fence hears the {side}'s {word} late"),
        }
    }
}

impl World {
    /// Returns true if no request in progress can change the knowledge of the source.
    pub(super) fn fence_is_silent(&self) -> bool {
        self.fence.as_ref().is_none_or(|fence| fence.fates(false).is_empty())
    }

    /// Returns whether the arbiter permits the guest to run on a host. `None` without an arbiter.
    pub(super) fn fence_gives_it_to(&self, side: Side) -> Option<bool> {
        let held = self.fence.as_ref()?.register;
        Some(match side {
            Side::Source => held == Some(Ruling::Source),
            Side::Target => matches!(held, Some(Ruling::Target { .. })),
        })
    }
}

impl Step<'_> {
    fn fence(&mut self) -> &mut Fence {
        self.world.fence.as_mut().expect("only sessions with a fence ask one")
    }

    /// A host makes a request.
    pub(super) fn ask_fence(&mut self, side: Side, word: Word) {
        let at = WORDS.iter().position(|known| *known == (side, word)).expect("there is no other request");
        let planted = match at {
            CLAIM_THERE if self.flaw(Flaw::StartsUnclaimed) => Some(Ruling::Target { runs: false }),
            _ if word == Word::GiveBack && self.flaw(Flaw::ForgetsToGiveBack) => Some(Ruling::Source),
            _ => None,
        };
        let fence = self.fence();
        assert!(!fence.asked[at], "{word:?} is said twice at a time");
        fence.asked[at] = true;
        fence.answers[at] = planted.map(Some);
    }

    pub(super) fn fence_happens(&mut self, at: usize, fate: Fate) {
        match fate {
            Fate::Heard => {
                let fence = self.fence();
                fence.hear(at);
                if at == RUNS {
                    // The answer to this request is not awaited.
                    fence.asked[at] = false;
                } else {
                    fence.answers[at] = Some(fence.register);
                }
            }
            Fate::HeardLate => {
                self.fence().late[at] = false;
                self.fence().hear(at);
            }
            Fate::Answered => {
                let fence = self.fence();
                fence.asked[at] = false;
                let Some(answer) = fence.answers[at].take() else { return };
                if at == CLAIM_HERE {
                    fence.told = Some(answer);
                }
                self.fence_answers(
                    at,
                    answer.ok_or_else(|| ArbiterError::NoRegister("it was closed".into())),
                );
            }
            Fate::Unanswered => {
                self.fault();
                let fence = self.fence();
                fence.late[at] |= fence.answers[at].take().is_none();
                fence.asked[at] = false;
                self.fence_answers(at, Err(ArbiterError::Unreachable("no answer".into())));
            }
        }
    }

    fn fence_answers(&mut self, at: usize, answer: Result<Ruling, ArbiterError>) {
        let (side, word) = WORDS[at];
        let answer = match answer {
            Err(_) if at == CLAIM_HERE && self.flaw(Flaw::TakesSilenceForAWin) => Ok(Ruling::Source),
            Ok(Ruling::Source) if at == CLAIM_THERE && self.flaw(Flaw::IgnoresLostClaim) => {
                Ok(Ruling::Target { runs: false })
            }
            answer => answer,
        };
        match side {
            Side::Source if !self.world.here.ended() => {
                self.tell_here(Duration::ZERO, vmferry_protocol::source::Event::ArbiterAnswered(answer));
            }
            Side::Target if !self.world.there.ended() => {
                self.tell_there(target::session::Event::ArbiterAnswered(word, answer));
            }
            // The host has ended, and receives nothing.
            Side::Source | Side::Target => {}
        }
    }
}
