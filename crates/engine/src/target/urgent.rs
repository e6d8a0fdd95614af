//! Missing pages that arrive over a link. They are requested on urgent channels, and received on
//! any channel.

use super::decode::{FramePages, SegmentDecoder};
use super::frames::FrameSource;
use super::receiver::ReceiveError;
use crate::channel::{IoBuf, Stream};
use crate::demand::{self, MissingSet, PageLocation, PageSource};
use crate::known::PageHash;
use crate::sync::{AtomicU64, RwLock};
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use vmferry_codec::Page;
use vmferry_core::{PAGE_BYTES, PageDigest, PageIndex, PageRun, RegionId};
use vmferry_wire::{MAX_FRAME_PAGES, Request, RunKind, Table, WireError};

/// Maximum number of pages with a digest mismatch that are requested again. If there are more, the
/// link is given up.
const MOST_DAMAGED: u64 = 10_000;

/// Time within which the source must accept one request. The next constant is the time for all
/// requests of a huge page.
const ONE: Duration = Duration::from_secs(1);
const MANY: Duration = Duration::from_secs(10);

/// Error for a table that does not fit its frame. Decoding has already checked this.
pub(super) const TABLE: WireError = WireError::Damaged { what: "table of a frame" };

/// Demand paging whose pages arrive over a link.
pub(crate) type DemandPager = demand::DemandPager<UrgentChannels>;

/// Urgent channel, to send requests on.
#[derive(Debug)]
pub(crate) struct UrgentChannel {
    stream: Arc<Stream>,
    /// Lock for writes: a request is one write, and several fault threads may share a channel.
    turn: Mutex<()>,
}

impl UrgentChannel {
    pub(crate) fn new(stream: Arc<Stream>) -> Self {
        Self { stream, turn: Mutex::new(()) }
    }

    /// Sends whole requests.
    fn send(&self, requests: &[u8], within: Duration) -> io::Result<()> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.stream.send_bytes_within(requests, within).map_err(|failed| failed.error)
    }
}

/// Urgent channels: the source of missing pages that arrive over a link.
#[derive(Debug, Default)]
pub(crate) struct UrgentChannels {
    /// Channels for requests. Empty while the link is down.
    channels: RwLock<Vec<Arc<UrgentChannel>>>,
    /// Number of pages that arrived on these channels with a digest mismatch.
    mismatches_here: AtomicU64,
    /// True if processors are kept awake while there are channels.
    stay_awake: bool,
}

impl PageSource for UrgentChannels {
    type Local = ();

    fn local(&self) {}

    /// Requests a page and the missing pages of its unit, except for pages that were already
    /// requested. Each page is requested as one that a thread waits for, because the source sends
    /// pages that are only requested ahead after other requests.
    fn fetch(&self, pages: &MissingSet, (): &mut (), place: PageLocation, ahead: u16) {
        let unit = pages.unit(place);
        if unit.end - unit.start == 1 {
            if pages.claim(place) {
                self.request(pages, place.region, &[place.page], (ahead, false));
            }
            return;
        }
        let region = place.region;
        let claimed = |page: &u64| {
            let place = PageLocation { region, page: *page };
            pages.is_missing(place) && pages.claim(place)
        };
        let unit: Vec<u64> = unit.filter(claimed).collect();
        self.request(pages, region, &unit, (0, false));
    }
}

impl UrgentChannels {
    /// Returns an empty set of channels.
    pub(crate) fn new(stay_awake: bool) -> Self {
        Self { stay_awake, ..Self::default() }
    }

    /// Returns true if processors are kept awake while there are channels.
    pub(crate) fn stay_awake(&self) -> bool {
        self.stay_awake
    }

    /// Sends requests on `channels` from now on. If `channels` is empty, the link is down. Earlier
    /// requests are dropped, because their channels are gone, and each page that a thread waits for
    /// is requested again.
    pub(crate) fn replace(&self, pages: &MissingSet, channels: Vec<Arc<UrgentChannel>>) {
        let up = !channels.is_empty();
        #[cfg(test)]
        if pages.flaw == demand::Flaw::AsksBeforeChannels {
            pages.waiting().into_iter().for_each(|place| self.fetch(pages, &mut (), place, 0));
            *self.channels.write().unwrap_or_else(PoisonError::into_inner) = channels;
            return;
        }
        *self.channels.write().unwrap_or_else(PoisonError::into_inner) = channels;
        self.mismatches_here.store(0, Ordering::Relaxed);
        pages.unclaim_all();
        if up {
            for place in pages.waiting() {
                self.fetch(pages, &mut (), place, 0);
            }
        }
    }

    /// Requests the pages `wanted`, which must all be of one shard. If the channel fails, the
    /// thread that reads from it notices the failure, and the pages are requested again over the
    /// next link.
    fn request(&self, pages: &MissingSet, position: usize, wanted: &[u64], (ahead, again): (u16, bool)) {
        let Some(first) = wanted.first() else { return };
        let region = pages.region(position);
        let shard = pages.memory.shard_of(region, PageIndex(*first));
        let channels = self.channels.read().unwrap_or_else(PoisonError::into_inner);
        let channel = channels.get(shard % channels.len().max(1)).cloned();
        // The lock is released before sending: the thread that replaces the channels must not wait
        // for a send.
        drop(channels);
        let Some(channel) = channel else {
            // The link is down. Pages that a thread waits for are requested when the link is up
            // again.
            wanted.iter().for_each(|page| pages.unclaim(PageLocation { region: position, page: *page }));
            return;
        };
        pages.count_requests(wanted.len() as u64);
        let request = |page: &u64| Request::Page { region, page: PageIndex(*page), ahead, again }.encode();
        let sent = match wanted {
            [page] => channel.send(&request(page), ONE),
            // The limit for a huge page is longer, because a source that sends the huge page slowly
            // also reads the requests slowly.
            wanted => channel.send(&wanted.iter().flat_map(request).collect::<Vec<_>>(), MANY),
        };
        if let Err(error) = sent {
            let count = wanted.len();
            tracing::warn!("{count} pages of {region} from {first:#x} could not be requested: {error}");
            // A part of a request may have been sent, and the source could not parse anything after
            // that part.
            channel.stream.shutdown();
        }
    }

    /// Requests a page again that arrived with a digest mismatch.
    fn digest_mismatch(&self, pages: &MissingSet, place: PageLocation) -> Result<(), ReceiveError> {
        pages.count_digest_mismatch();
        if self.mismatches_here.fetch_add(1, Ordering::Relaxed) >= MOST_DAMAGED {
            return Err(WireError::Damaged { what: "content of thousands of pages" }.into());
        }
        // The page stays claimed, unless a new link removed all claims.
        pages.claim(place);
        self.request(pages, place.region, &[place.page], (0, true));
        Ok(())
    }
}

/// Buffer of a channel for pages that are not checked yet. The buffer is needed because bytes
/// cannot be received directly into the memory of missing pages.
#[derive(Debug, Default)]
pub(crate) struct Stager {
    /// Allocated at the first frame, with the size of the largest frame.
    bytes: Vec<u8>,
}

impl Stager {
    /// Receives the contents of a frame from `source`, and places them. Returns true if the frame
    /// has delivered the last missing page.
    pub(super) fn take(
        &mut self,
        pager: &DemandPager,
        region: RegionId,
        table: &Table<'_>,
        (source, decoder): (&impl FrameSource, &mut SegmentDecoder),
    ) -> Result<bool, ReceiveError> {
        self.bytes.resize(MAX_FRAME_PAGES * PAGE_BYTES, 0);
        let position = pager.pages.position(region);
        let position = position.ok_or(WireError::Field {
            what: "region",
            value: region.0.into(),
            allowed: "one of the layout",
        })?;
        let pages = table.digests().count();
        let contents = self.bytes.get_mut(..pages * PAGE_BYTES).ok_or(TABLE)?;
        if table.is_encoded() {
            decoder.receive(table, source, &mut Staged(contents))?;
        } else {
            source.fill(&mut [IoBuf::from_bytes_mut(contents)])?;
        }
        let (mut contents, mut digests, mut last) = (&*contents, table.digests(), false);
        for entry in table.runs() {
            last |= match entry.kind {
                RunKind::Zero => pager.pages.take_zeros(position, entry.run),
                RunKind::Data => {
                    let bytes = usize::try_from(entry.run.bytes()).unwrap_or(usize::MAX);
                    let (own, rest) = contents.split_at_checked(bytes).ok_or(TABLE)?;
                    contents = rest;
                    pager.take_pages(position, entry.run, own, &mut digests)?
                }
            };
        }
        Ok(last)
    }
}

/// Pages of a frame with encoded content, in the buffer of a [`Stager`].
struct Staged<'a>(&'a mut [u8]);

impl FramePages for Staged<'_> {
    /// Returns an error, because the target has dropped the content of missing pages.
    fn before(&self, position: usize, _: &mut Page) -> Result<(), WireError> {
        let (what, allowed) = ("delta of a missing page", "none after the handover");
        Err(WireError::Field { what, value: position as u64, allowed })
    }

    /// Returns an error, because hashes are sent in the first pass only.
    fn find(&mut self, wanted: &[(usize, PageHash)], _: &mut [Page]) -> Result<Vec<bool>, WireError> {
        let (what, allowed) = ("hashes of missing pages", "none after the handover");
        Err(WireError::Field { what, value: wanted.len() as u64, allowed })
    }

    fn put(&mut self, position: usize, content: &Page) -> Result<(), ReceiveError> {
        let (pages, _) = self.0.as_chunks_mut();
        *pages.get_mut(position).ok_or(TABLE)? = *content;
        Ok(())
    }
}

impl DemandPager {
    /// Takes pages with content. Places those that match their digest, run by run, and requests the
    /// others again.
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
            self.source.digest_mismatch(&self.pages, PageLocation { region, page })?;
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
        Ok(self.pages.place_run(region, pages.into(), bytes)?)
    }
}
