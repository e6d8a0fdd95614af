//! Guest time: the TSC and its frequency.

use crate::cpu::{cpuid, cpuid_eax, in8, out8, tsc};

/// Range of frequencies that a hypervisor or CPU may report. Other values mean a wrong leaf.
const PLAUSIBLE_KHZ: core::ops::RangeInclusive<u32> = 100_000..=20_000_000;

/// Hypervisor leaf with the TSC frequency in kHz (VMware's, which KVM and others share).
const LEAF_TIMING: u32 = 0x4000_0010;

/// Leaf with crystal frequency and TSC ratio (Intel SDM, CPUID leaf 15H).
const LEAF_TSC: u32 = 0x15;

/// Returns the TSC's frequency in kHz: from the command line, else CPUID, else a measurement.
/// Panics if there is none of them.
pub(crate) fn tsc_khz(told: Option<u32>) -> u32 {
    told.or_else(hypervisor_khz)
        .or_else(crystal_khz)
        .or_else(best_pit_khz)
        .expect("the TSC's frequency is unknown and there is no PIT; pass tsc_khz=")
}

fn hypervisor_khz() -> Option<u32> {
    cpuid_eax(LEAF_TIMING).filter(|khz| PLAUSIBLE_KHZ.contains(khz))
}

fn crystal_khz() -> Option<u32> {
    let [denominator, numerator, crystal_hz, _] = cpuid(LEAF_TSC)?;
    let hz = (u64::from(crystal_hz) * u64::from(numerator)).checked_div(u64::from(denominator))?;
    u32::try_from(hz / 1000).ok().filter(|khz| PLAUSIBLE_KHZ.contains(khz))
}

const PIT_HZ: u64 = 1_193_182;
/// Count of the PIT for 25 ms. The exits of the reads around it (tens of microseconds) cause an
/// error of about 0.1 %.
const PIT_COUNT: u16 = 29_830;
/// Number of measurements, of which the shortest counts: a host that takes the vCPU away makes one
/// longer, never shorter.
const PIT_MEASUREMENTS: usize = 3;
/// Maximum number of attempts for these measurements: on a busy host one can take so long that its
/// result is implausible.
const PIT_ATTEMPTS: u32 = 20;
const PIT_CHANNEL_2: u16 = 0x42;
const PIT_COMMAND: u16 = 0x43;
const SPEAKER: u16 = 0x61;
const OUT_2: u8 = 0x20;

fn best_pit_khz() -> Option<u32> {
    (0..PIT_ATTEMPTS)
        .map_while(|_| pit_ticks())
        .filter_map(|ticks| {
            let khz = ticks.checked_mul(PIT_HZ)? / u64::from(PIT_COUNT) / 1000;
            u32::try_from(khz).ok().filter(|khz| PLAUSIBLE_KHZ.contains(khz))
        })
        .take(PIT_MEASUREMENTS)
        .min()
}

/// Returns the TSC ticks while channel 2 of the PIT counts down once (mode 0), or `None` if it does
/// not count.
fn pit_ticks() -> Option<u64> {
    let [low, high] = PIT_COUNT.to_le_bytes();
    // Channel 2 counts, and the speaker is off.
    out8(SPEAKER, (in8(SPEAKER) & !0x02) | 0x01);
    out8(PIT_COMMAND, 0xb0);
    out8(PIT_CHANNEL_2, low);
    out8(PIT_CHANNEL_2, high);
    let start = tsc();
    let mut reads = 0u32;
    while in8(SPEAKER) & OUT_2 == 0 {
        reads += 1;
        if reads == 10_000_000 {
            return None;
        }
    }
    Some(tsc().wrapping_sub(start))
}
