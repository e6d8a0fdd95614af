//! Result files, and the errors of files that do not contain results.

use super::migration::{Migration, Recorder};
use crate::json::Document;
use serde_json::Value;
use serde_json::error::Category;
use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Maximum number of files on one page. It is more than a reader can compare, and less than a
/// browser can handle.
pub const MOST_FILES: usize = 500;
/// Maximum length of a file in bytes, which is sufficient for the events of some hours.
const MOST_BYTES: u64 = 1 << 30;
/// Maximum length of a JSON value in bytes. The largest results, which are those of whole benches,
/// have a third of a megabyte.
const MOST_VALUE_BYTES: u64 = 16 << 20;
/// Maximum number of results in one file.
const MOST_RESULTS: usize = 100;

/// Error of a file that cannot be shown.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InputError {
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Error that the host returned.
        source: io::Error,
    },
    /// The path is not a regular file with content.
    #[error("{} is {what}; use a result file of a migration or a bench", path.display())]
    NoFile {
        /// Path of the file.
        path: PathBuf,
        /// Kind of the file.
        what: &'static str,
    },
    /// The file, or a value in it, is longer than any result can be.
    #[error("{}: {what} of more than {limit} bytes; this is not a result of vmferry", path.display())]
    TooLarge {
        /// Path of the file.
        path: PathBuf,
        /// Part of the file that is too long.
        what: &'static str,
        /// Maximum length in bytes.
        limit: u64,
    },
    /// The file ends within a value.
    #[error(
        "{} ends in the middle of its JSON, at line {line}: the program that wrote the file was stopped, or its disk was full; \
         delete the incomplete line, or write the file again", path.display()
    )]
    Truncated {
        /// Path of the file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
    },
    /// The file is not JSON.
    #[error("{} is not JSON", path.display())]
    NoJson {
        /// Path of the file.
        path: PathBuf,
        /// Position and error of the JSON parser.
        source: serde_json::Error,
    },
    /// The JSON is not a result.
    #[error("{}, value {number}: {why}; use result files of migrations, status queries or benches", path.display())]
    Other {
        /// Path of the file.
        path: PathBuf,
        /// Number of the value in the file, from 1.
        number: usize,
        /// Reason why the value is not a result.
        why: String,
    },
    /// A page cannot hold this many files.
    #[error("{count} files are more than the {MOST_FILES} that a page holds; {} is the first too many", first.display())]
    TooMany {
        /// Number of files.
        count: usize,
        /// First file that exceeds the limit.
        first: PathBuf,
    },
}

/// Result in a file.
#[derive(Debug, Clone)]
pub enum Found {
    /// Result of one migration.
    Migration(Box<Migration>),
    /// Result of a bench.
    Bench(Box<Document>),
}

/// Checks that a page can hold the results of all `paths`.
///
/// # Errors
/// Returns [`InputError::TooMany`] if there are more than [`MOST_FILES`] paths.
pub fn check_count(paths: &[PathBuf]) -> Result<(), InputError> {
    match paths.get(MOST_FILES) {
        Some(first) => Err(InputError::TooMany { count: paths.len(), first: first.clone() }),
        None => Ok(()),
    }
}

/// Returns the results in a file. The file contains documents of benches and migrations, one after
/// another, or the lines that the option `--events` writes.
///
/// # Errors
/// Returns an [`InputError`] if the file cannot be read, or if it does not contain results.
pub fn read(path: &Path) -> Result<Vec<Found>, InputError> {
    let unreadable = |source| InputError::Unreadable { path: path.into(), source };
    // Check the type of the file before it is opened, because opening a pipe would wait for its
    // writer.
    let metadata = std::fs::metadata(path).map_err(unreadable)?;
    if !metadata.is_file() {
        let what = if metadata.is_dir() { "a directory" } else { "not a regular file" };
        return Err(InputError::NoFile { path: path.into(), what });
    }
    if metadata.len() > MOST_BYTES {
        return Err(InputError::TooLarge { path: path.into(), what: "a file", limit: MOST_BYTES });
    }
    parse(path, File::open(path).map_err(unreadable)?)
}

fn parse(path: &Path, from: impl Read) -> Result<Vec<Found>, InputError> {
    let used = Rc::new(Cell::new(0));
    let limited = Limited { inner: BufReader::new(from.take(MOST_BYTES)), used: Rc::clone(&used) };
    let mut found = Vec::new();
    let mut recorder = Recorder::default();
    let values = serde_json::Deserializer::from_reader(limited).into_iter::<Value>();
    for (number, value) in (1..).zip(values) {
        let value = value.map_err(|error| failure(path, error, used.get()))?;
        used.set(0);
        let other = |why| InputError::Other { path: path.into(), number, why };
        if value.get("bench").is_some() && value.get("cases").is_some() {
            let document: Document = serde_json::from_value(value)
                .map_err(|error| other(format!("the value looks like a bench's result, but {error}")))?;
            found.push(Found::Bench(Box::new(tamed(document))));
        } else if let Some(migration) = recorder.take(&value).map_err(other)? {
            found.push(Found::Migration(Box::new(migration)));
        }
        if found.len() > MOST_RESULTS {
            return Err(other(format!("more than {MOST_RESULTS} results in one file")));
        }
    }
    found.extend(recorder.finish().map(|migration| Found::Migration(Box::new(migration))));
    if found.is_empty() {
        return Err(InputError::NoFile { path: path.into(), what: "empty" });
    }
    Ok(found)
}

fn failure(path: &Path, error: serde_json::Error, used: u64) -> InputError {
    let path = path.to_owned();
    match error.classify() {
        Category::Io if used > MOST_VALUE_BYTES => {
            InputError::TooLarge { path, what: "a value", limit: MOST_VALUE_BYTES }
        }
        Category::Io => InputError::Unreadable { path, source: error.into() },
        Category::Eof => InputError::Truncated { path, line: error.line() },
        Category::Syntax | Category::Data => InputError::NoJson { path, source: error },
    }
}

/// Removes numbers that no measurement can have, because they would distort every axis.
fn tamed(mut document: Document) -> Document {
    for case in &mut document.cases {
        case.metrics.retain(|_, value| value.is_finite() && value.abs() < 1e18);
        case.series.take_if(|series| {
            let times = [series.from_s, series.step_s, series.end_s];
            times.iter().any(|time| !time.is_finite() || time.abs() > 1e9)
        });
    }
    document
}

/// Reader that fails when a value becomes longer than any result.
struct Limited<R> {
    inner: R,
    /// Number of bytes since the last value.
    used: Rc<Cell<u64>>,
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if self.used.get() > MOST_VALUE_BYTES {
            return Err(io::Error::other("the value is too long"));
        }
        let read = self.inner.read(to)?;
        self.used.set(self.used.get() + read as u64);
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        let error = parse(Path::new("some.json"), text.as_bytes()).unwrap_err();
        let cause = std::error::Error::source(&error).map_or(String::new(), |cause| format!(": {cause}"));
        format!("{error}{cause}")
    }

    #[test]
    fn values_that_are_not_results_are_refused_with_the_file_name() {
        let bench = r#"{"bench": "scan", "cases": 7}"#;
        for (text, want) in [
            ("", "is empty"),
            ("hello", "is not JSON"),
            ("\u{0}\u{1}", "is not JSON"),
            ("{\"state\": \"precopy\", ", "ends in the middle of its JSON, at line 1"),
            ("[1, 2]", "value 1: "),
            ("{\"state\": null, \"outcome\": null}", "no migration"),
            ("{\"error\": {\"desc\": \"x\"}}", "value 1: "),
            (bench, "looks like a bench's result, but"),
            (&"[".repeat(10_000), "is not JSON: recursion limit"),
            (&format!("\"{}", "x".repeat(17 << 20)), "a value of more than 16777216 bytes"),
        ] {
            let error = error(text);
            assert!(error.contains("some.json") && error.contains(want), "{error}: {want}");
        }
        // The error is in the third line, after two valid ones.
        let line = r#"{"state": "completed", "outcome": "completed", "total_ms": 5}"#;
        assert!(error(&format!("{line}\n{line}\n{{\"state\"")).contains("line 3"));
    }

    #[test]
    fn files_of_other_kinds_and_too_many_are_refused() {
        for (path, want) in [
            ("/nowhere/x.json", "cannot read"),
            ("/dev", "is a directory"),
            ("/dev/zero", "not a regular file"),
        ] {
            let error = read(Path::new(path)).unwrap_err().to_string();
            assert!(error.contains(path) && error.contains(want), "{error}");
        }
        let paths: Vec<PathBuf> = (0..=MOST_FILES).map(|n| format!("{n}.json").into()).collect();
        assert!(check_count(&paths[1..]).is_ok());
        assert!(check_count(&paths).unwrap_err().to_string().contains("500.json is the first too many"));
    }

    #[test]
    fn file_may_have_several_results() {
        let text = r#"{"state": "completed", "outcome": "completed", "total_ms": 5}
            {"state": "failed", "outcome": "failed", "error": "no route"}"#;
        assert_eq!(parse(Path::new("x"), text.as_bytes()).unwrap().len(), 2);
    }
}
