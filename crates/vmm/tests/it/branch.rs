//! Branches of KVM guests: the memory of the children, and the writes of each guest.

use crate::confined::kvm;
use crate::rig::{corrupt, empty, working};
use std::os::fd::OwnedFd;
use std::path::Path;
use vmferry_core::PageDigest;
use vmferry_engine::{Migratable, RunState, branch, join_branch};
use vmferry_testkit::{Folder, Reflinks};
use vmferry_testkit_peers::memory::digests;
use vmferry_vmm::{Backing, DiskError, DiskOptions, Error, Vm, VmOptions};

const WORKLOAD: &str = "uniform,ws=8M,data=32M,rate=50k,fill=random";

fn options() -> VmOptions {
    let mut options = VmOptions::new(64 << 20, 2);
    options.backing = Backing::Memfd;
    options
}

/// Returns the digest of each page. `None` stands for a page of zeros.
fn pages(vm: &Vm) -> Vec<Option<PageDigest>> {
    digests(&*vm.memory())
}

#[test]
fn children_have_the_memory_of_one_instant_and_writes_stay_where_they_are_made() {
    if !kvm() {
        return;
    }
    for again in [false, true] {
        let mut parent = working(options(), WORKLOAD, 1000);
        if again {
            // The second branch of a guest copies its memory.
            let _ = branch(&mut parent, &mut || Ok(())).unwrap();
            assert_eq!(corrupt(&parent), 0);
        }
        parent.set_run_state(RunState::Paused).unwrap();
        let instant = pages(&parent);
        let mut taken = branch(&mut parent, &mut || Ok(())).unwrap();
        assert_eq!(taken.copied_pages > 0, again);
        taken.seal().unwrap();
        assert_eq!(pages(&parent), instant, "the parent keeps its memory");
        // This child does not run, so that it shows the shared pages.
        let mut witness = empty(VmOptions::new(64 << 20, 2));
        drop(Migratable::adopt_memory(&mut witness, taken.point.regions()).unwrap());
        assert!(pages(&witness) == instant, "the files have the memory of the instant");

        parent.set_run_state(RunState::Running).unwrap();
        let mut children = [empty(options()), empty(VmOptions::new(64 << 20, 2))];
        for child in &mut children {
            let _ = join_branch(child, &taken.point).unwrap();
        }
        for guest in children.iter().chain([&parent]) {
            assert_eq!(corrupt(guest), 0);
        }
        assert!(pages(&witness) == instant, "no guest sees the writes of another");
        for guest in children.iter_mut().chain([&mut parent]) {
            guest.pause().unwrap();
        }
        assert!(pages(&children[0]) != pages(&children[1]) && pages(&children[0]) != instant);
    }
}

#[test]
fn anonymous_memory_is_refused_and_the_guest_goes_on() {
    if !kvm() {
        return;
    }
    let mut guest = working(VmOptions::new(64 << 20, 1), WORKLOAD, 1000);
    let error = branch(&mut guest, &mut || panic!("nothing is ready")).unwrap_err().to_string();
    assert!(error.contains("anonymous guest memory"), "{error}");
    assert_eq!(corrupt(&guest), 0);
}

fn with_disk(path: &Path) -> VmOptions {
    let mut options = options();
    options.disks = vec![DiskOptions::new(path)];
    options
}

fn new_file(path: &Path) -> OwnedFd {
    std::fs::File::options().read(true).write(true).create_new(true).open(path).unwrap().into()
}

#[test]
fn copy_of_a_disk_has_the_content_of_the_pause() {
    if !kvm() {
        return;
    }
    let Some(storage) = Reflinks::new() else { return };
    let (disk, copy) = (storage.file("disk"), storage.file("copy"));
    std::fs::write(&disk, [1; 1 << 16]).unwrap();
    let mut parent = working(with_disk(&disk), WORKLOAD, 1000);
    parent.set_disk_copies(vec![new_file(&copy)]);
    let mut changed = || {
        // The disk was copied for a trial, and changes before the pause.
        assert_eq!(std::fs::read(&copy).unwrap(), [1; 1 << 16]);
        std::fs::write(&disk, [2; 1 << 16]).unwrap();
        Ok(())
    };
    let taken = branch(&mut parent, &mut changed).unwrap();
    std::fs::write(&disk, [3; 1 << 16]).unwrap();
    assert_eq!(std::fs::read(&copy).unwrap(), [2; 1 << 16]);
    assert!(taken.disks <= taken.pause);
    let mut child = empty(with_disk(&copy));
    let _ = join_branch(&mut child, &taken.point).unwrap();
    assert_eq!((corrupt(&child), corrupt(&parent)), (0, 0));
    // The files are gone, so that no later branch changes the disk of the child.
    parent.set_disk_copies(Vec::new());
    assert!(matches!(parent.prepare_branch(), Err(Error::SharedDisk { .. })));
}

#[test]
fn disk_that_cannot_be_copied_is_refused_before_the_pause() {
    if !kvm() {
        return;
    }
    let folder = Folder::new();
    // tmpfs has no reflinks.
    let disk = Path::new("/dev/shm").join(format!("vmferry-no-reflinks-{}", std::process::id()));
    std::fs::write(&disk, [1; 1 << 16]).unwrap();
    let mut parent = working(with_disk(&disk), WORKLOAD, 1000);
    let refused = |parent: &mut Vm| branch(parent, &mut || panic!("nothing is ready")).unwrap_err();
    assert!(refused(&mut parent).to_string().contains("would share"));
    parent.set_disk_copies(vec![new_file(&folder.file("one")), new_file(&folder.file("two"))]);
    assert!(refused(&mut parent).to_string().contains("2 files for copies of 1 disks"));
    parent.set_disk_copies(vec![new_file(&folder.file("copy"))]);
    let error = parent.prepare_branch().unwrap_err();
    assert!(matches!(error, Error::Disk(DiskError::Copy { .. })), "{error}");
    refused(&mut parent);
    assert!(parent.copy_disks().unwrap_err().to_string().contains("the guest runs"));
    assert_eq!(corrupt(&parent), 0);
    std::fs::remove_file(&disk).unwrap();
}
