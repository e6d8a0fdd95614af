//! Hello and its reply, the first 80 bytes of every channel in each direction.

use crate::{CARRIER, Fields, RefusalCode, WireError, crc};

/// Oldest protocol version that this build speaks.
pub const VERSION_MIN: u16 = 1;
/// Newest protocol version that this build speaks. The encoding of version 1 must not change
/// (`tests/frozen.rs`).
pub const VERSION_MAX: u16 = 1;
/// Feature bit: the source understands [`ToSource::Costs`](crate::ToSource::Costs).
pub const FEATURE_COSTS: u64 = 1;
/// Feature bit: the target understands [`ToTarget::Description`](crate::ToTarget::Description).
pub const FEATURE_DESCRIPTION: u64 = 2;
/// Feature bit: the source understands [`ToSource::WantsTrial`](crate::ToSource::WantsTrial) and
/// [`ToSource::Prepared`](crate::ToSource::Prepared).
pub const FEATURE_TRIAL: u64 = 4;
/// Feature bit: the target understands [`ToTarget::StaysPaused`](crate::ToTarget::StaysPaused).
pub const FEATURE_PAUSED: u64 = 8;
/// Feature bit: the target understands [`ToTarget::StreamOpen`](crate::ToTarget::StreamOpen),
/// [`ToTarget::StreamBytes`](crate::ToTarget::StreamBytes) and
/// [`ToTarget::StreamEnd`](crate::ToTarget::StreamEnd).
pub const FEATURE_STREAMS: u64 = 16;
/// Feature bit: the target understands [`FrameKind::Touched`](crate::FrameKind::Touched).
pub const FEATURE_TOUCHED: u64 = 32;
/// Feature bit: the target decodes frames with [segments](crate::Content::Segments).
pub const FEATURE_SEGMENTS: u64 = 64;
/// Feature bit: the target has known pages, and looks up segments with
/// [hashes](crate::Encoding::Hash). A source offers the bit on every channel. A target that has
/// known pages sets the bit in its reply on the control channel.
pub const FEATURE_KNOWN_PAGES: u64 = 128;
/// Feature bit: the target takes over the memory of a source on the same host, and understands
/// [`ToTarget::LocalMemory`](crate::ToTarget::LocalMemory). A source offers the bit on the control
/// channel of a local migration only. A target whose VM takes over memory sets the bit in its reply
/// if the channel is a Unix socket.
pub const FEATURE_LOCAL_MEMORY: u64 = 256;
/// Feature bits that this build offers on every channel. The peer may ignore an unknown bit among
/// the low 32, and must refuse the channel if it does not know one of the high 32.
pub const FEATURES: u64 = FEATURE_COSTS
    | FEATURE_DESCRIPTION
    | FEATURE_TRIAL
    | FEATURE_PAUSED
    | FEATURE_STREAMS
    | FEATURE_TOUCHED
    | FEATURE_SEGMENTS
    | FEATURE_KNOWN_PAGES;
/// Length of an encoded [`Hello`] or [`HelloReply`] in bytes.
pub const HELLO_BYTES: usize = 80;

const MAGIC: [u8; 8] = *b"VMFERRY\n";
const MAGIC_REPLY: [u8; 8] = *b"VMFERRY\r";
const MUST_UNDERSTAND: u64 = 0xffff_ffff_0000_0000;

/// Migration id: 128 random bits that identify a migration on every channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct MigrationId(pub [u8; 16]);

/// Parses the 32 hexadecimal digits that `Display` writes.
impl std::str::FromStr for MigrationId {
    type Err = WireError;

    fn from_str(text: &str) -> Result<Self, WireError> {
        let wrong = || WireError::Message("a migration's id has 32 hexadecimal digits".into());
        let digits = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = u128::from_str_radix(text, 16).ok().filter(|_| digits).ok_or_else(wrong)?;
        Ok(Self(number.to_be_bytes()))
    }
}

impl std::fmt::Display for MigrationId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Token: 128 random bits that the target gives out for the channels of one role. The first control
/// channel has [`Token::NONE`].
#[derive(Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Token(pub [u8; 16]);

impl Token {
    /// Token of a channel for which the target has not given out a token. All bits are 0.
    pub const NONE: Self = Self([0; 16]);
}

impl std::fmt::Debug for Token {
    // A reader of a log must not be able to join a migration.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Purpose of a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Channel for messages between source and target.
    Control,
    /// Channel for frames of pages.
    Bulk,
    /// Channel for pages that a vCPU waits for and, in the other direction, the requests for these
    /// pages.
    Urgent,
    /// Channel for probes of the link, and their echoes in the other direction.
    Probe,
    /// Channel for frames that the target discards, with which a plan measures the bandwidth of the
    /// link. The channel belongs to no migration.
    Measure,
}

impl Role {
    fn byte(self) -> u8 {
        match self {
            Self::Control => 0,
            Self::Bulk => 1,
            Self::Urgent => 2,
            Self::Probe => 3,
            Self::Measure => 4,
        }
    }

    fn from_byte(byte: u8) -> Result<Self, WireError> {
        match byte {
            0 => Ok(Self::Control),
            1 => Ok(Self::Bulk),
            2 => Ok(Self::Urgent),
            3 => Ok(Self::Probe),
            4 => Ok(Self::Measure),
            _ => Err(WireError::Field { what: "role", value: byte.into(), allowed: "0 to 4" }),
        }
    }
}

/// First message on every channel, from the peer that opened the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// Oldest protocol version that the sender supports.
    pub version_min: u16,
    /// Newest protocol version that the sender supports.
    pub version_max: u16,
    /// Feature bits that the sender offers.
    pub features: u64,
    /// Id of the migration.
    pub migration: MigrationId,
    /// Purpose of the channel.
    pub role: Role,
    /// Number of the channel among the channels of its role, from 0.
    pub index: u16,
    /// Token that the target gave out for this role.
    pub token: Token,
    /// [`arbiter_digest`] of the arbiter that decides the owner of the guest, or 0 if there is no
    /// arbiter. The value has a meaning only on the first control channel of a migration.
    pub arbiter: u64,
}

impl Hello {
    /// Encodes the hello.
    #[must_use]
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = Vec::with_capacity(HELLO_BYTES);
        bytes.extend(MAGIC);
        bytes.extend(self.version_min.to_le_bytes());
        bytes.extend(self.version_max.to_le_bytes());
        bytes.extend([self.role.byte(), 0]);
        bytes.extend(self.index.to_le_bytes());
        bytes.extend(self.features.to_le_bytes());
        bytes.extend(self.migration.0);
        bytes.extend(self.token.0);
        bytes.extend(self.arbiter.to_le_bytes());
        seal(bytes)
    }

    /// Decodes a hello.
    ///
    /// # Errors
    /// Returns [`WireError`] if these bytes are not a hello.
    pub fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, WireError> {
        let mut fields = unseal(bytes, MAGIC)?;
        let (version_min, version_max) = (fields.u16(), fields.u16());
        let (role, _) = (Role::from_byte(fields.u8())?, fields.u8());
        let (index, features) = (fields.u16(), fields.u64());
        let (migration, token) = (MigrationId(fields.take()), Token(fields.take()));
        let arbiter = fields.u64();
        Ok(Self { version_min, version_max, features, migration, role, index, token, arbiter })
    }
}

/// Answer to a [`Hello`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HelloReply {
    /// Reason for the refusal, or `None` if the channel is accepted.
    pub refused: Option<RefusalCode>,
    /// Protocol version that the channel uses. If the version is the reason for a refusal, the
    /// newest version that the target supports.
    pub version: u16,
    /// Feature bits that source and target both have.
    pub features: u64,
    /// Id of the migration, repeated from the hello.
    pub migration: MigrationId,
}

impl HelloReply {
    /// Encodes the reply.
    #[must_use]
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = Vec::with_capacity(HELLO_BYTES);
        bytes.extend(MAGIC_REPLY);
        bytes.extend(self.version.to_le_bytes());
        bytes.extend([self.refused.map_or(0, RefusalCode::byte), 0]);
        bytes.extend([0; 4]);
        bytes.extend(self.features.to_le_bytes());
        bytes.extend(self.migration.0);
        seal(bytes)
    }

    /// Decodes a reply.
    ///
    /// # Errors
    /// Returns [`WireError`] if these bytes are not a reply to a hello.
    pub fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, WireError> {
        let mut fields = unseal(bytes, MAGIC_REPLY)?;
        let version = fields.u16();
        let refused = match fields.u8() {
            0 => None,
            code => Some(RefusalCode::from_byte(code)),
        };
        let _: [u8; 5] = fields.take();
        let features = fields.u64();
        Ok(Self { refused, version, features, migration: MigrationId(fields.take()) })
    }
}

/// Pads `bytes` to the fixed size and puts the checksum into the last eight bytes.
fn seal(mut bytes: Vec<u8>) -> [u8; HELLO_BYTES] {
    bytes.resize(HELLO_BYTES - 8, 0);
    bytes.extend(crc(&bytes).to_le_bytes());
    bytes.try_into().expect("fixed size")
}

fn unseal(bytes: &[u8; HELLO_BYTES], magic: [u8; 8]) -> Result<Fields<'_>, WireError> {
    let (body, sum) = bytes.split_at(HELLO_BYTES - 8);
    let mut fields = Fields(body);
    let start = fields.take();
    if start != magic {
        return Err(WireError::NotVmferry(start));
    }
    if sum != crc(body).to_le_bytes() {
        return Err(WireError::Damaged { what: "hello" });
    }
    Ok(fields)
}

/// Returns the digest of the arbiter with the name `name`, for a [`Hello`]. The digest is never 0,
/// because 0 means that there is no arbiter. It is not cryptographic: it finds a wrong
/// configuration, but not a peer that lies.
#[must_use]
pub fn arbiter_digest(name: &str) -> u64 {
    crc(name.as_bytes()).max(1)
}

/// Returns the protocol version and the features to use with a peer that has sent `hello`.
///
/// # Errors
/// Returns [`RefusalCode::Version`] if there is no common version, and [`RefusalCode::Feature`] if
/// the peer requires a feature that this build does not know.
pub fn negotiate(hello: &Hello) -> Result<(u16, u64), RefusalCode> {
    let version = hello.version_max.min(VERSION_MAX);
    if version < hello.version_min.max(VERSION_MIN) {
        return Err(RefusalCode::Version);
    }
    // The target accepts these two if the source asks for them, but a hello does not offer them on
    // every channel.
    let known = FEATURES | CARRIER | FEATURE_LOCAL_MEMORY;
    if hello.features & MUST_UNDERSTAND & !known != 0 {
        return Err(RefusalCode::Feature);
    }
    Ok((version, hello.features & known))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hello() -> Hello {
        Hello {
            version_min: 0,
            version_max: 3,
            features: 5,
            migration: MigrationId([7; 16]),
            role: Role::Bulk,
            index: 2,
            token: Token([9; 16]),
            arbiter: 11,
        }
    }

    proptest! {
        #[test]
        fn any_damaged_bit_is_found(at in 0..HELLO_BYTES * 8) {
            let mut bytes = hello().encode();
            bytes[at / 8] ^= 1 << (at % 8);
            prop_assert!(Hello::decode(&bytes).is_err());
        }

        #[test]
        fn any_bytes_are_an_error_not_a_panic(bytes in prop::array::uniform32(any::<u8>()), rest in prop::array::uniform32(any::<u8>())) {
            let mut all = [0; HELLO_BYTES];
            all[..32].copy_from_slice(&bytes);
            all[32..64].copy_from_slice(&rest);
            prop_assert!(Hello::decode(&all).is_err());
            prop_assert!(HelloReply::decode(&all).is_err());
        }
    }

    #[test]
    fn hello_and_reply_decode_as_encoded() {
        assert_eq!(Hello::decode(&hello().encode()), Ok(hello()));
        let reply = HelloReply {
            refused: Some(RefusalCode::Busy),
            version: 4,
            features: 9,
            migration: MigrationId([1; 16]),
        };
        assert_eq!(HelloReply::decode(&reply.encode()), Ok(reply));
        assert!(matches!(HelloReply::decode(&hello().encode()), Err(WireError::NotVmferry(_))));
    }

    #[test]
    fn versions_and_features_are_agreed_or_refused() {
        assert_eq!(negotiate(&hello()), Ok((VERSION_MAX, 5 & FEATURES)));
        assert_eq!(negotiate(&Hello { version_min: VERSION_MAX + 1, ..hello() }), Err(RefusalCode::Version));
        assert_eq!(negotiate(&Hello { features: 1 << 63, ..hello() }), Err(RefusalCode::Feature));
        for asked in [CARRIER, FEATURE_LOCAL_MEMORY] {
            assert_eq!(FEATURES & asked, 0, "it is offered only where it is wanted");
            assert_eq!(negotiate(&Hello { features: asked, ..hello() }), Ok((VERSION_MAX, asked)));
        }
    }

    #[test]
    fn refusal_codes_have_one_byte_each() {
        for byte in 1..=13 {
            assert_eq!(RefusalCode::from_byte(byte).byte(), byte);
        }
    }

    #[test]
    fn migration_id_parses_from_its_display_text() {
        let id = MigrationId([0, 1, 0xab, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0xff]);
        assert_eq!(id.to_string().parse(), Ok(id));
        for wrong in ["", "+1234567890123456789012345678901", "0123456789abcdef0123456789abcdeg", "1"] {
            assert!(wrong.parse::<MigrationId>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_token_is_not_printed() {
        assert!(!format!("{:?}", hello()).contains("9, 9"));
    }
}
