//! Option `--disk`.

use serde_json::{Value, json};
use std::ffi::OsString;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use vmferry_confine::Use;
use vmferry_vmm::{DiskOptions, VmHandle};

/// End of the option of a disk that the guest cannot write to.
const READ_ONLY: &str = ",readonly";

/// Disk of the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DiskArg {
    path: PathBuf,
    read_only: bool,
}

impl DiskArg {
    pub(crate) fn options(&self) -> DiskOptions {
        let mut options = DiskOptions::new(&self.path);
        options.read_only = self.read_only;
        options
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Returns the value of the option.
    pub(crate) fn text(&self) -> OsString {
        let mut text = self.path.clone().into_os_string();
        if self.read_only {
            text.push(READ_ONLY);
        }
        text
    }

    /// Returns the use of the file. A block device also gets `ioctl` requests for its size and for
    /// discards.
    pub(crate) fn use_for(&self) -> Use {
        let block = std::fs::metadata(&self.path).is_ok_and(|meta| meta.file_type().is_block_device());
        match self.read_only {
            true if block => Use::ReadDevice,
            true => Use::Read,
            _ if block => Use::Device,
            _ => Use::Write,
        }
    }
}

/// Parses a path with an optional `,readonly` at its end. Other commas belong to the path.
pub(crate) fn disk(text: &str) -> Result<DiskArg, String> {
    let (path, read_only) = match text.strip_suffix(READ_ONLY) {
        Some(path) => (path, true),
        None => (text, false),
    };
    if path.is_empty() {
        return Err("the file is missing; write FILE, or FILE,readonly".into());
    }
    Ok(DiskArg { path: path.into(), read_only })
}

/// Returns the state of a VM's disks, for `status`.
pub(crate) fn describe(vm: &VmHandle) -> Value {
    let one = |disk: vmferry_vmm::DiskStatus| {
        json!({
            "file": disk.path,
            "bytes": disk.size,
            "read_only": disk.read_only,
            "last_error": disk.last_error,
            "figures": disk.figures,
        })
    };
    vm.disk_status().into_iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_files_that_may_be_read_only() {
        let arg = |path: &str, read_only| Ok(DiskArg { path: path.into(), read_only });
        assert_eq!(disk("/a/b.img"), arg("/a/b.img", false));
        assert_eq!(disk("b.img,readonly"), arg("b.img", true));
        assert_eq!(disk("a,b"), arg("a,b", false));
        assert_eq!(disk("a,readonly,readonly"), arg("a,readonly", true));
        assert!(disk("").is_err() && disk(",readonly").is_err());
    }
}
