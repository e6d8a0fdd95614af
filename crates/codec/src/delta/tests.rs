use super::*;
use crate::hostile::Noise;
use proptest::prelude::*;
use vmferry_testkit::{Need, skip};

fn page(seed: u64) -> Page {
    let mut page = [0; PAGE_BYTES];
    Noise::new(seed).fill(&mut page);
    page
}

/// Returns the delta as encoded by every comparison that this processor has.
fn by_all(old: &Page, new: &Page, limit: usize) -> Option<Vec<u8>> {
    let mut encoded = Vec::new();
    for (_, comparer) in Comparer::all() {
        let Ok(comparer) = comparer else { continue };
        encoded.push(DeltaEncoder::new(comparer).encode(old, new, limit).map(<[u8]>::to_vec));
    }
    let first = encoded.swap_remove(0);
    assert!(encoded.iter().all(|other| *other == first), "comparisons differ");
    first
}

fn applied(delta: &[u8], old: &Page) -> Page {
    let (parsed, rest) = Delta::parse(delta).unwrap();
    assert_eq!((rest.len(), parsed.len()), (0, delta.len()));
    let mut page = *old;
    parsed.apply(&mut page);
    page
}

proptest! {
    #[test]
    fn delta_turns_the_old_page_into_the_new_one(
        seed: u64,
        changes in prop::collection::vec((0..PAGE_BYTES, 1u8..), 0..400),
        word_changes in prop::collection::vec((0..WORDS, any::<u64>()), 0..64),
        rest in prop::collection::vec(any::<u8>(), 0..9),
    ) {
        let old = page(seed);
        let mut new = old;
        changes.iter().for_each(|(at, by)| new[*at] ^= by);
        for (word, value) in word_changes {
            new[word * 8..word * 8 + 8].copy_from_slice(&value.to_le_bytes());
        }
        let delta = by_all(&old, &new, MAX_DELTA).expect("fewer than half of all words changed");
        prop_assert_eq!(applied(&delta, &old), new);
        // A delta ends by itself.
        let longer = [&delta[..], &rest].concat();
        let (parsed, after) = Delta::parse(&longer).unwrap();
        prop_assert_eq!((parsed.len(), after), (delta.len(), &rest[..]));
        // Twice has the effect of once.
        prop_assert_eq!(applied(&delta, &new), new);
        // The limit is exact.
        prop_assert_eq!(by_all(&old, &new, delta.len()), Some(delta.clone()));
        prop_assert_eq!(by_all(&old, &new, delta.len() - 1), None);
        for len in 0..delta.len() {
            let truncated = matches!(Delta::parse(&delta[..len]), Err(DeltaError::Truncated { .. }));
            prop_assert!(truncated, "{} of {}", len, delta.len());
        }
    }

    #[test]
    fn masks_of_bytes_are_those_of_a_loop(seed: u64, bytes: [u8; 8], kept: u8) {
        let bytes: [u8; 8] = std::array::from_fn(|at| if kept >> at & 1 == 1 { bytes[at] } else { 0 });
        let expected = (0..8).fold(0, |mask, at| mask | u8::from(bytes[at] != 0) << at);
        let old = seed.to_le_bytes();
        let new = std::array::from_fn(|at| old[at] ^ bytes[at]);
        prop_assert_eq!(changed_bytes(&old, &new), expected);
    }

    #[test]
    fn arbitrary_bytes_are_refused_or_change_only_the_named_words(bytes in prop::collection::vec(any::<u8>(), 0..700)) {
        crate::hostile::drive_deltas(&bytes);
    }
}

#[test]
fn deltas_have_the_documented_bytes() {
    let old = page(1);
    assert_eq!(by_all(&old, &old, MAX_DELTA).unwrap(), [0, 0]);
    // The lowest byte of word 65.
    let mut new = old;
    new[65 * 8] = new[65 * 8].wrapping_add(1);
    let delta = by_all(&old, &new, MAX_DELTA).unwrap();
    assert_eq!(delta, [1, 0b10, 0b10, 0, 0, 0, 0, 0, 0, 0, 1, new[65 * 8]]);
    // All bytes of word 511.
    let mut new = old;
    new[511 * 8..].iter_mut().for_each(|byte| *byte = !*byte);
    let delta = by_all(&old, &new, MAX_DELTA).unwrap();
    assert_eq!(delta[..10], [0, 0x80, 0, 0, 0, 0, 0, 0, 0, 0x80]);
    assert_eq!(delta[10..], new[511 * 8..]);
}

#[test]
fn pages_that_differ_too_much_have_no_delta() {
    let (old, new) = (page(1), page(2));
    assert_eq!(by_all(&old, &new, usize::MAX), None);
    assert_eq!(by_all(&old, &old, 1), None);
    assert_eq!(by_all(&old, &old, 2).unwrap(), [0, 0]);
    // One byte of each word fits into a delta, and all bytes of each word do not.
    let counters: Page = std::array::from_fn(|at| old[at].wrapping_add(u8::from(at % 8 == 0)));
    let delta = by_all(&old, &counters, MAX_DELTA).unwrap();
    assert_eq!((delta.len(), applied(&delta, &old)), (2 + 64 + 512 + 512, counters));
}

#[test]
fn damaged_deltas_are_refused() {
    let refused = |bytes: &[u8]| Delta::parse(bytes).map(|_| ()).unwrap_err();
    assert_eq!(refused(&[]), DeltaError::Truncated { needed: 2, len: 0 });
    assert_eq!(refused(&[2, 0]), DeltaError::Form { form: 2 });
    assert_eq!(refused(&[0, 4, 0, 0, 0, 0, 0, 0, 0, 0]), DeltaError::EmptyGroup { group: 2 });
    assert_eq!(refused(&[1, 1, 3, 0, 0, 0, 0, 0, 0, 0, 1, 0, 9]), DeltaError::EmptyWord { word: 1 });
    let whole = [&[0, 0xff][..], &[0xff; 64], &[7; PAGE_BYTES]].concat();
    assert_eq!(refused(&whole), DeltaError::TooLong { len: 2 + 64 + PAGE_BYTES });
}

#[test]
fn this_processor_has_vector_comparisons() {
    for (name, comparer) in Comparer::all() {
        if let Err(why) = comparer {
            skip(Need::Cpu, format!("delta comparison {name}: {why}"));
        }
    }
}
