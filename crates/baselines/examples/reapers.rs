//! Writes the effect of each harvest policy on each simulated guest as CSV: one line for each turn
//! of the reaper.
//!
//! ```sh
//! cargo run -p vmferry-baselines --example reapers > reapers.csv
//! ```

use std::io::{self, BufWriter, Write};
use vmferry_baselines::Policy;
use vmferry_dirty::sim::{Costs, Trace, run};

const SECONDS: f64 = 60.0;

fn main() -> io::Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    writeln!(out, "trace,entries,policy,seconds,sleep_ms,occupancy,harvested")?;
    for trace in Trace::steady().into_iter().chain(Trace::changing()) {
        for entries in [4096, 65536] {
            for policy in Policy::ALL {
                let outcome = run(&policy, &trace, entries, &Costs::default(), SECONDS, true);
                for turn in outcome.series {
                    writeln!(
                        out,
                        "\"{}\",{entries},{policy},{:.6},{:.3},{:.4},{}",
                        trace.name,
                        turn.at,
                        turn.sleep * 1e3,
                        turn.occupancy,
                        u8::from(turn.harvested),
                    )?;
                }
            }
        }
    }
    out.flush()
}
