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

    /// Returns the section of the state that earlier versions do not know, or `None` if that state
    /// has its default value. A target of an earlier version accepts a guest without this section,
    /// and refuses a guest with it.
    fn additions(&self, instance: u32) -> Result<Option<Section>, StateError> {
        let _ = instance;
        Ok(None)
    }

    /// Takes the section of [`additions`](Self::additions) out of `parts`, if it is there.
    fn take_additions(&mut self, parts: &mut Sections<'_>, instance: u32) -> Result<(), StateError> {
        let _ = (parts, instance);
        Ok(())
    }
}

/// State of the 16550 serial port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SerialSaved(#[serde(with = "SerialFields")] pub(crate) SerialState);

/// Fields of the section, in its order.
#[derive(Serialize, Deserialize)]
#[serde(remote = "SerialState")]
struct SerialFields {
    baud_divisor_low: u8,
    baud_divisor_high: u8,
    interrupt_enable: u8,
    interrupt_identification: u8,
    line_control: u8,
    line_status: u8,
    modem_control: u8,
    modem_status: u8,
    scratch: u8,
    /// Input that the guest has not read.
    in_buffer: Vec<u8>,
}

impl Saved for SerialSaved {
    const NAME: &'static str = "serial";
    const VERSION: u32 = 1;
}

#[cfg(feature = "hostile")]
impl SerialSaved {
    /// Returns a made-up state from these bits.
    pub(crate) fn make_up(bits: &mut dyn FnMut() -> u64) -> Self {
        let mut byte = || bits().to_le_bytes()[0];
        Self(SerialState {
            baud_divisor_low: byte(),
            baud_divisor_high: byte(),
            interrupt_enable: byte(),
            interrupt_identification: byte(),
            line_control: byte(),
            line_status: byte(),
            modem_control: byte(),
            modem_status: byte(),
            scratch: byte(),
            in_buffer: (0..byte() % 40).map(|_| byte()).collect(),
        })
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
        let saved = SerialSaved(SerialState {
            baud_divisor_low: 1,
            baud_divisor_high: 2,
            interrupt_enable: 3,
            interrupt_identification: 4,
            line_control: 5,
            line_status: 6,
            modem_control: 7,
            modem_status: 8,
            scratch: 9,
            in_buffer: vec![10, 11],
        });
        let section = saved.section(0).unwrap();
        // The bytes are part of the wire format and must not change.
        assert_eq!(section.payload, [1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 10, 11]);
        let sections = [section];
        let mut parts = Sections::new(&sections).unwrap();
        assert_eq!(SerialSaved::take(&mut parts, 0).unwrap(), saved);
        parts.finish().unwrap();
    }
}
