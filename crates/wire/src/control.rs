//! Messages of the control channel.

use crate::{Fields, MAX_FRAME_PAGES, Refusal, Token, WireError, crc};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use vmferry_core::{MAX_REGIONS, MachineConfig, RegionId, Section, StreamName, bounded};

/// Length of the header of a control message in bytes.
pub const CONTROL_HEADER_BYTES: usize = 16;
/// Maximum length of the body of one control message in bytes.
pub const MAX_CONTROL_BYTES: usize = 4 << 20;
/// Maximum length of a [`ToTarget::Description`] in bytes.
pub const MAX_DESCRIPTION_BYTES: usize = 1 << 20;
/// Maximum total length of the device state of a guest in bytes.
pub const MAX_STATE_BYTES: usize = 64 << 20;
/// Maximum number of sections in the device state of a guest.
pub const MAX_SECTIONS: usize = 65_536;
/// Maximum number of streams in the device state of a guest.
pub const MAX_STREAMS: usize = 4096;
/// Maximum number of bytes in a [`ToTarget::StreamBytes`].
pub const MAX_STREAM_BYTES: usize = 1 << 20;
/// Maximum number of runs in one message that names pages with a digest mismatch.
pub const MAX_NAMED_RUNS: usize = 65_536;
/// Maximum number of entries in [`PagingFigures::latency`]: one for each vCPU, and one for all
/// other threads.
pub const MAX_LATENCIES: usize = 4097;
/// Maximum number of buckets in a histogram, one for each bit of a `u64`.
pub const MAX_BUCKETS: usize = 64;

const MAGIC: u32 = u32::from_le_bytes(*b"VMFc");

/// Mode of a migration, which decides if the guest moves to the target before or after its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Mode {
    /// The guest moves after all of its memory.
    Precopy,
    /// The guest moves before its memory.
    Postcopy,
    /// The guest moves after one or more precopy passes over its memory, and before the remaining
    /// pages.
    Hybrid,
}

impl Mode {
    /// Returns true if the guest may run on the target before all of its memory has arrived. Such a
    /// mode needs urgent channels.
    #[must_use]
    pub fn may_use_postcopy(self) -> bool {
        self != Self::Precopy
    }
}

/// Identification of a page by its region and index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionPage {
    /// Region of the page.
    pub region: RegionId,
    /// Index of the page in the region.
    pub page: u64,
}

/// Identification of a run of pages by its region and indexes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionRun {
    /// Region of the pages.
    pub region: RegionId,
    /// Index of the first page.
    pub first: u64,
    /// Number of pages.
    pub count: u64,
}

/// Part of a set of missing pages, as a bitmap.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissingPages {
    /// Region of the pages.
    pub region: RegionId,
    /// Index of the page that the first bit stands for, a multiple of 64.
    pub first: u64,
    /// Bitmap as little-endian 64-bit words, in which the lowest bit of a word stands for its first
    /// page. The length is at most [`MAX_MISSING_BYTES`].
    pub words: Vec<u8>,
}

/// Maximum length of the bitmap in [`MissingPages`] in bytes. A bitmap of this length covers 32 GiB
/// of memory.
pub const MAX_MISSING_BYTES: usize = 1 << 20;

/// Memory of one region in a descriptor that the source passes to the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalRegion {
    /// Region of the memory.
    pub region: RegionId,
    /// Length of the region in bytes.
    pub len: u64,
    /// Position of the first byte of the region in the file, in bytes.
    pub offset: u64,
}

/// Figures of demand paging, as the target reports them to the source.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagingFigures {
    /// Number of pages that arrived with content.
    pub pages: u64,
    /// Number of pages that arrived as zeros.
    pub zero_pages: u64,
    /// Number of pages that arrived although they were already present. A correct source causes
    /// none.
    pub duplicates: u64,
    /// Number of pages that arrived with a digest mismatch and were requested again.
    pub digest_mismatches: u64,
    /// Number of faults on pages that were known to be zero. The target resolves them without the
    /// source.
    pub zero_faults: u64,
    /// Number of pages that were requested because of a fault.
    pub requests: u64,
    /// Number of pages that were requested in advance, because they follow a run of faults.
    pub ahead: u64,
    /// Number of the pages in `ahead` that were used. The target counts them as used if the run of
    /// faults continues right behind them.
    pub ahead_used: u64,
    /// Time from the start of the guest until the last page was present, in microseconds.
    pub elapsed_us: u64,
    /// CPU time of the target's engine threads, in microseconds.
    pub cpu_us: u64,
    /// Latency of all faults.
    pub all: FaultLatency,
    /// Latency of the faults of each vCPU, measured from the time at which the target reads the
    /// fault until the page is placed. The last entry is for all other threads.
    #[serde(deserialize_with = "bounded::list::<_, _, MAX_LATENCIES>")]
    pub latency: Vec<FaultLatency>,
}

/// Latency of faults.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultLatency {
    /// Number of faults.
    pub faults: u64,
    /// Sum of all latencies, in microseconds. For a single vCPU, this is the time for which it
    /// waited for pages.
    pub sum_us: u64,
    /// Median latency, in nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile of the latency, in nanoseconds.
    pub p99_ns: u64,
    /// Longest latency, in nanoseconds.
    pub max_ns: u64,
    /// Histogram of the latencies. Element 0 counts the faults that took less than 1 microsecond.
    /// Each further element `i` counts those that took at least 2^(i-1) and less than 2^i
    /// microseconds.
    #[serde(deserialize_with = "bounded::list::<_, _, MAX_BUCKETS>")]
    pub buckets: Vec<u64>,
}

/// Maximum length of the bitmap in [`ToSource::UnknownPages`] in bytes: one bit for each page of a
/// frame.
pub const MAX_UNKNOWN_BYTES: usize = MAX_FRAME_PAGES / 8;

/// Message from the source to the target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToTarget {
    /// Description of the migration, which the target accepts or refuses.
    Setup {
        /// Machine that the guest needs.
        machine: MachineConfig,
        /// Mode of the migration.
        mode: Mode,
        /// Number of bulk channels that the source will open.
        bulk_channels: u16,
        /// Number of urgent channels that the source will open. It is 0 if and only if the mode is
        /// precopy.
        urgent_channels: u16,
        /// True if the source will open a probe channel.
        probe: bool,
    },
    /// A pass begins.
    Pass {
        /// Number of the pass, from 0.
        pass: u32,
        /// Approximate number of pages that the pass examines.
        pages: u64,
    },
    /// The vCPUs have stopped. This pass is the last one, unless the target reports a digest
    /// mismatch.
    Final {
        /// Number of the pass.
        pass: u32,
    },
    /// One section of the device state.
    Section(Section),
    /// All device state has been sent.
    StateEnd {
        /// Number of sections.
        sections: u32,
    },
    /// A pass follows that contains the digests of all pages. The target compares them with its own
    /// pages.
    Verify {
        /// Number of the pass.
        pass: u32,
    },
    /// All pages have been sent and checked. The target loads the device state and answers with
    /// [`ToSource::Ready`].
    Load,
    /// Part of the set of pages that are still missing on the target at the handover.
    Lacking(MissingPages),
    /// The source has sent all device state and named all missing pages. The target drops its
    /// content of these pages, which is out of date, and loads the device state. If loading
    /// accesses a missing page, the target requests the page on an urgent channel. After loading,
    /// the target answers with [`ToSource::Ready`].
    LoadLazily {
        /// Number of missing pages.
        pages: u64,
    },
    /// Commit: the target owns the guest and runs it. The source does not run the guest after it
    /// has sent this message.
    Commit,
    /// Acknowledges [`ToSource::Complete`], after which the source has nothing left to do. After a
    /// handover, or if the migration has an arbiter, the message also acknowledges
    /// [`ToSource::Returned`] and [`ToSource::Failed`], so that the target may end.
    Thanks,
    /// The migration is cancelled. The guest stays on the source.
    Cancel(Refusal),
    /// Request for a [`ToSource::Pong`] with the same number.
    Ping(u64),
    /// Description of the guest from the source's VMM for the target's VMM, which the engine does
    /// not read. It is sent before [`Setup`](Self::Setup), has at most [`MAX_DESCRIPTION_BYTES`]
    /// bytes, and is sent only if the reply to the source's hello has the feature
    /// [`FEATURE_DESCRIPTION`](crate::FEATURE_DESCRIPTION).
    Description(Vec<u8>),
    /// One section of the device state from a trial pause, for a target that has sent
    /// [`ToSource::WantsTrial`]. The guest continues to run on the source.
    TrialSection(Section),
    /// The source has sent all sections from the trial pause. The target answers with
    /// [`ToSource::Prepared`].
    TrialEnd {
        /// Number of sections.
        sections: u32,
    },
    /// The operator has paused the guest, so the guest stays paused on the target. The source sends
    /// this message before [`Load`](Self::Load) or [`LoadLazily`](Self::LoadLazily), and only if
    /// the reply to its hello has the feature [`FEATURE_PAUSED`](crate::FEATURE_PAUSED).
    StaysPaused,
    /// A stream of device state begins. The source sends this message only if the reply to its
    /// hello has the feature [`FEATURE_STREAMS`](crate::FEATURE_STREAMS).
    StreamOpen {
        /// Number of the stream, from 0.
        stream: u32,
        /// Name of the stream.
        name: StreamName,
    },
    /// Next bytes of a stream, at most [`MAX_STREAM_BYTES`].
    StreamBytes {
        /// Number of the stream.
        stream: u32,
        /// Content.
        bytes: Vec<u8>,
    },
    /// A stream is complete. Each stream must end before [`Load`](Self::Load) or
    /// [`LoadLazily`](Self::LoadLazily).
    StreamEnd {
        /// Number of the stream.
        stream: u32,
    },
    /// The memory of the guest, for a target on the same host. The source sends this message once,
    /// after [`ToSource::ChannelsUp`] and while the guest runs, and only if the reply to its hello
    /// has the feature [`FEATURE_LOCAL_MEMORY`](crate::FEATURE_LOCAL_MEMORY). No pages are sent in
    /// such a migration.
    ///
    /// One descriptor of each region is attached to the bytes of the message (`SCM_RIGHTS`,
    /// unix(7)), in the order of the regions. The target maps the descriptors, and answers with
    /// [`ToSource::MemoryTaken`]. It does not write the memory before the commit.
    LocalMemory {
        /// Regions of the guest, each once. At most [`MAX_REGIONS`].
        #[serde(deserialize_with = "bounded::list::<_, _, MAX_REGIONS>")]
        regions: Vec<LocalRegion>,
    },
}

impl ToTarget {
    /// Returns the name of the message, for logs and errors. The name does not include the content,
    /// which comes from a peer and may be long.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Setup { .. } => "Setup",
            Self::Pass { .. } => "Pass",
            Self::Final { .. } => "Final",
            Self::Section(..) => "Section",
            Self::StateEnd { .. } => "StateEnd",
            Self::Verify { .. } => "Verify",
            Self::Load => "Load",
            Self::Lacking(..) => "Lacking",
            Self::LoadLazily { .. } => "LoadLazily",
            Self::Commit => "Commit",
            Self::Thanks => "Thanks",
            Self::Cancel(..) => "Cancel",
            Self::Ping(..) => "Ping",
            Self::Description(..) => "Description",
            Self::TrialSection(..) => "TrialSection",
            Self::TrialEnd { .. } => "TrialEnd",
            Self::StaysPaused => "StaysPaused",
            Self::StreamOpen { .. } => "StreamOpen",
            Self::StreamBytes { .. } => "StreamBytes",
            Self::StreamEnd { .. } => "StreamEnd",
            Self::LocalMemory { .. } => "LocalMemory",
        }
    }
}

/// Message from the target to the source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToSource {
    /// The target accepts the machine. The source opens the other channels with these tokens.
    Accept {
        /// Token for bulk channels.
        bulk: Token,
        /// Token for urgent channels and the probe channel.
        urgent: Token,
        /// Token for a new control channel, if this one is lost while pages are still missing.
        resume: Token,
    },
    /// All bulk channels are open.
    ChannelsUp,
    /// All frames of a pass have been received, on all channels.
    Received {
        /// Number of the pass.
        pass: u32,
        /// Number of pages that arrived with a digest mismatch and have not arrived intact since.
        mismatches: u64,
        /// First runs of the pages that `mismatches` counts, at most [`MAX_NAMED_RUNS`]. The list
        /// is not empty if `mismatches` is not 0.
        #[serde(deserialize_with = "bounded::list::<_, _, MAX_NAMED_RUNS>")]
        runs: Vec<RegionRun>,
    },
    /// Result of a verification.
    Verified {
        /// Number of compared pages.
        pages: u64,
        /// Number of pages that differ.
        mismatched: u64,
        /// First pages that differ, at most [`MAX_NAMED_RUNS`].
        #[serde(deserialize_with = "bounded::list::<_, _, MAX_NAMED_RUNS>")]
        samples: Vec<RegionPage>,
    },
    /// The device state is loaded. The guest can run as soon as the source sends the commit.
    Ready {
        /// Time that loading took, in microseconds.
        load_us: u64,
    },
    /// The guest runs on the target.
    Running {
        /// Time that the start of the vCPUs took, in microseconds.
        start_us: u64,
        /// CPU time of the target's engine threads, in microseconds.
        cpu_us: u64,
    },
    /// Part of the set of pages that are still missing, sent on a new control channel.
    Lacking(MissingPages),
    /// End of the set of missing pages on a new control channel. The source opens the other
    /// channels again with these tokens.
    Resume {
        /// Number of missing pages.
        pages: u64,
        /// Token for bulk channels.
        bulk: Token,
        /// Token for urgent channels and the probe channel.
        urgent: Token,
    },
    /// Every page is present on the target. The source has nothing left to send.
    Complete(PagingFigures),
    /// The target could not start the guest and will never run it. The source owns the guest again.
    Returned(Refusal),
    /// The migration failed. The guest has not run on the target and will not run there.
    Failed(Refusal),
    /// Answer to [`ToTarget::Ping`], with the number of that message.
    Pong(u64),
    /// Time that the target expects to need while the guest is paused. The target sends this
    /// message after [`Accept`](Self::Accept), to a source whose hello has the feature
    /// [`FEATURE_COSTS`](crate::FEATURE_COSTS).
    Costs {
        /// Time that loading the device state and starting the vCPUs take together, in
        /// microseconds.
        load_us: u64,
    },
    /// The target's VM can prepare itself with the device state from a trial pause, and asks for
    /// it. The target sends this message after [`Accept`](Self::Accept), to a source whose hello
    /// has the feature [`FEATURE_TRIAL`](crate::FEATURE_TRIAL).
    WantsTrial,
    /// The target's VM has prepared itself with the device state from the trial pause. The target
    /// may send new [`Costs`](Self::Costs) before this message.
    Prepared,
    /// The target has looked up the pages of a frame that contains [hashes](crate::Encoding::Hash).
    /// It sends this message for each such frame of a channel, in the order of the frames, and only
    /// if it has offered [`FEATURE_KNOWN_PAGES`](crate::FEATURE_KNOWN_PAGES).
    UnknownPages {
        /// Index of the bulk channel.
        channel: u16,
        /// Number of the frame on its channel.
        frame: u64,
        /// Bitmap of the pages that the target does not know. Bit `i % 8` of byte `i / 8` stands
        /// for the page at position `i` among the pages with a digest. Zero bytes at the end may be
        /// omitted.
        #[serde(deserialize_with = "bounded::list::<_, _, MAX_UNKNOWN_BYTES>")]
        unknown: Vec<u8>,
    },
    /// The target has mapped the memory of [`ToTarget::LocalMemory`].
    MemoryTaken,
}

impl ToSource {
    /// Returns the name of the message, for logs and errors. The name does not include the content,
    /// which comes from a peer and may be long.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Accept { .. } => "Accept",
            Self::ChannelsUp => "ChannelsUp",
            Self::Received { .. } => "Received",
            Self::Verified { .. } => "Verified",
            Self::Ready { .. } => "Ready",
            Self::Running { .. } => "Running",
            Self::Lacking(..) => "Lacking",
            Self::Resume { .. } => "Resume",
            Self::Complete(..) => "Complete",
            Self::Returned(..) => "Returned",
            Self::Failed(..) => "Failed",
            Self::Pong(..) => "Pong",
            Self::Costs { .. } => "Costs",
            Self::WantsTrial => "WantsTrial",
            Self::Prepared => "Prepared",
            Self::UnknownPages { .. } => "UnknownPages",
            Self::MemoryTaken => "MemoryTaken",
        }
    }
}

/// Header that precedes the body of a control message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ControlHeader {
    /// Length of the body in bytes, at most [`MAX_CONTROL_BYTES`].
    pub len: usize,
    sum: u64,
}

impl ControlHeader {
    /// Decodes a header.
    ///
    /// # Errors
    /// Returns an error if these bytes are not a header, or announce a body that is too long.
    pub fn decode(bytes: &[u8; CONTROL_HEADER_BYTES]) -> Result<Self, WireError> {
        let mut fields = Fields(bytes);
        let magic = fields.u32();
        if magic != MAGIC {
            return Err(WireError::Field {
                what: "control message's magic",
                value: magic.into(),
                allowed: "the protocol's",
            });
        }
        let len = fields.u32();
        match usize::try_from(len) {
            Ok(len) if len <= MAX_CONTROL_BYTES => Ok(Self { len, sum: fields.u64() }),
            _ => Err(WireError::Field {
                what: "length of a control message",
                value: len.into(),
                allowed: "up to 4 MiB",
            }),
        }
    }
}

/// Encodes the header and the body of `message`.
///
/// # Errors
/// Returns [`WireError::TooLarge`] if the body exceeds [`MAX_CONTROL_BYTES`].
pub fn encode_control<M: Serialize>(message: &M) -> Result<Vec<u8>, WireError> {
    let body = postcard::to_stdvec(message).map_err(|error| WireError::Message(error.to_string()))?;
    let too_large =
        || WireError::TooLarge { what: "a control message", bytes: body.len(), limit: MAX_CONTROL_BYTES };
    if body.len() > MAX_CONTROL_BYTES {
        return Err(too_large());
    }
    let len = u32::try_from(body.len()).map_err(|_| too_large())?;
    let mut bytes = Vec::with_capacity(CONTROL_HEADER_BYTES + body.len());
    bytes.extend(MAGIC.to_le_bytes());
    bytes.extend(len.to_le_bytes());
    bytes.extend(sum(len, &body).to_le_bytes());
    bytes.extend(body);
    Ok(bytes)
}

/// Decodes the message whose header is `header` and whose bytes are `body`.
///
/// # Errors
/// Returns an error if the body is damaged or is not a message of this type.
pub fn decode_control<M: DeserializeOwned>(header: ControlHeader, body: &[u8]) -> Result<M, WireError> {
    let len = u32::try_from(body.len()).unwrap_or(u32::MAX);
    if body.len() != header.len || sum(len, body) != header.sum {
        return Err(WireError::Damaged { what: "control message" });
    }
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(WireError::Message(format!("{} bytes are left over", rest.len()))),
        Err(error) => Err(WireError::Message(error.to_string())),
    }
}

fn sum(len: u32, body: &[u8]) -> u64 {
    // The sum includes the length, so that a damaged length is found even if the body has a fitting
    // length by chance.
    crc(body) ^ crc(&len.to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RefusalCode;
    use proptest::prelude::*;

    fn roundtrip(message: &ToTarget) -> Result<ToTarget, WireError> {
        let bytes = encode_control(message)?;
        let header = ControlHeader::decode(bytes.first_chunk().unwrap())?;
        decode_control(header, &bytes[CONTROL_HEADER_BYTES..])
    }

    proptest! {
        #[test]
        fn sections_decode_as_encoded(name in ".{0,40}", instance: u32, version: u32, payload in prop::collection::vec(any::<u8>(), 0..2000)) {
            let message = ToTarget::Section(Section { name, instance, version, payload });
            prop_assert_eq!(roundtrip(&message), Ok(message));
        }

        #[test]
        fn a_damaged_bit_is_found(at in 0usize..300) {
            let mut bytes = encode_control(&ToTarget::Cancel(Refusal::new(RefusalCode::Other, "x".repeat(40)))).unwrap();
            let at = at % (bytes.len() * 8);
            bytes[at / 8] ^= 1 << (at % 8);
            let decoded = ControlHeader::decode(bytes.first_chunk().unwrap())
                .and_then(|header| decode_control::<ToTarget>(header, &bytes[CONTROL_HEADER_BYTES..]));
            prop_assert!(decoded.is_err());
        }

        #[test]
        fn any_body_is_an_error_or_a_message(body in prop::collection::vec(any::<u8>(), 0..200)) {
            let header = ControlHeader { len: body.len(), sum: sum(u32::try_from(body.len()).unwrap(), &body) };
            let _ = decode_control::<ToTarget>(header, &body);
            let _ = decode_control::<ToSource>(header, &body);
        }
    }

    #[test]
    fn reason_of_a_peer_is_truncated_and_printable() {
        let detail = format!("\u{1b}[2J{}", "x\n".repeat(crate::MAX_DETAIL_CHARS));
        let message = ToTarget::Cancel(Refusal::new(RefusalCode::Other, detail));
        let Ok(ToTarget::Cancel(why)) = roundtrip(&message) else { panic!("it does not decode") };
        assert_eq!(why.detail.chars().count(), crate::MAX_DETAIL_CHARS);
        assert!(why.detail.starts_with("\u{fffd}[2Jx\u{fffd}x") && !why.detail.contains(char::is_control));
    }

    #[test]
    fn oversized_messages_are_neither_encoded_nor_decoded() {
        let section =
            Section { name: "x".into(), instance: 0, version: 0, payload: vec![0; MAX_CONTROL_BYTES] };
        assert!(matches!(encode_control(&ToTarget::Section(section)), Err(WireError::TooLarge { .. })));
        let mut header = [0; CONTROL_HEADER_BYTES];
        header[..4].copy_from_slice(&MAGIC.to_le_bytes());
        header[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(matches!(ControlHeader::decode(&header), Err(WireError::Field { .. })));
    }

    fn machine() -> MachineConfig {
        MachineConfig { kind: "kvm".into(), vcpus: 1, regions: vec![], extra: vec![], features: vec![] }
    }

    fn came(machine: MachineConfig) -> Result<ToTarget, WireError> {
        let (mode, bulk_channels, urgent_channels, probe) = (Mode::Precopy, 1, 0, false);
        back(&ToTarget::Setup { machine, mode, bulk_channels, urgent_channels, probe })
    }

    fn back<M: serde::Serialize + serde::de::DeserializeOwned>(message: &M) -> Result<M, WireError> {
        let bytes = encode_control(message)?;
        decode_control(ControlHeader::decode(bytes.first_chunk().unwrap())?, &bytes[CONTROL_HEADER_BYTES..])
    }

    #[test]
    fn machine_description_decodes_up_to_its_limits() {
        let name = "x".repeat(bounded::MAX_NAME_BYTES);
        let pair = ("a".to_owned(), name.clone());
        let most = MachineConfig {
            kind: name.clone(),
            extra: vec![pair.clone(); bounded::MAX_PROPERTIES],
            features: vec!["f".to_owned(); bounded::MAX_FEATURES],
            ..machine()
        };
        let Ok(ToTarget::Setup { machine: back, .. }) = came(most.clone()) else { panic!("refused") };
        assert_eq!(back, most);
        let more = |change: &dyn Fn(&mut MachineConfig)| {
            let mut machine = most.clone();
            change(&mut machine);
            assert!(matches!(came(machine), Err(WireError::Message(_))));
        };
        more(&|machine| machine.kind.push('x'));
        more(&|machine| machine.extra[7].1.push('x'));
        more(&|machine| machine.extra.push(pair.clone()));
        more(&|machine| machine.features.push("f".into()));
        more(&|machine| machine.features[3] = "f".repeat(bounded::MAX_NAME_BYTES + 1));
    }

    #[test]
    fn runs_of_mismatched_pages_decode_up_to_their_limit() {
        let run = RegionRun { region: RegionId(0), first: 1, count: 1 };
        let received = |count| ToSource::Received { pass: 0, mismatches: 1, runs: vec![run; count] };
        assert!(back(&received(MAX_NAMED_RUNS)).is_ok());
        assert!(back(&received(MAX_NAMED_RUNS + 1)).is_err());
    }

    #[test]
    fn regions_of_local_memory_decode_up_to_their_limit() {
        let region = LocalRegion { region: RegionId(0), len: 4096, offset: 0 };
        let memory = |count| ToTarget::LocalMemory { regions: vec![region; count] };
        assert_eq!(back(&memory(MAX_REGIONS)), Ok(memory(MAX_REGIONS)));
        assert!(back(&memory(MAX_REGIONS + 1)).is_err());
    }

    #[test]
    fn section_payload_may_be_long_but_its_name_may_not() {
        let section = |name: usize, payload| Section {
            name: "n".repeat(name),
            instance: 0,
            version: 0,
            payload: vec![7; payload],
        };
        assert!(back(&section(bounded::MAX_NAME_BYTES, 1 << 20)).is_ok());
        assert!(back(&section(bounded::MAX_NAME_BYTES + 1, 0)).is_err());
    }
}
