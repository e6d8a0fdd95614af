//! Threads that query vmferry processes, so that the screen need not wait for answers.

use crate::api::Client;
use anyhow::Result;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::time::Duration;

/// Interval at which the status is read.
const EVERY: Duration = Duration::from_millis(250);
/// Delay after a failure.
const AGAIN: Duration = Duration::from_secs(1);
/// Windows of a measured dirty rate in milliseconds.
const WINDOWS_MS: [u64; 5] = [50, 100, 200, 500, 1000];

/// An update about a guest.
pub(crate) struct News {
    /// Index of the guest.
    pub(crate) guest: usize,
    pub(crate) what: What,
}

/// Content of [`News`].
#[derive(Debug)]
pub(crate) enum What {
    /// Status of the guest.
    Status(Box<Value>),
    /// Pages that the guest wrote within each window.
    Rate(Result<Value, String>),
    /// The process cannot be reached.
    Gone(String),
}

/// Threads that query one guest. They end with the process: a thread may wait for an answer that
/// never comes.
pub(crate) struct Source {
    guest: usize,
    path: PathBuf,
    sender: Sender<News>,
    measuring: Arc<AtomicBool>,
}

impl Source {
    pub(crate) fn start(guest: usize, path: &Path, sender: Sender<News>) -> std::io::Result<Self> {
        let source = Self { guest, path: path.into(), sender, measuring: Arc::default() };
        let (path, sender) = (source.path.clone(), source.sender.clone());
        std::thread::Builder::new().name("top-status".into()).spawn(move || {
            while let Err(error) = query_status(guest, &path, &sender) {
                if sender.send(News { guest, what: What::Gone(format!("{error:#}")) }).is_err() {
                    break;
                }
                std::thread::sleep(AGAIN);
            }
        })?;
        Ok(source)
    }

    /// Starts a measurement of the dirty rate, unless one runs.
    pub(crate) fn measure(&self) {
        if self.measuring.swap(true, Ordering::AcqRel) {
            return;
        }
        let (guest, path, sender, measuring) =
            (self.guest, self.path.clone(), self.sender.clone(), Arc::clone(&self.measuring));
        let work = move || {
            let request = json!({ "windows-ms": WINDOWS_MS });
            let measured = Client::connect(&path).and_then(|mut client| client.call("dirty-rate", request));
            let _ =
                sender.send(News { guest, what: What::Rate(measured.map_err(|error| format!("{error:#}"))) });
            measuring.store(false, Ordering::Release);
        };
        if std::thread::Builder::new().name("top-measure".into()).spawn(work).is_err() {
            self.measuring.store(false, Ordering::Release);
        }
    }
}

/// Reads the status until a call fails. Returns `Ok` when the screen has ended.
fn query_status(guest: usize, path: &Path, sender: &Sender<News>) -> Result<()> {
    let mut client = Client::connect(path)?;
    loop {
        let status = client.call("status", json!({}))?;
        if sender.send(News { guest, what: What::Status(Box::new(status)) }).is_err() {
            return Ok(());
        }
        std::thread::sleep(EVERY);
    }
}
