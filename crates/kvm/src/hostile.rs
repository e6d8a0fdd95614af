//! State from arbitrary bytes, for the fuzz target and for its test, which runs it on seeded noise.
//!
//! The fuzz target tests all code between a peer and KVM, and KVM does not see the state. To test
//! KVM's handling of changed state, use [`changed_state`], which changes values and keeps the
//! encoding valid. Devices have their own targets, in their crate.

use crate::cpuid::CpuModel;
use crate::state::mirror::{Field, MakeUp};
use crate::state::{
    ClockState, CpuidState, IoapicState, PicState, PitState, Saved, Sections, StateError, VcpuState,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use vmferry_core::Section;

/// Number of vCPUs of the guest.
const CPUS: u32 = 2;
/// Maximum number of changes. Bytes after them are ignored.
const CHANGES: usize = 32;

/// Returns a generator of bits from `seed`.
fn noise(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed | 1;
    move || {
        // Xorshift.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    }
}

/// Function that makes up a section of a device from these bits.
pub type MakeDevice = fn(&mut dyn FnMut() -> u64) -> Section;
/// Function that takes the section of a device and creates the values that the device would
/// receive.
pub type TakeDevice = fn(&mut Sections<'_>) -> Result<(), StateError>;

/// Makes up the sections of a guest from `seed`.
fn made_up(seed: u64, device: MakeDevice) -> Vec<Section> {
    let mut bits = noise(seed);
    fn section<T: Saved + MakeUp>(instance: u32, bits: &mut dyn FnMut() -> u64) -> Section {
        T::make_up(bits).section(instance).expect("plain fields")
    }
    let mut sections: Vec<_> = (0..CPUS).map(|cpu| section::<VcpuState>(cpu, &mut bits)).collect();
    sections.extend((0..2).map(|chip| section::<PicState>(chip, &mut bits)));
    sections.push(section::<IoapicState>(0, &mut bits));
    sections.push(section::<PitState>(0, &mut bits));
    sections.push(section::<ClockState>(0, &mut bits));
    sections.push(section::<CpuidState>(0, &mut bits));
    sections.push(device(&mut bits));
    sections
}

fn changed(mut bytes: &[u8], device: MakeDevice) -> Vec<Section> {
    let Some((seed, rest)) = bytes.split_first() else { return Vec::new() };
    let mut sections = made_up((*seed % 8).into(), device);
    bytes = rest;
    for _ in 0..CHANGES {
        let Some((&[which, low, high, len], rest)) = bytes.split_first_chunk::<4>() else { break };
        let (change, rest) = rest.split_at(rest.len().min(usize::from(len)));
        bytes = rest;
        let at = usize::from(which) % sections.len();
        let section = &mut sections[at];
        let at = usize::from(u16::from_le_bytes([low, high])) % (section.payload.len() + 1);
        match which / 16 {
            0..6 => {
                let end = (at + change.len()).min(section.payload.len());
                section.payload.splice(at..end, change.iter().copied());
            }
            6..10 => drop(section.payload.splice(at..at, change.iter().copied())),
            10 => section.payload.truncate(at),
            11 => section.instance ^= u32::from(low),
            12 => section.version ^= u32::from(low),
            13 => section.name = String::from_utf8_lossy(change).into_owned(),
            14 => section.payload = change.to_vec(),
            _ => {
                let again = section.clone();
                sections.push(again);
            }
        }
    }
    sections
}

/// Parses the state that `bytes` describe, and creates the values that KVM would receive. `device`
/// adds one device of a VMM.
///
/// # Panics
/// Panics if the parsed state differs from the state that is saved again.
pub fn drive(bytes: &[u8], device: (MakeDevice, TakeDevice)) {
    let (make, take_device) = device;
    let good = made_up(0, make);
    let offer: CpuidState = Sections::new(&good).and_then(|mut parts| parts.take_saved(0)).expect("good");
    let entries: Vec<_> = offer.entries.iter().map(Field::put).collect();
    let offer = CpuModel::offering(&entries, CPUS);
    // An error is an accepted result.
    let _ = take(&changed(bytes, make), &offer, take_device);
}

fn again<T: Saved + PartialEq + std::fmt::Debug>(saved: &T) {
    let sections = [saved.section(0).expect("plain fields")];
    let back: T =
        Sections::new(&sections).and_then(|mut parts| parts.take_saved(0)).expect("what was written");
    assert_eq!(&back, saved);
}

fn take(sections: &[Section], offer: &CpuModel, device: TakeDevice) -> Result<(), StateError> {
    let mut parts = Sections::new(sections)?;
    for cpu in 0..CPUS {
        let vcpu: VcpuState = parts.take_saved(cpu)?;
        again(&vcpu);
        vcpu.to_kvm();
    }
    for chip in 0..2 {
        let pic: PicState = parts.take_saved(chip)?;
        let _: kvm_bindings::kvm_pic_state = pic.put();
    }
    let ioapic: IoapicState = parts.take_saved(0)?;
    assert_eq!(IoapicState::from_kvm(&ioapic.to_kvm()), ioapic);
    let pit: PitState = parts.take_saved(0)?;
    assert_eq!(PitState::get(&pit.put()), pit);
    again(&parts.take_saved::<ClockState>(0)?);
    device(&mut parts)?;
    let model = offer.take(&mut parts)?;
    for cpu in 0..CPUS {
        let _ = model.of_vcpu(cpu);
    }
    again(&model.save());
    parts.finish()
}

/// Returns the state of a real VM with some values changed, as `seed` decides. All of it can still
/// be decoded, so KVM sees the changes.
///
/// # Panics
/// Panics if `sections` are not the state of a VM.
#[must_use]
pub fn changed_state(sections: &[Section], seed: u64) -> Vec<Section> {
    let mut bits = noise(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    // Neighbouring seeds start with similar numbers, so the first ones are skipped.
    (0..8).for_each(|_| _ = bits());
    let mut sections = sections.to_vec();
    for _ in 0..=bits() % 4 {
        // Mostly vCPUs, which have the most state.
        let vcpus = sections.iter().filter(|section| section.name == VcpuState::KIND.name).count() as u64;
        let all = if bits().is_multiple_of(4) { sections.len() as u64 } else { vcpus };
        let at = usize::try_from(bits() % all).expect("an index");
        let section = &mut sections[at];
        match section.name.clone().as_str() {
            name if name == VcpuState::KIND.name => alter(section, |vcpu| change_vcpu(vcpu, &mut bits)),
            name if name == PicState::KIND.name => alter::<PicState>(section, |pic| change(pic, &mut bits)),
            name if name == IoapicState::KIND.name => {
                alter::<IoapicState>(section, |ioapic| change(ioapic, &mut bits))
            }
            name if name == PitState::KIND.name => alter::<PitState>(section, |pit| change(pit, &mut bits)),
            name if name == ClockState::KIND.name => {
                alter::<ClockState>(section, |clock| change(clock, &mut bits))
            }
            name if name == CpuidState::KIND.name => {
                alter::<CpuidState>(section, |cpuid| change(cpuid, &mut bits))
            }
            // A device on the bus, or the serial port: KVM does not handle them.
            _ => {}
        }
    }
    sections
}

/// Changes the state in a section.
fn alter<T: Saved>(section: &mut Section, change: impl FnOnce(&mut T)) {
    let one = [section.clone()];
    let mut value = Sections::new(&one)
        .and_then(|mut parts| parts.take_saved(section.instance))
        .expect("what a VM saved");
    change(&mut value);
    *section = value.section(section.instance).expect("plain fields");
}

/// Changes one part of a vCPU's state. The registers that decide what runs change most often.
fn change_vcpu(vcpu: &mut VcpuState, bits: &mut dyn FnMut() -> u64) {
    match bits() % 16 {
        0 => change(&mut vcpu.mp_state, bits),
        1 => change(&mut vcpu.regs, bits),
        2..5 => change(&mut vcpu.sregs, bits),
        5 => change(&mut vcpu.xsave, bits),
        6 => change(&mut vcpu.xcrs, bits),
        7..10 => {
            let index = usize::try_from(bits() % vcpu.msrs.len().max(1) as u64).expect("an index");
            vcpu.msrs.get_mut(index).into_iter().for_each(|msr| change(&mut msr.value, bits));
        }
        10 => change(&mut vcpu.msrs, bits),
        11 => change(&mut vcpu.lapic, bits),
        12 => change(&mut vcpu.events, bits),
        13 => change(&mut vcpu.debug, bits),
        14 => vcpu.shadow_stack = Some(bits() >> (bits() % 64)),
        _ => {
            let mut timed = (vcpu.tsc, vcpu.realtime_ns, vcpu.tsc_khz, vcpu.tsc_deadline);
            change(&mut timed, bits);
            (vcpu.tsc, vcpu.realtime_ns, vcpu.tsc_khz, vcpu.tsc_deadline) = timed;
        }
    }
}

/// Flips a few bits of `value`, or replaces a byte of its encoding by a number of any size, until
/// the result can be decoded.
fn change<T: Serialize + DeserializeOwned>(value: &mut T, bits: &mut dyn FnMut() -> u64) {
    let whole = postcard::to_stdvec(value).expect("plain fields");
    for _ in 0..100 {
        let mut bytes = whole.clone();
        for _ in 0..=bits() % 3 {
            let at = usize::try_from(bits() % bytes.len() as u64).expect("an index");
            if bits().is_multiple_of(2) {
                bytes[at] ^= 1 << (bits() % 8);
            } else {
                let number = postcard::to_stdvec(&(bits() >> (bits() % 64))).expect("a number");
                bytes.splice(at..=at, number);
            }
        }
        if let Ok((changed, [])) = postcard::take_from_bytes(&bytes) {
            *value = changed;
            return;
        }
    }
}
