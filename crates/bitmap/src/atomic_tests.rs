//! Tests of the shipped [`AtomicBitmap`] in every interleaving of a few threads (shuttle).
//!
//! Shuttle treats every access as sequentially consistent. The accesses that the correctness
//! argument uses are sequentially consistent. Loom models weaker accesses, but treats sequentially
//! consistent loads as acquire loads, and so reports losses that cannot happen.

use super::*;
use shuttle::thread;
use std::sync::Arc;
// Counters of the standard library, not of the scheduler: no thread acts on them.
use std::sync::atomic::AtomicU64 as Count;
use vmferry_testkit::tries;

/// Two words in one block.
const PAGES: usize = 66;
/// Range that crosses the boundary of the two words.
const ACROSS: Range<u64> = 63..65;

/// Guest memory, the marks on it, and the copy that was sent.
struct Model {
    map: AtomicBitmap,
    /// Number of writes to each page.
    content: Vec<AtomicU64>,
    /// Newest content of each page that was sent.
    copy: Vec<Count>,
    /// Number of marks that were set.
    marked: Count,
    /// Number of marks that were taken.
    taken: Count,
}

impl Model {
    fn new(flaw: Flaw) -> Arc<Self> {
        let mut map = AtomicBitmap::new(PAGES as u64);
        map.flaw = flaw;
        Arc::new(Self {
            map,
            content: (0..PAGES).map(|_| AtomicU64::new(0)).collect(),
            copy: (0..PAGES).map(|_| Count::new(0)).collect(),
            marked: Count::new(0),
            taken: Count::new(0),
        })
    }

    fn content(&self, page: u64) -> &AtomicU64 {
        &self.content[usize::try_from(page).unwrap()]
    }

    fn write(&self, page: u64) {
        self.content(page).fetch_add(1, Ordering::Relaxed);
        if !self.map.set(page) {
            self.marked.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Writes and marks the pages of `range`. No other thread may write to these pages: `set_range`
    /// does not report which of them it marked.
    fn write_range(&self, range: Range<u64>) {
        range.clone().for_each(|page| self.content(page).store(1, Ordering::Relaxed));
        self.marked.fetch_add(range.end - range.start, Ordering::Relaxed);
        self.map.set_range(range);
    }

    /// Copies a page whose mark was taken.
    fn send(&self, page: u64) {
        let now = self.content(page).load(Ordering::Relaxed);
        self.copy[usize::try_from(page).unwrap()].fetch_max(now, Ordering::Relaxed);
    }

    fn harvest(&self) {
        let mut dirty = Bitmap::new(PAGES as u64);
        self.taken.fetch_add(self.map.harvest(&mut dirty), Ordering::Relaxed);
        dirty.runs().flatten().for_each(|page| self.send(page));
    }

    /// Sends one page before its turn.
    fn urgent(&self, page: u64) {
        if self.map.test_and_clear(page) {
            self.taken.fetch_add(1, Ordering::Relaxed);
            self.send(page);
        }
    }

    /// Harvests after all writers are done, and checks that every page was sent and each mark was
    /// taken once.
    fn finish(&self) {
        self.harvest();
        for (page, content) in self.content.iter().enumerate() {
            assert_eq!(
                self.copy[page].load(Ordering::Relaxed),
                content.load(Ordering::Relaxed),
                "lost: page {page}"
            );
        }
        assert_eq!(
            self.taken.load(Ordering::Relaxed),
            self.marked.load(Ordering::Relaxed),
            "lost or doubled marks"
        );
        assert!(self.map.is_empty());
    }
}

fn start(model: &Arc<Model>, work: impl FnOnce(&Model) + Send + 'static) -> thread::JoinHandle<()> {
    let model = Arc::clone(model);
    thread::spawn(move || work(&model))
}

/// Runs a writer and a harvester.
fn pair(flaw: Flaw) {
    let model = Model::new(flaw);
    let writer = start(&model, |model| {
        model.write(1);
        model.write(1);
    });
    model.harvest();
    writer.join().unwrap();
    model.finish();
}

/// Runs a thread that marks a range across two words, and a harvester.
fn range(flaw: Flaw) {
    let model = Model::new(flaw);
    let writer = start(&model, |model| model.write_range(ACROSS));
    model.harvest();
    writer.join().unwrap();
    model.finish();
}

/// Runs two writers of one page, a thread that sends the page before its turn, and a harvester.
fn crowd(flaw: Flaw) {
    let model = Model::new(flaw);
    let threads = [
        start(&model, |model| {
            model.write(1);
            model.write(64);
        }),
        start(&model, |model| {
            model.write(1);
            model.write_range(2..4);
        }),
        start(&model, |model| (0..2).for_each(|_| model.urgent(1))),
    ];
    (0..2).for_each(|_| model.harvest());
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    model.finish();
}

/// Runs two writers of one page. The harvest follows the second writer, whatever the first has done
/// by then.
fn second(flaw: Flaw) {
    let model = Model::new(flaw);
    let first = start(&model, |model| model.write(1));
    start(&model, |model| model.write(1)).join().unwrap();
    model.harvest();
    assert!(model.copy[1].load(Ordering::Relaxed) > 0, "lost: the mark of a writer that had finished");
    first.join().unwrap();
    model.finish();
}

/// Runs `test` in every possible interleaving.
fn every(test: impl Fn() + Send + Sync + 'static) {
    shuttle::check_dfs(test, None);
}

#[test]
fn no_write_is_lost_between_marking_and_harvesting() {
    every(|| pair(Flaw::None));
    every(|| range(Flaw::None));
    every(|| second(Flaw::None));
}

#[test]
fn no_write_is_lost_among_many_and_no_mark_is_taken_twice() {
    const TRIES: usize = 5000;
    shuttle::check_random(|| crowd(Flaw::None), tries(TRIES));
    shuttle::check_pct(|| crowd(Flaw::None), tries(TRIES), 4);
}

#[test]
#[should_panic(expected = "lost")]
fn marking_the_summary_first_loses_writes() {
    every(|| pair(Flaw::SummaryFirst));
}

#[test]
#[should_panic(expected = "lost")]
fn marking_the_summary_of_a_range_first_loses_writes() {
    every(|| range(Flaw::SummaryFirst));
}

#[test]
#[should_panic(expected = "lost")]
fn leaving_the_summary_to_the_first_writer_loses_writes() {
    every(|| second(Flaw::OnlyTheFirst));
}

#[test]
#[should_panic(expected = "lost")]
fn taking_the_words_first_loses_writes() {
    every(|| pair(Flaw::WordsFirst));
}
