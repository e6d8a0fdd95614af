//! What this process says while it works: lines on standard error, and spans for an OpenTelemetry collector where it is built to.

#[cfg(feature = "otel")]
mod otel;

use tracing_subscriber::fmt::format::FmtSpan;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

/// Sends what is left of it when it is dropped.
pub(crate) struct Traces {
    #[cfg(feature = "otel")]
    spans: Option<otel::Spans>,
}

/// Begins: lines as `VMFERRY_LOG` filters them, spans where `OTEL_EXPORTER_OTLP_ENDPOINT` says once they are sent ([`Traces::send`]).
/// Starts no thread.
pub(crate) fn begin() -> Traces {
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        // It would say so on standard error, and end the process where that is what fails.
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
    /// Sends spans from now on, on a thread that is confined as others are.
    #[cfg_attr(not(feature = "otel"), expect(clippy::unused_self, reason = "nothing is sent"))]
    pub(crate) fn send(&self) {
        #[cfg(feature = "otel")]
        if let Some(spans) = &self.spans {
            spans.send();
        }
    }
}
