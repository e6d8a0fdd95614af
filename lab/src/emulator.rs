//! Detection of guests that the emulator lost.
//!
//! QEMU emulates SVM in software. Rarely it saves the registers of its host as those of a guest
//! when it leaves the guest. The guest then continues at the instruction of the outer kernel after
//! `vmrun`, with the outer kernel's page tables. If the address of these tables is not in the
//! guest's memory, KVM enters the guest forever. KVM's tracepoint of exits then has the proof: the
//! guest is at an instruction of the outer kernel and faults at an address beyond all guest memory.
//! Otherwise the guest ends in a triple fault, which proves nothing. The first proof is kept.

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Mount point of the kernel's tracing file system.
const TRACING: &str = "/sys/kernel/tracing";
/// Function in `kvm_amd` that contains the `vmrun`.
const VMRUN: &str = "__svm_vcpu_run";
/// `SVM_EXIT_NPF`: access to memory that the guest does not have, or not with this permission.
const NESTED_PAGE_FAULT: u32 = 0x400;
/// First address beyond the memory of every guest of the lab.
const BEYOND: u64 = 1 << 32;
/// Size of the trace buffer in KiB. A few events are enough, and an endless loop would produce
/// millions.
const BUFFER_KIB: &str = "64";
/// `SVM_EXIT_SHUTDOWN`: a triple fault.
const SHUTDOWN: u32 = 0x7f;
/// Trace instance for the last events of each processor.
const LAST: &str = "instances/last";
const LAST_KIB: &str = "256";
const LAST_LINES: usize = 400;

/// Watch for lost guests.
#[derive(Debug)]
pub struct Watch {
    folder: PathBuf,
}

impl Watch {
    /// Starts the watch.
    ///
    /// # Errors
    ///
    /// Fails if this kernel cannot be traced.
    pub fn start() -> Result<Self> {
        let folder = PathBuf::from(TRACING);
        if !folder.join("trace").exists() {
            let mounted = Command::new("mount").args(["-t", "tracefs", "trace", TRACING]).status()?;
            anyhow::ensure!(mounted.success(), "cannot mount tracefs");
        }
        let symbols = std::fs::read_to_string("/proc/kallsyms")?;
        let (from, until) = function(&symbols, VMRUN).with_context(|| format!("there is no {VMRUN}"))?;
        let watch = Self { folder };
        watch.write("buffer_size_kb", BUFFER_KIB)?;
        watch.write("options/overwrite", "0")?;
        watch.write("events/kvm/kvm_exit/filter", &filter(from, until))?;
        watch.write("events/kvm/kvm_exit/enable", "1")?;
        watch.keep_last()?;
        Ok(watch)
    }

    /// Records the guests' last exits until one ends in a triple fault, because the registers do
    /// not show its cause afterwards.
    fn keep_last(&self) -> Result<()> {
        std::fs::create_dir_all(self.folder.join(LAST)).context("cannot make a second trace")?;
        let set = |name: &str, value: &str| self.write(&format!("{LAST}/{name}"), value);
        set("buffer_size_kb", LAST_KIB)?;
        // The new instance inherits from the first trace that it stops when it is full.
        set("options/overwrite", "1")?;
        set("events/kvm/kvm_exit/trigger", &format!("traceoff if exit_reason == {SHUTDOWN:#x}"))?;
        for event in ["kvm_exit", "kvm_inj_virq", "kvm_inj_exception"] {
            set(&format!("events/kvm/{event}/enable"), "1")?;
        }
        Ok(())
    }

    /// Returns the guests' last events, up to the first triple fault, since the last call.
    ///
    /// # Errors
    ///
    /// Fails if the trace cannot be read.
    pub fn last(&self) -> Result<String> {
        let trace =
            std::fs::read_to_string(self.folder.join(LAST).join("trace")).context("cannot read the trace")?;
        self.write(&format!("{LAST}/trace"), "")?;
        self.write(&format!("{LAST}/tracing_on"), "1")?;
        let lines: Vec<_> = trace.lines().collect();
        Ok(lines[lines.len().saturating_sub(LAST_LINES)..].join("\n"))
    }

    /// Returns the first exit of a lost guest since the last call.
    ///
    /// # Errors
    ///
    /// Fails if the trace cannot be read.
    pub fn lost(&self) -> Result<Option<String>> {
        let trace = std::fs::read_to_string(self.folder.join("trace")).context("cannot read the trace")?;
        // A write to the file clears the trace.
        self.write("trace", "")?;
        Ok(first(&trace))
    }

    fn write(&self, name: &str, value: &str) -> Result<()> {
        let path: &Path = &self.folder.join(name);
        std::fs::write(path, value).with_context(|| format!("cannot write '{value}' to {}", path.display()))
    }
}

/// Returns a filter for exits of guests that are in that function of the outer kernel and access an
/// address where they have no memory.
///
/// Each condition alone proves nothing. A guest loads modules at addresses where the outer kernel
/// has its own, and a guest with damaged memory may access any address.
fn filter(from: u64, until: u64) -> String {
    format!(
        "guest_rip >= {from:#x} && guest_rip < {until:#x} && exit_reason == {NESTED_PAGE_FAULT:#x} && info2 >= {BEYOND:#x}"
    )
}

/// Returns the address of a function, and that of the next one.
fn function(symbols: &str, name: &str) -> Option<(u64, u64)> {
    let parsed = |line: &str| {
        let mut words = line.split_whitespace();
        let address = u64::from_str_radix(words.next()?, 16).ok()?;
        Some((address, words.nth(1)?.to_owned()))
    };
    let all: Vec<_> = symbols.lines().filter_map(parsed).collect();
    let from =
        all.iter().find(|(_, other)| other == name).map(|(address, _)| *address).filter(|at| *at > 0)?;
    let until = all.iter().map(|(address, _)| *address).filter(|address| *address > from).min()?;
    Some((from, until))
}

/// Returns the first event in a trace, from its name on.
fn first(trace: &str) -> Option<String> {
    trace.lines().find_map(|line| Some(line[line.find("kvm_exit:")?..].trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn function_ends_where_the_next_one_begins() {
        let symbols = "ffffffffc0559400 t next\t[kvm_amd]\nffffffffc0559180 T __svm_vcpu_run\t[kvm_amd]\n\
                       ffffffffc0559000 t before\t[kvm_amd]\nffffffff81000000 T _text\n";
        let found = function(symbols, VMRUN).unwrap();
        assert_eq!(found, (0xffff_ffff_c055_9180, 0xffff_ffff_c055_9400));
        let filter = filter(found.0, found.1);
        assert!(filter.contains("guest_rip < 0xffffffffc0559400 && exit_reason == 0x400"), "{filter}");
        assert!(!filter.contains("||"), "both conditions are needed: {filter}");
        assert_eq!(function(symbols, "elsewhere"), None);
        // Users without the permission see only zero addresses.
        assert_eq!(function("0000000000000000 T __svm_vcpu_run\n0000000000000000 t next\n", VMRUN), None);
    }

    #[test]
    fn first_event_is_found_after_the_header() {
        let trace = "# tracer: nop\n#\n  vcpu 0-778 [001] ..... 1.5: kvm_exit: vcpu 0 reason npf rip 0x1\n  vcpu 0-778 x: kvm_exit: two\n";
        assert_eq!(first(trace).as_deref(), Some("kvm_exit: vcpu 0 reason npf rip 0x1"));
        assert_eq!(first("# tracer: nop\n"), None);
    }
}
