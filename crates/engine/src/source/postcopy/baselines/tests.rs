//! Queue of requests in many interleavings of bulk threads and of threads that read requests
//! (shuttle).

use super::super::{Claims, Wanted};
use super::{BulkQueue, Flaw, UrgentPath};
use shuttle::thread;
use std::sync::Arc;
// The counters are not under test, so they are no step for the scheduler.
use std::sync::atomic::{AtomicUsize as Count, Ordering};
use vmferry_core::{Gpa, Layout, PageSet, Region, RegionId};
use vmferry_testkit::tries;

const PAGES: usize = 70;
const TRIES: usize = 2000;

struct Model {
    claims: Claims,
    sent: Vec<Count>,
    served: Count,
}

impl Model {
    fn new(flaw: Flaw) -> Arc<Self> {
        let region = Region { id: RegionId(0), gpa: Gpa(0), len: (PAGES as u64) << 12 };
        let missing = PageSet::full(&Layout::new(vec![region]).unwrap());
        let mut claims = Claims::new(missing, UrgentPath::Shared, false);
        claims.baseline.as_mut().unwrap().flaw = flaw;
        Arc::new(Self { claims, sent: (0..PAGES).map(|_| Count::new(0)).collect(), served: Count::new(0) })
    }

    fn queue(&self) -> &BulkQueue {
        self.claims.baseline.as_ref().unwrap()
    }

    fn send(&self, page: u64) {
        self.sent[usize::try_from(page).unwrap()].fetch_add(1, Ordering::SeqCst);
    }

    /// Serves a request in the same way as `Sender::send_wanted`.
    fn serve(&self, wanted: Wanted) {
        if self.claims.regions[wanted.region].1.take(wanted.page) {
            self.send(wanted.page);
        }
        self.served.fetch_add(usize::from(wanted.again), Ordering::SeqCst);
    }

    fn serve_queue(&self) {
        while let Some(left) = self.queue().next() {
            self.serve(left.wanted);
        }
    }

    /// Sends all pages in the same way as `Sender::send_remaining`.
    fn bulk(&self) {
        self.queue().bulk_begins();
        while let Some(chunk) = self.claims.next_chunk() {
            for first in chunk.pages.step_by(64) {
                let bits = self.claims.regions[chunk.region].1.take_64(first, u64::MAX);
                (0..64).filter(|bit| bits >> bit & 1 != 0).for_each(|bit| self.send(first + bit));
                self.serve_queue();
            }
        }
        while !self.queue().bulk_ends() {
            self.serve_queue();
        }
    }

    /// Handles a request in the same way as `serve` of an urgent channel.
    fn request(&self, page: u64, again: bool) {
        let wanted = Wanted { region: 0, page, ahead: 0, again };
        if !self.queue().leave(&self.claims.regions[0].1, wanted, 0) {
            self.serve(wanted);
        }
    }
}

fn run(flaw: Flaw) {
    let model = Model::new(flaw);
    let start = |work: fn(&Model)| {
        let model = Arc::clone(&model);
        thread::spawn(move || work(&model))
    };
    let threads = [
        start(Model::bulk),
        start(Model::bulk),
        start(|model| {
            [(3, false), (65, true)].into_iter().for_each(|(page, again)| model.request(page, again))
        }),
        start(|model| {
            [(3, true), (69, false)].into_iter().for_each(|(page, again)| model.request(page, again))
        }),
    ];
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(model.queue().requests().len(), 0, "a request is left behind");
    assert_eq!(model.served.load(Ordering::SeqCst), 2, "requests served");
    assert!(model.sent.iter().all(|sent| sent.load(Ordering::SeqCst) == 1), "each page once");
    assert_eq!(model.claims.left(), 0);
}

#[test]
fn each_page_is_sent_once_and_no_request_is_left_behind() {
    shuttle::check_random(|| run(Flaw::None), tries(TRIES));
    shuttle::check_pct(|| run(Flaw::None), tries(TRIES), 4);
}

/// Searches the same interleavings in each run, because the seed is fixed.
fn search(flaw: Flaw) {
    let scheduler = shuttle::scheduler::RandomScheduler::new_from_seed(1, 20 * TRIES);
    shuttle::Runner::new(scheduler, shuttle::Config::new()).run(move || run(flaw));
}

#[test]
#[should_panic(expected = "left behind")]
fn bulk_thread_that_ends_late_leaves_requests_behind() {
    search(Flaw::EndsLate);
}

#[test]
#[should_panic(expected = "left behind")]
fn request_left_to_a_bulk_thread_that_has_ended_is_left_behind() {
    search(Flaw::LeavesLate);
}
