//! How a guest ends.

use std::fmt;

/// What made a vCPU fail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VcpuFault {
    /// Which vCPU.
    pub cpu: u32,
    /// What KVM said.
    pub what: String,
    /// Where it was.
    pub rip: Option<u64>,
}

impl fmt::Display for VcpuFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vCPU {} failed: {}", self.cpu, self.what)?;
        match self.rip {
            Some(rip) => write!(f, " (rip {rip:#x})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for VcpuFault {}

/// How a guest ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Exit {
    /// It switched itself off, as operating systems do (ACPI S5).
    SwitchedOff,
    /// It wrote this code to the exit port, as measuring guests do.
    PoweredOff(u8),
    /// It asked for a reset, by one of the ways that a PC has.
    Reset,
    /// A vCPU met a fault on its way to a fault on its way to a fault, which resets a PC: a crash, or the last way to reset that an
    /// operating system tries.
    TripleFault(VcpuFault),
    /// A vCPU cannot go on.
    Failed(VcpuFault),
    /// [`Vm::stop`](crate::Vm::stop) was called, or the VM was dropped.
    Stopped,
}

impl Exit {
    /// Whether the guest ended because it or its owner wanted it to: switched off, powered off with code 0, or stopped.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        matches!(self, Self::SwitchedOff | Self::PoweredOff(0) | Self::Stopped)
    }

    /// Whether the guest would start anew on a PC.
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
