//! `run --metrics ADDR`: what `status` says, in the text format of OpenMetrics, for Prometheus and its kin.

mod collect;
mod http;

pub(crate) use collect::text;
pub(crate) use http::Exporter;
