//! `vmferry check`: what this host can do.

mod host;
mod postcopy;

use crate::args::CheckArgs;
use crate::{Status, guest, output, sandbox};
use anyhow::Result;
use serde::Serialize;
use std::io::Write;

/// Where a finding's words begin.
const INDENT: usize = 30;

/// One thing that vmferry uses.
#[derive(Debug, Serialize)]
struct Finding {
    /// Its name in JSON: stays as it is.
    id: &'static str,
    #[serde(skip)]
    name: &'static str,
    ok: bool,
    /// What was found, or what is missing.
    detail: String,
    /// How to enable it, and what works without it; only where it is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    how: Option<&'static str>,
}

impl Finding {
    fn new(
        id: &'static str,
        name: &'static str,
        found: Result<String, String>,
        otherwise: &'static str,
    ) -> Self {
        let ok = found.is_ok();
        let (Ok(detail) | Err(detail)) = found;
        Self { id, name, ok, detail, how: (!ok).then_some(otherwise) }
    }

    /// For people: on a terminal of so many columns lines are broken between words.
    fn text(&self, columns: Option<usize>) -> String {
        let Self { name, detail, .. } = self;
        let text = match self.how {
            None => format!("yes  {name:24} {detail}"),
            // On a line of its own: the two together are wider than a terminal.
            Some(how) => format!("no   {name:24} {detail}\n{:INDENT$}{how}", ""),
        };
        match columns {
            Some(columns) => {
                text.lines().map(|line| output::fold(line, columns, INDENT)).collect::<Vec<_>>().join("\n")
            }
            None => text,
        }
    }
}

/// Prints a line for each thing that vmferry uses, and what to do where it is missing; or one JSON document.
pub(crate) fn check(args: &CheckArgs) -> Result<Status> {
    let mut findings = guests();
    findings.extend(postcopy::findings());
    findings.extend(host::findings());
    findings.extend(confinement());
    let usable = findings.iter().any(|finding| finding.ok);
    // Standard output belongs to the document then.
    if args.json.as_deref() != Some("-".as_ref()) {
        let columns = output::columns(false);
        findings.iter().for_each(|finding| println!("{}", finding.text(columns)));
    }
    if let Some(path) = &args.json {
        let document = serde_json::json!({ "version": env!("CARGO_PKG_VERSION"), "checks": findings });
        writeln!(output::open(path)?, "{document:#}")?;
    }
    Ok(if usable { Status::Done } else { Status::Failed })
}

/// What kinds of guest there can be, and how their writes are found.
fn guests() -> Vec<Finding> {
    vec![
        Finding::new(
            "kvm",
            "KVM guests",
            guest::no_kvm().map_or_else(|| Ok(format!("/dev/kvm works: {}", host::kind_of_kvm())), Err),
            "without it `--guest process` still works; load kvm_intel or kvm_amd, and join the group that owns /dev/kvm",
        ),
        Finding::new(
            "dirty_rings",
            "dirty rings",
            vmferry_vmm::largest_dirty_ring()
                .map_err(|error| error.to_string())
                .and_then(|most| most.ok_or_else(|| "KVM has none".into()))
                .map(|most| format!("up to {most} entries a vCPU (`run --dirty-ring SIZE`)")),
            "`--tracker log` and `wp` need none; rings need Linux 5.11",
        ),
        Finding::new(
            "ioeventfd",
            "kicks of virtqueues",
            vmferry_vmm::passes_kicks()
                .map_err(|error| error.to_string())
                .and_then(|passes| {
                    passes
                        .then_some("KVM wakes devices' threads by itself (ioeventfd)")
                        .ok_or_else(|| "KVM does not wake devices' threads by itself".into())
                })
                .map(str::to_owned),
            "the vCPU that notifies a device wakes its threads; ioeventfd (KVM_CAP_IOEVENTFD) needs no exit to vmferry for that",
        ),
        Finding::new(
            "wp",
            "tracking by wp",
            vmferry_dirty::WpTracker::available()
                .map(|()| "userfaultfd WP_ASYNC and PAGEMAP_SCAN".into())
                .map_err(|e| e.to_string()),
            "needs Linux 6.7 and access to userfaultfd (vm.unprivileged_userfaultfd=1, or root)",
        ),
    ]
}

/// What confines the process that runs a guest.
fn confinement() -> [Finding; 2] {
    let [seccomp, landlock] = sandbox::available();
    [
        Finding::new(
            "seccomp",
            "system calls confined",
            seccomp,
            "`run` goes on without filters of system calls; they need CONFIG_SECCOMP_FILTER, and a container that allows seccomp",
        ),
        Finding::new(
            "landlock",
            "files confined",
            landlock,
            "`run` goes on, and reaches the files that its user can; landlock needs Linux 5.13 and lsm=landlock,... on its command line; \
             `run --jail` (as root) does without",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_says_what_to_do_and_what_is_there_does_not() {
        let there = Finding::new("x", "a thing", Ok("found".into()), "do this");
        assert_eq!(there.text(None), format!("yes  {:24} found", "a thing"));
        assert_eq!(
            serde_json::to_value(&there).unwrap(),
            serde_json::json!({ "id": "x", "ok": true, "detail": "found" })
        );
        let missing = Finding::new("x", "a thing", Err("not found".into()), "do this");
        assert_eq!(missing.text(None), format!("no   {:24} not found\n{:30}do this", "a thing", ""));
        let folded = format!("no   {:24} not\n{:30}found\n{:30}do this", "a thing", "", "");
        assert_eq!(missing.text(Some(37)), folded);
        assert_eq!(serde_json::to_value(&missing).unwrap()["how"], "do this");
    }
}
