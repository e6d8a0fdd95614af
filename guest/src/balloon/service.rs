//! Work of the first vCPU for the balloon, besides its own.

use super::{Balloon, config};
use crate::pool::Pool;
use crate::{cpu, serial};
use vmferry_guest_abi::balloon::FEATURE_RANGES;
use vmferry_guest_abi::{AllocGuest, Inflation, Line, PAGE_SIZE};
use vmferry_guest_alloc::Batch;

/// Interval of reading the configuration, in ns. A read is an exit of about 46 us, so this is 1 %
/// of the vCPU. (A vCPU that sleeps reads when it wakes up, every 10 ms.)
const POLL_NS: u64 = 5_000_000;

/// Number of requests to inflate or deflate before the vCPU gets to its other work.
const REQUESTS: u32 = 64;

/// Latest requests of the host, and the progress with them.
#[derive(Debug)]
pub(crate) struct Service {
    batch: Batch<'static>,
    /// Earliest time of the next read, in ns.
    next_poll_ns: u64,
    generation: Option<u32>,
    command: u32,
    /// Number of pages that the host requests in the balloon.
    wanted: u32,
    /// True if the balloon follows the host's number. After `inflate=` it does not, until the host
    /// requests another number.
    follows: bool,
    /// True if memory was too low for the host's request. The request is tried again at the next
    /// read.
    short: bool,
    /// True if memory was too low at the latest attempt to inflate, so that the shortage is counted
    /// once.
    counted: bool,
    inflated: AllocGuest,
}

impl Service {
    pub(crate) fn new(pool: &Pool, inflate: Option<Inflation>) -> Self {
        let mut service = Self {
            batch: pool.hint_batch(),
            next_poll_ns: 0,
            generation: None,
            command: super::hints::STOP,
            wanted: 0,
            follows: true,
            short: false,
            counted: false,
            inflated: AllocGuest::default(),
        };
        if let (Some(inflation), Some(balloon)) = (inflate, &pool.balloon) {
            service.inflate(pool, balloon, inflation);
        }
        service
    }

    /// Does what is due. Returns true if there was any work.
    #[inline]
    pub(crate) fn turn(&mut self, pool: &Pool, now_ns: u64) -> bool {
        let Some(balloon) = &pool.balloon else { return false };
        // A clock that went far back must not stop this for as long.
        let early = self.next_poll_ns.wrapping_sub(now_ns);
        let due = early.wrapping_sub(1) >= 2 * POLL_NS;
        if due {
            self.next_poll_ns = now_ns + POLL_NS;
            self.poll(balloon, now_ns);
            if let Some(stats) = balloon.stats.lock().as_mut() {
                stats.turn(balloon.device, pool, balloon.actual());
            }
        }
        let hints = balloon
            .hints
            .lock()
            .as_mut()
            .is_some_and(|hints| hints.turn(balloon.device, pool, &mut self.batch));
        let moved = self.follows && balloon.actual() != u64::from(self.wanted) && !self.short;
        if moved {
            self.follow(pool, balloon);
        }
        due || hints || moved
    }

    fn poll(&mut self, balloon: &Balloon, now_ns: u64) {
        self.short = false;
        let generation = balloon.device.generation();
        let first = self.generation.is_none();
        if self.generation.replace(generation) == Some(generation) {
            return;
        }
        let wanted = balloon.device.config(config::TARGET);
        // The number that was set when `inflate=` was done is not a request of the host.
        self.follows |= !first && wanted != self.wanted;
        self.wanted = wanted;
        let Some(hints) = &mut *balloon.hints.lock() else { return };
        let command = balloon.device.config(config::COMMAND);
        if command != self.command {
            self.command = command;
            hints.command(command, now_ns);
        }
    }

    fn follow(&mut self, pool: &Pool, balloon: &Balloon) {
        let by = balloon.usual();
        for _ in 0..REQUESTS {
            let (actual, wanted) = (balloon.actual(), u64::from(self.wanted));
            let request = if actual < wanted {
                balloon.inflate(pool, wanted - actual, by)
            } else if actual > wanted {
                balloon.deflate(pool, actual - wanted, by)
            } else {
                break;
            };
            let short = request.pages == 0;
            if actual < wanted {
                self.inflated.inflate_short += u64::from(short && !self.counted);
                self.counted = short;
            }
            if short {
                self.short = true;
                break;
            }
        }
        balloon.tell_actual();
    }

    /// Inflates once as the command line requests.
    fn inflate(&mut self, pool: &Pool, balloon: &Balloon, inflation: Inflation) {
        self.follows = false;
        let start = pool.clock.ns(cpu::tsc());
        let (pages, done) = (inflation.bytes / PAGE_SIZE, &mut self.inflated);
        while done.inflate_pages < pages {
            let request = balloon.inflate(pool, pages - done.inflate_pages, inflation.by);
            if request.pages == 0 {
                done.inflate_short += 1;
                break;
            }
            done.inflate_pages += request.pages;
            done.inflate_requests += 1;
            done.inflate_alloc_ns += request.alloc_ns;
            done.inflate_send_ns += request.send_ns;
        }
        let end = pool.clock.ns(cpu::tsc());
        (done.inflate_ns, done.inflate_us) = (end - start, end / 1000);
        balloon.tell_actual();
        let line = Line::Inflated {
            pages: done.inflate_pages,
            requests: done.inflate_requests,
            alloc_us: done.inflate_alloc_ns / 1000,
            send_us: done.inflate_send_ns / 1000,
            total_us: done.inflate_ns / 1000,
        };
        serial::line(format_args!("{line}"));
    }

    /// Returns the state of the whole guest.
    pub(crate) fn report(&self, pool: &Pool, now_ns: u64) -> AllocGuest {
        let pages = pool.with(|buddy| buddy.pages());
        let guest = AllocGuest {
            t_us: now_ns / 1000,
            pages: pages.all,
            free_pages: pages.free(),
            unreported_pages: pages.unreported,
            isolated_pages: pages.isolated,
            held_pages: pages.held,
            low_pages: pages.low,
            ..self.inflated
        };
        match &pool.balloon {
            Some(balloon) => balloon.report_on(AllocGuest { target_pages: self.wanted.into(), ..guest }),
            None => guest,
        }
    }
}

impl Balloon {
    fn report_on(&self, guest: AllocGuest) -> AllocGuest {
        let walks = self.hints.lock().as_ref().map(super::hints::HintQueue::walks).unwrap_or_default();
        let [map_gpa, map_pages, map_ns, map_us] =
            self.map.each_ref().map(|value| value.load(core::sync::atomic::Ordering::Relaxed));
        let low = |features: u128| u64::try_from(features & u128::from(u64::MAX)).unwrap_or(0);
        AllocGuest {
            balloon_pages: self.actual(),
            features: low(self.features),
            private_features: low(self.features >> FEATURE_RANGES),
            hint_id: walks.id.into(),
            hint_walks: walks.count,
            hint_blocks: walks.blocks,
            hint_bytes: walks.bytes,
            hint_ns: walks.ns,
            hint_last_ns: walks.last_ns,
            hint_last_us: walks.last_us,
            hint_releases: self.releases.load(core::sync::atomic::Ordering::Relaxed),
            hint_full: walks.full,
            taken_back_pages: self.taken_back.load(core::sync::atomic::Ordering::Relaxed),
            map_gpa,
            map_pages,
            map_ns,
            map_us,
            ..guest
        }
    }
}
