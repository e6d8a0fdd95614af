//! Threads that are confined as the command's are.

use std::io::Write;

/// Before any thread is started. A sanitizer's runtime calls what filters forbid, and says so by `VMFERRY_TEST_UNCONFINED`.
pub(crate) fn threads() {
    if std::env::var_os("VMFERRY_TEST_UNCONFINED").is_some() {
        let _ = writeln!(std::io::stdout(), "threads are not confined: VMFERRY_TEST_UNCONFINED is set");
        return;
    }
    vmferry_confine::confine_threads().unwrap();
}
