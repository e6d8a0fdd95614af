//! Simulated guest whose writes are computed instead of executed page by page, so that hours are
//! simulated in seconds.

/// Order in which a vCPU writes to the pages of its working set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Random order: new pages get rarer as more pages are written.
    Uniform,
    /// Sequential order: one page after the other, again and again.
    Sequential,
}

/// Behaviour of a vCPU for a period of time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Phase {
    /// Duration of the phase, in seconds.
    pub seconds: f64,
    /// Writes per second. Infinite means as many as possible.
    pub rate: f64,
    /// Number of pages of the working set. Each phase has its own working set.
    pub pages: f64,
    /// Order of the writes.
    pub order: Order,
}

impl Phase {
    /// Creates a phase of random writes, `rate` per second, to `pages`.
    #[must_use]
    pub fn uniform(seconds: f64, rate: f64, pages: f64) -> Self {
        Self { seconds, rate, pages, order: Order::Uniform }
    }

    /// Creates a phase without writes.
    #[must_use]
    pub fn idle(seconds: f64) -> Self {
        Self::uniform(seconds, 0.0, 1.0)
    }

    /// Creates a phase of first writes to new pages only, `rate` per second.
    #[must_use]
    pub fn fills(seconds: f64, rate: f64) -> Self {
        Self { seconds, rate, pages: f64::INFINITY, order: Order::Sequential }
    }
}

/// Costs on the simulated host, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// Cost of a write to a page that is not protected.
    pub write: f64,
    /// Cost of the fault of a write to a protected page.
    pub fault: f64,
    /// Cost of leaving the guest because the ring is full, and entering the guest again.
    pub exit: f64,
    /// Fixed cost of a harvest.
    pub harvest: f64,
    /// Cost of each harvested page.
    pub page: f64,
    /// Cost of waking up the reaper and looking at the rings.
    pub look: f64,
}

impl Default for Costs {
    /// Returns costs that were measured with KVM and a guest that only writes.
    fn default() -> Self {
        Self { write: 40e-9, fault: 10e-6, exit: 20e-6, harvest: 50e-6, page: 0.25e-6, look: 50e-6 }
    }
}

/// One vCPU with its working set and its ring.
#[derive(Debug, Clone)]
pub(super) struct Vcpu {
    phases: Vec<Phase>,
    current: usize,
    /// Time left of the current phase, in seconds.
    left: f64,
    /// Number of entries of the ring that belong to pages of earlier phases.
    earlier: f64,
    /// Number of pages of the present working set that are in the ring: those that are not
    /// protected.
    touched: f64,
    /// Time since which the vCPU is stopped, or `None` while it runs.
    pub(super) stopped: Option<f64>,
    pub(super) writes: f64,
    pub(super) faults: f64,
}

/// Number of unwritten pages below which the whole working set counts as written.
const REST: f64 = 0.5;

impl Vcpu {
    pub(super) fn new(phases: Vec<Phase>) -> Self {
        let left = phases[0].seconds;
        Self { phases, current: 0, left, earlier: 0.0, touched: 0.0, stopped: None, writes: 0.0, faults: 0.0 }
    }

    fn phase(&self) -> &Phase {
        &self.phases[self.current]
    }

    /// Returns the number of used entries in the ring.
    pub(super) fn used(&self) -> f64 {
        self.earlier + self.touched
    }

    /// Records that the ring was harvested.
    pub(super) fn emptied(&mut self) {
        (self.earlier, self.touched) = (0.0, 0.0);
    }

    /// Returns the time of a write in seconds, without faults. Infinite if the vCPU does not write.
    fn pace(&self, costs: &Costs) -> f64 {
        (1.0 / self.phase().rate).max(costs.write)
    }

    fn complete(&self) -> bool {
        self.phase().pages - self.touched < REST
    }

    /// Returns the number of writes until `touched` pages of the working set are written.
    fn writes_until(&self, touched: f64) -> f64 {
        let pages = self.phase().pages;
        match self.phase().order {
            Order::Uniform => pages * ((pages - self.touched) / (pages - touched)).ln(),
            Order::Sequential => touched - self.touched,
        }
    }

    /// Returns the seconds until the next event of this vCPU: its ring, with room for `usable`
    /// entries, is full, or the phase ends.
    pub(super) fn next(&self, usable: f64, costs: &Costs) -> f64 {
        let full = usable - self.earlier;
        let pace = self.pace(costs);
        if self.stopped.is_some()
            || pace.is_infinite()
            || self.complete()
            || full >= self.phase().pages - REST
        {
            return self.left;
        }
        if self.used() >= usable {
            return 0.0;
        }
        self.left.min(self.writes_until(full) * pace + (full - self.touched) * costs.fault)
    }

    /// Returns true if the ring has no room left.
    pub(super) fn full(&self, usable: f64) -> bool {
        // The tolerance is the rounding error of the time that `next` computed.
        self.used() >= usable - 1e-6
    }

    /// Lets `seconds` pass, at most the result of `next`.
    pub(super) fn advance(&mut self, seconds: f64, costs: &Costs) {
        let pace = self.pace(costs);
        if self.stopped.is_none() && pace.is_finite() && seconds > 0.0 {
            if self.complete() {
                self.writes += seconds / pace;
            } else {
                let touched = self.touched_after(seconds, pace, costs.fault);
                let (faults, writes) = (touched - self.touched, self.writes_until(touched));
                // The time that is left when the working set is complete is used for writes that do
                // not fault.
                let left = seconds - writes * pace - faults * costs.fault;
                self.faults += faults;
                self.writes += writes + left.max(0.0) / pace;
                self.touched = touched;
            }
        }
        self.left -= seconds;
        if self.left <= 1e-9 {
            self.current = (self.current + 1) % self.phases.len();
            self.left = self.phase().seconds;
            self.earlier += self.touched;
            self.touched = 0.0;
        }
    }

    /// Returns the number of touched pages of the working set after `seconds` of running.
    fn touched_after(&self, seconds: f64, pace: f64, fault: f64) -> f64 {
        let (pages, from) = (self.phase().pages, self.touched);
        if self.phase().order == Order::Sequential {
            return (from + seconds / (pace + fault)).min(pages - REST / 4.0);
        }
        // The time as a function of pages is convex, so Newton's method from the right converges to
        // the solution. Both bounds are on the right: faults alone, at the first moment's share of
        // new pages, and writes alone.
        let slope = |at: f64| pace * pages / (pages - at) + fault;
        let time = |at: f64| pace * pages * ((pages - from) / (pages - at)).ln() + fault * (at - from);
        let most = pages - REST / 4.0;
        let mut at = (from + seconds / slope(from))
            .min(pages - (pages - from) * (-seconds / (pace * pages)).exp())
            .min(most);
        for _ in 0..20 {
            let step = (time(at) - seconds) / slope(at);
            at = (at - step).clamp(from, most);
            if step.abs() < 1e-7 {
                break;
            }
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_agrees_with_a_page_by_page_simulation() {
        let costs = Costs::default();
        let mut state = 7_u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            usize::try_from(state >> 33).unwrap() % below
        };
        for (pages, rate) in [(1000, f64::INFINITY), (1000, 50_000.0), (100_000, 20_000.0)] {
            let mut vcpu = Vcpu::new(vec![Phase::uniform(1e9, rate, pages as f64)]);
            let (mut touched, mut time, mut writes) = (vec![false; pages], 0.0, 0.0);
            let pace = (1.0 / rate).max(costs.write);
            for step in 1..=20 {
                let until = f64::from(step) * 0.01;
                vcpu.advance(0.01, &costs);
                while time < until {
                    let page = random(pages);
                    time +=
                        pace + if std::mem::replace(&mut touched[page], true) { 0.0 } else { costs.fault };
                    writes += 1.0;
                }
                let counted = touched.iter().filter(|page| **page).count() as f64;
                assert!((vcpu.used() - counted).abs() < 10.0 + counted * 0.05, "{} {counted}", vcpu.used());
                assert!((vcpu.writes - writes).abs() < 100.0 + writes * 0.05, "{} {writes}", vcpu.writes);
            }
        }
    }

    #[test]
    fn ring_is_full_at_the_predicted_time() {
        let costs = Costs::default();
        for (order, rate) in
            [(Order::Uniform, 1e5), (Order::Sequential, 1e5), (Order::Uniform, f64::INFINITY)]
        {
            let phase = Phase { seconds: 100.0, rate, pages: 5000.0, order };
            let mut vcpu = Vcpu::new(vec![phase]);
            vcpu.advance(0.01, &costs);
            let next = vcpu.next(4032.0, &costs);
            vcpu.advance(next * 0.999, &costs);
            assert!(!vcpu.full(4032.0));
            let rest = vcpu.next(4032.0, &costs);
            vcpu.advance(rest, &costs);
            assert!(vcpu.full(4032.0), "{order:?}: {}", vcpu.used());
        }
    }
}
