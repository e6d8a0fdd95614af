//! What the engine's proxy wants of the tests that it stands in.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

/// A path for a socket that nobody else uses.
pub(crate) fn socket_path() -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("vmferry-command-{}-{number}", std::process::id()))
}
