//! vCPUs, each with a thread that runs guest code, pauses on request, and saves and loads the
//! vCPU's state.
//!
//! [`VcpuPark`](vmferry_kvm::VcpuPark) pauses and resumes the threads, and explains why a pause is
//! never lost and leaves no I/O half done.

mod exit;
mod run;

pub use exit::{Exit, VcpuFault};
pub(crate) use run::{Command, Vcpu, VcpuContext};

/// Board that shows the phase of every vCPU, and how the guest ended.
pub(crate) type VcpuBoard = vmferry_kvm::VcpuPark<Exit>;
/// Throttle of the vCPUs.
pub(crate) type Throttle = vmferry_kvm::Throttle<Exit>;

/// Time that a vCPU thread may take for a request. A vCPU responds within a millisecond, unless it
/// waits for memory (a host that swaps, a hung file system).
pub(crate) const PATIENCE: std::time::Duration = std::time::Duration::from_secs(10);
