//! `cargo xtask api`: comparison of the public API of the library crates with the listings in
//! `docs/api`.
//!
//! rustdoc describes a crate as JSON, and the crate `public-api` makes one line of each public
//! item. The JSON is unstable: stable Rust writes it only for crates that `RUSTC_BOOTSTRAP` names,
//! and its format changes between versions. If `public-api` cannot read the JSON of this Rust, the
//! comparison is skipped with a message.

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{create_dir_all, read_dir, read_to_string, remove_file, write};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Library that re-exports the others. Its features decide which features the listings show.
const FACADE: &str = "vmferry";
/// Folder of the listings, one file for each library.
const FOLDER: &str = "docs/api";

/// Compares the public API of each library with its listing, or records it. Returns whether they
/// agree.
pub(crate) fn api(update: bool) -> Result<bool> {
    let root = root();
    let listings = match listings(&root)? {
        Listings::Found(listings) => listings,
        Listings::Unreadable(why) => {
            println!("skipped: program: api: {why}");
            return Ok(!update);
        }
    };
    if update { record(&root.join(FOLDER), &listings).map(|()| true) } else { compare(&root, &listings) }
}

/// Returns the folder of the workspace.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("lab is a folder of the workspace").to_owned()
}

/// Listings of the libraries, as this Rust describes them.
enum Listings {
    /// The listing of each library, by the name of its package.
    Found(BTreeMap<String, String>),
    /// The reason why `public-api` cannot read what this Rust writes.
    Unreadable(String),
}

fn listings(root: &Path) -> Result<Listings> {
    let metadata = output(cargo(root).args(["metadata", "--format-version=1", "--no-deps", "--locked"]))?;
    let metadata: Value = serde_json::from_str(&metadata).context("cargo metadata")?;
    let libraries = libraries(&metadata);
    ensure!(libraries.contains_key(FACADE), "cargo metadata names no library {FACADE}");
    let target = root.join("target/api");
    document(root, &target, &libraries)?;
    let mut listings = BTreeMap::new();
    for library in libraries.into_keys() {
        let json = target.join("doc").join(format!("{}.json", library.replace('-', "_")));
        let built = public_api::Builder::from_rustdoc_json(&json).omit_blanket_impls(true).build();
        match built {
            Ok(api) => listings.insert(library, listing(&api.to_string())),
            Err(public_api::Error::SerdeJsonError(error)) => {
                let version = output(Command::new("rustc").arg("--version"))?;
                let why = format!("public-api cannot read the JSON of {}: {error}", version.trim());
                return Ok(Listings::Unreadable(why));
            }
            Err(error) => return Err(error).with_context(|| json.display().to_string()),
        };
    }
    Ok(Listings::Found(listings))
}

/// Returns the packages that are published, and the features of each.
fn libraries(metadata: &Value) -> BTreeMap<String, Vec<String>> {
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let published = packages.filter(|package| package["publish"].is_null());
    let described = published.filter_map(|package| {
        let features = package["features"].as_object().into_iter().flat_map(|features| features.keys());
        Some((package["name"].as_str()?.to_owned(), features.cloned().collect()))
    });
    described.collect()
}

/// Makes rustdoc describe `libraries`, with all features of the facade, in the folder `target`.
///
/// One call describes all libraries, so that each has the features that the facade turns on. The
/// folder differs from that of other builds. Otherwise build scripts that read `RUSTC_BOOTSTRAP`
/// would run again there.
fn document(root: &Path, target: &Path, libraries: &BTreeMap<String, Vec<String>>) -> Result<()> {
    let features: Vec<String> =
        libraries[FACADE].iter().map(|feature| format!("{FACADE}/{feature}")).collect();
    let crates: Vec<String> = libraries.keys().map(|library| library.replace('-', "_")).collect();
    let mut cargo = cargo(root);
    cargo.args(["doc", "--quiet", "--locked", "--no-deps", "--lib", "--features", &features.join(",")]);
    cargo.args(libraries.keys().map(|library| format!("--package={library}")));
    cargo.arg("--target-dir").arg(target);
    cargo.env("RUSTC_BOOTSTRAP", crates.join(","));
    cargo.env("RUSTDOCFLAGS", "-Zunstable-options --output-format=json --cap-lints=allow");
    output(&mut cargo).map(drop)
}

/// Returns the lines of `items` that are recorded.
///
/// A type has an automatic trait unless one of its parts forbids the trait. Only the exceptions are
/// recorded, and only for `Send` and `Sync`, because the other traits change with each version of
/// Rust.
fn listing(items: &str) -> String {
    let recorded = items.lines().filter(|line| match automatic(line) {
        None => true,
        Some("Send" | "Sync") => line.contains('!') || line.contains(" where "),
        Some(_) => false,
    });
    recorded.fold(String::new(), |listing, line| listing + line + "\n")
}

/// Returns the automatic trait whose implementation `line` is.
fn automatic(line: &str) -> Option<&str> {
    const AUTOMATIC: [&str; 7] =
        ["Send", "Sync", "Unpin", "UnsafeUnpin", "Freeze", "UnwindSafe", "RefUnwindSafe"];
    let implemented = line.strip_prefix("impl")?.split(" for ").next()?;
    let name = implemented.rsplit("::").next()?;
    AUTOMATIC.contains(&name).then_some(name)
}

/// Writes the listings, and deletes those of crates that are no longer libraries.
fn record(folder: &Path, listings: &BTreeMap<String, String>) -> Result<()> {
    create_dir_all(folder).with_context(|| folder.display().to_string())?;
    for (library, listing) in listings {
        let path = folder.join(format!("{library}.txt"));
        write(&path, listing).with_context(|| path.display().to_string())?;
    }
    for library in recorded(folder)?.into_keys().filter(|library| !listings.contains_key(library)) {
        let path = folder.join(format!("{library}.txt"));
        remove_file(&path).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// Returns the recorded listings by the name of the library.
fn recorded(folder: &Path) -> Result<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    for entry in read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "txt") {
            let library = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let listing = read_to_string(&path).with_context(|| path.display().to_string())?;
            found.insert(library, listing);
        }
    }
    Ok(found)
}

/// Prints the differences, and returns whether there are none.
fn compare(root: &Path, listings: &BTreeMap<String, String>) -> Result<bool> {
    let recorded = recorded(&root.join(FOLDER))?;
    let mut differences = String::new();
    let libraries: std::collections::BTreeSet<_> = recorded.keys().chain(listings.keys()).collect();
    for library in libraries {
        let side = |listings: &BTreeMap<String, String>| listings.get(library).cloned().unwrap_or_default();
        let difference = difference(&side(&recorded), &side(listings));
        if !difference.is_empty() {
            write!(differences, "{FOLDER}/{library}.txt\n{difference}")?;
        }
    }
    if !differences.is_empty() {
        eprint!("{differences}");
        eprintln!(
            "api: the public API differs from the recorded one; if this is intended, run cargo xtask api --update"
        );
    }
    Ok(differences.is_empty())
}

/// Returns the lines of `before` that are missing in `after`, and the reverse.
fn difference(before: &str, after: &str) -> String {
    let mut counts = BTreeMap::<&str, i32>::new();
    before.lines().for_each(|line| *counts.entry(line).or_default() -= 1);
    after.lines().for_each(|line| *counts.entry(line).or_default() += 1);
    let changed = counts.into_iter().filter(|(_, count)| *count != 0);
    changed
        .fold(String::new(), |text, (line, count)| text + if count < 0 { "- " } else { "+ " } + line + "\n")
}

/// Returns the cargo command that runs this program, in the folder `root`.
fn cargo(root: &Path) -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(root);
    cargo
}

/// Returns the output of `command`. Its messages go to the standard error of this process.
fn output(command: &mut Command) -> Result<String> {
    let ran = command.stderr(std::process::Stdio::inherit()).output();
    let ran = ran.with_context(|| format!("cannot start {}", command.get_program().display()))?;
    if !ran.status.success() {
        bail!("{} ended with {}", command.get_program().display(), ran.status);
    }
    String::from_utf8(ran.stdout).with_context(|| command.get_program().display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_exceptions_from_automatic_traits_are_recorded() {
        let kept = "pub struct a::B\nimpl !core::marker::Sync for a::B\n\
            impl<T> core::marker::Send for a::C<T> where T: core::marker::Send\n\
            impl core::marker::Copy for a::B\nimpl a::B\n";
        let dropped = "impl core::marker::Send for a::B\nimpl core::marker::Freeze for a::B\n\
            impl !core::panic::unwind_safe::UnwindSafe for a::B\n";
        assert_eq!(listing(&format!("{dropped}{kept}")), kept);
    }

    #[test]
    fn lines_of_one_side_only_are_differences() {
        assert_eq!(difference("a\nb\nb\n", "b\nb\na\n"), "");
        assert_eq!(difference("a\nb\nb\n", "b\nc\n"), "- a\n- b\n+ c\n");
    }

    #[test]
    fn unpublished_packages_are_not_libraries() {
        let metadata = serde_json::json!({"packages": [
            {"name": "a", "publish": null, "features": {"x": [], "default": ["x"]}},
            {"name": "b", "publish": [], "features": {}},
        ]});
        let expected = [("a".to_owned(), vec!["default".to_owned(), "x".to_owned()])];
        assert_eq!(libraries(&metadata), expected.into());
    }
}
