//! A client that sends arbitrary bytes, for the fuzz target and for the tests, which run it on
//! seeded noise.

use crate::message::{Event, QmpError, Version};
use crate::session::{Call, End, Limits, Session};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Returns small limits, so that the bytes reach them.
fn limits() -> Limits {
    Limits { message_bytes: 300, depth: 6, pending: 4, out_bytes: 4000, ..Limits::default() }
}

/// Most bytes of an answer of the simulated machine.
const ANSWER: usize = 900;

pub(crate) fn version() -> Version {
    Version { numbers: [0, 1, 2], package: "test".to_owned() }
}

/// Sends `bytes` to a session. The first bytes choose the pieces, the pauses and the reads.
///
/// # Panics
/// Panics if a promise of the session does not hold: its memory is bounded, and each line that it
/// sends is a message.
pub fn drive(bytes: &[u8]) {
    let (script, mut input) = bytes.split_at(bytes.len().min(64).min(bytes.len() / 3));
    let mut session = Session::new(&version(), limits());
    let mut now = Instant::now();
    let (mut output, mut calls) = (Vec::new(), Vec::<Call>::new());
    let mut steps = script.iter().copied().chain([0x21, 0x42, 0x63]).cycle();
    for _ in 0..4 * bytes.len() + 64 {
        let step = steps.next().unwrap_or(0);
        match step % 8 {
            0..3 => {
                let piece = &input[..input.len().min(usize::from(step) + 1)];
                input = &input[session.receive(piece, now)..];
            }
            3 => calls.extend(session.next_call()),
            4 if !calls.is_empty() => {
                let call = calls.swap_remove(usize::from(step) % calls.len());
                session.answer(call.ticket, respond(&call, step));
            }
            5 => session.event(&Event::now("NOISE", json!({ "step": step }))),
            6 => {
                now += Duration::from_millis(u64::from(step) * 20);
                session.tick(now);
            }
            _ => {
                let part = &session.output()[..session.output().len().min(usize::from(step))];
                output.extend_from_slice(part);
                let count = part.len();
                session.sent(count, now);
            }
        }
        assert!(calls.len() <= limits().pending, "more calls at once than the limit");
        let bound = limits().out_bytes + limits().pending * (ANSWER + limits().message_bytes) + 400;
        assert!(session.output().len() <= bound, "output without bound");
        if session.ended().is_some() {
            assert!(!session.wants_input() && session.next_call().is_none());
            break;
        }
    }
    output_is_messages(&mut session, output, now);
}

fn respond(call: &Call, step: u8) -> Result<Value, QmpError> {
    if step.is_multiple_of(3) {
        return Err(QmpError::not_found(&call.name));
    }
    Ok(json!({ "x": "é".repeat(usize::from(step) / 2) }))
}

fn output_is_messages(session: &mut Session, mut output: Vec<u8>, now: Instant) {
    while !session.output().is_empty() {
        output.extend_from_slice(session.output());
        session.sent(session.output().len(), now);
    }
    assert!(output.is_ascii(), "only ASCII is sent");
    let mut lines: Vec<_> = output.split(|byte| *byte == b'\n').collect();
    assert_eq!(lines.pop(), Some(&[][..]), "only whole lines are sent");
    for line in lines {
        let message: Value = match serde_json::from_slice(line) {
            Ok(message) => message,
            Err(error) => panic!("{error}: {}", String::from_utf8_lossy(line)),
        };
        let kinds = ["QMP", "return", "error", "event"].iter().filter(|kind| message.get(**kind).is_some());
        assert_eq!(kinds.count(), 1, "{message}");
    }
    assert_ne!(session.ended(), Some(End::Done), "the client never finished");
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Parts of requests, and text that resembles requests.
    const PARTS: [&str; 20] = [
        "{\"execute\": \"qmp_capabilities\", \"arguments\": {\"enable\": [\"oob\"]}}\n",
        "{\"execute\": \"qmp_capabilities\"}",
        "{\"execute\": \"query-status\", \"id\": 5}\r\n",
        "{\"exec-oob\": \"migrate-pause\", \"id\": \"\\u00e9\"}\n",
        "{\"execute\": \"migrate\", \"arguments\": {\"uri\": \"tcp:127.0.0.1:1\"}}",
        "{\"execute\":",
        "\"",
        "\\",
        "{",
        "}",
        "[",
        "]",
        "{\"a\":[[[[[[",
        "\n",
        "\u{e9}",
        "null",
        " ",
        "'x'",
        "0",
        "e9",
    ];

    #[test]
    fn parts_of_requests_in_any_order_do_no_harm() {
        for name in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/qmp")).unwrap() {
            drive(&std::fs::read(name.unwrap().path()).unwrap());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(600))]

        #[test]
        fn noise_does_no_harm(
            script in prop::collection::vec(any::<u8>(), 0..64),
            parts in prop::collection::vec((0usize..PARTS.len() + 2, any::<u8>()), 0..120),
        ) {
            let mut bytes = script.clone();
            for (part, byte) in parts {
                match PARTS.get(part) {
                    Some(part) => bytes.extend(part.as_bytes()),
                    None => bytes.push(byte),
                }
            }
            drive(&bytes);
        }
    }
}
