//! Setup phase, from the hello to the first page: the target compares the machines, reads the
//! register of the arbiter, and accepts the channels.

use super::receiving::Receiving;
use super::{Action, Channels, Event, Next, State, TargetContext, Tokens, fail, misplaced};
use crate::arbiter::{ArbiterError, ArbiterRequest, Ownership};
use std::time::Duration;
use vmferry_core::MachineConfig;
use vmferry_wire::{Mode, Refusal, RefusalCode, ToSource, ToTarget};

/// Setup of a migration.
#[derive(Debug, Clone, Hash)]
pub(super) struct Setup {
    step: Step,
}

#[derive(Debug, Hash, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// The source has not announced its guest.
    AwaitAnnouncement,
    /// The guest fits, and its register is being read.
    LookingForRegister,
    /// The host checks whether it can receive pages while the guest runs.
    Preparing,
    AwaitChannels {
        missing: u32,
    },
}

impl Setup {
    pub(super) fn begin() -> Self {
        Self { step: Step::AwaitAnnouncement }
    }

    pub(super) fn awaits_announcement(&self) -> bool {
        self.step == Step::AwaitAnnouncement
    }

    pub(super) fn handle(self, context: &mut TargetContext, event: Event) -> Next {
        match (self.step, event) {
            (
                Step::AwaitAnnouncement,
                Event::Message(ToTarget::Setup {
                    machine,
                    mode,
                    bulk_channels: bulk,
                    urgent_channels: urgent,
                    probe,
                }),
            ) => announced(context, &machine, mode, Channels { bulk, urgent, probe }),
            // The description is for a VMM that creates its VM after the announcement. In this
            // session, the VM already exists.
            (Step::AwaitAnnouncement, Event::Message(ToTarget::Description(_))) => {
                (State::Setup(self), Vec::new())
            }
            (Step::LookingForRegister, Event::ArbiterAnswered(ArbiterRequest::Look, answer)) => {
                looked(context, answer)
            }
            // A late answer, or the answer to another request.
            (_, Event::ArbiterAnswered(..)) => (State::Setup(self), Vec::new()),
            (Step::Preparing, Event::Prepared) => accept(context),
            (Step::AwaitChannels { missing: 1 }, Event::ChannelUp) => {
                let receiving = Receiving::begin(context.channels, context.wants_trial);
                (State::Receiving(Box::new(receiving)), vec![Action::Send(ToSource::ChannelsUp)])
            }
            (Step::AwaitChannels { missing }, Event::ChannelUp) => {
                (State::Setup(Self { step: Step::AwaitChannels { missing: missing - 1 } }), Vec::new())
            }
            (_, event) => fail(misplaced(&event, self.doing())),
        }
    }

    fn doing(&self) -> &'static str {
        match self.step {
            Step::AwaitAnnouncement => "awaiting a guest",
            Step::LookingForRegister => "looking for the register",
            Step::Preparing => "preparing the host",
            Step::AwaitChannels { .. } => "awaiting channels",
        }
    }
}

fn announced(context: &mut TargetContext, machine: &MachineConfig, mode: Mode, channels: Channels) -> Next {
    if let Some(difference) = context.machine.difference(machine) {
        let detail = format!("{difference}; create the target VM like the source VM");
        return fail(Refusal::new(RefusalCode::Machine, detail));
    }
    if let Some(detail) = wrong_channels(mode, channels) {
        return fail(Refusal::new(RefusalCode::Protocol, detail));
    }
    (context.mode, context.channels) = (mode, channels);
    if context.with_arbiter {
        let look = Action::AskArbiter { request: ArbiterRequest::Look, after: Duration::ZERO };
        return (State::Setup(Setup { step: Step::LookingForRegister }), vec![look]);
    }
    prepare(context)
}

fn wrong_channels(mode: Mode, Channels { bulk, urgent, probe }: Channels) -> Option<String> {
    let most = crate::source::Settings::MAX_CHANNELS;
    if !(1..=most).contains(&bulk) {
        return Some(format!("the source announced {bulk} bulk channels, but 1 to {most} are possible"));
    }
    let right = if mode.may_use_postcopy() { (1..=most).contains(&urgent) } else { urgent == 0 && !probe };
    (!right).then(|| {
        format!(
            "the source announced {urgent} urgent channels ({mode:?}), but 1 to {most} are possible, and none in precopy"
        )
    })
}

fn looked(context: &mut TargetContext, answer: Result<Ownership, ArbiterError>) -> Next {
    let detail = match answer {
        Ok(Ownership::Open) => return prepare(context),
        Ok(owner) => format!("the arbiter {owner}, although the guest has not been moved yet"),
        Err(error) => format!("as seen from the target: {error}"),
    };
    fail(Refusal::new(RefusalCode::Fence, detail))
}

fn prepare(context: &mut TargetContext) -> Next {
    if !context.mode.may_use_postcopy() {
        return accept(context);
    }
    // Checked before the guest is accepted, so that a host without demand paging refuses the guest
    // early, and continues to wait for another source.
    (State::Setup(Setup { step: Step::Preparing }), vec![Action::PrepareDemandPaging])
}

fn accept(context: &mut TargetContext) -> Next {
    context.accepted = true;
    let Tokens { bulk, urgent, resume } = context.tokens;
    let costs = context.load_us.map(|load_us| Action::Send(ToSource::Costs { load_us }));
    let trial = context.wants_trial.then_some(Action::Send(ToSource::WantsTrial));
    let accept = Action::Send(ToSource::Accept { bulk, urgent, resume });
    let accept = [Action::AwaitChannels(context.channels), accept];
    let actions = accept.into_iter().chain(costs).chain(trial).collect();
    (State::Setup(Setup { step: Step::AwaitChannels { missing: context.channels.count() } }), actions)
}
