//! Test that the documentation names only benches and options of `vmferry-bench` that exist.

use crate::VMFERRY_BENCH;
use std::path::{Path, PathBuf};
use std::process::Command;

fn pages() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let docs = std::fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let pages = docs.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    pages.chain([root.join("README.md")]).collect()
}

#[test]
fn benches_and_options_that_are_shown_exist() {
    let help = Command::new(VMFERRY_BENCH).arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let known: Vec<&str> = help.split(|c: char| c != '-' && !c.is_alphanumeric()).collect();
    let mut looked = 0;
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap();
        for start in ["`vmferry-bench ", "\nvmferry-bench ", "-p vmferry-bench -- "] {
            for rest in text.split(start).skip(1) {
                let line = rest.split(['`', '\n']).next().unwrap_or_default();
                let words = line.split([' ', '[', ']', '|']).filter(|word| !word.is_empty());
                let (name, options) = (words.clone().next(), words.filter(|word| word.starts_with("--")));
                for word in name.into_iter().chain(options) {
                    assert!(known.contains(&word), "{}: {line}: no {word}", page.display());
                    looked += 1;
                }
            }
        }
    }
    assert!(looked > 10, "found only {looked} words");
}
