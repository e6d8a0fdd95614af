//! Archives that the kernel unpacks as its first root: cpio, "newc" (Linux,
//! Documentation/driver-api/early-userspace/buffer-format.rst).

use std::collections::BTreeSet;

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const LINK: u32 = 0o120_777;
const CHARACTER_DEVICE: u32 = 0o020_600;

/// Archive in memory.
#[derive(Debug, Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    folders: BTreeSet<String>,
}

impl Archive {
    /// Creates an archive with the usual folders, and a console for the time before devtmpfs is
    /// mounted.
    pub(crate) fn root() -> Self {
        let mut archive = Self::default();
        for folder in ["dev", "proc", "sys", "tmp", "run", "bin", "etc", "root"] {
            archive.folder(folder);
        }
        archive.entry("dev/console", CHARACTER_DEVICE, (5, 1), b"");
        archive
    }

    /// Adds a folder and its parents.
    pub(crate) fn folder(&mut self, path: &str) {
        if path.is_empty() || !self.folders.insert(path.to_owned()) {
            return;
        }
        if let Some((above, _)) = path.rsplit_once('/') {
            self.folder(above);
        }
        self.entry(path, FOLDER, (0, 0), b"");
    }

    /// Adds an executable file. All files of the lab are executable.
    pub(crate) fn file(&mut self, path: &str, content: &[u8]) {
        if let Some((above, _)) = path.rsplit_once('/') {
            self.folder(above);
        }
        self.entry(path, PROGRAM, (0, 0), content);
    }

    /// Adds a symbolic link.
    pub(crate) fn link(&mut self, path: &str, to: &str) {
        self.entry(path, LINK, (0, 0), to.as_bytes());
    }

    /// Returns the complete archive.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), b"");
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(content.len()).expect("a file of the lab has less than 4 GiB");
        let name_size = u32::try_from(path.len() + 1).expect("a path of the lab is short");
        let fields = [self.entries, mode, 0, 0, 1, 0, size, 0, 0, device.0, device.1, name_size, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archive_has_the_layout_that_the_kernel_reads() {
        let mut archive = Archive::default();
        archive.file("a/b", b"hello");
        let bytes = archive.finish();
        let text = String::from_utf8_lossy(&bytes);
        assert_eq!(bytes.len() % 4, 0);
        let folder = text.find("a\0").unwrap();
        let file = text.find("a/b\0").unwrap();
        assert!(folder < file, "the folder comes before its content");
        assert_eq!(folder, 110, "a header has 110 bytes");
        let header = &text[file - 110..file];
        assert_eq!(&header[..6], "070701");
        assert_eq!(&header[6 + 6 * 8..][..8], "00000005", "the file's size");
        assert_eq!(&header[6 + 11 * 8..][..8], "00000004", "the name's size, with its NUL");
        let content = text.find("hello").unwrap();
        assert_eq!((content, content % 4), ((file + 4).next_multiple_of(4), 0));
        assert!(text.ends_with("TRAILER!!!\0") || text.trim_end_matches('\0').ends_with("TRAILER!!!"));
    }
}
