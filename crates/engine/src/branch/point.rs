//! Point from which branches of a guest continue.

use super::{BranchError, host};
use crate::snapshot::RestoreError;
use rustix::fs::{MemfdFlags, SealFlags};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use vmferry_core::{Layout, MachineConfig, RegionFile, Section, TargetVm, VmError};
use vmferry_wire::{
    MigrationId, PartSum, SNAPSHOT_HEADER_BYTES, SnapshotHeader, SnapshotMap, SnapshotPart, SnapshotRegion,
    decode_part, encode_machine, encode_state,
};

/// Instant of a guest from which other guests can continue: the files with its memory, and its
/// device state.
///
/// A clone refers to the same files. The files exist for as long as a process has one of them open
/// or mapped.
///
/// The device state is in a file with the header of a snapshot, its machine description and its
/// device state, at the same offsets as in a snapshot. The file has no pages.
#[derive(Debug, Clone)]
pub struct BranchPoint {
    state: Arc<OwnedFd>,
    regions: Vec<RegionFile>,
}

impl BranchPoint {
    pub(super) fn new(
        id: MigrationId,
        (machine, layout): (&MachineConfig, &Layout),
        sections: &[Section],
        regions: Vec<RegionFile>,
    ) -> Result<Self, BranchError> {
        let (machine, machine_sum) = encode_machine(machine)?;
        let (state, state_sum) = encode_state(sections)?;
        let map = SnapshotMap::new(layout, machine_sum.bytes, state_sum.bytes);
        let entry = |region: &_| SnapshotRegion { region: *region, index_sum: 0, contents: 0 };
        let header = SnapshotHeader {
            id,
            copy: true,
            base: None,
            machine: machine_sum,
            state: state_sum,
            regions: layout.regions().iter().map(entry).collect(),
        };
        let header = header.encode()?;
        let write = || -> io::Result<OwnedFd> {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = File::from(rustix::fs::memfd_create("vmferry-branch-state", flags)?);
            // The pages would follow the state, so most of the file is a hole.
            file.set_len(map.len)?;
            file.write_all_at(&header, 0)?;
            file.write_all_at(&machine, map.machine)?;
            file.write_all_at(&state, map.state)?;
            let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL;
            rustix::fs::fcntl_add_seals(&file, seals)?;
            Ok(file.into())
        };
        Ok(Self { state: Arc::new(write().map_err(host("a file for the device state"))?), regions })
    }

    /// Returns a point with files that another process has passed.
    pub(super) fn passed(state: OwnedFd, regions: Vec<RegionFile>) -> Self {
        Self { state: Arc::new(state), regions }
    }

    /// Returns the files with the memory.
    #[must_use]
    pub fn regions(&self) -> &[RegionFile] {
        &self.regions
    }

    pub(super) fn state(&self) -> &OwnedFd {
        &self.state
    }

    /// Seals the files with the memory against every write.
    pub(super) fn seal(&self) -> Result<(), BranchError> {
        self.regions.iter().try_for_each(|region| {
            rustix::fs::fcntl_add_seals(&region.file, SealFlags::WRITE)
                .map_err(|error| host("a seal against every write to the guest's memory")(error.into()))
        })
    }

    /// Reads and checks the point for `vm`, which is to continue from it. Returns the id of the
    /// point and the device state.
    pub(super) fn open(&self, vm: &dyn TargetVm) -> Result<(MigrationId, Vec<Section>), RestoreError> {
        let file = self.state.try_clone().map(File::from);
        let read = |part, at| move |source| RestoreError::Read { part, at, source };
        let file = file.map_err(read(SnapshotPart::Header, 0))?;
        let len = file.metadata().map_err(read(SnapshotPart::Header, 0))?.len();
        let mut bytes = [0; SNAPSHOT_HEADER_BYTES];
        file.read_exact_at(&mut bytes, 0).map_err(read(SnapshotPart::Header, 0))?;
        let (header, map) = SnapshotHeader::decode(&bytes, len)?;
        let part = |sum: PartSum, part, at| {
            let mut bytes = vec![0; usize::try_from(sum.bytes).unwrap_or(usize::MAX)];
            file.read_exact_at(&mut bytes, at).map_err(read(part, at)).map(|()| bytes)
        };
        let machine = part(header.machine, SnapshotPart::Machine, map.machine)?;
        let machine: MachineConfig =
            decode_part(&machine, header.machine, SnapshotPart::Machine, map.machine)?;
        if let Some(difference) = vm.config().difference(&machine) {
            return Err(RestoreError::Machine(difference));
        }
        let memory = vm.memory();
        if &header.layout()? != memory.layout() {
            return Err(RestoreError::Machine("the memory of this VM differs from its description".into()));
        }
        self.check_files(memory.layout())?;
        let state = part(header.state, SnapshotPart::State, map.state)?;
        let sections = decode_part(&state, header.state, SnapshotPart::State, map.state)?;
        Ok((header.id, sections))
    }

    /// Checks that the files can be mapped as the memory `layout`: an access beyond the end of a
    /// file would end the process, and a write of another process would change the guest's memory.
    fn check_files(&self, layout: &Layout) -> Result<(), VmError> {
        for region in layout.regions() {
            let own = self.regions.iter().find(|own| own.region == region.id);
            let own = own.ok_or_else(|| VmError::new(format!("there is no file for {}", region.id)))?;
            let end = own.offset.checked_add(region.len);
            let stat = rustix::fs::fstat(own.file.as_fd()).map_err(io::Error::from)?;
            let len = u64::try_from(stat.st_size).unwrap_or(0);
            if end.is_none_or(|end| end > len) {
                let why = format!("the file for {} has {len} bytes, which are too few", region.id);
                return Err(VmError::new(why));
            }
            let seals = rustix::fs::fcntl_get_seals(own.file.as_fd()).map_err(io::Error::from)?;
            if !seals.contains(SealFlags::SHRINK)
                || !seals.intersects(SealFlags::FUTURE_WRITE | SealFlags::WRITE)
            {
                let why =
                    format!("the file for {} is not sealed, so another process could change it", region.id);
                return Err(VmError::new(why));
            }
        }
        Ok(())
    }
}
