//! Tests of a process guest that runs before its memory has arrived.

use crate::rig::{self, can_fault, running, verified};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use vmferry_core::{PAGE_BYTES, PageRun, PageSet};
use vmferry_engine::{
    Arrival, DemandPaging, GuestMemory, Listener, Migratable, MigrateError, MigrationHandle, MigrationMode,
    MigrationState, Settings, SourceVm, TargetVm, Uri, migrate, receive, save,
};
use vmferry_guest_abi::State;
use vmferry_process::{Error, ProcessGuest, ProcessOptions};
use vmferry_testkit::{Need, PATIENCE, print_line, skip, wait};

const MEMORY: u64 = 32 << 20;
const CPUS: u32 = 3;

fn options(memfd: bool) -> ProcessOptions {
    let mut options = ProcessOptions::new(MEMORY, CPUS);
    options.memfd = memfd;
    options
}

struct Move {
    source: ProcessGuest,
    target: ProcessGuest,
    paging: Arc<dyn DemandPaging>,
}

/// Returns a paused source and a target that is loaded without any page, or `None` where the host
/// cannot do demand paging.
fn moving(memfd: bool) -> Option<Move> {
    let mut target = ProcessGuest::new_incoming(options(memfd)).unwrap();
    let paging = match target.demand_paging() {
        Ok(paging) => paging,
        Err(error) => {
            skip(Need::Uffd, error);
            return None;
        }
    };
    let mut source =
        ProcessGuest::new(options(memfd), "uniform,ws=8M,data=16M,fill=mix:50".parse().unwrap()).unwrap();
    source.start().unwrap();
    let handle = source.handle();
    wait("the fill", || handle.stats().is_ok_and(|stats| stats.state >= State::Running));
    SourceVm::pause(&mut source).unwrap();
    let saved = source.save().unwrap();
    let memory = target.memory();
    for region in memory.layout().regions() {
        let window = memory.window(region.id, region.run()).unwrap();
        (0..window.pages()).for_each(|page| window.write_page(page, &[0xa5; PAGE_BYTES]));
    }
    paging.begin(&PageSet::full(memory.layout())).unwrap();
    target.load(&saved).unwrap();
    Some(Move { source, target, paging })
}

/// Serves the faults of shard `shard`. Counts the faults of vCPUs and of other threads.
fn serve(
    memory: &dyn GuestMemory,
    paging: &dyn DemandPaging,
    shard: usize,
    done: &AtomicBool,
    counts: &[AtomicU64; 2],
) {
    let mut page = [0; PAGE_BYTES];
    while !done.load(Ordering::Acquire) {
        let Some(fault) = paging.next_fault(shard, Duration::from_millis(200)).unwrap() else { continue };
        assert!(fault.vcpu.is_none_or(|vcpu| vcpu < CPUS));
        counts[usize::from(fault.vcpu.is_none())].fetch_add(1, Ordering::Relaxed);
        let run = PageRun::new(fault.page, 1);
        if memory.window(fault.region, run).unwrap().copy_page(0, &mut page) {
            paging.place_zeros(fault.region, run).unwrap();
        } else {
            paging.place(fault.region, run, &page).unwrap();
        }
    }
}

#[test]
fn guest_runs_before_its_memory_has_arrived() {
    for memfd in [false, true] {
        let Some(Move { source, mut target, paging }) = moving(memfd) else { return };
        let handle = target.handle();
        assert!(
            handle.stats().is_err() && !handle.request_verify(1),
            "a reader of statistics must not sleep"
        );
        let (memory, done) = (source.memory(), AtomicBool::new(false));
        let counts = [AtomicU64::new(0), AtomicU64::new(0)];
        std::thread::scope(|scope| {
            for shard in 0..paging.shards() {
                let (memory, paging, done, counts) = (&*memory, &*paging, &done, &counts);
                scope.spawn(move || serve(memory, paging, shard, done, counts));
            }
            target.start().unwrap();
            let stats = verified(&handle, 7);
            assert_eq!(stats.corrupt(), 0, "{:?}", stats.first_corrupt());
            target.pause().unwrap();
            paging.end().unwrap();
            target.start().unwrap();
            done.store(true, Ordering::Release);
            paging.interrupt();
        });
        let [own, others] = counts.map(AtomicU64::into_inner);
        print_line(format!(
            "process guest (memfd: {memfd}): {own} faults of its threads, {others} of others"
        ));
        assert!(own > 4096, "faults are not attributed to the guest's threads: {own} faults");
        assert_eq!(others, 0, "other threads touched guest memory");
        assert_eq!(verified(&handle, 8).corrupt(), 0);
    }
}

#[test]
fn pausing_a_guest_with_missing_pages_fails_and_dropping_it_works() {
    let Some(Move { source, mut target, paging }) = moving(false) else { return };
    target.start().unwrap();
    wait("a thread that sleeps", || {
        (0..paging.shards()).any(|shard| paging.next_fault(shard, Duration::ZERO).unwrap().is_some())
    });
    let error = ProcessGuest::pause(&mut target).unwrap_err();
    assert!(
        matches!(error, Error::Unresponsive { within, .. } if within == Duration::from_secs(10)),
        "{error}"
    );
    // Ends the guest's threads without waiting for the threads that sleep.
    drop(target);
    drop((source, paging));
}

/// A missing page looks to the guest's memory like a page that was never touched.
#[test]
fn guest_with_missing_pages_is_neither_migrated_nor_saved() {
    if !can_fault() {
        return;
    }
    let mut source = running();
    let mut target = ProcessGuest::new_incoming(rig::options()).unwrap();
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), false).unwrap();
    let (uri, arrival) = (listener.uri().unwrap(), Arrival::new(PATIENCE));
    // All pages take three seconds, and longer where the host is starved.
    let slow = Settings { max_bandwidth: Some(8 << 20), ..rig::settings(MigrationMode::Postcopy) };
    let nowhere: Uri = "unix:/nonexistent/vmferry".parse().unwrap();
    std::thread::scope(|scope| {
        let moved = scope.spawn(|| migrate(&mut source, &uri, None, &slow, &MigrationHandle::new()).unwrap());
        let received = receive(&mut target, &listener, &arrival).unwrap();
        let postcopy = received.postcopy.expect("pages that still arrive");
        let on = migrate(&mut target, &nowhere, None, &Settings::default(), &MigrationHandle::new());
        assert!(matches!(on, Err(MigrateError::StillArriving)), "{on:?}");
        let file = save(&mut target, std::path::Path::new("/nonexistent/vmferry"), &MigrationHandle::new());
        assert!(matches!(file, Err(MigrateError::StillArriving)), "{file:?}");
        let state = postcopy.finish(&listener, &arrival);
        assert_eq!(state.state, MigrationState::Completed, "{state:?}");
        assert_eq!(moved.join().unwrap().state, MigrationState::Completed);
    });
    let on = migrate(&mut target, &nowhere, None, &Settings::default(), &MigrationHandle::new());
    assert!(matches!(on, Err(MigrateError::Connect { .. })), "{on:?}");
    rig::whole(&target, "moved, with all pages");
}
