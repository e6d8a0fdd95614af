//! Returns the text of a step, for a trace.

use super::Happening;
use super::fence::Fence;
use super::step::{Deed, Mishap};
use super::world::{Cargo, Down, Up, World};

pub(super) fn tell(world: &World, (deed, mishap): Happening) -> String {
    let said = deed_told(world, deed);
    match mishap {
        None => said,
        Some(mishap) => format!("{said} ({})", mishap_told(mishap)),
    }
}

/// Returns the name of a value that is printed as `Name { .. }` or `Name(..)`.
fn name(of: &impl std::fmt::Debug) -> String {
    let text = format!("{of:?}");
    text.split([' ', '(', '{']).next().unwrap_or_default().to_owned()
}

fn deed_told(world: &World, deed: Deed) -> String {
    let (here, there) = (&world.links[world.here.link], &world.links[world.there.link]);
    match deed {
        Deed::Writes(page) => format!("guest writes {page}"),
        Deed::WritesThere(page) => format!("guest writes {page} on the target"),
        Deed::Touches(page) => format!("guest waits for {page}"),
        Deed::SourceHears => match here.up.front() {
            Some(Up::Message(message)) => format!("source hears {}", name(&*message.is)),
            Some(Up::Reply(yes)) => {
                format!("source hears that it is {}", if *yes { "heard" } else { "refused" })
            }
            None => "source hears nothing".into(),
        },
        Deed::SourceActs => format!("source does {}", world.here.todo.as_ref().map(name).unwrap_or_default()),
        Deed::SourceNoticesLoss => "source notices the loss".into(),
        Deed::Sends => "source sends pages".into(),
        Deed::Serves => "source answers a request".into(),
        Deed::TargetHears => match there.down.front() {
            Some(Down::Message(message)) => format!("target hears {}", name(&*message.is)),
            _ => "target hears nothing".into(),
        },
        Deed::TargetTakesBulk => format!("target takes {}", cargo(there.bulk.front())),
        Deed::TargetTakesUrgent => format!("target takes urgent {}", cargo(there.urgent.front())),
        Deed::TargetTakesLate => "target takes what the lost link brings".into(),
        Deed::TargetNoticesLoss => "target notices the loss".into(),
        Deed::ThreadNoticesLoss => "a channel of the target ends".into(),
        Deed::TargetHearsOfLoss => "target hears of it".into(),
        Deed::TargetHearsOfLast => "target hears that all is here".into(),
        Deed::TargetIsAsked(_) => "source is back".into(),
        Deed::TickSoon => "source tries again".into(),
        Deed::TickAtTimeout => "timeout".into(),
        Deed::TickMuchLater => "long silence".into(),
        Deed::Dials => "source connects".into(),
        Deed::DialFails => "connecting fails".into(),
        Deed::CrashSource => "SOURCE DIES".into(),
        Deed::CrashTarget => "TARGET DIES".into(),
        Deed::Cut => "LINK CUT".into(),
        Deed::CutPages => "PAGE CHANNELS CUT".into(),
        Deed::Cancel | Deed::SwitchNow | Deed::Pause | Deed::Recover | Deed::Abandon => {
            format!("operator requests {}", name(&deed).to_lowercase())
        }
        Deed::Fence(word, fate) => Fence::told(word, fate),
        Deed::LeaseEnds => "what the fence gave runs out".into(),
        Deed::Stop => "operator stops the target".into(),
        Deed::GiveUp => "operator gives up the target".into(),
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

fn mishap_told(mishap: Mishap) -> &'static str {
    match mishap {
        Mishap::SourceDiesBefore(_) | Mishap::TargetDiesBefore(_) => "AND DIES in the middle",
        Mishap::StepFails(_) => "WHICH FAILS",
        Mishap::Busy(_) => "AND FINDS ITS I/O BUSY",
        Mishap::NotSent(_) => "the answer does not leave",
        Mishap::SendFails(_) => "the answer fails to be sent",
        Mishap::BreaksAfter(_) => "LINK CUT as it answers",
        Mishap::Damage => "DAMAGED",
    }
}
