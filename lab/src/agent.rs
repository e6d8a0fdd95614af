//! Agent that runs the scenarios where KVM is: in the outer machine, or on the host itself.

use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::ExitCode;
use vmferry_lab::{peer, runner};

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
        ["scenario", name, plan, pace] => {
            let pace = pace.parse().with_context(|| format!("{pace} is not a valid pace"))?;
            runner::scenario(name, Path::new(plan), pace)
        }
        ["serve", address] => {
            peer::serve(address.parse().with_context(|| format!("{address} is not a valid address"))?)
        }
        _ => bail!("usage: lab-agent run PLAN | scenario NAME PLAN PACE | serve ADDRESS"),
    }
}
