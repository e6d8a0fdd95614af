//! The target's memory from the handover on: missing pages, threads that wait for them, and the
//! running guest.

use super::Flaw;
use super::judge::Promise;
use super::source::failure;
use super::step::Step;
use super::world::{ALL, DAMAGED, Fate, Paging, has, pages, take};
use crate::target::session::Event;
use vmferry_wire::PagingFigures;

impl Step<'_> {
    /// Performs the driver's part of the handover: drops all stale pages.
    pub(super) fn begin_paging(&mut self, count: u64) -> Option<Event> {
        let keeps = self.flaw(Flaw::KeepsStale);
        let target = &mut self.world.target;
        let missing = std::mem::take(&mut target.collected);
        if u64::from(missing.count_ones()) != count {
            return Some(Event::LocalFailure(failure()));
        }
        let named = target.mismatched & !missing == 0;
        let stale = pages(missing).filter(|page| keeps && target.pages[*page] != 0);
        let kept: u8 = stale.map(|page| 1 << page).sum();
        pages(missing & !kept).for_each(|page| target.pages[page] = 0);
        target.paging = Some(Paging {
            fate: Fate::Open,
            missing,
            present: ALL & !missing | kept,
            requested: 0,
            waits: 0,
            lines_up: true,
            ended: false,
            model: [0; _],
        });
        self.promise(Promise::NoPageMissed, named);
        (missing == 0).then(|| Event::MissingArrived(PagingFigures::default()))
    }

    /// Handles the loss of a link before the guest was started: the guest will not be started, and
    /// waiting threads get zeros.
    pub(super) fn abandon(&mut self) {
        if let Some(paging) = &mut self.world.target.paging
            && paging.fate == Fate::Open
        {
            (paging.fate, paging.present) = (Fate::Abandoned, ALL);
        }
    }

    /// Touches a page, as the guest or the loading of its state.
    pub(super) fn touch(&mut self, page: usize) {
        self.paging().waits |= 1 << page;
        self.request_page(page, false);
    }

    fn request_page(&mut self, page: usize, again: bool) {
        let paging = self.paging();
        if !paging.lines_up || (has(paging.requested, page) && !again) {
            return;
        }
        paging.requested |= 1 << page;
        let link = self.target_link();
        if !link.dead() && !link.pages_cut {
            link.requests.push_back((page, again));
        }
    }

    pub(super) fn request_again(&mut self) {
        let paging = self.paging();
        paging.lines_up = true;
        pages(paging.waits).for_each(|page| self.request_page(page, false));
    }

    /// Handles a page that arrived on any channel.
    pub(super) fn place(&mut self, page: usize, content: u8) {
        if content == DAMAGED {
            return self.request_page(page, true);
        }
        let overwrites = self.flaw(Flaw::OlderOverNewer);
        let early = self.flaw(Flaw::CompleteEarly);
        let paging = self.paging();
        let fresh = take(&mut paging.missing, page);
        let placed = !has(paging.present, page);
        paging.present |= 1 << page;
        take(&mut paging.waits, page);
        let left = paging.missing.count_ones();
        let fine = fresh || overwrites || paging.fate == Fate::Abandoned;
        self.promise(Promise::EachPageOnce, fine);
        if placed || overwrites {
            self.world.target.pages[page] = content;
        }
        self.world.target.last_came |= fresh && left == u32::from(early);
    }

    /// Writes a page that is present, as the guest.
    pub(super) fn write_on_target(&mut self, page: usize) {
        let target = &mut self.world.target;
        target.writes_left -= 1;
        target.pages[page] = target.pages[page].wrapping_add(100);
        if let Some(paging) = &mut target.paging {
            paging.model[page] = target.pages[page];
        }
    }
}
