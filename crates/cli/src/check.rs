//! `vmferry check`: what this host can do.

use crate::{Status, guest};
use anyhow::Result;
use std::fs;

/// Prints a line for each thing that vmferry uses, and what to do where it is missing.
pub(crate) fn check() -> Result<Status> {
    let mut usable = false;
    let mut line = |name: &str, found: Result<String, String>, otherwise: &str| match found {
        Ok(text) => {
            usable = true;
            println!("yes  {name:24} {text}");
        }
        Err(why) => println!("no   {name:24} {why}; {otherwise}"),
    };
    line(
        "KVM guests",
        guest::no_kvm().map_or_else(|| Ok("/dev/kvm works".into()), Err),
        "without it `--guest process` still works; load kvm_intel or kvm_amd, and join the group that owns /dev/kvm",
    );
    line(
        "dirty rings",
        vmferry_vmm::largest_dirty_ring()
            .map_err(|error| error.to_string())
            .and_then(|most| most.ok_or_else(|| "KVM has none".into()))
            .map(|most| format!("up to {most} entries a vCPU")),
        "`--tracker log` and `wp` need none; rings need Linux 5.11",
    );
    line(
        "tracking by wp",
        vmferry_dirty::WpTracker::available()
            .map(|()| "userfaultfd WP_ASYNC and PAGEMAP_SCAN".into())
            .map_err(|e| e.to_string()),
        "needs Linux 6.7 and access to userfaultfd (vm.unprivileged_userfaultfd=1, or root)",
    );
    line(
        "transparent huge pages",
        huge_pages(),
        "memory is mapped in 4 KiB pages, which is slower: set it to madvise or always",
    );
    let pool = vmferry_vmm::HugePagePool::read();
    line(
        "huge pages (--memory-backing hugetlbfs)",
        if pool.pages > 0 {
            Ok(format!("{} of 2 MiB, {} free", pool.pages, pool.free))
        } else {
            Err("the pool is empty".into())
        },
        "`sysctl vm.nr_hugepages=512` sets 1 GiB aside",
    );
    Ok(if usable { Status::Done } else { Status::Failed })
}

fn huge_pages() -> Result<String, String> {
    let path = "/sys/kernel/mm/transparent_hugepage/enabled";
    let text = fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    let text = text.trim().to_owned();
    if text.contains("[never]") { Err(format!("{path} says {text}")) } else { Ok(text) }
}
