//! Many snapshots, branches or upgrades of one guest in a row, by the command `vmferry`.

use super::{Figure, Ran, figures};
use crate::command::order::{Limits, Order, arguments};
use crate::command::sample::Sample;
use crate::command::side::{PATIENCE, Side, Start};
use crate::command::upgrade::Guest;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

const LOAD: &str = super::LOAD;
/// Time after which a row ends with as many operations as it has made.
const LONGEST: Duration = Duration::from_secs(600);
/// Number of samples of a row, at most.
const SAMPLES: u32 = 200;
/// Number of times that all pages of the guest and of its copy are checked in a row.
const CHECKS: u32 = 20;

/// Operation that a row repeats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Snapshot,
    Branch,
    Upgrade,
}

impl Operation {
    pub(super) const ALL: [Self; 3] = [Self::Snapshot, Self::Branch, Self::Upgrade];
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Snapshot => "snapshots",
            Self::Branch => "branches",
            Self::Upgrade => "upgrades",
        })
    }
}

/// Runs the operation `count` times on a guest, or as often as the time allows, and samples the
/// process that has the guest.
pub(super) fn run(
    name: &str,
    operation: Operation,
    (kind, memory): (&'static str, &'static str),
    count: u32,
) -> Result<Ran> {
    let began = Instant::now();
    let mut guest = Guest::start(kind, memory, LOAD)?;
    let (mut samples, mut files, mut longest) = (Vec::new(), Vec::new(), 0.0_f64);
    let mut done = 0;
    while done < count && began.elapsed() < LONGEST {
        done += 1;
        let number = done;
        let check = number % (count / CHECKS).max(1) == 0;
        let stopped = match operation {
            Operation::Snapshot => snapshot(&mut guest, (kind, memory), check),
            Operation::Branch => branch(&mut guest, check),
            Operation::Upgrade => guest.upgrade().map(|times| times.downtime),
        };
        longest = longest.max(stopped.with_context(|| format!("{operation}, number {number}"))?);
        if check {
            guest.side.whole().with_context(|| format!("the guest after number {number}"))?;
            eprintln!("soak: {name}: {number} of {count}");
        }
        if number % (count / SAMPLES).max(1) == 0 {
            samples.push(Sample::of(guest.side.pid())?);
            files.push(files_below(&guest.folder.0)?);
        }
    }
    guest.side.whole().with_context(|| format!("the guest after number {done}"))?;
    let mut figures = figures(&samples);
    figures.push(Figure { name: "files", values: files, more: 0 });
    Ok(Ran { done, figures, downtime: Some(Duration::from_secs_f64(longest / 1e3)) })
}

/// Returns the number of files in `folder` and the folders in it.
fn files_below(folder: &Path) -> Result<u64> {
    let mut count = 0;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        count += if entry.file_type()?.is_dir() { files_below(&entry.path())? } else { 1 };
    }
    Ok(count)
}

/// Runs `vmferry` with the arguments `words` and `more`, and returns its document.
fn command(guest: &Guest, words: &[&str], more: [String; 2]) -> Result<Value> {
    let json = guest.file("result.json");
    let mut args = arguments(words, &guest.file("guest"));
    args.extend(more.into_iter().map(Into::into));
    args.extend(["--json".into(), json.clone().into()]);
    let mut order = Order::start(&args, guest.file("command.log"), Limits::default())?;
    order.ended()?.map_err(anyhow::Error::msg)?;
    Ok(serde_json::from_slice(&std::fs::read(json)?)?)
}

/// Writes the guest to a file, which is removed. With `check`, the file is restored before. Returns
/// the time of the pause in ms.
fn snapshot(guest: &mut Guest, (kind, memory): (&str, &str), check: bool) -> Result<f64> {
    let file = guest.file("snapshot");
    let uri = format!("file:{}", file.display());
    let report = command(guest, &["snapshot"], [uri.clone(), "--snapshot-buffer=4M".into()])?;
    if check {
        let args = ["--balloon", "off", "--incoming", &uri].map(String::from).to_vec();
        let start = Start { guest: kind, memory, args, ..Start::default() };
        let mut copy = Side::start(start, &guest.folder.0, "copy")?;
        copy.wait("the guest out of the file", |status| status["vm"]["place"] == "running")?;
        copy.whole().context("the copy")?;
        end(copy)?;
    }
    std::fs::remove_file(&file)?;
    report["downtime_ms"].as_f64().context("no downtime_ms")
}

/// Branches the guest once, and ends the child. With `check`, all pages of the child are checked
/// before. Returns the time of the pause in ms.
fn branch(guest: &mut Guest, check: bool) -> Result<f64> {
    let dir = guest.file("children");
    let document = command(guest, &["branch"], ["--api-dir".into(), dir.display().to_string()])?;
    let child = &document["children"][0];
    let id = u32::try_from(child["pid"].as_u64().context("no child")?)?;
    let mut child = Side::adopt(id, dir.join("0.log"))?;
    child.connect(&dir.join("0.sock"))?;
    if check {
        child.whole().context("the child")?;
    }
    end(child)?;
    document["pause_ms"].as_f64().context("no pause_ms")
}

/// Ends a process in the ordinary way.
fn end(mut side: Side) -> Result<()> {
    side.command("quit", json!({}))?;
    ensure!(side.ends(PATIENCE)?, "the process does not end");
    Ok(())
}
