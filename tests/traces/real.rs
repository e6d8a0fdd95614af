//! The Collector of OpenTelemetry as a receiver of spans: its exporter `debug` prints all received
//! data.

use crate::support::{Folder, Need, skip, wait_for};
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

/// Names of the program in distributions.
const NAMES: [&str; 2] = ["otelcol", "otelcol-contrib"];

/// A span as the Collector prints it: fields before the colons, and attributes by name.
#[derive(Debug, Clone, Default)]
pub(crate) struct Said {
    fields: BTreeMap<String, String>,
    pub(crate) attributes: BTreeMap<String, String>,
}

impl Said {
    pub(crate) fn is(&self, field: &str) -> &str {
        self.fields.get(field).map_or("", String::as_str)
    }
}

pub(crate) struct Otelcol {
    child: Child,
    log: String,
    pub(crate) port: u16,
}

impl Otelcol {
    /// Starts a Collector if it is installed; otherwise reports the skipped test.
    pub(crate) fn start(folder: &Folder) -> Option<Self> {
        let version =
            |name: &&&str| Command::new(name).arg("--version").output().is_ok_and(|out| out.status.success());
        let Some(name) = NAMES.iter().find(version) else {
            skip(Need::Program, format!("none of {NAMES:?}; docs/operations.md says how one is built"));
            return None;
        };
        // The Collector does not report a port that it chooses itself.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let (config, log) = (folder.path("otelcol.yaml"), folder.path("otelcol.log"));
        let text = format!(
            "receivers: {{otlp: {{protocols: {{http: {{endpoint: '127.0.0.1:{port}'}}}}}}}}\n\
             exporters: {{debug: {{verbosity: detailed, use_internal_logger: false}}}}\n\
             service:\n  telemetry: {{metrics: {{level: none}}}}\n  \
             pipelines: {{traces: {{receivers: [otlp], exporters: [debug]}}}}\n"
        );
        std::fs::write(&config, text).unwrap();
        let out = std::fs::File::create(&log).unwrap();
        let child = Command::new(name)
            .args(["--config", &config])
            .stdin(Stdio::null())
            .stdout(out.try_clone().unwrap())
            .stderr(out)
            .spawn()
            .unwrap();
        let own = Self { child, log, port };
        own.until("it to listen", |log| log.contains("Everything is ready"));
        Some(own)
    }

    /// Waits until `done` holds for the log, and returns the log.
    fn until(&self, what: &str, done: impl Fn(&str) -> bool) -> String {
        wait_for(what, || {
            let log = std::fs::read_to_string(&self.log).unwrap();
            if done(&log) { Ok(log) } else { Err(log) }
        })
    }

    /// Returns all spans and the attributes of their resource, once a span of this name has
    /// arrived.
    pub(crate) fn spans(&self, name: &str) -> (BTreeMap<String, String>, Vec<Said>) {
        let log = self.until(name, |log| read(log).1.iter().any(|span| span.is("Name") == name));
        read(&log)
    }
}

impl Drop for Otelcol {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Parses the attributes of the resource, and the spans.
fn read(log: &str) -> (BTreeMap<String, String>, Vec<Said>) {
    let (mut resource, mut spans) = (BTreeMap::new(), Vec::<Said>::new());
    let mut of_span = false;
    for line in log.lines() {
        if line.starts_with("Span #") {
            spans.push(Said::default());
            of_span = true;
        } else if line.contains("ResourceSpans #") {
            of_span = false;
        } else if let Some((name, value)) =
            line.strip_prefix("     -> ").and_then(|pair| pair.split_once(": "))
        {
            let list = match spans.last_mut() {
                Some(span) if of_span => &mut span.attributes,
                _ => &mut resource,
            };
            list.insert(name.to_owned(), value.to_owned());
        } else if let Some((name, value)) = line.strip_prefix("    ").and_then(|line| line.split_once(':'))
            && let Some(span) = spans.last_mut().filter(|_| of_span)
        {
            span.fields.insert(name.trim().to_owned(), value.trim().to_owned());
        }
    }
    (resource, spans)
}
