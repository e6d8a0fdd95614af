//! Extension point: when the reaper harvests the dirty rings.

use crate::TrackerError;
use std::fmt;
use std::time::Duration;

/// Harvest policy of a [`RingTracker`](crate::RingTracker): decides when the reaper thread harvests
/// which rings.
///
/// [`Predict`](crate::Predict) is the policy of this crate. Implement this trait to use another
/// policy.
///
/// A policy is called only when the reaper thread wakes up. Harvests of a pass, and of a vCPU whose
/// ring is full, happen without the policy. Therefore no policy can lose a write. A bad policy
/// makes the guest slower: each harvest write-protects the harvested pages again, and a full ring
/// stops its vCPU.
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
    /// Returns the name that reports show.
    fn name(&self) -> &str;

    /// Returns true if a vCPU whose ring is full harvests all rings, under the lock of
    /// [`Rings::harvest_all`].
    ///
    /// The default is false: the vCPU harvests its own ring, and takes no lock that another running
    /// vCPU needs.
    fn harvests_all(&self) -> bool {
        false
    }

    /// Returns the state of this policy for one period of tracking, from start to stop.
    fn begin(&self, rings: &dyn Rings) -> Box<dyn HarvestSchedule>;
}

/// Running policy: decides the actions of the reaper thread at each wake-up.
///
/// All calls are made on the reaper thread.
pub trait HarvestSchedule {
    /// Returns the time to sleep before the first turn.
    fn first_sleep(&self) -> Duration;

    /// Looks at `rings`, harvests what is due, and returns the time to sleep until the next turn.
    ///
    /// The thread sleeps for exactly that time, or until a vCPU passes the
    /// [`watermark`](Self::watermark) of its ring. A time of zero makes it spin.
    ///
    /// # Errors
    /// Return the error of a harvest as it is. The reaper then ends, and its state is
    /// [`ReaperState::Failed`](crate::ReaperState::Failed): passes and full rings are still
    /// harvested.
    fn step(&mut self, rings: &mut dyn Rings) -> Result<Duration, TrackerError>;

    /// Returns the maximum number of entries of `ring` that this policy expects at its next turn.
    ///
    /// A vCPU that leaves the guest with more entries in its ring wakes the reaper thread. With
    /// `None`, the default, the vCPU never wakes it.
    fn watermark(&self, ring: usize) -> Option<u32> {
        let _ = ring;
        None
    }
}

/// Dirty rings of a VM, as a policy uses them: one for each vCPU.
pub trait Rings {
    /// Returns the time on the clock of [`RingView::emptied_at`]. The clock never goes back.
    fn now(&self) -> Duration;

    /// Returns the number of entries of each ring.
    fn entries(&self) -> u32;

    /// Returns the number of entries that a vCPU can fill before it has to stop.
    fn usable(&self) -> u32;

    /// Replaces `views` by the current state of each ring, in the order of the vCPUs. Takes no
    /// lock, and removes nothing from the rings.
    fn observe(&mut self, views: &mut Vec<RingView>);

    /// Harvests `rings`, given in ascending order. Returns the number of pages.
    ///
    /// # Errors
    /// Returns an error if the pages cannot be protected again. They are kept, and the next harvest
    /// of the ring tries again.
    fn harvest(&mut self, rings: &[usize]) -> Result<u64, TrackerError>;

    /// Harvests all rings under one lock, for which every other caller waits. Returns the number of
    /// pages.
    ///
    /// # Errors
    /// Returns an error in the cases of [`harvest`](Self::harvest).
    fn harvest_all(&mut self) -> Result<u64, TrackerError>;
}

/// State of one ring at the time of a look.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub struct RingView {
    /// Entries that wait to be harvested.
    pub used: u32,
    /// Pages harvested from the ring, by any thread, since tracking started.
    pub harvested: u64,
    /// Number of times that the vCPU found the ring full, since tracking started.
    pub full_exits: u64,
    /// Time during which the vCPU was stopped by full rings, since tracking started.
    pub stalled: Duration,
    /// Time of the latest harvest, since the rings were created.
    pub emptied_at: Duration,
}
