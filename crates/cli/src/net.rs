//! Option `--net`.

use serde_json::{Value, json};
use vmferry_vmm::{Mac, NetOptions, NetStatus, VmHandle};

/// Form of the option, for errors.
const FORM: &str = "write tap=NAME, none, or tap=NAME,mac=52:54:00:12:34:56";

/// Parses a tap, and optionally the guest's MAC address.
pub(crate) fn net(text: &str) -> Result<NetOptions, String> {
    let (mut tap, mut mac) = (None, None);
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
        assert_eq!((options.tap.as_deref(), options.mac), (Some("tap0"), None));
        let options = net("none").unwrap();
        assert_eq!((options.tap, options.mac), (None, None));
        assert!(net("none,mac=52:54:00:12:34:56").unwrap().mac.is_some());
        assert!(net("none,tap=a").unwrap_err().contains(FORM));
        for text in ["tap=a.1,mac=52:54:00:12:34:56", "mac=52:54:00:12:34:56,tap=a.1"] {
            let options = net(text).unwrap();
            assert_eq!(options.tap.as_deref(), Some("a.1"));
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
