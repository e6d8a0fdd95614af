//! `vmferry check`: shows what this host supports.

mod host;
mod postcopy;

use crate::args::CheckArgs;
use crate::{Status, guest, output, sandbox};
use anyhow::Result;
use serde::Serialize;
use std::io::Write;

/// Column at which the text of a finding begins.
const INDENT: usize = 30;

/// State of one feature that vmferry uses.
#[derive(Debug, Serialize)]
struct Finding {
    /// Name of the feature in JSON. The name is stable.
    id: &'static str,
    #[serde(skip)]
    name: &'static str,
    ok: bool,
    /// Description of the feature, or what is missing.
    detail: String,
    /// Advice that enables the feature, and what works without it; only if the feature is missing.
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

    /// Returns the finding as text. With `columns`, lines are broken between words.
    fn text(&self, columns: Option<usize>) -> String {
        let Self { name, detail, .. } = self;
        let text = match self.how {
            None => format!("yes  {name:24} {detail}"),
            // The advice has its own line: both together are wider than a terminal.
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

/// Prints a line for each feature that vmferry uses, with advice if it is missing, or one JSON
/// document.
pub(crate) fn check(args: &CheckArgs) -> Result<Status> {
    let mut findings = guests();
    findings.extend(postcopy::findings());
    findings.extend(host::findings());
    findings.extend(confinement());
    let usable = findings.iter().any(|finding| finding.ok);
    // With `--json -`, standard output contains only the document.
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

/// Returns the findings about kinds of guests and dirty trackers.
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
            "virtqueue notifications",
            vmferry_vmm::passes_kicks()
                .map_err(|error| error.to_string())
                .and_then(|passes| {
                    passes
                        .then_some("KVM wakes device threads (ioeventfd)")
                        .ok_or_else(|| "KVM does not wake device threads".into())
                })
                .map(str::to_owned),
            "the vCPU that notifies a device exits and wakes its threads; with ioeventfd (KVM_CAP_IOEVENTFD) it need not exit",
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

/// Returns the findings about the confinement of the process that runs a guest.
fn confinement() -> [Finding; 2] {
    let [seccomp, landlock] = sandbox::available();
    [
        Finding::new(
            "seccomp",
            "system calls confined",
            seccomp,
            "`run` works without system call filters; they need CONFIG_SECCOMP_FILTER, and a container that allows seccomp",
        ),
        Finding::new(
            "landlock",
            "files confined",
            landlock,
            "`run` works, and reaches the files that its user can; landlock needs Linux 5.13 and lsm=landlock,... on its command line; \
             `run --jail` (as root) does not need it",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_missing_features_come_with_advice() {
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
