//! What this process says while it works: lines on standard error, and spans for an OpenTelemetry collector where it is built to.

use tracing_subscriber::fmt::format::FmtSpan;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

/// Sends what is left of it when it is dropped.
pub(crate) struct Traces {
    #[cfg(feature = "otel")]
    provider: Option<opentelemetry_sdk::trace::SdkTracerProvider>,
}

/// Begins: lines as `VMFERRY_LOG` filters them, spans where `OTEL_EXPORTER_OTLP_ENDPOINT` says.
pub(crate) fn begin() -> Traces {
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
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
        use opentelemetry::trace::TracerProvider;
        use tracing_subscriber::filter::LevelFilter;
        let provider = provider();
        let spans = provider.as_ref().map(|provider| {
            tracing_opentelemetry::layer()
                .with_tracer(provider.tracer("vmferry"))
                .with_filter(LevelFilter::INFO)
        });
        registry.with(spans).init();
        Traces { provider }
    }
}

/// Sends spans to the collector that the environment names, if it names one. What else it says (headers, timeouts) is heeded too.
#[cfg(feature = "otel")]
fn provider() -> Option<opentelemetry_sdk::trace::SdkTracerProvider> {
    use opentelemetry_sdk::{Resource, trace::SdkTracerProvider};
    let names = ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"];
    names.into_iter().find_map(std::env::var_os)?;
    let exporter = opentelemetry_otlp::SpanExporter::builder().with_http().build();
    let exporter = exporter.inspect_err(|error| eprintln!("vmferry: no traces are sent: {error}")).ok()?;
    let resource = Resource::builder().with_service_name("vmferry").build();
    Some(SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build())
}

impl Drop for Traces {
    fn drop(&mut self) {
        #[cfg(feature = "otel")]
        if let Some(Err(error)) =
            self.provider.as_ref().map(opentelemetry_sdk::trace::SdkTracerProvider::shutdown)
        {
            eprintln!("vmferry: the last traces were not sent: {error}");
        }
    }
}
