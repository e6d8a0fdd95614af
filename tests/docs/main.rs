//! Tests of the documentation: commands in pages run, named options exist, and links have targets.
//!
//! The info string of a block says how it is tested:
//!
//! | info | content | test |
//! |---|---|---|
//! | `sh` | commands | run in an empty folder; a line that begins with `vmferry run` has its own shell |
//! | `sh norun: WHY` | commands that need what a test does not have | options are looked up, and WHY is printed |
//! | `usage` | forms of commands | options are looked up |
//! | other | no commands | must not begin a line with `vmferry` or `cargo` |

mod page;
mod script;

use page::{Block, Kind, Page};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use vmferry_testkit::{Need, print_line, skip};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn pages() -> Vec<Page> {
    let root = root();
    let mut paths: Vec<_> = ["docs", "docs/decisions", "docs/proposals"]
        .into_iter()
        .flat_map(|folder| std::fs::read_dir(root.join(folder)).unwrap())
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .chain(["README.md", "CONTRIBUTING.md", "SECURITY.md", "lab/README.md"].map(|name| root.join(name)))
        .collect();
    paths.sort();
    assert!(paths.len() > 10, "{paths:?}");
    paths.iter().map(|path| Page::read(&root, path)).collect()
}

fn blocks(pages: &[Page]) -> impl Iterator<Item = (&Page, &Block)> {
    pages.iter().flat_map(|page| page.blocks.iter().map(move |block| (page, block)))
}

#[test]
fn every_block_of_commands_says_whether_it_can_be_run() {
    for (page, block) in blocks(&pages()) {
        // Skip the crate `vmferry` in a Cargo.toml.
        let is_command = |line: &str| line.starts_with("vmferry ") && !line.starts_with("vmferry = ");
        let commands = block.commands().any(|line| is_command(&line) || line.starts_with("cargo "));
        let marked = block.kind != Kind::Other;
        assert!(marked || !commands, "{}:{}: say `sh`, `sh norun: WHY` or `usage`", page.name, block.line);
    }
}

#[test]
fn blocks_of_commands_run_unchanged() {
    let kvm =
        std::fs::File::options().read(true).write(true).open("/dev/kvm").map_err(|error| error.to_string());
    let mut ran = 0;
    for (page, block) in blocks(&pages()) {
        let place = format!("{}:{}", page.name, block.line);
        match (&block.kind, &kvm) {
            (Kind::NotRun(why), _) => print_line(format!("{place}: not run: {why}")),
            (Kind::Run, Err(error)) if block.needs_kvm() => {
                skip(Need::Kvm, format!("{place}: /dev/kvm: {error}"));
            }
            (Kind::Run, _) => {
                script::run(&place, block);
                ran += 1;
            }
            _ => {}
        }
    }
    print_line(format!("{ran} blocks ran"));
    assert!(ran > 0, "no block was run at all");
}

/// The files and tests that the threat model names exist.
#[test]
fn files_and_tests_of_the_threat_model_exist() {
    let (text, mut file, mut found) = (std::fs::read_to_string(root().join("SECURITY.md")).unwrap(), None, 0);
    for (number, line) in (1..).zip(text.lines()) {
        for name in line.split('`').skip(1).step_by(2) {
            let path = root().join(name);
            if name.contains('/') {
                assert!(path.exists(), "SECURITY.md:{number}: there is no {name}");
                file = Some(path);
            } else if name.contains('_') && name.chars().all(|c| c.is_ascii_lowercase() || c == '_') {
                let file =
                    file.as_ref().unwrap_or_else(|| panic!("SECURITY.md:{number}: {name} of which file?"));
                let code = std::fs::read_to_string(file).unwrap();
                assert!(
                    code.contains(&format!("fn {name}(")),
                    "SECURITY.md:{number}: no {name} in {}",
                    file.display()
                );
                found += 1;
            }
        }
    }
    assert!(found > 20, "{found} tests are named");
}

/// Returns the help of each command, which contains its options.
fn options() -> BTreeMap<String, String> {
    let help = |args: &[&str]| {
        let out = Command::new(env!("CARGO_BIN_EXE_vmferry")).args(args).output().unwrap();
        assert!(out.status.success(), "{args:?}");
        String::from_utf8(out.stdout).unwrap()
    };
    let all = help(&["--help"]);
    // Each command has a line in a group. The groups end before the options.
    let lines = all.lines().take_while(|line| *line != "Options:");
    let lines = lines.filter_map(|line| line.strip_prefix("  ").filter(|line| !line.starts_with(' ')));
    let names = lines.filter_map(|line| line.split_whitespace().next());
    names.map(|name| (name.to_owned(), help(&[name, "--help"]))).collect()
}

#[test]
fn commands_and_options_in_pages_exist() {
    let known = options();
    assert!(known.contains_key("migrate"), "{:?}", known.keys());
    let mut looked = 0;
    for (page, block) in blocks(&pages()).filter(|(_, block)| block.kind != Kind::Other) {
        for line in block.commands() {
            let words = page::words(&line);
            if words.windows(2).any(|pair| pair == ["-p", "vmferry"]) {
                // Skip the crate of the same name.
                continue;
            }
            let mut rest = words.iter().map(String::as_str).skip_while(|word| *word != "vmferry").skip(1);
            let Some(name) = rest.next() else { continue };
            let place = format!("{}:{}: {line}", page.name, block.line);
            let help = known.get(name).unwrap_or_else(|| panic!("{place}: no command '{name}'"));
            for option in rest.filter(|word| word.starts_with("--")) {
                let option = option.split('=').next().unwrap();
                let there = help.split(|c: char| c != '-' && !c.is_alphanumeric()).any(|word| word == option);
                assert!(there, "{place}: `vmferry {name}` knows no {option}");
                looked += 1;
            }
        }
    }
    assert!(looked > 20, "{looked} options were found");
}

#[test]
fn links_have_existing_targets() {
    let root = root();
    for page in pages() {
        let folder = root.join(&page.name).parent().unwrap().to_owned();
        for link in page.links() {
            let target = link.split('#').next().unwrap();
            let elsewhere = target.is_empty() || target.contains("://") || target.starts_with("mailto:");
            assert!(elsewhere || folder.join(target).exists(), "{}: {link} is not there", page.name);
        }
    }
}

#[test]
fn book_contains_every_page() {
    let summary = Page::read(&root(), &root().join("docs/SUMMARY.md"));
    let listed: Vec<_> = summary.links().collect();
    for page in pages() {
        let Some(name) = page.name.strip_prefix("docs/").filter(|name| *name != "SUMMARY.md") else {
            continue;
        };
        assert!(listed.iter().any(|link| link == name), "docs/SUMMARY.md lacks {name}");
    }
}
