//! Confinement of each thread of a process, as the kernel reports it (proc(5), `status`).

use crate::support::{Need, Run, can, wait_for};
use std::collections::BTreeMap;

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
    // Threads may start and end meanwhile.
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

/// Returns the number of filters on this process before the test: a container may have installed
/// some.
pub(crate) fn filters_around() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    text.lines()
        .find_map(|line| line.strip_prefix("Seccomp_filters:"))
        .map_or(0, |n| n.trim().parse().unwrap())
}

/// Checks that each thread has the two process-wide filters and at least one more. Returns the
/// names of the threads.
pub(crate) fn confined(run: &Run, what: &str) -> Vec<String> {
    // A thread that has just started installs its filters next.
    wait_for(&format!("the confinement of all threads {what}"), || {
        let threads = threads(run);
        let open = |thread: &&Thread| {
            thread.number("Seccomp") != 2
                || thread.number("Seccomp_filters") < filters_around() + 3
                || thread.number("NoNewPrivs") != 1
                || thread.fields["CapPrm"] != "0000000000000000"
                || thread.fields["CapEff"] != "0000000000000000"
        };
        match threads.iter().find(open) {
            None => Ok(threads.into_iter().map(|thread| thread.name).collect()),
            Some(thread) => Err(format!("'{}' is not confined: {:?}", thread.name, thread.fields)),
        }
    })
}

/// Returns whether this host supports confinement. The calling test is skipped if it does not.
pub(crate) fn can_confine() -> bool {
    can(Need::Kernel, "seccomp")
}
