//! Measurement of the dirty rate.

use crate::TrackerError;
use std::time::{Duration, Instant};
use vmferry_bitmap::Bitmap;
use vmferry_core::{DirtyTracker, GuestMemory, PAGE_SIZE, PageRun, PageSet, RingFigures, VmError};

/// Number of pages that a guest dirtied within one window of a measurement.
#[derive(Debug, Clone, PartialEq)]
pub struct RatePoint {
    /// Measured length of the window, which is at least the requested length. All windows of a
    /// measurement begin at the same time, when all pages have been protected.
    pub window: Duration,
    /// Number of pages that were written at least once: the working set of the window.
    pub pages: u64,
    /// For each vCPU, the number of protected pages to which it was the first to write. Empty if
    /// the tracker does not use dirty rings. A page counts again if it is written again after a
    /// harvest.
    pub vcpus: Vec<u64>,
}

impl RatePoint {
    /// Returns the dirty rate in bytes per second: the rate at which a source would have to send
    /// pages again to keep up with the guest. A page that is written twice within the window counts
    /// once, so a longer window gives a lower rate.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a rate for reports and predictions")]
    pub fn bytes_per_s(&self) -> f64 {
        (self.pages * PAGE_SIZE) as f64 / self.window.as_secs_f64().max(1e-9)
    }
}

/// Measures the dirty rate of a guest over each of `windows`, which must fulfil the conditions of
/// [`check_windows`].
///
/// The function starts `tracker`, protects all pages of `memory`, counts the written pages at the
/// end of each window, and stops the tracker after the last one. It calls `stop` at least every 50
/// ms. If `stop` returns true, the measurement ends early, and the result contains only the windows
/// that are complete. The guest continues to run, and takes one fault for each page that it writes.
///
/// # Errors
/// Returns an error if the tracker cannot be started or stopped, or if it cannot protect or harvest
/// the pages.
pub fn measure(
    tracker: &mut dyn DirtyTracker,
    memory: &dyn GuestMemory,
    windows: &[Duration],
    stop: impl Fn() -> bool,
) -> Result<Vec<RatePoint>, VmError> {
    tracker.start()?;
    let points = watch(tracker, memory, windows, stop);
    let stopped = tracker.stop();
    let points = points?;
    stopped?;
    Ok(points)
}

/// Time between two calls of `stop`.
const TICK: Duration = Duration::from_millis(50);

fn watch(
    tracker: &mut dyn DirtyTracker,
    memory: &dyn GuestMemory,
    windows: &[Duration],
    stop: impl Fn() -> bool,
) -> Result<Vec<RatePoint>, VmError> {
    let layout = memory.layout();
    protect_all(tracker, memory)?;
    // Discard the pages that were written, or not protected, before this point.
    tracker.harvest(&mut PageSet::empty(layout))?;
    let (began, before) = (Instant::now(), tracker.ring());
    let (mut written, mut points) = (PageSet::empty(layout), Vec::with_capacity(windows.len()));
    for &window in windows {
        while let Some(left) = window.checked_sub(began.elapsed()).filter(|left| !left.is_zero()) {
            if stop() {
                return Ok(points);
            }
            std::thread::sleep(left.min(TICK));
        }
        // A harvest may protect the pages that it reports. The set keeps them, so each page counts
        // once.
        let window = began.elapsed();
        tracker.harvest(&mut written)?;
        let vcpus = tracker.ring().map(|now| each_vcpu(&now, before.as_ref())).unwrap_or_default();
        points.push(RatePoint { window, pages: written.count(), vcpus });
    }
    Ok(points)
}

fn protect_all(tracker: &dyn DirtyTracker, memory: &dyn GuestMemory) -> Result<(), VmError> {
    let protector = tracker.protector();
    let chunk = protector.chunk_pages().max(1);
    for region in memory.layout().regions() {
        let mut all = Bitmap::new(region.pages());
        all.set_range(0..region.pages());
        let mut first = 0;
        while first < region.pages() {
            let end = (first + chunk).min(region.pages());
            protector.protect(region.id, PageRun::from(first..end), &all)?;
            first = end;
        }
    }
    Ok(())
}

fn each_vcpu(now: &RingFigures, before: Option<&RingFigures>) -> Vec<u64> {
    let earlier = |index: usize| before.and_then(|b| b.vcpus.get(index)).map_or(0, |vcpu| vcpu.pages);
    now.vcpus.iter().enumerate().map(|(index, vcpu)| vcpu.pages.saturating_sub(earlier(index))).collect()
}

/// Maximum number of windows of one measurement.
const MOST_WINDOWS: usize = 64;

/// Checks that `windows` contains 1 to 64 windows in strictly ascending order, of which the first
/// is longer than zero and the last is not longer than `longest`.
///
/// # Errors
/// Returns [`TrackerError::Windows`] if a condition does not hold.
pub fn check_windows(windows: &[Duration], longest: Duration) -> Result<(), TrackerError> {
    let ascending = windows.windows(2).all(|pair| pair[0] < pair[1]);
    let fits = windows.first().is_some_and(|first| !first.is_zero()) && windows.last() <= Some(&longest);
    if ascending && fits && windows.len() <= MOST_WINDOWS {
        Ok(())
    } else {
        Err(TrackerError::Windows { longest })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_is_bytes_divided_by_time() {
        let point = RatePoint { window: Duration::from_millis(500), pages: 1000, vcpus: Vec::new() };
        assert!((point.bytes_per_s() - 8_192_000.0).abs() < 1e-6);
    }

    #[test]
    fn windows_must_ascend_and_end_within_the_limit() {
        let ms = Duration::from_millis;
        let check = |windows: &[Duration]| check_windows(windows, ms(1000));
        assert!(check(&[ms(1), ms(10), ms(1000)]).is_ok());
        for wrong in [&[][..], &[ms(0)], &[ms(2), ms(2)], &[ms(3), ms(2)], &[ms(1001)]] {
            let text = check(wrong).unwrap_err().to_string();
            assert!(text.contains("1s"), "{text}");
        }
    }
}
