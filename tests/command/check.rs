//! Report of `vmferry check` on this host.

use crate::support::{Folder, Need, VMFERRY, code, document, print_line, skip, vmferry};
use serde_json::Value;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

const IDS: [&str; 16] = [
    "kvm",
    "dirty_rings",
    "ioeventfd",
    "wp",
    "faults_kernel",
    "faults_user",
    "snapshot",
    "minor_shmem",
    "minor_hugetlbfs",
    "cpu_latency",
    "transparent_huge_pages",
    "huge_pages",
    "tap",
    "network_namespaces",
    "seccomp",
    "landlock",
];

fn find<'a>(document: &'a Value, id: &str) -> &'a Value {
    let checks = document["checks"].as_array().unwrap();
    checks.iter().find(|check| check["id"] == id).unwrap_or_else(|| panic!("no {id}: {document}"))
}

/// Checks that every feature is named, and that missing features come with advice.
fn complete(document: &Value) {
    for id in IDS {
        let check = find(document, id);
        let told = check["how"].as_str().is_some_and(|how| how.len() > 10);
        assert_eq!(check["ok"].as_bool(), Some(!told), "{check}");
        assert!(check["detail"].as_str().is_some_and(|detail| !detail.is_empty()), "{check}");
    }
    assert_eq!(document["checks"].as_array().unwrap().len(), IDS.len(), "{document}");
}

#[test]
fn host_features_are_reported_as_text_and_as_json() {
    let output = vmferry(&["check", "--json", "-"]);
    let document = document(&output);
    complete(&document);
    let text = String::from_utf8(vmferry(&["check"]).stdout).unwrap();
    let mut lines = text.lines();
    for check in document["checks"].as_array().unwrap() {
        let line = lines.next().unwrap();
        let starts = if check["ok"] == true { "yes  " } else { "no   " };
        assert!(line.starts_with(starts), "{line}: {check}");
        print_line(line);
        // The advice has its own line.
        let how = check["how"].as_str().map(str::to_owned);
        assert!(how.is_none_or(|how| lines.next().unwrap().trim() == how), "{check}: {text}");
    }
    assert_eq!(lines.next(), None);
    assert_eq!(code(&output), code(&vmferry(&["check"])));
    // With `--json FILE`, the text stays on standard output.
    let folder = Folder::new();
    let output = vmferry(&["check", "--json", &folder.path("found")]);
    assert_eq!(String::from_utf8(output.stdout).unwrap(), text);
    complete(&serde_json::from_str(&std::fs::read_to_string(folder.path("found")).unwrap()).unwrap());
    assert_eq!(code(&vmferry(&["check", "--json", "/nonexistent/found"])), 1);
}

/// An ordinary user without access to faults of the kernel is told how to get access.
#[test]
fn an_ordinary_user_is_told_how_to_get_the_faults_of_the_kernel() {
    let ordinary = 65_534;
    let mut command = Command::new(VMFERRY);
    command.args(["check", "--json", "-"]).stdin(Stdio::null());
    if rustix::process::geteuid().is_root() {
        command.uid(ordinary).gid(ordinary);
    }
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => return skip(Need::Root, format!("no other user can start {VMFERRY}: {error}")),
    };
    let document = document(&output);
    complete(&document);
    let sysctl = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    let faults = find(&document, "faults_kernel");
    print_line(format!("an ordinary user: {faults}"));
    if sysctl.trim() == "1" {
        assert_eq!(faults["ok"], true, "{faults}");
    } else if faults["ok"] == true {
        assert!(faults["detail"].as_str().unwrap().contains("by "), "{faults}");
    } else {
        for way in ["vm.unprivileged_userfaultfd", "/dev/userfaultfd", "CAP_SYS_PTRACE"] {
            assert!(faults["how"].as_str().unwrap().contains(way), "{faults}");
        }
    }
    let namespaces = find(&document, "network_namespaces");
    assert_eq!(namespaces["ok"], false, "{namespaces}");
}
