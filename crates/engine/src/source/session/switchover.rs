//! From the pause to the handover: the state, the last pages, and whether they are the same on both sides.

use super::{MAX_RESENDS, Session, State};
use crate::source::events::{Action, Outcome, Pass, Verification};
use std::time::Duration;
use vmferry_core::{PageRun, Section};
use vmferry_wire::{Refusal, RefusalCode, ToTarget};

/// Most pages that the message of a failed verification names.
const MOST_NAMED: usize = 16;

impl Session {
    pub(super) fn pause(&mut self) -> Vec<Action> {
        self.state = State::Pausing;
        vec![Action::Pause]
    }

    pub(super) fn pause_for_postcopy(&mut self) -> Vec<Action> {
        self.lazy = true;
        self.pause()
    }

    pub(super) fn saved(&mut self, now: Duration, sections: Vec<Section>) -> Vec<Action> {
        if self.lazy {
            return self.saved_for_postcopy(now, sections);
        }
        // Pages that came damaged and were not dirty are named again by the target.
        self.again.clear();
        self.state = State::LastHarvest;
        self.harvest_began = now;
        let count = u32::try_from(sections.len()).unwrap_or(u32::MAX);
        // The harvest comes after the state was saved, because saving can write guest memory (hazards.md 13), and the
        // state's bytes travel while the harvest and the last pages are under way.
        let mut actions = vec![Action::Send(ToTarget::Final { pass: self.pass })];
        actions.extend(sections.into_iter().map(|section| Action::Send(ToTarget::Section(section))));
        actions.push(Action::Send(ToTarget::StateEnd { sections: count }));
        actions.push(Action::Harvest);
        actions
    }

    pub(super) fn send_last(&mut self, pass: Pass) -> Vec<Action> {
        self.state = State::LastPass { sent: false, received: false };
        vec![Action::SendPass { number: self.pass, pass }]
    }

    pub(super) fn last_pass(&mut self, sent: bool, received: bool) -> Vec<Action> {
        self.state = State::LastPass { sent, received };
        if !(sent && received) {
            return Vec::new();
        }
        if !self.again.is_empty() {
            return self.resend();
        }
        self.pass += 1;
        if self.settings.verify {
            self.state = State::Verifying { sent: false, received: false, verified: false };
            return vec![
                Action::Send(ToTarget::Verify { pass: self.pass }),
                Action::SendPass { number: self.pass, pass: Pass::Digests },
            ];
        }
        self.load()
    }

    pub(super) fn resend(&mut self) -> Vec<Action> {
        let runs = std::mem::take(&mut self.again);
        self.resends += 1;
        if self.resends > MAX_RESENDS {
            let first = &runs[0];
            let detail = format!(
                "pages keep arriving damaged ({} of {}, sent {MAX_RESENDS} times): the link or a host's memory is faulty",
                PageRun::from(first.first..first.first.saturating_add(first.count)),
                first.region,
            );
            return self.give_up(Outcome::Failed(Refusal::new(RefusalCode::Memory, detail)), true);
        }
        self.suspects_resent =
            runs.iter().fold(self.suspects_resent, |sum, run| sum.saturating_add(run.count));
        self.pass += 1;
        let mut actions = vec![Action::Send(ToTarget::Final { pass: self.pass })];
        actions.extend(self.send_last(Pass::Again(runs)));
        actions
    }

    pub(super) fn verifying(&mut self, sent: bool, received: bool, verified: bool) -> Vec<Action> {
        self.state = State::Verifying { sent, received, verified };
        if !(sent && received && verified) {
            return Vec::new();
        }
        match &self.verification {
            // A target that compared less than everything has verified nothing.
            Some(Verification { mismatched: 0, pages, .. }) if Some(*pages) != self.comparing => {
                let wanted = self.comparing.unwrap_or(self.pages);
                let detail = format!("the target compared {pages} of {wanted} pages");
                self.give_up(Outcome::Failed(Refusal::new(RefusalCode::Memory, detail)), true)
            }
            Some(Verification { mismatched: 0, .. }) => self.load(),
            found => {
                let detail = differing(&found.clone().unwrap_or_default());
                self.give_up(Outcome::Failed(Refusal::new(RefusalCode::Memory, detail)), true)
            }
        }
    }

    pub(super) fn load(&mut self) -> Vec<Action> {
        self.state = State::Loading;
        let pages = self.lacking;
        vec![Action::Send(if self.lazy { ToTarget::LoadLazily { pages } } else { ToTarget::Load })]
    }
}

/// Describes a failed verification and names at most [`MOST_NAMED`] of the pages that differ: the target may send 65,536 of them.
fn differing(found: &Verification) -> String {
    let Verification { pages, mismatched, samples } = found;
    let mut names: Vec<String> = samples
        .iter()
        .take(MOST_NAMED)
        .map(|name| format!("{} page {:#x}", name.region, name.page))
        .collect();
    let more = mismatched.saturating_sub(names.len() as u64);
    if more > 0 {
        names.push(format!("and {more} more"));
    }
    format!("{mismatched} of {pages} pages differ on the two sides: {}", names.join(", "))
}
