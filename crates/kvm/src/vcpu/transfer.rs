//! Transfer of a vCPU's state out of KVM and into KVM.

use super::msrs::{self, MsrPlan};
use crate::state::mirror::Field;
use crate::state::{Msr, Saved as _, StateError, VcpuState, XsaveState};
use kvm_bindings::{Xsave, kvm_lapic_state, kvm_mp_state, kvm_xcrs, kvm_xsave};
use kvm_ioctls::{Cap, Kvm, VcpuFd};
use std::time::{SystemTime, UNIX_EPOCH};

type Result<T> = std::result::Result<T, StateError>;

/// Size in bytes of the XSAVE area that the ioctl without a length transfers.
const XSAVE_MIN: usize = size_of::<kvm_xsave>();

/// Register `KVM_X86_REG_KVM(KVM_REG_GUEST_SSP)`: the shadow stack pointer, since Linux 6.18
/// (virt/kvm/api.rst, 4.68).
const SHADOW_STACK_POINTER: u64 = 0x2030_0003_0000_0000;

/// Frequency of this host's time stamp counter, and whether KVM can scale it for guests.
#[derive(Debug, Clone, Copy)]
pub(super) struct HostTsc {
    pub(super) khz: u32,
    scales: bool,
}

impl HostTsc {
    /// Queries KVM and `vcpu`. The vCPU must be new, because a vCPU whose state was loaded has the
    /// frequency of its guest.
    pub(super) fn of(kvm: &Kvm, vcpu: &VcpuFd) -> std::result::Result<Self, kvm_ioctls::Error> {
        Ok(Self { khz: vcpu.get_tsc_khz()?, scales: kvm.check_extension(Cap::TscControl) })
    }

    /// Returns whether the counter of a guest can run at `guest` kHz on this host.
    ///
    /// The function must not simply try the frequency. Without `KVM_CAP_TSC_CONTROL`, KVM accepts a
    /// frequency above the host's and then corrects the counter at each entry into the guest
    /// ("catch-up"): between two entries the counter runs at the host's frequency. Within 250 ppm
    /// of the host's frequency (parameter `tsc_tolerance_ppm` of the module kvm), KVM does not
    /// scale and ignores the difference, as between two hosts of one kind.
    fn can_run_at(self, guest: u32) -> bool {
        const TOLERANCE_PPM: u64 = 250;
        let (host, apart) = (u64::from(self.khz), u64::from(self.khz.abs_diff(guest)));
        guest != 0 && (self.scales || apart * 1_000_000 <= host * TOLERANCE_PPM)
    }
}

/// Size of the XSAVE area on this host.
#[derive(Debug, Clone, Copy)]
pub(super) struct XsaveSize(usize);

impl XsaveSize {
    /// Creates the size from the result of `KVM_CHECK_EXTENSION(KVM_CAP_XSAVE2)`: the size in
    /// bytes, or 0 on kernels before 5.17.
    pub(super) fn new(answer: i32) -> Self {
        Self(usize::try_from(answer).unwrap_or(0).max(XSAVE_MIN))
    }

    /// Returns a buffer for the area.
    fn buffer(self, cpu: u32) -> Result<Xsave> {
        Xsave::new((self.0 - XSAVE_MIN).div_ceil(4)).map_err(|e| {
            StateError::invalid(VcpuState::KIND, cpu, format!("an XSAVE area of {} bytes: {e:?}", self.0))
        })
    }
}

/// Returns the nanoseconds since 1970 by the host's clock.
pub(crate) fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the value of a time stamp counter at `now_ns`, given its value `tsc` at `realtime_ns` on
/// a clock that both hosts share.
///
/// The guest's counter continues while the guest does not run, as on a machine that stops for a
/// moment: the passed time is added, so the guest observes its downtime. If the clock went
/// backwards (the clocks of the hosts disagree), nothing is added, because a counter must never go
/// backwards.
pub(super) fn advanced_tsc(tsc: u64, khz: u32, realtime_ns: u64, now_ns: u64) -> u64 {
    let passed = u128::from(now_ns.saturating_sub(realtime_ns));
    let ticks = passed * u128::from(khz) / 1_000_000;
    // The counter wraps at 64 bits like a real one. No guest runs that long.
    tsc.wrapping_add(u64::try_from(ticks & u128::from(u64::MAX)).unwrap_or(0))
}

fn kvm(cpu: u32, action: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> StateError {
    move |error| StateError::kvm::<VcpuState>(cpu, action, error)
}

/// Reads all state of the paused `vcpu`.
///
/// The order matters. The MP state is read first: the read makes KVM process a pending INIT or
/// SIPI, which changes other state. The events are read next: the read makes KVM put the payload of
/// a pending exception into the register in which the guest expects it, CR2 or DR6.
pub(super) fn save(cpu: u32, vcpu: &VcpuFd, plan: &MsrPlan, xsave: XsaveSize) -> Result<VcpuState> {
    let mp_state = vcpu.get_mp_state().map_err(kvm(cpu, "KVM_GET_MP_STATE"))?.mp_state;
    let events = vcpu.get_vcpu_events().map_err(kvm(cpu, "KVM_GET_VCPU_EVENTS"))?;
    let regs = vcpu.get_regs().map_err(kvm(cpu, "KVM_GET_REGS"))?;
    let sregs = vcpu.get_sregs().map_err(kvm(cpu, "KVM_GET_SREGS"))?;
    let lapic = vcpu.get_lapic().map_err(kvm(cpu, "KVM_GET_LAPIC"))?;
    let debug = vcpu.get_debug_regs().map_err(kvm(cpu, "KVM_GET_DEBUGREGS"))?;
    let xcrs = vcpu.get_xcrs().map_err(kvm(cpu, "KVM_GET_XCRS"))?;
    let tsc_khz = vcpu.get_tsc_khz().map_err(kvm(cpu, "KVM_GET_TSC_KHZ"))?;
    // Read both with no other call between them, because the guest gains or loses the time between
    // the two reads.
    let realtime_ns = now_ns();
    let tsc = msrs::get(vcpu, msrs::TSC).ok_or_else(|| {
        StateError::invalid(VcpuState::KIND, cpu, "KVM does not return the time stamp counter")
    })?;
    Ok(VcpuState {
        mp_state,
        regs: Field::get(&regs),
        sregs: Field::get(&sregs),
        xsave: save_xsave(cpu, vcpu, xsave)?,
        xcrs: xcrs.xcrs.iter().take(xcrs.nr_xcrs as usize).map(Field::get).collect(),
        msrs: plan.save(cpu, vcpu)?,
        lapic: lapic.regs.iter().map(|byte| byte.cast_unsigned()).collect(),
        events: Field::get(&events),
        debug: Field::get(&debug),
        tsc,
        realtime_ns,
        tsc_khz,
        tsc_deadline: msrs::get(vcpu, msrs::TSC_DEADLINE).unwrap_or(0),
        shadow_stack: save_shadow_stack(vcpu),
    })
}

/// Returns the shadow stack pointer, or `None` if the guest is shown no shadow stacks (KVM then
/// returns an error).
fn save_shadow_stack(vcpu: &VcpuFd) -> Option<u64> {
    let mut pointer = [0; 8];
    vcpu.get_one_reg(SHADOW_STACK_POINTER, &mut pointer).ok()?;
    Some(u64::from_le_bytes(pointer))
}

fn save_xsave(cpu: u32, vcpu: &VcpuFd, size: XsaveSize) -> Result<XsaveState> {
    let mut buffer = size.buffer(cpu)?;
    if size.0 > XSAVE_MIN {
        // SAFETY: the buffer has the size that KVM reported for the area of this VM.
        unsafe { vcpu.get_xsave2(&mut buffer) }.map_err(kvm(cpu, "KVM_GET_XSAVE2"))?;
    } else {
        let area = vcpu.get_xsave().map_err(kvm(cpu, "KVM_GET_XSAVE"))?;
        return Ok(XsaveState { area: area.region.iter().flat_map(|word| word.to_le_bytes()).collect() });
    }
    let words = buffer.as_fam_struct_ref().xsave.region.iter().chain(buffer.as_slice());
    Ok(XsaveState { area: words.flat_map(|word| word.to_le_bytes()).collect() })
}

/// Loads `saved` into `vcpu`.
///
/// The order matters. Special registers come first, because they contain the address of the local
/// APIC and the mode of the vCPU. Extended control registers come before the registers that they
/// enable. The local APIC comes before the deadline of the timer, because setting the APIC stops
/// its timer. Events and the MP state come last, because setting registers clears some of them.
pub(super) fn load(
    cpu: u32,
    vcpu: &VcpuFd,
    saved: &VcpuState,
    (xsave, tsc): (XsaveSize, HostTsc),
) -> Result<()> {
    load_tsc_frequency(cpu, vcpu, saved.tsc_khz, tsc)?;
    vcpu.set_sregs(&saved.sregs.put()).map_err(kvm(cpu, "KVM_SET_SREGS"))?;
    load_xcrs(cpu, vcpu, saved)?;
    load_xsave(cpu, vcpu, &saved.xsave, xsave)?;
    vcpu.set_debug_regs(&saved.debug.put()).map_err(kvm(cpu, "KVM_SET_DEBUGREGS"))?;
    load_lapic(cpu, vcpu, &saved.lapic)?;
    msrs::load(cpu, vcpu, &saved.msrs)?;
    if let Some(pointer) = saved.shadow_stack {
        let set = vcpu.set_one_reg(SHADOW_STACK_POINTER, &pointer.to_le_bytes());
        set.map_err(kvm(cpu, "KVM_SET_ONE_REG of the shadow stack pointer"))?;
    }
    let tsc = advanced_tsc(saved.tsc, saved.tsc_khz, saved.realtime_ns, now_ns());
    let mut timed = vec![Msr { index: msrs::TSC, value: tsc }];
    if saved.tsc_deadline != 0 {
        timed.push(Msr { index: msrs::TSC_DEADLINE, value: saved.tsc_deadline });
    }
    for msr in timed {
        let (index, value) = (msr.index, msr.value);
        if !msrs::set(vcpu, msr) {
            return Err(StateError::Msr { cpu, index, value });
        }
    }
    vcpu.set_regs(&saved.regs.put()).map_err(kvm(cpu, "KVM_SET_REGS"))?;
    vcpu.set_vcpu_events(&saved.events.put()).map_err(kvm(cpu, "KVM_SET_VCPU_EVENTS"))?;
    let mp_state = kvm_mp_state { mp_state: saved.mp_state };
    vcpu.set_mp_state(mp_state).map_err(kvm(cpu, "KVM_SET_MP_STATE"))
}

/// Sets the frequency of the vCPU's counter to the guest's.
fn load_tsc_frequency(cpu: u32, vcpu: &VcpuFd, guest: u32, host: HostTsc) -> Result<()> {
    if !host.can_run_at(guest) {
        return Err(StateError::TscFrequency { guest, host: host.khz });
    }
    if vcpu.get_tsc_khz() == Ok(guest) {
        return Ok(());
    }
    vcpu.set_tsc_khz(guest).map_err(|error| {
        let host = host.khz;
        let why = format!(
            "the time stamp counter, {host} kHz on this host, cannot be scaled to {guest} kHz: {error}"
        );
        StateError::invalid(VcpuState::KIND, cpu, why)
    })
}

fn load_xcrs(cpu: u32, vcpu: &VcpuFd, saved: &VcpuState) -> Result<()> {
    let mut xcrs = kvm_xcrs::default();
    if saved.xcrs.len() > xcrs.xcrs.len() {
        return Err(StateError::invalid(
            VcpuState::KIND,
            cpu,
            format!("{} control registers", saved.xcrs.len()),
        ));
    }
    for (to, from) in xcrs.xcrs.iter_mut().zip(&saved.xcrs) {
        *to = from.put();
        xcrs.nr_xcrs += 1;
    }
    vcpu.set_xcrs(&xcrs).map_err(kvm(cpu, "KVM_SET_XCRS"))
}

fn load_xsave(cpu: u32, vcpu: &VcpuFd, saved: &XsaveState, size: XsaveSize) -> Result<()> {
    // An area from a host with fewer features is shorter. The state beyond its end is the initial
    // state.
    if saved.area.len() > size.0 || saved.area.len() < XSAVE_MIN || !saved.area.len().is_multiple_of(4) {
        let why = format!("an XSAVE area of {} bytes, where this host has {}", saved.area.len(), size.0);
        return Err(StateError::invalid(VcpuState::KIND, cpu, why));
    }
    let mut buffer = size.buffer(cpu)?;
    let mut words = saved.area.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
    // SAFETY: the length of the flexible array, which must not change, is not modified.
    let region = unsafe { &mut buffer.as_mut_fam_struct().xsave.region };
    region.iter_mut().zip(&mut words).for_each(|(to, from)| *to = from);
    buffer.as_mut_slice().iter_mut().zip(words).for_each(|(to, from)| *to = from);
    // SAFETY: the buffer has the size that KVM reported for the area of this VM, which is the size
    // that KVM reads.
    unsafe { vcpu.set_xsave2(&buffer) }.map_err(kvm(cpu, "KVM_SET_XSAVE"))
}

fn load_lapic(cpu: u32, vcpu: &VcpuFd, saved: &[u8]) -> Result<()> {
    let mut lapic = kvm_lapic_state::default();
    if saved.len() != lapic.regs.len() {
        return Err(StateError::invalid(
            VcpuState::KIND,
            cpu,
            format!("a local APIC of {} bytes", saved.len()),
        ));
    }
    for (to, from) in lapic.regs.iter_mut().zip(saved) {
        *to = from.cast_signed();
    }
    vcpu.set_lapic(&lapic).map_err(kvm(cpu, "KVM_SET_LAPIC"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequency_is_accepted_if_kvm_tolerates_it_or_can_scale_to_it() {
        let fixed = HostTsc { khz: 2_000_000, scales: false };
        for (guest, accepted) in [
            (2_000_000, true),
            (2_000_500, true),
            (2_000_501, false),
            (1_999_500, true),
            (1_999_499, false),
            (4_000_000, false),
            (1, false),
            (0, false),
            (u32::MAX, false),
        ] {
            assert_eq!(fixed.can_run_at(guest), accepted, "{guest}");
        }
        let scaling = HostTsc { khz: 2_000_000, scales: true };
        assert!(scaling.can_run_at(4_000_000) && scaling.can_run_at(1) && !scaling.can_run_at(0));
        assert!(
            !HostTsc { khz: 0, scales: false }.can_run_at(2_000_000),
            "KVM did not determine the host's frequency"
        );
    }

    #[test]
    fn counter_advances_while_the_guest_does_not_run() {
        assert_eq!(advanced_tsc(1000, 2_000_000, 5_000, 5_000), 1000);
        assert_eq!(advanced_tsc(1000, 2_000_000, 5_000, 6_000), 3000);
        // Clocks that disagree never turn the counter back.
        assert_eq!(advanced_tsc(1000, 2_000_000, 6_000, 5_000), 1000);
        assert_eq!(advanced_tsc(7, 2_500_000, 0, 1_000_000_000), 2_500_000_007);
        // A year later, and at the end of the counter.
        assert_eq!(advanced_tsc(0, 4_000_000, 0, 31_536_000_000_000_000), 126_144_000_000_000_000);
        assert_eq!(advanced_tsc(u64::MAX, 1_000_000, 0, 1), 0);
    }
}
