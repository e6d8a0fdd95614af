//! The target's memory from the handover on: missing pages, threads that wait for them, and the
//! running guest.

use super::Flaw;
use super::judge::Promise;
use super::source::failure;
use super::step::Step;
use super::world::{ALL, DAMAGED, Fate, Lazy, has, pages, take};
use crate::target::session::Event;
use vmferry_wire::LazyFigures;

impl Step<'_> {
    /// Performs the driver's part of the handover: drops all stale pages.
    pub(super) fn begin_lazily(&mut self, count: u64) -> Option<Event> {
        let keeps = self.flaw(Flaw::KeepsStale);
        let there = &mut self.world.there;
        let lacking = std::mem::take(&mut there.collected);
        if u64::from(lacking.count_ones()) != count {
            return Some(Event::LocalFailure(failure()));
        }
        let named = there.suspect & !lacking == 0;
        let stale = pages(lacking).filter(|page| keeps && there.pages[*page] != 0);
        let kept: u8 = stale.map(|page| 1 << page).sum();
        pages(lacking & !kept).for_each(|page| there.pages[page] = 0);
        there.lazy = Some(Lazy {
            fate: Fate::Open,
            lacking,
            present: ALL & !lacking | kept,
            asked: 0,
            waits: 0,
            lines_up: true,
            ended: false,
            model: [0; _],
        });
        self.promise(Promise::NoPageMissed, named);
        (lacking == 0).then(|| Event::MissingArrived(LazyFigures::default()))
    }

    /// Handles the loss of a link before the guest was started: the guest will not be started, and
    /// waiting threads get zeros.
    pub(super) fn abandon(&mut self) {
        if let Some(lazy) = &mut self.world.there.lazy
            && lazy.fate == Fate::Open
        {
            (lazy.fate, lazy.present) = (Fate::Abandoned, ALL);
        }
    }

    /// Touches a page, as the guest or the loading of its state.
    pub(super) fn touch(&mut self, page: usize) {
        self.lazy().waits |= 1 << page;
        self.ask(page, false);
    }

    fn ask(&mut self, page: usize, again: bool) {
        let lazy = self.lazy();
        if !lazy.lines_up || (has(lazy.asked, page) && !again) {
            return;
        }
        lazy.asked |= 1 << page;
        let link = self.link_there();
        if !link.dead() && !link.pages_cut {
            link.requests.push_back((page, again));
        }
    }

    pub(super) fn ask_again(&mut self) {
        let lazy = self.lazy();
        lazy.lines_up = true;
        pages(lazy.waits).for_each(|page| self.ask(page, false));
    }

    /// Handles a page that arrived on any channel.
    pub(super) fn place(&mut self, page: usize, content: u8) {
        if content == DAMAGED {
            return self.ask(page, true);
        }
        let overwrites = self.flaw(Flaw::OlderOverNewer);
        let early = self.flaw(Flaw::CompleteEarly);
        let lazy = self.lazy();
        let fresh = take(&mut lazy.lacking, page);
        let placed = !has(lazy.present, page);
        lazy.present |= 1 << page;
        take(&mut lazy.waits, page);
        let left = lazy.lacking.count_ones();
        let fine = fresh || overwrites || lazy.fate == Fate::Abandoned;
        self.promise(Promise::EachPageOnce, fine);
        if placed || overwrites {
            self.world.there.pages[page] = content;
        }
        self.world.there.last_came |= fresh && left == u32::from(early);
    }

    /// Writes a page that is present, as the guest.
    pub(super) fn write_there(&mut self, page: usize) {
        let there = &mut self.world.there;
        there.writes_left -= 1;
        there.pages[page] = there.pages[page].wrapping_add(100);
        if let Some(lazy) = &mut there.lazy {
            lazy.model[page] = there.pages[page];
        }
    }
}
