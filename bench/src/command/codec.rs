//! `vmferry-bench codec`.

use super::Finished;
use super::args::BenchArgs;
use crate::codec::{self, Options, Outcome};
use anyhow::Result;

pub(super) fn bench(args: &BenchArgs) -> Result<Finished> {
    let mut options = if args.quick { Options::quick() } else { Options::full() };
    options.repeats = args.rounds.map_or(options.repeats, usize::from);
    options.seed = args.seed;
    options.only.clone_from(&args.only);
    let Outcome { document, failures } = codec::run(&options, &mut |what| eprintln!("codec: {what}"));
    Ok(Finished { table: codec::table(&document), document, page: None, failures })
}
