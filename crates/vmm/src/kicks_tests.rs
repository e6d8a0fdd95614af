//! Test of a disk request by a guest of a few instructions, with notification by KVM's eventfd and
//! by the vCPU's thread.

use crate::boot::testing::TestElf;
use crate::{DiskOptions, Exit, Vm, VmOptions, open_kvm, passes_kicks};
use vm_memory::{Bytes, GuestAddress};
use vmferry_testkit::{Need, PATIENCE, skip};

const WINDOW: u32 = 0xd000_0000;
/// Addresses of the disk's queue, of the request's header, data and status.
const RINGS: u64 = 0x20_0000;
const HEADER: u64 = 0x20_3000;
const DATA: u64 = 0x20_4000;
const ANSWER: u64 = 0x20_5000;
const SIZE: u16 = 8;

/// mov dword [at], value
fn set(at: u32, value: u32) -> Vec<u8> {
    [&[0xc7, 0x05][..], &at.to_le_bytes(), &value.to_le_bytes()].concat()
}

fn register(offset: u32, value: u32) -> Vec<u8> {
    set(WINDOW + offset, value)
}

/// Returns code that sets the device up, notifies it `kicks` times, and waits until a request is
/// given back.
fn program(kicks: usize) -> Vec<u8> {
    let rings = u32::try_from(RINGS).unwrap();
    let mut code = [(0x70, 0), (0x70, 3), (0x24, 1), (0x20, 1), (0x70, 0xb), (0x30, 0), (0x38, SIZE.into())]
        .iter()
        .chain(&[
            (0x80, rings),
            (0x84, 0),
            (0x90, rings + 0x1000),
            (0x94, 0),
            (0xa0, rings + 0x2000),
            (0xa4, 0),
        ])
        .chain(&[(0x44, 1), (0x70, 0xf)])
        .flat_map(|(offset, value)| register(*offset, *value))
        .collect::<Vec<_>>();
    // The request is offered after the device was ready, so that only a notification can announce
    // it.
    code.extend(set(rings + 0x1000, 0x0001_0000));
    (0..kicks).for_each(|_| code.extend(register(0x50, 0)));
    // cmp word [used index], 1; jne back to it
    code.extend([0x66, 0x83, 0x3d]);
    code.extend((rings + 0x2002).to_le_bytes());
    code.extend([1, 0x75, 0xf6]);
    // mov dx, 0xf4; mov al, 9; out dx, al; hlt
    code.extend([0x66, 0xba, 0xf4, 0, 0xb0, 9, 0xee, 0xf4]);
    code
}

/// Writes a request to read sector 1: a header, data, a status.
fn write_request(vm: &Vm) {
    let ram = vm.ram().map();
    let put = |bytes: &[u8], at| ram.write_slice(bytes, GuestAddress(at)).unwrap();
    put(&[[0u8; 8], 1u64.to_le_bytes()].concat(), HEADER);
    for (n, (at, len, flags)) in (0u16..).zip([(HEADER, 16u32, 1u16), (DATA, 512, 3), (ANSWER, 1, 2)]) {
        let next = n + 1;
        let descriptor =
            [&at.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat();
        put(&descriptor, RINGS + 16 * u64::from(n));
    }
    put(&[0xee], ANSWER);
}

#[test]
fn notification_reaches_the_disk_with_and_without_eventfd() {
    match open_kvm().and_then(|_| passes_kicks()) {
        Ok(true) => {}
        Ok(false) => return skip(Need::Kvm, "KVM on this host has no ioeventfd"),
        Err(error) => return skip(Need::Kvm, error),
    }
    let path = std::env::temp_dir().join(format!("vmferry-kicks-{}", std::process::id()));
    let content: Vec<u8> = (0..8192u32).map(|at| (at / 512 + at % 7).to_le_bytes()[0]).collect();
    std::fs::write(&path, &content).unwrap();
    for (kicks, times) in [(true, 1), (true, 40), (false, 1)] {
        let mut options = VmOptions::new(8 << 20, 1);
        (options.balloon, options.kicks) = (false, kicks);
        options.disks = vec![DiskOptions::new(&path)];
        let mut vm = Vm::new(options).unwrap();
        vm.load_kernel(&TestElf::with_entry(&program(times)).build(), "").unwrap();
        write_request(&vm);
        vm.start().unwrap();
        let exit = vm.handle().wait_for_exit_timeout(PATIENCE);
        assert_eq!(exit, Some(Exit::PoweredOff(9)), "by eventfd: {kicks}");
        let mut data = vec![0; 513];
        vm.ram().map().read_slice(&mut data[..512], GuestAddress(DATA)).unwrap();
        vm.ram().map().read_slice(&mut data[512..], GuestAddress(ANSWER)).unwrap();
        assert_eq!((&data[..512], data[512]), (&content[512..1024], 0), "by eventfd: {kicks}");
        let figures = vm.handle().disks()[0];
        assert_eq!(figures.reads, 1, "{figures:?}");
        // Without an attendant no request is done at once. With one, cached requests are, if the
        // file system supports this.
        assert!(kicks || figures.at_once == 0, "{figures:?}");
        println!("by eventfd: {kicks}, notified {times} times, done at once: {}", figures.at_once);
    }
    std::fs::remove_file(&path).unwrap();
}
