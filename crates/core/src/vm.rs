//! The traits that a VMM implements so that its guest can be moved.
//!
//! | trait | called by | purpose |
//! |---|---|---|
//! | [`Migratable`] | source, target | the machine's description and memory |
//! | [`GuestMemory`] | source, target, many threads | the guest's pages |
//! | [`DirtyTracker`](crate::DirtyTracker), [`Protect`](crate::Protect) | the source | finding the pages that were written after they were read |
//! | [`SourceVm`] | the source | pause, quiesce, save, resume |
//! | [`FreePages`] | the source | finding the pages that the guest does not use |
//! | [`TargetVm`] | the target | load, start |
//! | [`DemandPaging`] | the target, many threads | placing pages while the guest runs |
//!
//! The engine calls [`SourceVm`], [`FreePages`] and [`TargetVm`] on the thread that called the
//! engine, so [`SourceVm`] and [`TargetVm`] need not be `Send`. All its channel threads call
//! [`GuestMemory`] and [`Protect`](crate::Protect) at the same time.
//!
//! # Panics
//! A panic of an implementation on a thread of the engine fails the migration, as an error does, if
//! panics unwind. In a program that is built with `panic = "abort"`, every panic ends the process,
//! and the guest with it. The engine logs a warning about this once.

use crate::{
    DemandPaging, DirtyTracker, FreePages, Layout, MachineConfig, PageRun, RegionId, Section, StateReader,
    StateWriter, StreamName, TrackerKind, Window,
};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use vmferry_bitmap::Bitmap;

/// Error of a VMM's implementation of these traits, with a message of its own.
///
/// The display text contains the wrapped error and its causes. The engine passes this text to the
/// log and to the peer.
#[derive(Debug)]
pub struct VmError {
    source: Box<dyn std::error::Error + Send + Sync>,
    busy: bool,
}

impl VmError {
    /// Wraps an error or a message.
    pub fn new(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self { source: error.into(), busy: false }
    }

    /// Wraps an error or a message about work that needs more time than it was given: see
    /// [`SourceVm::quiesce`].
    pub fn busy(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self { source: error.into(), busy: true }
    }

    /// Returns the wrapped error.
    #[must_use]
    pub fn get_ref(&self) -> &(dyn std::error::Error + Send + Sync + 'static) {
        &*self.source
    }

    /// Returns true if a later attempt may succeed.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.busy
    }
}

impl fmt::Display for VmError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = self.source.to_string();
        let mut cause = self.source.source();
        while let Some(error) = cause {
            let said = error.to_string();
            // The text of many errors already contains the text of their cause.
            if !text.contains(&said) {
                text.push_str(": ");
                text.push_str(&said);
            }
            cause = error.source();
        }
        f.write_str(&text)
    }
}

/// The error has no source, because its text already contains the causes.
impl std::error::Error for VmError {}

impl From<std::io::Error> for VmError {
    fn from(error: std::io::Error) -> Self {
        Self::new(error)
    }
}

/// Pages of a guest. All threads of the engine share them.
pub trait GuestMemory: Send + Sync {
    /// Returns the memory regions. They do not change during a migration.
    fn layout(&self) -> &Layout;

    /// Returns the live bytes of `run`, which stay mapped in this process as long as the window
    /// lives. For memory of another process, map its memfd.
    ///
    /// # Errors
    /// If region `region` has no such pages.
    fn window(&self, region: RegionId, run: PageRun) -> Result<Window<'_>, VmError>;

    /// Adds to `touched`, a bitmap of the whole region, those pages of `run` that may hold anything
    /// but zeros.
    ///
    /// The engine calls it after the pages are protected ([`Protect`](crate::Protect)), so that a
    /// harvest finds a page that is touched later. A page that is added without need costs time. A
    /// page that is left out although it has content is lost. A page that was swapped out, or that
    /// was written through another mapping, must be added. The default adds all pages.
    ///
    /// # Errors
    /// If the host does not answer.
    fn touched(&self, region: RegionId, run: PageRun, touched: &mut Bitmap) -> Result<(), VmError> {
        let _ = region;
        touched.set_range(run.range());
        Ok(())
    }
}

/// Method by which the engine learns the time that stopping a guest takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PauseCosts {
    /// The engine measures the time in a trial pause: it pauses the guest briefly.
    #[default]
    Measured,
    /// The VMM declares the time. The guest is paused for the switchover only. Use this variant for
    /// a VM whose pause has effects outside the VM, such as one with passed-through or vhost-user
    /// devices.
    ///
    /// The engine trusts these values when it predicts the downtime. If they are zero, the engine
    /// stops the guest as soon as the transfer of the remaining pages fits the limit.
    Declared {
        /// Time that [`SourceVm::pause`] and [`SourceVm::save`] take together.
        stop: Duration,
        /// Time that [`SourceVm::save`] takes. Loading the state is expected to take as long,
        /// unless the target says otherwise.
        save: Duration,
        /// Bytes of the device state.
        state_bytes: u64,
    },
}

/// State of a guest's vCPUs, as its operator wants it.
///
/// A guest that its operator has paused is moved like any other guest. It stays paused on the
/// target until the operator resumes it there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum RunState {
    /// The vCPUs run, except while the engine has paused them.
    #[default]
    Running,
    /// The operator has paused the guest.
    Paused,
}

/// Parts of a VM that source and target both need. The same type is usually a [`TargetVm`] first
/// and a [`SourceVm`] later.
pub trait Migratable {
    /// Returns the description of this machine. The target's must equal the source's, except for
    /// [`features`](MachineConfig::features): a target that waits for a guest names all features
    /// that it can offer, and a VM with a guest names those that the guest was shown.
    fn config(&self) -> MachineConfig;

    /// Returns the guest's memory. Each call returns a clone of the same `Arc`, from before the VM
    /// received its guest until after. The engine uses this `Arc` to recognise a memory whose pages
    /// still arrive.
    fn memory(&self) -> Arc<dyn GuestMemory>;
}

/// VM that can be moved to a target.
///
/// The engine may stop the guest more than once:
///
/// - A trial pause measures the time that stopping takes. It calls `pause`, `quiesce`, `save` and
///   `resume`, and drops the saved state. A VM that must not be paused for a measurement declares
///   its costs instead: see [`SourceVm::pause_costs`].
/// - A guest whose I/O is busy is resumed, and stopped again later.
/// - A migration that fails before the commit ends with `resume`. The engine also calls `resume` if
///   the target or the arbiter gives the guest back later.
///
/// During a call the engine keeps the link alive for three times the `peer_timeout` of its
/// settings. After that, the target gives up.
pub trait SourceVm: Migratable {
    /// Returns the information that the target's VMM needs to create the VM, besides
    /// [`config`](Migratable::config). The format is the VMM's own, and the length is at most 1
    /// MiB. The target reads it before it has a VM. The default returns nothing.
    ///
    /// A target of an older version does not get this information.
    fn description(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Returns a tracker for all of the guest's memory. It is not started.
    ///
    /// # Errors
    /// If there is no tracker of this `kind`. The text names the kind, the reason, and the
    /// available kinds.
    fn tracker(&mut self, kind: Option<TrackerKind>) -> Result<Box<dyn DirtyTracker>, VmError>;

    /// Returns the source of free pages for one migration. The default returns `None`: there is no
    /// such source.
    fn free_pages(&mut self) -> Option<Box<dyn FreePages>> {
        None
    }

    /// Throttles the vCPUs, so that the guest dirties fewer pages. Each vCPU does not run for its
    /// share of the time, 0 to 1, in slices of at most 10 ms. The last share counts for all further
    /// vCPUs. A single share of 0 ends throttling.
    ///
    /// # Errors
    /// If this VM cannot be throttled. The migration continues without it.
    fn throttle(&mut self, shares: &[f64]) -> Result<(), VmError> {
        let _ = shares;
        Err(VmError::new("this VM cannot be throttled"))
    }

    /// Returns for each vCPU the time that it did not run because of [`throttle`](Self::throttle).
    fn throttled(&self) -> Vec<Duration> {
        Vec::new()
    }

    /// Returns how the engine learns what stopping the guest costs. The default has the engine
    /// measure it by trial pauses.
    fn pause_costs(&self) -> PauseCosts {
        PauseCosts::Measured
    }

    /// Returns the state that the operator wants. The engine calls this right before each
    /// [`pause`](Self::pause). The default returns [`RunState::Running`].
    ///
    /// A guest that is [`RunState::Paused`] at the switchover is paused on the target, too
    /// ([`TargetVm::start`]). A target of an older version cannot do that: the migration then
    /// fails, and the guest stays, paused.
    fn run_state(&self) -> RunState {
        RunState::Running
    }

    /// Stops the vCPUs. After the return, no vCPU runs guest code before [`resume`](Self::resume).
    /// Does nothing if the operator has paused the guest.
    ///
    /// # Errors
    /// If a vCPU does not stop. The engine then calls `resume`.
    fn pause(&mut self) -> Result<(), VmError>;

    /// Quiesces the devices: completes the requests that are under way, and flushes their data to
    /// where the target finds it. The devices start no new request before [`resume`](Self::resume).
    /// The engine calls this between `pause` and `save`. Requests that complete may write guest
    /// memory.
    ///
    /// `within` is the longest time that the guest may be paused for this call. A request that
    /// takes longer continues, and the call does not wait for it. [`Duration::MAX`] means that the
    /// operator set no limit: wait as long as the VMM considers reasonable.
    ///
    /// # Errors
    /// [`VmError::busy`] if the requests take longer. The engine calls `resume`, and tries again
    /// later; after [`Duration::MAX`] the migration fails instead. Any other error fails the
    /// migration at once, and the engine calls `resume`.
    fn quiesce(&mut self, within: Duration) -> Result<(), VmError> {
        let _ = within;
        Ok(())
    }

    /// Returns the state of the vCPUs, interrupt controllers and devices, which are
    /// [quiesced](Self::quiesce). The engine calls this between `pause` and `resume`.
    ///
    /// The call may write guest memory: the next harvest finds these writes. It must change nothing
    /// else, because the engine may drop the state.
    ///
    /// A section may have 4 MiB less 64 bytes, including its name. All sections together may have
    /// 64 MiB. There may be 65,536 sections.
    ///
    /// # Errors
    /// If some state cannot be read. The engine then calls `resume`.
    fn save(&mut self) -> Result<Vec<Section>, VmError>;

    /// Returns the device state that goes to the target as [streams](StateReader), for one
    /// migration. The engine calls this before the first pass. The default returns none.
    ///
    /// A target of an older version takes no streams: the migration then fails before it begins. A
    /// guest with streams cannot be saved in a file.
    ///
    /// # Errors
    /// If a device does not answer. Nothing is begun.
    fn streams(&mut self) -> Result<Vec<Box<dyn StateReader>>, VmError> {
        Ok(Vec::new())
    }

    /// Releases everything that only the host that runs the guest may hold, such as locks on its
    /// disks. The target takes them in [`TargetVm::start`]. The guest is paused.
    ///
    /// The engine calls this right before the commit. Until then the source must be able to resume
    /// the guest. After the commit the locks may belong to the target. If the guest stays on the
    /// source, [`resume`](Self::resume) takes the locks again before a vCPU runs.
    ///
    /// There is no default: if a VM with disks does not release and take its locks, two hosts may
    /// write the same disk. A VM that holds nothing returns `Ok(())`.
    ///
    /// # Errors
    /// If something may still be held. The engine then calls `resume`.
    fn release(&mut self) -> Result<(), VmError>;

    /// Ends the engine's [`pause`](Self::pause): lets the vCPUs run again, unless the operator has
    /// paused the guest ([`run_state`](Self::run_state)). The engine calls this only while the
    /// source owns the guest. Does nothing if the vCPUs run.
    ///
    /// # Errors
    /// If a vCPU cannot be started.
    fn resume(&mut self) -> Result<(), VmError>;
}

/// Empty VM that receives a guest.
///
/// Its memory reads as zeros, because the source does not send pages that the guest never touched.
/// Its vCPUs have not run.
///
/// [`load`](Self::load) and [`start`](Self::start) may each take three times the source's
/// `peer_timeout` (30 s by default). If `load` takes longer, the source resumes the guest. If
/// `start` takes longer in precopy without an arbiter, the source reports that the owner of the
/// guest is unknown.
pub trait TargetVm: Migratable {
    /// Returns [the guest's memory](Migratable::memory) for demand paging, which postcopy and lazy
    /// restores need. The engine calls this before it receives pages, so that an error is reported
    /// while the guest still runs on the source. It may call it again: each call returns a clone of
    /// one `Arc`. The VM keeps a clone for as long as the guest lives: see
    /// [`DemandPaging`](crate::DemandPaging#dropping).
    ///
    /// # Errors
    /// If this VM or this host has no demand paging. The text says what is missing, and how to
    /// permit it.
    fn demand_paging(&mut self) -> Result<Arc<dyn DemandPaging>, VmError> {
        Err(VmError::new("this VM cannot take pages while its guest runs; move it by precopy"))
    }

    /// Returns the time that [`load`](Self::load) and [`start`](Self::start) are expected to take
    /// together. The default returns `None`: the time is unknown.
    ///
    /// The source adds this time to the downtime that it predicts, because the guest is paused
    /// meanwhile. If the time is unknown, the source assumes that `load` takes as long as `save`. A
    /// VMM whose `load` does more, such as building the VM, returns the time that this took before
    /// on this host. The engine calls this once, when a source has announced a guest that fits.
    fn expected_load(&self) -> Option<Duration> {
        None
    }

    /// Returns the target's end of the source's stream `name`. The engine calls this while the
    /// guest still runs on the source, unless the migration is a postcopy without passes. The
    /// default accepts no stream.
    ///
    /// # Errors
    /// If there is no such device, or the version is unknown. The guest stays on the source.
    fn stream(&mut self, name: &StreamName) -> Result<Box<dyn StateWriter>, VmError> {
        Err(VmError::new(format!("this VM takes no device state as a stream: stream {name} is unexpected")))
    }

    /// Returns true if [`prepare`](Self::prepare) is to be called. The default returns false. The
    /// engine calls this once, when a source has announced a guest that fits.
    fn wants_trial(&self) -> bool {
        false
    }

    /// Prepares this VM for the state that [`load`](Self::load) will get, while the guest still
    /// runs on the source. A VMM that builds its VM from saved state does so here, so that the
    /// guest is not paused meanwhile.
    ///
    /// `trial` is the state that the source's first trial pause saved. It is older than the state
    /// that `load` gets and may differ from it, but it comes from the same VM. The engine calls
    /// this at most once, only if [`wants_trial`](Self::wants_trial) returns true, and before
    /// `load`. It does not call it for a source of an older version, for a source without trial
    /// pauses ([`PauseCosts::Declared`]), or in a postcopy without passes. `load` must therefore
    /// also work without it.
    ///
    /// Pages arrive meanwhile. This call must neither read nor write guest memory. The source waits
    /// for three times its `peer_timeout`. Afterwards the engine calls
    /// [`expected_load`](Self::expected_load) again, and tells the source the new value.
    ///
    /// # Errors
    /// If this VM cannot take such a state. The guest stays on the source.
    fn prepare(&mut self, trial: &[Section]) -> Result<(), VmError> {
        let _ = trial;
        Ok(())
    }

    /// Loads the state that [`SourceVm::save`] returned. The vCPUs stay stopped. All memory is
    /// present or, after [`DemandPaging::begin`], is placed when it is touched.
    ///
    /// # Errors
    /// If a section is missing, unknown, of another version or not valid. The source then resumes
    /// the guest.
    fn load(&mut self, sections: &[Section]) -> Result<(), VmError>;

    /// Gives the guest a new identity: a new VM generation ID, and new values for everything else
    /// that identifies a machine.
    ///
    /// The engine calls this between [`load`](Self::load) and [`start`](Self::start) for a guest
    /// that is restored from a copy (`save_copy`), because the original guest continues to run. A
    /// guest that moves keeps its identity. The call may write guest memory, under the rules of
    /// [`load`](Self::load). The default changes nothing.
    ///
    /// # Errors
    /// If the guest would have the identity of the original. The guest is then not started.
    fn renew_identity(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    /// Takes everything that only the host that runs the guest may hold ([`SourceVm::release`]),
    /// and lets the vCPUs run. From now on the target owns the guest.
    ///
    /// If `state` is [`RunState::Paused`], the operator had paused the guest on the source: the
    /// vCPUs stay stopped until the operator resumes the guest there. Everything else is the same.
    ///
    /// # Errors
    /// If a vCPU cannot be started, or a lock cannot be taken. No vCPU has then run, nothing is
    /// held, and the source resumes the guest.
    fn start(&mut self, state: RunState) -> Result<(), VmError>;
}

#[cfg(test)]
mod tests {
    use super::VmError;
    use std::io;

    #[derive(Debug, thiserror::Error)]
    #[error("{what} failed")]
    struct Failed {
        what: &'static str,
        #[source]
        source: io::Error,
    }

    #[test]
    fn error_names_each_cause_once() {
        let denied = || io::Error::new(io::ErrorKind::PermissionDenied, "not for you");
        let error = VmError::new(Failed { what: "KVM_GET_PIT2", source: denied() });
        assert_eq!(error.to_string(), "KVM_GET_PIT2 failed: not for you");
        // The error is wrapped again, and its cause is already in its text.
        assert_eq!(VmError::new(error).to_string(), "KVM_GET_PIT2 failed: not for you");
        assert_eq!(VmError::from(denied()).to_string(), "not for you");
    }
}
