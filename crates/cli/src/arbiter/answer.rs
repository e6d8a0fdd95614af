//! Parser of answers of an etcd, or of any server in its place: a few kilobytes of untrusted bytes.
//! (The fuzz target `etcd` includes this file, so it does not depend on HTTP.)

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::Value;
use vmferry_engine::arbiter::{ArbiterError, Ownership};

/// Most characters of an answer that an error shows.
const MOST_SHOWN: usize = 200;

// Values of a register.
pub(super) const OPEN: &str = "open";
pub(super) const SOURCE: &str = "source";
pub(super) const TARGET: &str = "target";
pub(super) const RUNS: &str = "target runs";

/// Parses the body of an answer with this status line. `success` says whether the status is a
/// success.
///
/// # Errors
/// If etcd reports an error, or the answer is not one of etcd. The text is short and printable.
pub(super) fn read(status: &str, success: bool, body: &[u8]) -> Result<Value, String> {
    let value: Option<Value> = serde_json::from_slice(body).ok();
    match value {
        // An answer of etcd has a header; a refusal has an error.
        Some(value) if success && value["header"].is_object() => Ok(value),
        Some(value) if value["error"].is_string() => {
            Err(format!("{status}: {}", shown(value["error"].as_str().unwrap_or_default())))
        }
        _ => Err(format!(
            "{status}, which is not an answer of etcd: '{}'",
            shown(&String::from_utf8_lossy(body))
        )),
    }
}

/// Returns what a transaction read from the register because its comparison failed; `None` if the
/// comparison held.
pub(super) fn refused(answer: &Value) -> Option<&Value> {
    (answer["succeeded"] != true).then(|| &answer["responses"][0]["response_range"])
}

/// Returns the owner that a read of the register `at` contains.
pub(super) fn held(at: &str, range: &Value) -> Result<Ownership, ArbiterError> {
    let Some(value) = range["kvs"][0]["value"].as_str() else {
        if !range.is_object() {
            return Err(ArbiterError::Unreachable(format!("the answer does not contain the value of {at}")));
        }
        let why =
            format!("there is no {at}: this is not the etcd that the source uses, or the key was deleted");
        return Err(ArbiterError::NoRegister(why));
    };
    let value = BASE64.decode(value).unwrap_or_default();
    match std::str::from_utf8(&value) {
        Ok(OPEN) => Ok(Ownership::Open),
        Ok(SOURCE) => Ok(Ownership::Source),
        Ok(TARGET) => Ok(Ownership::Target { runs: false }),
        Ok(RUNS) => Ok(Ownership::Target { runs: true }),
        _ => {
            let value = shown(&String::from_utf8_lossy(&value));
            Err(ArbiterError::NoRegister(format!(
                "{at} holds '{value}', which is none of open, source, target and target runs"
            )))
        }
    }
}

/// Returns foreign text, shortened and printable.
fn shown(text: &str) -> String {
    text.chars().take(MOST_SHOWN).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}
