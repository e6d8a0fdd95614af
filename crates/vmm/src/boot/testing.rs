//! Small kernel images for tests.

/// Content of an ELF file. The default is a kernel that halts for ever.
pub(crate) struct TestElf {
    pub(crate) machine: u16,
    pub(crate) addr: u64,
    pub(crate) mem_len: u64,
    pub(crate) note: bool,
    /// True to add a note of Linux.
    pub(crate) linux: bool,
    pub(crate) code: Vec<u8>,
}

impl Default for TestElf {
    fn default() -> Self {
        // hlt; jmp back to it.
        let code = vec![0xf4, 0xeb, 0xfd, 0x90];
        Self { machine: 62, addr: 0x10_0000, mem_len: 0x100, note: true, linux: false, code }
    }
}

impl TestElf {
    /// Returns a kernel whose entry point, 16 bytes into the segment, is the start of `code`
    /// (32-bit, flat segments).
    pub(crate) fn with_entry(code: &[u8]) -> Self {
        let mut all = vec![0x90; 16];
        all.extend_from_slice(code);
        Self { mem_len: 0x1000.max(all.len() as u64), code: all, ..Self::default() }
    }

    /// Returns the file: header, two program headers, the note, the code.
    pub(crate) fn build(&self) -> Vec<u8> {
        let mut note = Vec::new();
        for word in [4u32, 4, if self.note { 18 } else { 19 }] {
            note.extend_from_slice(&word.to_le_bytes());
        }
        note.extend_from_slice(b"Xen\0");
        note.extend_from_slice(&0x10_0010u32.to_le_bytes());
        if self.linux {
            for word in [6u32, 1, 0x101] {
                note.extend_from_slice(&word.to_le_bytes());
            }
            note.extend_from_slice(b"Linux\0\0\0\x01\0\0\0");
        }
        let note_at = 64 + 2 * 56;
        let code_at = note_at + note.len() as u64;

        let mut file = b"\x7fELF\x02\x01\x01".to_vec();
        file.resize(16, 0);
        file.extend_from_slice(&2u16.to_le_bytes());
        file.extend_from_slice(&self.machine.to_le_bytes());
        file.extend_from_slice(&1u32.to_le_bytes());
        for word in [self.addr, 64, 0] {
            file.extend_from_slice(&word.to_le_bytes());
        }
        file.extend_from_slice(&0u32.to_le_bytes());
        for half in [64u16, 56, 2, 0, 0, 0] {
            file.extend_from_slice(&half.to_le_bytes());
        }
        let mut segment = |kind: u32, at: u64, addr: u64, file_len: u64, mem_len: u64| {
            file.extend_from_slice(&kind.to_le_bytes());
            file.extend_from_slice(&5u32.to_le_bytes());
            for word in [at, addr, addr, file_len, mem_len, 4] {
                file.extend_from_slice(&word.to_le_bytes());
            }
        };
        segment(4, note_at, 0, note.len() as u64, note.len() as u64);
        segment(1, code_at, self.addr, self.code.len() as u64, self.mem_len);
        file.extend_from_slice(&note);
        file.extend_from_slice(&self.code);
        file
    }
}

/// Content of a bzImage. The default halts for ever.
pub(crate) struct TestBzImage {
    pub(crate) version: u16,
    pub(crate) xloadflags: u16,
    pub(crate) relocatable: bool,
    pub(crate) preferred: u64,
    pub(crate) init_size: u32,
    pub(crate) cmdline_size: u32,
    pub(crate) initrd_addr_max: u32,
    pub(crate) code: Vec<u8>,
}

impl Default for TestBzImage {
    fn default() -> Self {
        Self {
            version: 0x20f,
            xloadflags: 1,
            relocatable: true,
            preferred: 16 << 20,
            init_size: 1 << 20,
            cmdline_size: 2047,
            initrd_addr_max: 0x7fff_ffff,
            code: vec![0xf4, 0xeb, 0xfd],
        }
    }
}

impl TestBzImage {
    /// Returns the file: boot sector, a sector of setup code, and the kernel, whose 64-bit entry
    /// point, 0x200 bytes into it, is `code`.
    pub(crate) fn build(&self) -> Vec<u8> {
        let mut file = vec![0; 0x400 + 0x200];
        file.extend_from_slice(&self.code);
        file.resize(file.len().next_multiple_of(16), 0x90);
        let paragraphs = u32::try_from((file.len() - 0x400) / 16).unwrap();
        let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
        put(0x1f1, &[1]);
        put(0x1f4, &paragraphs.to_le_bytes());
        put(0x1fe, &0xaa55u16.to_le_bytes());
        put(0x200, &[0xeb, 0x66]);
        put(0x202, b"HdrS");
        put(0x206, &self.version.to_le_bytes());
        put(0x211, &[1]);
        put(0x214, &0x10_0000u32.to_le_bytes());
        put(0x22c, &self.initrd_addr_max.to_le_bytes());
        put(0x230, &0x20_0000u32.to_le_bytes());
        put(0x234, &[self.relocatable.into(), 21]);
        put(0x236, &self.xloadflags.to_le_bytes());
        put(0x238, &self.cmdline_size.to_le_bytes());
        put(0x258, &self.preferred.to_le_bytes());
        put(0x260, &self.init_size.to_le_bytes());
        file
    }
}
