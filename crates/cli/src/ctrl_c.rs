//! What Ctrl-C does at a migration that is watched: on a thread of its own and over a connection of its own, as whoever watches may be
//! waiting for somebody to read what it says.

use crate::api::Client;
use crate::{Status, output};
use anyhow::{Context, Result};
use serde_json::json;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A command that knows how its migration ended says so and ends within this, unless it waits for a reader.
pub(crate) const SAID_WITHIN: Duration = Duration::from_secs(1);

/// How far the command is, as whoever presses Ctrl-C has to know.
#[derive(Debug, Default)]
pub(crate) struct Stage {
    /// Somebody pressed it, and nobody has looked since.
    pub(crate) interrupted: AtomicBool,
    /// The migration has begun: a cancel is for no other one.
    pub(crate) begun: AtomicBool,
    /// It has ended, as far as this command is concerned, and this is the command's exit status.
    pub(crate) ended: OnceLock<Status>,
}

/// From here on Ctrl-C cancels the migration at the control socket `api`, and at another time ends this command if all that is left is
/// somebody who does not read.
pub(crate) fn caught(api: &Path) -> Result<Arc<Stage>> {
    let stage = Arc::<Stage>::default();
    let (own, api, mut again) = (Arc::clone(&stage), api.to_path_buf(), false);
    let pressed = move || {
        own.interrupted.store(true, Ordering::Release);
        // What is not begun yet is cancelled by whoever watches it.
        if !own.begun.load(Ordering::Acquire) {
            return;
        }
        let ended = own.ended.get().copied();
        if ended.is_none() && !std::mem::replace(&mut again, true) {
            // Refused where it is too late for that, which whoever watches says.
            let _ = Client::connect(&api).and_then(|mut client| client.call("cancel", json!({})));
            return;
        }
        if let Some(status) = ended.or_else(|| ask(&api)) {
            std::thread::sleep(SAID_WITHIN);
            std::process::exit(status as i32);
        }
    };
    ctrlc::set_handler(pressed).context("cannot catch Ctrl-C")?;
    Ok(stage)
}

/// The exit status of a migration that has ended; `None` if it has not.
fn ask(api: &Path) -> Option<Status> {
    let asked = Client::connect(api).and_then(|mut client| client.call("status", json!({})));
    // Who cannot be asked any more has told somebody else, or nobody.
    let Ok(status) = asked else { return Some(Status::Unknown) };
    (!status["outcome"].is_null()).then(|| output::exit_status(&status))
}
