//! Option `run --metrics ADDR`: the status in the text format of OpenMetrics, for Prometheus and
//! similar programs.

mod collect;
mod http;
mod plain;

use crate::api::RunContext;
use anyhow::Result;
use std::net::SocketAddr;
use std::sync::Arc;

pub(crate) use http::check;

/// Serves metrics at `address` until the process ends. An address that other hosts can reach needs
/// `public`.
pub(crate) fn start(address: SocketAddr, public: bool, shared: &Arc<RunContext>) -> Result<()> {
    let told = Arc::clone(shared);
    let source = move || {
        let status = told.status();
        let ended = status["outcome"].is_string();
        let text = collect::text(status)?;
        if ended {
            told.audience.scraped();
        }
        Ok(text)
    };
    let exporter = http::Exporter::start(address, public, Arc::new(source))?;
    eprintln!("vmferry: metrics at http://{}/metrics", exporter.address);
    Ok(())
}
