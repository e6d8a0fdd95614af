//! Choices that the command line and the control socket share, by the contract's names.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use vmferry_engine::{
    AutoConverge, MigrationMode, OnTimeout, Pace, SwitchoverBandwidth, UrgentPath, Uri, UriError,
};

/// Where a guest comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum IncomingArg {
    At(Uri),
    /// Somebody will say.
    Defer,
}

impl IncomingArg {
    /// Returns the address; `None` if it is to be told later.
    pub(crate) fn uri(&self) -> Option<&Uri> {
        match self {
            Self::At(uri) => Some(uri),
            Self::Defer => None,
        }
    }
}

impl FromStr for IncomingArg {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "defer" { Ok(Self::Defer) } else { text.parse().map(Self::At) }
    }
}

/// When the guest changes sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ModeArg {
    /// The guest moves after its memory
    #[default]
    Precopy,
    /// The guest moves at once, and its memory follows
    Postcopy,
    /// The guest moves after as much of its memory as is worth while, and the rest follows
    Hybrid,
    /// As a plan made before says, which is left where the run departs from it
    Auto,
}

impl From<ModeArg> for MigrationMode {
    fn from(arg: ModeArg) -> Self {
        match arg {
            // What it becomes the plan says.
            ModeArg::Precopy | ModeArg::Auto => Self::Precopy,
            ModeArg::Postcopy => Self::Postcopy,
            ModeArg::Hybrid => Self::Hybrid,
        }
    }
}

/// What to do when a migration takes too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OnTimeoutArg {
    /// Give up; the guest stays
    #[default]
    Cancel,
    /// Stop the guest and send the rest
    Switch,
    /// Let the guest go on at the target and send the rest then
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

/// Something that is done, or not. What that is the option says: its values are no help of their own.
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

/// How a page that a guest waits for is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum UrgentArg {
    /// In the bulk channel, behind what is queued there
    Shared,
    /// On a channel of its own, by the thread that sends the bulk
    Interleaved,
    /// On a channel of its own, at once, by the thread that reads the request
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

/// How fast the bulk is sent beside pages that the guest waits for: `auto`, `off`, or a rate; in JSON `"auto"`, `"off"`, or bytes
/// a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "PaceText", into = "PaceText")]
pub(crate) struct PaceArg(pub(crate) Pace);

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum PaceText {
    Rate(u64),
    Word(String),
}

impl From<PaceArg> for PaceText {
    fn from(arg: PaceArg) -> Self {
        match arg.0 {
            Pace::Rate(rate) => Self::Rate(rate),
            _ => Self::Word(arg.to_string()),
        }
    }
}

impl TryFrom<PaceText> for PaceArg {
    type Error = String;

    fn try_from(text: PaceText) -> Result<Self, String> {
        match text {
            PaceText::Rate(0) => Err("a pace of 0 sends nothing".into()),
            PaceText::Rate(rate) => Ok(Self(Pace::Rate(rate))),
            PaceText::Word(word) => word.parse(),
        }
    }
}

impl FromStr for PaceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self(Pace::Auto)),
            "off" => Ok(Self(Pace::Off)),
            _ => crate::args::rate(text).map(|rate| Self(Pace::Rate(rate))),
        }
    }
}

impl fmt::Display for PaceArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Pace::Off => f.write_str("off"),
            Pace::Rate(rate) => write!(f, "{rate}B/s"),
            _ => f.write_str("auto"),
        }
    }
}

/// A limit for the time in which the guest is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum SwitchoverArg {
    Unlimited,
    /// Bytes a second.
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

/// Whether a guest that dirties faster than the link carries is slowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum AutoConvergeArg {
    /// Let it run
    #[default]
    Off,
    /// All vCPUs alike
    All,
    /// Only the vCPUs that write more than their share, where the tracker can tell (ring)
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
    fn a_pace_is_a_word_or_a_rate_in_both_places() {
        for (text, pace) in [("auto", Pace::Auto), ("off", Pace::Off), ("2gbit", Pace::Rate(250_000_000))] {
            let arg: PaceArg = text.parse().unwrap();
            assert_eq!(arg.0, pace);
            assert_eq!(serde_json::from_value::<PaceArg>(serde_json::to_value(arg).unwrap()).unwrap(), arg);
        }
        assert!("fast".parse::<PaceArg>().is_err());
        assert!(serde_json::from_str::<PaceArg>("0").is_err());
    }
}
