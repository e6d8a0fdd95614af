//! Whether the emulator itself lost a guest.
//!
//! QEMU emulates SVM in software, and now and then saves its host's registers as a guest's when it leaves that: the guest goes on where the
//! outer kernel was, at the instruction behind `vmrun`, with the outer kernel's page tables. If their address is none of the guest's
//! memory, KVM enters it for ever, and KVM's tracepoint of exits proves it: the guest is at an instruction of the outer kernel and faults at an
//! address where no guest has anything. Otherwise it ends in a triple fault, which proves nothing. The first proof is kept.

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where the kernel's tracing is mounted.
const TRACING: &str = "/sys/kernel/tracing";
/// The function in `kvm_amd` that holds the `vmrun`.
const VMRUN: &str = "__svm_vcpu_run";
/// `SVM_EXIT_NPF`: memory that the guest does not have, or not so.
const NESTED_PAGE_FAULT: u32 = 0x400;
/// No guest of the lab has an address at or beyond this.
const BEYOND: u64 = 1 << 32;
/// Few events are enough, and of an endless loop there would be millions.
const BUFFER_KIB: &str = "64";
/// `SVM_EXIT_SHUTDOWN`: a triple fault.
const SHUTDOWN: u32 = 0x7f;
/// What guests did last, by the last events of each processor.
const LAST: &str = "instances/last";
const LAST_KIB: &str = "256";
const LAST_LINES: usize = 400;

/// Watches for guests that were lost.
#[derive(Debug)]
pub struct Watch {
    folder: PathBuf,
}

impl Watch {
    /// Begins to watch.
    ///
    /// # Errors
    /// If this kernel cannot be traced.
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

    /// Keeps what guests do, until one ends in a triple fault: registers tell nothing of that afterwards.
    fn keep_last(&self) -> Result<()> {
        std::fs::create_dir_all(self.folder.join(LAST)).context("cannot make a second trace")?;
        let set = |name: &str, value: &str| self.write(&format!("{LAST}/{name}"), value);
        set("buffer_size_kb", LAST_KIB)?;
        // What is taken over from the first trace is that it ends when it is full.
        set("options/overwrite", "1")?;
        set("events/kvm/kvm_exit/trigger", &format!("traceoff if exit_reason == {SHUTDOWN:#x}"))?;
        for event in ["kvm_exit", "kvm_inj_virq", "kvm_inj_exception"] {
            set(&format!("events/kvm/{event}/enable"), "1")?;
        }
        Ok(())
    }

    /// The last things that guests did, up to the first triple fault, since this was asked last.
    ///
    /// # Errors
    /// If the trace cannot be read.
    pub fn last(&self) -> Result<String> {
        let trace =
            std::fs::read_to_string(self.folder.join(LAST).join("trace")).context("cannot read the trace")?;
        self.write(&format!("{LAST}/trace"), "")?;
        self.write(&format!("{LAST}/tracing_on"), "1")?;
        let lines: Vec<_> = trace.lines().collect();
        Ok(lines[lines.len().saturating_sub(LAST_LINES)..].join("\n"))
    }

    /// The first exit of a lost guest since this was asked last.
    ///
    /// # Errors
    /// If the trace cannot be read.
    pub fn lost(&self) -> Result<Option<String>> {
        let trace = std::fs::read_to_string(self.folder.join("trace")).context("cannot read the trace")?;
        // Writing to it empties it.
        self.write("trace", "")?;
        Ok(first(&trace))
    }

    fn write(&self, name: &str, value: &str) -> Result<()> {
        let path: &Path = &self.folder.join(name);
        std::fs::write(path, value).with_context(|| format!("cannot write '{value}' to {}", path.display()))
    }
}

/// Exits of guests that are in that function of the outer kernel with page tables where they have no memory. Each of the two alone
/// proves nothing: a guest loads modules at addresses where the outer kernel has its own, and a guest with damaged memory may access
/// any address.
fn filter(from: u64, until: u64) -> String {
    format!(
        "guest_rip >= {from:#x} && guest_rip < {until:#x} && exit_reason == {NESTED_PAGE_FAULT:#x} && info2 >= {BEYOND:#x}"
    )
}

/// Where a function begins, and where the next one does.
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

/// The first event in a trace, from its name on.
fn first(trace: &str) -> Option<String> {
    trace.lines().find_map(|line| Some(line[line.find("kvm_exit:")?..].trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_ends_where_the_next_one_begins() {
        let symbols = "ffffffffc0559400 t next\t[kvm_amd]\nffffffffc0559180 T __svm_vcpu_run\t[kvm_amd]\n\
                       ffffffffc0559000 t before\t[kvm_amd]\nffffffff81000000 T _text\n";
        let found = function(symbols, VMRUN).unwrap();
        assert_eq!(found, (0xffff_ffff_c055_9180, 0xffff_ffff_c055_9400));
        let filter = filter(found.0, found.1);
        assert!(filter.contains("guest_rip < 0xffffffffc0559400 && exit_reason == 0x400"), "{filter}");
        assert!(!filter.contains("||"), "neither proves anything alone: {filter}");
        assert_eq!(function(symbols, "elsewhere"), None);
        // What those see who may not know.
        assert_eq!(function("0000000000000000 T __svm_vcpu_run\n0000000000000000 t next\n", VMRUN), None);
    }

    #[test]
    fn the_first_event_is_found_behind_the_head() {
        let trace = "# tracer: nop\n#\n  vcpu 0-778 [001] ..... 1.5: kvm_exit: vcpu 0 reason npf rip 0x1\n  vcpu 0-778 x: kvm_exit: two\n";
        assert_eq!(first(trace).as_deref(), Some("kvm_exit: vcpu 0 reason npf rip 0x1"));
        assert_eq!(first("# tracer: nop\n"), None);
    }
}
