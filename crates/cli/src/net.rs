//! Option `--net`.

use crate::descriptors::Inherited;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use vmferry_vmm::{Mac, NetOptions, NetStatus, OpenTap, VmHandle};

/// Form of the option, for errors.
const FORM: &str = "write tap=NAME, none, or tap=NAME,mac=52:54:00:12:34:56";

/// Network interface of the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NetArg {
    options: NetOptions,
    /// Number of the inherited descriptor of the tap, in the command line of a successor.
    fd: Option<i32>,
}

impl NetArg {
    /// Returns true if the interface has a tap.
    pub(crate) fn has_tap(&self) -> bool {
        self.options.tap.is_some()
    }
}

/// Returns the options of the interfaces `args`, with their inherited taps.
///
/// # Errors
/// If a descriptor was not inherited.
pub(crate) fn options(args: &[NetArg], inherited: &mut Inherited) -> Result<Vec<NetOptions>> {
    let one = |NetArg { options, fd }: &NetArg| {
        let mut options = options.clone();
        if let Some(number) = fd {
            let tap = inherited
                .remove(*number)
                .with_context(|| format!("--net tap={}", options.tap.as_deref().unwrap_or("none")))?;
            options.open = Some(OpenTap::new(tap));
        }
        Ok(options)
    };
    args.iter().map(one).collect()
}

/// Returns the value of `--net` for a successor that inherits the tap as descriptor `number`.
pub(crate) fn with_descriptor(value: &str, number: i32) -> String {
    let parts = value.split(',').filter(|part| !part.starts_with(DESCRIPTOR));
    let parts = parts.map(str::to_owned).chain([format!("{DESCRIPTOR}{number}")]);
    parts.collect::<Vec<_>>().join(",")
}

/// Beginning of the part of an interface with the number of an inherited descriptor. The option of
/// an inherited metrics socket ends with the same text.
pub(crate) const DESCRIPTOR: &str = "descriptor=";

/// Returns true if `value` of `--net` is an interface without a tap.
pub(crate) fn is_unplugged(value: &str) -> bool {
    value.split(',').next() == Some("none")
}

/// Parses a tap, and optionally the guest's MAC address.
pub(crate) fn net(text: &str) -> Result<NetArg, String> {
    let (mut tap, mut mac, mut fd) = (None, None, None);
    let (unplugged, rest) = match text.split_once(',').unwrap_or((text, "")) {
        ("none", rest) => (true, rest),
        _ => (false, text),
    };
    for part in rest.split(',').filter(|part| !unplugged || !part.is_empty()) {
        let twice = match part.split_once('=') {
            Some(("tap", name)) if !name.is_empty() && !unplugged => tap.replace(name).is_some(),
            Some(("mac", address)) => {
                mac.replace(address.parse::<Mac>().map_err(|error| error.to_string())?).is_some()
            }
            Some(("descriptor", number)) => {
                let number = number.parse().map_err(|_| format!("'{number}' is not a descriptor"))?;
                fd.replace(number).is_some()
            }
            _ => return Err(format!("'{part}' is neither tap=NAME nor mac=MAC; {FORM}")),
        };
        if twice {
            return Err(format!("'{part}' is a repetition; {FORM}"));
        }
    }
    let mut options = match tap {
        Some(tap) => NetOptions::new(tap),
        None if unplugged => NetOptions::unplugged(),
        None => return Err(format!("the tap is missing; {FORM}")),
    };
    options.mac = mac;
    Ok(NetArg { options, fd })
}

/// Returns the state of a guest's network interfaces, in their order.
pub(crate) fn describe(vm: &VmHandle) -> Value {
    let one = |net: NetStatus| {
        json!({
            "tap": net.tap,
            "mac": net.mac.to_string(),
            "driver": net.driver,
            "wakeups": net.wakeups,
            "figures": net.figures,
        })
    };
    vm.nets().into_iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_are_taps_that_may_have_an_address() {
        let options = net("tap=tap0").unwrap().options;
        assert_eq!((options.tap.as_deref(), options.mac), (Some("tap0"), None));
        let options = net("none").unwrap().options;
        assert_eq!((options.tap, options.mac), (None, None));
        assert!(net("none,mac=52:54:00:12:34:56").unwrap().options.mac.is_some());
        assert!(net("none,tap=a").unwrap_err().contains(FORM));
        for text in ["tap=a.1,mac=52:54:00:12:34:56", "mac=52:54:00:12:34:56,tap=a.1"] {
            let options = net(text).unwrap().options;
            assert_eq!(options.tap.as_deref(), Some("a.1"));
            assert_eq!(options.mac.map(|mac| mac.to_string()).as_deref(), Some("52:54:00:12:34:56"));
        }
        for bad in
            ["", "tap0", "tap=", "mac=52:54:00:12:34:56", "tap=a,tap=b", "tap=a,", "tap=a,queues=2", "TAP=a"]
        {
            assert!(net(bad).unwrap_err().contains(FORM), "{bad}");
        }
        let passed = with_descriptor("tap=a.1,mac=52:54:00:12:34:56", 7);
        assert_eq!(net(&passed).unwrap().fd, Some(7));
        assert_eq!(net(&with_descriptor(&passed, 9)).unwrap().fd, Some(9));
        for bad in ["tap=a,mac=", "tap=a,mac=53:54:00:12:34:56", "tap=a,mac=52:54:00:12:34"] {
            assert!(net(bad).unwrap_err().contains("not a MAC address"), "{bad}");
        }
    }
}
