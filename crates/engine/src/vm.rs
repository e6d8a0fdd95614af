//! Calls of a VMM's code, and the handling of panics in it.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::time::{Duration, Instant};
use vmferry_bitmap::Bitmap;
use vmferry_core::{PageRun, Protect, RegionId, Section, SourceVm, VmError};

/// Calls `work`, and converts a panic in `work` to an error. Such a panic may come from the VMM's
/// code. Because the panic becomes an error like any other, the thread reports its result, and the
/// guest stays where it is. A program that is built with `panic = "abort"` ends instead.
pub(crate) fn caught<T, E: From<VmError>>(work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    // State that the panic left inconsistent is not used again, because an error ends the channel
    // and therefore the migration.
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        Err(VmError::new(format!("a thread panicked: {}", text.unwrap_or("no reason was given"))).into())
    })
}

/// Returns the result of `work`, or an error that describes its panic.
pub(crate) fn caught_io<T>(work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    caught(|| Ok::<_, VmError>(work())).unwrap_or_else(|panic| Err(io::Error::other(panic)))
}

/// Logs a warning once if panics cannot be caught.
pub(crate) fn warn_if_panics_abort() {
    static WARNED: Once = Once::new();
    if cfg!(panic = "abort") {
        WARNED.call_once(|| {
            tracing::warn!(
                "this program is built with panic = \"abort\": a panic on any thread ends it, and its guest with it; build with \
                 panic = \"unwind\" to have such a panic end the migration only"
            );
        });
    }
}

/// Calls code of the VMM or of a watcher, logs a panic of that code, and returns the default value
/// in that case. Used where a panic must not suppress a result that the caller is about to return.
pub(crate) fn shielded<T: Default>(what: &str, work: impl FnOnce() -> T) -> T {
    caught(|| Ok::<_, VmError>(work())).unwrap_or_else(|error| {
        tracing::error!("{what}: {error}");
        T::default()
    })
}

/// Protects the pages of `run` that are set in `pages`, in pieces that do not cross a chunk
/// boundary of `protect`.
pub(crate) fn protect_run(
    protect: &dyn Protect,
    region: RegionId,
    run: PageRun,
    pages: &Bitmap,
) -> Result<(), VmError> {
    let piece = protect.chunk_pages().max(1);
    let mut first = run.first.0;
    while first < run.end() {
        let end = run.end().min((first / piece + 1) * piece);
        protect.protect(region, PageRun::from(first..end), pages)?;
        first = end;
    }
    Ok(())
}

/// Result of a trial pause: the cost of stopping a guest.
pub(crate) struct TrialPause {
    pub(crate) pause: Duration,
    /// Time until the I/O was quiesced.
    pub(crate) quiesce: Duration,
    pub(crate) save: Duration,
    /// Time for which the guest was paused.
    pub(crate) total: Duration,
    /// Saved state, or the error of I/O that was not quiesced in time. Other failures are not
    /// reported in this field.
    pub(crate) sections: Result<Vec<Section>, VmError>,
}

/// Quiesces the guest's devices within the time `within`, and saves the device state.
pub(crate) fn save(vm: &mut dyn SourceVm, within: Duration) -> Result<Vec<Section>, VmError> {
    vm.quiesce(within)?;
    vm.save()
}

/// Performs a trial pause: pauses the guest briefly to measure the cost of stopping it. `within` is
/// the time limit for quiescing its I/O. The guest is resumed also after a failure.
pub(crate) fn trial_pause(vm: &mut dyn SourceVm, within: Duration) -> Result<TrialPause, VmError> {
    let began = Instant::now();
    let paused = vm.pause();
    let pause = began.elapsed();
    let quiesced = paused.and_then(|()| vm.quiesce(within));
    let quiesce = began.elapsed().saturating_sub(pause);
    let saved = quiesced.and_then(|()| vm.save());
    let save = began.elapsed().saturating_sub(pause + quiesce);
    let resumed = vm.resume();
    let total = began.elapsed();
    let sections = match saved {
        Err(error) if !error.is_busy() => return Err(error),
        saved => saved,
    };
    resumed?;
    Ok(TrialPause { pause, quiesce, save, total, sections })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// Records the runs that it is asked to protect.
    struct Noted(u64, Mutex<Vec<(u64, u64)>>);

    impl Protect for Noted {
        fn chunk_pages(&self) -> u64 {
            self.0
        }

        fn protect(&self, _: RegionId, chunk: PageRun, _: &Bitmap) -> Result<(), VmError> {
            self.1.lock().unwrap().push((chunk.first.0, chunk.end()));
            Ok(())
        }
    }

    #[test]
    fn protected_runs_do_not_cross_chunk_boundaries() {
        for (chunk, run, want) in [
            (64, 512..700, vec![(512, 576), (576, 640), (640, 700)]),
            (64, 100..130, vec![(100, 128), (128, 130)]),
            (2048, 512..1024, vec![(512, 1024)]),
            (1, 7..9, vec![(7, 8), (8, 9)]),
        ] {
            let noted = Noted(chunk, Mutex::default());
            protect_run(&noted, RegionId(0), PageRun::from(run), &Bitmap::full(1024)).unwrap();
            assert_eq!(noted.1.into_inner().unwrap(), want, "{chunk}");
        }
    }
}
