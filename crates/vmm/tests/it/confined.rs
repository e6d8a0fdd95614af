//! Confinement of threads as in the command, and the check for KVM.

use vmferry_testkit::{Need, print_line, skip};
use vmferry_vmm::{Error, open_kvm};

/// Confines threads before any is started. A sanitizer's runtime makes system calls that the
/// filters forbid, so its tests set `VMFERRY_TEST_UNCONFINED`.
fn threads() {
    if std::env::var_os("VMFERRY_TEST_UNCONFINED").is_some() {
        return print_line("threads are not confined: VMFERRY_TEST_UNCONFINED is set");
    }
    vmferry_confine::confine_threads().unwrap();
}

/// Confines the threads of the VM and of its migrations to the system calls of their roles.
///
/// Returns true if this user may use KVM. If not, the calling test is skipped.
pub(crate) fn kvm() -> bool {
    threads();
    match open_kvm() {
        Ok(_) => true,
        Err(error @ (Error::NoKvm | Error::NoPermission)) => {
            skip(Need::Kvm, error);
            false
        }
        Err(error) => panic!("KVM is present and cannot be used: {error}"),
    }
}
