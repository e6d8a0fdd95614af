//! Skips that are counted: a test that this host cannot run never passes in silence.
//!
//! A test that needs a capability that the host does not have calls [`skip`] and returns. Each call
//! writes one line, `skipped: NEED: TEST: REASON`. `.ci/run` counts these lines by need. The
//! variable `VMFERRY_REQUIRE=kvm,uffd` turns every skip that names one of these needs into a
//! failure.

use std::fmt::{self, Display};
use std::io::Write as _;

/// Name of the variable that lists the needs whose absence fails a test.
const REQUIRE: &str = "VMFERRY_REQUIRE";
/// Name of the variable with the path of a file to which each skip appends its line.
const SKIPS: &str = "VMFERRY_SKIPS";
/// Name of the variable with the name of the emulator that runs the tests.
const EMULATOR: &str = "VMFERRY_TEST_EMULATOR";

/// Capability of the host that a test needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// A usable `/dev/kvm`, or a capability of KVM such as dirty rings.
    Kvm,
    /// userfaultfd with the features and the permission that the test uses.
    Uffd,
    /// The programs `etcd` and `etcdctl`.
    Etcd,
    /// The program `qemu-system-x86_64`.
    Qemu,
    /// The rights of root: network namespaces, mounts, other users, cgroups.
    Root,
    /// Huge pages that the host can reserve.
    HugePages,
    /// A feature of the running kernel.
    Kernel,
    /// Instructions that the processor does not have, or a speed that an emulated processor does
    /// not reach.
    Cpu,
    /// Another program, which the reason names.
    Program,
}

impl Need {
    /// All needs, in the order in which `.ci/run` prints them.
    pub const ALL: [Self; 9] = [
        Self::Kvm,
        Self::Uffd,
        Self::Etcd,
        Self::Qemu,
        Self::Root,
        Self::HugePages,
        Self::Kernel,
        Self::Cpu,
        Self::Program,
    ];

    /// Returns the name of this need in `VMFERRY_REQUIRE` and in the line of a skip.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Uffd => "uffd",
            Self::Etcd => "etcd",
            Self::Qemu => "qemu",
            Self::Root => "root",
            Self::HugePages => "hugepages",
            Self::Kernel => "kernel",
            Self::Cpu => "cpu",
            Self::Program => "program",
        }
    }
}

impl Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Records that this host cannot run the calling test. The test must return after this call.
///
/// The line goes to standard output past the test harness, and to the file that `VMFERRY_SKIPS`
/// names.
///
/// # Panics
///
/// Panics if `VMFERRY_REQUIRE` lists `need`, if `VMFERRY_REQUIRE` holds an unknown name, or if the
/// file cannot be written: a skip that is not counted must not pass.
pub fn skip(need: Need, why: impl Display) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("unnamed");
    let line = line(need, test, &why.to_string());
    let required = std::env::var(REQUIRE).unwrap_or_default();
    match requires(&required, need) {
        Ok(false) => {}
        Ok(true) => panic!("{REQUIRE}={required} forbids this skip: {line}"),
        Err(unknown) => {
            panic!("{REQUIRE} names {unknown:?}, which is none of {:?}", Need::ALL.map(Need::name))
        }
    }
    if let Some(path) = std::env::var_os(SKIPS) {
        // One write to a file opened for appending: lines of parallel test programs do not mix.
        let written = std::fs::File::options()
            .append(true)
            .create(true)
            .open(&path)
            .and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
        written.unwrap_or_else(|error| panic!("{SKIPS}={}: {error}", path.display()));
    }
    crate::print_line(line);
}

/// Returns the name of the emulator that runs the tests, from the variable `VMFERRY_TEST_EMULATOR`.
///
/// An emulator of user programs, such as `qemu-user`, runs them on the host's kernel and translates
/// each system call. It does not pass on ioctls that it does not know, and accepts some calls that
/// a kernel refuses. A test of such a call skips for [`Need::Kernel`].
#[must_use]
pub fn emulator() -> Option<String> {
    std::env::var(EMULATOR).ok().filter(|name| !name.is_empty())
}

/// Skips the calling test if an [`emulator`] runs it, because the emulator does not pass `what` on
/// to the kernel.
///
/// Returns whether the test is skipped. The test must then return.
#[must_use]
pub fn skip_if_emulated(what: impl Display) -> bool {
    let emulator = emulator();
    if let Some(emulator) = &emulator {
        skip(Need::Kernel, format!("{emulator} does not pass {what} on to the kernel"));
    }
    emulator.is_some()
}

/// Skips the calling test if an [`emulator`] runs it, because the test would take minutes.
///
/// For searches in logic that is the same on each processor. Returns whether the test is skipped.
/// The test must then return.
#[must_use]
pub fn skip_long_search_if_emulated() -> bool {
    let emulator = emulator();
    if let Some(emulator) = &emulator {
        skip(
            Need::Cpu,
            format!("{emulator} needs minutes for this search, whose logic is the same on each processor"),
        );
    }
    emulator.is_some()
}

/// Returns the number of random tries that a test makes: `full`, or one in 20 if an [`emulator`]
/// runs the test.
///
/// An emulator needs about ten times as long. Tests that must find a planted defect use all tries.
#[must_use]
pub fn tries(full: usize) -> usize {
    if emulator().is_some() { full.div_ceil(20) } else { full }
}

/// Returns the line of a skip, without line breaks, whatever `why` contains.
fn line(need: Need, test: &str, why: &str) -> String {
    let why = why.split_whitespace().collect::<Vec<_>>().join(" ");
    format!("skipped: {need}: {test}: {why}")
}

/// Returns whether the list `required` names `need`, or the first unknown name in the list.
fn requires(required: &str, need: Need) -> Result<bool, String> {
    let mut found = false;
    for name in required.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        if !Need::ALL.iter().any(|known| known.name() == name) {
            return Err(name.to_owned());
        }
        found |= name == need.name();
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_is_one_line_that_names_need_test_and_reason() {
        assert_eq!(
            line(Need::Kvm, "it::moves", "/dev/kvm: Permission\n  denied"),
            "skipped: kvm: it::moves: /dev/kvm: Permission denied"
        );
    }

    #[test]
    fn only_listed_needs_are_required() {
        assert_eq!(requires("", Need::Kvm), Ok(false));
        assert_eq!(requires("uffd, kvm", Need::Kvm), Ok(true));
        assert_eq!(requires("uffd,etcd", Need::Kvm), Ok(false));
    }

    #[test]
    fn unknown_name_is_an_error() {
        assert_eq!(requires("kvm,userfaultfd", Need::Kvm), Err("userfaultfd".to_owned()));
    }
}
