//! `vmferry report`: combines result files into one HTML page.

use crate::usage::Usage;
use crate::{Status, output};
use anyhow::{Context, Result};
use clap::Args;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use vmferry_report::{input, page};

#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// Result files of migrations and benches
    ///
    /// The --json file and the --events file of the same migration become one section of the page.
    #[arg(value_name = "FILE", required = true)]
    pub(crate) files: Vec<PathBuf>,
    /// File for the page (- for standard output)
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: PathBuf,
}

pub(crate) fn report(args: &ReportArgs) -> Result<Status> {
    input::check_count(&args.files).map_err(|error| Usage(error.to_string()))?;
    let mut results = Vec::new();
    for path in &args.files {
        for found in input::read(path)? {
            results.push((name(path, &args.files), found));
        }
    }
    // The output is opened last: an invalid input must not destroy an existing page.
    let mut out = output::open(&args.output)?;
    out.write_all(page(results).as_bytes())
        .and_then(|()| out.flush())
        .with_context(|| format!("cannot write {}", args.output.display()))?;
    Ok(Status::Done)
}

/// Returns the title of a file on the page: its name without `.json`, or its path if several files
/// have the same name.
fn name(path: &Path, all: &[PathBuf]) -> String {
    let of = |path: &Path| {
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        name.strip_suffix(".json").map_or(name.clone(), str::to_owned)
    };
    let distinct: BTreeSet<&PathBuf> = all.iter().collect();
    let own = of(path);
    if distinct.into_iter().filter(|other| of(other) == own).count() > 1 {
        return path.display().to_string();
    }
    own
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_with_the_same_name_get_different_titles() {
        let all = ["a/x.json", "b/x.json", "y.json", "y.json"].map(PathBuf::from);
        assert_eq!(name(&all[0], &all), "a/x.json");
        assert_eq!(name(&all[2], &all), "y");
    }
}
