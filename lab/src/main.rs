//! Command `cargo xtask`: the lab with real guests on a real KVM, and other tasks of this
//! repository.

#![forbid(unsafe_code)]

mod api;
mod compat;
mod host;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use std::process::ExitCode;

/// Run development tasks of vmferry
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Chore,
}

#[derive(Debug, Subcommand)]
enum Chore {
    /// Run real guests on a real KVM, of the host or of an emulated machine
    Lab(LabArgs),
    /// Compare the public API of the libraries with docs/api
    Api {
        /// Record the API in docs/api
        #[arg(long)]
        update: bool,
    },
    /// Move guests between this command and that of another revision
    ///
    /// Guests move in both directions and through files. This shows that the frozen formats are
    /// compatible.
    Compat {
        /// Other revision, as a name that git accepts
        revision: String,
        /// Write the results as JSON to this file
        #[arg(long, value_name = "FILE")]
        json: Option<std::path::PathBuf>,
    },
    /// Replace this process by a program that ends with its parent
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
    command: Option<LabCommand>,
    /// Run only the most important scenarios
    #[arg(long)]
    pub(crate) quick: bool,
    /// Use the emulated machine even if the host's KVM is complete
    #[arg(long)]
    pub(crate) emulate: bool,
    /// Names of scenarios, or prefixes of names (see `cargo xtask lab list`)
    pub(crate) scenarios: Vec<String>,
}

#[derive(Debug, Subcommand)]
enum LabCommand {
    /// List the parts that are found and missing
    ///
    /// The exit status is 1 if a part is missing.
    Check,
    /// Fetch kernels, tools and a QEMU into target/lab by apt-get
    ///
    /// Nothing is installed.
    Fetch,
    /// List the scenarios
    List,
    /// Count exits, system calls and wakeups of a Linux guest
    ///
    /// The same guest runs under vmferry and under QEMU's microvm.
    Exits,
    /// Open a shell in the emulated machine, or run a script in it
    Shell {
        /// Script to run
        ///
        /// The machine's folder /share is target/lab/shell on the host.
        script: Option<std::path::PathBuf>,
    },
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Chore::Lab(LabArgs { command: Some(LabCommand::Check), .. }) => host::check(),
        Chore::Lab(LabArgs { command: Some(LabCommand::Fetch), .. }) => host::fetch::fetch(),
        Chore::Lab(LabArgs { command: Some(LabCommand::List), .. }) => host::list(),
        Chore::Lab(LabArgs { command: Some(LabCommand::Exits), .. }) => host::exits::exits(),
        Chore::Lab(LabArgs { command: Some(LabCommand::Shell { script }), .. }) => {
            host::shell(script.as_deref())
        }
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
