//! Run loop: the order in which the actions of a session are performed and its events are taken.
//!
//! The same loop drives a session on a real host, in the simulation and in the model. Only the
//! [`Host`] differs. The loop and the sessions read no clock and never block: time and waiting
//! belong to the host.
//!
//! # Order
//! 1. An action that takes time is completed before anything else happens.
//! 2. The actions of the last event are performed in their order. The event that an action results
//!    in is handled at once, and its actions follow those that are waiting.
//! 3. If no action is left, the next event is taken. The host decides the order in which it checks
//!    requests, answers, timers and inputs.
//!
//! # Why the loop does not spin
//! A level, such as the stop flag, becomes an event only while the session acts on it. The event
//! changes the session, so the next check finds another state. Every other event is taken off a
//! queue, or is the end of a timer that starts anew.

use std::collections::VecDeque;
use std::time::Duration;

/// State machine of the source or the target, as the loop sees it. [`Host::handle`] passes the
/// events to it.
pub trait Session {
    /// Type of the events.
    type Event;
    /// Type of the actions of the host.
    type Action;
    /// Type of the outcome of a migration.
    type Outcome;

    /// Returns true once the session has decided how the migration ends: only its last actions are
    /// left.
    fn decided(&self) -> bool;

    /// Returns the outcome if `action` is the last one.
    fn outcome(action: Self::Action) -> Result<Self::Outcome, Self::Action>;
}

/// Type of the events of a host's session.
pub type EventOf<H> = <<H as Host>::Session as Session>::Event;
/// Type of the actions of a host's session.
pub type ActionOf<H> = <<H as Host>::Session as Session>::Action;

/// Environment of one session: performs actions and finds events.
pub trait Host {
    /// Type of the session.
    type Session: Session;
    /// Error of a host that has no event at this moment. Its owner calls [`advance`] again later. A
    /// host that waits instead uses [`Infallible`](std::convert::Infallible).
    type Idle;

    /// Returns the time since the migration began.
    fn now(&self) -> Duration;
    /// Returns the session.
    fn session(&self) -> &Self::Session;
    /// Returns the actions that are to be performed.
    fn action_queue(&mut self) -> &mut ActionQueue<ActionOf<Self>>;

    /// Gives `event` to the session.
    fn handle(&mut self, event: EventOf<Self>) -> Vec<ActionOf<Self>>;

    /// Returns the result of [`Session::decided`].
    fn decided(&self) -> bool {
        self.session().decided()
    }

    /// Performs `action`, and returns the event that the action results in. After an error,
    /// [`performed`](Self::performed) returns that event.
    fn perform(&mut self, action: ActionOf<Self>) -> Result<Option<EventOf<Self>>, Self::Idle>;

    /// Returns the event of the action that takes time. The default is for a host that completes
    /// each action before it returns.
    fn performed(&mut self) -> Result<Option<EventOf<Self>>, Self::Idle> {
        Ok(None)
    }

    /// Takes the next event. `None` makes the loop check again.
    fn next(&mut self) -> Result<Option<EventOf<Self>>, Self::Idle>;

    /// Called whenever no action is left, before the next event is taken. The default does nothing.
    fn publish_progress(&mut self) {}
}

/// Actions that are to be performed.
#[derive(Debug, Clone)]
pub struct ActionQueue<A> {
    actions: VecDeque<A>,
    /// True if an action was begun and has not ended.
    under_way: bool,
}

impl<A> ActionQueue<A> {
    /// Returns a queue with the first actions of a session.
    pub fn new(first: Vec<A>) -> Self {
        Self { actions: first.into(), under_way: false }
    }

    /// Returns a queue with an action that was begun. [`Host::performed`] returns its event.
    pub fn with_begun_action() -> Self {
        Self { actions: VecDeque::new(), under_way: true }
    }

    /// Returns true if no action waits to be begun.
    pub fn is_empty(&self) -> bool {
        self.actions.is_empty()
    }

    /// Returns true while an action has not ended.
    pub fn is_under_way(&self) -> bool {
        self.under_way
    }
}

/// Runs the session until it has ended, or until the host has no event for it at this moment.
pub fn advance<H: Host>(host: &mut H) -> Result<<H::Session as Session>::Outcome, H::Idle> {
    loop {
        let event = if host.action_queue().under_way {
            let event = host.performed()?;
            host.action_queue().under_way = false;
            event
        } else if let Some(action) = host.action_queue().actions.pop_front() {
            match H::Session::outcome(action) {
                Ok(outcome) => return Ok(outcome),
                Err(action) => {
                    host.action_queue().under_way = true;
                    let event = host.perform(action)?;
                    host.action_queue().under_way = false;
                    event
                }
            }
        } else {
            host.publish_progress();
            host.next()?
        };
        if let Some(event) = event {
            take(host, event);
        }
    }
}

/// Gives `event` to the session, and stores the actions that follow.
fn take<H: Host>(host: &mut H, event: EventOf<H>) {
    let decided = host.decided();
    let more = host.handle(event);
    debug_assert!(!decided || host.decided(), "a session that has decided its end takes it back");
    if !decided && host.decided() {
        // The waiting actions no longer matter. They must not delay the resumption of the guest,
        // and must not load a state over memory that could not be prepared. This happens once: a
        // last message that cannot be sent must not remove the end itself.
        host.action_queue().actions.clear();
    }
    host.action_queue().actions.extend(more);
}
