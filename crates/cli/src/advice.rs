//! What can be known of a migration that did not just complete, and what to do now: the words that people are given. The table of failure
//! states in docs/reliability.md has the same; a test compares them.

use serde_json::Value;
use vmferry_engine::{MigrateError, Uri};

/// A state that somebody may have to do something about. In its text `WHY` and `URI` stand for what they say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failure {
    /// `state` and `outcome` of the status.
    pub(crate) state: &'static str,
    pub(crate) outcome: Option<&'static str>,
    /// The exit status.
    pub(crate) status: u8,
    pub(crate) text: &'static str,
}

const CANCELLED: Failure = Failure {
    state: "cancelled",
    outcome: Some("cancelled"),
    status: 1,
    text: "cancelled (WHY); the guest goes on where it was",
};

const FAILED: Failure = Failure {
    state: "failed",
    outcome: Some("failed"),
    status: 1,
    text: "the guest was not moved and goes on where it was: WHY",
};

const HELD: Failure = Failure {
    state: "failed",
    outcome: Some("failed"),
    status: 6,
    text: "the guest was not moved. It is stopped here because it could not be resumed: WHY. `vmferry resume` tries again",
};

const PAUSED_THERE: Failure = Failure {
    state: "postcopy-paused",
    outcome: None,
    status: 3,
    text: "the link to URI is lost (WHY). The guest runs there until it needs a page that is still here. When the link is back say \
           `vmferry recover` here; `vmferry recover --abandon` gives the guest up",
};

const PAUSED_ANYWHERE: Failure = Failure {
    state: "postcopy-paused",
    outcome: None,
    status: 3,
    text: "the link to URI was lost while the guest was handed over (WHY), and nobody knows whether it runs there. When the link is \
           back say `vmferry recover` here; `vmferry recover --abandon` ends the attempts",
};

const PAUSED_FENCED: Failure = Failure {
    state: "postcopy-paused",
    outcome: None,
    status: 3,
    text: "the link to URI was lost while the guest was handed over (WHY), and it is not known whether it runs there. It goes on by \
           itself when the fence answers or the link is back; `vmferry recover` tries both at once, `vmferry recover --abandon` ends \
           the attempts",
};

const UNKNOWN_FENCED: Failure = Failure {
    state: "unknown",
    outcome: None,
    status: 3,
    text: "it is not known whether the guest runs at URI (WHY). It is stopped here, and the fence is asked until it answers: then it \
           goes on here, or ends here because it runs there. `vmferry recover --take` asks at once, and is refused if the fence has \
           given the guest to the target; `vmferry recover --abandon` ends the attempts",
};

const UNKNOWN: Failure = Failure {
    state: "unknown",
    outcome: Some("unknown"),
    status: 3,
    text: "it is not known whether the guest runs at URI (WHY). It is stopped here. Look at the target: if `vmferry status` there says \
           that its place is `running`, say `vmferry recover --abandon` here; if that process has ended for certain (and not only its \
           host's network), `vmferry recover --take`. With a fence `--take` is refused unless the fence has given the guest to this \
           side",
};

const LOST: Failure = Failure {
    state: "lost",
    outcome: Some("lost"),
    status: 4,
    text: "the guest is lost: WHY. What runs of it at URI waits for ever for the pages that it lacks; end that process",
};

const GONE: Failure = Failure {
    state: "unknown",
    outcome: Some("unknown"),
    status: 3,
    text: "the process that had the guest is gone (WHY). Look at URI: if `vmferry status` there says that its place is `running`, the \
           guest goes on there; else it ended with that process",
};

/// All of them, as in the table.
#[cfg(test)]
pub(crate) const ALL: [Failure; 10] = [
    CANCELLED,
    FAILED,
    HELD,
    PAUSED_THERE,
    PAUSED_ANYWHERE,
    PAUSED_FENCED,
    UNKNOWN_FENCED,
    UNKNOWN,
    LOST,
    GONE,
];

/// Which of them a migration's document tells of, if it has not completed.
pub(crate) fn failure(report: &Value) -> Failure {
    let fenced = report["progress"]["fence"].is_string();
    match report["outcome"].as_str() {
        None if report["state"] == "unknown" => UNKNOWN_FENCED,
        None if report["progress"]["runs_there"] == true => PAUSED_THERE,
        None if fenced => PAUSED_FENCED,
        None => PAUSED_ANYWHERE,
        Some("lost") => LOST,
        Some("cancelled") => CANCELLED,
        Some("failed") if report["stands_still"] == true => HELD,
        Some("unknown") if report["source_gone"] == true => GONE,
        Some("unknown") => UNKNOWN,
        Some(_) => FAILED,
    }
}

/// What to do now, for a migration that did not complete.
pub(crate) fn advice(report: &Value, uri: &Uri) -> String {
    let why = report["error"].as_str().unwrap_or("no reason was given");
    let said = report["progress"]["fence"].as_str().filter(|_| report["outcome"].is_null());
    let why = said.map_or_else(|| why.to_owned(), |said| format!("{why}; {said}"));
    // Not one after the other: an address or a reason may contain the other's placeholder.
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

/// Returns the text of an error of the library, with the options of the command that can do something about it.
pub(crate) fn advised(error: &MigrateError, uri: &Uri) -> String {
    // A connector's refusal is inside the failure to connect.
    let inner = match error {
        MigrateError::Connect { source, .. } => source.get_ref().and_then(|inner| inner.downcast_ref()),
        _ => None,
    };
    let options = match (inner.unwrap_or(error), uri) {
        (MigrateError::Connect { .. }, Uri::Tcp { .. } | Uri::Unix(_)) => {
            return format!("{error} (start it with: vmferry run --incoming {uri})");
        }
        (MigrateError::NotLoopback { .. }, _) => "--tls-cert, --tls-key and --tls-ca, or --insecure",
        (MigrateError::Tls { .. }, _) => "the expected name is the one in the address, or --tls-peer",
        (MigrateError::Fence(_), _) => "--fence",
        _ => return error.to_string(),
    };
    format!("{error} ({options})")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output;
    use serde_json::json;

    #[test]
    fn every_state_has_its_words() {
        let uri: Uri = "tcp:there:7000".parse().unwrap();
        let paused = |more: Value| json!({ "state": "postcopy-paused", "outcome": null, "error": "URI broke", "progress": more });
        let ended = |outcome: &str| json!({ "state": outcome, "outcome": outcome, "error": "URI broke" });
        let fence = json!({ "fence": "the fence gave no answer: x" });
        let mut unknown = paused(fence.clone());
        unknown["state"] = json!("unknown");
        let mut gone = ended("unknown");
        gone["source_gone"] = json!(true);
        let mut held = ended("failed");
        held["stands_still"] = json!(true);
        let reports = [
            ended("cancelled"),
            ended("failed"),
            held,
            paused(json!({ "runs_there": true })),
            paused(json!({})),
            paused(fence),
            unknown,
            ended("unknown"),
            ended("lost"),
            gone,
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
        assert!(advice(&reports[6], &uri).contains("(URI broke; the fence gave no answer: x)"));
    }

    #[test]
    fn the_table_in_the_book_has_the_same_words() {
        let book = include_str!("../../../docs/reliability.md");
        // The book breaks lines where it likes.
        let book = book.split_whitespace().collect::<Vec<_>>().join(" ");
        for failure in ALL {
            assert!(book.contains(failure.text), "docs/reliability.md lacks: {}", failure.text);
            let outcome = failure.outcome.map_or("null".to_owned(), |outcome| format!("\"{outcome}\""));
            let seen =
                format!("`\"state\": \"{}\", \"outcome\": {outcome}`, {}", failure.state, failure.status);
            assert!(book.contains(&seen), "docs/reliability.md lacks: {seen}");
        }
    }
}
