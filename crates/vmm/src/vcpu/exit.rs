//! End of a guest.

use std::fmt;

/// Failure of a vCPU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("vCPU {cpu} failed: {what}{}", .rip.map_or_else(String::new, |rip| format!(" (rip {rip:#x})")))]
pub struct VcpuFault {
    /// Number of the vCPU.
    pub cpu: u32,
    /// Description of the failure.
    pub what: String,
    /// Instruction pointer at the failure.
    pub rip: Option<u64>,
}

/// Reason for the end of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Exit {
    /// The guest switched itself off, as operating systems do (ACPI S5).
    SwitchedOff,
    /// The guest wrote the given code to the exit port, as bare-metal guests do.
    PoweredOff(u8),
    /// The guest requested a reset, in one of the ways that a PC has.
    Reset,
    /// A vCPU had a triple fault, which resets a PC. The cause is a crash, or the last method of a
    /// reset that an operating system tries.
    TripleFault(VcpuFault),
    /// A vCPU cannot continue.
    Failed(VcpuFault),
    /// [`Vm::stop`](crate::Vm::stop) was called, or the VM was dropped.
    Stopped,
}

impl Exit {
    /// Returns true if the guest ended at its own request or at that of the owner: it was switched
    /// off, powered off with code 0, or stopped.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        matches!(self, Self::SwitchedOff | Self::PoweredOff(0) | Self::Stopped)
    }

    /// Returns true if a PC would restart for this reason.
    #[must_use]
    pub fn is_reset(&self) -> bool {
        matches!(self, Self::Reset | Self::TripleFault(_))
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SwitchedOff => f.write_str("the guest switched itself off"),
            Self::PoweredOff(code) => write!(f, "the guest ended with code {code}"),
            Self::Reset => f.write_str("the guest asked for a reset"),
            Self::Failed(fault) | Self::TripleFault(fault) => fault.fmt(f),
            Self::Stopped => f.write_str("the VM was stopped"),
        }
    }
}
