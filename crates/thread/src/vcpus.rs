//! Table of the threads of a guest's vCPUs.

use crate::{RunDelay, scheduling};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Table of the thread ids of a guest's vCPUs.
///
/// Demand paging uses the table to find the vCPU that waits for a page, and gives the vCPU threads
/// short time slices while they wait for single pages. A migration uses the table to find out for
/// how long the vCPUs wait for processors. Each vCPU thread registers itself. Lookups take no lock.
#[derive(Debug)]
pub struct VcpuThreads {
    /// Thread id of each vCPU. 0 means that no thread is registered, because no thread has the id
    /// 0.
    ids: Box<[AtomicU32]>,
}

impl VcpuThreads {
    /// Returns a table for vCPUs 0 to `vcpus - 1`, without threads.
    #[must_use]
    pub fn new(vcpus: u32) -> Self {
        Self { ids: (0..vcpus).map(|_| AtomicU32::new(0)).collect() }
    }

    /// Returns the number of vCPUs in the table.
    #[must_use]
    pub fn vcpus(&self) -> u32 {
        u32::try_from(self.ids.len()).unwrap_or(u32::MAX)
    }

    /// Registers the calling thread as the thread of vCPU `vcpu`, until the result is dropped. Does
    /// nothing if the table does not contain the vCPU.
    #[must_use = "the thread is forgotten when this is dropped"]
    pub fn register(self: &Arc<Self>, vcpu: u32) -> VcpuThread {
        self.set(vcpu, scheduling::current_thread());
        VcpuThread { table: Arc::clone(self), vcpu }
    }

    /// Returns the number of the vCPU whose thread has the Linux thread id `thread`, or `None` if
    /// no vCPU has such a thread.
    #[must_use]
    pub fn vcpu(&self, thread: u32) -> Option<u32> {
        let found = (0..).zip(&self.ids).find(|(_, id)| id.load(Ordering::Relaxed) == thread);
        found.map(|(vcpu, _)| vcpu).filter(|_| thread != 0)
    }

    /// Gives all registered vCPU threads short time slices if `prefer` is true, and default time
    /// slices if it is false. See [`prefer_latency_of`](scheduling::prefer_latency_of).
    pub fn prefer_latency(&self, prefer: bool) {
        for id in &self.ids {
            scheduling::prefer_latency_of(id.load(Ordering::Relaxed), prefer);
        }
    }

    /// Returns the time for which each vCPU thread has waited for a processor since its start, in
    /// the order of the vCPUs. The time is 0 for a vCPU without a thread. The list is empty if the
    /// time of a thread cannot be read, for example because the kernel does not count it.
    ///
    /// The method opens a file for each vCPU, so the calling thread must be allowed to open files.
    #[must_use]
    pub fn run_delays(&self) -> Vec<Duration> {
        let of = |id: &AtomicU32| match id.load(Ordering::Relaxed) {
            0 => Some(Duration::ZERO),
            thread => RunDelay::open(thread).ok()?.read(),
        };
        self.ids.iter().map(of).collect::<Option<_>>().unwrap_or_default()
    }

    fn set(&self, vcpu: u32, thread: u32) {
        let id = usize::try_from(vcpu).ok().and_then(|vcpu| self.ids.get(vcpu));
        if let Some(id) = id {
            // Relaxed is enough: no other data is published with the number.
            id.store(thread, Ordering::Relaxed);
        }
    }
}

/// Registration of a vCPU thread; see [`VcpuThreads::register`].
#[derive(Debug)]
pub struct VcpuThread {
    table: Arc<VcpuThreads>,
    vcpu: u32,
}

impl Drop for VcpuThread {
    fn drop(&mut self) {
        self.table.set(self.vcpu, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::time::Instant;

    #[test]
    fn threads_are_found_while_they_are_registered() {
        let table = Arc::new(VcpuThreads::new(3));
        let own = scheduling::current_thread();
        assert_eq!((table.vcpu(own), table.vcpu(0)), (None, None));
        let registered = table.register(2);
        let other = std::thread::scope(|scope| {
            let table = &table;
            scope.spawn(move || {
                let _registered = table.register(0);
                table.vcpu(scheduling::current_thread())
            });
            table.vcpu(own)
        });
        assert_eq!(other, Some(2));
        drop(registered);
        assert_eq!(table.vcpu(own), None);
        drop(table.register(9));
    }

    #[test]
    fn thread_that_shares_its_processor_waits_for_it() {
        let table = Arc::new(VcpuThreads::new(2));
        let _registered = table.register(1);
        if RunDelay::open(scheduling::current_thread()).ok().and_then(|delay| delay.read()).is_none() {
            let reason = "the kernel does not count the time for which a thread waits for a processor";
            return vmferry_testkit::skip(vmferry_testkit::Need::Kernel, reason);
        }
        let before = table.run_delays();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            // More threads than processors, so that this thread waits, too.
            for _ in 0..=std::thread::available_parallelism().unwrap().get() {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        std::hint::black_box(());
                    }
                });
            }
            let began = Instant::now();
            while table.run_delays()[1] == before[1] && began.elapsed() < vmferry_testkit::PATIENCE {}
            stop.store(true, Ordering::Relaxed);
        });
        let after = table.run_delays();
        assert!(after[1] > before[1], "{before:?}, {after:?}");
        assert_eq!(after[0], Duration::ZERO, "the vCPU has no thread");
    }
}
