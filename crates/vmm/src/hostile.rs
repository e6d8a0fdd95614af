//! State that says what bytes say: anything. For the fuzz target and for its test, which runs it on seeded noise. What KVM makes of it is
//! not looked at: what is tried is all that stands between a peer and KVM. Devices have targets of their own, in their crate.

use crate::cpuid::CpuModel;
use crate::state::mirror::{Field, MakeUp};
use crate::state::{
    ClockSaved, CpuidSaved, IoapicSaved, PicSaved, PitSaved, Saved, Sections, SerialSaved, StateError,
    VcpuSaved,
};
use vm_superio::serial::{NoEvents, SerialState};
use vm_superio::{Serial, Trigger};
use vmferry_engine::Section;

/// vCPUs of the guest.
const CPUS: u32 = 2;
/// Most changes that are made; bytes behind them are not looked at.
const CHANGES: usize = 32;

/// An interrupt that nobody hears.
struct Nobody;

impl Trigger for Nobody {
    type E = std::io::Error;

    fn trigger(&self) -> Result<(), std::io::Error> {
        Ok(())
    }
}

/// A guest's sections, made up from `seed`.
fn made_up(seed: u64) -> Vec<Section> {
    let mut state = seed | 1;
    let mut bits = || {
        // Xorshift.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    fn section<T: Saved + MakeUp>(instance: u32, bits: &mut dyn FnMut() -> u64) -> Section {
        T::make_up(bits).section(instance).expect("plain fields")
    }
    let mut sections: Vec<_> = (0..CPUS).map(|cpu| section::<VcpuSaved>(cpu, &mut bits)).collect();
    sections.extend((0..2).map(|chip| section::<PicSaved>(chip, &mut bits)));
    sections.push(section::<IoapicSaved>(0, &mut bits));
    sections.push(section::<PitSaved>(0, &mut bits));
    sections.push(section::<ClockSaved>(0, &mut bits));
    sections.push(section::<CpuidSaved>(0, &mut bits));
    sections.push(section::<SerialSaved>(0, &mut bits));
    sections
}

fn changed(mut bytes: &[u8]) -> Vec<Section> {
    let Some((seed, rest)) = bytes.split_first() else { return Vec::new() };
    let mut sections = made_up((*seed % 8).into());
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

/// Takes the state that `bytes` say apart and makes of it what KVM would be given.
///
/// # Panics
/// If what was understood is not what is saved again.
pub fn drive(bytes: &[u8]) {
    let offer: CpuidSaved = Sections::new(&made_up(0)).and_then(|mut parts| parts.take(0)).expect("good");
    let entries: Vec<_> = offer.entries.iter().map(Field::put).collect();
    let offer = CpuModel::offering(&entries, CPUS);
    // An error is an answer.
    let _ = take(&changed(bytes), &offer);
}

fn again<T: Saved + PartialEq + std::fmt::Debug>(saved: &T) {
    let sections = [saved.section(0).expect("plain fields")];
    let back: T = Sections::new(&sections).and_then(|mut parts| parts.take(0)).expect("what was written");
    assert_eq!(&back, saved);
}

fn take(sections: &[Section], offer: &CpuModel) -> Result<(), StateError> {
    let mut parts = Sections::new(sections)?;
    for cpu in 0..CPUS {
        let vcpu: VcpuSaved = parts.take(cpu)?;
        again(&vcpu);
        vcpu.to_kvm();
    }
    for chip in 0..2 {
        let pic: PicSaved = parts.take(chip)?;
        let _: kvm_bindings::kvm_pic_state = pic.put();
    }
    let ioapic: IoapicSaved = parts.take(0)?;
    assert_eq!(IoapicSaved::from_kvm(&ioapic.to_kvm()), ioapic);
    let pit: PitSaved = parts.take(0)?;
    assert_eq!(PitSaved::get(&pit.put()), pit);
    again(&parts.take::<ClockSaved>(0)?);
    let serial: SerialSaved = parts.take(0)?;
    let _ = Serial::from_state(&SerialState::from(&serial), Nobody, NoEvents, std::io::sink());
    let model = offer.of_guest(&parts.take(0)?)?;
    for cpu in 0..CPUS {
        let _ = model.of_vcpu(cpu);
    }
    again(&model.save());
    parts.finish()
}
