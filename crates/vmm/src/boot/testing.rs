//! A small ELF file for tests.

/// What goes into the file; the default is a kernel that halts for good.
pub(crate) struct TestElf {
    pub(crate) machine: u16,
    pub(crate) addr: u64,
    pub(crate) mem_len: u64,
    pub(crate) note: bool,
    pub(crate) code: Vec<u8>,
}

impl Default for TestElf {
    fn default() -> Self {
        // hlt; jmp back to it.
        Self { machine: 62, addr: 0x10_0000, mem_len: 0x100, note: true, code: vec![0xf4, 0xeb, 0xfd, 0x90] }
    }
}

impl TestElf {
    /// A kernel whose entry point, 16 bytes into the segment, is the start of `code` (32-bit, flat segments).
    pub(crate) fn with_entry(code: &[u8]) -> Self {
        let mut all = vec![0x90; 16];
        all.extend_from_slice(code);
        Self { mem_len: 0x1000.max(all.len() as u64), code: all, ..Self::default() }
    }

    /// The file: header, two program headers, the note, the code.
    pub(crate) fn build(&self) -> Vec<u8> {
        let mut note = Vec::new();
        for word in [4u32, 4, if self.note { 18 } else { 19 }] {
            note.extend_from_slice(&word.to_le_bytes());
        }
        note.extend_from_slice(b"Xen\0");
        note.extend_from_slice(&0x10_0010u32.to_le_bytes());
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
