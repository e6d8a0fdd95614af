//! What an etcd answers, or somebody in its place: at most some kilobytes, and not to be trusted to be more than bytes. (The fuzz target
//! `etcd` takes this file in by itself, which is why it knows nothing of HTTP.)

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::Value;
use vmferry_engine::fence::{ArbiterError, Ruling};

/// Most characters of an answer that are shown.
const MOST_SHOWN: usize = 200;

// What a register holds.
pub(super) const OPEN: &str = "open";
pub(super) const SOURCE: &str = "source";
pub(super) const TARGET: &str = "target";
pub(super) const RUNS: &str = "target runs";

/// The body of an answer with this status line, which says `success` or not.
///
/// # Errors
/// What etcd says is wrong, or that this is not an answer of etcd's; short and printable.
pub(super) fn read(status: &str, success: bool, body: &[u8]) -> Result<Value, String> {
    let value: Option<Value> = serde_json::from_slice(body).ok();
    match value {
        // What etcd answers has a header; what it refuses has an error.
        Some(value) if success && value["header"].is_object() => Ok(value),
        Some(value) if value["error"].is_string() => {
            Err(format!("{status}: {}", shown(value["error"].as_str().unwrap_or_default())))
        }
        _ => Err(format!("{status}, and not as etcd answers: '{}'", shown(&String::from_utf8_lossy(body)))),
    }
}

/// Of the answer to a transaction that reads the register where its comparison fails: what was read, or `None` where it held.
pub(super) fn refused(answer: &Value) -> Option<&Value> {
    (answer["succeeded"] != true).then(|| &answer["responses"][0]["response_range"])
}

/// What a read of the key of the register `at` says.
pub(super) fn held(at: &str, range: &Value) -> Result<Ruling, ArbiterError> {
    let Some(value) = range["kvs"][0]["value"].as_str() else {
        if !range.is_object() {
            return Err(ArbiterError::Unreachable(format!("an answer without what {at} holds")));
        }
        let why = format!(
            "there is no {at}: this is not the etcd that the source has asked, or the key was deleted"
        );
        return Err(ArbiterError::NoRegister(why));
    };
    let value = BASE64.decode(value).unwrap_or_default();
    match std::str::from_utf8(&value) {
        Ok(OPEN) => Ok(Ruling::Open),
        Ok(SOURCE) => Ok(Ruling::Source),
        Ok(TARGET) => Ok(Ruling::Target { runs: false }),
        Ok(RUNS) => Ok(Ruling::Target { runs: true }),
        _ => {
            let value = shown(&String::from_utf8_lossy(&value));
            Err(ArbiterError::NoRegister(format!(
                "{at} holds '{value}', which is not open, source, target or target runs"
            )))
        }
    }
}

/// What somebody else said, short and printable.
fn shown(text: &str) -> String {
    text.chars().take(MOST_SHOWN).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}
