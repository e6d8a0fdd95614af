//! Order in which the session of the target receives events.
//!
//! | rank | event | kind | reason for the rank |
//! |---|---|---|---|
//! | 1 | stop | level, reported while the session acts on it | a source that sends without pause must not delay it |
//! | 2 | no guest was announced in time | timer | likewise |
//! | 3 | answer of the arbiter | queue | the guest may be paused until the answer is handled |
//! | 4 | events that were found during other work | queue | they are older than all inputs |
//! | 5 | a lost channel, after the wait for the source's reason | timer, then what is queued | bounded, see [`ReasonWait`] |
//! | 6 | a link that is up, but on which no page arrives | timer | |
//! | 7 | inputs of the channels, and connections | bounded queue | |

use super::receiver::{LookedUp, ReceiveError};
use super::session::{Event, Session};
use crate::arbiter::ArbiterAnswer;
use crate::reason_wait::ReasonWait;
use crate::run::Host;
use std::io;
use std::time::Duration;
use vmferry_wire::{Refusal, RefusalCode, Role, ToTarget};

/// Interval at which the loop checks levels and timers if no input arrives.
const TICK: Duration = Duration::from_millis(50);
/// Time within which a source must announce its guest. Until then it blocks other sources.
pub(crate) const SETUP_TIMEOUT: Duration = Duration::from_secs(5);

/// Report of a thread of the target's host. `C` is a connection.
#[derive(Debug)]
pub(crate) enum Input<C> {
    Connected(C),
    Message(ToTarget),
    ControlLost(io::Error),
    /// A request or an answer is waiting.
    Wake,
    Barrier {
        channel: u16,
        pass: u32,
    },
    /// The pages of a frame with hashes were looked up.
    LookedUp {
        channel: u16,
        looked_up: LookedUp,
    },
    /// The last missing page was placed.
    AllArrived,
    ChannelLost {
        role: Role,
        channel: u16,
        error: ReceiveError,
    },
}

/// Input with the number of the set of channels that it belongs to. Inputs of another set are
/// dropped, except for connections, which belong to no set.
pub(crate) type Numbered<C> = (u64, Input<C>);

/// Part of the target's host that finds events.
pub(crate) trait Sources: Host<Session = Session> {
    type Connection;

    fn inbox(&mut self) -> &mut Inbox;
    /// Returns the name of the source.
    fn peer(&self) -> &str;
    fn peer_timeout(&self) -> Duration;
    /// Returns the number of the present set of channels.
    fn attempt(&self) -> u64;
    /// Returns true as long as the operator wants the target to stop.
    fn stopped(&self) -> bool;
    /// Returns the time within which the source must announce its guest.
    fn setup_timeout(&self) -> Duration;
    /// Takes the oldest answer of the arbiter.
    fn answer(&mut self) -> Option<ArbiterAnswer>;
    /// Takes an event that was found during other work.
    fn found(&mut self) -> Option<Event>;
    /// Returns the reason why a link that is up counts as lost because no pages arrive, if there is
    /// one.
    fn stalled(&mut self) -> Option<String> {
        None
    }
    /// Takes the oldest input. Returns `None` if none arrives before `until`.
    fn receive(&mut self, until: Duration) -> Result<Option<Numbered<Self::Connection>>, Self::Idle>;
    /// Answers a connection.
    fn connected(&mut self, connection: Self::Connection) -> Option<Event>;
    /// Returns the event with the figures of demand paging, after the last missing page has
    /// arrived.
    fn all_arrived(&self) -> Option<Event>;
    /// Notes that the link of a guest that runs on the target is lost.
    fn note_loss(&mut self, _why: &str) {}
}

/// State of the loop between two events.
#[derive(Debug, Clone)]
pub(crate) struct Inbox {
    began: Duration,
    /// Lost channel, while the loop waits for the source's reason.
    held: Option<ReasonWait>,
    /// True if the reader of the control channel has ended. No last message can arrive.
    control_lost: bool,
}

impl Inbox {
    pub(crate) fn new(now: Duration) -> Self {
        Self { began: now, held: None, control_lost: false }
    }

    pub(crate) fn control_lost(&self) -> bool {
        self.control_lost
    }

    /// Resets the state after a new control channel was opened.
    pub(crate) fn reopened(&mut self) {
        (self.held, self.control_lost) = (None, false);
    }
}

/// Takes the next event of the target's session.
pub(crate) fn next<H: Sources>(host: &mut H) -> Result<Option<Event>, H::Idle> {
    let now = host.now();
    if host.stopped() && host.session().heeds_stop() {
        return Ok(Some(Event::Stopped));
    }
    let began = host.inbox().began;
    if host.session().awaits_setup() && now.saturating_sub(began) > host.setup_timeout() {
        return Ok(Some(Event::PeerLost(format!(
            "{} announced no guest within {SETUP_TIMEOUT:?} after its hello",
            host.peer()
        ))));
    }
    if let Some((request, answer)) = host.answer() {
        return Ok(Some(Event::ArbiterAnswered(request, answer)));
    }
    if let Some(event) = host.found() {
        return Ok(Some(event));
    }
    if host.inbox().held.as_ref().is_some_and(|wait| wait.is_over(now)) {
        return Ok(end_of_wait(host, now));
    }
    if let Some(why) = host.stalled() {
        return Ok(Some(lost(host, why)));
    }
    let Some(input) = host.receive(now + TICK)? else { return Ok(None) };
    Ok(event_of(host, input))
}

/// Continues the wait for the source's reason after its time has expired at `now`. Takes an input
/// that is queued, or ends the wait if no input is queued.
fn end_of_wait<H: Sources>(host: &mut H, now: Duration) -> Option<Event> {
    // The time has expired, so a host that would have to wait returns no input.
    if host.inbox().held.as_mut().is_some_and(ReasonWait::may_take)
        && let Ok(Some(input)) = host.receive(now)
    {
        return event_of(host, input);
    }
    let wait = host.inbox().held.take()?;
    needs_channels(host.session()).then(|| Event::PeerLost(wait.into_why()))
}

fn event_of<H: Sources>(host: &mut H, (attempt, input): Numbered<H::Connection>) -> Option<Event> {
    if attempt != host.attempt() && !matches!(input, Input::Connected(_)) {
        return None;
    }
    happened(host, input)
}

fn happened<H: Sources>(host: &mut H, input: Input<H::Connection>) -> Option<Event> {
    match input {
        Input::Connected(connection) => host.connected(connection),
        Input::Message(message) => Some(Event::Message(message)),
        Input::Wake => None,
        Input::Barrier { channel, pass } => Some(Event::Barrier { channel, pass }),
        Input::LookedUp { channel, looked_up: LookedUp { frame, unknown } } => {
            let len = unknown.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
            let unknown = unknown.iter().copied().take(len).collect();
            Some(Event::LookedUp { channel, frame, unknown })
        }
        Input::AllArrived => host.all_arrived(),
        Input::ControlLost(error) => {
            host.inbox().control_lost = true;
            Some(control_lost(host, &error))
        }
        Input::ChannelLost { role, channel, error } => channel_lost(host, role, channel, &error),
    }
}

fn control_lost<H: Sources>(host: &mut H, error: &io::Error) -> Event {
    if host.session().runs_in_postcopy() {
        return lost(host, format!("the control channel is lost: {error}"));
    }
    let peer = host.peer();
    Event::PeerLost(match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
            format!("the source {peer} disconnected before it handed over the guest")
        }
        io::ErrorKind::TimedOut => {
            format!("nothing was heard of the source {peer} for {:?}", host.peer_timeout())
        }
        _ => format!("the link to the source {peer} failed: {error}"),
    })
}

/// Returns true while the loss of a channel for pages fails the migration.
fn needs_channels(session: &Session) -> bool {
    !session.memory_complete() && !session.renounced() && !session.ended()
}

/// Handles the loss of a channel. A channel that ends before the commit fails the migration. The
/// loop first waits for the source's reason, because a source that was cancelled closes its
/// channels and sends the reason on the control channel.
fn channel_lost<H: Sources>(host: &mut H, role: Role, channel: u16, error: &ReceiveError) -> Option<Event> {
    if host.session().runs_in_postcopy() {
        // Once the source knows that all pages have arrived, it closes its channels, and at last,
        // after a last message, the control channel. Therefore the loss of another channel does not
        // matter.
        let why = format!("{role:?} channel {channel} is lost: {error}").to_lowercase();
        return (!host.session().complete()).then(|| lost(host, why));
    }
    if !needs_channels(host.session()) {
        return None;
    }
    if let ReceiveError::Link(link) = error
        && matches!(link.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset)
    {
        let (now, why) = (host.now(), format!("the source {} closed a channel", host.peer()));
        host.inbox().held.get_or_insert_with(|| ReasonWait::new(now, why));
        return None;
    }
    let detail = format!("{role:?} channel {channel} from {}: {error}", host.peer());
    Some(Event::LocalFailure(Refusal::new(RefusalCode::Memory, detail)))
}

fn lost<H: Sources>(host: &mut H, why: String) -> Event {
    host.note_loss(&why);
    Event::PeerLost(why)
}

#[cfg(test)]
mod tests;
