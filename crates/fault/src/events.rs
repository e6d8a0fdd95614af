//! Userfaultfds of all shards, and waiting for their faults.

use crate::error::FaultError;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vmferry_sys::SysError;
use vmferry_sys::uffd::{Access, Event, Userfaultfd};

/// Maximum number of shards, because more threads do not serve the faults of one host faster.
const MAX_SHARDS: usize = 16;
/// Maximum time for which a waiting thread sleeps without a check for an interrupt. The limit
/// matters only if several threads wait for one shard, because a thread that returns can consume
/// the signal before another thread sees it.
const LOOK: Duration = Duration::from_millis(100);

/// Access that raised a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Touch {
    /// Address of the page.
    pub(crate) address: u64,
    pub(crate) write: bool,
    /// Id of the sleeping thread, or 0 if it is not known.
    pub(crate) thread: u32,
}

/// State of one shard.
#[derive(Debug)]
struct Shard {
    uffd: Userfaultfd,
    /// Eventfd that is readable while an interrupt has not been consumed.
    bell: OwnedFd,
    /// Number of the last interrupt that a call noticed.
    seen: AtomicU64,
    /// Number of running calls of `next`.
    readers: AtomicU32,
}

/// All shards.
#[derive(Debug)]
pub(crate) struct Shards {
    shards: Vec<Shard>,
    /// Number of interrupts so far.
    interrupts: AtomicU64,
}

impl Shards {
    /// Returns the number of shards that is nearest to `wanted`.
    pub(crate) fn number(wanted: usize) -> usize {
        wanted.clamp(1, MAX_SHARDS)
    }

    /// Opens `count` userfaultfds with `features`. `refused` wraps the error of the host.
    pub(crate) fn open(
        count: usize,
        features: u64,
        user_mode_only: bool,
        refused: impl Fn(SysError) -> FaultError,
    ) -> Result<Self, FaultError> {
        let open = |_| {
            let uffd =
                if user_mode_only { Userfaultfd::open(features) } else { Userfaultfd::open_full(features) };
            let uffd = uffd.map_err(&refused)?;
            debug_assert!(user_mode_only || uffd.access() == Access::Full);
            let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
            let bell = bell.map_err(|error| FaultError::Wait { shard: 0, source: error.into() })?;
            Ok(Shard { uffd, bell, seen: AtomicU64::new(0), readers: AtomicU32::new(0) })
        };
        let shards = (0..count).map(open).collect::<Result<_, FaultError>>()?;
        Ok(Self { shards, interrupts: AtomicU64::new(0) })
    }

    /// Returns the userfaultfd of `shard`, which must exist.
    pub(crate) fn uffd(&self, shard: usize) -> &Userfaultfd {
        &self.shards[shard].uffd
    }

    /// Returns true if no thread is waiting for faults. A thread that has read a fault and serves
    /// it does not count as waiting, so a single result proves little.
    pub(crate) fn is_unserved(&self) -> bool {
        self.shards.iter().all(|shard| shard.readers.load(Ordering::Relaxed) == 0)
    }

    /// Waits for the next fault of shard `index`, at most for the time `within`. Returns `None` if
    /// there was no fault in this time, or if [`interrupt`](Self::interrupt) was called.
    pub(crate) fn next(&self, index: usize, within: Duration) -> Result<Option<Touch>, FaultError> {
        let have = self.shards.len();
        let shard = self.shards.get(index).ok_or(FaultError::NoShard { shard: index, have })?;
        shard.readers.fetch_add(1, Ordering::Relaxed);
        let touch = self.wait(shard, index, within);
        shard.readers.fetch_sub(1, Ordering::Relaxed);
        touch
    }

    fn wait(&self, shard: &Shard, index: usize, within: Duration) -> Result<Option<Touch>, FaultError> {
        let failed = |source| FaultError::Wait { shard: index, source };
        let began = Instant::now();
        let before = self.interrupts.load(Ordering::Acquire);
        let mut waits = shard.seen.swap(before, Ordering::AcqRel) == before;
        if !waits {
            // This call has noticed the interrupt, and so will the calls that are already waiting,
            // because they compare its number even if they find the eventfd no longer readable. If
            // another interrupt arrives between the load and this read, its signal is lost, but the
            // loop below finds its number.
            let _ = rustix::io::read(&shard.bell, &mut [0; 8]);
        }
        loop {
            match shard.uffd.next_event() {
                Ok(Some(Event::Fault { address, write, thread })) => {
                    return Ok(Some(Touch { address, write, thread }));
                }
                // Message of a feature that was not requested.
                Ok(Some(_)) => continue,
                Ok(None) => {}
                Err(error) if error.errno() == Some(libc::EINTR) => continue,
                Err(error) => return Err(failed(std::io::Error::other(error))),
            }
            let left = within.saturating_sub(began.elapsed());
            waits &= self.interrupts.load(Ordering::Acquire) == before;
            if !waits || left.is_zero() {
                return Ok(None);
            }
            shard.sleep(left.min(LOOK)).map_err(failed)?;
        }
    }

    /// Interrupts every call of [`next`](Self::next) that is waiting. If a thread is not waiting,
    /// its next call returns without waiting.
    pub(crate) fn interrupt(&self) {
        // Increase the number first, so that a thread that finds the eventfd readable also finds
        // the new number.
        self.interrupts.fetch_add(1, Ordering::AcqRel);
        for shard in &self.shards {
            // The write fails only if 2^64 - 2 signals were not read.
            let _ = rustix::io::write(&shard.bell, &1_u64.to_ne_bytes());
        }
    }
}

impl Shard {
    /// Sleeps until a fault or an interrupt arrives, or for `time`.
    fn sleep(&self, time: Duration) -> std::io::Result<()> {
        let mut fds = [
            PollFd::from_borrowed_fd(self.uffd.as_fd(), PollFlags::IN),
            PollFd::new(&self.bell, PollFlags::IN),
        ];
        let time = Timespec {
            tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: time.subsec_nanos().into(),
        };
        match poll(&mut fds, Some(&time)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let broken = PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL;
        if fds.iter().any(|fd| fd.revents().intersects(broken)) {
            return Err(std::io::Error::other("a userfaultfd cannot be polled any more"));
        }
        Ok(())
    }
}
