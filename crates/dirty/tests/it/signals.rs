//! Tests of signals that arrive while the rings are reset.
//!
//! Since Linux 6.17 the kernel checks for a pending signal before each entry, and returns at once
//! if there is one. The entries that it has taken until then and gathered to protect together
//! (entries that lie within 64 pages of each other) are already free, and their pages are never
//! protected: later writes to these pages are not reported.

use crate::memory::{Kind, Memory};
use crate::user_guest::{FIRST, add_slot_flags, fd, guest};
use kvm_ioctls::{VcpuExit, VcpuFd};
use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vmferry_sys::ring::{self, DirtyRing, RingEntries};
use vmferry_testkit::print_line;

/// Number of pages that the guest writes to.
const SET: u64 = 512;
/// Number of exits of the guest between two harvests: 32 writes to each page on average, so that no
/// page is missed by chance.
const EXITS: u64 = 4;
/// Value of `KVM_MEM_LOG_DIRTY_PAGES`.
const LOG_DIRTY: u32 = 1;

/// States of the thread that sends signals.
const REST: u32 = 0;
const STORM: u32 = 1;
const END: u32 = 2;

extern "C" fn nothing(_: libc::c_int) {}

/// Runs the guest until it has written every page, and takes all entries.
fn written(vcpu: &mut VcpuFd, ring: &DirtyRing, next: &mut u32) -> BTreeSet<u64> {
    let mut exits = 0;
    while exits < EXITS {
        match vcpu.run() {
            Ok(VcpuExit::IoOut(0x10, _)) => exits += 1,
            Ok(other) => panic!("unexpected exit {other:?}"),
            Err(error) if error.errno() == libc::EINTR => {}
            Err(error) => panic!("KVM_RUN: {error}"),
        }
    }
    let mut pages = BTreeSet::new();
    while let Some(page) = ring.dirty(*next) {
        pages.insert(page.offset);
        ring.mark_harvested(*next);
        *next = next.wrapping_add(1);
    }
    pages
}

/// Sends signals to thread `thread` of this process while `what` is `STORM`, and counts them in
/// `sent`.
fn storm(thread: libc::pid_t, what: &AtomicU32, sent: &AtomicU64) {
    loop {
        match what.load(Ordering::Acquire) {
            // SAFETY: the signal goes to a thread of this process, which has a handler.
            STORM => unsafe {
                libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, libc::SIGUSR1);
                sent.fetch_add(1, Ordering::Release);
            },
            REST => std::thread::yield_now(),
            _ => return,
        }
    }
}

/// Returns the pages that `reset` lost under a storm of signals, and the number of resets. `None`
/// without rings.
fn lost(reset: impl Fn(BorrowedFd<'_>)) -> Option<(BTreeSet<u64>, u32)> {
    let entries = RingEntries::new(4096).unwrap();
    let memory = Memory::new(Kind::Small, FIRST + SET);
    let mut guest = guest(&memory, entries.get(), 1, SET)?;
    add_slot_flags(&guest.vm, 0, 0, &memory, LOG_DIRTY);
    // SAFETY: the descriptor of the vCPU is open for as long as it is borrowed.
    let vcpu = unsafe { BorrowedFd::borrow_raw(guest.vcpus[0].as_raw_fd()) };
    let ring = DirtyRing::map(vcpu, entries).unwrap();
    // SAFETY: the call takes no arguments, and a handler that does nothing may run at any time.
    let thread = unsafe {
        libc::signal(libc::SIGUSR1, nothing as *const () as libc::sighandler_t);
        libc::gettid()
    };
    let all: BTreeSet<u64> = (FIRST..FIRST + SET).collect();
    let (what, mut next, mut rounds, mut missing) = (AtomicU32::new(REST), 0, 0, BTreeSet::new());
    let sent = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| storm(thread, &what, &sent));
        let begin = Instant::now();
        // As many rounds as a second or so permits. A kernel that loses a page does so in about 80
        // rounds.
        let enough = |rounds| rounds >= 300 || rounds >= 2 && begin.elapsed() > Duration::from_secs(1);
        while !enough(rounds) && missing.is_empty() {
            let pages = written(&mut guest.vcpus[0], &ring, &mut next);
            missing = all.difference(&pages).copied().collect();
            let before = sent.load(Ordering::Acquire);
            what.store(STORM, Ordering::Release);
            // On a busy host it may take a while until the first signal is sent. A sleep would not
            // end: the kernel adds the slack of the timer (50 us) to the rest of a sleep at each
            // signal, and signals arrive more often than that.
            while sent.load(Ordering::Acquire) == before {
                std::thread::yield_now();
            }
            // A signal ends a call, but calls free an entry at least now and then.
            (0..100_000)
                .take_while(|_| ring.awaits_reset(next.wrapping_sub(1)))
                .for_each(|_| reset(fd(&guest.vm)));
            what.store(REST, Ordering::Release);
            if ring.awaits_reset(next.wrapping_sub(1)) {
                break;
            }
            rounds += 1;
        }
        what.store(END, Ordering::Release);
    });
    assert!(rounds > 1, "{rounds} resets");
    Some((missing, rounds))
}

#[test]
fn no_page_is_lost_to_signals_during_a_reset() {
    let Some((missing, rounds)) = lost(|vm| _ = ring::reset(vm).unwrap()) else { return };
    assert_eq!(missing, BTreeSet::new(), "written after reset {rounds}, and not reported");
    // The same call without blocked signals, to see whether this kernel has the problem.
    let bare = |vm: BorrowedFd<'_>| {
        // SAFETY: KVM_RESET_DIRTY_RINGS takes no argument.
        unsafe { libc::ioctl(vm.as_raw_fd(), 0xaec7, 0) };
    };
    let (missing, rounds) = lost(bare).unwrap();
    print_line(format!(
        "signals during resets: with signals blocked nothing is lost; without, {} pages after {rounds} resets",
        missing.len()
    ));
}
