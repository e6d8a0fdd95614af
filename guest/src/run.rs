//! Loop of the workload on each vCPU.

use crate::memory::Ram;
use crate::own::Own;
use crate::pool::Pool;
use crate::{cpu, idle, serial, stats};
use core::sync::atomic::{AtomicU64, Ordering};
use vmferry_guest_abi::{
    Corrupt, Every, GuestArgs, Layout, Line, REPORT_NS, ReadyLine, SerialReporter, State, StatsSink, Step,
    TscClock, Worker,
};

/// State that all vCPUs share.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) args: GuestArgs,
    pub(crate) layout: Layout,
    pub(crate) ram: Ram,
    /// Allocator; `None` if there is nothing to allocate and no balloon.
    pub(crate) pool: Option<Pool>,
    pub(crate) clock: TscClock,
    pub(crate) tsc_khz: u32,
}

/// Number of vCPUs that have filled their share.
static FILLED: AtomicU64 = AtomicU64::new(0);

/// Maximum number of `CORRUPT` lines of a vCPU. The statistics continue to count, and a thousand
/// lines would show no more.
const CORRUPT_LINES: u32 = 16;

/// Fills this vCPU's share, waits for the others, and runs the workload without end.
pub(crate) fn run(plan: &Plan, index: u64) -> ! {
    let mut worker = Worker::new(&plan.args.workload, &plan.layout, index);
    while !worker.fill(&plan.ram, u64::MAX) {}
    FILLED.fetch_add(1, Ordering::AcqRel);
    while FILLED.load(Ordering::Acquire) < plan.layout.cpus {
        core::hint::spin_loop();
    }
    if index == 0 {
        ready(plan);
    }
    let now = plan.clock.ns(cpu::tsc());
    let own = plan.pool.as_ref().map(|pool| Own::new(pool, &plan.args, index, plan.layout.cpus, now));
    let mut vcpu = Vcpu {
        plan,
        own,
        index,
        worker,
        lines: SerialReporter::new(index, now),
        pages: Every::new(REPORT_NS, now),
        told: 0,
    };
    let sleeper = vcpu.worker.rests().then(|| idle::Sleeper::new(plan.clock));
    loop {
        vcpu.turn(sleeper.as_ref());
    }
}

fn ready(plan: &Plan) {
    let header = &stats::PAGE.header;
    let t_us = plan.clock.ns(cpu::tsc()) / 1000;
    header.ready_us.store(t_us, Ordering::Relaxed);
    stats::PAGE.raise(State::Running);
    let Layout { ws_pages, data_pages, cpus } = plan.layout;
    let line = Line::Ready(ReadyLine { cpus, data_pages, ws_pages, tsc_khz: u64::from(plan.tsc_khz), t_us });
    serial::line(format_args!("{line}"));
}

struct Vcpu<'a> {
    plan: &'a Plan,
    own: Option<Own<'a>>,
    index: u64,
    worker: Worker,
    lines: SerialReporter,
    pages: Every,
    told: u32,
}

impl Vcpu<'_> {
    #[inline]
    fn turn(&mut self, sleeper: Option<&idle::Sleeper>) {
        let now = self.plan.clock.ns(cpu::tsc());
        let busy = self.own.is_some() && self.turn_own(now);
        let now = if busy { self.plan.clock.ns(cpu::tsc()) } else { now };
        match (self.worker.step(&self.plan.ram, now), sleeper) {
            (Step::Worked, _) => {}
            (Step::Rested, Some(sleeper)) if !busy => sleeper.sleep(&mut self.worker),
            (Step::Waited | Step::Rested, _) => core::hint::spin_loop(),
            (Step::Corrupt(corrupt), _) => self.tell(corrupt),
        }
        if self.pages.due(now) {
            let request = stats::PAGE.header.verify_request.load(Ordering::Relaxed);
            self.verify_own(request);
            self.worker.verify(request);
            if self.plan.args.stats == StatsSink::Page
                && let Some(block) =
                    usize::try_from(self.index).ok().and_then(|index| stats::PAGE.cpus.get(index))
            {
                block.publish(&self.worker.report(now));
            }
        }
        if self.plan.args.stats == StatsSink::Serial {
            for line in self.lines.poll(&mut self.worker, now).into_iter().flatten() {
                self.print(&line);
            }
        }
    }

    /// Does the allocation work that is due. Returns true if there was any.
    #[inline(never)]
    fn turn_own(&mut self, now: u64) -> bool {
        let (mut wrong, mut first) = (0, None);
        self.worker.pause(now);
        let own = self.own.as_mut();
        let busy = own.is_some_and(|own| own.turn(now, &mut |corrupt| note(&mut wrong, &mut first, corrupt)));
        self.found_own(wrong, first);
        if busy {
            // The time of this work was spent on purpose and is not a stall.
            self.worker.resume(self.plan.clock.ns(cpu::tsc()));
        }
        busy
    }

    fn verify_own(&mut self, request: u64) {
        let (mut wrong, mut first) = (0, None);
        if let Some(own) = &mut self.own {
            self.worker.pause(self.plan.clock.ns(cpu::tsc()));
            own.verify(request, &mut |corrupt| note(&mut wrong, &mut first, corrupt));
            self.found_own(wrong, first);
            self.worker.resume(self.plan.clock.ns(cpu::tsc()));
        }
    }

    fn found_own(&mut self, wrong: u64, first: Option<Corrupt>) {
        if let Some(corrupt) = first {
            (0..wrong).for_each(|_| self.worker.found(corrupt));
            self.tell(corrupt);
        }
    }

    #[cold]
    fn tell(&mut self, corrupt: Corrupt) {
        stats::PAGE.raise(State::Corrupt);
        if self.told < CORRUPT_LINES {
            self.told += 1;
            self.print(&Line::Corrupt { cpu: self.index, corrupt });
        }
    }

    #[cold]
    fn print(&mut self, line: &Line) {
        serial::line(format_args!("{line}"));
        // Printing takes most of a millisecond, which was spent on purpose and is not a stall.
        self.worker.resume(self.plan.clock.ns(cpu::tsc()));
    }
}

/// Counts failures, and keeps the first one.
fn note(wrong: &mut u64, first: &mut Option<Corrupt>, corrupt: Corrupt) {
    *wrong += 1;
    first.get_or_insert(corrupt);
}
