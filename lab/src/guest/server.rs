//! TCP server that echoes each line.

use anyhow::{Context, Result};
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use vmferry_lab::guest_report::GuestReport;

/// Echo server.
#[derive(Debug)]
pub(crate) struct Server {
    echoes: Arc<AtomicU64>,
}

impl Server {
    pub(crate) fn start(port: u16) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))
            .with_context(|| format!("cannot listen on port {port}"))?;
        let echoes = Arc::new(AtomicU64::new(0));
        let shared = Arc::clone(&echoes);
        std::thread::Builder::new().name("server".into()).spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || drop(echo(&stream, &shared)));
            }
        })?;
        Ok(Self { echoes })
    }

    pub(crate) fn fill(&self, report: &mut GuestReport) {
        report.echoes = self.echoes.load(Ordering::Acquire);
    }
}

fn echo(stream: &TcpStream, echoes: &AtomicU64) -> Result<()> {
    let mut lines = BufReader::new(stream);
    let mut line = Vec::new();
    while lines.read_until(b'\n', &mut line)? > 0 {
        (&mut &*stream).write_all(&line)?;
        echoes.fetch_add(1, Ordering::AcqRel);
        line.clear();
    }
    Ok(())
}
