//! The command `vmferry`: run, move, watch and measure virtual machines.

// The standard library's macros panic when the reader of the output has gone, which would end the
// guest's process. A lost line is harmless.
macro_rules! eprintln {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($words)*);
    }};
}
macro_rules! println {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout(), $($words)*);
    }};
}

mod advice;
mod api;
mod arbiter;
mod args;
mod arriving;
mod balloon;
mod branch;
mod check;
mod choices;
mod codecs;
mod console;
mod ctrl_c;
mod demo;
mod descriptors;
mod dirty_rate;
mod disk;
mod events;
mod generate;
mod guest;
mod handed;
mod have;
mod http_client;
mod limit;
mod metrics;
mod migrate;
mod net;
#[cfg(test)]
mod on_terminal;
mod output;
mod overhead;
mod plan;
mod progress;
mod report;
mod rings;
mod run;
mod sandbox;
mod signals;
mod snapshot;
mod speed;
mod successor;
mod tls;
#[cfg(feature = "top")]
mod top;
mod traces;
mod upgrade;
mod usage;

use args::Command;
use std::process::ExitCode;

/// Exit status of the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Status {
    Done = 0,
    /// Failed or cancelled; the guest stays at the source.
    Failed = 1,
    /// The owner of the guest is unknown, or its migration awaits `recover`.
    Unknown = 3,
    /// The guest is lost: the source gave it up after a postcopy handover.
    Lost = 4,
    /// The guest asked for a reset and is not started again by this process.
    Reset = 5,
    /// The guest was not moved, and is stopped at the source because it could not be resumed.
    NotResumed = 6,
}

fn main() -> ExitCode {
    // Inherited descriptors are taken over before this process opens any.
    let inherited = descriptors::Inherited::take();
    vmferry_sys::share_one_heap();
    let traces = traces::begin();
    let result = match args::parse() {
        Command::Demo(args) => demo::demo(&args),
        Command::Run(args) => run::run(&args, &traces, inherited),
        Command::Migrate(args) => migrate::migrate(&args, inherited),
        Command::Snapshot(args) => snapshot::snapshot(&args),
        Command::Upgrade(args) => upgrade::upgrade(&args),
        Command::Pause(args) => api::simple(&args.api, "pause"),
        Command::Resume(args) => api::simple(&args.api, "resume"),
        Command::Powerdown(args) => api::simple(&args.api, "powerdown"),
        Command::Quit(args) => api::simple(&args.api, "quit"),
        Command::Cancel(args) => api::simple(&args.api, "cancel"),
        Command::Record(args) => api::record(&args),
        Command::Branch(args) => branch::branch(&args),
        Command::Balloon(args) => balloon::balloon(&args),
        Command::DirtyRate(args) => dirty_rate::dirty_rate(&args),
        Command::Plan(args) => plan::plan(&args),
        Command::Status(args) => api::status(&args),
        Command::Switch(args) => api::simple(&args.api, "switch"),
        Command::Recover(args) => api::recover(&args),
        Command::Check(args) => check::check(&args),
        #[cfg(feature = "top")]
        Command::Top(args) => top::top(&args),
        Command::Report(args) => report::report(&args),
        Command::Completions { shell } => generate::completions(shell),
        Command::Man { folder } => generate::man(&folder),
    };
    match result {
        Ok(status) => ExitCode::from(status as u8),
        Err(error) => {
            output::print_message(&advice::told(&error));
            ExitCode::from(if usage::is_wrong(&error) { usage::STATUS } else { Status::Failed as u8 })
        }
    }
}
