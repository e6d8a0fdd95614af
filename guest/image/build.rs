//! Builds the bare-metal guest with a nested cargo and exports the path of the ELF file.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// The guest's only target. The host's own toolchain can build it, so nothing has to be installed.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Files and folders that affect the image, relative to `guest/`.
const SOURCES: [&str; 11] = [
    "Cargo.toml",
    "Cargo.lock",
    "build.rs",
    "link.ld",
    "src",
    "abi/Cargo.toml",
    "abi/src",
    "alloc/Cargo.toml",
    "alloc/src",
    "image/build.rs",
    ".cargo/config.toml",
];

fn main() -> ExitCode {
    match build() {
        Ok(elf) => {
            println!("cargo::rustc-env=VMFERRY_GUEST_ELF={}", elf.display());
            ExitCode::SUCCESS
        }
        Err(reason) => {
            println!("cargo::error={reason}");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<PathBuf, String> {
    let manifest = PathBuf::from(variable("CARGO_MANIFEST_DIR")?);
    let guest = manifest.parent().ok_or("guest/image has no parent folder")?;
    let target = Path::new(&variable("OUT_DIR")?).join("guest");
    for source in SOURCES {
        println!("cargo::rerun-if-changed={}", guest.join(source).display());
    }
    let output = cargo(guest, &target)?.output().map_err(|error| format!("cannot start cargo: {error}"))?;
    if !output.status.success() {
        let diagnostics = String::from_utf8_lossy(&output.stderr);
        for line in diagnostics.lines() {
            println!("cargo::warning={line}");
        }
        return Err(format!(
            "the bare-metal guest in {} was not built ({}); see the diagnostics above",
            guest.display(),
            output.status
        ));
    }
    let elf = target.join(TARGET).join("release/vmferry-guest");
    if elf.is_file() {
        Ok(elf)
    } else {
        Err(format!("cargo built the guest, but {} does not exist", elf.display()))
    }
}

/// Returns the nested build. It is always optimized (a guest in debug mode would measure the
/// compiler), never online (its dependencies are paths), and independent of how the outer build was
/// called.
fn cargo(guest: &Path, target: &Path) -> Result<Command, String> {
    let mut cargo = Command::new(variable("CARGO")?);
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        let inherited = text.starts_with("CARGO") && text != "CARGO_HOME";
        // RUSTFLAGS, RUSTC, RUSTC_WRAPPER (clippy sets it), RUSTDOCFLAGS. RUSTUP_* stay, because
        // they choose the toolchain.
        let compiler =
            text.starts_with("RUSTC") || text.starts_with("RUSTFLAGS") || text.starts_with("RUSTDOC");
        if inherited || compiler {
            cargo.env_remove(&name);
        }
    }
    cargo
        .current_dir(guest)
        // Overrides flags of a user's configuration, such as -Ctarget-cpu=native: the guest enables
        // no AVX.
        .env("CARGO_ENCODED_RUSTFLAGS", "-Crelocation-model=static")
        .args([
            "build",
            "--release",
            "--locked",
            "--offline",
            "--color=never",
            "--target",
            TARGET,
            "--target-dir",
        ])
        .arg(target);
    Ok(cargo)
}

fn variable(name: &str) -> Result<String, String> {
    env::var(name).map_err(|error| format!("{name}: {error}"))
}
