//! Sleep of an idle vCPU, which must not occupy a core of its host.
//!
//! `hlt` is for ring 0. The exception that it raises in ring 3 leads to ring 0
//! (`general_protection` in `boot.s`), and the local APIC's timer ends the sleep. Paced workloads
//! do not sleep between two writes, because a timer is too coarse for them. They sleep between two
//! bursts.

use crate::{apic, cpu};
use vmferry_guest_abi::{REPORT_NS, TscClock, Worker};

/// Timer of one idle vCPU, and its clock.
#[derive(Debug)]
pub(crate) struct Sleeper {
    clock: TscClock,
}

impl Sleeper {
    /// Starts this vCPU's timer.
    pub(crate) fn new(clock: TscClock) -> Self {
        apic::start_timer(REPORT_NS, &clock);
        Self { clock }
    }

    /// Sleeps until the timer's next tick, at most one report's period.
    pub(crate) fn sleep(&self, worker: &mut Worker) {
        let from = self.clock.ns(cpu::tsc());
        cpu::halt();
        apic::end_of_interrupt();
        worker.slept(from + REPORT_NS, self.clock.ns(cpu::tsc()));
    }
}
