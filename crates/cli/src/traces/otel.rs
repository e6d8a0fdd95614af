//! Export of spans as OTLP over HTTP. Environment variables of OpenTelemetry's specification
//! configure it.

use crate::http_client;
use anyhow::{Context as _, Result};
use opentelemetry::trace::TracerProvider;
use opentelemetry::{Context, KeyValue};
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{SpanExporter, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{BatchSpanProcessor, SdkTracerProvider, Span, SpanData, SpanProcessor};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use tracing::Subscriber;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::registry::LookupSpan;
use ureq::Agent;
use vmferry_thread::Role;

/// Variables that name the collector. Either enables the export.
const WHERE: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];
/// Variables that name a PEM file with the authorities of a collector at https.
const AUTHORITY: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE"];
/// Variables with the time limit for an answer, in milliseconds.
const TIMEOUT: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"];
/// Default time limit for an answer, from the specification.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest wait for the last spans at the end of the process.
const LAST: Duration = Duration::from_secs(2);
/// Most bytes of an answer; a real one has a few.
const MOST_BYTES: u64 = 64 << 10;

/// Exporter of spans. Dropping it sends the remaining spans.
pub(super) struct Spans {
    provider: SdkTracerProvider,
    late: DeferredProcessor,
    exporter: Mutex<Option<SpanExporter>>,
}

impl Spans {
    /// Returns an exporter if the environment names a collector. Reads the needed files, and sends
    /// nothing yet.
    pub(super) fn begin() -> Option<Self> {
        first(WHERE)?;
        let exporter =
            exporter().inspect_err(|error| eprintln!("vmferry: no traces are sent: {error:#}")).ok()?;
        let late = DeferredProcessor::default();
        let provider =
            SdkTracerProvider::builder().with_span_processor(late.clone()).with_resource(resource()).build();
        Some(Self { provider, late, exporter: Mutex::new(Some(exporter)) })
    }

    /// Returns the layer that turns spans of `tracing` into OpenTelemetry spans.
    pub(super) fn layer<S: Subscriber + for<'a> LookupSpan<'a>>(&self) -> impl Layer<S> + use<S> {
        tracing_opentelemetry::layer()
            .with_tracer(self.provider.tracer("vmferry"))
            // The source location of a span and the time of its thread are not information about a
            // migration.
            .with_location(false)
            .with_threads(false)
            .with_target(false)
            .with_tracked_inactivity(false)
            .with_filter(LevelFilter::INFO)
    }

    /// Starts to send. The batch processor starts its own thread, which inherits the confinement of
    /// the thread that starts it.
    pub(super) fn send(&self) {
        let Some(exporter) = self.exporter.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return;
        };
        let late = self.late.clone();
        let started = vmferry_thread::spawn(Role::Traces, "traces", move || {
            let mut processor = BatchSpanProcessor::builder(exporter).build();
            // The provider has set the resource before this processor existed.
            processor.set_resource(&resource());
            let _ = late.0.set(processor);
        });
        match started.map(std::thread::JoinHandle::join) {
            Ok(Ok(())) => {}
            Ok(Err(_)) => eprintln!("vmferry: no traces are sent: the thread that sends them did not start"),
            Err(error) => eprintln!("vmferry: no traces are sent: {error}"),
        }
    }
}

impl Drop for Spans {
    fn drop(&mut self) {
        if self.late.0.get().is_some()
            && let Err(error) = self.provider.shutdown_with_timeout(LAST)
        {
            eprintln!("vmferry: the last traces were not sent: {error}");
        }
    }
}

/// A processor that works once threads may start. Spans that end before are dropped: no guest runs
/// yet.
#[derive(Debug, Clone, Default)]
struct DeferredProcessor(Arc<OnceLock<BatchSpanProcessor>>);

impl SpanProcessor for DeferredProcessor {
    fn on_start(&self, span: &mut Span, context: &Context) {
        if let Some(processor) = self.0.get() {
            processor.on_start(span, context);
        }
    }

    fn on_end(&self, span: SpanData) {
        if let Some(processor) = self.0.get() {
            processor.on_end(span);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.0.get().map_or(Ok(()), SpanProcessor::force_flush)
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.0.get().map_or(Ok(()), |processor| processor.shutdown_with_timeout(timeout))
    }
}

/// Returns the resource of the spans. `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` add to it.
fn resource() -> Resource {
    let builder =
        Resource::builder().with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")));
    let named = std::env::var("OTEL_SERVICE_NAME").is_ok_and(|name| !name.is_empty());
    if named { builder.build() } else { builder.with_service_name("vmferry").build() }
}

fn exporter() -> Result<SpanExporter> {
    let authority = first(AUTHORITY);
    let read =
        |path: &String| std::fs::read(path).with_context(|| format!("cannot read {path} ({})", AUTHORITY[1]));
    let authority = authority.as_ref().map(read).transpose()?;
    let patience = first(TIMEOUT).and_then(|text| text.parse().ok()).map_or(PATIENCE, Duration::from_millis);
    let agent = http_client::agent(authority.as_deref(), None, patience)?;
    let client = Client { agent, failing: AtomicBool::new(false) };
    Ok(SpanExporter::builder().with_http().with_http_client(client).build()?)
}

/// Returns the value of the first of these variables that is not empty.
fn first(names: [&str; 2]) -> Option<String> {
    names.into_iter().filter_map(|name| std::env::var(name).ok()).find(|value| !value.is_empty())
}

/// HTTP client that sends requests on the calling thread, which belongs to the exporter.
#[derive(Debug)]
struct Client {
    agent: Agent,
    /// The last request failed, and the failure was printed.
    failing: AtomicBool,
}

impl Client {
    fn post(&self, request: Request<Bytes>) -> Result<Response<Bytes>> {
        let (parts, body) = request.into_parts();
        let response = self.agent.run(Request::from_parts(parts, &*body))?;
        let (parts, mut body) = response.into_parts();
        let bytes = body.with_config().limit(MOST_BYTES).read_to_vec()?;
        Ok(Response::from_parts(parts, bytes.into()))
    }

    fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>> {
        let to = request.uri().clone();
        let result = self.post(request);
        let why = match &result {
            Ok(response) if response.status().is_success() => None,
            Ok(response) => Some(format!("the collector answers {}", response.status())),
            Err(error) => Some(format!("{error:#}")),
        };
        // Only the first of successive failures is printed, so that the log of a VMM is not filled.
        if self.failing.swap(why.is_some(), Ordering::Relaxed) != why.is_some() {
            match why {
                Some(why) => eprintln!("vmferry: traces do not reach {to}: {why}"),
                None => eprintln!("vmferry: traces reach {to} again"),
            }
        }
        result
    }
}

impl HttpClient for Client {
    // Written out as `async_trait` would generate it.
    fn send_bytes<'life0, 'async_trait>(
        &'life0 self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'async_trait>>
    where
        'life0: 'async_trait,
        Self: 'async_trait,
    {
        Box::pin(std::future::ready(self.send(request).map_err(HttpError::from)))
    }
}
