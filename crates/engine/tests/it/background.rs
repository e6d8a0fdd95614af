//! Snapshots of a running guest whose VM fails in every step. The process guest and the KVM guest
//! test that the file has the content of the instant. The guest of these tests writes nothing while
//! its memory is protected.

use crate::snapshots::guest;
use crate::toy::{Method, Options, Toy};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;
use vmferry_core::{PageIndex, PageRun, RegionId};
use vmferry_engine::{
    DirtyTracker, Fault, GuestMemory, MachineConfig, Migratable, MigrateError, MigrationHandle,
    MigrationState, PauseHook, RunState, Section, SnapshotSettings, SourceVm, TrackerKind, VmError,
    WriteProtection, restore, snapshot_background,
};
use vmferry_testkit::Folder;

/// Protection of memory that no thread writes.
#[derive(Debug, Default)]
struct Idle {
    begun: AtomicBool,
    protected: AtomicU64,
    unprotected: AtomicU64,
    /// Number of calls of `protect` or `unprotect` until one fails.
    fails_after: Mutex<Option<u64>>,
    interrupts: Mutex<u64>,
    interrupted: Condvar,
}

impl Idle {
    fn change(&self, count: &AtomicU64, run: PageRun) -> Result<(), VmError> {
        assert!(self.begun.load(Ordering::Acquire), "changed before the begin or after the end");
        count.fetch_add(run.count, Ordering::AcqRel);
        match &mut *self.fails_after.lock().unwrap() {
            Some(0) => Err(VmError::new("injected failure of the protection")),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl WriteProtection for Idle {
    fn shards(&self) -> usize {
        2
    }
    fn shard_of(&self, _: RegionId, page: PageIndex) -> usize {
        usize::from(!page.0.is_multiple_of(2))
    }
    fn begin(&self) -> Result<(), VmError> {
        assert!(!self.begun.swap(true, Ordering::AcqRel), "begun twice");
        Ok(())
    }
    fn protect(&self, _: RegionId, run: PageRun) -> Result<(), VmError> {
        self.change(&self.protected, run)
    }
    fn unprotect(&self, _: RegionId, run: PageRun) -> Result<(), VmError> {
        self.change(&self.unprotected, run)
    }
    fn next_write(&self, _: usize, within: Duration) -> Result<Option<Fault>, VmError> {
        let interrupts = self.interrupts.lock().unwrap();
        let before = *interrupts;
        let waited =
            self.interrupted.wait_timeout_while(interrupts, within, |interrupts| *interrupts == before);
        drop(waited.unwrap());
        Ok(None)
    }
    fn interrupt(&self) {
        *self.interrupts.lock().unwrap() += 1;
        self.interrupted.notify_all();
    }
    fn end(&self) -> Result<(), VmError> {
        self.begun.store(false, Ordering::Release);
        Ok(())
    }
}

/// Toy whose memory can be protected.
pub(crate) struct Protects(pub(crate) Toy, Arc<Idle>);

impl Protects {
    pub(crate) fn new() -> Self {
        Self::with(Options::default())
    }

    pub(crate) fn with(options: Options) -> Self {
        Self(Toy::new(Options { writers: 0, ..options }, true), Arc::default())
    }

    /// Writes a snapshot, and checks that no page is protected afterwards.
    fn snapshot(&mut self, folder: &Folder, settings: &SnapshotSettings) -> vmferry_engine::Report {
        self.snapshot_with(folder, settings, &MigrationHandle::new())
    }

    fn snapshot_with(
        &mut self,
        folder: &Folder,
        settings: &SnapshotSettings,
        handle: &MigrationHandle,
    ) -> vmferry_engine::Report {
        let report = snapshot_background(self, &guest(folder), settings, handle).unwrap();
        assert!(!self.1.begun.load(Ordering::Acquire), "pages are protected: {report:?}");
        report
    }
}

impl Migratable for Protects {
    fn config(&self) -> MachineConfig {
        self.0.config()
    }
    fn memory(&self) -> Arc<dyn GuestMemory> {
        self.0.memory()
    }
}

impl SourceVm for Protects {
    fn tracker(&mut self, kind: Option<TrackerKind>) -> Result<Box<dyn DirtyTracker>, VmError> {
        self.0.tracker(kind)
    }
    fn write_protection(&mut self) -> Result<Arc<dyn WriteProtection>, VmError> {
        Ok(Arc::clone(&self.1) as _)
    }
    fn pause(&mut self) -> Result<(), VmError> {
        SourceVm::pause(&mut self.0)
    }
    fn quiesce(&mut self, within: Duration) -> Result<(), VmError> {
        SourceVm::quiesce(&mut self.0, within)
    }
    fn save(&mut self) -> Result<Vec<Section>, VmError> {
        SourceVm::save(&mut self.0)
    }
    fn release(&mut self) -> Result<(), VmError> {
        panic!("the guest stays")
    }
    fn run_state(&self) -> RunState {
        SourceVm::run_state(&self.0)
    }
    fn resume(&mut self) -> Result<(), VmError> {
        SourceVm::resume(&mut self.0)
    }
}

#[test]
fn vm_that_cannot_protect_its_memory_is_refused() {
    let folder = Folder::new();
    let mut toy = Toy::new(Options::default(), true);
    let taken =
        snapshot_background(&mut toy, &guest(&folder), &SnapshotSettings::default(), &MigrationHandle::new());
    let error = taken.unwrap_err();
    assert!(matches!(&error, MigrateError::Vm(why) if why.to_string().contains("protect")), "{error}");
    assert_eq!(folder.names(), [""; 0]);
    assert!(toy.works());
}

#[test]
fn each_page_is_protected_before_and_unprotected_after_its_copy() {
    let folder = Folder::new();
    let mut vm = Protects::new();
    let mut settings = SnapshotSettings::default();
    settings.verify = true;
    let report = vm.snapshot(&folder, &settings);
    assert_eq!(report.state, MigrationState::Completed, "{:?}", report.error);
    assert_eq!(report.verified_pages, report.bytes.raw_pages);
    let counts = |count: &AtomicU64| count.load(Ordering::Acquire);
    assert_eq!(counts(&vm.1.protected), counts(&vm.1.unprotected), "all pages once: {report:?}");
    assert!(vm.0.running());
    let mut target = vm.0.target();
    // A target compares itself with its twin, which must not write meanwhile.
    vm.0.halt();
    let received = restore(&mut target, &guest(&folder)).unwrap();
    assert_eq!(target.arrived_equal(), Some(true));
    assert_eq!(received.copy_of, Some(report.id));
}

#[test]
fn failed_step_leaves_no_file_and_the_guest_runs() {
    let folder = Folder::new();
    for (method, after) in [
        (Method::Pause, 0),
        (Method::Save, 0),
        (Method::Window, 0),
        (Method::Window, 1),
        (Method::Touched, 0),
        (Method::Touched, 1),
    ] {
        let mut vm = Protects::new();
        vm.0.fail(method, after);
        let report = vm.snapshot(&folder, &SnapshotSettings::default());
        assert_eq!(report.state, MigrationState::Failed, "{method:?}");
        assert!(report.error.unwrap().contains("injected"), "{method:?}");
        assert!(!report.resume_failed && vm.0.running(), "{method:?}");
        assert_eq!(folder.names(), [""; 0], "{method:?}");
    }
    // In the first round, in a later round, and by a writer.
    for after in 0..8 {
        let mut vm = Protects::new();
        *vm.1.fails_after.lock().unwrap() = Some(after);
        let report = vm.snapshot(&folder, &SnapshotSettings::default());
        assert!(vm.0.running(), "{after}");
        if report.state != MigrationState::Completed {
            assert!(report.error.unwrap().contains("injected"), "{after}");
            assert_eq!(folder.names(), [""; 0], "{after}");
        } else {
            std::fs::remove_file(guest(&folder)).unwrap();
        }
    }
}

#[test]
fn guest_that_cannot_be_resumed_is_reported() {
    let folder = Folder::new();
    let mut vm = Protects::new();
    vm.0.fail(Method::Resume, 0);
    let report = vm.snapshot(&folder, &SnapshotSettings::default());
    assert_eq!((report.state, report.resume_failed), (MigrationState::Failed, true), "{report:?}");
    assert!(!vm.0.running());
    assert_eq!(folder.names(), [""; 0]);
}

#[test]
fn panic_of_the_vm_is_a_failure() {
    for method in [Method::Pause, Method::Save, Method::Touched, Method::Window] {
        let folder = Folder::new();
        let mut vm = Protects::new();
        vm.0.panics(method);
        let report = vm.snapshot(&folder, &SnapshotSettings::default());
        assert_eq!(report.state, MigrationState::Failed, "{method:?}");
        assert!(report.error.unwrap().contains("a clumsy VM"), "{method:?}");
        assert!(vm.0.running(), "{method:?}");
        assert_eq!(folder.names(), [""; 0], "{method:?}");
    }
}

#[test]
fn busy_devices_defer_the_pause() {
    let folder = Folder::new();
    let mut vm = Protects::new();
    vm.0.busy(&[true, true, false]);
    let report = vm.snapshot(&folder, &SnapshotSettings::default());
    assert_eq!(report.state, MigrationState::Completed, "{:?}", report.error);
    assert_eq!((report.deferrals, vm.0.quiesces().len()), (2, 3));
    assert!(report.deferred_ms > 0.0);
}

#[test]
fn hook_is_called_in_the_pause_and_a_cancel_leaves_no_file() {
    let folder = Folder::new();
    let mut vm = Protects::new();
    let runs = vm.0.counter();
    let mut settings = SnapshotSettings::default();
    settings.in_pause = Some(PauseHook::new(move || {
        assert_eq!((runs(Method::Save), runs(Method::Resume)), (1, 0));
        Err(VmError::new("no disk snapshot"))
    }));
    let report = vm.snapshot(&folder, &settings);
    assert_eq!(report.state, MigrationState::Failed);
    assert_eq!(report.error.as_deref(), Some("no disk snapshot"));
    assert!(vm.0.running());
    let handle = MigrationHandle::new();
    handle.cancel();
    let report = vm.snapshot_with(&folder, &SnapshotSettings::default(), &handle);
    assert_eq!(report.state, MigrationState::Cancelled, "{:?}", report.error);
    assert_eq!(folder.names(), [""; 0]);
    assert!(vm.0.running());
    let mut settings = SnapshotSettings::default();
    settings.buffer = 4096;
    let refused = snapshot_background(&mut vm, &guest(&folder), &settings, &MigrationHandle::new());
    assert!(matches!(refused, Err(MigrateError::Settings(_))));
}
