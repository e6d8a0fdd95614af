//! Harvest policies of dirty rings, an extension point.

use crate::TrackerError;
use std::fmt;
use std::time::Duration;

/// Harvest policy of a [`RingTracker`](crate::RingTracker): decides when the reaper thread harvests
/// which rings.
///
/// [`Predict`](crate::Predict) is the policy of this crate. Implement this trait to use another
/// policy.
///
/// A policy is called only when the reaper thread wakes up. The harvest of each pass, and the
/// harvest by a vCPU whose ring is full, do not depend on the policy. Therefore no policy can lose
/// a write. A bad policy only makes the guest slower, because each harvest write-protects the
/// harvested pages again, and a full ring stops its vCPU. A policy that panics ends the reaper
/// thread ([`ReaperState::Failed`](crate::ReaperState::Failed)), and the vCPUs continue without the
/// thread.
///
/// # Example
/// A policy that looks at the rings ten times a second and harvests each ring that is half full:
///
/// ```
/// use std::time::Duration;
/// use vmferry_dirty::{HarvestSchedule, ReaperPolicy, RingView, Rings, TrackerError};
///
/// #[derive(Debug)]
/// struct HalfFull;
///
/// impl ReaperPolicy for HalfFull {
///     fn name(&self) -> &str {
///         "half-full"
///     }
///
///     fn begin(&self, _: &dyn Rings) -> Box<dyn HarvestSchedule> {
///         Box::new(TenTimesASecond(Vec::new()))
///     }
/// }
///
/// struct TenTimesASecond(Vec<RingView>);
///
/// impl HarvestSchedule for TenTimesASecond {
///     fn first_sleep(&self) -> Duration {
///         Duration::from_millis(100)
///     }
///
///     fn step(&mut self, rings: &mut dyn Rings) -> Result<Duration, TrackerError> {
///         rings.observe(&mut self.0);
///         let half = rings.usable() / 2;
///         let due: Vec<_> = (0..self.0.len()).filter(|ring| self.0[*ring].used > half).collect();
///         rings.harvest(&due)?;
///         Ok(Duration::from_millis(100))
///     }
/// }
/// ```
pub trait ReaperPolicy: fmt::Debug + Send + Sync {
    /// Returns the name of the policy, as reports show it.
    fn name(&self) -> &str;

    /// Returns true if a vCPU whose ring is full harvests all rings, under the lock of
    /// [`Rings::harvest_all`].
    ///
    /// The default is false: the vCPU harvests only its own ring.
    fn harvests_all(&self) -> bool {
        false
    }

    /// Creates the state of this policy for one period of tracking, from the start of the tracker
    /// to its stop.
    fn begin(&self, rings: &dyn Rings) -> Box<dyn HarvestSchedule>;
}

/// State of a [`ReaperPolicy`] for one period of tracking, which decides what the reaper thread
/// does each time it wakes up.
///
/// All calls are made on the reaper thread.
pub trait HarvestSchedule {
    /// Returns the time for which the reaper thread sleeps before the first call of
    /// [`step`](Self::step).
    fn first_sleep(&self) -> Duration;

    /// Looks at `rings`, harvests those that are due, and returns the time for which the reaper
    /// thread sleeps afterwards.
    ///
    /// The thread sleeps for exactly that time, unless a vCPU whose ring is above its
    /// [`watermark`](Self::watermark) wakes it earlier. If the time is zero, the thread does not
    /// sleep.
    ///
    /// # Errors
    /// An implementation must return the error of a failed harvest unchanged. The reaper thread
    /// then ends, as it does after a panic of this method, and logs the reason. Its state is
    /// [`ReaperState::Failed`](crate::ReaperState::Failed). The harvests of passes and of full
    /// rings continue without the reaper.
    fn step(&mut self, rings: &mut dyn Rings) -> Result<Duration, TrackerError>;

    /// Returns the maximum number of entries that this policy expects in `ring` at the next
    /// [`step`](Self::step).
    ///
    /// If a vCPU thread calls [`RingVcpu::on_exit`](crate::RingVcpu::on_exit) while its ring has
    /// more entries, it wakes the reaper thread. With `None`, the default, the vCPU never wakes the
    /// reaper thread.
    fn watermark(&self, ring: usize) -> Option<u32> {
        let _ = ring;
        None
    }
}

/// Access of a policy to the dirty rings of a VM. Each vCPU has one ring, with the index of the
/// vCPU.
pub trait Rings {
    /// Returns the current time on the monotonic clock that [`RingView::emptied_at`] uses.
    fn now(&self) -> Duration;

    /// Returns the number of entries of each ring.
    fn entries(&self) -> u32;

    /// Returns the number of entries that a vCPU can fill before it has to stop.
    fn usable(&self) -> u32;

    /// Replaces the content of `views` with the current state of each ring, in the order of the
    /// vCPUs. Takes no lock, and removes nothing from the rings.
    fn observe(&mut self, views: &mut Vec<RingView>);

    /// Harvests the rings with the indexes `rings`, each once, in any order. Returns the number of
    /// harvested pages.
    ///
    /// # Errors
    /// Returns an error if the pages cannot be protected again. The pages are kept, and the next
    /// harvest of the ring tries again. Returns [`TrackerError::NoRing`], and harvests no ring, if
    /// one of `rings` does not exist.
    fn harvest(&mut self, rings: &[usize]) -> Result<u64, TrackerError>;

    /// Harvests all rings under one lock, for which every other caller of this function waits.
    /// Returns the number of harvested pages.
    ///
    /// # Errors
    /// Returns an error in the cases of [`harvest`](Self::harvest).
    fn harvest_all(&mut self) -> Result<u64, TrackerError>;
}

/// State of one dirty ring, as [`Rings::observe`] returns it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub struct RingView {
    /// Number of entries that wait to be harvested.
    pub used: u32,
    /// Number of pages that any thread has harvested from the ring since tracking started.
    pub harvested: u64,
    /// Number of times that the vCPU found the ring full, since tracking started.
    pub full_exits: u64,
    /// Time during which the vCPU was stopped by full rings, since tracking started.
    pub stalled: Duration,
    /// Time of the latest harvest that found pages, measured since the rings were created. Before
    /// the first such harvest, the time at which tracking started.
    pub emptied_at: Duration,
}
