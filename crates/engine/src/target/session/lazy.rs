//! From the handover on, if the guest runs before all of its memory is here.

use super::{Action, Event, Outcome, Session, State};
use vmferry_wire::{LazyFigures, Refusal, RefusalCode, ToSource, ToTarget};

impl Session {
    /// Everything that is lacking has been named, and the state is here. The guest has not run yet: what goes wrong is told
    /// to the source, which resumes it.
    pub(super) fn load_lazily(&mut self, pages: u64) -> Vec<Action> {
        if !self.state_complete {
            let detail = "the source hands over a guest whose device state it has not sent";
            return self.fail(Refusal::new(RefusalCode::Protocol, detail), true);
        }
        let behind = self.barriers.iter().any(|reached| *reached != self.received);
        if behind {
            let detail = "the source hands over a guest in the middle of a pass";
            return self.fail(Refusal::new(RefusalCode::Protocol, detail), true);
        }
        self.state = State::Loading;
        self.lazy = true;
        vec![Action::BeginLazily { pages }, Action::Load(std::mem::take(&mut self.sections))]
    }

    pub(super) fn started_lazily(&mut self, start_us: u64, cpu_us: u64) -> Vec<Action> {
        self.state = State::Lazy;
        let mut actions = vec![Action::Send(ToSource::Running { start_us, cpu_us })];
        if self.lost {
            actions = self.suspend();
        }
        actions.extend(self.runs());
        if let Some(figures) = self.complete.clone() {
            actions.extend(self.all_here(figures));
        }
        actions.push(Action::Finish(Outcome::RunsLazily));
        actions
    }

    /// Whether its source may come back over a new link to ask what has become of a guest that never ran here. Once this side
    /// was ready the source may have told it to run the guest, even if that word never came.
    pub(crate) fn may_be_asked(&self) -> bool {
        self.lazy && matches!(self.state, State::Ready | State::Claiming | State::Renounced)
    }

    /// Whether the guest was renounced.
    pub(crate) fn renounced(&self) -> bool {
        self.state == State::Renounced
    }

    /// Gives the guest up for good: from here on no commit starts it, however late it comes. Only then is a fence told so.
    #[must_use]
    pub(super) fn renounce(&mut self, why: Refusal) -> Option<Action> {
        self.state = State::Renounced;
        self.renounced = Some(why);
        self.give_back()
    }

    /// There is one thing left to do: that the source hears of it. Until it has, only it may come back, however often; the
    /// guest is stopped at its side until then, and nobody else can say that it may go on.
    pub(super) fn after_renouncing(&mut self, event: Event) -> Vec<Action> {
        let Some(why) = self.renounced.clone() else { return Vec::new() };
        match event {
            Event::ControlBack => vec![Action::Send(ToSource::Returned(why))],
            Event::Stopped if !self.heeds_stop() => Vec::new(),
            Event::Message(ToTarget::Thanks | ToTarget::Cancel(_)) | Event::Stopped => self.end(why, None),
            Event::PeerLost(_) | Event::LocalFailure(_) => vec![Action::Disconnect],
            // A late commit among them.
            _ => Vec::new(),
        }
    }

    /// Whether the guest runs here and has not all of its memory, or its source does not know yet that it has.
    pub(crate) fn running_lazily(&self) -> bool {
        matches!(
            self.state,
            State::Lazy | State::Suspended | State::Retelling | State::Reopening { .. } | State::Thanking
        )
    }

    /// Whether the link is lost.
    pub(crate) fn suspended(&self) -> bool {
        matches!(self.state, State::Suspended | State::Retelling | State::Reopening { .. })
    }

    /// Whether everything is here; then the source may stay away.
    pub(crate) fn complete(&self) -> bool {
        self.complete.is_some()
    }

    pub(super) fn lazily(&mut self, event: Event) -> Vec<Action> {
        match (self.state, event) {
            (_, Event::AllHere(figures)) => self.all_here(figures),
            (State::Thanking, Event::Message(ToTarget::Thanks)) => self.over(),
            // Often the source notices first that the link is lost. The old channels have been ended by now.
            (_, Event::ControlBack) => {
                self.state = State::Retelling;
                vec![Action::Retell]
            }
            (State::Retelling, Event::Retold { pages, tokens: (bulk, urgent) }) => {
                self.state = State::Reopening { missing: self.channels.count() };
                let resume = ToSource::Resume { pages, bulk, urgent };
                let mut actions = vec![Action::AwaitChannels(self.channels), Action::Send(resume)];
                if self.complete.is_some() {
                    // Nothing to open channels for.
                    actions.extend(self.tell());
                }
                actions
            }
            (State::Reopening { missing: 1 }, Event::ChannelUp) => {
                self.state = State::Lazy;
                vec![Action::Send(ToSource::ChannelsUp), Action::AskAgain]
            }
            (State::Reopening { missing }, Event::ChannelUp) => {
                self.state = State::Reopening { missing: missing - 1 };
                Vec::new()
            }
            // Each channel's end of the rest: what counts is that every page is here.
            (State::Lazy | State::Thanking, Event::Barrier { .. }) => Vec::new(),
            (State::Suspended, _) => Vec::new(),
            (_, Event::PeerLost(_) | Event::LocalFailure(_)) => self.suspend(),
            (_, Event::Message(message)) => {
                tracing::warn!(
                    "the source sent {}, which does not fit this moment ({:?})",
                    message.name(),
                    self.state
                );
                self.suspend()
            }
            _ => Vec::new(),
        }
    }

    /// It may come in while the link is down, or being taken up again: then it is told as soon as there is one.
    fn all_here(&mut self, figures: LazyFigures) -> Vec<Action> {
        self.complete = Some(figures);
        let mut actions = vec![Action::EndLazily];
        if self.state == State::Lazy {
            actions.extend(self.tell());
        }
        actions
    }

    fn tell(&mut self) -> Option<Action> {
        self.state = State::Thanking;
        self.complete.clone().map(|figures| Action::Send(ToSource::Complete(figures)))
    }

    /// The link is lost, and the guest runs: its vCPUs go on until they need a page that is not here.
    fn suspend(&mut self) -> Vec<Action> {
        self.state = State::Suspended;
        vec![Action::Disconnect]
    }

    /// The source knows.
    fn over(&mut self) -> Vec<Action> {
        self.state = State::Done;
        vec![Action::Finish(Outcome::Completed)]
    }
}
