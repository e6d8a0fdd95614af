//! What confines each thread of a process, as the kernel says it (proc(5), `status`).

use crate::support::{Run, say, vmferry};
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

pub(crate) struct Thread {
    name: String,
    pub(crate) fields: BTreeMap<String, String>,
}

impl Thread {
    pub(crate) fn number(&self, field: &str) -> u64 {
        self.fields.get(field).and_then(|value| value.parse().ok()).unwrap_or(0)
    }
}

pub(crate) fn threads(run: &Run) -> Vec<Thread> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", run.child.id())).unwrap();
    // Threads come and go.
    let texts = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("status")).ok());
    texts
        .map(|text| {
            let fields = text.lines().filter_map(|line| line.split_once(":\t"));
            let fields: BTreeMap<_, _> =
                fields.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect();
            Thread { name: fields.get("Name").cloned().unwrap_or_default(), fields }
        })
        .collect()
}

/// What was in force on this process before: a container may have filters of its own.
pub(crate) fn filters_around() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    text.lines()
        .find_map(|line| line.strip_prefix("Seccomp_filters:"))
        .map_or(0, |n| n.trim().parse().unwrap())
}

/// Two filters hold for the process, and at least one more for each thread; returns their names.
pub(crate) fn confined(run: &Run, what: &str) -> Vec<String> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let threads = threads(run);
        let open = |thread: &&Thread| {
            thread.number("Seccomp") != 2
                || thread.number("Seccomp_filters") < filters_around() + 3
                || thread.number("NoNewPrivs") != 1
                || thread.fields["CapPrm"] != "0000000000000000"
                || thread.fields["CapEff"] != "0000000000000000"
        };
        // One that has just begun confines itself next.
        match threads.iter().find(open) {
            None => return threads.into_iter().map(|thread| thread.name).collect(),
            Some(thread) if Instant::now() > deadline => {
                panic!("{what}: the thread '{}' is not confined: {:?}", thread.name, thread.fields)
            }
            Some(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Whether this host confines at all.
pub(crate) fn can_confine() -> bool {
    let checked: Value = serde_json::from_slice(&vmferry(&["check", "--json", "-"]).stdout).unwrap();
    let seccomp =
        checked["checks"].as_array().unwrap().iter().find(|check| check["id"] == "seccomp").unwrap();
    if seccomp["ok"] == false {
        say(&format!("not run: {seccomp}"));
    }
    seccomp["ok"] == true
}
