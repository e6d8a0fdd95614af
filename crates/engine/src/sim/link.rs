//! The simulated link: streams that keep their order, take their time, and end when the link is cut.

use super::rng::Rng;
use std::collections::VecDeque;
use vmferry_wire::{ToSource, ToTarget, Token};

/// One page as it travels: what the source read for its digest, and what it read when it sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct SentPage {
    pub(super) page: usize,
    pub(super) digest: u64,
    pub(super) content: u64,
}

/// A page that somebody waits for at the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) page: usize,
    pub(super) ahead: usize,
    pub(super) again: bool,
}

/// What a stream carries.
#[derive(Debug)]
pub(super) enum Cargo {
    /// A channel's hello, with the token that it was given.
    Hello(Token),
    /// The hello of a control channel that takes up a lost link.
    Back,
    /// The target's answer to that.
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
    /// Its size on the wire, about.
    fn bytes(&self) -> u64 {
        match self {
            Self::Pages(pages) => 64 + pages.len() as u64 * 4096,
            Self::Digests(digests) => 64 + digests.len() as u64 * 8,
            _ => 64,
        }
    }
}

/// A stream's bytes under way, each with the time of its arrival; arrivals never decrease.
#[derive(Debug, Default)]
pub(super) struct Wire {
    pub(super) under_way: VecDeque<(u64, Cargo)>,
    last: u64,
    /// When all that was sent so far will have left, at the stream's share of the bandwidth.
    left: u64,
}

impl Wire {
    /// Sends; returns when it arrives. `rate` is in bytes a microsecond, if the bandwidth is limited.
    pub(super) fn send(&mut self, now: u64, rng: &mut Rng, rate: Option<u64>, cargo: Cargo) -> u64 {
        self.left = self.left.max(now) + rate.map_or(0, |rate| cargo.bytes() / rate);
        self.last = self.last.max(self.left + rng.latency(400));
        self.under_way.push_back((self.last, cargo));
        self.last
    }

    /// What has arrived by `now`, one at a time.
    pub(super) fn arrive(&mut self, now: u64) -> Option<Cargo> {
        if self.under_way.front().is_none_or(|(at, _)| *at > now) {
            return None;
        }
        self.under_way.pop_front().map(|(_, cargo)| cargo)
    }

    /// What is under way takes so much longer; returns when it arrives.
    pub(super) fn delay(&mut self, by: u64) -> Vec<u64> {
        self.last += by;
        self.left += by;
        self.under_way.iter_mut().for_each(|(at, _)| *at += by);
        self.under_way.iter().map(|(at, _)| *at).collect()
    }

    /// The link is cut: some of what was under way still arrives, the rest is lost.
    pub(super) fn cut(&mut self, rng: &mut Rng) {
        let kept = rng.index(self.under_way.len() + 1);
        self.under_way.truncate(kept);
    }
}
