//! Runs the scenarios where KVM is: inside the outer machine, or on the host itself.

use anyhow::{Result, bail};
use std::path::Path;
use std::process::ExitCode;
use vmferry_lab::runner;

fn main() -> ExitCode {
    match act(&std::env::args().skip(1).collect::<Vec<_>>()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lab-agent: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn act(arguments: &[String]) -> Result<()> {
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["run", plan] => runner::run(Path::new(plan)),
        ["scenario", name, plan] => runner::scenario(name, Path::new(plan)),
        _ => bail!("usage: lab-agent run PLAN | scenario NAME PLAN"),
    }
}
