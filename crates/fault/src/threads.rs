//! Which thread is which vCPU.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The thread ids of a guest's vCPUs, so that a fault can be told to be a vCPU's. Threads register themselves; whoever
/// reads faults looks them up, without a lock.
#[derive(Debug)]
pub struct VcpuThreads {
    /// By vCPU; 0 is nobody: no thread has that id.
    ids: Box<[AtomicU32]>,
}

impl VcpuThreads {
    /// A table for vCPUs 0 to `vcpus - 1`, none registered.
    #[must_use]
    pub fn new(vcpus: u32) -> Self {
        Self { ids: (0..vcpus).map(|_| AtomicU32::new(0)).collect() }
    }

    /// How many vCPUs it has room for.
    #[must_use]
    pub fn vcpus(&self) -> u32 {
        u32::try_from(self.ids.len()).unwrap_or(u32::MAX)
    }

    /// Says that the calling thread is vCPU `vcpu`, until the result is dropped. Does nothing for a vCPU that the table
    /// has no room for.
    #[must_use = "the thread is forgotten when this is dropped"]
    pub fn register(self: &Arc<Self>, vcpu: u32) -> VcpuThread {
        self.set(vcpu, rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs());
        VcpuThread { table: Arc::clone(self), vcpu }
    }

    /// The vCPU whose thread has this id.
    #[must_use]
    pub fn vcpu(&self, thread: u32) -> Option<u32> {
        let found = (0..).zip(&self.ids).find(|(_, id)| id.load(Ordering::Relaxed) == thread);
        found.map(|(vcpu, _)| vcpu).filter(|_| thread != 0)
    }

    /// Whether vCPUs are to run soon when they are woken, rather than long at a time: while they wait for single pages.
    pub(crate) fn prefer_latency(&self, prefer: bool) {
        for id in &self.ids {
            vmferry_thread::scheduling::prefer_latency_of(id.load(Ordering::Relaxed), prefer);
        }
    }

    fn set(&self, vcpu: u32, thread: u32) {
        let id = usize::try_from(vcpu).ok().and_then(|vcpu| self.ids.get(vcpu));
        if let Some(id) = id {
            // Nothing is published by it: the number is all there is.
            id.store(thread, Ordering::Relaxed);
        }
    }
}

/// A thread's place in the table.
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

    #[test]
    fn threads_are_found_while_they_are_registered() {
        let table = Arc::new(VcpuThreads::new(3));
        let own = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
        assert_eq!((table.vcpu(own), table.vcpu(0)), (None, None));
        let registered = table.register(2);
        let other = std::thread::scope(|scope| {
            let table = &table;
            scope.spawn(move || {
                let _registered = table.register(0);
                table.vcpu(rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs())
            });
            table.vcpu(own)
        });
        assert_eq!(other, Some(2));
        drop(registered);
        assert_eq!(table.vcpu(own), None);
        drop(table.register(9));
    }
}
