//! Saying that a side is there while its driver is busy in its VM.
//!
//! A driver that pauses, saves, loads or starts its VM does nothing else meanwhile, and some of that can take long: a slow disk is
//! flushed, a vCPU waits for a page. The other side cannot tell that from a dead host, and gives up a side that is silent for its
//! `peer_timeout`. So a thread sends in the driver's place then, and in no other moment: what the two send is never mixed, and a driver that
//! hangs elsewhere is silent. It does so for a bounded time, as a VM that hangs is as good as dead.

// What a peer or the host says must not panic a thread of the engine. Tests may.
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

/// The number of a ping that nobody waits for, and of a pong that answers none.
const UNASKED: u64 = u64::MAX;
/// How often something is said, unless silence is borne for less than four times this.
const EVERY: Duration = Duration::from_secs(1);
/// For how many times the peer's timeout a driver is spoken for.
const PATIENCE: u32 = 3;

/// The thread, and what it shares with the driver. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Heartbeat(Arc<Shared>, Option<JoinHandle<()>>);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    ending: Condvar,
    peer_timeout: Duration,
}

#[derive(Debug, Default)]
struct State {
    /// The driver is busy in its VM: since when, and on which control channel its side is awaited.
    busy: Option<(Instant, Arc<Stream>)>,
    said: Option<Instant>,
    ended: bool,
}

impl Heartbeat {
    /// Of a source, which is awaited by a target for about `peer_timeout`.
    pub(crate) fn of_source(peer_timeout: Duration) -> io::Result<Self> {
        Self::start("source-heartbeat", ToTarget::Ping(UNASKED), peer_timeout)
    }

    /// Of a target.
    pub(crate) fn of_target(peer_timeout: Duration) -> io::Result<Self> {
        Self::start("target-heartbeat", ToSource::Pong(UNASKED), peer_timeout)
    }

    fn start<M: Serialize + Send + 'static>(
        name: &str,
        message: M,
        peer_timeout: Duration,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared { state: Mutex::default(), ending: Condvar::new(), peer_timeout });
        let own = Arc::clone(&shared);
        let thread = spawn(Role::Control, name, move || own.live(&message))?;
        Ok(Self(shared, Some(thread)))
    }

    /// Does `work` on the caller's thread, which sends nothing on `control` meanwhile. That costs two uncontended locks: the thread looks
    /// by itself from time to time whether there is anything to be said.
    pub(crate) fn during<T>(&self, control: &Arc<Stream>, work: impl FnOnce() -> T) -> T {
        /// Also where `work` panics.
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

    /// Begins to speak for a side that is busy outside the engine. That side sends nothing on
    /// `control` before [`end`](Self::end).
    pub(crate) fn begin(&self, control: &Arc<Stream>) {
        self.0.lock().busy = Some((Instant::now(), Arc::clone(control)));
    }

    /// Waits for the end of what is just being sent, and sends nothing more.
    pub(crate) fn end(&self) {
        self.0.lock().busy = None;
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.0.lock().ended = true;
        self.0.ending.notify_all();
        // Its panic was printed when it happened.
        let _ = self.1.take().map(JoinHandle::join);
    }
}

impl Shared {
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
                // With the lock: the driver does not go on, and send, in the middle of it. It waits no longer than for a message of its own.
                if send_message(control, message, self.peer_timeout).is_err() {
                    // Perhaps half of it has left. The reader of this channel tells the driver.
                    control.shutdown();
                    state.busy = None;
                }
                state.said = Some(Instant::now());
            }
            // No shorter than the kernel's clock ticks, whatever a peer is borne for.
            let pause = (every / 2).max(Duration::from_millis(1));
            state = self.ending.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Returns whether a message is due from a side that has been busy for `busy` and last said something `said` ago.
fn is_due(busy: Duration, said: Option<Duration>, every: Duration, longest: Duration) -> bool {
    (every..longest).contains(&busy) && said.is_none_or(|said| said >= every)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::{read_message, test_pair};

    /// A side is spoken for during three of these: longer than a thread stands still on a starved
    /// host.
    const TIMEOUT: Duration = Duration::from_secs(1);

    #[test]
    fn messages_are_due_at_intervals_and_not_without_end() {
        let (every, longest) = (Duration::from_secs(1), Duration::from_secs(12));
        let due = |busy, said: Option<u64>| {
            is_due(Duration::from_millis(busy), said.map(Duration::from_millis), every, longest)
        };
        assert!(!due(999, None) && due(1000, None));
        assert!(!due(5000, Some(999)) && due(5000, Some(1000)));
        assert!(due(11_999, Some(5000)) && !due(12_000, Some(5000)), "a VM that hangs is silent in the end");
    }

    #[test]
    fn a_busy_side_says_that_it_is_there_and_an_idle_one_says_nothing() {
        let (here, there) = test_pair();
        let here = Arc::new(here);
        let heart = Heartbeat::of_target(TIMEOUT).unwrap();
        // The thread looks several times meanwhile. On a busy host it looks less often, which only hides a defect.
        std::thread::sleep(TIMEOUT);
        assert!(!there.has_input(), "the driver speaks for itself");
        heart.during(&here, || {
            for _ in 0..3 {
                assert!(matches!(read_message(&there), Ok(ToSource::Pong(UNASKED))));
            }
        });
        // `during` has waited for the end of the last message, and loopback delivers a message before its send returns.
        while there.has_input() {
            assert!(matches!(read_message(&there), Ok(ToSource::Pong(UNASKED))));
        }
        // As above.
        std::thread::sleep(TIMEOUT);
        assert!(!there.has_input(), "it goes on after the work");
        // What takes no time is not told of. On a busy host a call may take longer.
        let mut longest = Duration::ZERO;
        for _ in 0..1000 {
            let began = Instant::now();
            heart.during(&here, || {});
            longest = longest.max(began.elapsed());
        }
        assert!(!there.has_input() || longest >= TIMEOUT / 4, "told of {longest:?}");
    }

    #[test]
    fn a_vm_that_hangs_is_silent_in_the_end() {
        let (here, there) = test_pair();
        let here = Arc::new(here);
        let heart = Heartbeat::of_source(TIMEOUT).unwrap();
        let began = Instant::now();
        let mut heard = 0;
        heart.during(&here, || {
            // Longer than any message may take to become due, so that silence at the end is the end.
            while began.elapsed() < TIMEOUT * (PATIENCE + 2) {
                there.set_timeouts(Some(TIMEOUT), None).unwrap();
                if let Ok(message) = read_message::<ToTarget>(&there) {
                    assert_eq!(message, ToTarget::Ping(UNASKED));
                    heard += 1;
                }
            }
            assert!(!there.has_input(), "it speaks for a VM that hangs");
        });
        assert!(heard > 0, "it said nothing");
    }

    #[test]
    fn a_panic_ends_it_and_a_peer_that_is_gone_is_no_trouble() {
        let (here, there) = test_pair();
        let here = Arc::new(here);
        // A thread that stood still for three times the timeout would send nothing, and find no
        // peer gone.
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
