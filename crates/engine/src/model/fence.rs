//! The arbiter in the model: its register, and the words that are on their way to it.
//!
//! A word is heard at any time, in one step, and its answer comes back in another. That there is no answer is a fault that is
//! counted: then the word may be heard at any later time, or never. Delays are not counted in time here, so a word that is said again
//! "after a while" may be heard at once.

use super::Flaw;
use super::step::Step;
use super::world::World;
use crate::fence::simulated::heard;
use crate::fence::{ArbiterError, Ruling, Side, Word};
use crate::target;
use std::time::Duration;

/// Every word that is ever said, by whom. Others name it by its place.
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

/// What is answered: what the register holds; nothing if there is none any more.
type Answer = Option<Ruling>;

#[derive(Debug, Clone, PartialEq, Hash)]
pub(super) struct Fence {
    /// None once it was closed.
    pub(super) register: Answer,
    /// Words on their way whose answers are waited for. A word is said again only after its answer.
    asked: [bool; WORDS.len()],
    /// Words that nobody waits for, and which may be heard all the same. Twice is as good as once.
    late: [bool; WORDS.len()],
    answers: [Option<Answer>; WORDS.len()],
    /// What the source's claim was answered: the next is of interest when that has changed. Else asking again would be a run
    /// without end.
    told: Option<Answer>,
    /// For whoever believes in leases: it has run out.
    lapsed: bool,
}

/// What happens to a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Fate {
    Heard,
    Answered,
    /// Whoever said it hears nothing.
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

    /// What can happen to words now. Of a side that died nobody waits for an answer.
    pub(super) fn fates(&self, faults: bool) -> Vec<(usize, Fate)> {
        let mut fates = Vec::new();
        for (at, (_, word)) in WORDS.into_iter().enumerate() {
            let would_say = self.register.map(|held| heard(held, word));
            let news = at != CLAIM_HERE || self.told != Some(would_say);
            for (can, fate) in [
                (self.asked[at] && self.answers[at].is_none() && news, Fate::Heard),
                (self.answers[at].is_some(), Fate::Answered),
                // It is said that the guest runs until that was heard.
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

    /// A side has died: what it has said may be heard, and nobody waits for the answer.
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
    /// Whether no word on its way can change what the source knows.
    pub(super) fn fence_is_silent(&self) -> bool {
        self.fence.as_ref().is_none_or(|fence| fence.fates(false).is_empty())
    }

    /// Whether the guest may run on a side, as far as the fence has to say in it.
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

    /// A host says a word.
    pub(super) fn ask_fence(&mut self, side: Side, word: Word) {
        let at = WORDS.iter().position(|known| *known == (side, word)).expect("nobody says another");
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
                    // Nobody waits for what it answers.
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
            // It has ended, and hears nothing.
            Side::Source | Side::Target => {}
        }
    }
}
