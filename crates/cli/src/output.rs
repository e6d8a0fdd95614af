//! Report of a migration for operators, and files for results.

use crate::{Status, codecs};
use anyhow::{Context, Result};
use bytesize::ByteSize;
use rustix::termios::tcgetwinsize;
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write;
use std::path::Path;
use vmferry_client::printable;
use vmferry_engine::{MigrationState, Report};

/// Turns `report` into the report of a migration that failed because of `why`.
pub(crate) fn failed(mut report: Report, why: &str) -> Report {
    report.state = MigrationState::Failed;
    report.outcome = Some("failed".into());
    report.error = Some(why.into());
    report
}

/// Returns when the guest began to run at the target, in ms since the beginning; `None` if it has
/// not, as far as known.
pub(crate) fn left_ms(report: &Value) -> Option<f64> {
    let mut phases = report["phases"].as_array().into_iter().flatten();
    let stopped = phases.rfind(|phase| phase["phase"] == "switchover")?;
    let left = match report["outcome"].as_str() {
        None => report["state"].as_str().is_some_and(|state| state.starts_with("postcopy")),
        Some(outcome) => matches!(outcome, "completed" | "lost" | "unknown"),
    };
    left.then(|| Some(stopped["start_ms"].as_f64()? + stopped["ms"].as_f64()?))?
}

/// Returns the document of a migration that did not begin.
pub(crate) fn not_begun(why: &str) -> Value {
    let report = failed(Report::default(), why);
    serde_json::to_value(report)
        .unwrap_or_else(|_| json!({ "state": "failed", "outcome": "failed", "error": why }))
}

/// Returns the exit status for a migration's document.
pub(crate) fn exit_status(report: &Value) -> Status {
    if report["stands_still"] == true {
        return Status::NotResumed;
    }
    match report["outcome"].as_str() {
        Some("completed") => Status::Done,
        Some("unknown") => Status::Unknown,
        Some("lost") => Status::Lost,
        None if report["state"] == "postcopy-paused" || report["state"] == "unknown" => Status::Unknown,
        _ => Status::Failed,
    }
}

/// Opens the output of `--json` and `--events`: a file, or standard output for `-`.
pub(crate) fn open(path: &Path) -> Result<Box<dyn Write + Send>> {
    if path == Path::new("-") {
        return Ok(Box::new(std::io::stdout()));
    }
    Ok(Box::new(File::create(path).with_context(|| format!("cannot write {}", path.display()))?))
}

/// Opens the output of `--json` to write behind what this process has written to the same file.
pub(crate) fn append(path: &Path) -> Result<Box<dyn Write + Send>> {
    if path == Path::new("-") {
        return open(path);
    }
    let file = File::options().append(true).open(path);
    Ok(Box::new(file.with_context(|| format!("cannot write {}", path.display()))?))
}

/// Returns the error and each cause after a colon, in one line. A cause that the line already
/// contains is not repeated: some errors contain theirs.
pub(crate) fn chain(error: &anyhow::Error) -> String {
    let line = error.chain().fold(String::new(), |line, cause| match cause.to_string() {
        cause if line.is_empty() => cause,
        cause if line.contains(&cause) => line,
        cause => format!("{line}: {cause}"),
    });
    printable(&line)
}

/// Formats a size.
pub(crate) fn bytes(count: u64) -> String {
    ByteSize::b(count).display().iec().to_string()
}

/// Column at which continuation lines of the report begin.
pub(crate) const INDENT: usize = 13;
/// Fewest columns for which lines are broken. A narrower terminal breaks lines itself.
const NARROWEST: usize = 40;

/// Returns the columns of the terminal on standard output or standard error; `None` if it is no
/// terminal.
pub(crate) fn columns(of_stderr: bool) -> Option<usize> {
    let size = if of_stderr { tcgetwinsize(std::io::stderr()) } else { tcgetwinsize(std::io::stdout()) };
    size.ok().map(|size| usize::from(size.ws_col)).filter(|columns| *columns >= NARROWEST)
}

/// Prints the report on standard output or standard error. On a terminal, lines are broken between
/// words.
pub(crate) fn print(document: &Value, on_stderr: bool) -> Result<()> {
    let mut text = Vec::new();
    report(document, &mut text)?;
    let mut text = String::from_utf8_lossy(&text).into_owned();
    if let Some(columns) = columns(on_stderr) {
        text = text.lines().map(|line| fold(line, columns, INDENT) + "\n").collect();
    }
    if on_stderr {
        std::io::stderr().write_all(text.as_bytes())?;
    } else {
        std::io::stdout().write_all(text.as_bytes())?;
    }
    Ok(())
}

/// Prints a message of the command on standard error. On a terminal, lines are broken between
/// words.
pub(crate) fn print_message(message: &str) {
    let text = format!("vmferry: {message}");
    match columns(true) {
        Some(columns) => eprintln!("{}", fold(&text, columns, "vmferry: ".len())),
        None => eprintln!("{text}"),
    }
}

/// Breaks a line between words into lines of at most `columns` characters. Continuation lines are
/// indented.
pub(crate) fn fold(line: &str, columns: usize, indent: usize) -> String {
    let (mut text, mut at) = (String::new(), 0);
    for word in line.split_inclusive(' ') {
        if at + word.trim_end().chars().count() > columns && at > indent {
            text.truncate(text.trim_end().len());
            text.push_str(&format!("\n{:indent$}", ""));
            at = indent;
        }
        text.push_str(word);
        at += word.chars().count();
    }
    text
}

/// Writes the report as text.
fn report(report: &Value, mut out: impl Write) -> Result<()> {
    writeln!(out, "outcome      {}", report["outcome"].as_str().unwrap_or("?"))?;
    if let Some(error) = report["error"].as_str() {
        writeln!(out, "because      {error}")?;
    }
    if count(&report["bytes"]["wire"]) == 0 {
        return Ok(());
    }
    if report["snapshot"].is_object() {
        return snapshot(report, &mut out);
    }
    times(report, &mut out)?;
    guest(report, &mut out)?;
    let known = &report["known_pages"];
    if count(&known["hashes"]) > 0 {
        writeln!(
            out,
            "known pages  {} of {} pages came from files of the target",
            count(&known["known"]),
            count(&known["hashes"])
        )?;
    }
    writeln!(
        out,
        "cpu          source {}, destination {} (engine threads)",
        ms(&report["cpu_ms"]["source"]),
        ms(&report["cpu_ms"]["destination"])
    )?;
    if count(&report["verified_pages"]) > 0 {
        writeln!(
            out,
            "verified     {} pages compared on both sides, {} differ (took {}, not counted as downtime)",
            count(&report["verified_pages"]),
            count(&report["mismatched_pages"]),
            ms(&report["verify_ms"])
        )?;
    }
    Ok(())
}

fn ms(value: &Value) -> String {
    value.as_f64().map_or("?".into(), |ms| format!("{ms:.1} ms"))
}

fn count(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}

/// Writes the report of a snapshot of a running guest.
fn snapshot(report: &Value, out: &mut impl Write) -> Result<()> {
    let (pause, figures) = (&report["downtime"], &report["snapshot"]);
    writeln!(
        out,
        "total        {} (the guest was paused after {})",
        ms(&report["total_ms"]),
        ms(&report["setup_ms"])
    )?;
    let hooks = if figures["hook_ms"].as_f64() > Some(0.0) {
        format!(", hooks {}", ms(&figures["hook_ms"]))
    } else {
        String::new()
    };
    writeln!(
        out,
        "pause        {}: vCPUs {}, device state {}, protection {}, resume {}{hooks}",
        ms(&report["downtime_ms"]),
        ms(&pause["pause_ms"]),
        ms(&pause["device_state_ms"]),
        ms(&pause["last_harvest_ms"]),
        ms(&pause["resume_ms"])
    )?;
    writeln!(
        out,
        "file         {} with {} pages; {} pages are zero or were never touched",
        bytes(count(&report["bytes"]["wire"])),
        count(&report["bytes"]["raw_pages"]),
        count(&report["bytes"]["zero_pages"])
    )?;
    writeln!(
        out,
        "copies       {} pages for {} faults, at most {} of {} at a time; {} faults waited ({} in all, longest {})",
        count(&figures["copied_pages"]),
        count(&figures["faults"]),
        bytes(count(&figures["buffer_peak_bytes"])),
        bytes(count(&figures["buffer_bytes"])),
        count(&figures["waits"]),
        ms(&figures["wait_ms"]),
        ms(&figures["longest_wait_ms"])
    )?;
    guest(report, out)?;
    if count(&report["verified_pages"]) > 0 {
        writeln!(
            out,
            "verified     {} pages of the file ({})",
            count(&report["verified_pages"]),
            ms(&report["verify_ms"])
        )?;
    }
    Ok(())
}

/// Writes durations and the transferred data.
fn times(report: &Value, out: &mut impl Write) -> Result<()> {
    let part = |name: &str| {
        format!("{} {}", name.trim_end_matches("_ms").replace('_', " "), ms(&report["downtime"][name]))
    };
    writeln!(out, "total        {} (setup {})", ms(&report["total_ms"]), ms(&report["setup_ms"]))?;
    // A guest that was never stopped has no downtime line.
    if report["outcome"] == "completed" || report["downtime_ms"].as_f64().is_some_and(|ms| ms > 0.0) {
        writeln!(
            out,
            "downtime     {} (predicted {}): {}",
            ms(&report["downtime_ms"]),
            ms(&report["predicted_downtime_ms"]),
            vmferry_report::migration::DOWNTIME_PARTS.map(part).join(", ")
        )?;
    }
    if let times @ 1.. = count(&report["put_off"]) {
        writeln!(
            out,
            "deferred     {times} times: the switchover was deferred, because the guest's I/O did not quiesce within the downtime limit ({} in all)",
            ms(&report["put_off_ms"])
        )?;
    }
    let data = &report["bytes"];
    let passes = report["passes"].as_array().map_or(0, Vec::len);
    writeln!(
        out,
        "sent         {} in {passes} pass{} at {:.0} Mbit/s: {} pages with content, {} as zeros or never touched",
        bytes(count(&data["wire"])),
        if passes == 1 { "" } else { "es" },
        report["throughput_mbps"].as_f64().unwrap_or(0.0),
        count(&data["raw_pages"]),
        count(&data["zero_pages"]),
    )?;
    encodings(report, out)?;
    let free = &report["free_pages"];
    if count(&free["reports"]) > 0 {
        writeln!(
            out,
            "free         {} pages left out; first answer after {}, {} answers, {} of them of no use",
            count(&data["free_pages_skipped"]),
            ms(&free["first_answer_ms"]),
            count(&free["reports"]),
            count(&free["dropped_reports"]),
        )?;
    }
    Ok(())
}

/// Writes the bytes of encoded pages and the cost of the encoding.
fn encodings(report: &Value, out: &mut impl Write) -> Result<()> {
    for figures in codecs::used(&report["codecs"]) {
        let (name, cpu) = (figures.name, figures.cpu_ms);
        match figures.percent() {
            Some(percent) => writeln!(
                out,
                "{name:<12} {} pages: {} instead of {} ({percent:.0} %), {cpu:.1} ms of CPU",
                figures.pages,
                bytes(figures.bytes),
                bytes(figures.raw_bytes),
            )?,
            None => writeln!(out, "{name:<12} no page became smaller, {cpu:.1} ms of CPU")?,
        }
    }
    if let Some(cache) = report.get("delta_cache").filter(|cache| !cache.is_null()) {
        writeln!(
            out,
            "delta cache  {} hits, {} misses, {} deltas too long, {} evicted; {} saved; {} of memory, at most {}",
            count(&cache["hits"]),
            count(&cache["misses"]),
            count(&cache["large"]),
            count(&cache["evicted"]),
            bytes(count(&cache["saved_bytes"])),
            bytes(count(&cache["memory_bytes"])),
            bytes(count(&cache["limit_bytes"])),
        )?;
    }
    Ok(())
}

/// Writes the effects on the guest and their causes.
fn guest(report: &Value, out: &mut impl Write) -> Result<()> {
    let guest = &report["guest"];
    if let (Some(before), Some(during)) =
        (guest["before_writes_per_s"].as_f64(), guest["during_writes_per_s"].as_f64())
    {
        let kept = if before > 0.0 { during / before * 100.0 } else { 100.0 };
        writeln!(
            out,
            "guest        {before:.0} writes/s before, {during:.0} during ({kept:.0} %), longest stall {} us",
            count(&guest["stall_max_us"])
        )?;
    }
    if let Some(postcopy) = report.get("postcopy").filter(|postcopy| !postcopy.is_null()) {
        let us = |name: &str| postcopy[name].as_f64().unwrap_or(0.0);
        writeln!(
            out,
            "postcopy     {} faults, mean {:.0} us, median {:.0}, 99 % within {:.0}, longest {:.0}; {} pages came, {} asked for \
             ahead ({} used), {} twice; link lost {} times",
            count(&postcopy["faults"]),
            us("mean_us"),
            us("p50_us"),
            us("p99_us"),
            us("max_us"),
            count(&postcopy["pages"]),
            count(&postcopy["prefetched"]),
            count(&postcopy["prefetched_used"]),
            count(&postcopy["duplicates"]),
            count(&report["interruptions"]),
        )?;
    }
    if let Some(ring) = report.get("ring").filter(|ring| !ring.is_null()) {
        writeln!(
            out,
            "ring         {} entries, {}: full {} times, vCPUs were stopped for {} us, {} harvests, reaper {}",
            count(&ring["entries"]),
            ring["policy"].as_str().unwrap_or("?"),
            count(&ring["full_exits"]),
            count(&ring["full_stall_us"]),
            count(&ring["harvests"]),
            ms(&ring["reaper_cpu_ms"])
        )?;
        if let Some(error) = ring["reaper"]["error"].as_str() {
            writeln!(out, "reaper       failed, and vCPUs emptied their full rings themselves: {error}")?;
        }
    }
    if let Some(throttle) = report.get("throttle").filter(|throttle| !throttle.is_null()) {
        let held = throttle["held_ms"].as_array().map_or(&[][..], Vec::as_slice);
        writeln!(
            out,
            "throttle     up to {:.0} % of a vCPU's time; stopped for {}",
            throttle["highest_share"].as_f64().unwrap_or(0.0) * 100.0,
            held.iter().map(ms).collect::<Vec<_>>().join(", ")
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn lines_are_broken_between_words() {
        let line = "downtime     31.2 ms (predicted ?): pause 1.1 ms, last harvest 0.0 ms, last pages 0.0 ms";
        assert_eq!(fold(line, 200, INDENT), line);
        let folded = fold(line, 60, INDENT);
        let expected = "downtime     31.2 ms (predicted ?): pause 1.1 ms, last\n             harvest 0.0 ms, last pages 0.0 ms";
        assert_eq!(folded, expected);
        assert_eq!(fold(&"x".repeat(90), 40, 0), "x".repeat(90));
        assert_eq!(fold("aa bb", 3, 0), "aa\nbb");
    }

    #[test]
    fn cause_is_not_repeated() {
        let once = anyhow::anyhow!("refused").context("cannot listen: refused").context("--api");
        assert_eq!(chain(&once), "--api: cannot listen: refused");
        assert_eq!(chain(&anyhow::anyhow!("b").context("a")), "a: b");
    }

    /// Returns the text of a report with a pass, and with these `fields`.
    fn text(fields: Value) -> String {
        let mut document = json!({ "bytes": { "wire": 4096 }, "passes": [{}] });
        document.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let mut out = Vec::new();
        report(&document, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn failed_reaper_is_shown_with_its_error() {
        let shown = |reaper: Value| text(json!({ "outcome": "completed", "ring": { "reaper": reaper } }));
        let failed = shown(json!({ "state": "failed", "error": "its policy panicked: planted" }));
        let why = "reaper       failed, and vCPUs emptied their full rings themselves: its policy panicked: planted";
        assert!(failed.lines().any(|line| line == why), "{failed}");
        assert!(!shown(json!({ "state": "off" })).contains("failed"));
    }

    #[test]
    fn encoded_pages_are_shown_with_their_bytes_and_cpu_time() {
        let mut out = Vec::new();
        report(&codecs::tests::document(), &mut out).unwrap();
        let shown = String::from_utf8(out).unwrap();
        for line in [
            "lz4          25600 pages: 40.0 MiB instead of 100.0 MiB (40 %), 250.0 ms of CPU",
            "zstd         no page became smaller, 20.0 ms of CPU",
            "delta        51200 pages: 2.0 MiB instead of 200.0 MiB (1 %), 1500.0 ms of CPU",
            "delta cache  51200 hits, 25600 misses, 12 deltas too long, 7 evicted; 198.0 MiB saved; \
             48.0 MiB of memory, at most 64.0 MiB",
        ] {
            assert!(shown.lines().any(|own| own == line), "{line} is not in\n{shown}");
        }
        let raw = text(json!({ "codecs": null, "delta_cache": null }));
        assert!(!raw.contains("lz4") && !raw.contains("delta"), "{raw}");
    }

    #[test]
    fn guest_that_was_never_stopped_has_no_downtime() {
        let shown =
            |outcome: &str, downtime: f64| text(json!({ "outcome": outcome, "downtime_ms": downtime }));
        assert!(!shown("cancelled", 0.0).contains("downtime"));
        assert!(shown("failed", 1.5).contains("downtime     1.5 ms"));
        let completed = shown("completed", 0.0);
        assert!(
            completed.contains("downtime     0.0 ms") && completed.contains("in 1 pass at"),
            "{completed}"
        );
    }
}
