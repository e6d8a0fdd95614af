//! Sizes (`256M`, powers of 1024) and rates (`100k`, powers of 1000).

use core::fmt;

/// Units from the largest to the smallest. The letter is also accepted in the other case.
const LETTERS: [(u8, u32); 4] = [(b'T', 4), (b'G', 3), (b'M', 2), (b'K', 1)];

/// Parses a size in bytes: `4096`, `64K`, `256M`, `4G`, `1T`. `None` when it is malformed or
/// exceeds 64 bits.
#[must_use]
pub fn parse_size(text: &str) -> Option<u64> {
    parse(text, 1024)
}

/// Parses a rate per second: `0`, `2500`, `100k`, `2M`. `None` when it is malformed or exceeds 64
/// bits.
#[must_use]
pub fn parse_rate(text: &str) -> Option<u64> {
    parse(text, 1000)
}

fn parse(text: &str, base: u64) -> Option<u64> {
    let last = text.bytes().last()?.to_ascii_uppercase();
    let unit = LETTERS.iter().find(|(letter, _)| *letter == last);
    let (digits, factor) = match unit {
        Some((_, power)) => (&text[..text.len() - 1], base.pow(*power)),
        None => (text, 1),
    };
    // `u64::from_str` accepts a leading plus sign, which is not allowed in these options.
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    digits.parse::<u64>().ok()?.checked_mul(factor)
}

/// Writes a size with the largest unit that divides it.
pub(crate) fn write_size(f: &mut fmt::Formatter<'_>, bytes: u64) -> fmt::Result {
    write(f, bytes, 1024, false)
}

/// Writes a rate with the largest unit that divides it.
pub(crate) fn write_rate(f: &mut fmt::Formatter<'_>, rate: u64) -> fmt::Result {
    write(f, rate, 1000, true)
}

fn write(f: &mut fmt::Formatter<'_>, value: u64, base: u64, small_k: bool) -> fmt::Result {
    for (letter, power) in LETTERS {
        let factor = base.pow(power);
        if value != 0 && value.is_multiple_of(factor) {
            let letter = if small_k && power == 1 { 'k' } else { char::from(letter) };
            return write!(f, "{}{letter}", value / factor);
        }
    }
    write!(f, "{value}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_units() {
        assert_eq!(parse_size("256M"), Some(256 << 20));
        assert_eq!(parse_size("4g"), Some(4 << 30));
        assert_eq!(parse_size("8192"), Some(8192));
        assert_eq!(parse_rate("100k"), Some(100_000));
        assert_eq!(parse_rate("2M"), Some(2_000_000));
        assert_eq!(parse_rate("0"), Some(0));
    }

    #[test]
    fn refuses_nonsense() {
        for text in ["", "M", "-1", "+1", "1.5G", "12Q", "1 G", "99999999999T", "18446744073709551616", "é"]
        {
            assert_eq!(parse_size(text), None, "{text}");
        }
    }
}
