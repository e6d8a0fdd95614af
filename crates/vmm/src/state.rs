//! Saved state of the VMM's own devices. `vmferry_kvm` saves what is in KVM.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use vm_superio::serial::SerialState;
use vmferry_engine::Section;
pub use vmferry_kvm::StateError;
pub(crate) use vmferry_kvm::{SectionKind, Sections};

/// Type that is saved as a section.
pub(crate) trait Saved: Serialize + DeserializeOwned {
    /// Name of the section.
    const NAME: &'static str;
    /// Version of the format. It increases when a field is added, removed or changes its meaning.
    const VERSION: u32;
    /// Name and version.
    const KIND: SectionKind = SectionKind { name: Self::NAME, version: Self::VERSION };

    /// Returns the section of this state.
    fn section(&self, instance: u32) -> Result<Section, StateError> {
        Self::KIND.section(instance, self)
    }

    /// Takes the section of this type with number `instance` out of `parts`.
    fn take(parts: &mut Sections<'_>, instance: u32) -> Result<Self, StateError> {
        parts.take(Self::KIND, instance)
    }
}

/// State of the 16550 serial port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SerialSaved {
    pub(crate) baud_divisor_low: u8,
    pub(crate) baud_divisor_high: u8,
    pub(crate) interrupt_enable: u8,
    pub(crate) interrupt_identification: u8,
    pub(crate) line_control: u8,
    pub(crate) line_status: u8,
    pub(crate) modem_control: u8,
    pub(crate) modem_status: u8,
    pub(crate) scratch: u8,
    /// Input that the guest has not read.
    pub(crate) input: Vec<u8>,
}

impl Saved for SerialSaved {
    const NAME: &'static str = "serial";
    const VERSION: u32 = 1;
}

impl From<&SerialState> for SerialSaved {
    fn from(state: &SerialState) -> Self {
        Self {
            baud_divisor_low: state.baud_divisor_low,
            baud_divisor_high: state.baud_divisor_high,
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            input: state.in_buffer.clone(),
        }
    }
}

impl From<&SerialSaved> for SerialState {
    fn from(saved: &SerialSaved) -> Self {
        Self {
            baud_divisor_low: saved.baud_divisor_low,
            baud_divisor_high: saved.baud_divisor_high,
            interrupt_enable: saved.interrupt_enable,
            interrupt_identification: saved.interrupt_identification,
            line_control: saved.line_control,
            line_status: saved.line_status,
            modem_control: saved.modem_control,
            modem_status: saved.modem_status,
            scratch: saved.scratch,
            in_buffer: saved.input.clone(),
        }
    }
}

#[cfg(feature = "hostile")]
impl SerialSaved {
    /// Returns a made-up state from these bits.
    pub(crate) fn make_up(bits: &mut dyn FnMut() -> u64) -> Self {
        let mut byte = || bits().to_le_bytes()[0];
        Self {
            baud_divisor_low: byte(),
            baud_divisor_high: byte(),
            interrupt_enable: byte(),
            interrupt_identification: byte(),
            line_control: byte(),
            line_status: byte(),
            modem_control: byte(),
            modem_status: byte(),
            scratch: byte(),
            input: (0..byte() % 40).map(|_| byte()).collect(),
        }
    }
}

#[cfg(test)]
impl Saved for vmferry_kvm::VcpuState {
    const NAME: &'static str = "vcpu";
    const VERSION: u32 = 1;
}

#[cfg(test)]
impl Saved for vmferry_kvm::state::ShadowStackState {
    const NAME: &'static str = "shadow-stack";
    const VERSION: u32 = 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serial_port_survives_its_section() {
        let saved = SerialSaved {
            baud_divisor_low: 1,
            baud_divisor_high: 2,
            interrupt_enable: 3,
            interrupt_identification: 4,
            line_control: 5,
            line_status: 6,
            modem_control: 7,
            modem_status: 8,
            scratch: 9,
            input: vec![10, 11],
        };
        let section = saved.section(0).unwrap();
        // The bytes are part of the wire format and must not change.
        assert_eq!(section.payload, [1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 10, 11]);
        let sections = [section];
        let mut parts = Sections::new(&sections).unwrap();
        assert_eq!(SerialSaved::take(&mut parts, 0).unwrap(), saved);
        parts.finish().unwrap();
        assert_eq!(SerialSaved::from(&SerialState::from(&saved)), saved);
    }
}
