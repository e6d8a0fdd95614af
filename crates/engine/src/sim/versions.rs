//! Deltas in the simulation: the cache of versions and the deltas of production, on pages whose
//! content is a number.

use super::link::SentPage;
use super::world::{Defect, World};
use crate::source::encode::{LONGEST_DELTA, Versions};
use crate::source::sender::PassKind;
use vmferry_codec::{Delta, Page};
use vmferry_core::PAGE_BYTES;

/// Memory for the versions of a channel in bytes: enough for all pages of the guest.
const CACHE_BYTES: usize = 1 << 20;

/// Number of different words in a page.
const WORDS: u64 = 256;

/// Content of a page after a delta that does not fit.
const WRONG: u64 = u64::MAX / 3;

/// Returns the page with the number `content`. Each word keeps the last number that was its turn,
/// so the delta between two numbers that are less than [`WORDS`] apart does not change all words. A
/// delta against another version than the target's gives a page of no number.
fn page_of(content: u64) -> Page {
    let mut page = [0; PAGE_BYTES];
    if content != 0 {
        for (word, turn) in page.as_chunks_mut::<8>().0.iter_mut().zip(0..WORDS) {
            let since = content.wrapping_sub(turn) % WORDS;
            *word = content.wrapping_sub(since).to_le_bytes();
        }
    }
    page
}

/// Returns the content after `delta` was applied to a page with the content `before`: `expected` if
/// it fits.
fn apply(delta: &[u8], before: u64, expected: u64) -> u64 {
    let (delta, rest) = Delta::parse(delta).expect("the delta is valid");
    assert!(rest.is_empty(), "one page has one delta");
    let mut page = page_of(before);
    delta.apply(&mut page);
    if page == page_of(expected) { expected } else { WRONG }
}

/// Returns the versions of each channel, or none if the migration has no deltas.
pub(super) fn of_channels(channels: u16, deltas: bool) -> Vec<Versions> {
    if deltas { (0..channels).map(|_| Versions::new(CACHE_BYTES)).collect() } else { Vec::new() }
}

impl World {
    /// Begins a pass for the versions of each channel.
    pub(super) fn versions_begin_pass(&mut self, kind: PassKind) {
        let kind = match kind {
            PassKind::Again if self.defect == Defect::KeepsVersions => PassKind::Later,
            kind => kind,
        };
        self.source.versions.iter_mut().for_each(|versions| versions.begin_pass(kind));
    }

    /// Reads the prepared page for a pass. If the frame has deltas, its pages were copied when they
    /// were prepared.
    pub(super) fn read_for_pass(&mut self, channel: usize, prepared: (usize, u64), deltas: bool) -> SentPage {
        let mut sent = self.read(prepared);
        let Some(versions) = self.source.versions.get_mut(channel) else { return sent };
        let (page, digest) = (sent.page as u64, sent.digest);
        if !deltas || digest == 0 {
            if self.defect != Defect::RemembersWhole {
                versions.forget(page);
            }
            return sent;
        }
        let delta = versions.send(page, &page_of(digest), LONGEST_DELTA);
        if !sent.damaged {
            sent.content = digest;
        }
        sent.delta = delta.map(<[u8]>::to_vec);
        let again = self.source.jobs[channel].again && sent.delta.is_some();
        self.promise(!again, |_| format!("page {page} was sent again as a delta"));
        sent
    }

    /// Returns the content of a page that arrived during a pass.
    pub(super) fn decode(&mut self, sent: &SentPage) -> u64 {
        let Some(delta) = sent.delta.as_ref().filter(|_| !sent.damaged) else { return sent.content };
        self.target.deltas += 1;
        let content = apply(delta, self.target.pages[sent.page], sent.digest);
        // A damaged page is a version that the source does not know.
        let fits = content == sent.digest || self.target.mismatched[sent.page];
        self.promise(fits, |_| format!("page {}: a delta against another version", sent.page));
        content
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deltas_fit_only_the_version_that_they_were_made_for() {
        let mut versions = Versions::new(CACHE_BYTES);
        versions.begin_pass(PassKind::First);
        assert!(versions.send(3, &page_of(70), LONGEST_DELTA).is_none());
        versions.begin_pass(PassKind::Later);
        let delta = versions.send(3, &page_of(90), LONGEST_DELTA).unwrap().to_vec();
        assert_eq!(apply(&delta, 70, 90), 90);
        for other in [0, 1, 69, 91, 1 << 20, u64::MAX - 5] {
            assert_eq!(apply(&delta, other, 90), WRONG, "{other}");
        }
    }
}
