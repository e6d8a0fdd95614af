//! Group `moves`: whole migrations with encoded pages.

mod figures;
mod report;
mod spec;

use vmferry_report::json::Document;

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
        let runs = rounds.run(sides, name, |side, _: &[SideRuns]| {
            let link = link.as_ref().map_err(|why| Stop::Skip(why.clone()))?;
            run_side(spec, side, ours, link)
        });
        report::add_case(document, spec, &runs);
    }
}

fn run_side(spec: &CaseSpec, side: Side, ours: &mut dyn OurRunner, link: &Link) -> Result<Run, Stop> {
    enough_memory(spec.memory())?;
    Ok(match side {
        Side::Ours(encoding) => ours.run(spec, encoding, link)?,
        Side::Qemu(encoding) => qemu::stalls(&qemu_spec(spec, encoding), link)?,
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
