//! Ctrl-C handling during a watched migration. The handler has its own thread and its own
//! connection: the thread that watches may be blocked on a reader of its output.

use crate::api::Client;
use crate::{Status, output};
use anyhow::{Context, Result};
use serde_json::json;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Time within which a command that knows the result prints it and ends, unless it waits for a
/// reader.
pub(crate) const SAID_WITHIN: Duration = Duration::from_secs(1);

/// Progress of the migration, as the Ctrl-C handler needs it.
#[derive(Debug, Default)]
pub(crate) struct Stage {
    /// Ctrl-C was pressed, and the watching thread has not handled it.
    pub(crate) interrupted: AtomicBool,
    /// The migration has begun, so a cancel cannot hit another migration.
    pub(crate) begun: AtomicBool,
    /// Hooks are being executed, and the command must not end before the last of them.
    pub(crate) hooks: AtomicBool,
    /// Exit status of this command, set when the migration has ended.
    pub(crate) ended: OnceLock<Status>,
}

/// Installs the handler. Ctrl-C cancels the migration at the control socket `api`. A further Ctrl-C
/// ends this command if the migration has ended and only a reader is waited for. While hooks are
/// executed, it has no effect: storage that the first hook has frozen would stay frozen.
pub(crate) fn caught(api: &Path) -> Result<Arc<Stage>> {
    let stage = Arc::<Stage>::default();
    let (own, api, mut again) = (Arc::clone(&stage), api.to_path_buf(), false);
    let pressed = move || {
        own.interrupted.store(true, Ordering::Release);
        // A migration that has not begun is cancelled by the watching thread.
        if !own.begun.load(Ordering::Acquire) {
            return;
        }
        let ended = own.ended.get().copied();
        if ended.is_none() && !std::mem::replace(&mut again, true) {
            // The cancel is refused if it is too late; the watching thread reports that.
            let _ = Client::connect(&api).and_then(|mut client| client.call("cancel", json!({})));
            return;
        }
        if own.hooks.load(Ordering::Acquire) {
            return;
        }
        if let Some(status) = ended.or_else(|| query_status(&api)) {
            std::thread::sleep(SAID_WITHIN);
            std::process::exit(status as i32);
        }
    };
    ctrlc::set_handler(pressed).context("cannot catch Ctrl-C")?;
    Ok(stage)
}

/// Returns the exit status of a migration that has ended; `None` if it has not.
fn query_status(api: &Path) -> Option<Status> {
    let answered = Client::connect(api).and_then(|mut client| client.call("status", json!({})));
    // If the process cannot be reached any more, its result is unknown.
    let Ok(status) = answered else { return Some(Status::Unknown) };
    (!status["outcome"].is_null()).then(|| output::exit_status(&status))
}
