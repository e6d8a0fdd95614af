//! Heartbeat: messages that show the peer that a source or target is alive while its driver waits
//! for the VM.
//!
//! While a driver pauses, saves, loads or starts its VM, it does nothing else. Such a call can take
//! long, for example because a slow disk is flushed or a vCPU waits for a page. The peer cannot
//! distinguish this from a dead host, and gives up after it has received nothing for its
//! `peer_timeout`. Therefore, a thread sends messages in place of the driver during such a call.
//! Because the thread is silent at all other times, its messages are never mixed with those of the
//! driver, and a driver that hangs elsewhere is noticed. Even during a call, the thread sends for a
//! limited time only, so that a VM that hangs is noticed, too.

// Input from a peer or from the host must not panic a thread of the engine. Tests may panic.
#![cfg_attr(
    not(test),
    warn(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::unreachable,
        clippy::todo,
        clippy::indexing_slicing
    )
)]

use crate::channel::{Stream, send_message};
use serde::Serialize;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmferry_thread::{Role, spawn};
use vmferry_wire::{ToSource, ToTarget};

/// Number of a ping whose answer is ignored, and of a pong that answers no ping.
const UNSOLICITED: u64 = u64::MAX;
/// Interval between messages, unless the peer's timeout is shorter than four times this interval.
const EVERY: Duration = Duration::from_secs(1);
/// Number of peer timeouts for which messages are sent in place of a driver.
const PATIENCE: u32 = 3;

/// Thread that sends messages, and the state that it shares with the driver. The thread ends when
/// the value is dropped.
#[derive(Debug)]
pub(crate) struct Heartbeat(Arc<HeartbeatState>, Option<JoinHandle<()>>);

#[derive(Debug)]
struct HeartbeatState {
    state: Mutex<State>,
    ending: Condvar,
    peer_timeout: Duration,
}

#[derive(Debug, Default)]
struct State {
    /// Start of the current call of the VM, and the control channel of the migration. `None` if the
    /// driver is not in such a call.
    busy: Option<(Instant, Arc<Stream>)>,
    said: Option<Instant>,
    ended: bool,
}

impl Heartbeat {
    /// Starts the heartbeat of a source whose target waits for about `peer_timeout`.
    pub(crate) fn of_source(peer_timeout: Duration) -> io::Result<Self> {
        Self::start("source-heartbeat", ToTarget::Ping(UNSOLICITED), peer_timeout)
    }

    /// Starts the heartbeat of a target whose source waits for about `peer_timeout`.
    pub(crate) fn of_target(peer_timeout: Duration) -> io::Result<Self> {
        Self::start("target-heartbeat", ToSource::Pong(UNSOLICITED), peer_timeout)
    }

    fn start<M: Serialize + Send + 'static>(
        name: &str,
        message: M,
        peer_timeout: Duration,
    ) -> io::Result<Self> {
        let shared =
            Arc::new(HeartbeatState { state: Mutex::default(), ending: Condvar::new(), peer_timeout });
        let own = Arc::clone(&shared);
        let thread = spawn(Role::Control, name, move || own.live(&message))?;
        Ok(Self(shared, Some(thread)))
    }

    /// Calls `work`, which must send nothing on `control`, and sends messages meanwhile. Without
    /// contention, this costs two lock operations only, because the heartbeat's thread checks
    /// periodically whether a message is due.
    pub(crate) fn during<T>(&self, control: &Arc<Stream>, work: impl FnOnce() -> T) -> T {
        /// Guard that ends the busy state also if `work` panics.
        struct Idle<'a>(&'a Heartbeat);
        impl Drop for Idle<'_> {
            fn drop(&mut self) {
                self.0.end();
            }
        }
        self.begin(control);
        let _idle = Idle(self);
        work()
    }

    /// Begins to send messages for a driver that is busy outside the engine. The driver must send
    /// nothing on `control` before [`end`](Self::end).
    pub(crate) fn begin(&self, control: &Arc<Stream>) {
        self.0.lock().busy = Some((Instant::now(), Arc::clone(control)));
    }

    /// Stops sending messages. Waits until a message that is being sent has been sent completely.
    pub(crate) fn end(&self) {
        self.0.lock().busy = None;
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.0.lock().ended = true;
        self.0.ending.notify_all();
        // A panic of the thread was printed when it happened.
        let _ = self.1.take().map(JoinHandle::join);
    }
}

impl HeartbeatState {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn live<M: Serialize>(&self, message: &M) {
        let every = EVERY.min(self.peer_timeout / 4);
        let longest = self.peer_timeout.saturating_mul(PATIENCE);
        let mut state = self.lock();
        while !state.ended {
            let said = state.said.map(|said| said.elapsed());
            let due = state.busy.as_ref().filter(|(since, _)| is_due(since.elapsed(), said, every, longest));
            if let Some((_, control)) = due {
                // The lock is held during the send, so that the driver cannot continue and send in
                // the middle of the message. The driver waits no longer than for sending a message
                // itself.
                if send_message(control, message, self.peer_timeout).is_err() {
                    // A part of the message may have been sent. The reader of this channel reports
                    // the loss to the driver.
                    control.shutdown();
                    state.busy = None;
                }
                state.said = Some(Instant::now());
            }
            // The pause is not shorter than a tick of the kernel's clock, whatever the timeout is.
            let pause = (every / 2).max(Duration::from_millis(1));
            state = self.ending.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Returns true if a message is due for a driver that has been busy for `busy`, where the last
/// message was sent `said` ago.
fn is_due(busy: Duration, said: Option<Duration>, every: Duration, longest: Duration) -> bool {
    (every..longest).contains(&busy) && said.is_none_or(|said| said >= every)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::{read_message, test_pair};

    /// Timeout of the tests. Messages are sent for three times this duration, which is longer than
    /// a thread is delayed on a starved host.
    const TIMEOUT: Duration = Duration::from_secs(1);

    #[test]
    fn messages_are_due_at_intervals_for_a_limited_time() {
        let (every, longest) = (Duration::from_secs(1), Duration::from_secs(12));
        let due = |busy, said: Option<u64>| {
            is_due(Duration::from_millis(busy), said.map(Duration::from_millis), every, longest)
        };
        assert!(!due(999, None) && due(1000, None));
        assert!(!due(5000, Some(999)) && due(5000, Some(1000)));
        assert!(due(11_999, Some(5000)) && !due(12_000, Some(5000)), "a VM that hangs is silent in the end");
    }

    #[test]
    fn heartbeat_sends_only_while_the_driver_is_busy() {
        let (here, there) = test_pair();
        let here = Arc::new(here);
        let heart = Heartbeat::of_target(TIMEOUT).unwrap();
        // The thread checks several times meanwhile. On a busy host it checks less often, which
        // only hides a defect.
        std::thread::sleep(TIMEOUT);
        assert!(!there.has_input(), "the driver speaks for itself");
        heart.during(&here, || {
            for _ in 0..3 {
                assert!(matches!(read_message(&there), Ok(ToSource::Pong(UNSOLICITED))));
            }
        });
        // `during` has waited for the end of the last message, and loopback delivers a message
        // before its send returns.
        while there.has_input() {
            assert!(matches!(read_message(&there), Ok(ToSource::Pong(UNSOLICITED))));
        }
        // The thread checks several times meanwhile, as above.
        std::thread::sleep(TIMEOUT);
        assert!(!there.has_input(), "it goes on after the work");
        // A call that takes no time causes no message. On a busy host a call may take longer.
        let mut longest = Duration::ZERO;
        for _ in 0..1000 {
            let began = Instant::now();
            heart.during(&here, || {});
            longest = longest.max(began.elapsed());
        }
        assert!(!there.has_input() || longest >= TIMEOUT / 4, "told of {longest:?}");
    }

    #[test]
    fn heartbeat_stops_for_a_vm_that_hangs() {
        let (here, there) = test_pair();
        let here = Arc::new(here);
        let heart = Heartbeat::of_source(TIMEOUT).unwrap();
        let began = Instant::now();
        let mut pings = 0;
        heart.during(&here, || {
            // Longer than any interval between messages, so that silence at the end means that the
            // heartbeat has stopped.
            while began.elapsed() < TIMEOUT * (PATIENCE + 2) {
                there.set_timeouts(Some(TIMEOUT), None).unwrap();
                if let Ok(message) = read_message::<ToTarget>(&there) {
                    assert_eq!(message, ToTarget::Ping(UNSOLICITED));
                    pings += 1;
                }
            }
            assert!(!there.has_input(), "it speaks for a VM that hangs");
        });
        assert!(pings > 0, "it said nothing");
    }

    #[test]
    fn heartbeat_ends_after_a_panic_and_when_the_peer_is_gone() {
        let (here, there) = test_pair();
        let here = Arc::new(here);
        // A thread that is delayed for three times the timeout would send nothing, and would not
        // notice that the peer is gone.
        let heart = Heartbeat::of_source(vmferry_testkit::PATIENCE).unwrap();
        let work = std::panic::AssertUnwindSafe(|| heart.during(&here, || panic!("on purpose")));
        assert!(std::panic::catch_unwind(work).is_err());
        assert!(heart.0.lock().busy.is_none());
        drop(there);
        heart.during(&here, || {
            vmferry_testkit::wait("a message that does not arrive", || heart.0.lock().busy.is_none());
        });
        assert!(here.hung_up_within(vmferry_testkit::PATIENCE));
    }
}
