//! Option `--net`.

use serde_json::{Value, json};
use vmferry_vmm::{Mac, NetOptions, NetStatus, VmHandle};

/// Form of the option, for errors.
const FORM: &str = "write tap=NAME, or tap=NAME,mac=52:54:00:12:34:56";

/// Parses a tap, and optionally the guest's MAC address.
pub(crate) fn net(text: &str) -> Result<NetOptions, String> {
    let (mut tap, mut mac) = (None, None);
    for part in text.split(',') {
        let twice = match part.split_once('=') {
            Some(("tap", name)) if !name.is_empty() => tap.replace(name).is_some(),
            Some(("mac", address)) => {
                mac.replace(address.parse::<Mac>().map_err(|error| error.to_string())?).is_some()
            }
            _ => return Err(format!("'{part}' is neither tap=NAME nor mac=MAC; {FORM}")),
        };
        if twice {
            return Err(format!("'{part}' is a repetition; {FORM}"));
        }
    }
    let mut options = NetOptions::new(tap.ok_or_else(|| format!("the tap is missing; {FORM}"))?);
    options.mac = mac;
    Ok(options)
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
        let options = net("tap=tap0").unwrap();
        assert_eq!((options.tap.as_str(), options.mac), ("tap0", None));
        for text in ["tap=a.1,mac=52:54:00:12:34:56", "mac=52:54:00:12:34:56,tap=a.1"] {
            let options = net(text).unwrap();
            assert_eq!(options.tap, "a.1");
            assert_eq!(options.mac.map(|mac| mac.to_string()).as_deref(), Some("52:54:00:12:34:56"));
        }
        for bad in
            ["", "tap0", "tap=", "mac=52:54:00:12:34:56", "tap=a,tap=b", "tap=a,", "tap=a,queues=2", "TAP=a"]
        {
            assert!(net(bad).unwrap_err().contains(FORM), "{bad}");
        }
        for bad in ["tap=a,mac=", "tap=a,mac=53:54:00:12:34:56", "tap=a,mac=52:54:00:12:34"] {
            assert!(net(bad).unwrap_err().contains("not a MAC address"), "{bad}");
        }
    }
}
