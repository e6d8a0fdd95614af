//! Events that wake a thread while it waits for other input.

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

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

type Wake = dyn Fn() + Send + Sync;

/// Functions that wake the drivers that check for a request, such as a cancel.
///
/// No request is missed. The thread that makes a request stores the request before it calls
/// [`wake`](Self::wake), and a driver registers before it checks for the request for the first
/// time. Therefore either the driver is woken, or its check finds the request.
#[derive(Default)]
pub(crate) struct Wakers(Mutex<Vec<Weak<Wake>>>);

impl Wakers {
    /// Registers `wake`, which is called after each request for as long as the caller keeps the
    /// returned value.
    pub(crate) fn register(&self, wake: impl Fn() + Send + Sync + 'static) -> Arc<dyn Fn() + Send + Sync> {
        let wake: Arc<Wake> = Arc::new(wake);
        let mut wakers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        wakers.retain(|waker| waker.strong_count() > 0);
        wakers.push(Arc::downgrade(&wake));
        wake
    }

    /// Wakes the drivers. The request must already be stored.
    pub(crate) fn wake(&self) {
        let wakers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        wakers.iter().filter_map(Weak::upgrade).for_each(|wake| wake());
    }
}

impl fmt::Debug for Wakers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Wakers")
    }
}

/// Event that happens once, and that a thread can wait for together with descriptors.
#[derive(Debug)]
pub(crate) struct Ending(OwnedFd);

impl Ending {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Raises the event. The event stays raised.
    pub(crate) fn end(&self) {
        // An eventfd refuses a write only if its counter would overflow. In that case, the event is
        // already raised.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Waits for the event for at most `within`. Returns true if the event is raised.
    pub(crate) fn wait(&self, within: Duration) -> bool {
        ready(&[self.0.as_fd()], Some(within)) == [true]
    }
}

impl AsFd for Ending {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Waits until one of `fds` can be read, has failed or was hung up, for at most `within`, or
/// without a limit if `within` is `None`. Returns for each descriptor whether it is in such a
/// state. A signal ends the wait early.
pub(crate) fn ready(fds: &[BorrowedFd<'_>], within: Option<Duration>) -> Vec<bool> {
    let mut polled: Vec<_> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let timeout = within.map(|within| Timespec {
        tv_sec: within.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: within.subsec_nanos().into(),
    });
    let any = poll(&mut polled, timeout.as_ref()).is_ok_and(|count| count > 0);
    polled.iter().map(|fd| any && !fd.revents().is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn request_wakes_only_the_drivers_that_are_still_there() {
        let (wakers, count) = (Wakers::default(), Arc::new(AtomicU32::new(0)));
        wakers.wake();
        let add = |by| {
            let count = Arc::clone(&count);
            move || {
                count.fetch_add(by, Ordering::Relaxed);
            }
        };
        let (first, second) = (wakers.register(add(1)), wakers.register(add(10)));
        wakers.wake();
        drop(first);
        wakers.wake();
        assert_eq!(count.load(Ordering::Relaxed), 21);
        drop(second);
        let _third = wakers.register(add(100));
        assert_eq!(wakers.0.lock().unwrap().len(), 1);
    }

    #[test]
    fn raised_event_is_seen_at_every_wait() {
        let ending = Ending::new().unwrap();
        assert!(!ending.wait(Duration::ZERO));
        ending.end();
        ending.end();
        assert!(ending.wait(vmferry_testkit::PATIENCE) && ending.wait(Duration::ZERO));
    }
}
