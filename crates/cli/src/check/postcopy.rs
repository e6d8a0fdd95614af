//! Findings about page faults that postcopy, on-demand restores and snapshots need: those of vCPUs,
//! of the kernel and of user code.

use super::Finding;
use std::fs::File;
use vmferry_sys::SysError;
use vmferry_sys::uffd::{
    FEATURE_MINOR_HUGETLBFS, FEATURE_MISSING_HUGETLBFS, FEATURE_MISSING_SHMEM, FEATURE_THREAD_ID, FEATURE_WP,
    FEATURE_WP_SHMEM, Userfaultfd,
};

/// `UFFD_FEATURE_MINOR_SHMEM`.
const MINOR_SHMEM: u64 = 1 << 10;

const PERMIT: &str = "postcopy and on-demand restores of KVM guests need it: be root, set the sysctl vm.unprivileged_userfaultfd to 1, \
     or give this user access to /dev/userfaultfd, or the process CAP_SYS_PTRACE";

pub(super) fn findings() -> Vec<Finding> {
    let missing = FEATURE_MISSING_SHMEM | FEATURE_THREAD_ID;
    let delayed = FEATURE_WP | FEATURE_WP_SHMEM | FEATURE_THREAD_ID;
    let minor =
        |feature| Userfaultfd::open(feature).map_err(said).map(|_| "pages can be mapped in place".into());
    vec![
        Finding::new(
            "faults_kernel",
            "faults, kernel and KVM",
            Userfaultfd::open_full(missing).map_err(said).map(|_| way()),
            PERMIT,
        ),
        Finding::new(
            "faults_user",
            "faults, user code",
            Userfaultfd::open(missing).map_err(said).map(|_| "missing pages of this process".into()),
            "no guest can run before its memory is complete: needs Linux 5.11 with CONFIG_USERFAULTFD, and no sandbox that forbids it",
        ),
        Finding::new(
            "snapshot",
            "writes delayed, kernel and KVM",
            Userfaultfd::open_full(delayed).map_err(said).map(|_| "protected pages".into()),
            "snapshots of running KVM guests need it: Linux 5.19, and the permission for faults of the kernel and KVM",
        ),
        Finding::new(
            "minor_shmem",
            "minor faults, memfd",
            minor(MINOR_SHMEM),
            "needs Linux 5.14 and access to userfaultfd; postcopy copies pages instead",
        ),
        Finding::new(
            "minor_hugetlbfs",
            "minor faults, hugetlbfs",
            minor(FEATURE_MINOR_HUGETLBFS | FEATURE_MISSING_HUGETLBFS),
            "postcopy of guests on huge pages needs Linux 5.13 and access to userfaultfd",
        ),
        Finding::new(
            "cpu_latency",
            "processors kept awake",
            // Opening the file has no lasting effect.
            File::options()
                .write(true)
                .open("/dev/cpu_dma_latency")
                .map(|_| "/dev/cpu_dma_latency can be written".into())
                .map_err(|error| format!("/dev/cpu_dma_latency: {error}")),
            "pages that a guest waits for take longer when processors sleep deeply: be root, or give this user write access to the file",
        ),
    ]
}

fn said(error: SysError) -> String {
    error.to_string()
}

/// Returns the means that let this process have a userfaultfd for kernel faults.
fn way() -> String {
    let sysctl = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd");
    let device = File::options().read(true).write(true).open("/dev/userfaultfd").is_ok();
    let ways = [
        (super::host::has_capability(super::host::CAP_SYS_PTRACE), "CAP_SYS_PTRACE"),
        (sysctl.is_ok_and(|text| text.trim() == "1"), "vm.unprivileged_userfaultfd=1"),
        (device, "/dev/userfaultfd"),
    ];
    let ways: Vec<_> = ways.iter().filter(|(open, _)| *open).map(|(_, name)| *name).collect();
    if ways.is_empty() { "permitted".into() } else { format!("by {}", ways.join(", ")) }
}
