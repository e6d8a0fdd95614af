//! Loads changed state into the vCPUs and interrupt controllers of KVM.

use super::turn;
use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;
use vmferry_engine::Section;
use vmferry_testkit::{Need, skip};
use vmferry_vmm::{Error, SerialSink, Vm, VmOptions, hostile, open_kvm};

const SEEDS: u64 = 256;
const MEMORY: u64 = 16 << 20;
const CPUS: u32 = 2;
/// Maximum time for which a guest with changed state runs.
const RUN: Duration = Duration::from_millis(2);
/// Time after which a step counts as a hang. The VM reports a vCPU that does not stop after 10 s.
const HANGS: Duration = vmferry_testkit::PATIENCE;

fn options(incoming: bool) -> VmOptions {
    let mut options = VmOptions::new(MEMORY, CPUS);
    (options.incoming, options.serial) = (incoming, SerialSink::discard());
    options
}

/// Returns a paused guest that has finished booting.
fn guest() -> Vm {
    let mut vm = Vm::new(options(false)).unwrap();
    let args = format!("workload=uniform,ws=1M stats=page cpus={CPUS} tsc_khz={}", vm.tsc_khz());
    vm.load_kernel(vmferry_guest_image::ELF, &args).unwrap();
    vm.start().unwrap();
    let handle = vm.handle();
    let runs = || handle.stats().is_ok_and(|stats| stats.cpus().iter().all(|cpu| cpu.writes > 1000));
    let mut patience = HANGS;
    while !runs() {
        // An exit of the guest ends the wait.
        assert_eq!(handle.wait_for_exit_timeout(RUN), None);
        patience = patience.checked_sub(RUN).expect("the guest boots");
    }
    vm.pause().unwrap();
    vm
}

/// Copies all memory of `from` to `to`, whose memory is all zeros.
fn copy_memory(from: &Vm, to: &Vm) {
    let mut page = [0; 4096];
    for ram in from.ram().regions() {
        let (id, run) = (ram.region().id, ram.region().run());
        let (from, to) = (from.ram().window(id, run).unwrap(), to.ram().window(id, run).unwrap());
        for index in 0..from.pages() {
            if !from.copy_page(index, &mut page) {
                to.write_page(index, &page);
            }
        }
    }
}

/// Loads the changed state of each seed into a VM on KVM, and runs the accepted ones for a moment.
/// Sends the number and the result of each.
fn load_each(guest: &Vm, saved: &[Section], answers: &Sender<(u64, Result<(), String>)>) {
    let mut spare = None;
    for seed in 0..SEEDS {
        let mut target = spare.take().unwrap_or_else(|| Vm::new(options(true)).unwrap());
        let loaded = answer(target.load_state(&hostile::changed_state(saved, seed)));
        if loaded.is_ok() {
            copy_memory(guest, &target);
            target.start().unwrap();
            let _ = target.handle().wait_for_exit_timeout(RUN);
            target.pause().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            // The end of the guest is an accepted result. A panic of a vCPU thread is not.
            if target.handle().exit().is_none() {
                let _ = answer(target.save_state());
            }
        } else {
            spare = Some(target);
        }
        answers.send((seed, loaded)).unwrap();
    }
}

/// Returns KVM's result for some state, with all causes.
///
/// # Panics
/// Panics if KVM was not asked, because a vCPU thread has ended or does not answer.
fn answer<T>(result: Result<T, Error>) -> Result<(), String> {
    let error = match result {
        Ok(_) => return Ok(()),
        Err(error @ Error::State(_)) => error,
        Err(error) => panic!("{error}"),
    };
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        write!(text, ": {error}").unwrap();
        cause = error.source();
    }
    Err(text)
}

#[test]
fn changed_state_is_loaded_into_kvm_or_refused_and_never_hangs() {
    if let Err(error) = open_kvm() {
        return skip(Need::Kvm, error);
    }
    let _turn = turn();
    let mut guest = guest();
    let saved = guest.save_state().unwrap();
    let (answers, received) = channel();
    // The work runs on its own thread, so that a hang is detected.
    let work = std::thread::spawn(move || load_each(&guest, &saved, &answers));
    let (mut loaded, mut refused, mut next) = (0, Vec::new(), 0);
    loop {
        match received.recv_timeout(HANGS) {
            Ok((seed, Ok(()))) => (loaded, next) = (loaded + 1, seed + 1),
            Ok((seed, Err(why))) => {
                refused.push(why);
                next = seed + 1;
            }
            Err(RecvTimeoutError::Timeout) => panic!("seed {next} hangs"),
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    work.join().unwrap_or_else(|_| panic!("seed {next} panicked"));
    writeln!(
        std::io::stdout(),
        "KVM accepted {loaded} of {SEEDS} changed states, and refused {}",
        refused.len()
    )
    .unwrap();
    assert!(loaded > 0, "{refused:?}");
    // Some states must be refused by ioctls, not only before them.
    assert!(refused.iter().any(|why| why.contains("KVM_SET_")), "{refused:?}");
}
