//! Short text without an allocator, for error messages.

use core::fmt;

/// Maximum size of a [`Text`] in bytes. Longer input is cut.
const CAPACITY: usize = 64;

/// Up to 64 bytes of input, kept to quote it in an error.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Text {
    bytes: [u8; CAPACITY],
    /// `len <= CAPACITY`, and `bytes[..len]` is UTF-8.
    len: usize,
    cut: bool,
}

impl Text {
    /// Returns the start of `text`, cut at a character boundary.
    #[must_use]
    pub fn new(text: &str) -> Self {
        let mut len = text.len().min(CAPACITY);
        while !text.is_char_boundary(len) {
            len -= 1;
        }
        let mut bytes = [0; CAPACITY];
        bytes[..len].copy_from_slice(&text.as_bytes()[..len]);
        Self { bytes, len, cut: len < text.len() }
    }

    /// Returns the kept text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        core::str::from_utf8(&self.bytes[..self.len]).unwrap_or("")
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())?;
        if self.cut { f.write_str("...") } else { Ok(()) }
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[test]
    fn cuts_at_a_character_boundary() {
        let long = "ä".repeat(CAPACITY);
        let text = Text::new(&long);
        assert_eq!(text.as_str(), "ä".repeat(CAPACITY / 2));
        let odd = std::format!("x{long}");
        assert_eq!(Text::new(&odd).as_str().len(), CAPACITY - 1);
        assert!(Text::new(&odd).to_string().ends_with("..."));
        assert_eq!(Text::new("short").to_string(), "short");
    }
}
