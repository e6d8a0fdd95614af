//! Example VMM based on `kvm-ioctls` and `vm-memory` that boots a guest and moves it to a second VM
//! over a Unix socket. The guest stamps every page that it writes, and checks all stamps on the
//! target.
//!
//! ```sh
//! cargo run --release -p vmferry --features kvm,vm-memory,fault --example vm_memory
//! ```
//!
//! The VMM has one vCPU, 64 MiB of memory and a serial port that collects lines. The `impl` blocks
//! of `Migratable`, `SourceVm` and `TargetVm` contain everything that vmferry needs. The guest is
//! the bare-metal guest of this repository.

use kvm_bindings::{KVM_PIT_SPEAKER_DUMMY, kvm_pit_config, kvm_regs, kvm_segment};
use kvm_ioctls::{Kvm, VcpuExit};
use linux_loader::configurator::pvh::PvhBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams};
use linux_loader::loader::elf::PvhBootCapability;
use linux_loader::loader::elf::start_info::{hvm_memmap_table_entry, hvm_start_info};
use linux_loader::loader::{Elf, KernelLoader};
use std::io::Cursor;
use std::ops::ControlFlow;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryMmap};
use vmferry::fault::UffdOptions;
use vmferry::kvm::{Guest, GuestOptions, Sections, missing_capabilities};
use vmferry::vm_memory::VmMemory;
use vmferry::{
    Arrival, DemandPaging, DirtyTracker, Ended, GuestMemory, Listener, MachineConfig, Migratable, Migration,
    MigrationMode, RunState, Section, Settings, SourceVm, TargetVm, TrackerKind, Uri, VmError, receive,
};
use vmferry_guest_abi::{DEBUG_EXIT_PORT, STATS_GPA, StatsSnapshot, offset};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;
type VmResult<T> = std::result::Result<T, VmError>;

const MEMORY: u64 = 64 << 20;
const WORKLOAD: &str = "uniform,ws=16M,rate=50k,fill=random";
/// Maximum time for each step of the guest.
const PATIENCE: Duration = Duration::from_secs(60);

// Addresses that a PC defines, and addresses at which this VMM puts the boot data.
const SERIAL: u16 = 0x3f8;
const SERIAL_STATUS: u16 = SERIAL + 5;
const TRANSMITTER_EMPTY: u8 = 0x20;
const TSS: usize = 0xfffb_d000;
const IDENTITY_MAP: u64 = 0xfffb_c000;
const GDT: GuestAddress = GuestAddress(0x500);
const START_INFO: GuestAddress = GuestAddress(0x6000);
const MEMORY_MAP: GuestAddress = GuestAddress(0x7000);
const CMDLINE: GuestAddress = GuestAddress(0x2_0000);

struct Machine {
    guest: Guest<String>,
    memory: Arc<VmMemory<AtomicBitmap>>,
    serial: Arc<Mutex<Vec<u8>>>,
}

impl Machine {
    fn new(kvm: &Kvm, incoming: bool) -> Result<Self> {
        let memory =
            GuestMemoryMmap::<AtomicBitmap>::from_ranges(&[(GuestAddress(0), usize::try_from(MEMORY)?)])?;
        let memory = Arc::new(VmMemory::new(memory)?);
        let vm = kvm.create_vm()?;
        vm.set_tss_address(TSS)?;
        vm.set_identity_map_address(IDENTITY_MAP)?;
        vm.create_irq_chip()?;
        vm.create_pit2(kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() })?;
        let (ram, marks) = (Arc::clone(&memory) as _, |region| memory.marks(region));
        // SAFETY: the VM is new, and no other code creates vCPUs in it.
        let mut guest = unsafe { Guest::new(kvm, vm, ram, marks, &GuestOptions::new().incoming(incoming)) }?;
        let serial = Arc::<Mutex<Vec<u8>>>::default();
        guest.spawn(|_cpu| {
            let serial = Arc::clone(&serial);
            move |exit: VcpuExit<'_>| handle_exit(exit, &serial)
        })?;
        Ok(Self { guest, memory, serial })
    }

    /// Loads the guest's kernel, and sets the registers of the vCPU as the PVH boot protocol
    /// requires.
    fn boot(&self) -> Result<()> {
        let ram = self.memory.memory();
        let kernel = Elf::load(ram, None, &mut Cursor::new(vmferry_guest_image::ELF), None)?;
        let PvhBootCapability::PvhEntryPresent(entry) = kernel.pvh_boot_cap else {
            return Err("the kernel has no PVH entry point".into());
        };
        let cmdline = format!("workload={WORKLOAD} stats=page cpus=1 tsc_khz={}\0", self.guest.tsc_khz());
        ram.write_slice(cmdline.as_bytes(), CMDLINE)?;
        let range =
            |addr, end| hvm_memmap_table_entry { addr, size: end - addr, type_: 1, ..Default::default() };
        let map = [range(0, 0x9_fc00), range(1 << 20, MEMORY)];
        let info = hvm_start_info {
            magic: 0x336e_c578,
            version: 1,
            cmdline_paddr: CMDLINE.0,
            memmap_paddr: MEMORY_MAP.0,
            memmap_entries: u32::try_from(map.len())?,
            ..Default::default()
        };
        let mut params = BootParams::new(&info, START_INFO);
        params.set_sections(&map, MEMORY_MAP);
        PvhBootConfigurator::write_bootparams(&params, ram)?;
        // Flat code and data segments, and a task segment.
        let gdt = [0u64, 0x00cf_9b00_0000_ffff, 0x00cf_9300_0000_ffff, 0x0000_8b00_0000_0067];
        ram.write_slice(&gdt.map(u64::to_le_bytes).concat(), GDT)?;

        let vcpu = self.guest.vcpu(0)?;
        let code = kvm_segment {
            limit: u32::MAX,
            selector: 8,
            type_: 0xb,
            present: 1,
            db: 1,
            s: 1,
            g: 1,
            ..Default::default()
        };
        let data = kvm_segment { selector: 16, type_: 3, ..code };
        let task = kvm_segment { limit: 0x67, selector: 24, db: 0, s: 0, g: 0, ..code };
        let mut sregs = vcpu.get_sregs()?;
        (sregs.cs, sregs.tr) = (code, task);
        (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
        (sregs.gdt.base, sregs.gdt.limit) = (GDT.0, 31);
        (sregs.idt.base, sregs.idt.limit) = (0, 0);
        // Protected mode without paging.
        (sregs.cr0, sregs.cr4, sregs.efer) = (0x11, 0, 0);
        vcpu.set_sregs(&sregs)?;
        let (rip, rbx) = (entry.raw_value(), START_INFO.0);
        Ok(vcpu.set_regs(&kvm_regs { rip, rbx, rflags: 2, ..Default::default() })?)
    }

    /// Returns the statistics of the guest, which are in a page at a fixed address.
    fn stats(&self) -> Option<StatsSnapshot> {
        let ram = self.memory.memory();
        let word = |index: usize| ram.load(GuestAddress(STATS_GPA + 8 * index as u64), Ordering::Acquire);
        StatsSnapshot::read(|index| word(index).unwrap_or(0)).ok()
    }

    /// Waits until `done` returns true for the statistics of the guest.
    fn wait(&self, what: &str, done: impl Fn(&StatsSnapshot) -> bool) -> Result<StatsSnapshot> {
        let start = Instant::now();
        loop {
            match self.stats() {
                Some(stats) if stats.corrupt() > 0 => {
                    return Err(format!("the guest has lost a write: {:?}", stats.first_corrupt()).into());
                }
                Some(stats) if done(&stats) => return Ok(stats),
                _ => {}
            }
            let exit = self.guest.park().exit().map(|exit| exit.to_string());
            if let Some(why) = exit.or((start.elapsed() > PATIENCE).then(|| "time is up".into())) {
                let serial = self.serial.lock().map_err(|error| error.to_string())?;
                return Err(
                    format!("waiting for {what}: {why}; {:?}", String::from_utf8_lossy(&serial)).into()
                );
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Handles an exit of the vCPU. Returns `Break` with the reason if the guest must end.
fn handle_exit(exit: VcpuExit<'_>, serial: &Mutex<Vec<u8>>) -> ControlFlow<String> {
    match exit {
        VcpuExit::IoOut(SERIAL, data) => {
            serial.lock().expect("no thread panics while it holds the lock").extend(data);
        }
        VcpuExit::IoOut(DEBUG_EXIT_PORT, data) => {
            return ControlFlow::Break(format!("it ended with {data:?}"));
        }
        VcpuExit::IoIn(SERIAL_STATUS, data) => data.fill(TRANSMITTER_EMPTY),
        VcpuExit::IoIn(_, data) | VcpuExit::MmioRead(_, data) => data.fill(0xff),
        VcpuExit::IoOut(..) | VcpuExit::MmioWrite(..) | VcpuExit::Intr => {}
        exit => return ControlFlow::Break(format!("{exit:?}")),
    }
    ControlFlow::Continue(())
}

impl Migratable for Machine {
    fn config(&self) -> MachineConfig {
        self.guest.config("example")
    }
    fn memory(&self) -> Arc<dyn GuestMemory> {
        self.guest.memory()
    }
}

impl SourceVm for Machine {
    fn tracker(&mut self, kind: Option<TrackerKind>) -> VmResult<Box<dyn DirtyTracker>> {
        self.guest.tracker(kind)
    }
    fn throttle(&mut self, shares: &[f64]) -> VmResult<()> {
        Ok(self.guest.throttle(shares)?)
    }
    fn throttled(&self) -> Vec<Duration> {
        self.guest.throttled()
    }
    fn run_delays(&self) -> Vec<Duration> {
        self.guest.run_delays()
    }
    fn pause(&mut self) -> VmResult<()> {
        Ok(self.guest.pause(PATIENCE)?)
    }
    fn save(&mut self) -> VmResult<Vec<Section>> {
        // A VMM with devices adds the sections of its devices at this point.
        Ok(self.guest.save()?)
    }
    fn release(&mut self) -> VmResult<()> {
        Ok(()) // This VM holds no disk or other resource that the target needs.
    }
    fn resume(&mut self) -> VmResult<()> {
        self.guest.run();
        Ok(())
    }
}

impl TargetVm for Machine {
    fn demand_paging(&mut self) -> VmResult<Arc<dyn DemandPaging>> {
        self.guest
            .demand_paging(|threads| Ok(Arc::new(self.memory.demand_paging(&UffdOptions::new(threads))?)))
    }
    fn load(&mut self, sections: &[Section]) -> VmResult<()> {
        let mut parts = Sections::new(sections)?;
        let state = self.guest.take(&mut parts)?;
        // A VMM with devices takes the sections of its devices at this point, and loads the devices
        // after `finish`.
        parts.finish()?;
        Ok(self.guest.load(state)?)
    }
    fn start(&mut self, state: RunState) -> VmResult<()> {
        self.guest.start(state);
        Ok(())
    }
}

fn main() -> Result<()> {
    let kvm = match Kvm::new() {
        Ok(kvm) if missing_capabilities(&kvm).is_empty() => kvm,
        Ok(kvm) => {
            println!("skipped: kvm: vm_memory: KVM does not have {}", missing_capabilities(&kvm).join(", "));
            return Ok(());
        }
        Err(error) => {
            println!("skipped: kvm: vm_memory: /dev/kvm: {error}");
            return Ok(());
        }
    };
    let mut source = Machine::new(&kvm, false)?;
    source.boot()?;
    source.guest.run();
    let before = source.wait("the guest's first writes", |stats| stats.writes() > 10_000)?;
    println!("the guest runs on the source: {} writes in {} pages", before.writes(), before.data_pages);

    let path = std::env::temp_dir().join(format!("vmferry-vm-memory-{}", std::process::id()));
    let uri = Uri::Unix(path);
    let listener = Listener::bind(&uri, false)?;
    let (report, target) = std::thread::scope(|scope| {
        let target = scope.spawn(|| {
            let mut vm = Machine::new(&kvm, true)?;
            // After a precopy no page is missing, so `Received::postcopy` is `None`.
            let _ = receive(&mut vm, &listener, &Arrival::new(Settings::default().peer_timeout))?;
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(vm)
        });
        let migration = Migration::to(uri).mode(MigrationMode::Precopy).verify(true);
        (migration.run(&mut source), target.join())
    });
    let (report, target) = (report?, target.map_err(|_| "the target panicked")??);
    let Some(Ended::Completed) = report.ended() else { return Err(format!("{:?}", report.ended()).into()) };

    // The source's memory is as the guest left it, and the guest continues in the target's memory.
    let left = source.stats();
    let written = left.as_ref().unwrap_or(&before).writes();
    let there = target.wait("writes on the target", |stats| stats.writes() > written + 1000)?;
    // Requests a check of all stamps: this process writes the request into the guest's memory, as a
    // device would.
    let request = GuestAddress(STATS_GPA + 8 * offset::VERIFY_REQUEST as u64);
    target.memory.memory().store(1u64, request, Ordering::Release)?;
    target.wait("the guest's check of its memory", |stats| stats.verified(1))?;
    if source.stats() != left {
        return Err("the guest runs on both source and target".into());
    }
    println!("the guest runs on the target: {} writes since the move", there.writes() - written);
    println!("all stamps are correct; {:.1} ms of downtime", report.downtime_ms);
    Ok(())
}
