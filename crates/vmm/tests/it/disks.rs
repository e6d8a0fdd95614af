//! Tests of the ownership of a disk while its guest migrates. The guest of these tests does not use
//! the disk; I/O is tested with the device and in Linux guests.

use crate::confined::kvm;
use crate::rig::{boot, patient};
use std::path::PathBuf;
use vmferry_engine::{
    Arrival, Listener, MigrationHandle, MigrationMode, MigrationState, Report, Settings, migrate, receive,
    restore, save,
};
use vmferry_testkit::{Need, PATIENCE, skip, temp_path, wait};
use vmferry_testkit_peers::{pair, unix_uri};
use vmferry_vmm::{DiskError, DiskOptions, Error, Vm, VmHandle, VmOptions};

const MEMORY: u64 = 64 << 20;

/// Disk that is removed when dropped.
struct Temp(PathBuf);

impl Temp {
    fn new(name: &str) -> Self {
        let name = format!("vmferry-disks-{}-{name}", std::process::id());
        // In memory, if possible: a flush to a busy disk may take longer than a VM waits for it.
        let places = ["/dev/shm".into(), std::env::temp_dir()];
        let path = places.map(|place: PathBuf| place.join(&name));
        let path = path.into_iter().find(|path| std::fs::write(path, [7; 1 << 16]).is_ok());
        Self(path.expect("a place for a disk"))
    }

    fn options(&self, incoming: bool) -> VmOptions {
        let mut options = VmOptions::new(MEMORY, 1);
        (options.incoming, options.rng) = (incoming, true);
        options.disks = vec![DiskOptions::new(&self.0)];
        options
    }

    fn running(&self) -> Vm {
        let vm = boot(self.options(false), "uniform,ws=8M,rate=2k,fill=random");
        goes_on(&vm.handle());
        vm
    }

    /// Returns true if a VM holds the disk.
    fn taken(&self) -> bool {
        match Vm::new(self.options(false)) {
            Ok(_) => false,
            Err(Error::Disk(DiskError::InUse { by, .. })) => {
                assert_eq!(by, "another VM of this process");
                true
            }
            Err(error) => panic!("{error}"),
        }
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Waits until the guest has written 100 times more.
fn goes_on(handle: &VmHandle) {
    let writes = || handle.stats().map_or(0, |stats| stats.writes());
    let before = writes();
    wait("writes of the guest", || writes() > before + 100);
}

/// Migrates the guest of `source` to a target with `disk`.
fn moved(source: &mut Vm, disk: &Temp, mode: MigrationMode) -> (Report, Vm) {
    let mut target = Vm::new(disk.options(true)).unwrap();
    let settings = Settings { mode, ..patient() };
    let (report, came) =
        pair::moved(&unix_uri(), source, &mut target, None, &settings, &MigrationHandle::new());
    let whole = came.is_ok_and(|postcopy| postcopy.is_none_or(|postcopy| postcopy.left == 0));
    assert_eq!(whole, report.state == MigrationState::Completed, "{report:?}");
    (report, target)
}

#[test]
fn disk_moves_with_its_guest() {
    if !kvm() {
        return;
    }
    let disk = Temp::new("moves");
    let mut vm = disk.running();
    assert!(disk.taken());
    for mode in [MigrationMode::Precopy, MigrationMode::Postcopy] {
        let (report, target) = moved(&mut vm, &disk, mode);
        if mode == MigrationMode::Postcopy
            && report.error.as_ref().is_some_and(|why| why.contains("userfaultfd"))
        {
            skip(Need::Uffd, report.error.unwrap());
            continue;
        }
        assert_eq!(report.state, MigrationState::Completed, "{mode:?}: {report:?}");
        // The target holds the disk. A source that is told to resume does not get it, and does not
        // release it when it ends.
        let error = vm.resume().unwrap_err().to_string();
        assert!(error.contains("is in use by another VM of this process"), "{error}");
        drop(vm);
        assert!(disk.taken());
        goes_on(&target.handle());
        vm = target;
    }
    vm.stop();
    assert!(!disk.taken());
}

#[test]
fn guest_whose_disk_the_target_cannot_take_stays_and_keeps_it() {
    if !kvm() {
        return;
    }
    let (disk, other) = (Temp::new("stays"), Temp::new("held"));
    let mut vm = disk.running();
    // The disk with the same properties on the target is held by another VM.
    let _holder = Vm::new(other.options(false)).unwrap();
    for mode in [MigrationMode::Precopy, MigrationMode::Postcopy] {
        let (report, target) = moved(&mut vm, &other, mode);
        assert_eq!(report.state, MigrationState::Failed, "{mode:?}: {report:?}");
        let why = report.error.unwrap();
        let understood =
            why.contains("is in use by another VM of this process") || why.contains("userfaultfd");
        assert!(understood, "{mode:?}: {why}");
        drop(target);
        assert!(disk.taken(), "{mode:?}: the source must hold the disk again");
        goes_on(&vm.handle());
    }
}

#[test]
fn disk_is_released_after_a_save_and_taken_on_restore() {
    if !kvm() {
        return;
    }
    let disk = Temp::new("file");
    let mut vm = disk.running();
    let path = temp_path("disks-snapshot");
    let saved = save(&mut vm, &path, &MigrationHandle::new()).unwrap();
    assert_eq!(saved.state, MigrationState::Completed, "{saved:?}");
    assert!(!disk.taken());
    let mut target = Vm::new(disk.options(true)).unwrap();
    let restored = restore(&mut target, &path);
    std::fs::remove_file(&path).unwrap();
    let _ = restored.unwrap();
    assert!(disk.taken());
    goes_on(&target.handle());
}

#[test]
fn different_disk_is_refused_before_the_migration_begins() {
    if !kvm() {
        return;
    }
    let (disk, larger) = (Temp::new("one"), Temp::new("larger"));
    std::fs::write(&larger.0, [0; 1 << 17]).unwrap();
    let mut vm = disk.running();
    let mut target = Vm::new(larger.options(true)).unwrap();
    let uri = unix_uri();
    let listener = Listener::bind(&uri, false).unwrap();
    let arrival = Arrival::new(PATIENCE);
    let why = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| receive(&mut target, &listener, &arrival).is_ok());
        let report = migrate(&mut vm, &uri, None, &patient(), &MigrationHandle::new()).unwrap();
        arrival.stop();
        receiving.join().unwrap();
        report.error.unwrap()
    });
    assert!(why.contains("disk 0") && why.contains("65536 bytes, writable"), "{why}");
    assert!(disk.taken());
    goes_on(&vm.handle());
}
