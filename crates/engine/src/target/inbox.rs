//! The order in which the target's session is told what happens.
//!
//! | rank | what | kind | why at this rank |
//! |---|---|---|---|
//! | 1 | stop | level, told while the session acts on it | a source that never stops talking must not keep it away |
//! | 2 | no guest was announced in time | timer | likewise |
//! | 3 | the arbiter's answer | queue | the guest may stand still until it is heard |
//! | 4 | what was found while something else was done | queue | it is older than all inputs |
//! | 5 | a lost channel, after the wait for the source's reason | timer, then what is queued | bounded, see [`ReasonWait`] |
//! | 6 | a link that is up and brings nothing | timer | |
//! | 7 | inputs of the channels, and connections | bounded queue | |

use super::receiver::ReceiveError;
use super::session::{Event, Session};
use crate::fence::Ruled;
use crate::reason_wait::ReasonWait;
use crate::run::Host;
use std::io;
use std::time::Duration;
use vmferry_wire::{Refusal, RefusalCode, Role, ToTarget};

/// Interval at which the loop looks at levels and timers although no input came.
const TICK: Duration = Duration::from_millis(50);
/// Time within which a source must announce its guest. Until then it keeps other sources out.
pub(crate) const SETUP_TIMEOUT: Duration = Duration::from_secs(5);

/// What a thread of the target's host reports. `C` is a connection.
#[derive(Debug)]
pub(crate) enum Input<C> {
    Connected(C),
    Message(ToTarget),
    ControlLost(io::Error),
    /// There is a request or an answer to look at.
    Wake,
    Barrier {
        channel: u16,
        pass: u32,
    },
    /// The last missing page was placed.
    AllHere,
    ChannelLost {
        role: Role,
        channel: u16,
        error: ReceiveError,
    },
}

/// An input, and the number of the set of channels that it belongs to. Inputs of another set are
/// dropped, but for connections, which belong to none.
pub(crate) type Numbered<C> = (u64, Input<C>);

/// The part of the target's host that knows what happens.
pub(crate) trait Sources: Host<Session = Session> {
    type Connection;

    fn inbox(&mut self) -> &mut Inbox;
    /// Returns the name of the source.
    fn peer(&self) -> &str;
    fn peer_timeout(&self) -> Duration;
    /// Returns the number of the present set of channels.
    fn attempt(&self) -> u64;
    /// Returns true as long as the operator wants no guest.
    fn stopped(&self) -> bool;
    /// Returns how long the source may take to announce its guest.
    fn setup_timeout(&self) -> Duration;
    /// Takes the oldest answer of the arbiter.
    fn answer(&mut self) -> Option<Ruled>;
    /// Takes an event that was found while something else was done.
    fn found(&mut self) -> Option<Event>;
    /// Returns the reason for which a link that is up counts as lost, if there is one: nothing
    /// comes on it.
    fn stalled(&mut self) -> Option<String> {
        None
    }
    /// Takes the oldest input. Returns `None` if there is none until `until`.
    fn receive(&mut self, until: Duration) -> Result<Option<Numbered<Self::Connection>>, Self::Idle>;
    /// Answers a connection.
    fn connected(&mut self, connection: Self::Connection) -> Option<Event>;
    /// Returns the account of the missing pages, all of which have come.
    fn all_here(&self) -> Option<Event>;
    /// Notes that the link of a guest that runs here is lost.
    fn note_loss(&mut self, _why: &str) {}
}

/// What the loop remembers between two events.
#[derive(Debug, Clone)]
pub(crate) struct Inbox {
    began: Duration,
    /// A lost channel, while the source's reason is waited for.
    held: Option<ReasonWait>,
    /// The reader of the control channel has ended: no last word is to be waited for.
    control_lost: bool,
}

impl Inbox {
    pub(crate) fn new(now: Duration) -> Self {
        Self { began: now, held: None, control_lost: false }
    }

    pub(crate) fn control_lost(&self) -> bool {
        self.control_lost
    }

    /// A new control channel is up.
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
            "{} said hello and announced no guest within {SETUP_TIMEOUT:?}",
            host.peer()
        ))));
    }
    if let Some((word, answer)) = host.answer() {
        return Ok(Some(Event::ArbiterAnswered(word, answer)));
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
    Ok(taken(host, input))
}

/// Goes on with the wait for the source's reason after its time is over at `now`: takes an input
/// that is queued. Ends the wait if no input is queued.
fn end_of_wait<H: Sources>(host: &mut H, now: Duration) -> Option<Event> {
    // The time is over, so a host that would have to wait has nothing.
    if host.inbox().held.as_mut().is_some_and(ReasonWait::may_take)
        && let Ok(Some(input)) = host.receive(now)
    {
        return taken(host, input);
    }
    let wait = host.inbox().held.take()?;
    needs_channels(host.session()).then(|| Event::PeerLost(wait.into_why()))
}

fn taken<H: Sources>(host: &mut H, (attempt, input): Numbered<H::Connection>) -> Option<Event> {
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
        Input::AllHere => host.all_here(),
        Input::ControlLost(error) => {
            host.inbox().control_lost = true;
            Some(control_lost(host, &error))
        }
        Input::ChannelLost { role, channel, error } => channel_lost(host, role, channel, &error),
    }
}

fn control_lost<H: Sources>(host: &mut H, error: &io::Error) -> Event {
    if host.session().running_lazily() {
        return lost(host, format!("the control channel is lost: {error}"));
    }
    let peer = host.peer();
    Event::PeerLost(match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
            format!("the source {peer} went away before it handed over the guest")
        }
        io::ErrorKind::TimedOut => {
            format!("nothing was heard of the source {peer} for {:?}", host.peer_timeout())
        }
        _ => format!("the link to the source {peer} failed: {error}"),
    })
}

/// Returns true while the loss of a channel for pages takes the migration with it.
fn needs_channels(session: &Session) -> bool {
    !session.memory_complete() && !session.renounced() && !session.ended()
}

/// A channel that ends before the commit takes the migration with it. Which side was at fault
/// matters to the reader: a cancelled source closes its channels, and says why on the control
/// channel.
fn channel_lost<H: Sources>(host: &mut H, role: Role, channel: u16, error: &ReceiveError) -> Option<Event> {
    if host.session().running_lazily() {
        // Once it knows that all is here the source closes its channels, the control channel last
        // and with a last word.
        let why = format!("{role:?} channel {channel} is lost: {error}").to_lowercase();
        return (!host.session().complete()).then(|| lost(host, why));
    }
    if !needs_channels(host.session()) {
        return None;
    }
    if let ReceiveError::Link(link) = error
        && matches!(link.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset)
    {
        let (now, why) = (host.now(), format!("the source {} broke off", host.peer()));
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
