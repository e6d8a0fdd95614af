//! Log lines on standard error, and spans for an OpenTelemetry collector if the feature `otel` is
//! built in.

#[cfg(feature = "otel")]
mod otel;

use tracing_subscriber::fmt::format::FmtSpan;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

/// Logging and tracing of the process. Dropping it sends the remaining spans.
pub(crate) struct Traces {
    #[cfg(feature = "otel")]
    spans: Option<otel::Spans>,
}

/// Begins logging: lines as `VMFERRY_LOG` filters them, and spans to `OTEL_EXPORTER_OTLP_ENDPOINT`
/// after [`Traces::send`]. Starts no thread.
pub(crate) fn begin() -> Traces {
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        // Internal errors would be printed on standard error, and would end the process if standard
        // error is what fails.
        .log_internal_errors(false)
        .with_target(false)
        .without_time()
        .with_span_events(FmtSpan::CLOSE)
        .with_filter(EnvFilter::try_from_env("VMFERRY_LOG").unwrap_or_else(|_| "warn".into()));
    let registry = tracing_subscriber::registry().with(lines);
    #[cfg(not(feature = "otel"))]
    {
        registry.init();
        Traces {}
    }
    #[cfg(feature = "otel")]
    {
        let spans = otel::Spans::begin();
        registry.with(spans.as_ref().map(otel::Spans::layer)).init();
        Traces { spans }
    }
}

impl Traces {
    /// Starts to send spans, on a thread that is confined like the others.
    #[cfg_attr(not(feature = "otel"), expect(clippy::unused_self, reason = "nothing is sent"))]
    pub(crate) fn send(&self) {
        #[cfg(feature = "otel")]
        if let Some(spans) = &self.spans {
            spans.send();
        }
    }
}
