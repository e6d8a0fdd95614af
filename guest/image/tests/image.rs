//! Tests that the image has the format that boot loaders expect.

use vmferry_guest_abi::{ALLOC_STATS_BYTES, STATS_BYTES, STATS_GPA};
use vmferry_guest_image::ELF;

const PT_LOAD: u64 = 1;
const PT_NOTE: u64 = 4;

fn field(offset: u64, bytes: u64) -> u64 {
    let (offset, bytes) = (usize::try_from(offset).unwrap(), usize::try_from(bytes).unwrap());
    ELF[offset..offset + bytes].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

/// Returns type, file offset, physical address, file size and memory size of each program header.
fn segments() -> Vec<[u64; 5]> {
    let (table, entry, count) = (field(32, 8), field(54, 2), field(56, 2));
    (0..count)
        .map(|index| table + index * entry)
        .map(|at| [field(at, 4), field(at + 8, 8), field(at + 24, 8), field(at + 32, 8), field(at + 40, 8)])
        .collect()
}

#[test]
fn image_is_a_static_executable_for_x86_64() {
    assert_eq!(ELF[..6], *b"\x7fELF\x02\x01");
    assert_eq!((field(16, 2), field(18, 2)), (2, 62), "ET_EXEC, EM_X86_64");
    assert!(
        !segments().iter().any(|[kind, ..]| (2..=3).contains(kind)),
        "no dynamic section, no interpreter"
    );
}

#[test]
fn image_has_a_pvh_entry_inside_its_code() {
    let notes: Vec<_> = segments().into_iter().filter(|[kind, ..]| *kind == PT_NOTE).collect();
    let [[_, at, ..]] = notes[..] else { panic!("one note segment, not {}", notes.len()) };
    assert_eq!((field(at, 4), field(at + 4, 4), field(at + 8, 4)), (4, 8, 18), "XEN_ELFNOTE_PHYS32_ENTRY");
    assert_eq!(field(at + 12, 4), u64::from(u32::from_le_bytes(*b"Xen\0")));
    let entry = field(at + 16, 8);
    let inside =
        |[kind, _, start, bytes, _]: &[u64; 5]| *kind == PT_LOAD && (*start..start + bytes).contains(&entry);
    assert!(segments().iter().any(inside), "{entry:#x}");
}

#[test]
fn image_lies_between_1_and_4_mib_with_the_statistics_first() {
    let loads: Vec<_> = segments().into_iter().filter(|[kind, ..]| *kind == PT_LOAD).collect();
    assert_eq!((loads[0][2], loads[0][4]), (STATS_GPA, STATS_BYTES + ALLOC_STATS_BYTES));
    for [_, _, start, file, memory] in loads {
        assert!(start >= 1 << 20 && start + memory <= 4 << 20 && file <= memory, "{start:#x} {memory:#x}");
    }
}
