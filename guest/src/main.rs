//! The bare-metal guest of vmferry.
#![no_std]
#![no_main]

mod apic;
mod clock;
mod cpu;
mod idle;
mod memory;
mod paging;
mod pvh;
mod rt;
mod run;
mod serial;
mod smp;
mod stats;
mod traps;

use core::sync::atomic::Ordering;
use run::Plan;
use vmferry_guest_abi::{GuestArgs, Layout, STATS_GPA, STATS_MAGIC, STATS_VERSION, State, TscClock};

core::arch::global_asm!(include_str!("boot.s"));

unsafe extern "C" {
    /// What the boot protocol left in EBX, saved by `boot.s`.
    static start_info: u64;
}

/// What to do, for all vCPUs.
static PLAN: smp::Once<Plan> = smp::Once::new();

/// Where `boot.s` leads every vCPU, in ring 3, on its own stack. `apic_id` is below 64.
#[unsafe(no_mangle)]
extern "C" fn guest_main(apic_id: u64, other: u64) -> ! {
    if other == 0 {
        // SAFETY: the first vCPU comes here once, and there are no others yet.
        unsafe { plan() };
    } else {
        smp::arrived();
    }
    let plan = PLAN.get();
    assert!(
        apic_id < plan.layout.cpus,
        "APIC id {apic_id} with {} vCPUs: use contiguous ids",
        plan.layout.cpus
    );
    apic::enable();
    run::run(plan, apic_id)
}

/// Finds out what there is and what is to be done, and starts the other vCPUs.
///
/// # Safety
/// Called once, by the first vCPU, as the first thing.
unsafe fn plan() {
    assert!((&raw const stats::PAGE).addr() as u64 == STATS_GPA, "link.ld and STATS_GPA differ");
    serial::init();
    // SAFETY: no other vCPU runs.
    unsafe { traps::init() };
    // SAFETY: EBX is what the boot protocol says, and only the image has been written to.
    let boot = unsafe { pvh::BootInfo::copy(start_info) };
    let args: GuestArgs = match boot.cmdline().parse() {
        Ok(args) => args,
        Err(error) => panic!("{error}"),
    };
    let base = cpu::tsc();
    let tsc_khz = clock::tsc_khz(args.tsc_khz);
    let clock = TscClock::new(tsc_khz, base);

    let mut free = memory::FreeRam::new(&boot);
    paging::map_high(&mut free);
    let cpus = smp::start_others(args.cpus, &clock);
    let layout = match Layout::new(&args.workload, free.pages(), u64::from(cpus)) {
        Ok(layout) => layout,
        Err(error) => panic!("{error}"),
    };
    // SAFETY: `map_high` has mapped what `boot.s` had not; `free` is behind the image and nobody else has it.
    let ram = unsafe { memory::Ram::new(free, layout.table_pages()) };
    publish(&layout, tsc_khz);
    // SAFETY: by the promise above this is the only call.
    unsafe { PLAN.set(Plan { args, layout, ram, clock, tsc_khz }) };
}

/// Makes the statistics page valid.
fn publish(layout: &Layout, tsc_khz: u32) {
    let header = &stats::PAGE.header;
    header.version.store(STATS_VERSION, Ordering::Relaxed);
    header.cpus.store(layout.cpus, Ordering::Relaxed);
    header.tsc_khz.store(u64::from(tsc_khz), Ordering::Relaxed);
    header.data_pages.store(layout.data_pages, Ordering::Relaxed);
    header.ws_pages.store(layout.ws_pages, Ordering::Relaxed);
    header.state.store(State::Filling.code(), Ordering::Relaxed);
    header.magic.store(STATS_MAGIC, Ordering::Release);
}
