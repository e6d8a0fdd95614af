//! Loads arbitrary bytes as state, for the fuzz target and for its test. [`vmferry_kvm::hostile`]
//! has the part for KVM's state, and this module has the serial port. Devices on the bus have fuzz
//! targets of their own in their crate.

use crate::state::{Saved as _, Sections, SerialSaved, StateError};
use vm_superio::serial::NoEvents;
use vm_superio::{Serial, Trigger};
use vmferry_engine::Section;
pub use vmferry_kvm::hostile::changed_state;

/// Interrupt line without a listener.
struct Unheard;

impl Trigger for Unheard {
    type E = std::io::Error;

    fn trigger(&self) -> Result<(), std::io::Error> {
        Ok(())
    }
}

fn make_serial(bits: &mut dyn FnMut() -> u64) -> Section {
    SerialSaved::make_up(bits).section(0).expect("plain fields")
}

fn take_serial(parts: &mut Sections<'_>) -> Result<(), StateError> {
    let serial = SerialSaved::take(parts, 0)?;
    let _ = Serial::from_state(&serial.0, Unheard, NoEvents, std::io::sink());
    Ok(())
}

/// Parses the state that `bytes` describe and converts it to what KVM and the serial port would be
/// given.
///
/// # Panics
/// Panics if the parsed state differs from what is saved again.
pub fn drive(bytes: &[u8]) {
    vmferry_kvm::hostile::drive(bytes, (make_serial, take_serial));
}
