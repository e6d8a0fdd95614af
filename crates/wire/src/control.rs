//! The messages of the control channel.

use crate::{Fields, Refusal, Token, WireError, crc};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use vmferry_core::{MachineConfig, RegionId, Section, StreamName, bounded};

/// Bytes before each control message.
pub const CONTROL_HEADER_BYTES: usize = 16;
/// Most bytes of one control message's body.
pub const MAX_CONTROL_BYTES: usize = 4 << 20;
/// Largest number of bytes of a [`ToTarget::Description`].
pub const MAX_DESCRIPTION_BYTES: usize = 1 << 20;
/// Most bytes of all device state of a guest.
pub const MAX_STATE_BYTES: usize = 64 << 20;
/// Sections of device state that a target takes.
pub const MAX_SECTIONS: usize = 65_536;
/// Largest number of streams of device state of a guest.
pub const MAX_STREAMS: usize = 4096;
/// Largest number of bytes in a [`ToTarget::StreamBytes`].
pub const MAX_STREAM_BYTES: usize = 1 << 20;
/// Most runs of damaged pages that are named in one message.
pub const MAX_NAMED_RUNS: usize = 65_536;
/// Most entries of fault latencies: one for each vCPU, and one for all other threads.
pub const MAX_LATENCIES: usize = 4097;
/// Most buckets of a histogram: one for each bit of a number.
pub const MAX_BUCKETS: usize = 64;

const MAGIC: u32 = u32::from_le_bytes(*b"VMFc");

/// Moment at which the guest changes sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Mode {
    /// After its memory.
    Precopy,
    /// Before its memory.
    Postcopy,
    /// After as much of its memory as is worth while, before the rest.
    Hybrid,
}

impl Mode {
    /// Whether the guest may run before all of its memory has arrived: needs urgent channels.
    #[must_use]
    pub fn may_be_lazy(self) -> bool {
        self != Self::Precopy
    }
}

/// A page by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageName {
    /// Its region.
    pub region: RegionId,
    /// Its index there.
    pub page: u64,
}

/// A run of pages by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunName {
    /// Its region.
    pub region: RegionId,
    /// Index of the first page.
    pub first: u64,
    /// How many.
    pub count: u64,
}

/// A piece of a set of pages: a bitmap.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LackingPages {
    /// Whose pages.
    pub region: RegionId,
    /// The page of the first bit, a multiple of 64.
    pub first: u64,
    /// Words of 64 pages, little-endian, the lowest bit first; at most [`MAX_LACKING_BYTES`].
    pub words: Vec<u8>,
}

/// Most bytes of a [`LackingPages`] bitmap: 32 GiB of memory.
pub const MAX_LACKING_BYTES: usize = 1 << 20;

/// How it went to bring pages to a guest that was running: what the target says of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LazyFigures {
    /// Pages that came with content.
    pub pages: u64,
    /// Pages that came as zeros.
    pub zero_pages: u64,
    /// Pages that came although they were there already; an honest source sends none.
    pub duplicates: u64,
    /// Pages that came damaged and were asked for again.
    pub damaged: u64,
    /// Faults on pages that were known to be zero: answered without the source.
    pub zero_faults: u64,
    /// Pages that were asked for.
    pub requests: u64,
    /// Pages that were asked for ahead of a run of faults.
    pub ahead: u64,
    /// How many of these were used, as far as that can be seen: the run went on right behind them.
    pub ahead_used: u64,
    /// Microseconds from the guest's start until the last page was here.
    pub elapsed_us: u64,
    /// Microseconds of CPU that the target's engine threads have used.
    pub cpu_us: u64,
    /// How long all faults took.
    pub all: FaultLatency,
    /// How long those of each vCPU took, from reading the fault to the page being placed; the last is everybody else.
    #[serde(deserialize_with = "bounded::list::<_, _, MAX_LATENCIES>")]
    pub latency: Vec<FaultLatency>,
}

/// How long faults took.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultLatency {
    /// How many.
    pub faults: u64,
    /// All together, in microseconds: how long this vCPU stood still for them.
    pub sum_us: u64,
    /// Half of them took no longer, in nanoseconds.
    pub p50_ns: u64,
    /// 99 of 100 took no longer, in nanoseconds.
    pub p99_ns: u64,
    /// The longest, in nanoseconds.
    pub max_ns: u64,
    /// How many took less than 2^i microseconds and not less than half of that, for each i from 0.
    #[serde(deserialize_with = "bounded::list::<_, _, MAX_BUCKETS>")]
    pub buckets: Vec<u64>,
}

/// From the source to the target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToTarget {
    /// What is to come. The target accepts or refuses.
    Setup {
        /// The machine that the guest needs.
        machine: MachineConfig,
        /// How the guest is moved.
        mode: Mode,
        /// How many bulk channels will be opened.
        bulk_channels: u16,
        /// How many urgent channels; 0 exactly in precopy.
        urgent_channels: u16,
        /// Whether a probe channel will be opened.
        probe: bool,
    },
    /// Pass `pass` begins; about `pages` pages will be looked at.
    Pass {
        /// Its number, from 0.
        pass: u32,
        /// How many pages.
        pages: u64,
    },
    /// The vCPUs have stopped: pass `pass` is the last, unless pages turn out damaged.
    Final {
        /// The pass's number.
        pass: u32,
    },
    /// A piece of device state.
    Section(Section),
    /// All device state has been sent.
    StateEnd {
        /// How many sections there were.
        sections: u32,
    },
    /// Digests of all pages will come as pass `pass`: compare them.
    Verify {
        /// The pass's number.
        pass: u32,
    },
    /// All is sent and checked: load the device state and say [`ToSource::Ready`].
    Load,
    /// A piece of the set of pages that the target lacks at the handover.
    Lacking(LackingPages),
    /// All device state and all pages that are lacking, `pages` of them, have been named: what is here of those pages is
    /// stale and is dropped. Load the device state (pages that this touches are asked for on the urgent channels) and say
    /// [`ToSource::Ready`].
    LoadLazily {
        /// How many pages are lacking.
        pages: u64,
    },
    /// The guest is yours: run it. From here on the source does not.
    Commit,
    /// The answer to [`ToSource::Complete`]: the source has nothing left to do. Or, of a guest that was to run before all of its
    /// memory was there, to [`ToSource::Returned`]: the source has heard it, so the target may go.
    Thanks,
    /// Forget it; the guest stays where it was.
    Cancel(Refusal),
    /// Answer with [`ToSource::Pong`] and the same number.
    Ping(u64),
    /// Description of the guest by the source's VMM for the target's VMM, before [`Setup`](Self::Setup). The
    /// source sends it only if the reply to its hello has [`FEATURE_DESCRIPTION`](crate::FEATURE_DESCRIPTION).
    /// At most [`MAX_DESCRIPTION_BYTES`]; the engine does not read it.
    Description(Vec<u8>),
    /// Section of the state of a trial pause, to a target that has sent
    /// [`ToSource::WantsTrial`]. The guest runs on the source.
    TrialSection(Section),
    /// The source has sent all sections of the trial pause. The target answers with
    /// [`ToSource::Prepared`].
    TrialEnd {
        /// Number of sections.
        sections: u32,
    },
    /// The operator has paused the guest, and it stays paused on the target. The source sends this
    /// before [`Load`](Self::Load) or [`LoadLazily`](Self::LoadLazily), and only if the reply to its
    /// hello has [`FEATURE_PAUSED`](crate::FEATURE_PAUSED).
    StaysPaused,
    /// A stream of device state begins. The source sends it only if the reply to its hello has
    /// [`FEATURE_STREAMS`](crate::FEATURE_STREAMS).
    StreamOpen {
        /// Number of the stream, from 0.
        stream: u32,
        /// Its name.
        name: StreamName,
    },
    /// The next bytes of a stream, at most [`MAX_STREAM_BYTES`].
    StreamBytes {
        /// Number of the stream.
        stream: u32,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// A stream is complete. Each ends before [`Load`](Self::Load) or [`LoadLazily`](Self::LoadLazily).
    StreamEnd {
        /// Number of the stream.
        stream: u32,
    },
}

impl ToTarget {
    /// What it is, for people: its contents, a peer's, may be long.
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
        }
    }
}

/// From the target to the source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToSource {
    /// The machine fits; open the channels with these tokens.
    Accept {
        /// For bulk channels.
        bulk: Token,
        /// For urgent channels and the probe channel.
        urgent: Token,
        /// For a new control channel, should this one be lost while pages are still to come.
        resume: Token,
    },
    /// All bulk channels are up.
    ChannelsUp,
    /// All frames of pass `pass` have been received, on all channels.
    Received {
        /// The pass's number.
        pass: u32,
        /// Pages that did not match their digest and have not come again since.
        suspects: u64,
        /// The first of them, at most [`MAX_NAMED_RUNS`]; never empty if `suspects` is not 0.
        #[serde(deserialize_with = "bounded::list::<_, _, MAX_NAMED_RUNS>")]
        runs: Vec<RunName>,
    },
    /// The result of a verification.
    Verified {
        /// Pages compared.
        pages: u64,
        /// Pages that differ.
        mismatched: u64,
        /// The first of them.
        #[serde(deserialize_with = "bounded::list::<_, _, MAX_NAMED_RUNS>")]
        samples: Vec<PageName>,
    },
    /// The device state is loaded; one word and the guest runs.
    Ready {
        /// Microseconds that loading took.
        load_us: u64,
    },
    /// The guest runs here.
    Running {
        /// Microseconds that starting the vCPUs took.
        start_us: u64,
        /// Microseconds of CPU that the target's engine threads have used.
        cpu_us: u64,
    },
    /// After a new control channel came up: a piece of the set of pages that are still lacking.
    Lacking(LackingPages),
    /// After a new control channel came up: that was all; open the other channels anew with these tokens.
    Resume {
        /// How many pages are lacking.
        pages: u64,
        /// For bulk channels.
        bulk: Token,
        /// For urgent channels and the probe channel.
        urgent: Token,
    },
    /// Every page is here: the source has done its work.
    Complete(LazyFigures),
    /// The guest could not be started and will never run here: it is the source's again.
    Returned(Refusal),
    /// This cannot go on. The guest has not run here and will not.
    Failed(Refusal),
    /// The answer to a ping.
    Pong(u64),
    /// After [`Accept`](Self::Accept), to a source whose hello has [`FEATURE_COSTS`](crate::FEATURE_COSTS): what the target expects to take
    /// while the guest stands still.
    Costs {
        /// Microseconds that loading the device state and starting the vCPUs take together.
        load_us: u64,
    },
    /// After [`Accept`](Self::Accept), to a source whose hello has
    /// [`FEATURE_TRIAL`](crate::FEATURE_TRIAL): the target's VM prepares itself with the state of a
    /// trial pause.
    WantsTrial,
    /// The target's VM has prepared itself with the state of the trial pause. A new
    /// [`Costs`](Self::Costs) may come before it.
    Prepared,
}

impl ToSource {
    /// What it is, for people: its contents, a peer's, may be long.
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
        }
    }
}

/// The header before a control message's body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ControlHeader {
    /// Bytes of the body, at most [`MAX_CONTROL_BYTES`].
    pub len: usize,
    sum: u64,
}

impl ControlHeader {
    /// Reads it.
    ///
    /// # Errors
    /// If these bytes are no header, or announce more than is allowed.
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

/// The bytes of `message`, header and body.
///
/// # Errors
/// [`WireError::TooLarge`] if the body exceeds [`MAX_CONTROL_BYTES`].
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

/// The message in `body`, which `header` announced.
///
/// # Errors
/// If the body is damaged or no message of this type.
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
    // The length is mixed in, so that a damaged length is found even where the body happens to fit.
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
        fn sections_survive_the_wire(name in ".{0,40}", instance: u32, version: u32, payload in prop::collection::vec(any::<u8>(), 0..2000)) {
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
    fn a_peers_reason_is_short_and_printable() {
        let detail = format!("\u{1b}[2J{}", "x\n".repeat(crate::MAX_DETAIL_CHARS));
        let message = ToTarget::Cancel(Refusal::new(RefusalCode::Other, detail));
        let Ok(ToTarget::Cancel(why)) = roundtrip(&message) else { panic!("it does not decode") };
        assert_eq!(why.detail.chars().count(), crate::MAX_DETAIL_CHARS);
        assert!(why.detail.starts_with("\u{fffd}[2Jx\u{fffd}x") && !why.detail.contains(char::is_control));
    }

    #[test]
    fn too_much_is_not_sent_and_not_believed() {
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
    fn as_much_as_is_allowed_comes_and_no_more() {
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
    fn a_target_names_so_many_runs_and_no_more() {
        let run = RunName { region: RegionId(0), first: 1, count: 1 };
        let received = |count| ToSource::Received { pass: 0, suspects: 1, runs: vec![run; count] };
        assert!(back(&received(MAX_NAMED_RUNS)).is_ok());
        assert!(back(&received(MAX_NAMED_RUNS + 1)).is_err());
    }

    #[test]
    fn a_section_may_be_long_and_its_name_not() {
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
