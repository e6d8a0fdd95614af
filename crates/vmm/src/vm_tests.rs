//! Tests of a VM with kernels of a few instructions, and of its internals.

use crate::boot::testing::{TestBzImage, TestElf};
use crate::state::{Saved, Sections};
use crate::{CpuChoice, Error, Exit, SerialSink, Vm, VmOptions, open_kvm};
use vmferry_engine::{Migratable, Section};
use vmferry_kvm::VcpuState;
use vmferry_kvm::state::ShadowStackState;
use vmferry_testkit::{Need, PATIENCE, skip, wait};

const MEMORY: u64 = 8 << 20;

/// Confines the threads of the VM to the system calls of their roles.
///
/// Returns true if this user may use KVM. If not, the calling test is skipped.
fn kvm() -> bool {
    vmferry_confine::confine_threads().unwrap();
    open_kvm().map_err(|error| skip(Need::Kvm, error)).is_ok()
}

/// Runs 32-bit code until the guest ends. Returns its exit and its serial output.
fn run(code: &[u8]) -> (Exit, String) {
    let (sink, output) = SerialSink::capture();
    let mut options = VmOptions::new(MEMORY, 1);
    options.serial = sink;
    let mut vm = Vm::new(options).unwrap();
    vm.load_kernel(&TestElf::with_entry(code).build(), "").unwrap();
    vm.start().unwrap();
    let exit = vm.handle().wait_for_exit_timeout(PATIENCE).expect("the guest ends");
    (exit, output.text())
}

/// mov dx, port; mov al, byte; out dx, al
fn out(port: u16, byte: u8) -> Vec<u8> {
    let [low, high] = port.to_le_bytes();
    vec![0x66, 0xba, low, high, 0xb0, byte, 0xee]
}

const HALT: [u8; 3] = [0xf4, 0xeb, 0xfd];

#[test]
fn guest_writes_to_its_serial_port_and_ends() {
    if !kvm() {
        return;
    }
    let code = [out(0x3f8, b'h'), out(0x3f8, b'i'), out(0xf4, 42), HALT.to_vec()].concat();
    assert_eq!(run(&code), (Exit::PoweredOff(42), "hi".to_owned()));
}

#[test]
fn guest_resets_itself() {
    if !kvm() {
        return;
    }
    // The keyboard controller, and the reset register as Linux writes it.
    for code in [out(0x64, 0xfe), [out(0xcf9, 2), out(0xcf9, 6)].concat()] {
        assert_eq!(run(&[code, HALT.to_vec()].concat()).0, Exit::Reset);
    }
}

#[test]
fn guest_that_jumps_to_the_reset_vector_resets_itself() {
    if !kvm() {
        return;
    }
    // Jumps there from protected mode, which is enough for this test: the code at the vector does
    // the same in both modes.
    let jump = [0xb8, 0xf0, 0xff, 0x0f, 0x00, 0xff, 0xe0];
    assert_eq!(run(&jump).0, Exit::Reset);
}

#[test]
fn guest_switches_itself_off() {
    if !kvm() {
        return;
    }
    // Other values change nothing.
    let code = [out(0x600, 0), out(0xcf9, 2), out(0x600, 5 << 2 | 1 << 5), HALT.to_vec()].concat();
    assert_eq!(run(&code).0, Exit::SwitchedOff);
}

#[test]
fn bzimage_is_entered_in_64_bit_mode_with_its_command_line() {
    if !kvm() {
        return;
    }
    // mov esi, [rsi + 0x228] (the command line); then, until a zero: lodsb; out dx, al. REX.W shows
    // the mode: in 32-bit code 0x48 is dec eax, and a byte of the command line would be wrong.
    let code = [
        &[0x8b, 0xb6, 0x28, 0x02, 0x00, 0x00][..],
        &[0x66, 0xba, 0xf8, 0x03],
        &[0x48, 0x31, 0xc0, 0xac, 0x84, 0xc0, 0x74, 0x03, 0xee, 0xeb, 0xf5],
        &out(0xf4, 7),
        &HALT,
    ]
    .concat();
    let (sink, output) = SerialSink::capture();
    let mut options = VmOptions::new(32 << 20, 1);
    options.serial = sink;
    let mut vm = Vm::new(options).unwrap();
    let image = TestBzImage { code, ..Default::default() }.build();
    vm.load_kernel(&image, "root=nothing").unwrap();
    vm.start().unwrap();
    let exit = vm.handle().wait_for_exit_timeout(PATIENCE).expect("the guest ends");
    assert_eq!((exit, output.text()), (Exit::PoweredOff(7), "root=nothing".to_owned()));
}

#[test]
fn failed_guest_is_reported_with_its_instruction_pointer() {
    if !kvm() {
        return;
    }
    // Without an interrupt table, ud2 ends in a triple fault.
    let (exit, _) = run(&[0x0f, 0x0b]);
    // A host that emulates parts of the kernel's start may fail before that.
    let (Exit::TripleFault(fault) | Exit::Failed(fault)) = exit else { panic!("{exit}") };
    assert_eq!(fault.cpu, 0);
    assert!(fault.what.contains("triple fault") || fault.what.contains("KVM"), "{fault}");
    println!("{fault}");
}

#[test]
fn commands_in_the_wrong_stage_are_errors() {
    if !kvm() {
        return;
    }
    let mut vm = Vm::new(VmOptions::new(MEMORY, 1)).unwrap();
    assert_eq!(vm.start().unwrap_err().to_string(), "cannot start the guest: the VM has no guest yet");
    assert!(vm.pause().is_err() && vm.resume().is_err() && vm.save_state().is_err());
    let load = vm.load_state(&[]).unwrap_err().to_string();
    assert_eq!(load, "cannot load a guest's state: the VM was not created to receive a guest");
    let image = TestElf::with_entry(&HALT).build();
    vm.load_kernel(&image, "").unwrap();
    assert!(vm.load_kernel(&image, "").is_err());
    vm.start().unwrap();
    assert!(vm.save_state().is_err(), "a guest that runs cannot be saved");
    vm.pause().unwrap();
    vm.pause().unwrap();
    vm.resume().unwrap();
    vm.resume().unwrap();
    vm.stop();
    vm.stop();
    assert_eq!(vm.handle().exit(), Some(Exit::Stopped));
    assert_eq!(vm.resume().unwrap_err().to_string(), "cannot resume the guest: the VM was stopped");
}

#[test]
fn bad_options_are_errors_without_kvm() {
    for (memory, cpus) in [(0, 1), (4096, 1), ((4 << 20) + 1, 1), (MEMORY, 0), (MEMORY, 255)] {
        assert!(matches!(Vm::new(VmOptions::new(memory, cpus)), Err(Error::Options(_))), "{memory} {cpus}");
    }
}

/// Returns a vCPU's state without what changes with time.
fn without_time(section: &Section) -> Section {
    let one = [section.clone()];
    let Ok(mut vcpu) = VcpuState::take(&mut Sections::new(&one).unwrap(), section.instance) else {
        return section.clone();
    };
    (vcpu.tsc, vcpu.realtime_ns) = (0, 0);
    // The current count of the local APIC (0x390) continues. Registers are 16 bytes apart.
    vcpu.lapic[0x390..0x394].fill(0);
    vcpu.section(section.instance).unwrap()
}

fn incoming(cpus: u32) -> Vm {
    let mut options = VmOptions::new(MEMORY, cpus);
    options.incoming = true;
    Vm::new(options).unwrap()
}

#[test]
fn loaded_state_is_saved_unchanged() {
    if !kvm() {
        return;
    }
    let (sink, output) = SerialSink::capture();
    let mut options = VmOptions::new(MEMORY, 3);
    options.serial = sink;
    let mut source = Vm::new(options).unwrap();
    // Sets registers, writes a byte that shows this, then: add ecx, 1; jmp back to it.
    let registers = [0xbb, 0x78, 0x56, 0x34, 0x12, 0xbe, 0xef, 0xbe, 0xad, 0xde];
    let code = [&registers[..], &out(0x3f8, b'r'), &[0x83, 0xc1, 0x01, 0xeb, 0xfb]].concat();
    source.load_kernel(&TestElf::with_entry(&code).build(), "").unwrap();
    source.start().unwrap();
    wait("the guest's byte", || output.text() == "r");
    source.pause().unwrap();
    let saved = source.save_state().unwrap();
    assert_eq!(saved.iter().filter(|section| section.name != ShadowStackState::NAME).count(), 3 + 8);

    let mut target = incoming(3);
    target.load_state(&saved).unwrap();
    let again = target.save_state().unwrap();
    let names =
        |sections: &[Section]| sections.iter().map(|s| (s.name.clone(), s.instance)).collect::<Vec<_>>();
    assert_eq!(names(&saved), names(&again));
    for (a, b) in saved.iter().zip(&again) {
        match a.name.as_str() {
            // The guest's clock continues, and the timer's load time is the host's.
            "kvm-clock" | "pit" => {}
            _ => compare(a, b),
        }
    }
    for section in &saved {
        println!("{} {}: {} bytes", section.name, section.instance, section.payload.len());
    }
}

#[test]
fn state_of_a_busy_guest_is_saved_unchanged() {
    if !kvm() {
        return;
    }
    // Vector registers, interrupts, paging, several vCPUs in long mode: everything that the guest
    // image uses.
    let memory = 64 << 20;
    let mut source = Vm::new(VmOptions::new(memory, 2)).unwrap();
    let args = format!("workload=zipf:0.9,ws=4M stats=page cpus=2 tsc_khz={}", source.tsc_khz());
    source.load_kernel(vmferry_guest_image::ELF, &args).unwrap();
    source.start().unwrap();
    let writes = |vm: &Vm| vm.handle().stats().map_or(0, |stats| stats.writes());
    wait("the guest's work", || writes(&source) > 1000);
    let mut options = VmOptions::new(memory, 2);
    options.incoming = true;
    for _ in 0..5 {
        source.pause().unwrap();
        let saved = source.save_state().unwrap();
        let mut target = Vm::new(options.clone()).unwrap();
        target.load_state(&saved).unwrap();
        let again = target.save_state().unwrap();
        let timeless = |s: &&Section| !matches!(s.name.as_str(), "kvm-clock" | "pit");
        saved.iter().filter(timeless).zip(again.iter().filter(timeless)).for_each(|(a, b)| compare(a, b));
        source.resume().unwrap();
        let before = writes(&source);
        wait("writes of the guest", || writes(&source) > before);
    }
}

fn compare(a: &Section, b: &Section) {
    let (a, b) = (without_time(a), without_time(b));
    if a != b && a.name == "vcpu" {
        let read = |s: &Section| {
            VcpuState::take(&mut Sections::new(std::slice::from_ref(s)).unwrap(), s.instance).unwrap()
        };
        assert_eq!(read(&a), read(&b), "vCPU {}", a.instance);
    }
    assert_eq!(a, b);
}

#[test]
fn invalid_state_is_refused_and_another_can_be_loaded() {
    if !kvm() {
        return;
    }
    let mut source = Vm::new(VmOptions::new(MEMORY, 1)).unwrap();
    source.load_kernel(&TestElf::with_entry(&HALT).build(), "").unwrap();
    let saved = source.save_state().unwrap();
    let mut target = incoming(1);

    for drop in 0..saved.len() {
        let mut less = saved.clone();
        let gone = less.remove(drop);
        if gone.name == ShadowStackState::NAME {
            // The section may be missing while the guest has not enabled shadow stacks.
            target.load_state(&less).unwrap();
            continue;
        }
        let error = target.load_state(&less).unwrap_err().to_string();
        assert!(error.contains("lacks section") && error.contains(&gone.name), "{error}");
    }
    let mut more = saved.clone();
    more.push(Section { name: "balloon".into(), instance: 0, version: 1, payload: vec![] });
    let error = target.load_state(&more).unwrap_err().to_string();
    assert!(error.contains("balloon 0"), "{error}");
    assert!(target.start().is_err(), "a VM whose load failed does not start");

    let two = incoming(2).load_state(&saved).unwrap_err().to_string();
    assert_eq!(two, "the saved state lacks section vcpu 1");

    let mut vcpu = VcpuState::take(&mut Sections::new(&saved).unwrap(), 0).unwrap();
    vcpu.lapic.pop();
    let mut bad = saved.clone();
    bad[0] = vcpu.section(0).unwrap();
    let error = target.load_state(&bad).unwrap_err().to_string();
    assert!(error.contains("a local APIC of 1023 bytes"), "{error}");

    target.load_state(&saved).unwrap();
    target.start().unwrap();
}

#[test]
fn confined_vcpus_set_up_machine_check_banks_and_the_shadow_stack_pointer() {
    if !kvm() {
        return;
    }
    let mut source = Vm::new(VmOptions::new(MEMORY, 1)).unwrap();
    source.load_kernel(&TestElf::with_entry(&HALT).build(), "").unwrap();
    let mut saved = source.save_state().unwrap();
    let mut vcpu = VcpuState::take(&mut Sections::new(&saved).unwrap(), 0).unwrap();
    // MCG_CAP: 10 banks.
    vcpu.msrs.iter_mut().find(|msr| msr.index == 0x179).unwrap().value = 10;
    saved[0] = vcpu.section(0).unwrap();
    let mut target = incoming(1);
    target.load_state(&saved).unwrap();
    let again = VcpuState::take(&mut Sections::new(&target.save_state().unwrap()).unwrap(), 0).unwrap();
    assert_eq!(again.msrs, vcpu.msrs);

    saved.retain(|section| section.name != ShadowStackState::NAME);
    saved.push(ShadowStackState { pointer: 0x7000 }.section(0).unwrap());
    let loaded = incoming(1).load_state(&saved);
    if source.config().features.iter().any(|name| name == "shstk") {
        loaded.unwrap();
    } else {
        let error = loaded.unwrap_err().to_string();
        assert!(error.contains("KVM_SET_ONE_REG of the shadow stack pointer"), "{error}");
    }
}

#[test]
fn guest_with_features_that_the_host_lacks_is_refused_by_feature_name() {
    if !kvm() {
        return;
    }
    let mut source = Vm::new(VmOptions::new(MEMORY, 1)).unwrap();
    source.load_kernel(&TestElf::with_entry(&HALT).build(), "").unwrap();
    let saved = source.save_state().unwrap();
    let mut options = VmOptions::new(MEMORY, 1);
    (options.incoming, options.cpu) = (true, CpuChoice::Baseline);
    let mut target = Vm::new(options).unwrap();
    let sentence = target.config().difference(&source.config());
    let error = target.load_state(&saved);
    if source.config().features == target.config().features {
        return skip(Need::Cpu, "this processor offers no more than the baseline");
    }
    assert!(sentence.as_ref().is_some_and(|s| s.contains("the target does not offer")), "{sentence:?}");
    let error = error.unwrap_err().to_string();
    assert!(error.contains("which this host does not offer"), "{error}");
    // The other direction works, and the guest keeps the processor that it was shown.
    let mut options = VmOptions::new(MEMORY, 1);
    options.cpu = CpuChoice::Baseline;
    let mut source = Vm::new(options).unwrap();
    source.load_kernel(&TestElf::with_entry(&HALT).build(), "").unwrap();
    let mut target = incoming(1);
    assert_eq!(target.config().difference(&source.config()), None);
    target.load_state(&source.save_state().unwrap()).unwrap();
    assert_eq!(target.config().features, source.config().features);
    target.start().unwrap();
    target.pause().unwrap();
    let again = target.save_state().unwrap();
    let table = |sections: &[Section]| sections.iter().find(|s| s.name == "cpuid").cloned();
    assert_eq!(table(&again), table(&source.save_state().unwrap()));
}

#[test]
fn pausing_never_misses_a_vcpu() {
    if !kvm() {
        return;
    }
    let mut vm = Vm::new(VmOptions::new(MEMORY, 2)).unwrap();
    // The guest exits all the time, so that kicks arrive at every point of the loop: out 0x80, al;
    // jmp back to it.
    vm.load_kernel(&TestElf::with_entry(&[0xe6, 0x80, 0xeb, 0xfc]).build(), "").unwrap();
    vm.start().unwrap();
    for round in 0..2000 {
        vm.pause().unwrap_or_else(|error| panic!("round {round}: {error}"));
        vm.resume().unwrap();
    }
    assert_eq!(vm.handle().exit(), None);
}

#[test]
fn guest_that_resets_its_machine_restarts_in_the_same_vm() {
    if !kvm() {
        return;
    }
    // Runs on a thread with its own descriptor table, so that descriptors of concurrent tests are
    // not counted.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: closes the descriptors of this thread's table only. None of them is used by
            // it.
            let own = unsafe { libc::close_range(3, u32::MAX, libc::CLOSE_RANGE_UNSHARE.cast_signed()) };
            assert_eq!(own, 0, "{}", std::io::Error::last_os_error());
            reset_again_and_again();
        });
    });
}

fn reset_again_and_again() {
    let (sink, output) = SerialSink::capture();
    let mut options = VmOptions::new(64 << 20, 2);
    (options.serial, options.rng) = (sink, true);
    let mut vm = Vm::new(options).unwrap();
    let handle = vm.handle();
    let files = || std::fs::read_dir("/proc/thread-self/fd").unwrap().count();
    let ended = || handle.wait_for_exit_timeout(PATIENCE).expect("the guest ends");
    let mut before = 0;
    // Nothing that the guest left in its processor and its memory may be there the next time. If
    // there is, the guest writes '!'.
    // cmp dword [0x300000], 0; je over: mov dx, 0x3f8; mov al, '!'; out dx, al; over: mov dword
    // [0x300000], 1
    let look = [
        &[0x83, 0x3d, 0, 0, 0x30, 0, 0, 0x74, 7][..],
        &out(0x3f8, b'!'),
        &[0xc7, 0x05, 0, 0, 0x30, 0, 1, 0, 0, 0],
    ]
    .concat();
    for round in 0..6u8 {
        let code = [look.clone(), out(0x3f8, b'a' + round), out(0xcf9, 6), HALT.to_vec()].concat();
        vm.load_kernel(&TestElf::with_entry(&code).build(), "").unwrap();
        vm.start().unwrap();
        assert_eq!(ended(), Exit::Reset);
        assert!(vm.save_state().is_err(), "the state was saved without a reset");
        vm.reset().unwrap();
        assert_eq!(handle.exit(), None);
        assert!(vm.start().is_err(), "there is no kernel yet");
        if round == 0 {
            before = files();
        }
    }
    assert_eq!(output.text(), "abcdef");
    assert_eq!(files(), before, "open descriptors");

    // A guest that uses all of the machine, with all vCPUs.
    let args = format!("workload=uniform,ws=4M stats=page cpus=2 tsc_khz={}", vm.tsc_khz());
    vm.load_kernel(vmferry_guest_image::ELF, &args).unwrap();
    vm.start().unwrap();
    wait("the work of both vCPUs", || {
        handle.stats().is_ok_and(|stats| stats.cpus().iter().all(|cpu| cpu.writes > 1000))
    });
    let running = vm.reset().unwrap_err().to_string();
    assert!(running.contains("has not asked for it"), "{running}");
    vm.pause().unwrap();
    vm.save_state().unwrap();
}

#[test]
fn guest_after_a_triple_fault_can_be_restarted() {
    if !kvm() {
        return;
    }
    let mut vm = Vm::new(VmOptions::new(MEMORY, 1)).unwrap();
    vm.load_kernel(&TestElf::with_entry(&[0x0f, 0x0b]).build(), "").unwrap();
    vm.start().unwrap();
    let exit = vm.handle().wait_for_exit_timeout(PATIENCE).expect("the guest ends");
    if !exit.is_reset() {
        return skip(Need::Kvm, format!("this KVM reports {exit} where others report a triple fault"));
    }
    vm.reset().unwrap();
    let code = [out(0xf4, 42), HALT.to_vec()].concat();
    vm.load_kernel(&TestElf::with_entry(&code).build(), "").unwrap();
    vm.start().unwrap();
    assert_eq!(vm.handle().wait_for_exit_timeout(PATIENCE), Some(Exit::PoweredOff(42)));
}

#[test]
fn guest_that_listens_receives_the_power_button() {
    if !kvm() {
        return;
    }
    let mut vm = Vm::new(VmOptions::new(MEMORY, 1)).unwrap();
    // The I/O APIC's entry 6: mov dword [0xfec00000], 0x1c; mov dword [0xfec00010], 0x40 (fixed,
    // edge triggered, vector 0x40, not masked). Then the guest polls the local APIC until it has
    // the interrupt: test byte [0xfee00220], 1; jz back to it.
    let code = [
        &[0xc7, 0x05, 0, 0, 0xc0, 0xfe, 0x1c, 0, 0, 0][..],
        &[0xc7, 0x05, 0x10, 0, 0xc0, 0xfe, 0x40, 0, 0, 0],
        &out(0x3f8, b'l'),
        &[0xf6, 0x05, 0x20, 0x02, 0xe0, 0xfe, 1, 0x74, 0xf7],
        &out(0xf4, 6),
        &HALT,
    ]
    .concat();
    // The local APIC must be software-enabled first: mov dword [0xfee000f0], 0x1ff
    let code = [&[0xc7, 0x05, 0xf0, 0, 0xe0, 0xfe, 0xff, 1, 0, 0][..], &code].concat();
    vm.load_kernel(&TestElf::with_entry(&code).build(), "").unwrap();
    let handle = vm.handle();
    assert!(!handle.press_power_button().unwrap(), "the button was accepted before there is a guest");
    vm.start().unwrap();
    wait("a guest that listens", || {
        assert_eq!(handle.exit(), None);
        handle.press_power_button().unwrap()
    });
    assert_eq!(handle.wait_for_exit_timeout(PATIENCE), Some(Exit::PoweredOff(6)));
}
