//! Threads that are confined as the command's are, and the KVM that they use.

use vmferry_testkit::{Need, say, skip};
use vmferry_vmm::{Error, open_kvm};

/// Before any thread is started. A sanitizer's runtime calls what filters forbid, and says so by `VMFERRY_TEST_UNCONFINED`.
fn threads() {
    if std::env::var_os("VMFERRY_TEST_UNCONFINED").is_some() {
        return say("threads are not confined: VMFERRY_TEST_UNCONFINED is set");
    }
    vmferry_confine::confine_threads().unwrap();
}

/// Confines the threads of the VM and of its migrations to the system calls of their roles.
///
/// Returns whether this user may use a KVM here; without one the calling test is skipped.
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
