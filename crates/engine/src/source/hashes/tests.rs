use super::*;
use crate::channel::{Pacer, Stream, test_pair};
use crate::clock::Clock;
use crate::handle::Counters;
use crate::known::KnownPages;
use crate::scratch::{SCRATCH, SCRATCH_PAGES, Scratch};
use crate::source::encode::{Codecs, PageEncoder};
use crate::source::pending::{PendingPages, Takers};
use crate::source::sender::{PassKind, Sender, SenderContext, division};
use crate::source::settings::{Deltas, PageCodec};
use crate::target::receiver::{Arrivals, LookedUp, Mark, Receiver};
use proptest::prelude::*;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use vmferry_codec::Page;
use vmferry_core::{GuestMemory, NothingToProtect, PAGE_BYTES, PageSet, Window};

/// Pages that the guest uses, more than a sample.
const PAGES: u64 = 3000;

/// Content of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    Zero,
    /// Bytes that depend on the number, and on the page if the flag is set.
    Noise(u8, bool),
}

impl Content {
    fn page(self, index: u64) -> Page {
        let mut page = [0; PAGE_BYTES];
        if let Self::Noise(seed, own) = self {
            let mut state = (u64::from(seed) << 32 | if own { index } else { 0 }) + 1;
            for word in page.as_chunks_mut::<8>().0 {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                *word = state.to_le_bytes();
            }
        }
        page
    }
}

fn content() -> impl Strategy<Value = Content> {
    prop_oneof![
        1 => Just(Content::Zero),
        4 => (0u8..4, any::<bool>()).prop_map(|(seed, own)| Content::Noise(seed, own)),
    ]
}

/// Runs of pages with the same kind of content.
fn contents() -> impl Strategy<Value = Vec<(u64, Content)>> {
    prop::collection::vec((1u64..900, content()), 1..12)
}

fn each(runs: &[(u64, Content)]) -> impl Iterator<Item = (u64, Content)> {
    let kinds = runs.iter().flat_map(|(count, content)| (0..*count).map(|_| *content));
    (0..PAGES).zip(kinds)
}

/// Change of the file after it was indexed.
#[derive(Debug, Clone, Copy)]
enum Change {
    None,
    /// Every page with a number that this number divides is overwritten.
    Overwritten(u64),
    Truncated,
}

/// Way in which the target answers.
#[derive(Debug, Clone, Copy)]
enum Answering {
    /// It holds back this many.
    Late(usize),
    Never,
}

/// Receives one pass, and delivers the answers. When the target knows of an unknown page, the guest
/// writes a page, which `dirty` records.
fn receive_pass(
    receiver: &mut Receiver<'_, &Stream>,
    answers: &Answers,
    answering: Answering,
    write: &mut impl FnMut(),
) {
    let mut held = VecDeque::new();
    let deliver = |LookedUp { frame, unknown }| answers.deliver(0, frame, &unknown).unwrap();
    loop {
        let mark = std::thread::scope(|scope| {
            let next = scope.spawn(|| receiver.receive().unwrap());
            let late = std::time::Instant::now();
            while !next.is_finished() {
                std::thread::sleep(Duration::from_micros(50));
                // A sender that waits for the rest of the answers sends nothing.
                if late.elapsed() > Duration::from_millis(3) && matches!(answering, Answering::Late(_)) {
                    held.drain(..).for_each(&deliver);
                }
            }
            next.join().unwrap()
        });
        match mark {
            Mark::Barrier(_) => return,
            Mark::AllArrived => panic!("there is no postcopy"),
            Mark::LookedUp(looked_up) => {
                write();
                held.push_back(looked_up);
                if let Answering::Late(most) = answering
                    && held.len() > most
                {
                    held.pop_front().into_iter().for_each(&deliver);
                }
            }
        }
    }
}

/// Encoder whose deltas would be wrong if a version was kept that the target does not have.
fn encoder(memory: &dyn GuestMemory, codec: PageCodec) -> Option<Box<PageEncoder>> {
    let codecs = Codecs { codec, deltas: Deltas::On, cache_bytes: 32 << 20 };
    PageEncoder::new(codecs, memory.layout(), Clock::start(), (&Arc::default(), &Arc::default()))
}

fn known(runs: &[(u64, Content)], change: Change) -> KnownPages {
    let file = File::from(rustix::fs::memfd_create("known", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    for (index, content) in each(runs) {
        file.write_all_at(&content.page(index), index * PAGE_BYTES as u64).unwrap();
    }
    let known = KnownPages::index(vec![("file".into(), file.try_clone().unwrap())]).unwrap();
    match change {
        Change::None => {}
        Change::Truncated => file.set_len(1_000_000).unwrap(),
        Change::Overwritten(every) => (0..PAGES).filter(|page| page % every == 0).for_each(|page| {
            file.write_all_at(&[7; 100], page * PAGE_BYTES as u64 + 50).unwrap();
        }),
    }
    known
}

fn copied(window: &Window<'_>, index: u64) -> Page {
    let mut page = [0; PAGE_BYTES];
    window.copy_page(usize::try_from(index).unwrap(), &mut page);
    page
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn target_has_the_content_of_every_page_whatever_its_files_contain(
        guest in contents(),
        in_file in prop_oneof![2 => Just(None), 1 => contents().prop_map(Some)],
        change in prop_oneof![
            2 => Just(Change::None), 2 => (1u64..40).prop_map(Change::Overwritten), 1 => Just(Change::Truncated),
        ],
        answering in prop_oneof![6 => (0usize..6).prop_map(Answering::Late), 1 => Just(Answering::Never)],
        codec in prop::sample::select(vec![None, Some(PageCodec::Raw), Some(PageCodec::Lz4)]),
        written in prop::collection::vec(0..PAGES, 1..20),
    ) {
        let (own, other) = (Scratch::new().unwrap(), Scratch::new().unwrap());
        let all = PageRun::from(0..SCRATCH_PAGES);
        let window = own.memory().window(SCRATCH, all).unwrap();
        let write = |index: u64, page: &Page| window.write_page(usize::try_from(index).unwrap(), page);
        each(&guest).for_each(|(index, content)| write(index, &content.page(index)));
        let known = Arc::new(known(in_file.as_deref().unwrap_or(&guest), change));
        let (answers, counters, stop) = (Answers::new(1), Counters::default(), AtomicBool::new(false));
        let (near, far) = test_pair();
        let pacer = Pacer::new(None);
        let (protect, channels) = (&NothingToProtect, 1);
        let shared = SenderContext {
            memory: own.memory(),
            protect,
            pacer: &pacer,
            counters: &counters,
            stop: &stop,
            channels,
            turns: None,
        };
        let arrivals = Arrivals::new(other.memory());
        let mut dirty = PageSet::empty(own.memory().layout());
        let longest = Duration::from_millis(if matches!(answering, Answering::Never) { 20 } else { 60_000 });
        std::thread::scope(|scope| {
            let (answers, memory) = (&answers, own.memory());
            // Two passes: of all pages, and of the pages that the guest has written meanwhile.
            let (to, jobs) = std::sync::mpsc::channel::<(u32, Arc<_>, PassKind)>();
            scope.spawn(move || {
                let queue = answers.channel(0).unwrap();
                let sender = Sender::new(shared, Arc::new(near), 0);
                let encoder = codec.and_then(|codec| encoder(memory, codec));
                let mut sender = sender.encoding(encoder).hashing(Some(HashSender::new(queue, longest)));
                jobs.iter().for_each(|(pass, pages, kind)| sender.send_pass(pass, &pages, kind).unwrap());
            });
            let mut pending = PendingPages::everything(memory.layout());
            let takers = || Takers::Senders(division(protect, 1, true));
            to.send((0, pending.begin_pass(None, takers()), PassKind::First)).unwrap();
            let mut receiver = Receiver::new(other.memory(), &arrivals, &far).knowing(Some(Arc::clone(&known)));
            let mut writes = written.iter().zip(100u8..);
            receive_pass(&mut receiver, answers, answering, &mut || {
                let Some((page, seed)) = writes.next() else { return };
                write(*page, &Content::Noise(seed, true).page(*page));
                dirty.region_mut(SCRATCH).unwrap().set(*page);
            });
            pending.end_pass();
            assert_eq!(pending.count(), 0);
            pending.next().union(&dirty);
            to.send((1, pending.begin_pass(None, takers()), PassKind::Later)).unwrap();
            drop(to);
            receive_pass(&mut receiver, answers, answering, &mut || panic!("a hash after the first pass"));
        });
        prop_assert_eq!(arrivals.mismatches(), (0, Vec::new()));
        let theirs = other.memory().window(SCRATCH, all).unwrap();
        for index in 0..PAGES {
            prop_assert!(copied(&window, index) == copied(&theirs, index), "page {}", index);
        }
        let figures = counters.hashes.figures().unwrap_or_default();
        prop_assert_eq!(figures.known + figures.unknown, figures.hashes);
        if matches!(answering, Answering::Late(_)) {
            prop_assert_eq!(arrivals.known(), figures.known);
        }
        let fits = in_file.is_none() && matches!(change, Change::None);
        if fits && matches!(answering, Answering::Late(0)) {
            // Pages that the guest wrote between the index and the hash are unknown.
            prop_assert!(figures.unknown <= written.len() as u64);
        }
    }
}

/// Returns the runs between these pages.
fn runs(ranges: &[(u64, u64)]) -> Vec<PageRun> {
    ranges.iter().map(|(first, end)| PageRun::from(*first..*end)).collect()
}

fn asked(frame: u64, ranges: &[(u64, u64)]) -> Asked {
    Asked { frame, region: SCRATCH, runs: runs(ranges) }
}

#[test]
fn answer_names_pages_by_their_positions() {
    let queue = AnswerQueue::default();
    queue.ask(asked(4, &[(10, 14), (20, 26)]));
    queue.deliver(4, &[0b0101_1000, 0b10]).unwrap();
    let answered = queue.take(Duration::ZERO).pop_front().unwrap();
    assert_eq!(answered.pages, 10);
    assert_eq!(answered.unknown.runs, runs(&[(13, 14), (20, 21), (22, 23), (25, 26)]));
}

#[test]
fn refuses_answers_to_frames_without_hashes_and_pages_that_were_not_asked_for() {
    let queue = AnswerQueue::default();
    assert!(queue.deliver(0, &[]).is_err(), "no frame was sent");
    queue.ask(asked(4, &[(10, 14)]));
    queue.ask(asked(6, &[(20, 24)]));
    assert!(queue.deliver(6, &[]).is_err(), "not the oldest one");
    assert!(queue.deliver(4, &[0b1_0000]).is_err(), "the frame has 4 pages");
    assert!(queue.deliver(4, &[0, 0, 1]).is_err(), "the frame has 4 pages");
    assert_eq!(queue.open_frames(), 2, "a refused answer takes nothing");
    queue.deliver(4, &[0, 0]).unwrap();
    assert!(queue.deliver(4, &[]).is_err(), "it was answered");
    let answers = Answers::new(2);
    assert!(answers.deliver(2, 0, &[]).is_err() && answers.channel(2).is_none());
}

#[test]
fn pages_without_an_answer_are_unknown_once_the_queue_is_closed() {
    let queue = AnswerQueue::default();
    queue.ask(asked(0, &[(0, 4)]));
    queue.ask(asked(1, &[(5, 9), (12, 13)]));
    queue.deliver(0, &[2]).unwrap();
    let left: Vec<_> =
        queue.close().into_iter().map(|answered| (answered.pages, answered.unknown.runs)).collect();
    assert_eq!(left, [(4, runs(&[(1, 2)])), (5, runs(&[(5, 9), (12, 13)]))]);
    queue.deliver(1, &[1]).unwrap();
    assert!(queue.take(Duration::ZERO).is_empty(), "a late answer is ignored");
}

/// Sends `frames` frames of 256 pages, of which the target knows `known`. Returns the number of
/// frames with hashes.
fn frames_with_hashes(choice: &mut HashChoice, frames: u64, known: u64) -> u64 {
    let mut hashes = 0;
    for _ in 0..frames {
        match choice.next() {
            Next::Hashes => {
                choice.asked(256);
                choice.answered(256, 256 - known);
                hashes += 1;
            }
            Next::Contents => choice.sent_contents(256),
            Next::Unclear => panic!("all answers have arrived"),
        }
    }
    hashes
}

#[test]
fn hashes_are_sent_while_enough_pages_are_known() {
    let mut choice = HashChoice::default();
    assert_eq!(frames_with_hashes(&mut choice, 1000, 200), 1000);
    // A sample of four frames, then samples of one frame after pauses of at least one frame.
    let mut choice = HashChoice::default();
    assert_eq!(frames_with_hashes(&mut choice, 4 + 6, 0), 4 + 3);
    // Later, a pause is a sixteenth of what was sent before, and at most 64 frames.
    assert!(frames_with_hashes(&mut choice, 990, 0) < 65);
    assert!(frames_with_hashes(&mut choice, 200, 256) > 130, "the next sample finds known pages");
    assert!(frames_with_hashes(&mut choice, 1000, 10) < 90, "and then none again");
}

#[test]
fn few_known_pages_are_sent_with_their_content_behind_changed_ones() {
    for changed in [5, 13, 50, 100] {
        let mut choice = HashChoice::default();
        frames_with_hashes(&mut choice, changed, 0);
        let known = 2000;
        let sent = known - frames_with_hashes(&mut choice, known, 256);
        assert!(sent <= changed / 16 + 1, "{sent} frames in vain behind {changed} changed ones");
    }
}

#[test]
fn choice_is_unclear_until_the_sample_is_answered() {
    let mut choice = HashChoice::default();
    for _ in 0..4 {
        assert_eq!(choice.next(), Next::Hashes);
        choice.asked(256);
    }
    assert_eq!(choice.next(), Next::Unclear);
    choice.answered(256, 0);
    assert_eq!(choice.next(), Next::Unclear);
    (0..3).for_each(|_| choice.answered(256, 256));
    assert_eq!(choice.next(), Next::Hashes, "a quarter is known");
}
