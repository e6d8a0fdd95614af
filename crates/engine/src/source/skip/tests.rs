//! Answers about free pages against harvests, senders, and a guest that frees pages and uses them
//! again, in many interleavings (shuttle). The shipped types run in these tests: [`PendingPages`],
//! [`PassPages`], [`Skipping`].
//!
//! The tracker behaves like KVM's dirty log, which discards the most. At the start a page is marked
//! and not protected. Protecting a page clears its mark. A harvest leaves the marks as they are.

use super::{Flaw, Next, Skipping};
use crate::source::pending::{PageTurn, PassPages, PendingPages, Takers};
use shuttle::rand::Rng;
use shuttle::sync::{Mutex, MutexGuard};
use shuttle::thread;
use std::sync::Arc;
use vmferry_bitmap::Bitmap;
use vmferry_core::{
    Answer, AnswerMode, FreePages, FreeReport, Gpa, Layout, PageIndex, PageRun, Protect, Region, RegionId,
    VmError,
};
use vmferry_testkit::tries;

const PAGES: u64 = 3;
const REGION: RegionId = RegionId(0);
/// Passes while the guest runs.
const PASSES: u32 = 2;
const TRIES: usize = 2000;
/// Steps of the guest, and scheduler steps that sending a page takes.
const STEPS: u32 = 9;
const LINK: u32 = 8;

#[derive(Debug, Default, Clone, Copy)]
struct Page {
    /// Number of writes to the page.
    content: u64,
    protected: bool,
    marked: bool,
    free: bool,
    /// Newest content that was sent.
    copy: u64,
}

#[derive(Debug, Default)]
struct Said {
    open: Option<u64>,
    answers: Vec<(u64, Vec<u64>)>,
}

/// Host memory. Each access to a page is one step: the processor checks the protection and writes
/// in one step.
#[derive(Debug)]
struct Host {
    pages: Vec<Mutex<Page>>,
    said: Mutex<Said>,
    /// Number of answers from a map after which the source continues with hints.
    map_answers: u32,
    /// True if the channel's thread has finished the pass.
    sent: Mutex<bool>,
    /// True if the guest has stopped.
    ended: Mutex<bool>,
}

impl Host {
    fn new() -> Arc<Self> {
        Self::with_map_for(u32::MAX)
    }

    fn with_map_for(map_answers: u32) -> Arc<Self> {
        let page = |page| Mutex::new(Page { content: 1, marked: true, free: page == 1, ..Page::default() });
        Arc::new(Self {
            pages: (0..PAGES).map(page).collect(),
            said: Mutex::default(),
            map_answers,
            sent: Mutex::new(false),
            ended: Mutex::new(false),
        })
    }

    fn page(&self, page: u64) -> MutexGuard<'_, Page> {
        self.pages[usize::try_from(page).unwrap()].lock().unwrap()
    }

    /// Lets the guest use a page: the guest takes the page, if it is free, and then writes it.
    fn write(&self, page: u64) {
        self.page(page).free = false;
        let mut page = self.page(page);
        page.content += 1;
        if page.protected {
            (page.protected, page.marked) = (false, true);
        }
    }

    /// Lets the guest walk its free lists. Each page is examined at a different time.
    fn answer(&self) {
        let Some(question) = self.said.lock().unwrap().open else { return };
        let free = (0..PAGES).filter(|page| self.page(*page).free).collect();
        let mut said = self.said.lock().unwrap();
        if said.answers.len() < 3 {
            said.answers.push((question, free));
        }
    }

    fn guest(&self) {
        for _ in 0..STEPS {
            let page = shuttle::rand::thread_rng().gen_range(0..PAGES);
            match shuttle::rand::thread_rng().gen_range(0..4) {
                0 | 1 => self.write(page),
                2 => self.page(page).free = true,
                _ => (0..10).for_each(|_| thread::yield_now()),
            }
        }
    }

    /// Runs the guest's balloon driver, concurrently with the guest's use of its pages. The driver
    /// learns late that it was told to stop.
    fn balloon(&self) {
        while !*self.ended.lock().unwrap() {
            self.answer();
            thread::yield_now();
        }
    }

    /// Sends the pages in the same way as `Sender::send_pass`.
    fn send(&self, pages: &PassPages) {
        let mut mine = Bitmap::new(PAGES);
        for turn in [PageTurn::First, PageTurn::Last] {
            for page in 0..PAGES {
                // Each chunk is one page.
                if pages.take_64(0, turn, 0, 1 << page) == 0 {
                    continue;
                }
                mine.set(page);
                self.protect(REGION, PageRun::new(PageIndex(page), 1), &mine).unwrap();
                mine.clear_all();
                // The link is slower than the host.
                (0..LINK).for_each(|_| thread::yield_now());
                let content = self.page(page).content;
                self.page(page).copy = content;
            }
        }
        *self.sent.lock().unwrap() = true;
    }

    fn harvest(&self, into: &mut Bitmap) {
        for page in 0..PAGES {
            if self.page(page).marked {
                into.set(page);
            }
        }
    }
}

impl Protect for Host {
    fn protect(&self, _: RegionId, chunk: PageRun, pages: &Bitmap) -> Result<(), VmError> {
        for page in pages.bits_in(chunk.range()) {
            let mut page = self.page(page);
            (page.protected, page.marked) = (true, false);
        }
        Ok(())
    }
}

#[derive(Debug)]
struct Source {
    answer_mode: AnswerMode,
    host: Arc<Host>,
    requested: Option<u64>,
    /// Number of answers so far.
    answers: u32,
}

impl FreePages for Source {
    fn answer_mode(&self) -> AnswerMode {
        self.answer_mode
    }

    fn request(&mut self, question: u64) -> Result<(), VmError> {
        self.requested = Some(question);
        self.host.said.lock().unwrap().open = Some(question);
        Ok(())
    }

    fn poll(&mut self, report: &mut FreeReport) -> Result<Option<Answer>, VmError> {
        let (question, free) = match self.answer_mode {
            AnswerMode::AtOnce => {
                let Some(question) = self.requested.take() else { return Ok(None) };
                if self.answers == self.host.map_answers {
                    // The map has become unusable.
                    self.answer_mode = AnswerMode::ByGuest;
                    return Ok(Some(Answer { question, complete: true }));
                }
                self.answers += 1;
                (question, (0..PAGES).filter(|page| self.host.page(*page).free).collect())
            }
            AnswerMode::ByGuest => {
                let mut said = self.host.said.lock().unwrap();
                if said.answers.is_empty() {
                    return Ok(None);
                }
                said.answers.remove(0)
            }
        };
        for page in free {
            report.add(REGION, PageRun::new(PageIndex(page), 1));
        }
        Ok(Some(Answer { question, complete: true }))
    }

    fn stop(&mut self) {
        self.requested = None;
        self.host.said.lock().unwrap().open = None;
    }
}

/// Runs the driver's thread from the start of tracking to the last page. Returns the number of
/// skipped pages.
fn migrate(host: &Arc<Host>, answer_mode: AnswerMode, flaw: Flaw) -> u64 {
    let start = |work: fn(&Host)| {
        let host = Arc::clone(host);
        thread::spawn(move || work(&host))
    };
    let (guest, balloon) = (start(Host::guest), start(Host::balloon));
    let layout = Layout::new(vec![Region { id: REGION, gpa: Gpa(0), len: PAGES << 12 }]).unwrap();
    let mut pending = PendingPages::everything(&layout);
    let source = Source { answer_mode, host: Arc::clone(host), requested: None, answers: 0 };
    let mut skipping = Skipping::new(Box::new(source), &layout);
    skipping.flaw = flaw;
    let mut skipped = 0;
    for _ in 0..PASSES {
        let pass = pending.begin_pass(None, Takers::SHARED);
        *host.sent.lock().unwrap() = false;
        let (channel, pages) = (Arc::clone(host), Arc::clone(&pass));
        let sender = thread::spawn(move || channel.send(&pages));
        skipping.begin(&pass);
        // As in the driver, the loop runs until the channel has finished, even if a question is
        // open.
        while !*host.sent.lock().unwrap() {
            let (pages, next) = skipping.step(&mut pending, &**host);
            skipped += pages;
            if next != Next::Now {
                thread::yield_now();
            }
        }
        sender.join().unwrap();
        skipping.close();
        pending.end_pass();
        host.harvest(pending.next().region_mut(REGION).unwrap());
    }
    // The guest has stopped.
    guest.join().unwrap();
    *host.ended.lock().unwrap() = true;
    balloon.join().unwrap();
    host.harvest(pending.next().region_mut(REGION).unwrap());
    skipped += skipping.skip_free(&mut pending);
    host.send(&pending.begin_pass(None, Takers::SHARED));
    skipped
}

fn run(answer_mode: AnswerMode, flaw: Flaw) {
    run_on(&Host::new(), answer_mode, flaw);
}

fn run_on(host: &Arc<Host>, answer_mode: AnswerMode, flaw: Flaw) {
    migrate(host, answer_mode, flaw);
    for page in 0..PAGES {
        let Page { content, free, copy, .. } = *host.page(page);
        assert!(free || copy == content, "page {page} is lost: {copy} instead of {content}");
    }
}

#[test]
fn no_write_is_lost_to_an_answer() {
    for answer_mode in [AnswerMode::AtOnce, AnswerMode::ByGuest] {
        shuttle::check_random(move || run(answer_mode, Flaw::None), tries(TRIES));
        shuttle::check_pct(move || run(answer_mode, Flaw::None), tries(TRIES), 4);
    }
}

#[test]
fn no_write_is_lost_when_hints_replace_a_map() {
    for map_answers in 0..3 {
        let one = move || run_on(&Host::with_map_for(map_answers), AnswerMode::AtOnce, Flaw::None);
        shuttle::check_random(one, tries(TRIES));
    }
}

/// Guards against a search in which no page is ever skipped, which would pass the test above.
#[test]
fn pages_are_left_out_in_passes_and_at_the_end() {
    use std::sync::atomic::{AtomicU64, Ordering};
    for answer_mode in [AnswerMode::AtOnce, AnswerMode::ByGuest] {
        let total = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&total);
        let one = move || {
            let host = Host::new();
            count.fetch_add(migrate(&host, answer_mode, Flaw::None), Ordering::Relaxed);
        };
        shuttle::check_random(one, 300);
        assert!(total.load(Ordering::Relaxed) >= 20, "{answer_mode:?}: {total:?}");
    }
}

/// Searches the same interleavings in each run, because the seed is fixed.
fn search(answer_mode: AnswerMode, flaw: Flaw) {
    let scheduler = shuttle::scheduler::RandomScheduler::new_from_seed(1, 40 * TRIES);
    shuttle::Runner::new(scheduler, shuttle::Config::new()).run(move || run(answer_mode, flaw));
}

#[test]
#[should_panic(expected = "is lost")]
fn asking_before_protecting_loses_a_write() {
    search(AnswerMode::ByGuest, Flaw::AsksFirst);
}

#[test]
#[should_panic(expected = "is lost")]
fn taking_the_first_answer_for_the_second_loses_a_write() {
    search(AnswerMode::AtOnce, Flaw::AsksFirst);
}

#[test]
#[should_panic(expected = "is lost")]
fn protecting_after_the_question_loses_a_write() {
    search(AnswerMode::AtOnce, Flaw::ProtectsLate);
}

#[test]
#[should_panic(expected = "is lost")]
fn protecting_what_was_sent_loses_a_write() {
    search(AnswerMode::AtOnce, Flaw::ProtectsSent);
}

#[test]
#[should_panic(expected = "is lost")]
fn a_late_answer_that_counts_loses_a_write() {
    search(AnswerMode::ByGuest, Flaw::TakesLate);
}

#[test]
#[should_panic(expected = "is lost")]
fn an_answer_from_before_the_pause_loses_a_write() {
    search(AnswerMode::AtOnce, Flaw::SettlesEarly);
}
