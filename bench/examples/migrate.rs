//! QEMU and the floor alone, to look at the yardstick itself: `cargo run --release --example migrate -- [ROUNDS]`.
//!
//! `vmferry bench migrate` is the same with vmferry's own side.

use vmferry_bench::floor;
use vmferry_bench::migrate::{self, CaseSpec, Options, OurError, OurRunner};
use vmferry_bench::result::MigrationResult;

struct Nobody;

impl OurRunner for Nobody {
    fn run(&mut self, _: &CaseSpec, _: u32, _: bool) -> Result<MigrationResult, OurError> {
        Err(OurError::Unavailable("this example has no VMM".into()))
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let Some((first, rest)) = args.split_first()
        && first == floor::RECEIVER_SUBCOMMAND
    {
        return Ok(floor::receiver_main(rest)?);
    }
    let mut options = Options::quick();
    if let Some(rounds) = args.first() {
        options.repeats = rounds.parse()?;
    }
    let receiver = floor::ReceiverCommand::this_executable()?;
    let outcome = migrate::run(&options, &mut Nobody, &receiver, &mut |what| eprintln!("{what}"));
    print!("{}", migrate::table(&outcome.document));
    outcome.document.write(std::io::stdout())?;
    if outcome.failures.is_empty() { Ok(()) } else { Err("some runs failed".into()) }
}
