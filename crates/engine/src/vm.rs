//! Calls of a VMM's own code, and what becomes of a panic in it.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::time::{Duration, Instant};
use vmferry_bitmap::Bitmap;
use vmferry_core::{PageRun, Protect, RegionId, Section, SourceVm, VmError};

/// Calls `work` on a thread of the engine's. A panic in it, which may be the VM's own code's, becomes a failure like any other: whoever
/// waits for the thread's word is told, and the guest goes on where it is. (Not in a program that aborts at a panic.)
pub(crate) fn caught<T, E: From<VmError>>(work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    // What was left half-way is not used again: an error ends the channel and with it the migration.
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        Err(VmError::new(format!("a thread panicked: {}", text.unwrap_or("it did not say why"))).into())
    })
}

/// Returns what `work` returns, or an error that tells of its panic.
pub(crate) fn caught_io<T>(work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    caught(|| Ok::<_, VmError>(work())).unwrap_or_else(|panic| Err(io::Error::other(panic)))
}

/// Warns once where no panic can be caught.
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

/// Calls code of the VM's, or of whoever watches, on which nothing depends any more: a panic in it must not take away what the caller is
/// about to be told of its guest.
pub(crate) fn shielded<T: Default>(what: &str, work: impl FnOnce() -> T) -> T {
    caught(|| Ok::<_, VmError>(work())).unwrap_or_else(|error| {
        tracing::error!("{what}: {error}");
        T::default()
    })
}

/// Protects the pages of `run` that are set in `pages`, in pieces that `protect` takes.
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

/// What it takes to stop a guest.
pub(crate) struct Rehearsal {
    pub(crate) pause: Duration,
    /// Until its I/O was at rest.
    pub(crate) settle: Duration,
    pub(crate) save: Duration,
    /// For how long it stood still.
    pub(crate) stood: Duration,
    /// Its state; or why its I/O did not come to rest in time, which is all that can be wrong.
    pub(crate) sections: Result<Vec<Section>, VmError>,
}

/// Brings to rest what the guest's devices have under way, within that time, and saves the state.
pub(crate) fn save(vm: &mut dyn SourceVm, within: Duration) -> Result<Vec<Section>, VmError> {
    vm.settle(within)?;
    vm.save()
}

/// Stops the guest for an instant, to learn what that takes; its I/O has so long to come to rest. It goes on whatever fails.
pub(crate) fn rehearse(vm: &mut dyn SourceVm, within: Duration) -> Result<Rehearsal, VmError> {
    let began = Instant::now();
    let paused = vm.pause();
    let pause = began.elapsed();
    let settled = paused.and_then(|()| vm.settle(within));
    let settle = began.elapsed().saturating_sub(pause);
    let saved = settled.and_then(|()| vm.save());
    let save = began.elapsed().saturating_sub(pause + settle);
    let resumed = vm.resume();
    let stood = began.elapsed();
    let sections = match saved {
        Err(error) if !error.is_busy() => return Err(error),
        saved => saved,
    };
    resumed?;
    Ok(Rehearsal { pause, settle, save, stood, sections })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// Notes what it is asked to protect.
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
    fn no_run_is_longer_than_who_protects_takes_or_crosses_its_chunks() {
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
