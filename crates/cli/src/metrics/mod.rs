//! Option `run --metrics ADDR`: the status in the text format of OpenMetrics, for Prometheus and
//! similar programs.

mod collect;
mod http;
mod plain;

use crate::api::RunContext;
use anyhow::Result;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;

pub(crate) use http::check;

/// Serves metrics at `address` until the process ends. An address that other hosts can reach needs
/// `public`. `listener` is the socket of a process whose place this one takes.
pub(crate) fn start(
    address: SocketAddr,
    public: bool,
    listener: Option<OwnedFd>,
    shared: &Arc<RunContext>,
) -> Result<()> {
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
    let listener = listener.map(TcpListener::from);
    let exporter = http::Exporter::start((address, listener), public, Arc::new(source))?;
    // The value is set only once.
    let _ = shared.metrics.set(exporter.listener);
    eprintln!("vmferry: metrics at http://{}/metrics", exporter.address);
    Ok(())
}
