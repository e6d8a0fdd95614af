//! Conversion between saved types and sections.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use vmferry_core::Section;

/// Reason why state cannot be saved or loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// A required section is missing.
    #[error("the saved state lacks section {name} {instance}")]
    Missing {
        /// Name of the section.
        name: &'static str,
        /// Instance of the section.
        instance: u32,
    },
    /// The saved state has a section that the VM did not take, because the VM has no such device or
    /// fewer devices of this kind.
    #[error("the saved state has section {name} {instance}, which this VM does not have")]
    Unknown {
        /// Name of the section.
        name: String,
        /// Instance of the section.
        instance: u32,
    },
    /// Two sections have the same name and instance.
    #[error("the saved state has section {name} {instance} twice")]
    Duplicate {
        /// Name of the sections.
        name: String,
        /// Instance of the sections.
        instance: u32,
    },
    /// Another version of the program wrote the section.
    #[error("section {name} {instance} has version {found}; this program reads version {known}")]
    Version {
        /// Name of the section.
        name: &'static str,
        /// Instance of the section.
        instance: u32,
        /// Version of the section.
        found: u32,
        /// Version that this program reads.
        known: u32,
    },
    /// The payload cannot be decoded.
    #[error("section {name} {instance} is damaged")]
    Payload {
        /// Name of the section.
        name: &'static str,
        /// Instance of the section.
        instance: u32,
        /// Error of the decoder.
        #[source]
        source: postcard::Error,
    },
    /// The payload has excess bytes after the state.
    #[error("section {name} {instance} is damaged: {excess} bytes too many")]
    Excess {
        /// Name of the section.
        name: &'static str,
        /// Instance of the section.
        instance: u32,
        /// Number of excess bytes.
        excess: usize,
    },
    /// The payload can be decoded but has an invalid value.
    #[error("section {name} {instance} is not valid: {why}")]
    Invalid {
        /// Name of the section.
        name: &'static str,
        /// Instance of the section.
        instance: u32,
        /// Description of the invalid value.
        why: String,
    },
    /// KVM refuses to return or to accept a part of the state.
    #[error("{action} of section {name} {instance} failed")]
    Kvm {
        /// Name of the ioctl.
        action: String,
        /// Name of the section.
        name: &'static str,
        /// Instance of the section.
        instance: u32,
        /// Error that the kernel returned.
        #[source]
        source: io::Error,
    },
    /// KVM refuses the value of a model-specific register.
    #[error(
        "KVM on this host refuses the value {value:#x} for model-specific register {index:#x} of vCPU {cpu}"
    )]
    Msr {
        /// Number of the vCPU.
        cpu: u32,
        /// Number of the register.
        index: u32,
        /// Value of the register.
        value: u64,
    },
    /// The time stamp counter cannot run at the guest's frequency on this host.
    #[error(
        "the guest's time stamp counter runs at {guest} kHz and this host's at {host} kHz, which is more than 250 ppm apart, and KVM on \
         this host cannot scale it (no KVM_CAP_TSC_CONTROL); move the guest to a host whose counter runs at {guest} kHz or can be scaled"
    )]
    TscFrequency {
        /// Frequency of the guest's counter, in kHz.
        guest: u32,
        /// Frequency of this host's counter, in kHz.
        host: u32,
    },
}

impl StateError {
    /// Returns the error for a failure of ioctl `action` on a part of `S`.
    pub(crate) fn kvm<S: Saved>(instance: u32, action: &str, error: kvm_ioctls::Error) -> Self {
        let source = io::Error::from_raw_os_error(error.errno());
        Self::Kvm { action: action.to_owned(), name: S::KIND.name, instance, source }
    }

    /// Returns the error for a section that can be decoded but has an invalid value.
    #[must_use]
    pub fn invalid(kind: SectionKind, instance: u32, why: impl Into<String>) -> Self {
        Self::Invalid { name: kind.name, instance, why: why.into() }
    }
}

/// Name and version of one kind of [`Section`].
///
/// The payload of a section is the state, encoded with `postcard`.
///
/// ```
/// use vmferry_kvm::{SectionKind, Sections};
///
/// # fn main() -> Result<(), vmferry_kvm::StateError> {
/// const COUNTER: SectionKind = SectionKind { name: "counter", version: 1 };
/// let saved = [COUNTER.section(0, &42u64)?];
///
/// let mut sections = Sections::new(&saved)?;
/// let counter: u64 = sections.take(COUNTER, 0)?;
/// sections.finish()?;
/// assert_eq!(counter, 42);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SectionKind {
    /// Name of the section.
    pub name: &'static str,
    /// Version of the format. Increase it when a field is added or removed, or changes its meaning.
    pub version: u32,
}

impl SectionKind {
    /// Returns section number `instance` of this kind, whose payload is `state`.
    ///
    /// # Errors
    /// Returns [`StateError::Payload`] if `state` cannot be encoded. Plain numbers, strings and
    /// lists can always be encoded.
    pub fn section(self, instance: u32, state: &impl Serialize) -> Result<Section, StateError> {
        let payload = postcard::to_stdvec(state);
        let payload = payload.map_err(|source| StateError::Payload { name: self.name, instance, source })?;
        Ok(Section { name: self.name.to_owned(), instance, version: self.version, payload })
    }
}

/// Type that is saved as a section.
pub(crate) trait Saved: Serialize + DeserializeOwned {
    const KIND: SectionKind;

    /// Returns the section of this state.
    fn section(&self, instance: u32) -> Result<Section, StateError> {
        Self::KIND.section(instance, self)
    }
}

/// List of the sections of a guest's state, from which the VM takes the sections one by one.
///
/// Each section can be taken once. [`finish`](Self::finish) finds the sections that were not taken.
/// Take all sections before you change the VM, so that refused state leaves the VM unchanged.
#[derive(Debug)]
pub struct Sections<'a> {
    rest: Vec<&'a Section>,
}

impl<'a> Sections<'a> {
    /// Creates a list that contains all of `sections`.
    ///
    /// # Errors
    /// Returns [`StateError::Duplicate`] if two sections have the same name and instance.
    pub fn new(sections: &'a [Section]) -> Result<Self, StateError> {
        let mut rest: Vec<_> = sections.iter().collect();
        rest.sort_by_key(|s| (&s.name, s.instance));
        let twice = rest.windows(2).find(|w| (&w[0].name, w[0].instance) == (&w[1].name, w[1].instance));
        match twice {
            Some(pair) => {
                Err(StateError::Duplicate { name: pair[0].name.clone(), instance: pair[0].instance })
            }
            None => Ok(Self { rest }),
        }
    }

    /// Takes section number `instance` of `kind`, and returns its decoded state.
    ///
    /// # Errors
    /// Returns [`StateError`] if the section is missing, has another version, or is damaged.
    pub fn take<T: DeserializeOwned>(&mut self, kind: SectionKind, instance: u32) -> Result<T, StateError> {
        self.take_optional(kind, instance)?.ok_or(StateError::Missing { name: kind.name, instance })
    }

    /// Takes section number `instance` of `kind`, and returns its decoded state. Returns `None` if
    /// the list does not have the section.
    ///
    /// # Errors
    /// Returns [`StateError`] if the section has another version or is damaged.
    pub fn take_optional<T: DeserializeOwned>(
        &mut self,
        kind: SectionKind,
        instance: u32,
    ) -> Result<Option<T>, StateError> {
        let SectionKind { name, version: known } = kind;
        let Some(at) = self.rest.iter().position(|s| s.name == name && s.instance == instance) else {
            return Ok(None);
        };
        let section = self.rest.swap_remove(at);
        if section.version != known {
            return Err(StateError::Version { name, instance, found: section.version, known });
        }
        let (value, rest) = postcard::take_from_bytes(&section.payload)
            .map_err(|source| StateError::Payload { name, instance, source })?;
        match rest.len() {
            0 => Ok(Some(value)),
            excess => Err(StateError::Excess { name, instance, excess }),
        }
    }

    /// Takes a section like [`take`](Self::take), with the kind of `T`.
    pub(crate) fn take_saved<T: Saved>(&mut self, instance: u32) -> Result<T, StateError> {
        self.take(T::KIND, instance)
    }

    /// Checks that every section was taken.
    ///
    /// # Errors
    /// Returns [`StateError::Unknown`], which names a section that was not taken.
    pub fn finish(self) -> Result<(), StateError> {
        match self.rest.first() {
            Some(s) => Err(StateError::Unknown { name: s.name.clone(), instance: s.instance }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::mirror::{Field, MakeUp};
    use crate::state::{
        ClockState, DebugRegs, Events, IoapicState, PicState, PitState, Regs, Sregs, VcpuState,
    };
    use proptest::prelude::*;

    /// Returns a stream of bits that proptest can shrink by its seed.
    fn source(seed: u64) -> impl FnMut() -> u64 {
        let mut state = seed;
        move || {
            // SplitMix64.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ z >> 31
        }
    }

    fn all(seed: u64) -> (VcpuState, ClockState, PicState, IoapicState, PitState) {
        let mut bits = source(seed);
        (
            MakeUp::make_up(&mut bits),
            MakeUp::make_up(&mut bits),
            MakeUp::make_up(&mut bits),
            MakeUp::make_up(&mut bits),
            MakeUp::make_up(&mut bits),
        )
    }

    fn sections(seed: u64) -> Vec<Section> {
        let (vcpu, clock, pic, ioapic, pit) = all(seed);
        vec![
            vcpu.section(3).unwrap(),
            clock.section(0).unwrap(),
            pic.section(1).unwrap(),
            ioapic.section(0).unwrap(),
            pit.section(0).unwrap(),
        ]
    }

    proptest! {
        #[test]
        fn any_state_survives_its_sections(seed: u64) {
            let sections = sections(seed);
            let mut taken = Sections::new(&sections).unwrap();
            let read = (
                taken.take_saved(3).unwrap(), taken.take_saved(0).unwrap(), taken.take_saved(1).unwrap(),
                taken.take_saved(0).unwrap(), taken.take_saved(0).unwrap(),
            );
            taken.finish().unwrap();
            prop_assert_eq!(read, all(seed));
        }

        #[test]
        fn every_field_reaches_kvm_and_comes_back(seed: u64) {
            let mut bits = source(seed);
            let regs = Regs::make_up(&mut bits);
            prop_assert_eq!(&Regs::get(&regs.put()), &regs);
            let sregs = Sregs::make_up(&mut bits);
            prop_assert_eq!(&Sregs::get(&sregs.put()), &sregs);
            let events = Events::make_up(&mut bits);
            prop_assert_eq!(&Events::get(&events.put()), &events);
            let debug = DebugRegs::make_up(&mut bits);
            prop_assert_eq!(&DebugRegs::get(&debug.put()), &debug);
            let pic = PicState::make_up(&mut bits);
            prop_assert_eq!(&PicState::get(&pic.put()), &pic);
            let pit = PitState::make_up(&mut bits);
            prop_assert_eq!(&PitState::get(&pit.put()), &pit);
            let ioapic = IoapicState::make_up(&mut bits);
            prop_assert_eq!(&IoapicState::from_kvm(&ioapic.to_kvm()), &ioapic);
        }

        #[test]
        fn truncated_payload_is_an_error(seed: u64, cut in 1usize..4000) {
            let mut section = VcpuState::make_up(&mut source(seed)).section(0).unwrap();
            let keep = section.payload.len().saturating_sub(cut);
            section.payload.truncate(keep);
            let one = [section];
            let error = Sections::new(&one).unwrap().take_saved::<VcpuState>(0).unwrap_err();
            let payload = matches!(error, StateError::Payload { .. });
            prop_assert!(payload, "{}", error);
        }

        #[test]
        fn damaged_payload_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            let one = [Section { name: "vcpu".into(), instance: 0, version: 1, payload: bytes }];
            let _ = Sections::new(&one).unwrap().take_saved::<VcpuState>(0);
        }
    }

    #[test]
    fn error_names_missing_duplicate_and_unknown_sections() {
        let mut list = sections(1);
        list.push(list[0].clone());
        assert_eq!(Sections::new(&list).unwrap_err().to_string(), "the saved state has section vcpu 3 twice");
        list.pop();

        let mut taken = Sections::new(&list).unwrap();
        let missing = taken.take_saved::<VcpuState>(0).unwrap_err().to_string();
        assert_eq!(missing, "the saved state lacks section vcpu 0");
        let left = taken.finish().unwrap_err();
        assert!(matches!(left, StateError::Unknown { .. }), "{left}");

        list[0].version = 9;
        let version = Sections::new(&list).unwrap().take_saved::<VcpuState>(3).unwrap_err().to_string();
        assert_eq!(version, "section vcpu 3 has version 9; this program reads version 1");

        list[1].payload.push(0);
        let excess = Sections::new(&list).unwrap().take_saved::<ClockState>(0).unwrap_err().to_string();
        assert_eq!(excess, "section kvm-clock 0 is damaged: 1 bytes too many");
    }
}
