//! Returns the text of a step, for a trace.

use super::Happening;
use super::arbiter::ModelArbiter;
use super::step::{Operation, StepFault};
use super::world::{Cargo, ToSourceCargo, ToTargetCargo, World};

pub(super) fn tell(world: &World, (operation, step_fault): Happening) -> String {
    let said = describe_operation(world, operation);
    match step_fault {
        None => said,
        Some(step_fault) => format!("{said} ({})", describe_step_fault(step_fault)),
    }
}

/// Returns the name of a value that is printed as `Name { .. }` or `Name(..)`.
fn name(of: &impl std::fmt::Debug) -> String {
    let text = format!("{of:?}");
    text.split([' ', '(', '{']).next().unwrap_or_default().to_owned()
}

fn describe_operation(world: &World, operation: Operation) -> String {
    let (source, target) = (&world.links[world.source.link], &world.links[world.target.link]);
    match operation {
        Operation::Writes(page) => format!("guest writes {page}"),
        Operation::WritesOnTarget(page) => format!("guest writes {page} on the target"),
        Operation::Touches(page) => format!("guest waits for {page}"),
        Operation::SourceReceives => match source.up.front() {
            Some(ToSourceCargo::Message(message)) => format!("source hears {}", name(&*message.is)),
            Some(ToSourceCargo::Reply(yes)) => {
                format!("source hears that it is {}", if *yes { "heard" } else { "refused" })
            }
            None => "source hears nothing".into(),
        },
        Operation::SourceActs => {
            format!("source does {}", world.source.todo.as_ref().map(name).unwrap_or_default())
        }
        Operation::SourceNoticesLoss => "source notices the loss".into(),
        Operation::Sends => "source sends pages".into(),
        Operation::Serves => "source answers a request".into(),
        Operation::TargetReceives => match target.down.front() {
            Some(ToTargetCargo::Message(message)) => format!("target hears {}", name(&*message.is)),
            _ => "target hears nothing".into(),
        },
        Operation::TargetTakesBulk => format!("target takes {}", cargo(target.bulk.front())),
        Operation::TargetTakesUrgent => format!("target takes urgent {}", cargo(target.urgent.front())),
        Operation::TargetTakesLate => "target takes what the lost link brings".into(),
        Operation::TargetNoticesLoss => "target notices the loss".into(),
        Operation::ThreadNoticesLoss => "a channel of the target ends".into(),
        Operation::TargetLearnsOfLoss => "target hears of it".into(),
        Operation::TargetLearnsOfLast => "target hears that all is here".into(),
        Operation::TargetIsAsked(_) => "source is back".into(),
        Operation::TickSoon => "source tries again".into(),
        Operation::TickAtTimeout => "timeout".into(),
        Operation::TickMuchLater => "long silence".into(),
        Operation::Dials => "source connects".into(),
        Operation::DialFails => "connecting fails".into(),
        Operation::CrashSource => "SOURCE DIES".into(),
        Operation::CrashTarget => "TARGET DIES".into(),
        Operation::Cut => "LINK CUT".into(),
        Operation::CutPages => "PAGE CHANNELS CUT".into(),
        Operation::Cancel
        | Operation::SwitchNow
        | Operation::Pause
        | Operation::Recover
        | Operation::Abandon => {
            format!("operator requests {}", name(&operation).to_lowercase())
        }
        Operation::Arbiter(request, fate) => ModelArbiter::describe(request, fate),
        Operation::LeaseEnds => "what the fence gave runs out".into(),
        Operation::Stop => "operator stops the target".into(),
        Operation::GiveUp => "operator gives up the target".into(),
    }
}

fn cargo(cargo: Option<&Cargo>) -> String {
    match cargo {
        Some(Cargo::Page { page, .. }) => format!("page {page}"),
        Some(Cargo::Barrier(pass)) => format!("the end of pass {pass}"),
        Some(Cargo::Hello) => "a channel".into(),
        Some(Cargo::Digests { .. }) => "digests".into(),
        None => "nothing".into(),
    }
}

fn describe_step_fault(step_fault: StepFault) -> &'static str {
    match step_fault {
        StepFault::SourceDiesBefore(_) | StepFault::TargetDiesBefore(_) => "AND DIES in the middle",
        StepFault::StepFails(_) => "WHICH FAILS",
        StepFault::Busy(_) => "AND FINDS ITS I/O BUSY",
        StepFault::NotSent(_) => "the answer does not leave",
        StepFault::SendFails(_) => "the answer fails to be sent",
        StepFault::BreaksAfter(_) => "LINK CUT as it answers",
        StepFault::Damage => "DAMAGED",
    }
}
