//! Order in which the source's session receives its events.
//!
//! | rank | event | kind | reason for the rank |
//! |---|---|---|---|
//! | 1 | cancel | level, reported once | a target that sends without end must not delay it |
//! | 2 | the arbiter's answer | queue | the guest may be stopped until it arrives |
//! | 3 | a lost link, after the wait for the target's reason | timer, then the queued inputs | bounded, see [`ReasonWait`] |
//! | 4 | the operator's other requests | edges | |
//! | 5 | the end of a round of the streams of device state | edge | |
//! | 6 | the clock | timer | checked even if inputs arrive without pause, so that no peer can prevent timeouts |
//! | 7 | inputs of the channels | bounded queue | |

use super::sender::SenderError;
use super::session::Session;
use crate::arbiter::{ArbiterError, Ownership};
use crate::channel::SendError;
use crate::reason_wait::ReasonWait;
use crate::run::Host;
use std::time::Duration;
use vmferry_protocol::source::Event;
use vmferry_wire::{Refusal, RefusalCode, ToSource};

/// Interval at which the session checks the clock.
pub(crate) const TICK: Duration = Duration::from_millis(20);

/// Report of a thread of the source's host.
#[derive(Debug)]
pub(crate) enum Input {
    /// A message of the target, and the time at which it arrived.
    Message(ToSource, Duration),
    /// The control channel has ended for this reason.
    ControlLost(String),
    /// A bulk channel has finished its part of a pass.
    PassDone(Result<(), SenderError>),
    UrgentLost(SenderError),
    /// A request of the operator or an answer of the arbiter is available.
    Wake,
}

/// Input, with the number of the set of channels that it belongs to. Inputs of an earlier set are
/// dropped.
pub(crate) type Numbered = (u64, Input);

/// Event sources of the source's host.
pub(crate) trait Sources: Host<Session = Session> {
    fn inbox(&mut self) -> &mut Inbox;
    /// Passes the answer to ping `number`, which arrived at `at`, to the session.
    fn pong(&mut self, number: u64, at: Duration);
    /// Returns true while the operator wants the migration to be cancelled.
    fn cancelled(&self) -> bool;
    /// Takes the oldest answer of the arbiter.
    fn answer(&mut self) -> Option<Result<Ownership, ArbiterError>>;
    /// Takes a request of the operator other than a cancel.
    fn request(&mut self) -> Option<Event>;
    /// Takes the event that the streams of device state report.
    fn streamed(&mut self) -> Option<Event>;
    /// Takes the oldest input. Returns `None` if none arrives by `until`.
    fn receive(&mut self, until: Duration) -> Result<Option<Numbered>, Self::Idle>;
    /// Returns the number of missing pages that were not sent on the current channels.
    fn unsent(&self) -> u64;
    /// Notes a message that the session is about to receive.
    fn record_message(&mut self, message: &ToSource);
    /// Records that the pass was sent, and returns the event that reports it.
    fn pass_sent(&mut self) -> Event;
}

/// State of the loop between two events.
#[derive(Debug, Clone)]
pub(crate) struct Inbox {
    cancel_told: bool,
    /// Wait for the target's reason after the loss of the link. `None` if there is no such wait.
    held: Option<ReasonWait>,
    ticked: Duration,
    /// Number of the current set of channels.
    generation: u64,
    /// Number of bulk channels that have not finished their part of the pass.
    missing: usize,
    /// True if the reader of the control channel has ended, so that no further message of the
    /// target can arrive.
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

    /// Records that a pass was passed to `channels` bulk channels.
    pub(crate) fn pass_given_to(&mut self, channels: usize) {
        self.missing = channels;
    }

    /// Records that the session has already received a cancel, because opening a channel was
    /// cancelled.
    pub(crate) fn cancel_told(&mut self) {
        self.cancel_told = true;
    }

    /// Records that the link is lost, and begins the wait for the target's reason. If the target
    /// has sent a reason, it is reported instead of `why`.
    pub(crate) fn hold(&mut self, now: Duration, why: String) {
        self.held.get_or_insert_with(|| ReasonWait::new(now, why));
    }

    /// Returns true during the wait for the target's reason for a lost link.
    pub(crate) fn is_held(&self) -> bool {
        self.held.is_some()
    }

    /// Notes that the present set of channels is closed.
    pub(crate) fn closed(&mut self) {
        self.generation += 1;
        (self.missing, self.held, self.control_lost) = (0, None, true);
    }

    /// Notes that a new control channel is open.
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
        Some(input) => event_of(host, input),
        None => Event::Tick,
    })
}

/// Ends the wait for the target's reason if its time is over at `now` and no reason is queued.
///
/// Returns `None` if there is no wait, or if time is left.
fn end_of_wait<H: Sources>(host: &mut H, now: Duration) -> Option<Event> {
    let wait = host.inbox().held.as_mut().filter(|wait| wait.is_over(now))?;
    // The time is over, so the host must not wait: it returns an input only if one is queued.
    if wait.may_take()
        && let Ok(Some(input)) = host.receive(now)
    {
        return Some(event_of(host, input));
    }
    host.inbox().held.take().map(|wait| Event::PeerLost(wait.into_why()))
}

fn event_of(host: &mut impl Sources, (generation, input): Numbered) -> Event {
    // An input of closed channels is dropped.
    if generation == host.inbox().generation { happened(host, input) } else { Event::Tick }
}

fn happened(host: &mut impl Sources, input: Input) -> Event {
    match input {
        Input::Wake => Event::Tick,
        Input::Message(ToSource::Pong(number), at) => {
            host.pong(number, at);
            Event::Tick
        }
        // The target claims to have all pages although the source has not sent all of them. Over
        // new channels, the source asks again which pages are missing. If the target then names
        // none, the target has all pages.
        Input::Message(ToSource::Complete(_), _) if host.unsent() > 0 => Event::PeerLost(format!(
            "the target says that it has all pages, and {} were not sent to it",
            host.unsent()
        )),
        Input::Message(message, _) => {
            host.record_message(&message);
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
            host.pass_sent()
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
            // Once the guest is known to run on the target, the source need not wait for a reason
            // of the target. Before that, the reason determines the outcome, and the target often
            // closes its channels just after it has sent the reason on the control channel.
            if host.session().runs_on_target() {
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
