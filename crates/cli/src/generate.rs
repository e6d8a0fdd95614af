//! Files for packages and shells, generated from the command line: manual pages and completions.

use crate::Status;
use crate::args::Cli;
use anyhow::{Context, Result, bail};
use clap::CommandFactory;
use clap::builder::Resettable;
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
The guest is lost: the source gave it up after a postcopy handover.
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
        bail!("{} is not a folder: make it first", folder.display());
    }
    let mut command = Cli::command();
    command.build();
    page(&command, folder)?;
    command.get_subcommands().filter(|sub| !sub.is_hide_set()).try_for_each(|sub| page(sub, folder))?;
    Ok(Status::Done)
}

fn page(command: &clap::Command, folder: &Path) -> Result<()> {
    let examples = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
    // clap_mangen would fill the lines of the examples like a paragraph.
    let man = clap_mangen::Man::new(command.clone().after_long_help(Resettable::Reset));
    let path = folder.join(man.get_filename());
    let mut text = Vec::new();
    man.render(&mut text)?;
    if !examples.is_empty() {
        text.extend_from_slice(literal_section("EXAMPLES", &examples).as_bytes());
    }
    text.extend_from_slice(EXIT_STATUS.as_bytes());
    std::fs::write(&path, text).with_context(|| format!("{}", path.display()))
}

/// Returns a section of a manual page whose lines stay as they are in `text`.
fn literal_section(title: &str, text: &str) -> String {
    let mut section = format!(".SH {title}\n.nf\n");
    for line in text.trim_end().lines().filter(|line| *line != "Examples:") {
        // At the start of a line, `.` and `'` would begin a macro.
        let line = line.replace('\\', "\\e").replace('-', "\\-");
        section.push_str(if line.starts_with(['.', '\'']) { "\\&" } else { "" });
        section.push_str(&line);
        section.push('\n');
    }
    section + ".fi\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Arg, Command};
    use std::fmt::Write;

    /// Width of the lines of a page.
    const COLUMNS: usize = 100;
    const START: &str = "\
# Command line

This page lists all commands of `vmferry` with their arguments and options. The same text is in
`vmferry COMMAND --help` and in the manual pages (`vmferry man`).

Wrong usage ends with status 2. [The runbook](runbook.md#exit-statuses) explains the other exit
statuses.
";

    /// Appends `text`, wrapped. The first line begins with `first`, the others with `indent`.
    fn wrap(page: &mut String, first: &str, indent: &str, text: &str) {
        let (mut line, mut empty, mut quoted) = (first.to_owned(), true, false);
        for word in text.split_whitespace() {
            if !empty && line.len() + 1 + word.len() > COLUMNS {
                writeln!(page, "{line}").unwrap();
                (line, empty) = (indent.to_owned(), true);
            }
            line.push_str(if empty { "" } else { " " });
            // An option in a sentence is code, and so is its value after `=`.
            let option = word.trim_end_matches(['.', ',', ';', ')']);
            match option.starts_with("--") && !quoted {
                true => write!(line, "`{option}`{}", &word[option.len()..]).unwrap(),
                false => line.push_str(word),
            }
            quoted ^= word.matches('`').count() % 2 == 1;
            empty = false;
        }
        writeln!(page, "{line}").unwrap();
    }

    /// Appends each paragraph of `text`, indented.
    fn paragraphs(page: &mut String, first: &str, indent: &str, text: &str) {
        for (number, paragraph) in text.split("\n\n").filter(|text| !text.trim().is_empty()).enumerate() {
            if number > 0 {
                page.push('\n');
            }
            // Placeholders such as <URI> are no HTML.
            let text = paragraph.replace('<', "\\<");
            wrap(page, if number == 0 { first } else { indent }, indent, &text);
        }
    }

    fn argument(page: &mut String, arg: &Arg) {
        let short = arg.get_short().filter(|_| arg.get_long().is_some());
        let name = short.map_or_else(|| arg.to_string(), |short| format!("-{short}, {arg}"));
        let help = arg.get_long_help().or(arg.get_help()).map(ToString::to_string).unwrap_or_default();
        let (head, more) = help.split_once("\n\n").unwrap_or((&help, ""));
        let defaults: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
        let default = defaults.join(" ");
        let mut first = format!("`{name}`: {}", head.trim_end_matches('.').replace('<', "\\<"));
        if !default.is_empty() && arg.get_action().takes_values() {
            write!(first, " (default: `{default}`)").unwrap();
        }
        wrap(page, "- ", "  ", &first);
        let values = if arg.is_hide_possible_values_set() { Vec::new() } else { arg.get_possible_values() };
        let shown = values.iter().filter(|value| !value.is_hide_set());
        for value in shown.filter(|_| arg.get_action().takes_values()) {
            let meaning = value.get_help().map(|help| format!(": {help}")).unwrap_or_default();
            wrap(page, "  - ", "    ", &format!("`{}`{meaning}", value.get_name()));
        }
        if !more.is_empty() {
            page.push('\n');
            paragraphs(page, "  ", "  ", more);
        }
    }

    fn command(page: &mut String, path: &str, command: &Command) {
        writeln!(page, "\n## {path}\n").unwrap();
        let about = command.get_long_about().or(command.get_about()).map(ToString::to_string);
        paragraphs(page, "", "", &about.unwrap_or_default());
        let usage = command.clone().render_usage().to_string();
        writeln!(page, "\n```usage\n{}\n```", usage.trim_start_matches("Usage: ")).unwrap();
        let shown = || command.get_arguments().filter(|arg| !arg.is_hide_set() && arg.get_id() != "help");
        let heading = |arg: &Arg| match arg.get_help_heading() {
            Some(heading) => heading.to_owned(),
            None if arg.is_positional() => "Arguments".to_owned(),
            None => "Options".to_owned(),
        };
        let mut headings: Vec<String> = Vec::new();
        for arg in shown() {
            if !headings.contains(&heading(arg)) {
                headings.push(heading(arg));
            }
        }
        headings.sort_by_key(|heading| heading != "Arguments");
        for name in headings {
            writeln!(page, "\n### {name} of `{path}`\n").unwrap();
            shown().filter(|arg| heading(arg) == name).for_each(|arg| argument(page, arg));
        }
        let examples = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
        if !examples.is_empty() {
            let lines = examples.trim().lines().filter(|line| *line != "Examples:");
            let lines: Vec<_> = lines.map(|line| line.strip_prefix("  ").unwrap_or(line)).collect();
            writeln!(page, "\nExamples:\n\n```usage\n{}\n```", lines.join("\n")).unwrap();
        }
        for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help") {
            self::command(page, &format!("{path} {}", sub.get_name()), sub);
        }
    }

    #[test]
    fn examples_of_a_manual_page_keep_their_lines() {
        let section = literal_section("EXAMPLES", "Examples:\n  vmferry run --cpus 2 \\\n  .hidden\n");
        assert_eq!(section, ".SH EXAMPLES\n.nf\n  vmferry run \\-\\-cpus 2 \\e\n  .hidden\n.fi\n");
        assert!(literal_section("A", ".b\n").contains("\n\\&.b\n"));
    }

    /// `docs/cli.md` is this text. Run the test with `VMFERRY_UPDATE_DOCS=1` to write the page.
    #[test]
    #[cfg(feature = "top")]
    fn reference_page_has_every_command_and_option() {
        let mut cli = Cli::command();
        cli.build();
        let mut page = START.to_owned();
        for sub in cli.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help") {
            command(&mut page, &format!("vmferry {}", sub.get_name()), sub);
        }
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/cli.md");
        if std::env::var_os("VMFERRY_UPDATE_DOCS").is_some() {
            std::fs::write(&path, &page).unwrap();
        }
        let written = std::fs::read_to_string(&path).unwrap_or_default();
        let differs = page.lines().zip(written.lines()).find(|(new, old)| new != old);
        assert!(
            page == written,
            "docs/cli.md is not the command's help ({differs:?}): run this test with VMFERRY_UPDATE_DOCS=1"
        );
    }
}
