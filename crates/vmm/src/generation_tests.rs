//! Tests of the VM generation ID as a guest sees it, before and after it is copied, migrated, or
//! reset.

use super::*;
use crate::boot::testing::TestElf;
use crate::state::{Saved as _, Sections};
use crate::{Exit, SerialSink, Vm, VmOptions, open_kvm};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use vmferry_bitmap::Bitmap;
use vmferry_core::PAGE_SHIFT;
use vmferry_engine::{
    Arrival, Listener, MigrateError, MigrationHandle, MigrationState, Settings, Uri, branch, join_branch,
    migrate, receive, restore, restore_on_demand, save, save_copy,
};
use vmferry_kvm::VcpuState;
use vmferry_kvm::state::IoapicState;
use vmferry_testkit::{Need, PATIENCE, skip};

const MEMORY: u64 = 8 << 20;
/// Vector of the interrupt, and the register offset of the third word of the local APIC's interrupt
/// requests.
const VECTOR: u8 = 0x41;
const REQUESTS: usize = 0x220;
const REQUESTED: u8 = 1 << 1;
/// Address at which the guest stores the ID that it found when the interrupt arrived.
const FOUND: u64 = 0x30_0000;
const FOUND_CODE: u8 = 6;

/// mov dword [to], value
fn store(to: u32, value: u32) -> Vec<u8> {
    [&[0xc7, 0x05][..], &to.to_le_bytes(), &value.to_le_bytes()].concat()
}

/// Returns the code of a guest that waits for the interrupt, copies the ID to [`FOUND`] and ends
/// with [`FOUND_CODE`].
fn guest() -> Vec<u8> {
    let find = |n: u32| {
        let address = |gpa: u64| (u32::try_from(gpa).unwrap() + 4 * n).to_le_bytes();
        [&[0xa1][..], &address(ADDRESS), &[0xa3], &address(FOUND)].concat()
    };
    // mov dx, port; mov al, byte; out dx, al
    let out = |port: u16, byte: u8| {
        let [low, high] = port.to_le_bytes();
        vec![0x66, 0xba, low, high, 0xb0, byte, 0xee]
    };
    [
        // The local APIC accepts interrupts, and the I/O APIC has an entry for this one.
        store(0xfee0_00f0, 0x1ff),
        store(0xfec0_0000, 0x10 + 2 * LINE),
        store(0xfec0_0010, VECTOR.into()),
        out(0x3f8, b'l'),
        // test byte [requests], bit; jz back to it
        vec![0xf6, 0x05, 0x20, 0x02, 0xe0, 0xfe, REQUESTED, 0x74, 0xf7],
        (0..4).flat_map(find).collect(),
        out(0xf4, FOUND_CODE),
        vec![0xf4, 0xeb, 0xfd],
    ]
    .concat()
}

fn id(vm: &Vm, at: u64) -> [u8; 16] {
    vm.ram().map().read_obj(GuestAddress(at)).unwrap()
}

/// Returns a VM whose guest waits for the interrupt.
fn waiting() -> Vm {
    waiting_on(crate::Backing::Anonymous)
}

fn waiting_on(backing: crate::Backing) -> Vm {
    let (sink, output) = SerialSink::capture();
    let mut options = VmOptions::new(MEMORY, 1);
    options.backing = backing;
    options.serial = sink;
    let mut vm = Vm::new(options).unwrap();
    vm.load_kernel(&TestElf::with_entry(&guest()).build(), "").unwrap();
    vm.start().unwrap();
    let begin = Instant::now();
    while output.text() != "l" {
        assert!(begin.elapsed() < PATIENCE && vm.handle().exit().is_none(), "{:?}", vm.handle().exit());
        std::thread::sleep(Duration::from_millis(1));
    }
    vm
}

fn incoming() -> Vm {
    let mut options = VmOptions::new(MEMORY, 1);
    options.incoming = true;
    Vm::new(options).unwrap()
}

/// Returns a path that does not exist.
fn path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("vmferry-generation-{}-{name}", std::process::id()))
}

/// Restores the guest in the file at `path` into a new VM.
fn restored(path: &std::path::Path) -> Vm {
    let mut vm = incoming();
    let _ = restore(&mut vm, path).unwrap();
    vm
}

/// Returns true if the interrupt has arrived. The guest is paused for the check.
fn interrupted(vm: &mut Vm) -> bool {
    vm.pause().unwrap();
    let saved = vm.save_state().unwrap();
    let vcpu = VcpuState::take(&mut Sections::new(&saved).unwrap(), 0).unwrap();
    vcpu.lapic[REQUESTS] & REQUESTED != 0
}

#[test]
fn every_copy_gets_a_new_id_and_its_guest_is_told() {
    if let Err(error) = open_kvm() {
        return skip(Need::Kvm, error);
    }
    let mut source = waiting();
    let original = id(&source, ADDRESS);
    assert_ne!(original, [0; 16]);
    let path = path("copy");
    assert_eq!(
        save_copy(&mut source, &path, &MigrationHandle::new()).unwrap().state,
        MigrationState::Completed
    );
    let mut ids = vec![original];
    let mut found = |vm: &Vm| {
        let exit = vm.handle().wait_for_exit_timeout(PATIENCE).expect("the guest is told of its new ID");
        assert_eq!(exit, Exit::PoweredOff(FOUND_CODE));
        let now = id(vm, ADDRESS);
        assert_eq!(id(vm, FOUND), now, "the ID must be written before the interrupt");
        assert!(!ids.contains(&now), "{now:x?} of {ids:x?}");
        ids.push(now);
        let mut marked = Bitmap::new(MEMORY >> PAGE_SHIFT);
        vm.ram().regions()[0].marks().bitmap().harvest(&mut marked);
        assert!(marked.test(GENERATION >> PAGE_SHIFT), "KVM does not see the write of the VMM");
    };
    found(&restored(&path));
    found(&restored(&path));
    let mut paging = incoming();
    match restore_on_demand(&mut paging, &path) {
        Ok(_comes) => found(&paging),
        Err(MigrateError::NoDemandPaging { why }) => skip(Need::Uffd, why),
        Err(error) => panic!("{error}"),
    }
    std::fs::remove_file(&path).unwrap();
    assert!(!interrupted(&mut source), "the original got an interrupt");
    assert_eq!(id(&source, ADDRESS), original);
}

#[test]
fn every_child_of_a_branch_gets_a_new_id_and_its_guest_is_told() {
    if let Err(error) = open_kvm() {
        return skip(Need::Kvm, error);
    }
    let mut parent = waiting_on(crate::Backing::Memfd);
    let original = id(&parent, ADDRESS);
    let mut taken = branch(&mut parent, &mut || Ok(())).unwrap();
    taken.seal().unwrap();
    let mut ids = vec![original];
    for _ in 0..2 {
        let mut child = incoming();
        let _ = join_branch(&mut child, &taken.point).unwrap();
        let exit = child.handle().wait_for_exit_timeout(PATIENCE).expect("the guest is told of its new ID");
        assert_eq!(exit, Exit::PoweredOff(FOUND_CODE));
        let now = id(&child, ADDRESS);
        assert_eq!(id(&child, FOUND), now);
        assert!(!ids.contains(&now), "{now:x?} of {ids:x?}");
        ids.push(now);
    }
    assert!(!interrupted(&mut parent), "the parent got an interrupt");
    assert_eq!(id(&parent, ADDRESS), original);
    assert_eq!(id(&parent, FOUND), [0; 16], "the parent sees no write of a child");
}

#[test]
fn guest_that_moves_keeps_its_id() {
    if let Err(error) = open_kvm() {
        return skip(Need::Kvm, error);
    }
    let mut source = waiting();
    let original = id(&source, ADDRESS);
    let (path, uri) = (path("moved"), Uri::Unix(path("socket")));
    let mut target = incoming();
    let listener = Listener::bind(&uri, false).unwrap();
    let arrival = Arrival::new(PATIENCE);
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| receive(&mut target, &listener, &arrival).map(drop));
        let settings = Settings { peer_timeout: PATIENCE, ..Settings::default() };
        let report = migrate(&mut source, &uri, None, &settings, &MigrationHandle::new()).unwrap();
        assert_eq!(report.state, MigrationState::Completed, "{report:?}");
        receiving.join().unwrap().unwrap();
    });
    assert_eq!(id(&target, ADDRESS), original);
    assert_eq!(save(&mut target, &path, &MigrationHandle::new()).unwrap().state, MigrationState::Completed);
    let mut last = restored(&path);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(id(&last, ADDRESS), original);
    assert!(!interrupted(&mut last));
}

/// A guest as a version without the ID started it.
#[test]
fn copy_of_a_guest_without_the_device_runs_as_it_is() {
    if let Err(error) = open_kvm() {
        return skip(Need::Kvm, error);
    }
    let mut source = waiting();
    source.ram().map().write_slice(&[0; 32], GuestAddress(GENERATION)).unwrap();
    let path = path("old");
    assert_eq!(
        save_copy(&mut source, &path, &MigrationHandle::new()).unwrap().state,
        MigrationState::Completed
    );
    let mut copy = restored(&path);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(id(&copy, ADDRESS), [0; 16]);
    assert!(!interrupted(&mut copy));
    // The guest would have been told.
    assert_eq!(IoapicState::read(copy.machine().fd()).unwrap().redirection[LINE as usize] & 1 << 16, 0);
}

#[test]
fn reset_keeps_the_id() {
    if let Err(error) = open_kvm() {
        return skip(Need::Kvm, error);
    }
    let mut vm = Vm::new(VmOptions::new(MEMORY, 1)).unwrap();
    // mov al, 0xfe; out 0x64, al: the keyboard controller's reset line.
    let resets = TestElf::with_entry(&[0xb0, 0xfe, 0xe6, 0x64, 0xf4, 0xeb, 0xfd]).build();
    vm.load_kernel(&resets, "").unwrap();
    let before = id(&vm, ADDRESS);
    vm.start().unwrap();
    assert_eq!(vm.handle().wait_for_exit_timeout(PATIENCE), Some(Exit::Reset));
    vm.reset().unwrap();
    vm.load_kernel(&resets, "").unwrap();
    assert_eq!(id(&vm, ADDRESS), before);
}
