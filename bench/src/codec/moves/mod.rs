//! Group `moves`: whole migrations with encoded pages.

mod figures;
mod report;
mod spec;

use std::io::Write;
use std::path::Path;

use tempfile::NamedTempFile;
use vmferry_codec::Page;
use vmferry_report::json::Document;

use super::contents::Content;
use super::{Options, OurRunner};
use crate::link::{Link, Tools};
use crate::postcopy::Run;
use crate::qemu::{self, QemuSpec};
use crate::rounds::{Rounds, Stop, enough_memory};

pub use spec::{CACHE, CaseSpec, Encoding, OBSERVE, Options as MoveOptions, QemuEncoding, Side, Writer};

pub(super) use report::finish;

/// Runs of one side in one case.
type SideRuns = crate::rounds::SideRuns<Side, Run>;

/// Runs all selected moves.
pub(super) fn run(
    options: &Options,
    ours: &mut dyn OurRunner,
    tools: &Tools,
    rounds: &mut Rounds<'_>,
    document: &mut Document,
) {
    for spec in &options.moves.cases {
        let name = |side| format!("moves/{}/{side}", spec.name);
        let sides: Vec<Side> =
            spec.sides.iter().copied().filter(|side| options.wants(&name(*side))).collect();
        if sides.is_empty() {
            continue;
        }
        let link = Link::of(tools, spec.shape);
        let files = spec.has_files().then(|| files(spec)).transpose();
        let runs = rounds.run(sides, name, |side, _: &[SideRuns]| {
            let skip = |why: &String| Stop::Skip(why.clone());
            let (link, files) = (link.as_ref().map_err(skip)?, files.as_ref().map_err(skip)?);
            run_side(spec, side, ours, link, files.as_ref().map(NamedTempFile::path))
        });
        report::add_case(document, spec, &runs);
    }
}

/// Returns a file with the content of the guest of `spec`, or the reason why this host does not
/// have it.
fn files(spec: &CaseSpec) -> Result<NamedTempFile, String> {
    let pages = usize::try_from(spec.data).unwrap_or(usize::MAX) / size_of::<Page>();
    let content = Content::Files.pages(pages, 0)?;
    let mut file = NamedTempFile::new().map_err(|error| format!("needs a temporary file: {error}"))?;
    let written = file.write_all(content.as_flattened());
    written.map_err(|error| format!("needs {} MiB for a temporary file: {error}", spec.data >> 20))?;
    Ok(file)
}

/// Runs a side over a link, with the content of a file in the guest's memory if there is one.
fn run_side(
    spec: &CaseSpec,
    side: Side,
    ours: &mut dyn OurRunner,
    link: &Link,
    files: Option<&Path>,
) -> Result<Run, Stop> {
    enough_memory(spec.memory())?;
    Ok(match side {
        Side::Ours(encoding) => ours.run(spec, encoding, link, files)?,
        Side::Qemu(encoding) => {
            qemu::stalls(&QemuSpec { initrd: files.map(Path::to_owned), ..qemu_spec(spec, encoding) }, link)?
        }
    })
}

/// Returns the machine and the migration of `spec` for QEMU.
fn qemu_spec(spec: &CaseSpec, encoding: QemuEncoding) -> QemuSpec {
    QemuSpec {
        memory: spec.memory(),
        workload: spec.workload(),
        stream: encoding.stream(),
        downtime_limit: spec.downtime_limit,
        switch_after: Some(spec.limit),
        warm_up: spec.warm_up,
        observe: OBSERVE,
        ..QemuSpec::default()
    }
}

#[cfg(test)]
mod tests;
