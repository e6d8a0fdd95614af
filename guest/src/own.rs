//! Work of a vCPU with the allocator, besides the workload that writes.

use crate::balloon::Service;
use crate::pool::{Local, Pool};
use crate::{serial, stats};
use vmferry_guest_abi::{Corrupt, Every, GuestArgs, Line, REPORT_NS, StatsSink};
use vmferry_guest_alloc::{Churn, Heap, Progress};

/// Time between two `A` lines, in ns.
const LINE_NS: u64 = 1_000_000_000;

/// Allocation work of one vCPU.
#[derive(Debug)]
pub(crate) struct Own<'a> {
    machine: Local<'a>,
    heap: Heap<'static>,
    churn: Option<Churn>,
    /// Balloon service, on the first vCPU only.
    service: Option<Service>,
    told: Every,
    lines: Option<Every>,
    verified: u64,
}

impl<'a> Own<'a> {
    /// Returns the allocation work of vCPU `cpu` of `cpus`, whose clock shows `now_ns`.
    pub(crate) fn new(pool: &'a Pool, args: &GuestArgs, cpu: u64, cpus: u64, now_ns: u64) -> Self {
        // There are at most 64.
        let index = usize::try_from(cpu).unwrap_or(0);
        let churn = args.workload.alloc.map(|alloc| Churn::new(alloc, cpu, cpus));
        let lines = args.stats == StatsSink::Serial && churn.is_some();
        Self {
            machine: Local { pool, cpu: index },
            heap: pool.heap(index),
            churn,
            service: (cpu == 0).then(|| Service::new(pool, args.inflate)),
            told: Every::new(REPORT_NS, now_ns),
            lines: lines.then(|| Every::new(LINE_NS, now_ns)),
            verified: 0,
        }
    }

    /// Does what is due. Calls `found` for each word with unexpected content. Returns true if there
    /// was any work.
    pub(crate) fn turn(&mut self, now_ns: u64, found: &mut dyn FnMut(Corrupt)) -> bool {
        let Self { machine, heap, churn, service, .. } = self;
        let churned =
            churn.as_mut().is_some_and(|churn| churn.step(machine, heap, found) == Progress::Worked);
        heap.tick(machine, now_ns);
        let served = service.as_mut().is_some_and(|service| service.turn(machine.pool, now_ns));
        if self.told.due(now_ns) {
            self.tell(now_ns);
        }
        churned || served
    }

    fn tell(&mut self, now_ns: u64) {
        let mut report = *self.heap.stats();
        report.t_us = now_ns / 1000;
        stats::ALLOC.publish_cpu(self.machine.cpu, &report);
        if let Some(service) = &self.service {
            stats::ALLOC.publish_guest(&service.report(self.machine.pool, now_ns));
        }
        if self.lines.as_mut().is_some_and(|lines| lines.due(now_ns)) {
            let line = Line::Alloc {
                cpu: self.machine.cpu as u64,
                t_us: report.t_us,
                rounds: report.rounds,
                alloc_mib: report.alloc_bytes >> 20,
                freed_mib: report.freed_bytes >> 20,
                reports: report.reports,
                reported_mib: report.report_bytes >> 20,
                free_max_us: report.free_max_ns / 1000,
            };
            serial::line(format_args!("{line}"));
        }
    }

    /// Checks all allocated memory, once for each request other than 0.
    pub(crate) fn verify(&mut self, request: u64, found: &mut dyn FnMut(Corrupt)) {
        if request != self.verified && request != 0 {
            self.verified = request;
            if let Some(churn) = &self.churn {
                churn.verify(&self.machine, found);
            }
        }
    }
}
