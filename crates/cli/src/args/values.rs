//! Parsers of option values: sizes, rates, times, addresses.

use super::DirtyRing;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;
use vmferry_guest_abi::Workload;

pub(crate) fn size(text: &str) -> Result<u64, String> {
    vmferry_guest_abi::parse_size(text).ok_or_else(|| {
        format!("'{text}' is not a size; write a number of bytes, or 64K, 256M, 4G, 1T (powers of 1024)")
    })
}

/// Parses the size of a guest's memory.
pub(super) fn memory(text: &str) -> Result<u64, String> {
    size(text).and_then(|size| {
        if size > 0 { Ok(size) } else { Err("a guest needs memory; write 512M, or 4G".to_owned()) }
    })
}

pub(super) fn address(text: &str) -> Result<SocketAddr, String> {
    let wrong =
        |why: &str| format!("'{text}' is not an address ({why}); write 127.0.0.1:9100 or localhost:9100");
    let mut found = text.to_socket_addrs().map_err(|error| wrong(&error.to_string()))?;
    found.next().ok_or_else(|| wrong("the name has none"))
}

pub(super) fn workload(text: &str) -> Result<Workload, String> {
    text.parse().map_err(|error: vmferry_guest_abi::WorkloadError| error.to_string())
}

pub(crate) fn time(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|_| format!("'{text}' is not a duration; write 300ms, 5s or 2m"))
}

/// Parses a time that must not be 0.
pub(super) fn positive_time(text: &str) -> Result<Duration, String> {
    match time(text)? {
        Duration::ZERO => Err("the time is 0; write 5s, or 2m".to_owned()),
        time => Ok(time),
    }
}

/// Parses a rate into bytes per second: `2gbit`, `500mbit` (decimal bits), `250M/s`, `1.5G/s`
/// (decimal bytes).
pub(crate) fn rate(text: &str) -> Result<u64, String> {
    let wrong = || format!("'{text}' is not a rate; write 2gbit, 500mbit, 250M/s or 1G/s");
    let lower = text.to_ascii_lowercase();
    let (number, bits) = match (lower.strip_suffix("bit"), lower.strip_suffix("/s")) {
        (Some(number), _) => (number, true),
        (_, Some(number)) => (number, false),
        _ => return Err(wrong()),
    };
    let number = number.strip_suffix('b').filter(|_| !bits).unwrap_or(number);
    let split = number.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(number.len());
    let factor = match &number[split..] {
        "" => 1.0,
        "k" => 1e3,
        "m" => 1e6,
        "g" => 1e9,
        "t" => 1e12,
        _ => return Err(wrong()),
    };
    let value: f64 = number[..split].parse().map_err(|_| wrong())?;
    let bytes = value * factor / if bits { 8.0 } else { 1.0 };
    if !(1.0..1e15).contains(&bytes) {
        return Err(format!(
            "'{text}' is out of range; write a rate between one byte and a petabyte per second"
        ));
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "checked to be between 1 and 1e15"
    )]
    Ok(bytes as u64)
}

pub(super) fn dirty_ring(text: &str) -> Result<DirtyRing, String> {
    if text == "off" {
        return Ok(DirtyRing(None));
    }
    let entries: u32 =
        text.parse().map_err(|_| format!("'{text}' is not a number of entries; write off, 4096 or 65536"))?;
    if !entries.is_power_of_two() {
        return Err(format!("{entries} is not a power of two; write off, 4096 or 65536"));
    }
    Ok(DirtyRing(Some(entries)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ring_size_is_a_power_of_two_and_memory_is_not_zero() {
        assert_eq!(dirty_ring("4096"), Ok(DirtyRing(Some(4096))));
        assert_eq!(dirty_ring("off"), Ok(DirtyRing(None)));
        assert!(["1000", "0", "-1", "on", ""].iter().all(|wrong| dirty_ring(wrong).is_err()));
        assert_eq!(memory("16M"), Ok(16 << 20));
        assert!(["0", "0G", "-1", "much"].iter().all(|wrong| memory(wrong).is_err()));
        assert!(["0s", "5", "soon"].iter().all(|wrong| positive_time(wrong).is_err()));
    }

    #[test]
    fn rates_are_bits_or_bytes() {
        assert_eq!(rate("2gbit"), Ok(250_000_000));
        assert_eq!(rate("250M/s"), Ok(250_000_000));
        assert_eq!(rate("250MB/s"), Ok(250_000_000));
        assert_eq!(rate("1.5G/s"), Ok(1_500_000_000));
        assert_eq!(rate("800bit"), Ok(100));
        for wrong in ["", "2g", "gbit", "-1gbit", "0gbit", "nanbit", "infbit", "1xbit", "2e30gbit", "é/s"] {
            assert!(rate(wrong).is_err(), "{wrong}");
        }
    }
}
