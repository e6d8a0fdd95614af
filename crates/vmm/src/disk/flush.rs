//! Flush of all disks at once to where another host finds the data. The flush takes no longer than
//! the guest may be paused, and does not hide errors from the guest.

use super::{DiskError, VmDisk};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use vmferry_thread::{Role, spawn};

/// Writes the data of `disks` to where another host finds it. Requests must be quiesced. A flush
/// that is not done by `deadline` continues without a waiting thread, which does no harm: it writes
/// what was written before.
///
/// # Errors
/// Returns an error if a disk's data may not be on storage. The guest must not migrate then.
pub(crate) fn sync(disks: &[VmDisk], deadline: Instant) -> Result<(), DiskError> {
    let flush = |disk: &VmDisk| {
        let file = Arc::clone(&disk.file);
        (file.path().to_owned(), move || file.sync())
    };
    all(disks.iter().map(|disk| (disk.file.late(), flush(disk))).collect(), deadline)
}

/// Does all of `flushes`, each on a thread of its own.
fn all<F>(flushes: Vec<(&UnfinishedFlush, (PathBuf, F))>, deadline: Instant) -> Result<(), DiskError>
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
            // The receiver may have stopped waiting.
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
                Err(DiskError::Flush { path, source: io::Error::other("the flush thread panicked") })
            }
        };
    }
    result
}

/// Flush of an earlier attempt that is no longer waited for. There is at most one per disk: on
/// storage that hangs, every attempt would otherwise leave a thread behind. Its result does not
/// count any more, because requests were done since.
#[derive(Debug, Default)]
pub(super) struct UnfinishedFlush(Mutex<Option<Receiver<Result<(), DiskError>>>>);

impl UnfinishedFlush {
    fn keep(&self, flush: Receiver<Result<(), DiskError>>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(flush);
    }

    /// Waits for the flush. Returns true if it ended by `deadline`, or if there is none.
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

/// Record of whether the guest was told of lost writes.
///
/// For each opened file, the kernel reports only once that data could not be written out, and then
/// counts the data as clean. The flush of a migration therefore uses a file that was opened
/// separately, and does not take away the guest's error. A guest that has migrated would not get
/// the error any more. The guest therefore stays until it has done a flush of its own after the
/// failed one.
#[derive(Debug, Default)]
pub(super) struct Losses {
    /// Number of failed flushes of migrations.
    found: AtomicU32,
    /// Number of those failed flushes after which the guest has flushed: it was told then or
    /// earlier.
    told: AtomicU32,
}

impl Losses {
    pub(super) fn found(&self) {
        self.found.fetch_add(1, Ordering::AcqRel);
    }

    /// Does the guest's `flush`, which reports the losses that were found before it.
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

    /// Returns flushes for disks without an earlier flush.
    fn apart(
        flushes: impl IntoIterator<Item = (PathBuf, Flush)>,
        late: &[UnfinishedFlush],
    ) -> Vec<(&UnfinishedFlush, (PathBuf, Flush))> {
        late.iter().zip(flushes).collect()
    }

    fn soon() -> Instant {
        Instant::now() + PATIENCE
    }

    #[test]
    fn disks_are_flushed_concurrently() {
        let (first, second) = (channel(), channel());
        // Each flush waits for the other.
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
        all(apart(both, &[UnfinishedFlush::default(), UnfinishedFlush::default()]), soon()).unwrap();
    }

    #[test]
    fn slow_disk_is_named_and_not_waited_for() {
        let (go_on, held) = channel::<()>();
        let (said, received) = channel();
        let flushes = [
            flush("slow.img", move || {
                let _ = held.recv();
                said.send("done late").unwrap();
                Ok(())
            }),
            flush("quick.img", || Ok(())),
        ];
        let late = [UnfinishedFlush::default(), UnfinishedFlush::default()];
        let brief = || Instant::now() + Duration::from_millis(50);
        let error = all(apart(flushes, &late), brief()).unwrap_err();
        assert!(matches!(error, DiskError::Slow { .. }) && error.to_string().contains("slow.img"), "{error}");
        // The flush continues, and no other flush of the disk begins.
        let again = || ["slow.img", "quick.img"].map(|name| flush(name, || panic!("beside another")));
        let error = all(apart(again(), &late), brief()).unwrap_err();
        assert!(matches!(error, DiskError::Slow { .. }) && error.to_string().contains("slow.img"), "{error}");
        drop(go_on);
        assert_eq!(received.recv_timeout(PATIENCE), Ok("done late"));
        // The result of the late flush does not count. The next flush is waited for.
        let next = ["slow.img", "quick.img"].map(|name| flush(name, || Ok(())));
        all(apart(next, &late), soon()).unwrap();
    }

    #[test]
    fn host_errors_and_panics_become_errors() {
        let refused = || {
            Err(DiskError::Flush { path: "bad.img".into(), source: io::Error::from_raw_os_error(libc::EIO) })
        };
        let error =
            all(apart([flush("bad.img", refused)], &[UnfinishedFlush::default()]), soon()).unwrap_err();
        assert!(matches!(error, DiskError::Flush { .. }), "{error}");
        let error =
            all(apart([flush("bad.img", || panic!("on purpose"))], &[UnfinishedFlush::default()]), soon())
                .unwrap_err();
        assert!(matches!(error, DiskError::Flush { .. }) && error.to_string().contains("bad.img"), "{error}");
    }

    #[test]
    fn loss_is_untold_until_a_flush_that_began_after_it() {
        let losses = Losses::default();
        assert!(!losses.untold());
        losses.telling(|| losses.found());
        assert!(losses.untold(), "that flush may already have been answered");
        losses.telling(|| {});
        assert!(!losses.untold());
        losses.found();
        assert!(losses.untold());
    }
}
