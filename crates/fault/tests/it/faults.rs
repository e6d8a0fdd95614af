//! Tests with real faults on real memory, handled by real threads.

use crate::rig::{KINDS, Kind, Mapped, PAGES, Setup, bytes, content, layout, served, setup, touch_all};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use vmferry_bitmap::Bitmap;
use vmferry_core::{DemandPaging, PAGE_BYTES, PageIndex, PageRun, PageSet, Placed, RegionId};
use vmferry_fault::{UffdMemory, UffdOptions, VcpuThreads};
use vmferry_sys::uffd::Userfaultfd;
use vmferry_testkit::{Need, PATIENCE, print_line, skip, skip_if_emulated, wait};

#[test]
fn every_page_is_placed_once_with_the_right_content() {
    for kind in KINDS {
        for (threads, shards) in [(1, 1), (2, 2), (4, 1), (4, 4), (3, 16)] {
            let Some(setup) = setup(kind, shards) else { return };
            // Stale content, which must not be visible again.
            setup.mapped.fill(u64::MAX);
            setup.paging.begin(&PageSet::full(&layout(&PAGES))).unwrap();
            let (placed, faults) = served(&setup, || touch_all(&setup, threads));
            assert_eq!(placed, PAGES.iter().sum::<u64>(), "{kind:?}, {threads} threads, {shards} shards");
            assert!(faults >= placed);
            setup.paging.end().unwrap();
            touch_all(&setup, 1);
        }
    }
}

#[test]
fn only_missing_pages_are_dropped_and_untouched_pages_fault_too() {
    for kind in KINDS {
        let Some(setup) = setup(kind, 3) else { return };
        for page in 0..PAGES[0] {
            setup.mapped.word(0, page, 7).store(99, Ordering::Relaxed);
        }
        let mut missing = PageSet::empty(&layout(&PAGES));
        let lost = missing.region_mut(RegionId(0)).unwrap();
        // Runs that split huge pages, and one run that is longer than a chunk.
        (0..1024).step_by(3).for_each(|page| _ = lost.set(page));
        lost.set_range(1500..3000);
        setup.paging.begin(&missing).unwrap();
        let lost = missing.region(RegionId(0)).unwrap();
        let (placed, _) = served(&setup, || {
            for page in 0..PAGES[0] {
                let got = setup.mapped.word(0, page, 7).load(Ordering::Relaxed);
                let want = if lost.test(page) { content(0, page, 7) } else { 99 };
                assert_eq!(got, want, "{kind:?}: page {page}");
            }
            // Huge pages may have filled some neighbours in the second region: this test has not
            // touched that region.
            assert_eq!(setup.mapped.word(1, 3, 0).load(Ordering::Relaxed), content(1, 3, 0));
        });
        assert_eq!(placed, lost.count() + 1, "{kind:?}");
    }
}

#[test]
fn runs_are_placed_around_present_pages_and_across_shards() {
    for kind in KINDS {
        let Some(setup) = setup(kind, 4) else { return };
        setup.paging.begin(&PageSet::full(&layout(&PAGES))).unwrap();
        let place = |first: u64, count: u64| {
            let run = PageRun::new(PageIndex(first), count);
            setup.paging.place(RegionId(0), run, &bytes(0, run)).unwrap()
        };
        assert_eq!(place(600, 3), Placed { pages: 3, already_present: 0 });
        assert_eq!(place(1000, 1), Placed { pages: 1, already_present: 0 });
        // The run begins and ends in present pages, has a present page in the middle, and crosses
        // shards.
        assert_eq!(place(602, 399), Placed { pages: 397, already_present: 2 });
        assert_eq!(place(0, 5120), Placed { pages: 5120 - 401, already_present: 401 });
        assert_eq!(place(0, 5120), Placed { pages: 0, already_present: 5120 });
        let zeros = setup.paging.place_zeros(RegionId(0), PageRun::from(0..5120)).unwrap();
        assert_eq!(zeros, Placed { pages: 0, already_present: 5120 });
        for page in 0..PAGES[0] {
            assert_eq!(setup.mapped.word(0, page, 9).load(Ordering::Relaxed), content(0, page, 9));
        }
        let zeros = setup.paging.place_zeros(RegionId(1), PageRun::from(0..1024)).unwrap();
        assert_eq!(zeros, Placed { pages: 1024, already_present: 0 });
        assert_eq!(setup.mapped.word(1, 1023, 511).load(Ordering::Relaxed), 0);
        // Pages that were placed as zeros can be written.
        setup.mapped.word(1, 1023, 511).store(5, Ordering::Relaxed);
        setup.paging.wake(RegionId(1), PageIndex(4)).unwrap();
    }
}

#[test]
fn end_wakes_sleeping_threads_and_is_allowed_at_any_time() {
    for kind in KINDS {
        let Some(setup) = setup(kind, 2) else { return };
        setup.paging.end().unwrap();
        for round in 0..3 {
            setup.mapped.fill(round);
            setup.paging.begin(&PageSet::full(&layout(&PAGES))).unwrap();
            assert!(
                setup.paging.begin(&PageSet::full(&layout(&PAGES))).is_err(),
                "demand paging has already begun"
            );
            let awake = AtomicUsize::new(0);
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    let (mapped, awake) = (&setup.mapped, &awake);
                    scope.spawn(move || {
                        assert_eq!(mapped.word(0, 600 * thread, 0).load(Ordering::Relaxed), 0);
                        awake.fetch_add(1, Ordering::Relaxed);
                    });
                }
                let mut slept = 0;
                wait("four sleepers", || {
                    for shard in 0..2 {
                        slept += u32::from(setup.paging.next_fault(shard, Duration::ZERO).unwrap().is_some());
                    }
                    slept >= 4
                });
                assert_eq!((slept, awake.load(Ordering::Relaxed)), (4, 0));
                setup.paging.end().unwrap();
            });
            assert_eq!(awake.load(Ordering::Relaxed), 4);
            setup.paging.end().unwrap();
            // No access raises a fault any more, and the memory is ordinary memory.
            setup.mapped.word(1, 77, 0).store(1, Ordering::Relaxed);
            assert_eq!(setup.mapped.word(1, 77, 0).load(Ordering::Relaxed), 1);
        }
    }
}

#[test]
fn interrupt_makes_every_next_fault_return_once() {
    let Some(setup) = setup(Kind::Anonymous, 3) else { return };
    let paging = &setup.paging;
    paging.begin(&PageSet::empty(&layout(&PAGES))).unwrap();
    let long = PATIENCE * 2;
    let began = Instant::now();
    // No thread waits: the next call of each shard returns at once, and the call after it waits
    // again.
    paging.interrupt();
    for shard in 0..3 {
        assert_eq!(paging.next_fault(shard, long).unwrap(), None);
    }
    assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    let waited = Instant::now();
    assert_eq!(paging.next_fault(1, Duration::from_millis(50)).unwrap(), None);
    assert!(waited.elapsed() >= Duration::from_millis(50));
    // Several threads wait, two of them for the same shard.
    let began = Instant::now();
    std::thread::scope(|scope| {
        for shard in [0, 1, 1, 2] {
            let (sender, thread) = channel();
            scope.spawn(move || {
                // SAFETY: the call takes no arguments.
                sender.send(unsafe { libc::gettid() }).unwrap();
                assert_eq!(paging.next_fault(shard, long).unwrap(), None);
            });
            let thread = thread.recv().unwrap();
            wait("a thread that waits", || sleeps(thread));
        }
        paging.interrupt();
    });
    assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    assert!(paging.next_fault(3, Duration::ZERO).is_err());
}

/// Returns whether a thread of this process sleeps.
fn sleeps(thread: libc::pid_t) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('S'))
}

#[test]
fn faults_have_the_vcpu_of_their_thread() {
    let Some(setup) = setup(Kind::Anonymous, 2) else { return };
    setup.paging.begin(&PageSet::full(&layout(&PAGES))).unwrap();
    std::thread::scope(|scope| {
        for (vcpu, page) in [(Some(5), 10), (None, 11)] {
            let (threads, mapped) = (&setup.threads, &setup.mapped);
            scope.spawn(move || {
                let _registered = vcpu.map(|vcpu| threads.register(vcpu));
                mapped.word(1, page, 0).store(8, Ordering::Relaxed);
            });
            let shard = setup.paging.shard_of(RegionId(1), PageIndex(page));
            let fault = setup.paging.next_fault(shard, PATIENCE).unwrap().expect("a fault");
            assert_eq!((fault.region, fault.page, fault.vcpu), (RegionId(1), PageIndex(page), vcpu));
            assert!(fault.write);
            setup.paging.place_zeros(RegionId(1), PageRun::new(fault.page, 1)).unwrap();
        }
    });
}

#[test]
fn look_never_sleeps() {
    for kind in KINDS {
        let Some(setup) = setup(kind, 2) else { return };
        let run = PageRun::from(4..6);
        let look = || {
            setup
                .paging
                .read_if_present(RegionId(0), run, || setup.mapped.word(0, 5, 0).load(Ordering::Relaxed))
        };
        setup.mapped.fill(3);
        assert_eq!(look(), Some(3));
        setup.paging.begin(&PageSet::full(&layout(&PAGES))).unwrap();
        assert_eq!(look(), None);
        let one = PageRun::from(4..5);
        setup.paging.place(RegionId(0), one, &bytes(0, one)).unwrap();
        assert_eq!(look(), None, "{kind:?}: half of the run is present");
        setup.paging.place_zeros(RegionId(0), PageRun::from(5..6)).unwrap();
        assert_eq!(look(), Some(0), "{kind:?}");
        assert_eq!(setup.paging.read_if_present(RegionId(9), run, || ()), None);
        setup.paging.end().unwrap();
        assert_eq!(look(), Some(0));
    }
}

#[test]
fn wrong_arguments_are_refused_and_change_nothing() {
    let Some(setup) = setup(Kind::Anonymous, 2) else { return };
    setup.mapped.fill(3);
    let page = vec![1; PAGE_BYTES];
    let run = PageRun::new(PageIndex(0), 1);
    assert!(setup.paging.place(RegionId(0), run, &page).is_err(), "not begun");
    let other = PageSet::full(&layout(&[5120, 1025]));
    assert!(setup.paging.begin(&other).is_err());
    assert_eq!(setup.mapped.word(1, 3, 3).load(Ordering::Relaxed), 3);
    setup.paging.begin(&PageSet::full(&layout(&PAGES))).unwrap();
    assert!(setup.paging.place(RegionId(0), run, &page[1..]).is_err());
    assert!(setup.paging.place(RegionId(2), run, &page).is_err());
    assert!(setup.paging.place(RegionId(0), PageRun::new(PageIndex(5120), 1), &page).is_err());
    assert!(setup.paging.place_zeros(RegionId(1), PageRun::new(PageIndex(1), u64::MAX)).is_err());
    assert!(setup.paging.wake(RegionId(1), PageIndex(1024)).is_err());
}

#[test]
fn failed_begin_leaves_no_memory_registered() {
    let Some(first) = setup(Kind::Anonymous, 2) else { return };
    // The second region belongs to another userfaultfd, so registering fails half-way.
    let spoiler = Userfaultfd::open(0).unwrap();
    let second = &first.mapped.regions()[1];
    spoiler.register_missing(second.host..second.host + second.len).unwrap();
    let error = first.paging.begin(&PageSet::full(&layout(&PAGES))).unwrap_err();
    assert!(error.to_string().contains("another userfaultfd"), "{error}");
    first.mapped.word(0, 9, 0).store(1, Ordering::Relaxed);
    drop(spoiler);
    first.paging.begin(&PageSet::full(&layout(&PAGES))).unwrap();
    first.paging.end().unwrap();
    assert_eq!(first.mapped.word(0, 9, 0).load(Ordering::Relaxed), 0);
}

#[test]
fn drop_ends_demand_paging_and_merges_the_mappings() {
    for kind in KINDS {
        let Some(Setup { mapped, paging, .. }) = setup(kind, 4) else { return };
        let start = mapped.0[0].0.addr().get() as u64;
        let mappings = || {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            let inside = |line: &&str| {
                let from = u64::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
                (start..start + (PAGES[0] << 12)).contains(&from)
            };
            maps.lines().filter(inside).count()
        };
        mapped.fill(1);
        let before = mappings();
        paging.begin(&PageSet::full(&layout(&PAGES))).unwrap();
        assert!(mappings() >= 10, "{kind:?}: chunks of 2 MiB in four shards");
        let mut touched = Bitmap::new(PAGES[0]);
        touched.set_range(0..PAGES[0]);
        drop(paging);
        assert!(mappings() <= before + 1, "{kind:?}: {} mappings, {before} before", mappings());
        assert_eq!(mapped.word(0, 5, 0).load(Ordering::Relaxed), 0);
    }
}

#[test]
fn thread_that_waits_for_a_page_reads_no_zeros_after_the_memory_of_its_guest_was_dropped() {
    for kind in KINDS {
        let Some(Setup { mapped, paging, threads }) = setup(kind, 2) else { return };
        let (shard, read) = (paging.shard_of(RegionId(0), PageIndex(3)), Arc::new(AtomicBool::new(false)));
        paging.begin(&PageSet::full(&layout(&PAGES))).unwrap();
        paging.started();
        let (ram, done) = (Arc::clone(&mapped), Arc::clone(&read));
        // It is never joined: it waits for as long as the process lives.
        std::thread::spawn(move || {
            let _registered = threads.register(0);
            ram.word(0, 3, 0).load(Ordering::Relaxed);
            done.store(true, Ordering::Release);
        });
        let fault = paging.next_fault(shard, PATIENCE).unwrap().expect("a fault");
        assert_eq!((fault.page, fault.vcpu), (PageIndex(3), Some(0)));
        let owners = Arc::strong_count(&mapped);
        drop(paging);
        assert_eq!(Arc::strong_count(&mapped), owners, "{kind:?}: the memory stays mapped");
        std::thread::sleep(Duration::from_millis(50));
        assert!(!read.load(Ordering::Acquire), "{kind:?}: the thread has read zeros");
    }
}

/// Runs as an ordinary user without permission for faults of the kernel: checks the error message
/// and that user mode still works.
#[test]
fn ordinary_user_is_told_how_to_get_the_permission() {
    const CHILD: &str = "VMFERRY_FAULT_CHILD";
    if std::env::var_os(CHILD).is_some() {
        let mapped = Arc::new(Mapped::new(Kind::Anonymous, &PAGES));
        let options = UffdOptions::new(Arc::new(VcpuThreads::new(1)));
        // SAFETY: as in `setup_of`: `mapped` owns the mappings, and accesses their bytes through
        // atomics.
        let paging = unsafe { UffdMemory::new(mapped.regions(), Arc::clone(&mapped) as _, &options) };
        return match paging {
            Ok(_) => print_line("child: full access"),
            Err(error) => print_line(format!("child: {error}")),
        };
    }
    let text = |path| std::fs::read_to_string(path).unwrap_or_default();
    if !rustix::process::geteuid().is_root() {
        return skip(Need::Root, "the test needs root to start a process as an ordinary user");
    }
    if text("/proc/sys/vm/unprivileged_userfaultfd").trim() != "0" {
        return skip(Need::Kernel, "vm.unprivileged_userfaultfd allows userfaultfd to all users");
    }
    if skip_if_emulated("userfaultfd") {
        return;
    }
    // Copy the test program to a place where that user may read it.
    let copy = std::env::temp_dir().join(format!("vmferry-fault-child-{}", std::process::id()));
    std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    let name = "faults::ordinary_user_is_told_how_to_get_the_permission";
    let output = std::process::Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"])
        .arg(&copy)
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, "1")
        .current_dir("/")
        .output();
    std::fs::remove_file(&copy).unwrap();
    match output {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            for part in ["vm.unprivileged_userfaultfd", "CAP_SYS_PTRACE", "/dev/userfaultfd"] {
                assert!(said.contains(part), "{said}{}", String::from_utf8_lossy(&output.stderr));
            }
        }
        Err(error) => skip(Need::Program, format!("setpriv: {error}")),
    }
}

extern "C" fn ignore(_: libc::c_int) {}

/// A signal does not interrupt a thread that sleeps on a page inside a system call. While the
/// signal is pending, the kernel retries the access repeatedly, and each retry is a fault. The
/// fault handler must tolerate these faults, and placing the page must still wake the thread.
#[test]
fn signal_to_a_thread_that_sleeps_in_a_system_call_repeats_its_fault() {
    let Some(setup) = setup(Kind::Anonymous, 1) else { return };
    if let Err(error) = Userfaultfd::open_full(0) {
        return skip(Need::Uffd, format!("faults of system calls: {error}"));
    }
    // SAFETY: zeros are a valid sigaction, and the handler does nothing.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(libc::c_int) = ignore;
        action.sa_sigaction = handler as libc::sighandler_t;
        assert_eq!(libc::sigaction(libc::SIGUSR2, &raw const action, std::ptr::null_mut()), 0);
    }
    setup.paging.begin(&PageSet::full(&layout(&PAGES))).unwrap();
    let thread = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            // SAFETY: the call takes no arguments.
            thread.store(unsafe { libc::pthread_self() }, Ordering::Release);
            let zero = std::fs::File::open("/dev/zero").unwrap();
            // SAFETY: a page of the mapping, which the kernel writes.
            unsafe {
                let to = setup.mapped.0[0].0.as_ptr().add(9 * PAGE_BYTES);
                libc::read(std::os::fd::AsRawFd::as_raw_fd(&zero), to.cast(), 100)
            }
        });
        let next = |within| setup.paging.next_fault(0, within).unwrap();
        let first = next(PATIENCE).expect("a fault of a system call");
        // On a busy host, a fault that arrives later may be missed, which only weakens the test.
        assert_eq!(next(Duration::from_millis(50)), None, "one sleeper, one fault");
        // SAFETY: the thread exists: it cannot end before its page arrives.
        unsafe { libc::pthread_kill(thread.load(Ordering::Acquire), libc::SIGUSR2) };
        // The number of further faults depends on the host. Each of them must be for the same page.
        let (begin, mut again) = (Instant::now(), 0_u64);
        while begin.elapsed() < Duration::from_millis(100) {
            if let Some(fault) = next(Duration::ZERO) {
                assert_eq!((fault.region, fault.page), (first.region, first.page));
                again += 1;
            }
        }
        print_line(format!(
            "a signal to a thread that sleeps in a system call: {again} more faults in 100 ms"
        ));
        setup.paging.place_zeros(first.region, PageRun::new(first.page, 1)).unwrap();
        let read = reading.join().unwrap();
        assert!(read == 100 || read == -1, "{read}");
    });
}
