//! `vmferry snapshot`: makes a running vmferry write a snapshot of its guest, and watches it.

use crate::api::{Client, SnapshotRequest};
use crate::args::{heading, size, time};
use crate::migrate::{begin, watch};
use crate::usage::wrong_usage;
use crate::{Status, ctrl_c, output};
use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmferry_engine::{Merged, Uri, merge_snapshot};

/// Interval at which the end of a hook is checked.
const LOOK: Duration = Duration::from_millis(1);

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct SnapshotArgs {
    #[command(subcommand)]
    command: Option<SnapshotCommand>,
    #[command(flatten)]
    take: Option<TakeArgs>,
}

#[derive(Debug, Subcommand)]
enum SnapshotCommand {
    /// Write an increment and the snapshots that it is based on into one complete file
    ///
    /// The files that are merged stay as they are. The new file can take the place of the
    /// increment.
    Merge(MergeArgs),
}

#[derive(Debug, Args)]
struct MergeArgs {
    /// Increment, as file:PATH
    from: Uri,
    /// File to create, as file:PATH
    ///
    /// An existing file is never replaced.
    to: Uri,
    /// Write the result as JSON to this file (- for standard output)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct TakeArgs {
    /// Control socket of the process whose guest is written
    #[arg(long, value_name = "PATH")]
    api: PathBuf,
    /// File to create, as file:PATH
    ///
    /// An existing file is never replaced. The file is restored with `run --incoming file:PATH`.
    uri: Uri,
    /// Write only the pages that differ from those of this snapshot
    ///
    /// The snapshot must be in the folder of the new file, and must be kept: a restore of the new
    /// file reads the other pages from it. `vmferry snapshot merge` makes one file of both.
    #[arg(long, value_name = "FILE", help_heading = heading::TRANSFER)]
    since: Option<PathBuf>,
    /// Memory for pages that the guest writes before they are in the file
    ///
    /// If the buffer is full, a vCPU that writes such a page waits until the page was copied. The
    /// report contains the waits.
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = size, help_heading = heading::TRANSFER)]
    snapshot_buffer: u64,
    /// Write at most this rate, such as 250M/s [default: no limit]
    #[arg(long, value_name = "RATE", value_parser = crate::args::rate, help_heading = heading::TRANSFER)]
    max_bandwidth: Option<u64>,
    /// Read the file back and compare it with the copied pages
    #[arg(long, help_heading = heading::MIGRATION)]
    verify: bool,
    /// Command of the shell that runs while the guest is paused
    ///
    /// The command runs after the state of the guest was saved. Take a snapshot of the guest's
    /// disks with it. If the command fails, no file is written.
    #[arg(long, value_name = "COMMAND", help_heading = heading::HOOKS)]
    freeze_hook: Option<String>,
    /// Command of the shell that runs after the freeze hook
    ///
    /// The command runs while the guest is still paused, also if the freeze hook has failed. If the
    /// freeze hook took too long, or the snapshot was cancelled, the guest already runs.
    #[arg(long, value_name = "COMMAND", help_heading = heading::HOOKS)]
    thaw_hook: Option<String>,
    /// Time for which the hooks may keep the guest paused
    #[arg(long, value_name = "T", default_value = "10s", value_parser = time, help_heading = heading::HOOKS)]
    hook_timeout: Duration,
    /// Write the report as JSON to this file (- for standard output)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl TakeArgs {
    fn has_hooks(&self) -> bool {
        self.freeze_hook.is_some() || self.thaw_hook.is_some()
    }

    fn request(&self) -> SnapshotRequest {
        let limit = || u64::try_from(self.hook_timeout.as_millis()).unwrap_or(u64::MAX);
        SnapshotRequest {
            uri: self.uri.to_string(),
            since: self.since.clone(),
            snapshot_buffer: Some(self.snapshot_buffer),
            max_bandwidth: self.max_bandwidth,
            verify: self.verify,
            hook_limit_ms: self.has_hooks().then(limit),
        }
    }
}

pub(crate) fn snapshot(args: &SnapshotArgs) -> Result<Status> {
    match (&args.command, &args.take) {
        (Some(SnapshotCommand::Merge(args)), _) => merge(args),
        (None, Some(args)) => take(args),
        (None, None) => wrong_usage!("a snapshot needs --api and a file; see `vmferry snapshot --help`"),
    }
}

fn merge(args: &MergeArgs) -> Result<Status> {
    let (Uri::File(from), Uri::File(to)) = (&args.from, &args.to) else {
        wrong_usage!("snapshots are merged from a file into a file; use file:PATH for both");
    };
    let json_out = args.json.as_deref().map(output::open).transpose()?;
    let cancelled = Arc::new(AtomicBool::new(false));
    let pressed = Arc::clone(&cancelled);
    ctrlc::set_handler(move || pressed.store(true, Ordering::Relaxed)).context("cannot catch Ctrl-C")?;
    let Some(merged) = merge_snapshot(from, to, &cancelled)? else {
        output::print_message(&format!("{} was not written: cancelled on request", args.to));
        return Ok(Status::Failed);
    };
    let Merged { id, files, pages, bytes, .. } = merged;
    match json_out {
        Some(mut out) => {
            let result = json!({ "id": id, "files": files, "pages": pages, "bytes": bytes });
            writeln!(out, "{}", serde_json::to_string_pretty(&result)?)?;
        }
        None => println!("{}: {pages} pages of {files} files, {bytes} bytes", args.to),
    }
    Ok(Status::Done)
}

fn take(args: &TakeArgs) -> Result<Status> {
    if !matches!(args.uri, Uri::File(_)) {
        wrong_usage!("a snapshot is written to a file, not to {}; use file:PATH", args.uri);
    }
    // The output is opened first, so that a mistyped name fails at once.
    let json_out = args.json.as_deref().map(output::open).transpose()?;
    let stage = ctrl_c::caught(&args.api)?;
    let mut client = Client::connect(&args.api)?;
    let unanswered = begin(&mut client, "snapshot", serde_json::to_value(args.request())?)?;
    stage.begun.store(true, Ordering::Release);
    if unanswered.is_none() && args.has_hooks() {
        stage.hooks.store(true, Ordering::Release);
        hooks(args, &mut client)?;
        stage.hooks.store(false, Ordering::Release);
    }
    let report =
        unanswered.unwrap_or_else(|| watch(&mut client, args.max_bandwidth, &stage.interrupted, &mut |_| {}));
    let status = output::exit_status(&report);
    let _ = stage.ended.set(status);
    if let Err(error) = print_report(json_out, &report, status) {
        output::print_message(&format!("cannot write the report: {}", output::chain(&error)));
    }
    if status != Status::Done {
        output::print_message(&advice(&report, &args.uri));
    }
    Ok(status)
}

fn print_report(json_out: Option<impl Write>, report: &Value, status: Status) -> Result<()> {
    match json_out {
        Some(mut out) => writeln!(out, "{}", serde_json::to_string_pretty(report)?)?,
        None => {
            let mut shown = report.clone();
            if status != Status::Done {
                // The advice that follows contains the error.
                shown["error"].take();
            }
            output::print(&shown, false)?;
        }
    }
    Ok(())
}

/// Returns where the guest is after a snapshot that was not completed.
fn advice(report: &Value, uri: &Uri) -> String {
    let why = report["error"].as_str().unwrap_or("no reason was given");
    match report["outcome"].as_str() {
        _ if report["stands_still"] == true => format!(
            "{uri} was not written. The guest is stopped because it could not be resumed: {why}. `vmferry resume` tries again"
        ),
        Some("cancelled") => format!("{uri} was not written ({why}); the guest runs on"),
        Some("unknown") if report["source_silent"] == true => format!(
            "it is not known whether {uri} was written: the process of the guest does not answer ({why}), and may still write it. A file \
             with this name is complete. `vmferry status` shows whether the process answers again"
        ),
        Some("unknown") => format!(
            "it is not known whether {uri} was written: the process of the guest is gone ({why}). A file with this name is complete"
        ),
        _ => format!("{uri} was not written, and the guest runs on: {why}"),
    }
}

/// Executes the hooks as soon as the guest is paused, and ends the pause.
fn hooks(args: &TakeArgs, client: &mut Client) -> Result<()> {
    loop {
        let answer = client.call("snapshot-pause", json!({}))?;
        match answer["paused"].as_bool() {
            Some(true) => break,
            Some(false) => {}
            // The snapshot has ended before the pause, as the status says.
            None => return Ok(()),
        }
    }
    let frozen = run_hook("freeze", args.freeze_hook.as_deref(), args.hook_timeout);
    // The process of the guest limits the pause. The thaw hook has the whole time again, because
    // storage would stay frozen if it did not run to its end.
    let thawed = run_hook("thaw", args.thaw_hook.as_deref(), args.hook_timeout);
    let failed = frozen.and(thawed).err().map(|error| output::chain(&error));
    // If the time limit has expired, the answer is refused, and the status has the reason.
    let _ = client.call("snapshot-resume", json!({ "error": failed }));
    Ok(())
}

/// Executes `command` with the shell, for at most `longest`.
fn run_hook(name: &str, command: Option<&str>, longest: Duration) -> Result<()> {
    let Some(command) = command else { return Ok(()) };
    let failed = || format!("the {name} hook `{command}`");
    let mut child = Command::new("/bin/sh")
        .args(["-c", command])
        .stdin(Stdio::null())
        // Standard output may be the report.
        .stdout(std::io::stderr())
        // A group of its own, so that all processes of the hook can be ended.
        .process_group(0)
        .spawn()
        .with_context(failed)?;
    let status = wait(&mut child, Instant::now() + longest).with_context(failed)?;
    if !status.success() {
        return Err(anyhow::anyhow!("{} failed: {status}", failed()));
    }
    Ok(())
}

/// Waits for the end of `child`, and ends all of its group at the time `until`.
fn wait(child: &mut Child, until: Instant) -> Result<ExitStatus> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if Instant::now() >= until {
            let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
            child.wait()?;
            anyhow::bail!("it took too long");
        }
        std::thread::sleep(LOOK);
    }
}
