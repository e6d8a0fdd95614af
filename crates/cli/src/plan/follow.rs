//! Migrations that are predicted and scored, and migrations that follow the prediction as long as
//! it holds.

use super::{PlanResult, make};
use crate::api::{MigrateRequest, RunContext};
use crate::choices::ModeArg;
use crate::guest::Machine;
use serde_json::{Value, json};
use std::time::Duration;
use vmferry_core::VmError;
use vmferry_engine::plan::{ActualFigures, Auto, Expected, ModePlan, Strategy, score};
use vmferry_engine::{
    AutoConverge, MigrateError, MigrationMode, MigrationState, Report, Settings, TrackerKind, Uri, migrate,
};

/// Plans, calls `prepare`, migrates the guest, and scores the plan. Returns the report and its
/// member `plan`.
///
/// Without `--mode auto`, a guest that cannot be predicted is migrated as requested.
pub(crate) fn moved(
    machine: &mut Machine,
    shared: &RunContext,
    request: &MigrateRequest,
    (uri, tracker): (&Uri, Option<TrackerKind>),
    settings: &Settings,
    prepare: &mut dyn FnMut(),
) -> Result<(Report, Value), MigrateError> {
    let handle = shared.handle();
    let auto = request.mode == ModeArg::Auto;
    let link_source = super::LinkSource { uri: Some(uri), bandwidth: None };
    let made = match make(machine, &link_source, tracker, settings, None, (&handle, &|| handle.cancelled())) {
        Ok(made) => made,
        // A cancelled planning is reported by the migration, which is cancelled, too.
        Err(error) if auto && !cancelled(&error) => {
            return Err(MigrateError::Vm(VmError::new(error.context("no plan can be made"))));
        }
        Err(error) => {
            shared.end_planning();
            prepare();
            let report = migrate(machine.source(), uri, tracker, settings, &handle)?;
            return Ok((report, json!({ "failed": format!("{error:#}") })));
        }
    };
    let chosen = if auto { choose(&made, settings) } else { Strategy::of(settings) };
    let mut own = if auto { follow(&made, chosen, settings) } else { settings.clone() };
    tracing::info!("the plan: {chosen}, because {}", made.plan.reason);
    shared.end_planning();
    prepare();
    let mut report = migrate(machine.source(), uri, tracker, &own, &handle)?;
    let mut refused = None;
    if auto && report.refused_feature {
        // The target has taken nothing. The second attempt uses only what every target supports.
        refused = report.error.take();
        own.mode = MigrationMode::Precopy;
        own.auto = own.auto.map(|auto| Auto { postcopy: false, ..auto });
        report = migrate(machine.source(), uri, tracker, &own, &handle)?;
    }
    let taken = if refused.is_some() { Strategy::of(&own) } else { chosen };
    let document = document(&made, taken, &report, refused);
    Ok((report, document))
}

fn cancelled(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(MigrateError::Cancelled { .. }))
}

/// Returns the recommended way, restricted to what is allowed: the guest is only slowed if the
/// request permits it.
fn choose(made: &PlanResult, settings: &Settings) -> Strategy {
    match made.plan.recommended {
        Strategy::AutoConverge if settings.auto_converge == AutoConverge::Off => Strategy::Hybrid,
        other => other,
    }
}

/// Returns the settings for the chosen way, and for the case that the plan does not hold.
fn follow(made: &PlanResult, chosen: Strategy, settings: &Settings) -> Settings {
    let expected = made.plan.of(Strategy::Precopy).map(|precopy| Expected {
        converges: precopy.probability,
        longest: precopy.total_ms.map_or(Duration::MAX, |total| Duration::from_secs_f64(total.high / 1e3)),
    });
    let auto = Auto { postcopy: true, throttle: settings.auto_converge, expected };
    Settings { auto: Some(auto), ..chosen.settings(settings) }
}

fn document(made: &PlanResult, taken: Strategy, report: &Report, refused: Option<String>) -> Value {
    let plan = &made.plan;
    let predicted = plan.of(taken);
    // A cancelled or failed migration says nothing about the prediction, but one whose time limit
    // expired does.
    let ended = matches!(report.state, MigrationState::Completed) || out_of_time(report);
    let error = predicted.filter(|_| ended).map(|predicted| score(predicted, &ActualFigures::of(report)));
    json!({
        "mode": taken,
        "predicted": predicted,
        "error": error,
        "real": ended.then(|| ActualFigures::of(report)),
        "recommended": plan.recommended,
        "reason": plan.reason,
        "certainty": plan.certainty,
        "codecs": plan.codecs,
        "encoding": plan.encoding,
        "others": plan.modes.iter().filter(|mode| mode.mode != taken).collect::<Vec<&ModePlan>>(),
        "refused": refused,
        "guest_cost": made.cost,
        "busy": made.busy,
        "tracker": made.tracker,
        "inputs": plan.inputs,
    })
}

fn out_of_time(report: &Report) -> bool {
    report.state == MigrationState::Cancelled
        && report.error.as_deref().is_some_and(|why| why.starts_with("not done within"))
}
