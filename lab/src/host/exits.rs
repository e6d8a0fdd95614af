//! `cargo xtask lab exits`: cost of a Linux guest under vmferry and under QEMU's microvm.
//!
//! The command counts only events that emulation does not distort: exits, system calls, wakeups and
//! waits of threads, and the interrupts and device accesses that cause exits.

use super::parts::{self, tool};
use anyhow::{Context, Result, ensure};
use comfy_table::Table;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

const SCRIPT: &str = include_str!("exits.sh");
/// Firmware files of the microvm.
const FIRMWARE: [&str; 3] = ["bios-microvm.bin", "pvh.bin", "linuxboot_dma.bin"];
/// Folders in which distributions install the firmware.
const FIRMWARE_FOLDERS: [&str; 2] = ["/usr/share/seabios", "/usr/share/qemu"];

/// Counts, prints a table, and writes `target/lab/exits.json`.
pub(crate) fn exits() -> Result<bool> {
    let share = parts::folder().join("shell");
    let qemu = share.join("qemu");
    std::fs::create_dir_all(&qemu)?;
    pack(&tool("qemu-system-x86_64").context("qemu-system-x86_64 is not installed")?, &qemu)?;
    let script = parts::folder().join("exits.sh");
    super::write(&script, SCRIPT.as_bytes())?;
    ensure!(super::shell(Some(&script))?, "the machine did not end in time");
    let text = std::fs::read_to_string(share.join("exits.txt")).context("the machine wrote no counts")?;
    let counted = Counted::parse(&text);
    println!("{}", counted.table());
    let path = parts::folder().join("exits.json");
    super::write(&path, serde_json::to_string_pretty(&counted.json())?.as_bytes())?;
    println!("{}", path.display());
    ensure!(text.contains("EXITS end"), "the machine ended before the measurement was complete");
    Ok(true)
}

/// Copies QEMU and everything that it needs, because the machine has no other files.
fn pack(qemu: &Path, to: &Path) -> Result<()> {
    let copy = |from: &Path, name: &str| {
        std::fs::copy(from, to.join(name)).with_context(|| format!("cannot copy {}", from.display()))
    };
    copy(qemu, "qemu-system-x86_64")?;
    let output = Command::new("ldd").arg(qemu).output().context("cannot run ldd")?;
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let Some(path) = line.split_whitespace().find(|word| word.starts_with('/')).map(PathBuf::from) else {
            continue;
        };
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        copy(&path, if name.starts_with("ld-") { "ld.so" } else { &name })?;
    }
    for name in FIRMWARE {
        let found =
            FIRMWARE_FOLDERS.iter().map(|folder| Path::new(folder).join(name)).find(|file| file.is_file());
        copy(&found.with_context(|| format!("QEMU's {name} is not installed"))?, name)?;
    }
    Ok(())
}

/// Counts by action and counter, and then by VMM.
#[derive(Debug, Default, PartialEq)]
struct Counted(BTreeMap<(String, String), BTreeMap<String, f64>>);

impl Counted {
    fn parse(text: &str) -> Self {
        let mut counted = Self::default();
        for line in text.lines() {
            let words: Vec<_> = line.split_whitespace().collect();
            if let [vmm, what, counter, number] = words[..]
                && let Ok(number) = number.parse()
            {
                let key = (what.to_owned(), counter.to_owned());
                counted.0.entry(key).or_default().insert(vmm.to_owned(), number);
            }
        }
        counted
    }

    fn vmms(&self) -> Vec<String> {
        let mut all: Vec<_> = self.0.values().flat_map(|by| by.keys().cloned()).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    fn table(&self) -> Table {
        let vmms = self.vmms();
        let mut table = Table::new();
        table.set_header(["for each".to_owned(), "count".to_owned()].into_iter().chain(vmms.iter().cloned()));
        for ((what, counter), by) in &self.0 {
            let detail = counter.starts_with("call-") || counter.contains("-of-");
            if what == "boot" && detail || by.values().all(|number| number.abs() < 0.05) {
                continue;
            }
            let number = |vmm| by.get(vmm).map_or_else(String::new, |n| format!("{n:.2}"));
            table.add_row([what.clone(), call(counter)].into_iter().chain(vmms.iter().map(number)));
        }
        table
    }

    /// Returns the document of a bench, with a case for each action and each VMM.
    fn json(&self) -> Value {
        let mut cases = Map::new();
        for ((what, counter), by) in &self.0 {
            for (side, number) in by {
                let name = format!("{what}/{side}");
                let case = cases.entry(&name).or_insert_with(
                    || json!({ "name": name, "params": { "each": what, "side": side }, "metrics": {} }),
                );
                case["metrics"][call(counter).trim()] = json!(number);
            }
        }
        json!({
            "bench": "exits",
            "version": env!("CARGO_PKG_VERSION"),
            "host": {
                "cpu": "emulated: QEMU's TCG, AMD SVM with nested paging", "cores": 2, "memory_bytes": 4_u64 << 30,
                "kernel": "the lab's", "kvm": "kvm_amd", "qemu": null, "congestion_control": "unknown",
                "thp": "unknown", "load_1m": 0.0, "date": humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            },
            "cases": cases.into_iter().map(|(_, case)| case).collect::<Vec<_>>(),
            "summary": {},
        })
    }
}

/// Names of exits by their code in hexadecimal (AMD APM volume 2, appendix C).
const REASONS: [(&str, &str); 9] = [
    ("60", "interrupt"),
    ("64", "interrupt-window"),
    ("72", "cpuid"),
    ("77", "pause"),
    ("78", "hlt"),
    ("7b", "io"),
    ("7c", "msr"),
    ("81", "vmmcall"),
    ("400", "nested-page-fault"),
];

/// Returns the name of a counter. System calls have numbers (x86-64), and exits have codes.
fn call(counter: &str) -> String {
    if let Some(code) = counter.strip_prefix("exits-of-") {
        let name = REASONS.iter().find(|(known, _)| *known == code).map_or(code, |(_, name)| name);
        return format!("  exits-of-{name}");
    }
    let name = match counter.strip_prefix("call-") {
        Some("0") => "read",
        Some("1") => "write",
        Some("7") => "poll",
        Some("16") => "ioctl",
        Some("19") => "readv",
        Some("20") => "writev",
        Some("202") => "futex",
        Some("232") => "epoll_wait",
        Some("271") => "ppoll",
        Some("281") => "epoll_pwait",
        Some("295") => "preadv",
        Some("296") => "pwritev",
        Some("327") => "preadv2",
        Some("328") => "pwritev2",
        Some("426") => "io_uring_enter",
        _ if counter.contains("-of-") => return format!("  {counter}"),
        _ => return counter.to_owned(),
    };
    format!("  {name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lines_with_counts_are_parsed() {
        let counted =
            Counted::parse("qemu read exits 3.5\nvmferry read exits 3\nEXITS end\nqemu read call-16 x\n");
        assert_eq!(counted.vmms(), ["qemu", "vmferry"]);
        let document = counted.json();
        let side = |at: usize| (&document["cases"][at]["name"], &document["cases"][at]["metrics"]["exits"]);
        assert_eq!(side(0), (&json!("read/qemu"), &json!(3.5)));
        assert_eq!(side(1), (&json!("read/vmferry"), &json!(3.0)));
        assert!(counted.table().to_string().contains("3.50"));
        assert_eq!([call("call-16"), call("call-999")], ["  ioctl", "call-999"]);
        assert_eq!([call("exits-of-78"), call("exits-of-4e")], ["  exits-of-hlt", "  exits-of-4e"]);
    }
}
