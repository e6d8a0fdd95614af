//! Probe channel: the target echoes each probe with the time that it held the probe.

use super::receiver::ReceiveError;
use crate::channel::{IoBuf, Stream, tcp};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};
use vmferry_wire::{FRAME_HEADER_BYTES, FrameHeader, FrameKind, Request, WireError};

/// Echoes probes until the channel ends.
pub(super) fn echo_probes(stream: &Stream) -> ReceiveError {
    // Without kernel timestamps, delays of the processor count as delays of the link. Nothing else
    // changes.
    let _ = stream.stamp_arrivals();
    let mut sequence = 0;
    loop {
        // If the acknowledgement waited for the echo, delays of the processor would count as delays
        // of the link as well. A channel that is not TCP refuses the option and has that error.
        let _ = tcp::acknowledge_at_once(stream.as_fd());
        if let Err(error) = echo(stream, sequence) {
            return error;
        }
        sequence += 1;
    }
}

fn echo(stream: &Stream, sequence: u64) -> Result<(), ReceiveError> {
    let mut bytes = [0; FRAME_HEADER_BYTES];
    let in_kernel = stream.receive_stamped(&mut bytes)?;
    let read = Instant::now();
    let header = FrameHeader::decode(&bytes)?;
    let wrong = |what, value, allowed| Err(WireError::Field { what, value, allowed }.into());
    if header.kind != FrameKind::Probe {
        return wrong("a frame of pass", header.pass.into(), "none on a probe channel");
    }
    if header.sequence != sequence {
        return wrong("frame number", header.sequence, "the one after the last frame's");
    }
    let held = in_kernel.map_or(Duration::ZERO, |before| before + read.elapsed());
    let held_ns = u32::try_from(held.as_nanos()).unwrap_or(u32::MAX);
    let answer = Request::Echo { number: header.base.0, held_ns }.encode();
    stream.send(&mut [IoBuf::from_bytes(&answer)]).map_err(|failed| ReceiveError::Link(failed.error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::test_pair;
    use vmferry_wire::REQUEST_BYTES;

    #[test]
    fn probe_echo_counts_the_time_before_the_read_as_held() {
        if vmferry_testkit::skip_if_emulated("SO_TIMESTAMPNS") {
            return;
        }
        let (here, there) = test_pair();
        there.stamp_arrivals().unwrap();
        let mut held = |number| {
            here.send(&mut [IoBuf::from_bytes(&FrameHeader::probe(number, number).encode())]).unwrap();
            // Simulates a busy processor.
            std::thread::sleep(Duration::from_millis(30));
            echo(&there, number).unwrap();
            let mut answer = [0; REQUEST_BYTES];
            here.receive_bytes(&mut answer).unwrap();
            match Request::decode(&answer).unwrap() {
                Request::Echo { number: echoed, held_ns } if echoed == number => held_ns,
                other => panic!("{other:?}"),
            }
        };
        // The kernel begins to stamp some time after the option was set.
        let stamped = (0..50).map(&mut held).find(|held| *held > 0);
        assert!(stamped.is_some_and(|held| held >= 29_000_000), "{stamped:?}");
    }

    #[test]
    fn frame_that_is_not_a_probe_ends_the_channel() {
        for header in [FrameHeader::barrier(0, 0), FrameHeader::probe(1, 7)] {
            let (here, there) = test_pair();
            here.send(&mut [IoBuf::from_bytes(&header.encode())]).unwrap();
            assert!(matches!(echo(&there, 0), Err(ReceiveError::Wire(WireError::Field { .. }))));
        }
    }
}
