//! Hashes of pages, which the source sends to a target with [known pages](crate::known).
//!
//! In the first pass, a frame may contain hashes instead of contents. The target looks them up, and
//! answers each such frame with the pages that it does not know. The sender sends the content of
//! these pages on the same channel, before its barrier of the pass.
//!
//! # Why no page is lost
//! 1. [`AnswerQueue`] has an entry for each frame with hashes, from before the frame is sent until
//!    the sender has taken the answer to the frame.
//! 2. The sender ends its pass only when the queue has no entry. If the target does not answer in
//!    time, [`close`](AnswerQueue::close) returns all pages of the frames without an answer, and
//!    the sender sends all of them.
//! 3. An answer names pages only by their position in a frame. Therefore a target cannot name a
//!    page whose hash it was not sent.
//! 4. The content of an unknown page is read after the page was protected, as in the rest of the
//!    pass. A later harvest finds each write that this content may lack.
//! 5. If an answer were wrong or lost nevertheless, the target still counts the page as a page with
//!    a digest mismatch, which must arrive again before the guest is loaded.
//!
//! # Deltas
//! The target's version of a page whose hash was sent is not kept for deltas, because the target
//! may not have that version.

use crate::handle::thread_cpu;
use crate::known::PageHash;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use vmferry_core::{PageRun, RegionId};
use vmferry_wire::{HASH_BYTES, MAX_FRAME_PAGES};

/// Number of pages whose hashes are sent before the share of known pages is judged.
const SAMPLE: u64 = 1024;
/// Smallest and largest number of pages that are sent with their content before the next sample,
/// while the target knows too few pages. In between, it is one part in [`PAUSE_PART`] of the pages
/// that were sent since the target last knew enough of them.
///
/// The pages that a guest has changed often lie side by side, so a single sample says little about
/// the pages behind it. The pages behind the changed ones are known, so a long pause sends contents
/// in vain. A hash takes 1/100 of the bytes of a page, so short pauses cost little.
const FIRST_PAUSE: u64 = 256;
const PAUSE: u64 = 16 << 10;
const PAUSE_PART: u64 = 16;
/// Number of pages of a sample after a pause.
const LATER_SAMPLE: u64 = MAX_FRAME_PAGES as u64;
/// Number of answered pages after which older answers count half.
const MEMORY: u64 = 4 * SAMPLE;
/// Smallest share of known pages with which hashes are sent, as a divisor. A hash takes 1/100 of
/// the bytes of a page, but the processor time of source and target as well.
const SHARE: u64 = 8;
/// Maximum number of frames with hashes that have no answer. Their entries take less than 5 MiB.
const MOST_FRAMES: usize = 1024;
/// Time for which a sender waits in a migration until the share is known for the first time. After
/// that, it sends contents until the answers arrive, except for short waits ([`LATER_PATIENCE`]).
///
/// A target without an idle processor may need more than 100 ms for its first answer. In this time,
/// a link of 1 Gb/s carries 3,000 pages, and the target probably knows most of them.
const PATIENCE: Duration = Duration::from_millis(500);
/// Total time for which a sender waits for the answers to later samples. The link is mostly busy
/// with the contents before the sample during such a wait.
const LATER_PATIENCE: Duration = Duration::from_millis(100);
/// Interval at which a waiting sender checks whether it must stop.
const LOOK: Duration = Duration::from_millis(20);

/// Frame with hashes to which the target has not answered.
#[derive(Debug)]
struct Asked {
    frame: u64,
    region: RegionId,
    /// Pages whose hashes the frame contains, in the order of its table.
    runs: Vec<PageRun>,
}

impl Asked {
    fn pages(&self) -> u64 {
        self.runs.iter().map(|run| run.count).sum()
    }

    /// Returns the pages whose positions are set in `unknown`, as runs.
    fn chosen(&self, unknown: &[u8]) -> Vec<PageRun> {
        let is_set = |at: usize| unknown.get(at / 8).is_some_and(|byte| byte >> (at % 8) & 1 == 1);
        let mut chosen: Vec<Range<u64>> = Vec::new();
        let pages = self.runs.iter().flat_map(|run| run.range());
        for page in pages.enumerate().filter(|(at, _)| is_set(*at)).map(|(_, page)| page) {
            match chosen.last_mut() {
                Some(last) if last.end == page => last.end += 1,
                _ => chosen.push(page..page + 1),
            }
        }
        chosen.into_iter().map(PageRun::from).collect()
    }
}

/// Pages that the target does not know. The sender must send their content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unknown {
    pub(super) region: RegionId,
    pub(super) runs: Vec<PageRun>,
}

impl Unknown {
    /// Returns the number of pages.
    pub(super) fn pages(&self) -> u64 {
        self.runs.iter().map(|run| run.count).sum()
    }
}

/// Answer of the target to one frame.
#[derive(Debug)]
struct Answered {
    /// Number of pages whose hashes were in the frame.
    pages: u64,
    unknown: Unknown,
}

#[derive(Debug, Default)]
struct Queue {
    /// Frames without an answer, in the order in which they were sent.
    asked: VecDeque<Asked>,
    /// Answers that the sender has not taken.
    answered: VecDeque<Answered>,
    /// True if the sender waits for no answer any more.
    closed: bool,
}

/// Frames with hashes of a bulk channel, and the target's answers to them.
///
/// The channel's sender adds the frames and takes the answers. The driver delivers the answers.
#[derive(Debug, Default)]
pub(crate) struct AnswerQueue {
    queue: Mutex<Queue>,
    arrived: Condvar,
}

impl AnswerQueue {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Every change of the queue is complete when the lock is released, also after a panic.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a frame that is about to be sent.
    fn ask(&self, asked: Asked) {
        let mut queue = self.lock();
        assert!(!queue.closed, "no hashes are sent after the first pass");
        queue.asked.push_back(asked);
    }

    /// Returns the number of frames without an answer.
    fn open_frames(&self) -> usize {
        self.lock().asked.len()
    }

    /// Takes the answer of the target to `frame`. Bit `i % 8` of byte `i / 8` of `unknown` stands
    /// for position `i` of the frame. Answers that arrive after the queue was closed are ignored.
    ///
    /// Returns an error if this is not the oldest frame without an answer, or if the frame has no
    /// page at a position that is set, because the peer can send anything.
    pub(crate) fn deliver(&self, frame: u64, unknown: &[u8]) -> Result<(), String> {
        let mut queue = self.lock();
        if queue.closed {
            return Ok(());
        }
        let Some(asked) = queue.asked.front().filter(|asked| asked.frame == frame) else {
            return Err(format!(
                "the target answers to frame {frame}, which is not the next one with hashes"
            ));
        };
        let (pages, region, runs) = (asked.pages(), asked.region, asked.chosen(unknown));
        let named: u64 = unknown.iter().map(|byte| u64::from(byte.count_ones())).sum();
        if named != runs.iter().map(|run| run.count).sum::<u64>() {
            return Err(format!("the target names pages of frame {frame} that are not in it"));
        }
        queue.asked.pop_front();
        queue.answered.push_back(Answered { pages, unknown: Unknown { region, runs } });
        drop(queue);
        self.arrived.notify_all();
        Ok(())
    }

    /// Takes the answers that have arrived. If there are none, but frames without an answer, waits
    /// for an answer for at most `within`.
    fn take(&self, within: Duration) -> VecDeque<Answered> {
        let mut queue = self.lock();
        if !within.is_zero() {
            let waits = |queue: &mut Queue| queue.answered.is_empty() && !queue.asked.is_empty();
            let waited = self.arrived.wait_timeout_while(queue, within, waits);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        std::mem::take(&mut queue.answered)
    }

    /// Closes the queue, and counts all pages of frames without an answer as unknown. Returns the
    /// answers that were not taken, with those of these frames.
    fn close(&self) -> VecDeque<Answered> {
        let mut queue = self.lock();
        queue.closed = true;
        let mut answered = std::mem::take(&mut queue.answered);
        answered.extend(std::mem::take(&mut queue.asked).into_iter().map(|asked| Answered {
            pages: asked.pages(),
            unknown: Unknown { region: asked.region, runs: asked.runs },
        }));
        answered
    }
}

/// Queues of all bulk channels of a migration.
#[derive(Debug)]
pub(crate) struct Answers(Vec<AnswerQueue>);

impl Answers {
    pub(crate) fn new(channels: u16) -> Self {
        Self((0..channels).map(|_| AnswerQueue::default()).collect())
    }

    pub(crate) fn channel(&self, index: u16) -> Option<&AnswerQueue> {
        self.0.get(usize::from(index))
    }

    /// Delivers an answer to the sender of `channel`.
    pub(crate) fn deliver(&self, channel: u16, frame: u64, unknown: &[u8]) -> Result<(), String> {
        let queue = self.channel(channel);
        let queue = queue
            .ok_or_else(|| format!("the target answers on bulk channel {channel}, which does not exist"))?;
        queue.deliver(frame, unknown)
    }
}

/// Content of the next frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Hashes,
    Contents,
    /// Hashes or contents, which depends on answers that are about to arrive.
    Unclear,
}

/// Choice between hashes and contents, by the share of known pages in the last answers.
#[derive(Debug, Default)]
struct HashChoice {
    /// Pages of frames with hashes that have no answer.
    open: u64,
    /// Pages of the last answers, and how many of them were unknown.
    answered: u64,
    unknown: u64,
    /// Pages to send with their contents before the next sample.
    pause: u64,
    /// Pages of samples and pauses since the target last knew enough pages.
    fruitless: u64,
    /// True after the first pause.
    resampled: bool,
}

impl HashChoice {
    fn sample(&self) -> u64 {
        if self.resampled { LATER_SAMPLE } else { SAMPLE }
    }

    fn next(&mut self) -> Next {
        if self.pause > 0 {
            return Next::Contents;
        }
        let sample = self.sample();
        if self.answered < sample {
            return if self.answered + self.open < sample { Next::Hashes } else { Next::Unclear };
        }
        if (self.answered - self.unknown) * SHARE >= self.answered {
            self.fruitless = 0;
            return Next::Hashes;
        }
        self.fruitless += self.answered;
        (self.pause, self.resampled) = ((self.fruitless / PAUSE_PART).clamp(FIRST_PAUSE, PAUSE), true);
        self.fruitless += self.pause;
        (self.answered, self.unknown) = (0, 0);
        Next::Contents
    }

    fn asked(&mut self, pages: u64) {
        self.open += pages;
    }

    fn sent_contents(&mut self, pages: u64) {
        self.pause = self.pause.saturating_sub(pages);
    }

    fn answered(&mut self, pages: u64, unknown: u64) {
        assert!(unknown <= pages && pages <= self.open, "an answer is for pages that were asked for");
        self.open -= pages;
        // Answers to frames from before the pause do not belong to the sample after it.
        if self.pause > 0 {
            return;
        }
        self.answered += pages;
        self.unknown += unknown;
        if self.answered > MEMORY {
            (self.answered, self.unknown) = (self.answered / 2, self.unknown / 2);
        }
    }
}

/// Hashes of the pages of a frame.
#[derive(Debug)]
pub(super) struct HashFrame {
    /// Hashes, one after the other.
    pub(super) hashes: Vec<u8>,
    /// CPU time of the frame. While the frame is being built, the CPU time of the thread before it.
    pub(super) cpu: Duration,
}

/// Hashes of the pages of a bulk channel.
#[derive(Debug)]
pub(crate) struct HashSender<'a> {
    queue: &'a AnswerQueue,
    choice: HashChoice,
    /// Time for which the sender may still wait for answers without which it cannot choose.
    patience: Duration,
    /// Time for which the sender waits for an answer at the end of the pass.
    longest: Duration,
    /// Hashes of the frame that is being built. `None` if the frame has contents.
    frame: Option<HashFrame>,
    /// Pages to send with their content.
    unknown: Vec<Unknown>,
}

impl<'a> HashSender<'a> {
    /// Returns the sender for a target that answers within `longest`.
    pub(crate) fn new(queue: &'a AnswerQueue, longest: Duration) -> Self {
        let (choice, unknown) = (HashChoice::default(), Vec::new());
        Self { queue, choice, patience: PATIENCE, longest, frame: None, unknown }
    }

    /// Begins a frame, and decides whether it contains hashes.
    pub(super) fn begin_frame(&mut self) {
        self.take_answers(Duration::ZERO);
        let full = self.queue.open_frames() >= MOST_FRAMES;
        let mut next = self.choice.next();
        while next == Next::Unclear && !self.patience.is_zero() {
            let began = Instant::now();
            self.take_answers(self.patience);
            self.patience = self.patience.saturating_sub(began.elapsed());
            next = self.choice.next();
        }
        if self.choice.resampled {
            self.patience = self.patience.min(LATER_PATIENCE);
        }
        self.frame = (next == Next::Hashes && !full).then(|| HashFrame {
            hashes: Vec::with_capacity(MAX_FRAME_PAGES * HASH_BYTES),
            cpu: thread_cpu(),
        });
    }

    /// Returns true if the frame contains hashes.
    pub(super) fn hashes(&self) -> bool {
        self.frame.is_some()
    }

    /// Adds the hash of the frame's next page with a digest.
    pub(super) fn add(&mut self, hash: PageHash) {
        assert!(self.hashes(), "the frame contains hashes");
        self.frame.iter_mut().for_each(|frame| frame.hashes.extend(hash.0));
    }

    /// Returns the hashes of the frame. Empty if the frame contains contents, or no page with a
    /// digest.
    pub(super) fn frame(&self) -> &[u8] {
        self.frame.as_ref().map(|frame| &*frame.hashes).unwrap_or_default()
    }

    /// Records that the frame is about to be sent as number `number`, with the hashes of the pages
    /// of `runs`. Returns the hashes, or `None` if the frame contains contents.
    pub(super) fn ask(&mut self, number: u64, region: RegionId, runs: Vec<PageRun>) -> Option<HashFrame> {
        let HashFrame { hashes, cpu } = self.frame.take()?;
        let asked = Asked { frame: number, region, runs };
        assert_eq!(asked.pages() * HASH_BYTES as u64, hashes.len() as u64, "each page has a hash");
        self.choice.asked(asked.pages());
        self.queue.ask(asked);
        Some(HashFrame { hashes, cpu: thread_cpu().saturating_sub(cpu) })
    }

    /// Records that a frame with the contents of `pages` pages was sent.
    pub(super) fn sent_contents(&mut self, pages: u64) {
        self.choice.sent_contents(pages);
        self.frame = None;
    }

    /// Takes the answers that have arrived, or waits for one for at most `within`.
    fn take_answers(&mut self, within: Duration) {
        let answers = self.queue.take(within);
        self.learn(answers);
    }

    fn learn(&mut self, answers: VecDeque<Answered>) {
        for Answered { pages, unknown } in answers {
            let count = unknown.pages();
            self.choice.answered(pages, count);
            if count > 0 {
                self.unknown.push(unknown);
            }
        }
    }

    /// Takes the pages that the target is known not to know, if they fill at least one frame.
    pub(super) fn take_unknown(&mut self) -> Vec<Unknown> {
        self.take_answers(Duration::ZERO);
        if self.unknown.iter().map(Unknown::pages).sum::<u64>() < MAX_FRAME_PAGES as u64 {
            return Vec::new();
        }
        std::mem::take(&mut self.unknown)
    }

    /// Takes pages at the end of the pass, when all frames have been sent. Waits for answers.
    /// Returns `None` when the target knows all other pages, or if `stop` returns true.
    ///
    /// If no answer arrives within the time limit, all pages without an answer count as unknown.
    pub(super) fn take_last(&mut self, stop: impl Fn() -> bool) -> Option<Vec<Unknown>> {
        let began = Instant::now();
        self.take_answers(Duration::ZERO);
        while self.unknown.is_empty() && self.choice.open > 0 {
            if stop() {
                return None;
            }
            if began.elapsed() >= self.longest {
                tracing::warn!(
                    "the target did not say in {:?} which of {} pages it knows: all of them are sent",
                    self.longest,
                    self.choice.open
                );
                let answers = self.queue.close();
                self.learn(answers);
                assert_eq!(self.choice.open, 0, "a closed queue has no frame without an answer");
                break;
            }
            self.take_answers(LOOK.min(self.longest));
        }
        let unknown = std::mem::take(&mut self.unknown);
        (!unknown.is_empty()).then_some(unknown)
    }
}

#[cfg(test)]
mod tests;
