//! A migration that was predicted, and is scored; and one that follows the prediction as long as it holds.

use super::{Made, make};
use crate::api::{MigrateRequest, Shared};
use crate::choices::ModeArg;
use crate::guest::Machine;
use serde_json::{Value, json};
use std::time::Duration;
use vmferry_engine::plan::{Auto, Expected, ModePlan, Real, Way, score};
use vmferry_engine::{
    AutoConverge, MigrateError, MigrationMode, MigrationState, Report, Settings, TrackerKind, Uri, migrate,
};

/// Plans, moves the guest, and scores the plan; the report, and its `plan`.
///
/// Without `--mode auto` a guest that cannot be predicted is moved all the same, as it was asked for.
pub(crate) fn moved(
    machine: &mut Machine,
    shared: &Shared,
    request: &MigrateRequest,
    (uri, tracker): (&Uri, Option<TrackerKind>),
    settings: &Settings,
) -> Result<(Report, Value), MigrateError> {
    let monitor = shared.monitor();
    let auto = request.mode == ModeArg::Auto;
    let way = super::Way { uri: Some(uri), bandwidth: None };
    let made = match make(machine, &way, tracker, settings, None, (&monitor, &|| monitor.cancelled())) {
        Ok(made) => made,
        // Whoever cancels is told so by the migration.
        Err(error) if auto && !cancelled(&error) => {
            return Err(MigrateError::Vm(format!("no plan can be made: {error:#}")));
        }
        Err(error) => {
            let report = migrate(machine.source(), uri, tracker, settings, &monitor)?;
            return Ok((report, json!({ "failed": format!("{error:#}") })));
        }
    };
    let chosen = if auto { choose(&made, settings) } else { Way::of(settings) };
    let mut own = if auto { follow(&made, chosen, settings) } else { settings.clone() };
    tracing::info!("the plan: {chosen}, because {}", made.plan.reason);
    let mut report = migrate(machine.source(), uri, tracker, &own, &monitor)?;
    let mut refused = None;
    if auto && report.refused_feature {
        // The target has taken nothing: it is asked for what any can do.
        refused = report.error.take();
        own.mode = MigrationMode::Precopy;
        own.auto = own.auto.map(|auto| Auto { postcopy: false, ..auto });
        report = migrate(machine.source(), uri, tracker, &own, &monitor)?;
    }
    let taken = if refused.is_some() { Way::of(&own) } else { chosen };
    let document = document(&made, taken, &report, refused);
    Ok((report, document))
}

fn cancelled(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(MigrateError::Cancelled { .. }))
}

/// What the plan recommends, of what is allowed: whoever did not say that the guest may be slowed does not want that.
fn choose(made: &Made, settings: &Settings) -> Way {
    match made.plan.recommended {
        Way::AutoConverge if settings.auto_converge == AutoConverge::Off => Way::Hybrid,
        other => other,
    }
}

/// The settings for the chosen way, and what may be done when it does not hold.
fn follow(made: &Made, chosen: Way, settings: &Settings) -> Settings {
    let expected = made.plan.of(Way::Precopy).map(|precopy| Expected {
        converges: precopy.probability,
        longest: precopy.total_ms.map_or(Duration::MAX, |total| Duration::from_secs_f64(total.high / 1e3)),
    });
    let auto = Auto { postcopy: true, throttle: settings.auto_converge, expected };
    Settings { auto: Some(auto), ..chosen.settings(settings) }
}

fn document(made: &Made, taken: Way, report: &Report, refused: Option<String>) -> Value {
    let plan = &made.plan;
    let predicted = plan.of(taken);
    // One that somebody called off, or that failed, says nothing about the prediction; one that ran out of time does.
    let ended = matches!(report.state, MigrationState::Completed) || out_of_time(report);
    let error = predicted.filter(|_| ended).map(|predicted| score(predicted, &Real::of(report)));
    json!({
        "mode": taken,
        "predicted": predicted,
        "error": error,
        "real": ended.then(|| Real::of(report)),
        "recommended": plan.recommended,
        "reason": plan.reason,
        "certainty": plan.certainty,
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
