//! Pages that come over a link: asked for on urgent channels, and brought by any channel.

use super::receiver::{FrameSource, ReceiveError};
use crate::channel::{IoBuf, Stream};
#[cfg(test)]
use crate::lazy::Flaw;
use crate::lazy::{Origin, Place};
use crate::sync::{AtomicU64, RwLock};
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use vmferry_core::{LazyMemory, PAGE_BYTES, PageDigest, PageIndex, PageRun, PageSet, RegionId};
use vmferry_wire::{MAX_FRAME_PAGES, Request, RunKind, Table, WireError};

pub(crate) use crate::lazy::{again_after_panics, serve_faults};

/// Pages that came damaged and are asked for again, at most: beyond that the link is given up.
const MOST_DAMAGED: u64 = 10_000;

/// How long the source may take to take a request, and those for a huge page.
const ONE: Duration = Duration::from_secs(1);
const MANY: Duration = Duration::from_secs(10);

/// A table that does not fit its frame; decoding it has found out before.
pub(super) const TABLE: WireError = WireError::Damaged { what: "table of a frame" };

/// Memory whose pages come over a link.
pub(crate) type Lazy = crate::lazy::Lazy<Lines>;

/// An urgent channel, to ask on.
#[derive(Debug)]
pub(crate) struct UrgentLine {
    stream: Arc<Stream>,
    /// A request is one write; several fault threads may share a line.
    turn: Mutex<()>,
}

impl UrgentLine {
    pub(crate) fn new(stream: Arc<Stream>) -> Self {
        Self { stream, turn: Mutex::new(()) }
    }

    /// Sends whole requests.
    fn ask(&self, requests: &[u8], within: Duration) -> io::Result<()> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.stream.send_bytes_within(requests, within).map_err(|failed| failed.error)
    }
}

/// Where to ask for pages.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    /// Empty while the link is down.
    lines: RwLock<Vec<Arc<UrgentLine>>>,
    /// Pages that came damaged on these lines.
    damaged_here: AtomicU64,
    /// Whether processors are kept awake while there are lines.
    pub(crate) stay_awake: bool,
}

impl Origin for Lines {
    type Hands = ();

    fn hands(&self) {}

    fn bring(lazy: &Lazy, _: &mut (), place: Place, ahead: u16) {
        lazy.want(place, ahead);
    }
}

/// A channel's place for pages that are not yet checked: nothing can be received into memory that is still missing.
#[derive(Debug, Default)]
pub(crate) struct Stager {
    /// Allocated at the first frame, as large as the largest.
    bytes: Vec<u8>,
}

impl Stager {
    /// Takes a frame's contents off `source` and places them. Says whether no page is lacking now, which one call does.
    pub(crate) fn take(
        &mut self,
        lazy: &Lazy,
        region: RegionId,
        table: &Table<'_>,
        source: &impl FrameSource,
    ) -> Result<bool, ReceiveError> {
        self.bytes.resize(MAX_FRAME_PAGES * PAGE_BYTES, 0);
        let position = lazy.position(region);
        let position = position.ok_or(WireError::Field {
            what: "region",
            value: region.0.into(),
            allowed: "one of the layout",
        })?;
        let pages = table.digests().count();
        let contents = self.bytes.get_mut(..pages * PAGE_BYTES).ok_or(TABLE)?;
        source.fill(&mut [IoBuf::from_bytes_mut(contents)])?;
        let (mut contents, mut digests, mut last) = (&*contents, table.digests(), false);
        for entry in table.runs() {
            last |= match entry.kind {
                RunKind::Zero => lazy.take_zeros(position, entry.run),
                RunKind::Data => {
                    let bytes = usize::try_from(entry.run.bytes()).unwrap_or(usize::MAX);
                    let (own, rest) = contents.split_at_checked(bytes).ok_or(TABLE)?;
                    contents = rest;
                    lazy.take_pages(position, entry.run, own, &mut digests)?
                }
            };
        }
        Ok(last)
    }
}

impl Lazy {
    /// The pages of `lacking` are to come, for a guest of `vcpus`.
    pub(crate) fn new(memory: Arc<dyn LazyMemory>, lacking: &PageSet, vcpus: u32) -> Self {
        Self::from(Lines::default(), memory, lacking, vcpus)
    }

    /// Asks on `lines` from now on. What was asked for before is forgotten, because those lines are gone; whoever waits is
    /// asked for again.
    pub(crate) fn ask_on(&self, lines: Vec<Arc<UrgentLine>>) {
        let again = !lines.is_empty();
        #[cfg(test)]
        if self.flaw == Flaw::AsksBeforeLines {
            self.waiting().into_iter().for_each(|place| self.ask(place, 0, false));
            *self.origin.lines.write().unwrap_or_else(PoisonError::into_inner) = lines;
            return;
        }
        *self.origin.lines.write().unwrap_or_else(PoisonError::into_inner) = lines;
        self.origin.damaged_here.store(0, Ordering::Relaxed);
        self.unclaim_all();
        if again {
            for place in self.waiting() {
                self.want(place, 0);
            }
        }
    }

    /// Asks for a page and what lacks of its unit, as far as that was not done already: each as a page that somebody waits
    /// for, because what is only asked for ahead stays behind at the source when there is another request.
    fn want(&self, place: Place, ahead: u16) {
        let unit = self.unit(place);
        if unit.end - unit.start == 1 {
            return self.ask(place, ahead, false);
        }
        let region = place.region;
        let asked = |page: &u64| {
            let place = Place { region, page: *page };
            self.lacks(place) && self.claim(place)
        };
        let pages: Vec<u64> = unit.filter(asked).collect();
        self.send_requests(region, &pages, (0, false));
    }

    /// Asks for a page, unless that was done already.
    fn ask(&self, place: Place, ahead: u16, again: bool) {
        if self.claim(place) || again {
            self.send_requests(place.region, &[place.page], (ahead, again));
        }
    }

    /// Asks for `pages`, of one stripe. A line that fails is found broken by whoever reads it, and then they are asked for
    /// again on the next.
    fn send_requests(&self, position: usize, pages: &[u64], (ahead, again): (u16, bool)) {
        let Some(first) = pages.first() else { return };
        let region = self.region(position);
        let stripe = self.memory.stripe_of(region, PageIndex(*first));
        let lines = self.origin.lines.read().unwrap_or_else(PoisonError::into_inner);
        let line = lines.get(stripe % lines.len().max(1)).cloned();
        // Not held while something is sent: whoever ends the lines must not wait for that.
        drop(lines);
        let Some(line) = line else {
            // The link is down: whoever waits is asked for when it is up again.
            pages.iter().for_each(|page| self.unclaim(Place { region: position, page: *page }));
            return;
        };
        self.count_requests(pages.len() as u64);
        let request = |page: &u64| Request::Page { region, page: PageIndex(*page), ahead, again }.encode();
        let sent = match pages {
            [page] => line.ask(&request(page), ONE),
            // Of a huge page that the source is slow to send it takes the requests as slowly.
            pages => line.ask(&pages.iter().flat_map(request).collect::<Vec<_>>(), MANY),
        };
        if let Err(error) = sent {
            let count = pages.len();
            tracing::warn!("{count} pages of {region} from {first:#x} could not be asked for: {error}");
            // Half a request may have left: nothing that follows could be understood.
            line.stream.shutdown();
        }
    }

    /// Pages with content: those that match their digest are placed, run by run; the others are asked for again.
    fn take_pages(
        &self,
        region: usize,
        run: PageRun,
        contents: &[u8],
        digests: &mut impl Iterator<Item = PageDigest>,
    ) -> Result<bool, ReceiveError> {
        let mut last = false;
        let mut sound = run.first.0..run.first.0;
        for (page, content) in run.range().zip(contents.chunks_exact(PAGE_BYTES)) {
            let digest = digests.next();
            if digest == Some(PageDigest::of(content)) {
                sound.end = page + 1;
                continue;
            }
            last |= self.place_sound(region, run, sound, contents)?;
            sound = page + 1..page + 1;
            self.damaged(Place { region, page })?;
        }
        last |= self.place_sound(region, run, sound, contents)?;
        Ok(last)
    }

    fn place_sound(
        &self,
        region: usize,
        run: PageRun,
        pages: Range<u64>,
        contents: &[u8],
    ) -> Result<bool, ReceiveError> {
        if pages.is_empty() {
            return Ok(false);
        }
        let byte =
            |page: u64| usize::try_from(page - run.first.0).unwrap_or(usize::MAX).saturating_mul(PAGE_BYTES);
        let bytes = contents.get(byte(pages.start)..byte(pages.end)).ok_or(TABLE)?;
        Ok(self.place_run(region, pages.into(), bytes)?)
    }

    fn damaged(&self, place: Place) -> Result<(), ReceiveError> {
        self.count_damaged();
        if self.origin.damaged_here.fetch_add(1, Ordering::Relaxed) >= MOST_DAMAGED {
            return Err(WireError::Damaged { what: "content of thousands of pages" }.into());
        }
        self.ask(place, 0, true);
        Ok(())
    }
}
