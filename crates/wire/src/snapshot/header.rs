//! Header of a snapshot, and the two parts that are decoded as a whole.

use super::{SnapshotError, SnapshotMap, SnapshotPart, TableKind};
use crate::{Fields, MAX_STATE_BYTES, MigrationId, crc};
use serde::{Serialize, de::DeserializeOwned};
use vmferry_core::{Gpa, Layout, MAX_REGIONS, MachineConfig, Region, RegionId, Section};

/// Length of the header in bytes.
pub const SNAPSHOT_HEADER_BYTES: usize = 4096;
/// Version of the format. The encoding of version 1 must not change, as with the protocol.
pub const SNAPSHOT_VERSION: u16 = 1;
/// Maximum length of the machine description in bytes.
pub const MAX_MACHINE_BYTES: usize = 1 << 20;
/// Maximum length of the device state in bytes, including names and lengths.
pub const MAX_STATE_PART_BYTES: usize = MAX_STATE_BYTES + (1 << 20);

const MAGIC: [u8; 8] = *b"VMFSNAP\n";
/// Feature bit: the guest continued to run after the snapshot was taken. Like all of the low 32
/// bits, a reader may ignore this bit.
const FEATURE_COPY: u64 = 1;
/// Feature bit: the file is an increment ([`SnapshotHeader::base`]).
const FEATURE_INCREMENT: u64 = 1 << 32;
const MUST_UNDERSTAND: u64 = 0xffff_ffff_0000_0000;
/// Length of the fixed fields before the entries of regions, in bytes.
const FIXED_BYTES: usize = 72;
const REGION_BYTES: usize = 40;
/// Offset of the id, the length and the bytes of the base's name, in the header of an increment.
const BASE_AT: usize = FIXED_BYTES + MAX_REGIONS * REGION_BYTES;
const SUM_AT: usize = SNAPSHOT_HEADER_BYTES - 8;
const _: () = assert!(BASE_AT + 16 + 2 + BaseName::MAX_BYTES <= SUM_AT);

/// Length and checksum of a part of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartSum {
    /// Length in bytes.
    pub bytes: u32,
    /// Checksum of the part.
    pub sum: u64,
}

/// Name of the file of a base snapshot: the name of a file in the folder of the increment.
///
/// The name has no folder, so an increment that is not trusted cannot make its reader open a file
/// elsewhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BaseName(Vec<u8>);

impl BaseName {
    /// Maximum length of a name in bytes.
    pub const MAX_BYTES: usize = 255;

    /// Returns the name, or `None` if the bytes are not the name of a file without a folder.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let length = (1..=Self::MAX_BYTES).contains(&bytes.len());
        let plain = !bytes.contains(&b'/') && !bytes.contains(&0) && bytes != b"." && bytes != b"..";
        (length && plain).then(|| Self(bytes.to_vec()))
    }

    /// Returns the bytes of the name.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl std::fmt::Display for BaseName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0.escape_ascii())
    }
}

/// Snapshot on which an increment is based.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotBase {
    /// Id of the base. The id stands for the contents of the guest at one instant: a file that is
    /// merged from increments has the id of the last of them.
    pub id: MigrationId,
    /// Name of the file of the base.
    pub name: BaseName,
}

/// Entry of a region in the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SnapshotRegion {
    /// Id, guest-physical address and length of the region.
    pub region: Region,
    /// Checksum of the index of the region.
    pub index_sum: u64,
    /// Number of pages of the guest with content. In an increment, these pages are in the file or
    /// in its base.
    pub contents: u64,
}

/// Header of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotHeader {
    /// Random id of the snapshot.
    pub id: MigrationId,
    /// True if the guest continued to run after the snapshot was taken, so that the snapshot is a
    /// copy of it.
    pub copy: bool,
    /// For an increment, the snapshot that contains the pages that are not in this file.
    pub base: Option<SnapshotBase>,
    /// Length and checksum of the description of the machine.
    pub machine: PartSum,
    /// Length and checksum of the device state.
    pub state: PartSum,
    /// Entries of the regions, in ascending order of their guest-physical addresses.
    pub regions: Vec<SnapshotRegion>,
}

impl SnapshotHeader {
    /// Returns the kind of the tables of the file.
    #[must_use]
    pub fn kind(&self) -> TableKind {
        if self.base.is_some() { TableKind::Increment } else { TableKind::Complete }
    }

    /// Returns the layout of the guest's memory.
    ///
    /// # Errors
    /// Returns an error if the regions are not a valid layout, or are not sorted by address.
    pub fn layout(&self) -> Result<Layout, SnapshotError> {
        let regions: Vec<Region> = self.regions.iter().map(|entry| entry.region).collect();
        let layout = Layout::new(regions.clone())?;
        if layout.regions() != regions {
            return Err(field("regions out of order", regions.len() as u64, "by address"));
        }
        Ok(layout)
    }

    /// Encodes the header.
    ///
    /// # Errors
    /// Returns an error in the cases of [`layout`](Self::layout).
    pub fn encode(&self) -> Result<[u8; SNAPSHOT_HEADER_BYTES], SnapshotError> {
        let map = SnapshotMap::new(&self.layout()?, self.machine.bytes, self.state.bytes);
        let mut bytes = Vec::with_capacity(SNAPSHOT_HEADER_BYTES);
        bytes.extend(MAGIC);
        bytes.extend(SNAPSHOT_VERSION.to_le_bytes());
        // There are at most MAX_REGIONS, because the regions are a layout.
        bytes.extend(u16::try_from(self.regions.len()).unwrap_or(u16::MAX).to_le_bytes());
        bytes.extend([0; 4]);
        let copy = if self.copy { FEATURE_COPY } else { 0 };
        let increment = if self.base.is_some() { FEATURE_INCREMENT } else { 0 };
        bytes.extend((copy | increment).to_le_bytes());
        bytes.extend(self.id.0);
        bytes.extend(map.len.to_le_bytes());
        bytes.extend(self.machine.bytes.to_le_bytes());
        bytes.extend(self.state.bytes.to_le_bytes());
        bytes.extend(self.machine.sum.to_le_bytes());
        bytes.extend(self.state.sum.to_le_bytes());
        for SnapshotRegion { region, index_sum, contents } in &self.regions {
            bytes.extend(region.id.0.to_le_bytes());
            bytes.extend([0; 4]);
            let words = [region.gpa.0, region.len, *index_sum, *contents];
            bytes.extend(words.into_iter().flat_map(u64::to_le_bytes));
        }
        if let Some(SnapshotBase { id, name }) = &self.base {
            bytes.resize(BASE_AT, 0);
            bytes.extend(id.0);
            // A name has at most 255 bytes.
            bytes.extend(u16::try_from(name.0.len()).unwrap_or(u16::MAX).to_le_bytes());
            bytes.extend(&name.0);
        }
        bytes.resize(SUM_AT, 0);
        bytes.extend(crc(&bytes).to_le_bytes());
        Ok(bytes.try_into().expect("fixed size"))
    }

    /// Decodes the header of a file of `file_bytes` bytes and checks that it keeps every limit.
    /// Returns the header and the offsets of all parts.
    ///
    /// # Errors
    /// Returns an error if the bytes are damaged or are not a header, if a limit is exceeded, or if
    /// the file does not have the length that its header gives.
    pub fn decode(
        bytes: &[u8; SNAPSHOT_HEADER_BYTES],
        file_bytes: u64,
    ) -> Result<(Self, SnapshotMap), SnapshotError> {
        let mut fields = Fields(bytes);
        let magic = fields.take();
        if magic != MAGIC {
            let empty = bytes.iter().all(|byte| *byte == 0);
            return Err(if empty { SnapshotError::Unfinished } else { SnapshotError::Foreign(magic) });
        }
        let (body, sum) = bytes.split_at(SUM_AT);
        if sum != crc(body).to_le_bytes() {
            return Err(SnapshotError::Damaged { part: SnapshotPart::Header, at: 0 });
        }
        let version = fields.u16();
        if version != SNAPSHOT_VERSION {
            return Err(SnapshotError::Version(version));
        }
        let (count, _, features) = (usize::from(fields.u16()), fields.u32(), fields.u64());
        let unknown = features & MUST_UNDERSTAND & !FEATURE_INCREMENT;
        if unknown != 0 {
            return Err(SnapshotError::Features(unknown));
        }
        let (id, len) = (MigrationId(fields.take()), fields.u64());
        let (machine_bytes, state_bytes) = (fields.u32(), fields.u32());
        let (machine_sum, state_sum) = (fields.u64(), fields.u64());
        let within = |bytes: u32, limit| usize::try_from(bytes).is_ok_and(|bytes| bytes <= limit);
        if !within(machine_bytes, MAX_MACHINE_BYTES) {
            return Err(field("bytes of the machine's description", machine_bytes.into(), "up to 1 MiB"));
        }
        if !within(state_bytes, MAX_STATE_PART_BYTES) {
            return Err(field("bytes of device state", state_bytes.into(), "up to 65 MiB"));
        }
        if count == 0 || count > MAX_REGIONS {
            return Err(field("regions", count as u64, "1 to 64"));
        }
        let regions = (0..count).map(|_| region(&mut fields)).collect::<Result<_, _>>()?;
        let increment = features & FEATURE_INCREMENT != 0;
        let header = Self {
            id,
            copy: features & FEATURE_COPY != 0,
            base: increment.then(|| base(&bytes[BASE_AT..SUM_AT])).transpose()?,
            machine: PartSum { bytes: machine_bytes, sum: machine_sum },
            state: PartSum { bytes: state_bytes, sum: state_sum },
            regions,
        };
        let map = SnapshotMap::new(&header.layout()?, machine_bytes, state_bytes);
        if len != map.len {
            return Err(field("length of the file", len, "what its parts add up to"));
        }
        if file_bytes != len {
            return Err(SnapshotError::Length { has: file_bytes, wants: len });
        }
        Ok((header, map))
    }
}

fn region(fields: &mut Fields<'_>) -> Result<SnapshotRegion, SnapshotError> {
    let (id, _) = (RegionId(fields.u32()), fields.u32());
    let region = Region { id, gpa: Gpa(fields.u64()), len: fields.u64() };
    let (index_sum, contents) = (fields.u64(), fields.u64());
    if contents > region.pages() {
        return Err(field("pages with content", contents, "as many as the region has"));
    }
    Ok(SnapshotRegion { region, index_sum, contents })
}

fn base(bytes: &[u8]) -> Result<SnapshotBase, SnapshotError> {
    let mut fields = Fields(bytes);
    let (id, length) = (MigrationId(fields.take()), fields.u16());
    let name = fields.0.get(..usize::from(length)).and_then(BaseName::new);
    let name = name.ok_or_else(|| {
        field("bytes of the base's name", length.into(), "1 to 255, and no folder in the name")
    })?;
    Ok(SnapshotBase { id, name })
}

fn field(what: &'static str, value: u64, allowed: &'static str) -> SnapshotError {
    SnapshotError::Field { part: SnapshotPart::Header, what, value, allowed }
}

/// Encodes the description of the machine. Returns the bytes, and their length and checksum for the
/// header.
///
/// # Errors
/// Returns an error if the bytes exceed [`MAX_MACHINE_BYTES`].
pub fn encode_machine(machine: &MachineConfig) -> Result<(Vec<u8>, PartSum), SnapshotError> {
    encode_part(machine, SnapshotPart::Machine, MAX_MACHINE_BYTES)
}

/// Encodes the device state. Returns the bytes, and their length and checksum for the header.
///
/// # Errors
/// Returns an error if the bytes exceed [`MAX_STATE_PART_BYTES`].
pub fn encode_state(sections: &[Section]) -> Result<(Vec<u8>, PartSum), SnapshotError> {
    encode_part(sections, SnapshotPart::State, MAX_STATE_PART_BYTES)
}

fn encode_part<T: Serialize + ?Sized>(
    value: &T,
    part: SnapshotPart,
    limit: usize,
) -> Result<(Vec<u8>, PartSum), SnapshotError> {
    let bytes = postcard::to_stdvec(value).map_err(|error| SnapshotError::Unreadable {
        part,
        at: 0,
        why: error.to_string(),
    })?;
    match u32::try_from(bytes.len()) {
        Ok(len) if bytes.len() <= limit => {
            let sum = crc(&bytes);
            Ok((bytes, PartSum { bytes: len, sum }))
        }
        _ => Err(SnapshotError::TooLarge { part, bytes: bytes.len(), limit }),
    }
}

/// Decodes a [`MachineConfig`] or a `Vec<Section>` from all bytes of its part. `part` and `at`, the
/// offset of the part in the file in bytes, are for error messages.
///
/// # Errors
/// Returns an error if the checksum is wrong, or if the bytes cannot be decoded.
pub fn decode_part<T: DeserializeOwned>(
    bytes: &[u8],
    sum: PartSum,
    part: SnapshotPart,
    at: u64,
) -> Result<T, SnapshotError> {
    if crc(bytes) != sum.sum {
        return Err(SnapshotError::Damaged { part, at });
    }
    let unreadable = |why| SnapshotError::Unreadable { part, at, why };
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(unreadable(format!("{} bytes are left over", rest.len()))),
        Err(error) => Err(unreadable(error.to_string())),
    }
}
