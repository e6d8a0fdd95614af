//! Facts about the host of a measurement.

use std::fs;
use std::process::{Command, Stdio};
use std::time::SystemTime;

use vmferry_report::host::Host;

/// Describes this host. Facts that cannot be determined read `unknown`.
pub fn describe() -> Host {
    Host {
        cpu: field_of("/proc/cpuinfo", "model name").unwrap_or_else(unknown),
        cores: std::thread::available_parallelism().map_or(0, usize::from),
        memory_bytes: total_memory().unwrap_or(0),
        kernel: read("/proc/sys/kernel/osrelease").unwrap_or_else(unknown),
        kvm: kvm(),
        qemu: qemu_version(),
        congestion_control: read("/proc/sys/net/ipv4/tcp_congestion_control").unwrap_or_else(unknown),
        thp: transparent_huge_pages(),
        load_1m: load_1m().unwrap_or(0.0),
        date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
    }
}

/// Returns the kernel's mode of transparent huge pages: `always`, `madvise`, `never`, or `unknown`.
pub(crate) fn transparent_huge_pages() -> String {
    let modes = read("/sys/kernel/mm/transparent_hugepage/enabled");
    modes.as_deref().and_then(bracketed).map_or_else(unknown, String::from)
}

/// Returns the memory that is available without swapping, in bytes. `None` if the kernel does not
/// report it.
pub fn available_memory() -> Option<u64> {
    memory_bytes("MemAvailable")
}

/// Returns the memory of this host in bytes. `None` if the kernel does not report it.
pub(crate) fn total_memory() -> Option<u64> {
    memory_bytes("MemTotal")
}

/// Checks whether this process may use KVM.
///
/// # Errors
///
/// Returns the reason as text if `/dev/kvm` cannot be opened.
pub fn kvm_usable() -> Result<(), String> {
    match fs::OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        Ok(_) => Ok(()),
        Err(e) => Err(format!("/dev/kvm: {e}")),
    }
}

/// Name of the executable that [`crate::qemu`] runs.
pub(crate) const QEMU: &str = "qemu-system-x86_64";

fn unknown() -> String {
    "unknown".into()
}

fn read(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// Returns the value of the first line `name : value` of a file.
fn field_of(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_owned())
    })
}

/// Returns a field of /proc/meminfo in bytes. The file counts in KiB.
fn memory_bytes(name: &str) -> Option<u64> {
    field_of("/proc/meminfo", name)?.strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn load_1m() -> Option<f64> {
    read("/proc/loadavg")?.split_whitespace().next()?.parse().ok()
}

/// Returns the selected word of a text like `always [madvise] never`.
fn bracketed(text: &str) -> Option<&str> {
    text.split_once('[')?.1.split_once(']').map(|(word, _)| word)
}

fn kvm() -> String {
    if let Err(why) = kvm_usable() {
        return format!("none: {why}");
    }
    ["kvm_intel", "kvm_amd", "kvm_pvm"]
        .into_iter()
        .find(|module| fs::exists(format!("/sys/module/{module}")).unwrap_or(false))
        .unwrap_or("kvm")
        .into()
}

/// Returns QEMU's version: `10.0.2` from `QEMU emulator version 10.0.2 (Debian ...)`.
pub(crate) fn qemu_version() -> Option<String> {
    let output = Command::new(QEMU).arg("--version").stdin(Stdio::null()).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.split_whitespace().skip_while(|word| *word != "version").nth(1).map(String::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn description_of_this_host_is_plausible() {
        let host = describe();
        assert!(host.cores > 0);
        assert!(host.memory_bytes > 1 << 26);
        assert!(host.load_1m >= 0.0 && load_1m().is_some());
        assert!(host.kernel.contains('.'));
        assert!(host.date.ends_with('Z') && host.date.len() == 20, "{}", host.date);
        assert_eq!(host.kvm.starts_with("none: "), kvm_usable().is_err());
        assert!(available_memory().unwrap() <= host.memory_bytes);
    }

    #[test]
    fn bracketed_returns_the_selected_word() {
        assert_eq!(bracketed("always [madvise] never"), Some("madvise"));
        assert_eq!(bracketed("never"), None);
    }
}
