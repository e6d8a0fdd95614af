//! Cost that confinement adds to the most frequent system call of a vCPU's thread, and to the start
//! of a thread: `cargo run --release -p vmferry-confine --example filter_cost`.
//!
//! The measured request is KVM_RUN on a descriptor that is not KVM's. Only the entry into the
//! kernel and the filters are measured.

use std::os::fd::AsRawFd;
use std::time::Instant;
use vmferry_confine::{Confinement, Mode, Plan};
use vmferry_thread::{Role, spawn};

const KVM_RUN: libc::c_ulong = 0xae80;
const CALLS: u32 = 1_000_000;
const STARTS: u32 = 500;
const ROUNDS: usize = 5;

/// Returns nanoseconds for each call on the calling thread, as the median of the rounds: for
/// `ioctl`, whose arguments the filters check, and for `futex`, which they allow with any
/// arguments.
fn calls(event: &std::os::fd::OwnedFd) -> (f64, f64) {
    let word = 1_u32;
    let run = || {
        // SAFETY: an eventfd has no requests, so the call fails and changes nothing.
        unsafe { libc::ioctl(event.as_raw_fd(), KVM_RUN, 0) };
    };
    let wake = || {
        // SAFETY: the call wakes the waiters of `word`, of which there are none.
        unsafe {
            libc::syscall(libc::SYS_futex, &raw const word, libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, 1)
        };
    };
    (median(CALLS, run), median(CALLS, wake))
}

fn median(times: u32, mut work: impl FnMut()) -> f64 {
    let mut rounds: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let began = Instant::now();
            (0..times).for_each(|_| work());
            began.elapsed().as_secs_f64() * 1e9 / f64::from(times)
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    rounds[ROUNDS / 2]
}

/// Prints the cost of calls on a vCPU's thread, and the microseconds from the start of a receiver
/// to its end.
fn measure(what: &str) {
    let Ok(event) = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC) else { return };
    let calls = spawn(Role::Vcpu, "vcpu 0", move || calls(&event)).ok().and_then(|thread| thread.join().ok());
    let (ioctl, futex) = calls.unwrap_or_default();
    let start = median(STARTS, || {
        let _ = spawn(Role::Receiver, "receiver", || {}).map(std::thread::JoinHandle::join);
    });
    println!(
        "{what:>10}: ioctl(KVM_RUN) {ioctl:6.1} ns, futex {futex:6.1} ns, a thread's start and end {:6.1} us",
        start / 1e3
    );
}

fn main() {
    measure("not");
    match Confinement::begin(&Plan::new(Mode::On)) {
        Ok(confinement) => {
            measure("confined");
            println!("{:?}", confinement.in_force().seccomp);
        }
        Err(error) => println!("cannot be confined here: {error}"),
    }
}
