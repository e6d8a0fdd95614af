//! Between the commit, or the fence's grant, and the guest's first instruction here.

use super::{Action, Event, Outcome, Session, State};
use vmferry_wire::ToSource;

impl Session {
    /// Nothing else counts now, neither the source nor what a channel still reports: the guest is ours and is being started, and
    /// only that start may say that it failed.
    pub(super) fn starting(&mut self, event: Event) -> Vec<Action> {
        match event {
            Event::Started { micros, cpu_us } if self.lazy => self.started_lazily(micros, cpu_us),
            Event::Started { micros, cpu_us } => {
                self.state = State::Done;
                let running = Action::Send(ToSource::Running { start_us: micros, cpu_us });
                let finish = Action::Finish(Outcome::Completed);
                [running].into_iter().chain(self.runs()).chain([finish]).collect()
            }
            Event::StartFailed(why) if self.lazy || self.fenced.is_some() => {
                let given_back = self.renounce(why.clone());
                // On a link that is known to be lost nothing can be said.
                let told = if self.lost { Action::Disconnect } else { Action::Send(ToSource::Returned(why)) };
                [told].into_iter().chain(given_back).collect()
            }
            Event::StartFailed(why) => {
                self.state = State::Done;
                vec![Action::Send(ToSource::Returned(why.clone())), Action::Finish(Outcome::Failed(why))]
            }
            Event::PeerLost(_) | Event::LocalFailure(_) => {
                self.lost = true;
                Vec::new()
            }
            _ => Vec::new(),
        }
    }
}
