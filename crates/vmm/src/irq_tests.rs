//! Tests of two threads that pulse one line: in every interleaving (shuttle), and on KVM in the
//! interleaving that loses an edge without a lock.

use super::*;
use crate::boot::testing::TestElf;
use crate::{Vm, VmOptions, open_kvm};
use shuttle::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::TryLockError;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::{Sender, channel};
use std::time::Instant;
use vm_memory::{Bytes, GuestAddress};
use vmferry_testkit::{Need, skip};

/// Input of an interrupt controller, and a guest that serves each interrupt at once.
#[derive(Default)]
struct Input {
    high: AtomicBool,
    /// Number of events that the devices have published.
    published: AtomicU32,
    /// Number of events that the guest found when it served the latest interrupt.
    served: AtomicU32,
}

impl Input {
    fn set(&self, high: bool) -> io::Result<()> {
        let edge = !self.high.swap(high, SeqCst) && high;
        if edge {
            self.served.store(self.published.load(SeqCst), SeqCst);
        }
        Ok(())
    }
}

/// Lets two threads publish an event each and pulse the line, under a lock if `locked`. Panics if
/// the guest does not learn of both.
fn two_events(locked: bool) {
    let shared = Arc::new((Input::default(), shuttle::sync::Mutex::new(())));
    let publish = move |shared: Arc<(Input, shuttle::sync::Mutex<()>)>| {
        let (input, lock) = &*shared;
        input.published.fetch_add(1, SeqCst);
        pulse(|| locked.then(|| lock.lock().unwrap()), |high| input.set(high)).unwrap();
    };
    let other = Arc::clone(&shared);
    let thread = shuttle::thread::spawn(move || publish(other));
    publish(Arc::clone(&shared));
    thread.join().unwrap();
    assert_eq!(shared.0.served.load(SeqCst), 2, "an edge is lost");
}

#[test]
fn every_pulse_of_two_threads_is_an_edge_under_the_lock() {
    shuttle::check_dfs(|| two_events(true), None);
}

#[test]
#[should_panic(expected = "an edge is lost")]
fn model_finds_the_edge_that_is_lost_without_a_lock() {
    shuttle::check_dfs(|| two_events(false), None);
}

/// Line that the test on KVM pulses. No device has it.
const LINE: u32 = 5;
/// Guest-physical addresses: the number of each thread's latest event, followed by what the guest
/// found of each.
const PUBLISHED: u64 = 0x30_0000;
const FOUND: u64 = PUBLISHED + 8;

/// Returns the code of a guest that polls the master interrupt controller of a PC. For each
/// interrupt of [`LINE`] it copies the words.
fn polling_guest() -> Vec<u8> {
    // mov al, value; out port, al
    let out = |port: u8, value: u8| [0xb0, value, 0xe6, port];
    // mov eax, [from]; mov [to], eax
    let copy = |from: u64, to: u64| {
        let address = |gpa: u64| u32::try_from(gpa).unwrap().to_le_bytes();
        [&[0xa1][..], &address(from), &[0xa3], &address(to)].concat()
    };
    // Edge triggered, vectors from 0x20 on, a slave at input 2, 8086 mode. Then all lines but one
    // are masked.
    let setup = [(0x20, 0x11), (0x21, 0x20), (0x21, 4), (0x21, 1), (0x21, !(1 << LINE))];
    let setup: Vec<u8> = setup.into_iter().flat_map(|(port, value)| out(port, value)).collect();
    // Poll command; in al, 0x20; and al, 7; cmp al, LINE; jne to the poll command. KVM returns 7 if
    // there is no interrupt.
    let line = u8::try_from(LINE).unwrap();
    let poll = [&out(0x20, 0x0c)[..], &[0xe4, 0x20, 0x24, 7, 0x3c, line, 0x75, 0xf4]].concat();
    let copies = [copy(PUBLISHED, FOUND), copy(PUBLISHED + 4, FOUND + 4)].concat();
    let back = u8::try_from(-i32::try_from(poll.len() + copies.len() + 2).unwrap() & 0xff).unwrap();
    [setup, poll, copies, vec![0xeb, back]].concat()
}

/// Returns the guest's word at `gpa`.
fn word(vm: &Vm, gpa: u64) -> u32 {
    vm.ram().map().load(GuestAddress(gpa), SeqCst).unwrap()
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < vmferry_testkit::PATIENCE, "waited in vain for {what}");
        std::thread::yield_now();
    }
}

/// Publishes event `event` of `thread`.
fn publish(vm: &Vm, thread: u64, event: u32) {
    vm.ram().map().store(event, GuestAddress(PUBLISHED + 4 * thread), SeqCst).unwrap();
}

fn serves(vm: &Vm, thread: u64, event: u32) {
    wait_for("the guest's service", || word(vm, FOUND + 4 * thread) == event);
}

/// Pulses as the second thread, while the line is high and the first interrupt has been served.
/// Sends to `tried` when the thread has raised the line, or would have to wait for the lock.
fn pulse_second(vm: &Vm, line: &IrqLine, event: u32, tried: &Sender<()>) {
    publish(vm, 1, event);
    let lock = || match line.machine.lines().of(LINE).try_lock() {
        Ok(held) => held,
        Err(TryLockError::WouldBlock) => {
            tried.send(()).unwrap();
            line.lock()
        }
        Err(error) => panic!("{error}"),
    };
    let set = |high| {
        line.set(high)?;
        // The receiver is gone once the first thread continues.
        let _ = tried.send(());
        Ok(())
    };
    pulse(lock, set).unwrap();
}

#[test]
fn edge_reaches_the_guest_while_another_thread_holds_the_line_high() {
    if let Err(error) = open_kvm() {
        return skip(Need::Kvm, error);
    }
    let mut vm = Vm::new(VmOptions::new(8 << 20, 1)).unwrap();
    vm.load_kernel(&TestElf::with_entry(&polling_guest()).build(), "").unwrap();
    vm.start().unwrap();
    let lines: [IrqLine; 2] =
        std::array::from_fn(|_| IrqLine { machine: Arc::clone(vm.machine()), gsi: LINE });
    // The guest is ready when it serves a pulse.
    wait_for("the guest", || {
        publish(&vm, 0, 1);
        lines[0].pulse().unwrap();
        word(&vm, FOUND) == 1
    });
    for event in 2..50 {
        let (raised, go) = channel();
        let (tried, second) = channel();
        std::thread::scope(|scope| {
            let (vm, lines) = (&vm, &lines);
            scope.spawn(move || {
                go.recv().unwrap();
                pulse_second(vm, &lines[1], event, &tried);
            });
            publish(vm, 0, event);
            let set = |high: bool| {
                if !high {
                    second.recv().unwrap();
                }
                lines[0].set(high)?;
                if high {
                    serves(vm, 0, event);
                    raised.send(()).unwrap();
                }
                Ok(())
            };
            pulse(|| lines[0].lock(), set).unwrap();
        });
        serves(&vm, 1, event);
    }
    vm.stop();
}
