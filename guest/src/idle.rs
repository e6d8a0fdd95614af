//! Sleeping.

use crate::cpu;
use vmferry_guest_abi::{TscClock, Worker};

/// How an idle vCPU passes its time.
#[derive(Debug)]
pub(crate) struct Sleeper {}

impl Sleeper {
    pub(crate) fn new(_clock: &TscClock) -> Self {
        Self {}
    }

    pub(crate) fn sleep(&mut self, _worker: &mut Worker, _clock: &TscClock) {
        let _ = cpu::tsc();
        core::hint::spin_loop();
    }
}
