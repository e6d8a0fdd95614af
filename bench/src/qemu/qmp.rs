//! Small client of QEMU's machine protocol. It runs one command at a time and records events.
//!
//! Written from QEMU's docs/interop/qmp-spec.rst: JSON objects, one per line. A greeting comes
//! first, then `qmp_capabilities`. Each `{"execute": ..., "arguments": ...}` is answered by
//! `return` or `error`, with events in between.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::error::QemuError;

/// Longest time for one command. QEMU answers in milliseconds, but its main thread can be busy with
/// the end of a migration.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);

/// Largest number of events that are remembered. A migration has about a dozen.
const MOST_EVENTS: usize = 64;

/// Longest accepted line in bytes.
const LINE_LIMIT: u64 = 1 << 20;

/// Connection to one QEMU process after the greeting.
#[derive(Debug)]
pub(crate) struct Qmp {
    side: &'static str,
    reader: BufReader<UnixStream>,
    events: Vec<(String, Instant)>,
}

impl Qmp {
    /// Connects to the socket at `path`. Returns `None` while QEMU does not listen yet.
    pub(crate) fn connect(side: &'static str, path: &Path) -> Result<Option<Self>, QemuError> {
        match UnixStream::connect(path) {
            Ok(stream) => Self::new(side, stream).map(Some),
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
                Ok(None)
            }
            Err(e) => Err(QemuError::io("connect to its control socket")(e)),
        }
    }

    fn new(side: &'static str, stream: UnixStream) -> Result<Self, QemuError> {
        let limit = Some(ANSWER_LIMIT);
        stream
            .set_read_timeout(limit)
            .and_then(|()| stream.set_write_timeout(limit))
            .map_err(QemuError::io("set up its control socket"))?;
        let mut qmp = Qmp { side, reader: BufReader::new(stream), events: Vec::new() };
        let greeting = qmp.line("the greeting")?;
        if greeting.get("QMP").is_none() {
            return Err(qmp.strange("the greeting", &greeting, "QMP"));
        }
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Runs a command, and returns its result.
    pub(crate) fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, QemuError> {
        let mut line = json!({ "execute": command, "arguments": arguments }).to_string();
        line.push('\n');
        self.reader.get_mut().write_all(line.as_bytes()).map_err(QemuError::io("send a command"))?;
        loop {
            let mut answer = self.line(command)?;
            if let Some(event) = answer.get("event") {
                self.remember(event, &answer["timestamp"]);
                continue;
            }
            if let Some(error) = answer.get("error") {
                let description = error.get("desc").and_then(Value::as_str).unwrap_or("without a reason");
                return Err(QemuError::Refused {
                    side: self.side,
                    command: command.into(),
                    description: description.into(),
                });
            }
            return match answer.get_mut("return") {
                Some(value) => Ok(value.take()),
                None => Err(self.strange(command, &answer, "return")),
            };
        }
    }

    fn remember(&mut self, event: &Value, timestamp: &Value) {
        if let (Some(name), Some(at)) = (event.as_str(), instant(timestamp))
            && self.events.len() < MOST_EVENTS
        {
            self.events.push((name.into(), at));
        }
    }

    /// Returns the time of the first `event` among those that were received before the answers so
    /// far.
    pub(crate) fn when(&self, event: &str) -> Option<Instant> {
        self.events.iter().find(|(name, _)| name == event).map(|(_, at)| *at)
    }

    /// Returns an error for an answer in which `missing` is missing.
    pub(crate) fn strange(&self, command: &str, answer: &Value, missing: &'static str) -> QemuError {
        QemuError::Answer { side: self.side, command: command.into(), answer: answer.to_string(), missing }
    }

    fn line(&mut self, awaited: &str) -> Result<Value, QemuError> {
        let mut line = String::new();
        let read = (&mut self.reader).take(LINE_LIMIT).read_line(&mut line);
        match read {
            Ok(0) => Err(QemuError::Ended { side: self.side, detail: format!("{awaited} was not answered") }),
            Ok(_) => serde_json::from_str(&line).map_err(|_| QemuError::Answer {
                side: self.side,
                command: awaited.into(),
                answer: format!("{line:?}"),
                missing: "a JSON object",
            }),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                Err(QemuError::Timeout {
                    side: self.side,
                    what: "an answer",
                    limit: ANSWER_LIMIT,
                    detail: format!("it was asked for {awaited}"),
                })
            }
            Err(e) => Err(QemuError::io("read an answer")(e)),
        }
    }
}

/// Converts QEMU's time of an event, which is the host's wall clock, to an `Instant`.
fn instant(timestamp: &Value) -> Option<Instant> {
    let of = |name: &str| timestamp.get(name).and_then(Value::as_u64);
    let at = UNIX_EPOCH
        .checked_add(Duration::from_secs(of("seconds")?))?
        .checked_add(Duration::from_micros(of("microseconds")?))?;
    // An event that seems to lie in the future means that the wall clock was set back.
    let ago = SystemTime::now().duration_since(at).unwrap_or_default();
    Instant::now().checked_sub(ago)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GREETING: &str = "{\"QMP\": {\"version\": {}, \"capabilities\": []}}\n";

    /// Connects a client to a scripted QEMU that sends `lines` and accepts any input.
    fn against(lines: &str) -> (Result<Qmp, QemuError>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (&theirs).write_all(lines.as_bytes()).unwrap();
        // Half closed: the client reads the end of the stream after the lines, and can still write.
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        (Qmp::new("source", ours), theirs)
    }

    #[test]
    fn execute_skips_events_and_returns_the_result() {
        let (qmp, theirs) = against(&format!(
            "{GREETING}{{\"return\": {{}}}}\n{{\"event\": \"STOP\"}}\n{{\"return\": {{\"status\": \"running\"}}}}\n"
        ));
        let answer = qmp.unwrap().execute("query-status", json!({"a": 1})).unwrap();
        assert_eq!(answer["status"], "running");
        let mut sent = String::new();
        BufReader::new(theirs).read_to_string(&mut sent).unwrap();
        let commands: Vec<Value> = sent.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(commands[1], json!({"execute": "query-status", "arguments": {"a": 1}}));
    }

    #[test]
    fn error_has_qemus_description() {
        let (qmp, _theirs) = against(&format!(
            "{GREETING}{{\"return\": {{}}}}\n{{\"error\": {{\"class\": \"GenericError\", \"desc\": \"no such thing\"}}}}\n"
        ));
        let error = qmp.unwrap().execute("migrate", json!({})).unwrap_err().to_string();
        assert!(error.contains("migrate") && error.contains("no such thing"), "{error}");
    }

    #[test]
    fn malformed_input_and_early_end_are_errors() {
        assert!(matches!(against("hello\n").0, Err(QemuError::Answer { .. })));
        assert!(matches!(against("{}\n").0, Err(QemuError::Answer { missing: "QMP", .. })));
        assert!(matches!(against("").0, Err(QemuError::Ended { .. })));
        assert!(matches!(against(GREETING).0, Err(QemuError::Ended { .. })));
    }
}
