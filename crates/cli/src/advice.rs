//! Operator advice after a migration that did not complete. The table of failure states in
//! docs/runbook.md contains the same texts; a test compares them.

use crate::output;
use serde_json::Value;
use std::error::Error;
use std::io::ErrorKind;
use vmferry_client::Unreachable;
use vmferry_confine::{ConfineError, JailError};
use vmferry_control::ClientError;
use vmferry_core::VmError;
use vmferry_engine::{BranchError, MigrateError, Uri};

/// A failure state with its advice. In `text`, `WHY` stands for the cause and `URI` for the address
/// of the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failure {
    /// Field `state` of the status.
    pub(crate) state: &'static str,
    /// Field `outcome` of the status.
    pub(crate) outcome: Option<&'static str>,
    /// Exit status of the command.
    pub(crate) status: u8,
    /// Advice with placeholders.
    pub(crate) text: &'static str,
}

const CANCELLED: Failure = Failure {
    state: "cancelled",
    outcome: Some("cancelled"),
    status: 1,
    text: "cancelled (WHY); the guest stays at the source",
};

const FAILED: Failure = Failure {
    state: "failed",
    outcome: Some("failed"),
    status: 1,
    text: "the guest was not moved and stays at the source: WHY",
};

const HELD: Failure = Failure {
    state: "failed",
    outcome: Some("failed"),
    status: 6,
    text: "the guest was not moved. It is stopped at the source because it could not be resumed: WHY. `vmferry resume` tries again",
};

const PAUSED_THERE: Failure = Failure {
    state: "postcopy-paused",
    outcome: None,
    status: 3,
    text: "the link to URI is lost (WHY). The guest runs at the target until it needs a page that is still at the source. When the link \
           is back, run `vmferry recover` at the source. `vmferry recover --abandon` gives the guest up",
};

const PAUSED_ANYWHERE: Failure = Failure {
    state: "postcopy-paused",
    outcome: None,
    status: 3,
    text: "the link to URI was lost while the guest was handed over (WHY), and it is not known whether the guest runs at the target. \
           When the link is back, run `vmferry recover` at the source. Before you run `vmferry recover --abandon`, check the target: if \
           `vmferry status` at the target reports the place `running` or `paused`, the guest at the target needs pages that only the \
           source has, and `--abandon` loses the guest",
};

const PAUSED_WITH_ARBITER: Failure = Failure {
    state: "postcopy-paused",
    outcome: None,
    status: 3,
    text: "the link to URI was lost while the guest was handed over (WHY), and it is not known whether the guest runs at the target. The \
           migration continues when the arbiter answers or the link is back. `vmferry recover` tries to open the link at once. `vmferry \
           recover --take` asks the arbiter at once, and is refused if the arbiter has given the guest to the target. Before you run \
           `vmferry recover --abandon`, check the target: if `vmferry status` at the target reports the place `running` or `paused`, the \
           guest at the target needs pages that only the source has, and `--abandon` loses the guest",
};

const UNKNOWN_WITH_ARBITER: Failure = Failure {
    state: "unknown",
    outcome: None,
    status: 3,
    text: "it is not known whether the guest runs at URI (WHY). It is stopped at the source, and the arbiter is asked until it answers: \
           then the guest continues at the source, or ends at the source because it runs at the target. `vmferry recover --take` asks at \
           once, and is refused if the arbiter has given the guest to the target; `vmferry recover --abandon` ends the attempts",
};

const UNKNOWN: Failure = Failure {
    state: "unknown",
    outcome: Some("unknown"),
    status: 3,
    text: "it is not known whether the guest runs at URI (WHY). It is stopped at the source. Check the target: if `vmferry status` at \
           the target reports the place `running` or `paused`, run `vmferry recover --abandon` at the source. If the process at the \
           target has ended for certain (and not only its host's network), and has not run the guest, run `vmferry recover --take`. If \
           it may have run the guest, its disks are newer than the memory here: run `vmferry recover --abandon`, and start the guest \
           from its disks. With `--fence`, `--take` is refused unless the arbiter has given the guest to the source",
};

const LOST: Failure = Failure {
    state: "lost",
    outcome: Some("lost"),
    status: 4,
    text: "the guest is lost: WHY. Check the target at URI before you end its process: if `vmferry status` reports `left` as 0, all \
           pages had arrived, and the guest runs at the target. Otherwise the guest at the target waits for ever for missing pages; end \
           that process",
};

const GONE: Failure = Failure {
    state: "unknown",
    outcome: Some("unknown"),
    status: 3,
    text: "the process that had the guest is gone (WHY). Run `vmferry status` at the target URI. If it reports the place `running` or \
           `paused`, the target owns the guest; if it also reports the state `postcopy-paused` and `left` above 0, the missing pages are \
           lost. While it reports the place `awaited`, the target may still start the guest: wait, or end that process first. If that \
           process has ended, the guest has ended, too",
};

const SILENT: Failure = Failure {
    state: "unknown",
    outcome: Some("unknown"),
    status: 3,
    text: "the process that has the guest does not answer (WHY), and its migration to URI may continue. Check both processes with \
           `vmferry status`: the guest is in the one that reports the place `running` or `paused`. End neither before. While the target \
           reports the state `postcopy` or `postcopy-paused`, the guest needs both",
};

/// All failure states, in the order of the table.
#[cfg(test)]
pub(crate) const ALL: [Failure; 11] = [
    CANCELLED,
    FAILED,
    HELD,
    PAUSED_THERE,
    PAUSED_ANYWHERE,
    PAUSED_WITH_ARBITER,
    UNKNOWN_WITH_ARBITER,
    UNKNOWN,
    LOST,
    GONE,
    SILENT,
];

/// Returns the failure state of a migration that did not complete, from its status document.
pub(crate) fn failure(report: &Value) -> Failure {
    let with_arbiter = report["progress"]["fence"].is_string();
    match report["outcome"].as_str() {
        None if report["state"] == "unknown" => UNKNOWN_WITH_ARBITER,
        None if report["progress"]["runs_there"] == true => PAUSED_THERE,
        None if with_arbiter => PAUSED_WITH_ARBITER,
        None => PAUSED_ANYWHERE,
        Some("lost") => LOST,
        Some("cancelled") => CANCELLED,
        Some("failed") if report["stands_still"] == true => HELD,
        Some("unknown") if report["source_gone"] == true => GONE,
        Some("unknown") if report["source_silent"] == true => SILENT,
        Some("unknown") => UNKNOWN,
        Some(_) => FAILED,
    }
}

/// Returns the advice for a migration that did not complete.
pub(crate) fn advice(report: &Value, uri: &Uri) -> String {
    let why = report["error"].as_str().unwrap_or("no reason was given");
    let said = report["progress"]["fence"].as_str().filter(|_| report["outcome"].is_null());
    let why = said.map_or_else(|| why.to_owned(), |said| format!("{why}; {said}"));
    // Both placeholders are replaced in one pass: an address or a cause may contain the other
    // placeholder.
    let text = failure(report).text;
    let uri = uri.to_string();
    let mut words = String::new();
    for part in text.split_inclusive(|c: char| !c.is_ascii_uppercase()) {
        match part.strip_prefix("WHY").map(|rest| (why.as_str(), rest)) {
            Some((put, rest)) if rest.len() < 2 => words.extend([put, rest]),
            _ => match part.strip_prefix("URI") {
                Some(rest) if rest.len() < 2 => words.extend([uri.as_str(), rest]),
                _ => words.push_str(part),
            },
        }
    }
    words
}

/// Returns the text of an error with its causes, and with the command's options that concern it.
/// Libraries know no options.
pub(crate) fn told(error: &anyhow::Error) -> String {
    let text = output::chain(error);
    if let Some(Unreachable { path, .. }) = error.downcast_ref()
        && error.chain().any(is_absent)
    {
        return format!("{text} (start it with: vmferry run --api {})", path.display());
    }
    match error.chain().find_map(options) {
        Some(options) => format!("{text} ({options})"),
        None => text,
    }
}

/// Returns whether `error` means that no process listens at a control socket. A process that
/// listens, but refuses this client or does not answer, need not be started.
fn is_absent(error: &(dyn Error + 'static)) -> bool {
    match error.downcast_ref() {
        Some(ClientError::Connect(why)) => {
            matches!(why.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused)
        }
        _ => false,
    }
}

/// Returns the options that concern an error of a library; `None` if no option does.
fn options(error: &(dyn Error + 'static)) -> Option<&'static str> {
    if let Some(error) = error.downcast_ref() {
        return of_wrapped(error);
    }
    if let Some(error) = error.downcast_ref() {
        return of_migration(error);
    }
    if let Some(error) = error.downcast_ref() {
        return of_vmm(error);
    }
    if let Some(BranchError::Refused(error)) = error.downcast_ref() {
        return of_wrapped(error);
    }
    if let Some(vmferry_process::Error::Populate(_)) = error.downcast_ref() {
        return Some(MEMORY_IN_ADVANCE);
    }
    error.downcast_ref().and_then(of_confinement)
}

/// Options that concern memory that cannot be allocated in advance.
const MEMORY_IN_ADVANCE: &str = "--memory, --prealloc";

/// Returns the options that concern the error in `error`, or one of its causes.
fn of_wrapped(error: &VmError) -> Option<&'static str> {
    let mut cause: Option<&(dyn Error + 'static)> = Some(error.get_ref());
    while let Some(error) = cause {
        if let Some(options) = options(error) {
            return Some(options);
        }
        cause = error.source();
    }
    None
}

fn of_migration(error: &MigrateError) -> Option<&'static str> {
    match refusal(error) {
        MigrateError::NotLoopback { .. } => Some("--tls-cert, --tls-key and --tls-ca, or --insecure"),
        MigrateError::Tls { .. } => Some("the expected name is the one in the address, or --tls-peer"),
        MigrateError::Arbiter(_) => Some("--fence"),
        MigrateError::Vm(error) => of_wrapped(error),
        _ => None,
    }
}

fn of_vmm(error: &vmferry_vmm::Error) -> Option<&'static str> {
    use vmferry_vmm::{BootError, Error, MemoryError, SetupError};
    Some(match error {
        Error::NoKvm | Error::NoPermission => "--guest process needs no KVM",
        Error::NoRings => "--dirty-ring 4096",
        Error::NoLog => "--dirty-ring off",
        Error::SharedDisk { .. } => "branch --disk-overlay DIR",
        Error::Setup(SetupError::DirtyRing { .. }) => "--dirty-ring",
        Error::Memory(MemoryError::HugePages { .. }) => "--memory-backing",
        Error::Memory(MemoryError::Populate(_)) => MEMORY_IN_ADVANCE,
        Error::Setup(SetupError::MemorySlot { .. })
        | Error::Memory(MemoryError::Map { .. })
        | Error::Boot(BootError::Memory { .. } | BootError::InitrdTooLarge { .. }) => "--memory",
        Error::Boot(BootError::CmdlineTooLong { .. } | BootError::Cmdline(_)) => "--cmdline",
        Error::TooManyCpus { .. } => "--cpus",
        Error::RandomMac(_) => "--net tap=NAME,mac=MAC",
        _ => return None,
    })
}

fn of_confinement(error: &ConfineError) -> Option<&'static str> {
    match error {
        ConfineError::Jail(JailError::StaysRoot) => Some("--uid and --gid"),
        ConfineError::Jail(_) => Some("--jail"),
        ConfineError::Output { .. } => Some("--serial, --record"),
        ConfineError::Refused(_) => Some("--sandbox off runs the guest without confinement"),
        _ => None,
    }
}

/// Returns the refusal of a connector, which is the source of the connection error, or `error`.
fn refusal(error: &MigrateError) -> &MigrateError {
    let inner = match error {
        MigrateError::Connect { source, .. } => source.get_ref().and_then(|inner| inner.downcast_ref()),
        _ => None,
    };
    inner.unwrap_or(error)
}

/// Returns the text of an error of a migration to or from `uri`, with the command's options that
/// concern it.
pub(crate) fn advised(error: &MigrateError, uri: &Uri) -> String {
    if let (MigrateError::Connect { .. }, Uri::Tcp { .. } | Uri::Unix(_)) = (refusal(error), uri) {
        return format!("{error} (start it with: vmferry run --incoming {uri})");
    }
    match of_migration(error) {
        Some(options) => format!("{error} ({options})"),
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;
    use serde_json::json;
    use std::path::Path;
    use vmferry_client::Client;

    #[test]
    fn every_failure_state_has_its_advice() {
        let uri: Uri = "tcp:there:7000".parse().unwrap();
        let paused = |more: Value| json!({ "state": "postcopy-paused", "outcome": null, "error": "URI broke", "progress": more });
        let ended = |outcome: &str| json!({ "state": outcome, "outcome": outcome, "error": "URI broke" });
        let arbiter = json!({ "fence": "the arbiter gave no answer: x" });
        let mut unknown = paused(arbiter.clone());
        unknown["state"] = json!("unknown");
        let mut gone = ended("unknown");
        gone["source_gone"] = json!(true);
        let mut silent = ended("unknown");
        silent["source_silent"] = json!(true);
        let mut held = ended("failed");
        held["stands_still"] = json!(true);
        let reports = [
            ended("cancelled"),
            ended("failed"),
            held,
            paused(json!({ "runs_there": true })),
            paused(json!({})),
            paused(arbiter),
            unknown,
            ended("unknown"),
            ended("lost"),
            gone,
            silent,
        ];
        for (report, failure) in reports.iter().zip(ALL) {
            assert_eq!(super::failure(report), failure, "{report}");
            assert_eq!(output::exit_status(report) as u8, failure.status, "{report}");
            assert_eq!(
                (report["state"].as_str(), report["outcome"].as_str()),
                (Some(failure.state), failure.outcome)
            );
            let text = advice(report, &uri);
            assert!(text.contains("URI broke") && !text.contains("WHY"), "{text}");
            let named = failure.text.matches("URI").count();
            assert_eq!(text.matches("tcp:there:7000").count(), named, "{text}");
        }
        assert!(advice(&reports[6], &uri).contains("(URI broke; the arbiter gave no answer: x)"));
    }

    #[test]
    fn options_are_added_to_errors_of_libraries() {
        let rings = || VmError::new(vmferry_vmm::Error::NoRings);
        let uri: Uri = "tcp:there:7000".parse().unwrap();
        let planned = anyhow::Error::new(rings()).context("no plan can be made");
        for error in [MigrateError::Vm(rings()), MigrateError::Vm(VmError::new(planned))] {
            assert!(advised(&error, &uri).ends_with("(--dirty-ring 4096)"), "{error}");
        }
        let limit = Err::<(), _>(rings()).context("a limit needs dirty rings").unwrap_err();
        assert!(told(&limit).ends_with("(--dirty-ring 4096)"), "{limit:#}");
        let disk = VmError::new(vmferry_vmm::Error::SharedDisk { path: "a.img".into() });
        let branch = told(&BranchError::Refused(disk).into());
        assert!(branch.ends_with("(branch --disk-overlay DIR)"), "{branch}");
        let jail = told(&ConfineError::from(JailError::StaysRoot).into());
        assert!(jail.contains("must not be root") && jail.ends_with("(--uid and --gid)"), "{jail}");
        let plain = MigrateError::NotLoopback { uri: uri.to_string() };
        assert!(told(&plain.into()).ends_with("or --insecure)"));
        assert_eq!(told(&anyhow::anyhow!("b").context("a")), "a: b");
    }

    #[test]
    fn absent_process_is_to_be_started() {
        let told = |kind: ErrorKind| {
            let unreachable = Client::connect(Path::new("/nonexistent/api")).unwrap_err();
            let path = unreachable.downcast_ref::<Unreachable>().unwrap().clone();
            super::told(&anyhow::Error::new(ClientError::Connect(kind.into())).context(path))
        };
        for kind in [ErrorKind::NotFound, ErrorKind::ConnectionRefused] {
            assert!(told(kind).ends_with("(start it with: vmferry run --api /nonexistent/api)"));
        }
        assert!(!told(ErrorKind::PermissionDenied).contains("start it"));
    }

    #[test]
    fn errors_of_libraries_name_no_options() {
        let jails = [
            JailError::NotRoot,
            JailError::StaysRoot,
            JailError::Upwards("a/../b".into()),
            JailError::Device("/dev/x".into()),
        ];
        let mut all: Vec<String> = jails.iter().map(ToString::to_string).collect();
        all.push(ConfineError::Refused("x".into()).to_string());
        all.extend([vmferry_vmm::Error::NoRings, vmferry_vmm::Error::NoLog].map(|error| error.to_string()));
        assert!(all.iter().all(|text| !text.contains("--")), "{all:?}");
    }

    #[test]
    fn table_of_failure_states_has_the_same_texts() {
        let book = include_str!("../../../docs/runbook.md");
        // Line breaks in the book do not matter.
        let book = book.split_whitespace().collect::<Vec<_>>().join(" ");
        for failure in ALL {
            assert!(book.contains(failure.text), "docs/runbook.md lacks: {}", failure.text);
            let outcome = failure.outcome.map_or("null".to_owned(), |outcome| format!("\"{outcome}\""));
            let seen =
                format!("`\"state\": \"{}\", \"outcome\": {outcome}`, {}", failure.state, failure.status);
            assert!(book.contains(&seen), "docs/runbook.md lacks: {seen}");
        }
    }
}
