//! File system with reflinks, for tests of copy-on-write copies.

use crate::{Folder, Need, skip};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

/// Size of the file systems in bytes, which is above the minimum of both.
const BYTES: u64 = 400 << 20;
/// Programs that make a file system with reflinks, with their options.
const MAKERS: [&[&str]; 2] = [&["mkfs.btrfs", "-q"], &["mkfs.xfs", "-q", "-m", "reflink=1"]];

/// New file system with reflinks, in a file that is mounted through a loop device. It is unmounted
/// when this value is dropped.
#[derive(Debug)]
pub struct Reflinks {
    // The mount point is in the folder, which is removed after the file system was unmounted.
    folder: Folder,
}

impl Reflinks {
    /// Makes and mounts a file system. The calling test is skipped if this is not possible, and
    /// must return then.
    ///
    /// # Panics
    /// Panics if the temporary folder cannot be written.
    pub fn new() -> Option<Self> {
        let folder = Folder::new();
        let image = folder.file("image");
        std::fs::File::create(&image).and_then(|file| file.set_len(BYTES)).expect("an image");
        let Some(made) = MAKERS.iter().find_map(|maker| {
            let output = Command::new(maker[0]).args(&maker[1..]).arg(&image).stdin(Stdio::null()).output();
            output.ok().filter(|output| output.status.success())
        }) else {
            skip(Need::Program, "mkfs.btrfs or mkfs.xfs");
            return None;
        };
        drop(made);
        let mount = folder.file("mount");
        std::fs::create_dir(&mount).expect("a mount point");
        let mounted = Command::new("mount").args(["-o", "loop"]).args([&image, &mount]).output();
        let why = |output: &Output| String::from_utf8_lossy(&output.stderr).trim().to_owned();
        match mounted {
            Ok(output) if output.status.success() => Some(Self { folder }),
            Ok(output) => {
                skip(Need::Root, format!("mount of a loop device: {}", why(&output)));
                None
            }
            Err(error) => {
                skip(Need::Program, format!("mount: {error}"));
                None
            }
        }
    }

    /// Returns the path of the file `name` in the file system.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.file("mount").join(name)
    }

    /// Returns the same path as text, for a command line.
    #[must_use]
    pub fn path(&self, name: &str) -> String {
        self.file(name).display().to_string()
    }
}

impl Drop for Reflinks {
    fn drop(&mut self) {
        let mount = self.folder.file("mount");
        // A process that a failed test has left may use the file system, so that it is only
        // detached.
        for options in [&[][..], &["-l"]] {
            let done = Command::new("umount").args(options).arg(&mount).output();
            if done.is_ok_and(|output| output.status.success()) {
                return;
            }
        }
    }
}
