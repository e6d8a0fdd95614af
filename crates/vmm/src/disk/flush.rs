//! Bringing what was written to where another host finds it: all disks at once, for no longer than a guest may stand still, and without
//! taking from the guest what it has to be told.

use super::{DiskError, VmDisk};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use vmferry_thread::{Role, spawn};

/// Brings what was written to `disks` to where another host finds it; requests are at rest. What is not done by `deadline` goes on without
/// anybody who waits for it, which does no harm: it writes what was written before.
///
/// # Errors
/// If it is not certain of a disk: the guest must not go anywhere then.
pub(crate) fn sync(disks: &[VmDisk], deadline: Instant) -> Result<(), DiskError> {
    let flush = |disk: &VmDisk| {
        let file = Arc::clone(&disk.file);
        (file.path().to_owned(), move || file.sync())
    };
    all(disks.iter().map(|disk| (disk.file.late(), flush(disk))).collect(), deadline)
}

/// Does all of `flushes`, each on a thread of its own.
fn all<F>(flushes: Vec<(&Late, (PathBuf, F))>, deadline: Instant) -> Result<(), DiskError>
where
    F: FnOnce() -> Result<(), DiskError> + Send + 'static,
{
    let slow = |path| DiskError::Slow { path };
    for (late, (path, _)) in &flushes {
        if !late.over_by(deadline) {
            return Err(slow(path.clone()));
        }
    }
    let (mut under_way, mut result) = (Vec::new(), Ok(()));
    for (late, (path, flush)) in flushes {
        let (done, awaited) = channel();
        let flushing = spawn(Role::Disk, "flush", move || {
            // Nobody may wait for it any more.
            let _ = done.send(flush());
        });
        match flushing {
            Ok(_) => under_way.push((late, path, awaited)),
            Err(source) => {
                result = Err(DiskError::Flush { path, source });
                break;
            }
        }
    }
    for (late, path, awaited) in under_way {
        if result.is_err() {
            late.keep(awaited);
            continue;
        }
        result = match awaited.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(done) => done,
            Err(RecvTimeoutError::Timeout) => {
                late.keep(awaited);
                Err(slow(path))
            }
            Err(RecvTimeoutError::Disconnected) => {
                Err(DiskError::Flush { path, source: io::Error::other("its thread panicked") })
            }
        };
    }
    result
}

/// A disk's flush of an attempt before that nobody waited for. There is one at most: on storage that hangs, attempt after attempt would leave a thread
/// behind. What it says counts no more, as requests were done since.
#[derive(Debug, Default)]
pub(super) struct Late(Mutex<Option<Receiver<Result<(), DiskError>>>>);

impl Late {
    fn keep(&self, flush: Receiver<Result<(), DiskError>>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(flush);
    }

    /// Waits for it.
    fn over_by(&self, deadline: Instant) -> bool {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let left = deadline.saturating_duration_since(Instant::now());
        let over = kept
            .as_ref()
            .is_none_or(|flush| !matches!(flush.recv_timeout(left), Err(RecvTimeoutError::Timeout)));
        if over {
            *kept = None;
        }
        over
    }
}

/// Whether the guest was told of writes that are lost.
///
/// The kernel says once for each time that a file was opened that something could not be written out, and counts it as clean from then on.
/// So the flush of a move has the file opened for itself, and does not take the guest's answer away; but a guest that has moved would get
/// it no more. Until a flush of its own has come after the move's, the guest stays.
#[derive(Debug, Default)]
pub(super) struct Losses {
    /// Flushes of moves that have failed.
    found: AtomicU32,
    /// How many of those the guest has flushed after: it was told then, or had been before.
    told: AtomicU32,
}

impl Losses {
    pub(super) fn found(&self) {
        self.found.fetch_add(1, Ordering::AcqRel);
    }

    /// Does the guest's `flush`, which tells of what was found before it.
    pub(super) fn telling<T>(&self, flush: impl FnOnce() -> T) -> T {
        let found = self.found.load(Ordering::Acquire);
        let flushed = flush();
        self.told.fetch_max(found, Ordering::AcqRel);
        flushed
    }

    pub(super) fn untold(&self) -> bool {
        self.found.load(Ordering::Acquire) > self.told.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use vmferry_testkit::PATIENCE;

    type Flush = Box<dyn FnOnce() -> Result<(), DiskError> + Send>;

    fn flush(name: &str, flush: impl FnOnce() -> Result<(), DiskError> + Send + 'static) -> (PathBuf, Flush) {
        (name.into(), Box::new(flush))
    }

    /// Of disks that have nothing under way.
    fn apart(
        flushes: impl IntoIterator<Item = (PathBuf, Flush)>,
        late: &[Late],
    ) -> Vec<(&Late, (PathBuf, Flush))> {
        late.iter().zip(flushes).collect()
    }

    fn soon() -> Instant {
        Instant::now() + PATIENCE
    }

    #[test]
    fn disks_are_flushed_at_once_and_not_one_after_the_other() {
        let (first, second) = (channel(), channel());
        // Each waits for the other.
        let both = [
            flush("one", move || {
                first.0.send(()).unwrap();
                second.1.recv_timeout(PATIENCE).unwrap();
                Ok(())
            }),
            flush("other", move || {
                second.0.send(()).unwrap();
                first.1.recv_timeout(PATIENCE).unwrap();
                Ok(())
            }),
        ];
        all(apart(both, &[Late::default(), Late::default()]), soon()).unwrap();
    }

    #[test]
    fn a_slow_disk_is_named_and_not_waited_for() {
        let (go_on, held) = channel::<()>();
        let (said, hears) = channel();
        let flushes = [
            flush("slow.img", move || {
                let _ = held.recv();
                said.send("done late").unwrap();
                Ok(())
            }),
            flush("quick.img", || Ok(())),
        ];
        let late = [Late::default(), Late::default()];
        let brief = || Instant::now() + Duration::from_millis(50);
        let error = all(apart(flushes, &late), brief()).unwrap_err();
        assert!(matches!(error, DiskError::Slow { .. }) && error.to_string().contains("slow.img"), "{error}");
        // It goes on, and no other begins beside it.
        let again = || ["slow.img", "quick.img"].map(|name| flush(name, || panic!("beside another")));
        let error = all(apart(again(), &late), brief()).unwrap_err();
        assert!(matches!(error, DiskError::Slow { .. }) && error.to_string().contains("slow.img"), "{error}");
        drop(go_on);
        assert_eq!(hears.recv_timeout(PATIENCE), Ok("done late"));
        // What it says counts no more: the next is waited for.
        let next = ["slow.img", "quick.img"].map(|name| flush(name, || Ok(())));
        all(apart(next, &late), soon()).unwrap();
    }

    #[test]
    fn what_the_host_refuses_and_a_panic_are_errors() {
        let refused = || {
            Err(DiskError::Flush { path: "bad.img".into(), source: io::Error::from_raw_os_error(libc::EIO) })
        };
        let error = all(apart([flush("bad.img", refused)], &[Late::default()]), soon()).unwrap_err();
        assert!(matches!(error, DiskError::Flush { .. }), "{error}");
        let error =
            all(apart([flush("bad.img", || panic!("on purpose"))], &[Late::default()]), soon()).unwrap_err();
        assert!(matches!(error, DiskError::Flush { .. }) && error.to_string().contains("bad.img"), "{error}");
    }

    #[test]
    fn a_loss_is_untold_until_a_flush_that_began_after_it_was_found() {
        let losses = Losses::default();
        assert!(!losses.untold());
        losses.telling(|| losses.found());
        assert!(losses.untold(), "that flush may have been answered already");
        losses.telling(|| {});
        assert!(!losses.untold());
        losses.found();
        assert!(losses.untold());
    }
}
