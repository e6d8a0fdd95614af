//! Parking of the event loops of devices.

use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Gate that lets the event loops of devices handle events only while the guest runs in this VMM.
///
/// An event loop handles events from outside the guest, such as a frame on a tap, a completed disk
/// request, or a key. To handle an event, the loop writes guest memory and raises an interrupt.
/// Once the last pages and the device state have been sent, such a write would be lost. Therefore
/// this type ensures the following:
///
/// 1. When [`park`](Self::park) has returned `Ok`, no event is being handled, and no event is begun
///    before [`resume`](Self::resume) is called.
/// 2. An event that arrives in between waits, and is handled if the source resumes the guest.
/// 3. When the guest has left, the waiting events are never handled. The target then owns the disks
///    and addresses of the guest, so a late write to a disk would destroy data.
///
/// | caller | method | moment |
/// |---|---|---|
/// | an event loop | [`enter`](Self::enter) | when it has an event, before it handles the event; it drops the result afterwards |
/// | the source | [`park`](Self::park) | in `SourceVm::quiesce`, with the given time: `park.park(within).map_err(VmError::busy)` |
/// | the source | [`resume`](Self::resume) | in `SourceVm::resume` |
/// | the source | [`end`](Self::end) | when the report says that the guest has left |
/// | the target | [`parked`](Self::parked), [`resume`](Self::resume) | when it creates its VM; in `TargetVm::start` |
///
/// ```
/// use std::sync::mpsc::{Receiver, channel};
/// use std::time::Duration;
/// use vmferry_thread::Park;
///
/// /// The loop of a device with events of the host, such as frames on a tap. `handle` writes guest memory.
/// fn device(park: &Park, events: Receiver<u32>, mut handle: impl FnMut(u32)) {
///     // Wait for an event first: a loop that waits while it holds the permission cannot be parked.
///     while let Ok(event) = events.recv() {
///         let Some(_working) = park.enter() else { return };
///         handle(event);
///     }
/// }
///
/// let (park, (send, events)) = (&Park::running(), channel());
/// std::thread::scope(|scope| {
///     scope.spawn(move || device(park, events, |event| println!("event {event}")));
///     send.send(1).unwrap();
///     park.park(Duration::from_secs(10)).expect("an event takes no longer");
///     send.send(2).unwrap(); // Waits, and is never handled: the guest leaves.
///     park.end();
///     drop(send);
/// });
/// ```
///
/// # Requests of the guest
/// A request that the guest has made and that the device has not begun is part of the device's
/// state, and moves with the guest. Therefore a loop must not take such a request out of its queue
/// before [`enter`](Self::enter) has returned. If a waiting loop had already taken the request, the
/// request would not be in the saved state, and it would be lost when the guest has left. Wait
/// until the queue is not empty, call `enter`, and only then take the request. `SourceVm::save`
/// saves the queue.
#[derive(Debug)]
pub struct Park {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    /// Number of events that are being handled.
    working: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    Parked,
    Ended,
}

/// Error of [`Park::park`]: at least one event loop did not finish its event in time.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StillWorking {
    /// Number of events that were being handled.
    pub events: usize,
    /// Time limit of the call.
    pub within: Duration,
}

impl fmt::Display for StillWorking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.events == 1 { "" } else { "s" };
        write!(
            f,
            "{} event{plural} of devices did not finish within {} ms",
            self.events,
            self.within.as_millis()
        )
    }
}

impl std::error::Error for StillWorking {}

/// Permission to handle an event; see [`Park::enter`].
#[derive(Debug)]
#[must_use = "the event may be handled for as long as this value lives"]
pub struct Working<'p>(&'p Park);

impl Working<'_> {
    /// Returns true if [`Park::end`] was called since the event began: the guest has left, or was
    /// given up.
    ///
    /// If the guest was given up while the thread waited for a missing page, the thread may have
    /// read zeros in place of the page. Therefore call this method after the thread has read guest
    /// memory, and before it acts on the data, for example by writing the data to a disk.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.0.lock().phase == Phase::Ended
    }
}

impl Drop for Working<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.working -= 1;
        drop(state);
        self.0.changed.notify_all();
    }
}

impl Park {
    /// Longest wait of a [`park`](Self::park) without a limit.
    pub const PATIENCE: Duration = Duration::from_secs(10);

    fn of(phase: Phase) -> Self {
        Self { state: Mutex::new(State { phase, working: 0 }), changed: Condvar::new() }
    }

    /// Returns a park whose event loops may run, for a VM that boots its guest.
    #[must_use]
    pub fn running() -> Self {
        Self::of(Phase::Running)
    }

    /// Returns a park whose event loops wait, for a VM that receives a guest.
    #[must_use]
    pub fn parked() -> Self {
        Self::of(Phase::Parked)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change is a single assignment, so a panic of another thread cannot leave the state
        // inconsistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until events may be handled, and returns the permission to handle one event. Returns
    /// `None` after [`end`](Self::end): the loop must then drop its events and end.
    pub fn enter(&self) -> Option<Working<'_>> {
        let waits = |state: &mut State| state.phase == Phase::Parked;
        let state = self.changed.wait_while(self.lock(), waits);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        if state.phase == Phase::Ended {
            return None;
        }
        state.working += 1;
        Some(Working(self))
    }

    /// Prevents event loops from beginning further events, and waits for at most `within` until the
    /// events that are being handled are finished.
    ///
    /// `Duration::MAX`, with which the engine says that the operator has set no limit, means
    /// [`PATIENCE`](Self::PATIENCE): an event may hang, for example in a write to a file system of
    /// a network, and the guest does not run meanwhile.
    ///
    /// # Errors
    /// Returns [`StillWorking`] if an event takes longer. The event continues, and no other event
    /// is begun before [`resume`](Self::resume) is called.
    pub fn park(&self, within: Duration) -> Result<(), StillWorking> {
        let within = if within == Duration::MAX { Self::PATIENCE } else { within };
        let mut state = self.lock();
        if state.phase == Phase::Running {
            state.phase = Phase::Parked;
        }
        let waited = self.changed.wait_timeout_while(state, within, |state| state.working > 0);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match state.working {
            0 => Ok(()),
            events => Err(StillWorking { events, within }),
        }
    }

    /// Lets the event loops handle events again, including the events that have waited. Does
    /// nothing after [`end`](Self::end).
    pub fn resume(&self) {
        let mut state = self.lock();
        if state.phase == Phase::Parked {
            state.phase = Phase::Running;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Ends the event loops, so that no further event is handled. Call this method when the guest
    /// has left or was given up. The method does not wait for events that are being handled.
    pub fn end(&self) {
        self.lock().phase = Phase::Ended;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc::channel;
    use vmferry_testkit::{PATIENCE, wait};

    #[test]
    fn error_counts_the_events() {
        let text = |events| StillWorking { events, within: Duration::from_millis(5) }.to_string();
        assert_eq!(text(1), "1 event of devices did not finish within 5 ms");
        assert_eq!(text(2), "2 events of devices did not finish within 5 ms");
    }

    #[test]
    fn events_wait_while_parked_and_are_handled_after_a_resume() {
        let (park, handled) = (Park::parked(), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while let Some(_working) = park.enter() {
                        handled.fetch_add(1, Ordering::SeqCst);
                        std::thread::sleep(Duration::from_micros(50));
                    }
                });
            }
            assert_eq!(handled.load(Ordering::SeqCst), 0);
            for _ in 0..50 {
                let before = handled.load(Ordering::SeqCst);
                park.resume();
                wait("events being handled", || handled.load(Ordering::SeqCst) > before);
                park.park(PATIENCE).unwrap();
                let parked = handled.load(Ordering::SeqCst);
                std::thread::sleep(Duration::from_micros(200));
                assert_eq!(handled.load(Ordering::SeqCst), parked, "none is begun");
            }
            park.end();
        });
    }

    #[test]
    fn park_reports_an_event_that_takes_too_long_and_the_event_finishes() {
        let park = Park::running();
        let first = park.enter().unwrap();
        let late = park.park(Duration::from_millis(1)).unwrap_err();
        assert_eq!(late.to_string(), "1 event of devices did not finish within 1 ms");
        drop(first);
        park.park(Duration::ZERO).unwrap();
        park.resume();
        assert!(park.enter().is_some());
    }

    #[test]
    fn event_that_is_being_handled_learns_of_the_end() {
        let park = Park::running();
        let working = park.enter().unwrap();
        assert!(!working.has_ended());
        park.end();
        assert!(working.has_ended());
    }

    #[test]
    fn no_event_is_handled_after_the_end() {
        let (park, (started, starts)) = (Park::parked(), channel());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                started.send(()).unwrap();
                park.enter().is_none()
            });
            starts.recv().unwrap();
            park.end();
            assert!(waits.join().unwrap());
        });
        park.resume();
        assert!(park.enter().is_none(), "no event after the end, even after a resume");
        park.park(Duration::ZERO).unwrap();
        assert!(park.enter().is_none());
    }
}
