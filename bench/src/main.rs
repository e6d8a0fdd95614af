//! Command `vmferry-bench`.

use std::process::ExitCode;

fn main() -> ExitCode {
    vmferry_bench::command::main()
}
