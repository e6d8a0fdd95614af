//! A small client of QEMU's machine protocol: one command at a time, events passed over.
//!
//! Written from QEMU's docs/interop/qmp-spec.rst: JSON objects, one a line; a greeting, `qmp_capabilities`,
//! then `{"execute": ..., "arguments": ...}` answered by `return` or `error`, with events in between.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::error::QemuError;

/// How long QEMU may take over one command. It answers in milliseconds, but its main thread can be
/// busy with the end of a migration.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);

/// Events that are remembered: a migration has a dozen.
const MOST_EVENTS: usize = 64;

/// The longest line that is accepted.
const LINE_LIMIT: u64 = 1 << 20;

/// A connection to one QEMU, past the greeting.
#[derive(Debug)]
pub(crate) struct Qmp {
    side: &'static str,
    reader: BufReader<UnixStream>,
    events: Vec<(String, Instant)>,
}

impl Qmp {
    /// Connects to the socket at `path`; None while QEMU does not listen yet.
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

    /// Runs a command and gives what it returned.
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

    /// When `event` happened for the first time, of what came before the answers so far.
    pub(crate) fn when(&self, event: &str) -> Option<Instant> {
        self.events.iter().find(|(name, _)| name == event).map(|(_, at)| *at)
    }

    /// An answer in which something is missing.
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

/// QEMU's time of an event, which is the host's wall clock, on ours.
fn instant(timestamp: &Value) -> Option<Instant> {
    let of = |name: &str| timestamp.get(name).and_then(Value::as_u64);
    let at = UNIX_EPOCH
        .checked_add(Duration::from_secs(of("seconds")?))?
        .checked_add(Duration::from_micros(of("microseconds")?))?;
    // One that seems to lie ahead is the wall clock's doing.
    let ago = SystemTime::now().duration_since(at).unwrap_or_default();
    Instant::now().checked_sub(ago)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GREETING: &str = "{\"QMP\": {\"version\": {}, \"capabilities\": []}}\n";

    /// Plays QEMU's side: says `lines` and takes whatever is said to it.
    fn against(lines: &str) -> (Result<Qmp, QemuError>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (&theirs).write_all(lines.as_bytes()).unwrap();
        // Half closed: reading beyond the lines is the end, writing still works.
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        (Qmp::new("source", ours), theirs)
    }

    #[test]
    fn passes_over_events_and_gives_the_return() {
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
    fn an_error_keeps_qemus_words() {
        let (qmp, _theirs) = against(&format!(
            "{GREETING}{{\"return\": {{}}}}\n{{\"error\": {{\"class\": \"GenericError\", \"desc\": \"no such thing\"}}}}\n"
        ));
        let error = qmp.unwrap().execute("migrate", json!({})).unwrap_err().to_string();
        assert!(error.contains("migrate") && error.contains("no such thing"), "{error}");
    }

    #[test]
    fn garbage_and_an_early_end_are_errors() {
        assert!(matches!(against("hello\n").0, Err(QemuError::Answer { .. })));
        assert!(matches!(against("{}\n").0, Err(QemuError::Answer { missing: "QMP", .. })));
        assert!(matches!(against("").0, Err(QemuError::Ended { .. })));
        assert!(matches!(against(GREETING).0, Err(QemuError::Ended { .. })));
    }
}
