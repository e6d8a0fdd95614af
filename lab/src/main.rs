//! `cargo xtask lab`: real guests on a real KVM, with one command, on any host.

#![forbid(unsafe_code)]

mod api;
mod compat;
mod host;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use std::process::ExitCode;

/// vmferry's own chores.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Chore,
}

#[derive(Debug, Subcommand)]
enum Chore {
    /// Run vmferry with real guests on a real KVM: the host's own, or that of an emulated machine
    Lab(LabArgs),
    /// Compare the public API of the library crates with the listings in docs/api
    Api {
        /// Record the listings instead
        #[arg(long)]
        update: bool,
    },
    /// Move guests between the command of another revision and this one, both ways: what is frozen stays so
    Compat {
        /// The other revision, as git knows it
        revision: String,
        /// Write what came of it as JSON to this file
        #[arg(long, value_name = "FILE")]
        json: Option<std::path::PathBuf>,
    },
    /// Become another program that ends together with the process that started it
    #[command(name = host::machine::LEASH, hide = true)]
    Leash {
        parent: u32,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<std::ffi::OsString>,
    },
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct LabArgs {
    #[command(subcommand)]
    errand: Option<Errand>,
    /// The short form: the scenarios that show most
    #[arg(long)]
    pub(crate) quick: bool,
    /// Use the emulated machine even where the host's own KVM could do
    #[arg(long)]
    pub(crate) emulate: bool,
    /// Only these (see `cargo xtask lab list`), or those whose names begin so
    pub(crate) scenarios: Vec<String>,
}

#[derive(Debug, Subcommand)]
enum Errand {
    /// Say what is needed and whether it is there; status 1 if something is missing
    Check,
    /// Get the kernels and the busybox that the lab boots into target/lab, by apt-get, without installing them
    Fetch,
    /// Say which scenarios there are
    List,
    /// Count exits, system calls and wakeups of a Linux guest under vmferry and under QEMU's microvm
    Exits,
    /// Start the emulated machine and talk to its shell, or have it run a script
    Shell {
        /// The script; the machine's folder /share is target/lab/shell here
        script: Option<std::path::PathBuf>,
    },
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Chore::Lab(LabArgs { errand: Some(Errand::Check), .. }) => host::check(),
        Chore::Lab(LabArgs { errand: Some(Errand::Fetch), .. }) => host::fetch::fetch(),
        Chore::Lab(LabArgs { errand: Some(Errand::List), .. }) => host::list(),
        Chore::Lab(LabArgs { errand: Some(Errand::Exits), .. }) => host::exits::exits(),
        Chore::Lab(LabArgs { errand: Some(Errand::Shell { script }), .. }) => host::shell(script.as_deref()),
        Chore::Lab(args) => host::lab(&args),
        Chore::Api { update } => api::api(update),
        Chore::Compat { revision, json } => compat::compat(&revision, json.as_deref()),
        Chore::Leash { parent, command } => host::machine::leash(parent, &command),
    };
    finish(result)
}

fn finish(result: Result<bool>) -> ExitCode {
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("lab: {error:#}");
            ExitCode::FAILURE
        }
    }
}
