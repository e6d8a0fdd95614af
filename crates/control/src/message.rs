//! Parser of requests, and writer of answers, errors, events and the greeting.

use crate::json;
use serde::Serialize;
use serde_json::ser::Formatter;
use serde_json::{Map, Value, json};
use std::io;
use std::os::fd::OwnedFd;
use std::time::{SystemTime, UNIX_EPOCH};

/// Maximum number of characters in an error description, which may contain text from a client or a
/// peer.
const LONGEST_DESC: usize = 2000;

/// Class of an error, with its name in the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum ErrorClass {
    /// Any error that has no class of its own.
    GenericError,
    /// The command does not exist, or is not available in this state of the connection.
    CommandNotFound,
    /// The device exists, but no driver of the guest uses it.
    DeviceNotActive,
    /// The device does not exist.
    DeviceNotFound,
    /// The KVM of the host does not have a required feature.
    #[serde(rename = "KVMMissingCap")]
    KvmMissingCap,
}

/// Error of a command, with a class for programs and a description for operators.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, thiserror::Error)]
#[error("{desc}")]
pub struct QmpError {
    /// Class of the error.
    pub class: ErrorClass,
    /// Description of the failure, with advice. Programs must not parse this text.
    pub desc: String,
}

impl QmpError {
    /// Creates an error of the class [`ErrorClass::GenericError`].
    pub fn generic(desc: impl Into<String>) -> Self {
        Self { class: ErrorClass::GenericError, desc: desc.into() }
    }

    /// Creates the error for the unknown command `name`.
    #[must_use]
    pub fn not_found(name: &str) -> Self {
        // A name may be as long as a request.
        let name: String = name.chars().take(80).collect();
        Self { class: ErrorClass::CommandNotFound, desc: format!("The command {name} has not been found") }
    }
}

/// Version of the program, which the greeting and `query-version` report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    /// Major, minor and micro version.
    pub numbers: [u32; 3],
    /// Name of the program.
    pub package: String,
}

impl Version {
    /// Returns the version in the form of an answer to `query-version`. The name of the member
    /// `qemu` is required by the protocol.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let [major, minor, micro] = self.numbers;
        json!({ "qemu": { "major": major, "minor": minor, "micro": micro }, "package": self.package })
    }

    pub(crate) fn greeting(&self) -> Value {
        json!({ "QMP": { "version": self.to_json(), "capabilities": ["oob"] } })
    }
}

/// Event that is sent to the clients.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Name of the event, in capital letters.
    pub name: String,
    /// Data of the event, or null if the event has no data.
    pub data: Value,
    /// Time of the event.
    pub at: SystemTime,
}

impl Event {
    /// Creates an event with the current time. `data` may be null.
    pub fn now(name: &str, data: Value) -> Self {
        Self { name: name.to_owned(), data, at: SystemTime::now() }
    }

    pub(crate) fn to_json(&self) -> Value {
        // The clock is before 1970. For an unknown time, the protocol uses -1.
        let (seconds, microseconds) = match self.at.duration_since(UNIX_EPOCH) {
            Ok(time) => (json!(time.as_secs()), json!(time.subsec_micros())),
            Err(_) => (json!(-1), json!(-1)),
        };
        let mut event = json!({
            "event": self.name,
            "timestamp": { "seconds": seconds, "microseconds": microseconds },
        });
        if !self.data.is_null() {
            event["data"] = self.data.clone();
        }
        event
    }
}

/// Parsed request.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) name: String,
    pub(crate) arguments: Map<String, Value>,
    pub(crate) id: Option<Value>,
    pub(crate) oob: bool,
    /// Descriptor that came with the request, if the command takes one.
    pub(crate) descriptor: Option<OwnedFd>,
}

/// Text that is not a valid request, with its id, if there is one, and the error.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct BadRequest {
    pub(crate) id: Option<Value>,
    pub(crate) error: QmpError,
}

/// Parses a request.
pub(crate) fn parse(text: &[u8]) -> Result<Request, BadRequest> {
    let bad = |id, desc: String| BadRequest { id, error: QmpError::generic(desc) };
    let value = json::read(text).map_err(|error| bad(None, format!("JSON parse error, {error}")))?;
    let Value::Object(mut members) = value else {
        return Err(bad(None, "QMP input must be a JSON object".into()));
    };
    let id = members.remove("id");
    let (execute, urgent) = (members.remove("execute"), members.remove("exec-oob"));
    let arguments = members.remove("arguments");
    if let Some(name) = members.keys().next() {
        let name: String = name.chars().take(80).collect();
        return Err(bad(id, format!("QMP input member '{name}' is unexpected")));
    }
    let (name, oob, member) = match (execute, urgent) {
        (Some(_), Some(_)) => {
            return Err(bad(id, "QMP input member 'exec-oob' clashes with 'execute'".into()));
        }
        (Some(name), None) => (name, false, "execute"),
        (None, Some(name)) => (name, true, "exec-oob"),
        (None, None) => return Err(bad(id, "QMP input lacks member 'execute'".into())),
    };
    let Value::String(name) = name else {
        return Err(bad(id, format!("QMP input member '{member}' must be a string")));
    };
    let arguments = match arguments {
        None => Map::new(),
        Some(Value::Object(arguments)) => arguments,
        Some(_) => return Err(bad(id, "QMP input member 'arguments' must be an object".into())),
    };
    Ok(Request { name, arguments, id, oob, descriptor: None })
}

/// Returns the line that answers a request.
pub(crate) fn answer(result: Result<Value, QmpError>, id: Option<Value>) -> Vec<u8> {
    let mut answer = match result {
        Ok(value) => json!({ "return": value }),
        Err(mut error) => {
            if let Some((end, _)) = error.desc.char_indices().nth(LONGEST_DESC) {
                error.desc.truncate(end);
                error.desc.push('…');
            }
            json!({ "error": error })
        }
    };
    if let Some(id) = id {
        answer["id"] = id;
    }
    line(&answer)
}

/// Returns `value` as a line. The protocol permits only ASCII.
pub(crate) fn line(value: &Value) -> Vec<u8> {
    let mut text = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut text, Ascii);
    // Serializing a value into a vector cannot fail.
    let _ = value.serialize(&mut serializer);
    text.extend(b"\r\n");
    text
}

/// Compact formatter that escapes all characters beyond ASCII.
struct Ascii;

impl Formatter for Ascii {
    fn write_string_fragment<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        let mut units = [0; 2];
        for part in fragment.split_inclusive(|c: char| !c.is_ascii()) {
            let ascii = part.trim_end_matches(|c: char| !c.is_ascii());
            writer.write_all(ascii.as_bytes())?;
            for unit in part[ascii.len()..].chars().flat_map(|c| c.encode_utf16(&mut units).to_vec()) {
                write!(writer, "\\u{unit:04x}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    #[test]
    fn request_has_a_name_arguments_and_an_id() {
        let request = parse(br#"{"execute": "stop", "id": [1, "x"], "arguments": {"a": null}}"#).unwrap();
        assert_eq!((&*request.name, request.oob, request.id), ("stop", false, Some(json!([1, "x"]))));
        assert_eq!(request.arguments["a"], Value::Null);
        assert!(parse(br#"{"exec-oob": "stop"}"#).unwrap().oob);
    }

    #[test]
    fn bad_request_is_refused_with_its_id() {
        for (text, id, says) in [
            (r#"{"execute": 3, "id": 7}"#, Some(json!(7)), "'execute' must be a string"),
            (r#"{"exec-oob": {}}"#, None, "'exec-oob' must be a string"),
            (r#"{"execute": "a", "exec-oob": "a"}"#, None, "clashes"),
            (r#"{"id": "a"}"#, Some(json!("a")), "lacks member 'execute'"),
            (r#"{"execute": "a", "arguments": []}"#, None, "'arguments' must be an object"),
            (r#"{"execute": "a", "b": 1, "id": null}"#, Some(Value::Null), "'b' is unexpected"),
            (r#"{"execute": 'a'}"#, None, "JSON parse error"),
            (r#"{"execute": "stop", "execute": "cont"}"#, None, "duplicate key 'execute'"),
            (r#"{"execute": "a", "arguments": {"b": 1, "b": 2}}"#, None, "duplicate key 'b'"),
            ("{]", None, "JSON parse error"),
        ] {
            let bad = parse(text.as_bytes()).unwrap_err();
            assert_eq!(bad.id, id, "{text}");
            assert!(bad.error.desc.contains(says), "{text}: {}", bad.error);
            assert_eq!(bad.error.class, ErrorClass::GenericError);
        }
    }

    #[test]
    fn lines_have_the_form_of_the_protocol() {
        let text = |line: Vec<u8>| String::from_utf8(line).unwrap();
        assert_eq!(text(answer(Ok(json!({})), None)), "{\"return\":{}}\r\n");
        let error = QmpError { class: ErrorClass::KvmMissingCap, desc: "no".into() };
        let value: Value = serde_json::from_slice(&answer(Err(error), Some(json!(5)))).unwrap();
        assert_eq!(value, json!({"error": {"class": "KVMMissingCap", "desc": "no"}, "id": 5}));
        let long = QmpError::generic("é".repeat(60_000));
        assert!(answer(Err(long), None).len() < 7 * LONGEST_DESC);
        let at = UNIX_EPOCH + Duration::from_micros(1_000_002);
        let event = Event { name: "STOP".into(), data: Value::Null, at };
        let timestamp = json!({"seconds": 1, "microseconds": 2});
        assert_eq!(event.to_json(), json!({"event": "STOP", "timestamp": timestamp}));
    }

    proptest! {
        #[test]
        fn lines_are_ascii_and_keep_the_value(text in ".{0,60}") {
            let line = line(&json!({ "a": text }));
            prop_assert!(line.is_ascii());
            prop_assert_eq!(serde_json::from_slice::<Value>(&line).unwrap(), json!({ "a": text }));
        }
    }
}
