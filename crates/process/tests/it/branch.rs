//! Branches of process guests: children that continue from one instant and share memory.

use crate::rig::{options, whole, writes};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use vmferry_core::PageDigest;
use vmferry_engine::{
    BranchError, BranchPoint, Branched, Migratable, MigrateError, RunState, SharedSettings, SourceVm,
    TargetVm, VmError, WorkingSetError, branch, join_branch, restore_shared, restore_shared_with, save_copy,
};
use vmferry_guest_abi::State;
use vmferry_process::{ProcessGuest, ProcessOptions};
use vmferry_testkit::{Folder, wait};
use vmferry_testkit_peers::memory::digests;

fn shareable() -> ProcessOptions {
    let mut options = options();
    options.memfd = true;
    options
}

fn parent() -> ProcessGuest {
    let load = "uniform,ws=6M,data=8M,rate=20k,fill=random";
    let mut guest = ProcessGuest::new(shareable(), load.parse().unwrap()).unwrap();
    guest.start().unwrap();
    let handle = guest.handle();
    wait("the guest to fill its memory", || handle.stats().is_ok_and(|s| s.state >= State::Running));
    guest
}

fn child(point: &BranchPoint) -> ProcessGuest {
    let mut child = ProcessGuest::new_incoming(options()).unwrap();
    let received = join_branch(&mut child, point).unwrap();
    assert!(received.copy_of.is_some(), "a child has an id of its own");
    child
}

fn branched(parent: &mut ProcessGuest) -> Branched {
    branch(parent, &mut || Ok(())).unwrap()
}

/// Branches a guest whose memory is private since an earlier branch. Returns `None` if the host
/// cannot track its writes.
fn branched_again(guest: &mut ProcessGuest) -> Option<Branched> {
    match branch(guest, &mut || Ok(())) {
        Err(BranchError::Refused(error)) if error.to_string().contains("userfaultfd") => {
            vmferry_testkit::skip(vmferry_testkit::Need::Uffd, error);
            None
        }
        taken => Some(taken.unwrap()),
    }
}

/// Returns a child that does not run, so that it shows the shared pages.
fn witness(point: &BranchPoint) -> ProcessGuest {
    let mut witness = ProcessGuest::new_incoming(options()).unwrap();
    drop(witness.adopt_memory(point.regions()).unwrap());
    witness
}

/// Returns the digest of each page. `None` stands for a page of zeros.
fn pages(vm: &dyn Migratable) -> Vec<Option<PageDigest>> {
    digests(&*vm.memory())
}

#[test]
fn children_have_the_memory_of_one_instant_and_writes_stay_where_they_are_made() {
    let mut parent = parent();
    // While the operator has paused the guest, its memory at the instant is known.
    parent.set_run_state(RunState::Paused).unwrap();
    let (instant, count) = (pages(&parent), writes(&parent));
    let mut taken = branched(&mut parent);
    assert_eq!(taken.copied_pages, 0);
    taken.seal().unwrap();
    assert_eq!(pages(&parent), instant, "the parent keeps its memory");

    let witness = witness(&taken.point);
    assert_eq!(pages(&witness), instant);
    assert_eq!(writes(&witness), count);

    parent.set_run_state(RunState::Running).unwrap();
    let children = [child(&taken.point), child(&taken.point)];
    for child in &children {
        assert_eq!(child.run_state(), RunState::Running);
        whole(child, "child");
        assert!(writes(child) > count);
    }
    whole(&parent, "parent");
    assert_eq!(pages(&witness), instant, "no guest sees the writes of another");
    let [one, two] = &children;
    assert_ne!(pages(one), pages(two));
    assert_ne!(pages(one), instant);
}

#[test]
fn parent_and_children_can_be_branched_again() {
    let mut parent = parent();
    let first = branched(&mut parent);
    let mut child = child(&first.point);
    whole(&child, "child");
    whole(&parent, "parent");
    for guest in [&mut parent, &mut child] {
        let Some(mut second) = branched_again(guest) else { return };
        assert!(second.copied_pages > 0, "pages that no file had");
        second.seal().unwrap();
        let grandchild = self::child(&second.point);
        whole(&grandchild, "grandchild");
        whole(guest, "branched again");
    }
    // The first point is still good.
    whole(&self::child(&first.point), "late child");
}

#[test]
fn second_branch_has_the_memory_of_its_own_instant() {
    let mut parent = parent();
    branched(&mut parent);
    whole(&parent, "parent");
    parent.set_run_state(RunState::Paused).unwrap();
    let instant = pages(&parent);
    let Some(second) = branched_again(&mut parent) else { return };
    assert_eq!(pages(&parent), instant);
    assert_eq!(pages(&witness(&second.point)), instant);
    assert_eq!(parent.run_state(), RunState::Paused);
}

#[test]
fn anonymous_memory_is_refused_and_the_guest_goes_on() {
    let mut guest = crate::rig::running();
    let error = branch(&mut guest, &mut || panic!("nothing is ready")).unwrap_err().to_string();
    assert!(error.contains("anonymous guest memory") && error.contains("memfd"), "{error}");
    whole(&guest, "refused");
}

#[test]
fn guest_goes_on_if_its_children_do_not_become_ready() {
    let mut parent = parent();
    let error = branch(&mut parent, &mut || Err(VmError::new("no child"))).unwrap_err();
    assert!(error.to_string().contains("no child"), "{error}");
    whole(&parent, "not branched");
    // The guest was not changed, so its first branch copies nothing.
    assert_eq!(branched(&mut parent).copied_pages, 0);
}

#[test]
fn files_of_a_branch_cannot_be_changed_and_are_checked() {
    let mut parent = parent();
    let mut taken = branched(&mut parent);
    let point = taken.point.clone();
    let file = &point.regions()[0].file;
    let refused = Err(rustix::io::Errno::PERM);
    assert_eq!(rustix::io::pwrite(file, &[1], 0).map(drop), refused);
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    assert_eq!(rustix::fs::fallocate(file, punch, 0, 4096), refused);
    assert_eq!(rustix::fs::ftruncate(file, 4096), refused);
    taken.seal().unwrap();

    let (one, two) = UnixStream::pair().unwrap();
    point.send(one.as_fd()).unwrap();
    let passed = BranchPoint::receive(two.as_fd()).unwrap().unwrap();
    whole(&child(&passed), "child of a passed point");

    // A machine with other memory is refused.
    let mut larger = ProcessGuest::new_incoming(ProcessOptions::new(32 << 20, 2)).unwrap();
    let error = join_branch(&mut larger, &point).unwrap_err().to_string();
    assert!(error.contains("memory"), "{error}");
}

#[test]
fn child_can_be_saved_and_snapshot_is_shared_by_guests() {
    let mut parent = parent();
    let point = branched(&mut parent).point;
    let mut child = child(&point);
    let folder = Folder::new();
    let path = folder.path("child");
    let path = std::path::Path::new(&path);
    let report = save_copy(&mut child, path, &vmferry_engine::MigrationHandle::new()).unwrap();
    assert_eq!(report.outcome.as_deref(), Some("completed"), "{:?}", report.error);
    whole(&child, "saved child");
    let mut guests: Vec<_> = (0..2).map(|_| ProcessGuest::new_incoming(options()).unwrap()).collect();
    for guest in &mut guests {
        let received = restore_shared(guest, path).unwrap();
        assert!(received.copy_of.is_some());
    }
    guests.iter().for_each(|guest| whole(guest, "guest on a shared file"));
    let mut again = ProcessGuest::new_incoming(options()).unwrap();
    let received = restore_shared(&mut again, path).unwrap();
    assert!(received.postcopy.is_none());
    whole(&again, "the file is unchanged");

    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o620)).unwrap();
    let mut last = ProcessGuest::new_incoming(options()).unwrap();
    let error = restore_shared(&mut last, path).unwrap_err().to_string();
    assert!(error.contains("chmod go-w"), "{error}");
}

#[test]
fn working_set_of_one_guest_is_brought_in_for_the_next() {
    let mut parent = parent();
    let folder = Folder::new();
    let (path, other) = (folder.file("one"), folder.file("other"));
    for path in [&path, &other] {
        let report = save_copy(&mut parent, path, &vmferry_engine::MigrationHandle::new()).unwrap();
        assert_eq!(report.outcome.as_deref(), Some("completed"), "{:?}", report.error);
    }
    let restored = |path: &std::path::Path, change: &dyn Fn(&mut SharedSettings)| {
        let (mut guest, mut settings) =
            (ProcessGuest::new_incoming(options()).unwrap(), SharedSettings::default());
        change(&mut settings);
        restore_shared_with(&mut guest, path, settings).map(|restore| (guest, restore))
    };
    let (first, mut restore) = restored(&path, &|settings| settings.record = true).unwrap();
    let began = writes(&first);
    wait("writes of the guest", || writes(&first) > began + 200);
    let set = restore.finish_recording().unwrap().unwrap();
    assert!(restore.finish_recording().unwrap().is_none(), "the recording has ended");
    assert!(restore.watch_prefetch().is_none());
    let all = first.memory().layout().pages();
    assert!((50..all).contains(&set.pages()), "{} of {all}", set.pages());
    whole(&first, "a recorded guest");

    let (second, restore) = restored(&path, &|settings| settings.prefetch = Some(set.clone())).unwrap();
    let watch = restore.watch_prefetch().unwrap();
    wait("the prefetch", || watch().ended);
    assert_eq!(watch().brought, set.pages());
    whole(&second, "a guest with a prefetch");
    // The guest continues when the value is dropped.
    let (third, restore) = restored(&path, &|settings| settings.prefetch = Some(set.clone())).unwrap();
    drop(restore);
    whole(&third, "a guest whose prefetch was ended");

    let refused = restored(&other, &|settings| settings.prefetch = Some(set.clone())).err().unwrap();
    let MigrateError::WorkingSet { source: WorkingSetError::OtherSnapshot { .. }, .. } = refused else {
        panic!("{refused}")
    };
}

#[test]
fn branched_guest_has_no_demand_paging() {
    let mut parent = parent();
    branched(&mut parent);
    let error = parent.demand_paging().unwrap_err().to_string();
    assert!(error.contains("shared with a branch"), "{error}");
    assert!(parent.prepare_branch().is_ok());
}
