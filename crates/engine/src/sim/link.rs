//! Simulated link: streams that keep their order, have delays, and end when the link is cut.

use super::rng::Rng;
use std::collections::VecDeque;
use vmferry_wire::{ToSource, ToTarget, Token};

/// Page in transit: the content that the source read for its digest, and the content that it read
/// for the send.
#[derive(Debug, Clone)]
pub(super) struct SentPage {
    pub(super) page: usize,
    pub(super) digest: u64,
    pub(super) content: u64,
    /// True if the link damaged the content.
    pub(super) damaged: bool,
    /// Delta that is sent instead of the content.
    pub(super) delta: Option<Vec<u8>>,
}

/// Request for a page that a thread of the target waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) page: usize,
    pub(super) ahead: usize,
    pub(super) again: bool,
}

/// Cargo of a stream.
#[derive(Debug)]
pub(super) enum Cargo {
    /// Hello of a channel, with its token.
    Hello(Token),
    /// Hello of a control channel that takes up a lost link.
    Back,
    /// The target's answer to that hello.
    Reply(bool),
    Request(Request),
    ToTarget(ToTarget),
    ToSource(ToSource),
    Pages(Vec<SentPage>),
    Digests(Vec<(usize, u64)>),
    Barrier(u32),
    Eof,
}

impl Cargo {
    /// Returns the approximate size on the wire.
    fn bytes(&self) -> u64 {
        match self {
            Self::Pages(pages) => 64 + pages.len() as u64 * 4096,
            Self::Digests(digests) => 64 + digests.len() as u64 * 8,
            _ => 64,
        }
    }
}

/// Stream of cargo in transit, each with its time of arrival. Arrival times never decrease.
#[derive(Debug, Default)]
pub(super) struct Wire {
    pub(super) under_way: VecDeque<(u64, Cargo)>,
    last: u64,
    /// Time at which everything sent so far has left, at the stream's share of the bandwidth.
    left: u64,
}

impl Wire {
    /// Sends `cargo`. Returns its time of arrival. `rate` is in bytes per microsecond, if the
    /// bandwidth is limited.
    pub(super) fn send(&mut self, now: u64, rng: &mut Rng, rate: Option<u64>, cargo: Cargo) -> u64 {
        self.left = self.left.max(now) + rate.map_or(0, |rate| cargo.bytes() / rate);
        self.last = self.last.max(self.left + rng.latency(400));
        self.under_way.push_back((self.last, cargo));
        self.last
    }

    /// Returns the next cargo that has arrived by `now`.
    pub(super) fn arrive(&mut self, now: u64) -> Option<Cargo> {
        if self.under_way.front().is_none_or(|(at, _)| *at > now) {
            return None;
        }
        self.under_way.pop_front().map(|(_, cargo)| cargo)
    }

    /// Delays all cargo in transit. Returns the times of arrival.
    pub(super) fn delay(&mut self, by: u64) -> Vec<u64> {
        self.last += by;
        self.left += by;
        self.under_way.iter_mut().for_each(|(at, _)| *at += by);
        self.under_way.iter().map(|(at, _)| *at).collect()
    }

    /// Cuts the link: some of the cargo in transit still arrives, the rest is lost.
    pub(super) fn cut(&mut self, rng: &mut Rng) {
        let kept = rng.index(self.under_way.len() + 1);
        self.under_way.truncate(kept);
    }
}
