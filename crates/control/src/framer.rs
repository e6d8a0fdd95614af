//! Splitter of bytes into the texts of JSON objects. An object may span several lines, and a line
//! may contain several objects.
//!
//! The framer counts brackets outside of strings, which is sufficient to find the end of an object.
//! It does not check that the text is JSON, because the parser does. Each byte is read once, and no
//! more bytes are kept than the limits allow.

/// Result of the framer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Frame {
    /// Text of an object with balanced brackets.
    Object(Vec<u8>),
    /// Text that is not an object, with the reason. The framer skips the rest of the line.
    Garbage(&'static str),
    /// Object that exceeds a limit. The framer returns no further frame.
    Excess(Excess),
}

/// Limit that an object exceeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Excess {
    Long,
    Deep,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Between objects.
    Idle,
    /// Inside an object, at nesting depth `depth`.
    Inside { depth: usize, string: bool, escape: bool },
    /// In the rest of a line that is not an object.
    Skipping,
}

/// State of the splitter. Invariant: `text.len() <= longest`, and `text` is empty outside of an
/// object.
#[derive(Debug)]
pub(crate) struct Framer {
    longest: usize,
    deepest: usize,
    state: State,
    text: Vec<u8>,
}

impl Framer {
    /// Creates a framer for objects of at most `longest` bytes, whose brackets are nested at most
    /// `deepest` levels deep.
    pub(crate) fn new(longest: usize, deepest: usize) -> Self {
        Self { longest, deepest, state: State::Idle, text: Vec::new() }
    }

    /// Returns true if an object has begun and has not ended.
    pub(crate) fn half(&self) -> bool {
        matches!(self.state, State::Inside { .. })
    }

    /// Takes bytes until a frame is complete. Returns the number of taken bytes, and the frame if
    /// there is one.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> (usize, Option<Frame>) {
        for (index, byte) in bytes.iter().enumerate() {
            let frame = self.take(*byte);
            if frame.is_some() {
                return (index + 1, frame);
            }
        }
        (bytes.len(), None)
    }

    fn take(&mut self, byte: u8) -> Option<Frame> {
        match self.state {
            State::Skipping => {
                if byte == b'\n' {
                    self.state = State::Idle;
                }
                None
            }
            // A client may first send 0xff, to discard an incomplete object.
            State::Idle if byte.is_ascii_whitespace() || byte == 0xff => None,
            State::Idle if byte == b'{' => {
                self.state = State::Inside { depth: 1, string: false, escape: false };
                self.keep(byte)
            }
            State::Idle => Some(self.garbage(byte, "QMP input must be a JSON object")),
            State::Inside { .. } if byte == 0xff => {
                Some(self.garbage(byte, "JSON parse error, the object was discarded"))
            }
            State::Inside { depth, string: true, escape } => self.in_string(byte, depth, escape),
            State::Inside { depth, string: false, .. } => self.in_object(byte, depth),
        }
    }

    fn in_string(&mut self, byte: u8, depth: usize, escape: bool) -> Option<Frame> {
        if byte < 0x20 {
            return Some(self.garbage(byte, "JSON parse error, a control character in a string"));
        }
        let string = escape || byte != b'"';
        self.state = State::Inside { depth, string, escape: !escape && byte == b'\\' };
        self.keep(byte)
    }

    fn in_object(&mut self, byte: u8, depth: usize) -> Option<Frame> {
        let depth = match byte {
            b'{' | b'[' if depth == self.deepest => return Some(self.excess(Excess::Deep)),
            b'{' | b'[' => depth + 1,
            b'}' | b']' => depth - 1,
            _ => depth,
        };
        self.state = State::Inside { depth, string: byte == b'"', escape: false };
        if let Some(excess) = self.keep(byte) {
            return Some(excess);
        }
        if depth > 0 {
            return None;
        }
        self.state = State::Idle;
        Some(Frame::Object(std::mem::take(&mut self.text)))
    }

    fn keep(&mut self, byte: u8) -> Option<Frame> {
        if self.text.len() == self.longest {
            return Some(self.excess(Excess::Long));
        }
        self.text.push(byte);
        None
    }

    fn garbage(&mut self, byte: u8, why: &'static str) -> Frame {
        self.text = Vec::new();
        self.state = if matches!(byte, b'\n' | 0xff) { State::Idle } else { State::Skipping };
        Frame::Garbage(why)
    }

    fn excess(&mut self, which: Excess) -> Frame {
        self.text = Vec::new();
        self.state = State::Skipping;
        Frame::Excess(which)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frames(framer: &mut Framer, mut bytes: &[u8]) -> Vec<Frame> {
        let mut all = Vec::new();
        while !bytes.is_empty() {
            let (taken, frame) = framer.push(bytes);
            assert!(taken > 0);
            all.extend(frame);
            bytes = &bytes[taken..];
        }
        all
    }

    fn texts(bytes: &[u8]) -> Vec<String> {
        frames(&mut Framer::new(64, 4), bytes)
            .into_iter()
            .map(|frame| match frame {
                Frame::Object(text) => String::from_utf8_lossy(&text).into_owned(),
                Frame::Garbage(_) => "garbage".to_owned(),
                Frame::Excess(which) => format!("{which:?}"),
            })
            .collect()
    }

    #[test]
    fn objects_are_found_in_one_line_and_across_lines() {
        assert_eq!(
            texts(b"{\"a\": 1}\n{}{\"b\"\n:\r\n[2, {}]}"),
            ["{\"a\": 1}", "{}", "{\"b\"\n:\r\n[2, {}]}"]
        );
        assert_eq!(texts(br#"{"}": "\"]}\\"} {"#), [r#"{"}": "\"]}\\"}"#]);
    }

    #[test]
    fn text_that_is_no_object_is_skipped_up_to_the_line_end() {
        assert_eq!(texts(b"hello {} \n[1]\n{}\n"), ["garbage", "garbage", "{}"]);
        assert_eq!(texts(b"{\"a\nb\": 1}\n{}"), ["garbage", "garbage", "{}"], "a string must not span lines");
        assert_eq!(texts(b"{\"half\": \xff{}"), ["garbage", "{}"], "0xff discards the object");
        assert_eq!(texts(b"\xff{}"), ["{}"]);
        assert_eq!(texts(b"{]{}"), ["{]", "{}"], "the parser of the text refuses it");
    }

    #[test]
    fn framer_reports_objects_over_a_limit() {
        assert_eq!(texts(b"{\"a\":[{\"b\":{}}]}"), ["{\"a\":[{\"b\":{}}]}"]);
        assert_eq!(texts(b"{\"a\":[{\"b\":{\"c\":[]}}]}"), ["Deep"]);
        assert_eq!(texts(format!("{{\"a\": \"{}\"}}", "x".repeat(55)).as_bytes()).len(), 1);
        assert_eq!(texts(format!("{{\"a\": \"{}\"}}", "x".repeat(56)).as_bytes()), ["Long"]);
    }

    proptest! {
        #[test]
        fn frames_do_not_depend_on_how_the_bytes_are_cut(
            bytes in prop::collection::vec(prop_oneof![
                Just(b'{'), Just(b'}'), Just(b'['), Just(b'"'), Just(b'\\'), Just(b'\n'), Just(0xff), any::<u8>()
            ], 0..400),
            cuts in prop::collection::vec(1usize..9, 1..50),
        ) {
            let whole = frames(&mut Framer::new(64, 4), &bytes);
            let mut framer = Framer::new(64, 4);
            let mut parts = Vec::new();
            let (mut rest, mut cuts) = (&bytes[..], cuts.iter().cycle());
            while !rest.is_empty() {
                let (part, after) = rest.split_at(rest.len().min(*cuts.next().unwrap()));
                parts.extend(frames(&mut framer, part));
                prop_assert!(framer.text.len() <= 64);
                prop_assert_eq!(framer.half(), !framer.text.is_empty());
                rest = after;
            }
            prop_assert_eq!(whole, parts);
        }
    }
}
