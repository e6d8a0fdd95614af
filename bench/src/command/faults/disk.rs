//! Faults of a guest that goes into a file: on a disk that is slow for its process, and the next one's.

use super::plan::{End, Fault};
use super::run::{Case, LOAD, Ran};
use crate::command::request::MigrateRequest;
use crate::command::side::{Folder, Side, Start};
use crate::slow_disk::SlowDisk;
use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

/// How slow, in bytes a second: the guest's data takes five seconds.
const RATE: u64 = 8 << 20;
/// So fast it cannot have been.
const AT_LEAST: Duration = Duration::from_secs(2);
/// So much has been written when the harm is done.
const UNDER_WAY: u64 = 4 << 20;

/// What makes these cases impossible here.
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
    source.say("migrate", serde_json::to_value(MigrateRequest::to(&uri))?)?;
    if case.fault == Fault::KillSource {
        source.wait("some of the guest in the file", |status| {
            status["progress"]["wire_bytes"].as_u64() > Some(UNDER_WAY) || !status["outcome"].is_null()
        })?;
        source.kill()?;
        // What is there of it must not be taken for a guest.
        let args = vec!["--incoming".into(), uri];
        if let Ok(mut target) = Side::start(Start { args, ..case.start() }, &folder.0, "target") {
            target.refuses().context("half a guest in a file")?;
        }
        return Ok(Ran { end: End::Died, took: began.elapsed(), killed: false });
    }
    let status = source.wait("the guest in the file", |status| !status["outcome"].is_null())?;
    ensure!(status["outcome"] == "completed", "it ended as {}: {}", status["outcome"], status["error"]);
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

/// Has the host read the file anew.
fn forget(path: &Path) -> Result<()> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    file.sync_all()?;
    Ok(rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?)
}
