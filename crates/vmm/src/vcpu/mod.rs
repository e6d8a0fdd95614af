//! vCPUs: a thread each, which runs guest code, stops when told, and saves and loads its vCPU's state.
//!
//! [`VcpuPark`](vmferry_kvm::VcpuPark) stops and starts the threads, and says why a pause is never lost and leaves no I/O half done.

mod exit;
mod run;

pub use exit::{Exit, VcpuFault};
pub(crate) use run::{Command, Vcpu, VcpuContext};

/// Where the phase of every vCPU is seen, and how the guest ended.
pub(crate) type Board = vmferry_kvm::VcpuPark<Exit>;
/// What slows vCPUs.
pub(crate) type Throttle = vmferry_kvm::Throttle<Exit>;

/// How long a vCPU thread may take for anything it is asked. A vCPU answers within a millisecond; one that waits for
/// memory that does not come (a host that swaps, a hung file system) may take longer.
pub(crate) const PATIENCE: std::time::Duration = std::time::Duration::from_secs(10);
