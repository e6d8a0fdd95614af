//! The order in which the source's session is told what happens.
//!
//! | rank | what | kind | why at this rank |
//! |---|---|---|---|
//! | 1 | cancel | level, told once | a target that never stops talking must not keep it away |
//! | 2 | the arbiter's answer | queue | the guest may stand still until it is heard |
//! | 3 | a lost link, after the wait for the target's reason | timer, then what is queued | bounded, see [`ReasonWait`] |
//! | 4 | the operator's other requests | edges | |
//! | 5 | the end of a round of the streams of device state | edge | |
//! | 6 | the clock | timer | by the clock and not only when nothing comes, so that no peer stops all timeouts |
//! | 7 | inputs of the channels | bounded queue | |

use super::sender::SenderError;
use super::session::Session;
use crate::channel::SendError;
use crate::fence::{ArbiterError, Ruling};
use crate::reason_wait::ReasonWait;
use crate::run::Host;
use std::time::Duration;
use vmferry_protocol::source::Event;
use vmferry_wire::{Refusal, RefusalCode, ToSource};

/// Interval at which the session looks at the clock.
pub(crate) const TICK: Duration = Duration::from_millis(20);

/// What a thread of the source's host reports.
#[derive(Debug)]
pub(crate) enum Input {
    /// A message, and when it arrived.
    Message(ToSource, Duration),
    /// The control channel has ended, and why.
    ControlLost(String),
    /// A bulk channel has done its part of a pass.
    PassDone(Result<(), SenderError>),
    UrgentLost(SenderError),
    /// There is a request or an answer to look at.
    Wake,
}

/// An input, and the number of the set of channels that it belongs to. Inputs of an earlier set are
/// dropped.
pub(crate) type Numbered = (u64, Input);

/// The part of the source's host that knows what happens.
pub(crate) trait Sources: Host<Session = Session> {
    fn inbox(&mut self) -> &mut Inbox;
    /// Tells the session of the answer to ping `number`, which arrived at `at`.
    fn pong(&mut self, number: u64, at: Duration);
    /// Returns true as long as the operator wants the migration to be cancelled.
    fn cancelled(&self) -> bool;
    /// Takes the oldest answer of the arbiter.
    fn answer(&mut self) -> Option<Result<Ruling, ArbiterError>>;
    /// Takes another request of the operator.
    fn request(&mut self) -> Option<Event>;
    /// Takes what the streams of device state report.
    fn streamed(&mut self) -> Option<Event>;
    /// Takes the oldest input. Returns `None` if there is none until `until`.
    fn receive(&mut self, until: Duration) -> Result<Option<Numbered>, Self::Idle>;
    /// Returns the number of pages that the target lacks and that were not sent on these channels.
    fn unsent(&self) -> u64;
    /// Notes a message that the session is about to be told.
    fn heard(&mut self, message: &ToSource);
    /// Notes that the pass is sent. Returns its bytes, and the time that listing its pages took.
    fn pass_sent(&mut self) -> (u64, Duration);
}

/// What the loop remembers between two events.
#[derive(Debug, Clone)]
pub(crate) struct Inbox {
    cancel_told: bool,
    /// A lost link, while the target's reason is waited for.
    held: Option<ReasonWait>,
    ticked: Duration,
    /// The number of the present set of channels.
    generation: u64,
    /// Bulk channels that have not done their part of the pass.
    missing: usize,
    /// The reader of the control channel has ended: no last word is to be waited for.
    control_lost: bool,
}

impl Inbox {
    pub(crate) fn new(now: Duration) -> Self {
        Self { cancel_told: false, held: None, ticked: now, generation: 0, missing: 0, control_lost: false }
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    pub(crate) fn control_lost(&self) -> bool {
        self.control_lost
    }

    /// A pass was given to so many bulk channels.
    pub(crate) fn pass_given_to(&mut self, channels: usize) {
        self.missing = channels;
    }

    /// The session is told of a cancel without being asked: opening a channel was cancelled.
    pub(crate) fn cancel_told(&mut self) {
        self.cancel_told = true;
    }

    /// The link is lost. The target's own word on it, if it left one, says more.
    pub(crate) fn hold(&mut self, now: Duration, why: String) {
        self.held.get_or_insert_with(|| ReasonWait::new(now, why));
    }

    /// Returns true while the target's own word on a lost link is waited for.
    pub(crate) fn is_held(&self) -> bool {
        self.held.is_some()
    }

    /// The present set of channels is closed.
    pub(crate) fn closed(&mut self) {
        self.generation += 1;
        (self.missing, self.held, self.control_lost) = (0, None, true);
    }

    /// A new control channel is up.
    pub(crate) fn reopened(&mut self) {
        self.control_lost = false;
    }
}

/// Takes the next event of the source's session.
pub(crate) fn next<H: Sources>(host: &mut H) -> Result<Event, H::Idle> {
    let now = host.now();
    if host.cancelled() && !std::mem::replace(&mut host.inbox().cancel_told, true) {
        return Ok(Event::Cancel);
    }
    if let Some(answer) = host.answer() {
        return Ok(Event::ArbiterAnswered(answer));
    }
    if let Some(event) = end_of_wait(host, now) {
        return Ok(event);
    }
    if let Some(request) = host.request() {
        return Ok(request);
    }
    if let Some(streamed) = host.streamed() {
        return Ok(streamed);
    }
    let tick = host.inbox().ticked + TICK;
    if now >= tick {
        host.inbox().ticked = now;
        return Ok(Event::Tick);
    }
    Ok(match host.receive(tick)? {
        Some(input) => taken(host, input),
        None => Event::Tick,
    })
}

/// Ends the wait for the target's reason if its time is over at `now` and no reason is queued.
///
/// Returns `None` while there is no wait, or time is left.
fn end_of_wait<H: Sources>(host: &mut H, now: Duration) -> Option<Event> {
    let wait = host.inbox().held.as_mut().filter(|wait| wait.is_over(now))?;
    // The time is over, so a host that would have to wait has nothing.
    if wait.may_take()
        && let Ok(Some(input)) = host.receive(now)
    {
        return Some(taken(host, input));
    }
    host.inbox().held.take().map(|wait| Event::PeerLost(wait.into_why()))
}

fn taken(host: &mut impl Sources, (generation, input): Numbered) -> Event {
    // An input of channels that are closed does not count.
    if generation == host.inbox().generation { happened(host, input) } else { Event::Tick }
}

fn happened(host: &mut impl Sources, input: Input) -> Event {
    match input {
        Input::Wake => Event::Tick,
        Input::Message(ToSource::Pong(number), at) => {
            host.pong(number, at);
            Event::Tick
        }
        // The target is asked anew, over new channels, what it lacks. If it then names nothing,
        // that counts.
        Input::Message(ToSource::Complete(_), _) if host.unsent() > 0 => Event::PeerLost(format!(
            "the target says that it has all pages, and {} were not sent to it",
            host.unsent()
        )),
        Input::Message(message, _) => {
            host.heard(&message);
            Event::Message(message)
        }
        Input::ControlLost(why) => {
            host.inbox().control_lost = true;
            Event::PeerLost(why)
        }
        Input::PassDone(Ok(())) => {
            let inbox = host.inbox();
            inbox.missing = inbox.missing.saturating_sub(1);
            if inbox.missing > 0 {
                return Event::Tick;
            }
            let (bytes, listing) = host.pass_sent();
            Event::PassSent { bytes, listing }
        }
        Input::PassDone(Err(error)) | Input::UrgentLost(error) => channel_failed(host, error),
    }
}

fn channel_failed(host: &mut impl Sources, error: SenderError) -> Event {
    match error {
        SenderError::Stopped => Event::Tick,
        SenderError::Vm(error) => {
            let detail = format!("reading guest memory failed: {error}");
            Event::LocalFailure(Refusal::new(RefusalCode::Other, detail))
        }
        SenderError::Link(SendError { error, .. }, peer) => {
            let why = format!("the link to {peer} failed while pages were sent: {error}");
            // Once the guest is known to run on the target, nothing is to be waited for. Before
            // that, the target's own word decides: it often closes its channels after it has said
            // why on the control channel.
            if host.session().runs_there() {
                return Event::PeerLost(why);
            }
            let now = host.now();
            host.inbox().hold(now, why);
            Event::Tick
        }
    }
}

#[cfg(test)]
mod tests;
