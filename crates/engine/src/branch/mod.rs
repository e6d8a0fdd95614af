//! Branches of a guest: other guests that continue from one instant of a running guest, the parent,
//! and share its memory.
//!
//! # Steps
//! 1. [`branch`] finds the files with the parent's memory while the guest runs, and waits until the
//!    children are ready.
//! 2. It pauses the guest, saves the device state, copies the disks
//!    ([`SourceVm::copy_disks`]), and maps the memory privately
//!    ([`Migratable::adopt_memory`](vmferry_core::Migratable::adopt_memory)). From that instant on,
//!    a write of the guest copies the page, and the files keep the memory of the instant.
//! 3. It resumes the guest, and returns the [`BranchPoint`]: the files and the device state.
//! 4. Each child maps the same files privately, loads the state, gets a new identity and starts
//!    ([`join_branch`]).
//!
//! The parent keeps the guest. If a step fails, the guest continues in the parent.
//!
//! # Later branches
//! After a branch, the memory of the parent consists of the files and of the pages that the guest
//! has written since. For another branch, and for a branch of a child, the engine copies all memory
//! into new files while the guest runs (`copy`).

// Input from a peer or from the host must not panic a thread of the engine. Tests may panic.
#![cfg_attr(
    not(test),
    warn(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable, clippy::todo)
)]

mod copy;
mod pass;
mod point;

pub use point::BranchPoint;

use crate::demand::still_arrives;
use crate::snapshot::RestoreError;
use crate::target::Received;
use crate::vm::{save, warn_if_panics_abort};
use crate::{MigrateError, random};
use copy::MemoryCopy;
use rustix::fs::SealFlags;
use std::io;
use std::time::{Duration, Instant};
use vmferry_core::{BranchMemory, RegionFile, RetiredMemory, RunState, Section, SourceVm, TargetVm, VmError};
use vmferry_wire::{MigrationId, SnapshotError};

/// Longest time for which a branch waits for the guest's I/O, because the guest is paused
/// meanwhile.
const QUIESCE: Duration = Duration::from_secs(1);

/// Reason why a guest was not branched, or why a child did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BranchError {
    /// The guest cannot be branched. It continues to run in the parent.
    #[error("the guest was not branched: {0}")]
    Refused(VmError),
    /// The guest was paused for the branch and could not be resumed. It stays paused in the parent,
    /// which still owns it.
    #[error("the guest could not be resumed after its branch: {0}")]
    NotResumed(VmError),
    /// The state of the guest cannot be written. The guest continues to run in the parent.
    #[error("the state of the guest cannot be kept: {0}")]
    State(#[from] SnapshotError),
    /// The host refused a resource. The guest continues to run in the parent.
    #[error("the host refused {what}: {source}")]
    Host {
        /// Requested resource.
        what: &'static str,
        /// Error of the system call.
        source: io::Error,
    },
    /// A child cannot continue from the branch point. It has not run.
    #[error("the child cannot continue from the branch: {0}")]
    Child(#[from] RestoreError),
}

impl From<MigrateError> for BranchError {
    fn from(error: MigrateError) -> Self {
        Self::Refused(VmError::new(error))
    }
}

fn host(what: &'static str) -> impl FnOnce(io::Error) -> BranchError {
    move |source| BranchError::Host { what, source }
}

/// Result of a branch: the point from which children continue, and the times of the steps.
#[derive(Debug)]
#[non_exhaustive]
pub struct Branched {
    /// Point from which children continue.
    pub point: BranchPoint,
    /// Time that the preparation took. The guest ran meanwhile.
    pub prepare: Duration,
    /// Time for which no vCPU ran.
    pub pause: Duration,
    /// Part of `pause` that quiescing the devices and saving their state took.
    pub save: Duration,
    /// Part of `pause` that copying the disks took.
    pub disks: Duration,
    /// Part of `pause` that copying the last pages took. It is 0 for the first branch of a guest.
    pub copy: Duration,
    /// Part of `pause` that mapping the memory privately took.
    pub freeze: Duration,
    /// Number of pages that were copied into new files. It is 0 for the first branch of a guest.
    pub copied_pages: u64,
    /// Old mappings of the guest's memory.
    retired: RetiredMemory,
}

impl Branched {
    /// Unmaps the old mappings of the guest's memory, and seals the files against every write,
    /// which the kernel then refuses to every process. [`branch`] has already sealed them against
    /// new writable mappings and system calls that write.
    ///
    /// The time that the call takes is proportional to the number of pages in the files. Call it
    /// after the children have got the point.
    ///
    /// # Errors
    /// If a process still has a writable mapping of a file, or if the kernel uses a page of it for
    /// I/O. A child may then see later writes.
    pub fn seal(&mut self) -> Result<(), BranchError> {
        drop(std::mem::take(&mut self.retired));
        self.point.seal()
    }
}

/// Branches the guest of `vm`: takes its memory and its device state at one instant, from which
/// children can continue. The guest continues to run in `vm`.
///
/// The function calls `ready` when only the pause is left to do. If `ready` returns an error, the
/// guest is not paused. Use it to wait until the processes of the children are ready, so that they
/// do not take processor time from the guest while it is paused.
///
/// The memory of a guest that is branched for the first time is not copied. A guest that was
/// branched before, or that is a child, has written pages that no file contains. Its memory is
/// copied into new files while the guest runs, and only the last pages are copied in the pause.
///
/// After a branch, the parent needs additional memory for each page that it writes.
///
/// # Errors
/// If the guest cannot be branched. It then continues to run in `vm`, unless the error is
/// [`BranchError::NotResumed`].
pub fn branch(
    vm: &mut dyn SourceVm,
    ready: &mut dyn FnMut() -> Result<(), VmError>,
) -> Result<Branched, BranchError> {
    warn_if_panics_abort();
    let began = Instant::now();
    if still_arrives(&vm.memory()) {
        return Err(MigrateError::StillArriving.into());
    }
    if let Some(stream) = vm.streams().map_err(BranchError::Refused)?.first() {
        let why = format!("its device state {} is a stream, which only one target takes", stream.name());
        return Err(BranchError::Refused(VmError::new(why)));
    }
    let id = MigrationId(random()?);
    let mut base = Base::prepare(vm)?;
    let result = ready().map_err(BranchError::Refused).and_then(|()| {
        // The guest has used pages while the caller waited.
        base.follow(vm)?;
        let prepare = began.elapsed();
        take(vm, &mut base).map(|taken| (prepare, taken))
    });
    let (copied_pages, entries) = base.end();
    let (prepare, Taken { sections, regions, mut retired, pause, save, disks, copy, freeze }) = result?;
    retired.append(entries);
    let point = BranchPoint::new(id, (&vm.config(), vm.memory().layout()), &sections, regions)?;
    Ok(Branched { point, prepare, pause, save, disks, copy, freeze, copied_pages, retired })
}

/// Origin of the files that hold the memory of the instant.
enum Base {
    /// Files that are the guest's memory already.
    Own { files: Vec<RegionFile>, retired: RetiredMemory },
    /// New files, into which the memory is copied.
    Copied(Box<MemoryCopy>),
}

impl Base {
    fn prepare(vm: &mut dyn SourceVm) -> Result<Self, BranchError> {
        match vm.prepare_branch().map_err(BranchError::Refused)? {
            BranchMemory::Files { files, retired } => Ok(Self::Own { files, retired }),
            BranchMemory::Changed { .. } => Ok(Self::Copied(Box::new(MemoryCopy::start(vm)?))),
        }
    }

    /// Repeats the part of the preparation that the running guest has undone.
    fn follow(&mut self, vm: &mut dyn SourceVm) -> Result<(), BranchError> {
        match self {
            Self::Own { retired, .. } => {
                if let BranchMemory::Files { retired: more, .. } =
                    vm.prepare_branch().map_err(BranchError::Refused)?
                {
                    retired.append(more);
                }
                Ok(())
            }
            Self::Copied(copy) => copy.follow(),
        }
    }

    /// Completes the files. The guest is paused, and its state is saved.
    fn complete(&mut self) -> Result<Vec<RegionFile>, BranchError> {
        match self {
            Self::Own { files, .. } => Ok(files.clone()),
            Self::Copied(copy) => copy.complete(),
        }
    }

    /// Ends dirty tracking. Returns the number of copied pages, and the old page-table entries.
    fn end(self) -> (u64, RetiredMemory) {
        match self {
            Self::Own { retired, .. } => (0, retired),
            Self::Copied(copy) => (copy.end(), RetiredMemory::new()),
        }
    }
}

/// State and memory of the guest at the instant, and the times of the steps.
struct Taken {
    sections: Vec<Section>,
    regions: Vec<RegionFile>,
    retired: RetiredMemory,
    pause: Duration,
    save: Duration,
    disks: Duration,
    copy: Duration,
    freeze: Duration,
}

/// Pauses the guest, takes its state and its memory, and resumes it. The guest is also resumed
/// after an error.
fn take(vm: &mut dyn SourceVm, base: &mut Base) -> Result<Taken, BranchError> {
    let pausing = Instant::now();
    let taken = take_paused(vm, base);
    let resumed = vm.resume();
    let pause = pausing.elapsed();
    match (taken, resumed) {
        (Ok(taken), Ok(())) => Ok(Taken { pause, ..taken }),
        (Err(error), Ok(())) => Err(error),
        (Ok(_), Err(error)) => Err(BranchError::NotResumed(error)),
        (Err(why), Err(error)) => {
            Err(BranchError::NotResumed(VmError::new(format!("{error}; before that, {why}"))))
        }
    }
}

fn take_paused(vm: &mut dyn SourceVm, base: &mut Base) -> Result<Taken, BranchError> {
    vm.pause().map_err(BranchError::Refused)?;
    let paused = Instant::now();
    let sections = save(vm, QUIESCE).map_err(BranchError::Refused)?;
    let saved = Instant::now();
    // The requests of the guest are quiesced and flushed, so the disks have the content that the
    // saved state expects.
    vm.copy_disks().map_err(BranchError::Refused)?;
    let disks = saved.elapsed();
    // Saving the state may have written guest memory.
    let regions = base.complete()?;
    let copied = Instant::now();
    let retired = vm.adopt_memory(&regions).map_err(BranchError::Refused)?;
    // No process can map the files writable from now on. Sealing them against every write takes
    // time for each of their pages, so `Branched::seal` does it later.
    for region in &regions {
        rustix::fs::fcntl_add_seals(&region.file, SealFlags::FUTURE_WRITE)
            .map_err(|error| host("a seal of the guest's memory")(error.into()))?;
    }
    Ok(Taken {
        sections,
        regions,
        retired,
        pause: Duration::ZERO,
        save: saved - paused,
        disks,
        copy: (copied - saved).saturating_sub(disks),
        freeze: copied.elapsed(),
    })
}

/// Lets the guest of `point` continue in `vm`, which is empty: maps its memory, loads its state,
/// gives it a new identity, and starts it.
///
/// The guest runs in `vm` even if it was paused in the parent.
///
/// # Errors
/// If the machine of `vm` differs from that of the parent, or if the memory or the state cannot be
/// used. The child has not run.
pub fn join_branch(vm: &mut dyn TargetVm, point: &BranchPoint) -> Result<Received, BranchError> {
    let (id, sections) = point.open(vm)?;
    let new = MigrationId(random()?);
    let (load, ()) = start_shared(vm, point.regions(), &sections, |_| Ok(())).map_err(RestoreError::Vm)?;
    Ok(received(new, id, "branch".to_owned(), load))
}

/// Lets the guest with the device state `sections` run in `vm`, with `regions` as its memory and a
/// new identity. Calls `mapped` when the memory is mapped and not yet used. Returns the time that
/// loading the state took, and the result of `mapped`.
pub(crate) fn start_shared<T>(
    vm: &mut dyn TargetVm,
    regions: &[RegionFile],
    sections: &[Section],
    mapped: impl FnOnce(&mut dyn TargetVm) -> Result<T, VmError>,
) -> Result<(Duration, T), VmError> {
    // The memory was empty, so there is little to unmap.
    drop(vm.adopt_memory(regions)?);
    let mapped = mapped(vm)?;
    let began = Instant::now();
    vm.load(sections)?;
    vm.renew_identity()?;
    let load = began.elapsed();
    vm.start(RunState::Running)?;
    Ok((load, mapped))
}

/// Returns the report of a guest with the id `id` that continues from `copy_of`.
pub(crate) fn received(id: MigrationId, copy_of: MigrationId, source: String, load: Duration) -> Received {
    Received {
        id: id.to_string(),
        copy_of: Some(copy_of.to_string()),
        source,
        pages: 0,
        known_pages: 0,
        paused: false,
        load_ms: load.as_secs_f64() * 1e3,
        cpu_ms: 0.0,
        postcopy: None,
    }
}
