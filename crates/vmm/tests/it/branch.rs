//! Branches of KVM guests: the memory of the children, and the writes of each guest.

use crate::confined::kvm;
use crate::rig::{corrupt, empty, working};
use vmferry_core::PageDigest;
use vmferry_engine::{Migratable, RunState, branch, join_branch};
use vmferry_testkit_peers::memory::digests;
use vmferry_vmm::{Backing, Vm, VmOptions};

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
