//! Choices that the command line and the control socket share. Their names are stable.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;
use vmferry_engine::{
    AutoConverge, BulkLimit, Deltas, MigrationMode, OnTimeout, PageCodec, Settings, SwitchoverBandwidth,
    UrgentPath, Uri, UriError, ZstdLevel,
};

/// Source of an arriving guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum IncomingArg {
    At(Uri),
    /// The address is given later, over the control socket.
    Defer,
    /// The guest continues from this snapshot, whose pages it shares with other processes.
    Shared(PathBuf),
    /// The guest continues from a branch of another guest, which comes over the inherited socket
    /// with this number.
    Branch(i32),
}

impl IncomingArg {
    /// Returns the address; `None` if it is given later.
    pub(crate) fn uri(&self) -> Option<&Uri> {
        match self {
            Self::At(uri) => Some(uri),
            Self::Shared(_) | Self::Defer | Self::Branch(_) => None,
        }
    }
}

impl FromStr for IncomingArg {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let branch = text.strip_prefix("branch:fd:").and_then(|number| number.parse().ok());
        match branch {
            Some(number) => Ok(Self::Branch(number)),
            None if text == "defer" => Ok(Self::Defer),
            None => text.parse().map(Self::At),
        }
    }
}

/// Point in the transfer of the memory at which the guest switches to the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ModeArg {
    /// Send the memory, then switch the guest to the target
    #[default]
    Precopy,
    /// Switch the guest at once, then send its memory
    Postcopy,
    /// Send the memory for some passes, then switch the guest
    Hybrid,
    /// Predict the modes, follow the best one, and adapt if it fails
    Auto,
}

impl From<ModeArg> for MigrationMode {
    fn from(arg: ModeArg) -> Self {
        match arg {
            // The plan sets the mode of an automatic migration later.
            ModeArg::Precopy | ModeArg::Auto => Self::Precopy,
            ModeArg::Postcopy => Self::Postcopy,
            ModeArg::Hybrid => Self::Hybrid,
        }
    }
}

/// Action when the time limit of a migration expires.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OnTimeoutArg {
    /// Cancel the migration; the guest stays at the source
    #[default]
    Cancel,
    /// Stop the guest, and send all remaining pages before the switch
    Switch,
    /// Switch the guest to the target and send the rest afterwards
    Postcopy,
}

impl From<OnTimeoutArg> for OnTimeout {
    fn from(arg: OnTimeoutArg) -> Self {
        match arg {
            OnTimeoutArg::Cancel => Self::Cancel,
            OnTimeoutArg::Switch => Self::Switch,
            OnTimeoutArg::Postcopy => Self::Postcopy,
        }
    }
}

/// Value of an option that is on or off. The values have no help: the help of the option says what
/// they do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OnOff {
    #[default]
    On,
    Off,
}

impl From<OnOff> for bool {
    fn from(arg: OnOff) -> Self {
        arg == OnOff::On
    }
}

/// Skipping of free pages, and the longest wait for the guest's answer: `on`, `off`, or `wait=MS`.
/// The texts are the same on the command line and in JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) enum FreePagesArg {
    #[default]
    On,
    Off,
    /// On, with a wait before the first pass.
    Wait(Duration),
}

impl FreePagesArg {
    /// Longest wait that can be requested.
    const LONGEST: Duration = Duration::from_secs(60);

    /// Returns true if free pages are skipped.
    pub(crate) fn is_on(self) -> bool {
        self != Self::Off
    }

    /// Returns the longest wait for the guest's answer.
    pub(crate) fn wait(self) -> Duration {
        if let Self::Wait(time) = self { time } else { Duration::ZERO }
    }
}

impl From<OnOff> for FreePagesArg {
    fn from(arg: OnOff) -> Self {
        match arg {
            OnOff::On => Self::On,
            OnOff::Off => Self::Off,
        }
    }
}

impl FromStr for FreePagesArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is not on, off, or a wait; write wait=200ms");
        let time = match text {
            "on" => return Ok(Self::On),
            "off" => return Ok(Self::Off),
            _ => text.strip_prefix("wait=").ok_or_else(wrong)?,
        };
        let time = match time.parse() {
            Ok(millis) => Duration::from_millis(millis),
            Err(_) => crate::args::time(time).map_err(|_| wrong())?,
        };
        if !(Duration::from_millis(1)..=Self::LONGEST).contains(&time) {
            return Err(format!("the wait in '{text}' is out of range; write a time from 1ms to 60s"));
        }
        Ok(Self::Wait(time))
    }
}

impl TryFrom<String> for FreePagesArg {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<FreePagesArg> for String {
    fn from(arg: FreePagesArg) -> Self {
        arg.to_string()
    }
}

impl fmt::Display for FreePagesArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::On => f.write_str("on"),
            Self::Off => f.write_str("off"),
            Self::Wait(time) => write!(f, "wait={}ms", time.as_millis()),
        }
    }
}

/// Path of a page that a guest waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum UrgentArg {
    /// In a bulk channel, behind queued pages
    Shared,
    /// On a separate channel, by the thread that sends the bulk
    Interleaved,
    /// On a separate channel, by the thread that reads the request
    #[default]
    Dedicated,
}

impl From<UrgentArg> for UrgentPath {
    fn from(arg: UrgentArg) -> Self {
        match arg {
            UrgentArg::Shared => Self::Shared,
            UrgentArg::Interleaved => Self::Interleaved,
            UrgentArg::Dedicated => Self::Dedicated,
        }
    }
}

/// Rate of the bulk transfer beside pages that the guest waits for: `auto`, `off`, or a rate. In
/// JSON `"auto"`, `"off"`, or bytes per second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "PaceText", into = "PaceText")]
pub(crate) struct PaceArg(pub(crate) BulkLimit);

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum PaceText {
    Rate(u64),
    Word(String),
}

impl From<PaceArg> for PaceText {
    fn from(arg: PaceArg) -> Self {
        match arg.0 {
            BulkLimit::Rate(rate) => Self::Rate(rate),
            _ => Self::Word(arg.to_string()),
        }
    }
}

impl TryFrom<PaceText> for PaceArg {
    type Error = String;

    fn try_from(text: PaceText) -> Result<Self, String> {
        match text {
            PaceText::Rate(0) => Err("a pace of 0 sends nothing".into()),
            PaceText::Rate(rate) => Ok(Self(BulkLimit::Rate(rate))),
            PaceText::Word(word) => word.parse(),
        }
    }
}

impl FromStr for PaceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self(BulkLimit::Auto)),
            "off" => Ok(Self(BulkLimit::Off)),
            _ => crate::args::rate(text).map(|rate| Self(BulkLimit::Rate(rate))),
        }
    }
}

impl fmt::Display for PaceArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            BulkLimit::Off => f.write_str("off"),
            BulkLimit::Rate(rate) => write!(f, "{rate}B/s"),
            _ => f.write_str("auto"),
        }
    }
}

/// Encoding of pages: the text of the command line, which JSON has as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct CodecArg(pub(crate) PageCodec);

impl FromStr for CodecArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let level = |text: &str| text.parse().ok().and_then(ZstdLevel::new);
        Ok(Self(match text {
            "auto" => PageCodec::Auto,
            "raw" => PageCodec::Raw,
            "lz4" => PageCodec::Lz4,
            "zstd" => PageCodec::Zstd(ZstdLevel::MIN),
            _ => {
                let level = text.strip_prefix("zstd:").and_then(level);
                PageCodec::Zstd(level.ok_or_else(|| {
                    format!("'{text}' is not auto, raw, lz4, zstd, or zstd:LEVEL with a level from 1 to 19")
                })?)
            }
        }))
    }
}

impl TryFrom<String> for CodecArg {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<CodecArg> for String {
    fn from(arg: CodecArg) -> Self {
        arg.to_string()
    }
}

impl fmt::Display for CodecArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Number of bulk channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "Number", into = "Number")]
pub(crate) enum ChannelsArg {
    /// [`Settings::usual_channels`]. Only some of them send while the guest needs the processors.
    #[default]
    Auto,
    /// This number, from 1 to [`Settings::MAX_CHANNELS`].
    Count(u16),
}

/// Number of channels in JSON: a number or `"auto"`.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Number {
    Count(u16),
    Text(String),
}

impl ChannelsArg {
    /// Returns the number of channels, and whether the number of those that send adapts.
    pub(crate) fn count(self) -> (u16, bool) {
        match self {
            Self::Auto => (Settings::usual_channels(), true),
            Self::Count(count) => (count, false),
        }
    }
}

impl FromStr for ChannelsArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let most = Settings::MAX_CHANNELS;
        let count = text.parse().ok().filter(|count| (1..=most).contains(count));
        count.map(Self::Count).ok_or_else(|| format!("'{text}' is not auto or a number from 1 to {most}"))
    }
}

impl TryFrom<Number> for ChannelsArg {
    type Error = String;

    fn try_from(number: Number) -> Result<Self, String> {
        match number {
            Number::Count(count) => count.to_string().parse(),
            Number::Text(text) if text == "auto" => Ok(Self::Auto),
            Number::Text(text) => Err(format!("'{text}' is not auto or a number")),
        }
    }
}

impl From<ChannelsArg> for Number {
    fn from(arg: ChannelsArg) -> Self {
        match arg {
            ChannelsArg::Auto => Self::Text("auto".into()),
            ChannelsArg::Count(count) => Self::Count(count),
        }
    }
}

impl fmt::Display for ChannelsArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Count(count) => write!(f, "{count}"),
        }
    }
}

/// Use of deltas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DeltaArg {
    /// While the link limits the migration
    Auto,
    /// Always
    On,
    /// Never
    #[default]
    Off,
}

impl From<DeltaArg> for Deltas {
    fn from(arg: DeltaArg) -> Self {
        match arg {
            DeltaArg::Auto => Self::Auto,
            DeltaArg::On => Self::On,
            DeltaArg::Off => Self::Off,
        }
    }
}

/// Limit of the bandwidth while the guest is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum SwitchoverArg {
    Unlimited,
    /// Limit in bytes per second.
    AtMost(u64),
}

impl From<SwitchoverArg> for SwitchoverBandwidth {
    fn from(arg: SwitchoverArg) -> Self {
        match arg {
            SwitchoverArg::Unlimited => Self::Unlimited,
            SwitchoverArg::AtMost(rate) => Self::AtMost(rate),
        }
    }
}

/// vCPUs that are slowed if the guest dirties memory faster than the link carries it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum AutoConvergeArg {
    /// Slow no vCPU
    #[default]
    Off,
    /// Slow all vCPUs equally
    All,
    /// Slow vCPUs that write above their share (needs --tracker ring)
    Writers,
}

impl From<AutoConvergeArg> for AutoConverge {
    fn from(arg: AutoConvergeArg) -> Self {
        match arg {
            AutoConvergeArg::Off => Self::Off,
            AutoConvergeArg::All => Self::All,
            AutoConvergeArg::Writers => Self::Writers,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_are_a_number_or_auto_in_text_and_in_json() {
        let parse = |text: &str| serde_json::from_str::<ChannelsArg>(text);
        assert_eq!(parse("\"auto\"").unwrap(), ChannelsArg::Auto);
        assert_eq!(parse("64").unwrap(), ChannelsArg::Count(64));
        for wrong in ["0", "65", "\"2\"", "-1", "1.5", "null"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        for arg in [ChannelsArg::Auto, ChannelsArg::Count(3)] {
            assert_eq!(arg.to_string().parse(), Ok(arg));
            assert_eq!(parse(&serde_json::to_string(&arg).unwrap()).unwrap(), arg);
        }
        assert!("0".parse::<ChannelsArg>().is_err() && "".parse::<ChannelsArg>().is_err());
        let (channels, adapts) = ChannelsArg::Auto.count();
        assert!((1..=4).contains(&channels) && adapts);
        assert_eq!(ChannelsArg::Count(7).count(), (7, false));
    }

    #[test]
    fn pace_is_a_word_or_a_rate_on_the_command_line_and_in_json() {
        for (text, pace) in
            [("auto", BulkLimit::Auto), ("off", BulkLimit::Off), ("2gbit", BulkLimit::Rate(250_000_000))]
        {
            let arg: PaceArg = text.parse().unwrap();
            assert_eq!(arg.0, pace);
            assert_eq!(serde_json::from_value::<PaceArg>(serde_json::to_value(arg).unwrap()).unwrap(), arg);
        }
        assert!("fast".parse::<PaceArg>().is_err());
        assert!(serde_json::from_str::<PaceArg>("0").is_err());
    }

    #[test]
    fn codec_is_a_word_with_a_level_on_the_command_line_and_in_json() {
        for text in ["auto", "raw", "lz4", "zstd:1", "zstd:19"] {
            let arg: CodecArg = text.parse().unwrap();
            assert_eq!(arg.to_string(), text);
            assert_eq!(serde_json::from_value::<CodecArg>(serde_json::to_value(arg).unwrap()).unwrap(), arg);
        }
        assert_eq!("zstd".parse::<CodecArg>().unwrap().to_string(), "zstd:1");
        for text in ["", "gzip", "zstd:", "zstd:0", "zstd:20", "zstd:-1", "lz4:1"] {
            assert!(text.parse::<CodecArg>().is_err(), "{text}");
        }
    }

    #[test]
    fn free_pages_are_on_off_or_a_bounded_wait_on_the_command_line_and_in_json() {
        let ms = Duration::from_millis;
        for (text, arg, skips, wait) in [
            ("on", FreePagesArg::On, true, ms(0)),
            ("off", FreePagesArg::Off, false, ms(0)),
            ("wait=200", FreePagesArg::Wait(ms(200)), true, ms(200)),
            ("wait=200ms", FreePagesArg::Wait(ms(200)), true, ms(200)),
            ("wait=60s", FreePagesArg::Wait(ms(60_000)), true, ms(60_000)),
        ] {
            assert_eq!(text.parse(), Ok(arg));
            assert_eq!((arg.is_on(), arg.wait()), (skips, wait), "{text}");
            let json = serde_json::to_value(arg).unwrap();
            assert_eq!(serde_json::from_value::<FreePagesArg>(json).unwrap(), arg);
        }
        for text in ["", "yes", "wait", "wait=", "wait=0", "wait=100us", "wait=61s", "wait=-5", "wait=soon"] {
            assert!(text.parse::<FreePagesArg>().is_err(), "{text}");
        }
        assert_eq!(FreePagesArg::default(), FreePagesArg::On);
    }
}
