//! Tests of the floor between two processes.

use crate::VMFERRY_BENCH;
use std::time::Duration;
use vmferry_bench::floor::{self, FloorError, RECEIVER_SUBCOMMAND, ReceiverCommand};

#[test]
fn copies_arrive_whole() {
    let receiver = ReceiverCommand { program: VMFERRY_BENCH.into(), args: vec![RECEIVER_SUBCOMMAND.into()] };
    for (bytes, streams) in [(1u64, 1u32), (64 << 20, 1), ((64 << 20) + 1, 3)] {
        let result = floor::run(bytes, streams, &receiver).unwrap();
        assert!(result.bytes >= bytes && result.bytes < bytes + 4096 * u64::from(streams), "{result:?}");
        assert!(result.elapsed > Duration::ZERO && result.gbytes_per_s() > 0.0, "{result:?}");
        assert!(result.cpu_sender > Duration::ZERO && result.cpu_receiver > Duration::ZERO, "{result:?}");
    }
}

#[test]
fn copy_that_did_not_arrive_is_found() {
    // A receiver that receives everything and reports one page less.
    let script = r#"exec "$0" "$@" | sed -u 's/^PAGES 256$/PAGES 255/'"#;
    let args = ["-c", script, VMFERRY_BENCH, RECEIVER_SUBCOMMAND].map(Into::into).to_vec();
    let dishonest = ReceiverCommand { program: "sh".into(), args };
    match floor::run(1 << 20, 1, &dishonest) {
        Err(FloorError::Receiver(words)) if words.contains("255 right pages") => {}
        other => panic!("the missing page was not reported: {other:?}"),
    }
}
