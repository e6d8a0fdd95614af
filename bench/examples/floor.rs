//! Measures the floor alone: `cargo run --release --example floor -- [BYTES] [STREAMS] [REPEATS]`.

use vmferry_bench::floor;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let Some((first, rest)) = args.split_first()
        && first == floor::RECEIVER_SUBCOMMAND
    {
        return Ok(floor::receiver_main(rest)?);
    }
    let number = |index: usize, default: u64| args.get(index).map_or(Ok(default), |text| text.parse());
    let (bytes, streams, repeats) = (number(0, 1 << 30)?, number(1, 2)?, number(2, 3)?);
    let receiver = floor::ReceiverCommand::this_executable()?;
    for _ in 0..repeats {
        let result = floor::run(bytes, u32::try_from(streams)?, &receiver)?;
        println!(
            "{streams} streams: {:.2} GB/s, sender {:.0} ms CPU, receiver {:.0} ms CPU",
            result.gbytes_per_s(),
            result.cpu_sender.as_secs_f64() * 1e3,
            result.cpu_receiver.as_secs_f64() * 1e3,
        );
    }
    Ok(())
}
