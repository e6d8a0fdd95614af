//! The bare-metal guest of vmferry, which boots by PVH, fills its memory, writes to it, and detects
//! pages with unexpected content.
//!
//! `vmferry` embeds this program (`guest/image`), and `qemu-system-x86_64 -kernel` boots the same
//! file. The command line is [`GuestArgs`]. The workload itself is in `vmferry-guest-abi`, which
//! the process guest shares.
//!
//! # Start
//! 1. `boot.s` starts in 32-bit protected mode with paging off. EBX points to the PVH start info.
//!    The page tables for the first 4 GiB are linked into the image, so after a few dozen
//!    instructions the vCPU is in long mode and enters ring 3.
//! 2. [`plan`] copies command line and memory map to a safe place (`pvh.rs`), determines the TSC's
//!    frequency (`clock.rs`), maps memory above 4 GiB (`paging.rs`), starts the other vCPUs by INIT
//!    and SIPI (`smp.rs`; they come through real mode and the same `boot.s`), divides memory
//!    (`memory.rs`), and publishes the plan.
//! 3. [`run`](run::run) runs on every vCPU: fill, wait for the others, then the workload's loop
//!    without end. The first vCPU prints `READY` when all have filled their share.
//!
//! # Memory
//! Physical and virtual addresses are the same, in 2 MiB pages.
//!
//! | from | content |
//! |---|---|
//! | 0x8000 | trampoline of the other vCPUs, in real mode; the rest of the first mebibyte is not used |
//! | 1 MiB | the statistics page ([`STATS_GPA`]), whatever the command line says |
//! | after it | code, tables, stacks of 64 vCPUs: the image, up to `image_end` below 4 MiB |
//! | after it | page directories for memory above 4 GiB, one page per GiB |
//! | after that, or the first range where it fits | the counters, 8 bytes for each page of the working set |
//! | likewise, if memory is allocated or there is a balloon | the allocator's tables, 8 bytes per page (`pool.rs`) |
//! | all other RAM of the memory map, up to 512 GiB | pages of the workload, in ascending order; the allocator gets the rest |
//! | 0xfee00000 | the local APIC, uncached |
//!
//! # Ring 3
//! A paravirtual KVM emulates ring 0, at 0.4 us per instruction, and runs ring 3 natively. For
//! every other hypervisor it makes no difference. All hot code therefore runs in ring 3 with
//! interrupts off. All pages are user pages, the local APIC included, and the I/O bitmap of the
//! task state segment permits the ports. Ring 0 only has the entry, the exceptions (which end in a
//! `PANIC` line) and `hlt`, by which idle vCPUs sleep (`idle.rs`).
//!
//! # Panics
//! Every panic and exception prints `PANIC reason` on the serial port, sets [`State::Panicked`] on
//! the statistics page and writes to the port of QEMU's `isa-debug-exit`. The vCPU then spins. The
//! other vCPUs continue.
#![no_std]
#![no_main]

mod apic;
mod balloon;
mod carve;
mod clock;
mod cpu;
mod idle;
mod lock;
mod memory;
mod own;
mod paging;
mod pool;
mod pvh;
mod rt;
mod run;
mod serial;
mod smp;
mod stats;
mod traps;
mod virtio;

use core::sync::atomic::Ordering;
use run::Plan;
use vmferry_guest_abi::{
    ALLOC_STATS_GPA, GuestArgs, Layout, STATS_GPA, STATS_MAGIC, STATS_VERSION, State, TscClock, Workload,
};

core::arch::global_asm!(include_str!("boot.s"));

unsafe extern "C" {
    /// Value that the boot protocol left in EBX, saved by `boot.s`.
    static start_info: u64;
}

/// Plan for all vCPUs.
static PLAN: smp::Once<Plan> = smp::Once::new();

/// Runs the guest on one vCPU. `boot.s` enters this function on every vCPU, in ring 3, on the
/// vCPU's own stack. `apic_id` is below 64.
#[unsafe(no_mangle)]
extern "C" fn guest_main(apic_id: u64, other: u64) -> ! {
    if other == 0 {
        // SAFETY: the first vCPU gets to this point once, and there are no others yet.
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

/// Examines the machine, makes the plan, and starts the other vCPUs.
///
/// # Safety
/// Must be called once, by the first vCPU, before anything else.
unsafe fn plan() {
    assert!((&raw const stats::PAGE).addr() as u64 == STATS_GPA, "link.ld and STATS_GPA differ");
    assert!((&raw const stats::ALLOC).addr() as u64 == ALLOC_STATS_GPA, "link.ld and ALLOC_STATS_GPA differ");
    serial::init();
    apic::mask_pics();
    // SAFETY: no other vCPU runs.
    unsafe { traps::init() };
    // SAFETY: EBX has the value of the boot protocol, and only the image has been written to.
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
    let workload = &args.workload;
    let device = virtio::find(&args.windows, balloon::DEVICE_ID);
    assert!(
        args.inflate.is_none() || device.is_some(),
        "inflate=: this machine has no balloon (virtio-mmio, version 2)"
    );
    let mut layout = fit(workload, &free, cpus);
    let spare = free.pages() - layout.data_pages - layout.table_pages();
    // If the workload leaves no memory, a balloon has nothing to do.
    let rest = device.is_some() && pool::Tables::worth(&free, &boot, cpus, spare);
    let tables = (workload.alloc.is_some() || rest).then(|| {
        // SAFETY: `map_high` has mapped what `boot.s` had not; `free` is after the image and has no
        // other user.
        let tables = unsafe { pool::Tables::take(&mut free, &boot, device, cpus) };
        layout = fit(workload, &free, cpus);
        tables
    });
    // SAFETY: as above.
    let ram = unsafe { memory::Ram::new(&mut free, layout.table_pages(), layout.data_pages) };
    let pool = tables.map(|tables| pool::Pool::new(tables, &free, &boot, &args, (cpus, clock)));
    publish(&layout, tsc_khz);
    // SAFETY: by the contract of this function this is the only call.
    unsafe { PLAN.set(Plan { args, layout, ram, pool, clock, tsc_khz }) };
}

/// Divides the free memory among `cpus` vCPUs.
fn fit(workload: &Workload, free: &memory::FreeRam, cpus: u32) -> Layout {
    match Layout::new(workload, free.pages(), u64::from(cpus)) {
        Ok(layout) => layout,
        Err(error) => panic!("{error}"),
    }
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
