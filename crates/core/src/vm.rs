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
//! | [`WriteProtection`] | the source, many threads | copying pages before the guest changes them |
//!
//! The engine calls [`SourceVm`], [`FreePages`] and [`TargetVm`] on the thread that called the
//! engine, so [`SourceVm`] and [`TargetVm`] need not be `Send`. In contrast, the threads of all
//! channels call [`GuestMemory`], [`Protect`](crate::Protect) and [`DemandPaging`] concurrently.
//!
//! # Panics
//! If panics unwind, a panic of an implementation on a thread of the engine fails the migration
//! like an error. In a program that is built with `panic = "abort"`, every panic ends the process
//! and therefore the guest. The engine logs a warning once in such a program.

use crate::{
    BranchMemory, DemandPaging, DirtyTracker, FreePages, Layout, MachineConfig, PageRun, RegionFile,
    RegionId, RetiredMemory, Section, StateReader, StateWriter, StreamName, TrackerKind, UsedPages, Window,
    WriteProtection,
};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use vmferry_bitmap::Bitmap;

/// Error that a VMM's implementation of these traits returns.
///
/// The [`Display`](fmt::Display) text contains the wrapped error and its causes. The engine writes
/// this text to the log and sends it to the peer.
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

    /// Wraps an error or a message, and marks it as temporary: the work needs more time than it was
    /// given. See [`SourceVm::quiesce`].
    pub fn busy(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self { source: error.into(), busy: true }
    }

    /// Returns the wrapped error.
    #[must_use]
    pub fn get_ref(&self) -> &(dyn std::error::Error + Send + Sync + 'static) {
        &*self.source
    }

    /// Returns true if the error was created by [`busy`](Self::busy), so that a later attempt may
    /// succeed.
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

/// Memory of a guest, which all threads of the engine access concurrently.
pub trait GuestMemory: Send + Sync {
    /// Returns the memory regions. The layout must not change during a migration.
    fn layout(&self) -> &Layout;

    /// Returns a window onto the live bytes of `run`. The bytes must stay mapped in this process
    /// for as long as the window lives. If the memory belongs to another process, map the memfd of
    /// that memory.
    ///
    /// # Errors
    /// If region `region` has no such pages.
    fn window(&self, region: RegionId, run: PageRun) -> Result<Window<'_>, VmError>;

    /// Adds to `touched`, a bitmap of the whole region, those pages of `run` that may hold anything
    /// but zeros.
    ///
    /// The engine calls this method after it has protected the pages ([`Protect`](crate::Protect)),
    /// so that a harvest finds a page that is touched later. A page that is added unnecessarily
    /// only costs time, but a page that is left out although it has content is lost. Therefore,
    /// pages that were swapped out, and pages that were written through another mapping, must be
    /// added, too. The default adds all pages.
    ///
    /// # Errors
    /// If the host cannot determine which pages were touched.
    fn touched(&self, region: RegionId, run: PageRun, touched: &mut Bitmap) -> Result<(), VmError> {
        let _ = region;
        touched.set_range(run.range());
        Ok(())
    }

    /// Returns the first page of `run` that may hold anything but zeros, or a page before it, or
    /// `None` if there is no such page.
    ///
    /// The engine calls this method while the guest is paused, to find large parts of memory that
    /// were never touched. The cost of the call should not depend on the size of these parts. The
    /// default returns the first page of `run`.
    ///
    /// # Errors
    /// If the host cannot determine which pages were touched.
    fn next_touched(&self, region: RegionId, run: PageRun) -> Result<Option<u64>, VmError> {
        let _ = region;
        Ok(Some(run.first.0).filter(|_| run.count > 0))
    }

    /// Allocates the host's memory for the pages of `run`, so that the first write to a page causes
    /// no page fault. The content must not change. Returns false if the memory does not do this, or
    /// if the host refuses. The engine then does not call the method again.
    ///
    /// The engine calls this method on a target, from several threads, for pages that the source is
    /// about to send. If a page is not allocated, its first write allocates it. No call runs from
    /// [`DemandPaging::begin`] on, because a page that is populated then would not be missing.
    ///
    /// The default returns false.
    ///
    /// [`DemandPaging::begin`]: crate::DemandPaging::begin
    fn populate(&self, region: RegionId, run: PageRun) -> bool {
        let _ = (region, run);
        false
    }

    /// Maps the pages of `run`, so that the first read of a page causes no page fault. Pages of a
    /// file are read if they are not in the host's page cache. The content must not change, and no
    /// page may be copied. Returns false if the memory does not do this, or if the host refuses.
    /// The engine then does not call the method again.
    ///
    /// The engine calls this method on one thread, while the guest runs from a file
    /// ([`Migratable::adopt_memory`]). The default returns false.
    fn map_pages(&self, region: RegionId, run: PageRun) -> bool {
        let _ = (region, run);
        false
    }
}

/// Origin of the figures for the time that stopping a guest takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PauseCosts {
    /// The engine measures the time in trial pauses, each of which pauses the guest briefly.
    #[default]
    Measured,
    /// The VMM declares the time, so the guest is paused for the switchover only. Use this variant
    /// for a VM whose pause has effects outside the VM, such as a VM with passed-through or
    /// vhost-user devices.
    ///
    /// The engine trusts these values when it predicts the downtime. If they are all 0, the engine
    /// stops the guest as soon as the transfer of the remaining pages fits into the downtime limit.
    Declared {
        /// Time that [`SourceVm::pause`] and [`SourceVm::save`] take together.
        stop: Duration,
        /// Time that [`SourceVm::save`] takes. The engine assumes that loading the state takes
        /// equally long, unless the target reports another time ([`TargetVm::expected_load`]).
        save: Duration,
        /// Size of the device state in bytes.
        state_bytes: u64,
    },
}

/// State of a guest's vCPUs that the operator has requested.
///
/// A guest that the operator has paused is moved like any other guest, and stays paused on the
/// target until the operator resumes it there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum RunState {
    /// The vCPUs run, except while the engine has paused them.
    #[default]
    Running,
    /// The operator has paused the guest.
    Paused,
}

/// Parts of a VM that both source and target need.
///
/// A VMM usually implements [`TargetVm`] and [`SourceVm`] for the same type, because a VM that has
/// received a guest can later become a source.
pub trait Migratable {
    /// Returns the description of this machine.
    ///
    /// The descriptions of source and target must be equal, except for the
    /// [`features`](MachineConfig::features). A target that waits for a guest names all features
    /// that it can offer. A VM with a guest names the features that the guest was shown, all of
    /// which the target must offer.
    fn config(&self) -> MachineConfig;

    /// Returns the guest's memory.
    ///
    /// Every call must return a clone of the same `Arc`, even if the VM receives a guest between
    /// two calls. The engine compares the `Arc`s to recognise memory whose pages are still
    /// arriving.
    fn memory(&self) -> Arc<dyn GuestMemory>;

    /// Replaces the guest's memory by private mappings of `regions`, at the same addresses.
    ///
    /// The engine calls this method for a branch ([`SourceVm::prepare_branch`]), while no vCPU
    /// runs:
    /// - on the parent, whose memory has the same content as the files. The guest does not notice
    ///   the change.
    /// - on a child, whose memory is empty. The child then has the memory of the parent.
    ///
    /// A thread that reads guest memory at the same time must see either the old or the new
    /// mapping. The call must not touch pages, because the guest may be paused meanwhile. For the
    /// same reason, it returns the old mappings instead of unmapping them. From the
    /// call on, the VM must not change the files: a page that the guest gives back must be dropped
    /// from the mapping only. The default returns an error.
    ///
    /// # Errors
    /// If the memory cannot be mapped. All regions must be mapped and must have the content that
    /// they had before, so that the guest can continue.
    fn adopt_memory(&mut self, regions: &[RegionFile]) -> Result<RetiredMemory, VmError> {
        let _ = regions;
        Err(VmError::new("this VM cannot share memory with a branch"))
    }
}

/// VM that can be moved to a target.
///
/// The engine may stop the guest more than once:
///
/// - A trial pause measures the time that stopping takes. The engine calls `pause`, `quiesce`,
///   `save` and `resume`. It then drops the saved state, or sends the state to a target that uses
///   it for [`TargetVm::prepare`]. A VM that must not be paused for a measurement declares its
///   costs instead: see [`SourceVm::pause_costs`].
/// - A guest whose I/O cannot be quiesced in time is resumed, and stopped again later.
/// - A migration that fails before the commit ends with `resume`. The engine also calls `resume` if
///   the target or the arbiter gives the guest back later.
///
/// While a method runs, the engine keeps the link alive for up to three times the `peer_timeout` of
/// its settings. If the method takes longer, the target gives up.
pub trait SourceVm: Migratable {
    /// Returns the information that the target's VMM needs to create the VM, in addition to
    /// [`config`](Migratable::config).
    ///
    /// The VMM defines the format. The length is at most 1 MiB. The target can read the information
    /// before it has a VM. The default returns no bytes.
    ///
    /// A target of an older version does not get this information.
    fn description(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Returns a tracker for all of the guest's memory, which the engine starts later. If `kind` is
    /// `None`, the VM chooses the kind.
    ///
    /// # Errors
    /// If there is no tracker of this `kind`. The error should name the kind, the reason, and the
    /// available kinds.
    fn tracker(&mut self, kind: Option<TrackerKind>) -> Result<Box<dyn DirtyTracker>, VmError>;

    /// Returns write protection for [the guest's memory](Migratable::memory), which background
    /// snapshots need.
    ///
    /// The engine may call this method more than once, and every call must return a clone of the
    /// same `Arc`. While pages are protected, the VM must not give memory back to the host: see
    /// [`WriteProtection`](crate::WriteProtection#writes-that-are-not-delayed).
    ///
    /// # Errors
    /// If this VM or this host does not support write protection. The error should say what is
    /// missing, and how to permit it. The default returns an error.
    fn write_protection(&mut self) -> Result<Arc<dyn WriteProtection>, VmError> {
        Err(VmError::new(
            "this VM cannot protect its memory, as a snapshot of a running guest requires; stop the guest for the snapshot",
        ))
    }

    /// Returns the source of free pages for one migration. The default returns `None`, so that the
    /// engine skips no free pages.
    fn free_pages(&mut self) -> Option<Box<dyn FreePages>> {
        None
    }

    /// Returns the guest's memory as files that a process on this host can map, for a handoff to
    /// that process. The memory is not copied: from the commit on, the target owns it, as it owns
    /// the guest.
    ///
    /// All regions of [the layout](GuestMemory::layout) must be returned, each once. Each file must
    /// be a memfd, with pages of the kernel or of the host's pool of huge pages. It must be sealed
    /// against shrinking (`F_SEAL_SHRINK`, fcntl(2)), because an access beyond the end of a file
    /// ends the process that makes it.
    ///
    /// The mappings of this VM stay until it is dropped, so that the guest can stay if the handoff
    /// fails. After the engine has reported that the guest has moved, no thread of the VMM may
    /// write guest memory, and dropping the VM must not discard the content of the files (`madvise`
    /// with `MADV_REMOVE`, `fallocate` with `FALLOC_FL_PUNCH_HOLE`).
    ///
    /// # Errors
    /// If another process cannot map the memory. The error should say why, and how to start a guest
    /// whose memory can be handed over. The default returns an error.
    fn share_memory(&mut self) -> Result<Vec<RegionFile>, VmError> {
        Err(VmError::new("this VM does not share its memory with other processes; move the guest by precopy"))
    }

    /// Throttles the vCPUs, so that the guest dirties fewer pages.
    ///
    /// `shares[i]` is the share of the time, from 0 to 1, for which vCPU `i` must not run. The last
    /// share also applies to all further vCPUs. A vCPU should be stopped for at most 10 ms at a
    /// time, so that the guest does not treat the stop as a fault. A single share of 0 ends
    /// throttling.
    ///
    /// # Errors
    /// If this VM cannot be throttled. The migration continues without throttling.
    fn throttle(&mut self, shares: &[f64]) -> Result<(), VmError> {
        let _ = shares;
        Err(VmError::new("this VM cannot be throttled"))
    }

    /// Returns the total time for which [`throttle`](Self::throttle) has stopped each vCPU, in the
    /// order of the vCPUs. The default returns an empty list.
    fn throttled(&self) -> Vec<Duration> {
        Vec::new()
    }

    /// Returns the total time for which each vCPU was able to run, but waited for a processor of
    /// the host, in the order of the vCPUs. Linux counts this time for each thread
    /// (`/proc/self/task/ID/schedstat`, second field).
    ///
    /// If the settings adapt the channels, the engine calls this method about ten times a second
    /// while the guest runs. It adapts the number of channels that send at the same time to the
    /// growth of these times. The default returns an empty list, which means that the times are
    /// unknown.
    fn run_delays(&self) -> Vec<Duration> {
        Vec::new()
    }

    /// Returns the origin of the figures for the time that stopping the guest takes. With the
    /// default, the engine measures this time in trial pauses.
    fn pause_costs(&self) -> PauseCosts {
        PauseCosts::Measured
    }

    /// Returns the state that the operator has requested. The engine calls this method right before
    /// each [`pause`](Self::pause). The default returns [`RunState::Running`].
    ///
    /// A guest that is [`RunState::Paused`] at the switchover stays paused on the target
    /// ([`TargetVm::start`]). If the target is of an older version that does not support this, the
    /// migration fails, and the guest stays paused on the source.
    fn run_state(&self) -> RunState {
        RunState::Running
    }

    /// Stops the vCPUs. After this method has returned, no vCPU may run guest code until
    /// [`resume`](Self::resume) is called. Does nothing if the operator has paused the guest.
    ///
    /// # Errors
    /// If a vCPU does not stop. The engine then calls `resume`.
    fn pause(&mut self) -> Result<(), VmError>;

    /// Quiesces the devices: completes the requests that are in flight, and flushes their data to
    /// storage that the target can access. The devices must not start a new request until
    /// [`resume`](Self::resume) is called. The engine calls this method between `pause` and `save`,
    /// so requests that complete may still write guest memory. The default does nothing.
    ///
    /// `within` is the longest time for which this call may wait, because the guest is paused
    /// meanwhile. A request that takes longer continues, but the call does not wait for its
    /// completion. [`Duration::MAX`] means that the operator set no limit. In this case, wait for
    /// as long as the VMM considers reasonable.
    ///
    /// # Errors
    /// [`VmError::busy`] if the requests take longer. The engine then calls `resume`, and tries
    /// again later. If `within` was [`Duration::MAX`], the migration fails instead. Any other error
    /// fails the migration at once, and the engine calls `resume`.
    fn quiesce(&mut self, within: Duration) -> Result<(), VmError> {
        let _ = within;
        Ok(())
    }

    /// Returns the state of the vCPUs, interrupt controllers and devices. The engine calls this
    /// method after [`pause`](Self::pause) and [`quiesce`](Self::quiesce).
    ///
    /// The method may write guest memory, because the next harvest finds these writes. It must not
    /// change anything else, because the engine may drop the state and resume the guest.
    ///
    /// Name and payload of one section may have at most 4 MiB minus 64 bytes together. All sections
    /// together may have at most 64 MiB, and there may be at most 65,536 sections.
    ///
    /// # Errors
    /// If some state cannot be read. The engine then calls `resume`.
    fn save(&mut self) -> Result<Vec<Section>, VmError>;

    /// Prepares this VM for a branch, and returns the files that hold its memory.
    ///
    /// The guest runs during this call. Work whose duration depends on the size of the memory
    /// belongs in this method, because the guest is paused during
    /// [`adopt_memory`](Migratable::adopt_memory). The engine may call this method several times
    /// before it pauses the guest. The default returns an error.
    ///
    /// # Errors
    /// If this VM cannot be branched, for example because its memory is anonymous, or because a
    /// child would write to the same disk ([`copy_disks`](Self::copy_disks)).
    fn prepare_branch(&mut self) -> Result<BranchMemory, VmError> {
        Err(VmError::new("this VM cannot be branched"))
    }

    /// Copies the disks that the guest can write to, for the children of a branch. The engine calls
    /// this method after [`save`](Self::save) and before
    /// [`adopt_memory`](Migratable::adopt_memory), while the guest is paused and its devices are
    /// quiesced. Therefore the copies belong to the same instant as the device state and the
    /// memory.
    ///
    /// The VMM decides where the copies are, and passes them to the children. The copy should not
    /// depend on the size of the disk, for example by reflinks. The default does nothing, for a VM
    /// that refuses writable disks in [`prepare_branch`](Self::prepare_branch).
    ///
    /// # Errors
    /// If a disk cannot be copied. The guest then continues, and is not branched.
    fn copy_disks(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    /// Returns the readers of the device state that is sent to the target as
    /// [streams](StateReader), for one migration. The engine calls this method before the first
    /// pass. The default returns no readers.
    ///
    /// If the target is of an older version that does not support streams, the migration fails
    /// before it begins. A guest with streams cannot be saved in a file.
    ///
    /// # Errors
    /// If a device does not answer. The migration then does not begin.
    fn streams(&mut self) -> Result<Vec<Box<dyn StateReader>>, VmError> {
        Ok(Vec::new())
    }

    /// Releases the resources that only the host that runs the guest may hold, such as locks on
    /// disks. The target acquires these resources in [`TargetVm::start`]. The guest is paused.
    ///
    /// The engine calls this method right before the commit. After the commit, the resources may
    /// belong to the target. If the guest stays on the source, [`resume`](Self::resume) must
    /// acquire the resources again before a vCPU runs.
    ///
    /// This method has no default implementation, because two hosts could write to the same disk if
    /// a VM with disks did not release its locks. A VM that holds no such resources returns
    /// `Ok(())`.
    ///
    /// # Errors
    /// If a resource may still be held. The engine then calls `resume`.
    fn release(&mut self) -> Result<(), VmError>;

    /// Ends the pause that [`pause`](Self::pause) began: lets the devices start requests again, and
    /// lets the vCPUs run unless the operator has paused the guest
    /// ([`run_state`](Self::run_state)). Does nothing if the vCPUs already run. The engine calls
    /// this method only while the source owns the guest.
    ///
    /// # Errors
    /// If a vCPU cannot be started.
    fn resume(&mut self) -> Result<(), VmError>;
}

/// Empty VM that receives a guest.
///
/// The memory of the VM must read as zeros, because the source does not send pages that the guest
/// never touched. The vCPUs must not have run.
///
/// [`load`](Self::load) and [`start`](Self::start) may each take up to three times the source's
/// `peer_timeout`, by default 30 s. If `load` takes longer, the source resumes the guest. If
/// `start` takes longer in precopy without an arbiter, the source reports that the owner of the
/// guest is unknown.
pub trait TargetVm: Migratable {
    /// Returns demand paging for [the guest's memory](Migratable::memory), which postcopy and
    /// on-demand restores need. The engine calls this method before it receives pages, so that an
    /// error is reported while the guest still runs on the source.
    ///
    /// The engine may call this method more than once, and every call must return a clone of the
    /// same `Arc`. The VM keeps a clone for as long as the guest lives: see
    /// [`DemandPaging`](crate::DemandPaging#dropping).
    ///
    /// # Errors
    /// If this VM or this host does not support demand paging. The error should say what is
    /// missing, and how to permit it. The default returns an error.
    fn demand_paging(&mut self) -> Result<Arc<dyn DemandPaging>, VmError> {
        Err(VmError::new("this VM cannot take pages while its guest runs; move it by precopy"))
    }

    /// Returns the time that [`load`](Self::load) and [`start`](Self::start) are expected to take
    /// together. The default returns `None`: the time is unknown.
    ///
    /// The source adds this time to the downtime that it predicts, because the guest is paused
    /// meanwhile. If the time is unknown, the source assumes that `load` takes as long as `save`.
    /// If `load` does more than load the state, for example if it builds the VM, return the time
    /// that earlier calls on this host took.
    ///
    /// The engine calls this method when a source has connected, and again after
    /// [`prepare`](Self::prepare).
    fn expected_load(&self) -> Option<Duration> {
        None
    }

    /// Returns the writer that receives the source's stream `name`. The engine calls this method
    /// while the guest still runs on the source, except in a postcopy without passes. The default
    /// returns an error for every stream.
    ///
    /// # Errors
    /// If there is no such device, or the version is unknown. The guest stays on the source.
    fn stream(&mut self, name: &StreamName) -> Result<Box<dyn StateWriter>, VmError> {
        Err(VmError::new(format!("this VM takes no device state as a stream: stream {name} is unexpected")))
    }

    /// Returns true if the engine should call [`prepare`](Self::prepare). The default returns
    /// false. The engine calls this method when a source has connected.
    fn wants_trial(&self) -> bool {
        false
    }

    /// Prepares this VM for the state that [`load`](Self::load) will get, while the guest still
    /// runs on the source. A VMM that builds its VM from saved state does so in this method, so
    /// that the guest is not paused for that work.
    ///
    /// `trial` is the state that the source's first trial pause saved. It is older than the state
    /// that `load` gets and may differ from it, but it comes from the same VM. The engine calls
    /// this method at most once, before `load`, and only if [`wants_trial`](Self::wants_trial)
    /// returned true. The engine does not call this method if the source is of an older version or
    /// makes no trial pauses ([`PauseCosts::Declared`]), or in a postcopy without passes. Therefore
    /// `load` must also work if this method was not called.
    ///
    /// Pages arrive during this call, so it must neither read nor write guest memory. The source
    /// waits for up to three times its `peer_timeout`. After the call, the engine calls
    /// [`expected_load`](Self::expected_load) again and sends the new value to the source.
    ///
    /// # Errors
    /// If this VM cannot take such a state. The guest stays on the source.
    fn prepare(&mut self, trial: &[Section]) -> Result<(), VmError> {
        let _ = trial;
        Ok(())
    }

    /// Replaces the memory of this VM by that of the source's guest, which the source has
    /// [shared](SourceVm::share_memory). The engine calls this method at most once, before
    /// [`load`](Self::load), for a handoff inside one host. No page is sent in that case.
    ///
    /// The guest runs on the source during this call. Therefore the VM only maps the memory, and
    /// must not write it before [`start`](Self::start). Exception: `load` may make the writes by
    /// which the kernel restores device state, if the source can resume the guest after them. The
    /// engine has checked that `regions` are those of the layout, and that no file is shorter or
    /// can be shrunk. Another process can still write the memory and discard pages.
    ///
    /// The addresses at which the VM, its devices and the kernel know the memory must stay valid. A
    /// VM whose memory is one mapping for each region can map each file over that mapping
    /// (`MAP_FIXED`, mmap(2)): KVM notices the new mapping.
    ///
    /// # Errors
    /// If the memory cannot be mapped. The guest stays on the source, where it was not stopped. The
    /// default returns an error.
    fn take_memory(&mut self, regions: Vec<RegionFile>) -> Result<(), VmError> {
        let _ = regions;
        Err(VmError::new("this VM does not map the memory of another process; move the guest by precopy"))
    }

    /// Returns a finder of the pages that the guest uses from now on, for the working set of a
    /// guest that runs from a file ([`Migratable::adopt_memory`] was called before).
    ///
    /// The engine keeps the value while the guest runs, and drops it on the thread that ends the
    /// recording. The default returns an error.
    ///
    /// # Errors
    /// If this VM or this host cannot find the pages.
    fn used_pages(&mut self) -> Result<Box<dyn UsedPages>, VmError> {
        Err(VmError::new("this VM cannot find the pages that its guest uses"))
    }

    /// Loads the state that [`SourceVm::save`] returned. The vCPUs stay stopped.
    ///
    /// All memory has arrived, except after [`DemandPaging::begin`]: a thread that then touches a
    /// missing page sleeps until the page is placed.
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

    /// Acquires the resources that only the host that runs the guest may hold
    /// ([`SourceVm::release`]), and lets the vCPUs run. From this call on, the target owns the
    /// guest unless the call fails.
    ///
    /// If `state` is [`RunState::Paused`], the operator had paused the guest on the source: the
    /// vCPUs stay stopped until the operator resumes the guest on the target. The resources are
    /// acquired in the same way.
    ///
    /// # Errors
    /// If a vCPU cannot be started, or a resource cannot be acquired. An implementation that
    /// returns an error must have run no vCPU and must hold no resource, because the source then
    /// resumes the guest.
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
