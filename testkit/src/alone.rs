//! Separate processes for tests that count threads or descriptors.

/// Name of the variable that is set in a process that runs one test only.
const ALONE: &str = "VMFERRY_TEST_ALONE";

/// Runs the calling test, whose path in its test program is `test`, in a separate process.
///
/// Returns true in that process, in which no other test runs. Returns false in the calling process
/// after the test has passed in the other one.
///
/// # Panics
///
/// Panics with the output of the separate process if the test fails there.
pub fn alone(test: &str) -> bool {
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let program = std::env::current_exe().expect("the path of the test program");
    let output = std::process::Command::new(program)
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(ALONE, "1")
        .output()
        .expect("the test program");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}{errors}");
    false
}
