//! Run loop, which determines the order in which a session's actions are performed and its events
//! are taken.
//!
//! The same loop drives a session on a real host, in the simulation and in the model; only the
//! [`Host`] differs. The loop and the sessions read no clock and never block. The [`Host`] reads
//! the clock and waits.
//!
//! # Order
//! 1. An action that takes time is completed before anything else happens.
//! 2. The actions that follow from the last event are performed in their order. If an action
//!    results in an event, the event is handled at once, and its actions are queued behind those
//!    that are waiting.
//! 3. If no action is left, the next event is taken. The host decides the order in which it checks
//!    requests, answers, timers and inputs.
//!
//! # Why the loop does not spin
//! A condition that persists, such as the stop flag, becomes an event only while the session reacts
//! to it. Because the event changes the state of the session, the next check does not report the
//! condition again. Every other event is removed from a queue, or is the end of a timer that starts
//! anew.

use std::collections::VecDeque;
use std::time::Duration;

/// State machine of a source or target, as the loop uses it. The loop passes events to the session
/// through [`Host::handle`].
pub trait Session {
    /// Type of the events.
    type Event;
    /// Type of the actions that the host performs.
    type Action;
    /// Type of the outcome of a migration.
    type Outcome;

    /// Returns true once the session has decided how the migration ends, so that only its last
    /// actions are left.
    fn decided(&self) -> bool;

    /// Returns the outcome as `Ok` if `action` is the last action of the session. Otherwise returns
    /// `action` as `Err`.
    fn outcome(action: Self::Action) -> Result<Self::Outcome, Self::Action>;
}

/// Event type of the session of the host `H`.
pub type EventOf<H> = <<H as Host>::Session as Session>::Event;
/// Action type of the session of the host `H`.
pub type ActionOf<H> = <<H as Host>::Session as Session>::Action;

/// Environment of one session, which performs the actions of the session and finds its events.
pub trait Host {
    /// Type of the session.
    type Session: Session;
    /// Error with which [`advance`] returns if the host has no event at this moment. The owner of
    /// the host then calls [`advance`] again later. A host that waits for events instead uses
    /// [`Infallible`](std::convert::Infallible).
    type Idle;

    /// Returns the time since the migration began.
    fn now(&self) -> Duration;
    /// Returns the session.
    fn session(&self) -> &Self::Session;
    /// Returns the queue of actions that are to be performed.
    fn action_queue(&mut self) -> &mut ActionQueue<ActionOf<Self>>;

    /// Passes `event` to the session, and returns the actions that follow from it.
    fn handle(&mut self, event: EventOf<Self>) -> Vec<ActionOf<Self>>;

    /// Returns the result of [`Session::decided`].
    fn decided(&self) -> bool {
        self.session().decided()
    }

    /// Performs `action`, and returns the event that the action results in, if any. If this returns
    /// an error, the action is still in progress, and [`performed`](Self::performed) returns its
    /// event later.
    fn perform(&mut self, action: ActionOf<Self>) -> Result<Option<EventOf<Self>>, Self::Idle>;

    /// Returns the event of an action that was in progress when [`perform`](Self::perform)
    /// returned. The default is for hosts that complete each action before `perform` returns.
    fn performed(&mut self) -> Result<Option<EventOf<Self>>, Self::Idle> {
        Ok(None)
    }

    /// Takes the next event. If this returns `None`, the loop calls this method again.
    fn next(&mut self) -> Result<Option<EventOf<Self>>, Self::Idle>;

    /// Publishes the progress. Called whenever no action is left, before the next event is taken.
    /// The default does nothing.
    fn publish_progress(&mut self) {}
}

/// Queue of the actions that are to be performed.
#[derive(Debug, Clone)]
pub struct ActionQueue<A> {
    actions: VecDeque<A>,
    /// True while an action has begun and has not ended.
    under_way: bool,
}

impl<A> ActionQueue<A> {
    /// Returns a queue that contains the first actions of a session.
    pub fn new(first: Vec<A>) -> Self {
        Self { actions: first.into(), under_way: false }
    }

    /// Returns an empty queue whose last action is still in progress. [`Host::performed`] returns
    /// the event of that action.
    pub fn with_begun_action() -> Self {
        Self { actions: VecDeque::new(), under_way: true }
    }

    /// Returns true if no action waits to be performed.
    pub fn is_empty(&self) -> bool {
        self.actions.is_empty()
    }

    /// Returns true while an action is in progress.
    pub fn is_under_way(&self) -> bool {
        self.under_way
    }
}

/// Runs the session until it has ended, and returns its outcome.
///
/// # Errors [`Host::Idle`] if the host has no event at this moment. Call the function again to
/// continue.
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

/// Passes `event` to the session, and queues the actions that follow from it.
fn take<H: Host>(host: &mut H, event: EventOf<H>) {
    let decided = host.decided();
    let more = host.handle(event);
    debug_assert!(!decided || host.decided(), "a session that has decided its end takes it back");
    if !decided && host.decided() {
        // The waiting actions no longer matter, and must be removed: they must not delay the
        // resumption of the guest, and must not load a state over memory that could not be
        // prepared. They are removed only once, because a last message that cannot be sent must not
        // remove the action that ends the session.
        host.action_queue().actions.clear();
    }
    host.action_queue().actions.extend(more);
}
