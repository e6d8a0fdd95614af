//! Files for packages and shells, generated from the command line: manual pages and completions.

use crate::Status;
use crate::args::Cli;
use anyhow::{Context, Result, bail};
use clap::CommandFactory;
use clap_complete::Shell;
use std::io::Write;
use std::path::Path;

/// Last section of every page: exit statuses, which are common to all commands.
const EXIT_STATUS: &str = r#".SH "EXIT STATUS"
.TP
0
Done.
.TP
1
Failed or cancelled; the guest stays at the source.
.TP
2
Wrong usage.
.TP
3
A postcopy migration awaits \fBvmferry recover\fR, or it is unknown whether the source or the target owns the guest.
.TP
4
The guest is lost: its source died in postcopy.
.TP
5
The guest asked for a reset.
.TP
6
The guest was not moved. It is stopped at the source because it could not be resumed: \fBvmferry resume\fR tries again.
"#;

/// Prints the completions of `shell`.
pub(crate) fn completions(shell: Shell) -> Result<Status> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "vmferry", &mut text);
    std::io::stdout().write_all(&text).context("completions to standard output")?;
    Ok(Status::Done)
}

/// Writes `vmferry.1` and `vmferry-COMMAND.1` into `folder`.
pub(crate) fn man(folder: &Path) -> Result<Status> {
    if !folder.is_dir() {
        bail!("{} is no folder: make it first", folder.display());
    }
    let mut command = Cli::command();
    command.build();
    page(&command, folder)?;
    command.get_subcommands().filter(|sub| !sub.is_hide_set()).try_for_each(|sub| page(sub, folder))?;
    Ok(Status::Done)
}

fn page(command: &clap::Command, folder: &Path) -> Result<()> {
    let man = clap_mangen::Man::new(command.clone());
    let path = folder.join(man.get_filename());
    let mut text = Vec::new();
    man.render(&mut text)?;
    text.extend_from_slice(EXIT_STATUS.as_bytes());
    std::fs::write(&path, text).with_context(|| format!("{}", path.display()))
}
