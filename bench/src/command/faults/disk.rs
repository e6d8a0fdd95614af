//! Faults of a migration to a file on a slow disk.

use super::plan::{End, Fault};
use super::run::{Case, LOAD, Ran};
use crate::command::request::MigrateRequest;
use crate::command::side::{Folder, Side, Start};
use crate::slow_disk::SlowDisk;
use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

/// Speed of the disk in bytes per second. At this rate the guest's data takes five seconds.
const RATE: u64 = 8 << 20;
/// Shortest plausible duration of a save to the slow disk. A faster save means that the limit
/// failed.
const AT_LEAST: Duration = Duration::from_secs(2);
/// Bytes that are written before the source is killed.
const UNDER_WAY: u64 = 4 << 20;

/// Returns the reason why the slow disk cannot be set up on this host.
pub(super) fn impossible() -> Option<String> {
    SlowDisk::below(&std::env::temp_dir(), RATE).err().map(|why| why.to_string())
}

pub(super) fn run(case: Case) -> Result<Ran> {
    let folder = Folder::new()?;
    let slow = SlowDisk::below(&folder.0, RATE)?;
    let path = folder.0.join("guest");
    let uri = format!("file:{}", path.display());
    let dir = folder.0.display().to_string();
    let args = ["--workload", LOAD, "--migrate-dir", &dir].map(String::from).to_vec();
    let mut source = Side::start(Start { args, slow: Some(&slow), ..case.start() }, &folder.0, "source")?;
    source.working()?;
    let began = Instant::now();
    source.command("migrate", serde_json::to_value(MigrateRequest::to(&uri))?)?;
    if case.fault == Fault::KillSource {
        source.wait("some of the guest in the file", |status| {
            status["progress"]["wire_bytes"].as_u64() > Some(UNDER_WAY) || !status["outcome"].is_null()
        })?;
        source.kill()?;
        // The target must refuse the incomplete file.
        let args = vec!["--incoming".into(), uri];
        if let Ok(mut target) = Side::start(Start { args, ..case.start() }, &folder.0, "target") {
            target.refuses().context("half a guest in a file")?;
        }
        return Ok(Ran { end: End::Died, took: began.elapsed(), killed: false });
    }
    let status = source.wait("the guest in the file", |status| !status["outcome"].is_null())?;
    ensure!(
        status["outcome"] == "completed",
        "the migration ended as {}: {}",
        status["outcome"],
        status["error"]
    );
    ensure!(began.elapsed() > AT_LEAST, "the disk was not slow: {:?}", began.elapsed());
    drop(source);
    forget(&path)?;
    let began = Instant::now();
    let args = vec!["--incoming".into(), uri];
    let mut target = Side::start(Start { args, slow: Some(&slow), ..case.start() }, &folder.0, "target")?;
    target.wait("the guest out of the file", |status| status["vm"]["place"] == "running")?;
    let took = began.elapsed();
    target.whole()?;
    Ok(Ran { end: End::Moved, took, killed: false })
}

/// Drops the file from the page cache, so that the target reads it from the disk.
fn forget(path: &Path) -> Result<()> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    file.sync_all()?;
    Ok(rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?)
}
