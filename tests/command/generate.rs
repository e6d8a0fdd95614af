//! Manual pages and completions for packages and shells.

use crate::support::{Folder, Need, code, errors, skip, vmferry};
use std::process::Command;

#[test]
fn manual_pages_name_every_command() {
    let folder = Folder::new();
    let made = vmferry(&["man", &folder.path("")]);
    assert_eq!(code(&made), 0, "{}", errors(&made));
    let main = std::fs::read_to_string(folder.path("vmferry.1")).unwrap();
    for name in ["run", "migrate", "recover", "check"] {
        assert!(main.contains(&format!("vmferry\\-{name}(1)")), "{name}: {main}");
        let page = std::fs::read_to_string(folder.path(&format!("vmferry-{name}.1"))).unwrap();
        assert!(page.contains("EXIT STATUS"), "{name}");
    }
}

#[test]
fn manual_pages_need_a_folder() {
    let folder = Folder::new();
    let refused = vmferry(&["man", &folder.path("nowhere")]);
    assert_eq!(code(&refused), 1);
    assert!(errors(&refused).contains("nowhere is not a folder: make it first"), "{}", errors(&refused));
}

#[test]
fn completions_are_valid_scripts_and_complete_options() {
    for shell in ["bash", "zsh", "fish"] {
        let made = vmferry(&["completions", shell]);
        assert_eq!(code(&made), 0, "{}", errors(&made));
        let folder = Folder::new();
        std::fs::write(folder.path("words"), &made.stdout).unwrap();
        match Command::new(shell).arg("-n").arg(folder.path("words")).output() {
            Ok(checked) => assert!(checked.status.success(), "{shell}: {checked:?}"),
            Err(error) => skip(Need::Program, format!("{shell}: {error}")),
        }
    }
    // Completion of `vmferry migrate --mo`.
    let script = r#"source /dev/stdin <<<"$1"; COMP_WORDS=(vmferry migrate --mo) COMP_CWORD=2
        _vmferry vmferry --mo migrate; printf '%s\n' "${COMPREPLY[@]}""#;
    let words = String::from_utf8(vmferry(&["completions", "bash"]).stdout).unwrap();
    let asked = Command::new("bash").args(["-c", script, "bash", &words]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&asked.stdout).trim(), "--mode", "{asked:?}");
}
