//! A minimal collector of traces: HTTP on loopback, and bodies parsed with the published protocol
//! definition.

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use crate::support::PATIENCE;

/// A received span with the attributes of its resource.
#[derive(Debug, Clone)]
pub(crate) struct Received {
    pub(crate) span: Span,
    pub(crate) resource: BTreeMap<String, String>,
    pub(crate) scope: String,
}

impl Received {
    /// Returns a numeric attribute.
    pub(crate) fn number(&self, name: &str) -> Option<i64> {
        let value = self.span.attributes.iter().find(|pair| pair.key == name)?.value.clone()?.value?;
        match value {
            any_value::Value::IntValue(number) => Some(number),
            _ => None,
        }
    }

    pub(crate) fn attribute(&self, name: &str) -> Option<String> {
        attributes(&self.span.attributes).remove(name)
    }
}

#[derive(Default)]
struct CollectorState {
    spans: Vec<Received>,
    /// Number of complete requests, answered or not.
    requests: usize,
    answered: usize,
}

#[derive(Default)]
struct Inner {
    state: Mutex<CollectorState>,
    changed: Condvar,
}

pub(crate) struct Collector {
    inner: Arc<Inner>,
    pub(crate) port: u16,
}

impl Collector {
    /// Starts a collector that answers each request with `status`, or never.
    pub(crate) fn start(status: Option<&'static str>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let inner = Arc::new(Inner::default());
        let own = Arc::clone(&inner);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let inner = Arc::clone(&own);
                std::thread::spawn(move || serve(stream, status, &inner));
            }
        });
        Self { inner, port }
    }

    pub(crate) fn endpoint(&self) -> String {
        // The endpoint has a host name, so that a confined thread must resolve it.
        format!("http://localhost:{}", self.port)
    }

    /// Waits until `done` holds for the received spans, and returns them.
    pub(crate) fn wait(&self, what: &str, done: impl Fn(&[Received]) -> bool) -> Vec<Received> {
        self.until(what, |state| done(&state.spans));
        self.inner.state.lock().unwrap().spans.clone()
    }

    pub(crate) fn wait_for_a_request(&self) {
        self.until("a request", |state| state.requests > 0);
    }

    pub(crate) fn answered(&self) -> usize {
        self.inner.state.lock().unwrap().answered
    }

    fn until(&self, what: &str, done: impl Fn(&CollectorState) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        let mut state = self.inner.state.lock().unwrap();
        while !done(&state) {
            let left = deadline.saturating_duration_since(Instant::now());
            let names: Vec<_> = state.spans.iter().map(|received| received.span.name.clone()).collect();
            assert!(!left.is_zero(), "waited in vain for {what}: {names:?}");
            state = self.inner.changed.wait_timeout(state, left).unwrap().0;
        }
    }
}

/// Serves the requests of a connection until the connection ends.
fn serve(stream: TcpStream, status: Option<&str>, inner: &Inner) {
    let mut reader = BufReader::new(stream);
    while let Some((path, content, body)) = request(&mut reader) {
        assert_eq!((path.as_str(), content.as_str()), ("/v1/traces", "application/x-protobuf"));
        let request = ExportTraceServiceRequest::decode(&*body).expect("it is no request of the protocol");
        let mut state = inner.state.lock().unwrap();
        state.requests += 1;
        if status.is_some_and(|status| status.starts_with("200")) {
            state.spans.extend(received(request));
        }
        inner.changed.notify_all();
        drop(state);
        let Some(status) = status else {
            // The connection stays open without an answer until the client closes it.
            let _ = reader.read(&mut [0]);
            return;
        };
        let answer =
            format!("HTTP/1.1 {status}\r\nContent-Type: application/x-protobuf\r\nContent-Length: 0\r\n\r\n");
        if reader.get_mut().write_all(answer.as_bytes()).is_err() {
            return;
        }
        inner.state.lock().unwrap().answered += 1;
    }
}

/// Returns path, content type and body of the next request.
fn request(reader: &mut BufReader<TcpStream>) -> Option<(String, String, Vec<u8>)> {
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|read| *read > 0)?;
    let path = line.strip_prefix("POST ")?.split(' ').next()?.to_owned();
    let (mut length, mut content) = (0, String::new());
    loop {
        line.clear();
        reader.read_line(&mut line).ok().filter(|read| *read > 0)?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.trim().parse().ok()?,
            "content-type" => value.trim().clone_into(&mut content),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some((path, content, body))
}

fn received(request: ExportTraceServiceRequest) -> Vec<Received> {
    let mut all = Vec::new();
    for group in request.resource_spans {
        let resource = attributes(&group.resource.unwrap_or_default().attributes);
        for scoped in group.scope_spans {
            let scope = scoped.scope.unwrap_or_default().name;
            let spans = scoped.spans.into_iter();
            all.extend(spans.map(|span| Received { span, resource: resource.clone(), scope: scope.clone() }));
        }
    }
    all
}

fn attributes(list: &[KeyValue]) -> BTreeMap<String, String> {
    let text = |pair: &KeyValue| match pair.value.clone()?.value? {
        any_value::Value::StringValue(text) => Some(text),
        other => Some(format!("{other:?}")),
    };
    list.iter().filter_map(|pair| Some((pair.key.clone(), text(pair)?))).collect()
}
